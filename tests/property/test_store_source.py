"""What is loaded from the node store, and what from peers beside it: a store that is late, wrong or gone."""

from types import SimpleNamespace

import pytest
from matcher_world import GROUPS, ONE, UNIT, World, no_violations, offered, params  # noqa: F401
from support import make_request

from vllm_kvtier.scheduler import asking
from vllm_kvtier.scheduler.offers import NoOffer
from vllm_kvtier.store.messages import HASH


def test_a_load_from_the_store():
    world = World(ONE)
    request = make_request("r", list(range(18)), UNIT)
    world.store(request, 16)
    assert offered(world, request) == (16, True)
    tables = ([11, 12, 13, 14, 15],)
    world.matcher.allocated(request, tables, 16)
    [order], introduced = world.matcher.take_orders()
    world.check_load(order, request, tables, 0, 16, True)
    assert introduced == {} and len(world.client.held) == len(world.planner.open) == 1
    world.matcher.loaded("r", False)
    assert not world.client.held and not world.planner.open
    report = world.matcher.get("r").report()
    assert (report.pulled, report.pulled_from) == (16, "host")
    world.matcher.finished(request)
    assert not len(world.matcher)


@pytest.mark.parametrize("peer, winner", [(8, "store"), (16, "store"), (18, "store"), (24, "peer"), (None, "store")])
def test_the_longer_of_store_and_peer_wins(peer, winner):
    """The peer's must be longer by what is worth a pull, and the other lease goes back."""
    world = World(ONE)
    request = make_request("r", list(range(33)), UNIT, params("a"))
    world.store(request, 16)
    assert world.matcher.match(request, 0) == (None, False)
    world.answer(world.client.open[0])
    assert world.matcher.match(request, 0) == (None, False), "the peer is asked for what the store lacks"
    [pending] = world.peers.open
    assert len(world.client.held) == 1
    if peer is None:
        world.peers.answer(pending, NoOffer("nothing", ""))
    else:
        world.peers.answer(pending, world.peers.offer(pending, peer))
    expected = 16 if winner == "store" else peer
    assert world.matcher.match(request, 0) == (expected, True)
    assert len(world.client.held) == (winner == "store") and len(world.peers.held) == (winner == "peer")
    world.balanced()
    world.matcher.finished(request)
    assert not world.client.held and not world.peers.held


def test_the_next_peer_is_asked_when_one_has_no_more_than_the_store():
    world = World(ONE)
    request = make_request("r", list(range(33)), UNIT, params("a", "b"))
    world.store(request, 16)
    assert world.matcher.match(request, 0) == (None, False)
    world.answer(world.client.open[0])
    assert world.matcher.match(request, 0) == (None, False)
    world.peers.answer(world.peers.open[0], world.peers.offer(world.peers.open[0], 12))
    assert world.matcher.match(request, 0) == (None, False)
    [pending] = world.peers.open
    assert pending.address == ("b", 1)
    world.peers.answer(pending, world.peers.offer(pending, 32))
    assert world.matcher.match(request, 0) == (32, True) and not world.client.held
    world.matcher.finished(request)


def test_the_whole_prompt_in_the_store_asks_no_peer():
    world = World(ONE)
    request = make_request("r", list(range(34)), UNIT, params("a"))
    world.store(request)
    assert offered(world, request) == (32, True)
    assert not world.peers.open
    world.matcher.finished(request)


def test_a_refused_handoff_falls_back_on_the_store():
    world = World(ONE)
    handoff = {"do_remote_prefill": True, "remote_host": "a", "remote_port": 1, "remote_request_id": "e"}
    request = make_request("r", list(range(34)), UNIT, handoff)
    world.store(request)
    assert world.matcher.match(request, 0) == (None, False) and not world.client.open
    world.peers.answer(world.peers.open[0], NoOffer("unknown", ""))
    assert offered(world, request) == (32, True)
    world.matcher.finished(request)
    assert not world.client.held


@pytest.mark.parametrize("load, policy", [(False, "measured"), (False, "always"), (True, "measured")])
def test_only_what_is_worth_it_is_loaded(load, policy):
    expected = 16 if load or policy == "always" else 0
    world = World(ONE, load_policy=policy)
    world.planner.load = load
    request = make_request("r", list(range(18)), UNIT)
    world.store(request)
    assert offered(world, request) == (expected, expected > 0)
    assert len(world.client.held) == (expected > 0), "what is declined is given back at once"
    world.matcher.finished(request)
    assert not world.client.held and not world.planner.open


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("groups", sorted(GROUPS))
def test_lies_are_computed(groups, number):
    world = World(GROUPS[groups])
    request = make_request("r", list(range(34)), UNIT)
    assert world.matcher.match(request, 0) == (None, False)
    world.lie(world.client.open[0], SimpleNamespace(randrange=lambda n: number))
    assert world.matcher.match(request, 0) == (0, False)
    assert not world.client.held
    world.matcher.finished(request)


def test_a_store_that_never_answers_is_not_waited_for_for_ever(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(asking, "time", SimpleNamespace(monotonic=lambda: now[0]))
    world = World(ONE)
    request = make_request("r", list(range(18)), UNIT)
    assert world.matcher.match(request, 0) == (None, False)
    now[0] = world.matcher.get("r").pending.deadline + 0.5
    assert world.matcher.match(request, 0) == (None, False), "the client itself says so, a little later than now"
    now[0] += 1.0
    assert world.matcher.match(request, 0) == (0, False)
    world.store(request)
    world.answer(world.client.open[0])
    assert not world.client.held, "a lease that still comes goes back at once"


def test_what_the_gpu_has_is_not_asked_for_but_touched():
    world = World(ONE)
    request = make_request("r", list(range(17)), UNIT)
    assert world.matcher.match(request, 16) == (0, False) and not world.client.open
    [(verb, space, chain)] = world.client.told
    assert (verb, space, len(chain)) == ("touch", world.tier.space(b""), 4 * HASH)


def test_no_request_waits_for_a_store_that_is_not_there():
    world = World(ONE)
    world.client.lose()
    request = make_request("r", list(range(17)), UNIT)
    assert world.matcher.match(request, 0) == (0, False)


@pytest.mark.parametrize("policy", ["measured", "always"])
def test_nobody_is_asked_in_vain_among_others(policy):
    """What is computed before the least load came: an ask would cost the others a moment, and its request a step."""
    world = World(ONE, load_policy=policy)
    world.planner.vain = True

    def touched():
        return [told for told in world.client.told if told[0] == "touch"]

    alone, beside = (make_request(name, list(range(33)), UNIT) for name in ("alone", "beside"))
    assert world.matcher.match(alone, 0) == (None, False), "nobody else is there whom it would cost anything"
    asked = world.matcher.match(beside, 0)
    if policy == "always":
        assert asked == (None, False) and not touched()
    else:
        assert asked == (0, False) and len(touched()) == 1, "it is not forgotten for that"
        assert world.counters.take()["declined|computed before an answer"] == 1
    for request in (alone, beside):
        world.matcher.finished(request)
    world.balanced()
