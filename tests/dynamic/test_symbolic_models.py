"""Whole models whose batch and length vary: one compiled graph a direction, whatever the sizes.

What comes in: architectures from ``transformers`` with random weights, and a small convolutional net. What
goes out: nothing. What holds: outputs and gradients are as accurate as eager's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from counting import counted
from torch import nn

from judge import assert_as_accurate, float64_reference

#: Batch and length; hidden sizes and vocabularies are other numbers.
SIZES = ((3, 7), (2, 5), (5, 16), (7, 33), (4, 17), (2, 2), (11, 31))
SMALL = {"vocab_size": 99, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}


def bert() -> nn.Module:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.BertModel(hf.BertConfig(**SMALL, intermediate_size=70, max_position_embeddings=64, **off))


def gpt2() -> nn.Module:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=99, n_embd=40, n_layer=2, n_head=4, n_positions=64, use_cache=False, **off)
    )


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            **SMALL, num_key_value_heads=2, intermediate_size=70, max_position_embeddings=64, use_cache=False
        )
    )


TEXT: dict[str, Callable[[], nn.Module]] = {"bert": bert, "gpt2": gpt2, "llama": llama}


def run(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    out = model(input_ids=ids)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


@pytest.mark.parametrize("name", TEXT)
def test_inference(name: str) -> None:
    model = TEXT[name]().eval()
    double = copy.deepcopy(model).double()
    with counted() as found, torch.no_grad():
        g = torch.compile(run, backend="hotloop", dynamic=True)
        for batch, length in SIZES:
            ids = torch.randint(0, 99, (batch, length))
            assert_as_accurate(g(model, ids), run(model, ids), lambda ids=ids: _in_double(double, ids))
    assert (found.symbolic, found.static, found.refused) == (1, 0, [])


def _in_double(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with float64_reference():
        return run(model, ids)


def gradients(f: Callable[..., torch.Tensor], model: nn.Module, *args: Any) -> list[torch.Tensor]:
    model.zero_grad()
    f(model, *args).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", TEXT)
def test_training(name: str) -> None:
    model = TEXT[name]()
    double = copy.deepcopy(model).double()
    with counted() as found:
        g = torch.compile(run, backend="hotloop", dynamic=True)
        for batch, length in SIZES[:5]:
            ids = torch.randint(0, 99, (batch, length))
            want = [t.clone() for t in gradients(run, model, ids)]

            def reference(ids: torch.Tensor = ids) -> list[torch.Tensor]:
                with float64_reference():
                    return gradients(run, double, ids)

            assert_as_accurate(gradients(g, model, ids), want, reference)
    assert (found.symbolic, found.static, found.refused) == (2, 0, [])


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 12, 3, stride=2)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm(self.first(x)))
        y = F.max_pool2d(F.gelu(self.second(y)), 2)
        return self.head(y.mean((2, 3)))


def image(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)  # type: ignore[no-any-return]


def test_images_of_any_size_in_batches_of_any_size() -> None:
    model = Images()
    double = copy.deepcopy(model).double()
    with counted() as found:
        g = torch.compile(image, backend="hotloop", dynamic=True)
        for batch, height, width in ((4, 22, 30), (7, 25, 31), (2, 40, 23), (15, 21, 64)):
            x = torch.randn(batch, 3, height, width)
            want = [t.clone() for t in gradients(image, model, x)]
            assert_as_accurate(gradients(g, model, x), want, lambda x=x: gradients(image, double, x.double()))
    assert (found.symbolic, found.static, found.refused) == (2, 0, [])
