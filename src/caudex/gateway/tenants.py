"""Tenants: API keys, cache salts that the gateway sets, limits."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import msgspec

from caudex.gateway.http_messages import HttpError


class TenantConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One entry of a tenants file. Limits of 0 are none."""

    name: str
    keys: list[str]
    salt: str | None = None
    max_concurrency: int = 0
    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0


class TenantsFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    tenants: list[TenantConfig]


class TokenBucket:
    """Refills at `per_minute` a minute, holds at most one minute's worth. May go into debt for one large request."""

    def __init__(self, per_minute: float) -> None:
        self._rate = per_minute / 60.0
        self._capacity = per_minute
        self._level = per_minute
        self._at = 0.0

    def wait_for(self, now: float) -> float:
        """Seconds until something may be taken; 0 if now."""
        self._level = min(self._capacity, self._level + max(0.0, now - self._at) * self._rate)
        self._at = now
        return 0.0 if self._level > 0 else (1.0 - self._level) / self._rate

    def take(self, amount: float) -> None:
        self._level -= amount


class Tenant:
    """A tenant's limits and what it has under way."""

    def __init__(self, config: TenantConfig) -> None:
        self.name = config.name
        self.salt = config.salt
        self.in_flight = 0
        self._max_concurrency = config.max_concurrency
        self._requests = TokenBucket(config.requests_per_minute) if config.requests_per_minute > 0 else None
        self._tokens = TokenBucket(config.tokens_per_minute) if config.tokens_per_minute > 0 else None

    def cache_salt(self, wanted: str) -> str:
        """The salt for a worker: the tenant's own, and the client's within it, so nobody reaches another's."""
        if self.salt is None:
            return wanted
        digest = hmac.new(self.salt.encode(), f"{self.name}\0{wanted}".encode(), hashlib.sha256)
        return digest.hexdigest()

    def check(self, num_tokens: int, now: float) -> None:
        """Counts a request in, or raises HttpError 429 with the time to wait."""
        if self._max_concurrency and self.in_flight >= self._max_concurrency:
            raise HttpError(
                429, f"{self.in_flight} requests of {self.name} are running already", "rate_limit_error", 1.0
            )
        waits = [bucket.wait_for(now) for bucket in (self._requests, self._tokens) if bucket is not None]
        if max(waits, default=0.0) > 0:
            raise HttpError(429, f"{self.name} has used up its rate limit", "rate_limit_error", max(waits))
        if self._requests is not None:
            self._requests.take(1.0)
        if self._tokens is not None:
            self._tokens.take(float(num_tokens))


class Tenants:
    """Tenants by API key. Keys are kept as hashes, so a look-up tells nothing of how much of a key was right."""

    def __init__(self, configs: list[TenantConfig]) -> None:
        self._by_key: dict[bytes, Tenant] = {}
        names: set[str] = set()
        for config in configs:
            if config.name in names:
                raise ValueError(f"tenant {config.name!r} is there twice")
            names.add(config.name)
            tenant = Tenant(config)
            for key in config.keys:
                if self._by_key.setdefault(_digest(key), tenant) is not tenant:
                    raise ValueError(f"a key of tenant {config.name!r} is another tenant's too")
        self._anonymous = None if configs else Tenant(TenantConfig("", []))

    @property
    def open(self) -> bool:
        """Whether no key is asked for."""
        return self._anonymous is not None

    def authenticate(self, authorization: bytes | None) -> Tenant:
        """The tenant whose key was given; HttpError 401 otherwise."""
        if self._anonymous is not None:
            return self._anonymous
        scheme, _, key = (authorization or b"").decode("latin-1").partition(" ")
        tenant = self._by_key.get(_digest(key.strip())) if scheme.lower() == "bearer" else None
        if tenant is None:
            raise HttpError(401, "no valid API key was given (Authorization: Bearer KEY)", "authentication_error")
        return tenant


def read_tenants(path: Path) -> Tenants:
    """Reads a JSON or TOML file of tenants; ValueError names what is wrong with it."""
    try:
        decode = msgspec.toml.decode if path.suffix == ".toml" else msgspec.json.decode
        return Tenants(decode(path.read_bytes(), type=TenantsFile).tenants)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: {error}") from error


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
