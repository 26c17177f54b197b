"""The scheduler: a loop program becomes kernels and extern calls in execution order, with a place for every
buffer.

What comes in: a ``LoopProgram``, the configuration, a log. What goes out: a frozen ``Schedule``. It runs the
modules of this folder in the order in which they say they follow each other. Where only a measurement can
tell how a product runs best, ``choices`` gives the candidates, each a schedule of the product alone, and
``settle`` takes the picks. The next folder is ``codegen/``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hotloop.config import Config
from hotloop.dumps import Log
from hotloop.ir import sizes as sz
from hotloop.ir.index import IndexLike
from hotloop.ir.kernel import Candidate, Choice, Kernel, KernelCall, Schedule
from hotloop.ir.loops import Extern, LoopProgram, op_outputs

from .alternatives import Way, alone, operands, title, ways
from .attention import Attention, build_attention, find_attention
from .batches import batch
from .components import one_by_one
from .dependences import Uses, analyse, base_of
from .fuse import Group, fuse
from .loops import Machine, build_kernel
from .memory import plan
from .ordered import build_ordered
from .products import Product, build_product, find_products, operations
from .simplify import drop_dead, drop_empty, simplify
from .updates import update_in_place
from .weights import mark_weight

__all__ = ["Arrangement", "arrange", "choices", "schedule", "settle"]

Step = Group | Extern | Product | Attention


@dataclass(frozen=True)
class Arrangement:
    """What runs in which order, before products have their final form: ``settle`` makes the schedule."""

    program: LoopProgram
    steps: tuple[Step, ...]
    config: Config
    threads: int
    level: str


def schedule(program: LoopProgram, config: Config, log: Log, threads: int, level: str = "scalar") -> Schedule:
    """Schedule ``program`` for ``threads`` threads and a SIMD level, by which tiles are chosen."""
    return settle(arrange(program, config, log, threads, level))


def arrange(program: LoopProgram, config: Config, log: Log, threads: int, level: str) -> Arrangement:
    """Simplify and fuse: everything that needs no measurement."""
    p = update_in_place(drop_dead(program))
    p = drop_dead(drop_empty(p)) if config.unfused else one_by_one(simplify(p, threads))
    groups = fuse(p, not config.unfused, log.refuse_fusion)
    uses = analyse(p)
    p = _without_unused(p, uses)
    products: tuple[Step, ...] = groups
    if config.weight_packing != "off" and not config.unfused:
        p, products = find_products(p, groups, level, threads, uses)
    if not config.unfused:
        products = find_attention(p, products, level)
    return Arrangement(p, products, config, threads, level)


def choices(a: Arrangement) -> dict[int, Choice]:
    """The products that may run in several ways, by the position of their step."""
    backends = a.config.max_autotune_gemm_backends
    needed = _needed(a.program, a.steps, analyse(a.program))
    found: dict[int, Choice] = {}
    for i, step in enumerate(a.steps):
        if not isinstance(step, Product):
            continue
        results = [n for n in _results(step) if n in needed]
        kinds = {a.program.buffers[base_of(a.program.buffers, n)].kind for n in _results(step)}
        if not kinds <= {"temp", "output"}:
            continue  # an input is written
        part = alone(a.program, operations(step), results, "candidate")
        candidates = []
        for way in ways(step, a.level, a.threads, backends):
            own = settle(replace(a, program=_with(part, way), steps=way.steps))
            candidates.append(Candidate(way.name, own))
        if candidates:
            given = tuple((_hints(v.sizes), _hints(v.strides), v.dtype) for v in operands(step))
            found[i] = Choice(title(step), given, tuple(candidates))
    return found


def settle(a: Arrangement, picks: Mapping[int, int] | None = None) -> Schedule:
    """The schedule, with the candidates of these numbers for the products at these positions."""
    keep_roundings = a.config.precision == "eager"
    p = a.program
    arranged: list[Step] = []
    for i, step in enumerate(a.steps):
        if picks and i in picks and isinstance(step, Product):
            way = ways(step, a.level, a.threads, a.config.max_autotune_gemm_backends)[picks[i]]
            p = _with(p, way)
            arranged += way.steps
        else:
            arranged.append(step)
    uses = analyse(p)
    needed = _needed(p, arranged, uses)
    machine = Machine(a.threads, a.config.parallel_threshold)
    steps: list[KernelCall | Extern] = []
    names: dict[Kernel, str] = {}
    for g in arranged:
        if isinstance(g, Product):
            stored = {n for n in _results(g) if n in needed}
            steps += build_product(g, p.buffers, stored, machine, keep_roundings)
            continue
        if isinstance(g, Attention):
            steps.append(build_attention(g, p.buffers, machine))
            continue
        if isinstance(g, Extern):
            steps.append(g if a.config.weight_packing == "off" else mark_weight(p, g, uses))
            continue
        stored = {m.op.out for m in g.members if m.op.out in needed}
        build = build_ordered if g.ordered else build_kernel
        steps.append(build(g, p.buffers, stored, machine, keep_roundings))
    if not a.config.unfused:
        steps = batch(steps, p.buffers, machine)
    planned = plan(p, steps, reuse=not a.config.unfused, keep=a.config.memory_pool)
    final = tuple(_named(s, names) if isinstance(s, KernelCall) else s for s in planned.steps)
    return replace(planned, steps=final)


def _with(p: LoopProgram, way: Way) -> LoopProgram:
    """The program with the panels that a way of running a product reads."""
    return replace(p, buffers={**p.buffers, **{b.name: b for b in way.panels}})


def _hints(sizes: Sequence[IndexLike]) -> tuple[int, ...]:
    return tuple(map(sz.hint, sizes))


def _named(call: KernelCall, names: dict[Kernel, str]) -> KernelCall:
    """Equal kernels get one name, different ones different names."""
    key = replace(call.kernel, name="")
    name = names.setdefault(key, f"{call.kernel.name}_{len(names)}")
    return replace(call, kernel=replace(call.kernel, name=name))


def _results(step: Product) -> tuple[str, ...]:
    """What a product and its epilogue compute."""
    members = step.epilogue.members if step.epilogue is not None else ()
    return (step.out, *(m.op.out for m in members))


def _needed(p: LoopProgram, groups: Sequence[Step], uses: Uses) -> set[str]:
    """The buffers that somebody outside their own group reads."""
    group_of: dict[str, int] = {}
    op_group: dict[int, int] = {}
    position = {id(op): i for i, op in enumerate(p.ops)}
    for k, g in enumerate(groups):
        for op in operations(g):
            op_group[position[id(op)]] = k
            if not isinstance(g, Extern):
                group_of.update(dict.fromkeys(op_outputs(op), k))
    needed: set[str] = set()
    for name, k in group_of.items():
        base = base_of(p.buffers, name)
        held = base in uses.held or p.buffers[base].kind != "temp" or base != name
        if held or any(op_group[r] != k for r in uses.readers.get(base, ())):
            needed.add(name)
    return needed


def _without_unused(p: LoopProgram, uses: Uses) -> LoopProgram:
    """The program without buffers that no operation, input or output mentions."""
    live = set(uses.writer) | set(uses.readers) | set(uses.outputs)
    buffers = {
        n: b
        for n, b in p.buffers.items()
        if b.kind in ("input", "constant", "packed") or base_of(p.buffers, n) in live
    }
    return p if len(buffers) == len(p.buffers) else replace(p, buffers=buffers)
