"""Rewrites of value expressions that keep the results within the promise of the dtype.

What comes in: an expression. What goes out: an equal or cheaper one, the same object where nothing changed. The next
file is ``interpret.py``.
"""

from __future__ import annotations

import torch

from .expr import OPS, Expr, cast, children, dtype_name, rebuild, to_text, walk

__all__ = ["drop_roundings", "to_lines"]


def _unrounded(e: Expr) -> Expr:
    """``e``, or the wider value that an implicit rounding started from."""
    if e.op == "cast" and e.dtype.is_floating_point:
        inner = e.args[0]
        if inner.op == "cast" and inner.attr and inner.args[0].dtype is e.dtype:
            return inner.args[0]
    return e


def drop_roundings(e: Expr) -> Expr:
    """Keep low-precision intermediates in the compute dtype where only continuous operations see them.

    ``cast_f32(round_bf16(x))`` becomes ``x`` as an argument of an operation that is continuous, a ``where`` or a
    ``masked`` value, or another cast; comparisons, ``floor`` and the like still see the rounded value.
    """
    memo: dict[Expr, Expr] = {}

    def visit(n: Expr) -> Expr:
        got = memo.get(n)
        if got is not None:
            return got
        args = tuple(visit(a) for a in n.args)
        info = OPS.get(n.op)
        if n.op in ("cast", "where", "masked") or (info is not None and info.continuous):
            args = tuple(_unrounded(a) for a in args)
        out = _unrounded(rebuild(n, args)) if n is e else rebuild(n, args)
        memo[n] = out
        return out

    return visit(e)


def to_lines(e: Expr) -> list[str]:
    """The tree on several lines: each node that is used more than once gets a name, the last line is the value."""
    uses: dict[Expr, int] = {}
    for n in walk(e):
        for c in children(n):
            uses[c] = uses.get(c, 0) + 1
    names: dict[Expr, str] = {}
    lines: list[str] = []

    def text(n: Expr) -> str:
        if n in names:
            return names[n]
        if not n.args:
            return to_text(n)
        inner = ", ".join(text(a) for a in n.args)
        suffix = f"_{dtype_name(n.dtype)}" if n.op in ("cast", "bitcast") else ""
        return f"{'round' if n.op == 'cast' and n.attr else n.op}{suffix}({inner})"

    for n in walk(e):
        if uses.get(n, 0) > 1 and n.args:
            line = text(n)
            names[n] = f"t{len(names)}"
            lines.append(f"{names[n]} = {line}")
    lines.append(text(e))
    return lines


def is_low_precision(dtype: torch.dtype) -> bool:
    """Whether values of this dtype are computed in float32."""
    return dtype in (torch.bfloat16, torch.float16)
