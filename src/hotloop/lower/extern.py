"""Operators that PyTorch runs: those without a rule, and those that a library does best.

What comes in: an FX node whose tensor arguments have been lowered to views. What goes out: an ``Extern``
operation and views of its results, or, where the operator only reinterprets its argument's memory, a buffer
that aliases it. What holds in between: the call sees arguments with the strides that eager would give them,
because the strides of its results may depend on them; convolutions alone see those that
``graph/layouts.py`` chose.

The next file is ``lower.py``, the walk that falls back on this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hotloop.compat import operator_arguments, pointwise_convolution, storage_key
from hotloop.errors import CompileError
from hotloop.ir import index as ix
from hotloop.ir import sizes as sz
from hotloop.ir.index import Index, IndexLike
from hotloop.ir.loops import Extern, ViewRef

from .builder import Builder, Tensor, View
from .symbols import is_sealed, is_tensor, said

__all__ = ["argument", "call", "strided_like"]


def strided_like(b: Builder, x: View, like: Tensor) -> ViewRef:
    """``x`` as a tensor with the strides of ``like``, copied only where it has others."""
    ref = b.try_strided(x)
    if ref is None or not _same_strides(ref.sizes, ref.strides, like):
        ref = b.try_strided(b.copy(x, b._dense_strides(like, x.sizes)))
        assert ref is not None
    # A dimension of size 1 may have any stride, but PyTorch tells memory formats by it.
    steps = zip(ref.sizes, ref.strides, like.stride(), strict=True)
    return replace(ref, strides=tuple(theirs if n == 1 else ours for n, ours, theirs in steps))


def _same_strides(sizes: Sequence[Any], strides: Sequence[Any], like: Tensor) -> bool:
    if like.numel() == 0:
        return True
    return all(n == 1 or s == t for n, s, t in zip(sizes, strides, like.stride(), strict=True))


def _reach(sizes: Sequence[IndexLike], strides: Sequence[IndexLike]) -> IndexLike:
    """Elements from the first to the last one."""
    return 0 if 0 in sizes else sz.total([1, *((n - 1) * s for n, s in zip(sizes, strides, strict=True))])


def _announced(node: torch.fx.Node, layouts: bool = False) -> Any:
    """The fake tensors of a node's result: as eager lays them out, or as ``graph/layouts.py`` chose."""
    return node.meta.get("val") if layouts else node.meta.get("eager_val", node.meta.get("val"))


def argument(b: Builder, x: Any, fx: Any, layouts: bool = False) -> Any:
    """An argument for the call: ``x`` is lowered, ``fx`` is the same argument in the FX graph."""
    if isinstance(x, View):
        if b.buffers[x.buffer].sealed:
            return b.strided(x)
        like = _announced(fx, layouts) if isinstance(fx, torch.fx.Node) else None
        if is_tensor(like) and tuple(like.shape) == x.sizes and like.layout is torch.strided:
            return strided_like(b, x, like)
        return b.strided(x)
    if isinstance(x, (tuple, list)):
        return tuple(argument(b, i, j, layouts) for i, j in zip(x, fx, strict=True))
    return said(x)


#: The calls whose operands lie as ``graph/layouts.py`` chose.
_CONVOLUTIONS = {torch.ops.aten.convolution.default, *map(pointwise_convolution, (False, True))} - {None}


