"""The engine: a model, its KV pool and the loop that serves requests from its own thread."""

from __future__ import annotations

import logging
import re
import socket
import threading
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from caudex.cache import PrefixCache
from caudex.cache.events import EventPublisher
from caudex.cache.namespace import join_namespace
from caudex.engine.batch import Int32Array
from caudex.engine.config import EngineConfig
from caudex.engine.drafting import Drafting
from caudex.engine.engine_loop import Abort, EngineLoop, ResetCache, Stop, Submit
from caudex.engine.grammar import GrammarCompiler
from caudex.engine.kv_fingerprint import adapter_digests, kv_fingerprint
from caudex.engine.kv_memory import KvMemory
from caudex.engine.kv_tiers import KvTiers
from caudex.engine.loading import Progress, ignore_progress, locate_checkpoint
from caudex.engine.memory import choose_max_model_len, choose_num_blocks
from caudex.engine.model import load_model
from caudex.engine.output_stream import OutputStream
from caudex.engine.prompt_lookup import PromptLookup
from caudex.engine.runner import ModelRunner
from caudex.engine.runner_choice import make_runner
from caudex.engine.scheduler import Scheduler
from caudex.engine.sequence_state import SequenceState
from caudex.engine.tokenizer import Tokenizer
from caudex.engine.types import (
    Completion,
    EngineDeadError,
    EngineStats,
    GenerationError,
    GenerationRequest,
    InvalidRequestError,
    OutputCallback,
    RequestOutput,
    SamplingParams,
)
from caudex.tiers.store import BlockStore
from caudex.tiers.store_spec import parse_store

_log = logging.getLogger(__name__)
_ABORT_SECONDS = 30.0


class _PendingCompletion:
    """Collects one request's outputs for a thread that waits for the last."""

    def __init__(self) -> None:
        self._outputs: list[RequestOutput] = []
        self._finished = threading.Event()

    def take(self, output: RequestOutput) -> None:
        self._outputs.append(output)
        if output.finish_reason is not None:
            self._finished.set()

    def wait(self) -> Completion:
        self._finished.wait()
        last = self._outputs[-1]
        if last.finish_reason is None or last.finish_reason in ("error", "abort"):
            raise GenerationError(last.error or "the request was aborted")
        return Completion(
            token_ids=[token for output in self._outputs for token in output.token_ids],
            text="".join(output.text for output in self._outputs),
            finish_reason=last.finish_reason,
            num_prompt_tokens=last.num_prompt_tokens,
            num_cached_tokens=last.num_cached_tokens,
            logprobs=tuple(logprob for output in self._outputs for logprob in output.logprobs),
            prompt_logprobs=self._outputs[0].prompt_logprobs,
        )


