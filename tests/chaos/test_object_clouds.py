"""Object tiers on Google's and Azure's protocols, with a server that pauses, ends and loses its bucket.

moto serves Google's XML protocol, too, which is S3's but for the signature and conditional writes. Azurite is
Microsoft's (``npm install azurite``); without it those tests are skipped.
"""

import math
import os
import urllib.request

import pytest
from azure_server import COMMAND, VARIABLES, AzureServer
from object_nodes import BLOCKS, NAMESPACE_ID, SIZE, Node, block_hashes_of, blocks_of
from s3_server import S3Server
from support import eventually

from vllm_kvtier.store.tiers.objects.object_client import ObjectClient
from vllm_kvtier.store.tiers.objects.object_names import parse_url
from vllm_kvtier.store.tiers.process import tier_process as tier_process_module
from vllm_kvtier.store.tiers.request_pool import Kind, Trouble

BUCKET = "kvblocks"
needs_azurite = pytest.mark.skipif(COMMAND is None, reason="azurite-blob is not installed")


class GoogleServer(S3Server):
    def create(self, bucket: str) -> None:
        headers = {"Host": "s3.amazonaws.com"}  # by which moto knows what is meant without S3's signature
        request = urllib.request.Request(f"{self.endpoint}/{bucket}", method="PUT", headers=headers)
        urllib.request.urlopen(request, timeout=10).close()


@pytest.fixture(params=["gs", pytest.param("az", marks=needs_azurite)])
def scheme(request, monkeypatch):
    monkeypatch.setattr(tier_process_module, "BACKOFF_SECONDS", (0.1, 0.4))
    for name in list(os.environ):
        if name.startswith(("GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    for name, value in {"GOOGLE_BEARER_TOKEN": "token", **VARIABLES}.items():
        monkeypatch.setenv(name, value)
    return request.param


@pytest.fixture
def server(scheme):
    server = (AzureServer() if scheme == "az" else GoogleServer()).start()
    yield server
    server.kill()


@pytest.fixture
def node_of(server, scheme):
    nodes = []

    def make(**options):
        nodes.append(Node(server.endpoint, url=f"{scheme}://{BUCKET}/shared", **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.stop()


def test_cloud_nodes_share_blocks_and_rewrite_bad_objects(server, scheme, node_of):
    server.create(BUCKET)
    one, other = node_of().ready(), node_of().ready()
    block_hashes = block_hashes_of("shared")
    blocks = blocks_of(block_hashes)
    assert one.find(block_hashes).num_hash_blocks == 0
    assert one.write(blocks) == [True] * BLOCKS
    assert other.read(block_hashes) == ([True] * BLOCKS, [True] * BLOCKS)

    client = ObjectClient(parse_url(f"{scheme}://{BUCKET}/shared"), server.endpoint, "", 2.0, 5.0)
    keys = [client.location.key(NAMESPACE_ID, 0, block.hash) for block in blocks]
    client.put(keys[20], memoryview(b"cut"))
    client.put(keys[5], memoryview(bytes(SIZE)))
    assert client.size(keys[20]) == 3 and client.size("nothing") is None
    third = node_of().ready()
    good = third.read_all(block_hashes)
    assert good.index(False) == 20 and third.tier.usable
    third.on(lambda: third.tier.discard(NAMESPACE_ID, 0, blocks[5].hash))
    eventually(lambda: client.size(keys[5]) is None)
    client.delete(keys[5])
    assert third.write(blocks) == [True] * BLOCKS
    assert third.read(block_hashes) == ([True] * BLOCKS, [True] * BLOCKS)
    assert [node.tier.counts().restarts for node in (one, other, third)] == [0, 0, 0]

    large = os.urandom(40 << 20)  # in parts, both ways
    client.put("large", memoryview(large))
    into = memoryview(bytearray(len(large)))
    client.get("large", into, math.inf)
    assert into == large


@pytest.mark.parametrize("scheme", [pytest.param("az", marks=needs_azurite)], indirect=True)
def test_azure_first_of_two_creators_wins(server, scheme):
    server.create(BUCKET)
    client = ObjectClient(parse_url(f"{scheme}://{BUCKET}/shared"), server.endpoint, "", 2.0, 5.0)
    assert client.put("k", memoryview(b"first"), create=True) and not client.put(
        "k", memoryview(b"second"), create=True
    )
    assert client.read("k", 10) == b"first"


@pytest.mark.parametrize("scheme", [pytest.param("az", marks=needs_azurite)], indirect=True)
def test_azure_wrong_key_is_reported(server, scheme, monkeypatch):
    server.create(BUCKET)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    client = ObjectClient(parse_url(f"{scheme}://{BUCKET}/shared"), server.endpoint, "", 2.0, 5.0)
    with pytest.raises(Trouble, match="key is wrong") as caught:
        client.read("k", 10)
    assert caught.value.kind is Kind.DENIED


def test_cloud_tier_unavailable_until_server_returns(server, scheme, node_of):
    server.create(BUCKET)
    node = node_of(look_seconds=3.0, read_seconds=3.0).ready()
    block_hashes = block_hashes_of("shared")
    assert node.write(blocks_of(block_hashes)) == [True] * BLOCKS
    server.hang()
    assert node.find(block_hashes_of("else")).num_hash_blocks == 0
    eventually(lambda: node.tier.counts().state == "unavailable")
    assert "no answer" in node.tier.counts().reason
    server.go_on()
    assert node.ready().find(block_hashes).num_hash_blocks == BLOCKS
    server.kill()
    assert not any(node.read_all(block_hashes))
    eventually(lambda: "cannot be reached" in node.tier.counts().reason, 20)
    server.start()
    eventually(lambda: "there is no such" in node.tier.counts().reason, 20)
    server.create(BUCKET)
    node.ready().on(lambda: node.tier.clear(None))
    assert node.find(block_hashes).num_hash_blocks == 0
    eventually(lambda: all(node.write(blocks_of(block_hashes))), 20, "a write within its time, on a busy machine")
    eventually(lambda: node.read(block_hashes) == ([True] * BLOCKS, [True] * BLOCKS), 20, "a read within its time")
