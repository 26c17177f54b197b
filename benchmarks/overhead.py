"""What a call costs when there is next to nothing to compute: add-add-mul-add on (32, 32).

    python benchmarks/overhead.py [--json out.json]

"floor" is a back end that computes nothing and returns the same tensor each time: Dynamo's guards and
AOTAutograd's wrappers alone, which are PyTorch's and which every back end pays. "over floor" is therefore all
that a back end adds: its own calling program, allocating the result, and the arithmetic. Next: ``demo.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd

import harness
from cases import add_add_mul_add

CALLS_PER_SECOND_ROUNDS = 3.0


def nothing_compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[[list[Any]], Any]:
    """A compiler of graphs whose result is computed once, now, and returned by every call."""
    fakes = next(node.args[0] for node in graph.graph.nodes if node.op == "output")
    results = [torch.zeros(tuple(node.meta["val"].shape), dtype=node.meta["val"].dtype) for node in fakes]

    def call(values: list[Any]) -> list[Any]:
        values.clear()
        return results

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def main(arguments: list[str] | None = None) -> int:
    """Prints microseconds per call."""
    options = harness.parse(harness.parser(__doc__), arguments)
    harness.print_machine()
    inputs = [torch.randn(32, 32) for _ in range(5)]
    torch.compiler.reset()
    floor = torch.compile(
        harness.own_code(add_add_mul_add), backend=aot_autograd(fw_compiler=nothing_compiler), dynamic=False
    )
    functions = {"eager": lambda: add_add_mul_add(*inputs), "floor": lambda: floor(*inputs)}
    with torch.no_grad():
        expected = add_add_mul_add(*inputs)
        for name in options.backends.split(","):
            compiled = harness.compile_with(name, add_add_mul_add)
            torch.testing.assert_close(compiled(*inputs), expected)
            functions[name] = lambda compiled=compiled: compiled(*inputs)
        timings = harness.time_interleaved(functions, 2 * options.seconds)
    base = timings["floor"].median
    for name, timing in timings.items():
        over = "" if name in ("eager", "floor") else f"   over floor {1e3 * (timing.median - base):6.2f} us"
        print(f"{name:20}{1e3 * timing.median:8.2f} us{'' if timing.quiet else ' ~'}{over}")
    report = {name: 1e3 * timing.median for name, timing in timings.items()}
    harness.write_json(options.json, {"machine": harness.machine(), "microseconds": report})
    return 0


if __name__ == "__main__":
    sys.exit(main())
