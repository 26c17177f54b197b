"""Rewrites of value expressions: dropping modelled roundings, simplification, and printing of large trees.

What comes in: expression trees, in loop programs or in kernels. What goes out: trees of equal value
(``simplify``), of equal value but for roundings that only eager's storage of intermediates would make
(``drop_roundings``), or text (``to_lines``). What holds in between: a rewrite that changes nothing gives back
the same object.

The next file is ``loops.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from . import expr as ex
from . import index as ix
from .expr import OPS, Expr
from .index import Index

__all__ = ["drop_roundings", "simplify", "to_lines"]


# --- roundings ----------------------------------------------------------------------------------------------


def drop_roundings(e: Expr) -> Expr:
    """Keep low-precision intermediates in the wider dtype: ``cast_f32(round_bf16(x))`` becomes ``x``.

    What a discontinuous operation depends on (a comparison, floor, a conversion to an integer, an index)
    stays rounded as eager rounds it, and so do its other uses in this tree: nothing is computed twice. A
    rounding at the root is a store and stays; so does every cast that the user wrote.
    """
    if not any(_is_rounding(n) for n in ex.walk(e)):
        return e
    exact = _seen_by_jumps(e)
    memo: dict[Expr, Expr] = {}
    for n in ex.walk(e):
        if n in exact:
            memo[n] = n
        elif n.op == "cast" and _is_rounding(n.args[0]) and n.args[0] not in exact and _is_wider(n):
            memo[n] = ex.cast(memo[n.args[0].args[0]], n.dtype)
        else:
            # Arguments come before users; a load's or an index's own children are never rewritten: they are
            # exact.
            memo[n] = ex.rebuild(n, tuple(memo[a] for a in n.args))
    return memo[e]


def _is_rounding(n: Expr) -> bool:
    return n.op == "cast" and bool(n.attr) and n.dtype.is_floating_point


def _is_wider(n: Expr) -> bool:
    low = n.args[0].dtype
    return n.dtype.is_floating_point and n.dtype is not low and torch.promote_types(n.dtype, low) is n.dtype


def _seen_by_jumps(e: Expr) -> set[Expr]:
    """Every node that some discontinuous operation of the tree depends on."""
    found: set[Expr] = set()
    for n in ex.walk(e):
        for child in _jump_operands(n):
            if child not in found:
                found.update(ex.walk(child))
    return found


def _jump_operands(n: Expr) -> tuple[Expr, ...]:
    info = OPS.get(n.op)
    if info is not None:
        return () if info.continuous else n.args
    if n.op in ("where", "masked"):
        return n.args[:1]
    if n.op == "bitcast" or (n.op == "cast" and not n.dtype.is_floating_point):
        return n.args
    if n.op in ("load", "index", "random"):
        return ex.children(n)
    return ()


# --- simplification -----------------------------------------------------------------------------------------


def simplify(e: Expr) -> Expr:
    """An equal, smaller tree. Every step is exact, for NaN, infinities and signed zeros too."""
    memo: dict[Expr, Expr] = {}
    for n in ex.walk(e):
        if n.op == "load":
            new = _with_indices(n, memo)
        elif n.op == "index":
            new = ex.index_value(_simpler_index(n.attr, memo))
        elif n.op == "random":
            new = ex.random(memo[n.args[0]], _simpler_index(n.attr[1], memo), n.attr[0])
        else:
            new = ex.rebuild(n, tuple(memo[a] for a in n.args))
        memo[n] = _peephole(new)
    return memo[e]


def _with_indices(n: Expr, memo: dict[Expr, Expr]) -> Expr:
    if len(ex.children(n)) == 0:
        return n
    return ex.load(n.buffer, tuple(_simpler_index(i, memo) for i in n.indices), n.dtype)


def _simpler_index(i: Index, memo: dict[Expr, Expr]) -> Index:
    """The index with what it reads from memory simplified; what turns out to be known is no longer read."""

    def atom(a: Index) -> Index:
        payload, size, checked = a.args
        new = memo[payload]
        if new.op == "index":
            inside: Index = new.attr
            if inside.lo is not None and inside.hi is not None and isinstance(size, int):
                return inside if inside.lo >= 0 and inside.hi < size else ix.indirect(new, size, checked)
        return a if new is payload else ix.indirect(new, size, checked)

    return ex.replace_atoms(i, atom)


def _peephole(n: Expr) -> Expr:
    rule = _PEEPHOLES.get(n.op)
    if rule is not None:
        n = rule(n)
    return _folded(n)


def _cast(n: Expr) -> Expr:
    """``A -> B -> A`` is the identity where B holds every value of A; ``A -> B -> C`` skips such a B."""
    (inner,) = n.args
    if inner.op != "cast":
        return n
    (x,) = inner.args
    if not _holds(inner.dtype, x.dtype):
        return n
    return x if n.dtype is x.dtype else ex.cast(x, n.dtype, bool(n.attr))


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    if wide is torch.bool or narrow is torch.bool:
        return narrow is torch.bool
    if wide.is_floating_point != narrow.is_floating_point:
        return False
    return torch.promote_types(wide, narrow) is wide


def _twice(n: Expr) -> Expr:
    (x,) = n.args
    return x.args[0] if x.op == n.op and x.args[0].dtype is n.dtype else n


def _not(n: Expr) -> Expr:
    (x,) = n.args
    if x.op == "logical_not" and x.args[0].dtype is torch.bool:
        return x.args[0]
    if x.op in ("eq", "ne"):  # the one pair that is complementary for NaN as well
        return ex.call("ne" if x.op == "eq" else "eq", *x.args)
    return n


def _same_twice(n: Expr) -> Expr:
    return n.args[0] if n.args[0] is n.args[1] else n


def _add(n: Expr) -> Expr:
    """``x + 0`` of integers; with floats it would lose the sign of -0.0. ``x + -0.0`` is ``x`` for every
    float.
    """
    for x, y in (n.args, n.args[::-1]):
        if y.op == "const" and y.value == 0 and _is_neutral_zero(y):
            return x
    return n


def _is_neutral_zero(y: Expr) -> bool:
    return not y.dtype.is_floating_point or math.copysign(1.0, y.value) < 0


def _sub(n: Expr) -> Expr:
    x, y = n.args
    zero = y.op == "const" and y.value == 0 and (not y.dtype.is_floating_point or not _is_neutral_zero(y))
    return x if zero else n


def _select(n: Expr) -> Expr:
    """A choice inside a choice by the same condition is made already; a negated condition swaps the sides."""
    cond, a, b = n.args
    make = ex.where if n.op == "where" else ex.masked
    if cond.op == "logical_not" and n.op == "where" and cond.args[0].dtype is torch.bool:
        return _peephole(ex.where(cond.args[0], b, a))
    if a.op in ("where", "masked") and a.args[0] is cond:
        return make(cond, a.args[1], b)
    if b.op in ("where", "masked") and b.args[0] is cond:
        return make(cond, a, b.args[2])
    return a if a is b else n


_PEEPHOLES: dict[str, Callable[[Expr], Expr]] = {
    "cast": _cast,
    "neg": _twice,
    "bitwise_not": _twice,
    "logical_not": _not,
    "maximum": _same_twice,
    "minimum": _same_twice,
    "fmax": _same_twice,
    "fmin": _same_twice,
    "bitwise_and": _same_twice,
    "bitwise_or": _same_twice,
    "add": _add,
    "sub": _sub,
    "where": _select,
    "masked": _select,
}

_FOLD: dict[str, Callable[..., Any]] = {
    "neg": lambda a: -a,
    "abs": abs,
    "square": lambda a: a * a,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "sqrt": math.sqrt,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "logical_not": lambda a: not a,
}


def _folded(n: Expr) -> Expr:
    """Operations on finite constants, in Python's double: rounding its result to float32 is float32's own
    result.
    """
    fold = _FOLD.get(n.op)
    if fold is None or not all(a.op == "const" and a.dtype is not torch.bool for a in n.args):
        return n
    values = [a.value for a in n.args]
    if not all(math.isfinite(v) for v in values):
        return n
    if n.op in ("div", "sqrt") and (values[-1] <= 0 or not n.dtype.is_floating_point):
        return n
    result = fold(*values)
    return ex.const(result, n.dtype) if isinstance(result, (bool, int)) or math.isfinite(result) else n


# --- printing -----------------------------------------------------------------------------------------------


def to_lines(e: Expr, width: int = 88) -> list[str]:
    """A tree as assignments, one a line: shared nodes and long ones get names ``t0, t1...``; the last line is
    ``e``.
    """
    uses: dict[Expr, int] = {}
    for n in ex.walk(e):
        for a in n.args:
            uses[a] = uses.get(a, 0) + 1
    names: dict[Expr, str] = {}
    texts: dict[Expr, str] = {}
    lines: list[str] = []
    # Without what is inside indices: that is printed with the index.
    for n in ex.walk(e, lambda n: n.args[::-1]):
        text = _head(n, [names.get(a) or texts[a] for a in n.args])
        texts[n] = text
        if n.args and n is not e and (uses.get(n, 0) > 1 or len(text) > width):
            names[n] = f"t{len(names)}"
            lines.append(f"{names[n]}: {ex.dtype_name(n.dtype)} = {text}")
    lines.append(texts[e])
    return lines


def _head(n: Expr, args: list[str]) -> str:
    if not n.args:
        return ex.to_text(n)
    if n.op == "random":
        return f"random{n.attr[0]}({args[0]}, {n.attr[1]!r})"
    name = n.op
    if n.op in ("cast", "bitcast"):
        name = f"{'round' if n.attr else n.op}_{ex.dtype_name(n.dtype)}"
    return f"{name}({', '.join(args)})"
