"""benchmarks/serve as a whole: variants, passes, probe, the engines' counters, and what is written and printed."""

import argparse
import asyncio
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from serve_fakes import BLOCK, FakeServer, Node

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from serve import client, counters, engines, options, picture, probe, report, run, stats, variants
from serve.control import Hands
from serve.engines import Needs, Running
from serve.load import Form, Record
from serve.passes import PassResult, Player
from serve.targets import targets_of
from serve.variants import Variant

SMALL = "--system 32 --input 20 --output 3 --turns 3 --conversations 4 --concurrency 2".split()
QUIET = Console(quiet=True)
LOCAL = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="fake",source="local_cache_hit"}'


async def command(*words: str) -> int:
    """The benchmark as from the command line, beside the fakes' event loop."""
    return await asyncio.to_thread(run.main, "doc", list(words))


# -- counters ------------------------------------------------------------------------------------------------------

METRICS = """# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 10.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 30.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 60.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="m",source="local_compute"} 7.0
vllm:kvtier_loaded_tokens_total{engine="0",kind="",model_name="m"} 4.8e+01
vllm:kvtier_pulled_tokens_total{engine="0",kind="peer",model_name="m"} 12.0
vllm:kvtier_fetched_tokens_total{engine="0",kind="",model_name="m"} 5.0
vllm:kvtier_pulled_tokens_created{engine="0",kind="peer",model_name="m"} 1.7e9
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 3.0
process_cpu_seconds_total 9.0
"""


def test_serve_counters_are_parsed_per_engine():
    both = counters.parse(METRICS, "a")
    assert set(both) == {"a", "a.1"}
    assert counters.tokens(both["a"]) == {
        "computed": 10, "local": 30, "external": 60, "hit_rate": 0.9, "loaded": 48, "pulled:peer": 12, "fetched": 5,
    }  # fmt: skip
    assert counters.tokens(both["a.1"]) == {"computed": 7, "local": 0, "external": 0, "hit_rate": 0.0}
    assert counters.parse(METRICS, "b", rank=1) == {"b": both["a.1"]}
    assert not any("created" in name or "bucket" in name for name in both["a"])
    assert counters.tokens(counters.total(both))["computed"] == 17


def test_serve_counters_are_differences():
    before = {"a": {"vllm:kvtier_pulls_total": 5.0, "vllm:generation_tokens_total": 9.0, "vllm:other_total": 1.0}}
    after = {"a": {"vllm:kvtier_pulls_total": 8.0, "vllm:generation_tokens_total": 2.0, "vllm:other_total": 4.0},
             "b": {"vllm:kvtier_pulls_total": 2.0}}  # fmt: skip
    assert counters.difference(before, after) == {
        "a": {"vllm:kvtier_pulls_total": 3.0, "vllm:generation_tokens_total": 2.0},  # the engine was started anew
        "b": {"vllm:kvtier_pulls_total": 2.0},
    }


async def test_serve_server_without_metrics_raises_with_url():
    async with client.new_session(5) as session:
        with pytest.raises(counters.NoMetrics, match="http://127.0.0.1:1/metrics"):
            await counters.read(session, targets_of(["http://127.0.0.1:1"]))


# -- variants and options ------------------------------------------------------------------------------------------


