"""Core dumps leave memory for KV out: that of a process that maps a pool was as large as the pool."""

import mmap
import os
import re

import pytest
from pull_fakes import cache_of_numbers

from vllm_kvtier import codecs
from vllm_kvtier.store.memory.client_mapping import PoolMapping
from vllm_kvtier.store.memory.pool_memory import PoolMemory
from vllm_kvtier.store.tiers.process.main import Pool
from vllm_kvtier.worker.nixl_pull.encoded_memory import EncodedMemory
from vllm_kvtier.worker.nixl_pull.host_mirror import mirror

MIB = 1 << 20


def dumped(address: int) -> bool:
    inside = False
    for line in open("/proc/self/smaps"):
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "dd" not in line.split()
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.mark.parametrize("make", [lambda fd: PoolMapping(fd, MIB, "i"), lambda fd: Pool(fd, MIB)])
def test_mapped_pool_is_not_dumped(make):
    pool = PoolMemory(MIB)
    mapped = make(os.dup(pool.fd))
    assert not dumped(mapped.address) and not dumped(mapped.address + MIB - 1)
    pool.close()


def test_pool_that_the_store_commits_is_not_dumped(monkeypatch):
    pool, seen = PoolMemory(MIB, huge_pages="never"), []
    monkeypatch.setattr(pool, "_populate", lambda address, *_: seen.append(dumped(address)))
    pool._run()
    assert seen == [False]
    pool.close()


def test_kv_in_memory_of_a_worker_is_not_dumped():
    view = cache_of_numbers(2000, 1)
    encoded = EncodedMemory(view, [codecs.get("int8")])
    copy = mirror(view)
    bases = [each.groups[0].regions[0].base for each in (encoded.transfer_view, copy)]
    assert copy.groups[0].regions[0].block_bytes * 2000 > 2 * mmap.PAGESIZE  # its first page may have other memory
    assert [dumped(address) for address in (bases[0], bases[1] + mmap.PAGESIZE)] == [False] * 2
    encoded.close()
