"""How long a user waits: the first call in a fresh process, with empty caches and with full ones.

    python benchmarks/compile_time.py [--filter bert] [--repeat 3] [--json out.json]

Each figure is the time from ``torch.compile`` to the first result in a process of its own, imports of the
compiler included. "floor" is the same with ``backend="aot_eager"``: Dynamo and AOTAutograd alone, which are
PyTorch's and which every back end pays; "over" is what a back end adds to it. Next: ``overhead.py``.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

CASES = [
    "micro:elementwise_16384x512",
    "model:bert:full:float32",
    "model:mobilebert_qa:full:float32",
    "train:20",  # about 4,000 nodes, forward and backward together
]
FLOOR = "aot_eager"


def floor_seconds(case: str, repeat: int) -> float:
    """Seconds of the first call with Dynamo and AOTAutograd alone."""
    with tempfile.TemporaryDirectory(prefix="hotloop-benchmark-") as folder:
        runs = [harness.in_fresh_process("compile", case, FLOOR, Path(folder)) for _ in range(repeat)]
    return statistics.median(run["first_call"] for run in runs)


def compile_table(cases: list[str], backends: list[str], repeat: int) -> list[dict[str, Any]]:
    """Prints and returns cold and warm compile times of each case and back end, in seconds."""
    columns = "".join(f"{name + ' cold':>15}{'over':>8}{'warm':>8}{'over':>8}" for name in backends)
    print(f"\nSeconds to the first result, median of {repeat}\n{'':36}{'floor':>8}{columns}")
    rows = []
    for case in cases:
        floor = floor_seconds(case, repeat)
        row: dict[str, Any] = {"case": case, "floor": floor}
        line = f"{case:36}{floor:8.2f}"
        for backend in backends:
            try:
                row[backend] = found = harness.cold_and_warm(case, backend, repeat)
            except RuntimeError as error:
                row[backend] = {"failed": str(error)}
                line += f"{'failed':>39}"
                print(error, file=sys.stderr)
                continue
            line += f"{found['cold']:15.2f}{found['cold'] - floor:8.2f}"
            line += f"{found['warm']:8.2f}{found['warm'] - floor:8.2f}"
        print(line, flush=True)
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measures the cases; the number of failures is the exit status."""
    made = harness.parser(__doc__)
    made.add_argument("--repeat", type=int, default=1)
    options = harness.parse(made, arguments)
    harness.print_machine()
    cases = harness.selected(CASES[:1] if options.quick else CASES, options.filter)
    backends = options.backends.split(",")
    rows = compile_table(cases, backends, options.repeat)
    for row in rows:
        if all("cold" in row.get(name, {}) for name in ("inductor", "hotloop")):
            ratio = row["inductor"]["cold"] / row["hotloop"]["cold"]
            print(f"{row['case']}: hotloop's cold compile takes 1/{ratio:.1f} of Inductor's")
    harness.write_json(options.json, {"machine": harness.machine(), "compile_time": rows})
    return sum("failed" in value for row in rows for value in row.values() if isinstance(value, dict))


if __name__ == "__main__":
    sys.exit(main())
