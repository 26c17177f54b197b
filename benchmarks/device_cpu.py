"""Every measurement in one run, for a machine that has only a checkout: ``PYTHONPATH=src`` is enough.

    PYTHONPATH=src python3 benchmarks/device_cpu.py results [--minutes 9] [--filter norm]

Writes ``overhead.json``, ``compile.json``, ``micro.json`` and ``micro.txt`` into the folder. The micro suite
starts with the cases that matter most and stops when the time is up, so that something is always written.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import compile_time
import harness
import overhead
from cases import MICRO, QUICK
from micro import measure_case


def main(arguments: list[str] | None = None) -> int:
    """Runs overhead, the elementwise compile and the micro suite; the failures' number is the exit status."""
    made = harness.parser(__doc__)
    made.add_argument("folder", help="where the results go")
    made.add_argument("--minutes", type=float, default=9.0, help="start no case after this time")
    made.add_argument("--only-micro", action="store_true")
    options = harness.parse(made, arguments)
    deadline = time.monotonic() + 60 * options.minutes
    folder = Path(options.folder)
    common = ["--backends", options.backends, "--threads", str(options.threads)]
    failed = 0
    if not options.only_micro:
        failed += overhead.main([*common, "--json", str(folder / "overhead.json")])
        failed += compile_time.main([*common, "--quick", "--json", str(folder / "compile.json")])
    backends = options.backends.split(",")
    harness.print_machine()
    table = harness.Table(backends, width=42)
    names = harness.selected([*QUICK, *(name for name in MICRO if name not in QUICK)], options.filter)
    for position, name in enumerate(names):
        if time.monotonic() > deadline:
            print(f"out of time: {len(names) - position} of {len(names)} cases not measured")
            break
        table.add(measure_case(MICRO[name], backends, options.seconds))
        harness.write_json(str(folder / "micro.json"), table.summary())
    failed += table.finish()
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
