"""What lowering rules build with: views of buffers, and the program under construction.

What comes in: sizes and element functions from the rules. A size is an int or, where it is known only at run
time, an index expression of symbols. What goes out: ``View`` values for the rules and,
at the end, a frozen ``LoopProgram``. What holds in between: a buffer has the strides that eager would give
the node's result (read from the FX node's fake tensor), each operation is appended once and never changed,
and a view never copies.

The next file is ``lower.py``, the walk over the FX graph that calls the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from hotloop.errors import CompileError, source_line
from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir import sizes as sz
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index, IndexLike
from hotloop.ir.loops import (
    Buffer,
    Extern,
    LoopProgram,
    Measure,
    Op,
    Origin,
    Pointwise,
    Reduce,
    Scan,
    Scatter,
    ViewRef,
)

from .symbols import Meta

__all__ = [
    "DTYPES",
    "Builder",
    "Number",
    "Rule",
    "Value",
    "View",
    "loop_vars",
    "number_type",
    "number_value",
]

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
#: The dtypes that have arithmetic in the IR. Kernels see no other.
DTYPES = frozenset((*_FLOATS, torch.bool, *_INTEGERS))

Number = bool | int | float
Point = Sequence[IndexLike]
Vars = tuple[Index, ...]
Sizes = tuple[IndexLike, ...]
Tensor = torch.Tensor | Meta


def loop_vars(prefix: str, sizes: Sequence[IndexLike]) -> Vars:
    """One variable a dimension: ``i0, i1, ...``."""
    return _loop_vars(prefix, tuple(sizes))


@lru_cache(maxsize=4096)
def _loop_vars(prefix: str, sizes: tuple[IndexLike, ...]) -> Vars:
    return tuple(ix.var(f"{prefix}{k}", s) for k, s in enumerate(sizes))


def number_value(x: Number | Index | Expr) -> Expr:
    """A number as a value: a constant, or an expression of symbols."""
    if isinstance(x, Expr):
        return x
    if isinstance(x, Index):
        return ex.index_value(x)
    own = {bool: torch.bool, int: torch.int64, float: torch.float64}
    return ex.const(x, own[type(x)])


def number_type(x: Number | Index | Expr) -> type:
    """Its Python type."""
    if isinstance(x, Index):
        return int
    if isinstance(x, Expr):
        return bool if x.dtype is torch.bool else float if x.dtype.is_floating_point else int
    return type(x)


@dataclass(frozen=True)
class View:
    """A tensor value: ``view[vars] == buffer[indices]``, where ``indices`` are expressions of ``vars``.

    Rules make new views with ``remap`` and read elements with ``at``. Indices may read memory
    (``ix.indirect``), so that a gather is a view too.
    """

    buffer: str
    dtype: torch.dtype
    sizes: Sizes
    vars: Vars
    indices: tuple[Index, ...]

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.sizes)

    @property
    def numel(self) -> IndexLike:
        """The number of elements."""
        return sz.product(self.sizes)

    def at(self, point: Point) -> Expr:
        """The element at ``point`` (one index a dimension), in the view's own dtype."""
        if len(point) != len(self.vars):
            raise TypeError(f"{len(point)} indices for a view of {len(self.vars)} dimensions")
        mapping = dict(zip(self.vars, point, strict=True))
        return ex.load(self.buffer, tuple(ix.substitute(i, mapping) for i in self.indices), self.dtype)

    def remap(self, sizes: Sequence[IndexLike], f: Callable[[Vars], Point]) -> View:
        """The view of ``sizes`` whose element at ``v`` is this view's element at ``f(v)``."""
        sizes = tuple(map(sz.plain, sizes))
        new = loop_vars("d", sizes)
        mapping = dict(zip(self.vars, f(new), strict=True))
        return replace(
            self, sizes=sizes, vars=new, indices=tuple(ix.substitute(i, mapping) for i in self.indices)
        )

    def expand(self, sizes: Sequence[IndexLike]) -> View:
        """Broadcast to ``sizes`` by PyTorch's rule: aligned at the last dimension, size 1 repeats."""
        if tuple(sizes) == self.sizes:
            return self
        lead = len(sizes) - self.ndim
        return self.remap(
            sizes, lambda v: [v[lead + k] if s != 1 else ix.const(0) for k, s in enumerate(self.sizes)]
        )

    def reshape(self, sizes: Sequence[IndexLike]) -> View:
        """The row-major reshape (never a copy: an index map)."""
        if tuple(sizes) == self.sizes:
            return self
        return self.remap(
            sizes, lambda v: ix.delinearize(ix.linearize(v, ix.contiguous_strides(sizes)), self.sizes)
        )


