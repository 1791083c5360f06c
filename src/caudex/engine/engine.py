"""The engine: a model, its KV pool and the loop that serves requests from its own thread."""

from __future__ import annotations

from caudex.engine.config import EngineConfig
from caudex.engine.loading import Progress
from caudex.engine.tokenizer import Tokenizer
from caudex.engine.types import EngineStats, GenerationRequest, OutputCallback


class Engine:
    """Serves generation requests over one model with a prefix cache.

    The loop runs on a thread of its own. `submit`, `abort`, `stats` and `reset_prefix_cache` may be called from any
    thread and never wait for a step; outputs arrive through each request's `on_output`, on the engine's thread.

    Every submitted request gets exactly one output with a `finish_reason`, whatever happens: also when it is aborted,
    when a step raises (reason `error`), and when the engine shuts down.
    """

    tokenizer: Tokenizer
    model_name: str
    max_model_len: int

    @classmethod
    def load(cls, config: EngineConfig, progress: Progress | None = None) -> Engine:
        """Load the model and allocate the KV pool; `start` is still to be called.

        Args:
            config: what to load and how.
            progress: called as `progress(stage, done, total)` on this thread while loading.

        Raises:
            UnsupportedModelError: the model is none that can be served; the message says why.
            FileNotFoundError: there is no such model.
        """
        raise NotImplementedError

    def start(self) -> None:
        """Start the engine's thread."""
        raise NotImplementedError

    def submit(self, request: GenerationRequest, on_output: OutputCallback) -> None:
        """Queue a request; returns at once.

        Raises:
            ValueError: the prompt is empty, holds an id outside the vocabulary, or can never fit (says both lengths);
                or the request id is in use.
            EngineDeadError: the engine is not running.
        """
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        """End a request within one step, with finish reason `abort`; an unknown or finished id is ignored."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """Counters and gauges as they were after the last step."""
        raise NotImplementedError

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that no running request uses, before the next step."""
        raise NotImplementedError

    def shutdown(self, drain: bool = True, timeout: float | None = None) -> bool:
        """Stop taking requests and end the thread; True if it has ended.

        Args:
            drain: finish what is queued and running first; False aborts it.
            timeout: seconds to wait; what still runs then is aborted.
        """
        raise NotImplementedError

    @property
    def is_alive(self) -> bool:
        """Whether requests are being served."""
        raise NotImplementedError

    @property
    def error(self) -> BaseException | None:
        """What killed the engine, if something did."""
        raise NotImplementedError
