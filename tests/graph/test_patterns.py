"""Hand-written attention: each form that is given to the fused operator, and each near miss that is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tracing import check_graph, compiled, targets

from hotloop.config import Config
from hotloop.dumps import Log
from hotloop.graph import passes, patterns
from judge import assert_as_accurate, reference_of

Attention = Callable[..., Any]
FUSED = "_scaled_dot_product_flash_attention_for_cpu.default"
SCALE = 1 / math.sqrt(8)
LOWEST = torch.finfo(torch.float32).min


@pytest.fixture(autouse=True)
def _always_faster(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Small tensors are enough to see what is recognised; one test is about the sizes."""
    if "rule" not in request.node.name:
        monkeypatch.setattr(patterns, "is_faster_fused", lambda dtype, scores: True)


def heads(dtype: torch.dtype = torch.float32, length: int = 20) -> list[torch.Tensor]:
    """Queries, keys and values, (2, 3, length, 8), as a projection gives them."""
    return [torch.randn(2, length, 3, 8).transpose(1, 2).to(dtype) for _ in range(3)]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return ((q @ k.transpose(-1, -2)) * SCALE).softmax(-1) @ v


def causal(length: int = 20) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


FORMS: dict[str, Attention] = {
    "scale after": plain,
    "divided": lambda q, k, v: ((q @ k.mT) / math.sqrt(8)).softmax(-1) @ v,
    "scale on q": lambda q, k, v: ((q * SCALE) @ k.mT).softmax(-1) @ v,
    "scale on k": lambda q, k, v: (q @ (k * SCALE).mT).softmax(-1) @ v,
    "no scale": lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
    "scale in a tensor": lambda q, k, v: (q @ k.mT / torch.full([], 3.0)).softmax(-1) @ v,
    "merged heads": lambda q, k, v: plain(q, k, v).transpose(1, 2).reshape(2, 20, 24) * 2,
    "bmm": lambda q, k, v: torch.bmm(
        torch.bmm(q.reshape(6, 20, 8), k.reshape(6, 20, 8).mT).softmax(-1), v.reshape(6, 20, 8)
    ),
    "queries in columns": lambda q, k, v: plain(q.mT.contiguous().mT, k, v.mT.contiguous().mT),
    "two masks": lambda q, k, v: (q @ k.mT * SCALE + v[:1, :, :, :1].mT + q[:, :1, :, :1]).softmax(-1) @ v,
    "softmax in float32": lambda q, k, v: (q @ k.mT * SCALE).softmax(-1, dtype=torch.float32).to(q.dtype) @ v,
    "scores in float32": lambda q, k, v: ((q @ k.mT).float() * SCALE).softmax(-1).to(q.dtype) @ v,
}

NEAR_MISSES: dict[str, Attention] = {
    "causal, where": lambda q, k, v: (
        torch.where(causal(), q @ k.mT * SCALE, LOWEST).softmax(-1).to(q.dtype) @ v
    ),
    "causal, masked_fill": lambda q, k, v: (
        (q @ k.mT * SCALE).masked_fill(~causal(), -math.inf).softmax(-1) @ v
    ),
    "bias inside where": lambda q, k, v: (
        torch.where(causal(), q @ k.mT + q[:, :, :, :1], -math.inf).softmax(-1) @ v
    ),
    "softmax over queries": lambda q, k, v: (q @ k.mT * SCALE).softmax(-2) @ v,
    "weights wanted": lambda q, k, v: ((w := (q @ k.mT * SCALE).softmax(-1)) @ v, w),
    "scores wanted": lambda q, k, v: ((s := q @ k.mT * SCALE).softmax(-1) @ v, s),
    "masked scores wanted": lambda q, k, v: ((s := q @ k.mT + q[..., :1]).softmax(-1) @ v, s.sum()),
    "dropout": lambda q, k, v: torch.dropout((q @ k.mT).softmax(-1), 0.5, True).sum() + v,
    "weights changed": lambda q, k, v: ((q @ k.mT).softmax(-1) * 2 + 1) @ v,
    "mask multiplied too": lambda q, k, v: ((q @ k.mT + q[..., :1]) * SCALE).softmax(-1) @ v,
    "scale is a tensor": lambda q, k, v: (q @ k.mT * q[..., :1]).softmax(-1) @ v,
    "a small number hides": lambda q, k, v: torch.where(causal(), q @ k.mT, -5.0).softmax(-1) @ v,
    "soft cap": lambda q, k, v: ((q @ k.mT).tanh() * 30).softmax(-1) @ v,
    "no softmax": lambda q, k, v: ((s := (q @ k.mT).exp()) / s.sum(-1, keepdim=True)) @ v,
    "other head size of values": lambda q, k, v: (q @ k.mT).softmax(-1) @ v[..., :4],
    "sigmoid": lambda q, k, v: (q @ k.mT).sigmoid() @ v,
    "a cast to fewer bits": lambda q, k, v: (q @ k.mT).bfloat16().float().softmax(-1) @ v,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_recognised(form: str, dtype: torch.dtype) -> None:
    assert targets(check_graph(FORMS[form], *heads(dtype))).count(FUSED) == 1


@pytest.mark.parametrize("form", NEAR_MISSES)
def test_a_near_miss_stays(form: str) -> None:
    f, inputs = NEAR_MISSES[form], heads()
    if form == "dropout":
        assert FUSED not in targets(compiled(f, *inputs)[0])  # random
    else:
        assert FUSED not in targets(check_graph(f, *inputs))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_stay_by_rule(dtype: torch.dtype) -> None:
    assert FUSED not in targets(check_graph(plain, *heads(dtype)))


def test_the_rule_of_sizes() -> None:
    assert FUSED not in targets(check_graph(plain, *heads()))
    assert FUSED in targets(check_graph(plain, *heads(length=640)))
    assert FUSED in targets(check_graph(plain, *heads(torch.bfloat16)))


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT * SCALE + mask).softmax(-1) @ v


