"""The same parts in another order, other forms of the same text, and other versions of it."""

from __future__ import annotations

import copy
import json
import random
import unicodedata
from collections.abc import Callable
from typing import Any, TypeAlias

from tests.analysis.plants.plant import Body, Mutator, in_head, in_message, plant, session_of

_TOPICS = ("refunds", "delays", "upgrades", "luggage", "vouchers", "infants", "visas", "seats", "pets", "meals")
_SHOTS = [
    f"Q: Somebody writes about {t} and is angry. What now?\nA: Say sorry, look up the rule on {t}, offer two ways out."
    for t in _TOPICS
]
_DOCUMENTS = [
    f"Article on {t}. " + " ".join(f"Paragraph {n} of the {t} code sets out duty {n * 7 % 13}." for n in range(14))
    for t in _TOPICS
]
_RULES = [f"- When {t} come up, check the {t} table before you promise anything at all." for t in _TOPICS]


def _shuffled(items: list[str], seed: str, count: int | None = None) -> list[str]:
    return random.Random(seed).sample(items, count or len(items))


def _tools(change: Callable[[list[Any], int], list[Any]]) -> Mutator:
    return lambda log: [{**body, "tools": change(copy.deepcopy(body["tools"]), n)} for n, body in enumerate(log)]


def _shuffle(items: list[Any], number: int) -> list[Any]:
    return random.Random(number).sample(items, len(items))


def _swap_two(items: list[Any], number: int) -> list[Any]:
    if number % 2:
        items[1], items[2] = items[2], items[1]
    return items


def _other_keys(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict):
        return {key: _other_keys(value[key], rng) for key in rng.sample(list(value), len(value))}
    return [_other_keys(item, rng) for item in value] if isinstance(value, list) else value


def _keys_of_one(items: list[Any], number: int) -> list[Any]:
    items[1] = _other_keys(items[1], random.Random(number))
    return items


def _some(items: list[Any], number: int) -> list[Any]:
    rng = random.Random(number)
    return [tool for tool in items if rng.random() < 0.75] or items[:1]


def _none(items: list[Any], number: int) -> list[Any]:
    """A third of the requests have no tools at all."""
    return [] if random.Random(number).random() < 0.33 else items


def _blanks_behind(items: list[Any], number: int) -> list[Any]:
    for tool in items:
        tool["function"]["description"] += " " * (number % 3)
    return items


def _release(items: list[Any], number: int) -> list[Any]:
    for tool in items:
        tool["function"]["description"] = (
            f"(v{1 + random.Random(number).randrange(3)}) {tool['function']['description']}"
        )
    return items


def _plugin(items: list[Any], number: int) -> list[Any]:
    """Half the requests have one more tool, in front of the others."""
    function = {"name": "attach_file", "description": "Attach a file to the answer.", "parameters": {"type": "object"}}
    return [{"type": "function", "function": function}, *items] if random.Random(number).random() < 0.5 else items


def _in_system(text_of: Callable[[int, Body, str], str]) -> Mutator:
    return lambda log: [
        in_head(body, lambda text, n=n, body=body: text_of(n, body, text))  # type: ignore[misc]
        for n, body in enumerate(log)
    ]


Seed: TypeAlias = Callable[[int, Body], str]
"""What the order of a request's passages follows from: its number, its session, or nothing."""


def _fixed(_: int, __: Body) -> str:
    return "one order"


def _shots(seed: Seed, *, in_front: bool = True) -> Mutator:
    def with_shots(number: int, body: Body, text: str) -> str:
        shots = "\n\n".join(_shuffled(_SHOTS, seed(number, body)))
        return f"{shots}\n\n{text}" if in_front else f"{text}\n\n{shots}"

    return _in_system(with_shots)


def _rules(seed: Seed) -> Mutator:
    return _in_system(lambda n, body, text: "Rules:\n" + "\n".join(_shuffled(_RULES, seed(n, body))) + f"\n\n{text}")


