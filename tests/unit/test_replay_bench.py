"""benchmarks/replay: traces, agents, tiers of a connector, hits by tier, throughput at a p99, and a whole run."""

import argparse
import asyncio
import importlib.util
import json
import math
import os
import sys
from pathlib import Path

import pytest
from serve_fakes import FakeServer, Node

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from replay import capacity, connectors, hits, ideal, options, run, tables, trace, trim
from replay.agents import Agents
from replay.capacity import Capacity, Point
from replay.trace import Request
from serve.client import new_session
from serve.conversations import Conversation, Turn
from serve.engines import Running
from serve.lengths import Lengths
from serve.load import Form, Limits, Load
from serve.targets import targets_of

MODEL = ["--model", str(Path(__file__).parents[2] / "models" / "recall-6m")]
SMALL = "--lengths 0.0625 --longest 512 --cache-tokens 2624 --host-gib 0.01 --disk-gib 0.01 --pause 0".split()


# -- trace ---------------------------------------------------------------------------------------------------------


def line(ms: int, prompt: int, *ids: int, output: int = 10) -> str:
    return json.dumps({"timestamp": ms, "input_length": prompt, "output_length": output, "hash_ids": ids})


def test_trace_is_read_in_order_of_time(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join([line(5000, 700, 0, 2), line(3000, 600, 0, 1, output=0), ""]))
    assert trace.read(path) == [Request(0.0, 600, 1, (0, 1)), Request(2.0, 700, 10, (0, 2))]


@pytest.mark.parametrize("text, reason", [("", "has no request"), ('{"timestamp": 1}', "line 1"), ("x", "line 1")])
def test_trace_in_another_format_is_refused(tmp_path, text, reason):
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(trace.NoTrace, match=reason):
        trace.read(tmp_path / "t.jsonl")


