"""Running the dumps: what ``python output_code.py`` and ``python fx_graph_runnable.py`` do.

What comes in: the path of an ``output_code.py``, or a graph with inputs. What goes out: text for a person,
and an exit status that is not 0 where a result is wrong. The next file is ``cli.py``.
"""

from __future__ import annotations

import copy
import json
import runpy
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch

from hotloop.backend import Bound, hotloop, link
from hotloop.codegen.cpp import KernelSource
from hotloop.compat import DispatchMode, draws_random_numbers, tree_map
from hotloop.config import resolve
from hotloop.ir.samples import redraw
from hotloop.runtime.override import read_output_code
from hotloop.runtime.toolchain import choose_simd
from hotloop.tools.judge import assert_as_accurate, largest_errors, reference_of, to_float64
from hotloop.tools.noise import Noise

__all__ = ["compare", "difference", "main", "say_errors"]

Inputs = Callable[[], list[Any]]

#: Runs of eager with noise: enough that one of them has about the error that rounding may have.
NOISY = 12


def main(path: str) -> NoReturn:
    """Check an ``output_code.py`` against the graph beside it, time it, and exit."""
    file = Path(path).resolve()
    edited = read_output_code(file)
    if "rt.object(" in edited.host:
        _say("this graph calls others (control flow), which have no text here: run fx_graph_runnable.py")
        sys.exit(0)
    names = runpy.run_path(str(file), run_name="hotloop_generated")
    bound = Bound(file.stem, names["constants"](), ())
    call = link(edited.functions, edited.host, bound, choose_simd(edited.level), resolve())
    beside = file.with_name("fx_graph_runnable.py")
    if not beside.exists():
        _say(f"no {beside.name} beside it: nothing to compare with")
        call([*names["inputs"]()])
        _time({"hotloop": call}, names["inputs"])
        sys.exit(0)
    graph = runpy.run_path(str(beside), run_name="hotloop_generated")
    eager, inputs = graph["Graph"](), _like_the_true_ones(graph["inputs"], file)
    apart = _why_not_comparable(edited.functions, eager, bound)
    if apart is not None:
        _say(f"{apart}: results are not compared")
        sys.exit(_time({"eager": _listed(eager), "hotloop": call}, inputs))
    sys.exit(_check(_listed(eager), call, inputs))


def compare(graph: torch.nn.Module, inputs: Inputs, options: dict[str, Any]) -> NoReturn:
    """Compile a graph with hotloop, check it against eager, time both, and exit."""
    compiled = torch.compile(graph, backend=hotloop, options=options or None)
    inputs = _like_the_true_ones(inputs, Path(inputs.__code__.co_filename))
    sys.exit(_check(_listed(graph), _listed(compiled), inputs))


def difference(
    expected: Sequence[Any], got: Sequence[Any], exact: Callable[[], Sequence[Any]] | None = None,
    runs: Callable[[], Sequence[Sequence[Any]]] | None = None,
) -> str | None:  # fmt: skip
    """What is wrong with a list of results, or None.

    Where elements differ by more than ``torch.testing`` allows, ``exact``, the results in float64, decides
    whether they are less accurate than the expected ones, and than those of other ``runs`` of eager.
    """
    truth = None if exact is None else cache(exact)
    others = None if runs is None else cache(runs)
    for number, (e, g) in enumerate(zip(expected, got, strict=True)):
        reference = None if truth is None else partial(_at, truth, number)
        own = None if others is None else partial(_each_at, others, number)
        try:
            assert_as_accurate(g, e, reference, runs=own, what="")
        except AssertionError as error:
            return f"output {number}{error}"
    return None


def _at(results: Callable[[], Sequence[Any]], number: int) -> Any:
    return results()[number]


def _each_at(runs: Callable[[], Sequence[Sequence[Any]]], number: int) -> list[Any]:
    return [[run[number]] for run in runs()]


def say_errors(got: Sequence[Any], expected: Sequence[Any]) -> str:
    """How far results are from eager's, for a person."""
    absolute, relative = largest_errors(got, expected)
    if absolute == 0:
        return "no element differs"
    return f"largest difference {absolute:.1e}, relative {relative:.1e}"


