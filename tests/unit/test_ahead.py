"""Requests that the store is asked for before vLLM comes to them."""

from types import SimpleNamespace

import pytest
from matcher_world import ONE, UNIT, World, no_violations  # noqa: F401
from support import make_request
from vllm.v1.request import RequestStatus

from vllm_kvtier.scheduler import ahead


def requests(count, tokens=5 * UNIT + 1, params=None):
    return [make_request(f"r{i}", [i + 1] * tokens, UNIT, params) for i in range(count)]


@pytest.fixture
def world():
    made = World(ONE)
    yield made
    made.balanced()



def arrive(world, made):
    for request in made:
        world.matcher.ask_ahead(request)


def answer_all(world):
    for pending in list(world.client.open):
        world.answer(pending)


def test_a_burst_is_asked_for_once_each_and_waits_once(world):
    made = requests(40)
    for request in made[::2]:
        world.store(request)
    arrive(world, made)
    asked, late = [], 0
    for request in made:
        ready = len(world.matcher._asker.ahead)
        assert ready <= ahead.MOST
        tokens, asynchronous = world.matcher.match(request, 0)
        asked += [bytes(pending.asked.chain) for pending in world.client.open]
        if tokens is None:
            late += 1
            answer_all(world)
            tokens, asynchronous = world.matcher.match(request, 0)
        stored = request in made[::2]
        assert (tokens, asynchronous) == ((5 * UNIT, True) if stored else (0, False))
        answer_all(world)
    assert len(asked) == len(set(asked)) == len(made), "each of them once"
    assert late <= 1, "the answers of all others were there when vLLM came to them"


