"""The entry point: what torch.compile calls, and the list of stages.

What comes in: the FX graph that TorchDynamo captured, example inputs, a mode and options. What goes out: a callable.
This is the one module that sees every stage; each is ``stage(x, config, log) -> y`` and the whole compiler is
``compile_graph``.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from hotloop import compat
from hotloop.codegen.cpp import print_kernels
from hotloop.codegen.host import print_host
from hotloop.config import Config, resolve
from hotloop.dumps import Log
from hotloop.errors import HotloopError, ToolchainError
from hotloop.graph import passes
from hotloop.graph.decompositions import decompositions
from hotloop.ir.kernel import Kernel, KernelCall, Schedule
from hotloop.ir.verify import verify_program, verify_schedule
from hotloop.lower.lower import lower
from hotloop.runtime.build import Builder, Source
from hotloop.runtime.cache import Cache
from hotloop.runtime.pool import OutputPool
from hotloop.runtime.program import Runtime, load_program
from hotloop.runtime.toolchain import choose_simd, find_toolchain
from hotloop.schedule.schedule import schedule

__all__ = ["compile_graph", "hotloop", "hotloop_decomp", "hotloop_unfused"]

Options = Mapping[str, Any]
Compiled = Callable[..., Any]

_graph_numbers = itertools.count()


def hotloop(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: Options | None = None
) -> Compiled:
    """The back end ``"hotloop"`` of ``torch.compile``.

    Args:
        gm: the captured graph.
        inputs: example inputs, fake or real.
        mode: ``default``, ``reduce-overhead``, ``max-autotune`` or ``max-autotune-no-cudagraphs``.
        options: fields of ``hotloop.config``, by name (``"cpp.simd"``), for this compile alone.

    Raises:
        OptionError: for an unknown mode or option; the message names the nearest valid one.
        CompileError, ToolchainError: when a graph cannot be compiled and ``config.on_error`` is ``"raise"``.
    """
    return _through_aot(gm, inputs, resolve(mode, options), compile_graph)


def hotloop_unfused(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: Options | None = None
) -> Compiled:
    """The rung below ``hotloop``: the same compiler with one kernel per operator."""
    config = resolve(mode, {**(options or {}), "unfused": True})
    return _through_aot(gm, inputs, config, compile_graph)


def hotloop_decomp(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: Options | None = None
) -> Compiled:
    """The rung below ``hotloop_unfused``: hotloop's decompositions and graph passes, run by PyTorch."""

    def compile_one(graph: torch.fx.GraphModule, inputs: Sequence[Any], kind: str, config: Config) -> Compiled:
        with Log(config, graph_id=next(_graph_numbers), kind=kind) as log:  # type: ignore[arg-type]
            return _boxed(passes.run(graph, config, log))

    return _through_aot(gm, inputs, resolve(mode, options), compile_one)


def _through_aot(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    config: Config,
    compile_one: Callable[[torch.fx.GraphModule, Sequence[Any], str, Config], Compiled],
) -> Compiled:
    backend = compat.aot_backend(lambda g, i, kind: compile_one(g, i, kind, config), decompositions())
    return backend(gm, inputs)


def _boxed(gm: torch.fx.GraphModule) -> Compiled:
    """Run an FX graph as it is, with the calling convention of compiled graphs."""

    def call(args: list[Any]) -> Any:
        own = list(args)
        args.clear()
        return gm(*own)

    return call


# --- the compiler -----------------------------------------------------------------------------------------------


def compile_graph(gm: torch.fx.GraphModule, inputs: Sequence[Any], kind: str, config: Config) -> Compiled:
    """Compile one graph of AOTAutograd; the result takes the inputs as one list."""
    if _is_symbolic(gm):
        return _PerSize(gm, kind, config)
    try:
        return _compile_static(gm, kind, config)
    except ToolchainError as error:
        if config.missing_toolchain != "eager" and config.on_error != "eager":
            raise
        return _uncompiled(gm, error)
    except HotloopError as error:
        if config.on_error != "eager":
            raise
        return _uncompiled(gm, error)


def _uncompiled(gm: torch.fx.GraphModule, error: Exception) -> Compiled:
    warnings.warn(f"hotloop runs a graph uncompiled: {error}", RuntimeWarning, stacklevel=2)
    return _boxed(gm)


