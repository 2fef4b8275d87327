"""`kvtier plan --nodes`: small traces against hand-computed figures, one node against the replay of one engine."""

import itertools
import json
import random
import re
import shlex
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from vllm_kvtier.cli.__main__ import app
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.plan.cluster import (
    EXIST_SECONDS,
    PUT_SECONDS,
    QUERY_SECONDS,
    ROUTINGS,
    SHARED,
    Costs,
    simulate,
)
from vllm_kvtier.plan.node import Cluster
from vllm_kvtier.plan.pays import Prefill
from vllm_kvtier.plan.prompts import ideal, sample
from vllm_kvtier.plan.replay import replay
from vllm_kvtier.store.eviction import POLICIES
from vllm_kvtier.store.tiers.admission import admission

# A block is 100 tokens, 1,000 bytes and 5 keys; a token takes 10 ms to compute: 1 s a block.
COSTS = Costs(
    block_bytes=1000, block_tokens=100, hash_blocks=5, block_keys=5, prefill=Prefill(((100, 1.0),)),
    memory_rate=1e9, disk_rate=1e9, network_rate=1e9,
)  # fmt: skip
TWO_TURNS = [(0.0, [0, 1, 2]), (10.0, [0, 1, 2, 3]), (20.0, [0, 7])]  # the second request continues the first


def run(requests, nodes=2, copies=1.0, costs=COSTS, **options):
    return simulate(requests, copies, Cluster(nodes, **{"memory": 100, **options}), costs)


def conversations(draw_turns: list[tuple[int, int]]) -> list[tuple[float, list[int]]]:
    """A conversation per number, which grows by so many blocks each time it appears; all begin with block 0."""
    threads: dict[int, list[int]] = {}
    fresh = itertools.count(1)
    requests = []
    for at, (thread, grows) in enumerate(draw_turns):
        ids = threads.setdefault(thread, [0])
        ids.extend(next(fresh) for _ in range(grows))
        requests.append((float(at), list(ids)))
    return requests


TIERS = ("cache", "memory", "disk")
TURNS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), min_size=2, max_size=60).map(conversations)


# -- by hand -------------------------------------------------------------------------------------------------------


def test_round_robin_finds_only_what_the_same_node_has():
    """Requests 1 and 3 go to node 0, request 2 to node 1: 1 of 9 blocks is found, the first one of request 3."""
    found = run(TWO_TURNS, routing="round-robin")
    assert found["hits"] == {"cache": 0, "memory": pytest.approx(1 / 9), "disk": 0, "cluster": 0}
    assert found["ideal"] == pytest.approx(4 / 9) and found["network_bytes_per_second"]["mean"] == 0


@pytest.mark.parametrize("routing", ["kv", "prefix-hash"])
def test_conversation_stays_on_its_node(routing):
    """Request 2 finds 3 blocks; request 3 finds the first one, or goes to the idle node."""
    found = run(TWO_TURNS, routing=routing)
    assert found["hits"]["memory"] >= 3 / 9 - 1e-9


def test_other_nodes_have_what_a_node_lacks():
    """Request 2 reads 3 blocks from node 0: 3,000 bytes in the first minute. Each request asks one store."""
    found = run(TWO_TURNS, routing="round-robin", shared="nodes")
    assert found["hits"]["cluster"] == pytest.approx(3 / 9) and found["found"] == found["ideal"]
    network = found["network_bytes_per_second"]
    assert network["mean"] * found["seconds"] == pytest.approx(3000)
    assert network["node_sent_peak"] == network["node_received_peak"] == network["peak"] == pytest.approx(3000 / 60)
    assert network["link_mean_max"] == pytest.approx(3000 / found["seconds"])
    assert found["asks_per_second"]["mean"] * found["seconds"] == pytest.approx(3)


def test_only_so_many_peers_are_asked():
    """Of three nodes in a ring each asks the next one: node 1 does not see what node 0 has, node 2 does."""
    requests = [(0.0, [1, 2]), (1.0, [1, 2]), (2.0, [3]), (3.0, [3]), (4.0, [5]), (5.0, [1, 2])]
    assert run(requests, 3, routing="round-robin", shared="nodes", peers=1)["hits"]["cluster"] == pytest.approx(2 / 9)
    assert run(requests, 3, routing="round-robin", shared="nodes")["hits"]["cluster"] == pytest.approx(5 / 9)


