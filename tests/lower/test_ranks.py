"""Sorts of short rows and searches in them, maxima of parts of a plane, and operators beside these.

What comes in: operators whose loops compare or count. What holds: see check.py.
"""

from __future__ import annotations

import pytest
import torch
from check import check, lowered

from hotloop.ir.loops import Extern

F = torch.nn.functional
NAN = float("nan")


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool], ids=str
)
def test_short_rows_are_sorted_by_rank(dtype: torch.dtype, descending: bool) -> None:
    x = torch.randint(0, 4, (5, 9, 3)).to(dtype)  # with ties
    for dim in (0, 1, -1):
        check(lambda x, d=dim: x.sort(dim=d, descending=descending, stable=True), x, exact=True)


def test_nan_is_the_largest() -> None:
    x = torch.tensor([1.0, NAN, -1.0, float("inf"), NAN, 0.0, -0.0])
    check(lambda x: x.sort(stable=True), x, exact=True)
    check(lambda x: x.sort(stable=True, descending=True), x, exact=True)


def test_long_rows_are_sorted_by_pytorch() -> None:
    program = lowered(lambda x: x.sort()[0], torch.randn(3, 100))
    assert any(isinstance(op, Extern) for op in program.ops)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32], ids=str)
def test_positions_in_a_sorted_row(dtype: torch.dtype, right: bool) -> None:
    row = torch.tensor([-2, 0, 0, 1, 3]).to(dtype)
    x = torch.randint(-3, 5, (4, 6)).to(dtype)
    check(lambda r, x: torch.searchsorted(r, x, right=right), row, x, exact=True)
    check(lambda r, x: torch.bucketize(x, r, right=right, out_int32=True), row, x, exact=True)
    rows = torch.randint(-3, 5, (4, 7)).sort().values.to(dtype)
    check(lambda r, x: torch.searchsorted(r, x, right=right), rows, x, exact=True)
    unsorted = torch.randint(-3, 5, (4, 7)).to(dtype)
    check(
        lambda r, x: torch.searchsorted(r, x, right=right, sorter=r.argsort(stable=True)),
        unsorted,
        x,
        exact=True,
    )
    check(lambda r: torch.searchsorted(r, 1, right=right), row, exact=True)


def test_nan_goes_behind_all() -> None:
    check(
        lambda r, x: torch.searchsorted(r, x), torch.tensor([0.0, 1.0]), torch.tensor([NAN, 0.5]), exact=True
    )


@pytest.mark.parametrize("size", [(5, 7), (6, 6), (3, 4)])
def test_maxima_of_parts_of_a_plane(size: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *size)
    x[0, 0, 1, 1] = NAN
    x[1, 1] = -float("inf")
    check(lambda x: F.adaptive_max_pool2d(x, (3, 4), return_indices=True), x, exact=True)
    check(lambda x: F.adaptive_max_pool1d(x[0], 3, return_indices=True), x, exact=True)
    check(lambda x: F.adaptive_max_pool3d(x, (2, 3, 2), return_indices=True), x, exact=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_elementwise_operators(dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-4.3, 4.3, 33), torch.tensor([NAN, 0.0, -0.0, 1e4])]).to(dtype)
    n = torch.arange(37) - 12
    check(torch.ldexp, x, n)
    check(torch.angle, x)
    check(lambda x: torch.polygamma(0, x), x)
    check(lambda x: torch.polygamma(1, x), x)
    check(lambda x: x.narrow_copy(0, 3, 5), x, exact=True)
    if dtype is not torch.bfloat16:
        check(lambda x: torch.nextafter(x, -x), x, exact=True)


@pytest.mark.parametrize("p", [0, 1, 2, 3, float("inf")])
def test_distances(p: float) -> None:
    check(lambda x, y: torch.dist(x, y, p), torch.randn(4, 5), torch.randn(5))


def test_linspace_between_tensors() -> None:
    for f in (
        lambda x: torch.linspace(x, 3, 7),
        lambda x: torch.linspace(-2.0, x, 8),
        lambda x: torch.linspace(x, x * 3, 1),
    ):
        check(f, torch.tensor(1.25))


def test_samples_of_a_grid() -> None:
    x, grid = torch.randn(2, 3, 5, 6), torch.rand(2, 4, 4, 2) * 2.4 - 1.2
    for mode in ("bilinear", "nearest", "bicubic"):
        for padding in ("zeros", "border", "reflection"):
            check(
                lambda x, g, m=mode, p=padding: F.grid_sample(x, g, m, p, align_corners=False),
                x,
                grid,
                own=False,
            )
