"""Workers from a file that is watched, or from DNS."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import Protocol

from caudex.gateway.upstream_pool import parse_endpoint
from caudex.gateway.workers import Workers

log = logging.getLogger("caudex.gateway")


class Source(Protocol):
    """Where addresses come from. `interval` is the time between two looks, in seconds."""

    interval: float

    async def addresses(self) -> set[str]:
        """All workers that there should be; OSError if that cannot be told now."""
        ...


class FileSource:
    """One address a line; empty lines and what follows a # do not count.

    A change counts once two looks in a row have found the same: a file that is just being written is empty, or ends
    within an address, and workers must not be drained for that.
    """

    interval = 1.0

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_seen: str | None = None
        self._settled = ""

    async def addresses(self) -> set[str]:
        text = self._path.read_text()
        if self._last_seen in (None, text):
            self._settled = text
        self._last_seen = text
        lines = (line.partition("#")[0].strip() for line in self._settled.splitlines())
        return {line for line in lines if line}


class DnsSource:
    """All addresses of a name, such as a headless service's: `host:port`."""

    interval = 5.0

    def __init__(self, name: str) -> None:
        endpoint = parse_endpoint(name)
        self._host, self._port, self._scheme = endpoint.host, endpoint.port, "https" if endpoint.tls else "http"

    async def addresses(self) -> set[str]:
        found = await asyncio.get_running_loop().getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        hosts = {str(address[4][0]) for address in found}
        return {f"{self._scheme}://{f'[{host}]' if ':' in host else host}:{self._port}" for host in hosts}


async def follow(source: Source, workers: Workers) -> None:
    """Adds workers that a source names and drains and removes those it no longer names; never those of others.

    A source that cannot be read, or an address that is none, is logged and changes nothing.
    """
    mine: set[str] = set()
    removals: set[asyncio.Task[None]] = set()
    complaint = ""
    while True:
        try:
            wanted = {parse_endpoint(address).url for address in await source.addresses()}
        except (OSError, ValueError) as error:
            if str(error) != complaint:
                log.warning("workers stay as they are: %s", error)
            complaint = str(error)
        else:
            complaint = ""
            for url in wanted - mine:
                workers.add(url)
            for url in mine - wanted:
                removal = asyncio.create_task(workers.drain_and_remove(url))
                removals.add(removal)
                removal.add_done_callback(removals.discard)
            mine = wanted
        await asyncio.sleep(source.interval)
