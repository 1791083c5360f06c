"""Which models can be served, and the sentence for those that cannot.

A model qualifies when every layer is full causal self-attention that goes through transformers' attention interface.
First its configuration is looked at, before any weight is loaded; then one short forward pass shows how it really
calls its attention, since some architectures say one thing and do another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from caudex.engine.attention import LayerProbe, attending
from caudex.engine.loading import UnsupportedModelError

PROBE_LENGTH = 3


def check_config(config: Any, name: str, max_model_len: int | None) -> None:
    """Refuse a model by its transformers configuration alone.

    Raises:
        UnsupportedModelError: says which property rules the model out.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; only decoder-only models can be served")
    if not getattr(config, "is_causal", True):
        raise UnsupportedModelError(f"{name} attends in both directions; only causal models can be served")
    _check_model_class(_causal_model_class(config, name), name)
    text_config = config.get_text_config()
    _check_layer_types(text_config, name)
    _check_sliding_window(text_config, name, max_model_len)
    _check_rotation(text_config, name, max_model_len)


def _causal_model_class(config: Any, name: str) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            f"{name} is a {config.model_type!r} model, which transformers knows no causal language model for"
        )
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _check_model_class(model_class: Any, name: str) -> None:
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{name} ({model_class.__name__}) keeps a recurrent state beside or instead of attention (Mamba and its "
            "kin): there is no KV to share between prompts"
        )
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{name} ({model_class.__name__}) does not let its attention be replaced (no _supports_attention_backend)"
        )


def _check_layer_types(config: Any, name: str) -> None:
    others = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if others:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(sorted(map(str, others)))}; only full attention can be served"
        )


def _check_sliding_window(config: Any, name: str, max_model_len: int | None) -> None:
    """A window that no sequence can outgrow is no window."""
    layer_types = getattr(config, "layer_types", None)
    slides = "sliding_attention" in layer_types if layer_types else getattr(config, "use_sliding_window", True)
    window = getattr(config, "sliding_window", None)
    if slides and window is not None:
        _check_window(window, config, name, max_model_len)


def _check_window(window: int, config: Any, name: str, max_model_len: int | None) -> None:
    if _may_outgrow(window, config, max_model_len):
        raise UnsupportedModelError(
            f"{name} has sliding-window attention over {window} tokens, which forgets what a shared prefix needs; "
            f"only full attention can be served (--max-model-len {window} or less never reaches the window)"
        )


def _check_rotation(config: Any, name: str, max_model_len: int | None) -> None:
    """LongRoPE turns keys by other angles once a sequence is long: what a short one has cached would be wrong for it,
    and transformers decides for a whole batch by its longest sequence."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for rotation in (parameters, *(nested for nested in parameters.values() if isinstance(nested, Mapping))):
        limit = rotation.get("original_max_position_embeddings")
        if rotation.get("rope_type") == "longrope" and limit and _may_outgrow(limit, config, max_model_len):
            raise UnsupportedModelError(
                f"{name} has a rotary embedding ('longrope') that changes for sequences of more than {limit} tokens, "
                f"so long and short ones could not share a prefix; serve it with --max-model-len {limit} or less"
            )


def _may_outgrow(limit: int, config: Any, max_model_len: int | None) -> bool:
    """Whether a sequence may have more than `limit` tokens."""
    longest = max_model_len or getattr(config, "max_position_embeddings", None)
    return longest is None or longest > limit


def probe_model(model: Any, name: str, max_model_len: int | None) -> LayerProbe:
    """Run `model` once on a few tokens and see that every layer attends as a paged backend can.

    Raises:
        UnsupportedModelError: says what the model does that no backend can honour.
    """
    probe = LayerProbe()
    tokens = torch.arange(PROBE_LENGTH, device=model.device)[None] % model.config.get_text_config().vocab_size
    positions = torch.arange(PROBE_LENGTH, device=model.device)[None]
    try:
        with torch.inference_mode(), attending(probe):
            model(input_ids=tokens, position_ids=positions, use_cache=False)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise UnsupportedModelError(
            f"{name} ({type(model).__name__}) cannot compute {PROBE_LENGTH} tokens: {error}; its configuration may not "
            "fit its weights, or its code what is asked of it"
        ) from error
    _check_probe(probe, model.config.get_text_config(), name, max_model_len)
    return probe


def _check_probe(probe: LayerProbe, config: Any, name: str, max_model_len: int | None) -> None:
    num_layers = config.num_hidden_layers
    if sorted(probe.shapes) != list(range(num_layers)) or probe.repeated:
        raise UnsupportedModelError(
            f"{name} calls its attention {len(probe.shapes) + len(probe.repeated)} times for {num_layers} layers: "
            "some layers are not plain self-attention"
        )
    if probe.masked or probe.biased:
        raise UnsupportedModelError(f"{name} adds a mask or a position bias of its own (ALiBi and its kin) to scores")
    if probe.bidirectional:
        raise UnsupportedModelError(f"{name} attends in both directions; only causal models can be served")
    for window in sorted(probe.sliding_windows):
        _check_window(window, config, name, max_model_len)
