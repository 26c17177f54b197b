"""Real architectures from ``transformers``, built from their configurations with random weights.

What comes in: a name and a size. What goes out: a :class:`Sample`, a module in ``eval`` mode with example
inputs, whose call returns a tuple of tensors and nothing else, so that tests and benchmarks need to know
nothing about any model.

What holds: nothing is downloaded; the same name and size give the same weights and inputs each time; a
"tiny" model has two layers with odd sizes (tails for every vector width) and runs in well under a second;
a "full" one has its published size, or, for large language models, the published proportions at a few
hundred megabytes.

Next: ``tests/models/test_models.py`` for correctness, ``benchmarks/models.py`` for speed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers as hf
from torch import nn

Size = Literal["tiny", "full"]
Extract = Callable[[Any], tuple[torch.Tensor, ...]]
Made = tuple[nn.Module, dict[str, Any]]


class TensorOutputs(nn.Module):
    """A model whose outputs are cut down to a tuple of tensors."""

    def __init__(self, model: nn.Module, extract: Extract) -> None:
        super().__init__()
        self.model = model
        self.extract = extract

    def forward(self, **inputs: Any) -> tuple[torch.Tensor, ...]:
        """The extracted outputs of ``model(**inputs)``."""
        return self.extract(self.model(**inputs))


class DecodeStep(nn.Module):
    """One token through a causal language model, given the keys and values of the tokens before it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        past: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, ...]:
        """Logits (batch, 1, vocabulary), then the keys and values of every layer, one token longer."""
        cache: Any = hf.DynamicCache()
        for layer, (keys, values) in enumerate(past):
            cache.update(keys, values, layer)
        result = self.model(
            input_ids=input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True
        )
        grown = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        return (result.logits, *grown)


@dataclass(frozen=True)
class Sample:
    """A model in ``eval`` mode, and the keyword arguments of an example call."""

    name: str
    model: nn.Module
    inputs: dict[str, Any]

    def __call__(self) -> tuple[torch.Tensor, ...]:
        """Runs the model on its example inputs."""
        result: tuple[torch.Tensor, ...] = self.model(**self.inputs)
        return result

    def to(self, dtype: torch.dtype) -> Sample:
        """A copy whose floating-point parameters, buffers and inputs have ``dtype``."""
        return Sample(self.name, copy.deepcopy(self.model).to(dtype), _cast(self.inputs, dtype))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype.is_floating_point else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    return value


@dataclass(frozen=True)
class Entry:
    """A named model: how to make it, its example inputs, and the tensors among its outputs."""

    name: str
    make: Callable[[bool], Made]
    extract: Extract | None

    def build(self, size: Size = "tiny") -> Sample:
        """The model with seeded random weights, and seeded inputs. Leaves the global generator as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(20240229)
            model, inputs = self.make(size == "tiny")
        if self.extract is not None:
            model = TensorOutputs(model, self.extract)
        return Sample(self.name, model.eval().requires_grad_(False), inputs)


ZOO: dict[str, Entry] = {}


def _entry(name: str, extract: Extract | None) -> Callable[..., Callable[[bool], Made]]:
    def register(
        make: Callable[[bool], Made],
    ) -> Callable[[bool], Made]:
        ZOO[name] = Entry(name, make, extract)
        return make

    return register


def build(name: str, size: Size = "tiny") -> Sample:
    """Builds the model called ``name``; a :class:`KeyError` lists the known names."""
    if name not in ZOO:
        raise KeyError(f"no model called {name!r}; there are {', '.join(ZOO)}")
    return ZOO[name].build(size)


def names() -> Iterable[str]:
    """The names of all models, in the order of definition."""
    return tuple(ZOO)


def _logits(result: Any) -> tuple[torch.Tensor, ...]:
    return (result.logits,)


def _hidden(result: Any) -> tuple[torch.Tensor, ...]:
    return (result.last_hidden_state,)


def _hidden_and_pooled(result: Any) -> tuple[torch.Tensor, ...]:
    return (result.last_hidden_state, result.pooler_output)


def _span(result: Any) -> tuple[torch.Tensor, ...]:
    return (result.start_logits, result.end_logits)


def _tokens(vocabulary: int, batch: int, length: int) -> torch.Tensor:
    return torch.randint(5, vocabulary, (batch, length))


def _padded_text(vocabulary: int, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Token numbers with a mask whose last row ends early, as in a batch of real sentences."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, length - length // 5 :] = 0
    return {"input_ids": _tokens(vocabulary, batch, length), "attention_mask": mask}


def _initialise_norms(model: nn.Module) -> nn.Module:
    """Gives the norms' weights, biases and running statistics, all ones or zeros at first, some spread."""
    for module in model.modules():
        kind = type(module).__name__
        if "Norm" not in kind:
            continue
        for label, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if not tensor.is_floating_point():
                continue
            spread = torch.rand_like(tensor) * 0.4 - 0.2
            with torch.no_grad():
                tensor.copy_(spread if label in ("bias", "running_mean") else 1.0 + spread)
    return model


