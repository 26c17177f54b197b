"""The loop program: buffers, and operations over explicit ranges in topological order.

What comes in: nothing; ``lower/`` builds it. What goes out: one frozen ``LoopProgram``, the input of
``schedule/``. What holds in between (``verify.py`` checks it):

* A buffer has exactly one writer, except inputs (none, or one that mutates them last), constants (none), and
  what scatters update in place.
* ``Pointwise`` writes ``out[v0, ..., vn] = body`` for every point of ``vars``: the variables are the buffer's
  dimensions in order. ``Reduce`` does the same with its result over ``reduce_vars``, and ``Scan`` with the
  partial results along one variable.
* ``Scatter`` gives a buffer that equals its base but for elements at computed positions. One whose base is
  its own result updates that buffer in place: the one way in which a buffer is written again.
* A view is an index map inside a load, or a strided ``ViewRef`` where an extern call or an output needs a
  tensor; it is never an operation.

The next file is ``verify.py``; ``interpret.py`` runs a loop program in plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from . import index as ix
from .expr import Expr, dtype_name, index_symbols
from .expr import loads as expr_loads
from .expr import symbols as expr_symbols
from .index import Index, IndexLike
from .sizes import is_static, plain, product

__all__ = [
    "REDUCTIONS",
    "SCANS",
    "SCATTERS",
    "Buffer",
    "Extern",
    "LoopProgram",
    "Measure",
    "Op",
    "Origin",
    "Pointwise",
    "Reduce",
    "Scan",
    "Scatter",
    "ViewRef",
    "op_outputs",
    "op_reads",
    "op_symbols",
    "op_values",
    "program_symbols",
]

Sizes = tuple[IndexLike, ...]


@dataclass(frozen=True)
class Origin:
    """Where an operation came from: FX node names, the ATen operator, and the user's source line."""

    nodes: tuple[str, ...] = ()
    target: str = ""
    source: str | None = None

    @property
    def word(self) -> str:
        """The operator's name alone: ``relu`` of ``aten.relu.default``."""
        return self.target.removeprefix("aten.").removeprefix("hotloop.").partition(".")[0]


@dataclass(frozen=True)
class Measure:
    """Where a symbol's value is found when a graph is called: ``(v - offset) / scale``, with ``v`` the graph
    input of this number itself (kind ``number``), or its size or stride (``size``, ``stride``) in dimension
    ``dim``. Of kind ``value`` it is computed from other symbols."""

    input: int
    kind: str = "number"
    dim: int = 0
    offset: int = 0
    scale: int = 1
    value: Expr | None = None


@dataclass(frozen=True)
class Buffer:
    """A dense or strided piece of memory.

    ``kind``: ``input`` (the caller's tensor, any strides), ``constant`` (a tensor of the graph module),
    ``temp`` (an intermediate), ``output`` (handed to the caller) or ``packed`` (the panels of ``packs``, a
    matrix in an input or constant: ``ir/panels.py``). ``strides`` are in elements. ``alias_of`` names the
    buffer whose storage this one reinterprets (``as_strided`` and dtype views), ``offset`` in elements of
    this dtype. ``lasting``: an input that is a parameter or buffer of a module, most likely the same at each
    call. ``sealed``: a tensor without strided memory, a sparse one: calls pass it on whole, kernels never see
    it.
    """

    name: str
    dtype: torch.dtype
    sizes: Sizes
    strides: Sizes
    kind: str = "temp"
    device: str = "cpu"
    alias_of: str | None = None
    offset: IndexLike = 0
    lasting: bool = False
    packs: ViewRef | None = None
    sealed: bool = False

    @property
    def numel(self) -> IndexLike:
        """The number of elements."""
        return product(self.sizes)

    @property
    def nbytes(self) -> IndexLike:
        """The bytes of its elements, without gaps between them."""
        return plain(self.numel * self.dtype.itemsize)

    @property
    def is_static(self) -> bool:
        """Whether its sizes and strides are numbers."""
        return is_static(self.sizes) and is_static(self.strides)

    def __repr__(self) -> str:
        sizes, strides = list(self.sizes), list(self.strides)
        return f"{self.name}: {self.kind} {dtype_name(self.dtype)}{sizes} strides {strides}"


@dataclass(frozen=True)
class ViewRef:
    """A strided view of a buffer as a tensor: what extern calls take and what the program gives back.

    ``offset`` and ``strides`` are in elements of ``dtype``. Outputs that are equal but for ``again`` are
    tensors of their own over the same elements: autograd marks one of ``y, y.detach()`` and not the other.
    """

    buffer: str
    sizes: Sizes
    strides: Sizes
    offset: IndexLike
    dtype: torch.dtype
    again: int = 0


@dataclass(frozen=True)
class Pointwise:
    """``out[vars] = body`` at every point; ``body.dtype`` is the buffer's dtype.

    ``folded`` are the origins of the producers that were substituted into the body.
    """

    out: str
    vars: tuple[Index, ...]
    body: Expr
    origin: Origin = field(default=Origin(), compare=False)
    folded: tuple[Origin, ...] = field(default=(), compare=False)


