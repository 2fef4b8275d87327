"""``kv_transfer_params``: reading what a router sent, writing what it should carry on.

vLLM's NixlConnector names are at the top level and are what we trust for addresses (routers rewrite
``remote_host``); everything of ours is in one nested dict, ``kvtier``. Values come from clients: nothing here
raises, what is malformed is as good as absent.

An address at the top level is used only if the params say that it is one of ours: the thread of NixlConnector that
answers at such an address ends at any message that is not its own. Routers may drop ``kvtier``, so that
``remote_request_id`` says it too.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any

from vllm_kvtier.scheduler.leases.exports import Export, LeaseKind
from vllm_kvtier.store.protocol import MAX_NAME

Address = tuple[str, int]  # host, port

# Names and addresses only: ZMQ gives "*", ";" and "/" in an address meanings of their own.
_HOST = re.compile(r"[A-Za-z0-9._:%\[\]-]{1,255}")
_PORT = re.compile(r"[0-9]{1,5}")
VERSION = 1
MARK = "kvtier/"  # before the export's name, in ``remote_request_id``
MAX_PEERS = 8
_HINTS = "_kvtier_hints"
MIN_EXPIRES_IN = 1.0  # seconds; messages that keep all exports are sent three times in the shortest such time


@dataclass(frozen=True)
class EarlyReadInfo:
    """Where the prefill engine's blocks are: enough to read them before the lease is granted."""

    instance: str
    tokens: int
    digest: bytes
    blocks: list[Any]  # as the client sent them

    def block_ids(self) -> list[list[int]] | None:
        """Block ids a group, from token 0 on; None if they are malformed. A long prompt's take half a millisecond."""
        for ids in self.blocks:
            if not (isinstance(ids, list) and all(type(i) is int and 0 <= i < 1 << 31 for i in ids)):
                return None
        return self.blocks


@dataclass(frozen=True)
class PrefillHandoff:
    """A prefill promised to us. ``follow``: it may still run, or wait to run. ``expires_in``: seconds that its engine
    keeps it for; infinite if the params do not say. ``router_releases``: the router may send the request to another
    engine if this one does not begin it, and releases the export if none does."""

    address: Address
    export: str
    early_read: EarlyReadInfo | None = field(default=None, compare=False)
    follow: bool = False
    expires_in: float = field(default=math.inf, compare=False)
    router_releases: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Hints:
    handoff: PrefillHandoff | None = None
    peers: tuple[Address, ...] = ()  # engines that may hold the prompt's blocks, to be asked by hash
    stores: tuple[str, ...] = ()  # host:port of other nodes' stores that may
    export_prefill: bool = False  # another engine will fetch this request's prefill
    export_as: str = ""  # by this name, which that engine knows already; "": by the request's id
    asked: bool = False  # whether the answer should carry params at all


NO_HINTS = Hints()


def _address(host: Any, port: Any) -> Address | None:
    if isinstance(port, str) and _PORT.fullmatch(port):
        port = int(port)
    if isinstance(host, str) and _HOST.fullmatch(host) and type(port) is int and 0 < port < 65536:
        return host, port
    return None


def _is_text(value: str) -> bool:
    """JSON may hold halves of surrogate pairs, which cannot be sent."""
    return not any("\ud800" <= c <= "\udfff" for c in value)


def hints(request: Any) -> Hints:
    """What the params of vLLM's ``request`` say. Read once: it keeps them."""
    if request.kv_transfer_params is None:
        return NO_HINTS
    kept: dict[str, Any] = vars(request)
    if _HINTS not in kept:
        kept[_HINTS] = read(request.kv_transfer_params)
    found: Hints = kept[_HINTS]
    return found


def promised(request: Any) -> PrefillHandoff | None:
    """The prefill that another engine keeps for vLLM's ``request``."""
    return hints(request).handoff


def is_of_another_connector(request: Any) -> bool:
    """Whether another connector is to bring the prompt of vLLM's ``request``, and has not begun to."""
    params = request.kv_transfer_params
    return isinstance(params, dict) and bool(params.get("do_remote_prefill")) and hints(request).handoff is None


