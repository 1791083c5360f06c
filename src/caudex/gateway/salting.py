"""Fields of a body that the gateway answers for, made plain before the body is passed on."""

from __future__ import annotations

import msgspec

from caudex.gateway.prompt import Body


def with_cache_salt(body: bytes, decoded: Body, salt: str) -> bytes:
    """The body with this `cache_salt` and no other.

    Where the client set none the field is put in front and all other bytes stay. Where it did, the object is written
    anew without it: a name may be spelt with escapes, or twice, and which one counts is for each parser to say.
    """
    if decoded.cache_salt is None and b"cache_salt" not in body and b"\\u" not in body:
        start = body.index(b"{") + 1
        rest = body[start:].lstrip()
        comma = b"" if rest.startswith(b"}") else b","
        return body[:start] + b'"cache_salt":' + msgspec.json.encode(salt) + comma + body[start:]
    fields: dict[str, object] = dict(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
    fields["cache_salt"] = salt
    return msgspec.json.encode(fields)


def with_plain_names(body: bytes) -> bytes:
    """The same object with every name once and without escapes, so that every parser reads the same fields."""
    return msgspec.json.encode(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
