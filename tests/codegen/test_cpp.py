"""Printed kernels, compiled and run, against the kernel interpreter; and how the printed text reads."""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hotloop.codegen import cpp
from hotloop.errors import CompileError
from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index
from hotloop.ir.interpret_kernel import run_kernel
from hotloop.ir.kernel import Accumulate, Init, Kernel, Let, Loop, Param, Scratch, Stmt, Store
from hotloop.ir.loops import Origin
from hotloop.runtime.build import Builder, Source
from hotloop.runtime.cache import Cache
from hotloop.runtime.toolchain import detect_simd, find_toolchain, runnable_levels

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
I64, I32, I16, I8, U8, BOOL = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool
NATIVE = detect_simd()
LEVELS = tuple(dict.fromkeys(("scalar", "avx2" if "avx2" in runnable_levels() else NATIVE, NATIVE)))

levels = pytest.mark.parametrize("level", LEVELS)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(str(tmp_path_factory.mktemp("cache")))


class Case:
    """A kernel and the memory of its parameters, before it runs."""

    def __init__(
        self, kernel: Kernel, *buffers: torch.Tensor, exact: bool = False, rtol: float = 2e-6
    ) -> None:
        assert len(buffers) == len(kernel.params)
        self.kernel = kernel
        self.buffers = buffers
        self.tolerance = (0.0, 0.0) if exact else (rtol, 2e-6)


def build(cases: Sequence[Case], level: str, cache: Cache) -> dict[str, ctypes._CFuncPtr]:  # type: ignore[name-defined]
    kernels = [c.kernel for c in cases]
    sources = cpp.print_kernels(kernels, level)
    builder = Builder(find_toolchain(), cache, 1, level)  # type: ignore[arg-type]
    found = {}
    for source, library in zip(
        sources, builder.build([Source(s.name, s.text) for s in sources]), strict=True
    ):
        for symbol in source.symbols:
            found[symbol] = library.handle[symbol]
            found[symbol].restype = ctypes.c_int64
    return {name: found[serving.name] for name, serving in cpp.dedupe(kernels).items()}


def run(case: Case, function: ctypes._CFuncPtr) -> tuple[int, list[torch.Tensor]]:  # type: ignore[name-defined]
    guarded = [torch.cat([b, b.new_full((64,), 1)]) for b in case.buffers]
    status = function(*(ctypes.c_void_p(b.data_ptr()) for b in guarded))
    for g in guarded:
        assert bool((g[-64:] == 1).all()), f"{case.kernel.name} wrote behind a buffer"
    return status, [g[:-64] for g in guarded]


def check(cases: Sequence[Case], level: str, cache: Cache) -> None:
    """Run each kernel as C++ and by the interpreter, and compare all memory."""
    functions = build(cases, level, cache)
    for case in cases:
        status, got = run(case, functions[case.kernel.name])
        assert status == 0, case.kernel.name
        expected = {p.name: b.clone() for p, b in zip(case.kernel.params, case.buffers, strict=True)}
        run_kernel(case.kernel, expected)
        rtol, atol = case.tolerance
        for p, g in zip(case.kernel.params, got, strict=True):
            torch.testing.assert_close(
                g,
                expected[p.name],
                rtol=rtol,
                atol=atol,
                equal_nan=True,
                msg=lambda m, case=case, p=p: f"{case.kernel.name}, {p.name}: {m}",
            )


def kernel(name: str, params: str, body: Sequence[Stmt], **more: object) -> Kernel:
    """``params``: like ``"in0:float32 out0:bool"``."""
    made = []
    for word in params.split():
        p, dtype = word.split(":")
        made.append(
            Param(p, getattr(torch, dtype), "inout" if p.startswith("io") else p.rstrip("0123456789"))
        )
    return Kernel(name, tuple(made), tuple(body), **more)  # type: ignore[arg-type]


def load(buffer: str, i: Index | int, dtype: torch.dtype = F32) -> Expr:
    return ex.load(buffer, (i,), dtype)


def f(value: float, dtype: torch.dtype = F32) -> Expr:
    return ex.const(value, dtype)


def i(name: str, n: int) -> Index:
    return ix.var(name, n)


def vector(v: Index, *body: Stmt) -> Loop:
    return Loop(v, 0, v.extent, "vector", body)


def noise(n: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed + n)
    if dtype is BOOL:
        return torch.rand(n, generator=g) < 0.5
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.randint(max(info.min, -(2**62)), min(info.max, 2**62), (n,), generator=g).to(dtype)
    return torch.randn(n, generator=g).to(dtype)


SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 23, 31, 32, 33, 40, 63, 64, 65, 100)


# --- elementwise --------------------------------------------------------------------------------------------


@levels
def test_elementwise_of_every_length(level: str, cache: Cache) -> None:
    cases = []
    for n in SIZES:
        v = i("i0", n)
        x, y = load("in0", v), load("in1", v)
        body = ex.call("add", ex.call("mul", x, f(0.5)), ex.call("maximum", x, y))
        k = kernel(f"k{n}", "in0:float32 in1:float32 out0:float32", [vector(v, Store("out0", v, body))])
        a = noise(n)
        a[0] = float("nan")
        cases.append(Case(k, a, noise(n, seed=1), torch.zeros(n), exact=True))
    check(cases, level, cache)


