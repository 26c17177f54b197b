"""The axes of a group: splitting them where views divide them, choosing the one to vectorise.

What comes in: a group from ``fuse.py``. What goes out: the same group over other axes, and one axis chosen.
What holds in between: the set of points and what happens at each of them never changes. The next file is
``passes.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir import sizes as sz
from hotloop.ir.index import Index
from hotloop.ir.loops import Buffer, Reduce

from .fuse import Group, Member, substitute_axes
from .simplify import extents
from .split import split_variables

__all__ = ["access_cost", "accesses", "choose_vector_axis", "flat_index", "split_axes"]


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
        if n.op != "load":
            yield from ex.own_indices(n)
    if m.position is not None:
        yield m.position


def split_axes(g: Group, buffers: Mapping[str, Buffer]) -> Group:
    """Split an axis into factors where flat indices divide it by a chain of constants."""
    indices = [flat for m in g.members for _, flat in accesses(buffers, m)]
    indices += [i for m in g.members for i in _index_values(m)]
    return substitute_axes(g, split_variables(g.axes, indices))


#: What an access costs a vector lane, relative to a contiguous one.
CONTIGUOUS, UNIFORM, STRIDED, GATHER = 1.0, 0.1, 6.0, 8.0
#: A stride that puts every lane on a cache line of its own.
FAR_BYTES, FAR = 64, 12.0


def access_cost(flat: Index, axis: Index, size: int) -> float:
    """What an access to elements of ``size`` bytes costs a lane, in bytes of contiguous access."""
    c = ix.coefficient(flat, axis)
    if c is None:
        return GATHER * size
    if c == 0:
        return UNIFORM * size
    step = abs(c) if isinstance(c, int) else max(sz.hint(c), 2)
    if step * size >= FAR_BYTES:
        return FAR * size
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
                total += share * access_cost(flat, axis, buffers[name].dtype.itemsize)
        extent = max(sz.hint(axis.extent), 1)
        if extent < 8:  # most lanes would be idle
            total *= 8 / extent
        if best is None or (total, rank) < best:
            best, chosen = (total, rank), axis
    return chosen
