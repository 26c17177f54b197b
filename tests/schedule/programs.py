"""Functions whose fusion is interesting, as (name, function, inputs) with fresh inputs for each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]


def _r(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def rope(x: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w
    half = y.shape[-1] // 2
    rotated = torch.cat((-y[..., half:], y[..., :half]), dim=-1)
    return y * cos + rotated * sin


def masked_softmax(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[-1]
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    return torch.softmax(x.masked_fill(~mask, float("-inf")), -1)


def residual(
    x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    s = x + y
    return s, F.layer_norm(s, (s.shape[-1],), w, b)


def cases() -> dict[str, Case]:
    """A fresh set: tests may not share tensors."""
    return {
        "chain": (
            lambda a, b, c, d, e: ((a + b) + c) * d + e,
            (_r(7, 33), _r(7, 33), _r(1, 33), _r(7, 1), _r(7, 33)),
        ),
        "softmax": (lambda x: torch.softmax(x * 0.125, -1), (_r(5, 37),)),
        "softmax_first": (lambda x: torch.softmax(x, 0), (_r(33, 17),)),
        "softmax_middle": (lambda x: torch.softmax(x, 1), (_r(3, 9, 17),)),
        "log_softmax": (lambda x: F.log_softmax(x, -1), (_r(4, 40),)),
        "layer_norm_gelu": (
            lambda x, w, b: F.gelu(F.layer_norm(x, (40,), w, b)),
            (_r(6, 40), _r(40), _r(40)),
        ),
        "layer_norm_bf16": (
            lambda x, w: F.layer_norm(x, (40,), w) * 2,
            (_r(6, 40, dtype=torch.bfloat16), _r(40, dtype=torch.bfloat16)),
        ),
        "residual": (residual, (_r(3, 4, 24), _r(3, 4, 24), _r(24), _r(24))),
        "rope": (rope, (_r(2, 3, 16), _r(16), _r(3, 16), _r(3, 16))),
        "masked_softmax": (masked_softmax, (_r(2, 3, 9, 9),)),
        "long_rows": (lambda x, w: ((x * w).sum(-1), x.amax(-1)), (_r(3, 32, 300), _r(300))),
        "long_rows_of_three_axes": (lambda x: x.mean((-1, -3)) + 1, (_r(5, 36, 70),)),
        "long_rows_argmax": (lambda x: x.argmax(-1), (_r(40, 259),)),
        "long_rows_overwritten": (lambda x: x.mul(2).sub_(x.mean(-1, keepdim=True)), (_r(32, 270),)),
        "cross_entropy": (F.cross_entropy, (_r(6, 50), torch.randint(0, 50, (6,)))),
        "sum_rows": (lambda x: x.sum(1), (_r(9, 70),)),
        "sum_columns": (lambda x: x.sum(0), (_r(70, 9),)),
        "sum_all": (lambda x: (x * 2).sum(), (_r(300, 300),)),
        "mean_middle": (lambda x: (x + 1).mean(1), (_r(4, 30, 18),)),
        "argmax": (lambda x: x.argmax(-1), (_r(5, 33),)),
        "argmax_two": (lambda x: (x.max(1), x.argmin(0)), (_r(5, 33),)),
        "transpose_add": (lambda x, y: x.t() + y, (_r(40, 70), _r(70, 40))),
        "permuted_copy": (
            lambda x: (x * 2).view(2, 5, 4, 8).permute(0, 2, 1, 3).contiguous(),
            (_r(2, 5, 32),),
        ),
        "cat": (lambda x, y: torch.cat([x, y], 1) * 2, (_r(4, 20), _r(4, 13))),
        "pad": (lambda x: F.pad(x, (1, 2, 3, 0)) + 1, (_r(4, 20),)),
        "embedding": (
            lambda i, t, p, w, b: F.layer_norm(F.embedding(i, t) + p, (24,), w, b),
            (torch.randint(0, 11, (3, 5)), _r(11, 24), _r(5, 24), _r(24), _r(24)),
        ),
        "batch_norm": (
            lambda x, m, v, w, b: F.relu(F.batch_norm(x, m, v, w, b)),
            (_r(2, 6, 5, 7), _r(6), _r(6).abs(), _r(6), _r(6)),
        ),
        "batch_norm_last": (
            lambda x, m, v, w, b: F.relu(F.batch_norm(x, m, v, w, b)),
            (_r(2, 6, 5, 7).to(memory_format=torch.channels_last), _r(6), _r(6).abs(), _r(6), _r(6)),
        ),
        "group_norm": (lambda x, w, b: F.group_norm(x, 3, w, b), (_r(2, 6, 5, 7), _r(6), _r(6))),
        "geglu": (lambda x: x.chunk(2, -1)[0] * F.gelu(x.chunk(2, -1)[1]), (_r(5, 48),)),
        "two_outputs": (lambda x, y: (x + y, (x + y).sin(), (x * y).sum(-1)), (_r(6, 20), _r(6, 20))),
        "matmul": (lambda x, w, b: F.relu(F.linear(x, w, b)) + 1, (_r(4, 5, 16), _r(24, 16), _r(24))),
        "matmul_chain": (lambda x, w: F.gelu(F.gelu(x @ w) @ w) @ w, (_r(40, 16), _r(16, 16))),
        "integers": (lambda x, y: (x // y, x % y, x << 1), (torch.arange(-20, 20), torch.full((40,), 3))),
        "zero_dim": (lambda x, y: (x + 1) * y, (torch.tensor(2.0), torch.tensor(3.0))),
        "empty": (lambda x: (x + 1, x.sum(0)), (_r(0, 5),)),
        "variance": (lambda x: (x.var(), x.std(1), x.var(0)), (_r(20, 30),)),
        "views_split": (lambda x: x.view(4, 6, 4).transpose(0, 1).reshape(6, 16) * 2, (_r(4, 24),)),
        "roll": (lambda x: torch.roll(x, (3, 1), (0, 1)) - x, (_r(9, 20),)),
        "flip": (lambda x: x.flip(-1) + x, (_r(9, 20),)),
        "max_pool": (lambda x: F.max_pool2d(F.relu(x), 2), (_r(2, 3, 8, 8),)),
        "upsample": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (_r(1, 2, 5, 5),)),
    }
