"""Lowering rules of distances between vectors: dist, cdist, and the derivative of cdist.

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
    aten._cdist_backward.default: _cdist_backward,
}