def test_trace_sample_has_whole_sessions():
    # Id 0 is the system prompt of all; each session has three requests.
    begins = [100 * (i % 40) + 1 for i in range(120)]
    every = [Request(float(i), 1536, 5, (0, *range(n, n + 1 + i // 40))) for i, n in enumerate(begins)]
    assert [len(session) for session in trace.sessions(every)] == [3] * 40
    some = trace.sample(every, 10, seed=3)
    assert len(some) == 12 and some == sorted(some, key=lambda request: request.time)
    assert {len(session) for session in trace.sessions(every) if session[0] in some} == {3}
    assert trace.sample(every, 10, seed=3) == some != trace.sample(every, 10, seed=4)
    assert trace.sample(every, 1000, seed=3) == every


def test_trace_window_has_times_from_its_beginning():
    every = [Request(float(i), 512, 5, (i,)) for i in range(5)]
    assert [(request.time, request.ids) for request in trace.window(every, 2, 4)] == [(0.0, (2,)), (1.0, (3,))]


def test_trace_prompts_share_what_their_ids_share():
    requests = [Request(0.0, 1100, 40, (0, 1, 2)), Request(30.0, 1024, 40, (0, 1)), Request(60.0, 1500, 40, (0, 3, 4))]
    small = trace.scaled(requests, 0.25, longest=300)
    assert [(r.prompt, r.output, len(r.ids)) for r in small] == [(275, 10, 3), (256, 10, 2), (290, 10, 3)]
    made = trace.conversations(small, 0.25, rate=1.5, vocabulary=2048, salt="a")
    first, second, third = (conversation.turns[0] for conversation in made)
    assert second.new == first.new[:256] and third.new[:128] == first.new[:128]
    assert third.new[128:256] != first.new[128:256]
    assert [turn.due for turn in (first, second, third)] == [0.0, 1.0, 2.0]  # three requests at 1.5 a second
    assert trace.conversations(small, 0.25, 3.0, 2048, "a")[0].turns[0].new == first.new
    assert trace.conversations(small, 0.25, 3.0, 2048, "b")[0].turns[0].new != first.new


def test_trace_sample_in_the_tree_is_like_the_trace(tmp_path):
    every = trace.read(options.SAMPLE)
    facts = trace.facts(every)
    assert facts["requests"] == 802 and 0.3 < facts["reused"] < 0.42 and 11_000 < facts["prompt_mean"] < 13_000
    trace.write(every, tmp_path / "again.jsonl")
    assert trace.read(tmp_path / "again.jsonl") == every


# -- agents --------------------------------------------------------------------------------------------------------


def test_agents_share_a_system_prompt_and_grow_by_tool_output():
    agents = Agents(100, Lengths(20, 20), Lengths(30, 60), Lengths(5, 5), Lengths(4, 4), pause=2.0, longest=1000)
    two, again = agents.sessions(2, 2048, "a"), agents.sessions(3, 2048, "a")
    assert two == again[:2] and two[0].opening == two[1].opening and len(two[0].opening) == 100
    assert [len(session.turns) for session in two] == [4, 4] and two[0].turns[0].new != two[1].turns[0].new
    assert all(30 <= len(turn.new) <= 60 and turn.pause > 0 for turn in two[0].turns[1:])
    other = agents.sessions(2, 2048, "b")
    assert [len(t.new) for t in other[1].turns] == [len(t.new) for t in two[1].turns] and other[1] != two[1]


def test_agents_end_before_their_limit():
    agents = Agents(100, Lengths(20, 20), Lengths(50, 50), Lengths(5, 5), Lengths(9, 9), pause=0.0, longest=250)
    (session,) = agents.sessions(1, 2048, "a")
    assert session.tokens == 100 + 25 + 2 * 55
    with pytest.raises(ValueError, match="over the limit of 110"):
        Agents(100, Lengths(20, 20), Lengths(1, 1), Lengths(1, 1), Lengths(1, 1), 0.0, 110).sessions(1, 2048, "a")


async def test_agents_pause_before_their_next_prompt():
    turns = [Turn([1] * 32, 2), Turn([2] * 32, 2, pause=0.05), Turn([3] * 32, 2)]
    async with FakeServer() as server, new_session(5) as session:
        form, limits = Form("fake"), Limits(4)
        load = Load([Conversation(0, [], turns)], targets_of([server.url]), lambda *_: 0, limits, form)
        first, second, third = await load.play(session)
    # Later than it must be it may well be on a busy machine, but never earlier.
    assert second.start >= first.start + first.latency + 0.05
    assert third.prompt_tokens == 3 * 32 + 2 * 2


# -- tiers ---------------------------------------------------------------------------------------------------------


def test_lru_shares_split_by_tier():
    prompts = [[("a", 10), ("b", 10)], [("c", 10), ("d", 10)], [("a", 10), ("b", 10)], [("a", 10), ("x", 10)]]
    assert ideal.shares(prompts, gpu=20, memory=20) == {"gpu": 0.125, "memory": 0.25, "computed": 0.625}
    assert ideal.shares(prompts, gpu=10, memory=0) == {"gpu": 0.125, "memory": 0.0, "computed": 0.875}
    assert ideal.shares([], gpu=1) == {"gpu": 0.0, "computed": 1.0}


def test_lru_prompts_of_sessions_hold_their_histories():
    agents = Agents(64, Lengths(64, 64), Lengths(32, 32), Lengths(32, 32), Lengths(3, 3), 0.0, 999)
    (session,) = agents.sessions(1, 99, "a")
    first, second, third = ideal.prompts_of([session], block=32)
    assert [len(prompt) for prompt in (first, second, third)] == [4, 6, 8]
    assert second[:4] == first and third[:6] == second


def sizes(folder: Path, disk: int = 1 << 30) -> connectors.Sizes:
    return connectors.Sizes(2 << 30, disk, folder)


def test_replay_connectors_have_the_same_memory_and_disk(tmp_path):
    names = "none", "kvtier", "offloading", "lmcache"
    none, ours, theirs, cache = (connectors.named(name, sizes(tmp_path)) for name in names)
    options = ours.kv["kv_connector_extra_config"]
    assert none.kv is None and [connectors.store_bytes(v) for v in (none, ours, theirs, cache)] == [0, 2 << 30, 0, 0]
    assert (options["store_disk_path"], options["store_disk_size"]) == (str(tmp_path), str(1 << 30))
    assert theirs.kv["kv_connector_extra_config"] == {
        "cpu_bytes_to_use": 2 << 30, "spec_name": "TieringOffloadingSpec",
        "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path)}],
    }  # fmt: skip
    assert cache.env["LMCACHE_MAX_LOCAL_CPU_SIZE"] == "2.0" and cache.env["LMCACHE_MAX_LOCAL_DISK_SIZE"] == "1.0"
    assert [connectors.unlimited_folders(v) for v in (none, ours, theirs, cache)] == [[], [], [str(tmp_path)], []]


def test_replay_connectors_without_disk_name_none(tmp_path):
    for name in ("kvtier", "offloading", "lmcache"):
        variant = connectors.named(name, sizes(tmp_path, disk=0))
        assert str(tmp_path) not in json.dumps([variant.kv, variant.env])
    assert str(tmp_path) not in json.dumps(connectors.named("memory", sizes(tmp_path)).kv)


def test_replay_connectors_take_options_and_whole_configurations(tmp_path):
    ours = connectors.named('fp8={"codec": "fp8"}', sizes(tmp_path))
    assert ours.name == "fp8" and ours.kv["kv_connector_extra_config"]["codec"] == "fp8"
    assert connectors.store_bytes(ours) == 2 << 30
    assert connectors.store_bytes(connectors.named('x={"store": "off"}', sizes(tmp_path))) == 0
    other = connectors.named('x={"kv_connector": "NixlConnector"}', sizes(tmp_path))
    assert other.kv == {"kv_role": "kv_both", "kv_connector": "NixlConnector"}
    for wrong in ("kvtiers", "x=[1]"):
        with pytest.raises(argparse.ArgumentTypeError):
            connectors.named(wrong, sizes(tmp_path))


def test_trim_deletes_the_oldest_blocks_alone(tmp_path):
    (tmp_path / "config.json").write_bytes(bytes(500))
    for i in range(10):
        path = tmp_path / str(i % 2) / f"{i}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(100))
        os.utime(path, (i, i))
    assert trim.trim(tmp_path, 1000) == 0
    assert trim.trim(tmp_path, 800) == 300  # down to 95 %
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"config.json", *(f"{i}.bin" for i in range(3, 10))}


# -- what is made of the counters ----------------------------------------------------------------------------------

SOURCE = 'vllm:prompt_tokens_by_source_total{source="%s"}'
VLLM = {SOURCE % "local_compute": 50.0, SOURCE % "local_cache_hit": 20.0}


def test_hits_of_ours_are_by_tier():
    tier = 'vllm:kvtier_prompt_tokens_total{kind="%s"}'
    found = hits.by_tier({
        **VLLM, SOURCE % "external_kv_transfer": 30.0, tier % "host": 20.0, tier % "secondary_tier": 10.0,
        tier % "local_compute": 50.0,
    }, 1)  # fmt: skip
    assert found == {"gpu": 20, "memory": 20, "disk": 10, "external": 0, "computed": 50, "hit_rate": 0.5}
    assert hits.shares(found) == {"gpu": 0.2, "memory": 0.2, "disk": 0.1, "external": 0.0, "computed": 0.5}


@pytest.mark.parametrize("read, disk", [(0.0, 0), (80.0, 8), (900.0, 30)])
def test_hits_of_the_fs_tier_are_what_it_read(read, disk):
    samples = {**VLLM, SOURCE % "external_kv_transfer": 30.0, "vllm:kv_offload_load_bytes_total": 1.0}
    samples['vllm:kv_offload_tiering_read_bytes_total{tier="fs"}'] = read
    found = hits.by_tier(samples, 10)
    assert (found["memory"], found["disk"], found["external"]) == (30 - disk, disk, 0)


def test_hits_without_counters_by_tier_are_external():
    assert hits.by_tier({**VLLM, SOURCE % "external_kv_transfer": 30.0}, 1)["external"] == 30
    assert hits.by_tier({}, 1)["hit_rate"] == 0.0


def test_capacity_is_interpolated_between_levels():
    points = [Point(2, 10.0, 1.8), Point(1, 0.1, 1.0)]
    assert capacity.at_p99(points, 1.0).throughput == pytest.approx(1.4)  # halfway from 0.1 to 10 s, by logarithm
    assert capacity.at_p99(points, 10.0) == Capacity(1.8, at_least=True)
    assert capacity.at_p99(points, 0.05) == Capacity(None)
    assert capacity.at_p99([], 1.0) == Capacity(None)


@pytest.mark.parametrize("after", [Point(2, None, 1.8), Point(2, 10.0, 0.9)])
def test_capacity_beyond_which_requests_fail_is_that_of_the_level_before(after):
    assert capacity.at_p99([Point(1, 0.1, 1.0), after], 1.0) == Capacity(1.0)


def test_capacity_has_no_ratio_to_a_variant_beyond_the_limit():
    def level(variant: str, p99: float, missed: int = 0) -> dict:
        return {"workload": "trace", "variant": variant, "offered": 4.0, "requests_per_s": 3.0, "left_out": missed,
                "ttft_ms": {"p99": p99}, "errors": 0, "given_up": 0}  # fmt: skip

    levels = [level("none", 1500.0), level("ours", 500.0), level("cut off", 10.0, missed=1)]
    data = {"levels": levels, "settings": {"p99": [1, 2]}}
    found = {(row["p99_s"], row["variant"]): (row["requests_per_s"], row["ratio"]) for row in tables.capacities(data)}
    assert found[1, "none"] == (None, None) and found[1, "ours"] == (3.0, None)
    assert found[2, "none"] == found[2, "ours"] == (3.0, 1.0) and found[2, "cut off"] == (None, None)


# -- a run ---------------------------------------------------------------------------------------------------------


def test_replay_options_that_do_not_fit_are_refused(capsys):
    for words, reason in (
        ([], "--model"), ([*MODEL, "--longest", "2000", "--cache-tokens", "4000"], "less than --longest"),
        ([*MODEL, "--rates", "0"], "above 0"),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            options.parse(words)
        assert reason in capsys.readouterr().err


def test_replay_plan_starts_nothing(capsys):
    words = "--plan --requests 8 --agents 2 --system 99 --task 40".split()
    assert run.main("doc", [*MODEL, *SMALL, *words]) == 0
    said = capsys.readouterr().out
    assert "trace, 4 requests/s: " in said and "agents, 2 sessions: 3 requests" in said and "LRU" in said


async def test_replay_variants_get_the_same_requests_and_are_compared(tmp_path, monkeypatch):
    out, plot = tmp_path / "r.json", tmp_path / "r.png"
    words = [*MODEL, *SMALL, "--requests", "6", "--rates", "200", "--agents", "2", "--turns", "3", "--task", "40"]
    words += ["--system", "48", "--tool", "32", "--answer", "3", "--compare", "none", "kvtier", "lmcache"]
    words += ["--dir", str(tmp_path), "--out", str(out), "--plot", str(plot)]
    async with FakeServer() as plain, FakeServer(Node()) as tiered:
        urls = {"none": plain.url, "kvtier": tiered.url}

        def start(variants, args, work):
            up = [Running(v, targets_of([urls[v.name]])) for v in variants if v.name in urls]
            return up, {"lmcache": "does not load"}

        async def usable(*_):
            pass

        monkeypatch.setattr(run, "_start", start)
        monkeypatch.setattr(run.Hands, "until_usable", usable)
        assert await asyncio.to_thread(run.main, "doc", words) == 0
        asked = [[body["prompt"] for body in server.bodies if body["max_tokens"] > 2] for server in (plain, tiered)]
    data = json.loads(out.read_text())
    assert [(row["workload"], row["variant"]) for row in data["levels"]] == [
        ("agents", "none"), ("agents", "kvtier"), ("trace", "kvtier"), ("trace", "none"),
    ]  # fmt: skip
    assert data["left_out"] == {"lmcache": "does not load"} and set(data["variants"]) == {"none", "kvtier"}
    count = data["loads"]["replayed"]["requests"]
    assert [row["requests"] for row in data["levels"]] == [6, 6, count, count]
    assert plot.exists() == bool(importlib.util.find_spec("matplotlib"))
    # The trace's prompts are the same to the token; those of agents hold the answers before them.
    ours, theirs = (sorted(map(tuple, prompts[3 + 6 : 3 + 6 + count])) for prompts in asked)
    assert ours == theirs and len(asked[0]) == len(asked[1])
    assert all(math.isclose(sum(row["hits"].values()), 1.0, abs_tol=1e-3) for row in data["levels"])
    assert all(row["hits"]["gpu"] > 0.4 for row in data["levels"] if row["workload"] == "agents")
    assert {(row["workload"], row["variant"]) for row in data["capacity"]} == {
        (load, name) for load in ("trace", "agents") for name in ("none", "kvtier")
    }
    assert str(tmp_path) not in json.dumps(data["settings"])
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []  # nothing is left on the disk
    assert run.main("doc", ["--draw", str(out)]) == 0
