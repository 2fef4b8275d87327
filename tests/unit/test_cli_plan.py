"""`kvtier plan`: sizes against what engines were seen to store, hits against brute force, break-even by arithmetic."""

import json
import lzma
import os
import random
import subprocess
import sys

import pytest
from doctor_fakes import METRICS, FakeServer, counter
from typer.testing import CliRunner

from vllm_kvtier.cli.__main__ import app
from vllm_kvtier.cli.plan import _measured
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.plan import model as models
from vllm_kvtier.plan import trace as traces
from vllm_kvtier.plan.pays import Link, Prefill, break_even, load_seconds, parse_rate
from vllm_kvtier.plan.replay import replay
from vllm_kvtier.store.memory.memory_limits import MemoryLimits
from vllm_kvtier.store.tiers.admission import admission
from vllm_kvtier.wire.slots import PAGE

LLAMA = {
    "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "torch_dtype": "bfloat16", "max_position_embeddings": 8192,
}  # fmt: skip


def config(**fields) -> models.Model:
    return models.from_config({**LLAMA, **fields}, "test")


# Blocks of 32 tokens in a pool of 981 pages, as real engines filled it (tests/engines/test_codecs.py; README, codecs).
@pytest.mark.parametrize(
    ("codec", "blocks"), [("raw", 20), ("int8", 39), ("fp8", 39), ("k8v4", 51), ("int4", 70), ("rot4", 75)]
)
def test_plan_tokens_in_store_equal_measured_engines(root, codec, blocks):
    model = models.read(str(root / "models" / "recall-6m"))
    found = models.footprint(model, codec, block_tokens=32)
    assert found.tokens_in_store(981 * PAGE) == blocks * 32
    assert found.gpu == 6 * 4 * (64 + 64) * 2


def test_plan_qwen3_8b_matches_known_sizes(root):
    """147,456 bytes a token, 2.25 MiB a block, a page more in the store."""
    model = models.read(str(root / "benchmarks" / "models" / "qwen3-8b-shapes" / "config.json"))
    found = models.footprint(model, "raw")
    assert found.gpu == found.logical == 147456 and found.pages == ((9 << 18) // PAGE + 1,)
    assert found.tokens_in_cache(147456 * 100) == 96


def test_plan_divides_heads_over_ranks():
    one, two, eight = (models.footprint(config(), "raw", n) for n in (1, 2, 8))
    assert one.gpu == 2 * two.gpu == 2 * eight.gpu, "heads are spread, and beyond that repeated"
    assert one.logical == two.logical == eight.logical and two.pages == eight.pages, "the store keeps each head once"
    with pytest.raises(KVTierError, match="2 KV heads cannot be spread over 3 ranks"):
        models.footprint(config(), "raw", 3)


def test_plan_mla_is_stored_once_for_all_ranks():
    deepseek = config(kv_lora_rank=512, qk_rope_head_dim=64)
    one, four = models.footprint(deepseek, "raw"), models.footprint(deepseek, "raw", 4)
    assert one.gpu == four.gpu == 4 * (512 + 64) * 2 and one.stored == four.stored
    assert models.footprint(deepseek, "fp8").loaded < 0.6 * one.loaded


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, [("full", 4, None)]),
        ({"sliding_window": 100, "use_sliding_window": False}, [("full", 4, None)]),
        ({"sliding_window": 100}, [("sliding", 4, 100)]),
        ({"sliding_window": 100, "sliding_window_pattern": 2}, [("sliding", 2, 100), ("full", 2, None)]),
        (
            {"sliding_window": 9, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
            [("sliding", 3, 9), ("full", 1, None)],
        ),
        ({"num_kv_shared_layers": 1}, [("full", 3, None)]),
        ({"kv_lora_rank": 64, "qk_rope_head_dim": 0}, [("mla", 4, None)]),
        ({"full_attention_interval": 2}, [("full", 2, None)]),
        ({"hybrid_override_pattern": "M-*E"}, [("full", 1, None)]),
        ({"layers_block_type": ["mamba", "moe", "attention", "mlp"]}, [("full", 1, None)]),
        ({"attn_layer_period": 3, "attn_layer_offset": 0}, [("full", 2, None)]),
        ({"attn_layer_indices": [3]}, [("full", 1, None)]),
        ({"full_attn_idxs": [0, 2, 3]}, [("full", 3, None)]),
        ({"attn_type_list": [0, 1, 0, 0]}, [("full", 1, None)]),
        (
            {"kv_lora_rank": 64, "qk_rope_head_dim": 0, "linear_attn_config": {"full_attn_layers": [4]}},
            [("mla", 1, None)],
        ),
        ({"sliding_window": 9, "model_type": "gemma2"}, [("sliding", 2, 9), ("full", 2, None)]),
        ({"sliding_window": 9, "sliding_window_pattern": "LLLG"}, [("sliding", 3, 9), ("full", 1, None)]),
        ({"layer_types": ["full_attention"] * 5}, [("full", 4, None)]),  # Step 3.5 has draft layers behind them
    ],
)
def test_plan_layers_are_grouped_by_kind(fields, layers):
    found = config(**fields)
    assert [(each.kind.name, each.count, each.kind.window) for each in found.layers] == layers


