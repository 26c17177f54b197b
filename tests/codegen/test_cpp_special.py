"""The special functions in C++ against values with 40 digits, on every level this CPU runs.

What comes in: cpp_special.h through cpp_text.py, one function of float64 and float32 each. What holds: a
float32 is right to 0.6 units in the last place, a float64 to some, or relative to 1 for polynomials; at
infinities, poles and outside of their domains the functions give what eager's give.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from mpmath import mp, mpf
from vocabulary import Build, build, call, lane_constants, levels, map_kernel, ulps

from hotloop.ir.evaluate import FUNCTIONS
from hotloop.ir.expr import OPS, SPECIAL_FUNCTIONS
from hotloop.runtime.toolchain import SimdLevel

__all__ = ["build"]  # the fixture

Exact = Callable[..., Any]
UNARY = [n for n in SPECIAL_FUNCTIONS if OPS[n].arity == 1]
BINARY = [n for n in SPECIAL_FUNCTIONS if OPS[n].arity == 2]


def _scaled(f: Exact, sign: int) -> Exact:
    return lambda order, x: f(order, x) * mp.exp(sign * abs(x))


EXACT: dict[str, Exact] = {
    **{f"bessel_{k}{n}": lambda x, k=k, n=n: getattr(mp, f"bessel{k}")(n, x) for k in "ik" for n in (0, 1)},
    **{f"bessel_i{n}_scaled": lambda x, n=n: _scaled(mp.besseli, -1)(n, x) for n in (0, 1)},
    **{f"bessel_k{n}_scaled": lambda x, n=n: _scaled(mp.besselk, 1)(n, x) for n in (0, 1)},
    "erfcx": lambda x: mp.erfc(x) * mp.exp(x * x),
    "zeta": mp.zeta,
    "chebyshev_polynomial_t": lambda x, n: mp.chebyt(n, x),
    "chebyshev_polynomial_u": lambda x, n: mp.chebyu(n, x),
    "chebyshev_polynomial_v": lambda x, n: mp.chebyu(n, x) - mp.chebyu(n - 1, x) if n else mpf(1),
    "chebyshev_polynomial_w": lambda x, n: mp.chebyu(n, x) + mp.chebyu(n - 1, x) if n else mpf(1),
    "hermite_polynomial_h": lambda x, n: mp.hermite(n, x),
    "hermite_polynomial_he": lambda x, n: mp.hermite(n, x / mp.sqrt(2)) * mpf(2) ** (-n / 2),
    "laguerre_polynomial_l": lambda x, n: mp.laguerre(n, 0, x),
    "legendre_polynomial_p": lambda x, n: mp.legendre(n, x),
}
EXACT |= {
    f"shifted_{name}": lambda x, n, f=f: f(2 * x - 1, n)
    for name, f in list(EXACT.items())
    if name.startswith("cheby")
}


def points(name: str) -> tuple[np.ndarray, ...]:
    """Arguments over the whole domain, all of them float32 numbers."""
    rng = np.random.default_rng(0)
    near, far = rng.uniform(0, 4, 60), np.exp(rng.uniform(-30, 6, 60))
    found: tuple[np.ndarray, ...]
    if name == "zeta":
        found = rng.uniform(1, 30, 120), np.concatenate([near, far / 20])
    elif name in BINARY:
        found = rng.uniform(-1, 1, 120) * np.repeat([1.0, 3.0], 60), rng.integers(0, 30, 120).astype(float)
    else:
        both = name.startswith(("bessel_i", "erfcx"))
        x = np.concatenate([near, far, [1.5, 9.0, 8.999, 9.001, 25.0, 25.1, 80.0]])
        found = (np.concatenate([x, -x]) if both else x,)
    return tuple(np.float32(v).astype(np.float64) for v in found)


@cache
def exact(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The function at these points, and the size of the values around each of them."""
    with mp.workdps(40):
        values = [EXACT[name](*map(mpf, map(float, p))) for p in zip(*points(name), strict=True)]
        numbers = np.array([float(v) for v in values])
    size = np.abs(numbers)
    if "polynomial" in name:
        size = np.maximum(size, 1)
    return numbers, size


def text(level: SimdLevel) -> str:
    parts = [lane_constants(level)]
    for t in ("f32", "f64"):
        parts += [map_kernel(f"{n}_{t}", f"{n}(a)", t, t) for n in UNARY]
        parts += [map_kernel(f"{n}_{t}", f"{n}(a, b)", t, t, 2) for n in BINARY]
    return "".join(parts)


def computed(build: Build, name: str, kind: str, level: SimdLevel, *arguments: np.ndarray) -> np.ndarray:
    dtype = np.float32 if kind == "f32" else np.float64
    own = [np.ascontiguousarray(a, dtype) for a in arguments]
    out = np.empty_like(own[0])
    library = build(text(level), {*SPECIAL_FUNCTIONS, "memory"}, level)
    call(getattr(library, f"{name}_{kind}"), *own, out=out)
    return out


@levels("scalar", "avx2", "avx512")
@pytest.mark.parametrize("name", SPECIAL_FUNCTIONS)
def test_values(build: Build, name: str, level: SimdLevel) -> None:
    want, size = exact(name)
    got = computed(build, name, "f64", level, *points(name))
    finite = np.isfinite(want)
    assert (got[~finite] == want[~finite]).all(), "overflow"
    error = np.abs(got[finite] - want[finite]) / size[finite]
    allowed = 1e-12 if name in BINARY else 4e-15
    worst = int(error.argmax())
    at = [p[finite][worst] for p in points(name)]
    assert error[worst] <= allowed, f"{name}{at} is off by {error[worst]}"
    single = computed(build, name, "f32", level, *points(name))
    near_zero = np.abs(want) < 1e-3 * size
    off = ulps(single, want)[~near_zero]
    assert off.max() <= 0.6, (name, off.max())


#: Without a NaN for polynomials: eager's may then be anything.
EDGES = (0.0, -0.0, math.inf, -math.inf, math.nan, -1.0, 1.0, -2.5, 0.5, 2.0, 700.0, -700.0, 3e38, 1e-40)
DEGREES = (math.nan, math.inf, -math.inf, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 7.0, 8.0, 130.0, 600.0)


@levels("scalar", "avx512")
@pytest.mark.parametrize("name", SPECIAL_FUNCTIONS)
def test_edges(build: Build, name: str, level: SimdLevel) -> None:
    """Where eager gives NaN or an infinity, so do these, unless eager alone has overflowed on its way."""
    if name in UNARY:
        arguments = [np.array(EDGES)]
    else:
        second = DEGREES if "polynomial" in name else EDGES
        first = [x for x in EDGES if "polynomial" not in name or not math.isnan(x)]
        arguments = [g.ravel() for g in np.meshgrid(first, second)]
    eager = FUNCTIONS[name](*map(torch.from_numpy, arguments)).numpy()
    got = computed(build, name, "f64", level, *arguments)
    same = np.isclose(got, eager, rtol=1e-9, atol=1e-12, equal_nan=True)
    huge = np.max([np.abs(a) for a in arguments], axis=0) > 1e30
    overflowed = np.isnan(eager) & (~np.isfinite(got) | huge)
    bad = ~(same | overflowed)
    assert not bad.any(), list(zip(*(a[bad] for a in (*arguments, got, eager)), strict=True))