# ---------------------------------------------------------------------------------------- text


@_entry("bert", _hidden_and_pooled)
def _bert(tiny: bool) -> Made:
    sizes: dict[str, Any] = (
        {
            "vocab_size": 211,
            "hidden_size": 60,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 148,
            "max_position_embeddings": 64,
        }
        if tiny
        else {}
    )
    config: Any = hf.BertConfig(**sizes)
    model = _initialise_norms(hf.BertModel(config))
    return model, _padded_text(config.vocab_size, 2, 21) if tiny else _padded_text(config.vocab_size, 1, 128)


@_entry("mobilebert_qa", _span)
def _mobilebert(tiny: bool) -> Made:
    sizes: dict[str, Any] = (
        {
            "vocab_size": 211,
            "hidden_size": 72,
            "embedding_size": 36,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "intermediate_size": 100,
            "true_hidden_size": 36,
            "intra_bottleneck_size": 36,
            "num_feedforward_networks": 2,
            "max_position_embeddings": 64,
        }
        if tiny
        else {}
    )
    config: Any = hf.MobileBertConfig(**sizes)
    model = _initialise_norms(hf.MobileBertForQuestionAnswering(config))
    return model, _padded_text(config.vocab_size, 2, 19) if tiny else _padded_text(config.vocab_size, 1, 128)


@_entry("distilbert", _logits)
def _distilbert(tiny: bool) -> Made:
    sizes: dict[str, Any] = (
        {
            "vocab_size": 211,
            "dim": 52,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 116,
            "max_position_embeddings": 64,
        }
        if tiny
        else {}
    )
    config: Any = hf.DistilBertConfig(**sizes)
    model = _initialise_norms(hf.DistilBertForSequenceClassification(config))
    return model, _padded_text(config.vocab_size, 2, 23) if tiny else _padded_text(config.vocab_size, 1, 128)


