"""docs/tour.md runs: its Python is executed from top to bottom, and what it prints is what the page shows.

A fence of kind ``python`` is run. A fence whose kind ends in ``output`` (``text output``, ``cpp output``)
shows what the Python above it prints. A fence of kind ``asm`` shows parts of the library that the Python
made, as g++ 12.2 compiles it. Other fences are for reading only, and the page says why. The Python blocks
are one program, as if pasted one after the other into a file ``tour.py``: that is the file that its errors
and the generated sources quote. ``pytest tests/test_tour.py --update-golden`` writes the page's outputs anew.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import linecache
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hotloop.runtime.toolchain import find_toolchain, runnable_levels

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


def run(blocks: list[Fence]) -> tuple[dict[int, list[str]], dict[str, Any]]:
    """What each output fence should show, by its place in the page, and the names that the program leaves."""
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
    return shown, namespace


def updated(page: list[str], blocks: list[Fence], shown: dict[int, list[str]]) -> list[str]:
    """The page with other outputs."""
    out, done = [], 0
    for b in blocks:
        if b.at in shown:
            out += page[done : b.at] + shown[b.at]
            done = b.at + len(b.lines)
    return out + page[done:]


def instructions(text: str) -> list[tuple[str, ...]]:
    """The instructions in a listing of objdump's, without addresses and remarks: ("vdivps", "ymm0,...")."""
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*[0-9a-f]+:\s+(\S+)\s*([^;#<]*)", line)
        if match is not None:
            operands = re.sub(r"rip\+0x[0-9a-f]+", "rip", match[2].strip())
            found.append((match[1], "" if match[1].startswith("j") else operands))
    return found


def check_machine_code(block: Fence, library: Path) -> None:
    """Each part of the block is in the library, instruction by instruction."""
    command = ["objdump", "-d", "-M", "intel", "--no-show-raw-insn", str(library)]
    made = instructions(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    parts = [instructions(part) for part in "\n".join(block.lines).split("\n\n")]
    assert all(len(part) > 3 for part in parts)
    for part in parts:
        places = [made[k : k + len(part)] for k, one in enumerate(made) if one == part[0]]
        assert part in places, f"line {block.at} of {TOUR.name} shows other code than g++ makes"


def is_gcc_12() -> bool:
    compiler = find_toolchain().compiler
    if "g++" not in Path(compiler[0]).name or shutil.which("objdump") is None:
        return False
    done = subprocess.run([*compiler, "-dumpfullversion"], capture_output=True, text=True, check=False)
    return done.stdout.startswith("12.2.")


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page shows graphs of torch 2.13")
@pytest.mark.skipif("avx2" not in runnable_levels(), reason="the page shows AVX2 code and runs it")
def test_the_tour_shows_what_the_code_does(request: pytest.FixtureRequest) -> None:
    torch._dynamo.reset()
    page = TOUR.read_text(encoding="utf-8").split("\n")
    blocks = fences(page)
    assert sum(b.kind == "python" for b in blocks) >= 10
    shown, names = run(blocks)
    want = updated(page, blocks, shown)
    if request.config.getoption("--update-golden"):
        TOUR.write_text("\n".join(want), encoding="utf-8")
        return
    if want != page:
        difference = difflib.unified_diff(page, want, "docs/tour.md", "what it prints", lineterm="", n=1)
        pytest.fail("\n".join(["pytest --update-golden accepts this:", *difference]), pytrace=False)
    (machine_code,) = (b for b in blocks if b.kind == "asm")
    if is_gcc_12():
        check_machine_code(machine_code, names["library"].path)
