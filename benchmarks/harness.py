"""Measuring: several callables interleaved in one run, fresh processes for what only happens once.

What comes in: functions with their inputs, and names of back ends. What goes out: :class:`Timing` values,
tables, JSON and plots.

What holds: back ends are compared only within one run, in rounds that alternate between them, so that a
machine that drifts, drifts for all; figures are medians; each call's result is dropped before the next call,
as in a loop ``y = f(x)``; compile times and memory come from a fresh process each, with cache folders of its
own. A result is checked against eager before it is timed.

Next: ``micro.py``, ``models.py``, ``compile_time.py``, ``overhead.py`` and ``demo.py`` are the programs.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

try:
    import resource
except ImportError:  # Windows: every round counts there
    resource = None  # type: ignore[assignment]

HERE = Path(__file__).resolve().parent
for _folder in (HERE.parent / "tests", HERE.parent / "tests" / "models"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

DEFAULT_BACKENDS = "inductor,hotloop"
_MIN_BATCH_SECONDS = 1e-3
_MIN_ROUNDS, _MAX_ROUNDS = 7, 1000
_SECONDS_PER_PREEMPTION = 0.1  # a preemption this rare changes a round by a few per cent at most


# ------------------------------------------------------------------------------------ back ends


def resolve_backend(name: str) -> Any:
    """What ``torch.compile`` takes as ``backend``: hotloop's own even where it is not installed.

    On a machine with only a checkout (``PYTHONPATH=src``) no entry point names hotloop, so that its module
    is imported here and the function itself passed.
    """
    if name.startswith("hotloop") and name not in torch.compiler.list_backends(exclude_tags=()):
        return getattr(importlib.import_module("hotloop.backend"), name)
    return name


#: Options that both back ends know by these names.
_OPTIONS = frozenset(("freezing", "max_autotune"))


def compile_with(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` compiled by the back end ``name``, or ``name:mode``; "eager" is the function itself.
    Besides torch.compile's modes there are options: ``name:freezing``, ``name:max_autotune``, or both with a
    ``+`` between them.

    Each gets its own code object: Dynamo keeps its compiled entries on it, and a shared one would make
    every call of one back end look through the entries of the others.
    """
    if name == "eager":
        return function
    backend, _, mode = name.partition(":")
    more: dict[str, Any] = {"mode": mode} if mode else {}
    if mode and _OPTIONS.issuperset(mode.split("+")):
        more = {"options": dict.fromkeys(mode.split("+"), True)}
    return torch.compile(own_code(function), backend=resolve_backend(backend), dynamic=False, **more)


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a Python function with a code object of its own."""
    assert isinstance(function, types.FunctionType), f"not a plain function: {function!r}"
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# ------------------------------------------------------------------------------------ timing


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call: the median over rounds, and its quartiles.

    ``rounds`` is how many rounds count, ``disturbed`` how many were left out since the system took the
    processor from this process for another; ``quiet`` is false where too few others were left, so that
    the disturbed ones had to count too.
    """

    median: float
    low: float
    high: float
    rounds: int
    calls_per_round: int
    disturbed: int
    quiet: bool


@dataclass
class _Samples:
    calls: int
    clean: list[float] = field(default_factory=list)
    disturbed: list[float] = field(default_factory=list)

    def take(self, function: Callable[[], Any]) -> None:
        before = _preemptions()
        seconds = _seconds_per_call(function, self.calls)
        allowed = int(seconds * self.calls / _SECONDS_PER_PREEMPTION)
        (self.clean if _preemptions() - before <= allowed else self.disturbed).append(seconds)

    def timing(self) -> Timing:
        quiet = len(self.clean) >= _MIN_ROUNDS
        counted = self.clean if quiet else self.clean + self.disturbed
        low, median, high = statistics.quantiles([1e3 * seconds for seconds in counted], n=4)
        return Timing(median, low, high, len(counted), self.calls, len(self.disturbed), quiet)


