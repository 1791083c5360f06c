"""POST /tokenize and /detokenize: text to the model's token ids and back, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from caudex.server.conversation import template_messages
from caudex.server.endpoint import read_body
from caudex.server.errors import APIError
from caudex.server.fields import decode_body
from caudex.server.service import Service


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = True
    add_generation_prompt: bool | None = True
    return_token_strs: bool | None = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


class TokenEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        return await self._answer(request, self._tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._answer(request, self._detokenize)

    async def _answer(self, request: Request, work: Any) -> Response:
        body = await read_body(request.headers, request.receive, self._service.settings)
        answer = await self._service.apart(work, body or b"")
        return Response(msgspec.json.encode(answer), media_type="application/json")

    def _tokenize(self, body: bytes) -> dict[str, Any]:
        fields = decode_body(body, TokenizeRequest)
        self._service.check_model(fields.model)
        tokens = self._encode(fields)
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": self._service.engine.max_model_len,
            "tokens": tokens,
            "token_strs": None,
        }
        if fields.return_token_strs:
            answer["token_strs"] = [self._service.engine.tokenizer.token(token) for token in tokens]
        return answer

    def _encode(self, fields: TokenizeRequest) -> list[int]:
        if (fields.prompt is None) == (fields.messages is None):
            raise APIError("give either prompt or messages, one of the two", param="prompt")
        if fields.prompt is not None:
            return self._service.engine.tokenizer.encode(
                fields.prompt, add_special_tokens=fields.add_special_tokens is not False
            )
        text = self._service.chat_text(
            template_messages(fields.messages or []),
            fields.tools or None,
            add_generation_prompt=fields.add_generation_prompt is not False,
        )
        return self._service.engine.tokenizer.encode(text, add_special_tokens=False)

    def _detokenize(self, body: bytes) -> dict[str, Any]:
        fields = decode_body(body, DetokenizeRequest)
        self._service.check_model(fields.model)
        size = self._service.engine.tokenizer.vocab_size
        for token in fields.tokens:
            if not 0 <= token < size:
                raise APIError(f"tokens has {token}; this model has token ids 0 to {size - 1}", param="tokens")
        return {"prompt": self._service.engine.tokenizer.decode(fields.tokens, skip_special_tokens=False)}
