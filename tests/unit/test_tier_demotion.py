"""What goes down: in which order, how much at once, when, and what is dropped instead."""

from collections import OrderedDict

import pytest
from support import Clock
from tier_backend_fakes import FakeReactor

from vllm_kvtier.store.index.index import Index
from vllm_kvtier.store.index.types import ZERO
from vllm_kvtier.store.memory.slot_pool import SlotPool
from vllm_kvtier.store.protocol import GroupShape
from vllm_kvtier.store.tiers import demotion as d
from vllm_kvtier.store.tiers.admission import admission
from vllm_kvtier.store.tiers.base import Tier
from vllm_kvtier.wire.slots import PAGE

NAMESPACE_ID = b"s" * 16
HASH_BLOCK_SIZE = 16
NOWHERE = 1 << 30


def hash_of(n: int) -> bytes:
    return n.to_bytes(16, "big")


def block_hashes(*numbers: int) -> bytes:
    return b"".join(map(hash_of, numbers))


class FakeTier(Tier):
    """Keeps names; a write waits in ``asked`` until the test answers it."""

    name = "fake"
    usable = writable = True
    reading = False

    def __init__(self):
        self.kept: set[tuple] = set()
        self.asked: list = []

    def write(self, blocks, done):
        self.asked.append((blocks, done))

    def answer(self, good=True) -> list[int]:
        """Numbers of the blocks of the write that waits longest."""
        blocks, done = self.asked.pop(0)
        if good:
            self.kept.update((b.namespace_id, b.group, b.hash) for b in blocks)
        done([good] * len(blocks))
        return [int.from_bytes(b.hash, "big") for b in blocks]

    def has(self, namespace_id, group, block_hash):
        return (namespace_id, group, block_hash) in self.kept

    def discard(self, namespace_id, group, block_hash):
        self.kept.discard((namespace_id, group, block_hash))

    def find(self, want, done): ...
    def release(self, find): ...
    def read(self, find, blocks, done): ...
    def seconds(self, nbytes): ...
    def clear(self, namespace_id): ...
    def counts(self): ...
    def start(self): ...
    def stop(self): ...


class Bench:
    def __init__(self, how="all", min_tokens=0, pages=64, queue_pages=1000, groups=None):
        self.clock = Clock()
        self.reactor = FakeReactor(self.clock)
        self.index = Index(SlotPool(pages + 1, pages + 1), None, self.clock)
        self.index.grow(pages + 1)
        self.groups = groups or [GroupShape(1, 1)]
        self.index.connect(1, HASH_BLOCK_SIZE, self.groups)
        self.tier = FakeTier()
        self.demotion = d.Demotion(
            self.index,
            {self.tier: admission(how, min_tokens)},
            9,
            d.DemotionLimits(queue_pages * PAGE),
            self.reactor,
            self.clock,
        )
        self.index.watches.append(self.demotion)

    def store(self, *numbers, after=0, commit=True, client=1, groups=(0,)):
        items = [(g, n, p) for g in groups for n, p in zip(numbers, (after, *numbers), strict=False)]
        slots = self.index.reserve(
            client,
            NAMESPACE_ID,
            b"",
            [g for g, _, _ in items],
            block_hashes(*(n for _, n, _ in items)),
            block_hashes(*(p for _, _, p in items)),
            NOWHERE,
        )
        if commit:
            self.index.commit(client, [slot for slot in slots if slot > 0])
        return slots

    def use(self, *numbers):
        found = self.index.lookup(1, NAMESPACE_ID, block_hashes(*numbers), 0, NOWHERE)
        self.index.release(1, found.lease)
        return found.num_hash_blocks

    def written(self) -> list[int]:
        """After a while, all that was."""
        out = []
        self.reactor.run(5.0)
        while self.tier.asked:
            out += self.tier.answer()
            self.reactor.run(5.0)
        return out

    @property
    def counts(self) -> d.LaneCounts:
        return d.LaneCounts(**self.demotion.stats()["fake"])


def test_demotion_batches_blocks_and_leases_at_write():
    b = Bench()
    b.store(1, 2, 3)
    b.store(4, after=3)
    assert not b.tier.asked and b.counts.queued_blocks == 4
    b.reactor.run(d.BATCH_WAIT_SECONDS)
    assert b.index.client_counts(9)[0] == 1 and b.counts.queued_blocks == 0
    blocks = b.tier.asked[0][0]
    assert [x.parent for x in blocks] == [ZERO, hash_of(1), hash_of(2), hash_of(3)]
    assert [x.end_hash_block for x in blocks] == [1, 2, 3, 4] and len({x.slot for x in blocks}) == 4
    assert b.tier.answer() == [1, 2, 3, 4]
    assert b.index.client_counts(9)[0] == 0
    b.use(1, 2, 3, 4)
    assert b.written() == []
    assert (b.counts.written, b.counts.admitted) == (4, 4)


