"""A first look: one elementwise function and two real models in eager, Inductor and hotloop, side by side.

    python benchmarks/demo.py

Both compilers start with empty caches, so that the compile times are what a new user meets.
"""

from __future__ import annotations

import os
import sys
import tempfile

import harness
import zoo
from cases import MICRO, Function, Inputs, model_function
from micro import micro_check
from models import model_check

MODELS = {"bert": "BERT-base, 128 tokens", "vit": "a vision transformer, 224x224"}


def show(
    title: str,
    function: Function,
    inputs: Inputs,
    check: harness.Check,
    backends: list[str],
    seconds: float,
) -> int:
    """Compiles and times one function and prints its rows; returns the number of failures."""
    print(f"\n{title}", flush=True)  # before the compiles, which may take a minute
    outcome = harness.measure(title, function, inputs, backends, check, seconds)
    for name in ["eager", *backends]:
        if name in outcome.failures:
            print(f"  {name:12} failed: {outcome.failures[name]}")
            continue
        compiled = "" if name == "eager" else f"{outcome.first_call[name]:8.2f}"
        error = "" if name == "eager" else f"{outcome.max_error[name]:12.1e}"
        time = outcome.timings[name].median
        print(f"  {name:12}{compiled:>8}{time:12.3f}{outcome.ratio('eager', name):11.2f}x{error}", flush=True)
    return len(outcome.failures)


def main(arguments: list[str] | None = None) -> int:
    """Runs the demonstration; the number of failures is the exit status."""
    options = harness.parse(harness.parser(__doc__), arguments)
    backends = options.backends.split(",")
    with tempfile.TemporaryDirectory(prefix="hotloop-demo-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "inductor")
        os.environ["HOTLOOP_CACHE_DIR"] = os.path.join(folder, "hotloop")
        harness.print_machine()
        print("compile s: the first call, from empty caches")
        print(f"\n  {'':12}{'compile s':>8}{'ms a call':>11}{'speed-up':>12}{'max error':>12}")
        case = MICRO["elementwise_16384x512"]
        title = "add, add, mul, add on (16384, 512)"
        failed = show(title, case.function, case.inputs(), micro_check(case), backends, options.seconds)
        for name, title in MODELS.items():
            if not options.quick or name == "bert":
                sample = zoo.build(name, "full")
                failed += show(
                    f"{title}, float32",
                    *model_function(sample),
                    model_check(sample),
                    backends,
                    2 * options.seconds,
                )
    return failed


if __name__ == "__main__":
    sys.exit(main())
