"""The C++ kernel vocabulary against float64, and against eager PyTorch, on every level this CPU runs.

What comes in: cpp_prelude.h and cpp_math.h through cpp_text.py. Each test writes a translation unit
as the printer does, one function per operation, builds it, and calls it through ctypes.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from hotloop.codegen import cpp_text
from hotloop.runtime.toolchain import SimdLevel, detect_simd, find_toolchain

Build = Callable[[str, set[str], SimdLevel], ctypes.CDLL]

TOOLCHAIN = find_toolchain()


def runnable(level: SimdLevel) -> bool:
    best = detect_simd()
    return level == best or level == "scalar" or (level, best) == ("avx2", "avx512")


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
    step = f"{{ {loads} store<W>(out + i, {expression}); }}"
    return (
        f'extern "C" void {name}({parameters}, {target}* out, i64 n, i32* error) {{ (void)error; i64 i = 0;\n'
        f"  {{ constexpr int W = LANES_{source}; for (; i + W <= n; i += W) {step} }}\n"
        f"  {{ constexpr int W = 1; for (; i < n; i++) {step} }} }}\n"
    )


def lane_constants(level: SimdLevel, widest: int = 0) -> str:
    sizes = {"f32": 4, "f64": 8, "bf16": 4, "f16": 4, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8}
    return "".join(f"constexpr int LANES_{t} = {cpp_text.lanes(level, max(s, widest))};\n" for t, s in sizes.items())


def call(function: object, *arrays: np.ndarray, out: np.ndarray) -> int:
    error = ctypes.c_int32(0)
    function(*map(pointer, arrays), pointer(out), ctypes.c_int64(out.size), ctypes.byref(error))  # type: ignore[operator]
    return error.value


# --- transcendental functions ---------------------------------------------------------------------


@cache
def float32_samples() -> np.ndarray:
    """2^20 bit patterns on an odd stride over all of float32, and the values where things change."""
    patterns = np.arange(0, 2**32, 4093, dtype=np.uint64).astype(np.uint32).view(np.float32)
    special = np.array([0.0, 1.0, 0.5, 2.0, 3.0, 4.0, 0.95, 87.3, 88.72, 88.73, 103.9, 104.0, 126.0, 127.0, 128.0, 149.0, 150.0,
                        np.inf, np.nan, 1e-45, 1.17549435e-38, 3.4028235e38, np.pi, np.pi / 2, 1e5, 131072.0, 0.70710677],
                       np.float32)  # fmt: skip
    near = np.concatenate([np.nextafter(special, np.float32(s)) for s in (-np.inf, np.inf)])
    dense = np.random.default_rng(0).uniform(-20, 20, 2**17).astype(np.float32)
    return np.concatenate([patterns, special, -special, near, -near, dense])


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


INLINED = {
    "exp": 1.5, "exp2": 1.5, "expm1": 1.5, "log": 1.5, "log2": 1.5, "log10": 1.5, "log1p": 1.5, "tanh": 1.5,
    "sigmoid": 2.2, "erf": 1.5, "sin": 1.75, "cos": 1.75,
}  # fmt: skip
LIBRARY = {
    "tan": 1.5, "asin": 1.5, "acos": 1.5, "atan": 1.5, "sinh": 1.5, "cosh": 1.5, "asinh": 1.5, "acosh": 1.5, "atanh": 1.5,
    "erfc": 2.0, "sqrt": 0.5, "rsqrt": 1.5, "reciprocal": 0.5, "lgamma": 0.51, "digamma": 0.6, "erfinv": 0.6,
}  # fmt: skip
REFERENCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reciprocal": lambda x: 1 / x, "rsqrt": lambda x: 1 / x.sqrt(),
}  # fmt: skip


def unary_text(level: SimdLevel) -> str:
    text = lane_constants(level)
    for t in ("f32", "f64"):
        text += "".join(map_kernel(f"{n}_{t}", f"{n}(a)", t, t) for n in (*INLINED, *LIBRARY))
    return text


def reference(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return REFERENCE.get(name) or getattr(torch, name)


@levels("scalar", "avx2", "avx512")
@pytest.mark.parametrize("name", [*INLINED, *LIBRARY])
def test_float32_function_over_the_whole_range(build: Build, name: str, level: SimdLevel) -> None:
    x = float32_samples()
    if name in LIBRARY:
        x = x[:: 8 if name not in ("erfinv", "lgamma", "digamma") else 40].copy()
    got = np.empty_like(x)
    call(getattr(build(unary_text(level), {*INLINED, *LIBRARY, "memory"}, level), f"{name}_f32"), x, out=got)
    exact = reference(name)(torch.from_numpy(x.astype(np.float64))).numpy()
    if name in ("asinh", "acosh", "sinh", "cosh", "tan"):  # Sleef's give up, as eager's do, near the ends
        keep = np.abs(x) < (1e18 if "a" in name[:1] else 80 if name != "tan" else 1e5)
        x, got, exact = x[keep], got[keep], exact[keep]
    if name == "digamma":  # float64's own reference is good away from the poles only
        keep = x > 0
        x, got, exact = x[keep], got[keep], exact[keep]
    error = ulps(got, exact)
    worst = int(error.argmax())
    print(f"{name} {level}: {error[worst]:.3f} ulp at {x[worst]!r}")
    bound = 2.5 if level == "scalar" else {**INLINED, **LIBRARY}[name]  # 2.5: the C library's own
    assert error[worst] <= bound, f"{name}({x[worst]!r}) = {got[worst]!r}, exactly {exact[worst]!r}"
    zero = (x == 0) & (exact == 0)
    assert (np.signbit(got[zero]) == np.signbit(exact[zero])).all(), "the sign of zero"
