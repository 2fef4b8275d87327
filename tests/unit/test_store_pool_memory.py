"""How much memory the pool may take, and how it becomes usable."""

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support import Clock, eventually
from tier_backend_fakes import FakeReactor

from vllm_kvtier.errors import ConfigError, KVTierError
from vllm_kvtier.store import linux
from vllm_kvtier.store.index.index import Index
from vllm_kvtier.store.memory import pool_memory
from vllm_kvtier.store.memory.client_mapping import PoolMapping
from vllm_kvtier.store.memory.memory_limits import (
    MIN_POOL,
    MemoryInUse,
    MemoryLimits,
    format_bytes,
    memory_limits,
    pool_bytes,
)
from vllm_kvtier.store.memory.pool_memory import PoolMemory, next_step
from vllm_kvtier.store.memory.slot_pool import SlotPool
from vllm_kvtier.store.options import StoreOptions, parse
from vllm_kvtier.store.protocol import PAGE, PIECE_BYTES
from vllm_kvtier.store.server import server
from vllm_kvtier.store.tiers import tier_stack
from vllm_kvtier.store.tiers.disk.tier import DiskTier
from vllm_kvtier.store.tiers.tier_stack import bytes_beside_pool

GIB, MIB = 1 << 30, 1 << 20
PLENTY = MemoryLimits(100 * GIB, 90 * GIB, "this machine's memory")