def _preemptions() -> int:
    """How often any thread of this process lost its processor while it had work to do."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource else 0


def time_interleaved(functions: dict[str, Callable[[], Any]], seconds: float = 1.5) -> dict[str, Timing]:
    """Times functions of no arguments in alternating rounds that take about ``seconds`` in all.

    A round runs each function for a batch of calls of at least a millisecond; every second round goes the
    other way round, so that no function always follows the same one. On a busy machine it goes on, for
    up to three times as long, until each function has enough undisturbed rounds.
    """
    samples: dict[str, _Samples] = {}
    for name, function in functions.items():
        for _ in range(2):
            function()
        once = min(_seconds_per_call(function, 1) for _ in range(3))
        samples[name] = _Samples(max(1, math.ceil(_MIN_BATCH_SECONDS / max(once, 1e-7))))
    order = list(functions)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    begin = time.perf_counter()
    try:
        for turn in range(_MAX_ROUNDS):
            for name in order if turn % 2 == 0 else reversed(order):
                samples[name].take(functions[name])
            elapsed = time.perf_counter() - begin
            enough = all(len(sample.clean) >= 2 * _MIN_ROUNDS for sample in samples.values())
            if turn + 1 >= _MIN_ROUNDS and elapsed >= (seconds if enough else 3 * seconds):
                break
    finally:
        if collecting:
            gc.enable()
    return {name: sample.timing() for name, sample in samples.items()}


def _seconds_per_call(function: Callable[[], Any], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - begin) / calls


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean, NaN of no values."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


# ------------------------------------------------------------------------------------ cases


@dataclass(frozen=True)
class Outcome:
    """What one case gave: a timing per back end, and per back end that failed, why."""

    case: str
    timings: dict[str, Timing] = field(default_factory=dict)
    first_call: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    inaccurate: dict[str, str] = field(default_factory=dict)
    max_error: dict[str, float] = field(default_factory=dict)

    def ratio(self, base: str, name: str) -> float:
        """How many times faster than ``base`` the back end ``name`` is; NaN where either is missing."""
        if base not in self.timings or name not in self.timings:
            return math.nan
        return self.timings[base].median / self.timings[name].median


Check = Callable[[Any, Any], None]


def measure(
    case: str,
    function: Callable[..., Any],
    inputs: Sequence[Any],
    backends: Sequence[str],
    check: Check,
    seconds: float = 1.5,
    beside: dict[str, Callable[[], Any]] | None = None,
) -> Outcome:
    """Compiles ``function`` by each back end, checks each result against eager's, times all interleaved.

    A back end that fails is reported and not timed; so is hotloop where ``check(actual, eager)`` rejects its
    result. Another back end's is reported and timed all the same: it is what hotloop is compared with.
    ``beside``: functions that are timed in the same rounds, such as what the machine can do at most.
    """
    torch.compiler.reset()
    outcome = Outcome(case)
    runnable: dict[str, Callable[[], Any]] = {"eager": lambda: function(*inputs)}
    with torch.no_grad():
        expected = function(*inputs)
        for name in backends:
            begin = time.perf_counter()
            try:
                compiled = compile_with(name, function)
                actual = compiled(*inputs)
                outcome.first_call[name] = time.perf_counter() - begin
                outcome.max_error[name] = largest_difference(actual, expected)
                try:
                    check(actual, expected)
                    check(compiled(*inputs), expected)
                except AssertionError as error:
                    if name.startswith("hotloop"):
                        raise
                    outcome.inaccurate[name] = _first_line(error)
            except Exception as error:  # noqa: BLE001 - any failure of a back end is a line of the table
                outcome.failures[name] = _first_line(error)
                continue
            runnable[name] = _bind(compiled, inputs)
        del expected
        outcome.timings.update(time_interleaved({**runnable, **(beside or {})}, seconds))
    return outcome


def _first_line(error: Exception) -> str:
    message = (str(error).strip() or repr(error)).splitlines()[0]
    return f"{type(error).__name__}: {message}"[:300]


def _bind(function: Callable[..., Any], inputs: Sequence[Any]) -> Callable[[], Any]:
    return lambda: function(*inputs)


def largest_difference(actual: Any, expected: Any) -> float:
    """The largest absolute difference between two results, over all their tensors."""
    pairs = zip(tensors(actual), tensors(expected), strict=True)
    return max((float((a.double() - e.double()).abs().max()) for a, e in pairs if e.numel()), default=0.0)


def tensors(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


# ------------------------------------------------------------------------------------ fresh processes


def in_fresh_process(task: str, case: str, backend: str, cache: Path, **environment: str) -> dict[str, Any]:
    """Runs ``worker.py`` with both compilers' caches under ``cache`` and returns what it reports."""
    env = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "HOTLOOP_CACHE_DIR": str(cache / "hotloop"),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        **environment,
    }
    # Bytecode is kept, as pip makes it where a package is installed: torch's own is there in any case.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, str(HERE / "worker.py"), task, case, backend]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-12:])
        raise RuntimeError(f"{task} of {case} with {backend} failed:\n{tail}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def cold_and_warm(case: str, backend: str, repeat: int = 1) -> dict[str, float]:
    """Seconds of the first call: "cold" with empty caches, "warm" in a second process with full ones."""
    samples: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(repeat):
        with tempfile.TemporaryDirectory(prefix="hotloop-benchmark-") as folder:
            for kind in ("cold", "warm"):
                samples[kind].append(in_fresh_process("compile", case, backend, Path(folder))["first_call"])
    return {kind: statistics.median(values) for kind, values in samples.items()}


def peak_memory(case: str, backend: str) -> dict[str, float]:
    """MiB that a forward needs over what lies there between calls ("peak"), and that is "kept" for the next.

    hotloop's pool keeps memory between calls, which would hide in the level before the call. So its peak
    is that of a process with the pool switched off, and what the pool keeps is the difference that
    switching it on makes to the level between calls.
    """
    # A fixed threshold: with malloc's sliding one, freed tensors of up to 32 MiB would not go back.
    fixed = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    with tempfile.TemporaryDirectory(prefix="hotloop-benchmark-") as folder:
        cache = Path(folder)
        if not backend.startswith("hotloop"):
            result = in_fresh_process("memory", case, backend, cache, **fixed)
            return {"peak": result["peak"], "kept": 0.0}
        without = in_fresh_process("memory", case, backend, cache, HOTLOOP_MEMORY_POOL="0", **fixed)
        pooled = in_fresh_process("memory", case, backend, cache, HOTLOOP_MEMORY_POOL="1", **fixed)
        return {"peak": without["peak"], "kept": max(0.0, pooled["level"] - without["level"])}


# ------------------------------------------------------------------------------------ reports


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        model = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model
        )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def print_machine() -> None:
    """One line that says where the figures come from."""
    facts = machine()
    print(
        f"{facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads, {facts['capability']}, "
        f"torch {facts['torch']}, Python {facts['python']}"
    )


