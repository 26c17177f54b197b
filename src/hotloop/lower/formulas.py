"""The elementwise operators of ATen as value expressions.

What comes in: operands already in the compute dtype (float32 for bfloat16 and float16), and the operator's
plain arguments. What goes out: one expression in the same dtype, or of dtype bool. What holds in between: the
formula and the order of its steps are those of PyTorch's CPU kernels, so that results agree to rounding, and
on NaN, infinities and signed zeros. Nothing here knows of tensors, shapes or promotion.

The next file is ``pointwise.py``, which says which operator uses which formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hotloop.ir import expr as ex
from hotloop.ir.expr import Expr

__all__ = ["BOOLEAN", "op"]

Number = bool | int | float


def op(name: str) -> Callable[..., Expr]:
    """The formula that is a single operation of ``expr.OPS``."""

    def one(*args: Expr) -> Expr:
        return ex.call(name, *args)

    one.__name__ = name
    return one


neg, absolute, exp, log, log1p, expm1, sqrt = map(op, ("neg", "abs", "exp", "log", "log1p", "expm1", "sqrt"))
plus, minus, times, over = map(op, ("add", "sub", "mul", "div"))
smaller, larger = map(op, ("minimum", "maximum"))
eq, ne, lt, le, gt, ge = map(op, ("eq", "ne", "lt", "le", "gt", "ge"))
isnan, both, either, inverse = map(op, ("isnan", "logical_and", "logical_or", "logical_not"))


def like(x: Expr, value: Number) -> Expr:
    """A constant of ``x``'s dtype."""
    return ex.const(value, x.dtype)


def is_float(x: Expr) -> bool:
    return x.dtype.is_floating_point


def truth(x: Expr) -> Expr:
    """``x != 0`` as a bool; NaN is true."""
    return x if x.dtype is torch.bool else ne(x, like(x, 0))


def identity(x: Expr) -> Expr:
    return x


# From here on asinh(x) = log(2 |x|) to the last bit, while the library's x * x would overflow to infinity.
_FAR = 2.0**30


def asinh(x: Expr) -> Expr:
    far = ex.call("copysign", plus(log(absolute(x)), like(x, math.log(2))), x)
    return ex.where(ge(absolute(x), like(x, _FAR)), far, ex.call("asinh", x))


def acosh(x: Expr) -> Expr:
    return ex.where(ge(x, like(x, _FAR)), plus(log(x), like(x, math.log(2))), ex.call("acosh", x))


# --- arithmetic ---------------------------------------------------------------------------------------------


def add(a: Expr, b: Expr, alpha: Number = 1) -> Expr:
    return plus(a, b if alpha == 1 else times(b, like(b, alpha)))


def sub(a: Expr, b: Expr, alpha: Number = 1) -> Expr:
    return minus(a, b if alpha == 1 else times(b, like(b, alpha)))


def rsub(a: Expr, b: Expr, alpha: Number = 1) -> Expr:
    return sub(b, a, alpha)


def reciprocal(x: Expr) -> Expr:
    return over(like(x, 1), x)


def rsqrt(x: Expr) -> Expr:
    return over(like(x, 1), sqrt(x))


def square(x: Expr) -> Expr:
    return times(x, x)


def frac(x: Expr) -> Expr:
    return minus(x, ex.call("trunc", x))


def sign(x: Expr) -> Expr:
    """-1, 0 or 1; like eager's, 0 for NaN."""
    positive = ex.where(gt(x, like(x, 0)), like(x, 1), like(x, 0))
    if not x.dtype.is_signed:
        return positive
    return ex.where(lt(x, like(x, 0)), like(x, -1), positive)


def rounded(x: Expr, decimals: int = 0) -> Expr:
    """Round half to even, at a decimal place."""
    if not is_float(x):
        return x
    if decimals == 0:
        return ex.call("round", x)
    ten = like(x, 10.0 ** abs(decimals))
    if decimals > 0:
        return over(ex.call("round", times(x, ten)), ten)
    return times(ex.call("round", over(x, ten)), ten)


