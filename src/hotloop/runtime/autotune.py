"""Measures the candidates of each choice that the schedule left open, and picks the fastest.

What comes in: ``Choice``s, each with candidates as schedules of one product alone. What goes out: the number
of the candidate to take. What holds in between: candidates are compiled side by side and then timed one call
at a time, in turns, on tensors of the real sizes, with caches emptied before each call; the median counts,
and the default candidate stays unless another is faster by more than chance. A result is kept on disk under
the machine, the threads, the operands and the code of the candidates: it is never measured again.

The next file is ``program.py``.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

import torch

from hotloop.errors import ToolchainError
from hotloop.ir import sizes as sz
from hotloop.ir.kernel import Choice, Schedule
from hotloop.ir.loops import Buffer
from hotloop.runtime.cache import Cache, digest

__all__ = ["Prepared", "Result", "Tuner", "report"]

#: Bytes written between two timings: more than the L2 caches of some cores hold, so that a weight comes from
#: where it comes from in a model.
FLUSHED = 64 << 20
#: Calls of each candidate before the slow ones leave, calls in all, and seconds after which a choice is made.
FIRST, ROUNDS, SECONDS = 5, 25, 1.5
#: Slower than the best by this factor after the first calls: out.
OUT = 1.3
#: What another candidate has to be faster by than the default, and in which share of the rounds.
BETTER, WINS = 0.97, 0.7


class Prepared(Protocol):
    """A candidate whose code is printed but not compiled."""

    @property
    def texts(self) -> Sequence[str]:
        """The texts of its functions."""

    def start(self) -> None:
        """Begin to compile."""

    def load(self) -> Callable[[list[Any]], Any]:
        """The callable of its host program; waits for the compiler."""


@dataclass(frozen=True)
class Result:
    """The timings of one choice: for each candidate the milliseconds of its calls, none where it failed."""

    choice: Choice
    times: Mapping[str, tuple[float, ...]]
    pick: str

    def median(self, name: str) -> float:
        """Milliseconds of a candidate."""
        return statistics.median(self.times[name])

    def timings(self) -> list[dict[str, Any]]:
        """Each timing as a record, one a call, in the order of candidates."""
        operands = [
            {"sizes": list(sizes), "strides": list(strides), "dtype": str(dtype)}
            for sizes, strides, dtype in self.choice.operands
        ]
        return [
            {
                "operator": self.choice.title, "operands": operands, "candidate": name, "call": k, "ms": ms,
                "picked": name == self.pick,
            }
            for name, times in self.times.items()
            for k, ms in enumerate(times)
        ]  # fmt: skip


class Tuner:
    """Picks candidates; knows what it has measured, and finds what other processes measured in the cache.

    Arguments:
        cache: where results are kept.
        machine: what else, beside operands and code, the timings depend on, by what it is.
    """

    def __init__(self, cache: Cache, machine: Mapping[str, str]) -> None:
        self._cache = cache
        self._machine = dict(machine)
        self._known: dict[str, str] = {}
        self._lock, self._pid = threading.Lock(), os.getpid()

    def pick(
        self,
        choices: Mapping[int, Choice],
        prepare: Callable[[Schedule], Prepared],
        stream: TextIO | None = None,
    ) -> tuple[dict[int, int], list[Result]]:
        """The number of the candidate for each choice, and what had to be measured for it.

        Arguments:
            prepare: prints the code of a candidate.
            stream: where the summary goes, and progress if it is a terminal; standard error by default.
        """
        stream = sys.stderr if stream is None else stream
        if self._pid != os.getpid():  # a thread of the parent may have held it at the fork
            self._lock, self._pid = threading.Lock(), os.getpid()
        prepared: dict[int, list[Prepared]] = {}
        keys: dict[int, tuple[str, dict[str, str]]] = {}
        for i, choice in choices.items():
            if len(choice.candidates) > 1:
                prepared[i] = [prepare(c.schedule) for c in choice.candidates]
                keys[i] = self._key(choice, prepared[i])
        with self._lock:  # two measurements at once would disturb each other
            unknown: dict[str, int] = {}
            for i, (key, parts) in keys.items():
                if self._recall(key, parts, choices[i]) is None:
                    unknown.setdefault(key, i)
            results = self._measure_all(unknown, choices, prepared, keys, stream) if unknown else []
            picks = dict.fromkeys(choices, 0)
            for i, (key, _) in keys.items():
                names = [c.name for c in choices[i].candidates]
                picks[i] = names.index(self._known[key])
        return picks, results

    def _key(self, choice: Choice, prepared: Sequence[Prepared]) -> tuple[str, dict[str, str]]:
        """The comments are the user's lines, which change nothing."""
        program = choice.candidates[0].schedule.program
        shapes = [(b.dtype, b.sizes, b.strides) for b in program.buffers.values() if b.kind != "temp"]
        code = [re.sub(r"^//.*\n", "", t, flags=re.MULTILINE) for p in prepared for t in p.texts]
        parts = {
            **self._machine,
            "operator": f"{choice.title} {choice.operands} {shapes}",
            "candidates": " ".join(c.name for c in choice.candidates),
            "code": digest({str(k): text for k, text in enumerate(code)}),
        }
        return digest(parts), parts

    def _recall(self, key: str, parts: Mapping[str, str], choice: Choice) -> str | None:
        """The name that was picked under this key, in this process or another."""
        if key in self._known:
            return self._known[key]
        data = self._cache.get(key, ".json", _name(choice), parts)
        try:
            pick = json.loads(data)["pick"] if data is not None else None
        except (ValueError, KeyError, TypeError):
            return None
        if pick not in [c.name for c in choice.candidates]:
            return None
        self._known[key] = str(pick)
        return str(pick)

    def _measure_all(
        self, unknown: Mapping[str, int], choices: Mapping[int, Choice],
        prepared: Mapping[int, Sequence[Prepared]], keys: Mapping[int, tuple[str, dict[str, str]]],
        stream: TextIO,
    ) -> list[Result]:  # fmt: skip
        begin = time.perf_counter()
        for i in unknown.values():
            for p in prepared[i]:
                p.start()
        progress = _Progress(stream, sum(len(prepared[i]) for i in unknown.values()))
        loaded = {i: [_attempt(p.load, progress) for p in prepared[i]] for i in unknown.values()}
        compiled = time.perf_counter()
        results = []
        progress = _Progress(stream, len(unknown), "timing")
        for key, i in unknown.items():
            result = _measure(choices[i], loaded.pop(i))
            progress.step()
            results.append(result)
            self._known[key] = result.pick
            value = {"pick": result.pick, "ms": {n: result.median(n) for n, t in result.times.items() if t}}
            self._cache.put(key, ".json", json.dumps(value).encode(), _name(choices[i]), keys[i][1])
        progress.clear()
        print(report(results, compiled - begin, time.perf_counter() - compiled), file=stream, flush=True)
        return results


