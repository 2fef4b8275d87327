"""The engine's options that change the K and V of a token beyond rounding: a part of the namespace.

Each field of vLLM's configuration that is not at its default counts, and each environment variable of vLLM's that is
set, except those listed here. So engines with different values of an option of the next release share no KV until the
option is listed.
"""

import dataclasses
import enum
import hashlib
import json
import os
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic.fields import FieldInfo
from vllm.envs import environment_variables

MAX_LETTERS = 160  # a refusal has at most 512 letters and names the options of two engines


class Fields(NamedTuple):
    """All fields of a class of vLLM's configuration, of all releases. Those of ``other`` do not change KV, or are in
    the namespace already. ``counted`` is for readers and tests: a field in neither counts too."""

    counted: str
    other: str


# "field.key": the value of this key in a field that is a dictionary.
TABLE = {
    "VllmConfig": Fields(
        "model_config cache_config load_config attention_config "  # by their fields
        "additional_config diffusion_config",
        # Read elsewhere: ``namespace`` (adapters), and ``model_config.quantization`` and its like.
        "lora_config quant_config "
        # How work is distributed, scheduled, compiled and observed. Other kernels differ in rounding only, but for
        # those of ``by_kernel``.
        "parallel_config scheduler_config device_config compilation_config kernel_config mamba_config offload_config "
        "engram_config optimization_level performance_mode additional_config.gdn_prefill_backend "
        "additional_config.kda_prefill_backend additional_config.kda_decode_backend observability_config "
        "profiler_config logging_config watchdog_config instance_id shutdown_timeout "
        # Read by `namespace`. Which draft it is decides how many tokens are accepted, not which.
        "speculative_config "
        # The use of computed tokens; moves of KV and weights.
        "structured_outputs_config reasoning_config watermark_config aux_output_config kv_transfer_config "
        "kv_events_config ec_transfer_config ec_manager_config weight_transfer_config",
    ),
    "ModelConfig": Fields(
        "quantization quantization_config hf_overrides model_class_overrides model_impl trust_remote_code "
        "code_revision disable_sliding_window override_attention_dtype "
        "multimodal_config",  # by its fields
        # Read elsewhere: the weights' and the configuration's digests, the KV cache dtype.
        "model model_weights hf_config hf_text_config hf_config_path config_format revision dtype "
        "word_embeddings_untied_by_checkpoint is_submodel_config "
        # The input: its tokens are hashed.
        "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init enable_prompt_embeds allowed_local_media_path "
        "allowed_media_domains io_processor_plugin renderer_num_workers hf_token "
        # The use of the model's output.
        "runner convert seed logits_processors pooler_config generation_config override_generation_config max_logprobs "
        "logprobs_mode use_fp64_gumbel enable_return_routed_experts return_sampling_mask enable_trace_replay "
        "served_model_name "
        # How it is run. ``by_length`` covers models whose KV depends on the longest prompt.
        "max_model_len spec_target_max_model_len enforce_eager disable_cascade_attn allow_deprecated_quantization "
        "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph "
        "enable_cumem_allocator enable_nccl_comm_suspend",
    ),
    "MultiModalConfig": Fields(
        "mm_processor_kwargs media_io_kwargs video_pruning_rate video_pruning_method mm_encoder_attn_dtype "
        "mm_encoder_fp8_scale_path mm_device_do_normalize",
        # Permitted inputs, and where and how fast they are prepared.
        "language_model_only limit_per_prompt enable_mm_embeds allow_missing_mm_embeddings mm_processor_cache_gb "
        "mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode "
        "mm_encoder_attn_backend mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin skip_mm_profiling "
        "mm_tensor_ipc mm_ipc_gpu_memory_gb mm_processor_kwargs.device "
        # These change tokens or identifiers, which are hashed.
        "interleave_mm_strings mm_hasher_algorithm",
    ),
    "CacheConfig": Fields(
        "kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype use_replayssm",
        # Read elsewhere: ``namespace``, and the layouts of pages, which engines compare.
        "cache_dtype calculate_kv_scales prefix_caching_hash_algo hash_block_size prefix_match_unit block_size "
        "user_specified_block_size user_specified_mamba_block_size effective_attention_block_size sliding_window "
        "is_attention_free mamba_block_size mamba_page_size_padded skip_page_size_padded kv_cache_layout "
        # How much is cached, where, and how long.
        "gpu_memory_utilization num_gpu_blocks num_gpu_blocks_override num_cpu_blocks kv_cache_memory_bytes "
        "kv_cache_size_tokens kv_cache_max_concurrency kv_offloading_size kv_offloading_backend "
        "simple_cpu_offload_num_blocks enable_prefix_caching prefix_cache_retention_interval "
        "cache_hit_alignment_tokens mamba_cache_mode enable_mamba_fine_grained_prefix_cache "
        "enable_mamba_shared_prefix_checkpoint swa_bounded_replay kv_sharing_fast_prefill replayssm_buffer_len "
        "use_kda_recoverssm _block_size_resolved",
    ),
    "LoadConfig": Fields(
        "model_loader_extra_config ignore_patterns",  # which files are read
        # Read elsewhere: the weights' digest.
        "load_format download_dir "
        # How files are read.
        "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size device "
        "use_tqdm_on_load pt_load_map_location model_loader_extra_config.concurrency "
        "model_loader_extra_config.memory_limit model_loader_extra_config.distributed "
        "model_loader_extra_config.enable_multithread_load model_loader_extra_config.num_threads",
    ),
    "AttentionConfig": Fields(
        "use_non_causal indexer_kv_dtype use_fp4_indexer_cache",
        # Kernels that round otherwise, and their tuning.
        "backend backend_per_kind flash_attn_version use_prefill_decode_attention "
        "flash_attn_max_num_splits_for_cuda_graph tq_max_kv_splits_for_cuda_graph tokenspeed_mla_min_split_kv "
        "use_trtllm_attention trtllm_ragged_backend disable_flashinfer_q_quantization use_prefill_query_quantization "
        "mla_prefill_backend sparse_mla_force_mqa sparse_mla_prefill_workspace_factor minimax_m3_msa_decode_backend "
        "minimax_m3_indexer_cp indexer_sparse_logits indexer_tp_shard_min_rows hisparse_config flex_attn_block_m "
        "flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size",
    ),
    "LoRAConfig": Fields(
        "lora_dtype target_modules enable_tower_connector_lora enable_mixed_moe_lora_format enable_moe_shared_loras",
        # The number of adapters, their ranks, and their distribution.
        "default_mm_loras fully_sharded_loras max_cpu_loras max_lora_cls_labels max_lora_rank max_loras "
        "specialize_active_lora",
    ),
}  # fmt: skip
_OTHER = {name: frozenset(fields.other.split()) for name, fields in TABLE.items()}

