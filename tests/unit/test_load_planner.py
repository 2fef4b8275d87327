"""Load or compute: the fits of both rates, the decision, and what is forgotten when."""

import random

import pytest
from support import Clock

from vllm_kvtier.scheduler.planner import cost_model
from vllm_kvtier.scheduler.planner import load_planner as p
from vllm_kvtier.scheduler.planner.load_planner import LoadPlanner, Queue

GB = 1e9
KV = 147_456  # bytes a token of Qwen3-8B shapes


def h200_step(work: list[tuple[int, int]], decodes: int = 0) -> float:
    """Seconds of a step like those of an H200 (2k: 51 ms, 8k: 217 ms, 32k in 8k chunks: 1.28 s), eager."""
    tokens = sum(new for new, _ in work)
    pairs = sum(new * before + new * new / 2 for new, before in work)
    return 0.008 + 2.3e-5 * tokens + 9e-10 * pairs + 3e-5 * decodes


def h200_prefill(start: int, end: int, chunk: int = 8192) -> float:
    return sum(h200_step([(min(chunk, end - at), at)]) for at in range(start, end, chunk))


def taught(clock: Clock | None = None, lengths=(2048, 8192, 32768), noise: float = 0.0, **options) -> LoadPlanner:
    """A planner that has seen a few prefills of these lengths, in chunks, and many decode steps."""
    planner = LoadPlanner({"store": 50 * GB}, clock or Clock(), **options)
    rng = random.Random(1)
    for _ in range(4):
        for length in lengths:
            for at in range(0, length, 8192):
                work = [(min(8192, length - at), at)]
                planner.observe_step(h200_step(work, 3) * (1 + rng.uniform(-noise, noise)), work, 3)
        for _ in range(50):
            decodes = rng.randrange(1, 64)
            planner.observe_step(h200_step([], decodes) * (1 + rng.uniform(-noise, noise)), [], decodes)
    return planner


def decide(planner: LoadPlanner, tokens: int, start: int = 0, source: str = "store", prompt: int | None = None):
    return planner.decide(source, start, tokens, (tokens - start) * KV, prompt or tokens + 1)


def load(planner: LoadPlanner, clock: Clock, nbytes: int, seconds: float, source: str = "store") -> None:
    planner.started(source, nbytes)
    clock.now += seconds
    planner.ended(source, nbytes)
    planner.observe_load(source, nbytes, 0, seconds)


def load_some(planner, clock, latency):
    """Small ones and large ones, at 50 GB/s."""
    for _ in range(6):
        for nbytes in (1 << 20, 1 << 30):
            load(planner, clock, nbytes, latency + nbytes / (50 * GB))


def test_planner_loads_unmeasured_sources():
    planner = LoadPlanner({"store": 50 * GB}, Clock())
    decision = decide(planner, 32768)
    assert decision.should_load and decision.reason == p.UNMEASURED and decision.compute_seconds is None
    assert decision.load_seconds == pytest.approx(32768 * KV / (50 * GB) + 0.002)
    assert decide(planner, 16, source="unknown").should_load


def test_planner_skips_empty_load():
    planner = taught()
    assert planner.decide("store", 64, 64, 0, 128).reason == p.NOTHING
    assert planner.decide("store", 64, 32, 100, 128).reason == p.NOTHING
    assert not planner.decide("store", 0, 64, 0, 128).should_load


@pytest.mark.parametrize("noise", [0.0, 0.15])
@pytest.mark.parametrize(("start", "end"), [(0, 2048), (0, 8192), (0, 32768), (8192, 32768), (0, 131072)])
def test_planner_predicts_prefill_time_from_steps(start, end, noise):
    """Within 10 % (20 with noise), also four times as long as anything seen."""
    planner = taught(noise=noise)
    compute = planner.decide("store", start, end, 1, end + 8192).compute_seconds
    assert compute == pytest.approx(h200_prefill(start, end) + 0.00009 * 4, rel=0.2 if noise else 0.1)


def test_planner_compute_time_counts_saved_tokens_beyond_one_step():
    """A prompt that needs one step in any case saves no step by loading half of it."""
    planner = taught()
    whole = planner.decide("store", 0, 4096, 1, 8192).compute_seconds
    assert whole == pytest.approx(h200_step([(4096, 0)]) - 0.008, rel=0.1)
    assert planner.decide("store", 0, 4096, 1, 4096).compute_seconds == pytest.approx(whole)


