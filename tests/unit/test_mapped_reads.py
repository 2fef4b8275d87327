"""Pulls of scattered blocks from engines of the same node: copied from mapped memory, all others read by NIXL."""

import threading
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from peer_caches import Group, content, pull_of, rank_of, sums_of
from pull_fakes import FakeTransport

from vllm_kvtier.jobs.transfer_jobs import PullJob
from vllm_kvtier.worker.nixl_pull import pulls as pulls_module
from vllm_kvtier.worker.nixl_pull.descriptors import fewest_reads
from vllm_kvtier.worker.nixl_pull.pulls import Pulls
from vllm_kvtier.worker.peer_fetch import mapped_reads
from vllm_kvtier.worker.peer_fetch.fetch_jobs import PeerFetches
from vllm_kvtier.worker.peer_fetch.host_copier import HostPeerCopier
from vllm_kvtier.worker.peer_fetch.mapped_reads import MappedReads

MODEL = (Group(layers=3, heads=2),)
BLOCKS = 16
IN_ORDER = pull_of([1, 2, 3, 4], [5, 6, 7, 8], 4)
SCATTERED = pull_of([1, 9, 4, 7], [8, 3, 12, 5], 4)


class Counting(FakeTransport):
    """NIXL that counts its reads."""

    reads = 0

    def read(self, *args):
        self.reads += 1
        return super().read(*args)

    def close(self):
        self.retire()


@pytest.fixture
def side(monkeypatch):
    """A reader of an engine of this process, whose reactor runs what is in ``queued``."""
    monkeypatch.setattr(mapped_reads, "MANY_READS", 3 * 3)  # three regions, in three pieces or more
    kept = content(MODEL, 1, BLOCKS)
    here, there = rank_of(MODEL, BLOCKS, 0), rank_of(MODEL, kept, 0)
    sums_of(there, MODEL, range(1, BLOCKS))
    info = msgspec.structs.replace(there.info, agent="source", agent_metadata=b"metadata")
    fetches = PeerFetches(here.view, here.memory.table, here.heads, 0, HostPeerCopier(here.view, here.memory.table, 64))
    queued, transport = [], Counting()
    pulls = Pulls(transport, here.memory, 0, here.heads, MappedReads(fetches, queued.append))
    for each in (pulls, fetches):
        each.add_engine("s/1", [info])
    return SimpleNamespace(
        here=here, there=there, info=info, kept=kept, fetches=fetches, queued=queued, pulls=pulls, transport=transport
    )


def run(side, group, rounds=200, **more):
    result = side.pulls.start(PullJob("r", "s/1", [group], 5.0, **more))
    for _ in range(rounds):
        if result is not None:
            return result
        result = next(iter(side.pulls.poll()), None)
    raise AssertionError("it does not end")


def mapped(side):
    """The first scattered pull was read by NIXL, and had the source mapped."""
    assert not run(side, SCATTERED).failed
    side.queued.pop()()
    assert side.fetches.ready("s/1") and side.transport.reads == 1


def arrived(side, group):
    regions = side.here.view.groups[0].regions
    return all(
        np.array_equal(side.here.view.pages(region)[near].numpy(), side.kept[0][layer, 0][far])
        for layer, region in enumerate(regions)
        for near, far in zip(group.local.tolist(), group.remote.tolist(), strict=True)
    )


def test_scattered_pull_is_copied_once_source_is_mapped(side):
    mapped(side)
    side.here.memory.table[:] = 0
    result = run(side, SCATTERED)
    assert side.transport.reads == 1 and not side.queued, "no further read by NIXL"
    assert not result.failed and result.kind == "pull" and result.bytes == 4 * side.here.view.groups[0].block_bytes
    assert arrived(side, SCATTERED) and not side.pulls.active
    # What was verified can be exported without another pass.
    ours, theirs = side.here.memory.table, side.there.memory.table
    assert ours[SCATTERED.local].tolist() == theirs[SCATTERED.remote].tolist()


