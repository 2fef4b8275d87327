"""The table of connectors side by side: from what its parts really write, and when a part or a connector is missing."""

import importlib.util
import json
import sys

import pytest

RESULTS = {
    "host": "ttft_qwen3_h200.json", "pd": "pd_vllm033.json",
    "disk": "documents_h200.json", "cost": "overhead_h200.json",
}  # fmt: skip


@pytest.fixture
def side(root, monkeypatch):
    spec = importlib.util.spec_from_file_location("side_by_side", root / "benchmarks" / "side_by_side.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "side_by_side", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(root, tmp_path):
    for part, name in RESULTS.items():
        (tmp_path / f"{part}.json").write_text((root / "benchmarks" / "results" / name).read_text())
    (tmp_path / "meta.json").write_text(json.dumps({"missing": [], "model": "m", "versions": {"vllm": "1"}}))
    return tmp_path


def test_side_by_side_reads_every_part(side, folder, root):
    rows = side.read(folder)
    assert {row.part for row in rows} == set(side.PARTS)
    measured = json.loads((root / "benchmarks" / "results" / RESULTS["host"]).read_text())["ttft"]
    for tokens, what in ((8192, "8k tokens from host memory"), (32768, "32k tokens from host memory")):
        (row,) = (row for row in rows if row.what == what)
        for connector in ("kvtier", "offloading", "lmcache"):
            (of,) = (r for r in measured if (r["connector"], r["tokens"]) == (connector, tokens))
            assert row.values.get(connector) == (of["host"] if of["from_host"] >= 0.9 else None)
    pulled = {row.what: row.values for row in rows if row.part == "pd"}
    for values in pulled.values():
        assert {"none", "kvtier", "nixl"} <= set(values)


def test_side_by_side_computed_prompts_have_no_host_figure(side):
    one = {"tokens": 100, "computed": 50.0, "host": 49.0}
    rows = [{**one, "connector": "kvtier", "from_host": 1.0}, {**one, "connector": "lmcache", "from_host": 0.0}]
    (row,) = side.of_host({"ttft": rows, "itl": []})
    assert row.values == {"kvtier": 49.0, "none": 50.0}


def test_side_by_side_table_marks_best_connector(side):
    rows = [
        side.Row("host", "a", "ms", {"none": 1.0, "kvtier": 30.0, "lmcache": 20.0}),
        side.Row("cost", "b", "x", {"none": 1.0, "kvtier": 0.99, "lmcache": 0.9}),
    ]
    head, _, first, second, _, foot = side.table(rows, ["LMCache is old"]).split("\n")
    assert head.split("|")[2:5] == [" vLLM alone ", " vllm-kvtier ", " LMCache "]
    assert first.split("|")[2:5] == [" 1 ms ", " 30 ms ", " **20 ms** "]
    assert second.split("|")[2:5] == [" 1.000 ", " **0.990** ", " 0.900 "]
    assert foot == "LMCache is old"


def test_side_by_side_failed_parts_and_missing_peers_are_named(side, tmp_path, monkeypatch, capsys):
    script = tmp_path / "part.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(7)")
    monkeypatch.setattr(side, "HERE", tmp_path)
    monkeypatch.setattr(side, "PARTS", {"pd": side.Part("part.py", ("nixl",), side.of_pd)})
    monkeypatch.setattr(side.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("sys.argv", ["x", "run", str(tmp_path / "out"), "--model", "m", "--parts", "pd"])
    assert side.main() == 1
    assert "LMCache is not installed" in capsys.readouterr().out
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert len(meta["missing"]) == 2 and "ended with 7" in meta["missing"][1]
    assert "'kvtier', 'nixl'" in (tmp_path / "out" / "pd.log").read_text()


def test_side_by_side_writes_plot(side, folder, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    png, out = tmp_path / "a.png", tmp_path / "all.json"
    monkeypatch.setattr("sys.argv", ["x", "show", str(folder), "--png", str(png), "--json", str(out)])
    assert side.main() == 0
    assert png.stat().st_size > 10_000
    assert len(json.loads(out.read_text())["rows"]) == len(side.read(folder))


def test_side_by_side_parts_on_different_gpus_run_together(side):
    parts = list(side.PARTS)
    assert side.stages(parts, []) == [[(parts, [])]] and side.stages(parts, [4]) == [[(parts, [4])]]
    assert side.stages(parts, [4, 5]) == [[(["host", "disk"], [4]), (["cost"], [5])], [(["pd"], [4, 5])]]
    assert side.stages(["pd", "host"], [4, 5]) == [[(["host"], [4])], [(["pd"], [4, 5])]]
    assert side.stages(parts, [4, 5, 6, 7]) == [[(["host"], [4]), (["disk", "cost"], [5]), (["pd"], [6, 7])]]


def test_side_by_side_reads_latency_of_other_requests(side):
    row = {"connector": "kvtier", "source": "host", "tokens": 16384, "from_host": 1.0, "busy_p99": 40.0}
    computed = {**row, "connector": "lmcache", "from_host": 0.0, "busy_p99": 300.0}
    (found,) = side.of_host({"ttft": [], "itl": [row, computed, {**row, "source": "fresh", "busy_p99": 90.0}]})
    assert "p99" in found.what and found.values == {"kvtier": 40.0}


def test_side_by_side_wrong_answer_has_no_figure(side, tmp_path):
    rows = [
        {"connector": name, "tokens": 2048, "computed": 50.0, "host": 10.0, "from_host": 1.0, "same": same}
        for name, same in (("kvtier", 1.0), ("lmcache", 0.0))
    ]
    busy = [{"connector": name, "source": "host", "tokens": 1024, "from_host": 1.0, "busy_p99": 5.0}
            for name in ("kvtier", "lmcache")]  # fmt: skip
    (tmp_path / "host.json").write_text(json.dumps({"ttft": rows, "itl": busy}))
    first, meanwhile = side.read(tmp_path)
    assert first.values == {"kvtier": 10.0, "none": 50.0} and set(meanwhile.values) == {"kvtier"}
    assert list(side.wrong(tmp_path)) == ["host: LMCache, 2k tokens: 100% of the answers are wrong"]
