"""Matrix products by a module's weight: eager and hotloop side by side, and what the processor can do.

    python benchmarks/products.py [--dtype float32,bfloat16,float16,int8] [--shapes 128x768x768,1x4096x4096]
                                  [--products 8] [--backends hotloop] [--json out.json] [--plot shares.svg]

Each line is ``relu(linear(x))`` of M rows, N columns, K terms: the time of one of ``--products`` in a call,
of as many inputs by one weight. With 1, what the call of a compiled function costs is part of it. With
``int8``, bfloat16 rows are multiplied by an int8 weight that is cast, and scaled by column
(``int8-float32``: float32 rows). "of peak" is the share of the processor's peak of float32 multiply-adds, by
a loop that touches registers alone; "GB/s" is how fast the weight is read, which bounds products of few rows,
and "of read" its share of what threads that only read as many bytes reach. Both limits are measured in the
same rounds as the products, so that a machine that drifts, drifts for all. HOTLOOP_CPP_SIMD chooses other
instructions than the processor's best. A result that is less accurate than eager's, by float64, is a failure.
Next: ``models.py``.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import functools
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
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
from hotloop.runtime.pool import prefer_huge_pages
from hotloop.runtime.toolchain import choose_simd, detect_simd, find_toolchain
from hotloop.schedule.tiles import FEW_ROWS

SHAPES = (
    "128x768x768,128x3072x768,128x768x3072,128x2048x2048,1024x1024x1024,1024x384x1536,128x4096x11008,"
    "16x4096x1024,4x4096x4096,1x4096x1024,1x4096x4096"
)
_ACCUMULATORS = 24
_ROUNDS = 20_000
_LIMITS = """\
extern "C" i64 peak(f32* out, i64 rounds, i64 threads) {{
#pragma omp parallel for schedule(static)
    for (i64 t = 0; t < threads; t++) {{
        typedef vec<f32, {width}> V;
        f32* own = out + 1024 * t;
        V sum[{accumulators}], a = splat<V>(own[0]), b = splat<V>(own[1]);
        for (int k = 0; k < {accumulators}; k++) sum[k] = splat<V>(own[2 + k]);
        for (i64 i = 0; i < rounds; i++)
#pragma GCC unroll {accumulators}
            for (int k = 0; k < {accumulators}; k++) sum[k] = fma(a, b, sum[k]);
        for (int k = 0; k < {accumulators}; k++) store<{width}>(own, load<{width}>(own) + sum[k]);
    }}
    return 0;
}}
extern "C" i64 read(f32* out, const f32* in, i64 count, i64 threads) {{
#pragma omp parallel for schedule(static)
    for (i64 t = 0; t < threads; t++) {{
        i64 run = count / threads / 4 / 16 * 16;  // four at once, in each thread
        vec<f32, 16> sum[4] = {{}};
        for (i64 i = 0; i < run; i += 16)
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {{
                const f32* at = in + run * (4 * t + k) + i;
                __builtin_prefetch(at + 256);
                sum[k] = sum[k] + load<16>(at);
            }}
        store<16>(out + 1024 * t, (sum[0] + sum[1]) + (sum[2] + sum[3]));
    }}
    return 0;
}}
"""


class Limits:
    """What this processor can do at most: arithmetic on registers, and reading memory."""

    def __init__(self, threads: int) -> None:
        level = detect_simd()
        self.threads, self.width = threads, max(1, lanes(level, 4))
        text = _LIMITS.format(width=self.width, accumulators=_ACCUMULATORS)
        source = Source("limits", unit_text([function_source("peak", text)]), ("peak", "read"))
        with tempfile.TemporaryDirectory(prefix="hotloop-benchmark-") as folder:
            (library,) = Builder(find_toolchain(), Cache(Path(folder)), 1, level).build([source])
        address, number = ctypes.c_void_p, ctypes.c_int64
        self._peak = library.function("peak", [address, number, number])
        self._read = library.function("read", [address, address, number, number])
        self._own = torch.zeros(threads, 1024)

    def functions(self, nbytes: int) -> dict[str, Callable[[], object]]:
        """By name, what takes as long as the arithmetic, and as the reading of so many bytes."""
        memory = torch.empty(nbytes // 4)
        prefer_huge_pages(memory.data_ptr(), memory.nbytes)
        memory.fill_(1)
        return {
            "arithmetic": lambda: self._peak(self._own.data_ptr(), _ROUNDS, self.threads),
            "reading": lambda: self._read(
                self._own.data_ptr(), memory.data_ptr(), memory.numel(), self.threads
            ),
        }

    def peak(self, ms: float) -> float:
        """Float32 operations a second, in 1e9, of "arithmetic" that took so long."""
        return 2e-6 * self.width * _ACCUMULATORS * _ROUNDS * self.threads / ms


class Layer(torch.nn.Module):
    """A linear layer with its activation."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(k, n)

    def forward(self, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self.linear(x).relu() for x in xs]


