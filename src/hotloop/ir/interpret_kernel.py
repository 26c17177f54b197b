"""The meaning of kernels and schedules in plain torch.

What comes in: a kernel with its parameters' memory, or a schedule with the graph's inputs. What goes out:
memory written, or the graph's outputs. What holds in between:

* Each loop around a statement is a dimension of every tensor evaluated there, numbered by depth, and a
  statement runs for all its iterations at once. This equals running them in order, since parallel and
  vector iterations are independent; a serial loop that carries a value from one iteration to the next is
  run one iteration at a time.
* That parallel and vector iterations *are* independent is checked: a race raises ``RaceError``. In-place
  reuse and overlapping places in an arena are seen by this too, because the check looks at addresses, not
  at names.

The next file is ``verify.py``, which finds what is wrong without running anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import index as ix
from .evaluate import Bound, Evaluator, gather
from .expr import Expr, walk
from .index import Index, IndexLike
from .interpret import (
    CHUNK,
    Memory,
    Number,
    combine,
    first_extreme,
    neutral,
    outputs,
    poison,
    prepare,
    reduce_last,
    run_extern,
)
from .kernel import (
    Accumulate,
    Attend,
    Init,
    Kernel,
    KernelCall,
    Let,
    Loop,
    Multiply,
    Rows,
    Schedule,
    Scratch,
    Stmt,
    Store,
    statements,
)
from .panels import panel_group
from .sizes import MOST

__all__ = ["RaceError", "run_kernel", "run_schedule"]


class RaceError(RuntimeError):
    """Two iterations said to be independent touch the same element, and one of them writes it."""


#: The position of an arg accumulator that has seen nothing.
_NEVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class _Frame:
    """One loop being run: which values its variable has now, and their number from 0."""

    loop: Loop
    number: Tensor
    values: Tensor


@dataclass
class _Accumulator:
    kind: str
    dtype: torch.dtype
    depth: int
    value: Tensor  # of a sum of floats in float64, so that it does not hang on the order of the terms
    position: Tensor


@dataclass(frozen=True)
class _Access:
    """What one statement touched: byte positions, for all its iterations (-1 where masked off)."""

    frames: tuple[_Frame, ...]
    write: bool
    text: str
    position: Tensor


def run_kernel(
    k: Kernel, buffers: Mapping[str, Tensor], scalar: bool = False, symbols: Mapping[Index, int] | None = None
) -> None:
    """Run a kernel on its parameters' memory: one flat 1-D tensor a parameter, written in place; ``symbols``
    are the values of its sizes.

    ``scalar`` runs every loop one iteration at a time, in order: slow, and the plainest meaning of a kernel.
    Raises ``IndexError`` for a position outside a parameter, ``RaceError`` for dependent parallel iterations.
    """
    for p in k.params:
        t = buffers[p.name]
        if t.dtype is not p.dtype or t.dim() != 1 or (t.numel() > 1 and t.stride(0) != 1):
            raise TypeError(f"parameter {p.name} of {k.name} is {p.dtype}; given {t.dtype} {list(t.shape)}")
    run = _KernelRun(k, buffers, scalar, {v: (symbols or {})[v] for v in k.sizes})
    run.body(k.body)
    run.check_races()


class _KernelRun:
    """The state of one run: variables, locals, accumulators and scratch arrays by name."""

    def __init__(
        self, k: Kernel, buffers: Mapping[str, Tensor], scalar: bool, symbols: Mapping[Index, int]
    ) -> None:
        self._kernel = k
        self._buffers = buffers
        self._scalar = scalar
        self._rank = _depth(k.body)
        self._group = _overlapping({p.name: buffers[p.name] for p in k.params})
        self._frames: list[_Frame] = []
        self._symbols = symbols
        self._env: dict[Index, Bound] = dict(symbols)
        self._guard: Tensor | None = None
        self._locals: dict[str, Tensor] = {}
        self._accumulators: dict[str, _Accumulator] = {}
        self._scratch: dict[str, tuple[Scratch, int, Tensor]] = {}
        written = {s.buffer for s in statements(k.body) if isinstance(s, Store) and s.buffer in buffers}
        self._watched = {self._group[name] for name in written}
        self._accesses: dict[int, list[_Access]] = {g: [] for g in self._watched}

    # --- statements -----------------------------------------------------------------------------------------

    def body(self, body: Sequence[Stmt]) -> None:
        for s in body:
            if isinstance(s, Loop):
                self._loop(s)
            elif isinstance(s, Let):
                self._locals[s.name] = self._value(s.value)
            elif isinstance(s, Init):
                self._init(s)
            elif isinstance(s, Accumulate):
                self._accumulate(s)
            elif isinstance(s, Store):
                self._store(s)
            elif isinstance(s, Multiply):
                self._multiply(s)
            elif isinstance(s, Attend):
                self._attend(s)
            else:
                lead = [f.number.numel() for f in self._frames]
                count = self._number(s.size)
                for n in lead:
                    count *= n
                memory = torch.empty(count, dtype=s.dtype)
                poison(memory)
                self._scratch[s.name] = (s, len(self._frames), memory)

    def _number(self, e: IndexLike) -> int:
        return int(ix.evaluate(e, self._symbols))

    def _evaluator(self) -> Evaluator:
        return Evaluator(self._env, self._read, self._locals, self._guard)

    def _value(self, e: Expr) -> Tensor:
        return self._evaluator().value(e)

    def _index(self, e: IndexLike) -> Tensor:
        return self._evaluator().index(e)

    def _loop(self, s: Loop) -> None:
        start, stop = self._index(s.start), self._index(s.stop)
        span = stop - start
        count = int(span.max()) if span.numel() else 0
        ragged = bool((span != count).any())
        step = 1 if self._scalar or self._carries(s) else self._piece(s, count)
        outer_guard, depth = self._guard, len(self._frames)
        for first in range(0, count, step):
            number = torch.arange(min(step, count - first)).reshape([-1] + [1] * (self._rank - depth - 1))
            values = start + (number + first)
            self._frames.append(_Frame(s, number, values))
            self._env[s.var] = values
            if ragged:
                inside = values < stop
                self._guard = inside if outer_guard is None else inside & outer_guard
            self.body(s.body)
            self._guard = outer_guard
            self._frames.pop()
            del self._env[s.var]

    def _piece(self, s: Loop, count: int) -> int:
        """How many iterations to run at once, so that no tensor becomes very large."""
        outer = 1
        for f in self._frames:
            outer *= f.number.numel()
        return max(1, min(count, CHUNK * max(count, 1) // max(outer * count * _points(s.body), 1)))

    def _carries(self, s: Loop) -> bool:
        """Whether an iteration of a serial loop may see what an earlier one did, other than by summing."""
        if s.kind != "serial":
            return False
        inner = list(statements(s.body))
        own = {t.name for t in inner if isinstance(t, (Scratch, Init))}
        read = [n for t in inner if isinstance(t, (Let, Accumulate, Store)) for n in walk(t.value)]
        accumulated = {t.name for t in inner if isinstance(t, Accumulate)} - own
        if any(n.op == "local" and n.attr in accumulated for n in read):
            return True
        stores = [t for t in inner if isinstance(t, Store) and t.buffer not in own]
        for place in {self._place(t.buffer) for t in stores}:
            where = {n.indices[0] for n in read if n.op == "load" and self._place(n.buffer) == place}
            where |= {t.index for t in stores if self._place(t.buffer) == place}
            if len(where) > 1 or any(s.var not in i.free_vars for i in where):
                return True
            if any(True for i in where for _ in ix.indirect_atoms(i)):  # two iterations may have one position
                return True
        return False

    def _place(self, buffer: str) -> int | str:
        return self._group.get(buffer, buffer)

    def _init(self, s: Init) -> None:
        wide = torch.float64 if s.kind == "sum" and s.dtype.is_floating_point else s.dtype
        start = neutral(s.kind, wide)
        acc = _Accumulator(s.kind, s.dtype, len(self._frames), start, torch.tensor(_NEVER))
        self._accumulators[s.name] = acc
        self._publish(s.name, acc)

    def _publish(self, name: str, acc: _Accumulator) -> None:
        if acc.kind in ("argmax", "argmin"):
            self._locals[name] = torch.where(acc.position == _NEVER, 0, acc.position)
        else:
            self._locals[name] = acc.value.to(acc.dtype)

    def _accumulate(self, s: Accumulate) -> None:
        acc = self._accumulators[s.name]
        value = self._value(s.value)
        if value.dtype is not acc.dtype:
            raise TypeError(f"{s.name} accumulates {acc.dtype}, given {value.dtype}: {s.value!r}")
        if s.position is None:
            if self._guard is not None:
                value = torch.where(self._guard, value, neutral(acc.kind, value.dtype))
            inner = self._inner(value.to(acc.value.dtype), acc.depth)
            got = self._merge(reduce_last(acc.kind, inner))
            acc.value = combine(acc.kind, acc.value, got)
        else:
            self._accumulate_position(acc, value, self._index(s.position))
        self._publish(s.name, acc)

    def _accumulate_position(self, acc: _Accumulator, value: Tensor, position: Tensor) -> None:
        if self._guard is not None:
            value = torch.where(self._guard, value, neutral(acc.kind, value.dtype))
            position = torch.where(self._guard, position, _NEVER)
        inner, at = self._inner(value, acc.depth), self._inner(position, acc.depth)
        value, position = (self._merge(t) for t in first_extreme(acc.kind, inner, at))
        # An accumulator at its neutral element is at _NEVER: any candidate of that value takes over.
        old_value, old = acc.value, acc.position
        nan, old_nan = value != value, old_value != old_value
        ahead = value > old_value if acc.kind == "argmax" else value < old_value
        same = (value == old_value) | (nan & old_nan)
        take = (ahead | (nan & ~old_nan)) & ~(old_nan & ~nan) | (same & (position < old))
        acc.value = torch.where(take, value, old_value)
        acc.position = torch.where(take, position, old)

    def _inner(self, t: Tensor, depth: int) -> Tensor:
        """The dimensions of loops deeper than ``depth`` expanded and made one, the last."""
        shape = [1] * (self._rank - t.dim()) + list(t.shape)
        count = 1
        for d in range(depth, len(self._frames)):
            shape[d] = self._frames[d].number.numel()
            count *= shape[d]
        return t.expand(shape).reshape([*shape[:depth], count])

    def _merge(self, t: Tensor) -> Tensor:
        return t.reshape([*t.shape, *[1] * (self._rank - t.dim())])

    # --- memory ---------------------------------------------------------------------------------------------

    def _address(
        self, buffer: str, index: Tensor, guard: Tensor | None, what: object
    ) -> tuple[Tensor, Tensor]:
        """The memory of a parameter or scratch array, and the position in it for every iteration."""
        if buffer not in self._scratch:
            return self._buffers[buffer], index
        scratch, depth, memory = self._scratch[buffer]
        size = self._number(scratch.size)
        bad = (index < 0) | (index >= size)
        if bool((bad if guard is None else bad & guard).any()):
            raise IndexError(f"position outside scratch {buffer}[{size}], in {what!r}")
        lead = torch.zeros((), dtype=torch.int64)
        for f in self._frames[:depth]:
            lead = lead * f.number.numel() + f.number
        return memory, lead * size + index

    def _read(self, e: Expr, indices: Sequence[Tensor], guard: Tensor | None) -> Tensor:
        if len(indices) != 1:
            raise TypeError(f"a kernel's load has one flat index: {e!r}")
        memory, position = self._address(e.buffer, indices[0], guard, e)
        if memory.dtype is not e.dtype:
            raise TypeError(f"{e!r} as {e.dtype} reads {memory.dtype}")
        got = gather(memory, position, guard, e)
        self._watch(e.buffer, position, guard, False, repr(e))
        return got

    def _store(self, s: Store) -> None:
        value = self._value(s.value)
        guard = self._guard
        memory, position = self._address(s.buffer, self._index(s.index), guard, s)
        if memory.dtype is not value.dtype:
            raise TypeError(f"{s.buffer} is {memory.dtype}; stored {value.dtype}: {s.value!r}")
        gather(memory, position, guard, s)  # the same test of bounds as a load
        self._watch(s.buffer, position, guard, True, f"{s.buffer}[{s.index!r}]")
        mask = torch.ones((), dtype=torch.bool) if guard is None else guard
        shapes = (position.shape, value.shape, mask.shape)
        shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        mask = mask.expand(shape)
        memory[position.expand(shape)[mask]] = value.expand(shape)[mask]

    def _multiply(self, s: Multiply) -> None:
        """All blocks of all iterations at once: a batch of matrix products."""
        most = ix.as_index(s.depth).hi
        assert most is not None
        r, k, c = (torch.arange(n) for n in (s.most, most, s.columns))
        lead = self._lead()
        at, start, rows, depth = (
            self._index(ix.as_index(i)).expand(lead).flatten() for i in (s.at, s.start, s.rows, s.depth)
        )
        if self._guard is not None:
            rows = torch.where(self._guard.expand(lead).flatten(), rows, 0)
        group = panel_group(self._buffers[s.panel].dtype)
        inside = s.columns * (k - k % group)[:, None] + group * c + (k % group)[:, None]
        live, summed = r < rows[:, None], k < depth[:, None]
        left = at[:, None, None] + s.stride * r[:, None] + k
        panel = start[:, None, None] + inside
        x = gather(self._buffers[s.left], left, live[:, :, None] & summed[:, None], s).float()
        y = gather(self._buffers[s.panel], panel, ((rows > 0)[:, None] & summed)[:, :, None], s).float()
        x, y = x.where(summed[:, None], 0), y.where(summed[:, :, None], 0)
        product = torch.zeros(len(at), s.most, s.columns)
        for first in range(0, most, s.BLOCK):
            block = slice(first, first + s.BLOCK)
            product += x[:, :, block] @ y[:, block]
        _, around, memory = self._scratch[s.tile]
        assert around == len(self._frames)
        tiles = memory.view(len(at), s.most, s.columns)
        tiles[live] = product[live]

    def _attend(self, s: Attend) -> None:
        """All blocks of all iterations at once: a batch of attentions."""
        lead = self._lead()
        rows, first = (self._index(ix.as_index(i)).expand(lead).flatten() for i in (s.rows, s.first))
        if self._guard is not None:
            rows = torch.where(self._guard.expand(lead).flatten(), rows, 0)
        r, k = torch.arange(s.most), torch.arange(s.keys)
        live = (r < rows[:, None])[:, :, None]
        every = (rows > 0)[:, None, None]

        def read(x: Rows, number: Tensor, width: int, guard: Tensor) -> Tensor:
            at = self._index(x.at).expand(lead).flatten()[:, None, None]
            position = at + x.stride * number[:, None] + torch.arange(width)
            return gather(self._buffers[x.buffer], position, guard.expand(position.shape), s)

        scores = read(s.query, r, s.depth, live) @ read(s.key, k, s.depth, every).mT * s.scale
        if s.mask is not None:
            scores = scores + read(s.mask, r, s.keys, live)
        if s.causal:
            scores = scores.where(k <= (first[:, None] + r)[:, :, None], -torch.inf)
        seen = (scores != -torch.inf).any(2, keepdim=True)
        weights = torch.softmax(scores, 2).where(seen, 0)
        out = weights @ read(s.value, k, s.columns, every)
        _, around, memory = self._scratch[s.tile]
        assert around == len(self._frames)
        tiles = memory.view(len(rows), s.most, s.columns)
        tiles[live[:, :, 0]] = out[live[:, :, 0]]

    def _lead(self) -> list[int]:
        """How many iterations of each loop around are run at once."""
        return [f.number.numel() for f in self._frames] + [1] * (self._rank - len(self._frames))

    # --- races ----------------------------------------------------------------------------------------------

    def _watch(self, buffer: str, position: Tensor, guard: Tensor | None, write: bool, text: str) -> None:
        group = self._group.get(buffer)
        if self._scalar or group is None or group not in self._watched or not self._frames:
            return
        t = self._buffers[buffer]
        where = position * t.dtype.itemsize + t.data_ptr()
        if guard is not None:
            where = torch.where(guard, where, -1)
        shape = [f.number.numel() for f in self._frames] + [1] * (self._rank - len(self._frames))
        # A guard of masked may be as large as the iteration space, never larger.
        self._accesses[group].append(_Access(tuple(self._frames), write, text, where.expand(shape)))

    def check_races(self) -> None:
        """Raise where iterations of a parallel or vector loop are not independent after all."""
        for group, accesses in self._accesses.items():
            members = [
                self._buffers[n] for n, g in self._group.items() if g == group and self._buffers[n].numel()
            ]
            if not members:
                continue
            base = min(t.data_ptr() for t in members)
            end = max(t.data_ptr() + t.numel() * t.dtype.itemsize for t in members)
            owner = torch.empty(end - base, dtype=torch.int64)
            # What one statement touches in the iterations of a serial loop, run one by one, is one.
            statements: dict[tuple[object, ...], list[_Access]] = {}
            for a in accesses:
                key = (a.write, a.text, *(id(f.loop) for f in a.frames))
                statements.setdefault(key, []).append(a)
            groups = list(statements.values())
            for k, w in enumerate(groups):
                for j, other in enumerate(groups):
                    if w[0].write and (not other[0].write or k <= j):
                        self._check_pair(w, other, base, owner)

    def _check_pair(self, writes: list[_Access], others: list[_Access], base: int, owner: Tensor) -> None:
        w, a = writes[0], others[0]
        shared = 0
        for f, g in zip(w.frames, a.frames, strict=False):
            if f.loop is not g.loop:
                break
            shared += 1
        free = [d for d in range(shared) if w.frames[d].loop.kind != "serial"]
        if not free:
            return
        position, number = _all_iterations(writes, free)
        owner.fill_(-1)
        owner[position - base] = number
        position, number = _all_iterations(others, free)
        found = owner[position - base]
        if bool(((found != -1) & (found != number)).any()):
            what = f"{w.text} is written, and {a.text} {'written' if a.write else 'read'}"
            loops = ", ".join(w.frames[d].loop.var.name for d in free)
            raise RaceError(f"{self._kernel.name}: {what}, by different iterations of {loops}")


def _all_iterations(accesses: Sequence[_Access], dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """``_iterations`` of several accesses."""
    found = [_iterations(a, dims) for a in accesses]
    return torch.cat([p for p, _ in found]), torch.cat([n for _, n in found])


def _iterations(a: _Access, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The positions touched, and for each the number of the iteration of these loops that touched it."""
    number = torch.zeros((), dtype=torch.int64)
    for d in dims:
        values = a.frames[d].values
        span = a.frames[d].loop.var.hi
        if span is None or span >= MOST:  # the bound of a product of sizes is no number to count by
            span = int(values.max())
        number = number * (span + 2) + values
    live = a.position >= 0
    return a.position[live], number.expand(a.position.shape)[live]


