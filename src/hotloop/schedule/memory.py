"""Where every buffer lives: lifetimes, work in place, and offsets in one arena.

What comes in: the steps in execution order. What goes out: a ``Placement`` for each buffer, the arena's size,
and what each step frees. What holds in between: two buffers that are alive at the same time never overlap; a
kernel writes in place only where each element is read at the very point that writes it. Offsets are numbers,
or sums of sizes that vary. The next file is ``schedule.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hotloop.compat import returns_alias
from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir import sizes as sz
from hotloop.ir.index import Index, IndexLike
from hotloop.ir.kernel import KernelCall, Loop, Placement, Schedule, Store, expressions, statements
from hotloop.ir.loops import Extern, LoopProgram, ViewRef, op_outputs, op_reads

from .dependences import base_of

__all__ = ["ALIGNMENT", "plan", "touched"]

#: Offsets in the arena are multiples of a cache line, which is also the widest vector.
ALIGNMENT = 64

#: Fewer bytes are not worth a call to give them back.
RELEASED = 1 << 16

#: Calls through PyTorch whose ``out=`` form writes into memory of our choice without a copy.
WRITES_INTO_OUT = frozenset(
    {"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"}
)


@dataclass
class _Life:
    first: int
    last: int


Step = "KernelCall | Extern"


def touched(step: KernelCall | Extern) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(buffers read, buffers written) by a step."""
    if isinstance(step, Extern):
        return op_reads(step), op_outputs(step)
    return (
        tuple(a for p, a in step.bound if p.role != "out"),
        tuple(a for p, a in step.bound if p.role != "in"),
    )


def plan(p: LoopProgram, steps: Sequence[KernelCall | Extern], reuse: bool, keep: bool) -> Schedule:
    """The schedule of ``steps``, some of them now in place.

    ``keep``: the arena is kept for the next call, so that nothing of it need be released before the end.
    """
    lives = _lifetimes(p, steps)
    outputs = {name for name, life in lives.items() if life.last == len(steps)}
    late = _late(p)
    kinds = _kinds(p, steps, outputs, late)
    shared: dict[str, str] = {}
    new_steps = list(steps)
    if reuse:
        for i, step in enumerate(steps):
            if isinstance(step, KernelCall):
                new_steps[i] = _in_place(p, step, i, lives, kinds, shared)
    arena = [b for b, kind in kinds.items() if kind == "arena" and b not in shared]
    offsets, total = _pack(p, arena, lives)
    placements: dict[str, Placement] = {}
    for name, b in p.buffers.items():
        base = base_of(p.buffers, name)
        if base != name:
            placements[name] = Placement("alias", of=base)
            continue
        kind = kinds.get(name)
        if kind == "arena":
            placements[name] = Placement("arena", offsets[_owner(shared, name)], b.nbytes)
        elif kind is not None:
            own = name in late and kind in ("extern", "output")
            placements[name] = Placement(kind, nbytes=b.nbytes, late=own)
    frees = _frees(p, new_steps, lives, kinds)
    releases = () if keep else _releases(p, offsets, lives, len(steps))
    return Schedule(p, tuple(new_steps), placements, total, frees, releases)


def _owner(shared: Mapping[str, str], name: str) -> str:
    while name in shared:
        name = shared[name]
    return name


def _lifetimes(p: LoopProgram, steps: Sequence[KernelCall | Extern]) -> dict[str, _Life]:
    lives: dict[str, _Life] = {}
    for i, step in enumerate(steps):
        for names in touched(step):
            for name in names:
                life = lives.setdefault(base_of(p.buffers, name), _Life(i, i))
                life.last = i
    for o in p.outputs:
        if isinstance(o, ViewRef):
            lives.setdefault(base_of(p.buffers, o.buffer), _Life(0, 0)).last = len(steps)
    for step in reversed(steps):
        if isinstance(step, Extern) and returns_alias(step.target):
            # Its result shows memory of the arguments, as a conjugate does, for as long as it lives.
            shown, results = (lives[base_of(p.buffers, n)] for n in op_reads(step)), op_outputs(step)
            last = max((lives[base_of(p.buffers, n)].last for n in results), default=0)
            for life in shown:
                life.last = max(life.last, last)
    return lives


