"""`kvtier top`: what it shows of a real store under real traffic, of engines, and of what has ended."""

import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from doctor_fakes import METRICS, PROXY_METRICS, FakeServer, counter
from rich.console import Console
from store_process import Store
from store_support import RawClient, block_hashes_of, engine_hello
from support import eventually, interruptible
from typer.testing import CliRunner

from vllm_kvtier.cli.__main__ import app
from vllm_kvtier.cli.top.frame import frame, sparks
from vllm_kvtier.cli.top.readings import Rates, Reading, Watcher
from vllm_kvtier.doctor.engines.server import Scrape


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path)
    made.start()
    eventually(lambda: (counts := made.counts()).ready_bytes == counts.pool_bytes)
    yield made
    made.kill()


@pytest.fixture
def server():
    made = FakeServer()
    yield made
    made.stop()


def drawn(*readings: Reading) -> str:
    console = Console(width=160, record=True, file=open(os.devnull, "w"))
    console.print(frame(readings, "/a/store.sock"))
    return console.export_text()


def test_top_shows_traffic(store, tmp_path):
    script = Path(__file__).parents[1] / "store_support.py"
    busy = subprocess.Popen([sys.executable, str(script), store.path, "20", "7"], stdout=subprocess.PIPE, text=True)
    try:
        assert busy.stdout.readline() == "begins\n"
        svg = tmp_path / "top.svg"
        given = ["top", "--once", "--socket", store.path, "--interval", "0.3", "--readings", "3", "--svg", str(svg)]
        result = CliRunner().invoke(app, given, env={"COLUMNS": "160"})
    finally:
        busy.kill()
        busy.wait()
    text = result.stdout
    assert result.exit_code == 0, text
    memory = next(line for line in text.splitlines() if line.startswith(" memory") or line.startswith("memory"))
    assert "ready" in memory and "of 4 MiB" in memory and "B/s" in memory and " - " not in memory
    found = next(line for line in text.splitlines() if line.strip(" │").startswith("found"))
    assert "%" in found and any(spark in found for spark in "▁▂▃▄▅▆▇█")
    assert "engine busy-7" in text
    picture = svg.read_text()
    assert "font-face" not in picture, "a picture loads nothing from elsewhere"
    assert picture.startswith("<svg") and "memory" in picture and "kvtier&#160;top" in picture.replace(" ", "&#160;")


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_top_narrow_terminal_drops_bars_before_numbers(store, server, width):
    """A terminal has 80 columns, as a rule."""
    server.metrics = METRICS
    with Watcher(store.path, [server.url]) as watcher, RawClient(store.path, engine_hello("e")) as client:
        client.store(block_hashes_of((10, "a")))
        seen = [watcher.read(), watcher.read()]
    console = Console(width=width, record=True, file=open(os.devnull, "w"))
    console.print(frame(seen, store.path, console.width))
    text = console.export_text()
    memory = next(line for line in text.splitlines() if line.lstrip().startswith("me"))
    engine = next(line for line in text.splitlines() if line.lstrip().startswith("127.0.0.1:"))
    assert str(server.port) in engine and "…" not in engine
    assert ("a wider terminal also shows" in text) == (width < 140)
    if width >= 80:
        assert "memory" in memory and ("of 4 MiB" if width == 140 else "4%") in memory and "…" not in memory
    assert (memory.count("█") + memory.count("░")) == (20 if width == 140 else 0)


def test_top_rates_are_counter_differences(store):
    with Watcher(store.path, []) as watcher, RawClient(store.path, engine_hello()) as client:
        before = watcher.read()
        client.store(block_hashes_of((10, "a")))
        client.lookup(block_hashes_of((10, "a"), (10, "b")))
        now = watcher.read()
    rates = Rates(before, now)
    assert rates.of_store(lambda c: c.index.commits) * rates.seconds == pytest.approx(10)
    assert rates.of_store(lambda c: c.index.prefix_queries) * rates.seconds == pytest.approx(20)
    assert "50.0%" in drawn(before, now)
    assert Rates(None, now).of_store(lambda c: c.index.commits) is None


def test_top_shows_store_restart_without_rates(store):
    with Watcher(store.path, []) as watcher:
        first = watcher.read()
        store.kill()
        gone = watcher.read()
        assert first.counts and not gone.counts
        assert "unavailable" in drawn(gone) or "listens" in drawn(gone)
        store.start()
        deadline = time.monotonic() + 15
        while not (back := watcher.read()).counts:
            assert time.monotonic() < deadline, back.reason
    assert back.counts.instance != first.counts.instance
    assert Rates(first, back).of_store(lambda c: c.index.commits) is None, "counters of two lives give no rate"


