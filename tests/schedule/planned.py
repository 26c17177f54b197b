"""A module's forward, planned step by step, and run by the interpreter and the machine: what tests of
products and attention share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hotloop import backend, compat
from hotloop.config import Config
from hotloop.dumps import Log
from hotloop.errors import OptionError
from hotloop.graph import passes
from hotloop.graph.decompositions import decompositions
from hotloop.ir.interpret_kernel import run_schedule
from hotloop.ir.kernel import Attend, KernelCall, Multiply, Schedule, statements
from hotloop.ir.verify import verify_program, verify_schedule
from hotloop.lower.lower import lower
from hotloop.runtime.toolchain import choose_simd
from hotloop.schedule.schedule import schedule
from hotloop.schedule.tiles import TILES
from judge import assert_as_accurate, reference_of

LEVELS = sorted(TILES)


def can_run(level: str) -> bool:
    """Whether this processor has a level."""
    try:
        return choose_simd(level) == level
    except OptionError:
        return False


def planned(
    model: nn.Module, *inputs: torch.Tensor, level: str = "avx512", threads: int = 2, **options: Any
) -> tuple[Schedule, list[Any]]:
    """The schedule of a model's forward, checked, and the tensors that it takes."""
    found: list[tuple[Schedule, list[Any]]] = []

    def record(gm: torch.fx.GraphModule, _: Any, kind: str) -> Callable[..., Any]:
        config = Config().replace({"parallel_threshold": 0, **options})
        with compat.real_tensors(), Log(config, graph_id=0, kind="inference") as log:
            backend._mark_lasting(gm)
            program = lower(passes.run(gm, config, log), config, log)
            verify_program(program)
            made = schedule(program, config, log, threads, level)
        verify_schedule(made)

        def call(args: list[Any]) -> Any:
            found.append((made, list(args)))
            return gm(*args)

        return call

    torch.compiler.reset()
    run = torch.compile(model, backend=compat.aot_backend(record, decompositions()), dynamic=False)
    with torch.no_grad():
        run(*inputs)
    assert len(found) == 1
    return found[0]


def steps(made: Schedule) -> list[str]:
    """For each step its target, or ``product``, ``attention`` or ``loops``."""
    out = []
    for s in made.steps:
        if isinstance(s, KernelCall):
            kinds = {type(t) for t in statements(s.kernel.body)}
            out.append("product" if Multiply in kinds else "attention" if Attend in kinds else "loops")
        else:
            out.append(str(s.target))
    return out


def exact(model: nn.Module, *inputs: torch.Tensor) -> Callable[[], Any]:
    """What the model gives with all that it is made of in float64."""
    return reference_of(copy.deepcopy(model).double(), *inputs)


def check(model: nn.Module, *inputs: torch.Tensor, kernels: list[str] | None = None, **more: Any) -> Schedule:
    """The interpreter and the machine both give eager's result; the schedule has these steps."""
    model = model.eval().requires_grad_(False)
    made, args = planned(model, *inputs, **more)
    if kernels is not None:
        assert steps(made) == kernels, str(made)
    expected = model(*inputs)
    expected = list(expected) if isinstance(expected, tuple) else [expected]
    reference = exact(model, *inputs)
    assert_as_accurate(run_schedule(made, args, arena=True), expected, reference)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="hotloop", dynamic=False, fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            result = compiled(*inputs)
            result = list(result) if isinstance(result, tuple) else [result]
            assert_as_accurate(result, expected, reference, check_stride=True)
    return made


class Block(nn.Module):
    """A function of its input and of parameters by name."""

    def __init__(self, f: Callable[..., Any], **sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.f = f
        for name, size in sizes.items():
            setattr(self, name, nn.Parameter(torch.randn(size)))

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.f(self, *inputs)
