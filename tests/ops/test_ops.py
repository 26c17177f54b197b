"""A part of sweep.py that is small enough for every run: operators of each kind, in the dtypes that matter to
them.

What comes in: names of operators. What holds: their samples give eager's results, strides and dtypes.
All operators: ``python tests/ops/sweep.py float32``.
"""

from __future__ import annotations

import pytest
import torch

from sweep import Outcome, names, sweep_here


def _words(text: str) -> list[str]:
    return text.split()


FLOATS = _words(
    """
    add addcdiv asinh atan2 clamp copysign erf exp fmod lerp log1p logaddexp lgamma maximum nan_to_num
    pow rsqrt sigmoid sinc special.log_ndtr tanh where xlogy aminmax argmax cumsum logsumexp mean norm
    prod softmax std.unbiased sum var_mean as_strided as_strided.partial_views cat diagonal_copy expand
    flip index_put index_select masked_fill gather pad_sequence roll scatter_reduce.amax slice_scatter
    sort stack take_along_dim tril unfold unflatten nn.functional.adaptive_avg_pool2d
    nn.functional.avg_pool2d nn.functional.batch_norm nn.functional.conv2d nn.functional.cross_entropy
    nn.functional.dropout2d nn.functional.embedding nn.functional.gelu nn.functional.group_norm
    nn.functional.interpolate.area nn.functional.interpolate.bicubic nn.functional.layer_norm
    nn.functional.max_pool2d nn.functional.pad.reflect nn.functional.pixel_shuffle nn.functional.rms_norm
    nn.functional.scaled_dot_product_attention nn.functional.smooth_l1_loss linalg.vector_norm matmul
    einsum
"""
)
LOW = _words(
    """
    add clamp div exp fmod floor gelu lerp logit mean pow remainder sign softmax sum var where
    nn.functional.layer_norm nn.functional.gelu nn.functional.silu nn.functional.cross_entropy argmax eq
"""
)
INTEGERS = _words(
    """
    abs add all amax argmin bitwise_left_shift clamp cumsum div.floor_rounding div.trunc_rounding eq
    floor_divide fmod gcd mul neg pow prod remainder sum square sign trunc where
"""
)

CASES = [
    *((torch.float32, name) for name in FLOATS),
    *((torch.bfloat16, name) for name in LOW),
    *((torch.float16, name) for name in LOW[::2]),
    *((torch.int64, name) for name in INTEGERS),
    *((torch.uint8, name) for name in INTEGERS[::2]),
    *((torch.int32, name) for name in INTEGERS[1::2]),
    *(
        (torch.bool, name)
        for name in ("add", "amax", "any", "cumsum", "eq", "logical_xor", "mul", "sum", "where")
    ),
]
TAKEN = {dtype: frozenset(names(dtype)) for dtype in {d for d, _ in CASES}}


def _id(case: tuple[torch.dtype, str]) -> str:
    return f"{case[1]}-{str(case[0]).removeprefix('torch.')}"


@pytest.mark.parametrize("case", [c for c in CASES if c[1] in TAKEN[c[0]]], ids=_id)
def test_samples_give_the_results_of_eager(case: tuple[torch.dtype, str]) -> None:
    dtype, name = case
    outcomes: list[Outcome] = list(sweep_here(dtype, [name], 2))
    assert any(o.kind == "ok" for o in outcomes), outcomes
    assert not [o for o in outcomes if o.kind not in ("ok", "skip")]
