"""The disk tier's server side: what is found, read, written, evicted and sent to its tier process, and what failures
cost."""

import sys
import weakref

import msgspec
import pytest
from store_support import life_of
from support import Clock
from tier_backend_fakes import FakeMover, FakeReactor

from vllm_kvtier.store.index.types import ZERO
from vllm_kvtier.store.protocol import GroupShape
from vllm_kvtier.store.tiers.base import Block, Want
from vllm_kvtier.store.tiers.disk import block_limit, slot_map
from vllm_kvtier.store.tiers.disk import tier as d
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.tier_process import OPENING, READY, TierContext
from vllm_kvtier.store.tiers.read_time import ReadTime
from vllm_kvtier.wire.slots import PAGE

NAMESPACE_ID, OTHER = b"s" * 16, b"o" * 16
SHAPES = [GroupShape(1, 2)]
NAMESPACE_SHAPE = m.NamespaceShape(NAMESPACE_ID, 16, [GroupShape(1, 2)])


def hash_of(n: int) -> bytes:
    return n.to_bytes(16, "big")


def block_hashes(*numbers: int) -> bytes:
    return b"".join(map(hash_of, numbers))


def blocks_of(*numbers: int, after: int = 0, namespace_id=NAMESPACE_ID, tenant=b"", pages=2) -> list[Block]:
    """A chain's blocks, below block ``after``, in slots of their own."""
    parents = (after, *numbers)
    return [
        Block(namespace_id, 0, hash_of(n), hash_of(p), tenant, 100 + 2 * n, pages)
        for n, p in zip(numbers, parents, strict=False)
    ]


def kept_of(*numbers: int, position: int = 1) -> list[m.Move]:
    return [
        m.Move(NAMESPACE_ID, 0, hash_of(n), hash_of(n - 1), b"", 0, 2, position + 2 * i) for i, n in enumerate(numbers)
    ]


class Bench:
    def __init__(self, pages=41, up=True, free=lambda: 1 << 60, **options):
        self.clock = Clock()
        self.reactor = FakeReactor(self.clock)
        self.known = {NAMESPACE_ID: (16, SHAPES), OTHER: (16, SHAPES)}
        self.changes = 0
        context = TierContext(-1, 1 << 20, self.reactor, self.clock, make_process=FakeMover)
        options = {"path": "/x", "size": pages * PAGE, **options}
        self.tier = d.DiskTier(context, options, self.known.get, free_memory=free)
        self.tier.on_change = self.changed
        self.tier_process: FakeMover = self.tier._tier_process
        self.tier.start()
        if up:
            self.open()

    def changed(self) -> None:
        self.changes += 1

    def open(self, *args, **options) -> None:
        self.tier_process.opened(*args, **options)
        self.reactor.run()

    def find(self, *numbers, start=0, namespace_id=NAMESPACE_ID):
        found = []
        self.tier.find(Want(namespace_id, 16, SHAPES, block_hashes(*numbers), start), found.append)
        assert len(found) == 1
        return found[0]

    def write(self, blocks, answer=True):
        answers = []
        self.tier.write(blocks, answers.append)
        if answer:
            self.tier_process.answer()
        return answers

    def read(self, find, blocks):
        answers = []
        self.tier.read(find, blocks, answers.append)
        return answers


def test_disk_tier_written_blocks_are_found_and_read():
    b = Bench()
    blocks = blocks_of(1, 2, 3)
    answers = b.write(blocks, answer=False)
    assert b.tier.has(NAMESPACE_ID, 0, hash_of(2)) and not answers and b.find(1, 2, 3).num_hash_blocks == 0
    asked = b.tier_process.answer()
    assert answers == [[True] * 3]
    assert asked.namespaces == [NAMESPACE_SHAPE] and asked.gone == []
    assert [(x.hash, x.slot, x.pages) for x in asked.moves] == [(x.hash, x.slot, 2) for x in blocks]
    assert len({x.position for x in asked.moves}) == 3 and all(x.position > 0 for x in asked.moves)
    find = b.find(1, 2, 3, 4, start=1)
    assert find.num_hash_blocks == 3
    read = b.read(find, blocks_of(2, 3, 9))
    assert b.tier.reading and b.tier.seconds(0) > 0
    told = b.tier_process.answer([True, False], error="a bad sector")
    assert [x.position for x in told.moves] == [x.position for x in asked.moves[1:]]
    assert read == [[True, False, False]] and not b.tier.reading
    b.tier.release(find)
    assert b.tier._slot_map.stats().leases == 0
    assert b.tier_process.sent[-1] == m.Drop([asked.moves[2].position])  # what cannot be read is given up
    again = b.write(blocks_of(3, 4, after=2))
    assert again == [[True, True]] and b.tier_process.sent[-1].namespaces == []
    counts = b.tier.counts()
    assert (counts.state, counts.blocks, counts.used_bytes) == ("ready", 4, 8 * PAGE)
    assert (counts.written_blocks, counts.written_bytes, counts.found_blocks) == (5, 10 * PAGE, 2)
    assert (counts.read_blocks, counts.read_failures) == (1, 1)


