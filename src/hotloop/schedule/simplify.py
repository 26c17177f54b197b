"""Clean up a loop program before fusion: empty work, inlining of cheap producers, splitting of long
reductions.

What comes in: a loop program as lowered, one operation an ATen operator. What goes out: a loop program with
the same results and fewer, larger operations. What holds in between: recomputation is bounded; a buffer that
has to exist in memory anyway is read, not computed again. The next file is ``fuse.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir import sizes as sz
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index
from hotloop.ir.loops import (
    Buffer,
    Extern,
    LoopOp,
    LoopProgram,
    Op,
    Pointwise,
    Reduce,
    Scatter,
    op_outputs,
    op_reads,
    op_values,
)

from .dependences import Uses, analyse, base_of
from .indices import settle

__all__ = ["drop_dead", "drop_empty", "extents", "inline", "merge_equal", "simplify", "split_reductions"]

#: A body larger than this is stored rather than copied into its reader: it bounds registers and compile time.
MAX_NODES = 300
#: Nor is a body nested deeper than this: every stage goes down it by calling itself.
MAX_DEPTH = 80
#: Nor is an index longer than this: a permutation of a permutation doubles it where strides do not divide.
MAX_INDEX_NODES = 200
#: A producer read by several operations is recomputed in each when it is no dearer than this (simple
#: instructions).
CHEAP = 3
#: A producer this many times smaller than its reader counts as small: reading what it reads costs nothing.
SMALL = 16
#: What may be recomputed once for every inner loop of a reader.
HOISTED = 40
#: A producer with one reader is recomputed for every point of a larger reader up to this cost.
CHEAP_BROADCAST = 5


def simplify(p: LoopProgram, threads: int) -> LoopProgram:
    """Every pass of this module in order."""
    p = drop_empty(p)
    p = merge_equal(drop_dead(inline(p)))
    p = inline(p)  # what was small to its first readers may be large to those they went into
    p = settle_indices(p)
    p = split_reductions(p, threads)
    return drop_dead(p)


def settle_indices(p: LoopProgram) -> LoopProgram:
    """Computed indices become index expressions where a formula gives the same numbers."""
    ops = tuple(op if isinstance(op, Extern) else replace(op, body=settle(op.body)) for op in p.ops)
    return p if all(a is b for a, b in zip(ops, p.ops, strict=True)) else replace(p, ops=ops)


def extents(vars: Sequence[Index]) -> int:
    """The number of points of these loops; about how many, where sizes are symbolic."""
    return sz.estimate(v.extent for v in vars)


def drop_empty(p: LoopProgram) -> LoopProgram:
    """Operations without points vanish; reductions over nothing, or over one element, become pointwise."""
    ops: list[Op] = []
    for op in p.ops:
        if isinstance(op, Extern):
            ops.append(op)
        elif _are(op.vars, 0):
            continue
        elif isinstance(op, Reduce) and _are(op.reduce_vars, 0):
            value = ex.cast(ex.neutral(op.kind, op.body.dtype), p.buffers[op.out].dtype)
            ops.append(Pointwise(op.out, op.vars, value, op.origin))
        elif isinstance(op, Reduce) and _are(op.reduce_vars, 1):
            one = op.body.substitute(dict.fromkeys(op.reduce_vars, 0))
            if op.kind in ("argmax", "argmin"):
                one = ex.const(0, torch.int64)
            ops.append(
                Pointwise(op.out, op.vars, ex.cast(one, p.buffers[op.out].dtype, implicit=True), op.origin)
            )
        else:
            ops.append(op)
    return (
        p
        if len(ops) == len(p.ops) and all(a is b for a, b in zip(ops, p.ops, strict=True))
        else replace(p, ops=tuple(ops))
    )


def _are(vars: Sequence[Index], points: int) -> bool:
    """Whether loops have this number of points, whatever the sizes that vary."""
    return sz.product(v.extent for v in vars) == points


def inline(p: LoopProgram) -> LoopProgram:
    """Substitute producers into their readers where that saves memory traffic and costs little arithmetic."""
    uses = analyse(p)
    producers = _Producers(p)
    ops: list[Op] = []
    for op in p.ops:
        if isinstance(op, Extern):
            ops.append(op)
            producers.forget_overwritten(op)
            continue
        new = _inlined(p, op, producers, uses)
        ops.append(new)
        producers.forget_overwritten(op)
        if isinstance(new, Pointwise) and p.buffers[new.out].kind == "temp" and new.out not in uses.held:
            producers.add(new)
    return replace(p, ops=tuple(ops))


class _Producers:
    """The operations that readers may compute for themselves, by what they write."""

    def __init__(self, p: LoopProgram) -> None:
        self.p = p
        self.of: dict[str, Pointwise] = {}
        self.sizes: dict[str, tuple[int, int]] = {}  # nodes of the body, and how deep they are nested
        self.reading: dict[str, list[str]] = {}  # storage -> producers that read it

    def add(self, op: Pointwise) -> None:
        self.of[op.out] = op
        self.sizes[op.out] = sum(1 for _ in ex.walk(op.body)), ex.depth(op.body)
        for n in op_reads(op):
            self.reading.setdefault(base_of(self.p.buffers, n), []).append(op.out)

    def forget_overwritten(self, op: Op) -> None:
        """What reads a buffer that ``op`` overwrites cannot be computed any later."""
        written = {base_of(self.p.buffers, n) for n in op_outputs(op)}
        again = isinstance(op, Scatter) or (isinstance(op, Extern) and op.mutates)
        if again or any(self.p.buffers[n].kind == "input" for n in written):
            for base in written:
                for name in self.reading.pop(base, ()):
                    self.of.pop(name, None)


def _inlined(
    p: LoopProgram,
    op: LoopOp,
    known: _Producers,
    uses: Uses,
) -> LoopOp:
    """The operation with producers substituted."""
    producers = known.of
    out = p.buffers[op.out]
    points = extents(op.vars) * (extents(op.reduce_vars) if isinstance(op, Reduce) else 1)
    counts: dict[str, int] = {}
    for n in (n for value in op_values(op) for n in ex.loads(value)):
        counts[n.buffer] = counts.get(n.buffer, 0) + 1
    budget = MAX_NODES - sum(1 for value in op_values(op) for _ in ex.walk(value))
    levels = MAX_DEPTH - (max(map(ex.depth, op_values(op))) if counts.keys() & producers.keys() else 0)
    chosen: set[str] = set()
    for name, count in counts.items():
        producer = producers.get(name)
        readers = len(uses.readers.get(name, ()))
        if producer is None or not _worthwhile(producer, op, out, count, points, readers):
            continue
        if not _leaves_old_value(p, producer, op):
            continue
        nodes, depth = known.sizes[name]
        if depth > levels:
            continue
        budget -= nodes * count
        if budget < 0:
            break
        chosen.add(name)
    if not chosen:
        return op
    folded = [
        o for name in counts if name in chosen for o in (*producers[name].folded, producers[name].origin)
    ]

    def expand(n: Expr) -> Expr | None:
        if n.buffer not in chosen:
            return None
        producer = producers[n.buffer]
        return producer.body.substitute(dict(zip(producer.vars, n.indices, strict=True)))

    new = _with_values(op, lambda e: ex.rewrite_loads(e, expand))
    if _longest_index(new) > max(MAX_INDEX_NODES, _longest_index(op)):
        return op
    return replace(new, folded=tuple(dict.fromkeys([*folded, *op.folded])))


def _with_values(op: LoopOp, f: Callable[[Expr], Expr]) -> LoopOp:
    """The operation with ``f`` of each of its trees."""
    new = replace(op, body=f(op.body))
    if not isinstance(new, Scatter):
        return new

    def atom(a: Index) -> Index:
        return ix.indirect(f(a.args[0]), a.args[1], a.args[2])

    return replace(new, indices=tuple(ex.replace_atoms(i, atom) for i in new.indices))


def _leaves_old_value(p: LoopProgram, producer: Pointwise, op: LoopOp) -> bool:
    """Whether ``op``, which may write over what the producer reads, still finds it there point by point."""
    base = base_of(p.buffers, op.out)
    if not isinstance(op, Scatter) and p.buffers[base].kind != "input":
        return True
    reads = [n for n in ex.loads(producer.body) if base_of(p.buffers, n.buffer) == base]
    if not reads:
        return True
    here = all(n.buffer == op.out and n.indices == producer.vars for n in reads)
    at = {n.indices for n in ex.loads(op.body) if n.buffer == producer.out}
    return isinstance(op, Pointwise) and here and at == {op.vars}


def _longest_index(op: LoopOp) -> int:
    return max((ex.index_length(i) for e in op_values(op) for n in ex.loads(e) for i in n.indices), default=0)


def _worthwhile(
    producer: Pointwise, reader: LoopOp, out: Buffer, count: int, points: int, readers: int
) -> bool:
    """Whether to compute the producer again in ``reader``, whose result goes to ``out``."""
    body = producer.body
    reads = sum(1 for n in ex.walk(body) if n.op == "load")
    work = ex.cost(body) - reads
    own = max(extents(producer.vars), 1)
    if reads == 0 and not body.dtype.is_floating_point and work <= HOISTED:
        return True  # an index that is computed: ``settle_indices`` finds its formula
    if points * SMALL <= own:
        return True  # a few elements of something large: a gather after a row-wise computation
    if points >= SMALL * own and reads <= 3:
        # A per-channel or per-row value: its loads stay in cache. Dearer ones only where the inner loop
        # hoists them.
        if work <= CHEAP or (work <= HOISTED and _is_uniform(producer, reader, out)):
            return True
    if readers > 1:
        return (reads <= 1 and work <= CHEAP) or (reads == 0 and work <= 2 * CHEAP)
    repeats = count * points / own
    return repeats <= 1 or work <= CHEAP_BROADCAST or (repeats <= 2 and work <= 4 * CHEAP_BROADCAST)


def _is_uniform(producer: Pointwise, reader: LoopOp, out: Buffer) -> bool:
    """Whether the producer's value is the same along what will be the reader's inner loop."""
    if isinstance(reader, Reduce):
        inner = reader.reduce_vars[-1]
    elif isinstance(reader, Scatter):
        return False  # the loop that is innermost depends on which variables are independent
    else:
        contiguous = [v for v, s in zip(reader.vars, out.strides, strict=True) if s == 1 and v.extent != 1]
        if not contiguous:
            return False
        inner = contiguous[-1]
    if sz.hint(inner.extent) < 32:
        return False
    return all(inner not in n.free_vars for n in ex.loads(reader.body) if n.buffer == producer.out)


def merge_equal(p: LoopProgram) -> LoopProgram:
    """Of operations that compute the same, one is left: upsampling has the same weights for rows and columns.

    After inlining, so that only what would be stored twice is stored once: a value that each reader computes
    for itself stays where it is.
    """
    uses = analyse(p)
    changing = _written_again(p)
    first: dict[tuple[object, ...], str] = {}
    same: dict[str, str] = {}
    ops: list[Op] = []

    def renamed(n: Expr) -> Expr | None:
        if n.buffer not in same:
            return None
        own = iter([n.indices[d] for d in _long_dims(p.buffers[n.buffer])])
        b = p.buffers[same[n.buffer]]
        kept = _long_dims(b)
        at = tuple(next(own) if d in kept else ix.const(0) for d in range(len(b.sizes)))
        return ex.load(b.name, at, n.dtype)

    for op in p.ops:
        if isinstance(op, Extern):
            ops.append(op)
            continue
        new = _with_values(op, lambda e: ex.rewrite_loads(e, renamed)) if same else op
        out = p.buffers[op.out]
        touched = {base_of(p.buffers, b) for b in (op.out, *op_reads(new))}
        if isinstance(new, (Pointwise, Reduce)) and out.kind == "temp" and changing.isdisjoint(touched):
            earlier = first.setdefault(_what(new, out), op.out)
            if earlier != op.out and op.out not in uses.held:
                same[op.out] = earlier
                continue
        ops.append(new)
    return replace(p, ops=tuple(ops)) if same else p


def _long_dims(b: Buffer) -> tuple[int, ...]:
    return tuple(d for d, size in enumerate(b.sizes) if size != 1)


def _what(op: Pointwise | Reduce, out: Buffer) -> tuple[object, ...]:
    """What an operation computes, dimensions of size 1 left out: equal for two that can serve as one."""
    long = _long_dims(out)
    vars = [ix.var(f"i{k}", out.sizes[d]) for k, d in enumerate(long)]
    mapping: dict[Index, Index] = {v: ix.const(0) for v in op.vars}
    mapping.update(zip((op.vars[d] for d in long), vars, strict=True))
    moved = {old: new for old, new in mapping.items() if old is not new}
    body = op.body.substitute(moved) if moved else op.body
    how = (op.kind, op.reduce_vars) if isinstance(op, Reduce) else ()
    return (*vars, *how, body, out.dtype, *(out.strides[d] for d in long))


def _written_again(p: LoopProgram) -> set[str]:
    """The buffers that hold one value and later another."""
    seen = {name for name, b in p.buffers.items() if b.kind == "input"}
    again: set[str] = set()
    for op in p.ops:
        for name in {base_of(p.buffers, b) for b in op_outputs(op)}:
            (again if name in seen else seen).add(name)
    return again


def drop_dead(p: LoopProgram) -> LoopProgram:
    """Remove operations whose result nobody reads, and the buffers that are left without a use."""
    uses = analyse(p)
    wanted = set(uses.outputs)
    kept: list[Op] = []
    for op in reversed(p.ops):
        if isinstance(op, Extern) or op.out in wanted or p.buffers[op.out].kind == "input":
            kept.append(op)
            for b in op_reads(op):
                wanted.add(b)
                while (base := p.buffers[b].alias_of) is not None:
                    wanted.add(base)
                    b = base
    if len(kept) == len(p.ops):
        return p
    return replace(p, ops=tuple(reversed(kept)))


# --- long reductions ----------------------------------------------------------------------------------------

#: Reductions with fewer points than this are not worth splitting over threads.
SPLIT_MIN_POINTS = 1 << 16
_SPLITTABLE = ("sum", "prod", "max", "min", "any", "all")


def split_reductions(p: LoopProgram, threads: int) -> LoopProgram:
    """Give a reduction that has few results and many terms an outer dimension of partial results.

    ``sum(r < N)`` becomes ``sum(c < C: sum(r < N / C))``: the inner one has work for every thread.
    """
    if threads < 2:
        return p
    ops: list[Op] = []
    buffers = dict(p.buffers)
    for op in p.ops:
        parts = _split_factor(op, buffers, threads) if isinstance(op, Reduce) else None
        if parts is None or not isinstance(op, Reduce):
            ops.append(op)
            continue
        k, factor = parts
        name = f"{op.out}_part"
        partial, final = _split(op, k, factor, name)
        sizes = tuple(v.extent for v in partial.vars)
        buffers[name] = Buffer(name, op.body.dtype, sizes, ix.contiguous_strides(sizes))
        ops += [partial, final]
    return p if len(ops) == len(p.ops) else replace(p, ops=tuple(ops), buffers=buffers)


def _split_factor(op: Reduce, buffers: Mapping[str, Buffer], threads: int) -> tuple[int, int] | None:
    """The reduced variable to split and into how many parts, or ``None`` where splitting does not pay."""
    rows, terms = extents(op.vars), extents(op.reduce_vars)
    if op.kind not in _SPLITTABLE or rows * terms < SPLIT_MIN_POINTS:
        return None
    # Rows are divided over threads one by one; columns, whose lanes lie side by side, in blocks.
    columns = rows >= COLUMN_BLOCK and _runs_down_columns(op, buffers)
    units = rows // COLUMN_BLOCK if columns else rows
    if units >= (2 if columns else 4) * threads or terms < (64 if columns else 4096):
        return None
    want = max(2, min(64, -(-8 * threads // units), terms // (32 if columns else 1024)))
    for k, v in enumerate(op.reduce_vars):
        n = v.extent
        fits = [d for d in range(2, 4 * want + 1) if n % d == 0] if isinstance(n, int) else []
        if fits:
            best = min(fits, key=lambda d: abs(d - want))
            if best >= threads or best * 2 >= want:
                return k, best
    # The last of equal parts is shorter: its loop asks, so that it is no inner one where there are several.
    varying = [(sz.hint(v.extent), k) for k, v in enumerate(op.reduce_vars) if isinstance(v.extent, Index)]
    long = [k for points, k in varying if points >= 4 * want]
    return (long[0], want) if long else None


#: Columns that one thread reduces at a time: a few vectors, so that each row's visit reads whole cache lines.
COLUMN_BLOCK = 64


def _runs_down_columns(op: Reduce, buffers: Mapping[str, Buffer]) -> bool:
    """Whether the largest operand is contiguous along a kept variable and not along a reduced one."""
    reads = sorted(ex.loads(op.body), key=lambda n: sz.hint(buffers[n.buffer].nbytes))
    if not reads:
        return False
    b = buffers[reads[-1].buffer]
    flat = ix.linearize(reads[-1].indices, b.strides)
    kept = any(ix.coefficient(flat, v) == 1 and v.extent != 1 for v in op.vars)
    return kept and not any(ix.coefficient(flat, v) == 1 and v.extent != 1 for v in op.reduce_vars)


def _split(op: Reduce, k: int, factor: int, name: str) -> tuple[Reduce, Reduce]:
    v = op.reduce_vars[k]
    size = sz.plain(ix.floordiv(v.extent + (factor - 1), factor))
    chunk = ix.var("c", factor)
    inner = ix.var(v.name, size)
    body = op.body.substitute({v: chunk * size + inner})
    if sz.plain(size * factor) != v.extent:
        inside = ex.call("lt", ex.index_value(chunk * size + inner), ex.index_value(ix.as_index(v.extent)))
        body = ex.masked(inside, body, ex.neutral(op.kind, body.dtype))
    reduce_vars = (*op.reduce_vars[:k], inner, *op.reduce_vars[k + 1 :])
    partial = Reduce(name, (chunk, *op.vars), reduce_vars, op.kind, body, op.origin, op.folded)
    again = ix.var("r0", factor)
    value = ex.load(name, (again, *op.vars), op.body.dtype)
    return partial, Reduce(op.out, op.vars, (again,), op.kind, value, op.origin)
