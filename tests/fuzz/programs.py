"""Random programs: views, writes in place, broadcasting, mixed dtypes, reductions, odd sizes.

What comes in: a seed. What goes out: a `Program`, which is text: expressions that make its inputs, and one
statement a line. What holds in between: a statement enters a program only after PyTorch has run it, and only
if rounding cannot decide its result: two more runs, in which every result is off by a unit in the last place,
give the same integers and booleans, and floats that differ as little. So a compiled program that differs is
wrong, whatever functions with jumps are in it.

Next: engines.py, which runs a program in every way that hotloop knows.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["Input", "Noise", "Program", "Step", "generate", "make_inputs"]

F = torch.nn.functional
#: Sizes: nothing, one, primes, and the neighbourhood of the vector widths.
SIZES = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 31, 32, 33, 64, 65)
MOST_ELEMENTS = 4096
LARGEST = 1e3  # of a value: what follows would soon be infinite
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
#: How much a result may depend on the last places of what came before, relative to its largest element.
STABLE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Input:
    """A tensor: the expression that makes it, after `torch.manual_seed(seed)`."""

    name: str
    code: str
    seed: int
    grad: bool = False

    def make(self) -> Tensor:
        torch.manual_seed(self.seed)
        value: Tensor = eval(self.code, {"torch": torch})
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
    """A function of tensors that gives a list of tensors."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]

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
        return ["with gradients"] if any(i.grad for i in self.inputs) else []

    def __str__(self) -> str:
        """What can be pasted into a test."""
        made = [f"Input({i.name!r}, {i.code!r}, {i.seed}, {i.grad})" for i in self.inputs]
        steps = [f"Step({s.name!r}, {s.code!r})" for s in self.steps]
        text = ",\n        ".join
        return (
            f"Program(\n    (\n        {text(made)},\n    ),\n    (\n        {text(steps)},\n    ),\n"
            f"    {self.results!r},\n)"
        )


def make_inputs(program: Program) -> list[Tensor]:
    """Fresh tensors, equal ones each time; those that want a gradient ask for it."""
    made = [i.make() for i in program.inputs]
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
        "new_zeros", "empty", "empty_like", "tril", "triu", "detach",
    )
)  # fmt: skip


def _overlaps(t: Tensor) -> bool:
    return any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape, strict=True))


# --- the statements -----------------------------------------------------------------------------------------


def _statements(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(";") if part.strip())


UNARY = _statements(
    """
    torch.sin({x}); torch.cos({x}); torch.tanh({x}); torch.sigmoid({x}); torch.exp(-{x}.abs());
    torch.erf({x}); torch.exp({x}.clamp(max=3)); F.relu({x}); F.gelu({x}); F.gelu({x}, approximate='tanh');
    F.silu({x}); {x}.abs(); -{x}; {x}.abs().sqrt(); torch.rsqrt({x}.abs() + 0.5); torch.log1p({x}.abs());
    torch.expm1(-{x}.abs()); torch.log({x}.abs() + 0.25); {x}.floor(); {x}.round(); {x}.ceil(); {x}.trunc();
    {x}.sign(); torch.square({x}); torch.reciprocal({x}.abs() + 0.5); torch.atan({x}); F.softplus({x});
    F.leaky_relu({x}, 0.1); F.hardswish({x}); F.elu({x}); F.hardtanh({x}); F.softshrink({x});
    torch.logical_not({x}); ~{x}; {x}.isnan(); torch.asinh({x}); torch.sinh({x}.clamp(-3, 3));
    torch.frac({x}); F.mish({x}); F.hardsigmoid({x}); torch.nan_to_num({x}); {x} + 1; {x} * 0.5; 3 - {x};
    {x} / 2; {x} % 3; {x} // 2; {x} ** 2; {x} ** 3; {x} * -2; {x} + True; {x} > 0; {x} <= 1; {x} == 0;
    {x}.clamp(-1, 1); {x}.clamp(min=0); {x} & 3; {x} | 8; {x} ^ 5; {x} << 1; {x} >> 1; {x}.clone();
    torch.zeros_like({x}); torch.full_like({x}, 2); {x}.contiguous(); {x}.detach(); {x} * 1; {x}.fmod(2);
    torch.pow(2, {x}.clamp(-3, 3)); torch.where({x} > 0, {x}, -1); torch.masked_fill({x}, {x} < 0, 2);
    torch.lgamma({x}.abs() + 1); torch.xlogy({x}, {x}.abs() + 1); {x}.logit(0.1); torch.deg2rad({x});
    """
)

