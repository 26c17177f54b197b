"""Lowering rules of patches: the windows of a plane as columns of a matrix, and their sums back in the plane.

What comes in: a batch of planes and the window's numbers (``nn.Unfold``), or the columns and the size of the
plane (``nn.Fold``). What goes out: for windows to columns one ``Pointwise`` with a mask where a window leaves
the plane; for columns to planes one ``Reduce`` over the windows that hold an element. What holds in between:
a column has the elements of all channels, channel by channel, and windows are counted row by row.

The next file is ``products.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir import sizes as sz
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index, IndexLike

from .builder import Builder, Rule, View
from .reductions import FLOATS, compute_value, result
from .views import all_of, between, moved

__all__ = ["RULES"]

aten = torch.ops.aten
Node = torch.fx.Node
Vars = tuple[Index, ...]
Ints = Sequence[int]


@dataclass(frozen=True)
class _Windows:
    """The windows along one dimension of ``size`` elements."""

    size: IndexLike
    kernel: int
    dilation: int
    padding: int
    stride: int

    @property
    def count(self) -> IndexLike:
        reach = self.dilation * (self.kernel - 1) + 1
        return sz.plain((self.size + (2 * self.padding - reach)) // self.stride + 1)

    @property
    def over_one(self) -> int:
        """The most windows that hold one element."""
        return -(-(self.dilation * (self.kernel - 1) + 1) // self.stride)


def _windows(plane: Sequence[IndexLike], *numbers: Ints) -> list[_Windows]:
    return [_Windows(n, *(int(value[k]) for value in numbers)) for k, n in enumerate(plane)]


def _im2col(
    b: Builder, node: Node, x: View, kernel_size: Ints, dilation: Ints, padding: Ints, stride: Ints
) -> Any:
    """``out[..., (c, k0, k1), (w0, w1)]``: element ``(k0, k1)`` of window ``(w0, w1)`` of plane ``c``."""
    if x.dtype not in FLOATS:
        return NotImplemented
    lead = x.ndim - 3
    windows = _windows(x.sizes[-2:], kernel_size, dilation, padding, stride)

    def element(v: Vars) -> Expr:
        c, *within = ix.delinearize(v[lead], (x.sizes[lead], *(w.kernel for w in windows)))
        which = ix.delinearize(v[lead + 1], [w.count for w in windows])
        at = [
            i * w.stride + k * w.dilation - w.padding for i, k, w in zip(which, within, windows, strict=True)
        ]
        inside = all_of([between(i, 0, w.size) for i, w in zip(at, windows, strict=True)])
        return ex.masked(inside, x.at((*v[:lead], c, *at)), ex.const(0, x.dtype))

    return moved(b, result(node), element)


def _col2im(
    b: Builder,
    node: Node,
    x: View,
    output_size: Ints,
    kernel_size: Ints,
    dilation: Ints,
    padding: Ints,
    stride: Ints,
) -> Any:
    """Every element of a plane is the sum of what the windows say of it."""
    like = result(node)
    if x.dtype not in FLOATS or not sz.is_static(x.sizes) or x.numel == 0:
        return NotImplemented
    windows = _windows(tuple(like.shape[-2:]), kernel_size, dilation, padding, stride)
    lead = x.ndim - 2

    def term(v: Vars, r: Vars) -> Expr:
        """What the ``r``-th last window that can hold the element says of it."""
        conditions, which, within = [], [], []
        for i, back, w in zip(v[-2:], r, windows, strict=True):
            place = i + w.padding
            window = ix.floordiv(place, w.stride) - back
            offset = place - window * w.stride
            k = ix.floordiv(offset, w.dilation)
            on_step = ex.call("eq", ex.index_value(ix.mod(offset, w.dilation)), ex.const(0, torch.int64))
            conditions += [between(window, 0, w.count), between(k, 0, w.kernel), on_step]
            which.append(window)
            within.append(k)
        row = ix.linearize((v[-3], *within), _steps([w.kernel for w in windows]))
        column = ix.linearize(which, _steps([windows[1].count]))
        value = compute_value(x.at((*v[:lead], row, column)))
        return ex.masked(all_of(conditions), value, ex.const(0, value.dtype))

    over = [w.over_one for w in windows]
    return b.reduce(tuple(like.shape), over, "sum", like.dtype, term, like)


def _steps(sizes: Sequence[IndexLike]) -> list[IndexLike]:
    """How far apart in a row-major order neighbours are: those of a leading dimension, then of ``sizes``."""
    return [sz.product(sizes[k:]) for k in range(len(sizes) + 1)]


RULES: dict[Any, Rule] = {
    aten.im2col.default: _im2col,
    aten.col2im.default: _col2im,
}
