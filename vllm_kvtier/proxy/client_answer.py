"""What a client gets, and who is let go when it has it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from vllm_kvtier.proxy import answers
from vllm_kvtier.proxy.admission import TooBusy
from vllm_kvtier.proxy.engines import Place, Reply

JSON = {"content-type": "application/json"}

# Of an engine's headers, those that mean something to the client.
_PASSED_HEADERS = ("content-type", "content-disposition", "retry-after", "www-authenticate")


class AnswerBroken(Exception):
    """An answer broke off and its form has no way to say so: the connection must end before the answer does."""


class Answer(msgspec.Struct):
    """``body`` whole, or ``pieces`` as they come from ``reply``, at ``place``.

    ``broken``: set while pieces are taken, if the engine broke off. Who takes the answer must call ``aclose``, also if
    it took none of the pieces: closing an iterator that was never begun closes nothing that it would have closed.
    """

    status: int
    headers: dict[str, str]
    body: bytes = b""
    pieces: AsyncIterator[bytes] | None = None
    reply: Reply | None = None
    place: Place | None = None
    broken: bool = False

    async def aclose(self) -> None:
        try:
            if self.pieces is not None:
                await self.pieces.aclose()
        finally:
            if self.reply is not None:
                self.reply.close()
            if self.place is not None:
                self.place.leave()


def is_stream(reply: Reply) -> bool:
    return reply.headers.get("content-type", "").startswith("text/event-stream")


def passed_headers(reply: Reply, *, stream: bool = False) -> dict[str, str]:
    headers = {name: reply.headers[name] for name in _PASSED_HEADERS if name in reply.headers}
    if stream:
        # The second keeps nginx from buffering.
        headers |= {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return headers


def passed_on(reply: Reply, document: bytes) -> Answer:
    """An engine's answer as it is."""
    return Answer(reply.status, passed_headers(reply), document)


def refusal(
    status: int, message: str, kind: str, headers: dict[str, str] | None = None, param: str | None = None
) -> Answer:
    """An error in OpenAI's form."""
    return Answer(status, JSON | (headers or {}), answers.error_body(message, kind, status, param))


def too_busy(busy: TooBusy) -> Answer:
    message = f"{busy} Try again in {busy.retry_after} s."
    return refusal(429, message, "rate_limit_error", {"retry-after": str(busy.retry_after)})


def unavailable(message: str) -> Answer:
    return refusal(503, message, "upstream_error", {"retry-after": "1"})
