"""`kvtier doctor` names what this machine lacks: planted limits, drivers, disks, sockets and stores."""

import ctypes
import errno
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from store_process import Store
from support import eventually, stop
from typer.testing import CliRunner

from vllm_kvtier.cli.__main__ import app
from vllm_kvtier.doctor import disk, gpus, machine, packages, ports, store
from vllm_kvtier.doctor.report import Check, exit_code
from vllm_kvtier.store import messages as m
from vllm_kvtier.store.lower.disk.files import Files
from vllm_kvtier.vllm_compat import probe, version
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


def test_exit_codes():
    checks = [Check("a", state, "") for state in ("ok", "unknown", "warn", "fail")]
    assert [exit_code(checks[:n]) for n in range(5)] == [0, 0, 0, 1, 2]


def test_here_as_it_is():
    """The command as a user runs it first: every check of this machine says something."""
    result = CliRunner().invoke(app, ["doctor", "--json", "--socket", "/nowhere/store.sock"])
    checks = json.loads(result.stdout)
    names = [check["name"] for check in checks]
    assert {"vLLM", "GPU", "memory", "shared memory", "locked memory", "open files", "NIXL", "node store"} <= set(names)
    assert all(check["sentence"] for check in checks)
    assert result.exit_code == 2 and "no store listens at /nowhere" in checks[-1]["sentence"]
    text = CliRunner().invoke(app, ["doctor", "--socket", "/nowhere/store.sock"])
    assert "FAIL   node store: no store listens" in text.stdout and "-> `kvtier store` starts one" in text.stdout


# -- what is installed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("here", "cause"), [("0.20.0", "this is vLLM 0.20.0"), (None, "no vLLM is installed")])
def test_the_wrong_vllm(monkeypatch, here, cause):
    monkeypatch.setattr(version, "installed_version", lambda: here)
    check = packages.vllm()
    assert check.state == "fail" and cause in check.sentence


def test_probe_has_a_check_for_each_row_of_its_table():
    checks = packages.probe()
    assert [check.name for check in checks] == [f"vLLM's {row.name}" for row in probe.rows()]
    assert {check.state for check in checks} == {"ok"}
    assert "(behaviour; for: everything)" in next(c.sentence for c in checks if c.name == "vLLM's block hashes")


@pytest.mark.parametrize(
    ("feature", "state", "found", "words"),
    [
        ("everything", "failed", "fail", "touch is missing; no engine starts with the connector"),
        ("KV events", "failed", "warn", "touch is missing; switched off: KV events"),
        ("KV events", "absent", "ok", "not in this version or on this machine, touch is missing"),
    ],
)
def test_probe_says_what_a_row_costs(monkeypatch, feature, state, found, words):
    row = {
        "name": "block pool", "feature": feature, "need": "blocks", "how": "name", "state": state,
        "reason": "touch is missing",
    }  # fmt: skip
    done = SimpleNamespace(stdout=json.dumps({"rows": [row]}), stderr="", returncode=0)
    monkeypatch.setattr(packages.subprocess, "run", lambda *a, **k: done)
    (check,) = packages.probe()
    assert check.state == found and words in check.sentence and (check.remedy != "") == (found != "ok")