def test_top_shows_engines(store, server):
    gauges = "vllm:num_requests_running 3.0\nvllm:num_requests_waiting 2.0\nvllm:kv_cache_usage_perc 0.25\n"
    server.metrics = METRICS + gauges + counter("loaded_tokens", 100, "host")
    with Watcher(store.path, [server.url, "http://127.0.0.1:9"]) as watcher:
        before = watcher.read()
        server.metrics = METRICS + gauges + counter("loaded_tokens", 5100, "host")
        now = watcher.read()
    loaded = Rates(before, now).of_engine(server.url, lambda s: s.ours("loaded_tokens"))
    assert loaded * (now.at - before.at) == pytest.approx(5000)
    text = drawn(before, now)
    line = next(line for line in text.splitlines() if f"127.0.0.1:{server.port}" in line)
    assert line.split()[1:4] == ["3", "2", "25%"]
    assert "127.0.0.1:9" in text and "no vLLM" in text, "one that does not answer says so"


def test_top_says_that_a_proxy_is_no_engine():
    text = drawn(*(Reading(at, None, "", {"http://p:1": Scrape(PROXY_METRICS)}) for at in (1.0, 2.0)))
    assert "http://p:1 is `kvtier proxy`, not an engine" in text and "wait" not in text


def test_top_shows_mean_cache_usage_of_data_parallel_ranks():
    ranks = "".join(f'vllm:kv_cache_usage_perc{{engine="{rank}"}} {usage}\n' for rank, usage in ((0, 0.9), (1, 0.7)))
    scrape = Scrape(METRICS + "# TYPE vllm:kv_cache_usage_perc gauge\n" + ranks)
    assert " 80% " in drawn(*(Reading(at, None, "", {"http://e:1": scrape}) for at in (1.0, 2.0)))


def test_top_shows_no_rate_of_restarted_engine():
    before, now = (Reading(at, None, "", {"u": Scrape(counter("pulls", n, "ok"))}) for at, n in ((1.0, 9), (2.0, 1)))
    assert Rates(before, now).of_engine("u", lambda s: s.ours("pulls")) is None


def test_top_shows_tiers(store, tmp_path):
    store.kill()
    (tmp_path / "file").write_text("")
    store.await_tiers = False
    store.start(f"--disk-path={tmp_path}/file/disk")
    with Watcher(store.path, []) as watcher:
        deadline = time.monotonic() + 15
        while (reading := watcher.read()).counts.tiers[0].state != "unavailable":
            assert time.monotonic() < deadline
    text = drawn(reading)
    assert "disk" in text and "unavailable" in text


def test_top_draws_sparklines():
    assert sparks([0.0, 0.5, 1.0, None]) == "▁▅█ "


def test_top_runs_until_sigint(store):
    """On a terminal of its own: pictures follow one another, and Ctrl-C ends it well."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "vllm_kvtier.cli", "top", "--interval", "0.1", "--socket", store.path]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    top = subprocess.Popen(command, env=environment, preexec_fn=interruptible, **terminal)
    os.close(theirs)
    try:
        seen, deadline = b"", time.monotonic() + 30
        while seen.count(b"memory") < 3:
            assert time.monotonic() < deadline, seen
            assert top.poll() is None, seen.decode()
            if select.select([ours], [], [], 1.0)[0]:
                seen += os.read(ours, 65536)
        top.send_signal(signal.SIGINT)
        end = threading.Thread(target=_drain, args=(ours,), daemon=True)
        end.start()
        assert top.wait(20) == 0
    finally:
        top.kill()
        top.wait()
        os.close(ours)


def _drain(terminal: int) -> None:
    """Nobody may wait for a terminal that is full."""
    try:
        while os.read(terminal, 65536):
            continue
    except OSError:
        return


def test_top_without_answers_says_so(tmp_path):
    result = CliRunner().invoke(app, ["top", "--once", "--interval", "0.05", "--socket", str(tmp_path / "none.sock")])
    assert result.exit_code == 1 and "no node store listens" in result.stdout
    result = CliRunner().invoke(app, ["top", "--svg", "x.svg"])
    assert result.exit_code == 2
