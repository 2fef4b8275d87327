"""``kv_transfer_params``: reading what a router sent, writing what it should carry on.

vLLM's NixlConnector names are at the top level and are what we trust for addresses (routers rewrite
``remote_host``); everything of ours is in one nested dict, ``kvtier``. Values come from clients: nothing here
raises, what is malformed is as good as absent.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from vllm_kvtier.scheduler.offers import Address

# Names and addresses only: ZMQ gives "*", ";" and "/" in an address meanings of their own.
_HOST = re.compile(r"[A-Za-z0-9._:%\[\]-]{1,255}")
_PORT = re.compile(r"[0-9]{1,5}")
VERSION = 1
MAX_SOURCES = 8


@dataclass(frozen=True)
class Promise:
    """What the source itself said of a hand-off: enough to read it before its lease is granted."""

    instance: str
    tokens: int
    digest: bytes
    blocks: list[list[int]]  # block ids a group, from token 0 on


@dataclass(frozen=True)
class Handoff:
    """A finished prefill promised to us."""

    address: Address
    export: str
    promise: Promise | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Hints:
    handoff: Handoff | None = None
    sources: tuple[Address, ...] = ()  # engines that may hold the prompt's blocks, to be asked by hash
    stores: tuple[str, ...] = ()  # host:port of other nodes' stores that may
    export_prefill: bool = False  # another engine will fetch this request's prefill
    asked: bool = False  # whether the answer should carry params at all


def _address(host: Any, port: Any) -> Address | None:
    if isinstance(port, str) and _PORT.fullmatch(port):
        port = int(port)
    if isinstance(host, str) and _HOST.fullmatch(host) and type(port) is int and 0 < port < 65536:
        return host, port
    return None


def _is_text(value: str) -> bool:
    """JSON may hold halves of surrogate pairs, which cannot be sent."""
    return not any("\ud800" <= c <= "\udfff" for c in value)


def read(params: Any) -> Hints:
    """What a request's params say; ``Hints()`` for anything that is not ours or NixlConnector's."""
    if not isinstance(params, dict):
        return Hints()
    ours = params.get("kvtier")
    ours = ours if isinstance(ours, dict) else {}
    remote = _address(params.get("remote_host"), params.get("remote_port"))
    stores = _stores(ours.get("stores"))
    if params.get("do_remote_prefill"):
        export = ours.get("export") or params.get("remote_request_id")
        if remote and isinstance(export, str) and 0 < len(export) <= 512 and _is_text(export):
            return Hints(handoff=Handoff(remote, export, _promise(params, ours)), stores=stores, asked=True)
        return Hints(stores=stores, asked=True)
    sources = [remote] if remote else []
    listed = ours.get("sources")
    for source in listed[:MAX_SOURCES] if isinstance(listed, list) else ():
        if isinstance(source, dict):
            address = _address(source.get("host"), source.get("port"))
            if address and address not in sources:
                sources.append(address)
    prefill = bool(params.get("do_remote_decode"))
    return Hints(sources=tuple(sources), stores=stores, export_prefill=prefill, asked=True)


def _stores(listed: Any) -> tuple[str, ...]:
    named = [str(each).rpartition(":") for each in listed[:MAX_SOURCES]] if isinstance(listed, list) else []
    addresses = [_address(host, port) for host, _, port in named]
    return tuple(f"{address[0]}:{address[1]}" for address in addresses if address)


def _promise(params: dict, ours: dict) -> Promise | None:
    instance, tokens, digest, blocks = (
        ours.get("instance"), ours.get("num_tokens"), ours.get("digest"), params.get("remote_block_ids"),
    )
    if not (isinstance(instance, str) and type(tokens) is int and isinstance(digest, str) and isinstance(blocks, list)):
        return None
    if not all(isinstance(ids, list) and all(type(i) is int and 0 <= i < 1 << 31 for i in ids) for ids in blocks):
        return None
    try:
        return Promise(instance, tokens, bytes.fromhex(digest), blocks)
    except ValueError:
        return None


@dataclass(frozen=True)
class Report:
    """Where a request's prompt KV came from, in tokens."""

    prompt: int
    local: int
    pulled: int
    pulled_from: str | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "local_tokens": self.local,
            "pulled_tokens": self.pulled,
            "pulled_from": self.pulled_from,
            "computed_tokens": max(0, self.prompt - self.local - self.pulled),
        }


def write(
    *,
    prefill: bool,
    engine_id: str,
    instance: str,
    address: Address,
    export: str,
    tokens: int,
    digest: bytes,
    block_ids: list[list[int]],
    seconds: float,
    tensor_parallel: int,
    report: Report,
) -> dict[str, Any]:
    """Params for the answer of a request whose blocks are exported.

    ``prefill``: a hand-off for a decode engine; else blocks retained for the next turn. ``seconds`` is how long
    the export lives (a duration: clocks differ).
    """
    return {
        "do_remote_prefill": prefill,
        "do_remote_decode": not prefill,
        "remote_engine_id": engine_id,
        "remote_request_id": export,
        "remote_host": address[0],
        "remote_port": address[1],
        "remote_block_ids": block_ids,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": None,
        "tp_size": tensor_parallel,
        "transfer_mode": "pull",
        "kvtier": {
            "v": VERSION,
            "engine_id": engine_id,
            "instance": instance,
            "export": export,
            "num_tokens": tokens,
            "digest": digest.hex(),
            "expires_in": seconds,
            **report.as_dict(),
        },
    }


def write_report(report: Report) -> dict[str, Any]:
    """Params for the answer of a request that exports nothing: only where its KV came from."""
    return {"do_remote_prefill": False, "do_remote_decode": False, "kvtier": {"v": VERSION, **report.as_dict()}}
