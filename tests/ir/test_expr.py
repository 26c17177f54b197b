"""Value expressions: what each operation means, that equal trees are one object, and how trees are rewritten.

What comes in: edge values of every dtype. What goes out: nothing. What holds: the evaluator gives, for each
operation, exactly what the torch operator of the same meaning gives, written out here a second time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir.evaluate import FUNCTIONS, Evaluator
from hotloop.ir.expr import Expr

F32, F64, I32, I64, BOOL = torch.float32, torch.float64, torch.int32, torch.int64, torch.bool

FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.75, -7.25, 1e-30, 1e30, -1e30, 1e-42]
SPECIAL = [math.inf, -math.inf, math.nan]
INTEGERS = [0, 1, -1, 2, -2, 3, 7, -7, 100, -100]

FLOAT_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": lambda x: -x,
    "abs": torch.ops.aten.abs,
    "square": torch.square,
    "floor": torch.ops.aten.floor,
    "ceil": torch.ops.aten.ceil,
    "trunc": torch.ops.aten.trunc,
    "round": torch.ops.aten.round,
    "sign": torch.sgn,
    "isnan": lambda x: x != x,
    "isinf": lambda x: x.abs() == math.inf,
    "isfinite": lambda x: (x - x) == 0,
    # The functions of floats alone have the names that PyTorch gives them.
    **{
        name: getattr(torch.ops.aten, name)
        for name, info in ex.OPS.items()
        if info.takes == "floats" and info.arity == 1 and name not in (*ex.SPECIAL_FUNCTIONS, "probability")
    },
    "reciprocal": lambda x: 1 / x,
}
FLOAT_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "maximum": lambda a, b: torch.where(a.isnan() | b.isnan(), math.nan, torch.where(a > b, a, b)),
    "minimum": lambda a, b: torch.where(a.isnan() | b.isnan(), math.nan, torch.where(a < b, a, b)),
    "fmax": lambda a, b: torch.where(b.isnan(), a, torch.where(a.isnan() | (b > a), b, a)),
    "fmin": lambda a, b: torch.where(b.isnan(), a, torch.where(a.isnan() | (b < a), b, a)),
    "floordiv": lambda a, b: torch.floor_divide(a, b),
    "truncdiv": lambda a, b: (a / b).trunc(),
    "remainder": lambda a, b: a % b,
    "fmod": torch.ops.aten.fmod,
    "pow": lambda a, b: a**b,
    "atan2": torch.arctan2,
    "hypot": torch.ops.aten.hypot,
    "copysign": torch.ops.aten.copysign,
    "nextafter": torch.ops.aten.nextafter,
}
COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "logical_and": lambda a, b: (a != 0) & (b != 0),
    "logical_or": lambda a, b: (a != 0) | (b != 0),
    "logical_xor": lambda a, b: (a != 0) ^ (b != 0),
}
INTEGER_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "maximum": max,
    "minimum": min,
    "floordiv": lambda a, b: a // b,
    "truncdiv": lambda a, b: int(Fraction(a, b)),
    "remainder": lambda a, b: a % b,
    "fmod": lambda a, b: a - b * int(Fraction(a, b)),
    "bitwise_and": lambda a, b: a & b,
    "bitwise_or": lambda a, b: a | b,
    "bitwise_xor": lambda a, b: a ^ b,
}
TESTED_APART = {"signbit", "logical_not", "bitwise_not", "shl", "shr", "fma", "probability"}


def evaluate(op: str, *args: Tensor) -> Tensor:
    """The operation on tensors of one shape, each standing for a local."""
    names = {f"a{k}": t for k, t in enumerate(args)}
    e = ex.call(op, *(ex.local(name, t.dtype) for name, t in names.items()))
    out = Evaluator({}, lambda *_: torch.empty(0), names).value(e)
    assert out.dtype is e.dtype
    return out


def same(got: Tensor, want: Tensor) -> None:
    """Bit for bit, but for which NaN."""
    assert got.dtype is want.dtype
    both_nan = got.isnan() & want.isnan()
    assert bool(((got == want) | both_nan).all()), (got, want)
    if got.dtype.is_floating_point:
        assert bool(((got.signbit() == want.signbit()) | both_nan | (got != 0)).all()), (got, want)


def pairs(values: list[float], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    t = torch.tensor(values, dtype=dtype)
    a, b = torch.meshgrid(t, t, indexing="ij")
    return a.reshape(-1).clone(), b.reshape(-1).clone()


def test_every_operation_has_a_function_and_a_test() -> None:
    assert set(FUNCTIONS) == set(ex.OPS)
    tested = {*FLOAT_UNARY, *FLOAT_BINARY, *COMPARISONS, *INTEGER_BINARY, *TESTED_APART}
    assert tested == set(ex.OPS).difference(ex.SPECIAL_FUNCTIONS)  # lower/test_special.py tests these


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("op", FLOAT_UNARY)
def test_unary_of_floats(op: str, dtype: torch.dtype) -> None:
    x = torch.tensor(FLOATS + SPECIAL, dtype=dtype)
    same(evaluate(op, x), FLOAT_UNARY[op](x))


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("op", FLOAT_BINARY)
def test_binary_of_floats(op: str, dtype: torch.dtype) -> None:
    a, b = pairs(FLOATS + SPECIAL, dtype)
    want = FLOAT_BINARY[op](a, b)
    got = evaluate(op, a, b)
    if op in ("maximum", "minimum", "fmax", "fmin"):  # which of 0.0 and -0.0 is larger is nobody's business
        got, want = got + 0.0, want + 0.0
    same(got, want)


@pytest.mark.parametrize("dtype", [F32, F64, I32, I64, torch.uint8, BOOL])
@pytest.mark.parametrize("op", COMPARISONS)
def test_comparisons(op: str, dtype: torch.dtype) -> None:
    values = FLOATS + SPECIAL if dtype.is_floating_point else INTEGERS
    a, b = (t.to(dtype) for t in pairs(values, F64 if dtype.is_floating_point else I64))
    same(evaluate(op, a, b), COMPARISONS[op](a, b))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, I32, I64, torch.uint8])
@pytest.mark.parametrize("op", INTEGER_BINARY)
def test_binary_of_integers_wraps(op: str, dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    values = sorted({*(v for v in INTEGERS if info.min <= v <= info.max), info.min, info.max})
    a, b = pairs(values, dtype)
    if op in ("floordiv", "truncdiv", "remainder", "fmod"):
        a, b = a[b != 0], b[b != 0]
    want = [
        ex.const(INTEGER_BINARY[op](x, y), dtype).value for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    same(evaluate(op, a, b), torch.tensor(want, dtype=dtype))


def test_integer_division_by_zero_is_an_error_as_in_eager() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        evaluate("floordiv", torch.tensor([1]), torch.tensor([0]))


@pytest.mark.parametrize("dtype", [I32, I64])
def test_shifts(dtype: torch.dtype) -> None:
    a, b = pairs(INTEGERS, dtype)
    b = b.clamp(0, 8)
    scale = torch.tensor([2**n for n in b.tolist()], dtype=dtype)
    same(evaluate("shl", a, b), a * scale)
    same(evaluate("shr", a, b), torch.floor_divide(a, scale))


def test_signbit_tells_negative_zero() -> None:
    got = evaluate("signbit", torch.tensor([0.0, -0.0, 1.0, -1.0, -math.inf]))
    assert got.bool().tolist() == [False, True, False, True, True]


def test_not() -> None:
    same(
        evaluate("logical_not", torch.tensor([0.0, -0.0, 2.0, math.nan])),
        torch.tensor([True, True, False, False]),
    )
    same(evaluate("bitwise_not", torch.tensor([0, 5, -1])), torch.tensor([-1, -6, 0]))
    same(evaluate("bitwise_not", torch.tensor([True, False])), torch.tensor([False, True]))


def test_fma_rounds_once() -> None:
    torch.manual_seed(1)
    a = torch.randn(4000) * torch.exp2(torch.randint(-20, 20, (4000,)))
    b = torch.randn(4000)
    c = torch.where(torch.arange(4000) % 2 == 0, -(a * b), torch.randn(4000) * 1e-5)
    # The last: a tie of float32 that only a bit far below float64's precision decides.
    a = torch.cat([a, torch.tensor([1.0 + 2**-12, math.inf, math.inf, math.nan])])
    b = torch.cat([b, torch.tensor([1.0 + 2**-12, 0.0, 1.0, 1.0])])
    c = torch.cat([c, torch.tensor([2.0**-70, 1.0, -math.inf, 1.0])])
    got = evaluate("fma", a, b, c)
    for x, y, z, r in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        if not all(map(math.isfinite, (x, y, z))):
            assert math.isnan(r)
            continue
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        low = torch.nextafter(torch.tensor(r), torch.tensor(-math.inf)).item()
        high = torch.nextafter(torch.tensor(r), torch.tensor(math.inf)).item()
        error = abs(Fraction(r) - exact)
        assert error <= abs(Fraction(low) - exact) and error <= abs(Fraction(high) - exact)


def test_fma_of_float64() -> None:
    a, b, c = (torch.tensor(v, dtype=F64) for v in ([2.0, 3.0], [4.0, -1.0], [1.0, 3.0]))
    same(evaluate("fma", a, b, c), torch.tensor([9.0, 0.0], dtype=F64))


@pytest.mark.parametrize("source", [F32, torch.bfloat16, I32, BOOL])
@pytest.mark.parametrize("target", [F32, torch.bfloat16, torch.float16, F64, torch.int8, I64, BOOL])
def test_cast_is_to(source: torch.dtype, target: torch.dtype) -> None:
    x = torch.tensor([0.0, 1.0, -3.7, 65.3]).to(source)
    e = ex.cast(ex.local("x", source), target)
    same(Evaluator({}, lambda *_: x, {"x": x}).value(e), x.to(target))


def test_bitcast_keeps_the_bits() -> None:
    x = torch.tensor([1.0, -0.0, math.inf])
    e = ex.bitcast(ex.local("x", F32), I32)
    assert Evaluator({}, lambda *_: x, {"x": x}).value(e).tolist() == [0x3F800000, -(1 << 31), 0x7F800000]


def test_equal_trees_are_one_object() -> None:
    i = ix.var("i0", 8)
    make = lambda: ex.call("add", ex.load("x", (i * 2 + 1,), F32), ex.const(1.5, F32))  # noqa: E731
    assert make() is make()
    assert ex.load("x", (i,), F32) is not ex.load("y", (i,), F32)
    assert ex.load("x", (i,), F32) is not ex.load("x", (i,), F64)
    assert ex.load("x", (i,), F32) is not ex.load("x", (ix.var("i0", 9),), F32)


def test_constants_are_told_apart_by_their_bits() -> None:
    assert ex.const(0.0, F32) is not ex.const(-0.0, F32)
    assert math.copysign(1, ex.const(-0.0, F32).value) == -1
    assert ex.const(math.nan, F32) is ex.const(math.nan, F32)
    assert math.isnan(ex.const(math.nan, F32).value)
    assert ex.const(1, I32) is not ex.const(True, BOOL)
    assert ex.const(1, F32) is ex.const(1.0, F32)


def test_constants_are_what_their_dtype_can_hold() -> None:
    assert ex.const(0.1, F32).value == torch.tensor(0.1).item()
    assert ex.const(300, torch.uint8).value == 44
    assert ex.const(200, torch.int8).value == -56
    assert ex.const(3, BOOL).value is True


def test_free_variables() -> None:
    i, j = ix.var("i0", 4), ix.var("i1", 5)
    e = ex.call("mul", ex.load("x", (i,), F32), ex.cast(ex.index_value(j), F32))
    assert e.free_vars == {i, j}
    inner = ix.indirect(ex.load("t", (j,), I64), 9)
    assert ex.load("x", (inner,), F32).free_vars == {j}


def test_call_refuses_what_does_not_agree() -> None:
    x, y = ex.local("x", F32), ex.local("y", F64)
    with pytest.raises(TypeError, match="add of"):
        ex.call("add", x, y)
    with pytest.raises(TypeError, match="takes 1 arguments"):
        ex.call("exp", x, x)
    with pytest.raises(TypeError, match="unknown operation"):
        ex.call("exponential", x)
    with pytest.raises(TypeError, match="where of"):
        ex.where(ex.local("c", BOOL), x, y)
    with pytest.raises(ValueError, match="width"):
        ex.bitcast(x, F64)


def test_comparisons_of_indices_are_decided_by_their_ranges() -> None:
    i = ex.index_value(ix.var("i0", 8))
    for op, limit, truth in (
        ("lt", 8, True),
        ("ge", 8, False),
        ("le", -1, False),
        ("gt", -1, True),
        ("eq", 8, False),
    ):
        assert ex.call(op, i, ex.const(limit, I64)) is ex.const(truth, BOOL)
    assert ex.call("lt", i, ex.const(7, I64)).op == "lt"


def test_walk_gives_arguments_first_and_each_node_once() -> None:
    i = ix.var("i0", 8)
    payload = ex.load("t", (i,), I64)
    x = ex.load("x", (ix.indirect(payload, 9),), F32)
    e = ex.call("add", ex.call("exp", x), x)
    order = list(ex.walk(e))
    assert order == [payload, x, ex.call("exp", x), e]


def test_walk_does_not_recurse() -> None:
    e = ex.local("x", F32)
    for _ in range(5000):
        e = ex.call("add", ex.call("exp", e), e)
    assert sum(1 for _ in ex.walk(e)) == 10001
    assert (
        Evaluator({}, lambda *_: torch.empty(0), {"x": torch.tensor([-math.inf])}).value(e).item()
        == -math.inf
    )


def test_substitute_reaches_indices_and_payloads() -> None:
    i, j = ix.var("i0", 8), ix.var("j0", 4)
    x = ex.load("x", (i, ix.indirect(ex.load("t", (i,), I64), 9)), F32)
    e = ex.call("mul", x, ex.cast(ex.index_value(i), F32))
    got = e.substitute({i: j * 2})
    want = ex.load("x", (j * 2, ix.indirect(ex.load("t", (j * 2,), I64), 9)), F32)
    assert got is ex.call("mul", want, ex.cast(ex.index_value(j * 2), F32))
    assert e.substitute({j: i}) is e


def test_rewrite_loads_replaces_inner_ones_first() -> None:
    i = ix.var("i0", 8)
    e = ex.load("x", (ix.indirect(ex.load("t", (i,), I64), 9),), F32)
    seen: list[Expr] = []

    def rename(n: Expr) -> Expr:
        seen.append(n)
        return ex.load(n.buffer + "2", n.indices, n.dtype)

    got = ex.rewrite_loads(e, rename)
    assert [n.buffer for n in seen] == ["t", "x"]
    assert got is ex.load("x2", (ix.indirect(ex.load("t2", (i,), I64), 9),), F32)
    assert ex.rewrite_loads(e, lambda n: None) is e


def test_masked_without_loads_is_where() -> None:
    c, x = ex.local("c", BOOL), ex.local("x", F32)
    assert ex.masked(c, x, ex.const(0, F32)).op == "where"
    assert ex.masked(c, ex.load("x", (0,), F32), ex.const(0, F32)).op == "masked"