@pytest.mark.parametrize(("name", "layers", "nbytes"), [("qwen3-next", 12, 24576), ("nemotron-h", 2, 8192)])
def test_plan_counts_the_attention_layers_of_published_hybrids(root, name, layers, nbytes):
    """Neither has layer_types. The bytes are those that vLLM's caches of these shapes have."""
    model = models.read(str(root / "benchmarks" / "models" / f"{name}-shapes"))
    assert [each.count for each in model.layers] == [layers] and "keep states" in model.remarks[0]
    assert models.footprint(model, "raw").logical == nbytes


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({"num_kv_heads": 4, "new_decoder_architecture": True, "multi_query": True}, 4),  # Falcon 40B
        ({"num_kv_heads": 8, "multi_query": True}, 1),  # Falcon 7B
        ({"num_attention_groups": 2}, 2),  # Step 3.5
        ({"multi_query_group_num": 2}, 2),
        ({}, 8),
    ],
)
def test_plan_counts_kv_heads_however_the_model_names_them(fields, heads):
    assert config(num_key_value_heads=None, **fields).layers[0].heads == heads


def test_plan_reads_other_heads_of_layers_of_one_type():
    other = {"attention_type": "sliding_attention", "num_attention_groups": 4, "head_dim": 32}
    types = ["full_attention", "sliding_attention"] * 2
    found = config(
        num_key_value_heads=None, num_attention_groups=2, sliding_window=9, layer_types=types,
        attention_other_setting=other,
    )  # fmt: skip
    assert [(each.heads, each.fields[0].count) for each in found.layers] == [(2, 64), (4, 32)]


GEMMA_4 = {
    "num_key_value_heads": 16, "head_dim": 256, "sliding_window": 1024,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        # As on the hub, and as transformers 5 saves it.
        {"global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True},
        {"per_layer_config": {"3": {"head_dim": 512, "num_key_value_heads": 4}}},
    ],
)
def test_plan_reads_gemma_4_sizes_of_full_attention(fields):
    found = config(**GEMMA_4, **fields)
    sizes = [(each.kind.name, each.count, each.heads, each.fields[0].count) for each in found.layers]
    assert sizes == [("sliding", 3, 16, 256), ("full", 1, 4, 512)]
    assert models.footprint(found, "raw").gpu == 2 * 2 * (3 * 16 * 256 + 4 * 512)


def test_plan_gemma_4_without_shared_keys_and_values_has_the_same_heads_everywhere():
    found = config(**GEMMA_4, global_head_dim=512, num_global_key_value_heads=4, attention_k_eq_v=False)
    assert [(each.heads, each.fields[0].count) for each in found.layers] == [(16, 256), (16, 512)]


def test_plan_groups_layers_of_one_kind_by_their_sizes():
    found = config(per_layer_config={"1": {"num_key_value_heads": 1}, "3": {"num_key_value_heads": 1}})
    assert [(each.count, each.heads) for each in found.layers] == [(2, 2), (2, 1)]


