"""Elementwise operators: a table from ATen operator to formula, operand count and promotion.

What comes in: FX nodes of elementwise ATen operators. What goes out: one ``Pointwise`` operation each. What
holds in between: operands are converted to the promoted dtype as eager converts them, computed in float32
where that dtype is bfloat16 or float16, and rounded once when stored. Dtypes other than the usual ones
(complex, float8, uint16...) and the few cases where only PyTorch can answer give ``NotImplemented``, which
means a call through PyTorch.

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
from .builder import DTYPES, Builder, Rule, Tensor, View, loop_vars, number_type, number_value
from .formulas import op

__all__ = ["DTYPES", "RULES", "compute_dtype", "element", "fits", "operand", "result_type", "scalar", "store"]

_LOW = (torch.bfloat16, torch.float16)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that values of ``dtype`` are computed in."""
    return torch.float32 if dtype in _LOW else dtype


def fits(value: Any, dtype: torch.dtype) -> bool:
    """Whether ``dtype`` can hold a number, if it is one. Where eager refuses one that does not fit, a rule
    declines, so that PyTorch says so. Dtypes that are left to PyTorch hold anything."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or dtype not in DTYPES:
        return True
    if dtype is torch.bool:
        return True
    if dtype.is_floating_point:
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    info = torch.iinfo(dtype)
    least = -info.max if info.min == 0 and isinstance(value, int) else info.min  # negative integers wrap
    return math.isfinite(value) and least <= value <= info.max


# --- operands -----------------------------------------------------------------------------------------------


def element(x: View, v: tuple[Index, ...]) -> Expr:
    """The element of ``x`` that broadcasting puts at ``v``, in ``x``'s own dtype."""
    lead = len(v) - len(x.sizes)
    return x.at([v[lead + k] if s != 1 else ix.const(0) for k, s in enumerate(x.sizes)])


def scalar(value: bool | int | float | Index | Expr, promoted: torch.dtype, exact: bool = False) -> Expr:
    """A Python number as an operand. ``exact``: the kernel takes it in the compute dtype, without rounding
    first.
    """
    compute = compute_dtype(promoted)
    if isinstance(value, (Index, Expr)):
        e = number_value(value)
        return ex.cast(e if exact else ex.cast(e, promoted), compute)
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
    kinds = tuple((a.dtype, not a.sizes) if isinstance(a, View) else number_type(a) for a in operands)
    return _promote(kinds, torch.get_default_dtype())


# --- the rule that the table is turned into -----------------------------------------------------------------


@dataclass(frozen=True)
class Elementwise:
    """How one operator is lowered.

    ``promotion``: ``same`` (operands in the result's dtype), ``compare`` (operands in their common dtype, the
    result a bool), ``each`` (every operand in its own dtype). ``exact``: Python numbers are used in the
    compute dtype. ``name`` finds the formula for bools.
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
        if val.dtype not in DTYPES or not all(_usual(x) for x in used) or self._refused(val, used, extra):
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

    def _refused(self, val: torch.Tensor, used: Sequence[Any], extra: Sequence[Any]) -> bool:
        """Whether eager raises: for a number that does not fit, an integer, or a bool."""
        if self.name in ("sub", "rsub") and any(_is_bool(x) for x in used):
            return True
        if self.name in _FLOATS_ONLY and not val.dtype.is_floating_point:
            return True
        if self.name in _NOT_FOR_LOW and val.dtype in _LOW:
            return True
        numbers = (*used, *extra) if self.name in _CONVERTED else extra
        return not all(fits(x, val.dtype) for x in numbers)


#: Operators that convert their numbers to the tensor's dtype, and raise where one does not fit. The plain
#: arguments of all operators (``alpha``, ``value``) are converted so.
_CONVERTED = frozenset(("clamp", "clamp_min", "clamp_max", "hardtanh", "threshold", "lerp", "pow"))
#: Operators that have a formula for integers, and no kernel.
_FLOATS_ONLY = frozenset(("addcdiv", "lerp", "leaky_relu", "hardshrink", "softshrink"))


def _is_bool(x: Any) -> bool:
    return isinstance(x, bool) or (isinstance(x, View) and x.dtype is torch.bool)


def _usual(x: Any) -> bool:
    return x.dtype in DTYPES if isinstance(x, View) else isinstance(x, (bool, int, float, Index, Expr))


def store(b: Builder, val: Tensor, body: Expr) -> View:
    """A buffer like ``val`` that holds ``body``, an expression of ``loop_vars("i", val.shape)``."""
    return b.pointwise(tuple(val.shape), val.dtype, lambda _: body, like=val)


def _rows(
    names: str,
    operands: int,
    formula: Any = None,
    promotion: str = "same",
    exact: bool = False,
    prefix: str = "",
) -> list[Elementwise]:
    """One row a name. Without a formula the operation is the IR's own of that name."""
    return [Elementwise(f"{prefix}{n}", formula or op(n), operands, promotion, exact) for n in names.split()]