def _name(choice: Choice) -> str:
    return f"autotuning of {_head(choice)}"


def _attempt(load: Callable[[], Callable[..., Any]], progress: _Progress) -> Callable[..., Any] | None:
    """A candidate that does not compile is none."""
    try:
        return load()
    except ToolchainError:
        return None
    finally:
        progress.step()


# --- timing -------------------------------------------------------------------------------------------------


def _measure(choice: Choice, calls: Sequence[Callable[[list[Any]], Any] | None]) -> Result:
    """Time the candidates in turns."""
    program = choice.candidates[0].schedule.program
    with torch.inference_mode(False), torch.no_grad():
        given: list[Any] = [_sample(program.buffers[n]) for n in program.inputs if n is not None]
        given += [sz.hint(v) for v in program.symbols]
        flushed = torch.zeros(FLUSHED // 4, dtype=torch.int32)
        times: dict[str, list[float]] = {c.name: [] for c in choice.candidates}
        racing = {c.name: f for c, f in zip(choice.candidates, calls, strict=True) if f is not None}
        for f in racing.values():
            for _ in range(2):  # packs the weight, and takes the memory that later calls use again
                f(list(given))
        begin = time.perf_counter()
        for turn in range(ROUNDS):
            for name, f in racing.items():
                times[name].append(_time(f, given, flushed))
            if turn + 1 >= FIRST:
                racing = _in_the_race(racing, times, choice.candidates[0].name)
                if len(racing) == 1 or time.perf_counter() - begin > SECONDS:
                    break
    return Result(choice, {n: tuple(t) for n, t in times.items()}, _fastest(choice, times))


def _time(f: Callable[[list[Any]], Any], given: Sequence[Any], flushed: torch.Tensor) -> float:
    """Milliseconds of one call that finds its operands in memory."""
    flushed.add_(1)
    begin = time.perf_counter_ns()
    f(list(given))
    return (time.perf_counter_ns() - begin) * 1e-6


def _in_the_race(
    racing: Mapping[str, Callable[..., Any]], times: Mapping[str, Sequence[float]], default: str
) -> dict[str, Callable[..., Any]]:
    """Those that may still be the fastest; the default, which the others are compared with, to the end.

    The shortest call decides: whatever else the machine does makes calls longer, never shorter.
    """
    best = min(min(times[n]) for n in racing)
    kept = {n: f for n, f in racing.items() if min(times[n]) <= OUT * best}
    if default in racing and len(kept) > 1:
        kept.setdefault(default, racing[default])
    return kept


def _fastest(choice: Choice, times: Mapping[str, Sequence[float]]) -> str:
    """The default, unless another candidate is faster by more than chance."""
    default = choice.candidates[0].name
    measured = {n: statistics.median(t) for n, t in times.items() if t}
    if not measured:
        return default
    best = min(measured, key=lambda n: measured[n])
    if default not in measured or best == default:
        return best
    pairs = list(zip(times[best], times[default], strict=False))  # of the same rounds
    wins = sum(a < b for a, b in pairs)
    better = measured[best] <= BETTER * measured[default] and wins >= WINS * len(pairs)
    return best if better else default


def _sample(b: Buffer) -> torch.Tensor:
    """A tensor of a buffer's sizes and strides; integers are 0, an index into anything."""
    sizes, strides = [sz.hint(n) for n in b.sizes], [sz.hint(s) for s in b.strides]
    reach = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) if 0 not in sizes else 0
    random = b.dtype.is_floating_point and b.dtype.itemsize > 1
    flat = torch.randn(reach).to(b.dtype) if random else torch.zeros(reach, dtype=b.dtype)
    return flat.as_strided(sizes, strides)


