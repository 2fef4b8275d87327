"""One request to generate: slots at both engines, the prefill request, the decode request, the answer to the client.

Failures and their handling:

* No slot is free: the request waits at most ``queue_timeout``. After that, or if the queue is full: 429 with
  Retry-After.
* The prefill engine fails or is late: it becomes unavailable and another one is tried, for the rest of the time. If
  that one is late, it is only probed. After that, the decode engine computes the prompt, or pulls from another decode
  engine that has the conversation.
* The prefill engine answers 4xx: another one is tried, too, and the first stays available. It may lack a model, an
  adapter, a parser or a length; or the client's request is at fault, and the decode engine says so.
* The decode engine refuses what another may serve (``engines.refusals``): the next available one is tried. Otherwise
  the client gets that answer, as it gets any other 4xx of a decode engine.
* The decode engine fails, is late or answers 5xx before the client got a byte: the next one gets the same params. One
  that is late is only probed, and after ``answer_timeout`` no other one is tried: 504, as it may be a long answer. If
  the first already pulled the export, the next one computes. The first may have started the request, but closing its
  connection aborts that and none of its output was forwarded.
* The answer exceeds ``max_body_bytes``, or its first event ``max_event_bytes``: 502. Another engine's would be as large
  too, and none becomes unavailable: a client could ask for such answers again and again. If ``max_buffered_bytes`` is
  used up: 503. Of a prefill engine's answer, that means that its export is not known, and the decode engine computes.
* The decode engine fails later, or ends its stream before ``[DONE]``: the stream ends with an error event.
* An engine breaks off an answer after its headers, or ends a stream with an error of its own: it is probed. Its process
  may have died, or the fault is this request's.
* An engine whose core process dies, or is shut down, ends streams that it has not begun with 200 and an error event: as
  if it had answered 5xx. One that is shut down with --shutdown-timeout answers new prompts of token ids with 200, no
  token and the finish_reason "abort", and so does one that is paused: as if it had failed, but its cache remains.
* The client leaves: the task of the request is cancelled. That closes the engine's connection, and the engine aborts.
* No decode engine takes the export: it is released.
"""

import enum
import re
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from vllm_kvtier.logs import get_logger
from vllm_kvtier.proxy.core import ProxyCore
from vllm_kvtier.proxy.engines.engine import AnswerTooLarge, Engine, EngineFailure, EngineSlot, Reply
from vllm_kvtier.proxy.engines.refusals import LACKS, MAX_NAME, may_be_served_elsewhere
from vllm_kvtier.proxy.messages import response_rewriter, sse
from vllm_kvtier.proxy.messages.incoming_request import Incoming
from vllm_kvtier.proxy.messages.request_bodies import ClientRequest
from vllm_kvtier.proxy.messages.transfer_params import (
    Export,
    Source,
    TransferParams,
    decode_only_params,
    find_params,
    prefill_params,
)
from vllm_kvtier.proxy.routes.client_answer import JSON, Answer, forwarded, forwarded_headers, unavailable
from vllm_kvtier.proxy.routes.engine_request import EngineRequest, for_client
from vllm_kvtier.proxy.routing.admission import QueueFull
from vllm_kvtier.proxy.routing.conversations import ConversationRoute, Holder, Name, name_conversation
from vllm_kvtier.proxy.routing.prompt import Prompt

logger = get_logger(__name__)

_BLANK_LINE = re.compile(rb"\n\r?\n")
# In a chat's first event, which has nothing else. Within a text its quotes have backslashes.
_ROLE = b'"delta":{"role":'
_MAX_ROLES = 1 << 20  # bytes of events that name roles, before others: vLLM's of 4,000 answers to a request

_ALMOST_ALL = 0.9  # of the time for prefills: an engine that had as much and is late has failed


class StreamRefused(EngineFailure):
    """A stream is nothing but an error of the engine's. ``answer``: for the client, if no other engine serves it."""

    def __init__(self, engine: Engine, status: int, document: bytes):
        super().__init__(f"{engine} answered a stream with error {status}.")
        self.answer = Answer(status, JSON, document)


