"""Lowering rules of products of few elements: matrices, vectors and convolutions that a call would outweigh.

What comes in: operands of a matrix product or a convolution and its plain arguments. What goes out: a
``Reduce`` over the products, and a ``Pointwise`` where something is added. What holds in between:
sums run in float32 where the dtype is bfloat16 or float16, integers in int64; anything with more
multiplications than a constant here is a library's work, and the rule declines.

The next file is ``ranks.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hotloop.ir import expr as ex
from hotloop.ir import sizes as sz
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index, IndexLike

from .builder import Builder, Rule, Tensor, View
from .pointwise import element, fits
from .reductions import SUPPORTED, compute_dtype, result
from .views import between, moved

__all__ = ["MOST", "RULES"]

aten = torch.ops.aten
Node = torch.fx.Node
Vars = tuple[Index, ...]
Point = Sequence[IndexLike]

#: Multiplications that a loop does in the time that calling a library takes: a microsecond or two for a
#: product, about ten for a convolution.
MOST = 4096
MOST_OF_CONVOLUTION = 16384


def _total(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the sum."""
    return compute_dtype(dtype) if dtype.is_floating_point else torch.int64


def _taken(b: Builder, like: Tensor, terms: IndexLike, *tensors: View, most: int = MOST) -> bool:
    """Whether the product is this module's: few elements, a dtype that eager multiplies, and no weight.

    A weight that lasts is kept in the order that suits a kernel of its own, or the library.
    """
    if not sz.is_static((*like.shape, *(n for t in tensors for n in t.sizes))):
        return False
    usual = all(t.dtype is like.dtype and t.dtype in SUPPORTED for t in tensors)
    lasting = like.dtype.is_floating_point and any(_lasts(b, t) for t in tensors)
    few = sz.static(like.numel()) * sz.static(terms) <= most
    return usual and few and not lasting and like.dtype is not torch.bool


def _lasts(b: Builder, x: View) -> bool:
    return b.buffers[x.buffer].lasting or b.buffers[x.buffer].kind == "constant"


def _sum_of_products(
    b: Builder, like: Tensor, terms: Sequence[IndexLike], left: Callable[[Vars, Vars], Expr],
    right: Callable[[Vars, Vars], Expr], dtype: torch.dtype,
) -> View:  # fmt: skip
    total = _total(like.dtype)

    def body(v: Vars, r: Vars) -> Expr:
        return ex.call("mul", ex.cast(left(v, r), total), ex.cast(right(v, r), total))

    return b.reduce(tuple(like.shape), terms, "sum", dtype, body, like)


def _matmul(b: Builder, like: Tensor, x: View, y: View, dtype: torch.dtype) -> View:
    """``x @ y`` for matrices, batches of them, or vectors, as `dtype`."""
    lead = x.ndim - 2 if x.ndim > 2 else 0

    def left(v: Vars, r: Vars) -> Expr:
        return x.at((*v[:lead], *v[lead : x.ndim - 1], *r))

    def right(v: Vars, r: Vars) -> Expr:
        return y.at((*v[:lead], *r, *v[x.ndim - 1 :]))

    return _sum_of_products(b, like, (x.sizes[-1],), left, right, dtype)


def _product(b: Builder, node: Node, x: View, y: View) -> Any:
    """mm, bmm, mv, dot: nothing is added."""
    like = result(node)
    if not _taken(b, like, x.sizes[-1], x, y):
        return NotImplemented
    return _matmul(b, like, x, y, like.dtype)


