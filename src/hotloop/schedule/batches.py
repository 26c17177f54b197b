"""Batches: kernels that differ in nothing but their buffers and their number of points become one call.

What comes in: the steps in execution order. What goes out: the same with equal elementwise kernels together,
each such batch in the place of its last member. What holds in between: no step moves past another that writes
what it touches, or touches what it writes; only steps whose buffers exist for the whole call anyway move, so
that no buffer lives any longer.

An optimizer runs one loop over each of hundreds of parameters, most of them a few hundred numbers long: one
function goes through all of them, their points divided evenly over threads, for the price of one call.

The next file is ``memory.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hotloop.ir import index as ix
from hotloop.ir import sizes as sz
from hotloop.ir.kernel import Kernel, KernelCall, Loop, Param, Scratch, Stmt
from hotloop.ir.loops import Buffer, Extern

from .dependences import base_of
from .loops import Machine, substitute_statements
from .memory import touched

__all__ = ["batch"]

#: So many equal kernels are worth a table.
LEAST_ROWS = 4
#: Temporaries of so many bytes may live longer: the numbers that go with a parameter.
FEW_BYTES = 64
_POINT, _START, _STOP = "i0", "start", "stop"
#: The variable of all members while they are compared: more points than any of them has.
_ANY = ix.var(_POINT, 1 << 40)

Step = KernelCall | Extern


@dataclass(frozen=True)
class _Row:
    """A kernel as a row of a batch: its body at one point, and how many points it has."""

    call: KernelCall
    params: tuple[Param, ...]
    body: tuple[Stmt, ...]
    points: int


class _Waiting:
    """Rows of open batches, and behind them the steps that have to come after one of them, in order."""

    def __init__(self) -> None:
        self.rows: dict[object, list[_Row]] = {}
        self.behind: list[Step] = []
        self.read: set[str] = set()
        self.written: set[str] = set()

    def meets(self, reads: set[str], writes: set[str]) -> bool:
        """Whether a step that reads and writes these storages has to come after something here."""
        return not (self.written.isdisjoint(reads | writes) and self.read.isdisjoint(writes))

    def add(self, step: Step | _Row, reads: set[str], writes: set[str]) -> None:
        if isinstance(step, _Row):
            self.rows.setdefault((step.params, step.body), []).append(step)
        else:
            self.behind.append(step)
        self.read |= reads
        self.written |= writes

    def calls(self, machine: Machine) -> list[Step]:
        """The calls of the batches; nothing depends on their order."""
        out: list[Step] = []
        for rows in self.rows.values():
            out += [_together(rows, machine)] if len(rows) >= LEAST_ROWS else [r.call for r in rows]
        return out


def batch(steps: Sequence[Step], buffers: Mapping[str, Buffer], machine: Machine) -> list[Step]:
    """The steps with equal elementwise kernels together."""
    out: list[Step] = []
    todo = deque(steps)
    waiting = _Waiting()
    while todo or waiting.rows:
        if todo:
            step = todo.popleft()
            reads, writes = ({base_of(buffers, n) for n in names} for names in touched(step))
            movable = isinstance(step, KernelCall) and _may_move(step, buffers)
            row = _row(step) if isinstance(step, KernelCall) and movable else None
            if waiting.meets(reads, writes):
                if movable:
                    waiting.add(step, reads, writes)
                    continue
                waiting.behind.append(step)
            elif row is not None:
                waiting.add(row, reads, writes)
                continue
            else:
                out.append(step)
                continue
        out += waiting.calls(machine)
        todo.extendleft(reversed(waiting.behind))
        waiting = _Waiting()
    return out


def _may_move(call: KernelCall, buffers: Mapping[str, Buffer]) -> bool:
    """Whether the buffers of a kernel exist for the whole call, or are too small to matter."""
    for name in call.args:
        b = buffers[base_of(buffers, name)]
        if b.kind == "temp" and not (isinstance(b.nbytes, int) and b.nbytes <= FEW_BYTES):
            return False
    return True


def _row(call: KernelCall) -> _Row | None:
    """The kernel as a row, if it is one vector loop."""
    k = call.kernel
    if k.checks or k.sizes or k.threshold is not None or not k.single_pass:
        return None
    loop = _only(k.body)
    if loop is not None and loop.kind == "parallel":  # blocks for threads
        loop = _only(loop.body)
    if loop is None or loop.kind != "vector" or any(isinstance(s, (Loop, Scratch)) for s in loop.body):
        return None
    points = loop.var.extent
    whole = isinstance(points, int) and k.body[0] is loop and (loop.start, loop.stop) == (0, points)
    if not whole and not _covers(k.body[0], loop):
        return None
    assert isinstance(points, int)
    return _Row(call, k.params, substitute_statements(loop.body, {loop.var: _ANY}), points)


def _only(body: tuple[Stmt, ...]) -> Loop | None:
    return body[0] if len(body) == 1 and isinstance(body[0], Loop) else None


def _covers(blocks: Stmt, loop: Loop) -> bool:
    """Whether the blocks of a loop over ``blocks`` are all points of the loop inside."""
    points = loop.var.extent
    if not isinstance(blocks, Loop) or not isinstance(points, int) or blocks.start != 0:
        return False
    count = sz.plain(ix.as_index(blocks.stop))
    size = ix.coefficient(ix.as_index(loop.start), blocks.var)
    if not isinstance(count, int) or not isinstance(size, int) or count * size < points:
        return False
    end = ix.minimum(blocks.var * size + size, points)
    return loop.start == blocks.var * size and loop.stop in (end, blocks.var * size + size)


def _together(rows: Sequence[_Row], machine: Machine) -> KernelCall:
    """One call for all rows."""
    first = rows[0].call.kernel
    most = max(r.points for r in rows)
    point, start, stop = ix.var(_POINT, most), ix.symbol(_START, 0, most), ix.symbol(_STOP, 0, most)
    body = substitute_statements(rows[0].body, {_ANY: point})
    moved = sum(r.call.kernel.bytes for r in rows)
    work = sum(r.call.kernel.work for r in rows)
    parallel = machine.threads > 1 and max(moved, work) >= machine.parallel_threshold
    kernel: Kernel = replace(
        first,
        body=(Loop(point, start, stop, "vector", body),),
        parallel=parallel,
        bytes=moved,
        work=work,
        sizes=(start, stop),
        parts=4 * machine.threads if parallel else 1,
        origins=tuple(dict.fromkeys(o for r in rows for o in r.call.kernel.origins)),
    )
    return KernelCall(kernel, tuple(n for r in rows for n in r.call.args), tuple(r.points for r in rows))
