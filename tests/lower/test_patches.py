"""Windows as columns of a matrix, and their sums in the plane, against eager."""

from __future__ import annotations

import pytest
import torch
from check import check, check_schedule
from torch.nn import functional

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

#: kernel, dilation, padding, stride
WINDOWS = [
    (2, 1, 0, 1),
    (2, 1, 0, 2),
    ((3, 2), 1, (1, 0), (2, 3)),
    (3, 2, 1, 1),
    ((2, 3), (3, 2), 2, (2, 1)),
    (2, 2, 1, 3),
    (1, 1, 0, 2),
    ((8, 7), 1, 0, 1),
]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows_to_columns_and_back(window: tuple[int, ...]) -> None:
    x = torch.randn(2, 3, 8, 7)
    check(lambda x: functional.unfold(x * 2, *window), x)
    check_schedule(lambda x: functional.unfold(x * 2, *window), x)
    columns = functional.unfold(x, *window)
    check(lambda c: functional.fold(c * 2, (8, 7), *window), columns)
    check_schedule(lambda c: functional.fold(c * 2, (8, 7), *window), columns)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 6, 6).to(dtype)
    check(lambda x: functional.unfold(x, 3, 1, 1, 1), x, exact=True)
    check(lambda c: functional.fold(c, (6, 6), 3, 1, 1, 1), torch.randn(2, 27, 36).to(dtype))


def test_a_plane_without_a_batch_and_strides() -> None:
    check(lambda x: functional.unfold(x, 2), torch.randn(3, 5, 4))
    check(lambda x: functional.unfold(x, 2), torch.randn(2, 4, 5, 3).permute(0, 3, 2, 1))
    check(lambda c: functional.fold(c, (5, 4), 2), torch.randn(12, 12))
    check(lambda c: functional.fold(c, (5, 4), 2), torch.randn(2, 12, 12).transpose(1, 2))


def test_an_empty_batch() -> None:
    check(lambda x: functional.unfold(x, 2), torch.randn(0, 3, 5, 4))
    check(lambda c: functional.fold(c, (5, 4), 2), torch.randn(0, 12, 12), own=False)
