"""Reading another process's memory: real processes that live, die, unmap, and do not let one in."""

import ctypes
import errno
import os
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from support import descriptors, descriptors_of_processes, eventually, stop

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store import linux
from vllm_kvtier.wire.messages import Shared, SharedSpan
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.worker.peer_fetch import peer_process_watch, process_memory
from vllm_kvtier.worker.peer_fetch.peer_process_watch import PeerProcessWatch
from vllm_kvtier.worker.peer_fetch.process_memory import ProcessMemory, check, identity, node_name, share

SIZE = 8 << 20

SOURCE = """
import mmap, sys
import msgspec, numpy as np
from vllm_kvtier.worker.peer_fetch.process_memory import share
size = int(sys.argv[1])
memory = mmap.mmap(-1, size)
bytes_of = np.frombuffer(memory, np.uint8)
bytes_of[:] = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
print(msgspec.msgpack.encode(share([(bytes_of.ctypes.data, size)])).hex(), flush=True)
for line in sys.stdin:
    if line.strip() == "unmap":
        del bytes_of
        memory.close()
    print("done", flush=True)
"""


class Source:
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SOURCE, str(SIZE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.shared = msgspec.msgpack.decode(bytes.fromhex(self.process.stdout.readline()), type=Shared)
        self.content = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
        self.base = self.shared.spans[0].base

    def send(self, word):
        print(word, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "done\n"

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def source():
    made = Source()
    yield made
    made.end()


def read(memory, base, offsets, sizes):
    """As an array one piece after another."""
    offsets, sizes = np.asarray(offsets), np.asarray(sizes)
    got = np.zeros(int(sizes.sum()), np.uint8)
    memory.read(got.ctypes.data + np.cumsum(sizes) - sizes, base + offsets, sizes)
    return got


def test_process_identity_names_pid_and_start():
    us, text = identity(), open("/proc/self/stat").read()
    assert us.pid == os.getpid() and str(us.started) in text.split() and us == identity()
    child = subprocess.run(
        [sys.executable, "-c", "from vllm_kvtier.worker.peer_fetch.process_memory import identity; print(*identity())"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert child[0] == us.node and int(child[1]) != us.pid and int(child[2]) >= us.started


def test_process_whose_name_is_cut_within_a_character_has_an_identity():
    """Linux keeps 15 bytes of it."""
    rename = "import ctypes; ctypes.CDLL(None).prctl(15, 'a推理服务模型'.encode()[:15] + bytes(1), 0, 0, 0)"
    code = f"{rename}; from vllm_kvtier.worker.peer_fetch.process_memory import identity; print(identity().pid)"
    assert int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout) > 0


def test_process_without_identity_names_its_host_and_shares_nothing(monkeypatch):
    assert node_name() == identity().node

    def refuse(pid):
        raise FileNotFoundError("/proc/sys/kernel/random/boot_id")

    monkeypatch.setattr(process_memory, "_node", refuse)
    assert node_name() == socket.gethostname()
    with pytest.raises(KVTierError, match="its memory cannot be shared"):
        share([])


@pytest.mark.parametrize("pieces", [1, 7, 1024, 1025, 5000])
def test_process_memory_reads_unaligned_ranges(source, pieces):
    rng = np.random.default_rng(pieces)
    sizes = rng.integers(1, 1500, pieces)
    offsets = rng.integers(0, SIZE - 1500, pieces)
    got = read(ProcessMemory(source.shared), source.base, offsets, sizes)
    wanted = [source.content[o : o + n] for o, n in zip(offsets, sizes, strict=True)]
    assert np.array_equal(got, np.concatenate(wanted))


def test_process_memory_reads_own_process():
    mine = np.arange(1000, dtype=np.uint8)
    memory = ProcessMemory(share([(mine.ctypes.data, mine.nbytes)]))
    assert np.array_equal(read(memory, mine.ctypes.data, [500, 0], [100, 100]), np.r_[mine[500:600], mine[:100]])


@pytest.mark.parametrize("reaped", [True, False])
def test_process_memory_of_ended_process_raises(source, reaped):
    memory = ProcessMemory(source.shared)
    source.process.kill()
    if reaped:
        source.process.wait()
    else:
        eventually(lambda: ") Z " in open(f"/proc/{source.process.pid}/stat").read())
    with pytest.raises(KVTierError, match=f"process {source.process.pid} has ended"):
        read(memory, source.base, [0], [100])
    with pytest.raises(KVTierError, match="has ended"):
        ProcessMemory(source.shared)


def test_process_memory_killed_during_read_is_right_or_raises(source):
    """What was read is right or an error; there is no third."""
    memory, rounds = ProcessMemory(source.shared), 0
    offsets = np.arange(0, SIZE, 4096)
    killer = threading.Timer(0.2, source.process.kill)
    killer.start()
    try:
        while True:
            assert rounds < 100_000
            assert np.array_equal(read(memory, source.base, offsets, np.full(len(offsets), 4096)), source.content)
            rounds += 1
    except KVTierError as error:
        assert str(source.process.pid) in str(error) and rounds
    finally:
        killer.join()


def test_process_memory_of_stopped_process_is_read(source):
    stop(source.process.pid)
    got = read(ProcessMemory(source.shared), source.base, [4096], [4096])
    assert np.array_equal(got, source.content[4096:8192])


def test_process_memory_unmapped_raises(source):
    memory = ProcessMemory(source.shared)
    source.send("unmap")
    with pytest.raises(KVTierError, match="no longer has (all of )?the memory"):
        read(memory, source.base, [0], [4096])
    with pytest.raises(KVTierError, match="no longer has the memory"):
        ProcessMemory(source.shared)


def test_process_memory_range_ending_outside_raises(source):
    with pytest.raises(KVTierError, match="no longer has"):
        read(ProcessMemory(source.shared), 0, [source.base, 64], [4096, 4096])


def test_process_memory_of_other_process_node_or_span_is_refused(source):
    check(source.shared)
    for change, words in (
        (dict(started=source.shared.started + 1), "another has its pid now"),
        (dict(node="elsewhere"), "another node or in another container"),
        (dict(pid=(1 << 22) + 1), "has ended"),
        (dict(spans=()), "shares no memory"),
        (dict(spans=(SharedSpan(4096, 100, b""),)), "no longer has the memory"),
    ):
        with pytest.raises(KVTierError, match=words):
            ProcessMemory(msgspec.structs.replace(source.shared, **change))


def test_process_memory_of_reused_pid_raises(source, monkeypatch):
    memory = ProcessMemory(source.shared)
    monkeypatch.setattr(process_memory, "_started", lambda pid: source.shared.started + 5)
    with pytest.raises(KVTierError, match="another has its pid"):
        read(memory, source.base, [0], [100])


READER = """
import ctypes, os, sys
import msgspec, numpy as np
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire.messages import Shared
from vllm_kvtier.worker.peer_fetch.process_memory import ProcessMemory, _libc
shared = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=Shared)
_libc()
if not os.getuid():
    os.setuid(65534)  # without root's capabilities
try:
    ProcessMemory(shared)
except KVTierError as error:
    print(error)
"""


def test_process_memory_without_permission_raises_with_hint():
    mine = np.zeros(100, np.uint8)
    shared = share([(mine.ctypes.data, 100)])
    libc = ctypes.CDLL(None)
    dumpable = libc.prctl(3, 0, 0, 0, 0)
    libc.prctl(4, 0, 0, 0, 0)  # then not even a process of the same user may
    try:
        said = subprocess.run(
            [sys.executable, "-c", READER, msgspec.msgpack.encode(shared).hex()],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    finally:
        libc.prctl(4, dumpable, 0, 0, 0)
    assert f"read the memory of process {os.getpid()}" in said and "SYS_PTRACE" in said


@pytest.mark.parametrize("number, words", [(38, "no process_vm_readv"), (12, "cannot be read: Cannot allocate")])
def test_process_memory_error_names_cause(monkeypatch, number, words):
    mine = np.zeros(8, np.uint8)
    shared = share([(mine.ctypes.data, 8)])
    monkeypatch.setattr(process_memory, "_libc", lambda: SimpleNamespace(process_vm_readv=lambda *arguments: -1))
    ctypes.set_errno(number)
    with pytest.raises(KVTierError, match=words):
        ProcessMemory(shared)


def test_shared_memory_allows_ptrace_where_yama_restricts(monkeypatch):
    told = []
    monkeypatch.setattr(process_memory, "_libc", lambda: SimpleNamespace(prctl=lambda *a: told.append(a) or -1))
    share([(4096, 8)])
    [(option, who, *_)] = told
    assert option == int.from_bytes(b"Yama", "big") and who.value == (1 << 64) - 1


def test_process_memory_share_without_proc_raises(monkeypatch):
    monkeypatch.setattr(process_memory, "_started", lambda pid: open(f"/nowhere/{pid}"))
    with pytest.raises(KVTierError, match="/proc has no identity"):
        share([(4096, 8)])


# -- when it ends ----------------------------------------------------------------------------------------------------


@pytest.fixture
def watched():
    reactor, gone = Reactor("watch"), []
    watch = PeerProcessWatch(reactor, gone.append)
    reactor.start()
    yield watch, gone
    reactor.stop()


@pytest.mark.parametrize("descriptors", [True, False])
def test_source_process_end_is_reported_once(source, watched, monkeypatch, descriptors):
    watch, gone = watched
    if not descriptors:
        monkeypatch.setattr(peer_process_watch, "RECHECK_SECONDS", 0.02)
        monkeypatch.setattr(linux, "pidfd_open", lambda pid: (_ for _ in ()).throw(OSError(38, "not implemented")))
    us = share([(4096, 8)])
    watch.follow("s/1", [us, source.shared, source.shared])
    watch.follow("s/1", [source.shared])
    watch.follow("ours", [us])
    eventually(lambda: len(watch._followed) == 2)
    assert not gone and (not descriptors or eventually(lambda: descriptors_of_processes() == 3))
    source.process.kill()
    eventually(lambda: gone)
    source.process.wait()
    assert gone == ["s/1"] and list(watch._followed) == ["ours"]
    watch.follow("late", [source.shared])
    eventually(lambda: len(gone) == 2)
    assert gone == ["s/1", "late"] and descriptors_of_processes() == descriptors
    with pytest.raises(KVTierError):
        check(source.shared)


def test_source_process_that_cannot_be_looked_up_now_has_not_ended(source, watched, monkeypatch):
    """Its engine would be unknown from then on."""
    watch, gone = watched
    tries, started = [], process_memory._started

    def no_descriptors(pid):
        tries.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(peer_process_watch, "RECHECK_SECONDS", 0.02)
    monkeypatch.setattr(linux, "pidfd_open", no_descriptors)
    monkeypatch.setattr(process_memory, "_started", no_descriptors)
    watch.follow("s/1", [source.shared])
    eventually(lambda: len(tries) > 3)
    assert not gone
    monkeypatch.setattr(process_memory, "_started", started)
    source.process.kill()
    source.process.wait()
    eventually(lambda: gone == ["s/1"])


def test_peer_process_watch_stop_closes_descriptors(source):
    reactor, gone = Reactor("watch"), []
    watch = PeerProcessWatch(reactor, gone.append)
    reactor.start()
    before = descriptors()
    watch.follow("s/1", [source.shared])
    eventually(lambda: (descriptors() - before).total() == 1)
    ours = watch._followed["s/1"][:]
    reactor.stop()
    assert ours and not gone
    for descriptor in ours:
        with pytest.raises(OSError):
            os.fstat(descriptor)
