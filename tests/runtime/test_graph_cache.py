"""Whole graphs on disk: the same graph is not lowered again, another one never takes its place."""

from __future__ import annotations

import json
import operator
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hotloop import backend, compat, config
from hotloop.config import Config, options, resolve
from hotloop.dumps import Log
from hotloop.runtime import graph_cache
from hotloop.runtime.cache import Cache
from hotloop.tools.cli import main

aten = torch.ops.aten
SETTINGS = {"level": "avx2", "threads": "2", "options": ""}


# --- the key ------------------------------------------------------------------------------------------------


def graph(
    target: Any = aten.add.Tensor,
    other: Any = 2.0,
    x: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    constant: torch.Tensor | None = None,
    line: str = 'File "model.py", line 3, in f',
    **kwargs: Any,
) -> torch.fx.GraphModule:
    """``target(x, other)``; ``other`` may be "y", a second input, or "constant", the module's tensor."""
    g = torch.fx.Graph()
    root = torch.nn.Module()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given = {"x": torch.empty(4, 6) if x is None else x, "y": y, "constant": constant}
    known: dict[str, Any] = {}
    for name, tensor in given.items():
        if tensor is not None:
            if name == "constant":
                root.register_buffer("_tensor_constant0", tensor)
            known[name] = g.get_attr("_tensor_constant0") if name == "constant" else g.placeholder(name)
            known[name].meta["val"] = mode.from_tensor(tensor)
    other = known.get(other, other) if isinstance(other, str) else other
    node = g.call_function(target, (known["x"], other), kwargs)
    node.meta["stack_trace"] = line
    with mode:
        values = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in node.args]
        node.meta["val"] = target(*values, **kwargs)
    g.output((node,))
    return torch.fx.GraphModule(root, g)


def key(gm: torch.fx.GraphModule, kind: str = "inference", **settings: str) -> str:
    found = graph_cache.graph_digest(gm, kind, {**SETTINGS, **settings})
    assert found is not None
    return found[0]


