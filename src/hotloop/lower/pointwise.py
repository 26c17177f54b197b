"""Elementwise operators: a table from ATen operator to formula, operand count and promotion.

What comes in: FX nodes of elementwise ATen operators. What goes out: one ``Pointwise`` operation each. What holds in
between: operands are converted to the promoted dtype as eager converts them, computed in float32 where that dtype is
bfloat16 or float16, and rounded once when stored. Dtypes other than the usual ones (complex, float8, uint16...) and
the few cases where only PyTorch can answer give ``NotImplemented``, which means a call through PyTorch.

The next file is ``extern.py``, which makes those calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from hotloop.compat import functional_overloads, operator_arguments
from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index

from . import formulas as fm
from .builder import Builder, Rule, View, loop_vars
from .formulas import op

__all__ = ["DTYPES", "RULES", "compute_dtype", "element", "operand", "result_type", "scalar", "store"]

#: The dtypes that have arithmetic in the IR.
DTYPES = frozenset(
    (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.uint8)
    + (torch.int8, torch.int16, torch.int32, torch.int64)
)
_LOW = (torch.bfloat16, torch.float16)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that values of ``dtype`` are computed in."""
    return torch.float32 if dtype in _LOW else dtype


# --- operands ---------------------------------------------------------------------------------------------------


def element(x: View, v: tuple[Index, ...]) -> Expr:
    """The element of ``x`` that broadcasting puts at ``v``, in ``x``'s own dtype."""
    lead = len(v) - len(x.sizes)
    return x.at([v[lead + k] if s != 1 else ix.const(0) for k, s in enumerate(x.sizes)])


def scalar(value: bool | int | float, promoted: torch.dtype, exact: bool = False) -> Expr:
    """A Python number as an operand. ``exact``: the kernel takes it in the compute dtype, without rounding first."""
    compute = compute_dtype(promoted)
    if exact or promoted is compute:
        return ex.const(value, compute)
    return ex.const(ex.const(value, promoted).value, compute)


def operand(x: View, v: tuple[Index, ...], promoted: torch.dtype, exact: bool = False) -> Expr:
    """An element converted to ``promoted`` as eager converts operands, in the compute dtype."""
    e = element(x, v)
    compute = compute_dtype(promoted)
    if e.dtype is promoted or promoted is compute or (exact and not x.sizes):
        return ex.cast(e, compute)
    return ex.cast(ex.cast(e, promoted, implicit=True), compute)


@cache
def _promote(kinds: tuple[Any, ...], default: torch.dtype) -> torch.dtype:
    """``torch.result_type`` of operands given as (dtype, is zero-dim) or as a Python number's type.

    It depends on the process's default dtype, which is ``default``.
    """
    out: Any = None
    for kind in kinds:
        one = kind(0) if isinstance(kind, type) else torch.empty((0,) if not kind[1] else (), dtype=kind[0])
        out = one if out is None else torch.empty((0,), dtype=torch.result_type(out, one))
    return out.dtype if isinstance(out, torch.Tensor) else torch.result_type(out, out)


def result_type(operands: Iterable[Any]) -> torch.dtype:
    """The dtype that eager compares operands in."""
    kinds = tuple((a.dtype, not a.sizes) if isinstance(a, View) else type(a) for a in operands)
    return _promote(kinds, torch.get_default_dtype())


# --- the rule that the table is turned into ---------------------------------------------------------------------