def call(b: Builder, node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Lower a node to a call through PyTorch. Results have the structure of the node's own."""
    layouts = node.target in _CONVOLUTIONS
    val = _announced(node, layouts)
    if is_tensor(val):
        view = _reinterpreted(b, node, args, val)
        if view is not None:
            return view
    new_args = tuple(argument(b, a, f, layouts) for a, f in zip(args, node.args, strict=True))
    new_kwargs = {k: argument(b, a, node.kwargs[k], layouts) for k, a in kwargs.items()}
    results = [val] if is_tensor(val) else list(val) if isinstance(val, (tuple, list)) else []
    views = [_result(b, node, i, r, is_tensor(val)) for i, r in enumerate(results)]
    names = tuple(v.buffer if isinstance(v, View) else None for v in _flat(views))
    op = Extern(names, node.target, new_args, new_kwargs, _mutated(node, new_args), b._origin)
    b.tell(op, [(e, k, dim) for k, r in enumerate(results) for dim, e in enumerate(getattr(r, "shape", ()))])
    if is_tensor(val):
        lazy = val.is_neg() and not val.dtype.is_complex and isinstance(views[0], View)
        return _resolved(b, views[0]) if lazy else views[0]
    return tuple(views) if isinstance(val, (tuple, list)) else None


def _resolved(b: Builder, x: View) -> View:
    """A lazy negative as numbers in memory, which is what kernels read."""
    out = b.add_buffer(x.sizes, x.dtype)
    b.ops.append(
        Extern((out.buffer,), torch.ops.aten.resolve_neg.default, (b.strided(x),), {}, (), b._origin)
    )
    return out


def _flat(values: Sequence[Any]) -> list[Any]:
    """Results without the nesting that a higher-order operator may give them."""
    return [x for v in values for x in (_flat(v) if isinstance(v, tuple) else [v])]


def _result(b: Builder, node: torch.fx.Node, i: int, result: Any, single: bool) -> Any:
    """A buffer for a result, ``None`` for one that is no tensor or that nobody reads, a tuple for several."""
    if isinstance(result, (tuple, list)):
        return tuple(_result(b, node, i, r, True) for r in result)
    if not is_tensor(result):
        return None
    if not single and not any(len(u.args) < 2 or u.args[1] == i for u in node.users):
        return None
    if is_sealed(result):
        return b.add_sealed(result)
    return b.add_buffer(tuple(result.shape), result.dtype, tuple(result.stride()), device=str(result.device))


def _mutated(node: torch.fx.Node, args: Sequence[Any]) -> tuple[str, ...]:
    parameters = operator_arguments(node.target) or ()
    written = [a for p, a in zip(parameters, args, strict=False) if p.writes]
    return tuple(dict.fromkeys(a.buffer for a in written if isinstance(a, ViewRef)))


def _reinterpreted(b: Builder, node: torch.fx.Node, args: Sequence[Any], val: Tensor) -> View | None:
    """The result of an operator that gives a view of its first argument, as a buffer over the same memory."""
    parameters = operator_arguments(node.target)
    if (
        not parameters
        or not args
        or not isinstance(args[0], View)
        or not isinstance(node.args[0], torch.fx.Node)
    ):
        return None
    source = _announced(node.args[0])
    if (
        source is None
        or is_sealed(source)
        or is_sealed(val)
        or not parameters[0].aliased
        or val.is_conj()
        or val.is_neg()
        or source.is_conj()  # its memory holds other numbers than it shows
        or source.is_neg()
        or storage_key(val) != storage_key(source)
    ):
        return None
    ref = strided_like(b, args[0], source)
    own, other = val.dtype.itemsize, source.dtype.itemsize
    start: IndexLike = val.storage_offset() * own - source.storage_offset() * other + ref.offset * other
    root = b.buffers[ref.buffer]
    if root.alias_of is not None:
        start = start + root.offset * root.dtype.itemsize
    if sz.plain(ix.mod(start, own)) != 0:
        return None
    base = root.alias_of or ref.buffer
    memory = b.buffers[base]
    end = start + _reach(val.shape, val.stride()) * own
    left = sz.plain(_reach(memory.sizes, memory.strides) * memory.dtype.itemsize - end)
    if isinstance(left, Index) or isinstance(start, Index):
        # What the guards do not decide holds: eager has such a view.
        outside = any(e.hi is not None and e.hi < 0 for e in map(ix.as_index, (start, left)))
    else:
        outside = start < 0 or left < 0
    if outside:
        raise CompileError("a view reaches memory that belongs to another tensor", stage="lower", node=node)
    return b.add_buffer(
        tuple(val.shape),
        val.dtype,
        tuple(val.stride()),
        alias_of=base,
        offset=sz.plain(ix.floordiv(start, own)),
        kind="temp",
    )
