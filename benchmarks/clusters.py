"""Stores that read from each other, beside Mooncake Store, under the same faults: three nodes in network namespaces.

    python benchmarks/clusters.py [--out benchmarks/results/clusters.json] [--kinds nodes mooncake]

Each node is a whole store process; this program is its engine, with blocks of 1 MiB. What a lookup returns is compared
with what was written. Needs root, for the namespaces, and for ``mooncake`` its package. A few minutes.

* load: time from the lookup until a prefix that only another node has is in the node's memory, and the rate. ``plain``:
  as many bytes over one TCP connection between two of the nodes, and nothing else (``plain_socket.py``).
* fault: of 15 s or more, on the first node, which has a prefix alone (``single``) and another one that the second node
  has read (``shared``). The third node looks the shared one up: ``answer``, when the first lookup returns; ``whole``,
  when all of it is found; ``other``, the longest lookup of something unknown meanwhile; ``healed``, after the fault's
  end until the single one is found, None: it is lost.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import mooncake_master
import netns
from store_process import Store
from store_support import EVERYTHING, NAMESPACE_ID, RawClient, block_hashes_of, engine_hello, items_of, tool_hello

from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.memory.client_mapping import PoolMapping
from vllm_kvtier.wire.auth import ClusterKey

PAGES, POOL = 256, 256 << 20  # of a block; bytes of a store
BLOCK = PAGES * m.PAGE
PREFIX = 64  # blocks
LOADS = (4, 16, PREFIX)  # blocks
PORT = 7300
WAIT = 20.0  # seconds that a lookup waits for a promotion; 30 are an engine's default
GIVE_UP = 40.0
FAULT_SECONDS = 15.0
FAULTS = ("kill", "stop", "cut")


def parse(parser: argparse.ArgumentParser, loopback: bool = False) -> argparse.Namespace:
    """Of a benchmark of kinds of clusters. Ends the program if this machine cannot run them. ``loopback``: it does
    without network namespaces."""
    parser.add_argument("--kinds", nargs="+", default=["nodes", "mooncake"], choices=["nodes", "mooncake"])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if reason := (not loopback and netns.why_not()) or ("mooncake" in asked.kinds and mooncake_master.why_not()):
        sys.exit(reason)
    return asked


def store_options(
    net: netns.NetnsStar, nodes: int, i: int, key: Path, master: mooncake_master.Master | None, segment: int
) -> list[str]:
    """Of node ``i``'s store: the other nodes' stores, or Mooncake's ``master`` and ``segment`` bytes for it."""
    if master is not None:
        options = [f"--mooncake-master={master.address}", "--mooncake-trusted-network=true"]
        return [*options, f"--mooncake-segment={segment}", "--mooncake-admission=all"]
    others = ",".join(f"{net.addresses[j]}:{PORT}" for j in range(nodes) if j != i)
    return [f"--nodes={others}", f"--node-listen={net.addresses[i]}:{PORT}", f"--cluster-key-file={key}"]


