"""The schedule computes what the loop program computes: judged by the kernel interpreter, arena included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hotloop import compat
from hotloop.config import Config
from hotloop.dumps import Log
from hotloop.graph import passes
from hotloop.graph.decompositions import decompositions
from hotloop.ir.interpret_kernel import run_schedule
from hotloop.ir.kernel import Init, KernelCall, Loop, Schedule, statements
from hotloop.ir.loops import LoopProgram, ViewRef
from hotloop.ir.verify import verify_program, verify_schedule
from hotloop.lower.lower import lower
from hotloop.schedule.schedule import schedule
from hotloop.schedule.simplify import simplify
from judge import assert_as_accurate
from schedule.programs import cases

NAMES = list(cases())


def flat(value: Any) -> list[torch.Tensor]:
    return [t for v in value for t in flat(v)] if isinstance(value, (tuple, list)) else [value]


def captured(fn: Callable[..., Any], *inputs: torch.Tensor) -> LoopProgram:
    """The loop program of the graph that Dynamo and AOTAutograd give for ``fn``."""
    programs: list[LoopProgram] = []

    def record(gm: torch.fx.GraphModule, _: Any, kind: str) -> Callable[..., Any]:
        with Log(Config(), graph_id=0, kind="inference") as log:
            programs.append(lower(passes.run(gm, Config(), log), Config(), log))
        return lambda args: gm(*args)

    torch.compiler.reset()
    backend = compat.aot_backend(record, decompositions())
    with torch.no_grad():
        torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    assert len(programs) == 1
    verify_program(programs[0])
    return programs[0]


def plan(
    name: str, threads: int = 2, **options: Any
) -> tuple[Schedule, tuple[torch.Tensor, ...], list[torch.Tensor]]:
    fn, inputs = cases()[name]
    return scheduled(captured(fn, *inputs), threads, **options), inputs, flat(fn(*inputs))


def scheduled(program: LoopProgram, threads: int = 2, **options: Any) -> Schedule:
    config = Config().replace(options)
    with Log(config, graph_id=0, kind="inference") as log:
        return schedule(program, config, log, threads)


def to64(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize(
    "options", [{}, {"unfused": True}, {"precision": "eager"}], ids=["fused", "unfused", "eager"]
)
@pytest.mark.parametrize("name", NAMES)
def test_schedule_computes_the_same(name: str, options: dict[str, Any]) -> None:
    made, inputs, expected = plan(name, **options)
    verify_schedule(made)
    got = run_schedule(made, list(inputs), arena=True)
    fn = cases()[name][0]
    reference = flat(fn(*map(to64, inputs)))
    assert len(got) == len(expected)
    for a, e, r in zip(got, expected, reference, strict=True):
        assert isinstance(a, torch.Tensor)
        assert a.stride() == e.stride() or a.numel() <= 1
        assert_as_accurate(a, e, r)


@pytest.mark.parametrize(
    "name", ["chain", "softmax", "layer_norm_gelu", "rope", "masked_softmax", "residual", "geglu"]
)
def test_one_kernel(name: str) -> None:
    made, _, _ = plan(name)
    assert sum(isinstance(s, KernelCall) for s in made.steps) == 1, str(made)


def test_equal_operations_are_one() -> None:
    """The weights of rows and columns are the same numbers; those of another size are not."""
    made, _, _ = plan("upsample")
    assert [s.kernel.name.rpartition("_")[0] for s in made.steps if isinstance(s, KernelCall)] == [
        "cpp_fused_arange_to_copy_add_mul_sub_clamp"
    ] * 2

    def two(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(x, scale_factor=2, mode="bilinear")

    assert len(simplify(captured(two, torch.randn(1, 2, 5, 7)), 2).ops) == 3


def test_equal_operations_that_are_given_back_stay_apart() -> None:
    """The caller gets two tensors, and may write to one of them."""
    program = captured(lambda x: (x.exp().t(), x.exp().reshape(1, 4, 5)), torch.randn(4, 5))
    apart = simplify(program, 2)
    assert len(apart.ops) == 2
    assert len({o.buffer for o in apart.outputs if isinstance(o, ViewRef)}) == 2


def test_kernels_of_matmuls() -> None:
    made, _, _ = plan("matmul_chain")
    assert [isinstance(s, KernelCall) for s in made.steps] == [False, True, False, True, False]


def test_dead_memory_goes_before_a_large_result() -> None:
    """Without a pool, memory of intermediates goes back once it is dead, before a large result is made."""

    def f(x: torch.Tensor, w: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.softmax(torch.relu(x @ w) @ w.t(), 1)
        return x @ words

    inputs = torch.randn(64, 32), torch.randn(32, 1024), torch.randn(32, 700)
    program = captured(f, *inputs)
    plans = {}
    for keep in (True, False):
        config = Config().replace({"memory_pool": keep})
        with Log(config, graph_id=0, kind="inference") as log:
            plans[keep] = schedule(program, config, log, 2)
        verify_schedule(plans[keep])
    assert not plans[True].releases
    released = sum(stop - start for _, start, stop in plans[False].releases)
    assert released >= 0.9 * plans[False].arena_bytes, str(plans[False])
    (got,) = run_schedule(plans[False], list(inputs), arena=True)
    torch.testing.assert_close(got, f(*inputs))
    torch.compiler.reset()
    compiled = torch.compile(f, backend="hotloop", options={"memory_pool": False})
    for _ in range(2):
        torch.testing.assert_close(compiled(*inputs), f(*inputs))
    (_, start, stop), *_ = plans[False].releases
    with pytest.raises(Exception, match="released before its last use"):
        verify_schedule(replace(plans[False], releases=((0, start, stop),)))


def test_single_numbers_share_a_kernel() -> None:
    def f(*counts: torch.Tensor) -> list[torch.Tensor]:
        return [1 - 0.9 ** (c + 1) for c in counts]

    numbers = [torch.tensor(float(k)) for k in range(6)]
    p = scheduled(captured(f, *numbers))
    assert len([s for s in p.steps if isinstance(s, KernelCall)]) == 1
    assert_as_accurate(run_schedule(p, numbers), f(*numbers))


def test_operations_on_what_lasts_meet_over_any_distance() -> None:
    def f(*both: torch.Tensor) -> list[torch.Tensor]:
        pairs = list(zip(both[::2], both[1::2], strict=True))
        return [x * y for x, y in pairs] + [x - y for x, y in pairs]

    inputs = [torch.randn(3, 4) for _ in range(40)]
    p = scheduled(captured(f, *inputs))
    (call,) = (s for s in p.steps if isinstance(s, KernelCall))
    assert len(call.rows) == 20
    assert_as_accurate(run_schedule(p, inputs), f(*inputs))


def test_long_rows_are_reduced_side_by_side() -> None:
    def kernel(*shape: int) -> Any:
        program = captured(lambda x: x.square().sum(-1), torch.randn(shape))
        (step,) = scheduled(program).steps
        assert isinstance(step, KernelCall)
        return step.kernel

    def accumulators(k: Any) -> int:
        return sum(isinstance(s, Init) for s in statements(k.body))

    assert accumulators(kernel(64, 1024)) == 4
    assert accumulators(kernel(8, 1024)) == 1  # too few rows for the threads
    assert accumulators(kernel(67, 1024)) == 5  # the last three one by one
    assert accumulators(kernel(64, 100)) == 1


@pytest.mark.parametrize(
    ("width", "across", "kinds"),
    [
        (768, 0, ["parallel", "serial", "vector"]),  # a block of columns for each thread
        (4, 0, ["serial", "vector"]),  # threads would write to the same cache lines
        (4, 1, ["parallel", "serial"]),  # a thread has a row of its own
    ],
    ids=["wide", "narrow", "rows"],
)
def test_how_a_scatter_is_divided(width: int, across: int, kinds: list[str]) -> None:
    shape = (50, width) if across == 0 else (width, 50)
    more = (900, width) if across == 0 else (width, 900)
    program = captured(
        lambda x, i, s: x.index_add(across, i, s),
        torch.ones(shape),
        torch.zeros(900).long(),
        torch.ones(more),
    )
    made = scheduled(program, parallel_threshold=1)
    (call,) = (c for c in made.steps if isinstance(c, KernelCall) and "scatter" in c.kernel.name)
    assert [s.kind for s in statements(call.kernel.body) if isinstance(s, Loop)] == kinds
