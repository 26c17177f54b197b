"""What an expression tree means, in plain torch: one function an operation, and an evaluator over tensors.

What comes in: a tree, a binding of its loop variables to integer tensors that broadcast against each other,
and a reader of memory. What goes out: a tensor of the tree's dtype. What holds in between: every node is
evaluated once, on whole tensors; inside ``masked`` a *guard* says where the value counts, and where it does
not, no index is looked at and no fault is raised.

The next file is ``interpret.py``, which runs programs, kernels and schedules with this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from hotloop.errors import ProbabilityError

from . import index as ix
from .expr import OPS, SPECIAL_FUNCTIONS, Expr, children, walk
from .index import Index, IndexLike

__all__ = ["FUNCTIONS", "Bound", "Evaluator", "apply", "gather", "random_word"]

#: What a loop variable or a size symbol stands for.
Bound = int | Tensor
#: Reads a load's element: (the load, one index tensor a dimension, the guard) -> values.
Reader = Callable[[Expr, Sequence[Tensor], Tensor | None], Tensor]


def _square(x: Tensor) -> Tensor:
    return x * x


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` rounded once for float32; float64 (no wider type here) is rounded after each step.

    The product of two float32 is exact in float64. The sum is then rounded *to odd* (Boldo and Melquiond,
    "Emulation of FMA and correctly rounded sums", 2008): its last bit records whether it was exact, so that
    the second rounding, to float32, cannot go wrong.
    """
    if a.dtype is not torch.float32:
        return a * b + c
    p, d = a.double() * b.double(), c.double()
    s = p + d  # broadcasts: every operation below is elementwise
    back = s - p
    error = (p - (s - back)) + (d - back)
    bits = s.view(torch.int64)
    away = torch.where((error > 0) == (s > 0), 1, -1)
    adjust = torch.isfinite(s) & torch.isfinite(error) & (error != 0) & (bits & 1 == 0)
    return torch.where(adjust, bits + away, bits).view(torch.float64).float()


def _probability(p: Tensor) -> Tensor:
    if not bool(((p >= 0) & (p <= 1)).all()):
        raise ProbabilityError("a probability is outside [0, 1]")
    return p


def _integer_division(plain: Callable[[Tensor, Tensor], Tensor], quotient: bool) -> Callable[..., Tensor]:
    """Division or remainder that keeps ``MIN / -1`` from the processor, where it traps: integers wrap."""

    def divide(a: Tensor, b: Tensor) -> Tensor:
        if a.dtype.is_floating_point or not a.dtype.is_signed:
            return plain(a, b)
        minus = b == -1
        safe = plain(a, torch.where(minus, torch.ones_like(b), b))
        return torch.where(minus, -a if quotient else torch.zeros_like(a), safe)

    return divide


def _extreme(beyond: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Of equal operands (0.0 and -0.0) the second; torch's own takes either, depending on where it stands."""

    def choose(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(beyond(a, b) | (a != a), a, b)

    return choose


# fmt: off
_SAME_NAME = (
    "neg", "abs", "floor", "ceil", "trunc", "round", "sign", "signbit", "isnan", "isinf", "isfinite",
    "logical_not", "bitwise_not", "sqrt", "rsqrt", "reciprocal", "exp", "exp2", "log", "log2", "log10",
    "sigmoid", "expm1", "log1p", "sin", "cos", "tanh", "erf", "tan", "asin", "acos", "atan", "sinh", "cosh",
    "asinh", "acosh", "atanh", "erfc", "erfinv", "lgamma", "digamma", "add", "sub", "mul",
    "fmax", "fmin", "pow", "atan2", "hypot", "copysign", "nextafter", "bitwise_and",
    "bitwise_or", "bitwise_xor", "logical_and", "logical_or", "logical_xor", "eq", "ne", "lt", "le", "gt",
    "ge",
)
# fmt: on

#: Those that torch calls otherwise.
_OTHER_NAMES = {
    **{f"bessel_i{order}": f"i{order}" for order in "01"},
    **{f"bessel_i{order}_scaled": f"i{order}e" for order in "01"},
    **{f"bessel_k{order}": f"modified_bessel_k{order}" for order in "01"},
    **{f"bessel_k{order}_scaled": f"scaled_modified_bessel_k{order}" for order in "01"},
}

#: The torch function of every operation in ``expr.OPS``.
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in _SAME_NAME},
    **{name: getattr(torch.special, _OTHER_NAMES.get(name, name)) for name in SPECIAL_FUNCTIONS},
    "maximum": _extreme(torch.gt),
    "minimum": _extreme(torch.lt),
    "square": _square,
    "div": torch.true_divide,
    "floordiv": _integer_division(partial(torch.div, rounding_mode="floor"), quotient=True),
    "truncdiv": _integer_division(partial(torch.div, rounding_mode="trunc"), quotient=True),
    "remainder": _integer_division(torch.remainder, quotient=False),
    "fmod": _integer_division(torch.fmod, quotient=False),
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "probability": _probability,
    "fma": _fma,
}

_DIVISIONS = ("floordiv", "truncdiv", "remainder", "fmod")


