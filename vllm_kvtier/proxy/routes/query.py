"""``POST /kvtier/query``: report what the engines hold for a prompt, without computing it.

The body is that of a completions or chat request, with the same headers as for generation:

    curl http://127.0.0.1:8000/kvtier/query -H 'Authorization: Bearer KEY' \\
        -d '{"model": "m", "messages": [{"role": "user", "content": "..."}]}'

    {"prompt_tokens": 812, "engines": [
        {"role": "prefill", "url": "http://127.0.0.1:8100", "gpu_cache_tokens": 800, "exported_tokens": 0},
        {"role": "decode", "url": "http://127.0.0.1:8200", "gpu_cache_tokens": 768, "exported_tokens": 768},
        {"role": "decode", "url": "http://127.0.0.1:8201", "unknown": "it did not answer in time"}]}

``gpu_cache_tokens``: tokens of the prompt's prefix in that engine's prefix cache.
``exported_tokens``: tokens of the prefix that another engine could pull from it now.
``unknown``: why an engine was not queried or did not answer. A connector's endpoint becomes known with its engine's
first answer, or is given as kv=HOST:PORT.

An engine tokenizes the prompt (vLLM's /tokenize). The prompt is salted as for generation, so a tenant sees only its own
KV. Several prompts, images and other media, and truncated prompts are refused with 400. For LoRA adapters nothing is
found.
"""

import asyncio
import contextlib
import time
from typing import Any

import msgspec

from vllm_kvtier.errors import PeerRefused
from vllm_kvtier.logs import get_logger
from vllm_kvtier.proxy.core import ProxyCore
from vllm_kvtier.proxy.deadlines import time_limit
from vllm_kvtier.proxy.engines.engine import Engine, EngineFailure, EngineSlot
from vllm_kvtier.proxy.engines.refusals import LACKS
from vllm_kvtier.proxy.messages.incoming_request import Incoming
from vllm_kvtier.proxy.messages.request_bodies import BadRequest, ClientRequest, Route
from vllm_kvtier.proxy.messages.tokenization import read_tokens, tokenize_body
from vllm_kvtier.proxy.routes.client_answer import JSON, Answer, forwarded, unavailable

logger = get_logger(__name__)

# Limits of the wire messages; no tokenizer has larger ids and no engine takes longer prompts.
_MAX_TOKEN = 1 << 31
_MAX_TOKENS = 1 << 21


class _Refused(Exception):
    """The engine refused the request; ``answer`` is for the client."""

    def __init__(self, answer: Answer):
        super().__init__(answer.status)
        self.answer = answer


class _Lacks(_Refused):
    """Another engine may have the model."""


def read_query(body: bytes) -> ClientRequest:
    """A completions or chat body to query. Raises BadRequest."""
    request = ClientRequest(Route.CHAT, body)
    given = [name for name in ("messages", "prompt") if name in request.fields]
    if len(given) != 1:
        raise BadRequest("A query needs either messages or a prompt, as a request to generate.")
    if given == ["prompt"]:
        request = ClientRequest(Route.COMPLETIONS, body)
    if request.prompt is None:
        raise BadRequest("A query needs exactly one prompt, and not an empty one.", param=given[0])
    if request.get("truncate_prompt_tokens") is not None:
        raise BadRequest("A query cannot truncate its prompt.", param="truncate_prompt_tokens")
    if request.has_media:
        raise BadRequest("A query covers text only.", param="messages")
    return request


async def answer_query(core: ProxyCore, body: bytes, tenant: bytes, incoming: Incoming) -> Answer:
    """As ``Query.answer``, when fewer than ``MAX_QUERIES`` are under way."""
    try:
        async with time_limit(core.config.queue_timeout):
            await core.querying.acquire()
    except TimeoutError:
        return unavailable("Too many queries are under way; this one can be sent again.")
    try:
        return await Query(core, read_query(body), tenant, incoming).answer()
    finally:
        core.querying.release()


