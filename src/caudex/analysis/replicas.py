"""What spreading a log over several replicas does to its hit rate, by how requests are assigned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from caudex.analysis.measure import Measured
from caudex.analysis.tables import Table
from caudex.cache.hit_curve import hit_curve
from caudex.trace.chain import Int64Array, mix64

PREFIX_TOKENS = 1024
MAX_LOAD = 1.25


@dataclass(frozen=True, slots=True)
class RoutingRow:
    """One assignment of requests to replicas, each with its share of the blocks.

    `imbalance` is the prompt tokens computed by the busiest replica over the mean of all.
    """

    routing: str
    replicas: int
    capacity_blocks_each: int
    hit_rate: float
    imbalance: float


def routing_rows(measured: Measured, replicas: int, capacity_each: int) -> Table[RoutingRow]:
    """One pool of all the memory, as the bound, then round robin, sessions, and prefixes with bounded load."""
    count = len(measured.lengths)
    assignments: dict[str, Int64Array] = {"one pool": np.zeros(count, dtype=np.int64)}
    assignments["round robin"] = np.arange(count) % replicas
    if measured.trace.sessions is not None:
        sessions = mix64(measured.trace.sessions.astype(np.uint64))
        assignments["session"] = (sessions % np.uint64(replicas)).astype(np.int64)
    assignments["prefix, bounded load"] = _by_prefix(measured, replicas)
    rows = []
    for routing, assigned in assignments.items():
        parts = 1 if routing == "one pool" else replicas
        capacity = capacity_each * (replicas if parts == 1 else 1)
        rows.append(_row(measured, routing, assigned, parts, capacity, capacity_each, replicas))
    return Table(rows)


def _row(
    measured: Measured, routing: str, assigned: Int64Array, parts: int, capacity: int, capacity_each: int, replicas: int
) -> RoutingRow:
    hits = 0.0
    computed = np.zeros(parts)
    for part in range(parts):
        trace = measured.trace.select(assigned == part)
        served = hit_curve(trace).hit_rate(capacity) * trace.prompt_tokens if len(trace) else 0.0
        computed[part] = trace.prompt_tokens - served
        hits += served
    imbalance = float(computed.max() / max(computed.mean(), 1e-9))
    return RoutingRow(routing, replicas, capacity_each, hits / max(measured.prompt_tokens, 1), imbalance)


def _by_prefix(measured: Measured, replicas: int) -> Int64Array:
    """The replica that the prompt's first 1,024 tokens hash to, or the next with room: no replica may have been sent
    more than 1.25 times its share of prompt tokens (consistent hashing with bounded loads, Mirrokni et al., 2016)."""
    trace = measured.trace
    last = np.minimum(max(PREFIX_TOKENS // trace.block_size, 1), trace.num_full_blocks) - 1
    keys = trace.blocks_at(last).view(np.uint64)
    homes = (mix64(keys) % np.uint64(replicas)).astype(np.int64).tolist()
    load = [0.0] * replicas
    sent = 0.0
    assigned = np.empty(len(trace), dtype=np.int64)
    for index, (home, length) in enumerate(zip(homes, trace.input_lengths.tolist(), strict=True)):
        sent += length
        room = MAX_LOAD * sent / replicas + length
        replica = home
        while load[replica] + length > room:
            replica = (replica + 1) % replicas
        load[replica] += length
        assigned[index] = replica
    return assigned
