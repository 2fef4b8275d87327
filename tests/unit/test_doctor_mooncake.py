"""`kvtier doctor --mooncake-master`: what is wrong with a Mooncake cluster."""

import subprocess
from types import SimpleNamespace

import pytest
from mooncake_master import Master, why_not
from mooncake_nodes import MooncakeNode
from support import eventually

from vllm_kvtier.devtools.processes import free_port
from vllm_kvtier.doctor.machine import mooncake as checks
from vllm_kvtier.store.tiers.mooncake.options import reachable


@pytest.fixture
def installed(monkeypatch):
    """One package, a master that accepts connections, and no metrics."""
    monkeypatch.setattr(checks, "_installed", lambda: {"mooncake": "1"})
    monkeypatch.setattr(checks, "reachable", lambda address, seconds: address.host != "gone")


def ran(stdout):
    return lambda command, **how: SimpleNamespace(stdout=stdout)


def late(command, **how):
    raise subprocess.TimeoutExpired(command, how["timeout"])


def test_doctor_names_what_is_missing_of_mooncake(installed, monkeypatch):
    (check,) = checks.mooncake("nonsense")
    assert check.state == "fail" and "must be host:port" in check.message
    (check,) = checks.mooncake("gone:1")
    assert check.state == "fail" and "does not accept" in check.message
    for run, message in (
        (late, "within 20 s"), (ran(""), "without an answer"), (ran("noise\nfail code -1"), "code -1 (mooncake 1)"),
    ):  # fmt: skip
        first = checks.mooncake("127.0.0.1:1", metrics_port=free_port(), run=run)[0]
        assert first.state == "fail" and message in first.message
    good, metrics, open_ports = checks.mooncake("host:1", metrics_port=free_port(), run=ran("ok moved"))
    assert (good.state, good.message) == ("ok", "moved, with mooncake 1")
    assert metrics.state == "unknown" and open_ports.state == "warn" and "neither authentication" in open_ports.message
    monkeypatch.setattr(checks, "_installed", lambda: {"one": "1", "another": "2"})
    (check,) = checks.mooncake("127.0.0.1:1")
    assert "one and another installed; exactly one" in check.message


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_doctor_moves_an_object_in_a_real_cluster():
    master = Master().start()
    try:
        eventually(lambda: reachable(checks.MooncakeOptions.parse(_options(master)).probes[0], 1.0))
        good, nodes = checks.mooncake(master.address, metrics_port=master.metrics_port)
        assert good.state == "ok" and "no memory for a test object" in good.message
        assert nodes.state == "warn" and "no node gives memory" in nodes.message
        node = MooncakeNode(master.address).ready()
        good, nodes = checks.mooncake(master.address, metrics_port=master.metrics_port)
        assert good.state == "ok" and "1 MiB was written and read" in good.message
        assert nodes.state == "ok" and nodes.message.startswith("1 nodes give memory")
        node.stop()
    finally:
        master.kill()


def _options(master):
    return {
        "mooncake_master": master.address, "mooncake_trusted_network": True, "mooncake_segment": "0",
        "mooncake_replicas": 1, "mooncake_host": "", "mooncake_protocol": "tcp", "mooncake_devices": "",
    }  # fmt: skip
