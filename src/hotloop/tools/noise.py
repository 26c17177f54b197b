"""Rounding errors other than eager's own: what eager might have given, had it rounded a little differently.

What comes in: any code of torch, run inside a ``Noise``. What goes out: its results, each of whose operators
is off by up to a unit in the last place. What holds in between: values that are only moved keep their bits,
and so do integers.

Next: ``judge.py``, which takes the spread of such results for the error that rounding explains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hotloop.compat import DispatchMode, tree_map

__all__ = ["Noise"]


class Noise(DispatchMode):  # type: ignore[no-untyped-call]
    """Every floating-point result is off by up to a unit in its last place, sums by more."""

    def __init__(self, seed: int, units: float = 1.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)
        self._units = units

    def disturb(self, t: Tensor) -> Tensor:
        """Change it in place."""
        return self._add(t, t, 1.0)

    def _add(self, t: Tensor, size: Tensor, units: float) -> Tensor:
        """Up to so many last places of a number of that size; the same wherever t shows one place twice."""
        if not t.is_floating_point() or not t.numel() or t.layout is not torch.strided:
            return t
        places = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in t.stride())
        t_once, size = t[places], size[places]
        if not _overlaps(t_once):
            wide = torch.float64 if t.dtype is torch.float64 else torch.float32
            scale = torch.finfo(t.dtype if units == 1.0 else wide).eps * self._units * units
            off = torch.rand(t_once.shape, generator=self._generator, dtype=wide).mul_(2 * scale).sub_(scale)
            t_once.copy_(t_once.to(wide) + size.to(wide) * off)
        return t

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not hasattr(func, "_schema"):  # control flow
            return func(*args, **kwargs)
        if func in _APART:
            with self:
                return _APART[func](*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name.removesuffix("_") in _CANCELLING:
            args = (args[0] if name.endswith("_") else self._used(args[0]), *map(self._used, args[1:]))
        out = func(*args, **kwargs)
        returns = func._schema.returns
        if any(r.alias_info is not None and not r.alias_info.is_write for r in returns) or name in _MOVING:
            return out
        if isinstance(out, Tensor) and out.is_floating_point() and name in _SUMS | _SUMS_OF_MAGNITUDES:
            size = func(*tree_map(_magnitudes, args), **kwargs) if name in _SUMS else out
            self._add(out, size, _units(args))
        tree_map(lambda t: self.disturb(t) if isinstance(t, Tensor) else t, out)
        return out

    def _used(self, value: Any) -> Any:
        """As one that reads it may see it: of less than float32, rounded or not yet."""
        if not isinstance(value, Tensor) or value.dtype not in (torch.bfloat16, torch.float16):
            return value
        return self.disturb(value.clone())


def _magnitudes(value: Any) -> Any:
    return value.abs() if isinstance(value, Tensor) and value.is_floating_point() else value


def _units(args: Sequence[Any]) -> float:
    """The bound of a sum's error, in units in the last place of the sum of magnitudes, where terms are added
    in pairs: the logarithm of their number (Higham, The accuracy of floating point summation, 1993)."""
    return 1.0 + math.log2(max(1, *(a.numel() for a in args if isinstance(a, Tensor))))


#: What adds up terms: what it gives for their magnitudes says how far rounding may move the sum.
_SUMS = frozenset(("sum", "nansum", "mean", "mm", "bmm", "addmm", "cumsum"))
_SUMS_OF_MAGNITUDES = frozenset(("mse_loss", "smooth_l1_loss", "dist", "norm", "linalg_vector_norm"))
#: Where two numbers that were equal may differ, because one of them was rounded already.
_CANCELLING = frozenset(("add", "sub", "rsub", "lerp", "addcmul"))


#: Operators that only move values.
_MOVING = frozenset(
    (
        "clone", "cat", "stack", "index", "flip", "roll", "fill_", "zero_", "copy_", "select_backward",
        "slice_backward", "constant_pad_nd", "gather", "index_select", "zeros", "zeros_like", "ones",
        "ones_like", "full", "full_like", "arange", "repeat", "masked_fill", "masked_fill_", "where",
        "new_zeros", "empty", "empty_like", "tril", "triu", "detach", "scatter", "scatter_", "index_copy",
        "index_copy_", "slice_scatter", "select_scatter", "diagonal_scatter", "masked_scatter", "index_fill",
        "index_fill_", "index_put", "index_put_",
    )
)  # fmt: skip


aten = torch.ops.aten


def _variance(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """A variance and its mean, from a mean that is rounded: where all elements are equal, eager's is not.
    A variance that rounding alone explains is none."""
    dims = list(range(x.dim())) if not dim else list(dim)
    wide = x if x.dtype is torch.float64 else x.to(torch.float32)
    mean = wide.mean(dims, keepdim=True)
    count = math.prod(x.shape[d] for d in dims) - (1 if correction is None else correction)
    total = (wide - mean).square().sum(dims, keepdim=keepdim)
    rounding = (mean * (16 * torch.finfo(x.dtype).eps)).square().expand_as(wide).sum(dims, keepdim=keepdim)
    total = total.masked_fill(total <= rounding, 0)
    return (total / max(count, 0)).to(x.dtype), wide.mean(dims, keepdim=keepdim).to(x.dtype)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = x if x.dtype is torch.float64 else x.to(torch.float32)
    variance, mean = _variance(wide, range(-len(shape), 0), correction=0, keepdim=True)
    scale = torch.rsqrt(variance + eps)
    out = (wide - mean) * scale
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(x.dtype), mean, scale


#: Operators that eager does in one, but which noise has to enter in their middle.
_APART: dict[Any, Callable[..., Any]] = {
    aten.var.correction: lambda *a, **k: _variance(*a, **k)[0],
    aten.std.correction: lambda *a, **k: _variance(*a, **k)[0].sqrt(),
    aten.var_mean.correction: _variance,
    aten.native_layer_norm.default: _layer_norm,
}


def _overlaps(t: Tensor) -> bool:
    return any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape, strict=True))
