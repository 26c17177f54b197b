"""Equal kernels over many buffers become one call: with the same results, where nothing is between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hotloop.codegen.cpp import print_functions
from hotloop.errors import VerifyError
from hotloop.ir.interpret_kernel import run_schedule
from hotloop.ir.kernel import KernelCall, Schedule
from hotloop.ir.verify import verify_schedule
from judge import assert_as_accurate
from schedule.test_schedule import captured, scheduled

SIZES = [(3, 5), (1,), (17,), (40, 33), (1024,), (1025,), (4096,), (2,), (100, 333)]


def tensors(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(size) for size in SIZES]


def momentum(*given: Tensor) -> list[Tensor]:
    """A new tensor for each pair, and one of each pair overwritten."""
    out = []
    for a, b in zip(given[::2], given[1::2], strict=True):
        a.mul_(0.9).add_(b)
        out.append(b - 0.1 * a)
    return out


def pairs() -> list[Tensor]:
    return [t for pair in zip(tensors(0), tensors(1), strict=True) for t in pair]


def calls(made: Schedule) -> list[KernelCall]:
    return [s for s in made.steps if isinstance(s, KernelCall)]


def made_of(f: Callable[..., Any], *inputs: Tensor, threads: int = 2) -> Schedule:
    made = scheduled(captured(f, *inputs), threads)
    verify_schedule(made)
    return made


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_one_call_for_all(threads: int) -> None:
    inputs = pairs()
    made = made_of(momentum, *[t.clone() for t in inputs], threads=threads)
    batches = [c for c in calls(made) if c.points]
    assert len(batches) == 1
    assert len(calls(made)) <= 2, "only the pair of single numbers is apart"
    assert sorted(batches[0].points) == sorted(t.numel() for t in tensors(0) if t.numel() > 1)
    own, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
    got = run_schedule(made, list(own), arena=True)
    assert_as_accurate([*got, *own], [*momentum(*theirs), *theirs])


@pytest.mark.parametrize("parallel", ["openmp", "torch"])
def test_compiled(parallel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    if parallel == "torch":
        monkeypatch.setattr("hotloop.backend._openmp", lambda cxx: False)
    run = torch.compile(momentum, backend="hotloop", options={"parallel_threshold": 1})
    own, theirs = pairs(), pairs()
    for _ in range(3):
        assert_as_accurate([*run(*own), *own], [*momentum(*theirs), *theirs])


def test_what_comes_between_stays_between() -> None:
    def f(*given: Tensor) -> list[Tensor]:
        """Each tensor is overwritten by twice the one before it."""
        out = []
        for a, b in itertools.pairwise(given):
            double = 2 * a
            b.copy_(double)
            out.append(b + 1)
        return out

    inputs = [torch.randn(33) for _ in range(6)]
    made = made_of(f, *[t.clone() for t in inputs])
    own, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
    got = run_schedule(made, list(own), arena=True)
    assert_as_accurate([*got, *own], [*f(*theirs), *theirs])


def test_what_must_follow_a_batch_follows_it() -> None:
    def f(*given: Tensor) -> list[Tensor]:
        """Numbers that each of two kernels reads, and that are then overwritten."""
        out = []
        for a, n in zip(given[::2], given[1::2], strict=True):
            out.append(a * n)
            n.add_(1)
        return out

    inputs = [t for k in range(6) for t in (torch.randn(30 + k), torch.randn(()))]
    made = made_of(f, *[t.clone() for t in inputs])
    assert len(calls(made)) == 2
    own, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
    got = run_schedule(made, list(own), arena=True)
    assert_as_accurate([*got, *own], [*f(*theirs), *theirs])


def test_parts_that_share_nothing_are_one_after_the_other() -> None:
    def f(*given: Tensor) -> list[Tensor]:
        """Steps over a list, as optimizers make them: what one tensor needs is far apart."""
        squares = [x * x for x in given]
        means = [s.mean() for s in squares]
        return [x / (m + 1) + s for x, m, s in zip(given, means, squares, strict=True)]

    inputs = [torch.randn(20 + k) for k in range(20)]
    made = made_of(f, *inputs)
    assert len(calls(made)) <= 20 + 1, "a row of each tensor, in a kernel"
    assert_as_accurate(run_schedule(made, list(inputs), arena=True), f(*inputs))


def test_rows_that_meet_are_refused() -> None:
    made = made_of(momentum, *pairs())
    (at,) = [k for k, s in enumerate(made.steps) if isinstance(s, KernelCall) and s.points]
    step = made.steps[at]
    assert isinstance(step, KernelCall)
    width = len(step.kernel.params)
    twice = replace(step, args=(*step.args[:-width], *step.args[:width]))
    with pytest.raises(VerifyError, match="two rows touch"):
        verify_schedule(replace(made, steps=(*made.steps[:at], twice, *made.steps[at + 1 :])))
    longer = replace(step, points=tuple(n + 1 for n in step.points))
    with pytest.raises(VerifyError, match="leaves"):
        verify_schedule(replace(made, steps=(*made.steps[:at], longer, *made.steps[at + 1 :])))


def test_what_all_points_share_is_computed_once_a_row() -> None:
    """Two divisions a vector cost more than the memory that it waits for."""

    def scaled(scale: Tensor, *given: Tensor) -> list[Tensor]:
        return [a.mul_(1.0 / scale).add_(b) for a, b in zip(given[::2], given[1::2], strict=True)]

    made = made_of(scaled, torch.tensor(3.0), *pairs())
    (batch,) = [c.kernel for c in calls(made) if c.points]
    (function,) = print_functions([batch], "avx512")
    before, loop, inside = function.text.partition("for (; ")
    assert loop and "1.0f / " in before
    assert "1.0f / " not in inside
    assert inside.count("__builtin_prefetch(") == 2, "the two tensors are asked for ahead"
