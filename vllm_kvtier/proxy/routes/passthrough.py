"""Routes that are forwarded unchanged: those of OpenAI and vLLM that are meant for clients.

The routes are listed, because vLLM serves routes on the same port that put engines to sleep, change their weights or
call their workers. A path that is neither listed here nor in ``extra_routes`` is 404.

A request goes to one engine; streams are forwarded as they arrive. Another engine is tried only before any byte of an
answer was forwarded, and only if the first engine cannot have started the request (no connection was made) or if the
request is idempotent for the client. ``/v1/responses`` with storing and ``extra_routes`` are not idempotent: if their
outcome is unknown, the client gets a 502. What an engine refuses is tried at another one as ``engines.refusals`` says.
"""

import re
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import NamedTuple

import msgspec

from vllm_kvtier.proxy.core import ProxyCore
from vllm_kvtier.proxy.engines.engine import AnswerTooLarge, Engine, EngineFailure, EngineSlot, Reply
from vllm_kvtier.proxy.engines.refusals import MAX_NAME, may_be_served_elsewhere
from vllm_kvtier.proxy.messages import response_rewriter
from vllm_kvtier.proxy.messages.forms import Form, is_form
from vllm_kvtier.proxy.messages.incoming_request import Incoming
from vllm_kvtier.proxy.messages.request_bodies import (
    MESSAGE_FIELDS,
    SCORE_FIELDS,
    BadRequest,
    as_utf8,
    read_field,
    read_object,
    remove_transfer_fields,
    rename_media,
)
from vllm_kvtier.proxy.routes.client_answer import (
    Answer,
    AnswerBroken,
    forwarded,
    forwarded_headers,
    refusal,
    unavailable,
)
from vllm_kvtier.proxy.routes.engine_request import EngineRequest, for_client
from vllm_kvtier.proxy.routing.admission import Choice, QueueFull
from vllm_kvtier.proxy.routing.conversations import CHARS_PER_TOKEN, ConversationRoute, Holder, Name
from vllm_kvtier.proxy.routing.prompt import Prompt
from vllm_kvtier.proxy.routing.router import candidates, waits_for

# Longer answers are streamed. Shorter ones are read whole first, so that another engine can be tried if one fails.
_MAX_WHOLE_BYTES = 4 << 20
# Of the end of a stream: an engine's error is its last event but ``[DONE]``.
_MAX_ERROR_BYTES = 16 << 10
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_\-]{1,100})"')


class PassthroughRoute(NamedTuple):
    """How a route is forwarded.

    ``role``: of the engines that serve it ("any": all do, and it computes almost nothing). ``salted``: it computes KV,
    so its body gets the tenant's salt. ``idempotent``: it may run twice.
    """

    methods: tuple[str, ...]
    role: str = "any"
    salted: bool = False
    idempotent: bool = True


_GET, _POST = ("GET",), ("POST",)
_LIGHT = PassthroughRoute(_POST)
_POOLING = PassthroughRoute(_POST, "pooling", salted=True)
_DECODE = PassthroughRoute(_POST, "decode", salted=True)

