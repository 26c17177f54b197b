"""Who writes and who reads each buffer: the one dependence model of the scheduler.

What comes in: a loop program. What goes out: ``Uses``, asked by inlining, fusion, ordering and memory alike.
What holds in between: an alias is resolved to the buffer whose storage it names, so that a dependence through
a reinterpreted view is never missed. The next file is ``updates.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hotloop.ir import sizes as sz
from hotloop.ir.index import Index
from hotloop.ir.loops import (
    Buffer,
    Extern,
    LoopOp,
    LoopProgram,
    Op,
    Scan,
    Scatter,
    ViewRef,
    op_outputs,
    op_reads,
)

__all__ = ["Uses", "analyse", "base_of", "ordered_vars"]


def base_of(buffers: Mapping[str, Buffer], name: str) -> str:
    """The buffer that owns the storage of ``name``."""
    while (b := buffers[name]).alias_of is not None:
        name = b.alias_of
    return name


@dataclass(frozen=True)
class Uses:
    """For each storage: the last writing operation, the reading operations (positions in the program), and
    whether it is *held*: given back to the caller, read by an extern call, reinterpreted, or updated by a
    scatter, so that it has to exist in memory."""

    writer: Mapping[str, int]
    readers: Mapping[str, tuple[int, ...]]
    held: frozenset[str]
    outputs: frozenset[str]


def analyse(p: LoopProgram, ops: Sequence[Op] | None = None) -> Uses:
    """The uses in ``p`` (with other ``ops`` where a pass is halfway through)."""
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    held: set[str] = set()
    for i, op in enumerate(p.ops if ops is None else ops):
        for b in op_outputs(op):
            writer[base_of(p.buffers, b)] = i
            if isinstance(op, Scatter):
                held.add(base_of(p.buffers, b))
        for b in op_reads(op):
            base = base_of(p.buffers, b)
            users = readers.setdefault(base, [])
            if not users or users[-1] != i:
                users.append(i)
            if isinstance(op, Extern) or base != b:
                held.add(base)
    outputs = frozenset(base_of(p.buffers, o.buffer) for o in p.outputs if isinstance(o, ViewRef))
    return Uses(writer, {b: tuple(r) for b, r in readers.items()}, frozenset(held | outputs), outputs)


def ordered_vars(op: LoopOp) -> tuple[Index, ...]:
    """The variables along which the order of an operation's points counts.

    All others are independent: two points that differ in one of them write different elements and carry
    nothing over. Of a scatter those are the variables that an index walks by themselves, as ``j`` in
    ``out[ids[i], j]``, or in steps that cannot meet, as in ``out[8 * i + j]`` with ``j < 8``.
    """
    if isinstance(op, Scan):
        return (op.vars[op.axis],)
    if not isinstance(op, Scatter):
        return ()
    free: set[Index] = set()
    for i in op.indices:
        free.update(sz.separate_variables(i))
    return tuple(v for v in op.vars if v not in free)
