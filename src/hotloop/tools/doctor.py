"""The command ``hotloop doctor``: what hotloop needs of this machine, one line a finding.

What comes in: nothing; the configuration in force is looked at. What goes out: findings, each with what is
wrong and how to mend it. What holds in between: nothing is changed, except that a small function is
compiled. The next file is ``cli.py``.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from hotloop import config
from hotloop.backend import hotloop
from hotloop.codegen.cpp import function_source, unit_text
from hotloop.config import resolve
from hotloop.errors import HotloopError, ToolchainError
from hotloop.runtime.build import Builder, Source
from hotloop.runtime.cache import Cache, format_bytes
from hotloop.runtime.toolchain import choose_simd, detect_simd, find_toolchain
from hotloop.tools.replay import say_errors

__all__ = ["Finding", "examine"]

#: Less free disk than this is worth a word.
ROOM = 256 << 20

_NOTHING = Source(
    "doctor",
    unit_text([function_source("hotloop_doctor", 'extern "C" i64 hotloop_doctor() { return 0; }')]),
)


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and, where it is bad, how to mend it.

    ``skipped``: it was not looked at, for the reason found.
    """

    what: str
    found: str
    mend: str | None = None
    fatal: bool = True
    skipped: bool = False

    @property
    def bad(self) -> bool:
        """Whether hotloop cannot do its work."""
        return self.mend is not None and self.fatal

    def __str__(self) -> str:
        state = "skip" if self.skipped else "BAD " if self.bad else "ok  " if self.mend is None else "note"
        return f"{state}  {self.what:10}{self.found}" + (f"; {self.mend}" if self.mend else "")


def examine() -> Iterator[Finding]:
    """Every finding, as soon as it is known."""
    compiler = _safely(_compiler)
    yield compiler
    for check in (_openmp, _cpu, _cache, _gpu, _function):
        if compiler.bad and check in (_openmp, _function):
            yield Finding(_name(check), "skipped (no compiler)", skipped=True)
        else:
            yield _safely(check)


def _safely(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except HotloopError as error:
        message, _, hint = str(error).partition("\n  next: ")
        found = " ".join(message.split())
        return Finding(_name(check), found, hint or "correct the option named here")


def _name(check: Callable[[], Finding]) -> str:
    return check.__name__.strip("_")


def _compiler() -> Finding:
    toolchain = find_toolchain(config.cpp.cxx)
    command = " ".join(toolchain.compiler)
    with tempfile.TemporaryDirectory(prefix="hotloop-doctor-") as folder:
        try:
            Builder(toolchain, Cache(Path(folder)), 1, choose_simd(config.cpp.simd)).build([_NOTHING])
        except ToolchainError as error:
            last = error.message.strip().splitlines()[-1].strip()
            found = f"{command} compiles no function that does nothing (it printed: {last})"
            return Finding(
                "compiler", found, "set CXX to another compiler (g++ 9, clang 10 or later), or unset it"
            )
    return Finding("compiler", f"{command} ({toolchain.kind})")


def _openmp() -> Finding:
    threads = torch.get_num_threads()
    if not torch.backends.openmp.is_available():  # type: ignore[no-untyped-call]
        return Finding("openmp", "torch was built without it", "install a torch with OpenMP", fatal=False)
    if find_toolchain(config.cpp.cxx).openmp:
        return Finding("openmp", f"the runtime that torch loaded, {threads} threads")
    return Finding(
        "openmp", f"this compiler has another one than torch; loops use torch's threads, {threads}"
    )


def _cpu() -> Finding:
    own, chosen = detect_simd(), choose_simd(config.cpp.simd)
    if own != chosen:
        return Finding("cpu", f"{own}, of which {chosen} is used", "unset config.cpp.simd", fatal=False)
    return Finding("cpu", f"{own}, {os.cpu_count()} logical cores")


def _cache() -> Finding:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = Cache(config.cache_dir, config.cache_limit)
    if cache.directory != Path(config.cache_dir):
        found = f"{config.cache_dir} cannot be used: nothing compiled is kept"
        return Finding("cache", found, "set HOTLOOP_CACHE_DIR to a folder of your own", fatal=False)
    free = shutil.disk_usage(cache.directory).free
    found = f"{cache.directory}, {format_bytes(cache.info().bytes)} used, {format_bytes(free)} free"
    return Finding("cache", found, "free some disk space" if free < ROOM else None, fatal=False)


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("gpu", "none that torch can use")
    name = torch.cuda.get_device_name()
    if importlib.util.find_spec("triton") is None:
        return Finding("gpu", f"{name}, but no Triton", "pip install triton", fatal=False)
    return Finding("gpu", name)


def _function() -> Finding:
    x = torch.linspace(-3, 3, 1000).reshape(10, 100)

    def f(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.softmax(x * 0.5, -1) + 1,)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the cache, which has a line of its own
        (result,) = hotloop(torch.fx.symbolic_trace(f), [x])(x)
    errors = say_errors([result], f(x))
    if not torch.allclose(result, *f(x)):
        return Finding("function", f"a compiled function gives wrong results ({errors})", "please report it")
    return Finding("function", f"compiled, run, equal to eager ({errors}; precision={resolve().precision})")
