"""Scatters work in place: one whose base is not needed any more writes straight into its memory.

What comes in: a loop program as lowered, where a scatter gives a new buffer. What goes out: a program with
the same results in which every scatter's base is its own result. What holds in between:

* A base that somebody reads later, that is given to the caller, or that is not the program's to write is
  copied first.
* A chain of scatters that starts from a graph input and is copied back into it writes the input itself,
  where nobody reads an older version of it afterwards: one token of a cache of a million costs one token.
* What a scatter stores does not read the buffer that it updates: such values are computed before it.

The next file is ``simplify.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index
from hotloop.ir.loops import (
    Buffer,
    Extern,
    LoopProgram,
    Op,
    Pointwise,
    Scatter,
    ViewRef,
    op_outputs,
    op_reads,
    op_values,
    views_in,
)

from .dependences import base_of

__all__ = ["update_in_place"]


def update_in_place(p: LoopProgram) -> LoopProgram:
    """Give every scatter memory to write in; the same program where there is none."""
    if not any(isinstance(op, Scatter) for op in p.ops):
        return p
    written = {op.out for op in p.ops if isinstance(op, Pointwise) and p.buffers[op.out].kind == "input"}
    for name in sorted(written):
        p = _write_through(p, name)
    return _take_over(p)


# --- what is asked about a program --------------------------------------------------------------------------


def _reads(p: LoopProgram, op: Op) -> set[str]:
    return {base_of(p.buffers, n) for n in op_reads(op)}


def _returned(p: LoopProgram) -> set[str]:
    return {base_of(p.buffers, o.buffer) for o in p.outputs if isinstance(o, ViewRef)}


def _seen_as_tensors(p: LoopProgram) -> set[str]:
    """Buffers whose place in memory somebody counts on: read by strides, or reinterpreted."""
    found = {b.alias_of for b in p.buffers.values() if b.alias_of is not None}
    for op in p.ops:
        if isinstance(op, Extern):
            found.update(v.buffer for v in views_in((op.args, op.kwargs)))
    return found | {o.buffer for o in p.outputs if isinstance(o, ViewRef)}


def _same_place(p: LoopProgram, new: str, old: str, seen: set[str]) -> bool:
    """Whether everybody who reads ``new`` finds its elements in ``old``."""
    a, b = p.buffers[new], p.buffers[old]
    return a.strides == b.strides or not {new, old} & seen


# --- graph inputs -------------------------------------------------------------------------------------------


def _write_through(p: LoopProgram, name: str) -> LoopProgram:
    """Let the scatters whose result is copied into the input ``name`` write it, where that is allowed."""
    back = [k for k, op in enumerate(p.ops) if name in op_outputs(op)]
    if len(back) != 1:
        return p
    ops, chain = list(p.ops), _chain(p, back[0])
    if not chain:
        return p
    versions = [op.out for op in chain]
    seen = _seen_as_tensors(p)
    taken = set(versions) & _returned(p)
    if taken or not all(_same_place(p, v, name, seen) for v in versions):
        return p
    write = ops[back[0]]
    if not _in_order(p, ops, name, chain):
        ops = _sunk(p, ops, chain)
        if not _in_order(p, ops, name, chain):
            return p
    ops.remove(write)
    return _renamed(replace(p, ops=tuple(ops)), dict.fromkeys(versions, name))


def _chain(p: LoopProgram, back: int) -> list[Scatter]:
    """The scatters from an input to the buffer that operation ``back`` copies into it, in order."""
    copy = p.ops[back]
    if not isinstance(copy, Pointwise) or copy.body.op != "load" or copy.body.indices != copy.vars:
        return []
    makers = {op.out: op for op in p.ops if isinstance(op, Scatter)}
    found: list[Scatter] = []
    at = copy.body.buffer
    while at in makers:
        found.insert(0, makers[at])
        at = makers[at].base
    return found if at == copy.out else []


def _in_order(p: LoopProgram, ops: Sequence[Op], name: str, chain: Sequence[Scatter]) -> bool:
    """Whether no version of the input is read once the next one has been made."""
    stale: set[str] = set()
    made = {op.out: old for op, old in zip(chain, [name, *(c.out for c in chain)], strict=False)}
    for op in ops:
        if stale & _reads(p, op):
            return False
        if isinstance(op, Scatter) and op.out in made:
            stale.add(made[op.out])
        elif stale and any(base_of(p.buffers, n) == name for n in op_outputs(op)):
            return True  # the write back to the input ends what has to be looked at
    return True


def _sunk(p: LoopProgram, ops: list[Op], chain: Sequence[Scatter]) -> list[Op]:
    """The scatters as late as possible: before the first reader of what they make or write to an input."""
    out = list(ops)
    for op in reversed(chain):
        at = out.index(op)
        end = next(
            k for k in range(at + 1, len(out))
            if op.out in _reads(p, out[k]) or any(p.buffers[n].kind == "input" for n in op_outputs(out[k]))
        )  # fmt: skip
        out.insert(end, op)
        del out[at]
    return out


# --- everything else ----------------------------------------------------------------------------------------


def _take_over(p: LoopProgram) -> LoopProgram:
    """Scatters write over their base where it is an intermediate that nobody reads later, or over a copy."""
    renames: dict[str, str] = {}
    buffers = dict(p.buffers)
    returned, seen = _returned(p), _seen_as_tensors(p)
    loops = {op.out for op in p.ops if not isinstance(op, Extern)}
    last: dict[str, int] = {}
    for k, op in enumerate(p.ops):
        for n in _reads(p, op):
            last[n] = k
    ops: list[Op] = []
    for k, old in enumerate(p.ops):
        op = _renamed_op(old, renames)
        if not isinstance(op, Scatter):
            ops.append(op)
            continue
        assert isinstance(old, Scatter)
        if op.out != op.base:
            free = buffers[op.base].kind == "temp" and old.base in loops and old.base not in returned
            free = free and base_of(p.buffers, old.base) == old.base and last[old.base] == k
            if free and _same_place(replace(p, buffers=buffers), op.out, op.base, seen):
                renames[op.out] = op.base
                if buffers[op.out].kind == "output":
                    buffers[op.base] = replace(buffers[op.base], kind="output")
                op = replace(op, out=op.base)
            else:
                ops.append(_copy(op, buffers))
                op = replace(op, base=op.out)
        ops += _apart(op, buffers)
    for name, b in buffers.items():
        if b.alias_of is not None and b.alias_of in renames:
            buffers[name] = replace(b, alias_of=renames[b.alias_of])
    outputs = tuple(
        replace(o, buffer=renames.get(o.buffer, o.buffer)) if isinstance(o, ViewRef) else o for o in p.outputs
    )
    kept = {n: b for n, b in buffers.items() if n not in renames}
    return replace(p, buffers=kept, ops=tuple(ops), outputs=outputs)


def _copy(op: Scatter, buffers: Mapping[str, Buffer]) -> Pointwise:
    out = buffers[op.out]
    v = tuple(ix.var(f"i{k}", n) for k, n in enumerate(out.sizes))
    return Pointwise(op.out, v, ex.load(op.base, v, out.dtype), op.origin)


def _apart(op: Scatter, buffers: dict[str, Buffer]) -> list[Op]:
    """The scatter, after what it takes from the buffer that it updates."""

    def reads(e: Expr) -> bool:
        return any(base_of(buffers, n.buffer) == base_of(buffers, op.out) for n in ex.loads(e))

    if not any(map(reads, op_values(op))):
        return [op]
    before: list[Op] = []

    def stored(e: Expr) -> Expr:
        if not reads(e):
            return e
        name = f"{op.out}_value{len(buffers)}"
        sizes = tuple(v.extent for v in op.vars)
        buffers[name] = Buffer(name, e.dtype, sizes, ix.contiguous_strides(sizes))
        before.append(Pointwise(name, op.vars, e, op.origin))
        return ex.load(name, op.vars, e.dtype)

    def atom(a: Index) -> Index:
        return ix.indirect(stored(a.args[0]), a.args[1], a.args[2])

    new = replace(op, body=stored(op.body), indices=tuple(ex.replace_atoms(i, atom) for i in op.indices))
    return [*before, new]


# --- names --------------------------------------------------------------------------------------------------


def _renamed(p: LoopProgram, names: Mapping[str, str]) -> LoopProgram:
    """The program with buffers under other names; those with the old ones go."""
    buffers = {
        n: b if b.alias_of is None else replace(b, alias_of=names.get(b.alias_of, b.alias_of))
        for n, b in p.buffers.items() if n not in names
    }  # fmt: skip
    return replace(p, buffers=buffers, ops=tuple(_renamed_op(op, names) for op in p.ops))


def _renamed_op(op: Op, names: Mapping[str, str]) -> Op:
    if not names or not {*op_reads(op), *op_outputs(op)} & names.keys():
        return op
    if isinstance(op, Extern):
        args, kwargs = _renamed_views(op.args, names), _renamed_views(op.kwargs, names)
        return replace(op, args=args, kwargs=kwargs)

    def value(e: Expr) -> Expr:
        return ex.rewrite_loads(e, load)

    def load(n: Expr) -> Expr | None:
        return ex.load(names[n.buffer], n.indices, n.dtype) if n.buffer in names else None

    new = replace(op, body=value(op.body))
    if isinstance(new, Scatter):
        return replace(
            new,
            out=names.get(new.out, new.out),
            base=names.get(new.base, new.base),
            indices=tuple(_mapped_index(i, value) for i in new.indices),
        )
    return new


def _mapped_index(i: Index, value: Callable[[Expr], Expr]) -> Index:
    return ex.replace_atoms(i, lambda a: ix.indirect(value(a.args[0]), a.args[1], a.args[2]))


def _renamed_views(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, ViewRef):
        return replace(value, buffer=names.get(value.buffer, value.buffer))
    if isinstance(value, (tuple, list)):
        return type(value)(_renamed_views(v, names) for v in value)
    if isinstance(value, Mapping):
        return {k: _renamed_views(v, names) for k, v in value.items()}
    return value
