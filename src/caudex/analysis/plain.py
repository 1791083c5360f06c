"""An analysis as plain data: the report's JSON, version 1. Its fields are documented in docs/analyze.md."""

from __future__ import annotations

import math
from dataclasses import asdict, is_dataclass
from typing import Any

from caudex.analysis.results import REPORT_VERSION, Analysis
from caudex.analysis.tables import Table


def to_plain(analysis: Analysis) -> dict[str, Any]:
    """Plain dicts, lists, strings and finite numbers (None for what is not known)."""
    return {
        "version": REPORT_VERSION,
        "requests": analysis.requests,
        "prompt_tokens": analysis.prompt_tokens,
        "output_tokens": analysis.output_tokens,
        "block_size": analysis.block_size,
        "infinite_hit_rate": analysis.infinite_hit_rate,
        "curve": _plain(analysis.curve),
        "breakers": _plain(analysis.breakers),
        **{name: _plain(getattr(analysis, name)) for name in _FURTHER_FIELDS},
    }


_FURTHER_FIELDS = (
    "breakers_searched", "mended", "read", "kind", "tokenizer", "template", "seconds", "repetition", "groups",
    "lru_knots", "capacities", "block_sizes", "tiers", "routing", "templates", "prefixes",
    "reuse_over_time", "kv", "gpu", "decision",
)  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, Table):
        return [_plain(row) for row in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {key: _plain(item) for key, item in asdict(value).items()}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.item() if hasattr(value, "item") else value