def test_pool_is_read_over_the_network_and_costs_the_master_keys():
    """Request 1 puts 3 blocks; 2 reads those and puts 1; 3 finds block 0 itself and puts 1. Keys of exist: 15 + 20 + 5,
    query: 15, put: 15 + 5 + 5."""
    found = run(TWO_TURNS, routing="round-robin", shared="pool", pool=50)
    assert found["hits"]["cluster"] == pytest.approx(3 / 9)
    assert found["network_bytes_per_second"]["mean"] * found["seconds"] == pytest.approx(3000)
    keys = 40 + 15 + 2 * 25
    assert found["master_keys_per_second"]["mean"] * found["seconds"] == pytest.approx(keys)
    assert found["master_calls_per_second"]["mean"] * found["seconds"] == pytest.approx(3 + 1 + 2 * 3)
    seconds = 40 * EXIST_SECONDS + 15 * QUERY_SECONDS + 25 * PUT_SECONDS
    assert found["master_cores"]["mean"] * found["seconds"] == pytest.approx(seconds)


def test_replicas_cost_writes_and_save_reads():
    """With two nodes, two replicas are on both: 5 blocks are written to the other node, and none is read from there."""
    found = run(TWO_TURNS, routing="round-robin", shared="pool", pool=50, replicas=2)
    assert found["hits"]["cluster"] == pytest.approx(3 / 9)
    assert found["network_bytes_per_second"]["mean"] * found["seconds"] == pytest.approx(5000)


def test_pool_holds_less_with_replicas():
    requests = [(0.0, [1, 2, 3]), (1.0, [4, 5, 6]), (2.0, [9]), (3.0, [1, 2, 3])]
    assert run(requests, routing="round-robin", shared="pool", pool=4)["hits"]["cluster"] == pytest.approx(3 / 10)
    assert run(requests, routing="round-robin", shared="pool", pool=4, replicas=2)["hits"]["cluster"] == 0


def test_first_token_waits_for_earlier_requests_of_the_node():
    """Each block computes for 1 s. Two prompts of 3 blocks at once: 3 s each on two nodes, 3 s and 6 s on one."""
    requests = [(0.0, [1, 2, 3]), (0.0, [4, 5, 6])]
    apart, together = (run(requests, nodes, routing="least-load") for nodes in (2, 1))
    assert [found["first_token_seconds"]["p99"] for found in (apart, together)] == pytest.approx([3.0, 6.0])
    assert together["busy"]["max"] * together["seconds"] == pytest.approx(6.0)


def test_kv_routing_leaves_a_busy_holder():
    """Node 0 is busy for 9 s with a second prompt: 3 blocks are computed sooner by the idle node than waited for."""
    requests = [(0.0, [0, 1, 2]), (4.0, [0, 1, 2, 30]), (4.0, [0, *range(40, 50)]), (4.5, [0, 1, 2, 3])]
    found = run(requests, routing="kv")
    assert found["first_token_seconds"]["p99"] < 11.1
    assert found["busy"]["max"] < found["busy"]["mean"] * 2, "both nodes compute"


def test_kv_routing_alternates_between_idle_nodes():
    """All prompts begin with block 0. Four at once bring it to all nodes, which are equal after that."""
    requests = [(max(0.0, 10.0 * (at - 3)), [0, 100 + at]) for at in range(40)]
    busy = run(requests, 4, routing="kv")["busy"]
    assert busy["max"] < 1.2 * busy["mean"]


def test_disk_brings_back_what_memory_evicted():
    """Memory of 4 blocks; the conversation was used twice, so that it is on disk when others have evicted it."""
    requests = [(0.0, [1, 2]), (1.0, [1, 2]), (2.0, [3, 4, 5, 6]), (3.0, [1, 2])]
    assert run(requests, 1, memory=4)["hits"]["memory"] == pytest.approx(2 / 10)
    found = run(requests, 1, memory=4, disk=50)
    assert found["hits"] == {"cache": 0, "memory": pytest.approx(0.2), "disk": pytest.approx(0.2), "cluster": 0}


def test_copies_have_conversations_of_their_own_and_a_common_beginning():
    """Two copies on one node: the second copy finds block 0 of the first, and else only its own."""
    found = run(TWO_TURNS, 1, copies=2)
    assert found["requests"] == 6
    assert found["found"] == pytest.approx((4 + 5) / 18) == found["ideal"] == ideal(TWO_TURNS, 2)


def test_fraction_of_the_trace_takes_whole_conversations():
    requests = conversations([(thread, 2) for _ in range(4) for thread in range(40)])
    some = sample(requests, 0.5)
    threads = {ids[1] for _, ids in some}
    assert 10 < len(threads) < 30
    assert len(some) == 4 * len(threads)
    assert run(requests, 3, copies=0.5)["requests"] == len(some)


