"""The walk itself: inputs, outputs that share memory or must not, writes to inputs, calls, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from check import check, lowered
from torch.fx.experimental.proxy_tensor import make_fx

from hotloop.config import Config
from hotloop.dumps import Log
from hotloop.errors import CompileError
from hotloop.ir.interpret import run_program
from hotloop.ir.loops import Extern, ViewRef
from hotloop.lower import lower as walk

CONFIG = Config()
X = torch.randn(4, 6)


def lower_graph(gm: torch.fx.GraphModule) -> Any:
    return walk.lower(gm, CONFIG, Log(CONFIG))


def refs(program: Any) -> list[ViewRef]:
    return [o for o in program.outputs if isinstance(o, ViewRef)]


def test_views_of_inputs_are_returned_as_views() -> None:
    program = check(lambda x: (x.t(), x[1:, ::2], x), X)
    assert not program.ops and {r.buffer for r in refs(program)} == {"in0"}


def test_results_that_share_memory_in_eager_share_it() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y, y.t()

    program = check(f, X)
    assert len({r.buffer for r in refs(program)}) == 1


def test_results_that_are_copies_in_eager_are_copies() -> None:
    """A reshape that eager has to copy is a view here until it leaves the graph."""
    program = check(lambda x: x.t().reshape(-1), X)
    assert refs(program)[0].buffer != "in0"
    program = check(lambda x: (x.clone(), x.clone()), X)
    assert len({r.buffer for r in refs(program)} | {"in0"}) == 3


def test_outputs_are_marked() -> None:
    program = lowered(lambda x: (x * 2).exp(), X)
    assert [program.buffers[op.out].kind for op in program.ops] == ["temp", "output"]


def test_expanded_results_keep_eagers_strides() -> None:
    check(lambda x: (x * 2)[:, :1].expand(4, 6), X)
    check(lambda x: torch.ones(1).expand(3), X)


def test_a_written_input_is_written_last() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x + y
        x.copy_(z * 2)
        return z

    gm = make_fx(f, tracing_mode="fake")(X, X.clone())
    program = lower_graph(gm)
    x, y = X.clone(), torch.randn(4, 6)
    expected_x = (x + y) * 2
    (z,) = run_program(program, [x, y])
    torch.testing.assert_close(x, expected_x)
    torch.testing.assert_close(z, expected_x / 2)


def test_an_input_overwritten_by_its_own_view_is_read_first() -> None:
    gm = make_fx(lambda x: x.copy_(x.flip(0)), tracing_mode="fake")(X)
    x = X.clone()
    run_program(lower_graph(gm), [x])
    torch.testing.assert_close(x, X.flip(0))


def test_numbers_and_absent_results() -> None:
    graph = torch.fx.Graph()
    x, n = graph.placeholder("x"), graph.placeholder("n")
    x.meta["val"], n.meta["val"] = torch.empty(3), 5
    y = graph.call_function(torch.ops.aten.add.Tensor, (x, n))
    y.meta["val"] = torch.empty(3)
    graph.output((y, n, None, 2.5))
    program = lower_graph(torch.fx.GraphModule(torch.nn.Module(), graph))
    assert program.inputs == ("in0", None) and program.outputs[1:] == (5, None, 2.5)
    got = run_program(program, [torch.zeros(3), 5])
    torch.testing.assert_close(got[0], torch.full((3,), 5.0))


def test_constants_of_the_graph() -> None:
    gm = make_fx(lambda x: x * 2)(X)
    gm.register_buffer("weight", torch.arange(6.0))
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    with gm.graph.inserting_before(node):
        weight = gm.graph.get_attr("weight")
    node.args = (node.args[0], weight)
    node.meta["val"] = torch.empty(4, 6)
    next(iter(gm.graph.nodes)).meta["val"] = X
    program = lower_graph(gm)
    assert list(program.constants) == ["const0"]
    torch.testing.assert_close(run_program(program, [X])[0], X * torch.arange(6.0))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.sort(x.view(-1, 1).repeat(1, 40), dim=1, stable=True),
        lambda x: torch.sort(x.flatten().repeat(4))[0] * 2,
        lambda x: torch.topk(x.t(), 2)[0] + 1,
        lambda x: torch.cumsum(x.t() * 2, 0),
        lambda x: torch.mm(x, x.t()) + 1,
        lambda x: torch.mm((x[:, None] * torch.ones(1, 2, 1)).reshape(8, 6), x.t()),
        lambda x: torch.linalg.qr(x)[1].abs(),
        lambda x: torch.cummax(x, 1)[0],
        lambda x: torch.nn.functional.conv1d(x[None], x.view(2, 4, 3)).relu(),
        lambda x: torch.fft.fft(x).abs(),
    ],
)
def test_calls_through_pytorch(f: Any) -> None:
    check(f, X, own=False)


def test_a_call_sees_eagers_strides() -> None:
    """The strides of a call's results may follow its arguments'."""
    x = torch.randn(1, 3, 50, 50).to(memory_format=torch.channels_last)
    program = check(lambda t: torch.nn.functional.conv2d(t * 2, torch.ones(4, 3, 2, 2)) + 1, x, own=False)
    call = next(op for op in program.ops if isinstance(op, Extern))
    assert call.args[0].strides == x.stride()


def test_results_that_nobody_reads_have_no_buffer() -> None:
    program = lowered(lambda x: torch.topk(x, 2, 1)[1], X)
    assert program.ops[0].outs[0] is None and program.ops[0].outs[1] is not None


def test_errors_name_the_operator_and_the_stage() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X
    y = graph.call_function(torch.ops.aten.add.Tensor, (x, x))  # no meta
    graph.output((y,))
    with pytest.raises(CompileError, match=r"lower.*[\s\S]*aten\.add\.Tensor"):
        lower_graph(torch.fx.GraphModule(torch.nn.Module(), graph))
