"""The link between an engine's scheduler side and its workers: a Unix socket that only this user can open.

It carries events that happen between steps or while the engine sleeps, when vLLM's own channels are silent: a worker is
ready, checksums are computed, peers are reading. Both sides derive the path from the engine's identity.

Of an engine over several nodes the first rank, which is on the scheduler's node, relays for workers of other nodes:
they reach it by TCP, encrypted with the cluster key.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import zmq

from vllm_kvtier.runtime_dir import private_path
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.dealer import endpoint_of, keep_alive
from vllm_kvtier.wire.geometry import GroupView
from vllm_kvtier.wire.messages import Count, Name, RankInfo, encode
from vllm_kvtier.wire.reactor import Reactor, drain

_PRESENT = b""  # the first message of each side

# -- messages; both ends are of one engine, so that a change needs no new protocol number ---------------------------


class Register(msgspec.Struct, frozen=True, tag="register"):
    """A rank's memory is ready for pulls. ``wire_codec``: the option, with "auto" resolved."""

    info: RankInfo
    wire_codec: str | dict[str, str] = "raw"


class Described(msgspec.Struct, frozen=True, tag="described"):
    """The layout of a rank's pages, for the node store. Sent before Register, also if NIXL is missing.

    ``shards[g]``: number of the part of a group's block that this rank holds. Ranks with equal bytes have equal
    numbers. ``node``: where the rank is.
    """

    rank: Count
    groups: tuple[GroupView, ...]
    shards: tuple[Count, ...]
    node: str = ""


class PoolSetup(msgspec.Struct, frozen=True, tag="pool_setup"):
    """The node store's socket and the layout of its slots. ``offsets[rank][g]``: bytes from the slot's beginning to the
    rank's part. ``writes[rank][g]``: whether this rank writes the part (one of the ranks with equal bytes does).
    ``codecs``: name of the codec, by group.

    ``nodes[rank]``: number of the rank's node, if the engine is on several. Then LoadJob and StoreBlocks have slots and
    instances of each node's store. ``launch``: the other nodes use this user's default store in place of ``path``, and
    start it with these options."""

    path: str
    offsets: list[list[Count]]
    writes: list[list[bool]]
    codecs: list[str]
    nodes: list[Count] = []
    launch: dict[str, Any] | None = None


class StoreFrame(msgspec.Struct, frozen=True, tag="store_frame"):
    """A frame between the scheduler side and the store on this rank's node, see ``store.tunnel``."""

    rank: Count
    number: Count
    frame: bytes


class LinkRenewed(msgspec.Struct, frozen=True, tag="link_renewed"):
    """This rank's link was cut and is there again: frames of stores, and store jobs or their ends, may be lost."""

    rank: Count


class PoolReady(msgspec.Struct, frozen=True, tag="pool_ready"):
    """A rank can copy to and from the first ``nbytes`` of the memory of this instance of the node store."""

    rank: Count
    instance: Name
    nbytes: Annotated[int, msgspec.Meta(ge=0)]  # a pool may have more than 1 TiB, the most that a Count says


class StoreBlocks(msgspec.Struct, frozen=True, tag="store_blocks"):
    """Copy blocks of one group to slots after the forward pass of ``step``. Arrays are little-endian int64. Of an
    engine over several nodes ``slots`` has those of one node after the other, 0 where its store has the blocks."""

    order: Count
    instance: str  # of sixteen nodes longer than a Name
    group: Count
    step: Annotated[int, msgspec.Meta(ge=-1)]
    blocks: bytes
    keys: bytes
    slots: bytes


class CancelStores(msgspec.Struct, frozen=True, tag="cancel_stores"):
    """Shorten store jobs: (order, number of first blocks to copy). Copies already started are finished."""

    orders: list[tuple[Count, Count]]


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """Store jobs that ended on this rank. ``cut``: (order, blocks copied) of those that were not copied entirely."""

    rank: Count
    done: list[Count]
    cut: list[tuple[Count, Count]]
    nbytes: Count
    seconds: Annotated[float, msgspec.Meta(ge=0)]


