"""A template that strips reasoning from earlier turns is found, though the messages themselves only grow."""

from __future__ import annotations

from caudex.analysis.breakers import find_breakers
from caudex.analysis.corpus import Corpus
from caudex.trace.encode import PromptEncoder
from caudex.trace.render import RequestRenderer, TemplateRenderer
from caudex.trace.request import Request
from caudex.trace.tokenizer import BytesTokenizer

KEEPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPS = KEEPS.replace(
    "{{ m.content }}",
    "{% if '</think>' in m.content and not loop.index >= messages | length - 1 %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}",
)


def conversation(session: int, num_turns: int) -> list[Request]:
    messages = [{"role": "system", "content": "You are helpful. " * 20}]
    requests = []
    for turn in range(num_turns):
        messages = [*messages, {"role": "user", "content": f"Question {turn} of {session}: " + "why? " * 20}]
        requests.append(Request(line=0, session=str(session), messages=list(messages)))
        thought = f"<think>{session} wonders about {turn}. " + "Hm. " * 60 + "</think>"
        messages = [*messages, {"role": "assistant", "content": f"{thought}Answer {turn}. " + "So. " * 30}]
    return requests


def findings(template: str) -> list[str]:
    corpus = Corpus()
    for session in range(4):
        for request in conversation(session, 6):
            corpus.add(request)
    renderer = RequestRenderer(TemplateRenderer(template, {}, "a template"))
    found, _ = find_breakers(corpus.requests, PromptEncoder(BytesTokenizer(), renderer), 16)
    return [finding.candidate.kind for finding in found]


def test_a_template_that_strips_is_named() -> None:
    assert findings(STRIPS) == ["reasoning_stripped"]


def test_a_template_that_keeps_is_clean() -> None:
    assert findings(KEEPS) == []