class Prefill(enum.Enum):
    """How a prefill ended. FAILED: its engine has not begun it, or refuses it. LOST: it may have begun it."""

    DONE = enum.auto()
    FAILED = enum.auto()
    LOST = enum.auto()


class Generation(EngineRequest):
    """Runs one request. ``answer`` returns with the first bytes of the answer."""

    def __init__(
        self, core: ProxyCore, incoming: Incoming, request: ClientRequest, tenant: bytes, trace: dict[str, object]
    ):
        super().__init__(core, incoming, tenant, trace)
        self._request = request
        request.rename_media(partial(core.tenants.media_name, tenant))
        self._headers = incoming.for_engines() | JSON
        self._name = name_conversation(core.tenants, tenant, request)
        entry = self._name.entry  # of the name, all that is kept while the answer is streamed
        self._turn = Name(() if entry is None else (entry,), entry, self._name.explicit)
        self._salt = core.tenants.salt(tenant, request.client_salt)
        self._refusals.wants = request.route.value, request.model[:MAX_NAME]
        self._prompt = Prompt(self._name)  # `answer` adds its tokens
        self._wants_report = core.config.allow_report and incoming.headers.get("x-kvtier-report") == "1"
        self._route: ConversationRoute | None = None
        self._prefill_engine: Engine | None = None
        self._prefill_params: TransferParams | None = None
        self._export: Export | None = None  # which a prefill engine keeps, or may keep, for the decode engine
        self._decode_engine: Engine | None = None
        self._decode_source: Source | None = None  # the endpoint that the decode engine's answer names
        self._prefill_by: float | None = None  # deadline of all its prefills, once the first has begun
        self._prefill_seconds: float | None = None

    async def answer(self) -> Answer:
        """Prefill, then decode. Raises only CancelledError and BadRequest; failures of engines are answers."""
        core = self._core
        core.count("requests")
        self._route = core.routes.find(self._name)
        prompt = await core.prompt(self._request, self._name, self._salt, self._headers)
        self._prompt = replace(prompt, wants=self._refusals.wants)
        self._request.drop_prompt()
        deadline = time.monotonic() + self._config.queue_timeout
        prefill = decode = answer = None
        try:
            prefill = await self._prefill_slot(deadline)
            decode = await self._decode_slot(deadline, prefilled=prefill is not None)
            if decode is None:
                return unavailable("All decode engines are drained.")
            tokens = self._prompt.tokens
            core.metrics.prompt(tokens, max(0, tokens - (prefill or decode).tokens))
            answer = await self._run(prefill, decode)
            return answer
        except QueueFull as error:
            return self._queue_full(error)
        finally:
            del self._request, self._prompt, self._name  # a stream may last for hours
            if prefill is not None:
                prefill.release()
            if decode is not None and (answer is None or answer.slot is None):
                decode.release()
            if self._export is not None and self._decode_engine is None:
                core.releaser.schedule(self._export)
            self._refusals.end()

    async def _run(self, prefill: EngineSlot | None, decode: EngineSlot) -> Answer:
        """The prefill, if there is one, then the decode request."""
        if prefill is not None:
            await self._prefill(prefill)
            prefill.release()
            self._count_uncached(decode)
        return await self._decode(decode)

    def _count_uncached(self, decode: EngineSlot) -> None:
        """Its engine computes the prompt, if no prefill engine did."""
        if self._prefill_params is None:
            decode.move(decode.engine, self._core.router.policy.expect(self._prompt)(decode.engine).uncached)

    # -- engine slots ----------------------------------------------------------------------------------------------

    async def _prefill_slot(self, deadline: float) -> EngineSlot | None:
        """A slot at a prefill engine; None if the request needs none. Raises QueueFull."""
        request, router = self._request, self._core.router
        short = request.prompt_chars < self._config.min_prefill_chars and not request.has_media
        if short or not request.can_prefill_elsewhere:
            return None
        if not any(engine.usable for engine in self._core.prefill):
            return None
        return await self._acquire("prefill", lambda: router.choose_prefill(self._prompt), deadline)

    async def _decode_slot(self, deadline: float, *, prefilled: bool) -> EngineSlot | None:
        """A slot at a decode engine; None if all are drained, or were asked. Raises QueueFull."""
        choose, route, asked = self._core.router.choose_decode, self._route, self._asked
        return await self._acquire("decode", lambda: choose(self._prompt, route, prefilled, asked), deadline)

    # -- prefill ---------------------------------------------------------------------------------------------------

    async def _prefill(self, slot: EngineSlot) -> None:
        """Have a prefill engine compute the prompt, if one can."""
        body, deadline = self._prefill_body(), self._prefill_deadline()
        asked: set[Engine] = set()
        attempts = 0
        while True:
            engine = slot.engine
            asked.add(engine)
            if engine.usable and engine not in self._refusals and time.monotonic() < deadline:
                if await self._prefill_at(engine, body, deadline) is Prefill.DONE:
                    return
            # Else it failed or was removed while this request waited for its decode slot.
            attempts += not self._refusals.lacks(engine)
            if attempts >= self._config.max_prefill_attempts or time.monotonic() >= deadline:
                return
            choice = self._core.router.choose_prefill(self._prompt, asked)
            if choice is None or choice.engine is None:
                return
            self._core.metrics.retried("prefill")
            slot.move(choice.engine, choice.tokens)

    def _prefill_deadline(self) -> float:
        if self._prefill_by is None:
            self._prefill_by = time.monotonic() + self._config.prefill_timeout
        return self._prefill_by

    def _prefill_body(self, export_as: str = "") -> bytes:
        sources = self._core.router.sources(self._route) if self._config.bidirectional else []
        return self._request.body_for_prefill(self._salt, prefill_params(sources, export_as))

    async def _prefill_at(self, engine: Engine, body: bytes, deadline: float) -> Prefill:
        """How it ended."""
        began = time.monotonic()
        try:
            reply = await engine.ask("POST", self._request.route.value, body, self._headers, deadline - began)
            try:
                left = max(0.0, deadline - time.monotonic())
                document = await reply.read(self._config.max_event_bytes, left, self._held)
                _check_refusal(engine, reply, document)
            finally:
                reply.close()
        except AnswerTooLarge as failure:
            logger.warning("kvtier: proxy: the answer to a prefill cannot be had (%s); its KV is not pulled", failure)
            return Prefill.FAILED if failure.unreached else Prefill.DONE
        except EngineFailure as failure:
            self._core.count("prefill_failures")
            if not failure.late:
                self._failed(engine, failure)
            elif deadline - began < _ALMOST_ALL * self._config.prefill_timeout:
                engine.check()  # others had the rest of the time
            else:
                engine.mark_unavailable(str(failure))
            return Prefill.FAILED if failure.unreached or failure.lives else Prefill.LOST
        if reply.status != 200:
            self._core.count("prefill_declined" if reply.status < 500 else "prefill_failures")
            self._refusals.add(engine, reply.status)
            return Prefill.FAILED
        engine.succeeded()
        engine.serves(self._refusals.wants)
        self._prefill_engine = engine
        self._prefill_seconds = time.monotonic() - began
        self._core.metrics.prefilled(self._prefill_seconds)
        self._core.prefixes.enter(self._name.pieces, engine)
        self._trace["prefill"] = engine.url
        self._prefill_params = find_params(document)
        if self._prefill_params is not None:
            engine.learn(self._prefill_params)
            self._export = self._prefill_params.export
            self._core.count("prefilled")
        return Prefill.DONE

    # -- decode ----------------------------------------------------------------------------------------------------

    async def _decode(self, slot: EngineSlot, last_error: Answer | None = None) -> Answer:
        """``last_error``: the answer of the slot's engine, if that was asked already."""

        async def readmit(deadline: float) -> EngineSlot | None:
            return await self._decode_slot(deadline, prefilled=self._prefill_params is not None)

        last = last_error
        while engine := await self._next_engine(slot, readmit, self._decode_order, last_error, last):
            if self._asked:
                self._core.count("decode_retries")
                self._core.metrics.retried("decode")
            served, last = await self._decode_at(engine, slot, self._decode_params(engine))
            if served and last is not None:
                return last
            if last is not None:
                last_error = for_client(last_error, last)
        answer = self._no_engine(last_error, self._core.decode)
        if answer.status not in LACKS:
            self._core.count("refused")
        return answer

    async def _decode_at(
        self, engine: Engine, slot: EngineSlot, params: msgspec.Raw | dict[str, Any]
    ) -> tuple[bool, Answer | None]:
        """(Whether the answer is for the client, or another engine is to be tried; the answer, if there is one.)"""
        self._asked[engine] = False
        self._attempts += 1
        self._decode_source = None
        timeout = self._config.first_byte_timeout if self._request.stream else self._config.answer_timeout
        body = self._request.body_for_decode(self._salt, params)
        try:
            reply = await engine.ask("POST", self._request.route.value, body, self._headers, timeout)
            done = False
            try:
                if reply.status == 200 and reply.is_stream:
                    rewriter = self._rewriter(engine)
                    first = await self._first_events(reply, rewriter)
                    done = True
                    slot.prompt_computed()
                    self._note_decode(engine)
                    answer = Answer(200, forwarded_headers(reply, stream=True), reply=reply, slot=slot)
                    answer.pieces = self._relay(reply, rewriter, first, answer)
                    return True, answer
                document = await reply.read(self._config.max_body_bytes, self._config.answer_timeout, self._held)
                _check_refusal(engine, reply, document)
            finally:
                if not done:
                    reply.close()
        except AnswerTooLarge as failure:
            return True, self._answer_too_large(failure)
        except StreamRefused as failure:
            if not may_be_served_elsewhere(failure.answer.status):
                return True, failure.answer
            self._refused(engine, failure.answer.status)
            return False, failure.answer
        except EngineFailure as failure:
            self._failed(engine, failure)
            return (True, self._too_late()) if failure.late and not self._request.stream else (False, None)
        if may_be_served_elsewhere(reply.status):
            self._refused(engine, reply.status)
            return False, forwarded(reply, document)
        if reply.status != 200:
            return True, forwarded(reply, document)
        self._note_decode(engine)
        return True, Answer(200, forwarded_headers(reply), body=self._rewriter(engine).whole(document))

    def _decode_order(self, chosen: Engine) -> list[Engine]:
        """The engine of the slot unless it has become unavailable, then the others, those with free slots first."""
        prefilled = self._prefill_params is not None
        ranked = self._core.router.rank_decode(self._prompt, self._route, prefilled)
        last = {e for e in ranked if not e.healthy or e in self._refusals}
        ranked.sort(key=lambda e: (e in last, e is not chosen, self._refusals.wants in e.lacking, e.full))
        return ranked or [chosen]

    def _decode_params(self, engine: Engine) -> msgspec.Raw | dict[str, Any]:
        """The prefill engine's params, else the sources of the conversation. Without params, no pulls are reported."""
        if self._prefill_params is not None:
            return self._prefill_params.for_decode
        useful = self._config.bidirectional and self._request.can_prefill_elsewhere
        return decode_only_params(self._core.router.sources(self._route, exclude=engine) if useful else [])

    def _note_decode(self, engine: Engine) -> None:
        """Record the engine that serves the request as the conversation's latest."""
        engine.succeeded()
        self._refusals.served_by(engine)
        self._decode_engine = engine
        self._trace |= {"decode": engine.url, "attempts": self._attempts}
        if self._prefill_params is None:
            self._core.count("decoded_alone")
        self._served_by = Holder(engine.index, engine.instance)
        self._enter_route()
        self._core.prefixes.enter(self._name.pieces, engine)

    def _enter_route(self) -> None:
        known = self._core.routes.find(self._turn) or self._route or ConversationRoute(holders=())
        holder = msgspec.structs.replace(self._served_by, source=self._decode_source)
        self._core.routes.enter(self._turn, known.moved_to(holder))

    def _learn(self, engine: Engine, params: TransferParams) -> None:
        """Take the endpoint from the decode engine's answer: of a stream, from its end."""
        self._decode_source = engine.learn(params)
        if engine is self._decode_engine:
            self._enter_route()

    # -- the answer ------------------------------------------------------------------------------------------------

    async def _first_events(self, reply: Reply, rewriter: response_rewriter.AnswerRewriter) -> bytes:
        """The first whole events that say anything, or many; before them, another decode engine can be tried. Raises
        EngineFailure, and AnswerTooLarge for an event above the limit."""
        try:
            events = new = self._feed(reply, rewriter, reply.first)
            async with aclosing(reply.chunks(self._config.stream_idle_timeout)) as chunks:
                while len(events) < _MAX_ROLES and not _saying(new):
                    if (data := await anext(chunks, None)) is None:
                        break
                    new = self._feed(reply, rewriter, data)
                    events += new
        except sse.EventTooLarge as error:
            raise AnswerTooLarge(f"{reply.engine}: {error}.") from error
        if not events:
            raise EngineFailure(f"{reply.engine} ended a stream before its first event.", began=True)
        if error := response_rewriter.find_error(events, 400):
            raise StreamRefused(reply.engine, *error)
        for event in _saying(events)[:1]:
            _check_refusal(reply.engine, reply, event)
        return events

    async def _relay(
        self, reply: Reply, rewriter: response_rewriter.AnswerRewriter, first: bytes, answer: Answer
    ) -> AsyncIterator[bytes]:
        try:
            yield first
            async with aclosing(reply.chunks(self._config.stream_idle_timeout)) as chunks:
                async for data in chunks:
                    if events := self._feed(reply, rewriter, data):
                        if response_rewriter.find_error(events):
                            self._note_error(reply, answer)
                        yield events
            if not rewriter.done:
                raise EngineFailure(f"{reply.engine} ended a stream before its end.", began=True)
            if rest := rewriter.close():
                yield rest
        except (EngineFailure, sse.EventTooLarge) as failure:
            if isinstance(failure, EngineFailure) and not isinstance(failure, AnswerTooLarge):
                reply.engine.failed(failure)
            if rewriter.done:
                return  # the client has the whole answer
            self._note_broken(answer, failure)
            yield response_rewriter.error_events("The engine that generated this answer failed.", 502)

    def _feed(self, reply: Reply, rewriter: response_rewriter.AnswerRewriter, data: bytes) -> bytes:
        """Raises EventTooLarge and AnswersFull."""
        events = rewriter.feed(data)
        # Also what the client has yet to take.
        reply.hold(self._held, len(events) + rewriter.held_bytes)
        return events

    def _rewriter(self, engine: Engine) -> response_rewriter.AnswerRewriter:
        return response_rewriter.AnswerRewriter(
            partial(self._learn, engine),
            partial(self._report, engine) if self._wants_report else None,
            expose_params=self._config.expose_params,
            max_event_bytes=self._config.max_event_bytes,
        )

    def _report(self, engine: Engine, decode: TransferParams | None) -> dict[str, Any]:
        prefill = self._prefill_params
        return {
            "prefill": prefill.report if prefill is not None else None,
            "decode": decode.report if decode is not None else None,
            "proxy": {
                "prefill_engine": self._prefill_engine.index if self._prefill_engine is not None else None,
                "decode_engine": engine.index,
                "decode_attempts": self._attempts,
                "prefill_seconds": self._prefill_seconds,
            },
        }


def _check_refusal(engine: Engine, reply: Reply, document: bytes) -> None:
    """Raise EngineFailure if the engine aborted the request before its first token: it is shut down, or was paused."""
    if reply.status == 200 and response_rewriter.is_refused_at_end(document):
        raise EngineFailure(f"{engine} aborted a request: it is shut down, or was paused.", lives=True)


def _saying(events: bytes) -> list[bytes]:
    """The events but comments and those by which vLLM names the role of the answers of a chat."""
    return [event for event in _BLANK_LINE.split(events) if _ROLE not in event and sse.Comments().skip(event)]
