"""Who writes and who reads each buffer: the one dependence model of the scheduler.

What comes in: a loop program. What goes out: ``Uses``, asked by inlining, fusion, ordering and memory alike.
What holds in between: an alias is resolved to the buffer whose storage it names, so that a dependence through
a reinterpreted view is never missed. The next file is ``simplify.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hotloop.ir.loops import Buffer, Extern, LoopProgram, Op, ViewRef, op_outputs, op_reads

__all__ = ["Uses", "analyse", "base_of"]


def base_of(buffers: Mapping[str, Buffer], name: str) -> str:
    """The buffer that owns the storage of ``name``."""
    while (b := buffers[name]).alias_of is not None:
        name = b.alias_of
    return name


@dataclass(frozen=True)
class Uses:
    """For each storage: the writing operation, the reading operations (positions in the program), and whether
    it is *held*: given back to the caller, read by an extern call, or reinterpreted, so that it has to exist
    in memory."""

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
        for b in op_reads(op):
            base = base_of(p.buffers, b)
            users = readers.setdefault(base, [])
            if not users or users[-1] != i:
                users.append(i)
            if isinstance(op, Extern) or base != b:
                held.add(base)
    outputs = frozenset(base_of(p.buffers, o.buffer) for o in p.outputs if isinstance(o, ViewRef))
    return Uses(writer, {b: tuple(r) for b, r in readers.items()}, frozenset(held | outputs), outputs)