def test_planner_declines_slow_source_and_uses_fast_one():
    planner = taught()
    assert decide(planner, 32768).reason == p.FASTER
    slow = LoadPlanner({"disk": 1 * GB}, Clock())
    for length in (2048, 8192, 8192, 8192):
        slow.observe_step(h200_step([(length, 0)]), [(length, 0)], 0)
    decision = decide(slow, 8192, source="disk")
    assert not decision.should_load and decision.reason == p.SLOWER
    assert decision.load_seconds > decision.compute_seconds


def test_planner_computes_short_prompts_with_high_latency():
    planner = taught(latency=0.05)
    assert decide(planner, 64).reason == p.SLOWER
    assert decide(planner, 32768).should_load


def test_cost_model_separates_latency_and_bandwidth():
    clock = Clock()
    planner = LoadPlanner({"store": 10 * GB}, clock)
    rng = random.Random(2)
    for _ in range(60):
        nbytes = rng.choice([1 << 20, 300 << 20, 4 << 30])
        load(planner, clock, nbytes, (0.006 + nbytes / (48 * GB)) * rng.uniform(0.95, 1.05))
    report = planner.report()
    assert report["store_bandwidth"] == pytest.approx(48 * GB, rel=0.1)
    assert planner.load_seconds("store", 1) == pytest.approx(0.006, rel=0.15)
    assert report["store_error"] < 0.1


def test_planner_single_slow_load_changes_little():
    clock = Clock()
    planner = LoadPlanner({"store": 50 * GB}, clock)
    for _ in range(20):
        load(planner, clock, 1 << 30, (1 << 30) / (50 * GB))
    before = decide(planner, 8192).load_seconds
    load(planner, clock, 1 << 30, 60.0)
    assert decide(planner, 8192).load_seconds < 1.15 * before


def test_planner_follows_lasting_bandwidth_change():
    clock = Clock()
    planner = LoadPlanner({"store": 50 * GB}, clock)
    for _ in range(50):
        load(planner, clock, 1 << 30, (1 << 30) / (50 * GB))
    for _ in range(8):
        load(planner, clock, 1 << 30, (1 << 30) / (2 * GB))
    assert decide(planner, 7281).load_seconds == pytest.approx((1 << 30) / (2 * GB), rel=0.2)


def test_planner_probes_declined_source_once_after_a_while():
    clock = Clock()
    planner = taught(clock)
    for _ in range(30):
        load(planner, clock, 1 << 30, 2.0)  # ten times slower than computing the same
    assert decide(planner, 8192).reason == p.SLOWER
    clock.now += 60
    assert decide(planner, 8192).reason == p.SLOWER, "a minute is not enough"
    clock.now += 10 * 60
    decision = decide(planner, 8192)
    assert decision.reason == p.FASTER
    planner.started("store", 8192 * KV)
    assert not decide(planner, 8192).should_load, "the others wait for what that one finds"
    planner.ended("store", 8192 * KV)
    planner.observe_load("store", 8192 * KV, decision.queued_bytes, 0.025)
    for _ in range(8):
        load(planner, clock, 8192 * KV, 0.025)
    assert decide(planner, 8192).should_load
    planner.started("store", 8192 * KV)
    assert decide(planner, 8192).should_load


def test_planner_counts_queued_loads():
    planner = taught()
    alone = decide(planner, 8192)
    for _ in range(100):
        planner.started("store", 8192 * KV)
    queued = decide(planner, 8192)
    assert queued.reason == p.QUEUED and queued.queued_bytes == 100 * 8192 * KV
    assert queued.load_seconds > 50 * alone.load_seconds
    short = decide(planner, 256)
    assert short.queued_bytes == 100 * 256 * KV, "a short load passes the long ones by"
    for _ in range(100):
        planner.ended("store", 8192 * KV)
    assert decide(planner, 8192) == alone
    with pytest.raises(ValueError, match="store"):
        planner.ended("store", 8192 * KV)


def test_planner_load_time_includes_queued_bytes():
    """A load that waited behind nine others does not make the link look slow."""
    clock = Clock()
    planner = LoadPlanner({"store": 50 * GB}, clock)
    for _ in range(20):
        planner.observe_load("store", 1 << 30, 9 << 30, (10 << 30) / (50 * GB))
        clock.now += 1
    assert planner.report()["store_bandwidth"] == pytest.approx(50 * GB, rel=0.1)


def test_planner_decode_steps_keep_prefill_model():
    planner = taught()
    before = decide(planner, 32768).compute_seconds
    for n in range(5000):
        planner.observe_step(h200_step([], n % 60), [], n % 60)
    assert decide(planner, 32768).compute_seconds == pytest.approx(before, rel=0.05)


