"""The entry point: what torch.compile calls, and the list of stages.

What comes in: the FX graph that TorchDynamo captured, example inputs, a mode and options. What goes out: a
callable. This is the one module that sees every stage; each is ``stage(x, config, log) -> y`` and the whole
compiler is ``compile_graph``.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from hotloop import compat
from hotloop.codegen.cpp import KernelSource, make_units, parameter_count, print_functions
from hotloop.codegen.host import print_host
from hotloop.codegen.output_code import fusions, graph_key, print_output_code, steps
from hotloop.config import Config, resolve
from hotloop.dumps import Log
from hotloop.errors import (
    CompileError,
    HotloopError,
    MissingCompilerError,
    ToolchainError,
    describe_exception,
)
from hotloop.graph import convolutions, layouts, passes, quantised, random_states
from hotloop.graph.decompositions import decompositions
from hotloop.graph.freezing import freeze
from hotloop.graph.runnable import print_runnable
from hotloop.ir.kernel import Kernel, KernelCall, Schedule
from hotloop.ir.loops import LoopProgram
from hotloop.ir.samples import describe
from hotloop.ir.sizes import MOST
from hotloop.ir.verify import verify_program, verify_schedule
from hotloop.lower.lower import lower
from hotloop.lower.symbols import InexpressibleError, describe_symbols
from hotloop.runtime import graph_cache
from hotloop.runtime.autotune import Tuner
from hotloop.runtime.backing import Backing
from hotloop.runtime.build import Builder, Source
from hotloop.runtime.cache import Cache
from hotloop.runtime.changes import LOOK, LOOK_NAME, Look, bind_look
from hotloop.runtime.frozen import FrozenProgram
from hotloop.runtime.override import find_override
from hotloop.runtime.packing import Kept, WeightMemory
from hotloop.runtime.pool import OutputPool
from hotloop.runtime.program import Runtime, load_program, profiled
from hotloop.runtime.toolchain import Toolchain, choose_simd, find_toolchain, machine_name
from hotloop.schedule.schedule import arrange, choices, settle
from hotloop.schedule.tiles import TILES

__all__ = ["Bound", "compile_graph", "hotloop", "hotloop_decomp", "hotloop_unfused", "link", "weight_memory"]

Options = Mapping[str, Any]
Compiled = Callable[..., Any]

_graph_numbers = itertools.count()


def hotloop(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Options | None = None,
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
    return _through_aot(gm, inputs, mode, options, compile_graph)


def hotloop_unfused(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Options | None = None,
) -> Compiled:
    """The rung below ``hotloop``: the same compiler with one kernel per operator."""
    return _through_aot(gm, inputs, mode, options, compile_graph, {"unfused": True})


def hotloop_decomp(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Options | None = None,
) -> Compiled:
    """The rung below ``hotloop_unfused``: hotloop's decompositions and graph passes, run by PyTorch."""

    def compile_one(
        graph: torch.fx.GraphModule, inputs: Sequence[Any], kind: str, config: Config
    ) -> Compiled:
        with Log(config, graph_id=next(_graph_numbers), kind=kind) as log:  # type: ignore[arg-type]
            return _boxed(passes.run(graph, config, log))

    return _through_aot(gm, inputs, mode, options, compile_one)


def _through_aot(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    mode: str | None,
    options: Options | None,
    compile_one: Callable[[torch.fx.GraphModule, Sequence[Any], str, Config], Compiled],
    own: Options | None = None,
) -> Compiled:
    try:
        config = resolve(mode, options, own or {})
        if compat.overlapping_writes(gm):
            return gm  # eager refuses most such writes, and says why
        backend = compat.aot_backend(lambda g, i, kind: compile_one(g, i, kind, config), decompositions())
        return backend(gm, inputs)
    except HotloopError as error:
        raise compat.backend_error(error) from None


def _boxed(gm: torch.fx.GraphModule) -> Compiled:
    """Run an FX graph as it is, with the calling convention of compiled graphs."""

    def call(args: list[Any]) -> Any:
        own = list(args)
        args.clear()
        return gm(*own)

    return call


