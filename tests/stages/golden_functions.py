"""The functions whose stages are kept as golden texts, as (function, inputs).

The generated texts quote lines of this file by number: what is added goes to the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding as look_up
from torch.nn.functional import gelu, layer_norm, linear, relu

Case = tuple[Callable[..., Any], tuple[Tensor, ...]]


def elementwise(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> Tensor:
    t = a + b
    t = t + c
    t = t * d
    return t + e


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x * 0.125, -1)


def layer_norm_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = layer_norm(x, (x.shape[-1],), weight, bias)
    return gelu(y)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    return look_up(ids, table) * 8.0


def transpose_add(x: Tensor, y: Tensor) -> Tensor:
    return x.t() + y


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return relu(linear(x, weight, bias))


def cat(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat((x, y * 2), dim=1)


def column_sum(x: Tensor) -> Tensor:
    return x.sum(0)


def add_rows(table: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    return table.index_add(0, ids, rows * 2.0)


def running_sum(x: Tensor) -> Tensor:
    return (x * 0.5).cumsum(0)


def cases() -> dict[str, Case]:
    """A fresh set, by name."""
    r = torch.randn
    return {
        "elementwise": (elementwise, (r(1024, 512), r(1024, 512), r(1, 512), r(1024, 512), r(1024, 512))),
        "softmax": (softmax, (r(512, 1024),)),
        "layer_norm_gelu": (layer_norm_gelu, (r(512, 768), r(768), r(768))),
        "embedding": (embedding, (torch.randint(0, 1000, (64, 128)), r(1000, 64))),
        "transpose_add": (transpose_add, (r(512, 300), r(300, 512))),
        "linear_relu": (linear_relu, (r(64, 16), r(32, 16), r(32))),
        "cat": (cat, (r(512, 100), r(512, 156))),
        "column_sum": (column_sum, (r(2048, 256),)),
        "add_rows": (add_rows, (r(1000, 192), torch.randint(0, 1000, (64,)), r(64, 192))),
        "running_sum": (running_sum, (r(64, 300),)),
    }
