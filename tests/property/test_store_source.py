"""What is loaded from the node store, and what from peers beside it: a store that is late, wrong or gone."""

import time
from types import SimpleNamespace

import pytest
from matcher_harness import GROUPS, HASH_BLOCK_SIZE, ONE, World, no_violations, offered, params  # noqa: F401
from support import make_request
from tier_fakes import FakePending

from vllm_kvtier.scheduler.matching import source_selector
from vllm_kvtier.scheduler.sources import store_source
from vllm_kvtier.scheduler.sources.base import LookupMiss
from vllm_kvtier.store.protocol import HASH_BYTES


def test_store_source_hit_is_loaded():
    world = World(ONE)
    request = make_request("r", list(range(18)), HASH_BLOCK_SIZE)
    world.store(request, 16)
    assert offered(world, request) == (16, True)
    tables = ([11, 12, 13, 14, 15],)
    world.matcher.allocated(request, tables, 16)
    [order], introduced = world.matcher.take_jobs()
    world.check_load(order, request, tables, 0, 16, True)
    assert introduced == {} and len(world.client.held) == len(world.planner.open) == 1
    world.matcher.on_load_ended("r", False)
    assert not world.client.held and not world.planner.open
    report = world.matcher.get("r").report()
    assert (report["pulled_tokens"], report["pulled_from"]) == (16, "host")
    world.matcher.finished(request)
    assert not len(world.matcher)


@pytest.mark.parametrize("peer, winner", [(8, "store"), (16, "store"), (20, "store"), (24, "peer"), (None, "store")])
def test_store_source_longer_of_store_and_peer_is_chosen(peer, winner):
    """The peer's must be longer by what is worth a pull, and the other lease goes back."""
    world = World(ONE, pull_threshold=8)
    request = make_request("r", list(range(33)), HASH_BLOCK_SIZE, params("a"))
    world.store(request, 16)
    assert world.matcher.match(request, 0) == (None, False)
    world.answer(world.client.open[0])
    assert world.matcher.match(request, 0) == (None, False), "the peer is asked for what the store lacks"
    [pending] = world.peers.open
    assert len(world.client.held) == 1
    if peer is None:
        world.peers.answer(pending, LookupMiss("no_matching_blocks", ""))
    else:
        world.peers.answer(pending, world.peers.offer(pending, peer))
    expected = 16 if winner == "store" else peer
    assert world.matcher.match(request, 0) == (expected, True)
    assert len(world.client.held) == (winner == "store") and len(world.peers.held) == (winner == "peer")
    world.balanced()
    world.matcher.finished(request)
    assert not world.client.held and not world.peers.held


def test_store_source_next_peer_is_queried_if_one_has_no_more():
    world = World(ONE)
    request = make_request("r", list(range(33)), HASH_BLOCK_SIZE, params("a", "b"))
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


def test_store_source_whole_prompt_queries_no_peer():
    world = World(ONE)
    request = make_request("r", list(range(34)), HASH_BLOCK_SIZE, params("a"))
    world.store(request)
    assert offered(world, request) == (32, True)
    assert not world.peers.open
    world.matcher.finished(request)


def test_store_source_is_used_after_refused_handoff():
    world = World(ONE)
    handoff = {"do_remote_prefill": True, "remote_host": "a", "remote_port": 1, "remote_request_id": "kvtier/e"}
    request = make_request("r", list(range(34)), HASH_BLOCK_SIZE, handoff)
    world.store(request)
    assert world.matcher.match(request, 0) == (None, False) and not world.client.open
    world.peers.answer(world.peers.open[0], LookupMiss("unknown_export", ""))
    assert offered(world, request) == (32, True)
    world.matcher.finished(request)
    assert not world.client.held


@pytest.mark.parametrize("load, policy", [(False, "measured"), (False, "always"), (True, "measured")])
def test_store_source_loads_only_what_beats_compute(load, policy):
    expected = 16 if load or policy == "always" else 0
    world = World(ONE, load_policy=policy)
    world.planner.load = load
    request = make_request("r", list(range(18)), HASH_BLOCK_SIZE)
    world.store(request)
    assert offered(world, request) == (expected, expected > 0)
    assert len(world.client.held) == (expected > 0), "what is declined is given back at once"
    world.matcher.finished(request)
    assert not world.client.held and not world.planner.open


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("groups", sorted(GROUPS))
def test_store_source_malformed_hits_are_recomputed(groups, number):
    world = World(GROUPS[groups])
    request = make_request("r", list(range(34)), HASH_BLOCK_SIZE)
    assert world.matcher.match(request, 0) == (None, False)
    world.lie(world.client.open[0], SimpleNamespace(randrange=lambda n: number))
    assert world.matcher.match(request, 0) == (0, False)
    assert not world.client.held
    world.matcher.finished(request)