def _compile_static(gm: torch.fx.GraphModule, kind: str, config: Config) -> Compiled:
    number = next(_graph_numbers)
    name = f"graph_{number}_{kind}"
    with Log(config, graph_id=number, kind=kind) as log:  # type: ignore[arg-type]
        log.stage("fx_graph_readable", lambda: gm.print_readable(print_output=False))
        gm = passes.run(gm, config, log)
        log.stage("fx_graph_transformed", lambda: gm.print_readable(print_output=False))
        program = lower(gm, config, log, name)
        log.stage("ir_pre_fusion", lambda: str(program))
        if config.check:
            verify_program(program)
        plan = schedule(program, config, log, torch.get_num_threads())
        log.stage("ir_post_fusion", lambda: str(plan))
        log.artifact("schedule", lambda: str(plan))
        if config.check:
            verify_schedule(plan)
        return _build(plan, name, config, log)


def _build(plan: Schedule, name: str, config: Config, log: Log) -> Compiled:
    """Print, compile and load the kernels and the host program of a schedule."""
    kernels = _distinct_kernels(plan)
    level = choose_simd(config.cpp.simd)
    functions: dict[str, Any] = {}
    params = {k.name: len(k.params) for k in kernels}
    sources = print_kernels(kernels, level, units=config.compile_workers or 2) if kernels else []
    for source in sources:
        log.artifact("kernel_code", partial(str, source.text))
    host, objects = print_host(plan, name)
    log.stage("output_code", lambda: "\n".join([*(f"r'''\n{s.text}\n'''" for s in sources), host]))
    if sources:
        builder = _builder(config.cpp.cxx, config.cache_dir, config.compile_workers, level)
        libraries = builder.build([Source(s.name, s.text) for s in sources])
        for source, library in zip(sources, libraries, strict=True):
            for symbol in source.symbols:
                function = library.function(symbol, [ctypes.c_void_p] * params[symbol])
                function.restype = ctypes.c_int64
                functions[symbol] = function
    pool = _pool(config.memory_pool_threshold, config.memory_pool_limit, config.memory_pool)
    runtime = Runtime(functions, plan.program.constants, objects, pool, config.memory_pool)
    return load_program(host, f"<hotloop {name}>", runtime)


def _distinct_kernels(plan: Schedule) -> list[Kernel]:
    found: dict[str, Kernel] = {}
    for step in plan.steps:
        if isinstance(step, KernelCall):
            found.setdefault(step.kernel.name, step.kernel)
    return list(found.values())


@cache
def _builder(cxx: str | None, cache_dir: str, workers: int, level: Any) -> Builder:
    """One builder for each toolchain and cache folder: it knows what this process has loaded already."""
    return Builder(find_toolchain(cxx), Cache(cache_dir), workers, level)


@cache
def _pool(threshold: int, limit: int, enabled: bool) -> OutputPool:
    return OutputPool(threshold, limit, enabled)


# --- graphs with symbolic sizes ---------------------------------------------------------------------------------


def _is_symbolic(gm: torch.fx.GraphModule) -> bool:
    def symbolic(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return any(isinstance(s, torch.SymInt) for s in (*value.shape, *value.stride()))
        return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))

    return any(symbolic(n.meta.get("val")) for n in gm.graph.nodes if n.op == "placeholder")


class _PerSize:
    """A graph whose sizes are symbols, compiled again for each set of sizes that it is called with."""

    def __init__(self, gm: torch.fx.GraphModule, kind: str, config: Config) -> None:
        self._gm = gm
        self._kind = kind
        self._config = config
        self._known: dict[tuple[Any, ...], Compiled] = {}
        self._lock = threading.Lock()

    def __call__(self, args: list[Any]) -> Any:
        key = tuple((tuple(a.shape), a.stride()) if isinstance(a, torch.Tensor) else a for a in args)
        known = self._known.get(key)
        if known is None:
            with self._lock:
                known = self._known.get(key)
                if known is None:
                    known = compile_graph(compat.retrace(self._gm, args), args, self._kind, self._config)
                    self._known[key] = known
        return known(args)
