"""From a request's sampled tokens to the outputs its owner sees."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

from caudex.engine.detokenizer import IncrementalDetokenizer, StopMatch, StopMatcher
from caudex.engine.grammar import GrammarMatcher
from caudex.engine.sampling import SampledToken, SamplingRow, logit_bias
from caudex.engine.sequence_state import SequenceState
from caudex.engine.tokenizer import Tokenizer
from caudex.engine.types import FinishReason, GenerationRequest, OutputCallback, RequestOutput


class OutputStream:
    """One request between the scheduler and its owner: text, stopping, and the one final output.

    Every stream gives exactly one output with a finish reason, the last; `finish_reason` keeps it.
    """

    def __init__(
        self,
        request: GenerationRequest,
        state: SequenceState,
        on_output: OutputCallback,
        tokenizer: Tokenizer,
        eos_token_ids: Collection[int],
        base_seed: int,
        grammar: GrammarMatcher | None = None,
    ) -> None:
        params = request.sampling
        self.request = request
        self.state = state
        self.finish_reason: FinishReason | None = None
        self._on_output = on_output
        self._has_prompt_scores = params.prompt_logprobs is not None
        self._grammar = grammar
        self._bias = logit_bias(params)
        self._end_token_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        )
        self._detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids)
        self._stops = StopMatcher(params.stop)
        self._seed = _request_seed(base_seed, request.request_id) if params.seed is None else params.seed

    def sampling_rows(self, draft: Sequence[int]) -> list[SamplingRow]:
        """How this request's next token is to be sampled, and the one after each token of `draft` if it comes true."""
        output = self.state.output
        return [self._sampling_row([*output, *draft[:right]] if right else output) for right in range(len(draft) + 1)]

    def _sampling_row(self, output: Sequence[int]) -> SamplingRow:
        params = self.request.sampling
        return SamplingRow(
            params,
            self._seed,
            len(output),
            self.state.prompt,
            output,
            self._grammar,
            self._bias,
            self._end_token_ids if len(output) < params.min_tokens else (),
        )

    def push(self, tokens: Sequence[SampledToken]) -> int:
        """Take the next tokens, up to one that ends the request, and give its owner what they add; how many it took.

        Of a request that is only scored, give the end.
        """
        if not self.state.max_output_tokens:
            self._give("", "length")
            return 0
        taken, texts = 0, []
        reason: FinishReason | None = None
        stop_reason: str | int | None = None
        while reason is None and taken < len(tokens):
            token_id = tokens[taken].token_id
            self.state.output.append(token_id)
            text, reason, stop_reason = self._advance(token_id)
            texts.append(text)
            taken += 1
        self._give("".join(texts), reason, stop_reason, tokens[:taken])
        return taken

    def end(self, reason: FinishReason, error: str | None = None, error_field: str | None = None) -> None:
        """Finish without another token."""
        self._give(self._rest(), reason, error=error, error_field=error_field)

    def _advance(self, token_id: int) -> tuple[str, FinishReason | None, str | int | None]:
        """The new text, and whether and why it is the last."""
        if token_id in self._end_token_ids:
            if self._grammar is not None:
                self._grammar.end()
            explicit = token_id in self.request.sampling.stop_token_ids
            return self._rest(), "stop", token_id if explicit else None
        if self._grammar is not None:
            self._grammar.accept(token_id)
        match = self._match_stops(self._detokenizer.push(token_id))
        if match.stop is not None:
            return match.text, "stop", match.stop
        if self._grammar is not None and self._grammar.is_finished:
            return match.text + self._rest(), "stop", None
        if self.state.num_output_left > 0:
            return match.text, None, None
        return match.text + self._rest(), "length", None

    def _match_stops(self, text: str) -> StopMatch:
        """Look for stop strings, unless it is too early for one."""
        early = len(self.state.output) < self.request.sampling.min_tokens
        return StopMatch(text) if early else self._stops.push(text)

    def _rest(self) -> str:
        match = self._stops.push(self._detokenizer.flush())
        return match.text + self._stops.flush()

    def _give(
        self,
        text: str,
        reason: FinishReason | None,
        stop_reason: str | int | None = None,
        tokens: Sequence[SampledToken] = (),
        error: str | None = None,
        error_field: str | None = None,
    ) -> None:
        self.finish_reason = reason
        scores, self._has_prompt_scores = self._has_prompt_scores, False
        self._on_output(
            RequestOutput(
                request_id=self.request.request_id,
                token_ids=[token.token_id for token in tokens],
                text=text,
                num_prompt_tokens=len(self.state.prompt),
                num_cached_tokens=self.state.num_cached or 0,
                num_output_tokens=len(self.state.output),
                finish_reason=reason,
                stop_reason=stop_reason,
                logprobs=tuple(token.logprob for token in tokens if token.logprob is not None),
                error=error,
                error_field=error_field,
                prompt_logprobs=tuple(self.state.prompt_scores) if scores else (),
            )
        )


def _request_seed(base_seed: int, request_id: str) -> int:
    """A seed for a request that brings none: another for each id, the same at each run with the same base."""
    digest = hashlib.blake2b(request_id.encode(), key=base_seed.to_bytes(8, "little", signed=True), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
