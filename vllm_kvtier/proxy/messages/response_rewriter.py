"""Rewrite an engine's answer for the client: remove ``kv_transfer_params``, add the report if requested."""

import re
from collections.abc import Callable
from typing import Any

import msgspec

from vllm_kvtier.proxy.messages import sse, transfer_params

_DONE = b"[DONE]"
_NAME = b"kv_transfer_params"
_NULL = b'"kv_transfer_params":null'
# Whole lines.
_DATA = re.compile(rb"^data: ?(\{.*\})\r?$", re.M)
_MESSAGES_ERROR = re.compile(rb"^event: error\r?\ndata: (\{.*\})\r?$", re.M)
_MESSAGES_ERROR_TYPES = ("api_error", "internal_error", "overloaded_error", "timeout_error")
_CHAT_TEXTS = ("reasoning", "reasoning_content", "tool_calls", "refusal", "audio")  # beside content


class AnswerRewriter:
    """Rewrites one answer of a decode engine, whole or streamed.

    ``learn`` is called with all params found. ``report``, if given, returns the client's report from the decode
    engine's params (None if it sent none); the report is put at ``kv_transfer_params.kvtier``.
    """

    def __init__(
        self,
        learn: Callable[[transfer_params.TransferParams], None],
        report: Callable[[transfer_params.TransferParams | None], dict[str, Any]] | None,
        *,
        expose_params: bool,
        max_event_bytes: int,
    ):
        self._learn = learn
        self._report = report
        self._expose = expose_params
        self._splitter = sse.EventSplitter(max_event_bytes)
        self._reported = False
        self._sample_chunk: bytes | None = None
        self.done = False

    def whole(self, document: bytes) -> bytes:
        """A JSON answer. Anything else is returned unchanged."""
        found = transfer_params.find_params(document)
        if found is not None:
            self._learn(found)
        if found is None and self._report is None:
            return document
        try:
            return transfer_params.replace_params(document, self._client_params(found))
        except transfer_params.UNREADABLE:
            return document

    def feed(self, data: bytes) -> bytes:
        """Take a piece of a streamed answer; return the events that are complete. Raises sse.EventTooLarge."""
        return b"".join(self._event(event) for event in self._splitter.feed(data))

    @property
    def held_bytes(self) -> int:
        """Of an event that has not ended."""
        return self._splitter.held_bytes

    def close(self) -> bytes:
        """The rest after a regular end of the stream: bytes without a blank line."""
        tail = self._splitter.tail
        # A client drops an unfinished event, so that one with params can be dropped here.
        return b"" if b"kv_transfer_params" in tail else tail

    def _event(self, event: bytes) -> bytes:
        # vLLM 0.33 sends null params with each chunk but the last; these are not parsed.
        if self._report is None and event.count(_NAME) == event.count(_NULL) and _DONE not in event:
            return event
        data = sse.event_data(event)
        if data is None:
            return event
        if data.strip() == _DONE:
            self.done = True
            return self._missing_report() + event
        found = transfer_params.find_params(data)
        if found is None:
            self._sample_chunk = self._sample_chunk or data
            return event
        self._learn(found)
        self._reported = True
        try:
            return sse.with_data(event, transfer_params.replace_params(data, self._client_params(found)))
        except transfer_params.UNREADABLE:
            return event

    def _client_params(self, found: transfer_params.TransferParams | None) -> dict[str, Any] | None:
        shown: dict[str, Any] = {}
        if self._expose and found is not None:
            shown |= found.values
        if self._report is not None:
            own = found.own if self._expose and found is not None else {}
            shown["kvtier"] = {**own, **self._report(found)}
        return shown or None

    def _missing_report(self) -> bytes:
        """The report as a separate event, for a stream whose chunks had no params."""
        if self._report is None or self._reported:
            return b""
        self._reported = True
        chunk: dict[str, Any] = {}
        if self._sample_chunk is not None:
            # Clients accept a chunk with the ids of an earlier one and no choices.
            earlier = transfer_params.as_dict(self._sample_chunk)
            chunk = {key: earlier[key] for key in ("id", "object", "created", "model") if key in earlier}
        chunk |= {"choices": [], "kv_transfer_params": self._client_params(None)}
        return sse.make_event(msgspec.json.encode(chunk))


def error_body(message: str, kind: str, status: int, param: str | None = None) -> bytes:
    """An error in the form of vLLM and OpenAI."""
    error = {"message": message, "type": kind, "param": param, "code": status}
    return msgspec.json.encode({"error": error})


def find_error(events: bytes, least: int = 500) -> tuple[int, bytes] | None:
    """(status, JSON) of an error by which vLLM ends a stream, of status ``least`` or above; None if there is none."""
    if b'"error"' not in events:  # within a text, the quotes have backslashes
        return None
    for document in _DATA.findall(events):
        error = transfer_params.as_dict(document).get("error") if b'"error"' in document else None
        status = error.get("code") if isinstance(error, dict) else None
        if isinstance(status, int) and least <= status < 600:
            return status, document
    return None


def ends_with_server_error(events: bytes, path: str) -> bool:
    """Whether ``events``, the end of a stream of the route ``path``, have an error 5xx in vLLM's form for it."""
    if path == "/v1/messages":
        errors = (transfer_params.as_dict(each).get("error") for each in _MESSAGES_ERROR.findall(events))
        if any(isinstance(error, dict) and error.get("type") in _MESSAGES_ERROR_TYPES for error in errors):
            return True
    elif path == "/cohere/v2/chat":
        ends = map(transfer_params.as_dict, _DATA.findall(events))
        deltas = (end.get("delta") for end in ends if end.get("type") == "message-end")
        if any(isinstance(delta, dict) and delta.get("finish_reason") == "ERROR" for delta in deltas):
            return True
    return find_error(events) is not None


def is_refused_at_end(answer: bytes) -> bool:
    """Whether an engine aborted a request before its first token: one that is shut down, and drains, refuses new
    requests so. ``answer``: JSON, or an event."""
    if b'"finish_reason":"abort"' not in answer:
        return False
    choices = transfer_params.as_dict(answer.removeprefix(b"data: ")).get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        return False
    texts = [choice.get("message") or choice.get("delta") or choice for choice in choices]
    return not any(each.get(name) for each in texts for name in ("text", "content", "token_ids", *_CHAT_TEXTS))


def error_events(message: str, status: int) -> bytes:
    """The end of a stream that failed after its first bytes, in vLLM's form."""
    return sse.make_event(error_body(message, "upstream_error", status)) + sse.make_event(_DONE)


def messages_error_event(message: str) -> bytes:
    """The same for /v1/messages: Anthropic's clients leave out events without this name, and would take what they have
    for the whole answer."""
    error = {"type": "error", "error": {"type": "api_error", "message": message}}
    return b"event: error\n" + sse.make_event(msgspec.json.encode(error))


def cohere_error_events(message: str) -> bytes:
    """The same for /cohere/v2/chat, as vLLM writes it there."""
    end = {"type": "message-end", "delta": {"error": message, "finish_reason": "ERROR"}}
    return sse.make_event(msgspec.json.encode(end)) + sse.make_event(_DONE)
