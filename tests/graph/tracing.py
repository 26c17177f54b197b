"""Functions traced as a compile traces them: functional, decomposed, and cleaned by the passes.

Inputs of the graphs are the function's arguments and, after them or before, the tensors it closes over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from hotloop.config import Config
from hotloop.dumps import Log
from hotloop.graph import passes
from hotloop.graph.decompositions import decompositions
from judge import assert_as_accurate, reference_of

CONFIG = Config()


def compiled(
    f: Callable[..., Any], *inputs: Any, clean: bool = True
) -> tuple[torch.fx.GraphModule, Any, Callable[..., Any]]:
    """The graph of ``f``, its results for ``inputs``, and ``f`` as the graph computes it."""
    seen: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(passes.run(gm, CONFIG, Log(CONFIG)) if clean else gm)
        return make_boxed_func(gm.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, inference_compiler=keep, decompositions=dict(decompositions()))
    run = torch.compile(f, backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        result = run(*inputs)
    assert len(seen) == 1
    return seen[0], result, run


def trace(f: Callable[..., Any], *inputs: Any) -> torch.fx.GraphModule:
    """The decomposed graph of ``f``, before any pass."""
    return compiled(f, *inputs, clean=False)[0]


def cleaned(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph after all passes."""
    return passes.run(gm, CONFIG, Log(CONFIG))


def targets(gm: torch.fx.GraphModule) -> list[str]:
    """The operators of a graph, in order, without their name space."""
    return [str(n.target).removeprefix("aten.") for n in gm.graph.nodes if n.op == "call_function"]


def check_graph(f: Callable[..., Any], *inputs: Any) -> torch.fx.GraphModule:
    """The cleaned graph of ``f``, after a run of it was compared with eager."""
    with torch.no_grad():
        eager = f(*inputs)
    gm, result, _ = compiled(f, *inputs)
    assert_as_accurate(result, eager, reference_of(f, *inputs), check_stride=True)
    return gm
