"""What a person sees of a compile: logs, dumps that run by themselves, edited sources in their place."""

from __future__ import annotations

import logging
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

import hotloop
from hotloop.codegen.cpp import print_kernel
from hotloop.codegen.output_code import graph_key
from hotloop.dumps import ARTIFACTS
from hotloop.errors import CompileError, OptionError
from hotloop.graph.runnable import print_runnable
from hotloop.ir.kernel import Kernel
from hotloop.ir.loops import Buffer, LoopProgram, Origin, ViewRef
from hotloop.ir.samples import constant, describe, redraw, sample
from hotloop.runtime.override import find_override
from hotloop.tools import replay
from hotloop.tools.replay import difference

TABLE = torch.tensor([3, 1, 2])
EQUAL = re.compile(
    r"(equal to eager|as accurate as eager, by the judgement of float64): "
    r"(no element differs|largest difference \S+e-\d\d, relative \S+e[-+]\d\d)\n"
)


def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    p = torch.softmax(x * 0.125, -1)  # it's quoted: '''
    y = (p @ w)[:, TABLE] + 1
    return torch.relu(y).sum(-1)


def arguments() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 10), torch.randn(10, 4)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch._logging.set_logs()


def dump(folder: Path, backend: str = "hotloop") -> Path:
    """Compile the model with dumps; the folder of its only graph."""
    with hotloop.config.patch(debug=True, debug_dir=str(folder)):
        args = arguments()
        torch.testing.assert_close(torch.compile(model, backend=backend)(*args), model(*args))
    (made,) = (folder / "hotloop").iterdir()
    return made


