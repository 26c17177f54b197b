"""Tensors made from numbers: values, dtypes and strides as eager's, and no memory read to make them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from check import check, lowered

from hotloop.ir.loops import op_reads

X = torch.randn(3, 4)

MAKERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": lambda x: torch.zeros(3, 4) + x,
    "ones": lambda x: torch.ones(2, 3, dtype=torch.int32),
    "full": lambda x: torch.full((2, 3), 2.5),
    "full_int": lambda x: torch.full((2, 3), 7),
    "full_bool": lambda x: torch.full((2, 3), True),
    "full_infinite": lambda x: torch.full((2, 3), -math.inf, dtype=torch.bfloat16),
    "full_rounded": lambda x: torch.full((2, 3), 0.1, dtype=torch.float16),
    "full_zero_dim": lambda x: torch.full((), 3.0),
    "full_empty": lambda x: torch.full((0, 3), 3.0),
    "zeros_like": torch.zeros_like,
    "zeros_like_transposed": lambda x: torch.zeros_like(x.t()),
    "ones_like": lambda x: torch.ones_like(x, dtype=torch.int64),
    "full_like": lambda x: torch.full_like(x, 1.5),
    "new_zeros": lambda x: x.new_zeros(5),
    "new_ones": lambda x: x.new_ones(5, dtype=torch.bool),
    "new_full": lambda x: x.new_full((5,), 3.5),
    "scalar_tensor": lambda x: torch.scalar_tensor(2.5) * x,
    "fill": lambda x: torch.fill(x, 3.5),
    "fill_tensor": lambda x: torch.fill(x, torch.ones(())),
    "arange": lambda x: torch.arange(7),
    "arange_start": lambda x: torch.arange(3, 20),
    "arange_step": lambda x: torch.arange(3, 20, 4),
    "arange_down": lambda x: torch.arange(20, 3, -4),
    "arange_empty": lambda x: torch.arange(0),
    "arange_float": lambda x: torch.arange(0, 1, 0.1),
    "arange_float_down": lambda x: torch.arange(1.0, -1.0, -0.3),
    "arange_double": lambda x: torch.arange(0, 1, 0.1, dtype=torch.float64),
    "arange_int_as_float": lambda x: torch.arange(5, dtype=torch.float32) * x[0, 0],
    "arange_int32": lambda x: torch.arange(-3, 5, dtype=torch.int32),
    "arange_bfloat16": lambda x: torch.arange(0, 300, 3, dtype=torch.bfloat16),
    "linspace": lambda x: torch.linspace(-1, 1, 7),
    "linspace_one": lambda x: torch.linspace(-1, 1, 1),
    "linspace_double": lambda x: torch.linspace(0, 3, 10, dtype=torch.float64),
    "eye": lambda x: torch.eye(4),
    "eye_wide": lambda x: torch.eye(3, 5, dtype=torch.int64),
    "tril": torch.tril,
    "triu": torch.triu,
    "tril_above": lambda x: torch.tril(x, 1),
    "triu_below": lambda x: torch.triu(x, -1),
    "tril_nan_outside": lambda x: torch.tril(x / 0.0 * 0.0),
    "tril_batch": lambda x: torch.tril(x.expand(2, 3, 4), -1),
    "causal_mask": lambda x: torch.full((5, 5), -math.inf).triu(1),
    "position_ids": lambda x: torch.arange(5)[None, :] + torch.zeros(2, 1, dtype=torch.int64),
}


@pytest.mark.parametrize("name", MAKERS)
def test_values(name: str) -> None:
    exact = "linspace" not in name and "arange_float" not in name
    check(MAKERS[name], X, exact=exact)


@pytest.mark.parametrize("name", ["arange", "arange_float", "full", "eye", "linspace"])
def test_nothing_is_read(name: str) -> None:
    program = lowered(MAKERS[name], X)
    assert [op_reads(op) for op in program.ops] == [()]


def test_integer_positions_stay_index_expressions() -> None:
    program = lowered(lambda x: torch.arange(3, 20, 4), X)
    assert "index((4*i0 + 3))" in str(program)