def test_serve_runs_variants():
    def named(text: str) -> Variant:
        return variants.named(text, {"codec": "int8"}, 8 << 30, 2)

    assert named("off=none") == Variant("off") and named("none").kv is None and named("x=null").kv is None
    ours = named('on={"codec": "raw", "pull_threshold": 3}')
    assert ours.is_ours and ours.name == "on"
    extra = ours.kv["kv_connector_extra_config"]
    assert (extra["codec"], extra["pull_threshold"], extra["store_size"]) == ("raw", 3, str(8 << 30))
    assert named("kvtier").kv["kv_connector_extra_config"]["codec"] == "int8"
    assert named("offloading").kv["kv_connector_extra_config"] == {"cpu_bytes_to_use": 4 << 30}
    assert named('n={"kv_connector": "NixlConnector"}').kv == {"kv_role": "kv_both", "kv_connector": "NixlConnector"}
    with_flags = named('f={"kv": "none", "args": ["--seed", 3], "env": {"A": 1}}')
    assert (with_flags.kv, with_flags.args, with_flags.env) == (None, ("--seed", "3"), {"A": "1"})
    assert named("a=http://x:1,http://x:2").urls == ("http://x:1", "http://x:2")
    for wrong in ("a=b", "a=[1]", 'a={"kv": "none", "flags": []}', "a=3"):
        with pytest.raises(argparse.ArgumentTypeError, match="none|connector|flags"):
            named(wrong)


@pytest.mark.parametrize(
    "words, error",
    [
        ("", "give --base-url"),
        ("--engines 2", "--engines needs --model"),
        ("--engines 2 --model nowhere", "no config.json"),
        ("--engines 3 --data-parallel 2 --model MODEL", "no whole number of servers"),
        ("--base-url http://x --compare a=none", "--compare name them there"),
        ("--base-url http://x --chat --sharegpt f", "token ids"),
        ("--base-url http://x --sharegpt f", "needs a tokenizer"),
        ("--base-url http://x --rounds 0", "at least 1"),
        ("--base-url http://x --header a", "NAME: VALUE"),
        ("--base-url http://x --input 5-3", "is no length|min <= max"),
    ],
)
def test_serve_conflicting_options_exit_with_message(words, error, demo_model, capsys):
    with pytest.raises(SystemExit):
        options.parse(words.replace("MODEL", str(demo_model)).split())
    assert re.search(error, capsys.readouterr().err)


def test_serve_work_computes_its_needs(demo_model, tmp_path):
    words = f"--model {demo_model} --engines 2 --rounds 3 --warmup 1 --probe 4000 --logs {tmp_path}"
    args = options.parse([*words.split(), *SMALL])
    work = options.Work(args)
    assert work.vocabulary == 2048
    needs = work.needs()
    assert needs == Needs(longest=4080, held=4080 + 1020, stored=4000 * 4, requests=2)
    assert len({tuple(work.fresh(n)[0].opening) for n in (-1, 0, 1, 2)}) == 4, "every round has its own"
    assert work.fresh(1) is work.fresh(1)
    assert engines.host_bytes(args, needs) == 1 << 30
    written = json.dumps(options.settings(args, needs, 1))
    assert str(demo_model.parent) not in written and str(tmp_path) not in written


def test_serve_engines_divide_the_gpus(demo_model, tmp_path):
    words = f"--model {demo_model} --engines 2 --gpus 4 5 --see-all-gpus --dummy --compare off=none on=kvtier"
    args = options.parse([*words.split(), "--engine-args", "--no-enforce-eager --seed 1", "--logs", str(tmp_path)])
    needs = Needs(1000, 5000, 5000, 32)
    made = engines._make(options.chosen(args, 1 << 30)[1], args, needs, demo_model)
    commands = [" ".join(engine.command) for engine in made.engines]
    assert [engine._env["CUDA_VISIBLE_DEVICES"] for engine in made.engines] == ["4,5", "5,4"]
    assert len({engine._env["XDG_RUNTIME_DIR"] for engine in made.engines}) == 1, "one store for both"
    for text in ("--kv-cache-memory-bytes", "--load-format dummy", "--max-num-seqs 32", "--no-enforce-eager --seed 1"):
        assert all(text in command for command in commands)
    assert all("--tensor-parallel-size" not in command and "--enforce-eager " not in command for command in commands)
    assert [target.base_url for target in made.targets] == [engine.base_url for engine in made.engines]
    made.stop()
    assert not made.runtime.exists()

    args.data_parallel, args.see_all_gpus = 2, False
    one = engines._make(Variant("dp"), args, needs, demo_model)
    (server,) = one.engines
    assert server._env["CUDA_VISIBLE_DEVICES"] == "4,5" and "--data-parallel-size 2" in " ".join(server.command)
    assert "--tensor-parallel-size" not in " ".join(server.command)
    assert [(t.base_url, t.rank) for t in one.targets] == [(server.base_url, 0), (server.base_url, 1)]
    one.stop()


