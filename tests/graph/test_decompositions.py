"""What is taken apart fuses and is as accurate as eager; what has a rule, or a library, stays whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tracing import check_graph, targets, trace

from hotloop.compat import returns_alias
from hotloop.config import Config
from hotloop.dumps import Log
from hotloop.graph.decompositions import decompositions
from hotloop.ir.loops import Extern
from hotloop.lower.lower import RULES, lower

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Fn = Callable[..., Any]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * 3


W, B = torch.rand(12) + 0.5, torch.randn(12)
LABELS = torch.tensor([1, 0, 11, 5])

FUSED: dict[str, Fn] = {
    "softmax": lambda x: F.softmax(x, -1),
    "softmax_dim0": lambda x: F.softmax(x, 0),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (12,), W.to(x.dtype), B.to(x.dtype)),
    "layer_norm_plain": lambda x: F.layer_norm(x, (12,)),
    "rms_norm": lambda x: F.rms_norm(x, (12,), W.to(x.dtype)),
    "group_norm": lambda x: F.group_norm(x, 3, W.to(x.dtype), B.to(x.dtype)),
    "batch_norm": lambda x: F.batch_norm(x, B.to(x.dtype), W.to(x.dtype), W.to(x.dtype), B.to(x.dtype)),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "var_mean": lambda x: torch.var_mean(x, -1),
    "std": lambda x: torch.std(x, -1),
    "glu": lambda x: F.glu(x, -1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "mse_loss": lambda x: F.mse_loss(x, x.flip(0)),
    "l1_loss": lambda x: F.l1_loss(x, x.flip(0)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x.flip(0)),
    "huber_loss": lambda x: F.huber_loss(x, x.flip(0)),
    "bce": lambda x: F.binary_cross_entropy(x.sigmoid(), x.flip(0).sigmoid()),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x.flip(0).sigmoid()),
    "cross_entropy": lambda x: F.cross_entropy(x, LABELS),
    "cross_entropy_smooth": lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1),
    "cross_entropy_ignored": lambda x: F.cross_entropy(x, LABELS, ignore_index=5),
    "nll_loss_sum": lambda x: F.nll_loss(x, LABELS, reduction="sum"),
    "kl_div": lambda x: F.kl_div(F.log_softmax(x, -1), F.softmax(x.flip(0), -1), reduction="batchmean"),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(0)),
    "isclose": lambda x: torch.isclose(x, x.flip(0)),
    "one_hot": lambda x: F.one_hot(x.argmax(-1), 12) * x,
    "dropout_in_eval": lambda x: F.dropout(x, 0.5, training=False) + 1,
    "silu_backward": lambda x: torch.ops.aten.silu_backward(x, x.flip(0)),
    "softmax_backward": lambda x: torch.ops.aten._softmax_backward_data(x, F.softmax(x, -1), -1, x.dtype),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_fuses_and_is_accurate(name: str, dtype: torch.dtype) -> None:
    x = numbers(4, 12).to(dtype)
    gm = check_graph(FUSED[name], x)
    program = lower(gm, Config(), Log(Config()))
    left = [str(op.target) for op in program.ops if isinstance(op, Extern)]
    assert set(left) <= {"aten._assert_async.msg"}, f"{left}\n{gm.graph}"


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "layer_norm", "rms_norm", "group_norm"])
def test_low_precision_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    """No intermediate of these is stored in the low dtype: only inputs and the result are."""
    gm = trace(FUSED[name], numbers(4, 12).to(dtype))
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        if node.op == "call_function" and isinstance(val, torch.Tensor) and val.dtype is dtype:
            source = node.all_input_nodes[0] if node.all_input_nodes else None
            converts = source is not None and source.meta["val"].dtype is not dtype
            assert converts or returns_alias(node.target) or node.target in CONVERSIONS, (
                f"{node.format_node()}"
            )


CONVERSIONS = {torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default}
A, C = torch.randn(4, 12), torch.randn(12, 5)
Q = torch.randn(1, 2, 6, 8)

WHOLE: dict[str, tuple[Fn, str]] = {
    "linear": (lambda: F.linear(A, C.t(), C[0]), "addmm.default"),
    "linear_3d": (lambda: F.linear(A.view(2, 2, 12), C.t(), C[0]), "addmm.default"),
    "matmul": (lambda: A @ C, "mm.default"),
    "bmm": (lambda: torch.bmm(A[None], C[None]), "bmm.default"),
    "baddbmm": (lambda: torch.baddbmm(A[None, :, :5], A[None], C[None], beta=0.5), "baddbmm.default"),
    "attention": (
        lambda: F.scaled_dot_product_attention(Q, Q, Q),
        "_scaled_dot_product_flash_attention_for_cpu.default",
    ),
    "convolution": (lambda: F.conv1d(A[None], torch.randn(3, 4, 2)), "convolution.default"),
    "sort": (lambda: torch.sort(A)[0], "sort.default"),
    "topk": (lambda: torch.topk(A, 2)[0], "topk.default"),
    "cumsum": (lambda: torch.cumsum(A, 1), "cumsum.default"),
    "fft": (lambda: torch.fft.rfft(A).real, "_fft_r2c.default"),
    "gelu": (lambda: F.gelu(A), "gelu.default"),
    "silu": (lambda: F.silu(A), "silu.default"),
    "hardswish": (lambda: F.hardswish(A), "hardswish.default"),
    "index_add": (lambda: torch.index_add(A, 0, LABELS % 4, A), "index_add.default"),
    "embedding": (lambda: F.embedding(LABELS % 4, A), "embedding.default"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_stays_whole(name: str) -> None:
    f, operator = WHOLE[name]
    gm = trace(lambda x: f() + x[0, 0] * 0, numbers(1, 1))
    assert operator in targets(gm), targets(gm)


def test_no_operator_with_a_rule_is_taken_apart() -> None:
    """Its rule would be dead, and one node with one rounding would become a chain of nodes. A norm becomes a
    norm with other arguments."""
    assert [str(k) for k in decompositions() if k in RULES] == ["aten.linalg_vector_norm.default"]


def test_norms_count_dimensions_from_the_front() -> None:
    """torch 2.11 announces a wrong shape for others."""
    gm = trace(lambda x: torch.linalg.vector_norm(x, dim=(-2, 0)), torch.randn(3, 1, 4))
    (norm,) = (n for n in gm.graph.nodes if n.target is torch.ops.aten.linalg_vector_norm.default)
    assert norm.args[2] == [1, 0] and norm.meta["val"].shape == (4,)