@dataclass(frozen=True)
class Elementwise:
    """How one operator is lowered.

    ``promotion``: ``same`` (operands in the result's dtype), ``compare`` (operands in their common dtype, the result a
    bool), ``each`` (every operand in its own dtype). ``exact``: Python numbers are used in the compute dtype. ``name``
    finds the formula for bools.
    """

    name: str
    formula: Callable[..., Expr | None]
    operands: int
    promotion: str = "same"
    exact: bool = False

    def rule(self, parameters: tuple[Any, ...]) -> Rule:
        names = tuple(p.name for p in parameters)
        defaults = {p.name: p.default for p in parameters}

        def lower(b: Builder, node: torch.fx.Node, *args: Any, **kwargs: Any) -> Any:
            bound = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
            values = [bound.pop(n) for n in names[: self.operands]]
            return self.apply(b, node, values, [bound[n] for n in names[self.operands :]])

        return lower

    def apply(self, b: Builder, node: torch.fx.Node, values: list[Any], extra: Sequence[Any] = ()) -> Any:
        val = node.meta["val"]
        used = [x for x in values if x is not None]
        if val.dtype not in DTYPES or not all(_usual(x) for x in used):
            return NotImplemented
        dtype: torch.dtype | None = None
        formula: Callable[..., Expr | None] | None = self.formula
        if self.promotion == "each":
            if isinstance(used[0], View) and used[0].dtype is torch.bool:
                formula = fm.BOOLEAN.get(self.name, formula)
        else:
            dtype = val.dtype if self.promotion == "same" else result_type(used)
            if dtype is torch.bool:
                formula = fm.BOOLEAN.get(self.name)
        if formula is None or (dtype is not None and dtype not in DTYPES):
            return NotImplemented
        v = loop_vars("i", val.shape)

        def convert(x: Any) -> Expr | None:
            if isinstance(x, View):
                return operand(x, v, dtype or x.dtype, self.exact)
            return None if x is None else scalar(x, dtype or result_type([x]), self.exact)

        body = formula(*[convert(x) for x in values], *extra)
        return NotImplemented if body is None else store(b, val, body)


def _usual(x: Any) -> bool:
    return x.dtype in DTYPES if isinstance(x, View) else isinstance(x, (bool, int, float))


def store(b: Builder, val: torch.Tensor, body: Expr) -> View:
    """A buffer like ``val`` that holds ``body``, an expression of ``loop_vars("i", val.shape)``."""
    return b.pointwise(tuple(val.shape), val.dtype, lambda _: body, like=val)


def _entries() -> list[Elementwise]:
    rows: list[Elementwise] = []

    def add(names: str, formula: Any, operands: int, promotion: str = "same", exact: bool = False) -> None:
        for name in names.split():
            rows.append(Elementwise(name, formula or op(name), operands, promotion, exact))

    # Arithmetic. PyTorch's kernels take the scalar of these four in the compute dtype.
    add("add", fm.add, 2, exact=True)
    add("sub", fm.sub, 2, exact=True)
    add("rsub", fm.rsub, 2, exact=True)
    add("mul", fm.times, 2, exact=True)
    for name in [
        "neg",
        "abs",
        "sqrt",
        "exp",
        "exp2",
        "log",
        "log2",
        "log10",
        "log1p",
        "expm1",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
    ]:
        add(name, None, 1)
    for name in ["asinh", "acosh", "atanh", "sigmoid", "erf", "erfc", "erfinv", "lgamma", "digamma", "i0"]:
        add(name, None, 1)
    for name in ["erfcx", "i0e", "i1", "i1e", "ndtri", "bessel_j0", "bessel_j1"]:
        add(f"special_{name}", op(name), 1)
    for name in ("floor", "ceil", "trunc"):
        add(name, fm.whole(name), 1)
    add("reciprocal", fm.reciprocal, 1)
    add("rsqrt", fm.rsqrt, 1)
    add("square", fm.square, 1)
    add("frac", fm.frac, 1)
    add("sign sgn", fm.sign, 1)
    add("round", fm.rounded, 1)
    add("positive", fm.identity, 1)
    add("maximum minimum fmax fmin atan2 hypot", None, 2)
    add("copysign", None, 2)
    add("pow", fm.power, 2, exact=True)
    add("addcmul", fm.addcmul, 3)
    add("addcdiv", fm.addcdiv, 3)
    add("lerp", fm.lerp, 3, exact=True)
    add("clamp", fm.clamp, 3)
    add("clamp_min", fm.clamp_min, 2)
    add("clamp_max", fm.clamp_max, 2)
    add("logaddexp", fm.logaddexp, 2)
    add("logaddexp2", fm.logaddexp2, 2)
    add("xlogy", fm.xlogy, 2)
    add("special_xlog1py", fm.xlog1py, 2)
    add("special_entr", fm.entr, 1)
    add("sinc", fm.sinc, 1)
    add("logit", fm.logit, 1)
    add("heaviside", fm.heaviside, 2)
    add("deg2rad", fm.scaled(math.pi / 180), 1)
    add("rad2deg", fm.scaled(180 / math.pi), 1)
    # Bits.
    add("bitwise_and bitwise_or bitwise_xor", None, 2)
    for name in ("and", "or", "xor"):
        add(f"__{name}__", op(f"bitwise_{name}"), 2)
    add("bitwise_not", None, 1)
    add("bitwise_left_shift __lshift__", fm.shift_left, 2)
    add("bitwise_right_shift __rshift__", fm.shift_right, 2)
    # Comparisons and logic.
    add("eq ne lt le gt ge", None, 2, "compare")
    for name in ("logical_and", "logical_or", "logical_xor"):
        add(name, fm.logical(name), 2, "each")
    add("logical_not", fm.logical("logical_not"), 1, "each")
    add("isnan", fm.float_test("isnan", False), 1, "each")
    add("isinf", fm.float_test("isinf", False), 1, "each")
    add("isfinite", fm.float_test("isfinite", True), 1, "each")
    add("isposinf", fm.isposinf, 1, "each")
    add("isneginf", fm.isneginf, 1, "each")
    add("signbit", fm.signbit, 1, "each")
    # Activations and their derivatives.
    for name in [
        "relu",
        "relu6",
        "silu",
        "gelu",
        "hardsigmoid",
        "hardswish",
        "elu",
        "selu",
        "celu",
        "leaky_relu",
        "softplus",
        "mish",
    ]:
        add(name, getattr(fm, name), 1)
    add("hardtanh", fm.clamp, 3)
    add("hardshrink", fm.hardshrink, 1)
    add("softshrink", fm.softshrink, 1)
    add("threshold", fm.threshold, 3)
    add("threshold_backward", fm.threshold_backward, 3)
    add("log_sigmoid", fm.log_sigmoid, 1)
    add("_prelu_kernel", fm.prelu, 2)
    for name in [
        "gelu",
        "silu",
        "hardswish",
        "hardsigmoid",
        "hardtanh",
        "leaky_relu",
        "softplus",
        "sigmoid",
        "tanh",
    ]:
        add(f"{name}_backward", getattr(fm, f"{name}_backward"), 2)
    return rows


