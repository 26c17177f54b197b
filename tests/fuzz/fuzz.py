"""Random programs, run eagerly and by every engine of hotloop: all must agree, gradients too.

What comes in: a seed and a count. What goes out: each program that differs, made as small as it goes while it
still differs, as text that can be pasted into test_fuzz.py; and how many were run. What holds in between: the
judge knows what rounding may do to this very program, because it ran it several times with every result off
by a unit in the last place; a result may differ from eager's by a few times as much.

    python tests/fuzz/fuzz.py --count 10000 --seed 0        about 0.6 s a program
    python tests/fuzz/fuzz.py --seed 1234 --count 1 --show  one program, its text and graphs

Next: test_fuzz.py, a short run of it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from functorch.compile import aot_function
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parent.parent))

import hotloop
from engines import ENGINES, Traced, build
from generator import generate
from judge import float64_reference, to_float64
from programs import Input, Noise, Program, Step, agrees, make_inputs

__all__ = ["GROUP", "Failure", "check", "outcomes", "run", "shrink"]

PACKAGE = str(Path(hotloop.__file__).parent)
GROUP = 12  # programs compiled as one file
NOISY = 3  # runs with noise
ALLOWED = 8.0  # times the noise
#: Units in the last place of the largest element that are allowed beside the noise, 8 or more: nothing judges
#: float64, in which eager adds up variances and the like in one go.
_UNITS = {torch.float64: 64.0}


@dataclass(frozen=True)
class Failure:
    """A program and what an engine did with it."""

    program: Program
    engine: str
    text: str

    def __str__(self) -> str:
        return f"{self.engine}: {self.text}\n{self.program.source()}\n{self.program}"


@dataclass
class Observed:
    """All that a caller sees of a call: results, inputs afterwards, gradients."""

    results: list[Tensor]
    inputs: list[Tensor]
    gradients: list[Tensor | None]

    def tensors(self) -> Iterator[tuple[str, Tensor | None]]:
        for name in ("results", "inputs", "gradients"):
            for k, t in enumerate(getattr(self, name)):
                yield f"{name}[{k}]", t


def observe(
    program: Program, call: Callable[..., Any], number: int = 0, noise: Noise | None = None
) -> Observed:
    """Call it, with the sizes of that call, and go backward from all results that have a gradient."""
    inputs = make_inputs(program, number)
    if noise is None:
        return _observe(inputs, call)
    for t in inputs:
        noise.disturb(t.detach())
    with noise:
        return _observe(inputs, call)


def _observe(inputs: list[Tensor], call: Callable[..., Any]) -> Observed:
    # Writes go to inputs that want no gradient; a graph's input cannot be a leaf that is written.
    results = list(call(*inputs))
    roots = [r for r in results if r.requires_grad]
    gradients: list[Tensor | None] = [None] * len(inputs)
    wanting = [i for i, t in enumerate(inputs) if t.requires_grad]
    if roots and wanting:
        heads = [_head(r, k) for k, r in enumerate(roots)]
        found = torch.autograd.grad(roots, [inputs[i] for i in wanting], heads, allow_unused=True)
        for i, g in zip(wanting, found, strict=True):
            gradients[i] = g
    return Observed([r.detach() for r in results], [t.detach() for t in inputs], gradients)


def _head(result: Tensor, k: int) -> Tensor:
    """What comes into backward: other numbers for each result, the same in every run."""
    n = result.numel()
    ramp = (torch.arange(n) * 7 + k) % 5 * 0.5 - 0.75
    return ramp.reshape(result.shape).to(result.dtype)


def announced(program: Program, call: int = 0) -> list[tuple[int, ...]]:
    """The strides of results that PyTorch announces to whoever compiles; its kernels may choose others."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, enable_python_dispatcher():
        plain = replace(program, inputs=_plain(program.inputs))
        inputs = [mode.from_tensor(t) for t in make_inputs(plain, call)]
        return [r.stride() for r in program.function()(*inputs)]


