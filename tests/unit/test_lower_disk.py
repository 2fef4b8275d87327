"""The disk tier's server side: what is found, read, written, given up and told its mover, and what failures cost."""

import msgspec
import pytest
from lower_fakes import FakeMover, FakeReactor
from support import Clock

from vllm_kvtier.store.entries import Shape
from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.lower.base import Block, Want
from vllm_kvtier.store.lower.disk import tier as d
from vllm_kvtier.store.lower.mover import OPENING, READY
from vllm_kvtier.store.lower.rate import Rate
from vllm_kvtier.store.messages import GroupShape
from vllm_kvtier.store.records import ZERO
from vllm_kvtier.wire.slots import PAGE

SPACE, OTHER = b"s" * 16, b"o" * 16
SHAPES = [Shape(1, None, 2)]
SPACE_SHAPE = m.SpaceShape(SPACE, 16, [GroupShape(1, 2)])


def hash_of(n: int) -> bytes:
    return n.to_bytes(16, "big")


def chain(*numbers: int) -> bytes:
    return b"".join(map(hash_of, numbers))


def blocks_of(*numbers: int, after: int = 0, space=SPACE, tenant=b"", pages=2) -> list[Block]:
    """A chain's blocks, below block ``after``, in slots of their own."""
    parents = (after, *numbers)
    return [
        Block(space, 0, hash_of(n), hash_of(p), tenant, 100 + 2 * n, pages)
        for n, p in zip(numbers, parents, strict=False)
    ]


def kept_of(*numbers: int, place: int = 1) -> list[m.Move]:
    return [m.Move(SPACE, 0, hash_of(n), hash_of(n - 1), b"", 0, 2, place + 2 * i) for i, n in enumerate(numbers)]


class Bench:
    def __init__(self, pages=41, up=True, **options):
        self.clock = Clock()
        self.reactor = FakeReactor(self.clock)
        self.known = {SPACE: (16, SHAPES), OTHER: (16, SHAPES)}
        self.changes = 0
        self.tier = d.DiskTier(
            {"path": "/x", "size": pages * PAGE, **options},
            -1,
            1 << 20,
            self.reactor,
            self.known.get,
            clock=self.clock,
            make_mover=FakeMover,
        )
        self.tier.on_change = self.changed
        self.mover: FakeMover = self.tier._mover
        self.tier.start()
        if up:
            self.open()

    def changed(self) -> None:
        self.changes += 1

    def open(self, *args, **options) -> None:
        self.mover.opened(*args, **options)
        self.reactor.run()

    def find(self, *numbers, start=0, space=SPACE):
        found = []
        self.tier.find(Want(space, 16, SHAPES, chain(*numbers), start), found.append)
        assert len(found) == 1
        return found[0]

    def write(self, blocks, answer=True):
        answers = []
        self.tier.write(blocks, answers.append)
        if answer:
            self.mover.answer()
        return answers

    def read(self, find, blocks):
        answers = []
        self.tier.read(find, blocks, answers.append)
        return answers


def test_what_is_written_is_found_and_read():
    b = Bench()
    blocks = blocks_of(1, 2, 3)
    answers = b.write(blocks, answer=False)
    assert b.tier.has(SPACE, 0, hash_of(2)) and not answers and b.find(1, 2, 3).units == 0
    asked = b.mover.answer()
    assert answers == [[True] * 3]
    assert asked.spaces == [SPACE_SHAPE] and asked.gone == []
    assert [(x.hash, x.slot, x.pages) for x in asked.moves] == [(x.hash, x.slot, 2) for x in blocks]
    assert len({x.place for x in asked.moves}) == 3 and all(x.place > 0 for x in asked.moves)
    find = b.find(1, 2, 3, 4, start=1)
    assert find.units == 3
    read = b.read(find, blocks_of(2, 3, 9))
    assert b.tier.reading and b.tier.seconds(0) > 0
    told = b.mover.answer([True, False], error="a bad sector")
    assert [x.place for x in told.moves] == [x.place for x in asked.moves[1:]]
    assert read == [[True, False, False]] and not b.tier.reading
    b.tier.release(find)
    assert b.tier._places.stats().leases == 0
    assert b.mover.sent[-1] == m.Drop([asked.moves[2].place])  # what cannot be read is given up
    again = b.write(blocks_of(3, 4, after=2))
    assert again == [[True, True]] and b.mover.sent[-1].spaces == []
    counts = b.tier.counts()
    assert (counts.state, counts.blocks, counts.used_bytes) == ("ready", 4, 8 * PAGE)
    assert (counts.written_blocks, counts.written_bytes, counts.found_blocks) == (5, 10 * PAGE, 2)
    assert (counts.read_blocks, counts.read_failures) == (1, 1)