def _time_width(name: str) -> int:
    return max(16, len(name) + 6)


def _ratio_width(name: str, base: str) -> int:
    return max(20, len(name) + len(base) + 4)


class Table:
    """The table of run times, printed line by line as cases finish."""

    def __init__(self, backends: Sequence[str], width: int = 34) -> None:
        self.backends = list(backends)
        self.bases = ["eager", *(name for name in backends if name.startswith("inductor"))]
        self.width = width
        self.outcomes: list[Outcome] = []
        times = "".join(f"{name + ' ms':>{_time_width(name)}}" for name in ["eager", *self.backends])
        ratios = "".join(f"{f'{name}/{base}':>{_ratio_width(name, base)}}" for base, name in self._pairs())
        header = f"{'':{width}}{times}{ratios}"
        print(header)
        print("-" * len(header))

    def _pairs(self) -> list[tuple[str, str]]:
        others = [name for name in self.backends if name not in self.bases]
        return [(b, n) for b in self.bases for n in (self.backends if b == "eager" else others)]

    def add(self, outcome: Outcome) -> None:
        """Prints and keeps one case."""
        self.outcomes.append(outcome)
        line = f"{outcome.case:{self.width}}"
        for name in ["eager", *self.backends]:
            timing = outcome.timings.get(name)
            mark = " " if timing is None or timing.quiet else "~"
            width = _time_width(name) - 1
            line += f"{timing.median:{width}.4f}{mark}" if timing else f"{'failed':>{width}} "
        for base, name in self._pairs():
            ratio = outcome.ratio(base, name)
            width = _ratio_width(name, base)
            line += f"{'':>{width}}" if math.isnan(ratio) else f"{ratio:{width - 1}.2f}x"
        print(line, flush=True)
        for name, reason in outcome.failures.items():
            print(f"    {name}: {reason}", flush=True)
        for name, reason in outcome.inaccurate.items():
            print(f"    {name} is less accurate than eager: {reason}", flush=True)

    def finish(self) -> int:
        """Prints geometric means and each ratio's lowest case; returns the number of failures."""
        for base, name in self._pairs():
            ratios = {outcome.case: outcome.ratio(base, name) for outcome in self.outcomes}
            known = {case: ratio for case, ratio in ratios.items() if not math.isnan(ratio)}
            if not known:
                continue
            worst = min(known, key=lambda case: known[case])
            print(
                f"{name} over {base}: geometric mean {geometric_mean(known.values()):.3f}x of {len(known)} "
                f"cases, least {known[worst]:.2f}x ({worst})"
            )
        if any(not timing.quiet for outcome in self.outcomes for timing in outcome.timings.values()):
            print("~: other programs took the processors in most rounds; measure again on a quiet machine")
        failed = sum(len(outcome.failures) for outcome in self.outcomes)
        if failed:
            print(f"{failed} failed or gave wrong results; the geometric means leave them out")
        return failed

    def summary(self) -> dict[str, Any]:
        """Everything measured, ready for JSON."""
        means = {}
        for base, name in self._pairs():
            ratios = [outcome.ratio(base, name) for outcome in self.outcomes]
            known = [ratio for ratio in ratios if not math.isnan(ratio)]
            means[f"{name}/{base}"] = geometric_mean(known) if known else None
        return {
            "machine": machine(),
            "geometric_means": means,
            "cases": [asdict(outcome) for outcome in self.outcomes],
        }


