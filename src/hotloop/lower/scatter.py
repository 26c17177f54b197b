"""Lowering rules of writes at positions that are data: scatter, index_put, index_add, and their derivatives.

What comes in: a view, integer index tensors, and what to put there. What goes out: one ``Scatter`` over a
buffer with the old elements; its values are folded into it by the scheduler. What holds in between:

* Sums, products and extremes of bfloat16 and float16 are made in float32 and rounded once.
* Where eager counts negative positions from the end, so does the payload; a position out of range raises.
* A result that goes back into a graph input is a new *version* of the input's buffer, whatever view of the
  input is written: the scheduler then writes the input in place, and nothing else of it is touched.

The next file is ``pooling.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hotloop.compat import returns_alias
from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir import sizes as sz
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index, IndexLike

from . import views
from .builder import Builder, Rule, Tensor, View, number_value
from .indexing import INTEGERS, advanced, lifted, position
from .pointwise import element, fits
from .reductions import FLOATS, SUPPORTED, compute_dtype, compute_value, result
from .views import moved, with_dim

__all__ = ["RULES"]

aten = torch.ops.aten
Node = torch.fx.Node
Vars = tuple[Index, ...]


@dataclass(frozen=True)
class _Write:
    """What an operator puts where: ``value(v)`` at ``at(v)``, for every ``v`` of ``sizes``."""

    sizes: tuple[IndexLike, ...]
    at: Callable[[Vars], Sequence[IndexLike]]
    value: Callable[[Vars], Expr]
    kind: str = "set"


def _number(value: Any, dtype: torch.dtype) -> Expr:
    """A number as an element."""
    if isinstance(value, (bool, int, float)):
        return ex.const(value, dtype)
    return ex.cast(number_value(value), dtype)


def _known(*tensors: View | None) -> bool:
    return all(t is None or t.dtype in SUPPORTED for t in tensors)


def _impossible(x: View, w: _Write) -> bool:
    """Every position is out of range: PyTorch raises what eager raises."""
    return x.numel == 0 and sz.product(w.sizes) != 0


def _written(b: Builder, node: Node, x: View, *writes: _Write) -> Any:
    """``x`` with the writes done, one after the other."""
    like = result(node)
    if not _known(x) or any(_impossible(x, w) for w in writes):
        return NotImplemented
    wide = compute_dtype(x.dtype) if any(w.kind != "set" for w in writes) else x.dtype
    if wide is x.dtype and _updates_input(b, node, x):
        for w in writes:
            x = _version(b, x, x, w)
        return x
    shape = tuple(like.shape)
    total = _totals(b, x, wide, writes, like).reshape(shape)
    return total if wide is x.dtype else b.pointwise(shape, x.dtype, total.at, like)


def _totals(b: Builder, x: View, wide: torch.dtype, writes: Sequence[_Write], like: Tensor | None) -> View:
    """The writes over the elements of ``x`` as ``wide``."""
    strides = b.strides_like(like, x.sizes)
    if wide is not x.dtype:
        total = b.pointwise(x.sizes, wide, lambda v: ex.cast(x.at(v), wide), like)
    elif x == b.whole(x.buffer) and tuple(b.buffers[x.buffer].strides) == strides:
        total = x
    else:
        total = b.copy(x, strides)
    for w in writes:
        total = b.scatter(total, w.sizes, w.kind, w.at, _valued(w, wide))
    return total


def _valued(w: _Write, dtype: torch.dtype) -> Callable[[Vars], Expr]:
    return lambda v: ex.cast(w.value(v), dtype)


# --- inputs that are written --------------------------------------------------------------------------------


def _updates_input(b: Builder, node: Node, x: View) -> bool:
    """Whether ``x`` shows a graph input, or a version of one, and the result will be copied back into one."""
    name = x.buffer
    if b.buffers[name].kind != "input" and name not in b.versions:
        return False
    return b.one_to_one(x) and _returns_to_input(node)


def _returns_to_input(node: Node) -> bool:
    """Whether a graph input is overwritten with the node, or with what views and scatters make of it."""
    seen: set[Node] = set()
    left = [node]
    while left:
        n = left.pop()
        for user in n.users:
            if user.target is aten.copy_.default:
                target = user.args[0]
                if user.args[1] is n and isinstance(target, Node) and target.op == "placeholder":
                    return True
            elif user not in seen and (
                returns_alias(user.target)
                or (user.target in RULES and user.args[0] is n)
                or (user.target in _REGIONS and user.args[1] is n)
            ):
                seen.add(user)
                left.append(user)
    return False


def _coordinates(x: View, point: Sequence[IndexLike]) -> tuple[Index, ...]:
    """Where in its buffer an element of a view lies."""
    mapping = dict(zip(x.vars, point, strict=True))
    return tuple(ix.substitute(i, mapping) for i in x.indices)


def _version(b: Builder, x: View, part: View, w: _Write) -> View:
    """``x`` as it is seen in a new version of its buffer, with a part of it written."""
    whole = b.whole(x.buffer)
    out = b.scatter(whole, w.sizes, w.kind, lambda v: _coordinates(part, w.at(v)), _valued(w, x.dtype))
    b.versions[out.buffer] = x
    return replace(x, buffer=out.buffer)


def _put_back(b: Builder, x: View, part: View, new: View) -> View | None:
    """``x`` with a part replaced by ``new``, where that is the part in a later version of the buffer that
    differs nowhere else: then it is all of ``x`` in that version.
    """
    if replace(new, buffer=part.buffer) != part:
        return None
    chain: list[str] = []
    name = new.buffer
    while name != part.buffer:
        changed = b.versions.get(name)
        if changed is None or replace(changed, buffer=part.buffer) != part:
            return None
        chain.append(name)
        name = changed.buffer
    for name in chain:
        b.versions[name] = replace(x, buffer=b.versions[name].buffer)
    return replace(x, buffer=new.buffer)


# --- parts that are replaced: x[2:5] = y --------------------------------------------------------------------


def _slice_region(
    x: View,
    src: View,
    dim: int = 0,
    start: IndexLike | None = None,
    end: IndexLike | None = None,
    step: int = 1,
) -> View:
    dim %= x.ndim
    n = x.sizes[dim]
    first = views.slice_start(n, start)
    last = ix.maximum(first, n if end is None else views.slice_start(n, end))
    return views.slice_view(x, dim, first, step, -(-(last - first) // step))


def _select_region(x: View, src: View, dim: int, index: int) -> View:
    dim %= x.ndim
    return views.select_view(x, dim, index % x.sizes[dim])


def _diagonal_region(x: View, src: View, offset: int = 0, dim1: int = 0, dim2: int = 1) -> View:
    return views.diagonal_view(x, src.sizes, offset, dim1, dim2)


_REGIONS: dict[Any, Callable[..., View]] = {
    aten.slice_scatter.default: _slice_region,
    aten.select_scatter.default: _select_region,
    aten.diagonal_scatter.default: _diagonal_region,
}


def _region(target: Any, region_of: Callable[..., View]) -> Rule:
    """A write into a part of a graph input touches that part alone; of anything else a new tensor is made."""
    otherwise = views.RULES[target]

    def rule(b: Builder, node: Node, x: View, src: View, *args: Any, **kwargs: Any) -> Any:
        if not _known(x, src) or not _updates_input(b, node, x):
            return otherwise(b, node, x, src, *args, **kwargs)
        part = region_of(x, src, *args, **kwargs)
        known = _put_back(b, x, part, src)
        if known is not None:
            return known
        source = src.expand(part.sizes)
        whole = _Write(part.sizes, lambda v: v, lambda v: ex.cast(source.at(v), x.dtype))
        return _version(b, x, part, whole)

    return rule


# --- x[indices] = values ------------------------------------------------------------------------------------


def _index_put(
    b: Builder,
    node: Node,
    x: View,
    indices: Sequence[View | None],
    values: View,
    accumulate: bool = False,
) -> Any:
    if not _known(x, values) or values.dtype is not x.dtype:
        return NotImplemented
    masks = [i for i in indices if i is not None]
    if len(masks) == 1 and masks[0].dtype is torch.bool and values.numel == 1:
        return _mask_put(b, node, x, indices, masks[0], values, accumulate)
    how = advanced(x, indices)
    if how is None:
        return NotImplemented
    sizes = how.sizes
    if values.ndim > len(sizes):
        return NotImplemented
    kind = "sum" if accumulate else "set"
    w = _Write(sizes, lambda v: how.point(v, True), lambda v: element(values, v), kind)
    return _written(b, node, x, w)


def _mask_put(
    b: Builder,
    node: Node,
    x: View,
    indices: Sequence[View | None],
    mask: View,
    values: View,
    accumulate: bool,
) -> Any:
    """One value wherever a mask holds: a choice, element by element."""
    first = next(d for d, i in enumerate(indices) if i is not None)
    if mask.sizes != x.sizes[first : first + mask.ndim]:
        return NotImplemented

    def chosen(v: Vars) -> Expr:
        old, new = x.at(v), values.at([ix.const(0)] * values.ndim)
        if accumulate:
            dtype = compute_dtype(x.dtype)
            total = ex.call("add", ex.cast(old, dtype), ex.cast(new, dtype))
            new = ex.cast(total, x.dtype, implicit=True)
        return ex.where(mask.at(v[first : first + mask.ndim]), new, old)

    return moved(b, result(node), chosen)


def _masked_put_accumulate(
    b: Builder, node: Node, x: View, mask: View, indices: Sequence[View | None], values: View
) -> Any:
    """``x[indices] += values`` where ``mask``; positions that are masked out may be anything."""
    how = advanced(x, indices)
    if not _known(x) or how is None or values.dtype is not x.dtype or len(how.used) != x.ndim:
        return NotImplemented
    if values.ndim > len(how.sizes) or mask.ndim > len(how.sizes):
        return NotImplemented
    nothing = ex.const(-0.0 if x.dtype.is_floating_point else 0, x.dtype)  # also of a negative zero

    w = _Write(
        how.sizes,
        lambda v: how.point(v, True, element(mask, v)),
        lambda v: ex.masked(element(mask, v), element(values, v), nothing),
        "sum",
    )
    return _written(b, node, x, w)


def _put(b: Builder, node: Node, x: View, index: View, source: View, accumulate: bool = False) -> Any:
    """``x`` as if it were flat, with elements replaced."""
    if not _known(x, source) or index.dtype not in INTEGERS or source.dtype is not x.dtype:
        return NotImplemented
    flat, given = x.reshape((x.numel,)), source.reshape(index.sizes)
    kind = "sum" if accumulate else "set"
    w = _Write(index.sizes, lambda v: (position(index, v, x.numel, wrap=True),), given.at, kind)
    out = _written(b, node, flat, w)
    return out if out is NotImplemented else out.reshape(x.sizes)


# --- scatters along a dimension -----------------------------------------------------------------------------


def _along(x: View, dim: int, index: View, value: Callable[[Vars], Expr], kind: str) -> _Write:
    """``x[..., index[v], ...] = value(v)`` for every ``v`` of an index as large as what is written."""
    size = x.sizes[dim]
    if index.numel == 0 and index.ndim != x.ndim:  # nothing, which eager takes of however many dimensions
        return _Write((0,) * x.ndim, lambda v: v, lambda v: ex.const(0, x.dtype), kind)
    return _Write(index.sizes, lambda v: with_dim(v, dim, position(index, v, size, wrap=False)), value, kind)


_REDUCES = {"add": "sum", "multiply": "prod", "sum": "sum", "prod": "prod", "amax": "max", "amin": "min"}


def _scatter(
    b: Builder, node: Node, x: View, dim: int, index: View, src: Any, *, reduce: str | None = None
) -> Any:
    if not _known(x) or index.dtype not in INTEGERS or not fits(src, x.dtype):
        return NotImplemented
    if isinstance(src, View) and src.dtype is not x.dtype:
        return NotImplemented
    target, along = lifted(x), lifted(index)
    source = lifted(src) if isinstance(src, View) else None

    def value(v: Vars) -> Expr:
        return _number(src, x.dtype) if source is None else source.at(v)

    kind = "set" if reduce is None else _REDUCES[reduce]
    out = _written(b, node, target, _along(target, dim % target.ndim, along, value, kind))
    return out if out is NotImplemented else out.reshape(x.sizes)


def _scatter_add(b: Builder, node: Node, x: View, dim: int, index: View, src: View) -> Any:
    return _scatter(b, node, x, dim, index, src, reduce="add")


def _scatter_reduce(
    b: Builder,
    node: Node,
    x: View,
    dim: int,
    index: View,
    src: View,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    if not _known(x) or index.dtype not in INTEGERS or src.dtype is not x.dtype:
        return NotImplemented
    target, source = lifted(x), lifted(src)
    w = _along(target, dim % target.ndim, lifted(index), source.at, "sum")
    return _reduced(b, node, x, w, reduce, include_self)


def _reduced(b: Builder, node: Node, x: View, w: _Write, reduce: str, include_self: bool) -> Any:
    """``w``, a write into ``lifted(x)``, combined with what is there, or with the other values alone."""
    target = lifted(x)
    w = replace(w, kind="sum" if reduce == "mean" else _REDUCES[reduce])
    start = ex.neutral(w.kind, x.dtype)
    # What is written at all starts from nothing.
    writes = [w] if include_self else [replace(w, value=lambda v: start, kind="set"), w]
    if reduce == "mean":
        out = _mean(b, node, target, writes, include_self)
    else:
        out = _written(b, node, target, *writes)
    return out if out is NotImplemented else out.reshape(x.sizes)


def _mean(b: Builder, node: Node, x: View, writes: Sequence[_Write], include_self: bool) -> Any:
    """Sums divided by how many elements are in them; integers are divided as ``//`` does."""
    if x.dtype is torch.bool or any(_impossible(x, w) for w in writes):
        return NotImplemented
    dtype = compute_dtype(x.dtype)
    like = result(node)
    total = _totals(b, x, dtype, writes, None)
    one = ex.const(1, torch.int64)
    counts = b.pointwise(x.sizes, torch.int64, lambda v: ex.const(int(include_self), torch.int64))
    counts = b.scatter(counts, writes[-1].sizes, "sum", writes[-1].at, lambda v: one)
    divide = "div" if dtype.is_floating_point else "floordiv"
    sizes = tuple(like.shape)
    sums, numbers = total.reshape(sizes), counts.reshape(sizes)

    def mean(v: Vars) -> Expr:
        count = ex.call("maximum", numbers.at(v), one)
        return ex.call(divide, sums.at(v), ex.cast(count, dtype))

    return b.pointwise(sizes, x.dtype, mean, like)


