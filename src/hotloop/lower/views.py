"""Lowering rules of views, and of operators that only move elements.

What comes in: views of buffers and the node's plain arguments. What goes out: for ATen's view operators an
index map (``View.remap``), never an operation; for what is a new tensor in eager (cat, pad, roll, flip, the
scatters into slices) one ``Pointwise`` that the scheduler folds into its readers. What holds in between:
elements are moved in their own dtype, and a load whose position may be outside its buffer stands under
``masked``.

The next file is ``indexing.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir import sizes as sz
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index, IndexLike
from hotloop.ir.loops import Extern

from .builder import Builder, Rule, Tensor, View
from .pointwise import fits
from .reductions import SUPPORTED, result
from .symbols import InexpressibleError

__all__ = [
    "RULES",
    "all_of",
    "between",
    "diagonal_view",
    "moved",
    "select_view",
    "slice_start",
    "slice_view",
    "with_dim",
]

aten = torch.ops.aten
Node = torch.fx.Node
Vars = tuple[Index, ...]


def with_dim(v: Sequence[IndexLike], dim: int, i: IndexLike) -> tuple[IndexLike, ...]:
    """The point ``v`` with coordinate ``dim`` replaced."""
    return (*v[:dim], i, *v[dim + 1 :])


def between(i: IndexLike, lo: IndexLike, hi: IndexLike) -> Expr:
    """``lo <= i < hi`` as a bool value; a constant where the ranges decide it."""
    at = ex.index_value(i)
    return ex.call(
        "logical_and", ex.call("ge", at, ex.index_value(lo)), ex.call("lt", at, ex.index_value(hi))
    )


def all_of(conditions: Sequence[Expr]) -> Expr:
    """Whether every one of some conditions holds."""
    out = ex.const(True, torch.bool)
    for c in conditions:
        out = ex.call("logical_and", out, c)
    return out


def moved(b: Builder, like: Tensor, f: Callable[[Vars], Expr]) -> View:
    """A new tensor shaped like the fake one, whose elements ``f`` picks."""
    if like.numel() == 0:  # no element to pick, and perhaps none to pick from
        return b.pointwise(tuple(like.shape), like.dtype, lambda v: ex.const(0, like.dtype), like)
    return b.pointwise(tuple(like.shape), like.dtype, f, like)


# --- strided views ------------------------------------------------------------------------------------------


def _same(b: Builder, node: Node, x: View, *args: Any, **kwargs: Any) -> View:
    return x


def _expand(b: Builder, node: Node, x: View, *args: Any, **kwargs: Any) -> View:
    return x.expand(tuple(result(node).shape))


def _reshape(b: Builder, node: Node, x: View, *args: Any, **kwargs: Any) -> View:
    return x.reshape(tuple(result(node).shape))


def _permute(b: Builder, node: Node, x: View, dims: Sequence[int]) -> View:
    order = [d % x.ndim for d in dims]
    return x.remap([x.sizes[d] for d in order], lambda v: [v[order.index(d)] for d in range(x.ndim)])


def _transpose(b: Builder, node: Node, x: View, dim0: int, dim1: int) -> View:
    if x.ndim == 0:
        return x
    order = list(range(x.ndim))
    order[dim0 % x.ndim], order[dim1 % x.ndim] = dim1 % x.ndim, dim0 % x.ndim
    return _permute(b, node, x, order)


def _t(b: Builder, node: Node, x: View) -> View:
    return x if x.ndim < 2 else _transpose(b, node, x, 0, 1)


def slice_view(x: View, dim: int, start: IndexLike, step: int, size: IndexLike) -> View:
    """``size`` elements of a dimension, every ``step``-th from ``start`` on."""
    sizes = [size if d == dim else s for d, s in enumerate(x.sizes)]
    return x.remap(sizes, lambda v: with_dim(v, dim, v[dim] * step + start))


def slice_start(n: IndexLike, start: IndexLike | None) -> IndexLike:
    """Where a slice of ``n`` elements starts: negative counts from the end; never outside the dimension."""
    if start is None:
        return 0
    if isinstance(start, Index) and not sz.at_least(start, 0):
        if start.hi is None or start.hi >= 0:
            raise InexpressibleError(f"whether a slice starts at {start} or from the end is not known")
        start = start + n
    elif isinstance(start, int) and start < 0:
        start = start + n
    if isinstance(start, int) and isinstance(n, int):
        return min(max(start, 0), n)
    return sz.plain(ix.minimum(ix.maximum(start, 0), n))


def _first(b: Builder, n: IndexLike, start: IndexLike | None) -> IndexLike:
    """Where a slice of ``n`` elements starts or ends, which only running may tell."""
    try:
        return slice_start(n, start)
    except InexpressibleError:
        return b.length_of_slice(n, None, start)


def _slice(
    b: Builder,
    node: Node,
    x: View,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> View:
    dim %= x.ndim
    n, size = x.sizes[dim], result(node).shape[dim]
    if isinstance(size, Index) and size.kind == "sym" and not b.knows(size):
        b.length_of_slice(n, start, end, step, size)
    return slice_view(x, dim, _first(b, n, start), step, size)


def _narrow_copy(b: Builder, node: Node, x: View, dim: int, start: int, length: int) -> Any:
    if x.dtype not in SUPPORTED:
        return NotImplemented
    dim %= x.ndim
    return moved(b, result(node), slice_view(x, dim, _first(b, x.sizes[dim], start), 1, length).at)


def select_view(x: View, dim: int, at: IndexLike) -> View:
    """The elements at one coordinate of a dimension, which is gone."""
    return x.remap(
        [s for d, s in enumerate(x.sizes) if d != dim], lambda v: (*v[:dim], ix.as_index(at), *v[dim:])
    )


def _select(b: Builder, node: Node, x: View, dim: int, index: int) -> View:
    dim %= x.ndim
    return select_view(x, dim, index % x.sizes[dim])


def _pieces(b: Builder, node: Node, x: View, sizes: Any, dim: int = 0) -> tuple[View, ...]:
    """``split``, ``split_with_sizes``, ``chunk``: the sizes are those of the fake results."""
    dim %= x.ndim
    out: list[View] = []
    start: IndexLike = 0
    for piece in node.meta["val"]:
        size = piece.shape[dim]
        out.append(slice_view(x, dim, start, 1, size))
        start = start + size
    return tuple(out)


def _unbind(b: Builder, node: Node, x: View, dim: int = 0) -> tuple[View, ...]:
    dim %= x.ndim
    return tuple(select_view(x, dim, k) for k in range(len(node.meta["val"])))


def _unsqueeze_view(x: View, dim: int) -> View:
    return x.remap((*x.sizes[:dim], 1, *x.sizes[dim:]), lambda v: (*v[:dim], *v[dim + 1 :]))


def _unsqueeze(b: Builder, node: Node, x: View, dim: int) -> View:
    return _unsqueeze_view(x, dim % (x.ndim + 1))


def _squeeze(b: Builder, node: Node, x: View, dim: int | Sequence[int] | None = None) -> View:
    if x.ndim == 0:
        return x
    given = range(x.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    gone = {d % x.ndim for d in given if x.sizes[d % x.ndim] == 1}
    kept = [d for d in range(x.ndim) if d not in gone]
    return x.remap(
        [x.sizes[d] for d in kept],
        lambda v: [ix.const(0) if d in gone else v[kept.index(d)] for d in range(x.ndim)],
    )


def _unfold(b: Builder, node: Node, x: View, dimension: int, size: int, step: int) -> View:
    if x.ndim == 0:
        return x.remap((size,), lambda v: ())
    dim = dimension % x.ndim
    return x.remap(tuple(result(node).shape), lambda v: with_dim(v[:-1], dim, v[dim] * step + v[-1]))


def _diagonal(b: Builder, node: Node, x: View, offset: int = 0, dim1: int = 0, dim2: int = 1) -> View:
    return diagonal_view(x, tuple(result(node).shape), offset, dim1, dim2)


def diagonal_view(x: View, sizes: Sequence[IndexLike], offset: int, dim1: int, dim2: int) -> View:
    """A diagonal of two dimensions, as the last of ``sizes``."""
    one, two = dim1 % x.ndim, dim2 % x.ndim
    rest = [d for d in range(x.ndim) if d not in (one, two)]

    def point(v: Vars) -> list[IndexLike]:
        at: dict[int, IndexLike] = {d: v[k] for k, d in enumerate(rest)}
        at[one], at[two] = v[-1] + max(-offset, 0), v[-1] + max(offset, 0)
        return [at[d] for d in range(x.ndim)]

    return x.remap(sizes, point)


def _as_strided(
    b: Builder,
    node: Node,
    x: View,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Any:
    """An index map, where every position asked for is an element of ``x``.

    ``as_strided`` speaks of positions in eager's storage. Where ``x`` is dense in it, position ``p`` is one
    element of ``x``, whatever memory ``x`` has here. Anything else is about memory that only PyTorch knows.
    """
    source = node.args[0]
    if not isinstance(source, Node):
        return NotImplemented
    fake = source.meta["val"]
    first = fake.storage_offset()
    base = first if storage_offset is None else storage_offset
    last = sz.total([base, *((n - 1) * s for n, s in zip(size, stride, strict=True))])
    order = _dense_order(tuple(fake.shape), tuple(fake.stride()))
    empty = sz.product(size) == 0
    if storage_offset is not None and b.buffers[x.buffer].kind == "input" and not empty:
        # Where in its storage an input begins may differ from call to call.
        return _from_storage(b, x, (tuple(size), tuple(stride), base))
    inside = sz.at_least(base - first, 0) and sz.at_least(first + x.numel - 1 - last, 0)
    if not empty and (order is None or not inside):
        return _from_storage(b, x, (tuple(size), tuple(stride), storage_offset))
    if empty or order is None:
        return x.reshape((x.numel,)).remap(size, lambda v: (ix.const(0),))

    def point(v: Vars) -> list[IndexLike]:
        flat = ix.linearize(v, stride, base - first)
        coordinates = ix.delinearize(flat, [x.sizes[d] for d in order])
        return [coordinates[order.index(d)] for d in range(x.ndim)]

    return x.remap(size, point)


def _from_storage(b: Builder, x: View, args: tuple[Any, ...]) -> Any:
    """What lies beyond the elements of a graph input: PyTorch copies it from the input's storage.

    A copy, since an input may be written later in the graph and a view would hide that it is read.
    """
    ref = b.try_strided(x)
    if ref is None or b.buffers[x.buffer].kind != "input":
        return NotImplemented
    out = b.add_buffer(args[0], x.dtype)
    b.ops.append(Extern((out.buffer,), aten.as_strided_copy.default, (ref, *args), {}, (), b._origin))
    return out


def _dense_order(sizes: Sequence[IndexLike], strides: Sequence[IndexLike]) -> list[int] | None:
    """The dimensions from the outermost inwards, where there are no gaps or overlaps; else ``None``."""
    order = sorted(range(len(sizes)), key=lambda d: (sz.hint(strides[d]), sz.hint(sizes[d])), reverse=True)
    order = [d for d in order if sizes[d] == 1] + [d for d in order if sizes[d] != 1]
    step: IndexLike = 1
    for d in reversed(order):
        if sizes[d] != 1 and strides[d] != step:
            return None
        step = sz.plain(step * sizes[d])
    return order


def _view_dtype(b: Builder, node: Node, x: View, dtype: torch.dtype) -> Any:
    """The same bits as another dtype of the same width."""
    if dtype is x.dtype:
        return x
    known = dtype in SUPPORTED and x.dtype in SUPPORTED and torch.bool not in (dtype, x.dtype)
    if not known or dtype.itemsize != x.dtype.itemsize:
        return NotImplemented
    return moved(b, result(node), lambda v: ex.bitcast(x.at(v), dtype))


# --- elements in another order ------------------------------------------------------------------------------


def _fresh(b: Builder, node: Node, x: View, *args: Any, **kwargs: Any) -> Any:
    """A copy in eager; here its readers read the source."""
    return moved(b, result(node), x.at) if x.dtype in SUPPORTED else NotImplemented


def _flip(b: Builder, node: Node, x: View, dims: Sequence[int]) -> Any:
    if x.dtype not in SUPPORTED:
        return NotImplemented
    flipped = {d % x.ndim for d in dims} if x.ndim else set()

    def element(v: Vars) -> Expr:
        return x.at([x.sizes[d] - 1 - i if d in flipped else i for d, i in enumerate(v)])

    return moved(b, result(node), element)


def _roll(b: Builder, node: Node, x: View, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    if x.dtype not in SUPPORTED:
        return NotImplemented
    if not dims:
        flat = x.reshape((x.numel,))
        return moved(b, result(node), lambda v: _rolled(flat, x, v, shifts[0]))
    by: dict[int, int] = {}
    for s, d in zip(shifts, dims, strict=True):
        by[d % x.ndim] = by.get(d % x.ndim, 0) + s

    def element(v: Vars) -> Expr:
        return x.at([_around(i, by[d], x.sizes[d]) if d in by else i for d, i in enumerate(v)])

    return moved(b, result(node), element)


def _around(i: IndexLike, shift: int, n: IndexLike) -> IndexLike:
    return i if n == 0 else ix.mod(ix.add(i, -(shift % n)), n)


def _rolled(flat: View, x: View, v: Vars, shift: int) -> Expr:
    """An element of a tensor rolled as if it were flat."""
    steps = [sz.product(x.sizes[d + 1 :]) for d in range(x.ndim)]
    return flat.at((_around(ix.linearize(v, steps), shift, x.numel),))


def _repeat(b: Builder, node: Node, x: View, repeats: Sequence[int]) -> Any:
    if x.dtype not in SUPPORTED:
        return NotImplemented
    lead = len(repeats) - x.ndim
    return moved(
        b,
        result(node),
        lambda v: x.at([ix.mod(v[lead + d], ix.maximum(n, 1)) for d, n in enumerate(x.sizes)]),
    )


def _repeat_interleave(
    b: Builder, node: Node, x: View, repeats: int, dim: int | None = None, *, output_size: int | None = None
) -> Any:
    if x.dtype not in SUPPORTED or not isinstance(repeats, int):
        return NotImplemented
    source, at = (x.reshape((x.numel,)), 0) if dim is None or x.ndim == 0 else (x, dim % x.ndim)
    return moved(b, result(node), lambda v: source.at(with_dim(v, at, ix.floordiv(v[at], max(repeats, 1)))))


def _rot90(b: Builder, node: Node, x: View, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    if x.dtype not in SUPPORTED:
        return NotImplemented
    one, two = dims[0] % x.ndim, dims[1] % x.ndim
    turns = k % 4

    def element(v: Vars) -> Expr:
        i, j = v[one], v[two]
        last_i, last_j = x.sizes[one] - 1, x.sizes[two] - 1
        pairs = ((i, j), (j, last_j - i), (last_i - i, last_j - j), (last_i - j, i))
        return x.at(with_dim(with_dim(v, one, pairs[turns][0]), two, pairs[turns][1]))

    return moved(b, result(node), element)


def _pixel_shuffle(b: Builder, node: Node, x: View, upscale_factor: int) -> Any:
    if x.dtype not in SUPPORTED:
        return NotImplemented
    r = upscale_factor

    def element(v: Vars) -> Expr:
        c, h, w = v[-3:]
        return x.at((*v[:-3], c * (r * r) + (h % r) * r + w % r, h // r, w // r))

    return moved(b, result(node), element)


def _pixel_unshuffle(b: Builder, node: Node, x: View, downscale_factor: int) -> Any:
    if x.dtype not in SUPPORTED:
        return NotImplemented
    r = downscale_factor

    def element(v: Vars) -> Expr:
        c, h, w = v[-3:]
        return x.at((*v[:-3], c // (r * r), h * r + (c // r) % r, w * r + c % r))

    return moved(b, result(node), element)


def _channel_shuffle(b: Builder, node: Node, x: View, groups: int) -> Any:
    if x.dtype not in SUPPORTED:
        return NotImplemented
    per_group = x.sizes[1] // groups
    return moved(
        b, result(node), lambda v: x.at(with_dim(v, 1, (v[1] % groups) * per_group + v[1] // groups))
    )


def _triangle(keep: str) -> Rule:
    """``tril`` keeps ``column - row <= diagonal``, ``triu`` keeps ``>=``."""

    def rule(b: Builder, node: Node, x: View, diagonal: int = 0) -> Any:
        if x.dtype not in SUPPORTED:
            return NotImplemented

        def element(v: Vars) -> Expr:
            kept = ex.call(keep, ex.index_value(v[-1] - v[-2]), ex.const(diagonal, torch.int64))
            return ex.masked(kept, x.at(v), ex.const(0, x.dtype))

        return moved(b, result(node), element)

    return rule


# --- several tensors as one ---------------------------------------------------------------------------------

#: Above this many inputs one expression would be a long chain of tests: PyTorch's copies are faster.
_MOST_JOINED = 8


def _join(b: Builder, like: Tensor, tensors: Sequence[View], dim: int) -> Any:
    if like.dtype not in SUPPORTED or any(t.dtype not in SUPPORTED for t in tensors):
        return NotImplemented
    if len(tensors) > _MOST_JOINED:
        return NotImplemented

    def element(v: Vars) -> Expr:
        out = ex.const(0, like.dtype)
        end = sz.total(t.sizes[dim] for t in tensors)
        for t in reversed(tensors):
            start = sz.plain(end - t.sizes[dim])
            value = ex.cast(t.at(with_dim(v, dim, v[dim] - start)), like.dtype)
            # Both bounds: what stands in ``otherwise`` is evaluated everywhere, and needs its own mask.
            out = ex.masked(between(v[dim], start, end), value, out)
            end = start
        return out

    return moved(b, like, element)


def _cat(b: Builder, node: Node, tensors: Sequence[View], dim: int = 0) -> Any:
    like = result(node)
    # Tensors of shape (0,) join anything, whatever their dimension: PyTorch keeps this from its early days.
    live = [t for t in tensors if t.numel != 0 or (t.ndim == like.dim() and t.sizes != (0,))]
    return _join(b, like, live, dim % like.dim())


def _stack(b: Builder, node: Node, tensors: Sequence[View], dim: int = 0) -> Any:
    like = result(node)
    dim %= like.dim()
    return _join(b, like, [_unsqueeze_view(t, dim) for t in tensors], dim)


# --- pads ---------------------------------------------------------------------------------------------------


def _pads(pad: Sequence[IndexLike], ndim: int) -> list[tuple[IndexLike, IndexLike]]:
    """(before, after) for each dimension; ``pad`` starts from the last."""
    out: list[tuple[IndexLike, IndexLike]] = [(0, 0)] * ndim
    for k in range(len(pad) // 2):
        out[ndim - 1 - k] = (pad[2 * k], pad[2 * k + 1])
    return out


def _constant_pad(b: Builder, node: Node, x: View, pad: Sequence[int], value: float = 0) -> Any:
    if x.dtype not in SUPPORTED or not fits(value, x.dtype):
        return NotImplemented
    pads = _pads(pad, x.ndim)

    def element(v: Vars) -> Expr:
        inside = ex.const(True, torch.bool)
        for i, n, (before, _) in zip(v, x.sizes, pads, strict=True):
            inside = ex.call("logical_and", inside, between(i, before, before + n))
        at = [i - before for i, (before, _) in zip(v, pads, strict=True)]
        return ex.masked(inside, x.at(at), ex.const(value, x.dtype))

    return moved(b, result(node), element)


def _reflected(i: Index, before: IndexLike, n: IndexLike) -> Index:
    """Where position ``i`` of the padded dimension comes from: mirrored at the first and the last element."""
    from_first = i - before
    from_first = ix.maximum(from_first, -from_first)
    from_last = n - 1 - from_first
    return n - 1 - ix.maximum(from_last, -from_last)


def _replicated(i: Index, before: IndexLike, n: IndexLike) -> Index:
    return ix.minimum(ix.maximum(i - before, 0), n - 1)


def _edge_pad(source: Callable[[Index, IndexLike, IndexLike], Index]) -> Rule:
    def rule(b: Builder, node: Node, x: View, padding: Sequence[int]) -> Any:
        if x.dtype not in SUPPORTED:
            return NotImplemented
        pads = _pads(padding, x.ndim)

        def element(v: Vars) -> Expr:
            dims = zip(v, x.sizes, pads, strict=True)
            return x.at([i if pad == (0, 0) else source(i, pad[0], n) for i, n, pad in dims])

        return moved(b, result(node), element)

    return rule


# --- a tensor with a part replaced --------------------------------------------------------------------------


def _replaced(
    b: Builder, node: Node, x: View, src: View, where: Callable[[Vars], Expr], at: Callable[[Vars], Any]
) -> Any:
    """``x`` with the elements where ``where`` holds taken from ``src``."""
    like = result(node)
    # Eager keeps the strides of ``x`` here, gaps and all: only PyTorch makes such a tensor. Of one that
    # overlaps itself it makes a dense one, though torch 2.11 announces something else.
    sizes, strides = tuple(like.shape), tuple(like.stride())
    overlaps = any(s == 0 and n != 1 for n, s in zip(sizes, strides, strict=True))
    dense = overlaps or _dense_order(sizes, strides) is not None
    if x.dtype not in SUPPORTED or src.dtype not in SUPPORTED or not dense:
        return NotImplemented
    return moved(b, like, lambda v: ex.masked(where(v), ex.cast(src.at(at(v)), x.dtype), x.at(v)))


def _slice_scatter(
    b: Builder,
    node: Node,
    x: View,
    src: View,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    dim %= x.ndim
    n = x.sizes[dim]
    first = _first(b, n, start)
    last = sz.plain(ix.maximum(first, n if end is None else _first(b, n, end)))
    src = src.expand(with_dim(x.sizes, dim, -(-(last - first) // step)))

    def where(v: Vars) -> Expr:
        on_step = ex.call("eq", ex.index_value((v[dim] - first) % step), ex.const(0, torch.int64))
        return ex.call("logical_and", between(v[dim], first, last), on_step)

    return _replaced(b, node, x, src, where, lambda v: with_dim(v, dim, (v[dim] - first) // step))


def _select_scatter(b: Builder, node: Node, x: View, src: View, dim: int, index: int) -> Any:
    dim %= x.ndim
    at = index % x.sizes[dim]
    src = src.expand([s for d, s in enumerate(x.sizes) if d != dim])
    return _replaced(
        b, node, x, src, lambda v: between(v[dim], at, at + 1), lambda v: (*v[:dim], *v[dim + 1 :])
    )


def _diagonal_scatter(
    b: Builder, node: Node, x: View, src: View, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Any:
    one, two = dim1 % x.ndim, dim2 % x.ndim

    def where(v: Vars) -> Expr:
        return ex.call("eq", ex.index_value(v[two] - v[one]), ex.const(offset, torch.int64))

    def at(v: Vars) -> list[IndexLike]:
        rest = [i for d, i in enumerate(v) if d not in (one, two)]
        return [*rest, v[one] - max(-offset, 0)]

    return _replaced(b, node, x, src, where, at)


def _as_strided_scatter(b: Builder, node: Node, x: View, src: View, *args: Any, **kwargs: Any) -> Any:
    """Only where the part is all of ``x`` in its own order; else PyTorch does it."""
    size, stride = tuple(args[0]), tuple(args[1])
    fake = result(node)
    offset = args[2] if len(args) > 2 else kwargs.get("storage_offset")
    source = node.args[0]
    if offset is not None and isinstance(source, Node) and offset != source.meta["val"].storage_offset():
        return NotImplemented
    whole = size == x.sizes and stride == tuple(fake.stride()) and _dense_order(size, stride) is not None
    if not whole or src.dtype not in SUPPORTED or x.dtype not in SUPPORTED:
        return NotImplemented
    return moved(b, fake, lambda v: ex.cast(src.at(v), x.dtype))


_VIEWS: dict[str, Rule] = {
    "expand.default": _expand,
    "permute.default": _permute,
    "t.default": _t,
    "transpose.int": _transpose,
    "view.default": _reshape,
    "slice.Tensor": _slice,
    "select.int": _select,
    "split.Tensor": _pieces,
    "split_with_sizes.default": _pieces,
    "unbind.int": _unbind,
    "squeeze.default": _squeeze,
    "squeeze.dim": _squeeze,
    "squeeze.dims": _squeeze,
    "unsqueeze.default": _unsqueeze,
    "unfold.default": _unfold,
    "diagonal.default": _diagonal,
    "as_strided.default": _as_strided,
    "alias.default": _same,
    "detach.default": _same,
}


def _copies(rule: Rule) -> Rule:
    """The rule of ``x_copy`` from that of the view ``x``: new tensors of the same elements."""

    def copied(b: Builder, node: Node, *args: Any, **kwargs: Any) -> Any:
        out = rule(b, node, *args, **kwargs)
        if out is NotImplemented or (isinstance(args[0], View) and args[0].dtype not in SUPPORTED):
            return NotImplemented
        if isinstance(out, tuple):
            return tuple(moved(b, result(node, k), o.at) for k, o in enumerate(out))
        return moved(b, result(node), out.at)

    return copied


def _table() -> dict[Any, Rule]:
    rules: dict[Any, Rule] = {}
    for name, rule in _VIEWS.items():
        packet, overload = name.split(".")
        rules[getattr(getattr(aten, packet), overload)] = rule
        copy = getattr(aten, f"{packet}_copy", None)
        if copy is not None and hasattr(copy, overload):
            rules[getattr(copy, overload)] = _copies(rule)
    return rules


RULES: dict[Any, Rule] = {
    **_table(),
    aten.reshape.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten._reshape_alias.default: _reshape,
    aten.view.dtype: _view_dtype,
    aten.as_strided_.default: _as_strided,  # changes no element; adaptive pools leave it in functional graphs
    aten.lift_fresh.default: _same,
    aten.lift_fresh_copy.default: _fresh,
    aten.flip.default: _flip,
    aten.roll.default: _roll,
    aten.repeat.default: _repeat,
    aten.repeat_interleave.self_int: _repeat_interleave,
    aten.rot90.default: _rot90,
    aten.narrow_copy.default: _narrow_copy,
    aten.pixel_shuffle.default: _pixel_shuffle,
    aten.pixel_unshuffle.default: _pixel_unshuffle,
    aten.channel_shuffle.default: _channel_shuffle,
    aten.native_channel_shuffle.default: _channel_shuffle,
    aten.tril.default: _triangle("le"),
    aten.triu.default: _triangle("ge"),
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.constant_pad_nd.default: _constant_pad,
    aten.reflection_pad1d.default: _edge_pad(_reflected),
    aten.reflection_pad2d.default: _edge_pad(_reflected),
    aten.reflection_pad3d.default: _edge_pad(_reflected),
    aten.replication_pad1d.default: _edge_pad(_replicated),
    aten.replication_pad2d.default: _edge_pad(_replicated),
    aten.replication_pad3d.default: _edge_pad(_replicated),
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.as_strided_scatter.default: _as_strided_scatter,
}
