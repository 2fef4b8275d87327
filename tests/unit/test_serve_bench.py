"""benchmarks/serve: that its times, limits and prompts are right, on servers whose delays and faults are known."""

import argparse
import asyncio
import json
import random
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from serve_fakes import FakeServer

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from serve import client, report, sources, stats
from serve.conversations import Conversation, Shape, Turn, synthetic
from serve.floor import FloorServer
from serve.lengths import Lengths
from serve.load import Form, Limits, Load, Record
from serve.meters import Meters
from serve.targets import policy, targets_of

FORM = Form("fake")


def talk(number: int, turns: int, output: int = 3, asks: int = 4, due: float | None = None) -> Conversation:
    new = [[1000 * number + 10 * turn + i for i in range(asks)] for turn in range(turns)]
    return Conversation(number, [7, 8, 9], [Turn(n, output, due) for n in new])


async def play(servers, conversations, limits=None, choose="round-robin", form=FORM, timeout=20.0, ranks=1):
    """The load that was played."""
    targets = targets_of([server.url for server in servers], ranks)
    load = Load(conversations, targets, policy(choose, len(targets), 0), limits or Limits(4), form)
    async with client.new_session(timeout) as session:
        await load.play(session)
    return load


# -- times ---------------------------------------------------------------------------------------------------------


class Clocked:
    """A response whose pieces arrive at given times."""

    def __init__(self, clock, pieces: list[tuple[float, bytes]]):
        self.content, self._clock, self._pieces = self, clock, pieces

    async def iter_any(self):
        for at, piece in self._pieces:
            self._clock.now = at
            yield piece


