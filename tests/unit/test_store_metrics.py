"""The store's metrics as Prometheus gets them: over HTTP, equal to ``kvtier stats``, and never at the store's cost."""

import json
import logging
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import fields
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from store_process import POOL, Engine
from store_support import BLOCK_PAGES, NAMESPACE_ID, RawClient, block_hashes_of, engine_hello, tool_hello
from support import eventually
from typer.testing import CliRunner

from vllm_kvtier.cli.__main__ import app
from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.devtools.processes import free_port
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.scheduler.sources.node_store import _store_options
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.index.types import IndexStats
from vllm_kvtier.store.options import StoreOptions, parse
from vllm_kvtier.store.server import metrics
from vllm_kvtier.store.server.server import StoreServer
from vllm_kvtier.store.tiers.base import TierCounts
from vllm_kvtier.store.tiers.demotion import LaneCounts
from vllm_kvtier.store.tiers.read_time import BOUNDS, Durations

BLOCK = BLOCK_PAGES * m.PAGE


class Scraped:
    """``values``: {(sample, labels as a sorted tuple): value}; ``types``: of families, by name."""

    def __init__(self, port: int, host: str = "127.0.0.1", seconds: float = 10.0):
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=seconds) as answer:
            self.content_type, text = answer.headers["Content-Type"], answer.read().decode()
        families = list(text_string_to_metric_families(text))
        self.types = {family.name: family.type for family in families}
        samples = [sample for family in families for sample in family.samples]
        self.values = {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples}
        assert len(self.values) == len(samples)

    def of(self, name: str, **labels: str) -> float:
        return self.values["kvtier_store_" + name, tuple(sorted(labels.items()))]


@pytest.fixture
def start(tmp_path):
    servers = []

    def start(**options) -> SimpleNamespace:
        port = options.pop("metrics_port", None) or free_port()
        server = StoreServer(str(tmp_path / "s.sock"), StoreOptions(size=str(POOL), metrics_port=port, **options))
        server.start()
        servers.append(server)
        eventually(lambda: server.memory.ready == server.memory.usable)
        with RawClient(server.path, tool_hello()) as tool:
            eventually(lambda: all(tier.state == "ready" for tier in tool.stat().tiers))
        return SimpleNamespace(server=server, path=server.path, port=port)

    yield start
    for server in servers:
        server.stop()


def stats(store) -> dict:
    """``kvtier stats --json``."""
    return json.loads(CliRunner().invoke(app, ["stats", "--socket", store.path, "--json"]).output)


def agrees(scraped: Scraped, numbers: dict) -> None:
    """All that ``kvtier stats`` says, and does not change by itself, is there."""
    for table, values, labels in (
        (metrics.STORE, numbers, {}),
        (metrics.INDEX, numbers["index"], {}),
        (metrics.DIRECTORY, numbers["directory"], {}),
        *((metrics.TIER, tier, {"tier": tier["name"]}) for tier in numbers["tiers"]),
        *((metrics.EXTRA, tier["extra"], {"tier": tier["name"]}) for tier in numbers["tiers"]),
    ):
        for key in values.keys() & table.keys() - {"seconds"}:
            shown = table[key]
            name = shown.name + ("_total" if shown.counter else "")
            assert scraped.of(name, **labels, **shown.labels) == values[key] * shown.factor, key