# Environment variables that quantize weights, activations or what ranks send each other, choose the weights' format or
# the precision of float32 or of sums, draw a token's experts at random (for benchmarks), or choose how videos are read.
# With batch invariance a token's KV is bitwise the same whatever it is computed beside; KV of other kernels, which
# round otherwise, is not. Of ROCm's, USE_AITER turns FP4BMM and FP8BMM on before vLLM 0.33.
VARIABLES = (
    "FLA_TRIL_PRECISION", "K_SCALE_CONSTANT", "Q_SCALE_CONSTANT", "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_BATCH_INVARIANT", "VLLM_CPU_INT4_W4A8", "VLLM_DEEPEPLL_NVFP4_DISPATCH", "VLLM_DISABLED_KERNELS",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE", "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG", "VLLM_HUMMING_ONLINE_QUANT_CONFIG", "VLLM_HUMMING_USE_F16_ACCUM",
    "VLLM_MARLIN_INPUT_DTYPE", "VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "VLLM_MOE_USE_DEEP_GEMM",
    "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD", "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD",
    "VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS", "VLLM_ROCM_FP8_MFMA_PAGE_ATTN",
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT", "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE",
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16", "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "VLLM_ROCM_USE_AITER",
    "VLLM_ROCM_USE_AITER_FP4BMM", "VLLM_ROCM_USE_AITER_FP8BMM", "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4",
    "VLLM_ROCM_USE_AITER_MOE_SITUV2", "VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4", "VLLM_TEST_FORCE_FP8_MARLIN",
    "VLLM_TEST_FORCE_LOAD_FORMAT", "VLLM_USE_DEEP_GEMM", "VLLM_USE_DEEP_GEMM_E8M0", "VLLM_USE_FLASHINFER_MOE_INT4",
    "VLLM_VIDEO_LOADER_BACKEND", "VLLM_XPU_INC_WNA16_BACKEND", "V_SCALE_CONSTANT", "XHS_VIDEO_JPEG_QUALITY",
)  # fmt: skip
# All others that vLLM 0.25.1 to 0.33 reads, VLLM_ before each. Those of the next release count until they are listed.
OTHER_VARIABLES = frozenset(
    "ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE "
    "ALLOW_INSECURE_SERIALIZATION ALLOW_LONG_MAX_MODEL_LEN ALLOW_RUNTIME_LORA_UPDATING ALLREDUCE_USE_FLASHINFER "
    "ALLREDUCE_USE_FLASHINFER_PCIE_IPC ALLREDUCE_USE_SYMM_MEM API_KEY ASSETS_CACHE ASSETS_CACHE_MODEL_CLEAN "
    "AUDIO_FETCH_TIMEOUT BEAM_ALWAYS_CONSTRAIN_OUTPUT BLOCKSCALE_FP8_GEMM_FLASHINFER BUILD_COMMIT BUILD_PIPELINE "
    "BUILD_URL CACHE_ROOT CHAT_TEMPLATE_FUEL CHAT_TEMPLATE_RENDER_TIMEOUT CI_USE_S3 "
    "COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD COMPILE_CACHE_SAVE_FORMAT COMPUTE_NANS_IN_LOGITS "
    "CONFIGURE_LOGGING CONFIG_ROOT CPU_ATTN_SPLIT_KV CPU_CI_ENV CPU_KVCACHE_SPACE CPU_NUM_OF_RESERVED_CPU "
    "CPU_OMP_THREADS_BIND CPU_SGL_KERNEL CUDART_SO_PATH CUDA_COMPATIBILITY_PATH CUSTOM_SCOPES_FOR_PROFILING "
    "DBO_COMM_SMS DCP_Q_REPLICATE DEBUG_DUMP_PATH DEBUG_LOG_API_SERVER_RESPONSE DEBUG_MFU_METRICS DEBUG_WORKSPACE "
    "DEEPEP_BUFFER_SIZE_MB DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE DEEPEP_LOW_LATENCY_USE_MNNVL "
    "DEEPEP_V2_ALLOW_HYBRID_MODE DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION DEEPEP_V2_PREFER_OVERLAP DEEP_GEMM_WARMUP "
    "DISABLE_COMPILE_CACHE DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION DISABLE_LOG_LOGO DISABLE_PYNCCL "
    "DISABLE_REQUEST_ID_RANDOMIZATION DISABLE_SHARED_EXPERTS_STREAM DISTRIBUTED_USE_SPLIT_GROUP "
    "DOCKER_BUILD_CONTEXT DO_NOT_TRACK DP_MASTER_IP DP_MASTER_PORT DP_RANK DP_RANK_LOCAL DP_SIZE "
    "EC_SIDE_CHANNEL_HOST EC_SIDE_CHANNEL_PORT ELASTIC_EP_DRAIN_REQUESTS ELASTIC_EP_SCALE_UP_LAUNCH "
    "ENABLE_COHERE_API ENABLE_CUDAGRAPH_GC ENABLE_CUDA_COMPATIBILITY ENABLE_FLA_PACKED_RECURRENT_DECODE "
    "ENABLE_GEMM_RS ENABLE_HPC_OPS ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING ENABLE_INDUCTOR_MAX_AUTOTUNE "
    "ENABLE_PREGRAD_PASSES ENABLE_RESPONSES_API_STORE ENABLE_STARTUP_PLAN ENABLE_V1_MULTIPROCESSING "
    "ENFORCE_STRICT_TOOL_CALLING ENGINE_ITERATION_TIMEOUT_S ENGINE_READY_TIMEOUT_S EXECUTE_MODEL_TIMEOUT_SECONDS "
    "FASTSAFETENSORS_QUEUE_SIZE FLASHINFER_ALLREDUCE_BACKEND FLASHINFER_ALLREDUCE_FUSION_THRESHOLDS_MB "
    "FLASHINFER_AUTOTUNE_CACHE_DIR FLASHINFER_AUTOTUNE_SKIP_OPS FLASHINFER_WORKSPACE_BUFFER_SIZE FORCE_AOT_LOAD "
    "GC_DEBUG GDN_DECODE_KERNEL GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS GPT_OSS_SYSTEM_TOOL_MCP_LABELS "
    "GPU_NIC_PCIE_MAPPING GPU_SYNC_CHECK HAS_FLASHINFER_CUBIN HOST_IP HTTP_MAX_REQUEST_BODY_SIZE "
    "HTTP_TIMEOUT_KEEP_ALIVE HUMMING_MOE_GEMM_TYPE IMAGE_FETCH_TIMEOUT IMAGE_TAG KEEP_ALIVE_ON_ENGINE_DEATH "
    "KIMI_K3_AUX_ATTN_RES_STREAM KIMI_K3_GEMM_AR KIMI_K3_GEMM_RS KIMI_K3_SHARD_SP_SHARED_EXPERT KV_CACHE_LAYOUT "
    "KV_EVENTS_USE_INT_BLOCK_HASHES KV_OFFLOAD_MAX_BATCH_DESCRIPTORS LOGGING_COLOR LOGGING_CONFIG_PATH "
    "LOGGING_LEVEL LOGGING_PREFIX LOGGING_STREAM LOG_BATCHSIZE_INTERVAL LOG_MODEL_INSPECTION LOG_STATS_INTERVAL "
    "LOOPBACK_IP LORA_DISABLE_PDL LORA_ENABLE_DUAL_STREAM LORA_RESOLVER_CACHE_DIR LORA_RESOLVER_HF_REPO_LIST "
    "MAIN_CUDA_VERSION MARLIN_USE_ATOMIC_ADD MAX_AUDIO_CLIP_FILESIZE_MB MAX_AUDIO_DECODE_BYTES "
    "MAX_AUDIO_DECODE_DURATION_S MAX_AUDIO_PREPROCESS_WORKERS MAX_BAD_WORDS_TOTAL_TOKENS MAX_COMPLETION_PROMPTS "
    "MAX_EMBED_DECODE_BYTES MAX_IMAGE_PIXELS MAX_MEDIA_DOWNLOAD_SIZE_MB MAX_MEDIA_REQUEST_DECODE_BYTES "
    "MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB MAX_NUM_BAD_WORDS MAX_N_SEQUENCES MAX_STOP_STRINGS "
    "MAX_TOKENS_PER_EXPERT_FP4_MOE MEDIA_CACHE MEDIA_CACHE_MAX_SIZE_MB MEDIA_CACHE_TTL_HOURS MEDIA_CONNECTOR "
    "MEDIA_FETCH_MAX_RETRIES MEDIA_LOADING_THREAD_COUNT MEDIA_URL_ALLOW_REDIRECTS "
    "MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS MLA_DISABLE MM_HASHER_ALGORITHM MODEL_REDIRECT_PATH MOE_SKIP_PADDING "
    "MOONCAKE_ABORT_REQUEST_TIMEOUT MOONCAKE_BOOTSTRAP_PORT MOONCAKE_CONNECTOR_TIMEOUT "
    "MOONCAKE_DISK_STAGING_USABLE_RATIO MOONCAKE_LOAD_RECV_THREADS MOONCAKE_STORE_TIER_LOG MQ_MAX_CHUNK_BYTES_MB "
    "MSGPACK_ZERO_COPY_THRESHOLD MULTI_STREAM_GEMM_TOKEN_THRESHOLD NCCL_INCLUDE_PATH NCCL_SO_PATH "
    "NIC_SELECTION_VARS NIXL_EP_MAX_NUM_RANKS NIXL_SIDE_CHANNEL_HOST NIXL_SIDE_CHANNEL_PORT NO_USAGE_STATS "
    "NVTX_SCOPES_FOR_PROFILING OBJECT_STORAGE_SHM_BUFFER_NAME P2P_HANDSHAKE_TIMEOUT_S P2P_IDLE_TIMEOUT_S "
    "P2P_MAX_PEERS P2P_SIDE_CHANNEL_HOST P2P_SIDE_CHANNEL_PORT PATTERN_MATCH_DEBUG PLE_CPU_OFFLOAD PLUGINS PORT "
    "PP_LAYER_PARTITION PREFIX_CACHE_RETENTION_INTERVAL PROCESS_NAME_PREFIX RAISE_ON_LOGIT_NANS "
    "RANDOMIZE_DP_DUMMY_INPUTS RAY_BUNDLE_INDICES RAY_DP_PACK_STRATEGY RAY_DP_PLACEMENT_NODE_IPS "
    "RAY_EXTRA_ENV_VARS_TO_COPY RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY RAY_PER_WORKER_GPUS "
    "REGEX_COMPILATION_TIMEOUT_S REPLICATE_EMBED REQUEST_BODY_LOG_LEVEL RINGBUFFER_WARNING_INTERVAL "
    "ROCM_AITER_MLA_ASM_PADDING ROCM_AITER_MLA_DCP_VERIFY ROCM_AITER_MOE_DISPATCH_POLICY ROCM_FP8_PADDING "
    "ROCM_MOE_PADDING ROCM_MONO_DECODE ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB "
    "ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB ROCM_SHUFFLE_KV_CACHE_LAYOUT ROCM_SLEEP_MEM_CHUNK_SIZE "
    "ROCM_USE_AITER_CUSTOM_AR ROCM_USE_AITER_FP4_ASM_GEMM ROCM_USE_AITER_FUSION_SHARED_EXPERTS "
    "ROCM_USE_AITER_LINEAR ROCM_USE_AITER_LINEAR_HIPBMM ROCM_USE_AITER_MHA ROCM_USE_AITER_MLA ROCM_USE_AITER_MOE "
    "ROCM_USE_AITER_PAGED_ATTN ROCM_USE_AITER_RMSNORM ROCM_USE_AITER_TRITON_GEMM ROCM_USE_AITER_TRITON_ROPE "
    "ROCM_USE_AITER_TRITON_SPARSE_MLA ROCM_USE_AITER_UNIFIED_ATTENTION ROCM_USE_SKINNY_GEMM RPC_BASE_PATH "
    "RUST_FRONTEND_PATH SERVER_DEV_MODE SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD SKIP_MODEL_NAME_VALIDATION "
    "SKIP_P2P_CHECK SKIP_PRECOMPILED_VERSION_SUFFIX SKIP_VERSION_SUFFIX SPARSE_INDEXER_MAX_LOGITS_MB "
    "SSM_CONV_STATE_LAYOUT STEP5_SHARD_SP_SHARED_EXPERT SYSTEM_START_DATE TARGET_DEVICE "
    "TOOL_JSON_ERROR_AUTOMATIC_RETRY TOOL_PARSE_REGEX_TIMEOUT_SECONDS TPU_BUCKET_PADDING_GAP TPU_MOST_MODEL_LEN "
    "TPU_USING_PATHWAYS TRACE_FUNCTION TRITON_ATTN_USE_TD TRITON_FORCE_FIRST_CONFIG TRITON_JIT_WARMUP_NUM_THREADS "
    "TRITON_USE_TD TUNED_CONFIG_FOLDER USAGE_SOURCE USAGE_STATS_SERVER USE_AOT_COMPILE USE_BREAKABLE_CUDAGRAPH "
    "USE_BYTECODE_HOOK USE_DEEP_GEMM_TMA_ALIGNED_SCALES USE_DIRECT_DCP_A2A USE_DIRECT_DCP_KV_GATHER "
    "USE_DIRECT_DCP_Q_GATHER USE_EXPERIMENTAL_PARSER_CONTEXT USE_FASTOKENS USE_FLASHINFER_SAMPLER "
    "USE_FUSED_MOE_GROUPED_TOPK USE_HW_AGNOSTIC USE_LAYERNAME USE_MEGA_AOT_ARTIFACT USE_MODELSCOPE "
    "USE_NCCL_SYMM_MEM USE_OINK_OPS USE_PRECOMPILED USE_PRECOMPILED_RUST USE_RAY_COMPILED_DAG_CHANNEL_TYPE "
    "USE_RAY_COMPILED_DAG_OVERLAP_COMM USE_RAY_V2_EXECUTOR_BACKEND USE_RAY_WRAPPED_PP_COMM USE_RUST_BENCH "
    "USE_RUST_FRONTEND USE_SIMPLE_KV_OFFLOAD USE_SPINLOOP_EXT USE_STANDALONE_COMPILE USE_TRITON_AWQ "
    "USE_V2_MODEL_RUNNER V1_OUTPUT_PROC_CHUNK_SIZE V1_USE_OUTLINES_CACHE VIDEO_FETCH_TIMEOUT "
    "WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY WEIGHT_OFFLOADING_DISABLE_UVA WORKER_MULTIPROC_METHOD "
    "WORKER_SHUTDOWN_TIMEOUT_SECONDS WSL2_ENABLE_PIN_MEMORY XGRAMMAR_CACHE_MB XLA_CACHE_PATH "
    "XLA_CHECK_RECOMPILATION XLA_USE_SPMD XPU_ENABLE_XPU_GRAPH XPU_FORCE_N_CONTIG_WEIGHT XPU_PP_MICROBATCH "
    "XPU_USE_SAMPLER_KERNEL ZENTORCH_WEIGHT_PREPACK".split()
)  # fmt: skip
# vLLM sets one of them itself for some models, and guides set others.
_DEFAULTS = {
    "VLLM_BATCH_INVARIANT": "0", "VLLM_FLOAT32_MATMUL_PRECISION": "highest", "VLLM_MOE_USE_DEEP_GEMM": "1",
    "VLLM_USE_DEEP_GEMM": "1", "VLLM_USE_DEEP_GEMM_E8M0": "1",
}  # fmt: skip
# Kernels that compute with what the checkpoint has quantized; others leave activations as they are (Marlin, and
# triton_unfused where DeepSeek V4 has them in 8 bits), quantize them further or quantize the weights anew.
_KERNELS = frozenset(
    "auto aiter aiter_mega_moe batched_triton conch cutlass deep_gemm deep_gemm_mega_moe exllama fbgemm "
    "flashinfer_b12x flashinfer_cudnn flashinfer_cutedsl flashinfer_cutlass flashinfer_moe_ep_mega_deep_gemm "
    "flashinfer_trtllm flydsl hpc machete rdna3 torch triton".split()
)
# Paths of files whose content counts.
_FILES = {"mm_encoder_fp8_scale_path", "hf_overrides.quantization_config_file"}
# Models whose processors choose the size of media by the longest prompt.
_MEDIA_BY_LENGTH = {
    "Dots3NoteForCausalLM", "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2", "NemotronH_Omni_Reasoning_V3",
    "NemotronH_Super_Omni_Reasoning_V3",
}  # fmt: skip


