"""Media without their embedding tensors: refused with our connector, and otherwise as vLLM decides."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.config import ECTransferConfig, KVTransferConfig, VllmConfig
from vllm.config.multimodal import MultiModalConfig

from vllm_kvtier.vllm_compat.hooks import mm_embeddings
from vllm_kvtier.vllm_compat.hooks.mm_embeddings import METHODS
from vllm_kvtier.vllm_compat.probe import features

METHOD = next((name for name in METHODS if hasattr(VllmConfig, name)), None)
pytestmark = pytest.mark.skipif(METHOD is None, reason="this vLLM always needs the tensors")

OURS = {"kv_connector": "KVTierConnector", "kv_role": "kv_both"}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def multi(*children: dict) -> dict:
    extra = {"connectors": list(children)}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.fixture(autouse=True)
def hooked(monkeypatch):
    """As in a process whose plugins are loaded, twice; the hook goes with the test."""
    monkeypatch.setattr(VllmConfig, METHOD, getattr(VllmConfig, METHOD))
    mm_embeddings.install()
    mm_embeddings.install()


def resolved(transfer: dict, encoder: ECTransferConfig | None = None, **options: bool) -> SimpleNamespace:
    """What vLLM reads of a configuration, after it resolved it. The flags are in ``model_config.multimodal_config``."""
    model = SimpleNamespace(multimodal_config=MultiModalConfig(**options))
    kept = KVTransferConfig(**transfer)
    config = SimpleNamespace(model_config=model, ec_transfer_config=encoder, kv_transfer_config=kept)
    getattr(VllmConfig, METHOD)(config)
    assert config.kv_transfer_config is kept
    return config


def flags(config: SimpleNamespace) -> tuple[bool, bool]:
    media = config.model_config.multimodal_config
    return media.enable_mm_embeds, media.allow_missing_mm_embeddings


@pytest.mark.parametrize("transfer", [OURS, OURS | {"kv_role": "kv_consumer"}, multi(NIXL, OURS), multi(multi(OURS))])
@pytest.mark.parametrize("enabled", [False, True])
def test_mm_embeddings_stay_as_the_user_set_them(transfer, enabled):
    assert flags(resolved(transfer, enable_mm_embeds=enabled)) == (enabled, False)


def test_mm_embeddings_of_an_encoder_cache_may_be_omitted():
    encoder = ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_consumer")
    assert flags(resolved(OURS, encoder, enable_mm_embeds=True)) == (True, True)


@pytest.mark.parametrize("transfer", [NIXL, multi(NIXL), NIXL | {"kv_connector_extra_config": {"connectors": "other"}}])
def test_mm_embeddings_with_other_connectors_are_vllms_to_decide(transfer):
    assert flags(resolved(transfer, enable_mm_embeds=True)) == (True, True)


@pytest.fixture
def warned(monkeypatch):
    lines = []
    monkeypatch.setattr(mm_embeddings.logger, "warning", lambda text, *values: lines.append(text % values))

    def warned(config: SimpleNamespace) -> bool:
        lines.clear()
        mm_embeddings.warn(config)
        assert all("VLLM_PLUGINS" in line for line in lines)
        return len(lines) == 1

    return warned


def test_engine_that_takes_media_without_embeddings_warns(warned):
    assert not warned(resolved(OURS))
    assert not warned(SimpleNamespace(model_config=SimpleNamespace(multimodal_config=None), ec_transfer_config=None))
    assert warned(resolved(NIXL))  # as with our connector where the hook was not installed
    assert not warned(resolved(OURS, ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_both")))


def test_unknown_vllm_is_left_alone(monkeypatch):
    monkeypatch.setattr(features, "refused", lambda feature: "it differs")
    monkeypatch.setattr(VllmConfig, METHOD, theirs := lambda config: None)
    mm_embeddings.install()
    assert getattr(VllmConfig, METHOD) is theirs


MAKE = """
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
transfer = KVTransferConfig(kv_connector="KVTierConnector", kv_role="kv_both")
made = EngineArgs(model={model!r}, skip_tokenizer_init=True, kv_transfer_config=transfer).create_engine_config()
media = made.model_config.multimodal_config
print("flags", media.enable_mm_embeds, media.allow_missing_mm_embeddings)
"""


def test_engine_arguments_make_a_configuration_that_needs_the_tensors(tmp_path):
    """Nothing but vLLM's own plugin loader installs the hook here, before the configuration is made."""
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64}
    text = {**shape, "model_type": "gemma", "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 256}
    vision = {**shape, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}
    # Of those whose code is imported without torchvision.
    model = {"architectures": ["PaliGemmaForConditionalGeneration"], "model_type": "paligemma"}
    model |= {"text_config": text, "vision_config": vision, "image_token_index": 255, "projection_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps({**model, "dtype": "float32"}))
    code = MAKE.format(model=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert "flags False False" in done.stdout, done.stdout + done.stderr