def test_planner_small_prefills_do_not_predict_long_ones():
    """An engine that only ever hits sees steps of a few tokens: too little to refuse a load by."""
    planner = LoadPlanner({"store": 50 * GB}, Clock())
    for _ in range(100):
        planner.observe_step(0.02, [(16, 32768)], 1)
    assert decide(planner, 32768).reason == p.UNMEASURED


def test_planner_prefill_extrapolation_is_bounded():
    """From 2k prompts alone, 128k are expected between linear growth and that of the last doubling seen."""
    planner = taught(lengths=(2048,), noise=0.3)
    compute = planner.decide("store", 0, 131072, 1, 131073).compute_seconds
    assert 2.3e-5 * 131072 * 0.5 < compute < h200_prefill(0, 131072) * 3


def test_planner_follows_slower_engine():
    planner = taught()
    fast = decide(planner, 8192).compute_seconds
    for _ in range(12):
        planner.observe_step(4 * h200_step([(8192, 0)]), [(8192, 0)], 0)
    assert decide(planner, 8192).compute_seconds == pytest.approx(4 * fast, rel=0.35)


def test_planner_ignores_invalid_observations():
    clock = Clock()
    planner = taught(clock)
    before = planner.report()
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        planner.observe_step(seconds, [(100, 0)], 0)
        planner.observe_load("store", 100, 0, seconds)
    planner.observe_load("store", 0, 0, 1.0)
    assert planner.report() == before


@pytest.mark.parametrize("good", [0, 1, 3, 30])
def test_planner_learns_from_loads_that_reach_their_time_limit(good):
    """The link fell from 50 GB/s to less than 0.1: each further load waited for its time limit and failed."""
    clock = Clock()
    planner = taught(clock, known=2)
    for _ in range(good):
        load(planner, clock, 32768 * KV, 0.1)
    tried = 0
    for _ in range(12):
        if decide(planner, 32768).should_load:
            tried += 1
            planner.started("store", 32768 * KV)
            clock.now += 60.0
            planner.ended("store", 32768 * KV)
            planner.observe_timeout("store", 32768 * KV, 0, 60.0)
    assert tried == 1


def test_planner_ignores_time_limits_that_it_expects_to_be_exceeded():
    planner = taught()
    before = planner.report()
    planner.observe_timeout("store", 100 << 30, 0, 1.0)
    planner.observe_timeout("store", 0, 0, 60.0)
    planner.observe_timeout("store", 1 << 30, 0, float("inf"))
    assert planner.report() == before and decide(planner, 8192).reason == "faster"


def test_planner_report_has_errors_and_queues():
    planner = taught()
    decide(planner, 8192)
    report = planner.report()
    assert report["step_error"] < 0.05 and report["store_queued_bytes"] == 0


def test_planner_queue_bytes_before_a_load_by_size():
    queue = Queue()
    for nbytes in (10, 1000, 1 << 30):
        queue.add(nbytes)
    assert queue.before(1000) == 10 + 1000 + 1000 and queue.before(1) == 3 and queue.loads == 3
    assert queue.remove(1000) and not queue.remove(1000) and queue.nbytes == 10 + (1 << 30)


def test_planner_probes_declined_source_at_interval():
    planner = LoadPlanner({"host": 1e6})
    for _ in range(8):
        planner.observe_step(0.01, [(1024, 0)], 0)
    reasons = [planner.decide("host", 0, 1024, 10**8, 1024) for _ in range(2 * p.PROBE_EVERY)]
    assert [d.reason for d in reasons].count("probe") == 2 and reasons[p.PROBE_EVERY - 1].should_load
    assert all(d.reason == "slower" and not d.should_load for d in reasons[: p.PROBE_EVERY - 1])


def test_planner_ignores_first_load_of_a_source():
    planner = LoadPlanner({"host": 10e9})
    before = planner.report()["host_bandwidth"]
    planner.observe_load("host", 10**8, 0, 5.0)
    assert planner.report()["host_bandwidth"] == before
    planner.observe_load("host", 10**8, 0, 5.0)
    assert planner.report()["host_bandwidth"] < before


def test_planner_skips_load_computed_within_running_step():
    """A load among others can be used when their step is over, however soon it has arrived."""
    planner = taught()
    step = planner.step_seconds()
    assert step == pytest.approx(h200_step([], 32), rel=0.2)
    few, many = 128, 8192  # 3 ms and 210 ms
    for tokens, reason in ((few, p.SHORT), (many, p.FASTER)):
        decision = planner.decide("store", 0, tokens, tokens * KV, tokens + 1, step)
        assert (decision.reason, decision.should_load) == (reason, reason == p.FASTER)
    assert decide(planner, many).should_load and LoadPlanner({}, Clock()).step_seconds() == 0
    for _ in range(2 * p.PROBE_EVERY):  # its source is not found slow by that
        assert planner.decide("store", 0, few, few * KV, few + 1, step).reason == p.SHORT


