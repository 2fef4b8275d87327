"""A client of engines for tests: requests, the steps of a proxy, comparison of answers, inspection."""

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from vllm_kvtier.devtools.clients import PromptTokens, prompt_tokens
from vllm_kvtier.devtools.engines import Engine
from vllm_kvtier.errors import PeerRefused
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.client import AsyncEndpointClient
from vllm_kvtier.wire.messages import Inspection, PrefixLengths

VOCABULARY = 2048
WORDS = "amber brook cedar delta ember fjord glade harbor silver maple stone river".split()
SYSTEM = {"role": "system", "content": "You keep notes and answer from them."}
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

# In float32 a logprob computed in another batch, or by a decode step instead of a prefill, moved by 1e-5 at most
# where it was measured (3000 tokens); KV that is wrong in one token moves it a hundred times more.
LOGPROB_TOLERANCE = 5e-4
# So two candidates closer than this may change places; whatever else differs is wrong.
TIE = 5e-4

Prompt = list[int] | list[dict[str, str]]  # token ids, or a chat's messages


class Reply(msgspec.Struct):
    tokens: list[int]
    logprobs: list[float]
    top: list[list[float]]  # a token's best two logprobs
    text: str
    prompt: list[int]
    params: dict[str, Any] | None
    seconds: float

    @property
    def report(self) -> dict[str, Any]:
        return (self.params or {}).get("kvtier", {})

    @property
    def pulled(self) -> int:
        return self.report.get("pulled_tokens", 0)

    def head(self, count: int) -> "Reply":
        """The same answer, cut to ``count`` tokens."""
        cut = {"tokens": self.tokens[:count], "logprobs": self.logprobs[:count], "top": self.top[:count]}
        return msgspec.structs.replace(self, **cut)


class Refused(AssertionError):
    """An engine answered with an error; ``status`` is HTTP's."""

    def __init__(self, status: int, text: str):
        super().__init__(f"{status}: {text[:500]}")
        self.status = status


def off(got: Reply, want: Reply, tolerance: float) -> float:
    """Largest difference of logprobs, as far as the tokens are the same; they part only where two are as good."""
    worst = 0.0
    for a, b, x, y, best in zip(got.tokens, want.tokens, got.logprobs, want.logprobs, want.top, strict=True):
        if a != b:
            return worst if best[0] - best[1] < 2 * tolerance else float("inf")
        worst = max(worst, abs(x - y))
    return worst


def assert_same(got: Reply, want: Reply, what: object = "") -> None:
    """Greedy answers equal token for token; only where two candidates tie may they part."""
    assert got.prompt == want.prompt, what
    for i, (a, b) in enumerate(zip(got.tokens, want.tokens, strict=False)):
        if a != b:
            best, second = want.top[i]
            assert best - second < TIE, f"token {i} is {a} instead of {b} by {best - second:.4f}: {what}"
            return
        off = abs(got.logprobs[i] - want.logprobs[i])
        assert off < LOGPROB_TOLERANCE, f"the logprob of token {i} is off by {off:.5f}: {what}"
    assert len(got.tokens) == len(want.tokens), what


def with_sources(*engines: Engine) -> dict[str, Any]:
    """Prefill params from a router that knows engines with the conversation."""
    named = []
    for engine in engines:
        host, port = engine.kv_address.rsplit(":", 1)
        named.append({"engine_id": engine.name, "host": host, "port": int(port)})
    return {**PREFILL, "kvtier": {"sources": named}}


def known_from(reply: Reply) -> dict[str, Any]:
    """Prefill params as vLLM's multi-turn proxy makes them: the fields that the decode engine returned."""
    remote = {name: value for name, value in (reply.params or {}).items() if name.startswith("remote_")}
    return {**PREFILL, **remote}