def test_disk_tier_restore_is_sliced_and_nothing_runs_before_open(monkeypatch):
    monkeypatch.setattr("vllm_kvtier.store.tiers.disk.slot_map.RESTORE_STEP", 2)
    b = Bench(up=False)
    assert not b.tier.usable and not b.tier.writable and b.find(1).num_hash_blocks == 0
    assert b.write(blocks_of(1), answer=False) == [[False]]
    assert b.tier.counts().state == "opening"
    b.tier_process.opened(kept_of(1, 2, 3, 4, 5), [NAMESPACE_SHAPE])
    assert not b.tier.usable and b.tier.counts().state == "opening"  # the rest comes in turns of the reactor
    b.reactor.run()
    assert b.tier.usable and b.tier.writable and b.changes == 1
    assert b.find(1, 2, 3, 4, 5, 6).num_hash_blocks == 5
    written = b.write(blocks_of(6, after=5))
    assert written == [[True]]
    assert b.tier_process.sent[-1].moves[0].position not in range(1, 11)


def test_disk_tier_of_many_blocks_has_time_to_open_on_a_busy_machine():
    """With four million blocks, and a sixth of a core, it took 50 s, and after 60 it was started again."""
    assert Bench(pages=1 << 30, up=False).tier_process.open_seconds > 1000
    assert Bench(pages=1 << 18, up=False).tier_process.open_seconds < 70


def test_disk_tier_restore_sorts_few_blocks_at_a_time(monkeypatch):
    """To sort two million took 1.4 s, in which the store handled no message."""
    looked_at, fields = [], slot_map.attrgetter
    for name, value in (("RESTORE_STEP", 10), ("RESTORE_PAGES", 20)):
        monkeypatch.setattr(slot_map, name, value, raising=False)
    monkeypatch.setattr(slot_map, "attrgetter", lambda name: lambda move: looked_at.append(name) or fields(name)(move))
    kept = [*kept_of(*range(501, 1001), position=1), *kept_of(*range(1, 501), position=1001)]
    blocks = slot_map.SlotMap(None, Clock(), 1.0, slot_map.Gone())
    blocks.on_kept(m.Kept(sorted(kept, key=lambda move: move.hash), [NAMESPACE_SHAPE]))
    for _ in blocks.fill(2001):
        assert len(looked_at) <= 10
        looked_at.clear()
    assert blocks.filled and blocks.blocks_found == 1000 and not blocks._gone
    assert all(blocks.lease_blocks([(move.namespace_id, move.group, move.hash)])[1] == [move.position] for move in kept)


def test_disk_tier_unrestorable_blocks_are_dropped():
    b = Bench(up=False)
    wrong = [
        m.Move(NAMESPACE_ID, 0, hash_of(7), ZERO, b"", 0, 2, 2),  # overlaps the first
        m.Move(NAMESPACE_ID, 0, hash_of(8), ZERO, b"", 0, 3, 20),  # not this space's size
        m.Move(NAMESPACE_ID, 4, hash_of(8), ZERO, b"", 0, 2, 24),  # no such group
        m.Move(OTHER, 0, hash_of(8), ZERO, b"", 0, 2, 26),  # an unknown namespace
        m.Move(NAMESPACE_ID, 0, hash_of(8), ZERO, b"", 0, 2, 40),  # beyond the end
        m.Move(NAMESPACE_ID, 0, hash_of(1), ZERO, b"", 0, 2, 30),  # twice
    ]
    b.open([*kept_of(1, 2), *wrong], [NAMESPACE_SHAPE])
    assert b.tier.counts().blocks == 2 and b.find(1, 2).num_hash_blocks == 2
    assert [x.gone for x in b.tier_process.sent] == [[2, 20, 24, 26, 30, 40]]


def test_disk_tier_eviction_is_reported_with_replacing_write():
    b = Bench(pages=9)  # four places
    b.write(blocks_of(1, 2))
    b.write(blocks_of(11, 12))
    before = {x.hash: x.position for sent in b.tier_process.sent for x in sent.moves}
    b.tier.release(b.find(1, 2))
    answers = b.write(blocks_of(21, 22))
    assert answers == [[True, True]]
    sent = b.tier_process.sent[-1]
    assert set(sent.gone) == {before[hash_of(11)], before[hash_of(12)]} == {x.position for x in sent.moves}
    assert b.tier.counts().evicted_blocks == 2


def test_disk_tier_lists_no_more_blocks_than_memory_is_free_for(monkeypatch, caplog):
    """Small blocks take more memory than the check of the start counts, once a disk has filled."""
    monkeypatch.setattr(block_limit, "STEP", 4 * block_limit.BLOCK_BYTES)
    free = [1 << 30]  # for four blocks
    b = Bench(free=lambda: free.pop() if free else block_limit.STEP - 1)
    b.write(blocks_of(1, 2, 3, 4))
    b.write(blocks_of(11, 12))
    assert b.tier.counts().blocks == 4 and b.tier.counts().evicted_blocks == 2
    assert b.find(11, 12).num_hash_blocks == 2 and b.find(1, 2, 3, 4).num_hash_blocks == 2
    b.write(blocks_of(21, 22))
    assert b.tier.counts().blocks == 4 and len(b.tier_process.sent[-1].gone) == 2
    assert caplog.text.count("no memory is free for tables of more than 4 blocks") == 1
    free += [1 << 30]
    b.write(blocks_of(31, 32, 33, 34))
    assert b.tier.counts().blocks == 8


