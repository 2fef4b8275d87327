"""One request through the proxy: the probe to P, the request to D, and the answer to the client.

What can go wrong and what follows:

* P fails, is late or answers 5xx: D computes alone, or pulls from another D that has the conversation; P is
  set aside.
* P or D answers 4xx: the client gets it as it is.
* D fails, is late or answers 5xx before the client got a byte: the next D, with the same params of P. If D
  already took P's export, the next one finds nothing there and computes.
* D breaks off later: the stream ends with an error event. Nothing is sent twice.
* The client leaves: the task that runs the exchange is cancelled, which closes the connection to P or D,
  which makes the engine abort the request.
* P's export has no taker, for whatever reason: it is released.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec

from vllm_kvtier.proxy import answers, sse
from vllm_kvtier.proxy.bodies import ClientRequest
from vllm_kvtier.proxy.conversations import ConversationRoute, Holder, name_conversation
from vllm_kvtier.proxy.core import ProxyCore
from vllm_kvtier.proxy.engines import Engine, EngineFailure, Reply
from vllm_kvtier.proxy.params import TransferParams, alone_params, find_params, prefill_params

logger = logging.getLogger(__name__)

# Of an engine's headers, those that mean something to the client.
_PASSED_HEADERS = ("content-type", "retry-after", "www-authenticate")


class Answer(msgspec.Struct):
    """What the client gets: ``body`` whole, or ``pieces`` as they come from ``reply``.

    Who takes the answer must close ``pieces`` and ``reply``, also if it sent none of them: closing an
    iterator that was never begun closes nothing that it would have closed.
    """

    status: int
    headers: dict[str, str]
    body: bytes = b""
    pieces: AsyncIterator[bytes] | None = None
    reply: Reply | None = None


class Exchange:
    """Runs one request. ``answer`` returns when the first bytes of the answer are there."""

    def __init__(
        self,
        core: ProxyCore,
        request: ClientRequest,
        tenant: bytes,
        headers: dict[str, str],
        *,
        wants_report: bool,
    ):
        """``headers`` go to the engines as they are."""
        self._core = core
        self._config = core.config
        self._request = request
        self._headers = headers
        self._name = name_conversation(core.tenants, tenant, request)
        self._salt = core.tenants.salt(tenant, request.client_salt)
        self._wants_report = wants_report
        self._prefill_engine: Engine | None = None
        self._prefill_params: TransferParams | None = None
        self._decode_engine: Engine | None = None
        self._attempts = 0
        self._prefill_seconds: float | None = None

    async def answer(self) -> Answer:
        """Ask P, then D. Raises nothing but cancellation: every failure of engines is an answer, too."""
        self._core.count("requests")
        route = self._core.routes.find(self._name)
        try:
            refusal = await self._ask_prefill(route)
            return refusal or await self._ask_decode(route)
        finally:
            export = self._prefill_params.export if self._prefill_params is not None else None
            if export is not None and self._decode_engine is None:
                self._core.releaser.schedule(export)

    async def _ask_prefill(self, route: ConversationRoute | None) -> Answer | None:
        """Have P compute the prompt, if one can; returns its answer only if the client must see it (4xx)."""
        request, config = self._request, self._config
        if not request.can_prefill_elsewhere or request.prompt_chars < config.min_prefill_chars:
            return None
        engine = self._core.router.pick_prefill(route)
        if engine is None:
            return None
        sources = self._core.router.sources(route) if config.bidirectional else []
        body = request.body_for_prefill(self._salt, prefill_params(sources))
        began = time.monotonic()
        try:
            reply = await engine.ask("POST", request.route.value, body, self._headers, config.prefill_timeout)
            async with aclosing(reply):
                left = max(0.0, config.prefill_timeout - (time.monotonic() - began))
                document = await reply.read(config.max_event_bytes, left)
        except EngineFailure as failure:
            engine.set_aside(str(failure))
            self._core.count("prefill_failures")
            return None
        if 400 <= reply.status < 500:
            return passed_on(reply, document)
        if reply.status != 200:
            engine.set_aside(f"{engine} answered {reply.status}.", perhaps_restarted=False)
            self._core.count("prefill_failures")
            return None
        engine.succeeded()
        self._prefill_engine = engine
        self._prefill_seconds = time.monotonic() - began
        self._prefill_params = find_params(document)
        if self._prefill_params is not None:
            engine.learn(self._prefill_params)
            self._core.count("prefilled")
        return None

    async def _ask_decode(self, route: ConversationRoute | None) -> Answer:
        timeout = self._config.first_byte_timeout if self._request.stream else self._config.answer_timeout
        worst: Answer | None = None
        for engine in self._core.router.rank_decode(self._name, route)[: self._config.max_decode_attempts]:
            self._attempts += 1
            if self._attempts > 1:
                self._core.count("decode_retries")
            body = self._request.body_for_decode(self._salt, self._decode_params(engine, route))
            try:
                reply = await engine.ask("POST", self._request.route.value, body, self._headers, timeout)
                done = False
                try:
                    if reply.status == 200 and _is_stream(reply):
                        done = True
                        self._served_by(engine, route)
                        headers = self._answer_headers(reply, stream=True)
                        return Answer(200, headers, pieces=self._relay(reply), reply=reply)
                    document = await reply.read(self._config.max_body_bytes, self._config.answer_timeout)
                finally:
                    if not done:
                        await reply.aclose()
            except EngineFailure as failure:
                engine.set_aside(str(failure))
                continue
            if reply.status >= 500:
                engine.set_aside(f"{engine} answered {reply.status}.", perhaps_restarted=False)
                worst = passed_on(reply, document)
                continue
            if reply.status != 200:
                return passed_on(reply, document)
            self._served_by(engine, route)
            return Answer(200, self._answer_headers(reply), body=self._rewriter(engine).whole(document))
        self._core.count("refused")
        message = "No decode engine could answer; the request can be sent again."
        return worst or Answer(
            503, {"content-type": "application/json"}, answers.error_body(message, "upstream_error", 503)
        )

    def _decode_params(self, engine: Engine, route: ConversationRoute | None) -> msgspec.Raw | dict[str, Any]:
        """P's params; without any, who else has the conversation. D reports on pulls only if it gets some."""
        if self._prefill_params is not None:
            return self._prefill_params.raw
        useful = self._config.bidirectional and self._request.can_prefill_elsewhere
        return alone_params(self._core.router.sources(route, besides=engine) if useful else [])

    def _served_by(self, engine: Engine, route: ConversationRoute | None) -> None:
        """D has taken the request: the conversation lives there from now on."""
        engine.succeeded()
        self._decode_engine = engine
        if self._prefill_params is None:
            self._core.count("decoded_alone")
        prefill = self._prefill_engine.index if self._prefill_engine is not None else None
        known = route or ConversationRoute(holders=(), prefill=None)
        self._core.routes.enter(self._name, known.moved_to(Holder(engine.index, engine.life), prefill))

    async def _relay(self, reply: Reply) -> AsyncIterator[bytes]:
        """D's stream as it arrives."""
        rewriter = self._rewriter(reply.engine)
        try:
            if passed := rewriter.feed(reply.first):
                yield passed
            async with aclosing(reply.chunks(self._config.stream_idle_timeout)) as chunks:
                async for data in chunks:
                    if passed := rewriter.feed(data):
                        yield passed
            if rest := rewriter.close():
                yield rest
        except (EngineFailure, sse.EventTooLarge) as failure:
            if isinstance(failure, EngineFailure):
                reply.engine.set_aside(str(failure))
            if rewriter.done:
                return  # the client has all of it
            self._core.count("broken_streams")
            logger.warning("A stream ended early: %s", failure)
            yield answers.error_events("The engine that generated this answer broke off.", 502)

    def _rewriter(self, engine: Engine) -> answers.AnswerRewriter:
        return answers.AnswerRewriter(
            engine.learn,
            self._report if self._wants_report else None,
            expose_params=self._config.expose_params,
            max_event_bytes=self._config.max_event_bytes,
        )

    def _report(self, decode: TransferParams | None) -> dict[str, Any]:
        prefill = self._prefill_params
        return {
            "prefill": prefill.report if prefill is not None else None,
            "decode": decode.report if decode is not None else None,
            "proxy": {
                "prefill_engine": self._prefill_engine.index if self._prefill_engine is not None else None,
                "decode_engine": self._decode_engine.index if self._decode_engine is not None else None,
                "decode_attempts": self._attempts,
                "prefill_seconds": self._prefill_seconds,
            },
        }

    def _answer_headers(self, reply: Reply, *, stream: bool = False) -> dict[str, str]:
        headers = _passed_headers(reply)
        if stream:
            # The second keeps nginx from buffering.
            headers |= {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return headers


def _is_stream(reply: Reply) -> bool:
    return reply.headers.get("content-type", "").startswith("text/event-stream")


def _passed_headers(reply: Reply) -> dict[str, str]:
    return {name: reply.headers[name] for name in _PASSED_HEADERS if name in reply.headers}


def passed_on(reply: Reply, document: bytes) -> Answer:
    """An engine's answer as it is."""
    return Answer(reply.status, _passed_headers(reply), document)