# --- operators that the table cannot say ------------------------------------------------------------------------


def _store(b: Builder, node: torch.fx.Node, body: Callable[[tuple[Index, ...]], Expr]) -> View:
    val = node.meta["val"]
    return store(b, val, body(loop_vars("i", val.shape)))


def _same_values(b: Builder, node: torch.fx.Node, x: View, **_: Any) -> Any:
    """A new tensor of the same values."""
    if x.dtype not in DTYPES:
        return NotImplemented
    return _store(b, node, lambda v: element(x, v))


def _alias(b: Builder, node: torch.fx.Node, x: View) -> Any:
    """The same tensor, or what is the same for real numbers."""
    return NotImplemented if x.dtype.is_complex else x


def _cast(b: Builder, node: torch.fx.Node, x: View, *_: Any, **__: Any) -> Any:
    """An explicit conversion: it is always performed."""
    dtype = node.meta["val"].dtype
    if node.meta["val"].device.type != "cpu" or not {x.dtype, dtype} <= DTYPES:
        return NotImplemented
    return _store(b, node, lambda v: ex.cast(element(x, v), dtype))


def _copy(b: Builder, node: torch.fx.Node, x: View, source: View, *_: Any) -> Any:
    """``x``'s shape and dtype, ``source``'s values."""
    return _cast(b, node, source)


def _view_dtype(b: Builder, node: torch.fx.Node, x: View, dtype: torch.dtype) -> Any:
    if not {x.dtype, dtype} <= DTYPES or torch.bool in (x.dtype, dtype) or x.dtype.itemsize != dtype.itemsize:
        return x if x.dtype is dtype else NotImplemented
    return _store(b, node, lambda v: ex.bitcast(element(x, v), dtype))


