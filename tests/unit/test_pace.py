"""Pace: which seconds are counted as whose step."""

from types import SimpleNamespace

import pytest
from support import Clock

from vllm_kvtier.scheduler.pace import DECODES_EVERY, LEAST_TOKENS, MOST_AHEAD, WARM_UP, Pace


class Engine:
    """Steps that are scheduled and read; ``seen`` is what the planner was told."""

    def __init__(self):
        self.clock, self.seen = Clock(), []
        self.computed = []
        planner = SimpleNamespace(
            observe_step=lambda *step: self.seen.append(step), computes=lambda *prompt: self.computed.append(prompt)
        )
        self.pace = Pace(planner, self.clock)
        self.requests = {}
        for _ in range(WARM_UP):
            self.schedule(first=100)
            assert self.read(50.0) is None

    def schedule(self, **tokens):
        """Request name -> new tokens."""
        for name in tokens:
            self.requests.setdefault(name, SimpleNamespace(request=SimpleNamespace(num_computed_tokens=0)))
        total = sum(tokens.values())
        output = SimpleNamespace(num_scheduled_tokens=tokens, total_num_scheduled_tokens=total)
        self.pace.begin_step(output, self.requests.get)
        for name, n in tokens.items():
            self.requests[name].request.num_computed_tokens += n

    def read(self, after):
        self.clock.now += after
        self.pace.end_step()
        return self.seen[-1] if self.seen else None


def test_steps_one_by_one():
    engine = Engine()
    engine.schedule(a=100)
    assert engine.read(0.5) == (0.5, [(100, 0)], 0)
    engine.schedule(a=60)
    assert engine.read(0.25) == (0.25, [(60, 100)], 0), "its context is what was computed before"


def test_a_step_scheduled_ahead_begins_when_the_one_before_it_ends():
    engine = Engine()
    engine.schedule(a=100)
    engine.schedule(b=200)
    assert engine.read(0.5) == (0.5, [(100, 0)], 0)
    assert engine.read(0.75) == (0.75, [(200, 0)], 0)
    engine.clock.now += 100  # idle
    engine.schedule(c=50)
    assert engine.read(0.125) == (0.125, [(50, 0)], 0)


@pytest.mark.parametrize("tokens", [{"a": 1, "b": 2}, {}, {"a": LEAST_TOKENS}, {"a": LEAST_TOKENS // 2 + 1, "b": 17}])
def test_steps_that_say_nothing_about_prefills(tokens):
    """The last: two small ones together are over the least, and neither is one alone."""
    engine = Engine()
    engine.schedule(**tokens)
    assert engine.read(0.5) is None
    engine.schedule(c=100)
    assert engine.read(0.5) == (0.5, [(100, 0)], 0), "and they take their own time with them"


def test_some_decode_steps_say_what_a_step_costs_in_itself():
    engine = Engine()
    for _ in range(2 * DECODES_EVERY):
        engine.schedule(a=1, b=1)
        engine.read(0.5)
    assert engine.seen == [(0.5, [], 2)] * 2


def test_decodes_beside_a_prefill_are_counted():
    engine = Engine()
    engine.schedule(a=1, b=1, c=300, d=LEAST_TOKENS)
    assert engine.read(0.5) == (0.5, [(300, 0), (LEAST_TOKENS, 0)], 2)


def test_requests_that_nobody_follows_are_no_work():
    engine = Engine()
    output = SimpleNamespace(num_scheduled_tokens={"x": 100}, total_num_scheduled_tokens=100)
    engine.pace.begin_step(output, lambda name: None)
    assert engine.read(0.5) is None


def test_an_output_without_a_step_is_ignored():
    engine = Engine()
    assert engine.read(1.0) is None
    engine.schedule(a=100)
    assert engine.read(0.5) == (0.5, [(100, 0)], 0)


def test_steps_that_are_never_read_are_not_kept_for_ever():
    engine = Engine()
    for _ in range(10 * MOST_AHEAD):
        engine.schedule(a=100)
    assert len(engine.pace._ahead) <= MOST_AHEAD


def test_a_step_that_waits_for_something_else_is_not_told():
    engine = Engine()
    output = SimpleNamespace(num_scheduled_tokens={"a": 100}, total_num_scheduled_tokens=100)
    engine.pace.begin_step(output, engine.requests.get, counts=False)
    assert engine.read(9.0) is None
    engine.schedule(a=100)
    assert engine.read(0.5) == (0.5, [(100, 0)], 0)


def test_begin_step_tells_what_it_computes_of_prompts_however_long_it_takes():
    engine = Engine()
    engine.computed.clear()
    engine.schedule(long=5000, short=1)
    output = SimpleNamespace(num_scheduled_tokens={"long": 3000}, total_num_scheduled_tokens=3000)
    engine.pace.begin_step(output, engine.requests.get, counts=False)
    assert engine.computed == [("long", 5000), ("long", 8000)]