#: What an FX node stands for while lowering.
Value = View | Number | Index | Expr | None | str | torch.dtype | tuple[Any, ...] | list[Any]
#: A rule gets the builder, the FX node (for its ``meta["val"]``), and the node's arguments with views for
#: tensors.
Rule = Callable[..., Any]


class Builder:
    """The program under construction. One is made for each graph; it is the only mutable thing in
    lowering."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.buffers: dict[str, Buffer] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.ops: list[Op] = []
        self.inputs: list[str | None] = []
        self.symbols: dict[Index, Measure] = {}
        self._told: set[Index] = set()
        self._origin = Origin()
        self._lines: dict[str | None, str | None] = {}
        self._copies: dict[tuple[View, bool], View] = {}
        self._keys: list[str] = []
        #: A buffer that is a graph input but for what a scatter wrote: the view, of the version before, that
        #: was written.
        self.versions: dict[str, View] = {}

    # --- where we are ---------------------------------------------------------------------------------------

    def enter(self, node: torch.fx.Node) -> None:
        """Operations built from here on came from this FX node."""
        original = node.meta.get("original_aten") or node.target
        self._origin = Origin((node.name,), str(original), source_line(node))

    # --- buffers --------------------------------------------------------------------------------------------

    def _fresh(self, prefix: str) -> str:
        return f"{prefix}{len(self.buffers)}"

    def add_buffer(
        self,
        sizes: Sequence[IndexLike],
        dtype: torch.dtype,
        strides: Sequence[IndexLike] | None = None,
        kind: str = "temp",
        name: str | None = None,
        **more: Any,
    ) -> View:
        """A new buffer, seen whole."""
        name = name or self._fresh("b")
        own = tuple(map(sz.plain, sizes))
        steps = ix.contiguous_strides(own) if strides is None else tuple(map(sz.plain, strides))
        self.buffers[name] = Buffer(name, dtype, own, steps, kind, **more)
        return self.whole(name)

    def add_sealed(self, like: Tensor, kind: str = "temp", name: str | None = None) -> View:
        """A buffer for a tensor without strided memory: its strides mean nothing."""
        return self.add_buffer(
            tuple(like.shape), like.dtype, kind=kind, name=name, device=str(like.device), sealed=True
        )

    def whole(self, buffer: str) -> View:
        """All of a buffer, as it lies."""
        b = self.buffers[buffer]
        v = loop_vars("d", b.sizes)
        return View(buffer, b.dtype, b.sizes, v, v)

    def _dense_strides(self, like: Tensor | None, sizes: Sequence[IndexLike]) -> Sizes:
        """Eager's strides where ``like`` has this shape and is dense without overlap; contiguous
        otherwise."""
        if like is None or tuple(like.shape) != tuple(sizes):
            return ix.contiguous_strides(sizes)
        return _without_gaps(sizes, tuple(like.stride()))

    def strides_like(self, like: Tensor | None, sizes: Sequence[IndexLike]) -> Sizes:
        """The strides of a buffer made like a fake tensor."""
        return self._dense_strides(like, sizes)

    def one_to_one(self, view: View) -> bool:
        """Whether certainly no two elements of a view are one element of its buffer."""
        found = {v for i in view.indices for v in sz.separate_variables(i)}
        if found.issuperset(v for v in view.vars if v.extent != 1):
            return True
        ref = self.try_strided(view)
        if ref is None or not sz.is_static((*ref.sizes, *ref.strides)):
            return False
        reach = 0
        for stride, size in sorted(zip(map(sz.static, ref.strides), map(sz.static, ref.sizes), strict=True)):
            if size != 1 and stride <= reach:
                return False
            reach += stride * (size - 1)
        return True

    def keeps_strides(self, like: Tensor) -> bool:
        """Whether a buffer made like this tensor has its strides: it has no gaps and no overlaps."""
        return self._dense_strides(like, tuple(like.shape)) == tuple(like.stride())

    # --- symbols --------------------------------------------------------------------------------------------

    def number(self, value: Index | None) -> None:
        """The next graph input is a number: a symbol's value, or one that is baked."""
        if value is not None and value.kind == "sym":  # what is given is better than what is measured
            self.symbols[value] = Measure(len(self.inputs))
        self.inputs.append(None)

    def measure(self, buffer: str) -> None:
        """The symbols that the sizes and strides of the last graph input tell."""
        b = self.buffers[buffer]
        for kind, values in (("size", b.sizes), ("stride", b.strides)):
            for k, e in enumerate(values):
                if isinstance(e, Index) and len(terms := ix.linear_terms(e)[1]) == 1:
                    ((atom, scale),) = terms
                    found = Measure(len(self.inputs) - 1, kind, k, ix.linear_terms(e)[0], scale)
                    if atom.kind == "sym" and (atom not in self.symbols or self._better(atom, found)):
                        self.symbols[atom] = found

    def knows(self, symbol: Index) -> bool:
        """Whether the value of a symbol is known here."""
        return symbol in self.symbols or symbol in self._told

    def tell(self, op: Extern, found: Iterable[tuple[Any, int, int | None]]) -> None:
        """Append a call. ``found`` are its results' sizes: symbols among them that nothing has told get
        theirs from it."""
        binds: dict[Index, tuple[int, int | None]] = {}
        for e, k, dim in found:
            if isinstance(e, Index) and e.kind == "sym" and not self.knows(e):
                if dim is None or op.outs[k] is not None:
                    binds.setdefault(e, (k, dim))
        self._told.update(binds)
        self.ops.append(replace(op, binds=tuple((e, *at) for e, at in binds.items())) if binds else op)

    def length_of_slice(
        self,
        n: IndexLike,
        start: IndexLike | None,
        end: IndexLike | None,
        step: int = 1,
        symbol: Index | None = None,
    ) -> Index:
        """The elements of ``range(n)[start:end:step]``, where data decide the bounds: told by a slice of one
        number seen ``n`` times. ``symbol`` is theirs, if they have one."""
        if symbol is None:
            hi = n if isinstance(n, int) else n.hi
            symbol = ix.symbol(self._fresh("length"), 0, hi)
        aten = torch.ops.aten
        one = self.add_buffer((), torch.uint8)
        options = {"dtype": torch.uint8}
        self.ops.append(Extern((one.buffer,), aten.scalar_tensor.default, (0,), options, (), self._origin))
        row = ViewRef(one.buffer, (n,), (0,), 0, torch.uint8)
        out = self.add_buffer((symbol,), torch.uint8, (0,))
        call = Extern((out.buffer,), aten.slice.Tensor, (row, 0, start, end, step), {}, (), self._origin)
        self.tell(call, [(symbol, 0, 0)])
        return symbol

    def _better(self, symbol: Index, found: Measure) -> bool:
        """A size tells a symbol always, a stride only where there are elements."""
        return self.symbols[symbol].kind == "stride" and found.kind == "size"

    # --- operations -----------------------------------------------------------------------------------------

    def pointwise(
        self,
        sizes: Sequence[IndexLike],
        dtype: torch.dtype,
        f: Callable[[Vars], Expr],
        like: Tensor | None = None,
    ) -> View:
        """``out[v] = f(v)``, cast to ``dtype`` (an implicit rounding). ``like``: the fake tensor whose
        strides to take."""
        v = loop_vars("i", sizes)
        body = ex.cast(f(v), dtype, implicit=True)
        out = self.add_buffer(sizes, dtype, self._dense_strides(like, sizes))
        self.ops.append(Pointwise(out.buffer, v, body, self._origin))
        return out

    def reduce(
        self,
        sizes: Sequence[IndexLike],
        reduce_sizes: Sequence[IndexLike],
        kind: str,
        dtype: torch.dtype,
        f: Callable[[Vars, Vars], Expr],
        like: Tensor | None = None,
    ) -> View:
        """``out[v] = reduction over r of f(v, r)``, cast to ``dtype`` when stored."""
        v = loop_vars("i", sizes)
        r = loop_vars("r", reduce_sizes)
        out = self.add_buffer(sizes, dtype, self._dense_strides(like, sizes))
        self.ops.append(Reduce(out.buffer, v, r, kind, f(v, r), self._origin))
        return out

    def scan(
        self,
        sizes: Sequence[IndexLike],
        axis: int,
        kind: str,
        dtype: torch.dtype,
        f: Callable[[Vars], Expr],
        like: Tensor | None = None,
    ) -> View:
        """``out[v] = combination of f at all points up to v along the axis``, cast to ``dtype``."""
        v = loop_vars("i", sizes)
        out = self.add_buffer(sizes, dtype, self._dense_strides(like, sizes))
        self.ops.append(Scan(out.buffer, v, axis, kind, f(v), self._origin))
        return out

    def scatter(
        self,
        base: View,
        sizes: Sequence[IndexLike],
        kind: str,
        at: Callable[[Vars], Point],
        f: Callable[[Vars], Expr],
    ) -> View:
        """The buffer of ``base``, a whole one, with ``f(v)`` combined into the element at ``at(v)``."""
        v = loop_vars("i", sizes)
        strides = _without_gaps(base.sizes, self.buffers[base.buffer].strides)
        out = self.add_buffer(base.sizes, base.dtype, strides)
        point = tuple(map(ix.as_index, at(v)))
        self.ops.append(Scatter(out.buffer, base.buffer, v, point, kind, f(v), self._origin))
        return out

    def copy(self, view: View, strides: Sequence[IndexLike] | None = None) -> View:
        """The view's elements in a buffer of their own (contiguous unless ``strides`` says otherwise)."""
        v = loop_vars("i", view.sizes)
        out = self.add_buffer(view.sizes, view.dtype, strides)
        if view.dtype not in DTYPES:
            ref = self.try_strided(view)
            if ref is None:
                raise CompileError(f"no kernel moves {view.dtype}", stage="lower", node=str(view))
            clone = torch.ops.aten.clone.default
            self.ops.append(Extern((out.buffer,), clone, (ref,), {}, (), self._origin))
            return out
        self.ops.append(Pointwise(out.buffer, v, view.at(v), self._origin))
        return out

    def strided(self, view: View) -> ViewRef:
        """The view as a strided tensor over its buffer, copying first where strides cannot express it."""
        ref = self.try_strided(view)
        if ref is None:
            key = (view, True)
            if key not in self._copies:
                self._copies[key] = self.copy(view)
            ref = self.try_strided(self._copies[key])
            assert ref is not None
        return ref

    def try_strided(self, view: View) -> ViewRef | None:
        """The view as a strided tensor; ``None`` where its elements do not lie at regular distances."""
        b = self.buffers[view.buffer]
        flat = ix.linearize(view.indices, b.strides, b.offset if b.alias_of else 0)
        strides: list[IndexLike] = []
        for v in view.vars:
            c = ix.coefficient(flat, v)
            if c is None:
                return None
            strides.append(sz.plain(c))
        rest = ix.substitute(flat, dict.fromkeys(view.vars, 0))
        known = rest.is_const or not (rest.free_vars or list(ix.indirect_atoms(rest)))
        if not known or not all(_forward(s, b.strides) for s in strides):
            return None
        if view.numel == 0:
            rest = ix.const(0)
        # A dimension of size 1 may have any stride: give it the one that eager would.
        steps = ix.contiguous_strides(view.sizes)
        strides = [
            st if sz != 1 else _stride_of_one(view.sizes, strides, k, steps) for k, (sz, st) in
            enumerate(zip(view.sizes, strides, strict=True))
        ]  # fmt: skip
        return ViewRef(view.buffer, view.sizes, tuple(strides), sz.plain(rest), view.dtype)

    def extern(
        self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Sequence[Tensor | None]
    ) -> list[View | None]:
        """Call ``target`` through PyTorch. ``outs`` are fake tensors of the results, ``None`` for those
        unused."""
        new_args = tuple(self._extern_arg(a) for a in args)
        new_kwargs = {k: self._extern_arg(a) for k, a in kwargs.items()}
        views: list[View | None] = []
        for o in outs:
            if o is None:
                views.append(None)
            else:
                views.append(self.add_buffer(tuple(o.shape), o.dtype, tuple(o.stride())))
        names = tuple(None if v is None else v.buffer for v in views)
        self.ops.append(Extern(names, target, new_args, new_kwargs, (), self._origin))
        return views

    def random_key(self) -> Expr:
        """A 64-bit key for the random numbers of one operator: each call of the graph draws a new one."""
        view = self.add_buffer((), torch.int64, name=f"key{len(self._keys)}")
        self._keys.append(view.buffer)
        return view.at(())

    def _draw_keys(self) -> tuple[Extern, ...]:
        """The draw of all keys. A buffer for each, so that repeated layers differ in nothing but names."""
        if not self._keys:
            return ()
        origin = Origin((), "aten.randint.low")
        aten, count = torch.ops.aten, len(self._keys)
        keys = self.add_buffer((count,), torch.int64, name="keys")
        options = {"dtype": torch.int64, "device": torch.device("cpu")}
        drawn = (-(1 << 63), (1 << 63) - 1, [count])
        return (
            Extern((keys.buffer,), aten.randint.low, drawn, options, (), origin),
            Extern(tuple(self._keys), aten.unbind.int, (self.strided(keys),), {}, (), origin),
        )

    def _extern_arg(self, a: Any) -> Any:
        if isinstance(a, View):
            return self.strided(a)
        if isinstance(a, (tuple, list)):
            return type(a)(self._extern_arg(x) for x in a)
        return a

    def finish(self, outputs: Sequence[Any]) -> LoopProgram:
        """The frozen program. ``outputs`` are ``ViewRef``s, numbers or ``None``."""
        drawn = self._draw_keys()
        return LoopProgram(
            self.name,
            dict(self.buffers),
            (*drawn, *self.ops),
            tuple(self.inputs),
            tuple(outputs),
            dict(self.constants),
            dict(self.symbols),
        )


