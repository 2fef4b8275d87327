"""What two engines must have in common to share KV, as read from vLLM's configuration."""

import dataclasses
import enum
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from types import SimpleNamespace

import pytest
import torch
from cache_groups import cache_groups
from engine_configs import at_defaults, engine_config
from tier_fakes import NAMESPACE, described
from vllm.config import CacheConfig, LoadConfig, ModelConfig, VllmConfig
from vllm.config.attention import AttentionConfig
from vllm.config.kernel import KernelConfig
from vllm.config.lora import LoRAConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.config.quantization import QuantizationConfigArgs
from vllm.envs import environment_variables
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

from vllm_kvtier import fingerprint
from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.fingerprint import model_folder, of_files
from vllm_kvtier.scheduler.context import BlockGeometry
from vllm_kvtier.scheduler.sources.slot_layout import plan_slots
from vllm_kvtier.vllm_compat import namespace as ns
from vllm_kvtier.vllm_compat import options
from vllm_kvtier.wire import messages as m


def of(hf=None, **options):
    options["cache"] = {"cache_dtype": "fp8"} | options.get("cache", {})
    return ns.namespace(engine_config(hf, **options), 16, "model")


@pytest.fixture(autouse=True)
def seed(monkeypatch):
    monkeypatch.setattr(ns.kv_cache_utils, "NONE_HASH", b"seed", raising=False)


def test_namespace_of_equal_configuration_is_equal():
    assert of() == of()


def test_calibrated_scales_make_namespace_private():
    """The same bytes stand for other numbers in the next engine, and no checksum would tell."""
    config = engine_config()
    config.cache_config.calculate_kv_scales = True
    assert ns.namespace(config, 16, "model").mismatch(ns.namespace(config, 16, "model"))


def test_namespace_of_latents_does_not_depend_on_the_number_of_ranks():
    """DeepSeek V4 has "auto" in the scheduler's configuration, and "fp8_ds_mla" if its layers are in that process."""
    names = "auto", "fp8", "fp8_ds_mla", "fp8_e5m2"
    assert len({of(cache={"cache_dtype": name}) for name in names}) == 4
    assert len({of(cache={"cache_dtype": name}, mla=True) for name in names}) == 2, "pages may not tell e5m2"


def test_namespace_has_one_name_of_fp8():
    """vLLM makes "fp8_e4m3" of "auto" for checkpoints of ModelOpt."""
    names = "fp8", "fp8_e4m3", "fp8_e5m2"
    assert of(cache={"cache_dtype": names[0]}) == of(cache={"cache_dtype": names[1]})
    assert of(cache={"cache_dtype": names[1]}).mismatch(of(cache={"cache_dtype": names[2]}))


def test_namespace_of_per_token_head_cache_has_another_version():
    """Stores may hold blocks of engines in which vLLM had overwritten the scales of what they loaded."""
    for name in ("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"):
        assert of(cache={"cache_dtype": name}).cache_dtype.startswith(f"{name}.2/")


def test_namespace_of_checkpoint_with_quantized_kv_does_not_depend_on_the_number_of_ranks():
    """vLLM's layers write "fp8" into the configuration in place of "auto"."""
    found = []
    for name, scheme in itertools.product(("auto", "fp8", "fp8_e5m2"), (None, {"type": "float", "num_bits": 8})):
        config = engine_config(cache={"cache_dtype": name})
        config.quant_config = CompressedTensorsConfig({}, [], "dense", kv_cache_scheme=scheme)
        found.append(ns.namespace(config, 16, "model").cache_dtype)
    assert found[1] == found[3] and len(set(found)) == 4


def test_namespace_depends_on_lora_settings():
    """The same files make other KV."""
    usual = LoRAConfig(lora_dtype=torch.bfloat16)
    assert of() == of(lora=usual) == of(lora=LoRAConfig(lora_dtype=torch.bfloat16, max_loras=7, max_lora_rank=64))
    some, others = ["q_proj", "v_proj"], [f"layer{i}.q_proj" for i in range(99)]
    found = [usual, LoRAConfig(lora_dtype=torch.float16), LoRAConfig(lora_dtype=torch.bfloat16, target_modules=some)]
    found += [LoRAConfig(lora_dtype=torch.bfloat16, target_modules=others[i:]) for i in range(2)]
    for a, b in itertools.combinations(found, 2):
        assert "LoRA adapters" in of(lora=a).mismatch(of(lora=b))
    assert of(lora=found[2]) == of(lora=LoRAConfig(lora_dtype=torch.bfloat16, target_modules=some[::-1]))
    assert len(m.encode(of(lora=found[3]))) < 512


# -- the engine's options ----------------------------------------------------------------------------------------------

