"""Fusion: which operations share a loop nest.

What comes in: a simplified loop program. What goes out: steps in execution order, each a ``Group`` of
operations over common axes or an extern call. What holds in between: fusion is decided on shapes, dependences
and bytes alone; it generates nothing and measures nothing; every refusal of operations that share a buffer
has its reason in the log.

A group iterates over *outer* axes, and for each of their points over *inner* axes, perhaps several times: the
row of a softmax, the plane of a group norm. A member covers either all axes or the outer ones alone. A
reduction always runs over exactly the inner axes. A scan or a scatter is a group of its own, whose inner axes
are those along which order counts. The next file is ``passes.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir import sizes as sz
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index
from hotloop.ir.loops import (
    Extern,
    LoopOp,
    LoopProgram,
    Op,
    Pointwise,
    Reduce,
    Scan,
    Scatter,
    op_outputs,
    op_reads,
    op_symbols,
    op_values,
)

from .dependences import base_of, ordered_vars
from .simplify import extents
from .split import Parts, split_variables

__all__ = ["Group", "Member", "fuse"]

#: Limits that keep a kernel's registers, parameters and compile time in bounds.
MAX_MEMBERS = 48
MAX_BUFFERS = 40
MAX_GROUP_NODES = 900
#: A kernel's values are trees that every later stage goes down by calling itself, and the C++ compiler too.
MAX_GROUP_DEPTH = 120
#: Operations that only share an input are fused when they are at most this many operations apart in the
#: program: moving work further could keep buffers alive for longer than eager does. Where they read and
#: write nothing but what the caller holds anyway, they may be any distance apart: an optimizer goes through
#: lists of parameters.
HORIZONTAL_REACH = 12
#: How many steps back a kernel of single numbers is looked for.
NUMBERS_REACH = 256


@dataclass(frozen=True)
class Member:
    """An operation with its variables replaced by its group's axes.

    ``store`` is the multi-dimensional index it writes, ``inner`` whether it covers the inner axes. For a
    reduction ``body`` is what is reduced, and ``position`` the row-major position in its own reduce
    variables; for a scan, the position along its axis.
    """

    op: LoopOp
    body: Expr
    store: tuple[Index, ...]
    inner: bool
    position: Index | None = None


@dataclass(frozen=True)
class Group:
    """Operations that run in one kernel, in program order, over common axes."""

    outer: tuple[Index, ...]
    inner: tuple[Index, ...]
    members: tuple[Member, ...]

    @property
    def axes(self) -> tuple[Index, ...]:
        """All axes, outer ones first."""
        return self.outer + self.inner

    @property
    def ordered(self) -> bool:
        """Whether it is a scan or a scatter: the inner axes are walked once, in their order."""
        return isinstance(self.members[0].op, (Scan, Scatter))

    @property
    def names(self) -> str:
        """The buffers it computes, for logs."""
        return "+".join(m.op.out for m in self.members)


class _Open:
    """A group or an extern call while fusion goes on."""

    def __init__(self, position: int, step: Group | Extern) -> None:
        self.position = position
        self.last = position
        self.step = step
        self.before = 0  # bit mask of the steps this one transitively waits for
        self.level = 0  # how many kernels one after the other it waits for, those of single numbers aside
        self.nodes = 0
        self.depths: dict[str, int] = {}  # of each value a tree may contain, how deep it is nested
        self.buffers: set[str] = set()


@dataclass(frozen=True)
class _Waits:
    """What an operation waits for: the steps that it needs, and a bit mask of all steps before it."""

    needs: set[int]
    before: int


Refuse = Callable[[str, str, str], None]


def fuse(p: LoopProgram, enabled: bool, refuse: Refuse) -> tuple[Group | Extern, ...]:
    """Group the operations of ``p``. With ``enabled`` false every operation is a kernel of its own."""
    steps: list[_Open] = []
    step_of: dict[str, int] = {}  # storage -> number of the step that writes it
    readers: dict[str, list[int]] = {}  # storage -> steps that read it
    teller: dict[str, int] = {}  # symbol -> step of the call that tells its value
    impure: int | None = None  # the last step with an effect: random numbers, and what PyTorch says mutates
    for position, op in enumerate(p.ops):
        needs = {step_of[b] for b in (base_of(p.buffers, n) for n in op_reads(op)) if b in step_of}
        if teller:
            needs |= {teller[s] for s in op_symbols(op) if s in teller}
        effect = isinstance(op, Extern) and has_effect(op)
        if effect and impure is not None:
            needs.add(impure)
        written = [b for b in (base_of(p.buffers, n) for n in op_outputs(op)) if b in readers or b in step_of]
        for b in written:  # a write waits for every reader and writer of the old value
            needs.update(readers.get(b, ()))
            needs.update({step_of[b]} if b in step_of else ())
        before = 0
        for s in needs:
            before |= steps[s].before | (1 << s)
        chosen: int | None = None
        fusible = isinstance(op, Pointwise) if written else isinstance(op, (Pointwise, Reduce))
        if fusible and enabled:
            assert isinstance(op, (Pointwise, Reduce))
            waits = _Waits(needs, before)
            chosen = _find_group(p, steps, step_of, readers, op, position, waits, refuse, bool(written))
        level = _level(steps, needs)
        if chosen is None:
            chosen = len(steps)
            opened = _Open(position, op if isinstance(op, Extern) else _single(op))
            opened.before = before
            steps.append(opened)
        else:
            _add_dependences(steps, chosen, before)
        if effect:
            impure = chosen
        opened = steps[chosen]
        opened.last = position
        opened.level = max(opened.level, level)
        if not isinstance(op, Extern):
            opened.nodes += sum(1 for value in op_values(op) for _ in ex.walk(value))
            if isinstance(op, Pointwise):  # a reduction's result is a leaf
                opened.depths[op.out] = _depth(opened, op)
        if isinstance(op, Extern):
            teller.update((s.name, chosen) for s, _, _ in op.binds)
        for b in op_reads(op):
            base = base_of(p.buffers, b)
            opened.buffers.add(base)
            users = readers.setdefault(base, [])
            if chosen not in users:
                users.append(chosen)
        for b in op_outputs(op):
            opened.buffers.add(base_of(p.buffers, b))
            step_of[base_of(p.buffers, b)] = chosen
    return tuple(steps[i].step for i in _order(steps))


def has_effect(op: Extern) -> bool:
    """Whether a call must keep its place among other calls: it draws random numbers, writes, or is opaque."""
    tags = getattr(op.target, "tags", None)
    if op.mutates or tags is None:
        return True
    return torch.Tag.nondeterministic_seeded in tags


def _add_dependences(steps: list[_Open], chosen: int, before: int) -> None:
    bit = 1 << chosen
    before &= ~(steps[chosen].before | bit)
    if not before:  # as a rule: whoever waits for the group has these before it already
        return
    steps[chosen].before |= before
    for s in steps:
        if s.before & bit:
            s.before |= before


def _order(steps: Sequence[_Open]) -> list[int]:
    """Execution order: each step after those it waits for, otherwise as in the program."""
    done = 0
    out: list[int] = []
    waiting = sorted(range(len(steps)), key=lambda i: steps[i].last)
    while waiting:
        rest: list[int] = []
        for i in waiting:
            if steps[i].before & ~done:
                rest.append(i)
            else:
                out.append(i)
                done |= 1 << i
        if len(rest) == len(waiting):
            raise AssertionError("fusion made a dependence cycle")
        waiting = rest
    return out


@dataclass(frozen=True)
class _Prepared:
    """An operation ready to be matched: its variables may be split, those of extent 1 are gone."""

    op: LoopOp
    body: Expr
    store: tuple[Index, ...]
    vars: tuple[Index, ...]
    reduce_vars: tuple[Index, ...]
    position: Index | None


def _prepare(op: LoopOp) -> _Prepared:
    reduce_vars = op.reduce_vars if isinstance(op, Reduce) else ()
    gone: dict[Index, int] = {v: 0 for v in (*op.vars, *reduce_vars) if v.extent == 1}
    body = op.body.substitute(gone) if gone else op.body
    indices = op.indices if isinstance(op, Scatter) else op.vars
    store = tuple(ix.substitute(i, gone) for i in indices) if gone else indices
    position = _position(op, gone)
    return _Prepared(
        op, body, store, tuple(v for v in op.vars if v not in gone),
        tuple(v for v in reduce_vars if v not in gone), position,
    )  # fmt: skip


def _split(q: _Prepared) -> _Prepared:
    """The same operation with variables split where its indices divide them; the same object where none
    are."""
    indices = [i for n in ex.walk(q.body) for i in ex.own_indices(n)]
    parts = split_variables((*q.vars, *q.reduce_vars), indices)
    if not parts:
        return q
    moved = _moved(q, {v: whole for v, (whole, _) in parts.items()})
    return replace(moved, vars=_divided(q.vars, parts), reduce_vars=_divided(q.reduce_vars, parts))


def _divided(axes: tuple[Index, ...], parts: Parts) -> tuple[Index, ...]:
    return tuple(new for a in axes for new in (parts[a][1] if a in parts else (a,)))


M = TypeVar("M", Member, _Prepared)


def _moved(m: M, mapping: Mapping[Index, Index]) -> M:
    """The same operation with expressions in the place of its variables."""
    return replace(
        m,
        body=m.body.substitute(mapping),
        store=tuple(ix.substitute(s, mapping) for s in m.store),
        position=None if m.position is None else ix.substitute(m.position, mapping),
    )


def _position(op: LoopOp, gone: dict[Index, int]) -> Index | None:
    if isinstance(op, Scan):
        axis = op.vars[op.axis]
        return ix.const(0) if axis in gone else axis
    if not isinstance(op, Reduce) or op.kind not in ("argmax", "argmin"):
        return None
    flat = ix.const(0)
    for v in op.reduce_vars:
        flat = flat * v.extent + (0 if v in gone else v)
    return flat


def _member(q: _Prepared, mapping: Mapping[Index, Index], inner: bool) -> Member:
    return _moved(Member(q.op, q.body, q.store, inner, q.position), mapping)


def _single(op: LoopOp) -> Group:
    q = _prepare(op)
    ordered = ordered_vars(op)
    free = tuple(v for v in q.vars if v not in ordered)
    swept = (*(v for v in q.vars if v in ordered), *q.reduce_vars)
    outer = tuple(ix.var(f"p{k}", v.extent) for k, v in enumerate(free))
    inner = tuple(ix.var(f"q{k}", v.extent) for k, v in enumerate(swept))
    mapping = dict(zip(free + swept, outer + inner, strict=True))
    return Group(outer, inner, (_member(q, mapping, not isinstance(op, Pointwise)),))


def split_group(g: Group) -> Group:
    """The group with its axes split where indices divide them; the same object where none are."""
    indices = [i for m in g.members for n in ex.walk(m.body) for i in ex.own_indices(n)]
    indices += [i for m in g.members for i in (*m.store, *((m.position,) if m.position is not None else ()))]
    return substitute_axes(g, split_variables(g.axes, indices))


def substitute_axes(g: Group, parts: Parts) -> Group:
    """Replace axes by others."""
    if not parts:
        return g
    mapping = {v: whole for v, (whole, _) in parts.items()}
    members = tuple(_moved(m, mapping) for m in g.members)
    return Group(_divided(g.outer, parts), _divided(g.inner, parts), members)


# --- joining a group ----------------------------------------------------------------------------------------


def _find_group(
    p: LoopProgram, steps: list[_Open], step_of: dict[str, int], readers: dict[str, list[int]],
    op: Pointwise | Reduce, position: int, waits: _Waits, refuse: Refuse, overwrites: bool,
) -> int | None:  # fmt: skip
    """The step that ``op`` joins, most bytes saved first; the group there is replaced by the larger one.

    ``overwrites``: the operation writes what others have read.
    """
    gain: dict[int, int] = {}
    lasting = all(p.buffers[base_of(p.buffers, b)].kind != "temp" for b in (op.out, *op_reads(op)))
    for name in op_reads(op):
        base = base_of(p.buffers, name)
        size = sz.hint(p.buffers[base].nbytes)
        if base in step_of:
            gain[step_of[base]] = gain.get(step_of[base], 0) + 2 * size
        for s in readers.get(base, ()):
            near = position - steps[s].last <= HORIZONTAL_REACH
            if near or s in gain or (lasting and all(p.buffers[b].kind != "temp" for b in steps[s].buffers)):
                gain[s] = gain.get(s, 0) + size
    for s in sorted(gain, key=lambda s: (-gain[s], -s)):
        opened = steps[s]
        if isinstance(opened.step, Extern):
            continue
        reason = "a dependence passes through another step" if _blocked(steps, s, waits.needs) else None
        if not opened.step.axes and opened.level != _level(steps, _bits(waits.before)):
            reason = "the numbers there are needed before it can be computed"
        reason = reason or _limits(opened, op)
        if reason is None:
            joined = join(p, opened.step, op)
            reason = _overwritten(p, joined) if overwrites and isinstance(joined, Group) else None
            if isinstance(joined, Group) and reason is None:
                opened.step = joined
                return s
            reason = reason or str(joined)
        refuse(opened.step.names, op.out, reason)
    return _among_numbers(p, steps, op, waits)


def _level(steps: Sequence[_Open], needs: Iterable[int]) -> int:
    """The level of what waits for these steps."""
    level = 0
    for s in needs:
        step = steps[s].step
        number = isinstance(step, Group) and not step.axes
        level = max(level, steps[s].level + (not number))
    return level


def _blocked(steps: Sequence[_Open], s: int, needs: set[int]) -> bool:
    """Whether something that an operation needs waits for the group that it might join."""
    return any(steps[d].before >> s & 1 for d in needs if d != s)


def _among_numbers(
    p: LoopProgram, steps: Sequence[_Open], op: Pointwise | Reduce, waits: _Waits
) -> int | None:  # fmt: skip
    """The step that computes single numbers and has room for another, if ``op`` is one.

    They share nothing, but a call costs more than they do: an optimizer counts its steps for each parameter.
    """
    if not isinstance(op, Pointwise) or any(v.extent != 1 for v in op.vars):
        return None
    level = _level(steps, _bits(waits.before))
    for s in range(len(steps) - 1, max(-1, len(steps) - 1 - NUMBERS_REACH), -1):
        opened = steps[s]
        if isinstance(opened.step, Extern) or opened.step.axes or _blocked(steps, s, waits.needs):
            continue
        # What comes after a kernel that reads numbers must not hold up what the next kernel reads.
        if opened.level != level:
            continue
        if _limits(opened, op) is None and isinstance(joined := join(p, opened.step, op), Group):
            opened.step = joined
            return s
    return None


def _overwritten(p: LoopProgram, g: Group) -> str | None:
    """Why the last member may not overwrite what the others read: each has to read it at the same point,
    where the new value is stored last (``passes.py``).
    """
    *others, new = g.members
    base = base_of(p.buffers, new.op.out)
    if g.inner or any(base_of(p.buffers, m.op.out) == base for m in others):
        return "it overwrites what the group reads in several passes, or writes"
    for m in g.members:
        for n in ex.loads(m.body):
            if base_of(p.buffers, n.buffer) == base and (n.buffer != new.op.out or n.indices != new.store):
                return f"it overwrites {n.buffer}, which is read at another point"
    return None


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _limits(opened: _Open, op: Op) -> str | None:
    assert isinstance(opened.step, Group)
    if opened.step.ordered:
        return "a scan or a scatter is a kernel of its own"
    if len(opened.step.members) >= MAX_MEMBERS:
        return f"the group has {MAX_MEMBERS} operations"
    if len(opened.buffers | set(op_reads(op))) >= MAX_BUFFERS:
        return f"the kernel would touch more than {MAX_BUFFERS} buffers"
    if opened.nodes > MAX_GROUP_NODES:
        return f"the kernel has more than {MAX_GROUP_NODES} nodes"
    if isinstance(op, (Pointwise, Reduce)) and _depth(opened, op) > MAX_GROUP_DEPTH:
        return f"the kernel's values would be nested more than {MAX_GROUP_DEPTH} deep"
    return None


def _depth(opened: _Open, op: Pointwise | Reduce) -> int:
    return ex.depth(op.body) + max((opened.depths.get(n.buffer, 0) for n in ex.loads(op.body)), default=0)


def join(p: LoopProgram, g: Group, op: Pointwise | Reduce) -> Group | str:
    """``g`` with ``op`` as its last member, or the reason why that cannot be.

    The loops are matched as they are, then with the operation's split where its indices divide them, then
    with the group's split too: a group norm's channels are groups times channels of a group.
    """
    plain = _prepare(op)
    first = _join(p, g, plain)
    if isinstance(first, Group):
        return first
    divided = _split(plain)
    wider = split_group(g)
    tried = {(g, plain)}
    for group, q in ((g, divided), (wider, plain), (wider, divided), (_split_by_radix(g, plain), plain)):
        if (group, q) in tried:
            continue
        tried.add((group, q))
        joined = _join(p, group, q)
        if isinstance(joined, Group):
            return joined
    return first


def _join(p: LoopProgram, g: Group, q: _Prepared) -> Group | str:
    mapping = _match_axes(g, q)
    if isinstance(mapping, str):
        return mapping
    covered = set(mapping.values())
    outer, inner = g.outer, g.inner
    if isinstance(q.op, Reduce):
        reduced = {mapping[v] for v in q.reduce_vars}
        if covered != set(g.axes):
            return "the reduction does not cover the group's axes"
        if inner and reduced != set(inner):
            return "the reduction runs over other axes than the group's"
        if not inner:
            outer = tuple(a for a in g.outer if a not in reduced)
            inner = tuple(a for a in g.outer if a in reduced)
    elif covered != set(g.axes) and not (inner and covered == set(outer)):
        return "the loops have other extents"
    new = _member(q, mapping, isinstance(q.op, Reduce) or (bool(inner) and covered != set(outer)))
    members = g.members
    if inner != g.inner:  # the group was pointwise: its members cover what is now outer and inner
        members = tuple(replace(m, inner=True) for m in members)
    grown = Group(outer, inner, (*members, new))
    reason = _check_reads(p, grown, new)
    return grown if reason is None else reason


def _match_axes(g: Group, q: _Prepared) -> dict[Index, Index] | str:
    """Map the operation's variables to the group's axes: through the buffers both touch, then by extent."""
    own = q.vars + q.reduce_vars
    if len(own) > len(g.axes):
        return "it has more loops than the group"
    stored = {m.op.out: m.store for m in g.members}
    mapping: dict[Index, Index] = {}
    mine = sorted(set(ex.loads(q.body)), key=lambda n: (n.buffer not in stored, -len(n.free_vars), repr(n)))
    group_loads: dict[str, list[tuple[Index, ...]]] = {}
    for m in g.members:
        for n in ex.loads(m.body):
            group_loads.setdefault(n.buffer, []).append(n.indices)
    for n in mine:
        if n.buffer in stored:
            _unify(mapping, n.indices, stored[n.buffer])
    for n in mine:
        for theirs in group_loads.get(n.buffer, ())[:4]:
            _unify(mapping, n.indices, theirs)
    free = [a for a in g.axes if a not in mapping.values()]
    need_inner = [v for v in own if v not in mapping]
    # What is left is not tied by data: match equal extents in order, reduced variables to inner axes first.
    for v in need_inner:
        prefer = [a for a in free if a.extent == v.extent and (v in q.reduce_vars) == (a in g.inner)]
        pool = prefer or [a for a in free if a.extent == v.extent]
        if not pool:
            return f"no axis of extent {v.extent} is left for {v.name}"
        mapping[v] = pool[0]
        free.remove(pool[0])
    return mapping


def _unify(mapping: dict[Index, Index], mine: tuple[Index, ...], theirs: tuple[Index, ...]) -> None:
    """Tie variables to axes that take the same place in two indices of one buffer."""
    if len(mine) != len(theirs):
        return
    for a, b in zip(mine, theirs, strict=True):
        others = {c: atom for atom, c in ix.linear_terms(b)[1]}
        for v, c in ix.linear_terms(a)[1]:
            axis = others.get(c)
            if axis is None or v.kind != "var" or axis.kind != "var" or v.extent != axis.extent:
                continue
            if v not in mapping and axis not in mapping.values():
                mapping[v] = axis


def _split_by_radix(g: Group, q: _Prepared) -> Group:
    """The group with an axis split where the operation walks a stored buffer in mixed radix.

    A window partition reads row ``(7 * a + b) * 56 + 7 * c + d`` of a layer norm: its rows are 8 * 7 * 8 * 7
    axes.
    """
    stored = {m.op.out: m.store for m in g.members}
    parts: dict[Index, tuple[Index, tuple[Index, ...]]] = {}
    for n in ex.loads(q.body):
        for mine, theirs in zip(n.indices, stored.get(n.buffer, ()), strict=False):
            if theirs not in g.axes or theirs in parts:
                continue
            constant, terms = ix.linear_terms(mine)
            chain = sorted(terms, key=lambda t: t[1])
            if constant or len(chain) < 2 or any(v.kind != "var" for v, _ in chain):
                continue
            size = 1
            for v, c in chain:
                size = size * v.extent if c == size and isinstance(v.extent, int) else -1
            if size == theirs.extent:
                own = tuple(ix.var(f"{theirs.name}_{j}", v.extent) for j, (v, _) in enumerate(chain))
                parts[theirs] = (ix.linearize(own, [c for _, c in chain]), tuple(reversed(own)))
    return substitute_axes(g, parts)


def _check_reads(p: LoopProgram, g: Group, new: Member) -> str | None:
    """Each value that the new member takes from the group must be there when it is needed."""
    stored = {m.op.out: m for m in g.members[:-1]}
    inner = set(g.inner)
    for n in ex.loads(new.body):
        source = stored.get(n.buffer)
        if source is None:
            if any(base_of(p.buffers, n.buffer) == base_of(p.buffers, s) for s in stored):
                return "it reads a reinterpretation of a buffer that the group writes"
            continue
        if n.indices == source.store:
            continue
        for mine, theirs in zip(n.indices, source.store, strict=True):
            if mine is theirs:
                continue
            if not theirs.free_vars or theirs.free_vars - inner:
                return f"it reads {n.buffer} at another point than the group writes"
        # The same row at another column: legal in a later pass, once the row is complete.
        if not source.inner or isinstance(source.op, Reduce):
            return f"it reads {n.buffer} at another point than the group writes"
        row = extents(g.inner) * p.buffers[n.buffer].dtype.itemsize
        if row > MAX_ROW_BYTES:
            return "the row is too long to be kept in cache"
    return None


#: A row that is read again in a later pass has to stay in the second-level cache.
MAX_ROW_BYTES = 256 << 10