def test_nothing_before_it_is_open_and_restore_takes_turns(monkeypatch):
    monkeypatch.setattr("vllm_kvtier.store.lower.disk.places.RESTORE_STEP", 2)
    b = Bench(up=False)
    assert not b.tier.usable and not b.tier.writable and b.find(1).units == 0
    assert b.write(blocks_of(1), answer=False) == [[False]]
    assert b.tier.counts().state == "opening"
    b.mover.opened(kept_of(1, 2, 3, 4, 5), [SPACE_SHAPE])
    assert not b.tier.usable and b.tier.counts().state == "opening"  # the rest comes in turns of the reactor
    b.reactor.run()
    assert b.tier.usable and b.tier.writable and b.changes == 1
    assert b.find(1, 2, 3, 4, 5, 6).units == 5
    written = b.write(blocks_of(6, after=5))
    assert written == [[True]]
    assert b.mover.sent[-1].moves[0].place not in range(1, 11)


def test_what_cannot_be_restored_is_given_up():
    b = Bench(up=False)
    wrong = [
        m.Move(SPACE, 0, hash_of(7), ZERO, b"", 0, 2, 2),  # overlaps the first
        m.Move(SPACE, 0, hash_of(8), ZERO, b"", 0, 3, 20),  # not this space's size
        m.Move(SPACE, 4, hash_of(8), ZERO, b"", 0, 2, 24),  # no such group
        m.Move(OTHER, 0, hash_of(8), ZERO, b"", 0, 2, 26),  # nobody knows the space
        m.Move(SPACE, 0, hash_of(8), ZERO, b"", 0, 2, 40),  # beyond the end
        m.Move(SPACE, 0, hash_of(1), ZERO, b"", 0, 2, 30),  # twice
    ]
    b.open([*kept_of(1, 2), *wrong], [SPACE_SHAPE])
    assert b.tier.counts().blocks == 2 and b.find(1, 2).units == 2
    assert [x.gone for x in b.mover.sent] == [[2, 20, 24, 26, 30, 40]]


def test_evicted_places_are_told_with_the_write_that_takes_them():
    b = Bench(pages=9)  # four places
    b.write(blocks_of(1, 2))
    b.write(blocks_of(11, 12))
    before = {x.hash: x.place for sent in b.mover.sent for x in sent.moves}
    b.tier.release(b.find(1, 2))
    answers = b.write(blocks_of(21, 22))
    assert answers == [[True, True]]
    sent = b.mover.sent[-1]
    assert set(sent.gone) == {before[hash_of(11)], before[hash_of(12)]} == {x.place for x in sent.moves}
    assert b.tier.counts().evicted_blocks == 2


def test_leased_places_are_not_taken():
    b = Bench(pages=9)
    b.write(blocks_of(1, 2, 3, 4))
    find = b.find(1, 2, 3, 4)
    assert b.write(blocks_of(21), answer=False) == [[False]]
    assert b.tier.counts().extra["refused_room"] == 1
    b.tier.release(find)
    assert b.write(blocks_of(21)) == [[True]]


def test_writes_go_one_at_a_time():
    b = Bench()
    first, second = b.write(blocks_of(1), answer=False), b.write(blocks_of(2, after=1), answer=False)
    assert len(b.mover.asked) == 1
    b.mover.answer()
    assert first == [[True]] and not second and len(b.mover.asked) == 1
    b.mover.answer()
    assert second == [[True]]