CASTS = _statements(
    "; ".join(
        f"{{x}}.to(torch.{d})"
        for d in (
            "float32",
            "float64",
            "bfloat16",
            "float16",
            "int64",
            "int32",
            "int16",
            "int8",
            "uint8",
            "bool",
        )
    )
)

BINARY = _statements(
    """
    {x} + {y}; {x} - {y}; {x} * {y}; {x} + {y}; {x} * {y}; torch.maximum({x}, {y}); torch.minimum({x}, {y});
    {x} / ({y}.abs() + 1); torch.atan2({x}, {y}.abs() + 1); {x} > {y}; {x} <= {y}; {x} == {y}; {x} != {y};
    torch.logical_and({x}, {y}); torch.logical_or({x}, {y}); torch.logical_xor({x}, {y}); {x} & {y};
    {x} | {y}; {x} ^ {y}; torch.where({y} > 0, {x}, {y}); torch.where({x} < {y}, {x}, 0.5);
    torch.masked_fill({x}, {y} > 0, 0.5); torch.add({x}, {y}, alpha=2); torch.sub({x}, {y}, alpha=3);
    torch.lerp({x}, {y}, 0.3); torch.fmax({x}, {y}); torch.copysign({x}, {y}); torch.hypot({x}, {y} + 1);
    torch.addcmul({x}, {y}, {y}, value=0.5); torch.rsub({x}, {y}); torch.floor_divide({x}, {y}.abs() + 1);
    torch.remainder({x}, {y}.abs() + 1); torch.logaddexp({x}, {y}); torch.clamp({x}, max={y});
    torch.clamp({x}, min={y}); torch.dist({x}, {y}); F.mse_loss({x}, {y}); F.smooth_l1_loss({x}, {y});
    F.l1_loss({x}, {y});
    """
)

REDUCTIONS = _statements(
    """
    {x}.sum({d}); {x}.sum({d}, keepdim=True); {x}.mean({d}); {x}.mean({d}, keepdim=True); {x}.amax({d});
    {x}.amin({d}, keepdim=True); {x}.prod({d}); {x}.argmax({d}); {x}.argmin({d}, keepdim=True);
    {x}.any({d}); {x}.all({d}, keepdim=True); {x}.var({d}); {x}.std({d}, keepdim=True);
    torch.logsumexp({x}, {d}); torch.softmax({x}, {d}); torch.log_softmax({x}, {d});
    torch.linalg.vector_norm({x}, dim={d}); {x}.max({d}).values; {x}.min({d}).indices; {x}.cumsum({d});
    {x} - {x}.mean({d}, keepdim=True); {x} / ({x}.abs().sum({d}, keepdim=True) + 1); {x}.count_nonzero({d});
    F.normalize({x}, dim={d}); torch.var_mean({x}, dim={d})[1]; {x}.nansum({d}); {x}.cumprod({d});
    {x}.sort({d}).values;
    """
)

WHOLE_REDUCTIONS = _statements(
    """
    {x}.sum(); {x}.mean(); {x}.amax(); {x}.any(); {x}.argmax(); {x}.std(); torch.softmax({x}, -1);
    {x}.max(); {x}.norm(); F.layer_norm({x}, {x}.shape[-1:]); F.rms_norm({x}, {x}.shape[-1:]);
    {x}.sum(dtype=torch.float64); {x}.all();
    """
)

IN_PLACE = _statements(
    """
    {x}.add_({y}); {x}.mul_({y}); {x}.sub_({y}); {x}.copy_({y}); {x}.fill_(2); {x}.zero_();
    {x}.clamp_(-1, 1); {x}.add_(1); {x}.mul_(0.5); {x}.neg_(); {x}.abs_(); {x}.tanh_();
    {x}.masked_fill_({x} > 0, 1); {x}.relu_(); {x}.logical_not_(); {x}.div_({y}.abs() + 1); {x}.sigmoid_();
    {x}[{s}] = {y}; {x}[{s}] = 1; {x}[{s}] += 1; {x}[{s}].mul_(2); {x}.t_(); {x}.unsqueeze_(0);
    {x}.floor_(); {x}.masked_fill_({y} > 0, 1); {x}.maximum({y}).add_(1); {x}[{x} > 1] = 0;
    torch.add({y}, 1, out={x});
    """
)


