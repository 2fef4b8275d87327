"""The Mooncake tier in the server, without its processes."""

from types import SimpleNamespace

import pytest
from object_fakes import BLOCK_HASHES, PAGES, FakeMover, Loop, hash_of
from store_support import NAMESPACE_ID
from support import Clock

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.store.index.types import ZERO
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.protocol import GroupShape
from vllm_kvtier.store.tiers import content_tier
from vllm_kvtier.store.tiers.base import Block, Want
from vllm_kvtier.store.tiers.mooncake.tier import LIMITS, MooncakeTier
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.tier_process import READY, TierContext
from vllm_kvtier.store.tiers.tier_stack import TierStack
from vllm_kvtier.wire.slots import PAGE

WANT = Want(NAMESPACE_ID, 16, [GroupShape(1, PAGES)], BLOCK_HASHES, 0)
UP, DOWN = m.Availability(True), m.Availability(False, "the master has failed")


@pytest.fixture
def tier():
    options = StoreOptions(mooncake_master="h:1", mooncake_trusted_network=True).named("mooncake_")
    clock, loop = Clock(), Loop()
    tier = MooncakeTier(TierContext(5, 64 * PAGE, loop, clock, make_process=FakeMover), options)
    tier.clock, tier.loop, tier.reader, tier.segment = clock, loop, tier._tier_process, tier._segment
    tier.changes = []
    tier.on_change = lambda: tier.changes.append((tier.usable, tier.writable))
    tier.start()
    return tier


def test_mooncake_tier_over_rdma_opens_when_all_memory_is_committed():
    """It registers the whole pool, which would allocate what the store itself could not commit."""
    tiers = []
    for protocol in ("tcp", "rdma"):
        options = StoreOptions(mooncake_master="h:1", mooncake_trusted_network=True, mooncake_protocol=protocol)
        context = TierContext(5, 64 * PAGE, Loop(), Clock(), make_process=FakeMover)
        tiers.append(MooncakeTier(context, options.named("mooncake_")))
        tiers[-1]._tier_process.limit_pool = lambda: None
    stack = TierStack(SimpleNamespace(), tiers, None, SimpleNamespace(tiers_changed=lambda: None))

    def states():
        return [process.state for tier in tiers for process in (tier._tier_process, tier._segment)]

    stack.start()
    assert states() == [READY, READY, "opening", "opening"]  # a FakeMover's first state
    stack.pool_committed()
    assert states() == [READY] * 4
    stack.stop()
    stopped = states()
    stack.pool_committed()
    assert states() == stopped != [READY] * 4, "the memory's last pieces come behind the end of the server"


@pytest.fixture
def up(tier):
    tier.reader.on_message(UP)
    tier.segment.on_message(UP)
    return tier


def block(number):
    return Block(NAMESPACE_ID, 0, hash_of(number), ZERO, b"", 1 + number * PAGES, PAGES, number + 1)


def has(tier, number):
    return tier.has(NAMESPACE_ID, 0, hash_of(number))


def begin(tier, call, *numbers):
    told = []
    getattr(tier, call)(
        *([SimpleNamespace(token=3)] if call == "read" else []), [block(n) for n in numbers], told.append
    )
    return told


def read(tier, *numbers, good=None):
    told = begin(tier, "read", *numbers)
    tier.reader.answer(m.Moved, [True] * len(numbers) if good is None else good)
    return told[0]


def write(tier, *numbers):
    told = begin(tier, "write", *numbers)
    tier.segment.answer(m.Moved, [True] * len(numbers))
    return told[0]


def test_mooncake_tier_is_usable_when_the_processes_say_so(tier):
    assert not tier.usable and not tier.writable and tier.counts().state == "unavailable"
    tier.reader.on_message(UP)
    assert tier.usable and not tier.writable and tier.counts().state == "read_only"
    tier.segment.on_message(UP)
    assert tier.writable and tier.counts().state == "ready" and tier.changes[-1] == (True, True)
    write(tier, 1)
    tier.reader.on_message(DOWN)
    assert not tier.usable and tier.writable and tier.counts().reason == "the master has failed"
    assert not has(tier, 1), "a master that restarts has forgotten all"
    tier.reader.on_message(UP)
    tier.segment.back_off("killed")
    assert tier.usable and not tier.writable and tier.counts().reason == "killed"
    tier.stop()
    assert tier.reader.state == tier.segment.state == "stopped"


