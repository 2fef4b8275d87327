"""Pulls through the ring: full rings, failed reads, agents that end, and NIXL itself between two workers."""

from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from peer_caches import keys_of
from staged_support import BLOCKS, EVEN, StagedPair

from vllm_kvtier.worker.nixl_pull import pulls as pulls_module
from vllm_kvtier.worker.nixl_pull import staged_reads
from vllm_kvtier.worker.nixl_pull.nixl_transport import NixlTransport


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(staged_reads, "CHUNK_BYTES", 1)  # one block


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(now=100.0)
    monkeypatch.setattr(pulls_module, "time", SimpleNamespace(monotonic=lambda: now.now))
    return now


def test_staged_pulls_wait_for_a_chunk():
    pair = StagedPair()
    pair.transport.polls = 3
    many = staged_reads.NUM_CHUNKS + 2
    for n in range(many):
        assert pair.start([n + 1], [EVEN[n]], f"r{n}") is None
    assert not pair.free_chunks and len(pair.transport.running) == staged_reads.NUM_CHUNKS
    assert not pair.pulls.all_waiting, "it is polled"
    results = pair.run()
    assert sorted(r.request_id for r in results) == [f"r{n}" for n in range(many)]
    assert not any(r.failed for r in results) and all(pair.landed(n + 1, EVEN[n]) for n in range(many))
    assert pair.free_chunks == staged_reads.NUM_CHUNKS


def test_staged_pulls_ring_is_no_memory_that_the_model_gave_back(monkeypatch):
    """Kernels that are launched may still write that; torch gives it to the same stream only."""
    streams = ["the model's"]

    @contextmanager
    def stream(own):
        streams.append(own)
        yield
        streams.pop()

    def empty(*size, real=torch.empty, **more):
        assert streams == ["the model's", "own"]
        return real(*size, **more)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "own")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch, "empty", empty)
    memory = SimpleNamespace(view=SimpleNamespace(device=torch.device("cpu")), on_device=True)
    assert staged_reads._Ring(memory, 64).span[1] > 64 * staged_reads.NUM_CHUNKS and streams == ["the model's"]


def test_staged_pull_reads_a_round_for_each_chunkful_and_rank():
    pair = StagedPair(tp=4)
    assert pair.start([1, 3, 5], [4, 2, 6]) is None
    [result] = pair.run()
    assert not result.failed and all(map(pair.landed, [1, 3, 5], [4, 2, 6]))
    # Two of the four ranks have our heads; three blocks and their checksums of each.
    block = pair.source[0].view.groups[0].block_bytes
    assert result.bytes == 2 * 3 * (block + 8)


def test_staged_pull_failed_read_keeps_its_chunk_until_agent_ended(clock):
    pair = StagedPair()
    pair.transport.fault, pair.transport.refuse_end = "never", 3
    assert pair.start([1], [2], timeout=2.0) is None
    clock.now += 2.1
    for _ in range(3):
        assert pair.run(1) == []
        clock.now += pulls_module.GRACE_SECONDS + 0.1
    assert pair.free_chunks == staged_reads.NUM_CHUNKS - 1 and pair.transport.late_data()
    results = []
    while not results:
        clock.now += 1.1
        results = pair.run(1)
        assert bool(results) == (not pair.transport.late_data())
    assert results[0].failed and results[0].bad_blocks == {1} and pair.free_chunks == staged_reads.NUM_CHUNKS
    pair.transport.fault = None
    assert pair.start([3], [4]) is None, "with a new agent and new lists"
    assert not pair.run()[0].failed and pair.landed(3, 4)


def test_staged_pull_goes_on_with_a_new_agent():
    """The agent ends between two of its rounds, because another pull failed."""
    pair = StagedPair()
    assert pair.start([1, 3], [2, 4]) is None
    pair.pulls.poll()
    while pair.free_chunks < staged_reads.NUM_CHUNKS:  # until the first round is verified
        pair.pulls.poll()
    assert pair.pulls.active and pair.landed(1, 2) and not pair.landed(3, 4)
    pair.pulls._end_agent(pulls_module.time.monotonic())
    [result] = pair.run()
    assert pair.transport.agent == 2 and not result.failed and pair.landed(3, 4)


@pytest.mark.parametrize("fault", ["fails", "start", "corrupt"])
def test_staged_pull_transport_faults_fail_and_give_chunks_back(fault):
    pair = StagedPair()
    pair.transport.fault = fault
    result = pair.start([1, 3], [2, 4]) or pair.run()[0]
    assert result.failed and result.checksum_mismatch == (fault == "corrupt")
    assert result.bad_blocks <= {1, 3} and result.bad_blocks and not pair.pulls.active
    assert pair.free_chunks == staged_reads.NUM_CHUNKS
    pair.transport.fault = None
    assert pair.start([1], [2]) is None and not pair.run()[0].failed and pair.landed(1, 2)


