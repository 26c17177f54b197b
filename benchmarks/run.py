"""Everything that is claimed about speed: ``python benchmarks/run.py [--quick] [--output folder]``.

Runs overhead, compile times, the micro suite and the models, and writes their JSON and plots.
"""

from __future__ import annotations

import sys
from pathlib import Path

import compile_time
import harness
import micro
import models
import overhead


def main(arguments: list[str] | None = None) -> int:
    """Runs all programs; the number of failures is the exit status."""
    made = harness.parser(__doc__)
    made.add_argument("--output", default=str(harness.HERE / "results"))
    options = harness.parse(made, arguments)
    common = ["--backends", options.backends, "--threads", str(options.threads)]
    common += ["--filter", options.filter, "--seconds", str(options.seconds)]
    common += ["--quick"] if options.quick else []
    failed = 0
    for title, program, more in (
        ("overhead", overhead.main, []),
        ("compile_time", compile_time.main, []),
        ("micro", micro.main, ["--plot"]),
        ("models", models.main, ["--memory", "--plot"]),
    ):
        print(f"\n=== {title}")
        output = Path(options.output) / title
        extra = [f"{output}.png" if word == "--plot" else word for word in more]
        plot = ["--plot", extra.pop()] if "--plot" in more else []
        failed += program([*common, "--json", f"{output}.json", *extra, *plot])
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