def run(file: Path) -> str:
    """What `python <file>` prints."""
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_here(file: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The same within this process: its exit status and what it prints."""
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(file), run_name="__main__")
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().out


# ---------------------------------------------------------------- logs


class Records(logging.Handler):
    """What was logged, by artifact."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: dict[str, list[str]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.setdefault(record.name.rpartition(".__")[2], []).append(record.getMessage())


def test_each_artifact_shows_its_stage_once() -> None:
    records = Records()
    torch._logging.set_logs(**dict.fromkeys(set(ARTIFACTS) - {"autotuning", "perf_hints"}, True))
    loggers = [logging.getLogger(f"{module}.__{name}") for name, module in ARTIFACTS.items()]
    for logger in loggers:
        logger.addHandler(records)
    try:
        torch.compile(model, backend="hotloop")(*arguments())
    finally:
        for logger in loggers:
            logger.removeHandler(records)
    texts = {name: "\n".join(found) for name, found in records.texts.items()}
    assert "torch.ops.aten.mm.default" in texts["post_grad_graphs"]
    assert "p = torch.softmax(x * 0.125, -1)" in texts["ir_pre_fusion"]
    assert "vector for" in texts["ir_post_fusion"]
    assert "cpp_red_mul_softmax_0(in0" in texts["schedule"] and "3 steps" in texts["schedule"]
    assert "fused: cpp_red_mul_softmax_0 = mul + amax" in texts["fusion"]
    code = texts["output_code"]
    assert "def call(args):" in code and 'extern "C" i64 cpp_red_mul_softmax_0(' in code
    assert "namespace hl" not in code  # the vocabulary is the same for all kernels
    assert len(code.splitlines()) < 150
    assert all(len(records.texts[name]) == 1 for name in ("output_code", "ir_pre_fusion", "ir_post_fusion"))
    assert len(records.texts["kernel_code"]) == code.count('extern "C"')
    assert all(text.count('extern "C"') == 1 for text in records.texts["kernel_code"])


def test_a_refused_fusion_is_logged_and_dumped(tmp_path: Path) -> None:
    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.softmax(x, 0)
        return a, torch.softmax(a, 1)

    with hotloop.config.patch(debug=True, debug_dir=str(tmp_path)):
        torch.compile(two, backend="hotloop")(torch.randn(30, 40))
    (file,) = tmp_path.rglob("fusion_refused.txt")
    assert all(" + " in line and ": " in line for line in file.read_text().splitlines())


def test_each_kernel_has_a_row_in_the_profiler() -> None:
    def rows(**options: object) -> dict[str, int]:
        torch._dynamo.reset()
        w = torch.randn(10, 4, requires_grad=True)
        f = torch.compile(model, backend="hotloop", options=options)
        f(arguments()[0], w).sum().backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(3):
                f(arguments()[0], w).sum().backward()
        return {e.key: e.count for e in profile.key_averages() if "cpp_" in e.key}

    found = rows(**{"cpp.enable_kernel_profile": True})
    graphs = {re.fullmatch(r"graph_(\d+)_cpp_\w+", row)[1] for row in found}  # type: ignore[index]
    assert len(graphs) == 2  # forward and backward
    assert any("cpp_red_mul_softmax_0" in row for row in found)
    assert set(found.values()) == {3}
    assert rows() == {}


# ---------------------------------------------------------------- dumps


def test_the_dumps_are_there_and_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = dump(tmp_path)
    expected = {
        "fx_graph_runnable.py",
        "fx_graph_readable.py",
        "fx_graph_transformed.py",
        "ir_pre_fusion.txt",
        "ir_post_fusion.txt",
        "output_code.py",
    }
    assert expected <= {file.name for file in folder.iterdir()}
    status, printed = run_here(folder / "output_code.py", capsys)
    assert status == 0
    for text in (printed, run(folder / "fx_graph_runnable.py")):
        assert EQUAL.match(text), text
        assert "hotloop" in text and " ms, median of " in text


class Net(nn.Module):
    """Convolution, batch norm in training, pooling with indices, a mutated buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.max_pool2d(self.norm(self.conv(x)).relu(), 2)


def write(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1).masked_fill(x > 1, -float("inf")).softmax(-1)


def embed(w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(i, w).bfloat16()[::2].cumsum(0)


def look_up(w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(i, w, sparse=True) * 2


def branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))


class Layer(nn.Module):
    """Attention, norms, dropout and a loss: its backward graph takes probabilities, deviations and masks."""

    def __init__(self, dtype: torch.dtype, dropout: float) -> None:
        super().__init__()
        self.mix, self.out, self.norm = nn.Linear(24, 72), nn.Linear(24, 11), nn.LayerNorm(24)
        self.dtype, self.dropout = dtype, dropout

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", self.dtype, enabled=self.dtype is not torch.float32):
            q, k, v = self.mix(self.norm(x * 30)).view(4, 9, 3, 2, 12).permute(2, 0, 3, 1, 4)
            weights = (q @ k.transpose(-1, -2) * 0.3).softmax(-1)
            z = torch.nn.functional.dropout((weights @ v).transpose(1, 2).flatten(2), self.dropout)
            return torch.nn.functional.cross_entropy(self.out(z + x).flatten(0, 1), y)


def text() -> list[torch.Tensor]:
    return [torch.randn(4, 9, 24), torch.randint(11, (36,))]


Made = tuple[Callable[..., torch.Tensor], list[torch.Tensor]]
KINDS: dict[str, tuple[Callable[[], Made], int]] = {
    "net": (lambda: (Net(), [torch.randn(2, 3, 8, 8)]), 2),
    "write": (lambda: (write, [torch.randn(4, 6).t()]), 1),
    "embed": (lambda: (embed, [torch.randn(9, 4, requires_grad=True), torch.tensor([1, 7, 7])]), 2),
    "a sparse gradient": (
        lambda: (look_up, [torch.randn(9, 4, requires_grad=True), torch.tensor([1, 7, 7])]),
        2,
    ),
    "branch": (lambda: (branch, [torch.randn(5)]), 3),
    "layer": (lambda: (Layer(torch.float32, 0.0), text()), 2),
    "low precision and dropout": (lambda: (Layer(torch.bfloat16, 0.2), text()), 2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_dumps_of_all_kinds_of_graph_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replay, "_time", lambda *_: 0)
    make, graphs = KINDS[kind]
    f, args = make()
    with hotloop.config.patch(debug=True, debug_dir=str(tmp_path)):
        y = torch.compile(f, backend="hotloop")(*args)
        if y.requires_grad:
            y.sum().backward()
    files = sorted(tmp_path.rglob("output_code.py"))
    assert 1 <= len(files) <= graphs
    for file in files:
        torch._dynamo.reset()
        status, printed = run_here(file, capsys)
        drawn = "threefry" in file.read_text()
        good = EQUAL.match(printed)
        assert status == 0 and (good or kind == "branch" or (drawn and "not compared" in printed)), printed
        status, printed = run_here(file.with_name("fx_graph_runnable.py"), capsys)
        assert status == 0 and EQUAL.match(printed), printed


def loss(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = torch.nn.functional.gelu(x @ w)
    return torch.nn.functional.cross_entropy(torch.nn.functional.layer_norm(h + x, (64,)) @ v, y)


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 0.01), (torch.bfloat16, 0.05)])
def test_one_number_is_wrong_where_it_is_further_off_than_rounding_explains(
    dtype: torch.dtype, off: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eager's own error in a loss is small by luck in some runs: it is no measure."""
    monkeypatch.setattr(replay, "_time", lambda *_: 0)
    compiled = torch.compile(loss, backend="hotloop")

    def inputs(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        x, w, v = torch.randn(32, 64), torch.randn(64, 64) / 8, torch.randn(64, 10) / 8
        return [*(t.to(dtype) for t in (x, w, v)), torch.randint(10, (32,))]

    for seed in range(31):
        for factor, wrong in ((1, 0), (1 + off, 1), (1 - off, 1)):
            status = replay._check(
                lambda args: [loss(*args)],
                lambda args, factor=factor: [compiled(*args) * factor],  # type: ignore[misc]
                lambda seed=seed: inputs(seed),  # type: ignore[misc]
            )
            printed = capsys.readouterr().out
            assert status == wrong and printed.startswith("WRONG") is bool(wrong), (seed, factor, printed)


def test_replays_take_inputs_like_the_true_ones(tmp_path: Path) -> None:
    def f(x: torch.Tensor, at: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return (x.log() * keep)[at]

    given = [torch.rand(50, 4).t() + 2, torch.tensor([3, 1, 3]), torch.rand(50) < 0.9]
    with hotloop.config.patch(debug=True, debug_dir=str(tmp_path)):
        torch.compile(f, backend="hotloop")(*given)
    (dumped,) = tmp_path.rglob("fx_graph_runnable.py")
    made = runpy.run_path(str(dumped), run_name="elsewhere")["inputs"]
    drawn = [made(), replay._like_the_true_ones(made, dumped)()]
    # Capture has the inputs in the order in which they are used.
    plain, alike = (sorted(ts, key=lambda t: -t.numel()) for ts in drawn)
    assert float(plain[0].min()) < 2 <= float(alike[0].min()) and float(alike[0].max()) <= 3
    assert abs(float(alike[0].mean() - given[0].mean())) < 0.2
    assert set(alike[2].tolist()) <= {1, 2, 3}
    assert 30 < int(alike[1].sum()) <= 50
    assert [t.stride() for t in alike] == [t.stride() for t in plain]


def test_samples_that_overlap_are_drawn_anew_too() -> None:
    tensors = [torch.zeros(5, 1).expand(5, 4), torch.zeros(10)[::2], torch.zeros(3, dtype=torch.bfloat16)]
    like = describe([torch.full((9,), 2.0), torch.tensor([1.0, math.inf, math.nan, 3.0]), torch.ones(2)])
    redraw([*tensors, 3], [*like, None])
    assert [float(t.min()) for t in tensors] == [2, pytest.approx(1, abs=2), 1]
    assert describe([torch.zeros(0), 3, torch.tensor([math.nan]), torch.zeros(2, dtype=torch.complex64)]) == [
        None, None, None, None
    ]  # fmt: skip


def test_an_edited_file_is_used_for_its_graph_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = dump(tmp_path / "dumps")
    code = (folder / "output_code.py").read_text()
    edited = code.replace("+ 1.0f", "+ 11.0f")
    assert edited != code
    (folder / "output_code.py").write_text(edited)
    status, printed = run_here(folder / "output_code.py", capsys)
    assert status == 1 and printed.startswith("WRONG, output 0: "), printed

    torch._dynamo.reset()
    torch._logging.set_logs()
    x, w = torch.zeros(6, 10), torch.zeros(10, 4)
    other = torch.randn(5)
    with hotloop.config.patch(override_dir=str(tmp_path)):
        with pytest.warns(RuntimeWarning, match="takes .*output_code.py for model__"):
            assert torch.equal(torch.compile(model, backend="hotloop")(x, w), torch.full((6,), 33.0))
        assert torch.equal(torch.compile(torch.neg, backend="hotloop")(other), -other)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend="hotloop")(x, w), torch.full((6,), 3.0))


def test_the_file_changed_last_counts_and_a_broken_one_says_so(tmp_path: Path) -> None:
    folder = dump(tmp_path)
    code = (folder / "output_code.py").read_text()
    key = code.partition('graph = "')[2][:16]
    later = tmp_path / "mine" / "output_code.py"
    later.parent.mkdir()
    later.write_text(code.replace("kernels = {}", "kernels = ["))
    os.utime(folder / "output_code.py", (1, 1))
    with pytest.raises(CompileError, match=r"mine/output_code.py cannot be used: SyntaxError"):
        find_override(str(tmp_path), key)
    os.utime(later, (0, 0))
    found = find_override(str(tmp_path), key)
    assert found is not None and found.path == folder / "output_code.py"
    assert find_override(str(tmp_path), "0" * 16) is None


def test_an_edited_file_that_does_not_compile_says_whose_it_is(tmp_path: Path) -> None:
    file = dump(tmp_path) / "output_code.py"
    code = file.read_text()
    file.write_text(code.replace("+ 1.0f", "+ one"))
    torch._dynamo.reset()
    with (
        hotloop.config.patch(override_dir=str(tmp_path)),
        pytest.warns(RuntimeWarning, match="takes"),
        pytest.raises(CompileError) as found,
    ):
        torch.compile(model, backend="hotloop")(*arguments())
    text = str(found.value)
    assert f"{file} does not compile" in text and "HOTLOOP_OVERRIDE" in text and "one" in text
    assert "please report" not in text


def test_a_folder_without_sources_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="holds no output_code"):
        find_override(str(tmp_path), "0" * 16)


