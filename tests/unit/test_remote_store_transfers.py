"""Reads from other nodes' pools, and what becomes of memory when they go wrong; the NIXL agent is a stand-in."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.remote_store import lease_client as node_peers
from vllm_kvtier.remote_store import nixl_agent
from vllm_kvtier.remote_store import protocol as w
from vllm_kvtier.remote_store import transfers as node_reads
from vllm_kvtier.remote_store.nixl_agent import Registered, pieces_of, runs
from vllm_kvtier.remote_store.options import Address
from vllm_kvtier.remote_store.transfers import NodeReads
from vllm_kvtier.store.protocol import PAGE, PIECE_BYTES

POOL = 64 << 20


class FakeReader:
    def __init__(self, log, states, closes=True):
        self.log, self.states, self.closes, self.begun = log, states, closes, 0

    def register(self, pieces):
        self.log.append(("register", sorted(pieces)))

    def add_remote_agent(self, agent, metadata, generation):
        if agent == "unreachable":
            raise KVTierError("no way there")

    def remove_agent(self, agent):
        self.log.append(("remove", agent))

    def begin(self, agent, local, remote):
        self.log.append(("begin", local.tolist(), remote.tolist()))
        self.begun += 1
        return agent

    def state(self, handle):
        return self.states[handle]

    def release(self, handle):
        self.log.append(("release", handle))

    def close(self):
        self.log.append("closed")
        return self.closes


class Reading:
    def __init__(self, closes=True):
        self.log, self.states, self.closes = [], {}, closes
        self.reads = NodeReads(
            SimpleNamespace(address=0, nbytes=POOL),
            lambda name: FakeReader(self.log, self.states, self.closes),
            node_reads.ReadEvents(
                lambda job, seconds: self.log.append((job.tag, job.good, job.error)),
                lambda peer, reason: self.reads.gone(peer, reason),
                lambda reason: self.log.append("stuck"),
            ),
        )

    def peer(self, name="peer"):
        welcome = w.Welcome("i", name, 1 << 30, POOL)
        self.states.setdefault(name, (False, ""))
        return node_peers.Peer(Address("h", 1), None, welcome=welcome, metadata=b"m", generation=1)

    def start(self, peer, near, far, id=1):
        """Pages of ours and of the peer's, of blocks of four."""
        near, far = (np.array(pages, np.int64) * PAGE for pages in (near, far))
        self.reads.start(id, peer, near, far, np.full(len(near), 4 * PAGE))

    def answers(self) -> dict:
        return {entry[0]: entry[1:] for entry in self.log if isinstance(entry[0], int)}


