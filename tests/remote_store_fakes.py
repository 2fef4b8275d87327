"""Remote stores for engines: one that grants leases over a real socket, and one whose memory a fake NIXL reads."""

import ctypes
import mmap
from collections import deque
from types import SimpleNamespace

import numpy as np
import zmq
from support import eventually

from vllm_kvtier import codecs
from vllm_kvtier.codecs.parts import part_layout
from vllm_kvtier.jobs.transfer_jobs import RemoteStoreInfo
from vllm_kvtier.remote_store.options import Address, NodeOptions
from vllm_kvtier.store.tiers.nodes.lease_server import NodeLeaseServer
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.wire.link import RemoteStoreSetup
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.slots import PAGE, slot_layout
from vllm_kvtier.worker.copy.base import make_copier

POOL = 64 << 20


class FakeAgent:
    """``nodes.agent.Server`` as far as NodeLeaseServer looks at it."""

    generation, metadata = 0, b"metadata"

    def __init__(self, name: str):
        self.name = name

    def register(self, pieces):
        self.generation = 1


class LendingStore:
    """A NodeLeaseServer over a server that leases ``num_hash_blocks`` of any prompt at once, in slots of four pages; 0:
    it has no blocks, None: it never answers. ``below``: hash blocks that it promotes if the lookup may wait."""

    def __init__(self, num_hash_blocks: int | None = 6, key=None, instance="server", below=0):
        self.num_hash_blocks, self.below, self.heard = num_hash_blocks, below, []
        self.reactor = Reactor(instance)
        with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
            self.address = Address("127.0.0.1", probe.bind_to_random_port("tcp://127.0.0.1"))
        options = NodeOptions((), self.address, key)
        self.pool = SimpleNamespace(address=1 << 30, nbytes=POOL)
        self.serving = NodeLeaseServer(self, instance, options, FakeAgent(f"agent of {instance}"), lambda: None)
        self.reactor.start()

    def send(self, message):
        self.heard.append(message)
        if isinstance(message, m.LeaseRequest) and self.num_hash_blocks is not None:
            num_hash_blocks = max(self.num_hash_blocks, self.below) if message.wait_seconds else self.num_hash_blocks
            below = self.below if num_hash_blocks < self.below else 0
            slots = [[4 + 4 * i for i in range(message.start, num_hash_blocks)]]
            lease = 100 + message.id if num_hash_blocks > message.start else 0
            lent = m.LeaseReply(
                message.id, lease, num_hash_blocks if lease else message.start, slots if lease else [[]], below
            )
            self.reactor.call_soon(lambda: self.serving.lease_reply(lent))

    def of(self, kind) -> list:
        return [message for message in self.heard if isinstance(message, kind)]

    def stop(self):
        self.reactor.stop()


class FarNode:
    """The memory of another node's store, with blocks in it: parts of ``ranks`` equal ranks in each slot."""

    def __init__(self, view, ranks=1, instance="node", names=None, pages=400):
        self.view, self.instance, self.pages = view, instance, pages
        self.names = names or ["raw"] * len(view.groups)
        self.layouts = [part_layout(g, codecs.get(name)) for g, name in zip(view.groups, self.names, strict=True)]
        plans = [slot_layout([layout] * ranks) for layout in self.layouts]
        self.slot_pages = [plan.pages for plan in plans]
        self.offsets = [[plan.part_offsets[rank] for plan in plans] for rank in range(ranks)]
        self._memory = mmap.mmap(-1, pages * PAGE)
        self.bytes = np.frombuffer(self._memory, np.uint8)
        self.address = self.bytes.ctypes.data
        self.nbytes = pages * PAGE
        self._next = 1

    def setup(self, host=False) -> RemoteStoreSetup:
        return RemoteStoreSetup(self.offsets, self.slot_pages, self.names, host)

    def fill(self, group: int, blocks, keys, rank=0) -> np.ndarray:
        """Slots that now hold these blocks of the view, as that rank's part."""
        pool = (self.address, self.nbytes, SimpleNamespace(buffer=memoryview(self._memory)))
        copier = make_copier(self.view, pool, self.layouts, self.offsets[rank])
        copier.register(0, self.nbytes)
        slots = self._next + np.arange(len(blocks), dtype=np.int64) * self.slot_pages[group]
        self._next = int(slots[-1]) + self.slot_pages[group]
        assert self._next <= self.pages
        copy = copier.store(group, np.asarray(blocks, np.int64), np.asarray(keys, np.uint64), slots)
        eventually(copy.done)
        copier.close()
        return slots

    def source(self, generation=1) -> RemoteStoreInfo:
        return RemoteStoreInfo(self.instance, f"agent of {self.instance}", self.address, b"metadata", generation)


class Network:
    """Makes readers that the test drives. ``behaviour[agent]``: "done" (at the next look), "hangs" or
    "fails" (what it asked for may still come: ``deliver``)."""

    def __init__(self):
        self.behaviour: dict[str, str] = {}
        self.log: list = []
        self.late: list = []  # of readers that have not been closed: (reader, rows)
        self.closes = True

    def reader(self, ring, name, kind):
        return _Reader(self, kind)

    def deliver(self) -> None:
        """What was never given up arrives, as far as its agent lives."""
        late, self.late = self.late, []
        for reader, rows in late:
            if not reader.closed:
                _copy(*rows)


class _Reader:
    def __init__(self, network: Network, kind):
        self.network, self.kind, self.closed = network, kind, False

    def register(self, pieces):
        assert pieces == {0}

    def add_remote_agent(self, agent, metadata, generation):
        self.network.log.append(("add_remote_agent", agent, generation))

    def remove_agent(self, agent):
        self.network.log.append(("remove", agent))

    def begin(self, agent, local, remote):
        self.network.log.append(("begin", agent, int(local[:, 1].sum())))
        return SimpleNamespace(agent=agent, rows=(local.copy(), remote.copy()))

    def state(self, handle):
        behaviour = self.network.behaviour.get(handle.agent, "done")
        if behaviour == "done":
            _copy(*handle.rows)
            return True, ""
        if behaviour == "fails":
            self.network.late.append((self, handle.rows))
            return True, "it broke"
        return False, ""

    def release(self, handle):
        if self.network.behaviour.get(handle.agent) == "hangs":
            self.network.late.append((self, handle.rows))

    def close(self):
        self.closed = self.network.closes
        self.network.log.append("closed")
        return self.closed


def _copy(local, remote) -> None:
    for (to, nbytes, _), (start, _, _) in zip(local.tolist(), remote.tolist(), strict=True):
        ctypes.memmove(to, start, nbytes)


class Turns:
    """A reactor whose turns a test takes."""

    def __init__(self):
        self.soon: deque = deque()
        self.later: list = []

    def call_soon(self, callback):
        self.soon.append(callback)

    def call_later(self, delay, callback):
        self.later.append(callback)

    def on_stop(self, callback):
        pass
