"""What goes down: in which order, how much at once, when, and what is dropped instead."""

import pytest
from lower_fakes import FakeReactor
from support import Clock

from vllm_kvtier.store.entries import Shape
from vllm_kvtier.store.extents import SlotPool
from vllm_kvtier.store.index import Index
from vllm_kvtier.store.lower import demotion as d
from vllm_kvtier.store.lower.admission import admission
from vllm_kvtier.store.lower.base import Tier
from vllm_kvtier.store.messages import GroupShape
from vllm_kvtier.store.records import ZERO
from vllm_kvtier.wire.slots import PAGE

SPACE = b"s" * 16
UNIT = 16
NOWHERE = 1 << 30


def hash_of(n: int) -> bytes:
    return n.to_bytes(16, "big")


def chain(*numbers: int) -> bytes:
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
            self.kept.update((b.space, b.group, b.hash) for b in blocks)
        done([good] * len(blocks))
        return [int.from_bytes(b.hash, "big") for b in blocks]

    def has(self, space, group, block_hash):
        return (space, group, block_hash) in self.kept

    def discard(self, space, group, block_hash):
        self.kept.discard((space, group, block_hash))

    def find(self, want, done): ...
    def release(self, find): ...
    def read(self, find, blocks, done): ...
    def seconds(self, nbytes): ...
    def clear(self, space): ...
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
        self.index.connect(1, UNIT, self.groups)
        self.tier = FakeTier()
        self.demotion = d.Demotion(
            self.index,
            [self.tier],
            9,
            lambda tier: admission(how, min_tokens),
            queue_pages * PAGE,
            d.BATCH_BYTES,
            self.reactor,
            self.clock,
        )
        self.index.watch = self.demotion

    def store(self, *numbers, after=0, commit=True, client=1, groups=(0,)):
        items = [(g, n, p) for g in groups for n, p in zip(numbers, (after, *numbers), strict=False)]
        slots = self.index.reserve(
            client,
            SPACE,
            b"",
            [g for g, _, _ in items],
            chain(*(n for _, n, _ in items)),
            chain(*(p for _, _, p in items)),
            NOWHERE,
        )
        if commit:
            self.index.commit(client, [slot for slot in slots if slot > 0])
        return slots

    def use(self, *numbers):
        found = self.index.lookup(1, SPACE, chain(*numbers), 0, NOWHERE)
        self.index.release(1, found.lease)
        return found.units

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


def test_all_goes_down_in_one_batch_and_is_leased_only_then():
    b = Bench()
    b.store(1, 2, 3)
    b.store(4, after=3)
    assert not b.tier.asked and b.counts.queued_blocks == 4
    b.reactor.run(d.LINGER_SECONDS)
    assert b.index.held(9)[0] == 1 and b.counts.queued_blocks == 0
    blocks = b.tier.asked[0][0]
    assert [x.parent for x in blocks] == [ZERO, hash_of(1), hash_of(2), hash_of(3)]
    assert [x.unit for x in blocks] == [1, 2, 3, 4] and len({x.slot for x in blocks}) == 4
    assert b.tier.answer() == [1, 2, 3, 4]
    assert b.index.held(9)[0] == 0
    b.use(1, 2, 3, 4)
    assert b.written() == []
    assert (b.counts.written, b.counts.admitted) == (4, 4)


def test_leases_outlive_their_usual_time():
    b = Bench()
    b.store(1)
    b.reactor.run(1.0)
    b.clock.now += 1e6
    b.index.tick()
    assert b.index.held(9)[0] == 1
    b.tier.answer()
    assert b.index.held(9)[0] == 0


def test_one_batch_at_a_time_and_not_too_much(monkeypatch):
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


def test_what_is_evicted_in_the_queue_is_skipped():
    b = Bench(pages=4)
    b.store(1, 2)
    b.store(11, 12, 13, 14)
    b.reactor.run(1.0)
    assert b.tier.answer() == [11, 12, 13, 14]
    assert b.counts.dropped_evicted == 2


def test_what_is_being_written_cannot_be_evicted():
    b = Bench(pages=2)
    b.store(1, 2)
    b.reactor.run(1.0)
    assert b.store(11) == [-2]
    b.tier.answer()
    assert b.store(11)[0] > 0


