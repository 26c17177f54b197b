"""The lowering rule of sampling a volume at computed places: ``grid_sample`` in three dimensions.

What comes in: a batch of volumes, and for each output element a place in [-1, 1] along every axis, the last
axis first. What goes out: one ``Pointwise`` that reads the eight elements around the place, or the nearest
one. What holds in between: a place is first a position in elements; where padding does not bring it back into
the volume, its loads stand under ``masked`` and count nothing.

The next file is ``products.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch

from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index, IndexLike

from .builder import Builder, Rule, View
from .reductions import FLOATS, compute_dtype, compute_value, result
from .views import all_of, moved

__all__ = ["RULES"]

aten = torch.ops.aten
Node = torch.fx.Node
Vars = tuple[Index, ...]

#: The numbers that ATen has for modes and paddings.
_BILINEAR, _NEAREST = 0, 1
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


def _number(value: float, like: Expr) -> Expr:
    return ex.const(value, like.dtype)


def _position(g: Expr, size: IndexLike, corners: bool) -> Expr:
    """A place in [-1, 1] in elements. With ``corners``, the ends are the outermost elements' middles."""
    one, half = _number(1, g), _number(0.5, g)
    count = ex.cast(ex.index_value(size), g.dtype)
    from_start = ex.call("add", g, one)
    if corners:
        return ex.call("mul", ex.call("mul", from_start, half), ex.call("sub", count, one))
    return ex.call("mul", ex.call("sub", ex.call("mul", from_start, count), one), half)


def _clipped(x: Expr, size: IndexLike) -> Expr:
    """Into the volume; NaN becomes the last element, as in eager."""
    last = ex.call("sub", ex.cast(ex.index_value(size), x.dtype), _number(1, x))
    x = ex.where(ex.call("lt", x, _number(0, x)), _number(0, x), x)
    return ex.where(ex.call("lt", x, last), x, last)


def _reflected(x: Expr, size: IndexLike, corners: bool) -> Expr:
    """Mirrored at the ends, the middles or the edges of the outermost elements, as often as needed."""
    low, span = _number(0 if corners else -0.5, x), ex.cast(ex.index_value(size), x.dtype)
    span = ex.call("sub", span, _number(1, x)) if corners else span
    off = ex.call("abs", ex.call("sub", x, low))
    rest, flips = ex.call("fmod", off, span), ex.call("floor", ex.call("div", off, span))
    even = ex.call("eq", ex.call("remainder", flips, _number(2, x)), _number(0, x))
    back = ex.where(even, rest, ex.call("sub", span, rest))
    found = ex.call("add", back, low)
    return ex.where(ex.call("eq", span, _number(0, x)), _number(0, x), found)


def _padded(x: Expr, size: IndexLike, padding: int, corners: bool) -> Expr:
    if padding == _REFLECTION:
        x = _reflected(x, size, corners)
    return x if padding == _ZEROS else _clipped(x, size)


def _load(x: View, lead: Sequence[IndexLike], at: Sequence[Expr], weight: Expr | None = None) -> Expr:
    """The element at whole positions, times a weight; 0 outside of the volume, whatever the weight."""
    sizes = x.sizes[-len(at) :]
    inside = []
    for a, size in zip(at, sizes, strict=True):  # as floats: what integer a huge one becomes is not defined
        inside.append(ex.call("ge", a, _number(0, a)))
        inside.append(ex.call("lt", a, ex.cast(ex.index_value(size), a.dtype)))
    spots = [ix.indirect(ex.cast(a, torch.int64), n, checked=False) for a, n in zip(at, sizes, strict=True)]
    value = compute_value(x.at((*lead, *spots)))
    value = value if weight is None else ex.call("mul", value, weight)
    return ex.masked(all_of(inside), value, _number(0, value))


def _interpolated(load: Callable[[Sequence[Expr], Expr], Expr], at: Sequence[Expr]) -> Expr:
    """The elements around a position, each with the volume of the opposite part of its cell."""
    lows = [ex.call("floor", a) for a in at]
    highs = [ex.call("add", low, _number(1, low)) for low in lows]
    terms = []
    for corner in itertools.product((0, 1), repeat=len(at)):
        spot = [high if c else low for c, low, high in zip(corner, lows, highs, strict=True)]
        parts = [
            ex.call("sub", a, low) if c else ex.call("sub", high, a)
            for c, a, low, high in zip(corner, at, lows, highs, strict=True)
        ]
        terms.append(load(spot, reduce(partial(ex.call, "mul"), parts)))
    return reduce(partial(ex.call, "add"), terms)


def _grid_sampler(
    b: Builder, node: Node, x: View, grid: View, mode: int, padding: int, align_corners: bool
) -> Any:
    like = result(node)
    if not {x.dtype, grid.dtype} <= FLOATS & {like.dtype}:
        return NotImplemented
    if x.numel == 0 or mode not in (_BILINEAR, _NEAREST):
        return NotImplemented
    planes = x.sizes[2:]
    dtype = compute_dtype(like.dtype)

    def element(v: Vars) -> Expr:
        n, c, *spot = v
        at = []
        for k, size in enumerate(planes):
            place = ex.cast(grid.at((n, *spot, len(planes) - 1 - k)), dtype)
            at.append(_padded(_position(place, size, align_corners), size, padding, align_corners))
        if mode == _NEAREST:
            return _load(x, (n, c), [ex.call("round", a) for a in at])
        return _interpolated(lambda s, weight: _load(x, (n, c), s, weight), at)

    return moved(b, like, element)


RULES: dict[Any, Rule] = {aten.grid_sampler_3d.default: _grid_sampler}