def whole(name: str) -> Callable[[Expr], Expr]:
    """floor, ceil, trunc: the identity on integers."""
    return lambda x: ex.call(name, x) if is_float(x) else x


def div_trunc(a: Expr, b: Expr) -> Expr:
    return ex.call("trunc", over(a, b)) if is_float(a) else ex.call("truncdiv", a, b)


def div_floor(a: Expr, b: Expr) -> Expr:
    return ex.call("floordiv", a, b)


def addcmul(x: Expr, a: Expr, b: Expr, value: Number = 1) -> Expr:
    scaled = a if value == 1 else times(like(a, value), a)
    return plus(x, times(scaled, b))


def addcdiv(x: Expr, a: Expr, b: Expr, value: Number = 1) -> Expr:
    scaled = a if value == 1 else times(like(a, value), a)
    return plus(x, over(scaled, b))


def lerp(start: Expr, end: Expr, weight: Expr) -> Expr:
    """From the nearer end, so that weights 0 and 1 give the ends exactly."""
    one = like(weight, 1)
    low = plus(start, times(weight, minus(end, start)))
    high = minus(end, times(minus(end, start), minus(one, weight)))
    return ex.where(lt(absolute(weight), like(weight, 0.5)), low, high)


def clamp(x: Expr, low: Expr | None = None, high: Expr | None = None) -> Expr:
    """NaN in ``x`` or in a bound gives NaN; the upper bound wins where the bounds cross. Of equal operands
    the second is taken, so that -0.0 stays itself beside a bound of 0.0."""
    if low is not None:
        x = larger(low, x)
    return x if high is None else smaller(high, x)


def clamp_min(x: Expr, low: Expr) -> Expr:
    return larger(low, x)


def clamp_max(x: Expr, high: Expr) -> Expr:
    return smaller(high, x)


def power(x: Expr, exponent: Expr) -> Expr | None:
    """Constant exponents take the shortcuts of eager's kernel. ``None``: only PyTorch can (integers)."""
    if exponent.op == "const":
        return constant_power(x, exponent.value)
    if not is_float(x):
        return None
    if x.op == "const" and x.value == 1:
        return x
    return ex.call("pow", x, exponent)


def constant_power(x: Expr, n: Number) -> Expr | None:
    if n == 0:
        return like(x, 1)
    if n == 1:
        return x
    if n == 2:
        return times(x, x)
    if n == 3:
        return times(times(x, x), x)
    if is_float(x):
        if n == 0.5:
            return sqrt(x)
        if n == -0.5:
            return rsqrt(x)
        if n == -1:
            return reciprocal(x)
        if n == -2:
            return over(like(x, 1), times(x, x))
        return ex.call("pow", x, like(x, n))
    if n < 0 or n > 64 or n != int(n):
        return None
    out, base, k = like(x, 1), x, int(n)  # by squaring; integers wrap, whatever the order
    while k:
        out = times(out, base) if k & 1 else out
        k >>= 1
        base = times(base, base) if k else base
    return out


# --- bits ---------------------------------------------------------------------------------------------------


def _in_width(x: Expr, n: Expr) -> Expr:
    bits = torch.iinfo(x.dtype).bits
    below = lt(n, like(n, bits))
    return both(ge(n, like(n, 0)), below) if n.dtype.is_signed else below


def shift_left(x: Expr, n: Expr) -> Expr | None:
    """Shifting out of the width gives 0, as eager; C++ would leave it undefined. Floats: PyTorch's own."""
    if is_float(x):
        return None
    if n.op == "const":
        inside = 0 <= n.value < torch.iinfo(x.dtype).bits
        return ex.call("shl", x, n) if inside else like(x, 0)
    ok = _in_width(x, n)
    return ex.where(ok, ex.call("shl", x, ex.where(ok, n, like(n, 0))), like(x, 0))


