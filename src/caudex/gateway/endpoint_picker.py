"""The same decisions for Envoy: external processing, by the endpoint-picker protocol of the Gateway API's inference
extension.

Envoy relays the bytes and asks here where each request should go. The answer is the worker's address, or several in the
order in which to try them, in the header `x-gateway-destination-endpoint` and in the dynamic metadata `envoy.lb`. Envoy
may name those to choose from (`envoy.lb.subset_hint`), and says with the answer which of several it came from. The
request's body must be sent here (BUFFERED or FULL_DUPLEX_STREAMED), since the prompt is in it. The answer's body
(STREAMED) may be: it tells when the request is over, and what the worker had cached; without it a request counts as
over when its answer begins.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

from envoy_data_plane.envoy.config.core.v3 import (
    HeaderMap,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ProcessingModeBodySendMode
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    ExternalProcessorBase,
    HeaderMutation,
    HeadersResponse,
    HttpBody,
    HttpHeaders,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.google.protobuf import Struct, Value
from grpclib.server import Server

from caudex.gateway.access_log import AccessRecord
from caudex.gateway.attempt import read_usage
from caudex.gateway.grpc_health import GrpcHealth
from caudex.gateway.http_messages import Header, HttpError, HttpRequest, error_body
from caudex.routing import Candidate, Flight, RouteRequest

if TYPE_CHECKING:
    from caudex.gateway.gateway import Gateway

DESTINATION = "x-gateway-destination-endpoint"
SERVED = f"{DESTINATION}-served"
SUBSET = f"{DESTINATION}-subset"
_METADATA_NAMESPACE = "envoy.lb"
_SUBSET_NAMESPACE = "envoy.lb.subset_hint"
_MAX_PIECE = 62_000
"""Bytes of body in one message to Envoy, whose own limit is 64 KB."""


class EndpointPicker(ExternalProcessorBase):  # type: ignore[misc]
    """A gRPC service beside the gateway, with the same workers, policy, tenants and metrics, and the health service
    beside it. One call a request, answered with up to `num_endpoints` addresses."""

    def __init__(self, gateway: Gateway, num_endpoints: int = 1) -> None:
        super().__init__()
        self._gateway = gateway
        self._num_endpoints = num_endpoints
        self._server = Server([self, GrpcHealth(self._is_ready)])

    async def start(self, host: str, port: int) -> None:
        await self._server.start(host, port)

    async def close(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def process(self, messages: AsyncIterator[ProcessingRequest]) -> AsyncIterator[ProcessingResponse]:
        exchange = _Exchange(self._gateway, self._num_endpoints)
        try:
            async for message in messages:
                for answer in exchange.take(message):
                    yield answer
        finally:
            exchange.close()

    def _is_ready(self) -> bool:
        """It knows workers and is not about to end. That none of them is up is for its answers to say: 503."""
        return len(self._gateway.fleet) > 0 and not self._gateway.closing


class _Exchange:
    """One request's way through Envoy. Whatever happens its flight lands once, in `close`."""

    def __init__(self, gateway: Gateway, num_endpoints: int) -> None:
        self._gateway = gateway
        self._num_endpoints = num_endpoints
        self._allowed: frozenset[int] | None = None
        self._headers: list[Header] = []
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._duplex = False
        self._request: HttpRequest | None = None
        self._record: AccessRecord | None = None
        self._features: RouteRequest | None = None
        self._candidates: list[Candidate] = []
        self._flight: Flight | None = None
        self._tail = b""

    def take(self, message: ProcessingRequest) -> Iterator[ProcessingResponse]:
        """The answers to one message of Envoy's, in order; none while a streamed body is still being read."""
        if message.protocol_config is not None:
            mode = message.protocol_config.request_body_mode
            self._duplex = mode is ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED
        hint = _metadata(message, _SUBSET_NAMESPACE, SUBSET)
        if hint is not None:
            self._allowed = self._slots(_strings(hint))
        if message.request_headers is not None:
            yield from self._request_headers(message.request_headers)
        elif message.request_body is not None:
            yield from self._request_body(message.request_body)
        elif message.response_headers is not None:
            served = _metadata(message, _METADATA_NAMESPACE, SERVED)
            self._answered(_plain(message.response_headers.headers or HeaderMap()), _strings(served))
            yield ProcessingResponse(response_headers=HeadersResponse())
        elif message.response_body is not None:
            self._watch(message.response_body.body)
            yield ProcessingResponse(response_body=BodyResponse())
        elif message.request_trailers is not None:
            yield ProcessingResponse(request_trailers=TrailersResponse())
        elif message.response_trailers is not None:
            yield ProcessingResponse(response_trailers=TrailersResponse())

    def close(self) -> None:
        gateway, request, record = self._gateway, self._request, self._record
        if request is None or record is None:
            return
        if self._flight is not None:
            gateway.fleet.land(self._flight, time.monotonic())
            usage = read_usage(self._tail)
            if usage is not None:
                record.reported_cached_tokens = usage.cached_tokens
                gateway.decisions.compare(self._candidates[0], record.prompt_tokens, usage)
        gateway.write_down(record, request)

    def _request_headers(self, message: HttpHeaders) -> Iterator[ProcessingResponse]:
        self._headers = _plain(message.headers or HeaderMap())
        if message.end_of_stream:
            yield from self._decided(lambda common: ProcessingResponse(request_headers=HeadersResponse(common)))
        elif not self._duplex:
            yield ProcessingResponse(request_headers=HeadersResponse())

    def _request_body(self, message: HttpBody) -> Iterator[ProcessingResponse]:
        self._num_bytes += len(message.body)
        if self._num_bytes > self._gateway.settings.max_body_bytes:
            limit = self._gateway.settings.max_body_bytes
            yield _refusal(HttpError(413, f"the body is longer than {limit} bytes"))
            return
        self._pieces.append(message.body)
        if not message.end_of_stream:
            return
        if self._duplex:
            yield from self._decided(lambda common: ProcessingResponse(request_headers=HeadersResponse(common)))
        else:
            yield from self._decided(lambda common: ProcessingResponse(request_body=BodyResponse(common)))

    def _decided(self, wrap: Callable[[CommonResponse], ProcessingResponse]) -> Iterator[ProcessingResponse]:
        sent = b"".join(self._pieces)
        request = self._request = self._read(sent)
        record = self._record = self._gateway.access_record(request, "envoy")
        try:
            destination = self._choose(request, record)
        except HttpError as error:
            record.status, record.error = error.status, str(error)
            yield _refusal(error)
            return
        common = CommonResponse(header_mutation=self._mutation(destination), clear_route_cache=True)
        if not self._duplex and request.body != sent:
            common.body_mutation = BodyMutation(body=request.body)
            _set(common.header_mutation, "content-length", str(len(request.body)))
        response = wrap(common)
        chosen = Struct(fields={DESTINATION: Value(string_value=destination)})
        response.dynamic_metadata = Struct(fields={_METADATA_NAMESPACE: Value(struct_value=chosen)})
        yield response
        if self._duplex and self._pieces:
            yield from _streamed(request.body)

    def _mutation(self, destination: str) -> HeaderMutation:
        """Where the request goes; with tenants or a worker's key, its client's key goes no further."""
        mutation, worker_key = HeaderMutation(), self._gateway.settings.worker_api_key
        _set(mutation, DESTINATION, destination)
        if worker_key is not None:
            _set(mutation, "authorization", f"Bearer {worker_key}")
        elif not self._gateway.tenants.open:
            mutation.remove_headers.append("authorization")
        return mutation

    def _read(self, body: bytes) -> HttpRequest:
        named = dict(self._headers)
        method, path = named.get(b":method", b"GET").decode("latin-1"), named.get(b":path", b"/")
        return HttpRequest(method, path, self._headers, True, body=body, received_at=time.monotonic())

    def _choose(self, request: HttpRequest, record: AccessRecord) -> str:
        """The addresses of the workers for this request, whose flight to the first begins; HttpError if it may not be
        sent."""
        gateway = self._gateway
        asked = gateway.relay.read(request, record)
        self._features = asked.features
        self._candidates = gateway.decisions.shortlist(
            asked.features, self._num_endpoints, home=asked.home, allowed=self._allowed
        )
        if not self._candidates:
            raise HttpError(503, "no worker is available", "overloaded_error", 1.0)
        record.reason, record.attempts = self._candidates[0].reason.label, 1
        self._send()
        workers = [gateway.workers.at(candidate.worker) for candidate in self._candidates]
        return ",".join(worker.pool.endpoint.authority.decode("ascii") for worker in workers)

    def _send(self) -> None:
        """The request is on its way to the first of the candidates."""
        gateway, candidate, now = self._gateway, self._candidates[0], time.monotonic()
        assert self._features is not None
        assert self._record is not None
        cached = candidate.cached_tokens or 0
        self._record.worker = gateway.workers.at(candidate.worker).url
        self._record.predicted_cached_tokens = cached
        gateway.policy.record(self._features, candidate.worker, now)
        self._flight = gateway.fleet.dispatch(candidate.worker, self._features.num_tokens, cached, now)

    def _answered(self, headers: list[Header], served: list[str]) -> None:
        if self._flight is None or self._record is None:
            return
        self._record.status = int(dict(headers).get(b":status", b"0"))
        self._follow(self._slots(served))
        self._gateway.fleet.first_token(self._flight, time.monotonic())

    def _follow(self, served: frozenset[int]) -> None:
        """Where Envoy had to go on to a later candidate, the request is that one's."""
        while self._flight is not None and served and self._candidates[0].worker not in served:
            if len(self._candidates) == 1:
                return
            self._gateway.metrics.retries.labels(self._gateway.workers.at(self._candidates[0].worker).url).inc()
            self._gateway.fleet.land(self._flight, time.monotonic())
            del self._candidates[0]
            assert self._record is not None
            self._record.attempts += 1
            self._send()

    def _slots(self, addresses: list[str]) -> frozenset[int]:
        """The workers at these addresses; others, and empty names, are nobody's."""
        wanted = {address.encode("utf-8", "replace") for address in addresses}
        return frozenset(w.slot for w in self._gateway.workers.all() if w.pool.endpoint.authority in wanted)

    def _watch(self, piece: bytes) -> None:
        """Keeps the end of the answer, where the worker says what it had cached."""
        self._tail = (self._tail + piece)[-4_096:]