def test_lookup_skipped_if_compute_beats_shortest_load():
    clock = Clock()
    planner = taught(clock, known=1)
    assert not planner.cannot_beat_compute(0, 100, 101), "what a load takes is not known"
    load_some(planner, clock, 0.012)
    few, many = 200, 2000  # tokens: 5 and 46 ms
    answers = [planner.cannot_beat_compute(0, few, few + 1) for _ in range(2 * p.PROBE_EVERY)]
    assert answers.count(False) == 2, "a source may have become faster"
    assert not any(planner.cannot_beat_compute(0, many, many + 1) for _ in range(2 * p.PROBE_EVERY))
    assert decide(planner, few).reason == p.PROBE, "what is offered then is tried"
    assert not decide(planner, few).should_load and decide(planner, many).should_load, "as ``decide`` decides later"


def test_planner_delay_by_other_steps_is_learned_and_decays():
    """A load of 2 ms that is of use three steps later is no gain where computing takes less than that."""
    clock = Clock()
    planner = taught(clock)
    step = planner.step_seconds()
    assert planner.handover_seconds() == pytest.approx(step), "one step, until more is known"
    tokens = int(2.5 * step / 2.3e-5)
    ask = ("store", 0, tokens, tokens * KV, tokens + 1)
    load_seconds = planner.decide(*ask).load_seconds
    assert planner.decide(*ask, planner.handover_seconds()).should_load
    for _ in range(20):
        planner.observe_handover(3 * step)
    assert planner.handover_seconds() == pytest.approx(3 * step, rel=0.1)
    decision = planner.decide(*ask, planner.handover_seconds())
    assert (decision.should_load, decision.reason) == (False, p.SHORT)
    assert planner.decide(*ask).should_load and decision.load_seconds == load_seconds, "alone it is of use at once"
    clock.now += 3600
    assert planner.handover_seconds() == pytest.approx(step, rel=0.1), "it may have changed"
    for seconds in (-1.0, float("nan"), float("inf")):
        planner.observe_handover(seconds)
    assert planner.handover_seconds() == pytest.approx(step, rel=0.1)


def test_lookup_skipped_if_computed_within_running_step():
    clock = Clock()
    planner = taught(clock, known=1)
    load_some(planner, clock, 0.002)
    tokens = 400  # 9 ms
    assert not planner.cannot_beat_compute(0, tokens, tokens + 1, False)
    assert planner.cannot_beat_compute(0, tokens, tokens + 1, False, 0.01)


def test_planner_single_slow_handover_changes_little():
    clock = Clock()
    planner = taught(clock)
    step = planner.step_seconds()
    for _ in range(8):
        planner.observe_handover(2 * step)
    before = planner.handover_seconds()
    planner.observe_handover(2.0)
    assert planner.handover_seconds() < 1.3 * before
    for _ in range(8):
        planner.observe_handover(2.0)
    assert planner.handover_seconds() > 8 * before, "what lasts is followed"


def test_planner_probe_lookup_is_loaded():
    """Though others' steps make it late: nothing else would show that they do no more."""
    clock = Clock()
    planner = taught(clock, known=1)
    load_some(planner, clock, 0.002)
    for _ in range(20):
        planner.observe_handover(0.1)
    tokens, tried = 1000, 0  # 23 ms
    for _ in range(4 * p.PROBE_EVERY):
        if not planner.cannot_beat_compute(0, tokens, tokens + 1, True, planner.handover_seconds()):
            decision = planner.decide("store", 0, tokens, tokens * KV, tokens + 1, planner.handover_seconds())
            assert decision.should_load and decision.reason == p.PROBE
            tried += 1
    assert tried == 4


def test_planner_fits_steps_when_idle_or_before_a_decision(monkeypatch):
    """Not in ``observe_step``: vLLM has not sent the step's tokens then."""
    fits, planner = [], taught()
    ask, solve = planner.compute_seconds, cost_model._least_squares
    before = ask(0, 2048, 2049)
    monkeypatch.setattr(cost_model, "_least_squares", lambda equations: fits.append(1) or solve(equations))
    for wait in (planner.fit_steps, lambda: ask(0, 2048, 2049), planner.step_seconds):
        wait()
        fits.clear()
        for _ in range(4):
            planner.observe_step(2 * h200_step([(2048, 0)], 2), [(2048, 0)], 2)
            if planner._steps.fit_due:
                break
        assert planner._steps.fit_due and not fits
        wait()
        assert fits == [1]
        wait()
        assert fits == [1]
    assert ask(0, 2048, 2049) != before