def memory(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.empty(100)[start:].as_strided(shape, torch.empty(shape).stride())


OTHERS: dict[str, Callable[[], torch.fx.GraphModule]] = {
    "operator": lambda: graph(aten.sub.Tensor),
    "overload": lambda: graph(aten.add.Scalar),
    "number": lambda: graph(other=3.0),
    "type of a number": lambda: graph(other=2),
    "sign of zero": lambda: graph(other=-0.0),
    "zero": lambda: graph(other=0.0),
    "truth": lambda: graph(other=True),
    "one": lambda: graph(other=1),
    "keyword argument": lambda: graph(alpha=2),
    "dtype": lambda: graph(x=torch.empty(4, 6, dtype=torch.bfloat16)),
    "shape": lambda: graph(x=torch.empty(6, 4)),
    "rank": lambda: graph(x=torch.empty(1, 4, 6)),
    "strides": lambda: graph(x=torch.empty(6, 4).t()),
    "offset": lambda: graph(x=torch.empty(30)[3:27].view(4, 6)),
    "bit for the negative": lambda: graph(x=torch._neg_view(torch.empty(4, 6))),
    "line": lambda: graph(line='File "model.py", line 4, in f'),
    "second input": lambda: graph(other="y", y=torch.empty(4, 6)),
    "the same twice": lambda: graph(other="x"),
    "constant": lambda: graph(other="constant", constant=torch.tensor(2.0)),
    "constant's value": lambda: graph(other="constant", constant=torch.tensor(3.0)),
    "constant's dtype": lambda: graph(other="constant", constant=torch.tensor(2.0, dtype=torch.float64)),
    "constant's size": lambda: graph(other="constant", constant=torch.ones(6)),
    "constant's strides": lambda: graph(other="constant", constant=torch.ones(12)[::2]),
}


def test_the_same_graph_has_the_same_key() -> None:
    assert key(graph()) == key(graph())
    for make in OTHERS.values():
        assert key(make()) == key(make())


def test_every_change_of_a_graph_is_another_key() -> None:
    keys = {key(graph()): "the base"}
    for what, make in OTHERS.items():
        assert keys.setdefault(key(make()), what) == what
    assert len(keys) == len(OTHERS) + 1


def test_inputs_that_share_memory_are_another_key() -> None:
    whole = torch.empty(48)
    apart = graph(other="y", x=whole[:24].view(4, 6), y=torch.empty(48)[24:].view(4, 6))
    shared = graph(other="y", x=whole[:24].view(4, 6), y=whole[24:].view(4, 6))
    assert key(apart) != key(shared)


@pytest.mark.parametrize("part", list(SETTINGS))
def test_every_setting_is_another_key(part: str) -> None:
    assert key(graph()) != key(graph(), **{part: "another"})


def test_forward_and_inference_are_different_graphs() -> None:
    assert key(graph()) != key(graph(), "forward")


def test_another_torch_and_another_hotloop_are_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    first = key(graph())
    with monkeypatch.context() as patch:
        patch.setattr(compat, "torch_version", lambda: "2.99.0")
        assert key(graph()) != first
    with monkeypatch.context() as patch:
        patch.setattr(graph_cache, "_own_source", lambda: "edited")
        assert key(graph()) != first
    assert key(graph()) == first


def test_what_has_no_text_has_no_key() -> None:
    def python_function(x: Any, y: Any) -> Any:
        return x + y

    assert graph_cache.graph_digest(graph(python_function), "inference", SETTINGS) is None
    gm = graph()
    (node,) = (n for n in gm.graph.nodes if n.op == "call_function")
    for argument in (aten.mul.Tensor, object(), [object()], {"a": object()}):
        node.args = (node.args[0], argument)
        assert graph_cache.graph_digest(gm, "inference", SETTINGS) is None
    node.args = (node.args[0], slice(1, None, torch.int8))
    assert graph_cache.graph_digest(gm, "inference", SETTINGS) is not None
    node.target = operator.getitem
    assert graph_cache.graph_digest(gm, "inference", SETTINGS) is not None


def test_a_subgraph_has_no_key() -> None:
    gm = graph(other="constant", constant=torch.ones(6))
    del gm._buffers["_tensor_constant0"]
    gm._tensor_constant0 = graph()
    assert graph_cache.graph_digest(gm, "inference", SETTINGS) is None


OPTIONS = {
    "precision": "eager", "freezing": True, "fallback_random": True, "cpp_wrapper": True, "unfused": True,
    "parallel_threshold": 7, "cudagraphs": True, "max_autotune": True, "weight_packing": "off",
    "max_autotune_gemm_backends": "CPP", "cpp.simd": "scalar", "cpp.cxx": "clang++", "cpp.threads": 3,
    "memory_pool": False,
}  # fmt: skip


def test_every_option_that_changes_code_is_another_key() -> None:
    assert set(OPTIONS) == {name for name, option in options().items() if option.code}
    log = Log(Config(), graph_id=0, kind="inference")
    keys = set()
    for changed in [{}, *({name: value} for name, value in OPTIONS.items())]:
        settings = resolve(None, {"check": False, **changed})
        found = backend._graph_key(graph(), "inference", settings, log, SETTINGS)
        assert found is not None
        keys.add(found[0])
    assert len(keys) == len(OPTIONS) + 1


@pytest.mark.parametrize("seen", [{"check": True}, {"debug": True}, {"override_dir": "/nowhere"}])
def test_whoever_looks_at_the_stages_gets_them(seen: dict[str, Any]) -> None:
    log = Log(Config(), graph_id=0, kind="inference")
    assert backend._graph_key(graph(), "inference", resolve(None, {"check": False, **seen}), log, {}) is None


# --- keeping ------------------------------------------------------------------------------------------------

FUNCTIONS = [("cpp_fused_add_0", "void f() {}", ("exp", "tanh"))]


def test_what_is_kept_comes_back_with_the_constants_of_the_module_at_hand(tmp_path: Path) -> None:
    gm = graph(other="constant", constant=torch.ones(6))
    found = graph_cache.graph_digest(gm, "inference", SETTINGS)
    assert found is not None
    graph_cache.save(Cache(tmp_path), *found, gm, "host", FUNCTIONS, {"const0": gm._tensor_constant0})
    other = graph(other="constant", constant=torch.full((6,), 5.0))
    loaded = graph_cache.load(Cache(tmp_path), *found, other)
    assert loaded is not None
    text, constants = loaded
    assert text.host == "host" and text.functions == tuple(FUNCTIONS)
    assert list(constants) == ["const0"] and constants["const0"] is other._tensor_constant0


def test_a_constant_that_is_not_the_modules_own_is_not_kept(tmp_path: Path) -> None:
    gm = graph(other="constant", constant=torch.ones(6))
    found = graph_cache.graph_digest(gm, "inference", SETTINGS)
    assert found is not None
    graph_cache.save(Cache(tmp_path), *found, gm, "host", FUNCTIONS, {"const0": torch.ones(6)})
    assert graph_cache.load(Cache(tmp_path), *found, gm) is None


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"null", b"[]", b"7", b'"text"', b"{}", b'{"host": "h"}',
        b'{"host": "h", "functions": 3, "constants": {}}',
        b'{"host": "h", "functions": [["symbol"]], "constants": {}}',
        b'{"host": "h", "functions": [], "constants": {"const0": "no_such_attribute"}}',
        b'{"host": "h", "functions": [], "constants": {"const0": 1}}',
        b'{"host": "h", "functions": []}',
        b"\xff\xfe",
    ],
)  # fmt: skip
def test_a_record_of_another_form_is_a_miss(data: bytes, tmp_path: Path) -> None:
    gm, cache = graph(), Cache(tmp_path)
    found = graph_cache.graph_digest(gm, "inference", SETTINGS)
    assert found is not None
    assert cache.put(found[0], ".json", data) is not None
    assert graph_cache.load(cache, *found, gm) is None


