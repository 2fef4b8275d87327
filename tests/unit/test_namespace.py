"""What two engines must have in common to share KV, as read from vLLM's configuration."""

import itertools
import threading
from types import SimpleNamespace

import pytest
import torch
from tier_fakes import NAMESPACE, described
from vllm.config.lora import LoRAConfig

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.scheduler.slots import plan_slots
from vllm_kvtier.vllm_compat import namespace as ns
from vllm_kvtier.wire import messages as m


def of(lora=None, **cache):
    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="fp8", prefix_caching_hash_algo="sha256", **cache),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        lora_config=lora,
    )
    return ns.namespace(config, 16, "model")


@pytest.fixture(autouse=True)
def seed(monkeypatch):
    monkeypatch.setattr(ns.kv_cache_utils, "NONE_HASH", b"seed", raising=False)


def test_engines_of_equal_configuration_share():
    assert of() == of() == of(calculate_kv_scales=False)


def test_scales_made_from_an_engine_s_first_batch_are_its_own():
    """The same bytes stand for other numbers in the next engine, and no checksum would tell."""
    assert of(calculate_kv_scales=True).mismatch(of(calculate_kv_scales=True))


def test_adapters_that_are_applied_otherwise_are_not_shared():
    """The same files make other KV."""
    usual = LoRAConfig(lora_dtype=torch.bfloat16)
    assert of() == of(usual) == of(LoRAConfig(lora_dtype=torch.bfloat16, max_loras=7, max_lora_rank=64))
    some, others = ["q_proj", "v_proj"], [f"layer{i}.q_proj" for i in range(99)]
    found = [usual, LoRAConfig(lora_dtype=torch.float16), LoRAConfig(lora_dtype=torch.bfloat16, target_modules=some)]
    found += [LoRAConfig(lora_dtype=torch.bfloat16, target_modules=others[i:]) for i in range(2)]
    for a, b in itertools.combinations(found, 2):
        assert "LoRA adapters" in of(a).mismatch(of(b))
    assert of(found[2]) == of(LoRAConfig(lora_dtype=torch.bfloat16, target_modules=some[::-1]))
    assert len(m.encode(of(found[3]))) < 512


# -- the weights -------------------------------------------------------------------------------------------------------


def model(folder, load_format: str = "auto", seed: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(folder), revision=None, quantization=None, seed=seed, hf_config=SimpleNamespace(to_dict=dict)
        ),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(10_000))
    return tmp_path / "model"


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "fastsafetensors", "runai_streamer", "sharded_state"])
def test_model_fingerprint_weights_of_files_are_known_by_them(folder, load_format):
    before = ns.model_fingerprint(model(folder, load_format))
    assert before == ns.model_fingerprint(model(folder, load_format))
    (folder / "model.safetensors").write_bytes(b"1" * 10_000)
    assert ns.model_fingerprint(model(folder, load_format)) != before
    assert ns.model_fingerprint(model(folder / "model.safetensors")) == ns.model_fingerprint(model(folder)), "one file"


@pytest.mark.parametrize("load_format, loaded", [("pt", "a.bin"), ("npcache", "a.bin"), ("gguf", "a.gguf")])
def test_model_fingerprint_goes_by_the_files_that_are_loaded(folder, load_format, loaded):
    """Beside safetensors that are not."""
    (folder / loaded).write_bytes(bytes(10_000))
    found = [ns.model_fingerprint(model(folder, form)) for form in (load_format, "auto")]
    (folder / loaded).write_bytes(b"1" * 10_000)
    assert ns.model_fingerprint(model(folder, load_format)) != found[0]
    assert ns.model_fingerprint(model(folder)) == found[1]


@pytest.mark.parametrize("load_format", ["dummy", "tensorizer", "ipc_cache", "modelexpress", "a plugin's"])
def test_model_fingerprint_weights_from_elsewhere_are_like_no_others(folder, load_format, caplog):
    """Dummy weights counted by their seed, so that KV of a model whose weights were pushed served another's."""
    found = {ns.model_fingerprint(model(folder, load_format)) for _ in range(3)}
    assert len(found) == 3 and "model_fingerprint" in caplog.text and load_format in caplog.text
    assert ns.ModelFingerprint(model(folder, load_format), "mine").get(0.0) == "mine"


def test_model_fingerprint_of_weights_that_cannot_be_read_is_like_no_other(tmp_path, folder, monkeypatch, caplog):
    """By name and revision alone, "main" of a hub was the same for ever."""
    for absent in (tmp_path / "absent", "org/not-on-this-machine"):
        assert ns.model_fingerprint(model(absent)) != ns.model_fingerprint(model(absent))

    def unreadable(files):
        raise OSError("input/output error")

    monkeypatch.setattr(ns, "file_digests", unreadable)
    assert ns.model_fingerprint(model(folder)) != ns.model_fingerprint(model(folder))
    assert "input/output error" in caplog.text


def test_model_fingerprint_is_made_beside_the_engine_s_thread(folder, monkeypatch):
    may_read, ready = threading.Event(), threading.Event()
    digests = ns.file_digests
    monkeypatch.setattr(ns, "file_digests", lambda files: may_read.wait(60) and digests(files))
    made = ns.ModelFingerprint(model(folder), None, ready.set)
    assert made.get(0.0) is None and not ready.is_set()
    may_read.set()
    assert ready.wait(60) and len(made.get(0.0)) == 32


def test_model_fingerprint_a_fault_makes_it_like_no_other(folder, monkeypatch, caplog):
    monkeypatch.setattr(ns, "model_fingerprint", lambda config: 1 / 0)
    made = [ns.ModelFingerprint(model(folder), None).get(60.0) for _ in range(2)]
    assert None not in made and made[0] != made[1] and "ZeroDivisionError" in caplog.text


def test_plan_slots_another_release_of_vllm_has_spaces_of_its_own():
    """The next release may compute otherwise, and what is stored outlives engines. Pulls do not go by it."""
    groups = [(16, None)]
    bases = {
        plan_slots(NAMESPACE, {0: described(0, groups, [0])}, "raw", groups, 16, release).base
        for release in ("0.32.0", "0.32.0", "0.33.0")
    }
    assert len(bases) == 2


def test_engine_with_dummy_weights_tells_the_connector_their_name(tmp_path):
    def extra(kv, *args):
        engine = Engine("shapes", kv=kv, args=args, log_dir=tmp_path)
        return engine.kv and engine.kv.get("kv_connector_extra_config")

    dummy = ("--load-format", "dummy")
    assert extra(kvtier({"store": "off"}), *dummy) == {"store": "off", "model_fingerprint": "dummy weights of shapes"}
    assert extra(kvtier({"model_fingerprint": "mine"}), *dummy) == {"model_fingerprint": "mine"}
    assert extra(kvtier()) == {} and extra({"kv_connector": "NixlConnector"}, *dummy) is None
    assert extra(None, *dummy) is None