def test_few_are_ahead_and_not_for_long(world, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(ahead, "time", SimpleNamespace(monotonic=lambda: now[0]))
    made = requests(60)
    for request in made:
        world.store(request)
    arrive(world, made)
    assert len(world.client.open) == ahead.MOST, "more only as vLLM comes to them"
    for request in made[:20]:
        world.matcher.match(request, 0)
        answer_all(world)
    ready, held = len(world.matcher._asker.ahead), len(world.client.held)
    assert ahead.MOST - 1 <= ready <= ahead.MOST
    now[0] += ahead.KEPT / 2
    world.matcher.expire()
    assert len(world.client.held) == held
    now[0] += ahead.KEPT
    world.matcher.expire()
    assert not len(world.matcher._asker.ahead) and len(world.client.held) == held - ready
    arrive(world, requests(61)[60:])
    for request in made[20:]:
        assert not len(world.matcher._asker.ahead), "the queue hardly moves: nobody else is asked for in vain"
        assert world.matcher.match(request, 0) == (None, False), "asked for anew"
        answer_all(world)
        assert world.matcher.match(request, 0) == (5 * UNIT, True)
    world.matcher.match(requests(61)[60], 0)
    answer_all(world)
    arrive(world, requests(62)[61:])
    assert len(world.matcher._asker.ahead) == 1, "it moves again"


@pytest.mark.parametrize("change", ["grown", "evicted", "renewed"])
def test_what_was_asked_for_something_else_is_given_back(world, change):
    [request] = requests(1)
    world.store(request)
    if change == "evicted":
        world.cached_about = lambda chain: 2 * UNIT
        world.matcher._asker.ahead._cached = world.cached_about
    arrive(world, [request])
    [pending] = world.client.open
    assert pending.asked.start == (2 if change == "evicted" else 0)
    world.answer(pending)
    assert world.client.held
    if change == "grown":
        request.append_output_token_ids([1] * UNIT)
    if change == "renewed":
        world.tier.renew()
    assert world.matcher.match(request, 0) == (None, False)
    assert not world.client.held and len(world.client.open) == 1
    answer_all(world)
    if change != "renewed":
        assert world.matcher.match(request, 0)[0] == 5 * UNIT


def test_an_answer_from_further_ahead_serves(world):
    """vLLM's own cache got more of the prompt meanwhile: what it has is not loaded."""
    [request] = requests(1)
    world.store(request)
    arrive(world, [request])
    answer_all(world)
    assert world.matcher.match(request, 2 * UNIT) == (3 * UNIT, True)
    tables = world.tables(2 * UNIT, 3 * UNIT)
    world.matcher.allocated(request, tables, 3 * UNIT)
    [order], _ = world.matcher.take_orders()
    world.check_load(order, request, tables, 2 * UNIT, 5 * UNIT, True)


@pytest.mark.parametrize("why", ["handoff", "log-probabilities", "hopeless", "short", "cached"])
def test_who_is_not_asked_for(world, why):
    handoff = {"do_remote_prefill": True, "remote_host": "a", "remote_port": 1, "remote_request_id": "e"}
    [request] = requests(1, UNIT - 1 if why == "short" else 5 * UNIT + 1, handoff if why == "handoff" else None)
    request.skip_reading_prefix_cache = why == "log-probabilities"
    world.planner.vain = why == "hopeless"
    if why == "cached":
        world.matcher._asker.ahead._cached = lambda chain: len(chain) * UNIT
    arrive(world, [request])
    assert not world.client.open
    world.matcher.finished(request)


@pytest.mark.parametrize("answered", [False, True])
def test_what_was_asked_for_whoever_is_gone_is_given_back(world, answered):
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
    assert not world.client.held and not len(world.matcher._asker.ahead)


def test_one_whom_vllm_gave_blocks_without_us(world):
    [request] = requests(1)
    world.store(request)
    arrive(world, [request])
    answer_all(world)
    world.matcher.allocated(request, world.tables(0, 0), 0)
    assert not world.client.held


def test_nobody_is_asked_for_behind_those_whom_vllm_does_not_come_to(world, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(ahead, "time", SimpleNamespace(monotonic=lambda: now[0]))
    first, second, third = requests(3)
    arrive(world, [first])
    answer_all(world)
    now[0] += 2 * ahead.KEPT
    world.matcher.expire()
    arrive(world, [second])
    assert not world.client.open
    assert world.matcher.match(first, 0) == (None, False)
    answer_all(world)
    assert world.matcher.match(second, 0) == (None, False)
    answer_all(world)
    arrive(world, [third])
    assert len(world.client.open) == 1, "vLLM has come to all of them"


def test_what_was_asked_for_an_adapter_that_was_replaced_since_is_not_taken(world, monkeypatch):
    """It was asked for while the request waited; its workers may have loaded other weights when it comes."""
    [request] = requests(1)
    now = [b"before"]
    monkeypatch.setattr(ahead.vr, "variant", lambda request: now[0])
    arrive(world, [request])
    [asked] = world.client.open
    answer_all(world)
    now[0] = b"after"
    assert world.matcher.match(request, 0) == (None, False)
    [again] = world.client.open
    assert again.asked.space != asked.asked.space
    now[0] = None
    [other] = requests(2)[1:]
    arrive(world, [other])
    assert [again] == world.client.open, "it is not known what to ask for"
    answer_all(world)
    world.matcher.match(request, 0)


def test_planner_knows_what_waits_to_be_computed_from_its_coming_to_its_end(world):
    loads, computes, fails, leaves = made = requests(4)
    world.store(loads)
    arrive(world, made)
    assert world.planner.waiting == {"r0", "r1", "r2", "r3"}
    answer_all(world)
    decide = world.planner.decide
    waiting = []
    world.planner.decide = lambda *args: waiting.append(set(world.planner.waiting)) or decide(*args)
    assert world.matcher.match(loads, 0) == (5 * UNIT, True)
    assert waiting == [{"r1", "r2", "r3"}], "not behind itself"
    assert world.matcher.match(computes, 0) == (0, False)
    world.matcher.let_go("r2", gone=True)
    for request in (leaves, computes, loads):
        request.status = RequestStatus.FINISHED_ABORTED
        world.matcher.finished(request)
    assert not world.planner.waiting
