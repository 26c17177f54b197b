"""Index expressions as C++: one position, or a vector of positions.

What comes in: an ``Index`` and the lanes of the loop at hand. What goes out: C++ text. What holds in between:
positions are ``i64``; a vector of them has ``i32`` lanes wherever the range allows. The next file is
``cpp_expr.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hotloop.errors import CompileError
from hotloop.ir import index as ix
from hotloop.ir.index import Index, IndexLike

from .cpp_writer import ADD, LOW, MUL, Code

__all__ = ["IndexPrinter", "fits_32_bits"]

# Room is left for the lanes after the last one that counts.
_LIMIT = 2**30


def fits_32_bits(e: IndexLike) -> bool:
    """Whether a position and all that it is computed from stays within 32 bits."""
    if isinstance(e, int):
        return abs(e) < _LIMIT
    if e.lo is None or e.hi is None or e.lo <= -_LIMIT or e.hi >= _LIMIT:
        return False
    if e.kind == "indirect":
        return bool(e.args[0].dtype.itemsize <= 4)
    if e.kind == "sum":
        return all(fits_32_bits(a) and abs(c) < _LIMIT and _product_fits(a, c) for a, c in e.args[1])
    return e.kind in ("const", "var", "sym") or all(fits_32_bits(a) for a in e.args)


def _product_fits(a: Index, c: int) -> bool:
    return a.lo is not None and a.hi is not None and max(abs(a.lo * c), abs(a.hi * c)) < _LIMIT


@dataclass(frozen=True)
class IndexPrinter:
    """Prints indices.

    Arguments:
        var: the variable of the vector loop, ``None`` outside.
        shift: added to ``var``: which of several vectors of one iteration is meant.
        lanes: the number of lanes.
        uniform: whether an index has one value for all lanes.
        indirect: prints an index that is read from memory; the second argument is ``i32`` or ``i64`` for a
            vector of them, ``None`` for a single one.
    """

    var: Index | None
    shift: int
    lanes: int
    uniform: Callable[[Index], bool]
    indirect: Callable[[Index, str | None], Code]

    def shifted(self, e: IndexLike) -> Index:
        """``e`` for the vector that is meant."""
        e = ix.as_index(e)
        return e if self.var is None or not self.shift else _shift(e, self.var, self.shift)

    def scalar(self, e: IndexLike) -> Code:
        """One position, as an ``i64``; in a vector loop, that of the first lane."""
        return self._scalar(self.shifted(e))

    def _scalar(self, e: Index) -> Code:
        if e.kind in ("const", "var", "sym"):
            return Code(str(e.args[0]), ADD if e.kind == "const" and e.value < 0 else 4)
        if e.kind == "sum":
            return self._scalar_sum(e)
        if e.kind == "mul":
            return _product([self._scalar(a) for a in e.args])
        if e.kind == "indirect":
            return self.indirect(e, None)
        a, b = e.args
        if e.kind in ("min", "max"):
            name = "minimum" if e.kind == "min" else "maximum"
            return Code(f"{name}<i64>({self._scalar(a).text}, {self._scalar(b).text})")
        lifted = _lift(a, b)
        if lifted is None:
            # The sign of the numerator is not known: divide the way Python does.
            x, k = self._scalar(a).at(MUL), self._divisor(b)
            if e.kind == "div":
                return Code(f"{x} >= 0 ? {x} / {k} : -((-1 - {x}) / {k}) - 1", LOW)
            return Code(f"({x} % {k} + {k}) % {k}", MUL)
        raised, back = lifted
        x, k = self._scalar(raised).at(MUL), self._divisor(b)
        if e.kind == "mod":
            return Code(f"{x} % {k}", MUL)
        return Code(f"{x} / {k} - {back}", ADD) if back else Code(f"{x} / {k}", MUL)

    def _divisor(self, b: Index) -> str:
        """A divisor. One that might be 0 stands in code that a size of 0 keeps from running, or is moved out
        of it: there it is 1."""
        if b.lo is not None and b.lo >= 1:
            return self._scalar(b).at(4)
        return f"maximum<i64>({self._scalar(b).text}, 1)"

    def _scalar_sum(self, e: Index) -> Code:
        parts: list[str] = []
        for atom, c in e.args[1]:
            text = (
                self._scalar(atom).at(MUL)
                if abs(c) == 1
                else f"{abs(c)} * {self._scalar(atom).at(UNARY_OPERAND)}"
            )
            parts.append(("- " if c < 0 else "+ ") + text)
        if e.args[0]:
            parts.append(("- " if e.args[0] < 0 else "+ ") + str(abs(e.args[0])))
        parts.sort(key=lambda p: p[0] == "-")  # a stable sort: what is added first
        first = parts[0][2:] if parts[0][0] == "+" else "-" + parts[0][2:]
        return Code(" ".join([first, *parts[1:]]), ADD)

    def vector(self, e: IndexLike, elem: str) -> Code:
        """The positions of all lanes, with lanes of type ``elem`` (``i32`` or ``i64``)."""
        e = self.shifted(e)
        if self.uniform(e):
            return Code(f"splat<{elem}x{self.lanes}>({self._scalar(e).text})", vector=True)
        constant, terms = ix.linear_terms(e)
        step = next((c for a, c in terms if a is self.var), 0)
        # What is the same in all lanes goes into the start of the iota.
        same = ix.const(constant)
        for a, c in terms:
            if a is self.var or self.uniform(a):
                same = same + a * c
        parts: list[Code] = []
        if step:
            by = f", {step}" if step != 1 else ""
            parts.append(Code(f"iota<{elem}, {self.lanes}>({self._scalar(same).text}{by})"))
        for a, c in terms:
            if a is not self.var and not self.uniform(a):
                atom = self._vector_atom(a, elem)
                parts.append(atom if c == 1 else _product([Code(self._number(c, elem)), atom]))
        if not step and not (same.is_const and same.value == 0):
            text = self._scalar(same).text
            parts.append(Code(self._number(same.value, elem) if same.is_const else f"{elem}({text})"))
        if len(parts) == 1:
            return replace(parts[0], vector=True)
        return Code(" + ".join(part.at(ADD) for part in parts), ADD, True)

    @staticmethod
    def _number(c: int, elem: str) -> str:
        return f"i64({c})" if elem == "i64" else str(c) if c >= 0 else f"({c})"

    def _vector_atom(self, e: Index, elem: str) -> Code:
        if e.kind == "indirect":
            return self.indirect(e, elem)
        if e.kind == "mul":
            vectors = [self._plain(a, elem) for a in e.args if not self.uniform(a)]
            scalars = [Code(f"{elem}({self._scalar(a).text})") for a in e.args if self.uniform(a)]
            return replace(_product(vectors + scalars), vector=True)
        a, b = e.args
        if e.kind in ("min", "max"):
            name = "minimum" if e.kind == "min" else "maximum"
            return Code(f"{name}({self._plain(a, elem).text}, {self._plain(b, elem).text})", vector=True)
        lifted = _lift(a, b)
        if not self.uniform(b):
            raise CompileError(f"a vector of positions {e} cannot be divided", stage="codegen")
        if lifted is None:  # the sign is not known: the division of values rounds as Python does
            kind, name = f"{elem}x{self.lanes}", "floor_div" if e.kind == "div" else "remainder"
            divisor = f"splat<{kind}>({self._divisor(b)})"
            return Code(f"{name}({self._plain(a, elem).text}, {divisor}, &error)", vector=True)
        raised, back = lifted
        x = self._plain(raised, elem).at(MUL)
        k = self._number(b.value, elem) if b.is_const else f"{elem}({self._divisor(b)})"
        if e.kind == "mod":
            return Code(f"{x} % {k}", MUL, True)
        return (
            Code(f"{x} / {k} - {self._number(back, elem)}", ADD, True)
            if back
            else Code(f"{x} / {k}", MUL, True)
        )

    def _plain(self, e: Index, elem: str) -> Code:
        """As ``vector``, of an expression that is shifted already."""
        return IndexPrinter(self.var, 0, self.lanes, self.uniform, self.indirect).vector(e, elem)


UNARY_OPERAND = 3


def _product(factors: Sequence[Code]) -> Code:
    """A product; ``a / b`` as a later factor needs brackets, since C++ works from left to right."""
    first, *rest = factors
    return Code(" * ".join([first.at(MUL), *(f.at(UNARY_OPERAND) for f in rest)]), MUL)


_COMBINE = {"mul": ix.mul, "div": ix.floordiv, "mod": ix.mod, "min": ix.minimum, "max": ix.maximum}


def _shift(e: Index, v: Index, by: int) -> Index:
    """``e`` at ``v + by``. What is read from memory is left alone: it is shifted when the read is printed."""
    if e is v:
        return v + by
    if v not in e.free_vars or e.kind == "indirect":
        return e
    if e.kind == "sum":
        out = ix.const(e.args[0])
        for atom, c in e.args[1]:
            out = out + _shift(atom, v, by) * c
        return out
    out, *rest = (_shift(a, v, by) for a in e.args)
    for part in rest:
        out = _COMBINE[e.kind](out, part)
    return out


def _lift(a: Index, b: Index) -> tuple[Index, int] | None:
    """``a`` plus a multiple of ``b``, and which, that is not negative: C++'s division is Python's there."""
    if a.lo is not None and a.lo >= 0:
        return a, 0
    if a.lo is not None and b.is_const:
        times = (b.value - 1 - a.lo) // b.value
        return a + times * b.value, times
    for times in (1, 2) if not b.is_const else ():
        raised = a + b * times
        if raised.lo is not None and raised.lo >= 0:
            return raised, times
    return None