def test_store_source_without_answer_times_out(monkeypatch):
    now = [time.monotonic()]  # the client makes the deadline from the real clock
    monkeypatch.setattr(source_selector, "time", SimpleNamespace(monotonic=lambda: now[0]))
    world = World(ONE)
    request = make_request("r", list(range(18)), HASH_BLOCK_SIZE)
    assert world.matcher.match(request, 0) == (None, False)
    now[0] = world.matcher.get("r").pending.deadline + 0.5
    assert world.matcher.match(request, 0) == (None, False), "the client itself says so, a little later than now"
    now[0] += 1.0
    assert world.matcher.match(request, 0) == (0, False)
    world.store(request)
    world.answer(world.client.open[0])
    assert not world.client.held, "a lease that still comes goes back at once"


@pytest.mark.parametrize("seconds, options", [(20.0, {}), (70.0, {}), (20.0, {"transfer_timeout": 10.0})])
def test_store_source_hit_that_waits_for_blocks_is_leased_anew(seconds, options):
    """Its lease ends after a minute, and vLLM may have no blocks for longer: the prompt was computed then."""
    world = World(ONE, **options)
    request = make_request("r", list(range(18)), HASH_BLOCK_SIZE)
    world.store(request, 16)
    assert offered(world, request) == (16, True)
    before = set(world.client.held)
    world.matcher.get("r").hit_at -= seconds
    anew = seconds > 60 or bool(options)
    assert (offered(world, request) if anew else world.matcher.match(request, 0)) == (16, True)
    assert len(world.client.held) == 1 and (world.client.held != before) is anew
    world.balanced()
    world.matcher.finished(request)


def test_store_source_answer_that_is_not_asked_for_in_time_is_leased_anew():
    """vLLM asks for no request while all its slots are taken: the lease has ended when it does."""
    world = World(ONE)
    request = make_request("r", list(range(18)), HASH_BLOCK_SIZE)
    world.store(request, 16)
    assert world.matcher.match(request, 0) == (None, False)
    world.answer(world.client.open[0])
    before = set(world.client.held)
    world.matcher.get("r").pending.answer.deadline -= 70.0
    assert world.matcher.match(request, 0) == (None, False)
    world.answer(world.client.open[0])
    world.matcher.get("r").pending.answer.deadline -= 70.0  # its steps take so long: not again
    assert world.matcher.match(request, 0) == (16, True)
    assert len(world.client.held) == 1 and world.client.held != before
    world.balanced()
    world.matcher.finished(request)


def test_store_source_hit_that_is_held_for_long_is_leased_anew():
    """A peer was asked for more meanwhile, and vLLM had no slot for the request until the store's lease had ended."""
    world = World(ONE)
    request = make_request("r", list(range(34)), HASH_BLOCK_SIZE, params("p"))
    world.store(request, 16)
    assert world.matcher.match(request, 0) == (None, False)
    world.answer(world.client.open[0])
    assert world.matcher.match(request, 0) == (None, False)
    before = set(world.client.held)
    world.matcher.get("r").hit_at -= 70.0
    world.peers.answer(world.peers.open[0], LookupMiss("no_matching_blocks", ""))
    assert offered(world, request) == (16, True) and before != world.client.held
    world.balanced()
    world.matcher.finished(request)


def test_store_source_request_that_waits_for_blocks_keeps_its_place(monkeypatch):
    """vLLM skips a request without an answer. From the third renewal of its lease on none was waited for, and those
    behind took the blocks that a large request waited for, again and again."""
    world = World(ONE)
    monkeypatch.setattr(FakePending, "wait", lambda pending, seconds: world.answer(pending))
    requests = [make_request(name, list(range(18)), HASH_BLOCK_SIZE) for name in ("r", "other")]
    world.store(requests[0], 16)
    leases = set()
    for _ in range(6):
        assert [world.matcher.match(request, 0) for request in requests] == [(16, True)] * 2
        leases |= world.client.held
        world.matcher.get("r").hit_at -= 70.0
    assert len(leases) == 7, "six times for one, once for the other"
    world.balanced()


@pytest.mark.parametrize("unused", [False, True])
def test_store_source_hit_that_can_never_be_allocated_is_computed(unused):
    """Of a load vLLM allocates all blocks at once, and more for what is speculated: a cache of one longest prompt has
    not so many. The request was leased the same blocks again and again, and those behind it waited."""
    world = World(ONE)
    world.unused = unused
    request = make_request("r", list(range(34)), HASH_BLOCK_SIZE)
    world.store(request, 32)
    assert offered(world, request) == (32, True)
    world.matcher.get("r").hit_at -= 70.0
    assert offered(world, request) == (32, True), "another request may just have had the blocks"
    world.matcher.get("r").hit_at -= 70.0
    if unused:
        assert world.matcher.match(request, 0) == (0, False)
    else:
        assert offered(world, request) == (32, True)
    assert len(world.client.held) == (not unused)
    world.balanced()
    world.matcher.finished(request)