# --- the compiler -------------------------------------------------------------------------------------------


def compile_graph(gm: torch.fx.GraphModule, inputs: Sequence[Any], kind: str, config: Config) -> Compiled:
    """Compile one graph of AOTAutograd; the result takes the inputs as one list."""
    foreign = _foreign_devices(gm)
    if foreign - {"meta"}:  # tensors without memory have nothing to compute: that is nobody's disappointment
        _warn_once(f"hotloop has no code for {', '.join(sorted(foreign))}: such graphs run uncompiled")
    if foreign:
        return _boxed(gm)
    random_states.settle(gm)
    if kind == "inference":
        _mark_lasting(gm)
        if config.freezing:
            return _compile_frozen(gm, kind, config)
    return _compile_whole(gm, kind, config)


def _compile_frozen(gm: torch.fx.GraphModule, kind: str, config: Config) -> Compiled:
    """A graph whose weights are not expected to change: what depends on them alone is computed once."""
    with compat.real_tensors(), _stage("graph"):
        gm = passes.clean(gm)
        if _packs_products(config):
            quantised.int8_products(gm, config.precision == "eager")
        parts = freeze(gm)
    if parts is None:
        return _compile_whole(gm, kind, config)
    strides = [n.meta["val"].stride() for n in list(_inputs_of(parts.main))[len(parts.kept) :]]
    main = _compile_whole(parts.main, kind, config)
    found = FrozenProgram(
        main, parts.prelude, parts.kept, parts.sources, strides, _look(config), _backing_of(config)
    )
    _kept().frozen.add(found)
    return found


def _packs_products(config: Config) -> bool:
    """Whether products by weights that last are hotloop's own."""
    return (
        config.weight_packing != "off" and not config.unfused and str(choose_simd(config.cpp.simd)) in TILES
    )


def _look(config: Config) -> Look:
    """The compiled function that tells whether memory has changed; without a compiler, it always has."""
    try:
        builder = _builder(
            config.cpp.cxx, _cache_of(config), config.compile_workers, choose_simd(config.cpp.simd)
        )
        (library,) = builder.build([_lasting(LOOK_NAME, LOOK)])
    except ToolchainError:
        if config.missing_toolchain != "eager" and config.on_error != "eager":
            raise
        changes = itertools.count()
        return lambda state, weights: next(changes)
    return bind_look(library.address(LOOK_NAME))


def _compile_whole(gm: torch.fx.GraphModule, kind: str, config: Config) -> Compiled:
    """A graph, for all sizes at once where they vary; what cannot be compiled, as the options say."""
    symbolic = _is_symbolic(gm)
    try:
        # AOTAutograd's fake tensor mode is still on: what a stage computes for itself would have no values.
        with compat.real_tensors():
            return _compile(gm, kind, config, symbolic)
    except InexpressibleError as error:
        return _per_size(gm, kind, config, error)
    except HotloopError as error:
        missing = isinstance(error, MissingCompilerError) and config.missing_toolchain == "eager"
        if symbolic and not isinstance(error, ToolchainError):
            return _per_size(gm, kind, config, error)
        if not missing and config.on_error != "eager":
            raise
        return _uncompiled(gm, error)


def _foreign_devices(gm: torch.fx.GraphModule) -> set[str]:
    """The kinds of devices, other than the CPU, on which a graph has tensors: kernels read host memory."""
    found: set[str] = set()
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        for v in val if isinstance(val, (tuple, list)) else (val,):
            if isinstance(v, torch.Tensor) and v.device.type != "cpu":
                found.add(v.device.type)
    return found


def _uncompiled(gm: torch.fx.GraphModule, error: Exception) -> Compiled:
    _warn_once(f"hotloop runs graphs uncompiled: {error}")
    return _boxed(gm)


