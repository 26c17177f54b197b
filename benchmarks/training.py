"""Training steps of real architectures: forward, backward and optimizer, by eager, Inductor and hotloop.

    python benchmarks/training.py [--filter bert,vit] [--size tiny] [--batch 8] [--optimizer eager]
                                  [--dtype float32|bfloat16] [--json out.json]

Each back end trains a model of its own from the same weights, with AdamW, the optimizer's step compiled too
unless ``--optimizer eager`` leaves it to PyTorch. bfloat16 is autocast. Before anything is timed, the loss
and the gradient of the first step are compared with a float64 run of PyTorch's: with dropout off, they differ
by rounding, and by no more than twice what eager's do. (A batch norm over few pixels multiplies roundings a
hundred thousand times, in eager too. Later steps are no test: AdamW's first update is the sign of each
gradient, however small it is.)
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import harness
import zoo

MODELS = ["bert", "gpt2", "resnet", "vit"]
#: Relative distances of the first step's loss and gradient from those in float64 that are always allowed.
TOLERANCES = {"float32": 1e-3, "bfloat16": 3e-2}


def without_dropout(model: nn.Module) -> nn.Module:
    """Training mode, but no random numbers: back ends draw different ones."""
    model.train().requires_grad_(True)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attn_dropout", "attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


@dataclass(frozen=True)
class Training:
    """A model in training: ``step`` makes one step, ``loss`` holds the last one."""

    model: nn.Module
    step: Callable[[], None]
    loss: list[torch.Tensor]

    def gradient(self) -> list[torch.Tensor]:
        """The loss of the last step, and the gradients, in float64."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [t.detach().double() for t in (*self.loss, *grads)]


def training(sample: zoo.Sample, backend: str, options: Any) -> Training:
    """A model of its own, and what makes a step of it."""
    model = without_dropout(copy.deepcopy(sample.model))
    inputs = sample.repeated(options.batch).inputs
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    last: list[torch.Tensor] = []

    def forward(**values: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bfloat16"):
            results = model(**values)
        loss: torch.Tensor = sum(r.float().square().mean() for r in results if r.is_floating_point())
        return loss

    run: Callable[..., Any] = forward
    update: Callable[..., Any] = optimizer.step
    if backend != "eager":
        chosen = harness.resolve_backend(backend)
        run = torch.compile(forward, backend=chosen, dynamic=False)
        if options.optimizer == "compiled":
            update = torch.compile(optimizer.step, backend=chosen, dynamic=False)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = run(**inputs)
        loss.backward()
        last[:] = [loss]
        update()

    return Training(model, step, last)


def exact(sample: zoo.Sample, batch: int) -> list[torch.Tensor]:
    """The first step's loss and gradients, computed in float64."""
    wide = sample.to(torch.float64)
    model = without_dropout(wide.model)
    inputs = wide.repeated(batch).inputs
    loss: torch.Tensor = sum(r.square().mean() for r in model(**inputs) if r.is_floating_point())
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.detach() for t in (loss, *grads)]


def distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The relative distance of the loss or of the gradient, whichever is larger."""
    pairs = list(zip(found, expected, strict=True))
    apart, length = (
        math.sqrt(sum(float(t.square().sum()) for t in ts))
        for ts in ([a - b for a, b in pairs[1:]], expected[1:])
    )
    return max(apart / length, float((found[0] - expected[0]).abs() / expected[0].abs()))


def measure(name: str, options: Any) -> harness.Outcome:
    """Checks and times one model's training step."""
    torch.compiler.reset()
    sample = zoo.build(name, options.size)
    expected = exact(sample, options.batch)
    outcome = harness.Outcome(f"{name}:{options.dtype}")
    steps: dict[str, Callable[[], Any]] = {}
    allowed = TOLERANCES[options.dtype]
    for backend in ["eager", *options.backends.split(",")]:
        made = training(sample, backend, options)
        begin = time.perf_counter()
        try:
            made.step()
            found = made.gradient()
            made.step()
        except Exception as error:  # noqa: BLE001 - any failure of a back end is a line of the table
            outcome.failures[backend] = f"{type(error).__name__}: {error}"[:300]
            continue
        outcome.first_call[backend] = time.perf_counter() - begin
        outcome.max_error[backend] = distance(found, expected)
        if backend == "eager":
            allowed = max(allowed, 2 * outcome.max_error[backend])
        elif not outcome.max_error[backend] <= allowed:
            far = outcome.max_error[backend]
            outcome.failures[backend] = f"{far:.2g} from float64, allowed {allowed:.2g}"
            continue
        steps[backend] = made.step
    del expected
    outcome.timings.update(harness.time_interleaved(steps, options.seconds))
    return outcome


def main(arguments: list[str] | None = None) -> int:
    """Prints milliseconds per training step; the number of failures is the exit status."""
    made = harness.parser(__doc__)
    made.add_argument("--size", choices=["full", "tiny"], default="full")
    made.add_argument("--batch", type=int, default=4, help="how often the sample inputs are repeated")
    made.add_argument("--dtype", choices=list(TOLERANCES), default="float32")
    made.add_argument("--optimizer", choices=["compiled", "eager"], default="compiled")
    options = harness.parse(made, arguments)
    harness.print_machine()
    print(f"\nTraining step, {options.dtype}, AdamW {options.optimizer}, batch x{options.batch}")
    torch._dynamo.config.cache_size_limit = 64
    table = harness.Table(options.backends.split(","))
    for name in harness.selected(MODELS, options.filter):
        table.add(measure(name, options))
    harness.write_json(options.json, {"machine": harness.machine(), **table.summary()})
    return min(table.finish(), 100)


if __name__ == "__main__":
    sys.exit(main())
