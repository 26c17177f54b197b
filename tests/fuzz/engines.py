"""A program traced once by AOTAutograd, and run in every way that hotloop knows.

What comes in: a function of tensors. What goes out: for each engine, a callable that gives its results and
the gradients. The engines: `graph` (the graph before lowering, by PyTorch), `interpret` (the loop program in
plain torch), `unfused loops` and `loops` (what the scheduler makes of it, in plain torch), `unfused` and
`fused` (compiled). What holds in between: all run the same graphs, and the kernels of many programs are
compiled as one file, since starting the compiler costs more than a kernel. Where sizes are symbolic,
TorchDynamo traces first, as for users, and its guards choose the graphs of each call.

Next: fuzz.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition

from hotloop import compat
from hotloop.codegen.cpp import KernelSource, make_units, parameter_count, print_functions
from hotloop.codegen.host import print_host
from hotloop.config import Config, resolve
from hotloop.dumps import Log
from hotloop.graph import passes
from hotloop.graph.decompositions import decompositions
from hotloop.ir.interpret import run_program
from hotloop.ir.interpret_kernel import run_schedule
from hotloop.ir.kernel import KernelCall, Schedule
from hotloop.ir.loops import LoopProgram
from hotloop.ir.verify import verify_program, verify_schedule
from hotloop.lower.lower import lower
from hotloop.lower.symbols import InexpressibleError
from hotloop.runtime.build import Builder, Source
from hotloop.runtime.cache import Cache
from hotloop.runtime.pool import OutputPool
from hotloop.runtime.program import Runtime, load_program
from hotloop.runtime.toolchain import Toolchain, choose_simd, find_toolchain
from hotloop.schedule.schedule import schedule

__all__ = ["ENGINES", "Traced", "build"]

#: From the first that could be wrong to the last.
ENGINES = ("graph", "interpret", "unfused loops", "loops", "unfused", "fused")
_THREADS = 2


class _Quick(Toolchain):
    """The toolchain without the optimiser's dearest passes: these kernels run once, on little."""

    def compile_flags(self, level: Any) -> tuple[str, ...]:
        return tuple("-O1" if flag == "-O3" else flag for flag in super().compile_flags(level))


@dataclass
class _Graph:
    """One graph of AOTAutograd: its loop program, and both schedules of it."""

    number: int
    module: torch.fx.GraphModule
    program: LoopProgram
    plans: dict[str, Schedule]
    calls: dict[str, Callable[[list[Any]], Any]] = field(default_factory=dict)

    def run(self, engine: str, args: list[Any]) -> Any:
        """Its results by one of the engines."""
        if engine == "graph":
            return self.module(*args)
        args = [self._fitted(a, name) for a, name in zip(args, self.program.inputs, strict=True)]
        if engine == "interpret":
            return run_program(self.program, args)
        if engine.endswith("loops"):
            plan = self.plans["unfused" if engine.startswith("unfused") else "fused"]
            return run_schedule(plan, args, arena=True)
        if engine not in self.calls:  # traced after the others: one engine gave other strides than another
            _build([self], [engine], True)
        return self.calls[engine](list(args))

    def _fitted(self, given: Any, name: str | None) -> Any:
        """torch 2.11 announces a norm, and so the gradient that arrives, of more dimensions than it has."""
        if not isinstance(given, torch.Tensor) or name is None:
            return given
        announced = self.program.buffers[name].sizes
        long, real = ([n for n in shape if n != 1] for shape in (announced, given.shape))
        if given.ndim >= len(announced) or len(long) != len(real):
            return given
        if any(isinstance(n, int) and n != m for n, m in zip(long, real, strict=True)):
            return given
        sizes = iter(real)
        return given.reshape([1 if n == 1 else next(sizes) for n in announced])