class Unusable(msgspec.Struct, frozen=True, tag="unusable"):
    """A worker cannot export or pull (no NIXL backend, unsupported layout); the engine serves without pulls."""

    rank: Count
    reason: str


class Asleep(msgspec.Struct, frozen=True, tag="asleep"):
    """vLLM frees this rank's KV cache for its sleep mode. The rank registers again after waking up."""

    rank: Count


class ChecksumsReady(msgspec.Struct, frozen=True, tag="checksums_ready"):
    """The checksums of all steps up to ``step`` are in this rank's table."""

    rank: Count
    step: Count


class ClearChecksums(msgspec.Struct, frozen=True, tag="clear_checksums"):
    """vLLM resets its prefix cache: no checksum of an earlier ``StepWork.generation`` counts. An idle engine makes no
    step that says so."""

    generation: Count


class ChecksumsCleared(msgspec.Struct, frozen=True, tag="checksums_cleared"):
    """No checksum of before this generation is in this rank's table."""

    rank: Count
    generation: Count


class Serve(msgspec.Struct, frozen=True, tag="serve"):
    """Whether peers read from this engine: the worker must make NIXL progress meanwhile."""

    active: bool


LinkMessage = (
    Register
    | Described
    | Unusable
    | Asleep
    | ChecksumsReady
    | ClearChecksums
    | ChecksumsCleared
    | Serve
    | PoolSetup
    | PoolReady
    | StoreFrame
    | LinkRenewed
    | StoreBlocks
    | CancelStores
    | Stored
)

_decoder: msgspec.msgpack.Decoder[LinkMessage] = msgspec.msgpack.Decoder(LinkMessage)


def decode_link(frame: bytes) -> LinkMessage:
    return _decoder.decode(frame)


# The messages that say how things are, by subject. A connection between nodes that is cut loses messages: each side
# sends the latest of each subject again on the next one.
_SUBJECTS: dict[type, int] = {Described: 0, Register: 1, Unusable: 1, Asleep: 1, PoolReady: 2, ChecksumsReady: 3}
_SUBJECTS[ChecksumsCleared] = 4
_SUBJECTS |= {PoolSetup: 0, Serve: 1, ClearChecksums: 2}


class _Latest:
    """What one side sends: ``frames`` on a new connection."""

    def __init__(self) -> None:
        self._by_subject: dict[int, bytes] = {}

    def frame(self, message: msgspec.Struct) -> bytes:
        """Of a message that is being sent."""
        frame, subject = encode(message), _SUBJECTS.get(type(message))
        if subject is not None:
            self._by_subject[subject] = frame
        return frame

    def frames(self) -> list[bytes]:
        return [_PRESENT, *self._by_subject.values()]


# -- sockets -------------------------------------------------------------------------------------------------------


def link_path(engine_id: str, instance_id: str) -> str:
    """Raises KVTierError as ``private_path``."""
    return private_path(f"{engine_id}|{instance_id}")


@dataclass(frozen=True)
class LinkPlace:
    """Where a worker finds the scheduler side: its ``link_path``, or the endpoint of a ``LinkRelay`` with this key."""

    endpoint: str
    key: ClusterKey | None = None


def _unbounded(socket: zmq.Socket[bytes]) -> None:
    """Remove ZMQ's limit of 1000 queued messages: a dropped message would leave its receiver waiting. The jobs in
    flight bound the queue."""
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


def _dealer(reactor: Reactor, place: LinkPlace) -> zmq.Socket[bytes]:
    socket = reactor.context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 200)
    socket.setsockopt(zmq.IDENTITY, os.urandom(16))  # a new connection is still this worker's
    _unbounded(socket)
    keep_alive(socket)
    socket.setsockopt(zmq.IPV6, place.endpoint.count(":") > 2)
    if place.key is not None:
        place.key.secure_client(socket)
    socket.connect(f"ipc://{place.endpoint}" if place.endpoint.startswith("/") else place.endpoint)
    return socket


