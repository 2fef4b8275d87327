"""Requests that the store is asked for before vLLM comes to them."""

from types import SimpleNamespace

import pytest
from matcher_harness import HASH_BLOCK_SIZE, ONE, World, no_violations  # noqa: F401
from support import make_request
from vllm.v1.request import RequestStatus

from vllm_kvtier.scheduler.matching import lookup_prefetch


def requests(count, tokens=5 * HASH_BLOCK_SIZE + 1, params=None):
    return [make_request(f"r{i}", [i + 1] * tokens, HASH_BLOCK_SIZE, params) for i in range(count)]


@pytest.fixture
def world():
    made = World(ONE)
    yield made
    made.balanced()



def arrive(world, made):
    for request in made:
        world.matcher.prefetch_lookup(request)


def answer_all(world):
    for pending in list(world.client.open):
        world.answer(pending)


def test_lookup_prefetch_of_a_burst_queries_each_request_once(world):
    made = requests(40)
    for request in made[::2]:
        world.store(request)
    arrive(world, made)
    asked, late = [], 0
    for request in made:
        ready = len(world.tier.prefetcher)
        assert ready <= lookup_prefetch.MAX_PREFETCHES
        tokens, asynchronous = world.matcher.match(request, 0)
        asked += [bytes(pending.asked.block_hashes) for pending in world.client.open]
        if tokens is None:
            late += 1
            answer_all(world)
            tokens, asynchronous = world.matcher.match(request, 0)
        stored = request in made[::2]
        assert (tokens, asynchronous) == ((5 * HASH_BLOCK_SIZE, True) if stored else (0, False))
        answer_all(world)
    assert len(asked) == len(set(asked)) == len(made), "each of them once"
    assert late <= 1, "the answers of all others were there when vLLM came to them"