def engine_options(vllm_config: Any) -> str:
    """All options that count, as text; "" if all are at their defaults."""
    found = dict(changed(vllm_config)) | dict(by_length(vllm_config)) | dict(by_kernel(vllm_config))
    given = {n: text for n in variables() if (text := os.environ.get(n, _DEFAULTS.get(n))) != _DEFAULTS.get(n)}
    found |= {name: _content(text) if os.path.isfile(text) else text for name, text in given.items()}  # of HUMMING's
    return format_options(found)


def variables() -> Iterator[str]:
    """Names of the environment variables that count."""
    yield from VARIABLES
    read = (name.removeprefix("VLLM_") for name in environment_variables if name.startswith("VLLM_"))
    yield from (f"VLLM_{name}" for name in read if name not in OTHER_VARIABLES)


def changed(part: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of the fields of a class in ``TABLE`` that count and are not at this release's defaults."""
    other = _OTHER[type(part).__name__]
    for field in dataclasses.fields(part):
        option = getattr(part, field.name)
        if field.name in other:
            continue
        if type(option).__name__ in TABLE:
            yield from changed(option)
        elif _is_default(field, option):
            continue
        elif isinstance(option, Mapping):
            named = {f"{field.name}.{key}": each for key, each in option.items()}
            yield from ((name, _counted(name, each)) for name, each in named.items() if name not in other)
        else:
            yield field.name, _counted(field.name, option)


def _counted(name: str, option: Any) -> Any:
    return _content(option) if name in _FILES else option


def _is_default(field: dataclasses.Field, option: Any) -> bool:
    default = field.default
    if isinstance(default, FieldInfo):
        return not default.is_required() and option == default.get_default(call_default_factory=True)
    if default is dataclasses.MISSING:
        return field.default_factory is not dataclasses.MISSING and option == field.default_factory()
    return option == default


def _content(path: str) -> str:
    try:
        return hashlib.blake2b(Path(path).expanduser().read_bytes(), digest_size=8).hexdigest()
    except OSError as error:
        return f"{_unknown()}, as {path} cannot be read ({error.strerror})"


def by_length(vllm_config: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of options by which the longest prompt changes KV, for models where it does."""
    model = vllm_config.model_config
    config = model.hf_config.to_dict()
    parts = list(_dictionaries(config))
    # With -1 vLLM builds the model for its longest prompt and then finds the length that fits into memory.
    auto = model.original_max_model_len == -1
    if any({"longrope", "su"}.intersection((each.get("rope_type"), each.get("type"))) for each in parts):
        # vLLM uses either the short or the long factors for all prompts.
        trained = [length for each in parts if (length := each.get("original_max_position_embeddings"))]
        if auto or not trained:
            yield "max_model_len", "auto" if auto else model.max_model_len
        else:
            yield from ((f"max_model_len>{length}", model.max_model_len > length) for length in trained)
    if any(each.get("model_type") == "llama4_text" for each in parts):
        options = {**model.try_get_generation_config(), **model.override_generation_config}
        if "attn_temperature_tuning" in options:
            yield "attn_temperature_tuning", bool(options["attn_temperature_tuning"])
        else:
            yield "attn_temperature_tuning", "auto" if auto else model.max_model_len > 32768
    if model.multimodal_config is not None and _MEDIA_BY_LENGTH.intersection(config.get("architectures") or ()):
        yield "max_model_len", f"auto, {model.max_model_len}" if auto else model.max_model_len


def by_kernel(vllm_config: Any) -> Iterator[tuple[str, str]]:
    """(name, value) of the kernels that quantize otherwise than the checkpoint says."""
    config = vllm_config.kernel_config
    chosen = {"moe_backend": config.moe_backend, "linear_backend": config.linear_backend}
    chosen |= vars(config).get("linear_backend_per_quant") or {}  # since vLLM 0.32
    yield from ((f"kernel.{name}", kernel) for name, kernel in chosen.items() if kernel not in _KERNELS)


def _dictionaries(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
    if isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _dictionaries(each)


def format_options(found: Mapping[str, Any]) -> str:
    """Text that is equal for equal options, of at most ``MAX_LETTERS``; with all names, if they fit."""
    words = []
    for name, option in sorted(found.items()):
        text = json.dumps(canonical(option), sort_keys=True).strip('"')
        words.append(f"{name}={text if len(text) <= 48 else _digest(text)}")
    whole = ", ".join(words)
    if len(whole) <= MAX_LETTERS:
        return whole
    digest = _digest(whole)
    return f"{', '.join(sorted(found))[: MAX_LETTERS - len(digest) - 2]}: {digest}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def canonical(value: Any) -> Any:
    """The value in types of JSON: equal in all processes for equal values; unique if that cannot be guaranteed."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype | Path):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {str(key): canonical(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        listed = [canonical(each) for each in value]
        return sorted(listed, key=json.dumps) if isinstance(value, set | frozenset) else listed
    if isinstance(value, type | types.FunctionType) and "<" not in value.__qualname__:
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = [(f, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return {f.name: canonical(each) for f, each in own if not _is_default(f, each)}
    return _unknown()


def _unknown() -> str:
    return f"like no other {os.urandom(8).hex()}"
