"""Forms (multipart/form-data), which routes of audio take: read so strictly that no engine reads them otherwise."""

import re
from typing import NamedTuple

import msgspec

from vllm_kvtier.proxy.messages.request_bodies import BadRequest, remove_transfer_fields

_KIND = "multipart/form-data"
_PARAMETER = re.compile(r'\s*(boundary|charset)=("?)([^\s"\\]{1,70})\2\s*', re.I)
_VALUE = rb'(?:"[^"\\\r\n]*"|[^\s";\\]+)'
# In a name of a file a backslash means nothing here. Before a quote, or another one, some take it for an escape.
_FILE = rb'(?:"(?:[^"\\\r\n]|\\(?=[^"\\\r\n]))*"|[^\s";\\]+)'
_OTHERS = rb"(?:(?!content-disposition)[\w-]+:[^\r\n]*\r\n)*"
_HEADERS = re.compile(
    rb"\r\n%b(?i:content-disposition: *form-data; *name=)(%b)(?i:; *filename\*?=%b)*\r\n%b\r\n"
    % (_OTHERS, _VALUE, _FILE, _OTHERS),
    re.I,
)
_MAX_HEADER_BYTES = 2048  # of a part
_MAX_PARTS = 1000  # as engines


class _Part(NamedTuple):
    """``start`` and ``end`` of its value."""

    name: bytes
    start: int
    end: int


class Form:
    """Raises BadRequest for a body that could be read in another way."""

    def __init__(self, body: bytes, content_type: str):
        self._body = body
        self._parts: list[_Part] = []
        delimiter = b"\r\n--" + _boundary(content_type)
        if not body.startswith(delimiter[2:]):
            raise _unreadable()
        at = len(delimiter) - 2
        while body.startswith(b"\r\n", at):
            start = body.find(b"\r\n\r\n", at, at + _MAX_HEADER_BYTES) + 4
            end = body.find(delimiter, start)
            headers = _HEADERS.fullmatch(body, at, start)
            if headers is None or end < 0 or len(self._parts) == _MAX_PARTS:
                raise _unreadable()
            self._parts.append(_Part(headers[1].strip(b'"'), start, end))
            at = end + len(delimiter)
        if not body.startswith(b"--", at):
            raise _unreadable()

    def get(self, name: str) -> str:
        """A field's value; "" if it is not there. Of several, engines take the last."""
        found = b""
        for part in self._parts:
            if part.name == name.encode():
                found = self._body[part.start : part.end]
        return found.decode("utf-8", "replace")

    def without_transfer_fields(self) -> bytes:
        """The body, without transfer params in its ``vllm_xargs``. Raises BadRequest."""
        pieces, at = [], 0
        for name, start, end in self._parts:
            if name == b"vllm_xargs":
                fields = {"vllm_xargs": msgspec.Raw(self._body[start:end])}
                remove_transfer_fields(fields)
                pieces += [self._body[at:start], bytes(fields["vllm_xargs"])]
                at = end
        return b"".join([*pieces, self._body[at:]]) if pieces else self._body


def is_form(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == _KIND


def _boundary(content_type: str) -> bytes:
    found = [_PARAMETER.fullmatch(each) for each in content_type.split(";")[1:]]
    values = {each[1].lower(): each[3] for each in found if each is not None}
    readable = len(values) == len(found) and values.get("charset", "utf-8").lower() in ("utf-8", "utf8")
    if not readable or "boundary" not in values:
        raise _unreadable()
    return values["boundary"].encode("latin-1")


def _unreadable() -> BadRequest:
    return BadRequest(f"The request body is not a form ({_KIND}, UTF-8) that the proxy can read.")