def test_disk_tier_restores_no_more_blocks_than_memory_is_free_for(monkeypatch):
    monkeypatch.setattr(block_limit, "STEP", 4 * block_limit.BLOCK_BYTES)
    free = [1 << 30]
    b = Bench(up=False, free=lambda: free.pop() if free else 0)
    b.open(kept_of(1, 2, 3, 4, 5, 6), [NAMESPACE_SHAPE])
    assert b.tier.counts().blocks == 4 and b.find(1, 2, 3, 4, 5, 6).num_hash_blocks == 4
    assert b.tier_process.sent == [], "those beyond are not removed from the disk"
    b.tier_process.back_off("it died")
    b.tier_process.start()
    free.append(1 << 30)
    b.open(kept_of(1, 2, 3, 4, 5, 6), [NAMESPACE_SHAPE])
    assert b.tier.counts().blocks == 6


@pytest.mark.parametrize("written", [False, True], ids=["", "overwriting"])
def test_disk_tier_cleared_blocks_do_not_come_back_behind_the_limit(monkeypatch, written):
    """The tier process died before it had recorded the clear, and there was no memory at its next opening."""
    monkeypatch.setattr(block_limit, "STEP", 4 * block_limit.BLOCK_BYTES)
    free = [1 << 30]
    b = Bench(up=False, free=lambda: free.pop() if free else 0)

    def open_again():
        b.tier_process.back_off("it died")
        b.tier_process.start()
        b.open(kept_of(1, 2, 3, 4, 5, 6), [NAMESPACE_SHAPE])

    b.open(kept_of(1, 2, 3, 4, 5, 6), [NAMESPACE_SHAPE])
    if written:
        b.write(blocks_of(11), answer=False)  # where 5 is
    b.tier.clear(None)
    open_again()
    assert b.tier.counts().blocks == 0
    assert {9, 11} <= {position for message in b.tier_process.sent for position in message.gone}
    free.append(1 << 30)
    open_again()
    assert b.tier.counts().blocks == 0


def test_disk_tier_unrecorded_clear_behind_the_limit_is_done_in_steps():
    """Of half a million blocks the store handled no message for two seconds."""
    b, kept = Bench(pages=20_001, free=lambda: 0), kept_of(*range(1, 10_000))
    b.tier_process.back_off("it died")
    b.tier_process.start()
    b.open(kept, [NAMESPACE_SHAPE])
    b.tier.clear(None)
    b.tier_process.back_off("it died")
    b.tier_process.start()
    b.tier_process.sent.clear()
    b.tier_process.opened(kept, [NAMESPACE_SHAPE])
    assert not b.tier_process.sent
    while not b.tier.usable:
        b.reactor.step()
    told = [message.gone for message in b.tier_process.sent]
    assert max(map(len, told)) <= slot_map.RESTORE_STEP and sorted(sum(told, [])) == list(range(1, 19_999, 2))
    b.tier_process.back_off("it died again")
    b.tier_process.start()
    b.tier_process.sent.clear()
    b.open(kept, [NAMESPACE_SHAPE])
    assert sum(len(message.gone) for message in b.tier_process.sent) == 9999


def test_disk_tier_clear_in_steps_ends_with_its_tier_process(monkeypatch):
    """It went on, and removed blocks of the next tier process that were listed there."""
    monkeypatch.setattr(block_limit, "STEP", 4 * block_limit.BLOCK_BYTES)
    monkeypatch.setattr(slot_map, "RESTORE_STEP", 1)
    free = [1 << 30]
    b = Bench(up=False, free=lambda: free.pop() if free else 0)
    b.open(kept_of(1, 2, 3, 4, 5, 6), [NAMESPACE_SHAPE])
    steps = b.tier.clear_in_steps(OTHER)
    next(steps)
    b.tier_process.back_off("it died")
    b.tier_process.start()
    free.append(1 << 30)
    b.open(kept_of(1, 2, 3, 4, 5, 6), [NAMESPACE_SHAPE])
    list(steps)
    b.tier.clear(OTHER)
    assert b.tier.counts().blocks == 5
    assert {position for message in b.tier_process.sent for position in message.gone} == {11}


@pytest.mark.parametrize("opening", [False, True])
def test_disk_tier_clear_takes_blocks_that_it_had_no_memory_for(monkeypatch, opening):
    monkeypatch.setattr(block_limit, "STEP", 4 * block_limit.BLOCK_BYTES)
    free = [1 << 30]
    b = Bench(up=False, free=lambda: free.pop() if free else 0)
    if opening:
        b.tier.clear(OTHER)
    b.open(kept_of(1, 2, 3, 4, 5, 6), [NAMESPACE_SHAPE])
    if not opening:
        b.write(blocks_of(11))
        (written,) = b.tier_process.sent[-1].moves
        assert written.position == 9, "where one of those beyond was"
        b.tier_process.sent.clear()
        b.tier.clear(OTHER)
    assert b.tier_process.sent == [m.Drop([9, 11] if opening else [7, 11])], "7: evicted for the written one"
    b.tier.clear(OTHER)
    assert len(b.tier_process.sent) == 1


def test_disk_tier_blocks_in_use_stay_beyond_the_limit(monkeypatch):
    monkeypatch.setattr(block_limit, "STEP", 2 * block_limit.BLOCK_BYTES)
    free = [1 << 30]
    b = Bench(free=lambda: free.pop() if free else 0)
    b.write(blocks_of(1, 2))
    find = b.find(1, 2)
    b.write(blocks_of(11, 12))
    assert b.find(1, 2).num_hash_blocks == 2
    b.tier.release(find)