def test_a_child_without_its_parent_is_refused():
    b = Bench()
    assert b.write(blocks_of(5, after=4), answer=False) == [[False]]
    assert b.tier.counts().extra["refused_parent"] == 1
    b.known.clear()
    assert b.write(blocks_of(1), answer=False) == [[False]]
    assert b.tier.counts().extra["refused_space"] == 1


def test_failed_writes_pause_and_their_places_are_given_up(caplog):
    caplog.set_level("INFO")
    b = Bench()
    answers = b.write(blocks_of(1, 2), answer=False)
    b.mover.answer([True, False], error="no space left on the device")
    assert answers == [[True, False]]
    failed = b.mover.sent[-1].moves[1].place
    assert b.tier.usable and not b.tier.writable and b.tier.counts().state == "read only"
    assert b.tier.counts().reason == "no space left on the device"
    assert b.write(blocks_of(2, after=1), answer=False) == [[False]]
    b.reactor.run(1.0)
    assert b.tier.writable
    b.write(blocks_of(2, after=1), answer=False)
    assert failed in b.mover.asked[0][0].gone
    b.mover.answer([False], error="no space left on the device")
    b.reactor.run(1.5)
    assert not b.tier.writable  # twice as long
    b.reactor.run(0.5)
    assert b.write(blocks_of(2, after=1)) == [[True]]
    assert caplog.text.count("takes no writes for now") == 1 and caplog.text.count("takes writes again") == 1


def test_no_more_writes_until_opened_anew():
    b = Bench()
    b.write(blocks_of(1), answer=False)
    b.mover.answer([False], error="read-only file system", writable=False)
    assert not b.tier.writable and b.tier.usable
    b.reactor.run(d.REOPEN_PAUSES[0])
    assert b.mover.state != READY and "opened anew" in b.mover.reason
    b.open()
    assert b.tier.writable


def test_discarded_and_cleared_are_told_at_once():
    b = Bench()
    b.write(blocks_of(1, 2, 3))
    at = {x.hash: x.place for x in b.mover.sent[-1].moves}
    b.tier.discard(SPACE, 0, hash_of(2))
    assert b.mover.sent[-1] == m.Drop([at[hash_of(2)]])
    assert b.find(1, 2, 3).units == 1 and not b.tier.has(SPACE, 0, hash_of(2))
    b.tier.clear(SPACE)
    assert sorted(b.mover.sent[-1].gone) == sorted([at[hash_of(1)], at[hash_of(3)]])
    assert b.tier.counts().blocks == 0 and b.tier.counts().discarded_blocks == 1


def test_discarded_while_it_is_written():
    b = Bench()
    answers = b.write(blocks_of(1, 2), answer=False)
    b.tier.discard(SPACE, 0, hash_of(2))
    asked = b.mover.answer()
    assert answers == [[True, False]]
    assert b.mover.sent[-1] == m.Drop([asked.moves[1].place])
    assert b.find(1, 2).units == 1


def test_a_dead_mover_takes_all_with_it_and_the_next_one_brings_it_back():
    b = Bench()
    b.write(blocks_of(1, 2, 3))
    places = {x.hash: x.place for x in b.mover.sent[-1].moves}
    find, other = b.find(1, 2, 3), b.find(1)
    reading = b.read(find, blocks_of(1, 2))
    writing = b.write(blocks_of(4, after=3), answer=False)
    b.tier.discard(SPACE, 0, hash_of(3))  # its Drop may not have been heard
    b.mover.set_aside("hung")
    assert not b.tier.usable and b.tier.counts().state == "set aside" and b.tier.counts().reason == "hung"
    assert not reading and not writing and not b.tier.has(SPACE, 0, hash_of(1))  # it may still write to the slots
    b.tier.discard(SPACE, 0, hash_of(2))
    b.tier.clear(OTHER)
    b.mover.reap()
    assert reading == [[False, False]] and writing == [[False]]
    assert b.read(other, blocks_of(1)) == [[False]]
    kept = [m.Move(SPACE, 0, hash_of(n), hash_of(n - 1), b"", 0, 2, places[hash_of(n)]) for n in (1, 2, 3)]
    b.mover.sent.clear()
    b.open(kept, [SPACE_SHAPE])
    assert b.find(1, 2, 3).units == 1
    assert sorted(b.mover.sent[0].gone) == sorted([places[hash_of(2)], places[hash_of(3)]])
    b.tier.release(find)
    b.tier.release(other)  # of an earlier life
    assert b.read(other, blocks_of(1)) == [[False]]


