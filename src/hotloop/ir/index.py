"""Integer index expressions: the arithmetic of loop variables, sizes and strides.

What comes in: loop variables, constants, size symbols and data-dependent indices. What goes out: interned,
simplified expressions whose range is known. What holds in between: two expressions that were built equal are
the same object (``is``), every node carries inclusive bounds ``lo`` and ``hi`` (``None`` where unbounded),
and division and remainder are Python's (they round towards minus infinity).

Every non-constant expression is a *linear combination* ``sum(coefficient * atom) + constant`` or a single
atom. An atom is a variable, a symbol, a product of atoms, a floor division, a remainder, a minimum, a
maximum, or an index read from memory. The next file is ``expr.py``, where indices meet values.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Union, overload

from .index_text import to_text, to_text_parts

__all__ = [
    "Index",
    "IndexLike",
    "add",
    "as_index",
    "at_most",
    "coefficient",
    "const",
    "contiguous_strides",
    "delinearize",
    "evaluate",
    "floordiv",
    "indirect",
    "indirect_atoms",
    "linear_terms",
    "linearize",
    "maximum",
    "minimum",
    "mod",
    "mul",
    "substitute",
    "symbol",
    "var",
]

IndexLike = Union["Index", int]


class Payload(Protocol):
    """The value that an indirect index reads; in practice an ``expr.Expr`` of an integer dtype."""

    @property
    def free_vars(self) -> frozenset[Index]: ...

    def substitute(self, mapping: Mapping[Index, IndexLike]) -> Any: ...

    def as_index(self) -> Index | None:
        """The index that the value is, where it is one and reads no memory."""


class Index:
    """One interned integer expression. Build it with the functions of this module or with ``+ - * // %``.

    ``kind`` is one of ``const var sym sum mul div mod min max indirect``; ``args`` depends on it:

    ========  ===========================================================
    const     ``(value,)``
    var       ``(name, extent)``: a loop variable, ``0 <= v < extent``
    sym       ``(name, lo, hi, hint)``: a size known only at run time
    sum       ``(constant, ((atom, coefficient), ...))``
    mul       ``(atom, atom, ...)``
    div, mod  ``(numerator, denominator)``
    min, max  ``(left, right)``
    indirect  ``(payload, size, checked)``: ``0 <= value < size``
    ========  ===========================================================

    ``symbolic`` says that a symbol is in it, or in the extent of one of its variables. The bounds of such a
    sum are those of its terms together: ``s - 1 - i`` is not negative where ``i < s``.
    """

    __slots__ = ("__weakref__", "_order_key", "args", "free_vars", "hi", "kind", "lo", "symbolic")

    kind: str
    args: tuple[Any, ...]
    lo: int | None
    hi: int | None
    free_vars: frozenset[Index]
    symbolic: bool
    _order_key: tuple[Any, ...] | None

    # The hash is the identity's: interning makes equal expressions identical.

    @property
    def _order(self) -> tuple[Any, ...]:
        """A key that sorts terms the same way in every process, so that generated text is reproducible."""
        if self._order_key is None:
            self._order_key = (_ORDER[self.kind], *_order_of(self.kind, self.args))
        return self._order_key

    @property
    def is_const(self) -> bool:
        """Whether ``value`` is known."""
        return self.kind == "const"

    @property
    def value(self) -> int:
        """The integer of a constant. Raises ``TypeError`` for anything else."""
        if self.kind != "const":
            raise TypeError(f"{self} is not a constant")
        return int(self.args[0])

    @property
    def name(self) -> str:
        """The name of a variable or a symbol."""
        return str(self.args[0])

    @property
    def extent(self) -> IndexLike:
        """The number of values a loop variable takes (``int``, or an ``Index`` of symbols)."""
        if self.kind != "var":
            raise TypeError(f"{self} is not a loop variable")
        return self.args[1]  # type: ignore[no-any-return]

    def __add__(self, other: IndexLike) -> Index:
        return add(self, other)

    __radd__ = __add__

    def __mul__(self, other: IndexLike) -> Index:
        return mul(self, other)

    __rmul__ = __mul__

    def __neg__(self) -> Index:
        return mul(self, -1)

    def __sub__(self, other: IndexLike) -> Index:
        return add(self, mul(other, -1))

    def __rsub__(self, other: IndexLike) -> Index:
        return add(other, mul(self, -1))

    def __floordiv__(self, other: IndexLike) -> Index:
        return floordiv(self, other)

    def __rfloordiv__(self, other: IndexLike) -> Index:
        return floordiv(other, self)

    def __mod__(self, other: IndexLike) -> Index:
        return mod(self, other)

    def __rmod__(self, other: IndexLike) -> Index:
        return mod(other, self)

    def __repr__(self) -> str:
        return to_text(self)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("index expressions are interned and are not pickled; print them instead")


_interned: weakref.WeakValueDictionary[tuple[Any, ...], Index] = weakref.WeakValueDictionary()


def _make(
    kind: str, args: tuple[Any, ...], lo: int | None, hi: int | None, free: frozenset[Index] | None
) -> Index:
    key = (kind, args)
    node = _interned.get(key)
    if node is not None:
        return node
    node = object.__new__(Index)
    node.kind = kind
    node.args = args
    node.lo = lo
    node.hi = hi
    node.free_vars = frozenset((node,)) if free is None else free
    node.symbolic = _is_symbolic(kind, args)
    node._order_key = None
    # Another thread may have interned the same key meanwhile; setdefault keeps the first one.
    return _interned.setdefault(key, node)


def _is_symbolic(kind: str, args: tuple[Any, ...]) -> bool:
    if kind == "sum":
        return any(a.symbolic for a, _ in args[1])
    if kind == "const":
        return False
    if kind == "sym":
        return True
    if kind in ("var", "indirect"):
        return isinstance(args[1], Index)
    return any(a.symbolic for a in args)


_KINDS = ("const", "sym", "var", "indirect", "mul", "div", "mod", "min", "max", "sum")
_ORDER = {name: i for i, name in enumerate(_KINDS)}
_NONE: frozenset[Index] = frozenset()


def _order_of(kind: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if kind in ("var", "sym"):
        name = str(args[0])
        digits = "".join(c for c in name if c.isdigit())
        return (name.rstrip("0123456789"), int(digits) if digits else -1, str(args))
    return (to_text_parts(kind, args),)


# --- constructors -------------------------------------------------------------------------------------------


def const(value: int) -> Index:
    """A number."""
    value = int(value)
    return _make("const", (value,), value, value, _NONE)


def as_index(value: IndexLike) -> Index:
    """A number or an index as an index."""
    return value if isinstance(value, Index) else const(value)


def var(name: str, extent: IndexLike) -> Index:
    """A loop variable with ``0 <= v < extent``. A variable of extent 1 is still a variable: it can be
    printed."""
    if isinstance(extent, Index) and extent.is_const:
        extent = extent.value
    hi = extent - 1 if isinstance(extent, int) else (None if extent.hi is None else extent.hi - 1)
    return _make("var", (name, extent), 0, hi, None)


def symbol(name: str, lo: int | None = 0, hi: int | None = None, hint: int | None = None) -> Index:
    """A size known at run time, with inclusive bounds. ``hint``: about how large it will be, to decide by."""
    return _make("sym", (name, lo, hi, hint), lo, hi, _NONE)


def indirect(payload: Payload, size: IndexLike, checked: bool = True) -> Index:
    """An index read from memory. ``checked`` says that the kernel has to test ``0 <= value < size``.

    A payload that is an index itself, known to be in range, is that index: nothing is read, nothing checked.
    """
    if isinstance(size, Index) and size.is_const:
        size = size.value
    known = payload.as_index()
    if known is not None and (not checked or _in_range(known, size)):
        return known
    hi = size - 1 if isinstance(size, int) else (None if size.hi is None else size.hi - 1)
    return _make("indirect", (payload, size, checked), 0, hi, payload.free_vars)


def _in_range(e: Index, size: IndexLike) -> bool:
    """Whether ``0 <= e < size`` is certain."""
    return e.lo is not None and e.lo >= 0 and _below(e, as_index(size))


def linear_terms(e: IndexLike) -> tuple[int, tuple[tuple[Index, int], ...]]:
    """``e`` as (constant, ((atom, coefficient), ...))."""
    if isinstance(e, int):
        return e, ()
    if e.kind == "const":
        return e.args[0], ()
    if e.kind == "sum":
        return e.args[0], e.args[1]
    return 0, ((e, 1),)


def _scale_bounds(lo: int | None, hi: int | None, c: int) -> tuple[int | None, int | None]:
    if c >= 0:
        return (None if lo is None else lo * c), (None if hi is None else hi * c)
    return (None if hi is None else hi * c), (None if lo is None else lo * c)


def _is_nothing(atom: Index) -> bool:
    """Whether it is a variable of extent 1. One whose extent varies keeps its stride, whatever its range."""
    return atom.kind == "var" and atom.hi == 0 and not atom.symbolic


def _from_terms(constant: int, terms: dict[Index, int]) -> Index:
    """The canonical expression for a linear combination."""
    if len(terms) > 1 or constant:  # a variable of extent 1 is 0; alone it stays, so that it can be printed
        terms = {a: c for a, c in terms.items() if not _is_nothing(a)}
    live = {a: c for a, c in terms.items() if c}
    if len(live) > 1:
        constant, live = _merge_div_mod(constant, live)
    if not live:
        return const(constant)
    if constant == 0 and len(live) == 1:
        ((atom, c),) = live.items()
        if c == 1:
            return atom
    lo: int | None = constant
    hi: int | None = constant
    for atom, c in live.items():
        alo, ahi = _scale_bounds(atom.lo, atom.hi, c)
        lo = None if lo is None or alo is None else lo + alo
        hi = None if hi is None or ahi is None else hi + ahi
    ordered = tuple(sorted(live.items(), key=lambda t: (-abs(t[1]), t[0]._order)))
    free = frozenset().union(*(a.free_vars for a in live))
    if any(a.symbolic for a in live):
        if free:
            lo, hi = _joint_bounds(constant, ordered, lo, hi)
        lo, hi = _bounds_of_quotients(constant, live, lo, hi)
    return _make("sum", (constant, ordered), lo, hi, free)


def _joint_bounds(
    constant: int, terms: Sequence[tuple[Index, int]], lo: int | None, hi: int | None
) -> tuple[int | None, int | None]:
    """Bounds of a sum whose terms share symbols: each term at its extreme, in symbols."""
    low, high = _sum_extremes(constant, terms)
    los = [b for b in (lo, None if low is None else low.lo) if b is not None]
    his = [b for b in (hi, None if high is None else high.hi) if b is not None]
    return max(los, default=None), min(his, default=None)


def _bounds_of_quotients(
    constant: int, terms: Mapping[Index, int], lo: int | None, hi: int | None
) -> tuple[int | None, int | None]:
    """Bounds of a sum with quotients in it, by ``x - (k - 1) <= k * (x // k) <= x``: ``2 * (s // 2) <= s``,
    and ``s // 2 <= (s + 1) // 2``, both sides taken ``k`` times."""
    quotients = {a: a.args[1].value for a in terms if a.symbolic and a.kind == "div" and a.args[1].is_const}
    if not quotients or len(terms) == 1:
        return lo, hi
    times = math.lcm(*(k // math.gcd(terms[a], k) for a, k in quotients.items()))
    least = most = constant * times
    rest = {a: c * times for a, c in terms.items() if a not in quotients}
    for a, k in quotients.items():
        c = terms[a] * times // k
        x_constant, x_terms = linear_terms(a.args[0])
        least += c * x_constant - max(c, 0) * (k - 1)
        most += c * x_constant - min(c, 0) * (k - 1)
        for atom, xc in x_terms:
            rest[atom] = rest.get(atom, 0) + c * xc
    low, high = _from_terms(least, rest).lo, _from_terms(most, rest).hi
    los = [b for b in (lo, None if low is None else -(-low // times)) if b is not None]
    his = [b for b in (hi, None if high is None else high // times) if b is not None]
    return max(los, default=None), min(his, default=None)


def _sum_extremes(constant: int, terms: Sequence[tuple[Index, int]]) -> tuple[Index | None, Index | None]:
    low: Index | None = const(constant)
    high: Index | None = low
    for atom, c in terms:
        least, most = _extremes(atom)
        if c < 0:
            least, most = most, least
        low = None if low is None or least is None else low + least * c
        high = None if high is None or most is None else high + most * c
    return low, high


def _extremes(e: Index) -> tuple[Index | None, Index | None]:
    """The least and the greatest value of ``e`` as expressions without variables; ``None``: not known."""
    if not e.free_vars and e.kind != "indirect":
        return e, e
    kind, args = e.kind, e.args
    if kind in ("var", "indirect"):
        return const(0), as_index(args[1]) - 1
    if kind == "sum":
        return _sum_extremes(*args)
    parts = [_extremes(a) for a in args]
    lows, highs = [p[0] for p in parts], [p[1] for p in parts]
    if kind == "mul":
        if any(a.lo is None or a.lo < 0 for a in args):
            return None, None
        return _all_of(mul, lows), _all_of(mul, highs)
    if kind in ("min", "max"):
        combine = minimum if kind == "min" else maximum
        return _all_of(combine, lows), _all_of(combine, highs)
    if args[1].free_vars:
        return None, None
    if kind == "mod":
        return const(0), args[1] - 1
    return (
        None if lows[0] is None else floordiv(lows[0], args[1]),
        None if highs[0] is None else floordiv(highs[0], args[1]),
    )


def _all_of(combine: Callable[[IndexLike, IndexLike], Index], parts: Sequence[Index | None]) -> Index | None:
    out = parts[0]
    for p in parts[1:]:
        out = None if out is None or p is None else combine(out, p)
    return out


def _merge_div_mod(constant: int, terms: dict[Index, int]) -> tuple[int, dict[Index, int]]:
    """Apply ``k * (x // k) + x % k == x`` wherever both halves are present with matching coefficients."""
    for atom, c in terms.items():
        if atom.symbolic and any(f.kind == "mod" for f in _factors(atom)):
            found = _merge_symbolic(constant, terms, next(f for f in _factors(atom) if f.kind == "mod"))
            if found is not None:
                return found
        if atom.kind != "mod" or not atom.args[1].is_const:
            continue
        x, k = atom.args
        # The quotient may have been simplified to several terms: x // k == sum(q).
        q_const, q_terms = linear_terms(floordiv(x, k))
        scale = c * k.value
        if all(terms.get(a, 0) == qc * scale for a, qc in q_terms) and q_terms:
            merged = dict(terms)
            del merged[atom]
            for a, _ in q_terms:
                del merged[a]
            x_const, x_terms = linear_terms(x)
            for a, xc in x_terms:
                merged[a] = merged.get(a, 0) + xc * c
            constant += x_const * c - q_const * scale
            merged = {a: v for a, v in merged.items() if v}
            return _merge_div_mod(constant, merged) if len(merged) > 1 else (constant, merged)
    return constant, terms


def _merge_symbolic(
    constant: int, terms: dict[Index, int], remainder: Index
) -> tuple[int, dict[Index, int]] | None:
    """The same where strides or divisors are symbolic: ``r * (x % k) + r * k * (x // k) == r * x``."""
    x, k = remainder.args
    r = const(0)
    for atom, c in terms.items():
        left = _without(atom, (remainder,))
        if left is not None:
            r = r + left * c
    q_const, q_terms = linear_terms(mul(mul(floordiv(x, k), k), r))
    if not q_terms or any(terms.get(a, 0) != c for a, c in q_terms):
        return None
    merged = dict(terms)
    for a, c in (*linear_terms(mul(remainder, r))[1], *q_terms):
        merged[a] -= c
    x_const, x_terms = linear_terms(mul(x, r))
    for a, c in x_terms:
        merged[a] = merged.get(a, 0) + c
    constant += x_const - q_const
    merged = {a: v for a, v in merged.items() if v}
    return _merge_div_mod(constant, merged) if len(merged) > 1 else (constant, merged)


def add(a: IndexLike, b: IndexLike) -> Index:
    """``a + b``, terms of the same atom collected."""
    ca, ta = linear_terms(a)
    cb, tb = linear_terms(b)
    if not tb and cb == 0:
        return as_index(a)
    if not ta and ca == 0:
        return as_index(b)
    terms = dict(ta)
    for atom, c in tb:
        terms[atom] = terms.get(atom, 0) + c
    return _from_terms(ca + cb, terms)


def mul(a: IndexLike, b: IndexLike) -> Index:
    """``a * b``, a constant factor distributed over the terms of the other."""
    ca, ta = linear_terms(a)
    cb, tb = linear_terms(b)
    if not ta:
        ca, ta, cb, tb = cb, tb, ca, ta
    if not tb:  # b is the constant cb
        if cb == 1:
            return _from_terms(ca, dict(ta))
        return _from_terms(ca * cb, {atom: c * cb for atom, c in ta})
    # A product of two linear combinations: distribute, so that symbolic strides stay canonical.
    terms: dict[Index, int] = {}
    for atom, c in ta:
        terms[atom] = terms.get(atom, 0) + c * cb
    for atom, c in tb:
        terms[atom] = terms.get(atom, 0) + c * ca
    for x, cx in ta:
        for y, cy in tb:
            if (x.symbolic and _is_nothing(y)) or (y.symbolic and _is_nothing(x)):
                continue
            p = _product(x, y)
            terms[p] = terms.get(p, 0) + cx * cy
    return _from_terms(ca * cb, terms)


def _product(x: Index, y: Index) -> Index:
    factors = (x.args if x.kind == "mul" else (x,)) + (y.args if y.kind == "mul" else (y,))
    factors = tuple(sorted(factors, key=lambda f: f._order))
    lo: int | None = 1
    hi: int | None = 1
    for f in factors:
        if lo is None or f.lo is None or f.lo < 0:
            lo = None
        else:
            lo *= f.lo
        hi = None if hi is None or f.hi is None or f.lo is None or f.lo < 0 else hi * f.hi
    return _make("mul", factors, lo, hi, frozenset().union(*(f.free_vars for f in factors)))


def _within(e: Index, lo: int, hi: int) -> bool:
    return e.lo is not None and e.hi is not None and lo <= e.lo and e.hi <= hi


def _split_multiples(e: Index, k: int) -> tuple[Index, Index]:
    """``e == k * whole + rest``, taking out every term whose coefficient ``k`` divides."""
    constant, terms = linear_terms(e)
    whole = {a: c // k for a, c in terms if c % k == 0}
    rest = {a: c for a, c in terms if c % k}
    if not whole and 0 <= constant < k:
        return const(0), e
    return _from_terms(constant // k, whole), _from_terms(constant % k, rest)


def _low_part(e: Index, k: int) -> tuple[int, Index, Index] | None:
    """``e == g * high + low`` with ``0 <= low < g`` and ``g`` a divisor of ``k`` greater than 1, or
    ``None``."""
    constant, terms = linear_terms(e)
    for i in range(len(terms) - 1, -1, -1):  # terms are sorted by falling coefficient
        g = k
        for _, c in terms[: i + 1]:
            g = math.gcd(g, c)
        if g == 1:
            continue
        low = _from_terms(constant % g, dict(terms[i + 1 :]))
        if _within(low, 0, g - 1):
            return g, _from_terms(constant // g, {a: c // g for a, c in terms[: i + 1]}), low
    return None


def floordiv(a: IndexLike, b: IndexLike) -> Index:
    """``a // b``, rounding towards minus infinity. ``b`` must be positive."""
    a, b = as_index(a), as_index(b)
    if not b.is_const:
        return _symbolic_div(a, b)
    k = b.value
    if k <= 0:
        raise ZeroDivisionError(f"index division by {k}: {a} // {k}")
    if k == 1:
        return a
    if a.is_const:
        return const(a.value // k)
    whole, rest = _split_multiples(a, k)
    if not (whole.is_const and whole.value == 0):
        return add(whole, floordiv(rest, b))
    if _within(a, 0, k - 1):
        return const(0)
    if a.lo is not None and a.hi is not None and a.lo // k == a.hi // k:
        return const(a.lo // k)
    part = _low_part(a, k)
    if part is not None:
        g, high, _ = part
        return floordiv(high, k // g)
    if a.kind == "div" and a.args[1].is_const:
        return floordiv(a.args[0], a.args[1].value * k)
    if a.kind == "mod" and a.args[1].is_const and a.args[1].value % k == 0:
        return mod(floordiv(a.args[0], k), a.args[1].value // k)
    return _make(
        "div", (a, b), None if a.lo is None else a.lo // k, None if a.hi is None else a.hi // k, a.free_vars
    )


def _factors(atom: Index) -> tuple[Index, ...]:
    return atom.args if atom.kind == "mul" else (atom,)


def _without(atom: Index, factors: Sequence[Index]) -> Index | None:
    """``atom / product(factors)`` where that is a product of the factors left."""
    left = list(_factors(atom))
    for f in factors:
        if f not in left:
            return None
        left.remove(f)
    return _chain(left) if left else const(1)


def _split_symbolic(a: Index, b: Index) -> tuple[Index, Index]:
    """``a == b * whole + rest`` for a symbolic ``b``: what the leading term of ``b`` divides is taken out."""
    _, b_terms = linear_terms(b)
    lead, g = max(b_terms, key=lambda t: (len(_factors(t[0])), t[0]._order))
    whole = const(0)
    for atom, c in linear_terms(a)[1]:
        left = _without(atom, _factors(lead)) if c % g == 0 else None
        if left is not None:
            whole = whole + left * (c // g)
    return whole, a - whole * b


def _symbolic_low_part(a: Index, b: Index) -> tuple[Index, Index, Index, Index] | None:
    """``(d, b / d, high, low)``: ``a == d * high + low``, ``d`` divides ``b``, and ``0 <= low < d``."""
    constant, terms = linear_terms(b)
    if constant or len(terms) != 1:
        return None
    ((atom, g),) = terms
    divisors = [const(g)] if abs(g) > 1 else []
    for d in (*divisors, *dict.fromkeys(_factors(atom))):
        if d.is_const:
            high, low = _split_multiples(a, d.value)
            other = atom
        else:
            high, low = _split_symbolic(a, d)
            left = _without(atom, (d,))
            assert left is not None
            other = left * g
        if not (high.is_const and high.value == 0) and low.lo is not None and low.lo >= 0 and _below(low, d):
            return d, other, high, low
    return None


def _symbolic_div(a: Index, b: Index) -> Index:
    if a is b:
        return const(1)
    whole, rest = _split_symbolic(a, b)
    if not (whole.is_const and whole.value == 0):
        return add(whole, floordiv(rest, b))
    nonnegative = a.lo is not None and a.lo >= 0
    if nonnegative and (_below(a, b) or a.hi == 0):
        return const(0)
    least = add(a, b).lo if a.hi is not None and a.hi < 0 else None
    if least is not None and least >= 0:
        return const(-1)
    part = _symbolic_low_part(a, b)
    if part is not None:
        return floordiv(part[2], part[1])
    free = a.free_vars | b.free_vars
    if nonnegative:
        return _make("div", (a, b), 0, a.hi, free)
    # Dividing by something positive moves a value towards zero, or to -1 from below.
    hi = None if a.hi is None else max(a.hi, -1)
    return _make("div", (a, b), a.lo, hi, free)


def _chain(factors: Sequence[Index]) -> Index:
    out = factors[0]
    for f in factors[1:]:
        out = _product(out, f)
    return out


def _below(a: Index, b: Index) -> bool:
    """Whether ``a < b`` is certain although ``b`` is symbolic."""
    if a.kind == "var" and as_index(a.extent) is b:
        return True
    if a.hi is not None and b.lo is not None and a.hi < b.lo:
        return True
    if not (a.symbolic or b.symbolic):
        return False
    hi = (a - b).hi
    return hi is not None and hi < 0


def mod(a: IndexLike, b: IndexLike) -> Index:
    """``a % b`` with the sign of ``b``, which must be positive."""
    a, b = as_index(a), as_index(b)
    if not b.is_const:
        return _symbolic_mod(a, b)
    k = b.value
    if k <= 0:
        raise ZeroDivisionError(f"index remainder by {k}: {a} % {k}")
    if a.is_const:
        return const(a.value % k)
    _, rest = _split_multiples(a, k)
    if rest is not a:
        return mod(rest, b)
    if _within(a, 0, k - 1):
        return a
    if a.lo is not None and a.hi is not None and a.lo // k == a.hi // k:
        return a - (a.lo // k) * k
    part = _low_part(a, k)
    if part is not None:
        g, high, low = part
        return add(mul(mod(high, k // g), g), low)
    if a.kind == "mod" and a.args[1].is_const and a.args[1].value % k == 0:
        return mod(a.args[0], b)
    return _make(
        "mod", (a, b), 0, k - 1 if a.hi is None or a.lo is None or a.lo < 0 else min(a.hi, k - 1), a.free_vars
    )


def _symbolic_mod(a: Index, b: Index) -> Index:
    if a is b:
        return const(0)
    _, rest = _split_symbolic(a, b)
    if rest is not a:
        return mod(rest, b)
    if a.lo is not None and a.lo >= 0 and (_below(a, b) or a.hi == 0):
        return a
    above = add(a, b) if a.hi is not None and a.hi < 0 else None
    if above is not None and above.lo is not None and above.lo >= 0:
        return above
    part = _symbolic_low_part(a, b)
    if part is not None:
        d, other, high, low = part
        return add(mul(mod(high, other), d), low)
    hi = None if b.hi is None else b.hi - 1
    return _make("mod", (a, b), 0, hi, a.free_vars | b.free_vars)


def minimum(a: IndexLike, b: IndexLike) -> Index:
    """The smaller one; just one of them where the bounds tell which."""
    a, b = as_index(a), as_index(b)
    if at_most(a, b):
        return a
    return b if at_most(b, a) else _choice("min", min, a, b)


def maximum(a: IndexLike, b: IndexLike) -> Index:
    """The larger one; just one of them where the bounds tell which."""
    a, b = as_index(a), as_index(b)
    if at_most(b, a):
        return a
    return b if at_most(a, b) else _choice("max", max, a, b)


def at_most(a: Index, b: Index) -> bool:
    """Whether ``a <= b`` is certain."""
    if a is b or (a.hi is not None and b.lo is not None and a.hi <= b.lo):
        return True
    if not (a.symbolic or b.symbolic):
        return False
    hi = (a - b).hi
    return hi is not None and hi <= 0


def _choice(kind: str, pick: Callable[[int, int], int], a: Index, b: Index) -> Index:
    """The minimum or the maximum of two whose bounds overlap; ``pick`` is the same of numbers."""
    a, b = sorted((a, b), key=lambda e: e._order)

    def bound(x: int | None, y: int | None, either: bool) -> int | None:
        """Of two bounds on one side, an unknown one leaves the result open unless ``either`` holds alone."""
        if x is not None and y is not None:
            return pick(x, y)
        return (y if x is None else x) if either else None

    lo, hi = bound(a.lo, b.lo, kind == "max"), bound(a.hi, b.hi, kind == "min")
    return _make(kind, (a, b), lo, hi, a.free_vars | b.free_vars)


# --- using expressions --------------------------------------------------------------------------------------


@overload
def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]: ...
@overload
def contiguous_strides(sizes: Sequence[IndexLike]) -> tuple[IndexLike, ...]: ...
def contiguous_strides(sizes: Sequence[IndexLike]) -> tuple[IndexLike, ...]:
    """Row-major strides in elements; a size of 0 counts as 1, as PyTorch does."""
    out: list[IndexLike] = []
    step: IndexLike = 1
    for s in reversed(sizes):
        out.append(step)
        step = step * (max(s, 1) if isinstance(s, int) else maximum(s, 1))
    return tuple(reversed(out))


def linearize(indices: Sequence[IndexLike], strides: Sequence[IndexLike], offset: IndexLike = 0) -> Index:
    """``offset + sum(index * stride)``: the flat position of a multi-dimensional index."""
    constant, parts = linear_terms(offset)
    terms = dict(parts)  # one pass: the sum is normalised once, not once a dimension
    for i, s in zip(indices, strides, strict=True):
        if isinstance(s, Index):
            c, own = linear_terms(mul(i, s))
            factor = 1
        else:
            c, own = linear_terms(i)
            factor = s
        constant += c * factor
        for atom, k in own:
            terms[atom] = terms.get(atom, 0) + k * factor
    return _from_terms(constant, terms)


def delinearize(flat: IndexLike, sizes: Sequence[IndexLike]) -> tuple[Index, ...]:
    """The row-major coordinates of ``flat`` in a shape: ``linearize`` with contiguous strides, inverted."""
    out: list[Index] = []
    rest = as_index(flat)
    for size in reversed(sizes[1:]):
        if isinstance(size, int) and size == 0:
            return tuple(const(0) for _ in sizes)
        out.append(mod(rest, size))
        rest = floordiv(rest, size)
    if sizes:
        out.append(rest)
    return tuple(reversed(out))


def substitute(e: IndexLike, mapping: Mapping[Index, IndexLike]) -> Index:
    """Replace variables (or symbols) by other expressions. The same object where nothing changes."""
    if isinstance(e, int):
        return const(e)
    if e.kind == "const":
        return e
    if e.kind in ("var", "sym"):
        got = mapping.get(e)
        return e if got is None else as_index(got)
    if e.kind != "mul" and e.free_vars.isdisjoint(mapping) and not any(m.kind == "sym" for m in mapping):
        return e
    return _REBUILD[e.kind](e, lambda x: substitute(x, mapping), mapping)


def _rebuild_sum(e: Index, f: Callable[[IndexLike], Index], _: Mapping[Index, IndexLike]) -> Index:
    constant: int = e.args[0]
    terms: dict[Index, int] = {}
    for atom, c in e.args[1]:
        k, parts = linear_terms(f(atom))
        constant += k * c
        for a, pc in parts:
            terms[a] = terms.get(a, 0) + pc * c
    return _from_terms(constant, terms)


def _rebuild_mul(e: Index, f: Callable[[IndexLike], Index], _: Mapping[Index, IndexLike]) -> Index:
    out = const(1)
    for factor in e.args:
        out = mul(out, f(factor))
    return out


def _rebuild_indirect(e: Index, f: Callable[[IndexLike], Index], mapping: Mapping[Index, IndexLike]) -> Index:
    payload, size, checked = e.args
    return indirect(payload.substitute(mapping), f(size) if isinstance(size, Index) else size, checked)


_REBUILD: dict[str, Callable[[Index, Callable[[IndexLike], Index], Mapping[Index, IndexLike]], Index]] = {
    "sum": _rebuild_sum,
    "mul": _rebuild_mul,
    "div": lambda e, f, _: floordiv(f(e.args[0]), f(e.args[1])),
    "mod": lambda e, f, _: mod(f(e.args[0]), f(e.args[1])),
    "min": lambda e, f, _: minimum(f(e.args[0]), f(e.args[1])),
    "max": lambda e, f, _: maximum(f(e.args[0]), f(e.args[1])),
    "indirect": _rebuild_indirect,
}


def evaluate(e: IndexLike, env: Mapping[Index, Any], read: Callable[[Any], Any] | None = None) -> Any:
    """The value of ``e`` with variables bound to integers or integer tensors (which broadcast).

    ``read`` turns the payload of an indirect index into its value.
    """
    if isinstance(e, int):
        return e
    k = e.kind
    if k == "const":
        return e.args[0]
    if k in ("var", "sym"):
        return env[e]
    if k == "sum":
        out: Any = e.args[0]
        for atom, c in e.args[1]:
            out = out + evaluate(atom, env, read) * c
        return out
    if k == "indirect":
        if read is None:
            raise TypeError(f"{e} reads memory, and no reader was given")
        return read(e)
    values = [evaluate(a, env, read) for a in e.args]
    if k == "mul":
        return math.prod(values[1:], start=values[0])
    if k == "div":
        return values[0] // values[1]
    if k == "mod":
        return values[0] % values[1]
    small = k == "min"
    a, b = values
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b) if small else max(a, b)
    take_a = (a < b) if small else (a > b)
    return a * take_a + b * ~take_a


def coefficient(e: IndexLike, v: Index) -> IndexLike | None:
    """``c`` where ``e == c * v + (something without v)``; ``None`` where ``e`` is not of that form.

    A number, or an expression of symbols: a stride that is known only at run time.
    """
    if isinstance(e, int) or v not in e.free_vars:
        return 0
    out: IndexLike = 0
    for atom, c in linear_terms(e)[1]:
        if atom is v:
            out = out + c
        elif v in atom.free_vars:
            left = _without(atom, (v,)) if atom.kind == "mul" else None
            if left is None or left.free_vars:
                return None
            out = out + left * c
    return out.args[0] if isinstance(out, Index) and out.kind == "const" else out


def parts(e: IndexLike, kind: str) -> Iterator[Index]:
    """Every index of a kind in ``e`` itself, outermost first: not in the extents of its variables, nor in
    what an indirect index reads."""
    if isinstance(e, int):
        return
    if e.kind == kind:
        yield e
    if e.kind == "sum":
        for atom, _ in e.args[1]:
            yield from parts(atom, kind)
    elif e.kind not in ("const", "var", "sym"):
        for a in e.args:
            if isinstance(a, Index):
                yield from parts(a, kind)


def indirect_atoms(e: IndexLike) -> Iterator[Index]:
    """Every indirect index inside ``e``, outermost first."""
    return parts(e, "indirect")