class Query:
    """Runs one query, within at most two ``query_timeout``, one for each step.

    Its failures do not make engines unavailable, because they may be caused by the prompt.
    """

    def __init__(self, core: ProxyCore, request: ClientRequest, tenant: bytes, incoming: Incoming):
        """``incoming``: its headers are sent to the engine that tokenizes."""
        self._core = core
        self._request = request
        self._headers, self._held = incoming.for_engines() | JSON, incoming.answer_held
        self._salt = core.tenants.salt(tenant, request.client_salt)
        self._seconds = core.config.query_timeout

    async def answer(self) -> Answer:
        """Raises only CancelledError and BadRequest."""
        self._core.count("queries")
        try:
            tokens = await self._tokens()
        except _Refused as refused:
            return refused.answer
        engines = (*self._core.prefill, *self._core.decode)
        found = await asyncio.gather(*(self._ask(engine, tokens) for engine in engines))
        return Answer(200, JSON, msgspec.json.encode({"prompt_tokens": len(tokens), "engines": found}))

    async def _tokens(self) -> list[int]:
        """The prompt's token ids. Raises BadRequest or _Refused."""
        prompt = self._request.prompt
        if self._request.route is Route.COMPLETIONS and isinstance(prompt, list):
            if len(prompt) > _MAX_TOKENS:
                raise BadRequest(f"The prompt has more than {_MAX_TOKENS} tokens.", param="prompt")
            if not all(type(token) is int and 0 <= token <= _MAX_TOKEN for token in prompt):
                raise BadRequest("The prompt contains a value that is not a token id.", param="prompt")
            return prompt
        body = msgspec.json.encode(tokenize_body(self._request))
        deadline = time.monotonic() + self._seconds
        reason, lacking = "there is no engine", None
        engines = (*self._core.decode, *self._core.prefill)
        for engine in sorted(engines, key=lambda engine: not engine.healthy):
            # Half of the remaining time, so that a stalled engine leaves time for the next.
            seconds = max(0.0, deadline - time.monotonic()) / 2
            try:
                tokenized = await self._tokenize_at(engine, body, seconds)
            except EngineFailure as failure:
                logger.debug("kvtier: proxy: an engine failed to tokenize a query (%s)", failure)
                reason = str(failure)
                continue
            except _Lacks as lacks:
                lacking = lacking or lacks
                continue
            if tokenized is not None:
                return tokenized
            reason = f"{engine} cannot tokenize it"
        if lacking is not None:
            raise lacking
        logger.warning("kvtier: proxy: no engine tokenized a query (%s); the query is refused", reason)
        raise _Refused(unavailable("No engine could tokenize the prompt; the query can be sent again."))

    async def _tokenize_at(self, engine: Engine, body: bytes, seconds: float) -> list[int] | None:
        """None if this engine cannot tokenize. Raises EngineFailure, and _Refused if it rejects the request."""
        began = time.monotonic()
        slot = EngineSlot(engine)
        try:
            reply = await engine.ask("POST", "/tokenize", body, self._headers, seconds)
            left = max(0.0, seconds - (time.monotonic() - began))
            with contextlib.closing(reply):
                document = await reply.read(self._core.config.max_event_bytes, left, self._held)
        finally:
            slot.release()
        if 400 <= reply.status < 500:
            raise (_Lacks if reply.status in LACKS else _Refused)(forwarded(reply, document))
        if reply.status != 200:
            return None
        tokenized = read_tokens(document)
        if tokenized is None:
            return None
        limit = min(tokenized.max_model_len or _MAX_TOKENS, _MAX_TOKENS)
        if len(tokenized.tokens) > limit:
            raise BadRequest(f"The prompt has {len(tokenized.tokens)} tokens; at most {limit} are allowed.")
        return tokenized.tokens

    async def _ask(self, engine: Engine, tokens: list[int]) -> dict[str, Any]:
        """One engine's entry in the answer."""
        line: dict[str, Any] = {"role": engine.role, "url": engine.url}
        source = engine.source
        if not engine.healthy:
            return line | {"unknown": "it failed and is unavailable"}
        if source is None:
            return line | {"unknown": "its connector's endpoint is not known yet"}
        try:
            # Queries to one engine run one after the other.
            async with time_limit(self._seconds):
                held = await self._core.endpoints.query(source.host, source.port, tokens, self._salt)
        except TimeoutError:
            return line | {"unknown": "it did not answer in time"}
        except (PeerRefused, OSError) as error:
            logger.debug("kvtier: proxy: %s refused a query (%s)", engine, error)
            return line | {"unknown": "it refused the query"}
        return line | {"gpu_cache_tokens": held.gpu_cache, "exported_tokens": held.exported}
