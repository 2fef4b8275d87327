"""The object tier, without a tier process: what it asks of one, and what it makes of the answers."""

from types import SimpleNamespace

import pytest
from object_fakes import BLOCK_HASHES, PAGES, FakeMover, Loop, hash_of
from store_support import NAMESPACE_ID
from support import Clock

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.store.index.types import ZERO
from vllm_kvtier.store.protocol import GroupShape
from vllm_kvtier.store.tiers import content_tier
from vllm_kvtier.store.tiers.base import Block, Want
from vllm_kvtier.store.tiers.objects import tier as objects
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.tier_process import BACKOFF, READY, TierContext
from vllm_kvtier.wire.slots import PAGE

OPTIONS = {"url": "s3://bucket/x", "endpoint": "http://host:9", "region": "", "backend": "auto"}


@pytest.fixture
def tier():
    clock, loop = Clock(), Loop()
    tier = objects.ObjectTier(TierContext(5, 64 * PAGE, loop, clock, make_process=FakeMover), OPTIONS)
    tier.clock, tier.loop, tier.tier_process, tier.changes = clock, loop, tier._tier_process, []
    tier.on_change = lambda: tier.changes.append((tier.usable, tier.writable))
    tier.start()
    assert tier.changes == [(True, True)]
    return tier


def block(number, slot=1, end_hash_block=0):
    return Block(NAMESPACE_ID, 0, hash_of(number), ZERO, b"", slot, PAGES, end_hash_block)


def has(tier, number):
    return tier.has(NAMESPACE_ID, 0, hash_of(number))


WANT = Want(NAMESPACE_ID, 16, [GroupShape(2, PAGES), GroupShape(4, PAGES, 64)], BLOCK_HASHES, 4)


def found(tier, want=WANT):
    told = []
    tier.find(want, told.append)
    return told


def moved(tier, call, *blocks):
    told = []
    getattr(tier, call)(*([SimpleNamespace(token=3)] if call == "read" else []), list(blocks), told.append)
    return told


def test_object_tier_options_are_checked_and_passed_on(tier):
    assert tier.tier_process.options["url"] == "s3://bucket/x" and tier.tier_process.options["backend"] == "auto"
    for url, endpoint in (("bucket", ""), ("s3://bucket/x", "host")):
        with pytest.raises(ConfigError):
            objects.ObjectTier(TierContext(5, 64 * PAGE, tier.loop), {**OPTIONS, "url": url, "endpoint": endpoint})


def test_object_tier_find_refuses_impossible_answers(tier):
    told = found(tier)
    message = tier.tier_process.requests[0][0]
    assert message.groups == [GroupShape(2, PAGES), GroupShape(4, PAGES, 64)] and message.start == 4
    tier.clock.now += 0.55
    tier.tier_process.answer(m.Located, 9, 12)
    assert (told[0].num_hash_blocks, told[0].token) == (12, 9) and tier.latency() == pytest.approx(0.15)
    tier.release(told[0])
    told = found(tier)
    tier.tier_process.answer(m.Located, 0, 4)
    assert told[0].num_hash_blocks == 4
    assert (
        found(tier, Want(NAMESPACE_ID, 16, WANT.shapes, BLOCK_HASHES, 40))[0].num_hash_blocks == 40
        and not tier.tier_process.requests
    )
    told = found(tier)
    tier.tier_process.fail()
    assert told[0].num_hash_blocks == 4 and tier.usable
    for num_hash_blocks in (3, 6, 44):  # before the start, in the middle of a block, beyond the end
        told = found(tier)
        tier.tier_process.answer(m.Located, 9, num_hash_blocks)
        assert told[0].num_hash_blocks == 4 and not tier.usable and "hash blocks" in tier.counts().reason
        tier.tier_process.start()


def test_object_tier_offers_a_block_again_after_a_while(tier):
    """A bucket's lifecycle rule may have deleted it, and the bucket does not say so."""
    told = moved(tier, "write", block(1))
    tier.tier_process.answer(m.Moved, [True])
    assert told == [[True]] and has(tier, 1)
    tier.clock.now += objects.KNOWN_SECONDS + 1
    assert not has(tier, 1) and tier.keeps(NAMESPACE_ID, 0, hash_of(1)), "KV events say so for longer"


def test_object_tier_failing_store_makes_it_unavailable_with_cause(tier):
    told = found(tier)
    tier.tier_process.answer(m.Located, 0, 4, error="no such bucket")
    assert told[0].num_hash_blocks == 4 and tier.changes[-1] == (False, False)
    assert (tier.counts().state, tier.counts().reason) == (BACKOFF, "no such bucket")
    assert found(tier)[0].num_hash_blocks == 4 and moved(tier, "read", block(0)) == [[False]]
    assert moved(tier, "write", block(0)) == [[False]]
    tier.tier_process.start()
    assert tier.changes[-1] == (True, True) and tier.counts().state == READY
    told = moved(tier, "read", block(0), block(1))
    tier.tier_process.answer(m.Moved, [True, False], error="slow down")
    assert told == [[True, False]] and tier.usable, "some of it came"
    moved(tier, "read", block(0), block(1))
    tier.tier_process.answer(m.Moved, [False, False])
    assert tier.usable, "the bucket is not at fault"
    moved(tier, "read", block(0), block(1))
    tier.tier_process.answer(m.Moved, [False, False], error="slow down")
    assert not tier.usable
    tier.stop()