def test_a_graph_keeps_its_key_when_the_file_around_it_changes() -> None:
    def program(name: str, size: int) -> LoopProgram:
        b = Buffer("in0", torch.float32, (size,), (1,), "input")
        return LoopProgram(name, {"in0": b}, (), ("in0",), (ViewRef("in0", (size,), (1,), 0, torch.float32),))

    assert graph_key(program("graph_0_forward", 3)) == graph_key(program("graph_7_inference", 3))
    assert graph_key(program("graph_0_forward", 3)) != graph_key(program("graph_0_forward", 4))


# ---------------------------------------------------------------- the pieces


def test_the_runnable_graph_holds_subgraphs_and_constants() -> None:
    inner = symbolic_trace(lambda x: x + 1)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3)
    graph.output(graph.call_function(torch.add, (graph.call_module("inner", (x,)), graph.get_attr("c"))))
    gm = torch.fx.GraphModule({"inner": inner, "c": torch.tensor([1.0, float("inf"), -2.0])}, graph)
    names: dict[str, object] = {"__name__": "hotloop_generated"}
    exec(print_runnable(gm, "graph", {"precision": "eager"}), names)
    (given,) = names["inputs"]()  # type: ignore[operator]
    assert torch.equal(names["Graph"]()(given), gm(given))  # type: ignore[operator]
    assert names["OPTIONS"] == {"precision": "eager"}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(4, 1, 5).expand(4, 3, 5),
        torch.randn(2, 0, 3),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.int8),
        torch.ones(300, dtype=torch.bool),
        torch.randn(3, dtype=torch.complex64),
        torch.arange(1000),
        torch.zeros(5).to(torch.float8_e4m3fn),
    ],
    ids=lambda t: f"{t.dtype}-{list(t.shape)}",
)
def test_samples_have_the_form_that_was_asked_for(tensor: torch.Tensor) -> None:
    made = eval(sample(tensor.shape, tensor.stride(), tensor.dtype))
    assert made.shape == tensor.shape and made.dtype is tensor.dtype
    assert [s for n, s in zip(made.shape, made.stride(), strict=True) if n > 1] == [
        s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1
    ]
    copy = eval(constant(tensor))
    assert copy.shape == tensor.shape and copy.dtype is tensor.dtype


