"""Sizes: numbers, or index expressions of symbols.

What comes in: extents, strides and offsets as they stand in buffers and loops. What goes out: products of
them, estimates to decide by, the symbols in them, and which loops walk an index without meeting. What holds
in between: a size that is a number is an ``int``, never a constant ``Index``, so that static programs are
made of plain numbers; an estimate decides what is fast, never what is right. The next file is ``expr.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from . import index as ix
from .index import Index, IndexLike

__all__ = [
    "MOST",
    "UNKNOWN",
    "at_least",
    "estimate",
    "hint",
    "is_static",
    "least",
    "plain",
    "product",
    "separate_variables",
    "static",
    "symbols",
    "total",
]


def plain(value: IndexLike) -> IndexLike:
    """An index that is a number as an int: how sizes and strides are kept."""
    return value.value if isinstance(value, Index) and value.is_const else value


def static(value: IndexLike) -> int:
    """A size that has to be a number. Raises ``TypeError`` where it varies."""
    if isinstance(value, Index):
        return value.value
    return value


def product(values: Iterable[IndexLike]) -> IndexLike:
    """The product of sizes; an int where all of them are."""
    out: IndexLike = 1
    for v in values:
        out = out * v
    return plain(out)


def hint(e: IndexLike) -> int:
    """About how large a size is: what decisions are made on, never what is right. Variables may not occur."""
    if isinstance(e, int):
        return e
    return e.value if e.is_const else int(ix.evaluate(e, _Hints()))


class _Hints(Mapping[Index, int]):
    """Every symbol at its hint."""

    def __getitem__(self, e: Index) -> int:
        _, lo, hi, hint = e.args
        if hint is not None:
            return int(hint)
        return max(lo or 0, UNKNOWN if hi is None else min(hi, UNKNOWN))

    def __iter__(self) -> Iterator[Index]:
        return iter(())

    def __len__(self) -> int:
        return 0


class _Least(_Hints):
    """Every symbol as small as it can be."""

    def __getitem__(self, e: Index) -> int:
        return max(e.lo or 0, 0)


def least(e: IndexLike) -> int:
    """The value where every symbol is as small as it can be."""
    return e if isinstance(e, int) else int(ix.evaluate(e, _Least()))


#: What a size without a hint is taken for.
UNKNOWN = 1024
#: A program for sizes that vary is for sizes up to this, so that vectors of positions have 32-bit lanes: also
#: of positions that a small stride or window multiplies. It is compiled again for larger ones.
MOST = 1 << 27


def symbols(e: IndexLike) -> Iterator[Index]:
    """Every symbol in ``e`` itself, not in its variables' extents or in what an indirect index reads."""
    return ix.parts(e, "sym")


def estimate(sizes: Iterable[IndexLike]) -> int:
    """About how many points there are."""
    n = 1
    for s in sizes:
        n *= s if isinstance(s, int) else hint(s)
    return n


def is_static(sizes: Iterable[IndexLike]) -> bool:
    """Whether all of them are numbers."""
    return all(isinstance(s, int) for s in sizes)


def at_least(size: IndexLike, least: int) -> bool:
    """Whether a size is certainly ``least`` or more."""
    if isinstance(size, int):
        return size >= least
    return size.lo is not None and size.lo >= least


def separate_variables(e: IndexLike) -> tuple[Index, ...]:
    """The variables of an index, where different values of them always give different indices.

    So it is with one variable alone, and with several in steps that cannot meet: ``8 * i + j`` with
    ``j < 8``.
    """
    terms = sorted(ix.linear_terms(e)[1], key=lambda t: abs(t[1]))
    reach: int | None = 0
    for v, c in terms:
        if v.kind != "var" or reach is None or abs(c) <= reach:
            return ()
        reach = None if v.hi is None else reach + abs(c) * v.hi
    return tuple(v for v, _ in terms)


def total(sizes: Iterable[IndexLike]) -> IndexLike:
    """Their sum."""
    out: IndexLike = 0
    for s in sizes:
        out = out + s
    return plain(out)
