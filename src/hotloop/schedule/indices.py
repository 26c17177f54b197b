"""Indices that are computed but not read from memory: found out at compile time.

What comes in: a body whose loads are indexed by values, as upsampling computes them:
``int((i + 0.5) * 0.5 - 0.5)``. What goes out: the same body with index expressions in their place,
``max(0, (2 * i - 1) // 4)``, wherever one formula gives the same numbers. What holds in between: a value of
one loop variable is evaluated at every point of the variable, so that nothing is assumed of the arithmetic;
a value out of range is left alone, to be found by the kernel. The next file is ``split.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from hotloop.compat import real_tensors
from hotloop.ir import expr as ex
from hotloop.ir import index as ix
from hotloop.ir.evaluate import Evaluator
from hotloop.ir.expr import Expr
from hotloop.ir.index import Index

__all__ = ["settle"]

#: Variables of more values than this are not tabulated: it bounds compile time.
MAX_POINTS = 4096
_DENOMINATORS = (1, 2, 3, 4, 5, 6, 8, 16, 32)


def settle(body: Expr) -> Expr:
    """Replace each computed index of one loop variable by an equal formula; the same object without any."""
    known: dict[Index, Index] = {}

    def atom(a: Index) -> Index:
        if a not in known:
            known[a] = _formula(a)
        return known[a]

    def load(n: Expr) -> Expr | None:
        new = tuple(ex.replace_atoms(i, atom) for i in n.indices)
        return None if new == n.indices else ex.load(n.buffer, new, n.dtype)

    if not any(True for n in ex.loads(body) for i in n.indices for _ in ix.indirect_atoms(i)):
        return body
    return ex.rewrite_loads(body, load)


def _formula(a: Index) -> Index:
    payload, size, _ = a.args
    if len(payload.free_vars) != 1 or not isinstance(size, int):
        return a
    (v,) = payload.free_vars
    n = v.extent
    if (
        not isinstance(n, int)
        or not 1 < n <= MAX_POINTS
        or any(e.op in ("load", "local", "random") for e in ex.walk(payload))
    ):
        return a
    with real_tensors():
        values = Evaluator({v: torch.arange(n)}, _no_reader).value(payload)
        table: list[int] = values.expand(n).tolist()
    if min(table) < 0 or max(table) >= size:
        return a
    found = _fit(table)
    if found is None:
        return a
    p, q, r = found
    return ix.maximum(min(table), ix.minimum(max(table), (v * p + q) // r))


def _no_reader(*_: object) -> NoReturn:
    raise AssertionError("a tabulated index reads no memory")


def _fit(table: Sequence[int]) -> tuple[int, int, int] | None:
    """``(p, q, r)`` with ``table[i] == (p * i + q) // r``, clamped to the table's range, for every ``i``."""
    lo, hi = min(table), max(table)
    slope = (table[-1] - table[0]) / (len(table) - 1)
    for r in _DENOMINATORS:
        near = round(slope * r)
        for p in (near, near + 1, near - 1):
            for q in range(-2 * r, 2 * r + 1):
                shift = q + r * table[0]
                if all(min(max((p * i + shift) // r, lo), hi) == t for i, t in enumerate(table)):
                    return p, shift, r
    return None