def _overlapping(buffers: Mapping[str, Tensor]) -> dict[str, int]:
    """Buffers grouped by whether their memory overlaps."""
    group: dict[str, int] = {}
    end = -1
    number = -1
    for name, t in sorted(buffers.items(), key=lambda item: item[1].data_ptr()):
        if t.data_ptr() >= end:
            number += 1
        end = max(end, t.data_ptr() + max(t.numel(), 1) * t.dtype.itemsize)
        group[name] = number
    return group


def _depth(body: Sequence[Stmt]) -> int:
    return max((1 + _depth(s.body) for s in body if isinstance(s, Loop)), default=0)


def _points(body: Sequence[Stmt]) -> int:
    """A bound on the iterations of the loops below, by the ranges of their variables."""
    return max((_extent(s) * _points(s.body) for s in body if isinstance(s, Loop)), default=1)


def _extent(s: Loop) -> int:
    start, stop = ix.as_index(s.start), ix.as_index(s.stop)
    span = stop - start
    return 1 if span.hi is None else max(span.hi, 1)


# --- schedules ----------------------------------------------------------------------------------------------


def run_schedule(
    s: Schedule, inputs: Sequence[Tensor | Number], arena: bool = False, scalar: bool = False
) -> list[Tensor | Number | None]:
    """Run every step in order and give the graph's outputs.

    Buffers placed as an alias share memory with what they alias. With ``arena``, arena buffers lie at their
    offsets in one piece of memory, so that lifetimes that overlap show as wrong results; without, each has
    its own.
    """
    p = s.program
    memory = prepare(p, inputs)
    if arena:
        space = torch.full((memory.size(s.arena_bytes),), 0xFF, dtype=torch.uint8)
        memory.bind(_ARENA, space)
    for name, placement in s.placements.items():
        if not placement.late:
            _place(name, s, memory, arena)
    frees = s.frees or ((),) * len(s.steps)
    for at, (step, dead) in enumerate(zip(s.steps, frees, strict=True)):
        if isinstance(step, KernelCall):
            for name in step.args:
                _place(name, s, memory, arena)
            for k, row in enumerate(step.rows):
                flat = {q.name: memory.flat(name) for q, name in zip(step.kernel.params, row, strict=True)}
                own = dict(zip(step.kernel.sizes, (0, step.points[k]), strict=True)) if step.points else {}
                run_kernel(step.kernel, flat, scalar, {**memory.symbols, **own})
        else:
            run_extern(step, memory, p.buffers)
        for name in dead:
            poison(memory[name])
        for _, start, stop in (r for r in s.releases if arena and r[0] == at):
            space[start:stop] = 0xFF
    return outputs(p, memory)


_ARENA = "<arena>"


def _place(name: str, s: Schedule, memory: Memory, arena: bool) -> None:
    """Give a buffer its memory, and what it is an alias of first."""
    if name in memory:
        return
    b = s.program.buffers[name]
    placement = s.placements.get(name)
    base, offset = b.alias_of, None
    if base is not None:
        pass  # the program makes it a view, whatever its placement
    elif placement is not None and placement.kind == "alias":
        if placement.of is None:
            raise ValueError(f"the placement of {name} is an alias of nothing")
        base, offset = placement.of, placement.offset
    elif placement is not None and placement.kind == "arena" and arena:
        base, offset = _ARENA, placement.offset
    if base is not None and base not in memory:
        _place(base, s, memory, arena)
    if base is None or offset is None:
        memory.allocate(b)
        return
    offset = memory.size(offset)
    if offset % b.dtype.itemsize:
        raise ValueError(f"{name} is placed at byte {offset}, which {b.dtype} cannot address")
    view = memory.view(
        base, memory.sizes(b.sizes), memory.sizes(b.strides), offset // b.dtype.itemsize, b.dtype
    )
    memory.bind(name, view)
