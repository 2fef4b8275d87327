"""Several nodes' object tiers on one directory, each with its process: killed, full, changed and removed."""

import contextlib
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from functools import partial

import pytest
from object_nodes import BLOCKS, NAMESPACE_ID, SIZE, Node, block_hashes_of, blocks_of, contents
from support import eventually

from vllm_kvtier.store.tiers.objects import tier as tier_module
from vllm_kvtier.store.tiers.objects.object_names import FORMAT
from vllm_kvtier.store.tiers.objects.shared_directory import LEFT_SECONDS
from vllm_kvtier.store.tiers.process import tier_process as tier_process_module


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    monkeypatch.setattr(tier_process_module, "BACKOFF_SECONDS", (0.05, 0.2))


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "shared"
    root.mkdir()
    return root


@pytest.fixture
def node_of(root):
    nodes = []

    def make(**options):
        nodes.append(Node("", url=f"file://{root}", **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.stop()


def path_of(root, block):
    name = block.hash.hex()
    return root / NAMESPACE_ID.hex() / "0" / name[:2] / name


def files_of(root):
    """All files but the ones that start with a dot."""
    return [path for path in root.rglob("*") if path.is_file() and not path.name.startswith(".")]


def check_files(root, prompts: list[bytes]) -> int:
    """Every file of a block is whole and right. Returns the number of other files, those of unfinished writes."""
    blocks = {block.hash.hex(): block for prompt in prompts for block in blocks_of(prompt)}
    unfinished = 0
    for path in files_of(root):
        if "#" in path.name:
            unfinished += 1
        else:
            with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                assert path.read_bytes() == contents(blocks[path.name])
    return unfinished


def size_of(root) -> int:
    """In whole blocks: files are removed meanwhile."""
    return sum("#" not in path.name for path in files_of(root)) * SIZE


def test_nodes_share_a_directory_and_rewrite_bad_files(root, node_of):
    one, other = node_of().ready(), node_of().ready()
    assert (root / ".kvtier").read_bytes() == FORMAT
    block_hashes = block_hashes_of("shared")
    blocks = blocks_of(block_hashes)
    assert one.find(block_hashes).num_hash_blocks == 0
    assert one.write(blocks) == [True] * BLOCKS and check_files(root, [block_hashes]) == 0
    assert other.read(block_hashes) == ([True] * BLOCKS, [True] * BLOCKS)

    # Both write the same at the same time.
    race = block_hashes_of("race")
    for node in (one, other):
        node.fill(blocks_of(race))
    told = [node.begin(lambda done, node=node: node.tier.write(blocks_of(race), done)) for node in (one, other)]
    eventually(lambda: all(told))
    assert told == [[[True] * BLOCKS]] * 2 and check_files(root, [block_hashes, race]) == 0

    third = node_of().ready()
    path_of(root, blocks[20]).write_bytes(b"cut")
    path_of(root, blocks[5]).write_bytes(bytes(SIZE))
    path_of(root, blocks[12]).unlink()
    good = third.read_all(block_hashes)
    assert good.index(False) in (12, 20) and third.tier.usable, "a miss, and no reason to back off"
    third.on(lambda: third.tier.discard(NAMESPACE_ID, 0, blocks[5].hash))  # its checksum was wrong
    eventually(lambda: not path_of(root, blocks[5]).exists())
    assert third.write(blocks) == [True] * BLOCKS
    assert third.read(block_hashes) == ([True] * BLOCKS, [True] * BLOCKS)
    assert check_files(root, [block_hashes, race]) == 0 and third.tier.counts().restarts == 0


def test_directory_stays_below_its_size_with_many_writers(root, node_of):
    size = 4 * BLOCKS * SIZE
    nodes = [node_of(size=size, scan_seconds=0.2).ready() for _ in range(3)]
    prompts = [[block_hashes_of(f"{number} {turn}") for turn in range(6)] for number in range(len(nodes))]
    loads = 0
    for turn in range(6):
        for node, own in zip(nodes, prompts, strict=True):
            assert node.write(blocks_of(own[turn])) == [True] * BLOCKS
        for node, own in zip(nodes, prompts[1:] + prompts[:1], strict=True):  # what another has written, if it is left
            good, right = node.read(own[turn])
            assert all(r for g, r in zip(good, right, strict=True) if g)
            loads += sum(good)
    assert loads > 0
    eventually(lambda: size_of(root) <= size, 20, "below the size")
    assert files_of(root) and check_files(root, [hashes for own in prompts for hashes in own]) == 0
    # A prompt that was removed is a miss, and is written again.
    lost = next(p for own in prompts for p in own if not all(path_of(root, b).exists() for b in blocks_of(p)))
    node = nodes[0]
    for path in [path_of(root, block) for block in blocks_of(lost)]:
        path.unlink(missing_ok=True)
    assert not any(node.read_all(lost)) and all(each.tier.usable for each in nodes)
    counts = [each.tier.counts() for each in nodes]
    assert all(each.restarts == 0 and each.capacity_bytes == size for each in counts)
    assert sum(each.evicted_blocks for each in counts) > 0 and max(each.used_bytes for each in counts) > 0


def test_writers_killed_at_any_point_leave_only_whole_blocks(root, node_of):
    chance, prompts = random.Random(7), []
    node, reader = node_of().ready(), node_of(scan_seconds=0.2).ready()
    for turn in range(15):
        prompts.append(block_hashes_of(f"turn {turn}"))
        node.fill(blocks_of(prompts[-1]))
        told = node.begin(lambda done: node.tier.write(blocks_of(prompts[-1]), done))
        time.sleep(chance.random() * 0.01)  # the point
        os.kill(node.pids[-1], signal.SIGKILL)
        eventually(told.copy)
        check_files(root, prompts)
        good, right = reader.read(prompts[-1])
        assert all(right[i] for i, there in enumerate(good) if there)
        eventually(lambda count=turn + 2: len(node.pids) == count, 10)
        node.ready()
    # What it left is removed once it is old.
    left = path_of(root, blocks_of(prompts[0])[0])
    left.parent.mkdir(parents=True, exist_ok=True)
    left.with_name(f"{left.name}#7").write_bytes(b"unfinished")
    old = time.time() - 2 * LEFT_SECONDS
    for path in files_of(root):
        if "#" in path.name:
            os.utime(path, (old, old))
    eventually(lambda: check_files(root, prompts) == 0, 20)
    assert node.write(blocks_of(prompts[0])) == [True] * BLOCKS
    assert reader.read(prompts[0]) == ([True] * BLOCKS, [True] * BLOCKS)


def test_full_file_system_makes_the_tier_read_only_for_a_while(root, node_of, monkeypatch, caplog):
    monkeypatch.setattr(tier_module, "REFUSED_SECONDS", (2.0, 2.0))  # each warns once
    caplog.set_level(logging.INFO)
    node = node_of(scan_seconds=0.2).ready()
    kept, more = block_hashes_of("kept"), block_hashes_of("more")
    assert node.write(blocks_of(kept)) == [True] * BLOCKS
    resource.prlimit(node.pids[-1], resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    assert True not in node.write(blocks_of(more))
    assert node.tier.counts().state == "read_only" and "File too large" in node.tier.counts().reason
    asked = [node.write(blocks_of(more)) for _ in range(50)]
    assert True not in [good for each in asked for good in each]
    assert node.tier.usable and node.find(kept).num_hash_blocks > 0, "it is still read"
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) < 5
    eventually(lambda: len(files_of(root)) < BLOCKS, 10, "it makes some room")
    resource.prlimit(node.pids[-1], resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    eventually(lambda: node.tier.writable, 10)
    assert node.write(blocks_of(more)) == [True] * BLOCKS
    assert check_files(root, [kept, more]) == 0 and node.tier.counts().restarts == 0


def test_small_file_system_is_used_without_an_end_of_errors(root, node_of, monkeypatch, caplog):
    """Smaller than the tier's size: room is made for what is new."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", root], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        monkeypatch.setattr(tier_module, "REFUSED_SECONDS", (0.3, 0.3))
        node = node_of(scan_seconds=0.2).ready()
        prompts = [block_hashes_of(f"prompt {number}") for number in range(6)]
        states = set()

        def is_stored(blocks) -> bool:
            if node.write(blocks) == [True] * len(blocks):
                return True
            states.add(node.tier.counts().state)
            eventually(lambda: node.tier.writable, 10)
            return False

        for prompt in prompts:
            eventually(partial(is_stored, blocks_of(prompt)[:8]), 20)
        assert "read_only" in states <= {"read_only", "ready"}  # the latter: it may write again already
        assert node.tier.counts().evicted_blocks > 0
        assert check_files(root, prompts) == 0 and node.tier.counts().restarts == 0
        assert not [record for record in caplog.records if "unavailable" in record.message]
    finally:
        subprocess.run(["umount", "-l", root], check=True)


def test_directory_removed_beneath_is_not_made_again(root, node_of):
    node = node_of().ready()
    block_hashes = block_hashes_of("gone")
    assert node.write(blocks_of(block_hashes)) == [True] * BLOCKS
    shutil.rmtree(root)
    assert not any(node.read_all(block_hashes))
    assert True not in node.write(blocks_of(block_hashes_of("new")))
    eventually(lambda: "there is no directory" in node.tier.counts().reason, 10)
    assert node.tier.counts().state == "unavailable" and not root.exists()
    root.mkdir()
    node.ready()
    node.on(lambda: node.tier.clear(None))
    assert node.write(blocks_of(block_hashes)) == [True] * BLOCKS
    assert node.read(block_hashes) == ([True] * BLOCKS, [True] * BLOCKS)


def test_directory_of_another_format_is_refused(root, node_of):
    (root / ".kvtier").write_bytes(b"kvtier blocks 2\n")
    node = node_of()
    eventually(lambda: "use another prefix" in node.tier.counts().reason, 10)
    assert (root / ".kvtier").read_bytes() == b"kvtier blocks 2\n"
