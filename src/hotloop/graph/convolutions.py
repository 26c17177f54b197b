"""Convolutions by weights that last: as matrix products where they are such, or with what follows them.

What comes in: a graph whose layouts are chosen. What goes out: a convolution of single pixels in
channels-last, by a float32 weight that lasts, is a matrix product between views, which the scheduler gives a
kernel of ours; another one takes a sum or an activation that follows it along into oneDNN's operator, as far
as that treats NaN as eager does (its relu, hardtanh and hardsigmoid make numbers of NaN). What holds in
between: nodes announce the strides that they announced.

The next file is ``../lower/lower.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hotloop.compat import can_pack_convolution, pointwise_convolution, same_sizes

from .nodes import memory_that_leaves, replace, tensor_of

__all__ = ["as_products", "with_what_follows"]

aten = torch.ops.aten
_LAST = torch.channels_last

#: Channels from which on a product has a kernel of its own.
LEAST = 8


def as_products(gm: GraphModule) -> bool:
    """Convolutions of single pixels as matrix products of (pixels, channels) by (channels, outputs)."""
    found = [n for n in gm.graph.nodes if _is_settled(n) and _is_of_pixels(n)]
    for node in found:
        _as_product(node)
    if found:
        gm.recompile()
    return bool(found)


def _is_settled(node: Node) -> bool:
    """A 2-D convolution for which channels-last was chosen, by a weight that lasts and fills its memory."""
    if node.target is not aten.convolution.default or "eager_val" not in node.meta:
        return False
    x, out, weight = map(tensor_of, (node.args[0], node, node.args[1]))
    if x is None or out is None or weight is None or x.ndim != 4:
        return False
    static = all(type(n) is int for t in (x, out) for n in (*t.shape, *t.stride()))
    dense = weight.is_contiguous() or weight.is_contiguous(memory_format=_LAST)
    fixed = static and dense and all(map(_lasts, node.args[1:3]))
    return fixed and all(t.is_contiguous(memory_format=_LAST) for t in (x, out))


def _lasts(node: Any) -> bool:
    return node is None or bool(node.op == "placeholder" and node.meta.get("lasting"))


def _is_of_pixels(node: Node) -> bool:
    x, weight = tensor_of(node.args[0]), tensor_of(node.args[1])
    assert x is not None and weight is not None
    _, _, _, stride, padding, _, transposed, _, groups = node.args
    single = same_sizes(weight.shape[2:], [1, 1]) and groups == 1 and not transposed
    steps = all(s == 1 for s in stride) and all(p == 0 for p in padding)  # type: ignore[union-attr]
    return bool(single and steps and x.dtype is torch.float32 and min(weight.shape[:2]) >= LEAST)


def _as_product(node: Node) -> None:
    x, weight, bias = node.args[:3]
    out = tensor_of(node)
    assert out is not None
    batch, channels, height, width = out.shape
    with node.graph.inserting_before(node):

        def made(target: Any, *args: Any) -> Node:
            new = node.graph.call_function(target, args)
            new.meta = {k: v for k, v in node.meta.items() if k not in ("val", "eager_val")}
            new.meta["val"] = target(*torch.fx.map_arg(args, lambda n: n.meta["val"]))
            return new

        pixels = made(aten.permute.default, x, [0, 2, 3, 1])
        rows = made(aten.view.default, pixels, [batch * height * width, -1])
        flat = made(aten.view.default, weight, [channels, -1])
        matrix = made(aten.t.default, flat)
        operands = (rows, matrix) if bias is None else (bias, rows, matrix)
        product = made(aten.mm.default if bias is None else aten.addmm.default, *operands)
        image = made(aten.view.default, product, [batch, height, width, channels])
        new = made(aten.permute.default, image, [0, 3, 1, 2])
        new.meta = dict(node.meta)
    replace(node, new)


# --- with what follows --------------------------------------------------------------------------------------

Post = tuple[str, list[Any], str]


def _gelu(node: Node) -> Post:
    return "gelu", [], str(node.kwargs.get("approximate", "none"))


def _leaky_relu(node: Node) -> Post:
    return "leaky_relu", [node.args[1] if len(node.args) > 1 else 0.01], ""


#: Activations that oneDNN computes after a convolution, NaN as eager does.
_ACTIVATIONS: Mapping[Any, Callable[[Node], Post]] = {
    aten.sigmoid.default: lambda _: ("sigmoid", [], ""),
    aten.tanh.default: lambda _: ("tanh", [], ""),
    aten.silu.default: lambda _: ("swish", [], ""),
    aten.hardswish.default: lambda _: ("hardswish", [], ""),
    aten.gelu.default: _gelu,
    aten.leaky_relu.default: _leaky_relu,
}


def with_what_follows(gm: GraphModule) -> bool:
    """Convolutions together with a sum or an activation that alone reads their result."""
    if pointwise_convolution(False) is None:
        return False
    leaves = memory_that_leaves(gm)
    changed = False
    for node in list(gm.graph.nodes):
        if not _is_settled(node) or node.args[6]:
            continue
        out = tensor_of(node)
        assert out is not None
        if out.dtype is torch.float32 and can_pack_convolution(out.dtype):
            changed = _with(node, leaves) or changed
    if changed:
        gm.recompile()
    return changed


def _with(node: Node, leaves: set[Node]) -> bool:
    other = None
    post: Post = ("none", [], "")
    user = _only_user(node, leaves)
    if user is None:
        return False
    if user.target in _ACTIVATIONS:
        post = _ACTIVATIONS[user.target](user)
    elif user.target is aten.add.Tensor and not user.kwargs and _only_user(user, leaves) is None:
        # A sum that another step follows is that one's: one loop over the result serves both.
        first, second = user.args
        other = second if first is node else first
        if not _lies_alike(other, node):
            return False
    else:
        return False
    x, weight, bias, stride, padding, dilation, _, _, groups = node.args
    numbers = (padding, stride, dilation, groups)
    args: tuple[Any, ...] = (x, weight, bias, *numbers, *post)
    if other is not None:
        args = (x, other, weight, bias, *numbers, "add", None, None, [], "")
    with user.graph.inserting_before(user):
        new = user.graph.call_function(pointwise_convolution(other is not None), args)
    new.meta = dict(user.meta)
    replace(user, new)
    node.graph.erase_node(node)
    return True


def _only_user(node: Node, leaves: set[Node]) -> Node | None:
    """The one node that reads a result, where it is alike and stays in the graph."""
    if len(node.users) != 1 or node in leaves:
        return None
    (user,) = node.users
    once = list(user.args).count(node) == 1
    return user if once and user not in leaves and _lies_alike(user, node) else None


def _lies_alike(a: Any, b: Node) -> bool:
    """Whether a node's tensor has the sizes, strides and dtype of another's."""
    mine, theirs = tensor_of(a), tensor_of(b)
    if mine is None or theirs is None or mine.dtype is not theirs.dtype:
        return False
    return same_sizes(mine.shape, theirs.shape) and same_sizes(mine.stride(), theirs.stride())