def test_the_queue_is_bounded_and_the_newest_are_dropped():
    b = Bench(queue_pages=3)
    b.store(1, 2, 3, 4, 5)
    assert b.counts.queued_blocks == 3 and b.counts.dropped_full == 2
    assert b.written() == [1, 2, 3]
    assert b.use(1, 2, 3, 4, 5) == 5  # the next use asks again
    assert b.written() == [4, 5]


def test_reads_go_first_for_a_while():
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


def test_a_tier_that_takes_no_writes():
    b = Bench()
    b.store(1)
    b.tier.writable = False
    b.store(2, after=1)
    b.reactor.run(5.0)
    assert not b.tier.asked and b.counts.queued_blocks == 1
    b.tier.writable = True
    b.demotion.tiers_changed()
    assert b.written() == [1]
    b.use(1, 2)
    assert b.written() == [2]


def test_ancestors_go_first_and_from_wherever_they_are():
    b = Bench("reuse")
    b.store(1, 2, 3, 4)
    assert b.written() == []
    b.index.touch(1, SPACE, chain(1, 2))
    assert b.written() == [1, 2]
    b.tier.kept.clear()  # the disk gave them up
    b.use(1, 2, 3, 4)
    assert b.written() == [1, 2, 3, 4]


def test_a_lost_ancestor_ends_it_but_not_one_that_is_below():
    b = Bench("all")
    b.store(1, 2)
    b.written()
    b.index.discard(1, SPACE, 0, hash_of(1), b.index.find(SPACE, 0, hash_of(1)).slot)
    b.store(3, after=2)
    assert b.written() == [3]
    b.tier.kept.clear()
    b.store(4, after=3)
    assert b.written() == [] and b.counts.dropped_parent == 3


def test_an_ancestor_that_is_still_being_written_comes_with_the_next_use():
    b = Bench()
    b.index.connect(2, UNIT, b.groups)
    first = b.store(1, commit=False)
    b.store(2, after=1, client=2)
    assert b.written() == [] and b.counts.dropped_parent == 2
    b.index.commit(1, first)
    assert b.written() == [1]
    b.use(1, 2)
    assert b.written() == [2]


def test_failures_are_counted_and_tried_with_the_next_use():
    b = Bench()
    b.store(1)
    b.reactor.run(1.0)
    b.tier.answer(good=False)
    assert b.counts.failed == 1 and b.index.held(9)[0] == 0
    b.use(1)
    assert b.written() == [1]


def test_reuse_writes_what_comes_back():
    b = Bench("reuse", pages=4)
    b.store(1, 2)
    b.store(11, 12, 13, 14)  # memory forgets 1 and 2
    assert b.written() == []
    b.store(1, 2)  # computed again
    assert b.written() == [1, 2]


def test_a_scan_wears_nothing_and_pushes_nothing_down():
    b = Bench("reuse", pages=8)
    b.store(1, 2)
    b.use(1, 2)
    assert b.written() == [1, 2]
    for n in range(100, 1000, 4):
        b.store(n, n + 1, n + 2, n + 3)
        b.reactor.run(0.2)
    assert b.written() == [] and b.counts.admitted == 2


def test_short_chains_stay_and_long_ones_take_their_beginning_along():
    b = Bench("all", min_tokens=3 * UNIT)
    b.store(1, 2)
    b.store(11, 12)
    assert b.written() == []
    b.store(13, after=12)
    assert b.written() == [11, 12, 13]
    assert b.use(1, 2) == 2 and b.written() == []


def test_windowed_groups_have_depth_and_go_down_too():
    b = Bench("reuse", min_tokens=2 * UNIT, groups=[GroupShape(1, 1), GroupShape(1, 1, window=UNIT)])
    b.store(1, 2, 3, groups=(0, 1))
    assert b.written() == []
    b.use(1, 2, 3)
    assert sorted(b.written()) == [1, 2, 3, 3]  # of the windowed group, what a lookup needs
    assert b.index.find(SPACE, 1, hash_of(3)).depth == 3


def test_a_batch_that_memory_gave_up_whole():
    b = Bench()
    b.store(1)
    b.index.clear(None)
    b.store(2)
    assert b.written() == [2] and b.counts.dropped_evicted == 1
    b.store(3, after=2)
    b.index.clear(None)
    assert b.written() == [] and b.index.held(9)[0] == 0


@pytest.mark.parametrize("name", ["all", "reuse"])
def test_shapes_of_what_is_stored_are_known(name):
    b = Bench(name)
    assert b.index.shapes(SPACE) is None
    b.store(1)
    assert b.index.shapes(SPACE) == (UNIT, [Shape(1, None, 1)])