class LinkServer:
    """The scheduler side: receives from every worker, sends to all of them, or to a rank that has described itself."""

    def __init__(self, reactor: Reactor, path: str, on_message: Callable[[LinkMessage], None]):
        self._on_message = on_message
        self._workers: set[bytes] = set()
        self._latest = _Latest()
        self._ranks: dict[int, bytes] = {}
        Path(path).unlink(missing_ok=True)
        self._socket = reactor.context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        _unbounded(self._socket)
        self._socket.bind(f"ipc://{path}")
        reactor.add_socket(self._socket, lambda: drain(self._socket, self._receive))
        reactor.on_stop(lambda: Path(path).unlink(missing_ok=True))

    def send(self, message: msgspec.Struct, rank: int | None = None) -> None:
        frame = self._latest.frame(message)
        for worker in self._workers if rank is None else [self._ranks[rank]]:
            self._socket.send_multipart([worker, frame], zmq.NOBLOCK)

    def _receive(self, frames: list[bytes]) -> None:
        self._workers.add(frames[0])
        if frames[-1] == _PRESENT:
            for frame in self._latest.frames():
                self._socket.send_multipart([frames[0], frame], zmq.NOBLOCK)
            return
        message = decode_link(frames[-1])
        if isinstance(message, Described):
            self._ranks[message.rank] = frames[0]
        self._on_message(message)


class LinkClient:
    """The worker side. Messages sent before the scheduler side listens are delivered once it does; ``on_met`` is
    called then, and perhaps again."""

    def __init__(
        self,
        reactor: Reactor,
        place: LinkPlace,
        on_message: Callable[[LinkMessage], None],
        on_met: Callable[[], object] = lambda: None,
    ):
        self._on_message, self._on_met = on_message, on_met
        self._latest, self._cut = _Latest(), False
        self._socket = _dealer(reactor, place)
        self._greet()
        if place.key is not None:
            reactor.add_monitor(self._socket, zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED, self._on_event)
        reactor.add_socket(self._socket, lambda: drain(self._socket, self._receive))

    def send(self, message: msgspec.Struct) -> None:
        self._socket.send(self._latest.frame(message))

    def _on_event(self, event: int) -> None:
        if self._cut and event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._greet()
        self._cut = event == zmq.EVENT_DISCONNECTED

    def _greet(self) -> None:
        for frame in self._latest.frames():
            self._socket.send(frame)

    def _receive(self, frames: list[bytes]) -> None:
        if frames[-1] == _PRESENT:
            self._on_met()
            return
        self._on_message(decode_link(frames[-1]))


class LinkRelay:
    """For workers of other nodes, in a process on the scheduler side's node: to that side they are as near as others.

    ``path``: the scheduler side's. Listens on ``host`` for holders of the key; raises zmq.ZMQError if it cannot.
    """

    def __init__(self, path: str, host: str, key: ClusterKey):
        self._reactor, self._place = Reactor("kvtier-relay"), LinkPlace(path)
        self._near: dict[bytes, zmq.Socket[bytes]] = {}  # by worker
        self._socket = self._reactor.context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        _unbounded(self._socket)
        keep_alive(self._socket)
        self._socket.setsockopt(zmq.IPV6, ":" in host)
        authenticator = key.secure_server(self._socket)
        try:
            self._socket.bind(endpoint_of(host, "*"))
        except zmq.ZMQError:
            authenticator.stop()
            self._socket.close()
            raise
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._reactor.on_stop(authenticator.stop)
        self._reactor.add_socket(self._socket, lambda: drain(self._socket, self._from_worker))
        self._reactor.start()

    def shutdown(self) -> None:
        self._reactor.stop()

    def _from_worker(self, frames: list[bytes]) -> None:
        worker, near = frames[0], self._near.get(frames[0])
        if near is None:
            near = self._near[worker] = _dealer(self._reactor, self._place)
            self._reactor.add_socket(near, lambda: drain(near, lambda answer: self._to_worker(worker, answer[-1])))
        near.send(frames[-1])

    def _to_worker(self, worker: bytes, frame: bytes) -> None:
        self._socket.send_multipart([worker, frame], zmq.NOBLOCK)
