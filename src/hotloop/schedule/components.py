"""Parts of a program that have nothing to do with each other, one after the other.

What comes in: a simplified loop program. What goes out: the same, its operations in another order. What holds
in between: operations that share memory or a size that a call tells, or that have an effect, keep their
order. Each part's intermediates are gone before the next one begins, and what belongs together is near, where
``fuse.py`` looks for it: an optimizer goes through the list of its parameters in each of its steps, and comes
back to each many times.

The next file is ``fuse.py``.
"""

from __future__ import annotations

from dataclasses import replace

from hotloop.ir import sizes as sz
from hotloop.ir.loops import Extern, LoopProgram, op_outputs, op_reads, op_symbols

from .dependences import base_of
from .fuse import has_effect

__all__ = ["one_by_one"]


def one_by_one(p: LoopProgram) -> LoopProgram:
    """The program with the operations of each part together; the same object where they are already."""
    parent = list(range(len(p.ops)))

    def root(k: int) -> int:
        while parent[k] != k:
            parent[k] = k = parent[parent[k]]
        return k

    written = {base_of(p.buffers, n) for op in p.ops for n in op_outputs(op)}
    told = {s.name for op in p.ops if isinstance(op, Extern) for s, _, _ in op.binds}
    user: dict[str, int] = {}  # of each storage, each size that a call tells, and all effects
    for k, op in enumerate(p.ops):
        names = {base_of(p.buffers, n) for n in (*op_reads(op), *op_outputs(op))}
        # A number that all of them read, as a learning rate, ties nothing together.
        tied = {n for n in names if n in written or sz.hint(p.buffers[n].numel) > 1}
        effects = ["effects"] if isinstance(op, Extern) and has_effect(op) else []
        sizes = op_symbols(op) & told if told else ()
        tells = [s.name for s, _, _ in op.binds] if isinstance(op, Extern) else []
        for n in (*tied, *effects, *sizes, *tells):
            first, second = sorted((root(k), root(user.setdefault(n, k))))
            parent[second] = first
    order = sorted(range(len(p.ops)), key=root)  # a part is numbered by its first operation
    return p if order == list(range(len(p.ops))) else replace(p, ops=tuple(p.ops[k] for k in order))
