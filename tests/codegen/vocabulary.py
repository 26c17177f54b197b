"""Builds and calls functions of the C++ kernel vocabulary, each as the printer would write it.

What comes in: an expression of the vocabulary. What goes out: a function of numpy arrays, and how far its
results are from exact ones.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable

import numpy as np
import pytest

from hotloop.codegen import cpp_text
from hotloop.runtime.toolchain import SimdLevel, find_toolchain, runnable_levels

__all__ = [
    "TOOLCHAIN",
    "Build",
    "build",
    "call",
    "lane_constants",
    "levels",
    "map_kernel",
    "pointer",
    "runnable",
    "ulps",
]

Build = Callable[[str, set[str], SimdLevel], ctypes.CDLL]

TOOLCHAIN = find_toolchain()


def runnable(level: SimdLevel) -> bool:
    return level in runnable_levels()


def levels(*names: SimdLevel) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "level",
        [
            pytest.param(n, marks=pytest.mark.skipif(not runnable(n), reason=f"this machine cannot run {n}"))
            for n in names
        ],
    )


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds (once per text) the C++ ``body`` below the vocabulary ``names``, for ``level``."""
    folder = tmp_path_factory.mktemp("vocabulary")
    built: dict[tuple[str, str], ctypes.CDLL] = {}
    stub, empty = folder / "stub.so", folder / "empty.cpp"
    empty.write_text("")
    if TOOLCHAIN.needs_stub:
        subprocess.run(TOOLCHAIN.stub_command(empty, stub), check=True)

    def run(body: str, names: set[str], level: SimdLevel) -> ctypes.CDLL:
        if (body, level) not in built:
            source, library = folder / f"{len(built)}.cpp", folder / f"{len(built)}.so"
            source.write_text(cpp_text.prelude(names) + body)
            command = TOOLCHAIN.command(source, library, level, stub if TOOLCHAIN.needs_stub else None)
            subprocess.run([*command, "-Wall", "-Werror"], check=True)
            built[body, level] = ctypes.CDLL(str(library))
        return built[body, level]

    return run


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def map_kernel(name: str, expression: str, source: str, target: str, arguments: int = 1) -> str:
    """``target`` out[i] = expression(a, b), for a whole number of vectors, then lane by lane."""
    names = "ab"[:arguments]
    parameters = ", ".join(f"const {source}* {n}_" for n in names)
    loads = " ".join(f"auto {n} = load<W>({n}_ + i);" for n in names)
    step = f"{{ {loads} {'(void)b; ' * (arguments == 2)}store<W>(out + i, {expression}); }}"
    return (
        f'extern "C" void {name}({parameters}, {target}* out, i64 n, i64* error) {{ (void)error; i64 i = 0;\n'
        f"  {{ constexpr int W = LANES_{source}; for (; i + W <= n; i += W) {step} }}\n"
        f"  {{ constexpr int W = 1; for (; i < n; i++) {step} }} }}\n"
    )


def lane_constants(level: SimdLevel, widest: int = 0) -> str:
    sizes = {
        "f32": 4,
        "f64": 8,
        "bf16": 4,
        "f16": 4,
        "i8": 1,
        "u8": 1,
        "i16": 2,
        "u16": 2,
        "i32": 4,
        "u32": 4,
        "i64": 8,
        "u64": 8,
    }
    lanes = ", ".join(f"LANES_{t} = {cpp_text.lanes(level, max(s, widest))}" for t, s in sizes.items())
    return f"enum : int {{ {lanes} }};\n"


def call(function: object, *arrays: np.ndarray, out: np.ndarray) -> int:
    error = ctypes.c_int32(0)
    function(*map(pointer, arrays), pointer(out), ctypes.c_int64(out.size), ctypes.byref(error))  # type: ignore[operator]
    return error.value


def ulps(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """The distance from the exact value in units of the last place of ``got``'s dtype."""
    info = np.finfo(got.dtype)
    wide = exact.astype(np.float64)
    with np.errstate(all="ignore"):
        exponent = np.maximum(np.frexp(wide)[1] - 1, info.minexp)
        distance = np.abs(got.astype(np.float64) - wide) / np.ldexp(1.0, exponent - info.nmant)
        rounded = wide.astype(got.dtype)
    distance[~np.isfinite(rounded) & (got == rounded)] = 0
    distance[np.isinf(got) & (np.abs(wide) >= float(info.max))] = 0
    distance[np.isnan(wide) & np.isnan(got)] = 0
    distance[np.isnan(distance)] = np.inf
    return distance
