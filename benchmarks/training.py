"""Training steps of real architectures: forward, backward and optimizer, by eager, Inductor and hotloop.

    python benchmarks/training.py [--filter bert,vit] [--size tiny] [--batch 8] [--optimizer eager]
                                  [--dtype float32|bfloat16] [--json out.json]

Each back end trains a model of its own from the same weights, with AdamW, the optimizer's step compiled too
unless ``--optimizer eager`` leaves it to PyTorch. bfloat16 is autocast. Before anything is timed, the loss
and the length of the gradient of the first step are compared: with dropout off, they differ by rounding.
(Later steps are no test: AdamW's first update is the sign of each gradient, however small it is.)
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import harness
import zoo

MODELS = ["bert", "gpt2", "resnet", "vit"]
#: Relative differences from eager of the first step's loss and of its gradient's length.
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


def repeated(value: Any, batch: int) -> Any:
    """An input for a larger batch."""
    return torch.cat([value] * batch) if isinstance(value, torch.Tensor) and value.ndim else value


def training_step(
    sample: zoo.Sample, backend: str, batch: int, dtype: str, compiled_optimizer: bool
) -> Callable[[bool], list[float]]:
    """A function that makes one step and returns the loss and the length of the gradient."""
    model = without_dropout(copy.deepcopy(sample.model))
    inputs = {name: repeated(value, batch) for name, value in sample.inputs.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def forward(**values: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            results = model(**values)
        loss: torch.Tensor = sum(r.float().square().mean() for r in results if r.is_floating_point())
        return loss

    run: Callable[..., Any] = forward
    update: Callable[..., Any] = optimizer.step
    if backend != "eager":
        chosen = harness.resolve_backend(backend)
        run = torch.compile(forward, backend=chosen, dynamic=False)
        if compiled_optimizer:
            update = torch.compile(optimizer.step, backend=chosen, dynamic=False)

    def step(report: bool = False) -> list[float]:
        optimizer.zero_grad(set_to_none=True)
        loss = run(**inputs)
        loss.backward()
        length = nn.utils.get_total_norm([p.grad for p in model.parameters()]) if report else 0.0
        update()
        return [float(loss), float(length)] if report else []

    return step


def measure(name: str, options: Any) -> harness.Outcome:
    """Checks and times one model's training step."""
    torch.compiler.reset()
    sample = zoo.build(name, options.size)
    outcome = harness.Outcome(f"{name}:{options.dtype}")
    steps: dict[str, Callable[[], Any]] = {}
    expected: list[float] = []
    for backend in ["eager", *options.backends.split(",")]:
        step = training_step(sample, backend, options.batch, options.dtype, options.optimizer == "compiled")
        begin = time.perf_counter()
        try:
            found = step(True)
            step()
        except Exception as error:  # noqa: BLE001 - any failure of a back end is a line of the table
            outcome.failures[backend] = f"{type(error).__name__}: {error}"[:300]
            continue
        outcome.first_call[backend] = time.perf_counter() - begin
        expected = expected or found
        worst = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(found, expected, strict=True))
        outcome.max_error[backend] = worst
        if worst > TOLERANCES[options.dtype]:
            outcome.failures[backend] = f"loss and gradient {found}, eager's {expected}"
            continue
        steps[backend] = step
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
