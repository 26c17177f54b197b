"""Products by int8 weights: the ways in which they are written become one operator, which reads int8.

What comes in: a cleaned inference graph, lasting inputs marked. What goes out: the same, with
``int8_linear(x, weight, scale)`` in the place of products by a lasting int8 weight that is cast, transposed
and perhaps scaled, as a whole or by output channel. What holds in between: casts of int8 to a float dtype are
exact, and a sum of products scaled is the sum of scaled products within rounding. A weight that is cast after
it was scaled stays as it is written: that cast rounds. Scales that follow the product are left to its
epilogue.

The next file is ``freezing.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from hotloop.compat import same_sizes
from hotloop.ir.operators import int8_linear

from .nodes import call, replace, tensor_of

__all__ = ["int8_products"]

aten = torch.ops.aten

#: Smaller products are left as they are.
LEAST = 8

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_TRANSPOSES = (aten.t.default, aten.numpy_T.default)
_CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)

Scale = Node | float


def int8_products(gm: GraphModule, keep_roundings: bool) -> bool:
    """Let products by int8 weights read them as int8; whether there were any.

    Arguments:
        keep_roundings: every operator rounds, so that a weight that is scaled stays as it is.
    """
    changed = False
    for node in list(gm.graph.nodes):
        if node.target in (aten.mm.default, aten.addmm.default) and not node.kwargs:
            changed |= _rewritten(node, keep_roundings)
    if changed:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return changed


def _rewritten(node: Node, keep_roundings: bool) -> bool:
    *bias, left, matrix = node.args
    x, out = tensor_of(left), tensor_of(node)
    if x is None or out is None or x.dtype not in _FLOATS or x.device.type != "cpu" or x.stride(1) != 1:
        return False
    weight, turned, scale = _weight_and_scale(matrix, out.dtype)
    if weight is None or (scale is not None and keep_roundings):
        return False
    with node.graph.inserting_before(node):
        if not turned:
            weight = call(node, aten.permute.default, weight, [1, 0])
        scales = () if scale is None else (_by_channel(node, scale, out),)
        new: Node = call(node, int8_linear, left, weight, *scales)
        if bias:
            new = call(node, aten.add.Tensor, new, bias[0])
    replace(node, new)
    return True


def _weight_and_scale(matrix: Any, dtype: torch.dtype) -> tuple[Node | None, bool, Scale | None]:
    """The int8 weight that ``matrix`` is in ``dtype``, whether as its transpose, and what it is scaled by; no
    weight where it is none, or where what is scaled is cast."""
    node, scale = matrix, None
    cast = turned = False
    while isinstance(node, Node) and node.op == "call_function":
        inner: Any = _untransposed(node)
        if inner is not None:
            turned = not turned
        elif node.target in _CASTS:
            inner, cast = node.args[0], True
        elif node.target is aten.mul.Tensor and scale is None and not cast:
            inner, scale = _scaled(node, dtype, turned)
        node = inner
    val = tensor_of(node)
    if val is None or val.dtype is not torch.int8 or val.ndim != 2 or not node.meta.get("lasting"):
        return None, False, None
    static = all(type(n) is int and n >= LEAST for n in val.shape)
    return (node, turned, scale) if static and val.is_contiguous() else (None, False, None)


def _untransposed(node: Node) -> Node | None:
    """What ``node`` is the transpose of."""
    swapped = node.target is aten.permute.default and list(node.args[1]) in ([1, 0], [-1, -2])  # type: ignore[arg-type]
    swapped |= node.target is aten.transpose.int and {a % 2 for a in node.args[1:]} == {0, 1}  # type: ignore[operator]
    found = node.args[0] if swapped or node.target in _TRANSPOSES else None
    return found if isinstance(found, Node) else None


def _scaled(node: Node, dtype: torch.dtype, turned: bool) -> tuple[Node | None, Scale | None]:
    """The matrix and the scales, one a channel or one alone, that ``node`` multiplies, giving ``dtype``.

    ``turned``: a channel is a row.
    """
    out = tensor_of(node)
    if out is None or out.dtype is not dtype or out.ndim != 2:
        return None, None
    channels = out.shape[0 if turned else 1]
    shapes = ([channels, 1],) if turned else ([channels], [1, channels])
    for matrix, scale in (node.args, node.args[::-1]):
        val, by = tensor_of(matrix), tensor_of(scale)
        if val is None or not isinstance(matrix, Node) or not same_sizes(val.shape, out.shape):
            continue
        if by is None:
            if isinstance(scale, (int, float)) and _is_exact(scale, dtype):
                return matrix, float(scale)
        elif by.is_floating_point() and torch.promote_types(by.dtype, dtype) is dtype:
            if by.numel() == 1 or any(same_sizes(by.shape, s) for s in shapes):
                return matrix, scale  # type: ignore[return-value]
    return None, None


def _is_exact(number: float, dtype: torch.dtype) -> bool:
    """Whether a number is in ``dtype`` what it is in float32, in which eager multiplies by it."""
    return float(torch.tensor(number, dtype=dtype)) == float(torch.tensor(number, dtype=torch.float32))


def _by_channel(like: Node, scale: Scale, out: torch.Tensor) -> Node:
    """Scales (N,) of the dtype of ``out`` (M, N)."""
    channels = int(out.shape[1])
    if not isinstance(scale, Node):
        own = call(like, aten.full.default, [channels], scale, dtype=out.dtype, device=torch.device("cpu"))
        own.meta["val"] = out.new_empty(channels)
        return own
    val = tensor_of(scale)
    assert val is not None
    if val.dtype is not out.dtype:
        scale = call(like, aten._to_copy.default, scale, dtype=out.dtype)
    scale = call(like, aten.reshape.default, scale, [-1])
    return call(like, aten.repeat.default, scale, [channels]) if val.numel() == 1 != channels else scale
