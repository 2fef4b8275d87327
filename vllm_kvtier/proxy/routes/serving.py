"""Serve one request over ASGI: read its body, write its answer, detect that the client left, count and log it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from vllm_kvtier.logs import get_logger, unlimited
from vllm_kvtier.proxy.core import ProxyCore
from vllm_kvtier.proxy.deadlines import time_limit
from vllm_kvtier.proxy.messages.buffers import FREE_BYTES, BuffersFull
from vllm_kvtier.proxy.messages.incoming_request import Incoming
from vllm_kvtier.proxy.messages.request_bodies import BadRequest
from vllm_kvtier.proxy.routes.client_answer import Answer, AnswerBroken, memory_full, refusal

logger = get_logger(__name__)
access = get_logger("vllm_kvtier.proxy.access")

# For answers to a request whose body was not read; otherwise the server would read the whole body.
CLOSING = {"connection": "close"}
_DISCARD_SECONDS = 1.0

#: Pages that monitoring reads often.
QUIET_ROUTES = ("/health", "/ready", "/metrics")

Send = Callable[[dict], Awaitable[None]]
Receive = Callable[[], Awaitable[dict]]
#: Answers a body, and adds fields for the access log to the second argument. Raises BadRequest.
Work = Callable[[bytes, dict[str, object]], Awaitable[Answer]]


class ClientGone(Exception):
    """The client closed its connection or stopped reading its answer."""


class Serving:
    """Runs the work of one request in a task, beside a task that waits for the client to leave.

    Otherwise a client that leaves would not be noticed while the request waits for an engine.
    """

    def __init__(self, core: ProxyCore, incoming: Incoming, route: str, work: Work | Answer):
        """``route``: its name in the metrics. ``work``: an Answer if the request is refused whatever its body is."""
        self._core = core
        self._incoming = incoming
        self._route = route
        self._work = work
        self._trace: dict[str, object] = {}
        self._first: float | None = None
        self._began = time.monotonic()
        self._outcome = "failed"
        self._status = 0
        self._body = b""

    async def run(self, receive: Receive, send: Send) -> None:
        if isinstance(self._work, Answer):
            await self._refuse(receive, send, self._work)
            return
        try:
            self._body = await self._read_body(receive)
        except BadRequest as error:
            await self._refuse(receive, send, bad_request(error, CLOSING))
            return
        except BuffersFull as error:
            logger.warning("kvtier: proxy: max_buffered_bytes is used up (%s); the client gets 503", error)
            self._core.count("memory_full")
            full = memory_full()
            full.headers |= CLOSING
            await self._refuse(receive, send, full)
            return
        except ClientGone:
            self._finish("client_left")
            return
        self._began = time.monotonic()
        work = asyncio.create_task(self._serve(send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._outcome = "client_left"
        finally:
            # Also if the server cancels this task.
            for task in (work, gone):
                task.cancel()
            await asyncio.wait((work, gone))
            self._finish(self._outcome)
        if not work.cancelled() and (error := work.exception()) is not None and not isinstance(error, AnswerBroken):
            raise error

    async def _refuse(self, receive: Receive, send: Send, answer: Answer) -> None:
        """Answer before the whole body has arrived, and close.

        More of the body is read and discarded for a moment. Closing at once would reset the connection, and the client
        might not see the answer (RFC 9112, 9.6).
        """
        try:
            await self._put(send, self._start(answer))
            await self._put(send, {"type": "http.response.body", "body": answer.body, "more_body": True})
            try:
                async with time_limit(_DISCARD_SECONDS):
                    while (await receive()).get("more_body", False):
                        continue
            except TimeoutError:
                pass
            await self._put(send, {"type": "http.response.body", "body": b""})
            self._finish(_outcome(answer))
        except ClientGone:
            self._finish("client_left")

    async def _serve(self, send: Send) -> None:
        try:
            try:
                work = self._work(self._body, self._trace)
                self._body = b""  # ``work`` drops it when it has the beginning of an answer
                answer = await work
                self._incoming.body_held.release()
            except BadRequest as error:
                answer = bad_request(error)
            except Exception:
                logger.exception("kvtier: proxy: internal error; the request is answered with 500")
                answer = refusal(500, "The proxy failed; see its log for this request's id.", "internal_error")
            try:
                self._outcome = "broken"  # unless it is sent to its end
                await self._send(send, answer)
                self._outcome = _outcome(answer)
            finally:
                await answer.aclose()
        except ClientGone:
            self._outcome = "client_left"

    async def _read_body(self, receive: Receive) -> bytes:
        """Raises BadRequest if it is too large or too slow, BuffersFull, ClientGone if the client leaves."""
        limit = self._core.config.max_body_bytes
        too_large = BadRequest(f"The request body exceeds {limit} bytes.", status=413)
        length = self._incoming.headers.get("content-length", "")
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
                    self._incoming.body_held.resize(len(body))
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError as error:
            raise BadRequest("The request body took too long to arrive.", status=408) from error

    def _start(self, answer: Answer) -> dict:
        self._status = answer.status
        headers = {**answer.headers, "x-request-id": self._incoming.id}
        if answer.pieces is None:
            headers["content-length"] = str(len(answer.body))
        if self._core.draining:
            headers |= CLOSING  # so that a load balancer's kept connections go elsewhere
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        return {"type": "http.response.start", "status": answer.status, "headers": raw}

    async def _send(self, send: Send, answer: Answer) -> None:
        await self._put(send, self._start(answer))
        if answer.pieces is None:
            self._first = time.monotonic() - self._began
            await self._put_body(send, answer.body, more_body=False)
            return
        async for piece in answer.pieces:
            if self._first is None:
                self._first = time.monotonic() - self._began
            await self._put_body(send, piece, more_body=True)
        await self._put(send, {"type": "http.response.body", "body": b""})

    async def _put_body(self, send: Send, body: bytes, *, more_body: bool) -> None:
        """In pieces. The server takes a piece of any size at once, and makes only the next one wait for the client;
        what it has taken is neither counted nor under ``client_timeout``."""
        for begin in range(0, max(1, len(body)), FREE_BYTES):
            end = begin + FREE_BYTES
            more = more_body or end < len(body)
            await self._put(send, {"type": "http.response.body", "body": body[begin:end], "more_body": more})

    async def _put(self, send: Send, message: dict) -> None:
        try:
            async with time_limit(self._core.config.client_timeout):
                await send(message)
        except (TimeoutError, OSError) as error:
            raise ClientGone from error

    def _finish(self, outcome: str) -> None:
        seconds = time.monotonic() - self._began
        if outcome == "client_left":
            self._core.count("clients_left")
        self._core.metrics.request(self._route, outcome, seconds, self._first)
        if self._core.config.access_log:
            self._log(outcome, seconds)

    def _log(self, outcome: str, seconds: float) -> None:
        fields = self._trace if self._first is None else self._trace | {"first": self._first}
        text = "".join(f" {k}={v:.4f}" if isinstance(v, float) else f" {k}={v}" for k, v in fields.items())
        # The client chooses the path, which must not start a new line in the log.
        path = ascii(self._incoming.path[:200])[1:-1]
        level = logging.DEBUG if self._route in QUIET_ROUTES else logging.INFO
        access.log(
            level, "%s %s %d %s%s total=%.4f", self._incoming.method, path, self._status, outcome, text, seconds,
            # Served requests are all logged; refused ones are rate limited, so that clients cannot fill the log.
            extra=unlimited() if outcome == "ok" else None,
        )  # fmt: skip


def bad_request(error: BadRequest, headers: dict[str, str] | None = None) -> Answer:
    return refusal(error.status, str(error), "invalid_request_error", headers, error.param)


def _outcome(answer: Answer) -> str:
    if answer.broken:
        return "broken"
    if answer.status == 429:
        return "too_busy"
    if answer.status >= 500:
        return "failed"
    return "refused" if answer.status >= 400 else "ok"


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
