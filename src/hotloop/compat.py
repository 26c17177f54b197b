"""Every internal API of PyTorch that hotloop uses, in one place.

In: nothing. Out: small functions with a stable meaning, whatever the version of torch. Each names the
versions it was written against; a new release of torch is supported by reading this file from top to bottom.
No other module may touch a name of torch that starts with an underscore: tests/test_layers.py enforces it.
Next: dumps.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import get_debug_dir
from torch._guards import TracingContext, detect_fake_mode
from torch._logging import _internal as torch_logging

# The type of an operator overload, `torch.ops.aten.add.Tensor`. torch 2.11 to 2.14.
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# A function on the leaves of nested containers, those that a library registers too. torch 2.11 to 2.14.
from torch.utils._pytree import tree_map as tree_map

from hotloop.errors import HotloopError


def artifact_logger(module: str, artifact: str) -> logging.Logger:
    """The logger behind `TORCH_LOGS="<artifact>"` for a module of hotloop, e.g. "hotloop.codegen".

    Level DEBUG when the user asked for the artifact. An artifact that this torch does not know cannot be
    named in TORCH_LOGS (torch itself refuses it): its logger is an ordinary one, silent by default.

    torch 2.11 to 2.14: `torch._logging.getArtifactLogger`, `_internal.log_registry`.
    """
    _attach_to_torch_logs()
    if artifact in torch_logging.log_registry.artifact_names:
        return torch_logging.getArtifactLogger(module, artifact)
    return logging.getLogger(f"{module}.__{artifact}")


def _attach_to_torch_logs() -> None:
    """Let torch's logging own the "hotloop" logger, as it owns "torch".

    Otherwise the records of an enabled artifact would reach no handler. Registered, the logger also follows
    TORCH_LOGS="+hotloop", TORCH_LOGS_OUT, TORCH_LOGS_FORMAT and `torch._logging.set_logs`.

    torch 2.11 to 2.14: `_internal.register_log`, `_internal._setup_handlers`.
    """
    if "hotloop" in torch_logging.log_registry.log_alias_to_log_qnames:
        return
    torch_logging.register_log("hotloop", "hotloop")
    logger = logging.getLogger("hotloop")
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    torch_logging._setup_handlers(logging.StreamHandler, logger)
    file = os.environ.get("TORCH_LOGS_OUT")
    if file:
        torch_logging._setup_handlers(lambda: logging.FileHandler(file), logger)


def debug_run_dir() -> str:
    """`torch_compile_debug/run_<time>-pid_<pid>` of this process, which Dynamo's own dumps use as well.

    torch 2.11 to 2.14: `torch._dynamo.utils.get_debug_dir`.
    """
    return get_debug_dir()


def torch_version() -> str:
    """The version of torch that runs, e.g. "2.13.0+cpu": part of cache keys and of dumps."""
    return str(torch.__version__)


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """How many owners a storage has: tensors, views, saved tensors, and its Python object counts as one.

    Whether the Python object counts depends on the version: compare with a count taken when the owners are
    known. torch 2.11 to 2.14: `torch._C._storage_Use_Count`, `UntypedStorage._cdata`.
    """
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


@dataclass(frozen=True)
class TensorCalls:
    """How C code asks tensors what state they are in, without Python: addresses of functions that take a
    tensor's handle, and in which byte of Python's objects a tensor's handle and the items of a tuple are."""

    items: int
    handle: int
    is_inference: int  # bool (const void* handle)
    version: int  # int64_t (const void* handle); not of a tensor of inference mode
    data: int  # int32_t (const void* handle, void** address); 0 for success


