"""What two engines must have in common to share KV, as read from vLLM's configuration."""

import dataclasses
import enum
import itertools
import json
import uuid

import pytest
import torch
from cache_groups import cache_groups
from engine_configs import at_defaults, engine_config, multimodal
from tier_fakes import NAMESPACE, described
from vllm.config import CacheConfig, LoadConfig, ModelConfig, VllmConfig
from vllm.config.attention import AttentionConfig
from vllm.config.kernel import KernelConfig
from vllm.config.lora import LoRAConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.config.quantization import QuantizationConfigArgs
from vllm.envs import environment_variables
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

from vllm_kvtier.devtools.engines import Engine, kvtier
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