def test_remote_transfers_join_adjacent_blocks_into_rows():
    r = Reading()
    r.start(r.peer(), [4, 8, 12, 40, POOL // PAGE], [104, 108, 112, 4, 8])
    assert r.reads.poll()
    (_, local, remote) = next(entry for entry in r.log if entry[0] == "begin")
    assert local == [[4 * PAGE, 12 * PAGE, 0], [40 * PAGE, 4 * PAGE, 0]]
    assert remote == [[(1 << 30) + 104 * PAGE, 12 * PAGE, 0], [(1 << 30) + 4 * PAGE, 4 * PAGE, 0]]
    r.states["peer"] = (True, "")
    assert not r.reads.poll()
    assert r.answers() == {1: ([True] * 4 + [False], "")}  # the last would lie beyond our pool


def test_remote_transfers_begin_when_memory_is_registered_piece_by_piece(monkeypatch):
    r, made, agent = Reading(), [], SimpleNamespace()
    agent.create_backend = lambda name, options: None
    agent.register_memory = lambda spans, memory, backends: made.append(spans[0][0] // PIECE_BYTES)
    api = SimpleNamespace(nixl_agent=lambda name, config: agent, nixl_agent_config=lambda **options: None)
    pool = SimpleNamespace(address=0, nbytes=3 * PIECE_BYTES)
    monkeypatch.setattr(nixl_agent, "load_nixl", lambda: api)
    registered, reader, begun = Registered(pool, "a"), r.reads.open(), []
    reader.register, r.reads._pool = registered.register, pool
    r.start(r.peer(), [4, 2 * PIECE_BYTES // PAGE], [4, 40])
    for _ in range(3):
        assert r.reads.poll()
        begun.append((made.copy(), reader.begun))
    assert begun == [([0], 0), ([0, 2], 1), ([0, 2], 1)]


def test_remote_transfers_of_missing_blocks_fail():
    r = Reading()
    r.start(r.peer(), [4, 8], [0, 0])
    r.reads.poll()
    assert r.answers()[1][0] == [False, False] and "does not have" in r.answers()[1][1]


def test_remote_transfers_failed_read_is_answered_after_agent_closed():
    r = Reading()
    bad, slow = r.peer("bad"), r.peer("slow")
    r.start(bad, [4], [4], id=1)
    r.start(slow, [8], [8], id=2)
    r.reads.poll()
    r.states["bad"] = (True, "it died")
    r.reads.poll()
    assert not r.answers()  # another read is under way: for a while
    r.states["slow"] = (True, "")
    r.reads.poll()
    assert r.answers()[2] == ([True], "")
    assert r.log.index("closed") < r.log.index((1, [False], "a read failed: it died"))
    r.states["bad"] = (True, "")
    r.start(bad, [4], [4], id=3)
    r.reads.poll(), r.reads.poll()
    assert r.answers()[3] == ([True], "")


def test_remote_transfers_of_others_get_bounded_time_after_a_failure(monkeypatch):
    monkeypatch.setattr(node_reads, "GRACE_SECONDS", 0.0)
    r = Reading()
    bad, slow = r.peer("bad"), r.peer("slow")
    r.start(slow, [8], [8], id=2)
    r.start(bad, [4], [4], id=1)
    r.reads.poll()
    r.states["bad"] = (True, "it died")
    r.reads.poll(), r.reads.poll()
    assert r.answers()[1][0] == [False] and r.answers()[2][0] == [False] and not r.reads.active


def test_remote_transfers_stalled_read_fails(monkeypatch):
    monkeypatch.setattr(node_reads, "STALL_SECONDS", -1.0)
    r = Reading()
    r.start(r.peer(), [4], [4])
    r.reads.poll(), r.reads.poll()
    assert "no progress" in r.answers()[1][1] and "closed" in r.log


def test_remote_transfers_unclosable_agent_ends_the_process():
    r = Reading(closes=False)
    peer = r.peer()
    r.start(peer, [4], [4])
    r.reads.poll()
    r.reads.gone(peer, "silent")
    assert not r.reads.poll() and not r.reads.poll()  # the process polls on until it ends
    assert r.log.count("stuck") == 1 and not r.answers()


def test_remote_transfers_without_reads_end_at_once():
    r = Reading()
    r.start(r.peer("unreachable"), [4], [4])
    r.reads.poll()
    assert r.answers()[1] == ([False], "no way there") and "closed" not in r.log


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 3)), max_size=60), st.integers(1, 9))
def test_remote_transfers_rows_cover_every_block_once(blocks, most):
    piece = PIECE_BYTES // PAGE
    near = np.array([piece - 20 + b[0] for b in blocks], np.int64)
    far = np.array([piece - 20 + b[1] for b in blocks], np.int64)
    pages = np.array([b[2] for b in blocks], np.int64)
    rows, row_of = runs(near * PAGE, far * PAGE, pages * PAGE, most * PAGE)
    assert not (rows % PAGE).any()
    rows //= PAGE
    for row in range(len(rows)):
        mine = np.flatnonzero(row_of == row)
        expected = [(int(near[i]) + k, int(far[i]) + k) for i in mine for k in range(int(pages[i]))]
        start, there, size = rows[row].tolist()
        assert expected == [(start + k, there + k) for k in range(size)]
        assert size <= most or len(mine) == 1
        if len(mine) > 1:
            assert len({int(near[i]) // piece for i in mine}) == 1 == len({int(far[i]) // piece for i in mine})
    assert sorted(row_of.tolist()) == row_of.tolist()
    assert pieces_of(np.array([1, 2, piece])) == {0, 1}


def test_remote_transfers_of_peer_that_came_back_are_not_cut_by_its_earlier_end():
    r = Reading()
    r.start(r.peer(), [4], [4], id=1)
    r.reads.poll()
    r.states["peer"] = (True, "it died")
    r.reads.poll()
    assert "closed" in r.log  # there is no reader until the next read
    again = r.peer()
    r.reads.gone(again, "it does not answer")
    r.states["peer"] = (False, "")
    r.start(r.peer(), [8], [8], id=2)
    r.reads.poll()
    r.reads.poll()
    assert ("remove", "peer") not in r.log


@pytest.mark.parametrize(("transports", "named"), [("tcp", True), ("tcp,cuda_copy", False), ("", False)])
def test_refused_ucx_backend_names_a_setting_that_nixl_refuses_beside_gpus(monkeypatch, transports, named):
    def refuse(*_):
        raise RuntimeError("NIXL_ERR_BACKEND")

    monkeypatch.setenv("UCX_TLS", transports)
    agent = SimpleNamespace(create_backend=refuse)
    api = SimpleNamespace(nixl_agent=lambda *_: agent, nixl_agent_config=lambda **_: None)
    monkeypatch.setattr(nixl_agent, "load_nixl", lambda: api)
    with pytest.raises(KVTierError, match="NIXL_ERR_BACKEND") as caught:
        Registered(None, "a")
    assert ("cuda_copy in UCX_TLS=tcp" in str(caught.value)) == named