def test_store_metrics_count_operations(start):
    store = start()
    assert "text/plain" in Scraped(store.port).content_type
    with Engine(store) as engine:
        block_hashes = block_hashes_of((32, "a"))
        assert engine.fill(block_hashes) == 32
        assert engine.find(block_hashes) == 32 and engine.find(block_hashes_of((8, "b"))) == 0
        engine.reserve(block_hashes)  # all of it is there
        held = engine.lookup(block_hashes[: 4 * m.HASH_BYTES])
        engine.send(m.Discard(NAMESPACE_ID, 0, block_hashes[-m.HASH_BYTES :], engine.lookup(block_hashes).slots[0][-1]))
        engine.ask(m.Pin(9, NAMESPACE_ID, block_hashes[: 2 * m.HASH_BYTES], True))
        numbers, scraped = stats(store), Scraped(store.port)
        expected = {
            "stored_blocks_total": 32, "blocks": 31, "used_bytes": 32 * BLOCK, "lookups_total": 5,
            "prefix_queries_total": 32 + 32 + 8 + 4 + 32, "prefix_hits_total": 32 + 4 + 32,
            "integrity_failures_total": 1, "pinned_blocks": 2, "pinned_bytes": 2 * BLOCK, "leases": 2,
            "leased_blocks": 32, "pool_bytes": POOL, "ready_bytes": POOL, "responding": 1,
            "directory_holders": 0, "namespaces": 1,
        }  # fmt: skip
        assert {name: scraped.of(name) for name in expected} == expected
        assert scraped.of("refused_slots_total", reason="exists") == 32
        for message, times in (("lookup", 5), ("pin", 1), ("discard", 1), ("clear", 0)):
            assert scraped.of("message_seconds_count", message=message) == times, message
        assert 0 < scraped.of("message_seconds_sum", message="lookup") < 5
        assert scraped.of("clients", kind="engine") == 1 and scraped.of("clients", kind="worker") == 0
        agrees(scraped, numbers)
        engine.send(m.Release(held.lease))
        [info] = [dict(labels) for name, labels in scraped.values if name == "kvtier_store_info"]
        assert info["instance"] == numbers["instance"] and info["version"] == numbers["version"]
        assert 0 < scraped.of("uptime_seconds") < 60


def test_store_metrics_include_tiers(start, tmp_path):
    disk = {"disk_path": str(tmp_path / "disk"), "disk_size": "16MiB", "disk_admission": "all"}
    first = start(**disk)
    prefixes = [block_hashes_of((32, number)) for number in range(3)]
    with Engine(first) as engine:
        for block_hashes in prefixes:
            engine.fill(block_hashes)
        scraped = eventually(lambda: (s := Scraped(first.port)).of("tier_kept_blocks_total", tier="disk") == 96 and s)
    agrees(scraped, stats(first))
    assert scraped.of("tier_written_bytes_total", tier="disk") == 96 * BLOCK
    assert scraped.of("tier_used_bytes", tier="disk") >= 96 * BLOCK
    writes = scraped.of("tier_request_seconds_count", tier="disk", kind="write")
    assert writes >= 1 and scraped.of("tier_request_seconds_sum", tier="disk", kind="write") > 0
    assert scraped.of("tier_request_seconds_bucket", tier="disk", kind="write", le="+Inf") == writes
    first.server.stop()
    second = start(**disk, node_listen=f"127.0.0.1:{free_port()}")
    with Engine(second) as engine:
        assert [engine.find(block_hashes) for block_hashes in prefixes] == [32] * 3
        scraped = Scraped(second.port)
        agrees(scraped, stats(second))
        assert scraped.of("tier_read_blocks_total", tier="disk") == 96
        assert scraped.of("tier_found_blocks_total", tier="disk") == 96
        assert scraped.of("tier_request_seconds_count", tier="disk", kind="read") == 3
        assert scraped.of("tier_read_busy_seconds_total", tier="disk") > 0
        assert scraped.of("tier_up", tier="disk") == scraped.of("tier_up", tier="nodes") == 1
        assert scraped.of("tier_state", tier="disk", state="ready") == 1
        assert sum(scraped.of("tier_state", tier="nodes", state=state) for state in metrics.STATES) == 1
        assert scraped.of("tier_leases_out", tier="nodes") == 0


def test_store_metrics_show_unavailable_tier(start, tmp_path):
    folder = tmp_path / "disk"
    store = start(disk_path=str(folder), disk_size="16MiB")
    with Engine(store) as engine:
        store.server.reactor.call_soon(lambda: store.server.tiers._tiers[0]._tier_process.back_off("a test says so"))
        assert eventually(lambda: Scraped(store.port).of("tier_state", tier="disk", state="unavailable"))
        eventually(lambda: Scraped(store.port).of("tier_restarts_total", tier="disk") == 1)
        eventually(lambda: Scraped(store.port).of("tier_up", tier="disk"))
        assert engine.fill(block_hashes_of((4, "a"))) == 4


