"""The model suite: forwards of real architectures in eager, Inductor and hotloop, interleaved.

    python benchmarks/models.py [--filter bert,vit] [--dtype float32,bfloat16] [--size tiny] [--batch 8]
                                [--backends inductor:freezing,hotloop:freezing]
                                [--compile-time] [--memory] [--json out.json] [--plot out.png]

Without more, run time. ``--compile-time`` adds cold and warm compiles in fresh processes and what Dynamo and
AOTAutograd take alone, ``--memory`` the peak memory of a forward over eager's. Next: ``compile_time.py``.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

import harness
import judge
import zoo
from cases import model_function
from compile_time import compile_table

QUICK = ["bert", "mobilebert_qa", "gpt2", "resnet", "vit"]


def model_check(sample: zoo.Sample) -> harness.Check:
    """Judges a forward's result, by float64 (run once, only if needed) where it is not close to eager's."""

    @functools.lru_cache(maxsize=1)
    def reference() -> Any:
        double, values = model_function(sample.to(torch.float64))
        return judge.reference_of(double, *values)()

    def check(actual: object, eager: object) -> None:
        judge.assert_as_accurate(actual, eager, reference, what=sample.name)

    return check


def measure_model(
    name: str, size: zoo.Size, dtype: str, batch: int, backends: list[str], seconds: float
) -> harness.Outcome:
    """Checks and times one model's forward."""
    sample = zoo.build(name, size).to(getattr(torch, dtype)).repeated(batch)
    function, inputs = model_function(sample)

    check = model_check(sample)
    return harness.measure(f"{name}:{dtype}", function, inputs, backends, check, seconds)


def memory_table(names: list[str], size: str, dtypes: list[str], backends: list[str]) -> list[dict[str, Any]]:
    """Prints and returns the peak memory of each model's forward, and what is kept after it."""
    columns = "".join(f"{name + ' MiB':>16}{'over eager':>12}{'kept':>9}" for name in backends)
    print(f"\nPeak memory of a forward\n{'':26}{'eager MiB':>12}{columns}")
    rows = []
    for name in names:
        for dtype in dtypes:
            case = f"model:{name}:{size}:{dtype}"
            eager = harness.peak_memory(case, "eager")
            row: dict[str, Any] = {"case": case, "eager": eager}
            line = f"{name + ':' + dtype:26}{eager['peak']:12.1f}"
            for backend in backends:
                try:
                    row[backend] = found = harness.peak_memory(case, backend)
                except RuntimeError as error:
                    row[backend] = {"failed": str(error)}
                    line += f"{'failed':>37}"
                    continue
                over = 100 * (found["peak"] / eager["peak"] - 1)
                line += f"{found['peak']:16.1f}{over:+11.1f}%{found['kept']:9.1f}"
            print(line, flush=True)
            rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Runs the suite; the number of failures is the exit status."""
    made = harness.parser(__doc__)
    made.add_argument("--size", default="full", choices=["tiny", "full"])
    made.add_argument("--dtype", default="float32,bfloat16")
    made.add_argument("--batch", type=int, default=1, help="how often the example inputs are repeated")
    made.add_argument("--compile-time", action="store_true")
    made.add_argument("--memory", action="store_true")
    made.add_argument("--no-run-time", action="store_true", help="leave run times out")
    options = harness.parse(made, arguments)
    backends, dtypes = options.backends.split(","), options.dtype.split(",")
    names = harness.selected(QUICK if options.quick else zoo.names(), options.filter)
    harness.print_machine()
    report: dict[str, Any] = {"machine": harness.machine()}
    failed = 0
    if not options.no_run_time:
        for dtype in dtypes:
            print(f"\nInference, {dtype}")
            table = harness.Table(backends)
            for name in names:
                table.add(measure_model(name, options.size, dtype, options.batch, backends, options.seconds))
                report[f"run_time_{dtype}"] = table.summary()
                harness.write_json(options.json, report)
            failed += table.finish()
            if dtype == dtypes[0]:
                harness.write_plot(options.plot, table, f"Inference, {dtype}")
    if options.compile_time:
        cases = [f"model:{name}:{options.size}:{dtype}" for name in names for dtype in dtypes[:1]]
        report["compile_time"] = compile_table(cases, backends, repeat=1)
    if options.memory:
        report["memory"] = memory_table(names, options.size, dtypes, backends)
    harness.write_json(options.json, report)
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