class Truth:
    """What eager does in one call, and how far rounding may move it."""

    def __init__(self, program: Program, call: int = 0) -> None:
        self._program, self._call = program, call
        function = program.function()
        self.eager = observe(program, function, call)
        self.strides = [
            *announced(program, call),
            *(t.stride() for t in self.eager.inputs),
            *[None] * len(program.inputs),
        ]
        noisy = [observe(program, function, call, Noise(1000 + k)) for k in range(NOISY)]
        self.names: list[str] = []
        self.bounds: list[float] = []
        self.stable = True
        for k, (name, want) in enumerate(self.eager.tensors()):
            others = [list(n.tensors())[k][1] for n in noisy]
            self.names.append(name)
            self.bounds.append(0.0)
            if want is None or not want.is_floating_point() or want.numel() == 0:
                self.stable &= all(_same(want, o) for o in others)
                continue
            self.stable &= all(o is not None and agrees(want, o) for o in others)
            wide = want.to(torch.float64)
            spread = max(float((o.to(torch.float64) - wide).abs().amax()) for o in others if o is not None)
            info = torch.finfo(want.dtype)
            largest = float(wide.abs().amax())
            units = _UNITS.get(want.dtype, 8.0)
            self.bounds[-1] = ALLOWED * spread + units * (info.eps * largest + info.tiny)

    def difference(self, got: Observed, strides: bool = True) -> str | None:
        """What differs, or nothing."""
        pairs = zip(self.names, self.bounds, self.strides, self.eager.tensors(), got.tensors(), strict=True)
        for k, (name, bound, announced, (_, want), (_, have)) in enumerate(pairs):
            text = _differs(want, have, bound, announced if strides else None)
            if text is not None and not self._as_accurate(k, want, have, bound):
                sizes = f" with sizes {self._program.sizes[self._call]}" if self._program.sizes else ""
                return f"{name}: {text}{sizes}"
        return None

    def _as_accurate(self, k: int, want: Tensor | None, have: Tensor | None, bound: float) -> bool:
        """Whether float64 says that this is no further from the truth than eager, as judge.py asks: one
        operator that adds many terms is off by more than a unit in the last place."""
        if want is None or have is None or want.shape != have.shape:
            return False
        exact = self._in_float64()
        true = None if exact is None else list(exact.tensors())[k][1]
        if true is None or true.shape != want.shape or not want.numel():
            return False
        if not want.is_floating_point():  # eager's own value hangs on its rounding
            same_kind = want.dtype is have.dtype is true.dtype
            return same_kind and bool(((have == want) | (have == true)).all())
        if true.dtype is not torch.float64 or want.dtype is torch.float64:
            return False
        theirs = float((want.to(torch.float64) - true).abs().amax())
        return bool(((have.to(torch.float64) - true).abs() <= 2 * theirs + bound).all())

    def _in_float64(self) -> Observed | None:
        made = make_inputs(self._program, self._call)
        inputs = [to_float64(t.detach()).requires_grad_(t.requires_grad) for t in made]
        try:
            with float64_reference():
                return _observe(inputs, self._program.function())
        except Exception:  # noqa: BLE001 - then nothing but the noise decides
            return None


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else a.shape == b.shape and torch.equal(a, b)


def _differs(
    want: Tensor | None, have: Tensor | None, bound: float, strides: Sequence[int] | None
) -> str | None:
    if want is None or have is None:
        # Without a gradient is with a gradient of zeros: AOTAutograd knows only one of them.
        some = want if want is not None else have
        return None if some is None or not bool(some.any()) else f"{have} where eager has {want}"
    if want.shape != have.shape or want.dtype is not have.dtype:
        return f"{have.dtype} {list(have.shape)} where eager has {want.dtype} {list(want.shape)}"
    if strides is not None and _strides(want.shape, strides) not in ([], _strides(have.shape, have.stride())):
        return f"strides {have.stride()} where PyTorch announces {strides}"
    if want.numel() == 0:
        return None
    if want.is_floating_point():
        bad = ~((have.to(torch.float64) - want.to(torch.float64)).abs() <= bound)
    else:
        bad = have != want
    if not bool(bad.any()):
        return None
    at = tuple(int(i) for i in bad.nonzero()[0])
    count = int(bad.sum())
    values = f"{have[at].item()!r} where eager has {want[at].item()!r}"
    return f"{count} of {bad.numel()} differ, by more than {bound:.3g}: at {at} {values}"