def test_lookup_prefetch_is_bounded_in_number_and_time(world, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(lookup_prefetch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    made = requests(60)
    for request in made:
        world.store(request)
    arrive(world, made)
    assert len(world.client.open) == lookup_prefetch.MAX_PREFETCHES, "more only as vLLM comes to them"
    for request in made[:20]:
        world.matcher.match(request, 0)
        answer_all(world)
    ready, held = len(world.tier.prefetcher), len(world.client.held)
    at_once = lookup_prefetch.PREFETCHES_AT_ONCE
    assert lookup_prefetch.MAX_PREFETCHES - at_once <= ready <= lookup_prefetch.MAX_PREFETCHES
    now[0] += lookup_prefetch.MAX_PREFETCH_SECONDS / 2
    world.matcher.expire_prefetches()
    assert len(world.client.held) == held
    now[0] += lookup_prefetch.MAX_PREFETCH_SECONDS
    world.matcher.expire_prefetches()
    assert not len(world.tier.prefetcher) and len(world.client.held) == held - ready
    arrive(world, requests(61)[60:])
    for request in made[20:]:
        assert not len(world.tier.prefetcher)
        assert world.matcher.match(request, 0) == (None, False), "asked for anew"
        answer_all(world)
        assert world.matcher.match(request, 0) == (5 * HASH_BLOCK_SIZE, True)
        assert len(world.tier.prefetcher) == 1, "the queue hardly moves: few lookups are sent in vain"
        now[0] += 2 * lookup_prefetch.MAX_PREFETCH_SECONDS
        assert world.matcher.expire_prefetches() is None and world.matcher.prefetching
    world.matcher.match(requests(61)[60], 0)
    answer_all(world)
    world.matcher.expire_prefetches()
    assert not world.matcher.prefetching
    arrive(world, requests(62)[61:])
    assert len(world.tier.prefetcher) == 1, "it moves again"


def test_lookup_prefetch_goes_on_after_a_pause_with_a_standing_queue(world, monkeypatch):
    """vLLM comes to a request every 10 ms, and the queue is never empty: after a pause as before it nearly every lookup
    was sent before vLLM comes to the request."""
    now = [100.0]
    monkeypatch.setattr(lookup_prefetch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    made = requests(260)
    arrive(world, made[:60])
    late = []
    for i, request in enumerate(made[:200]):
        if i in (0, 100):
            now[0] += 2 * lookup_prefetch.MAX_PREFETCH_SECONDS
            world.matcher.expire_prefetches()
        arrive(world, [made[60 + i]])
        answer_all(world)
        late.append(world.matcher.match(request, 0)[0] is None)
        answer_all(world)
        world.matcher.match(request, 0)
        now[0] += 0.01
        world.matcher.expire_prefetches()
    assert late[0] and late[100], "their lookups expired"
    assert sum(late) < 10


@pytest.mark.parametrize("change", ["grown", "evicted", "renewed"])
def test_lookup_prefetch_of_other_hashes_is_released(world, change):
    [request] = requests(1)
    world.store(request)
    if change == "evicted":
        world.cached_about = lambda block_hashes: 2 * HASH_BLOCK_SIZE
    arrive(world, [request])
    [pending] = world.client.open
    assert pending.asked.start == (2 if change == "evicted" else 0)
    world.answer(pending)
    assert world.client.held
    if change == "grown":
        request.append_output_token_ids([1] * HASH_BLOCK_SIZE)
    if change == "renewed":
        world.tier.renew()
    assert world.matcher.match(request, 0) == (None, False)
    assert not world.client.held and len(world.client.open) == 1
    answer_all(world)
    if change != "renewed":
        assert world.matcher.match(request, 0)[0] == 5 * HASH_BLOCK_SIZE


def test_prefetched_lookup_serves_longer_local_prefix(world):
    """vLLM's prefix cache got more of the prompt meanwhile: what it has is not loaded."""
    [request] = requests(1)
    world.store(request)
    arrive(world, [request])
    answer_all(world)
    assert world.matcher.match(request, 2 * HASH_BLOCK_SIZE) == (3 * HASH_BLOCK_SIZE, True)
    tables = world.tables(2 * HASH_BLOCK_SIZE, 3 * HASH_BLOCK_SIZE)
    world.matcher.allocated(request, tables, 3 * HASH_BLOCK_SIZE)
    [order], _ = world.matcher.take_jobs()
    world.check_load(order, request, tables, 2 * HASH_BLOCK_SIZE, 5 * HASH_BLOCK_SIZE, True)


@pytest.mark.parametrize("why", ["handoff", "log-probabilities", "cannot_beat_compute", "short", "cached"])
def test_lookup_prefetch_skips_ineligible_requests(world, why):
    handoff = {"do_remote_prefill": True, "remote_host": "a", "remote_port": 1, "remote_request_id": "kvtier/e"}
    [request] = requests(
        1, HASH_BLOCK_SIZE - 1 if why == "short" else 5 * HASH_BLOCK_SIZE + 1, handoff if why == "handoff" else None
    )
    request.skip_reading_prefix_cache = why == "log-probabilities"
    world.planner.vain = why == "cannot_beat_compute"
    if why == "cached":
        world.cached_about = lambda block_hashes: len(block_hashes) * HASH_BLOCK_SIZE
    arrive(world, [request])
    assert not world.client.open
    world.matcher.finished(request)


@pytest.mark.parametrize("reads", [True, False])
def test_queued_prompt_counts_for_the_planner_without_what_the_gpu_has(world, reads, monkeypatch):
    planned, [request] = [], requests(1)
    request.skip_reading_prefix_cache = not reads
    world.cached_about = lambda block_hashes: 4 * HASH_BLOCK_SIZE
    monkeypatch.setattr(world.planner, "will_compute", lambda *prompt: planned.append(prompt))
    arrive(world, [request])
    assert planned == [("r0", 4 * HASH_BLOCK_SIZE if reads else 0, request.num_tokens)]
    world.matcher.finished(request)


@pytest.mark.parametrize("answered", [False, True])
def test_lookup_prefetch_of_aborted_request_is_released(world, answered):
    made = requests(2)
    for request in made:
        world.store(request)
    arrive(world, made)
    if answered:
        answer_all(world)
    for request in made:
        request.status = RequestStatus.FINISHED_ABORTED
        world.matcher.finished(request)
    answer_all(world)
    assert not world.client.held and not len(world.tier.prefetcher)


def test_lookup_prefetch_of_request_scheduled_without_match_is_released(world):
    [request] = requests(1)
    world.store(request)
    arrive(world, [request])
    answer_all(world)
    world.matcher.allocated(request, world.tables(0, 0), 0)
    assert not world.client.held


def test_lookup_prefetch_stops_at_requests_vllm_skips(world, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(lookup_prefetch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    first, second, third = requests(3)
    arrive(world, [first])
    answer_all(world)
    now[0] += 2 * lookup_prefetch.MAX_PREFETCH_SECONDS
    world.matcher.expire_prefetches()
    arrive(world, [second])
    assert not world.client.open
    assert world.matcher.match(first, 0) == (None, False)
    answer_all(world)
    assert world.matcher.match(second, 0) == (0, False), "looked up when vLLM came to the first"
    arrive(world, [third])
    assert len(world.client.open) == 1, "vLLM has come to all of them"


def test_lookup_prefetch_of_replaced_adapter_is_not_used(world, monkeypatch):
    """It was asked for while the request waited; its workers may have loaded other weights when it comes."""
    [request] = requests(1)
    now = [b"before"]
    monkeypatch.setattr(lookup_prefetch.vr, "lora_fingerprint", lambda request: now[0])
    arrive(world, [request])
    [asked] = world.client.open
    answer_all(world)
    now[0] = b"after"
    assert world.matcher.match(request, 0) == (None, False)
    [again] = world.client.open
    assert again.asked.namespace_id != asked.asked.namespace_id
    now[0] = None
    [other] = requests(2)[1:]
    arrive(world, [other])
    assert [again] == world.client.open, "it is not known what to ask for"
    answer_all(world)
    world.matcher.match(request, 0)


def test_planner_backlog_has_queued_requests_until_they_end(world):
    loads, computes, fails, leaves = made = requests(4)
    world.store(loads)
    arrive(world, made)
    assert world.planner.waiting == {"r0", "r1", "r2", "r3"}
    answer_all(world)
    decide = world.planner.decide
    waiting = []
    world.planner.decide = lambda *args: waiting.append(set(world.planner.waiting)) or decide(*args)
    assert world.matcher.match(loads, 0) == (5 * HASH_BLOCK_SIZE, True)
    assert waiting == [{"r1", "r2", "r3"}], "not behind itself"
    assert world.matcher.match(computes, 0) == (0, False)
    world.matcher.release_steps("r2", gone=True)
    for request in (leaves, computes, loads):
        request.status = RequestStatus.FINISHED_ABORTED
        world.matcher.finished(request)
    assert not world.planner.waiting


@pytest.mark.parametrize("queued", [False, True])
def test_prompt_that_lacks_less_than_a_block_is_not_looked_up(world, queued):
    """It is all blocks that vLLM's prefix cache has, but that the last one has the token that is always computed."""
    [request] = requests(1, 5 * HASH_BLOCK_SIZE)
    world.store(request)
    world.cached_about = lambda block_hashes: 4 * HASH_BLOCK_SIZE
    if queued:
        arrive(world, [request])
    assert world.matcher.match(request, 4 * HASH_BLOCK_SIZE) == (0, False)
    assert not world.client.open and not world.client.held
