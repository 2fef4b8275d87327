"""Loads that a step waits for, on the scheduler's side: for whom, and what is kept back until the verdict."""

from types import SimpleNamespace

import pytest
from support import make_request
from test_scheduler_half import half as bare  # noqa: F401
from vllm.v1.request import RequestStatus

from vllm_kvtier.scheduler import hurry as module
from vllm_kvtier.scheduler.half import SchedulerHalf
from vllm_kvtier.scheduler.hurry import Hurry
from vllm_kvtier.scheduler.lifecycle import Lifecycle, State
from vllm_kvtier.scheduler.offers import Loan
from vllm_kvtier.scheduler.params import read
from vllm_kvtier.scheduler.planner import Decision
from vllm_kvtier.scheduler.tier import HOST, HostOffer
from vllm_kvtier.scheduler.tracked import Tracked
from vllm_kvtier.vllm_compat.probe import Feature, granted
from vllm_kvtier.worker.fetches import FetchResult
from vllm_kvtier.worker.queues import LoadResult

UNIT = 4


@pytest.fixture
def engine():
    return SimpleNamespace(
        connector="ours", running=[], requests={}, get_request_counts=lambda: (0, 1), prev_step_scheduled_req_ids=set()
    )


class Planner:
    """``seconds``: that the bytes of any load are expected to take."""

    seconds, step, busy = 0.1, 0.0, False

    def moving_seconds(self, place, nbytes):
        assert nbytes == 10
        return self.seconds

    def load_seconds(self, place, nbytes):
        return self.moving_seconds(place, nbytes) + (0.005 if self.seconds < 0.1 else 0.0)

    def step_seconds(self):
        return self.step

    def loading(self, place):
        return self.busy


class Pool:
    def __init__(self, evicted=None):
        self.held, self.evicted = [], evicted

    def evict(self, hashes, group):
        self.evicted.extend(hashes)

    def pin(self, ids):
        self.held += ids
        return list(ids)

    def free(self, ids):
        for block in ids:
            self.held.remove(block)

    def held_once(self, ids):
        return sum(self.held.count(block) == 1 for block in ids)


def make(engine, milliseconds=100.0, timeout=60.0, evicted=None, seconds=0.1):
    planner = Planner()
    planner.seconds = seconds
    return Hurry(milliseconds, timeout, Pool(evicted), lambda: engine, "ours", planner)


def tracked(tokens=17, lender=""):
    """Offered what is in host memory or, if ``lender``, what is in its cache."""
    request = make_request("r", list(range(tokens)), UNIT)
    t = Tracked(request, read(None), Lifecycle("r"))
    blocks, tokens = [[5, 6, 7, 8]], tokens // UNIT * UNIT
    if lender:
        t.offer = Loan(("a", 1), lender, 1, 0, tokens, blocks, [], nbytes=10, mapped=True)
    else:
        t.offer = HostOffer(HOST, "life", 1, 0, tokens, blocks, [], session=1, nbytes=10)
    t.plan = Decision(True, 0.1, 1.0, "faster")
    return t


def test_for_whom(engine):
    hurry, t = make(engine), tracked()
    assert hurry.suits(t, 0, 1)
    assert not make(engine, 0.0).suits(t, 0, 1), "switched off"
    assert not make(engine, seconds=0.11).suits(t, 0, 1), "too long"
    assert not hurry.suits(t, 16, 1), "nothing would be loaded"
    assert not Hurry(100.0, 60.0, None, lambda: None, "ours", Planner()).suits(t, 0, 1), "no scheduler yet"
    t.request.resumable = True
    assert not hurry.suits(t, 0, 1)
    t.request.resumable = False
    beside = SimpleNamespace(**{**vars(engine), "connector": "a MultiConnector"})
    assert not make(beside).suits(t, 0, 1)


@pytest.mark.parametrize("lender", ["", "P/1"])
def test_among_others_only_what_is_brief(engine, lender):
    others = SimpleNamespace(**{**vars(engine), "get_request_counts": lambda: (3, 2)})
    t, hurry = tracked(lender=lender), make(others)
    hurry.mapped(lender)
    planner = hurry._planner
    for tracked_requests in (2, 1):  # whether we know of the others or not
        planner.seconds, planner.step = 0.003, 0.007
        assert not hurry.suits(t, 0, tracked_requests)
        planner.seconds = module.LEAST
        assert hurry.suits(t, 0, tracked_requests)
        planner.seconds, planner.step = 0.006, 0.024
        assert hurry.suits(t, 0, tracked_requests), "a quarter of a step"
    planner.busy = True
    assert not hurry.suits(t, 0, 2), "it would wait for what is under way there, and all others with it"
    planner.busy, planner.seconds = False, 0.001
    assert hurry.suits(t, 0, 2)
    assert not make(others, 0.5, seconds=0.001).suits(t, 0, 2), "the option is a limit here too"


