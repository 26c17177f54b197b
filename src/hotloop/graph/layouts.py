"""Memory layouts: convolutions, and the loops between them, in channels-last.

What comes in: a cleaned FX graph with eager's strides in each node's ``meta["val"]``. What goes out: the same
graph, in which two-dimensional convolutions read and write channels-last tensors, elementwise operators and
pools between them follow, and a ``clone`` stands where an input lies otherwise. What holds in between: only
``meta["val"]`` changes, never a value; what a node's strides were in eager is kept in ``meta["eager_val"]``,
which graph outputs and every other operator that PyTorch runs still get; tensors that leave the graph keep
eager's strides.

Why: oneDNN computes on blocks of channels. It reorders a channels-first tensor before each convolution and
back after it, while it reads and writes channels-last as it is.

The next file is ``../lower/lower.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hotloop.compat import returns_alias, same_sizes

from .nodes import memory_that_leaves, tensor_of

__all__ = ["channels_last"]

aten = torch.ops.aten
_LAST = torch.channels_last

#: Operators with a lowering rule, besides the elementwise ones, whose result may lie as their operand does.
_FOLLOWERS = {
    aten.hardswish.default,  # elementwise, though nothing at the operator says so
    aten.clone.default,
    aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
    aten.cat.default,
    aten.constant_pad_nd.default,
    aten.reflection_pad2d.default,
    aten.replication_pad2d.default,
    aten.max_pool2d_with_indices.default,
    aten.avg_pool2d.default,
    aten.upsample_nearest2d.default,
    aten.upsample_bilinear2d.default,
}


def channels_last(gm: GraphModule) -> bool:
    """Choose channels-last for the convolutions of a graph and for what lies between them.

    Returns whether anything changed.
    """
    leaves = memory_that_leaves(gm)
    found = [n for n in gm.graph.nodes if _is_eligible(n) and n not in leaves]
    if not found or any(_reads_memory(n) for n in gm.graph.nodes):
        return False
    chosen = set(found)
    copies: dict[Node, Node] = {}
    for node in list(gm.graph.nodes):
        if node in chosen:
            _convolution(node, copies)
        elif node not in leaves and _follows(node):
            for target in (node, *_parts(node)):
                _set(target)
    gm.recompile()
    return True


def _is_eligible(node: Node) -> bool:
    """A two-dimensional convolution of the CPU whose result has more than one way to lie."""
    if node.target is not aten.convolution.default:
        return False
    x, out = tensor_of(node.args[0]), tensor_of(node)
    transposed = node.args[6]
    if x is None or out is None or transposed or out.ndim != 4 or _empty(out) or _empty(x):
        return False
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return out.device.type == "cpu" and out.dtype in dtypes


def _empty(tensor: torch.Tensor) -> bool:
    return same_sizes([tensor.numel()], [0])


def _reads_memory(node: Node) -> bool:
    """Whether an operator's result depends on where in memory the elements of its operand lie."""
    if node.op != "call_function":
        return False
    if node.target in (aten.as_strided.default, aten.as_strided_scatter.default, aten.view.dtype):
        return True
    # A view that no rule of ours expresses by positions (view_as_real, say) reinterprets memory.
    tensor = tensor_of(node)
    return tensor is not None and tensor.is_complex() and returns_alias(node.target)


def _is_last(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.ndim == 4 and tensor.is_contiguous(memory_format=_LAST)


def _convolution(node: Node, copies: dict[Node, Node]) -> None:
    """Give a convolution a channels-last input, and announce what it then gives."""
    x = node.args[0]
    assert isinstance(x, Node)
    source = tensor_of(x)
    assert source is not None
    if not _is_last(source):
        if x not in copies:
            with node.graph.inserting_before(node):
                copies[x] = node.graph.call_function(aten.clone.default, (x,), {"memory_format": _LAST})
            copies[x].meta = {**x.meta, "val": torch.empty_like(source, memory_format=_LAST)}
            copies[x].meta.pop("eager_val", None)
        node.update_arg(0, copies[x])
    _set(node)


def _follows(node: Node) -> bool:
    """Whether the node's result may lie channels-last, and an operand of its shape does."""
    if node.op != "call_function":
        return False
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()) and node.target not in _FOLLOWERS:
        return False
    if node.kwargs.get("memory_format") not in (None, torch.preserve_format):
        return False
    out = _first_tensor(node)
    if out is None or out.ndim != 4 or _empty(out):
        return False
    operands = [t for t in map(tensor_of, node.all_input_nodes) if t is not None and t.ndim == 4]
    elementwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    full = [t for t in operands if same_sizes(t.shape, out.shape)] if elementwise else operands
    decided = [t for t in full if not (_is_last(t) and t.is_contiguous())]  # both, where a size is 1
    return any(map(_is_last, decided))


def _first_tensor(node: Node) -> torch.Tensor | None:
    val = node.meta.get("val")
    first = val[0] if isinstance(val, (tuple, list)) and val else val
    return first if isinstance(first, torch.Tensor) else None


def _parts(node: Node) -> Iterator[Node]:
    """The elements that are taken from a node with several results."""
    if isinstance(node.meta.get("val"), (tuple, list)):
        yield from (u for u in node.users if u.target is operator.getitem)


def _set(node: Node) -> None:
    """Announce channels-last strides for the node's result, or for each of its results."""
    val = node.meta["val"]
    node.meta.setdefault("eager_val", val)
    node.meta["val"] = _lies_last(val)


def _lies_last(val: Any) -> Any:
    if isinstance(val, (tuple, list)):
        return tuple(map(_lies_last, val))
    if isinstance(val, torch.Tensor) and val.ndim == 4:
        return torch.empty_like(val, memory_format=_LAST)
    return val
