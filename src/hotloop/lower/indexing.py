"""Lowering rules of reads at positions that are data: gather, index, embedding.

What comes in: a view and integer index tensors. What goes out: one ``Pointwise`` whose load has an indirect
index; the scheduler folds it into its readers. What holds in between: where eager counts negative positions
from the end, so does the payload; where eager raises, for those or for any position out of range, the index
is ``checked``. Boolean masks give shapes that are not known, and stay calls through PyTorch.

The next file is ``scans.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index, IndexLike

from .builder import Builder, Rule, View
from .reductions import SUPPORTED, result
from .views import moved, with_dim

__all__ = ["INTEGERS", "RULES", "Advanced", "advanced", "lifted", "position"]

aten = torch.ops.aten
Node = torch.fx.Node
Vars = tuple[Index, ...]

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def position(
    index: View,
    point: Sequence[IndexLike],
    size: IndexLike,
    wrap: bool,
    checked: bool = True,
    only: Expr | None = None,
) -> Index:
    """The element of an index tensor as an index below ``size``; ``wrap``: negative from the end; ``only``:
    the condition under which it counts, otherwise 0.
    """
    at = ex.cast(index.at(point), torch.int64)
    if wrap:
        negative = ex.call("lt", at, ex.const(0, torch.int64))
        at = ex.where(negative, ex.call("add", at, ex.index_value(size)), at)
    if only is not None:
        at = ex.where(only, at, ex.const(0, torch.int64))
    return ix.indirect(at, size, checked)


def lifted(x: View) -> View:
    """A 0-dim tensor as one of one element."""
    return x if x.ndim else x.reshape((1,))


def _gather(b: Builder, node: Node, x: View, dim: int, index: View, *, sparse_grad: bool = False) -> Any:
    if x.dtype not in SUPPORTED or index.dtype not in INTEGERS:
        return NotImplemented
    source = lifted(x)
    dim %= source.ndim
    size = source.sizes[dim]

    def element(v: Vars) -> Expr:
        at = position(index, v, size, wrap=False)
        return source.at(with_dim(v, dim, at) if v else (at,))

    return moved(b, result(node), element)


def _index_select(b: Builder, node: Node, x: View, dim: int, index: View) -> Any:
    if x.dtype not in SUPPORTED or index.dtype not in INTEGERS:
        return NotImplemented
    source, along = lifted(x), lifted(index)
    dim %= source.ndim
    size = source.sizes[dim]

    def element(v: Vars) -> Expr:
        if not v:
            return source.at((position(along, (0,), size, wrap=False),))
        return source.at(with_dim(v, dim, position(along, (v[dim],), size, wrap=False)))

    return moved(b, result(node), element)


def _embedding(
    b: Builder,
    node: Node,
    weight: View,
    indices: View,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if weight.dtype not in SUPPORTED or indices.dtype not in INTEGERS:
        return NotImplemented
    rows = weight.sizes[0]
    return moved(b, result(node), lambda v: weight.at((position(indices, v[:-1], rows, wrap=False), v[-1])))


def _take(b: Builder, node: Node, x: View, index: View) -> Any:
    if x.dtype not in SUPPORTED or index.dtype not in INTEGERS:
        return NotImplemented
    flat = x.reshape((x.numel,))
    return moved(b, result(node), lambda v: flat.at((position(index, v, x.numel, wrap=True),)))


def _broadcast(shapes: Sequence[Sequence[IndexLike]]) -> tuple[IndexLike, ...]:
    """The common shape. What is not known to be 1 is as large as the others: eager has seen to it."""
    out: list[IndexLike] = [1] * max(map(len, shapes))
    for shape in shapes:
        for k, n in enumerate(reversed(shape)):
            if n != 1 and (out[-1 - k] == 1 or isinstance(n, int)):
                out[-1 - k] = n
    return tuple(out)


class Advanced:
    """How the coordinates of ``x[indices]`` come about, with ``None`` for a dimension taken whole.

    The index tensors broadcast to one shape. Its dimensions stand where the first index tensor stood if the
    tensors were next to each other, and in front otherwise.
    """

    def __init__(self, x: View, indices: Sequence[View | None]) -> None:
        self.x = x
        self.indices = (*indices, *(None,) * (x.ndim - len(indices)))
        self.used = [d for d, i in enumerate(self.indices) if i is not None]
        tensors = [i for i in self.indices if i is not None]
        self.shape = _broadcast([t.sizes for t in tensors])
        self.broadcast = [t.expand(self.shape) for t in tensors]
        adjacent = self.used == list(range(self.used[0], self.used[0] + len(self.used)))
        self.lead = self.used[0] if adjacent else 0

    @property
    def sizes(self) -> tuple[IndexLike, ...]:
        """The sizes of ``x[indices]``."""
        rest = [n for i, n in zip(self.indices, self.x.sizes, strict=True) if i is None]
        return (*rest[: self.lead], *self.shape, *rest[self.lead :])

    def point(self, v: Vars, checked: bool, only: Expr | None = None) -> tuple[IndexLike, ...]:
        """The coordinates in ``x`` of the element of ``x[indices]`` at ``v``; 0 where ``only`` fails."""
        shared = v[self.lead : self.lead + len(self.shape)]
        rest = iter((*v[: self.lead], *v[self.lead + len(self.shape) :]))
        tensors = iter(self.broadcast)
        return tuple(
            next(rest) if i is None else position(next(tensors), shared, n, True, checked, only)
            for i, n in zip(self.indices, self.x.sizes, strict=True)
        )


def advanced(x: View, indices: Sequence[View | None]) -> Advanced | None:
    """How ``x[indices]`` is indexed; ``None`` where only PyTorch can say."""
    tensors = [i for i in indices if i is not None]
    if x.dtype not in SUPPORTED or not tensors or any(t.dtype not in INTEGERS for t in tensors):
        return None
    return Advanced(x, indices)


def _index(checked: bool) -> Rule:
    def rule(b: Builder, node: Node, x: View, indices: Sequence[View | None]) -> Any:
        how = advanced(x, indices)
        if how is None:
            return NotImplemented
        return moved(b, result(node), lambda v: x.at(how.point(v, checked)))

    return rule


def _masked_index(
    b: Builder, node: Node, x: View, mask: View, indices: Sequence[View | None], fill: float
) -> Any:
    """``x[indices]`` where ``mask``, else ``fill``; positions that are masked out may be anything."""
    how = advanced(x, indices)
    if how is None or x.numel == 0 or len(how.used) != x.ndim:
        return NotImplemented
    chosen = mask.expand(tuple(result(node).shape))
    return moved(
        b,
        result(node),
        lambda v: ex.masked(chosen.at(v), x.at(how.point(v, checked=True)), ex.const(fill, x.dtype)),
    )


RULES: dict[Any, Rule] = {
    aten.gather.default: _gather,
    aten.index.Tensor: _index(checked=True),
    aten._unsafe_index.Tensor: _index(checked=False),
    aten._unsafe_masked_index.default: _masked_index,
    aten.index_select.default: _index_select,
    aten.embedding.default: _embedding,
    aten.take.default: _take,
}
