"""The C++ kernel vocabulary against float64, and against eager PyTorch, on every level this CPU runs.

What comes in: cpp_prelude.h and cpp_math.h through cpp_text.py. Each test writes a translation unit
as the printer does, one function per operation, builds it, and calls it through ctypes.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from vocabulary import TOOLCHAIN, Build, build, call, lane_constants, levels, map_kernel, ulps

from hotloop.codegen import cpp_text
from hotloop.runtime.toolchain import SimdLevel

__all__ = ["build"]  # the fixture

# --- transcendental functions ---------------------------------------------------------------------


@cache
def float32_samples() -> np.ndarray:
    """350,000 bit patterns on an odd stride over all of float32, and the values where things change."""
    patterns = np.arange(0, 2**32, 12289, dtype=np.uint64).astype(np.uint32).view(np.float32)
    special = np.array(
        [
            0.0,
            1.0,
            0.5,
            2.0,
            3.0,
            4.0,
            0.95,
            87.3,
            88.72,
            88.73,
            103.9,
            104.0,
            126.0,
            127.0,
            128.0,
            149.0,
            150.0,
            np.inf,
            np.nan,
            1e-45,
            1.17549435e-38,
            3.4028235e38,
            np.pi,
            np.pi / 2,
            1e5,
            131072.0,
            0.70710677,
        ],
        np.float32,
    )
    with np.errstate(over="ignore"):
        near = np.concatenate([np.nextafter(special, np.float32(s)) for s in (-np.inf, np.inf)])
    dense = np.random.default_rng(0).uniform(-20, 20, 2**17).astype(np.float32)
    return np.concatenate([patterns, special, -special, near, -near, dense])


INLINED = {
    "exp": 1.5,
    "exp2": 1.5,
    "expm1": 1.5,
    "log": 1.5,
    "log2": 1.5,
    "log10": 1.5,
    "log1p": 1.5,
    "tanh": 1.5,
    "sigmoid": 2.2,
    "erf": 1.5,
    "sin": 1.75,
    "cos": 1.75,
}
LIBRARY = {
    "tan": 1.5,
    "asin": 1.5,
    "acos": 1.5,
    "atan": 1.5,
    "sinh": 1.5,
    "cosh": 1.5,
    "asinh": 1.5,
    "acosh": 1.5,
    "atanh": 1.5,
    "erfc": 2.0,
    "sqrt": 0.5,
    "rsqrt": 1.5,
    "reciprocal": 0.5,
    "lgamma": 0.51,
    "digamma": 0.6,
    "erfinv": 0.6,
}
REFERENCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reciprocal": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / x.sqrt(),
}


def unary_text(level: SimdLevel) -> str:
    text = lane_constants(level)
    for t in ("f32", "f64"):
        text += "".join(map_kernel(f"{n}_{t}", f"{n}(a)", t, t) for n in (*INLINED, *LIBRARY))
    return text


def reference(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return REFERENCE.get(name) or getattr(torch, name)


def exact_values(name: str, x: np.ndarray) -> np.ndarray:
    """The function of float32 values in float64."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return reference(name)(torch.from_numpy(x.astype(np.float64))).numpy()


@levels("scalar", "avx2", "avx512")
@pytest.mark.parametrize("name", [*INLINED, *LIBRARY])
def test_float32_function_over_the_whole_range(build: Build, name: str, level: SimdLevel) -> None:
    x = float32_samples()
    if name in LIBRARY:
        x = x[:: 8 if name not in ("erfinv", "lgamma", "digamma") else 40].copy()
    got = np.empty_like(x)
    call(getattr(build(unary_text(level), {*INLINED, *LIBRARY, "memory"}, level), f"{name}_f32"), x, out=got)
    exact = exact_values(name, x)
    if name in ("asinh", "acosh", "tan"):  # Sleef's give up, as eager's do, near the ends
        keep = np.abs(x) < (1e18 if "a" in name[:1] else 1e5)
        x, got, exact = x[keep], got[keep], exact[keep]
    if name == "digamma":  # float64's own reference is good away from the poles only
        keep = x > 0
        x, got, exact = x[keep], got[keep], exact[keep]
    error = ulps(got, exact)
    worst = int(error.argmax())
    bound = 2.5 if level == "scalar" else {**INLINED, **LIBRARY}[name]  # 2.5: the C library's own
    assert error[worst] <= bound, f"{name}({x[worst]!r}) = {got[worst]!r}, exactly {exact[worst]!r}"
    zero = (x == 0) & (exact == 0)
    assert (np.signbit(got[zero]) == np.signbit(exact[zero])).all(), "the sign of zero"


