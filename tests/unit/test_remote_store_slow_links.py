"""Reads over slow links, on a virtual clock. As with UCX, transfers in flight share the link, and no progress of one is
seen before its end."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvtier.remote_store import transfers
from vllm_kvtier.remote_store.transfers import NodeReads, ReadEvents
from vllm_kvtier.store.protocol import PAGE

TICK = 0.05  # seconds between two polls
POOL = 4 << 30


@dataclass(eq=False)
class Source:
    agent, base, metadata, generation = "a", 0, b"", 1


class SharedLink:
    """A NIXL reader. ``rate``: bytes a second; 0: dead."""

    def __init__(self, rate: float):
        self.rate, self.now, self.most = rate, 0.0, 0
        self.left: dict[int, float] = {}  # by transfer in flight
        self.sizes: list[int] = []
        self.ended: dict = {}  # (arrived, error) by read
        self.broken: list[str] = []
        events = ReadEvents(self._done, lambda source, reason: self.broken.append(reason), pytest.fail)
        pool = SimpleNamespace(address=0, nbytes=POOL)
        self.reads = NodeReads(pool, lambda name: self, events, clock=lambda: self.now)
        self.source = Source()

    def _done(self, job, seconds):
        self.ended[job.tag] = sum(job.good), job.error

    def register(self, pieces):
        return False

    def add_remote_agent(self, agent, metadata, generation): ...

    def remove_agent(self, agent): ...

    def begin(self, agent, local, remote):
        self.sizes.append(int(local[:, 1].sum()))
        self.left[len(self.sizes)] = self.sizes[-1]
        self.most = max(self.most, len(self.left))
        return len(self.sizes)

    def state(self, handle):
        return self.left[handle] <= 0, ""

    def release(self, handle):
        del self.left[handle]

    def close(self):
        return True

    def read(self, tag, blocks: int, nbytes: int) -> None:
        at = PAGE + np.arange(blocks, dtype=np.int64) * nbytes
        self.reads.start(tag, self.source, at, at, np.full(blocks, nbytes, np.int64))

    def tick(self) -> bool:
        more = self.reads.poll()
        self.now += TICK
        arrives = self.rate * TICK
        while arrives > 0 and (moving := [each for each in self.left if self.left[each] > 0]):
            part = min(arrives / len(moving), *(self.left[each] for each in moving), POOL)
            for each in moving:
                self.left[each] -= part if part < self.left[each] - 1e-6 else self.left[each]
            arrives -= part * len(moving) or arrives
        return more

    def run(self, seconds: float = 600.0) -> None:
        end = self.now + seconds
        while self.now < end and self.tick():
            pass


@given(rate=st.floats(1.5e6, 1e10), block_pages=st.sampled_from([1, 100, 400]))
def test_remote_transfers_over_any_link_that_moves_are_not_broken(rate, block_pages):
    link = SharedLink(rate)
    nbytes = block_pages * PAGE
    blocks = (24 << 20) // nbytes
    for tag in range(4):
        link.read(tag, blocks, nbytes)
    link.run()
    assert not link.broken and not link.reads.active
    late = [tag for tag, (_, error) in link.ended.items() if error]
    assert len(link.ended) == 4 and all(link.ended[tag][0] == blocks for tag in range(4) if tag not in late)
    assert not late or 4 * blocks * nbytes > rate * (transfers.MAX_READ_SECONDS - transfers.STALL_SECONDS)


@pytest.mark.parametrize("rate", [20e6, 1e10])
def test_remote_transfers_over_a_link_that_ends_are_broken_in_time(rate):
    link = SharedLink(rate)
    for tag in range(40):
        link.read(tag, 384, 16 * PAGE)
    link.run(0.3)
    assert link.reads.active
    link.rate, dead_at = 0.0, link.now
    while not link.broken:
        link.tick()
    assert "made no progress for 4 s" in link.broken[0]
    assert link.now - dead_at <= transfers.STALL_SECONDS + 2 * TICK
    link.run()
    assert len(link.ended) == 40


def test_remote_transfers_over_a_fast_link_grow():
    link = SharedLink(1e10)
    for _ in range(6):  # a tick is the round trip of a long link
        for tag in range(8):
            link.read(tag, 384, 16 * PAGE)
        link.run()
    assert link.sizes[0] == transfers.MIN_TRANSFER_BYTES and max(link.sizes) == transfers.TRANSFER_BYTES
    assert link.most == transfers.IN_FLIGHT


def test_remote_transfers_follow_a_link_that_becomes_slow():
    """Without shorter reads: what is in flight after a while is what the link moves in a moment."""
    link = SharedLink(1e9)
    link.read("first", 384, 16 * PAGE)
    link.run()
    link.rate = 50e6
    for tag in range(8):
        link.read(tag, 384, 16 * PAGE)
        link.run()
    assert not link.broken and all(not error for _, error in link.ended.values())
    assert link.sizes[-1] <= 2 * 50e6 * transfers.TRANSFER_SECONDS


def test_remote_transfers_that_wait_too_long_fail_without_their_connection():
    link = SharedLink(4e6)
    for tag in range(10):
        link.read(tag, 384, 16 * PAGE)  # 6 s each
    link.run()
    good = [tag for tag, (arrived, error) in link.ended.items() if arrived == 384 and not error]
    late = [tag for tag, (arrived, error) in link.ended.items() if "took more than" in error]
    assert not link.broken and sorted(good + late) == list(range(10))
    assert good == list(range(len(good))) and len(good) >= 7
    assert link.now < transfers.MAX_READ_SECONDS + transfers.STALL_SECONDS
