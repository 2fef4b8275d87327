"""The answer to a client, and the engine slot and connection to release after it."""

from collections.abc import AsyncIterator

import msgspec

from vllm_kvtier.proxy.engines.engine import EngineSlot, Reply
from vllm_kvtier.proxy.messages import response_rewriter

JSON = {"content-type": "application/json"}

# Headers of an engine that are forwarded to the client.
_CLIENT_HEADERS = ("content-type", "content-disposition", "retry-after", "www-authenticate")


class AnswerBroken(Exception):
    """An answer failed in a format that cannot report it: the connection must be closed before the answer ends."""


class Answer(msgspec.Struct):
    """A whole ``body``, or ``pieces`` streamed from ``reply`` at ``slot``.

    ``broken``: set during the stream if the engine fails. The consumer must call ``aclose``, even if it took no pieces:
    closing an iterator that never started does not run its cleanup.
    """

    status: int
    headers: dict[str, str]
    body: bytes = b""
    pieces: AsyncIterator[bytes] | None = None
    reply: Reply | None = None
    slot: EngineSlot | None = None
    broken: bool = False

    async def aclose(self) -> None:
        try:
            if self.pieces is not None:
                await self.pieces.aclose()
        finally:
            if self.reply is not None:
                self.reply.close()
            if self.slot is not None:
                self.slot.release()


def forwarded_headers(reply: Reply, *, stream: bool = False) -> dict[str, str]:
    headers = {name: reply.headers[name] for name in _CLIENT_HEADERS if name in reply.headers}
    if stream:
        # The second header disables buffering in nginx.
        headers |= {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return headers


def forwarded(reply: Reply, document: bytes) -> Answer:
    """An engine's answer, unchanged."""
    return Answer(reply.status, forwarded_headers(reply), document)


def refusal(
    status: int, message: str, kind: str, headers: dict[str, str] | None = None, param: str | None = None
) -> Answer:
    """An error in OpenAI's form."""
    return Answer(status, JSON | (headers or {}), response_rewriter.error_body(message, kind, status, param))


def memory_full() -> Answer:
    message = "The proxy holds as much of requests and answers as it may; the request can be sent again."
    return refusal(503, message, "overloaded_error", {"retry-after": "1"})


def unavailable(message: str) -> Answer:
    return refusal(503, message, "upstream_error", {"retry-after": "1"})
