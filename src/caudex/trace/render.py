"""Messages to the prompt text that an engine would tokenise."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import msgspec

from caudex.trace.errors import TraceError
from caudex.trace.request import Message, Request, Tool

CHATML_MARKERS = ("<|im_start|>", "<|im_end|>")


class Renderer(Protocol):
    """Turns a chat request into prompt text. `description` says whose template it is, for the report."""

    description: str

    def render(self, request: Request) -> str: ...


class ChatMLRenderer:
    """ChatML with tools in the system turn and Hermes-style calls: what most open models do, near enough.

    Stands in where the model's own template is unknown or cannot express what the log holds (tools, calls without
    content). It changes absolute token counts by a little and keeps the order of parts: system, tools, then turns.
    """

    description = "ChatML with tools after the system prompt"

    def render(self, request: Request) -> str:
        messages = request.messages or []
        parts: list[str] = []
        system = ""
        if messages and messages[0].get("role") == "system":
            system, messages = messages[0].get("content") or "", messages[1:]
        if system or request.tools:
            parts.append(f"<|im_start|>system\n{system}{self._tools_section(request.tools)}<|im_end|>\n")
        parts += [f"<|im_start|>{m.get('role', 'user')}\n{self._body(m)}<|im_end|>\n" for m in messages]
        parts.append("<|im_start|>assistant\n")
        return "".join(parts)

    def _tools_section(self, tools: list[Tool] | None) -> str:
        if not tools:
            return ""
        lines = "\n".join(msgspec.json.encode(tool).decode() for tool in tools)
        usage = "Call one as <tool_call>JSON</tool_call>."
        return f"\n\n# Tools\n\nFunctions you may call:\n<tools>\n{lines}\n</tools>\n{usage}"

    def _body(self, message: Message) -> str:
        text = message.get("content") or ""
        if reasoning := message.get("reasoning_content"):
            text = f"<think>\n{reasoning}\n</think>\n\n{text}"
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            arguments = _as_json(function.get("arguments"))
            text += f'\n<tool_call>\n{{"name": "{function.get("name")}", "arguments": {arguments}}}\n</tool_call>'
        return text if message.get("role") != "tool" else f"<tool_response>\n{text}\n</tool_response>"


def _as_json(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


class TemplateRenderer:
    """A model's own Jinja chat template, run as transformers and vLLM run it.

    Tool-call arguments are given as objects, contents as strings, and `strftime_now` tells the request's own time, so
    that a template that prints the date does so in the replay as it did in the log.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], description: str) -> None:
        self.description = description
        self.supports_tools = "tools" in source
        self._special_tokens = special_tokens
        self._now = datetime(2000, 1, 1, tzinfo=UTC)
        self._template = _environment(lambda pattern: self._now.strftime(pattern)).from_string(source)

    def render(self, request: Request) -> str:
        """The prompt text. Raises TraceError where the template refuses the messages."""
        if request.timestamp is not None:
            self._now = datetime.fromtimestamp(request.timestamp, tz=UTC)
        try:
            text = self._template.render(
                messages=[_for_template(message) for message in request.messages or ()],
                tools=request.tools or None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
            return str(text)
        except Exception as error:
            raise TraceError(f"the chat template refuses line {request.line}: {error}") from None


def _environment(strftime_now: Callable[[str], str]) -> Any:
    try:
        import jinja2
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise TraceError("chat templates need jinja2: pip install 'caudex[analyze]'") from None

    class GenerationTag(Extension):
        """`{% generation %}` marks assistant text for training; for a prompt it is transparent."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: object) -> str:
    import json

    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _for_template(message: Message) -> Message:
    shaped = {**message, "content": message.get("content") or ""}
    if message.get("tool_calls"):
        shaped["tool_calls"] = [_call_for_template(call) for call in message["tool_calls"]]
    return shaped


def _call_for_template(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except msgspec.DecodeError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


class RequestRenderer:
    """The prompt text of every kind of request: the model's template where there is one, ChatML where it cannot serve.

    `assumed` counts the requests that were rendered by the stand-in, so that the report can say so.
    """

    def __init__(self, template: TemplateRenderer | None = None) -> None:
        self.template = template
        self.stand_in = ChatMLRenderer()
        self.assumed = 0
        self.rendered = 0

    @property
    def description(self) -> str:
        if self.template is None:
            return f"{self.stand_in.description}, assumed: the model's own is not known"
        if self.assumed:
            share = "all" if self.assumed == self.rendered else f"{self.assumed:,} of {self.rendered:,}"
            reason = f"{self.template.description} has no place for tools"
            return f"{self.stand_in.description}, assumed for {share} requests: {reason}"
        return self.template.description

    def render(self, request: Request) -> str:
        if request.messages is None:
            return request.text or ""
        self.rendered += 1
        if self.template is not None and (self.template.supports_tools or not request.tools):
            return self.template.render(request)
        self.assumed += 1
        return self.stand_in.render(request)


def load_template(folder: Path, chat_template: str | Path | None = None) -> TemplateRenderer | None:
    """The chat template of a tokenizer's folder, or the one in the file `chat_template`; None where there is none."""
    config = _read_json(folder / "tokenizer_config.json")
    special = {
        key: _token_text(config[key]) for key in ("bos_token", "eos_token", "unk_token", "pad_token") if config.get(key)
    }
    if chat_template is not None:
        return TemplateRenderer(Path(chat_template).read_text(), special, f"the template in {Path(chat_template).name}")
    source: Any = config.get("chat_template")
    if (folder / "chat_template.jinja").exists():
        source = (folder / "chat_template.jinja").read_text()
    elif (folder / "chat_template.json").exists():
        source = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(source, list):
        named = {item["name"]: item["template"] for item in source}
        source = named.get("tool_use", named.get("default"))
    return None if not source else TemplateRenderer(source, special, f"the model's own template ({folder.name})")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    value = msgspec.json.decode(path.read_bytes())
    return value if isinstance(value, dict) else {}


def _token_text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)