CLASSES = (VllmConfig, ModelConfig, MultiModalConfig, CacheConfig, LoadConfig, AttentionConfig, LoRAConfig)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_options_table_has_every_vllm_field(cls):
    """A new release's fields: do they change what a token's K and V are? List them in ``options.TABLE``."""
    counted, other = (set(text.split()) for text in options.TABLE[cls.__name__])
    assert not {field.name for field in dataclasses.fields(cls)} - counted - other
    assert not counted & other


def test_variables_of_the_next_vllm_count_until_they_are_listed(monkeypatch):
    """A new release's variables: do they change what a token's K and V are? List them in ``options``."""
    read = {name.removeprefix("VLLM_") for name in environment_variables if name.startswith("VLLM_")}
    assert read <= options.OTHER_VARIABLES | {name.removeprefix("VLLM_") for name in options.VARIABLES}
    plain = options.engine_options(engine_config())
    for name, counts in (("VLLM_FLASHINFER_NEW_FP4", True), ("VLLM_LOGGING_LEVEL", False), ("VLLM_FOO_PORT", False)):
        monkeypatch.setenv(name, "1")
        if counts:
            monkeypatch.setitem(environment_variables, name, lambda: None)
        assert (options.engine_options(engine_config()) != plain) == counts, name
        monkeypatch.delenv(name)


def test_options_table_classes_are_those_of_vllm():
    assert {cls.__name__ for cls in CLASSES} == set(options.TABLE)


def quantized(**args):
    return {"quantization": "online", "quantization_config": QuantizationConfigArgs(**args)}


def multimodal(**fields):
    return {"multimodal_config": at_defaults(MultiModalConfig, **fields)}


DIFFERENT = {
    "quantization": [{}, {"quantization": "fp8"}, {"quantization": "awq"}],
    "quantization_config": [
        quantized(linear="fp8_per_tensor"), quantized(linear="fp8_per_block"),
        quantized(linear="fp8_per_tensor", ignore=["re:.*layers.0.*"]),
        {"quantization": "online", "quantization_config": {"linear": "fp8_per_tensor"}},
    ],
    "hf_overrides.architectures": [{}, {"hf_overrides": {"architectures": ["Other"]}}],
    "kv_cache_dtype_skip_layers": [{}, {"cache": {"kv_cache_dtype_skip_layers": ["0"]}}],
    "model_loader_extra_config.pattern": [{}, {"load": {"model_loader_extra_config": {"pattern": "b-{rank}"}}}],
    "use_non_causal": [{}, {"attention": {"use_non_causal": True}}],
    "additional_config.kv": [{}, {"additional": {"kv": {"bits": 4}}}],
    "mm_processor_kwargs.max_pixels": [
        multimodal(), multimodal(mm_processor_kwargs={"max_pixels": 1000}),
        multimodal(mm_processor_kwargs={"max_pixels": 2000}),
    ],
    "media_io_kwargs.video": [multimodal(), multimodal(media_io_kwargs={"video": {"num_frames": 40}})],
    "video_pruning_rate": [multimodal(), multimodal(video_pruning_rate=0.5)],
    "mm_encoder_attn_dtype": [multimodal(), multimodal(mm_encoder_attn_dtype="fp8")],
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_options_that_change_kv_make_namespaces_differ(name):
    for a, b in itertools.combinations(DIFFERENT[name], 2):
        assert of(**a) == of(**a)
        refusal = of(**a).mismatch(of(**b))
        assert "engine option" in refusal and f"{name}=" in refusal and len(refusal) < 512


def test_options_that_keep_kv_keep_namespaces_equal():
    cache = {"block_size": 32, "gpu_memory_utilization": 0.5, "enable_prefix_caching": False, "num_gpu_blocks": 99}
    loading = {"concurrency": 16, "enable_multithread_load": True}
    assert of(cache=cache, load={"model_loader_extra_config": loading}, max_model_len=99, seed=7,
              served_model_name="other", tokenizer_mode="slow", enforce_eager=True,
              additional={"gdn_prefill_backend": "triton"}) == of()  # fmt: skip
    media = multimodal(
        allow_missing_mm_embeddings=True, mm_encoder_only=True, mm_processor_kwargs={"device": "cuda"},
        mm_processor_cache_gb=9,
    )  # fmt: skip
    assert of(**media) == of(**multimodal()) == of(), "the prefill's and the decode's engine of one fleet"


def test_options_unknown_count_if_not_default(monkeypatch):
    """Those of the next release."""

    @dataclasses.dataclass
    class Later(CacheConfig):
        rounding: str = "nearest"

    monkeypatch.setitem(options.TABLE, "Later", options.TABLE["CacheConfig"])
    monkeypatch.setitem(options._OTHER, "Later", options._OTHER["CacheConfig"])

    def later(**fields):
        config = engine_config()
        config.cache_config = at_defaults(Later, **fields)
        return options.engine_options(config)

    assert later() == "" and later(rounding="up") == "rounding=up"


@pytest.mark.parametrize(
    "name, given",
    [
        ("mm_encoder_fp8_scale_path", lambda path: multimodal(mm_encoder_fp8_scale_path=path)),
        ("quantization_config_file", lambda path: {"hf_overrides": {"quantization_config_file": path}}),  # of TorchAO
    ],
)
def test_options_file_path_counts_by_content(tmp_path, name, given):
    paths = [tmp_path / name for name in "abc"]
    for path, scale in zip(paths, (1, 1, 2), strict=True):
        path.write_text(json.dumps({"layer.0": {"q": scale}}))
    a, copy, other = (of(**given(str(path))) for path in paths)
    assert a == copy and name in a.mismatch(other)
    absent = given(str(tmp_path / "absent"))
    assert of(**absent).mismatch(of(**absent))


LONG = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [4.0]}