@pytest.mark.parametrize("remote", [0, BLOCKS, 1 << 40])
def test_staged_pull_of_block_that_does_not_exist_fails_at_once(remote):
    pair = StagedPair()
    result = pair.start([1], [remote])
    assert result.failed and f"outside 1..{BLOCKS - 1}" in result.reason and not pair.pulls.active


def test_staged_pull_of_larger_blocks_makes_a_larger_ring():
    """Of an engine of fewer ranks than the first one; until this engine was restarted, its prompts were computed."""
    pair, larger = StagedPair(tp=4), StagedPair()
    pair.pulls.add_engine("s/2", larger.infos("larger"))
    assert pair.start([1, 3], [2, 4]) is None
    small = pair.pulls._staged.ring
    refused = pair.start([5], [6], "r2", instance="s/2")
    assert refused.failed and f"whose chunks have {small.chunk_bytes} bytes" in refused.reason, "it is in use"
    while pair.free_chunks < staged_reads.NUM_CHUNKS:  # a round of the first pull is verified, and others follow
        pair.pulls.poll()
    assert pair.pulls.active and pair.start([5], [6], "r2", instance="s/2") is None
    assert not any(result.failed for result in pair.run()) and all(map(pair.landed, [1, 3, 5], [2, 4, 6]))
    assert pair.start([7], [8]) is None and not pair.run()[0].failed and pair.landed(7, 8)
    ring = pair.pulls._staged.ring
    assert ring.chunk_bytes >= 2 * small.chunk_bytes
    assert {small.span, ring.span} <= set(pair.transport.registered) and small in pair.pulls._staged._rings


def test_staged_pull_whose_lists_could_not_be_made_is_read_from_the_next_ring(monkeypatch):
    """The copier kept the name of a chunk, and looked for its blocks where the smaller ring was."""
    pair, larger = StagedPair(tp=4), StagedPair()
    pair.pulls.add_engine("s/2", larger.infos("larger"))

    def prepare(*given, ours):
        if not ours:
            raise RuntimeError("out of memory")

    with monkeypatch.context() as short:
        short.setattr(pair.transport, "prepare", prepare)
        assert pair.start([1], [2]).failed
    assert pair.start([5], [6], "r2", instance="s/2") is None and not pair.run()[0].failed
    assert pair.start([1], [2]) is None and not pair.run()[0].failed and pair.landed(1, 2)


@pytest.mark.parametrize("what", ["memory", "NIXL"])
def test_staged_pulls_work_once_their_ring_could_be_made(what, monkeypatch):
    """The GPU's memory may be short for a while."""
    pair = StagedPair()

    def fail(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as short:
        short.setattr(*((staged_reads, "_Ring") if what == "memory" else (pair.transport, "register")), fail)
        assert pair.start([1], [2]).failed
    assert pair.start([1], [2]) is None and not pair.run()[0].failed and pair.landed(1, 2)
    assert pair.pulls._staged.ring.span in pair.transport.registered


def test_staged_pull_ends_with_the_cache():
    pair = StagedPair()
    pair.transport.polls = 100
    pair.transport.close = lambda: None
    assert pair.start([1], [2]) is None
    [result] = pair.pulls.stop("asleep")
    assert result.failed and result.reason == "asleep" and not pair.pulls.active


@pytest.mark.parametrize("theirs", [1, 4])
def test_staged_pulls_with_nixl(theirs):
    """Real agents: of each rank that is read, and ours."""
    try:
        servers = [NixlTransport(f"staged-source-{theirs}-{n}", ["UCX"]) for n in range(theirs)]
        reader = NixlTransport(f"staged-reader-{theirs}", ["UCX"])
    except Exception as error:
        pytest.skip(f"NIXL: {error}")
    pair = StagedPair(reader, tp=theirs)
    infos = []
    for rank, server in zip(pair.source, servers, strict=True):
        rank.memory.register(server)
        infos.append(msgspec.structs.replace(rank.info, agent=server.name, agent_metadata=server.metadata()))
    pair.rank.memory.register(reader)
    pair.pulls.add_engine("s/1", infos)
    wrong = keys_of(EVEN)
    wrong[3] ^= np.uint64(1)
    assert pair.start(list(range(1, 8)), EVEN, keys=wrong) is None
    results = []
    for _ in range(200_000):
        for server in servers:
            server.progress()
        results += pair.pulls.poll()
        if results:
            break
    [result] = results
    assert result.bad_blocks == {4} and result.checksum_mismatch
    assert all(pair.landed(n, EVEN[n - 1]) for n in range(1, 8) if n != 4)