# -- sizes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64GiB", 64 * GIB),
        ("64G", 64 * GIB),
        ("64 gib", 64 * GIB),
        ("1.5Gi", 3 * GIB // 2),
        ("10GB", 10 * 10**9 // PAGE * PAGE),
        ("100MB", 100 * 10**6 // PAGE * PAGE),
        ("65536", 65536),
        ("65536B", 65536),
        ("70000", 65536 + PAGE),
        ("10%", 10 * GIB),
        ("12.5 %", 25 * GIB // 2),
        ("auto", 25 * GIB),
    ],
)
def test_pool_size_text_is_parsed(text, nbytes):
    assert pool_bytes(text, PLENTY) == nbytes


@pytest.mark.parametrize("text", ["", "much", "64X", "-1G", "1e9", "101%", "G", "1 2G", "0", "4096", "0%"])
def test_pool_size_invalid_raises(text):
    with pytest.raises(ConfigError):
        pool_bytes(text, PLENTY)


def test_pool_size_too_large_raises_with_fitting_size():
    limits = MemoryLimits(16 * GIB, 4 * GIB, "this container's memory.max")
    with pytest.raises(ConfigError, match=r"8G \(8 GiB\) does not fit: this container's memory.max is 16 GiB") as e:
        pool_bytes("8G", limits)
    fits = int(str(e.value).partition("(")[2].rpartition(" bytes)")[0].rpartition("(")[2])
    assert fits == limits.fits and pool_bytes(str(fits), limits) == fits
    with pytest.raises(ConfigError):
        pool_bytes(str(fits + PAGE), limits)


def test_pool_size_auto_depends_on_free_memory():
    assert pool_bytes("auto", MemoryLimits(100 * GIB, 4 * GIB, "")) < 3.2 * GIB
    with pytest.raises(ConfigError, match="too small"):
        pool_bytes("auto", MemoryLimits(100 * GIB, 10 * MIB, ""))


def test_pool_size_leaves_the_memory_of_tiers():
    """Mooncake's segment is taken only as blocks come: without a check the kernel would end the store then."""
    limits = MemoryLimits(16 * GIB, 12 * GIB, "this container's memory.max")
    plain = StoreOptions(object_url="file:///tmp/objects", mooncake_master="h:1", mooncake_trusted_network=True)
    assert bytes_beside_pool(StoreOptions()) == {}
    assert sum(bytes_beside_pool(StoreOptions(disk_path="/disk", disk_size="4TiB")).values()) >= 3 * GIB
    tiers = bytes_beside_pool(plain)
    beside = sum(tiers.values())
    assert 4 * GIB + 200 * MIB < beside < 5 * GIB, "the segment, and the tables of two tiers"
    assert sum(bytes_beside_pool(replace(plain, mooncake_segment="0")).values()) == beside - 4 * GIB
    assert pool_bytes("10G", limits) == 10 * GIB
    with pytest.raises(ConfigError, match=r"10 GiB, beside it 4 GiB of mooncake_segment, .*\) does not fit") as e:
        pool_bytes("10G", limits, tiers)
    fits = int(str(e.value).partition("at most")[2].rpartition(" bytes)")[0].rpartition("(")[2])
    assert pool_bytes(str(fits), limits, tiers) == fits and fits + beside <= limits.fits
    assert pool_bytes("auto", MemoryLimits(16 * GIB, 6 * GIB, ""), tiers) + beside < 6 * GIB
    with pytest.raises(ConfigError, match="too small"):
        pool_bytes("auto", MemoryLimits(16 * GIB, 4 * GIB, ""), tiers)


@pytest.mark.parametrize(("huge", "to_commit"), [(False, 2 * GIB), (True, 0)])
def test_disk_tier_grows_into_memory_that_nothing_else_takes(monkeypatch, huge, to_commit):
    limits = MemoryLimits(64 * GIB, 32 * GIB, "this test's memory")
    monkeypatch.setattr(tier_stack, "memory_limits", lambda: limits)
    options = StoreOptions(disk_path="/disk", disk_size="4TiB", object_url="file:///tmp/objects")
    objects = sum(bytes_beside_pool(replace(options, disk_path="")).values())
    memory = SimpleNamespace(fd=-1, nbytes=4 * GIB, usable=4 * GIB, ready=2 * GIB, huge_pages=huge)
    given = []
    monkeypatch.setattr(tier_stack, "DiskTier", lambda *args: given.append(args[-1]) or DiskTier(*args))
    index = Index(SlotPool(1), None, Clock())
    tier_stack.open_tiers(options, index, memory, FakeReactor(Clock()), lambda: None)
    assert objects > 0 and given[0]() == limits.fits - to_commit - objects


def test_store_does_not_start_where_a_segment_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "memory_limits", lambda: MemoryLimits(4 * GIB, 3 * GIB, "this test's memory"))
    options = StoreOptions(size="1MiB", mooncake_master="h:1", mooncake_trusted_network=True)
    with pytest.raises(ConfigError, match="this test's memory is 4 GiB"):
        server.StoreServer(str(tmp_path / "s.sock"), options)


def test_pool_memory_messages_do_not_overstate():
    assert format_bytes(GIB) == "1 GiB"
    assert format_bytes(2 * GIB - 1) == "1.99 GiB"
    assert format_bytes(5) == "5 bytes"


# -- what the machine and the container allow ------------------------------------------------------------------


def make_root(tmp_path, files: dict[str, str]) -> str:
    files = {"proc/meminfo": f"MemTotal: {64 * GIB >> 10} kB\nMemAvailable: {50 * GIB >> 10} kB\n"} | files
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return str(tmp_path)


def test_pool_of_reserved_huge_pages_does_not_count_against_free_memory(tmp_path, monkeypatch):
    """To reserve them takes them from what is free: a pool of more than half of the memory was refused."""
    folder = "sys/kernel/mm/hugepages/hugepages-2048kB/"
    pages = {f"{folder}free_hugepages": "25700", f"{folder}resv_hugepages": "100"}
    meminfo = f"MemTotal: {64 * GIB >> 10} kB\nMemAvailable: {10 * GIB >> 10} kB\n"
    limits = memory_limits(make_root(tmp_path, {"proc/meminfo": meminfo} | pages))
    assert limits.huge == 50 * GIB and pool_bytes("50GiB", limits) == 50 * GIB
    assert pool_bytes("48GiB", limits, {"tables": 8 * GIB}, "always") == 48 * GIB
    for refused in (("48GiB", limits, {}, "never"), ("51GiB", limits), ("48GiB", limits, {"tables": 10 * GIB})):
        with pytest.raises(ConfigError, match="does not fit"):
            pool_bytes(*refused)
    monkeypatch.setattr(server, "memory_limits", lambda: MemoryLimits(4 * GIB, 0, "this test's memory", GIB))
    with pytest.raises(ConfigError, match="does not fit"):
        server.StoreServer(str(tmp_path / "s.sock"), StoreOptions(size="1MiB", huge_pages="never"))


def test_huge_pages_that_engines_still_hold_of_the_store_before_are_in_use(tmp_path):
    """An operator's store waits for them; it failed at once when it was started again, until its service manager gave
    up. A container's own limit does not include them."""
    folder, group = "sys/kernel/mm/hugepages/hugepages-2048kB/", "sys/fs/cgroup/"
    pages = {f"{folder}free_hugepages": "100", f"{folder}resv_hugepages": "0", f"{folder}nr_hugepages": "15360"}
    limits = memory_limits(make_root(tmp_path / "machine", pages))
    with pytest.raises(MemoryInUse, match="200 MiB of 30 GiB"):
        pool_bytes("30GiB", limits, {}, "always")
    assert pool_bytes("200MiB", limits, {}, "always") == 200 * MIB
    container = {"proc/self/cgroup": "0::/", f"{group}memory.max": str(8 * GIB), f"{group}memory.current": "0"}
    limits = memory_limits(make_root(tmp_path / "container", pages | container))
    with pytest.raises(MemoryInUse, match="does not fit"):
        pool_bytes("30GiB", limits)
    with pytest.raises(ConfigError, match="does not fit") as refused:  # nor would it ever
        pool_bytes("31GiB", limits)
    assert not isinstance(refused.value, MemoryInUse)


def test_memory_limits_of_this_machine_are_read():
    limits = memory_limits()
    assert 0 < limits.fits < limits.free <= limits.limit


def test_memory_limits_without_cgroup_are_of_machine(tmp_path):
    limits = memory_limits(make_root(tmp_path, {}))
    assert (limits.limit, limits.free, limits.source) == (64 * GIB, 50 * GIB, "this machine's memory")


def test_memory_limits_of_cgroup_v2_use_smallest_parent_limit(tmp_path):
    cg = "sys/fs/cgroup"
    root = make_root(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box",
            f"{cg}/pod/memory.max": str(16 * GIB),
            f"{cg}/pod/memory.high": "max",
            f"{cg}/pod/memory.current": str(9 * GIB),
            f"{cg}/pod/memory.stat": f"anon 5\ninactive_file {3 * GIB}\nactive_file {GIB}\nshmem 7",
            f"{cg}/pod/box/memory.max": "max",
            f"{cg}/pod/box/memory.high": str(20 * GIB),
            f"{cg}/pod/box/memory.current": str(8 * GIB),
        },
    )
    limits = memory_limits(root)
    assert (limits.limit, limits.free) == (16 * GIB, 11 * GIB)
    assert limits.source == "this container's memory.max"


