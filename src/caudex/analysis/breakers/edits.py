"""What a change of something that was sent before is: a cut, a summary, a value, reasoning that is gone, a rewrite."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from caudex.analysis.align import common_end, common_start, differences, is_unread, value_end, value_start, weight
from caudex.analysis.breakers.slots import normal_form
from caudex.analysis.breakers.values import ValueUse, classify, is_random
from caudex.analysis.corpus import text_of
from caudex.trace.request import Message

MAX_VALUE_CHARS = 160
MAX_WORDS_AROUND_A_VALUE = 6
"""What came or went as a whole is a value where it has no more words, and else something that was said."""

MAX_MARK_CHARS = 80
"""What stands for dropped turns without saying what was in them; longer text is a summary."""

MIN_SUMMARY_CHARS = 40
MIN_CHARS_BEHIND_A_CLOCK = 8
"""Text that was cut off from here on has as little in common at its end."""

_MASKS = frozenset("#*xX\u2022\u2588")
"""What stands for each character of something that is kept from view."""

_REASONING = re.compile(r"<(think|thinking|reasoning|reflection)>.*?(</\1>|\Z)(\s*)", re.DOTALL)
_SUMMARY_WORDS = re.compile(
    r"\b(summary|summari[sz]ed|previous(ly)?|earlier|so far|recap|condensed|compacted)\b", re.IGNORECASE
)

_SUMMARY_NOUN = re.compile(r"\bsummar|\brecap\b", re.IGNORECASE)
CLEARED_WORDS = re.compile(r"\b(cleared|omitted|removed|truncated|elided|redacted|compacted)\b", re.IGNORECASE)


def whole_text(message: Message) -> str:
    rest = {key: value for key, value in message.items() if key in {"tool_calls", "reasoning_content"}}
    return text_of(message) + (msgspec.json.encode(rest).decode() if rest else "")


def tells_what_was_said(added: str) -> bool:
    return weight(added) >= MIN_SUMMARY_CHARS and _SUMMARY_WORDS.search(added) is not None


def is_cut_short(before: str, after: str, *, inside: bool) -> bool:
    """Whether `after` is the end of `before`, perhaps behind a mark that says no more than that something is gone
    ("...", "[earlier turns omitted]"). Only with `inside` may the cut be anywhere, not just between turns."""
    kept = common_end(before, after)
    mark = after[: len(after) - kept]
    told = len(mark) <= MAX_MARK_CHARS and CLEARED_WORDS.search(mark) and not _SUMMARY_NOUN.search(mark)
    unsaid = weight(mark) <= MAX_MARK_CHARS and not any(map(str.isalnum, mark))
    return kept < len(before) and bool(told or (inside and kept > 0 and unsaid))


def text_change_kind(before: str, after: str) -> str:
    """What a change inside one long text is: a plain prompt's history has no turns to tell it by."""
    if _REASONING.search(before) and normal_form(strip_reasoning(before)) == normal_form(after):
        return "reasoning_stripped"
    if is_unread(before) and is_unread(after) and _is_short_change(before, after):
        return "varying_value"
    if not after or is_cut_short(before, after, inside=True):
        return "history_truncated"
    if not before:
        return "history_inserted"
    if normal_form(before) == normal_form(after):
        return "whitespace_drift"
    if _same_characters(before, after):
        return "output_rewritten"
    if _SUMMARY_NOUN.search(after) or (_SUMMARY_WORDS.search(after) and not _SUMMARY_WORDS.search(before)):
        return "history_summarized"
    if CLEARED_WORDS.search(after) and len(after) < len(before):
        return "tool_results_cleared"
    shorter = 2 * weight(after) < weight(before) and len(after) < len(before)
    return _value_kind(before, after) or ("history_summarized" if shorter and is_unread(after) else "history_rewritten")


def _is_short_change(before: str, after: str) -> bool:
    """Whether little stands where as little stood."""
    start = common_start(before, after)
    end = min(common_end(before, after), min(len(before), len(after)) - start)
    rests = [weight(text[start : len(text) - end]) for text in (before, after)]
    return max(rests) <= MAX_VALUE_CHARS and max(rests) <= 2 * min(rests)