#: Reduction kinds. ``argmax`` and ``argmin`` give the row-major position within ``reduce_vars`` (int64) of
#: the first
#: extreme (NaN counts as extreme); ``any`` and ``all`` reduce bool; ``max`` and ``min`` propagate NaN.
REDUCTIONS = ("sum", "prod", "max", "min", "any", "all", "argmax", "argmin")


@dataclass(frozen=True)
class Reduce:
    """``out[vars] = cast(reduction over reduce_vars of body)``.

    The reduction runs in ``body.dtype`` (float32 for bfloat16 data, int64 for integer sums: lowering casts),
    and its result is cast to the buffer's dtype when stored. Over an empty range: sum 0, prod 1, any False,
    all True.
    """

    out: str
    vars: tuple[Index, ...]
    reduce_vars: tuple[Index, ...]
    kind: str
    body: Expr
    origin: Origin = field(default=Origin(), compare=False)
    folded: tuple[Origin, ...] = field(default=(), compare=False)


#: Scan kinds. ``argmax`` and ``argmin`` give the position (int64) of the *last* extreme so far, and the other
#: kinds its value; NaN counts as extreme. ``logaddexp`` is ``log(exp(a) + exp(b))``.
SCANS = ("sum", "prod", "max", "min", "argmax", "argmin", "logaddexp")


@dataclass(frozen=True)
class Scan:
    """``out[vars] = cast(combination of body at all points up to this one along vars[axis])``.

    The running value has ``body.dtype`` (float64 for float32 data, as eager's); it is cast to the buffer's
    dtype when stored.
    """

    out: str
    vars: tuple[Index, ...]
    axis: int
    kind: str
    body: Expr
    origin: Origin = field(default=Origin(), compare=False)
    folded: tuple[Origin, ...] = field(default=(), compare=False)


#: How a scatter combines a value with the element that is there; ``set`` puts it in its place.
SCATTERS = ("set", "sum", "prod", "max", "min")


