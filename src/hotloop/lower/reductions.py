"""Lowering rules of reductions: sums, extremes, their positions, variances, norms.

What comes in: a view, the dimensions to reduce, and the FX node. What goes out: ``Reduce`` operations, with a
pointwise step after them where the result is not the reduction itself (mean, variance, norm). What holds in
between: bfloat16 and float16 are reduced in float32 and rounded once, integers and bools are summed in int64,
and a case that a rule cannot do returns ``NotImplemented``, which makes it a call through PyTorch.

The next file is ``distances.py``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hotloop.ir import expr as ex
from hotloop.ir import sizes as sz
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index, IndexLike

from .builder import Builder, Rule, Tensor, View
from .symbols import is_tensor

__all__ = ["FLOATS", "RULES", "SUPPORTED", "compute_dtype", "compute_value", "result", "uses", "vector_norm"]

aten = torch.ops.aten

#: The dtypes that generated code works with.
SUPPORTED = frozenset(
    (
        torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool,
        torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
    )
)  # fmt: skip

#: Those of them that are floating-point.
FLOATS = frozenset(d for d in SUPPORTED if d.is_floating_point)

Element = Callable[[Expr, tuple[IndexLike, ...]], Expr]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that arithmetic on ``dtype`` is done in."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def compute_value(x: Expr) -> Expr:
    """A value in its compute dtype."""
    return ex.cast(x, compute_dtype(x.dtype))


def result(node: torch.fx.Node, k: int | None = None) -> Tensor:
    """The fake tensor of the node's result, or of its ``k``-th result."""
    value = node.meta["val"]
    out = value if k is None else value[k]
    assert is_tensor(out)
    return out


def uses(node: torch.fx.Node, k: int) -> bool:
    """Whether anyone reads the ``k``-th result of a node with several."""
    return any(u.target is not operator.getitem or u.args[1] == k for u in node.users)


