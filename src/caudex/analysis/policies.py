"""Eviction policies on a log, through the cache's own replay."""

from __future__ import annotations

DEFAULT_POLICIES = ("lru",)