def test_disk_tier_evicted_blocks_are_forgotten():
    b = Bench(pages=5)
    b.write(blocks_of(1))
    life = life_of(b.tier._slot_map._index.find(NAMESPACE_ID, 0, hash_of(1)))
    b.write(blocks_of(2))
    assert life() is not None
    b.write(blocks_of(3))
    assert life() is None


def test_disk_tier_leased_positions_are_not_reused():
    b = Bench(pages=9)
    b.write(blocks_of(1, 2, 3, 4))
    find = b.find(1, 2, 3, 4)
    assert b.write(blocks_of(21), answer=False) == [[False]]
    assert b.tier.counts().extra["refused_room"] == 1
    b.tier.release(find)
    assert b.write(blocks_of(21)) == [[True]]


def test_disk_tier_writes_one_batch_at_a_time():
    b = Bench()
    first, second = b.write(blocks_of(1), answer=False), b.write(blocks_of(2, after=1), answer=False)
    assert len(b.tier_process.asked) == 1
    b.tier_process.answer()
    assert first == [[True]] and not second and len(b.tier_process.asked) == 1
    b.tier_process.answer()
    assert second == [[True]]


def test_disk_tier_block_without_parent_is_refused():
    b = Bench()
    assert b.write(blocks_of(5, after=4), answer=False) == [[False]]
    assert b.tier.counts().extra["refused_parent"] == 1
    b.known.clear()
    assert b.write(blocks_of(1), answer=False) == [[False]]
    assert b.tier.counts().extra["refused_namespace"] == 1


def test_disk_tier_failed_write_backs_off_and_frees_positions(caplog):
    caplog.set_level("INFO")
    b = Bench()
    answers = b.write(blocks_of(1, 2, 3), answer=False)
    b.tier_process.answer([True, False, False], error="no space left on the device")
    assert answers == [[True, False, False]]
    failed = b.tier_process.sent[-1].moves[1].position
    assert b.tier.usable and not b.tier.writable and b.tier.counts().state == "read_only"
    assert b.tier.counts().reason == "no space left on the device"
    assert b.write(blocks_of(2, after=1), answer=False) == [[False]]
    b.reactor.run(1.0)
    assert b.tier.writable
    b.write(blocks_of(2, after=1), answer=False)
    assert failed in b.tier_process.asked[0][0].gone
    b.tier_process.answer([False], error="no space left on the device")
    b.reactor.run(1.5)
    assert not b.tier.writable  # twice as long
    b.reactor.run(0.5)
    assert b.write(blocks_of(2, after=1)) == [[True]]
    assert caplog.text.count("read only for now") == 1 and caplog.text.count("writable again") == 1


def test_disk_tier_position_that_cannot_be_written_is_not_used_again(caplog):
    """Once the disk was full it was the only free one: each write had it, and writes stopped for a minute each time."""
    b = Bench(pages=9)  # four places
    answers = b.write(blocks_of(1, 2, 3, 4), answer=False)
    bad = b.tier_process.answer([True, True, True, False], error="Input/output error").moves[3].position
    assert answers == [[True, True, True, False]] and b.tier.writable
    assert caplog.text.count("Input/output error") == 1
    for n in range(5, 9):
        assert b.write(blocks_of(n)) == [[True]], "in place of another block"
        assert bad not in [move.position for move in b.tier_process.sent[-1].moves]
    b.tier.clear(None)
    assert b.write(blocks_of(1, 2, 3, 4)) == [[True, True, True, False]] and b.tier.writable
    b.tier_process.back_off("hung")
    b.tier_process.reap()
    b.open()
    assert b.write(blocks_of(1, 2, 3, 4)) == [[True] * 4], "by the next process it may be"


def test_disk_tier_with_many_bad_positions_stops_writes():
    b = Bench(pages=81)  # 40 places
    for n in range(slot_map.MAX_BAD_POSITIONS):
        assert b.tier.writable
        b.write([*blocks_of(100 + n), *blocks_of(200 + n)], answer=False)
        b.tier_process.answer([True, False], error="Input/output error")
    assert b.tier.writable and b.tier.counts().used_bytes == 2 * 2 * PAGE * slot_map.MAX_BAD_POSITIONS
    b.write([*blocks_of(300), *blocks_of(301)], answer=False)
    b.tier_process.answer([True, False], error="Input/output error")
    assert not b.tier.writable
    assert b.tier.counts().used_bytes == 2 * PAGE * (2 * slot_map.MAX_BAD_POSITIONS + 1), "this one is freed"


def test_disk_tier_failed_write_of_one_block_stops_writes_and_reserves_its_position():
    b = Bench(pages=5)  # two places
    b.write(blocks_of(1), answer=False)
    bad = b.tier_process.answer([False], error="Input/output error").moves[0].position
    assert not b.tier.writable
    b.reactor.run(1.0)
    assert b.write(blocks_of(1)) == [[True]] and b.tier_process.sent[-1].moves[0].position != bad
    assert b.tier_process.sent[-1].gone == [bad], "the block may be there nevertheless"


def test_disk_tier_knows_whose_its_blocks_are_also_after_a_restart():
    b = Bench()
    b.write([*blocks_of(1), *blocks_of(2, after=1, tenant=b"A")])
    kept = b.tier_process.sent[-1].moves
    assert [b.tier.tenant_of(NAMESPACE_ID, 0, hash_of(n)) for n in (1, 2, 3)] == [b"", b"A", b""]
    b.tier_process.back_off("hung")
    assert b.tier.tenant_of(NAMESPACE_ID, 0, hash_of(2)) == b""
    b.tier_process.reap()
    b.open([msgspec.structs.replace(move, slot=0) for move in kept], [NAMESPACE_SHAPE])
    assert b.tier.tenant_of(NAMESPACE_ID, 0, hash_of(2)) == b"A"


