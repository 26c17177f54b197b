"""Runs a function through lowering and the interpreter, and compares with eager.

What comes in: a function of tensors and its inputs. What goes out: the loop program, for tests that look at
it. What holds: results have eager's values, dtypes and strides, and ``own=True`` says that nothing was left
to PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hotloop.config import Config
from hotloop.dumps import Log
from hotloop.ir.interpret import run_program
from hotloop.ir.interpret_kernel import run_schedule
from hotloop.ir.kernel import Schedule
from hotloop.ir.loops import Extern, LoopProgram
from hotloop.ir.verify import verify_program, verify_schedule
from hotloop.lower.lower import lower
from hotloop.schedule.schedule import schedule
from judge import assert_as_accurate, reference_of

__all__ = ["check", "check_schedule", "lowered", "scheduled"]

Function = Callable[..., Any]


def lowered(f: Function, *inputs: Any) -> LoopProgram:
    """The loop program of ``f`` for these inputs' shapes, strides and dtypes."""

    def flat(*args: Any) -> Any:
        out = f(*args)
        return list(out) if isinstance(out, tuple) else out

    gm = make_fx(torch.func.functionalize(flat, remove="mutations"), tracing_mode="fake")(*inputs)
    gm.graph.eliminate_dead_code()
    config = Config()
    program = lower(gm, config, Log(config))
    verify_program(program)
    return program


def check(
    f: Function, *inputs: Any, own: bool = True, exact: bool = False, strides: bool = True
) -> LoopProgram:
    """Compare ``f``'s loop program with eager; ``own``: no operator may have gone to PyTorch.

    ``strides`` is false where the result is a view of an input, whose strides AOTAutograd restores.
    """
    eager = f(*inputs)
    program = lowered(f, *inputs)
    externs = [op for op in program.ops if isinstance(op, Extern)]
    assert not (own and externs), f"left to PyTorch: {[str(op.target) for op in externs]}\n{program}"
    got = run_program(program, list(inputs))
    want = list(eager) if isinstance(eager, (tuple, list)) else [eager]
    if exact:
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=0, atol=0, equal_nan=True)
    assert_as_accurate(got, want, reference_of(f, *inputs), check_stride=strides)
    return program


def scheduled(f: Function, *inputs: Any, threads: int = 2, **options: Any) -> Schedule:
    """The schedule of ``f`` for these inputs, verified."""
    config = Config().replace(options)
    made = schedule(lowered(f, *inputs), config, Log(config), threads)
    verify_schedule(made)
    return made


def check_schedule(f: Function, *inputs: Any) -> Schedule:
    """Compare ``f``'s kernels, fused and apart, for one thread and for four, with eager.

    Kernels for different numbers of threads give the same bits.
    """
    eager = f(*inputs)
    want = list(eager) if isinstance(eager, (tuple, list)) else [eager]
    results = []
    for threads, unfused in ((1, False), (4, False), (1, True)):
        made = scheduled(f, *inputs, threads=threads, unfused=unfused)
        got = run_schedule(made, list(inputs), arena=True)
        assert_as_accurate(got, want, reference_of(f, *inputs))
        results.append(got)
    for one, four in zip(*results[:2], strict=True):
        torch.testing.assert_close(one, four, rtol=0, atol=0, equal_nan=True)
    return scheduled(f, *inputs)
