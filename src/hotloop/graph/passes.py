"""The passes that clean an FX graph before it is lowered: a flat list, run once from top to bottom.

What comes in: a graph of functional ATen operators from AOTAutograd, each node with its fake tensor in
``meta["val"]``; the only mutation is ``copy_`` to graph inputs, at the end. What goes out: the same graph
module with fewer nodes. What holds in between: every node that stays keeps its value, dtype and strides, and
two results that eager keeps in separate memory do not become one tensor if both leave the graph.

The next file is ``patterns.py``, whose replacements come after these passes, and ``nodes.py``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hotloop.compat import OpOverload, is_pure, real_tensors, returns_alias, same_sizes
from hotloop.config import Config
from hotloop.dumps import Log

from .nodes import base_of, call, memory_that_leaves, replace, same_metadata, tensor_of
from .patterns import fuse_attention

__all__ = ["PASSES", "clean", "fill_uninitialised", "run"]

aten = torch.ops.aten


def run(gm: GraphModule, config: Config, log: Log) -> GraphModule:
    """Run every pass of ``PASSES`` in order. The graph module is changed in place and given back."""
    clean(gm)
    if not config.unfused and fuse_attention(gm, keep_roundings=config.precision == "eager"):
        clean(gm)
        gm.recompile()
    return gm


def clean(gm: GraphModule) -> GraphModule:
    """The same, where there is no compile yet."""
    changed = False
    for step in PASSES:
        changed = step(gm) or changed
    if changed:
        gm.recompile()
    return gm


# --- what a mode of PyTorch asks for ------------------------------------------------------------------------


def fill_uninitialised(gm: GraphModule) -> bool:
    """Give tensors without values those of ``torch.use_deterministic_algorithms``: NaN, or the largest
    integer."""
    changed = False
    for node in list(gm.graph.nodes):
        val = tensor_of(node)
        if val is None or node.target not in _UNINITIALISED:
            continue
        inexact = val.is_floating_point() or val.is_complex()
        largest = True if val.dtype is torch.bool else None if inexact else torch.iinfo(val.dtype).max
        with gm.graph.inserting_after(node):
            filled = call(node, aten.fill.Scalar, node, math.nan if largest is None else largest)
        if not same_metadata(val, filled.meta["val"]):  # strides with gaps: PyTorch allocates, and fills
            gm.graph.erase_node(filled)
            continue
        node.replace_all_uses_with(filled, delete_user_cb=lambda user, own=filled: user is not own)
        changed = True
    return changed


_UNINITIALISED = {
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
    aten.empty_permuted.default, aten.new_empty.default, aten.new_empty_strided.default,
}  # fmt: skip


# --- the passes ---------------------------------------------------------------------------------------------


def drop_assertions(gm: GraphModule) -> bool:
    """Checks of metadata that capture has made already hold of every tensor that the guards let in."""
    found = [n for n in gm.graph.nodes if n.target in _ASSERTIONS]
    for node in found:
        gm.graph.erase_node(node)
    return bool(found)


_ASSERTIONS = {
    getattr(getattr(aten, name), "default", None)
    for name in ("_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size")
    if hasattr(aten, name)
}


def name_operators(gm: GraphModule) -> bool:
    """Operators that capture makes itself, by the names that have rules: ``fma(a, b, c)`` is ``a * b + c``.

    An optimizer's step has them. They are registered when Dynamo first needs them: hence a text, no object.
    """
    found = [n for n in gm.graph.nodes if n.op == "call_function" and str(n.target) == "prims.fma.default"]
    for node in found:
        a, b, c = node.args
        node.target, node.args = aten.addcmul.default, (c, a, b)
    return bool(found)


def drop_dead_code(gm: GraphModule) -> bool:
    """Nodes that nobody uses, last ones first. Random operators stay: they move the generator on."""
    changed = False
    for node in reversed(gm.graph.nodes):
        if node.users or node.op in ("placeholder", "output"):
            continue
        if node.op == "get_attr" or (
            node.op == "call_function" and (_is_getitem(node) or is_pure(node.target))
        ):
            gm.graph.erase_node(node)
            changed = True
    return changed


def _is_getitem(node: Node) -> bool:
    return node.target is operator.getitem


def drop_no_ops(gm: GraphModule) -> bool:
    """Views that change nothing, copies that nobody needs, and arithmetic with a neutral element."""
    leaves = memory_that_leaves(gm)
    mutates = any(n.target is aten.copy_.default for n in gm.graph.nodes)
    changed = False
    for node in gm.graph.nodes:
        find = _NO_OPS.get(node.target) if node.op == "call_function" else None
        source = find(node) if find is not None else None
        if source is None:
            continue
        old, new = tensor_of(node), tensor_of(source)
        if old is None or new is None or not same_metadata(old, new):
            continue
        if returns_alias(node.target):
            offsets = [old.storage_offset()], [new.storage_offset()]
            if not same_sizes(*offsets) or any(u.op == "output" for u in node.users):
                continue
        elif node in leaves or (mutates and base_of(source).op == "placeholder"):
            continue  # eager has two tensors here, and somebody could see that there is one
        replace(node, source)
        changed = True
    return changed


def _first(node: Node) -> Node | None:
    return node.args[0] if node.args and isinstance(node.args[0], Node) else None


def _times_one(node: Node) -> Node | None:
    neutral = len(node.args) == 2 and not isinstance(node.args[1], (Node, bool)) and node.args[1] == 1
    return _first(node) if neutral and not node.kwargs else None


def _minus_zero(node: Node) -> Node | None:
    """``x - 0`` is ``x``, while ``x + 0`` turns -0.0 into 0.0: allowed for integers only."""
    neutral = len(node.args) == 2 and not isinstance(node.args[1], Node) and node.args[1] == 0
    val = tensor_of(node)
    if not neutral or val is None or (node.target is aten.add.Tensor and val.is_floating_point()):
        return None
    return _first(node)


def _converted(node: Node) -> Node | None:
    """A conversion to the dtype it has already, or back from a wider one."""
    source, own = _first(node), tensor_of(node)
    inner = tensor_of(source)
    if source is None or own is None or inner is None or own.dtype is inner.dtype:
        return source
    before = _first(source) if source.target in _CONVERSIONS else None
    original = tensor_of(before)
    if original is not None and original.dtype is own.dtype and _widens(own.dtype, inner.dtype):
        return before
    return None


def _widens(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether every value of ``narrow`` is one of ``wide``, so that going there and back changes nothing."""
    if narrow in _FLOATS and wide in _FLOATS:
        return torch.promote_types(narrow, wide) is wide
    integral = not any(d.is_floating_point or d.is_complex for d in (narrow, wide))
    if not integral or wide is torch.bool:
        return False
    if narrow is torch.bool:
        return True
    n, w = torch.iinfo(narrow), torch.iinfo(wide)  # promotion is not defined for uint16, uint32 and uint64
    return bool(w.min <= n.min and n.max <= w.max)


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _no_padding(node: Node) -> Node | None:
    padding = node.args[1] if len(node.args) > 1 else None
    return _first(node) if isinstance(padding, (tuple, list)) and all(p == 0 for p in padding) else None


