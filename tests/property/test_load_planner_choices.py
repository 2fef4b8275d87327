"""The planner against any history: finite, never negative, consistent, and back at rest when all loads ended."""

import math
import random

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support import Clock

from vllm_kvtier.scheduler.planner import load_planner as p
from vllm_kvtier.scheduler.planner.cost_model import LoadRate, StepCost
from vllm_kvtier.scheduler.planner.load_planner import LoadPlanner, Queue

seconds = st.floats(1e-6, 1e4)
sizes = st.integers(1, 1 << 40)
tokens = st.integers(0, 1 << 20)
sources = st.sampled_from(["store", "disk", "peer"])


class Histories(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.planner = LoadPlanner({"store": 50e9, "disk": 2e9}, self.clock)
        self.under_way: list[tuple[str, int]] = []

    @rule(took=seconds, work=st.lists(st.tuples(tokens, tokens), max_size=3), decodes=st.integers(0, 1000))
    def step(self, took, work, decodes):
        self.planner.observe_step(took, work, decodes)

    @rule(source=sources, nbytes=sizes)
    def start(self, source, nbytes):
        self.planner.started(source, nbytes)
        self.under_way.append((source, nbytes))

    @rule(data=st.data(), took=seconds, queued=st.integers(0, 1 << 42))
    def end(self, data, took, queued):
        if self.under_way:
            source, nbytes = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
            self.planner.ended(source, nbytes)
            self.planner.observe_load(source, nbytes, queued, took)

    @rule(passed=st.floats(0, 1e7))
    def wait(self, passed):
        self.clock.now += passed

    @rule(source=sources, start=tokens, count=tokens, rest=tokens, nbytes=st.integers(0, 1 << 40))
    def decide(self, source, start, count, rest, nbytes):
        decision = self.planner.decide(source, start, start + count, nbytes, start + count + rest)
        again = self.planner.decide(source, start, start + count, nbytes, start + count + rest)
        assert decision == again or p.PROBE in (decision.reason, again.reason)
        assert decision.should_load == (decision.reason in (p.FASTER, p.UNMEASURED, p.PROBE))
        assert math.isfinite(decision.load_seconds) and decision.load_seconds >= 0
        assert 0 <= decision.queued_bytes <= sum(n for s, n in self.under_way if s == source)
        if decision.compute_seconds is not None:
            assert math.isfinite(decision.compute_seconds) and decision.compute_seconds >= 0
            longest = (1 + p.MAX_BACKLOG_FACTOR * bool(self.under_way)) * decision.compute_seconds * (1 + 1e-9)
            assert decision.should_load or decision.load_seconds > decision.compute_seconds
            assert decision.load_seconds <= longest or not decision.should_load or decision.reason == p.PROBE

    @rule(source=sources, nbytes=sizes, more=sizes)
    def more_bytes_take_longer(self, source, nbytes, more):
        shorter = self.planner.decide(source, 0, 64, nbytes, 65)
        longer = self.planner.decide(source, 0, 64, nbytes + more, 65)
        assert longer.load_seconds >= shorter.load_seconds

    @rule(start=tokens, count=st.integers(1, 1 << 19), more=tokens)
    def more_tokens_take_longer(self, start, count, more):
        end = start + count + more
        some = self.planner.decide("store", start, start + count, 1, end).compute_seconds
        all_of_it = self.planner.decide("store", start, end, 1, end).compute_seconds
        if some is not None and all_of_it is not None:
            assert all_of_it >= some * (1 - 1e-9)

    @invariant()
    def numbers_are_finite(self):
        assert all(math.isfinite(value) for value in self.planner.report().values())

    def teardown(self):
        for source, nbytes in self.under_way:
            self.planner.ended(source, nbytes)
        report = self.planner.report()
        assert all(value == 0 for name, value in report.items() if name.endswith("queued_bytes"))


TestHistories = Histories.TestCase


@given(st.lists(sizes, max_size=40), sizes)
def test_planner_queue_bytes_before_a_load_are_within_factor_two(loads, own):
    queue = Queue()
    for nbytes in loads:
        queue.add(nbytes)
    exact = sum(min(nbytes, own) for nbytes in loads)
    assert exact <= queue.before(own) <= 2 * exact
    for nbytes in loads:
        assert queue.remove(nbytes)
    assert (queue.loads, queue.nbytes, queue.before(own)) == (0, 0, 0)


@given(
    st.floats(1e8, 1e12), st.floats(1e-5, 0.1), st.floats(0.2, 5), st.floats(0.2, 5),
    st.lists(st.integers(1 << 16, 1 << 34), min_size=1, max_size=3), st.integers(0, 99),
)
def test_planner_load_rate_learns_any_constant_link(bandwidth, latency, faster, later, sizes, seed):
    """Whatever the guess (5 times off either way), loads like those seen are predicted to within a third."""
    rate = LoadRate(bandwidth, latency, 60.0)

    def true(nbytes: int) -> float:
        return latency * later + nbytes / (bandwidth * faster)

    loads = sizes * 20
    random.Random(seed).shuffle(loads)
    for now, nbytes in enumerate(loads):
        rate.observe(nbytes, true(nbytes), float(now))
    for nbytes in sizes:
        assert 2 / 3 < rate.seconds(nbytes, float(len(loads))) / true(nbytes) < 1.5


@given(
    st.floats(1e-4, 0.05), st.floats(1e-7, 1e-3), st.floats(0, 1e-8), st.floats(0, 1e-4),
    st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 100_000), st.integers(0, 100)), min_size=30, max_size=30),
)
def test_planner_step_cost_learns_any_linear_engine(base, token, pair, decode, steps):
    cost = StepCost()

    def true(new: int, before: int, decodes: int) -> float:
        return base + token * new + pair * (new * before + new * new / 2) + decode * decodes

    for new, before, decodes in steps:
        cost.observe(true(new, before, decodes), [(new, before)], decodes)
        cost.observe(true(0, 0, decodes), [], decodes)
    new, before, decodes = steps[-1]
    learned = cost.prefill_seconds(before, before + new, 1, decodes)
    assert 0.7 < learned / true(new, before, decodes) < 1.4