class Int8Layer(torch.nn.Module):
    """The same by an int8 weight with a scale for each output channel."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (n, k), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(n) / 128)

    def forward(self, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        weight = self.weight
        return [(torch.nn.functional.linear(x, weight.to(x.dtype)) * self.scale).relu() for x in xs]


#: By the names of ``--dtype``: that of the rows.
ROWS = {"int8": torch.bfloat16, "int8-float32": torch.float32}


def itemsize(kind: str) -> int:
    """The bytes of an element of the weight."""
    return 1 if kind in ROWS else int(getattr(torch, kind).itemsize)


def measure_product(
    shape: str, kind: str, backends: list[str], options: argparse.Namespace, limits: Limits
) -> tuple[harness.Outcome, tuple[int, int, int]]:
    """Checks and times one product."""
    m, n, k = (int(word) for word in shape.split("x"))
    torch.manual_seed(0)
    dtype = ROWS.get(kind) or getattr(torch, kind)
    made = Int8Layer if kind in ROWS else Layer
    layer = made(k, n).to(dtype).eval().requires_grad_(False)
    xs = [torch.randn(m, k).to(dtype) for _ in range(options.products)]

    @functools.lru_cache(maxsize=1)
    def reference() -> Any:
        return judge.reference_of(copy.deepcopy(layer).double(), xs)()

    def check(actual: object, eager: object) -> None:
        judge.assert_as_accurate(actual, eager, reference, what=shape)

    def run(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        return layer(xs)  # type: ignore[no-any-return]

    name = f"{shape}:{kind}"
    beside = limits.functions(n * k * itemsize(kind))
    return harness.measure(name, run, (xs,), backends, check, options.seconds, beside), (m, n, k)


@dataclass(frozen=True)
class Rate:
    """How fast a product ran: Gflop/s, and the GB/s of its weight, with their shares of the limits."""

    ms: float
    quiet: bool
    arithmetic: float
    of_peak: float
    reading: float
    of_read: float


def rate_of(
    outcome: harness.Outcome, name: str, sizes: tuple[int, int, int], products: int, peak: float
) -> Rate | None:
    """The rate of one back end, ``None`` where it failed. The weight is what "reading" read."""
    timing, (m, n, k) = outcome.timings.get(name), sizes
    if timing is None:
        return None
    size = itemsize(outcome.case.partition(":")[2])
    ms = timing.median / products
    arithmetic, reading = (1e-6 * factor / ms for factor in (2 * m * n * k, n * k * size))
    of_read = outcome.timings["reading"].median / ms
    return Rate(ms, timing.quiet, arithmetic, arithmetic / peak, reading, of_read)


def line_of(outcome: harness.Outcome, rates: dict[str, Rate | None], peak: float) -> str:
    """One line of the table."""
    line = f"{outcome.case:26}{peak:6.0f}"
    for r in rates.values():
        if r is None:
            line += f"{'failed':>44}"
        else:
            line += f"{r.ms:11.4f}{' ' if r.quiet else '~'}{r.arithmetic:9.0f}{r.of_peak:9.2f}"
            line += f"{r.reading:7.1f}{r.of_read:9.2f}"
    return line + "".join(f"{outcome.ratio('eager', name):9.2f}x" for name in rates if name != "eager")


def plot(shares: dict[str, dict[str, float]], title: str) -> str:
    """An SVG: for each product a bar a back end, as long as its share of the limit."""
    names = list(next(iter(shares.values())))
    colours = dict(zip(names, ("#9aa5b1", "#d9480f", "#1971c2", "#2f9e44"), strict=False))
    row, left, wide = 14 * len(names) + 8, 190, 420
    height = 60 + row * len(shares)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + wide + 60}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><text x="8" y="18" font-size="13">{title}</text>',
    ]
    for k, name in enumerate(names):
        x = left + 110 * k
        out.append(f'<rect x="{x}" y="27" width="10" height="10" fill="{colours[name]}"/>')
        out.append(f'<text x="{x + 15}" y="36">{name}</text>')
    for i, (case, bars) in enumerate(shares.items()):
        top = 48 + row * i
        out.append(f'<text x="{left - 8}" y="{top + row / 2}" text-anchor="end">{case}</text>')
        for k, (name, share) in enumerate(bars.items()):
            y, long = top + 14 * k, wide * min(share, 1.1)
            out.append(f'<rect x="{left}" y="{y}" width="{long:.0f}" height="12" fill="{colours[name]}"/>')
            out.append(f'<text x="{left + long + 5:.0f}" y="{y + 10}" font-size="10">{share:.2f}</text>')
    x = left + wide
    out.append(f'<line x1="{x}" x2="{x}" y1="44" y2="{height - 8}" stroke="black" stroke-dasharray="3 3"/>')
    return "\n".join((*out, "</svg>")) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; the number of failures is the exit status."""
    made = harness.parser(__doc__)
    made.add_argument("--dtype", default="float32,bfloat16,float16")
    made.add_argument("--shapes", default=SHAPES, help="MxNxK, separated by commas")
    made.add_argument("--products", type=int, default=8, help="products a call")
    made.set_defaults(backends="hotloop")
    options = harness.parse(made, arguments)
    backends = options.backends.split(",")
    harness.print_machine()
    limits = Limits(torch.get_num_threads())
    print(f"level {choose_simd(hotloop.config.cpp.simd)}; peak of float32 multiply-adds in Gflop/s")
    columns = "".join(
        f"{name + ' ms':>12}{'Gflop/s':>9}{'of peak':>9}{'GB/s':>7}{'of read':>9}"
        for name in ("eager", *backends)
    )
    print(f"{'M x N x K':26}{'peak':>6}{columns}")
    report: dict[str, Any] = {"machine": harness.machine(), "cases": []}
    shares: dict[str, dict[str, float]] = {}
    failed = 0
    for dtype in options.dtype.split(","):
        for shape in options.shapes.split(","):
            outcome, sizes = measure_product(shape, dtype, backends, options, limits)
            peak = limits.peak(outcome.timings["arithmetic"].median)
            rates = {
                name: rate_of(outcome, name, sizes, options.products, peak) for name in ("eager", *backends)
            }
            print(line_of(outcome, rates, peak), flush=True)
            for name, reason in outcome.failures.items():
                print(f"    {name}: {reason}", flush=True)
            failed += len(outcome.failures)
            made_of = {name: asdict(r) for name, r in rates.items() if r is not None}
            report["cases"].append(
                {"case": outcome.case, "peak": peak, "rates": made_of, "failures": outcome.failures}
            )
            harness.write_json(options.json, report)
            few = sizes[0] < FEW_ROWS
            label = outcome.case + (", of reading" if few else "")
            shares[label] = {n: r.of_read if few else r.of_peak for n, r in rates.items() if r is not None}
    if options.plot:
        first = options.dtype.split(",")[0]
        chosen = {n.replace(f":{first}", ""): v for n, v in shares.items() if f":{first}" in n}
        title = f"Share of the multiply-add peak, or of the read bandwidth ({first})"
        Path(options.plot).write_text(plot(chosen, title))
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