def test_what_was_cleared_while_it_was_down_stays_so_however_often_it_fails():
    b = Bench()
    b.write(blocks_of(1, 2))
    kept = b.mover.sent[-1].moves
    for trouble in ("hung", "another store uses it", "another store uses it"):
        b.mover.set_aside(trouble)
        b.mover.reap()
        if trouble == "hung":
            b.tier.clear(SPACE)
        b.mover.state = OPENING
    b.open([msgspec.structs.replace(move, slot=0) for move in kept], [SPACE_SHAPE])
    assert b.find(1, 2).units == 0
    assert sorted(b.mover.sent[-1].gone) == sorted(move.place for move in kept)
    b.write(blocks_of(1))
    b.mover.set_aside("again")
    b.mover.reap()
    b.open([msgspec.structs.replace(b.mover.sent[-1].moves[0], slot=0)], [SPACE_SHAPE])
    assert b.find(1).units == 1  # it is done once


def test_read_only_and_lies():
    b = Bench(up=False)
    b.open(kept_of(1), [SPACE_SHAPE], writable=False, note="it is read only: no right to write")
    assert b.tier.usable and not b.tier.writable and b.tier.counts().state == "read only"
    assert b.tier.counts().reason.endswith("no right to write")
    b.mover.hear(m.Kept([]))
    assert b.mover.state != READY
    b.tier.stop()
    b.tier.stop()


def test_a_smaller_disk_than_before():
    b = Bench(up=False)
    b.open(kept_of(*range(1, 11)), [SPACE_SHAPE], capacity_pages=13)
    assert b.tier.counts().capacity_bytes == 13 * PAGE
    assert b.find(*range(1, 11)).units == 6
    assert b.mover.sent[0].gone == [13, 15, 17, 19]


def test_a_space_of_other_groups_is_nobodys():
    b = Bench()
    b.write(blocks_of(1))
    found = []
    b.tier.find(Want(SPACE, 16, [Shape(1, None, 3)], chain(1), 0), found.append)
    assert found[0].units == 0
    b.known[SPACE] = (16, [Shape(1, None, 3)])
    assert b.write(blocks_of(2, pages=3), answer=False) == [[False]]


@pytest.mark.parametrize("actual", [(3e9, 0.0002), (50e6, 0.02)])
def test_the_rate_is_learned(actual):
    rate, now = Rate(1e9, 0.001), 5.0
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


# -- who publishes what it has ---------------------------------------------------------------------------------------


def test_it_keeps_what_was_written_until_it_gives_it_up():
    b, told = Bench(), []
    b.tier.on_moved = lambda *name: told.append((name[2], b.tier.keeps(*name)))
    b.write(blocks_of(1, 2, 3), answer=False)
    assert not b.tier.keeps(SPACE, 0, hash_of(1)) and not told, "it is being written"
    b.mover.answer([True, True, False])
    assert sorted(told) == [(hash_of(1), True), (hash_of(2), True)] and not b.tier.keeps(SPACE, 0, hash_of(3))
    told.clear()
    b.tier.discard(SPACE, 0, hash_of(2))
    b.tier.clear(None)
    assert told == [(hash_of(2), False), (hash_of(1), False)]


def test_a_disk_that_fails_keeps_nothing_and_says_so_of_all_at_once():
    b = Bench(up=False)
    assert not b.tier.keeps(SPACE, 0, hash_of(1))
    b.open(kept_of(1, 2), [SPACE_SHAPE])
    assert b.tier.keeps(SPACE, 0, hash_of(1)) and b.changes
    before = b.changes
    b.mover.set_aside("it hangs")
    assert not b.tier.keeps(SPACE, 0, hash_of(1)) and b.changes > before