class Traced:
    """A function whose graphs any engine runs. Trace it by calling it; `graphs` are there then, and `error`
    is what a stage of hotloop raised."""

    def __init__(self, function: Callable[..., Any], names: str, symbolic: bool = False) -> None:
        self.engine = "interpret"
        self.graphs: list[_Graph] = []
        self.error: Exception | None = None
        self.per_size = 0
        self._names = names
        self._call: Callable[..., Any]
        if symbolic:
            self._call = torch.compile(function, backend=self._captured, dynamic=True)
            return
        self._call = aot_function(
            function,
            fw_compiler=self._compile,
            bw_compiler=self._compile,
            inference_compiler=self._compile,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=dict(decompositions()),
        )

    def __call__(self, *inputs: torch.Tensor) -> Any:
        return self._call(*inputs)

    def _captured(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """A graph of TorchDynamo, to AOTAutograd as backend.py hands it on."""
        if compat.overlapping_writes(gm):
            return gm

        def compile_one(graph: torch.fx.GraphModule, inputs: Sequence[Any], kind: str) -> Callable[..., Any]:
            return self._compile(graph, inputs)

        return compat.aot_backend(compile_one, decompositions())(gm, inputs)

    def _compile(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            graph = self._staged(gm)
        except InexpressibleError:
            return self._by_size(gm)

        def call(args: list[Any]) -> Any:
            own = list(args)
            args.clear()
            return graph.run(self.engine, own)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def _by_size(self, gm: torch.fx.GraphModule) -> Callable[..., Any]:
        """What cannot be compiled for all sizes at once, for each set of them; not at all where data tell."""
        by_data = any(n.meta.get("unbacked_bindings") for n in gm.graph.nodes)
        known: dict[str, _Graph] = {}
        self.per_size += 1

        def call(args: list[Any]) -> Any:
            own = list(args)
            args.clear()
            if by_data:
                return gm(*own)
            key = str([(a.shape, a.stride()) if isinstance(a, torch.Tensor) else a for a in own])
            if key not in known:
                known[key] = self._staged(compat.retrace(gm, own))
            return known[key].run(self.engine, own)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def _staged(self, gm: torch.fx.GraphModule) -> _Graph:
        try:
            with compat.real_tensors():
                graph = self._through_the_stages(gm)
        except InexpressibleError:
            raise
        except Exception as error:
            self.error = error
            raise
        self.graphs.append(graph)
        return graph

    def _through_the_stages(self, gm: torch.fx.GraphModule) -> _Graph:
        number = len(self.graphs)
        plans = {}
        config = resolve()
        log = Log(config)
        symbolic = any(isinstance(s, torch.SymInt) for n in gm.graph.nodes for s in _sizes(n))
        gm = passes.run(gm, config, log)
        program = lower(gm, config, log, f"{self._names}_{number}", symbolic)
        verify_program(program)
        for engine in ("unfused", "fused"):
            own: Config = config.replace({"unfused": engine == "unfused"})
            plan = _renamed(schedule(program, own, log, _THREADS), f"{self._names}_{number}_{engine[0]}_")
            verify_schedule(plan)
            plans[engine] = plan
        return _Graph(number, gm, program, plans)


def _sizes(node: torch.fx.Node) -> Sequence[Any]:
    """Numbers that a node's value has to do with."""
    value = node.meta.get("val")
    return (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)


def _renamed(plan: Schedule, prefix: str) -> Schedule:
    """The schedule with names that no other program has."""
    steps = tuple(
        replace(s, kernel=replace(s.kernel, name=prefix + s.kernel.name)) if isinstance(s, KernelCall) else s
        for s in plan.steps
    )
    return replace(plan, steps=steps)


@cache
def _builder(cache_dir: str, quick: bool) -> Builder:
    found = find_toolchain()
    if quick and found.kind == "gcc":
        found = _Quick(found.compiler, found.kind, found.identity, found.openmp, found.environment)
    return Builder(found, Cache(cache_dir), 1, choose_simd(resolve().cpp.simd))


def build(traced: Sequence[Traced], engines: Sequence[str], quick: bool) -> None:
    """Compile the kernels of all these programs, and give their graphs the calls."""
    _build([g for t in traced for g in t.graphs], engines, quick)


def _build(graphs: Sequence[_Graph], engines: Sequence[str], quick: bool) -> None:
    level = choose_simd(resolve().cpp.simd)
    wanted = [(g, e) for g in graphs for e in engines]
    functions: list[KernelSource] = []
    served: dict[int, dict[str, str]] = {}
    for k, (g, engine) in enumerate(wanted):
        kernels = {s.kernel.name: s.kernel for s in g.plans[engine].steps if isinstance(s, KernelCall)}
        functions += print_functions(kernels.values(), level)
        served[k] = dict.fromkeys(kernels, "")
    found = _load(functions, level, quick)
    pool = OutputPool(1 << 20, 1 << 24, True)
    for k, (g, engine) in enumerate(wanted):
        plan = g.plans[engine]
        host, objects = print_host(plan, f"{engine}_{g.number}")
        own = {name: found[name] for name in served[k] if name in found}
        runtime = Runtime(own, plan.program.constants, objects, pool)
        g.calls[engine] = load_program(host, f"<{plan.program.name} {engine}>", runtime)


def _load(functions: Sequence[KernelSource], level: Any, quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if not functions:
        return found
    units = make_units(functions, 1)
    arguments = {f.symbol: [ctypes.c_void_p] * parameter_count(f) for f in functions}
    libraries = _builder(resolve().cache_dir, quick).build([Source(u.name, u.text) for u in units])
    for unit, library in zip(units, libraries, strict=True):
        for symbol in unit.symbols:
            found[symbol] = library.function(symbol, arguments[symbol])
            found[symbol].restype = ctypes.c_int64
    return found