def _single_cat(node: Node) -> Node | None:
    tensors = node.args[0]
    if isinstance(tensors, (tuple, list)) and len(tensors) == 1 and isinstance(tensors[0], Node):
        return tensors[0]
    return None


_CONVERSIONS = {aten._to_copy.default, torch.ops.prims.convert_element_type.default}
_VIEWS = [
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default,
    aten.permute.default,
    aten.slice.Tensor, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.alias.default,
    aten.detach.default, aten.transpose.int, aten.t.default, aten.as_strided.default, aten.lift_fresh.default,
]  # fmt: skip
_NO_OPS: dict[Any, Callable[[Node], Node | None]] = {
    **dict.fromkeys(_VIEWS, _first),
    **dict.fromkeys(_CONVERSIONS, _converted),
    aten.clone.default: _first,
    aten.lift_fresh_copy.default: _first,
    aten.mul.Tensor: _times_one,
    aten.div.Tensor: _times_one,
    aten.mul.Scalar: _times_one,
    aten.div.Scalar: _times_one,
    aten.pow.Tensor_Scalar: _times_one,
    aten.add.Tensor: _minus_zero,
    aten.sub.Tensor: _minus_zero,
    aten.constant_pad_nd.default: _no_padding,
    aten.cat.default: _single_cat,
}


