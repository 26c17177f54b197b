"""Products by int8 weights: the ways in which they are written become one operator, which reads int8.

What comes in: a cleaned inference graph, lasting inputs marked. What goes out: the same, with
``_weight_int8pack_mm(x, weight, scales)`` in the place of products by a lasting int8 weight that is cast, and
perhaps scaled by output channel, before or after it is multiplied. What holds in between: a cast of int8 to a
float dtype is exact, and a sum of products scaled is the sum of scaled products within rounding; a weight
that the user casts after it was scaled stays as it is written.

The next file is ``freezing.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from hotloop.compat import same_sizes

from .nodes import call, replace, tensor_of

__all__ = ["int8_products"]

aten = torch.ops.aten

#: Smaller products are left as they are.
LEAST = 8

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_TRANSPOSES = (aten.t.default, aten.numpy_T.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def int8_products(gm: GraphModule) -> bool:
    """Let products by int8 weights read them as int8; whether there were any."""
    changed = False
    for node in list(gm.graph.nodes):
        if node.target in (aten.mm.default, aten.addmm.default) and not node.kwargs:
            changed |= _rewritten(node)
    if changed:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return changed


def _rewritten(node: Node) -> bool:
    *bias, left, matrix = node.args
    x, out = tensor_of(left), tensor_of(node)
    if x is None or out is None or x.dtype not in _FLOATS or x.device.type != "cpu" or x.stride(1) != 1:
        return False
    scaled = _untransposed(matrix)
    weight, scale = (None, None) if scaled is None else _parts(scaled, out.dtype)
    if weight is None:
        return False
    with node.graph.inserting_before(node):
        last, own = (None, None) if scale is not None or bias else _scaled_after(node)
        if scale is not None:
            own = call(node, aten.reshape.default, scale, [-1])
        elif own is None:
            channels = int(out.shape[1])
            own = call(node, aten.full.default, [channels], 1.0, dtype=out.dtype, device=torch.device("cpu"))
            own.meta["val"] = out.new_empty(channels)
        new: Node = call(node, aten._weight_int8pack_mm.default, left, weight, own)
        if bias:
            new = call(node, aten.add.Tensor, new, bias[0])
    replace(node, new)
    if last is not None:
        product = last.args[1] if last.args[0] is own else last.args[0]
        assert isinstance(product, Node)
        replace(last, product)
    return True


def _untransposed(matrix: Any) -> Node | None:
    """What ``matrix`` is the transpose of."""
    if not isinstance(matrix, Node) or matrix.op != "call_function":
        return None
    swapped = matrix.target is aten.permute.default and list(matrix.args[1]) in ([1, 0], [-1, -2])  # type: ignore[arg-type]
    swapped |= matrix.target is aten.transpose.int and {a % 2 for a in matrix.args[1:]} == {0, 1}  # type: ignore[operator]
    found = matrix.args[0] if swapped or matrix.target in _TRANSPOSES else None
    return found if isinstance(found, Node) else None


def _parts(node: Node, dtype: torch.dtype) -> tuple[Node | None, Node | None]:
    """The int8 weight and the scales of a matrix that is multiplied; no weight where it is none of these."""
    weight = _int8(node, dtype)
    if weight is not None:
        return weight, None
    if node.target is not aten.mul.Tensor:
        return None, None
    for first, second in (node.args, node.args[::-1]):
        weight, scale = _int8(first, dtype), tensor_of(second)
        if weight is None or scale is None or scale.dtype is not dtype:
            continue
        rows = tensor_of(weight)
        if rows is not None and same_sizes(scale.shape, [rows.shape[0], 1]):
            return weight, second  # type: ignore[return-value]
    return None, None


def _int8(node: Any, dtype: torch.dtype) -> Node | None:
    """The lasting int8 weight (N, K) that ``node`` casts to a float dtype."""
    val = tensor_of(node)
    if val is None or val.dtype is not dtype or node.target not in (
        aten._to_copy.default, torch.ops.prims.convert_element_type.default
    ):  # fmt: skip
        return None
    source = node.args[0]
    weight = tensor_of(source)
    if weight is None or weight.dtype is not torch.int8 or weight.ndim != 2 or not source.meta.get("lasting"):
        return None
    static = all(type(n) is int and n >= LEAST for n in weight.shape)
    return source if static and weight.is_contiguous() else None


def _scaled_after(node: Node) -> tuple[Node | None, Node | None]:
    """A product with lasting scales, one a channel, that alone reads the result, and the scales."""
    out = tensor_of(node)
    reader = node
    while len(reader.users) == 1:
        (user,) = reader.users
        if user.target in _VIEWS:
            last, size = tensor_of(user), tensor_of(node)
            if last is None or size is None or last.ndim == 0 or last.shape[-1] != size.shape[1]:
                break
            reader = user
            continue
        if user.target is not aten.mul.Tensor:
            break
        other = user.args[1] if user.args[0] is reader else user.args[0]
        scale, result = tensor_of(other), tensor_of(user)
        fits = scale is not None and out is not None and result is not None and scale.dtype is out.dtype
        same = tensor_of(reader)
        if fits and other.meta.get("lasting") and same_sizes(scale.shape, [out.shape[1]]):  # type: ignore[union-attr]
            if same is not None and same_sizes(result.shape, same.shape):  # type: ignore[union-attr]
                return user, other  # type: ignore[return-value]
        break
    return None, None
