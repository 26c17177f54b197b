"""Freezing: what depends on weights alone is computed once, and layers that follow a convolution go into it.

What comes in: an inference graph as AOTAutograd made it, its inputs that are parameters or buffers marked
``lasting``. What goes out: two graphs, ``prelude`` that computes the *frozen values* from weights, and
``main`` that takes them as further inputs, lasting ones too. What holds in between: values are equal within
rounding; ``main`` keeps every output with eager's strides; no frozen value leaves the graph or is written.

The prelude runs again when a weight has changed (``runtime/frozen.py``): nothing here reads a value.

The next file is ``layouts.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hotloop.compat import OpOverload, is_pure, returns_alias, same_sizes

from .nodes import base_of, call, memory_that_leaves, replace, tensor_of

__all__ = ["Frozen", "freeze"]

aten = torch.ops.aten

#: A frozen value may be this much larger than the weights that it is made of, or this many bytes.
GROWTH, SMALL = 2, 1 << 16


@dataclass(frozen=True)
class Frozen:
    """A graph in two parts.

    ``prelude`` takes the inputs at ``sources`` and gives the frozen values; ``main`` takes the inputs at
    ``kept``, then the frozen values.
    """

    main: GraphModule
    prelude: GraphModule
    kept: tuple[int, ...]
    sources: tuple[int, ...]


def freeze(gm: GraphModule) -> Frozen | None:
    """Split a cleaned graph, which is changed in place; ``None`` where no work depends on weights alone."""
    lasting = constants(gm)
    for node in list(gm.graph.nodes):
        if node.target is aten.convolution.default:
            _fold_into(node, lasting)
    values = _worth_keeping(gm, lasting)
    return _split(gm, values) if values else None


def constants(gm: GraphModule) -> set[Node]:
    """The nodes whose value depends on lasting inputs and the graph's own tensors alone."""
    written = {base_of(n.args[0]) for n in gm.graph.nodes if n.target is aten.copy_.default}
    found: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            fixed = bool(node.meta.get("lasting")) and node not in written
        elif node.op == "get_attr":
            fixed = tensor_of(node) is not None and base_of(node) not in written
        else:
            operands = node.all_input_nodes
            fixed = bool(operands) and all(n in found for n in operands) and _computes(node)
        if fixed:
            found.add(node)
    return found


def _computes(node: Node) -> bool:
    if node.op != "call_function":
        return False
    return node.target is operator.getitem or (isinstance(node.target, OpOverload) and is_pure(node.target))


# --- layers after a convolution -----------------------------------------------------------------------------


def _fold_into(convolution: Node, lasting: set[Node]) -> None:
    """Scale and shift each channel in the weight and the bias, instead of in a loop over the result.

    A batch norm is ``(x - mean) * factor * weight + bias``, four such steps.
    """
    _, weight, bias, *_, transposed, _, _ = convolution.args
    known = weight in lasting and (bias is None or bias in lasting) and not transposed
    while known and len(convolution.users) == 1:
        (user,) = convolution.users
        other = _per_channel(convolution, user, lasting)
        if other is None:
            return
        convolution = _folded(convolution, user, other, lasting)


def _per_channel(convolution: Node, user: Node, lasting: set[Node]) -> Any:
    """The operand that ``user`` combines a convolution's result with: a number, or one number a channel."""
    scaled = user.target in (aten.mul.Tensor, aten.div.Tensor)
    if not (scaled or user.target in (aten.add.Tensor, aten.sub.Tensor)) or user.kwargs:
        return None
    out, mine = tensor_of(user), tensor_of(convolution)
    if out is None or mine is None or out.dtype not in (torch.float32, torch.float64):
        return None
    first, second = user.args
    if first is convolution:
        other = second
    elif user.target in (aten.mul.Tensor, aten.add.Tensor):
        other = first
    else:
        return None
    if isinstance(other, (int, float)):
        return other
    val = tensor_of(other)
    if val is None or other not in lasting or val.dtype is not out.dtype or mine.dtype is not out.dtype:
        return None
    sizes = list(val.shape)
    if not same_sizes(out.shape, mine.shape) or len(sizes) > out.ndim:
        return None
    sizes = [1] * (out.ndim - len(sizes)) + sizes
    channel = [1, sizes[1] if sizes[1] == 1 else out.shape[1]] + [1] * (out.ndim - 2)
    return other if same_sizes(sizes, channel) else None


