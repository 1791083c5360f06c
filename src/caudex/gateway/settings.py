"""What an operator may set."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_ADDRESS = re.compile(r"\w+://.+:\+?\d+")


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Limits and times of a gateway. Seconds and bytes throughout."""

    policy: str = "cost"
    max_header_bytes: int = 65_536
    max_body_bytes: int = 33_554_432
    max_connections: int = 20_000
    max_buffered_bytes: int = 1_073_741_824
    max_concurrency_per_worker: int = 256
    max_queue: int = 1_024
    queue_timeout: float = 60.0
    header_timeout: float = 10.0
    body_timeout: float = 120.0
    idle_timeout: float = 75.0
    connect_timeout: float = 2.0
    first_byte_timeout: float = 600.0
    stream_idle_timeout: float = 300.0
    max_attempts: int = 3
    probe_interval: float = 1.0
    probe_timeout: float = 1.5
    probes_to_down: int = 3
    drain_timeout: float = 60.0
    snapshot_path: Path | None = None
    snapshot_interval: float = 30.0
    kv_events: str | None = None
    """ZeroMQ address where workers publish KV events, by the pattern of `publisher_address`."""
    kv_replay: str | None = None
    tokenizer: str | None = None
    worker_api_key: str | None = None
    admin_key: str | None = None

    def __post_init__(self) -> None:
        positive = ("max_header_bytes", "max_body_bytes", "max_connections", "max_buffered_bytes")
        for name in (
            *positive,
            "max_concurrency_per_worker",
            "max_attempts",
            "probe_interval",
            "probe_timeout",
            "probes_to_down",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.kv_events is not None and self.tokenizer is None:
            raise ValueError("KV events name blocks by their tokens: say which tokenizer the workers use")
        if self.policy == "prefix_exact" and self.kv_events is None:
            raise ValueError("the policy prefix_exact lives on KV events: say where the workers publish them")
        for address in (self.kv_events, self.kv_replay):
            if address is not None and not _ADDRESS.fullmatch(address):
                raise ValueError(f"KV event address {address!r} does not look like tcp://*:5557 or tcp://*:+1000")
        if self.max_queue < 0:
            raise ValueError(f"max_queue is {self.max_queue}; it must not be negative")