@pytest.mark.parametrize(
    "hf",
    [
        {"rope_parameters": LONG | {"original_max_position_embeddings": 4096}},
        {"text_config": {"rope_scaling": LONG, "original_max_position_embeddings": 4096}},
        {"original_max_position_embeddings": 4096, "rope_parameters": {"full_attention": LONG}},
        {"original_max_position_embeddings": 4096, "rope_scaling": {"type": "su"}},
    ],
)
def test_options_max_model_len_selects_longrope_factors(hf):
    short, also, long, longer = (of(hf, max_model_len=length) for length in (256, 4096, 4097, 8192))
    assert short == also and long == longer and "max_model_len>4096" in short.mismatch(long)


def test_options_longrope_without_length_counts_max_model_len():
    assert of({"rope_scaling": LONG}, max_model_len=1).mismatch(of({"rope_scaling": LONG}, max_model_len=2))


def test_options_max_model_len_sets_llama4_temperature_tuning(monkeypatch):
    said = {}
    monkeypatch.setattr(ModelConfig, "try_get_generation_config", lambda self: said)
    hf = {"text_config": {"model_type": "llama4_text"}}
    short, long = of(hf, max_model_len=32768), of(hf, max_model_len=32769)
    assert "attn_temperature_tuning" in short.mismatch(long)
    assert of(hf, override_generation_config={"attn_temperature_tuning": True}) == long
    said["attn_temperature_tuning"] = False
    assert of(hf, max_model_len=32769) == short


@pytest.mark.parametrize(
    "hf",
    [
        {"rope_parameters": LONG | {"original_max_position_embeddings": 4096}},
        {"text_config": {"model_type": "llama4_text"}},
    ],
)
def test_options_auto_fitted_max_model_len_does_not_count(hf, monkeypatch):
    """vLLM has built it for the longest that it knows by then."""
    monkeypatch.setattr(ModelConfig, "try_get_generation_config", lambda self: {})
    fitted, more = (of(hf, max_model_len=length, asked_length=-1) for length in (4096, 40_000))
    assert fitted == more
    for length in (4096, 40_000):
        assert fitted.mismatch(of(hf, max_model_len=length))


def test_options_max_model_len_counts_for_some_multimodal_models():
    hf = {"architectures": ["NemotronH_Nano_VL_V2"]}
    assert "max_model_len=256" in of(hf, **multimodal()).mismatch(of(hf, max_model_len=99, **multimodal()))
    assert of(hf) == of(hf, max_model_len=99), "as text alone"


def test_options_quantizing_environment_variable_counts(monkeypatch):
    before = of()
    rocm = ("VLLM_ROCM_USE_AITER", "1"), ("VLLM_ROCM_USE_AITER_MOE_SITUV2", "a16w4")
    rocm += (("VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS", "1"),)  # into MXFP4
    weights = ("VLLM_MARLIN_INPUT_DTYPE", "int8"), ("VLLM_MOE_USE_DEEP_GEMM", "0")
    precise = ("VLLM_FLOAT32_MATMUL_PRECISION", "medium"), ("VLLM_BATCH_INVARIANT", "1")
    precise += ("VLLM_HUMMING_USE_F16_ACCUM", "1"), ("FLA_TRIL_PRECISION", "tf32")
    for name, value in (*weights, *precise, *rocm):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert f"{name}={value}" in before.mismatch(of())


def test_options_quantization_by_environment_counts_with_its_file(monkeypatch, tmp_path):
    file, found = tmp_path / "humming.json", {of()}
    for given in ('{"b_dtype": "int4"}', '{"b_dtype": "int8"}'):
        monkeypatch.setenv("VLLM_HUMMING_ONLINE_QUANT_CONFIG", given)
        found.add(of())
        file.write_text(given)
        monkeypatch.setenv("VLLM_HUMMING_ONLINE_QUANT_CONFIG", str(file))
        found.add(of())
    assert len(found) == 5


