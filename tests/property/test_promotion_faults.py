"""What comes up from below, while blocks are cleared, tiers go, spaces change hands, and reads take for ever."""

import pytest
from test_promotion import EVERYTHING, SPACE, UNIT, FakeTier, World, chain_of, small_chunks  # noqa: F401

from vllm_kvtier.store.entries import Shape
from vllm_kvtier.store.lower.base import Want
from vllm_kvtier.store.lower.tiers import Lower
from vllm_kvtier.store.messages import GroupShape
from vllm_kvtier.store.records import HASH

OTHER = 2  # an engine with other groups


def store(world: World, chain: bytes, client: int = 1) -> list[int]:
    parents = (bytes(HASH) + chain)[: len(chain)]
    slots = world.index.reserve(client, SPACE, b"", [0] * (len(chain) // HASH), chain, parents, EVERYTHING)
    world.index.commit(client, [slot for slot in slots if slot > 0])
    return slots


def test_a_read_that_takes_for_ever_keeps_its_slots():
    """Until it is over it may write to them: nobody else may get them, whatever the deadline of an engine's stores."""
    disk = FakeTier("disk")
    world, chain = World(disk, pages=4), chain_of("a", 4)
    disk.units[chain[:HASH]] = 4
    ahead = world.ahead(chain)
    reading = {block.slot for block in disk.reads[0][0]}
    world.clock.pass_(10_000.0)
    world.index.tick()
    assert not reading & set(store(world, chain_of("b", 4)))
    disk.finish()
    assert ahead.over and world.here(chain) == 4 and world.quiet()


def test_cleared_and_asked_again_while_it_is_read():
    """The first read's blocks are nobody's when they arrive; the second's are its own."""
    far = FakeTier("far")
    world, chain, heard = World(far), chain_of("a", 4), []
    far.units[chain[:HASH]] = 4
    first = world.ahead(chain)
    world.index.clear(None)
    second = world.ahead(chain_of("a", 5))
    world.promotion.wait(second, 9.0, lambda: heard.append(world.here(chain)))
    assert len(far.reads) == 2
    far.finish()
    far.finish()
    assert first.over and second.over and heard == [4] and world.quiet()


class Gone(FakeTier):
    """Finds, and is gone when it is read from."""

    def read(self, find, blocks, done):
        assert find in self.found
        done([False] * len(blocks))


def test_gone_between_finding_and_reading():
    gone = Gone("gone")
    world, chain = World(gone), chain_of("a", 20)
    gone.units[chain[:HASH]] = 20
    assert world.ahead(chain).over and world.quiet()
    assert world.promotion.failed_blocks == 4


def test_gone_after_the_first_chunk():
    disk = FakeTier("disk")
    world, chain = World(disk), chain_of("a", 20)
    disk.units[chain[:HASH]] = 20
    ahead = world.ahead(chain)
    disk.read = Gone.read.__get__(disk)
    disk.finish()
    disk.finish()
    assert ahead.over and world.here(chain) == 8 and world.quiet()


@pytest.mark.parametrize("when", ["finding", "reading"])
def test_a_space_that_changes_hands_meanwhile(when):
    """Cleared, and then used by an engine with other groups: ours comes to nothing, and the tier is not to blame."""
    far = FakeTier("far", at_once=when == "reading")
    world, chain, heard = World(far), chain_of("a", 12), []
    world.index.connect(OTHER, UNIT, [GroupShape(1, 3)])
    far.units[chain[:HASH]] = 12
    ahead = world.ahead(chain)
    world.promotion.wait(ahead, 9.0, lambda: heard.append(1))
    world.index.clear(None)
    store(world, chain_of("b", 2), OTHER)
    far.answer()
    while far.reads:
        far.finish()
    assert ahead.over and heard == [1] and world.quiet()


def test_who_waits_hears_also_when_the_space_has_changed_hands():
    far = FakeTier("far")
    world, chain, heard = World(far), chain_of("a", 4), []
    world.index.connect(OTHER, UNIT, [GroupShape(1, 3)])
    far.units[chain[:HASH]] = 4
    lower = Lower(world.index, [far], None, world.promotion)
    want = Want(SPACE, UNIT, [Shape(1, None, 1)], chain, 0)
    for _ in range(2):
        lower.lookup(1, want, EVERYTHING, 9.0, lambda found, below: heard.append((found.units, found.lease, below)))
    world.index.clear(None)
    store(world, chain_of("b", 2), OTHER)
    far.finish()
    assert heard == [(0, 0, None)] * 2 and world.quiet()


def test_nobody_waits_for_a_tier_that_is_down():
    """Its process was killed and cannot be reaped, so that its reads never end: it is not waited for again."""
    disk, other = FakeTier("disk"), FakeTier("other")
    world, chain, heard = World(disk, other), chain_of("a", 4), []
    disk.units[chain[:HASH]] = 4
    lower = Lower(world.index, [disk, other], None, world.promotion)
    want = Want(SPACE, UNIT, [Shape(1, None, 1)], chain, 0)
    lower.lookup(1, want, EVERYTHING, 0.0, lambda found, below: heard.append(below.units))
    disk.up = False
    lower.lookup(1, want, EVERYTHING, 9.0, lambda found, below: heard.append((found.units, below)))
    assert heard == [4, (0, None)]
    disk.finish()
    assert world.quiet()


def test_the_beginning_stays_while_the_next_tier_is_asked():
    disk, far = FakeTier("disk"), FakeTier("far", at_once=False)
    world, chain = World(disk, far, pages=8), chain_of("a", 8)
    disk.units[chain[:HASH]], far.units[chain[:HASH]] = 4, 8
    ahead = world.ahead(chain)
    disk.finish()
    store(world, chain_of("b", 8))  # others fill the pool
    far.answer()
    while far.reads:
        far.finish()
    assert ahead.over and world.here(chain) >= 4 and world.quiet()


def test_who_leaves_while_he_waits_leaves_nothing():
    disk = FakeTier("disk")
    world, heard = World(disk, pages=600), []
    lower = Lower(world.index, [disk], None, world.promotion)
    for number in range(100):
        chain = chain_of(f"{number}-", 4)
        disk.units[chain[:HASH]] = 4
        want = Want(SPACE, UNIT, [Shape(1, None, 1)], chain, 0)
        lower.lookup(1, want, EVERYTHING, 9.0, lambda found, below: heard.append(found))
    lower.forget(1)
    world.index.disconnect(1)
    while disk.reads:
        disk.finish()
    world.clock.pass_(10.0)
    assert not heard and world.quiet()


def test_where_all_memory_is_in_use_nothing_is_begun_for_a_while():
    """To find that out takes the store's time, in which it answers nobody."""
    disk = FakeTier("disk")
    world = World(disk, pages=4)
    busy, other = chain_of("a", 4), chain_of("b", 4)
    disk.units = {busy[:HASH]: 4, other[:HASH]: 4}
    first, reserve, tries = world.ahead(busy), world.index.reserve, []

    def slow(*args, **options):
        tries.append(args)
        world.clock.now += 0.01
        return reserve(*args, **options)

    world.index.reserve = slow
    assert world.ahead(other).over and len(tries) == 1  # no room
    disk.finish()
    assert first.over
    assert world.ahead(other) is None and len(tries) == 1
    world.clock.pass_(1.0)
    assert world.ahead(other) is not None and disk.reads
    disk.finish()
    assert world.here(other) == 4 and world.quiet()