def event(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


async def read(monkeypatch, pieces: list[tuple[float, bytes]]) -> client.Reply:
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(client.time, "perf_counter", lambda: clock.now)
    reply = client.Reply(client.time.perf_counter())
    await client._read(Clocked(clock, pieces), reply, "somewhere")
    monkeypatch.undo()
    return reply


def choice(*ids: int) -> bytes:
    return event(choices=[{"text": "t", "token_ids": list(ids)}])


COUNTED = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
USAGE = event(choices=[], usage=COUNTED)
DONE = b"data: [DONE]\n\n"


async def test_serve_stream_times_are_exact(monkeypatch):
    reply = await read(
        monkeypatch,
        [(10.25, choice(1)), (10.35, choice(2, 3)), (10.75, choice(4)), (10.85, choice(5)), (11.9, USAGE + DONE)],
    )
    assert reply.error == ""
    assert reply.ttft == pytest.approx(0.25)
    assert reply.latency == pytest.approx(0.85), "until the last token, not until the stream's end"
    assert reply.itl == pytest.approx((0.85 - 0.25) / 4)
    assert reply.longest_gap == pytest.approx(0.4)
    assert reply.token_ids == [1, 2, 3, 4, 5]
    assert (reply.prompt_tokens, reply.output_tokens, reply.cached_tokens) == (9, 5, 4)


async def test_serve_event_time_is_that_of_its_first_byte(monkeypatch):
    """The first one may be long: vLLM sends the prompt's ids with it."""
    whole = event(choices=[{"text": "t", "token_ids": [1], "prompt_token_ids": list(range(5000))}])
    rest = whole[9000:] + choice(2) + DONE
    pieces = [(10.1, b": ping\n\n"), (10.5, whole[:100]), (10.6, whole[100:9000]), (10.9, rest)]
    reply = await read(monkeypatch, pieces)
    assert (reply.ttft, reply.latency) == (pytest.approx(0.5), pytest.approx(0.9))
    assert reply.token_ids == [1, 2] and reply.output_tokens == 2, "counted where the server does not say"


@pytest.mark.parametrize(
    "pieces, error",
    [
        ([choice(1), choice(2)], "broke its stream off after 2 tokens"),
        ([USAGE, DONE], "without a token"),
        ([choice(1), event(error={"message": "died"}), DONE], "died"),
    ],
)
async def test_serve_invalid_answers_are_failures(monkeypatch, pieces, error):
    reply = await read(monkeypatch, [(10.1 + i, piece) for i, piece in enumerate(pieces)])
    assert error in reply.error


async def test_serve_times_on_a_real_server():
    async with FakeServer(computed=0.15, itl=0.03) as server:
        began = time.perf_counter()
        load = await play([server], [talk(0, 1, output=6)])
        seconds = time.perf_counter() - began
    (record,) = load.records
    assert record.ttft >= 0.15 and record.itl >= 0.03 and record.longest_gap >= 0.03
    assert record.latency == pytest.approx(record.ttft + 5 * record.itl) and record.latency < seconds
    assert (record.prompt_tokens, record.output_tokens) == (7, 6)


async def test_serve_floor_server_answers_at_its_times():
    floor = await FloorServer(ttft=0.1, itl=0.02).start()
    try:
        fake = SimpleNamespace(url=f"http://127.0.0.1:{floor.port}")
        for form in (FORM, Form("fake", chat=True)):
            for _ in range(20):  # on a busy machine some are late
                (record,) = (await play([fake], [talk(0, 1, output=11)], form=form)).records
                assert not record.error and record.output_tokens == 11 and record.ttft >= 0.1
                if record.ttft < 0.4 and record.itl == pytest.approx(0.02, abs=0.015):
                    break
            else:
                raise AssertionError(record)
    finally:
        await floor.stop()


def test_serve_percentiles_equal_numpy():
    values = [random.Random(3).lognormvariate(0, 1) for _ in range(37)]
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        assert stats.percentile(values, share) == pytest.approx(np.percentile(values, share * 100))
    assert stats.percentile([4.0], 0.99) == 4.0
    assert stats.milliseconds([0.001, None, 0.003])["p50"] == 2.0
    assert stats.milliseconds([None]) is None


def test_serve_summary_of_records():
    moved = (None, True, False, True)
    good = [Record(0, t, 0, moved[t], 0, 0, 100, 11, 0.1 * (t + 1), 1.1, 0.1, 0.2) for t in range(4)]
    bad = Record(1, 0, 0, None, 0, 0, 100, 0, error="answered 500")
    got = stats.summary([*good, bad], seconds=2.0)
    assert (got["requests"], got["errors"], got["error_kinds"]) == (4, 1, {"answered 500": 1})
    assert got["ttft_ms"]["p50"] == pytest.approx(250) and got["ttft_ms"]["max"] == pytest.approx(400)
    assert got["ttft_moved_ms"]["p50"] == pytest.approx(300) and got["ttft_stayed_ms"]["p50"] == pytest.approx(300)
    assert (got["requests_per_s"], got["output_tokens_per_s"], got["total_tokens_per_s"]) == (2.0, 22.0, 222.0)
    assert [turn["ttft_ms"]["p50"] for turn in got["turns"]] == pytest.approx([100, 200, 300, 400])


def test_serve_counts_turns_with_cached_history():
    cases = [  # moved, tokens of earlier turns, cached, seconds
        (True, 1000, 1008, 0.1), (True, 1000, 896, 0.5), (True, 1000, None, 0.6), (False, 1000, 992, 0.2),
        (False, 1000, 0, 0.7), (None, 0, 960, 0.8),
    ]  # fmt: skip
    records = [
        Record(n, 1, 0, moved, 0, 0, 1100, 2, ttft, cached_tokens=cached, history=history)
        for n, (moved, history, cached, ttft) in enumerate(cases)
    ]
    got = stats.summary(records, 1.0)
    assert got["ttft_moved_found_ms"]["max"] == pytest.approx(100)
    assert got["ttft_stayed_found_ms"]["max"] == pytest.approx(200)
    assert stats.summary(records[1:3], 1.0)["ttft_moved_found_ms"] is None


def test_serve_report_names_slower_cores():
    def one(variant, name, us):
        return {"variant": variant, "pass": name, "round": 0, "client": {"core_us": us and {"p50": us}}}

    passes = [one("off", "cold", 100.0), one("on", "cold", 145.0), one("on", "warm", 105.0), one("off", "warm", None)]
    said = report.uneven_cores(passes)
    assert "on, cold, round 1 +45%" in said and "warm" not in said
    assert report.uneven_cores(passes[:1]) == report.uneven_cores(passes[3:]) == ""


async def test_serve_turn_history_is_the_messages_before():
    async with FakeServer() as server:
        load = await play([server], [talk(0, 3)], Limits(concurrency=1))
    before = 0
    for record in load.records:
        assert record.history == before
        before = record.prompt_tokens + record.output_tokens


async def test_serve_measures_core_speed():
    async with Meters() as meters:
        await asyncio.sleep(0.05)
    assert 1 < meters.result()["core_us"]["p50"] < 1e5


# -- limits --------------------------------------------------------------------------------------------------------


async def test_serve_concurrency_is_reached_and_kept():
    async with FakeServer(computed=0.02) as server:
        load = await play([server], [talk(n, 3) for n in range(9)], Limits(concurrency=4))
    assert server.most_in_flight == 4
    assert len(load.records) == 27 and not any(r.error for r in load.records)


async def test_serve_active_conversations_alternate():
    async with FakeServer() as server:
        await play([server], [talk(n, 2) for n in range(5)], Limits(concurrency=1, active=3))
    begun = [body["prompt"][3] // 1000 for body in server.bodies]
    assert begun == [0, 1, 2, 0, 3, 1, 4, 2, 3, 4], "always three, and the longest waiting is next"


async def test_serve_single_client_finishes_its_conversation_first():
    async with FakeServer() as server:
        await play([server], [talk(n, 2) for n in range(3)], Limits(concurrency=1))
    assert [body["prompt"][3] // 1000 for body in server.bodies] == [0, 0, 1, 1, 2, 2]


async def test_serve_rate_is_independent_of_answer_times():
    async with FakeServer(computed=0.4) as server:
        load = await play([server], [talk(n, 1) for n in range(40)], Limits(concurrency=100, rate=80.0))
    rng, due, expected = random.Random("0 arrivals"), 0.0, []
    for _ in range(40):
        due += rng.expovariate(80.0)
        expected.append(due)
    starts = sorted(r.start - r.late for r in load.records)
    assert starts == pytest.approx(expected, abs=0.002), "a Poisson process, whose times do not drift"
    assert server.most_in_flight > 10, "no request waited for an answer"


async def test_serve_rate_with_concurrency_limit_reports_lateness():
    async with FakeServer(computed=0.05) as server:
        load = await play([server], [talk(n, 1) for n in range(20)], Limits(concurrency=2, rate=1000.0))
    assert server.most_in_flight == 2
    assert max(r.late for r in load.records) > 0.3, "twenty, two at a time, 50 ms each"


async def test_serve_rate_sends_turns_in_order():
    async with FakeServer(computed=0.01) as server:
        load = await play([server], [talk(n, 4) for n in range(5)], Limits(concurrency=9, rate=300.0))
    assert len(load.records) == 20
    for number in range(5):
        assert [r.turn for r in load.records if r.conversation == number] == [0, 1, 2, 3]


async def test_serve_duration_ends_a_pass():
    async with FakeServer(computed=0.1) as server:
        load = await play([server], [talk(n, 3) for n in range(50)], Limits(concurrency=2, seconds=0.35))
    assert 2 <= len(load.records) <= 8
    assert len(load.records) + load.left_out == 150
    assert not any(r.error for r in load.records), "those under way are waited for"


async def test_serve_trace_is_sent_at_its_times():
    said = [talk(n, 1, due=due) for n, due in enumerate((0.2, 0.0, 0.1))]
    async with FakeServer() as server:
        load = await play([server], said)
    assert [r.conversation for r in load.records] == [1, 2, 0]
    assert [r.start - r.late for r in load.records] == pytest.approx([0.0, 0.1, 0.2], abs=0.002)


# -- what is asked, and where --------------------------------------------------------------------------------------


async def test_serve_history_grows_with_answers():
    said = talk(1, 3)
    async with FakeServer() as server:
        await play([server], [said])
    prompts = [body["prompt"] for body in server.bodies]
    new = [turn.new for turn in said.turns]
    assert prompts[0] == [7, 8, 9, *new[0]]
    assert prompts[1] == [*prompts[0], 5000, 5001, 5002, *new[1]]
    assert prompts[2] == [*prompts[1], 5003, 5004, 5005, *new[2]]
    assert {body["max_tokens"] for body in server.bodies} == {3} and server.bodies[0]["ignore_eos"] is True


async def test_serve_replayed_conversation_repeats_its_prompts():
    said = talk(1, 3)
    async with FakeServer() as server:
        await play([server], [said])
        first = [body["prompt"] for body in server.bodies]
        await play([server], [said])
        again = [body["prompt"] for body in server.bodies[3:]]
        await play([server], [said.unplayed()])
        other = [body["prompt"] for body in server.bodies[6:]]
    assert again == first
    assert other != first and other[0] == first[0]


async def test_serve_server_without_token_ids_is_supported():
    said = talk(1, 2)
    async with FakeServer(says_tokens=False) as server:
        await play([server], [said])
        await play([server], [said])
    prompts = [body["prompt"] for body in server.bodies]
    assert len(prompts[1]) == len(prompts[0]) + 3 + 4
    assert prompts[2:] == prompts[:2]


async def test_serve_chat_history_grows():
    async with FakeServer() as server:
        load = await play([server], [talk(0, 2)], form=Form("fake", chat=True, body={"seed": 1}, headers={"X-A": "b"}))
    first, second = (body["messages"] for body in server.bodies)
    assert [m["role"] for m in second] == ["system", "user", "assistant", "user"]
    assert second[:2] == first and second[2]["content"] == "<5000><5001><5002>"
    assert server.bodies[0]["seed"] == 1 and server.headers[0]["x-a"] == "b"
    assert load.records[0].output_tokens == 3


@pytest.mark.parametrize("fault, words", [(500, "answered 500: .*out of order"), ("break", "after 2 tokens"),
                                          ("error", "the engine died"), ("hang", "Timeout")])  # fmt: skip
async def test_serve_failed_request_is_counted_and_others_continue(fault, words):
    async with FakeServer() as server:
        server.faults = {1: fault}
        load = await play([server], [talk(n, 3) for n in range(4)], Limits(1), timeout=0.5)
    failed = [r for r in load.records if r.error]
    assert len(failed) == 1 and failed[0].ttft is None
    assert (failed[0].conversation, failed[0].turn) == (0, 1)
    assert re.search(words, failed[0].error), failed[0].error
    assert len(load.records) == 11 and load.given_up == 1, "its third turn was given up, all others were asked"
    assert stats.summary(load.records, 1.0)["errors"] == 1


async def test_serve_unreachable_server_fails_each_conversation():
    load = await play([SimpleNamespace(url="http://127.0.0.1:1")], [talk(n, 2) for n in range(3)])
    assert [bool(r.error) for r in load.records] == [True] * 3 and load.given_up == 3


async def test_serve_hop_policy_moves_and_sticky_stays():
    async with FakeServer() as a, FakeServer() as b:
        hops = await play([a, b], [talk(n, 4) for n in range(2)], choose="hop")
        stays = await play([a, b], [talk(n, 4) for n in range(2)], choose="sticky")
    for number in range(2):
        mine = [r for r in hops.records if r.conversation == number]
        assert [r.target for r in mine] == [(number + turn) % 2 for turn in range(4)]
        assert [r.moved for r in mine] == [None, True, True, True]
        assert {r.target for r in stays.records if r.conversation == number} == {number}
    assert {r.moved for r in stays.records} == {None, False}


def test_serve_random_policy_is_deterministic():
    first, again = policy("random", 3, 5), policy("random", 3, 5)
    chosen = [first(c, t) for c in range(20) for t in range(20)]
    assert chosen == [again(c, t) for c in range(20) for t in range(20)] and set(chosen) == {0, 1, 2}


async def test_serve_ranks_are_sent_in_header():
    async with FakeServer() as server:
        await play([server], [talk(0, 4)], choose="hop", ranks=2)
    assert [headers["x-data-parallel-rank"] for headers in server.headers] == ["0", "1", "0", "1"]


def test_serve_synthetic_conversations_are_deterministic():
    shape = Shape(16, Lengths(3, 3), Lengths(2, 5), Lengths.parse("lognormal:mean=20,sigma=1,max=50"), Lengths(4, 9))
    few, many = synthetic(shape, 3, 7, 5000), synthetic(shape, 30, 7, 5000)
    assert few == many[:3], "more of them leave the first as they are"
    assert synthetic(shape, 3, 8, 5000) != few
    assert len({tuple(c.opening[:16]) for c in many}) == 1 and len({tuple(c.opening) for c in many}) == 30
    for one in many:
        assert 2 <= len(one.turns) <= 5 and len(one.opening) == 19
        assert all(1 <= len(t.new) <= 50 and 4 <= t.output <= 9 for t in one.turns)
        assert all(1000 <= token < 5000 for t in one.turns for token in t.new)
    cut = synthetic(Shape(16, Lengths(0, 0), Lengths(9, 9), Lengths(10, 10), Lengths(10, 10), 100), 1, 7, 5000)
    assert len(cut[0].turns) == 4 and cut[0].tokens == 96
    with pytest.raises(ValueError, match="36 tokens after one turn"):
        synthetic(Shape(16, Lengths(0, 0), Lengths(9, 9), Lengths(10, 10), Lengths(10, 10), 30), 1, 7, 5000)


def test_serve_lengths_are_parsed():
    rng = random.Random(1)
    assert Lengths.parse("12").draw(rng) == 12
    assert {Lengths.parse("3-5").draw(rng) for _ in range(99)} == {3, 4, 5}
    wide = Lengths.parse("lognormal:mean=200,sigma=0.8")
    assert np.mean([wide.draw(rng) for _ in range(20000)]) == pytest.approx(200, rel=0.05)
    assert Lengths.parse(str(wide)) == wide
    for wrong in ("x", "5-3", "lognormal:mean=3", "lognormal:mean=3,sigma=1,most=4", "normal:mean=3,sigma=1", "-4"):
        with pytest.raises(argparse.ArgumentTypeError, match="lognormal|min <= max"):
            Lengths.parse(wrong)


# -- data sets -----------------------------------------------------------------------------------------------------


class Words:
    """A tokenizer: a token a word."""

    def __call__(self, text: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[len(word) for word in text.split()])


def test_serve_sharegpt_conversations_are_read_whole(tmp_path):
    said = [("human", "a bb"), ("gpt", "c"), ("gpt", "again"), ("human", "ddd"), ("gpt", "e f g"), ("human", "last")]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"conversations": [{"from": who, "value": text} for who, text in said]}]))
    (one,) = sources.from_sharegpt(path, Words(), 5, 10, 0, 0)
    assert [(turn.new, turn.output) for turn in one.turns] == [([1, 2], 1), ([3], 3)]
    (short,) = sources.from_sharegpt(path, Words(), 5, 1, 0, 0)
    assert len(short.turns) == 1
    path.write_text("[]")
    with pytest.raises(sources.NoData, match="no conversation"):
        sources.from_sharegpt(path, Words(), 5, 10, 0, 0)


def test_serve_vllm_data_sets_are_read(tmp_path, demo_model):
    pytest.importorskip("vllm.benchmarks.datasets.datasets")
    tokenizer = sources.tokenizer_of(str(demo_model))
    flags = "--dataset-name prefix_repetition --num-prompts 6 --prefix-repetition-num-prefixes 2 --seed 3"
    repeated = sources.from_vllm(flags, tokenizer)
    assert len(repeated) == 6 and all(len(c.turns) == 1 and c.turns[0].output == 128 for c in repeated)
    prefixes = {tuple(c.turns[0].new[:100]) for c in repeated}
    assert len(prefixes) == 2, "two prefixes, three requests each"
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 1000 * n, "input_length": 40, "output_length": 5, "hash_ids": [0, n, 9]} for n in (0, 1)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    flags = f"--dataset-name timed_trace --dataset-path {trace} --timed-trace-sec-multiplier 0.001"
    first, second = (c.turns[0] for c in sources.from_vllm(flags, tokenizer))
    assert (first.due, second.due) == (0.0, 1.0) and len(second.new) == 40 and second.output == 5
    assert first.new[:16] == second.new[:16] and first.new[16:32] != second.new[16:32]
