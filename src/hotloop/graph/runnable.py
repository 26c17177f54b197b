"""The text of ``fx_graph_runnable.py``: a graph as a program that runs by itself.

What comes in: the graph module that AOTAutograd made. What goes out: a Python module with the class
``Graph``, random ``inputs()``, and, when it is run, a comparison of hotloop with eager. What holds in
between: the graph is rebuilt with the very operators that it has, subgraphs of control flow included.

The next file is ``passes.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule

from hotloop import compat
from hotloop.ir.samples import constant, sample

__all__ = ["print_runnable"]

_HEAD = '''"""{name}: the graph that hotloop was given. Run it to compare hotloop with eager."""

import torch
import torch.fx as fx
from torch import device, inf, nan
from torch.utils import _pytree as pytree
import torch.fx._pytree as fx_pytree

OPTIONS = {options!r}
'''

_TAIL = '''

def inputs():
    """Random inputs of the right sizes and strides."""
    return [{inputs}]


if __name__ == "__main__":
    from hotloop.tools.replay import compare

    compare(Graph(), inputs, OPTIONS)
'''


def print_runnable(gm: GraphModule, name: str, options: Mapping[str, Any]) -> str:
    """The program for ``gm``; ``options`` are those of the compile that differ from the defaults."""
    if any(compat.draws_random_numbers(n.target) for n in gm.graph.nodes if n.op == "call_function"):
        options = {**options, "fallback_random": True}  # else there is nothing to compare with
    text = _HEAD.format(name=name, options=dict(options)) + "".join(_classes(gm, "Graph"))
    given = [node for node in gm.graph.nodes if node.op == "placeholder"]
    lines = "".join(f"\n        {_input(node.meta.get('val'))},  # {node.name}" for node in given)
    return text + _TAIL.format(inputs=lines + "\n    " if lines else "")


def _classes(gm: GraphModule, name: str) -> list[str]:
    """The class of a graph module, after those of its subgraphs."""
    before: list[str] = []
    made: list[str] = []
    for child, module in gm.named_children():
        if isinstance(module, GraphModule):
            inner = f"{name}_{child}"
            before += _classes(module, inner)
            made.append(f"self.{child} = {inner}()")
    for node in gm.graph.nodes:
        value = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(value, torch.Tensor):
            made.append(f"self.{node.target} = {_tensor(value)}")
    code = gm.graph.python_code("self").src.strip("\n").replace("\t", "    ")
    body = [f"\n\nclass {name}(torch.nn.Module):"]
    if made:
        body += ["    def __init__(self):", "        super().__init__()"]
        body += [f"        {line}" for line in dict.fromkeys(made)] + [""]
    body += [f"    {line}" if line else "" for line in code.splitlines()]
    return [*before, "\n".join(body) + "\n"]


def _tensor(value: torch.Tensor) -> str:
    if compat.is_fake(value):
        return sample(value.shape, value.stride(), value.dtype)
    with compat.real_tensors():
        return constant(value)


def _input(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        sizes, strides = (list(map(compat.size_estimate, e)) for e in (value.shape, value.stride()))
        return sample(sizes, strides, value.dtype)
    return repr(compat.size_estimate(value) if isinstance(value, torch.SymInt) else value)