def _late(p: LoopProgram) -> set[str]:
    """The buffers whose size an extern call tells."""
    told = {s for op in p.ops if isinstance(op, Extern) for s, _, _ in op.binds}
    if not told:
        return set()
    return {
        n
        for n, b in p.buffers.items()
        if any(v in told for e in (*b.sizes, *b.strides) for v in sz.symbols(e))
    }


def _kinds(
    p: LoopProgram, steps: Sequence[KernelCall | Extern], outputs: set[str], late: set[str]
) -> dict[str, str]:
    kinds: dict[str, str] = {}
    for name, b in p.buffers.items():
        if b.alias_of is None and b.kind in ("input", "constant", "packed"):
            kinds[name] = b.kind
    for step in steps:
        for name in touched(step)[1]:
            base = base_of(p.buffers, name)
            if base in kinds:
                continue
            extern = isinstance(step, Extern)
            if isinstance(step, Extern) and str(step.target) in WRITES_INTO_OUT:
                extern = base in outputs or base in late  # what the caller keeps is PyTorch's to allocate
            own = "extern" if base in late else "arena"
            kinds[base] = "extern" if extern else "output" if base in outputs else own
    for base in outputs:  # an output without elements has no writer
        kinds.setdefault(base, "output")
    for step in steps:  # nor has an argument without elements, but PyTorch wants a tensor
        for name in touched(step)[0]:
            kinds.setdefault(base_of(p.buffers, name), "arena")
    return kinds


def _in_place(
    p: LoopProgram, call: KernelCall, at: int, lives: Mapping[str, _Life], kinds: Mapping[str, str],
    shared: dict[str, str],
) -> KernelCall:  # fmt: skip
    """Let outputs of a kernel take the place of inputs that nobody reads afterwards."""
    params = call.kernel.params
    if call.points:
        return call  # nothing in a batch is a temporary of a size that counts
    loads: dict[str, set[Index]] = {}
    stores: dict[str, set[Index]] = {}
    written: dict[str, int] = {}  # the number of the statement that first writes
    last_read: dict[str, int] = {}  # the number of the statement that last reads
    for k, s in enumerate(statements(call.kernel.body)):
        read = [] if isinstance(s, Loop) else list(expressions((s,)))
        if isinstance(s, Store):
            stores.setdefault(s.buffer, set()).add(s.index)
            written.setdefault(s.buffer, k)
            read += [atom.args[0] for atom in ix.indirect_atoms(s.index)]
        for n in (n for e in read for n in ex.loads(e)):
            loads.setdefault(n.buffer, set()).update(n.indices)
            last_read[n.buffer] = k
    taken: set[str] = set()
    overlapping: set[str] = set()
    if any(p.role == "inout" for p in params):
        return call  # several passes: an element may be read after the pass that writes it
    if not call.kernel.single_pass:
        return call
    for out, name in zip(params, call.args, strict=True):
        if out.role != "out" or kinds.get(name) != "arena" or lives[name].first != at:
            continue
        for source, other in zip(params, call.args, strict=True):
            if (
                source.role != "in"
                or other in taken
                or kinds.get(other) != "arena"
                or lives[other].last != at
            ):
                continue
            same = (
                p.buffers[other].nbytes == p.buffers[name].nbytes
                and source.dtype.itemsize == out.dtype.itemsize
            )
            # A later statement of the same iteration would read what has just been written.
            before = last_read.get(source.name, 0) <= written[out.name]
            if same and before and len(stores[out.name]) == 1 and loads.get(source.name) == stores[out.name]:
                shared[name] = other
                _extend(lives, shared, name)
                taken.add(other)
                overlapping |= {out.name, source.name}
                break
    if not overlapping:
        return call
    new = tuple(replace(q, restrict=False) if q.name in overlapping else q for q in params)
    return replace(call, kernel=replace(call.kernel, params=new))


def _extend(lives: Mapping[str, _Life], shared: Mapping[str, str], name: str) -> None:
    owner = lives[_owner(shared, name)]
    owner.last = max(owner.last, lives[name].last)