# --- inside ---------------------------------------------------------------------------------------------


def _listed(f: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    return lambda args: f(*args)


def _same_constants(graph: torch.nn.Module, bound: Bound) -> bool:
    own = [t for t in vars(graph).values() if isinstance(t, torch.Tensor)]
    return all(any(t.shape == c.shape and torch.equal(t, c) for t in own) for c in bound.constants.values())


def _like_the_true_ones(inputs: Inputs, dump: Path) -> Inputs:
    """Inputs with values like those of the first call, which a file beside the dump describes.

    The inputs of a backward graph are what the forward graph saved: variances, probabilities, positions.
    """
    try:
        descriptions = json.loads(dump.with_name("inputs.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return inputs

    def drawn() -> list[Any]:
        values = inputs()
        redraw(values, descriptions)
        return values

    return drawn


def _why_not_comparable(
    functions: Sequence[KernelSource], eager: torch.nn.Module, bound: Bound
) -> str | None:
    if any("threefry" in f.text for f in functions):
        return "the kernels draw other random numbers than eager; fx_graph_runnable.py has PyTorch draw them"
    if bound.constants and not _same_constants(eager, bound):
        return "the graph holds tensors too large to be written out"
    return None


class _Draws(DispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the results of random operators, and gives them again: in float64, PyTorch would draw others.

    Arguments:
        kept: what another one has kept, to be given again.
        wide: in float64.
    """

    def __init__(self, kept: _Draws | None = None, wide: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._again, self._wide = kept is not None, wide
        self._results: deque[Any] = deque() if kept is None else kept._results.copy()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not draws_random_numbers(func):
            return func(*args, **(kwargs or {}))
        if not self._again:
            self._results.append(func(*args, **(kwargs or {})))
            return self._results[-1]
        kept = self._results.popleft()
        if not self._wide:
            return tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, kept)
        if func is torch.ops.aten.native_dropout.default and args[1] < 1:
            return args[0] * kept[1] / (1 - args[1]), kept[1]
        return to_float64(kept)


def _check(eager: Callable[[list[Any]], Any], call: Callable[[list[Any]], Any], inputs: Inputs) -> int:
    torch.manual_seed(0)
    given = inputs()
    with torch.no_grad():
        torch.manual_seed(1)
        theirs = copy.deepcopy(given)
        with _Draws() as draws:
            expected = eager(theirs)
        torch.manual_seed(1)
        ours = copy.deepcopy(given)
        got = call([*ours])

    asked: list[bool] = []

    def exact() -> Sequence[Any]:
        asked.append(True)
        own = copy.deepcopy(to_float64(given))
        with _Draws(draws, wide=True):
            return [*_flat(reference_of(eager, own)()), *own]

    def noisy(seed: int) -> Sequence[Any]:
        own = copy.deepcopy(given)
        with torch.no_grad(), Noise(seed), _Draws(draws):  # the noise draws numbers of its own
            return [*_flat(eager(own)), *own]

    results = [*_flat(expected), *theirs], [*_flat(got), *ours]
    wrong = difference(*results, exact, lambda: [noisy(seed) for seed in range(NOISY)])
    good = "as accurate as eager, by the judgement of float64" if asked else "equal to eager"
    _say(f"WRONG, {wrong}" if wrong else f"{good}: {say_errors(results[1], results[0])}")
    _time({"eager": eager, "hotloop": call}, inputs)
    return 1 if wrong else 0


def _flat(results: Any) -> Sequence[Any]:
    return results if isinstance(results, (tuple, list)) else [results]


def _time(calls: dict[str, Callable[[list[Any]], Any]], inputs: Inputs, seconds: float = 0.5) -> int:
    """Time calls in turn, so that what else the machine does hits them alike."""
    given = inputs()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds * len(calls)
    with torch.no_grad():
        while time.perf_counter() < end or min(map(len, taken.values())) < 3:
            for name, call in calls.items():
                start = time.perf_counter()
                call([*given])
                taken[name].append(time.perf_counter() - start)
    for name, times in taken.items():
        _say(f"{name:8} {median(times) * 1e3:.4f} ms, median of {len(times)} calls")
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
