"""The memory-bound functions of the micro suite, and how any case is found by its name.

What comes in: a name. What goes out: a plain Python function and its inputs, seeded.

What holds: shapes are those of real models, so that the larger ones do not fit the caches; a case named
``..._bf16`` is the same function on bfloat16 tensors; inputs are never written to.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import harness  # first: it puts the model zoo within reach
import zoo

Function = Callable[..., Any]
Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class MicroCase:
    """A named function and what makes its inputs for a floating-point dtype."""

    name: str
    function: Function
    make: Callable[[], Inputs]
    dtype: torch.dtype

    def inputs(self) -> Inputs:
        """The inputs: the same each time, floating-point tensors in the case's dtype."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(20240229)
            made = self.make()
        return tuple(
            value.to(self.dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for value in made
        )


# ------------------------------------------------------------------------------------ the functions


def add_add_mul_add(a, b, c, d, e):
    t = a + b
    t = t + c
    t = t * d
    return t + e


def scaled_softmax(x):
    return torch.softmax(x * 0.125, -1)


def log_softmax(x):
    return torch.log_softmax(x, -1)


def layer_norm_gelu(x, weight, bias):
    return F.gelu(F.layer_norm(x, (x.shape[-1],), weight, bias))


def residual_layer_norm(x, residual, weight, bias):
    return F.layer_norm(x + residual, (x.shape[-1],), weight, bias)


def rms_norm(x, weight):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rms_norm_rotary(x, weight, cos, sin):
    """Query heads as in Llama and Qwen3: (1, tokens, heads, size) normed, transposed, rotated."""
    heads = rms_norm(x, weight).transpose(1, 2)
    half = heads.shape[-1] // 2
    rotated = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return heads * cos + rotated * sin


def geglu(x):
    value, gate = x.chunk(2, dim=-1)
    return value * F.gelu(gate)


def swiglu(gate, up):
    return F.silu(gate) * up


def gelu_tanh_bias(x, bias):
    return F.gelu(x + bias, approximate="tanh")


def cross_entropy(logits, target):
    return F.cross_entropy(logits, target)


def batch_norm_relu(x, mean, variance, weight, bias):
    return F.relu(F.batch_norm(x, mean, variance, weight, bias, training=False))


def batch_norm_add_relu(x, residual, mean, variance, weight, bias):
    return F.relu(F.batch_norm(x, mean, variance, weight, bias, training=False) + residual)


def group_norm_silu(x, weight, bias):
    return F.silu(F.group_norm(x, 32, weight, bias))


def sum_rows(x):
    return x.sum(1)


def sum_columns(x):
    return x.sum(0)


def sum_all(x):
    return (x * x).sum()


def mean_columns_of_product(x, y):
    return (x * y).mean(0)


def argmax_rows(x):
    return x.argmax(-1)


def max_with_indices(x):
    return x.max(-1)


def logsumexp(x):
    return torch.logsumexp(x, -1)


def transpose_add(x, y):
    return x.t() + y


def permute_heads(x, bias):
    """(batch, tokens, heads, size) to contiguous (batch, heads, tokens, size), with a bias."""
    return (x + bias).permute(0, 2, 1, 3).contiguous()


def embedding_add_layer_norm(ids, table, positions, weight, bias):
    return F.layer_norm(table[ids] + positions, (table.shape[1],), weight, bias)


def masked_softmax(scores, mask):
    return torch.softmax((scores * 0.125).masked_fill(mask, -math.inf), -1)


def causal_softmax(scores):
    length = scores.shape[-1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
    return torch.softmax(scores.masked_fill(hidden, -math.inf), -1)


def cat_pointwise(x, y):
    return torch.relu(torch.cat((x * 2.0, y + 1.0), dim=-1))


def channel_statistics(x):
    return torch.var_mean(x, dim=(0, 2, 3), correction=0)


def upsample_nearest_add(x, skip):
    return F.interpolate(x, scale_factor=2.0, mode="nearest") + skip


def upsample_bilinear(x):
    return F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)


def pad_scale(x):
    return F.pad(x * 0.5, (1, 1, 1, 1))


def reflect_pad_relu(x):
    return F.relu(F.pad(x, (3, 3, 3, 3), mode="reflect"))


def max_pool_relu(x):
    return F.max_pool2d(F.relu(x), 3, 2, 1)


def average_pool(x):
    return F.avg_pool2d(x * 2.0, 2)


def global_pool(x):
    return x.mean((2, 3))


def normalise_rows(x):
    return F.normalize(x, dim=-1)


def mse_loss(x, y):
    return F.mse_loss(torch.sigmoid(x), y)


def transcendental(x, y):
    return torch.sin(x) * torch.exp(-y * y) + torch.tanh(x * y)


def quantise(x, scale):
    return torch.clamp(torch.round(x * scale), -128, 127).to(torch.int8)


def select_rows_scale(x, index, weight):
    return x.index_select(0, index) * weight


def pixel_shuffle_relu(x):
    return F.relu(F.pixel_shuffle(x, 2))


# ------------------------------------------------------------------------------------ their inputs


def _norm(*shape: int) -> Callable[[], Inputs]:
    """x of ``shape``, then weight and bias of the last size."""
    return lambda: (torch.randn(shape), torch.rand(shape[-1]) + 0.5, torch.randn(shape[-1]) * 0.1)


def _randn(*shapes: tuple[int, ...]) -> Callable[[], Inputs]:
    return lambda: tuple(torch.randn(shape) for shape in shapes)


def _elementwise(rows: int, columns: int) -> Callable[[], Inputs]:
    full = (rows, columns)
    return _randn(full, (1, columns), full, full, full)


def _batch_norm(
    n: int, c: int, h: int, w: int, *, last: bool, residual: bool = False
) -> Callable[[], Inputs]:
    def make() -> Inputs:
        images = [torch.randn(n, c, h, w) for _ in range(1 + residual)]
        if last:
            images = [image.to(memory_format=torch.channels_last) for image in images]
        return (*images, torch.randn(c) * 0.1, torch.rand(c) + 0.5, torch.rand(c) + 0.5, torch.randn(c) * 0.1)

    return make


def _rotary(tokens: int, heads: int, size: int) -> Callable[[], Inputs]:
    def make() -> Inputs:
        angle = torch.outer(torch.arange(tokens).float(), 10000.0 ** (-torch.arange(0, size, 2) / size))
        angle = torch.cat((angle, angle), -1)
        return torch.randn(1, tokens, heads, size), torch.rand(size) + 0.5, angle.cos(), angle.sin()

    return make


def _cross_entropy(rows: int, classes: int) -> Callable[[], Inputs]:
    return lambda: (torch.randn(rows, classes), torch.randint(classes, (rows,)))


def _embedding(batch: int, tokens: int, size: int, vocabulary: int) -> Callable[[], Inputs]:
    return lambda: (
        torch.randint(vocabulary, (batch, tokens)),
        torch.randn(vocabulary, size),
        torch.randn(tokens, size),
        torch.rand(size) + 0.5,
        torch.randn(size) * 0.1,
    )


def _masked(batch: int, heads: int, length: int) -> Callable[[], Inputs]:
    def make() -> Inputs:
        ends = torch.randint(length // 2, length + 1, (batch, 1, 1, 1))
        return torch.randn(batch, heads, length, length), torch.arange(length) >= ends

    return make


def _images(n: int, c: int, h: int, w: int, *, scales: tuple[int, ...] = (1,)) -> Callable[[], Inputs]:
    return _randn(*((n, c, h * scale, w * scale) for scale in scales))


def _group_norm(n: int, c: int, h: int, w: int) -> Callable[[], Inputs]:
    return lambda: (torch.randn(n, c, h, w), torch.rand(c) + 0.5, torch.randn(c) * 0.1)


# ------------------------------------------------------------------------------------ the suite

_F32, _BF16 = (torch.float32,), (torch.bfloat16,)
_BOTH = (torch.float32, torch.bfloat16)

_DEFINITIONS: list[tuple[str, Function, Callable[[], Inputs], tuple[torch.dtype, ...]]] = [
    ("elementwise_16384x512", add_add_mul_add, _elementwise(16384, 512), _BOTH),
    ("elementwise_1024x1024", add_add_mul_add, _elementwise(1024, 1024), _F32),
    ("softmax_2048x1024", scaled_softmax, _randn((2048, 1024)), _BOTH),
    ("log_softmax_2048x4096", log_softmax, _randn((2048, 4096)), _F32),
    ("masked_softmax_4x12x256x256", masked_softmax, _masked(4, 12, 256), _BOTH),
    ("causal_softmax_12x512x512", causal_softmax, _randn((1, 12, 512, 512)), _F32),
    ("layer_norm_gelu_4096x768", layer_norm_gelu, _norm(4096, 768), _BOTH),
    (
        "residual_layer_norm_2048x1024",
        residual_layer_norm,
        lambda: (torch.randn(2048, 1024), *_norm(2048, 1024)()),
        _F32,
    ),
    ("rms_norm_rotary_1024x12x64", rms_norm_rotary, _rotary(1024, 12, 64), _BOTH),
    ("geglu_2048x4096", geglu, _randn((2048, 4096)), _BOTH),
    ("swiglu_1024x4096", swiglu, _randn((1024, 4096), (1024, 4096)), _F32),
    ("gelu_tanh_bias_1024x3072", gelu_tanh_bias, _randn((1024, 3072), (3072,)), _F32),
    ("cross_entropy_2048x32000", cross_entropy, _cross_entropy(2048, 32000), _BOTH),
    ("batch_norm_relu_first_8x64x56x56", batch_norm_relu, _batch_norm(8, 64, 56, 56, last=False), _F32),
    ("batch_norm_relu_last_8x64x56x56", batch_norm_relu, _batch_norm(8, 64, 56, 56, last=True), _BOTH),
    (
        "batch_norm_add_relu_8x256x28x28",
        batch_norm_add_relu,
        _batch_norm(8, 256, 28, 28, last=False, residual=True),
        _F32,
    ),
    ("group_norm_silu_4x128x56x56", group_norm_silu, _group_norm(4, 128, 56, 56), _F32),
    ("sum_rows_4096x4096", sum_rows, _randn((4096, 4096)), _BOTH),
    ("sum_columns_4096x4096", sum_columns, _randn((4096, 4096)), _BOTH),
    ("sum_all_4096x4096", sum_all, _randn((4096, 4096)), _F32),
    ("mean_columns_8192x768", mean_columns_of_product, _randn((8192, 768), (8192, 768)), _F32),
    ("argmax_2048x4096", argmax_rows, _randn((2048, 4096)), _F32),
    ("max_with_indices_2048x1024", max_with_indices, _randn((2048, 1024)), _F32),
    ("logsumexp_2048x4096", logsumexp, _randn((2048, 4096)), _F32),
    ("transpose_add_2048x2048", transpose_add, _randn((2048, 2048), (2048, 2048)), _BOTH),
    ("permute_heads_4x256x12x64", permute_heads, _randn((4, 256, 12, 64), (12, 64)), _F32),
    (
        "embedding_add_layer_norm_16x128x768",
        embedding_add_layer_norm,
        _embedding(16, 128, 768, 30522),
        _BOTH,
    ),
    ("cat_pointwise_2048x1536", cat_pointwise, _randn((2048, 1024), (2048, 512)), _F32),
    ("channel_statistics_8x128x28x28", channel_statistics, _images(8, 128, 28, 28), _F32),
    ("upsample_nearest_add_4x64x56x56", upsample_nearest_add, _images(4, 64, 56, 56, scales=(1, 2)), _F32),
    ("upsample_bilinear_4x32x56x56", upsample_bilinear, _images(4, 32, 56, 56), _F32),
    ("pad_scale_8x64x56x56", pad_scale, _images(8, 64, 56, 56), _F32),
    ("reflect_pad_relu_8x64x56x56", reflect_pad_relu, _images(8, 64, 56, 56), _F32),
    ("max_pool_relu_8x64x112x112", max_pool_relu, _images(8, 64, 112, 112), _F32),
    ("average_pool_8x64x56x56", average_pool, _images(8, 64, 56, 56), _F32),
    ("global_pool_16x512x14x14", global_pool, _images(16, 512, 14, 14), _F32),
    ("normalise_rows_4096x768", normalise_rows, _randn((4096, 768)), _F32),
    ("mse_loss_2048x2048", mse_loss, _randn((2048, 2048), (2048, 2048)), _F32),
    ("transcendental_1024x1024", transcendental, _randn((1024, 1024), (1024, 1024)), _F32),
    ("quantise_4096x1024", quantise, lambda: (torch.randn(4096, 1024), torch.tensor(31.7)), _F32),
    (
        "select_rows_scale_4096x768",
        select_rows_scale,
        lambda: (torch.randn(8192, 768), torch.randint(8192, (4096,)), torch.randn(768)),
        _F32,
    ),
    ("pixel_shuffle_relu_4x64x56x56", pixel_shuffle_relu, _images(4, 64, 56, 56), _F32),
    ("small_elementwise_64x64", add_add_mul_add, _elementwise(64, 64), _F32),
    ("small_softmax_32x128", scaled_softmax, _randn((32, 128)), _F32),
    ("small_layer_norm_gelu_16x256", layer_norm_gelu, _norm(16, 256), _F32),
    ("small_transpose_add_100x100", transpose_add, _randn((100, 100), (100, 100)), _F32),
    ("small_sum_rows_64x64", sum_rows, _randn((64, 64)), _F32),
]

MICRO: dict[str, MicroCase] = {
    name + suffix: MicroCase(name + suffix, function, make, dtype)
    for name, function, make, dtypes in _DEFINITIONS
    for dtype, suffix in ((dtype, "_bf16" if dtype is torch.bfloat16 else "") for dtype in dtypes)
}

QUICK = [
    "elementwise_16384x512",
    "elementwise_1024x1024",
    "softmax_2048x1024",
    "layer_norm_gelu_4096x768",
    "cross_entropy_2048x32000",
    "sum_rows_4096x4096",
    "sum_columns_4096x4096",
    "transpose_add_2048x2048",
]


def model_function(sample: zoo.Sample) -> tuple[Function, Inputs]:
    """A model's forward as a plain function of its inputs."""
    model, names = sample.model, tuple(sample.inputs)

    def forward(*values: Any) -> Any:
        return model(**dict(zip(names, values, strict=True)))

    return forward, tuple(sample.inputs.values())


def encoder(layers: int) -> tuple[Function, Inputs]:
    """The loss of a transformer encoder of so many small layers: a large graph that computes little."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20240229)
        layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, activation="gelu", batch_first=True)
        model = torch.nn.Sequential(*(copy.deepcopy(layer) for _ in range(layers)))
        x = torch.randn(2, 8, 32)
    return lambda x: model(x).square().mean(), (x,)


def function_of(case: str) -> tuple[Function, Inputs]:
    """The function and inputs of ``micro:<name>``, of ``model:<name>:<size>:<dtype>``, or of
    ``train:<layers>``, whose result is a loss that wants a backward."""
    kind, _, rest = case.partition(":")
    if kind == "micro":
        return MICRO[rest].function, MICRO[rest].inputs()
    if kind == "model":
        name, size, dtype = rest.split(":")
        sample = zoo.ZOO[name].build("full" if size == "full" else "tiny")
        return model_function(sample.to(getattr(torch, dtype)) if dtype != "float32" else sample)
    if kind == "train":
        return encoder(int(rest))
    raise KeyError(f"{case!r} is none of micro:<name>, model:<name>:<size>:<dtype>, train:<layers>")


__all__ = ["MICRO", "QUICK", "MicroCase", "encoder", "function_of", "harness", "model_function"]
