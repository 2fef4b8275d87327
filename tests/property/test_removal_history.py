"""What is remembered of blocks that are gone: the last end of each, within a bound, and never less than it says."""

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_support import NAMESPACE_ID, block_hashes_of, items_of
from support import WITHOUT_SHRINKING, Clock

from vllm_kvtier.store.index.block_entry import READY
from vllm_kvtier.store.index.index import Index, IndexLimits
from vllm_kvtier.store.index.removal_history import RemovalHistory, RemovalReason
from vllm_kvtier.store.memory.slot_pool import SlotPool
from vllm_kvtier.store.protocol import HASH_BYTES, GroupShape

NAMES = [(NAMESPACE_ID, group, bytes([n]) * HASH_BYTES) for n in range(12) for group in (0, 1)]
ENDS = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(list(RemovalReason)), st.floats(0, 9)), max_size=80)


@given(most=st.integers(1, 16), ends=ENDS)
@settings(max_examples=200, deadline=None)
def test_removal_history_equals_model_within_bound(most, ends):
    clock = Clock()
    removal_history, last = RemovalHistory(clock, most), {}
    for number, (name, removal_reason, pause) in enumerate(ends):
        clock.now += pause
        removal_history.record(name, removal_reason)
        last[name] = (number, removal_reason, clock.now)
        assert len(removal_history) <= most and len(removal_history._names) <= most, "beyond its bound"
        assert removal_history.find(name) == (removal_reason, 0.0), "the last life counts"
    clock.now += 5
    for name in NAMES:
        found, (number, removal_reason, when) = removal_history.find(name), last.get(name, (-1, None, 0.0))
        if number >= max(0, len(ends) - most):  # among the last so many
            assert found == (removal_reason, clock.now - when)
        elif found is not None:
            assert number >= 0 and found == (removal_reason, clock.now - when), "an end that it never had"
        if number >= 0 and clock.now - when < removal_history.ages()[0]:
            assert found is not None, "it says that it remembers all since then"
    known, since = removal_history.ages()
    assert known == since if len(last) <= most and len(ends) <= most else known <= since


SHAPE = [GroupShape(hash_blocks_per_block=1, slot_pages=4)]


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=60, deadline=None, phases=WITHOUT_SHRINKING, suppress_health_check=[HealthCheck.too_slow])
def test_index_every_removed_block_has_a_reason(seed):
    """Prompts come and go in a small memory: whatever was ever asked to be kept, and is not there, has a removal
    reason, and the right one; and a block that was never stored has none."""
    dice, clock = random.Random(seed), Clock()
    pool = SlotPool(4 * 24 + 8, 4 * 24 + 8)
    index = Index(pool, None, clock, IndexLimits(reserve_seconds=50))
    index.removal_history = RemovalHistory(clock)
    index.grow(pool.pages)
    expected: dict[bytes, set[RemovalReason]] = {}  # by block that is gone: what it may have come to
    clients, fresh, writing = [], 1, {}  # writing: block -> (client, slot)

    def listed() -> set[bytes]:
        return {b for b in seen if (e := index.find(NAMESPACE_ID, 0, b)) is not None and e.state is READY}

    seen: set[bytes] = set()
    for _ in range(60):
        clock.now += dice.random() * 10
        before = listed()
        if not clients or dice.random() < 0.1:
            clients.append(fresh)
            index.connect(fresh, 16, SHAPE)
            fresh += 1
        client, what, forced = dice.choice(clients), dice.random(), {}
        stem = dice.randrange(3)
        block_hashes = block_hashes_of((stem, "stem"), (dice.randint(1, 8), dice.randrange(6)))
        if what < 0.5:
            groups, hashes, parents = items_of(block_hashes)
            blocks = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
            late = {b for b, (_, _, until) in writing.items() if until <= clock.now}
            for block in late:
                del writing[block]
                expected[block] = {RemovalReason.ABORTED}
            slots = index.reserve(client, NAMESPACE_ID, b"", groups, hashes, parents, 1 << 30)
            seen.update(blocks)
            for block, slot in zip(blocks, slots, strict=True):
                if slot > 0:
                    writing[block] = client, slot, clock.now + 50
                elif slot == -2:
                    forced[block] = RemovalReason.NO_ROOM
        elif what < 0.8:
            mine = [b for b, (c, _, _) in writing.items() if c == client]
            some = dice.sample(mine, dice.randint(0, len(mine)))
            slots = [writing.pop(b)[1] for b in some]
            if dice.random() < 0.8:
                index.commit(client, slots)
            else:
                index.abort(client, slots)
                forced |= dict.fromkeys(some, RemovalReason.ABORTED)
        elif what < 0.86:
            clients.remove(client)
            index.disconnect(client)
            for block in [b for b, (c, _, _) in writing.items() if c == client]:
                del writing[block]
                forced[block] = RemovalReason.DIED
        elif what < 0.93 and before:
            block = dice.choice(sorted(before))
            assert index.discard(client, NAMESPACE_ID, 0, block, index.find(NAMESPACE_ID, 0, block).slot)
            forced[block] = RemovalReason.DISCARDED
        elif what > 0.98:
            index.clear(NAMESPACE_ID)
            forced |= dict.fromkeys([*before, *writing], RemovalReason.CLEARED)
            writing.clear()
        now = listed()
        for block in before - now:
            expected[block] = {forced.pop(block)} if block in forced else {RemovalReason.EVICTED}
        for block, removal_reason in forced.items():
            expected[block] = {removal_reason}
        for block in seen:
            if index.find(NAMESPACE_ID, 0, block) is not None:
                expected.pop(block, None)
            elif block in expected:
                found = index.removal_history.find((NAMESPACE_ID, 0, block))
                assert found is not None and found[0] in expected[block], (block, found, expected[block])
    assert index.removal_history.find((NAMESPACE_ID, 0, block_hashes_of((1, "nobody's")))) is None