def test_object_tier_presence_learns_from_reads_and_writes(tier):
    told = moved(tier, "write", block(0), block(1))
    assert has(tier, 0) and has(tier, 1), "on its way"
    tier.tier_process.answer(m.Moved, [True, False])
    assert told == [[True, False]] and has(tier, 0) and not has(tier, 1)
    moved(tier, "read", block(2), block(0))
    tier.tier_process.answer(m.Moved, [True, False])
    assert has(tier, 2) and not has(tier, 0), "it was there, and is gone"
    moved(tier, "read", block(2))
    tier.tier_process.fail()
    assert has(tier, 2), "that says nothing of the block"
    tier.clear(None)
    assert not has(tier, 2) and tier.counts().blocks == 0
    counts = tier.counts()
    assert (counts.written_blocks, counts.write_failures, counts.read_blocks, counts.read_failures) == (1, 1, 1, 2)


def test_object_tier_publish_reports_existing_objects(tier):
    """Not what is on its way, and nothing while the bucket cannot be asked."""
    told = []
    tier.on_moved = lambda *name: told.append((name[2], tier.keeps(*name)))
    moved(tier, "write", block(0), block(1))
    assert not tier.keeps(NAMESPACE_ID, 0, hash_of(0)) and not told
    tier.tier_process.answer(m.Moved, [True, False])
    moved(tier, "read", block(0), block(2))
    tier.tier_process.answer(m.Moved, [False, True])
    tier.discard(NAMESPACE_ID, 0, hash_of(2))
    assert told == [(hash_of(0), True), (hash_of(0), False), (hash_of(2), True), (hash_of(2), False)]
    moved(tier, "write", block(3))
    tier.tier_process.answer(m.Moved, [True])
    tier.tier_process.back_off("no route")
    assert not tier.keeps(NAMESPACE_ID, 0, hash_of(3)) and tier.changes[-1] == (False, False), (
        "on_change covers all blocks at once"
    )
    tier.tier_process.start()
    assert tier.keeps(NAMESPACE_ID, 0, hash_of(3))
    changes = len(tier.changes)
    tier.clear(None)
    assert not tier.keeps(NAMESPACE_ID, 0, hash_of(3)) and len(tier.changes) > changes


def test_object_tier_presence_is_bounded(tier, monkeypatch):
    monkeypatch.setattr(content_tier, "MAX_REMEMBERED_BLOCKS", 3)
    for number in range(5):
        moved(tier, "write", block(number))
        tier.tier_process.answer(m.Moved, [True])
    assert [has(tier, n) for n in range(5)] == [False, False, True, True, True]


def test_object_tier_discarded_blocks_are_deleted(tier):
    tier.discard(NAMESPACE_ID, 0, hash_of(0))
    assert [move.hash for move in tier.tier_process.sent.pop().moves] == [hash_of(0)]
    told = moved(tier, "write", block(1))
    tier.discard(NAMESPACE_ID, 0, hash_of(1))
    assert not has(tier, 1) and len(tier.tier_process.sent) == 1
    tier.tier_process.answer(m.Moved, [True])
    assert told == [[False]] and not has(tier, 1) and len(tier.tier_process.sent) == 2, (
        "deleted again: it was written since"
    )
    tier.tier_process.sent.clear()
    tier.tier_process.back_off("gone")
    tier.discard(NAMESPACE_ID, 0, hash_of(2))
    tier.tier_process.start()
    assert [move.hash for message in tier.tier_process.sent for move in message.moves] == [hash_of(2)]


def test_object_tier_refused_write_makes_it_read_only_for_a_while(tier):
    told = moved(tier, "write", block(0))
    tier.tier_process.answer(m.Moved, [False], error="access denied", writable=False)
    assert told == [[False]] and tier.changes[-1] == (True, False)
    assert (tier.counts().state, tier.counts().reason) == ("read_only", "access denied")
    assert moved(tier, "write", block(0)) == [[False]] and not tier.tier_process.requests
    (first,) = tier.loop.timers
    tier.loop.fire()
    assert tier.changes[-1] == (True, True)
    moved(tier, "write", block(0))
    tier.tier_process.answer(m.Moved, [False], error="access denied", writable=False)
    (second,) = tier.loop.timers
    assert second.delay > first.delay
    tier.tier_process.back_off("killed")
    tier.tier_process.start(m.Opened(writable=False, note="read only: may not"))
    assert tier.counts().reason == "read only: may not" and second.cancelled


def test_object_tier_read_time_is_measured(tier):
    assert tier.seconds(200 << 20) == pytest.approx(1.05, rel=0.01)
    big = Block(NAMESPACE_ID, 0, hash_of(0), ZERO, b"", 1, (256 << 20) // PAGE)
    for _ in range(20):
        moved(tier, "read", big)
        assert tier.seconds(0) > 0, "behind what is under way"
        tier.clock.now += 0.25
        tier.tier_process.answer(m.Moved, [True])
        tier.clock.now += 100.0  # idle
    assert tier.seconds(1 << 30) == pytest.approx(1.0, rel=0.05)
    counts = tier.counts()
    assert counts.read_seconds == pytest.approx(5.0) and counts.read_bytes == 20 * (256 << 20)


def test_object_tier_unexpected_message_makes_it_unavailable(tier):
    tier.tier_process.on_message(m.Kept([]))
    assert not tier.usable