def _opening(text_of: Callable[[int, Body], str]) -> Mutator:
    """Puts a text of the conversation's own before its first user message, the same in all its requests."""
    return lambda log: [
        in_message(body, 1, lambda text, n=n, body=body: f"{text_of(n, body)}\n\nQuestion: {text}")  # type: ignore[misc]
        for n, body in enumerate(log)
    ]


def _retrieved(seed: Seed) -> Mutator:
    return _opening(lambda n, body: "\n\n".join(_shuffled(_DOCUMENTS, seed(n, body))))


def _xml(seed: Seed) -> Mutator:
    def documents(number: int, body: Body) -> str:
        found = _shuffled(_DOCUMENTS, seed(number, body))
        return "<documents>\n" + "\n".join(f"<document>\n{text}\n</document>" for text in found) + "\n</documents>"

    return _opening(documents)


def _example_turns(seed: Seed) -> Mutator:
    def mutate(log: list[Body]) -> list[Body]:
        mutated = []
        for number, body in enumerate(log):
            turns: list[Body] = []
            for text in _shuffled(_DOCUMENTS, seed(number, body)):
                turns += [{"role": "user", "content": f"Sum up: {text}"}, {"role": "assistant", "content": text[:70]}]
            mutated.append({**body, "messages": [body["messages"][0], *turns, *body["messages"][1:]]})
        return mutated

    return mutate


_FORMS: dict[str, list[Callable[[str], str]]] = {
    "double_spaces": [str, lambda t: t.replace(". ", ".  ").replace(", ", ",  ")],
    "trailing_newline": [str, lambda t: t + "\n", lambda t: t + "\n\n"],
    "crlf": [str, lambda t: t.replace("\n", "\r\n")],
    "tabs": [str, lambda t: t.replace(" ", "\t", 40)],
    "indented": [str, lambda t: "\n".join("    " + line for line in t.split("\n"))],
    "unicode_forms": [
        lambda t: unicodedata.normalize("NFC", "Café rules: " + t),
        lambda t: unicodedata.normalize("NFD", "Café rules: " + t),
    ],
    "byte_order_mark": [str, lambda t: "\ufeff" + t],
    "zero_width_space": [str, lambda t: t.replace(" ", " \u200b", 1)],
    "json_indent": [lambda t, n=n: json.dumps(_CONFIG, indent=n) + "\n" + t for n in (None, 2, 4)],  # type: ignore[misc]
    "json_separators": [
        lambda t, s=s: json.dumps(_CONFIG, separators=s) + "\n" + t  # type: ignore[misc]
        for s in ((",", ":"), (", ", ": "))
    ],
    "html_escaped": [lambda t: f'Say "please" & smile. {t}', lambda t: f"Say &quot;please&quot; &amp; smile. {t}"],
    "smart_quotes": [
        lambda t: 'Say "please" and don\'t shout. ' + t,
        lambda t: "Say “please” and don’t shout. " + t,
    ],
}


_CONFIG = {"locale": "en", "features": {"upsell": False, "refunds": True}, "limits": {"bags": 2}, "desk": "EU-2"}


def _sections_shuffled(seed: Seed) -> Mutator:
    """Sections under headings, which the text is given first."""

    def with_sections(number: int, body: Body, text: str) -> str:
        sections = [f"## {topic.title()}\n\n{'Ask first. ' * 3}\n\n- {rule[2:]}"
                    for topic, rule in zip(_TOPICS, _RULES, strict=True)]  # fmt: skip
        return "\n\n".join(_shuffled(sections, seed(number, body))) + f"\n\n# Task\n\n{text}"

    return _in_system(with_sections)


def _drift(form: str) -> Mutator:
    return _in_system(lambda n, _, text: random.Random(n).choice(_FORMS[form])(text))


def _version(text: str, version: int) -> str:
    tone = ("Be brief and exact.", "Be warm, and explain each step in plain words.", "Always offer two choices.")
    return f"Style guide {('north', 'south', 'west')[version]}: {tone[version]}\n{text}"


