"""What a call costs when there is next to nothing to compute: add-add-mul-add on (32, 32), and the weights of
48 small linear layers, which a call looks at.

    python benchmarks/overhead.py [--json out.json]

"floor" is a back end that computes nothing and returns the same tensor each time: Dynamo's guards and
AOTAutograd's wrappers alone, which are PyTorch's and which every back end pays. "over floor" is therefore all
that a back end adds: its own calling program, allocating the result, and the arithmetic. "look" is the part
of the layers' call that finds out whether a weight has changed since it was packed; also with each weight
alone. Next: ``demo.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd

import harness
from cases import add_add_mul_add
from hotloop.runtime.packing import Packer, Weights
from hotloop.runtime.program import Runtime

#: Layers of a call, and the features of each: their weights stay in the caches.
LAYERS, FEATURES = 48, 64


def nothing_compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[[list[Any]], Any]:
    """A compiler of graphs whose result is computed once, now, and returned by every call."""
    fakes = next(node.args[0] for node in graph.graph.nodes if node.op == "output")
    results = [torch.zeros(tuple(node.meta["val"].shape), dtype=node.meta["val"].dtype) for node in fakes]

    def call(values: list[Any]) -> list[Any]:
        values.clear()
        return results

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def looks(layers: int, features: int, seconds: float) -> dict[str, float]:
    """Microseconds of a call of so many linear layers on one row, and of looking at their weights: at all of
    them together, and at each by itself."""
    net = torch.nn.Sequential(*(torch.nn.Linear(features, features) for _ in range(layers)))
    net.requires_grad_(False)
    x = torch.randn(1, features)
    made: list[Weights] = []
    original = Runtime.weights

    def weights(self: Runtime, *packers: Packer) -> Weights:
        made.append(original(self, *packers))
        return made[-1]

    Runtime.weights = weights  # type: ignore[method-assign]
    try:
        compiled = torch.compile(net, backend=harness.resolve_backend("hotloop"), dynamic=False)
        with torch.no_grad():
            for _ in range(4):
                torch.testing.assert_close(compiled(x), net(x))
    finally:
        Runtime.weights = original  # type: ignore[method-assign]
    (together,) = made
    known = [packer.seen for packer in together.packers]
    given = [weight() for seen in known if seen is not None for weight in seen.alive]
    assert len(given) == layers
    alone = [(seen, (weight,)) for seen, weight in zip(known, given, strict=True)]
    functions = {
        "call": lambda: compiled(x),
        "look": lambda: together(*given),
        "look at each": lambda: [seen.still(weight) for seen, weight in alone],
    }
    with torch.no_grad():
        timings = harness.time_interleaved(functions, seconds)
    return {name: 1e3 * timing.median for name, timing in timings.items()}


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
    if "hotloop" in options.backends.split(","):
        found = looks(LAYERS, FEATURES, options.seconds)
        for name, microseconds in found.items():
            print(f"{LAYERS} linear, {name:14}{microseconds:8.2f} us, {microseconds / LAYERS:5.2f} a weight")
            report[f"{LAYERS} linear, {name}"] = microseconds
    harness.write_json(options.json, {"machine": harness.machine(), "microseconds": report})
    return 0


if __name__ == "__main__":
    sys.exit(main())