class Engine:
    """Serves generation requests over one model with a prefix cache.

    The loop runs on a thread of its own. `submit`, `abort`, `stats` and `reset_prefix_cache` may be called from any
    thread and never wait for a step: they leave a command that the loop takes up before its next step. Outputs arrive
    through each request's `on_output`, on the engine's thread.

    Every submitted request gets exactly one output with a `finish_reason`, whatever happens: also when it is aborted,
    when a step raises (reason `error`), and when the engine shuts down. A step that raises fails the requests in it and
    forgets the cache, as what it promised was not written; three in a row, or an error outside the model, are fatal:
    `is_alive` turns False, `error` keeps the exception, and all requests fail.

    Attributes:
        tokenizer: may be used from any thread.
        model_name: the name the model is served under.
        max_model_len: the longest prompt plus output, in tokens.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model_name: str,
        tokenizer: Tokenizer,
        runner: ModelRunner,
        cache: PrefixCache,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Collection[int] = (),
        tiers: KvTiers | None = None,
    ) -> None:

        self.config = config
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._grammars = GrammarCompiler(tokenizer.hf_tokenizer, vocab_size, sorted(eos_token_ids))
        self._lock = threading.Lock()
        self._accepting = True
        self._known_ids: set[str] = set()
        self._num_submitted = 0
        self._error: BaseException | None = None
        self._tiers = tiers
        self._drafting = None
        if config.prompt_lookup_tokens and runner.is_bit_stable:
            self._drafting = Drafting(config.prompt_lookup_tokens)
        scheduler = Scheduler(
            cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_overtakes=config.max_overtakes,
            shares=config.enable_prefix_caching,
            tiers=tiers,
            drafting=self._drafting,
        )
        self._loop = EngineLoop(
            runner, cache, scheduler, self._known_ids.discard, check_invariants=config.debug, tiers=tiers
        )
        self._thread = threading.Thread(target=self._run, name="caudex-engine", daemon=True)
        self._events = _publish_events(config, cache)

    @classmethod
    def load(cls, config: EngineConfig, progress: Progress | None = None) -> Engine:
        """Load the model and allocate the KV pool; `start` is still to be called.

        Args:
            config: what to load and how.
            progress: called as `progress(stage, done, total)` on this thread while loading.

        Raises:
            UnsupportedModelError: the model is none that can be served; the message says why.
            FileNotFoundError: there is no such model.
            ValueError: the pool or the longest length cannot be as configured.
            OSError: the address to publish KV events on is taken or not this machine's, or a tier's folder cannot be
                used.
            ImportError: KV events are to be published, or a tier is to be used, and a library for it is missing.
        """

        progress = progress or ignore_progress
        _check_events_addresses(config)
        stores = [parse_store(text).open() for text in config.kv_tiers]
        checkpoint = locate_checkpoint(config.model, progress)
        loaded = load_model(checkpoint, config, progress)
        num_blocks = choose_num_blocks(config, loaded.kv_bytes_per_token(config.kv_cache_dtype))
        max_model_len = choose_max_model_len(config, loaded.position_limit, num_blocks)
        progress("Allocating the KV pool", 0, 1)
        runner = make_runner(loaded, config, num_blocks, max_model_len)
        engine = cls(
            config,
            model_name=loaded.name,
            tokenizer=loaded.tokenizer,
            runner=runner,
            cache=PrefixCache(
                num_blocks, config.block_size, index=config.index, policy=config.policy, sharing=config.sharing
            ),
            vocab_size=loaded.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            tiers=_open_tiers(stores, config, checkpoint.directory, runner.kv_memory) if stores else None,
        )
        progress("Allocating the KV pool", 1, 1)
        return engine

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown(drain=False)

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def submit(self, request: GenerationRequest, on_output: OutputCallback) -> None:
        """Queue a request; returns at once.

        Raises:
            InvalidRequestError: the prompt is empty or can never fit (says both lengths); it or `logit_bias` hold an
                id outside the vocabulary; the grammar is not valid; there is no such adapter; or the id is in use.
            EngineDeadError: the engine has been shut down or has died.
        """

        prompt = self._checked_prompt(request)
        self._check_token_ids(request.sampling.logit_bias, "logit_bias")
        if request.adapter is not None and request.adapter not in self.config.lora_adapters:
            known = ", ".join(self.config.lora_adapters) or "none"
            raise InvalidRequestError(f"there is no adapter {request.adapter!r}; loaded are: {known}", "adapter")
        grammar = request.sampling.grammar
        matcher = None if grammar is None else self._grammars.compile(grammar)
        # A grammar's state follows what is chosen, and would have to be taken back with each wrong guess.
        lookup = PromptLookup(prompt) if self._drafting is not None and matcher is None else None
        max_output = min(request.sampling.max_tokens, self.max_model_len - len(prompt))
        with self._lock:
            if not self._accepting:
                raise EngineDeadError(self._why_not_accepting())
            if request.request_id in self._known_ids:
                raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")
            self._known_ids.add(request.request_id)
            state = SequenceState(
                request.request_id,
                self._num_submitted,
                prompt,
                max_output,
                namespace=join_namespace(request.namespace, request.adapter),
                tenant=request.tenant,
                session_id=request.session_id,
                adapter=request.adapter,
                priority=request.priority,
                num_alternatives=request.sampling.prompt_logprobs,
                lookup=lookup,
            )
            self._num_submitted += 1
            stream = OutputStream(
                request, state, on_output, self.tokenizer, self._eos_token_ids, self.config.seed, matcher
            )
            self._loop.commands.put(Submit(stream))

    def sample(
        self, prompt: str | Sequence[int], sampling: SamplingParams, num_samples: int, *, namespace: str = ""
    ) -> list[Completion]:
        """Several samples of one prompt, which is computed once and from whose end they branch off.

        With a seed, sample i has the seed plus i.

        Raises:
            GenerationError, InvalidRequestError, EngineDeadError: as `generate`.
        """
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        leader = uuid.uuid4().hex
        pending = [_PendingCompletion() for _ in range(num_samples)]
        for index, completion in enumerate(pending):
            seed = None if sampling.seed is None else sampling.seed + index
            request = GenerationRequest(
                leader if not index else uuid.uuid4().hex,
                token_ids,
                replace(sampling, seed=seed),
                namespace,
                sample_of=leader if index else None,
            )
            self.submit(request, completion.take)
        return [completion.wait() for completion in pending]

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling: SamplingParams, *, namespace: str = ""
    ) -> list[Completion]:
        """Serve several prompts, texts or token ids, together and wait for all of them.

        Raises:
            GenerationError: a request failed, or the engine was shut down meanwhile.
            InvalidRequestError, EngineDeadError: as `submit`.
        """
        pending = [_PendingCompletion() for _ in prompts]
        for prompt, completion in zip(prompts, pending, strict=True):
            token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            request = GenerationRequest(uuid.uuid4().hex, token_ids, sampling, namespace)
            self.submit(request, completion.take)
        return [completion.wait() for completion in pending]

    def abort(self, request_id: str) -> None:
        """End a request within one step, with finish reason `abort`; an unknown or finished id is ignored."""
        self._loop.commands.put(Abort(request_id))

    def after_outputs(self, callback: Callable[[], None]) -> None:
        """Have `callback` called on the engine's thread whenever outputs have been given and no more follow at once.

        For owners that pass outputs on to another thread: one wake-up does for all of a step. It must return at once
        and never raise.
        """
        self._loop.after_outputs.append(callback)

    def stats(self) -> EngineStats:
        """Counters and gauges as they were after the last step, and the tiers' of now."""
        stats = self._loop.stats
        return stats if self._tiers is None else replace(stats, kv_tiers=self._tiers.stats())

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that no running request uses, before the next step; tiers keep what they have."""
        self._loop.commands.put(ResetCache())

    def shutdown(self, drain: bool = True, timeout: float | None = None) -> bool:
        """Stop taking requests, end the thread, publish the last KV events, and store the last blocks.

        True if the thread has ended.

        Args:
            drain: finish what is queued and running first; False aborts it.
            timeout: seconds to drain for; what still runs then is aborted.
        """
        with self._lock:
            self._accepting = False
        self._loop.commands.put(Stop(drain))
        try:
            return self._end_thread(timeout)
        finally:
            if self._events is not None:
                self._events.close()
            if self._tiers is not None:
                self._tiers.close()

    @property
    def is_alive(self) -> bool:
        """Whether requests are being served."""
        return self._thread.is_alive() and self._error is None

    @property
    def error(self) -> BaseException | None:
        """What killed the engine, if something did."""
        return self._error

    def _checked_prompt(self, request: GenerationRequest) -> Int32Array:
        token_ids = request.prompt_token_ids
        if not token_ids:
            raise InvalidRequestError("the prompt is empty; it needs at least one token", "prompt")
        if len(token_ids) >= self.max_model_len:
            raise InvalidRequestError(
                f"the prompt is {len(token_ids)} tokens long and at least one is to be generated, but prompt and "
                f"output together may be at most {self.max_model_len} tokens",
                "prompt",
            )
        self._check_token_ids(token_ids, "prompt")
        return np.asarray(token_ids, dtype=np.int32)

    def _check_token_ids(self, token_ids: Collection[int], field: str) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            outside = next(token_id for token_id in token_ids if not 0 <= token_id < self._vocab_size)
            raise InvalidRequestError(
                f"{field} has token id {outside}; the model's are 0 to {self._vocab_size - 1}", field
            )

    def _why_not_accepting(self) -> str:
        return "the engine is shut down" if self._error is None else f"the engine has died: {self._error!r}"

    def _end_thread(self, timeout: float | None) -> bool:
        if self._thread.ident is None:
            self._run()
            return True
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._loop.commands.put(Stop(drain=False))
            self._thread.join(_ABORT_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        """What the engine's thread does."""
        try:
            self._loop.run()
        except BaseException as error:
            _log.exception("the engine has died")
            self._error = error
        finally:
            with self._lock:
                self._accepting = False
            self._loop.end_all(self._error)


