"""What becomes of loads from the node store: requests that end, wait for one another or are preempted meanwhile, bad
blocks, and a store that goes away."""

import pytest
from matcher_harness import GROUPS, HASH_BLOCK_SIZE, ONE, World, no_violations, offered, params  # noqa: F401
from support import make_request

from vllm_kvtier.jobs.results import LoadResult
from vllm_kvtier.scheduler.matching.request_lifecycle import RequestLifecycle
from vllm_kvtier.scheduler.sources.base import LookupMiss


def test_load_result_reported_twice_is_counted_and_ignored():
    """It ends on vLLM's thread: an exception there would end the engine."""
    world = World(ONE)
    request = make_request("r", list(range(18)), HASH_BLOCK_SIZE)
    world.store(request)
    assert offered(world, request) == (16, True)
    world.matcher.allocated(request, world.tables(0, 16), 16)
    world.matcher.on_load_ended("r", False)
    world.matcher.on_load_ended("r", False)
    assert RequestLifecycle.violations == 1 and not world.planner.open and not world.client.held
    RequestLifecycle.violations = 0


def test_abort_during_store_lookup_releases_lease():
    world = World(ONE)
    request = make_request("r", list(range(18)), HASH_BLOCK_SIZE)
    world.store(request)
    assert world.matcher.match(request, 0) == (None, False)
    world.matcher.finished(request)
    world.answer(world.client.open[0])
    assert not world.client.held and not len(world.matcher)


@pytest.mark.parametrize("failed", [False, True])
def test_abort_during_load_releases_lease_after_result(failed):
    world = World(ONE)
    request = make_request("r", list(range(18)), HASH_BLOCK_SIZE)
    world.store(request)
    assert offered(world, request) == (16, True)
    world.matcher.allocated(request, world.tables(0, 16), 16)
    assert world.matcher.take_aborted() == []
    world.matcher.finished(request)
    assert world.matcher.take_aborted() == ["r"] and world.matcher.take_aborted() == []
    assert world.client.held and world.planner.open, "the workers still read"
    world.matcher.on_load_ended("r", failed)
    assert not world.client.held and not world.planner.open and not len(world.matcher)


def test_request_scheduled_before_peer_answer_releases_store_lease():
    world = World(ONE)
    request = make_request("r", list(range(33)), HASH_BLOCK_SIZE, params("a"))
    world.store(request, 16)
    assert world.matcher.match(request, 0) == (None, False)
    world.answer(world.client.open[0])
    assert world.matcher.match(request, 0) == (None, False)
    assert world.client.held and world.peers.open
    world.matcher.allocated(request, ([1],), 0)
    assert not world.client.held and world.peers.open[0].cancelled


@pytest.mark.parametrize("failed", [False, True])
def test_match_waits_for_inflight_load_of_same_prefix(failed):
    world = World(ONE)
    first, second = (make_request(name, [*range(17), i], HASH_BLOCK_SIZE) for i, name in enumerate("ab"))
    world.store(first)
    assert offered(world, first) == (16, True)
    world.matcher.allocated(first, world.tables(0, 16), 16)
    assert world.matcher.match(second, 0) == (None, False) and not world.client.open, "it does not even ask"
    world.matcher.on_load_ended("a", failed)
    if failed:  # then it asks for itself
        assert offered(world, second) == (16, True)
        world.matcher.allocated(second, world.tables(0, 16), 16)
        world.matcher.on_load_ended("b", False)
    else:  # vLLM has it in its prefix cache now
        assert world.matcher.match(second, 16) == (0, False) and not world.client.open
    assert not world.client.held
    assert world.counters.take()["inflight_load_waits|host"] == 1


def test_match_waits_for_hung_load_within_its_timeout():
    world = World(ONE)
    first, second = (make_request(name, [*range(17), i], HASH_BLOCK_SIZE) for i, name in enumerate("ab"))
    world.store(first)
    assert offered(world, first) == (16, True)
    world.matcher.allocated(first, world.tables(0, 16), 16)
    assert world.matcher.match(second, 0) == (None, False) and not world.client.open
    world.matcher.get("b").load_wait_began -= world.config.transfer_timeout  # as if it had been ordered so long ago
    assert world.matcher.match(second, 0) == (None, False) and len(world.client.open) == 1, "it asks for itself"
    world.answer(world.client.open[0])
    assert world.matcher.match(second, 0) == (16, True)
    world.matcher.allocated(second, world.tables(0, 16), 16)
    for name in "ab":
        world.matcher.on_load_ended(name, False)
    assert not world.client.held


def test_match_of_request_skipping_prefix_cache_does_no_lookup():
    """Prompt log-probabilities, and vectors of each token, need all tokens computed."""
    world = World(ONE)
    first, second = (make_request(name, [*range(17), i], HASH_BLOCK_SIZE) for i, name in enumerate("ab"))
    world.store(first)
    assert offered(world, first) == (16, True)
    world.matcher.allocated(first, world.tables(0, 16), 16)
    second.skip_reading_prefix_cache = True
    assert world.matcher.match(second, 0) == (0, False) and not world.client.open
    world.matcher.on_load_ended("a", False)
    assert not world.client.held


