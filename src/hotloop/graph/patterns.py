"""Attention that is written out by hand, found by its structure and given to the library's fused operator.

What comes in: a graph that the passes have cleaned, in which ``softmax(q @ k.T * scale + mask) @ v`` is two
``bmm`` with views around them and, between them, a softmax taken apart. What goes out: the same graph with
``_scaled_dot_product_flash_attention_for_cpu`` where that is faster. What holds in between: nobody but the
result needs the scores or the weights; the result keeps its dtype and, where anybody sees them, its strides;
and a row whose weights are NaN is NaN.

Rows need care because the fused operator gives 0 to a row whose scores are all -inf, and may do so where one
is +inf, while softmax gives NaN. Such a row shows in one of three places: its query is not finite, so that no
score is; its mask is -inf throughout; or the logarithm of its sum of exponentials, the operator's second
result, is not finite. Each of the three implies NaN by hand, so to write NaN there is never wrong. (What is
not seen is a finite query all of whose keys that no mask hides give -inf: 0, not NaN.)

Masks by ``where`` and ``masked_fill`` stay as they are: they hide scores that are NaN or infinite, which
adding a mask does not.

The next file is ``nodes.py``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hotloop.compat import returns_alias, same_sizes, size_estimate

from .nodes import call, replace, tensor_of

__all__ = ["fuse_attention", "is_faster_fused"]

aten = torch.ops.aten
_FUSED = aten._scaled_dot_product_flash_attention_for_cpu.default


def is_faster_fused(dtype: torch.dtype, scores: int) -> bool:
    """Whether the fused operator beats two products with our softmax between them, for so many scores.

    Measured with AVX-512 and two threads: time of the fused operator over that of the three, for batch x
    heads x length x depth; with the test for rows of NaN, but for those marked *. The machine was not quiet
    in the bfloat16 runs with the test: 1x12x512x64 with a mask gave 1.02.

    ===============  ====  ===================  ====
    float32                bfloat16
    ===============  ====  ===================  ====
    1x12x197x64      1.15  1x8x64x32            0.7
    64x4x49x32 *     1.05  1x12x128x64          0.9
    8x12x128x64 *    1.0   8x12x128x64 *        0.9
    1x12x384x64      1.0   1x12x512x64          0.9
    1x12x512x64      0.9   64x4x49x32 *         1.0
    8x12x256x64      0.8
    1x8x1024x64      0.8
    ===============  ====  ===================  ====

    In float32 it wins where the scores outgrow the cache; in bfloat16 it saves two products that are rounded.
    """
    return 4 * scores >= 8 << 20 if dtype is torch.float32 else dtype is torch.bfloat16


def fuse_attention(gm: GraphModule, keep_roundings: bool = False) -> bool:
    """Replace each hand-written attention that runs faster fused. Says whether there was one.

    With ``keep_roundings`` bfloat16 stays as it is: the fused operator does not round the scores.
    """
    changed = False
    for node in list(gm.graph.nodes):
        found = _match(node) if node.target is aten.bmm.default else None
        if found is None or (keep_roundings and found.dtype is not torch.float32):
            continue
        if is_faster_fused(found.dtype, math.prod(map(size_estimate, found.sizes))):
            changed = _rewrite(node, found) or changed
    if changed:
        gm.graph.lint()
    return changed


# --- what it looks like -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Attention:
    """``softmax(q @ k * scale, then the steps) @ v``: ``k`` is transposed already.

    ``sizes`` are batch, heads, queries and keys; the tensors may lack the batch. ``steps`` are what happens
    to the scores, first to last: each an ``add`` of a mask.
    """

    q: Node
    k: Node
    v: Node
    scale: float
    steps: tuple[Node, ...]
    scores: frozenset[Node]
    sizes: tuple[Any, ...]
    dtype: torch.dtype


_RESHAPES = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
}  # fmt: skip
_CASTS = {aten._to_copy.default, torch.ops.prims.convert_element_type.default}


def _match(product: Node) -> _Attention | None:
    """The attention whose last product this is."""
    chain = list(_unwrapped(_args(product)[0]))
    if not chain or any(len(n.users) != 1 for n in chain):
        return None
    weights = chain[-1]
    logits = _softmax_of(weights)
    if logits is None:
        return None
    steps: list[Node] = []
    seen: list[Node] = []
    scale: float | None = None
    while logits.target is not aten.bmm.default:
        factor, inner = _scaled(logits)
        if factor is not None:
            scale = factor * (1.0 if scale is None else scale)
        else:
            inner = _masked(logits)
            if inner is None:
                inner = _recast(logits)
            elif scale is not None:
                return None  # the mask is multiplied too
            else:
                steps.append(logits)
        if inner is None or len(inner.users) != 1:
            return None
        seen.append(logits)
        logits = inner
    val = weights.meta["val"]
    q, k, v = (_matrices(x, val.ndim) for x in (*_args(logits), _args(product)[1]))
    if q is None or k is None or v is None or (scale is not None and not math.isfinite(scale)):
        return None
    found = _Attention(
        q, k, v, 1.0 if scale is None else scale, tuple(reversed(steps)), frozenset([*seen, logits]),
        tuple(val.shape) if val.ndim == 4 else (1, *val.shape), q.meta["val"].dtype,
    )  # fmt: skip
    return found if _fits(found) else None


def _fits(found: _Attention) -> bool:
    """Whether the fused operator takes such tensors, and the masks are for scores of that shape."""
    q, k, v = (n.meta["val"] for n in (found.q, found.k, found.v))
    if any(t.dtype is not found.dtype or t.device.type != "cpu" for t in (q, k, v)):
        return False
    batch, queries, keys = found.sizes[4 - q.ndim : 2], found.sizes[2], found.sizes[3]
    depth = q.shape[-1]
    return (
        q.ndim in (3, 4)
        and same_sizes(q.shape, (*batch, queries, depth))
        and same_sizes(k.shape, (*batch, depth, keys))
        and same_sizes(v.shape, (*batch, keys, depth))
        and all(same_sizes(n.meta["val"].shape, (*batch, queries, keys)) for n in found.steps)
        and not any(same_sizes([n], [0]) for n in (*found.sizes, depth))
    )


def _unwrapped(x: Any) -> Iterator[Node]:
    """A tensor, and what it was before it got another shape; of all, the last two axes are the same.

    A reshape keeps the order of the elements: that of the matrices stays, however their batch is divided.
    """
    own = val = tensor_of(x)
    while own is not None and val is not None and same_sizes(val.shape[-2:], own.shape[-2:]):
        yield x
        if x.target not in _RESHAPES:
            break
        x = _args(x)[0]
        val = tensor_of(x)


def _matrices(x: Any, ndim: int) -> Node | None:
    """What matrices were before their batch became one axis: the innermost tensor of ``ndim`` axes."""
    found = [n for n in _unwrapped(x) if n.meta["val"].ndim == ndim]
    return found[-1] if found else None


def _softmax_of(weights: Node) -> Node | None:
    """What the softmax is of, if these are weights along the last axis which nobody else needs."""
    if weights.target in _CASTS and len(weights.users) == 1:  # computed in float32 and rounded
        inner = _args(weights)[0]
        if weights.meta["val"].dtype is not torch.bfloat16 or inner.meta["val"].dtype is not torch.float32:
            return None
        weights = inner
    if weights.target is not aten.div.Tensor or len(weights.users) != 1 or not _all_nodes(_args(weights)):
        return None
    exp, total = _args(weights)
    if exp.target is not aten.exp.default or total.target is not aten.sum.dim_IntList:
        return None
    if not _over_last(total, exp) or set(exp.users) != {weights, total} or len(total.users) != 1:
        return None
    shifted = _args(exp)[0]
    if shifted.target is not aten.sub.Tensor or len(shifted.users) != 1 or not _all_nodes(_args(shifted)):
        return None
    logits, largest = _args(shifted)
    if shifted.kwargs or largest.target is not aten.amax.default or not _over_last(largest, logits):
        return None
    return logits if len(largest.users) == 1 and set(logits.users) == {shifted, largest} else None


def _args(node: Node) -> tuple[Any, ...]:
    return node.args


def _all_nodes(args: Sequence[Any]) -> bool:
    return all(isinstance(a, Node) for a in args)


def _over_last(reduction: Node, of: Node) -> bool:
    """Whether it reduces the last axis of ``of`` and keeps it with size 1."""
    axes = _args(reduction)[1] if len(_args(reduction)) > 1 else None
    keeps = len(_args(reduction)) > 2 and _args(reduction)[2] is True
    ndim = of.meta["val"].ndim
    return (
        _args(reduction)[0] is of and keeps and not reduction.kwargs
        and isinstance(axes, (list, tuple)) and [a % ndim for a in axes] == [ndim - 1]
    )  # fmt: skip


def _scaled(node: Node) -> tuple[float | None, Node | None]:
    """The factor and the tensor, where the node multiplies by a number."""
    if node.target not in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
        return None, None
    x, by = _args(node)
    if node.target is aten.mul.Tensor and _number(x) is not None:
        x, by = by, x
    factor = _number(by)
    if factor is None or factor == 0 or node.kwargs or not isinstance(x, Node) or not _same(node, x):
        return None, None
    return (1 / factor if node.target in (aten.div.Tensor, aten.div.Scalar) else factor), x


def _number(x: Any) -> float | None:
    """A number, or the value of a tensor that is one throughout."""
    if isinstance(x, Node) and x.target is aten.full.default:
        x = _args(x)[1]
    return float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else None


def _same(node: Node, x: Node) -> bool:
    """Whether a step leaves the scores' shape and dtype alone."""
    a, b = tensor_of(node), tensor_of(x)
    return a is not None and b is not None and a.dtype is b.dtype and same_sizes(a.shape, b.shape)


