"""Pastes together the part of the C++ kernel vocabulary that a translation unit needs.

What comes in: the names a kernel uses (``load``, ``exp``, ``hsum``, ...).
What goes out: C++ text without any ``#include``, to stand above the kernels.
What holds in between: the files are cut at lines such as ``// @section exp needs: fma``; a section comes with
everything it needs, in the order of the files.
Pasting a part keeps a translation unit with one kernel near a tenth of a second.
Next: ``cpp_prelude.h``, ``cpp_memory.h``, ``cpp_math.h``, ``cpp_special.h``, ``cpp_random.h``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_REGISTER_BYTES = {"scalar": 0, "neon": 16, "avx2": 32, "avx512": 64, "avx512_bf16": 64, "amx": 64}
"""By SIMD level. On ``scalar`` a loop has one lane and mathematics is the C library's."""

_SECTION = re.compile(r"^// @section (?P<names>[\w, ]+?)(?: needs: (?P<needs>[\w, ]+))?$")
_DEFINED = re.compile(
    r"^(?:template <.*?> )?HL [^=(]*?\b(\w+)\(|^HL_(?:ROUND|LIBRARY[12]|POLYNOMIAL)\((\w+)", re.MULTILINE
)


@dataclass(frozen=True)
class Section:
    """A piece of vocabulary: its names, the sections it needs, and its text."""

    names: tuple[str, ...]
    needs: tuple[str, ...]
    text: str


def lanes(level: str, widest_bytes: int) -> int:
    """The lane count for a loop whose widest dtype in registers has ``widest_bytes`` bytes.

    bfloat16 and float16 count 4 bytes, since they are float32 in registers; bool counts 1, but a
    loop that holds a mask of float32 values is 4 bytes wide already. Never more than 16 lanes, beyond
    which conversions between narrow dtypes cost more than they save.
    """
    return max(1, min(16, _REGISTER_BYTES[level] // widest_bytes))


def prelude(names: Iterable[str]) -> str:
    """The vocabulary text for kernels that use ``names``.

    ``names`` are section names or names of functions defined in a section. An unknown name is a
    KeyError. The text opens ``namespace hl`` and imports it, so that the names cannot collide with
    the C library's. It holds for every SIMD level: what differs hangs on the compiler's own macros.
    The library must be linked with libm, and know libtorch_cpu for Sleef.
    """
    wanted = _closure(names)
    body = "\n".join(section.text for section in _sections() if section.names[0] in wanted)
    return f"namespace hl {{\n{body}\n}}  // namespace hl\nusing namespace hl;\n"


def vocabulary() -> frozenset[str]:
    """Every name that ``prelude`` knows."""
    return frozenset(_index())


def _closure(names: Iterable[str]) -> frozenset[str]:
    index, by_name = _index(), {section.names[0]: section for section in _sections()}
    todo, done = [index[name] for name in names] + ["core"], set()
    while todo:
        name = todo.pop()
        if name not in done:
            done.add(name)
            todo += [index[need] for need in by_name[name].needs]
    return frozenset(done)


@cache
def _sections() -> tuple[Section, ...]:
    folder = Path(__file__).parent
    files = ("cpp_prelude.h", "cpp_memory.h", "cpp_math.h", "cpp_special.h", "cpp_random.h", "cpp_gemm.h")
    return tuple(section for file in files for section in _cut((folder / file).read_text()))


def _cut(text: str) -> list[Section]:
    sections: list[Section] = []
    head: re.Match[str] | None = None
    lines: list[str] = []
    for line in [*text.splitlines(), "// @section end"]:
        match = _SECTION.match(line)
        if match is None:
            lines.append(line)
            continue
        if head is not None:
            names, needs = (tuple(re.findall(r"\w+", head[k] or "")) for k in ("names", "needs"))
            sections.append(Section(names, needs, "\n".join(lines).strip() + "\n"))
        head, lines = match, []
    return sections


@cache
def _index() -> dict[str, str]:
    """From each name to the first name of the section that defines it."""
    index: dict[str, str] = {}
    for section in _sections():
        defined = {a or b for a, b in _DEFINED.findall(section.text)}
        for name in (*section.names, *sorted(defined)):
            index.setdefault(name, section.names[0])
    return index