def test_store_source_is_asked_again_if_prefix_is_evicted_before_answer():
    world = World(ONE)
    request = make_request("r", list(range(34)), HASH_BLOCK_SIZE)
    world.store(request)
    assert world.matcher.match(request, 16) == (None, False)
    world.answer(world.client.open[0])
    assert offered(world, request) == (32, True), "a hit that begins at token 16 is of no use"
    world.balanced()
    world.matcher.finished(request)


def test_store_source_touches_blocks_cached_on_gpu():
    world = World(ONE)
    request = make_request("r", list(range(17)), HASH_BLOCK_SIZE)
    assert world.matcher.match(request, 16) == (0, False) and not world.client.open
    [(verb, namespace_id, block_hashes)] = world.client.told
    assert (verb, namespace_id, len(block_hashes)) == ("touch", world.tier.namespace_id(b""), 4 * HASH_BYTES)


def test_prompt_beyond_the_hashes_of_a_lookup_has_its_own_reason(monkeypatch):
    """With blocks of one token, tokens behind 131,072: the reason was an unavailable store."""
    monkeypatch.setattr(store_source, "MAX_HASH_BLOCKS", 4)
    world = World(ONE)
    request = make_request("r", list(range(8 * HASH_BLOCK_SIZE + 1)), HASH_BLOCK_SIZE)
    assert world.matcher.match(request, 4 * HASH_BLOCK_SIZE) == (0, False) and not world.client.open
    assert world.counters.take()["lookups_declined|prompt_too_long"] == 1


def test_store_source_disconnected_store_is_not_waited_for():
    world = World(ONE)
    world.client.lose()
    request = make_request("r", list(range(17)), HASH_BLOCK_SIZE)
    assert world.matcher.match(request, 0) == (0, False)


@pytest.mark.parametrize("policy", ["measured", "always"])
def test_store_without_candidates_is_not_queried(policy):
    """What is computed before the least load came: an ask would cost the others a moment, and its request a step."""
    world = World(ONE, load_policy=policy)
    world.planner.vain = True

    def touched():
        return [told for told in world.client.told if told[0] == "touch"]

    alone, beside = (make_request(name, list(range(33)), HASH_BLOCK_SIZE) for name in ("alone", "beside"))
    assert world.matcher.match(alone, 0) == (None, False), "no other request would be delayed"
    asked = world.matcher.match(beside, 0)
    if policy == "always":
        assert asked == (None, False) and not touched()
    else:
        assert asked == (0, False) and len(touched()) == 1, "it is not forgotten for that"
        assert world.counters.take()["lookups_declined|lookup_slower_than_compute"] == 1
    for request in (alone, beside):
        world.matcher.finished(request)
    world.balanced()


@pytest.mark.parametrize("exported, longest", [(None, 39), (39, 39), (24, 24), (99, 39)])
def test_attention_hits_end_before_the_states_of_the_handoff(exported, longest):
    """Behind it nothing has states: vLLM would go back to what all groups have, and the hand-off be dropped."""
    world = World(GROUPS["states"])
    own = {} if exported is None else {"instance": "a/1", "num_tokens": exported, "digest": "00"}
    handoff = {"do_remote_prefill": True, "remote_host": "a", "remote_port": 1, "remote_request_id": "kvtier/e"}
    handoff |= {"remote_block_ids": [[1]], "kvtier": own}
    request = make_request("r", list(range(40)), HASH_BLOCK_SIZE, handoff)
    assert world.matcher.longest_local_hit(request) == longest - 4  # ``pull_threshold``
    assert world.matcher.longest_local_hit(make_request("s", list(range(40)), HASH_BLOCK_SIZE)) == 0
    assert world.matcher.longest_local_hit(make_request("t", list(range(3)), HASH_BLOCK_SIZE, handoff)) == 0


@pytest.mark.parametrize("local", [0, 24])
def test_store_is_asked_from_the_common_hit_after_a_failed_handoff(local):
    """While a hand-off may bring the states vLLM has attention's own hit, and without it only what all groups have."""
    world = World(GROUPS["states"])
    handoff = {"do_remote_prefill": True, "remote_host": "a", "remote_port": 1, "remote_request_id": "kvtier/e"}
    request = make_request("r", list(range(40)), HASH_BLOCK_SIZE, handoff)
    world.store(request, 24)

    def match():
        longest = world.matcher.longest_local_hit(request)
        return world.matcher.match(request, local if local <= longest else 0)

    assert match() == (None, False)
    world.peers.answer(world.peers.open[0], LookupMiss("unreachable", "the prefill engine has died"))
    while (found := match()) == (None, False):
        for lookup in list(world.client.open):
            assert lookup.asked.start == 0
            world.answer(lookup)
    assert found == (24, True)
