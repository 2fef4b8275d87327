"""What of an engine's answer reaches the client: params are learned and taken out, a report may be put in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from vllm_kvtier.proxy import params, sse

_DONE = b"[DONE]"
_NAME = b"kv_transfer_params"
_NULL = b'"kv_transfer_params":null'


class AnswerRewriter:
    """Rewrites one answer of D, whole or in pieces, for one client.

    ``learn`` is called with each params found. ``report`` is None, or returns what the client asked to see
    given D's params (None if D sent none); it then stands at ``kv_transfer_params.kvtier``.
    """

    def __init__(
        self,
        learn: Callable[[params.TransferParams], None],
        report: Callable[[params.TransferParams | None], dict[str, Any]] | None,
        *,
        expose_params: bool,
        max_event_bytes: int,
    ):
        self._learn = learn
        self._report = report
        self._expose = expose_params
        self._splitter = sse.EventSplitter(max_event_bytes)
        self._reported = False
        self._like: bytes | None = None
        self.done = False

    def whole(self, document: bytes) -> bytes:
        """A JSON answer. What is not JSON passes unchanged."""
        found = params.find_params(document)
        if found is not None:
            self._learn(found)
        if found is None and self._report is None:
            return document
        try:
            return params.replace_params(document, self._shown(found))
        except params.UNREADABLE:
            return document

    def feed(self, data: bytes) -> bytes:
        """Pieces of a streamed answer; returns what can be passed on now. Raises sse.EventTooLarge."""
        return b"".join(self._event(event) for event in self._splitter.feed(data))

    def close(self) -> bytes:
        """The rest, once the stream has ended in order: bytes that no blank line ended."""
        tail = self._splitter.tail
        # A client drops an unfinished event, so nothing is lost with one that must not be seen.
        return b"" if b"kv_transfer_params" in tail else tail

    def _event(self, event: bytes) -> bytes:
        # vLLM 0.33 puts a null on every chunk but the last: no reason to parse them all.
        if self._report is None and event.count(_NAME) == event.count(_NULL) and _DONE not in event:
            return event
        data = sse.event_data(event)
        if data is None:
            return event
        if data.strip() == _DONE:
            self.done = True
            return self._missing_report() + event
        found = params.find_params(data)
        if found is None:
            self._like = self._like or data
            return event
        self._learn(found)
        self._reported = True
        try:
            return sse.with_data(event, params.replace_params(data, self._shown(found)))
        except params.UNREADABLE:
            return event

    def _shown(self, found: params.TransferParams | None) -> dict[str, Any] | None:
        shown: dict[str, Any] = {}
        if self._expose and found is not None:
            shown |= found.values
        if self._report is not None:
            own = found.own if self._expose and found is not None else {}
            shown["kvtier"] = {**own, **self._report(found)}
        return shown or None

    def _missing_report(self) -> bytes:
        """The report as an event of its own, for a stream whose chunks had no params to put it in."""
        if self._report is None or self._reported:
            return b""
        self._reported = True
        chunk: dict[str, Any] = {}
        if self._like is not None:
            # A chunk that clients take: the names of an earlier one, without choices.
            earlier = _fields_of(self._like)
            chunk = {key: earlier[key] for key in ("id", "object", "created", "model") if key in earlier}
        return sse.make_event(msgspec.json.encode(chunk | {"choices": [], "kv_transfer_params": self._shown(None)}))


def error_body(message: str, kind: str, status: int, param: str | None = None) -> bytes:
    """An error as vLLM and OpenAI phrase it."""
    error = {"message": message, "type": kind, "param": param, "code": status}
    return msgspec.json.encode({"error": error})


def error_events(message: str, status: int) -> bytes:
    """The end of a stream that broke after its first bytes, as vLLM ends one that fails."""
    return sse.make_event(error_body(message, "upstream_error", status)) + sse.make_event(_DONE)


def _fields_of(data: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(data)
    except params.UNREADABLE:
        return {}
    return fields if isinstance(fields, dict) else {}