def test_demotion_leases_do_not_expire():
    b = Bench()
    b.store(1)
    b.reactor.run(1.0)
    b.clock.now += 1e6
    b.index.tick()
    assert b.index.client_counts(9)[0] == 1
    b.tier.answer()
    assert b.index.client_counts(9)[0] == 0


def test_demotion_is_one_bounded_batch_at_a_time(monkeypatch):
    monkeypatch.setattr(d, "BATCH_BLOCKS", 3)
    b = Bench()
    b.store(*range(1, 8))
    b.reactor.run()  # enough for a batch: at once
    assert len(b.tier.asked) == 1
    b.reactor.run(5.0)
    assert len(b.tier.asked) == 1
    assert b.tier.answer() == [1, 2, 3]
    b.reactor.run()
    assert b.tier.answer() == [4, 5, 6]
    b.reactor.run()
    assert b.tier.answer() == [7]  # it has waited long enough for others
    b.demotion._batch_bytes = 2 * PAGE
    b.store(11, 12, 13)
    b.reactor.run()
    assert b.tier.answer() == [11, 12]


def test_demotion_skips_blocks_evicted_in_queue():
    b = Bench(pages=4)
    b.store(1, 2)
    b.store(11, 12, 13, 14)
    b.reactor.run(1.0)
    assert b.tier.answer() == [11, 12, 13, 14]
    assert b.counts.dropped_evicted == 2


def test_demotion_blocks_under_write_are_not_evicted():
    b = Bench(pages=2)
    b.store(1, 2)
    b.reactor.run(1.0)
    assert b.store(11) == [-2]
    b.tier.answer()
    assert b.store(11)[0] > 0


def test_demotion_queue_is_bounded_and_drops_newest():
    b = Bench(queue_pages=3)
    (lane,) = b.demotion._lanes
    assert isinstance(lane.queue, OrderedDict)  # a dict finds its first item slowly when many were taken
    b.store(1, 2, 3, 4, 5)
    assert b.counts.queued_blocks == 3 and b.counts.dropped_full == 2
    looked_at, has = [], b.tier.has
    b.tier.has = lambda *name: looked_at.append(name) or has(*name)
    b.store(6, after=5)
    assert b.counts.dropped_full == 3 and len(looked_at) == 1, "the prefix is not walked, nor counted, again"
    assert b.written() == [1, 2, 3]
    assert b.use(1, 2, 3, 4, 5, 6) == 6  # the next use asks again
    assert b.written() == [4, 5, 6]


def test_demotion_yields_to_reads_for_bounded_time():
    b = Bench()
    b.tier.reading = True
    b.store(1)
    b.reactor.run(0.5)
    assert not b.tier.asked
    b.tier.reading = False
    b.tier.on_quiet()
    b.reactor.run()
    assert b.tier.answer() == [1]
    b.tier.reading = True
    b.store(2, after=1)
    b.reactor.run(d.YIELD_SECONDS - 0.1)
    assert not b.tier.asked
    b.reactor.run(0.1)
    assert b.tier.answer() == [2]


def test_demotion_waits_for_writable_tier():
    b = Bench()
    b.store(1)
    b.tier.writable = False
    b.store(2, after=1)
    b.reactor.run(5.0)
    assert not b.tier.asked and b.counts.queued_blocks == 2
    b.tier.writable = True
    b.demotion.tiers_changed()
    assert b.written() == [1, 2]


def test_demotion_writes_blocks_stored_and_used_while_a_tier_opens():
    """With ``all`` a block is written at its first use: it need not come again after the tier was opened."""
    both = Bench("all"), Bench("reuse")
    for b in both:
        b.tier.writable = False
        b.store(1, 2)
    both[1].use(1, 2)
    for b in both:
        assert b.written() == []
        b.tier.writable = True
        b.demotion.tiers_changed()
        assert b.written() == [1, 2]


def test_demotion_does_not_write_again_what_a_tier_is_opened_with():
    b = Bench()
    b.tier.writable = False
    b.store(1, 2, 3)
    b.tier.kept.update((NAMESPACE_ID, 0, hash_of(n)) for n in (1, 2))
    b.tier.writable = True
    b.demotion.tiers_changed()
    assert b.written() == [3]
    assert (b.counts.admitted, b.counts.written, b.counts.queued_bytes) == (3, 3, 0)


def test_demotion_keeps_nothing_of_blocks_evicted_while_a_tier_is_closed():
    b = Bench(pages=4, queue_pages=4)
    b.tier.writable = False
    b.store(1, 2, 3, 4)
    b.store(5, 6, 7, 8)
    assert (b.counts.queued_blocks, b.counts.queued_bytes) == (4, 4 * PAGE)
    assert (b.counts.dropped_evicted, b.counts.dropped_full) == (4, 0)
    b.tier.writable = True
    b.demotion.tiers_changed()
    assert b.written() == [5, 6, 7, 8] and b.counts.queued_bytes == 0


