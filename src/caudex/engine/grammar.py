"""Output that must follow a JSON schema, a regular expression or a grammar, through llguidance."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from caudex.engine.types import MAX_GRAMMAR_LENGTH, InvalidRequestError, OutputGrammar

Result = TypeVar("Result")

_NUM_KEPT = 16
_FUEL_A_STEP = 50_000
"""Of llguidance's lexer, whose default of four times as much lets a hostile pattern hold up a step for seconds."""
_STACK_BYTES = 2**29
_DEAD_END = "NoExtensionBias"
"""What llguidance calls a place that no token leads on from and where the text may not end."""


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

    def end(self) -> None:
        """See that the text may end here, and not only because nothing could follow.

        Raises:
            GrammarError: the grammar leads nowhere from here, or llguidance gave up.
        """
        if self._matcher.is_error():
            raise self._failure()

    def accept(self, token_id: int) -> None:
        """Move on by the token that was chosen among those allowed.

        Raises:
            GrammarError: llguidance gave up, as it does when a pattern has grown beyond its limits.
        """
        if not self._matcher.consume_token(token_id):
            raise self._failure()

    def _failure(self) -> GrammarError:
        reason = str(self._matcher.get_error()).partition("\n")[0]
        reason = "no text satisfies it from here" if reason == _DEAD_END else reason
        return GrammarError(f"the output's grammar cannot be followed any further: {reason}")


class GrammarCompiler:
    """Makes matchers for one model's vocabulary. Any thread may call it; grammars are compiled one at a time.

    What llguidance needs to know of the vocabulary takes up to a second to build, so it is built at the first use. The
    grammars used last are kept, so that the samples of a request, and requests alike, compile theirs once.
    """

    def __init__(self, hf_tokenizer: Any, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._hf_tokenizer = hf_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self._compiled: OrderedDict[OutputGrammar, Any] = OrderedDict()

    def compile(self, grammar: OutputGrammar) -> GrammarMatcher:
        """A matcher at the start of `grammar`.

        Raises:
            InvalidRequestError: it is no valid grammar of its kind, or too long; the message has llguidance's words.
            ModuleNotFoundError: llguidance is not installed; the message says how to.
        """
        if len(grammar.text) > MAX_GRAMMAR_LENGTH:
            raise InvalidRequestError(
                f"the {grammar.kind} is {len(grammar.text)} characters long; expected at most {MAX_GRAMMAR_LENGTH}",
                grammar.origin,
            )
        try:
            import llguidance  # noqa: F401
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "output that follows a grammar needs the package llguidance: pip install 'caudex[grammar]'"
            ) from error
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is None:
                matcher = self._compiled[grammar] = with_deep_stack(lambda: self._compile(grammar))
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > _NUM_KEPT:
                self._compiled.popitem(last=False)
            return GrammarMatcher(matcher.deep_copy(), self._vocab_size)

    def _compile(self, grammar: OutputGrammar) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        try:
            source = _llguidance_source(LLMatcher, grammar)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"the {grammar.kind} cannot be used: {error}", grammar.origin) from error
        limits = LLParserLimits(step_lexer_fuel=_FUEL_A_STEP)
        matcher = LLMatcher(self._load_vocabulary(), source, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidRequestError(f"the {grammar.kind} cannot be used: {matcher.get_error()}", grammar.origin)
        if _leads_nowhere(matcher):
            raise InvalidRequestError(f"the {grammar.kind} cannot be used: no text satisfies it", grammar.origin)
        return matcher

    def _load_vocabulary(self) -> Any:
        from llguidance.hf import from_tokenizer

        if self._vocabulary is None:
            self._vocabulary = from_tokenizer(
                self._hf_tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_token_ids
            )
        return self._vocabulary


def _leads_nowhere(matcher: Any) -> bool:
    """Whether nothing can come first, as where rules lead to themselves only. llguidance notices at the first mask."""
    first = matcher.deep_copy()
    first.compute_bitmask()
    return bool(first.is_error())


def with_deep_stack(work: Callable[[], Result]) -> Result:
    """Run `work` on a thread of its own, whose stack has room for grammars whose rules lead thousands deep.

    llguidance follows them by recursion, and a stack that overflows ends the process. Memory is taken as it is used.
    """
    with ThreadPoolExecutor(1) as pool:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            running = pool.submit(work)
        finally:
            threading.stack_size(usual)
        return running.result()


def _llguidance_source(matcher_class: Any, grammar: OutputGrammar) -> str:
    """The grammar in llguidance's own language."""
    match grammar.kind:
        case "json_schema":
            return str(matcher_class.grammar_from_json_schema(grammar.text))
        case "regex":
            return str(matcher_class.grammar_from_regex(grammar.text))
        case "choice":
            choices = " | ".join(json.dumps(choice) for choice in json.loads(grammar.text))
            if not choices:
                raise ValueError("there is nothing to choose from")
            return str(matcher_class.grammar_from_lark(f"start: {choices}"))
        case "lark":
            return str(matcher_class.grammar_from_lark(grammar.text))