def _dims(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The dimensions to reduce, in order; ``None`` and an empty list are all of them."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    given = (dim,) if isinstance(dim, int) else dim
    return tuple(sorted({d % ndim for d in given})) if ndim else ()


class _Split:
    """How the coordinates of a view divide into those kept and those reduced."""

    def __init__(self, x: View, dim: int | Sequence[int] | None, keepdim: bool) -> None:
        self.dims = _dims(dim, x.ndim)
        self.keepdim = keepdim
        self.ndim = x.ndim
        self.reduced = tuple(x.sizes[d] for d in self.dims)
        kept = [1 if d in self.dims else s for d, s in enumerate(x.sizes)]
        self.sizes = tuple(s for d, s in enumerate(kept) if keepdim or d not in self.dims)

    @property
    def count(self) -> IndexLike:
        return sz.product(self.reduced)

    def point(self, v: Sequence[IndexLike], r: Sequence[IndexLike]) -> tuple[IndexLike, ...]:
        """The coordinates in the view of element ``r`` of the reduction at output point ``v``."""
        at: list[IndexLike] = []
        kept, reduced = iter(v), iter(r)
        for d in range(self.ndim):
            if d in self.dims:
                at.append(next(reduced))
                if self.keepdim:
                    next(kept)
            else:
                at.append(next(kept))
        return tuple(at)


def _reduce(
    b: Builder,
    x: View,
    s: _Split,
    kind: str,
    dtype: torch.dtype,
    f: Element,
    like: Tensor | None = None,
) -> View:
    """Reduce ``f(element, point)`` into a buffer of ``dtype``."""

    def body(v: tuple[Index, ...], r: tuple[Index, ...]) -> Expr:
        point = s.point(v, r)
        return f(x.at(point), point)

    return b.reduce(s.sizes, s.reduced, kind, dtype, body, like)


def _finish(b: Builder, x: View, f: Callable[[Expr], Expr], like: Tensor) -> View:
    """One pointwise step on the value of a reduction."""
    return b.pointwise(x.sizes, like.dtype, lambda v: f(x.at(v)), like)


def _number(value: float | Index, like: Expr) -> Expr:
    return _size_value(value, like.dtype)


def _size_value(n: float | Index, dtype: torch.dtype) -> Expr:
    """A count as a value: a constant where it is known."""
    return ex.cast(ex.index_value(n), dtype) if isinstance(n, Index) else ex.const(n, dtype)


# --- sums ---------------------------------------------------------------------------------------------------


def _accumulated(dtype: torch.dtype) -> Element:
    """The element as ``dtype`` (eager converts it first), in the dtype that such sums are done in."""
    total = compute_dtype(dtype) if dtype.is_floating_point else torch.int64
    return lambda e, _: ex.cast(ex.cast(e, dtype, implicit=True), total)


def _without_nan(dtype: torch.dtype) -> Element:
    """The same with zeros in the place of NaN."""
    convert = _accumulated(dtype)

    def element(e: Expr, p: tuple[IndexLike, ...]) -> Expr:
        value = convert(e, p)
        if not value.dtype.is_floating_point:
            return value
        return ex.where(ex.call("isnan", value), _number(0.0, value), value)

    return element


def _sum_like(kind: str, element: Callable[[torch.dtype], Element] = _accumulated) -> Rule:
    def rule(
        b: Builder,
        node: torch.fx.Node,
        x: View,
        dim: int | Sequence[int] | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Any:
        out = result(node)
        if x.dtype not in SUPPORTED or out.dtype not in SUPPORTED or out.dtype is torch.bool:
            return NotImplemented
        return _reduce(b, x, _Split(x, dim, keepdim), kind, out.dtype, element(out.dtype), out)

    return rule


def _prod(b: Builder, node: torch.fx.Node, x: View, *, dtype: torch.dtype | None = None) -> Any:
    return _sum_like("prod")(b, node, x)


def _mean(
    b: Builder,
    node: torch.fx.Node,
    x: View,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    out = result(node)
    if x.dtype not in SUPPORTED or out.dtype not in SUPPORTED or not out.dtype.is_floating_point:
        return NotImplemented
    s = _Split(x, dim, keepdim)
    total = _reduce(b, x, s, "sum", compute_dtype(out.dtype), _accumulated(out.dtype), out)
    return _finish(b, total, lambda t: ex.call("div", t, _number(s.count, t)), out)


def _mean_all(b: Builder, node: torch.fx.Node, x: View, *, dtype: torch.dtype | None = None) -> Any:
    return _mean(b, node, x)


def _count_nonzero(b: Builder, node: torch.fx.Node, x: View, dim: int | Sequence[int] | None = None) -> Any:
    if x.dtype not in SUPPORTED:
        return NotImplemented
    return _reduce(
        b,
        x,
        _Split(x, dim, False),
        "sum",
        torch.int64,
        lambda e, _: ex.cast(_nonzero(e), torch.int64),
        result(node),
    )


# --- extremes -----------------------------------------------------------------------------------------------


def _ordered(e: Expr) -> Expr:
    """A value that extremes are defined on: bools become small integers."""
    return ex.cast(e, torch.uint8) if e.dtype is torch.bool else compute_value(e)


def _empty(s: _Split) -> bool:
    """An extreme of nothing has no value: eager raises, and so will the call through PyTorch."""
    return s.count == 0 and sz.product(s.sizes) != 0


def _of_extremes(x: View, dim: int | Sequence[int] | None, keepdim: bool) -> _Split | None:
    """What is kept and what reduced; ``None`` where there is no extreme that generated code could find."""
    s = _Split(x, dim, keepdim)
    return None if x.dtype not in SUPPORTED or _empty(s) else s


def _extreme(b: Builder, x: View, s: _Split, kind: str, like: Tensor) -> View:
    if x.dtype is torch.bool:
        return _reduce(b, x, s, "any" if kind == "max" else "all", torch.bool, lambda e, _: e, like)
    return _reduce(b, x, s, kind, x.dtype, lambda e, _: compute_value(e), like)


def _amax(kind: str) -> Rule:
    def rule(
        b: Builder,
        node: torch.fx.Node,
        x: View,
        dim: int | Sequence[int] | None = None,
        keepdim: bool = False,
    ) -> Any:
        s = _of_extremes(x, dim, keepdim)
        return NotImplemented if s is None else _extreme(b, x, s, kind, result(node))

    return rule


def _position(b: Builder, x: View, s: _Split, kind: str, like: Tensor) -> View:
    return _reduce(b, x, s, kind, torch.int64, lambda e, _: _ordered(e), like)


def _extreme_and_position(kind: str) -> Rule:
    """``max.dim``, ``min.dim``: the values and where the first of them is."""

    def rule(b: Builder, node: torch.fx.Node, x: View, dim: int, keepdim: bool = False) -> Any:
        s = _of_extremes(x, dim, keepdim)
        if s is None:
            return NotImplemented
        value = _extreme(b, x, s, kind, result(node, 0)) if uses(node, 0) else None
        at = _position(b, x, s, f"arg{kind}", result(node, 1)) if uses(node, 1) else None
        return value, at

    return rule


def _arg_extreme(kind: str) -> Rule:
    def rule(b: Builder, node: torch.fx.Node, x: View, dim: int | None = None, keepdim: bool = False) -> Any:
        s = None if x.dtype is torch.bool else _of_extremes(x, dim, keepdim)  # eager refuses bool
        return NotImplemented if s is None else _position(b, x, s, kind, result(node))

    return rule


def _aminmax(
    b: Builder, node: torch.fx.Node, x: View, *, dim: int | None = None, keepdim: bool = False
) -> Any:
    s = _of_extremes(x, dim, keepdim)
    if s is None:
        return NotImplemented
    return tuple(
        _extreme(b, x, s, kind, result(node, k)) if uses(node, k) else None
        for k, kind in enumerate(("min", "max"))
    )


def _nonzero(e: Expr) -> Expr:
    if e.dtype is torch.bool:
        return e
    e = compute_value(e)
    return ex.call("ne", e, _number(0, e))


def _truth(kind: str) -> Rule:
    """``any`` and ``all``. NaN is true. The result of uint8 is uint8."""

    def rule(
        b: Builder,
        node: torch.fx.Node,
        x: View,
        dim: int | Sequence[int] | None = None,
        keepdim: bool = False,
    ) -> Any:
        if x.dtype not in SUPPORTED:
            return NotImplemented
        out = result(node)
        s = _Split(x, dim, keepdim)
        if s.sizes != tuple(out.shape):  # an empty list of dimensions: PyTorch's versions differ
            return NotImplemented
        return _reduce(b, x, s, kind, out.dtype, lambda e, _: _nonzero(e), out)

    return rule


# --- variances ----------------------------------------------------------------------------------------------


def _moments(
    b: Builder, x: View, s: _Split, correction: float, like: Tensor
) -> tuple[Callable[[Expr], Expr], View, View]:
    """(sum of squares -> variance, sum of squared differences, mean): two passes, in the compute dtype.

    The first mean is off by some units in the last place, also where all elements are equal, and a
    normalisation may multiply that by thousands. The second pass adds up the differences from it too: they
    say by how much.
    """
    dtype = compute_dtype(x.dtype)
    total = _reduce(b, x, s, "sum", dtype, lambda e, _: compute_value(e), like)
    count = _size_value(s.count, dtype)
    about = b.pointwise(s.sizes, dtype, lambda v: ex.call("div", total.at(v), count), like)

    def difference(v: tuple[Index, ...], r: tuple[Index, ...]) -> Expr:
        return ex.call("sub", compute_value(x.at(s.point(v, r))), about.at(v))

    def squared(v: tuple[Index, ...], r: tuple[Index, ...]) -> Expr:
        d = difference(v, r)
        return ex.call("mul", d, d)

    differences = b.reduce(s.sizes, s.reduced, "sum", dtype, difference, like)
    squares = b.reduce(s.sizes, s.reduced, "sum", dtype, squared, like)

    def off(v: tuple[Index, ...]) -> Expr:
        return ex.call("div", differences.at(v), count)

    def centred(v: tuple[Index, ...]) -> Expr:
        whole = squares.at(v)
        rest = ex.call("sub", whole, ex.call("mul", differences.at(v), off(v)))
        noise = ex.call("mul", whole, ex.const(_NOISE * torch.finfo(dtype).eps, dtype))
        none = ex.where(ex.call("le", rest, noise), ex.const(0.0, dtype), rest)
        # Too large a sum says nothing of what is left of it.
        return ex.where(ex.call("eq", whole, ex.const(math.inf, dtype)), whole, none)

    mean = b.pointwise(s.sizes, dtype, lambda v: ex.call("add", about.at(v), off(v)), like)
    spread = b.pointwise(s.sizes, dtype, centred, like)
    return (lambda m: ex.call("div", m, _divisor(s.count, correction, m.dtype))), spread, mean


#: What two sums of blocks are off by at most, in units in the last place: less than that left of squares is
#: none.
_NOISE = 32


def _divisor(count: IndexLike, correction: float, dtype: torch.dtype) -> Expr:
    if isinstance(count, int):
        return ex.const(max(count - correction, 0.0), dtype)
    whole = ex.call("sub", _size_value(count, dtype), ex.const(correction, dtype))
    return ex.call("maximum", whole, ex.const(0.0, dtype))


def _deviation(root: bool, with_mean: bool) -> Rule:
    """``var``, ``std`` and their pairs with the mean. ``correction`` is subtracted from the count."""

    def rule(
        b: Builder,
        node: torch.fx.Node,
        x: View,
        dim: int | Sequence[int] | None = None,
        *,
        correction: float | None = None,
        keepdim: bool = False,
    ) -> Any:
        if x.dtype not in SUPPORTED or not x.dtype.is_floating_point:
            return NotImplemented
        s = _Split(x, dim, keepdim)
        like = result(node, 0) if with_mean else result(node)
        scale, squares, mean = _moments(b, x, s, 1.0 if correction is None else float(correction), like)
        final = (lambda m: ex.call("sqrt", scale(m))) if root else scale
        spread = _finish(b, squares, final, like)
        if not with_mean:
            return spread
        if x.dtype is not mean.dtype:
            mean = _finish(b, mean, lambda m: m, result(node, 1))
        return spread, mean

    return rule


def _deviation_unbiased(root: bool, with_mean: bool) -> Rule:
    """The older overloads, which say ``unbiased`` instead of a correction."""
    inner = _deviation(root, with_mean)

    def rule(b: Builder, node: torch.fx.Node, x: View, *args: Any, **kwargs: Any) -> Any:
        dim: Any = None
        rest = list(args)
        if rest and not isinstance(rest[0], bool):
            dim = rest.pop(0)
        dim = kwargs.get("dim", dim)
        unbiased = rest[0] if rest else kwargs.get("unbiased", True)
        keepdim = rest[1] if len(rest) > 1 else kwargs.get("keepdim", False)
        return inner(b, node, x, dim, correction=int(unbiased), keepdim=keepdim)

    return rule


# --- norms --------------------------------------------------------------------------------------------------


def vector_norm(
    b: Builder,
    node: torch.fx.Node,
    x: View,
    ord: float = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """A norm along dimensions: ``(sum |x|**ord)**(1/ord)``, with the limits for ord 0, inf and -inf.

    It overflows where eager's does.
    """
    out = result(node)
    if x.dtype not in SUPPORTED or not x.dtype.is_floating_point or out.dtype not in SUPPORTED:
        return NotImplemented
    s = _Split(x, dim, keepdim)
    p = float(ord)
    total = compute_dtype(out.dtype)

    def magnitude(e: Expr) -> Expr:
        return ex.call("abs", ex.cast(ex.cast(e, out.dtype, implicit=True), total))

    if math.isinf(p):
        if _empty(s):
            return NotImplemented
        return _reduce(b, x, s, "max" if p > 0 else "min", out.dtype, lambda e, _: magnitude(e), out)
    if p == 0:
        return _reduce(b, x, s, "sum", out.dtype, lambda e, _: ex.cast(_nonzero(e), total), out)
    if p == 1:
        return _reduce(b, x, s, "sum", out.dtype, lambda e, _: magnitude(e), out)
    if p == 2:
        squares = _reduce(b, x, s, "sum", total, lambda e, _: ex.call("square", magnitude(e)), out)
        return _finish(b, squares, lambda m: ex.call("sqrt", m), out)
    powers = _reduce(
        b, x, s, "sum", total, lambda e, _: ex.call("pow", magnitude(e), ex.const(p, total)), out
    )
    return _finish(b, powers, lambda m: ex.call("pow", m, _number(1.0 / p, m)), out)


def _norm(
    b: Builder,
    node: torch.fx.Node,
    x: View,
    p: float | None = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    return vector_norm(b, node, x, 2 if p is None else p, dim, keepdim)


def _norm_dtype(b: Builder, node: torch.fx.Node, x: View, p: float | None = 2, *, dtype: torch.dtype) -> Any:
    return vector_norm(b, node, x, 2 if p is None else p)


def _logsumexp(
    b: Builder, node: torch.fx.Node, x: View, dim: int | Sequence[int], keepdim: bool = False
) -> Any:
    """``log(sum(exp(x - m))) + m`` with ``m`` the maximum, 0 where that is infinite."""
    out = result(node)
    if x.dtype not in SUPPORTED or out.dtype not in SUPPORTED:
        return NotImplemented
    s = _Split(x, dim, keepdim)
    dtype = compute_dtype(out.dtype)
    if s.count == 0:
        return b.pointwise(s.sizes, out.dtype, lambda v: ex.const(-math.inf, dtype), out)
    most = _reduce(b, x, s, "max", dtype, lambda e, _: ex.cast(e, dtype), out)

    def finite(v: Sequence[IndexLike]) -> Expr:
        m = most.at(v)
        return ex.where(ex.call("isinf", m), _number(0.0, m), m)

    def shifted(v: tuple[Index, ...], r: tuple[Index, ...]) -> Expr:
        return ex.call("exp", ex.call("sub", ex.cast(x.at(s.point(v, r)), dtype), finite(v)))

    total = b.reduce(s.sizes, s.reduced, "sum", dtype, shifted, out)
    return b.pointwise(
        s.sizes, out.dtype, lambda v: ex.call("add", ex.call("log", total.at(v)), finite(v)), out
    )


RULES: dict[Any, Rule] = {
    aten.sum.default: _sum_like("sum"),
    aten.sum.dim_IntList: _sum_like("sum"),
    aten.prod.default: _prod,
    aten.prod.dim_int: _sum_like("prod"),
    aten.nansum.default: _sum_like("sum", _without_nan),
    aten.mean.default: _mean_all,
    aten.mean.dim: _mean,
    aten.count_nonzero.default: _count_nonzero,
    aten.count_nonzero.dim_IntList: _count_nonzero,
    aten.amax.default: _amax("max"),
    aten.amin.default: _amax("min"),
    aten.max.default: _amax("max"),
    aten.min.default: _amax("min"),
    aten.max.dim: _extreme_and_position("max"),
    aten.min.dim: _extreme_and_position("min"),
    aten.argmax.default: _arg_extreme("argmax"),
    aten.argmin.default: _arg_extreme("argmin"),
    aten.aminmax.default: _aminmax,
    aten.any.default: _truth("any"),
    aten.any.dim: _truth("any"),
    aten.any.dims: _truth("any"),
    aten.all.default: _truth("all"),
    aten.all.dim: _truth("all"),
    aten.all.dims: _truth("all"),
    aten.var.correction: _deviation(root=False, with_mean=False),
    aten.std.correction: _deviation(root=True, with_mean=False),
    aten.var_mean.correction: _deviation(root=False, with_mean=True),
    aten.std_mean.correction: _deviation(root=True, with_mean=True),
    aten.var.default: _deviation_unbiased(root=False, with_mean=False),
    aten.var.dim: _deviation_unbiased(root=False, with_mean=False),
    aten.std.default: _deviation_unbiased(root=True, with_mean=False),
    aten.std.dim: _deviation_unbiased(root=True, with_mean=False),
    aten.var_mean.default: _deviation_unbiased(root=False, with_mean=True),
    aten.var_mean.dim: _deviation_unbiased(root=False, with_mean=True),
    aten.std_mean.default: _deviation_unbiased(root=True, with_mean=True),
    aten.std_mean.dim: _deviation_unbiased(root=True, with_mean=True),
    aten.linalg_vector_norm.default: vector_norm,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten.norm.ScalarOpt_dim_dtype: _norm,
    aten.norm.ScalarOpt_dtype: _norm_dtype,
    aten.logsumexp.default: _logsumexp,
}