def test_plan_reads_nested_text_config():
    assert models.from_config({"text_config": LLAMA, "dtype": "float16"}, "m").layers[0].heads == 2


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": None}, "bfloat16"),
        ({"quant_method": "fp8"}, "bfloat16"),
        (None, "bfloat16"),
    ],
)
def test_kv_dtype_is_that_of_vllms_auto(quantization, expected):
    """A checkpoint in float32 is served in half of it, and one may say that its cache is quantized."""
    config = {**LLAMA, "torch_dtype": "float32", "quantization_config": quantization}
    assert models.from_config(config, "m").dtype == expected
    assert models.from_config(config, "m", "float16").dtype == "float16"


def test_plan_hybrid_model_has_remark():
    found = config(layer_types=["linear_attention"] * 3 + ["full_attention"])
    assert found.layers[0].count == 1 and "3 of 4 layers keep states" in found.remarks[0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": None, "layer_types": ["odd"]}, "layers of type odd"),
        ({"torch_dtype": "int3"}, "a KV cache of int3"),
        ({"layer_types": ["mamba"] * 4}, "none of its layers"),
        ({"layer_types": ["attention"] * 3}, "layer_types does not say what its 4 layers are"),
        ({"hybrid_override_pattern": "M?*-"}, "hybrid_override_pattern does not say"),
        ({"attn_layer_period": 2}, "attn_layer_period does not say .*attn_layer_offset"),
        ({"block_configs": []}, "differ by block_configs"),
        ({"per_layer_config": {"1": {"skip": ["attention"]}}}, "differ by skip of per_layer_config"),
        ({"per_layer_config": {"1": 3}}, "lacks or hides"),
        ({"head_dim": None, "hidden_size": None}, "lacks or hides"),
    ],
)
def test_plan_unsupported_model_config_raises_with_cause(fields, words):
    fields = {**LLAMA, **fields}
    fields["num_hidden_layers"] = fields["num_hidden_layers"] or 1
    with pytest.raises(KVTierError, match=words):
        models.from_config(fields, "m")


def test_plan_quantized_cache_is_not_encoded_again():
    model = models.from_config(LLAMA, "m", "fp8_e4m3")
    raw, coded = models.footprint(model, "raw"), models.footprint(model, "int4")
    assert raw == coded and raw.gpu == models.footprint(config(), "raw").gpu / 2


# -- traces --------------------------------------------------------------------------------------------------------


def conversations(seed: int, count: int = 300) -> traces.Requests:
    draw, threads, requests, fresh = random.Random(seed), [], [], 0
    for number in range(count):
        if not threads or draw.random() < 0.3:
            threads.append([0, 1])
        thread = draw.choice(threads[-12:])
        for _ in range(draw.randrange(1, 5)):
            fresh += 1
            thread.append(fresh + 1)
        requests.append((float(number), list(thread)))
    return requests


def test_plan_replay_with_large_memory_reaches_ideal_hits():
    requests = conversations(1)
    found = replay(requests, 100_000)
    assert found["memory_hits"] == pytest.approx(traces.ideal(requests)) and found["disk_hits"] == 0


def test_plan_replay_gpu_cache_adds_to_memory_hits():
    requests = conversations(2)
    alone, both = replay(requests, 200), replay(requests, 200, cache=50)
    assert both["cache_hits"] > 0.05 and both["cache_hits"] + both["memory_hits"] == pytest.approx(both["hits"])
    assert both["hits"] >= alone["hits"] - 0.02


def test_plan_replay_of_small_cache_equals_brute_force_lru():
    requests = conversations(3, 120)
    size, order, hits, asked = 40, [], 0, 0
    for _, ids in requests:
        found = 0
        while found < len(ids) and ids[found] in order:
            found += 1
        hits, asked = hits + found, asked + len(ids)
        # Most recent last; of a chain its end is older than its beginning, and goes first.
        order = [i for i in order if i not in ids] + ids[::-1]
        order = order[-size:]
    seen = replay(requests, 1, cache=size)
    assert seen["cache_hits"] == pytest.approx(hits / asked, abs=0.05)


def test_plan_replay_disk_adds_hits():
    requests = conversations(4)
    found = replay(requests, 50, 100_000, lambda: admission("all"))
    assert found["hits"] == pytest.approx(traces.ideal(requests), abs=0.02) and found["disk_hits"] > 0.05