@given(st.floats(2e-3, 0.02), st.floats(2, 10), st.floats(1e-6, 1e-4), st.integers(0, 99))
def test_planner_separates_fixed_cost_from_token_cost(base, times, token, seed):
    """Engines that replay decodes and launch all else kernel by kernel: a shorter prompt saves none of that."""
    cost, draw = StepCost(), random.Random(seed)
    for _ in range(60):
        new = draw.choice([20, 100, 300, 900, 2000])
        cost.observe(base * times + token * new, [(new, 0)], 8)
        cost.observe(base, [], 8)
    saved = cost.prefill_seconds(0, 600, 0, 8.0)
    assert abs(saved - 600 * token) < 0.1 * 600 * token + 0.02 * base * times
    whole = cost.prefill_seconds(0, 600, 1, 8.0)
    assert 0.9 < whole / (base * times + 600 * token) < 1.1


@given(
    st.floats(4e-3, 0.02), st.floats(1.5, 3), st.floats(1e-5, 5e-5), st.sampled_from([1000, 3000, 8000]),
    st.integers(0, 99),
)
def test_planner_similar_prompts_attribute_cost_to_tokens(base, times, token, length, seed):
    """Nothing tells then what any prompt costs: taken for all of it, no part of a prompt would be worth loading."""
    cost, draw = StepCost(), random.Random(seed)
    for _ in range(100):
        new = draw.randint(length * 9 // 10, length * 11 // 10)
        cost.observe((base * times + token * new) * draw.uniform(0.97, 1.03), [(new, 0)], 16)
        for _ in range(3):
            cost.observe(base * draw.uniform(0.97, 1.03), [], 16)
    half = cost.prefill_seconds(0, length // 2, 0, 16.0)
    assert half > 0.7 * token * length / 2
    whole = cost.prefill_seconds(0, length, 1, 16.0)
    assert 0.85 < whole / (base * times + token * length) < 1.15
