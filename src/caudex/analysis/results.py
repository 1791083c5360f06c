"""What an analysis found, typed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from caudex.analysis.breakers.candidate import Example, Place
from caudex.analysis.curves import BlockSizeRow, CapacityRow, CurveRow, TierRow
from caudex.analysis.decision import Decision
from caudex.analysis.mended import Mended
from caudex.analysis.repetition import GroupRow, Repetition
from caudex.analysis.replicas import RoutingRow
from caudex.analysis.tables import Table
from caudex.sizing.kv_size import KvSize

REPORT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Breaker:
    """Something in the requests that keeps equal prefixes from matching, and what mending it would bring.

    `hit_rate_if_mended` is this one mended alone, `hit_rate_if_all_mended` with all costlier ones mended too; both are
    infinite-cache rates of the replayed, mended log. `tokens_lost` in `requests` requests is what mending it saves:
    alone or on top of all others, whichever is more. `rule` is a rewrite that is safe to apply to traffic, or None.
    """

    kind: str
    title: str
    where: Place
    examples: tuple[Example, ...]
    requests: int
    tokens_lost: int
    hit_rate_if_mended: float
    hit_rate_if_all_mended: float
    mend: str
    rule: dict[str, Any] | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TemplateSlot:
    """A place in a recovered template where prompts differ."""

    char: int
    distinct_values: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecoveredTemplate:
    """The prompt behind a family of prompts. `hit_rate_if_reordered` puts all slots behind the fixed parts."""

    where: str
    requests: int
    variants: int
    fixed_parts: tuple[str, ...]
    slots: tuple[TemplateSlot, ...]
    suggested_order: str
    hit_rate_if_reordered: float


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A node of the tree of heaviest shared prefixes; `text` is what the run says (or its ids), cut short."""

    start_token: int
    end_token: int
    requests: int
    tokens_saved: int
    text: str
    children: tuple[SharedPrefix, ...]


@dataclass(frozen=True, slots=True)
class ReadSummary:
    """How reading went. `warnings` are counts by message; `bad_examples` the first (line, reason); `bad_files` the
    files of a folder that could not be read, each counted as a bad line: (name, reason)."""

    source: str
    format: str
    lines: int
    bad_lines: int
    other_lines: int
    bad_examples: tuple[tuple[int, str], ...]
    bad_files: tuple[tuple[str, str], ...]
    warnings: dict[str, int]


@dataclass(frozen=True, slots=True)
class Analysis:
    """Everything `caudex analyze` found. Rates are shares of prompt tokens, 0 to 1."""

    read: ReadSummary
    kind: str
    tokenizer: str | None
    template: str | None
    block_size: int
    requests: int
    prompt_tokens: int
    output_tokens: int | None
    seconds: float | None
    """From the first request to the last, where the log has times."""
    repetition: Repetition
    groups: Table[GroupRow]
    curve: Table[CurveRow]
    lru_knots: tuple[tuple[int, float], ...]
    """The exact LRU curve, thinned for plotting: (capacity in blocks, hit rate)."""
    capacities: Table[CapacityRow]
    block_sizes: Table[BlockSizeRow]
    tiers: Table[TierRow]
    routing: Table[RoutingRow] | None
    breakers: tuple[Breaker, ...]
    breakers_searched: str
    """Over what breakers were looked for, in words; says why not, where they were not."""
    mended: Mended | None
    templates: tuple[RecoveredTemplate, ...]
    prefixes: tuple[SharedPrefix, ...]
    reuse_over_time: tuple[tuple[float, float, float], ...]
    """(seconds from the start, prompt tokens, share served) in up to 60 windows."""
    kv: KvSize | None
    gpu: str | None
    decision: Decision

    @property
    def infinite_hit_rate(self) -> float:
        """Share of prompt tokens that an infinite cache of whole blocks would serve."""
        return self.repetition.hit_rate

    @property
    def is_clean(self) -> bool:
        return not self.breakers

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data; the same that `--json` writes."""
        from caudex.analysis.plain import to_plain

        return to_plain(self)

    def _repr_markdown_(self) -> str:
        lines = [f"**{self.decision.headline}**", "", "| | |", "|---|---|"]
        lines += [f"| requests | {self.requests:,} |", f"| prompt tokens | {self.prompt_tokens:,} |"]
        lines += [f"| infinite cache | {self.infinite_hit_rate:.1%} |"]
        lines += [f"| breaker: {b.title} | {b.hit_rate_if_mended:.1%} if mended |" for b in self.breakers]
        return "\n".join(lines)
