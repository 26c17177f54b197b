"""Random numbers: uniform and normal ones, dropout, integers, and what is computed from them.

What comes in: FX nodes of random operators. What goes out: elementwise operations on random bits
(``ir.expr.random``), and, at the head of the program, one call of PyTorch's generator that draws a key for
each of these operators. What holds in between: the element at a row-major position has the bits of that
position under the operator's key, so that a value is the same wherever it is computed, by whatever thread,
and however often; ``torch.manual_seed`` decides the keys, and each call draws new ones.

With ``config.fallback_random`` none of these rules is asked: PyTorch draws, and the numbers are eager's.

The next file is ``extern.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hotloop.compat import functional_overloads, operator_arguments
from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir.expr import Expr
from hotloop.ir.index import IndexLike

from .builder import Builder, Rule, View, loop_vars
from .pointwise import DTYPES, compute_dtype, element, scalar, store
from .symbols import is_tensor

__all__ = ["RULES"]

F32, F64, I32, I64 = torch.float32, torch.float64, torch.int32, torch.int64

#: How many bits a uniform number has: as many as fit the dtype, so that none is rounded up to 1.
_DIGITS = {F64: 53, F32: 24, torch.float16: 11, torch.bfloat16: 8}


class Stream:
    """The random bits of one operator's elements: those at ``loop_vars("i", sizes)``."""

    def __init__(self, b: Builder, sizes: tuple[IndexLike, ...]) -> None:
        self._builder = b
        self._key: Expr | None = None
        self._at = ix.linearize(loop_vars("i", sizes), ix.contiguous_strides(sizes))

    def bits(self, word: int = 0) -> Expr:
        """32 bits; there are four such words. A key is drawn only where they are asked for."""
        if self._key is None:
            self._key = self._builder.random_key()
        return ex.random(self._key, self._at, word)

    def integer(self, digits: int, dtype: torch.dtype, words: tuple[int, int] = (0, 1)) -> Expr:
        """A whole number in ``[0, 2**digits)``, exact in ``dtype``; one word has no more than 31 bits."""

        def low(word: int, count: int) -> Expr:
            return ex.cast(ex.call("bitwise_and", self.bits(word), ex.const((1 << count) - 1, I32)), dtype)

        if digits < 32:
            return low(words[0], digits)
        high = ex.call("mul", low(words[0], digits - 31), ex.const(2.0**31, dtype))
        return ex.call("add", high, low(words[1], 31))

    def uniform(self, dtype: torch.dtype) -> Expr:
        """In ``[0, 1)``, in the dtype that ``dtype`` is computed in."""
        digits, compute = _DIGITS[dtype], compute_dtype(dtype)
        return ex.call("mul", self.integer(digits, compute), ex.const(2.0**-digits, compute))

    def positive(self, dtype: torch.dtype) -> Expr:
        """In ``(0, 1]``, finer towards 0 than ``uniform``: for logarithms."""
        compute = compute_dtype(dtype)
        digits = 53 if compute is F64 else 31
        middle = ex.call("add", self.integer(digits, compute), ex.const(0.5, compute))
        return ex.call("mul", middle, ex.const(2.0**-digits, compute))

    def normal(self, dtype: torch.dtype) -> Expr:
        """Mean 0, deviation 1: Box and Muller, "A note on the generation of random normal deviates", 1958."""
        compute = compute_dtype(dtype)
        logarithm = ex.call("log", self.positive(dtype))
        radius = ex.call("sqrt", ex.call("mul", logarithm, ex.const(-2.0, compute)))
        if compute is F64:
            turn = ex.call("mul", self.integer(53, F64, (2, 3)), ex.const(math.tau * 2.0**-53, F64))
        else:  # from -pi to pi
            turn = ex.call("mul", ex.cast(self.bits(1), F32), ex.const(math.tau * 2.0**-32, F32))
        return ex.call("mul", radius, ex.call("cos", turn))

    def event(self, probability: float) -> Expr:
        """A bool that is true with this probability, to 32 bits."""
        limit = round(probability * 2.0**32)
        if limit >= 2**32:
            return ex.const(True, torch.bool)
        return ex.call("lt", self.bits(), ex.const(limit - 2**31, I32))

    def below(self, count: int) -> Expr:
        """An int64 in ``[0, count)``, for counts up to ``2**31``: the upper half of the product with 64 bits.

        Lemire, "Fast random integer generation in an interval", 2019, without his rejection: the chances
        differ by less than one in ``2**33``.
        """
        n, half, mask = ex.const(count, I64), ex.const(32, I64), ex.const(0xFFFFFFFF, I64)
        low, high = (ex.call("bitwise_and", ex.cast(self.bits(word), I64), mask) for word in (0, 1))
        carry = ex.call("shr", ex.call("mul", low, n), half)
        return ex.call("shr", ex.call("add", ex.call("mul", high, n), carry), half)


