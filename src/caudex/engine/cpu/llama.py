"""Decoders of the Llama family, run by one native call a step."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from caudex import _core
from caudex.engine.cpu.batch import BatchMetadata
from caudex.engine.cpu.kv_pool import DTYPE_NAMES, KvPool

MODEL_TYPES: Final = frozenset({"llama", "mistral", "qwen2", "qwen3"})
STATIC_ROPE_TYPES: Final = frozenset({"default", "linear", "llama3", "yarn"})


def why_unsupported(config: Any, max_model_len: int) -> str | None:
    """Why `LlamaRunner` cannot run a model of this transformers configuration, or None if it can."""
    if config.model_type not in MODEL_TYPES:
        return f"model type {config.model_type!r} is none of {', '.join(sorted(MODEL_TYPES))}"
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act!r}, not 'silu'"
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and window < max_model_len:
        return f"its attention has a sliding window of {window} tokens"
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type not in STATIC_ROPE_TYPES:
        return f"its rotary embedding, {rope_type!r}, changes with the length"
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return "it rotates part of each head only"
    return None


class LlamaRunner:
    """A Llama, Mistral, Qwen2 or Qwen3 model: token ids to logits in one native call a step.

    Weights are copied from the model into packed form, so `model` can be freed afterwards. Activations are rounded to
    the pool's type where they enter a product or attention; the residual stream, norms, rotations and logits are
    float32. A token's logits depend, to the bit, on the tokens before it alone: not on the batch, the chunking, the
    cache or the threads. Another path over the same weights (transformers') rounds differently: do not mix them in
    one cache.

    Args:
        model: a transformers causal language model in float32 or bfloat16 on the CPU.
        pool: its keys and values; also gives the threads and the instruction set.
        max_model_len: positions to prepare for, 4 x head_dim bytes each.

    Raises:
        ValueError: the model is none this can run (the message says why), or the pool has other sizes.
    """

    def __init__(self, model: nn.Module, pool: KvPool, max_model_len: int) -> None:
        config: Any = model.config
        reason = why_unsupported(config, max_model_len)
        if reason is not None:
            raise ValueError(f"the fused runner cannot run this model: {reason}")
        self.pool = pool
        self.vocab_size: int = config.vocab_size
        self.native = _core.LlamaModel(
            pool.native,
            pool.threads.native,
            pool.isa,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_query_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=pool.head_dim,
            vocab_size=config.vocab_size,
            max_positions=max_model_len,
            normed_heads=config.model_type == "qwen3",
            tied_embedding=is_tied(model),
            norm_epsilon=config.rms_norm_eps,
            attention_scale=pool.head_dim**-0.5,
            dtype=DTYPE_NAMES[pool.dtype],
        )
        with torch.no_grad():
            self._take_weights(model)
            self._take_rotation(model, max_model_len)

    @property
    def num_bytes(self) -> int:
        """What the packed weights take."""
        return self.native.num_bytes

    def forward(
        self, token_ids: NDArray[np.int32], batch: BatchMetadata, logit_rows: NDArray[np.int32]
    ) -> torch.Tensor:
        """Compute one step: writes every row's keys and values to the pool and returns the logits asked for.

        Args:
            token_ids: [rows] int32.
            batch: made by the pool for this step.
            logit_rows: int32 rows whose logits are wanted, in any order; may be empty (a chunk before the last).

        Returns:
            [logit_rows, vocabulary] float32.

        Raises:
            ValueError: a token, a position or a row is out of range; nothing has been written.
        """
        logits = torch.empty(len(logit_rows), self.vocab_size)
        self.native.forward(token_ids, batch.native, batch.plan, logit_rows, logits.data_ptr())
        return logits

    def _take_weights(self, model: Any) -> None:
        decoder = model.model
        self._take_linear("embedding", 0, decoder.embed_tokens.weight, None)
        self._take_linear("head", 0, model.lm_head.weight, model.lm_head.bias)
        self.native.encode(-1)
        self._take_norm("final", 0, decoder.norm)
        for index, layer in enumerate(decoder.layers):
            attention, mlp = layer.self_attn, layer.mlp
            linears = {
                "query": attention.q_proj,
                "key": attention.k_proj,
                "value": attention.v_proj,
                "output": attention.o_proj,
                "gate": mlp.gate_proj,
                "up": mlp.up_proj,
                "down": mlp.down_proj,
            }
            for role, linear in linears.items():
                self._take_linear(role, index, linear.weight, linear.bias)
            self._take_norm("attention", index, layer.input_layernorm)
            self._take_norm("mlp", index, layer.post_attention_layernorm)
            if hasattr(attention, "q_norm"):
                self._take_norm("query", index, attention.q_norm)
                self._take_norm("key", index, attention.k_norm)
            self.native.encode(index)

    def _take_linear(self, role: str, layer: int, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        weight = weight.to(self.pool.dtype).contiguous()
        wide_bias = None if bias is None else bias.float().contiguous()
        self.native.set_linear(role, layer, weight.data_ptr(), 0 if wide_bias is None else wide_bias.data_ptr())

    def _take_norm(self, role: str, layer: int, norm: Any) -> None:
        weight = norm.weight.float().contiguous()
        self.native.set_norm(role, layer, weight.data_ptr())

    def _take_rotation(self, model: Any, max_model_len: int) -> None:
        positions = torch.arange(max_model_len)[None]
        cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=torch.float32), positions)
        half = self.pool.head_dim // 2
        cos, sin = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
        self.native.set_rotation(cos.data_ptr(), sin.data_ptr())


def is_tied(model: Any) -> bool:
    """Whether the embedding and the head are one weight."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return bool(embedding.data_ptr() == head.data_ptr())
