"""docs/tour.md runs: its Python is executed from top to bottom, and what it prints is what the page shows.

A fence of kind ``python`` is run. A fence whose kind ends in ``output`` (``text output``, ``cpp output``)
shows what the Python above it prints; other fences are for reading only, and the page says why. The Python
blocks are one program, as if pasted one after the other into a file ``tour.py``: that is the file that its
errors and the generated sources quote. ``pytest tests/test_tour.py --update-golden`` writes the page's
outputs anew.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import linecache
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hotloop.runtime.toolchain import detect_simd

TOUR = Path(__file__).parent.parent / "docs" / "tour.md"
PROGRAM = "tour.py"


@dataclass
class Fence:
    """A fenced block: its kind, its lines, and the number of its first line in the page."""

    kind: str
    lines: list[str]
    at: int


def fences(page: list[str]) -> list[Fence]:
    """The fenced blocks of a page, in order."""
    found: list[Fence] = []
    inside: Fence | None = None
    for number, line in enumerate(page):
        if not line.startswith("```"):
            if inside is not None:
                inside.lines.append(line)
        elif inside is None:
            inside = Fence(line[3:].strip(), [], number + 1)
            found.append(inside)
        else:
            inside = None
    assert inside is None, f"{TOUR.name}: the fence at line {inside.at if inside else 0} is not closed"
    return found


def run(blocks: list[Fence]) -> dict[int, list[str]]:
    """What each output fence should show, by its place in the page."""
    program = [line for b in blocks if b.kind == "python" for line in b.lines]
    # FX asks linecache for the text of the user's line.
    linecache.cache[PROGRAM] = (len(program), None, [f"{line}\n" for line in program], PROGRAM)
    namespace: dict[str, Any] = {"__name__": "tour"}
    printed, shown = "", {}
    first = 0
    for b in blocks:
        if b.kind == "python":
            assert not printed, f"nothing shows what is printed above line {b.at}: {printed}"
            text = "\n" * first + "\n".join(b.lines) + "\n"
            first += len(b.lines)
            stream = io.StringIO()
            with contextlib.redirect_stdout(stream):
                exec(compile(text, PROGRAM, "exec"), namespace)
            printed = stream.getvalue()
        elif b.kind.endswith(" output"):
            shown[b.at] = printed.rstrip("\n").split("\n")
            printed = ""
    assert not printed, f"nothing shows what is printed last: {printed}"
    return shown


def updated(page: list[str], blocks: list[Fence], shown: dict[int, list[str]]) -> list[str]:
    """The page with other outputs."""
    out, done = [], 0
    for b in blocks:
        if b.at in shown:
            out += page[done : b.at] + shown[b.at]
            done = b.at + len(b.lines)
    return out + page[done:]


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page shows graphs of torch 2.13")
@pytest.mark.skipif(detect_simd() not in ("avx2", "avx512"), reason="the page shows AVX2 code and runs it")
def test_the_tour_shows_what_the_code_does(request: pytest.FixtureRequest) -> None:
    torch._dynamo.reset()
    page = TOUR.read_text(encoding="utf-8").split("\n")
    blocks = fences(page)
    assert sum(b.kind == "python" for b in blocks) >= 10
    want = updated(page, blocks, run(blocks))
    if request.config.getoption("--update-golden"):
        TOUR.write_text("\n".join(want), encoding="utf-8")
        return
    if want != page:
        difference = difflib.unified_diff(page, want, "docs/tour.md", "what it prints", lineterm="", n=1)
        pytest.fail("\n".join(["pytest --update-golden accepts this:", *difference]), pytrace=False)