_SCORES = frozenset(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"))
_AUDIO = ("/v1/audio/transcriptions", "/v1/audio/translations")

_ROUTES = {
    **dict.fromkeys(("/v1/models", "/version", "/tokenizer_info"), PassthroughRoute(_GET)),
    **dict.fromkeys(("/tokenize", "/detokenize", "/v1/messages/count_tokens"), _LIGHT),
    **{f"/v1/{kind}/{step}": _LIGHT for kind in ("chat/completions", "completions") for step in ("render", "derender")},
    **dict.fromkeys(("/v1/messages/render", "/v1/responses/render", "/cohere/v2/chat/render"), _LIGHT),
    **dict.fromkeys(("/v1/embeddings", "/v2/embed", "/pooling", "/classify"), _POOLING),
    **dict.fromkeys(_SCORES, _POOLING),
    **dict.fromkeys(("/v1/messages", "/cohere/v2/chat", "/v1/chat/completions/batch"), _DECODE),
    **dict.fromkeys(("/generative_scoring", "/v1/decisions", "/v1/systemone"), _DECODE),
    **dict.fromkeys(_AUDIO, PassthroughRoute(_POST, "decode")),
    "/v1/responses": PassthroughRoute(_POST, "decode", salted=True, idempotent=False),
}
_JSON = {path for path, rule in _ROUTES.items() if rule.methods == _POST and path not in _AUDIO}
_STORED = re.compile(r"/v1/responses/(resp_[A-Za-z0-9_\-]{1,100})(/cancel)?")
_NO_CONVERSATION = Name((), None, explicit=False)


def find_passthrough(path: str, extra: tuple[str, ...]) -> PassthroughRoute | None:
    """How to forward ``path``; None if it is not forwarded."""
    if (found := _ROUTES.get(path)) is not None:
        return found
    if stored := _STORED.fullmatch(path):
        return PassthroughRoute(_POST if stored[2] else _GET, "decode")
    return PassthroughRoute(("GET", "POST"), "decode", salted=True, idempotent=False) if path in extra else None


def _is_object(body: bytes) -> bool:
    try:
        return as_utf8(body).lstrip().startswith(b"{")
    except UnicodeError:
        return False


def takes_json(path: str) -> bool:
    """Whether vLLM's route takes nothing but JSON, and asks for its content type."""
    return path in _JSON


class Passthrough(EngineRequest):
    """Runs one forwarded request."""

    def __init__(
        self, core: ProxyCore, incoming: Incoming, rule: PassthroughRoute, tenant: bytes, trace: dict[str, object]
    ):
        """``rule``: what ``find_passthrough`` returned for the path."""
        super().__init__(core, incoming, tenant, trace)
        self._rule = rule
        self._headers = incoming.for_engines("content-type", "accept", "anthropic-version", "anthropic-beta")
        self._idempotent = rule.idempotent
        self._stream = False  # whether the body asks for one
        self._response: str | None = stored[1] if (stored := _STORED.fullmatch(incoming.path)) else None

    async def answer(self, body: bytes) -> Answer:
        """Raises only CancelledError and BadRequest."""
        self._core.count("passed_on")
        sent = self._prepared(body) if self._incoming.method != "GET" else None
        slot = answer = None
        try:
            deadline = time.monotonic() + self._config.queue_timeout
            slot = await self._slot(len(body) // CHARS_PER_TOKEN, deadline)
            answer = await self._ask(slot, sent) if slot is not None else unavailable("No engine is available.")
            return answer
        except QueueFull as error:
            return self._queue_full(error)
        finally:
            self._refusals.end()
            if slot is not None and (answer is None or answer.slot is None):
                slot.release()

    def _prepared(self, body: bytes) -> bytes:
        """The body for the engine. What computes KV gets a salt, if engines take one, and its transfer params are
        removed.

        JSON is read whatever its content type says: engines compare it without regard to case, others may ignore it.
        Only ``extra_routes`` may take other bodies than JSON objects and, for audio, forms.
        """
        if self._incoming.path in _AUDIO and is_form(kind := self._incoming.headers.get("content-type", "")):
            form = Form(body, kind)
            self._refusals.wants = self._incoming.path, form.get("model")[:MAX_NAME]
            return form.without_transfer_fields()
        if self._incoming.path not in _JSON and not (self._rule.salted and _is_object(body)):
            return body
        fields = read_object(body)
        if self._incoming.path in _JSON and read_field(fields, "previous_response_id") is None:
            model = read_field(fields, "model")
            self._refusals.wants = self._incoming.path, model[:MAX_NAME] if isinstance(model, str) else ""
        is_chat = self._incoming.path in _JSON - _SCORES
        searched = MESSAGE_FIELDS if is_chat else MESSAGE_FIELDS | SCORE_FIELDS
        has_media = rename_media(fields, partial(self._core.tenants.media_name, self._tenant), searched)
        if not self._rule.salted:
            return msgspec.json.encode(fields) if has_media else body
        remove_transfer_fields(fields)
        self._stream = read_field(fields, "stream") is True
        salt, self._response = read_field(fields, "cache_salt"), read_field(fields, "previous_response_id")
        if salt is not None and not (isinstance(salt, str) and salt):
            raise BadRequest("cache_salt must be a non-empty string if given.", param="cache_salt")
        self._idempotent |= self._incoming.path == "/v1/responses" and fields.get("store") == msgspec.Raw(b"false")
        return msgspec.json.encode(fields | {"cache_salt": self._core.tenants.salt(self._tenant, salt)})

    # -- which engine ----------------------------------------------------------------------------------------------

    async def _slot(self, tokens: int, deadline: float) -> EngineSlot | None:
        """A slot at an engine that was not asked; None if there is none. Raises QueueFull."""
        if self._rule.role == "any":
            if not (engines := self._usable()):
                return None
            engines[0].lacking.tried(self._refusals.wants)
            return EngineSlot(engines[0])
        if not self._rule.salted and not self._asked and (engine := self._stored_at()) is not None:
            return EngineSlot(engine)  # of what is stored there it computes nothing
        role = self._role()

        def choose() -> Choice | None:
            if role != self._role() or not (usable := self._usable()):
                return None
            free = next((engine for engine in usable if not engine.full), None)
            if free is None:
                return Choice(None, full=waits_for(usable, getattr(self._core.fleet, role)))
            free.lacking.tried(self._refusals.wants)
            return Choice(free, tokens if self._rule.salted else 0)

        slot = await self._acquire(role, choose, deadline)
        if slot is None and role != self._role():
            return await self._slot(tokens, deadline)
        return slot

    def _role(self) -> str:
        """Whose engines serve it, and whose queue it waits in: a reload may add the first pooling engine, or remove the
        last."""
        return "pooling" if self._rule.role == "pooling" and self._core.fleet.pooling else "decode"

    def _usable(self) -> list[Engine]:
        """The engines to which it may be sent, best first."""
        ranked = self._ranked(None)
        usable = candidates(ranked, self._refusals.wants, self._asked)
        if not usable and not self._asked and not self._rule.salted:
            return ranked  # a drained engine is still read
        return usable

    def _ranked(self, chosen: Engine | None) -> list[Engine]:
        """The engines that can serve it, best first; ``chosen`` before all other healthy ones."""
        fleet = self._core.fleet
        if self._rule.role == "any":
            # Decode engines first: there is always one.
            found = [engine for engine in fleet if engine.open]
            found.sort(key=lambda e: (e.role != "decode", e.load, e.weighted_picks))
        elif self._role() == "pooling":
            found = [engine for engine in fleet.pooling if engine.open]
            found.sort(key=lambda e: (e.load, e.weighted_picks))
        elif (engine := self._stored_at()) is not None:
            # Others would answer that there is no such response. A drained engine is still read.
            return [engine] if engine.open or not self._rule.salted else []
        else:
            found = self._core.router.rank_decode(Prompt(_NO_CONVERSATION), None)
        found.sort(key=lambda engine: (not engine.healthy, engine is not chosen))
        return found

    def _stored_at(self) -> Engine | None:
        """The engine that has stored the response; None if there is none, or it is not known."""
        route = self._core.routes.find(self._name()) if isinstance(self._response, str) else None
        return None if route is None else self._core.fleet.find("decode", route.holders[0].decode)

    def _name(self) -> Name:
        """The conversation of the response."""
        digest = self._core.tenants.digest(b"response", self._tenant, self._response.encode("utf-8", "surrogatepass"))
        return Name((digest,), digest, explicit=True)

    # -- the request -----------------------------------------------------------------------------------------------

    async def _ask(self, slot: EngineSlot, body: bytes | None) -> Answer:
        error: Answer | None = None
        last: Answer | None = None
        readmit = partial(self._slot, slot.tokens)
        # An error is an outcome, other than a broken connection; clients would send it again as well.
        repeatable = self._idempotent or (self._incoming.path == "/v1/responses" and self._response is None)
        while engine := await self._next_engine(slot, readmit, self._ranked, error, last):
            if self._asked:
                self._core.metrics.retried(engine.role)
            self._asked[engine] = False
            self._attempts += 1
            try:
                answer = last = await self._ask_one(engine, slot, body)
            except AnswerTooLarge as failure:
                return self._answer_too_large(failure, self._idempotent or failure.unreached)
            except EngineFailure as failure:
                self._failed(engine, failure)
                if failure.late and body is not None and not self._stream:
                    return self._too_late()
                if not (self._idempotent or failure.unreached):
                    message = "The engine failed; it is not known whether it executed the request."
                    return refusal(502, message, "upstream_error")
                last = None
                continue
            self._trace |= {"engine": engine.url, "attempts": len(self._asked)}
            if answer.status < 400:
                self._refusals.served_by(engine)
                return answer
            elsewhere = repeatable and may_be_served_elsewhere(answer.status)
            if self._rule.role != "any" if answer.status >= 500 else elsewhere:
                self._refused(engine, answer.status)
            if not elsewhere:
                return answer
            error = for_client(error, answer)
        return self._no_engine(error, self._ranked(None))

    async def _ask_one(self, engine: Engine, slot: EngineSlot, body: bytes | None) -> Answer:
        """Raises EngineFailure."""
        config, method, query = self._config, self._incoming.method, self._incoming.query
        timeout = config.first_byte_timeout if self._stream else config.answer_timeout
        if method == "GET":
            # A response that is still computed may be read as a stream, which begins with its first event.
            timeout = config.probe_timeout if self._rule.role == "any" else config.first_byte_timeout
        path = f"{self._incoming.path}?{query}" if query else self._incoming.path
        reply = await engine.ask(method, path, body, self._headers, timeout, repeatable=self._idempotent)
        answer = None
        try:
            engine.confirmed |= reply.status < 500
            if reply.status < 400 and self._rule.role != "any":
                engine.succeeded()
            self._learn(reply)
            length = reply.headers.get("content-length", "")
            if reply.status == 200 and (reply.is_stream or not length.isdigit() or int(length) > _MAX_WHOLE_BYTES):
                answer = Answer(200, forwarded_headers(reply, stream=reply.is_stream), reply=reply, slot=slot)
                answer.pieces = self._relay(reply, answer)
                slot.prompt_computed()
                return answer
            return forwarded(reply, await reply.read(config.max_body_bytes, timeout, self._held))
        finally:
            if answer is None:
                reply.close()

    def _learn(self, reply: Reply) -> None:
        """Record the engine that has stored a response."""
        if self._incoming.path == "/v1/responses" and (found := _RESPONSE_ID.search(reply.first)):
            self._response = found[1].decode()
            holder = Holder(reply.engine.index, reply.engine.instance)
            self._core.routes.enter(self._name(), ConversationRoute((holder,)))

    async def _relay(self, reply: Reply, answer: Answer) -> AsyncIterator[bytes]:
        end = b""
        try:
            if reply.first:
                end = reply.first
                yield reply.first
            async with aclosing(reply.chunks(self._config.stream_idle_timeout)) as chunks:
                async for data in chunks:
                    end = (end + data)[-_MAX_ERROR_BYTES:]
                    yield data
        except EngineFailure as failure:
            reply.engine.failed(failure)
            self._note_broken(answer, failure)
            if not reply.is_stream:
                raise AnswerBroken from failure
            message = "The engine that generated this answer failed."
            # The client may have a part of an event; a blank line ends it.
            if self._incoming.path == "/v1/messages":
                yield b"\n\n" + response_rewriter.messages_error_event(message)
            elif self._incoming.path == "/cohere/v2/chat":
                yield b"\n\n" + response_rewriter.cohere_error_events(message)
            else:
                yield b"\n\n" + response_rewriter.error_events(message, 502)
        finally:
            # Also if the client left at once when it had the error.
            if reply.is_stream and response_rewriter.ends_with_server_error(end, self._incoming.path):
                self._note_error(reply, answer)
