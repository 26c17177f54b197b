"""Value expressions as C++: for one element, or for all lanes of a vector loop.

What comes in: an ``Expr`` and the place in the kernel where its value is wanted. What goes out: C++ text, and
before it the declarations of what is used more than once. What holds in between:

* A value is *uniform* where it is the same in all lanes: then it is computed once, as a scalar.
* Under a ``masked`` the loads of the lanes switched off are not done.
* A declaration stands in the innermost block that is open, and is found again from that block and those
  inside it.

The next file is ``cpp_stmt.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from hotloop.errors import CompileError
from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index, IndexLike

from .cpp_index import IndexPrinter, fits_32_bits
from .cpp_text import vocabulary
from .cpp_writer import ADD, LOW, MUL, UNARY, Code, Writer, literal, register, vector_type

__all__ = ["COMPARE", "DIVISIONS", "ExprPrinter", "Frame", "Lanes", "Local", "narrow"]

#: Longer operands get a name, so that a line stays readable.
MAX_OPERAND = 72

_NATIVE = (torch.float32, torch.float64, torch.int32, torch.int64)
_SMALL = (torch.bfloat16, torch.float16)
_OPERATORS = {"add": ("+", ADD), "sub": ("-", ADD), "mul": ("*", MUL), "div": ("/", MUL)}
_BITS = {"bitwise_and": ("&", "bit_and"), "bitwise_or": ("|", "bit_or"), "bitwise_xor": ("^", "bit_xor")}
_MASKS = {
    "bitwise_and": "mask_and", "bitwise_or": "mask_or", "bitwise_xor": "mask_xor", "logical_and": "mask_and",
    "logical_or": "mask_or", "logical_xor": "mask_xor", "mul": "mask_and", "minimum": "mask_and",
    "fmin": "mask_and",
    "add": "mask_or", "maximum": "mask_or", "fmax": "mask_or", "ne": "mask_xor",
}  # fmt: skip
_RENAMED = {"shl": "lshift", "shr": "rshift", "bitwise_not": "bit_not"}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
#: Operations whose integer form reports a zero divisor.
DIVISIONS = {"floordiv": "floor_div", "truncdiv": "trunc_div", "remainder": "remainder", "fmod": "fmod"}
_INTEGRAL = ("floor", "ceil", "trunc", "round")  # of an integer: nothing to do


@dataclass(frozen=True)
class Local:
    """A name that a statement defined: whether it holds one value a lane, its spelling in each vector, and
    the expression it stands for, if it is one."""

    vector: bool
    names: tuple[str, ...]
    value: Expr | None = None

    def name(self, group: int) -> str:
        """The spelling in one of several vectors."""
        return self.names[group] if len(self.names) > 1 else self.names[0]


@dataclass(frozen=True)
class Lanes:
    """How the loop at hand runs.

    Arguments:
        count: lanes of a vector.
        var: the vector loop's variable; ``None`` where one element is computed at a time.
        groups: vectors that one iteration computes side by side.
        live: in the last iteration of a loop, the C++ text of how many lanes count; else ``None``.
    """

    count: int
    var: Index | None = None
    groups: int = 1
    live: str | None = None


@dataclass
class Frame:
    """The values that have a name in an open block. ``uses``: how often its statements use each node."""

    bound: dict[tuple[object, ...], tuple[Expr, Code]] = field(default_factory=dict)
    uses: Counter[Expr] = field(default_factory=Counter)


def _index_of(e: Expr) -> Index | None:
    if e.op == "index":
        return e.attr  # type: ignore[no-any-return]
    return ix.const(e.value) if e.op == "const" and e.dtype is torch.int64 else None


def narrow(e: Expr) -> Index | None:
    """The index that an int64 value is, where it can be computed in 32 bits."""
    i = _index_of(e)
    return i if i is not None and fits_32_bits(i) else None


class ExprPrinter:
    """Prints the expressions of one kernel; ``cpp_stmt.py`` moves it from loop to loop."""

    def __init__(self, writer: Writer, dtypes: Mapping[str, torch.dtype], taken: set[str]) -> None:
        self.writer = writer
        self.dtypes = dict(dtypes)
        self.locals: dict[str, Local] = {}
        self.lanes = Lanes(1)
        self.group = 0
        self.frames: list[Frame] = [Frame()]
        self._taken = taken
        self._guard: Code | None = None
        self._vector_memo: dict[Expr, bool] = {}

    # --- what is known about a node -------------------------------------------------------------------------

    def set_lanes(self, lanes: Lanes) -> None:
        """Move to another loop."""
        self.lanes, self.group = lanes, 0
        self._vector_memo = {}

    def is_vector(self, e: Expr) -> bool:
        """Whether the value differs from lane to lane."""
        if self.lanes.var is None:
            return False
        got = self._vector_memo.get(e)
        if got is None:
            if e.op == "local":
                got = self.locals[e.attr].vector
            else:
                own = self.lanes.var in e.free_vars
                got = own or any(self.is_vector(c) for c in ex.children(e))
            self._vector_memo[e] = got
        return got

    def uniform_index(self, e: Index) -> bool:
        """Whether a position is the same in all lanes."""
        if self.lanes.var is None:
            return True
        if self.lanes.var in e.free_vars:
            return False
        return not any(self.is_vector(a.args[0]) for a in ix.indirect_atoms(e))

    def contiguous(self, e: Index) -> IndexLike | None:
        """The step of a position from lane to lane, where it is the same for all."""
        assert self.lanes.var is not None
        c = ix.coefficient(e, self.lanes.var)
        if c is None or any(self.is_vector(a.args[0]) for a in ix.indirect_atoms(e)):
            return None
        return c

    def index(self) -> IndexPrinter:
        """The printer of indices for the place at hand."""
        n = self.lanes.count
        return IndexPrinter(self.lanes.var, self.group * n, n, self.uniform_index, self._indirect)

    # --- names ----------------------------------------------------------------------------------------------

    def fresh(self, stem: str) -> str:
        """A name nobody has: ``t0``, ``t1``..."""
        k = 0
        while f"{stem}{k}" in self._taken:
            k += 1
        self._taken.add(f"{stem}{k}")
        return f"{stem}{k}"

    def _key(self, e: Expr, vector: bool, extra: object = None) -> tuple[object, ...]:
        reads = any(n.op == "load" for n in ex.walk(e))
        guard = self._guard.text if self._guard is not None and reads else None
        return (e, self.group if vector else None, guard, extra)

    def _find(self, key: tuple[object, ...]) -> Code | None:
        for frame in reversed(self.frames):
            got = frame.bound.get(key)
            if got is not None:
                return got[1]
        return None

    def bind(
        self, e: Expr, code: Code, key: tuple[object, ...], kind: str | None = None, stem: str = "t"
    ) -> Code:
        """Give a value a name in the innermost block."""
        name = self.fresh(stem)
        if kind is None:
            lanes = self.lanes.count if code.vector else 1
            kind = "auto" if code.vector and e.dtype is torch.bool else vector_type(e.dtype, lanes)
        self.writer.line(f"const {kind} {name} = {code.text};")
        bound = Code(name, vector=code.vector)
        self.frames[-1].bound[key] = (e, bound)
        return bound

    def define(self, e: Expr, code: Code) -> None:
        """A value has been computed already, as ``code``."""
        self.frames[-1].bound[self._key(e, code.vector)] = (e, code)

    def forget(self, buffer: str) -> None:
        """A buffer was written: what was read from it before is not its content any more."""
        for frame in self.frames:
            for key, (e, _) in list(frame.bound.items()):
                if any(n.op == "load" and n.buffer == buffer for n in ex.walk(e)):
                    del frame.bound[key]

    def hoist(self, e: Expr) -> None:
        """Name a value here, before the loop that uses it."""
        for group in range(self.lanes.groups if self.is_vector(e) else 1):
            self.group = group
            key = self._key(e, self.is_vector(e))
            if self._find(key) is None:
                self.bind(e, self._node(e), key)
        self.group = 0

    # --- values ---------------------------------------------------------------------------------------------

    def value(self, e: Expr, root: bool = False) -> Code:
        """The value as C++. ``root``: it is a whole statement's, and may be long."""
        if e.op in ("const", "local"):
            return self._node(e)
        vector = self.is_vector(e)
        key = self._key(e, vector)
        found = self._find(key)
        if found is not None:
            return found
        code = self._node(e)
        shared = self.frames[-1].uses[e] > 1 and not (e.op == "index" and code.prec >= MUL)
        if shared or (not root and len(code.text) > MAX_OPERAND):
            return self.bind(e, code, key)
        return code

    def vector(self, e: Expr, root: bool = False) -> str:
        """The value as a vector, whether or not it differs from lane to lane."""
        return self.spread(self.value(e, root), e.dtype)

    def spread(self, code: Code, dtype: torch.dtype) -> str:
        """One value in all lanes, where it is not a vector already."""
        n = self.lanes.count
        if code.vector or self.lanes.var is None:
            return code.text
        return (
            f"mask_splat<{n}>({code.text})"
            if dtype is torch.bool
            else f"splat<{vector_type(dtype, n)}>({code.text})"
        )

    def _beside(self, code: Code, dtype: torch.dtype, other: Code) -> Code:
        """One side of a comparison. The compiler spreads a scalar over the lanes of the other side itself,
        but a choice of short integers it takes for an ``int``, which does not fit."""
        choice = other.vector and not code.vector and code.prec == LOW
        return Code(self.spread(code, dtype)) if choice and dtype.itemsize < 4 else code

    def _node(self, e: Expr) -> Code:
        if e.op == "const":
            return literal(e.value, e.dtype)
        if e.op == "local":
            got = self.locals[e.attr]
            return Code(got.name(self.group), vector=got.vector)
        if e.op == "index":
            return self.index().vector(e.attr, "i64") if self.is_vector(e) else self.index().scalar(e.attr)
        if e.op == "load":
            return self._load(e)
        if e.op == "cast":
            return self._cast(e)
        if e.op == "bitcast":
            return self._bitcast(e)
        if e.op == "where":
            return self._select(e, self.value(e.args[0]), self.value(e.args[1]), self.value(e.args[2]))
        if e.op == "masked":
            return self._masked(e)
        if e.op == "random":
            return self._random(e)
        return self._call(e)

    # --- memory ---------------------------------------------------------------------------------------------

    def pointer(self, buffer: str, i: Index) -> str:
        """``in0 + 1024 * i0 + i1``."""
        text = self.index().scalar(i)
        return buffer if text.text == "0" else f"{buffer} + {text.at(ADD)}".replace("+ -", "- ")

    def element(self, buffer: str, i: Index) -> str:
        """One element of a buffer, as a value in a register."""
        dtype = self.dtypes[buffer]
        if dtype is torch.bool:
            return f"load_mask<1>({self.pointer(buffer, i)})"
        if dtype in _SMALL:
            return f"load<1>({self.pointer(buffer, i)})"
        return f"{buffer}[{self.index().scalar(i).text}]"

    def _zero(self, dtype: torch.dtype, vector: bool) -> str:
        if not vector:
            return literal(0, dtype).text
        return f"{vector_type(dtype, self.lanes.count)}{{}}"

    def _load(self, e: Expr, chosen: bool = False) -> Code:
        """A load. ``chosen``: it stands where it is evaluated only if the guard holds."""
        i = e.indices[0]
        guard = None if chosen else self._guard
        if not self.is_vector(e):
            text = self.element(e.buffer, i)
            if guard is None:
                return Code(text)
            test = f"any({guard.text})" if guard.vector else guard.text
            return Code(f"{test} ? {text} : {self._zero(e.dtype, False)}", LOW)
        text = self._load_lanes(e.buffer, i)
        if guard is not None and not guard.vector:
            if e.dtype is torch.bool:
                text = f"canonical({text})"  # both sides of a choice have one type
            return Code(f"{guard.text} ? {text} : {self._zero(e.dtype, True)}", LOW, True)
        return Code(text, vector=True)

    def _load_lanes(self, buffer: str, i: Index) -> str:
        n, live = self.lanes.count, self.lanes.live
        guard = self._guard if self._guard is not None and self._guard.vector else None
        boolean = self.dtypes[buffer] is torch.bool
        step = self.contiguous(i)
        if step == 1 and guard is None:
            name = "load_mask" if boolean else "load"
            if live is None:
                return f"{name}<{n}>({self.pointer(buffer, i)})"
            return f"{name}_partial<{n}>({self.pointer(buffer, i)}, {live})"
        if step == 1 and guard is not None:
            text = f"load_where<{n}>({self.pointer(buffer, i)}, {guard.text})"
        elif step is not None and guard is None:
            text = f"load_strided<{n}>({self.pointer(buffer, i)}, {self._step(step)})"
        else:
            text = f"gather<{n}>({self._lane_positions(buffer, i, guard)})"
        return f"to_mask({text})" if boolean else text

    def _step(self, step: IndexLike) -> str:
        return str(step) if isinstance(step, int) else self.index().scalar(step).text

    def _lane_positions(self, buffer: str, i: Index, guard: Code | None) -> str:
        """The arguments of a gather or scatter: a pointer and positions from there."""
        if guard is not None:
            # A lane that is switched off reads element 0, which is there.
            elem = "i32" if fits_32_bits(i) else "i64"
            kind = f"{elem}x{self.lanes.count}"
            return f"{buffer}, select({guard.text}, {self.index().vector(i, elem).text}, {kind}{{}})"
        constant, terms = ix.linear_terms(i)
        base, lanes = ix.const(constant), ix.const(0)
        for atom, c in terms:
            if self.uniform_index(atom):
                base = base + atom * c
            else:
                lanes = lanes + atom * c
        elem = "i32" if fits_32_bits(lanes) else "i64"
        return f"{self.pointer(buffer, base)}, {self.index().vector(lanes, elem).text}"

    def store(self, buffer: str, i: Index, e: Expr) -> str:
        """The statement ``buffer[i] = e``."""
        dtype = self.dtypes[buffer]
        if e.op == "cast" and e.dtype in _SMALL and e.args[0].dtype is torch.float32:
            e = e.args[0]  # a store rounds anyway
        boolean = dtype is torch.bool
        if self.lanes.var is None:
            text = self.value(e, root=True).text
            if not boolean and dtype not in _SMALL:
                return f"{buffer}[{self.index().scalar(i).text}] = {text};"
            return f"{'store_mask' if boolean else 'store'}<1>({self.pointer(buffer, i)}, {text});"
        n, live = self.lanes.count, self.lanes.live
        text = self.vector(e, root=True)
        if self.uniform_index(i):
            raise CompileError(f"every lane stores to {buffer}[{i}]", stage="codegen")
        step = self.contiguous(i)
        if step == 1:
            name = "store_mask" if boolean else "store"
            if live is None:
                return f"{name}<{n}>({self.pointer(buffer, i)}, {text});"
            return f"{name}_partial<{n}>({self.pointer(buffer, i)}, {text}, {live});"
        if boolean:
            text = f"mask_to<u8>({text})"
        if step is not None:
            return f"store_strided<{n}>({self.pointer(buffer, i)}, {self._step(step)}, {text});"
        return f"scatter<{n}>({self._lane_positions(buffer, i, None)}, {text});"

    def _indirect(self, atom: Index, elem: str | None) -> Code:
        """The value of an index that is read from memory, tested where it has to be."""
        payload, size, checked = atom.args
        vector = elem is not None and self.is_vector(payload)
        guard = self._guard if checked else None  # what is tested depends on where it is
        key = self._key(payload, vector, (atom, elem, None if guard is None else guard.text))
        found = self._find(key)
        if found is not None:
            return found
        code = self.value(payload)
        name = register(payload.dtype)
        text = code.text
        if vector and name != elem:
            text = f"cast<{elem}>({text})"
        elif not vector and name != "i64":
            text = f"i64({text})"
        if checked:
            if guard is not None and vector:
                zeros = f"{elem}x{self.lanes.count}{{}}"
                lanes, choice = (f"select({guard.text}, {text}, {zeros})", f"{guard.text} ? {text} : {zeros}")
                text = lanes if guard.vector else choice
            elif guard is not None:
                test = f"any({guard.text})" if guard.vector else guard.text
                text = f"{test} ? {text} : 0"
            test = "in_range_wrapped" if self._wraps(payload) else "in_range"
            text = f"{test}({text}, {self.index().scalar(size).text}, &error)"
        kind = "const" if not vector else f"{elem}x{self.lanes.count}"
        return self.bind(payload, Code(text, vector=vector), key, "i64" if kind == "const" else kind, "at")

    def _wraps(self, payload: Expr) -> bool:
        """Whether an index has its size added where it is negative: an error shows it without."""
        known = self.locals.get(str(payload.attr)) if payload.op == "local" else None
        if known is not None and known.value is not None:
            return self._wraps(known.value)
        if payload.op != "where":
            return False
        negative, wrapped, plain = payload.args
        return negative.op == "lt" and wrapped.op == "add" and negative.args[0] is wrapped.args[0] is plain

    # --- operations -----------------------------------------------------------------------------------------

    @contextmanager
    def _under(self, guard: Code) -> Iterator[None]:
        before, self._guard = self._guard, guard
        try:
            yield
        finally:
            self._guard = before

    def _masked(self, e: Expr) -> Code:
        cond = self._named(e.args[0], self.value(e.args[0]))
        guard = cond
        if self._guard is not None:
            both = f"mask_and({self.spread(self._guard, torch.bool)}, {self.spread(cond, torch.bool)})"
            vector = self._guard.vector or cond.vector
            if not vector:
                both = f"{self._guard.text} && {cond.text}"
            name = self.fresh("m")
            self.writer.line(f"const auto {name} = {both};")
            guard = Code(name, vector=vector)
        with self._under(guard):
            if guard is cond and not cond.vector and e.args[1].op == "load":
                inner = self._load(e.args[1], chosen=True)  # what follows chooses whether it is done
            else:
                inner = self.value(e.args[1])
        other = self.value(e.args[2])
        if self._load_gives(e.args[1], e.args[2], guard):
            return inner
        return self._select(e, cond, inner, other)

    def _load_gives(self, load: Expr, other: Expr, guard: Code) -> bool:
        """Whether a guarded load already gives ``other``, a zero, where the condition does not hold."""
        if load.op != "load" or other.op != "const" or other.value != 0 or str(other.value) == "-0.0":
            return False
        return guard.vector and self.is_vector(load) and self.contiguous(load.indices[0]) == 1

    def _named(self, e: Expr, code: Code) -> Code:
        """The same value under a name."""
        if code.text.isidentifier():
            return code
        return self.bind(e, code, self._key(e, code.vector), stem="m" if e.dtype is torch.bool else "t")

    def _random(self, e: Expr) -> Code:
        """One of the words of a block, which is computed once for both."""
        word, counter = e.attr
        if self.is_vector(e.args[0]):
            raise CompileError("every lane has a key of its own", stage="codegen", node=repr(e))
        vector = self.is_vector(e)
        key = self._key(ex.random(e.args[0], counter, word & 2), vector, "words")
        words = self._find(key)
        if words is None:
            at = f"i64({self.index().scalar(counter).text})"
            if vector:
                at = self.index().vector(counter, "i32" if fits_32_bits(counter) else "i64").text
            text = f"threefry<{word >> 1}>({self.value(e.args[0]).text}, {at})"
            words = self.bind(e, Code(text, vector=vector), key, "auto", "random")
        return Code(f"{words.text}.{'ab'[word & 1]}", vector=vector)

    def _select(self, e: Expr, cond: Code, a: Code, b: Code) -> Code:
        vector = cond.vector or a.vector or b.vector
        if not vector:
            return Code(f"{cond.at(ADD)} ? {a.at(ADD)} : {b.at(ADD)}", LOW)
        x, y = self.spread(a, e.dtype), self.spread(b, e.dtype)
        if e.dtype is torch.bool:
            m = self._named(e.args[0], cond)
            spread = self.spread(m, torch.bool)
            return Code(f"mask_or(mask_and({spread}, {x}), mask_and(mask_not({spread}), {y}))", vector=True)
        if not cond.vector:
            return Code(f"{cond.at(ADD)} ? {x} : {y}", LOW, True)
        return Code(f"select({cond.text}, {x}, {y})", vector=True)

    def _cast(self, e: Expr) -> Code:
        (x,) = e.args
        i = narrow(x)
        if i is not None and self.is_vector(x) and e.dtype is not torch.bool:
            inner = self.index().vector(i, "i32")
        else:
            inner = self.value(x)
        if e.dtype is torch.bool:
            return Code(f"to_mask({inner.text})", vector=inner.vector)
        to = "f32" if e.dtype is torch.float32 else ex.dtype_name(e.dtype)
        if x.dtype is torch.bool:
            return Code(f"mask_to<{register(e.dtype)}>({inner.text})", vector=inner.vector)
        if x.dtype in _SMALL and e.dtype is torch.float32:
            return inner  # it is one already
        return Code(f"cast<{to}>({inner.text})", vector=inner.vector)

    def _bitcast(self, e: Expr) -> Code:
        (x,) = e.args
        inner = self.value(x)
        text = inner.text
        if x.dtype in _SMALL:
            text = f"{ex.dtype_name(x.dtype)}_bits({text})"
        elif x.dtype is torch.bool:
            text = f"mask_to<u8>({text})"
        if e.dtype in _SMALL:
            return Code(f"{ex.dtype_name(e.dtype)}_from_bits(bitcast<u16>({text}))", vector=inner.vector)
        if e.dtype is torch.bool:
            return Code(f"to_mask({text})", vector=inner.vector)
        return Code(f"bitcast<{register(e.dtype)}>({text})", vector=inner.vector)

    def _call(self, e: Expr) -> Code:
        kind = e.args[0].dtype
        if kind is torch.bool:
            return self._call_masks(e)
        if e.op in COMPARE:
            return self._compare(e)
        args = [self.value(a) for a in e.args]
        vector = any(a.vector for a in args)
        if e.op in ("logical_and", "logical_or", "logical_xor", "logical_not"):
            masks = [f"to_mask({self.spread(a, kind) if vector else a.text})" for a in args]
            return Code(f"{_MASKS.get(e.op, 'mask_not')}({', '.join(masks)})", vector=vector)
        if e.op == "square":
            x = self._named(e.args[0], args[0])
            args = [x, x]
        op = "mul" if e.op == "square" else e.op
        if kind in (*_NATIVE, *_SMALL):
            if op in _OPERATORS:
                sign, prec = _OPERATORS[op]
                return Code(f"{args[0].at(prec)} {sign} {args[1].at(prec + 1)}", prec, vector)
            if op == "neg":
                return Code("-" + args[0].at(4), UNARY, vector)
            if op in _BITS and not kind.is_floating_point:
                return Code(f"{args[0].at(4)} {_BITS[op][0]} {args[1].at(4)}", LOW, vector)
        if op in _INTEGRAL and not kind.is_floating_point:
            return args[0]
        texts = [self.spread(a, kind) if vector else a.text for a in args]
        name = _BITS[op][1] if op in _BITS else DIVISIONS.get(op) or _RENAMED.get(op, op)
        if name not in vocabulary():
            raise CompileError(f"{op} of {ex.dtype_name(kind)} has no C++ form", stage="codegen", node=op)
        if op == "probability" or (op in DIVISIONS and not kind.is_floating_point):
            texts.append("&error")
        if op == "signbit" and e.dtype is not torch.bool:
            return Code(f"mask_to<{register(e.dtype)}>(signbit({texts[0]}))", vector=vector)
        return Code(f"{name}({', '.join(texts)})", vector=vector)

    def _compare(self, e: Expr) -> Code:
        a, b = e.args
        sign = COMPARE[e.op]
        ia, ib = narrow(a), narrow(b)
        if ia is not None and ib is not None and (self.is_vector(a) or self.is_vector(b)):
            left, right = self.index().vector(ia, "i32"), self.index().vector(ib, "i32")
            if ib.is_const:
                right = literal(ib.value, torch.int32)
            return Code(f"{left.at(ADD)} {sign} {right.at(ADD)}", LOW, True)
        left, right = self.value(a), self.value(b)
        x, y = self._beside(left, a.dtype, right), self._beside(right, b.dtype, left)
        return Code(f"{x.at(ADD)} {sign} {y.at(ADD)}", LOW, left.vector or right.vector)

    def _call_masks(self, e: Expr) -> Code:
        args = [self.value(a) for a in e.args]
        vector = any(a.vector for a in args)
        texts = [self.spread(a, torch.bool) if vector else a.text for a in args]
        if e.op in ("logical_not", "bitwise_not"):
            return Code(f"mask_not({texts[0]})", vector=vector)
        if e.op in _MASKS:
            return Code(f"{_MASKS[e.op]}({', '.join(texts)})", vector=vector)
        if e.op == "eq":
            return Code(f"mask_not(mask_xor({', '.join(texts)}))", vector=vector)
        if e.op in COMPARE:
            ints = [f"mask_to<i32>({t})" for t in texts]
            return Code(f"{ints[0]} {COMPARE[e.op]} {ints[1]}", LOW, vector)
        if e.op in ("isnan", "isinf", "isfinite", "signbit", "abs", "sign", "square", *_INTEGRAL):
            same = e.op in ("abs", "sign", "square", *_INTEGRAL)
            return args[0] if same else literal(e.op == "isfinite", torch.bool)
        raise CompileError(f"{e.op} of bool has no C++ form", stage="codegen", node=e.op)