# --- whole slices along a dimension -------------------------------------------------------------------------


def _slices(
    x: View,
    dim: int,
    index: View,
    sizes: Sequence[IndexLike],
    value: Callable[[Vars], Expr],
    kind: str,
    wrap: bool,
) -> _Write:
    """``x[..., index[i], ...] = value(..., i, ...)``, with a one-dimensional index."""
    along, size = lifted(index), x.sizes[dim]
    return _Write(
        tuple(sizes),
        lambda v: with_dim(v, dim, position(along, (v[dim],), size, wrap)),
        value,
        kind,
    )


def _index_add(
    b: Builder, node: Node, x: View, dim: int, index: View, source: View, *, alpha: float = 1
) -> Any:
    if not _known(x) or index.dtype not in INTEGERS or source.dtype is not x.dtype:
        return NotImplemented
    if (x.dtype is torch.bool and alpha != 1) or not fits(alpha, x.dtype):
        return NotImplemented
    target, given = lifted(x), lifted(source)
    dim %= target.ndim

    def value(v: Vars) -> Expr:
        e = compute_value(given.at(v))
        return e if alpha == 1 else ex.call("mul", e, _number(alpha, e.dtype))

    out = _written(b, node, target, _slices(target, dim, index, given.sizes, value, "sum", wrap=False))
    return out if out is NotImplemented else out.reshape(x.sizes)