def test_probe_of_a_vllm_that_ends_the_process(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("import os; os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (check,) = packages.probe()
    assert check.state == "fail" and "exit status 3" in check.sentence


def test_a_nixl_backend_is_missing():
    check = packages.nixl(["UCX", "CARRIER_PIGEON"])
    assert check.state == "fail" and "its backend CARRIER_PIGEON is missing: there are" in check.sentence
    assert "nixl_backends" in check.remedy


def test_nixl_is_missing(tmp_path):
    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')")
    check = packages.nixl(["UCX"], {"PYTHONPATH": str(tmp_path)})
    assert check.state == "warn" and "NIXL cannot be imported" in check.sentence


def test_nixl_crashes(tmp_path):
    (tmp_path / "nixl_cu13.py").write_text("import os; os.abort()")
    check = packages.nixl(["UCX"], {"PYTHONPATH": str(tmp_path)})
    assert check.state == "fail" and "ends the process" in check.sentence


# -- limits --------------------------------------------------------------------------------------------------------


def test_the_containers_memory_is_too_small(tmp_path):
    group = {
        "proc/self/cgroup": "0::/pod",
        "sys/fs/cgroup/pod/memory.max": str(4 * GIB),
        "sys/fs/cgroup/pod/memory.current": str(GIB),
    }
    root = fake_root(tmp_path, group)
    check = machine.memory("16GiB", root)
    assert check.state == "fail" and "does not fit" in check.sentence and "4 GiB" in check.sentence
    assert machine.memory("2GiB", root).state == "ok"
    assert machine.memory("2.9GiB", root).state == "warn"
    assert machine.memory("off", root).state == "ok"


def test_locked_memory_is_too_little_for_rdma(tmp_path):
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    root = fake_root(tmp_path, {"proc/self/status": "CapEff:\t0000000000000000"})
    check = machine.memlock("8GiB", root, 8 << 20)
    assert check.state == "fail" and "(memlock) is 8 MiB: mlx5_0 cannot register the 8 GiB" in check.sentence
    assert "memlock=-1" in check.remedy
    assert machine.memlock("8GiB", root, 16 * GIB).state == "ok"
    assert machine.memlock("8GiB", root, -1).state == "ok"
    (tmp_path / "proc/self/status").write_text("CapEff:\t0000000000004000\n")
    assert machine.memlock("8GiB", root, 8 << 20).state == "ok", "who has CAP_IPC_LOCK is not bound"


def test_locked_memory_does_not_matter_without_rdma(tmp_path):
    assert machine.memlock("8GiB", fake_root(tmp_path, {}), 8 << 20).state == "ok"


@pytest.mark.parametrize(
    ("size", "free", "state"), [(64 << 20, 60 << 20, "fail"), (512 << 20, 500 << 20, "warn"), (GIB * 8, GIB, "ok")]
)
def test_shared_memory_is_small(size, free, state):
    found = SimpleNamespace(f_blocks=size, f_bavail=free, f_frsize=1)
    check = machine.shared_memory(statvfs=lambda path: found)
    assert check.state == state and (state == "ok" or "/dev/shm" in check.sentence and "--shm-size" in check.remedy)


def test_asynchronous_io_is_used_up(tmp_path):
    root = fake_root(tmp_path, {"proc/sys/fs/aio-max-nr": "65536", "proc/sys/fs/aio-nr": "65000"})
    check = machine.asynchronous_io(root)
    assert check.state == "warn" and "65,000 of 65,536" in check.sentence and "aio-max-nr" in check.remedy
    assert machine.asynchronous_io(str(tmp_path / "none")).state == "unknown"


def test_too_few_files():
    assert machine.open_files(1024).state == "warn" and machine.open_files(65536).state == "ok"


# -- GPUs ----------------------------------------------------------------------------------------------------------


class Driver:
    """libcuda with ``count`` GPUs of which some pairs cannot read each other."""

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


def test_gpus_that_see_each_other():
    found = gpus.gpus(Driver(4))
    assert [check.state for check in found] == ["ok", "ok"]
    assert found[0].sentence == "4 (Imaginary 9000), CUDA 13.1"


def test_gpus_without_peer_access():
    check = only(gpus.gpus(Driver(3, {(0, 2), (2, 0)})), "warn")
    assert "2 of 6 pairs of GPUs cannot read each other's memory (0 from 2, 2 from 0)" in check.sentence


def test_drivers_that_are_missing_or_broken():
    assert "libcuda.so.1" in only(gpus.gpus(None, device_nodes=True), "fail").sentence
    assert gpus.gpus(None, device_nodes=False)[0].state == "ok"
    assert "error 803" in only(gpus.gpus(Driver(1, broken=803)), "fail").sentence
    assert "CUDA_VISIBLE_DEVICES" in only(gpus.gpus(Driver(0)), "fail").remedy


# -- ports ---------------------------------------------------------------------------------------------------------


def test_a_port_in_use_and_by_whom():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        check = ports.port(address, has_key=False)
        assert check.state == "fail" and f"(pid {os.getpid()})" in check.sentence
        with socket.create_connection(taken.getsockname()) as client:
            assert ports.listener(client.getsockname()[1]) == "", "who only talks through a port does not listen there"
    assert ports.port(address, has_key=False).state == "ok"


def test_ports_beyond_this_machine_need_a_key():
    check = ports.port("0.0.0.0:45999", has_key=False)
    assert "needs a key shared by the cluster" in check.sentence
    assert ports.port("192.0.2.1:45999", has_key=True).state == "fail", "not an address of this machine"


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
def test_disks_that_cannot_be_written(tmp_path, call, code, cause):
    check = only(disk.disk(tmp_path, GIB, BadDisk(call, code)), "fail")
    assert cause in check.sentence and str(tmp_path) in check.sentence


def test_a_disk_that_can(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/x / ext4 rw 0 0\n")
    assert [check.state for check in disk.disk(tmp_path / "not/yet/there", 1 << 20, mounts=mounts)] == ["ok"]
    assert list(tmp_path.iterdir()) == [mounts], "nothing is left there"


def test_disks_that_are_none(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert "is no directory" in only(disk.disk(file, GIB), "fail").sentence
    mounts = tmp_path / "mounts"
    for kind, cause in (("tmpfs", "it is memory"), ("nfs4", "it is remote")):
        mounts.write_text(f"/dev/x / ext4 rw 0 0\nx {tmp_path} {kind} rw 0 0\n")
        assert cause in only(disk.disk(tmp_path, 1 << 20, mounts=mounts), "warn").sentence
    mounts.write_text("/dev/x / odd rw 0 0\n")
    found = disk.disk(tmp_path, 1 << 20, BadDisk("direct", errno.EINVAL), mounts)
    assert "(odd) has no O_DIRECT" in only(found, "warn").sentence
    assert "the tier stops at what there is" in disk.disk(tmp_path, 1 << 60)[0].sentence


# -- the node store ------------------------------------------------------------------------------------------------


@pytest.fixture
def running(tmp_path):
    made = Store(tmp_path)
    yield made
    if made.process is not None:
        made.process.send_signal(signal.SIGCONT)
        made.kill()


def test_a_store_that_serves(running):
    running.start()
    checks, counts = store.store(running.path, expected=True)
    assert counts.pid == running.process.pid
    assert [check.state for check in checks] == ["ok"] and "0 engines" in checks[0].sentence


def test_a_stale_socket(running):
    running.start()
    running.kill()
    checks, counts = store.store(running.path, expected=True)
    assert counts is None and "is stale: a store that was killed left it" in only(checks, "fail").sentence


def test_a_store_that_hangs(running):
    running.start()
    stop(running.process.pid)
    checks, _ = store.store(running.path, expected=True, seconds=0.5)
    assert "hangs: it does not answer within 0.5 s" in only(checks, "fail").sentence


def test_no_store(tmp_path):
    path = str(tmp_path / "s.sock")
    assert "no store listens" in store.socket_file(path, expected=True).sentence
    assert store.socket_file(path, expected=False).state == "unknown"
    Path(path).write_text("")
    assert "is no socket" in store.socket_file(path).sentence


def test_another_users_store(running, monkeypatch):
    running.start()
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    running_user = os.stat(running.path).st_uid
    if running_user == 0:  # root's stores are the one exception: they may be anybody's
        os.chown(running.path, 12345, -1)
    check = store.socket_file(running.path)
    assert check.state == "fail" and "belongs to user" in check.sentence and "54321" in check.sentence


def test_a_store_of_another_version(tmp_path):
    path = str(tmp_path / "s.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def refuse():
            listener.accept()[0].close()  # who only looks whether somebody listens
            client, _ = listener.accept()
            read_frame(client, time.monotonic() + 10, [], m.MAX_FRAME)
            write_frame(client, m.encode(m.Refused("the running store is vllm-kvtier 9.9 and speaks protocol 99")))
            client.close()

        thread = threading.Thread(target=refuse)
        thread.start()
        checks, _ = store.store(path, expected=True)
        thread.join(10)
    assert "refuses: the running store is vllm-kvtier 9.9" in only(checks, "fail").sentence


def test_a_tier_that_is_set_aside(running, tmp_path):
    (tmp_path / "file").write_text("")
    running.await_tiers = False
    running.start(f"--disk-path={tmp_path}/file/disk", "--disk-size=16MiB")
    eventually(lambda: running.disk().state == "set aside", 30)
    checks, _ = store.store(running.path, expected=True)
    found = only(checks, "fail")
    assert found.name == "tier disk" and "set aside: " in found.sentence and str(tmp_path) in found.sentence
