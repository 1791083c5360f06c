"""A request's features by its tokens, where the model's tokenizer is at hand."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import numpy as np

from caudex.routing import RouteRequest, token_request
from caudex.trace.bodies import parse_object
from caudex.trace.encode import PromptEncoder
from caudex.trace.errors import TraceError
from caudex.trace.render import RequestRenderer
from caudex.trace.tokenizer import load_tokenizer

log = logging.getLogger("caudex.gateway")


class TokenPrompts:
    """Renders and tokenises prompts as the workers do; a conversation costs only its new turns.

    `block_size` tells how many tokens a key stands for: the workers' block size, once it is known.
    """

    def __init__(self, tokenizer: str, block_size: Callable[[], int]) -> None:
        try:
            loaded, template = load_tokenizer(tokenizer)
        except TraceError as error:
            raise ValueError(str(error)) from error
        self._encoder = PromptEncoder(loaded, RequestRenderer(template))
        self._block_size = block_size

    def refine(self, request: RouteRequest, raw_body: bytes, *, adapter: str, salt: str) -> RouteRequest:
        """The request with keys over its tokens; as it was, where its body has no prompt that can be tokenised."""
        try:
            parsed = parse_object(msgspec.json.decode(raw_body), 0)[0]
            tokens = self._encoder.encode([parsed])[0]
        except (TraceError, msgspec.MsgspecError, LookupError, TypeError, ValueError) as error:
            log.debug("a prompt could not be tokenised: %s", error)
            return request
        return token_request(
            tokens.astype(np.int32, copy=False),
            block_size=self._block_size(),
            model=request.model,
            adapter=adapter,
            salt=salt,
            session=request.session,
            tenant=request.tenant,
            priority=request.priority,
        )
