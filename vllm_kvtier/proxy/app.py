"""The HTTP side: routes, reading a client's request, writing its answer, noticing that it left.

POST /v1/chat/completions and /v1/completions generate. GET /v1/models passes on what a decode engine says,
/health is 200 while one of them is well, /kvtier/state shows engines and counters. POST /kvtier/query says
what the engines hold for a prompt (see ``vllm_kvtier.proxy.query``). Errors have OpenAI's form everywhere.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import anyio
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from vllm_kvtier.proxy import answers
from vllm_kvtier.proxy.bodies import BadRequest, ClientRequest, Route
from vllm_kvtier.proxy.config import ProxyConfig
from vllm_kvtier.proxy.core import ProxyCore
from vllm_kvtier.proxy.deadlines import time_limit
from vllm_kvtier.proxy.engines import EngineFailure
from vllm_kvtier.proxy.exchange import Answer, Exchange
from vllm_kvtier.proxy.query import Query, read_query
from vllm_kvtier.proxy.release import ReleaseCall

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")

# Of a client's headers, those that engines get. Authorization: they, not the proxy, check API keys.
_FORWARDED_HEADERS = ("authorization", "traceparent", "tracestate")

# For answers to a request whose body was not read: the server would else read on for as long as it is sent.
_CLOSING = {"connection": "close"}
_LINGER_SECONDS = 1.0


class ClientGone(Exception):
    """The client closed its connection, or takes no more of its answer."""


def create_app(config: ProxyConfig, *, release: ReleaseCall | None = None) -> FastAPI:
    """The proxy as an ASGI application. ``release`` replaces the call that releases exports (for tests).

    Raises ConfigError when it starts if the salt secret or the cluster key cannot be used.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.core = ProxyCore(config, release)
        try:
            yield
        finally:
            await app.state.core.aclose()

    app = FastAPI(title="vllm-kvtier proxy", lifespan=lifespan, openapi_url=None)

    @app.post(Route.CHAT.value)
    async def chat(request: Request) -> Response:
        return _GeneratingResponse(request.app.state.core, request, Route.CHAT)

    @app.post(Route.COMPLETIONS.value)
    async def completions(request: Request) -> Response:
        return _GeneratingResponse(request.app.state.core, request, Route.COMPLETIONS)

    @app.post("/kvtier/query")
    async def query(request: Request) -> Response:
        return _QueryResponse(request.app.state.core, request)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}."
        body = answers.error_body(message, "invalid_request_error", error.status_code)
        return Response(body, error.status_code, {**(error.headers or {}), **_CLOSING}, "application/json")

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        return await _models(request.app.state.core, request)

    @app.get("/health")
    async def health(request: Request) -> Response:
        """200 while at least one D is well, which is enough to serve."""
        core: ProxyCore = request.app.state.core
        well = {"prefill": sum(e.well for e in core.prefill), "decode": sum(e.well for e in core.decode)}
        return JSONResponse(well, status_code=200 if well["decode"] else 503)

    @app.get("/kvtier/state")
    async def state(request: Request) -> Response:
        return JSONResponse(request.app.state.core.state())

    return app


async def _models(core: ProxyCore, request: Request) -> Response:
    headers = _engine_headers(request, _request_id(request))
    for engine in sorted(core.decode, key=lambda engine: not engine.well):
        try:
            reply = await engine.ask("GET", "/v1/models", None, headers, core.config.probe_timeout)
            async with aclosing(reply):
                body = await reply.read(core.config.max_event_bytes, core.config.probe_timeout)
        except EngineFailure as failure:
            engine.set_aside(str(failure))
            continue
        return Response(body, reply.status, media_type=reply.headers.get("content-type"))
    body = answers.error_body("No decode engine could be reached.", "upstream_error", 503)
    return Response(body, 503, media_type="application/json")