@_entry("gpt2", _logits)
def _gpt2(tiny: bool) -> Made:
    sizes: dict[str, Any] = (
        {
            "vocab_size": 223,
            "n_embd": 60,
            "n_layer": 2,
            "n_head": 3,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        if tiny
        else {}
    )
    config: Any = hf.GPT2Config(use_cache=False, **sizes)
    model = _initialise_norms(hf.GPT2LMHeadModel(config))
    return model, {"input_ids": _tokens(config.vocab_size, *((2, 21) if tiny else (1, 128)))}


def _llama_model(tiny: bool, use_cache: bool) -> tuple[Any, Any]:
    sizes: dict[str, Any] = (
        {
            "vocab_size": 227,
            "hidden_size": 56,
            "intermediate_size": 140,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        }
        if tiny
        else {
            "vocab_size": 32000,
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 8,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "max_position_embeddings": 512,
        }
    )
    config: Any = hf.LlamaConfig(use_cache=use_cache, **sizes)
    return _initialise_norms(hf.LlamaForCausalLM(config)), config


@_entry("llama", _logits)
def _llama(tiny: bool) -> Made:
    model, config = _llama_model(tiny, use_cache=False)
    return model, {"input_ids": _tokens(config.vocab_size, *((2, 19) if tiny else (1, 128)))}


@_entry("llama_decode", None)
def _llama_decode(tiny: bool) -> Made:
    model, config = _llama_model(tiny, use_cache=True)
    batch, length = (2, 13) if tiny else (1, 128)
    head = config.hidden_size // config.num_attention_heads
    shape = (batch, config.num_key_value_heads, length, head)
    past = [(torch.randn(shape), torch.randn(shape)) for _ in range(config.num_hidden_layers)]
    inputs = {
        "input_ids": _tokens(config.vocab_size, batch, 1),
        "position_ids": torch.full((batch, 1), length, dtype=torch.int64),
        "past": past,
    }
    return DecodeStep(model), inputs


@_entry("qwen3", _logits)
def _qwen3(tiny: bool) -> Made:
    sizes: dict[str, Any] = (
        {
            "vocab_size": 229,
            "hidden_size": 52,
            "intermediate_size": 124,
            "num_hidden_layers": 2,
            "head_dim": 20,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        }
        if tiny
        else {
            "vocab_size": 32000,
            "hidden_size": 768,
            "intermediate_size": 2304,
            "num_hidden_layers": 8,
            "head_dim": 128,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 512,
        }
    )
    config: Any = hf.Qwen3Config(use_cache=False, **sizes)
    model = _initialise_norms(hf.Qwen3ForCausalLM(config))
    return model, {"input_ids": _tokens(config.vocab_size, *((2, 21) if tiny else (1, 128)))}


@_entry("mixtral", _logits)
def _mixtral(tiny: bool) -> Made:
    sizes: dict[str, Any] = (
        {
            "vocab_size": 233,
            "hidden_size": 56,
            "intermediate_size": 88,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 64,
        }
        if tiny
        else {
            "vocab_size": 32000,
            "hidden_size": 512,
            "intermediate_size": 1280,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 512,
        }
    )
    config: Any = hf.MixtralConfig(use_cache=False, **sizes)
    model = _initialise_norms(hf.MixtralForCausalLM(config))
    return model, {"input_ids": _tokens(config.vocab_size, *((1, 11) if tiny else (1, 128)))}


@_entry("t5", _hidden)
def _t5(tiny: bool) -> Made:
    sizes: dict[str, Any] = (
        {"vocab_size": 239, "d_model": 44, "d_kv": 12, "d_ff": 100, "num_layers": 2, "num_heads": 3}
        if tiny
        else {}
    )
    config: Any = hf.T5Config(use_cache=False, **sizes)
    model = _initialise_norms(hf.T5Model(config))
    batch, source, target = (2, 19, 13) if tiny else (1, 128, 64)
    inputs: dict[str, Any] = _padded_text(config.vocab_size, batch, source)
    return model, {**inputs, "decoder_input_ids": _tokens(config.vocab_size, batch, target)}


@_entry("mamba", _logits)
def _mamba(tiny: bool) -> Made:
    sizes: dict[str, Any] = (
        {"vocab_size": 241, "hidden_size": 36, "state_size": 7, "num_hidden_layers": 2, "time_step_rank": 5}
        if tiny
        else {"vocab_size": 32000, "hidden_size": 512, "state_size": 16, "num_hidden_layers": 4}
    )
    config: Any = hf.MambaConfig(use_cache=False, **sizes)
    model = _initialise_norms(hf.MambaForCausalLM(config))
    return model, {"input_ids": _tokens(config.vocab_size, *((2, 9) if tiny else (1, 64)))}


# ---------------------------------------------------------------------------------------- speech


@_entry("whisper", _hidden)
def _whisper(tiny: bool) -> Made:
    sizes: dict[str, Any] = (
        {
            "vocab_size": 251,
            "num_mel_bins": 20,
            "d_model": 52,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 108,
            "decoder_ffn_dim": 108,
            "max_source_positions": 23,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        }
        if tiny
        else {}
    )
    config: Any = hf.WhisperConfig(use_cache=False, **sizes)
    model = _initialise_norms(hf.WhisperModel(config))
    batch, target = (2, 11) if tiny else (1, 32)
    features = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)
    return model, {"input_features": features, "decoder_input_ids": _tokens(config.vocab_size, batch, target)}