@levels("scalar", "avx2", "avx512")
def test_float64_functions(build: Build, level: SimdLevel) -> None:
    """Sleef and the C library promise an ulp; torch's float64 is as far off, so two of them are allowed."""
    x = np.concatenate(
        [np.random.default_rng(1).uniform(-4, 4, 1001), [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-310]]
    )
    library = build(unary_text(level), {*INLINED, *LIBRARY, "memory"}, level)
    for name in (*INLINED, *LIBRARY):
        got = np.empty_like(x)
        call(getattr(library, f"{name}_f64"), x, out=got)
        want = reference(name)(torch.from_numpy(x)).numpy()
        near = np.isclose(
            got, want, rtol=5e-15, atol=1e-322 if name not in ("lgamma", "digamma") else 1e-15, equal_nan=True
        )
        if name in ("lgamma", "digamma"):  # torch's own are no better near their zeros and poles
            near |= np.isclose(got, want, rtol=1e-9)
        assert near.all(), (name, x[~near], got[~near], want[~near])


@levels("scalar", "avx2", "avx512")
def test_hyperbolic_functions_are_finite_where_they_can_be(build: Build, level: SimdLevel) -> None:
    library = build(unary_text(level), {*INLINED, *LIBRARY, "memory"}, level)
    x = np.concatenate([sign * np.linspace(700, 711, 2003) for sign in (1, -1)])
    for name, exact in (("sinh", math.sinh), ("cosh", math.cosh)):
        got = np.empty_like(x)
        call(getattr(library, f"{name}_f64"), x, out=got)
        for at, y in zip(x, got, strict=True):
            if abs(at) < 710.4758:
                assert abs(y / exact(at) - 1) < 5e-16, (name, at)
            elif abs(at) > 710.4759:
                assert math.isinf(y), (name, at)


@levels("scalar", "avx2", "avx512")
def test_float32_power(build: Build, level: SimdLevel) -> None:
    rng = np.random.default_rng(2)
    special = np.array(
        [
            0.0,
            -0.0,
            1,
            -1,
            2,
            -2,
            3,
            -3,
            0.5,
            -0.5,
            np.inf,
            -np.inf,
            np.nan,
            1e-45,
            -1e-45,
            3e38,
            1.5,
            16777217,
            2**24 + 2,
            -2.5,
        ],
        np.float32,
    )
    a, b = (g.ravel() for g in np.meshgrid(special, special))
    x = np.concatenate([a, np.exp(rng.uniform(-88, 88, 2**17)), rng.uniform(0.5, 2, 2**17)]).astype(
        np.float32
    )
    y = np.concatenate([b, rng.uniform(-3, 3, 2**17), rng.uniform(-200, 200, 2**17)]).astype(np.float32)
    got = np.empty_like(x)
    text = lane_constants(level) + map_kernel("power", "pow(a, b)", "f32", "f32", 2)
    call(build(text, {"pow", "memory"}, level).power, x, y, out=got)
    exact = torch.pow(torch.from_numpy(x.astype(np.float64)), torch.from_numpy(y.astype(np.float64))).numpy()
    error = ulps(got, exact)
    worst = int(error.argmax())
    assert error[worst] <= (1.0 if level != "scalar" else 2.5), (x[worst], y[worst], got[worst], exact[worst])
    assert (np.signbit(got[got == 0]) == np.signbit(exact[got == 0])).all()


