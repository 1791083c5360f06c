"""What splits one cache into several, and requests sent to the wrong place."""

from __future__ import annotations

import random

from tests.analysis.plants.plant import Body, plant, session_of


def _salt_by_tenant(log: list[Body]) -> list[Body]:
    return [{**body, "cache_salt": f"tenant-{random.Random(session_of(body)).randrange(8)}"} for body in log]


def _salt_by_request(log: list[Body]) -> list[Body]:
    return [{**body, "cache_salt": f"{random.Random(number).getrandbits(64):x}"} for number, body in enumerate(log)]


SPLITS = [
    plant("salt_by_tenant", "cache_salt", r"^cache_salt$", _salt_by_tenant, "sessions"),
    plant("salt_by_request", "cache_salt", r"^cache_salt$", _salt_by_request, ""),
    plant("adapters_mixed", "lora_split", r"^LoRA", lambda log: [
        {**body, "lora_name": f"adapter-{random.Random(n).randrange(3)}"} for n, body in enumerate(log)], ""),
    plant("models_mixed", "model_mix", r"^model$", lambda log: [
        {**body, "model": ("small", "large")[random.Random(n).random() < 0.4]} for n, body in enumerate(log)], ""),
    plant("round_robin", "spread_over_replicas", r"^routing$", lambda log: [
        {**body, "worker_id": f"w{n % 4}"} for n, body in enumerate(log)], ""),
]  # fmt: skip