def read(params: Any) -> Hints:
    """What a request's params say; ``Hints()`` for anything that is not ours or NixlConnector's."""
    if not isinstance(params, dict):
        return NO_HINTS
    ours = params.get("kvtier")
    ours = ours if isinstance(ours, dict) else {}
    export = _export_name(ours.get("export")) or _marked_name(params.get("remote_request_id"))
    remote = _address(params.get("remote_host"), params.get("remote_port")) if export else None
    stores = _stores(ours.get("stores"))
    if params.get("do_remote_prefill"):
        if remote:
            early, expires_in = _early_read_info(params, ours), _expires_in(ours.get("expires_in"))
            follow, router_releases = ours.get("follow") is True, ours.get("router_releases") is True
            handoff = PrefillHandoff(remote, export, early, follow, expires_in, router_releases)
            return Hints(handoff=handoff, stores=stores, asked=True)
        return Hints(stores=stores, asked=True)
    peers = [remote] if remote else []
    listed = ours.get("sources")
    for peer in listed[:MAX_PEERS] if isinstance(listed, list) else ():
        address = _address(peer.get("host"), peer.get("port")) if isinstance(peer, dict) else None
        if address and address not in peers:
            peers.append(address)
    exports = bool(params.get("do_remote_decode"))
    export_as = _export_name(ours.get("export_as")) if exports else ""
    return Hints(peers=tuple(peers), stores=stores, export_prefill=exports, export_as=export_as, asked=True)


def _export_name(value: Any) -> str:
    return value if isinstance(value, str) and len(value) <= 512 and _is_text(value) else ""


def _marked_name(value: Any) -> str:
    return _export_name(value.removeprefix(MARK)) if isinstance(value, str) and value.startswith(MARK) else ""


def _expires_in(value: Any) -> float:
    known = type(value) in (int, float) and value > 0
    return max(MIN_EXPIRES_IN, value) if known else math.inf


def _stores(listed: Any) -> tuple[str, ...]:
    texts = [each for each in listed[:MAX_PEERS] if isinstance(each, str)] if isinstance(listed, list) else []
    addresses = [_address(host, port) for host, _, port in (text.rpartition(":") for text in texts)]
    stores = [f"{address[0]}:{address[1]}" for address in addresses if address]
    return tuple(store for store in stores if len(store) <= MAX_NAME)  # or the node store would disconnect this engine


def _early_read_info(params: dict[str, Any], ours: dict[str, Any]) -> EarlyReadInfo | None:
    instance, tokens, digest = ours.get("instance"), ours.get("num_tokens"), ours.get("digest")
    blocks = params.get("remote_block_ids")
    if not (isinstance(instance, str) and type(tokens) is int and isinstance(digest, str) and isinstance(blocks, list)):
        return None
    try:
        return EarlyReadInfo(instance, tokens, bytes.fromhex(digest), blocks)
    except ValueError:
        return None


def report(prompt: int, local: int, pulled: int, pulled_from: str | None) -> dict[str, Any]:
    """Where a request's prompt KV came from, in tokens, for its params."""
    return {
        "prompt_tokens": prompt,
        "local_tokens": local,
        "pulled_tokens": pulled,
        "pulled_from": pulled_from,
        "computed_tokens": max(0, prompt - local - pulled),
    }


def write(
    export: Export,
    engine_id: str,
    instance: str,
    address: Address,
    seconds: float,
    tensor_parallel: int,
    report: dict[str, Any],
    follow: bool = False,
) -> dict[str, Any]:
    """Params for the answer of a request whose blocks are exported: a hand-off for a decode engine, or blocks retained
    for the next turn. ``seconds``: how long the export lives (a duration, because clocks differ). ``follow``: whether
    this engine's prefills can be pulled while they go on, under the name ``export_as`` (for routers)."""
    prefill = export.kind is LeaseKind.HANDOFF
    return {
        "do_remote_prefill": prefill,
        "do_remote_decode": not prefill,
        "remote_engine_id": engine_id,
        "remote_request_id": MARK + export.id,
        "remote_host": address[0],
        "remote_port": address[1],
        "remote_block_ids": [group.ids for group in export.groups],
        "remote_num_tokens": export.tokens,
        "remote_blocks_expiry_time": None,
        "tp_size": tensor_parallel,
        "transfer_mode": "pull",
        "kvtier": {
            "v": VERSION,
            "engine_id": engine_id,
            "instance": instance,
            "export": export.id,
            "num_tokens": export.tokens,
            "digest": export.digest.hex(),
            "expires_in": seconds,
            "can_follow": follow,  # not ``follow``: routers pass this on to the decode engine
            **report,
        },
    }


def write_report(report: dict[str, Any]) -> dict[str, Any]:
    """Params for the answer of a request that exports nothing: only where its KV came from. No field of
    NixlConnector's: beside ours in a MultiConnector it answers them (``vllm_compat.hooks.other_connectors``)."""
    return {"kvtier": {"v": VERSION, **report}}
