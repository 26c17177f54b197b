"""The border to PyTorch's symbolic sizes: sympy is met here and nowhere else.

What comes in: a graph whose fake tensors have SymInts for sizes. What goes out: the same graph with ``Meta``
in the place of each fake tensor, whose sizes and strides are numbers or index expressions (``ir/index.py``),
and with index or value expressions in the place of symbolic numbers. What holds in between: a symbol is one
``ix.symbol`` for the whole graph, with the bounds that the guards give, ``sizes.MOST`` where they give none,
and the traced value as its hint; what
these expressions cannot say raises ``InexpressibleError``, and the graph is compiled for each set of sizes
instead.

The next file is ``builder.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from hotloop import compat
from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir import sizes as sz
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index, IndexLike

__all__ = ["InexpressibleError", "Meta", "Opaque", "Symbols", "describe_symbols", "is_tensor", "said"]


class InexpressibleError(Exception):
    """A size that index expressions cannot say."""


@dataclass(frozen=True)
class Opaque:
    """A number that has no expression of symbols: a float read from a tensor."""

    reason: str


class Meta:
    """What lowering asks of a fake tensor, with index expressions for sizes; the rest is the tensor's own."""

    def __init__(
        self,
        tensor: torch.Tensor,
        shape: tuple[IndexLike, ...],
        strides: tuple[IndexLike, ...],
        offset: IndexLike,
    ) -> None:
        self.tensor = tensor
        self.shape = shape
        self._strides = strides
        self._offset = offset

    def stride(self, dim: int | None = None) -> Any:
        """The strides, or one of them."""
        return self._strides if dim is None else self._strides[dim]

    def size(self, dim: int | None = None) -> Any:
        """The sizes, or one of them."""
        return self.shape if dim is None else self.shape[dim]

    def storage_offset(self) -> IndexLike:
        """Where in its storage it begins."""
        return self._offset

    def numel(self) -> IndexLike:
        """The number of elements."""
        return sz.product(self.shape)

    def dim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    ndim = property(dim)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


def is_tensor(val: Any) -> TypeGuard[torch.Tensor | Meta]:
    """Whether a node's value is a tensor, with symbolic sizes or without."""
    return isinstance(val, (torch.Tensor, Meta))


def is_sealed(val: Any) -> bool:
    """Whether a node's value is a tensor without strided memory, a sparse one: only calls can read it."""
    return is_tensor(val) and val.layout is not torch.strided


def said(value: Any) -> Any:
    """A number, where the host program can compute it. Raises ``InexpressibleError`` where it cannot."""
    if isinstance(value, Opaque):
        raise InexpressibleError(value.reason)
    if isinstance(value, Expr) and any(True for _ in ex.loads(value)):
        raise InexpressibleError(f"{value} is read from a tensor outside of a kernel")
    return value


