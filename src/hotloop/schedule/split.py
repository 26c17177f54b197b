"""Splitting loop variables where indices divide them, so that the indices become linear.

What comes in: variables and the index expressions that use them. What goes out: for each variable that should
be split, the expression that replaces it and its parts. What holds in between: the points are the same in the
same order. The next file is ``fuse.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from hotloop.ir import index as ix
from hotloop.ir.index import Index

__all__ = ["Parts", "split_variables"]

#: For each variable that is replaced, the expression in its place and the new variables in that, outermost
#: first.
Parts = Mapping[Index, tuple[Index, tuple[Index, ...]]]

#: A variable whose low part nobody uses (each element repeats) is split only into pieces of this length at
#: least: a shorter inner loop would cost more than a gather.
MIN_REPEATED = 8


def _divisors(e: Index, found: dict[Index, set[int]], low: set[Index]) -> None:
    """Collect ``k`` for each ``v // k``, ``v % k`` and ``(v // k) % m`` over a single variable ``v``.

    ``low`` collects the variables whose remainder is used.
    """
    if e.kind == "sum":
        for atom, _ in e.args[1]:
            _divisors(atom, found, low)
        return
    if e.kind not in ("div", "mod"):
        return
    x, k = e.args
    if not k.is_const:
        return
    if x.kind == "var":
        found.setdefault(x, set()).add(k.value)
        if e.kind == "mod":
            low.add(x)
    elif x.kind == "div" and x.args[0].kind == "var" and x.args[1].is_const:
        found.setdefault(x.args[0], set()).update((x.args[1].value, x.args[1].value * k.value))
    else:
        _divisors(x, found, low)


def split_variables(variables: Sequence[Index], indices: Iterable[Index]) -> Parts:
    """The parts of each variable that a chain of divisors divides."""
    found: dict[Index, set[int]] = {}
    low: set[Index] = set()
    for i in indices:
        _divisors(i, found, low)
    out: dict[Index, tuple[Index, tuple[Index, ...]]] = {}
    for v, ks in found.items():
        if v not in variables or (v not in low and min(ks) < MIN_REPEATED):
            continue
        n = int(v.extent)  # type: ignore[arg-type]
        chain = [1, *sorted(k for k in ks if 1 < k < n), n]
        if len(chain) == 2 or any(b % a for a, b in pairwise(chain)):
            continue
        # v == (outermost * radix + next) * radix + ...: one part between each two links of the chain.
        own = tuple(ix.var(f"{v.name}_{j}", b // a) for j, (a, b) in enumerate(pairwise(chain)))
        out[v] = (ix.linearize(own, chain[:-1]), tuple(reversed(own)))
    return out