def _aligned(nbytes: IndexLike) -> IndexLike:
    return sz.plain(ix.floordiv(nbytes + (ALIGNMENT - 1), ALIGNMENT) * ALIGNMENT)


def _pack(
    p: LoopProgram, names: Sequence[str], lives: Mapping[str, _Life]
) -> tuple[dict[str, IndexLike], IndexLike]:
    """Offsets: the largest buffers first, each at the lowest place that is free for its whole life."""
    placed: list[tuple[int, int, _Life]] = []
    offsets: dict[str, IndexLike] = {}
    total = 0
    fixed = {b: n for b in names if isinstance(n := p.buffers[b].nbytes, int)}
    for name in sorted(fixed, key=lambda b: (-fixed[b], lives[b].first, b)):
        size = -(-max(fixed[name], 1) // ALIGNMENT) * ALIGNMENT
        life = lives[name]
        busy = sorted(
            (lo, hi) for lo, hi, other in placed if other.first <= life.last and life.first <= other.last
        )
        at = 0
        for lo, hi in busy:
            if at + size <= lo:
                break
            at = max(at, hi)
        offsets[name] = at
        placed.append((at, at + size, life))
        total = max(total, at + size)
    varying = [b for b in names if b not in fixed]
    return _pack_varying(p, varying, lives, offsets, total) if varying else (offsets, total)


def _pack_varying(
    p: LoopProgram,
    names: Sequence[str],
    lives: Mapping[str, _Life],
    offsets: dict[str, IndexLike],
    start: int,
) -> tuple[dict[str, IndexLike], IndexLike]:
    """Buffers whose sizes vary share a place where their sizes are one expression, or always smaller."""
    end: IndexLike = start
    slots: list[tuple[IndexLike, IndexLike, list[_Life]]] = []  # offset, bytes, who is there when
    # Larger ones first: those that are always smaller fit into their places.
    for name in sorted(names, key=lambda b: (-sz.hint(p.buffers[b].nbytes), lives[b].first, b)):
        nbytes, life = p.buffers[name].nbytes, lives[name]
        for at, size, others in slots:
            free = all(o.last < life.first or life.last < o.first for o in others)
            if free and (size == nbytes or sz.at_least(sz.plain(size - nbytes), 0)):
                others.append(life)
                offsets[name] = at
                break
        else:
            slots.append((end, nbytes, [life]))
            offsets[name] = end
            end = sz.plain(end + _aligned(nbytes))
    return offsets, end


def _releases(
    p: LoopProgram, offsets: Mapping[str, IndexLike], lives: Mapping[str, _Life], steps: int
) -> tuple[tuple[int, int, int], ...]:
    """Bytes of the arena that no later step touches, by the step after which that is so.

    A model's largest tensor is often its last one, the scores of every word of a vocabulary: by then most of
    the arena is dead, and its pages can go back while that one is filled.
    """
    spans: list[tuple[int, int, int]] = []
    for name, at in offsets.items():
        nbytes = p.buffers[name].nbytes
        if not isinstance(at, int) or not isinstance(nbytes, int):
            return ()
        spans.append((at, at + nbytes, lives[name].last))
    cuts = sorted({edge for lo, hi, _ in spans for edge in (lo, hi)})
    found: list[tuple[int, int, int]] = []
    for lo, hi in itertools.pairwise(cuts):
        last = max((t for a, b, t in spans if a <= lo and hi <= b), default=steps)
        if found and found[-1][0] == last and found[-1][2] == lo:
            found[-1] = (last, found[-1][1], hi)
        else:
            found.append((last, lo, hi))
    return tuple(sorted(r for r in found if r[2] - r[1] >= RELEASED and r[0] < steps - 1))


def _frees(
    p: LoopProgram, steps: Sequence[KernelCall | Extern], lives: Mapping[str, _Life], kinds: Mapping[str, str]
) -> tuple[tuple[str, ...], ...]:
    out: list[list[str]] = [[] for _ in steps]
    for name, kind in kinds.items():
        if kind == "extern" and lives[name].last < len(steps):
            out[lives[name].last].append(name)
    return tuple(tuple(names) for names in out)