def test_no_memory_is_mapped_while_others_wait(engine):
    others = SimpleNamespace(**{**vars(engine), "get_request_counts": lambda: (3, 2)})
    hurry = make(others, seconds=0.001)
    assert not hurry.suits(tracked(lender="P/1"), 0, 4)
    assert make(engine, seconds=0.001).suits(tracked(lender="P/1"), 0, 1), "alone it holds nobody up"
    hurry.mapped("P/1")
    assert hurry.suits(tracked(lender="P/1"), 0, 4) and not hurry.suits(tracked(lender="P/2"), 0, 4)


def test_where_somebody_else_waits_nothing_is_hurried(engine):
    """He would not be matched before the verdict; and several brief loads, one in two steps each, take longer than all
    of them together."""
    t, waiting = tracked(), make_request("s", [1, 2, 3], UNIT)
    engine.requests = {"r": t.request, "s": waiting}
    engine.get_request_counts = lambda: (1, 1)  # while vLLM schedules, those passed over are in no queue
    hurry = make(engine, seconds=0.001)
    assert not hurry.suits(t, 0, 2)
    waiting.num_computed_tokens = 3  # loaded; it is not matched again
    assert hurry.suits(t, 0, 2)
    waiting.num_computed_tokens, waiting.status = 0, RequestStatus.WAITING_FOR_REMOTE_KVS
    assert hurry.suits(t, 0, 2)
    waiting.status = RequestStatus.PREEMPTED
    assert not hurry.suits(t, 0, 2)


@pytest.mark.parametrize("lender", ["", "P/1"])
def test_one_that_took_too_long_is_the_last_for_a_while(engine, monkeypatch, lender):
    """What others waited for in vain they do not wait for again."""
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    hurry, t = make(engine, seconds=0.001, evicted=[]), tracked(lender=lender)
    hurry.mapped(lender)

    def ended(seconds, corrupt):
        ordered(hurry, t)
        assert t.load.timeout == module.LONGEST
        if lender:
            hurry.settle("r", [FetchResult("r", {11}, True, "because", 1, seconds, checksum=corrupt)])
        else:
            hurry.settle("r", [LoadResult("r", {11}, "because", 1, seconds, 0.0, [(0, 5)] * corrupt)])

    ended(0.5, False)
    assert hurry.suits(t, 0, 1), "it failed soon"
    assert hurry.suits(t, 0, 2) == (not lender), "mapping it may take long the next time"
    hurry.mapped(lender)
    ended(module.LONGEST, True)
    assert hurry.suits(t, 0, 2), "it was waited for anyway"
    ended(module.LONGEST, False)
    assert not hurry.suits(t, 0, 1) and not hurry.suits(t, 0, 2)
    hurry.mapped("Q/1")
    assert hurry.suits(tracked(lender="" if lender else "Q/1"), 0, 1), "another source"
    now[0] += module.PAUSE
    assert hurry.suits(t, 0, 1)


def test_bad_blocks_that_are_none_of_it_take_all_of_it_back(engine):
    evicted = []
    hurry, t = make(engine, evicted=evicted), tracked()
    ordered(hurry, t)
    hurry.settle("r", [LoadResult("r", {99}, "", 1, 0.1, 0.0)])
    assert evicted == [bytes(h) for h in t.request.block_hashes]


def test_a_verdict_is_not_given_up_while_a_step_is_scheduled(bare):  # noqa: F811
    """The request may be in that step: vLLM could not take it out again."""
    half, arrived = bare, []
    half._settle_namespace = half._run_jobs = lambda: None
    half._facts = SimpleNamespace(unsupported="no")
    half._pace = SimpleNamespace(end_step=lambda: None)
    half._hurry = SimpleNamespace(overdue=lambda: "verdict")
    half.arrived = lambda results, finished: arrived.extend(results)
    half._facts.unsupported, half._namespace = None, object()
    half._provenance = SimpleNamespace(admits=lambda request, named: named)
    half._matcher.match = lambda request, computed: (None, False)
    assert half.match("request", 0) == (None, False) and not arrived
    half._facts.unsupported = "no"
    half.end_step()
    assert arrived == ["verdict"]


@pytest.mark.skipif(not granted(Feature.SYNC_LOADS), reason="this vLLM's forward waits for no load")
def test_output_of_one_that_was_preempted_is_dropped(engine):
    """vLLM delivers what was in flight of a preempted request, and by then does not know that it was wrong."""
    hurry, t = make(engine), tracked()
    t.request.num_stale_output_tokens = 3
    hurry.watch()
    assert not t.request.drop_stale_output
    ordered(hurry, t)
    hurry.watch()
    assert t.request.drop_stale_output
    t.request.num_stale_output_tokens, t.request.drop_stale_output = 0, False
    hurry.watch()
    assert not t.request.drop_stale_output, "it runs"


