"""The index algebra against Python's integers.

What comes in: random recipes (an expression as nested tuples). What goes out: nothing. What holds: whatever
the constructors simplify, the value at every point is the recipe's, and lies within the bounds the node
carries.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.ir import expr as ex
from hotloop.ir import index as ix

EXTENTS = (1, 2, 3, 4, 6, 7)
VARS = tuple(ix.var(f"i{k}", n) for k, n in enumerate(EXTENTS))
SYMBOLS = (ix.symbol("s0", 1), ix.symbol("s1", 2, 9))
OF_SYMBOL = ix.var("n0", SYMBOLS[0])
BINARY = {
    "add": (ix.add, lambda a, b: a + b),
    "sub": (lambda a, b: ix.as_index(a) - b, lambda a, b: a - b),
    "mul": (ix.mul, lambda a, b: a * b),
    "min": (ix.minimum, min),
    "max": (ix.maximum, max),
}


def recipes(leaves: st.SearchStrategy[Any], divisors: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.tuples(st.sampled_from(sorted(BINARY)), inner, inner),
            st.tuples(st.sampled_from(("div", "mod")), inner, divisors),
            st.tuples(st.just("mul"), inner, st.integers(-6, 6)),
        ),
        max_leaves=8,
    )


def build(r: Any) -> ix.IndexLike:
    if not isinstance(r, tuple):
        return r  # type: ignore[no-any-return]
    op, a, b = r
    if op == "div":
        return ix.floordiv(build(a), build(b))
    if op == "mod":
        return ix.mod(build(a), build(b))
    return BINARY[op][0](build(a), build(b))


def value(r: Any, env: dict[ix.Index, int]) -> int:
    if isinstance(r, int):
        return r
    if not isinstance(r, tuple):
        return env[r]
    op, a, b = r
    x, y = value(a, env), value(b, env)
    if op == "div":
        return x // y
    if op == "mod":
        return x % y
    return BINARY[op][1](x, y)  # type: ignore[no-any-return]


STATIC = recipes(
    st.one_of(st.sampled_from(VARS), st.integers(-12, 12)), st.sampled_from((1, 2, 3, 4, 5, 6, 8, 12, 24))
)
SYMBOLIC = recipes(
    st.one_of(st.sampled_from((*VARS[:4], *SYMBOLS, OF_SYMBOL)), st.integers(-5, 5)),
    st.one_of(st.sampled_from((1, 2, 3, 6)), st.sampled_from(SYMBOLS)),
)
#: Sizes made of symbols, and a variable of each: what reshapes of varying tensors divide by.
SIZES = (
    SYMBOLS[0], SYMBOLS[1], SYMBOLS[0] * SYMBOLS[1], SYMBOLS[1] * 4, SYMBOLS[0] + 1,
    SYMBOLS[0] * 2 + SYMBOLS[1], SYMBOLS[0] * SYMBOLS[1] * 3,
)  # fmt: skip
OF_SIZES = tuple(ix.var(f"m{k}", n) for k, n in enumerate(SIZES))
POINTS = st.tuples(*(st.integers(0, n - 1) for n in EXTENTS))


def check(e: ix.IndexLike, expected: int, env: dict[ix.Index, Any]) -> None:
    assert ix.evaluate(e, env) == expected
    e = ix.as_index(e)
    assert e.lo is None or e.lo <= expected
    assert e.hi is None or expected <= e.hi


@settings(max_examples=250, deadline=None)
@given(STATIC, st.lists(POINTS, min_size=1, max_size=6))
def test_constructors_match_python(r: Any, points: list[tuple[int, ...]]) -> None:
    e = build(r)
    for p in points:
        env = dict(zip(VARS, p, strict=True))
        check(e, value(r, env), env)


@settings(max_examples=250, deadline=None)
@given(SYMBOLIC, st.integers(1, 11), st.integers(2, 9), POINTS, st.integers(0, 10))
def test_symbolic_sizes_match_python(r: Any, s0: int, s1: int, point: tuple[int, ...], n0: int) -> None:
    env = {**dict(zip(VARS, point, strict=True)), SYMBOLS[0]: s0, SYMBOLS[1]: s1, OF_SYMBOL: n0 % s0}
    check(build(r), value(r, env), env)


@settings(max_examples=400, deadline=None)
@given(
    recipes(
        st.one_of(st.sampled_from((*OF_SIZES, *SIZES, *VARS[:3])), st.integers(-5, 5)),
        st.one_of(st.sampled_from((1, 2, 4, 6)), st.sampled_from(SIZES)),
    ),
    st.integers(1, 5), st.integers(2, 9), st.lists(st.integers(0, 10**6), min_size=10, max_size=10),
)  # fmt: skip
def test_sizes_made_of_symbols_match_python(r: Any, s0: int, s1: int, numbers: list[int]) -> None:
    env: dict[ix.Index, int] = {SYMBOLS[0]: s0, SYMBOLS[1]: s1}
    for v, n in zip((*OF_SIZES, *VARS[:3]), numbers, strict=True):
        env[v] = n % ix.evaluate(v.extent, env)
    sizes = {e: ix.evaluate(e, env) for e in SIZES}
    check(build(r), value(r, {**env, **sizes}), env)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from((*SIZES, 1, 3, 4)), min_size=1, max_size=4))
def test_flattening_sizes_made_of_symbols_and_back_is_nothing(sizes: list[Any]) -> None:
    v = [ix.var(f"d{k}", n) for k, n in enumerate(sizes)]
    flat = ix.linearize(v, ix.contiguous_strides(sizes))
    for mine, back in zip(v, ix.delinearize(flat, sizes), strict=True):
        assert back is mine or mine.extent == 1
    whole = ix.var("w", ix.linearize([n - 1 for n in sizes], ix.contiguous_strides(sizes)) + 1)
    assert ix.linearize(ix.delinearize(whole, sizes), ix.contiguous_strides(sizes)) is whole


@settings(max_examples=150, deadline=None)
@given(STATIC, st.lists(STATIC, min_size=2, max_size=2), POINTS)
def test_substitute_commutes_with_evaluation(r: Any, targets: list[Any], point: tuple[int, ...]) -> None:
    """Replacing variables by in-range expressions and evaluating is evaluating with their values."""
    env = dict(zip(VARS, point, strict=True))
    mapping: dict[ix.Index, ix.IndexLike] = {}
    inner = dict(env)
    for v, t in zip((VARS[3], VARS[5]), targets, strict=True):
        mapping[v] = ix.mod(build(t), v.extent)
        inner[v] = value(t, env) % int(v.args[1])
    check(ix.substitute(build(r), mapping), value(r, inner), env)


@settings(max_examples=150, deadline=None)
@given(SYMBOLIC, st.integers(1, 11), st.integers(2, 9), POINTS)
def test_substituting_symbols_by_sizes(r: Any, s0: int, s1: int, point: tuple[int, ...]) -> None:
    env = {**dict(zip(VARS, point, strict=True)), OF_SYMBOL: 0}
    got = ix.substitute(build(r), {SYMBOLS[0]: s0, SYMBOLS[1]: s1})
    assert ix.evaluate(got, env) == value(r, {**env, SYMBOLS[0]: s0, SYMBOLS[1]: s1})


@settings(max_examples=150, deadline=None)
@given(STATIC, st.lists(POINTS, min_size=2, max_size=5))
def test_evaluate_on_tensors(r: Any, points: list[tuple[int, ...]]) -> None:
    columns = [torch.tensor(c) for c in zip(*points, strict=True)]
    got = ix.evaluate(build(r), dict(zip(VARS, columns, strict=True)))
    expected = [value(r, dict(zip(VARS, p, strict=True))) for p in points]
    assert torch.as_tensor(got).expand(len(points)).tolist() == expected


SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(SHAPES)
def test_delinearize_inverts_linearize(sizes: list[int]) -> None:
    v = tuple(ix.var(f"d{k}", s) for k, s in enumerate(sizes))
    assert all(
        got is want or want.hi == 0  # a variable of extent 1 may come back as the constant 0
        for got, want in zip(ix.delinearize(ix.linearize(v, strides_of(sizes)), sizes), v, strict=True)
    )
    flat = ix.var("f", len(list(points_of(sizes))))
    again = ix.linearize(ix.delinearize(flat, sizes), strides_of(sizes))
    assert again is flat, "k * (f // k) + f % k folds back"


@settings(max_examples=150, deadline=None)
@given(st.permutations([2, 3, 4, 5]), st.permutations([2, 3, 4, 5]), st.integers(1, 3))
def test_reshapes_of_the_same_elements(a: list[int], b: list[int], joined: int) -> None:
    """Row-major reshape of shape ``a`` to ``b`` with the first dimensions of ``b`` joined, point by point."""
    lead = 1
    for n in b[: joined + 1]:
        lead *= n
    new = [lead, *b[joined + 1 :]]
    v = tuple(ix.var(f"d{k}", s) for k, s in enumerate(new))
    coordinates = ix.delinearize(ix.linearize(v, strides_of(new)), a)
    for flat, (p, q) in enumerate(zip(points_of(new), points_of(a), strict=True)):
        if flat % 7 == 0:
            env = dict(zip(v, p, strict=True))
            assert tuple(ix.evaluate(c, env) for c in coordinates) == q


def strides_of(sizes: Sequence[int]) -> list[int]:
    out, step = [], 1
    for s in reversed(sizes):
        out.append(step)
        step *= s
    return out[::-1]


def points_of(sizes: Sequence[int]) -> Any:
    return itertools.product(*(range(s) for s in sizes))


def test_interning_makes_equal_expressions_identical() -> None:
    a, b = VARS[3], VARS[5]
    assert 2 * a + 3 * b - a is a + b * 3
    assert (a + b) * 2 is 2 * b + 2 * a
    assert (a * 7 + b) // 7 is a
    assert (a * 7 + b) % 7 is b
    assert (SYMBOLS[0] * a + 1) * 2 is 2 + 2 * a * SYMBOLS[0]
    assert a - a is ix.const(0)


def test_negative_terms() -> None:
    v = VARS[5]  # 0..6
    assert (6 - v).lo == 0 and (6 - v).hi == 6
    assert (6 - v) // 7 is ix.const(0)
    assert (-v - 1) // 7 is ix.const(-1)
    assert (-v - 1) % 7 is 6 - v


def test_quotients_of_symbols_are_bounded_together() -> None:
    s = ix.symbol("s", 2, 1 << 27)
    half, up = s // 2, (s + 1) // 2
    i = ix.var("i", half)
    assert ix.at_most(half, up) and not ix.at_most(up, half)
    assert (2 * half - s).hi == 0 and (2 * half - s).lo == -1
    assert (2 * i + 1 - s).hi is not None and (2 * i + 1 - s).hi < 0
    assert ix.minimum(s, 2 * i + 2) is 2 * i + 2
    assert (ix.var("j", up) * 2 - s).hi == -1


def test_symbolic_remainder_of_a_multiple_is_zero() -> None:
    s, v = SYMBOLS[0], VARS[5]
    assert ix.mod(s * (v // 3), s) is ix.const(0)
    assert ix.floordiv(s * (v // 3), s) is v // 3
    assert ix.mod(s * v + OF_SYMBOL, s) is OF_SYMBOL


def test_division_by_nothing_positive_is_refused() -> None:
    for k in (0, -3):
        with pytest.raises(ZeroDivisionError, match=str(k)):
            ix.floordiv(VARS[3], k)
        with pytest.raises(ZeroDivisionError, match=str(k)):
            ix.mod(VARS[3], k)


def test_coefficient() -> None:
    a, b = VARS[3], VARS[5]
    assert ix.coefficient(3 * a + b - 1, a) == 3
    assert ix.coefficient(b, a) == 0
    assert ix.coefficient(a + a // 3, a) is None


def test_a_stride_that_is_a_size() -> None:
    n, v, w = SYMBOLS[0], VARS[3], VARS[4]
    assert ix.coefficient(v * n * 3 + w, v) is n * 3
    assert ix.coefficient(v * w, v) is None
    # A dimension that may have one element keeps its stride.
    one = ix.var("one", ix.symbol("k", 0, 1))
    assert ix.coefficient(one * 5 + w, one) == 5


def test_indirect_indices() -> None:
    v = VARS[5]
    read = ex.load("idx", (v,), torch.int64)
    e = ix.indirect(read, 10)
    assert (e.lo, e.hi) == (0, 9) and e.free_vars == {v}
    moved = ix.substitute(e * 4 + v, {v: VARS[3] + 1})
    assert moved is ix.indirect(ex.load("idx", (VARS[3] + 1,), torch.int64), 10) * 4 + VARS[3] + 1
    assert list(ix.indirect_atoms(moved)) == [ix.indirect(ex.load("idx", (VARS[3] + 1,), torch.int64), 10)]


def test_an_indirect_index_known_to_be_in_range_is_plain() -> None:
    v = VARS[5]  # 0..6
    assert ix.indirect(ex.index_value(v), 7) is v
    assert ix.indirect(ex.index_value(v), 6).kind == "indirect", "6 is out of range: the check has to fail"
    assert ix.indirect(ex.index_value(v - 1), 7).kind == "indirect"
    assert ix.indirect(ex.const(2, torch.int64), 3) is ix.const(2)
    assert ix.indirect(ex.index_value(OF_SYMBOL), SYMBOLS[0]) is OF_SYMBOL