class _WorkingResponse(Response):
    """Does all the work of one POST request as a task beside another that waits for the client to leave.

    Starlette starts a response only when the handler returns, and looks for a client that left only then;
    the wait for P and for D's first byte would go unobserved.
    """

    def __init__(self, core: ProxyCore, request: Request):
        super().__init__()
        self._core = core
        self._request = request
        self._id = _request_id(request)

    async def __call__(self, scope, receive, send) -> None:
        try:
            body = await self._read_body(receive)
        except BadRequest as error:
            await self._refuse_unread(receive, send, _refusal(error, _CLOSING))
            return
        except ClientGone:
            return
        work = asyncio.create_task(self._work(body, send), name=f"request {self._id}")
        gone = asyncio.create_task(_until_gone(receive), name=f"client of {self._id}")
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._core.count("clients_left")
        finally:
            # Also when the server cancels this: then both end here.
            for task in (work, gone):
                task.cancel()
            await asyncio.wait((work, gone))
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _work(self, body: bytes, send) -> None:
        try:
            try:
                answer = await self._answer(body)
            except BadRequest as error:
                answer = _refusal(error)
            await self._send(send, answer)
        except ClientGone:
            self._core.count("clients_left")

    async def _answer(self, body: bytes) -> Answer:
        """Raises BadRequest."""
        raise NotImplementedError

    async def _read_body(self, receive) -> bytes:
        """Raises BadRequest if it is too large or too slow, ClientGone if the client leaves."""
        limit = self._core.config.max_body_bytes
        too_large = BadRequest(f"The request body exceeds {limit} bytes.", status=413)
        length = self._request.headers.get("content-length", "")
        if length.isdigit() and (len(length) > 18 or int(length) > limit):
            raise too_large
        body = bytearray()
        try:
            async with time_limit(self._core.config.client_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError as error:
            raise BadRequest("The request body took too long to arrive.", status=408) from error

    async def _refuse_unread(self, receive, send, answer: Answer) -> None:
        """Answer before the body is all there, and close.

        For a moment what is still being sent is taken and dropped: to close at once would reset the
        connection, and the client might never see why (RFC 9112, 9.6).
        """
        try:
            await self._put(send, self._start(answer))
            await self._put(send, {"type": "http.response.body", "body": answer.body, "more_body": True})
            with anyio.move_on_after(_LINGER_SECONDS):
                while (await receive()).get("more_body", False):
                    continue
            await self._put(send, {"type": "http.response.body", "body": b""})
        except ClientGone:
            self._core.count("clients_left")

    def _start(self, answer: Answer) -> dict:
        headers = {**answer.headers, "x-request-id": self._id}
        if answer.pieces is None:
            headers["content-length"] = str(len(answer.body))
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        return {"type": "http.response.start", "status": answer.status, "headers": raw}

    async def _send(self, send, answer: Answer) -> None:
        start = self._start(answer)
        if answer.pieces is None or answer.reply is None:
            await self._put(send, start)
            await self._put(send, {"type": "http.response.body", "body": answer.body})
            return
        async with aclosing(answer.reply), aclosing(answer.pieces) as pieces:
            await self._put(send, start)
            async for piece in pieces:
                await self._put(send, {"type": "http.response.body", "body": piece, "more_body": True})
            await self._put(send, {"type": "http.response.body", "body": b""})

    async def _put(self, send: Callable[[dict], Awaitable[None]], message: dict) -> None:
        try:
            async with time_limit(self._core.config.client_timeout):
                await send(message)
        except (TimeoutError, OSError) as error:
            raise ClientGone from error


class _GeneratingResponse(_WorkingResponse):
    """A request to generate."""

    def __init__(self, core: ProxyCore, request: Request, route: Route):
        super().__init__(core, request)
        self._route = route

    async def _answer(self, body: bytes) -> Answer:
        headers = self._request.headers
        exchange = Exchange(
            self._core,
            ClientRequest(self._route, body, header_conversation_id=headers.get("x-conversation-id") or None),
            self._core.tenants.identify(headers),
            _engine_headers(self._request, self._id),
            wants_report=self._core.config.allow_report and headers.get("x-kvtier-report") == "1",
        )
        return await exchange.answer()


class _QueryResponse(_WorkingResponse):
    """A question about what the engines hold."""

    async def _answer(self, body: bytes) -> Answer:
        tenant = self._core.tenants.identify(self._request.headers)
        headers = _engine_headers(self._request, self._id)
        return await Query(self._core, read_query(body), tenant, headers).answer()


async def _until_gone(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def _request_id(request: Request) -> str:
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _engine_headers(request: Request, request_id: str) -> dict[str, str]:
    headers = {name: request.headers[name] for name in _FORWARDED_HEADERS if name in request.headers}
    return headers | {"x-request-id": request_id}


def _refusal(error: BadRequest, headers: dict[str, str] | None = None) -> Answer:
    body = answers.error_body(str(error), "invalid_request_error", error.status, error.param)
    return Answer(error.status, {"content-type": "application/json", **(headers or {})}, body)