def test_small_constants_keep_their_values() -> None:
    for tensor in (TABLE, torch.tensor([1.5, float("nan"), -float("inf")]), torch.tensor(True)):
        torch.testing.assert_close(eval(constant(tensor)), tensor, equal_nan=True)
    made = eval(constant(torch.arange(5, 1000)))
    assert made.min() >= 5 and made.max() < 1000


def test_a_difference_is_found() -> None:
    a = torch.randn(5)
    assert difference([a, 3], [a.clone(), 3]) is None
    assert "output 1" in str(difference([a, 3], [a, 4]))
    assert "output 0" in str(difference([a], [a + 1e-3]))
    assert difference([a], [a + 1e-3], lambda: [a + 1e-3]) is None, "nearer to the truth than eager"
    assert "output 1" in str(difference([a, a], [a, a + 1e-3], lambda: [a, a]))
    nan = torch.tensor([math.nan, math.inf, 1.0])
    assert difference([nan], [nan.clone()]) is None
    assert "output 0" in str(difference([nan], [torch.tensor([math.nan, 1.0, 1.0])], lambda: [nan.double()]))


def test_a_line_that_ends_in_a_backslash_does_not_swallow_the_next() -> None:
    k = Kernel("k", (), (), origins=(Origin(source="model.py:3: y = x + \\"),))
    assert print_kernel(k, "scalar").text.startswith('// model.py:3: y = x +\nextern "C" i64 k() {\n')
