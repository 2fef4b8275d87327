"""Two nodes' object tiers, each with its pool and its tier process, and a real S3-speaking server between them."""

import logging
import os
import signal

import pytest
from object_nodes import BLOCKS, BUCKET, NAMESPACE_ID, SIZE, Node, block_hashes_of, blocks_of, contents
from s3_server import S3Server
from support import eventually

from vllm_kvtier.store.tiers.process import tier_process as tier_process_module
from vllm_kvtier.wire.slots import PAGE

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"  # as Amazon's manuals print it


@pytest.fixture(scope="module")
def server():
    server = S3Server().start()
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    monkeypatch.setattr(tier_process_module, "BACKOFF_SECONDS", (0.1, 0.4))
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture
def node_of(server):
    """Makes nodes, and the bucket they share."""
    server.client().create_bucket(Bucket=BUCKET)
    nodes = []

    def make(endpoint=server.endpoint, **options):
        nodes.append(Node(endpoint, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.stop()


def test_object_tier_nodes_share_blocks_and_rewrite_bad_objects(server, node_of):
    one, other = node_of(), node_of()
    one.ready(), other.ready()
    block_hashes = block_hashes_of("shared")
    assert one.find(block_hashes).num_hash_blocks == 0

    assert one.write(blocks_of(block_hashes)) == [True] * BLOCKS
    assert other.find(block_hashes).num_hash_blocks == BLOCKS and other.find(block_hashes, 10).num_hash_blocks == BLOCKS
    good, right = other.read(block_hashes)
    assert good == right == [True] * BLOCKS
    assert all(other.tier.has(NAMESPACE_ID, 0, block.hash) for block in blocks_of(block_hashes)), (
        "it need not write them"
    )

    # Both write the same at the same time, while they also read.
    race = block_hashes_of("race")
    for node in (one, other):
        node.fill(blocks_of(race))
    told = [node.begin(lambda done, node=node: node.tier.write(blocks_of(race), done)) for node in (one, other)]
    assert one.read(block_hashes)[1] == [True] * BLOCKS
    eventually(lambda: all(told))
    assert told == [[[True] * BLOCKS]] * 2
    for node in (one, other):
        assert node.read(race) == ([True] * BLOCKS, [True] * BLOCKS)

    # Somebody else's hands on the bucket: one object is cut, one gone, one holds other bytes of the same length.
    s3 = server.client()
    third = node_of().ready()
    bad = [f"shared/{NAMESPACE_ID.hex()}/0/{block.hash.hex()}" for block in blocks_of(block_hashes)]
    s3.put_object(Bucket=BUCKET, Key=bad[20], Body=b"cut")
    s3.put_object(Bucket=BUCKET, Key=bad[5], Body=bytes(SIZE))
    good, right = third.read(block_hashes)
    # The search may have come upon the one that was cut, or not.
    assert [*good, False][:21] == [True] * 20 + [False] and right[:20] == [i != 5 for i in range(20)]
    assert third.find(block_hashes).num_hash_blocks == 20, "and the tier stays available"
    # Who loads the foreign one sees that its checksum is wrong.
    third.on(lambda: third.tier.discard(NAMESPACE_ID, 0, blocks_of(block_hashes)[5].hash))
    eventually(lambda: "Contents" not in s3.list_objects_v2(Bucket=BUCKET, Prefix=bad[5]))
    assert third.find(block_hashes).num_hash_blocks == 5
    # It is computed again and written, as is the cut one.
    assert third.write(blocks_of(block_hashes)[5:]) == [True] * (BLOCKS - 5)
    assert third.read(block_hashes) == ([True] * BLOCKS, [True] * BLOCKS)
    assert third.tier.usable and third.tier.counts().restarts == 0


def test_object_tier_unavailable_until_server_returns(node_of, monkeypatch):
    own = S3Server().start()
    try:
        own.client().create_bucket(Bucket=BUCKET)
        one, other = (node_of(own.endpoint, look_seconds=3.0).ready() for _ in range(2))
        block_hashes = block_hashes_of("shared")
        assert one.write(blocks_of(block_hashes)) == [True] * BLOCKS

        own.hang()
        assert one.find(block_hashes_of("else")).num_hash_blocks == 0
        eventually(lambda: one.tier.counts().state == "unavailable")
        assert "no answer" in one.tier.counts().reason
        own.go_on()
        assert one.ready().find(block_hashes).num_hash_blocks == BLOCKS, (
            "its objects are still there, and what it knew of them"
        )

        # Killed while both are at it: every lookup is answered, and what is reported as stored is.
        find = other.find(block_hashes)
        blocks = blocks_of(block_hashes, half=1)
        new = blocks_of(block_hashes_of("new"))
        one.fill(new)
        reading = [other.begin(lambda done: other.tier.read(find, blocks, done)) for _ in range(2)]
        writing = [one.begin(lambda done: one.tier.write(new, done)) for _ in range(2)]
        eventually(lambda: any(reading + writing) or other.tier.counts().read_seconds > 0.02)
        own.kill()
        eventually(lambda: all(reading + writing), 30)
        for good in (told[0] for told in reading):
            for block, there in zip(blocks, good, strict=True):
                assert not there or other.pool[block.slot * PAGE : block.slot * PAGE + SIZE] == contents(block)
        for node in (one, other):
            node.find(block_hashes_of("something else"))
            eventually(lambda node=node: not node.tier.usable)
        eventually(lambda: "cannot be reached" in one.tier.counts().reason, what="why")

        # It restarts empty: first without the bucket, which is reported, then with it.
        own.start()
        eventually(lambda: "no such bucket" in one.tier.counts().reason, 20)
        own.client().create_bucket(Bucket=BUCKET)
        one.ready(), other.ready()
        assert other.find(block_hashes).num_hash_blocks == 0
        one.on(lambda: one.tier.clear(None))
        assert one.write(blocks_of(block_hashes)) == [True] * BLOCKS
        whole = [True] * BLOCKS  # a busy machine may need longer than the time-out once more
        eventually(lambda: other.ready().read(block_hashes) == (whole, whole), 20, "all blocks are read")
    finally:
        own.kill()


def test_tier_process_killed_is_restarted(node_of):
    node = node_of().ready()
    block_hashes = block_hashes_of("killed")
    node.fill(blocks_of(block_hashes))
    told = node.begin(lambda done: node.tier.write(blocks_of(block_hashes), done))
    os.kill(node.pids[-1], signal.SIGKILL)
    eventually(lambda: told)
    eventually(lambda: len(node.pids) == 2)
    assert "signal 9" in node.tier._tier_process._logged or told[0] == [True] * BLOCKS
    node.ready()
    assert node.write(blocks_of(block_hashes)) == [True] * BLOCKS
    assert node.read(block_hashes) == ([True] * BLOCKS, [True] * BLOCKS)


def test_credentials_are_required_and_never_logged(monkeypatch, caplog):
    own, said = S3Server().start(), []

    def node_as(variables, words):
        """What a node's counts are as soon as they have these words, with the user's credentials."""
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        node = Node(own.endpoint, url=f"s3://{BUCKET}/{len(said)}")
        try:
            eventually(lambda: words in repr(node.tier.counts()), 30, words)
            good = node.write(blocks_of(block_hashes_of("x"))[:3])
            said.extend([repr(node.tier.counts()), repr(node.tier), *node.command_lines])
            return node.tier.counts().state, good
        finally:
            node.stop()

    try:
        own.client().create_bucket(Bucket=BUCKET)
        reader = own.add_user("reader", ["s3:GetObject", "s3:ListBucket"])
        writer = own.add_user("writer", ["s3:*"])
        own.check()
        caplog.set_level(logging.DEBUG)
        assert node_as(writer, "'ready'") == ("ready", [True] * 3)
        wrong = {**writer, "AWS_SECRET_ACCESS_KEY": SECRET}
        assert node_as(wrong, "the secret key is not the one")[1] == [False] * 3
        nobody = {**writer, "AWS_ACCESS_KEY_ID": "AKIANOBODYATALL"}
        assert node_as(nobody, "does not know the access key")[1] == [False] * 3
        assert node_as(reader, "lack the right") == ("read_only", [False] * 3)
    finally:
        own.kill()
    assert "the secret key is not the one" in caplog.text
    text = caplog.text + "".join(said)
    assert not [word for word in (SECRET, "AKIANOBODYATALL", *reader.values(), *writer.values()) if word in text]