def _formula_rows(names: str, operands: int, suffix: str = "") -> list[Elementwise]:
    """Rows whose formula has the operator's own name."""
    return [Elementwise(n + suffix, getattr(fm, n + suffix), operands) for n in names.split()]


def _arithmetic() -> list[Elementwise]:
    return [
        # PyTorch's CPU kernels round the scalar of a sum to the dtype, that of a product not.
        *_formula_rows("add sub rsub", 2),
        *_rows("mul", 2, fm.times, exact=True),
        *_rows("neg abs", 1),
        *_rows("sign sgn", 1, fm.sign),
        *_rows("round", 1, fm.rounded),
        *_rows("positive", 1, fm.identity),
        *(Elementwise(n, fm.whole(n), 1) for n in ("floor", "ceil", "trunc")),
        *_formula_rows("reciprocal rsqrt square frac", 1),
        *_rows("maximum minimum fmax fmin copysign", 2),
        *_rows("pow", 2, fm.power, exact=True),
        *_formula_rows("addcmul addcdiv clamp", 3),
        *_rows("lerp", 3, fm.lerp, exact=True),
        *_formula_rows("clamp_min clamp_max heaviside", 2),
        *_rows("ldexp", 2, fm.ldexp),
        *_rows("angle", 1, fm.angle),
        *_rows("deg2rad", 1, fm.scaled(math.pi / 180)),
        *_rows("rad2deg", 1, fm.scaled(180 / math.pi)),
    ]


def _transcendental() -> list[Elementwise]:
    return [
        *_rows("sqrt exp exp2 log log2 log10 log1p expm1 sin cos tan asin acos atan", 1),
        *_rows("sinh cosh tanh atanh sigmoid erf erfc erfinv lgamma digamma", 1),
        *_formula_rows("asinh acosh", 1),
        *_rows("atan2 hypot", 2),
        *_formula_rows("logaddexp logaddexp2 xlogy", 2),
        *_formula_rows("sinc logit", 1),
        *_rows("special_xlog1py", 2, fm.xlog1py),
        *_rows("special_entr", 1, fm.entr),
    ]


#: The IR's name of each of ATen's special functions that it calls otherwise.
_SPECIAL_NAMES = {
    "i0": "bessel_i0", "special_i0e": "bessel_i0_scaled", "special_modified_bessel_i0": "bessel_i0",
    "special_i1": "bessel_i1", "special_i1e": "bessel_i1_scaled", "special_modified_bessel_i1": "bessel_i1",
    "special_modified_bessel_k0": "bessel_k0", "special_scaled_modified_bessel_k0": "bessel_k0_scaled",
    "special_modified_bessel_k1": "bessel_k1", "special_scaled_modified_bessel_k1": "bessel_k1_scaled",
    **{f"special_{n}": n for n in ex.SPECIAL_FUNCTIONS if not n.startswith("bessel")},
}  # fmt: skip
#: Special functions that eager has no kernels of for bfloat16 and float16.
_NOT_FOR_LOW = frozenset(_SPECIAL_NAMES).union(("special_spherical_bessel_j0",)) - {
    "i0", "special_i0e", "special_i1", "special_i1e",
}  # fmt: skip


def _special_functions() -> list[Elementwise]:
    return [
        *(Elementwise(n, op(own), ex.OPS[own].arity) for n, own in _SPECIAL_NAMES.items()),
        Elementwise("special_spherical_bessel_j0", fm.spherical_bessel_j0, 1),
    ]


def _logic() -> list[Elementwise]:
    return [
        *_rows("bitwise_and bitwise_or bitwise_xor", 2),
        *(Elementwise(f"__{n}__", op(f"bitwise_{n}"), 2) for n in ("and", "or", "xor")),
        *_rows("bitwise_not", 1),
        *_rows("bitwise_left_shift __lshift__", 2, fm.shift_left),
        *_rows("bitwise_right_shift __rshift__", 2, fm.shift_right),
        *_rows("eq ne lt le gt ge", 2, promotion="compare"),
        *(Elementwise(n, fm.logical(n), 2, "each") for n in ("logical_and", "logical_or", "logical_xor")),
        Elementwise("logical_not", fm.logical("logical_not"), 1, "each"),
        *(
            Elementwise(n, fm.float_test(n, n == "isfinite"), 1, "each")
            for n in ("isnan", "isinf", "isfinite")
        ),
        *_rows("isposinf", 1, fm.isposinf, "each"),
        *_rows("isneginf", 1, fm.isneginf, "each"),
        *_rows("signbit", 1, fm.signbit, "each"),
    ]


def _activations() -> list[Elementwise]:
    """Activations, and the derivatives that have a formula of their own."""
    return [
        *_formula_rows(
            "relu relu6 silu gelu hardsigmoid hardswish elu selu celu leaky_relu softplus mish", 1
        ),
        *_formula_rows("hardshrink softshrink log_sigmoid", 1),
        *_rows("hardtanh", 3, fm.clamp),
        *_rows("threshold", 3, fm.threshold),
        *_rows("threshold_backward", 3, fm.threshold_backward),
        *_rows("_prelu_kernel", 2, fm.prelu),
        *_formula_rows("gelu silu hardswish hardsigmoid hardtanh leaky_relu softplus", 2, "_backward"),
        *_formula_rows("sigmoid tanh", 2, "_backward"),
    ]


