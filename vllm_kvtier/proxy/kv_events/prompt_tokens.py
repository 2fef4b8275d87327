"""The token ids of prompts, for ``BlockIndex``: those that the client sent, or made by an engine (``/tokenize``).

A turn of a conversation begins with the turn before it, whose ids are kept. So a conversation is tokenized again only
when a fifth of it is new. Without ids in time, the request is routed without them.
"""

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from vllm_kvtier.proxy.config import ProxyConfig
from vllm_kvtier.proxy.engines.engine import Engine, EngineFailure
from vllm_kvtier.proxy.engines.fleet import Fleet
from vllm_kvtier.proxy.engines.refusals import LACKS_AT_ONCE, MAX_NAME, Wants
from vllm_kvtier.proxy.kv_events.index import PromptTokens
from vllm_kvtier.proxy.messages.buffers import Buffers, Held
from vllm_kvtier.proxy.messages.request_bodies import ClientRequest, Route
from vllm_kvtier.proxy.messages.tokenization import read_tokens, tokenize_body
from vllm_kvtier.proxy.routing.conversations import CHARS_PER_TOKEN, Name
from vllm_kvtier.proxy.routing.prompt import Prompt

_MAX_KEPT_TOKENS = 8 << 20  # of all prompts; four bytes each
_ENTRY_TOKENS = 128  # what an entry takes beside its tokens
_KNOWN_SHARE = 0.8  # of a prompt, by an earlier turn
_MIN_TOKENS = 256  # whatever an engine has of a shorter prompt, computing it takes no longer than a request does
_TOKENIZE = "/tokenize"
_BACKOFF_SECONDS = 5.0  # after an engine that did not tokenize in time: for prompts that are as long, or longer

Key = tuple[bytes, int]  # digest of the prompt up to a turn, hash of what else changes its tokens


class PromptTokenizer:
    """``answers``: of engines. ``count`` counts events by name."""

    def __init__(self, fleet: Fleet, config: ProxyConfig, answers: Buffers, count: Callable[[str], None]):
        self.config = config
        self._answers = answers
        self._fleet = fleet
        self._count = count
        self._kept: OrderedDict[Key, array] = OrderedDict()
        self._kept_tokens = 0
        self._not_before = 0.0
        self._too_long = 0  # prompts from this estimate on are not sent to engines before then

    async def prompt(self, request: ClientRequest, name: Name, salt: str, headers: dict[str, str]) -> Prompt:
        """The prompt with its ids, if they can be had. ``headers`` are sent to the engine."""
        estimate = request.prompt_chars // CHARS_PER_TOKEN
        ids, total = None, estimate
        if estimate >= _MIN_TOKENS and self._has_choice():
            given = request.prompt
            if isinstance(given, list) and request.route is not Route.CHAT:
                ids, total = _packed(given), len(given)
            elif _is_plain(request):
                ids, total = await self._of_text(request, name, estimate, headers)
        known = None if ids is None else PromptTokens(ids, salt, request.model)
        return Prompt(name, total, known)

    def _has_choice(self) -> bool:
        roles = self._fleet.prefill, self._fleet.decode
        return any(sum(engine.usable for engine in engines) > 1 for engines in roles)

    async def _of_text(self, request: ClientRequest, name: Name, estimate: int, headers: dict[str, str]):
        """(ids or None, number of tokens). The ids may be those of an earlier turn."""
        body = tokenize_body(request)
        context = {field: value for field, value in body.items() if field not in ("messages", "prompt")}
        beside = hash(msgspec.json.encode(context, order="sorted"))
        for piece in reversed(name.pieces):
            if piece.tokens < _KNOWN_SHARE * estimate:
                break
            if (kept := self._kept.get((piece.digest, beside))) is not None:
                self._kept.move_to_end((piece.digest, beside))
                self._count("tokens_kept")
                return kept, max(len(kept), len(kept) + estimate - piece.tokens)
        wants = _TOKENIZE, request.model[:MAX_NAME]
        engine = self._idlest(wants)
        if engine is None or (time.monotonic() < self._not_before and estimate >= self._too_long):
            return None, estimate
        encoded = msgspec.json.encode(body)
        del body
        request.drop_prompt()
        ids = await self._tokenize(engine, encoded, headers, estimate, wants)
        if ids is None:
            return None, estimate
        if name.pieces:
            self._keep((name.pieces[-1].digest, beside), ids)
        return ids, len(ids)

    def _idlest(self, wants: Wants) -> Engine | None:
        every = (*self._fleet.decode, *self._fleet.prefill)
        engines = [engine for engine in every if engine.usable and wants not in engine.lacking]
        return min(engines, key=lambda engine: (engine.load, engine.tokens), default=None)

    async def _tokenize(
        self, engine: Engine, body: bytes, headers: dict[str, str], estimate: int, wants: Wants
    ) -> array | None:
        """Its failures do not make the engine unavailable, because they may be caused by the prompt."""
        deadline = time.monotonic() + self.config.tokenize_timeout
        try:
            reply = await engine.ask("POST", _TOKENIZE, body, headers, self.config.tokenize_timeout)
            try:
                left = max(0.0, deadline - time.monotonic())
                with Held(self._answers) as held:
                    document = await reply.read(self.config.max_event_bytes, left, held)
            finally:
                reply.close()
        except EngineFailure:
            now = time.monotonic()
            self._too_long = min(self._too_long, estimate) if now < self._not_before else estimate
            self._not_before = now + _BACKOFF_SECONDS
            self._count("tokenize_failed")
            return None
        if reply.status in LACKS_AT_ONCE:
            engine.lacking.add(wants)
        tokenized = read_tokens(document) if reply.status == 200 else None
        self._count("tokenized" if tokenized is not None else "tokenize_refused")
        return None if tokenized is None else _packed(tokenized.tokens)

    def _keep(self, key: Key, ids: array) -> None:
        if (before := self._kept.pop(key, None)) is not None:
            self._kept_tokens -= len(before) + _ENTRY_TOKENS
        self._kept[key] = ids
        self._kept_tokens += len(ids) + _ENTRY_TOKENS
        while self._kept_tokens > _MAX_KEPT_TOKENS:
            self._kept_tokens -= len(self._kept.popitem(last=False)[1]) + _ENTRY_TOKENS


def _packed(ids: list[int]) -> array | None:
    """In a tenth of the memory; None if one is no token id."""
    try:
        return array("I", ids)
    except OverflowError:
        return None


def _is_plain(request: ClientRequest) -> bool:
    """Whether /tokenize makes the tokens of this prompt."""
    if request.prompt is None or request.get("truncate_prompt_tokens") is not None:
        return False
    return not request.has_media