# --- small floats and casts -----------------------------------------------------------------------

DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
    "u16": torch.uint16,
    "u32": torch.uint32,
    "u64": torch.uint64,
}
SIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}


def run_torch(function: object, *inputs: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    out = torch.empty(inputs[0].numel(), dtype=dtype)
    error = ctypes.c_int64(0)
    function(
        *(ctypes.c_void_p(t.data_ptr()) for t in (*inputs, out)),
        ctypes.c_int64(out.numel()),
        ctypes.byref(error),
    )  # type: ignore[operator]
    return out, error.value


@levels("scalar", "avx2", "avx512")
@pytest.mark.parametrize("small", ["bf16", "f16"])
def test_small_floats(build: Build, level: SimdLevel, small: str) -> None:
    text = (
        lane_constants(level)
        + "".join(map_kernel(f"{s}_{t}", "a", s, t) for s, t in ((small, "f32"), ("f32", small)))
        + map_kernel("rounded", f"round_{small}(a)", "f32", "f32")
    )
    library = build(text, {"memory"}, level)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(DTYPES[small])
    widened, _ = run_torch(library[f"{small}_f32"], every, dtype=torch.float32)
    assert torch.equal(
        widened.view(torch.int32)[~every.isnan()], every.float().view(torch.int32)[~every.isnan()]
    )
    assert widened[every.isnan()].isnan().all()
    # Every value, the halfway points between neighbours, and their float32 neighbours.
    bits = widened.view(torch.int32).long()
    half = 0x8000 if small == "bf16" else 0x1000
    tricky = (
        torch.cat([bits + d for d in (0, 1, -1, half, half - 1, half + 1)])
        .to(torch.int32)
        .view(torch.float32)
    )
    x = torch.cat([tricky, torch.from_numpy(float32_samples())])
    narrowed, _ = run_torch(library[f"f32_{small}"], x, dtype=DTYPES[small])
    want = x.to(DTYPES[small])
    finite = ~want.isnan()
    assert torch.equal(narrowed.view(torch.int16)[finite], want.view(torch.int16)[finite])
    assert narrowed[~finite].isnan().all()
    rounded, _ = run_torch(library.rounded, x, dtype=torch.float32)
    assert torch.equal(rounded[finite], want.float()[finite]) and rounded[~finite].isnan().all()


# A small float is an f32 in registers, so that three partners say all there is to say about it.
CASTS = [
    (s, t)
    for s in DTYPES
    for t in DTYPES
    if not ({s, t} & {"bf16", "f16"}) or {s, t} <= {"bf16", "f16", "f32", "f64", "i64"}
]


def cast_text(level: SimdLevel) -> str:
    return "".join(
        f"namespace {s}_to_{t} {{ {lane_constants(level, max(SIZES[s], SIZES[t]))}"
        + map_kernel(f"{s}_{t}", f"cast<{t}>(a)", s, t)
        + "}\n"
        for s, t in CASTS
    )


def values(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    if dtype.is_floating_point:
        x = torch.randn(512, generator=generator, dtype=torch.float64) * 40
        return torch.cat(
            [x, torch.tensor([0.0, -0.0, 0.5, -0.5, 127.9, 254.5, 1e-8], dtype=torch.float64)]
        ).to(dtype)
    info = torch.iinfo(dtype)
    raw = torch.randint(-(2**63), 2**63 - 1, (512,), generator=generator)
    ends = torch.tensor([0, 1, 2, 3, 100, -1, -2, info.min, min(info.max, 2**63 - 1), 2**24 + 1])
    return torch.cat([raw, raw % 100, ends]).to(dtype)


@levels("scalar", "avx2", "avx512")
def test_casts_between_all_dtypes(build: Build, level: SimdLevel) -> None:
    library = build(cast_text(level), {"memory", "cast"}, level)
    for s, t in CASTS:
        source, target = DTYPES[s], DTYPES[t]
        x = values(source)
        if source.is_floating_point and not target.is_floating_point:
            x = x.abs() if not target.is_signed else x
            x = x[(x.double().abs() <= min(torch.iinfo(target).max, 2**62))]
        got, _ = run_torch(library[f"{s}_{t}"], x, dtype=target)
        assert got.tolist() == x.to(target).tolist(), (s, t)


@levels("scalar", "avx2", "avx512")
def test_casts_of_what_does_not_fit(build: Build, level: SimdLevel) -> None:
    library = build(cast_text(level), {"memory", "cast"}, level)
    x = torch.tensor([np.nan, np.inf, -np.inf, 3e9, -3e9, 300.7, -300.7, 1e20, -1.5, 70000.0, 5e9])
    for s in ("f32", "f64"):
        for t in ("i8", "u8", "i16", "u16", "i32", "i64"):  # eager contradicts itself on u32
            source = x.to(DTYPES[s])
            got, _ = run_torch(library[f"{s}_{t}"], source, dtype=DTYPES[t])
            assert got.tolist() == source.to(DTYPES[t]).tolist(), (s, t)


# --- integers -------------------------------------------------------------------------------------

INTEGER_BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add(a, b)": torch.add,
    "sub(a, b)": torch.sub,
    "mul(a, b)": torch.mul,
    "maximum(a, b)": torch.maximum,
    "minimum(a, b)": torch.minimum,
    "bit_and(a, b)": torch.bitwise_and,
    "bit_or(a, b)": torch.bitwise_or,
    "bit_xor(a, b)": torch.bitwise_xor,
    "neg(a)": lambda a, b: -a,
    "abs(a)": lambda a, b: a.abs(),
    "sign(a)": lambda a, b: a.sign(),
    "bit_not(a)": lambda a, b: ~a,
    "select(a < b, a, b)": torch.minimum,
    "select(mask_and(a < b, mask_not(a == b)), a, b)": torch.minimum,
    "mask_to<elem<decltype(a)>>(to_mask(a))": lambda a, b: a.bool().to(a.dtype),
    "floor_div(a, b, error)": torch.floor_divide,
    "trunc_div(a, b, error)": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "remainder(a, b, error)": torch.remainder,
    "fmod(a, b, error)": torch.fmod,
    "lshift(a, b)": torch.bitwise_left_shift,
    "rshift(a, b)": torch.bitwise_right_shift,
    "int_pow(a, b)": torch.pow,
}


@levels("scalar", "avx2", "avx512")
@pytest.mark.parametrize("dtype", ["i8", "u8", "i16", "i32", "i64"])
def test_integers_against_eager(build: Build, level: SimdLevel, dtype: str) -> None:
    text = lane_constants(level) + "".join(
        map_kernel(f"f{k}", e, dtype, dtype, 2) for k, e in enumerate(INTEGER_BINARY)
    )
    names = {"memory", "arith", "minmax", "bits", "division", "int_pow"}
    library = build(text, names, level)
    a = values(DTYPES[dtype])
    for k, (expression, eager) in enumerate(INTEGER_BINARY.items()):
        b = a.flip(0)
        x = a
        if "error" in expression:
            keep = (b != 0) & ~((a == torch.iinfo(a.dtype).min) & (b == -1))  # eager traps on the latter
            x, b = a[keep], b[keep]
        elif "shift" in expression or "pow" in expression:
            b = b % 80 if "pow" not in expression else b % 9 - (2 if a.dtype.is_signed else 0)
            if dtype == "u8" and "shift" in expression:
                b = b.abs()
        got, error = run_torch(library[f"f{k}"], x, b, dtype=a.dtype)
        assert torch.equal(got, eager(x, b)), (expression, dtype)
        assert error == 0


@levels("scalar", "avx2", "avx512")
def test_integer_division_never_traps(build: Build, level: SimdLevel) -> None:
    text = lane_constants(level)
    operations = ("floor_div", "trunc_div", "remainder", "fmod")
    for t in ("i8", "u8", "i32", "i64"):
        text += "".join(map_kernel(f"{n}_{t}", f"{n}(a, b, error)", t, t, 2) for n in operations)
    library = build(text, {"memory", "division"}, level)
    for t in ("i8", "u8", "i32", "i64"):
        lowest = torch.iinfo(DTYPES[t]).min
        a = torch.full((35,), lowest, dtype=DTYPES[t])
        for name in operations:
            _, error = run_torch(library[f"{name}_{t}"], a, torch.zeros_like(a), dtype=a.dtype)
            assert error == 2
            if lowest:
                got, error = run_torch(library[f"{name}_{t}"], a, torch.full_like(a, -1), dtype=a.dtype)
                assert error == 0 and (got == (lowest if "div" in name else 0)).all()


# --- float arithmetic, masks, memory, reductions ----------------------------------------------------

FLOAT_BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "maximum(a, b)": torch.maximum,
    "minimum(a, b)": torch.minimum,
    "fmax(a, b)": torch.fmax,
    "fmin(a, b)": torch.fmin,
    "remainder(a, b)": torch.remainder,
    "fmod(a, b)": torch.fmod,
    "floor_div(a, b)": torch.floor_divide,
    "trunc_div(a, b)": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "copysign(a, b)": torch.copysign,
    "nextafter(a, b)": torch.nextafter,
    "floor(a)": lambda a, b: a.floor(),
    "ceil(a)": lambda a, b: a.ceil(),
    "trunc(a)": lambda a, b: a.trunc(),
    "round(a)": lambda a, b: a.round(),
    "abs(a)": lambda a, b: a.abs(),
    "neg(a)": lambda a, b: -a,
    "sign(a)": lambda a, b: a.sign(),
    "clamp(a, splat<decltype(a)>(-1), splat<decltype(a)>(2))": lambda a, b: a.clamp(-1, 2),
    "mask_to<elem<decltype(a)>>(isnan(a))": lambda a, b: a.isnan().to(a.dtype),
    "mask_to<elem<decltype(a)>>(isinf(a))": lambda a, b: a.isinf().to(a.dtype),
    "mask_to<elem<decltype(a)>>(signbit(a))": lambda a, b: a.signbit().to(a.dtype),
    "mask_to<elem<decltype(a)>>(to_mask(a))": lambda a, b: a.bool().to(a.dtype),
    "fma(a, b, a)": lambda a, b: (a.double() * b.double() + a.double()).to(a.dtype),
}