# -- probe ---------------------------------------------------------------------------------------------------------

DELAYS = {"computed": 0.12, "local": 0.0, "peer": 0.03, "host": 0.07}


async def probed(servers: list[FakeServer], *lengths: int) -> list[dict]:
    async with client.new_session(10) as session:
        running = Running(Variant("v"), targets_of([server.url for server in servers]))
        player = Player(running, Hands(session, "fake", {}, 5000), Form("fake"))
        return await probe.probe([player], lengths, 3, 1, 5000, 0, session, QUIET)


async def test_serve_probe_distinguishes_where_a_prompt_is_cached():
    node = Node()
    async with FakeServer(node, **DELAYS) as a, FakeServer(node, **DELAYS) as b:
        rows = await probed([a, b], 4 * BLOCK)
    found = {row["kind"]: row for row in rows}
    assert list(found) == list(probe.KINDS)
    for kind, source in zip(probe.KINDS, DELAYS, strict=True):
        least = DELAYS[source] * 1000
        assert least <= found[kind]["median_ms"] < least + 100, kind
        assert found[kind]["n"] == 3
    # A few tokens after the blocks are computed each time; what only makes engines report is not counted.
    assert found["computed"]["sources"] == {"computed": 64 + probe.TAIL, "external": 0, "local": 0}
    assert found["same rank"]["sources"] == {"computed": probe.TAIL, "external": 0, "local": 64}
    assert found["cross rank"]["sources"] == {"computed": probe.TAIL, "external": 64, "fetched": 64, "local": 0}
    assert found["host"]["sources"] == {"computed": probe.TAIL, "external": 64, "loaded": 64, "local": 0}
    assert [list(row["served_by"]) for row in rows] == [["computed"], ["local"], ["fetched"], ["loaded"]]
    (verdict,) = probe.verdicts(rows)
    same = found["same rank"]["median_ms"]
    assert verdict["cross_rank"] == pytest.approx(found["cross rank"]["median_ms"] / same - 1, abs=1e-3)
    assert len(a.bodies) > 8 and len(b.bodies) > 8, "each is home in turn"


def test_serve_probe_groups_repetitions_by_source():
    fetched = {"computed": 8, "local": 0, "external": 64, "hit_rate": 0.9, "fetched": 64}
    loaded = {"computed": 8, "local": 16, "external": 48, "hit_rate": 0.9, "loaded:host": 48}
    unsaid = {"computed": 8, "local": 0, "external": 64, "hit_rate": 0.9}
    taken = probe._Taken([0.010, 0.040, 0.030, 0.090], [fetched, loaded, fetched, unsaid])
    row = probe._row("v", 64, "cross rank", taken)
    assert row["served_by"] == {
        "fetched": {"n": 2, "median_ms": 20.0}, "loaded:host": {"n": 1, "median_ms": 40.0},
        "external": {"n": 1, "median_ms": 90.0},
    }  # fmt: skip
    assert (row["median_ms"], row["sources"]["fetched"], row["sources"]["computed"]) == (35.0, 32, 8)


async def test_serve_probe_of_engine_without_reset_has_two_kinds():
    async with FakeServer(Node()) as server:
        server.resets = False
        rows = await probed([server], 2 * BLOCK)
    assert [row["kind"] for row in rows] == ["computed", "same rank"]


# -- passes, and all that is written -------------------------------------------------------------------------------