@cache
def tensor_calls() -> TensorCalls | None:
    """The functions, or `None` where there are none that answer right.

    torch 2.11 to 2.14 on Linux: `at::native::is_inference`, `at::TensorBase::_version` and
    `aoti_torch_get_data_ptr` of libtorch_cpu.so, whose argument is a pointer to a pointer to the tensor's
    implementation: `Tensor._cdata`, which the Python object holds. None of it is taken for granted: each has
    to find the state of tensors that are made here.
    """
    names = (
        "_ZN2at6native12is_inferenceERKNS_6TensorE",
        "_ZNK2at10TensorBase8_versionEv",
        "aoti_torch_get_data_ptr",
    )
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        addresses = [ctypes.cast(library[name], ctypes.c_void_p).value or 0 for name in names]
    except (OSError, AttributeError):
        return None
    with torch.inference_mode(False), _disable_current_modes(), torch.no_grad():
        plain = torch.empty(4, device="cpu")
        tensors = (plain, plain.add_(1)[1:], torch.nn.Parameter(torch.empty(4, device="cpu")).add_(1).mul_(2))
        with torch.inference_mode():
            inference = torch.empty(4, device="cpu")
    size = ctypes.sizeof(ctypes.c_void_p)

    def words(value: object, count: int) -> list[int]:
        return list((ctypes.c_size_t * count).from_address(id(value)))

    found = [words(t, torch.Tensor.__basicsize__ // size) for t in tensors]
    places = [k for k, row in enumerate(zip(*found, strict=True)) if row == tuple(t._cdata for t in tensors)]
    items = tuple.__basicsize__ // size
    if not places or words(tensors, items + 3)[items:] != [id(t) for t in tensors]:
        return None
    calls = TensorCalls(items * size, places[0] * size, *addresses)
    right = all(_asked(t, calls) == (t._version, t.data_ptr()) for t in tensors)
    return calls if right and _asked(inference, calls) is None else None


def _asked(tensor: torch.Tensor, calls: TensorCalls) -> tuple[int, int] | None:
    """Version and address of a tensor by these functions; `None` of one of inference mode."""
    pointer, handle, address = ctypes.c_void_p, id(tensor) + calls.handle, ctypes.c_size_t()
    if ctypes.CFUNCTYPE(ctypes.c_bool, pointer)(calls.is_inference)(handle):
        return None
    ctypes.CFUNCTYPE(ctypes.c_int32, pointer, pointer)(calls.data)(handle, ctypes.addressof(address))
    return ctypes.CFUNCTYPE(ctypes.c_int64, pointer)(calls.version)(handle), address.value


def functional_overloads(name: str) -> tuple[torch._ops.OpOverload, ...]:
    """The overloads of `aten::<name>` (or `prims::<name>`) that do not write to arguments; () if unknown.

    torch 2.11 to 2.14: `torch._ops.OpOverloadPacket.overloads`, `OpOverload._schema`.
    """
    space, _, short = name.rpartition("::")
    packet = getattr(torch.ops.prims if space == "prims" else torch.ops.aten, short, None)
    if packet is None:
        return ()
    found = [getattr(packet, overload) for overload in packet.overloads()]
    return tuple(f for f in found if not f._schema.is_mutable)


@dataclass(frozen=True)
class Argument:
    """One argument of an operator: its name, and the default if it has one.

    `writes` says that the operator mutates it, `aliased` that a result may be a view of it.
    """

    name: str
    default: Any = None
    has_default: bool = False
    writes: bool = False
    aliased: bool = False
    keyword_only: bool = False


@cache
def operator_arguments(target: Any) -> tuple[Argument, ...] | None:
    """The arguments of an operator by its schema; None for what has no schema (higher-order operators).

    torch 2.11 to 2.14: `OpOverload._schema`, `Argument.alias_info`.
    """
    schema = getattr(target, "_schema", None)
    if schema is None:
        return None
    return tuple(
        Argument(
            a.name,
            a.default_value if a.has_default_value() else None,
            a.has_default_value(),
            a.alias_info is not None and a.alias_info.is_write,
            a.alias_info is not None and not a.alias_info.is_write,
            a.kwarg_only,
        )
        for a in schema.arguments
    )


def storage_key(tensor: Any) -> int:
    """A number that two tensors share exactly if they share their memory. Fake tensors have it too.

    A tensor without strided memory is itself. torch 2.11 to 2.14: `torch.UntypedStorage._cdata`,
    `torch.Tensor._cdata`.
    """
    if tensor.layout is not torch.strided:
        return int(tensor._cdata)
    return int(tensor.untyped_storage()._cdata)


def core_decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's decompositions into its core operators: losses, activations, and their derivatives.

    torch 2.11 to 2.14: `torch._decomp.core_aten_decompositions`.
    """
    return dict(core_aten_decompositions())


def decompositions_of(targets: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """PyTorch's decompositions of these operators, or of all overloads of these packets, where it has them.

    torch 2.11 to 2.14: `torch._decomp.get_decompositions`.
    """
    return dict(get_decompositions(targets))


def _empty_strided_cpu() -> Callable[..., torch.Tensor]:
    """`f(sizes, strides, dtype)`: an uninitialised CPU tensor at half the cost of `torch.empty_strided`.

    torch 2.11 to 2.14: `torch._C._dynamo.guards._empty_strided_cpu`; without it the documented function
    serves.
    """
    found = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cpu", None)
    if found is not None:
        fast: Callable[..., torch.Tensor] = found
        return fast
    return lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype)


empty_strided_cpu = _empty_strided_cpu()


def returns_alias(target: Any) -> bool:
    """Whether the operator's result is a view of an argument (`view`, `expand`, `detach`, `split`).

    torch 2.11 to 2.14: `OpOverload._schema`, `Argument.alias_info`.
    """
    schema = getattr(target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def is_pure(target: Any) -> bool:
    """Whether the operator only computes a result: it neither mutates nor draws random numbers.

    False for what has no schema. torch 2.11 to 2.14: `OpOverload._schema`, `torch.Tag`.
    """
    schema = getattr(target, "_schema", None)
    if schema is None or schema.is_mutable or not schema.returns:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The base of modes that see every operator that runs, higher-order ones too, by `__torch_dispatch__`.

    torch 2.11 to 2.14: `torch.utils._python_dispatch.TorchDispatchMode`.
    """

    supports_higher_order_operators = True


def fills_new_memory() -> bool:
    """Whether eager fills memory that nobody wrote with NaN or the largest integer, as determinism wants it.

    torch 2.11 to 2.14: `torch.utils.deterministic.fill_uninitialized_memory`.
    """
    fills: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return fills and torch.are_deterministic_algorithms_enabled()


def draws_random_numbers(target: Any) -> bool:
    """Whether an operator's result depends on a generator's state, or a higher-order one's may.

    torch 2.11 to 2.14: `torch.Tag`, and the names `run_and_save_rng_state` and `run_with_rng_state`.
    """
    tags = getattr(target, "tags", None)
    return "rng_state" in str(target) or (tags is not None and torch.Tag.nondeterministic_seeded in tags)


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """Inside, operators run on real tensors although a tracing mode is active outside.

    torch 2.11 to 2.14: `torch.utils._python_dispatch._disable_current_modes`.
    """
    return _disable_current_modes()


def backend_error(error: HotloopError) -> HotloopError:
    """The same error, of a kind that Dynamo shows as it is when a back end raises it.

    Dynamo puts what a back end raises into an error of its own, below a traceback of its own frames, which
    buries the message. An exception of Dynamo's own kind it leaves alone, but for the frames. ``except`` with
    the error's own class and with ``BackendCompilerFailed`` both take it. The first frame that is shown is
    the caller's, which raises it; with TORCHDYNAMO_VERBOSE=1 all frames are.
    torch 2.11 to 2.14: `torch._dynamo.exc.BackendCompilerFailed`, `ShortenTraceback`, `config.verbose`.
    """
    own = type(error)
    members = {
        "__module__": own.__module__,
        "__doc__": own.__doc__,
        # Another process gets the plain error.
        "__reduce__": lambda self: (_restored, (own, str(self))),
    }
    kind: Any = type(own.__name__, (own, BackendCompilerFailed), members)
    shown: HotloopError = kind.__new__(kind)
    BackendCompilerFailed.__init__(shown, aot_backend, error, sys._getframe(1))  # type: ignore[arg-type]
    shown.__dict__.update(error.__dict__)
    shown.args = (str(error),)
    return shown.with_traceback(error.__traceback__ if torch._dynamo.config.verbose else None)


def _restored(kind: type[HotloopError], text: str) -> HotloopError:
    error = kind.__new__(kind)
    error.args = (text,)
    return error


def aot_backend(
    compile_graph: Callable[[torch.fx.GraphModule, Sequence[Any], str], Callable[..., Any]],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """A Dynamo back end that runs AOTAutograd and hands each graph to `compile_graph(gm, inputs, kind)`.

    `kind` is forward, backward or inference. The callable that comes back takes one list, which it may empty.
    Inputs are mutated by the graphs, with `copy_` as its last operators, wherever autograd allows it.
    torch 2.11 to 2.14: `torch._dynamo.backends.common.aot_autograd` (the documented way to write such a back
    end) and the min-cut partitioner that `functorch.compile` exports.
    """

    def compiler(kind: str) -> Callable[..., Callable[..., Any]]:
        def compile_one(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            call = compile_graph(gm, inputs, kind)
            call._boxed_call = True  # type: ignore[attr-defined]
            return call

        return compile_one

    backend: Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]] = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        decompositions=dict(decompositions),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    return backend


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values. torch 2.11 to 2.14: `FakeTensor`."""
    return isinstance(tensor, FakeTensor)


def fake_mode_of(inputs: Sequence[Any]) -> Any:
    """The fake tensor mode that traced these inputs, or `None`. torch 2.11 to 2.14: `detect_fake_mode`."""
    return detect_fake_mode(list(inputs))


def retrace(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """The graph for the concrete sizes of real `inputs`: nodes that compute sizes are gone, all others stay.

    Not by tracing: FX tells by a global variable that it traces, and a compiled function that another thread
    calls meanwhile refuses to run. torch 2.11 to 2.14: `FakeTensorMode`.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)
    graph = torch.fx.Graph()
    given = iter(inputs)
    values: dict[torch.fx.Node, Any] = {}
    copies: dict[torch.fx.Node, torch.fx.Node] = {}

    def fake(x: Any) -> Any:
        return mode.from_tensor(x, static_shapes=True) if isinstance(x, torch.Tensor) else x

    def argument(n: torch.fx.Node) -> Any:
        return values[n] if isinstance(values[n], (bool, int, float)) else copies[n]

    for node in gm.graph.nodes:
        if node.op == "placeholder":
            values[node] = fake(next(given))
        elif node.op == "get_attr":
            values[node] = fake(operator.attrgetter(node.target)(gm))
        elif node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            with mode, torch.no_grad():
                values[node] = node.target(*args, **kwargs)
            if isinstance(values[node], (bool, int, float)):
                continue
        copies[node] = graph.node_copy(node, argument)
        if node.op != "output":
            copies[node].meta["val"] = values[node]
    return torch.fx.GraphModule(gm, graph)


def is_composite(target: Any) -> bool:
    """Whether PyTorch defines the operator by others, so that AOTAutograd takes it apart by itself.

    torch 2.11 to 2.14: `torch._C._dispatch_has_kernel_for_dispatch_key`.
    """
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"))


def static_inputs() -> tuple[int, ...]:
    """Which inputs of the graph being compiled are parameters and buffers of modules, by position.

    torch 2.11 to 2.14: `torch._guards.TracingContext`, `ViewAndMutationMeta.static_input_indices`.
    """
    context = TracingContext.try_get()
    found = getattr(context and context.fw_metadata, "static_input_indices", None)
    return tuple(found or ())


@cache
def can_pack_convolution(dtype: torch.dtype) -> bool:
    """Whether the library can keep the weight of a 2-D convolution of this dtype in blocks, on this CPU.

    torch 2.11 to 2.14: `torch._C._nn.mkldnn_reorder_conv2d_weight`, `torch.ops.mkldnn`.
    """
    library: Any = torch.backends.mkldnn
    if not (library.is_available() and library.enabled):
        return False
    names = ("_convolution_pointwise", "_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported")
    if not all(hasattr(torch.ops.mkldnn, name) for name in names):
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32


def pack_convolution_weight(
    weight: torch.Tensor,
    sizes: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """A copy of a 2-D convolution's weight in oneDNN's blocks for inputs of `sizes` (N, C, H, W).

    torch 2.11 to 2.14: `torch._C._nn.mkldnn_reorder_conv2d_weight`.
    """
    opaque = weight.detach().contiguous().to_mkldnn()
    reorder: Callable[..., torch.Tensor] = torch._C._nn.mkldnn_reorder_conv2d_weight
    return reorder(opaque, list(padding), list(stride), list(dilation), groups, list(sizes))


def packed_convolution(
    x: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    numbers: tuple[Sequence[int], Sequence[int], Sequence[int], int],
    post: tuple[str, Sequence[float], str],
    added: torch.Tensor | None,
) -> torch.Tensor:
    """A 2-D convolution with a weight from `pack_convolution_weight`; the result lies as `x` does.

    `numbers` are padding, stride, dilation and groups; `added` is a tensor that is added to the result, or
    `post` the activation that follows, with its numbers and its algorithm.
    torch 2.11 to 2.14: `torch.ops.mkldnn._convolution_pointwise`.
    """
    call: Any = torch.ops.mkldnn._convolution_pointwise
    if added is None:
        out: torch.Tensor = call(x, packed, bias, *numbers, *post)
    else:
        out = call.binary(x, added, packed, bias, *numbers, "add", None, None, [], "")
    return out


def pointwise_convolution(binary: bool) -> Any:
    """oneDNN's convolution with an activation, or with a sum and one; `None` in a build without.

    torch 2.11 to 2.14: `torch.ops.mkldnn._convolution_pointwise` and its overload `binary`.
    """
    packet = getattr(torch.ops.mkldnn, "_convolution_pointwise", None)
    return getattr(packet, "binary" if binary else "default", None)


def packed_bytes(packed: torch.Tensor) -> int:
    """The bytes of a weight in blocks, with the padding that the library adds.

    torch 2.11 to 2.14: `torch.ops.mkldnn._nbytes`.
    """
    found: int = torch.ops.mkldnn._nbytes(packed)
    return found


_WRITING = (
    "setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
    "ilshift", "irshift",
)  # fmt: skip
_WRITING_FUNCTIONS = frozenset((*(getattr(operator, n) for n in _WRITING), *(f"__{n}__" for n in _WRITING)))


def overlapping_writes(gm: torch.fx.GraphModule) -> bool:
    """Whether an operator of Dynamo's graph writes to memory that it reads at other positions.

    Eager PyTorch refuses most of these. AOTAutograd makes graphs functional, which leaves nothing to refuse.
    torch 2.11 to 2.14: Dynamo leaves each node's fake tensor in `node.meta["example_value"]`, and fake
    tensors share storage where the real ones do.
    """
    return any(n.op in ("call_function", "call_method") and _writes_to_overlap(n) for n in gm.graph.nodes)


def _writes_to_overlap(node: torch.fx.Node) -> bool:
    def value(a: Any) -> Any:
        return a.meta.get("example_value") if isinstance(a, torch.fx.Node) else a

    out = value(node.kwargs.get("out"))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = node.target in _WRITING_FUNCTIONS or (name.endswith("_") and not name.startswith("_"))
    written = out if out is not None else value(node.args[0]) if in_place and node.args else None
    read = [value(n) for n in node.all_input_nodes if n is not node.kwargs.get("out")]
    if out is None and read:
        read = read[1:]
    if node.target in (operator.setitem, "__setitem__"):
        where = torch.fx.map_arg(node.args[1], lambda n: None)
        parts = where if isinstance(where, tuple) else (where,)
        if not all(p is Ellipsis or isinstance(p, (int, slice)) for p in parts):
            return False
        written = None if written is None else written[where]
    if not isinstance(written, torch.Tensor):
        return False
    return any(isinstance(t, torch.Tensor) and _partly_overlap(written, t) for t in read)


def _partly_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """As PyTorch decides it: dense tensors in one storage, of ranges that meet and are not the same."""
    known = all(type(n) is int for t in (a, b) for n in (*t.shape, *t.stride(), t.storage_offset()))
    if not known or storage_key(a) != storage_key(b) or not (_is_dense(a) and _is_dense(b)):
        return False
    start_a, start_b = a.storage_offset() * a.element_size(), b.storage_offset() * b.element_size()
    end_a, end_b = start_a + a.nbytes, start_b + b.nbytes
    if (start_a, end_a) == (start_b, end_b):
        return a.stride() != b.stride()
    return start_a < end_b and start_b < end_a


def _is_dense(t: torch.Tensor) -> bool:
    step = 1
    for stride, size in sorted((st, sz) for st, sz in zip(t.stride(), t.shape, strict=True) if sz != 1):
        if stride != step:
            return False
        step *= size
    return t.numel() > 0


def symbolic_expression(x: Any) -> Any:
    """The sympy expression of a symbolic number, simplified by the guards that hold.

    torch 2.11 to 2.14: `SymInt.node`, `SymNode.expr`, `ShapeEnv.simplify`.
    """
    return x.node.shape_env.simplify(x.node.expr)


def asserted_expression(x: Any) -> Any:
    """The sympy expression of a symbolic number as the program wrote it: nothing is assumed.

    torch 2.11 to 2.14: `SymInt.node`, `SymNode._expr`.
    """
    return x.node._expr


def symbol_facts(x: Any, symbol: Any) -> tuple[int | None, int | None, int | None]:
    """What the guards say of a sympy symbol in `x`: its inclusive bounds, and its value when it was traced.

    torch 2.11 to 2.14: `ShapeEnv.var_to_range`, `backed_var_to_val` (`var_to_val` before 2.12).
    """
    env = x.node.shape_env
    known = env.var_to_range.get(symbol)
    lo, hi = (None, None) if known is None else (_finite(known.lower), _finite(known.upper))
    values = getattr(env, "backed_var_to_val", None)
    value = (env.var_to_val if values is None else values).get(symbol)
    return lo, hi, _finite(value)


def bounds(x: Any, expression: Any) -> tuple[int | None, int | None, int | None]:
    """The same of an expression of such symbols.

    torch 2.11 to 2.14: `ShapeEnv.bound_sympy`.
    """
    env = x.node.shape_env
    found = env.bound_sympy(expression)
    values = {v: symbol_facts(x, v)[2] for v in expression.free_symbols}
    known = None if None in values.values() else expression.xreplace(values)
    return _finite(found.lower), _finite(found.upper), _finite(known)


def _finite(number: Any) -> int | None:
    """A sympy integer that is one; `None` for infinities, for huge stand-ins of them, and for no number."""
    if number is None or not getattr(number, "is_Integer", False):
        return None
    value = int(number)
    return value if abs(value) < 1 << 48 else None


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether sizes or strides are certainly equal. Unlike `==`, never adds a guard for symbolic ones.

    torch 2.11 to 2.14: `torch.fx.experimental.symbolic_shapes.statically_known_true`.
    """
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b, strict=True))


def size_estimate(x: Any) -> int:
    """An int, or about what a SymInt will be: its value at the time of tracing. Adds no guard.

    torch 2.11 to 2.14: `SymInt.node`, `ShapeEnv.backed_var_to_val` (`var_to_val` before 2.12).
    """
    if not isinstance(x, torch.SymInt):
        return int(x)
    e = symbolic_expression(x)
    values: dict[Any, int] = {}
    for v in e.free_symbols:
        lo, _, value = symbol_facts(x, v)
        values[v] = max(lo or 0, 1024) if value is None else value
    return int(e.xreplace(values))