@dataclass(frozen=True)
class Scatter:
    """``out = base``, then point after point of ``vars``: ``out[indices] = combine(out[indices], body)``.

    The points are taken in row-major order, so that of several values set at one place the last stays, and
    sums are added in that order. ``indices`` has one entry a dimension of ``out`` and may read memory
    (``ix.indirect``); ``body.dtype`` is the buffer's dtype. ``base`` has the dtype and sizes of ``out``.
    """

    out: str
    base: str
    vars: tuple[Index, ...]
    indices: tuple[Index, ...]
    kind: str
    body: Expr
    origin: Origin = field(default=Origin(), compare=False)
    folded: tuple[Origin, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Extern:
    """A call through PyTorch: ``outs = target(*args, **kwargs)``.

    ``args`` and ``kwargs`` are what the FX node had, nested tuples and all, with every tensor replaced by a
    ``ViewRef``. ``outs`` names the buffers of the results in order (a higher-order operator's without their
    nesting), ``None`` for results nobody uses. The results' strides are what PyTorch gives, and equal the
    buffers' strides. ``mutates`` names buffers the call writes. ``weight`` is the position of an argument
    that is likely the same at every call, a graph input that nothing here writes: the runtime may keep what
    it makes of it. Sizes among the arguments may be index or value expressions of symbols. ``binds``: the
    symbols whose value the call tells, each as (symbol, number of the result, dimension of it or ``None`` for
    a number).
    """

    outs: tuple[str | None, ...]
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mutates: tuple[str, ...] = ()
    origin: Origin = field(default=Origin(), compare=False)
    weight: int | None = None
    binds: tuple[tuple[Index, int, int | None], ...] = ()


#: What runs in loops.
LoopOp = Pointwise | Reduce | Scan | Scatter
Op = LoopOp | Extern


@dataclass(frozen=True)
class LoopProgram:
    """A whole graph. ``outputs`` holds a ``ViewRef``, a plain Python number, or ``None`` for each graph
    output.

    An input that is a number is ``None`` among ``inputs``: its value is baked, or is that of a symbol.
    ``symbols`` says where the value of each symbol is found, except of those that extern calls tell.
    """

    name: str
    buffers: Mapping[str, Buffer]
    ops: tuple[Op, ...]
    inputs: tuple[str | None, ...]
    outputs: tuple[ViewRef | Index | Expr | int | float | bool | None, ...]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    symbols: Mapping[Index, Measure] = field(default_factory=dict)

    def __str__(self) -> str:
        return to_text(self)


def views_in(value: Any) -> Iterator[ViewRef]:
    """Every ``ViewRef`` inside nested extern arguments."""
    if isinstance(value, ViewRef):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from views_in(v)
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from views_in(v)


def program_symbols(p: LoopProgram) -> frozenset[Index]:
    """Every size symbol that buffers, operations and outputs mention."""
    found: set[Index] = set()
    for b in p.buffers.values():
        _add_symbols((b.sizes, b.strides, b.offset), found)
    for op in p.ops:
        _add_op_symbols(op, found)
    _add_symbols(p.outputs, found)
    return frozenset(found)


def op_symbols(op: Op) -> frozenset[str]:
    """The names of the size symbols that an operation mentions: it waits for the calls that tell them.

    Names, since a symbol whose bounds are about to be asserted is one without bounds in the assertion.
    """
    found: set[Index] = set()
    _add_op_symbols(op, found)
    return frozenset(s.name for s in found)


def _add_op_symbols(op: Op, found: set[Index]) -> None:
    if isinstance(op, Extern):
        _add_symbols((op.args, op.kwargs), found)
    else:
        _add_symbols(op_values(op), found)
        _add_symbols(op.indices if isinstance(op, Scatter) else (), found)
        _add_symbols([v.extent for v in (*op.vars, *getattr(op, "reduce_vars", ()))], found)


def _add_symbols(value: Any, found: set[Index]) -> None:
    if isinstance(value, Index):
        found.update(index_symbols(value))
    elif isinstance(value, Expr):
        found.update(expr_symbols(value))
    elif isinstance(value, ViewRef):
        _add_symbols((*value.sizes, *value.strides, value.offset), found)
    elif isinstance(value, (tuple, list)):
        for v in value:
            _add_symbols(v, found)
    elif isinstance(value, Mapping):
        _add_symbols(tuple(value.values()), found)


def op_reads(op: Op) -> tuple[str, ...]:
    """The buffers an operation reads, each once, in order of first use."""
    if isinstance(op, Extern):
        names = [v.buffer for v in views_in((op.args, op.kwargs))]
    else:
        names = [e.buffer for value in op_values(op) for e in expr_loads(value)]
        if isinstance(op, Scatter):
            names.append(op.base)
    return tuple(dict.fromkeys(names))


def op_values(op: LoopOp) -> tuple[Expr, ...]:
    """The trees that an operation evaluates at each point: its body, and what a scatter's positions read."""
    if not isinstance(op, Scatter):
        return (op.body,)
    return (op.body, *(a.args[0] for i in op.indices for a in ix.indirect_atoms(i)))


def op_outputs(op: Op) -> tuple[str, ...]:
    """The buffers an operation writes."""
    if isinstance(op, Extern):
        return (*(o for o in op.outs if o is not None), *op.mutates)
    return (op.out,)


def to_text(p: LoopProgram) -> str:
    """The dump: one buffer or operation a line, with the source line it came from."""
    lines = [f"program {p.name}"]
    lines += [f"  {s.name}: {_symbol_text(s, m)}" for s, m in p.symbols.items()]
    lines += [f"  {b!r}" for b in p.buffers.values() if b.kind in ("input", "constant")]
    for op in p.ops:
        source = f"    # {op.origin.source}" if op.origin.source else ""
        if isinstance(op, Extern):
            outs = [*map(str, op.outs), *(s.name for s, _, _ in op.binds)]
            lines.append(f"  {', '.join(outs)} = {op.target}{_args_text(op)}{source}")
            continue
        b = p.buffers[op.out]
        at = ", ".join(f"{v.name}<{v.extent}" for v in op.vars)
        if isinstance(op, Scatter):
            at = ", ".join(map(repr, op.indices))
        lines.append(f"  {op.out}[{at}] : {b.kind} {dtype_name(b.dtype)} = {body_text(op)}{source}")
    lines.append(f"  return {', '.join(_value_text(o) for o in p.outputs)}")
    return "\n".join(lines) + "\n"


def _symbol_text(s: Index, m: Measure) -> str:
    _, lo, hi, _ = s.args
    what = f"input {m.input}" if m.kind == "number" else f"{m.kind} {m.dim} of input {m.input}"
    if m.value is not None:
        what = repr(m.value)
    if (m.offset, m.scale) != (0, 1):
        what += f" = {m.scale} * {s.name} + {m.offset}"
    return f"{what}, from {lo} to {'any' if hi is None else hi}"


def body_text(op: LoopOp) -> str:
    """What an operation stores, on one line."""
    if isinstance(op, Reduce):
        over = ", ".join(f"{v.name}<{v.extent}" for v in op.reduce_vars)
        return f"{op.kind}({over}: {op.body!r})"
    if isinstance(op, Scan):
        return f"scan_{op.kind}(along {op.axis}: {op.body!r})"
    if isinstance(op, Scatter):
        over = ", ".join(f"{v.name}<{v.extent}" for v in op.vars)
        return f"scatter_{op.kind}({over}: {op.body!r}) over {op.base}"
    return repr(op.body)


def _value_text(v: Any) -> str:
    if isinstance(v, ViewRef):
        return f"{v.buffer}{list(v.sizes)}:{list(v.strides)}+{v.offset}{' again' if v.again else ''}"
    if isinstance(v, (tuple, list)):
        return "[" + ", ".join(map(_value_text, v)) + "]"
    return repr(v)


def _args_text(op: Extern) -> str:
    parts = [_value_text(a) for a in op.args] + [f"{k}={_value_text(v)}" for k, v in op.kwargs.items()]
    return "(" + ", ".join(parts) + ")"
