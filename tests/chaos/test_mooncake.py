"""Three nodes' Mooncake tiers and a real master, each in a network namespace of its own, while they die, hang, and are
cut off. No engines: what a tier reports as read is compared with what was written.

Each fault is one that Mooncake Store 0.3.13 was seen to have: data that arrive after a read has failed, reads that hang
for 60 s, objects that seem to exist for 10 s after their node's end, a restarted master that forgets.
"""

import itertools
import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import suppress

import netns
import pytest
from mooncake_master import Master, why_not
from mooncake_nodes import MooncakeNode
from object_nodes import BLOCKS, NAMESPACE_ID, block_hashes_of, blocks_of
from support import eventually, stop

from vllm_kvtier.devtools.processes import free_port
from vllm_kvtier.remote_store.options import Address
from vllm_kvtier.store.tiers.mooncake.client import key_of
from vllm_kvtier.store.tiers.mooncake.options import reachable

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not()),
]
TTL = 6  # the master's client_ttl in seconds; 10 by default


class Cluster:
    def __init__(self, net):
        self.net = net
        self.master = Master(net.addresses[-1], net.before(3), client_ttl=TTL, eviction_high_watermark_ratio=0.9)
        self.master.start()
        self.nodes = [self.node(i) for i in range(3)]

    def node(self, i):
        return MooncakeNode(self.master.address, self.net.before(i))

    def ready(self):
        for node in self.nodes:
            node.ready()
        return self

    def end(self):
        for node in self.nodes:
            node.stop()
        self.master.kill()


@pytest.fixture
def cluster():
    with netns.NetnsStar(3) as net:
        cluster = Cluster(net)
        yield cluster.ready()
        cluster.end()


def stored(node, name):
    """Written by that node, in its own segment."""
    block_hashes = block_hashes_of(name)
    eventually(lambda: all(node.write(blocks_of(block_hashes))), 20, "all blocks are written")
    return block_hashes


def read_right(node, block_hashes):
    """Number of blocks that it reads; all that are reported as read are right."""
    good, right = node.read(block_hashes)
    assert all(is_right for said, is_right in zip(good, right, strict=True) if said)
    return good.count(True)


def reads_all(node, block_hashes, seconds=20.0):
    eventually(lambda: read_right(node, block_hashes) == BLOCKS, seconds, "all blocks are read")


def replicated(cluster, node, block_hashes, read_again=True):
    """Read twice by this node, or used again after it was read: it gets a copy."""
    for _ in range(1 + read_again):
        node.clear_slots()
        reads_all(node, block_hashes)
    if not read_again:
        assert all(node.write(blocks_of(block_hashes)))
    keys = [key_of(NAMESPACE_ID, 0, block.hash) for block in blocks_of(block_hashes)]
    eventually(lambda: cluster.master.copies(keys) == dict.fromkeys(keys, 2), 20, "two copies of all")


def test_mooncake_nodes_share_blocks_and_survive_a_node(cluster):
    one, other, third = cluster.nodes
    shared, single = stored(one, "shared"), stored(one, "single")
    reads_all(other, shared)
    reads_all(third, single)
    replicated(cluster, other, shared, read_again=False)

    # The node of all blocks is killed. What it alone had is lost, and no read hangs or is wrong.
    for pid in (one.segment(), one.reader()):
        os.kill(pid, signal.SIGKILL)
    assert read_right(third, single) == 0
    eventually(lambda: third.tier.counts().restarts >= 1, what="its reader was replaced")
    third.ready()
    reads_all(third, shared)
    assert read_right(third, single) == 0
    # It comes back with its tier process, empty, and takes part again.
    one.ready()
    again = stored(one, "again")
    reads_all(other, again)
    assert one.tier.counts().extra["segment_restarts"] == 1


def test_mooncake_node_that_hangs_costs_a_reader_and_writes_nothing_late(cluster):
    one, other, third = cluster.nodes
    shared = stored(one, "shared")
    find = third.find(shared)
    stop(one.segment())
    third.clear_slots()
    blocks = blocks_of(shared, half=1)
    told = third.begin(lambda done: third.tier.read(find, blocks, done))
    eventually(lambda: told, 8, "an answer long before Mooncake's 60 s")
    assert told[0] == [False] * BLOCKS
    # Its slots are free now: they are used for other blocks, whose contents nothing changes.
    others = stored(other, "others")
    third.ready()
    reads_all(third, others)
    os.kill(one.segment(), signal.SIGCONT)
    one.ready()
    written = stored(one, "written by the one that goes on")
    reads_all(third, others)  # asks for leases: the network is alive
    assert third.are_right(blocks_of(others, half=1)) == [True] * BLOCKS
    reads_all(other, written)


def test_mooncake_node_that_is_cut_off_and_master_that_hangs_dies_and_forgets(cluster):
    one, other, third = cluster.nodes
    shared = stored(one, "shared")
    replicated(cluster, other, shared)
    cluster.net.plug(0, False)
    assert one.find(shared).num_hash_blocks == 0, "without the master"
    assert not one.tier.usable
    third.read(shared)
    third.ready()
    reads_all(third, shared)
    cluster.net.plug(0, True)
    one.ready()
    reads_all(one, shared)

    cluster.master.stop()
    for node in cluster.nodes:
        assert node.find(shared).num_hash_blocks == 0 and not node.tier.usable
        assert "has not answered" in node.tier.counts().reason or "-9" in node.tier.counts().reason
    cluster.master.go_on()
    cluster.ready()
    reads_all(third, shared)

    cluster.master.kill()
    for node in cluster.nodes:
        assert node.find(shared).num_hash_blocks == 0 and not node.tier.usable
    cluster.master.start()
    cluster.ready()
    # It has forgotten everything. Each node writes what it has in memory when it is used again.
    assert not one.tier.has(NAMESPACE_ID, 0, blocks_of(shared)[0].hash)
    shared = stored(one, "shared")
    reads_all(third, shared)


