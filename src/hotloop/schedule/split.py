"""Splitting loop variables where indices divide them, so that the indices become linear.

What comes in: variables and the index expressions that use them. What goes out: for each variable that should
be split, the expression that replaces it and its parts. What holds in between: the points are the same in the
same order. The next file is ``fuse.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from hotloop.ir import index as ix
from hotloop.ir import sizes as sz
from hotloop.ir.index import Index, IndexLike

__all__ = ["Parts", "split_variables"]

#: For each variable that is replaced, the expression in its place and the new variables in that, outermost
#: first.
Parts = Mapping[Index, tuple[Index, tuple[Index, ...]]]

#: A variable whose low part nobody uses (each element repeats) is split only into pieces of this length at
#: least: a shorter inner loop would cost more than a gather.
MIN_REPEATED = 8


def _divisors(e: Index, found: dict[Index, set[IndexLike]], low: set[Index]) -> None:
    """Collect ``k`` for each ``v // k``, ``v % k`` and ``(v // k) % m`` over a single variable ``v``.

    ``low`` collects the variables whose remainder is used.
    """
    if e.kind == "sum":
        for atom, _ in e.args[1]:
            _divisors(atom, found, low)
        return
    if e.kind == "mul" and e.symbolic:
        for atom in e.args:
            _divisors(atom, found, low)
        return
    if e.kind not in ("div", "mod"):
        return
    x, k = e.args
    if k.free_vars:
        return
    if x.kind == "var":
        found.setdefault(x, set()).add(sz.plain(k))
        if e.kind == "mod":
            low.add(x)
    elif x.kind == "div" and x.args[0].kind == "var" and not x.args[1].free_vars:
        found.setdefault(x.args[0], set()).update((sz.plain(x.args[1]), sz.plain(x.args[1] * k)))
    else:
        _divisors(x, found, low)


def _chain(ks: set[IndexLike], n: IndexLike) -> list[IndexLike] | None:
    """``[1, k1, k2, ..., n]``, each dividing the next, or ``None``."""
    if isinstance(n, int) and sz.is_static(ks):
        chain: list[IndexLike] = [1, *sorted(k for k in ks if isinstance(k, int) and 1 < k < n), n]
    else:
        between = [k for k in ks if k != 1 and k != n]
        chain = [1, *sorted(between, key=lambda k: (sz.hint(k), str(k))), n]
    if len(chain) == 2 or any(sz.plain(ix.mod(b, a)) != 0 for a, b in pairwise(chain)):
        return None
    return chain


def split_variables(variables: Sequence[Index], indices: Iterable[Index]) -> Parts:
    """The parts of each variable that a chain of divisors divides."""
    found: dict[Index, set[IndexLike]] = {}
    low: set[Index] = set()
    for i in indices:
        _divisors(i, found, low)
    out: dict[Index, tuple[Index, tuple[Index, ...]]] = {}
    for v, ks in found.items():
        if v not in variables or (v not in low and min(map(sz.hint, ks)) < MIN_REPEATED):
            continue
        chain = _chain(ks, v.extent)
        if chain is None:
            continue
        # v == (outermost * radix + next) * radix + ...: one part between each two links of the chain.
        own = tuple(
            ix.var(f"{v.name}_{j}", sz.plain(ix.floordiv(b, a))) for j, (a, b) in enumerate(pairwise(chain))
        )
        out[v] = (ix.linearize(own, chain[:-1]), tuple(reversed(own)))
    return out
