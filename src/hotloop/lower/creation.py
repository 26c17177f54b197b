"""Tensors made from numbers and positions alone: full, arange, eye, linspace, and the triangles of a matrix.

What comes in: FX nodes of factory operators. What goes out: one ``Pointwise`` each, whose body is a constant
or an expression of the loop variables, so that a consumer that inlines it reads no memory. What holds in
between: integer positions stay index expressions, whose ranges are known.

The next file is ``extern.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from hotloop.compat import functional_overloads
from hotloop.ir import expr as ex
from hotloop.ir import index as ix

from .builder import Builder, Rule, Tensor, View, loop_vars, number_value
from .pointwise import DTYPES, compute_dtype, element, fits, store

__all__ = ["RULES"]


def _cpu(val: Tensor) -> bool:
    return val.dtype in DTYPES and val.device.type == "cpu" and val.layout is torch.strided


def _filled(b: Builder, node: torch.fx.Node, value: Any) -> Any:
    val = node.meta["val"]
    if not _cpu(val):
        return NotImplemented
    if isinstance(value, View):
        if value.dtype not in DTYPES:
            return NotImplemented
        return store(b, val, ex.cast(element(value, loop_vars("i", val.shape)), val.dtype))
    if isinstance(value, (ix.Index, ex.Expr)):
        return store(b, val, ex.cast(number_value(value), val.dtype))
    if not isinstance(value, (bool, int, float)) or not fits(value, val.dtype):
        return NotImplemented
    return store(b, val, ex.const(value, val.dtype))


def _constant(value: int) -> Rule:
    return lambda b, node, *_, **__: _filled(b, node, value)


def _empty_strided(b: Builder, node: torch.fx.Node, *_: Any, **__: Any) -> Any:
    """Strides with gaps or overlaps are no loop's: PyTorch allocates."""
    val = node.meta["val"]
    return _filled(b, node, 0) if b.keeps_strides(val) else NotImplemented


def _full(b: Builder, node: torch.fx.Node, _: Any, value: Any, *__: Any, **___: Any) -> Any:
    """full, full_like, fill: the value is the second argument."""
    return _filled(b, node, value)


def _new_full(b: Builder, node: torch.fx.Node, _: Any, __: Any, value: Any, *___: Any, **____: Any) -> Any:
    return _filled(b, node, value)


def _scalar_tensor(b: Builder, node: torch.fx.Node, value: Any, *_: Any, **__: Any) -> Any:
    return _filled(b, node, value)


def _arithmetic_sequence(b: Builder, node: torch.fx.Node, start: Any, step: Any) -> Any:
    val = node.meta["val"]
    if not _cpu(val) or val.dtype is torch.bool:
        return NotImplemented
    (i,) = loop_vars("i", val.shape)
    if isinstance(start, (int, ix.Index)) and isinstance(step, (int, ix.Index)):
        return store(b, val, ex.cast(ex.index_value(start + i * step), val.dtype))
    if not val.dtype.is_floating_point:
        return NotImplemented  # fractions of integers: eager truncates start and step in its own way
    # Eager accumulates in double, whatever the result's dtype.
    scaled = ex.call("mul", ex.cast(ex.index_value(i), torch.float64), ex.const(step, torch.float64))
    return store(b, val, ex.cast(ex.call("add", ex.const(start, torch.float64), scaled), val.dtype))


def _arange(b: Builder, node: torch.fx.Node, *args: Any, step: Any = 1, **_: Any) -> Any:
    """arange(end), arange(start, end), arange(start, end, step)."""
    if len(args) == 1:
        return _arithmetic_sequence(b, node, 0, 1)
    return _arithmetic_sequence(b, node, args[0], args[2] if len(args) > 2 else step)


def _iota(b: Builder, node: torch.fx.Node, length: int, *, start: int, step: int, **_: Any) -> Any:
    return _arithmetic_sequence(b, node, start, step)


def _linspace(b: Builder, node: torch.fx.Node, start: Any, end: Any, steps: Any, **_: Any) -> Any:
    """From the nearer end, so that both ends are exact."""
    val = node.meta["val"]
    given = (int, float, View)
    if (
        not _cpu(val)
        or not val.dtype.is_floating_point
        or not all(isinstance(x, given) for x in (start, end))
    ):
        return NotImplemented
    if not isinstance(steps, int) or any(isinstance(x, View) and x.dtype not in DTYPES for x in (start, end)):
        return NotImplemented
    if not fits(start, val.dtype) or not fits(end, val.dtype):
        return NotImplemented
    dtype = compute_dtype(val.dtype)
    (i,) = loop_vars("i", val.shape)
    if steps <= 1:
        return _filled(b, node, start)
    first, last = (
        ex.cast(x.at(()), dtype) if isinstance(x, View) else ex.const(x, dtype) for x in (start, end)
    )
    if isinstance(start, View) or isinstance(end, View):
        step = ex.call("div", ex.call("sub", last, first), ex.const(steps - 1, dtype))
    else:
        step = ex.const((end - start) / (steps - 1), dtype)

    def times_step(position: ix.Index) -> ex.Expr:
        return ex.call("mul", step, ex.cast(ex.index_value(position), dtype))

    low = ex.call("add", first, times_step(i))
    high = ex.call("sub", last, times_step(steps - 1 - i))
    first_half = ex.call("lt", ex.index_value(i), ex.index_value(steps // 2))
    return store(b, val, ex.cast(ex.where(first_half, low, high), val.dtype))


def _eye(b: Builder, node: torch.fx.Node, *_: Any, **__: Any) -> Any:
    val = node.meta["val"]
    if not _cpu(val):
        return NotImplemented
    i, j = loop_vars("i", val.shape)
    on = ex.call("eq", ex.index_value(i), ex.index_value(j))
    return store(b, val, ex.where(on, ex.const(1, val.dtype), ex.const(0, val.dtype)))


def _triangle(keeps: str) -> Rule:
    """tril keeps ``column - row <= diagonal``, triu keeps ``>=``; the rest is 0, whatever it was."""

    def lower(b: Builder, node: torch.fx.Node, x: View, diagonal: int = 0) -> Any:
        val = node.meta["val"]
        if not _cpu(val) or x.dtype not in DTYPES:
            return NotImplemented
        v = loop_vars("i", val.shape)
        kept = ex.call(keeps, ex.index_value(v[-1] - v[-2]), ex.index_value(diagonal))
        return store(b, val, ex.where(kept, element(x, v), ex.const(0, val.dtype)))

    return lower


def _rules() -> dict[Any, Rule]:
    named: dict[str, Rule] = {
        # Memory that eager leaves unset is set to zero: it costs nothing where nobody reads it.
        **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _constant(0)),
        **dict.fromkeys(("empty", "empty_like", "new_empty", "empty_permuted"), _constant(0)),
        **dict.fromkeys(("empty_strided", "new_empty_strided"), _empty_strided),
        **dict.fromkeys(("ones", "ones_like", "new_ones"), _constant(1)),
        **dict.fromkeys(("full", "full_like", "fill"), _full),
        "new_full": _new_full,
        "scalar_tensor": _scalar_tensor,
        "arange": _arange,
        "prims::iota": _iota,
        "linspace": _linspace,
        "eye": _eye,
        "tril": _triangle("le"),
        "triu": _triangle("ge"),
    }
    return {overload: rule for name, rule in named.items() for overload in functional_overloads(name)}


#: From ATen operator to lowering rule.
RULES: dict[Any, Rule] = _rules()