@cache
def _warn_once(text: str) -> None:
    """A model has many graphs, which fail for one reason."""
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def _compile(gm: torch.fx.GraphModule, kind: str, config: Config, symbolic: bool) -> Compiled:
    """One graph through all stages; with ``symbolic``, for all sizes that its guards let in."""
    number = next(_graph_numbers)
    threads = config.cpp.threads or torch.get_num_threads()
    level = choose_simd(config.cpp.simd)
    openmp = _openmp(config.cpp.cxx)
    fills = compat.fills_new_memory()
    with Log(config, graph_id=number, kind=kind) as log, _reported(log), _stage("compile"):  # type: ignore[arg-type]
        name = log.name
        lasting = [k for k, n in enumerate(_inputs_of(gm)) if n.meta.get("lasting")]
        settings = {
            "level": level, "threads": str(threads), "openmp": str(openmp), "lasting": str(lasting),
            "fills memory": str(fills),
        }  # fmt: skip
        if symbolic:
            settings["symbols"] = describe_symbols(gm)
        if config.max_autotune:
            settings["machine"] = machine_name()  # what was measured here may be slow elsewhere
        otherwise = _for_large_sizes(gm, kind, config) if symbolic else None
        key = _graph_key(gm, kind, config, log, settings)
        known = None if key is None else _recall(key, gm, level, config, log, otherwise)
        if known is not None:
            return known
        log.stage("fx_graph_runnable", lambda: print_runnable(gm, name, config.changed()))
        log.stage("fx_graph_readable", lambda: gm.print_readable(print_output=False))
        with _stage("graph"):
            if fills:
                passes.fill_uninitialised(gm)
            gm = passes.run(gm, config, log)
            packs = _packs_products(config)
            if packs:
                quantised.int8_products(gm, config.precision == "eager")
            if not config.unfused:
                layouts.channels_last(gm)
                if packs:
                    convolutions.as_products(gm)
                if config.weight_packing != "off":
                    convolutions.with_what_follows(gm)
        log.stage("fx_graph_transformed", lambda: gm.print_readable(print_output=False))
        with _stage("lower"):
            program = lower(gm, config, log, name, symbolic)
        log.stage("ir_pre_fusion", lambda: str(program))
        if config.check:
            verify_program(program)
        plan = _plan(program, config, log, threads, level, openmp)
        log.stage("ir_post_fusion", lambda: str(plan))
        log.artifact("schedule", lambda: steps(plan))
        log.artifact("fusion", lambda: fusions(plan))
        if config.check:
            verify_schedule(plan)
        with _stage("codegen"):
            functions = print_functions(_distinct_kernels(plan), level, openmp)
            host, objects = print_host(plan, name)
        log.stage("output_code", lambda: print_output_code(program, functions, host, name, level))
        for f in functions:
            log.artifact("kernel_code", partial(str, f.text))
        edited = None
        if config.override_dir is not None:
            edited = find_override(config.override_dir, graph_key(program))
            if edited is not None:
                warnings.warn(f"hotloop takes {edited.path} for {name}", RuntimeWarning, stacklevel=2)
                functions, host, level = list(edited.functions), edited.host, choose_simd(edited.level)
        elif key is not None and not objects:
            texts = [(f.symbol, f.text, sorted(f.needs)) for f in functions]
            graph_cache.save(_cache_of(config), *key, gm, host, texts, plan.program.constants)
        bound = Bound(name, plan.program.constants, objects, log.number, otherwise)
        try:
            call = link(functions, host, bound, level, config)
        except ToolchainError as error:
            if edited is None:
                raise
            raise edited.does_not_compile(error) from error
        write = log.later("inputs.json")
        return call if write is None else _describing(call, write)