def apply(e: Expr, args: Sequence[Tensor]) -> Tensor:
    """One node on the values of its arguments, elementwise with broadcasting."""
    if e.op in OPS:
        out = FUNCTIONS[e.op](*args)
    elif e.op == "cast":
        out = args[0]
    elif e.op == "bitcast":
        return args[0].contiguous().view(e.dtype)
    elif e.op in ("where", "masked"):
        out = torch.where(args[0], args[1], args[2])
    elif e.op == "const":
        return torch.tensor(e.value, dtype=e.dtype)
    else:
        raise TypeError(f"unknown node {e.op!r} in {e!r}")
    return out if out.dtype is e.dtype else out.to(e.dtype)


_LOW = 0xFFFFFFFF
#: By how many bits each round turns its second word; the parity that the third part of the key carries.
_ROTATIONS, _PARITY = (13, 15, 26, 6, 17, 29, 16, 24), 0x1BD11BDA


def random_word(key: Tensor, counter: Tensor, word: int) -> Tensor:
    """The node ``random`` of ``expr.py``: 32-bit words held in int64, so that nothing overflows."""
    parts = [key & _LOW, (key >> 32) & _LOW]
    parts.append(parts[0] ^ parts[1] ^ _PARITY)
    high = ((counter >> 32) & _LOW) | (word >> 1 << 31)
    a, b = ((counter & _LOW) + parts[0]) & _LOW, (high + parts[1]) & _LOW
    for turn in range(20):
        by = _ROTATIONS[turn % 8]
        a = (a + b) & _LOW
        b = ((b << by) & _LOW | (b >> (32 - by))) ^ a
        if turn % 4 == 3:
            step = turn // 4 + 1
            a = (a + parts[step % 3]) & _LOW
            b = (b + parts[(step + 1) % 3] + step) & _LOW
    return (b if word & 1 else a).to(torch.int32)


def _needs(e: Expr) -> tuple[Expr, ...]:
    """What is evaluated before a node; the guarded side of ``masked`` is left to its own evaluation."""
    return (e.args[0], e.args[2]) if e.op == "masked" else children(e)


class Evaluator:
    """Evaluates trees with one binding of variables; what trees share is computed once."""

    def __init__(
        self,
        env: Mapping[Index, Bound],
        read: Reader,
        locals_: Mapping[str, Tensor] | None = None,
        guard: Tensor | None = None,
    ) -> None:
        self._env = env
        self._read = read
        self._locals = locals_ or {}
        self._guard = guard
        self._values: dict[Expr, Tensor] = {}

    def value(self, e: Expr) -> Tensor:
        """The value of ``e``; a broadcast shape, so a dimension it does not depend on may have size 1."""
        for node in walk(e, _needs, self._values):
            self._values[node] = self._node(node)
        return self._values[e]

    def index(self, i: IndexLike) -> Tensor:
        """The value of an index as an int64 tensor. An index read from memory is tested here."""
        out = ix.evaluate(i, self._env, self._indirect)
        return out if isinstance(out, Tensor) else torch.tensor(out, dtype=torch.int64)

    def _node(self, e: Expr) -> Tensor:
        if e.op == "load":
            return self._read(e, [self.index(i) for i in e.indices], self._guard)
        if e.op == "index":
            return self.index(e.attr)
        if e.op == "local":
            if e.attr not in self._locals:
                raise KeyError(f"local {e.attr!r} is read before it is defined")
            return self._locals[e.attr]
        if e.op == "masked":
            return self._masked(e)
        args = [self._values[a] for a in e.args]
        if e.op == "random":
            return random_word(args[0], self.index(e.attr[1]), e.attr[0])
        if e.op == "probability" and self._guard is not None:
            args[0] = torch.where(self._guard, args[0], torch.zeros_like(args[0]))
        if e.op in _DIVISIONS and self._guard is not None and not e.dtype.is_floating_point:
            args[1] = torch.where(self._guard, args[1], torch.ones_like(args[1]))
        return apply(e, args)

    def _masked(self, e: Expr) -> Tensor:
        cond = self._values[e.args[0]]
        guard = cond if self._guard is None else cond & self._guard
        inner = Evaluator(self._env, self._read, self._locals, guard)
        return apply(e, [cond, inner.value(e.args[1]), self._values[e.args[2]]])

    def _indirect(self, atom: Index) -> Tensor:
        payload, size, _ = atom.args
        got = self.value(payload).to(torch.int64)
        limit = self.index(size)
        bad = (got < 0) | (got >= limit)
        if self._guard is not None:
            bad = bad & self._guard
        if bool(bad.any()):
            first = torch.broadcast_to(got, bad.shape)[bad][0]
            raise IndexError(
                f"index out of range: {int(first)} is not in [0, {int(limit.max())}), read by {payload!r}"
            )
        return got if self._guard is None else torch.where(self._guard, got, 0)


def gather(memory: Tensor, position: Tensor, guard: Tensor | None, what: object) -> Tensor:
    """``memory[position]`` of a 1-D memory; where the guard fails the position does not matter.

    Raises ``IndexError`` for a position outside where it does: a fault of the program, not of the data.
    """
    if guard is not None:
        position = torch.where(guard, position, 0)
    n = memory.numel()
    if position.numel():
        lo, hi = (int(b) for b in torch.aminmax(position))
        inside = lo >= 0 and hi < n
        if not inside and n == 0 and guard is not None and not bool(guard.any()):
            return torch.zeros(position.shape, dtype=memory.dtype)
        if not inside:
            raise IndexError(f"position {lo if lo < 0 else hi} of {n} elements, in {what!r}")
    return memory.index_select(0, position.reshape(-1)).reshape(position.shape)