def _product_added(
    b: Builder, node: Node, c: View, x: View, y: View, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    """addmm, addmv, baddbmm: ``beta * c + alpha * (x @ y)``; a ``beta`` of 0 ignores ``c``, NaN and all."""
    like = result(node)
    if not _taken(b, like, x.sizes[-1], c, x, y) or not (fits(alpha, like.dtype) and fits(beta, like.dtype)):
        return NotImplemented
    product = _matmul(b, like, x, y, _total(like.dtype))
    return _added(b, like, c, product.at, beta, alpha)


def _added(
    b: Builder, like: Tensor, c: View, product: Callable[[Point], Expr], beta: Any, alpha: Any
) -> View:
    total = _total(like.dtype)

    def scaled(e: Expr, factor: Any) -> Expr:
        return e if factor == 1 else ex.call("mul", e, ex.const(factor, total))

    def value(v: Vars) -> Expr:
        out = scaled(product(v), alpha)
        return out if beta == 0 else ex.call("add", scaled(ex.cast(element(c, v), total), beta), out)

    return b.pointwise(tuple(like.shape), like.dtype, value, like)


def _addbmm(b: Builder, node: Node, c: View, x: View, y: View, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """The sum of a batch of products."""
    like = result(node)
    batch, _, inner = x.sizes
    if not _taken(b, like, batch * inner, c, x, y) or not (
        fits(alpha, like.dtype) and fits(beta, like.dtype)
    ):
        return NotImplemented
    product = _sum_of_products(
        b, like, (batch, inner), lambda v, r: x.at((r[0], v[0], r[1])), lambda v, r: y.at((*r, v[1])),
        _total(like.dtype),
    )  # fmt: skip
    return _added(b, like, c, product.at, beta, alpha)


def _addr(b: Builder, node: Node, c: View, x: View, y: View, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """``beta * c + alpha * outer(x, y)``."""
    like = result(node)
    if not _taken(b, like, 0, c, x, y) or not (fits(alpha, like.dtype) and fits(beta, like.dtype)):
        return NotImplemented
    total = _total(like.dtype)

    def outer(v: Point) -> Expr:
        return ex.call("mul", ex.cast(x.at((v[0],)), total), ex.cast(y.at((v[1],)), total))

    return _added(b, like, c, outer, beta, alpha)


def _trilinear(
    b: Builder, node: Node, x: View, y: View, z: View, expand_x: Sequence[int], expand_y: Sequence[int],
    expand_z: Sequence[int], sumdim: Sequence[int], unroll_dim: int = 1,
) -> Any:  # fmt: skip
    """The sum along some dimensions of a product of three tensors, each with dimensions of its own."""
    like = result(node)
    count = x.ndim + len(expand_x)
    full: list[IndexLike] = [1] * count
    own = []
    for t, gone in ((x, expand_x), (y, expand_y), (z, expand_z)):
        dims = [d for d in range(count) if d not in gone]
        own.append(dims)
        full = [n if n != 1 or d not in dims else t.sizes[dims.index(d)] for d, n in enumerate(full)]
    summed = sorted(sumdim)
    terms = [full[d] for d in summed]
    if not _taken(b, like, sz.product(terms), x, y, z) or not like.dtype.is_floating_point:
        return NotImplemented
    total = _total(like.dtype)

    def term(v: Vars, r: Vars) -> Expr:
        reduced, kept = iter(r), iter(v)
        point = [next(reduced) if d in summed else next(kept) for d in range(count)]
        factors = (
            ex.cast(element(t, tuple(point[d] for d in dims)), total)
            for t, dims in zip((x, y, z), own, strict=True)
        )
        first, second, third = factors
        return ex.call("mul", ex.call("mul", first, second), third)

    return b.reduce(tuple(like.shape), terms, "sum", like.dtype, term, like)


# --- convolutions -------------------------------------------------------------------------------------------


def _convolution(
    b: Builder, node: Node, x: View, weight: View, bias: View | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int],
    groups: int,
) -> Any:  # fmt: skip
    """A convolution of few elements, transposed or not, in groups or not."""
    like = result(node)
    n = x.ndim - 2
    if not sz.is_static((*x.sizes, *weight.sizes)):
        return NotImplemented
    kernel = [sz.static(k) for k in weight.sizes[2:]]
    per_group = sz.static(x.sizes[1]) // groups
    operands = (x, weight) if bias is None else (x, weight, bias)
    terms = per_group * math.prod(kernel)
    if not like.dtype.is_floating_point or not _taken(b, like, terms, *operands, most=MOST_OF_CONVOLUTION):
        return NotImplemented
    if like.numel() == 0 or x.numel == 0:
        return NotImplemented
    steps, pads, gaps = (_spread(value, n) for value in (stride, padding, dilation))
    outs = sz.static(like.shape[1]) // groups
    total = _total(like.dtype)

    def places(v: Vars, r: Vars) -> tuple[Expr, list[IndexLike]]:
        """Where an output meets the input under element ``r`` of the kernel, and whether it does."""
        inside = ex.const(True, torch.bool)
        at: list[IndexLike] = []
        for k in range(n):
            if transposed:
                spot = v[2 + k] + pads[k] - r[1 + k] * gaps[k]
                hit = ex.call("eq", ex.index_value(spot % steps[k]), ex.const(0, torch.int64))
                place = spot // steps[k]
                inside = ex.call("logical_and", inside, hit)
            else:
                place = v[2 + k] * steps[k] + r[1 + k] * gaps[k] - pads[k]
            inside = ex.call("logical_and", inside, between(place, 0, x.sizes[2 + k]))
            at.append(place)
        return inside, at

    def left(v: Vars, r: Vars) -> Expr:
        inside, at = places(v, r)
        channel = (v[1] // outs) * per_group + r[0]
        return ex.masked(inside, ex.cast(x.at((v[0], channel, *at)), total), ex.const(0, total))

    def right(v: Vars, r: Vars) -> Expr:
        if transposed:
            return weight.at(((v[1] // outs) * per_group + r[0], v[1] % outs, *r[1:]))
        return weight.at((v[1], r[0], *r[1:]))

    product = _sum_of_products(
        b, like, (per_group, *kernel), left, right, like.dtype if bias is None else total
    )
    if bias is None:
        return product
    own = bias
    return moved(b, like, lambda v: ex.call("add", product.at(v), ex.cast(own.at((v[1],)), total)))


def _spread(value: Sequence[int], n: int) -> tuple[int, ...]:
    return tuple(value) * n if len(value) == 1 else tuple(value)


RULES: dict[Any, Rule] = {
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten.mv.default: _product,
    aten.dot.default: _product,
    aten.vdot.default: _product,
    aten.addmm.default: _product_added,
    aten.addmv.default: _product_added,
    aten.baddbmm.default: _product_added,
    aten.addbmm.default: _addbmm,
    aten.addr.default: _addr,
    aten._trilinear.default: _trilinear,
    aten.convolution.default: _convolution,
}
