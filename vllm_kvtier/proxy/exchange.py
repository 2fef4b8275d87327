"""One request to generate: its places at P and D, the probe to P, the request to D, and the answer to the client.

What can go wrong and what follows:

* No place is free: it waits for its tenant's turn, at most ``queue_timeout``; then, or if too many wait, 429 with
  Retry-After.
* P fails, is late or answers 5xx: another P; then D computes alone, or pulls from another D that has the conversation.
  P is set aside. Where P does not serve the route (404, 405) or is full itself (429), D computes alone.
* P or D answers another 4xx: the client gets it as it is.
* D fails, is late or answers 5xx before the client got a byte: the next D, with the same params of P. If D already
  took P's export, the next one finds nothing there and computes. The first D may have begun: generating twice costs
  time and changes nothing, since of the first nothing was passed on, and its connection is closed, which aborts it.
* D breaks off later, or ends its stream before ``[DONE]``: the stream ends with an error event. Nothing is sent twice.
* The client leaves: the task that runs the exchange is cancelled, which closes the connection to P or D, which makes
  the engine abort the request.
* P's export has no taker, for whatever reason: it is released.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec

from vllm_kvtier.logs import get_logger
from vllm_kvtier.proxy import answers, sse
from vllm_kvtier.proxy.admission import TooBusy
from vllm_kvtier.proxy.bodies import ClientRequest
from vllm_kvtier.proxy.client_answer import Answer, is_stream, passed_headers, passed_on, too_busy, unavailable
from vllm_kvtier.proxy.conversations import CHARS_PER_TOKEN, ConversationRoute, Holder, name_conversation
from vllm_kvtier.proxy.core import ProxyCore
from vllm_kvtier.proxy.engines import Engine, EngineFailure, Place, Reply
from vllm_kvtier.proxy.params import TransferParams, alone_params, find_params, prefill_params

logger = get_logger(__name__)

# P does not serve this route, or has no room of its own. D may do better.
_P_DECLINES = (404, 405, 429)


class Exchange:
    """Runs one request. ``answer`` returns when the first bytes of the answer are there."""

    def __init__(
        self,
        core: ProxyCore,
        request: ClientRequest,
        tenant: bytes,
        headers: dict[str, str],
        *,
        wants_report: bool = False,
        trace: dict[str, object] | None = None,
    ):
        """``headers`` go to the engines as they are. ``trace`` is filled with what the log should say."""
        self._core = core
        self._config = core.config
        self._request = request
        self._tenant = tenant
        self._headers = headers
        self._name = name_conversation(core.tenants, tenant, request)
        self._salt = core.tenants.salt(tenant, request.client_salt)
        self._tokens = request.prompt_chars // CHARS_PER_TOKEN
        self._wants_report = wants_report
        self._trace = {} if trace is None else trace
        self._route: ConversationRoute | None = None
        self._prefill_engine: Engine | None = None
        self._prefill_params: TransferParams | None = None
        self._decode_engine: Engine | None = None
        self._attempts = 0
        self._prefill_seconds: float | None = None

    async def answer(self) -> Answer:
        """Ask P, then D. Raises nothing but cancellation and BadRequest: every failure of engines is an answer."""
        core = self._core
        core.count("requests")
        self._route = core.routes.find(self._name)
        until = time.monotonic() + self._config.queue_timeout
        prefill = decode = answer = None
        try:
            prefill = await self._enter_prefill(until)
            decode = await self._enter_decode(until, prefilled=prefill is not None)
            if decode is None:
                return unavailable("All decode engines are drained.")
            self._note_prompt(prefill or decode)
            if prefill is not None:
                answer = await self._ask_prefill(prefill)
                prefill.leave()
            answer = answer or await self._ask_decode(decode)
            return answer
        except TooBusy as busy:
            core.count("too_busy")
            if busy.displaced:
                core.count("displaced")
            return too_busy(busy)
        finally:
            if prefill is not None:
                prefill.leave()
            if decode is not None and (answer is None or answer.place is None):
                decode.leave()
            export = self._prefill_params.export if self._prefill_params is not None else None
            if export is not None and self._decode_engine is None:
                core.releaser.schedule(export)

    # -- places ----------------------------------------------------------------------------------------------------

    async def _enter_prefill(self, until: float) -> Place | None:
        """A place at a P, if this is a request for one. Raises TooBusy."""
        request, router = self._request, self._core.router
        if not request.can_prefill_elsewhere or request.prompt_chars < self._config.min_prefill_chars:
            return None
        if not router.prefill_wanted():
            return None
        return await self._enter("prefill", lambda: router.choose_prefill(self._name, self._tokens), until)

    async def _enter_decode(self, until: float, *, prefilled: bool) -> Place | None:
        """A place at a D; None if all are drained. Raises TooBusy."""
        choose = self._core.router.choose_decode
        return await self._enter("decode", lambda: choose(self._name, self._route, self._tokens, prefilled), until)

    async def _enter(self, role: str, choose, until: float) -> Place | None:
        began = time.monotonic()
        try:
            return await self._core.admission.enter(role, self._tenant, choose, max(0.0, until - began))
        finally:
            waited = time.monotonic() - began
            self._core.metrics.waited(role, waited)
            self._trace["queued"] = self._trace.get("queued", 0.0) + waited

    def _note_prompt(self, place: Place) -> None:
        known = 0 if place.tokens > self._tokens else self._tokens - place.tokens
        self._core.metrics.prompt(self._tokens, known)

    # -- P ---------------------------------------------------------------------------------------------------------

    async def _ask_prefill(self, place: Place) -> Answer | None:
        """Have P compute the prompt, if one can; returns its answer only if the client must see it (4xx)."""
        sources = self._core.router.sources(self._route) if self._config.bidirectional else []
        body = self._request.body_for_prefill(self._salt, prefill_params(sources))
        until = time.monotonic() + self._config.prefill_timeout
        tried: tuple[Engine, ...] = ()
        while True:
            engine = place.engine
            tried = (*tried, engine)
            if engine.usable:
                failed, answer = await self._ask_one_prefill(engine, body, until)
                if not failed:
                    return answer
                self._core.count("prefill_failures")
            # Else it was set aside, or taken out of the list, while this request waited for its place at D.
            choice = self._core.router.choose_prefill(self._name, self._tokens, besides=tried)
            if len(tried) >= self._config.max_prefill_attempts or time.monotonic() >= until:
                return None
            if choice is None or choice.engine is None:
                return None
            self._core.metrics.retried("prefill")
            place.move(choice.engine, choice.tokens)

    async def _ask_one_prefill(self, engine: Engine, body: bytes, until: float) -> tuple[bool, Answer | None]:
        """(whether it failed, what the client must see)."""
        began = time.monotonic()
        try:
            reply = await engine.ask("POST", self._request.route.value, body, self._headers, until - began)
            try:
                document = await reply.read(self._config.max_event_bytes, max(0.0, until - time.monotonic()))
            finally:
                reply.close()
        except EngineFailure as failure:
            engine.set_aside(str(failure))
            return True, None
        if reply.status in _P_DECLINES:
            self._core.count("prefill_declined")
            return False, None
        if 400 <= reply.status < 500:
            return False, passed_on(reply, document)
        if reply.status != 200:
            engine.set_aside(f"{engine} answered {reply.status}.", perhaps_restarted=False)
            return True, None
        engine.succeeded()
        self._prefill_engine = engine
        self._prefill_seconds = time.monotonic() - began
        self._core.metrics.prefilled(self._prefill_seconds)
        self._core.prefixes.enter(self._name.pieces, engine)
        self._trace["prefill"] = engine.url
        self._prefill_params = find_params(document)
        if self._prefill_params is not None:
            engine.learn(self._prefill_params)
            self._core.count("prefilled")
        return False, None

    # -- D ---------------------------------------------------------------------------------------------------------

    async def _ask_decode(self, place: Place) -> Answer:
        timeout = self._config.first_byte_timeout if self._request.stream else self._config.answer_timeout
        worst: Answer | None = None
        for engine in self._decode_order(place.engine)[: self._config.max_decode_attempts]:
            self._attempts += 1
            if self._attempts > 1:
                self._core.count("decode_retries")
                self._core.metrics.retried("decode")
            place.move(engine, 0)
            body = self._request.body_for_decode(self._salt, self._decode_params(engine))
            try:
                reply = await engine.ask("POST", self._request.route.value, body, self._headers, timeout)
                done = False
                try:
                    if reply.status == 200 and is_stream(reply):
                        rewriter = self._rewriter(engine)
                        first = await self._first_events(reply, rewriter)
                        done = True
                        self._served_by(engine)
                        return self._streamed(reply, rewriter, first, place)
                    document = await reply.read(self._config.max_body_bytes, self._config.answer_timeout)
                finally:
                    if not done:
                        reply.close()
            except EngineFailure as failure:
                engine.set_aside(str(failure))
                continue
            if reply.status == 429:
                worst = passed_on(reply, document)
                continue
            if reply.status >= 500:
                engine.set_aside(f"{engine} answered {reply.status}.", perhaps_restarted=False)
                worst = passed_on(reply, document)
                continue
            if reply.status != 200:
                return passed_on(reply, document)
            self._served_by(engine)
            return Answer(200, passed_headers(reply), body=self._rewriter(engine).whole(document))
        self._core.count("refused")
        return worst or unavailable("No decode engine could answer; the request can be sent again.")

    def _decode_order(self, placed: Engine) -> list[Engine]:
        """The engine where the place is, unless it was set aside meanwhile; then the others, those with room first."""
        prefilled = self._prefill_params is not None
        ranked = self._core.router.rank_decode(self._name, self._route, self._tokens, prefilled)
        ranked.sort(key=lambda engine: (not engine.well, engine is not placed, engine.full))
        return ranked or [placed]

    def _decode_params(self, engine: Engine) -> msgspec.Raw | dict[str, Any]:
        """P's params; without any, who else has the conversation. D reports on pulls only if it gets some."""
        if self._prefill_params is not None:
            return self._prefill_params.raw
        useful = self._config.bidirectional and self._request.can_prefill_elsewhere
        return alone_params(self._core.router.sources(self._route, besides=engine) if useful else [])

    def _served_by(self, engine: Engine) -> None:
        """D has taken the request: the conversation lives there from now on."""
        engine.succeeded()
        self._decode_engine = engine
        self._trace |= {"decode": engine.url, "attempts": self._attempts}
        if self._prefill_params is None:
            self._core.count("decoded_alone")
        known = self._route or ConversationRoute(holders=())
        self._core.routes.enter(self._name, known.moved_to(Holder(engine.index, engine.life)))
        self._core.prefixes.enter(self._name.pieces, engine)

    # -- the answer ------------------------------------------------------------------------------------------------

    async def _first_events(self, reply: Reply, rewriter: answers.AnswerRewriter) -> bytes:
        """What of the stream can be passed on first. A client can do nothing with half an event, so that until there
        is a whole one another D can still be asked. Raises EngineFailure if there is none."""
        try:
            if passed := rewriter.feed(reply.first):
                return passed
            async with aclosing(reply.chunks(self._config.stream_idle_timeout)) as chunks:
                async for data in chunks:
                    if passed := rewriter.feed(data):
                        return passed
        except sse.EventTooLarge as error:
            raise EngineFailure(f"{reply.engine}: {error}.") from error
        raise EngineFailure(f"{reply.engine} ended a stream before its first event.")

    def _streamed(self, reply: Reply, rewriter: answers.AnswerRewriter, first: bytes, place: Place) -> Answer:
        answer = Answer(200, passed_headers(reply, stream=True), reply=reply, place=place)
        answer.pieces = self._relay(reply, rewriter, first, answer)
        return answer

    async def _relay(
        self, reply: Reply, rewriter: answers.AnswerRewriter, first: bytes, answer: Answer
    ) -> AsyncIterator[bytes]:
        """D's stream as it arrives."""
        try:
            yield first
            async with aclosing(reply.chunks(self._config.stream_idle_timeout)) as chunks:
                async for data in chunks:
                    if passed := rewriter.feed(data):
                        yield passed
            if not rewriter.done:
                raise EngineFailure(f"{reply.engine} ended a stream before its end.")
            if rest := rewriter.close():
                yield rest
        except (EngineFailure, sse.EventTooLarge) as failure:
            if isinstance(failure, EngineFailure):
                reply.engine.set_aside(str(failure))
            if rewriter.done:
                return  # the client has all of it
            self._core.count("broken_streams")
            answer.broken = True
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
