"""Compiled steps of optimizers: right, without calls through PyTorch, one kernel for all parameters.

What comes in: parameters of a few sizes with random gradients. What goes out: nothing. What holds: after
several steps the parameters are as near to those of a float64 run as eager's are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hotloop import backend
from hotloop.ir.kernel import KernelCall, Schedule
from judge import assert_as_accurate

STEPS = 5
SIZES = [(16, 33)] * 5 + [(33,)] * 5 + [()]

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "Adam": lambda p: torch.optim.Adam(p, 1e-2, foreach=False),
    "Adam_amsgrad": lambda p: torch.optim.Adam(p, 1e-2, foreach=True, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
    "AdamW_foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, 1e-2, foreach=False),
    "SGD_momentum": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, foreach=False),
    "SGD_foreach": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, nesterov=True, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5, centered=True, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, lr_decay=0.1, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-2, foreach=True),
    "RAdam": lambda p: torch.optim.RAdam(p, 1e-2, foreach=True),
    "Adamax": lambda p: torch.optim.Adamax(p, 1e-2, foreach=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 1e-2, foreach=True),
    "ASGD": lambda p: torch.optim.ASGD(p, 1e-2, foreach=True),
    "Rprop": lambda p: torch.optim.Rprop(p, 1e-2, foreach=True),
    "maximize": lambda p: torch.optim.AdamW(p, 1e-2, maximize=True, foreach=True),
}


@pytest.fixture
def schedules(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Schedule]]:
    """What is scheduled while the test runs."""
    torch._dynamo.reset()
    found: list[Schedule] = []
    original = backend.settle

    def settle(*args: Any) -> Schedule:
        found.append(original(*args))
        return found[-1]

    monkeypatch.setattr(backend, "settle", settle)
    yield found
    torch._dynamo.reset()


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in SIZES]


def gradients(number: int) -> list[Tensor]:
    torch.manual_seed(100 + number)
    return [torch.randn(size) for size in SIZES]


def after_steps(
    make: Optimizer, dtype: torch.dtype, compiled: bool, clip: bool = False, rates: list[float] | None = None
) -> list[Tensor]:
    """The parameters after some steps."""
    own = parameters(dtype)
    optimizer = make(own)

    def step() -> None:
        if clip:
            nn.utils.clip_grad_norm_(own, 1.0)
        optimizer.step()

    run = torch.compile(step, backend="hotloop") if compiled else step
    for number in range(STEPS):
        for p, g in zip(own, gradients(number), strict=True):
            p.grad = g.to(dtype)
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates[number]
        run()
    return [p.detach() for p in own]


def check(make: Optimizer, dtype: torch.dtype = torch.float32, **more: Any) -> None:
    got = after_steps(make, dtype, compiled=True, **more)
    eager = after_steps(make, dtype, compiled=False, **more)
    exact = after_steps(make, torch.float64, compiled=False, **more)
    assert_as_accurate(got, eager, exact)


@pytest.mark.filterwarnings("ignore:Profiler record function")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(name: str, schedules: list[Schedule]) -> None:
    check(OPTIMIZERS[name])
    assert schedules
    for plan in schedules:
        calls = [s for s in plan.steps if isinstance(s, KernelCall)]
        others = [str(s.target) for s in plan.steps if not isinstance(s, KernelCall)]
        assert not others, "left to PyTorch"
        # One goes through all parameters and their state, one or two through the numbers that go with them;
        # the parameter that is a number itself goes with those.
        assert len(calls) <= 6, [call.kernel.name for call in calls]
        # For each parameter one kernel, which writes it and its state in place, a few for all numbers of
        # steps together, and one to write back a number that several of them read.


def test_steps_in_bfloat16(schedules: list[Schedule]) -> None:
    check(OPTIMIZERS["SGD_foreach"], torch.bfloat16)


def test_a_rate_that_changes_is_not_compiled_each_time(schedules: list[Schedule]) -> None:
    check(OPTIMIZERS["AdamW"], rates=[0.01 * 0.5**k for k in range(STEPS)])
    assert len(schedules) <= 3


def test_clipped_gradients(schedules: list[Schedule]) -> None:
    check(OPTIMIZERS["AdamW_foreach"], clip=True)


def test_fused_steps_are_pytorchs(schedules: list[Schedule]) -> None:
    check(lambda p: torch.optim.AdamW(p, 1e-2, fused=True))


LISTS: dict[str, Callable[[list[Tensor], list[Tensor], list[Tensor]], Any]] = {
    "add": lambda a, b, c: torch._foreach_add(a, b, alpha=3),
    "add_scalars": lambda a, b, c: torch._foreach_add(a, [1.0, 2.0, 3.0]),
    "sub_tensor": lambda a, b, c: torch._foreach_mul(a, b[0][0, 0]),
    "addcmul": lambda a, b, c: torch._foreach_addcmul(a, b, c, 0.3),
    "addcdiv_scalars": lambda a, b, c: torch._foreach_addcdiv(a, b, c, [0.5, 2.0, 3.0]),
    "lerp": lambda a, b, c: torch._foreach_lerp(a, b, c),
    "maximum": lambda a, b, c: torch._foreach_maximum(a, b) + torch._foreach_maximum(a, 0.3),
    "clamp": lambda a, b, c: torch._foreach_clamp_min(a, b) + torch._foreach_clamp_max(a, 0.3),
    "pow": lambda a, b, c: torch._foreach_pow(torch._foreach_abs(a), 2.5) + torch._foreach_pow(2.0, b),
    "norm": lambda a, b, c: torch._foreach_norm(a, 2) + torch._foreach_norm(a, 1),
    "unary": lambda a, b, c: [y for n in ("sqrt", "sign", "exp", "neg", "reciprocal", "tanh", "frac", "erf")
                              for y in getattr(torch, f"_foreach_{n}")(torch._foreach_abs(a))],
}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_operators_on_lists(name: str, schedules: list[Schedule]) -> None:
    lists = [[torch.randn(3, 5), torch.randn(1, 9), torch.randn(2, 2)] for _ in range(3)]
    wide = [[t.double() for t in x] for x in lists]
    got = torch.compile(LISTS[name], backend="hotloop", fullgraph=True)(*lists)
    assert_as_accurate(got, LISTS[name](*lists), lambda: LISTS[name](*wide))
    assert all(isinstance(s, KernelCall) for plan in schedules for s in plan.steps)


def test_operators_on_lists_that_write() -> None:
    torch._dynamo.reset()

    def f(a: list[Tensor], b: list[Tensor]) -> None:
        torch._foreach_copy_(a, b)
        torch._foreach_mul_(a, 3)
        torch._foreach_zero_(b)

    def run(g: Callable[..., None]) -> list[Tensor]:
        torch.manual_seed(0)
        a, b = [torch.randn(4), torch.randn(2, 3)], [torch.randn(4), torch.randn(2, 3)]
        g(a, b)
        return [*a, *b]

    assert_as_accurate(run(torch.compile(f, backend="hotloop")), run(f))
