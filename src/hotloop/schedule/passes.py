"""From a group to a nest: in which pass over the inner axes each value is computed, and where it is kept.

What comes in: a group and the buffers that must exist in memory. What goes out: a ``Nest``: statements
before, during and after each pass over the inner axes, with flat indices. What holds in between: a value is
used in the pass that computes it directly, in a later pass through memory, a row of scratch, or by computing
it again if that is cheap.

Softmax has three passes: the maximum; the exponentials into scratch with their sum; the quotients. The next
file is ``loops.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir import sizes as sz
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index
from hotloop.ir.kernel import Accumulate, Init, Let, Scratch, Stmt, Store
from hotloop.ir.loops import Buffer, Reduce
from hotloop.ir.rewrite import drop_roundings

from .axes import flat_index
from .fuse import MAX_ROW_BYTES, Group, Member
from .simplify import extents

__all__ = ["Nest", "Pass", "build_nest"]

#: A value dearer than this (simple instructions, loads included) is kept for later passes rather than
#: recomputed.
RECOMPUTE = 10


@dataclass(frozen=True)
class Pass:
    """One sweep over the inner axes: accumulators before it, its body, and what follows it at the outer
    point."""

    inits: tuple[Init, ...]
    body: tuple[Stmt, ...]
    after: tuple[Stmt, ...]


@dataclass(frozen=True)
class Nest:
    """For every outer point: ``before``, then the passes. Loads and stores are flat and name buffers."""

    outer: tuple[Index, ...]
    inner: tuple[Index, ...]
    scratch: tuple[Scratch, ...]
    before: tuple[Stmt, ...]
    passes: tuple[Pass, ...]
    lanes_outside: bool


@dataclass
class _Builder:
    """The state of building one nest."""

    g: Group
    buffers: Mapping[str, Buffer]
    stored: set[str]
    scratch_allowed: bool
    keep_roundings: bool
    members: dict[str, Member] = field(default_factory=dict)
    place: dict[str, int] = field(default_factory=dict)  # of a member among them
    available: dict[str, int] = field(default_factory=dict)
    row: dict[str, Scratch] = field(default_factory=dict)
    memo: dict[tuple[str, int], Expr] = field(default_factory=dict)

    # --- when -----------------------------------------------------------------------------------------------

    def assign_passes(self) -> None:
        """``available[b]``: for an inner value the pass that computes it; for an outer one the first that can
        use it."""
        for m in self.g.members:
            t = 0
            for n in ex.loads(m.body):
                source = self.members.get(n.buffer)
                if source is None:
                    continue
                at = self.available[n.buffer]
                if (
                    source.inner
                    and not isinstance(source.op, Reduce)
                    and (n.indices != source.store or not m.inner)
                ):
                    at += 1
                t = max(t, at)
            self.place[m.op.out] = len(self.members)
            self.members[m.op.out] = m
            self.available[m.op.out] = t + 1 if isinstance(m.op, Reduce) else t

    def pass_of(self, m: Member) -> int:
        t = self.available[m.op.out]
        return t - 1 if isinstance(m.op, Reduce) else t

    def choose_rows(self) -> None:
        """Which inner values are kept in scratch (or, where that is not possible, in memory) for later
        passes."""
        points = extents(self.g.inner)
        whole = sz.product(a.extent for a in self.g.inner)
        for m in self.g.members:
            for n in ex.loads(m.body):
                source = self.members.get(n.buffer)
                if (
                    source is None
                    or not source.inner
                    or isinstance(source.op, Reduce)
                    or n.buffer in self.stored
                ):
                    continue
                elsewhere = n.indices != source.store
                later = self.pass_of(m) > self.available[n.buffer]
                if not elsewhere and not (later and self.full_cost(n.buffer) > RECOMPUTE):
                    continue
                dtype = self.buffers[n.buffer].dtype
                fits = points * dtype.itemsize <= MAX_ROW_BYTES and _whole_axes(n.indices, source.store)
                if self.scratch_allowed and fits:
                    self.row[n.buffer] = Scratch(f"row_{n.buffer}", dtype, whole)
                elif elsewhere:
                    self.stored.add(n.buffer)
                    self.row.pop(n.buffer, None)  # another reader may have been content with one

    def full_cost(self, name: str) -> int:
        """The cost of a value with the group's own values inside it computed again."""
        total = ex.cost(self.members[name].body)
        for n in ex.loads(self.members[name].body):
            source = self.members.get(n.buffer)
            if n.buffer != name and source is not None and source.inner and not isinstance(source.op, Reduce):
                if n.buffer not in self.stored and n.buffer not in self.row:
                    total += self.full_cost(n.buffer)
        return total

    # --- what -----------------------------------------------------------------------------------------------

    def value(self, m: Member, at_pass: int) -> Expr:
        """The member's body as it is computed in a pass, with flat loads."""
        key = (m.op.out, at_pass)
        got = self.memo.get(key)
        if got is None:
            got = ex.rewrite_loads(m.body, lambda n: self.read(n, m, at_pass))
            self.memo[key] = got
        return got

    def final(self, e: Expr) -> Expr:
        """A whole statement's value. Only here are roundings dropped: what a comparison depends on keeps all
        of them, through every operation that has been fused into it."""
        return e if self.keep_roundings else drop_roundings(e)

    def read(self, n: Expr, reader: Member, at_pass: int) -> Expr | None:
        source = self.members.get(n.buffer)
        if source is None or self.place[n.buffer] >= self.place[reader.op.out]:
            return self.flat(n)  # what is overwritten here, or further down, is read as it was
        dtype = self.buffers[n.buffer].dtype
        if isinstance(source.op, Reduce):
            return ex.cast(self.total(source), dtype, True)
        if not source.inner and self.g.inner:
            return ex.local(f"val_{n.buffer}", dtype)
        here = n.indices == source.store and (reader.inner or not self.g.inner)
        if here and at_pass == self.available[n.buffer]:
            return self.value(source, at_pass)
        if n.buffer in self.row:
            return ex.load(self.row[n.buffer].name, (self.row_index(n, source),), dtype)
        if n.buffer in self.stored:
            return self.flat(n)
        return self.value(source, at_pass)

    @staticmethod
    def total(m: Member) -> Expr:
        """The result of a reduction, once its pass is done: a position, or of the dtype that it reduces."""
        return ex.local(f"acc_{m.op.out}", m.body.dtype if m.position is None else torch.int64)

    def flat(self, n: Expr) -> Expr:
        return ex.load(n.buffer, (flat_index(self.buffers, n.buffer, n.indices),), n.dtype)

    def row_index(self, n: Expr, source: Member) -> Index:
        """The place in the scratch row of the element that ``n`` reads: row-major over the inner axes."""
        moved: dict[Index, Index] = {}
        for mine, theirs in zip(n.indices, source.store, strict=True):
            if mine is not theirs:
                if theirs.kind != "var":
                    raise AssertionError(
                        f"{source.op.out} is read across its row at {mine} where {theirs} is stored"
                    )
                moved[theirs] = mine
        out = ix.const(0)
        for a in self.g.inner:
            out = out * a.extent + moved.get(a, a)
        return out

    def store(self, m: Member, value: Expr) -> Store:
        return Store(m.op.out, flat_index(self.buffers, m.op.out, m.store), value)

    # --- statements -----------------------------------------------------------------------------------------

    def pass_body(self, k: int) -> tuple[tuple[Init, ...], tuple[Stmt, ...]]:
        inits: list[Init] = []
        body: list[Stmt] = []
        for m in self.g.members:
            if not m.inner or self.pass_of(m) != k:
                continue
            if isinstance(m.op, Reduce):
                value = self.value(m, k)
                if m.position is None:  # that of an extreme jumps: it is sought among the rounded values
                    value = self.final(value)
                name: str = self.total(m).attr
                inits.append(Init(name, m.op.kind, m.body.dtype))
                body.append(Accumulate(name, value, m.position))
                continue
            if m.op.out in self.row:
                scratch = self.row[m.op.out]
                index = self.row_index(ex.load(m.op.out, m.store, scratch.dtype), m)
                body.append(Store(scratch.name, index, self.final(self.value(m, k))))
            if m.op.out in self.stored:
                body.append(self.store(m, self.final(self.value(m, k))))
        return tuple(inits), tuple(body)

    def outer_statements(self, k: int) -> tuple[Stmt, ...]:
        """What is computed at the outer point once ``k`` passes are done. An input is overwritten last: until
        then, others may read the old value there."""
        out: list[Stmt] = []
        last: list[Stmt] = []
        for m in self.g.members:
            if isinstance(m.op, Reduce):
                if self.available[m.op.out] == k and m.op.out in self.stored:
                    out.append(self.store(m, ex.cast(self.total(m), self.buffers[m.op.out].dtype)))
            elif not m.inner and self.available[m.op.out] == k:
                value = self.final(self.value(m, k))
                overwrites = self.buffers[m.op.out].kind == "input" and len(self.members) > 1
                if self.g.inner or overwrites:
                    out.append(Let(f"val_{m.op.out}", value))
                    value = ex.local(f"val_{m.op.out}", value.dtype)
                if m.op.out in self.stored:
                    (last if overwrites and not self.g.inner else out).append(self.store(m, value))
        return (*out, *last)


def build_nest(
    g: Group,
    buffers: Mapping[str, Buffer],
    stored: set[str],
    lanes_outside: bool,
    keep_roundings: bool,
) -> Nest:
    """The nest of a group. ``stored`` names the buffers needed outside; those needed in memory here are added
    to it.

    ``lanes_outside``: the vector axis is an outer one, so that every lane has its own row and scratch is no
    use.
    """
    b = _Builder(g, buffers, stored, not lanes_outside, keep_roundings)
    b.assign_passes()
    if g.inner:
        b.choose_rows()
    count = max((b.pass_of(m) for m in g.members if m.inner), default=-1) + 1
    before = b.outer_statements(0)
    passes = []
    for k in range(count):
        inits, body = b.pass_body(k)
        passes.append(Pass(inits, body, b.outer_statements(k + 1)))
    return Nest(g.outer, g.inner, tuple(b.row.values()), before, tuple(passes), lanes_outside)


def _whole_axes(mine: tuple[Index, ...], theirs: tuple[Index, ...]) -> bool:
    """Whether every coordinate that differs was stored along one whole axis, so that a row index can be
    formed."""
    return all(a is b or b.kind == "var" for a, b in zip(mine, theirs, strict=True))
