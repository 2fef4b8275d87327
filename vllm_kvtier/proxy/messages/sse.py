"""Server-sent events as bytes: split a stream into events without changing or delaying any.

A client acts on an event only at the blank line that ends it (HTML Living Standard, 9.2.6). Therefore each event is
forwarded in the call that receives its last byte, and only the bytes after the last blank line are kept. If an engine
dies within an event, the client gets no part of that event.
"""

import re

# Lines that say nothing; the last may not have ended.
_COMMENTS = re.compile(rb"(?::[^\n]*(?:\n|\Z)|[\r\n])*")


class EventTooLarge(ValueError):
    """An unfinished event exceeds the limit of memory that is kept for it."""


class EventSplitter:
    """Splits bytes, in pieces of any size, into whole events.

    Lines end with LF or CRLF. The standard also allows a lone CR, which no engine sends. It counts as text here, so
    that the end of an event is known without the byte after it.

    The events returned and ``tail`` together are the bytes fed. The cuts do not depend on the pieces.
    """

    def __init__(self, max_event_bytes: int):
        self._max = max_event_bytes
        self._held = bytearray()

    @property
    def held_bytes(self) -> int:
        return len(self._held)

    @property
    def tail(self) -> bytes:
        """The bytes of the event that has not ended yet."""
        return bytes(self._held)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that ``data`` completes, each with its blank line.

        Raises EventTooLarge if the unfinished event exceeds the bound.
        """
        held = self._held
        # A blank line may begin in the last two bytes that are held.
        position = max(0, len(held) - 2)
        held += data
        events = []
        begin = 0
        while (newline := held.find(b"\n", position)) >= 0:
            if held.startswith(b"\n", newline + 1):
                end = newline + 2
            elif held.startswith(b"\r\n", newline + 1):
                end = newline + 3
            else:
                position = newline + 1
                continue
            events.append(bytes(held[begin:end]))
            begin = position = end
        if begin:
            del held[:begin]
        if len(held) > self._max:
            raise EventTooLarge(f"an event of a stream exceeds {self._max} bytes")
        return events


class Comments:
    """Finds what a stream says, in pieces of any size. vLLM sends comments with ``--sse-keep-alive-interval``."""

    def __init__(self) -> None:
        self._line = b""  # the first byte of the line that has not ended

    def skip(self, data: bytes) -> bytes:
        """The next piece, without the comments and blank lines that it begins with."""
        text = self._line + data
        self._line = text[text.rfind(b"\n") + 1 :][:1]
        found = _COMMENTS.match(text)
        return text[found.end() :] if found is not None and found.end() else data


def event_data(event: bytes) -> bytes | None:
    """The event's ``data`` (several data lines joined by a line feed), or None if it has none (a comment)."""
    values = [line[5:].removeprefix(b" ") for line, _ in _lines(event) if line.startswith(b"data:")]
    return b"\n".join(values) if values else None


def with_data(event: bytes, data: bytes) -> bytes:
    """The event (its id, type, comments, line ends) with its data replaced by ``data``, which must be one line."""
    if b"\n" in data:
        raise ValueError("the new data of an event must be one line")
    out = bytearray()
    written = False
    for line, end in _lines(event):
        if line.startswith(b"data:"):
            if written:
                continue
            written = True
            line = b"data: " + data
        out += line + end
    return bytes(out)


def make_event(data: bytes) -> bytes:
    """An event with one line of data."""
    return b"data: " + data + b"\n\n"


def _lines(event: bytes) -> list[tuple[bytes, bytes]]:
    """The event's lines as (text, line end)."""
    *ended, last = event.split(b"\n")
    lines = [(line[:-1], b"\r\n") if line.endswith(b"\r") else (line, b"\n") for line in ended]
    return [*lines, (last, b"")] if last else lines
