"""What the passes ask about FX nodes: their tensors, whose memory they show, and what leaves the graph.

What comes in: nodes of a functional ATen graph. What goes out: answers; ``call`` and ``replace`` alone change
the graph.
What holds in between: a node's tensor is the fake one in ``meta["val"]``.

The next file is ``layouts.py``.
"""

from __future__ import annotations

import operator
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hotloop.compat import fake_mode_of, returns_alias, same_sizes

__all__ = ["base_of", "call", "memory_that_leaves", "replace", "same_metadata", "tensor_of"]

aten = torch.ops.aten


def call(like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node for the line of the user's that ``like`` is for, with its fake tensor."""
    node = like.graph.call_function(target, args, kwargs)
    given, named = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    node.meta = {k: v for k, v in like.meta.items() if k == "stack_trace"}
    with fake_mode_of([v for v in (*given, *named.values()) if isinstance(v, torch.Tensor)]) or nullcontext():
        node.meta["val"] = target(*given, **named)
    return node


def replace(node: Node, by: Node) -> None:
    """Let everybody who uses ``node`` use ``by``, and erase it."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def tensor_of(node: Any) -> torch.Tensor | None:
    """The node's fake tensor; ``None`` where its value is no single tensor, or where it is no node."""
    val = node.meta.get("val") if isinstance(node, Node) else None
    return val if isinstance(val, torch.Tensor) else None


def same_metadata(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have one dtype, shape, strides, device, and are lazy conjugates or not.

    Of tensors without strides, sparse ones, it is not known.
    """
    if a.dtype is not b.dtype or a.device != b.device or not a.layout is b.layout is torch.strided:
        return False
    if a.is_conj() != b.is_conj() or a.is_neg() != b.is_neg():
        return False
    return same_sizes(a.shape, b.shape) and same_sizes(a.stride(), b.stride())


def base_of(node: Node) -> Node:
    """The node whose memory this one shows: views are followed to what they view."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], Node):
        if node.target is not operator.getitem and not returns_alias(node.target):
            break
        node = node.args[0]
    return node


def memory_that_leaves(gm: GraphModule) -> set[Node]:
    """The bases of graph outputs, and the sources of writes to inputs."""
    bases: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        if node.op == "output" or node.target is aten.copy_.default:
            bases.update(base_of(n) for n in node.all_input_nodes)
    return bases