@_entry("wav2vec2", _logits)
def _wav2vec2(tiny: bool) -> Made:
    sizes: dict[str, Any] = (
        {
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 100,
            "conv_dim": (20, 24, 28),
            "conv_kernel": (10, 3, 2),
            "conv_stride": (5, 2, 2),
            "num_feat_extract_layers": 3,
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 4,
        }
        if tiny
        else {}
    )
    config: Any = hf.Wav2Vec2Config(**sizes)
    model = _initialise_norms(hf.Wav2Vec2ForCTC(config))
    return model, {"input_values": torch.randn(2, 611) if tiny else torch.randn(1, 16000)}


# ---------------------------------------------------------------------------------------- vision


@_entry("vit", _logits)
def _vit(tiny: bool) -> Made:
    sizes: dict[str, Any] = (
        {
            "image_size": 30,
            "patch_size": 6,
            "hidden_size": 52,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 116,
            "num_labels": 11,
        }
        if tiny
        else {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "num_labels": 1000}
    )
    config: Any = hf.ViTConfig(**sizes)
    model = _initialise_norms(hf.ViTForImageClassification(config))
    return model, {"pixel_values": torch.randn(2 if tiny else 1, 3, config.image_size, config.image_size)}


@_entry("swin", _logits)
def _swin(tiny: bool) -> Made:
    sizes: dict[str, Any] = (
        {
            "image_size": 48,
            "patch_size": 4,
            "embed_dim": 24,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 3,
            "num_labels": 11,
        }
        if tiny
        else {"num_labels": 1000}
    )
    config: Any = hf.SwinConfig(**sizes)
    model = _initialise_norms(hf.SwinForImageClassification(config))
    return model, {"pixel_values": torch.randn(2 if tiny else 1, 3, config.image_size, config.image_size)}


@_entry("convnext", _logits)
def _convnext(tiny: bool) -> Made:
    sizes: dict[str, Any] = (
        {
            "num_stages": 2,
            "hidden_sizes": [20, 36],
            "depths": [1, 2],
            "num_labels": 11,
            "layer_scale_init_value": 0.5,
        }
        if tiny
        else {"num_labels": 1000}
    )
    model = _initialise_norms(hf.ConvNextForImageClassification(hf.ConvNextConfig(**sizes)))
    return model, {"pixel_values": torch.randn(2, 3, 40, 40) if tiny else torch.randn(1, 3, 224, 224)}


@_entry("resnet", _logits)
def _resnet(tiny: bool) -> Made:
    sizes: dict[str, Any] = (
        {"embedding_size": 12, "hidden_sizes": [20, 44], "depths": [2, 2], "num_labels": 11}
        if tiny
        else {"num_labels": 1000}
    )
    model = _initialise_norms(hf.ResNetForImageClassification(hf.ResNetConfig(**sizes)))
    return model, {"pixel_values": torch.randn(2, 3, 45, 45) if tiny else torch.randn(1, 3, 224, 224)}


@_entry("mobilenet_v2", _logits)
def _mobilenet_v2(tiny: bool) -> Made:
    sizes: dict[str, Any] = (
        {"image_size": 37, "depth_multiplier": 0.35, "num_labels": 11} if tiny else {"num_labels": 1000}
    )
    config: Any = hf.MobileNetV2Config(**sizes)
    model = _initialise_norms(hf.MobileNetV2ForImageClassification(config))
    return model, {"pixel_values": torch.randn(2 if tiny else 1, 3, config.image_size, config.image_size)}


@_entry("segformer", _logits)
def _segformer(tiny: bool) -> Made:
    sizes: dict[str, Any] = (
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [4, 2],
            "hidden_sizes": [20, 36],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 28,
            "num_labels": 7,
        }
        if tiny
        else {"num_labels": 150}
    )
    model = _initialise_norms(hf.SegformerForSemanticSegmentation(hf.SegformerConfig(**sizes)))
    return model, {"pixel_values": torch.randn(2, 3, 48, 40) if tiny else torch.randn(1, 3, 256, 256)}
