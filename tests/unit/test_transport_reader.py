"""The agent that reads comes and goes; the one that serves stays. With a NIXL that only remembers."""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.worker.nixl_pull import nixl_transport as nixl_transport_module
from vllm_kvtier.worker.nixl_pull.nixl_transport import NixlTransport, TransferState


class Inner:
    """Gone when no reference is left."""

    def __init__(self, name, alive):
        self.name, self._alive = name, alive
        alive.append(name)

    def __del__(self):
        self._alive.remove(self.name)


class Handle:
    def __init__(self, inner):
        self.inner = inner

    def release(self):
        pass


class Agent:
    plugin_list = ["UCX"]

    def __init__(self, world, name):
        self.world, self.agent, self.backends = world, Inner(name, world.alive), {"UCX": 1}
        self.spans, self.peers, self.progressed = [], [], 0
        world.agents.append(name)
        world.spans[name], world.progressed[name] = self.spans, 0

    def get_reg_descs(self, spans, memory):
        return spans

    def register_memory(self, spans):
        self.spans += spans

    def deregister_memory(self, spans):
        del self.spans[: len(spans)]

    def get_agent_metadata(self):
        return self.agent.name.encode()

    def add_remote_agent(self, metadata):
        self.peers.append(metadata)
        return metadata

    def prep_xfer_dlist(self, agent, rows, memory):
        return Handle(self.agent)

    def make_prepped_xfer(self, kind, local, near, remote, far):
        assert local.inner is remote.inner is self.agent, "lists of another agent"
        return Handle(self.agent)

    def transfer(self, handle):
        if self.world.post == "raises":
            raise RuntimeError("NIXL_ERR_BACKEND")
        return self.world.post

    def check_xfer_state(self, handle):
        return "PROC"

    def get_new_notifs(self):
        self.world.progressed[self.agent.name] += 1


@pytest.fixture
def world(monkeypatch):
    world = SimpleNamespace(agents=[], alive=[], spans={}, progressed={}, post="PROC")
    api = SimpleNamespace(
        nixl_agent_config=lambda **options: options, nixl_agent=lambda name, config: Agent(world, name)
    )
    monkeypatch.setattr(nixl_transport_module, "nixl_api", lambda: api)
    return world


def opened(world):
    transport = NixlTransport("me", ["UCX"])
    transport.register([(4096, 100), (8192, 200)], "DRAM", 0)
    transport.add_peer(b"peer", "peer")
    return transport


def begin(transport):
    rows = np.zeros((1, 5), np.uint64)
    lists = [transport.prepare("peer", rows, "DRAM", ours=ours) for ours in (True, False)]
    return transport.read("peer", lists[0], None, lists[1], None, 7)


def test_transport_reader_end_keeps_serving(world):
    transport = opened(world)
    serving, reading = world.agents
    assert transport.metadata() == b"me" and serving == "me" and len(world.spans[reading]) == 2
    transfer = begin(transport)
    transport.release(transfer)
    del transfer
    assert transport.retire() and world.alive == [serving] and not world.spans[reading]
    assert not transport.knows("peer") and len(world.spans[serving]) == 2
    transport.add_peer(b"peer", "peer")
    assert transport.knows("peer") and world.agents[2] not in world.agents[:2]
    assert len(world.spans[world.agents[2]]) == 2, "it can read into all of it"
    assert transport.poll(begin(transport)) is TransferState.RUNNING
    transport.progress()
    assert world.progressed == {serving: 1, reading: 0, world.agents[2]: 0}
    assert transport.close() and not world.alive and not world.spans[serving]
    assert transport.close() and transport.retire(), "again is nothing"


def test_transport_pending_read_keeps_memory(world):
    transport = opened(world)
    transfer = begin(transport)
    transport.release(transfer)
    assert not transport.retire() and not transport.retired()
    transport.add_peer(b"peer", "peer")  # others go on meanwhile
    assert transport.poll(begin(transport)) is TransferState.RUNNING and not transport.retired()
    del transfer
    assert transport.retired() and len(world.alive) == 2


@pytest.mark.parametrize("post", ["ERR", "raises"])
def test_transport_partly_posted_read_is_reported_failed_by_poll(world, post):
    transport = opened(world)
    world.post = post
    assert transport.poll(begin(transport)) is TransferState.FAILED


def test_transport_peer_with_other_name_is_refused(world):
    transport = opened(world)
    with pytest.raises(KVTierError, match="is named other"):
        transport.add_peer(b"other", "second")
    assert not transport.knows("second")