@levels
def test_broadcast_rows_and_columns(level: str, cache: Cache) -> None:
    r, v = i("i0", 5), i("i1", 37)
    body = ex.call("add", ex.call("mul", load("in0", r), load("in1", v)), load("in2", 0))
    k = kernel(
        "k",
        "in0:float32 in1:float32 in2:float32 out0:float32",
        [Loop(r, 0, 5, "parallel", (vector(v, Store("out0", r * 37 + v, body)),))],
    )
    check([Case(k, noise(5), noise(37), noise(1), torch.zeros(185), exact=True)], level, cache)
    text = cpp.print_kernel(k, level).text
    assert text.index("in0[i0]") < text.index("for (i64 i1"), "a row's value is read once, before its loop"
    assert text.index("in2[0]") < text.index("#pragma omp"), "a scalar is read once"


@levels
def test_functions_of_float32(level: str, cache: Cache) -> None:
    n, cases = 19, []
    v = i("i0", n)
    x = load("in0", v)
    for op in [
        "exp",
        "log",
        "sqrt",
        "rsqrt",
        "tanh",
        "sigmoid",
        "erf",
        "abs",
        "neg",
        "sin",
        "cos",
        "floor",
        "ceil",
        "trunc",
        "round",
        "square",
        "reciprocal",
        "expm1",
        "log1p",
        "sign",
    ]:
        k = kernel(f"k_{op}", "in0:float32 out0:float32", [vector(v, Store("out0", v, ex.call(op, x)))])
        cases.append(Case(k, noise(n).abs() + 0.1, torch.zeros(n)))
    for op in [
        "div",
        "pow",
        "floordiv",
        "remainder",
        "fmod",
        "copysign",
        "atan2",
        "minimum",
        "fmax",
        "fmin",
        "hypot",
    ]:
        y = load("in1", v)
        k = kernel(
            f"k_{op}",
            "in0:float32 in1:float32 out0:float32",
            [vector(v, Store("out0", v, ex.call(op, x, y)))],
        )
        cases.append(Case(k, noise(n).abs() + 0.1, noise(n, seed=3), torch.zeros(n)))
    check(cases, level, cache)


@levels
@pytest.mark.parametrize("dtype", [I64, I32, I16, I8, U8])
def test_integers_wrap(dtype: torch.dtype, level: str, cache: Cache) -> None:
    n, cases = 45, []
    v, name = i("i0", n), str(dtype).removeprefix("torch.")
    x, y = load("in0", v, dtype), load("in1", v, dtype)
    divisor = noise(n, dtype, 2)
    divisor[divisor == 0] = 3
    for op in [
        "add",
        "sub",
        "mul",
        "maximum",
        "minimum",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "floordiv",
        "truncdiv",
        "remainder",
        "fmod",
    ]:
        k = kernel(
            f"k_{op}", f"in0:{name} in1:{name} out0:{name}", [vector(v, Store("out0", v, ex.call(op, x, y)))]
        )
        cases.append(Case(k, noise(n, dtype), divisor, torch.zeros(n, dtype=dtype), exact=True))
    for op in ("neg", "abs", "bitwise_not", "square"):
        k = kernel(f"k_{op}", f"in0:{name} out0:{name}", [vector(v, Store("out0", v, ex.call(op, x)))])
        cases.append(Case(k, noise(n, dtype), torch.zeros(n, dtype=dtype), exact=True))
    check(cases, level, cache)


@levels
def test_casts(level: str, cache: Cache) -> None:
    n, cases = 21, []
    v = i("i0", n)
    for a in (F32, F64, BF16, F16, I64, I32, I16, I8, U8, BOOL):
        for b in (F32, F64, BF16, F16, I64, I32, I16, I8, U8, BOOL):
            if a is b:
                continue
            an, bn = (str(d).removeprefix("torch.") for d in (a, b))
            body = ex.cast(load("in0", v, a), b)
            k = kernel(f"k_{an}_{bn}", f"in0:{an} out0:{bn}", [vector(v, Store("out0", v, body))])
            x = (noise(n).abs() * 20).to(a)
            cases.append(Case(k, x, torch.zeros(n, dtype=b), exact=True))
    check(cases, level, cache)


@levels
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_low_precision(dtype: torch.dtype, level: str, cache: Cache) -> None:
    n, name = 43, str(dtype).removeprefix("torch.")
    v = i("i0", n)
    x, y = load("in0", v, dtype), load("in1", v, dtype)
    wide = ex.call("add", ex.cast(x, F32), ex.cast(y, F32))
    rounded = ex.cast(ex.call("mul", ex.cast(ex.cast(wide, dtype), F32), f(3.0)), dtype)
    chosen = ex.where(ex.call("lt", v_as(v), ex.const(20, I64)), x, y)
    params = f"in0:{name} in1:{name} out0:{name}"
    cases = [
        Case(
            kernel(f"k{k}", params, [vector(v, Store("out0", v, body))]),
            noise(n, dtype),
            noise(n, dtype, 1),
            torch.zeros(n, dtype=dtype),
            exact=True,
        )
        for k, body in enumerate((ex.cast(wide, dtype), rounded, chosen, x))
    ]
    check(cases, level, cache)