def test_mooncake_tier_reads_and_writes_in_different_processes(up):
    assert write(up, 1, 2) == [True, True] and has(up, 1)
    assert read(up, 1, 3, good=[True, False]) == [True, False] and has(up, 1) and not has(up, 3)
    up.clock.now += LIMITS.known + 1
    assert not has(up, 1), "it may be evicted by now: the next use writes it again, if need be"
    told = begin(up, "write", 4)
    up.reader.back_off("a read failed")  # its reads end when it is reaped, writes go on
    up.segment.answer(m.Moved, [True])
    assert told == [[True]] and up.writable


def test_mooncake_tier_pauses_writes_to_a_full_cluster(up):
    for pause in (1.0, 2.0, 4.0):
        told = begin(up, "write", 1)
        up.segment.answer(m.Moved, [False], "the cluster's memory is full", writable=False)
        assert told == [[False]] and not up.writable and up.usable and up.counts().state == "read_only"
        assert [timer.delay for timer in up.loop.timers if not timer.cancelled] == [pause]
        assert begin(up, "write", 2) == [[False]]
        up.loop.fire()
        assert up.writable
    write(up, 1)
    begin(up, "write", 3)
    up.segment.answer(m.Moved, [False], "full", writable=False)
    assert up.loop.timers[-1].delay == 1.0


def test_mooncake_tier_pause_is_not_ended_by_a_master_that_answers(up):
    """A ping may be answered while each write fails."""
    for pause in (1.0, 2.0):
        told = begin(up, "write", 1)
        up.segment.on_message(DOWN)
        up.segment.answer(m.Moved, [False], "a write failed (code -901)", writable=False)
        up.segment.on_message(UP)
        assert told == [[False]] and not up.writable
        assert [timer.delay for timer in up.loop.timers if not timer.cancelled] == [pause]
        up.loop.fire()
        assert up.writable


def test_mooncake_tier_replicates_what_it_reads_twice(up):
    read(up, 1, 2)
    assert not up.segment.sent
    read(up, 2, 3)
    read(up, 2)
    (often,) = up.segment.sent
    assert isinstance(often, m.Replicate) and [move.hash for move in often.moves] == [hash_of(2)]
    assert up.counts().extra["replicated_blocks"] == 1


def test_mooncake_tier_replicates_what_it_uses_again_after_reading_it(up):
    """Its own memory has the block, so that it is not read again. A node that asks for it often gets a copy."""
    read(up, 1)
    write(up, 1, 2)  # used a minute later
    (often,) = [sent for sent in up.segment.sent if isinstance(sent, m.Replicate)]
    assert [move.hash for move in often.moves] == [hash_of(1)]
    write(up, 1, 2)
    assert up.counts().extra["replicated_blocks"] == 1, "once, and nothing that this node wrote first"


def test_mooncake_tier_tells_the_next_reader_what_to_avoid(up):
    up.reader.on_message(m.Avoid("a", 10.0))
    up.reader.on_message(m.Avoid("b", 1.0))
    assert up.counts().extra["avoided_places"] == 2
    up.reader.back_off("a read failed")
    assert not up.usable
    up.clock.now += 4
    up.reader.start()
    assert up.reader.sent == [m.Avoid("a", 6.0)] and not up.usable
    up.reader.on_message(UP)
    assert up.usable


