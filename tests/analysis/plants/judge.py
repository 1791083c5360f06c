"""Whether a finding names a planted breaker rightly, in whatever form the log came."""

from __future__ import annotations

import re

import numpy as np
from tests.analysis.plants.plant import Plant

from caudex.analysis.results import Analysis, Breaker
from caudex.trace.chain import Int64Array

LEAST_LOSS = 0.005
"""A plant that costs less than this share of all prompt tokens need not be found."""

NEAR_TOKENS = 16
"""Where requests part is known to within a value's own length."""

_VALUES = frozenset(
    {"clock", "request_id", "request_counter", "session_id", "user_name", "tenant_name", "system_prompt_versions",
     "whitespace_drift"}
)  # fmt: skip
_ORDERS = frozenset({"tools_reordered", "tool_keys_reordered", "few_shot_reordered", "passages_reordered"})
_HISTORY = frozenset(
    {"history_truncated", "history_summarized", "history_rewritten", "history_inserted", "reasoning_stripped",
     "output_rewritten", "tool_results_cleared", "whitespace_drift"}
)  # fmt: skip


def kinds_in(plant: Plant, form: str) -> frozenset[str]:
    """The kinds that name a plant rightly where the log has this form. A plain prompt does not say which of its text is
    an example, which a retrieved passage, and which the model's; ids do not say what they stand for, only how they
    change."""
    kinds = plant.kinds
    if form == "messages":
        return kinds
    if kinds & {"few_shot_reordered", "passages_reordered"}:
        kinds |= {"few_shot_reordered", "passages_reordered"}
    if "output_rewritten" in kinds:
        kinds |= {"whitespace_drift"}
    if form == "prompts":
        return kinds
    if kinds & _ORDERS:
        kinds |= {"passages_reordered"}
    if kinds & {"tool_set_changing", "few_shot_changing"}:
        kinds |= {"passages_changing"}
    if kinds & _HISTORY and plant.place.startswith("^(message"):
        kinds |= {"history_rewritten", "history_summarized"}
    return kinds | ({"varying_value", "system_prompt_versions"} if kinds & _VALUES else frozenset())


def faults(plant: Plant, form: str, wanted: float, found: Analysis, parting: Int64Array) -> list[str]:
    """What is wrong with the first finding: its kind, its place or its rate; nothing where all are right. `parting` is
    where the requests of the broken log part from all before them."""
    if not found.breakers:
        return ["nothing found"]
    first = found.breakers[0]
    right = {
        "kind": first.kind in kinds_in(plant, form),
        "place": _is_placed(plant, form, first, parting),
        "rate": abs(first.hit_rate_if_mended - wanted) <= plant.slack,
        "details": plant.details.items() <= first.details.items() or form == "token ids",
        "values": len({example.value for example in first.examples}) == 2 or first.kind == "block_size_too_large",
    }
    return [fault for fault, is_right in right.items() if not is_right]


def _is_placed(plant: Plant, form: str, found: Breaker, parting: Int64Array) -> bool:
    place = found.where
    if (form == "messages" or place.token is None) and not re.search(plant.place, place.description):
        return False
    return place.description in _WITHOUT_OFFSET or (
        place.token is not None and int(np.abs(parting - place.token).min()) <= NEAR_TOKENS
    )


_WITHOUT_OFFSET = frozenset({"cache_salt", "LoRA adapter", "model", "routing", "block size"})