def _div(b: Builder, node: torch.fx.Node, x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    """Division of integers by a tensor stays PyTorch's: a zero has to raise, never to stop the process."""
    if rounding_mode is None:
        return _TRUE_DIV.apply(b, node, [x, y], {})
    if not node.meta["val"].dtype.is_floating_point and (isinstance(y, View) or y == 0):
        return NotImplemented
    return (_TRUNC_DIV if rounding_mode == "trunc" else _FLOOR_DIV).apply(b, node, [x, y], {})


def _floor_divide(b: Builder, node: torch.fx.Node, x: Any, y: Any) -> Any:
    return _div(b, node, x, y, "floor")


def _modulo(name: str) -> Rule:
    entry = Elementwise(name, op(name), 2)

    def lower(b: Builder, node: torch.fx.Node, x: Any, y: Any) -> Any:
        if not node.meta["val"].dtype.is_floating_point and (isinstance(y, View) or y == 0):
            return NotImplemented
        return entry.apply(b, node, [x, y], {})

    return lower


_TRUE_DIV = Elementwise("div", op("div"), 2, exact=True)
_TRUNC_DIV = Elementwise("div_trunc", fm.div_trunc, 2, exact=True)
_FLOOR_DIV = Elementwise("div_floor", fm.div_floor, 2, exact=True)


def _select(b: Builder, node: torch.fx.Node, cond: View, x: Any, y: Any) -> Any:
    """``where(cond, x, y)``: selection only, but in the compute dtype so that it joins a chain of arithmetic."""
    dtype = node.meta["val"].dtype
    if dtype not in DTYPES or not all(_usual(a) for a in (cond, x, y)):
        return NotImplemented

    def value(a: Any, v: tuple[Index, ...]) -> Expr:
        return operand(a, v, dtype) if isinstance(a, View) else scalar(a, dtype)

    return _store(b, node, lambda v: ex.where(fm.truth(element(cond, v)), value(x, v), value(y, v)))


def _masked_fill(b: Builder, node: torch.fx.Node, x: View, mask: View, value: Any) -> Any:
    return _select(b, node, mask, value, x)


def _nan_to_num(
    b: Builder, node: torch.fx.Node, x: View, nan: Any = None, posinf: Any = None, neginf: Any = None
) -> Any:
    if x.dtype not in DTYPES:
        return NotImplemented
    return _store(b, node, lambda v: fm.nan_to_num(operand(x, v, x.dtype), x.dtype, nan, posinf, neginf))


def _log_sigmoid_forward(b: Builder, node: torch.fx.Node, x: View) -> Any:
    """The second result is scratch of the CPU kernel, of no meaning to anybody but its backward."""
    out, scratch = node.meta["val"]
    if x.dtype not in DTYPES:
        return NotImplemented
    x_at = operand(x, loop_vars("i", out.shape), x.dtype)
    first = store(b, out, fm.log_sigmoid(x_at))
    if scratch.shape != out.shape:
        return first, store(b, scratch, ex.const(0.0, compute_dtype(scratch.dtype)))
    return first, store(b, scratch, fm.exp(fm.neg(fm.absolute(x_at))))


def _elu_backward(b: Builder, node: torch.fx.Node, g: View, *args: Any) -> Any:
    *numbers, x = args
    return _ELU_BACKWARD.apply(b, node, [g, x], numbers)


_ELU_BACKWARD = Elementwise("elu_backward", fm.elu_backward, 2)


def _special() -> dict[str, Rule]:
    return {
        **dict.fromkeys(("clone", "lift_fresh_copy"), _same_values),
        **dict.fromkeys(("alias", "detach", "lift_fresh", "lift", "_conj", "conj", "resolve_conj"), _alias),
        **dict.fromkeys(("resolve_neg", "real", "view_of", "prims::view_of"), _alias),
        **dict.fromkeys(("_to_copy", "prims::convert_element_type"), _cast),
        "copy": _copy,
        "elu_backward": _elu_backward,
        "div": _div,
        "floor_divide": _floor_divide,
        "remainder": _modulo("remainder"),
        "fmod": _modulo("fmod"),
        "where": _select,
        "masked_fill": _masked_fill,
        "nan_to_num": _nan_to_num,
        "log_sigmoid_forward": _log_sigmoid_forward,
    }


def _rules() -> dict[Any, Rule]:
    rules: dict[Any, Rule] = {}
    for entry in _entries():
        for overload in functional_overloads(entry.name):
            parameters = operator_arguments(overload) or ()
            if len(parameters) >= entry.operands:
                rules[overload] = entry.rule(parameters)
    for name, rule in _special().items():
        for overload in functional_overloads(name):
            rules[overload] = rule
    rules[torch.ops.aten.view.dtype] = _view_dtype
    # The number under a power is a tensor to eager, rounded to the promoted dtype, unlike an exponent.
    base = torch.ops.aten.pow.Scalar
    rules[base] = Elementwise("pow", fm.power, 2).rule(operator_arguments(base) or ())
    # where(condition) alone gives indices: its size depends on data.
    rules.pop(torch.ops.aten.where.default, None)
    return rules


#: From ATen operator to lowering rule.
RULES: dict[Any, Rule] = _rules()
