"""When another engine of the node is worth asking, and worth more than what the store offered."""

from types import SimpleNamespace

import pytest
from cache_groups import mamba
from source_fakes import load_context

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.jobs.results import FetchResult, LoadResult, PullResult
from vllm_kvtier.jobs.transfer_jobs import MAX_PEERS_REMEMBERED
from vllm_kvtier.scheduler.leases.lease_client import LeasedBlocks
from vllm_kvtier.scheduler.sources.base import Candidate, LookupHit, LookupMiss
from vllm_kvtier.scheduler.sources.peer_gpu import UNKNOWN_COST_WAIT, PeerGpuSource
from vllm_kvtier.shapes.read_paths import ReadPath
from vllm_kvtier.telemetry.stats import Counters

BYTES = 100  # a token


class Planner:
    """Loads at fixed rates; computing costs 1 ms a token, or is not known."""

    def __init__(self, gpu=1e6, host=1e5, known=True):
        self.rates, self.known = {"peer_gpu": gpu, "host": host}, known

    def load_seconds(self, source, nbytes):
        return nbytes / self.rates[source]

    def handover_seconds(self):
        return 0.1

    def compute_seconds(self, start, end, prompt):
        return (end - start) * 1e-3 if self.known else None


def make(planner=None, free=1 << 20, retained=0, groups=((16, None),), **options):
    counters = Counters()
    load = load_context(
        groups, groups[0][0], config=KVTierConfig(**{"pull_threshold": 32, **options}), counters=counters,
        planner=planner or Planner(), pool=SimpleNamespace(free_count=lambda: free), retained_blocks=lambda: retained,
        identity={"instance": "me/1", "bytes_for": lambda tokens: tokens * BYTES},
    )  # fmt: skip
    made = PeerGpuSource(load)
    return made, counters


def request(tokens=1000, held=None):
    return SimpleNamespace(request=SimpleNamespace(num_tokens=tokens), held=held, failed=set())


def holder(tokens, instance="other/1"):
    return Candidate(None, ("h", 1), instance, tokens)


def stored(tokens):
    return LookupHit(SimpleNamespace(cost_key="host"), "life", 1, 0, tokens, [[]], session=1, nbytes=tokens * BYTES)


def leased(tokens, path=ReadPath.MAPPED):
    return LookupHit(None, "other/1", 1, 0, tokens, [[]], path=path, nbytes=tokens * BYTES)


@pytest.mark.parametrize(
    "case, expected, reason",
    [
        (dict(tokens=640), True, None),
        (dict(tokens=640, computed=624), False, "below_threshold"),
        (dict(tokens=640, free=39), False, "no_free_blocks"),
        (dict(tokens=640, free=30, retained=10), True, None),
        (dict(tokens=640, held=640), True, None),  # ten times as fast as host memory
        (dict(tokens=320, held=640), False, "store_faster"),  # and the rest would be computed
        (dict(tokens=640, held=640, gpu=1e4), False, "store_faster"),
        (dict(tokens=640, instance="me/1"), False, None),
        (dict(tokens=640, computed=8), False, None),  # inside a block
    ],
)
def test_peer_gpu_candidates_are_ordered(case, expected, reason):
    made, counters = make(Planner(gpu=case.get("gpu", 1e6), host=1e6 if case.get("tokens") == 320 else 1e5),
                          free=case.get("free", 1 << 20), retained=case.get("retained", 0))  # fmt: skip
    t = request(held=stored(case["held"]) if "held" in case else None)
    asked = made.is_eligible(t, holder(case["tokens"], case.get("instance", "other/1")), case.get("computed", 0))
    assert asked is expected
    assert counters.take() == ({f"peer_fetches_skipped|{reason}": 1} if reason else {})


@pytest.mark.parametrize(("groups", "tokens", "blocks"), [
    ([(16, None)] + [(16, 1024)] * 6, 40_000, 2500 + 6 * 64),  # Gemma 3
    ([(544, None)] + [mamba(544)] * 3, 108_800, 200 + 3),  # Qwen3-Next
])  # fmt: skip
def test_peer_gpu_is_asked_if_the_blocks_that_a_load_fills_are_free(groups, tokens, blocks):
    """All blocks of all groups were counted: an engine with an empty cache asked for no long prompt."""
    for free in blocks, blocks - 1:
        made, counters = make(Planner(), free=free, groups=groups)
        assert made.is_eligible(request(tokens + 10), holder(tokens), 0) is (free == blocks)
    assert counters.take() == {"peer_fetches_skipped|no_free_blocks": 1}