def _metadata(message: ProcessingRequest, namespace: str, name: str) -> Value | None:
    """A field of the filter metadata that Envoy sent along, if it did."""
    context = message.metadata_context
    fields = None if context is None else context.filter_metadata.get(namespace)
    return None if fields is None else fields.fields.get(name)


def _strings(value: Value | None) -> list[str]:
    """A list of strings, or one string with commas between them."""
    if value is None:
        return []
    if value.list_value is not None:
        return [item.string_value for item in value.list_value.values if item.string_value]
    return [part.strip() for part in (value.string_value or "").split(",") if part.strip()]


def _plain(headers: HeaderMap) -> list[Header]:
    return [
        (header.key.lower().encode("latin-1"), header.raw_value or header.value.encode()) for header in headers.headers
    ]


def _set(mutation: HeaderMutation, name: str, value: str) -> None:
    option = HeaderValueOption(
        header=HeaderValue(key=name, raw_value=value.encode("latin-1")),
        append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )
    mutation.set_headers.append(option)


def _streamed(body: bytes) -> Iterator[ProcessingResponse]:
    for start in range(0, max(1, len(body)), _MAX_PIECE):
        piece = body[start : start + _MAX_PIECE]
        streamed = StreamedBodyResponse(body=piece, end_of_stream=start + _MAX_PIECE >= len(body))
        common = CommonResponse(body_mutation=BodyMutation(streamed_response=streamed))
        yield ProcessingResponse(request_body=BodyResponse(common))


def _refusal(error: HttpError) -> ProcessingResponse:
    headers = HeaderMutation()
    for name, value in [(b"content-type", b"application/json"), *error.headers()]:
        _set(headers, name.decode(), value.decode())
    return ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=StatusCode(error.status)),
            headers=headers,
            body=error_body(str(error), error.kind, error.status),
        )
    )
