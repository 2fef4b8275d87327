"""``kv_transfer_params``: what is asked of P, what engines answer, and what a client may see of it.

Names at the top are those of vLLM's NixlConnector; ours are nested under ``kvtier``.
"""

from __future__ import annotations

from typing import Any

import msgspec

# What msgspec raises at JSON that is none, or is nested too deeply to be read.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_NULL = msgspec.Raw(b"null")

# What a client may learn about pulls: counts. Export ids and addresses, such as ``pulled_from``, would let it
# ask engines itself.
_REPORT_FIELDS = (
    "num_tokens",
    "prompt_tokens",
    "pulled_tokens",
    "local_tokens",
    "computed_tokens",
)


class Source(msgspec.Struct, frozen=True):
    """An engine that may hold a conversation, and where its connector's endpoint listens."""

    engine_id: str  # "" if not known (yet): whoever listens there
    host: str
    port: int


class Export(msgspec.Struct, frozen=True):
    """The KV that P holds for one request until someone pulls or releases it."""

    host: str
    port: int
    export: str


class TransferParams:
    """The params of one engine's answer: the raw JSON, and what the proxy reads of it."""

    def __init__(self, raw: msgspec.Raw):
        self.raw = raw
        self.values = _as_dict(raw)
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
        """What has to be released if nobody is going to pull."""
        export = self.own.get("export")
        host, port = self._address()
        if not isinstance(export, str) or host is None or port is None:
            return None
        return Export(host=host, port=port, export=export)

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
    """The params at the top of a JSON document; None if there are none, if null, or if it is no JSON."""
    if b"kv_transfer_params" not in document:
        return None
    try:
        raw = _PEEK.decode(document).kv_transfer_params
    except UNREADABLE:
        return None
    # vLLM 0.33 puts a null on every chunk but the last.
    return None if raw == _NULL else TransferParams(raw)


def replace_params(document: bytes, params: dict[str, Any] | None) -> bytes:
    """The document with ``params`` in place of its own at the top, or without; other fields byte for byte.

    Raises one of UNREADABLE if it is not a JSON object.
    """
    fields: dict[str, Any] = _FIELDS.decode(document)
    fields.pop("kv_transfer_params", None)
    if params is not None:
        fields["kv_transfer_params"] = params
    return msgspec.json.encode(fields)


def prefill_params(sources: list[Source]) -> dict[str, Any]:
    """What P is told: compute, keep the KV for D, and first look at ``sources`` for what is there already."""
    params: dict[str, Any] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    if sources:
        params["kvtier"] = {"sources": sources}
    return params


def alone_params(sources: list[Source]) -> dict[str, Any]:
    """What D is told when it computes alone: no hand-off, but look at ``sources``, and report on pulls."""
    return {"do_remote_prefill": False, "do_remote_decode": False, "kvtier": {"sources": sources}}


def _as_dict(raw: msgspec.Raw) -> dict[str, Any]:
    try:
        values = msgspec.json.decode(raw)
    except UNREADABLE:
        return {}
    return values if isinstance(values, dict) else {}
