"""A client's request up to its headers, from an ASGI scope."""

import re
import uuid

from vllm_kvtier.proxy.messages.buffers import Held

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")

# The client's headers that engines get. Not X-Session-Id, which tenants could share.
_FORWARDED = ("authorization", "traceparent", "tracestate")


class Incoming:
    """``headers``: by lower-case name, the first of each; ``repeated``: names of several. ``id``: the client's if its
    characters are safe, else a new one. ``client``: the sender's address. ``body_held``, ``answer_held``: memory for
    its body, and for its answer."""

    def __init__(self, scope: dict, body_held: Held, answer_held: Held):
        self.body_held, self.answer_held = body_held, answer_held
        self.method: str = scope["method"]
        self.path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        self.query: str = scope.get("query_string", b"").decode("latin-1")
        self.headers: dict[str, str] = {}
        self.repeated: set[str] = set()
        for raw, value in scope["headers"]:
            if (name := raw.decode("latin-1")) in self.headers:
                self.repeated.add(name)
            else:
                self.headers[name] = value.decode("latin-1")
        self.client: str = (scope.get("client") or ("", 0))[0]
        given = self.headers.get("x-request-id", "")
        self.id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

    def for_engines(self, *more: str) -> dict[str, str]:
        """The headers for engines; ``more``: additional names for this request."""
        headers = {name: self.headers[name] for name in (*_FORWARDED, *more) if name in self.headers}
        headers["x-request-id"] = self.id
        return headers
