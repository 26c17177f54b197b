"""Running the dumps: what ``python output_code.py`` and ``python fx_graph_runnable.py`` do.

What comes in: the path of an ``output_code.py``, or a graph with inputs. What goes out: text for a person,
and an exit status that is not 0 where a result is wrong. The next file is ``cli.py``.
"""

from __future__ import annotations

import copy
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch

from hotloop.backend import Bound, hotloop, link
from hotloop.config import resolve
from hotloop.runtime.override import read_output_code
from hotloop.runtime.toolchain import choose_simd

__all__ = ["compare", "difference", "main"]

Inputs = Callable[[], list[Any]]


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
    eager = graph["Graph"]()
    if names["constants"]() and not _same_constants(eager, bound):
        _say("the graph holds tensors too large to be written out: results are not compared")
        sys.exit(_time({"eager": _listed(eager), "hotloop": call}, graph["inputs"]))
    sys.exit(_check(_listed(eager), call, graph["inputs"]))


def compare(graph: torch.nn.Module, inputs: Inputs, options: dict[str, Any]) -> NoReturn:
    """Compile a graph with hotloop, check it against eager, time both, and exit."""
    compiled = torch.compile(graph, backend=hotloop, options=options or None)
    sys.exit(_check(_listed(graph), _listed(compiled), inputs))


def difference(expected: Any, got: Any) -> str | None:
    """What is wrong with a list of results, or None."""
    for number, (e, g) in enumerate(zip(expected, got, strict=True)):
        if not isinstance(e, torch.Tensor):
            if e != g:
                return f"output {number}: {g!r} instead of {e!r}"
            continue
        try:
            torch.testing.assert_close(g, e, equal_nan=True)
        except AssertionError as error:
            return f"output {number}: {error}"
    return None


# --- inside ---------------------------------------------------------------------------------------------


def _listed(f: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    return lambda args: f(*args)


def _same_constants(graph: torch.nn.Module, bound: Bound) -> bool:
    own = [t for t in vars(graph).values() if isinstance(t, torch.Tensor)]
    return all(any(t.shape == c.shape and torch.equal(t, c) for t in own) for c in bound.constants.values())


def _check(eager: Callable[[list[Any]], Any], call: Callable[[list[Any]], Any], inputs: Inputs) -> int:
    torch.manual_seed(0)
    given = inputs()
    with torch.no_grad():
        torch.manual_seed(1)
        theirs = copy.deepcopy(given)
        expected = eager(theirs)
        torch.manual_seed(1)
        ours = copy.deepcopy(given)
        got = call([*ours])
    wrong = difference([*_flat(expected), *theirs], [*_flat(got), *ours])
    _say(f"WRONG, {wrong}" if wrong else "equal to eager")
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