class _Generator:
    """A program under construction, run as it grows: as it is, and twice with noise."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        r = self.random
        self.sizes = [r.choice(SIZES) for _ in range(r.randint(1, 3))]
        if r.random() < 0.9:
            self.sizes = [n or 2 for n in self.sizes]
        self.main = r.choices(FLOATS, (10, 2, 2, 1))[0]
        self.grad = r.random() < 0.4
        self.inputs: list[Input] = []
        self.steps: list[Step] = []
        self.noise = [Noise(seed * 2 + 1), Noise(seed * 2 + 2)]
        self.runs: list[dict[str, Any]] = [{"torch": torch, "F": F} for _ in range(3)]

    # --- inputs ---------------------------------------------------------------------------------------------

    def add_input(self) -> None:
        r = self.random
        shape = [
            r.choice(self.sizes) if r.random() < 0.85 else 1
            for _ in range(r.choice((0, 1, 2, 2, 2, 3, 3, 4)))
        ]
        while math.prod(shape) > MOST_ELEMENTS:
            shape[shape.index(max(shape))] = 2
        dtype = self.main if r.random() < 0.7 else r.choice((*FLOATS, *INTEGERS))
        code, dims = self.laid_out(shape)
        text = str(dims) if len(dims) != 1 else f"({dims[0]},)"
        if dtype.is_floating_point:
            base = f"torch.randn({text}, dtype=torch.float64).to({dtype})"
        elif dtype is torch.bool:
            base = f"torch.randn({text}) > 0"
        else:
            base = f"torch.randint({0 if dtype is torch.uint8 else -9}, 10, {text}).to({dtype})"
        grad = self.grad and dtype.is_floating_point and r.random() < 0.8
        made = Input(f"x{len(self.inputs)}", code.format(base=f"({base})"), r.randrange(1000), grad)
        self.inputs.append(made)
        self.start()

    def laid_out(self, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """An expression of `base`, and the shape that base must have, for a tensor of this shape."""
        r = self.random
        n = len(shape)
        how = r.random()
        if how < 0.6 or n == 0:
            return "{base}", tuple(shape)
        d = r.randrange(n)
        if how < 0.75:
            order = list(range(n))
            r.shuffle(order)
            back = [order.index(k) for k in range(n)]
            return f"{{base}}.permute({back})", tuple(shape[k] for k in order)
        index = ", ".join([":"] * d)
        lead = index + ", " if index else ""
        if how < 0.9:
            step = r.choice((1, 2, 3))
            start = r.randint(0, 2)
            wide = [k if i != d else k * step + start + r.randint(0, 2) for i, k in enumerate(shape)]
            return f"{{base}}[{lead}{start}:{start + shape[d] * step}:{step}]", tuple(wide)
        return f"{{base}}.expand({list(shape)})", tuple(1 if i == d else k for i, k in enumerate(shape))

    # --- statements -----------------------------------------------------------------------------------------

    def variables(self) -> dict[str, Tensor]:
        return {k: v for k, v in self.runs[0].items() if isinstance(v, Tensor)}

    def pick(self, among: Sequence[str] | None = None) -> str:
        """A variable, a recent one rather than an old one."""
        names = list(self.variables()) if among is None else among
        return names[max(self.random.randrange(len(names)), self.random.randrange(len(names)))]

    def candidate(self) -> Step:
        r = self.random
        x = self.pick()
        value = self.runs[0][x]
        kinds = ("unary", "cast", "binary", "reduce", "whole", "view", "move", "join", "write", "product")
        kind = r.choices(kinds, (26, 5, 26, 10, 3, 14, 9, 6, 7, 1))[0]
        if kind == "write":
            code = r.choice(IN_PLACE).format(x=x, y=self.partner(x), s=self.slices(value))
            return Step(None, code)
        if kind == "unary":
            code = r.choice(UNARY).format(x=x)
        elif kind == "cast":
            code = r.choice(CASTS).format(x=x)
        elif kind == "binary":
            code = r.choice(BINARY).format(x=x, y=self.partner(x))
        elif kind == "reduce" and value.dim():
            code = r.choice(REDUCTIONS).format(x=x, d=self.dims(value))
        elif kind in ("reduce", "whole"):
            code = r.choice(WHOLE_REDUCTIONS).format(x=x)
        elif kind == "view":
            code = self.view(x, value)
        elif kind == "move":
            code = self.move(x, value)
        elif kind == "join":
            code = self.join(x, value)
        else:
            code = f"{x} @ {self.pick()}"
        return Step(f"v{len(self.steps)}", code)

    def partner(self, x: str) -> str:
        """A variable that broadcasts with x, most of the time one of the same dtype."""
        values = self.variables()
        own = values[x]
        fits = [n for n, t in values.items() if _broadcasts(t.shape, own.shape)]
        alike = [n for n in fits if values[n].dtype is own.dtype]
        return self.pick(alike if self.random.random() < 0.7 else fits)

    def dims(self, value: Tensor) -> str:
        r = self.random
        if value.dim() == 1 or r.random() < 0.75:
            return str(r.randrange(-value.dim(), value.dim()))
        return str(tuple(sorted(r.sample(range(value.dim()), 2))))

    def slices(self, value: Tensor) -> str:
        r = self.random
        parts = [self.one_slice(n) for n in value.shape[: r.randint(1, max(value.dim(), 1))]]
        return ", ".join(parts) or "..."

    def one_slice(self, n: int) -> str:
        r = self.random
        if n == 0:
            return ":"
        start = r.randrange(n)
        return r.choice((
            ":", f"{start}:", f":{start}", f"{start}", f"-{start + 1}", "::2", f"{start}:{n}:3",
            f"{start // 2}:{start + 1}", "None, :", f"1:{n - 1}",
        ))  # fmt: skip

    def view(self, x: str, value: Tensor) -> str:
        r = self.random
        n = value.dim()
        order = list(range(n))
        r.shuffle(order)
        d = r.randrange(n) if n else 0
        size = value.shape[d] if n else 1
        shape = self.other_shape(value.numel())
        choices = [
            f"{x}.reshape({shape})", f"{x}.view({shape})", f"{x}.permute({order})",
            f"{x}.unsqueeze({r.randint(0, n)})",
            f"{x}[{self.slices(value)}]", f"{x}[{self.slices(value)}]", f"{x}.squeeze()", f"{x}.reshape(-1)",
            f"{x}.flatten()", f"{x}.expand({[r.choice((2, 3)), *value.shape]})", f"{x}.mT", f"{x}.detach()",
            f"{x}.expand({[k if k != 1 else r.choice(self.sizes) for k in value.shape]})",
        ]  # fmt: skip
        if n:
            choices += [
                f"{x}.select({d}, {r.randrange(max(size, 1))})", f"{x}.narrow({d}, {size // 3}, {size // 2})",
                f"{x}.chunk(2, {d})[-1]", f"{x}.unfold({d}, {min(size, 3)}, {r.choice((1, 2))})",
                f"{x}.split({max(size // 2, 1)}, {d})[0]", f"{x}.transpose({d}, {r.randrange(n)})",
                f"{x}.movedim({d}, {r.randrange(n)})", f"{x}.unbind({d})[0]", f"{x}.diagonal()",
            ]  # fmt: skip
        return r.choice(choices)

    def other_shape(self, numel: int) -> list[int]:
        """Another shape of as many elements."""
        shape, left = [], numel
        while left > 1 and len(shape) < 3:
            fits = [k for k in (2, 3, 4, 5, 7, 8, 9, 13, 16) if left % k == 0]
            if not fits:
                break
            shape.append(self.random.choice(fits))
            left //= shape[-1]
        shape.append(left)
        self.random.shuffle(shape)
        return shape

    def move(self, x: str, value: Tensor) -> str:
        """The same elements elsewhere."""
        r = self.random
        n = value.dim()
        d = r.randrange(n) if n else 0
        size = value.shape[d] if n else 1
        some = [r.randrange(-size, size) for _ in range(r.randint(1, 5))] if size else []
        inside = [k % size for k in some] if size else []
        choices = [
            f"{x}.flip({d})", f"{x}.roll({r.randint(-3, 5)}, {d})", f"{x}.roll({r.randint(1, 9)})",
            f"F.pad({x}, (1, 2))", f"F.pad({x}, (0, 1, 2, 0), value=1)", f"F.pad({x}, (-1, 1))",
            f"torch.tril({x})", f"torch.triu({x}, 1)", f"{x}.repeat_interleave(2, {d})",
            f"{x}.index_select({d}, torch.tensor({inside}, dtype=torch.int64))",
            f"{x}.take_along_dim({x}.argsort({d}), {d})", f"{x}[torch.tensor({some}, dtype=torch.int64)]",
            f"{x}.repeat({[r.choice((1, 2)) for _ in range(n)]})", f"F.one_hot({x} % 3, 3)",
            f"{x}[..., torch.tensor({some}, dtype=torch.int64)]", f"torch.rot90({x})", f"torch.diff({x})",
            f"F.pad({x}, (1, 1), mode='reflect')", f"F.pad({x}, (2, 1), mode='replicate')",
            f"torch.diag_embed({x})", f"F.avg_pool1d({x}, 2)", f"F.max_pool1d({x}, 3, 2, 1)",
            f"F.interpolate({x}, scale_factor=2.0)",
            f"F.embedding({x}.to(torch.int64).abs() % 2, torch.arange(6.0).view(2, 3))",
            f"{x}.gather({d}, {x}.argsort({d}))",
        ]  # fmt: skip
        return r.choice(choices)

    def join(self, x: str, value: Tensor) -> str:
        r = self.random
        d = r.randrange(max(value.dim(), 1))
        values = self.variables()
        same = [n for n, t in values.items() if t.shape == value.shape]
        rest = [*value.shape[:d], *value.shape[d + 1 :]]
        alike = {n: t for n, t in values.items() if t.dim() == value.dim()}
        fits = [n for n, t in alike.items() if [*t.shape[:d], *t.shape[d + 1 :]] == rest]
        if r.random() < 0.5:
            return f"torch.cat([{x}, {self.pick(fits)}, {self.pick(fits)}][:{r.randint(1, 3)}], {d})"
        return f"torch.stack([{x}, {self.pick(same)}], {r.choice((0, -1, d))})"

    def try_step(self, step: Step) -> bool:
        """Run the statement everywhere; whether it may stay."""
        ok = True
        before = set(self.runs[0])
        try:
            for run, noise in zip(self.runs, (None, *self.noise), strict=True):
                _execute(step, run, noise, self.wants_gradients)
            changed = [step.name] if step.name is not None else list(self.variables())
            ok = all(self.stable(name) for name in changed) and self.gradients_agree(changed)
        except Exception:  # noqa: BLE001 - whatever PyTorch refuses is no statement
            ok = False
        if not ok and step.name is None:
            self.start()
        elif not ok:
            for run in self.runs:
                for name in set(run) - before:
                    del run[name]
        return ok

    @property
    def wants_gradients(self) -> bool:
        return any(i.grad for i in self.inputs)

    def start(self) -> None:
        """Run everything again from the inputs."""
        self.runs = [{"torch": torch, "F": F} for _ in range(3)]
        for run, noise in zip(self.runs, (None, *self.noise), strict=True):
            for i in self.inputs:
                run[i.name] = self.input(i, noise)
            for step in self.steps:
                _execute(step, run, noise, self.wants_gradients)

    def input(self, made: Input, noise: Noise | None) -> Tensor:
        tensor = made.make()
        if noise is not None:
            noise.disturb(tensor)
        return tensor.requires_grad_(True) if made.grad else tensor

    def gradients_agree(self, names: Sequence[str]) -> bool:
        """Whether what backward gives from these variables does not hang on rounding, nor raises."""
        if not self.wants_gradients:
            return True
        found = []
        for run in self.runs:
            roots = [run[n] for n in names if run[n].requires_grad]
            if not roots:
                return True
            wanting = [run[i.name] for i in self.inputs if i.grad]
            heads = [torch.ones_like(r) for r in roots]
            found.append(torch.autograd.grad(roots, wanting, heads, retain_graph=True, allow_unused=True))
        plain, *noisy = found
        return all(
            g is None or (other is not None and agrees(g, other))
            for one in noisy for g, other in zip(plain, one, strict=True)
        )  # fmt: skip

    def stable(self, name: str) -> bool:
        plain, *noisy = (run[name] for run in self.runs)
        if (
            not isinstance(plain, Tensor)
            or plain.numel() > MOST_ELEMENTS
            or plain.dim() > 5
            or plain.is_complex()
        ):
            return False
        if not all(n.shape == plain.shape for n in noisy):
            return False
        return all(agrees(plain, n) for n in noisy)


INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


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


def _execute(step: Step, run: dict[str, Any], noise: Noise | None, grad: bool) -> None:
    with torch.set_grad_enabled(grad), noise or contextlib.nullcontext():
        exec(str(step), run)


def _broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b), strict=False))


def generate(seed: int) -> Program:
    """The program of this seed."""
    g = _Generator(seed)
    for _ in range(g.random.randint(1, 4)):
        g.add_input()
    length = g.random.choice((2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 30, 40))
    for _ in range(length * 6):
        if len(g.steps) >= length:
            break
        step = g.candidate()
        wanted = {i.name for i in g.inputs if i.grad}
        if step.name is None and step.code.partition("[")[0].partition(".")[0] in wanted:
            continue  # a leaf that wants a gradient cannot be written
        if g.try_step(step):
            g.steps.append(step)
    used = {n for s in g.steps for n in s.uses}
    defined = [s.name for s in g.steps if s.name is not None]
    results = [n for n in defined if n not in used or g.random.random() < 0.15]
    if not results:
        results = defined[-1:] or [g.inputs[0].name]
    return replace(Program(tuple(g.inputs), tuple(g.steps), ()), results=tuple(results[-8:]))


def programs(seed: int, count: int) -> Iterator[tuple[int, Program]]:
    """`count` programs from the seed on."""
    for k in range(seed, seed + count):
        yield k, generate(k)
