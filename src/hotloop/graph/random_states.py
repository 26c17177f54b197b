"""Random operators that activation checkpointing runs twice: their results and states get sizes.

What comes in: a graph of AOTAutograd. Where a checkpoint computes a random operator again, the forward graph
calls it by ``run_and_save_rng_state``, which also gives the generator's state, and the backward graph by
``run_with_rng_state``. What goes out: the same graph, in which these calls have the results of their operator
in ``meta["val"]``, as all other nodes have. What holds in between: such operators draw through PyTorch,
whatever ``config.fallback_random`` says, so that both passes see the same numbers.

The next file is ``passes.py``.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from hotloop.compat import fake_mode_of, real_tensors

__all__ = ["settle"]


def settle(gm: GraphModule) -> None:
    """Describe the results of operators that are run with the generator's state, and the states."""
    saving = getattr(torch.ops.higher_order, "run_and_save_rng_state", None)
    using = getattr(torch.ops.higher_order, "run_with_rng_state", None)
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target is saving:
            target, *args = node.args
            _describe(node, (_state(gm), _result(gm, target, args, node.kwargs)))
        elif node.op == "call_function" and node.target is using:
            state, target, *args = node.args
            if isinstance(state, Node):
                state.meta["val"] = _state(gm)
            _describe(node, _result(gm, target, args, node.kwargs))


def _fake_mode(gm: GraphModule) -> Any:
    found = [n.meta.get("val") for n in gm.graph.nodes]
    return fake_mode_of([val for val in found if isinstance(val, torch.Tensor)])


def _state(gm: GraphModule) -> torch.Tensor:
    """The state of PyTorch's generator has the same size always; AOTAutograd makes a symbol of it."""
    with real_tensors():
        state = torch.get_rng_state()
    fake: torch.Tensor = _fake_mode(gm).from_tensor(state, static_shapes=True)
    return fake


def _result(gm: GraphModule, target: Any, args: Any, kwargs: Any) -> Any:
    given, named = map_arg((tuple(args), dict(kwargs)), lambda n: n.meta["val"])
    with _fake_mode(gm), torch.no_grad():
        return target(*given, **named)


def _describe(node: Node, value: Any) -> None:
    """The value of a node, and those of the nodes that take parts of it."""
    node.meta["val"] = value
    for user in node.users:
        if user.target is operator.getitem:
            _describe(user, value[user.args[1]])