def shift_right(x: Expr, n: Expr) -> Expr | None:
    """Shifting out of the width leaves the sign. Floats: PyTorch's own."""
    if is_float(x):
        return None
    last = torch.iinfo(x.dtype).bits - 1
    if n.op == "const" and 0 <= n.value <= last:
        return ex.call("shr", x, n)
    if not x.dtype.is_signed:
        ok = _in_width(x, n)
        return ex.where(ok, ex.call("shr", x, ex.where(ok, n, like(n, 0))), like(x, 0))
    return ex.call("shr", x, ex.where(_in_width(x, n), n, like(n, last)))


# --- comparisons and logic ----------------------------------------------------------------------------------


def logical(name: str) -> Callable[..., Expr]:
    """and, or, xor, not of the operands' truth."""
    return lambda *args: ex.call(name, *(truth(a) for a in args))


def isposinf(x: Expr) -> Expr:
    return eq(x, like(x, math.inf)) if is_float(x) else ex.const(False, torch.bool)


def isneginf(x: Expr) -> Expr:
    return eq(x, like(x, -math.inf)) if is_float(x) else ex.const(False, torch.bool)


def float_test(name: str, of_integers: bool) -> Callable[[Expr], Expr]:
    """isnan, isinf, isfinite: the same answer for every integer."""
    return lambda x: ex.call(name, x) if is_float(x) else ex.const(of_integers, torch.bool)


def signbit(x: Expr) -> Expr:
    """The sign bit: set for -0.0 and for a NaN that has it."""
    if not is_float(x):
        return lt(x, like(x, 0)) if x.dtype.is_signed else ex.const(False, torch.bool)
    same_width = torch.int32 if x.dtype is torch.float32 else torch.int64
    bits = ex.bitcast(x, same_width)
    return lt(bits, like(bits, 0))


#: What an operation does to bools, in logic.
BOOLEAN: dict[str, Callable[..., Expr]] = {
    "add": lambda a, b, alpha=True: either(a, b) if alpha else a,
    "mul": both,
    "maximum": either,
    "minimum": both,
    "fmax": either,
    "fmin": both,
    "bitwise_and": both,
    "__and__": both,
    "bitwise_or": either,
    "__or__": either,
    "bitwise_xor": op("logical_xor"),
    "__xor__": op("logical_xor"),
    "bitwise_not": inverse,
    "eq": lambda a, b: inverse(ex.call("logical_xor", a, b)),
    "ne": op("logical_xor"),
    "lt": lambda a, b: both(inverse(a), b),
    "le": lambda a, b: either(inverse(a), b),
    "gt": lambda a, b: both(a, inverse(b)),
    "ge": lambda a, b: either(a, inverse(b)),
    "isfinite": lambda x: ex.const(True, torch.bool),
    "sgn": identity,
    "sign": identity,
    "signbit": lambda x: ex.const(False, torch.bool),
    "isnan": lambda x: ex.const(False, torch.bool),
    "isinf": lambda x: ex.const(False, torch.bool),
    "isposinf": lambda x: ex.const(False, torch.bool),
    "isneginf": lambda x: ex.const(False, torch.bool),
}


# --- activations --------------------------------------------------------------------------------------------


def relu(x: Expr) -> Expr:
    return larger(like(x, 0), x)


def relu6(x: Expr) -> Expr:
    return smaller(like(x, 6), larger(like(x, 0), x))


def silu(x: Expr) -> Expr:
    return over(x, plus(like(x, 1), exp(neg(x))))


def gelu(x: Expr, approximate: str = "none") -> Expr:
    """``x * P(X <= x)`` of a normal X, by erf or by the tanh approximation."""
    half, one = like(x, 0.5), like(x, 1)
    if approximate == "none":
        return times(times(x, half), plus(one, ex.call("erf", times(x, like(x, math.sqrt(0.5))))))
    cube = times(times(x, x), x)
    inner = times(like(x, math.sqrt(2 / math.pi)), plus(x, times(like(x, 0.044715), cube)))
    return times(times(half, x), plus(one, ex.call("tanh", inner)))


