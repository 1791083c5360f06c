"""Loading a model with transformers so that it can be served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any

import torch

from caudex.engine.attention import ATTENTION_NAME, AttentionOptions, LayerShape, register_attention
from caudex.engine.config import DTypeName, EngineConfig
from caudex.engine.loading import Checkpoint, Progress
from caudex.engine.support import check_config, probe_model
from caudex.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A supported model, its tokenizer, and what its layers ask of attention."""

    name: str
    model: Any
    tokenizer: Tokenizer
    layers: Sequence[LayerShape]
    options: Sequence[AttentionOptions]
    eos_token_ids: frozenset[int]

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def position_limit(self) -> int | None:
        """The longest sequence the model has positions for, if it says so."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return None if limit is None else int(limit)

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token(self.dtype) for layer in self.layers)


def load_model(checkpoint: Checkpoint, config: EngineConfig, progress: Progress) -> LoadedModel:
    """Load weights and tokenizer and see that the model can be served.

    Raises:
        UnsupportedModelError: it cannot; the message says why.
        ValueError: the weights are damaged, or cannot be loaded without running code that they bring.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    register_attention()
    name = config.served_model_name or checkpoint.name
    progress("Loading the tokenizer", 0, 3)
    hf_config = AutoConfig.from_pretrained(checkpoint.directory)
    check_config(hf_config, name, config.max_model_len)
    tokenizer = Tokenizer.load(checkpoint.directory, config.chat_template)
    progress("Loading the weights", 1, 3)
    dtype = choose_dtype(config.dtype, hf_config)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint.directory, dtype=dtype, attn_implementation=ATTENTION_NAME
        ).eval()
    except SafetensorError as error:
        raise ValueError(
            f"the weights in {checkpoint.directory} are damaged ({error}): fetch them again, or delete that folder if "
            "Caudex converted it, and it is made anew"
        ) from error
    except UnpicklingError as error:
        raise ValueError(
            f"the weights in {checkpoint.directory} are pickled and would run code if loaded, or are damaged: get them "
            "as safetensors, or convert them where you trust them (save_pretrained does)"
        ) from error
    progress("Checking the model", 2, 3)
    probe = probe_model(model, name, config.max_model_len)
    progress("Checking the model", 3, 3)
    return LoadedModel(
        name,
        model,
        tokenizer,
        probe.layers(),
        [probe.options[index] for index in sorted(probe.options)],
        _eos_token_ids(model, tokenizer),
    )


def choose_dtype(name: DTypeName, hf_config: Any) -> torch.dtype:
    """The dtype named, or for `auto` the checkpoint's own; float16 is slow on CPUs, so bfloat16 stands in for it."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    return torch.bfloat16 if hf_config.dtype in (torch.bfloat16, torch.float16) else torch.float32


def _eos_token_ids(model: Any, tokenizer: Tokenizer) -> frozenset[int]:
    """All tokens that end a text, by the generation config and by the tokenizer."""
    named = getattr(model.generation_config, "eos_token_id", None)
    ids = named if isinstance(named, list) else [named]
    return frozenset(int(token) for token in (*ids, tokenizer.eos_token_id) if token is not None)