def fold_numbers(gm: GraphModule) -> bool:
    """One-element tensors computed from numbers alone become ``full``, whose value a kernel can hold as a
    literal.
    """
    known: dict[Node, torch.Tensor] = {}
    changed = False
    for node in list(gm.graph.nodes):
        value = _known_value(gm, node, known)
        if value is None:
            continue
        known[node] = value
        if node.target is aten.full.default or node.op == "get_attr" or returns_alias(node.target):
            continue
        with real_tensors():
            number = value.item()
        with gm.graph.inserting_before(node):
            options: dict[str, Any] = {
                "dtype": value.dtype,
                "layout": torch.strided,
                "device": value.device,
                "pin_memory": False,
            }
            literal = gm.graph.call_function(aten.full.default, (list(value.shape), number), options)
        literal.meta = dict(node.meta)
        known[literal] = value
        replace(node, literal)
        changed = True
    return changed


def _known_value(gm: GraphModule, node: Node, known: dict[Node, torch.Tensor]) -> torch.Tensor | None:
    """The value of a one-element tensor that depends on no input, or ``None``."""
    val = tensor_of(node)
    if node.op == "get_attr" and str(node.target).startswith("_tensor_constant"):
        constant = getattr(gm, str(node.target))
        return constant if constant.numel() == 1 and constant.device.type == "cpu" else None
    if node.op != "call_function" or val is None or val.device.type != "cpu" or val.dtype.is_complex:
        return None
    if (
        not same_sizes([val.numel()], [1])
        or any(n not in known for n in node.all_input_nodes)
        or not is_pure(node.target)
    ):
        return None
    if not node.all_input_nodes and node.target not in _NUMBER_MAKERS:
        return None
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: known[n])
    with real_tensors(), torch.no_grad():
        result = node.target(*args, **kwargs)  # type: ignore[operator]
    same = isinstance(result, torch.Tensor) and result.dtype is val.dtype and result.shape == val.shape
    return result if same and result.stride() == val.stride() else None


_NUMBER_MAKERS = {aten.full.default, aten.scalar_tensor.default, aten.zeros.default, aten.ones.default}


def merge_equal(gm: GraphModule) -> bool:
    """Two nodes with the same operator and arguments become one, unless both results leave the graph."""
    leaves = memory_that_leaves(gm)
    seen: dict[Hashable, Node] = {}
    changed = False
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if not _is_getitem(node) and (not isinstance(node.target, OpOverload) or not is_pure(node.target)):
            if isinstance(node.target, OpOverload) and node.target is aten.copy_.default:
                seen.clear()  # what is read from here on is the new value
            continue
        key = (node.target, _key(node.args), _key(node.kwargs))
        first = seen.setdefault(key, node)
        if first is node or (
            base_of(node) in leaves and base_of(first) in leaves and base_of(node) is not base_of(first)
        ):
            continue
        replace(node, first)
        changed = True
    return changed


def _key(value: Any) -> Hashable:
    """A key that tells 1, 1.0 and True apart, and 0.0 from -0.0."""
    if isinstance(value, (tuple, list)):
        return tuple(_key(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _key(v)) for k, v in value.items())
    if isinstance(value, slice):
        return ("slice", _key(value.start), _key(value.stop), _key(value.step))
    if isinstance(value, (Node, str, torch.dtype)) or value is None:
        return value
    return (type(value), repr(value))


#: The passes, in order. Each says whether it changed the graph.
PASSES: tuple[Callable[[GraphModule], bool], ...] = (
    drop_assertions,
    name_operators,
    drop_dead_code,
    fold_numbers,
    drop_no_ops,
    merge_equal,
    drop_dead_code,
)