def _strides(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Those that matter. The strides of gradients are AOTAutograd's affair, and not compared."""
    if len(strides) != len(shape):  # torch 2.11 announces a norm of more dimensions than it has
        return []
    return [] if 0 in shape else [s for s, n in zip(strides, shape, strict=True) if n > 1]


# --- running ------------------------------------------------------------------------------------------------


def _plain(inputs: Sequence[Input]) -> tuple[Input, ...]:
    return tuple(replace(i, grad=False) for i in inputs)


def without_gradients(program: Program) -> Program:
    return replace(program, inputs=_plain(program.inputs))


Truths = Sequence[Truth]  # one a call


def prepared(program: Program) -> tuple[Program, Truths] | None:
    """The program with what eager does; without gradients where eager cannot give them, or only noise."""
    for one in dict.fromkeys((program, without_gradients(program))):
        try:
            truths = [Truth(one, k) for k in one.calls]
        except Exception:  # noqa: BLE001 - a write to what backward needs, most of the time
            continue
        if all(t.stable for t in truths):
            return one, truths
    return None


def difference(
    program: Program, truths: Truths, call: Callable[..., Any], strides: bool = True
) -> str | None:
    """What differs in the first call that does, or nothing."""
    found = (t.difference(observe(program, call, k), strides) for k, t in enumerate(truths))
    return next((text for text in found if text is not None), None)


def run(
    programs: Sequence[Program], engines: Sequence[str] = ENGINES, quick: bool = True
) -> Iterator[tuple[Program, Failure | None, bool]]:
    """Each program with its failure, if it has one, and whether it was judged at all."""
    ready: list[tuple[Program, Truths, Traced]] = []
    for number, program in enumerate(programs):
        with _silent():
            made = prepared(program)
        if made is None:
            yield program, None, False
            continue
        own, truth = made
        traced = Traced(own.function(), f"p{number}", bool(own.sizes))
        traced.engine = "graph"
        failure: Failure | None = None
        try:
            with _silent():
                text = difference(own, truth, traced, strides=False)
                failure = None if text is None else Failure(own, "graph", text)
        except Exception as error:  # noqa: BLE001 - it is what we look for
            if traced.error is None and not _by_hotloop(error):
                yield own, None, False  # what PyTorch cannot capture never reaches hotloop
                continue
            failure = Failure(own, "stages", _short(traced.error or error))
        if failure is None:
            failure = _attempt(own, truth, traced, "interpret")
        if failure is not None and _captured_wrong(own, truth, failure):
            yield own, None, False
        elif failure is not None:
            yield own, failure, True
        if failure is not None:
            continue
        ready.append((own, truth, traced))
    compiled = [e for e in engines if e in ("unfused", "fused")]
    broken = _build([t for _, _, t in ready], compiled, quick)
    for program, truth, traced in ready:
        failure = broken.get(id(traced))
        if failure is not None:
            yield program, Failure(program, "build", failure), True
            continue
        found = (_attempt(program, truth, traced, e) for e in engines if e not in ("graph", "interpret"))
        yield program, next((f for f in found if f is not None), None), True


def _captured_wrong(program: Program, truths: Truths, failure: Failure) -> bool:
    """Whether AOTAutograd's own graph, run by PyTorch, differs already: its values, or its strides."""
    strides = ": strides" in failure.text
    if failure.engine != "graph" and not strides:
        return False
    plain: Callable[..., Any]
    if program.sizes:
        plain = torch.compile(program.function(), backend="aot_eager", dynamic=True)
    else:
        plain = aot_function(program.function(), fw_compiler=lambda gm, _: gm, bw_compiler=lambda gm, _: gm)
    try:
        with _silent():
            return difference(program, truths, plain, strides) is not None
    except Exception:  # noqa: BLE001 - then PyTorch cannot run what it has captured
        return True


def _build(traced: Sequence[Traced], engines: Sequence[str], quick: bool) -> dict[int, str]:
    """Compile; of the programs that cannot be, the reason by their id."""
    if not engines:
        return {}
    try:
        build(traced, engines, quick)
        return {}
    except Exception as error:  # noqa: BLE001 - it is what we look for
        if len(traced) == 1:
            return {id(traced[0]): _short(error)}
    out: dict[int, str] = {}
    for t in traced:
        out.update(_build([t], engines, quick))
    return out


def _attempt(program: Program, truths: Truths, traced: Traced, engine: str) -> Failure | None:
    traced.engine = engine
    try:
        text = difference(program, truths, traced)
    except Exception as error:  # noqa: BLE001 - it is what we look for
        text = _short(error)
    return None if text is None else Failure(program, engine, text)


def _by_hotloop(error: Exception) -> bool:
    return any(PACKAGE in f.filename for f in traceback.extract_tb(error.__traceback__))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """PyTorch logs what it cannot trace before it raises it."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _short(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if PACKAGE in f.filename]
    where = f" [{Path(frames[-1].filename).name}:{frames[-1].lineno}]" if frames else ""
    return f"{type(error).__name__}: {str(error)[:900]}{where}"


def check(program: Program, engines: Sequence[str] = ENGINES) -> None:
    """Raise where an engine differs from eager. The program must be one that rounding cannot decide."""
    ((_, failure, judged),) = run([program], engines)
    assert judged, "rounding decides what this program gives"
    assert failure is None, str(failure)


# --- shrinking ----------------------------------------------------------------------------------------------


def shrink(failure: Failure, budget: float = 120.0) -> Failure:
    """A smaller program that the same engine gets wrong."""
    best, end = failure, time.perf_counter() + budget
    tried: set[str] = set()
    changed = True
    while changed and time.perf_counter() < end:
        changed = False
        for smaller in _smaller(best.program):
            text = str(smaller)
            if text in tried or time.perf_counter() > end:
                continue
            tried.add(text)
            again = _fails(smaller, best.engine)
            if again is not None:
                best, changed = again, True
                break
    return best


def _fails(program: Program, engine: str) -> Failure | None:
    engines = [e for e in ("interpret", engine) if e in ENGINES] or list(ENGINES)
    try:
        ((_, failure, _),) = run([program], engines)
    except Exception:  # noqa: BLE001 - a program that is none
        return None
    return failure


def _smaller(p: Program) -> Iterator[Program]:
    """Programs a little smaller, the boldest first."""
    yield from _simpler_sizes(p)
    if len(p.results) > 1:
        for name in p.results:
            yield _pruned(replace(p, results=(name,)))
    for step in p.steps:
        if step.name in p.results:
            for name in sorted(step.uses - set(p.results)):
                kept = tuple(r for r in p.results if r != step.name)
                yield _pruned(replace(p, results=(*kept, name)))
    if any(i.grad for i in p.inputs):
        yield without_gradients(p)
    for k in range(len(p.steps)):
        if p.steps[k].name is None:
            yield _pruned(replace(p, steps=(*p.steps[:k], *p.steps[k + 1 :])))
    shapes = _shapes(p)
    for k in range(len(p.steps) - 1, -1, -1):
        step = p.steps[k]
        if step.name is None or step.name not in shapes:
            continue
        form = shapes[step.name]
        rest = (*p.steps[:k], *p.steps[k + 1 :])
        for other in sorted(step.uses):
            if shapes.get(other) == form:
                yield _pruned(_with_name(replace(p, steps=rest), step.name, other))
        code = _random(p, *form)
        if code is None:
            continue
        name = f"x{max((int(i.name[1:]) for i in p.inputs), default=-1) + 1}"
        made = replace(p, steps=rest, inputs=(*p.inputs, Input(name, code, k)))
        yield _pruned(_with_name(made, step.name, name))
    for k, i in enumerate(p.inputs):
        plain = _random(p, *shapes[i.name]) if i.name in shapes else None
        if plain is not None and i.code != plain:
            yield replace(p, inputs=(*p.inputs[:k], replace(i, code=plain), *p.inputs[k + 1 :]))


def _simpler_sizes(p: Program) -> Iterator[Program]:
    """Fewer calls, and numbers in the place of symbols."""
    if len(p.sizes) > 1:
        for k in range(len(p.sizes)):
            yield replace(p, sizes=(*p.sizes[:k], *p.sizes[k + 1 :]))
    elif p.sizes:
        numbers = {f"s{k}": str(n) for k, n in enumerate(p.sizes[0])}
        fixed = [re.sub(r"\bs\d\b", lambda m: numbers[m[0]], i.code) for i in p.inputs]
        inputs = tuple(replace(i, code=code) for i, code in zip(p.inputs, fixed, strict=True))
        yield replace(p, inputs=inputs, sizes=())


_Form = tuple[tuple[tuple[int, ...], ...], torch.dtype]  # the shape in each call, and the dtype


def _random(p: Program, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> str | None:
    """An input of that form; nothing where its sizes cannot be said."""
    if len({len(shape) for shape in shapes}) != 1:
        return None
    parts = [_size(p, extents) for extents in zip(*shapes, strict=True)]
    if None in parts:
        return None
    text = f"[{', '.join(map(str, parts))}]"
    if dtype.is_floating_point:
        return f"torch.randn({text}).to({dtype})"
    return f"torch.randint(0, 5, {text}).to({dtype})"


def _size(p: Program, extents: Sequence[int]) -> str | None:
    """An expression of the symbols that has these values, one a call."""
    symbols = {f"s{k}": column for k, column in enumerate(zip(*p.sizes, strict=True))}
    for name, column in symbols.items():
        for text in (name, f"{name} + 1", f"{name} - 1", f"{name} * 2", f"{name} // 2"):
            if [eval(text, {name: n}) for n in column] == list(extents):
                return text
    return str(extents[0]) if len(set(extents)) == 1 else None


def _shapes(p: Program) -> dict[str, _Form]:
    """Of each variable, after the whole program."""
    calls = []
    for k in p.calls:
        space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
        with torch.no_grad():
            for i, t in zip(p.inputs, make_inputs(p, k), strict=True):
                space[i.name] = t
            for s in p.steps:
                exec(str(s), space)
        calls.append({name: v for name, v in space.items() if isinstance(v, Tensor)})
    return {name: (tuple(tuple(call[name].shape) for call in calls), v.dtype) for name, v in calls[0].items()}


def _with_name(p: Program, old: str, new: str) -> Program:
    def renamed(text: str) -> str:
        return re.sub(rf"\b{old}\b", new, text)

    steps = tuple(Step(s.name, renamed(s.code)) for s in p.steps)
    return replace(p, steps=steps, results=tuple(renamed(r) for r in p.results))


def _pruned(p: Program) -> Program:
    """Without statements that nothing depends on, and inputs that nothing reads."""
    wanted = set(p.results)
    steps: list[Step] = []
    for s in reversed(p.steps):
        if s.name is None or s.name in wanted:
            steps.append(s)
            wanted |= s.uses
    inputs = tuple(i for i in p.inputs if i.name in wanted)
    return replace(p, steps=tuple(reversed(steps)), inputs=inputs or p.inputs[:1])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--group", type=int, default=GROUP)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--slow", action="store_true", help="compile as for users, with -O3")
    parser.add_argument("--show", action="store_true", help="print the programs")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    engines = given.engines.split(",")
    start = time.perf_counter()
    counts: Counter[str] = Counter()
    for first in range(given.seed, given.seed + given.count, given.group):
        seeds = range(first, min(first + given.group, given.seed + given.count))
        for seed, (program, failure, judged) in zip(
            seeds, outcomes(seeds, engines, not given.slow), strict=True
        ):
            if given.show:
                sys.stdout.write(f"# seed {seed}\n{program.source()}\n{program}\n")
            counts["judged" if judged else "not judged"] += 1
            counts.update(program.kinds() if judged else ())
            if failure is not None:
                counts["different"] += 1
                small = shrink(failure)
                sys.stdout.write(f"--- seed {seed} {failure.engine}: {failure.text}\nshrunk: {small}\n")
                sys.stdout.flush()
        if (first - given.seed) // given.group % 20 == 19:
            took = time.perf_counter() - start
            sys.stdout.write(f"... {seeds[-1] + 1}: {dict(counts)}, {took:.0f} s\n")
            sys.stdout.flush()
    sys.stdout.write(f"{dict(counts)}, {time.perf_counter() - start:.0f} s\n")


def outcomes(
    seeds: Sequence[int], engines: Sequence[str] = ENGINES, quick: bool = True
) -> list[tuple[Program, Failure | None, bool]]:
    """The outcomes in the order of the seeds."""
    programs = [generate(s) for s in seeds]
    found = {without_gradients(p): (p, f, j) for p, f, j in run(programs, engines, quick)}
    return [found[without_gradients(p)] for p in programs]


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    torch.set_num_threads(1)
    main()