@pytest.mark.parametrize("offered_already", [False, True])
def test_concurrent_requests_of_one_prefix_load_it_once(offered_already):
    """All of them asked the store, or even had its offer, before the first one's load began."""
    world = World(ONE)
    requests = [make_request(f"r{i}", [*range(17), i], HASH_BLOCK_SIZE) for i in range(4)]
    world.store(requests[0])
    for request in requests:
        assert world.matcher.match(request, 0) == (None, False)
    for pending in list(world.client.open):
        world.answer(pending)
    for request in requests[: 4 if offered_already else 1]:
        assert world.matcher.match(request, 0) == (16, True)
    world.matcher.allocated(requests[0], world.tables(0, 16), 16)
    for request in requests[1:]:
        assert world.matcher.match(request, 0) == (None, False)
    world.matcher.on_load_ended("r0", False)
    for request in requests[1:]:
        assert world.matcher.match(request, 16) == (0, False)
    assert not world.client.held
    world.balanced()


def test_requests_that_waited_for_a_load_in_vain_load_together():
    """Of identical prompts of whole blocks vLLM takes all but the last from its cache, and with drafts or windows less,
    or nothing: each waited for the load of the one before."""
    world = World(ONE)
    requests = [make_request(f"r{i}", list(range(17)), HASH_BLOCK_SIZE) for i in range(4)]
    world.store(requests[0])
    assert offered(world, requests[0]) == (16, True)
    world.matcher.allocated(requests[0], world.tables(0, 16), 16)
    for request in requests[1:]:
        assert world.matcher.match(request, 0) == (None, False) and not world.client.open
    world.matcher.on_load_ended("r0", False)
    for request in requests[1:]:
        assert offered(world, request) == (16, True)
        world.matcher.allocated(request, world.tables(0, 16), 16)
    for request in requests[1:]:
        world.matcher.on_load_ended(request.request_id, False)
    assert not world.client.held
    world.balanced()


def test_requests_that_waited_for_a_common_beginning_wait_for_the_rest_too():
    """Samples of one prompt that began as another's: the first of them loads what that did not bring."""
    world = World(ONE)
    other = make_request("other", [*range(24), *range(90, 99)], HASH_BLOCK_SIZE)
    samples = [make_request(f"r{i}", [*range(48), i], HASH_BLOCK_SIZE) for i in range(3)]
    world.store(other)
    world.store(samples[0])
    assert offered(world, other) == (32, True)
    world.matcher.allocated(other, world.tables(0, 32), 32)
    for request in samples:
        assert world.matcher.match(request, 0) == (None, False) and not world.client.open
    world.matcher.on_load_ended("other", False)
    assert world.matcher.match(samples[0], 24) == (None, False)
    world.answer(world.client.open[0])
    assert world.matcher.match(samples[0], 24) == (24, True)
    world.matcher.allocated(samples[0], world.tables(24, 24), 24)
    for request in samples[1:]:
        assert world.matcher.match(request, 24) == (None, False) and not world.client.open
    world.matcher.on_load_ended("r0", False)
    for request in samples[1:]:
        assert world.matcher.match(request, 48) == (0, False)
    assert not world.client.held
    world.balanced()


def test_match_of_short_prompt_does_not_wait_for_long_load():
    world = World(ONE)
    long, short = (
        make_request("l", list(range(200)), HASH_BLOCK_SIZE),
        make_request("s", list(range(9)), HASH_BLOCK_SIZE),
    )
    world.store(long)
    assert offered(world, long) == (200, True)
    world.matcher.allocated(long, world.tables(0, 200), 200)
    assert offered(world, short) == (8, True)


def test_load_of_aborted_request_blocks_no_request():
    """What it loads does not enter vLLM's prefix cache."""
    world = World(ONE)
    first, second = (make_request(name, [*range(17), i], HASH_BLOCK_SIZE) for i, name in enumerate("ab"))
    world.store(first)
    assert offered(world, first) == (16, True)
    world.matcher.allocated(first, world.tables(0, 16), 16)
    world.matcher.finished(first)
    assert offered(world, second) == (16, True)
    world.matcher.on_load_ended("a", False)
    world.matcher.finished(second)
    assert not world.client.held


