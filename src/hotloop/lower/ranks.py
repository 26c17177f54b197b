"""Lowering rules of order among few elements: short sorts, and positions in a short sorted row.

What comes in: a view, the dimension that is ordered, and the plain arguments. What goes out: ``Reduce``
operations that count how many elements come before each one. What holds in between: the order is eager's,
stable and with NaN as the largest; rows longer than a constant here are a library's work, since the
comparisons grow with the square of the length, and the rule declines.

This is the last of the rule modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index

from .builder import Builder, Rule, Tensor, View
from .reductions import SUPPORTED, compute_value, result, uses
from .views import moved, with_dim

__all__ = ["RULES"]

aten = torch.ops.aten
Node = torch.fx.Node
Vars = tuple[Index, ...]

#: The longest row that is sorted by comparing every two elements.
LONGEST_SORTED = 32
#: The longest row that is searched from end to end.
LONGEST_SEARCHED = 64


def _comparable(e: Expr) -> Expr:
    return ex.cast(e, torch.uint8) if e.dtype is torch.bool else compute_value(e)


def _before(a: Expr, b: Expr) -> Expr:
    """Whether ``a`` comes strictly before ``b`` in ascending order: NaN is the largest."""
    less = ex.call("lt", a, b)
    if not a.dtype.is_floating_point:
        return less
    only_b = ex.call("logical_and", ex.call("isnan", b), ex.call("logical_not", ex.call("isnan", a)))
    return ex.call("logical_or", less, only_b)


def _count(e: Expr) -> Expr:
    return ex.cast(e, torch.int64)


def _sort(b: Builder, node: Node, x: View, dim: int = -1, descending: bool = False) -> Any:
    """Each element's rank, then the element that has each rank."""
    if x.dtype not in SUPPORTED or x.ndim == 0 or x.numel == 0:
        return NotImplemented
    d = dim % x.ndim
    n = x.sizes[d]
    if not isinstance(n, int) or not 0 < n <= LONGEST_SORTED:
        return NotImplemented

    def precedes(v: Vars, r: Vars) -> Expr:
        own, other = _comparable(x.at(v)), _comparable(x.at(with_dim(v, d, r[0])))
        first, second = (_before(own, other), _before(other, own))
        if descending:
            first, second = second, first
        earlier = ex.call("lt", ex.index_value(r[0]), ex.index_value(v[d]))
        equal = ex.call("logical_and", ex.call("logical_not", first), earlier)
        return _count(ex.call("logical_or", second, equal))

    rank = b.reduce(x.sizes, (n,), "sum", torch.int64, precedes)

    def holder(v: Vars, r: Vars) -> Expr:
        """The position whose rank is ``v[d]``, and nothing for all others."""
        here = ex.call("eq", rank.at(with_dim(v, d, r[0])), ex.index_value(v[d]))
        return ex.where(here, ex.index_value(r[0]), ex.const(0, torch.int64))

    order = b.reduce(x.sizes, (n,), "sum", torch.int64, holder, result(node, 1))

    def value(v: Vars) -> Expr:
        return x.at(with_dim(v, d, ix.indirect(order.at(v), n, checked=False)))

    return moved(b, result(node, 0), value) if uses(node, 0) else None, order


def _stable_sort(
    b: Builder, node: Node, x: View, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> Any:
    return _sort(b, node, x, dim, descending)


def _found(
    b: Builder, like: Tensor, row: Callable[[Vars, Vars], Expr], n: int, wanted: Callable[[Vars], Expr],
    right: bool,
) -> Any:  # fmt: skip
    """How many elements of a sorted row come before the wanted value, or with ``right`` not after it."""

    def body(v: Vars, r: Vars) -> Expr:
        # Negated, so that NaN goes behind all others.
        return _count(ex.call("logical_not", ex.call("gt" if right else "ge", row(v, r), wanted(v))))

    return b.reduce(tuple(like.shape), (n,), "sum", like.dtype, body, like)


def _searchsorted(
    b: Builder, node: Node, row: View, x: Any, *, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: View | None = None,
) -> Any:  # fmt: skip
    like = result(node)
    number = not isinstance(x, View)
    if row.dtype not in SUPPORTED or row.dtype is torch.bool or row.ndim == 0:
        return NotImplemented
    n = row.sizes[-1]
    if not isinstance(n, int) or not 0 < n <= LONGEST_SEARCHED or like.numel() == 0:
        return NotImplemented
    if not number and x.dtype is not row.dtype:
        return NotImplemented
    if number and not isinstance(x, (int, float) if row.dtype.is_floating_point else int):
        return NotImplemented

    def element(v: Vars, r: Vars) -> Expr:
        at = r if row.ndim == 1 else (*v[: row.ndim - 1], *r)
        if sorter is not None:  # the row is sorted as this permutation tells
            at = (*at[:-1], ix.indirect(ex.cast(sorter.at(at), torch.int64), n))
        return compute_value(row.at(at))

    def wanted(v: Vars) -> Expr:
        return compute_value(ex.const(x, row.dtype) if number else x.at(v))

    return _found(b, like, element, n, wanted, right or side == "right")


def _bucketize(
    b: Builder, node: Node, x: Any, row: View, *, out_int32: bool = False, right: bool = False
) -> Any:
    return _searchsorted(b, node, row, x, right=right)


RULES: dict[Any, Rule] = {
    aten.sort.default: _sort,
    aten.sort.stable: _stable_sort,
    aten.searchsorted.Tensor: _searchsorted,
    aten.searchsorted.Scalar: _searchsorted,
    aten.bucketize.Tensor: _bucketize,
    aten.bucketize.Scalar: _bucketize,
}