# --- operators that the table cannot say --------------------------------------------------------------------


def _store(b: Builder, node: torch.fx.Node, body: Callable[[tuple[Index, ...]], Expr]) -> View:
    val = node.meta["val"]
    return store(b, val, body(loop_vars("i", val.shape)))


def _same_values(b: Builder, node: torch.fx.Node, x: View, **_: Any) -> Any:
    """A new tensor of the same values."""
    if x.dtype not in DTYPES:
        return NotImplemented
    return _store(b, node, lambda v: element(x, v))


def _alias(b: Builder, node: torch.fx.Node, x: Any) -> Any:
    """The same tensor, or what is the same for real numbers. A derivative may ask it of a number."""
    return NotImplemented if not isinstance(x, View) or x.dtype.is_complex else x


def _cast(b: Builder, node: torch.fx.Node, x: Any, *_: Any, **__: Any) -> Any:
    """An explicit conversion: it is always performed."""
    dtype = node.meta["val"].dtype
    if not isinstance(x, View) or node.meta["val"].device.type != "cpu" or not {x.dtype, dtype} <= DTYPES:
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
        return _TRUE_DIV.apply(b, node, [x, y])
    if not node.meta["val"].dtype.is_floating_point and (isinstance(y, View) or y == 0):
        return NotImplemented
    return (_TRUNC_DIV if rounding_mode == "trunc" else _FLOOR_DIV).apply(b, node, [x, y])


def _floor_divide(b: Builder, node: torch.fx.Node, x: Any, y: Any) -> Any:
    return _div(b, node, x, y, "floor")


def _modulo(name: str) -> Rule:
    entry = Elementwise(name, op(name), 2)

    def lower(b: Builder, node: torch.fx.Node, x: Any, y: Any) -> Any:
        if not node.meta["val"].dtype.is_floating_point and (isinstance(y, View) or y == 0):
            return NotImplemented
        return entry.apply(b, node, [x, y])

    return lower


_TRUE_DIV = Elementwise("div", op("div"), 2, exact=True)
_TRUNC_DIV = Elementwise("div_trunc", fm.div_trunc, 2, exact=True)
_FLOOR_DIV = Elementwise("div_floor", fm.div_floor, 2, exact=True)


def _select(b: Builder, node: torch.fx.Node, cond: View, x: Any, y: Any) -> Any:
    """``where(cond, x, y)``: a selection, in the compute dtype so that it joins a chain of arithmetic."""
    dtype = node.meta["val"].dtype
    if dtype not in DTYPES or not all(_usual(a) for a in (cond, x, y)):
        return NotImplemented

    def value(a: Any, v: tuple[Index, ...]) -> Expr:
        return operand(a, v, dtype) if isinstance(a, View) else scalar(a, dtype)

    return _store(b, node, lambda v: ex.where(fm.truth(element(cond, v)), value(x, v), value(y, v)))


def _masked_fill(b: Builder, node: torch.fx.Node, x: View, mask: View, value: Any) -> Any:
    if not fits(value, x.dtype):
        return NotImplemented
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


def _frexp(b: Builder, node: torch.fx.Node, x: View) -> Any:
    out, exponents = node.meta["val"]
    if x.dtype not in DTYPES or not x.dtype.is_floating_point:
        return NotImplemented
    mantissa, exponent = fm.frexp(operand(x, loop_vars("i", out.shape), x.dtype))
    return store(b, out, mantissa), store(b, exponents, exponent)


def _neg_view(b: Builder, node: torch.fx.Node, x: View) -> Any:
    return _NEG.apply(b, node, [x])


_NEG = Elementwise("neg", op("neg"), 1)


def _nextafter(b: Builder, node: torch.fx.Node, x: View, y: View) -> Any:
    """A neighbour in the dtype: only where the dtype is the one that is computed in."""
    if node.meta["val"].dtype not in (torch.float32, torch.float64):
        return NotImplemented
    return _NEXTAFTER.apply(b, node, [x, y])


_NEXTAFTER = Elementwise("nextafter", op("nextafter"), 2)


def _polygamma(b: Builder, node: torch.fx.Node, n: int, x: View) -> Any:
    """The derivatives of log gamma, the first one being ``n = 0``."""
    if n > 1:
        return Elementwise("polygamma", lambda e: fm.polygamma(n, e), 1).apply(b, node, [x])
    return (_TRIGAMMA if n else _DIGAMMA).apply(b, node, [x])


_DIGAMMA, _TRIGAMMA = Elementwise("digamma", op("digamma"), 1), Elementwise("trigamma", fm.trigamma, 1)


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
        # A lazy negative shows other numbers than its memory holds: here it is one that is computed.
        "_neg_view": _neg_view,
        "nextafter": _nextafter,
        "frexp": _frexp,
        "polygamma": _polygamma,
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
    for entry in (*_arithmetic(), *_transcendental(), *_special_functions(), *_logic(), *_activations()):
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