def test_no_request_and_unknown_names_raise():
    with pytest.raises(KVTierError, match="hold no request"):
        run(TWO_TURNS, copies=0.0)
    for options in ({"routing": "random"}, {"shared": "all"}):
        with pytest.raises(KVTierError, match="choose one of kv"):
            run(TWO_TURNS, **options)


# -- against the replay of one engine, and limits ------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(TURNS, st.integers(0, 80), st.sampled_from([0, 8]), st.sampled_from(sorted({*POLICIES} - {"s3fifo"})))
def test_one_node_equals_the_replay_of_one_engine(requests, room, cache, policy):
    memory = room + max(len(ids) for _, ids in requests)
    one = replay(requests, memory, cache=cache, memory_policy=policy)
    found = simulate(requests, 1, Cluster(1, memory, 0, cache, memory_policy=policy), grain=1)["hits"]
    assert found == pytest.approx({"cluster": 0.0} | {tier: one[f"{tier}_hits"] for tier in TIERS}), policy


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_one_node_is_close_to_the_replay_of_one_engine(policy):
    """Also with a disk, with prompts that are longer than memory, and with a policy that depends on the order in which
    blocks of one prompt are used: the order of evictions may differ there."""
    rng = random.Random(policy)
    equal = differ = 0
    for _ in range(100):
        turns = [(rng.randint(0, 6), rng.randint(1, 5)) for _ in range(rng.randint(2, 60))]
        requests, memory = conversations(turns), rng.randint(6, 80)
        disk, cache = rng.choice([0, 10, 200]), rng.choice([0, 8])
        one = replay(requests, memory, disk, cache=cache, memory_policy=policy)
        found = simulate(requests, 1, Cluster(1, memory, disk, cache, memory_policy=policy), grain=1)["hits"]
        differs = sum(abs(found[tier] - one[f"{tier}_hits"]) for tier in TIERS)
        equal += differs < 1e-9
        differ += differs
    assert equal >= 80 and differ < 0.5, "half a percent of all blocks"


def test_one_node_that_writes_all_to_disk_is_close_to_the_replay_of_one_engine():
    requests = conversations([(i * i % 23, 1 + i % 4) for i in range(400)])
    one = replay(requests, 150, 600, lambda: admission("all"), cache=40)
    found = simulate(requests, 1, Cluster(1, 150, 600, 40, disk_admission="all"), grain=1)["hits"]
    # The store writes to its disk a moment later than here, and skips what memory has evicted by then.
    assert found == pytest.approx({"cluster": 0.0} | {tier: one[f"{tier}_hits"] for tier in TIERS}, abs=0.005)
    assert all(found[tier] > 0.05 for tier in TIERS)


@settings(max_examples=80, deadline=None)
@given(
    TURNS,
    st.integers(1, 5),
    st.sampled_from(ROUTINGS),
    st.sampled_from(SHARED),
    st.tuples(st.integers(4, 60), st.integers(0, 60), st.integers(0, 20), st.integers(1, 40)),
    st.tuples(st.sampled_from([0.5, 1.0, 2.0, 2.5]), st.integers(1, 3), st.integers(1, 3)),
)
def test_hits_never_exceed_one_cache_without_limit(requests, nodes, routing, shared, sizes, rest):
    memory, disk, cache, pool = sizes
    copies, replicas, grain = rest
    if copies < 1 and not sample(requests, copies):
        return
    cluster = Cluster(nodes, memory, disk, cache, routing, shared, pool=pool, replicas=replicas)
    found = simulate(requests, copies, cluster, COSTS, grain)
    assert found["found"] <= found["ideal"] + 1e-9
    assert all(share >= 0 for share in found["hits"].values())
    if shared == "none" or nodes == 1:
        assert found["network_bytes_per_second"]["peak"] == 0


@settings(max_examples=40, deadline=None)
@given(TURNS, st.integers(2, 5), st.sampled_from(ROUTINGS))
def test_nodes_without_limits_that_share_find_all(requests, nodes, routing):
    for shared in ("nodes", "pool"):
        found = simulate(requests, 1, Cluster(nodes, 10_000, routing=routing, shared=shared, pool=10_000), COSTS)
        assert found["found"] == pytest.approx(found["ideal"])


def test_coarse_grain_changes_little():
    requests = conversations([(i * i % 23, 1 + i % 9) for i in range(400)])
    fine, coarse = (simulate(requests, 1, Cluster(4, 200, shared="nodes"), COSTS, grain) for grain in (1, 16))
    assert coarse["found"] == pytest.approx(fine["found"], abs=0.02)


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def command(root, tmp_path):
    file = tmp_path / "trace.jsonl"
    rows = conversations([(i % 9, 2) for i in range(60)])
    file.write_text("".join(json.dumps({"timestamp": t * 1000, "hash_ids": ids}) + "\n" for t, ids in rows))
    model = str(root / "models" / "recall-6m")
    return ["plan", "--model", model, "--memory", "64MiB", "--trace", str(file), "--trace-tokens", "64", "--load", "1"]


