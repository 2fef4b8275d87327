"""`kvtier doctor` names what this machine lacks: planted limits, drivers, disks, sockets and stores."""

import ctypes
import errno
import json
import os
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console
from store_process import Store
from support import eventually, stop
from typer.testing import CliRunner, Result

from vllm_kvtier.cli.__main__ import app
from vllm_kvtier.cli.doctor import _print_summary
from vllm_kvtier.doctor import store
from vllm_kvtier.doctor.examine import Options, examine
from vllm_kvtier.doctor.machine import disk, gpus, limits, mooncake, packages, ports
from vllm_kvtier.doctor.report import Check, exit_code
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.launcher import start_store
from vllm_kvtier.store.memory.memory_limits import MemoryLimits
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.tiers.disk.file_ops import Files
from vllm_kvtier.vllm_compat import version
from vllm_kvtier.vllm_compat.probe import features
from vllm_kvtier.wire.stream import read_frame, write_frame

GIB = 1 << 30


def fake_root(folder: Path, files: dict[str, str]) -> str:
    files = {"proc/meminfo": f"MemTotal: {64 * GIB >> 10} kB\nMemAvailable: {50 * GIB >> 10} kB\n"} | files
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return str(folder)


def only(checks: list[Check], state: str) -> Check:
    found = [check for check in checks if check.state == state]
    assert len(found) == 1, checks
    return found[0]


def test_doctor_exit_codes_follow_worst_finding():
    checks = [Check("a", state, "") for state in ("ok", "unknown", "warn", "fail")]
    assert [exit_code(checks[:n]) for n in range(5)] == [0, 0, 0, 1, 2]


@pytest.fixture(scope="module")
def on_this_machine() -> Result:
    """The command as a user runs it first. It imports vLLM in a process of its own, which takes seconds."""
    return CliRunner().invoke(app, ["doctor", "--json", "--socket", "/nowhere/store.sock"])


def test_doctor_on_this_machine_reports_every_check(on_this_machine):
    """Every check of this machine says something."""
    checks = json.loads(on_this_machine.stdout)
    names = [check["name"] for check in checks]
    assert {"vLLM", "GPU", "memory", "shared memory", "locked memory", "open files", "NIXL", "node store"} <= set(names)
    assert all(check["message"] for check in checks)
    assert on_this_machine.exit_code == 2 and "no store listens at /nowhere" in checks[-1]["message"]
    text = CliRunner().invoke(app, ["doctor", "--remote", "--socket", "/nowhere/store.sock"])
    assert "FAIL   node store: no store listens" in text.stdout and "-> `kvtier store` starts one" in text.stdout


# -- what is installed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("here", "cause"), [("0.20.0", "this is vLLM 0.20.0"), (None, "no vLLM is installed")])
def test_doctor_unsupported_vllm_fails(monkeypatch, here, cause):
    monkeypatch.setattr(version, "installed_version", lambda: here)
    check = packages.vllm()
    assert check.state == "fail" and cause in check.message


def test_doctor_probe_has_a_check_for_each_row(on_this_machine):
    every = [msgspec.convert(check, Check) for check in json.loads(on_this_machine.stdout)]
    checks = [check for check in every if check.name.startswith("vLLM's ")]
    assert [check.name for check in checks] == [f"vLLM's {row.name}" for row in features.rows()]
    assert {check.state for check in checks} == {"ok"}
    assert "(behaviour; for: everything)" in next(c.message for c in checks if c.name == "vLLM's block hashes")