def test_options_kernel_that_quantizes_otherwise_counts():
    """Marlin leaves activations in 16 bits, whatever the checkpoint says of them."""

    def kernels(**chosen):
        config = engine_config()
        config.kernel_config = at_defaults(KernelConfig, **chosen)
        return ns.namespace(config, 16, "model")

    assert kernels() == kernels(moe_backend="triton", linear_backend="cutlass"), "prefill's and decode's may differ"
    others = {"moe_backend": "marlin", "linear_backend": "marlin", "linear_backend_per_quant": {"nvfp4": "marlin"}}
    for name in others.keys() & KernelConfig.__dataclass_fields__.keys():
        assert "=marlin" in kernels().mismatch(kernels(**{name: others[name]}))
    assert "=triton_unfused" in kernels().mismatch(kernels(moe_backend="triton_unfused")), "as in DeepSeek V4"


def test_options_default_of_environment_variable_does_not_count(monkeypatch):
    """vLLM sets it for checkpoints that ask for it."""
    before = of()
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "1")
    assert of() == before
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "0")
    assert "VLLM_USE_DEEP_GEMM_E8M0=0" in before.mismatch(of())


def test_option_text_is_short_and_names_values():
    many = {f"option_{i}": "x" * i for i in range(60)}
    words = {options.format_options(many | {"option_59": last}) for last in ("a", "b")}
    assert len(words) == 2 and all(len(each) <= options.MAX_LETTERS and "option_0, " in each for each in words)


class Colour(enum.IntEnum):
    RED = 1


def test_options_canonical_form_is_process_independent():
    assert options.canonical({"b": {2, 1}, "a": [torch.float8_e4m3fn, Colour.RED, None]}) == {
        "b": [1, 2], "a": ["float8_e4m3fn", "RED", None]
    }  # fmt: skip
    assert options.canonical(json.loads) == "json.loads"
    args = QuantizationConfigArgs(linear="fp8_per_block")
    text = json.dumps(options.canonical(args))
    assert " at 0x" not in text and "float8_e4m3fn" in text
    for like_no_other in (object(), lambda: 1, torch.ones(2), uuid.uuid4()):
        assert options.canonical(like_no_other) != options.canonical(like_no_other)


# -- the weights -------------------------------------------------------------------------------------------------------


def model(folder, load_format: str = "auto", **more):
    return engine_config(model=str(folder), load={"load_format": load_format}, **more)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(10_000))
    monkeypatch.setattr(ns, "process_start", lambda: 1 << 62)  # vLLM loads weights when the test has written them
    return tmp_path / "model"


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "fastsafetensors", "runai_streamer", "sharded_state"])
def test_model_fingerprint_depends_on_weight_files(folder, load_format):
    before = ns.model_fingerprint(model(folder, load_format))
    assert before == ns.model_fingerprint(model(folder, load_format))
    (folder / "model.safetensors").write_bytes(b"1" * 10_000)
    assert ns.model_fingerprint(model(folder, load_format)) != before
    assert ns.model_fingerprint(model(folder / "model.safetensors")) == ns.model_fingerprint(model(folder)), "one file"


def test_model_fingerprint_ignores_what_a_model_adds_to_its_configuration(folder):
    """As MiniMax M2 and Gemma 3 do, in the scheduler's process if there is one rank and no data parallelism."""
    hf, built = {"layers": 2}, {"layers": 2, "max_model_len": 512}
    elsewhere = dict(hf_config_path=str(folder.parent / "other"))
    assert ns.model_fingerprint(model(folder, hf=hf)) != ns.model_fingerprint(model(folder, hf=built)), "without a file"
    (folder / "config.json").write_text('{"layers": 2, "transformers_version": "5.0"}')
    one, several = ns.model_fingerprint(model(folder, hf=built)), ns.model_fingerprint(model(folder, hf=hf))
    others = [ns.model_fingerprint(model(folder, hf=each, **elsewhere)) for each in (hf, {"layers": 3})]
    assert one == several and others[0] != others[1], "vLLM read another file, which is not here"
    quantized = ns.model_fingerprint(model(folder, hf={"quantization_config": {"bits": 4}}))
    (folder / "config.json").write_text('{"layers": 3}')
    assert len({one, quantized, ns.model_fingerprint(model(folder, hf=hf))}) == 3


def test_model_fingerprint_depends_on_what_a_function_overrides(folder):
    """The namespace has its name only, and the store outlives the engine whose script is edited."""
    (folder / "config.json").write_text('{"layers": 2}')
    edited = [model(folder, hf={"layers": 2, "factor": each}, hf_overrides=json.loads) for each in (2.0, 4.0)]
    assert len({ns.model_fingerprint(each) for each in edited}) == 2