# --- rules --------------------------------------------------------------------------------------------------

Draw = Callable[[Stream, torch.dtype, dict[str, Any]], Expr | None]


def _rule(overload: Any, draw: Draw) -> Rule:
    """The rule of an operator with one result: ``draw`` gives an element, ``None`` what PyTorch has to do.

    ``draw`` gets the stream, the result's dtype, and the operator's arguments by name.
    """
    parameters = operator_arguments(overload) or ()

    def lower(b: Builder, node: torch.fx.Node, *args: Any, **kwargs: Any) -> Any:
        val = node.meta["val"]
        bound = {p.name: p.default for p in parameters}
        bound.update(zip([p.name for p in parameters], args, strict=False))
        bound.update(kwargs)
        if not _usual(val) or bound.get("generator") is not None or bound.get("names") is not None:
            return NotImplemented
        numbers = [v for k, v in bound.items() if k in _NUMBERS]
        if not all(isinstance(v, (int, float)) and math.isfinite(v) for v in numbers):
            return NotImplemented
        body = draw(Stream(b, tuple(val.shape)), val.dtype, bound)
        return NotImplemented if body is None else store(b, val, body)

    return lower


#: Arguments that have to be known.
_NUMBERS = frozenset(["low", "high", "from", "to", "mean", "std", "lambd", "median", "sigma"])


def _usual(val: Any) -> bool:
    return is_tensor(val) and val.dtype in DTYPES and val.device.type == "cpu" and val.layout is torch.strided


def _scaled(x: Expr, factor: float, shift: float, dtype: torch.dtype) -> Expr:
    product = ex.call("mul", x, scalar(factor, dtype, exact=True))
    return ex.call("add", product, scalar(shift, dtype, exact=True))


def _float(formula: Draw) -> Draw:
    """For floating-point results alone; the others are PyTorch's to refuse."""
    return lambda s, dtype, given: formula(s, dtype, given) if dtype in _DIGITS else None


def _uniform(s: Stream, dtype: torch.dtype, given: dict[str, Any]) -> Expr | None:
    low, high = given["from"], given["to"]
    return _scaled(s.uniform(dtype), high - low, low, dtype) if low <= high else None


def _normal(s: Stream, dtype: torch.dtype, given: dict[str, Any]) -> Expr | None:
    return _scaled(s.normal(dtype), given["std"], given["mean"], dtype) if given["std"] >= 0 else None


def _log_normal(s: Stream, dtype: torch.dtype, given: dict[str, Any]) -> Expr | None:
    if given["std"] <= 0:
        return None
    return ex.call("exp", _scaled(s.normal(dtype), given["std"], given["mean"], dtype))


def _exponential(s: Stream, dtype: torch.dtype, given: dict[str, Any]) -> Expr | None:
    """Never 0: of it one takes the logarithm."""
    compute = compute_dtype(dtype)
    if given["lambd"] <= 0:
        return None
    most = ex.const(1 - 2.0 ** -(53 if compute is F64 else 24), compute)
    u = ex.call("minimum", s.positive(dtype), most)
    return ex.call("mul", ex.call("log", u), ex.const(-1 / given["lambd"], compute))


def _cauchy(s: Stream, dtype: torch.dtype, given: dict[str, Any]) -> Expr | None:
    compute = compute_dtype(dtype)
    if given["sigma"] <= 0:
        return None
    turn = _scaled(s.positive(dtype), math.pi, -math.pi / 2, compute)
    return _scaled(ex.call("tan", turn), given["sigma"], given["median"], dtype)


def _geometric(s: Stream, dtype: torch.dtype, given: dict[str, Any]) -> Expr | None:
    """How many trials until the first success."""
    if not isinstance(given["p"], float) or not 0 < given["p"] < 1:
        return None
    compute = compute_dtype(dtype) if dtype.is_floating_point else F64
    scale = ex.const(1 / math.log1p(-given["p"]), compute)
    waited = ex.call("mul", ex.call("log", s.positive(compute)), scale)
    return ex.cast(ex.call("maximum", ex.call("ceil", waited), ex.const(1, compute)), dtype)