def test_demotion_writes_parents_first():
    b = Bench("reuse")
    b.store(1, 2, 3, 4)
    assert b.written() == []
    b.index.touch(1, NAMESPACE_ID, block_hashes(1, 2))
    assert b.written() == [1, 2]
    b.tier.kept.clear()  # the disk gave them up
    b.use(1, 2, 3, 4)
    assert b.written() == [1, 2, 3, 4]


def test_demotion_with_lost_parent_is_dropped_unless_in_tier():
    b = Bench("all")
    b.store(1, 2)
    b.written()
    b.index.discard(1, NAMESPACE_ID, 0, hash_of(1), b.index.find(NAMESPACE_ID, 0, hash_of(1)).slot)
    b.store(3, after=2)
    assert b.written() == [3]
    b.tier.kept.clear()
    b.store(4, after=3)
    assert b.written() == [] and b.counts.dropped_parent == 3


def test_demotion_of_uncommitted_parent_happens_on_next_use():
    b = Bench()
    b.index.connect(2, HASH_BLOCK_SIZE, b.groups)
    first = b.store(1, commit=False)
    b.store(2, after=1, client=2)
    assert b.written() == [] and b.counts.dropped_parent == 2
    b.index.commit(1, first)
    assert b.written() == [1]
    b.use(1, 2)
    assert b.written() == [2]


def test_demotion_failure_is_counted_and_retried_on_next_use():
    b = Bench()
    b.store(1)
    b.reactor.run(1.0)
    b.tier.answer(good=False)
    assert b.counts.failed == 1 and b.index.client_counts(9)[0] == 0
    b.use(1)
    assert b.written() == [1]


def test_demotion_reuse_writes_recomputed_blocks():
    b = Bench("reuse", pages=4)
    b.store(1, 2)
    b.store(11, 12, 13, 14)  # memory forgets 1 and 2
    assert b.written() == []
    b.store(1, 2)  # computed again
    assert b.written() == [1, 2]


def test_demotion_reuse_ignores_scans():
    b = Bench("reuse", pages=8)
    b.store(1, 2)
    b.use(1, 2)
    assert b.written() == [1, 2]
    for n in range(100, 1000, 4):
        b.store(n, n + 1, n + 2, n + 3)
        b.reactor.run(0.2)
    assert b.written() == [] and b.counts.admitted == 2


def test_demotion_min_tokens_includes_whole_prefix():
    b = Bench("all", min_tokens=3 * HASH_BLOCK_SIZE)
    b.store(1, 2)
    b.store(11, 12)
    assert b.written() == []
    b.store(13, after=12)
    assert b.written() == [11, 12, 13]
    assert b.use(1, 2) == 2 and b.written() == []


def test_demotion_of_windowed_groups():
    b = Bench(
        "reuse", min_tokens=2 * HASH_BLOCK_SIZE, groups=[GroupShape(1, 1), GroupShape(1, 1, window=HASH_BLOCK_SIZE)]
    )
    b.store(1, 2, 3, groups=(0, 1))
    assert b.written() == []
    b.use(1, 2, 3)
    assert sorted(b.written()) == [1, 2, 3, 3]  # of the windowed group, what a lookup needs
    assert b.index.find(NAMESPACE_ID, 1, hash_of(3)).depth == 3


@pytest.mark.parametrize("how", ["all", "reuse"])
@pytest.mark.parametrize("first", [0, 1])
def test_demotion_min_tokens_of_states_is_the_whole_prefix(how, first):
    """Of most prompts only the last state is stored."""
    shapes = [GroupShape(1, 1), GroupShape(2, 1, kind="mamba")]
    b = Bench(how, min_tokens=5 * HASH_BLOCK_SIZE, groups=shapes[::-1] if first else shapes)
    for numbers, state, before in ((1, 2, 3, 4), 4, 2), ((11, 12, 13, 14, 15, 16), 16, 14):
        b.store(*numbers, groups=(first,))
        slots = b.index.reserve(1, NAMESPACE_ID, b"", [1 - first], block_hashes(state), block_hashes(before), NOWHERE)
        b.index.commit(1, slots)
        assert b.use(*numbers) == len(numbers)
    assert sorted(b.written()) == [11, 12, 13, 14, 15, 16, 16]


def test_demotion_of_cleared_batch_is_dropped():
    b = Bench()
    b.store(1)
    b.index.clear(None)
    b.store(2)
    assert b.written() == [2] and b.counts.dropped_evicted == 1
    b.store(3, after=2)
    b.index.clear(None)
    assert b.written() == [] and b.index.client_counts(9)[0] == 0


@pytest.mark.parametrize("name", ["all", "reuse"])
def test_index_shapes_of_stored_namespace_are_known(name):
    b = Bench(name)
    assert b.index.shapes(NAMESPACE_ID) is None
    b.store(1)
    assert b.index.shapes(NAMESPACE_ID) == (HASH_BLOCK_SIZE, [GroupShape(1, 1)])