# --- what a person sees -------------------------------------------------------------------------------------


def report(results: Sequence[Result], compiling: float, timing: float) -> str:
    """The summary: each choice with its candidates, the fastest first, and what it took, in seconds."""
    lines = []
    for r in results:
        lines += [
            f"AUTOTUNE {_head(r.choice)}",
            f"strides: {', '.join(str(list(strides)) for _, strides, _ in r.choice.operands)}",
            f"dtypes: {', '.join(str(dtype) for _, _, dtype in r.choice.operands)}",
        ]
        medians = {n: r.median(n) for n, t in r.times.items() if t}
        width = max(map(len, r.times))
        for name in sorted(medians, key=lambda n: medians[n]):
            share = 100 * min(medians.values()) / medians[name]
            lines.append(f"  {name:{width}} {medians[name]:.4f} ms {share:.1f}%")
        lines += [f"  {name:{width}} failed" for name in r.times if name not in medians]
    count = sum(len(r.times) for r in results)
    took = f"{compiling + timing:.2f} seconds for {count} choices"
    lines.append(f"AUTOTUNE took {took} ({compiling:.2f} compiling, {timing:.2f} timing)")
    return "\n".join(lines)


def _head(choice: Choice) -> str:
    """``linear_relu(64x16, 32x16, 32)``"""
    shapes = ("x".join(map(str, sizes)) or "1" for sizes, _, _ in choice.operands)
    return f"{choice.title}({', '.join(shapes)})"


class _Progress:
    """A bar on a terminal; nothing elsewhere."""

    def __init__(self, stream: TextIO, total: int, what: str = "compiling") -> None:
        self._stream = stream if stream.isatty() else None
        self._total, self._what, self._done = total, what, 0

    def step(self) -> None:
        self._done += 1
        if self._stream is not None:
            full = 30 * self._done // self._total
            bar = "#" * full + "." * (30 - full)
            self._stream.write(f"\rAUTOTUNE {self._what} [{bar}] {self._done}/{self._total}")
            self._stream.flush()

    def clear(self) -> None:
        if self._stream is not None:
            self._stream.write("\r\033[K")
