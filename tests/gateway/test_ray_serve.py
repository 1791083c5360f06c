"""A real Ray Serve application of two replicas, its calls routed by a Caudex policy."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="needs the extra caudex[ray]")
serve = pytest.importorskip("ray.serve", reason="needs the extra caudex[ray]")

from ray.serve.config import RequestRouterConfig  # noqa: E402

ROUTER = "caudex.gateway.ray_serve.PrefixRequestRouter"


def model_class() -> type:
    """A class of no importable name, so that it travels to the replicas whole."""

    class Model:
        """Says which replica it is; it is busy for as long as it is told."""

        async def __call__(self, body: Any) -> str:
            await asyncio.sleep(body.get("seconds", 0.0) if isinstance(body, dict) else 0.0)
            return str(serve.get_replica_context().replica_id.unique_id)

        def record_routing_stats(self) -> dict[str, Any]:
            return {"capacity_tokens": 200_000, "running": 0, "note": "any other name is ignored"}

    return Model


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    routing = RequestRouterConfig(request_router_class=ROUTER, request_router_kwargs={"policy": "cost", "seed": 1})
    deployment = serve.deployment(
        model_class(),
        num_replicas=2,
        ray_actor_options={"num_cpus": 0.1},
        request_router_config=routing,
        max_ongoing_requests=8,
    )
    yield serve.run(deployment.bind(), route_prefix=None)
    serve.shutdown()
    ray.shutdown()


def chat(session: int, turns: int) -> dict[str, Any]:
    system = f"You are number {session}. " + "Follow the rules. " * 200
    turn = [{"role": "user", "content": f"question {i} of {session} " * 20} for i in range(turns)]
    return {"messages": [{"role": "system", "content": system}, *turn]}


def test_conversations_stay_with_the_replica_that_has_their_history(model: Any) -> None:
    homes: dict[int, set[str]] = {session: set() for session in range(8)}
    for turn in range(4):
        for session, home in homes.items():
            home.add(model.remote(chat(session, turn + 1)).result(timeout_s=60))
    assert all(len(home) == 1 for home in homes.values())
    assert len(set.union(*homes.values())) == 2


def test_calls_at_one_time_spread_by_their_work(model: Any) -> None:
    pending = [model.remote({"prompt": f"{i} " * 3_000, "seconds": 0.2}) for i in range(12)]
    counts = Counter(call.result(timeout_s=60) for call in pending)
    assert len(counts) == 2
    assert max(counts.values()) <= 8


@pytest.mark.parametrize("prompt", ["plain words", b'{"prompt": "json"}', b"\xff no json", 17, None])
def test_calls_of_any_shape_are_answered(model: Any, prompt: Any) -> None:
    assert model.remote(prompt).result(timeout_s=60)


def test_a_conversation_moves_when_its_replica_dies(model: Any) -> None:
    body = chat(99, 3)
    home = model.remote(body).result(timeout_s=60)
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    replica = next(name for name in names if home in name)
    ray.kill(ray.get_actor(replica, namespace="serve"))
    deadline = time.monotonic() + 60
    answers: list[str] = []
    while time.monotonic() < deadline and len(answers) < 3:
        try:
            answers.append(model.remote(body).result(timeout_s=60))
        except ray.exceptions.RayActorError:
            time.sleep(0.1)
    assert len(answers) == 3
    assert home not in answers
    assert len(set(answers)) == 1