def test_store_metrics_counters_only_grow_and_have_help(start, tmp_path):
    store = start(disk_path=str(tmp_path / "disk"), disk_size="16MiB", disk_admission="all")
    before = Scraped(store.port)
    for name, kind in before.types.items():
        samples = [key for key in before.values if key[0].startswith(name)]
        assert name.startswith("kvtier_store_") and kind in ("counter", "gauge", "histogram"), name
        assert samples and (kind == "counter") == any(key[0] == name + "_total" for key in samples), name
    with Engine(store) as engine:
        for number in range(12):  # more than there is room for
            engine.fill(block_hashes_of((32, number)))
        engine.find(block_hashes_of((32, 11)))
    after = Scraped(store.port)
    assert after.of("evicted_blocks_total") > 0
    counters = {key for key in before.values if key[0].endswith(("_total", "_count", "_bucket", "_sum"))}
    assert len(counters) > 40 and all(after.values[key] >= before.values[key] for key in counters)


def test_store_metrics_keep_all_counts():
    assert {field.name for field in fields(IndexStats)} - metrics.INDEX.keys() == {"pool_pages", "ready_pages"}
    texts = {"name", "state", "reason", "extra", "nodes"}
    assert {field.name for field in fields(TierCounts)} - metrics.TIER.keys() == texts
    assert not {field.name for field in fields(LaneCounts)} - metrics.EXTRA.keys()
    shown = {"instance", "version", "pid", "policy", "huge_pages", "clients", "index", "tiers", "directory"}
    others = set(m.Counts.__struct_fields__) - metrics.STORE.keys() - shown
    assert others == {"id", "note"}
    assert set(m.Counts.__struct_fields__) >= shown
    assert not set(m.DirectoryCounts.__struct_fields__) - metrics.DIRECTORY.keys()
    tables = (metrics.STORE, metrics.INDEX, metrics.DIRECTORY, metrics.TIER, metrics.EXTRA)
    names = [(shown.name, *shown.labels.values()) for table in tables for shown in table.values()]
    assert len(set(names)) == len(names)


def test_store_metrics_unknown_tier_counters_are_untyped(start, tmp_path):
    store = start(disk_path=str(tmp_path / "disk"), disk_size="16MiB")
    counts = store.server.tiers.counts

    def more():
        [disk] = counts()
        disk.extra["spins"] = 3.0
        return [disk]

    store.server.tiers.counts = more
    scraped = Scraped(store.port)
    assert scraped.of("tier_spins", tier="disk") == 3 and scraped.types["kvtier_store_tier_spins"] == "unknown"


def test_store_metrics_durations_have_buckets():
    durations = Durations()
    for seconds in (0.0, 0.001, 0.0011, 29.0, 31.0):
        durations.observe(seconds)
    assert durations.counts[0] == 2 and durations.counts[1] == 1 and durations.counts[-2:] == [1, 1]
    assert sum(durations.counts) == 5 and len(durations.counts) == len(BOUNDS) + 1
    copy = durations.copy()
    durations.observe(1.0)
    assert sum(copy.counts) == 5 and copy.seconds == pytest.approx(60.0021)


# -- scrapes -------------------------------------------------------------------------------------------------------


def test_store_metrics_port_in_use_is_logged_and_store_runs(start, caplog):
    with socket.create_server(("127.0.0.1", 0)) as somebody, caplog.at_level(logging.WARNING):
        store = start(metrics_port=somebody.getsockname()[1])
        assert any("cannot listen" in r.message and "store_metrics_port" in r.message for r in caplog.records)
        with RawClient(store.path, engine_hello()) as client:
            assert client.store(block_hashes_of((4, "a")))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_store_metrics_unusable_host_is_logged(start, caplog, host):
    with caplog.at_level(logging.WARNING):
        start(metrics_host=host)
    assert any("no metrics" in record.message and host in record.message for record in caplog.records)


