"""Rewrites keep values, drop only what may be dropped, and give the same object when they change nothing."""

from __future__ import annotations

import math

import pytest
import torch

from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir.expr import Expr
from hotloop.ir.rewrite import drop_roundings, simplify, to_lines

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
I = ix.var("i0", 8)  # noqa: E741 - the loop variable


def low(name: str) -> Expr:
    """A bfloat16 element, in the compute dtype."""
    return ex.cast(ex.load(name, (I,), BF16), F32)


def stored(e: Expr) -> Expr:
    """What a later operation sees of a result that eager stores as bfloat16."""
    return ex.cast(ex.cast(e, BF16, implicit=True), F32)


def f32(name: str) -> Expr:
    return ex.load(name, (I,), F32)


A, B = low("a"), low("b")
ADD, MUL = ex.call("add", A, B), ex.call("mul", A, B)


def test_roundings_inside_a_chain_are_dropped() -> None:
    chain = ex.call("tanh", stored(ex.call("mul", stored(ADD), B)))
    assert drop_roundings(chain) is ex.call("tanh", ex.call("mul", ADD, B))


def test_the_rounding_of_a_store_stays() -> None:
    out = ex.cast(ex.call("exp", stored(ADD)), BF16, implicit=True)
    assert drop_roundings(out) is ex.cast(ex.call("exp", ADD), BF16, implicit=True)


def test_a_cast_of_the_user_stays() -> None:
    e = ex.call("exp", ex.cast(ex.cast(ADD, BF16, implicit=False), F32))
    assert drop_roundings(e) is e


@pytest.mark.parametrize("jump", ["floor", "sign", "round", "isinf"])
def test_jumps_see_rounded_values(jump: str) -> None:
    e = ex.call(jump, stored(ex.call("mul", stored(ADD), B)))
    assert drop_roundings(e) is e


def test_comparisons_and_conversions_to_integers_see_rounded_values() -> None:
    compared = ex.call("lt", stored(ADD), B)
    assert drop_roundings(compared) is compared
    whole = ex.cast(stored(ADD), torch.int32)
    assert drop_roundings(whole) is whole


def test_what_a_condition_sees_is_computed_once() -> None:
    x = stored(ADD)
    e = ex.where(ex.call("gt", x, B), x, ex.call("mul", stored(MUL), x))
    assert drop_roundings(e) is ex.where(ex.call("gt", x, B), x, ex.call("mul", MUL, x))


def test_double_precision_is_not_a_rounding_of_single() -> None:
    e = ex.call("exp", ex.cast(ex.cast(ex.load("d", (I,), F64), F32, implicit=True), F32))
    assert drop_roundings(e) is e


def test_nothing_to_drop_gives_the_same_object() -> None:
    e = ex.call("exp", ADD)
    assert drop_roundings(e) is e and simplify(e) is e


X, Y = f32("x"), f32("y")
N = ex.load("n", (I,), torch.int64)
C, D = ex.call("lt", X, Y), ex.call("eq", X, Y)


def const(v: float, dtype: torch.dtype = F32) -> Expr:
    return ex.const(v, dtype)


CASES: list[tuple[Expr, Expr]] = [
    (ex.call("neg", ex.call("neg", X)), X),
    (ex.call("logical_not", ex.call("logical_not", C)), C),
    (ex.call("logical_not", D), ex.call("ne", X, Y)),
    (ex.call("logical_not", C), ex.call("logical_not", C)),  # not ge: NaN
    (ex.call("maximum", X, X), X),
    (ex.cast(ex.cast(X, F64), F32), X),
    (ex.cast(ex.cast(N, torch.int32), torch.int64), ex.cast(ex.cast(N, torch.int32), torch.int64)),
    (ex.cast(ex.cast(ex.load("a", (I,), BF16), F32), F64), ex.cast(ex.load("a", (I,), BF16), F64)),
    (ex.call("add", N, const(0, torch.int64)), N),
    (ex.call("add", X, const(0.0)), ex.call("add", X, const(0.0))),  # -0.0 + 0.0 is 0.0
    (ex.call("add", X, const(-0.0)), X),
    (ex.call("sub", X, const(0.0)), X),
    (ex.call("sub", X, const(-0.0)), ex.call("sub", X, const(-0.0))),
    (ex.where(C, ex.where(C, X, Y), const(1.0)), ex.where(C, X, const(1.0))),
    (ex.where(C, const(1.0), ex.where(C, X, Y)), ex.where(C, const(1.0), Y)),
    (ex.where(ex.call("logical_not", C), X, Y), ex.where(C, Y, X)),
    (ex.call("add", const(0.1), const(0.2)), const(torch.tensor(0.1).add(torch.tensor(0.2)).item())),
    (ex.call("mul", const(1e30), const(1e30)), const(math.inf)),
    (ex.call("lt", const(1.0), const(2.0)), ex.const(True, torch.bool)),
    (ex.call("mul", const(2**40, torch.int64), const(2**30, torch.int64)), const(0, torch.int64)),
]


@pytest.mark.parametrize(("before", "after"), CASES, ids=lambda e: repr(e))
def test_simplify(before: Expr, after: Expr) -> None:
    assert simplify(before) is after
    assert simplify(after) is after


def test_simplify_reaches_into_indices() -> None:
    payload = ex.cast(ex.cast(ex.load("n", (I,), torch.int32), torch.int64), torch.int32)
    gather = ex.load("x", (ix.indirect(payload, 5),), F32)
    wanted = ex.load("x", (ix.indirect(ex.load("n", (I,), torch.int32), 5),), F32)
    assert simplify(gather) is wanted


def test_printing_names_shared_nodes() -> None:
    shared = ex.call("exp", X)
    lines = to_lines(ex.call("add", shared, ex.call("mul", shared, Y)))
    assert lines == ["t0: f32 = exp(x[i0])", "add(t0, mul(t0, y[i0]))"]
    assert to_lines(X) == ["x[i0]"]


def test_printing_breaks_long_lines() -> None:
    e = X
    for k in range(40):
        e = ex.call("add", ex.call("mul", e, Y), const(float(k)))
    lines = to_lines(e)
    assert len(lines) > 5 and max(map(len, lines)) < 160
