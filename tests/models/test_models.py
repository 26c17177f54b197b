"""Each architecture of the zoo, compiled, is as accurate as eager: inference, float32 and bfloat16.

``HOTLOOP_TEST_BACKEND`` names another back end to judge by the same rule ("inductor", "aot_eager").
"""

from __future__ import annotations

import os

import pytest
import torch
import torch._dynamo

import judge
import zoo

BACKEND = os.environ.get("HOTLOOP_TEST_BACKEND", "hotloop")


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", zoo.names())
def test_model_is_as_accurate_as_eager(name: str, dtype: torch.dtype) -> None:
    sample = zoo.build(name, "tiny").to(dtype)
    compiled = torch.compile(sample.model, backend=BACKEND, fullgraph=True)
    with torch.no_grad():
        eager = sample()
        first = compiled(**sample.inputs)
        kept = [tensor.clone() for tensor in first]
        second = compiled(**sample.inputs)
    assert all(tensor.isfinite().all() for tensor in eager)
    reference = judge.reference_of(sample.to(torch.float64).model, **sample.inputs)
    judge.assert_as_accurate(first, eager, reference, what=f"{name} in {dtype}")
    judge.assert_as_accurate(second, eager, reference, what=f"{name} in {dtype}, second call")
    # The second call runs on reused memory; what is still held of the first must have survived it.
    for before, after in zip(kept, first, strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", zoo.names())
def test_zoo_is_deterministic(name: str) -> None:
    with torch.no_grad():
        for one, other in zip(zoo.build(name)(), zoo.build(name)(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
