"""The mover of other nodes' stores: asks them for chains, reads their blocks into our pool, and lets them read ours.

Options of Open are StoreOptions' ``nodes``, ``node_listen`` and ``cluster_key_file``, and ``objects``: digest of the
object store that our own store asks after other nodes.
"""

import itertools
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.lower.nodes import wire as w
from vllm_kvtier.store.lower.nodes.agent import Drive, Reader, Server, quiet_ucx
from vllm_kvtier.store.lower.nodes.asking import Answer, Asking
from vllm_kvtier.store.lower.nodes.options import NodeOptions
from vllm_kvtier.store.lower.nodes.peers import Peer, Peers
from vllm_kvtier.store.lower.nodes.reads import Job, Reads
from vllm_kvtier.store.lower.nodes.serving import Serving
from vllm_kvtier.store.lower.runner import Host
from vllm_kvtier.wire.slots import PAGE

PATIENCE = 10.0  # for what another node brings up; what it has by then is read, and the rest found the next time


@dataclass(slots=True, eq=False)
class Held:
    """What a Located found. ``slots``: by (group, hash), made when first needed."""

    look: m.Look
    peer: Peer
    offer: w.Offer
    slots: dict[tuple[int, bytes], int] = field(default_factory=dict)


class NodeMover:
    """A ``runner.Backend``."""

    def __init__(self, host: Host, options: Mapping[str, str | int | float | bool]):
        self._host, self._reactor = host, host.reactor
        self._options = NodeOptions.parse(options)
        self._instance = uuid.uuid4().hex
        self._peers = Peers(self._reactor, self._instance, self._options, self._peer_gone)
        self._asking = Asking(self._reactor, self._peers, self._options.nodes)
        self._reads = Reads(host.pool, self._make_reader, self._read_over, self._read_broke, host.fail)
        self._drive = Drive(self._reactor, host.guard)
        self._drive.add(self._reads.drive)
        self._serving: Serving | None = None
        self._tokens = itertools.count(1)
        self._held: dict[int, Held] = {}

    def open(self) -> m.Opened:
        quiet_ucx(loopback=self._options.key is None)
        self._reads.open()
        if self._options.listen is not None:
            agent = Server(self._host.pool, f"server of {self._instance}")
            pool = self._host.pool
            self._serving = Serving(
                self._host, self._instance, self._options, agent, pool.address, pool.nbytes, self._drive.wake
            )

            def serve() -> bool:
                if self._serving.reading:
                    agent.progress()
                return self._serving.reading

            self._drive.add(serve)
        return m.Opened(writable=False)

    def handle(self, message: m.ToMover) -> None:
        if isinstance(message, m.Look):
            self._look(message)
        elif isinstance(message, m.Read):
            self._read(message)
        elif isinstance(message, m.Release):
            held = self._held.pop(message.token, None)
            if held is not None:
                self._peers.release(held.peer, held.offer.lease)
        elif isinstance(message, m.Lent) and self._serving is not None:
            self._serving.lent(message)
        elif isinstance(message, m.Coming) and self._serving is not None:
            self._serving.coming(message)
        else:
            raise KVTierError(f"{type(message).__name__} is nothing for other nodes")

    def close(self) -> None:
        """Connections end with the process; peers notice by themselves."""

    # -- asking -------------------------------------------------------------------------------------------------

    def _look(self, look: m.Look) -> None:
        ask = w.Ask(0, look.space, look.unit_tokens, look.groups, look.chain, look.start)
        self._asking.ask(
            ask,
            look.nodes,
            lambda answer: self._decided(look, answer),
            PATIENCE,
            lambda units, seconds: self._host.send(m.Coming(look.id, units, seconds)),
        )

    def _decided(self, look: m.Look, answer: Answer) -> None:
        peer, offer = answer.peer, answer.offer
        if peer is None:
            self._host.send(m.Located(look.id, 0, look.start))
            return
        token = next(self._tokens)
        self._held[token] = Held(look, peer, offer)
        self._host.send(m.Located(look.id, token, offer.units))

    # -- reading ------------------------------------------------------------------------------------------------

    def _read(self, read: m.Read) -> None:
        held = self._held.get(read.token)
        if held is None or held.peer.closed or not read.moves:
            error = "" if not read.moves else "the store that had these blocks is gone"
            self._host.send(m.Moved(read.id, [False] * len(read.moves), error))
            return
        look = held.look
        if not held.slots:
            held.slots = w.slots_by_name(held.offer, look.chain, look.start, look.groups)
        near, far, pages = [], [], []
        for move in read.moves:
            ours = move.space == look.space and move.group < len(look.groups)
            right = ours and move.pages == look.groups[move.group].slot_pages
            near.append(move.slot)
            far.append(held.slots.get((move.group, move.hash), 0) if right else 0)
            pages.append(move.pages)
        self._peers.begin_read(held.peer)
        self._reads.start(read, held.peer, *(np.array(each, np.int64) * PAGE for each in (near, far, pages)))
        self._drive.wake()

    def _make_reader(self, name: str) -> Reader:
        return Reader(self._host.pool, f"{name} of {self._instance}")

    def _read_over(self, job: Job, seconds: float) -> None:
        if any(job.good):
            self._peers.reached(job.source)
        self._peers.end_read(job.source)
        self._host.send(m.Moved(job.tag.id, job.good, job.error[:1000], seconds))

    def _read_broke(self, peer: Peer, reason: str) -> None:
        self._peers.close(peer, reason)

    def _peer_gone(self, peer: Peer, reason: str) -> None:
        for token in [token for token, held in self._held.items() if held.peer is peer]:
            del self._held[token]
        self._reads.gone(peer, reason)
        self._drive.wake()