def _folded(convolution: Node, user: Node, other: Any, lasting: set[Node]) -> Node:
    """A convolution in the place of ``user``, which combines the old one's result with ``other``."""
    x, weight, bias, *rest = convolution.args
    out = tensor_of(convolution)
    assert out is not None and isinstance(weight, Node)
    with user.graph.inserting_before(user):

        def made(target: Any, *args: Any) -> Node:
            node = call(user, target, *args)
            lasting.add(node)
            return node

        vector = made(aten.reshape.default, other, [-1]) if isinstance(other, Node) else other
        if user.target in (aten.mul.Tensor, aten.div.Tensor):
            each = vector
            if isinstance(vector, Node):
                each = made(aten.reshape.default, vector, [-1] + [1] * (out.ndim - 1))
            weight = made(user.target, weight, each)
            bias = None if bias is None else made(user.target, bias, vector)
        elif bias is None:
            channels = int(out.shape[1])
            options: dict[str, Any] = {
                "dtype": out.dtype, "layout": torch.strided, "device": out.device, "pin_memory": False
            }  # fmt: skip
            zeros = user.graph.call_function(aten.full.default, ([channels], 0.0), options)
            zeros.meta["val"] = out.new_empty(channels)
            lasting.add(zeros)
            bias = made(user.target, zeros, vector)
        else:
            bias = made(user.target, bias, vector)
        new = user.graph.call_function(convolution.target, (x, weight, bias, *rest))  # type: ignore[arg-type]
        new.meta = dict(user.meta)
    replace(user, new)
    user.graph.erase_node(convolution)
    return new


# --- two graphs ---------------------------------------------------------------------------------------------


def _worth_keeping(gm: GraphModule, lasting: set[Node]) -> list[Node]:
    """The nodes whose values are kept: computed from weights, and read by something that is not."""
    leaves = memory_that_leaves(gm)
    found: dict[Node, None] = {}
    for node in gm.graph.nodes:
        if node in lasting or node.op == "output":
            continue
        for operand in node.all_input_nodes:
            base = _computed(operand)
            if operand in lasting and base is not None and base not in leaves and _is_small(base):
                found[base] = None
    return list(found)


def _computed(node: Node) -> Node | None:
    """What a constant shows: the result of a computation, or ``None`` where it is a weight itself."""
    while node.op == "call_function" and returns_alias(node.target):
        node = node.all_input_nodes[0]
    return node if node.op == "call_function" and tensor_of(node) is not None else None


def _is_small(node: Node) -> bool:
    """Whether a value takes about as much memory as the weights that it is made of."""
    own, sources = tensor_of(node), [t for t in map(tensor_of, _sources(node)) if t is not None]
    assert own is not None
    if not sources or not all(isinstance(n, int) for t in (own, *sources) for n in t.shape):
        return False  # of numbers alone: a loop makes them faster than memory gives them
    return own.nbytes <= max(SMALL, GROWTH * sum(t.nbytes for t in sources))


def _sources(node: Node) -> list[Node]:
    """The inputs and tensors of the graph that a node's value comes from."""
    seen: set[Node] = set()
    stack = [node]
    while stack:
        n = stack.pop()
        if n not in seen:
            seen.add(n)
            stack += n.all_input_nodes
    return [n for n in seen if n.op in ("placeholder", "get_attr")]


def _split(gm: GraphModule, values: Sequence[Node]) -> Frozen:
    """The graph without the nodes that compute ``values``, and the graph that computes them."""
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    prelude = torch.fx.Graph()
    needed = _needed(values)
    sources = [k for k, n in enumerate(inputs) if n in needed]
    copies: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        if node in needed:
            copies[node] = prelude.node_copy(node, copies.__getitem__)
    prelude.output(tuple(copies[v] for v in values))
    last = inputs[-1]
    for k, value in enumerate(values):
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(f"frozen_{k}")
        last.meta = {"val": value.meta["val"], "lasting": True}
        value.replace_all_uses_with(last)
    for node in reversed(gm.graph.nodes):
        computed = node in needed and node.op != "placeholder"
        if computed and not node.users:
            gm.graph.erase_node(node)
    kept = [k for k, n in enumerate(inputs) if n.users or not n.meta.get("lasting")]
    for k in set(range(len(inputs))) - set(kept):
        gm.graph.erase_node(inputs[k])
    gm.recompile()
    return Frozen(gm, GraphModule(gm, prelude), tuple(kept), tuple(sources))


def _needed(values: Sequence[Node]) -> set[Node]:
    seen: set[Node] = set()
    stack = list(values)
    while stack:
        n = stack.pop()
        if n not in seen:
            seen.add(n)
            stack += n.all_input_nodes
    return seen