def test_disk_tier_failed_write_stops_writes_until_reopened():
    b = Bench()
    b.write(blocks_of(1), answer=False)
    b.tier_process.answer([False], error="read-only file system", writable=False)
    assert not b.tier.writable and b.tier.usable
    b.reactor.run(d.REOPEN_BACKOFF[0])
    assert b.tier_process.state != READY and "opened again" in b.tier_process.reason
    b.open()
    assert b.tier.writable


def test_disk_tier_that_is_always_read_is_opened_again_too():
    b = Bench()
    b.write(blocks_of(1))
    b.write(blocks_of(2, after=1), answer=False)
    b.tier_process.answer([False], error="the file system is full", writable=False)
    b.read(b.find(1), blocks_of(1))
    b.reactor.run(d.REOPEN_BACKOFF[0] + d.REOPEN_TRIES - 2)
    assert b.tier_process.state == READY
    b.reactor.run(2)
    assert b.tier_process.state != READY and "opened again" in b.tier_process.reason


def test_disk_tier_that_opens_read_only_is_opened_again_until_it_is_writable():
    b = Bench(up=False)
    for backoff in d.REOPEN_BACKOFF[0], 2 * d.REOPEN_BACKOFF[0]:
        b.open(writable=False, note="read only: the disk is full")
        b.reactor.run(backoff - 1)
        assert b.tier_process.state == READY and not b.tier.writable
        b.reactor.run(1)
        assert b.tier_process.state != READY and "the disk is full" in b.tier_process.reason
    b.open()
    assert b.tier.writable


def test_disk_tier_discard_and_clear_are_reported_at_once():
    b = Bench()
    b.write(blocks_of(1, 2, 3))
    at = {x.hash: x.position for x in b.tier_process.sent[-1].moves}
    b.tier.discard(NAMESPACE_ID, 0, hash_of(2))
    assert b.tier_process.sent[-1] == m.Drop([at[hash_of(2)]])
    assert b.find(1, 2, 3).num_hash_blocks == 1 and not b.tier.has(NAMESPACE_ID, 0, hash_of(2))
    b.tier.clear(NAMESPACE_ID)
    assert sorted(b.tier_process.sent[-1].gone) == sorted([at[hash_of(1)], at[hash_of(3)]])
    assert b.tier.counts().blocks == 0 and b.tier.counts().discarded_blocks == 1


def test_disk_tier_blocks_stored_anew_during_a_read_are_kept():
    b = Bench()
    b.write(blocks_of(1, 2))
    find = b.find(1, 2)
    read = b.read(find, blocks_of(1, 2))
    b.tier.clear(NAMESPACE_ID)
    b.write(blocks_of(1, 2), answer=False)
    b.tier_process.answer(at=1)
    b.tier_process.answer([False, False])
    b.tier.release(find)
    assert read == [[False, False]] and b.find(1, 2).num_hash_blocks == 2
    assert b.tier.counts().discarded_blocks == 0


def test_disk_tier_keeps_little_of_cleared_blocks_until_the_next_write():
    """To free some objects for each of a million stopped the store for 0.8 s, when that write ended."""
    gone, names = slot_map.Gone(), [(NAMESPACE_ID, 0, hash_of(n)) for n in range(20_000)]
    before = sys.getallocatedblocks()
    for first in range(0, len(names), 2000):
        for position in range(first, first + 2000):
            gone.add(position, (*names[position],))
        assert gone.report(writing=False) == list(range(first, first + 2000))
    assert gone.report(writing=True) == []
    gone.add(20_000, (NAMESPACE_ID, 0, hash_of(20_000)))
    gone.report(writing=False)
    gone.answered(False)  # of a full file system; another write does not say it all again
    assert gone.report(writing=True) == [] and sys.getallocatedblocks() - before < 5000
    gone.answered(False)
    gone.down()
    assert len(list(gone.ban())) == 10
    assert len(gone.banned) == 20_001, "the next process may find them"


def test_disk_tier_cleared_blocks_are_acknowledged_by_the_next_good_write():
    gone = slot_map.Gone()
    gone.add(1, (NAMESPACE_ID, 0, hash_of(1)))
    assert gone.report(writing=True) == [1]
    gone.answered(False)
    assert gone.report(writing=True) == []
    gone.answered(True)
    gone.down()
    list(gone.ban())
    assert not gone.banned


@pytest.mark.parametrize("dies", [False, True])
def test_disk_tier_is_cleared_in_steps(dies):
    b = Bench(pages=20_001)
    b.open(kept_of(*range(1, 5000)), [NAMESPACE_SHAPE])
    steps = b.tier.clear_in_steps(None)
    next(steps)
    first = len(b.tier_process.sent[-1].gone)
    assert 0 < first < 4999 and b.tier.counts().blocks == 4999 - first and b.tier.has(*blocks_of(1)[0].name)
    if dies:
        b.tier_process.back_off("it died")
        b.open(kept_of(*range(1, 5000)), [NAMESPACE_SHAPE])
        assert b.tier.counts().blocks == 4999 - first  # what it was sent is not found again
    assert list(steps)
    b.tier.clear(None)
    assert b.tier.counts().blocks == 0
    if not dies:
        assert len({position for drop in b.tier_process.sent for position in drop.gone}) == 4999


