"""Whoever finds no store starts one, once, with a life of its own; and the commands that talk to it."""

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from store_support import RawClient, block_hashes_of, engine_hello, tool_hello
from support import descriptors, eventually, interruptible, stop
from typer.testing import CliRunner

import vllm_kvtier
from vllm_kvtier import runtime_dir
from vllm_kvtier.cli import doctor
from vllm_kvtier.cli.__main__ import app
from vllm_kvtier.doctor import store as doctor_store
from vllm_kvtier.doctor.examine import examine
from vllm_kvtier.errors import ConfigError, KVTierError
from vllm_kvtier.store import __main__ as store_main
from vllm_kvtier.store import launcher
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.launcher import serves, start_store, store_path
from vllm_kvtier.store.memory.client_mapping import shake_hands
from vllm_kvtier.store.options import StoreOptions

SMALL = StoreOptions(size="1MiB", idle_seconds=30)


@pytest.fixture
def path(tmp_path):
    """Of a store that is gone after the test."""
    path = str(tmp_path / "s.sock")
    yield path
    pid = pid_of(path)
    if pid:
        assert pid != os.getpid()
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not alive(pid))


def pid_of(path: str) -> int | None:
    try:
        pid = int(Path(f"{path}.lock").read_text() or 0)
    except FileNotFoundError:
        return None
    return pid if pid and alive(pid) else None


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_store_launched_has_no_parent(path):
    assert not serves(path)
    with socket.socket() as ours:
        ours.set_inheritable(True)  # as an engine's may be
        secret = os.readlink(f"/proc/self/fd/{ours.fileno()}")
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, [min(cores)])  # as an engine's thread may be
        start_store(path, SMALL)
        os.sched_setaffinity(0, cores)
    assert serves(path)
    pid = pid_of(path)
    assert pid != os.getpid() and parent_of(pid) != os.getpid() and os.getsid(pid) != os.getsid(0)
    assert os.sched_getaffinity(pid) == cores
    start_store(path, SMALL)
    assert pid_of(path) == pid
    assert "serves 1 MiB" in Path(path).with_suffix(".log").read_text()
    held = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            held.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    assert held and secret not in held
    os.kill(pid, signal.SIGTERM)
    eventually(lambda: not alive(pid))
    assert not Path(path).exists()


REFUSING = """
import os
own = os.sched_setaffinity

def refuse(pid, cores):  # as the kernel in a cpuset of the four cores 32 to 35
    if not {32, 33, 34, 35} & set(cores):
        raise OSError(22, "Invalid argument")
    MORE

os.sched_setaffinity = refuse
"""


@pytest.mark.parametrize("more", ["own(pid, cores)", "raise OSError(22, 'Invalid argument')"])
def test_store_starts_in_a_cpuset_whose_cores_have_other_numbers(path, tmp_path, monkeypatch, more):
    (tmp_path / "sitecustomize.py").write_text(REFUSING.replace("MORE", more))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start_store(path, SMALL)
    assert os.sched_getaffinity(pid_of(path)) == os.sched_getaffinity(0)


STARTS = """
import os, sys
from vllm_kvtier.store.launcher import package_environment, run_module, start_store
from vllm_kvtier.store.options import StoreOptions
start_store(sys.argv[1], StoreOptions(size="1MiB", idle_seconds=30))
print("PYTHONPATH" in package_environment(), run_module("os")[-2:])
"""


def test_store_starts_beside_modules_named_like_the_standard_librarys(path, tmp_path):
    """In site-packages, as PyPI's dataclasses: Python imports its own, and so must the store's process. What that
    starts may be of another Python, whose standard library is another."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    places = "import sysconfig; print(sysconfig.get_path('purelib'))"
    there = Path(subprocess.check_output([python, "-c", places], text=True).strip())
    shutil.copytree(Path(vllm_kvtier.__file__).parent, there / "vllm_kvtier")
    (there / "dataclasses.py").write_text("raise ImportError('not that of the standard library')")
    (there / "others.pth").write_text("\n".join(place for place in sys.path if "site-packages" in place))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    printed = subprocess.check_output([python, "-c", STARTS, path], text=True, env=environment, cwd=tmp_path)
    assert serves(path) and printed == "False ['-m', 'os']\n"


CHANGES_PATH = """
import dataclasses, subprocess, sys
path, disk, first, *places = sys.argv[1:]
if first == "first":
    sys.path[:0] = places