def test_plan_malformed_trace_file_raises_with_cause(tmp_path):
    file = tmp_path / "trace.jsonl"
    for text, words in (
        ("nonsense", "is not a trace"),
        ('{"a": 1}', "a line has no 'hash_ids'"),
        ("", "holds no request"),
        ("[1]", "not a trace"),
    ):
        file.write_text(text)
        with pytest.raises(KVTierError, match=words):
            traces.read(file)


def test_plan_plain_and_xz_traces_are_equal(tmp_path):
    line = '{"timestamp": 1500, "hash_ids": [1, 2]}\n'
    (tmp_path / "a.jsonl").write_text(line)
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(line.encode()))
    assert traces.read(tmp_path / "a.jsonl") == traces.read(tmp_path / "a.jsonl.xz") == [(1.5, [1, 2])]


@pytest.mark.parametrize("low", [-(1 << 63), -40, 1 << 63])
def test_plan_replay_of_signed_hashes_equals_that_of_numbers(tmp_path, low):
    for name, first in (("plain", 0), ("signed", low)):
        rows = [{"timestamp": when, "hash_ids": [first + i for i in ids]} for when, ids in conversations(6, 40)]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    plain, signed = (traces.read(tmp_path / name) for name in ("plain", "signed"))
    assert traces.ideal(signed) == traces.ideal(plain)
    assert replay(signed, 50)["hits"] == replay(plain, 50)["hits"] > 0


# -- when it pays --------------------------------------------------------------------------------------------------


def test_plan_break_even_equals_arithmetic():
    """0.01 s + n * 1e-4 s against n * 3e-4 s: from 50 tokens on, the next whole block is 64."""
    ways = [(Link(1e6, latency=0.01), 100.0)]
    assert break_even(ways, Prefill(((1000, 0.3),)), 16, 10_000) == 64
    assert break_even(ways, Prefill(((1000, 0.05),)), 16, 10_000) is None
    assert break_even(ways, Prefill(((1000, 0.101),)), 16, 8_000) is None, "not up to the longest prompt"


def test_plan_break_even_with_superlinear_prefill():
    """Attention makes long prompts dearer: what never pays at first pays from some length on."""
    prefill = Prefill.parse("1000:0.05,10000:2.0,100000:100")
    ways = [(Link(1e6, latency=0.0), 100.0)]
    found = break_even(ways, prefill, 16, 100_000)
    for tokens, pays in ((found, True), (found - 16, False)):
        assert (load_seconds(ways, tokens) < prefill.seconds(tokens)) is pays


def test_plan_prefill_time_is_interpolated_and_extrapolated():
    prefill = Prefill.parse("1000:0.1,3000:0.5")
    assert [prefill.seconds(n) for n in (500, 1000, 2000, 3000, 5000)] == pytest.approx([0.05, 0.1, 0.3, 0.5, 0.9])
    assert Prefill.parse("2000").seconds(500) == pytest.approx(0.25)


def test_plan_rate_text_is_parsed():
    assert [parse_rate(text) for text in ("25GB/s", "1.5 gb", "800MB/s", "7")] == [25e9, 1.5e9, 8e8, 7]
    for text in ("fast", "-1GB/s", "3 knots"):
        with pytest.raises(KVTierError, match="give 25GB/s"):
            parse_rate(text)
    for text in ("fast", "0", "10:0", "10:1:2"):
        with pytest.raises(KVTierError, match="give tokens a second"):
            Prefill.parse(text)


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def given(root, tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps({"timestamp": t * 1000, "hash_ids": ids}) + "\n" for t, ids in conversations(5)))
    return ["plan", "--model", str(root / "models" / "recall-6m"), "--memory", "64MiB", "--trace", str(file)]


