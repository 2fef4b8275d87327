"""Options of the store that cannot be meant are refused with a reason, before anything is started."""

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import Clock

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.store.eviction import POLICIES
from vllm_kvtier.store.index.index import Index
from vllm_kvtier.store.memory.slot_pool import SlotPool
from vllm_kvtier.store.options import StoreOptions, parse
from vllm_kvtier.store.tiers.nodes.tier import NodesTier
from vllm_kvtier.store.tiers.tier_stack import open_tiers
from vllm_kvtier.wire import auth
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.reactor import Reactor


@pytest.mark.parametrize(
    "options, words",
    [
        ({"disk_path": "/d", "disk_size": "much"}, "disk_size 'much'"),
        ({"disk_path": "/d", "disk_size": "0"}, "disk_size '0'"),
        ({"nodes": "nonsense"}, "'nonsense' is not host:port"),
        ({"nodes": "10.0.0.1:99"}, "requires a cluster key"),
        ({"node_listen": "0.0.0.0:99"}, "requires a cluster key"),
        ({"cluster_key_file": "/nowhere/key"}, "No such file"),
        ({"object_url": "http://bucket/p"}, "must be s3://"),
        ({"object_url": "file:///kv", "object_size": "much"}, "object_size 'much'"),
        ({"object_url": "s3://key:hush@bucket/p"}, "must not contain credentials"),
        ({"object_endpoint": "http://key:hush@host"}, "must not contain credentials"),  # without a url, too
        ({"disk_admission": "some"}, "choose one of all, reuse"),
        ({"disk_min_tokens": -1}, "0 or more"),
        ({"size": "abc"}, "option size: pool size 'abc'"),
        ({"size": "-5"}, "option size: pool size '-5'"),
        ({"size": "0"}, "option size: .* too small"),
        ({"size": "200%"}, "option size: .*at most 100%"),
        ({"policy": "foo"}, "option policy='foo': choose one of aging, arc"),
    ],
)
def test_store_options_invalid_raise_with_cause(options, words):
    with pytest.raises(ConfigError, match=words) as refusal:
        StoreOptions(**options)
    assert "hush" not in str(refusal.value)


def test_store_options_name_every_eviction_policy():
    for policy in ("", *POLICIES):
        assert StoreOptions(policy=policy).policy == policy


def test_store_options_key_readable_by_others_raises(tmp_path):
    key = tmp_path / "key"
    key.write_bytes(b"x" * 40)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="readable by others"):
        StoreOptions(cluster_key_file=str(key))


@pytest.mark.parametrize(("owner", "mode", "allowed"), [
    (0, 0o440, True), (0, 0o444, False), (0, 0o460, False), (1000, 0o440, False), (1000, 0o400, True),
])  # fmt: skip
def test_cluster_key_of_root_may_be_readable_by_a_group(tmp_path, monkeypatch, owner, mode, allowed):
    """As Kubernetes mounts a Secret for an fsGroup, in the pod of another user."""
    key = tmp_path / "key"
    ClusterKey.create(str(key))
    stat = os.stat_result([mode | 0o100000, 0, 0, 1, owner, 1000, 40, 0, 0, 0])
    monkeypatch.setattr(Path, "stat", lambda self: stat)
    monkeypatch.setattr(auth.os, "geteuid", lambda: 1000)
    with nullcontext() if allowed else pytest.raises(ConfigError, match="readable by others"):
        ClusterKey.load(str(key))


def test_store_options_name_what_nodes_share():
    """Of that, one node has nothing promoted by another."""
    shared = {"object_url": "s3://bucket/p", "mooncake_master": "10.0.0.1:50051", "mooncake_trusted_network": True}
    memory, digests = SimpleNamespace(fd=0, nbytes=1 << 20), []
    for options in (shared, {**shared, "object_endpoint": "http://other"}, {"disk_path": ""}):
        index = Index(SlotPool(8), None, Clock())
        stack = open_tiers(StoreOptions(nodes="localhost:1", **options), index, memory, Reactor("test"), list)
        [nodes] = [tier for tier in stack.all if isinstance(tier, NodesTier)]
        digests.append(nodes._leases._shared)
        assert nodes._tier_process._options["shared"].split() == list(digests[-1].values())
    assert set(digests[0]) == set(digests[1]) == {"mooncake", "object"} and not digests[2]
    assert [digests[0][tier] == digests[1][tier] for tier in ("mooncake", "object")] == [True, False]


def test_store_options_switches_are_given_alone_or_with_their_value():
    assert parse(["--disk-preallocate", "--size=1GiB"]) == StoreOptions(disk_preallocate=True, size="1GiB")
    assert parse(["--show-hidden-metrics=true"]).show_hidden_metrics
    assert not parse(["--show-hidden-metrics", "false"]).show_hidden_metrics


def test_store_options_paths_are_absolute(monkeypatch, tmp_path):
    """A store that an engine starts, and its movers, run in /."""
    monkeypatch.chdir(tmp_path)
    options = StoreOptions(disk_path="cache/kv")
    assert options.disk_path == str(tmp_path / "cache/kv")
    monkeypatch.chdir("/")
    assert parse(options.arguments()) == options
    assert StoreOptions(disk_path="~/kv").disk_path == os.path.expanduser("~/kv")
