"""What one tenant can learn about another's prompt, under each policy and in both indexes.

The attacker knows the victim's prompt but for a secret, and tries guesses: a hit beyond what it has sent itself tells
it that a guess is right.
"""

from __future__ import annotations

from typing import Any

import pytest

from caudex.cache import PrefixCache

SYSTEM = list(range(100, 108))
SECRET = [7, 7, 7, 7, 8, 8, 8, 8]
PROMPT = [*SYSTEM, *SECRET, 1]

pytestmark = pytest.mark.parametrize("index", ["radix", "hash"])


def make(index: Any, sharing: Any, **options: Any) -> PrefixCache:
    return PrefixCache(64, block_size=4, index=index, sharing=sharing, **options)


def send(cache: PrefixCache, tenant: str, tokens: list[int], namespace: str = "") -> int:
    seq = cache.begin(tokens, namespace, tenant=tenant)
    hit = seq.num_cached_tokens
    seq.allocate(len(tokens))
    seq.commit(len(tokens))
    seq.release()
    cache.check_invariants()
    return hit


def leak(cache: PrefixCache, tenant: str, guess: list[int]) -> int:
    """How much further than the known beginning a guess hits."""
    return max(cache.match([*SYSTEM, *guess, 0], tenant=tenant).num_tokens - len(SYSTEM), 0)


def test_isolated_tenants_learn_nothing(index: str) -> None:
    cache = make(index, "isolated")
    send(cache, "victim", PROMPT)
    assert leak(cache, "attacker", SECRET) == 0
    send(cache, "attacker", [*SYSTEM, 5])
    assert leak(cache, "attacker", SECRET) == 0
    assert leak(cache, "victim", SECRET) == len(SECRET)
    assert send(cache, "attacker", PROMPT) == len(SYSTEM), "only what the attacker has sent itself"


def test_shared_tenants_learn_what_they_guess(index: str) -> None:
    cache = make(index, "shared")
    send(cache, "victim", PROMPT)
    assert leak(cache, "attacker", SECRET) == len(SECRET)
    assert cache.match(PROMPT, "other model", tenant="attacker").num_tokens == 0, "a namespace is a wall even so"


def test_public_tenants_share_what_is_registered_and_no_more(index: str) -> None:
    cache = make(index, "public")
    cache.register_public(SYSTEM)
    send(cache, "victim", PROMPT)
    assert cache.match(PROMPT, tenant="attacker").num_tokens == len(SYSTEM)
    assert leak(cache, "attacker", SECRET) == 0
    assert send(cache, "attacker", PROMPT) == len(SYSTEM)
    assert leak(cache, "attacker", SECRET) == len(SECRET), "by now it has computed that itself"
    assert leak(cache, "third", SECRET) == 0


def test_registering_later_opens_what_is_cached(index: str) -> None:
    cache = make(index, "public")
    send(cache, "victim", PROMPT)
    assert cache.match(PROMPT, tenant="other").num_tokens == 0
    cache.register_public(SYSTEM)
    cache.check_invariants()
    assert cache.match(PROMPT, tenant="other").num_tokens == len(SYSTEM)


def test_k_tenants_open_a_prefix_each_by_computing_it(index: str) -> None:
    cache = make(index, "k_anonymous", k=3)
    send(cache, "a", PROMPT)
    assert send(cache, "a", PROMPT) == len(PROMPT) - 1, "its own, whole"
    assert leak(cache, "attacker", SECRET) == 0
    assert send(cache, "b", PROMPT) == 0, "the second tenant computes it itself"
    assert leak(cache, "attacker", SECRET) == 0, "however often the same tenants repeat it"
    assert cache.match(PROMPT, tenant="b").num_tokens == len(PROMPT) - 1
    assert send(cache, "c", [*SYSTEM, 5]) == 0
    assert cache.match(PROMPT, tenant="attacker").num_tokens == len(SYSTEM), "three have computed that much"
    assert leak(cache, "attacker", SECRET) == 0
    assert send(cache, "c", PROMPT) == len(SYSTEM)
    assert leak(cache, "attacker", SECRET) == len(SECRET)


def test_one_tenant_under_many_guesses_does_not_raise_the_count(index: str) -> None:
    """An attacker may not supply the missing tenants: what it computes counts once."""
    cache = make(index, "k_anonymous", k=3)
    send(cache, "victim", PROMPT)
    for last in range(5):
        send(cache, "attacker", [*SYSTEM, *SECRET, 50 + last])
    assert leak(cache, "third", SECRET) == 0


def test_eviction_starts_the_count_anew(index: str) -> None:
    cache = make(index, "k_anonymous", k=2)
    send(cache, "a", PROMPT)
    cache.clear()
    send(cache, "b", PROMPT)
    assert leak(cache, "attacker", SECRET) == 0


def test_a_growing_request_does_not_take_its_readers_along(index: str) -> None:
    """Who has computed the beginning of a running request does not see how it goes on."""
    cache = make(index, "k_anonymous", k=9)
    running = cache.begin([*SYSTEM, 1, 2], tenant="a")
    running.allocate(10)
    running.commit(10)
    send(cache, "b", [*SYSTEM, 1, 2, 9])
    running.append([*SECRET, 3])
    running.allocate(19)
    running.commit(19)
    cache.check_invariants()
    guess = [*SYSTEM, 1, 2, *SECRET, 3, 0]
    assert cache.match(guess, tenant="b").num_tokens <= 10
    assert cache.match(guess, tenant="a").num_tokens >= 16


def test_the_same_text_lies_there_once_whoever_has_sent_it(index: str) -> None:
    cache = make(index, "k_anonymous", k=9)
    for tenant in "abcd":
        send(cache, tenant, PROMPT)
    assert cache.num_cached_blocks <= len(PROMPT) // 4 + 1


def test_what_is_remembered_of_a_public_block_is_bounded(index: str) -> None:
    """However many tenants have computed it, some hundreds of them hit; the others compute it again and then do too."""
    cache = make(index, "public")
    tenants = [f"tenant {i}" for i in range(400)]
    for tenant in tenants:
        assert send(cache, tenant, PROMPT) == 0
        assert cache.match(PROMPT, tenant=tenant).num_tokens == len(PROMPT) - 1
    forgotten = [tenant for tenant in tenants if cache.match(PROMPT, tenant=tenant).num_tokens == 0]
    assert len(forgotten) == len(tenants) - 256
    assert send(cache, forgotten[0], PROMPT) == 0
    assert cache.match(PROMPT, tenant=forgotten[0]).num_tokens == len(PROMPT) - 1
    assert cache.match(PROMPT, tenant="stranger").num_tokens == 0