class Driver:
    """Requests to engines on one event loop."""

    def __init__(self, http: httpx.AsyncClient, endpoints: AsyncEndpointClient, single: Engine):
        self._http, self._endpoints, self._single = http, endpoints, single

    # -- requests ----------------------------------------------------------------------------------------------

    async def ask(
        self,
        engine: Engine,
        prompt: Prompt,
        max_tokens: int = 8,
        params: dict | None = None,
        headers: dict[str, str] | None = None,
        **body: Any,
    ) -> Reply:
        """A greedy answer of exactly ``max_tokens`` tokens (``ignore_eos``), unless ``body`` says otherwise."""
        chat = not prompt or isinstance(prompt[0], dict)
        defaults = {
            "model": "model",
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        asked = {"messages": prompt, "logprobs": True, "top_logprobs": 2} if chat else {"prompt": prompt, "logprobs": 2}
        extra = {} if params is None else {"kv_transfer_params": params}
        content = json.dumps({**defaults, **asked, **extra, **body})  # in ASCII, whatever characters it names
        started = time.monotonic()
        url = f"{engine.base_url}/v1/{'chat/completions' if chat else 'completions'}"
        headers = {"Content-Type": "application/json", **(headers or {})}
        response = await self._http.post(url, content=content, headers=headers)
        if response.status_code != 200:
            raise Refused(response.status_code, response.text)
        document = response.json()
        choice = document["choices"][0]
        if choice["finish_reason"] == "error":
            raise Refused(500, "finish_reason error")
        found = choice["logprobs"] or {}
        if chat:
            found = found.get("content") or []
            logprobs = [entry["logprob"] for entry in found]
            top = [sorted((t["logprob"] for t in entry["top_logprobs"]), reverse=True)[:2] for entry in found]
        else:
            logprobs = found.get("token_logprobs") or []
            top = [sorted(entry.values(), reverse=True)[:2] for entry in found.get("top_logprobs") or []]
        return Reply(
            tokens=choice["token_ids"],
            logprobs=logprobs,
            top=top,
            text=choice["message"]["content"] if chat else choice["text"],
            prompt=document["prompt_token_ids"] if chat else choice["prompt_token_ids"],
            params=document.get("kv_transfer_params"),
            seconds=time.monotonic() - started,
        )

    async def truth(self, prompt: Prompt, max_tokens: int = 8, **body: Any) -> Reply:
        """What the single engine answers."""
        return await self.ask(self._single, prompt, max_tokens, **body)

    async def prefill(self, engine: Engine, prompt: Prompt, params: dict | None = None, **body: Any) -> Reply:
        return await self.ask(engine, prompt, 1, params or PREFILL, **body)

    async def hand_off(
        self, p: Engine, d: Engine, prompt: Prompt, max_tokens: int = 8, params: dict | None = None, **body: Any
    ) -> tuple[Reply, Reply]:
        """What a proxy does for one request."""
        first = await self.prefill(p, prompt, params, **body)
        return first, await self.ask(d, prompt, max_tokens, first.params, **body)

    async def assert_right(self, reply: Reply, prompt: Prompt, what: object = "", **body: Any) -> None:
        assert_same(reply, await self.truth(prompt, len(reply.tokens), **body), what)

    async def disconnect(self, engine: Engine, prompt: Prompt, after: float, params: dict | None = None) -> None:
        """A client that requests a long answer and leaves ``after`` seconds."""
        task = asyncio.create_task(self.ask(engine, prompt, 400, params))
        await asyncio.wait([task], timeout=after)
        task.cancel()
        await asyncio.wait([task])

    async def leave(self, engine: Engine, prompt: list[int], after: float, params: dict) -> None:
        """As ``disconnect``, after the server has accepted the request: else the engine may never have seen it."""
        body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True, "kv_transfer_params": params}
        async with self._http.stream("POST", f"{engine.base_url}/v1/completions", json=body) as response:
            assert response.status_code == 200
            await asyncio.sleep(after)

    # -- looking inside ------------------------------------------------------------------------------------------

    async def inspect(self, engine: Engine) -> Inspection:
        return await self._endpoints.inspect(*_address(engine))

    async def query(self, engine: Engine, tokens: list[int], salt: str = "") -> PrefixLengths:
        return await self._endpoints.query(*_address(engine), tokens, salt)

    async def sources(self, engine: Engine) -> PromptTokens:
        """Where the engine's prompt tokens came from, by vLLM's own count."""
        return await asyncio.to_thread(prompt_tokens, engine.base_url)

    async def metric(self, engine: Engine, name: str, label: str = "") -> float:
        """Sum of a counter's samples, of all labels or of those that contain ``label``."""
        text = (await self._http.get(f"{engine.base_url}/metrics")).text
        samples = re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})? ([\d.e+-]+)$", text, re.M)
        return sum(float(value) for labels, value in samples if label in labels)

    async def until(self, holds: Callable[[], Awaitable[Any]], seconds: float, what: str) -> Any:
        """The first true value of ``holds()``."""
        deadline = time.monotonic() + seconds
        while not (value := await holds()):
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
            await asyncio.sleep(0.02)
        return value

    async def until_no_exports(self, engine: Engine, seconds: float = 5.0) -> Inspection:
        """Before any export would expire (six seconds, or more): it was released at once."""
        last: Inspection | None = None

        async def none() -> bool:
            nonlocal last
            last = await self.inspect(engine)
            return last.exports == 0 and last.leases == 0 and last.free_blocks == last.blocks - 1

        try:
            await self.until(none, seconds, f"{engine.name} holds nothing")
        except AssertionError as error:
            raise AssertionError(f"{error}; it says {last}") from None
        return last

    async def until_idle(self, *engines: Engine, seconds: float = 25.0) -> None:
        """Every block of every engine's own pool is free (but the null block), and nothing is held or followed."""
        last: dict[str, Inspection] = {}

        async def idle() -> bool:
            for engine in engines:
                last[engine.name] = await self.inspect(engine)
            return all(
                i.free_blocks == i.blocks - 1
                and not (i.exports or i.leases or i.exported_blocks or i.held_leases or i.requests)
                for i in last.values()
            )

        try:
            await self.until(idle, seconds, "all blocks free")
        except (AssertionError, TimeoutError, PeerRefused) as error:
            raise AssertionError(f"{error}; they say {last}") from error
        assert not any(i.violations for i in last.values()), last