def test_memory_limits_of_cgroup_v2_in_container_use_root(tmp_path):
    root = make_root(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod123/abc",
            "sys/fs/cgroup/memory.max": str(8 * GIB),
            "sys/fs/cgroup/memory.high": str(6 * GIB),
            "sys/fs/cgroup/memory.current": str(GIB),
        },
    )
    limits = memory_limits(root)
    assert (limits.limit, limits.free, limits.source) == (6 * GIB, 5 * GIB, "this container's memory.high")


def test_memory_limits_of_cgroup_v2_path_outside_are_of_machine(tmp_path):
    make_root(tmp_path, {"proc/self/cgroup": "0::/../../other"})
    assert memory_limits(str(tmp_path)).limit == 64 * GIB


def test_memory_limits_of_cgroup_v1(tmp_path):
    cg = "sys/fs/cgroup/memory"
    root = make_root(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/1\n0::/",
            f"{cg}/memory.limit_in_bytes": "9223372036854771712",
            f"{cg}/memory.usage_in_bytes": "5",
            f"{cg}/docker/1/memory.limit_in_bytes": str(4 * GIB),
            f"{cg}/docker/1/memory.usage_in_bytes": str(2 * GIB),
            f"{cg}/docker/1/memory.stat": f"total_inactive_file {GIB}\ntotal_active_file 0",
        },
    )
    limits = memory_limits(root)
    assert (limits.limit, limits.free) == (4 * GIB, 3 * GIB)


# -- the memory ------------------------------------------------------------------------------------------------


def run_to_end(pool: PoolMemory) -> list[tuple[int, int]]:
    seen = []
    pool.start(lambda: seen.append((pool.ready, pool.usable)))
    pool._thread.join(60)
    return seen


