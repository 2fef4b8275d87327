"""Registration with Dynamo, and KV events as its router reads them.

Dynamo's own modules are used if they can be imported (``pip install --no-deps ai-dynamo ai-dynamo-runtime``), and
stand-ins of the same form in any case.
"""

import abc
import importlib
import importlib.util
import json
import logging
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request

import numpy as np
import pytest

from vllm_kvtier import dynamo, plugin
from vllm_kvtier.devtools.processes import free_port
from vllm_kvtier.scheduler.matching.transfer_params import Hints, read
from vllm_kvtier.telemetry.events import Label, Place, Removed, Stored


def stand_in() -> types.ModuleType:
    """The part of the module that 1.6.1 has."""

    class KvConnectorProtocol(abc.ABC):
        produces_kv_transfer_params = True

        def __init__(self, vllm_config):
            self._vllm_config = vllm_config

        @abc.abstractmethod
        def prefill_request_kv_transfer_params(self): ...

        @abc.abstractmethod
        def decode_request_kv_transfer_params(self, prefill_response): ...

    module = types.ModuleType(dynamo.MODULE)
    module.KvConnectorProtocol = KvConnectorProtocol
    module.KV_CONNECTOR_PROTOCOLS = {"NixlConnector": KvConnectorProtocol}
    return module


def real() -> types.ModuleType:
    try:
        return importlib.import_module(dynamo.MODULE)
    except ImportError:
        pytest.skip("Dynamo is not installed")


@pytest.fixture(params=[stand_in, real])
def module(request, monkeypatch):
    found = request.param()
    monkeypatch.setattr(found, dynamo.TABLE, dict(getattr(found, dynamo.TABLE)))
    monkeypatch.setitem(sys.modules, dynamo.MODULE, found)
    return found


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level("WARNING")
    return lambda: [record.getMessage() for record in caplog.records]


def test_dynamo_gets_a_protocol_of_its_own_kind(module, warnings):
    assert dynamo.register("KVTierConnector") and dynamo.register("KVTierConnector")
    made = module.KV_CONNECTOR_PROTOCOLS["KVTierConnector"](object())
    assert isinstance(made, module.KvConnectorProtocol) and made.produces_kv_transfer_params
    assert warnings() == []


def test_dynamo_params_are_those_that_the_connector_reads(module):
    """A prefill request makes an export; the answer goes to the decode engine as it is; without one, nothing does."""
    dynamo.register("KVTierConnector")
    made = module.KV_CONNECTOR_PROTOCOLS["KVTierConnector"](object())
    assert read(made.prefill_request_kv_transfer_params()) == Hints(export_prefill=True, asked=True)
    answer = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 7100, "remote_request_id": "r"}
    assert made.decode_request_kv_transfer_params(types.SimpleNamespace(kv_transfer_params=answer)) == answer
    assert made.decode_request_kv_transfer_params(types.SimpleNamespace(kv_transfer_params=None)) == {}


def test_dynamo_entry_of_its_own_is_kept(module):
    mine = module.KV_CONNECTOR_PROTOCOLS["KVTierConnector"] = module.KV_CONNECTOR_PROTOCOLS["NixlConnector"]
    assert dynamo.register("KVTierConnector")
    assert module.KV_CONNECTOR_PROTOCOLS["KVTierConnector"] is mine


@pytest.mark.parametrize(
    ("connector", "extra"),
    [
        ("KVTierConnector", {}),
        ("MultiConnector", {"connectors": [{"kv_connector": "KVTierConnector"}]}),
        ("PdConnector", {"connectors": [{"kv_connector": "KVTierConnector"}, {"kv_connector": "DynamoConnector"}]}),
    ],
)
def test_dynamo_resolves_the_connector_also_inside_others(connector, extra, monkeypatch):
    module = real()
    monkeypatch.setattr(module, dynamo.TABLE, dict(module.KV_CONNECTOR_PROTOCOLS))
    transfer = types.SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra, engine_id="e")
    config = types.SimpleNamespace(kv_transfer_config=transfer)
    with pytest.raises(ValueError, match="PD"):
        module.make_kv_connector_protocol(config)
    dynamo.register("KVTierConnector")
    assert module.make_kv_connector_protocol(config).prefill_request_kv_transfer_params()["do_remote_decode"] is True


def test_dynamo_is_not_imported():
    code = f"import sys; from vllm_kvtier import dynamo; print(dynamo.register('X'), {dynamo.MODULE!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"], done.stderr


def no_table(module):
    del module.KV_CONNECTOR_PROTOCOLS


def table_is_a_function(module):
    module.KV_CONNECTOR_PROTOCOLS = lambda name: None


