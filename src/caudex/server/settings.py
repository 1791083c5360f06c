"""What the operator chose for the HTTP face; the engine's own choices are in its EngineConfig."""

from __future__ import annotations

from dataclasses import dataclass

from caudex.engine.types import check_range


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of one server.

    `served_model_names`: names that requests may ask for, the first one is reported; none means the engine's own.
    `api_keys`: when there are any, every path but the probes wants `Authorization: Bearer KEY`.
    `max_body_bytes`: larger request bodies are refused unread, with status 413.
    `max_choices`: the most `n` and the most prompts one request may ask for, multiplied.
    `max_waiting`: with this many requests in the queue, new ones get status 429; None never refuses.
    `client_timeout`: seconds that a client may take for the head of a request, be silent in the middle of its body, or
    leave an answer unread; then the connection is closed and its requests are aborted.
    `metrics_prefix`: what metric names begin with, before the colon.
    `log_interval`: seconds between two lines of throughput while the engine is busy; 0 writes none.
    """

    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 2**20
    max_choices: int = 256
    max_waiting: int | None = None
    client_timeout: float = 60.0
    allowed_origins: tuple[str, ...] = ()
    metrics_prefix: str = "caudex"
    log_interval: float = 5.0

    def __post_init__(self) -> None:
        check_range("client_timeout", self.client_timeout, 0.0, 86_400.0, low_open=True)
