"""Distances between vectors, and their derivatives, against eager."""

from __future__ import annotations

import math

import pytest
import torch
from check import check, check_schedule

forward, backward = torch.ops.aten._cdist_forward, torch.ops.aten._cdist_backward
NORMS = [0.0, 0.5, 1.0, 2.0, 3.0, math.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("p", NORMS)
def test_distances(p: float, dtype: torch.dtype) -> None:
    x, y = torch.randn(2, 1, 4, 5, dtype=dtype), torch.randn(3, 6, 5, dtype=dtype)
    check(lambda x, y: forward(x * 2, y, p, None), x, y)
    check_schedule(lambda x, y: forward(x * 2, y, p, 2), x, y)
    check(lambda x, y: forward(x, y, p, 2), y[0].t().contiguous().t(), y[1])
    check(lambda x, y: torch.dist(x, y, p), y[:, :1], y)
    check(lambda x, y: forward(x, y, p, None), y[:, :0], y, own=False)


@pytest.mark.parametrize("p", NORMS)
def test_the_derivative(p: float) -> None:
    x, y, g = torch.randn(3, 4, 5), torch.randn(3, 6, 5), torch.randn(3, 4, 6)
    y[:, 1] = x[:, 1]  # a distance of 0 has no derivative
    y[0, 2, 3] = x[0, 0, 3]
    check(lambda g, x, y, d: backward(g, x, y, p, d), g, x, y, torch.cdist(x, y, p))


def test_euclidean_distances_of_many_vectors_are_a_product() -> None:
    x, y = torch.randn(30, 5), torch.randn(6, 5)
    check(lambda x, y: forward(x, y, 2.0, None), x, y, own=False)
    check(lambda x, y: forward(x, y, 2.0, 2), x, y)
    check(lambda x, y: forward(x, y, 2.0, 1), y, y, own=False)
    check(lambda x, y: forward(x, y, 1.0, 1), x, y)
