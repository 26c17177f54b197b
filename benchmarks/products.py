"""Matrix products by a module's weight: eager and hotloop side by side, and what the processor can do.

    python benchmarks/products.py [--dtype float32,bfloat16,float16,int8] [--shapes 128x768x768,1x4096x4096]
                                  [--backends hotloop] [--json out.json]

Each line is ``relu(linear(x))`` of M rows, N columns, K terms. With ``int8``, bfloat16 rows are multiplied by
an int8 weight that is cast, and scaled by column (``int8-float32``: float32 rows). "of peak" is the share of
the processor's peak of float32 multiply-adds, measured in the same run by a loop over registers alone;
"GB/s" is how fast the weight is read, which bounds products of few rows. HOTLOOP_CPP_SIMD chooses other
instructions than the processor's best. A result that is less accurate than eager's, by float64, is a failure.
Next: ``models.py``.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import harness
import hotloop
import judge
from hotloop.codegen.cpp import Source, function_source, unit_text
from hotloop.codegen.cpp_text import lanes
from hotloop.runtime.build import Builder
from hotloop.runtime.cache import Cache
from hotloop.runtime.toolchain import choose_simd, detect_simd, find_toolchain

SHAPES = (
    "128x768x768,128x3072x768,128x768x3072,128x2048x2048,1024x1024x1024,1024x384x1536,128x4096x11008,"
    "16x4096x1024,4x4096x4096,1x4096x1024,1x4096x4096"
)
_ACCUMULATORS = 24
_ROUNDS = 2_000_000


def multiply_add_peak(threads: int) -> float:
    """Float32 operations a second, in 1e9, of multiply-adds that depend on nothing but registers."""
    level = detect_simd()
    width = max(1, lanes(level, 4))
    function = function_source(
        "peak",
        f'extern "C" i64 peak(f32* out, i64 rounds) {{\n    typedef vec<f32, {width}> V;\n'
        f"    V sum[{_ACCUMULATORS}], a = splat<V>(out[0]), b = splat<V>(out[1]);\n"
        f"    for (int k = 0; k < {_ACCUMULATORS}; k++) sum[k] = splat<V>(out[2 + k]);\n"
        "    for (i64 i = 0; i < rounds; i++)\n"
        f"#pragma GCC unroll {_ACCUMULATORS}\n"
        f"        for (int k = 0; k < {_ACCUMULATORS}; k++) sum[k] = fma(a, b, sum[k]);\n"
        f"    for (int k = 0; k < {_ACCUMULATORS}; k++) store<{width}>(out, load<{width}>(out) + sum[k]);\n"
        "    return 0;\n}\n",
    )
    with tempfile.TemporaryDirectory(prefix="hotloop-benchmark-") as folder:
        builder = Builder(find_toolchain(), Cache(Path(folder)), 1, level)
        (library,) = builder.build([Source("peak", unit_text([function]), ("peak",))])
        run = library.function("peak", [ctypes.c_void_p, ctypes.c_int64])
        memory = torch.zeros(threads, 64)
        fastest = float("inf")
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(7):
                start = time.perf_counter()
                list(pool.map(lambda row: run(row.data_ptr(), _ROUNDS), memory))
                fastest = min(fastest, time.perf_counter() - start)
    return 2e-9 * width * _ACCUMULATORS * _ROUNDS * threads / fastest


class Layer(torch.nn.Module):
    """A linear layer with its activation."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(k, n)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Int8Layer(torch.nn.Module):
    """The same by an int8 weight with a scale for each output channel."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (n, k), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(n) / 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.linear(x, self.weight.to(x.dtype)) * self.scale).relu()


#: By the names of ``--dtype``: that of the rows.
ROWS = {"int8": torch.bfloat16, "int8-float32": torch.float32}


def measure_product(
    shape: str, kind: str, backends: list[str], seconds: float
) -> tuple[harness.Outcome, tuple[int, int, int]]:
    """Checks and times one product."""
    m, n, k = (int(word) for word in shape.split("x"))
    torch.manual_seed(0)
    dtype = ROWS.get(kind) or getattr(torch, kind)
    made = Int8Layer if kind in ROWS else Layer
    layer = made(k, n).to(dtype).eval().requires_grad_(False)
    x = torch.randn(m, k).to(dtype)

    @functools.lru_cache(maxsize=1)
    def reference() -> Any:
        return judge.reference_of(copy.deepcopy(layer).double(), x)()

    def check(actual: object, eager: object) -> None:
        judge.assert_as_accurate(actual, eager, reference, what=shape)

    def run(x: torch.Tensor) -> torch.Tensor:
        return layer(x)  # type: ignore[no-any-return]

    name = f"{shape}:{kind}"
    return harness.measure(name, run, (x,), backends, check, seconds), (m, n, k)


def line_of(
    outcome: harness.Outcome, sizes: tuple[int, int, int], itemsize: int, backends: list[str], peak: float
) -> str:
    """One line of the table."""
    m, n, k = sizes
    line = f"{outcome.case:26}"
    for name in ("eager", *backends):
        timing = outcome.timings.get(name)
        if timing is None:
            line += f"{'failed':>37}"
            continue
        rate = 2e-6 * m * n * k / timing.median
        mark = " " if timing.quiet else "~"
        read = 1e-6 * n * k * itemsize / timing.median
        line += f"{timing.median:11.4f}{mark}{rate:9.0f}{rate / peak:9.2f}{read:7.1f}"
    return line + "".join(f"{outcome.ratio('eager', name):9.2f}x" for name in backends)


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; the number of failures is the exit status."""
    made = harness.parser(__doc__)
    made.add_argument("--dtype", default="float32,bfloat16,float16")
    made.add_argument("--shapes", default=SHAPES, help="MxNxK, separated by commas")
    made.set_defaults(backends="hotloop")
    options = harness.parse(made, arguments)
    backends = options.backends.split(",")
    harness.print_machine()
    measure: Callable[[], float] = functools.partial(multiply_add_peak, torch.get_num_threads())
    peak = measure()
    print(f"level {choose_simd(hotloop.config.cpp.simd)}, float32 multiply-add peak {peak:.0f} Gflop/s")
    columns = "".join(
        f"{name + ' ms':>12}{'Gflop/s':>9}{'of peak':>9}{'GB/s':>7}" for name in ("eager", *backends)
    )
    print(f"{'M x N x K':26}{columns}")
    report: dict[str, Any] = {"machine": harness.machine(), "peak": peak, "cases": []}
    failed = 0
    for dtype in options.dtype.split(","):
        for shape in options.shapes.split(","):
            outcome, sizes = measure_product(shape, dtype, backends, options.seconds)
            itemsize = 1 if dtype in ROWS else getattr(torch, dtype).itemsize
            print(line_of(outcome, sizes, itemsize, backends, peak), flush=True)
            for name, reason in outcome.failures.items():
                print(f"    {name}: {reason}", flush=True)
            failed += len(outcome.failures)
            timings = {name: t.median for name, t in outcome.timings.items()}
            report["cases"].append({"case": outcome.case, "ms": timings, "failures": outcome.failures})
            harness.write_json(options.json, report)
    print(f"float32 multiply-add peak at the end {measure():.0f} Gflop/s")
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
