"""Output that must follow a JSON schema, a regular expression or a grammar, through llguidance."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caudex.engine.types import OutputGrammar


class GrammarError(RuntimeError):
    """A grammar that was valid turned out too large to follow; the message has llguidance's words."""


class GrammarMatcher:
    """Where one request is in its grammar: which tokens may come next, and whether it may end.

    Cost: a mask takes llguidance some tens of microseconds a token on ordinary schemas.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._bits = np.zeros(-(-vocab_size // 32), dtype=np.int32)

    @property
    def is_finished(self) -> bool:
        """Whether the grammar allows nothing more."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> NDArray[np.bool]:
        """Which token ids may come next, shape (vocabulary,); end tokens are among them where the text may end."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        return bits[: self._vocab_size].astype(bool)

    def accept(self, token_id: int) -> None:
        """Move on by the token that was chosen among those allowed.

        Raises:
            GrammarError: llguidance gave up, as it does when a pattern has grown beyond its limits.
        """
        if not self._matcher.consume_token(token_id):
            reason = str(self._matcher.get_error()).partition("\n")[0]
            raise GrammarError(f"the output's grammar cannot be followed any further: {reason}")


class GrammarCompiler:
    """Makes matchers for one model's vocabulary. Any thread may call it.

    What llguidance needs to know of the vocabulary takes up to a second to build, so it is built at the first use.
    """

    def __init__(self, hf_tokenizer: Any, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._hf_tokenizer = hf_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._vocabulary: Any = None

    def compile(self, grammar: OutputGrammar) -> GrammarMatcher:
        """A matcher at the start of `grammar`.

        Raises:
            ValueError: it is no valid grammar of its kind; the message has llguidance's words.
            ModuleNotFoundError: llguidance is not installed; the message says how to.
        """
        try:
            from llguidance import LLMatcher
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "output that follows a grammar needs the package llguidance: pip install 'caudex[grammar]'"
            ) from error
        try:
            source = _llguidance_source(LLMatcher, grammar)
        except ValueError as error:
            raise ValueError(f"the {grammar.kind} cannot be used: {error}") from error
        matcher = LLMatcher(self._load_vocabulary(), source, log_level=0)
        if matcher.is_error():
            raise ValueError(f"the {grammar.kind} cannot be used: {matcher.get_error()}")
        return GrammarMatcher(matcher, self._vocab_size)

    def _load_vocabulary(self) -> Any:
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = from_tokenizer(
                    self._hf_tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_token_ids
                )
            return self._vocabulary


def _llguidance_source(matcher_class: Any, grammar: OutputGrammar) -> str:
    """The grammar in llguidance's own language."""
    match grammar.kind:
        case "json_schema":
            return str(matcher_class.grammar_from_json_schema(grammar.text))
        case "regex":
            return str(matcher_class.grammar_from_regex(grammar.text))
        case "choice":
            choices = " | ".join(json.dumps(choice) for choice in json.loads(grammar.text))
            return str(matcher_class.grammar_from_lark(f"start: {choices}"))
        case "lark":
            return str(matcher_class.grammar_from_lark(grammar.text))