def _plan(program: LoopProgram, config: Config, log: Log, threads: int, level: Any, openmp: bool) -> Schedule:
    """The schedule, with what was measured to be fastest where the configuration asks for that."""
    with _stage("schedule"):
        arranged = arrange(program, config, log, threads, str(level))
        open_choices = choices(arranged) if config.max_autotune else {}
    picks: dict[int, int] = {}
    if open_choices:
        with _stage("autotune"):
            tuner = _tuner(_cache_of(config), config.cpp.cxx, threads)
            prepare = partial(_Candidate.of, level=level, openmp=openmp, config=config)
            picks, results = tuner.pick(open_choices, prepare)
            lines = [json.dumps(timing) for r in results for timing in r.timings()]
            log.artifact("autotuning", lambda: "\n".join(lines))
            if config.trace.log_autotuning_results and lines:
                log.record("autotuning_results.jsonl", lines)
    with _stage("schedule"):
        return settle(arranged, picks)


@dataclass(frozen=True)
class _Candidate:
    """A candidate of autotuning as text: ``autotune.Prepared``."""

    functions: tuple[KernelSource, ...]
    host: str
    bound: Bound
    level: Any
    config: Config

    @staticmethod
    def of(plan: Schedule, *, level: Any, openmp: bool, config: Config) -> _Candidate:
        """The texts of a schedule."""
        functions = print_functions(_distinct_kernels(plan), level, openmp)
        host, objects = print_host(plan, plan.program.name)
        bound = Bound(plan.program.name, plan.program.constants, objects)
        return _Candidate(tuple(functions), host, bound, level, config)

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of its functions."""
        return tuple(f.text for f in self.functions)

    def start(self) -> None:
        """Begin to compile."""
        builder = _builder(
            self.config.cpp.cxx, _cache_of(self.config), self.config.compile_workers, self.level
        )
        for _, source in _units(self.functions, self.config):
            builder.submit(source)

    def load(self) -> Compiled:
        """The callable; waits for the compiler."""
        return link(self.functions, self.host, self.bound, self.level, self.config)


@cache
def _tuner(store: Cache, cxx: str | None, threads: int) -> Tuner:
    """One tuner for each folder, compiler and number of threads: it knows what this process has measured."""
    machine = {
        "machine": machine_name(), "threads": str(threads), "torch": compat.torch_version(),
        "compiler": _toolchain(cxx).identity,
    }  # fmt: skip
    return Tuner(store, machine)


def _describing(call: Compiled, write: Callable[[str], None]) -> Compiled:
    """The first call says what its inputs are like: samples of that kind are what a replay takes."""
    waiting = [write]

    def described(args: list[Any]) -> Any:
        for say in waiting[:1]:
            waiting.clear()
            say(json.dumps(describe(args), indent=1))
        return call(args)

    return described


def _mark_lasting(gm: torch.fx.GraphModule) -> None:
    """Note at the graph's inputs which are parameters and buffers: most likely the same at every call."""
    inputs = list(_inputs_of(gm))
    for position in compat.static_inputs():
        inputs[position].meta["lasting"] = True


