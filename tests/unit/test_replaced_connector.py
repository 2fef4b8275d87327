"""vLLM's option that puts its own connector in place of ours: the log names it."""

import pytest

pytest.importorskip("vllm")

from vllm.config import CacheConfig, KVTransferConfig, VllmConfig

from vllm_kvtier import plugin
from vllm_kvtier.vllm_compat.hooks import mm_embeddings, replaced_connector
from vllm_kvtier.vllm_compat.probe import features

METHOD = "_post_init_kv_transfer_config"


@pytest.fixture
def warnings(monkeypatch):
    """Of a process whose plugins are loaded, twice; the hook goes with the test."""
    monkeypatch.setattr(mm_embeddings, "install", lambda: None)
    lines = []
    monkeypatch.setattr(replaced_connector.logger, "warning", lambda text, *values: lines.append(text % values))
    monkeypatch.setattr(VllmConfig, METHOD, getattr(VllmConfig, METHOD))
    plugin.register()
    plugin.register()
    return lines


OURS = {"kv_connector": "KVTierConnector", "kv_role": "kv_both"}
MULTI = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": [OURS]}}
THEIRS = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    "transfer, size, warned",
    [(OURS, 1, True), (MULTI, 1, True), (OURS, None, False), (THEIRS, 1, False), (None, 1, False)],
)
def test_replaced_connector_is_named(warnings, transfer, size, warned):
    transfer = None if transfer is None else KVTransferConfig(**transfer)
    made = VllmConfig(cache_config=CacheConfig(kv_offloading_size=size), kv_transfer_config=transfer)
    kept = made.kv_transfer_config
    assert (kept.kv_connector == "OffloadingConnector") is (size is not None), "vLLM's choice stays"
    assert len(warnings) == warned
    assert all("--kv-offloading-size" in line and "OffloadingConnector" in line for line in warnings)


def test_replaced_connector_hook_leaves_other_vllms_alone(monkeypatch):
    monkeypatch.setattr(features, "refused", lambda feature: "it differs")
    monkeypatch.setattr(VllmConfig, METHOD, theirs := lambda config: None)
    replaced_connector.install()
    assert getattr(VllmConfig, METHOD) is theirs