def _masked(node: Node) -> Node | None:
    """The scores before a mask was added."""
    if node.target is not aten.add.Tensor or node.kwargs or not _all_nodes(_args(node)):
        return None
    summands = (a for a in _args(node) if _leads_to_product(a) and _same(node, a))
    return next(summands, None)


def _leads_to_product(x: Any) -> bool:
    """Which of two summands the scores are: the one that comes from a product, by steps of ours alone."""
    while isinstance(x, Node) and x.target is not aten.bmm.default:
        factor, inner = _scaled(x)
        if factor is None:
            inner = _masked(x) if x.target is aten.add.Tensor else _recast(x)
        x = inner
    return isinstance(x, Node)


def _recast(node: Node) -> Node | None:
    """The scores before they got another shape, or a wider dtype."""
    if node.target in _RESHAPES and isinstance(_args(node)[0], Node):
        before = tensor_of(_args(node)[0])
        after = node.meta["val"].shape
        return _args(node)[0] if before is not None and same_sizes(before.shape[-2:], after[-2:]) else None
    if node.target in _CASTS and isinstance(_args(node)[0], Node):
        before, now = tensor_of(_args(node)[0]), node.meta["val"].dtype
        narrow = before is not None and before.dtype in (torch.bfloat16, now)
        return _args(node)[0] if narrow and now in (torch.float32, torch.bfloat16) else None
    return None


