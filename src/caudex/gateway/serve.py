"""Running a gateway until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from caudex.gateway.discovery import Source
from caudex.gateway.gateway import Gateway

if TYPE_CHECKING:
    from caudex.gateway.endpoint_picker import EndpointPicker

log = logging.getLogger("caudex.gateway")

_BACKLOG = 4_096


@dataclass(frozen=True, slots=True)
class ExtProc:
    """Where Envoy asks which worker to send a request to, and how many it is told, the later ones to fall back on."""

    port: int
    num_endpoints: int = 1


def run_gateway(
    gateway: Gateway,
    worker_urls: list[str],
    sources: Sequence[Source] = (),
    *,
    host: str,
    port: int,
    tls: ssl.SSLContext | None = None,
    ext_proc: ExtProc | None = None,
    on_ready: Callable[[str, int], None] = lambda host, port: None,
) -> None:
    """Serves until SIGINT or SIGTERM, then finishes what is under way; a second signal does not wait.

    OSError if the address cannot be listened on.
    """
    _raise_file_limit()
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        import uvloop

        loop_factory = uvloop.new_event_loop
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_serve(gateway, worker_urls, sources, host, port, tls, ext_proc, on_ready))
    finally:
        gc.unfreeze()


async def _serve(
    gateway: Gateway,
    worker_urls: list[str],
    sources: Sequence[Source],
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    ext_proc: ExtProc | None,
    on_ready: Callable[[str, int], None],
) -> None:
    loop = asyncio.get_running_loop()
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    picker = None if ext_proc is None else await _endpoint_picker(gateway, host, ext_proc)
    server = await loop.create_server(gateway.connection, host, port, ssl=tls, backlog=_BACKLOG)
    await gateway.start(worker_urls, sources)
    # What is there now stays; the collector need not look at it again, and so takes no longer than a request does.
    gc.freeze()
    on_ready(host, server.sockets[0].getsockname()[1])
    await stop.wait()
    server.close()
    finishing = asyncio.create_task(gateway.shutdown())
    hurrying = asyncio.create_task(stop_now.wait())
    await asyncio.wait({finishing, hurrying}, return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    if not finishing.done():
        finishing.cancel()
        await gateway.stop()
    if picker is not None:
        await picker.close()


async def _endpoint_picker(gateway: Gateway, host: str, ext_proc: ExtProc) -> EndpointPicker:
    try:
        from caudex.gateway.endpoint_picker import EndpointPicker
    except ImportError as error:
        raise ValueError("answering Envoy needs its interfaces: pip install 'caudex[envoy]'") from error
    picker = EndpointPicker(gateway, ext_proc.num_endpoints)
    await picker.start(host, ext_proc.port)
    return picker


def _raise_file_limit() -> None:
    """A connection is a file; the soft limit is often 1,024 where the hard one is far higher."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else hard
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
