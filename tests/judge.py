"""The judge of accuracy is hotloop's own, ``hotloop.tools.judge``; ``test_judge.py`` tests it."""

from hotloop.tools.judge import (
    TOLERANCES,
    assert_as_accurate,
    float64_reference,
    reference_of,
    to_float64,
)

__all__ = ["TOLERANCES", "assert_as_accurate", "float64_reference", "reference_of", "to_float64"]