# --- what it becomes ----------------------------------------------------------------------------------------


def _rewrite(product: Node, found: _Attention) -> bool:
    """Put the fused operator in the place of the last product."""
    with product.graph.inserting_before(product):
        mask = _mask(product, found)
        if found.steps and mask is None:
            return False
        q, v = (_rows_in_memory(product, n) for n in (found.q, found.v))
        k = _rows_in_memory(product, call(product, aten.transpose.int, found.k, -2, -1))
        both = call(product, _FUSED, q, k, v, 0.0, False, attn_mask=mask, scale=found.scale)
        out, sums = (call(product, operator.getitem, both, i) for i in (0, 1))
        bad = _rows_of_nan(product, q, sums, mask)
        out = call(product, aten.where.ScalarSelf, bad, math.nan, out)
    _hand_out(product, out)
    return True


def _rows_in_memory(like: Node, x: Node) -> Node:
    """The fused operator reads rows without gaps, and does not ask whether there are any."""
    x = _four_axes(like, x)
    if same_sizes([x.meta["val"].stride(3)], [1]):
        return x
    return call(like, aten.clone.default, x, memory_format=torch.contiguous_format)


def _four_axes(like: Node, x: Node) -> Node:
    while x.meta["val"].ndim < 4:
        x = call(like, aten.unsqueeze.default, x, 0)
    return x