def gelu_backward(g: Expr, x: Expr, approximate: str = "none") -> Expr:
    half, one = like(x, 0.5), like(x, 1)
    if approximate == "none":
        cdf = times(half, plus(one, ex.call("erf", times(x, like(x, math.sqrt(0.5))))))
        pdf = times(exp(times(times(x, x), like(x, -0.5))), like(x, 1 / math.sqrt(2 * math.pi)))
        return times(g, plus(cdf, times(x, pdf)))
    beta, kappa = like(x, math.sqrt(2 / math.pi)), like(x, 0.044715)
    squared = times(x, x)
    t = ex.call("tanh", times(beta, plus(x, times(kappa, times(squared, x)))))
    left = times(half, x)
    slope = times(beta, plus(one, times(times(like(x, 3), kappa), squared)))
    outer = times(half, plus(one, t))
    return times(g, plus(outer, times(times(left, minus(one, times(t, t))), slope)))


def _cut(x: Expr) -> Expr:
    """``min(max(x + 3, 0), 6)``, the ramp of the hard activations."""
    return smaller(larger(plus(x, like(x, 3)), like(x, 0)), like(x, 6))


def hardsigmoid(x: Expr) -> Expr:
    return over(_cut(x), like(x, 6))


def hardswish(x: Expr) -> Expr:
    return over(times(x, _cut(x)), like(x, 6))


