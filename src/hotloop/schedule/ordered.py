"""The kernels of scans and scatters: loops of which some have to run in order.

What comes in: a group of one scan or scatter, its outer axes independent, its inner axes in order. What goes
out: a ``KernelCall``. What holds in between: the points that could meet in one element, or that one running
value goes through, are visited one after the other by one thread, in row-major order, whatever the number
of threads. So results do not depend on it.

Where an independent axis is contiguous, as the columns of an embedding's gradient are, it is the innermost
loop, in vectors, in blocks that are divided over threads; running values then are a row of scratch:

    parallel for block: for i: vector for j in block: out[ids[i], j] = out[ids[i], j] + grad[i, j]

So are the short rows of a scatter, all of which one thread writes: threads that took a column each would
write to the same cache lines, and wait for each other at every point.

The next file is ``memory.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir import sizes as sz
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index, IndexLike
from hotloop.ir.kernel import KernelCall, Let, Loop, Scratch, Stmt, Store
from hotloop.ir.loops import Buffer, Scan, Scatter
from hotloop.ir.rewrite import drop_roundings

from .axes import FAR_BYTES, access_cost, accesses, choose_vector_axis, flat_index, split_axes
from .fuse import Group, Member
from .loops import (
    Loops,
    Machine,
    block_size,
    finish,
    order_and_merge,
    origins,
    quotient,
    substitute_statements,
)
from .passes import Nest, Pass
from .simplify import extents

__all__ = ["build_ordered"]

#: An independent axis shorter than this is not worth a vector loop, but where threads would share its lines.
SHORT = 8
#: Running values side by side: a few kilobytes, which stay in the first-level cache.
LANES = 512
_COMBINE = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
_RUN, _AT, _PLACE = "run", "at", ix.var("place", LANES)


def build_ordered(
    g: Group, buffers: Mapping[str, Buffer], stored: set[str], machine: Machine, keep_roundings: bool
) -> KernelCall:
    """The kernel of a group of one scan or scatter."""
    g = split_axes(g, buffers)
    (m,) = g.members
    value = _flat(m.body, buffers)
    if not keep_roundings and not _is_arg(m):
        value = drop_roundings(value)
    if isinstance(m.op, Scatter) and not g.inner:  # a slice: nothing has to be in order
        nest = Nest(g.outer, (), (), _scatter(m, m.op, buffers, value), (), False)
        nest, vector = order_and_merge(nest, choose_vector_axis(g, buffers, stored), True)
        return _finished(g, Loops(nest, vector, machine).build(), buffers, machine)
    if isinstance(m.op, Scatter):
        nest = Nest(g.outer, g.inner, (), (), (Pass((), _scatter(m, m.op, buffers, value), ()),), False)
    else:
        assert isinstance(m.op, Scan)
        step = Pass((), _scan(m, m.op, buffers, value), ())
        nest = Nest(g.outer, g.inner, _scratch(m.op), _start(m.op), (step,), False)
    nest, vector = order_and_merge(nest, _vector_axis(g, buffers), True)
    return _finished(g, _Ordered(nest, vector, machine).build(), buffers, machine)


def _finished(
    g: Group, body: tuple[Stmt, ...], buffers: Mapping[str, Buffer], machine: Machine
) -> KernelCall:
    (m,) = g.members
    points = sz.product(a.extent for a in g.axes)
    work = ex.cost(m.body) * sz.hint(points)
    kind, updated = ("scatter", m.op.out) if isinstance(m.op, Scatter) else ("scan", None)
    return finish(kind, origins(g), body, buffers, machine, points, work, not g.inner, updated)


def _is_arg(m: Member) -> bool:
    return isinstance(m.op, Scan) and m.op.kind in ("argmax", "argmin")


def _flat(e: Expr, buffers: Mapping[str, Buffer]) -> Expr:
    """The value with every load at a flat position."""
    return ex.rewrite_loads(
        e, lambda n: ex.load(n.buffer, (flat_index(buffers, n.buffer, n.indices),), n.dtype)
    )


def _vector_axis(g: Group, buffers: Mapping[str, Buffer]) -> Index | None:
    """The independent axis along which most bytes are contiguous; ``None`` where lanes would be far apart."""
    best: tuple[float, int] | None = None
    chosen: Index | None = None
    (m,) = g.members
    flats = [(flat, buffers[name].dtype.itemsize) for name, flat in accesses(buffers, m)]
    for rank, axis in enumerate(reversed(g.outer)):
        short = extents((axis,)) < SHORT and not _shares_lines(m, axis, buffers)
        if short or all(ix.coefficient(f, axis) != 1 for f, _ in flats):
            continue
        cost = sum(access_cost(f, axis, size) for f, size in flats)
        if best is None or (cost, rank) < best:
            best, chosen = (cost, rank), axis
    return chosen


def _shares_lines(m: Member, axis: Index, buffers: Mapping[str, Buffer]) -> bool:
    """Whether a scatter writes points that are neighbours along an axis to the same cache line.

    A scan may too, but has long columns and keeps one running value of each in a register.
    """
    if not isinstance(m.op, Scatter):
        return False
    _, terms = ix.linear_terms(flat_index(buffers, m.op.out, m.store))
    step = dict(terms).get(axis)
    return step is not None and abs(step) * buffers[m.op.out].dtype.itemsize < FAR_BYTES


# --- what happens at one point ------------------------------------------------------------------------------


def _scatter(m: Member, op: Scatter, buffers: Mapping[str, Buffer], value: Expr) -> tuple[Stmt, ...]:
    here = _flat(ex.load(op.out, m.store, buffers[op.out].dtype), buffers)
    if op.kind != "set":
        value = ex.call(_COMBINE[op.kind], here, value)
    if buffers[op.out].kind == "input":
        # An index out of range is reported at the end, and goes to element 0 until then: nothing may change
        # there, for the caller still has this tensor when the error has been raised.
        for a in ix.indirect_atoms(here.indices[0]):
            payload, size, checked = a.args
            if checked:
                value = ex.where(_within(ex.cast(payload, torch.int64), size), value, here)
    return (Store(op.out, here.indices[0], value),)


def _within(at: Expr, size: IndexLike) -> Expr:
    above = ex.call("ge", at, ex.const(0, torch.int64))
    return ex.call("logical_and", above, ex.call("lt", at, ex.index_value(size)))


def _neutral(kind: str, dtype: torch.dtype) -> Expr:
    if kind in ("sum", "prod"):
        return ex.const(0 if kind == "sum" else 1, dtype)
    lowest = kind in ("max", "argmax", "logaddexp")
    if dtype.is_floating_point:
        return ex.const(float("-inf") if lowest else float("inf"), dtype)
    info = torch.iinfo(dtype)
    return ex.const(info.min if lowest else info.max, dtype)


def _scratch(op: Scan) -> tuple[Scratch, ...]:
    """The running values; how many there are side by side is decided with the loops."""
    run = Scratch(_RUN, op.body.dtype, 1)
    return (run, Scratch(_AT, torch.int64, 1)) if op.kind in ("argmax", "argmin") else (run,)


def _start(op: Scan) -> tuple[Stmt, ...]:
    """The running values before the first point."""
    first: list[Stmt] = [Store(_RUN, _PLACE, _neutral(op.kind, op.body.dtype))]
    if op.kind in ("argmax", "argmin"):
        first.append(Store(_AT, _PLACE, ex.const(0, torch.int64)))
    return tuple(first)


def _scan(m: Member, op: Scan, buffers: Mapping[str, Buffer], value: Expr) -> tuple[Stmt, ...]:
    """One step of the running value, and its result."""
    dtype = value.dtype
    new, run = ex.local("new", dtype), ex.load(_RUN, (_PLACE,), dtype)
    body: list[Stmt] = [Let("new", value)]
    if op.kind in ("sum", "prod"):
        now = ex.call(_COMBINE[op.kind], run, new)
    elif op.kind == "logaddexp":
        now = _logaddexp(new, run)
    else:
        # Eager's rule: the later of two equal extremes counts, and a NaN from the first one on.
        takes = ex.call("ge" if op.kind in ("max", "argmax") else "le", new, run)
        if dtype.is_floating_point:
            takes = ex.call("logical_or", takes, ex.call("isnan", new))
        body.append(Let("takes", takes))
        now = ex.where(ex.local("takes", torch.bool), new, run)
    body.append(Let("now", now))
    body.append(Store(_RUN, _PLACE, ex.local("now", dtype)))
    out, result = buffers[op.out], ex.local("now", dtype)
    if op.kind in ("argmax", "argmin"):
        assert m.position is not None
        seen = ex.load(_AT, (_PLACE,), torch.int64)
        body.append(Let("where", ex.where(ex.local("takes", torch.bool), ex.index_value(m.position), seen)))
        body.append(Store(_AT, _PLACE, ex.local("where", torch.int64)))
        result = ex.local("where", torch.int64)
    body.append(Store(op.out, flat_index(buffers, op.out, m.store), ex.cast(result, out.dtype)))
    return tuple(body)


def _logaddexp(x: Expr, y: Expr) -> Expr:
    """``max + log1p(exp(min - max))``; of two equal infinities, where that is NaN, the infinity."""
    low, high = ex.call("minimum", x, y), ex.call("maximum", x, y)
    both = ex.call("logical_and", ex.call("eq", low, high), ex.call("isinf", low))
    more = ex.call("log1p", ex.call("exp", ex.call("sub", low, high)))
    return ex.where(both, x, ex.call("add", more, high))


# --- the loops ----------------------------------------------------------------------------------------------


class _Ordered:
    """Builds the loops around the points of one nest."""

    def __init__(self, nest: Nest, vector: Index | None, machine: Machine) -> None:
        self.nest = nest
        self.vector = vector
        self.loops = Loops(nest, vector, machine)

    def build(self) -> tuple[Stmt, ...]:
        n, v = self.nest, self.vector
        (sweep,) = n.passes
        if v is None:
            start, point = (_placed(body, ix.const(0)) for body in (n.before, sweep.body))
            return self.loops.wrap(n.outer, (*self.scratch(1), *start, *self.swept(point)))
        rest = tuple(a for a in n.outer if a is not v)
        extent = v.extent
        size, kind = self.block(sz.hint(extent), extents(rest))
        if size is None or (isinstance(extent, int) and size >= extent):
            return self.loops.wrap(rest, self.lanes(v, ix.const(0), extent, extent))
        block = ix.var(f"{v.name}b", quotient(extent, size))
        stop: IndexLike = block * size + size
        if sz.plain(ix.mod(extent, size)) != 0:
            stop = ix.minimum(stop, extent)
        body = self.lanes(v, block * size, stop, size)
        return self.loops.wrap(rest, (Loop(block, 0, block.extent, kind, body),))

    def block(self, extent: int, rest: int) -> tuple[int | None, str]:
        """How many lanes a thread takes at a time (``None``: all), and whether threads share them out."""
        few = rest < self.loops.enough
        size = block_size(extent, self.loops.enough, 64) if few else None
        if self.nest.scratch:
            size = LANES if size is None else min(size, LANES)
        return size, "parallel" if few else "serial"

    def lanes(self, v: Index, start: Index, stop: IndexLike, size: IndexLike) -> tuple[Stmt, ...]:
        """All that happens in a block of lanes."""

        def across(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
            return (Loop(v, start, stop, "vector", _placed(body, v - start)),) if body else ()

        (sweep,) = self.nest.passes
        return (*self.scratch(size), *across(self.nest.before), *self.swept(across(sweep.body)))

    def scratch(self, size: IndexLike) -> tuple[Scratch, ...]:
        return tuple(replace(s, size=size) for s in self.nest.scratch)

    def swept(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        for a in reversed(self.nest.inner):
            body = (Loop(a, 0, a.extent, "serial", body),)
        return body


def _placed(body: tuple[Stmt, ...], place: Index) -> tuple[Stmt, ...]:
    return substitute_statements(body, {_PLACE: place})