def _middle_version(text: str, version: int) -> str:
    half = text.find("\n", len(text) // 2) + 1
    return text[:half] + _version(text[half:], version)


_TOOL = r"^(tools|declaration of tool)"
_SYSTEM = r"^(system message|prompt)"

ORDER = [
    plant("tools_shuffled", "tools_reordered", _TOOL, _tools(_shuffle), "tools"),
    plant("two_tools_swapped", "tools_reordered", r"^tools\[1\]", _tools(_swap_two), "tools"),
    plant("tool_keys_shuffled", "tool_keys_reordered", _TOOL,
          _tools(lambda items, n: [_other_keys(tool, random.Random(n)) for tool in items]), "tools"),
    plant("keys_of_one_tool", "tool_keys_reordered", r"^declaration of tool", _tools(_keys_of_one), "tools"),
    plant("tools_chosen", "tool_set_changing", _TOOL, _tools(_some), "tools", 0.02),
    plant("tools_left_out", "tool_set_changing", r"^tools", _tools(_none), "tools turns"),
    plant("tools_of_three_releases", "system_prompt_versions", _TOOL, _tools(_release), "tools"),
    plant("blanks_behind_descriptions", "whitespace_drift", r"^declaration of tool", _tools(_blanks_behind), "tools"),
    plant("plugin_in_front", "tool_set_changing", _TOOL, _tools(_plugin), "tools"),
    plant("shots_in_system", "few_shot_reordered", _SYSTEM, _shots(lambda n, _: str(n)), "", clean=_shots(_fixed)),
    plant("shots_behind_system", "few_shot_reordered", _SYSTEM, _shots(lambda n, _: str(n), in_front=False), "messages",
          clean=_shots(_fixed, in_front=False)),
    plant("shots_by_session", "few_shot_reordered", _SYSTEM, _shots(lambda _, b: session_of(b)), "messages sessions",
          clean=_shots(_fixed)),
    plant("sections_shuffled", "few_shot_reordered", _SYSTEM, _sections_shuffled(lambda n, _: str(n)), "messages",
          clean=_sections_shuffled(_fixed)),
    plant("rules_shuffled", "few_shot_reordered", _SYSTEM, _rules(lambda n, _: str(n)), "", clean=_rules(_fixed)),
    plant("retrieved_shuffled", "passages_reordered", r"^user message", _retrieved(lambda _, b: session_of(b)),
          "messages sessions", clean=_retrieved(_fixed)),
    plant("xml_documents_shuffled", "passages_reordered", r"^user message", _xml(lambda _, b: session_of(b)),
          "messages sessions", clean=_xml(_fixed)),
    plant("example_turns_shuffled", "few_shot_reordered", r"^message 1", _example_turns(lambda _, b: session_of(b)),
          "messages sessions", clean=_example_turns(_fixed)),
    *(plant(form, "whitespace_drift", _SYSTEM, _drift(form), "") for form in _FORMS if form != "trailing_newline"),
    plant("trailing_newline", "whitespace_drift", _SYSTEM, _drift("trailing_newline"), "messages"),
    plant("ab_test_by_session", "system_prompt_versions", _SYSTEM,
          _in_system(lambda _, body, text: _version(text, random.Random(session_of(body)).randrange(2))),
          "messages sessions", 0.02),
    plant("ab_test_by_request", "system_prompt_versions", _SYSTEM,
          _in_system(lambda n, _, text: _version(text, random.Random(n).randrange(3))), "messages"),
    plant("word_of_a_rule", "system_prompt_versions", _SYSTEM,
          _in_system(lambda n, _, text: f"{random.Random(n).choice(('Always', 'Never'))} greet the user.\n{text}"),
          "messages sessions"),
    plant("versions_in_the_middle", "system_prompt_versions", _SYSTEM,
          _in_system(lambda n, _, text: _middle_version(text, random.Random(n).randrange(2))), "messages"),
]  # fmt: skip