def _integers(s: Stream, dtype: torch.dtype, given: dict[str, Any]) -> Expr | None:
    low, high = given.get("low", given.get("from", 0)), given.get("high", given.get("to"))
    if high is None or not 1 <= high - low <= 2**31:
        return None
    if not dtype.is_floating_point and not _holds(dtype, low, high - 1):
        return None
    return ex.cast(ex.call("add", s.below(high - low), ex.const(low, I64)), dtype)


def _holds(dtype: torch.dtype, low: int, high: int) -> bool:
    if dtype is torch.bool:
        return low >= 0 and high <= 1
    return torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max


def _bernoulli(s: Stream, dtype: torch.dtype, given: dict[str, Any]) -> Expr | None:
    """With a number ``p``, or the tensor of probabilities that the operator is called on."""
    p = given["p"] if "p" in given else given["self"]
    if isinstance(p, (int, float)):
        return ex.cast(s.event(p), dtype) if 0 <= p <= 1 else None
    if not isinstance(p, View) or p.dtype not in _DIGITS:
        return None
    sizes = given["self"].sizes
    compute = compute_dtype(p.dtype)
    chance = ex.call("probability", ex.cast(element(p, loop_vars("i", sizes)), compute))
    return ex.cast(ex.call("lt", s.uniform(compute), chance), dtype)


def _dropout(b: Builder, node: torch.fx.Node, x: View, p: float, train: bool | None) -> Any:
    """The input where the mask holds, times ``1 / (1 - p)``; and the mask."""
    val, mask_val = node.meta["val"]
    if not _usual(val) or val.dtype not in _DIGITS or x.dtype is not val.dtype or not 0 <= p <= 1:
        return NotImplemented
    v = loop_vars("i", val.shape)
    if train is False or p == 0:
        return store(b, val, element(x, v)), store(b, mask_val, ex.const(True, torch.bool))
    mask = store(b, mask_val, Stream(b, tuple(val.shape)).event(1 - p))
    compute = compute_dtype(val.dtype)
    kept = ex.call("mul", ex.cast(element(x, v), compute), ex.cast(element(mask, v), compute))
    scale = scalar(0.0 if p == 1 else 1 / (1 - p), val.dtype, exact=True)
    return store(b, val, ex.call("mul", kept, scale)), mask


def _leaky_slopes(
    b: Builder, node: torch.fx.Node, x: View, noise: View, lower: float = 1 / 8, upper: float = 1 / 3,
    training: bool = False, generator: Any = None,
) -> Any:  # fmt: skip
    """``rrelu``: each element that is not positive times a slope of its own; and the slopes, elsewhere 1."""
    val, noise_val = node.meta["val"]
    if not _usual(val) or val.dtype not in _DIGITS or not training or generator is not None or lower > upper:
        return NotImplemented
    v, compute = loop_vars("i", val.shape), compute_dtype(val.dtype)
    one, zero = ex.const(1, compute), ex.const(0, compute)
    value = ex.cast(element(x, v), compute)
    drawn = _scaled(Stream(b, tuple(val.shape)).uniform(val.dtype), upper - lower, lower, val.dtype)
    slopes = store(b, noise_val, ex.where(ex.call("le", value, zero), drawn, one))
    return store(b, val, ex.call("mul", value, ex.cast(element(slopes, v), compute))), slopes


def _rules() -> dict[Any, Rule]:
    standard: Draw = lambda s, dtype, _: s.normal(dtype)  # noqa: E731 - an entry of the table below
    between: Draw = lambda s, dtype, _: s.uniform(dtype)  # noqa: E731
    named: dict[str, Draw] = {
        **dict.fromkeys(("rand", "rand_like"), _float(between)),
        **dict.fromkeys(("randn", "randn_like"), _float(standard)),
        **dict.fromkeys(("randint", "randint_like", "random"), _integers),
        **dict.fromkeys(("normal", "normal_functional"), _float(_normal)),
        "uniform": _float(_uniform),
        "log_normal": _float(_log_normal),
        "exponential": _float(_exponential),
        "cauchy": _float(_cauchy),
        "geometric": _geometric,
        "bernoulli": _bernoulli,
    }
    rules = {o: _rule(o, draw) for name, draw in named.items() for o in functional_overloads(name)}
    rules.update(dict.fromkeys(functional_overloads("native_dropout"), _dropout))
    rules.update(dict.fromkeys(functional_overloads("rrelu_with_noise_functional"), _leaky_slopes))
    return rules


#: From ATen operator to lowering rule.
RULES: dict[Any, Rule] = _rules()
