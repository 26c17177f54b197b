"""Python expressions that make sample tensors: what the dumps that run by themselves take as inputs.

What comes in: sizes, strides and dtype, or a constant. What goes out: an expression of plain torch. What
holds in between: integers are 0 or 1, so that they serve as indices into anything; a tensor has the strides
that were asked for. Used by ``graph/runnable.py`` and ``codegen/output_code.py``.

Samples are no variances, no probabilities and no positions in a vocabulary, as the inputs of a backward graph
are: ``describe`` says in a few numbers what the true inputs are like, and ``redraw`` makes samples like them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["constant", "describe", "redraw", "sample"]

#: Constants up to this many elements are written out.
_LITERAL = 256


def sample(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> str:
    """An expression for a random tensor."""
    if _dense(sizes, strides):
        return _filled(list(sizes), dtype)
    reach = 0 if 0 in sizes else 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    return f"{_filled([reach], dtype)}.as_strided({tuple(sizes)}, {tuple(strides)})"


def constant(tensor: torch.Tensor) -> str:
    """An expression for a constant: its values where they are few, values of the same range otherwise."""
    sizes, dtype = list(tensor.shape), tensor.dtype
    if tensor.numel() == 0:
        return f"torch.empty({sizes}, dtype={dtype})"
    if tensor.numel() <= _LITERAL and not dtype.is_complex:
        values = repr(tensor.tolist()).replace("nan", "float('nan')").replace("inf", "float('inf')")
        return f"torch.tensor({values}, dtype={dtype})"
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return sample(sizes, tensor.stride(), dtype)
    low, high = int(tensor.min()), int(tensor.max())
    return f"torch.randint({low}, {high + 1}, {sizes}, dtype={dtype})"


def _filled(sizes: list[int], dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return f"torch.randint(2, {sizes}).bool()"
    if dtype.is_floating_point or dtype.is_complex:
        if dtype.itemsize == 1:  # float8: torch.randn has no such thing
            return f"torch.randn({sizes}).to({dtype})"
        return f"torch.randn({sizes})" if dtype is torch.float32 else f"torch.randn({sizes}, dtype={dtype})"
    return f"torch.randint(2, {sizes}, dtype={dtype})"


def _dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for n, s in zip(reversed(sizes), reversed(strides), strict=True):
        if n > 1 and s != expected:
            return False
        expected *= max(n, 1)
    return True


# --- what the true inputs are like --------------------------------------------------------------------------


def describe(values: Sequence[Any]) -> list[dict[str, float] | None]:
    """The range, mean and deviation of each tensor's finite elements; ``None`` where there are none."""
    return [_described(v) if isinstance(v, torch.Tensor) else None for v in values]


def _described(tensor: torch.Tensor) -> dict[str, float] | None:
    if tensor.is_complex() or tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    wide = tensor.detach().to(torch.float64).reshape(-1)
    wide = wide[wide.isfinite()]
    if wide.numel() == 0:
        return None
    low, high, mean = float(wide.min()), float(wide.max()), float(wide.mean())
    return {"low": low, "high": high, "mean": mean, "std": math.sqrt(float((wide - mean).square().mean()))}


def redraw(values: Sequence[Any], descriptions: Sequence[Mapping[str, float] | None]) -> None:
    """Give sample tensors new values, in place, that are like those described.

    All memory of a tensor is filled, so that tensors that repeat elements or leave gaps need no special care.
    """
    for value, like in zip(values, descriptions, strict=False):
        if like is None or not isinstance(value, torch.Tensor) or value.is_complex():
            continue
        flat = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
        low, high = like["low"], like["high"]
        if value.dtype is torch.bool:
            new = torch.rand(flat.shape) < like["mean"]
        elif value.dtype.is_floating_point:
            new = torch.randn(flat.shape, dtype=torch.float64) * like["std"] + like["mean"]
            new = new.clamp_(low, high)
        else:
            new = torch.randint(int(low), int(high) + 1, flat.shape)
        flat.copy_(new)
