"""Running sums, products and extremes against eager, as loop programs and as kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from check import check, check_schedule

from hotloop.ir.interpret import run_program
from hotloop.ir.interpret_kernel import run_schedule
from hotloop.ir.loops import Scan

Function = Callable[..., Any]
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
NAN, INF = float("nan"), float("inf")

SCANS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "cumsum": torch.cumsum,
    "cumprod": torch.cumprod,
    "cummax": torch.cummax,
    "cummin": torch.cummin,
    "logcumsumexp": torch.logcumsumexp,
}


def data(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(shape) > 0.4
    return torch.randn(shape).to(dtype) if dtype.is_floating_point else (torch.randn(shape) * 9).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("name", SCANS)
def test_scan(name: str, dtype: torch.dtype) -> None:
    scan = SCANS[name]
    if name == "logcumsumexp" and not dtype.is_floating_point:
        pytest.skip("eager has none")
    exact = not dtype.is_floating_point or name in ("cummax", "cummin")
    x = data(5, 7, 6, dtype=dtype)
    for dim in (0, 1, -1):
        program = check(lambda x, dim=dim: scan(x, dim), x, exact=exact)
        assert any(isinstance(op, Scan) for op in program.ops)
        check_schedule(lambda x, dim=dim: scan(x, dim), x)
    check(lambda x: scan(x, 1), x.transpose(0, 2), exact=exact)
    check_schedule(lambda x: scan(x, 1), x.transpose(0, 2))
    check(lambda x: scan(x, 1), x[:, ::2], exact=exact)
    check(lambda x: scan(x, 0), data(1, dtype=dtype), exact=exact)
    check(lambda x: scan(x, 0), data(dtype=dtype), exact=exact)
    check(lambda x: scan(x, 0), data(0, 3, dtype=dtype), exact=exact)
    check(lambda x: scan(x, 1), data(3, 0, dtype=dtype), exact=exact)


SPECIAL = [
    [1.0, NAN, 3.0, NAN, 2.0], [-INF, -INF, 1.0, INF, INF], [INF, -INF, NAN, INF, 0.0],
    [0.0, -0.0, 0.0, -0.0, 1.0], [-0.0, 0.0, 2.0, 2.0, 2.0], [NAN, 1.0, 5.0, NAN, -INF],
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", SCANS)
def test_scan_of_special_values(name: str, dtype: torch.dtype) -> None:
    scan = SCANS[name]
    x = torch.tensor(SPECIAL, dtype=dtype)
    for f in (lambda x: scan(x, 1), lambda x: scan(x, 0)):
        check(f, x)
        check_schedule(f, x)


def test_signed_zeros() -> None:
    x = torch.tensor([[-0.0, -0.0], [-0.0, 0.0], [0.0, -0.0]])
    extremes = (lambda x: x.cummax(1)[0], lambda x: x.cummin(0)[0])
    for f in (lambda x: x.cumsum(1), lambda x: x.cumprod(1), *extremes):
        (got,) = run_schedule(check_schedule(f, x), [x])
        (same,) = run_program(check(f, x), [x])
        assert torch.equal(got.signbit(), f(x).signbit()) and torch.equal(same.signbit(), got.signbit())


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_scan_into_another_dtype(source: torch.dtype, dtype: torch.dtype) -> None:
    x = data(4, 9, dtype=source)
    check(lambda x: (x.cumsum(1, dtype=dtype), x.cumprod(0, dtype=dtype)), x)
    check_schedule(lambda x: (x.cumsum(1, dtype=dtype), x.cumprod(0, dtype=dtype)), x)


def test_a_long_sum_is_as_accurate_as_eagers() -> None:
    """The running value of float32 is a double, and that of bfloat16 a float."""
    x = torch.rand(2, 30000)
    check(lambda x: x.cumsum(1), x, exact=True)
    check(lambda x: x.cumsum(1), x[:, :3000].bfloat16(), exact=True)


def test_values_before_a_scan_are_computed_in_it() -> None:
    schedule = check_schedule(lambda x: torch.exp(x * 2).cumsum(-1), torch.randn(9, 40))
    (step,) = schedule.steps
    assert step.kernel.name.startswith("cpp_scan_mul_exp_cumsum")


def test_gradients() -> None:
    """The derivative of a running sum is one in the other direction: the reversal is read by the scan."""
    schedule = check_schedule(lambda g: g.flip(1).cumsum(1), torch.randn(9, 40))
    assert len(schedule.steps) == 1
