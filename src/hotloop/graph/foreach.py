"""Operators on lists of tensors, which optimizers are made of, taken apart into operators on tensors.

What comes in: nothing. What goes out: a table from each ``_foreach`` operator to the function that
AOTAutograd takes it apart with. What holds in between: the result number ``i`` is what the operator of the
same name gives for the entries ``i`` of its lists, which is what eager computes on a CPU; so the whole update
of a parameter becomes one kernel.

The next file is ``decompositions.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from hotloop.compat import functional_overloads

__all__ = ["decompositions"]

Function = Callable[..., torch.Tensor]

_SAME_NAME = """
    abs acos add asin atan ceil clamp_max clamp_min clone cos cosh div erf erfc exp expm1 floor frac lerp
    lgamma log log10 log1p log2 mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh
    trunc
"""


def _limit(tensors: Function, number: Function) -> Function:
    return lambda x, y: tensors(x, y) if isinstance(y, torch.Tensor) else number(x, y)


def _norm(x: torch.Tensor, ord: Any = 2, dtype: torch.dtype | None = None) -> torch.Tensor:
    result: torch.Tensor = torch.linalg.vector_norm(x, ord, dtype=dtype)
    return result


def _scaled(f: Function) -> Function:
    """``addcdiv`` and ``addcmul`` take their factor by name."""
    return lambda x, a, b, value=1: f(x, a, b, value=value)


_FUNCTIONS: Mapping[str, Function] = {
    **{name: getattr(torch, name) for name in _SAME_NAME.split()},
    "addcdiv": _scaled(torch.addcdiv),
    "addcmul": _scaled(torch.addcmul),
    "maximum": _limit(torch.maximum, torch.clamp_min),
    "minimum": _limit(torch.minimum, torch.clamp_max),
    "copy": torch.ops.aten.copy.default,
    "zero": torch.zeros_like,
    "norm": _norm,
}


def _for_each(f: Function) -> Callable[..., list[torch.Tensor]]:
    """``f`` on the entries of lists. What is no list is the same for each of them."""

    def apply(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        count = next(len(a) for a in args if isinstance(a, (list, tuple)))
        rows = [a if isinstance(a, (list, tuple)) else [a] * count for a in args]
        return [f(*row, **kwargs) for row in zip(*rows, strict=True)]

    return apply


def _table() -> dict[Any, Callable[..., list[torch.Tensor]]]:
    found = {}
    for name, f in _FUNCTIONS.items():
        for overload in functional_overloads(f"_foreach_{name}"):
            # Factors in a tensor are read by their value, which a graph has not.
            if name not in ("addcdiv", "addcmul") or not str(overload).endswith(".Tensor"):
                found[overload] = _for_each(f)
    return found


decompositions: Mapping[Any, Callable[..., list[torch.Tensor]]] = MappingProxyType(_table())
