"""Products of few elements are loops, and larger ones a library's.

What comes in: matrix products and convolutions of every kind. What holds: see check.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from check import check, lowered

from hotloop.ir.loops import Extern

F = torch.nn.functional
FLOATS = (torch.float32, torch.float64, torch.bfloat16)

PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, ((5, 7), (7, 4))),
    "mm of nothing": (torch.mm, ((5, 0), (0, 4))),
    "mm, transposed": (lambda x, y: x.t() @ y.t(), ((7, 5), (4, 7))),
    "bmm": (torch.bmm, ((3, 5, 7), (3, 7, 4))),
    "mv": (torch.mv, ((5, 7), (7,))),
    "dot": (torch.dot, ((9,), (9,))),
    "addmm": (lambda c, x, y: torch.addmm(c, x, y, beta=2, alpha=3), ((4,), (5, 7), (7, 4))),
    "addmm without c": (lambda c, x, y: torch.addmm(c / 0, x, y, beta=0), ((4,), (5, 7), (7, 4))),
    "addmv": (lambda c, x, y: torch.addmv(c, x, y, beta=2), ((5,), (5, 7), (7,))),
    "baddbmm": (lambda c, x, y: torch.baddbmm(c, x, y, alpha=2), ((3, 5, 4), (3, 5, 7), (3, 7, 4))),
    "addbmm": (lambda c, x, y: torch.addbmm(c, x, y, beta=2), ((5, 4), (3, 5, 7), (3, 7, 4))),
    "addr": (lambda c, x, y: torch.addr(c, x, y, alpha=3), ((5, 4), (5,), (4,))),
}


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int8], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_small_products_are_loops(name: str, dtype: torch.dtype) -> None:
    f, sizes = PRODUCTS[name]
    if "without" in name and not dtype.is_floating_point:
        pytest.skip("integers have no infinity to ignore")
    check(f, *((torch.randn(s) * 3).to(dtype) for s in sizes))


CONVOLUTIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "2-D": (
        lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1, dilation=2, groups=2),
        ((2, 4, 9, 8), (6, 2, 3, 2), (6,)),
    ),
    "1-D": (lambda x, w: F.conv1d(x, w, padding="same"), ((2, 4, 9), (6, 4, 3))),
    "3-D": (F.conv3d, ((1, 2, 4, 4, 4), (2, 2, 2, 2, 2))),
    "transposed": (
        lambda x, w, b: F.conv_transpose2d(
            x, w, b, stride=2, padding=1, output_padding=1, dilation=2, groups=2
        ),
        ((2, 4, 4, 5), (4, 3, 3, 2), (6,)),
    ),
    "transposed, 1-D": (lambda x, w: F.conv_transpose1d(x, w, stride=3), ((2, 4, 5), (4, 3, 2))),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_small_convolutions_are_loops(name: str, dtype: torch.dtype) -> None:
    f, sizes = CONVOLUTIONS[name]
    check(f, *(torch.randn(s).to(dtype) for s in sizes))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bilinear_forms(dtype: torch.dtype) -> None:
    sizes = ((6, 4), (6, 5), (3, 4, 5), (3,))
    check(F.bilinear, *(torch.randn(s).to(dtype) for s in sizes))


def test_larger_ones_are_a_librarys() -> None:
    for f, sizes in ((torch.mm, ((64, 64), (64, 64))), (F.conv2d, ((1, 16, 32, 32), (16, 16, 3, 3)))):
        program = lowered(f, *(torch.randn(s) for s in sizes))
        assert any(isinstance(op, Extern) for op in program.ops)