@pytest.mark.parametrize(
    ("feature", "state", "found", "words"),
    [
        ("everything", "failed", "fail", "touch is missing; no engine starts with the connector"),
        ("KV events", "failed", "warn", "touch is missing; switched off: KV events"),
        ("KV events", "absent", "ok", "not in this version or on this machine, touch is missing"),
    ],
)
def test_doctor_probe_names_feature_lost_by_a_row(monkeypatch, feature, state, found, words):
    row = {
        "name": "block pool", "feature": feature, "need": "blocks", "how": "name", "state": state,
        "reason": "touch is missing",
    }  # fmt: skip
    done = SimpleNamespace(stdout="INFO what vLLM logs\n" + json.dumps({"rows": [row]}), stderr="", returncode=0)
    monkeypatch.setattr(packages.subprocess, "run", lambda *a, **k: done)
    (check,) = packages.probe()
    assert check.state == found and words in check.message and (check.fix != "") == (found != "ok")


def test_doctor_probe_of_crashing_vllm_reports_exit_status(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("import os; os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    (check,) = packages.probe()
    assert check.state == "fail" and "exit status 3" in check.message


def test_doctor_missing_nixl_backend_fails():
    check = packages.nixl(["UCX", "CARRIER_PIGEON"])
    assert check.state == "fail" and "its backend CARRIER_PIGEON is missing; installed: " in check.message
    assert "nixl_backends" in check.fix


def test_doctor_missing_nixl_warns(tmp_path):
    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')")
    check = packages.nixl(["UCX"], {"PYTHONPATH": str(tmp_path)})
    assert check.state == "warn" and "NIXL cannot be imported" in check.message


def test_doctor_looks_for_nixl_where_the_stores_processes_do(tmp_path, monkeypatch):
    """Not in the folder that it is run in."""
    (tmp_path / "json.py").write_text("raise ImportError('of the current folder')")
    monkeypatch.chdir(tmp_path)
    assert "ends the process" not in packages.nixl([]).message


def test_doctor_nixl_crash_is_found(tmp_path):
    (tmp_path / "nixl_cu13.py").write_text("import os; os.abort()")
    check = packages.nixl(["UCX"], {"PYTHONPATH": str(tmp_path)})
    assert check.state == "fail" and "ends the process" in check.message


# -- limits --------------------------------------------------------------------------------------------------------


def test_doctor_store_larger_than_container_memory_fails(tmp_path):
    group = {
        "proc/self/cgroup": "0::/pod",
        "sys/fs/cgroup/pod/memory.max": str(4 * GIB),
        "sys/fs/cgroup/pod/memory.current": str(GIB),
    }
    root = fake_root(tmp_path, group)
    check = limits.memory("16GiB", root)
    assert check.state == "fail" and "does not fit" in check.message and "4 GiB" in check.message
    assert limits.memory("2GiB", root).state == "ok"
    assert limits.memory("2.9GiB", root).state == "warn"
    assert limits.memory("off", root).state == "ok"
    tiers = {"mooncake_segment": 2 * GIB}
    check = limits.memory("2GiB", root, tiers)
    assert check.state == "fail" and "mooncake_segment" in check.message and "store_mooncake_segment" in check.fix
    assert limits.memory("0.8GiB", root, tiers).state == "warn"
    check = limits.memory("0.5GiB", root, tiers)
    assert check.state == "ok" and "2 GiB of mooncake_segment" in check.message


@pytest.fixture
def small_machine(monkeypatch):
    """Of 4 GiB, 3 of them free, without GPUs."""
    monkeypatch.setattr(limits, "memory_limits", lambda root: MemoryLimits(4 * GIB, 3 * GIB, "this test's memory"))
    monkeypatch.setattr(gpus, "load_driver", lambda: None)
    for module, check in ((packages, "probe"), (gpus, "gpus"), (mooncake, "mooncake")):
        monkeypatch.setattr(module, check, lambda *given: [])
    monkeypatch.setattr(packages, "nixl", lambda backends: Check("NIXL", "ok", ""))


def test_doctor_counts_memory_of_a_mooncake_segment(small_machine):
    def memory(**options):
        return next(c for c in examine(Options(store_size="1GiB", **options)) if c.name == "memory")

    assert memory().state == "ok"
    assert memory(mooncake_master="h:1").state == "fail"
    assert memory(mooncake_master="h:1", mooncake_segment="0").state == "ok"
    assert "give bytes" in memory(mooncake_master="h:1", mooncake_segment="much").message


def test_doctor_beside_a_running_store_counts_no_second_one(small_machine, running, monkeypatch):
    """As in the store's own pod, which has memory for its size and little more, and 64 MiB of /dev/shm."""
    shm = SimpleNamespace(f_blocks=64 << 20, f_bavail=60 << 20, f_frsize=1)
    monkeypatch.setattr(limits, "shared_memory", partial(limits.shared_memory, statvfs=lambda path: shm))

    def states():
        checks = {each.name: each.state for each in examine(Options(store_size="16GiB", socket=running.path))}
        return checks["memory"], checks["shared memory"]

    assert states() == ("fail", "fail"), "no store runs yet"
    running.start()
    assert states() == ("ok", "unknown")


def test_doctor_small_memlock_with_rdma_fails(tmp_path):
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    root = fake_root(tmp_path, {"proc/self/status": "CapEff:\t0000000000000000"})
    check = limits.memlock("8GiB", root, 8 << 20)
    assert check.state == "fail" and "(memlock) is 8 MiB: mlx5_0 cannot register the 8 GiB" in check.message
    assert "memlock=-1" in check.fix
    assert limits.memlock("8GiB", root, 16 * GIB).state == "ok"
    assert limits.memlock("8GiB", root, -1).state == "ok"
    assert limits.memlock("8GiB", root, 16 * GIB, segment=12 * GIB).state == "fail"
    (tmp_path / "proc/self/status").write_text("CapEff:\t0000000000004000\n")
    assert limits.memlock("8GiB", root, 8 << 20).state == "ok", "CAP_IPC_LOCK lifts the limit"


def test_doctor_small_memlock_without_rdma_is_ok(tmp_path):
    assert limits.memlock("8GiB", fake_root(tmp_path, {}), 8 << 20).state == "ok"


@pytest.mark.parametrize(
    ("size", "free", "state"), [(64 << 20, 60 << 20, "fail"), (512 << 20, 500 << 20, "warn"), (GIB * 8, GIB, "ok")]
)
def test_doctor_small_shared_memory_is_found(size, free, state):
    found = SimpleNamespace(f_blocks=size, f_bavail=free, f_frsize=1)
    check = limits.shared_memory(statvfs=lambda path: found)
    assert check.state == state and (state == "ok" or ("/dev/shm" in check.message and "--shm-size" in check.fix))


def test_doctor_exhausted_aio_warns(tmp_path):
    root = fake_root(tmp_path, {"proc/sys/fs/aio-max-nr": "65536", "proc/sys/fs/aio-nr": "65000"})
    check = limits.asynchronous_io(root)
    assert check.state == "warn" and "65,000 of 65,536" in check.message and "aio-max-nr" in check.fix
    assert limits.asynchronous_io(str(tmp_path / "none")).state == "unknown"


def test_doctor_low_open_file_limit_warns():
    assert limits.open_files(1024).state == "warn" and limits.open_files(65536).state == "ok"


# -- GPUs ----------------------------------------------------------------------------------------------------------


class Driver:
    """libcuda with ``count`` GPUs, where some pairs cannot read each other."""

    def __init__(self, count: int, apart: set[tuple[int, int]] = frozenset(), broken: int = 0):
        self._count, self._apart, self._broken = count, apart, broken

    def cuInit(self, flags):
        return self._broken

    def cuDeviceGetCount(self, out):
        out._obj.value = self._count
        return 0

    def cuDriverGetVersion(self, out):
        out._obj.value = 13010
        return 0

    def cuDeviceGet(self, out, ordinal):
        out._obj.value = 10 + ordinal  # a handle need not be the ordinal
        return 0

    def cuDeviceGetName(self, out, size, device):
        assert 10 <= device < 10 + self._count
        ctypes.memmove(out, b"Imaginary 9000\0", 15)
        return 0

    def cuDeviceCanAccessPeer(self, out, a, b):
        out._obj.value = (a - 10, b - 10) not in self._apart
        return 0


def test_doctor_gpus_with_peer_access_are_ok():
    found = gpus.gpus(Driver(4))
    assert [check.state for check in found] == ["ok", "ok"]
    assert found[0].message == "4 (Imaginary 9000), CUDA 13.1"


def test_doctor_gpus_without_peer_access_warn():
    check = only(gpus.gpus(Driver(3, {(0, 2), (2, 0)})), "warn")
    assert "2 of 6 pairs of GPUs cannot read each other's memory (0 from 2, 2 from 0)" in check.message


def test_doctor_does_not_take_gpus_of_amd_for_none(monkeypatch):
    monkeypatch.setattr(gpus.os.path, "exists", lambda path: path == "/dev/kfd")
    assert "of AMD" in only(gpus.gpus(None), "unknown").message


def test_doctor_summary_counts_checks_that_could_not_be_made(capsys):
    _print_summary([Check("a", "ok", ""), Check("b", "unknown", "")], Console())
    assert capsys.readouterr().out == "\n0 errors, 0 warnings, 1 ok, 1 not known\n"


def test_doctor_missing_or_broken_cuda_driver_fails():
    assert "libcuda.so.1" in only(gpus.gpus(None, device_nodes=True), "fail").message
    assert gpus.gpus(None, device_nodes=False)[0].state == "ok"
    assert "error 803" in only(gpus.gpus(Driver(1, broken=803)), "fail").message
    assert "CUDA_VISIBLE_DEVICES" in only(gpus.gpus(Driver(0)), "fail").fix


# -- ports ---------------------------------------------------------------------------------------------------------


def test_doctor_port_in_use_names_its_process():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        check = ports.port(address, has_key=False)
        assert check.state == "fail" and f"(pid {os.getpid()})" in check.message
        with socket.create_connection(taken.getsockname()) as client:
            assert ports.listener(client.getsockname()[1]) == "", "a client's own port is no listener"
    assert ports.port(address, has_key=False).state == "ok"


def test_doctor_non_loopback_port_without_key_is_found():
    check = ports.port("0.0.0.0:45999", has_key=False)
    assert "needs a key shared by the cluster" in check.message
    assert ports.port("192.0.2.1:45999", has_key=True).state == "fail", "not an address of this machine"


def test_doctor_port_of_name_with_ipv6_address_only_is_tried_there(monkeypatch):
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        answer = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", number, 0, 0))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
        assert f"(pid {os.getpid()})" in ports.port(f"six.example:{number}", has_key=True).message
    check = ports.port(f"six.example:{number}", has_key=True)
    assert check.state == "warn" and check.message.startswith("free") and "::1" in check.fix


def test_doctor_port_of_unknown_name_fails(monkeypatch):
    assert "cannot listen: " in only([ports.port("no.such.name.invalid:7100", has_key=True)], "fail").message


# -- disks ---------------------------------------------------------------------------------------------------------


class BadDisk(Files):
    def __init__(self, call: str, code: int):
        self._call, self._code = call, code

    def _fails(self, call: str) -> None:
        if call == self._call:
            raise OSError(self._code, os.strerror(self._code))

    def open(self, path, flags):
        self._fails("direct" if flags & os.O_DIRECT else "open")
        return super().open(path, flags)

    def allocate(self, fd, offset, nbytes):
        self._fails("allocate")

    def pwrite(self, fd, data, offset):
        self._fails("pwrite")
        return super().pwrite(fd, data, offset)


@pytest.mark.parametrize(
    ("call", "code", "cause"),
    [
        ("open", errno.EROFS, "mounted read-only"),
        ("open", errno.EACCES, "may not write to"),
        ("allocate", errno.ENOSPC, "is full"),
        ("pwrite", errno.EDQUOT, "is full"),
        ("pwrite", errno.EIO, "cannot be written: Input/output error"),
    ],
)
def test_doctor_unwritable_disk_fails(tmp_path, call, code, cause):
    check = only(disk.disk(tmp_path, GIB, BadDisk(call, code)), "fail")
    assert cause in check.message and str(tmp_path) in check.message


def test_doctor_disk_below_a_folder_of_another_user_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda path: BadDisk("open", errno.EACCES).open(str(path), 0))
    assert "may not write to" in only(disk.disk(tmp_path, GIB), "fail").message


def test_doctor_disk_that_cannot_be_listed_fails(tmp_path, monkeypatch):
    """A directory of mode 0300, for example: the disk tier reads its list of files."""
    monkeypatch.setattr(os, "scandir", lambda path: BadDisk("open", errno.EACCES).open(str(path), 0))
    monkeypatch.setattr(os, "listdir", lambda path: BadDisk("open", errno.EACCES).open(str(path), 0))
    check = only(disk.disk(tmp_path, GIB), "fail")
    assert "cannot be listed: Permission denied" in check.message and str(tmp_path) in check.message


def test_doctor_writable_disk_is_ok_and_left_clean(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text("1 1 8:1 / / rw - ext4 /dev/x rw\n")
    (check,) = disk.disk(tmp_path / "new", 1 << 20, mounts=mounts)
    assert check.state == "ok" and "would be made on the file system that is mounted at /" in check.message
    assert list(tmp_path.iterdir()) == [mounts], "nothing is left there"


def test_doctor_disk_that_is_not_mounted_fails(tmp_path, monkeypatch):
    check = only(disk.disk(tmp_path / "nvme/kvtier", 1 << 20), "fail")
    assert f"there is no {tmp_path}/nvme" in check.message and "mount" in check.fix
    monkeypatch.setattr(disk, "unmounted", lambda folder, table: tmp_path)
    assert f"nothing is mounted at {tmp_path}" in only(disk.disk(tmp_path / "kvtier", 1 << 20), "fail").message


def test_doctor_path_that_is_no_local_disk_is_found(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert "is not a directory" in only(disk.disk(file, GIB), "fail").message
    mounts = tmp_path / "mounts"
    for kind, cause in (("tmpfs", "it is memory"), ("nfs4", "it is remote")):
        mounts.write_text(f"1 1 8:1 / / rw - ext4 /dev/x rw\n2 1 0:1 / {tmp_path} rw - {kind} x rw\n")
        assert cause in only(disk.disk(tmp_path, 1 << 20, mounts=mounts), "warn").message
    mounts.write_text("1 1 8:1 / / rw - odd /dev/x rw\n")
    found = disk.disk(tmp_path, 1 << 20, BadDisk("direct", errno.EINVAL), mounts)
    assert "(odd) has no O_DIRECT" in only(found, "warn").message
    (small, *_) = disk.disk(tmp_path, 1 << 60)
    assert small.state == "warn" and "TiB that are configured" in small.message
    assert "stay free for others" in small.message and "a disk of its own" in small.fix


# -- the node store ------------------------------------------------------------------------------------------------


@pytest.fixture
def running(tmp_path):
    made = Store(tmp_path)
    yield made
    if made.process is not None:
        made.process.send_signal(signal.SIGCONT)
        made.kill()


def test_doctor_running_store_is_ok(running):
    running.start()
    checks, counts = store.store(running.path, expected=True)
    assert counts.pid == running.process.pid
    assert [check.state for check in checks] == ["ok"] and "0 engines" in checks[0].message


def test_doctor_stale_store_socket_is_found(running):
    running.start()
    running.kill()
    checks, counts = store.store(running.path, expected=True)
    assert counts is None and "is stale: a killed store left it" in only(checks, "fail").message


def test_doctor_hung_store_is_found(running):
    running.start()
    stop(running.process.pid)
    checks, _ = store.store(running.path, expected=True, seconds=0.5)
    assert "hangs: it does not answer within 0.5 s" in only(checks, "fail").message


def test_doctor_without_store_says_so(tmp_path):
    path = str(tmp_path / "s.sock")
    assert "no store listens" in store.socket_file(path, expected=True).message
    assert store.socket_file(path, expected=False).state == "unknown"
    Path(path).write_text("")
    assert "is not a socket" in store.socket_file(path).message


def test_doctor_and_stats_show_why_a_store_could_not_start(tmp_path):
    path = str(tmp_path / "s.sock")

    def said() -> list[str]:
        stats = CliRunner().invoke(app, ["stats", "--socket", path])
        assert stats.exit_code == 1
        return [store.socket_file(path).message, " ".join(stats.stderr.split())]

    assert not any("log" in each for each in said())
    with pytest.raises(KVTierError, match="does not fit"):
        start_store(path, StoreOptions(size="9000GiB"))
    assert all("a pool of 9000GiB" in each and "does not fit: " in each for each in said())
    assert all(f"{tmp_path}/s.log" in each for each in said())
    with open(tmp_path / "s.log", "a") as log:
        log.write("2026-01-01 00:00:00,000 INFO kvtier: store: ends: no engine has used it\n")
    assert not any("log" in each for each in said()), "a later one ended by itself"
    (tmp_path / "s.log").write_bytes(b"\xff" * 9999 + b"\nImportError: no module\n\n")
    assert all("ends with: ImportError: no module)" in each for each in said())


def test_doctor_store_of_other_user_is_found(running, monkeypatch):
    running.start()
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    running_user = os.stat(running.path).st_uid
    if running_user == 0:  # root's stores are the one exception: they may be any user's
        os.chown(running.path, 12345, -1)
    check = store.socket_file(running.path)
    assert check.state == "fail" and "belongs to user" in check.message and "54321" in check.message


def test_doctor_store_of_other_version_is_found(tmp_path):
    path = str(tmp_path / "s.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def refuse():
            listener.accept()[0].close()  # the probe only connects
            client, _ = listener.accept()
            read_frame(client, time.monotonic() + 10, [], m.MAX_FRAME)
            write_frame(client, m.encode(m.Refused("the running store is vllm-kvtier 9.9 and speaks protocol 99")))
            client.close()

        thread = threading.Thread(target=refuse)
        thread.start()
        checks, _ = store.store(path, expected=True)
        thread.join(10)
    assert "refuses: the running store is vllm-kvtier 9.9" in only(checks, "fail").message


def test_doctor_unavailable_tier_is_found(running, tmp_path):
    (tmp_path / "file").write_text("")
    running.await_tiers = False
    running.start(f"--disk-path={tmp_path}/file/disk", "--disk-size=16MiB")
    eventually(lambda: running.disk().state == "unavailable", 30)
    checks, _ = store.store(running.path, expected=True)
    found = only(checks, "fail")
    assert found.name == "tier disk" and "unavailable: " in found.message and str(tmp_path) in found.message


def test_doctor_and_stats_name_the_nodes_that_do_not_answer(running):
    """Nothing was looked up. No process listens at one port, and at the other one another that is no store."""
    running.await_tiers = False
    with socket.socket() as taken, socket.socket() as stranger:
        taken.bind(("127.0.0.1", 0))
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        down, silent = (f"127.0.0.1:{each.getsockname()[1]}" for each in (taken, stranger))
        running.start(f"--nodes={down},{silent}")
        eventually(lambda: running.tier("nodes").state == "unavailable", 30)
        checks, _ = store.store(running.path, expected=True)
        rows = CliRunner().invoke(app, ["stats", "--socket", running.path]).output
    assert "0 of 2 nodes answer" in only(checks, "fail").message
    nodes = {check.name: check for check in checks if check.name.startswith("node 127")}
    assert {check.state for check in nodes.values()} == {"warn"}
    assert nodes[f"node {down}"].message == "no connection can be made"
    assert "does not answer" in nodes[f"node {silent}"].message
    rows = [" ".join(row.split()) for row in rows.splitlines()]
    assert "nodes state unavailable" in rows and f"node {down} no connection can be made" in rows