def write_json(path: str | None, value: Any) -> None:
    """Writes a result, where a path was given."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(value, indent=1) + "\n")


def write_plot(path: str | None, table: Table, title: str) -> None:
    """Bars of the speed-up over eager for each case and back end, where a path was given."""
    if not path:
        return
    pyplot = importlib.import_module("matplotlib.pyplot")
    cases = [outcome.case for outcome in table.outcomes]
    figure, axes = pyplot.subplots(figsize=(max(8.0, 0.45 * len(cases)), 5.5), layout="constrained")
    width = 0.8 / len(table.backends)
    for number, name in enumerate(table.backends):
        heights = [outcome.ratio("eager", name) for outcome in table.outcomes]
        places = [place + (number - (len(table.backends) - 1) / 2) * width for place in range(len(cases))]
        axes.bar(places, heights, width, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(cases)), cases, rotation=75, ha="right", fontsize=8)
    axes.set_yscale("log", base=2)
    axes.set_ylabel("speed-up over eager")
    facts = machine()
    axes.set_title(
        f"{title}\n{facts['cpu']}, {facts['threads']} threads, torch {facts['torch']}", fontsize=10
    )
    axes.legend()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every program here has."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--backends", default=DEFAULT_BACKENDS, help="separated by commas; name or name:mode")
    made.add_argument("--filter", default="", help="only names with one of these words (commas)")
    made.add_argument("--quick", action="store_true", help="a few cases, measured shortly")
    made.add_argument("--seconds", type=float, default=1.5, help="measuring time for each case")
    made.add_argument("--threads", type=int, default=0, help="threads (default: torch's own choice)")
    made.add_argument("--json", metavar="FILE")
    made.add_argument("--plot", metavar="FILE")
    return made


def parse(made: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Parses, and sets the number of threads asked for."""
    options = made.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.quick:
        options.seconds = min(options.seconds, 0.5)
    return options


def selected(names: Iterable[str], pattern: str) -> list[str]:
    """The names with one of the comma-separated words of ``pattern``; all for an empty one. A word with ``=``
    before it is a whole name."""
    words = [word for word in pattern.split(",") if word]
    return [n for n in names if not words or any(f"={n}" == word or word in n for word in words)]
