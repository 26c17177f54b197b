"""The rules of the loop program, the kernel and the schedule, checked without running anything.

What comes in: an IR value. What goes out: nothing, or a ``VerifyError`` that names the rule, the operation
and its neighbours. What holds in between: checks never change what they look at, and a bound that is not
known is not a fault; places in memory that depend on sizes are checked for the sizes as traced and for the
smallest ones.

The next file is ``schedule/fuse.py``, where a verified program is divided into kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

import torch

from hotloop.errors import VerifyError

from . import expr as ex
from . import index as ix
from . import sizes as sz
from .expr import Expr, dtype_name, index_symbols, own_indices, walk
from .expr import symbols as expr_symbols
from .index import Index, IndexLike
from .kernel import (
    Accumulate,
    Attend,
    Init,
    Kernel,
    KernelCall,
    Let,
    Loop,
    Multiply,
    Schedule,
    Scratch,
    Stmt,
    Store,
    statements,
)
from .loops import (
    REDUCTIONS,
    SCANS,
    SCATTERS,
    Buffer,
    Extern,
    LoopOp,
    LoopProgram,
    Op,
    Reduce,
    Scan,
    Scatter,
    ViewRef,
    body_text,
    op_outputs,
    op_reads,
    op_values,
    views_in,
)
from .panels import PANEL_DTYPES, PRODUCT_DTYPES
from .verify_values import LOW, extent_of, leaves, memory_of, node_fault, unguarded

__all__ = ["verify_kernel", "verify_program", "verify_schedule"]

_ARG_KINDS = ("argmax", "argmin")


# --- programs -----------------------------------------------------------------------------------------------


def verify_program(p: LoopProgram, stage: str = "lower") -> None:
    """Raise ``VerifyError`` for the first rule of ``loops.py`` that the program breaks."""
    _Program(p, stage).check()


class _Program:
    def __init__(self, p: LoopProgram, stage: str) -> None:
        self._p = p
        self._stage = stage
        self._at: int | None = None
        self._sound: set[Expr] = set()
        self._written: set[str] = set()
        self._available: set[str] = set()
        self._symbols = set(p.symbols)

    def _fail(self, message: str) -> NoReturn:
        ops = self._p.ops
        if self._at is None:
            near = [f"program {self._p.name} with {len(ops)} operations"]
        else:
            near = [("> " if k == self._at else "  ") + _op_text(ops[k]) for k in _near(self._at, len(ops))]
        source = None if self._at is None else self._p.ops[self._at].origin.source
        raise VerifyError(
            f"{self._p.name}: {message}", stage=self._stage, node="\n".join(near), source_line=source
        )

    def check(self) -> None:
        self._buffers()
        for k, op in enumerate(self._p.ops):
            self._at = k
            if isinstance(op, Extern):
                self._symbols.update(v for v, _, _ in op.binds)
                for v in views_in((op.args, op.kwargs)):
                    self._readable(v.buffer)
                    self._view(v)
            else:
                self._loop_op(op)
            for name in op_outputs(op):
                self._write(name, again=isinstance(op, Scatter) and op.base == name)
        self._at = None
        for out in self._p.outputs:
            if isinstance(out, ViewRef):
                self._readable(out.buffer)
                self._view(out)

    def _buffers(self) -> None:
        for name, b in self._p.buffers.items():
            if b.name != name or len(b.sizes) != len(b.strides):
                self._fail(f"the buffer listed as {name} is {b!r}")
            if b.kind not in ("input", "constant", "temp", "output"):
                self._fail(f"{name} is of unknown kind {b.kind!r}")
            if b.alias_of is not None and b.alias_of not in self._p.buffers:
                self._fail(f"{name} is an alias of {b.alias_of}, which does not exist")
        for name in (*(n for n in self._p.inputs if n is not None), *self._p.constants):
            if name not in self._p.buffers:
                self._fail(f"{name} is given to the program and is not a buffer of it")
            self._available.add(name)

    def _root(self, name: str) -> str:
        b = self._p.buffers[name]
        return name if b.alias_of is None else self._root(b.alias_of)

    def _known(self, name: str) -> Buffer:
        b = self._p.buffers.get(name)
        if b is None:
            self._fail(f"{name} is not a buffer")
        return b

    def _readable(self, name: str) -> None:
        self._known(name)
        if self._root(name) not in self._available:
            self._fail(f"{name} is read before it is written")

    def _write(self, name: str, again: bool) -> None:
        b = self._known(name)
        root = self._root(name)
        if root in self._written and not again:
            self._fail(f"{name} is written twice")
        if self._p.buffers[root].kind == "constant":
            self._fail(f"{b!r} is written")
        self._written.add(root)
        self._available.add(root)

    def _view(self, v: ViewRef) -> None:
        b = self._known(v.buffer)
        if len(v.sizes) != len(v.strides):
            self._fail(f"a view of {v.buffer} has {len(v.sizes)} sizes and {len(v.strides)} strides")
        need = extent_of(Buffer("", v.dtype, v.sizes, v.strides))
        have = memory_of(self._p.buffers, v.buffer)
        if need is None or have is None or not isinstance(v.offset, int):
            return
        negative = v.offset < 0 or any(isinstance(s, int) and s < 0 for s in v.strides)
        if need and (negative or (v.offset + need) * v.dtype.itemsize > have):
            self._fail(
                f"a view of sizes {list(v.sizes)}, strides {list(v.strides)}, offset {v.offset} leaves {b!r}"
            )

    def _sizes_known(self, symbols: Iterable[Index]) -> None:
        unknown = {v.name for v in symbols} - {v.name for v in self._symbols}
        if unknown:
            self._fail(f"nothing tells the value of {sorted(unknown)}")

    def _loop_op(self, op: LoopOp) -> None:
        out = self._known(op.out)
        if self._p.symbols or self._symbols:
            self._sizes_known(v for e in (*out.sizes, *out.strides) for v in sz.symbols(e))
            for value in op_values(op):
                self._sizes_known(expr_symbols(value))
        if not isinstance(op, Scatter):
            if len(op.vars) != len(out.sizes) or any(v.kind != "var" for v in op.vars):
                self._fail(f"{list(op.vars)} are not the dimensions of {out!r}")
            for v, n in zip(op.vars, out.sizes, strict=True):
                if ix.as_index(v.extent) is not ix.as_index(n):
                    self._fail(f"{v.name} has {v.extent} values and the dimension of {op.out} has size {n}")
        inner = op.reduce_vars if isinstance(op, Reduce) else ()
        variables = (*op.vars, *inner)
        if len(set(variables)) != len(variables):
            self._fail(f"{op.out}: a loop variable is bound twice")
        unbound = frozenset().union(*(e.free_vars for e in op_values(op))).difference(variables)
        if unbound:
            self._fail(f"{op.out}: {sorted(v.name for v in unbound)} are not loop variables of it")
        empty = any(v.extent == 0 for v in variables)
        self._result(op, out)
        for value in op_values(op):
            self._body(value, empty)
        if isinstance(op, Scatter):
            self._target(op, out, empty)

    def _target(self, op: Scatter, out: Buffer, empty: bool) -> None:
        """Where a scatter writes, and what it starts from."""
        self._readable(op.base)
        base = self._known(op.base)
        if base.dtype is not out.dtype or base.sizes != out.sizes:
            self._fail(f"{out!r} starts from {base!r}")
        fault = node_fault(ex.load(op.out, op.indices, out.dtype))
        if fault is not None:
            self._fail(fault)
        if len(op.indices) != len(out.sizes):
            self._fail(f"{list(op.indices)} are {len(op.indices)} indices for {out!r}")
        for i, n in zip(op.indices, out.sizes, strict=True):
            unbound = i.free_vars.difference(op.vars)
            if unbound:
                self._fail(f"{sorted(v.name for v in unbound)} in {i!r} are not loop variables of {op.out}")
            if not empty and leaves(i, n):
                self._fail(f"index {i!r} in [{i.lo}, {i.hi}] leaves a dimension of size {n} of {op.out}")

    def _result(self, op: LoopOp, out: Buffer) -> None:
        dtype = op.body.dtype
        if not isinstance(op, (Reduce, Scan)):
            if dtype is not out.dtype:
                self._fail(f"{op.out} is {dtype_name(out.dtype)} and its body gives {dtype_name(dtype)}")
            if not isinstance(op, Scatter):
                return
            if op.kind not in SCATTERS:
                self._fail(f"unknown scatter {op.kind!r}")
            if op.kind != "set" and dtype in LOW:
                self._fail(f"{op.kind} computes in {dtype_name(dtype)}; it has to be cast to float32 first")
            return
        if op.kind not in (SCANS if isinstance(op, Scan) else REDUCTIONS):
            self._fail(f"unknown {'scan' if isinstance(op, Scan) else 'reduction'} {op.kind!r}")
        if isinstance(op, Scan) and not 0 <= op.axis < len(op.vars):
            self._fail(f"{op.out} is scanned along dimension {op.axis} of {len(op.vars)}")
        if op.kind == "logaddexp" and not dtype.is_floating_point:
            self._fail(f"{op.kind} of {dtype_name(dtype)}")
        if dtype in LOW:
            self._fail(f"{op.kind} computes in {dtype_name(dtype)}; it has to be cast to float32 first")
        if (op.kind in ("any", "all") and dtype is not torch.bool) or (
            op.kind in ("sum", "prod") and dtype is torch.bool
        ):
            self._fail(f"{op.kind} of {dtype_name(dtype)}")
        if op.kind in _ARG_KINDS and out.dtype.is_floating_point:
            self._fail(f"{op.kind} gives positions, and {op.out} is {dtype_name(out.dtype)}")

    def _body(self, body: Expr, empty: bool) -> None:
        guarded = False
        loads: list[Expr] = []
        for e in walk(body):
            if e.op == "load":
                self._load(e)
                loads.append(e)
            elif e.op == "masked":
                guarded = True
            if e in self._sound:
                continue
            fault = node_fault(e)
            if fault is None and e.op == "local":
                fault = f"a loop program has no locals: {e!r}"
            if fault is not None:
                self._fail(fault)
            self._sound.add(e)
        if empty:
            return
        for e in (n for n in unguarded(body) if n.op == "load") if guarded else loads:
            for i, n in zip(e.indices, self._p.buffers[e.buffer].sizes, strict=True):
                if not (i.kind == "var" and i.extent == n) and leaves(i, n):
                    self._fail(f"index {i!r} in [{i.lo}, {i.hi}] leaves a dimension of size {n}: {e!r}")

    def _load(self, e: Expr) -> None:
        b = self._known(e.buffer)
        if b.dtype is not e.dtype:
            self._fail(f"{e!r} as {dtype_name(e.dtype)} reads {b!r}")
        if len(e.indices) != len(b.sizes):
            self._fail(f"{e!r} has {len(e.indices)} indices for {b!r}")
        self._readable(e.buffer)


def _op_text(op: Op) -> str:
    """One operation on a line; unlike the program's dump it needs no buffer to exist."""
    if isinstance(op, Extern):
        return f"{', '.join(map(str, op.outs))} = {op.target}({', '.join(op_reads(op))})"
    if isinstance(op, Scatter):
        return f"{op.out}[{', '.join(map(repr, op.indices))}] = {body_text(op)}"
    at = ", ".join(f"{v.name}<{v.extent}" for v in op.vars)
    return f"{op.out}[{at}] = {body_text(op)}"