def resident(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_pool_memory_is_usable_from_its_start(tmp_path):
    pool = PoolMemory(150 * MIB, huge_pages="never")
    assert resident(pool.fd) == 0
    assert run_to_end(pool) == [(16 * MIB, 150 * MIB), (64 * MIB, 150 * MIB), (150 * MIB, 150 * MIB)]
    assert resident(pool.fd) == 150 * MIB and pool.note == ""
    pool.close()
    pool.close()


def test_pool_memory_grows_in_small_steps_then_pieces():
    size, ready, ends = 3 * PIECE_BYTES + 5 * PAGE, 0, []
    while ready < size:
        ready += next_step(ready, size)
        ends.append(ready)
    assert ends == [16 * MIB, 64 * MIB, PIECE_BYTES, 2 * PIECE_BYTES, 3 * PIECE_BYTES, size]


def test_pool_memory_with_several_threads_is_equal(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    pool = PoolMemory(100 * MIB, huge_pages="never")
    assert run_to_end(pool) == [(16 * MIB, 100 * MIB), (64 * MIB, 100 * MIB), (100 * MIB, 100 * MIB)]
    assert resident(pool.fd) == 100 * MIB
    pool.close()


def test_pool_memory_without_madvise_populate():
    pool = PoolMemory(20 * MIB, huge_pages="never")
    pool._populates = False
    assert run_to_end(pool)[-1] == (20 * MIB, 20 * MIB)
    assert resident(pool.fd) == 20 * MIB
    pool.close()


def test_pool_memory_size_is_sealed():
    pool = PoolMemory(MIN_POOL)
    for size in (0, MIN_POOL // 2, MIN_POOL * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(pool.fd, linux.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    pool.close()


def test_pool_memory_shortage_makes_pool_smaller(caplog):
    free = iter([10 * GIB, 10 * GIB, 10 * MIB])
    pool = PoolMemory(
        150 * MIB, huge_pages="never", limits=lambda: MemoryLimits(GIB, next(free), "this container's memory.max")
    )
    assert run_to_end(pool)[-1] == (64 * MIB, 64 * MIB)
    assert "only 64 MiB of the requested 150 MiB" in pool.note and "memory.max has only 10 MiB left" in pool.note
    assert pool.note in caplog.text
    pool.close()


def test_pool_memory_enomem_makes_pool_smaller(monkeypatch):
    pool = PoolMemory(20 * MIB, huge_pages="never")

    def refuse(*_) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(pool, "_populate", refuse)
    assert run_to_end(pool) == [(0, 0)]
    assert "Cannot allocate memory" in pool.note
    pool.close()


@pytest.mark.parametrize("populates", [True, False])
def test_pool_memory_without_more_threads_is_committed_by_one(monkeypatch, populates):
    """The limit of processes may be reached for a moment; the store served 0 bytes for good."""
    pool = PoolMemory(20 * MIB, huge_pages="never")
    pool._populates = populates

    def refuse(*_) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pool_memory.ThreadPoolExecutor, "submit", refuse)
    assert run_to_end(pool)[-1] == (20 * MIB, 20 * MIB) and not pool.note
    pool.close()


def test_pool_memory_where_priorities_are_forbidden_is_committed(monkeypatch):
    def refuse(*_) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    pool = PoolMemory(20 * MIB, huge_pages="never")
    assert run_to_end(pool)[-1] == (20 * MIB, 20 * MIB)
    pool.close()


def test_pool_memory_close_stops_population():
    pool = PoolMemory(2 * GIB)
    first = threading.Event()
    pool.start(first.set)
    assert first.wait(10)
    pool.close()
    assert not pool._thread.is_alive() and pool.ready < 2 * GIB


def test_pool_memory_without_huge_pages_uses_small_ones():
    if pool_memory.free_huge_pages():
        pytest.skip("this machine has reserved huge pages")
    assert not PoolMemory(MIN_POOL, huge_pages="auto").huge_pages
    with pytest.raises(KVTierError, match="vm.nr_hugepages"):
        PoolMemory(4 * MIB, huge_pages="always")


def test_pool_memory_of_container_that_may_have_no_huge_page_uses_small_ones(monkeypatch):
    """Kubernetes' limit for a pod that asks for none: the pages are free and can be mapped, and the first use fails."""
    made, make, allocate = [], pool_memory._make, os.posix_fallocate

    def fake(nbytes: int, flags: int) -> int:
        made.append((make(nbytes, 0), bool(flags)))
        return made[-1][0]

    def refused(fd: int, start: int, nbytes: int) -> None:
        if (fd, True) in made:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, start, nbytes)

    monkeypatch.setattr(pool_memory, "free_huge_pages", lambda: 100)
    monkeypatch.setattr(pool_memory, "_make", fake)
    monkeypatch.setattr(os, "posix_fallocate", refused)
    with pytest.raises(KVTierError, match=os.strerror(errno.ENOSPC)):
        PoolMemory(4 * MIB, huge_pages="always")
    made.clear()
    pool = PoolMemory(4 * MIB, huge_pages="auto")
    assert [huge for _, huge in made] == [True, False] and not pool.huge_pages
    made.clear()
    assert run_to_end(pool)[-1] == (4 * MIB, 4 * MIB)
    pool.close()


def test_pool_memory_interleave_works_with_one_numa_node():
    assert pool_memory.memory_nodes() == [] or 0 in pool_memory.memory_nodes()
    pool = PoolMemory(MIB, interleave=True)
    assert run_to_end(pool)[-1] == (MIB, MIB)
    pool.close()


def test_pool_memory_interleave_sets_thread_policy(caplog):
    """On one node already the system call must take what it is given."""
    nodes = pool_memory.memory_nodes()
    if not nodes:
        pytest.skip("the kernel names no memory nodes")
    policies = []

    def place() -> None:
        for wanted in ([], nodes, []):
            pool_memory.place_this_thread(wanted)
            policies.append(policy_of_this_thread())

    thread = threading.Thread(target=place)
    thread.start()
    thread.join()
    assert policies == [0, 3, 0] and not caplog.records


def policy_of_this_thread() -> int:
    mode = ctypes.c_int(-1)
    number = {"x86_64": 239, "aarch64": 236}[platform.machine()]
    assert pool_memory._libc.syscall(ctypes.c_long(number), ctypes.byref(mode), None, ctypes.c_ulong(0), None, 0) == 0
    return mode.value


def test_pool_mapping_shares_memory_and_outlives_pool():
    pool = PoolMemory(MIB)
    one, two = (PoolMapping(os.dup(pool.fd), MIB, "i") for _ in range(2))
    pool.close()
    one.buffer[5 * PAGE] = 77
    assert two.buffer[5 * PAGE] == 77 and one.address != two.address and one.nbytes == MIB
    kept = memoryview(two._mapping)
    before = len(os.listdir("/proc/self/fd"))
    for mapping in (one, two, one):
        mapping.close()
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before - 2)
    assert kept[5 * PAGE] == 77, "a view that is still in use stays good"


