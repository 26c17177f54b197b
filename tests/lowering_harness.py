"""Tracing, lowering and interpreting a function, and comparing it with eager.

What comes in: a function of tensors and example inputs. What goes out: the graph, the loop program, or nothing and an
``AssertionError``. What holds: the graph goes through the same decompositions and passes as a compile does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from judge import assert_as_accurate
from torch.fx.experimental.proxy_tensor import make_fx

from hotloop.config import Config
from hotloop.dumps import Log
from hotloop.graph import passes
from hotloop.graph.decompositions import decompositions
from hotloop.ir.interpret import run_program
from hotloop.ir.loops import Extern, LoopProgram
from hotloop.lower.lower import lower

CONFIG = Config()


def log() -> Log:
    return Log(CONFIG)


def trace(fn: Callable[..., Any], *inputs: Any) -> torch.fx.GraphModule:
    """The functional ATen graph of ``fn``, decomposed as in a compile."""
    functional = torch.func.functionalize(fn, remove="mutations_and_views")
    gm = make_fx(functional, decomposition_table=dict(decompositions()), tracing_mode="fake")(*inputs)
    return gm


def lowered(fn: Callable[..., Any], *inputs: Any) -> LoopProgram:
    """The loop program of ``fn``."""
    return lower(passes.run(trace(fn, *inputs), CONFIG, log()), CONFIG, log())


def externs(program: LoopProgram) -> list[str]:
    """The operators that the program calls through PyTorch."""
    return [str(op.target) for op in program.ops if isinstance(op, Extern)]


def check(
    fn: Callable[..., Any], *inputs: Any, extern: Iterable[str] = (), exact: bool = False
) -> LoopProgram:
    """Lower ``fn``, interpret it and compare with eager. ``extern`` names the operators allowed to stay PyTorch's."""
    program = lowered(fn, *inputs)
    assert set(externs(program)) <= set(extern), f"called through PyTorch: {externs(program)}\n{program}"
    actual = run_program(program, list(inputs))
    eager = fn(*[x.clone() if isinstance(x, torch.Tensor) else x for x in inputs])
    eager = list(eager) if isinstance(eager, (tuple, list)) else [eager]
    for a, e in zip(actual, eager, strict=True):
        assert isinstance(a, torch.Tensor) and a.stride() == e.stride(), f"strides\n{program}"
    if exact:
        for a, e in zip(actual, eager, strict=True):
            torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)
        return program
    assert_as_accurate(actual, eager, lambda: _in_double(fn, inputs))
    return program


def _in_double(fn: Callable[..., Any], inputs: Iterable[Any]) -> list[torch.Tensor]:
    doubled = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
    out = fn(*doubled)
    return list(out) if isinstance(out, (tuple, list)) else [out]
