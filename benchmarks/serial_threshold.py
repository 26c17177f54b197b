"""Where a second thread begins to pay: ``a * b + c`` over growing sizes, always parallel and always serial.

    python benchmarks/serial_threshold.py

The default of ``config.parallel_threshold`` is the size at which the two curves cross on two cores. Next:
``demo.py``.
"""

from __future__ import annotations

import time

import torch

import harness

SIZES = (1024, 4096, 8192, 16384, 32768, 65536, 131072)
BYTES_PER_ELEMENT = 16  # three float32 operands and the result


def multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Two operations an element: as memory-bound as a kernel gets."""
    return a * b + c


def microseconds(threshold: int, size: int) -> float:
    """The fastest of many calls with this threshold."""
    torch.compiler.reset()
    backend = harness.resolve_backend("hotloop")
    compiled = torch.compile(multiply_add, backend=backend, options={"parallel_threshold": threshold})
    inputs = [torch.randn(size) for _ in range(3)]
    compiled(*inputs)
    best = float("inf")
    for _ in range(200):
        start = time.perf_counter()
        for _ in range(20):
            compiled(*inputs)
        best = min(best, (time.perf_counter() - start) / 20)
    return 1e6 * best


def main() -> None:
    """Prints the table."""
    harness.print_machine()
    print(f"{'bytes':>10}{'parallel us':>14}{'serial us':>12}")
    with torch.no_grad():
        for size in SIZES:
            always, never = microseconds(1, size), microseconds(1 << 40, size)
            print(f"{size * BYTES_PER_ELEMENT:10}{always:14.1f}{never:12.1f}")


if __name__ == "__main__":
    main()