def test_a_miss_says_what_changed(tmp_path: Path) -> None:
    cache, gm = Cache(tmp_path), graph()
    for threads in ("2", "3"):
        found = graph_cache.graph_digest(gm, "inference", {**SETTINGS, "threads": threads})
        assert found is not None
        assert graph_cache.load(cache, *found, gm) is None
        graph_cache.save(cache, *found, gm, "host", FUNCTIONS, {})
    assert [why for _, why in cache.why()] == ["never compiled before", "changed: threads"]


def test_a_miss_says_which_graph_and_compares_with_that_graph_alone(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    place = 'File "/home/me/model.py", line 3, in f\n    return x + 2.0'
    others = [graph(line=place), graph(aten.sub.Tensor), graph(line=place.replace("3", "4")),
              graph(line=place, x=torch.empty(6, 4))]  # fmt: skip
    for gm in others:
        found = graph_cache.graph_digest(gm, "inference", SETTINGS)
        assert found is not None
        assert graph_cache.load(cache, *found, gm) is None
        graph_cache.save(cache, *found, gm, "host", FUNCTIONS, {})
    names, reasons = zip(*cache.why(), strict=True)
    assert reasons == (
        "never compiled before",
        "never compiled before",
        "changed: source lines",
        "changed: dtypes and layouts, source lines",
    )
    assert names[0] == "inference graph, 1 operator from /home/me/model.py:3: return x + 2.0"


# --- through torch.compile ----------------------------------------------------------------------------------


class Counted:
    """How often graphs were lowered, in this process."""

    def __init__(self) -> None:
        self.lowered = 0


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Counted]:
    """A cache of its own, no verifier (it wants to see every stage), and each call of ``lower`` counted."""
    count, lower = Counted(), backend.lower

    def counting(*args: Any) -> Any:
        count.lowered += 1
        return lower(*args)

    monkeypatch.setattr(backend, "lower", counting)
    torch._dynamo.reset()
    with config.patch(check=False, cache_dir=str(tmp_path / "cache")):
        yield count
    torch._dynamo.reset()


def run(f: Callable[..., Any], inputs: Sequence[Any], **options: Any) -> Any:
    """Compiled as if for the first time in this process."""
    torch._dynamo.reset()
    return torch.compile(f, backend="hotloop", options=options)(*inputs)


def test_a_second_compile_lowers_nothing_and_gives_the_same(counted: Counted) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.softmax(x @ w, -1)
        return y, y.sum(0), x.t()

    inputs = torch.randn(6, 8), torch.randn(8, 5)
    first = run(f, inputs)
    assert counted.lowered == 1
    second = run(f, inputs)
    assert counted.lowered == 1
    for a, b, eager in zip(first, second, f(*inputs), strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride() == eager.stride()
        torch.testing.assert_close(b, eager)


def test_a_miss_names_the_option_that_changed(counted: Counted, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(4, 5)
    run(torch.exp, [x])
    run(torch.exp, [x], precision="eager", parallel_threshold=1)
    assert counted.lowered == 2
    assert main(["cache", "why"]) == 0
    assert "changed: option precision, option parallel_threshold\n" in capsys.readouterr().out


def test_large_constants_are_bound_to_the_values_at_hand(counted: Counted) -> None:
    def with_constants(first: float, second: float) -> Callable[[torch.Tensor], torch.Tensor]:
        def f(x: torch.Tensor) -> torch.Tensor:
            a = torch.tensor([first, first, first, first, first, first])
            b = torch.tensor([second, second, second, second, second, second])
            return (x * a + b).cumsum(0) - b

        return f

    x = torch.randn(4, 6)
    for first, second in ((2.0, 3.0), (3.0, 2.0), (-1.5, 0.25)):
        torch.testing.assert_close(run(with_constants(first, second), [x]), with_constants(first, second)(x))
    assert counted.lowered == 1


def test_small_constants_are_part_of_the_code(counted: Counted) -> None:
    x = torch.randn(5)
    for value in (2.0, 3.0):
        torch.testing.assert_close(run(lambda x, v=value: x * torch.tensor(v), [x]), x * value)
    assert counted.lowered == 2


def test_the_backward_graph_is_kept_too(counted: Counted) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x).pow(2).sum(1)

    x = torch.randn(5, 7, requires_grad=True)
    expected = torch.autograd.grad(f(x).sum(), x)[0]
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(run(f, [x]).sum(), x)[0], expected)
        assert counted.lowered == 2


