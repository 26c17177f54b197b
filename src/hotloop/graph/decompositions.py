"""Which operators are taken apart, and which stay whole.

What comes in: nothing. What goes out: the table that AOTAutograd decomposes with. What holds in between: softmax,
norms, losses and the derivatives of activations become elementwise operators and reductions, in float32 where the
tensor is bfloat16 or float16, so that they can be fused; what a library does best (matrix products, convolution,
attention, sort, scatter, FFT, random numbers) stays whole, and so does every operator that has a lowering rule of its
own: one node with one rounding, rather than a chain of nodes that each round.

The next file is ``passes.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from hotloop.compat import core_decompositions, decompositions_of

__all__ = ["decompositions"]

#: Operators that have a lowering rule: elementwise ones, factories, reductions, views, indexing, pooling.
_LOWERED = """
    add sub rsub mul div floor_divide remainder fmod reciprocal rsqrt square frac sign sgn round pow
    addcmul addcdiv lerp clamp clamp_min clamp_max maximum minimum fmax fmin copysign atan2 hypot
    logaddexp logaddexp2 xlogy special_xlog1py special_entr sinc logit heaviside deg2rad rad2deg nan_to_num
    isfinite isposinf isneginf signbit where masked_fill
    relu silu gelu hardsigmoid hardswish hardtanh elu selu celu leaky_relu softplus mish hardshrink softshrink
    threshold log_sigmoid_forward _prelu_kernel
    gelu_backward silu_backward hardswish_backward hardsigmoid_backward hardtanh_backward leaky_relu_backward
    elu_backward softplus_backward threshold_backward sigmoid_backward tanh_backward
    zeros zeros_like ones ones_like full full_like empty_like new_empty new_zeros new_ones new_full fill zero
    arange eye linspace tril triu
    sum all any aminmax count_nonzero nansum var std var_mean std_mean logsumexp norm
    roll stack select_scatter embedding reflection_pad1d reflection_pad2d reflection_pad3d
    replication_pad1d replication_pad2d replication_pad3d take_along_dim unfold pixel_shuffle pixel_unshuffle
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    squeeze transpose t detach alias
""".split()

#: Operators that PyTorch runs faster, or exactly, as a whole.
_LIBRARY = """
    addmm baddbmm addr mv dot vdot _scaled_dot_product_flash_attention_for_cpu
    index_add index_copy index_fill embedding_dense_backward bernoulli native_dropout
    max_unpool2d max_unpool3d im2col col2im lstm gru rnn_tanh rnn_relu
    fake_quantize_per_tensor_affine fake_quantize_per_channel_affine
""".split()

#: Beyond PyTorch's core set: operators of its core that fuse when they are taken apart.
_FUSIBLE = """
    _softmax _log_softmax native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _batch_norm_with_update
    _batch_norm_with_update_functional _batch_norm_no_update batch_norm_backward

    upsample_trilinear3d upsample_bicubic2d native_dropout_backward
""".split()


def _packets(names: list[str]) -> list[Any]:
    found = (getattr(torch.ops.aten, name, None) for name in names)
    return [packet for packet in found if packet is not None]


@cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """From operator overload to the function that takes it apart."""
    table = {**core_decompositions(), **decompositions_of(_packets(_FUSIBLE))}
    whole = {getattr(p, o) for p in _packets([*_LOWERED, *_LIBRARY]) for o in p.overloads()}
    return MappingProxyType({k: f for k, f in table.items() if k not in whole})
