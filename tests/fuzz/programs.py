"""What a random program is, and the noise by which we know what rounding may do to it.

What comes in: text. What goes out: a `Program`: expressions that make its inputs, and one statement a line.
One with symbolic sizes comes with several settings of them, and is compiled once for all. What holds in
between: a program is text alone, so that it can be printed, pasted into a test, and made smaller.

Next: generator.py, which makes them up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["Input", "Noise", "Program", "Step", "agrees", "make_inputs"]

F = torch.nn.functional
LARGEST = 1e3  # of a value: what follows would soon be infinite
#: How much a result may depend on the last places of what came before, relative to its largest element.
STABLE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Input:
    """A tensor: the expression that makes it, of the sizes s0, s1, ..., after `torch.manual_seed(seed)`."""

    name: str
    code: str
    seed: int
    grad: bool = False

    def make(self, sizes: Sequence[int] = ()) -> Tensor:
        torch.manual_seed(self.seed)
        value: Tensor = eval(self.code, {"torch": torch, **{f"s{k}": n for k, n in enumerate(sizes)}})
        return value


@dataclass(frozen=True)
class Step:
    """One statement: the variable that it defines, if it does not write in place, and its text."""

    name: str | None
    code: str

    @property
    def uses(self) -> frozenset[str]:
        return frozenset(re.findall(r"\b[xv]\d+\b", self.code))

    def __str__(self) -> str:
        return self.code if self.name is None else f"{self.name} = {self.code}"


@dataclass(frozen=True)
class Program:
    """A function of tensors that gives a list of tensors. `sizes` are the symbolic ones, of each call."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...] = ()

    @property
    def calls(self) -> range:
        """The numbers of the calls that one compiled function must serve."""
        return range(max(len(self.sizes), 1))

    def source(self) -> str:
        lines = [f"def program({', '.join(i.name for i in self.inputs)}):"]
        lines += [f"    {s}" for s in self.steps]
        return "\n".join([*lines, f"    return [{', '.join(self.results)}]", ""])

    def function(self) -> Callable[..., list[Tensor]]:
        space: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(self.source(), "<program>", "exec"), space)
        made: Callable[..., list[Tensor]] = space["program"]
        return made

    def kinds(self) -> list[str]:
        """What a count of programs tells apart."""
        kinds = {"with gradients": any(i.grad for i in self.inputs), "with symbolic sizes": bool(self.sizes)}
        return [name for name, present in kinds.items() if present]

    def __str__(self) -> str:
        """What can be pasted into a test."""
        made = [f"Input({i.name!r}, {i.code!r}, {i.seed}, {i.grad})" for i in self.inputs]
        steps = [f"Step({s.name!r}, {s.code!r})" for s in self.steps]
        text = ",\n        ".join
        return (
            f"Program(\n    (\n        {text(made)},\n    ),\n    (\n        {text(steps)},\n    ),\n"
            f"    {self.results!r},\n{f'    {self.sizes!r},' if self.sizes else ''}\n)".replace("\n\n", "\n")
        )


def make_inputs(program: Program, call: int = 0) -> list[Tensor]:
    """Fresh tensors, equal ones each time; those that want a gradient ask for it."""
    made = [i.make(program.sizes[call] if program.sizes else ()) for i in program.inputs]
    return [t.requires_grad_(True) if i.grad else t for i, t in zip(program.inputs, made, strict=True)]


class Noise(TorchDispatchMode):
    """Every floating-point result is off by up to a unit in its last place."""

    def __init__(self, seed: int, units: float = 1.0) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        self._units = units

    def disturb(self, t: Tensor) -> Tensor:
        """Change it in place."""
        if t.is_floating_point() and t.numel() and not _overlaps(t):
            scale = torch.finfo(t.dtype).eps * self._units
            wide = torch.float64 if t.dtype is torch.float64 else torch.float32
            off = torch.rand(t.shape, generator=self._generator, dtype=wide).mul_(2 * scale).add_(1 - scale)
            t.copy_(t.to(wide) * off)
        return t

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _APART:
            with self:
                return _APART[func](*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        if any(r.alias_info is not None and not r.alias_info.is_write for r in returns) or _moves(func):
            return out
        tree_map_only(Tensor, self.disturb, out)
        return out


def _moves(func: Any) -> bool:
    """Whether an operator only moves values."""
    return func._schema.name in _MOVING


_MOVING = frozenset(
    f"aten::{name}"
    for name in (
        "clone", "cat", "stack", "index", "flip", "roll", "fill_", "zero_", "copy_", "select_backward",
        "slice_backward", "constant_pad_nd", "gather", "index_select", "zeros", "zeros_like", "ones",
        "ones_like", "full", "full_like", "arange", "repeat", "masked_fill", "masked_fill_", "where",
        "new_zeros", "empty", "empty_like", "tril", "triu", "detach", "scatter", "scatter_", "index_copy",
        "index_copy_", "slice_scatter", "select_scatter", "diagonal_scatter", "masked_scatter", "index_fill",
        "index_fill_", "index_put", "index_put_",
    )
)  # fmt: skip


aten = torch.ops.aten


def _variance(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """A variance and its mean, from a mean that is rounded: where all elements are equal, eager's is not."""
    dims = list(range(x.dim())) if not dim else list(dim)
    wide = x if x.dtype is torch.float64 else x.to(torch.float32)
    mean = wide.mean(dims, keepdim=True)
    count = math.prod(x.shape[d] for d in dims) - (1 if correction is None else correction)
    total = (wide - mean).square().sum(dims, keepdim=keepdim)
    return (total / max(count, 0)).to(x.dtype), wide.mean(dims, keepdim=keepdim).to(x.dtype)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = x if x.dtype is torch.float64 else x.to(torch.float32)
    variance, mean = _variance(wide, range(-len(shape), 0), correction=0, keepdim=True)
    scale = torch.rsqrt(variance + eps)
    out = (wide - mean) * scale
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(x.dtype), mean, scale


#: Operators that eager does in one, but which noise has to enter in their middle.
_APART: dict[Any, Callable[..., Any]] = {
    aten.var.correction: lambda *a, **k: _variance(*a, **k)[0],
    aten.std.correction: lambda *a, **k: _variance(*a, **k)[0].sqrt(),
    aten.var_mean.correction: _variance,
    aten.native_layer_norm.default: _layer_norm,
}


def _overlaps(t: Tensor) -> bool:
    return any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape, strict=True))


def agrees(plain: Tensor, noisy: Tensor) -> bool:
    """Whether a result is the same within what noise may do."""
    if plain.numel() == 0:
        return True
    if not plain.is_floating_point():
        return torch.equal(plain, noisy)
    wide = plain.to(torch.float64)
    largest = float(wide.abs().amax())
    if not largest <= LARGEST:  # NaN too
        return False
    return float((noisy.to(torch.float64) - wide).abs().amax()) <= STABLE[plain.dtype] * max(largest, 1e-3)