def test_pool_mapping_smaller_than_promised_raises():
    pool = PoolMemory(MIN_POOL)
    fd = os.dup(pool.fd)
    with pytest.raises(KVTierError, match="not"):
        PoolMapping(fd, MIN_POOL + PAGE, "i")
    with pytest.raises(OSError):
        os.fstat(fd)
    pool.close()


def test_store_options_round_trip_as_arguments():
    options = StoreOptions(size="10%", numa="interleave", idle_seconds=5.5, tenant_share=0.25, log_file="/x/y z")
    assert parse(options.arguments()) == options
    assert StoreOptions().arguments() == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"huge_pages": "yes"},
        {"numa": "3"},
        {"tenant_share": 0.0},
        {"pin_share": 1.5},
        {"lease_seconds": 59.0},
        {"lease_seconds": float("nan")},
        {"reserve_seconds": float("nan")},
        {"reserve_seconds": 90.0},
        {"idle_seconds": -1.0},
        {"log_level": "loud"},
    ],
)
def test_store_options_contradicting_raise(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        StoreOptions(**wrong)


def test_pool_mapping_address_points_to_buffer():
    pool = PoolMemory(MIN_POOL)
    mapping = PoolMapping(os.dup(pool.fd), MIN_POOL, "i")
    mapping.buffer[:4] = b"abcd"
    assert ctypes.string_at(mapping.address, 4) == b"abcd" and mmap.PAGESIZE == PAGE
    mapping.close()
    pool.close()
