"""max-autotune: every candidate is right, the fastest is taken, and nothing is measured twice."""

from __future__ import annotations

import copy
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop import backend
from hotloop.ir.interpret_kernel import run_schedule
from hotloop.ir.kernel import Choice, KernelCall, Loop, Multiply, Schedule, statements
from hotloop.ir.verify import verify_schedule
from hotloop.runtime import autotune
from hotloop.runtime.autotune import Tuner
from hotloop.runtime.cache import Cache
from hotloop.runtime.toolchain import detect_simd
from hotloop.schedule.schedule import Arrangement, settle
from judge import assert_as_accurate, reference_of

pytestmark = pytest.mark.skipif(detect_simd() == "scalar", reason="products are PyTorch's without vectors")


class Net(nn.Module):
    """A linear layer with an activation, then one without."""

    def __init__(self, inner: int = 16, outer: int = 32) -> None:
        super().__init__()
        self.a = nn.Linear(inner, outer)
        self.b = nn.Linear(outer, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())


def net(*sizes: int) -> Net:
    return Net(*sizes).eval().requires_grad_(False)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path) -> Iterator[Path]:
    """A cache folder without results, and a process that knows none; graphs are not found by their text."""
    torch.compiler.reset()
    with hotloop.config.patch(cache_dir=str(tmp_path), check=True):
        yield tmp_path
    torch.compiler.reset()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    """The choices that were measured, with times that decrease from the first candidate to the last."""
    found: list[Choice] = []

    def measure(choice: Choice, calls: Any) -> autotune.Result:
        found.append(choice)
        times = {c.name: (float(99 - k),) * 5 for k, c in enumerate(choice.candidates)}
        return autotune.Result(choice, times, choice.candidates[-1].name)

    monkeypatch.setattr(autotune, "_measure", measure)
    return found


def compiled(model: nn.Module, mode: str = "max-autotune", **options: Any) -> Callable[..., Any]:
    if options:
        return torch.compile(model, backend="hotloop", options={"max_autotune": True, **options})
    return torch.compile(model, backend="hotloop", mode=mode)


# --- the log ------------------------------------------------------------------------------------------------

LINE = r"  (cpp_packed_gemm_\d+|aten_linear) +\d+\.\d{4} ms \d+\.\d%"


@pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs"])
def test_the_log_on_standard_error(mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    model, x = net(), torch.randn(64, 16)
    assert_as_accurate(compiled(model, mode)(x), model(x), reference_of(model, x))
    out, err = capfd.readouterr()
    assert out == "" and "\r" not in err  # no progress bar outside a terminal
    lines = [line for line in err.splitlines() if "AUTOTUNE" in line or line.startswith((" ", "str", "dty"))]
    assert lines[0] == "AUTOTUNE linear_relu(64x16, 32x16, 32)"
    assert lines[1] == "strides: [16, 1], [16, 1], [1]"
    assert lines[2] == "dtypes: torch.float32, torch.float32, torch.float32"
    second = lines.index("AUTOTUNE linear(64x32, 24x32)")
    for first, last in ((3, second), (second + 3, len(lines) - 1)):
        rows = lines[first:last]
        assert rows and all(re.fullmatch(LINE, row) for row in rows), rows
        assert rows[0].endswith(" 100.0%") and sum("aten_linear" in row for row in rows) == 1
        times = [float(row.split()[1]) for row in rows]
        assert times == sorted(times)
    took = r"AUTOTUNE took \d+\.\d\d seconds for (\d+) choices \(\d+\.\d\d compiling, \d+\.\d\d timing\)"
    match = re.fullmatch(took, lines[-1])
    assert match is not None and int(match[1]) == len(lines) - 7


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_progress_bar_on_a_terminal_alone() -> None:
    for stream in (Terminal(), io.StringIO()):
        progress = autotune._Progress(stream, 3)
        for _ in range(3):
            progress.step()
        progress.clear()
        text = stream.getvalue()
        assert ("AUTOTUNE compiling [####################..........] 2/3" in text) is stream.isatty()
        assert bool(text) is stream.isatty() and text.endswith("\r\033[K" if text else "")


def test_every_timing_as_a_line_of_json(tmp_path: Path) -> None:
    model, x = net(), torch.randn(64, 16)
    run = compiled(model, **{"trace.log_autotuning_results": True, "debug_dir": str(tmp_path)})
    run(x)
    lines = (tmp_path / "hotloop" / "autotuning_results.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert {r["operator"] for r in records} == {"linear_relu", "linear"}
    first = [r for r in records if r["operator"] == "linear_relu"]
    assert first[0]["operands"][1] == {"sizes": [32, 16], "strides": [16, 1], "dtype": "torch.float32"}
    assert len({r["candidate"] for r in first if r["picked"]}) == 1
    for name in {r["candidate"] for r in first}:
        own = [r for r in first if r["candidate"] == name]
        assert [r["call"] for r in own] == list(range(len(own))) and len(own) >= autotune.FIRST
        assert all(r["ms"] > 0 for r in own)


# --- what is measured ---------------------------------------------------------------------------------------


def test_nothing_is_measured_twice_in_this_process_or_the_next(measured: list[Choice]) -> None:
    model, x = net(), torch.randn(64, 16)
    compiled(model)(x)
    assert [c.title for c in measured] == ["linear_relu", "linear"]
    torch.compiler.reset()
    compiled(net())(x)  # other weights, the same operators
    assert len(measured) == 2
    torch.compiler.reset()
    backend._tuner.cache_clear()  # another process knows what is on disk
    compiled(model)(x)
    assert len(measured) == 2
    torch.compiler.reset()
    compiled(model)(torch.randn(65, 16))
    assert len(measured) == 4


def test_layers_of_one_shape_are_measured_once(measured: list[Choice]) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5))).eval().requires_grad_(False)
    x = torch.randn(8, 32)
    assert_as_accurate(compiled(model)(x), model(x), reference_of(model, x))
    assert len(measured) == 1


def test_results_of_another_machine_do_not_count(measured: list[Choice], tmp_path: Path) -> None:
    model, x = net(), torch.randn(64, 16)
    for name in ("one", "one", "another"):
        torch.compiler.reset()
        backend._tuner.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "machine_name", lambda name=name: name)
            compiled(model)(x)
    assert len(measured) == 4
    backend._tuner.cache_clear()


def test_a_broken_record_is_measured_again(measured: list[Choice], tmp_path: Path) -> None:
    tuner = Tuner(Cache(tmp_path), {"machine": "this one"})
    choice = choices_of(net(), torch.randn(64, 16))[0]
    names = [c.name for c in choice.candidates]
    assert "aten_linear" in names
    for data in (b"{}", b"[", b'{"pick": "x"}', b'{"pick": []}'):
        tuner._cache.put("k" * 64, ".json", data)
        assert tuner._recall("k" * 64, {}, choice) is None
    tuner._cache.put("k" * 64, ".json", b'{"pick": "aten_linear"}')
    assert tuner._recall("k" * 64, {}, choice) == "aten_linear"


@pytest.mark.parametrize("backends", ["ATEN", "TRITON", "TRITON,CUTLASS"])
def test_one_candidate_is_not_measured(backends: str, measured: list[Choice]) -> None:
    model, x = net(), torch.randn(64, 16)
    run = compiled(model, max_autotune_gemm_backends=backends)
    assert_as_accurate(run(x), model(x), reference_of(model, x))
    assert not measured


