"""Who shares what with whom, and whose blocks are kept."""

from __future__ import annotations

import pytest

from caudex.server.settings import ServerSettings

KEYS = ServerSettings(api_keys=("one", "two"))
PROMPT = "t" * 64


def cached(server, key: str, **fields) -> int:
    body = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True, **fields}
    answer = server.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(("sharing", "seen_by_two"), [("isolated", 0), ("shared", 63)])
def test_keys_are_tenants(fresh_server, sharing: str, seen_by_two: int) -> None:
    with fresh_server(KEYS, sharing=sharing) as server:
        assert cached(server, "one") == 0
        assert cached(server, "one") == 63
        assert cached(server, "two") == seen_by_two


def test_a_salt_keeps_apart_even_those_who_share(fresh_server) -> None:
    with fresh_server(KEYS, sharing="shared") as server:
        cached(server, "one", cache_salt="s")
        assert cached(server, "two") == 0
        assert cached(server, "two", cache_salt="s") == 63


def crowd_out(server) -> None:
    """Fill the whole pool with other prompts."""
    for number in range(6):
        server.complete(chr(65 + number) * 150, max_tokens=2)


@pytest.mark.parametrize(("ttl", "kept"), [(0, False), (60, True)])
@pytest.mark.parametrize("by_header", [True, False])
def test_a_session_may_keep_its_blocks(fresh_server, ttl: float, kept: bool, by_header: bool) -> None:
    with fresh_server(num_blocks=48) as server:
        fields = {"cache_ttl": ttl} | ({} if by_header else {"session_id": "s"})
        headers = {"X-Session-ID": "s"} if by_header else {}
        body = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True, **fields}
        assert server.http.post("/v1/completions", json=body, headers=headers).status_code == 200
        crowd_out(server)
        details = server.complete(PROMPT)["usage"]["prompt_tokens_details"]
        assert (details["cached_tokens"] == 63) is kept


def test_a_time_to_keep_has_a_limit(server) -> None:
    error = server.post("/v1/completions", prompt="a", cache_ttl=1e9).json()["error"]
    assert error["param"] == "cache_ttl"
