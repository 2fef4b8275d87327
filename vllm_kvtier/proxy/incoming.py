"""A client's request as far as its headers, out of an ASGI scope."""

from __future__ import annotations

import re
import uuid

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")

# Of a client's headers, those that engines get. Not X-Session-Id, which tenants could share.
_FORWARDED = ("authorization", "traceparent", "tracestate")


class Incoming:
    """``headers``: lower-case names; of several of one name the first. ``id``: the client's own, if it is harmless, or
    a new one. ``client``: the address it comes from."""

    def __init__(self, scope: dict):
        self.method: str = scope["method"]
        self.path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        self.query: str = scope.get("query_string", b"").decode("latin-1")
        self.headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            self.headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        self.client: str = (scope.get("client") or ("", 0))[0]
        given = self.headers.get("x-request-id", "")
        self.id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

    def for_engines(self, *further: str) -> dict[str, str]:
        """The headers that engines get; ``further``: names of some more, for this request."""
        headers = {name: self.headers[name] for name in (*_FORWARDED, *further) if name in self.headers}
        headers["x-request-id"] = self.id
        return headers
