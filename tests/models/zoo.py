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

    def repeated(self, batch: int) -> Sample:
        """A copy whose example inputs stand ``batch`` times one after the other."""
        return Sample(self.name, self.model, _repeat(self.inputs, batch))


def _repeat(value: Any, batch: int) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.cat([value] * batch) if value.ndim else value
    if isinstance(value, dict):
        return {key: _repeat(item, batch) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_repeat(item, batch) for item in value)
    return value


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

Sizes = dict[str, Any]
Inputs = Callable[[Any, bool], dict[str, Any]]


def _model(
    name: str,
    extract: Extract | None,
    config: str,
    model: str,
    inputs: Inputs,
    tiny: Sizes,
    full: Sizes | None = None,
    cache: bool | None = None,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> None:
    """A model of transformers, whose classes are imported when it is built.

    Arguments:
        config, model: the names of the classes.
        inputs: from the configuration, and whether it is the tiny one, to the keyword arguments of a call.
        tiny, full: what the configuration is given; the published sizes are mostly the defaults.
        cache: the configuration's ``use_cache``, where it has one.
    """

    def make(small: bool) -> Made:
        more = {} if cache is None else {"use_cache": cache}
        own: Any = getattr(hf, config)(**more, **(tiny if small else full or {}))
        built = _initialise_norms(getattr(hf, model)(own))
        return wrap(built), inputs(own, small)

    ZOO[name] = Entry(name, make, extract)


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


# ---------------------------------------------------------------------------------------- inputs


def _tokens(vocabulary: int, batch: int, length: int) -> torch.Tensor:
    return torch.randint(5, vocabulary, (batch, length))


def _text(batch: int, length: int, full: int = 128) -> Inputs:
    """Token numbers; the full model gets one row of ``full``."""

    def inputs(config: Any, tiny: bool) -> dict[str, Any]:
        return {"input_ids": _tokens(config.vocab_size, *((batch, length) if tiny else (1, full)))}

    return inputs


def _padded_text(batch: int, length: int) -> Inputs:
    """Token numbers with a mask whose last row ends early, as in a batch of real sentences."""

    def inputs(config: Any, tiny: bool) -> dict[str, Any]:
        rows, columns = (batch, length) if tiny else (1, 128)
        mask = torch.ones(rows, columns, dtype=torch.int64)
        mask[-1, columns - columns // 5 :] = 0
        return {"input_ids": _tokens(config.vocab_size, rows, columns), "attention_mask": mask}

    return inputs


def _image(height: int | None = None, width: int | None = None, full: int = 224) -> Inputs:
    """Two small images or a full one; without a size, of the one that the configuration names."""

    def inputs(config: Any, tiny: bool) -> dict[str, Any]:
        if height is None:
            shape = (config.image_size, config.image_size)
        else:
            shape = (height, width) if tiny else (full, full)
        return {"pixel_values": torch.randn(2 if tiny else 1, 3, *shape)}

    return inputs


def _text_pair(config: Any, tiny: bool) -> dict[str, Any]:
    source = _padded_text(2, 19)(config, tiny)
    return {**source, "decoder_input_ids": _tokens(config.vocab_size, *((2, 13) if tiny else (1, 64)))}


def _spectrogram(config: Any, tiny: bool) -> dict[str, Any]:
    batch, target = (2, 11) if tiny else (1, 32)
    features = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": features, "decoder_input_ids": _tokens(config.vocab_size, batch, target)}


def _sound(_: Any, tiny: bool) -> dict[str, Any]:
    return {"input_values": torch.randn(2, 611) if tiny else torch.randn(1, 16000)}


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

_model(
    "bert", _hidden_and_pooled, "BertConfig", "BertModel", _padded_text(2, 21),
    tiny={
        "vocab_size": 211, "hidden_size": 60, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 148, "max_position_embeddings": 64,
    },
)  # fmt: skip

_model(
    "mobilebert_qa", _span, "MobileBertConfig", "MobileBertForQuestionAnswering", _padded_text(2, 19),
    tiny={
        "vocab_size": 211, "hidden_size": 72, "embedding_size": 36, "num_hidden_layers": 2,
        "num_attention_heads": 3, "intermediate_size": 100, "true_hidden_size": 36,
        "intra_bottleneck_size": 36, "num_feedforward_networks": 2, "max_position_embeddings": 64,
    },
)  # fmt: skip

_model(
    "distilbert", _logits, "DistilBertConfig", "DistilBertForSequenceClassification", _padded_text(2, 23),
    tiny={
        "vocab_size": 211, "dim": 52, "n_layers": 2, "n_heads": 4, "hidden_dim": 116,
        "max_position_embeddings": 64,
    },
)  # fmt: skip

_model(
    "gpt2", _logits, "GPT2Config", "GPT2LMHeadModel", _text(2, 21),
    cache=False,
    tiny={
        "vocab_size": 223, "n_embd": 60, "n_layer": 2, "n_head": 3, "n_positions": 64, "bos_token_id": 1,
        "eos_token_id": 2,
    },
)  # fmt: skip

_LLAMA_TINY: Sizes = {
    "vocab_size": 227, "hidden_size": 56, "intermediate_size": 140, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_LLAMA_FULL: Sizes = {
    "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8,
    "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip

_model(
    "llama", _logits, "LlamaConfig", "LlamaForCausalLM", _text(2, 19), _LLAMA_TINY, _LLAMA_FULL,
    cache=False,
)  # fmt: skip


def _past(config: Any, tiny: bool) -> dict[str, Any]:
    """One token, and the keys and values of those before it."""
    batch, length = (2, 13) if tiny else (1, 128)
    head = config.hidden_size // config.num_attention_heads
    shape = (batch, config.num_key_value_heads, length, head)
    past = [(torch.randn(shape), torch.randn(shape)) for _ in range(config.num_hidden_layers)]
    return {
        "input_ids": _tokens(config.vocab_size, batch, 1),
        "position_ids": torch.full((batch, 1), length, dtype=torch.int64),
        "past": past,
    }


_model(
    "llama_decode", None, "LlamaConfig", "LlamaForCausalLM", _past, _LLAMA_TINY, _LLAMA_FULL,
    cache=True, wrap=DecodeStep,
)  # fmt: skip

_model(
    "qwen3", _logits, "Qwen3Config", "Qwen3ForCausalLM", _text(2, 21),
    cache=False,
    tiny={
        "vocab_size": 229, "hidden_size": 52, "intermediate_size": 124, "num_hidden_layers": 2,
        "head_dim": 20, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    },
    full={
        "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 8,
        "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512,
    },
)  # fmt: skip

_model(
    "mixtral", _logits, "MixtralConfig", "MixtralForCausalLM", _text(1, 11),
    cache=False,
    tiny={
        "vocab_size": 233, "hidden_size": 56, "intermediate_size": 88, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
        "num_experts_per_tok": 2, "max_position_embeddings": 64,
    },
    full={
        "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1280, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 512,
    },
)  # fmt: skip

_model(
    "t5", _hidden, "T5Config", "T5Model", _text_pair,
    cache=False,
    tiny={"vocab_size": 239, "d_model": 44, "d_kv": 12, "d_ff": 100, "num_layers": 2, "num_heads": 3},
)  # fmt: skip

_model(
    "mamba", _logits, "MambaConfig", "MambaForCausalLM", _text(2, 9, full=64),
    cache=False,
    tiny={
        "vocab_size": 241, "hidden_size": 36, "state_size": 7, "num_hidden_layers": 2, "time_step_rank": 5,
    },
    full={"vocab_size": 32000, "hidden_size": 512, "state_size": 16, "num_hidden_layers": 4},
)  # fmt: skip

# ---------------------------------------------------------------------------------------- speech

_model(
    "whisper", _hidden, "WhisperConfig", "WhisperModel", _spectrogram,
    cache=False,
    tiny={
        "vocab_size": 251, "num_mel_bins": 20, "d_model": 52, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 108,
        "decoder_ffn_dim": 108, "max_source_positions": 23, "max_target_positions": 32, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    },
)  # fmt: skip

_model(
    "wav2vec2", _logits, "Wav2Vec2Config", "Wav2Vec2ForCTC", _sound,
    tiny={
        "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 100,
        "conv_dim": (20, 24, 28), "conv_kernel": (10, 3, 2), "conv_stride": (5, 2, 2),
        "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
    },
)  # fmt: skip

# ---------------------------------------------------------------------------------------- vision

_model(
    "vit", _logits, "ViTConfig", "ViTForImageClassification", _image(),
    tiny={
        "image_size": 30, "patch_size": 6, "hidden_size": 52, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 116, "num_labels": 11,
    },
    full={"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "num_labels": 1000},
)  # fmt: skip

_model(
    "swin", _logits, "SwinConfig", "SwinForImageClassification", _image(),
    tiny={
        "image_size": 48, "patch_size": 4, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4],
        "window_size": 3, "num_labels": 11,
    },
    full={"num_labels": 1000},
)  # fmt: skip

_model(
    "convnext", _logits, "ConvNextConfig", "ConvNextForImageClassification", _image(40, 40),
    tiny={
        "num_stages": 2, "hidden_sizes": [20, 36], "depths": [1, 2], "num_labels": 11,
        "layer_scale_init_value": 0.5,
    },
    full={"num_labels": 1000},
)  # fmt: skip

_model(
    "resnet", _logits, "ResNetConfig", "ResNetForImageClassification", _image(45, 45),
    tiny={"embedding_size": 12, "hidden_sizes": [20, 44], "depths": [2, 2], "num_labels": 11},
    full={"num_labels": 1000},
)  # fmt: skip

_model(
    "mobilenet_v2", _logits, "MobileNetV2Config", "MobileNetV2ForImageClassification", _image(),
    tiny={"image_size": 37, "depth_multiplier": 0.35, "num_labels": 11},
    full={"num_labels": 1000},
)  # fmt: skip

_model(
    "segformer", _logits, "SegformerConfig", "SegformerForSemanticSegmentation", _image(48, 40, full=256),
    tiny={
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [4, 2], "hidden_sizes": [20, 36],
        "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
        "decoder_hidden_size": 28, "num_labels": 7,
    },
    full={"num_labels": 150},
)  # fmt: skip
