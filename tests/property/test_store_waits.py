"""Requests that wait for what the node store brings up from below its memory: only while it beats computing."""

import pytest
from matcher_harness import HASH_BLOCK_SIZE, ONE, World
from support import make_request as vllm_request

from vllm_kvtier.scheduler.matching.request_lifecycle import State
from vllm_kvtier.store.client import Failed
from vllm_kvtier.store.protocol import Found, TierQuery

TOKENS = 12 * HASH_BLOCK_SIZE + 2


class Rates:
    """A second a token computed, a tenth of it loaded."""

    def compute_seconds(self, start, end, prompt):
        return float(end - start)

    def load_seconds(self, source, nbytes):
        return 0.0


def make_request(tokens, seed=0):
    return vllm_request(f"r{seed}", [seed * 1000 + i for i in range(tokens)], HASH_BLOCK_SIZE)


@pytest.fixture
def world():
    world = World(ONE)
    rates = Rates()
    world.planner.compute_seconds, world.planner.load_seconds = rates.compute_seconds, rates.load_seconds
    return world


def asked(world):
    return world.client.open[-1]


def answer(world, num_hash_blocks, below=None, lease=True):
    """The open lookup gets units [start, units), and hears what is on its way."""
    pending = asked(world)
    if num_hash_blocks == pending.asked.start:
        world.client.open.remove(pending)
        pending.resolve(Found(1, 0, num_hash_blocks, [[]], below))
        return
    world.client.open.remove(pending)
    world.client.leases += 1
    world.client.held.add(world.client.leases)
    slots = [[16 * (i + 1) for i in range(pending.asked.start, num_hash_blocks)]]
    pending.resolve(Found(1, world.client.leases, num_hash_blocks, slots, below))


def counted(world):
    return world.counters.take()


def test_promotion_wait_loads_promoted_blocks(world):
    request = make_request(TOKENS)
    assert world.matcher.match(request, 0) == (None, False)
    assert asked(world).asked.wait_seconds == 0
    answer(world, 0, TierQuery(12, 3.0, 0.0))
    assert world.matcher.match(request, 0) == (None, False)
    # It may take as long as computing its 48 tokens would.
    assert asked(world).asked.wait_seconds == pytest.approx(min(30.0, 48.0))
    answer(world, 12)
    assert world.matcher.match(request, 0) == (48, True)
    counts = counted(world)
    assert counts["promotion_waits|promotion"] == 1 and counts["promotion_wait_tokens"] == 48
    world.matcher.finished(request)
    assert not world.client.held


def test_promotion_wait_keeps_lease_on_blocks_in_memory(world):
    request = make_request(TOKENS)
    world.matcher.match(request, 0)
    answer(world, 4, TierQuery(12, 1.0, 0.0))
    world.matcher.match(request, 0)
    assert world.client.held == {1}
    answer(world, 12)
    assert world.matcher.match(request, 0) == (48, True) and world.client.held == {2}
    assert counted(world)["promotion_wait_tokens"] == 32


def test_promotion_wait_skipped_if_compute_is_faster(world):
    request = make_request(TOKENS)
    world.matcher.match(request, 0)
    answer(world, 4, TierQuery(12, 40.0, 0.0))
    assert world.matcher.match(request, 0) == (16, True)
    assert not world.client.open and counted(world)["promotion_waits|load_slower_than_compute"] == 1


def test_promotion_wait_decreases_without_hits(world):
    """48 s of computing are worth 12 s of asking at first, and 1 s where the answer is always no."""
    waits = []
    for number in range(40):
        request = make_request(TOKENS, seed=number)
        world.matcher.match(request, 0)
        answer(world, 0, TierQuery(0, 0.0, 3.0))
        waits.append(world.matcher.match(request, 0) == (None, False))
        if waits[-1]:
            answer(world, 0)
            assert world.matcher.match(request, 0) == (0, False)
        world.matcher.finished(request)
    assert waits[0] and not any(waits[-5:]) and sum(waits) > 5


def test_promotion_wait_for_lookup_is_bounded_by_compute_time(world):
    request = make_request(TOKENS)
    world.matcher.match(request, 0)
    answer(world, 0, TierQuery(0, 0.0, 0.5))
    assert world.matcher.match(request, 0) == (None, False) and asked(world).asked.wait_seconds > 0
    answer(world, 0, TierQuery(12, 2.0, 0.0))  # they have it, and now it comes
    assert world.matcher.match(request, 0) == (None, False)
    answer(world, 12)
    assert world.matcher.match(request, 0) == (48, True)
    short = make_request(2 * HASH_BLOCK_SIZE + 1, seed=5)
    world.matcher.match(short, 0)
    answer(world, 0, TierQuery(0, 0.0, 4.0))
    assert world.matcher.match(short, 0) == (0, False)


@pytest.mark.parametrize(("expected", "waits"), [(0.2, 1.0), (3.0, 3.0)])
def test_promotion_wait_of_engine_that_has_computed_nothing_is_short(world, expected, waits):
    """It is the tier's estimate, at least a second: 30 s before, though computing might have taken less."""
    world.planner.compute_seconds = lambda start, end, prompt: None
    world.matcher.match(make_request(TOKENS), 0)
    answer(world, 0, TierQuery(12, expected, 0.0))
    world.matcher.match(make_request(TOKENS), 0)
    assert asked(world).asked.wait_seconds == pytest.approx(waits)


def test_promotion_wait_total_is_bounded(world, monkeypatch):
    from vllm_kvtier.scheduler.sources import promotion_wait

    now = [1000.0]
    monkeypatch.setattr(promotion_wait.time, "monotonic", lambda: now[0])
    request = make_request(TOKENS)
    world.matcher.match(request, 0)
    for _ in range(3):
        answer(world, 0, TierQuery(12, 5.0, 0.0))
        assert world.matcher.match(request, 0) == (None, False)
        now[0] += 9.0
    assert asked(world).asked.wait_seconds == pytest.approx(12.0)
    now[0] += 9.0
    answer(world, 0, TierQuery(12, 5.0, 0.0))
    assert world.matcher.match(request, 0) == (0, False)
    assert counted(world)["promotion_waits|timeout"] == 1


@pytest.mark.parametrize("end", ["abort", "store dies", "answer after abort"])
def test_promotion_wait_releases_leases_at_any_end(world, end):
    request = make_request(TOKENS)
    world.matcher.match(request, 0)
    answer(world, 4, TierQuery(12, 1.0, 0.0))
    world.matcher.match(request, 0)
    match end:
        case "abort":
            world.matcher.finished(request)
            assert not world.client.held
        case "answer after abort":
            world.matcher.finished(request)
            answer(world, 12)
            assert not world.client.held
        case "store dies":
            world.client.lose()
            tokens, _ = world.matcher.match(request, 0)
            assert tokens is not None  # it goes on
            world.matcher.finished(request)
    assert world.matcher.get(request.request_id) is None


def test_promotion_wait_failed_answer_is_a_miss(world):
    request = make_request(TOKENS)
    world.matcher.match(request, 0)
    answer(world, 0, TierQuery(12, 1.0, 0.0))
    world.matcher.match(request, 0)
    pending = asked(world)
    world.client.open.remove(pending)
    pending.resolve(Failed("hung"))
    assert world.matcher.match(request, 0) == (0, False)
    assert world.matcher.get(request.request_id).life.state is State.LOCAL