def test_pull_in_order_is_read_by_nixl(side):
    mapped(side)
    backwards = pull_of([4, 3, 2, 1], [5, 6, 7, 8], 4)  # rearranged, one read a region
    for number, group in enumerate((IN_ORDER, backwards), 2):
        assert not run(side, group).failed and side.transport.reads == number and arrived(side, group)


def test_scattered_pull_from_another_node_is_read_by_nixl(side):
    elsewhere = msgspec.structs.replace(side.info.shared, node="another")
    side.pulls.add_engine("s/1", [msgspec.structs.replace(side.info, shared=elsewhere)])
    assert not run(side, SCATTERED).failed
    side.queued.pop()()
    assert not side.fetches.ready("s/1") and not run(side, SCATTERED).failed and side.transport.reads == 2


def test_copied_pull_reports_exactly_the_bad_blocks(side):
    mapped(side)
    side.there.memory.table[12] += 1
    result = run(side, SCATTERED)
    assert result.failed and result.checksum_mismatch and result.bad_blocks == {4}


def test_copied_pull_that_was_promised_is_copied_again(side, monkeypatch):
    monkeypatch.setattr(pulls_module, "REREAD_SECONDS", (0.0, 0.0))
    mapped(side)
    right = side.there.memory.table[12].item()
    side.there.memory.table[12] = 0
    copies = []
    begin = side.fetches.begin_copy
    side.fetches.begin_copy = lambda job: copies.append(job) or begin(job)
    side.pulls.start(PullJob("r", "s/1", [SCATTERED], 5.0, promised=True))
    while len(copies) < 2:
        assert not side.pulls.poll()
    side.there.memory.table[12] = right
    while not (results := side.pulls.poll()):
        pass
    assert not results[0].failed and 2 <= len(copies) <= 3 and arrived(side, SCATTERED)


def test_copied_pull_waits_for_a_copier_in_use(side):
    """The model runner's thread never waits for a thread that maps another source."""
    mapped(side)
    held, over = threading.Event(), threading.Event()

    def hold():
        with side.fetches.lock:
            held.set()
            over.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    before = side.here.view.pages(side.here.view.groups[0].regions[0]).clone()
    side.pulls.start(PullJob("r", "s/1", [pull_of([10, 2, 14], [1, 9, 4], 4)], 5.0))
    assert not side.pulls.poll() and side.pulls.active
    assert np.array_equal(before, side.here.view.pages(side.here.view.groups[0].regions[0]))
    over.set()
    thread.join()
    until = time.monotonic() + 20
    while not (results := side.pulls.poll()) and time.monotonic() < until:
        pass
    assert not results[0].failed and side.transport.reads == 1


def test_pull_whose_source_ends_before_the_copy_fails(side):
    mapped(side)
    side.pulls.start(PullJob("r", "s/1", [SCATTERED], 5.0))
    side.fetches.remove_source("s/1")
    (result,) = side.pulls.poll()
    assert result.failed and result.bad_blocks == {1, 9, 4, 7} and "not mapped" in result.reason
    assert not result.checksum_mismatch and not side.pulls.active


def test_stopped_pulls_copy_nothing_more(side):
    mapped(side)
    side.pulls.start(PullJob("r", "s/1", [SCATTERED], 5.0))
    (result,) = side.pulls.stop("asleep")
    assert result.failed and result.reason == "asleep" and not side.pulls.active


@pytest.mark.parametrize(
    ("local", "remote", "reads"),
    [([], [], 0), ([3], [9], 1), ([1, 2, 3], [7, 8, 9], 1), ([3, 2, 1], [9, 8, 7], 1), ([1, 2, 3], [9, 8, 7], 1),
     ([1, 2, 5, 6], [1, 2, 5, 6], 2), ([1, 5, 9], [2, 7, 4], 3), ([1, 2, 3, 4], [9, 3, 7, 5], 4)],
)  # fmt: skip
def test_fewest_reads_of_a_row(local, remote, reads):
    assert fewest_reads(np.array(local, np.int64), np.array(remote, np.int64)) == reads
