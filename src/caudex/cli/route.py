"""`caudex route`: an OpenAI-compatible gateway in front of several servers."""

from __future__ import annotations

import logging
import ssl
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from caudex.routing import POLICIES

if TYPE_CHECKING:
    from caudex.gateway.discovery import Source
    from caudex.gateway.gateway import Gateway


@click.command()
@click.option("--worker", "workers", multiple=True, metavar="URL", help="A server's address; may be given many times.")
@click.option("--workers-file", type=click.Path(dir_okay=False, path_type=Path), help="Addresses, one a line; watched.")
@click.option("--workers-dns", metavar="NAME:PORT", help="Every address that this name has; asked again and again.")
@click.option("--host", default="127.0.0.1", show_default=True, envvar="CAUDEX_ROUTE_HOST")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65535), envvar="CAUDEX_ROUTE_PORT")
@click.option(
    "--ext-proc-port",
    type=click.IntRange(1, 65535),
    help="Also tells Envoy where to send requests: external processing (gRPC) on this port.",
)
@click.option(
    "--ext-proc-endpoints",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Addresses that Envoy is told, the later ones to fall back on; more than one needs its override_host policy.",
)
@click.option("--policy", type=click.Choice(sorted(POLICIES)), default="cost", show_default=True)
@click.option("--tokenizer", help="The workers' tokenizer (a folder or hub id), to know prompts by their tokens.")
@click.option(
    "--kv-events",
    metavar="ADDRESS",
    help="Where workers publish KV events, as tcp://*:5557; * is the host, and +1000 the worker's port plus 1000.",
)
@click.option("--kv-replay", metavar="ADDRESS", help="Where they replay them, as tcp://*:5558.")
@click.option(
    "--rules",
    "rules_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Prompt rules to apply, or a report of `caudex analyze --json`.",
)
@click.option("--tenants", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Keys, salts and limits.")
@click.option("--worker-api-key", envvar="CAUDEX_WORKER_API_KEY", help="Key that the workers ask for.")
@click.option("--admin-key", envvar="CAUDEX_ADMIN_KEY", help="Turns the admin API on, guarded by this key.")
@click.option("--snapshot", type=click.Path(dir_okay=False, path_type=Path), help="Keeps sessions and index in a file.")
@click.option("--access-log", type=click.File("a"), help="One line of JSON a request; - for standard output.")
@click.option("--max-concurrency", default=256, show_default=True, type=click.IntRange(1), help="Requests a worker.")
@click.option("--max-queue", default=1024, show_default=True, type=click.IntRange(0), help="Requests that may wait.")
@click.option("--queue-timeout", default=60.0, show_default=True, type=click.FloatRange(0, min_open=True))
@click.option("--max-body-bytes", default=33_554_432, show_default=True, type=click.IntRange(1))
@click.option("--probe-interval", default=1.0, show_default=True, type=click.FloatRange(0, min_open=True))
@click.option("--probe-timeout", default=1.5, show_default=True, type=click.FloatRange(0, min_open=True))
@click.option("--header-timeout", default=10.0, show_default=True, type=click.FloatRange(0, min_open=True))
@click.option("--first-byte-timeout", default=600.0, show_default=True, type=click.FloatRange(0, min_open=True))
@click.option("--stream-idle-timeout", default=300.0, show_default=True, type=click.FloatRange(0, min_open=True))
@click.option("--drain-timeout", default=60.0, show_default=True, type=click.FloatRange(0))
@click.option("--tls-cert", type=click.Path(exists=True, dir_okay=False))
@click.option("--tls-key", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
def command(
    workers: tuple[str, ...],
    workers_file: Path | None,
    workers_dns: str | None,
    host: str,
    port: int,
    ext_proc_port: int | None,
    ext_proc_endpoints: int,
    tls_cert: str | None,
    tls_key: str | None,
    log_level: str,
    **options: Any,
) -> None:
    """Route OpenAI-compatible requests to the workers where their prefixes lie.

    The workers may be vLLM, SGLang, llama.cpp or Caudex servers. Ctrl-C finishes what is under way; a second one does
    not.
    """
    from caudex.gateway.serve import ExtProc, run_gateway

    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", force=True
    )
    if not (workers or workers_file or workers_dns or options["admin_key"]):
        raise click.UsageError("name at least one --worker, --workers-file or --workers-dns, or an --admin-key")
    summary = options_line(options["policy"], workers)
    try:
        run_gateway(
            _gateway(**options),
            list(workers),
            _sources(workers_file, workers_dns),
            host=host,
            port=port,
            tls=_tls_context(tls_cert, tls_key),
            ext_proc=None if ext_proc_port is None else ExtProc(ext_proc_port, ext_proc_endpoints),
            on_ready=lambda bound_host, bound_port: click.echo(
                f"caudex route: {summary} at http://{bound_host}:{bound_port}", err=True
            ),
        )
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def _gateway(
    tenants: Path | None,
    rules_path: Path | None,
    access_log: TextIO | None,
    snapshot: Path | None,
    max_concurrency: int,
    **settings: Any,
) -> Gateway:
    from caudex.gateway.access_log import AccessLog
    from caudex.gateway.gateway import Gateway
    from caudex.gateway.rules import read_rules
    from caudex.gateway.settings import GatewaySettings
    from caudex.gateway.tenants import read_tenants

    return Gateway(
        GatewaySettings(snapshot_path=snapshot, max_concurrency_per_worker=max_concurrency, **settings),
        tenants=None if tenants is None else read_tenants(tenants),
        access_log=None if access_log is None else AccessLog(access_log),
        rules=None if rules_path is None else read_rules(rules_path),
    )


def _sources(workers_file: Path | None, workers_dns: str | None) -> list[Source]:
    """Where workers come from besides the flags."""
    from caudex.gateway.discovery import DnsSource, FileSource

    sources: list[Source] = [] if workers_file is None else [FileSource(workers_file)]
    return sources if workers_dns is None else [*sources, DnsSource(workers_dns)]


def options_line(policy: str, workers: tuple[str, ...]) -> str:
    return f"policy {policy}, {len(workers)} worker{'' if len(workers) == 1 else 's'}"


def _tls_context(cert: str | None, key: str | None) -> ssl.SSLContext | None:
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise click.UsageError("TLS needs both --tls-cert and --tls-key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(cert, key)
    return context
