"""Pools and resizing through lowering against eager."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from check import check, lowered
from torch.nn import functional

from hotloop.ir.loops import Extern, Reduce

Function = Callable[..., Any]
FLOATS = (torch.float32, torch.bfloat16, torch.float64)


def image(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


AVERAGES: dict[str, tuple[Function, tuple[int, ...]]] = {
    "1d": (lambda x: functional.avg_pool1d(x, 3, 2, 1), (2, 3, 11)),
    "2d": (lambda x: functional.avg_pool2d(x, 2), (2, 3, 8, 7)),
    "2d_unbatched": (lambda x: functional.avg_pool2d(x, 2), (3, 8, 7)),
    "2d_pad": (lambda x: functional.avg_pool2d(x, 3, 2, 1), (2, 3, 8, 7)),
    "2d_no_pad_count": (lambda x: functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False), (2, 3, 8, 7)),
    "2d_ceil": (lambda x: functional.avg_pool2d(x, (3, 2), 2, (1, 0), ceil_mode=True), (2, 3, 8, 7)),
    "2d_ceil_no_pad_count": (
        lambda x: functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), (1, 2, 8, 6),
    ),
    "2d_divisor": (lambda x: functional.avg_pool2d(x, 2, 1, divisor_override=3), (2, 3, 5, 5)),
    "2d_large": (lambda x: functional.avg_pool2d(x, 7, 2, 3), (2, 3, 12, 13)),
    "2d_large_ceil": (lambda x: functional.avg_pool2d(x, 7, 4, 3, True, False), (2, 3, 12, 13)),
    "3d": (lambda x: functional.avg_pool3d(x, 2, 2, 1), (1, 2, 4, 5, 6)),
    "adaptive": (lambda x: functional.adaptive_avg_pool2d(x, (2, 3)), (2, 3, 8, 9)),
    "adaptive_uneven": (lambda x: functional.adaptive_avg_pool2d(x, (3, 5)), (2, 3, 7, 11)),
    "adaptive_up": (lambda x: functional.adaptive_avg_pool2d(x, 7), (2, 3, 5, 3)),
    "adaptive_one": (lambda x: functional.adaptive_avg_pool2d(x, 1), (2, 3, 7, 11)),
    "adaptive_1d": (lambda x: functional.adaptive_avg_pool1d(x, 3), (2, 3, 10)),
    "adaptive_3d": (lambda x: functional.adaptive_avg_pool3d(x, (2, 3, 1)), (1, 2, 4, 5, 3)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", sorted(AVERAGES))
def test_averages(name: str, dtype: torch.dtype) -> None:
    f, shape = AVERAGES[name]
    if name == "3d" and dtype is torch.bfloat16:
        pytest.skip("eager has none")
    check(f, image(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", sorted(AVERAGES))
def test_derivatives_of_averages(name: str, dtype: torch.dtype) -> None:
    f, shape = AVERAGES[name]
    if name == "3d" and dtype is torch.bfloat16:
        pytest.skip("eager has none")
    own = name not in ("adaptive_uneven", "adaptive_up", "adaptive_1d", "adaptive_3d")  # shares that overlap
    x = image(*shape, dtype=dtype)
    check(lambda x, g: torch.func.vjp(f, x)[1](g)[0], x, image(*f(x).shape, dtype=dtype), own=own)
    if x.ndim == 4 and dtype is torch.float32 and name != "adaptive_one":  # a mean, and views of it
        y = x.to(memory_format=torch.channels_last)
        check(lambda x, g: torch.func.vjp(f, x)[1](g)[0], y, torch.randn_like(f(y)), own=own)


MAXIMA: dict[str, tuple[Function, tuple[int, ...]]] = {
    "1d": (lambda x: functional.max_pool1d(x, 3, 2, 1), (2, 3, 11)),
    "2d": (lambda x: functional.max_pool2d(x, 2), (2, 3, 8, 7)),
    "2d_pad": (lambda x: functional.max_pool2d(x, 3, 2, 1), (3, 8, 7)),
    "2d_ceil": (lambda x: functional.max_pool2d(x, (3, 2), 2, (1, 0), ceil_mode=True), (2, 3, 8, 7)),
    "2d_dilated": (lambda x: functional.max_pool2d(x, 3, 1, 1, 2), (2, 3, 8, 7)),
    "3d": (lambda x: functional.max_pool3d(x, 2, 2, 1), (1, 2, 4, 5, 6)),
}


@pytest.mark.parametrize("dtype", (*FLOATS, torch.int64))
@pytest.mark.parametrize("name", sorted(MAXIMA))
def test_maxima(name: str, dtype: torch.dtype) -> None:
    f, shape = MAXIMA[name]
    if not dtype.is_floating_point and name in ("1d", "3d"):
        pytest.skip("eager has none for integers")
    x = image(*shape) * 9
    check(f, x.to(dtype), exact=True)


def test_maxima_with_positions() -> None:
    both = lambda x: functional.max_pool2d(x, 3, 2, 1, return_indices=True)  # noqa: E731
    x = image(2, 3, 8, 7)
    check(both, x, exact=True)
    check(both, x.round(), exact=True)
    check(lambda x: functional.max_pool2d(x, 3, 2, 1, 2, True, True), x.bfloat16(), exact=True)
    check(lambda x: functional.max_pool3d(x, 2, 2, 1, return_indices=True), image(1, 2, 4, 5, 6), exact=True)
    check(both, torch.full((1, 1, 5, 5), -math.inf), exact=True)
    holes = torch.where(torch.rand(2, 3, 8, 7) < 0.3, math.nan, x)
    check(both, holes, exact=True)
    check(lambda x: functional.max_pool2d(x, 2), holes, exact=True)


def test_large_windows_are_reductions() -> None:
    x = image(1, 2, 14, 15)
    program = check(lambda x: functional.max_pool2d(x, 7, 3, 2), x, exact=True)
    assert any(isinstance(op, Reduce) for op in program.ops)
    program = check(
        lambda x: functional.max_pool2d(x, 7, 3, 2, return_indices=True), x, own=False, exact=True
    )
    assert any(isinstance(op, Extern) for op in program.ops)


def test_windows_inside_the_plane_have_no_masks() -> None:
    (op,) = lowered(lambda x: functional.max_pool2d(x, 2), image(1, 2, 8, 8)).ops
    assert not isinstance(op, Extern) and "masked" not in repr(op.body) and "where" not in repr(op.body)


def test_channels_last_is_kept() -> None:
    x = image(2, 5, 8, 6).to(memory_format=torch.channels_last)
    check(lambda x: functional.max_pool2d(x, 3, 2, 1, return_indices=True), x, exact=True)
    check(
        lambda x: (
            functional.avg_pool2d(x, 2),
            functional.adaptive_avg_pool2d(x, 2),
            functional.adaptive_avg_pool2d(x, 1),
        ),
        x,
    )
    check(lambda x: functional.interpolate(x, scale_factor=2, mode="nearest"), x, exact=True)
    check(lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"), x)


SIZES = (
    {"scale_factor": 2},
    {"scale_factor": 3.0},
    {"scale_factor": 1.7},
    {"scale_factor": 0.6},
    {"size": 13},
    {"size": 4},
)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("recompute", [None, True])
def test_nearest(mode: str, size: dict[str, Any], recompute: bool | None) -> None:
    if recompute and "size" in size:
        pytest.skip("no scale to recompute")

    def resize(x: torch.Tensor) -> torch.Tensor:
        return functional.interpolate(x, mode=mode, recompute_scale_factor=recompute, **size)

    for shape in ((2, 3, 7), (2, 3, 7, 10), (1, 2, 3, 4, 5)):
        check(resize, image(*shape), exact=True)
    check(resize, image(*shape, dtype=torch.bfloat16), exact=True)


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_linear(dtype: torch.dtype, size: dict[str, Any], corners: bool) -> None:
    for shape, mode in (((2, 3, 7), "linear"), ((2, 3, 7, 10), "bilinear"), ((1, 2, 3, 4, 5), "trilinear")):
        check(
            lambda x, mode=mode: functional.interpolate(x, mode=mode, align_corners=corners, **size),
            image(*shape, dtype=dtype),
        )


def test_resizing_by_two_indexes_without_reading() -> None:
    (op,) = lowered(lambda x: functional.interpolate(x, scale_factor=2), image(1, 2, 4, 4)).ops
    assert not isinstance(op, Extern) and op.body.op == "load"


def test_bicubic_stays_with_pytorch() -> None:
    program = check(
        lambda x: functional.interpolate(x, scale_factor=2, mode="bicubic"), image(1, 2, 4, 4), own=False
    )
    assert any(isinstance(op, Extern) for op in program.ops)