def test_mooncake_full_cluster_pauses_writes(cluster):
    """A put does not wait for the master's eviction: it is refused."""
    small = Master(cluster.net.addresses[-1], cluster.net.before(3)).start()
    node = MooncakeNode(small.address, cluster.net.before(0), segment="16MiB").ready()  # less than 11 of the writes
    other = MooncakeNode(small.address, cluster.net.before(1), segment="0").ready()
    for i in range(40):
        if not all(node.write(blocks_of(block_hashes_of(f"much {i}")))):
            break
    assert "full (code -200)" in node.tier.counts().reason and not node.tier.writable
    assert node.tier.usable and read_right(other, block_hashes_of("much 0")) in range(BLOCKS + 1)
    eventually(lambda: node.tier.writable, 10, "it tries again")
    node.stop(), other.stop(), small.kill()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd here (Debian: etcd-server)")
@pytest.mark.parametrize("oplog", [True, False])
def test_mooncake_leading_master_dies_and_its_log_keeps_the_blocks(oplog, tmp_path):
    """Two masters on etcd. Without the log the new leader has forgotten everything."""
    etcd, peers = (f"127.0.0.1:{free_port()}" for _ in range(2))
    urls = {"listen-client-urls": etcd, "advertise-client-urls": etcd, "listen-peer-urls": peers}
    command = ["etcd", f"--data-dir={tmp_path}", *(f"--{name}=http://{url}" for name, url in urls.items())]
    options = {"enable_ha": "true", "ha_backend_type": "etcd", "etcd_endpoints": etcd, "client_ttl": TTL}
    masters, nodes = [Master(**options, enable_oplog=str(oplog).lower()) for _ in range(2)], []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            eventually(lambda: reachable(Address.parse(etcd), 1.0), 20, "etcd listens")
            masters[0].start()
            nodes = [MooncakeNode(f"etcd://{etcd}") for _ in range(2)]
            for node in nodes:
                node.ready()
            masters[1].start()
            one, other = nodes
            shared = stored(one, "shared")
            reads_all(other, shared)
            time.sleep(3.0)  # the second master follows the log, and no interface of it shows how far
            masters[0].kill()
            assert other.find(shared).num_hash_blocks == 0 and not other.tier.usable
            began = time.monotonic()
            for node in nodes:
                eventually(lambda node=node: node.tier.usable and node.tier.writable, 60, "the other master leads")
            print(f"usable again after {time.monotonic() - began:.1f} s")
            if oplog:
                reads_all(other, shared)
            else:
                assert read_right(other, shared) == 0
        finally:
            for node in nodes:
                node.stop()
            for master in masters:
                master.kill()
            process.kill()


@pytest.mark.slow
def test_mooncake_soak(cluster):
    """Minutes of random faults. What is stored behind them is read, also when the node that wrote it is killed."""
    rng = random.Random(24)
    names, lost, reads = [], 0, 0
    until = time.monotonic() + float(os.environ.get("KVTIER_SOAK_SECONDS", "180"))
    while time.monotonic() < until:
        what, i = (
            rng.choice(("segment", "reader", "stop", "cut", "master", "hang", "nothing", "nothing")),
            rng.randrange(3),
        )
        node = cluster.nodes[i]
        if node.tier.writable and node.tier.usable:
            names.append(f"soak {len(names)}")
            node.write(blocks_of(block_hashes_of(names[-1])))
        if what in ("segment", "reader"):
            with suppress(ProcessLookupError):  # a fault before may have ended it
                os.kill(getattr(node, what)(), signal.SIGKILL)
        elif what == "stop":
            pid = node.segment()
            with suppress(ProcessLookupError):
                stop(pid)
        elif what == "cut":
            cluster.net.plug(i, False)
        elif what == "master":
            cluster.master.kill()
        elif what == "hang":
            cluster.master.stop()
        for other in cluster.nodes:
            for name in rng.sample(names, min(4, len(names))):
                reads += BLOCKS
                lost += BLOCKS - read_right(other, block_hashes_of(name))
        if what == "stop":
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        elif what == "cut":
            cluster.net.plug(i, True)
        elif what == "master":
            cluster.master.start()
        elif what == "hang":
            cluster.master.go_on()
        cluster.ready()
    print(f"{reads} blocks read, {lost} not found or not readable, {len(names) * BLOCKS} written")
    assert lost < reads
    for number, (writer, reader, third) in enumerate(itertools.permutations(cluster.nodes)):
        cluster.ready()
        block_hashes, began = stored(writer, f"behind the faults {number}"), time.monotonic()
        replicated(cluster, reader, block_hashes)
        os.kill(writer.segment(), signal.SIGKILL)
        reads_all(third, block_hashes)
        print(f"copied, and read without its writer, {time.monotonic() - began:.1f} s after it was written")