def elu(x: Expr, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Expr:
    bent = times(expm1(times(x, like(x, input_scale))), like(x, alpha * scale))
    return ex.where(lt(x, like(x, 0)), bent, times(x, like(x, scale)))


SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def selu(x: Expr) -> Expr:
    return elu(x, SELU_ALPHA, SELU_SCALE)


def celu(x: Expr, alpha: Number = 1) -> Expr:
    return elu(x, alpha, 1, 1 / alpha)


def leaky_relu(x: Expr, slope: Number = 0.01) -> Expr:
    return ex.where(gt(x, like(x, 0)), x, times(x, like(x, slope)))


def prelu(x: Expr, weight: Expr) -> Expr:
    return ex.where(gt(x, like(x, 0)), x, times(weight, x))


def softplus(x: Expr, beta: Number = 1, threshold: Number = 20) -> Expr:
    scaled = times(x, like(x, beta))
    soft = over(log1p(exp(scaled)), like(x, beta))
    return ex.where(gt(scaled, like(x, threshold)), x, soft)


def mish(x: Expr) -> Expr:
    return times(x, ex.call("tanh", log1p(exp(x))))


def log_sigmoid(x: Expr) -> Expr:
    return minus(smaller(x, like(x, 0)), log1p(exp(neg(absolute(x)))))


def hardshrink(x: Expr, width: Number = 0.5) -> Expr:
    inside = both(ge(x, like(x, -width)), le(x, like(x, width)))
    return ex.where(inside, like(x, 0), x)


def softshrink(x: Expr, width: Number = 0.5) -> Expr:
    low = ex.where(lt(x, like(x, -width)), plus(x, like(x, width)), times(x, like(x, 0)))  # NaN stays
    return ex.where(gt(x, like(x, width)), minus(x, like(x, width)), low)


def threshold(x: Expr, limit: Expr, value: Expr) -> Expr:
    return ex.where(le(x, limit), value, x)


def threshold_backward(g: Expr, x: Expr, limit: Expr) -> Expr:
    return ex.where(le(x, limit), like(x, 0), g)


def sigmoid_backward(g: Expr, y: Expr) -> Expr:
    return times(times(g, minus(like(y, 1), y)), y)


def tanh_backward(g: Expr, y: Expr) -> Expr:
    return times(g, minus(like(y, 1), times(y, y)))


def silu_backward(g: Expr, x: Expr) -> Expr:
    s = over(like(x, 1), plus(like(x, 1), exp(neg(x))))
    return times(times(g, s), plus(like(x, 1), times(x, minus(like(x, 1), s))))


def hardswish_backward(g: Expr, x: Expr) -> Expr:
    middle = times(g, plus(over(x, like(x, 3)), like(x, 0.5)))
    return ex.where(le(x, like(x, -3)), like(x, 0), ex.where(lt(x, like(x, 3)), middle, g))


def hardsigmoid_backward(g: Expr, x: Expr) -> Expr:
    inside = both(gt(x, like(x, -3)), lt(x, like(x, 3)))
    return ex.where(inside, times(g, like(x, 1 / 6)), like(x, 0))


def hardtanh_backward(g: Expr, x: Expr, low: Number = -1, high: Number = 1) -> Expr:
    return ex.where(either(le(x, like(x, low)), ge(x, like(x, high))), like(x, 0), g)


def leaky_relu_backward(g: Expr, x: Expr, slope: Number, from_result: bool = False) -> Expr:
    return ex.where(gt(x, like(x, 0)), g, times(g, like(x, slope)))


def elu_backward(
    g: Expr, x: Expr, alpha: Number, scale: Number, input_scale: Number, is_result: bool = False
) -> Expr:
    """``x`` is the forward's result or its input, as ``is_result`` says."""
    if is_result:
        slope = times(like(x, input_scale), plus(x, like(x, alpha * scale)))
    else:
        slope = times(exp(times(x, like(x, input_scale))), like(x, input_scale * alpha * scale))
    return ex.where(le(x, like(x, 0)), times(g, slope), times(g, like(x, scale)))


def softplus_backward(g: Expr, x: Expr, beta: Number, threshold: Number) -> Expr:
    scaled = times(x, like(x, beta))
    z = exp(scaled)
    return ex.where(gt(scaled, like(x, threshold)), g, over(times(g, z), plus(z, like(x, 1))))


# --- special functions --------------------------------------------------------------------------------------


def logaddexp(a: Expr, b: Expr) -> Expr:
    """``log(exp(a) + exp(b))``; equal infinities give themselves."""
    infinite = both(ex.call("isinf", a), eq(a, b))
    return ex.where(infinite, a, plus(larger(a, b), log1p(exp(neg(absolute(minus(a, b)))))))


def logaddexp2(a: Expr, b: Expr) -> Expr:
    infinite = both(ex.call("isinf", a), eq(a, b))
    soft = log1p(ex.call("exp2", neg(absolute(minus(a, b)))))
    return ex.where(infinite, a, plus(larger(a, b), times(soft, like(a, 1 / math.log(2)))))


def _x_times(f: Callable[[Expr], Expr]) -> Callable[[Expr, Expr], Expr]:
    def formula(x: Expr, y: Expr) -> Expr:
        product = ex.where(eq(x, like(x, 0)), like(x, 0), times(x, f(y)))
        return ex.where(isnan(y), like(y, math.nan), product)

    return formula


xlogy, xlog1py = _x_times(log), _x_times(log1p)


def entr(x: Expr) -> Expr:
    """``-x log x``: 0 at 0, minus infinity below; NaN stays."""
    positive = times(neg(x), log(x))
    rest = ex.where(eq(x, like(x, 0)), like(x, 0), like(x, -math.inf))
    return ex.where(isnan(x), x, ex.where(gt(x, like(x, 0)), positive, rest))


def ldexp(x: Expr, n: Expr) -> Expr:
    return times(x, ex.call("pow", like(n, 2), n))


def angle(x: Expr) -> Expr:
    """Of a real number: pi below zero, 0 above; NaN stays."""
    side = ex.where(lt(x, like(x, 0)), like(x, math.pi), like(x, 0))
    return ex.where(isnan(x), x, side)


def trigamma(x: Expr) -> Expr:
    """Below one half by reflection, then six steps up, then the asymptotic series in 1 / x."""
    one, low = like(x, 1), lt(x, like(x, 0.5))
    sine = ex.call("sin", times(like(x, math.pi), x))
    mirrored = neg(over(like(x, math.pi**2), times(sine, sine)))
    at = ex.where(low, minus(one, x), x)
    total = ex.where(low, mirrored, like(x, 0))
    for _ in range(6):
        total = plus(total, over(one, times(at, at)))
        at = plus(at, one)
    inverse_square = over(one, times(at, at))
    series = like(x, 1 / 42)
    for coefficient in (1 / 30, 1 / 6):
        series = minus(like(x, coefficient), times(inverse_square, series))
    tail = plus(plus(one, over(one, times(like(x, 2), at))), times(inverse_square, series))
    total = plus(total, over(tail, at))
    return ex.where(low, neg(total), total)


def polygamma(n: int, x: Expr) -> Expr:
    """``(-1)**(n + 1) n! zeta(n + 1, x)``, for ``n > 0``."""
    factor = math.factorial(n) if n <= 170 else math.inf
    return times(like(x, factor if n % 2 else -factor), ex.call("zeta", like(x, n + 1), x))


def spherical_bessel_j0(x: Expr) -> Expr:
    """``sin(x) / x``, near 0 by its series."""
    u = times(x, x)
    near = like(x, 0)
    for k in range(7, -1, -1):
        near = plus(times(near, u), like(x, (-1) ** k / math.factorial(2 * k + 1)))
    value = ex.where(lt(absolute(x), like(x, 0.5)), near, over(ex.call("sin", x), x))
    return ex.where(ex.call("isinf", x), like(x, 0), value)


def frexp(x: Expr) -> tuple[Expr, Expr]:
    """``(m, e)`` with ``x == m 2**e`` and ``m`` in [0.5, 1); zeros, infinities and NaN stay, with 0."""
    wide = x.dtype is torch.float64
    bits, digits, bias = (torch.int64, 52, 1022) if wide else (torch.int32, 23, 126)
    whole = isnan(x)
    for value in (0.0, math.inf, -math.inf):
        whole = either(whole, eq(x, like(x, value)))
    tiny = lt(absolute(x), like(x, 2.0**-bias))  # subnormal
    pattern = ex.bitcast(ex.where(tiny, times(x, like(x, 2.0**digits)), x), bits)
    field = ex.const((2 * bias + 3) << digits, bits)
    exponent = ex.call("shr", ex.call("bitwise_and", pattern, field), ex.const(digits, bits))
    shift = ex.where(tiny, ex.const(bias + digits, bits), ex.const(bias, bits))
    rest = ex.call("bitwise_and", pattern, ex.call("bitwise_not", field))
    mantissa = ex.bitcast(ex.call("bitwise_or", rest, ex.const(bias << digits, bits)), x.dtype)
    none = ex.const(0, torch.int32)
    return ex.where(whole, x, mantissa), ex.where(whole, none, ex.cast(minus(exponent, shift), torch.int32))


def sinc(x: Expr) -> Expr:
    product = times(like(x, math.pi), x)
    return ex.where(eq(x, like(x, 0)), like(x, 1), over(ex.call("sin", product), product))


def logit(x: Expr, eps: Number | None = None) -> Expr:
    if eps is not None:
        x = smaller(larger(x, like(x, eps)), like(x, 1 - eps))
    return log(over(x, minus(like(x, 1), x)))


def heaviside(x: Expr, at_zero: Expr) -> Expr:
    step = ex.where(gt(x, like(x, 0)), like(x, 1), like(x, 0))
    return ex.where(eq(x, like(x, 0)), at_zero, step)


def scaled(factor: float) -> Callable[[Expr], Expr]:
    return lambda x: times(x, like(x, factor))


def nan_to_num(x: Expr, dtype: torch.dtype, nan: Any, posinf: Any, neginf: Any) -> Expr:
    """``dtype`` is what the tensor holds: its largest numbers stand for the infinities."""
    if not is_float(x):
        return x
    info = torch.finfo(dtype)
    top = like(x, info.max if posinf is None else posinf)
    bottom = like(x, info.min if neginf is None else neginf)
    finite = ex.where(isposinf(x), top, ex.where(isneginf(x), bottom, x))
    return ex.where(isnan(x), like(x, 0.0 if nan is None else nan), finite)
