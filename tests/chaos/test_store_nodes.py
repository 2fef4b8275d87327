"""Two node stores in two network namespaces, and an object store between them: what one has the other finds, right,
also when one is killed in the middle."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from netns import NetnsPair, why_not
from store_process import Engine, Store
from store_support import block_hashes_of
from support import eventually

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

NODE_PORT, S3_PORT = 7200, 7300
S3 = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "thing", "AWS_DEFAULT_REGION": "us-east-1"}
PREFIXES = [block_hashes_of((32, number)) for number in range(6)]  # three quarters of what one memory holds
MAKE_BUCKET = """
import sys, time, boto3
from botocore.exceptions import EndpointConnectionError
client = boto3.client("s3", endpoint_url=sys.argv[1])
for _ in range(150):
    try:
        client.create_bucket(Bucket="blocks")
        break
    except EndpointConnectionError:
        time.sleep(0.2)
else:
    sys.exit("the server does not start")
"""


class Pair:
    """Stores A and B, each with the other's address, a common key and a common bucket."""

    def __init__(self, folder: Path, cable: NetnsPair):
        key = folder / "cluster.key"
        subprocess.run([sys.executable, "-m", "vllm_kvtier.wire.auth", str(key)], check=True, capture_output=True)
        here, there = cable.addresses
        self.endpoint = f"http://{here}:{S3_PORT}"
        env = {**os.environ, **S3}
        moto = [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", str(S3_PORT)]
        self.s3 = cable.popen(0, moto, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        subprocess.run(cable.command(1, [sys.executable, "-c", MAKE_BUCKET, self.endpoint]), env=env, check=True)
        self.options, self.stores = [], []
        for side, (own, other) in enumerate([(here, there), (there, here)]):
            home = folder / "ab"[side]
            home.mkdir()
            self.stores.append(Store(home, cable.command(side, []), {**S3, "UCX_TLS": "tcp"}))
            self.options.append(
                [
                    f"--nodes={other}:{NODE_PORT}",
                    f"--node-listen={own}:{NODE_PORT}",
                    f"--cluster-key-file={key}",
                    "--object-url=s3://blocks/kv",
                    f"--object-endpoint={self.endpoint}",
                    "--object-admission=all",
                ]
            )
        for store, options in zip(self.stores, self.options, strict=True):
            store.start(*options)

    def close(self) -> None:
        for store in self.stores:
            store.kill()
        self.s3.kill()
        self.s3.wait()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with NetnsPair() as cable:
        pair = Pair(tmp_path_factory.mktemp("nodes"), cable)
        try:
            yield pair
        finally:
            pair.close()


def written(store: Store) -> None:
    """All that it stored is in the object store."""

    def idle() -> bool:
        lane = store.tier("object").extra
        return lane["queued_blocks"] == 0 and lane["written"] + lane["failed"] == lane["admitted"] > 0

    eventually(idle, 60, "all of it is in the object store")


def test_blocks_of_one_node_are_found_by_another(pair):
    a, b = pair.stores
    with Engine(a) as near, Engine(b) as far:
        assert [near.fill(block_hashes) for block_hashes in PREFIXES] == [32] * len(PREFIXES)
        assert [far.find(block_hashes) for block_hashes in PREFIXES] == [32] * len(PREFIXES)
        assert b.tier("nodes").read_blocks >= 32
        # From here on it is B's own, too.
        assert far.find(PREFIXES[-1], wait_seconds=0) == 32
    written(a)
    for store in pair.stores:
        eventually(lambda store=store: (i := store.counts().index).leases == i.reservations == 0, 20)


def test_node_killed_during_read_falls_back_to_object_store(pair):
    a, b = pair.stores
    fresh = [block_hashes_of((32, f"fresh {number}")) for number in range(6)]
    with Engine(a) as near:
        for block_hashes in fresh:  # not faster than it is written: memory would give up what waits
            near.fill(block_hashes)
            written(a)
        assert not a.tier("object").extra["dropped_evicted"]
    b.kill()
    b.start(*pair.options[1])  # nothing in its memory
    with Engine(b) as far:
        began = threading.Timer(0.05, a.kill)
        began.start()
        found = [far.find(block_hashes) for block_hashes in fresh]  # what is found is right
        began.join()
        assert all(num_hash_blocks <= 32 for num_hash_blocks in found)
        eventually(
            lambda: [far.find(block_hashes) for block_hashes in fresh] == [32] * 6, 60, "what A had is found without A"
        )
        assert b.tier("object").read_blocks
        eventually(lambda: (i := b.counts().index).leases == i.reservations == 0, 20)
    a.start(*pair.options[0])
    with Engine(a) as near:  # and A gets it back, from B or from the object store
        assert [near.find(block_hashes) for block_hashes in fresh] == [32] * 6


def test_client_without_cluster_key_gets_no_answer(pair, tmp_path):
    stranger = Store(tmp_path, pair.stores[1]._before, S3)
    try:
        key = tmp_path / "other.key"
        subprocess.run([sys.executable, "-m", "vllm_kvtier.wire.auth", str(key)], check=True, capture_output=True)
        stranger.start(f"--nodes={pair.options[1][0].split('=')[1]}", f"--cluster-key-file={key}")
        with Engine(stranger) as engine:
            assert engine.find(PREFIXES[0], wait_seconds=3.0) == 0
    finally:
        stranger.kill()