def test_mooncake_tier_publishes_what_the_cluster_is_known_to_have(up):
    """The master reports no eviction: a failed read, a lookup that ends early, or time shows it."""
    said = []
    up.on_moved = lambda *name: said.append((name[2], up.keeps(*name)))
    write(up, *range(4))
    read(up, 4)
    assert said == [(hash_of(n), True) for n in range(5)]
    up.clock.now += LIMITS.known + 1
    assert not has(up, 1) and up.keeps(NAMESPACE_ID, 0, hash_of(1)), "it is written again, and published meanwhile"
    said.clear()
    read(up, 0, 1, good=[True, False])
    up.find(WANT, lambda find: None)
    up.reader.answer(m.Located, 1, 3)
    assert said == [(hash_of(1), False), (hash_of(3), False)], "block 3 was evicted"
    said.clear()
    up.clock.now += LIMITS.kept - 1
    read(up, 4)
    up.clock.now += 1
    up.loop.fire()
    assert said == [(hash_of(2), False), (hash_of(0), False)], "and block 4 was read just now"
    said.clear()
    up.clock.now += LIMITS.kept
    up.loop.fire()
    assert said == [(hash_of(4), False)] and up.counts().blocks == 0


def test_mooncake_tier_forgets_many_blocks_a_few_at_a_time(up, monkeypatch):
    monkeypatch.setattr(content_tier, "EXPIRE_BLOCKS", 2)
    write(up, *range(5))
    up.clock.now += LIMITS.kept + 1
    left = []
    while up.counts().blocks:
        up.loop.fire()
        left.append(up.counts().blocks)
    assert left == [3, 1, 0]


def test_mooncake_tier_never_finds_a_corrupt_block_again(up):
    write(up, *range(6))
    up.discard(NAMESPACE_ID, 0, hash_of(3))
    assert up.segment.sent[-1].moves[0].hash == hash_of(3) and not has(up, 3)
    told = []
    up.find(WANT, told.append)
    up.reader.answer(m.Located, 1, 6)  # it could not be removed
    assert told[0].num_hash_blocks == 3
    up.segment.back_off("killed")
    up.discard(NAMESPACE_ID, 0, hash_of(4))
    up.segment.start()
    up.segment.on_message(UP)
    assert up.segment.sent[-1].moves[0].hash == hash_of(4), "it is dropped when that is possible"
    up.segment.on_message(DOWN)
    up.discard(NAMESPACE_ID, 0, hash_of(5))
    assert up.segment.sent[-1].moves[0].hash == hash_of(4), "the process could not reach the master"
    up.segment.on_message(UP)
    assert up.segment.sent[-1].moves[0].hash == hash_of(5)


def test_mooncake_tier_finds_a_block_again_that_was_written_anew(up):
    up.discard(NAMESPACE_ID, 0, hash_of(3))
    told, found = begin(up, "write", 2, 3), []
    message, _, _ = up.segment.requests[0]
    assert message.replaced == [1], "the corrupt copy may still be there"
    up.segment.answer(m.Moved, [True, False])
    up.find(WANT, found.append)
    up.reader.answer(m.Located, 1, 6)
    assert told == [[True, False]] and found[0].num_hash_blocks == 3, "it could not be removed"
    begin(up, "write", 3)
    up.segment.answer(m.Moved, [True])
    up.find(WANT, found.append)
    up.reader.answer(m.Located, 2, 6)
    assert found[1].num_hash_blocks == 6
    begin(up, "write", 3)
    assert up.segment.requests[0][0].replaced == []


def test_mooncake_tier_forgets_nothing_because_a_lookup_was_late(up):
    """A master that was only slow has all blocks still: they are neither written again nor reported as gone."""
    write(up, 0, 1, 2)
    up.find(WANT, lambda find: None)
    up.reader.on_message(m.Availability(False, "the master has not answered a lookup within 1 s", late=True))
    up.reader.answer(m.Located, 0, 0)
    assert not up.usable and not up.keeps(NAMESPACE_ID, 0, hash_of(1))
    up.reader.on_message(UP)
    assert has(up, 0) and up.keeps(NAMESPACE_ID, 0, hash_of(2)) and up.counts().blocks == 3


def test_mooncake_tier_replaces_a_process_that_talks_nonsense(up):
    up.reader.on_message(m.Kept([]))
    up.segment.on_message(m.Kept([]))
    assert "Kept" in up.reader.reason and "Kept" in up.segment.reason


def test_mooncake_refuses_a_network_that_is_not_trusted():
    with pytest.raises(ConfigError, match="mooncake_trusted_network"):
        StoreOptions(mooncake_master="h:1")
    assert not StoreOptions().mooncake_master