@pytest.mark.parametrize("loaded", [False, True])
def test_preempted_request_looks_up_again(loaded):
    world = World(ONE)
    request = make_request("r", list(range(18)), HASH_BLOCK_SIZE)
    if loaded:
        world.store(request)
        assert offered(world, request) == (16, True)
        world.matcher.allocated(request, world.tables(0, 16), 16)
        world.matcher.on_load_ended("r", False)
    else:
        assert offered(world, request) == (0, False)
        world.matcher.allocated(request, world.tables(0, 0), 0)
    assert loaded or world.matcher.match(request, 0) == (0, False), "once declined, it is not asked for every step"
    world.store(request)
    request.num_preemptions += 1
    assert offered(world, request) == (16, True)
    world.matcher.allocated(request, world.tables(0, 16), 16)
    world.matcher.on_load_ended("r", False)
    assert world.matcher.finished(request).report()["pulled_tokens"] == 16
    assert not world.client.held and not world.planner.open


def test_store_blocks_from_before_reset_are_not_loaded():
    """The weights may have changed in place meanwhile: asked, answered or held, it is not ours any more."""
    world = World(ONE)
    requests = [make_request(f"r{i}", [i] * 18, HASH_BLOCK_SIZE, params("a") if i == 3 else None) for i in range(4)]
    for request in requests:
        world.store(request, 12)
    for request in requests:
        assert world.matcher.match(request, 0) == (None, False)
    first, *rest = list(world.client.open)
    for pending in rest:
        world.answer(pending)
    assert world.matcher.match(requests[2], 0) == (12, True)
    assert world.matcher.match(requests[3], 0) == (None, False) and world.matcher.get("r3").held
    before = world.tier.namespace_id(b"")
    world.tier.renew()
    assert world.tier.namespace_id(b"") != before
    world.answer(first)
    world.peers.answer(world.peers.open[0], LookupMiss("no_matching_blocks", ""))
    for request in requests:
        assert world.matcher.match(request, 0) == (0, False)
    assert not world.client.held
    again = make_request("r4", [0] * 18, HASH_BLOCK_SIZE)
    assert world.matcher.match(again, 0) == (None, False)
    assert world.client.open[0].asked.namespace_id == world.tier.namespace_id(b"")


def test_load_bad_blocks_are_discarded_in_store():
    world = World(GROUPS["windows"])
    request = make_request("r", list(range(34)), HASH_BLOCK_SIZE)
    world.store(request)
    assert offered(world, request) == (32, True)
    tables = world.tables(0, 32)
    world.matcher.allocated(request, tables, 32)
    [order], _ = world.matcher.take_jobs()
    bad = [(0, int(order.groups[0].slots[3])), (1, int(order.groups[1].slots[-1])), (0, 1), (5, 16)]
    t, wrong = world.matcher.get("r"), LoadResult("r", {1}, "wrong", 0, 0.0, 0.0, bad)
    world.tier.on_load_failed(t, wrong)
    told = [(verb, g, h, slot) for verb, _, g, h, slot, _ in world.client.told]
    assert told == [
        ("discard", 0, world.hash(request, 0, 3), bad[0][1]),
        ("discard", 1, world.hash(request, 1, 7), bad[1][1]),
    ]
    world.matcher.on_load_ended("r", True)
    world.tier.on_load_failed(t, wrong)
    assert len(world.client.told) == 2
    assert world.matcher.match(request, 0) == (0, False), "it is computed, not loaded again"


def test_load_with_lease_of_dead_store_fails():
    world = World(ONE)
    request = make_request("r", list(range(18)), HASH_BLOCK_SIZE)
    world.store(request)
    assert offered(world, request) == (16, True)
    world.client.lose()
    world.client.connect("life 2")
    assert world.matcher.match(request, 0) == (16, True), "the workers know that the slots are another life's"
    world.matcher.allocated(request, world.tables(0, 16), 16)
    [order], _ = world.matcher.take_jobs()
    assert order.instance == "life 1"
    world.matcher.on_load_ended("r", True)
    assert not world.planner.open


class CountedHashes(list):
    """A request's block hashes, and how many were read."""

    read = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.read += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self):
        self.read += len(self)
        return super().__iter__()


@pytest.mark.parametrize(
    "shared, computed, waits", [(19, 0, False), (20, 0, True), (40, 0, True), (40, 20, True), (40, 21, False)]
)
def test_wait_for_a_load_of_half_the_same_blocks_reads_few_hashes(shared, computed, waits):
    world, size = World(ONE), HASH_BLOCK_SIZE
    prompt = list(range(40 * size + 1))
    loads = make_request("loads", prompt, size)
    other = make_request("other", prompt[: shared * size] + list(range(1000, 1000 + 200 * size)), size)
    world.store(loads)
    assert offered(world, loads) == (40 * size, True)
    world.matcher.allocated(loads, world.tables(0, 40 * size), 40 * size)
    other.block_hashes = hashes = CountedHashes(other.block_hashes)
    assert world.matcher._waits_for_load(world.matcher.track(other), computed * size) is waits
    assert hashes.read <= 2
    world.matcher.finished(other)
    world.matcher.on_load_ended("loads", False)
    world.matcher.finished(loads)