def v_as(e: Index, dtype: torch.dtype = I64) -> Expr:
    return ex.index_value(e, dtype)


@levels
def test_bools_in_memory_and_as_masks(level: str, cache: Cache) -> None:
    n = 29
    v = i("i0", n)
    a, b, x = load("in0", v, BOOL), load("in1", v, BOOL), load("in2", v)
    positive = ex.call("gt", x, f(0.0))
    bodies = [
        ex.call("logical_and", a, positive),
        ex.call("bitwise_or", a, b),
        ex.call("logical_not", ex.call("eq", a, b)),
        ex.call("logical_xor", ex.call("isnan", x), b),
        ex.where(a, b, positive),
        ex.const(True, BOOL),
        ex.call("lt", v_as(v), ex.const(7, I64)),
    ]
    x0 = noise(n)
    x0[3] = float("nan")
    cases = [
        Case(
            kernel(f"k{k}", "in0:bool in1:bool in2:float32 out0:bool", [vector(v, Store("out0", v, body))]),
            noise(n, BOOL),
            noise(n, BOOL, 1),
            x0,
            torch.zeros(n, dtype=BOOL),
            exact=True,
        )
        for k, body in enumerate(bodies)
    ]
    chosen = ex.where(ex.call("logical_or", a, positive), x, ex.cast(b, F32))
    cases.append(
        Case(
            kernel(
                "k_select",
                "in0:bool in1:bool in2:float32 out0:float32",
                [vector(v, Store("out0", v, chosen))],
            ),
            noise(n, BOOL),
            noise(n, BOOL, 1),
            x0,
            torch.zeros(n),
            exact=True,
        )
    )
    check(cases, level, cache)


@levels
def test_constants_keep_their_bits(level: str, cache: Cache) -> None:
    n, cases = 9, []
    v = i("i0", n)
    values = [
        0.1,
        -0.0,
        float("inf"),
        float("-inf"),
        float("nan"),
        3.4028234663852886e38,
        1e-45,
        1.1754944e-38,
        16777217,
    ]
    for k, value in enumerate(values):
        for dtype, name in ((F32, "float32"), (F64, "float64")):
            body = [vector(v, Store("out0", v, f(value, dtype)))]
            cases.append(
                Case(kernel(f"k{k}_{name}", f"out0:{name}", body), torch.zeros(n, dtype=dtype), exact=True)
            )
    for dtype, name in ((I64, "int64"), (I32, "int32"), (I8, "int8")):
        for which in ("min", "max"):
            value = getattr(torch.iinfo(dtype), which)
            body = [vector(v, Store("out0", v, ex.const(value, dtype)))]
            cases.append(
                Case(
                    kernel(f"k_{which}_{name}", f"out0:{name}", body), torch.zeros(n, dtype=dtype), exact=True
                )
            )
    check(cases, level, cache)
    functions = build(cases, level, cache)
    for case in cases:
        if case.kernel.name == "k1_float32":
            assert bool(torch.signbit(run(case, functions["k1_float32"])[1][0]).all())


# --- reductions ---------------------------------------------------------------------------------------------


def row_softmax(rows: int, columns: int, dtype: torch.dtype = F32) -> Kernel:
    r = i("i0", rows)
    a, b, c = (i(f"i{k}", columns) for k in (1, 2, 3))

    def x(v: Index) -> Expr:
        return ex.call("mul", ex.cast(load("in0", r * columns + v, dtype), F32), f(0.125))

    e = ex.call("exp", ex.call("sub", x(b), ex.local("acc0", F32)))
    out = ex.call("div", load("row0", c), ex.local("acc1", F32))
    body = (
        Scratch("row0", F32, columns),
        Init("acc0", "max", F32),
        vector(a, Accumulate("acc0", x(a))),
        Init("acc1", "sum", F32),
        vector(b, Store("row0", b, e), Accumulate("acc1", e)),
        vector(c, Store("out0", r * columns + c, ex.cast(out, dtype))),
    )
    name = str(dtype).removeprefix("torch.")
    origin = Origin(source="attn = torch.softmax(x * 0.125, -1)  # model.py:41")
    return kernel(
        f"softmax_{rows}_{columns}_{name}",
        f"in0:{name} out0:{name}",
        [Loop(r, 0, rows, "parallel", body)],
        origins=(origin,),
    )


@levels
def test_softmax_of_rows(level: str, cache: Cache) -> None:
    cases = [Case(row_softmax(3, n), noise(3 * n), torch.zeros(3 * n)) for n in (*SIZES, 1000, 20000)]
    cases.append(Case(row_softmax(3, 50, BF16), noise(150, BF16), torch.zeros(150, dtype=BF16), rtol=8e-3))
    check(cases, level, cache)