def _check_events_addresses(config: EngineConfig) -> None:
    """Raise OSError now if one of the TCP addresses for KV events is taken, rather than when the model is loaded."""
    for endpoint in (config.kv_events_endpoint, config.kv_events_replay_endpoint):
        found = re.fullmatch(r"tcp://(.+):([0-9]+)", endpoint or "")
        if found is None or int(found[2]) == 0:
            continue
        host = "" if found[1] == "*" else found[1].strip("[]")
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(socket.gaierror):  # The name of a network interface, which ZeroMQ knows.
                _probe(probe, (host, int(found[2])), str(endpoint))


def _probe(probe: socket.socket, address: tuple[str, int], endpoint: str) -> None:
    try:
        probe.bind(address)
    except socket.gaierror:
        raise
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OSError(f"cannot publish KV events on {endpoint}: {reason}; choose another address") from error


def _open_tiers(stores: Sequence[BlockStore], config: EngineConfig, checkpoint: Path, memory: KvMemory) -> KvTiers:
    return KvTiers(
        stores,
        memory,
        block_size=config.block_size,
        model=kv_fingerprint(config, checkpoint, memory.kv_format),
        adapters=adapter_digests(config.lora_adapters),
        tenants_share=config.sharing == "shared",
    )


def _publish_events(config: EngineConfig, cache: PrefixCache) -> EventPublisher | None:
    if config.kv_events_endpoint is None:
        return None
    return EventPublisher(
        cache, config.kv_events_endpoint, config.kv_events_replay_endpoint, topic=config.kv_events_topic
    )