def test_disk_tier_block_discarded_during_write_is_not_kept():
    b = Bench()
    answers = b.write(blocks_of(1, 2), answer=False)
    b.tier.discard(NAMESPACE_ID, 0, hash_of(2))
    asked = b.tier_process.answer()
    assert answers == [[True, False]]
    assert b.tier_process.sent[-1] == m.Drop([asked.moves[1].position])
    assert b.find(1, 2).num_hash_blocks == 1


def test_disk_tier_process_death_drops_index_and_restart_restores_it():
    b = Bench()
    b.write(blocks_of(1, 2, 3))
    positions = {x.hash: x.position for x in b.tier_process.sent[-1].moves}
    find, other = b.find(1, 2, 3), b.find(1)
    reading = b.read(find, blocks_of(1, 2))
    writing = b.write(blocks_of(4, after=3), answer=False)
    b.tier.discard(NAMESPACE_ID, 0, hash_of(3))  # its Drop may not have been received
    b.tier_process.back_off("hung")
    assert not b.tier.usable and b.tier.counts().state == "unavailable" and b.tier.counts().reason == "hung"
    # it may still write to the slots
    assert not reading and not writing and not b.tier.has(NAMESPACE_ID, 0, hash_of(1))
    b.tier.discard(NAMESPACE_ID, 0, hash_of(2))
    b.tier.clear(OTHER)
    b.tier_process.reap()
    assert reading == [[False, False]] and writing == [[False]]
    assert b.read(other, blocks_of(1)) == [[False]]
    kept = [m.Move(NAMESPACE_ID, 0, hash_of(n), hash_of(n - 1), b"", 0, 2, positions[hash_of(n)]) for n in (1, 2, 3)]
    b.tier_process.sent.clear()
    b.open(kept, [NAMESPACE_SHAPE])
    assert b.find(1, 2, 3).num_hash_blocks == 1
    gone = [position for drop in b.tier_process.sent for position in drop.gone]
    assert sorted(gone) == sorted([positions[hash_of(2)], positions[hash_of(3)]])
    b.tier.release(find)
    b.tier.release(other)  # of an earlier life
    assert b.read(other, blocks_of(1)) == [[False]]


@pytest.mark.parametrize("filled", [True, False])
def test_disk_tier_process_death_frees_its_blocks(filled):
    b = Bench(pages=20_001, up=False)
    b.tier_process.opened(kept_of(*range(1, 10_000)), [NAMESPACE_SHAPE])
    for _ in range(20 if filled else 7):
        b.reactor.step()
    find = b.find(1, 2)
    assert b.tier.usable is filled and find.num_hash_blocks == 2 * filled
    slot_map = weakref.ref(b.tier._slot_map)
    lives = [life_of(slot_map()._index.find(NAMESPACE_ID, 0, hash_of(n))) for n in (1, 2, 1000)]
    b.tier_process.back_off("it died")
    b.reactor.run()
    b.tier.release(find)
    del find
    assert slot_map() is None and not any(life() for life in lives)


def test_disk_tier_clear_while_unavailable_survives_failures():
    b = Bench()
    b.write(blocks_of(1, 2))
    kept = b.tier_process.sent[-1].moves
    for trouble in ("hung", "another store uses it", "another store uses it"):
        b.tier_process.back_off(trouble)
        b.tier_process.reap()
        if trouble == "hung":
            b.tier.clear(NAMESPACE_ID)
        b.tier_process.state = OPENING
    b.open([msgspec.structs.replace(move, slot=0) for move in kept], [NAMESPACE_SHAPE])
    assert b.find(1, 2).num_hash_blocks == 0
    assert sorted(b.tier_process.sent[-1].gone) == sorted(move.position for move in kept)
    b.write(blocks_of(1))
    b.tier_process.back_off("again")
    b.tier_process.reap()
    b.open([msgspec.structs.replace(b.tier_process.sent[-1].moves[0], slot=0)], [NAMESPACE_SHAPE])
    assert b.find(1).num_hash_blocks == 1  # it is done once


def test_disk_tier_clear_while_opening_is_done_in_steps():
    """With a million blocks it took 18 s on a busy machine, in which the store handled no message."""
    b, moved = Bench(pages=20_001, up=False), []
    b.tier.clear(OTHER)
    b.tier.clear(None)
    b.tier.discard(*blocks_of(9000)[0].name)
    b.tier.on_moved = lambda *name: moved.append(name)
    b.tier_process.opened(kept_of(*range(1, 10_000)), [NAMESPACE_SHAPE])
    while not b.tier.usable:
        before = len(moved)
        b.reactor.step()
        assert len(moved) - before <= slot_map.RESTORE_STEP
        assert len(b.tier._gone) == 0, "sent to its process, as they are removed"
    assert len(moved) == 9999 and b.find(1).num_hash_blocks == 0


def test_disk_tier_that_does_not_open_remembers_few_removals(monkeypatch):
    """Beyond those it forgets all blocks: a corrupt one must not be found again."""
    monkeypatch.setattr(slot_map, "MAX_LATER", 10)
    b = Bench(pages=20_001, up=False)
    for number in range(1, 1000):
        b.tier.discard(*blocks_of(number)[0].name)
        assert len(b.tier._slot_map.later) <= 10
    b.open(kept_of(*range(1, 2000)), [NAMESPACE_SHAPE])
    assert b.tier.usable and b.tier.counts().blocks == 0


