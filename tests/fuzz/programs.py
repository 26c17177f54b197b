"""What a random program is, and how much noise may change its results.

What comes in: text. What goes out: a `Program`: expressions that make its inputs, and one statement a line.
One with symbolic sizes comes with several settings of them, and is compiled once for all. What holds in
between: a program is text alone, so that it can be printed, pasted into a test, and made smaller.

Next: generator.py, which makes them up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotloop.tools.noise import Noise

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