@levels
def test_reductions_of_every_kind_and_length(level: str, cache: Cache) -> None:
    cases = []
    for n in (1, 3, 8, 9, 33, 64, 100, 257):
        for kind in ("sum", "prod", "max", "min"):
            for dtype, name in ((F32, "float32"), (F64, "float64"), (I64, "int64")):
                v = i("i0", n)
                body = [
                    Init("acc0", kind, dtype),
                    vector(v, Accumulate("acc0", load("in0", v, dtype))),
                    Store("out0", ix.const(0), ex.local("acc0", dtype)),
                ]
                x = noise(n, dtype)
                if kind == "max" and n > 8:
                    x[7] = float("nan") if dtype.is_floating_point else x[7]
                k = kernel(f"{kind}_{name}_{n}", f"in0:{name} out0:{name}", body)
                cases.append(Case(k, x, torch.zeros(1, dtype=dtype), rtol=1e-5))
        for kind in ("any", "all"):
            for dense in sorted({0, 1, n}):
                v = i("i0", n)
                body = [
                    Init("acc0", kind, BOOL),
                    vector(v, Accumulate("acc0", load("in0", v, BOOL))),
                    Store("out0", ix.const(0), ex.local("acc0", BOOL)),
                ]
                x = torch.arange(n) < dense if kind == "any" else torch.arange(n) < n - dense
                k = kernel(f"{kind}_{n}_{dense}", "in0:bool out0:bool", body)
                cases.append(Case(k, x, torch.zeros(1, dtype=BOOL), exact=True))
    check(cases, level, cache)