def _mask(like: Node, found: _Attention) -> Node | None:
    """The steps as one tensor to add to the scores, broadcast to four axes; ``None`` where it cannot be."""
    mask: Node | None = None
    for step in found.steps:
        added = next(a for a in _args(step) if a not in found.scores)
        mask = added if mask is None else call(like, aten.add.Tensor, mask, added)
    if mask is None:
        return None
    mask = _four_axes(like, mask)
    val = mask.meta["val"]
    fits = all(
        same_sizes([n], [m]) or (axis < 3 and same_sizes([n], [1]))
        for axis, (n, m) in enumerate(zip(val.shape, found.sizes, strict=True))
    )
    return mask if fits and val.dtype in (found.dtype, torch.float32) else None


def _rows_of_nan(like: Node, q: Node, sums: Node, mask: Node | None) -> Node:
    """Which rows the hand-written form makes NaN by infinities: a bool (batch, heads, queries, 1)."""
    zeros = call(like, aten.sum.dim_IntList, call(like, aten.mul.Tensor, q, 0), [-1])
    signs = call(like, aten.add.Tensor, call(like, aten.mul.Tensor, sums, 0), zeros)
    bad = call(like, aten.ne.Tensor, signs, signs)
    if mask is not None and not _is_finite(mask):
        highest = call(like, aten.amax.default, mask, [-1])
        bad = call(like, aten.bitwise_or.Tensor, bad, call(like, aten.eq.Scalar, highest, -math.inf))
    return call(like, aten.unsqueeze.default, bad, -1)


def _is_finite(x: Any) -> bool:
    """Whether a mask is made of finite numbers alone, as far as its making tells."""
    if not isinstance(x, Node):
        return isinstance(x, (int, float)) and math.isfinite(x)
    if x.target in (aten.where.self, aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther):
        return all(map(_is_finite, _args(x)[1:]))
    if x.target is aten.full.default:
        return _is_finite(_args(x)[1])
    return returns_alias(x.target) and x.op == "call_function" and _is_finite(_args(x)[0])


def _hand_out(product: Node, out: Node) -> None:
    """Let everybody who uses the product use ``out`` (batch, heads, queries, depth).

    It lies in memory as (batch, queries, heads, depth), which is what is mostly made of it next: such a
    copy is one that changes nothing, and goes. Anybody else gets the product's own layout.
    """
    graph = product.graph
    for view in list(product.users):
        if view.target not in _RESHAPES or not same_sizes(view.meta["val"].shape, out.meta["val"].shape):
            continue
        for turned in list(view.users):
            copies = all(u.target is aten.clone.default for u in turned.users)
            if turned.target is aten.transpose.int and copies:
                with graph.inserting_before(turned):
                    replace(turned, call(turned, turned.target, out, *_args(turned)[1:]))
    sizes = product.meta["val"].shape
    with graph.inserting_before(product):
        dense = call(product, aten.clone.default, out, memory_format=torch.contiguous_format)
        flat = call(product, aten.view.default, dense, list(sizes))
    flat.meta = dict(product.meta)
    replace(product, flat)
