"""The routes that are passed on as they are: everything of OpenAI's API, and of vLLM's, that is meant for clients.

A list, not "all the rest": vLLM has routes on the same port that put engines to sleep, change their weights or call
into their workers. A path that is not listed here or in ``extra_routes`` is 404.

Requests go to one engine, streams come back as they arrive. To another engine they go only while nothing of an answer
has gone out, and only if the first cannot have begun the request (no connection was made) or if to run it twice changes
nothing that a client could see. ``/v1/responses`` that are to be stored and ``extra_routes`` may not be run twice:
where their outcome is unknown the client is told so (502).
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import NamedTuple

import msgspec

from vllm_kvtier.logs import get_logger
from vllm_kvtier.proxy import answers
from vllm_kvtier.proxy.admission import Choice, TooBusy
from vllm_kvtier.proxy.bodies import BadRequest, remove_transfer_fields
from vllm_kvtier.proxy.client_answer import (
    Answer,
    AnswerBroken,
    is_stream,
    passed_headers,
    passed_on,
    refusal,
    too_busy,
    unavailable,
)
from vllm_kvtier.proxy.conversations import CHARS_PER_TOKEN, ConversationRoute, Holder, Name
from vllm_kvtier.proxy.core import ProxyCore
from vllm_kvtier.proxy.engines import Engine, EngineFailure, Place, Reply
from vllm_kvtier.proxy.params import UNREADABLE

logger = get_logger(__name__)

# Longer answers are passed on as they come; shorter ones are whole before the client gets any, so that another engine
# can be asked if one breaks off.
_WHOLE_BYTES = 4 << 20
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_\-]{1,100})"')


class Passed(NamedTuple):
    """How a route is passed on. ``role``: whose it is ("light": any engine's; it computes next to nothing). ``salted``:
    it computes KV, so its body gets the tenant's salt. ``twice``: whether it may be run twice."""

    methods: tuple[str, ...]
    role: str = "light"
    salted: bool = False
    twice: bool = True


_GET, _POST = ("GET",), ("POST",)
_LIGHT = Passed(_POST)
_POOLING = Passed(_POST, "pooling", salted=True)
_DECODE = Passed(_POST, "decode", salted=True)

_ROUTES = {
    **dict.fromkeys(("/v1/models", "/version", "/tokenizer_info"), Passed(_GET)),
    **dict.fromkeys(("/tokenize", "/detokenize", "/v1/messages/count_tokens"), _LIGHT),
    **{f"/v1/{kind}/{step}": _LIGHT for kind in ("chat/completions", "completions") for step in ("render", "derender")},
    **dict.fromkeys(("/v1/messages/render", "/v1/responses/render"), _LIGHT),
    **dict.fromkeys(("/v1/embeddings", "/v2/embed", "/pooling", "/classify"), _POOLING),
    **dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), _POOLING),
    **dict.fromkeys(("/v1/messages", "/v1/chat/completions/batch", "/generative_scoring"), _DECODE),
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations"), Passed(_POST, "decode")),
    "/v1/responses": Passed(_POST, "decode", salted=True, twice=False),
}
_STORED = re.compile(r"/v1/responses/(resp_[A-Za-z0-9_\-]{1,100})(/cancel)?")
_NOBODY = Name((), None, explicit=False)


def find_passed(path: str, extra: tuple[str, ...]) -> Passed | None:
    """How to pass on ``path``; None if it is not."""
    if (found := _ROUTES.get(path)) is not None:
        return found
    if stored := _STORED.fullmatch(path):
        return Passed(_POST if stored[2] else _GET, "decode")
    return Passed(("GET", "POST"), "decode", salted=True, twice=False) if path in extra else None