def test_plan_command_prints_all_parts(given):
    options = ["--trace-tokens", "64", "--disk", "1GiB", "--gpu-cache", "16MiB", "--codec", "raw", "--codec", "rot4"]
    rates = ["--load-rate", "2GB/s", "--disk-rate", "0.2GB/s", "--prefill", "5000"]
    result = CliRunner().invoke(app, [*given, *options, *rates, "--json"])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    raw, *_, rot4 = found["codecs"]
    assert (raw["codec"], rot4["codec"]) == ("raw", "rot4")
    assert rot4["tokens"]["memory"] > 3.5 * raw["tokens"]["memory"]
    assert raw["tokens"]["cache"] == rot4["tokens"]["cache"] == (16 << 20) // 6144 // 16 * 16
    runs = found["trace"]["runs"]
    assert runs[0]["hits"] <= runs[1]["hits"] <= found["trace"]["ideal"] + 1e-9
    lengths = {row["codec"]: row["tokens"] for row in found["break_even"]}
    assert 0 < lengths["rot4"]["memory"] <= lengths["raw"]["memory"] < lengths["raw"]["disk"]
    text = CliRunner().invoke(app, [*given, *options, *rates], env={"COLUMNS": "120"}).stdout
    assert "Tokens that fit" in text and "without limit" in text and "Loading beats computing" in text


def test_plan_share_of_memory_that_is_in_use_now_is_counted(root, monkeypatch):
    limits = MemoryLimits(1 << 40, 1 << 30, "this test's memory")
    monkeypatch.setattr("vllm_kvtier.cli.plan.memory_limits", lambda: limits)
    words = ["--model", str(root / "models" / "recall-6m"), "--memory", "25%", "--json"]
    done = CliRunner().invoke(app, ["plan", *words])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["tiers"]["memory"] == 1 << 38


def test_plan_reads_rates_of_an_engine(given):
    """Of two data-parallel ranks, which have a link each."""
    lines = counter("loads", 3, "ok") + "# TYPE vllm:kvtier_planner_bandwidth gauge\n"
    lines += "".join(f'vllm:kvtier_planner_bandwidth{{engine="{rank}",kind="host"}} 2e9\n' for rank in (0, 1))
    lines += "vllm:prompt_tokens_total 90000\nvllm:request_prefill_time_seconds_sum 3\n"
    lines += counter("fetched_tokens", 81000)
    server = FakeServer(metrics=METRICS + lines)
    try:
        result = CliRunner().invoke(app, [*given[:-2], "--server", server.url, "--json"])
        measured = _measured(server.url)
    finally:
        server.stop()
    found = json.loads(result.stdout)
    assert found["rates"]["memory"] == 2e9
    assert found["break_even"][0]["tokens"]["memory"] == 16
    assert measured["prefill"].seconds(3000) == pytest.approx(1.0)


def test_plan_reads_rates_of_bench_file(given, tmp_path):
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({"rows": [{"bench": "copy", "name": "load", "bytes_per_second": 3e9}]}))
    result = CliRunner().invoke(app, [*given[:-2], "--machine", str(file), "--prefill", "5000", "--json"])
    assert json.loads(result.stdout)["rates"] == {"memory": 3e9}


def test_plan_bench_file_of_another_form_is_refused(given, tmp_path):
    file = tmp_path / "machine.json"
    file.write_text('{"rows": 5}')
    result = CliRunner().invoke(app, [*given[:-2], "--machine", str(file)])
    assert result.exit_code == 1 and "is not what" in result.stderr.replace("\n", " ")


def test_plan_runs_without_torch(given, tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('none here', name='torch')")
    command = [sys.executable, "-m", "vllm_kvtier.cli", *given]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "need torch" in done.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--codec", "zip"], "no codec is named 'zip'"),
        (["--policy", "fifo"], "no policy is named 'fifo'"),
        (["--memory", "64KiB", "--trace-tokens", "4096"], "holds less than one block"),
        (["--kv-cache-dtype", "int3"], "a KV cache of int3"),
        (["--tp", "3"], "cannot be spread over 3 ranks"),
        (["--block-size", "1000000"], "choose a smaller block size"),
        (["--machine", __file__], "is not what `kvtier bench --json` prints"),
        (["--prefill", "soon"], "give tokens a second"),
        (["--server", "http://127.0.0.1:9"], "no vLLM server answers"),
        (["--model", "nobody/nothing-such"], "is no file, no directory"),
    ],
)
def test_plan_wrong_options_exit_with_message(given, options, words):
    result = CliRunner().invoke(app, [*given, *options])
    assert result.exit_code == 1 and words in result.stderr.replace("\n", " ")