def strip_reasoning(text: str, blanks: int | None = None) -> str:
    """A text without its reasoning and (at most `blanks` of) the blanks behind it."""
    return _REASONING.sub(lambda found: "" if blanks is None else found[3][blanks:], text)


def _same_characters(before: str, after: str) -> bool:
    """Whether the same stands in another order and with other blanks, as in JSON that is parsed and written anew."""
    return not is_unread(before) and sorted("".join(before.split())) == sorted("".join(after.split()))


def gap_kind(old: list[Message], new: list[Message]) -> str:
    if not new:
        return "history_truncated"
    if not old:
        return "history_inserted"
    if len(new) < len(old) or any(_SUMMARY_WORDS.search(text_of(message)) for message in new):
        return "history_summarized"
    return "history_rewritten"


def edit_kind(old: Message, new: Message) -> str:
    """What an edit of one message is. The text says most; what it cannot say is a rewrite."""
    before, after = whole_text(old), whole_text(new)
    if has_reasoning(old) != has_reasoning(new) and _without_reasoning(old) == _without_reasoning(new):
        return "reasoning_stripped"
    if _same_json(old, new):
        return "output_rewritten"
    if normal_form(before) == normal_form(after):
        return "output_rewritten" if old.get("role") == "assistant" else "whitespace_drift"
    value = _value_kind(before, after)
    if value == "clock" and common_end(before, after) >= MIN_CHARS_BEHIND_A_CLOCK:
        return value
    if old.get("role") == "tool" and (len(after) < len(before) or CLEARED_WORDS.search(after)):
        return "tool_results_cleared"
    if _SUMMARY_WORDS.search(after) and not _SUMMARY_WORDS.search(before):
        return "history_summarized"
    return value or "history_rewritten"


def has_reasoning(message: Message) -> bool:
    return bool(message.get("reasoning_content")) or _REASONING.search(text_of(message)) is not None


def _without_reasoning(message: Message) -> tuple[str, bytes]:
    calls = msgspec.json.encode(message.get("tool_calls") or ())
    return " ".join(strip_reasoning(text_of(message)).split()), calls


def _same_json(old: Message, new: Message) -> bool:
    """Whether two messages have the same calls (arguments compared as JSON, call ids aside) and the same text."""
    if normal_form(text_of(old)) != normal_form(text_of(new)) or not (old.get("tool_calls") and new.get("tool_calls")):
        return False
    return [_call_value(call) for call in old["tool_calls"]] == [_call_value(call) for call in new["tool_calls"]]


def _call_value(call: dict[str, Any]) -> Any:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except msgspec.DecodeError:
            arguments = arguments.strip()
    return function.get("name"), arguments


def _value_kind(before: str, after: str) -> str | None:
    """`clock` or `request_id`, where two texts differ in one short value of that kind, or where only one has it."""
    spans = differences(before, after)
    if not spans or sum(s.a_end - s.a_start + s.b_end - s.b_start for s in spans) > MAX_VALUE_CHARS:
        return None
    start, end_a, start_b, end_b = spans[0].a_start, spans[-1].a_end, spans[0].b_start, spans[-1].b_end
    values = [before[start:end_a], after[start_b:end_b]]
    if all(map(str.strip, values)):
        grow, more = start - value_start(before, start), value_end(before, end_a) - end_a
        start, end_a = start - grow, end_a + more
        values = [before[start:end_a], after[start_b - grow : end_b + more]]
    elif max(len(value.split()) for value in values) > MAX_WORDS_AROUND_A_VALUE:
        return None
    uses = [ValueUse(value, None, None, None) for value in values if value.strip()]
    kind = classify(uses, before[max(0, start - 60) : start], before[end_a : end_a + 20]).kind
    if kind == "request_id" and (not any(is_random({use.value}) for use in uses) or _is_masked(before, after)):
        return None
    return kind if kind in {"clock", "request_id"} else None


def _is_masked(before: str, after: str) -> bool:
    """Whether nothing has changed but that characters are hidden, each by a mask."""
    return len(before) == len(after) and all(b in _MASKS for a, b in zip(before, after, strict=True) if a != b)
