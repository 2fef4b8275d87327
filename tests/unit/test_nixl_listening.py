"""Where NIXL's agents listen, with the real NIXL: a worker's own, and one that reads from other nodes' stores."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from support import eventually

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.remote_store import nixl_agent
from vllm_kvtier.worker.nixl_pull.nixl_transport import NixlTransport, TransferState, UcxLimits

NBYTES, LOOPBACK = 1 << 16, "0100007F"


def listening() -> dict[str, str]:
    """Address of each TCP socket on which this process listens, by inode."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    ours = set(re.findall(r"socket:\[(\d+)\]", " ".join(links)))
    lines = "".join(Path(f"/proc/net/{table}").read_text() for table in ("tcp", "tcp6")).split("\n")
    rows = [line.split() for line in lines if ":" in line]
    return {row[9]: row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in ours}


class Memory:
    def __init__(self, fill: int):
        self.data = np.full(NBYTES, fill, np.uint8)
        self.address, self.nbytes = self.data.ctypes.data, NBYTES


def read(server: NixlTransport, reader: NixlTransport, source: Memory, target: Memory) -> None:
    reader.add_peer(server.metadata(), server.name)
    rows = [np.array([[memory.address, NBYTES, 0, NBYTES, 1]], np.uint64) for memory in (target, source)]
    near = reader.prepare(server.name, rows[0], "DRAM", ours=True)
    far = reader.prepare(server.name, rows[1], "DRAM", ours=False)
    first = np.zeros(1, np.int32)
    transfer = reader.read(server.name, near, first, far, first, NBYTES)
    eventually(lambda: server.progress() or reader.poll(transfer) != TransferState.RUNNING)
    assert reader.poll(transfer) == TransferState.DONE
    reader.release(transfer)


@pytest.mark.parametrize("movable", [False, True])
def test_nixl_agents_of_a_worker_without_a_key_listen_on_loopback_and_read(monkeypatch, movable):
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    before = listening()
    memories = [Memory(1), Memory(2)]
    ends = [NixlTransport(f"listening-{movable}-{n}", ["UCX"], UcxLimits(movable, loopback=True)) for n in range(2)]
    for end, memory in zip(ends, memories, strict=True):
        end.register([(memory.address, NBYTES)], "DRAM", 0)
    new = listening().keys() - before.keys()
    assert new and {listening()[inode] for inode in new} == {LOOPBACK}
    assert "UCX_NET_DEVICES" not in os.environ, "another connector's agents may need the network"
    read(*ends, *memories)
    assert (memories[1].data == 1).all()
    for end in ends:
        eventually(end.close)


def test_nixl_agent_that_reads_from_stores_without_a_key_listens_on_loopback(monkeypatch):
    for name in ("UCX_NET_DEVICES", "UCX_LOG_LEVEL", "UCX_HANDLE_ERRORS", "NIXL_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # to be as before when the test ends
        monkeypatch.delenv(name)
    before = listening()
    nixl_agent.quiet_ucx(loopback=True)
    reader = nixl_agent.Reader(Memory(0), "a reader that listens")
    new = listening().keys() - before.keys()
    assert new and {listening()[inode] for inode in new} == {LOOPBACK}
    eventually(reader.close)


def test_nixl_agent_that_ucx_gives_no_loopback_says_why(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "shm")
    with pytest.raises(KVTierError, match="on loopback; UCX_TLS must leave it tcp"):
        NixlTransport("shm only", ["UCX"], UcxLimits(loopback=True))
