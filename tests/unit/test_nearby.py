"""When another engine of the node is worth asking, and worth more than what the store offered."""

from types import SimpleNamespace

import pytest

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.nearby import UNKNOWN_PATIENCE, Nearby
from vllm_kvtier.scheduler.offers import Loan
from vllm_kvtier.scheduler.sharing import Holder
from vllm_kvtier.scheduler.tier import HOST, HostOffer
from vllm_kvtier.telemetry.stats import Counters

BYTES = 100  # a token


class Planner:
    """Loads at fixed rates; computing costs 1 ms a token, or is not known."""

    def __init__(self, gpu=1e6, host=1e5, known=True):
        self.rates, self.known = {"gpu": gpu, "host": host}, known

    def load_seconds(self, source, nbytes):
        return nbytes / self.rates[source]

    def handover_seconds(self):
        return 0.1

    def compute_seconds(self, start, end, prompt):
        return (end - start) * 1e-3 if self.known else None


def make(planner=None, free=1 << 20, groups=((16, None),), **options):
    counters = Counters()
    made = Nearby(
        KVTierConfig(**{"pull_threshold": 32, **options}), list(groups), 16, "me/1", planner or Planner(), counters,
        lambda tokens: tokens * BYTES, lambda: free,
    )  # fmt: skip
    return made, counters


def request(tokens=1000, held=None):
    return SimpleNamespace(request=SimpleNamespace(num_tokens=tokens), held=held, failed=set())


def holder(tokens, instance="other/1"):
    return Holder(("h", 1), instance, tokens)


def stored(tokens):
    return HostOffer(HOST, "life", 1, 0, tokens, [[]], [], session=1, nbytes=tokens * BYTES)


def lent(tokens):
    return Loan(("h", 1), "other/1", 1, 0, tokens, [[]], [], mapped=True, nbytes=tokens * BYTES)


@pytest.mark.parametrize(
    "case, expected, reason",
    [
        (dict(tokens=640), True, None),
        (dict(tokens=640, computed=624), None, "below threshold"),
        (dict(tokens=640, free=39), None, "too few free blocks"),
        (dict(tokens=640, held=640), True, None),  # ten times as fast as host memory
        (dict(tokens=320, held=640), None, "the node store is faster"),  # and the rest would be computed
        (dict(tokens=640, held=640, gpu=1e4), None, "the node store is faster"),
        (dict(tokens=640, instance="me/1"), None, None),
        (dict(tokens=640, computed=8), None, None),  # inside a block
    ],
)
def test_who_is_asked(case, expected, reason):
    made, counters = make(Planner(gpu=case.get("gpu", 1e6), host=1e6 if case.get("tokens") == 320 else 1e5),
                          free=case.get("free", 1 << 20))  # fmt: skip
    t = request(held=stored(case["held"]) if "held" in case else None)
    asked = made.suits(t, holder(case["tokens"], case.get("instance", "other/1")), case.get("computed", 0))
    assert asked is expected
    assert counters.take() == ({f"not_fetched|{reason}": 1} if reason else {})


def test_an_engine_that_cannot_be_mapped_is_read_by_nixl_or_not_at_all():
    made, _ = make()
    made.cannot_map("other/1", alike=True)
    made.cannot_map("odd/1", alike=False)
    assert made.suits(request(), holder(640), 0) is False
    assert made.suits(request(), holder(640, "odd/1"), 0) is None
    t = request()
    t.failed.add("third/1")
    assert made.suits(t, holder(640, "third/1"), 0) is None, "it failed this request before"


def test_what_is_computed_within_the_others_step_is_not_fetched():
    made, counters = make()
    assert made.suits(request(), holder(96), 0) is True
    assert made.suits(request(), holder(96), 0, alone=False) is None, "0.096 s of a step of 0.1"
    assert counters.take() == {"not_fetched|computed within a step": 1}
    assert made.suits(request(), holder(112), 0, alone=False) is True
    always, _ = make(load_policy="always")
    assert always.suits(request(), holder(96), 0, alone=False) is True


def test_what_computing_costs_decides_between_more_and_sooner():
    made, _ = make(Planner(gpu=1e6, host=1e6))
    assert made.better(request(), lent(640), stored(640))
    assert made.better(request(), lent(640), stored(320)), "the rest would be computed"
    assert not made.better(request(), lent(320), stored(640))
    unknown, _ = make(Planner(known=False))
    assert unknown.better(request(), lent(640), stored(320)) and not unknown.better(request(), lent(320), stored(640))
    slow, _ = make(Planner(gpu=1e3, host=1e6))
    assert not slow.better(request(), lent(640), stored(320)), "64 s for what takes 0.35"


def test_nobody_waits_for_what_another_computes_longer_than_computing_it():
    made, _ = make()
    assert made.patience(request(), holder(640), 0) == pytest.approx(0.64)
    assert made.patience(request(), holder(640), 320) == pytest.approx(0.32)
    assert made.patience(request(held=stored(600)), holder(640), 0) == pytest.approx(0.04)
    assert make(Planner(known=False))[0].patience(request(), holder(640), 0) == UNKNOWN_PATIENCE