def no_base(module):
    del module.KvConnectorProtocol


def base_wants_more(module):
    class Wants(module.KvConnectorProtocol):
        @abc.abstractmethod
        def encode_request_params(self): ...

    module.KvConnectorProtocol = Wants


@pytest.mark.parametrize("change", [no_table, table_is_a_function, no_base, base_wants_more])
def test_dynamo_that_has_changed_costs_one_warning(change, monkeypatch, warnings):
    module = stand_in()
    change(module)
    monkeypatch.setitem(sys.modules, dynamo.MODULE, module)
    assert not dynamo.register("KVTierConnector")
    assert len(warnings()) == 1 and "aggregated serving is not affected" in warnings()[0]
    assert "KVTierConnector" not in getattr(module, dynamo.TABLE, ()) if change in (no_base, base_wants_more) else True


def test_plugin_registers_with_dynamo(monkeypatch):
    module = stand_in()
    monkeypatch.setitem(sys.modules, dynamo.MODULE, module)
    pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.factory")
    plugin.register()
    assert "KVTierConnector" in module.KV_CONNECTOR_PROTOCOLS


# -- KV events -----------------------------------------------------------------------------------------------------

INDEXER = "import sys; from dynamo._core import run_kv_indexer; run_kv_indexer(sys.argv[1:])"
BLOCK, NUM_BLOCKS = 16, 3


@pytest.fixture
def indexer():
    """Dynamo's indexer behind a publisher of vLLM: (publish, tokens of each tier that it has of a prompt)."""
    if importlib.util.find_spec("dynamo") is None or importlib.util.find_spec("dynamo._core") is None:
        pytest.skip("Dynamo's runtime is not installed")
    kv_events = pytest.importorskip("vllm.distributed.kv_events")
    from vllm_kvtier.vllm_compat.kv_events import vllm_events

    events, http = free_port(), free_port()
    words = ["--block-size", str(BLOCK), "--port", str(http), "--workers", f"1=tcp://127.0.0.1:{events}"]
    process = subprocess.Popen([sys.executable, "-c", INDEXER, *words])
    publisher = kv_events.ZmqEventPublisher(0, endpoint=f"tcp://*:{events}")

    def publish(*made) -> None:
        batch = vllm_events(list(made), [(0, "full_attention", None)])
        publisher.publish(kv_events.KVEventBatch(ts=time.time(), events=batch))

    def tiers(first: int) -> dict[str, int]:
        body = {"model_name": "default", "token_ids": list(range(first, first + BLOCK * NUM_BLOCKS))}
        request = urllib.request.Request(
            f"http://127.0.0.1:{http}/query", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                found = json.load(answer)["instances"].get("1", {})
        except urllib.error.URLError:  # not yet listening
            return {}
        return {tier: found.get(tier, 0) for tier in ("gpu", "cpu", "disk")}

    try:
        yield publish, tiers
    finally:
        publisher.shutdown()
        process.terminate()
        process.wait(10)


def labels(first: int) -> list[Label]:
    found, parent = [], b""
    for at in range(first, first + BLOCK * NUM_BLOCKS, BLOCK):
        block_hash = at.to_bytes(32, "big")
        found.append(Label(block_hash, parent, np.arange(at, at + BLOCK, dtype="<i4").tobytes()))
        parent = block_hash
    return found


def wait_until(publish, tiers, first: int, wanted: dict[str, int], event) -> None:
    """Publish again until it is seen: a subscriber that connects late misses events."""
    deadline = time.monotonic() + 30
    while (found := tiers(first)) != wanted:
        assert time.monotonic() < deadline, found
        publish(event)
        time.sleep(0.05)


def test_dynamo_indexer_takes_memory_as_host_and_disk_as_disk(indexer):
    """What the indexer counts for a tier includes the tiers above."""
    publish, tiers = indexer
    memory, disk, remote = Place("CPU", "LOCAL"), Place("STORAGE", "LOCAL"), Place("STORAGE", "REMOTE")
    wait_until(publish, tiers, 1000, {"gpu": 0, "cpu": 48, "disk": 48}, Stored(0, memory, labels(1000)))
    wait_until(publish, tiers, 2000, {"gpu": 0, "cpu": 0, "disk": 48}, Stored(0, disk, labels(2000)))
    publish(Stored(0, remote, labels(3000)))
    removed = [label.hash for label in labels(1000)][1:]
    wait_until(publish, tiers, 1000, {"gpu": 0, "cpu": 16, "disk": 16}, Removed(0, memory, removed))
    assert tiers(3000) == {"gpu": 0, "cpu": 0, "disk": 0}, "it drops what is REMOTE"