def _inputs_of(gm: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    return (n for n in gm.graph.nodes if n.op == "placeholder")


def _graph_key(
    gm: torch.fx.GraphModule, kind: str, config: Config, log: Log, settings: dict[str, str]
) -> tuple[str, dict[str, str]] | None:
    """The key of the graph in the cache; ``None`` where somebody wants to see or check the stages
    themselves."""
    shown = ("fusion", "schedule", "ir_pre_fusion", "ir_post_fusion", "post_grad_graphs")
    if config.check or config.override_dir is not None or config.debug or any(map(log.enabled, shown)):
        return None
    # Each option is a part of its own, so that `hotloop cache why` can say which one changed.
    own = {f"option {name}": value for name, value in config.code_options().items()}
    return graph_cache.graph_digest(gm, kind, {**settings, **own})


def _recall(
    key: tuple[str, dict[str, str]], gm: torch.fx.GraphModule, level: Any, config: Config, log: Log,
    otherwise: Compiled | None,
) -> Compiled | None:  # fmt: skip
    """The callable of a graph that was compiled before, by this process or another."""
    found = graph_cache.load(_cache_of(config), *key, gm)
    if found is None:
        return None
    text, constants = found
    functions = [KernelSource(symbol, body, frozenset(needs)) for symbol, body, needs in text.functions]
    for f in functions:
        log.artifact("kernel_code", partial(str, f.text))
    log.artifact("output_code", lambda: "\n\n".join([*(f.text for f in functions), text.host]))
    return link(functions, text.host, Bound(log.name, constants, (), log.number, otherwise), level, config)


@contextmanager
def _stage(name: str) -> Iterator[None]:
    """Whatever goes wrong inside is an error of this stage."""
    try:
        yield
    except (HotloopError, InexpressibleError):
        raise
    except Exception as error:
        raise CompileError(describe_exception(error), stage=name) from error


@contextmanager
def _reported(log: Log) -> Iterator[None]:
    """An error of a graph that was dumped names the command that shows it again."""
    try:
        yield
    except CompileError as error:
        if log.directory is None:
            raise
        hint = f"python {log.directory / 'fx_graph_runnable.py'} shows it again; {error.hint}"
        raise type(error)(
            error.message, stage=error.stage, node=error.node, source_line=error.source_line, hint=hint
        ) from error


@dataclass(frozen=True)
class Bound:
    """What a host program refers to by name or number: the graph's own tensors, and objects without a
    literal. ``number`` is the graph's own in this process; ``otherwise`` runs calls with sizes that the
    program is not for."""

    name: str
    constants: Mapping[str, torch.Tensor]
    objects: Sequence[Any]
    number: int = 0
    otherwise: Compiled | None = None


def link(functions: Sequence[KernelSource], host: str, bound: Bound, level: Any, config: Config) -> Compiled:
    """Compile and load the kernels, and give the callable of a host program."""
    found: dict[str, Any] = {}
    units = _units(functions, config)
    looks = [_lasting(LOOK_NAME, LOOK)] if "rt.weights(" in host else []
    if units or looks:
        builder = _builder(config.cpp.cxx, _cache_of(config), config.compile_workers, level)
        sources = [source for _, source in units]
        libraries = builder.build([*sources, *looks])
        for (own, _), library in zip(units, libraries[: len(units)], strict=True):
            for f in own:
                found[f.symbol] = library.function(f.symbol, [ctypes.c_void_p] * parameter_count(f))
                found[f.symbol].restype = ctypes.c_int64
                if config.cpp.enable_kernel_profile:
                    found[f.symbol] = profiled(found[f.symbol], f"graph_{bound.number}_{f.symbol}")
        if looks:
            found[LOOK_NAME] = bind_look(libraries[-1].address(LOOK_NAME))
    pool = _pool(config.memory_pool_threshold, config.memory_pool_limit, config.memory_pool)
    runtime = Runtime(
        found, bound.constants, bound.objects, pool, config.memory_pool, _kept(), _backing_of(config)
    )
    runtime.otherwise = bound.otherwise
    return load_program(host, f"<hotloop {bound.name}>", runtime)


@cache
def _lasting(symbol: str, text: str) -> Source:
    """A function that is the same for all programs: compiled once."""
    (unit,) = make_units([KernelSource(symbol, text, frozenset())])
    return Source(unit.name, unit.text)


def _units(functions: Sequence[KernelSource], config: Config) -> list[tuple[list[KernelSource], Source]]:
    """What is compiled for a host program: each translation unit with the functions in it."""
    if not functions:
        return []
    by_name = {f.symbol: f for f in functions}
    units = make_units(functions, config.compile_workers or 2)
    return [([by_name[s] for s in u.symbols], Source(u.name, u.text)) for u in units]


def _distinct_kernels(plan: Schedule) -> list[Kernel]:
    found: dict[str, Kernel] = {}
    for step in plan.steps:
        if isinstance(step, KernelCall):
            found.setdefault(step.kernel.name, step.kernel)
    return list(found.values())


@cache
def _toolchain(cxx: str | None) -> Toolchain:
    return find_toolchain(cxx)


def _openmp(cxx: str | None) -> bool:
    """Whether the compiler's OpenMP is torch's. Without a compiler it makes no difference, until it does."""
    try:
        return _toolchain(cxx).openmp
    except MissingCompilerError:
        return True


@cache
def _builder(cxx: str | None, store: Cache, workers: int, level: Any) -> Builder:
    """One builder for each toolchain and cache folder: it knows what this process has loaded already."""
    return Builder(_toolchain(cxx), store, workers, level)


def _cache_of(config: Config) -> Cache:
    return _cache(config.cache_dir, config.cache_limit)


@cache
def _cache(cache_dir: str, limit: int) -> Cache:
    return Cache(cache_dir, limit)


@cache
def _kept() -> Kept:
    return Kept()


def weight_memory() -> WeightMemory:
    """The bytes that the compiled programs of this process hold beside the weights, and gave back of them."""
    return _kept().memory


def _backing_of(config: Config) -> Backing | None:
    """Where plain weights go, if anywhere: they are expected to stay where the user asked for freezing."""
    replaced = config.freezing and config.weight_packing == "replace"
    return _backing(config.cache_dir) if replaced else None


@cache
def _backing(folder: str) -> Backing:
    found = Backing(folder)
    _kept().backings.add(found)
    return found


@cache
def _pool(threshold: int, limit: int, enabled: bool) -> OutputPool:
    return OutputPool(threshold, limit, enabled)


# --- graphs with symbolic sizes -----------------------------------------------------------------------------


def _is_symbolic(gm: torch.fx.GraphModule) -> bool:
    """Whether sizes in the graph vary: those of its inputs, or those that only data tell."""

    def symbolic(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return any(isinstance(s, torch.SymInt) for s in (*value.shape, *_strides(value)))
        if isinstance(value, (tuple, list)):
            return any(map(symbolic, value))
        return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))

    return any(symbolic(n.meta.get("val")) for n in gm.graph.nodes)


