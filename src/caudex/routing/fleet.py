"""The fleet as a policy sees it: which workers there are, what each is doing, how fast it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DEFAULT_PREFILL_RATE = 8_000.0
"""Tokens a second, until some worker has been measured."""

DEFAULT_CAPACITY_TOKENS = 500_000.0
"""KV slots of a worker that does not report them."""

RECENT_SECONDS = 30.0
"""Time constant of the recent work by which otherwise idle workers are told apart."""

_RATE_MEMORY_TOKENS = 200_000.0
"""The measured prefill rate is an average over about this many computed tokens."""

_PRIOR_TOKENS = 2_000.0
"""What is assumed of a worker's rate weighs as much as so many measured tokens, so one odd sample does not decide."""

_MEASURABLE_TOKENS = 256
"""Where fewer were computed, what passes before a first token is mostly not their computation: a worker that serves
many hits would look slow."""

_RATE_NOISE = 0.2
"""Difference between measured rates (of their logarithms) up to which workers are taken to be equally fast."""


@dataclass(slots=True)
class Flight:
    """One request on its way: sent to `worker`, and since `first_token_at` generating there."""

    worker: int
    num_tokens: int
    uncached_tokens: int
    sent_at: float
    first_token_at: float | None = None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a worker says of itself; None where it does not say. Counts include what this fleet sent."""

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    """Share of KV blocks in use by running requests, 0 to 1."""
    capacity_tokens: float | None = None


class Fleet:
    """Workers in slots, their figures in arrays by slot, so that a policy weighs them all in a few vector operations.

    A slot is reused after its worker left; policies are told with `Policy.forget`. Every flight counts exactly once:
    in `queued_tokens` until its first token, then in `running` until it lands. `stay_seconds` is how long a token is
    out, in the mean over about the last hundred requests. `epoch` changes whenever membership, availability or a
    capacity does.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.ids: list[str | None] = []
        self.available = np.zeros(0, dtype=bool)
        self.queued_tokens = np.zeros(0)
        self.running = np.zeros(0)
        self.in_flight_tokens = np.zeros(0)
        self.foreign_requests = np.zeros(0)
        self.prefill_rate = np.zeros(0)
        self.capacity_tokens = np.zeros(0)
        self.mean_prompt_tokens = 1_000.0
        self.stay_seconds = 0.0
        self._landed_tokens = 0.0
        self._given_rate = np.zeros(0)
        self._recent_tokens = np.zeros(0)
        self._recent_requests = np.zeros(0)
        self._recent_at = 0.0
        self._last_first_token = np.zeros(0)
        self._measured_tokens = np.zeros(0)
        self._measured_seconds = np.zeros(0)
        self._waiting = np.zeros(0)
        self._slots: dict[str, int] = {}
        self._models: dict[int, frozenset[str]] = {}
        self._eligible: dict[str, NDArray[np.bool_]] = {}

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_slots(self) -> int:
        return len(self.ids)

    def slot(self, worker_id: str) -> int:
        """The worker's slot; KeyError if it is not a member."""
        return self._slots[worker_id]

    def members(self) -> dict[str, int]:
        return dict(self._slots)

    def join(
        self,
        worker_id: str,
        *,
        available: bool = True,
        capacity_tokens: float = DEFAULT_CAPACITY_TOKENS,
        prefill_rate: float | None = None,
    ) -> int:
        """Adds a worker and returns its slot; ValueError if it is there already. Until it is measured it is taken to
        be as fast as `prefill_rate` says (tokens a second), or else as the others are in the mean: a worker nobody has
        tried must not look slow beside one that was."""
        if worker_id in self._slots:
            raise ValueError(f"worker {worker_id!r} is already in the fleet")
        slot = self.ids.index(None) if None in self.ids else self._grow()
        self.ids[slot] = worker_id
        self._slots[worker_id] = slot
        self._for_each_array(slot, 0.0)
        self.available[slot] = available
        self.capacity_tokens[slot] = capacity_tokens
        self._given_rate[slot] = prefill_rate or 0.0
        self.prefill_rate[slot] = prefill_rate or self._mean_rate()
        self._changed()
        return slot

    def leave(self, worker_id: str) -> int:
        """Removes a worker and returns the slot it had; flights still out there land without effect."""
        slot = self._slots.pop(worker_id)
        self.ids[slot] = None
        self.available[slot] = False
        self._models.pop(slot, None)
        self._changed()
        return slot

    def set_available(self, slot: int, available: bool) -> None:
        """Whether new requests may go there; draining and unhealthy workers are not available."""
        if bool(self.available[slot]) != available:
            self.available[slot] = available
            self._changed()

    def set_models(self, slot: int, models: frozenset[str]) -> None:
        """What the worker serves. A worker that never said is taken to serve everything."""
        if self._models.get(slot) != models:
            self._models[slot] = models
            self._changed()

    def eligible(self, model: str) -> NDArray[np.bool_]:
        """Which slots may be sent a request for this model. A model that nobody names may go anywhere: a worker
        then gives the error that its users expect."""
        cached = self._eligible.get(model)
        if cached is None:
            cached = self._compute_eligible(model)
            # Names that no worker knows are the client's to invent: remembering them would be memory without end.
            if cached is not self.available:
                self._eligible[model] = cached
        return cached

    def load_tokens(self, decode_tokens: float = 64.0) -> NDArray[np.float64]:
        """Work at hand in tokens: prefill to be done, plus `decode_tokens` for each request that is generating, plus
        what others sent (known only as a number of requests)."""
        foreign = self.foreign_requests * self.mean_prompt_tokens
        return self.queued_tokens + self.running * decode_tokens + foreign

    def recent_tokens(self, now: float) -> NDArray[np.float64]:
        """Uncached tokens sent to each worker of late: exponentially fading, time constant RECENT_SECONDS."""
        self._decay(now)
        return self._recent_tokens

    def recent_requests(self, now: float) -> NDArray[np.float64]:
        """Requests sent to each worker of late, fading in the same way."""
        self._decay(now)
        return self._recent_requests

    def dispatch(self, slot: int, num_tokens: int, cached_tokens: int, now: float) -> Flight:
        """A request of `num_tokens`, of which `cached_tokens` are believed cached, was sent to the worker."""
        flight = Flight(slot, num_tokens, max(1, num_tokens - cached_tokens), now)
        self.queued_tokens[slot] += flight.uncached_tokens
        self.in_flight_tokens[slot] += num_tokens
        self._decay(now)
        self._recent_tokens[slot] += flight.uncached_tokens
        self._recent_requests[slot] += 1
        self._waiting[slot] += 1
        self.mean_prompt_tokens += 0.01 * (num_tokens - self.mean_prompt_tokens)
        return flight

    def first_token(self, flight: Flight, now: float) -> None:
        """The worker answered with the first token: its prefill is done, and its speed is measured."""
        if flight.first_token_at is None:
            self.prefill_done(flight, now)
            self._measure(flight, now)

    def prefill_done(self, flight: Flight, now: float) -> None:
        """The prompt is taken to be computed; for those who cannot see the first token, so nothing is measured."""
        if flight.first_token_at is not None:
            return
        slot = flight.worker
        flight.first_token_at = now
        self.queued_tokens[slot] = max(0.0, self.queued_tokens[slot] - flight.uncached_tokens)
        self._waiting[slot] = max(0.0, self._waiting[slot] - 1)
        self.running[slot] += 1

    def land(self, flight: Flight, now: float) -> None:
        """The request is over, however it ended."""
        slot = flight.worker
        if flight.first_token_at is None:
            self.queued_tokens[slot] = max(0.0, self.queued_tokens[slot] - flight.uncached_tokens)
            self._waiting[slot] = max(0.0, self._waiting[slot] - 1)
        else:
            self.running[slot] = max(0.0, self.running[slot] - 1)
        self.in_flight_tokens[slot] = max(0.0, self.in_flight_tokens[slot] - flight.num_tokens)
        self._landed_tokens = 0.99 * self._landed_tokens + flight.num_tokens
        share = flight.num_tokens / self._landed_tokens
        self.stay_seconds += share * (now - flight.sent_at - self.stay_seconds)

    def report(self, slot: int, report: LoadReport) -> None:
        """Takes in what a worker said of itself. What it has beyond our own flights was sent by others."""
        if report.running is not None or report.waiting is not None:
            theirs = (report.running or 0.0) + (report.waiting or 0.0)
            ours = float(self.running[slot] + self._waiting[slot])
            self.foreign_requests[slot] = max(0.0, theirs - ours)
        capacity = report.capacity_tokens
        if capacity is not None and capacity > 0 and capacity != self.capacity_tokens[slot]:
            self.capacity_tokens[slot] = capacity
            self._changed()

    def in_flight(self, slot: int) -> int:
        """Requests that this fleet's owner has out at the worker."""
        return int(self.running[slot] + self._waiting[slot])

    def _measure(self, flight: Flight, now: float) -> None:
        """Prefill is served one after another, so a first token's work began when the one before it was done."""
        slot = flight.worker
        began = max(flight.sent_at, float(self._last_first_token[slot]))
        self._last_first_token[slot] = now
        if now <= began or flight.uncached_tokens < _MEASURABLE_TOKENS:
            return
        fade = math.exp(-flight.uncached_tokens / _RATE_MEMORY_TOKENS)
        self._measured_tokens[slot] = self._measured_tokens[slot] * fade + flight.uncached_tokens
        self._measured_seconds[slot] = self._measured_seconds[slot] * fade + (now - began)
        self._update_rates()

    def _update_rates(self) -> None:
        """What was measured, with a prior. A small difference from the mean of all counts as none: a worker that looks
        a little faster by chance would get all that is cold."""
        mean = self._mean_rate()
        prior = np.where(self._given_rate > 0, self._given_rate, mean)
        rates = (self._measured_tokens + _PRIOR_TOKENS) / (self._measured_seconds + _PRIOR_TOKENS / prior)
        difference = np.log(rates / mean)
        alike = mean * np.exp(np.sign(difference) * np.maximum(np.abs(difference) - _RATE_NOISE, 0.0))
        self.prefill_rate[:] = np.where(self._given_rate > 0, rates, alike)

    def _mean_rate(self) -> float:
        """Of all workers that were measured."""
        seconds = float(self._measured_seconds.sum())
        return float(self._measured_tokens.sum()) / seconds if seconds > 0 else DEFAULT_PREFILL_RATE

    def _decay(self, now: float) -> None:
        if now > self._recent_at:
            fade = math.exp((self._recent_at - now) / RECENT_SECONDS)
            self._recent_tokens *= fade
            self._recent_requests *= fade
            self._recent_at = now

    def _compute_eligible(self, model: str) -> NDArray[np.bool_]:
        named = [slot for slot, models in self._models.items() if model in models]
        if not named:
            return self.available
        mask = np.zeros(self.num_slots, dtype=bool)
        mask[named] = True
        for slot in self._slots.values():
            if slot not in self._models:
                mask[slot] = True
        return mask & self.available

    def _changed(self) -> None:
        self.epoch += 1
        self._eligible.clear()

    def _arrays(self) -> tuple[str, ...]:
        return (
            "available",
            "queued_tokens",
            "running",
            "in_flight_tokens",
            "foreign_requests",
            "prefill_rate",
            "_given_rate",
            "capacity_tokens",
            "_recent_tokens",
            "_recent_requests",
            "_last_first_token",
            "_measured_tokens",
            "_measured_seconds",
            "_waiting",
        )

    def _for_each_array(self, slot: int, value: float) -> None:
        for name in self._arrays():
            getattr(self, name)[slot] = value

    def _grow(self) -> int:
        for name in self._arrays():
            old = getattr(self, name)
            setattr(self, name, np.append(old, np.zeros(1, dtype=old.dtype)))
        self.ids.append(None)
        return len(self.ids) - 1
