"""The same policies on Ray Serve: a request router that sends a call to the replica where its prefix lies.

    from ray import serve
    from ray.serve.config import RequestRouterConfig

    routing = RequestRouterConfig(
        request_router_class="caudex.gateway.ray_serve.PrefixRequestRouter",
        request_router_kwargs={"policy": "cost", "prefill_rate": 20_000},
    )

    @serve.deployment(num_replicas=4, request_router_config=routing)
    class Model: ...

The prompt is the call's first argument: a body in OpenAI's shape (a mapping, JSON, or an object with such attributes),
or plain text. A call without one goes by load and session. Each handle decides by what it sent itself.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping
from typing import Any

import msgspec

try:
    from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica
except ImportError as error:
    raise ImportError("routing on Ray Serve needs Ray: pip install 'caudex[ray]'") from error

from caudex.gateway.http_messages import HttpError
from caudex.gateway.prompt import Body, decode_body, describe
from caudex.routing import Candidate, Fleet, Flight, LoadReport, Policy, RouteRequest, make_policy, text_request

_ATTRIBUTES = ("model", "tools", "instructions", "messages", "prompt", "input", "session_id", "user", "cache_salt")


class PrefixRequestRouter(RequestRouter):  # type: ignore[misc]
    """Ranks the replicas of a deployment by a Caudex policy. Ray itself passes over a replica that is full.

    A call counts at the replica that it was meant for from its ranking on, so that calls which are ranked together do
    not all go to one; where Ray had to take another it is counted there. Ray does not say when a first token comes, so
    a prompt counts as computed after its uncached tokens' time at `prefill_rate`, those before it first.

    A replica may say more of itself through Ray's `record_routing_stats`: `running` and `waiting` requests, and
    `capacity_tokens`, its KV slots. One that leaves takes what was believed of its cache along.
    """

    def initialize_state(self, policy: str = "cost", prefill_rate: float | None = None, **settings: Any) -> None:
        """What `request_router_kwargs` says: the policy's name and settings, and a replica's tokens a second."""
        self._fleet = Fleet()
        self._policy: Policy = make_policy(policy, **settings)
        self._prefill_rate = prefill_rate
        self._flights: dict[str, Flight] = {}
        self._asked: dict[str, tuple[RouteRequest, Candidate]] = {}
        self._computed_at: dict[int, float] = {}
        self._prefills: list[tuple[float, str]] = []

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray's word on which replicas there are, and what they say of themselves."""
        super().update_replicas(replicas)
        now = {replica.replica_id.unique_id: replica for replica in replicas}
        members = self._fleet.members()
        for name in members.keys() - now.keys():
            slot = self._fleet.leave(name)
            self._policy.forget(slot)
            self._computed_at.pop(slot, None)
        for name, replica in now.items():
            slot = self._fleet.join(name, prefill_rate=self._prefill_rate) if name not in members else members[name]
            self._fleet.report(slot, _load_report(replica.routing_stats))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas in order of preference, each a rank of its own."""
        if pending_request is None:
            return [list(candidate_replicas)]
        now = time.monotonic()
        self._count_computed(now)
        by_slot = {self._fleet.slot(replica.replica_id.unique_id): replica for replica in candidate_replicas}
        features = _features(pending_request)
        ranked = [
            candidate for candidate in self._policy.rank(features, self._fleet, now) if candidate.worker in by_slot
        ]
        if ranked:
            self._send(pending_request, features, ranked[0], now)
        return [[by_slot[candidate.worker]] for candidate in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """The call was accepted there."""
        call, slot = pending_request.metadata.internal_request_id, self._fleet.members().get(replica_id.unique_id)
        asked = self._asked.pop(call, None)
        if asked is None or slot is None:
            return
        features, candidate = asked
        now = time.monotonic()
        if candidate.worker != slot:
            self._send(pending_request, features, Candidate(slot, candidate.reason, None), now)
            del self._asked[call]
        self._policy.record(features, slot, now)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """The call is over there, however it ended; one that this replica refused may be out at another by now."""
        flight = self._flights.get(internal_request_id)
        if flight is not None and self._fleet.ids[flight.worker] in (None, replica_id.unique_id):
            self._land(internal_request_id)

    def _send(self, pending: PendingRequest, features: RouteRequest, to: Candidate, now: float) -> None:
        call = pending.metadata.internal_request_id
        self._land(call)
        flight = self._fleet.dispatch(to.worker, features.num_tokens, to.cached_tokens or 0, now)
        self._flights[call], self._asked[call] = flight, (features, to)
        began = max(now, self._computed_at.get(to.worker, now))
        computed_at = began + flight.uncached_tokens / float(self._fleet.prefill_rate[to.worker])
        self._computed_at[to.worker] = computed_at
        heapq.heappush(self._prefills, (computed_at, call))
        pending.future.add_done_callback(lambda future: self._land(call) if future.cancelled() else None)

    def _land(self, call: str) -> None:
        self._asked.pop(call, None)
        flight = self._flights.pop(call, None)
        if flight is not None:
            self._fleet.land(flight, time.monotonic())

    def _count_computed(self, now: float) -> None:
        while self._prefills and self._prefills[0][0] <= now:
            flight = self._flights.get(heapq.heappop(self._prefills)[1])
            if flight is not None:
                self._fleet.prefill_done(flight, now)


def _load_report(stats: Mapping[str, Any]) -> LoadReport:
    """What a replica's routing stats say under the names of LoadReport; other names are its own affair."""
    known = {name: stats[name] for name in LoadReport.__dataclass_fields__ if isinstance(stats.get(name), (int, float))}
    return LoadReport(**known)


def _features(pending: PendingRequest) -> RouteRequest:
    """What the call's first argument says, by position or name; its session is Ray's where Ray knows one."""
    prompt = next(iter((*pending.args, *pending.kwargs.values())), None)
    session = getattr(pending.metadata, "session_id", "") or None
    text = prompt.encode() if isinstance(prompt, str) else prompt
    if isinstance(text, bytes) and not text.lstrip().startswith(b"{"):
        return text_request(text, session=session, model=pending.metadata.multiplexed_model_id)
    body = _body(text)
    salt = body.cache_salt if isinstance(body.cache_salt, str) else ""
    return describe(body, session_header=session.encode() if session else None, tenant="", salt=salt)


def _body(prompt: Any) -> Body:
    """The fields that routing looks at; none where there is nothing to look into."""
    try:
        if isinstance(prompt, bytes):
            return decode_body(prompt)
        fields = prompt if isinstance(prompt, Mapping) else _attributes(prompt)
        return decode_body(msgspec.json.encode(dict(fields), enc_hook=_plain))
    except (HttpError, TypeError, ValueError):
        return Body()


def _attributes(prompt: Any) -> dict[str, Any]:
    values = {name: getattr(prompt, name, None) for name in _ATTRIBUTES}
    return {name: value for name, value in values.items() if value is not None}


def _plain(value: Any) -> Any:
    """A value that JSON does not know: a pydantic model as its fields, anything else by its text."""
    return value.model_dump() if hasattr(value, "model_dump") else str(value)