async def test_serve_command_compares_two_variants(tmp_path, capsys):
    node, out = Node(), tmp_path / "out" / "serve.json"
    slow = {"computed": 0.03}
    async with FakeServer(**slow) as off, FakeServer(node, **slow) as a, FakeServer(node, **slow) as b:
        words = [f"off={off.url}", f"on={a.url},{b.url}", "--rounds", "3", "--out", str(out), "--requests"]
        code = await command("--compare", *words, *SMALL, "--probe", "64", "--probe-repeats", "2")
        headers = off.headers
    assert code == 0
    data = json.loads(out.read_text())
    assert set(data) >= {"benchmark", "schema", "settings", "machine", "versions", "facts", "passes", "variants",
                         "compared", "probe", "probe_verdicts", "floor"}  # fmt: skip
    assert data["schema"] == report.SCHEMA and data["machine"]["cores"] and data["versions"]["aiohttp"]
    assert data["facts"]["on"] == {
        "vllm": "0.0.fake", "targets": 2, "kv_transfer_config": None, "args": [], "start_seconds": []
    }  # fmt: skip
    # Turn and turn about: round by round another begins, and the warm passes go the other way.
    order = [(p["round"], p["pass"], p["variant"]) for p in data["passes"]]
    assert order[:4] == [(0, "cold", "off"), (0, "cold", "on"), (0, "warm", "on"), (0, "warm", "off")]
    assert order[4:8] == [(1, "cold", "on"), (1, "cold", "off"), (1, "warm", "off"), (1, "warm", "on")]
    assert len(order) == 12
    for one in data["passes"]:
        assert (one["requests"], one["errors"], one["given_up"], one["left_out"]) == (12, 0, 0, 0)
        assert set(one["ttft_ms"]) == {"p50", "p90", "p99", "mean", "max"} and one["client"]["late_ms"]
        assert len(one["turns"]) == 3 and len(one["requests_rows"]) == 12
        assert one["tokens"]["hit_rate"] == pytest.approx(1 - one["tokens"]["computed"] / sum(
            one["tokens"][name] for name in ("computed", "local", "external")), abs=1e-4)  # fmt: skip
    by = {(v["variant"], v["pass"]): v for v in data["variants"]}
    assert by["on", "warm"]["requests"] == 36 and by["on", "warm"]["rounds"] == 3
    assert by["on", "warm"]["tokens"]["hit_rate"] > by["on", "cold"]["tokens"]["hit_rate"] > 0.3
    assert by["on", "cold"]["tokens"]["fetched"] > 0, "hop: the other engine had the turns before"
    assert by["on", "cold"]["ttft_moved_ms"] and by["off", "cold"]["ttft_stayed_ms"]
    (cold, warm) = data["compared"]
    assert (cold["variant"], cold["against"], cold["pass"], warm["pass"]) == ("on", "off", "cold", "warm")
    assert cold["rounds"] == 3 and len(cold["ttft_p50_90"]) == 2
    # The same conversations for both variants, others in each round.
    first = {tuple(body["prompt"][:40]) for body in off.bodies if len(body["prompt"]) == 52}
    assert first <= {tuple(body["prompt"][:40]) for body in (*a.bodies, *b.bodies)} and len(first) == 12
    assert all(h.get("x-data-parallel-rank") is None for h in headers)
    assert report.records_of(data)["on", "cold"][0].prompt_tokens == 52
    shown = capsys.readouterr().out
    for text in ("off, cold, round 1 of 3: 12 requests", "Against off", "One prompt at a time", "on, 64 tokens, aga"):
        assert text in shown


async def test_serve_errors_do_not_end_a_run(tmp_path, capsys):
    out = tmp_path / "serve.json"
    async with FakeServer() as server:
        server.faults = dict.fromkeys(range(2, 5), 500)
        words = ["--base-url", server.url, "--out", str(out), *SMALL, "--warmup", "0"]
        assert await command(*words) == 0
        cold, warm = json.loads(out.read_text())["passes"]
        assert (cold["errors"], warm["errors"], warm["requests"]) == (3, 0, 12)
        assert cold["requests"] + cold["errors"] + cold["given_up"] == 12
        assert "3 ERRORS, the first: http" in capsys.readouterr().out
        server.faults = dict.fromkeys(range(1000), 500)
        assert await command(*words) != 0, "nothing was answered"
    assert await command("--base-url", "http://127.0.0.1:1", *SMALL) == 2
    assert "http://127.0.0.1:1/v1/models" in capsys.readouterr().out