def test_model_fingerprint_is_that_of_weights_loaded_to_another_directory(folder, tmp_path, monkeypatch):
    """Its hub's cache has the configuration, that directory the weights."""
    hub = tmp_path / "hub"
    shutil.copytree(folder, hub)
    (hub / "config.json").write_text('{"layers": 2}')
    monkeypatch.setattr(ns, "model_folder", lambda name, revision=None, download=None: folder if download else hub)
    monkeypatch.setattr(ns, "changed_since", lambda *_: False)
    usual = ns.model_fingerprint(model("org/model", hf={"layers": 2}))
    load = {"download_dir": "elsewhere", "load_format": "auto"}
    assert ns.model_fingerprint(engine_config({"layers": 2, "more": 1}, model="org/model", load=load)) == usual
    by_path = model(folder, hf={"layers": 2, "more": 1}, hf_config_path="org/model")
    assert ns.model_fingerprint(by_path) == usual


def test_model_fingerprint_of_mistral_folder_is_that_of_what_vllm_loads(folder):
    """A hub's copy may have the weights in both formats; vLLM downloads, and with "auto" loads, Mistral's alone."""
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    (folder / "params.json").write_text('{"dim": 8}')
    built = {"rope_parameters": {"rope_type": "deepseek_yarn"}}  # in this process with one rank only
    hf = {"rope_parameters": {"rope_type": "yarn"}}
    alone = {ns.model_fingerprint(model(folder, hf=each)) for each in (hf, built)}
    (folder / "model-00001.safetensors").write_bytes(bytes(5000))
    whole = {ns.model_fingerprint(model(folder, form, hf=built)) for form in ("auto", "mistral")}
    assert len(alone) == 1 and alone == whole
    assert ns.model_fingerprint(model(folder, "safetensors", hf=hf)) not in whole, "it loads both"
    assert ns.model_fingerprint(model(folder, hf=hf, config_format="mistral")) in whole
    (folder / "config.json").write_text("{}")
    assert ns.model_fingerprint(model(folder, hf=hf, config_format="hf")) != ns.model_fingerprint(model(folder, hf=hf))
    before = ns.model_fingerprint(model(folder, hf=hf))
    (folder / "params.json").write_text('{"dim": 9}')
    changed = ns.model_fingerprint(model(folder, hf=hf))
    (folder / "consolidated.safetensors").write_bytes(b"1" * 10_000)
    assert len({before, changed, ns.model_fingerprint(model(folder, hf=hf))}) == 3


@pytest.mark.parametrize("load_format, loaded", [("pt", "a.bin"), ("npcache", "a.bin"), ("gguf", "a.gguf")])
def test_model_fingerprint_uses_files_of_load_format(folder, load_format, loaded):
    """Beside safetensors that are not."""
    (folder / loaded).write_bytes(bytes(10_000))
    found = [ns.model_fingerprint(model(folder, form)) for form in (load_format, "auto")]
    (folder / loaded).write_bytes(b"1" * 10_000)
    assert ns.model_fingerprint(model(folder, load_format)) != found[0]
    assert ns.model_fingerprint(model(folder)) == found[1]


def test_model_fingerprint_depends_on_weights_in_folders_of_its_folder(tmp_path, folder, monkeypatch):
    """As of Cosmos 3, whose KV was not shared; also by a hub's name, whose revision may have moved."""
    snapshot = tmp_path / "models--org--model" / "snapshots" / ("1" * 40)
    (snapshot / "transformer").mkdir(parents=True)
    (folder / "model.safetensors").rename(snapshot / "transformer" / "model.safetensors")
    (ref := snapshot.parents[1] / "refs" / "main").parent.mkdir()
    ref.write_text("1" * 40)
    monkeypatch.setattr(ns, "model_folder", lambda *_: snapshot)
    hub = model("org/model")
    before = ns.model_fingerprint(hub)
    assert before == ns.model_fingerprint(model(snapshot))
    (snapshot / "transformer" / "model.safetensors").write_bytes(b"1" * 10_000)
    assert ns.model_fingerprint(hub) == ns.model_fingerprint(hub) != before
    starts_now(monkeypatch)
    ref.write_text("2" * 40)
    assert ns.model_fingerprint(hub) != ns.model_fingerprint(hub)


@pytest.mark.parametrize("load_format", ["dummy", "tensorizer", "ipc_cache", "modelexpress", "a plugin's"])
def test_model_fingerprint_of_dummy_weights_is_unique(folder, load_format, caplog):
    """Dummy weights counted by their seed, so that KV of a model whose weights were pushed served another's."""
    found = {ns.model_fingerprint(model(folder, load_format)) for _ in range(3)}
    assert len(found) == 3 and "model_fingerprint" in caplog.text and load_format in caplog.text
    assert ns.ModelFingerprint(model(folder, load_format), "mine").get(60.0) == "mine"


