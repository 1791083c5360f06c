"""Decoders of the Llama family, run by one native call a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caudex import _core
from caudex.engine.adapter import Adapter, LoraWeights
from caudex.engine.cpu.batch import BatchMetadata
from caudex.engine.cpu.kv_pool import DTYPE_NAMES, KvPool
from caudex.engine.cpu.linear import QuantizedBits

MODEL_TYPES: Final = frozenset({"llama", "mistral", "qwen2", "qwen3"})
STATIC_ROPE_TYPES: Final = frozenset({"default", "linear", "llama3", "yarn"})

_LINEARS: Final = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_NORMS: Final = {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}
_HEAD_NORMS: Final = {"query": "self_attn.q_norm", "key": "self_attn.k_norm"}
_NO_ADAPTERS: Final = np.array([], dtype=np.int32)
_EMBEDDING, _HEAD, _FINAL_NORM = "model.embed_tokens", "lm_head", "model.norm"


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


def head_size(config: Any) -> int:
    """The size of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _in_layer(index: int, name: str) -> str:
    return f"model.layers.{index}.{name}"


def linear_shapes(config: Any) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the linear layers inside a model's decoder layers, by their names."""
    hidden, width, head = config.hidden_size, config.intermediate_size, head_size(config)
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    shapes = {
        "query": (queries, hidden),
        "key": (keys, hidden),
        "value": (keys, hidden),
        "output": (hidden, queries),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    layers = range(config.num_hidden_layers)
    return {_in_layer(index, _LINEARS[role]): shape for index in layers for role, shape in shapes.items()}


def weight_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """The weights that `LlamaRunner` takes from a checkpoint, by name, with their shapes; biases are beside them."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, hidden), _FINAL_NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, hidden)
    norms = dict.fromkeys(_NORMS.values(), (hidden,))
    if config.model_type == "qwen3":
        norms |= dict.fromkeys(_HEAD_NORMS.values(), (head_size(config),))
    for index in range(config.num_hidden_layers):
        shapes |= {_in_layer(index, name): shape for name, shape in norms.items()}
    shapes |= linear_shapes(config)
    return {f"{name}.weight": shape for name, shape in shapes.items()}


class LlamaRunner:
    """A Llama, Mistral, Qwen2 or Qwen3 model: token ids to logits in one native call a step.

    Weights are copied into packed form one after the other, so that `weights` can be freed afterwards. Activations are
    rounded to the pool's type where they enter a product or attention; the residual stream, norms, rotations and logits
    are float32. A token's logits depend, to the bit, on the tokens before it and the sequence's adapter alone: not on
    the batch, the chunking, the cache or the threads. Another path over the same weights (transformers') rounds
    differently: do not mix them in one cache.

    Args:
        config: the model's transformers configuration.
        weights: its tensors by transformers' names, of any floating type, on the CPU; see `weight_shapes`.
        pool: its keys and values; also gives the threads and the instruction set.
        max_model_len: positions to prepare for, 4 x head_dim bytes each.
        bits: of a quantized weight of a layer, see `PackedLinear`. With 4 the head is quantized too, to 8.

    Raises:
        ValueError: the model is none this can run (the message says why), a weight is missing or has another shape than
            the configuration says, or the pool has other sizes.
    """

    def __init__(
        self,
        config: Any,
        weights: Mapping[str, Tensor],
        pool: KvPool,
        max_model_len: int,
        *,
        bits: QuantizedBits | None = None,
    ) -> None:
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
            tied_embedding=config.tie_word_embeddings,
            norm_epsilon=config.rms_norm_eps,
            attention_scale=pool.head_dim**-0.5,
            dtype=DTYPE_NAMES[pool.dtype],
        )
        self._num_layers, self._linear_shapes = config.num_hidden_layers, linear_shapes(config)
        self._weights, self._shapes = weights, weight_shapes(config)
        with torch.no_grad():
            self._take_weights(config, bits)
            self._take_rotation(config, max_model_len)
        del self._weights, self._shapes

    @property
    def num_bytes(self) -> int:
        """What the packed weights take, adapters' included."""
        return self.native.num_bytes

    def add_adapter(self, adapter: Adapter) -> int:
        """Take an adapter's matrices, rounded to the pool's type; returns the number that sequences choose it by.

        Raises:
            UnsupportedModelError: it was made for another model.
        """
        adapter.check(self._linear_shapes.get)
        number = self.native.add_adapter()
        for index in range(self._num_layers):
            matrices = {
                role: self._rounded(adapter.layers[layer])
                for role, name in _LINEARS.items()
                if (layer := _in_layer(index, name)) in adapter.layers
            }
            pairs = [
                (role, weights.down.shape[0], weights.down.data_ptr(), weights.up.data_ptr(), weights.scale)
                for role, weights in matrices.items()
            ]
            self.native.set_adapter_layer(number, index, pairs)
        return number

    def _rounded(self, weights: LoraWeights) -> LoraWeights:
        dtype = self.pool.dtype
        return LoraWeights(weights.down.to(dtype).contiguous(), weights.up.to(dtype).contiguous(), weights.scale)

    def forward(
        self,
        token_ids: NDArray[np.int32],
        batch: BatchMetadata,
        logit_rows: NDArray[np.int32],
        adapters: NDArray[np.int32] = _NO_ADAPTERS,
    ) -> torch.Tensor:
        """Compute one step: writes every row's keys and values to the pool and returns the logits asked for.

        Args:
            token_ids: [rows] int32.
            batch: made by the pool for this step.
            logit_rows: int32 rows whose logits are wanted, in any order; may be empty (a chunk before the last).
            adapters: [sequences] int32 numbers that `add_adapter` gave, -1 for none; or empty, for none at all.

        Returns:
            [logit_rows, vocabulary] float32.

        Raises:
            ValueError: a token, an adapter, a position or a row is out of range; nothing has been written.
        """
        logits = torch.empty(len(logit_rows), self.vocab_size)
        self.native.forward(token_ids, batch.native, batch.plan, adapters, logit_rows, logits.data_ptr())
        return logits

    def _take_weights(self, config: Any, bits: QuantizedBits | None) -> None:
        if not config.tie_word_embeddings:
            self._take_linear("embedding", 0, _EMBEDDING)
        self._take_linear("head", 0, _EMBEDDING if config.tie_word_embeddings else _HEAD)
        self._finish(-1, 8 if bits == 4 else None)
        self._take_norm("final", 0, _FINAL_NORM)
        head_norms = _HEAD_NORMS if config.model_type == "qwen3" else {}
        for index in range(config.num_hidden_layers):
            for role, name in _LINEARS.items():
                self._take_linear(role, index, _in_layer(index, name))
            for role, name in {**_NORMS, **head_norms}.items():
                self._take_norm(role, index, _in_layer(index, name))
            self._finish(index, bits)

    def _finish(self, layer: int, bits: QuantizedBits | None) -> None:
        """Give a layer's weights, or the head's (-1), the form they are multiplied in."""
        if bits is None:
            self.native.encode(layer)
        else:
            self.native.quantize(layer, bits)

    def _take_linear(self, role: str, layer: int, name: str) -> None:
        weight = self._weight(name).to(self.pool.dtype).contiguous()
        bias = self._weights[f"{name}.bias"].float().contiguous() if f"{name}.bias" in self._weights else None
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"{name}.bias has shape {tuple(bias.shape)}; expected {tuple(weight.shape[:1])}")
        self.native.set_linear(role, layer, weight.data_ptr(), 0 if bias is None else bias.data_ptr())

    def _take_norm(self, role: str, layer: int, name: str) -> None:
        weight = self._weight(name).float().contiguous()
        self.native.set_norm(role, layer, weight.data_ptr())

    def _weight(self, name: str) -> Tensor:
        """A weight that is sure to be as large as the configuration says: what comes next reads raw memory."""
        name, expected = f"{name}.weight", self._shapes[f"{name}.weight"]
        if name not in self._weights:
            raise ValueError(f"the checkpoint has no {name}")
        weight = self._weights[name]
        if weight.shape != expected or not weight.is_floating_point():
            raise ValueError(f"{name} is {weight.dtype} of shape {tuple(weight.shape)}; expected {expected}")
        return weight

    def _take_rotation(self, config: Any, max_model_len: int) -> None:
        frequencies, scaling = _rotation(config)
        angles = torch.arange(max_model_len).float()[:, None] * frequencies
        cos, sin = angles.cos() * scaling, angles.sin() * scaling
        self.native.set_rotation(cos.data_ptr(), sin.data_ptr())


def _rotation(config: Any) -> tuple[Tensor, float]:
    """Radians a position of each pair of dimensions, and what cosines and sines are multiplied with."""
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type == "default":
        exponents = torch.arange(0, head_size(config), 2).float() / head_size(config)
        return 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](config)
    return frequencies.float(), float(scaling)
