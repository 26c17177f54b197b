"""Makes up random programs: views, writes in place, broadcasting, mixed dtypes, reductions, scatters, odd
sizes.

What comes in: a seed. What goes out: a `Program`. What holds in between: a statement enters a program only
after PyTorch has run it at each setting of the symbolic sizes, and only if rounding cannot decide its result:
more runs, in which every result is off by a unit in the last place, give the same integers and booleans, and
floats that differ as little. So a compiled program that differs is wrong, whatever functions with jumps are
in it.

Next: engines.py, which runs a program in every way that hotloop knows.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from programs import F, Input, Noise, Program, Step, agrees
from statements import (
    BINARY,
    CASTS,
    IN_PLACE,
    REDUCTIONS,
    SCATTERS,
    SCATTERS_IN_PLACE,
    SIZED,
    UNARY,
    WHOLE_REDUCTIONS,
)

__all__ = ["generate"]

#: Sizes: nothing, one, primes, and the neighbourhood of the vector widths.
SIZES = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 15, 16, 17, 19, 31, 32, 33, 37, 63, 64, 65)
#: Of some programs: the neighbourhood of the blocks of sums.
LONG_SIZES = (1, 2, 3, 5, 16, 255, 257, 511, 513, 600, 1023, 1025, 2049, 4099)
MOST_ELEMENTS, MOST_OF_LONG = 4096, 1 << 15
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
#: What most tensors of a program are.
MAIN = {
    torch.float32: 10, torch.float64: 2, torch.bfloat16: 3, torch.float16: 1, torch.int64: 1, torch.int32: 1
}  # fmt: skip

_Run = dict[str, Any]


class _Generator:
    """A program under construction, run as it grows, in each call as it is and with noise."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        r = self.random
        long = r.random() < 0.08
        self.most = MOST_OF_LONG if long else MOST_ELEMENTS
        self.numbers = [r.choice(LONG_SIZES if long else SIZES) for _ in range(r.randint(1, 3))]
        if r.random() < 0.9:
            self.numbers = [n or 2 for n in self.numbers]
        self.sizes: list[tuple[int, ...]] = []
        if r.random() < 0.3:
            self.vary()
        self.mixed = r.random() < 0.25
        self.main = r.choices(list(MAIN), list(MAIN.values()))[0]
        self.grad = r.random() < 0.4
        self.inputs: list[Input] = []
        self.steps: list[Step] = []
        self.noise = [Noise(seed * 2 + 1), Noise(seed * 2 + 2)]
        self.start()

    def vary(self) -> None:
        """Sizes become symbols, with two or three settings."""
        r = self.random
        self.sizes.append(tuple(self.numbers))
        for _ in range(r.choice((1, 1, 2))):
            least = r.choice((0, 2, 2))  # those below two are compiled anew
            self.sizes.append(tuple(max(r.choice(SIZES), least) for _ in self.numbers))

    @property
    def settings(self) -> list[dict[str, int]]:
        return [{f"s{k}": n for k, n in enumerate(sizes)} for sizes in self.sizes or [()]]

    def value(self, text: str) -> str:
        """An expression of sizes, as a number where sizes are."""
        return text if self.sizes else str(eval(text))

    # --- inputs ---------------------------------------------------------------------------------------------

    def add_input(self) -> None:
        r = self.random
        shape = [
            self.extent() if r.random() < 0.85 else "1" for _ in range(r.choice((0, 1, 2, 2, 2, 3, 3, 4)))
        ]
        while any(math.prod(eval(k, s) for k in shape) > self.most for s in self.settings):
            shape[shape.index(max(shape, key=lambda k: max(eval(k, s) for s in self.settings)))] = "2"
        dtype = self.main if r.random() < (0.2 if self.mixed else 0.75) else r.choice((*FLOATS, *INTEGERS))
        code, dims = self.laid_out(shape)
        text = f"({', '.join(map(self.value, dims))}{',' if len(dims) == 1 else ''})"
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

    def extent(self) -> str:
        """The size of a dimension: a number, or an expression of symbols."""
        r = self.random
        k = r.randrange(len(self.numbers))
        if not self.sizes:
            return str(self.numbers[k])
        return r.choices((f"s{k}", str(self.numbers[k]), f"s{k} + 1", f"s{k} * 2"), (8, 1, 1, 1))[0]

    def laid_out(self, shape: Sequence[str]) -> tuple[str, tuple[str, ...]]:
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
            stop = self.value(f"{start} + ({shape[d]}) * {step}")
            wide = [k if i != d else f"{stop} + {r.randint(0, 2)}" for i, k in enumerate(shape)]
            return f"{{base}}[{lead}{start}:{stop}:{step}]", tuple(wide)
        narrow = tuple("1" if i == d else k for i, k in enumerate(shape))
        return f"{{base}}.expand({', '.join(shape)})", narrow

    # --- statements -----------------------------------------------------------------------------------------

    def variables(self) -> dict[str, Tensor]:
        """Those of the first call."""
        return {k: v for k, v in self.runs[0][0].items() if isinstance(v, Tensor)}

    def pick(self, among: Sequence[str] | None = None) -> str:
        """A variable, a recent one rather than an old one."""
        names = list(self.variables()) if among is None else among
        return names[max(self.random.randrange(len(names)), self.random.randrange(len(names)))]

    def candidate(self) -> Step:
        r = self.random
        x = self.pick()
        value = self.variables()[x]
        kinds = {
            "unary": 26, "cast": 20 if self.mixed else 5, "binary": 26, "reduce": 11, "whole": 3, "view": 14,
            "move": 9, "join": 6, "write": 9, "product": 1, "scatter": 7, "sized": 25 if self.sizes else 3,
        }  # fmt: skip
        kind = r.choices(list(kinds), list(kinds.values()))[0]
        if kind == "write":
            return Step(None, self.filled(r.choice((*IN_PLACE, *SCATTERS_IN_PLACE)), x, value))
        tables = {
            "unary": UNARY, "cast": CASTS, "binary": BINARY, "whole": WHOLE_REDUCTIONS, "scatter": SCATTERS,
            "reduce": REDUCTIONS if value.dim() else WHOLE_REDUCTIONS, "sized": SIZED,
        }  # fmt: skip
        if kind in tables:
            code = self.filled(r.choice(tables[kind]), x, value)
        elif kind == "view":
            code = self.view(x, value)
        elif kind == "move":
            code = self.move(x, value)
        elif kind == "join":
            code = self.join(x, value)
        else:
            code = f"{x} @ {self.pick()}.to({x}.dtype)"  # torch 2.11 lets empty ones differ
        return Step(f"v{len(self.steps)}", code)

    def filled(self, template: str, x: str, value: Tensor) -> str:
        """A statement about x."""
        r = self.random
        places = {"x": x, "d": "0", "n": "1", "y": "", "s": "", "k": "", "i": ""}
        if value.dim():
            places["d"] = self.dims(value) if template in REDUCTIONS else str(r.randrange(value.dim()))
            if places["d"].lstrip("-").isdigit():
                places["n"] = self.size(x, value, int(places["d"]))
        if "{i}" in template or "{k}" in template:
            places["y"] = self.source(value)
            places["k"] = self.positions(places["n"])
            index = self.positions(places["n"], f"{places['y']}.numel()")
            if r.random() < 0.7:
                places["i"] = f"{index}.view({places['y']}.shape)"
            else:
                places["i"] = f"{places['y']}.argsort(dim={places['d']}, stable=True) % {places['n']}"
        elif "{y}" in template:
            places["y"] = self.partner(x)
        if "{s}" in template:
            places["s"] = self.slices(value)
        return template.format(**places)

    def size(self, x: str, value: Tensor, d: int) -> str:
        return f"{x}.shape[{d}]" if self.sizes else str(value.shape[d])

    def positions(self, size: str, count: str = "") -> str:
        """A row of positions, or of `count` of them, below a size: some twice, some never."""
        r = self.random
        if not count and r.random() < 0.3:
            return f"torch.tensor({[r.randrange(4) for _ in range(r.randint(1, 5))]})"
        count = count or r.choice((size, size, "3", "5", f"({size} // 2)"))
        return f"(torch.arange({count}) * {r.choice((1, 2, 3, 7))} % {size})"

    def source(self, value: Tensor) -> str:
        """A variable to scatter: of as many dimensions, most of the time, and of the same dtype."""
        values = self.variables()
        alike = [n for n, t in values.items() if t.dim() == value.dim()]
        same = [n for n in alike if values[n].dtype is value.dtype]
        return self.pick(same or alike if self.random.random() < 0.9 else None)

    def partner(self, x: str) -> str:
        """A variable that broadcasts with x, most of the time one of the same dtype."""
        values = self.variables()
        own = values[x]
        fits = [n for n, t in values.items() if _broadcasts(t.shape, own.shape)]
        alike = [n for n in fits if values[n].dtype is own.dtype]
        return self.pick(alike if self.random.random() < 0.7 else fits)

    def dims(self, value: Tensor) -> str:
        r = self.random
        if value.dim() == 1 or r.random() < 0.7:
            return str(r.randrange(-value.dim(), value.dim()))
        return str(tuple(sorted(r.sample(range(value.dim()), r.randint(2, value.dim())))))

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
            f"{x}.expand({[k if k != 1 else r.choice(self.numbers) for k in value.shape]})",
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
        before = set(self.runs[0][0])
        shapes = self.shapes()
        try:
            for call in self.runs:
                for run, noise in zip(call, (None, *self.noise), strict=False):
                    _execute(step, run, noise, self.wants_gradients)
            changed = [step.name] if step.name is not None else list(self.variables())
            # Below TorchDynamo, `out` that is resized is not captured.
            ok = "out=" not in step.code or shapes == self.shapes()
            ok = ok and all(
                all(self.stable(call, name) for name in changed) and self.gradients_agree(call, changed)
                for call in self.runs
            )
        except Exception:  # noqa: BLE001 - whatever PyTorch refuses is no statement
            ok = False
        if not ok and step.name is None:
            self.start()
        elif not ok:
            for run in (run for call in self.runs for run in call):
                for name in set(run) - before:
                    del run[name]
        return ok

    def shapes(self) -> list[dict[str, torch.Size]]:
        """Of each variable, in each call."""
        return [{n: v.shape for n, v in call[0].items() if isinstance(v, Tensor)} for call in self.runs]

    @property
    def wants_gradients(self) -> bool:
        return any(i.grad for i in self.inputs)

    def start(self) -> None:
        """Run everything again from the inputs."""
        self.runs: list[list[_Run]] = []
        for k, sizes in enumerate(self.sizes or [()]):
            call: list[_Run] = []
            for noise in (None, *self.noise) if k == 0 else (None, self.noise[0]):
                run: _Run = {"torch": torch, "F": F}
                for i in self.inputs:
                    run[i.name] = _input(i, noise, sizes)
                for step in self.steps:
                    _execute(step, run, noise, self.wants_gradients)
                call.append(run)
            self.runs.append(call)

    def gradients_agree(self, call: Sequence[_Run], names: Sequence[str]) -> bool:
        """Whether what backward gives from these variables does not hang on rounding, nor raises."""
        if not self.wants_gradients:
            return True
        found = []
        for run in call:
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

    def stable(self, call: Sequence[_Run], name: str) -> bool:
        plain, *noisy = (run[name] for run in call)
        if (
            not isinstance(plain, Tensor)
            or plain.numel() > self.most
            or plain.dim() > 5
            or plain.is_complex()
        ):
            return False
        if not all(n.shape == plain.shape for n in noisy):
            return False
        return all(agrees(plain, n) for n in noisy)


def _input(made: Input, noise: Noise | None, sizes: Sequence[int]) -> Tensor:
    tensor = made.make(sizes)
    if noise is not None:
        noise.disturb(tensor)
    return tensor.requires_grad_(True) if made.grad else tensor


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
    return Program(tuple(g.inputs), tuple(g.steps), tuple(results[-8:]), tuple(g.sizes))