def test_model_fingerprint_of_unreadable_weights_is_unique(tmp_path, folder, monkeypatch, caplog):
    """By name and revision alone, "main" of a hub was the same for ever."""
    for absent in (tmp_path / "absent", "org/not-on-this-machine"):
        assert ns.model_fingerprint(model(absent)) != ns.model_fingerprint(model(absent))

    def unreadable(files):
        raise OSError("input/output error")

    monkeypatch.setattr(ns, "file_digests", unreadable)
    assert ns.model_fingerprint(model(folder)) != ns.model_fingerprint(model(folder))
    assert "input/output error" in caplog.text


def test_model_fingerprint_depends_on_processor_config_of_multimodal_models(folder):
    """The same picture becomes other numbers, under the same block hashes."""
    media = multimodal()
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json", "tekken.json"):
        text, before = ns.model_fingerprint(model(folder)), ns.model_fingerprint(model(folder, **media))
        (folder / name).write_text('{"max_pixels": 1000}')
        first = ns.model_fingerprint(model(folder, **media))
        (folder / name).write_text('{"max_pixels": 2000}')
        assert len({before, first, ns.model_fingerprint(model(folder, **media))}) == 3, name
        assert ns.model_fingerprint(model(folder)) == text, "a model of text alone does not read it"


def test_model_fingerprint_depends_on_models_that_are_parts_of_it(folder, tmp_path):
    """Ultravox has only an adapter of its own; what its language model is, a name says."""
    text = tmp_path / "text"
    text.mkdir()
    (folder / "config.json").write_text(json.dumps({"text_model_id": str(text)}))

    def fingerprint():
        config = model(folder)
        config.model_config.hf_config.text_model_id = str(text)
        return ns.model_fingerprint(config)

    assert fingerprint() != fingerprint(), "its weights are not there"
    found = set()
    for content in (bytes(1000), b"1" * 1000):
        (text / "model.safetensors").write_bytes(content)
        found.add(fingerprint())
        assert fingerprint() in found
    (text / "config.json").write_text("{}")
    assert len({*found, fingerprint()}) == 3


@pytest.mark.parametrize("name", ["whisper-large-v3", "audio_tokenizer"])
def test_model_fingerprint_depends_on_encoder_in_folder_of_its_folder(folder, name):
    media, found = multimodal(), set()
    (folder / name).mkdir()
    for file, content in (("x", ""), ("model.safetensors", "1"), ("model.safetensors", "2"),
                          ("config.json", "{}"), ("preprocessor_config.json", "{}")):  # fmt: skip
        (folder / name / file).write_text(content * 1000)
        found.add(ns.model_fingerprint(model(folder, **media)))
        assert ns.model_fingerprint(model(folder, **media)) in found
    assert len(found) == 5


@pytest.mark.parametrize("method", ["eagle", "draft_model", "mtp", "ngram", "own layers"])
def test_model_fingerprint_depends_on_drafts_that_keep_kv(folder, tmp_path, method):
    """Their KV is stored with the target's: another draft's would be accepted less often."""
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text("{}")
    (draft / "model.safetensors").write_bytes(bytes(1000))

    def fingerprint():
        config = model(folder)
        of = config.model_config if method == "own layers" else SimpleNamespace(model=str(draft), revision=None)
        config.speculative_config = SimpleNamespace(
            method=method, draft_model_config=of, use_eagle=lambda: method in ("eagle", "mtp", "own layers")
        )
        return ns.model_fingerprint(config)

    before, plain = fingerprint(), ns.model_fingerprint(model(folder))
    assert (before == plain) == (method in ("ngram", "own layers"))
    (draft / "model.safetensors").write_bytes(b"1" * 1000)
    assert (fingerprint() == before) == (method in ("ngram", "own layers"))


def test_model_fingerprint_depends_on_draft_in_the_download_dir(folder, tmp_path, monkeypatch):
    """As it does on the model's own files there; without files, on the revision."""
    draft, described = tmp_path / "draft", tmp_path / "described"
    draft.mkdir()
    described.mkdir()
    (described / "config.json").write_text("{}")  # vLLM has only the weights in --download-dir
    folders = {"elsewhere": str(draft), None: str(described)}

    def snapshot(name, revision, cache_dir, local_files_only):
        if cache_dir not in folders:
            raise FileNotFoundError(name)
        return folders[cache_dir]

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    found = set()
    for weights, revision in ((b"1" * 1000, None), (b"2" * 1000, None), (None, "a"), (None, "b")):
        config = model(folder)
        config.load_config.download_dir = "elsewhere"
        of = SimpleNamespace(model="org/draft", revision=revision)
        config.speculative_config = SimpleNamespace(method="eagle", draft_model_config=of, use_eagle=lambda: True)
        if weights:
            (draft / "model.safetensors").write_bytes(weights)
        else:
            folders.clear()
        found.add(ns.model_fingerprint(config))
    assert len(found) == 4


