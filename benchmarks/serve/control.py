"""What is done to servers between measurements: small requests that make them report, emptied caches."""

import asyncio
import json
import random
import time

import aiohttp

from . import counters
from .client import ask, encode
from .targets import Target

POLL_SECONDS = 0.05  # there is no event for a counter at rest, so it is polled
STILL_SECONDS = 0.4
TRIES = 3  # an engine may fail a request and live
NUDGE_TOKENS = 4  # fewer than any block has
# Bytes and blocks that a connector has put into host memory.
_STORED = ("vllm:kvtier_stored_", "vllm:kv_offload_store")


class ServerFailed(RuntimeError):
    """A server does not answer, or does not do what was asked of it."""


class Hands:
    """On one variant's servers. ``model``: the name that they serve it by. Raises ServerFailed."""

    def __init__(self, session: aiohttp.ClientSession, model: str, headers: dict[str, str], vocabulary: int):
        self._session, self._model, self._headers, self._vocabulary = session, model, headers, vocabulary
        self._rng = random.Random()  # what is asked here must never be found in a cache
        self.nudged = 0  # prompt tokens of all nudges

    async def nudge(self, target: Target) -> None:
        """A request of a few tokens: connectors report, and some only work, in an engine's steps."""
        body = {"model": self._model, "max_tokens": 2, "stream": True, "ignore_eos": True}
        body["prompt"] = [self._rng.randrange(self._vocabulary // 2, self._vocabulary) for _ in range(NUDGE_TOKENS)]
        self.nudged += NUDGE_TOKENS
        url = f"{target.base_url}/v1/completions"
        for _ in range(TRIES):
            reply = await ask(self._session, url, encode(body), {**self._headers, **target.headers})
            if not reply.error:
                return
            await asyncio.sleep(POLL_SECONDS)
        raise ServerFailed(reply.error)

    async def settle(self, target: Target, seconds: float = 10.0) -> counters.Counts:
        """Until the connector has stopped putting things away, or for so long; the counts then."""
        deadline = time.monotonic() + seconds
        last, since = -1.0, time.monotonic()
        while True:
            await self.nudge(target)
            counts = await counters.read(self._session, [target])
            samples = counters.total(counts)
            stored = [value for name, value in samples.items() if name.startswith(_STORED)]
            now = time.monotonic()
            if sum(stored) != last:
                last, since = sum(stored), now
            if not stored or now - since > STILL_SECONDS or now > deadline:
                return counts
            await asyncio.sleep(POLL_SECONDS)

    async def until_usable(self, target: Target, nbytes: int, seconds: float = 240.0) -> None:
        """Until the engine can use so many bytes of its node store, which touches and pins them while it serves: that
        would be measured. Raises ServerFailed if it cannot after so long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            await self.nudge(target)
            if await counters.gauge(self._session, target, "vllm:kvtier_store_registered_bytes") >= nbytes:
                return
            await asyncio.sleep(POLL_SECONDS)
        raise ServerFailed(f"{target.base_url} has not got {nbytes} bytes of its node store after {seconds:g} s")

    async def forget(self, target: Target, seconds: float = 15.0) -> bool:
        """Empty the engines' own prefix caches, and those alone; False where the server has no such route.

        They refuse while blocks are held, by copies for example; from vLLM 0.25 there is no telling. Raises
        ServerFailed if they still do after so long.
        """
        deadline = time.monotonic() + seconds
        url = f"{target.base_url}/reset_prefix_cache"
        while True:
            async with self._session.post(url, headers=self._headers) as response:
                if response.status in (404, 405):
                    return False
                text = await response.text()
                if response.status == 200 and "false" not in text:
                    return True
            if time.monotonic() > deadline:
                raise ServerFailed(f"{url} answers {response.status} {text[:200]!r} for {seconds:g} s: blocks are held")
            await self.nudge(target)
            await asyncio.sleep(POLL_SECONDS)


async def served_model(session: aiohttp.ClientSession, target: Target, headers: dict[str, str]) -> str:
    """The first model that a server names. Raises ServerFailed."""
    url = f"{target.base_url}/v1/models"
    try:
        async with session.get(url, headers=headers) as response:
            if response.status != 200:
                raise ServerFailed(f"{url} answered {response.status}: {(await response.text())[:200]}")
            return json.loads(await response.text())["data"][0]["id"]
    except (aiohttp.ClientError, OSError, LookupError, TypeError, ValueError) as error:
        raise ServerFailed(f"{url}: {type(error).__name__}: {error}") from error


async def server_version(session: aiohttp.ClientSession, target: Target) -> str | None:
    """vLLM's, None of a server that does not say."""
    try:
        async with session.get(f"{target.base_url}/version") as response:
            return json.loads(await response.text()).get("version") if response.status == 200 else None
    except (aiohttp.ClientError, OSError, AttributeError, ValueError):
        return None
