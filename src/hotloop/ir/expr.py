"""Value expressions: what one element of a result is, as an explicit tree.

What comes in: loads from buffers, constants, index values and operations on them. What goes out: interned
nodes (equal trees are the same object), each with a dtype and the loop variables it depends on. What holds in
between:

* Arithmetic happens in the *compute dtype*. bfloat16 and float16 values are loaded, stored, selected, masked
  and cast, never added: a lowering rule casts them to float32 first and casts the result back.
* A cast that only models eager's rounding of an intermediate (``implicit=True``) may be dropped by
  ``rewrite.py`` where the value stays inside a kernel; a cast that the user wrote may not.
* ``bool`` values are ``torch.bool``; comparisons give them, ``where`` and ``masked`` take them as condition.

The next file is ``loops.py``, which puts expressions under loops.
"""

from __future__ import annotations

import math
import struct
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from . import index as ix
from . import sizes
from .index import Index, IndexLike

__all__ = [
    "OPS",
    "SPECIAL_FUNCTIONS",
    "Expr",
    "OpInfo",
    "bitcast",
    "call",
    "cast",
    "const",
    "index_value",
    "load",
    "local",
    "masked",
    "neutral",
    "own_indices",
    "random",
    "replace_atoms",
    "rewrite_loads",
    "walk",
    "where",
]


@dataclass(frozen=True)
class OpInfo:
    """One elementwise operation: its arity, what dtype it gives, and how a scheduler should think of it.

    ``result`` is ``"same"`` (the dtype of the arguments, which must agree) or ``"bool"``. ``cost`` is about
    the number of simple vector instructions. ``continuous`` is false where a small change of the argument can
    change the result by a jump: such an operation has to see values rounded as eager rounds them. ``takes``
    says what the arguments may be: any number, floats alone, or integers and bools alone.
    """

    arity: int
    result: str = "same"
    cost: int = 1
    continuous: bool = True
    takes: Literal["numbers", "floats", "integers"] = "numbers"


#: Functions of floats that only few programs use. The polynomials are of the argument and the degree.
SPECIAL_FUNCTIONS = (
    "bessel_i0", "bessel_i0_scaled", "bessel_i1", "bessel_i1_scaled", "bessel_k0", "bessel_k0_scaled",
    "bessel_k1", "bessel_k1_scaled", "erfcx", "zeta",
    *(f"{shifted}chebyshev_polynomial_{kind}" for shifted in ("", "shifted_") for kind in "tuvw"),
    "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p",
)  # fmt: skip


def _table() -> dict[str, OpInfo]:
    ops: dict[str, OpInfo] = {}

    def define(names: str, *numbers: Any, **named: Any) -> None:
        for name in names.split():
            ops[name] = OpInfo(*numbers, **named)

    of_floats, of_integers = partial(define, takes="floats"), partial(define, takes="integers")
    define("neg abs square", 1)
    define("floor ceil trunc round sign signbit", 1, continuous=False)
    define("isnan isinf isfinite", 1, "bool", continuous=False)
    define("logical_not", 1, "bool", continuous=False)
    of_integers("bitwise_not", 1, continuous=False)
    of_floats("sqrt rsqrt reciprocal", 1, cost=6)
    of_floats("exp exp2 log log2 log10 sigmoid", 1, cost=12)
    of_floats("expm1 log1p sin cos tanh erf", 1, cost=16)
    of_floats("tan asin acos atan sinh cosh asinh acosh atanh erfc", 1, cost=24)
    of_floats("erfinv lgamma digamma", 1, cost=60)
    for name in SPECIAL_FUNCTIONS:
        of_floats(name, 1 if name.startswith(("bessel", "erfcx")) else 2, cost=100)
    define("add sub mul maximum minimum fmax fmin", 2)  # maximum, minimum propagate NaN (equal: the second)
    of_floats("div", 2, cost=5)  # true division of floats
    define("floordiv truncdiv", 2, cost=12, continuous=False)  # ints and floats; torch's rounding
    define(
        "remainder fmod", 2, cost=12, continuous=False
    )  # remainder: sign of the divisor; fmod: of the dividend
    define("pow", 2, cost=40)
    of_floats("atan2 hypot", 2, cost=40)
    of_floats("copysign nextafter", 2, continuous=False)
    of_integers("bitwise_and bitwise_or bitwise_xor shl shr", 2, continuous=False)
    define("logical_and logical_or logical_xor", 2, "bool", continuous=False)
    define("eq ne lt le gt ge", 2, "bool", continuous=False)
    of_floats("probability", 1, cost=2)  # the argument itself; a fault where it is not within [0, 1]
    of_floats("fma", 3)  # a * b + c, rounded once
    return ops


