"""Lowering rules of distances between vectors: dist, cdist, pdist, and the derivative of cdist.

What comes in: tensors of vectors and the norm's number. What goes out: a ``Pointwise`` of differences, which
the scheduler folds away, and the reductions of a norm. What holds in between: where eager multiplies matrices
instead of subtracting, for the Euclidean distances of many vectors, the rule declines.

The next file is ``views.py``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch

from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir import sizes as sz
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index, IndexLike

from .builder import Builder, Rule, View
from .reductions import FLOATS, compute_value, result, vector_norm

__all__ = ["RULES"]

aten = torch.ops.aten
Node = torch.fx.Node
Vars = tuple[Index, ...]

#: Eager has distances of two sets in these dtypes alone.
_WIDE = (torch.float32, torch.float64)
#: From so many vectors on, eager finds Euclidean distances by a product of matrices.
_MANY = 25


def _minus(a: Expr, b: Expr) -> Expr:
    return ex.call("sub", compute_value(a), compute_value(b))


def _known(dtypes: Collection[torch.dtype], dtype: torch.dtype, *tensors: View) -> bool:
    static = all(sz.is_static(t.sizes) for t in tensors)
    return static and dtype in dtypes and all(t.dtype is dtype and t.numel != 0 for t in tensors)


def _dist(b: Builder, node: Node, x: View, y: View, p: float = 2) -> Any:
    """The norm of a difference that broadcasts."""
    out = result(node)
    if not _known(FLOATS, out.dtype, x, y):
        return NotImplemented
    sizes = tuple(torch.broadcast_shapes(x.sizes, y.sizes))  # type: ignore[no-untyped-call]
    wide_x, wide_y = x.expand(sizes), y.expand(sizes)
    difference = b.pointwise(sizes, out.dtype, lambda v: _minus(wide_x.at(v), wide_y.at(v)))
    return vector_norm(b, node, difference, p)


def _pairs(x: View, y: View, batch: Sequence[IndexLike]) -> tuple[View, View]:
    """Two sets of vectors with the same batch dimensions."""
    return x.expand((*batch, *x.sizes[-2:])), y.expand((*batch, *y.sizes[-2:]))


def _cdist(b: Builder, node: Node, x: View, y: View, p: float, compute_mode: int | None) -> Any:
    """``out[..., i, j]`` is the distance of ``x[..., i, :]`` and ``y[..., j, :]``."""
    out = result(node)
    if not _known(_WIDE, out.dtype, x, y):
        return NotImplemented
    many = any(sz.static(t.sizes[-2]) > _MANY for t in (x, y))
    if p == 2 and (compute_mode == 1 or (not compute_mode and many)):
        return NotImplemented
    shape = tuple(out.shape)
    wide_x, wide_y = _pairs(x, y, shape[:-2])

    def difference(v: Vars) -> Expr:
        *lead, i, j, k = v
        return _minus(wide_x.at((*lead, i, k)), wide_y.at((*lead, j, k)))

    differences = b.pointwise((*shape, x.sizes[-1]), out.dtype, difference)
    return vector_norm(b, node, differences, p, -1)


def _pdist(b: Builder, node: Node, x: View, p: float = 2) -> Any:
    """The distances of every two rows ``i < j``, those of the first row with all others first."""
    out = result(node)
    if not _known(_WIDE, out.dtype, x) or out.numel() == 0:
        return NotImplemented
    n = sz.static(x.sizes[0])

    def difference(v: Vars) -> Expr:
        k, m = v
        first, second = _pair(ex.index_value(k), n)
        rows = (ix.indirect(row, n, checked=False) for row in (first, second))
        return _minus(*(x.at((row, m)) for row in rows))

    differences = b.pointwise((*out.shape, x.sizes[1]), out.dtype, difference)
    return vector_norm(b, node, differences, p, -1)


def _pair(k: Expr, n: int) -> tuple[Expr, Expr]:
    """The ``k``-th of the pairs ``i < j < n``.

    The rows before ``i`` have ``i (2n - 1 - i) / 2`` pairs; the square root that solves this is exact where a
    row begins, and too large by more than its rounding before that.
    """
    wide, whole = torch.float64, torch.int64
    b = ex.const(2 * n - 1, wide)
    inside = ex.call("sub", ex.call("mul", b, b), ex.call("mul", ex.cast(k, wide), ex.const(8, wide)))
    twice = ex.call("sub", b, ex.call("sqrt", inside))
    i = ex.cast(ex.call("mul", twice, ex.const(0.5, wide)), whole)
    left = ex.call("sub", ex.const(2 * n - 1, whole), i)
    before = ex.call("shr", ex.call("mul", i, left), ex.const(1, whole))
    j = ex.call("add", ex.call("add", ex.call("sub", k, before), i), ex.const(1, whole))
    return i, j


def _cdist_backward(b: Builder, node: Node, grad: View, x: View, y: View, p: float, distances: View) -> Any:
    """The gradient of ``x``; a distance of 0 has none."""
    out = result(node)
    shape = tuple(out.shape)
    if not _known(_WIDE, out.dtype, grad, x, y, distances) or x.sizes != shape:
        return NotImplemented
    wide_x, wide_y = _pairs(x, y, shape[:-2])

    def term(v: Vars, r: Vars) -> Expr:
        *lead, i, k = v
        d = _minus(wide_x.at(v), wide_y.at((*lead, *r, k)))
        at = (*lead, i, *r)
        return _slope(d, compute_value(distances.at(at)), compute_value(grad.at(at)), p)

    return b.reduce(shape, (y.sizes[-2],), "sum", out.dtype, term, out)


def _slope(d: Expr, distance: Expr, g: Expr, p: float) -> Expr:
    """The derivative of a ``p``-norm by an element ``d``, times ``g``."""
    zero = ex.const(0, d.dtype)
    if p == 0:
        return zero
    size = ex.call("abs", d)
    signed = ex.where(ex.call("lt", d, zero), ex.call("neg", g), ex.where(ex.call("gt", d, zero), g, zero))
    if p == 1:
        return signed
    if math.isinf(p):
        return ex.where(ex.call("eq", size, distance), signed, zero)
    ratio = ex.call("div", size, distance)
    power = ratio if p == 2 else ex.call("pow", ratio, ex.const(p - 1, d.dtype))
    none = ex.call("logical_or", ex.call("eq", distance, zero), ex.call("eq", d, zero))
    return ex.where(none, zero, ex.call("mul", signed, power))


RULES: dict[Any, Rule] = {
    aten.dist.default: _dist,
    aten._cdist_forward.default: _cdist,
    aten._pdist_forward.default: _pdist,
    aten._cdist_backward.default: _cdist_backward,
}