@levels("scalar", "avx2", "avx512")
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_floats_against_eager(build: Build, level: SimdLevel, dtype: str) -> None:
    text = lane_constants(level) + "".join(
        map_kernel(f"f{k}", e, dtype, dtype, 2) for k, e in enumerate(FLOAT_BINARY)
    )
    library = build(text, {"memory", "arith", "minmax", "division", "round", "nextafter", "fma"}, level)
    some = torch.tensor(
        [
            0.0,
            -0.0,
            1,
            -1,
            0.5,
            -0.5,
            1.5,
            2.5,
            -2.5,
            np.inf,
            -np.inf,
            np.nan,
            3,
            -3,
            1e10,
            -1e-10,
            7.25,
            8388609.0,
        ]
    )
    a, b = (g.reshape(-1).to(DTYPES[dtype]) for g in torch.meshgrid(some, some, indexing="ij"))
    for k, (expression, eager) in enumerate(FLOAT_BINARY.items()):
        if expression.startswith("fma") and dtype == "f64":
            continue  # there is no wider type to check with
        got, _ = run_torch(library[f"f{k}"], a, b, dtype=a.dtype)
        want = eager(a, b)
        assert torch.equal(got.isnan(), want.isnan()), expression
        ok = ~want.isnan()
        assert torch.equal(got[ok], want[ok]), (
            expression,
            a[ok][got[ok] != want[ok]],
            b[ok][got[ok] != want[ok]],
        )
        if "m(a, b)" not in expression and "fm" not in expression:  # which zero is larger, eager leaves open
            assert torch.equal(got.signbit()[ok], want.signbit()[ok]), expression