class Node:
    """A store in a namespace, and this program's connection to it."""

    def __init__(self, folder: Path, before: list[str], options: list[str], size: int):
        folder.mkdir()
        self.store, self._options, self._size = Store(folder, before, {"UCX_TLS": "tcp"}), options, size
        self.start()

    def start(self) -> None:
        self.store.start(f"--size={self._size}", "--log-level=warning", *self._options)
        until(lambda: self._tool(lambda tool: tool.stat().index.ready_pages * m.PAGE >= self._size))
        self.engine = RawClient(self.store.path, engine_hello(pages=PAGES), GIVE_UP)
        self.pool = PoolMapping(os.dup(self.engine.fds[0]), self._size, "here")

    def pids(self) -> list[int]:
        """Of the store and its tier processes."""
        own = self.store.process.pid
        found = [own]
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                if int(stat.read_text().rpartition(")")[2].split()[1]) == own:
                    found.append(int(stat.parent.name))
            except OSError:
                continue
        return found

    def signal(self, number: int) -> None:
        for pid in self.pids():
            os.kill(pid, number)
        if number == signal.SIGKILL:
            self.store.kill()

    def fill(self, block_hashes: bytes) -> None:
        groups, hashes, parents = items_of(block_hashes)
        slots = self.engine.ask(m.Reserve(2, NAMESPACE_ID, b"", groups, hashes, parents, EVERYTHING)).slots
        for i, slot in enumerate(slots):
            self.pool.buffer[slot * m.PAGE : slot * m.PAGE + BLOCK] = pattern(block_hashes, i)
        self.engine.send(m.Commit(slots))
        self.engine.stat()

    def find(self, block_hashes: bytes) -> tuple[int, float]:
        """(blocks, seconds). All of them are right, or this program ends."""
        began = time.monotonic()
        found = self.engine.ask(m.Lookup(1, NAMESPACE_ID, block_hashes, 0, EVERYTHING, WAIT))
        seconds = time.monotonic() - began
        for i, slot in enumerate(found.slots[0] if found.slots else ()):
            assert self.pool.buffer[slot * m.PAGE : slot * m.PAGE + BLOCK] == pattern(block_hashes, i), "WRONG"
        self.engine.send(m.Release(found.lease))
        return found.num_hash_blocks, seconds

    def forget(self) -> None:
        self._tool(lambda tool: tool.ask(m.Clear(1, None)))

    def tier(self):
        return self._tool(lambda tool: tool.stat().tiers[0])

    def _tool(self, call):
        with RawClient(self.store.path, tool_hello()) as tool:
            return call(tool)

    def close(self) -> None:
        self.engine.close()
        self.store.kill()


