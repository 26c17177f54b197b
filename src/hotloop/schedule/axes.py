"""The axes of a group: splitting them where views divide them, choosing the one to vectorise.

What comes in: a group from ``fuse.py``. What goes out: the same group over other axes, and one axis chosen. What holds
in between: the set of points and what happens at each of them never changes. The next file is ``passes.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir.index import Index
from hotloop.ir.loops import Buffer, Reduce

from .fuse import Group, Member
from .simplify import extents

__all__ = ["accesses", "choose_vector_axis", "flat_index", "split_axes"]


def flat_index(buffers: Mapping[str, Buffer], buffer: str, indices: tuple[Index, ...]) -> Index:
    """The position of an element in its buffer's memory, in elements."""
    b = buffers[buffer]
    return ix.linearize(indices, b.strides, b.offset if b.alias_of else 0)


def accesses(buffers: Mapping[str, Buffer], m: Member) -> Iterator[tuple[str, Index]]:
    """Each load and the store of a member as (buffer, flat index)."""
    for n in ex.loads(m.body):
        yield n.buffer, flat_index(buffers, n.buffer, n.indices)
    yield m.op.out, flat_index(buffers, m.op.out, m.store)


def _index_values(m: Member) -> Iterator[Index]:
    for n in ex.walk(m.body):
        if n.op == "index":
            yield n.attr
    if m.position is not None:
        yield m.position


def _divisors(e: Index, found: dict[Index, set[int]]) -> None:
    """Collect ``k`` for each ``a // k``, ``a % k`` and ``(a // k) % m`` over a single axis ``a``."""
    if e.kind == "sum":
        for atom, _ in e.args[1]:
            _divisors(atom, found)
        return
    if e.kind not in ("div", "mod"):
        return
    x, k = e.args
    if not k.is_const:
        return
    if x.kind == "var":
        found.setdefault(x, set()).add(k.value)
    elif x.kind == "div" and x.args[0].kind == "var" and x.args[1].is_const:
        found.setdefault(x.args[0], set()).update((x.args[1].value, x.args[1].value * k.value))
    else:
        _divisors(x, found)


def split_axes(g: Group, buffers: Mapping[str, Buffer]) -> Group:
    """Split an axis into factors where every use divides it by a chain of constants, so that indices become linear."""
    found: dict[Index, set[int]] = {}
    for m in g.members:
        for _, flat in accesses(buffers, m):
            _divisors(flat, found)
        for i in _index_values(m):
            _divisors(i, found)
    mapping: dict[Index, Index] = {}
    parts: dict[Index, tuple[Index, ...]] = {}
    for axis, ks in found.items():
        if axis not in g.axes:
            continue
        n = int(axis.extent)  # type: ignore[arg-type]
        chain = [1, *sorted(k for k in ks if k < n), n]
        if any(b % a for a, b in zip(chain, chain[1:])):
            continue
        # axis == ((outermost * radix + next) * radix + ...): one part between each two links of the chain.
        own = tuple(ix.var(f"{axis.name}_{j}", b // a) for j, (a, b) in enumerate(zip(chain, chain[1:])))
        parts[axis] = tuple(reversed(own))
        mapping[axis] = ix.linearize(own, chain[:-1])
    if not mapping:
        return g
    return substitute_axes(g, mapping, parts)


def substitute_axes(g: Group, mapping: Mapping[Index, Index], parts: Mapping[Index, tuple[Index, ...]]) -> Group:
    def axes(old: Iterable[Index]) -> tuple[Index, ...]:
        return tuple(new for a in old for new in parts.get(a, (a,)))

    members = tuple(
        replace(
            m,
            body=m.body.substitute(mapping),
            store=tuple(ix.substitute(s, mapping) for s in m.store),
            position=None if m.position is None else ix.substitute(m.position, mapping),
        )
        for m in g.members
    )
    return Group(axes(g.outer), axes(g.inner), members)


#: What an access costs a vector lane, relative to a contiguous one.
CONTIGUOUS, UNIFORM, STRIDED, GATHER = 1.0, 0.1, 6.0, 9.0


def _access_cost(flat: Index, axis: Index, size: int) -> float:
    c = ix.coefficient(flat, axis)
    if c is None:
        return GATHER * size
    if c == 0:
        return UNIFORM * size
    return (CONTIGUOUS if c == 1 else STRIDED) * size


def choose_vector_axis(g: Group, buffers: Mapping[str, Buffer], stored: set[str]) -> Index | None:
    """The axis along which most bytes are contiguous; an inner axis where that is no worse."""
    if not g.axes:
        return None
    inner_points = max(extents(g.inner), 1)
    best: tuple[float, int] | None = None
    chosen: Index | None = None
    own = {m.op.out for m in g.members}
    for rank, axis in enumerate(reversed(g.axes)):  # innermost first: it wins ties
        total = 0.0
        for m in g.members:
            weight = 1.0 if m.inner or not g.inner else 1.0 / inner_points
            for name, flat in accesses(buffers, m):
                if name in own and name not in stored:
                    continue
                store = name == m.op.out
                share = 1.0 / inner_points if store and isinstance(m.op, Reduce) else weight
                total += share * _access_cost(flat, axis, buffers[name].dtype.itemsize)
        extent = int(axis.extent)  # type: ignore[arg-type]
        if extent < 8:  # most lanes would be idle
            total *= 8 / extent
        if best is None or (total, rank) < best:
            best, chosen = (total, rank), axis
    return chosen