def _index_copy(b: Builder, node: Node, x: View, dim: int, index: View, source: View) -> Any:
    if not _known(x) or index.dtype not in INTEGERS or source.dtype is not x.dtype:
        return NotImplemented
    target, given = lifted(x), lifted(source)
    dim %= target.ndim
    out = _written(b, node, target, _slices(target, dim, index, given.sizes, given.at, "set", wrap=False))
    return out if out is NotImplemented else out.reshape(x.sizes)


def _index_reduce(
    b: Builder,
    node: Node,
    x: View,
    dim: int,
    index: View,
    source: View,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    if not _known(x) or index.dtype not in INTEGERS or source.dtype is not x.dtype:
        return NotImplemented
    if x.dtype is torch.bool:  # eager refuses
        return NotImplemented
    target, given = lifted(x), lifted(source)
    w = _slices(target, dim % target.ndim, index, given.sizes, given.at, "sum", wrap=False)
    return _reduced(b, node, x, w, reduce, include_self)


def _index_fill(b: Builder, node: Node, x: View, dim: int, index: View, value: Any) -> Any:
    if not _known(x) or index.dtype not in INTEGERS or not fits(value, x.dtype):
        return NotImplemented
    if isinstance(value, View) and not _known(value):
        return NotImplemented
    target = lifted(x)
    dim %= target.ndim
    fill = ex.cast(value.at(()), x.dtype) if isinstance(value, View) else _number(value, x.dtype)
    sizes = [index.numel if d == dim else s for d, s in enumerate(target.sizes)]
    out = _written(b, node, target, _slices(target, dim, index, sizes, lambda v: fill, "set", wrap=True))
    return out if out is NotImplemented else out.reshape(x.sizes)


# --- derivatives --------------------------------------------------------------------------------------------


def _over_zeros(b: Builder, node: Node, sizes: Sequence[IndexLike], w: _Write) -> Any:
    """A new tensor of zeros with a write done. ``sizes`` has the elements in the result's order."""
    like = result(node)
    wide = like.dtype if w.kind == "set" else compute_dtype(like.dtype)
    shape = tuple(like.shape)
    zeros = b.pointwise(tuple(sizes), wide, lambda v: ex.const(0, wide), like)
    if _impossible(zeros, w):
        return NotImplemented
    total = b.scatter(zeros, w.sizes, w.kind, w.at, _valued(w, wide)).reshape(shape)
    if wide is like.dtype and tuple(sizes) == shape:
        return total
    return b.pointwise(shape, like.dtype, total.at, like)


def _embedding_backward(
    b: Builder,
    node: Node,
    grad: View,
    indices: View,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Any:
    if not _known(grad) or indices.dtype not in INTEGERS or scale_grad_by_freq:
        return NotImplemented

    def value(v: Vars) -> Expr:
        e = compute_value(grad.at(v))
        if padding_idx < 0:
            return e
        row = ex.cast(indices.at(v[:-1]), torch.int64)
        return ex.where(ex.call("eq", row, ex.const(padding_idx, torch.int64)), ex.const(0, e.dtype), e)

    def at(v: Vars) -> Sequence[IndexLike]:
        return position(indices, v[:-1], num_weights, wrap=False), v[-1]

    return _over_zeros(b, node, (num_weights, grad.sizes[-1]), _Write(grad.sizes, at, value, "sum"))


def _max_pool_backward(n: int) -> Rule:
    """The gradient of a maximum goes where the maximum was found: a position in the flat plane."""

    def rule(b: Builder, node: Node, grad: View, x: View, *args: Any, **kwargs: Any) -> Any:
        indices = kwargs.get("indices", args[-1] if args else None)
        if not _known(grad) or not isinstance(indices, View) or indices.dtype not in INTEGERS:
            return NotImplemented
        lead, plane = x.sizes[: x.ndim - n], sz.product(x.sizes[x.ndim - n :])
        w = _Write(
            grad.sizes,
            lambda v: (*v[: x.ndim - n], position(indices, v, plane, wrap=False)),
            lambda v: compute_value(grad.at(v)),
            "sum",
        )
        return _over_zeros(b, node, (*lead, plane), w)

    return rule


def _max_unpool(n: int) -> Rule:
    """Each element goes to its position in the flat plane, and zeros everywhere else."""

    def rule(b: Builder, node: Node, x: View, indices: View, *_: Any, **__: Any) -> Any:
        if x.dtype not in FLOATS or indices.dtype not in INTEGERS or x.numel == 0:
            return NotImplemented
        shape = tuple(result(node).shape)
        lead, plane = shape[: x.ndim - n], sz.product(shape[x.ndim - n :])
        w = _Write(
            x.sizes, lambda v: (*v[: x.ndim - n], position(indices, v, plane, wrap=False)), x.at, "set"
        )
        return _over_zeros(b, node, (*lead, plane), w)

    return rule


RULES: dict[Any, Rule] = {
    **{target: _region(target, region) for target, region in _REGIONS.items()},
    aten.index_put.default: _index_put,
    aten.put.default: _put,
    aten.scatter.src: _scatter,
    aten.scatter.value: _scatter,
    aten.scatter.reduce: _scatter,
    aten.scatter.value_reduce: _scatter,
    aten.scatter_add.default: _scatter_add,
    aten.scatter_reduce.two: _scatter_reduce,
    aten.index_add.default: _index_add,
    aten.index_copy.default: _index_copy,
    aten.index_reduce.default: _index_reduce,
    aten._unsafe_masked_index_put_accumulate.default: _masked_put_accumulate,
    aten.index_fill.int_Scalar: _index_fill,
    aten.index_fill.int_Tensor: _index_fill,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.max_pool2d_with_indices_backward.default: _max_pool_backward(2),
    aten.max_pool3d_with_indices_backward.default: _max_pool_backward(3),
    aten.adaptive_max_pool2d_backward.default: _max_pool_backward(2),
    aten.adaptive_max_pool3d_backward.default: _max_pool_backward(3),
    aten.max_unpool2d.default: _max_unpool(2),
    aten.max_unpool3d.default: _max_unpool(3),
}
