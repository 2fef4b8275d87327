"""uvicorn's HTTP protocol with bounds for what is not yet a request: uvicorn has none with httptools.

Otherwise anything that can connect could send headers without end, which are held, or connections without a request.
And it could send requests within the body of one that asks for another protocol (``Upgrade``, CONNECT): httptools gives
such a request no body, and uvicorn goes on to read requests. A gateway has not seen these, and takes their answers for
those of the next requests that it sends on the connection, other clients' perhaps. So such a request is refused if it
has a body, and else it is the last one that is read.
"""

from typing import Any, NoReturn

from uvicorn.protocols.http.auto import AutoHTTPProtocol

# Of a request's line and headers, or of the trailers after a body.
MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 256  # an object each
MAX_PIPELINED = 64  # requests of a connection that are not answered; clients of HTTP/1.1 send one at a time
_NO_UPGRADE = "No other protocol is supported: send a request that has a body without Upgrade, as HTTP/1.1."

_Base: Any = AutoHTTPProtocol
# h11, which uvicorn takes without httptools, has a bound of its own.
_IS_UNBOUNDED = hasattr(_Base, "on_headers_complete")
_BUSY, _CLOSING = object(), object()


class BoundedProtocol(_Base):
    """A connection ends if a head is larger than ``MAX_HEAD_BYTES`` or has more than ``MAX_HEADERS``, with more than
    ``MAX_PIPELINED`` requests, or if no request begins within ``client_timeout``, or up to twice as long. One that is
    closed has so long to take the rest of an answer. It ends behind a request that asks for another protocol: nothing
    behind that one's headers is read."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_bytes = 0  # since the last head ended, or the last piece of a body
        self._cycles: list[Any] = []  # requests whose answers have not ended
        self._in_head = True  # else headers are trailers, which count for nothing (RFC 9110, 6.5.1)
        self._last = False  # no further request is read
        self.ws_protocol_class = None
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watcher.cancel()
        super().connection_lost(exc)
        for cycle in self._unanswered():  # uvicorn lets the last one know only
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._last or self.transport.is_closing():
            return  # TLS may still have some
        self._head_bytes += len(data)
        super().data_received(data)
        if _IS_UNBOUNDED and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(f"The request line and the headers exceed {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)
            if len(self.headers) > MAX_HEADERS:
                self._end(f"The request has more than {MAX_HEADERS} headers.")

    def on_headers_complete(self) -> None:
        self._last = self.parser.should_upgrade()
        if self._last and (self.parser.get_method() == b"CONNECT" or _has_body(self.headers)):
            self._end(_NO_UPGRADE)
        if len(self._unanswered()) >= MAX_PIPELINED:
            self._end(f"More than {MAX_PIPELINED} requests came at once.")
        self._head_bytes, self._in_head = 0, False
        super().on_headers_complete()
        if self._last:
            self.cycle.keep_alive = False
        self._cycles = [*self._unanswered(), self.cycle]

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: uvicorn's advises to install libraries."""

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def _refuse(self, message: str) -> None:
        """Answer 400, unless another request's answer would come before it, and close."""
        if self._request() is _BUSY:
            self.transport.close()
        else:
            self.send_400_response(message)

    def _end(self, message: str) -> NoReturn:
        """``_refuse``, and end the parser."""
        self._refuse(message)
        raise ValueError(message)

    def _unanswered(self) -> list[Any]:
        return [cycle for cycle in self._cycles if cycle is not None and not cycle.response_complete]

    def _request(self) -> object:
        """_BUSY while one is served, _CLOSING if none is any more; else the last one, if any."""
        if self.transport.is_closing():
            return _CLOSING
        return _BUSY if self.cycle is not None and not self.cycle.response_complete else self.cycle

    def _watch(self) -> None:
        seconds = self.timeout_keep_alive = self.config.app.core.config.client_timeout
        self._watcher = self.loop.call_later(seconds, self._end_if_silent, self._request())

    def _end_if_silent(self, before: object) -> None:
        if before is not _BUSY and self._request() is before:
            if before is _CLOSING:
                self.transport.abort()
                return
            self.transport.close()
        self._watch()


def _has_body(headers: list[tuple[bytes, bytes]]) -> bool:
    lengths = [value for name, value in headers if name == b"content-length"]
    return any(length != b"0" for length in lengths) or any(name == b"transfer-encoding" for name, _ in headers)