@pytest.mark.parametrize("length", [5, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_nan_are_those_of_the_hand_written_form(dtype: torch.dtype, length: int) -> None:
    q, k, v = heads(dtype, length)
    mask = torch.zeros(2, 1, length, length, dtype=dtype)
    mask[0, 0, 0] = -math.inf
    mask[0, 0, 1, 1:] = -math.inf
    mask[0, 0, 2, 0] = math.inf
    mask[1, 0, 0, 3] = math.nan
    mask[1, 0, 1] = torch.finfo(dtype).min
    q[1, 1, 3, 2] = -math.inf
    q[1, 2, 4, 2] = math.nan
    assert FUSED in targets(check_graph(masked, q, k, v, mask))
    assert masked(q, k, v, mask)[0, :, 0].isnan().all() and not masked(q, k, v, mask)[1, :, 1].isnan().any()
    assert FUSED in targets(check_graph(plain, q.abs().neg(), k.abs(), v))


def test_scores_that_where_hides_may_be_anything() -> None:
    q, k, v = heads()
    k[:, :, -1] = math.nan  # only the last query sees it
    gm = check_graph(NEAR_MISSES["causal, masked_fill"], q, k, v)
    assert (
        FUSED not in targets(gm) and not NEAR_MISSES["causal, masked_fill"](q, k, v)[:, :, :-1].isnan().any()
    )


@pytest.mark.parametrize(
    "shape", [(20, 20), (20,), (1, 1, 20, 20), (2, 1, 1, 20), (3, 20, 20), (2, 3, 20, 20)]
)
def test_masks_of_all_shapes(shape: tuple[int, ...]) -> None:
    assert FUSED in targets(check_graph(masked, *heads(), torch.randn(shape)))


def test_a_mask_of_one_column_stays() -> None:
    assert FUSED not in targets(check_graph(masked, *heads(), torch.randn(2, 1, 20, 1)))


def test_a_mask_that_is_finite_by_its_making_is_not_looked_at() -> None:
    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return masked(q, k, v, torch.where(keep, 0.0, LOWEST))

    keep = torch.rand(2, 1, 20, 20) > 0.5
    keep[0, 0, 3] = False  # every key hidden: an even mean of the values
    found = targets(check_graph(f, *heads(), keep))
    assert FUSED in found and "amax.default" not in found


def test_no_copy_of_what_the_operator_takes_as_it_lies() -> None:
    found = targets(check_graph(FORMS["merged heads"], *heads()))
    assert FUSED in found and "clone.default" not in found


def test_low_precision_stays_where_every_rounding_is_kept() -> None:
    config = Config(precision="eager")
    for dtype, fused in ((torch.bfloat16, False), (torch.float32, True)):
        gm = compiled(plain, *heads(dtype), clean=False)[0]
        assert (FUSED in targets(passes.run(gm, config, Log(config)))) is fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["merged heads", "two masks", "bmm"])
def test_compiled(form: str, dtype: torch.dtype) -> None:
    inputs = heads(dtype)
    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(FORMS[form], backend="hotloop", fullgraph=True)(*inputs)
    assert_as_accurate(result, FORMS[form](*inputs), reference_of(FORMS[form], *inputs), check_stride=True)


def test_dynamic_sizes() -> None:
    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out = masked(q, k, v, mask)
        return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1)

    torch._dynamo.reset()
    run = torch.compile(f, backend="hotloop", fullgraph=True, dynamic=True)
    for length in (20, 33, 64):
        inputs = (*heads(torch.bfloat16, length), torch.randn(2, 1, length, length).bfloat16())
        with torch.no_grad():
            assert_as_accurate(run(*inputs), f(*inputs), reference_of(f, *inputs), check_stride=True)


@pytest.mark.parametrize("form", ["scale after", "merged heads", "two masks"])
def test_training(form: str) -> None:
    def run(f: Attention) -> list[torch.Tensor]:
        inputs = [x.clone().requires_grad_() for x in given]
        out = f(*inputs)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    given = heads()
    torch._dynamo.reset()
    result = run(torch.compile(FORMS[form], backend="hotloop", fullgraph=True))
    torch.testing.assert_close(result, run(FORMS[form]))