else:
    sys.path += places
from vllm_kvtier.devtools.stores import open_tier
from vllm_kvtier.store.launcher import package_environment, run_code, start_store
from vllm_kvtier.store.options import StoreOptions
start_store(path, StoreOptions(size="4MiB", disk_path=disk, disk_size="8MiB", idle_seconds=30))
open_tier(path)
subprocess.run(run_code("import found_there; print(sys.path)"), env=package_environment(), cwd="/", check=True)
"""


@pytest.mark.parametrize("place", ["first", "last"])
def test_children_find_what_this_process_finds_by_a_path_of_its_own(path, tmp_path, root, place):
    """As in pex, Bazel and wrappers: the package in one folder, what it needs in others."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "dataclasses.py").write_text("raise ImportError('not that of the standard library')")
    (tmp_path / "more" / "found_there.py").write_text("")
    needs = [each for each in sys.path if "site-packages" in each]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [tmp_path / "venv" / "bin" / "python", "-c", CHANGES_PATH, path, tmp_path / "disk", place]
    done = subprocess.run(
        [*command, tmp_path / "more", root, *needs], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert serves(path) and f"'{tmp_path}'" not in done.stdout, "the current folder is not in it"


def test_store_that_cannot_be_imported_says_so_in_its_log(path, tmp_path, monkeypatch):
    (tmp_path / "vllm_kvtier").mkdir()
    (tmp_path / "vllm_kvtier" / "__init__.py").write_text("raise ImportError('half of a package')")
    monkeypatch.setattr(vllm_kvtier, "__file__", str(tmp_path / "vllm_kvtier" / "__init__.py"))
    with pytest.raises(KVTierError, match=f"see {Path(path).with_suffix('.log')}"):
        start_store(path, SMALL)
    assert "half of a package" in Path(path).with_suffix(".log").read_text()


def test_children_find_credentials_of_a_relative_path(tmp_path, monkeypatch):
    """They run in another folder."""
    (tmp_path / "key.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "key.json")
    monkeypatch.setenv("AWS_CONFIG_FILE", "~/.aws/config")
    made = launcher.package_environment()
    assert made["GOOGLE_APPLICATION_CREDENTIALS"] == str(tmp_path / "key.json")
    assert made["AWS_CONFIG_FILE"] == "~/.aws/config"


@pytest.mark.parametrize("flag", ["-s", "-E", "-I"])
def test_children_ignore_what_this_process_ignores(flag, tmp_path):
    """Else modules of the user come first there: another msgspec, say."""
    (tmp_path / "msgspec.py").write_text("raise ImportError('of the user')")
    prints = "import sys; print(sys.flags.no_user_site, sys.path)"
    code = f"import subprocess, sys; from vllm_kvtier.store.launcher import package_environment; \
subprocess.run([sys.executable, '-c', {prints!r}], check=True, env=package_environment())"
    environment = dict(os.environ)
    if flag != "-s":
        environment["PYTHONPATH"] = str(tmp_path)
    printed = subprocess.check_output([sys.executable, flag, "-c", code], text=True, env=environment)
    assert printed.startswith("0" if flag == "-E" else "1") and str(tmp_path) not in printed


def test_store_unexpected_error_reaches_its_starter(path, monkeypatch, caplog):
    def fail(*args, **options):
        raise RuntimeError("no more threads")

    monkeypatch.setattr(store_main, "serve", fail)
    read_end, write_end = os.pipe()
    assert store_main.run(path, SMALL, write_end) == 1
    with open(read_end) as told:
        assert "no more threads" in told.read()
    assert "Traceback" in caplog.text


STARTER = """
import sys
from vllm_kvtier.store.launcher import start_store
from vllm_kvtier.store.options import StoreOptions
sys.stdin.read(1)
start_store(sys.argv[1], StoreOptions(size="1MiB", idle_seconds=30))
"""


def test_store_launched_by_eight_processes_starts_once(path, root):
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", STARTER, path], stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root, text=True
        )
        for _ in range(8)
    ]
    for starter in starters:
        starter.stdin.write("!")
        starter.stdin.flush()
    stories = [starter.communicate(timeout=60)[1] for starter in starters]
    assert [starter.returncode for starter in starters] == [0] * 8, stories
    assert Path(path).with_suffix(".log").read_text().count(" serves 1 MiB") == 1