OPS: dict[str, OpInfo] = _table()


class Expr:
    """One interned value node.

    =============  =====================  ==============================================================
    ``op``         ``args``               ``attr``
    =============  =====================  ==============================================================
    ``load``       ``()``                 ``(buffer name, (index, ...))``: one index per dimension
    ``const``      ``()``                 a Python bool, int, float (NaN and -0.0 are kept apart)
    ``index``      ``()``                 an ``Index``; dtype int64
    ``local``      ``()``                 the name of a value defined by a kernel's ``Let`` or accumulator
    ``random``     ``(key,)``             ``(word, Index counter)``: 32 random bits, see ``random``
    ``cast``       ``(x,)``               ``implicit`` (bool)
    ``bitcast``    ``(x,)``               ``None``
    ``where``      ``(cond, a, b)``       ``None``: both sides are evaluated
    ``masked``     ``(cond, a, b)``       ``None``: ``a`` is evaluated (its loads done) only where cond holds
    name in OPS    by its arity           ``None``
    =============  =====================  ==============================================================
    """

    __slots__ = ("__weakref__", "args", "attr", "dtype", "free_vars", "op")

    op: str
    dtype: torch.dtype
    args: tuple[Expr, ...]
    attr: Any
    free_vars: frozenset[Index]

    @property
    def buffer(self) -> str:
        """The buffer that a load reads."""
        return str(self.attr[0])

    @property
    def indices(self) -> tuple[Index, ...]:
        """The index of a load, one entry a dimension."""
        return self.attr[1]  # type: ignore[no-any-return]

    @property
    def value(self) -> Any:
        """The Python number of a constant."""
        return _decode(self.attr)

    def substitute(self, mapping: Mapping[Index, IndexLike]) -> Expr:
        """Replace loop variables everywhere, inside the indices of loads too."""
        return _substitute(self, mapping, {})

    def as_index(self) -> Index | None:
        """The index that an int64 value is, where it is an index or a constant."""
        return _index_of(self)

    def __repr__(self) -> str:
        return to_text(self)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("value expressions are interned and are not pickled; print them instead")


_interned: weakref.WeakValueDictionary[tuple[Any, ...], Expr] = weakref.WeakValueDictionary()
_NONE: frozenset[Index] = frozenset()


def _make(
    op: str, dtype: torch.dtype, args: tuple[Expr, ...], attr: Any, own: frozenset[Index] = _NONE
) -> Expr:
    key = (op, dtype, args, attr)
    node = _interned.get(key)
    if node is not None:
        return node
    node = object.__new__(Expr)
    node.op = op
    node.dtype = dtype
    node.args = args
    node.attr = attr
    if not args:
        node.free_vars = own
    elif len(args) == 1:
        node.free_vars = args[0].free_vars | own if own else args[0].free_vars
    else:
        node.free_vars = own.union(*(a.free_vars for a in args))
    return _interned.setdefault(key, node)


# --- leaves -------------------------------------------------------------------------------------------------


def _encode(value: bool | int | float) -> tuple[str, Any]:
    # Floats are kept by their bits: 0.0 == -0.0 and nan != nan would confuse interning.
    if isinstance(value, bool):
        return ("b", value)
    if isinstance(value, int):
        return ("i", value)
    return ("f", struct.pack("<d", value))


def _decode(attr: tuple[str, Any]) -> Any:
    return struct.unpack("<d", attr[1])[0] if attr[0] == "f" else attr[1]


def const(value: bool | int | float, dtype: torch.dtype) -> Expr:
    """A constant, converted to what ``dtype`` can hold: integers wrap, floats round to the dtype's
    precision."""
    if dtype is torch.bool:
        value = bool(value)
    elif dtype.is_floating_point:
        value = float(value)
        if dtype is not torch.float64 and math.isfinite(value):
            value = _round_float(value, dtype)
    else:
        bits = torch.iinfo(dtype).bits
        value = int(value) & ((1 << bits) - 1)
        if dtype.is_signed and value >> (bits - 1):
            value -= 1 << bits
    return _make("const", dtype, (), _encode(value))


