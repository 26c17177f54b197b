"""What symbolic sizes cost: the micro suite compiled with ``dynamic=True`` and with fixed sizes, interleaved.

    python benchmarks/dynamic.py [--filter softmax] [--json out.json]

Then one function is called with twenty batch sizes, and the compiles after the first are counted. Next:
``demo.py``.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

import harness
from cases import MICRO, QUICK
from micro import micro_check

BATCHES = [2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 32, 33, 48, 64, 65, 100, 127, 128, 200]


def recompilations(backend: str) -> int:
    """Compiles after the first of a function that is called with twenty batch sizes."""
    count = 0
    chosen = harness.resolve_backend(backend)

    def counted(gm: torch.fx.GraphModule, inputs: list[Any], **more: Any) -> Any:
        nonlocal count
        count += 1
        compiler = torch._dynamo.lookup_backend(chosen) if isinstance(chosen, str) else chosen
        return compiler(gm, inputs, **more)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.nn.functional.layer_norm(x, (64,)) @ w, -1)

    torch.compiler.reset()
    compiled = torch.compile(function, backend=counted, dynamic=True)
    w = torch.randn(64, 40)
    for batch in BATCHES:
        x = torch.randn(batch, 12, 64)
        torch.testing.assert_close(compiled(x, w), function(x, w))
    return count - 1


def main(arguments: list[str] | None = None) -> int:
    """Prints each case's time with symbolic sizes over its time with fixed ones."""
    options = harness.parse(harness.parser(__doc__), arguments)
    harness.print_machine()
    backends = options.backends.split(",")
    ratios: dict[str, dict[str, float]] = {name: {} for name in backends}
    failed = 0
    print(f"{'':44}" + "".join(f"{name + ' dynamic/static':>26}" for name in backends))
    for case_name in harness.selected(QUICK if options.quick else MICRO, options.filter):
        case = MICRO[case_name]
        inputs = case.inputs()
        check = micro_check(case)
        line = f"{case_name:44}"
        for name in backends:
            torch.compiler.reset()
            chosen = harness.resolve_backend(name)
            run = {
                kind: torch.compile(harness.own_code(case.function), backend=chosen, dynamic=symbolic)
                for kind, symbolic in (("static", False), ("dynamic", True))
            }
            with torch.no_grad():
                expected = case.function(*inputs)
                try:
                    for compiled in run.values():
                        check(compiled(*inputs), expected)
                except Exception as error:  # noqa: BLE001 - any failure is a line of the table
                    line += f"{type(error).__name__:>26}"
                    failed += 1
                    continue
                calls = {kind: functools.partial(compiled, *inputs) for kind, compiled in run.items()}
                timings = harness.time_interleaved(calls, options.seconds)
            ratio = timings["dynamic"].median / timings["static"].median
            ratios[name][case_name] = ratio
            line += f"{ratio:25.2f}x"
        print(line, flush=True)
    for name in backends:
        mean = harness.geometric_mean(ratios[name].values())
        print(f"{name}: geometric mean {mean:.3f}x; recompilations over 20 sizes: {recompilations(name)}")
    harness.write_json(options.json, {"machine": harness.machine(), "dynamic/static": ratios})
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
