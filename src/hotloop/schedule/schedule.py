"""The scheduler: a loop program becomes kernels and extern calls in execution order, with a place for every
buffer.

What comes in: a ``LoopProgram``, the configuration, a log. What goes out: a frozen ``Schedule``. It runs the
modules of this folder in the order in which they say they follow each other. The next folder is ``codegen/``.
"""

from __future__ import annotations

from dataclasses import replace

from hotloop.config import Config
from hotloop.dumps import Log
from hotloop.ir.kernel import Kernel, KernelCall, Schedule
from hotloop.ir.loops import Extern, LoopProgram, op_outputs

from .dependences import analyse, base_of
from .fuse import Group, fuse
from .loops import Machine, build_kernel
from .memory import plan
from .ordered import build_ordered
from .products import Product, build_product, find_products, operations
from .simplify import drop_dead, drop_empty, simplify
from .updates import update_in_place
from .weights import mark_weight

__all__ = ["schedule"]


def schedule(program: LoopProgram, config: Config, log: Log, threads: int, level: str = "scalar") -> Schedule:
    """Schedule ``program`` for ``threads`` threads and a SIMD level, by which tiles are chosen."""
    keep_roundings = config.precision == "eager"
    p = update_in_place(drop_dead(program))
    p = drop_dead(drop_empty(p)) if config.unfused else simplify(p, threads)
    groups = fuse(p, not config.unfused, log.refuse_fusion)
    p = _without_unused(p)
    products: tuple[Group | Extern | Product, ...] = groups
    if config.weight_packing != "off" and not config.unfused:
        p, products = find_products(p, groups, level)
    needed = _needed(p, products)
    machine = Machine(threads, config.parallel_threshold)
    steps: list[KernelCall | Extern] = []
    names: dict[Kernel, str] = {}
    for g in products:
        if isinstance(g, Product):
            stored = {n for n in _results(g) if n in needed}
            steps.append(build_product(g, p.buffers, stored, machine, keep_roundings))
            continue
        if isinstance(g, Extern):
            steps.append(g if config.weight_packing == "off" else mark_weight(p, g))
            continue
        stored = {m.op.out for m in g.members if m.op.out in needed}
        build = build_ordered if g.ordered else build_kernel
        steps.append(build(g, p.buffers, stored, machine, keep_roundings))
    planned = plan(p, steps, reuse=not config.unfused, keep=config.memory_pool)
    final = tuple(_named(s, names) if isinstance(s, KernelCall) else s for s in planned.steps)
    return replace(planned, steps=final)


def _named(call: KernelCall, names: dict[Kernel, str]) -> KernelCall:
    """Equal kernels get one name, different ones different names."""
    key = replace(call.kernel, name="")
    name = names.setdefault(key, f"{call.kernel.name}_{len(names)}")
    return replace(call, kernel=replace(call.kernel, name=name))


def _results(step: Product) -> tuple[str, ...]:
    """What a product and its epilogue compute."""
    members = step.epilogue.members if step.epilogue is not None else ()
    return (step.out, *(m.op.out for m in members))


def _needed(p: LoopProgram, groups: tuple[Group | Extern | Product, ...]) -> set[str]:
    """The buffers that somebody outside their own group reads."""
    uses = analyse(p)
    group_of: dict[str, int] = {}
    op_group: dict[int, int] = {}
    position = {id(op): i for i, op in enumerate(p.ops)}
    for k, g in enumerate(groups):
        for op in operations(g):
            op_group[position[id(op)]] = k
            if isinstance(g, Product) or not isinstance(op, Extern):
                group_of.update(dict.fromkeys(op_outputs(op), k))
    needed: set[str] = set()
    for name, k in group_of.items():
        base = base_of(p.buffers, name)
        held = base in uses.held or p.buffers[base].kind != "temp" or base != name
        if held or any(op_group[r] != k for r in uses.readers.get(base, ())):
            needed.add(name)
    return needed


def _without_unused(p: LoopProgram) -> LoopProgram:
    """The program without buffers that no operation, input or output mentions."""
    uses = analyse(p)
    live = set(uses.writer) | set(uses.readers) | set(uses.outputs)
    buffers = {
        n: b
        for n, b in p.buffers.items()
        if b.kind in ("input", "constant", "packed") or base_of(p.buffers, n) in live
    }
    return p if len(buffers) == len(p.buffers) else replace(p, buffers=buffers)
