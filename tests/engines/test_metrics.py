"""What a real engine's /metrics says, as Prometheus asks for it, after loads from the node store and a pull."""

import asyncio
import re
import urllib.request

import pytest
from engine_client import random_tokens
from node_fixtures import Node, seeded

from vllm_kvtier.telemetry import table
from vllm_kvtier.telemetry.stats import GAUGES

# What Prometheus 2 and 3 send: vLLM must still answer with names that have a colon.
ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
SAMPLE = re.compile(r"^(vllm:\w+)(?:\{(.*)\})? (\S+)$", re.M)


def read(engine) -> str:
    request = urllib.request.Request(f"{engine.base_url}/metrics", headers={"Accept": ACCEPT})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def sums(text: str) -> dict[tuple[str, str], float]:
    """{(sample, kind): value}; buckets are left out."""
    found: dict[tuple[str, str], float] = {}
    for name, labels, value in SAMPLE.findall(text):
        if not name.endswith("_bucket"):
            kind = re.search(r'kind="(.*?)"', labels or "")
            key = name.removeprefix("vllm:kvtier_"), kind[1] if kind else ""
            found[key] = found.get(key, 0.0) + float(value)
    return found


@pytest.fixture
async def grown(node: Node, nodes):
    """What a computed and a loaded request added to A's metrics: {(sample, kind): value}; and the whole text."""
    prompt = random_tokens(seeded("metrics"), 700)
    await nodes.uses_store(node.first)  # its memory is mapped a moment after the engine serves
    await nodes.flushed(node.first)
    before = sums(await asyncio.to_thread(read, node.first))
    await nodes.asked(node.first, prompt)
    await nodes.stored(node.first, prompt)
    await nodes.reset(node.first)
    reply = await nodes.asked(node.first, prompt)
    await nodes.flushed(node.first)
    text = await asyncio.to_thread(read, node.first)
    after = sums(text)
    return {key: value - before.get(key, 0.0) for key, value in after.items()}, text, reply


async def test_metrics_count_hits_misses_tokens_and_seconds(grown):
    more, _, reply = grown
    assert reply.pulled == 672
    assert more["hits_total", "host"] == 1 and more["prompt_tokens_total", "host"] == 672
    # The first time, and what the second left; and the short ones that flush.
    assert more["prompt_tokens_total", "local_compute"] >= 700 + 28
    assert sum(value for (name, _), value in more.items() if name == "misses_total") >= 1
    assert more["loads_total", "ok"] == more["load_seconds_count", "ok"] == 1 and more["load_seconds_sum", "ok"] > 0
    for stage in ("lookup", "allocate", "transfer"):
        assert more["host_hit_seconds_count", stage] == 1
    assert more["load_time_ratio_count", "host"] <= 1 and more["lookup_seconds_count", "host"] >= 2
    assert more["loaded_bytes_total", "raw"] > 0 and more["stored_bytes_total", "raw"] > 0
    assert more["integrity_failures_total", "host"] == 0


async def test_metrics_equal_documented_table_and_gauges_exist(grown):
    _, text, _ = grown
    types = dict(re.findall(r"^# TYPE (vllm:kvtier_\S+) (\w+)$", text, re.M))
    told = {family.name: family.sort for family in table.families()["engine"]}
    assert {name: sort for name, sort in types.items() if not name.endswith("_created")} == told
    shown = {name for name, _, _ in SAMPLE.findall(text)}
    assert {f"vllm:kvtier_{name}" for name in GAUGES} <= shown
    assert re.search(r"^vllm:kvtier_store_up\{.*\} 1\.0$", text, re.M)
    assert "vllm:time_to_first_token_seconds_bucket" in shown, "vLLM's own, in the dashboard"