def _strides(tensor: torch.Tensor) -> Sequence[Any]:
    return tensor.stride() if tensor.layout is torch.strided else ()


def _per_size(gm: torch.fx.GraphModule, kind: str, config: Config, reason: Exception) -> Compiled:
    """What cannot be compiled for all sizes at once is compiled for each, or run where data tell them."""
    by_data = any(n.meta.get("unbacked_bindings") for n in gm.graph.nodes)
    how = "run uncompiled" if by_data else "compiled for each set of sizes"
    with Log(config, graph_id=next(_graph_numbers), kind=kind) as log:  # type: ignore[arg-type]
        log.artifact("perf_hints", lambda: f"this graph is {how}: {reason}")
    return _boxed(gm) if by_data else _PerSize(gm, kind, config)


def _for_large_sizes(gm: torch.fx.GraphModule, kind: str, config: Config) -> Compiled:
    """What runs a graph with sizes larger than ``sizes.MOST``; nothing is compiled before there are some."""

    @cache
    def compiled() -> Compiled:
        reason = CompileError(f"a size is larger than {MOST}", stage="lower")
        return _per_size(gm, kind, config, reason)

    return lambda args: compiled()(args)


class _PerSize:
    """A graph whose sizes are symbols, compiled again for each set of sizes that it is called with."""

    def __init__(self, gm: torch.fx.GraphModule, kind: str, config: Config) -> None:
        self._gm = gm
        self._kind = kind
        self._config = config
        self._known: dict[tuple[Any, ...], Compiled] = {}
        self._lock, self._pid = threading.Lock(), os.getpid()

    def __call__(self, args: list[Any]) -> Any:
        # A number by its text: True, 1 and 1.0 are equal, and so are the zeros, yet graphs tell them apart.
        key = tuple((tuple(a.shape), a.stride()) if isinstance(a, torch.Tensor) else repr(a) for a in args)
        known = self._known.get(key)
        if known is None:
            if self._pid != os.getpid():  # a thread of the parent may have held it at the fork
                self._lock, self._pid = threading.Lock(), os.getpid()
            with self._lock:
                known = self._known.get(key)
                if known is None:
                    known = compile_graph(compat.retrace(self._gm, args), args, self._kind, self._config)
                    self._known[key] = known
        return known(args)