class Symbols:
    """The symbols of one graph, and the expressions made of them.

    ``assumes``: bounds of what only data tell are known. Not where they are about to be checked.
    """

    def __init__(self, assumes: bool = True) -> None:
        self._assumes = assumes
        self.known: dict[str, Index] = {}
        self.computed: dict[Index, Expr] = {}
        self._memo: dict[Any, Index] = {}

    # --- graphs ---------------------------------------------------------------------------------------------

    def graph(self, gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """A copy of the graph that speaks of sizes in index expressions."""
        graph = torch.fx.Graph()
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in gm.graph.nodes:
            copy = copies[node] = graph.node_copy(node, copies.__getitem__)
            if isinstance(node.meta.get("val"), torch.SymInt):
                copy.meta["told"] = self.told(node.meta["val"])
            for key in ("val", "eager_val"):
                if key in node.meta:
                    copy.meta[key] = self.value(node.meta[key])
        return torch.fx.GraphModule(gm, graph)

    def value(self, val: Any) -> Any:
        """A node's value, or an argument."""
        if isinstance(val, torch.Tensor):
            return self._meta(val)
        if isinstance(val, torch.SymInt):
            return self.size(val)
        if isinstance(val, (torch.SymFloat, torch.SymBool)):
            try:
                return self._scalar(val)
            except InexpressibleError as error:
                return Opaque(str(error))
        if isinstance(val, (tuple, list)):
            return type(val)(self.value(v) for v in val)
        return val

    def _meta(self, val: torch.Tensor) -> Any:
        shape = tuple(self.size(n) for n in val.shape)
        if is_sealed(val):
            return Meta(val, shape, (), 0)
        strides = tuple(self.size(s) for s in val.stride())
        return Meta(val, shape, strides, self.size(val.storage_offset()))

    # --- integers -------------------------------------------------------------------------------------------

    def size(self, x: Any) -> IndexLike:
        """An int, or a SymInt as an index expression (an int again where the guards leave one value).

        Whether a size is 1 decides what broadcasts: there the guards are asked, also for a sum or quotient.
        """
        if not isinstance(x, torch.SymInt):
            return int(x)
        e = sz.plain(self._index(compat.symbolic_expression(x), x))
        if isinstance(e, Index) and e.kind != "sym" and sz.hint(e) == 1 and compat.same_sizes((x,), (1,)):
            return 1
        return e

    def _index(self, e: Any, x: Any) -> Index:
        got = self._memo.get(e)
        if got is None:
            got = self._memo[e] = self._new_index(e, x)
        return got

    def _new_index(self, e: Any, x: Any) -> Index:
        if e.is_Integer:
            return ix.const(int(e))
        if e.is_Symbol:
            return self._symbol(e, x)
        name = type(e).__name__
        if name == "Pow" and e.args[1].is_Integer and 0 < int(e.args[1]) <= 8:
            return ix.as_index(sz.product([self._index(e.args[0], x)] * int(e.args[1])))
        if name in _ROUNDED:
            return self._computed(name, e, x)
        rule = _INTEGER.get(name)
        if rule is None:
            raise InexpressibleError(f"the size {e} has no index expression")
        args = [self._index(a, x) for a in e.args]
        if name in _DIVISIONS and any(a.lo is None or a.lo < 1 for a in args[1:]):
            raise InexpressibleError(f"the divisor in {e} may be zero or negative")
        return rule(args)

    def _symbol(self, e: Any, x: Any) -> Index:
        name = str(e)
        if name not in self.known:
            if not name.isidentifier():
                raise InexpressibleError(f"{name} is no name for a size")
            lo, hi, hint = compat.symbol_facts(x, e)
            if hint is None and not self._assumes:
                lo = hi = None
            elif hint is not None and hint <= sz.MOST and lo is not None and lo >= 0:
                hi = sz.MOST if hi is None else min(hi, sz.MOST)
            self.known[name] = ix.symbol(name, lo, hi, hint)
        return self.known[name]

    def _computed(self, name: str, e: Any, x: Any) -> Index:
        """A size that is computed in floating point: a symbol of its own."""
        value = ex.cast(_ROUNDED[name](self._number(e.args[0], x)), torch.int64)
        symbol = ix.symbol(f"n{len(self.computed)}", *compat.bounds(x, e))
        self.computed[symbol] = value
        return symbol

    # --- floats and truth values ----------------------------------------------------------------------------

    def told(self, x: Any) -> Index | None:
        """The symbol that a number is, before it was found to equal something else."""
        e = compat.asserted_expression(x)
        return self._symbol(e, x) if getattr(e, "is_Symbol", False) else None

    def _scalar(self, x: Any) -> Any:
        if isinstance(x, torch.SymBool):
            # What a program asserts of data is known to hold, once it has been checked.
            own = Symbols(assumes=False)
            return own._value(compat.asserted_expression(x), x)
        e = compat.symbolic_expression(x)
        return float(e) if e.is_number else self._value(e, x)

    def _value(self, e: Any, x: Any) -> Expr:
        """A float as a float64 value, a comparison as a bool."""
        if e in (True, False):
            return ex.const(bool(e), torch.bool)
        name = type(e).__name__
        if name in _COMPARISONS:
            a, b = (self._number(arg, x) for arg in e.args)
            if a.dtype is not b.dtype:
                a, b = ex.cast(a, torch.float64), ex.cast(b, torch.float64)
            return ex.call(_COMPARISONS[name], a, b)
        if name in ("And", "Or"):
            parts = [self._value(arg, x) for arg in e.args]
            out = parts[0]
            for p in parts[1:]:
                out = ex.call(f"logical_{name.lower()}", out, p)
            return out
        if name == "Not":
            return ex.call("logical_not", self._value(e.args[0], x))
        rule = _FLOAT.get(name)
        if rule is None or (e.is_Symbol and not e.is_integer):
            raise InexpressibleError(f"the number {e} has no expression")
        return rule([ex.cast(self._number(arg, x), torch.float64) for arg in e.args])

    def _number(self, e: Any, x: Any) -> Expr:
        if e.is_integer:
            return ex.index_value(self._index(e, x))
        if e.is_number:
            return ex.const(float(e), torch.float64)
        return self._value(e, x)


def describe_symbols(gm: torch.fx.GraphModule) -> str:
    """The sizes of a graph and what is known of them, as text: what the code of a graph depends on."""
    symbols = Symbols()
    sizes: list[Any] = []
    for node in gm.graph.nodes:
        val = symbols.value(node.meta.get("val"))
        sizes.append((val.shape, val.stride(), val.storage_offset()) if isinstance(val, Meta) else "")
        if not isinstance(val, (Meta, torch.Tensor)):
            sizes.append(val)
    return f"{[v.args for v in symbols.known.values()]} {sizes}"


def _sum(args: Sequence[Index]) -> Index:
    out = ix.const(0)
    for a in args:
        out = out + a
    return out


def _chain(f: Callable[[IndexLike, IndexLike], Index]) -> Callable[[Sequence[Index]], Index]:
    def combine(args: Sequence[Index]) -> Index:
        out = args[0]
        for a in args[1:]:
            out = f(out, a)
        return out

    return combine


_DIVISIONS = ("FloorDiv", "CleanDiv", "Mod", "PythonMod", "ModularIndexing")
_INTEGER: Mapping[str, Callable[[Sequence[Index]], Index]] = {
    "Add": _sum,
    "Mul": lambda args: ix.as_index(sz.product(args)),
    "FloorDiv": _chain(ix.floordiv),
    "CleanDiv": _chain(ix.floordiv),
    "Mod": _chain(ix.mod),
    "PythonMod": _chain(ix.mod),
    "ModularIndexing": lambda args: ix.mod(ix.floordiv(args[0], args[1]), args[2]),
    "Max": _chain(ix.maximum),
    "Min": _chain(ix.minimum),
    "Identity": lambda args: args[0],
}
_ROUNDED: Mapping[str, Callable[[Expr], Expr]] = {
    "TruncToInt": lambda x: x,
    "FloorToInt": lambda x: ex.call("floor", x),
    "CeilToInt": lambda x: ex.call("ceil", x),
    "RoundToInt": lambda x: ex.call("round", x),
}
_COMPARISONS = {
    "Equality": "eq",
    "Unequality": "ne",
    "StrictLessThan": "lt",
    "LessThan": "le",
    "StrictGreaterThan": "gt",
    "GreaterThan": "ge",
}


def _fold(op: str) -> Callable[[Sequence[Expr]], Expr]:
    def combine(args: Sequence[Expr]) -> Expr:
        out = args[0]
        for a in args[1:]:
            out = ex.call(op, out, a)
        return out

    return combine


def _unary(op: str) -> Callable[[Sequence[Expr]], Expr]:
    return lambda args: ex.call(op, args[0])


def _power(args: Sequence[Expr]) -> Expr:
    base, exponent = args
    if exponent.op == "const" and exponent.value == 0.5:
        return ex.call("sqrt", base)
    if exponent.op == "const" and exponent.value == -1:
        return ex.call("div", ex.const(1.0, torch.float64), base)
    return ex.call("pow", base, exponent)


_FLOAT: Mapping[str, Callable[[Sequence[Expr]], Expr]] = {
    "ToFloat": lambda args: args[0],
    "IntTrueDiv": _fold("div"),
    "FloatTrueDiv": _fold("div"),
    "FloatPow": _power,
    "Pow": _power,
    "Add": _fold("add"),
    "Mul": _fold("mul"),
    "Max": _fold("maximum"),
    "Min": _fold("minimum"),
    **{f"OpaqueUnaryFn_{n}": _unary(n) for n in ("sqrt", "exp", "log", "cos", "sin", "tanh")},
}