def _without_gaps(sizes: Sequence[IndexLike], strides: Sizes) -> Sizes:
    """These strides where they leave no gaps and do not overlap; contiguous ones otherwise."""
    step: IndexLike = 1
    live = [(st, n) for st, n in zip(strides, sizes, strict=True) if n != 1]
    for stride, size in sorted(live, key=lambda t: (sz.hint(t[0]), sz.hint(t[1]))):
        if stride != step:
            return ix.contiguous_strides(sizes)
        step = sz.plain(step * size)
    return strides


def _forward(stride: IndexLike, known: Sequence[IndexLike]) -> bool:
    """Whether a stride is certainly not negative: in itself, or as a multiple of a stride of the buffer."""
    if sz.at_least(stride, 0):
        return True
    return isinstance(stride, Index) and any(
        isinstance(s, Index)
        and (s is stride or (sz.plain(ix.mod(stride, s)) == 0 and sz.at_least(ix.floordiv(stride, s), 0)))
        for s in known
    )


def _stride_of_one(
    sizes: Sequence[IndexLike], strides: Sequence[IndexLike], k: int, steps: Sequence[IndexLike]
) -> IndexLike:
    """A stride for a dimension of size 1: what the dimension inside it spans."""
    for j in range(k + 1, len(sizes)):
        if sizes[j] != 1:
            return sz.plain(ix.maximum(strides[j] * sizes[j], 1))
    return steps[k]
