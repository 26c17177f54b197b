"""Index expressions as text: how they are shown, and what sorts them the same way in every process.

What comes in: an index, or its kind and arguments, as ``index.py`` describes them. What goes out: text that
Python reads as the same arithmetic, but for what is read from memory. The next file is ``index.py``.
"""

from __future__ import annotations

from typing import Any

__all__ = ["to_text", "to_text_parts"]


def to_text(e: Any) -> str:
    """A number or an index as text."""
    return str(e) if isinstance(e, int) else to_text_parts(e.kind, e.args)


def to_text_parts(kind: str, args: tuple[Any, ...]) -> str:
    """An index that is of this kind and has these arguments."""
    if kind in ("const", "var", "sym"):
        return str(args[0])
    if kind == "sum":
        parts = [f"{c}*{to_text(a)}" if c != 1 else to_text(a) for a, c in args[1]]
        if args[0]:
            parts.append(str(args[0]))
        return "(" + " + ".join(parts).replace("+ -", "- ") + ")"
    if kind == "mul":
        return "*".join(to_text(a) for a in args)
    if kind == "div":
        return f"({to_text(args[0])}//{to_text(args[1])})"
    if kind == "mod":
        return f"({to_text(args[0])}%{to_text(args[1])})"
    if kind == "indirect":
        return f"[{args[0]!r} < {to_text(args[1])}]"
    return f"{kind}({to_text(args[0])}, {to_text(args[1])})"
