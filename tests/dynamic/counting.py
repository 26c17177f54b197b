"""Compiles with varying sizes, and counts what is compiled.

What comes in: a function, and inputs of many sizes. What goes out: how often it was compiled. What holds:
each result is as accurate as eager's, and nothing was compiled for one set of sizes alone unless a test says
so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hotloop import backend
from judge import assert_as_accurate, reference_of

__all__ = ["Compiles", "check_sizes", "counted"]

Function = Callable[..., Any]


@dataclass
class Compiles:
    """Compiles of graphs with symbolic sizes, of others, and why graphs were given to ``_PerSize``."""

    symbolic: int = 0
    static: int = 0
    kernels: int = 0
    refused: list[str] = field(default_factory=list)


@contextmanager
def counted() -> Iterator[Compiles]:
    """Count the compiles inside, starting from a fresh Dynamo."""
    torch._dynamo.reset()
    found = Compiles()
    with pytest.MonkeyPatch.context() as patch:
        compile_one, refuse, functions = backend._compile, backend._per_size, backend.print_functions

        def noted(gm: Any, kind: str, config: Any, symbolic: bool) -> Any:
            out = compile_one(gm, kind, config, symbolic)
            if symbolic:
                found.symbolic += 1
            else:
                found.static += 1
            return out

        def refused(gm: Any, kind: str, config: Any, reason: Exception) -> Any:
            found.refused.append(str(reason))
            return refuse(gm, kind, config, reason)

        def printed(*args: Any) -> Any:
            made = functions(*args)
            found.kernels += len(made)
            return made

        patch.setattr(backend, "_compile", noted)
        patch.setattr(backend, "_per_size", refused)
        patch.setattr(backend, "print_functions", printed)
        yield found
    torch._dynamo.reset()


def check_sizes(f: Function, inputs: Sequence[tuple[Any, ...]], compiles: int = 1, **how: Any) -> Compiles:
    """One compiled function on all inputs: as accurate as eager, ``compiles`` graphs for all sizes."""
    with counted() as found:
        g = torch.compile(f, backend="hotloop", **{"dynamic": True, **how})
        for given in inputs:
            want, got = f(*given), g(*given)
            assert_as_accurate(got, want, reference_of(f, *given), check_stride=True)
    assert not found.refused
    assert (found.symbolic, found.static) == (compiles, 0), found
    return found