@asynccontextmanager
async def driving(
    single: Engine, kind: type[Driver] = Driver, key: ClusterKey | None = None, answer_seconds: float = 20.0
) -> AsyncIterator[Driver]:
    """``key``: of the engines. ``answer_seconds``: maximum for their endpoints' answers."""
    # vLLM's server closes a connection that was idle for 5 seconds; one that is used at that moment breaks.
    limits = httpx.Limits(max_connections=64, keepalive_expiry=2.0)
    timeout = httpx.Timeout(90.0, connect=5.0)
    endpoints = AsyncEndpointClient(key, timeout=answer_seconds)
    async with httpx.AsyncClient(limits=limits, timeout=timeout) as http, endpoints as client:
        yield kind(http, client, single)


def _address(engine: Engine) -> tuple[str, int]:
    host, port = engine.kv_address.rsplit(":", 1)
    return host, int(port)


# -- prompts -------------------------------------------------------------------------------------------------------


def random_tokens(rng: random.Random, length: int) -> list[int]:
    """A prompt that was never sent before."""
    return [rng.randrange(300, VOCABULARY) for _ in range(length)]


def facts(rng: random.Random, count: int) -> dict[str, str]:
    """Codes for the model to recall, by name."""
    return {" ".join(rng.sample(WORDS, 2)): str(rng.randrange(10000, 100000)) for _ in range(count)}


def told(codes: dict[str, str]) -> str:
    return " ".join(f"The code for {name} is {code}." for name, code in codes.items())


def question(name: str) -> str:
    return f"What is the code for {name}?"
