"""One request as the scheduler sees it: its tokens, how many have KV, and where they lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from caudex.engine.batch import Int32Array
from caudex.engine.prompt_lookup import PromptLookup
from caudex.engine.types import TokenLogprob

if TYPE_CHECKING:
    from caudex.cache import Sequence
    from caudex.engine.kv_tiers import Fetch
    from caudex.tiers.keys import KeyChain


@dataclass(slots=True, eq=False)
class SequenceState:
    """A request on its way: waiting (no `sequence`), or running.

        tokens   |<------- prompt ------->|<--- output --->|
        KV       |<----- num_computed ------>|
                 |<- num_cached ->|  found in the cache when it was admitted

    Invariants: `num_computed <= num_tokens`; a running sequence whose `num_computed` is `num_tokens - 1` decodes, one
    with less is still in prefill; `num_allocated` is `num_tokens` once a step is scheduled.

    Attributes:
        arrival: 0, 1, 2 ... in the order of submission; kept through preemptions.
        prompt: the request's token ids.
        max_output_tokens: what the request and the longest allowed length leave room for.
        num_alternatives: log-probabilities of the prompt are wanted, with this many alternatives a token; None if not.
        prompt_scores: those found so far, of tokens 1, 2 ... of the prompt.
        leader: the request that this one is another sample of; its `samples` has this one.
        lookup: guesses what it says next; None if nothing is guessed of it.
        output: tokens generated so far.
        num_computed: leading tokens whose KV is in the pool, this step's included once it is scheduled.
        num_cached: prompt tokens found in the cache at the first admission; None before it.
        num_committed: leading tokens that others can match.
        num_allocated: leading tokens that have slots; a token generated in the last step has none yet.
        num_overtakes: younger requests admitted while this one waited.
        key_chain: keys of its first blocks in the tiers, as far as they were needed; num_offered of them were offered.
        fetch: what the tiers were asked for and gave since it last waited; None if they were not.
    """

    request_id: str
    arrival: int
    prompt: Int32Array
    max_output_tokens: int
    namespace: str = ""
    tenant: str = ""
    session_id: str | None = None
    adapter: str | None = None
    priority: int = 0
    num_alternatives: int | None = None
    prompt_scores: list[TokenLogprob] = field(default_factory=list)
    leader: SequenceState | None = None
    samples: list[SequenceState] = field(default_factory=list)
    lookup: PromptLookup | None = None
    output: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    num_computed: int = 0
    num_committed: int = 0
    num_allocated: int = 0
    num_cached: int | None = None
    num_overtakes: int = 0
    num_preemptions: int = 0
    key_chain: KeyChain | None = None
    num_offered: int = 0
    fetch: Fetch | None = None
    block_table: Int32Array = field(default_factory=lambda: np.empty(0, dtype=np.int32))

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def in_prefill(self) -> bool:
        return self.num_uncomputed > 1

    @property
    def is_scoring(self) -> bool:
        """Whether prompt tokens are still to be scored; cached ones without a score are computed again, to equal KV."""
        return self.num_alternatives is not None and not self.output

    @property
    def awaits_leader(self) -> bool:
        """Whether the request that this one will branch off is about to compute their prompt."""
        return self.leader is not None and self.leader.sequence is not None and not self.leader.output

    @property
    def num_output_left(self) -> int:
        return self.max_output_tokens - len(self.output)

    def token_slice(self, start: int, end: int) -> Int32Array:
        """Tokens `start:end`."""
        if end <= len(self.prompt):
            return self.prompt[start:end]
        num_prompt = len(self.prompt)
        output = np.asarray(self.output[max(0, start - num_prompt) : end - num_prompt], dtype=np.int32)
        return output if start >= num_prompt else np.concatenate([self.prompt[start:], output])

    def tokens(self) -> Int32Array:
        """Prompt and output together."""
        if not self.output:
            return self.prompt
        return np.concatenate([self.prompt, np.asarray(self.output, dtype=np.int32)])

    def same_cache(self, other: SequenceState) -> bool:
        """Whether what one of the two computes may be shared with the other as a matter of course."""
        return (self.namespace, self.tenant) == (other.namespace, other.tenant)

    def scores_for(self, other: SequenceState) -> bool:
        """Whether this request is scoring what `other` can use: in the same cache, with enough alternatives a token."""
        if not (self.is_scoring and other.is_scoring and self.same_cache(other)):
            return False
        return (self.num_alternatives or 0) >= (other.num_alternatives or 0)

    def running_sequence(self) -> Sequence:
        """The pinned cache sequence; only for a running request."""
        assert self.sequence is not None, f"request {self.request_id} is not running"
        return self.sequence