def test_the_environment_restricts_the_candidates(
    monkeypatch: pytest.MonkeyPatch, measured: list[Choice]
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS", "cpp")
    compiled(net())(torch.randn(64, 16))
    names = [c.name for choice in measured for c in choice.candidates]
    assert names and all(n.startswith("cpp_packed_gemm_") for n in names)


def test_only_max_autotune_measures(measured: list[Choice]) -> None:
    torch.compile(net(), backend="hotloop")(torch.randn(64, 16))
    assert not measured


def test_what_is_picked_is_what_runs(measured: list[Choice], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture's times let PyTorch's own call win."""
    plans: list[Schedule] = []
    print_host = backend.print_host

    def record(plan: Schedule, name: str) -> Any:
        plans.append(plan)
        return print_host(plan, name)

    monkeypatch.setattr(backend, "print_host", record)
    compiled(net())(torch.randn(64, 16))
    targets = [str(getattr(step, "target", "kernel")) for step in plans[-1].steps]
    assert targets == ["aten.addmm.default", "kernel", "aten.mm.default"]


# --- which one is taken -------------------------------------------------------------------------------------


def fastest(**times: list[float]) -> str:
    choice = choices_of(net(), torch.randn(64, 16))[0]
    return autotune._fastest(choice, {c.name: times.get(c.name, []) for c in choice.candidates})


def test_ties_go_to_the_default() -> None:
    default = [1.0, 1.02, 0.99, 1.01, 1.0]
    assert fastest(cpp_packed_gemm_0=default, aten_linear=[t * 0.98 for t in default]) == "cpp_packed_gemm_0"
    assert fastest(cpp_packed_gemm_0=default, aten_linear=[t * 0.9 for t in default]) == "aten_linear"
    noisy = [0.5, 0.5, 0.5, 1.2, 1.2]  # faster by the median, but not reliably so
    assert fastest(cpp_packed_gemm_0=default, aten_linear=noisy) == "cpp_packed_gemm_0"


def test_candidates_that_fail_are_not_taken() -> None:
    assert fastest(aten_linear=[3.0] * 5) == "aten_linear"
    assert fastest() == "cpp_packed_gemm_0"


def test_slow_candidates_leave_the_race_and_the_default_stays() -> None:
    calls: dict[str, Callable[..., Any]] = {n: lambda _: None for n in ("a", "b", "c")}
    assert set(autotune._in_the_race(calls, {"a": [1.2], "b": [1.0], "c": [2.1]}, "a")) == {"a", "b"}
    assert set(autotune._in_the_race(calls, {"a": [1.0], "b": [9.0, 1.1], "c": [2.0]}, "a")) == {"a", "b"}
    assert set(autotune._in_the_race(calls, {"a": [1.0], "b": [2.0], "c": [3.0]}, "a")) == {"a"}
    assert set(autotune._in_the_race(calls, {"a": [2.0], "b": [1.0], "c": [3.0]}, "a")) == {"b"}
    assert set(autotune._in_the_race(calls, {"a": [2.0], "b": [1.0], "c": [1.2]}, "a")) == {"a", "b", "c"}


# --- every candidate is right -------------------------------------------------------------------------------


def arranged(model: nn.Module, *inputs: torch.Tensor, dynamic: bool = False) -> tuple[Arrangement, list[Any]]:
    """The arrangement of a model's forward, and the tensors that its graph takes."""
    found: list[Arrangement] = []
    given: list[list[Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        original, linked = backend.arrange, backend.link

        def record(*args: Any) -> Arrangement:
            found.append(original(*args))
            return found[-1]

        def link(*args: Any) -> Callable[..., Any]:
            call = linked(*args)

            def run(values: list[Any]) -> Any:
                given.append(list(values))
                return call(values)

            return run

        patch.setattr(backend, "arrange", record)
        patch.setattr(backend, "link", link)
        torch.compiler.reset()
        torch.compile(model, backend="hotloop", dynamic=dynamic)(*inputs)
    return found[0], given[0]


def choices_of(model: nn.Module, *inputs: torch.Tensor, dynamic: bool = False) -> list[Choice]:
    return list(backend.choices(arranged(model, *inputs, dynamic=dynamic)[0]).values())


class Residual(nn.Module):
    """Several results of one product, one of them the product itself, and a row that is added."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.a = nn.Linear(inner, outer)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.a(x)
        return h, F.gelu(h) + y, h * 2


SHAPES = [(1, 16, 24), (5, 40, 33), (64, 16, 32), (300, 24, 56), (2500, 256, 72)]


def check_candidates(model: nn.Module, *inputs: torch.Tensor, dynamic: bool, last: str) -> list[str]:
    """Every candidate of the one product of a model is right; their names, of which `last` comes last."""
    plan, given = arranged(model, *inputs, dynamic=dynamic)
    found = backend.choices(plan)
    assert len(found) == 1
    ((position, choice),) = found.items()
    names = [c.name for c in choice.candidates]
    assert names[-1] == last and len(set(names)) == len(names)
    config, level = hotloop.config.snapshot(), detect_simd()
    expected, exact = model(*inputs), reference_of(copy.deepcopy(model).double(), *inputs)
    for k, candidate in enumerate(choice.candidates):
        verify_schedule(candidate.schedule)
        made = settle(plan, {position: k})
        verify_schedule(made)
        prepared = backend._Candidate.of(made, level=level, openmp=True, config=config)
        assert_as_accurate(tuple(prepared.load()(list(given))), expected, exact, what=candidate.name)
        if inputs[0].shape[0] <= 64:
            assert_as_accurate(tuple(run_schedule(made, given, arena=True)), expected, exact)
    return names


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_candidate_computes_the_same(shape: tuple[int, int, int], dynamic: bool) -> None:
    rows, inner, outer = shape
    model = Residual(inner, outer).eval().requires_grad_(False)
    x, y = torch.randn(rows, inner), torch.randn(rows, outer)
    names = check_candidates(model, x, y, dynamic=dynamic and rows > 1, last="aten_linear")
    assert len(names) >= 4


class Int8(nn.Module):
    """A product by an int8 weight with scales by channel."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.register_buffer("w", torch.randint(-128, 128, (outer, inner), dtype=torch.int8))
        self.register_buffer("s", torch.rand(outer))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (F.gelu(F.linear(x, self.w.to(x.dtype)) * self.s),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_candidate_by_an_int8_weight(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, inner, outer = shape
    model, x = Int8(inner, outer).to(dtype), torch.randn(rows, inner).to(dtype)
    names = check_candidates(model, x, dynamic=rows == 64, last="aten_int8_linear")
    assert len(names) >= 3


def test_an_int8_weight_is_measured_and_named(measured: list[Choice]) -> None:
    model, x = Int8(16, 32), torch.randn(64, 16)
    assert_as_accurate(compiled(model)(x), model(x), reference_of(copy.deepcopy(model).double(), x))
    (choice,) = measured
    assert choice.title == "int8_linear_mul_gelu"
    assert choice.operands == (
        ((64, 16), (16, 1), torch.float32), ((32, 16), (16, 1), torch.int8)
    )  # fmt: skip


def is_product(step: Any) -> bool:
    return isinstance(step, KernelCall) and any(isinstance(s, Multiply) for s in statements(step.kernel.body))


def test_rows_that_do_not_stay_in_the_cache_may_be_taken_in_runs() -> None:
    """Where threads get equally many."""
    choice = choices_of(nn.Linear(256, 72).requires_grad_(False), torch.randn(2560, 256))[0]
    bodies = [step.kernel.body for c in choice.candidates for step in c.schedule.steps if is_product(step)]
    outer = {body[0].var.name.rstrip("0123456789") for body in bodies if isinstance(body[0], Loop)}
    assert outer == {"run", "panel"}


def test_an_epilogue_may_stay_apart() -> None:
    choice = choices_of(net(), torch.randn(64, 16))[0]
    assert [len(c.schedule.steps) for c in choice.candidates[-2:]] == [2, 2]
    assert all(len(c.schedule.steps) == 1 for c in choice.candidates[:-2])


def test_a_candidate_that_does_not_compile_loses(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    load = backend._Candidate.load

    def broken(self: backend._Candidate) -> Any:
        if "panels" not in self.host:
            raise hotloop.errors.ToolchainError("no")
        return load(self)

    monkeypatch.setattr(backend._Candidate, "load", broken)
    model, x = net(), torch.randn(64, 16)
    assert_as_accurate(compiled(model)(x), model(x), reference_of(model, x))
    assert capfd.readouterr().err.count("  aten_linear       failed") == 2
