"""Promotions while blocks are cleared, tiers end, slots are reused, and reads hang."""

import pytest
from test_promotion import EVERYTHING, HASH_BLOCK_SIZE, NAMESPACE_ID, FakeTier, World, block_hashes_of, small_chunks  # noqa: F401

from vllm_kvtier.store.index.types import HASH_BYTES
from vllm_kvtier.store.protocol import GroupShape
from vllm_kvtier.store.tiers.base import Want
from vllm_kvtier.store.tiers.tier_stack import TierStack

OTHER = 2  # an engine with other groups


def store(world: World, block_hashes: bytes, client: int = 1) -> list[int]:
    parents = (bytes(HASH_BYTES) + block_hashes)[: len(block_hashes)]
    slots = world.index.reserve(
        client, NAMESPACE_ID, b"", [0] * (len(block_hashes) // HASH_BYTES), block_hashes, parents, EVERYTHING
    )
    world.index.commit(client, [slot for slot in slots if slot > 0])
    return slots


def test_promotion_hung_read_keeps_its_slots_reserved():
    """Until it is over it may write to them: no other may get them, whatever the deadline of an engine's stores."""
    disk = FakeTier("disk")
    world, block_hashes = World(disk, pages=4), block_hashes_of("a", 4)
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 4
    ahead = world.ahead(block_hashes)
    reading = {block.slot for block in disk.reads[0][0]}
    world.clock.pass_(10_000.0)
    world.index.tick()
    assert not reading & set(store(world, block_hashes_of("b", 4)))
    disk.finish()
    assert ahead.over and world.here(block_hashes) == 4 and world.quiet()


def test_promotion_cleared_during_read_discards_old_read_and_reads_again():
    """The first read's blocks are void when they arrive; the second's are its own."""
    far = FakeTier("far")
    world, block_hashes, heard = World(far), block_hashes_of("a", 4), []
    far.num_hash_blocks[block_hashes[:HASH_BYTES]] = 4
    first = world.ahead(block_hashes)
    world.index.clear(None)
    second = world.ahead(block_hashes_of("a", 5))
    world.promotion.wait(second, 9.0, lambda: heard.append(world.here(block_hashes)))
    assert len(far.reads) == 2
    far.finish()
    far.finish()
    assert first.over and second.over and heard == [4] and world.quiet()


class Gone(FakeTier):
    """Finds, and is gone when it is read from."""

    def read(self, find, blocks, done):
        assert find in self.found
        done([False] * len(blocks))


def test_promotion_blocks_lost_before_read_end_it():
    gone = Gone("gone")
    world, block_hashes = World(gone), block_hashes_of("a", 20)
    gone.num_hash_blocks[block_hashes[:HASH_BYTES]] = 20
    assert world.ahead(block_hashes).over and world.quiet()
    assert world.promotion.failed_blocks == 4


def test_promotion_blocks_lost_after_first_chunk_keep_read_ones():
    disk = FakeTier("disk")
    world, block_hashes = World(disk), block_hashes_of("a", 20)
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 20
    ahead = world.ahead(block_hashes)
    disk.read = Gone.read.__get__(disk)
    disk.finish()
    disk.finish()
    assert ahead.over and world.here(block_hashes) == 8 and world.quiet()


@pytest.mark.parametrize("when", ["finding", "reading"])
def test_promotion_namespace_change_discards_blocks_and_answers(when):
    """Cleared, and then used by an engine with other groups: ours comes to nothing, and the tier is not to blame."""
    far = FakeTier("far", at_once=when == "reading")
    world, block_hashes, heard = World(far), block_hashes_of("a", 12), []
    world.index.connect(OTHER, HASH_BLOCK_SIZE, [GroupShape(1, 3)])
    far.num_hash_blocks[block_hashes[:HASH_BYTES]] = 12
    ahead = world.ahead(block_hashes)
    world.promotion.wait(ahead, 9.0, lambda: heard.append(1))
    world.index.clear(None)
    store(world, block_hashes_of("b", 2), OTHER)
    far.answer()
    while far.reads:
        far.finish()
    assert ahead.over and heard == [1] and world.quiet()


def test_promotion_ends_although_an_answer_raises():
    """Its leases have no deadline: a job that did not end would keep its blocks for ever."""
    far = FakeTier("far")
    world, block_hashes, heard = World(far), block_hashes_of("a", 4), []
    far.num_hash_blocks[block_hashes[:HASH_BYTES]] = 4
    ahead = world.ahead(block_hashes)
    world.promotion.wait(ahead, 9.0, lambda: 1 // 0)
    world.promotion.wait(ahead, 9.0, lambda: heard.append(1))
    while far.reads:
        far.finish()
    assert ahead.over and heard == [1] and world.quiet()


def test_promotion_wait_answers_after_namespace_change():
    far = FakeTier("far")
    world, block_hashes, heard = World(far), block_hashes_of("a", 4), []
    world.index.connect(OTHER, HASH_BLOCK_SIZE, [GroupShape(1, 3)])
    far.num_hash_blocks[block_hashes[:HASH_BYTES]] = 4
    lower = TierStack(world.index, [far], None, world.promotion)
    want = Want(NAMESPACE_ID, HASH_BLOCK_SIZE, [GroupShape(1, 1)], block_hashes, 0)
    for _ in range(2):
        lower.lookup(
            1, want, EVERYTHING, 9.0, lambda found, below: heard.append((found.num_hash_blocks, found.lease, below))
        )
    world.index.clear(None)
    store(world, block_hashes_of("b", 2), OTHER)
    far.finish()
    assert heard == [(0, 0, None)] * 2 and world.quiet()


def test_lookup_does_not_wait_for_unavailable_tier():
    """Its process was killed and cannot be reaped, so that its reads never end: it is not waited for again."""
    disk, other = FakeTier("disk"), FakeTier("other")
    world, block_hashes, heard = World(disk, other), block_hashes_of("a", 4), []
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 4
    lower = TierStack(world.index, [disk, other], None, world.promotion)
    want = Want(NAMESPACE_ID, HASH_BLOCK_SIZE, [GroupShape(1, 1)], block_hashes, 0)
    lower.lookup(1, want, EVERYTHING, 0.0, lambda found, below: heard.append(below.num_hash_blocks))
    disk.up = False
    disk.on_change()
    lower.lookup(1, want, EVERYTHING, 9.0, lambda found, below: heard.append((found.num_hash_blocks, below)))
    assert heard == [4, (0, None)]
    disk.finish()
    assert world.quiet()


def test_promotion_keeps_prefix_while_next_tier_is_queried():
    disk, far = FakeTier("disk"), FakeTier("far", at_once=False)
    world, block_hashes = World(disk, far, pages=8), block_hashes_of("a", 8)
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]], far.num_hash_blocks[block_hashes[:HASH_BYTES]] = 4, 8
    ahead = world.ahead(block_hashes)
    disk.finish()
    store(world, block_hashes_of("b", 8))  # others fill the pool
    far.answer()
    while far.reads:
        far.finish()
    assert ahead.over and world.here(block_hashes) >= 4 and world.quiet()


def test_client_leaving_during_promotion_leaks_nothing():
    disk = FakeTier("disk")
    world, heard = World(disk, pages=600), []
    lower = TierStack(world.index, [disk], None, world.promotion)
    for number in range(100):
        block_hashes = block_hashes_of(f"{number}-", 4)
        disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 4
        want = Want(NAMESPACE_ID, HASH_BLOCK_SIZE, [GroupShape(1, 1)], block_hashes, 0)
        lower.lookup(1, want, EVERYTHING, 9.0, lambda found, below: heard.append(found))
    lower.remove_client(1)
    world.index.disconnect(1)
    while disk.reads:
        disk.finish()
    world.clock.pass_(10.0)
    assert not heard and world.quiet()


def test_promotion_with_all_memory_leased_backs_off():
    """To find that out takes the store's time, in which it answers no message."""
    disk = FakeTier("disk")
    world = World(disk, pages=4)
    busy, other = block_hashes_of("a", 4), block_hashes_of("b", 4)
    disk.num_hash_blocks = {busy[:HASH_BYTES]: 4, other[:HASH_BYTES]: 4}
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