def test_plan_nodes_prints_rows_for_each_combination(command):
    options = ["--nodes", "1", "--nodes", "3", "--routing", "kv", "--routing", "round-robin", "--shared", "none"]
    options += ["--shared", "pool", "--pool", "16MiB", "--prefill", "5000", "--tp", "2"]
    result = CliRunner().invoke(app, [*command, *options, "--json"])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)["cluster"]
    assert [(row["nodes"], row["routing"], row["shared"]) for row in found["rows"]] == list(
        itertools.product([1, 3], ["kv", "round-robin"], ["none", "pool"])
    )
    assert found["rates"] == {"memory": 50e9, "disk": 3e9, "network": 10e9} and found["prefill"] == "given"
    assert all(row["found"] <= row["ideal"] + 1e-9 for row in found["rows"])
    pool = [row for row in found["rows"] if row["shared"] == "pool"]
    assert all(row["master_keys_per_second"]["mean"] > 0 for row in pool)
    text = CliRunner().invoke(app, [*command, *options], env={"COLUMNS": "200"}).stdout
    assert "Load in the busiest minute" in text and "round-robin" in text


def test_plan_nodes_cuts_no_head_in_80_columns(command):
    options = ["--nodes", "1000", "--routing", "round-robin", "--shared", "nodes", "--load", "0.01"]
    options += ["--gpu-cache", "16MiB", "--disk", "64MiB"]
    result = CliRunner().invoke(app, [*command, *options], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.stderr
    table = result.stdout.partition("of it per node")[2]
    assert "…" not in table and {"without", "requests/s", "receives", "blocks/s", "round-robin"} <= set(table.split())


def test_plan_nodes_prints_what_the_page_shows(root, monkeypatch):
    """docs/kvtier-command.md: the trace in the repository, in any terminal."""
    section = (root / "docs/kvtier-command.md").read_text("utf-8").partition("### Many nodes")[2]
    words = shlex.split(re.search(r"^    kvtier (.*?)\n\n", section, re.M | re.S)[1].replace("\\\n", ""))
    monkeypatch.chdir(root)
    printed = CliRunner().invoke(app, words, env={"COLUMNS": "80"}).stdout
    shown = re.search(r"```text\n(.*?)```", section, re.S)[1]
    lines = [line.rstrip() for line in printed.splitlines()]
    assert shown in "\n".join(lines) + "\n"


def test_plan_nodes_counts_a_key_per_rank(command):
    def keys(*options: str) -> float:
        words = [*command, "--nodes", "1", "--shared", "pool", "--pool", "64MiB", "--json", *options]
        (row,) = json.loads(CliRunner().invoke(app, words).stdout)["cluster"]["rows"]
        return row["master_keys_per_second"]["mean"]

    assert keys("--tp", "2") == pytest.approx(2 * keys())
    assert keys("--block-size", "32") == pytest.approx(keys() / 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", "2", "--shared", "pool"], "give --pool"),
        (["--nodes", "2", "--routing", "random"], "choose one of kv"),
        (["--nodes", "2", "--codec", "zip"], "no codec is named 'zip'"),
        (["--nodes", "2", "--load", "0"], "hold no request"),
        (["--nodes", "2", "--memory", "64KiB", "--trace-tokens", "4096"], "holds less than one block"),
        (["--nodes", "2", "--network-rate", "wide"], "a rate of 'wide'"),
    ],
)
def test_plan_nodes_wrong_options_exit_with_message(command, options, words):
    result = CliRunner().invoke(app, [*command, *options])
    assert result.exit_code == 1 and words in result.stderr.replace("\n", " ")


def test_plan_nodes_needs_a_trace(root):
    words = ["plan", "--model", str(root / "models" / "recall-6m"), "--memory", "64MiB", "--nodes", "2"]
    assert "give --trace" in CliRunner().invoke(app, words).stderr.replace("\n", " ")


def test_slower_network_delays_the_first_token():
    """Request 1 computes for 3 s. Request 2 computes for 1 s, and reads 3,000 bytes."""
    for rate, seconds in ((1e9, 3.0), (1000.0, 4.0)):
        found = run(TWO_TURNS, routing="round-robin", shared="nodes", costs=replace(COSTS, network_rate=rate))
        assert found["first_token_seconds"]["p99"] == pytest.approx(seconds, abs=1e-4)
