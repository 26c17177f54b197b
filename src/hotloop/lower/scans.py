"""Lowering rules of running sums, products and extremes along a dimension.

What comes in: a view and the dimension. What goes out: one ``Scan``, two for extremes with their positions.
What holds in between: the running value has the dtype that eager's has: float64 for float32, float32 for
bfloat16 and float16, int64 for integers and bools.

The next file is ``scatter.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from hotloop.ir import expr as ex
from hotloop.ir.expr import Expr

from .builder import Builder, Rule, View
from .reductions import SUPPORTED, compute_value, result, uses
from .views import moved

__all__ = ["RULES"]

aten = torch.ops.aten
Node = torch.fx.Node


def _running_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a running sum over elements of ``dtype``."""
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64


def _cumulative(kind: str) -> Rule:
    """``cumsum``, ``cumprod``, ``logcumsumexp``; the elements are converted to the result's dtype first."""

    def rule(b: Builder, node: Node, x: View, dim: int, *, dtype: torch.dtype | None = None) -> Any:
        like = result(node)
        if x.dtype not in SUPPORTED or like.dtype not in SUPPORTED or like.dtype is torch.bool:
            return NotImplemented
        if kind == "logaddexp" and not like.dtype.is_floating_point:
            return NotImplemented

        def element(at: Any) -> Expr:
            return ex.cast(ex.cast(x.at(at), like.dtype, implicit=True), _running_dtype(like.dtype))

        if x.ndim == 0:
            return moved(b, like, lambda v: ex.cast(x.at(v), like.dtype))
        return b.scan(x.sizes, dim % x.ndim, kind, like.dtype, element, like)

    return rule


def _extremes(kind: str) -> Rule:
    """``cummax`` and ``cummin``: the extreme so far, and the position of the last element that has it."""

    def rule(b: Builder, node: Node, x: View, dim: int) -> Any:
        if x.dtype not in SUPPORTED:
            return NotImplemented
        like, positions = result(node, 0), result(node, 1)
        if x.ndim == 0:
            zero = ex.const(0, torch.int64)
            return moved(b, like, x.at), b.pointwise((), torch.int64, lambda v: zero, positions)

        def element(at: Any) -> Expr:
            value = x.at(at)
            return ex.cast(value, torch.uint8) if value.dtype is torch.bool else compute_value(value)

        axis = dim % x.ndim
        values = b.scan(x.sizes, axis, kind, x.dtype, element, like) if uses(node, 0) else None
        at = b.scan(x.sizes, axis, f"arg{kind}", torch.int64, element, positions) if uses(node, 1) else None
        return values, at

    return rule


RULES: dict[Any, Rule] = {
    aten.cumsum.default: _cumulative("sum"),
    aten.cumprod.default: _cumulative("prod"),
    aten.logcumsumexp.default: _cumulative("logaddexp"),
    aten.cummax.default: _extremes("max"),
    aten.cummin.default: _extremes("min"),
}