def _round_float(value: float, dtype: torch.dtype) -> float:
    """``value`` rounded to a narrower dtype, by way of float32 as PyTorch does. No tensors: compiles make
    many."""
    single = _packed("<f", value)
    if dtype is torch.float32 or not math.isfinite(single):
        return single
    if dtype is torch.float16:
        return _packed("<e", single)
    if dtype is not torch.bfloat16:
        raise TypeError(f"no constants of {dtype}")
    (bits,) = struct.unpack("<I", struct.pack("<f", single))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000  # to nearest, ties to even
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _packed(layout: str, value: float) -> float:
    try:
        return float(struct.unpack(layout, struct.pack(layout, value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def load(buffer: str, indices: tuple[IndexLike, ...], dtype: torch.dtype) -> Expr:
    """The element of ``buffer`` at a multi-dimensional index (or, in a kernel, a flat one)."""
    own = tuple(ix.as_index(i) for i in indices)
    free = frozenset().union(*(i.free_vars for i in own)) if own else _NONE
    return _make("load", dtype, (), (buffer, own), free)


def index_value(e: IndexLike, dtype: torch.dtype = torch.int64) -> Expr:
    """An index as a value of an integer dtype."""
    e = ix.as_index(e)
    if e.is_const:
        return const(e.value, dtype)
    node = _make("index", torch.int64, (), e, e.free_vars)
    return node if dtype is torch.int64 else cast(node, dtype)


def neutral(kind: str, dtype: torch.dtype) -> Expr:
    """What changes nothing when another element is combined with it: by ``sum``, ``prod``, ``max``, ``min``,
    ``any`` or ``all``."""
    if kind in ("sum", "prod"):
        return const(0 if kind == "sum" else 1, dtype)
    if dtype is torch.bool or kind in ("any", "all"):
        return const(kind in ("min", "all"), dtype)
    if dtype.is_floating_point:
        return const(-math.inf if kind == "max" else math.inf, dtype)
    info = torch.iinfo(dtype)
    return const(info.min if kind == "max" else info.max, dtype)


def local(name: str, dtype: torch.dtype) -> Expr:
    """A value that a kernel statement has defined under this name."""
    return _make("local", dtype, (), name)


def random(key: Expr, counter: IndexLike, word: int = 0) -> Expr:
    """32 random bits, as an int32: a function of the key and the counter, so that every reader sees the same.

    Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3",
    SC 2011) under the 64-bit ``key`` makes two 32-bit words of each block. The words 0 and 1 are those of the
    block ``counter``, which is not negative; 2 and 3 those of the block ``counter + 2**63``.
    """
    counter = ix.as_index(counter)
    if key.dtype is not torch.int64:
        raise TypeError(f"a random number has an int64 as its key, not {key!r}")
    return _make("random", torch.int32, (key,), (word, counter), counter.free_vars)


# --- operations ---------------------------------------------------------------------------------------------

_LOW = (torch.bfloat16, torch.float16)


def cast(x: Expr, dtype: torch.dtype, implicit: bool = False) -> Expr:
    """``x`` converted to ``dtype`` as eager's ``.to`` does. ``implicit``: models rounding, may be dropped."""
    if x.dtype is dtype:
        return x
    if x.op == "const" and math.isfinite(x.value):
        return const(x.value, dtype)
    return _make("cast", dtype, (x,), implicit)


def bitcast(x: Expr, dtype: torch.dtype) -> Expr:
    """The same bits under another dtype of the same width."""
    if x.dtype is dtype:
        return x
    if x.dtype.itemsize != dtype.itemsize:
        raise ValueError(f"bitcast from {x.dtype} to {dtype} changes the width")
    return _make("bitcast", dtype, (x,), None)


def where(cond: Expr, a: Expr, b: Expr) -> Expr:
    """``a`` where ``cond`` holds, else ``b``; both may be evaluated."""
    if cond.op == "const":
        return a if cond.value else b
    if a is b:
        return a
    _same("where", a, b)
    if a.dtype is torch.bool and a.op == b.op == "const":
        return cond if a.value else call("logical_not", cond)
    return _make("where", a.dtype, (cond, a, b), None)


def masked(cond: Expr, a: Expr, otherwise: Expr) -> Expr:
    """``a`` where ``cond`` holds, else ``otherwise``; loads inside ``a`` are done only where it holds."""
    if cond.op == "const":
        return a if cond.value else otherwise
    _same("masked", a, otherwise)
    if not any(n.op == "load" for n in walk(a)):
        return where(cond, a, otherwise)
    return _make("masked", a.dtype, (cond, a, otherwise), None)


def _same(op: str, a: Expr, b: Expr) -> None:
    if a.dtype is not b.dtype:
        raise TypeError(f"{op} of {a.dtype} and {b.dtype}: {a!r}, {b!r}")


def call(op: str, *args: Expr) -> Expr:
    """Apply an operation of ``OPS``. Raises ``TypeError`` on a wrong arity or dtypes that do not agree."""
    info = OPS.get(op)
    if info is None:
        raise TypeError(f"unknown operation {op!r}")
    if len(args) != info.arity:
        raise TypeError(f"{op} takes {info.arity} arguments, not {len(args)}")
    for a in args[1:]:
        _same(op, args[0], a)
    simple = _SIMPLIFY.get(op)
    if simple is not None:
        got = simple(*args)
        if got is not None:
            return got
    return _make(op, torch.bool if info.result == "bool" else args[0].dtype, args, None)


def _index_of(e: Expr) -> Index | None:
    if e.op == "index":
        return e.attr  # type: ignore[no-any-return]
    if e.op == "const" and e.dtype is torch.int64:
        return ix.const(e.value)
    return None


def _compare(op: str) -> Callable[[Expr, Expr], Expr | None]:
    """Decide comparisons of index values by their ranges: this is what removes the masks of cat and pad."""

    def decide(a: Expr, b: Expr) -> Expr | None:
        ia, ib = _index_of(a), _index_of(b)
        if ia is None or ib is None:
            return None
        d = ia - ib
        lo, hi = d.lo, d.hi
        truth: bool | None = None
        if op in ("lt", "ge"):
            truth = True if hi is not None and hi < 0 else False if lo is not None and lo >= 0 else None
            truth = truth if op == "lt" or truth is None else not truth
        elif op in ("le", "gt"):
            truth = True if hi is not None and hi <= 0 else False if lo is not None and lo > 0 else None
            truth = truth if op == "le" or truth is None else not truth
        else:
            if d.is_const:
                truth = d.value == 0
            elif (lo is not None and lo > 0) or (hi is not None and hi < 0):
                truth = False
            truth = truth if op == "eq" or truth is None else not truth
        return None if truth is None else const(truth, torch.bool)

    return decide


def _and(a: Expr, b: Expr) -> Expr | None:
    for x, y in ((a, b), (b, a)):
        if x.op == "const" and x.dtype is torch.bool:
            return (
                y if x.value and y.dtype is torch.bool else const(False, torch.bool) if not x.value else None
            )
    return a if a is b and a.dtype is torch.bool else None


def _or(a: Expr, b: Expr) -> Expr | None:
    for x, y in ((a, b), (b, a)):
        if x.op == "const" and x.dtype is torch.bool:
            return const(True, torch.bool) if x.value else y if y.dtype is torch.bool else None
    return a if a is b and a.dtype is torch.bool else None


def _int_add(a: Expr, b: Expr) -> Expr | None:
    """Sums of index values stay index values, so that ranges and strides remain visible."""
    ia, ib = _index_of(a), _index_of(b)
    return None if ia is None or ib is None else index_value(ia + ib)


def _int_sub(a: Expr, b: Expr) -> Expr | None:
    ia, ib = _index_of(a), _index_of(b)
    return None if ia is None or ib is None else index_value(ia - ib)


def _mul(a: Expr, b: Expr) -> Expr | None:
    for x, y in ((a, b), (b, a)):
        if x.op == "const" and x.value == 1 and x.dtype is not torch.bool:
            return y  # x * 1 is exact for every dtype, NaN and -0.0 included
    ia, ib = _index_of(a), _index_of(b)
    if ia is not None and ib is not None and (ia.is_const or ib.is_const):
        return index_value(ia * ib)
    return None


def _div(a: Expr, b: Expr) -> Expr | None:
    return a if b.op == "const" and b.value == 1 else None


_SIMPLIFY: dict[str, Callable[..., Expr | None]] = {
    **{op: _compare(op) for op in ("lt", "le", "gt", "ge", "eq", "ne")},
    "logical_and": _and,
    "logical_or": _or,
    "add": _int_add,
    "sub": _int_sub,
    "mul": _mul,
    "div": _div,
}


# --- traversal ----------------------------------------------------------------------------------------------


def own_indices(e: Expr) -> tuple[Index, ...]:
    """The indices that the node itself holds: where it loads, the value that it is, what it counts with."""
    if e.op in ("load", "random"):
        return e.attr[1] if e.op == "load" else (e.attr[1],)
    return (e.attr,) if e.op == "index" else ()


def children(e: Expr) -> tuple[Expr, ...]:
    """The arguments, and the values read by indirect indices inside the node's own index."""
    own = own_indices(e)
    if not own:
        return e.args
    extra = tuple(a.args[0] for i in own for a in ix.indirect_atoms(i))
    return (*e.args, *extra) if extra else e.args


def walk(
    e: Expr, below: Callable[[Expr], Sequence[Expr]] = children, known: Container[Expr] = ()
) -> Iterator[Expr]:
    """Every node once, arguments before users, the payloads of indirect indices included.

    ``below`` says what comes before a node; nodes that are ``known``, and what they alone need, are left out.
    """
    seen: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(e, False)]
    while stack:
        node, done = stack.pop()
        if done:
            yield node
            continue
        if node in seen or node in known:
            continue
        seen.add(node)
        stack.append((node, True))
        stack.extend((child, False) for child in below(node) if child not in seen)


def rebuild(e: Expr, args: tuple[Expr, ...]) -> Expr:
    """The same operation on other arguments, simplified again. The same object where nothing changed."""
    if args == e.args:
        return e
    if e.op == "cast":
        return cast(args[0], e.dtype, e.attr)
    if e.op == "bitcast":
        return bitcast(args[0], e.dtype)
    if e.op == "where":
        return where(*args)
    if e.op == "masked":
        return masked(*args)
    if e.op == "random":
        return random(args[0], e.attr[1], e.attr[0])
    return call(e.op, *args)


def _substitute(e: Expr, mapping: Mapping[Index, IndexLike], memo: dict[Expr, Expr]) -> Expr:
    got = memo.get(e)
    if got is not None:
        return got
    if e.free_vars.isdisjoint(mapping):
        out = e
    elif e.op == "load":
        out = load(e.attr[0], tuple(ix.substitute(i, mapping) for i in e.attr[1]), e.dtype)
    elif e.op == "index":
        out = index_value(ix.substitute(e.attr, mapping))
    else:
        args = tuple(_substitute(a, mapping, memo) for a in e.args)
        if e.op == "random":
            out = random(args[0], ix.substitute(e.attr[1], mapping), e.attr[0])
        else:
            out = rebuild(e, args)
    memo[e] = out
    return out


def rewrite_loads(e: Expr, f: Callable[[Expr], Expr | None]) -> Expr:
    """Replace loads: ``f(load)`` gives the new expression, or ``None`` to keep it.

    Loads inside indirect indices are replaced too, before the load that uses them is shown to ``f``.
    """
    memo: dict[Expr, Expr] = {}

    def index(i: Index) -> Index:
        atoms = list(ix.indirect_atoms(i))
        if not atoms:
            return i
        return replace_atoms(i, lambda a: ix.indirect(visit(a.args[0]), a.args[1], a.args[2]))

    def visit(n: Expr) -> Expr:
        got = memo.get(n)
        if got is not None:
            return got
        if n.op == "load":
            new = load(n.attr[0], tuple(index(i) for i in n.attr[1]), n.dtype)
            replaced = f(new)
            out = new if replaced is None else replaced
        elif n.op == "index":
            out = index_value(index(n.attr))
        elif n.op == "random":
            out = random(visit(n.args[0]), index(n.attr[1]), n.attr[0])
        else:
            out = rebuild(n, tuple(visit(a) for a in n.args))
        memo[n] = out
        return out

    return visit(e)


def replace_atoms(i: IndexLike, f: Callable[[Index], Index]) -> Index:
    """Rebuild an index with every outermost indirect atom replaced."""
    if isinstance(i, int) or i.kind in ("const", "var", "sym"):
        return ix.as_index(i)
    if i.kind == "indirect":
        return f(i)
    if i.kind == "sum":
        out = ix.const(i.args[0])
        for atom, c in i.args[1]:
            out = out + replace_atoms(atom, f) * c
        return out
    parts = [replace_atoms(a, f) for a in i.args]
    combine = {"div": ix.floordiv, "mod": ix.mod, "min": ix.minimum, "max": ix.maximum, "mul": ix.mul}[i.kind]
    out = parts[0]
    for p in parts[1:]:
        out = combine(out, p)
    return out


def depth(e: Expr) -> int:
    """How many nodes lie on the longest way down to a leaf."""
    found: dict[Expr, int] = {}
    for n in walk(e):
        found[n] = 1 + max((found[child] for child in children(n)), default=0)
    return found[e]


def index_length(e: IndexLike) -> int:
    """How many nodes the index has when it is written out: what is shared counts each time.

    An index into an index counts with all that is read for it.
    """
    memo: dict[Any, int] = {}

    def visit(node: Any) -> int:
        if node in memo:
            return memo[node]
        if isinstance(node, Expr):
            parts = [*node.args, *(node.indices if node.op == "load" else ())]
        elif not isinstance(node, Index) or node.kind in ("const", "sym", "var"):
            return 1
        else:
            parts = [atom for atom, _ in node.args[1]] if node.kind == "sum" else list(node.args)
        memo[node] = 1 + sum(map(visit, parts))
        return memo[node]

    return visit(e)


def loads(e: Expr) -> Iterator[Expr]:
    """Every distinct load in the tree, those inside indirect indices included."""
    return (n for n in walk(e) if n.op == "load")


def symbols(e: Expr) -> Iterator[Index]:
    """Every size symbol in the tree."""
    for n in walk(e):
        own = n.attr[1] if n.op == "load" else (n.attr,) if n.op == "index" else ()
        for i in (n.attr[1],) if n.op == "random" else own:
            if i.symbolic:
                yield from sizes.symbols(i)


def index_symbols(i: Index) -> Iterator[Index]:
    """Every size symbol in an index, those in what it reads included."""
    yield from sizes.symbols(i)
    for atom in ix.indirect_atoms(i):
        yield from symbols(atom.args[0])


def cost(*values: Expr) -> int:
    """About how many simple vector instructions one element takes, shared nodes counted once."""
    total = 0
    for n in dict.fromkeys(n for e in values for n in walk(e)):
        info = OPS.get(n.op)
        if info is not None:
            total += info.cost
        elif n.op in ("where", "masked", "load") or (n.op == "cast" and not n.attr):
            total += 1  # a cast that models rounding will mostly be dropped
        elif n.op == "random":
            total += RANDOM_COST
    return total


#: The 20 rounds of a random number, two words of which cost one.
RANDOM_COST = 40


_SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.bool: "bool", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32",
    torch.int64: "i64", torch.uint8: "u8",
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """``f32``, ``i64``...: how a dtype is written in dumps and generated code."""
    return _SHORT.get(dtype) or str(dtype).removeprefix("torch.")


def to_text(e: Expr) -> str:
    """A tree on one line. Nodes used more than once inside a large tree get names,
    ``let t0 = ... in ...``."""
    names: dict[Expr, str] = {}
    parts: list[str] = []
    order = list(walk(e))
    if len(order) > _PLAIN_NODES:  # written out in full, a shared tree takes exponential space
        uses: dict[Expr, int] = {}
        for n in order:
            for c in n.args:
                uses[c] = uses.get(c, 0) + 1
        for n in order:
            if uses.get(n, 0) > 1 and n.args:
                parts.append(f"let t{len(names)} = {_node_text(n, names)} in ")
                names[n] = f"t{len(names)}"
    return "".join(parts) + _node_text(e, names)


_PLAIN_NODES = 40


def _node_text(e: Expr, names: Mapping[Expr, str]) -> str:
    if e in names:
        return names[e]
    if e.op == "load":
        return f"{e.buffer}[{', '.join(map(repr, e.indices))}]"
    if e.op == "const":
        return f"{e.value}:{dtype_name(e.dtype)}"
    if e.op == "index":
        return f"index({e.attr!r})"
    if e.op == "local":
        return str(e.attr)
    inner = ", ".join(_node_text(a, names) for a in e.args)
    if e.op == "random":
        return f"random{e.attr[0]}({inner}, {e.attr[1]!r})"
    if e.op == "cast":
        return f"{'round' if e.attr else 'cast'}_{dtype_name(e.dtype)}({inner})"
    if e.op == "bitcast":
        return f"bitcast_{dtype_name(e.dtype)}({inner})"
    return f"{e.op}({inner})"