@levels
@pytest.mark.parametrize("kind", ["argmax", "argmin"])
def test_first_extreme(kind: str, level: str, cache: Cache) -> None:
    cases = []
    for n in (1, 2, 7, 8, 9, 40, 64, 100):
        for what in ("noise", "ties", "nan", "infinite"):
            x = {
                "noise": noise(3 * n),
                "ties": noise(3 * n).sign(),
                "nan": noise(3 * n),
                "infinite": torch.full((3 * n,), float("-inf") if kind == "argmax" else float("inf")),
            }[what]
            if what == "nan":
                x[n // 2] = x[2 * n - 1] = x[2 * n] = float("nan")
            r, v = i("i0", 3), i("i1", n)
            body = (
                Init("acc0", kind, F32),
                vector(v, Accumulate("acc0", load("in0", r * n + v), v)),
                Store("out0", r, ex.local("acc0", I64)),
            )
            k = kernel(f"k_{what}_{n}", "in0:float32 out0:int64", [Loop(r, 0, 3, "parallel", body)])
            cases.append(Case(k, x, torch.zeros(3, dtype=I64), exact=True))
    check(cases, level, cache)


@levels
def test_reductions_of_columns(level: str, cache: Cache) -> None:
    cases = []
    for rows, columns in ((3, 5), (50, 8), (700, 35), (10, 64), (6, 100)):
        for kind in ("sum", "max", "any", "argmax"):
            v, r = i("i0", columns), i("i1", rows)
            x = load("in0", r * columns + v)
            dtype = BOOL if kind == "any" else F32
            value = ex.call("gt", x, f(2.0)) if kind == "any" else x
            result = I64 if kind == "argmax" else dtype
            body = (
                Init("acc0", kind, dtype),
                Loop(r, 0, rows, "serial", (Accumulate("acc0", value, r if kind == "argmax" else None),)),
                Store("out0", v, ex.local("acc0", result)),
            )
            name = str(result).removeprefix("torch.")
            k = kernel(f"{kind}_{rows}_{columns}", f"in0:float32 out0:{name}", [vector(v, *body)])
            data = (noise(rows * columns) * 64).round() / 64  # sums are exact in any order
            cases.append(Case(k, data, torch.zeros(columns, dtype=result), exact=True))
    check(cases, level, cache)


@levels
def test_long_sums_are_accurate(level: str, cache: Cache) -> None:
    n = 3_000_001
    v, r, w = i("i0", n), i("i0", 1000), i("i1", 3000)
    body = [
        Init("acc0", "sum", F32),
        vector(v, Accumulate("acc0", load("in0", v))),
        Store("out0", ix.const(0), ex.local("acc0", F32)),
    ]
    nested = [
        Init("acc0", "sum", F32),
        Loop(r, 0, 1000, "serial", (vector(w, Accumulate("acc0", load("in0", r * 3000 + w))),)),
        Store("out0", ix.const(0), ex.local("acc0", F32)),
    ]
    column = [
        vector(
            i("i2", 8),
            Init("acc0", "sum", F32),
            Loop(
                i("i3", n // 8),
                0,
                n // 8,
                "serial",
                (Accumulate("acc0", load("in0", i("i3", n // 8) * 8 + i("i2", 8))),),
            ),
            Store("out0", i("i2", 8), ex.local("acc0", F32)),
        )
    ]
    x = torch.rand(n)
    cases = [
        Case(kernel("flat", "in0:float32 out0:float32", body), x, torch.zeros(1)),
        Case(kernel("nested", "in0:float32 out0:float32", nested), x, torch.zeros(1)),
        Case(kernel("column", "in0:float32 out0:float32", column), x, torch.zeros(8)),
    ]
    functions = build(cases, level, cache)
    exact = x.double().sum()
    eager = float((x.sum() - exact).abs() / exact)
    assert float((run(cases[0], functions["flat"])[1][1] - exact).abs() / exact) <= max(eager, 3e-7)
    exact = x[:3_000_000].double().sum()
    assert float((run(cases[1], functions["nested"])[1][1] - exact).abs() / exact) <= max(eager, 3e-7)
    exact = x[: n // 8 * 8].view(-1, 8).double().sum(0)
    assert float(((run(cases[2], functions["column"])[1][1] - exact).abs() / exact).max()) <= 1e-6


@levels
def test_one_accumulator_over_several_loops(level: str, cache: Cache) -> None:
    a, b, c = i("i0", 10), i("i1", 40), i("i2", 3)
    x = load("in0", b + 10)
    body = [
        Init("acc0", "sum", F32),
        vector(a, Accumulate("acc0", load("in0", a))),
        vector(b, Accumulate("acc0", ex.call("mul", x, x))),
        Loop(c, 0, 3, "serial", (Accumulate("acc0", load("in0", c)),)),
        Let("v0", ex.call("sqrt", ex.call("abs", ex.local("acc0", F32)))),
        vector(
            i("i3", 11),
            Store("out0", i("i3", 11), ex.call("mul", ex.local("v0", F32), load("in0", i("i3", 11)))),
        ),
    ]
    k = kernel("k", "in0:float32 out0:float32", body)
    check([Case(k, noise(50), torch.zeros(11))], level, cache)


@levels
def test_values_defined_inside_a_vector_loop(level: str, cache: Cache) -> None:
    v, r = i("i0", 70), i("i1", 20)
    x = load("in0", r * 70 + v)
    body = (
        Init("acc0", "sum", F32),
        Loop(r, 0, 20, "serial", (Accumulate("acc0", x),)),
        Let("v0", ex.call("div", ex.local("acc0", F32), f(20.0))),
        Let("v1", ex.call("gt", ex.local("v0", F32), f(0.0))),
        Store("out0", v, ex.where(ex.local("v1", BOOL), ex.local("v0", F32), f(-1.0))),
    )
    k = kernel("k", "in0:float32 out0:float32", [vector(v, *body)])
    check([Case(k, noise(1400), torch.zeros(70), rtol=1e-5)], level, cache)


# --- indices ------------------------------------------------------------------------------------------------


@levels
def test_masked_loads(level: str, cache: Cache) -> None:
    """Padding and concatenation: what lies outside is never read."""
    n = 50
    v, r = i("i0", n), i("i1", 4)
    at = v_as(v)
    inside = ex.call("logical_and", ex.call("ge", at, ex.const(3, I64)), ex.call("lt", at, ex.const(43, I64)))
    late = ex.call("logical_and", ex.call("ge", at, ex.const(40, I64)), ex.call("lt", at, ex.const(45, I64)))
    pads = [
        ex.masked(inside, load("in0", v - 3), f(0.0)),
        ex.masked(inside, load("in0", v - 3), f(2.5)),
        ex.masked(inside, ex.call("exp", load("in0", ix.const(42) - v)), f(-1.0)),
        ex.masked(
            ex.call("lt", at, ex.const(40, I64)), load("in0", v), ex.masked(late, load("in0", v - 40), f(7.0))
        ),
        ex.masked(inside, load("in0", (v - 3) * 1 // 2), f(0.0)),
    ]
    cases = [
        Case(
            kernel(f"k{k}", "in0:float32 out0:float32", [vector(v, Store("out0", v, body))]),
            noise(40),
            torch.zeros(n),
        )
        for k, body in enumerate(pads)
    ]
    row_inside = ex.call("lt", v_as(r), ex.const(3, I64))
    rows = ex.masked(row_inside, load("in0", r * n + v), f(9.0))
    cases.append(
        Case(
            kernel(
                "rows",
                "in0:float32 out0:float32",
                [Loop(r, 0, 4, "serial", (vector(v, Store("out0", r * n + v, rows)),))],
            ),
            noise(150),
            torch.zeros(200),
        )
    )
    bools = ex.masked(inside, load("in0", v - 3, BOOL), ex.const(True, BOOL))
    cases.append(
        Case(
            kernel("bools", "in0:bool out0:bool", [vector(v, Store("out0", v, bools))]),
            noise(40, BOOL),
            torch.zeros(n, dtype=BOOL),
        )
    )
    check(cases, level, cache)


@levels
def test_strided_reversed_and_divided_indices(level: str, cache: Cache) -> None:
    n = 53
    v = i("i0", n)
    positions = [
        v * 3,
        ix.const(n - 1) - v,
        v // 4,
        v % 7,
        (v + 5) // 3 * 2 + v % 3,
        ix.minimum(v, 20),
        ix.maximum(v - 9, 0),
    ]
    cases = [
        Case(
            kernel(f"k{k}", "in0:float32 out0:float32", [vector(v, Store("out0", v, load("in0", at)))]),
            noise(3 * n),
            torch.zeros(n),
            exact=True,
        )
        for k, at in enumerate(positions)
    ]
    cases += [
        Case(
            kernel(f"s{k}", "in0:float32 out0:float32", [vector(v, Store("out0", at, load("in0", v)))]),
            noise(n),
            torch.zeros(3 * n),
            exact=True,
        )
        for k, at in enumerate([v * 3, ix.const(n - 1) - v, v // 4 * 8 + v % 4])
    ]
    check(cases, level, cache)


@levels
@pytest.mark.parametrize("dtype", [F32, BF16, I64])
def test_transpose_in_tiles(dtype: torch.dtype, level: str, cache: Cache) -> None:
    cases, name = [], str(dtype).removeprefix("torch.")
    for rows, columns in ((70, 45), (64, 32), (9, 33), (8, 8)):
        bv, bc = i("b0", -(-rows // 32)), i("b1", -(-columns // 32))
        v, c = i("i0", rows), i("i1", columns)
        value = ex.where(
            ex.call("lt", v_as(v), ex.const(60, I64)), load("in0", v * columns + c, dtype), f0(dtype)
        )
        store = Store("out0", c * rows + v, value)
        across = Loop(v, bv * 32, ix.minimum(bv * 32 + 32, rows), "vector", (store,))
        along = Loop(c, bc * 32, ix.minimum(bc * 32 + 32, columns), "serial", (across,))
        tiles = Loop(bv, 0, bv.extent, "parallel", (Loop(bc, 0, bc.extent, "parallel", (along,)),))
        k = kernel(f"k{rows}_{columns}", f"in0:{name} out0:{name}", [tiles])
        cases.append(
            Case(k, noise(rows * columns, dtype), torch.zeros(rows * columns, dtype=dtype), exact=True)
        )
        assert "collapse(2)" in cpp.print_kernel(k, level).text
    check(cases, level, cache)
    if level != "scalar":
        assert "transpose(" in cpp.print_kernel(cases[0].kernel, level).text


def f0(dtype: torch.dtype) -> Expr:
    return ex.const(0, dtype)


def gather_kernels() -> list[Kernel]:
    v, r = i("i0", 37), i("i1", 6)
    by_lane = ix.indirect(load("in1", v, I64), 20)
    narrow = ix.indirect(ex.cast(load("in1", v, I64), I32), 20)
    by_row = ix.indirect(load("in1", r, I64), 20)
    rows = Loop(r, 0, 6, "parallel", (vector(v, Store("out0", r * 37 + v, load("in0", by_row * 37 + v))),))
    params = "in0:float32 in1:int64 out0:float32"
    return [
        kernel("by_lane", params, [vector(v, Store("out0", v, load("in0", by_lane * 2 + 1)))], checks=True),
        kernel("narrow", params, [vector(v, Store("out0", v, load("in0", narrow)))], checks=True),
        kernel("by_row", params, [rows], checks=True),
    ]


@levels
def test_gather_and_an_index_out_of_range(level: str, cache: Cache) -> None:
    good = torch.arange(37) * 7 % 20
    cases = [Case(k, noise(740), good, torch.zeros(222), exact=True) for k in gather_kernels()]
    check(cases, level, cache)
    functions = build(cases, level, cache)
    for case in cases:
        for where in (0, 5):
            for wrong in (-1, 20, 2**40):
                bad = good.clone()
                bad[where] = wrong
                if case.kernel.name == "narrow" and wrong == 2**40:
                    continue  # 0 as an int32
                case.buffers = (case.buffers[0], bad, case.buffers[2])
                status, _ = run(case, functions[case.kernel.name])
                assert cpp.read_status(status) == (1, (wrong, 20)), (case.kernel.name, where)


@levels
def test_gather_into_a_sum(level: str, cache: Cache) -> None:
    """A loss: several vectors an iteration, each with positions of its own."""
    cases = []
    for n in (50, 64, 5):
        v = i("i0", n)
        target = load("in1", v, I64)
        valid = ex.call("ne", target, ex.const(-100, I64))
        at = ix.indirect(ex.where(valid, target, ex.const(0, I64)), 20)
        value = ex.where(valid, ex.call("neg", load("in0", v * 20 + at)), f(0.0))
        body = [
            Init("acc0", "sum", F32),
            Init("acc1", "sum", I64),
            vector(v, Accumulate("acc0", value), Accumulate("acc1", ex.cast(valid, I64))),
            Store(
                "out0",
                ix.const(0),
                ex.call("div", ex.local("acc0", F32), ex.cast(ex.local("acc1", I64), F32)),
            ),
        ]
        targets = torch.arange(n) * 7 % 20
        targets[1::5] = -100
        cases.append(
            Case(
                kernel(f"k{n}", "in0:float32 in1:int64 out0:float32", body),
                noise(20 * n),
                targets,
                torch.zeros(1),
            )
        )
    check(cases, level, cache)


@levels
def test_division_of_integers_by_zero(level: str, cache: Cache) -> None:
    n = 21
    v = i("i0", n)
    k = kernel(
        "k",
        "in0:int64 in1:int64 out0:int64",
        [vector(v, Store("out0", v, ex.call("floordiv", load("in0", v, I64), load("in1", v, I64))))],
        checks=True,
    )
    by = torch.arange(n) + 1
    case = Case(k, torch.arange(n), by, torch.zeros(n, dtype=I64), exact=True)
    check([case], level, cache)
    by[n - 1] = 0
    status, _ = run(case, build([case], level, cache)["k"])
    assert "zero" in cpp.ERRORS[status] and cpp.read_status(status) == (2, None)


@levels
def test_index_values(level: str, cache: Cache) -> None:
    n, cases = 41, []
    v = i("i0", n)
    params = {F32: "float32", I64: "int64", I32: "int32"}
    for k, (dtype, body) in enumerate(
        [
            (F32, ex.cast(v_as(v * 2 + 1), F32)),
            (I64, v_as(v * v)),
            (I32, ex.cast(v_as(ix.const(5) - v), I32)),
            (F32, ex.where(ex.call("le", v_as(v), v_as(ix.const(40) - v)), f(1.0), f(0.0))),
            (I64, ex.call("mul", v_as(v), load("in0", v, I64))),
        ]
    ):
        kern = kernel(f"k{k}", f"in0:int64 out0:{params[dtype]}", [vector(v, Store("out0", v, body))])
        cases.append(Case(kern, noise(n, I64), torch.zeros(n, dtype=dtype), exact=True))
    check(cases, level, cache)


@levels
def test_written_in_place(level: str, cache: Cache) -> None:
    v = i("i0", 30)
    twice = ex.call("mul", load("io0", v), f(2.0))
    body = [vector(v, Store("io0", v, twice), Store("out0", v, ex.call("add", load("io0", v), f(1.0))))]
    check([Case(kernel("k", "io0:float32 out0:float32", body), noise(30), torch.zeros(30))], level, cache)


@levels
def test_large_scratch_is_not_on_the_stack(level: str, cache: Cache) -> None:
    k = row_softmax(2, 1 << 15)
    assert "__builtin_free(row0)" in cpp.print_kernel(k, level).text
    check([Case(k, noise(2 << 15), torch.zeros(2 << 15))], level, cache)


# --- the text -----------------------------------------------------------------------------------------------


def test_softmax_reads_well() -> None:
    assert (
        cpp.print_kernel(row_softmax(2048, 1024), "avx2").text
        == """\
// attn = torch.softmax(x * 0.125, -1)  # model.py:41
extern "C" i64 softmax_2048_1024_float32(const f32* __restrict in0, f32* __restrict out0) {
#pragma omp parallel for schedule(static)
    for (i64 i0 = 0; i0 < 2048; i0++) {
        alignas(64) f32 row0[1024];
        f32x8 acc0_a = splat<f32x8>(-__builtin_inff());
        f32x8 acc0_b = splat<f32x8>(-__builtin_inff());
        f32x8 acc0_c = splat<f32x8>(-__builtin_inff());
        f32x8 acc0_d = splat<f32x8>(-__builtin_inff());
        for (i64 i1 = 0; i1 < 1024; i1 += 32) {
            acc0_a = maximum(load<8>(in0 + 1024 * i0 + i1) * 0.125f, acc0_a);
            acc0_b = maximum(load<8>(in0 + 1024 * i0 + i1 + 8) * 0.125f, acc0_b);
            acc0_c = maximum(load<8>(in0 + 1024 * i0 + i1 + 16) * 0.125f, acc0_c);
            acc0_d = maximum(load<8>(in0 + 1024 * i0 + i1 + 24) * 0.125f, acc0_d);
        }
        const f32 acc0 = hmax(maximum(maximum(acc0_a, acc0_b), maximum(acc0_c, acc0_d)));
        f32x8 acc1_v = splat<f32x8>(0.0f);
        for (i64 i2_block0 = 0; i2_block0 < 1024; i2_block0 += 128) {
            const i64 i2_stop0 = minimum<i64>(i2_block0 + 128, 1024);
            f32x8 acc1_part0_v = splat<f32x8>(0.0f);
            for (i64 i2 = i2_block0; i2 < i2_stop0; i2 += 8) {
                const f32x8 t0 = exp(load<8>(in0 + 1024 * i0 + i2) * 0.125f - acc0);
                store<8>(row0 + i2, t0);
                acc1_part0_v += t0;
            }
            acc1_v += acc1_part0_v;
        }
        const f32 acc1 = hsum(acc1_v);
        for (i64 i3 = 0; i3 < 1024; i3 += 8)
            store<8>(out0 + 1024 * i0 + i3, load<8>(row0 + i3) / acc1);
    }
    return 0;
}
"""
    )


@levels
def test_in_place_no_element_is_done_twice(level: str, cache: Cache) -> None:
    """A vector that overlaps the one before may do the rest, but not where that changed its input."""
    for n in (9, 11, 13, 17, 23, 45, 100):
        v = i("i0", n)
        body = vector(v, Store("out0", v, ex.call("add", load("in0", v), f(1.0))))
        made = kernel(f"k{n}", "in0:float32 out0:float32", [body])
        made = replace(made, params=tuple(replace(p, restrict=False) for p in made.params))
        case = Case(made, noise(n), noise(n), exact=True)
        check([case], level, cache)
        memory = case.buffers[0].clone()
        function = build([case], level, cache)[made.name]
        assert function(ctypes.c_void_p(memory.data_ptr()), ctypes.c_void_p(memory.data_ptr())) == 0
        assert torch.equal(memory, case.buffers[0] + 1)


def test_no_tail_where_none_is_left() -> None:
    v = i("i0", 64)
    k = kernel("k", "in0:float32 out0:float32", [vector(v, Store("out0", v, load("in0", v)))])
    text = cpp.print_kernel(k, "avx2").text
    assert text.count("for (") == 1 and "partial" not in text


def test_lanes_follow_the_widest_value() -> None:
    v = i("i0", 64)

    def lanes(level: str, params: str, body: Expr) -> int:
        return cpp.lane_count(kernel("k", params, [vector(v, Store("out0", v, body))]), level)

    x = load("in0", v)
    assert [lanes(a, "in0:float32 out0:float32", x) for a in ("scalar", "neon", "avx2", "avx512")] == [
        1,
        4,
        8,
        16,
    ]
    assert lanes("avx2", "in0:float32 out0:float64", ex.cast(x, F64)) == 4
    assert lanes("avx2", "in0:uint8 out0:uint8", load("in0", v, U8)) == 16
    inside = ex.call("lt", v_as(v), ex.const(9, I64))
    assert lanes("avx2", "in0:float32 out0:float32", ex.where(inside, x, f(0.0))) == 8, (
        "positions fit 32 bits"
    )


def test_serial_kernels_have_no_threads() -> None:
    k = row_softmax(8, 64)
    assert (
        "omp"
        not in cpp.print_kernel(kernel("k", "in0:float32 out0:float32", k.body, parallel=False), "avx2").text
    )
    assert "omp" not in cpp.print_kernel(k, "avx2", openmp=False).text


def random_kernels() -> list[Kernel]:
    """All words: counters of 32 bits and of more, in vectors with a rest, one at a time, and of one value."""
    key = ex.load("in0", (ix.const(0),), I64)
    found = []
    for n, start in ((77, 0), (77, 2**40 - 5), (3, 2**33)):
        v = i("i0", n)
        for kind in ("vector", "serial"):
            stores = [Store(f"out{w}", v, ex.random(key, v + start, w)) for w in range(4)]
            params = " ".join(["in0:int64", *(f"out{w}:int32" for w in range(4))])
            found.append(kernel(f"random_{n}_{start}_{kind}", params, [Loop(v, 0, n, kind, tuple(stores))]))
    v = i("i0", 40)
    both = ex.call("bitwise_xor", ex.random(key, 7), ex.random(key, v * 3 + 1, 1))
    return [*found, kernel("random_uniform", "in0:int64 out0:int32", [vector(v, Store("out0", v, both))])]


@levels
def test_random_bits(level: str, cache: Cache) -> None:
    cases = []
    for k in random_kernels():
        n = next(s for s in k.body if isinstance(s, Loop)).stop
        keys = torch.tensor([-0x123456789ABCDEF1])
        cases.append(Case(k, keys, *(torch.zeros(n, dtype=I32) for _ in k.params[1:]), exact=True))
    check(cases, level, cache)
    (source,) = cpp.print_functions([random_kernels()[0]], "avx2")
    assert source.text.count("threefry<") == 2 * 2, "a block gives two words, in vectors and for the rest"


@levels
def test_a_probability_outside_its_range_is_reported(level: str, cache: Cache) -> None:
    v = i("i0", 37)
    body = ex.call("probability", load("in0", v))
    k = kernel("chance", "in0:float32 out0:float32", [vector(v, Store("out0", v, body))], checks=True)
    case = Case(k, torch.linspace(0, 1, 37), torch.zeros(37), exact=True)
    check([case], level, cache)
    function = build([case], level, cache)["chance"]
    for at, bad in ((0, -1e-7), (36, 1.0001), (20, math.nan)):
        wrong = torch.linspace(0, 1, 37)
        wrong[at] = bad
        assert run(Case(k, wrong, torch.zeros(37)), function)[0] == 3


def test_equal_kernels_share_a_function() -> None:
    a = row_softmax(8, 64)
    b = kernel("other", "in0:float32 out0:float32", a.body)
    assert cpp.dedupe([a, b]) == {a.name: a, "other": a}
    (source,) = cpp.print_kernels([a, b], "avx2")
    assert source.symbols == (a.name,) and source.text.count('extern "C" i64') == 1


def test_units_are_balanced() -> None:
    kernels = [row_softmax(rows, 1021) for rows in range(2, 34)]
    sources = cpp.print_kernels(kernels, "avx2", units=3)
    assert len(sources) == 3
    assert sorted(s for source in sources for s in source.symbols) == sorted(k.name for k in kernels)
    counts = [len(source.symbols) for source in sources]
    assert max(counts) - min(counts) <= 1


def test_text_does_not_depend_on_the_order_of_construction() -> None:
    first = cpp.print_kernel(row_softmax(4, 100), "avx2").text
    for n in (3, 9, 77):
        row_softmax(n, n)
    assert cpp.print_kernel(row_softmax(4, 100), "avx2").text == first


def test_what_has_no_form_is_an_error() -> None:
    v = i("i0", 8)
    body = ex.random(load("in0", v, I64), v)
    with pytest.raises(CompileError, match="key"):
        cpp.print_kernel(kernel("k", "in0:int64 out0:int32", [vector(v, Store("out0", v, body))]), "avx2")


@pytest.mark.skipif("avx2" not in runnable_levels(), reason="an x86 compiler is needed")
def test_compiles_for_avx512(tmp_path: Path) -> None:
    kernels = [row_softmax(3, 100), row_softmax(3, 50, BF16), *gather_kernels()]
    (source,) = cpp.print_kernels(kernels, "avx512")
    assert "load<16>" in source.text
    file = tmp_path / "k.cpp"
    file.write_text(source.text)
    toolchain = find_toolchain()
    flags = [x for x in toolchain.compile_flags("avx512") if x != "-shared"]
    done = subprocess.run(
        [*toolchain.compiler, *flags, "-S", "-o", str(tmp_path / "k.s"), str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"vmaxps\s.*%zmm", (tmp_path / "k.s").read_text())
