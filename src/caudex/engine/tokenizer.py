"""Text to token ids and back, with the model's own tokenizer and chat template."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import DecodeStream

from caudex.engine.types import ChatTemplateError

Message = Mapping[str, Any]

REPLACEMENT = "\ufffd"
"""What stands for bytes that are no whole character."""


class Tokenizer:
    """A model's tokenizer behind three verbs that any thread may call at any time.

    transformers' `__call__` sets truncation on the shared Rust object at every call, which two threads must not do at
    once; here truncation and padding are switched off for good and the Rust object, which is safe to share, is called
    directly. Tokenizers without a Rust object are refused when loading: no decoder of today needs one.
    """

    def __init__(self, hf_tokenizer: Any, chat_template: str | None = None) -> None:
        backend = getattr(hf_tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, RustTokenizer):
            raise ValueError(
                f"{type(hf_tokenizer).__name__} is a pure Python tokenizer; convert it to a tokenizer.json "
                "(AutoTokenizer.from_pretrained(..., use_fast=True).save_pretrained(...)) first"
            )
        backend.no_truncation()
        backend.no_padding()
        self.hf_tokenizer = hf_tokenizer
        self._rust = backend
        self._chat_template = chat_template

    @classmethod
    def load(cls, directory: Path, chat_template: Path | None = None) -> Tokenizer:
        """Load the tokenizer saved in `directory`; `chat_template` names a Jinja file that replaces the model's own."""
        from transformers import AutoTokenizer

        template = chat_template.read_text(encoding="utf-8") if chat_template is not None else None
        return cls(AutoTokenizer.from_pretrained(directory), template)

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the tokenizer can produce, added tokens included."""
        return int(self._rust.get_vocab_size(with_added_tokens=True))

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end token; a model's generation config may name more."""
        token = self.hf_tokenizer.eos_token_id
        return None if token is None else int(token)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_template or self.hf_tokenizer.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the model's begin and end tokens if it has any and they are asked for."""
        return list(self._rust.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are no whole UTF-8 character come out as U+FFFD."""
        return str(self._rust.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def decode_stream(self, context: Sequence[int]) -> Callable[[int], str | None] | None:
        """A function that takes the tokens after `context` one by one and gives the text that each completes, or None
        while a character is unfinished. There is none where `context` itself ends in an unfinished character.
        """
        if self.decode(context).endswith(REPLACEMENT):
            return None
        return partial(DecodeStream(list(context), skip_special_tokens=True).step, self._rust)

    def token(self, token_id: int) -> str:
        """Text of one token alone, as log-probability lists show it."""
        return self.decode([token_id], skip_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation as the model's chat template writes it.

        Raises:
            ChatTemplateError: the model has no template, or the template refuses these messages (its own words).
        """
        text = self.render_chat_text(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        return self.encode(text, add_special_tokens=False)

    def render_chat_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that `render_chat` encodes."""
        if not self.has_chat_template:
            raise ChatTemplateError(
                "this model has no chat template; use the completions endpoint, or pass one with --chat-template"
            )
        variables = variables or {}
        self._check_variables(variables)
        try:
            return str(
                self.hf_tokenizer.apply_chat_template(
                    json.loads(json.dumps(list(messages))),
                    tools=None if tools is None else list(tools),
                    chat_template=self._chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tokenize=False,
                    **variables,
                )
            )
        except Exception as error:  # A template is a program of the model's author: it may raise anything.
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        """Raise if one of a template's variables would stand for a parameter of the call that renders it."""
        reserved = {"self", "messages", *inspect.signature(self.hf_tokenizer.apply_chat_template).parameters}
        taken = sorted(reserved.intersection(variables) - {"documents"})
        if taken:
            raise ChatTemplateError(f"{', '.join(taken)} cannot be given as variables of the chat template")
