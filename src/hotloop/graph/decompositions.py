"""Which operators are taken apart, and which stay whole.

What comes in: nothing. What goes out: the table that AOTAutograd decomposes with. What holds in between:
softmax, norms, losses and the derivatives of activations become elementwise operators and reductions, in
float32 where the tensor is bfloat16 or float16, so that they can be fused; what a library does best (matrix
products, convolution, attention, sort, FFT, random numbers) stays whole, and so does every operator
that has a lowering rule of its own: one node with one rounding, rather than a chain of nodes that each round.

The next file is ``passes.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from hotloop.compat import OpOverload, core_decompositions, decompositions_of, is_composite, is_pure

from . import foreach

__all__ = ["decompositions"]


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


#: Operators that have a lowering rule: elementwise ones, factories, reductions, views, indexing, pooling.
_LOWERED = _names(
    """
    add sub rsub mul div floor_divide remainder fmod reciprocal rsqrt square frac sign sgn round pow
    addcmul addcdiv lerp clamp clamp_min clamp_max maximum minimum fmax fmin copysign atan2 hypot
    logaddexp logaddexp2 xlogy special_xlog1py special_entr sinc logit heaviside deg2rad rad2deg
    nan_to_num isfinite isposinf isneginf signbit where masked_fill relu silu gelu hardsigmoid hardswish
    hardtanh elu selu celu leaky_relu softplus mish hardshrink softshrink threshold log_sigmoid_forward
    _prelu_kernel gelu_backward silu_backward hardswish_backward hardsigmoid_backward hardtanh_backward
    leaky_relu_backward elu_backward softplus_backward threshold_backward sigmoid_backward tanh_backward
    zeros zeros_like ones ones_like full full_like empty_like new_empty new_zeros new_ones new_full fill
    arange eye linspace tril triu sum all any aminmax count_nonzero nansum var std var_mean std_mean
    logsumexp norm roll stack select_scatter embedding reflection_pad1d reflection_pad2d reflection_pad3d
    replication_pad1d replication_pad2d replication_pad3d take_along_dim unfold pixel_shuffle
    pixel_unshuffle upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d split
    split_with_sizes unbind squeeze transpose t detach alias rot90 channel_shuffle take
    upsample_trilinear3d _unsafe_view _reshape_alias _unsafe_index _unsafe_masked_index alias_copy
    diagonal_copy expand_copy squeeze_copy unsqueeze_copy t_copy transpose_copy unfold_copy
    split_with_sizes_copy index_add index_copy index_fill embedding_dense_backward
    _unsafe_masked_index_put_accumulate max_unpool2d max_unpool3d im2col col2im
    frexp _trilinear
    """
)

#: Operators that PyTorch runs faster, or exactly, as a whole.
_LIBRARY = _names(
    """
    addmm baddbmm addr mv dot vdot _scaled_dot_product_flash_attention_for_cpu bernoulli native_dropout
    masked_scatter grid_sampler_3d lstm gru rnn_tanh rnn_relu fake_quantize_per_tensor_affine
    fake_quantize_per_channel_affine
    """
)

#: Beyond PyTorch's core set: operators of its core that fuse when they are taken apart.
_FUSIBLE = _names(
    """
    _softmax _log_softmax native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _batch_norm_with_update
    _batch_norm_with_update_functional _batch_norm_no_update batch_norm_backward upsample_bicubic2d
    native_dropout_backward grid_sampler_2d
    """
)


def _packets(names: Sequence[str]) -> list[Any]:
    found = (getattr(torch.ops.aten, name, None) for name in names)
    return [packet for packet in found if packet is not None]


def _norm(
    x: torch.Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """A norm whose dimensions are counted from the front: torch 2.11 announces a shape of too many for a
    dimension of size 1 that is counted from the end."""
    if dim is None or x.dim() == 0 or all(d >= 0 for d in dim):
        return NotImplemented
    return torch.linalg.vector_norm(x, ord, [d % x.dim() for d in dim], keepdim, dtype=dtype)


@cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """From operator overload to the function that takes it apart."""
    core = {k: f for k, f in core_decompositions().items() if _seen_in_graphs(k)}
    table = {**core, **decompositions_of(_packets(_FUSIBLE)), **foreach.decompositions}
    whole = {getattr(p, o) for p in _packets([*_LOWERED, *_LIBRARY]) for o in p.overloads()}
    own = {torch.ops.aten.linalg_vector_norm.default: _norm}
    return MappingProxyType({**{k: f for k, f in table.items() if k not in whole}, **own})


def _seen_in_graphs(target: Any) -> bool:
    """Graphs are functional, and operators that are composed of others never reach them."""
    functional = isinstance(target, OpOverload) and target.namespace in ("aten", "prims") and is_pure(target)
    return functional and not is_composite(target)