MEMORY = """
extern "C" void partial_T(const T* x, T* out, i64 n) { store_partial<W_>(out, load_partial<W_>(x, n), n); }
extern "C" void strided_T(const T* x, T* out, i64 s) { store_strided<W_>(out, s, load_strided<W_>(x, s)); }
extern "C" void even_T(const T* x, T* out) { store<W_>(out, load_strided<W_>(x, 2)); }
extern "C" void backward_T(const T* x, T* out) { store<W_>(out, load_strided<W_>(x + W_ - 1, -1)); }
extern "C" void rest_T(const T* x, T* out) { store_partial<W_>(out, load_partial<W_>(x, W_ / 2), W_ / 2); }
extern "C" void turned_T(const T* x, T* out, i64 rows, i64 columns) {
    transpose(x, 37, rows, columns, out, 40); }
extern "C" void gathered_T(const T* x, T* out, const i64* at) { store<W_>(out, gather<W_>(x, load<W_>(at))); }
"""


def memory_text(level: SimdLevel) -> str:
    body = "".join(MEMORY.replace("T", t).replace("W_", f"LANES_{t}") for t in DTYPES)
    return lane_constants(level) + body


@levels("scalar", "avx2", "avx512")
def test_memory(build: Build, level: SimdLevel) -> None:
    library = build(memory_text(level), {"memory", "gather", "transpose"}, level)
    for t, dtype in DTYPES.items():
        lanes = cpp_text.lanes(level, 4 if t in ("bf16", "f16") else SIZES[t])
        ramp = torch.arange(1, 2 * lanes)
        exact = ramp.to(dtype)
        for name, want in (
            ("even", ramp[::2]),
            ("backward", ramp[:lanes].flip(0)),
            ("rest", ramp[: lanes // 2]),
        ):
            out = torch.zeros(lanes + 1, dtype=dtype)
            library[f"{name}_{t}"](ctypes.c_void_p(exact.data_ptr()), ctypes.c_void_p(out.data_ptr()))
            assert torch.equal(out[: len(want)], want.to(dtype)) and not out[len(want) :].double().any(), (
                name,
                t,
            )
        x = torch.arange(1, 101).to(dtype)
        for n in range(lanes + 1):
            out = torch.zeros(100, dtype=dtype)
            library[f"partial_{t}"](
                ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(n)
            )
            assert torch.equal(out[:n], x[:n]) and not out[n:].double().any(), t
        out = torch.zeros(100, dtype=dtype)
        library[f"strided_{t}"](
            ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(3)
        )
        assert (
            torch.equal(out[: 3 * lanes : 3], x[: 3 * lanes : 3]) and int((out.double() != 0).sum()) == lanes
        )
        at = torch.randperm(100)[:lanes]
        library[f"gathered_{t}"](*(ctypes.c_void_p(v.data_ptr()) for v in (x, out, at)))
        assert out[:lanes].tolist() == x.double()[at].to(dtype).tolist()


@levels("scalar", "avx2", "avx512")
def test_transpose(build: Build, level: SimdLevel) -> None:
    library = build(memory_text(level), {"memory", "gather", "transpose"}, level)
    for t, dtype in DTYPES.items():
        x = torch.randint(0, 100, (40, 37), generator=torch.Generator().manual_seed(1)).to(dtype)
        for rows, columns in ((1, 1), (3, 37), (8, 8), (16, 32), (17, 23), (40, 37), (37, 5), (20, 16)):
            out = torch.full((40, 40), 101).to(dtype)
            library[f"turned_{t}"](
                *(ctypes.c_void_p(v.data_ptr()) for v in (x, out)),
                ctypes.c_int64(rows),
                ctypes.c_int64(columns),
            )
            want = torch.full((40, 40), 101).to(dtype)
            want[:columns, :rows] = x[:rows, :columns].t()
            assert torch.equal(out, want), (t, rows, columns)


MASKS = """
extern "C" void where_(const u8* m, const T* a, const T* b, T* out, u8* back, i64 n) {
    for (i64 i = 0; i < n; i += W) {
        auto k = load_mask<W>(m + i);
        store<W>(out + i, select(k, load<W>(a + i), load<W>(b + i)));
        store_mask<W>(back + i, mask_or(k, load<W>(a + i) > load<W>(b + i)));
    } }
extern "C" i32 any_all(const T* a) { auto m = load<W>(a) > splat<vec<T, W>>(0); return any(m) * 2 + all(m); }
"""


@levels("scalar", "avx2", "avx512")
@pytest.mark.parametrize("dtype", ["i8", "i16", "i32", "i64", "f32", "f64"])
def test_masks(build: Build, level: SimdLevel, dtype: str) -> None:
    lanes = cpp_text.lanes(level, SIZES[dtype])
    library = build(f"typedef {dtype} T; constexpr int W = {lanes};" + MASKS, {"memory"}, level)
    a, b = (torch.arange(64).to(DTYPES[dtype]), torch.full((64,), 30, dtype=DTYPES[dtype]))
    m = torch.arange(64) % 3 == 0
    out, back = torch.empty_like(a), torch.empty(64, dtype=torch.bool)
    library.where_(*(ctypes.c_void_p(t.data_ptr()) for t in (m, a, b, out, back)), ctypes.c_int64(64))
    assert torch.equal(out, torch.where(m, a, b)) and torch.equal(back, m | (a > b))
    for lane in range(lanes):
        one = torch.zeros(lanes, dtype=DTYPES[dtype])
        one[lane] = 1
        assert library.any_all(ctypes.c_void_p(one.data_ptr())) == (2 if lanes > 1 else 3)
        assert library.any_all(ctypes.c_void_p((1 - one).data_ptr())) == (2 if lanes > 1 else 0)


REDUCTIONS = """
extern "C" void reduce_(const T* x, T* out, i64* at) {
    auto v = load<W>(x);
    out[0] = hsum(v); out[1] = hprod(v); out[2] = hmax(v); out[3] = hmin(v);
    vec<T, W> best = splat<vec<T, W>>(LOW), least = splat<vec<T, W>>(HIGH);
    vec<i64, W> best_at = splat<vec<i64, W>>(0x7fffffffffffffff), least_at = best_at;
    for (i64 i = 0; i < 4 * W; i += W) {
        argmax_step(best, best_at, load<W>(x + i), iota<i64, W>(i));
        argmin_step(least, least_at, load<W>(x + i), iota<i64, W>(i));
    }
    T ignored; hargmax(best, best_at, ignored, at[0]); hargmin(least, least_at, ignored, at[1]);
}
"""


@levels("scalar", "avx2", "avx512")
@pytest.mark.parametrize("dtype", ["i8", "i32", "i64", "f32", "f64"])
def test_reductions(build: Build, level: SimdLevel, dtype: str) -> None:
    lanes, kind = cpp_text.lanes(level, SIZES[dtype]), DTYPES[dtype]
    ends = (
        ("-__builtin_inf()", "__builtin_inf()")
        if kind.is_floating_point
        else (f"({torch.iinfo(kind).min + 1} - 1)", str(torch.iinfo(kind).max))
    )
    text = f"typedef {dtype} T; constexpr int W = {lanes};" + REDUCTIONS.replace("LOW", ends[0]).replace(
        "HIGH", ends[1]
    )
    library = build(text, {"memory", "reduce", "arg_reduce", "iota"}, level)
    generator = torch.Generator().manual_seed(4)
    for case in range(40):
        x = torch.randint(-2, 3, (4 * lanes,), generator=generator).to(kind)
        if kind.is_floating_point and case % 3 == 0:
            x[torch.randint(0, 4 * lanes, (2,), generator=generator)] = torch.nan
        if kind.is_floating_point and case % 5 == 0:
            x = torch.full_like(x, -torch.inf)
        out, at = torch.empty(4, dtype=kind), torch.empty(2, dtype=torch.int64)
        library.reduce_(*(ctypes.c_void_p(t.data_ptr()) for t in (x, out, at)))
        v = x[:lanes]
        want = torch.stack([v.sum(dtype=kind), v.prod(dtype=kind), v.amax(), v.amin()])
        assert torch.equal(torch.nan_to_num(out), torch.nan_to_num(want)) and torch.equal(
            out.isnan(), want.isnan()
        )
        assert at.tolist() == [int(x.argmax()), int(x.argmin())]


# --- the text itself --------------------------------------------------------------------------------


def test_a_part_is_pasted_with_what_it_needs_and_no_more() -> None:
    text = cpp_text.prelude({"load", "store", "exp"})
    assert " exp(V x)" in text and " fma(V a" in text and " load(const T*" in text
    assert " erf(V x)" not in text and "argmax_step" not in text and "#include" not in text
    assert len(cpp_text.prelude(())) < len(text)
    with pytest.raises(KeyError, match="no_such_word"):
        cpp_text.prelude({"no_such_word"})


def test_lane_counts() -> None:
    assert [cpp_text.lanes("avx2", b) for b in (8, 4, 2, 1)] == [4, 8, 16, 16]
    assert [cpp_text.lanes("avx512", b) for b in (8, 4)] == [8, 16]
    assert cpp_text.lanes("scalar", 1) == 1 and cpp_text.lanes("neon", 4) == 4


INSTRUCTIONS = """
extern "C" void kernel(const f32* x, f32* out) {
    auto v = load<16>(x);
    store<16>(out, fma(exp(v), v, sqrt(floor(v))));
}
extern "C" void small(const bf16* x, f16* out) { store<16>(out, load<16>(x)); }
"""


@pytest.mark.skipif(TOOLCHAIN.kind != "gcc", reason="clang has its own way to these instructions")
def test_avx512_instructions(tmp_path: Path) -> None:
    """What this machine may be unable to run it can still compile."""
    source, assembly = tmp_path / "k.cpp", tmp_path / "k.s"
    source.write_text(cpp_text.prelude({"memory", "exp", "fma", "sqrt", "floor"}) + INSTRUCTIONS)
    flags = [f for f in TOOLCHAIN.compile_flags("avx512") if f != "-shared"]
    subprocess.run([*TOOLCHAIN.compiler, *flags, "-S", str(source), "-o", str(assembly)], check=True)
    text = assembly.read_text()
    for instruction in ("vfmadd", "vscalefps", "vrndscaleps", "vsqrtps", "vpmovzxwd", "vcvtps2ph"):
        assert any(instruction in line and "zmm" in line for line in text.splitlines()), instruction


@pytest.mark.skipif(
    shutil.which("aarch64-linux-gnu-g++") is None, reason="no cross compiler for NEON (g++-aarch64-linux-gnu)"
)
def test_neon_compiles(tmp_path: Path) -> None:
    source = tmp_path / "k.cpp"
    names = {"memory", *INLINED, *LIBRARY, "minmax", "division", "arith", "reduce"}
    source.write_text(cpp_text.prelude(names) + unary_text("neon"))
    flags = [f for f in TOOLCHAIN.compile_flags("neon") if f not in ("-shared", "-fopenmp")]
    subprocess.run(
        ["aarch64-linux-gnu-g++", *flags, "-S", str(source), "-o", str(tmp_path / "k.s")], check=True
    )
    text = (tmp_path / "k.s").read_text()
    assert "fmla\tv" in text and "Sleef_sinf4_u10" not in text.split("sin_f64")[0]