def test_model_fingerprint_depends_on_trusted_remote_code(folder):
    (folder / "modeling.py").write_text("a = 1")
    trusted, before = (ns.model_fingerprint(model(folder, trust_remote_code=trust)) for trust in (True, False))
    (folder / "modeling.py").write_text("a = 2")
    assert ns.model_fingerprint(model(folder, trust_remote_code=True)) != trusted
    assert ns.model_fingerprint(model(folder)) == before, "it is not run"


@pytest.mark.parametrize("variable", ["true", "True", "1"])
def test_model_fingerprint_of_modelscope_name_is_unique(folder, monkeypatch, variable):
    """vLLM reads that hub's copy; the other hub's may lie in its cache under the same name."""
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: asked.append(name) or str(folder))
    first, again = (ns.model_fingerprint(model("org/model")) for _ in range(2))
    assert first == again and "org/model" in asked
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", variable)
    asked.clear()
    assert ns.model_fingerprint(model("org/model")) != ns.model_fingerprint(model("org/model")) and not asked
    assert model_folder("org/adapter") is None and of_files("org/model") is None
    assert ns.model_fingerprint(model(folder)) == ns.model_fingerprint(model(folder)), "a path is read as it is"
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "false")
    assert ns.model_fingerprint(model("org/model")) == first
def starts_now(monkeypatch) -> int:
    """This process, between all that was written and all that is to be, by the clock of the file system."""
    time.sleep(0.02)  # it ticks every 10 ms, or more often
    moment = time.time_ns()
    monkeypatch.setattr(ns, "process_start", lambda: moment)
    time.sleep(0.02)
    return moment


def rewrite(top):
    (top / "current" / "model.safetensors").write_bytes(b"2" * 10_000)


def switch_link(top):
    (top / "link").unlink()
    (top / "link").symlink_to("v2")


def switch_link_behind_a_link(top):
    (top / "stage").unlink()
    (top / "stage").symlink_to("v2")


def rename_folder(top):
    (top / "v1").rename(top / "old")
    (top / "v2").rename(top / "v1")


def rename_folder_above(top):
    top.rename(top.parent / "old")
    (top.parent / "spare").rename(top)


@pytest.mark.parametrize("path", ["v1", "current", "stage", "link"])
@pytest.mark.parametrize(
    "change", [None, rewrite, switch_link, switch_link_behind_a_link, rename_folder, rename_folder_above]
)
def test_model_fingerprint_of_files_changed_after_start_is_unique(
    tmp_path, folder, monkeypatch, caplog, path, change
):
    """vLLM loads weights tens of seconds before their files are looked at: it may have loaded others."""
    top = tmp_path / "top"
    for version in ("v1", "v2"):
        shutil.copytree(folder, top / version)
    for link, target in (("stage", "v1"), ("link", top / "stage"), ("current", "link")):
        (top / link).symlink_to(target)
    shutil.copytree(top, tmp_path / "spare", symlinks=True)
    before = ns.model_fingerprint(model(top / path))
    starts_now(monkeypatch)
    if change is not None:
        change(top)
    elsewhere = {switch_link: ("v1", "stage"), switch_link_behind_a_link: ("v1",)}.get(change, ())
    same = ns.model_fingerprint(model(top / path)) == before
    assert same is (change is None or path in elsewhere) and ("had started" in caplog.text) is not same


@pytest.mark.parametrize("own_clock", [True, False])
def test_model_fingerprint_allows_for_a_file_servers_clock(folder, monkeypatch, own_clock):
    """By a clock that is behind, a change after the start is one before it."""
    if not own_clock:
        monkeypatch.setattr(fingerprint, "OWN_CLOCK", frozenset())
    before = ns.model_fingerprint(model(folder))
    for seconds, same in ((5, own_clock), (15, True)):
        start = os.stat(folder / "model.safetensors").st_ctime_ns + seconds * 10**9
        monkeypatch.setattr(ns, "process_start", lambda start=start: start)
        assert (ns.model_fingerprint(model(folder)) == before) is same


def test_model_fingerprint_ignores_changes_beside_the_folder(tmp_path, folder, monkeypatch):
    before = ns.model_fingerprint(model(folder))
    starts_now(monkeypatch)
    (tmp_path / "another").mkdir()
    assert ns.model_fingerprint(model(folder)) == before
    (folder / "config.json").write_text("{}")
    assert ns.model_fingerprint(model(folder)) != before