def test_store_launch_failure_shows_store_log(path):
    with pytest.raises(KVTierError, match="could not be started.*does not fit"):
        start_store(path, StoreOptions(size="1000TiB"))
    with pytest.raises(KVTierError, match="policy='best'"):
        start_store(path, StoreOptions(policy="best"))
    with pytest.raises(KVTierError, match="No such file"):
        start_store(path, StoreOptions(log_file="/no/such/folder/log"))
    with pytest.raises(KVTierError, match="/no/such/folder/s.sock.start"):
        start_store("/no/such/folder/s.sock", SMALL)
    start_store(path, SMALL)


def test_store_start_is_not_blocked_by_a_process_forked_meanwhile(path, monkeypatch):
    """An engine may fork its workers while it starts a store: they have the lock's descriptor, too."""
    read_end, write_end = os.pipe()

    def start(*_) -> None:
        pids.append(os.fork())
        if not pids[0]:
            os.close(write_end)
            os.read(read_end, 1)
            os._exit(0)

    pids: list[int] = []
    monkeypatch.setattr(launcher, "_start", start)
    try:
        start_store(path, SMALL)
        with open(f"{path}.start") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(write_end)
        os.close(read_end)
        os.waitpid(pids[0], 0)


def test_store_starts_behind_a_starter_that_was_stopped(path, monkeypatch):
    """docker pause, a debugger: every engine of the node hung with "is being started" until it went on."""
    monkeypatch.setattr(launcher, "OTHER_START_SECONDS", -29.5)
    with open(f"{path}.start", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        start_store(path, SMALL)
        assert serves(path)
        with open(f"{path}.start") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_store_starts_after_its_directory_went_with_the_users_last_login(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = launcher.store_path()
    os.rmdir(os.path.dirname(path))
    start_store(path, SMALL)
    with RawClient(path, tool_hello()) as tool:
        os.kill(tool.stat().pid, signal.SIGTERM)
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    eventually(lambda: not serves(path))
    with pytest.raises(KVTierError, match="No such file"):  # a directory of the user's is not made
        start_store(str(tmp_path / "other" / "s.sock"), SMALL)


def test_store_start_without_locks_leaks_nothing(path, monkeypatch):
    """A file system without them; engines try again each minute."""

    def none(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(launcher.fcntl, "flock", none)
    before = descriptors()
    with pytest.raises(OSError, match=os.strerror(errno.ENOLCK)):
        start_store(path, SMALL)
    assert descriptors() <= before


def test_store_slow_start_does_not_block_engine(path, tmp_path, monkeypatch):
    slow, mark = tmp_path / "python", tmp_path / "pid"
    slow.write_text(f"#!/bin/sh\necho $$ > {mark}\nexec sleep 60\n")
    slow.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(slow))
    with pytest.raises(KVTierError, match="not ready within 0.2 s"):
        start_store(path, SMALL, timeout=0.2)
    assert not alive(int(mark.read_text())), "nor is it left behind"
    monkeypatch.undo()
    start_store(path, SMALL)


def test_store_ready_late_is_used(path):
    told, send = os.pipe()
    os.close(told)
    command = [sys.executable, "-m", "vllm_kvtier.store", "--socket", path, "--size=1MiB", f"--ready-fd={send}"]
    process = subprocess.Popen(command, pass_fds=[send])
    os.close(send)
    eventually(lambda: serves(path))
    assert process.poll() is None
    process.terminate()
    assert process.wait(10) == 0


def test_store_that_does_not_serve_yet_ends_at_sigterm():
    """It may wait a minute for memory, and the kernel drops the signal where the first process of a container does not
    handle it."""
    code = """
import os, signal
from vllm_kvtier.store.server import server
server.StoreServer = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
server.serve("", None)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 128 + signal.SIGTERM


def test_store_ends_at_a_sigterm_just_before_it_serves():
    code = """
import os, signal
from types import SimpleNamespace
from vllm_kvtier.store.server import server

def install(number, handler, install=signal.signal):
    install(number, handler)
    if number == signal.SIGINT:  # the last one
        os.kill(os.getpid(), signal.SIGTERM)

signal.signal = install
memory = SimpleNamespace(nbytes=1, huge_pages=False)
server.StoreServer = lambda *_: SimpleNamespace(
    start=lambda: None, stop=lambda: print("stopped"), instance="a test", memory=memory)
server.serve("", None)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert (ran.returncode, ran.stdout) == (0, "stopped\n"), ran.stderr


def test_store_hung_is_not_started_again(path, monkeypatch):
    start_store(path, SMALL)
    pid = pid_of(path)
    stop(pid)
    assert serves(path, timeout=0.2)
    monkeypatch.setattr(launcher, "serves", lambda p: serves(p, 0.2))
    start_store(path, SMALL)
    os.kill(pid, signal.SIGCONT)
    assert shake_hands(path, tool_hello(), 5.0)[0].pid == pid


def test_store_killed_is_replaced_at_once(path):
    start_store(path, SMALL)
    pid = pid_of(path)
    os.kill(pid, signal.SIGKILL)
    assert Path(path).exists()
    eventually(lambda: not serves(path))
    start_store(path, SMALL)
    assert pid_of(path) not in (None, pid)


def test_store_unused_exits_and_is_replaced(path):
    start_store(path, StoreOptions(size="1MiB", idle_seconds=0.5))
    pid = pid_of(path)
    with RawClient(path, engine_hello()):
        time.sleep(0.8)
        assert alive(pid)
    eventually(lambda: not serves(path))
    start_store(path, SMALL)
    assert pid_of(path) not in (None, pid)


def test_store_path_is_private_and_name_is_checked():
    path = Path(store_path())
    assert path.name == "store-default.sock" and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert store_path("a.b-c_1") != store_path()
    for name in ("", "../x", "a b", "x" * 41):
        with pytest.raises(ConfigError):
            store_path(name)


@pytest.fixture
def usual(run_dir, monkeypatch):
    """The usual places of sockets: of a login, as this process, and of a service."""
    places = login, service = run_dir / "login", run_dir / "service"
    for place in places:
        (place / f"kvtier-{os.getuid()}").mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(runtime_dir, "USUAL", (f"{run_dir}/login", f"{run_dir}/service"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(login))
    return [place / f"kvtier-{os.getuid()}" / "store-default.sock" for place in (login, service)]


@pytest.fixture
def machine_unseen(monkeypatch):
    """`kvtier doctor` without its checks of this machine, which take long."""
    monkeypatch.setattr(doctor, "examine", lambda options, show: examine(replace(options, here=False), show))


@pytest.fixture
def serving(monkeypatch):
    """Sockets at which a store serves; and which were tried."""
    found, tried = set(), []
    monkeypatch.setattr(launcher, "serves", lambda path: tried.append(path) or path in found)
    monkeypatch.setattr(doctor_store, "serves", launcher.serves)
    return found, tried


def test_store_of_service_is_found_by_login(usual, machine_unseen, monkeypatch):
    """And the other way round. Before, each had a store, with a tenth of the memory."""
    login, service = map(str, usual)
    start_store(service, SMALL)
    try:
        assert store_path() == service
        assert "at " + service in run("doctor").output.replace("\n", " ")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(usual[1].parents[1]))
        assert store_path() == service and store_path("other") == str(usual[1].with_name("store-other.sock"))
    finally:
        os.kill(pid_of(service), signal.SIGKILL)


def test_store_of_other_place_is_used_only_if_there_is_none_here(usual, serving):
    login, service = map(str, usual)
    assert store_path() == login and not serving[1], "no socket is there: none is tried"
    usual[1].touch()
    assert store_path() == login and serving[1] == [login, service], "a killed store left it"
    serving[0].update((login, service))
    assert store_path() == login


def test_store_of_process_with_a_directory_of_its_own_is_its_own(usual, serving, run_dir, monkeypatch):
    """As those of tests, demos and benchmarks."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run_dir))
    usual[1].touch()
    serving[0].add(str(usual[1]))
    assert Path(store_path()).parents[1] == run_dir and not serving[1]


def test_store_in_directory_that_others_can_write_to_is_not_used(usual, serving):
    usual[1].touch()
    serving[0].add(str(usual[1]))
    usual[1].parent.chmod(0o777)
    assert store_path() == str(usual[0]) and not serving[1]


def test_doctor_says_where_it_looks_for_the_store(usual, machine_unseen):
    shown = run("doctor").output.replace("\n", " ")
    assert f"no store listens at {usual[0]} or {usual[1]}" in shown


def test_doctor_warns_of_second_store(usual, machine_unseen, serving):
    login, service = map(str, usual)
    start_store(login, SMALL)
    try:
        usual[1].touch()
        serving[0].update((login, service))
        assert f"this user has a second one, at {service}" in run("doctor").output.replace("\n", " ")
    finally:
        os.kill(pid_of(login), signal.SIGKILL)


# -- commands --------------------------------------------------------------------------------------------------


def run(*arguments: str):
    return CliRunner().invoke(app, arguments)


def test_store_stats_and_clear_commands(path):
    start_store(path, SMALL)
    with RawClient(path, engine_hello()) as client:
        eventually(lambda: client.stat().ready_bytes == 1 << 20)
        client.store(block_hashes_of((5, "x")))
        shown = json.loads(run("stats", "--socket", path, "--json").output)
        assert shown["pool_bytes"] == 1 << 20 and shown["index"]["entries"] == 5
        assert shown["requested_bytes"] == 1 << 20
        assert shown["index"]["namespaces"] == 1
        assert [c["name"] for c in shown["clients"] if c["kind"] == "engine"] == ["engine"]
        table = run("stats", "--socket", path)
        assert table.exit_code == 0 and "1048576 (1 MiB)" in table.output and "engine" in table.output
        assert "0 blocks" in run("clear", "--socket", path, "--space", "00" * 16).output
        assert "5 blocks" in run("clear", "--socket", path, "--all").output


def test_store_commands_fail_with_cause(path):
    for arguments in (["stats"], ["clear", "--all"]):
        failed = run(*arguments, "--socket", path)
        assert failed.exit_code == 1 and "no node store listens" in failed.output.replace("\n", " ")
    assert run("clear", "--socket", path).exit_code == 2
    assert run("clear", "--socket", path, "--space", "xyz").exit_code == 2
    assert run("clear", "--socket", path, "--space", "00").exit_code == 2
    assert run("clear", "--socket", path, "--all", "--space", "00" * 16).exit_code == 2
    failed = run("store", "--socket", path, "--size", "1000TiB")
    assert failed.exit_code == 1
    assert run("store", "--socket", path, "--numa", "mars").exit_code == 2


def test_store_command_serves_until_sigint(path, root):
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_kvtier.cli", "store", "--socket", path, "--size", "1MiB"],
        cwd=root,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=interruptible,
    )
    eventually(lambda: Path(path).exists() and serves(path))
    process.send_signal(signal.SIGINT)
    _, story = process.communicate(timeout=10)
    assert process.returncode == 0 and "ended" in story and "Traceback" not in story


def test_store_imports_no_vllm_torch_or_typer(root):
    code = (
        "import sys; import vllm_kvtier.store.__main__, vllm_kvtier.store.client, "
        "vllm_kvtier.store.memory.client_mapping; "
        "print([n for n in ('vllm', 'torch', 'typer', 'numpy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_store_tool_with_other_protocol_is_refused(path):
    start_store(path, SMALL)
    with pytest.raises(KVTierError, match="refused"):
        shake_hands(path, m.Hello("x", 1, "tool", protocol=m.PROTOCOL + 1), 5.0)