async def test_serve_reset_option_empties_caches_before_each_pass():
    async with FakeServer() as server:
        await command("--base-url", server.url, *SMALL, "--reset", "--passes", "3", "--policy", "sticky")
        hits = server.counts[LOCAL]
    async with FakeServer() as other:
        await command("--base-url", other.url, *SMALL, "--passes", "3", "--policy", "sticky")
        more = other.counts[LOCAL]
    assert 0 < hits < more


def passed(variant: str, number: int, ttft: float, name: str = "cold") -> PassResult:
    record = Record(0, 0, 0, None, 0.0, 0.0, 100, 11, ttft, ttft + 1.0, 0.1, 0.1)
    document = {"variant": variant, "round": number, "pass": name, **stats.summary([record], 2.0), "engines": {}}
    return PassResult(variant, number, name, [record], document)


def test_serve_variants_are_compared_round_by_round():
    results = [passed("off", n, t) for n, t in enumerate((1.0, 2.0, 4.0))]
    results += [passed("on", n, t) for n, t in enumerate((0.9, 1.6, 2.8))]
    (row,) = report.compared([*results, passed("on", 3, 9.0)])
    assert row["rounds"] == 3, "only rounds that both have played"
    assert row["ttft_p50"] == pytest.approx(-0.2) and row["total_tokens_per_s"] == 0
    assert row["ttft_p50_90"][0] >= -0.3 and row["ttft_p50_90"][1] <= -0.1
    assert report.compared(results[:3]) == [] == report.compared([])
    (alone, other) = report.pooled(results)
    assert (alone["requests"], alone["seconds"], other["ttft_ms"]["p50"]) == (3, 6.0, 1600.0)


def test_serve_writes_pictures(tmp_path):
    records = [Record(0, 0, 0, None, 0, 0, 1, 1, ttft) for ttft in (0.3, None, 0.1, 0.2)]
    assert picture.distribution(records) == ([100.0, 200.0, 300.0], pytest.approx([1 / 3, 2 / 3, 1.0]))
    pytest.importorskip("matplotlib")
    results = [passed("off", 0, 0.2), passed("on", 0, 0.1), passed("on", 0, 0.1, "warm")]
    rows = [{"variant": "on", "tokens": 64, "kind": kind, "median_ms": 2.0} for kind in probe.KINDS]
    data = {"variants": report.pooled(results), "probe": rows}
    path = tmp_path / "deep" / "serve.png"
    picture.draw(data, {(r.variant, r.name): r.records for r in results}, path)
    assert path.read_bytes().startswith(b"\x89PNG")


async def test_serve_sends_model_name_and_headers(tmp_path):
    async with FakeServer() as server:
        words = ["--base-url", server.url, "--ranks", "2", "--header", "Authorization: Bearer x", "--warmup", "0"]
        assert await command(*words, *SMALL, "--passes", "1", "--body", '{"cache_salt": "s"}') == 0
    assert {h["x-data-parallel-rank"] for h in server.headers} == {"0", "1"}
    assert {h["authorization"] for h in server.headers} == {"Bearer x"}
    generated = [body for body in server.bodies if body.get("cache_salt")]
    assert len(generated) == 12 and {body["model"] for body in generated} == {"fake"}


def test_serve_needs_without_load_are_those_of_probe():
    args = options.parse("--base-url http://x --probe 100 200 --no-load".split())
    needs = options.Work(args).needs()
    assert needs == replace(needs, longest=280, stored=200 * 4)
    assert options.Work(SimpleNamespace(**{**vars(args), "vocabulary": 77})).vocabulary == 77