def _near(at: int, count: int) -> range:
    return range(max(at - 2, 0), min(at + 3, count))


# --- kernels ------------------------------------------------------------------------------------------------


def verify_kernel(k: Kernel, stage: str = "loops") -> None:
    """Raise ``VerifyError`` for the first rule of ``kernel.py`` that the kernel breaks."""
    _Kernel(k, stage).check()


class _Scope:
    """What a statement can see: variables, locals, accumulators and scratch arrays."""

    def __init__(self, outer: _Scope | None = None, loop: Loop | None = None) -> None:
        self.loops: tuple[Loop, ...] = () if outer is None else outer.loops
        if loop is not None:
            self.loops = (*self.loops, loop)
        self.vars: frozenset[Index] = frozenset(lp.var for lp in self.loops)
        self.locals: dict[str, torch.dtype] = {} if outer is None else dict(outer.locals)
        self.accumulators: dict[str, tuple[Init, int]] = {} if outer is None else dict(outer.accumulators)
        self.scratch: dict[str, Scratch] = {} if outer is None else dict(outer.scratch)

    def defines(self, name: str) -> bool:
        return name in self.locals or name in self.scratch


class _Kernel:
    def __init__(self, k: Kernel, stage: str) -> None:
        self._k = k
        self._stage = stage
        self._params = {p.name: p for p in k.params}
        self._stored: set[str] = set()

    def _fail(self, message: str) -> NoReturn:
        raise VerifyError(f"kernel {self._k.name}: {message}", stage=self._stage, node=str(self._k).rstrip())

    def check(self) -> None:
        if len(self._params) != len(self._k.params):
            self._fail("two parameters have one name")
        for p in self._k.params:
            if p.role not in ("in", "out", "inout"):
                self._fail(f"{p.name} has the unknown role {p.role!r}")
        self._body(self._k.body, _Scope())
        for p in self._k.params:
            if p.role != "in" and p.name not in self._stored:
                self._fail(f"{p.name} has the role {p.role} and is never stored to")

    def _body(self, body: Sequence[Stmt], scope: _Scope) -> None:
        for s in body:
            if isinstance(s, Loop):
                self._loop(s, scope)
            elif isinstance(s, Let):
                self._fresh(s.name, scope)
                self._value(s.value, scope)
                scope.locals[s.name] = s.value.dtype
            elif isinstance(s, Init):
                self._fresh(s.name, scope)
                if s.kind not in REDUCTIONS:
                    self._fail(f"{s.name} is of unknown reduction {s.kind!r}")
                scope.accumulators[s.name] = (s, len(scope.loops))
                scope.locals[s.name] = torch.int64 if s.kind in _ARG_KINDS else s.dtype
            elif isinstance(s, Accumulate):
                self._accumulate(s, scope)
            elif isinstance(s, Store):
                self._store(s, scope)
            elif isinstance(s, Multiply):
                self._multiply(s, scope)
            elif isinstance(s, Attend):
                self._attend(s, scope)
            else:
                self._fresh(s.name, scope)
                if isinstance(s.size, int) and s.size < 0:
                    self._fail(f"scratch {s.name} has {s.size} elements")
                scope.scratch[s.name] = s

    def _multiply(self, s: Multiply, scope: _Scope) -> None:
        self._bound(ix.as_index(s.rows), scope)
        self._bound(ix.as_index(s.depth), scope)
        dtypes = []
        for operand, index in ((s.left, s.at), (s.panel, s.start)):
            self._bound(index, scope)
            p = self._params.get(operand)
            known = PRODUCT_DTYPES if operand == s.left else PANEL_DTYPES
            if p is None or p.role != "in" or p.dtype not in known:
                self._fail(f"{operand} is multiplied and is no parameter of float numbers with the role in")
            dtypes.append(p.dtype)
        if s.method != "fma" and set(dtypes) != {torch.bfloat16}:
            self._fail(f"{s.left} and {s.panel} are not bfloat16, which {s.method} multiplies")
        if dtypes[1] not in (dtypes[0], torch.int8) or s.method not in s.METHODS:
            self._fail(f"{s.left} and {s.panel} are of different dtypes, or {s.method} is no method")
        tile = scope.scratch.get(s.tile)
        if tile is None or tile.size != s.most * s.columns or tile.dtype is not torch.float32:
            self._fail(f"{s.tile} is no float32 scratch array of {s.most} times {s.columns} elements")
        rows = ix.as_index(s.rows)
        if rows.hi is None or rows.hi > s.most:
            self._fail(f"{rows!r} rows may be more than the {s.most} of {s.tile}")
        if ix.as_index(s.depth).hi is None:
            self._fail(f"nothing bounds the {s.depth!r} terms of {s.tile}")

    def _attend(self, s: Attend, scope: _Scope) -> None:
        for index in s.indices:
            self._bound(ix.as_index(index), scope)
        for name in s.reads:
            p = self._params.get(name)
            if p is None or p.role != "in" or p.dtype is not torch.float32:
                self._fail(f"{name} takes part in attention and is no float32 parameter with the role in")
        for name, size in ((s.tile, s.most * s.columns), (s.work, s.work_size)):
            array = scope.scratch.get(name)
            if array is None or array.size != size or array.dtype is not torch.float32:
                self._fail(f"{name} is no float32 scratch array of {size} elements")
        rows = ix.as_index(s.rows)
        if rows.hi is None or rows.hi > s.most:
            self._fail(f"{rows!r} rows may be more than the {s.most} of {s.tile}")
        if any(s.BLOCK % height for height, _ in (s.scores, s.sums)):
            self._fail(f"tiles of {s.tile} do not divide {s.BLOCK} rows")

    def _fresh(self, name: str, scope: _Scope) -> None:
        if scope.defines(name) or name in self._params:
            self._fail(f"{name} is defined twice")

    def _loop(self, s: Loop, scope: _Scope) -> None:
        if s.kind not in ("serial", "parallel", "vector"):
            self._fail(f"the loop over {s.var.name} is of unknown kind {s.kind!r}")
        if s.var.kind != "var" or s.var in scope.vars or s.var.name in {v.name for v in scope.vars}:
            self._fail(f"{s.var!r} is bound by two loops around one statement")
        start, stop = ix.as_index(s.start), ix.as_index(s.stop)
        for bound in (start, stop):
            self._bound(bound, scope)
        limit = ix.as_index(s.var.extent)
        below = start.lo is not None and start.hi is not None and start.hi < 0
        above = stop.lo is not None and limit.hi is not None and stop.lo > limit.hi
        if below or above:
            self._fail(
                f"the loop over {s.var.name} runs over {start!r}..{stop!r}; the variable has {limit!r} values"
            )
        if s.kind == "vector":
            inner = list(statements(s.body))
            summed = {t.name for t in inner if isinstance(t, Accumulate)} - {
                t.name for t in inner if isinstance(t, Init)
            }
            values = [t.value for t in inner if isinstance(t, (Let, Accumulate, Store))]
            for e in values if summed else ():
                for n in walk(e):
                    if n.op == "local" and n.attr in summed:
                        self._fail(
                            f"{n.attr} is read inside the vector loop over {s.var.name} that accumulates it"
                        )
        self._body(s.body, _Scope(scope, s))

    def _accumulate(self, s: Accumulate, scope: _Scope) -> None:
        got = scope.accumulators.get(s.name)
        if got is None:
            self._fail(f"{s.name} is accumulated and not initialised")
        init, depth = got
        self._value(s.value, scope)
        if s.value.dtype is not init.dtype:
            self._fail(
                f"{s.name} is {dtype_name(init.dtype)}; accumulated {dtype_name(s.value.dtype)}: {s.value!r}"
            )
        if init.dtype in LOW:
            self._fail(f"{s.name} accumulates in {dtype_name(init.dtype)}")
        if (s.position is not None) is not (init.kind in _ARG_KINDS):
            self._fail(
                f"{s.name} is {init.kind}, which {'needs' if s.position is None else 'has no'} position"
            )
        if s.position is not None:
            self._bound(s.position, scope)
        racing = [lp.var.name for lp in scope.loops[depth:] if lp.kind == "parallel"]
        if racing:
            self._fail(f"{s.name} is accumulated by parallel iterations of {', '.join(racing)}")

    def _store(self, s: Store, scope: _Scope) -> None:
        self._bound(s.index, scope)
        self._value(s.value, scope)
        scratch, param = scope.scratch.get(s.buffer), self._params.get(s.buffer)
        target = scratch or param
        if target is None:
            self._fail(f"{s.buffer} is stored to and is neither a parameter nor scratch")
        if param is not None and scratch is None:
            if param.role == "in":
                self._fail(f"{s.buffer} has the role in and is stored to")
            self._stored.add(s.buffer)
        if s.value.dtype is not target.dtype:
            self._fail(
                f"{s.buffer} is {dtype_name(target.dtype)}; stored {dtype_name(s.value.dtype)}: {s.value!r}"
            )
        if scratch is not None and self._within(scope) and leaves(s.index, scratch.size):
            self._fail(f"{s.index!r} leaves scratch {s.buffer}[{scratch.size}]")

    def _within(self, scope: _Scope) -> bool:
        """Whether every loop around runs over its variable's whole range: index ranges are attained."""
        return all(
            isinstance(lp.start, int) and lp.start == 0 and lp.stop == lp.var.extent and lp.var.extent != 0
            for lp in scope.loops
        )

    def _bound(self, i: Index, scope: _Scope) -> None:
        unbound = (i.free_vars - scope.vars) | (frozenset(index_symbols(i)) - frozenset(self._k.sizes))
        if unbound:
            self._fail(f"{sorted(v.name for v in unbound)} in {i!r} are not bound by a loop around it")
        for atom in ix.indirect_atoms(i):
            if atom.args[2] and not self._k.checks:
                self._fail(f"{atom!r} has to be tested, and the kernel says that it has no checks")
            self._value(atom.args[0], scope)

    def _value(self, value: Expr, scope: _Scope) -> None:
        unknown = frozenset(expr_symbols(value)) - frozenset(self._k.sizes)
        if unknown:
            self._fail(f"{sorted(v.name for v in unknown)} are not sizes that the kernel is given")
        for e in walk(value):
            fault = node_fault(e)
            if fault is not None:
                self._fail(fault)
            for i in own_indices(e):
                unbound = i.free_vars - scope.vars
                if unbound:
                    self._fail(
                        f"{sorted(v.name for v in unbound)} in {e!r} are not bound by a loop around it"
                    )
                if not self._k.checks and any(a.args[2] for a in ix.indirect_atoms(i)):
                    self._fail(f"{i!r} has to be tested, and the kernel says that it has no checks")
            if e.op == "local":
                dtype = scope.locals.get(e.attr)
                if dtype is not e.dtype:
                    what = "not defined" if dtype is None else dtype_name(dtype)
                    self._fail(f"local {e.attr}, read as {dtype_name(e.dtype)}, is {what} there")
            elif e.op == "load":
                self._load(e, scope)
        for e in unguarded(value):
            scratch = scope.scratch.get(e.buffer) if e.op == "load" else None
            if scratch is not None and self._within(scope) and leaves(e.indices[0], scratch.size):
                self._fail(f"{e!r} leaves scratch of {scratch.size} elements")

    def _load(self, e: Expr, scope: _Scope) -> None:
        target = scope.scratch.get(e.buffer) or self._params.get(e.buffer)
        if target is None:
            self._fail(f"{e!r} reads neither a parameter nor scratch")
        if len(e.indices) != 1:
            self._fail(f"{e!r} has {len(e.indices)} indices; a kernel's load has one, flat")
        if target.dtype is not e.dtype:
            self._fail(f"{e!r} as {dtype_name(e.dtype)} reads {dtype_name(target.dtype)}")
        param = self._params.get(e.buffer)
        if param is not None and param.role == "out":
            self._fail(f"{e.buffer} has the role out and is read; it should be inout")