def test_disk_tier_opens_read_only_and_unexpected_message_ends_tier_process():
    b = Bench(up=False)
    b.open(kept_of(1), [NAMESPACE_SHAPE], writable=False, note="it is read only: no right to write")
    assert b.tier.usable and not b.tier.writable and b.tier.counts().state == "read_only"
    assert b.tier.counts().reason.endswith("no right to write")
    b.tier_process.hear(m.Kept([]))
    assert b.tier_process.state != READY
    b.tier.stop()
    b.tier.stop()


def test_disk_tier_smaller_capacity_evicts_restored_blocks():
    b = Bench(up=False)
    b.open(kept_of(*range(1, 11)), [NAMESPACE_SHAPE], capacity_pages=13)
    assert b.tier.counts().capacity_bytes == 13 * PAGE
    assert b.find(*range(1, 11)).num_hash_blocks == 6
    assert b.tier_process.sent[0].gone == [13, 15, 17, 19]


def test_disk_tier_namespace_of_other_groups_is_not_found():
    b = Bench()
    b.write(blocks_of(1))
    found = []
    b.tier.find(Want(NAMESPACE_ID, 16, [GroupShape(1, 3)], block_hashes(1), 0), found.append)
    assert found[0].num_hash_blocks == 0
    b.known[NAMESPACE_ID] = (16, [GroupShape(1, 3)])
    assert b.write(blocks_of(2, pages=3), answer=False) == [[False]]


@pytest.mark.parametrize("actual", [(3e9, 0.0002), (50e6, 0.02)])
def test_disk_tier_read_time_is_learned(actual):
    rate, now = ReadTime(1e9, 0.001), 5.0
    for n in range(400):
        nbytes = 1 << (12 + n % 14)
        begun = rate.begin(nbytes, now)
        now += actual[1] + nbytes / actual[0]
        rate.end(begun, nbytes, now, True)
    for nbytes in (4096, 1 << 20, 1 << 25):
        assert rate.seconds(nbytes) == pytest.approx(actual[1] + nbytes / actual[0], rel=0.3)
    begun = rate.begin(1 << 25, now)
    assert rate.seconds(1 << 25) > 1.5 * rate._parts(1 << 25)[1]  # behind what is under way
    rate.end(begun, 1 << 25, now + 1, False)
    assert rate.busy_seconds(now + 9) == pytest.approx(now + 1 - 5.0)


# -- a tier that publishes its blocks ------------------------------------------------------------------------------


def test_disk_tier_keeps_written_blocks_until_eviction():
    b, told = Bench(), []
    b.tier.on_moved = lambda *name: told.append((name[2], b.tier.keeps(*name)))
    b.write(blocks_of(1, 2, 3), answer=False)
    assert not b.tier.keeps(NAMESPACE_ID, 0, hash_of(1)) and not told, "it is being written"
    b.tier_process.answer([True, True, False])
    assert sorted(told) == [(hash_of(1), True), (hash_of(2), True)] and not b.tier.keeps(NAMESPACE_ID, 0, hash_of(3))
    told.clear()
    b.tier.discard(NAMESPACE_ID, 0, hash_of(2))
    b.tier.clear(None)
    assert told == [(hash_of(2), False), (hash_of(1), False)]


def test_disk_tier_unavailable_keeps_no_block():
    b = Bench(up=False)
    assert not b.tier.keeps(NAMESPACE_ID, 0, hash_of(1))
    b.open(kept_of(1, 2), [NAMESPACE_SHAPE])
    assert b.tier.keeps(NAMESPACE_ID, 0, hash_of(1)) and b.changes
    before = b.changes
    b.tier_process.back_off("it hangs")
    assert not b.tier.keeps(NAMESPACE_ID, 0, hash_of(1)) and b.changes > before


def test_disk_tier_write_refused_for_a_removed_block_keeps_its_position_in_use():
    b = Bench(pages=9)  # four places
    b.write(blocks_of(1, 2, 3, 4), answer=False)
    b.tier.discard(NAMESPACE_ID, 0, hash_of(4))
    b.tier_process.answer([True, True, True, False], error="the block was removed meanwhile")
    assert b.tier._slot_map.bad_positions == 0


# -- a slow disk ---------------------------------------------------------------------------------------------------


def test_disk_tier_whose_writes_are_late_is_read_meanwhile():
    """With syncs of 7 s each write was killed after 10 s, at once again after each opening: reads failed half the time,
    and nothing was written."""
    b = Bench()
    b.write(blocks_of(1, 2))
    kept = [msgspec.structs.replace(move, slot=0) for move in b.tier_process.sent[-1].moves]
    for pause in (60, 120, 240):
        b.write(blocks_of(3, after=2), answer=False)
        assert b.tier_process.limit >= 90, "a write has three syncs in a row"
        b.tier_process.timeouts += 1
        b.tier_process.back_off("it has not answered a write within 90 s")
        b.tier_process.reap()
        b.open(kept, [NAMESPACE_SHAPE])
        find = b.find(1, 2)
        assert find.num_hash_blocks == 2 and b.write(blocks_of(3, after=2), answer=False) == [[False]]
        read = b.read(find, blocks_of(1, 2))
        assert b.tier_process.limit < 20 and b.tier_process.answer() and read == [[True, True]]
        b.tier.release(find)
        counts = b.tier.counts()
        assert (counts.state, counts.reason) == ("read_only", "it has not answered a write within 90 s")
        b.reactor.run(pause - 1)
        assert not b.tier.writable
        b.reactor.run(1)
        assert b.tier.writable and b.tier.counts().state == "ready"
    assert b.write(blocks_of(3, after=2)) == [[True]]
    b.write(blocks_of(4, after=3), answer=False)
    b.tier_process.timeouts += 1
    b.tier_process.back_off("late")
    b.tier_process.reap()
    b.open()
    b.reactor.run(60)
    assert b.tier.writable, "after a good write the pause is as short as at first"


