"""Pace: which seconds are counted as whose step."""

from types import SimpleNamespace

import pytest
from support import Clock

from vllm_kvtier.scheduler.planner.load_planner import LoadPlanner
from vllm_kvtier.scheduler.planner.step_timer import (
    KNOWN_PREFILLS,
    LONG_PREFILL_TOKENS,
    MAX_STEPS_AHEAD,
    MIN_PREFILL_TOKENS,
    OBSERVE_DECODE_EVERY,
    OBSERVE_PREFILL_EVERY,
    WARM_UP_PREFILLS,
    StepTimer,
)


class Engine:
    """Steps that are scheduled and read; ``seen``: calls of the planner."""

    def __init__(self):
        self.clock, self.seen = Clock(), []
        self.computed = []
        planner = SimpleNamespace(
            to_compute={}, observe_step=lambda *step: self.seen.append(step),
            computes=lambda *prompt: self.computed.append(prompt),
        )  # fmt: skip
        self.planner = planner
        self.step_timer = StepTimer(planner, self.clock)
        self.requests = {}
        for _ in range(WARM_UP_PREFILLS):
            self.schedule(first=100)
            assert self.read(50.0) is None

    def schedule(self, **tokens):
        """Request name -> new tokens."""
        for name in tokens:
            self.requests.setdefault(name, SimpleNamespace(request=SimpleNamespace(num_computed_tokens=0)))
        total = sum(tokens.values())
        output = SimpleNamespace(num_scheduled_tokens=tokens, total_num_scheduled_tokens=total)
        self.step_timer.begin_step(output, self.requests.get)
        for name, n in tokens.items():
            self.requests[name].request.num_computed_tokens += n

    def read(self, after):
        self.clock.now += after
        self.step_timer.end_step()
        return self.seen[-1] if self.seen else None


def test_step_timer_times_sequential_steps():
    engine = Engine()
    engine.schedule(a=100)
    assert engine.read(0.5) == (0.5, [(100, 0)], 0)
    engine.schedule(a=60)
    assert engine.read(0.25) == (0.25, [(60, 100)], 0), "its context is what was computed before"


def test_step_timer_step_scheduled_ahead_starts_at_end_of_previous():
    engine = Engine()
    engine.schedule(a=100)
    engine.schedule(b=200)
    assert engine.read(0.5) == (0.5, [(100, 0)], 0)
    assert engine.read(0.75) == (0.75, [(200, 0)], 0)
    engine.clock.now += 100  # idle
    engine.schedule(c=50)
    assert engine.read(0.125) == (0.125, [(50, 0)], 0)


@pytest.mark.parametrize(
    "tokens", [{"a": 1, "b": 2}, {}, {"a": MIN_PREFILL_TOKENS}, {"a": MIN_PREFILL_TOKENS // 2 + 1, "b": 17}]
)
def test_step_timer_ignores_steps_without_large_prefill(tokens):
    """The last: two small ones together are over the least, and neither is one alone."""
    engine = Engine()
    engine.schedule(**tokens)
    assert engine.read(0.5) is None
    engine.schedule(c=100)
    assert engine.read(0.5) == (0.5, [(100, 0)], 0), "and they take their own time with them"


def test_step_timer_decode_steps_give_base_cost():
    engine = Engine()
    for _ in range(2 * OBSERVE_DECODE_EVERY):
        engine.schedule(a=1, b=1)
        engine.read(0.5)
    assert engine.seen == [(0.5, [], 2)] * 2


def test_step_timer_counts_decodes_beside_a_prefill():
    engine = Engine()
    engine.schedule(a=1, b=1, c=300, d=MIN_PREFILL_TOKENS)
    assert engine.read(0.5) == (0.5, [(300, 0), (MIN_PREFILL_TOKENS, 0)], 2)


def test_step_timer_ignores_untracked_requests():
    engine = Engine()
    output = SimpleNamespace(num_scheduled_tokens={"x": 100}, total_num_scheduled_tokens=100)
    engine.step_timer.begin_step(output, lambda name: None)
    assert engine.read(0.5) is None


def test_step_timer_ignores_output_without_step():
    engine = Engine()
    assert engine.read(1.0) is None
    engine.schedule(a=100)
    assert engine.read(0.5) == (0.5, [(100, 0)], 0)


def test_step_timer_unread_steps_are_bounded():
    engine = Engine()
    for _ in range(10 * MAX_STEPS_AHEAD):
        engine.schedule(a=100)
    assert len(engine.step_timer._steps) <= MAX_STEPS_AHEAD


def test_step_timer_skips_steps_that_wait():
    engine = Engine()
    output = SimpleNamespace(num_scheduled_tokens={"a": 100}, total_num_scheduled_tokens=100)
    engine.step_timer.begin_step(output, engine.requests.get, counts=False)
    assert engine.read(9.0) is None
    engine.schedule(a=100)
    assert engine.read(0.5) == (0.5, [(100, 0)], 0)


def test_step_timer_reports_computed_prompt_tokens_of_untimed_step():
    engine = Engine()
    engine.planner.to_compute["long"] = 8000, 1.0
    engine.schedule(long=5000, short=1)
    output = SimpleNamespace(num_scheduled_tokens={"long": 3000}, total_num_scheduled_tokens=3000)
    engine.step_timer.begin_step(output, engine.requests.get, counts=False)
    assert engine.computed == [("long", 5000), ("long", 8000)]


@pytest.mark.parametrize("chunk", [1, MIN_PREFILL_TOKENS - 1])
def test_prompt_in_small_chunks_leaves_the_backlog_when_it_is_computed(chunk):
    """Steps full of decodes have room for few tokens of a prompt, and its request generates for long behind it."""
    engine, prompt = Engine(), 2 * MIN_PREFILL_TOKENS
    planner = LoadPlanner({}, engine.clock)
    for before in range(WARM_UP_PREFILLS * 20):
        planner.observe_step(0.01 + 1e-5 * (100 + before), [(100 + before, 0)], 0)
    engine.step_timer = StepTimer(planner, engine.clock)
    planner.will_compute("prompt", 0, prompt)
    assert planner.to_compute
    for _ in range(-(-prompt // chunk)):
        engine.schedule(generating=1, prompt=chunk)
    assert not planner.to_compute


def test_step_timer_samples_short_prefills_once_many_are_known():
    engine = Engine()

    def step(tokens):
        before = len(engine.seen)
        engine.schedule(**{f"r{len(engine.requests)}": tokens})
        engine.read(0.1)
        return len(engine.seen) - before

    assert sum(step(100) for _ in range(KNOWN_PREFILLS - WARM_UP_PREFILLS)) == KNOWN_PREFILLS - WARM_UP_PREFILLS
    assert sum(step(100) for _ in range(10 * OBSERVE_PREFILL_EVERY)) == 10
    assert sum(step(LONG_PREFILL_TOKENS) for _ in range(10)) == 10
