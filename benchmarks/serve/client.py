"""One streamed request, and when its tokens arrived.

Times are taken as bytes leave and come, before anything is decoded: what this process needs to encode a long prompt or
to decode an event is in no measurement but where requests wait for each other; ``meters.py`` says how much that is.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

# Servers close connections that were idle for 5 s (uvicorn's default, and vLLM's): we do before they can.
IDLE_SECONDS = 3.0
_encoder = msgspec.json.Encoder()


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    """What we need of an event; everything else, a prompt's ids among it, is skipped unread."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)


@dataclass
class Reply:
    """Times by time.perf_counter. ``first``, ``last``: when the first and the last event with a choice arrived.
    ``cached_tokens``: of the prompt, where the server says it (--enable-prompt-tokens-details)."""

    start: float
    first: float | None = None
    last: float | None = None
    longest_gap: float = 0.0  # seconds between two events that followed each other
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds; only of a reply without error."""
        return self.first - self.start

    @property
    def latency(self) -> float:
        """Seconds until the last token."""
        return self.last - self.start

    @property
    def itl(self) -> float | None:
        """Mean seconds from a token to the next; None for an answer of one."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def new_session(seconds: float) -> aiohttp.ClientSession:
    """``seconds``: longest silence of a server in the middle of an answer. To be made inside the event loop."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=seconds),
        # A proxy named in the environment is not what is measured.
        trust_env=False,
    )


def encode(body: dict[str, Any]) -> bytes:
    return _encoder.encode(body)


async def ask(session: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str]) -> Reply:
    """Never raises for what a server or the network does: that is in the reply's ``error``."""
    reply = Reply(time.perf_counter())
    headers = {"Content-Type": "application/json", **headers}
    try:
        async with session.post(url, data=body, headers=headers) as response:
            if response.status != 200:
                reply.error = f"{url} answered {response.status}: {(await response.text())[:300]}"
            else:
                await _read(response, reply, url)
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        reply.error = f"{url}: {type(error).__name__}: {error}".rstrip(": ")
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        reply.error = f"{url} sent an event that is none: {error}"
    return reply


async def _read(response: aiohttp.ClientResponse, reply: Reply, url: str) -> None:
    """All events of the stream. An event's time is that of its first byte: the first one may be long, since vLLM sends
    the prompt's ids back with it."""
    pending, arrived, done = b"", 0.0, False
    async for piece in response.content.iter_any():
        now = time.perf_counter()
        if not pending:
            arrived = now
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    done = True
                else:
                    _take(_decoder.decode(data), arrived, reply)
            arrived = now
        if reply.error:
            return
    if not done:
        reply.error = f"{url} broke its stream off after {len(reply.token_ids) or reply.output_tokens} tokens"
    elif reply.first is None:
        reply.error = f"{url} ended its stream without a token"
    elif not reply.output_tokens:
        reply.output_tokens = len(reply.token_ids)


def _take(event: _Event, arrived: float, reply: Reply) -> None:
    if event.error is not None:
        reply.error = f"the stream ended with {str(event.error)[:300]}"
        return
    if event.choices:
        choice = event.choices[0]
        if reply.first is None:
            reply.first = arrived
        else:
            reply.longest_gap = max(reply.longest_gap, arrived - reply.last)
        reply.last = arrived
        reply.token_ids += choice.token_ids or ()
        reply.text += choice.text or ""
        if choice.delta is not None:
            reply.text += choice.delta.content or choice.delta.reasoning or choice.delta.reasoning_content or ""
    if event.usage is not None:
        reply.prompt_tokens = event.usage.prompt_tokens
        reply.output_tokens = event.usage.completion_tokens or reply.output_tokens
        details = event.usage.prompt_tokens_details
        if details is not None and details.cached_tokens is not None:
            reply.cached_tokens = details.cached_tokens