def test_peer_gpu_unmappable_engine_is_asked_until_no_path_is_left():
    made, _ = make()
    unmappable = []
    made._lease_client = SimpleNamespace(unmappable=unmappable.append)
    t = request()
    t.hit = t.taken_hit = leased(640)
    made.on_load_failed(t, FetchResult("r", {1}, True, "no", 0, 0.1, unmappable="another pid namespace"))
    assert unmappable == ["other/1"] and made.is_eligible(request(), holder(640), 0), "NIXL may read it"
    answer = SimpleNamespace(outcome=LookupMiss("layout", "32 layers here"), same_node_instance="odd/1")
    assert made.read_answer(SimpleNamespace(answer=answer)).code == "layout"
    assert not made.is_eligible(request(), holder(640, "odd/1"), 0)
    for n in range(2 * MAX_PEERS_REMEMBERED):  # engines come and go
        made.read_answer(SimpleNamespace(answer=SimpleNamespace(outcome=answer.outcome, same_node_instance=f"{n}/1")))
    assert len(made._unreadable) == MAX_PEERS_REMEMBERED
    t = request()
    t.failed.add("third/1")
    assert not made.is_eligible(t, holder(640, "third/1"), 0), "it failed this request before"


def test_peer_gpu_that_nixl_reads_is_blamed_for_its_pulls():
    """One whose reads by NIXL hang cost each request the whole ``transfer_timeout``."""
    made, calls = make()[0], []
    made._lease_client = SimpleNamespace(unreadable=lambda i: calls.append(("no", i)), readable=calls.append)
    t = request()
    t.hit, t.unreadable = leased(640, ReadPath.STAGED), ""
    t.taken_hit = t.hit
    made.on_load_failed(t, PullResult("r", {1}, True, "late", 0, 60.0, unreadable=True))
    assert calls == [("no", "other/1")] and made.is_eligible(request(), holder(640), 0), "the lease client lets one try"
    t.unreadable = ""
    for late in (
        FetchResult("r", {1}, True, "wrong", 0, 0.1, checksum_mismatch=True),
        LoadResult("r", {1}, "wrong", 0, 0.1, 0.0, [(0, 4)]),
    ):
        made.on_load_failed(t, late)
        assert len(calls) == 1 and made.is_eligible(request(), holder(640), 0), "of an earlier job of another source"
    made.on_load_failed(t, PullResult("r", {1}, True, "wrong", 0, 0.1, checksum_mismatch=True))
    assert calls[1:] == ["other/1"] and not made.is_eligible(request(), holder(640), 0)


def test_peer_gpu_of_other_block_sizes_is_not_read():
    """Its hashes may cover as many tokens as ours nevertheless, so that it is found."""
    made, released = make()[0], []
    made._lease_client = SimpleNamespace(release=lambda hit, done: released.append(hit.lease))
    for size, found in (16, True), (8, False):
        leased = LeasedBlocks(("h", 1), f"other/{size}", 7, 0, 640, [[1] * (640 // size)], [], ReadPath.MAPPED,
                              hash_block_size=16, block_tokens=(size,))  # fmt: skip
        answer = SimpleNamespace(outcome=leased, same_node_instance=leased.instance)
        assert made.read_answer(SimpleNamespace(answer=answer)).found is found
        assert made.is_eligible(request(), holder(640, leased.instance), 0) is found, "it is not asked again"
    assert released == [7]


def test_peer_fetch_skipped_if_computed_within_running_step():
    made, counters = make()
    assert made.is_eligible(request(), holder(96), 0) is True
    assert made.is_eligible(request(), holder(96), 0, alone=False) is False, "0.096 s of a step of 0.1"
    assert counters.take() == {"peer_fetches_skipped|compute_within_step": 1}
    assert made.is_eligible(request(), holder(112), 0, alone=False) is True
    always, _ = make(load_policy="always")
    assert always.is_eligible(request(), holder(96), 0, alone=False) is True


def test_peer_gpu_choice_depends_on_compute_cost():
    made, _ = make(Planner(gpu=1e6, host=1e6))
    assert made.beats(request(), leased(640), stored(640))
    assert made.beats(request(), leased(640), stored(320)), "the rest would be computed"
    assert not made.beats(request(), leased(320), stored(640))
    unknown, _ = make(Planner(known=False))
    assert unknown.beats(request(), leased(640), stored(320)) and not unknown.beats(request(), leased(320), stored(640))
    slow, _ = make(Planner(gpu=1e3, host=1e6))
    assert not slow.beats(request(), leased(640), stored(320)), "64 s for what takes 0.35"


def test_peer_wait_is_bounded_by_compute_time():
    made, _ = make()
    assert made.wait_seconds(request(), holder(640), 0) == pytest.approx(0.64)
    assert made.wait_seconds(request(), holder(640), 320) == pytest.approx(0.32)
    assert made.wait_seconds(request(held=stored(600)), holder(640), 0) == pytest.approx(0.04)
    assert make(Planner(known=False))[0].wait_seconds(request(), holder(640), 0) == UNKNOWN_COST_WAIT