def test_a_graph_for_all_sizes_is_found_again(counted: Counted) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1).view(-1, x.shape[1] * 2)

    for _ in range(2):
        torch._dynamo.reset()
        g = torch.compile(f, backend="hotloop", dynamic=True)
        for n in (6, 8, 20):
            x = torch.randn(n, 3)
            torch.testing.assert_close(g(x), f(x))
        assert counted.lowered == 1


def test_what_is_known_of_a_size_is_part_of_the_key(counted: Counted) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x * 2], 1)[:, 4:].sum(1)

    for least in (5, 9):
        torch._dynamo.reset()
        x = torch.randn(3, 12)
        torch._dynamo.mark_dynamic(x, 1, min=least, max=100)
        torch.testing.assert_close(torch.compile(f, backend="hotloop")(x), f(x))
    assert counted.lowered == 2


def test_other_inputs_are_lowered(counted: Counted) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    given = [
        torch.randn(4, 6), torch.randn(6, 4), torch.randn(6, 4).t(), torch.randn(4, 6, dtype=torch.float64)
    ]  # fmt: skip
    for _ in range(2):
        for x in given:
            torch.testing.assert_close(run(f, [x]), f(x))
    assert counted.lowered == len(given)
    run(f, [given[0]], precision="eager")
    assert counted.lowered == len(given) + 1
    run(f, [given[0]], **{"cpp.simd": "scalar"})
    assert counted.lowered == len(given) + 2


def test_the_number_of_threads_counts(counted: Counted) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    x, threads = torch.randn(3, 5), torch.get_num_threads()
    run(f, [x])
    try:
        torch.set_num_threads(threads + 1)
        run(f, [x])
    finally:
        torch.set_num_threads(threads)
    assert counted.lowered == 2


def test_a_graph_with_a_subgraph_is_lowered_each_time(counted: Counted) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    x = torch.ones(4)
    for times in (1, 2):
        torch.testing.assert_close(run(f, [x]), x + 1)
        torch.testing.assert_close(torch.compile(f, backend="hotloop")(-x), -x - 1)
        assert counted.lowered >= times
    lowered = counted.lowered
    run(f, [x])
    assert counted.lowered > lowered


def test_a_damaged_record_is_compiled_again(counted: Counted, tmp_path: Path) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 3 - 1

    x = torch.randn(7)
    run(f, [x])
    (record,) = (tmp_path / "cache").rglob("*.json.meta")
    payload = record.with_name(record.name.removesuffix(".meta"))
    whole = payload.read_bytes()
    assert json.loads(whole)["host"]
    payload.write_bytes(whole[:-9])
    torch.testing.assert_close(run(f, [x]), f(x))
    assert counted.lowered == 2
    torch.testing.assert_close(run(f, [x]), f(x))
    assert counted.lowered == 2


SCRIPT = """
import torch
from hotloop import backend
lowered, lower = [], backend.lower
backend.lower = lambda *a: lowered.append(1) or lower(*a)
table = [[0.5 * i + j for j in range(8)] for i in range(6)]
def f(x, w):
    return torch.softmax((x + torch.tensor(table)) @ w, -1).relu().sum(0) * 0.5
torch.manual_seed(0)
x, w = torch.randn(6, 8, requires_grad=True), torch.linspace(-1, 1, 40).reshape(8, 5)
y = torch.compile(f, backend="hotloop")(x, w)
torch.testing.assert_close(y, f(x, w))
(g,) = torch.autograd.grad(y.sum(), x)
print(len(lowered), y.tolist(), g.tolist(), sep="\\n")
"""


def test_a_fresh_process_lowers_nothing(tmp_path: Path) -> None:
    # A file: the text of a graph's kernels quotes the user's lines.
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "HOTLOOP_CACHE_DIR": str(tmp_path / "cache"), "HOTLOOP_CHECK": "0"}
    said = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(script)], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines())
    (first, *results), (second, *again) = said
    assert first == "2" and second == "0"
    assert results == again
