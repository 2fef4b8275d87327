"""benchmarks/overhead.py: groups of engines, ratios when one fails, and the timing of a connector's methods."""

import argparse
import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import overhead
import shares
import tiers

from vllm_kvtier.worker import tuning as tunings


class Peer:
    """Its times to the first token are those of a list; it fails when that is empty."""

    offloads = False

    def __init__(self, connector, times):
        self.connector, self.times = connector, list(times)
        self.client = self.engine = SimpleNamespace(close=lambda: None, terminate=lambda: None, log_tail=lambda n: "")

    def stored(self):
        return 0.0

    def first_token(self, prompt):
        if not self.times:
            raise tiers.PeerFailed(self.connector)
        return self.times.pop(0)


def measurement(root, peers, rounds):
    args = argparse.Namespace(turns=["ttft"], shares=[], rounds=rounds, model=root / "models" / "recall-6m")
    return overhead.Measurement(peers, args, {"ttft": overhead.Turn(1, 32, 1, 1)})


def test_overhead_bench_rows_compare_with_first_engine(root):
    # Of each turn: a new prompt, then the same one again. The first turn warms up.
    none = Peer("none", [9, 9, 0.010, 0.002, 0.020, 0.002])
    ours = Peer("kvtier", [9, 9, 0.012, 0.003, 0.023, 0.003])
    measured = measurement(root, [none, ours], rounds=2)
    measured.run(float("inf"), lambda: None)
    rows = {(row["turn"], row["connector"]): row for row in measured.rows()}
    assert set(rows) == {(turn, name) for turn in ("ttft", "hit") for name in ("none", "kvtier")}
    row = rows["ttft", "kvtier"]
    assert (row["rounds"], row["unit"], row["more_ms"]) == (2, "ms", 2.5)
    assert row["ratio"] == pytest.approx((10 / 12 + 20 / 23) / 2, abs=1e-4)
    assert rows["hit", "kvtier"]["more_ms"] == 1.0
    table = overhead.summary(list(rows.values()))
    assert [list(line) for line in table] == [["connector", "ttft", "hit"]] * 2 and "+2.50 ms" in table[1]["ttft"]


def test_overhead_bench_failed_engine_keeps_its_figures_and_others_go_on(root, capsys):
    none = Peer("none", [1] * 8)
    ours = Peer("kvtier", [1] * 4)
    measured = measurement(root, [none, ours], rounds=3)
    measured.run(float("inf"), lambda: None)
    assert {(row["connector"], row["rounds"]) for row in measured.rows()} == {("none", 3), ("kvtier", 1)}
    assert "LEFT OUT from here: kvtier" in capsys.readouterr().out


def test_overhead_bench_measures_nothing_after_its_deadline(root):
    measured = measurement(root, [Peer("none", [1] * 2)], rounds=3)
    measured.run(0.0, lambda: None)  # the turn that warms up is always taken
    assert measured.rows() == []


def test_overhead_bench_groups_have_first_connector_each():
    assert overhead.groups(list("nabcde"), 3) == [list("nab"), list("ncd"), list("ne")]
    assert overhead.groups(list("nabc"), 0) == [list("nabc")] and overhead.groups(["n"], 5) == [["n"]]


def test_overhead_bench_writes_all_groups_and_every_sample(root, tmp_path, monkeypatch, capsys):
    started = []

    def start(args, gpu, host):
        started.append(args.connectors)
        return [Peer(name, [1] * 6) for name in args.connectors]

    out = tmp_path / "out.json"
    monkeypatch.setattr(overhead, "start", start)
    monkeypatch.setattr(overhead, "facts", lambda args, peers: {"vllm": "1"})
    monkeypatch.setattr(overhead, "TURNS", {"ttft": overhead.Turn(1, 32, 1, 1)})
    command = f"x --model {root}/models/recall-6m --connectors none kvtier idle --at-once 2 --turns ttft --rounds 2"
    monkeypatch.setattr("sys.argv", [*command.split(), "--out", str(out)])
    overhead.main()
    assert started == [["none", "kvtier"], ["none", "idle"]]
    result = json.loads(out.read_text())
    assert result["meta"]["device"] == "cpu" and result["meta"]["vllm"] == "1"
    assert [row["connector"] for row in result["rows"]] == ["none", "kvtier"] * 2 + ["none", "idle"] * 2
    assert [len(sample["rates"]) for sample in result["samples"]] == [2] * 8
    assert "| idle | 1.000 (1.000 to 1.000), +0.00 ms |" in capsys.readouterr().out


def test_overhead_bench_ablation_has_known_options():
    from vllm_kvtier.config import KVTierConfig

    for options in overhead.ABLATION.values():
        KVTierConfig.from_extra_config(options)


def test_bench_engine_of_a_tuning_uses_changed_copies(tmp_path, monkeypatch):
    env = tiers.tuned("NVIDIA H200", {"store": {"programs": 264}}, tmp_path)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    changed, usual = tunings.for_device("NVIDIA H200"), tunings.MEASURED["NVIDIA H200"]
    assert {rule.choice.programs for rule in changed.store} == {264} and changed.load == usual.load
    with pytest.raises(ValueError, match="impossible choice"):
        tiers.tuned("NVIDIA H200", {"load": {"programs": 0}}, tmp_path)


def test_bench_words_need_a_meaning(root, tmp_path):
    known = {"variants": {}, "trees": {}, "tunings": {}}
    words = {"queues": {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}}
    args = argparse.Namespace(logs=tmp_path, kvtier_options={}, gpu=None, environments=words, **known)
    _, env = tiers.Peer._transfer("kvtier:queues", 1 << 30, args)
    assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    with pytest.raises(SystemExit, match="has 'quees'"):
        tiers.Peer._transfer("kvtier:quees", 1 << 30, args)


def test_timed_connector_counts_methods_between_two_signals(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setenv("KVTIER_TIMES", str(tmp_path))
    monkeypatch.syspath_prepend(str(shares.CONNECTORS))
    import timed_connectors
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    monkeypatch.setattr(timed_connectors, "FOLDER", tmp_path)
    before = signal.getsignal(signal.SIGUSR1)
    try:
        config = SimpleNamespace(kv_transfer_config=object(), model_config=object())
        connector = timed_connectors.IdleConnector(config, KVConnectorRole.SCHEDULER, None)
        assert type(connector).__name__ == "IdleConnector" and (tmp_path / str(os.getpid())).exists()
        connector.build_connector_meta(None)  # not timed yet
        os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(3):
            connector.build_connector_meta(None)
        connector.request_finished_all_groups(None, ())
        os.kill(os.getpid(), signal.SIGUSR1)
        connector.build_connector_meta(None)
        written = json.loads((tmp_path / f"{os.getpid()}.2.json").read_text())
    finally:
        signal.signal(signal.SIGUSR1, before)
    calls = {(role, method): count for role, method, _, count, took, longest in written["calls"] if took >= longest > 0}
    assert calls == {("scheduler", "build_connector_meta"): 3, ("scheduler", "request_finished_all_groups"): 1}
    assert written["threads"][str(threading.get_native_id())] == threading.current_thread().name
    assert "build_connector_meta" not in vars(connector)


def test_shares_usage_has_cpu_time_of_a_thread():
    begin = shares.usage({os.getpid(): "engine"})[os.getpid(), os.getpid()]
    while shares.usage({os.getpid(): "engine"})[os.getpid(), os.getpid()][1] <= begin[1]:
        sum(range(10000))
    assert begin[0] == "main"