def test_store_metrics_report_busy_store_within_timeout(start, monkeypatch):
    store = start()
    gate = threading.Event()
    store.server.reactor.call_soon(lambda: gate.wait(30))
    began = time.monotonic()
    scraped = Scraped(store.port)
    assert list(scraped.values.values()) == [0.0] and scraped.of("responding") == 0
    assert time.monotonic() - began < metrics.ANSWER_SECONDS + 2
    others = [threading.Thread(target=Scraped, args=(store.port,)) for _ in range(3)]
    for other in others:
        other.start()
    gate.set()
    for other in others:
        other.join(10)
    assert Scraped(store.port).of("responding") == 1


def test_store_metrics_count_error_is_reported_at_once(start, monkeypatch):
    monkeypatch.setattr(metrics, "ANSWER_SECONDS", 30.0)
    store = start()
    store.server._counts = lambda: 1 / 0
    began = time.monotonic()
    assert Scraped(store.port).of("responding") == 0 and time.monotonic() - began < 20


def test_store_metrics_reader_that_stalls_delays_no_request(start):
    store = start()
    silent = [socket.create_connection(("127.0.0.1", store.port)) for _ in range(metrics.MAX_SCRAPERS)]
    silent[0].sendall(b"GET /metrics HTTP/1.1\r\n")
    eventually(lambda: _hung_up(store.port), 5, "all places are taken")
    with RawClient(store.path, engine_hello()) as client:
        began = time.monotonic()
        assert client.store(block_hashes_of((4, "a"))) and time.monotonic() - began < metrics.SILENT_SECONDS / 2
    for each in silent:
        each.close()
    eventually(lambda: not _hung_up(store.port))
    assert Scraped(store.port).of("stored_blocks_total") == 4


def test_store_metrics_come_back_when_threads_can_be_started_again(start, monkeypatch):
    store = start()

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", refuse)
        assert all(_hung_up(store.port) for _ in range(metrics.MAX_SCRAPERS))
    assert Scraped(store.port).of("responding") == 1


def test_store_metrics_silent_connection_is_closed(start, monkeypatch):
    monkeypatch.setattr(metrics._Handler, "timeout", 0.2)
    store = start()
    with socket.create_connection(("127.0.0.1", store.port), timeout=5) as silent:
        assert silent.recv(1) == b""


def _hung_up(port: int) -> bool:
    try:
        return not Scraped(port, seconds=5.0).values
    except OSError:
        return True


def test_store_metrics_listen_at_option_and_end_with_store(start):
    store = start()
    assert store.server._metrics._server.server_address[0] == "127.0.0.1"
    threads = [thread.name for thread in threading.enumerate()]
    assert threads.count("kvtier-metrics") == 1
    store.server.stop()
    assert "kvtier-metrics" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port))


def test_store_metrics_listen_on_ipv6(start):
    try:
        port = free_port("::1")
    except OSError:
        pytest.skip("no IPv6 here")
    start(metrics_port=port, metrics_host="::1")
    assert Scraped(port, "[::1]").of("responding") == 1


def test_store_metrics_are_off_by_default(tmp_path):
    server = StoreServer(str(tmp_path / "s.sock"), StoreOptions(size=str(POOL)))
    server.start()
    try:
        assert "kvtier-metrics" not in [thread.name for thread in threading.enumerate()]
    finally:
        server.stop()


def test_store_metrics_options_are_checked():
    given = ["--metrics-port=9400", "--metrics-host=0.0.0.0"]
    assert parse(given).arguments() == given
    assert StoreOptions().metrics_port == 0 and StoreOptions().metrics_host == "127.0.0.1"
    for bad in (-1, 65536):
        with pytest.raises(ConfigError, match="metrics_port"):
            StoreOptions(metrics_port=bad)
    of_engine = _store_options(KVTierConfig.from_extra_config({"store_metrics_port": 9400}))
    assert (of_engine.metrics_port, of_engine.metrics_host) == (9400, "127.0.0.1")


def test_store_without_metrics_does_not_import_them():
    code = (
        "import sys, vllm_kvtier.store.__main__; assert 'prometheus_client' not in sys.modules; "
        "import vllm_kvtier.store.server.metrics; assert not {'torch', 'vllm'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