def ordered(hurry, t):
    from vllm_kvtier.scheduler import orders
    from vllm_kvtier.scheduler.ledger import Keys

    make_order = orders.fetch_order if isinstance(t.offer, Loan) else orders.load_order
    t.load = make_order(t, [(UNIT, None)], UNIT, Keys(1), ([11, 12, 13, 14, 15],), 16, 60.0)
    t.pulled = 16
    hurry.begin(t, t.load)
    assert t.load.hurried and hurry.awaits_verdict


@pytest.mark.parametrize("bad, gone", [((), 4), ((11,), 0), ((14,), 3), ((13, 12), 1)])
def test_what_is_bad_is_found_no_more(engine, bad, gone):
    """Nor is anything that was computed behind it."""
    evicted = []
    hurry, t = make(engine, evicted=evicted), tracked()
    ordered(hurry, t)
    results = [LoadResult("other", {11}, "", 1, 0.1, 0.0), LoadResult("r", set(bad), "", 1, 0.1, 0.0)]
    assert hurry.judged(results[:1]) == set() and hurry.judged(results) == {"r"}
    hurry.settle("other", results)
    assert hurry.awaits_verdict
    hurry.settle("r", results)
    assert evicted == [bytes(h) for h in t.request.block_hashes[gone:]] and not hurry.awaits_verdict
    assert hurry.judged(results) == set()


def test_the_worst_rank_counts(engine):
    evicted = []
    hurry, t = make(engine, evicted=evicted), tracked()
    ordered(hurry, t)
    hurry.settle("r", [LoadResult("r", {14}, "", 1, 0.1, 0.0), LoadResult("r", {12, 13}, "", 1, 0.1, 0.0)])
    assert evicted == [bytes(h) for h in t.request.block_hashes[1:]]


def test_its_blocks_are_nobody_else_s_before_the_verdict(engine):
    hurry, t = make(engine, evicted=[]), tracked()
    held = hurry._pool.held
    ordered(hurry, t)
    assert held == [11, 12, 13, 14]
    hurry.settle("r", [LoadResult("r", {12}, "", 1, 0.1, 0.0)])
    assert not held
    ordered(hurry, t)
    held += [11, 12]
    hurry.unpin()  # vLLM resets its prefix cache, in vain: the request has them
    hurry.pin_again()
    assert sorted(held) == [11, 11, 12, 12, 13, 14]
    held[:] = held[:4]
    hurry.unpin()
    assert not held
    hurry.pin_again()
    assert held == [11, 12, 13, 14], "its verdict is still to come"
    hurry.settle("r", [LoadResult("r", set(), "", 1, 0.1, 0.0)])
    assert not held
    hurry.pin_again()
    assert not held


def test_a_verdict_that_never_comes_is_a_bad_one(engine, monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    hurry, t = make(engine, evicted=[]), tracked()
    assert hurry.overdue() is None
    ordered(hurry, t)
    now[0] += 60.0 + module.SLACK - 1
    assert hurry.overdue() is None
    now[0] += 1
    result = hurry.overdue()
    assert (result.request_id, result.bad_blocks) == ("r", {11, 12, 13, 14}) and "never verified" in caplog.text


def test_the_last_token_of_a_prompt_of_whole_blocks_counts_as_loaded(engine):
    hurry, t = make(engine), tracked(tokens=16)
    ordered(hurry, t)
    assert t.pulled == 16
    t.pulled = 15  # what vLLM could be told
    hurry.begin(t, t.load)
    assert t.pulled == 16


def test_nothing_of_it_is_stored_or_summed_before_the_verdict(bare):  # noqa: F811
    """And the step's time does not say how long computing takes."""
    half, seen = bare, {}
    half._run_jobs = lambda: None
    half._provenance = SimpleNamespace(shares=lambda tracked: True)
    half._facts = SimpleNamespace(unsupported=None)
    growth = [
        SimpleNamespace(tracked=SimpleNamespace(life=SimpleNamespace(state=state)))
        for state in (State.LOCAL, State.VERIFYING, State.LOADED)
    ]
    half._relieve = lambda blocks: None
    half._pace = SimpleNamespace(begin_step=lambda output, get, counts: seen.update(counts=counts))
    half._tables = SimpleNamespace(begin_step=lambda output, get: growth)
    half._exporter = SimpleNamespace(
        step=5, urgent=False, reserve=lambda n: 0, begin_step=lambda growth: seen.update(summed=growth) or []
    )
    half._offloader = SimpleNamespace(begin_step=lambda step, growth: seen.update(stored=growth))
    half._matcher.take_orders = lambda: ([], {})
    half._matcher.take_aborted = lambda: []
    half._matcher.expire, half._ledger = lambda: None, SimpleNamespace(clear=None)
    output = SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0)
    for awaits, expected in ((True, [growth[0], growth[2]]), (False, growth)):
        half._hurry = SimpleNamespace(awaits_verdict=awaits, watch=lambda: None)
        SchedulerHalf.begin_step(half, output)
        assert seen == {"counts": not awaits, "summed": expected, "stored": expected}
