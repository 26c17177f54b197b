"""From a nest to a kernel: loop order, merging, blocks, tiles, the vector loop, threads.

What comes in: a group, the buffers it must leave in memory, and how many threads there are. What goes out: a
``Kernel`` with canonical parameter names, and the buffers to bind to them. What holds in between: every
rewrite keeps the set of points and the value at each. The next file is ``products.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir import sizes as sz
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index, IndexLike
from hotloop.ir.kernel import (
    Accumulate,
    Attend,
    Init,
    Kernel,
    KernelCall,
    Let,
    Loop,
    Multiply,
    Param,
    Scratch,
    Stmt,
    Store,
    statements,
)
from hotloop.ir.loops import Buffer, Origin, Reduce

from .axes import choose_vector_axis, split_axes
from .fuse import Group
from .passes import Nest, build_nest
from .simplify import extents

__all__ = [
    "Loops",
    "Machine",
    "block_size",
    "build_kernel",
    "finish",
    "map_statement",
    "order_and_merge",
    "origins",
    "quotient",
    "substitute_statements",
]

#: A tile's edge, in bytes and in elements, where one operand is walked across the grain: long enough for the
#: prefetchers, short enough for what is turned to stay in the L1 or L2 cache.
TILE_BYTES, TILE = 256, (32, 128)
#: Tiles are not worth it along an axis shorter than this.
SHORT = 16
#: A vector loop is cut at mask borders into at most this many pieces.
MAX_PIECES = 6
#: So many rows are reduced side by side, where rows are at least so long: one row alone is one stream of
#: memory, at which prefetchers stop at each page.
ROWS, LONG_ROW = 4, 256
#: Accumulators that fit in registers beside what is loaded.
MAX_ACCUMULATORS = 8


@dataclass(frozen=True)
class Machine:
    """What loop building needs to know: the number of threads, and below how many bytes a kernel stays
    serial."""

    threads: int
    parallel_threshold: int


def build_kernel(
    g: Group, buffers: Mapping[str, Buffer], stored: set[str], machine: Machine, keep_roundings: bool
) -> KernelCall:
    """The kernel of a group. ``stored``: the buffers needed outside of it; others may be added."""
    g = split_axes(g, buffers)
    vector = choose_vector_axis(g, buffers, stored)
    if vector in g.inner and any(_is_arg(m.op) for m in g.members):
        vector = g.inner[-1]  # the first of equal extremes is the first in loop order
    nest = build_nest(g, buffers, stored, bool(g.inner) and vector in g.outer, keep_roundings)
    nest, vector = order_and_merge(nest, vector, any(_is_arg(m.op) for m in g.members))
    body = Loops(nest, vector, machine).build()
    work = sum(
        ex.cost(m.body) * (extents(g.axes) if m.inner or not g.inner else extents(g.outer)) for m in g.members
    )
    kind = "red" if g.inner else "fused"
    points = sz.product(a.extent for a in g.axes)
    return finish(kind, origins(g), body, buffers, machine, points, work, single_pass=not g.inner)


def _is_arg(op: object) -> bool:
    return isinstance(op, Reduce) and op.kind in ("argmax", "argmin")


# --- rewriting statements -----------------------------------------------------------------------------------


def map_statement(s: Stmt, value: Callable[[Expr], Expr], index: Callable[[Index], Index]) -> Stmt:
    """The statement with ``value`` applied to its values and ``index`` to its indices and bounds."""
    if isinstance(s, Let):
        return Let(s.name, value(s.value))
    if isinstance(s, Store):
        return Store(s.buffer, index(s.index), value(s.value))
    if isinstance(s, Accumulate):
        return Accumulate(s.name, value(s.value), None if s.position is None else index(s.position))
    if isinstance(s, Loop):
        return replace(
            s, start=index(ix.as_index(s.start)), stop=index(ix.as_index(s.stop)),
            body=tuple(map_statement(b, value, index) for b in s.body),
        )  # fmt: skip
    return s


def substitute_statements(body: Sequence[Stmt], mapping: Mapping[Index, IndexLike]) -> tuple[Stmt, ...]:
    """The statements with variables replaced by other indices."""
    if not mapping:
        return tuple(body)
    return tuple(
        map_statement(s, lambda e: e.substitute(mapping), lambda i: ix.substitute(i, mapping)) for s in body
    )


def _nest_statements(n: Nest) -> Iterator[Stmt]:
    yield from n.before
    for p in n.passes:
        yield from p.body
        yield from p.after


def _substitute_nest(
    n: Nest, mapping: Mapping[Index, IndexLike], outer: tuple[Index, ...], inner: tuple[Index, ...]
) -> Nest:
    passes = tuple(
        replace(p, body=substitute_statements(p.body, mapping), after=substitute_statements(p.after, mapping))
        for p in n.passes
    )
    return replace(
        n, outer=outer, inner=inner, before=substitute_statements(n.before, mapping), passes=passes
    )


def _all_indices(n: Nest) -> list[Index]:
    """Every index expression in the nest: flat loads and stores, index values, positions."""
    out: set[Index] = set()
    for s in _nest_statements(n):
        if isinstance(s, Store):
            out.add(s.index)
        if isinstance(s, Accumulate) and s.position is not None:
            out.add(s.position)
        if isinstance(s, (Let, Store, Accumulate)):
            for e in ex.walk(s.value):
                out.update(ex.own_indices(e))
    return sorted(out, key=repr)


# --- order and merging --------------------------------------------------------------------------------------


def order_and_merge(n: Nest, vector: Index | None, keep_inner_order: bool) -> tuple[Nest, Index | None]:
    """Sort axes by falling stride, the vector axis last, and merge neighbours that every access walks as
    one."""
    indices = _all_indices(n)

    def stride(axis: Index) -> float:
        return sum(_stride(i, axis) for i in indices)

    def order(axes: tuple[Index, ...], keep: bool) -> tuple[Index, ...]:
        out = list(axes) if keep else sorted(axes, key=lambda a: -stride(a))
        if vector in out:
            out.remove(vector)
            out.append(vector)
        return tuple(out)

    outer, inner = order(n.outer, False), order(n.inner, keep_inner_order)
    mapping: dict[Index, Index] = {}
    names = iter(range(100))
    new_outer = _merge(outer, indices, mapping, lambda e: ix.var(f"i{next(names)}", e))
    new_inner = _merge(inner, indices, mapping, lambda e: ix.var(f"i{next(names)}", e))
    if vector is not None:
        vector = (new_inner if vector in inner else new_outer)[-1]
    return _substitute_nest(n, mapping, new_outer, new_inner), vector


def _stride(i: Index, axis: Index) -> float:
    """How far an access moves in a step along an axis; about how far, where that is not always the same."""
    c = ix.coefficient(i, axis)
    if c is not None:
        return min(abs(sz.hint(c)), 1e9)
    _, terms = ix.linear_terms(i)
    return sum(min(abs(c), 1e9) * _atom_step(atom, axis) for atom, c in terms if axis in atom.free_vars)


def _atom_step(atom: Index, axis: Index) -> float:
    """A step of ``min``, ``max``, a quotient or a remainder in the middle of an axis; 1 where it is not
    known."""
    if atom.kind in ("var", "indirect"):
        return 1.0
    at = sz.hint(axis.extent) // 2
    d = ix.substitute(atom, {axis: at}) - ix.substitute(atom, {axis: at - 1})
    return abs(d.value) if d.is_const else 1.0


def _merge(
    axes: tuple[Index, ...], indices: list[Index], mapping: dict[Index, Index],
    fresh: Callable[[IndexLike], Index],
) -> tuple[Index, ...]:  # fmt: skip
    """Merge runs of axes ``a, b`` with ``coefficient(a) == coefficient(b) * extent(b)`` in every index."""
    runs: list[list[Index]] = []
    for axis in axes:
        if runs and _mergeable(runs[-1][-1], axis, indices):
            runs[-1].append(axis)
        else:
            runs.append([axis])
    out: list[Index] = []
    for run in runs:
        sizes = [a.extent for a in run]
        whole = fresh(sz.product(sizes))
        out.append(whole)
        if not sz.is_static(sizes):
            # Every index is linear in all of them: the last one takes the others' places.
            mapping.update({**dict.fromkeys(run, ix.const(0)), run[-1]: whole})
            continue
        # The coordinates are div and mod of the merged axis; linear uses of all of them collapse again.
        mapping.update(zip(run, ix.delinearize(whole, sizes), strict=True))
    return tuple(out)


def _mergeable(a: Index, b: Index, indices: list[Index]) -> bool:
    size = b.extent
    for i in indices:
        if a not in i.free_vars and b not in i.free_vars:
            continue
        ca, cb = ix.coefficient(i, a), ix.coefficient(i, b)
        if ca is None or cb is None or ca != sz.plain(cb * size):
            return False
    return True


# --- the loops ----------------------------------------------------------------------------------------------


class Loops:
    """Builds the loop nest of one kernel."""

    def __init__(self, nest: Nest, vector: Index | None, machine: Machine) -> None:
        self.nest = nest
        self.vector = vector
        self.machine = machine
        self.enough = 4 * machine.threads

    def build(self) -> tuple[Stmt, ...]:
        """The kernel's body."""
        n, v = self.nest, self.vector
        if v is None:  # a single point
            return (*n.scratch, *self.point())
        if v in n.inner:
            return self.rows_side_by_side() or self.wrap(n.outer, (*n.scratch, *self.point()))
        rest = tuple(a for a in n.outer if a is not v)
        across = self.across_the_grain(rest) if not n.inner else None
        if across is not None:
            return self.tiled(tuple(a for a in rest if a is not across), across)
        pieces = self.pieces(v, (*n.scratch, *self.point()))
        if extents(rest) >= self.enough or (
            rest and len(pieces) > 1
        ):  # pieces cannot collapse with what is around
            return self.wrap(rest, pieces)
        return self.wrap(rest, tuple(s for piece in pieces for s in self.blocks(piece)))

    def point(self) -> tuple[Stmt, ...]:
        """What happens at one outer point."""
        n = self.nest
        out: list[Stmt] = list(n.before)
        for p in n.passes:
            out += p.inits
            out += self.sweep(p.body)
            out += p.after
        return tuple(out)

    def sweep(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """One pass over the inner axes."""
        if not body:
            return ()
        axes = self.nest.inner
        last = axes[-1]
        if last is self.vector:
            loops = self.pieces(last, body)
        else:
            loops = (Loop(last, 0, last.extent, "serial", body),)
        for a in reversed(axes[:-1]):
            loops = (Loop(a, 0, a.extent, "serial", loops),)
        return loops

    def wrap(self, axes: tuple[Index, ...], body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """Outer loops, parallel from the outside until there is work for every thread."""
        kinds: list[str] = []
        points = 1
        if body and isinstance(body[0], Loop) and body[0].kind == "parallel":
            points = 0  # the blocks inside are parallel: every loop around them must be too, to collapse
        for a in axes:
            kinds.append("parallel" if points < self.enough else "serial")
            points *= sz.hint(a.extent)
        for a, kind in reversed(list(zip(axes, kinds, strict=True))):
            body = (Loop(a, 0, a.extent, kind, body),)
        return body

    def rows_side_by_side(self) -> tuple[Stmt, ...]:
        """Several rows reduced in the same inner loops, where that is all that happens; else nothing."""
        n = self.nest
        if len(n.passes) != 1 or n.scratch or not n.outer or extents(n.inner) < LONG_ROW:
            return ()
        axis, body = n.outer[-1], self.point()
        fed = [s for s in statements(body) if isinstance(s, Accumulate)]
        stored = {s.buffer for s in statements(body) if isinstance(s, Store)}
        read = {e.buffer for s in statements(body) for e in _nodes(s) if e.op == "load"}
        if (
            any(isinstance(s, Store) for s in n.passes[0].body)
            or read & stored
            or ROWS * len(fed) > MAX_ACCUMULATORS
            or extents(n.outer) < ROWS * self.enough
            or sz.hint(axis.extent) < ROWS
        ):
            return ()
        count = sz.plain(ix.floordiv(axis.extent, ROWS))
        block = ix.var(f"{axis.name}r", count)
        copies = [_copy(substitute_statements(body, {axis: block * ROWS + r}), f"r{r}") for r in range(ROWS)]
        whole = self.wrap((*n.outer[:-1], block), _side_by_side(copies))
        left = sz.plain(ix.mod(axis.extent, ROWS))
        if left == 0:
            return whole
        last = ix.var(f"{axis.name}l", left)
        rest = _copy(substitute_statements(body, {axis: last + ROWS * count}), "l")
        return (*whole, *self.wrap(n.outer[:-1], (Loop(last, 0, left, "serial", rest),)))

    def pieces(self, v: Index, body: tuple[Stmt, ...]) -> tuple[Loop, ...]:
        """The vector loop over ``v``, cut where a mask changes so that most masks become constant."""
        cuts = _in_order(_borders(v, body), ix.as_index(v.extent))
        if not cuts or len(cuts) >= MAX_PIECES:
            return (Loop(v, 0, v.extent, "vector", body),)
        out: list[Loop] = []
        for k, (lo, hi) in enumerate(zip([0, *cuts], [*cuts, v.extent], strict=True)):
            own = ix.var(f"{v.name}_{k}", sz.plain(ix.as_index(hi) - lo))
            out.append(Loop(own, 0, own.extent, "vector", substitute_statements(body, {v: own + lo})))
        return tuple(out)

    def blocks(self, loop: Loop) -> tuple[Stmt, ...]:
        """A vector loop as a parallel loop over blocks."""
        extent = loop.var.extent
        size = block_size(sz.hint(extent), self.enough, 64 if self.nest.inner else 1024)
        if isinstance(extent, int) and size >= extent:
            return (loop,)
        block = ix.var(f"{loop.var.name}b", quotient(extent, size))
        stop: IndexLike = block * size + size
        if sz.plain(ix.mod(extent, size)) != 0:
            stop = ix.minimum(stop, extent)
        return (Loop(block, 0, block.extent, "parallel", (replace(loop, start=block * size, stop=stop),)),)

    def across_the_grain(self, rest: tuple[Index, ...]) -> Index | None:
        """The axis along which an access is contiguous that the vector axis strides over, if tiling will
        help."""
        assert self.vector is not None
        if sz.hint(self.vector.extent) < SHORT:
            return None
        votes: dict[Index, int] = {}
        for i in _all_indices(self.nest):
            c = ix.coefficient(i, self.vector)
            if c is None or c in (0, 1):
                continue
            for a in rest:
                if ix.coefficient(i, a) == 1 and sz.hint(a.extent) >= SHORT:
                    votes[a] = votes.get(a, 0) + 1
        return max(votes, key=lambda a: votes[a]) if votes else None

    def tiled(self, rest: tuple[Index, ...], across: Index) -> tuple[Stmt, ...]:
        """The vector axis and the one across it in tiles."""
        v = self.vector
        assert v is not None
        body: tuple[Stmt, ...] = (*self.nest.scratch, *self.point())
        edge = self.tile_edge(extents(rest), (sz.hint(v.extent), sz.hint(across.extent)))
        blocks: list[Index] = []
        for axis, kind in ((v, "vector"), (across, "serial")):
            extent = axis.extent
            count, size = quotient(extent, edge), edge
            if isinstance(extent, int) and isinstance(count, int):
                size = -(-extent // (8 * count)) * 8  # about equal ones
            block = ix.var(f"{axis.name}t", count)
            stop: IndexLike = block * size + size
            if sz.plain(ix.mod(extent, size)) != 0:
                stop = ix.minimum(stop, extent)
            body = (Loop(axis, block * size, stop, kind, body),)
            blocks.append(block)
        # All block loops and outer loops are independent: collapse them.
        for block in blocks:
            body = (Loop(block, 0, block.extent, "parallel", body),)
        for a in reversed(rest):
            body = (Loop(a, 0, a.extent, "parallel", body),)
        return body

    def tile_edge(self, outer: int, sizes: tuple[int, int]) -> int:
        """The edge of the tiles, by the widest element moved; smaller ones where some threads would have
        none."""
        moved = [s.value for s in _nest_statements(self.nest) if isinstance(s, Store)]
        widest = max(e.dtype.itemsize for root in moved for e in (root, *ex.loads(root)))
        edge = max(TILE[0], min(TILE[1], TILE_BYTES // widest))
        if outer * sizes[0] * sizes[1] < 1 << 15:  # for one thread anyway
            return edge
        while edge > TILE[0] and outer * -(-sizes[0] // edge) * -(-sizes[1] // edge) < self.enough:
            edge //= 2
        return edge


def _copy(body: Sequence[Stmt], suffix: str) -> tuple[Stmt, ...]:
    """The statements with locals of their own."""
    own = {s.name for s in statements(tuple(body)) if isinstance(s, (Init, Let))}
    buffers = {s.buffer for s in statements(tuple(body)) if isinstance(s, Store)}
    buffers |= {e.buffer for s in statements(tuple(body)) for e in _nodes(s) if e.op == "load"}
    names = {**{b: b for b in buffers}, **{name: f"{name}_{suffix}" for name in own}}
    memo: dict[Expr, Expr] = {}
    return tuple(_renamed(s, names, memo) for s in body)


def _side_by_side(copies: Sequence[tuple[Stmt, ...]]) -> tuple[Stmt, ...]:
    """Copies of a body, which share nothing but what they read, in the same loops."""
    out: list[Stmt] = []
    for same in zip(*copies, strict=True):
        first = same[0]
        if isinstance(first, Loop):
            bodies = [s.body for s in same if isinstance(s, Loop)]
            out.append(replace(first, body=_side_by_side(bodies)))
        else:
            out += same
    return tuple(out)


def quotient(extent: IndexLike, size: int) -> IndexLike:
    """How many blocks of this size cover an extent."""
    return sz.plain(ix.floordiv(extent + (size - 1), size))


def block_size(extent: int, enough: int, least: int) -> int:
    """A block for one thread at a time: about ``extent / enough``, a multiple of 64, dividing the extent if
    it can."""
    want = max(least, min(-(-extent // enough), 1 << 15))
    want = -(-want // 64) * 64
    for size in range(want, 2 * want, 64):
        if extent % size == 0:
            return size
    return want


def _in_order(cuts: Iterable[Index], extent: Index) -> list[IndexLike]:
    """The cuts inside of ``0 .. extent``, in order: those of which it is certain where they lie."""
    out: list[Index] = []
    for c in sorted(cuts, key=repr):
        inside = ix.at_most(ix.const(0), c) and ix.at_most(c, extent)
        if not inside or any(ix.at_most(c, end) and ix.at_most(end, c) for end in (ix.const(0), extent)):
            continue
        before = [ix.at_most(o, c) for o in out]
        if all(b or ix.at_most(c, o) for b, o in zip(before, out, strict=True)):
            out.insert(sum(before), c)
    return [sz.plain(c) for c in out]


def _borders(v: Index, body: Iterable[Stmt]) -> set[Index]:
    """Where comparisons of index values change their truth along ``v``, and where a load's index goes over
    from one side of a ``min`` or ``max`` to the other: numbers, or indices of symbols."""
    out: set[Index] = set()
    for s in statements(tuple(body)):
        if not isinstance(s, (Let, Store, Accumulate)):
            continue
        for e in ex.walk(s.value):
            if e.op == "load" and v in e.free_vars:
                out |= {at for i in e.indices for at in _folds(v, i)}
            if e.op not in ("lt", "le", "gt", "ge", "eq", "ne") or v not in e.free_vars:
                continue
            if e.args[0].dtype.is_floating_point:  # its constants may be infinite
                continue
            a, b = (
                x.attr if x.op == "index" else ix.const(x.value) if x.op == "const" else None for x in e.args
            )
            if a is None or b is None:
                continue
            d = a - b
            c = ix.coefficient(d, v)
            if not c or not isinstance(c, int):
                continue
            rest = d - v * c
            if not _is_fixed(rest):
                continue
            # c * v + r crosses zero at v = -r / c; strict and weak comparisons change on either side of it.
            r, by = (-rest, c) if c > 0 else (rest, -c)
            after = ix.floordiv(r, by) + 1
            if e.op in ("eq", "ne"):
                out.update((after - 1, after) if ix.mod(r, by) is ix.const(0) else ())
            else:
                # c > 0: d < 0 iff v < r / by, d <= 0 iff v < after; c < 0 mirrors them.
                strict = e.op in ("lt", "ge")
                out.add(ix.floordiv(r + (by - 1), by) if strict == (c > 0) else after)
    return out


def _is_fixed(e: Index) -> bool:
    """Whether it is a number, or made of symbols alone."""
    return not e.free_vars and not any(True for _ in ix.indirect_atoms(e))


def _folds(v: Index, i: Index) -> Iterator[Index]:
    """Where ``min`` and ``max`` in an index change sides along ``v``: the edges of reflected and replicated
    padding."""
    if v not in i.free_vars or i.kind == "indirect":
        return
    if i.kind == "sum":
        for atom, _ in i.args[1]:
            yield from _folds(v, atom)
        return
    parts = [a for a in i.args if isinstance(a, Index)]
    for a in parts:
        yield from _folds(v, a)
    if i.kind in ("min", "max") and len(parts) == 2:
        for d in _differences(parts[0] - parts[1]):
            c = ix.coefficient(d, v)
            if c and isinstance(c, int) and _is_fixed(d - v * c):
                r, by = (v * c - d, c) if c > 0 else (d - v * c, -c)
                yield ix.floordiv(r + (by - 1), by)


def _differences(d: Index) -> Iterator[Index]:
    """The linear forms that a difference takes: a ``min`` or ``max`` in it is one of its two sides."""
    for atom, c in d.args[1] if d.kind == "sum" else [(d, 1)]:
        if atom.kind in ("min", "max"):
            for side in atom.args:
                yield from _differences(d - atom * c + side * c)
            return
    yield d


# --- the kernel ---------------------------------------------------------------------------------------------


def finish(
    kind: str, origins: tuple[Origin, ...], body: tuple[Stmt, ...], buffers: Mapping[str, Buffer],
    machine: Machine, points: IndexLike, work: int, single_pass: bool, updated: str | None = None,
) -> KernelCall:  # fmt: skip
    """The call of the kernel with this body, which visits so many points: parameters and locals under
    canonical names. ``updated`` names a buffer of which it touches as many elements as it visits points."""
    reads: dict[str, None] = {}
    writes: dict[str, None] = {}
    local: dict[str, str] = {}
    checks = False
    for s in statements(body):
        if isinstance(s, Scratch):
            local[s.name] = f"row{len(local)}"
        elif isinstance(s, (Init, Let)):
            prefix = "acc" if isinstance(s, Init) else "v"
            local.setdefault(s.name, f"{prefix}{len(local)}")
        if isinstance(s, Store) and s.buffer not in local:
            writes[s.buffer] = None
        for e in _nodes(s):
            if e.op == "load" and e.buffer not in local:
                reads[e.buffer] = None
            checks = checks or _may_fail(e)
        if isinstance(s, Store):
            checks = checks or any(a.args[2] for a in ix.indirect_atoms(s.index))
        if isinstance(s, (Multiply, Attend)):
            reads.update(dict.fromkeys(s.reads))
    rename = dict(local)
    params: list[Param] = []
    args: list[str] = []
    for name in [*(r for r in reads if r not in writes), *writes]:
        role = "in" if name not in writes else "inout" if name in reads else "out"
        prefix = "in" if role == "in" else "out"
        new = f"{prefix}{sum(p.name.startswith(prefix) for p in params)}"
        rename[name] = new
        params.append(Param(new, buffers[name].dtype, role))
        args.append(name)
    moved = sum(sz.hint(buffers[a].nbytes) for a in args if a != updated)
    if updated is not None:
        b = buffers[updated]
        moved += min(sz.hint(b.nbytes), sz.hint(points) * b.dtype.itemsize)
    memo: dict[Expr, Expr] = {}  # what statements share is renamed once
    threshold = _threshold(points, moved, work, machine)
    sizes = kernel_symbols(body, () if threshold is None else (threshold[0],))
    if threshold is not None and not sizes:
        threshold = None
    kernel = Kernel(
        _kernel_name(kind, origins), tuple(params), tuple(_renamed(s, rename, memo) for s in body), checks,
        machine.threads > 1 and (threshold is not None or max(moved, work) >= machine.parallel_threshold),
        moved, work, single_pass, origins, sizes, threshold,
    )  # fmt: skip
    return KernelCall(kernel, tuple(args))


def _threshold(points: IndexLike, moved: int, work: int, machine: Machine) -> tuple[IndexLike, int] | None:
    """From how many points on threads pay, where that is known at run time only."""
    if isinstance(points, int):
        return None
    # What a point moves and computes is taken from the estimates of both.
    each = max(1, max(moved, work) // max(1, sz.hint(points)))
    return points, -(-machine.parallel_threshold // each)


def kernel_symbols(body: Sequence[Stmt], more: Sequence[IndexLike] = ()) -> tuple[Index, ...]:
    """The symbols that a kernel's statements mention, by name."""
    found: set[Index] = {v for e in more for v in sz.symbols(e)}
    for s in statements(tuple(body)):
        if isinstance(s, Loop):
            found.update(v for e in (s.start, s.stop) for v in sz.symbols(e))
        elif isinstance(s, Scratch):
            found.update(sz.symbols(s.size))
        elif isinstance(s, (Multiply, Attend)):
            found.update(v for e in s.indices for v in sz.symbols(e))
        elif isinstance(s, (Let, Store, Accumulate)):
            found.update(ex.symbols(s.value))
            own = s.index if isinstance(s, Store) else s.position if isinstance(s, Accumulate) else None
            if own is not None:
                found.update(ex.index_symbols(own))
    return tuple(sorted(found, key=lambda v: v.name))


def _nodes(s: Stmt) -> Iterator[Expr]:
    """Every node of the values that a statement evaluates, those that its index reads included."""
    if isinstance(s, (Let, Store, Accumulate)):
        yield from ex.walk(s.value)
    if isinstance(s, Store):
        for a in ix.indirect_atoms(s.index):
            yield from ex.walk(a.args[0])


def _may_fail(e: Expr) -> bool:
    """Whether evaluating the node can find a fault in the data: an index out of range, an integer division by
    0, a probability that is none."""
    if e.op == "probability":
        return True
    if e.op in ("floordiv", "truncdiv", "remainder", "fmod"):
        by = e.args[1]
        return not e.dtype.is_floating_point and not (by.op == "const" and by.value != 0)
    return any(a.args[2] for i in ex.own_indices(e) for a in ix.indirect_atoms(i))


def _renamed(s: Stmt, names: Mapping[str, str], memo: dict[Expr, Expr]) -> Stmt:
    """The statement with buffers and locals under their canonical names."""

    def value(e: Expr) -> Expr:
        got = memo.get(e)
        if got is None:
            if e.op == "local":
                got = ex.local(names[e.attr], e.dtype)
            elif e.op == "load":
                got = ex.load(names[e.buffer], tuple(index(i) for i in e.indices), e.dtype)
            elif e.op == "index":
                got = ex.index_value(index(e.attr))
            elif e.op == "random":
                got = ex.random(value(e.args[0]), index(e.attr[1]), e.attr[0])
            else:
                got = ex.rebuild(e, tuple(value(a) for a in e.args))
            memo[e] = got
        return got

    def index(i: Index) -> Index:
        if not any(True for _ in ix.indirect_atoms(i)):
            return i
        return ex.replace_atoms(i, lambda a: ix.indirect(value(a.args[0]), a.args[1], a.args[2]))

    if isinstance(s, Scratch):
        return replace(s, name=names[s.name])
    if isinstance(s, Init):
        return replace(s, name=names[s.name])
    if isinstance(s, Loop):
        return replace(s, body=tuple(_renamed(b, names, memo) for b in s.body))
    if isinstance(s, Let):
        return Let(names[s.name], value(s.value))
    if isinstance(s, Store):
        return Store(names[s.buffer], index(s.index), value(s.value))
    if isinstance(s, (Multiply, Attend)):
        return s.renamed(names)
    return Accumulate(names[s.name], value(s.value), s.position)


def origins(g: Group) -> tuple[Origin, ...]:
    """Where everything in a group came from, what was folded into its members included."""
    return tuple(dict.fromkeys(o for m in g.members for o in (*m.op.folded, m.op.origin)))


def _kernel_name(kind: str, origins: tuple[Origin, ...]) -> str:
    """``cpp_fused_add_mul`` or ``cpp_red_mul_softmax``: the operators inside, each once, in order."""
    words: list[str] = []
    for o in origins:
        word = re.sub(r"\W", "_", o.word).strip("_")
        if word and word not in words:
            words.append(word)
    return "_".join(["cpp", kind, *words[:6]])
