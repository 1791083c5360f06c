"""Recovers the templates behind the prompts of a log, and what a better order of their parts would give."""

from __future__ import annotations

from collections import Counter

from caudex.analysis.breakers.sites import Site, sites_of, texts_at
from caudex.analysis.breakers.slots import CONTEXT_CHARS, move_slots
from caudex.analysis.breakers.values import ValueKind, ValueUse, classify
from caudex.analysis.family import Family, recover_families
from caudex.analysis.replay import replay
from caudex.analysis.results import RecoveredTemplate, TemplateSlot
from caudex.trace.encode import PromptEncoder
from caudex.trace.request import Request

MAX_TEMPLATES = 6
MIN_REQUESTS = 3
MIN_FIXED_CHARS = 400
"""Openings of conversations that share less are people's own words, not a program's template."""

SHOWN_PART_CHARS = 400


def recover_templates(requests: list[Request], encoder: PromptEncoder, block_size: int) -> list[RecoveredTemplate]:
    """The templates of the operator's texts and of conversations' openings, the most used first. Those of texts that do
    not vary are no news and are left out."""
    found: list[tuple[Site, Family, int]] = []
    for site in sites_of(requests):
        texts = texts_at(site, requests)
        if len(set(texts.values())) < 2:
            continue
        for family in recover_families(Counter(texts.values())):
            used = sum(family.members.values())
            fixed = family.template.fixed_chars
            if used >= MIN_REQUESTS and (site.is_operators or fixed >= MIN_FIXED_CHARS):
                found.append((site, family, used))
    found.sort(key=lambda item: -item[2])
    return [
        _recovered(site, family, used, requests, encoder, block_size) for site, family, used in found[:MAX_TEMPLATES]
    ]


def _recovered(
    site: Site, family: Family, used: int, requests: list[Request], encoder: PromptEncoder, block_size: int
) -> RecoveredTemplate:
    template = family.template
    columns = list(zip(*(template.values(text) or () for text in family.members), strict=True))
    slots = tuple(
        TemplateSlot(
            template.slot_start(number), len(set(column)), tuple(dict.fromkeys(value[:80] for value in column))[:3]
        )
        for number, column in enumerate(columns)
    )
    varying = [number for number, slot in enumerate(slots) if slot.distinct_values > 1]
    rewrite = move_slots(site, family, varying, _kind_of(site, family, varying, requests))
    return RecoveredTemplate(
        where=site.description,
        requests=used,
        variants=len(family.members),
        fixed_parts=tuple(_shortened(part) for part in template.literals),
        slots=slots,
        suggested_order=_suggested_order(template.literals, varying, slots),
        hit_rate_if_reordered=replay(rewrite(requests), encoder, block_size).hit_rate,
    )


def _kind_of(site: Site, family: Family, slots: list[int], requests: list[Request]) -> ValueKind:
    uses = []
    for request in requests:
        text = site.text(request)
        values = None if text is None else family.template.values(text)
        if values is not None:
            joined = " ".join(values[slot] for slot in slots)
            uses.append(ValueUse(joined, request.session, request.tenant, request.timestamp))
    return ValueKind("varying_value", classify(uses, "").per_session)


def _shortened(part: str) -> str:
    if len(part) <= SHOWN_PART_CHARS:
        return part
    return f"{part[: SHOWN_PART_CHARS // 2]} … ({len(part):,} characters) … {part[-SHOWN_PART_CHARS // 2 :]}"


def _suggested_order(literals: tuple[str, ...], varying: list[int], slots: tuple[TemplateSlot, ...]) -> str:
    fixed = sum(map(len, literals))
    names = ", ".join(
        f"slot {n + 1} ({' '.join(literals[n][-CONTEXT_CHARS:].split()[-4:]) or 'at the start'})" for n in varying
    )
    return f"all fixed text ({fixed:,} characters) first, then {names or 'nothing: no slot varies'}"
