"""The probe's table: each private part of vLLM, and each part that differs between versions, that this package uses.

See ``vllm_compat.probe.features``. A new use needs a row (``tests/unit/test_probe_complete.py`` finds missing ones).
"""

from vllm_kvtier.vllm_compat.probe import trials
from vllm_kvtier.vllm_compat.probe.row import Absence, Feature, Row, Side

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
_OUTPUT = "vllm.v1.core.sched.output"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_CORE = "vllm.v1.engine.core"
_HASHES = "vllm.v1.core.kv_cache_utils"
_CACHE = "vllm.v1.kv_cache_interface"
_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_BLOCK = f"{_HASHES}:KVCacheBlock"
_REQUEST = "vllm.v1.request:Request"
_EVENTS = "vllm.distributed.kv_events"
_RANKS = "vllm.distributed.parallel_state"
_TRITON = "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl"


def _all(path: str, names: str) -> tuple[str, ...]:
    return tuple(f"{path}.{name}" for name in names.split())


ROWS: tuple[Row, ...] = (
    # -- what nothing works without ------------------------------------------------------------------------------------
    Row(
        "connector interface", Feature.ALL,
        "the methods that vLLM calls take what ours take, and none is abstract that we lack", Side.BOTH,
        names=(
            f"{_BASE}:SupportsHMA", f"{_BASE}:KVConnectorRole", *_all(f"{_BASE}:KVConnectorRole", "SCHEDULER WORKER")
        ),
        sets={f"{_BASE}:KVConnectorBase_V1": "_connector_metadata _vllm_config _kv_cache_config"},
        trial=trials.connector_interface, tries="signature",
        tried=(f"{_BASE}:KVConnectorBase_V1", f"{_BASE}:SupportsHMA"),
    ),
    Row(
        "connector factory", Feature.ALL, "connectors are registered by name", Side.BOTH,
        calls=(
            ("vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.register_connector", 3, ()),
        ),
        tried=("vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory",),
    ),
    Row(
        "connector metadata", Feature.ALL, "our data travels with a step to the workers and back", Side.BOTH,
        fields={"vllm.v1.outputs:KVConnectorOutput": "kv_connector_worker_meta finished_recving"},
        trial=trials.connector_metadata,
        tried=(
            f"{_BASE}:KVConnectorMetadata", f"{_BASE}:KVConnectorWorkerMetadata",
            f"{_BASE}:KVConnectorWorkerMetadata.aggregate",
        ),
    ),
    Row(
        "connector stats", Feature.ALL, "metrics travel to the API server and are shown there", Side.BOTH,
        names=_all(f"{_METRICS}:KVConnectorStats", "aggregate reduce is_empty reset"),
        fields={f"{_METRICS}:KVConnectorStats": "data"},
        calls=((f"{_METRICS}:KVConnectorPromMetrics", 4, ()),),
        sets={f"{_METRICS}:KVConnectorPromMetrics": "per_engine_labelvalues"},
    ),
    Row(
        "schedule of a step", Feature.ALL, "which requests a step computes, and the blocks they are given",
        fields={
            f"{_OUTPUT}:SchedulerOutput": "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens "
            "total_num_scheduled_tokens",
            f"{_OUTPUT}:NewRequestData": "req_id block_ids num_computed_tokens",
            f"{_OUTPUT}:CachedRequestData": "req_ids resumed_req_ids new_block_ids num_computed_tokens",
        },
        optional={f"{_OUTPUT}:SchedulerOutput.kv_cache_block_copies": Absence(None, since=(0, 26, 0))},
        calls=(("vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids", 1, ()),),
    ),
    Row(
        "request", Feature.ALL, "its tokens, how many are computed, its hashes, adapter, salt, media and state",
        trial=trials.request, tried=(_REQUEST, *_all(_REQUEST, " ".join(trials.REQUEST_ATTRIBUTES))),
        names=(
            "vllm.v1.request:RequestStatus",
            *_all("vllm.v1.request:RequestStatus", "WAITING PREEMPTED FINISHED_STOPPED FINISHED_LENGTH_CAPPED"),
            *_all("vllm.v1.request:RequestStatus", "FINISHED_REPETITION FINISHED_ABORTED"),
        ),
        fields={"vllm.lora.request:LoRARequest": "lora_name lora_path lora_int_id load_inplace __struct_fields__"},
    ),
    Row(
        "block hashes", Feature.ALL, "a chain of hashes over whole blocks, salted, from one seed",
        trial=trials.block_hashes,
        tried=(f"{_HASHES}:NONE_HASH", f"{_HASHES}:get_request_block_hasher", "vllm.utils.hashing:get_hash_fn_by_name"),
    ),
    Row(
        "block pool", Feature.ALL, "pinned blocks are not handed out, freed ones are; blocks are found by their hash",
        trial=trials.block_pool,
        names=(f"{_HASHES}:BlockHash",), fields={_BLOCK: "is_null"},
        tried=(
            _POOL,
            *_all(_POOL, "hash_block_size num_gpu_blocks blocks touch free_blocks"),
            *_all(_POOL, "get_num_free_blocks get_cached_block"),
            *_all(_BLOCK, "block_id ref_cnt block_hash"), f"{_HASHES}:make_block_hash_with_group_id",
        ),
    ),
    Row(
        "reset of the prefix cache", Feature.ALL,
        "fails while a block is held, else forgets all; may be replaced on an instance",
        trial=trials.reset, tried=(f"{_POOL}.reset_prefix_cache",),
    ),
    Row(
        "engine's configuration", Feature.ALL, "what the engine is, computes and caches", Side.BOTH,
        names=("vllm.envs:environment_variables",),
        optional={
            "vllm.config:VllmConfig.num_prefill_lookahead_tokens": Absence(None, since=(0, 31, 0)),
            "vllm.config:SpeculativeConfig.use_multi_module_mtp": Absence(lambda: False, since=(0, 27, 0)),
            "vllm.config:VllmConfig.aux_output_config": Absence(None, since=(0, 31, 0)),
            "vllm.config:ParallelConfig.enable_fault_tolerance": Absence(False, since=(0, 27, 0)),
        },
        fields={
            "vllm.config:VllmConfig": "instance_id kv_transfer_config parallel_config model_config scheduler_config "
            "cache_config load_config device_config compilation_config kv_events_config attention_config "
            "speculative_config quant_config kernel_config __dataclass_fields__",
            "vllm.config:KernelConfig": "moe_backend linear_backend",
            "vllm.config:SpeculativeConfig": "method draft_model_config use_eagle num_speculative_tokens",
            "vllm.config:KVTransferConfig": "engine_id kv_connector_extra_config kv_load_failure_policy kv_role "
            "kv_buffer_device",
            "vllm.config:ParallelConfig": "tensor_parallel_size pipeline_parallel_size data_parallel_size "
            "data_parallel_index distributed_executor_backend enable_elastic_ep world_size",
            "vllm.config:ModelConfig": "model model_weights revision seed dtype hf_config hf_config_path "
            "hf_text_config config_format max_model_len use_mla original_max_model_len served_model_name "
            "get_total_num_kv_heads runner_type is_prefix_caching_supported quantization quantization_config "
            "hf_overrides multimodal_config trust_remote_code override_generation_config "
            "try_get_generation_config __dataclass_fields__",
            "vllm.config.multimodal:MultiModalConfig": "mm_processor_kwargs mm_encoder_fp8_scale_path "
            "__dataclass_fields__",
            "vllm.config.attention:AttentionConfig": "__dataclass_fields__",
            "vllm.config:SchedulerConfig": "max_num_batched_tokens enable_chunked_prefill",
            "vllm.config:CacheConfig": "prefix_caching_hash_algo cache_dtype enable_prefix_caching "
            "__dataclass_fields__",
            "vllm.config:LoadConfig": "load_format download_dir __dataclass_fields__",
            "vllm.config:DeviceConfig": "device_type",
            "vllm.config:CompilationConfig": "static_forward_context",
        },
    ),
    Row(
        "changes of weights", Feature.ALL, "they reach the workers through these methods of the engine core",
        names=(f"{_CORE}:EngineCore",),
        calls=(
            (f"{_CORE}:EngineCore.collective_rpc", 2, ()), (f"{_CORE}:EngineCore.sleep", 2, ()),
            (f"{_CORE}:EngineCore.add_lora", 2, ()), (f"{_CORE}:EngineCore.reset_encoder_cache", 1, ()),
        ),
    ),
    Row(
        "encoder's outputs", Feature.ALL, "what changed weights leave behind beside the prefix cache",
        sets={
            "vllm.v1.core.encoder_cache_manager:EncoderCacheManager": "cached",
            _SCHEDULER: "encoder_cache_manager",
        },
        fields={"vllm.config:ModelConfig": "is_multimodal_model"},
    ),
    Row(
        "sleep mode", Feature.ALL, "which engines may lose their cache's memory, and the worker's class", Side.BOTH,
        fields={
            "vllm.config:ModelConfig": "enable_sleep_mode enable_cumem_allocator",
            "vllm.config:ParallelConfig": "worker_cls",
        },
        calls=(("vllm.utils.import_utils:resolve_obj_by_qualname", 1, ()),),
    ),
    Row(
        "policy of failed loads", Feature.ALL, "the scheduler's flag by which failed loads are recomputed",
        sets={_SCHEDULER: "recompute_kv_load_failures"},
    ),
    Row(
        "context parallelism", Feature.ALL, "it is configured, and spreads a block over ranks", Side.BOTH,
        fields={
            "vllm.config:ParallelConfig": "decode_context_parallel_size prefill_context_parallel_size "
            "cp_kv_cache_interleave_size"
        },
    ),
    Row(
        "scales of a quantized cache", Feature.ALL, "whether each engine makes its own", Side.BOTH,
        optional={"vllm.config:CacheConfig.calculate_kv_scales": Absence(False, until=(0, 28, 0))},
    ),
    Row(
        "KV cache groups", Feature.ALL, "their layers, blocks, windows, and which of the two layouts of tensors it is",
        Side.BOTH,
        fields={
            f"{_CACHE}:KVCacheConfig": "num_blocks kv_cache_groups kv_cache_tensors needs_kv_cache_zeroing",
            f"{_CACHE}:KVCacheGroupSpec": "layer_names kv_cache_spec",
            f"{_CACHE}:KVCacheSpec": "block_size",
            f"{_CACHE}:AttentionSpec": "num_kv_heads head_size dtype kv_quant_mode",
            f"{_CACHE}:SlidingWindowSpec": "sliding_window",
            f"{_CACHE}:ChunkedLocalAttentionSpec": "attention_chunk_size",
            f"{_CACHE}:MLAAttentionSpec": "cache_dtype_str",
            f"{_CACHE}:SlidingWindowMLASpec": "cache_dtype_str",
            f"{_CACHE}:UniformTypeKVCacheSpecs": "kv_cache_specs",
        },
        optional={f"{_CACHE}:SlidingWindowSpec.extra_retained_tokens": Absence(0, since=(0, 28, 0))},
        names=(f"{_CACHE}:FullAttentionSpec", f"{_CACHE}:MambaSpec"),
        trial=trials.cache_tensors, tries="fields", tried=(f"{_CACHE}:KVCacheTensor.shared_by",),
    ),
    Row(
        "groups kept out of transfers", Feature.ALL, "vLLM names the groups that are not to be moved, or not kept",
        Side.BOTH,
        optional={
            f"{_CACHE}:KVCacheGroupSpec.host_resident": Absence(False, since=(0, 30, 0)),
            f"{_CACHE}:KVCacheGroupSpec.enable_kv_transfer": Absence(True, since=(0, 29, 0)),
            f"{_CACHE}:KVCacheSpec.prefix_cacheable": Absence(True, since=(0, 29, 0)),
            f"{_CACHE}:SlidingWindowMLASpec.bounded_replay": Absence(False, since=(0, 31, 0)),
        },
    ),
    Row(
        "attention backends", Feature.ALL, "each layer has a backend, which defines a page's layout", Side.WORKER,
        names=("vllm.v1.attention.backend:AttentionBackend.get_name",),
        calls=(("vllm.model_executor.layers.attention_layer_base:AttentionLayerBase.get_attn_backend", 1, ()),),
    ),
    Row(
        "ranks", Feature.ALL, "a worker's place among tensor-parallel ranks and pipeline stages", Side.WORKER,
        calls=tuple((f"{_RANKS}:get_{name}_group", 0, ()) for name in ("tp", "pp", "pcp")),
        sets={f"{_RANKS}:GroupCoordinator": "rank_in_group world_size cpu_group"},
        names=(f"{_RANKS}:GroupCoordinator.first_rank",),
        fields={"vllm.config:ParallelConfig": "nnodes use_ray"},
    ),
    # -- what single features need -------------------------------------------------------------------------------------
    Row(
        "what is hashed beside tokens", Feature.HANDOFFS, "adapter, media and salt of a prompt's last, partial block",
        trial=trials.extra_keys, tried=(f"{_HASHES}:generate_block_hash_extra_keys",),
    ),
    Row(
        "hashes that look ahead", Feature.HANDOFFS, "whether a hash covers tokens behind its block",
        trial=trials.lookahead, tries="signature", tried=("vllm.config:VllmConfig.num_hash_lookahead_tokens",),
    ),
    Row(
        "failed loads by request", Feature.GROUPS, "a request whose load failed is computed, whatever its groups",
        Side.BOTH, trial=trials.failures_by_request,
        tried=(f"{_BASE}:KVConnectorTransferResults", *_all(_SCHEDULER, "failed_recving_kv_req_ids requests")),
    ),
    # vLLM 0.25.1 computes from a state within a block on without a stop at the block's end, and then names states
    # wrongly in its prefix cache (``Scheduler._mamba_block_aligned_split``). Tried from 0.32 on.
    Row(
        "layout of states", Feature.STATES, "shapes, dtypes, and the order of a convolution's state", Side.BOTH,
        works_since=(0, 32, 0),
        fields={f"{_CACHE}:MambaSpec": "shapes dtypes mamba_type mamba_cache_mode"},
        optional={f"{_CACHE}:MambaSpec.num_prefill_checkpoint_blocks": Absence(0, since=(0, 29, 0))},
        calls=(("vllm.model_executor.layers.mamba.mamba_utils:get_conv_state_layout", 0, ()),),
    ),
    Row(
        "end of a prompt", Feature.STATES, "a prefill can be made to end a token earlier",
        trial=trials.shorter_prompt, tried=_all(_REQUEST, "prompt_token_ids _all_token_ids max_tokens"),
    ),
    Row(
        "hits of all groups", Feature.STATE_HITS,
        "with a connector a request begins where all groups are, or the scheduler can be made to (to 0.26)",
        trial=trials.hits_of_all_groups, tries="code",
        tried=("vllm.v1.core.sched:scheduler", "vllm.v1.core.sched.scheduler:HybridKVCacheCoordinator"),
    ),
    Row(
        "attention's own hits", Feature.LOCAL_HITS, "a connector may bring the state behind them; "
        "the lookups may be replaced on an instance", since=(0, 28, 0),
        fields={f"{_BASE}:KVConnectorBase_V1": "supports_divergent_local_hybrid_hits"},
        calls=((f"{_MANAGER}.get_computed_blocks_for_connector", 2, ()), (f"{_MANAGER}.get_computed_blocks", 2, ())),
    ),
    Row(
        "idle hook", Feature.IDLE, "the engine's loop calls it each time before it sleeps",
        calls=((f"{_CORE}:EngineCoreProc._notify_idle_state_callbacks", 1, ()),),
        names=(f"{_CORE}:EngineCoreProc",),
        trial=trials.idle_hook, tries="code",
    ),
    Row(
        "dummy batches", Feature.IDLE, "a data-parallel rank runs them while only others have requests",
        calls=((f"{_CORE}:EngineCore.execute_dummy_batch", 1, ()),),
        names=(f"{_CORE}:EngineCore", "vllm.v1.core.sched.scheduler:Scheduler.has_requests"),
    ),
    Row(
        "requests of the engine core", Feature.IDLE, "each comes through this method, in any process",
        calls=((f"{_CORE}:EngineCore.add_request", 2, ()),),
    ),
    Row(
        "wake-up of the engine", Feature.IDLE, "a message in its input queue ends its sleep",
        names=("vllm.v1.engine:EngineCoreRequestType", "vllm.v1.engine:EngineCoreRequestType.WAKEUP"),
        sets={f"{_CORE}:EngineCoreProc": "input_queue scheduler"},
        trial=trials.wakeup, tries="code",
    ),
    Row(
        "end of the engine", Feature.DRAINING, "its loop goes on until its work is done",
        calls=((f"{_CORE}:EngineCoreProc.is_running", 1, ()),),
        sets={f"{_CORE}:EngineCoreProc": "vllm_config"},
        fields={"vllm.config:VllmConfig": "shutdown_timeout"},
    ),
    Row(
        "pause after an empty step", Feature.PAUSES, "it is a sleep by the module time, a global of the engine core's",
        names=("vllm.v1.engine:core", "vllm.v1.engine.core:time"),
        trial=trials.step_pause, tries="code",
    ),
    Row(
        "loop over waiting requests", Feature.QUEUES, "its end when as many requests run as may, and its queues",
        names=("vllm.v1.core.sched.request_queue:create_request_queue",),
        sets={_SCHEDULER: "running max_num_running_reqs waiting requests policy finished_recving_kv_req_ids"},
        optional={
            f"{_SCHEDULER}.max_num_active_reqs": Absence(None, since=(0, 31, 0)),
            f"{_SCHEDULER}._select_waiting_queue_for_scheduling": Absence(None, until=(0, 31, 0)),
            f"{_SCHEDULER}.skipped_waiting": Absence(None, until=(0, 31, 0)),
        },
        trial=trials.waiting_loop, tried=(f"{_SCHEDULER}.schedule",), tries="code",
    ),
    Row(
        "admission of requests", Feature.ADMISSION, "the blocks that stay free, and the requests that lack some",
        sets={
            _SCHEDULER: "running kv_cache_manager _inflight_prefills waiting failed_recving_kv_req_ids"
            " num_lookahead_tokens num_spec_tokens",
            _MANAGER: "watermark_blocks",
        },
        optional={
            f"{_SCHEDULER}.kv_holding_waiting": Absence(None, since=(0, 31, 0)),
            f"{_SCHEDULER}.skipped_waiting": Absence(None, until=(0, 31, 0)),
            f"{_SCHEDULER}._spec_decode_step_blocks": Absence(0, since=(0, 31, 0)),
        },
        calls=((f"{_SCHEDULER}._inflight_prefill_reserved_blocks", 1, ()),),
    ),
    Row(
        "preemption by priority", Feature.PRIORITIES, "the blocks of a preempted request, by group and position",
        sets={
            _SCHEDULER: "policy kv_cache_manager", _MANAGER: "coordinator",
            "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": "single_type_managers",
            "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": "block_pool block_size req_to_blocks",
        },
        fields={"vllm.config:SchedulerConfig": "policy"},
        names=("vllm.v1.core.sched.request_queue:SchedulingPolicy.PRIORITY",),
        calls=((f"{_SCHEDULER}._preempt_request", 3, ()), (f"{_POOL}.evict_blocks", 2, ())),
    ),
    Row(
        "paused engine", Feature.PAUSED, "whether it is, and whose loads have ended",
        names=("vllm.v1.core.sched.interface:PauseState.UNPAUSED",),
        fields={_SCHEDULER: "pause_state"},
        sets={
            _SCHEDULER: "finished_recving_kv_req_ids failed_recving_kv_req_ids kv_cache_manager _inflight_prefills"
        },
        calls=((f"{_MANAGER}.free", 2, ()),),
    ),
    Row(
        "scheduler's methods", Feature.PEER_FETCH, "blocks are handed out, freed and forgotten in these only",
        calls=(
            (f"{_SCHEDULER}.schedule", 1, ()), (f"{_SCHEDULER}.update_from_output", 3, ()),
            (f"{_SCHEDULER}.finish_requests", 3, ()), (f"{_SCHEDULER}.reset_prefix_cache", 3, ()),
            (f"{_SCHEDULER}.reset_connector_cache", 1, ()),
        ),
    ),
    Row(
        "forward that waits for a load", Feature.SYNC_LOADS, "start_load_kv runs before the forward", since=(0, 29, 0),
        fields={f"{_OUTPUT}:SchedulerOutput": "has_sync_kv_loads"},
    ),
    Row(
        "preemption", Feature.SYNC_LOADS, "a request is preempted and its output in flight dropped", since=(0, 27, 0),
        calls=((f"{_SCHEDULER}._preempt_request", 3, ("drop_stale_output",)),),
        trial=trials.stale_output, tried=_all(_REQUEST, "num_stale_output_tokens drop_stale_output"),
    ),
    Row(
        "output of a step", Feature.SYNC_LOADS, "a failed load is rolled back before the output is read",
        calls=((f"{_SCHEDULER}.update_from_output", 3, ()),),
        fields={"vllm.v1.outputs:ModelRunnerOutput": "kv_connector_output"},
    ),
    Row(
        "scheduler's requests", Feature.SYNC_LOADS, "which run, wait, and were in the step before",
        sets={
            _SCHEDULER: "running requests connector prev_step_scheduled_req_ids finished_recving_kv_req_ids "
            "use_v2_model_runner"
        },
        fields={_SCHEDULER: "pause_state"},
        calls=((f"{_SCHEDULER}.get_request_counts", 1, ()),),
    ),
    Row(
        "eviction of single blocks", Feature.SYNC_LOADS, "a block in use is no longer found by its hash",
        trial=trials.evict, tried=(f"{_POOL}.evict_blocks",),
    ),
    Row(
        "sessions", Feature.SESSIONS, "the hashes of tokens that the next input replaces are dropped", since=(0, 32, 0),
        trial=trials.session,
        tried=(
            f"{_SCHEDULER}._update_request_as_session", "vllm.v1.request:StreamingUpdate", f"{_REQUEST}._all_token_ids",
        ),
    ),
    Row(
        "KV events", Feature.EVENTS, "events in vLLM's own form",
        fields={
            f"{_EVENTS}:BlockStored": "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name "
            "extra_keys group_idx kv_cache_spec_kind kv_cache_spec_sliding_window",
            f"{_EVENTS}:BlockRemoved": "block_hashes medium group_idx",
            f"{_EVENTS}:KVEventBatch": "ts events",
            "vllm.config:KVEventsConfig": "enable_kv_cache_events",
        },
        optional={
            f"{_EVENTS}:BlockStored.locality": Absence(None, since=(0, 26, 0)),
            f"{_EVENTS}:BlockRemoved.locality": Absence(None, since=(0, 26, 0)),
        },
        calls=(
            (f"{_HASHES}:maybe_convert_block_hash", 1, ()), (f"{_CACHE}:get_kv_cache_spec_kind", 1, ()),
            (f"{_CACHE}:get_kv_cache_spec_sliding_window", 1, ()),
        ),
        trial=trials.event_keys, tried=(f"{_HASHES}:to_event_extra_keys",),
    ),
    Row(
        "publisher of KV events", Feature.EVENTS, "an idle engine's events go out as those of a step",
        sets={_SCHEDULER: "kv_event_publisher kv_cache_manager"},
        calls=(
            ("vllm.v1.core.kv_cache_manager:KVCacheManager.take_events", 1, ()),
            (f"{_EVENTS}:EventPublisher.publish", 2, ()),
        ),
    ),
    Row(
        "sources of cache hits", Feature.HIT_SOURCES, "names for where KV came from", since=(0, 32, 0),
        names=(
            "vllm.v1.metrics.cache_hit_source:CacheHitSource",
            *_all("vllm.v1.metrics.cache_hit_source:CacheHitSource", "HOST DISK P2P EXTERNAL_UNSPECIFIED"),
        ),
    ),
    Row(
        "hidden metrics", Feature.HIDDEN_METRICS, "whether the user asks for metrics that are deprecated",
        fields={
            "vllm.config:VllmConfig": "observability_config", "vllm.config:ObservabilityConfig": "show_hidden_metrics",
        },
    ),
    Row(
        "hashes of a plain prompt", Feature.PROMPTS, "ours of a prompt's tokens are those of vLLM's request",
        trial=trials.prompt_hashes,
        tried=(
            f"{_HASHES}:hash_block_tokens", f"{_HASHES}:_gen_lora_extra_hash_keys", f"{_HASHES}:resolve_none_hash_seed",
        ),
    ),
    Row(
        "adapters in block hashes", Feature.ADAPTERS, "by which names vLLM tells adapters apart",
        trial=trials.adapter_names, tried=(f"{_HASHES}:_gen_lora_extra_hash_keys",),
    ),
    Row(
        "options of adapters", Feature.ADAPTERS, "adapters that are applied otherwise have KV of their own",
        fields={
            "vllm.config:VllmConfig": "lora_config",
            "vllm.config.lora:LoRAConfig": "lora_dtype target_modules __dataclass_fields__",
        },
    ),
    Row(
        "numbers in a page", Feature.CODECS, "the formats whose pages hold more than K and V", Side.WORKER,
        fields={f"{_CACHE}:FullAttentionSpec": "head_size_v", f"{_CACHE}:SlidingWindowSpec": "head_size_v"},
        optional={
            f"{_CACHE}:AttentionSpec.num_head_slots": Absence(None, since=(0, 28, 0)),
            f"{_CACHE}:AttentionSpec.state_content_bytes": Absence(None, since=(0, 28, 0)),
            f"{_CACHE}:AttentionSpec.tokens_per_state": Absence(1, since=(0, 29, 0)),
            f"{_CACHE}:MLAAttentionSpec.compress_ratio": Absence(1, until=(0, 29, 0)),
        },
    ),
    Row(
        "scales per token and head", Feature.TOKEN_SCALE,
        "a layer makes them once, in its cells, and can be made to before a step", Side.WORKER, late=True,
        names=_all(_TRITON, "_k_scale_cache _v_scale_cache"), sets={_TRITON: "_is_per_token_head_quant"},
        calls=((f"{_TRITON}._ensure_scale_caches", 2, ()),), trial=trials.token_scale, tried=(_TRITON,),
    ),
    Row(
        "kernels of CPU attention", Feature.CPU_CACHE, "which order of a page they choose", Side.WORKER, late=True,
        calls=(("vllm.v1.attention.backends.cpu_attn:_get_attn_isa", 4, ()),),
    ),
    Row(
        "operator that writes a CPU page", Feature.CPU_CODECS, "the position of each number (checked for each layer)",
        Side.WORKER, late=True, names=("vllm:_custom_ops",),
        calls=(
            ("vllm._custom_ops:cpu_attn_reshape_and_cache", 6, ("k_scale", "v_scale", "kv_cache_dtype")),
        ),
    ),
    Row(
        "virtual blocks", Feature.CONTEXT_PARALLEL, "how many tokens one has, and which part of it a rank",
        Side.BOTH, works_since=(0, 32, 0), trial=trials.virtual_blocks,
        tried=(f"{_HASHES}:resolve_kv_cache_block_sizes",), fields={f"{_CACHE}:AttentionSpec": "dcp_sharded"},
        calls=((f"{_RANKS}:get_dcp_group", 0, ()),),
    ),
    Row(
        "inputs of embeddings", Feature.MM_EMBEDDINGS,
        "the configuration decides by the connector whether tensors may be omitted", since=(0, 28, 0),
        trial=trials.mm_embeddings, tried=("vllm.config:VllmConfig",),
        fields={
            "vllm.config:VllmConfig": "ec_transfer_config", "vllm.config:ECTransferConfig": "is_ec_consumer",
            "vllm.config:KVTransferConfig": "kv_connector",
        },
        optional={
            "vllm.config.multimodal:MultiModalConfig.allow_missing_mm_embeddings": Absence(False, since=(0, 28, 0)),
        },
    ),
    Row(
        "choice of a connector", Feature.REPLACEMENT, "the configuration makes it in this method",
        calls=(("vllm.config:VllmConfig._post_init_kv_transfer_config", 1, ()),),
        fields={"vllm.config:KVTransferConfig": "kv_connector kv_connector_extra_config"},
    ),
    Row(
        "Triton's compiled kernels", Feature.LAUNCHER, "function, shared memory and arguments of a compiled kernel",
        Side.WORKER, late=True, trial=trials.triton_kernels, tries="code", tried=("triton.compiler:CompiledKernel",),
    ),
)  # fmt: skip