def pattern(block_hashes: bytes, i: int) -> bytes:
    return block_hashes[i * m.HASH_BYTES : (i + 1) * m.HASH_BYTES] * (BLOCK // m.HASH_BYTES)


def until(condition: Callable[[], object], seconds: float = GIVE_UP) -> float | None:
    """Seconds until it holds; None: never."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            return None
        time.sleep(0.05)
    return time.monotonic() - began


class Cluster:
    """``size``: bytes of a store."""

    def __init__(self, kind: str, folder: Path, net: netns.NetnsStar, size: int = POOL):
        self.kind, self.net = kind, net
        self.master = mooncake_master.Master(net.addresses[-1], net.before(3)) if kind == "mooncake" else None
        if self.master is not None:
            self.master.start()
        key = folder / "key"
        ClusterKey.create(str(key))
        options = [store_options(net, 3, i, key, self.master, 6 * POOL) for i in range(3)]
        self.nodes = [Node(folder / str(i), net.before(i), options[i], size) for i in range(3)]
        for name in ("warm", "up"):  # connections
            self.write(self.nodes[0], block_hashes_of((4, name)))
            for node in self.nodes[1:]:
                until(lambda node=node, name=name: node.find(block_hashes_of((4, name)))[0] == 4)

    def write(self, node: Node, block_hashes: bytes) -> None:
        """Until others can find it."""
        before = node.tier().written_blocks
        node.fill(block_hashes)
        if self.kind == "mooncake":
            wanted = before + len(block_hashes) // m.HASH_BYTES
            until(lambda: node.tier().written_blocks >= wanted)

    def share(self, block_hashes: bytes) -> None:
        """The second node has it too."""
        node = self.nodes[1]
        for _ in range(2 if self.kind == "mooncake" else 1):
            node.forget()
            assert until(lambda: node.find(block_hashes)[0] == PREFIX) is not None
        if self.kind == "mooncake":  # its copy is made in the background
            keys = [f"kvtier/{NAMESPACE_ID.hex()}/g0/{block_hashes[-m.HASH_BYTES :].hex()}"]
            until(lambda: self.master.copies(keys)[keys[0]] == 2)

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        if self.master is not None:
            self.master.kill()


def loads(cluster: Cluster, rounds: int) -> dict[int, dict[str, float]]:
    first, _, third = cluster.nodes
    result = {}
    for count in LOADS:
        seconds = []
        for i in range(rounds):
            first.forget(), third.forget()
            block_hashes = block_hashes_of((count, f"load {i}"))
            cluster.write(first, block_hashes)
            found, took = third.find(block_hashes)
            assert found == count, f"{found} of {count}"
            seconds.append(took)
        result[count] = shown(count, statistics.median(seconds))
    return result


def shown(count: int, seconds: float) -> dict[str, float]:
    return {"ms": round(1e3 * seconds, 1), "GB/s": round(count * BLOCK / seconds / 1e9, 2)}


def plain_copies(net: netns.NetnsStar, reader: int, rounds: int, sizes: list[int]) -> dict[int, float]:
    """Seconds by size, from the first node to the ``reader``."""
    program = [sys.executable, str(Path(__file__).with_name("plain_socket.py"))]
    where = f"{net.addresses[0]}:{PORT + 1}"  # PORT may be a store's
    sender = subprocess.Popen([*net.before(0), *program, "send", where], stdout=subprocess.PIPE, text=True)
    try:
        assert sender.stdout.readline() == "listens\n"
        command = [*net.before(reader), *program, "receive", where, str(rounds), *map(str, sizes)]
        seconds = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    finally:
        sender.kill()
        sender.communicate()
    return {size: seconds[str(size)] for size in sizes}


def fault(cluster: Cluster, what: str) -> dict[str, float | int | None]:
    first, _, third = cluster.nodes
    shared, single = (block_hashes_of((PREFIX, f"{what} {name}")) for name in ("shared", "single"))
    for node in cluster.nodes:
        node.forget()
    cluster.write(first, shared)
    cluster.share(shared)
    cluster.write(first, single)
    time.sleep(2.0)  # copies in the background
    begin = {"kill": lambda: first.signal(signal.SIGKILL), "stop": lambda: first.signal(signal.SIGSTOP)}
    begin["cut"] = lambda: cluster.net.plug(0, False)
    begin[what]()
    began = time.monotonic()
    found, answer = third.find(shared)
    longest = 0.0

    def whole() -> bool:
        nonlocal longest
        longest = max(longest, third.find(block_hashes_of((4, f"unknown {time.monotonic()}")))[1])
        return third.find(shared)[0] == PREFIX

    all_found = until(whole)
    seconds = round(time.monotonic() - began, 1) if all_found is not None else None
    time.sleep(max(0.0, began + FAULT_SECONDS - time.monotonic()))  # as long for both kinds
    if what == "kill":
        first.start()
    elif what == "stop":
        first.signal(signal.SIGCONT)
    else:
        cluster.net.plug(0, True)
    healed = until(lambda: third.find(single)[0] == PREFIX, 20.0)
    return {
        "answer s": round(answer, 2),
        "then found": found,
        "whole s": seconds,
        "other s": round(longest, 2),
        "healed s": None if healed is None else round(healed, 1),
    }


def master_faults(cluster: Cluster) -> dict[str, dict[str, float | int | None]]:
    first, _, third = cluster.nodes
    result = {}
    for what in ("master stop", "master kill"):
        block_hashes = block_hashes_of((PREFIX, what))
        cluster.write(first, block_hashes)
        cluster.master.stop() if what == "master stop" else cluster.master.kill()
        found, answer = third.find(block_hashes)
        time.sleep(2.0)
        cluster.master.go_on() if what == "master stop" else cluster.master.start()
        whole = until(lambda: third.find(block_hashes)[0] == PREFIX, 20.0)  # noqa: B023 - called at once
        result[what] = {
            "answer s": round(answer, 2),
            "then found": found,
            "healed s": None if whole is None else round(whole, 1),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=FAULTS)
    asked = parse(parser)
    with netns.NetnsStar(3) as net:
        seconds = plain_copies(net, 2, asked.rounds, [count * BLOCK for count in LOADS])
        results = {"plain": {"loads": {count: shown(count, seconds[count * BLOCK]) for count in LOADS}}}
        print("plain", json.dumps(results["plain"]["loads"]), flush=True)
    for kind in asked.kinds:
        with tempfile.TemporaryDirectory() as folder, netns.NetnsStar(3) as net:
            cluster = Cluster(kind, Path(folder), net)
            try:
                results[kind] = {"loads": loads(cluster, asked.rounds)}
                print(kind, json.dumps(results[kind]["loads"]), flush=True)
                results[kind]["faults"] = {}
                for what in asked.faults:
                    results[kind]["faults"][what] = fault(cluster, what)
                    print(kind, what, json.dumps(results[kind]["faults"][what]), flush=True)
                if cluster.master is not None:
                    results[kind]["faults"] |= master_faults(cluster)
                    print(kind, json.dumps(results[kind]["faults"]), flush=True)
            finally:
                cluster.close()
    if asked.out is not None:
        asked.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
