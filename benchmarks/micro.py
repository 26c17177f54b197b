"""The micro suite: memory-bound functions in eager, Inductor and hotloop, interleaved.

    python benchmarks/micro.py [--filter softmax,norm] [--quick] [--json out.json] [--plot out.png]

Each result is first judged against eager's, by float64 where they differ. Inductor's first run on a machine
compiles for about 20 seconds a case; later runs find its cache. Next: ``models.py``.
"""

from __future__ import annotations

import functools
import sys

import harness
import judge
from cases import MICRO, QUICK, MicroCase


def micro_check(case: MicroCase) -> harness.Check:
    """Judges a result, by float64 (run once, only if needed) where it is not close to eager's."""
    reference = functools.lru_cache(maxsize=1)(judge.reference_of(case.function, *case.inputs()))

    def check(actual: object, eager: object) -> None:
        judge.assert_as_accurate(actual, eager, reference, what=case.name)

    return check


def measure_case(case: MicroCase, backends: list[str], seconds: float) -> harness.Outcome:
    """Checks and times one case."""
    return harness.measure(case.name, case.function, case.inputs(), backends, micro_check(case), seconds)


def main(arguments: list[str] | None = None) -> int:
    """Runs the suite; the number of failures is the exit status."""
    options = harness.parse(harness.parser(__doc__), arguments)
    backends = options.backends.split(",")
    names = harness.selected(QUICK if options.quick else MICRO, options.filter)
    harness.print_machine()
    table = harness.Table(backends, width=42)
    for name in names:
        table.add(measure_case(MICRO[name], backends, options.seconds))
        harness.write_json(options.json, table.summary())
    failed = table.finish()
    harness.write_plot(options.plot, table, "Memory-bound functions")
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