class Passing:
    """Runs one such request."""

    def __init__(
        self,
        core: ProxyCore,
        passed: Passed,
        method: str,
        path: str,
        query: str,
        tenant: bytes,
        headers: dict[str, str],
        trace: dict[str, object],
    ):
        """``path`` has been found by ``find_passed``; ``headers`` go to the engine as they are."""
        self._core = core
        self._config = core.config
        self._passed = passed
        self._method = method
        self._path = path
        self._query = f"?{query}" if query else ""
        self._tenant = tenant
        self._headers = headers
        self._trace = trace
        self._twice = passed.twice
        self._response: str | None = stored[1] if (stored := _STORED.fullmatch(path)) else None

    async def answer(self, body: bytes) -> Answer:
        """Raises nothing but cancellation and BadRequest."""
        self._core.count("passed_on")
        sent = self._prepared(body) if self._method != "GET" else None
        place = answer = None
        try:
            place = await self._enter(len(body) // CHARS_PER_TOKEN)
            answer = await self._ask(place, sent) if place is not None else unavailable("No engine is there.")
            return answer
        except TooBusy as busy:
            self._core.count("too_busy")
            if busy.displaced:
                self._core.count("displaced")
            return too_busy(busy)
        finally:
            if place is not None and (answer is None or answer.place is None):
                place.leave()

    def _prepared(self, body: bytes) -> bytes:
        """The body for the engine: JSON that computes KV gets a salt and loses what would aim engines at hosts."""
        if not self._passed.salted or not self._headers.get("content-type", "json").partition(";")[0].endswith("json"):
            return body
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            remove_transfer_fields(fields)
            salt = None if (raw := fields.pop("cache_salt", None)) is None else msgspec.json.decode(raw)
            previous = fields.get("previous_response_id")
            self._response = None if previous is None else msgspec.json.decode(previous)
        except UNREADABLE as error:
            raise BadRequest(f"The request body is not a JSON object: {error}.") from error
        if salt is not None and not (isinstance(salt, str) and salt):
            raise BadRequest("cache_salt must be a non-empty string if it is given.", param="cache_salt")
        self._twice |= self._path == "/v1/responses" and fields.get("store") == msgspec.Raw(b"false")
        return msgspec.json.encode(fields | {"cache_salt": self._core.tenants.salt(self._tenant, salt)})

    # -- which engine ----------------------------------------------------------------------------------------------

    async def _enter(self, tokens: int) -> Place | None:
        """Raises TooBusy."""
        if self._passed.role == "light":
            engines = self._candidates(None)
            return Place(engines[0]) if engines else None
        role = "pooling" if self._passed.role == "pooling" and self._core.fleet.pooling else "decode"
        began = time.monotonic()

        def choose() -> Choice | None:
            engines = self._candidates(None)
            well = [engine for engine in engines if engine.well] or engines
            free = next((engine for engine in well if not engine.full), None)
            return Choice(free, tokens if self._passed.salted else 0) if engines else None

        try:
            return await self._core.admission.enter(role, self._tenant, choose, self._config.queue_timeout)
        finally:
            self._core.metrics.waited(role, time.monotonic() - began)
            self._trace["queued"] = time.monotonic() - began

    def _candidates(self, placed: Engine | None) -> list[Engine]:
        """The engines that can serve it, best first; ``placed`` before all others."""
        fleet = self._core.fleet
        if self._passed.role == "light":
            # Ds, then the rest: where both serve one model either will do, and a D is always there.
            found = sorted(fleet, key=lambda e: (e.role != "decode", not e.well, e.load, e.turns))
            found = [engine for engine in found if engine.open]
        elif self._passed.role == "pooling" and fleet.pooling:
            found = sorted((e for e in fleet.pooling if e.open), key=lambda e: (not e.well, e.load, e.turns))
        else:
            found = self._core.router.rank_decode(self._name(), self._core.routes.find(self._name()))
        found.sort(key=lambda engine: (not engine.well, engine is not placed))
        return found

    def _name(self) -> Name:
        """The conversation of a response that some engine has stored."""
        if not isinstance(self._response, str):
            return _NOBODY
        digest = self._core.tenants.digest(b"response", self._tenant, self._response.encode("utf-8", "surrogatepass"))
        return Name((digest,), digest, explicit=True)

    # -- asking it -------------------------------------------------------------------------------------------------

    async def _ask(self, place: Place, body: bytes | None) -> Answer:
        worst: Answer | None = None
        for attempt, engine in enumerate(self._candidates(place.engine)[: self._config.max_decode_attempts]):
            if attempt:
                self._core.metrics.retried(engine.role)
            place.move(engine, 0)
            try:
                answer = await self._ask_one(engine, place, body)
            except EngineFailure as failure:
                engine.set_aside(str(failure))
                if not (self._twice or failure.unreached):
                    message = "The engine broke off. Whether it has done what was asked is not known."
                    return refusal(502, message, "upstream_error")
                continue
            if answer.status < 500 or not self._twice:
                self._trace |= {"engine": engine.url, "attempts": attempt + 1}
                return answer
            worst = answer
        return worst or unavailable("No engine could answer; the request can be sent again.")

    async def _ask_one(self, engine: Engine, place: Place, body: bytes | None) -> Answer:
        """Raises EngineFailure."""
        config = self._config
        timeout = config.probe_timeout if self._method == "GET" else config.answer_timeout
        path = self._path + self._query
        reply = await engine.ask(self._method, path, body, self._headers, timeout, repeatable=self._twice)
        answer = None
        try:
            if reply.status < 500:
                engine.succeeded()
            self._learn(reply)
            length = reply.headers.get("content-length", "")
            if reply.status == 200 and (is_stream(reply) or not length.isdigit() or int(length) > _WHOLE_BYTES):
                answer = Answer(200, passed_headers(reply, stream=is_stream(reply)), reply=reply, place=place)
                answer.pieces = self._relay(reply, answer)
                return answer
            return passed_on(reply, await reply.read(config.max_body_bytes, timeout))
        finally:
            if answer is None:
                reply.close()

    def _learn(self, reply: Reply) -> None:
        """Responses are stored where they were made; remember where that was."""
        if self._path == "/v1/responses" and (found := _RESPONSE_ID.search(reply.first)):
            self._response = found[1].decode()
            holder = Holder(reply.engine.index, reply.engine.life)
            self._core.routes.enter(self._name(), ConversationRoute((holder,)))

    async def _relay(self, reply: Reply, answer: Answer) -> AsyncIterator[bytes]:
        try:
            if reply.first:
                yield reply.first
            async with aclosing(reply.chunks(self._config.stream_idle_timeout)) as chunks:
                async for data in chunks:
                    yield data
        except EngineFailure as failure:
            reply.engine.set_aside(str(failure))
            self._core.count("broken_streams")
            answer.broken = True
            logger.warning("An answer ended early: %s", failure)
            if not is_stream(reply):
                raise AnswerBroken from failure
            # The client may have half an event: a blank line ends it.
            yield b"\n\n" + answers.error_events("The engine that generated this answer broke off.", 502)
