"""Samples of volumes at computed places, against eager."""

from __future__ import annotations

import math

import pytest
import torch
from check import check, check_schedule

sample = torch.ops.aten.grid_sampler_3d


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("mode", [0, 1])
def test_grid_sampler_3d(mode: int, padding: int, corners: bool) -> None:
    x, grid = torch.randn(2, 3, 4, 5, 6), torch.randn(2, 3, 2, 4, 3)
    check(lambda x, g: sample(x, g, mode, padding, corners), x, grid)
    check(lambda x, g: sample(x * 2, g * 2, mode, padding, corners), x.double(), grid.double())
    check(lambda x, g: sample(x, g, mode, padding, corners), x[:, :, :1, :, :2], grid[..., :1, :, :])
    if padding != 2:
        grid.view(-1)[:6] = torch.tensor([math.nan, math.inf, -math.inf, 1e20, -1.0, 1.0])
    check(lambda x, g: sample(x, g, mode, padding, corners), x, grid)
    check_schedule(lambda x, g: sample(x, g, mode, padding, corners), x, grid)


def test_empty_volumes() -> None:
    x, grid = torch.randn(0, 3, 4, 5, 6), torch.randn(0, 3, 2, 4, 3)
    check(lambda x, g: sample(x, g, 0, 0, False), x, grid, own=False)
