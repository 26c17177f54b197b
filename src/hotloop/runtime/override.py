"""Edited sources in the place of generated ones.

What comes in: the folder that ``HOTLOOP_OVERRIDE`` names, and the key of the graph that is being compiled.
What goes out: the functions and the host program of the ``output_code.py`` found for it. What holds in
between: a file belongs to a graph by the key that it was written with, not by a number that a change of the
program would shift; of several files for one graph the one changed last counts. Next: ``program.py``.
"""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path

from hotloop.codegen.cpp import KernelSource, function_source, parameter_count
from hotloop.errors import CompileError, OptionError, ToolchainError

_HINT = "mend the file, or unset HOTLOOP_OVERRIDE"

__all__ = ["Edited", "find_override", "read_output_code"]


@dataclass(frozen=True)
class Edited:
    """What an ``output_code.py`` holds: the kernels' functions and the text with ``build``."""

    path: Path
    key: str
    level: str
    functions: tuple[KernelSource, ...]
    host: str

    def does_not_compile(self, error: ToolchainError) -> CompileError:
        """The error for what the compiler says of the edited functions."""
        message = f"{self.path} does not compile: {error.message}"
        return CompileError(message, stage="override", hint=_HINT)


def find_override(folder: str | None, key: str) -> Edited | None:
    """The edited code of a graph, or None where the folder has none for it.

    Raises:
        OptionError: the folder holds no ``output_code.py`` at all.
        CompileError: the file found for this graph cannot be read.
    """
    if folder is None:
        return None
    files = sorted(Path(folder).rglob("output_code*.py"), key=lambda file: file.stat().st_mtime, reverse=True)
    if not files:
        raise OptionError(
            f"override_dir = '{folder}' holds no output_code.py; TORCH_COMPILE_DEBUG=1 writes them"
        )
    for file in files:
        if f'graph = "{key}"' in file.read_text(encoding="utf-8"):
            return read_output_code(file)
    return None


def read_output_code(path: Path) -> Edited:
    """Read an ``output_code.py``, which may have been edited."""
    try:
        text = path.read_text(encoding="utf-8")
        names = runpy.run_path(str(path), run_name="hotloop_generated")
        functions = tuple(function_source(name, code.lstrip("\n")) for name, code in names["kernels"].items())
        for f in functions:
            parameter_count(f)
        return Edited(path, names["graph"], names["simd"], functions, text)
    except Exception as error:  # whatever an edited file does
        message = f"{path} cannot be used: {type(error).__name__}: {error}"
        raise CompileError(message, stage="override", hint=_HINT) from error