# --- schedules ----------------------------------------------------------------------------------------------


def verify_schedule(s: Schedule, stage: str = "schedule") -> None:
    """Raise ``VerifyError`` for the first rule that a step, a kernel or a placement breaks."""
    _Schedule(s, stage).check()


class _Schedule:
    def __init__(self, s: Schedule, stage: str) -> None:
        self._s = s
        self._buffers = s.program.buffers
        self._stage = stage
        #: Storage -> the steps that read it and those that write it.
        self._reads: dict[str, list[int]] = {}
        self._writes: dict[str, list[int]] = {}
        self._outputs = {o.buffer for o in s.program.outputs if isinstance(o, ViewRef)}

    def _fail(self, message: str, at: int | None = None) -> NoReturn:
        steps = [_step_text(step) for step in self._s.steps]
        near = (
            [("> " if k == at else "  ") + steps[k] for k in _near(at, len(steps))] if at is not None else []
        )
        raise VerifyError(
            f"schedule of {self._s.program.name}: {message}", stage=self._stage, node="\n".join(near) or None
        )

    def check(self) -> None:
        self._placements(sz.hint)
        sound: set[int] = set()
        bounded: set[tuple[int, tuple[int | None, ...]]] = set()
        self._available = {n for n in (*self._s.program.inputs, *self._s.program.constants) if n is not None}
        self._available |= {b.name for b in self._buffers.values() if b.packs is not None}
        for at, step in enumerate(self._s.steps):
            reads, writes = _touches(step)
            for name in (*reads, *writes):
                if name not in self._buffers:
                    self._fail(f"{name} is not a buffer", at)
            if isinstance(step, KernelCall):
                self._arguments(step, at)
                if id(step.kernel) not in sound:
                    sound.add(id(step.kernel))
                    verify_kernel(step.kernel, self._stage)
                for k, row in enumerate(step.rows):
                    limits = (*(self._limit(n) for n in row), *step.points[k : k + 1])
                    if (id(step.kernel), limits) not in bounded:
                        bounded.add((id(step.kernel), limits))
                        self._bounds(step, limits, at)
            self._order(at, reads, writes)
        for name in self._outputs:
            if not self._is_available(name):
                self._fail(f"the output {name} is never written")
        self._reuse()
        self._arena(sz.hint)
        if not isinstance(self._s.arena_bytes, int):
            self._placements(sz.least)
            self._arena(sz.least)
        self._frees()

    def _arguments(self, step: KernelCall, at: int) -> None:
        k = step.kernel
        if len(step.args) != len(k.params) * max(1, len(step.points)) or bool(step.points) != (k.parts > 0):
            self._fail(f"{k.name} takes {len(k.params)} buffers, not {len(step.args)}", at)
        if step.points:
            self._rows_apart(step, at)
        for p, name in step.bound:
            if self._buffers[name].dtype is not p.dtype:
                self._fail(f"{name} is {dtype_name(self._buffers[name].dtype)}; {k.name} takes {p}", at)
            if p.role != "in" and self._buffers[name].kind == "constant":
                self._fail(f"{k.name} writes the constant {name}", at)

    def _rows_apart(self, step: KernelCall, at: int) -> None:
        """No row of a batch writes what another one touches."""
        touched: dict[str, int] = {}
        written: dict[str, int] = {}
        for k, row in enumerate(step.rows):
            for p, name in zip(step.kernel.params, row, strict=True):
                root = self._storage(name)
                if written.get(root, k) != k or (p.role != "in" and touched.get(root, k) != k):
                    self._fail(f"{step.kernel.name}: two rows touch {root}, and one of them writes it", at)
                touched[root] = k
                if p.role != "in":
                    written[root] = k

    def _limit(self, name: str) -> int | None:
        """The elements of a buffer's memory."""
        nbytes = memory_of(self._buffers, name)
        return None if nbytes is None else nbytes // self._buffers[name].dtype.itemsize

    def _bounds(self, step: KernelCall, extents: Sequence[int | None], at: int) -> None:
        limits = {p.name: n for p, n in zip(step.kernel.params, extents, strict=False)}
        ends = dict(zip(step.kernel.sizes, (0, extents[-1] or 0), strict=True)) if step.points else {}

        def visit(body: Sequence[Stmt], ranges: Mapping[Index, IndexLike]) -> None:
            for s in body:
                if isinstance(s, Loop):
                    start, stop = (sz.plain(ix.substitute(ix.as_index(e), ends)) for e in (s.start, s.stop))
                    if isinstance(start, int) and isinstance(stop, int):
                        if start >= stop:
                            continue
                        narrow = start != 0 or stop != s.var.extent
                        own = {s.var: ix.var(s.var.name, stop - start) + start} if narrow else {}
                        visit(s.body, {**ranges, **own})
                    # Bounds that depend on outer variables: the iterations are not known to be all attained.
                    continue
                if isinstance(s, (Let, Accumulate, Store)):
                    touched = [(n.buffer, n.indices[0]) for n in unguarded(s.value) if n.op == "load"]
                    if isinstance(s, Store):
                        touched.append((s.buffer, s.index))
                    for buffer, index in touched:
                        limit = limits.get(buffer)
                        i = ix.substitute(index, ranges) if ranges else index
                        if limit is not None and leaves(i, limit):
                            where = f"{i!r} in [{i.lo}, {i.hi}]"
                            self._fail(f"{step.kernel.name}: {buffer}[{where}] leaves {limit} elements", at)

        visit(step.kernel.body, {})

    # --- order and lifetimes --------------------------------------------------------------------------------

    def _storage(self, name: str) -> str:
        """The buffer whose memory this one is an alias of, by the program or by its placement."""
        placement = self._s.placements.get(name)
        base = placement.of if placement is not None and placement.kind == "alias" else None
        base = base or self._buffers[name].alias_of
        return name if base is None else self._storage(base)

    def _is_available(self, name: str) -> bool:
        """A buffer is written, or has no elements, or the program makes it a view of one that is."""
        base = self._buffers[name].alias_of
        if name in self._available or extent_of(self._buffers[name]) == 0:
            return True
        return base is not None and self._is_available(base)

    def _order(self, at: int, reads: Iterable[str], writes: Iterable[str]) -> None:
        for name in reads:
            if not self._is_available(name):
                self._fail(f"{name} is read before it is written", at)
            self._reads.setdefault(name, []).append(at)
        for name in writes:
            self._available.add(name)
            base = self._buffers[name].alias_of
            while base is not None:
                self._available.add(base)
                base = self._buffers[base].alias_of
            self._writes.setdefault(name, []).append(at)
        for name in (*reads, *writes):
            if name not in self._s.placements and self._buffers[name].alias_of is None:
                self._fail(f"{name} is used and has no placement", at)

    def _placements(self, at: Callable[[IndexLike], int]) -> None:
        for name, q in self._s.placements.items():
            b = self._buffers.get(name)
            if b is None:
                self._fail(f"{name} has a placement and is not a buffer")
            if q.kind not in ("input", "constant", "output", "arena", "extern", "alias", "packed"):
                self._fail(f"the placement of {name} is of unknown kind {q.kind!r}")
            extent = extent_of(b, at)
            offset, nbytes = at(q.offset), at(q.nbytes)
            need = None if extent is None else extent * b.dtype.itemsize
            if q.kind == "arena" and (
                offset < 0
                or offset % b.dtype.itemsize
                or offset + max(nbytes, need or 0) > at(self._s.arena_bytes)
                or (need is not None and nbytes < need)
            ):
                self._fail(f"{name} needs {need} bytes, at {q} in an arena of {self._s.arena_bytes}")
            if q.kind == "alias" and b.alias_of is None:
                base = self._buffers.get(q.of or "")
                if base is None:
                    self._fail(f"{name} is placed as an alias of {q.of}, which is not a buffer")
                have = extent_of(base, at)
                if need is not None and have is not None and offset + need > have * base.dtype.itemsize:
                    self._fail(f"{name} needs {need} bytes at {offset} of {base!r}")

    def _last_use(self, name: str) -> int:
        if name in self._outputs:
            return len(self._s.steps)
        return max((*self._reads.get(name, ()), *self._writes.get(name, ())), default=-1)

    def _views(self) -> dict[str, list[str]]:
        """Buffer -> the buffers that the program makes views of it (not those that take over its memory)."""
        out: dict[str, list[str]] = {}
        for name, b in self._buffers.items():
            base = b.alias_of
            while base is not None:
                out.setdefault(base, []).append(name)
                base = self._buffers[base].alias_of
        return out

    def _reuse(self) -> None:
        """A buffer that takes over another's memory: the other is not needed from then on."""
        views = self._views()
        for name, q in self._s.placements.items():
            old = q.of
            if q.kind != "alias" or old is None or self._buffers[name].alias_of or name not in self._writes:
                continue
            root = self._storage(old)
            if self._buffers[root].kind in ("input", "constant"):
                self._fail(f"{name} takes over the memory of {root}, which is the caller's")
            first = self._writes[name][0]
            for other in (old, *views.get(old, ())):
                if other != name and self._last_use(other) > first:
                    self._fail(
                        f"{name} takes over the memory of {old}, which is used later as {other}", first
                    )

    def _arena(self, at: Callable[[IndexLike], int]) -> None:
        spans: dict[str, tuple[int, int]] = {}
        for name in {*self._reads, *self._writes}:
            root = self._storage(name)
            first = min((*self._reads.get(name, ()), *self._writes.get(name, ())))
            last = self._last_use(name)
            a, b = spans.get(root, (first, last))
            spans[root] = (min(a, first), max(b, last))
        for step, start, stop in self._s.releases:
            for name, q in self._s.placements.items():
                touches = q.kind == "arena" and at(q.offset) < stop and start < at(q.offset) + at(q.nbytes)
                if touches and spans.get(name, (0, -1))[1] > step:
                    self._fail(f"memory of {name} is released before its last use", step)
        active: list[tuple[int, int, int, str]] = []  # last step, offset, end, name
        placed = [(spans[n], n, q) for n, q in self._s.placements.items() if q.kind == "arena" and n in spans]
        for (first, last), name, q in sorted(placed, key=lambda t: t[0]):
            start, end_here = at(q.offset), at(q.offset) + at(q.nbytes)
            active = [t for t in active if t[0] >= first]
            for ends, offset, end, other in active:
                if start < end and offset < end_here:
                    if ends == first and offset == start and self._in_place(first, name, other):
                        continue
                    self._fail(f"{name} and {other} are alive at one time and overlap in the arena", first)
            active.append((last, start, end_here, name))

    def _in_place(self, at: int, new: str, old: str) -> bool:
        """Whether a step says that it writes one buffer over another: neither parameter is ``restrict``, and
        no statement reads the old one after the new one is written."""
        step = self._s.steps[at]
        if not isinstance(step, KernelCall):
            return False
        roles = {n: q for q, n in zip(step.kernel.params, step.args, strict=True) if not q.restrict}
        if not (new in roles and old in roles and roles[old].role == "in" and roles[new].role == "out"):
            return False
        written = False
        for s in statements(step.kernel.body):
            if written and roles[old].name in _loaded(s):
                return False
            written = written or (isinstance(s, Store) and s.buffer == roles[new].name)
        return True

    def _frees(self) -> None:
        frees = self._s.frees
        if frees and len(frees) != len(self._s.steps):
            self._fail(f"{len(frees)} lists of buffers to free for {len(self._s.steps)} steps")
        last: dict[str, int] = {}
        for name in {*self._reads, *self._writes, *self._outputs}:
            root = self._storage(name)
            last[root] = max(last.get(root, -1), self._last_use(name))
        freed: set[str] = set()
        for at, names in enumerate(frees):
            for name in names:
                if name not in self._buffers:
                    self._fail(f"{name} is freed and is not a buffer", at)
                root = self._storage(name)
                if root in freed:
                    self._fail(f"{name} is freed twice", at)
                freed.add(root)
                if last.get(root, -1) > at:
                    self._fail(f"{name} is freed before its last use", at)


def _loaded(s: Stmt) -> set[str]:
    """The parameters that one statement reads, by itself."""
    if isinstance(s, (Multiply, Attend)):
        return set(s.reads)
    values = [s.value] if isinstance(s, (Let, Accumulate, Store)) else []
    if isinstance(s, Store):
        values += [atom.args[0] for atom in ix.indirect_atoms(s.index)]
    return {n.buffer for e in values for n in walk(e) if n.op == "load"}


def _touches(step: KernelCall | Extern) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The buffers a step reads that somebody else has to write first, and those it writes.

    What a kernel reads of its own ``inout`` parameter it has stored itself, in an earlier pass over the
    same row.
    """
    if isinstance(step, Extern):
        return op_reads(step), op_outputs(step)
    pairs = list(zip(step.kernel.params * len(step.rows), step.args, strict=False))
    return (
        tuple(n for p, n in pairs if p.role == "in"),
        tuple(n for p, n in pairs if p.role != "in"),
    )


def _step_text(step: KernelCall | Extern) -> str:
    if isinstance(step, KernelCall):
        return f"{step.kernel.name}({', '.join(step.args)})"
    return f"{', '.join(map(str, step.outs))} = {step.target}"
