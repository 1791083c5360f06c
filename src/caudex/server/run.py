"""The life of a server process: take the port, load the model, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn

from caudex.engine.config import EngineConfig
from caudex.engine.engine import Engine
from caudex.engine.loading import Progress
from caudex.server.app import create_app
from caudex.server.connection import GuardedProtocol, bound_silence
from caudex.server.settings import ServerSettings

log = logging.getLogger("caudex.server")

KEEP_ALIVE_SECONDS = 65
"""Longer than the minute for which clients and load balancers commonly keep idle connections: who closes first matters,
since a request sent on a connection that is being closed is lost."""

BACKLOG = 2048
"""Connections that may wait to be accepted."""

FAREWELL_SECONDS = 1.0
"""How long a server that stops at once waits for clients to take the ends of their answers."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen. Port 0 takes a free one. A certificate and its key turn on TLS."""

    host: str = "127.0.0.1"
    port: int = 8000
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None

    @property
    def scheme(self) -> str:
        return "http" if self.ssl_certfile is None else "https"


class DrainingServer(uvicorn.Server):
    """uvicorn with our manner of stopping: the first signal takes no more requests and finishes those it has, the
    second calls `cut_short`, which is to end them all, and stops. Calls `on_ready` when the port answers.

    Unlike its parent it does not raise the signal again afterwards, since the engine is still to be shut down.
    """

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None], cut_short: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._cut_short = cut_short

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:
            await self._end_at_once()
            await self.lifespan.shutdown()

    async def _end_at_once(self) -> None:
        """End what still runs as an answer ends: cancelled tasks would fill the log with tracebacks instead."""
        await asyncio.to_thread(self._cut_short)
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=FAREWELL_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=FAREWELL_SECONDS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self.handle_exit) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            log.warning("stopping at once")
        else:
            self.should_exit = True
            log.info("finishing %d requests; press Ctrl-C again to stop at once", len(self.server_state.tasks))


def serve(
    config: EngineConfig,
    settings: ServerSettings,
    address: Address,
    *,
    progress: Progress | None = None,
    on_ready: Callable[[str, str], None],
) -> None:
    """Serve until a signal says stop. Returns when what was running has finished, or was cut short by a second signal.

    Args:
        config: of the engine.
        settings: of the HTTP face.
        address: where to listen. The port is taken before the model is loaded, and answers when it has been.
        progress: told how far loading is.
        on_ready: called with the server's URL and the model's name when the server answers.

    Raises:
        OSError: the port cannot be taken.
        ValueError, FileNotFoundError: the model or the certificate cannot be used; see Engine.load and Service.
    """
    check_certificate(address)
    with listening_socket(address) as listener:
        bound_silence(listener, settings.client_timeout)
        with sigterm_as_interrupt():
            engine = Engine.load(config, progress)
        listen(listener, address)
        gc.collect()
        gc.freeze()  # What loading left lives as long as the process: no collection need look at it again.
        engine.start()
        finished = False
        try:
            server = draining_server(engine, settings, address, listener, on_ready)
            server.run(sockets=[listener])
            finished = not server.force_exit
        finally:
            engine.shutdown(drain=finished)


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Within this context SIGTERM ends what runs as Ctrl-C does: it cleans up, a half converted model included."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def draining_server(
    engine: Engine,
    settings: ServerSettings,
    address: Address,
    listener: socket.socket,
    on_ready: Callable[[str, str], None],
) -> DrainingServer:
    """A server of a started engine, to `run` on the bound `listener`."""
    url = f"{address.scheme}://{url_host(address.host)}:{listener.getsockname()[1]}"
    names = settings.served_model_names or (engine.model_name,)
    return DrainingServer(
        server_config(engine, settings, address),
        on_ready=lambda: on_ready(url, names[0]),
        cut_short=lambda: engine.shutdown(drain=False),
    )


def server_config(engine: Engine, settings: ServerSettings, address: Address) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(engine, settings),
        http=partial(GuardedProtocol, client_timeout=settings.client_timeout),  # type: ignore[arg-type]
        backlog=BACKLOG,
        ws="none",
        lifespan="on",
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ssl_certfile=address.ssl_certfile,
        ssl_keyfile=address.ssl_keyfile,
    )


def listening_socket(address: Address) -> socket.socket:
    """A socket bound to the address; it answers once the server listens on it.

    Raises:
        OSError: the address is taken or not this machine's; the message names it.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address.host, address.port))
    except (OSError, OverflowError) as exc:
        listener.close()
        raise cannot_listen(address, exc) from exc
    return listener


def check_certificate(address: Address) -> None:
    """See that what TLS needs can be used, before a model is loaded.

    Raises:
        ValueError: one of the two files is no certificate or no key that belongs to it, or the certificate is missing.
    """
    if address.ssl_certfile is None:
        if address.ssl_keyfile is not None:
            raise ValueError(f"ssl_keyfile is {address.ssl_keyfile}, but there is no ssl_certfile that it belongs to")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(address.ssl_certfile, address.ssl_keyfile, password="")
    except OSError as exc:
        raise ValueError(
            f"{address.ssl_certfile} (certificate) and {address.ssl_keyfile or 'the same file'} (private key) cannot "
            f"be used for TLS: {exc.strerror or exc}; both are to be in PEM, and the key without a password"
        ) from exc


def listen(listener: socket.socket, address: Address) -> None:
    """Let a bound socket answer. Two that load side by side can both be bound to a port; only one comes to listen.

    Raises:
        OSError: the other was first.
    """
    try:
        listener.listen(BACKLOG)
    except OSError as exc:
        raise cannot_listen(address, exc) from exc


def cannot_listen(address: Address, cause: OSError | OverflowError) -> OSError:
    reason = cause.strerror if isinstance(cause, OSError) else str(cause)
    return OSError(f"cannot listen on {address.host} port {address.port}: {reason}; choose another --port")


def url_host(host: str) -> str:
    """A host as a browser on this machine would write it."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
