"""``kv_transfer_params``: those sent to engines, those in their answers, and the part that a client may see.

Names at the top level are those of vLLM's NixlConnector; ours are nested under ``kvtier``.
"""

from typing import Any

import msgspec

# Raised by msgspec for invalid JSON and for JSON nested too deeply.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_NULL = msgspec.Raw(b"null")

# A client may see counts of pulls. With export ids or addresses (``pulled_from``) it could contact engines itself.
_REPORT_FIELDS = ("num_tokens", "prompt_tokens", "pulled_tokens", "local_tokens", "computed_tokens")


class Source(msgspec.Struct, frozen=True):
    """An engine that may hold a conversation, and where its connector's endpoint listens."""

    engine_id: str  # "" if not known: any engine at this address
    host: str
    port: int


class Export(msgspec.Struct, frozen=True):
    """The KV that a prefill engine holds for one request until it is pulled, released or expired."""

    host: str
    port: int
    export: str


class TransferParams:
    """The params of one engine's answer: the raw JSON, and the fields that the proxy reads."""

    def __init__(self, raw: msgspec.Raw):
        self.raw = raw
        self.values = as_dict(raw)
        own = self.values.get("kvtier")
        self.own: dict[str, Any] = own if isinstance(own, dict) else {}

    @property
    def source(self) -> Source | None:
        """The endpoint of the engine that answered."""
        engine_id = self.own.get("engine_id") or self.values.get("remote_engine_id")
        host, port = self._address()
        if not isinstance(engine_id, str) or host is None or port is None:
            return None
        return Source(engine_id=engine_id, host=host, port=port)

    @property
    def export(self) -> Export | None:
        """The export, to be released if no decode engine pulls it."""
        export = self.own.get("export")
        host, port = self._address()
        if not isinstance(export, str) or host is None or port is None:
            return None
        return Export(host=host, port=port, export=export)

    @property
    def for_decode(self) -> msgspec.Raw | dict[str, Any]:
        """What a decode engine gets: with the promise that the proxy releases the export if no engine begins the
        request. A decode engine that refuses it then leaves the export to the next one."""
        if self.export is None:
            return self.raw
        return _FIELDS.decode(self.raw) | {"kvtier": self.own | {"router_releases": True}}

    @property
    def report(self) -> dict[str, Any]:
        """The counts that a client may see."""
        return {name: self.own[name] for name in _REPORT_FIELDS if name in self.own}

    def _address(self) -> tuple[str | None, int | None]:
        host, port = self.values.get("remote_host"), self.values.get("remote_port")
        if isinstance(port, str) and port.isascii() and port.isdigit() and len(port) <= 5:
            port = int(port)
        valid = isinstance(host, str) and isinstance(port, int) and 0 < port < 65536
        return (host, port) if valid else (None, None)


class _Peek(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = _NULL


_PEEK = msgspec.json.Decoder(_Peek)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def find_params(document: bytes) -> TransferParams | None:
    """The params at the top of a JSON document; None if absent, null, or not JSON."""
    if b"kv_transfer_params" not in document:
        return None
    try:
        raw = _PEEK.decode(document).kv_transfer_params
    except UNREADABLE:
        return None
    # vLLM 0.33 sends null with each chunk but the last.
    return None if raw == _NULL else TransferParams(raw)


def replace_params(document: bytes, params: dict[str, Any] | None) -> bytes:
    """The document with its params replaced by ``params``, or removed if None; other fields byte for byte.

    Raises one of UNREADABLE if it is not a JSON object.
    """
    fields: dict[str, Any] = _FIELDS.decode(document)
    fields.pop("kv_transfer_params", None)
    if params is not None:
        fields["kv_transfer_params"] = params
    return msgspec.json.encode(fields)


def prefill_params(sources: list[Source], export_as: str = "") -> dict[str, Any]:
    """Params for the prefill engine: query ``sources`` first, compute the rest, export the KV. ``export_as``: by this
    name, which a decode engine has already got (``following_params``)."""
    unset = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    own: dict[str, Any] = {"sources": sources} if sources else {}
    if export_as:
        own["export_as"] = export_as
    return {"do_remote_decode": True, "do_remote_prefill": False, **unset, **({"kvtier": own} if own else {})}


def following_params(engine_id: str, export: Export) -> dict[str, Any]:
    """Params for a decode engine that gets the request together with the prefill engine of this id: pull what that
    computes, as it computes it."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": export.export,
        "remote_host": export.host,
        "remote_port": export.port,
        "kvtier": {"export": export.export, "follow": True, "router_releases": True},
    }


def decode_only_params(sources: list[Source]) -> dict[str, Any]:
    """Params for a decode engine without prefill: no hand-off, but query ``sources``, and report pulls."""
    return {"do_remote_prefill": False, "do_remote_decode": False, "kvtier": {"sources": sources}}


def as_dict(document: bytes | msgspec.Raw) -> dict[str, Any]:
    """{} if it is not a JSON object."""
    try:
        values = msgspec.json.decode(document)
    except UNREADABLE:
        return {}
    return values if isinstance(values, dict) else {}
