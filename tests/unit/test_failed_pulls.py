"""After a failed transfer from another engine the store is asked, and then the sources that were not asked yet."""

import itertools
from types import SimpleNamespace

import pytest
from matcher_harness import HASH_BLOCK_SIZE, ONE, World, params
from source_fakes import load_results
from support import make_request

from vllm_kvtier.jobs.results import FetchResult, LoadResult, PullResult
from vllm_kvtier.scheduler.leases.lease_client import LeasedBlocks
from vllm_kvtier.scheduler.matching import request_matcher
from vllm_kvtier.scheduler.matching.request_lifecycle import RequestLifecycle, State
from vllm_kvtier.scheduler.matching.request_matcher import MAX_FAILED_PEERS
from vllm_kvtier.scheduler.sources.base import LookupMiss
from vllm_kvtier.shapes.read_paths import ReadPath
from vllm_kvtier.store.protocol import Holder

HANDOFF = {"do_remote_prefill": True, "kvtier": {"export": "e1"}, "remote_host": "p", "remote_port": 7}
PROMPT = 41
STORED = 40  # tokens of it in whole blocks


class Engine(World):
    """One request, whose lookups and loads are counted; vLLM has nothing of it."""

    def __init__(self, kv_transfer_params):
        super().__init__(ONE)
        self.request = make_request("r", list(range(PROMPT)), HASH_BLOCK_SIZE, params=kv_transfer_params)
        self.results, self.asked = load_results(self.load, self.matcher), []
        self.planner.observe_load = self.planner.observe_handover = lambda *_: None

    def match(self):
        return self.matcher.match(self.request, 0)

    def peer_offers(self, host, tokens=PROMPT, path=ReadPath.DIRECT):
        (pending,) = self.peers.open
        assert pending.address[0] == host
        lease = len(self.asked) + 1
        self.asked.append(host)
        blocks = [list(range(1, 1 + -(-tokens // HASH_BLOCK_SIZE)))]
        offer = LeasedBlocks(
            pending.address, f"{host}/1", lease, pending.request.start, tokens, blocks, [], path=path, nbytes=100
        )  # fmt: skip
        self.peers.answer(pending, offer)
        return self.match()

    def peer_refuses(self, host):
        (pending,) = self.peers.open
        assert pending.address[0] == host
        self.asked.append(host)
        self.peers.answer(pending, LookupMiss("no_matching_blocks", ""))
        return self.match()

    def store_answers(self, *holders):
        (pending,) = self.client.open
        self.asked.append("store")
        self.holders = [Holder(host, 1, f"{host}/1", STORED // HASH_BLOCK_SIZE) for host in holders]
        self.answer(pending)
        return self.match()

    def read(self, tokens, failed=False):
        """vLLM gives the request blocks, and its load ends."""
        self.matcher.allocated(self.request, ([*range(1, 2 + tokens // HASH_BLOCK_SIZE)],), tokens)
        ((job,), _), bad = self.matcher.take_jobs(), {1} if failed else set()
        match job.step_list:
            case "pulls":
                result = PullResult("r", bad, failed, "", 0, 0.1)
            case "fetches":
                result = FetchResult("r", bad, failed, "", 0, 0.1)
            case "loads":
                result = LoadResult("r", bad, "gone" if failed else "", 0, 0.1, 0.0)
        self.results.arrived([result], {"r"})
        self.balanced()

    @property
    def state(self):
        return self.matcher.get("r").life.state


@pytest.fixture
def made():
    engines = []

    def make(kv_transfer_params):
        engines.append(Engine(kv_transfer_params))
        return engines[0]

    yield make
    (engine,) = engines
    engine.matcher.finished(engine.request)
    engine.balanced()
    assert not engine.matcher._tracked and RequestLifecycle.violations == 0


@pytest.mark.parametrize("path", [ReadPath.DIRECT, ReadPath.MAPPED], ids=["pull", "copy"])
def test_store_is_asked_after_a_handoff_that_was_not_read(made, path):
    """The prompt was computed as a whole, though its node's store had it."""
    engine = made(HANDOFF)
    engine.store(engine.request)
    assert engine.match() == (None, False) and engine.peer_offers("p", path=path) == (PROMPT, True)
    engine.read(PROMPT, failed=True)
    assert engine.match() == (None, False), "the store is asked"
    assert engine.store_answers() == (STORED, True)
    engine.read(STORED)
    counts = engine.counters.take()
    assert engine.state is State.LOADED and engine.asked == ["p", "store"]
    assert (counts["hits|host"], counts["prompt_tokens|host"], counts["loads|ok"]) == (1, STORED, 1)
    assert counts["pulls|failed" if path is ReadPath.DIRECT else "fetches|failed"] == 1


@pytest.mark.parametrize("stored", [0, STORED], ids=["lacks it", "fails too"])
def test_prompt_is_computed_if_the_store_is_of_no_use_after_a_failed_handoff(made, stored):
    engine = made(HANDOFF)
    engine.store(engine.request, stored)
    engine.match()
    engine.peer_offers("p")
    engine.read(PROMPT, failed=True)
    engine.match()
    if stored:
        assert engine.store_answers() == (STORED, True)
        engine.read(STORED, failed=True)
        assert engine.match() == (0, False)
    else:
        assert engine.store_answers() == (0, False)
    assert engine.match() == (0, False) and engine.state is State.LOCAL
    assert engine.asked == ["p", "store"], "no source is asked twice"


def test_each_failure_has_the_store_asked_once_and_no_engine_again(made):
    """The store names engines that have the prompt: after a failed hand-off the prefill engine is not one of them, and
    after a failed copy the hand-off is not asked for again."""
    engine = made(HANDOFF)
    engine.store(engine.request)
    engine.match()
    engine.peer_offers("p")
    engine.read(PROMPT, failed=True)
    engine.match()
    engine.store_answers("p", "c")
    assert engine.peer_offers("c", STORED, ReadPath.MAPPED) == (STORED, True)
    engine.read(STORED, failed=True)
    engine.match()
    assert engine.store_answers("p", "c") == (STORED, True)
    engine.read(STORED)
    assert engine.asked == ["p", "store", "c", "store"]


def test_failed_pull_of_retained_blocks_goes_on_with_the_store_and_the_next_engine(made):
    engine = made(params("a", "b", "c"))
    engine.match()
    assert engine.store_answers() == (None, False) and engine.peer_refuses("a") == (None, False)
    assert engine.peer_offers("b", STORED) == (STORED, True)
    engine.read(STORED, failed=True)
    assert engine.match() == (None, False) and engine.store_answers() == (None, False)
    assert engine.peer_offers("c", STORED) == (STORED, True)
    engine.read(STORED)
    assert engine.asked == ["store", "a", "b", "store", "c"]


def test_request_whose_transfer_hung_is_computed(made, monkeypatch):
    """Each engine that the store names may hang as long."""
    engine = made(HANDOFF)
    engine.store(engine.request)
    assert engine.match() == (None, False) and engine.peer_offers("p") == (PROMPT, True)
    clock = itertools.count(0, 1000)
    monkeypatch.setattr(request_matcher, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    engine.read(PROMPT, failed=True)
    assert engine.match() == (0, False) and engine.asked == ["p"]


def test_request_whose_transfers_fail_again_and_again_is_computed(made):
    engine = made(params(*"abcdefg"))
    engine.match()
    for n, host in enumerate("abcdefg"[: MAX_FAILED_PEERS + 1]):
        engine.store_answers()
        assert engine.peer_offers(host, STORED) == (STORED, True)
        engine.read(STORED, failed=True)
        assert engine.match() == ((None, False) if n < MAX_FAILED_PEERS else (0, False))
    assert engine.state is State.LOCAL


def test_load_that_ended_without_a_result_of_any_rank_has_failed(made):
    """In a MultiConnector another connector may report the end of a load that is not its own. It was counted as ours,
    and as one that brought all its tokens."""
    engine = made(None)
    engine.store(engine.request)
    engine.match()
    assert engine.store_answers() == (STORED, True)
    engine.matcher.allocated(engine.request, ([*range(1, 12)],), STORED)
    engine.results.arrived([], {"r"})
    engine.balanced()
    assert engine.state is State.LOCAL and engine.matcher.get("r").report()["pulled_tokens"] == 0
    engine.matcher.allocated(engine.request, ([*range(1, 12)],), 0)
    counts = engine.counters.take()
    assert counts["misses|load_failed_host"] == 1 and not any(name.startswith("hits") for name in counts)
