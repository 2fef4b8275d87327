"""`kvtier` with a terminal, a pipe or a store that is not what one wishes for: words and a status, no traceback."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from store_process import Store
from store_support import RawClient, engine_hello
from support import eventually, interruptible, stop
from typer.testing import CliRunner

from vllm_kvtier import __version__
from vllm_kvtier.cli.__main__ import app

COMMAND = [sys.executable, "-m", "vllm_kvtier.cli"]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    made = Store(tmp_path_factory.mktemp("trouble"))
    made.start()
    yield made
    made.kill()


def kvtier(*arguments, out=subprocess.PIPE, **env) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], stdout=out, stderr=subprocess.PIPE, text=True, env={**os.environ, **env},
        timeout=60,
    )  # fmt: skip
    assert "Traceback" not in done.stderr and "Traceback" not in (done.stdout or ""), done
    return done


def test_top_ascii_terminal_prints_replacement_characters(store):
    """Its encoding has none of the characters."""
    words = ["top", "--socket", store.path, "--once", "--interval", 0.05]
    done = kvtier(*words, PYTHONIOENCODING="ascii", COLUMNS="140")
    assert done.returncode == 0 and "memory" in done.stdout and "???" in done.stdout


def test_clear_that_a_tier_has_not_recorded_fails_and_names_it(tmp_path):
    """It printed "0 blocks dropped", with exit status 0, and all of the disk's blocks came back in the next store."""
    store = Store(tmp_path)
    store.await_tiers = False
    store.start(f"--disk-path={tmp_path}/no/disk", "--disk-size=1MiB")
    try:
        done = kvtier("clear", "--all", "--socket", store.path)
    finally:
        store.kill()
    assert done.returncode == 1 and done.stdout == "0 blocks dropped\n"
    assert "disk tier: unavailable (" in done.stderr and "come back" in done.stderr


def test_commands_run_on_one_column_terminal(store):
    for command in (["stats"], ["top", "--once", "--interval", 0.05]):
        assert kvtier(*command, "--socket", store.path, COLUMNS="1").returncode == 0


@pytest.mark.parametrize("name", commands := typer.main.get_command(app).commands)
def test_help_prints_names_in_full(name):
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80"}).output.split()
    options = [each for each in commands[name].params if each.param_type_name == "option" and not each.hidden]
    assert {flag for each in options for flag in each.opts} <= {word.rstrip(",") for word in shown}


def test_stats_prints_versions_in_full(store):
    lines = kvtier("stats", "--socket", store.path, COLUMNS="140").stdout.splitlines()
    assert ["version", __version__] in [line.split() for line in lines]


def test_stats_has_each_value_on_one_line_where_it_is_piped(store):
    """The guides grep for reasons."""
    name = "a name of some words " * 5
    with RawClient(store.path, engine_hello(name)):
        lines = kvtier("stats", "--socket", store.path, COLUMNS="40").stdout.splitlines()
    assert any(name.strip() in line for line in lines)
    assert all(len(line.split()) > 1 for line in lines), "what is empty is left out"
    assert all(line == " ".join(line.split()) for line in lines if name.strip() not in line), "without columns"
    assert "huge pages False" in lines


def test_names_of_clients_are_no_markup(store):
    name = "[red]e[/blue]"
    with RawClient(store.path, engine_hello(name)):
        for command in (["stats"], ["top", "--once", "--interval", 0.05]):
            done = kvtier(*command, "--socket", store.path, COLUMNS="140")
            assert done.returncode == 0 and name in done.stdout, done


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_commands_run_with_closed_output(store, closed):
    """As jobs of some schedulers do."""
    command = f"{shlex.join([*COMMAND, 'stats', '--socket', store.path])} {closed}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr and ("pool pages" in done.stdout) is (closed == "2>&-")


def test_stats_to_full_disk_exits_with_error(store):
    with open("/dev/full", "w") as full:
        done = kvtier("stats", "--socket", store.path, "--json", out=full)
    assert done.returncode == 1 and done.stderr == "error: No space left on device\n"


def test_top_to_closed_pipe_exits_without_traceback(store):
    """It prints as it goes, and ends when its output is closed."""
    top = subprocess.Popen(
        [*COMMAND, "top", "--socket", store.path, "--interval", "0.05"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert any(b"node store" in top.stdout.readline() for _ in range(40))
    top.stdout.close()
    assert top.wait(60) == 1 and b"Traceback" not in top.stderr.read()


def test_top_sigint_exits_without_traceback(store, tmp_path):
    with open(tmp_path / "out", "wb") as out:
        command = [*COMMAND, "top", "--socket", store.path, "--interval", "0.05"]
        top = subprocess.Popen(command, stdout=out, stderr=out, preexec_fn=interruptible)
    eventually(lambda: b"node store" in Path(tmp_path / "out").read_bytes(), 60)
    top.send_signal(signal.SIGINT)
    assert top.wait(60) == 0 and b"Traceback" not in Path(tmp_path / "out").read_bytes()


def test_doctor_hung_store_is_found(store):
    stop(store.process.pid)
    try:
        done = kvtier("doctor", "--remote", "--socket", store.path)
        assert done.returncode == 2 and "hangs: it does not answer within 3 s" in done.stdout
    finally:
        os.kill(store.process.pid, signal.SIGCONT)


def test_doctor_without_anything_to_check_exits_with_message():
    done = kvtier("doctor", "--remote")
    assert done.returncode == 2 and "nothing to check" in done.stderr