# -- many at once ------------------------------------------------------------------------------------------------------


def burst(planner: LoadPlanner, count: int, tokens: int = 2048, bandwidth: float = 50 * GB) -> tuple[float, float]:
    """Prompts that come at once and are all in the store: seconds that loading and computing will take."""
    loading = computing = 0.0
    for number in range(count):
        decision = planner.decide("store", 0, tokens, tokens * KV, tokens + 1, planner.handover_seconds())
        if decision.should_load:
            planner.started("store", tokens * KV)
            loading += tokens * KV / bandwidth
        else:
            planner.will_compute(str(number), 0, tokens + 1)
            computing += h200_step([(tokens, 0)]) - h200_step([])
    return loading, computing


def test_planner_burst_is_divided_between_load_and_compute():
    """Not: as many as the link moves while one is computed, and then all others computed one behind the other."""
    loading, computing = burst(taught(), 24)
    alone = 24 * (h200_step([(2048, 0)]) - h200_step([]))
    assert computing < alone / 6 and max(loading, computing) < 1.2 * 24 * 2048 * KV / (50 * GB)


def test_planner_burst_from_fast_link_is_loaded():
    """Each load that ends while one is computed would wait for that."""
    assert burst(taught(), 24)[1] == 0.0
    planner = taught()
    for _ in range(4):
        planner.started("store", 32_768 * KV)  # of 97 ms each
    assert not planner.decide("store", 0, 2048, 3 * 2048 * KV, 2049).should_load, "half of one ends meanwhile"


def test_planner_burst_with_slow_link_computes_most():
    clock = Clock()
    planner = taught(clock, known=1)
    for _ in range(8):
        load(planner, clock, 1 << 30, (1 << 30) / (2 * GB))
    loading, computing = burst(planner, 24, bandwidth=2 * GB)
    alone = 24 * (h200_step([(2048, 0)]) - h200_step([]))
    assert 0.5 * alone < computing and loading < alone


def test_planner_backlog_excludes_scheduled_and_ended_requests():
    planner, tokens = taught(), 512
    ask = ("store", 0, tokens, 25 * tokens * KV, tokens + 1)  # 38 ms to load, 12 ms to compute
    assert not planner.decide(*ask).should_load
    planner.will_compute("other", 0, 8192)
    assert planner.decide(*ask).should_load, "it would be computed behind that"
    planner.computes("other", 8000)
    assert not planner.decide(*ask).should_load
    planner.will_compute("other", 0, 8192)
    planner.remove_request("other")
    assert not planner.decide(*ask).should_load, "it ended"


def test_planner_backlog_returns_to_zero():
    planner, rng = taught(), random.Random("queue")
    for number in range(2000):
        request, prompt = str(number), rng.randrange(1, 40_000)
        planner.will_compute(request, 0, prompt)
        planner.will_compute(request, at := rng.randrange(prompt), prompt)  # matched again, with a hit of its own
        while at < prompt and rng.random() < 0.9:
            planner.computes(request, at := min(prompt, at + 8192))
            planner.observe_step(h200_step([(8192, at)]) * rng.uniform(0.5, 2), [(8192, at)], 0)  # costs change
        if at < prompt:
            planner.remove_request(request)
    assert planner._backlog == 0.0 and not planner.to_compute


def test_planner_backlog_excludes_small_remainders():
    """Requests generate for long after a step has computed it, which is too small to count."""
    planner = taught()
    for number in range(256):
        planner.will_compute(str(number), 2032, 2048)
        planner.will_compute(f"the most of these {number}", 2048 - 32, 2048)
        planner.will_compute(f"long {number}", 0, 2048)
        planner.computes(f"long {number}", 2040)
    assert planner._backlog == 0.0 and not planner.to_compute


def test_planner_load_time_is_bounded_with_any_backlog():
    planner, tokens = taught(), 2048
    seconds = planner.compute_seconds(0, tokens, tokens + 1)
    for number in range(1000):
        planner.will_compute(str(number), 0, 32_768)
    slow = 2 * (1 + p.MAX_BACKLOG_FACTOR) * seconds * 50 * GB
    assert not planner.decide("store", 0, tokens, int(slow), tokens + 1).should_load
