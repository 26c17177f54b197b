"""Lowering rules of windows over planes: pools and resizing.

What comes in: a tensor whose last dimensions are a plane (1, 2 or 3 of them) and the window's numbers. What
goes out: for small windows one ``Pointwise`` with the window written out, for large ones a ``Reduce`` over
it. What holds in between: positions are index expressions, so the masks of a window that cannot leave the
plane vanish, and the sums run in eager's order.

The next file is ``patches.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch

from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir import sizes as sz
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index, IndexLike

from .builder import Builder, Rule, Tensor, View
from .reductions import SUPPORTED, compute_dtype, compute_value, result, uses
from .views import all_of, between, moved

__all__ = ["RULES"]

aten = torch.ops.aten
Node = torch.fx.Node
Vars = tuple[Index, ...]
Ints = Sequence[int]

#: Windows of at most so many elements are written out.
_MOST_TAPS = 32


def _tuple(value: int | Ints, n: int, default: Ints | None = None) -> tuple[int, ...]:
    """A window argument for ``n`` dimensions: one number stands for all, an empty list for the default."""
    given = (value,) if isinstance(value, int) else tuple(value)
    if not given and default is not None:
        return tuple(default)
    return given * n if len(given) == 1 else given


def _floats(x: View) -> bool:
    return x.dtype in SUPPORTED and x.dtype.is_floating_point


# --- averages -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Span:
    """The part of one dimension that an output averages: ``start <= i < end``, at most ``taps`` long.

    ``weight`` is the length that counts in the divisor.
    """

    start: IndexLike
    end: IndexLike
    taps: int
    weight: IndexLike


#: (dimension, output position) -> what it averages.
Spans = Callable[[int, Index], _Span]


def _average(b: Builder, node: Node, x: View, n: int, spans: Spans, divisor: int | None = None) -> Any:
    """Average over a span in each of the last ``n`` dimensions."""
    like = result(node)
    dtype = compute_dtype(x.dtype)
    zero = ex.const(0.0, dtype)
    planes = x.sizes[x.ndim - n :]
    probe = [spans(k, ix.var(f"i{x.ndim - n + k}", s)) for k, s in enumerate(like.shape[x.ndim - n :])]
    taps = [s.taps for s in probe]

    def tap(v: Vars, offsets: Sequence[IndexLike]) -> Expr:
        inside: list[Expr] = []
        at: list[IndexLike] = []
        for k, (i, o, size) in enumerate(zip(v[x.ndim - n :], offsets, planes, strict=True)):
            span = spans(k, i)
            position = ix.add(span.start, o)
            inside += [between(position, 0, size), between(position, span.start, span.end)]
            at.append(position)
        return ex.masked(all_of(inside), compute_value(x.at((*v[: x.ndim - n], *at))), zero)

    def divided(v: Vars, total: Expr) -> Expr:
        weight: IndexLike = 1
        for k, i in enumerate(v[x.ndim - n :]):
            weight = ix.mul(weight, spans(k, i).weight)
        by = ex.index_value(weight) if divisor is None else ex.const(divisor, torch.int64)
        return ex.call("div", total, ex.cast(by, dtype))

    if math.prod(taps) > _MOST_TAPS:
        total = b.reduce(tuple(like.shape), taps, "sum", dtype, tap, like)
        return moved(b, like, lambda v: divided(v, total.at(v)))

    def element(v: Vars) -> Expr:
        values = [tap(v, offsets) for offsets in itertools.product(*map(range, taps))]
        total = values[0]
        for value in values[1:]:
            total = ex.call("add", total, value)
        return divided(v, total)

    return moved(b, like, element)


@dataclass(frozen=True)
class _Windows:
    """The windows of ``avg_pool``, along each of the last dimensions."""

    planes: Sequence[IndexLike]
    kernel: Ints
    steps: Ints
    pads: Ints
    count_include_pad: bool

    def span(self, k: int, o: Index) -> _Span:
        start = o * self.steps[k] - self.pads[k]
        # With ceil_mode the last window may stick out beyond the padding: that part never counts.
        end = ix.minimum(start + self.kernel[k], self.planes[k] + self.pads[k])
        weight = end - start
        if not self.count_include_pad:
            weight = ix.minimum(end, self.planes[k]) - ix.maximum(start, 0)
        return _Span(start, end, self.kernel[k], weight)

    def covers(self, k: int) -> int:
        """The most windows that hold one element."""
        return -(-self.kernel[k] // self.steps[k])

    def window(self, k: int, i: Index, r: IndexLike) -> Index:
        """The ``r``-th of the windows that may hold element ``i``."""
        return ix.floordiv(i + self.pads[k], self.steps[k]) - r


@dataclass(frozen=True)
class _Shares:
    """The windows of ``adaptive_avg_pool``: nearly equal shares of each dimension."""

    planes: Sequence[int]
    outs: Sequence[int]

    def span(self, k: int, o: Index) -> _Span:
        size, out = self.planes[k], self.outs[k]
        start = o * size // out
        end = ((o + 1) * size + (out - 1)) // out
        taps = max(-(-(i + 1) * size // out) - i * size // out for i in range(out))
        return _Span(start, end, taps, end - start)

    def covers(self, k: int) -> int:
        """The most shares that hold one element."""
        size, out = self.planes[k], self.outs[k]
        return max(-(-(i + 1) * out // size) - i * out // size for i in range(size))

    def window(self, k: int, i: Index, r: IndexLike) -> Index:
        """The ``r``-th of the shares that may hold element ``i``."""
        return ix.floordiv(i * self.outs[k], self.planes[k]) + r


def _windows(
    x: View,
    n: int,
    kernel_size: int | Ints,
    stride: int | Ints,
    padding: int | Ints,
    count_include_pad: bool,
) -> _Windows:
    kernel = _tuple(kernel_size, n)
    steps, pads = _tuple(stride, n, kernel), _tuple(padding, n)
    return _Windows(x.sizes[x.ndim - n :], kernel, steps, pads, count_include_pad)


def _avg_pool(n: int) -> Rule:
    def rule(
        b: Builder,
        node: Node,
        x: View,
        kernel_size: int | Ints,
        stride: int | Ints = (),
        padding: int | Ints = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        if not _floats(x) or 0 in x.sizes:
            return NotImplemented
        how = _windows(x, n, kernel_size, stride, padding, count_include_pad)
        return _average(b, node, x, n, how.span, divisor_override)

    return rule


def _shares(x: View, n: int, output_size: Sequence[IndexLike]) -> _Shares:
    return _Shares([sz.static(s) for s in x.sizes[x.ndim - n :]], [sz.static(s) for s in output_size])


def _adaptive_avg_pool(n: int) -> Rule:
    def rule(b: Builder, node: Node, x: View, output_size: Ints) -> Any:
        if not _floats(x) or 0 in x.sizes or 0 in tuple(output_size):
            return NotImplemented
        return _average(b, node, x, n, _shares(x, n, output_size).span)

    return rule


def _average_backward(
    b: Builder, node: Node, grad: View, n: int, how: _Windows | _Shares, divisor: int | None = None
) -> Any:
    """Each element gets its part of the gradients of the windows that hold it."""
    like = result(node)
    lead = grad.ndim - n
    outs = grad.sizes[lead:]

    def part(v: Vars, r: Sequence[IndexLike]) -> Expr:
        inside: list[Expr] = []
        at: list[IndexLike] = []
        weight: IndexLike = 1
        for k, (i, back, size) in enumerate(zip(v[lead:], r, outs, strict=True)):
            o = how.window(k, i, back)
            span = how.span(k, o)
            inside += [between(o, 0, size), between(i, span.start, span.end)]
            at.append(o)
            weight = ix.mul(weight, span.weight)
        g = compute_value(grad.at((*v[:lead], *at)))
        by = ex.index_value(weight) if divisor is None else ex.const(divisor, torch.int64)
        return ex.masked(all_of(inside), ex.call("div", g, ex.cast(by, g.dtype)), ex.const(0.0, g.dtype))

    covers = [how.covers(k) for k in range(n)]
    if math.prod(covers) > _MOST_TAPS:
        return b.reduce(tuple(like.shape), covers, "sum", like.dtype, part, like)

    def element(v: Vars) -> Expr:
        parts = [part(v, r) for r in itertools.product(*map(range, covers))]
        return reduce(partial(ex.call, "add"), parts)

    return b.pointwise(tuple(like.shape), like.dtype, element, like)


def _avg_pool_backward(n: int) -> Rule:
    def rule(
        b: Builder,
        node: Node,
        grad: View,
        x: View,
        kernel_size: Ints,
        stride: Ints,
        padding: Ints,
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> Any:
        if not _floats(grad) or grad.dtype is not x.dtype or 0 in (*grad.sizes, *x.sizes):
            return NotImplemented
        how = _windows(x, n, kernel_size, stride, padding, count_include_pad)
        return _average_backward(b, node, grad, n, how, divisor_override)

    return rule


def _adaptive_avg_pool_backward(n: int) -> Rule:
    def rule(b: Builder, node: Node, grad: View, x: View) -> Any:
        if not _floats(grad) or grad.dtype is not x.dtype or 0 in (*grad.sizes, *x.sizes):
            return NotImplemented
        how = _shares(x, n, grad.sizes[grad.ndim - n :])
        if any(how.covers(k) != 1 for k in range(n)):
            return NotImplemented  # shares that overlap, or repeat, are gathered faster by eager's loops
        return _average_backward(b, node, grad, n, how)

    return rule


# --- maxima -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Window:
    """A strided, dilated window over the last dimensions of a view."""

    x: View
    kernel: tuple[int, ...]
    steps: tuple[int, ...]
    pads: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def n(self) -> int:
        return len(self.kernel)

    @property
    def planes(self) -> tuple[IndexLike, ...]:
        return self.x.sizes[self.x.ndim - self.n :]

    @property
    def lowest(self) -> Expr:
        dtype = compute_dtype(self.x.dtype)
        return ex.const(-math.inf if dtype.is_floating_point else torch.iinfo(dtype).min, dtype)

    def tap(self, v: Vars, offsets: Sequence[IndexLike]) -> tuple[Expr, Expr, Expr]:
        """(whether the tap is in the plane, its value or the lowest one, its position in the plane)."""
        lead = self.x.ndim - self.n
        at = [
            ix.add(o * s - p, ix.mul(k, d))
            for o, k, s, p, d in zip(v[lead:], offsets, self.steps, self.pads, self.dilation, strict=True)
        ]
        inside = all_of([between(i, 0, size) for i, size in zip(at, self.planes, strict=True)])
        value = ex.masked(inside, compute_value(self.x.at((*v[:lead], *at))), self.lowest)
        return inside, value, ex.index_value(self.flat(at))

    def flat(self, at: Sequence[IndexLike]) -> Index:
        strides = [sz.product(self.planes[k + 1 :]) for k in range(self.n)]
        return ix.linearize(at, strides)

    def first(self, v: Vars) -> Expr:
        """The first position of the window in the plane: the result where every value is -inf."""
        at: list[IndexLike] = []
        for o, s, p, d in zip(v[self.x.ndim - self.n :], self.steps, self.pads, self.dilation, strict=True):
            start = o * s - p
            at.append(start + ix.maximum((-start + (d - 1)) // d, 0) * d)
        return ex.index_value(self.flat(at))


@dataclass(frozen=True)
class _AdaptiveWindow(_Window):
    """The part of the plane that falls to an output: its length differs from output to output."""

    outs: tuple[int, ...] = ()

    def start(self, k: int, o: IndexLike) -> IndexLike:
        return o * self.planes[k] // self.outs[k]

    def tap(self, v: Vars, offsets: Sequence[IndexLike]) -> tuple[Expr, Expr, Expr]:
        lead = self.x.ndim - self.n
        inside, at = [], []
        for k, (o, offset) in enumerate(zip(v[lead:], offsets, strict=True)):
            place = ix.add(self.start(k, o), offset)
            end = ((o + 1) * self.planes[k] + (self.outs[k] - 1)) // self.outs[k]
            inside += [between(place, 0, self.planes[k]), between(place, 0, end)]
            at.append(place)
        value = ex.masked(all_of(inside), compute_value(self.x.at((*v[:lead], *at))), self.lowest)
        return all_of(inside), value, ex.index_value(self.flat(at))

    def first(self, v: Vars) -> Expr:
        lead = self.x.ndim - self.n
        return ex.index_value(self.flat([self.start(k, o) for k, o in enumerate(v[lead:])]))


def _adaptive_max_pool(n: int) -> Rule:
    def rule(b: Builder, node: Node, x: View, output_size: Ints) -> Any:
        planes = x.sizes[x.ndim - n :]
        if not _floats(x) or 0 in x.sizes or 0 in output_size or not sz.is_static((*planes, *output_size)):
            return NotImplemented
        outs = tuple(map(sz.static, output_size))
        taps = tuple(
            max(-(-(i + 1) * size // out) - i * size // out for i in range(out))
            for size, out in zip(map(sz.static, planes), outs, strict=True)
        )
        if math.prod(taps) > _MOST_TAPS:
            return NotImplemented
        return _maxima(b, node, _AdaptiveWindow(x, taps, (), (), (), outs))

    return rule


def _max_pool(n: int) -> Rule:
    def rule(
        b: Builder,
        node: Node,
        x: View,
        kernel_size: int | Ints,
        stride: int | Ints = (),
        padding: int | Ints = 0,
        dilation: int | Ints = 1,
        ceil_mode: bool = False,
    ) -> Any:
        if x.dtype not in SUPPORTED or x.dtype is torch.bool or 0 in x.sizes:
            return NotImplemented
        kernel = _tuple(kernel_size, n)
        w = _Window(x, kernel, _tuple(stride, n, kernel), _tuple(padding, n), _tuple(dilation, n))
        large = math.prod(kernel) > _MOST_TAPS
        if large and uses(node, 1):
            return NotImplemented
        like = result(node, 0)
        if large:
            return (
                b.reduce(tuple(like.shape), kernel, "max", x.dtype, lambda v, r: w.tap(v, r)[1], like),
                None,
            )
        return _maxima(b, node, w)

    return rule


def _maxima(b: Builder, node: Node, w: _Window) -> Any:
    """The largest element of each window, and its position in the plane."""
    offsets = list(itertools.product(*map(range, w.kernel)))

    def value(v: Vars) -> Expr:
        out = w.tap(v, offsets[0])[1]
        for o in offsets[1:]:
            out = ex.call("maximum", out, w.tap(v, o)[1])
        return out

    def position(v: Vars) -> Expr:
        most, at = w.lowest, w.first(v)
        for o in offsets:
            inside, candidate, where = w.tap(v, o)
            # As eager: the first of equal values, but the last of several NaNs.
            better = ex.call("gt", candidate, most)
            if candidate.dtype.is_floating_point:
                better = ex.call("logical_or", better, ex.call("isnan", candidate))
            better = ex.call("logical_and", inside, better)
            most, at = ex.where(better, candidate, most), ex.where(better, where, at)
        return at

    values = moved(b, result(node, 0), value) if uses(node, 0) else None
    return values, moved(b, result(node, 1), position) if uses(node, 1) else None


# --- resizing -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Resize:
    """One dimension of a resize: from ``size`` to ``out`` elements. ``scale`` is input steps per output step.

    ``exact``: the scale is the ratio of the sizes, so that positions are rational and integers express them.
    """

    size: int
    out: int
    scale: float
    exact: bool


def _single(value: float, dtype: torch.dtype) -> float:
    """A number rounded as eager holds it."""
    return float(torch.tensor(value, dtype=dtype).item())


def _resizes(x: View, like: Tensor, scales: Sequence[float | None], dtype: torch.dtype) -> list[_Resize]:
    n = len(scales)
    out: list[_Resize] = []
    for given, to, s in zip(x.sizes[x.ndim - n :], like.shape[x.ndim - n :], scales, strict=True):
        size = sz.static(given)
        ratio = size / sz.static(to)
        scale = ratio if s is None or s <= 0 else 1.0 / s
        exact = _single(scale, dtype) == _single(ratio, dtype)
        out.append(_Resize(size, sz.static(to), _single(scale, dtype), exact))
    return out


def _scaled(o: Index, shift: float, scale: float, dtype: torch.dtype) -> Expr:
    """``(o + shift) * scale`` in floating point."""
    at = ex.cast(ex.index_value(o), dtype)
    if shift:
        at = ex.call("add", at, ex.const(shift, dtype))
    return ex.call("mul", at, ex.const(scale, dtype))


def _clamped(at: Expr, size: int) -> Index:
    """A non-negative floating-point position, truncated, as an index of the last element at most."""
    whole = ex.call("minimum", ex.cast(at, torch.int64), ex.const(size - 1, torch.int64))
    return ix.indirect(whole, size, checked=False)


def _nearest_index(r: _Resize, o: Index, centred: bool) -> Index:
    """Which element an output position copies, as eager computes it in float32."""
    shift = 0.5 if centred else 0.0
    ours = torch.arange(r.out, dtype=torch.int64)
    # Eager takes these two shortcuts for the plain mode whatever the scale given.
    if not centred and r.out == r.size:
        return o
    if not centred and r.out == 2 * r.size:
        return o // 2
    theirs = ((ours.float() + shift) * torch.tensor(r.scale, dtype=torch.float32)).floor().long()
    theirs = theirs.clamp(max=r.size - 1)
    if centred:
        rational, table = (o * 2 + 1) * r.size // (2 * r.out), (ours * 2 + 1) * r.size // (2 * r.out)
    else:
        rational, table = o * r.size // r.out, ours * r.size // r.out
    if torch.equal(theirs, table):
        return rational
    return _clamped(_scaled(o, shift, r.scale, torch.float32), r.size)


def _nearest(n: int, centred: bool) -> Rule:
    def rule(b: Builder, node: Node, x: View, output_size: Any, *scales: float | None, **more: Any) -> Any:
        given = _scales(n, scales, more)
        if x.dtype not in SUPPORTED or 0 in x.sizes:
            return NotImplemented
        like = result(node)
        lead = x.ndim - n
        resizes = _resizes(x, like, given, torch.float32)

        def element(v: Vars) -> Expr:
            at = [_nearest_index(r, o, centred) for r, o in zip(resizes, v[lead:], strict=True)]
            return x.at((*v[:lead], *at))

        return moved(b, like, element)

    return rule


def _scales(n: int, given: Sequence[Any], more: dict[str, Any]) -> list[float | None]:
    """The scales of each dimension: positional or by name, or the list of the ``vec`` overloads."""
    values: list[Any] = [*given, *more.values()]
    if len(values) == 1 and isinstance(values[0], (list, tuple)):
        values = list(values[0])
    return [*values, *[None] * (n - len(values))]


#: Two elements and the weight of the second: an output position lies between them.
Between = tuple[Index, Index, Expr]


def _linear_position(r: _Resize, o: Index, align_corners: bool, dtype: torch.dtype) -> Between:
    """Where an output position lies between two elements.

    ``align_corners``: at ``o * (size - 1) / (out - 1)``; else at ``(o + 1/2) * scale - 1/2``, at least 0.
    """
    if r.out == r.size and (align_corners or r.exact):
        return o, o, ex.const(0.0, dtype)
    if align_corners or r.exact:
        over = max(r.out - 1, 1) if align_corners else 2 * r.out
        above = o * (r.size - 1 if r.out > 1 else 0) if align_corners else (o * 2 + 1) * r.size - r.out
        above = ix.maximum(above, 0)
        first = ix.minimum(above // over, r.size - 1)
        part = ex.cast(ex.index_value(above % over), dtype)
        weight = ex.call("div", part, ex.const(float(over), dtype))
        return first, ix.minimum(first + 1, r.size - 1), weight
    at = ex.call("sub", _scaled(o, 0.5, r.scale, dtype), ex.const(0.5, dtype))
    at = ex.call("maximum", at, ex.const(0.0, dtype))
    first = _clamped(at, r.size)
    weight = ex.call("sub", at, ex.cast(ex.index_value(first), dtype))
    weight = ex.call("minimum", ex.call("maximum", weight, ex.const(0.0, dtype)), ex.const(1.0, dtype))
    return first, ix.minimum(first + 1, r.size - 1), weight


def _linear(n: int) -> Rule:
    """Linear, bilinear and trilinear resizing: a weighted mean of 2, 4 or 8 elements."""

    def rule(
        b: Builder, node: Node, x: View, output_size: Any, align_corners: bool, *scales: Any, **more: Any
    ) -> Any:
        given = _scales(n, scales, more)
        if not _floats(x) or 0 in x.sizes:
            return NotImplemented
        like = result(node)
        lead = x.ndim - n
        dtype = compute_dtype(x.dtype)
        resizes = _resizes(x, like, given, dtype)

        def element(v: Vars) -> Expr:
            where = [
                _linear_position(r, o, align_corners, dtype) for r, o in zip(resizes, v[lead:], strict=True)
            ]
            return _blend(x, v[:lead], where, dtype)

        return moved(b, like, element)

    return rule


def _blend(x: View, at: Sequence[IndexLike], where: Sequence[Between], dtype: torch.dtype) -> Expr:
    """``(1 - w) * first + w * second`` in each dimension, the outermost last."""
    if not where:
        return compute_value(x.at(at))
    first, second, weight = where[0]
    a = _blend(x, (*at, first), where[1:], dtype)
    if first is second:
        return a
    z = _blend(x, (*at, second), where[1:], dtype)
    rest = ex.call("sub", ex.const(1.0, dtype), weight)
    return ex.call("add", ex.call("mul", rest, a), ex.call("mul", weight, z))


RULES: dict[Any, Rule] = {
    aten.avg_pool1d.default: _avg_pool(1),
    aten.avg_pool2d.default: _avg_pool(2),
    aten.avg_pool3d.default: _avg_pool(3),
    aten.avg_pool2d_backward.default: _avg_pool_backward(2),
    aten.avg_pool3d_backward.default: _avg_pool_backward(3),
    aten._adaptive_avg_pool2d_backward.default: _adaptive_avg_pool_backward(2),
    aten._adaptive_avg_pool3d_backward.default: _adaptive_avg_pool_backward(3),
    aten._adaptive_avg_pool2d.default: _adaptive_avg_pool(2),
    aten._adaptive_avg_pool3d.default: _adaptive_avg_pool(3),
    aten.adaptive_avg_pool1d.default: _adaptive_avg_pool(1),
    aten.max_pool2d_with_indices.default: _max_pool(2),
    aten.adaptive_max_pool2d.default: _adaptive_max_pool(2),
    aten.adaptive_max_pool3d.default: _adaptive_max_pool(3),
    aten.max_pool3d_with_indices.default: _max_pool(3),
    aten.upsample_nearest1d.default: _nearest(1, centred=False),
    aten.upsample_nearest2d.default: _nearest(2, centred=False),
    aten.upsample_nearest3d.default: _nearest(3, centred=False),
    aten.upsample_nearest1d.vec: _nearest(1, centred=False),
    aten.upsample_nearest2d.vec: _nearest(2, centred=False),
    aten.upsample_nearest3d.vec: _nearest(3, centred=False),
    aten._upsample_nearest_exact1d.default: _nearest(1, centred=True),
    aten._upsample_nearest_exact2d.default: _nearest(2, centred=True),
    aten._upsample_nearest_exact3d.default: _nearest(3, centred=True),
    aten._upsample_nearest_exact1d.vec: _nearest(1, centred=True),
    aten._upsample_nearest_exact2d.vec: _nearest(2, centred=True),
    aten._upsample_nearest_exact3d.vec: _nearest(3, centred=True),
    aten.upsample_linear1d.default: _linear(1),
    aten.upsample_bilinear2d.default: _linear(2),
    aten.upsample_trilinear3d.default: _linear(3),
    aten.upsample_linear1d.vec: _linear(1),
    aten.upsample_bilinear2d.vec: _linear(2),
    aten.upsample_trilinear3d.vec: _linear(3),
}
