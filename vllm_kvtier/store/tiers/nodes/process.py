"""The tier process for other nodes' stores: looks up blocks there, reads them into this store's pool, and serves this
store's blocks to other nodes.

Options of Open are StoreOptions' ``nodes``, ``node_listen`` and ``cluster_key_file``, and ``shared``: digests as in
``remote_store.protocol.Hello``, with spaces between.
"""

import itertools
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.remote_store import protocol as w
from vllm_kvtier.remote_store.lease_client import ITSELF, NodeLeaseClient, Peer
from vllm_kvtier.remote_store.lookup import Answer, NodeLookups
from vllm_kvtier.remote_store.nixl_agent import Poller, Reader, Server, quiet_ucx
from vllm_kvtier.remote_store.node_names import NodeNames
from vllm_kvtier.remote_store.options import Address, NodeOptions
from vllm_kvtier.remote_store.transfers import Job, NodeReads, ReadEvents
from vllm_kvtier.store.protocol import HOLD_SECONDS
from vllm_kvtier.store.tiers.nodes.lease_server import NodeLeaseServer
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.main import TierProcessMain
from vllm_kvtier.wire.slots import PAGE

# For a promotion at another node. Blocks that are in its memory by then are read; the next lookup finds the rest.
MAX_WAIT_SECONDS = 10.0
GREET_SECONDS = 1.0  # between two looks at which of the listed stores are connected


@dataclass(slots=True, eq=False)
class Held:
    """The blocks of a Located. ``slots``: by (group, hash), built when first needed."""

    look: m.Look
    peer: Peer
    offer: w.LookupHit
    slots: dict[tuple[int, bytes], int] = field(default_factory=dict)
    until: float = field(default_factory=lambda: time.monotonic() + HOLD_SECONDS)


class NodeProcess:
    """A ``tiers.process.main.Backend``."""

    def __init__(self, host: TierProcessMain, options: Mapping[str, str | int | float | bool]):
        self._host, self._reactor = host, host.reactor
        self._options = NodeOptions.parse(options)
        self._instance = uuid.uuid4().hex
        self._peers = NodeLeaseClient(self._reactor, self._instance, self._options, self._peer_gone)
        self._lookups = NodeLookups(self._reactor, self._peers, self._options.nodes)
        self._names = NodeNames(self._reactor, self._options.names, self._instance, self._named)
        events = ReadEvents(self._read_done, self._read_broke, host.fail)
        self._reads = NodeReads(host.pool, self._make_reader, events)
        self._poller = Poller(self._reactor, host.guard)
        self._poller.add(self._reads.poll)
        self._server: NodeLeaseServer | None = None
        self._tokens = itertools.count(1)
        self._held: dict[int, Held] = {}
        self._reported: dict[str, str | None] | None = None  # the last ListedNodes

    def open(self) -> m.Opened:
        quiet_ucx(loopback=self._options.key is None)
        self._reads.open()
        if self._options.listen is not None:
            agent = Server(self._host.pool, f"server of {self._instance}")
            server = self._server = NodeLeaseServer(self._host, self._instance, self._options, agent, self._poller.wake)

            def serve() -> bool:
                if server.reading:
                    agent.progress()
                return server.reading

            self._poller.add(serve)
        self._names.start()
        self._reactor.call_soon(self._host.guard(self._greet))  # its report comes behind Opened
        return m.Opened(writable=False)

    def handle(self, message: m.ToTierProcess) -> None:
        if isinstance(message, m.Look):
            self._look(message)
        elif isinstance(message, m.Read):
            self._read(message)
        elif isinstance(message, m.Release):
            held = self._held.pop(message.token, None)
            if held is not None:
                self._peers.release(held.peer, held.offer.lease)
        elif isinstance(message, m.LeaseReply) and self._server is not None:
            self._server.lease_reply(message)
        elif isinstance(message, m.PromotionStatus) and self._server is not None:
            self._server.promotion_status(message)
        else:
            raise KVTierError(f"unexpected message {type(message).__name__}")

    def close(self) -> None:
        """Connections end with the process, which peers notice."""

    def _named(self, addresses: tuple[Address, ...]) -> None:
        self._lookups.listed = [*self._options.nodes, *addresses]

    def _greet(self) -> None:
        """Connect to the listed stores, so that the operator sees which of them answer before the first lookup."""
        self._peers.close_lost()
        for address in self._lookups.listed:
            self._peers.greet(address)
        errors = {str(address): self._peers.error_of(address) for address in self._lookups.listed}
        errors = {address: error for address, error in errors.items() if error != ITSELF}
        if errors != self._reported:
            self._reported = errors
            self._host.send(m.ListedNodes(errors))
        self._reactor.call_later(GREET_SECONDS, self._host.guard(self._greet))

    # -- lookups ------------------------------------------------------------------------------------------------

    def _look(self, look: m.Look) -> None:
        self._lookups.ask(
            w.LookupRequest(0, look.namespace_id, look.hash_block_size, look.groups, look.block_hashes, look.start),
            look.nodes,
            lambda answer: self._decided(look, answer),
            MAX_WAIT_SECONDS,
            lambda peer, num_hash_blocks, seconds: self._host.send(
                m.PromotionStatus(look.id, num_hash_blocks, seconds, peer.instance)
            ),
        )

    def _decided(self, look: m.Look, answer: Answer) -> None:
        if answer is None:
            self._host.send(m.Located(look.id, 0, look.start))
            return
        peer, offer = answer
        token = next(self._tokens)
        self._held[token] = Held(look, peer, offer)
        self._host.send(m.Located(look.id, token, offer.num_hash_blocks, store=peer.instance))

    # -- reads --------------------------------------------------------------------------------------------------

    def _read(self, read: m.Read) -> None:
        held = self._held.get(read.token)
        over = held is not None and time.monotonic() > held.until
        if held is None or held.peer.closed or over or not read.moves:
            error = "" if over or not read.moves else "the store that leased these blocks is gone"
            self._host.send(m.Moved(read.id, [False] * len(read.moves), error))
            return
        look = held.look
        if not held.slots:
            held.slots = w.slots_by_name(held.offer, look.block_hashes, look.start, look.groups)
        local, remote, pages = [], [], []
        for move in read.moves:
            known = move.namespace_id == look.namespace_id and move.group < len(look.groups)
            valid = known and move.pages == look.groups[move.group].slot_pages
            local.append(move.slot)
            remote.append(held.slots.get((move.group, move.hash), 0) if valid else 0)
            pages.append(move.pages)
        self._peers.begin_read(held.peer)
        self._reads.start(read, held.peer, *(np.array(each, np.int64) * PAGE for each in (local, remote, pages)))
        self._poller.wake()

    def _make_reader(self, name: str) -> Reader:
        return Reader(self._host.pool, f"{name} of {self._instance}")

    def _read_done(self, job: Job, seconds: float) -> None:
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
        self._poller.wake()