def test_model_fingerprint_of_hub_name_with_moved_revision_is_unique(
    tmp_path, folder, monkeypatch
):
    """What is in a snapshot is that revision, whenever it was downloaded."""
    hub = tmp_path / "models--org--model"
    for revision in ("1" * 40, "2" * 40):
        shutil.copytree(folder, hub / "snapshots" / revision)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("1" * 40)

    def found(model, revision=None, download_dir=None):
        return hub / "snapshots" / (revision or (hub / "refs" / "main").read_text())

    monkeypatch.setattr(ns, "model_folder", found)
    main, fixed = model("org/model"), model("org/model")
    fixed.model_config.revision = "2" * 40
    before = ns.model_fingerprint(main)
    starts_now(monkeypatch)
    shutil.copytree(folder, hub / "snapshots" / ("2" * 40), dirs_exist_ok=True)
    assert ns.model_fingerprint(main) == before
    (hub / "refs" / "main").write_text("2" * 40)
    assert ns.model_fingerprint(main) != ns.model_fingerprint(main)
    assert ns.model_fingerprint(fixed) == before


def test_process_start_is_own_start_time(monkeypatch):
    """Not when the machine was, or the process that it was forked from."""
    ask = "from vllm_kvtier import fingerprint; print(fingerprint.process_start())"
    before, mine = starts_now(monkeypatch), fingerprint.process_start()
    started = int(subprocess.run([sys.executable, "-c", ask], capture_output=True, check=True, text=True).stdout)
    assert mine < before - 1_000_000 < started < time.time_ns()


def test_model_fingerprint_is_computed_on_another_thread(folder, monkeypatch):
    may_read, ready = threading.Event(), threading.Event()
    digests = ns.file_digests
    monkeypatch.setattr(ns, "file_digests", lambda files: may_read.wait(60) and digests(files))
    made = ns.ModelFingerprint(model(folder), None, ready.set)
    assert made.get(0.0) is None and not ready.is_set()
    may_read.set()
    assert ready.wait(60) and len(made.get(0.0)) == 32


@pytest.mark.parametrize("option", [None, "mine"])
def test_model_fingerprint_waits_for_other_readers(folder, option):
    """`codec: auto`, which looked for its record on the engine's thread."""
    threads, may_read = [], threading.Event()
    made = ns.ModelFingerprint(
        model(folder), option, before=lambda: may_read.wait(60) and threads.append(threading.current_thread())
    )
    assert made.get(0.0) is None
    may_read.set()
    assert made.get(60.0) and threads and threads != [threading.current_thread()]


def test_model_fingerprint_after_error_is_unique(folder, monkeypatch, caplog):
    monkeypatch.setattr(ns, "model_fingerprint", lambda config: 1 / 0)
    made = [ns.ModelFingerprint(model(folder), None).get(60.0) for _ in range(2)]
    assert None not in made and made[0] != made[1] and "ZeroDivisionError" in caplog.text


def test_plan_slots_namespace_depends_on_vllm_release():
    """The next release may compute otherwise, and what is stored outlives engines. Pulls do not go by it."""
    groups = cache_groups([(16, None)])
    bases = {
        plan_slots(NAMESPACE, {0: described(0, groups, [0])}, "raw", groups, 16, release).base
        for release in ("0.32.0", "0.32.0", "0.33.0")
    }
    assert len(bases) == 2


def test_plan_slots_namespace_depends_on_window_that_is_stored():
    """The groups of a namespace have one shape: an engine with another would lose its connection to the store."""
    plans = []
    for ahead, whole_blocks in ((0, False), (1, False), (1, True)):
        groups = BlockGeometry(cache_groups([(16, None), (16, 32)]), 16, whole_blocks, ahead).groups
        plans.append(plan_slots(NAMESPACE, {0: described(0, groups, [0, 0])}, "raw", groups, 16, "0.32.0"))
    assert [plan.shapes[1].window for plan in plans] == [32, 32, 47]
    assert plans[0].base == plans[1].base != plans[2].base


def test_engine_helper_sets_model_fingerprint_of_dummy_weights(tmp_path):
    def extra(kv, *args):
        engine = Engine("shapes", kv=kv, args=args, log_dir=tmp_path)
        return engine.kv and engine.kv.get("kv_connector_extra_config")

    dummy = ("--load-format", "dummy")
    assert extra(kvtier({"store": "off"}), *dummy) == {"store": "off", "model_fingerprint": "dummy weights of shapes"}
    assert extra(kvtier({"model_fingerprint": "mine"}), *dummy) == {"model_fingerprint": "mine"}
    assert extra(kvtier()) == {} and extra({"kv_connector": "NixlConnector"}, *dummy) is None
    assert extra(None, *dummy) is None