def test_disk_tier_whose_reads_are_late_writes_on():
    b = Bench()
    b.write(blocks_of(1))
    b.read(b.find(1), blocks_of(1))
    b.tier_process.timeouts += 1
    b.tier_process.back_off("it has not answered a read within 10 s")
    b.tier_process.reap()
    b.open()
    assert b.tier.writable


# -- removals that outlive the store -------------------------------------------------------------------------------


def clear(b: Bench) -> list[str]:
    recorded = []
    b.tier.clear(None)
    b.tier.when_recorded(recorded.append)
    return recorded


def test_disk_tier_clear_is_recorded_when_its_process_has_answered():
    b = Bench()
    b.write(blocks_of(1, 2))
    kept = [msgspec.structs.replace(move, slot=0) for move in b.tier_process.sent[-1].moves]
    recorded = clear(b)
    assert not recorded, "a process that ends before it has answered may leave the blocks on the disk"
    assert b.tier_process.answer().moves == [] and recorded == [""]
    assert b.tier.counts().state == "ready" and b.tier.counts().written_blocks == 2
    b.tier_process.back_off("it died")
    b.reactor.run()
    b.open(kept, [NAMESPACE_SHAPE])
    assert b.find(1, 2).num_hash_blocks == 2, "acknowledged removals are forgotten here: its process has them"


def test_disk_tier_clear_while_it_opens_is_recorded_once_it_is_open():
    """The server answered at once. If the store ended before the tier was open, all blocks came back."""
    b = Bench(up=False)
    recorded = clear(b)
    b.open(kept_of(1, 2, 3), [NAMESPACE_SHAPE])
    assert not recorded and sorted(sum((each.gone for each in b.tier_process.sent), [])) == [1, 3, 5]
    b.tier_process.answer()
    assert recorded == [""]


@pytest.mark.parametrize("trouble", ["unavailable", "hangs", "fails to open", "ends"])
def test_disk_tier_clear_that_is_not_recorded_says_why(trouble):
    b = Bench(up=trouble == "hangs")
    if trouble == "unavailable":
        b.tier_process.back_off("there is no /x")
    recorded = clear(b)
    if trouble in ("hangs", "fails to open"):
        assert not recorded
        b.tier_process.back_off("it has not answered")
    if trouble == "ends":
        b.tier.stop()
    assert len(recorded) == 1 and recorded[0].startswith("unavailable (")
    b.tier_process.reap()
    assert len(recorded) == 1


def test_disk_tier_clear_while_it_is_read_only_says_so():
    b = Bench(up=False)
    b.open(kept_of(1), [NAMESPACE_SHAPE], writable=False, note="no right to write")
    recorded = clear(b)
    b.tier_process.answer(error="no right to write", writable=False)
    assert recorded == ["read_only (no right to write)"]
    assert len(b.reactor._timers) == 1, "it is opened again once"


def test_disk_tier_clear_finds_a_journal_that_cannot_be_written():
    b = Bench()
    recorded = clear(b)
    b.tier_process.answer(error="its journal cannot be written", writable=False)
    assert recorded == ["read_only (its journal cannot be written)"] and b.tier.counts().state == "read_only"


def test_disk_tier_clear_is_recorded_while_writes_pause():
    b = Bench()
    b.write(blocks_of(1), answer=False)
    b.tier_process.answer([False], error="the file system is full")
    assert b.tier.counts().state == "read_only"
    recorded = clear(b)
    b.tier_process.answer()
    assert recorded == [""]


@pytest.mark.parametrize("removes", ["all", "its namespace", "a block"])
def test_disk_tier_blocks_whose_write_waits_for_a_clear_are_removed_by_the_next(removes):
    """They had no positions yet, and were written after the second clear was recorded."""
    b = Bench()
    b.write(blocks_of(7))
    first = clear(b)
    waiting = b.write(blocks_of(1, 2), answer=False)
    if removes == "a block":
        b.tier.discard(NAMESPACE_ID, 0, hash_of(1))
    else:
        b.tier.clear(None if removes == "all" else NAMESPACE_ID)
    assert waiting == [[False, False]]
    b.tier_process.answer()
    assert first == [""] and not b.tier_process.asked and b.find(1, 2).num_hash_blocks == 0
    assert b.write(blocks_of(1, 2)) == [[True, True]]


def test_disk_tier_write_of_another_namespace_waits_on_at_a_clear():
    b = Bench()
    recorded = clear(b)
    waiting = b.write(blocks_of(1, 2), answer=False)
    b.tier.clear(OTHER)
    b.tier.discard(NAMESPACE_ID, 0, hash_of(3))
    b.tier_process.answer()
    assert recorded == [""] and not waiting
    b.tier_process.answer()
    assert waiting == [[True, True]] and b.find(1, 2).num_hash_blocks == 2
