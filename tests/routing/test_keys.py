from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from caudex import _core
from caudex.routing import text_request, token_request


@given(st.binary(max_size=600), st.binary(max_size=200), st.binary(max_size=200))
def test_requests_share_keys_exactly_as_far_as_they_share_whole_chunks(head: bytes, left: bytes, right: bytes) -> None:
    a, b = text_request(head + left), text_request(head + right)
    shared = next(
        (i for i, (x, y) in enumerate(zip(head + left, head + right, strict=False)) if x != y),
        min(len(head + left), len(head + right)),
    )
    whole = shared // 64
    equal = a.keys[: len(b.keys)] == b.keys[: len(a.keys)]
    assert equal[:whole].all()
    assert not equal[whole:].any()


def test_namespaces_share_nothing() -> None:
    text = b"x" * 640
    requests = [text_request(text, model=m, salt=s) for m, s in (("a", ""), ("b", ""), ("a", "s"), ("", "as"))]
    assert len({int(request.keys[0]) for request in requests}) == len(requests)


def test_keys_are_the_same_in_every_process() -> None:
    assert _core.root_key(b"caudex") == 0x56B8FA2E484D0F2C
    assert text_request(b"").num_tokens == 1


def test_token_keys_are_chained_by_block() -> None:
    tokens = np.arange(50, dtype=np.int32)
    keys = token_request(tokens, block_size=16).keys
    assert len(keys) == 3
    changed = tokens.copy()
    changed[20] = 7
    assert (token_request(changed, block_size=16).keys == keys).tolist() == [True, False, False]
