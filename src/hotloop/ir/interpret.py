"""The meaning of a loop program in plain torch: the reference every later stage is compared with.

What comes in: a ``LoopProgram`` and its inputs. What goes out: the tensors it returns. What holds in
between: each operation is evaluated on whole tensors, in the dtype the program says, one after another;
memory that nobody has written holds NaN (or a conspicuous integer), so that a read of it shows.

The next file is ``interpret_kernel.py``, which runs what the scheduler makes of a program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import index as ix
from .evaluate import Bound, Evaluator, gather
from .expr import Expr, symbols
from .index import Index, IndexLike
from .loops import Buffer, Extern, LoopOp, LoopProgram, Measure, Reduce, Scan, Scatter, ViewRef, op_reads
from .panels import pack_panels

__all__ = [
    "Memory",
    "combine",
    "first_extreme",
    "neutral",
    "reduce_last",
    "run_program",
    "scan",
]

Number = bool | int | float

#: Points evaluated at once; a larger operation is cut along an output dimension.
CHUNK = 1 << 25
_POISON = 0x5A


class Memory:
    """The buffers of one run: named tensors, several of which may share storage.

    A buffer's memory starts at its tensor's first element, wherever that lies in the storage. The memory of
    an alias is all the memory of the buffer it reinterprets: flat positions and view offsets count from
    there, in elements of the alias's dtype.
    """

    def __init__(self, symbols: Mapping[Index, int] | None = None) -> None:
        self.symbols: dict[Index, int] = dict(symbols or {})
        self._tensors: dict[str, Tensor] = {}
        self._flat: dict[str, Tensor] = {}
        self._base: dict[str, str] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def bind(self, name: str, tensor: Tensor) -> None:
        """Give a buffer its tensor."""
        self._tensors[name] = tensor
        self._flat.pop(name, None)

    def size(self, e: IndexLike) -> int:
        """An extent, stride or offset as a number."""
        return int(ix.evaluate(e, self.symbols))

    def sizes(self, es: Iterable[IndexLike]) -> tuple[int, ...]:
        """Several extents or strides as numbers."""
        return tuple(self.size(e) for e in es)

    def flat(self, name: str) -> Tensor:
        """The buffer's memory as a 1-D tensor, gaps between its rows included."""
        if name not in self._flat:
            t = self._tensors[name]
            if name in self._base:
                nbytes = self.flat(self._base[name]).nbytes
                self._flat[name] = self.view(name, (nbytes // t.dtype.itemsize,), (1,), 0, t.dtype)
            else:
                last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
                extent = last + 1 if t.numel() else 0
                self._flat[name] = torch.as_strided(t, (extent,), (1,), t.storage_offset())
        return self._flat[name]

    def view(
        self, name: str, sizes: Sequence[int], strides: Sequence[int], offset: int, dtype: torch.dtype
    ) -> Tensor:
        """A strided tensor over the buffer's memory; ``offset`` in elements of ``dtype`` from its start."""
        t = self._tensors[self._base.get(name, name)]
        if dtype is t.dtype:
            return torch.as_strided(t, sizes, strides, t.storage_offset() + offset)
        start = t.storage_offset() * t.dtype.itemsize
        if start % dtype.itemsize:
            raise ValueError(f"{name} starts at byte {start}, which {dtype} cannot address")
        out = torch.empty(0, dtype=dtype)
        out.set_(t.untyped_storage(), start // dtype.itemsize + offset, tuple(sizes), tuple(strides))
        return out

    def view_ref(self, v: ViewRef) -> Tensor:
        """The tensor that a view is."""
        return self.view(v.buffer, self.sizes(v.sizes), self.sizes(v.strides), self.size(v.offset), v.dtype)

    def allocate(self, b: Buffer) -> None:
        """A fresh tensor, or a view of the buffer it is an alias of."""
        sizes, strides = self.sizes(b.sizes), self.sizes(b.strides)
        if b.alias_of is not None:
            self._base[b.name] = self._base.get(b.alias_of, b.alias_of)
            self.bind(b.name, self.view(b.name, sizes, strides, self.size(b.offset), b.dtype))
            return
        t = torch.empty_strided(sizes, strides, dtype=b.dtype)
        poison(t)
        self.bind(b.name, t)


def poison(t: Tensor) -> None:
    """Fill with what nobody computes by accident: NaN, or a conspicuous integer."""
    t.fill_(math.nan if t.dtype.is_floating_point else t.dtype is torch.bool or _POISON)


# --- reductions ---------------------------------------------------------------------------------------------


def neutral(kind: str, dtype: torch.dtype) -> Tensor:
    """The element that changes nothing. The least value for ``max``, as for an empty range."""
    if kind in ("sum", "any"):
        return torch.zeros((), dtype=dtype)
    if kind in ("prod", "all"):
        return torch.ones((), dtype=dtype)
    largest = kind in ("min", "argmin")
    if dtype is torch.bool:
        return torch.tensor(largest)
    if dtype.is_floating_point:
        return torch.tensor(math.inf if largest else -math.inf, dtype=dtype)
    return torch.tensor(torch.iinfo(dtype).max if largest else torch.iinfo(dtype).min, dtype=dtype)


def reduce_last(kind: str, value: Tensor) -> Tensor:
    """Reduce the last dimension in the value's own dtype; arg kinds give the first position."""
    if kind in ("argmax", "argmin"):
        return first_extreme(kind, value, torch.arange(value.shape[-1]))[1]
    if value.shape[-1] == 0:
        return neutral(kind, value.dtype).expand(value.shape[:-1])
    if kind == "sum":
        return value.sum(-1, dtype=value.dtype)
    if kind == "prod":
        return value.prod(-1, dtype=value.dtype)
    if kind in ("max", "min"):
        return value.amax(-1) if kind == "max" else value.amin(-1)
    if kind in ("any", "all"):
        return value.any(-1) if kind == "any" else value.all(-1)
    raise ValueError(f"unknown reduction {kind!r}")


def first_extreme(kind: str, value: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """The extreme value along the last dimension and the least position that has it; NaN is extreme."""
    if value.shape[-1] == 0:
        lead = value.shape[:-1]
        return neutral(kind, value.dtype).expand(lead), torch.zeros(lead, dtype=torch.int64)
    extreme = value.amax(-1) if kind == "argmax" else value.amin(-1)
    at = (value == extreme[..., None]) | ((value != value) & (extreme != extreme)[..., None])
    last = torch.iinfo(torch.int64).max
    return extreme, torch.where(at, position, last).amin(-1)


def combine(kind: str, a: Tensor, b: Tensor) -> Tensor:
    """Two partial results of one reduction as one (not for ``argmax`` and ``argmin``)."""
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum,
        "any": torch.logical_or, "all": torch.logical_and,
    }  # fmt: skip
    return functions[kind](a, b)


# --- programs -----------------------------------------------------------------------------------------------


def run_program(p: LoopProgram, inputs: Sequence[Tensor | Number]) -> list[Tensor | Number | None]:
    """Run every operation in order and give the graph's outputs.

    Inputs that the program mutates are written in place. Outputs are views of buffers, not copies. Raises
    ``IndexError`` for an index read from memory that is out of range, and ``ValueError`` for inputs that do
    not fit.
    """
    memory = prepare(p, inputs)
    for op in p.ops:
        if isinstance(op, Extern):
            run_extern(op, memory, p.buffers)
        else:
            _run_op(op, memory, p.buffers)
    return outputs(p, memory)


def prepare(p: LoopProgram, inputs: Sequence[Tensor | Number]) -> Memory:
    """A memory with the inputs and constants bound, and the symbols that the inputs' sizes tell."""
    if len(inputs) != len(p.inputs):
        raise ValueError(f"{p.name} takes {len(p.inputs)} inputs, not {len(inputs)}")
    given = {
        name: t
        for name, t in zip(p.inputs, inputs, strict=True)
        if name is not None and isinstance(t, Tensor)
    }
    memory = Memory({symbol: _measured(m, inputs) for symbol, m in p.symbols.items() if m.value is None})
    for symbol, m in p.symbols.items():
        if m.value is not None:
            memory.symbols[symbol] = int(scalar(m.value, memory))
    for name in (n for n in p.inputs if n is not None):
        if name not in given:
            raise ValueError(f"input {name} of {p.name} is a tensor")
        check_fits(p.buffers[name], given[name], memory)
        memory.bind(name, given[name].detach())
    for name, t in p.constants.items():
        memory.bind(name, t.detach())
    for b in p.buffers.values():
        if b.packs is not None:
            memory.bind(b.name, pack_panels(memory.view_ref(b.packs), memory.sizes(b.sizes)))
    return memory


def _measured(m: Measure, inputs: Sequence[Tensor | Number]) -> int:
    """A symbol's value."""
    given = inputs[m.input]
    if isinstance(given, Tensor):
        number = (given.shape if m.kind == "size" else given.stride())[m.dim]
    else:
        number = int(given)
    return (number - m.offset) // m.scale


def check_fits(b: Buffer, t: Tensor, memory: Memory) -> None:
    """Whether a tensor can stand for a buffer: the same dtype, sizes and, where they matter, strides."""
    sizes, strides = memory.sizes(b.sizes), memory.sizes(b.strides)
    shaped = t.dtype is b.dtype and tuple(t.shape) == sizes
    if not shaped or any(
        n > 1 and s != got for n, s, got in zip(sizes, strides, t.stride(), strict=True) if t.numel()
    ):
        raise ValueError(f"{t.dtype} {list(t.shape)} strides {list(t.stride())} given for {b!r}")


def outputs(p: LoopProgram, memory: Memory) -> list[Tensor | Number | None]:
    """What the graph returns."""
    for v in p.outputs:
        if isinstance(v, ViewRef):
            ensure(v.buffer, memory, p.buffers)
    return [memory.view_ref(v) if isinstance(v, ViewRef) else scalar(v, memory) for v in p.outputs]


def scalar(v: Any, memory: Memory) -> Any:
    """A number: itself, or the value of an expression of symbols."""
    if isinstance(v, Index):
        return memory.size(v)
    if not isinstance(v, Expr):
        return v
    named = {s.name: n for s, n in memory.symbols.items()}  # what is asserted assumes no bounds
    own = {s: named[s.name] for s in symbols(v)}
    return Evaluator(own, _reader(memory)).value(v).item()


def ensure(name: str, memory: Memory, buffers: Mapping[str, Buffer]) -> None:
    """Make a buffer exist: itself, or what it is an alias of first."""
    if name in memory:
        return
    b = buffers[name]
    if b.alias_of is not None:
        ensure(b.alias_of, memory, buffers)
    memory.allocate(b)


def run_extern(op: Extern, memory: Memory, buffers: Mapping[str, Buffer]) -> None:
    """Call the target on strided views, and copy its results into their buffers."""

    def resolve(a: Any) -> Any:
        if isinstance(a, ViewRef):
            ensure(a.buffer, memory, buffers)
            return memory.view_ref(a)
        if isinstance(a, (tuple, list)):
            return type(a)(resolve(x) for x in a)
        return scalar(a, memory)

    for name in op.mutates:
        ensure(name, memory, buffers)
    got = op.target(*resolve(op.args), **{k: resolve(v) for k, v in op.kwargs.items()})
    results = _flat(got)
    for symbol, k, dim in op.binds:
        memory.symbols[symbol] = int(results[k] if dim is None else results[k].shape[dim])
    if len(results) < len(op.outs):
        raise ValueError(f"{op.target} gave {len(results)} results for {len(op.outs)} buffers")
    for out_name, t in zip(op.outs, results, strict=False):
        if out_name is None:
            continue
        ensure(out_name, memory, buffers)
        out = memory[out_name]
        if t.shape != out.shape or t.dtype is not out.dtype:
            raise ValueError(f"{op.target} gave {t.dtype} {list(t.shape)} for {buffers[out_name]!r}")
        out.copy_(t)


def _flat(results: Any) -> list[Any]:
    nested = isinstance(results, (tuple, list))
    return [leaf for part in results for leaf in _flat(part)] if nested else [results]


def _run_op(op: LoopOp, memory: Memory, buffers: Mapping[str, Buffer]) -> None:
    out = buffers[op.out]
    for name in op_reads(op):
        if name not in memory and buffers[name].alias_of is None:
            raise KeyError(f"{op.out} reads {name}, which nothing has written")
        ensure(name, memory, buffers)
    if isinstance(op, Scatter):
        _scatter(op, memory, buffers)
        return
    # Evaluated whole before it is stored: an operation that mutates an input may read it at other positions.
    value = _op_value(op, memory)
    if isinstance(op, (Reduce, Scan)):
        value = value.to(out.dtype)
    if value.dtype is not out.dtype:
        raise TypeError(f"{op.out} is {out.dtype} and its body gives {value.dtype}: {op.body!r}")
    ensure(out.name, memory, buffers)
    memory[out.name].copy_(value)


def _op_value(op: LoopOp, memory: Memory) -> Tensor:
    """The result at every point, cut into pieces along the longest output dimension where it is large."""
    inner = op.reduce_vars if isinstance(op, Reduce) else ()
    extents = memory.sizes(v.extent for v in op.vars)
    per_point = math.prod(memory.sizes(v.extent for v in inner))
    # A scan goes on along its axis: that one is not cut.
    free = [k for k in range(len(extents)) if not (isinstance(op, Scan) and k == op.axis)]
    if not free:
        return _points(op, memory, {})
    cut = max(free, key=lambda k: extents[k])
    return torch.cat(
        [_points(op, memory, {op.vars[cut]: values}) for values in _pieces(cut, extents, per_point)], cut
    )


def _pieces(cut: int, extents: Sequence[int], per_point: int) -> list[Tensor]:
    """The values of one variable, in pieces so that no tensor over all variables becomes very large."""
    step = max(1, CHUNK * extents[cut] // max(1, math.prod(extents) * per_point))
    return [
        torch.arange(start, min(start + step, extents[cut])) for start in range(0, max(extents[cut], 1), step)
    ]


def _evaluator(
    variables: Sequence[Index], memory: Memory, chosen: Mapping[Index, Tensor]
) -> tuple[Evaluator, list[int]]:
    """An evaluator over all values of the variables, some limited to those chosen, and how many each has."""
    env: dict[Index, Bound] = dict(memory.symbols)
    sizes: list[int] = []
    for k, v in enumerate(variables):
        values = chosen[v] if v in chosen else torch.arange(memory.size(v.extent))
        sizes.append(values.numel())
        env[v] = values.reshape([-1 if j == k else 1 for j in range(len(variables))])
    return Evaluator(env, _reader(memory)), sizes


def _points(op: LoopOp, memory: Memory, chosen: Mapping[Index, Tensor]) -> Tensor:
    """The result with some variables limited to the values chosen."""
    inner = op.reduce_vars if isinstance(op, Reduce) else ()
    at, sizes = _evaluator((*op.vars, *inner), memory, chosen)
    if 0 in sizes:  # nothing is read: an index that is a constant may be outside of what has no elements
        value = torch.empty(sizes, dtype=op.body.dtype)
    else:
        value = at.value(op.body).expand(sizes)
    if isinstance(op, Scan):
        return scan(op.kind, value, op.axis)
    if not isinstance(op, Reduce):
        return value
    lead = sizes[: len(op.vars)]
    return reduce_last(op.kind, value.reshape([*lead, math.prod(sizes[len(op.vars) :])]))


def scan(kind: str, value: Tensor, axis: int) -> Tensor:
    """The running combination along a dimension, in the value's own dtype; arg kinds give positions."""
    if kind == "sum":
        return value.cumsum(axis, dtype=value.dtype)
    if kind == "prod":
        return value.cumprod(axis, dtype=value.dtype)
    if kind == "logaddexp":
        return value.logcumsumexp(axis)
    values, positions = value.cummax(axis) if kind in ("max", "argmax") else value.cummin(axis)
    return positions if kind.startswith("arg") else values


def _scatter(op: Scatter, memory: Memory, buffers: Mapping[str, Buffer]) -> None:
    """Write at computed positions, piece after piece along the first variable: the order of points counts."""
    out = buffers[op.out]
    extents = memory.sizes(v.extent for v in op.vars)
    found: list[tuple[Tensor, Tensor]] = []
    pieces = _pieces(0, extents, 1) if extents else [torch.zeros(1, dtype=torch.int64)]
    for values in pieces if all(extents) else ():
        at, sizes = _evaluator(op.vars, memory, {op.vars[0]: values} if extents else {})
        position = torch.zeros((), dtype=torch.int64)
        for i, n in zip(op.indices, memory.sizes(out.sizes), strict=True):
            along = at.index(i).expand(sizes)
            if bool(((along < 0) | (along >= n)).any()):
                raise IndexError(f"{op.out} is written at {i!r}, which leaves a dimension of {n} elements")
            position = position * n + along
        value = at.value(op.body)
        if value.dtype is not out.dtype:
            raise TypeError(f"{op.out} is {out.dtype} and its body gives {value.dtype}: {op.body!r}")
        found.append((position.expand(sizes).reshape(-1), value.expand(sizes).reshape(-1)))
    # All is evaluated before any of it is stored: a scatter may read what it updates.
    flat = memory[op.base].reshape(-1).clone()
    for position, value in found:
        scatter_into(op.kind, flat, position, value)
    ensure(op.out, memory, buffers)
    memory[op.out].copy_(flat.reshape(memory.sizes(out.sizes)))


def scatter_into(kind: str, flat: Tensor, position: Tensor, value: Tensor) -> None:
    """``flat[position] = combine(flat[position], value)``, one after the other."""
    if kind == "set":
        last = torch.full((flat.numel(),), -1)
        last.scatter_reduce_(0, position, torch.arange(position.numel()), "amax")
        written = last >= 0
        flat[written] = value[last[written]]
        return
    if flat.dtype is torch.bool:  # a sum of bools is whether any holds, a product whether all do
        wide = flat.to(torch.uint8)
        scatter_into("max" if kind in ("sum", "max") else "min", wide, position, value.to(torch.uint8))
        flat.copy_(wide)
    elif kind == "sum":
        flat.index_put_((position,), value, accumulate=True)
    else:
        how = {"prod": "prod", "max": "amax", "min": "amin"}[kind]
        flat.scatter_reduce_(0, position, value, how)


def _reader(memory: Memory) -> Callable[[Expr, Sequence[Tensor], Tensor | None], Tensor]:
    def read(e: Expr, indices: Sequence[Tensor], guard: Tensor | None) -> Tensor:
        t = memory[e.buffer]
        if t.dtype is not e.dtype or t.dim() != len(indices):
            raise TypeError(f"{e!r} as {e.dtype} reads {t.dtype} {list(t.shape)}")
        flat = memory.flat(e.buffer)
        position = torch.tensor((t.data_ptr() - flat.data_ptr()) // t.dtype.itemsize if t.numel() else 0)
        for i, n, stride in zip(indices, t.shape, t.stride(), strict=True):
            bad = (i < 0) | (i >= n)
            if guard is not None:
                bad = bad & guard
            if bool(bad.any()):
                raise IndexError(f"{e!r} leaves a dimension of {n} elements")
            position = position + i * stride
        return gather(flat, position, guard, e)

    return read
