"""Trials of the probe on small instances of vLLM's classes. Each raises Unmet, with the reason, if vLLM differs.

Where serving uses a function of ``vllm_compat``, a trial uses the same one.
"""

import importlib.util
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from vllm_kvtier.containment import Containment
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat.probe.checks import NotHere, Unmet, declared, expect, find, sets, uses

_HASHES = "vllm.v1.core.kv_cache_utils"
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_CORE = "vllm.v1.engine.core:EngineCoreProc"
_SCHEDULE = "vllm.v1.core.sched.scheduler:Scheduler.schedule"
# Imported by ``find``: these modules import the probe, so that an import here would be a cycle.
_REQUESTS = "vllm_kvtier.vllm_compat.requests"
_POOL = "vllm_kvtier.vllm_compat.hooks.block_pool:BlockPool"
_HASH_BLOCK_SIZE = 4  # tokens a block
_TOKENS = list(range(100, 111))  # two whole blocks and a rest
_LORA = SimpleNamespace(lora_name="adapter", lora_path="/adapter")

# Parameters of the connector's methods, without ``self``; vLLM calls some of them by position. None: any. A version
# never calls methods that it lacks.
METHODS: dict[str, tuple[str, ...] | None] = {
    "bind_gpu_block_pool": ("gpu_block_pool",),
    "bind_kv_cache_manager": ("kv_cache_manager",),
    "on_new_request": ("request",),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "get_loaded_kv_cache_group_ids": ("request",),
    "get_external_cache_hit_sources": ("request", "num_external_tokens"),
    "build_connector_meta": ("scheduler_output",),
    "update_connector_output": ("connector_output",),
    "take_events": (),
    "request_finished": ("request", "block_ids"),
    "request_finished_all_groups": ("request", "block_ids"),
    "has_pending_block_frees": (),
    "has_pending_push_work": (),
    "reset_cache": (),
    "register_kv_caches": ("kv_caches",),
    "unregister_kv_caches": (),
    "restore_kv_caches": (),
    "bind_connector_metadata": ("connector_metadata",),
    "start_load_kv": None,
    "wait_for_layer_load": ("layer_name",),
    "save_kv_layer": None,
    "wait_for_save": (),
    "get_finished": ("finished_req_ids",),
    "get_transfer_results": ("finished_req_ids",),
    "get_block_ids_with_load_errors": (),
    "build_connector_worker_meta": (),
    "get_kv_connector_stats": (),
    "build_kv_connector_stats": ("data",),
    "build_prom_metrics": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    "shutdown": (),
}
# Methods that the connector needs, although vLLM does not require them.
_CALLED = (
    "bind_gpu_block_pool", "update_connector_output", "request_finished", "register_kv_caches", "get_finished",
    "build_connector_worker_meta", "get_block_ids_with_load_errors", "reset_cache", "get_kv_connector_stats",
)  # fmt: skip

REQUEST_ATTRIBUTES = {
    "request_id": str, "num_tokens": int, "num_prompt_tokens": int, "num_computed_tokens": int,
    "num_output_placeholders": int, "num_output_tokens": int, "num_preemptions": int, "block_hashes": list,
    "all_token_ids": object, "lora_request": object, "cache_salt": str, "mm_features": list, "prompt_embeds": object,
    "status": object, "kv_transfer_params": object, "sampling_params": object, "resumable": bool,
    "skip_reading_prefix_cache": bool, "is_finished": object,
}  # fmt: skip


def connector_interface() -> None:
    base, hybrid = find(f"{_BASE}:KVConnectorBase_V1"), find(f"{_BASE}:SupportsHMA")
    lacking = {*base.__abstractmethods__, *hybrid.__abstractmethods__} - set(METHODS)
    expect(not lacking, f"vLLM wants methods that this connector lacks: {', '.join(sorted(lacking))}")
    for name, ours in METHODS.items():
        method = getattr(base, name, None) or getattr(hybrid, name, None)
        if method is None:
            expect(name not in _CALLED, f"KVConnectorBase_V1.{name} is missing")
        elif ours is not None:
            theirs = tuple(p for p in inspect.signature(method).parameters if p not in ("self", "cls"))
            expect(theirs == ours, f"{name} takes {theirs} and not {ours}")


def connector_metadata() -> None:
    metadata, worker = find(f"{_BASE}:KVConnectorMetadata"), find(f"{_BASE}:KVConnectorWorkerMetadata")
    type("Ours", (metadata,), {})()
    type("Ours", (worker,), {"aggregate": lambda self, other: self})()
    expect("aggregate" in vars(worker), "KVConnectorWorkerMetadata.aggregate is missing")


def request() -> None:
    made = _request(salt="salt")
    for name, kind in REQUEST_ATTRIBUTES.items():
        expect(hasattr(made, name), f"Request.{name} is missing")
        value = getattr(made, name)
        expect(isinstance(value, kind), f"Request.{name} is a {type(value).__name__}")
    counts = made.num_tokens, made.num_prompt_tokens, made.num_computed_tokens, made.num_output_placeholders
    expect(counts == (len(_TOKENS), len(_TOKENS), 0, 0), f"a new request counts {counts} tokens")
    expect(list(made.all_token_ids) == _TOKENS, "a request's tokens are not those of its prompt")
    expect(not made.is_finished(), "a new request is finished")
    expect(made.sampling_params.extra_args is None, "a request without extra arguments has some")
    expect(_request(params={"a": 1}).kv_transfer_params == {"a": 1}, "Request.kv_transfer_params is not what was sent")


def shorter_prompt() -> None:
    made = _request()
    given = made.prompt_token_ids
    find(_REQUESTS).leave_last_token(made, _HASH_BLOCK_SIZE)
    expect(len(given) == len(_TOKENS), "a prompt that is to end a token earlier shortens the list that it was given in")
    counts = made.num_tokens, made.num_prompt_tokens, len(made.prompt_token_ids)
    expect(counts == (len(_TOKENS) - 1,) * 3, f"a prompt that is to end a token earlier counts {counts} tokens")
    expect(list(made.all_token_ids) == _TOKENS[:-1], "a request's tokens do not end with its prompt's")


def block_hashes() -> None:
    plain, same, salted = _request().block_hashes, _request().block_hashes, _request(salt="salt").block_hashes
    expect(
        len(plain) == len(_TOKENS) // _HASH_BLOCK_SIZE,
        f"{len(_TOKENS)} tokens have {len(plain)} hashes of {_HASH_BLOCK_SIZE}",
    )
    expect(all(isinstance(each, bytes) and len(each) == 32 for each in plain), "a block's hash is not 32 bytes")
    expect(plain == same, "equal prompts have different hashes")
    expect(not set(plain) & set(salted), "a hash does not depend on what is before its block, or on the salt")


def session() -> None:
    """Up to 0.31 a block that was full only with the token that the next input replaces kept its hash."""
    made = _request()
    with _none_hash():
        made.append_output_token_ids(_TOKENS[0])  # it fills a block, and is not computed
        replaced = made.block_hashes[-1]
        made.num_computed_tokens, made.status = made.num_tokens - 1, find("vllm.v1.request:RequestStatus.WAITING")
        update = find("vllm.v1.request:StreamingUpdate")(
            mm_features=None, prompt_token_ids=_TOKENS[1:3], max_tokens=1, arrival_time=0.0,
            sampling_params=made.sampling_params,
        )  # fmt: skip
        scheduler = SimpleNamespace(hash_block_size=_HASH_BLOCK_SIZE, log_stats=False)
        find("vllm.v1.core.sched.scheduler:Scheduler._update_request_as_session")(scheduler, made, update)
    expect(made.num_tokens == len(_TOKENS) + 2, f"a session of {len(_TOKENS) + 2} tokens counts {made.num_tokens}")
    expect(replaced not in made.block_hashes, "a session keeps the hash of a token that its next input replaced")


def block_pool() -> None:
    vllm, ours, first = _pool()
    ids = [block.block_id for block in first]
    expect((ours.hash_block_size, ours.num_blocks) == (_HASH_BLOCK_SIZE, 5), "BlockPool does not tell its sizes")
    expect(0 not in ids, "block 0 is handed out")
    expect(ours.held_once(ids) == 2 and ours.free_count() == 2, "a block that was handed out is not counted as held")
    expect(ours.pin([0, *ids]) == ids and ours.held_once(ids) == 0, "touch() takes no reference")
    vllm.free_blocks(first)
    expect(ours.free_count() == 2, "a pinned block is free")
    ours.free(ids)
    expect(ours.free_count() == 4 and ours.unheld(ids) == 2, "free_blocks() frees nothing")
    hashes = [bytes(each) for each in _request().block_hashes]
    expect([ours.cached_block(each, 0) for each in hashes] == ids, "get_cached_block() does not find a cached block")
    expect(ours.cached_block(hashes[0], 1) == 0, "get_cached_block() finds a block of another group")
    expect(ours.holds(ids[0], hashes[0], 0) and not ours.holds(ids[0], hashes[0], 1), "block_hash tells no group")
    ours.pin(ids)
    expect(ours.free_count() == 2 and ours.unheld(ids) == 0, "touch() leaves a block among the free ones")
    others = vllm.get_new_blocks(2)
    expect(not {block.block_id for block in others} & set(ids), "a pinned block is handed out")
    expect([ours.cached_block(each, 0) for each in hashes] == ids, "a pinned block is evicted")


def reset() -> None:
    vllm, ours, first = _pool()
    calls: list[str] = []
    ours.around_reset(lambda: calls.append("before"), lambda: calls.append("after"), Containment(Counters()))
    log = logging.getLogger(type(vllm).__module__)
    log.disabled = True  # it would warn, at every start of an engine, that a reset failed
    try:
        expect(vllm.reset_prefix_cache() is False, "the prefix cache is reset while blocks are held")
        vllm.free_blocks(first)
        expect(vllm.reset_prefix_cache() is True, "the prefix cache is not reset though no block is held")
    finally:
        log.disabled = False
    expect(calls == ["before", "after"] * 2, "BlockPool.reset_prefix_cache cannot be replaced on an instance")
    expect(ours.cached_block(bytes(_request().block_hashes[0]), 0) == 0, "a reset leaves blocks in the prefix cache")


def evict() -> None:
    _, ours, first = _pool()
    hashes = [bytes(each) for each in _request().block_hashes]
    ours.evict(hashes[:1])
    found = [ours.cached_block(each, 0) for each in hashes]
    expect(found == [0, first[1].block_id], "evict_blocks() does not evict the block, or others as well")
    expect(first[0].ref_cnt == 1, "evict_blocks() takes a block from its request")


def cache_tensors() -> None:
    known = {"shared_by", "layers"} & declared(find("vllm.v1.kv_cache_interface:KVCacheTensor"))
    expect(len(known) == 1, "KVCacheTensor has neither shared_by (to 0.28) nor layers (from 0.29 on)")


def extra_keys() -> None:
    generate = find(f"{_HASHES}:generate_block_hash_extra_keys")
    expect(generate(_request(), 8, 11, 0) == (None, 0), "a plain prompt has extra keys")
    keys, _ = generate(_request(salt="salt"), 0, 3, 0)
    expect("salt" in repr(keys), "the extra keys of a prompt's first tokens lack its salt")
    keys, _ = generate(_request(lora=_LORA), 8, 11, 0)
    expect("adapter" in repr(keys), "the extra keys lack the adapter")


def lookahead() -> None:
    hasher = inspect.signature(find(f"{_HASHES}:get_request_block_hasher"))
    ahead = [name for name in hasher.parameters if name not in ("hash_block_size", "caching_hash_fn")]
    expect(ahead in ([], ["num_hash_lookahead_tokens"]), f"a block's hash depends on {ahead}")
    if ahead:
        find("vllm.config:VllmConfig.num_hash_lookahead_tokens")


def hash_lookahead(vllm_config: Any) -> int:
    """Tokens behind a block that its hash covers, where ``lookahead`` raises nothing."""
    hasher = inspect.signature(find(f"{_HASHES}:get_request_block_hasher"))
    return vllm_config.num_hash_lookahead_tokens if "num_hash_lookahead_tokens" in hasher.parameters else 0


def failures_by_request() -> None:
    base = find(_BASE)
    if hasattr(base, "KVConnectorTransferResults"):
        made = base.KVConnectorTransferResults(finished_sending=set(), finished_recving={"r"}, failed_recving={"r"})
        expect(made.failed_recving == {"r"}, "KVConnectorTransferResults does not keep failed requests")
        find(f"{_BASE}:KVConnectorBase_V1.get_transfer_results")
    else:
        sets("vllm.v1.core.sched.scheduler:Scheduler", ["failed_recving_kv_req_ids", "requests"])


def hits_of_all_groups() -> None:
    if begins_behind_attention():
        find("vllm.v1.core.sched.scheduler:HybridKVCacheCoordinator")
        uses(_SCHEDULE, "HybridKVCacheCoordinator")


def begins_behind_attention() -> bool:
    """Whether vLLM's scheduler itself looks up each group's hit, as up to 0.26 with a connector."""
    return "find_longest_cache_hit_per_group" in inspect.unwrap(find(_SCHEDULE)).__code__.co_names


def idle_hook() -> None:
    uses(f"{_CORE}._process_input_queue", "_notify_idle_state_callbacks")


def wakeup() -> None:
    uses(f"{_CORE}._handle_client_request", "WAKEUP")
    uses(f"{_CORE}._process_input_queue", "input_queue")


def step_pause() -> None:
    uses(f"{_CORE}._process_engine_step", "time")
    uses(f"{_CORE}._process_engine_step", "sleep")
    seconds = find("vllm_kvtier.vllm_compat.hooks.step_pause:PAUSE_SECONDS")
    numbers = inspect.unwrap(find(f"{_CORE}._process_engine_step")).__code__.co_consts
    expect(seconds in numbers, f"the pause after an empty step is not {seconds} s")


def waiting_loop() -> None:
    names = inspect.unwrap(find(_SCHEDULE)).__code__.co_names
    expect(not {"max_num_running_reqs", "max_num_active_reqs"}.isdisjoint(names), "it has another limit")


def mm_embeddings() -> None:
    config = find("vllm.config:VllmConfig")
    [name] = [name for name in find("vllm_kvtier.vllm_compat.hooks.mm_embeddings:METHODS") if hasattr(config, name)]
    consumer = SimpleNamespace(kv_connector="NixlConnector", kv_connector_extra_config={}, is_kv_consumer=True)
    for transfer in (consumer, None):
        media = SimpleNamespace(allow_missing_mm_embeddings=True, enable_mm_embeds=False, language_model_only=False)
        model = SimpleNamespace(multimodal_config=media)
        part = SimpleNamespace(model_config=model, ec_transfer_config=None, kv_transfer_config=transfer)
        getattr(config, name)(part)
        expect(media.allow_missing_mm_embeddings is (transfer is not None), "tensors may be omitted by another rule")
        expect(transfer is not None or not media.enable_mm_embeds, "embeddings are taken without a connector")


def stale_output() -> None:
    made = _request()
    expect(made.num_stale_output_tokens == 0 and made.drop_stale_output is False, "a new request has stale output")


def event_keys() -> None:
    requests = find(_REQUESTS)

    for salt, lora in (("", None), ("salt", None), ("salt", _LORA)):
        blocks = [(0, _HASH_BLOCK_SIZE), (_HASH_BLOCK_SIZE, 2 * _HASH_BLOCK_SIZE)]
        (name, first), (_, second) = requests.event_keys(_request(salt, lora), blocks)
        plain = [lora.lora_name] if lora else []
        expect(name == (lora.lora_name if lora else None), "an event lacks the adapter's name")
        expect((first or []) == plain + ([salt] if salt else []), f"a block's extra keys are published as {first}")
        expect((second or []) == plain, f"the extra keys of a block behind the first are published as {second}")


def prompt_hashes() -> None:
    requests = find(_REQUESTS)

    with _none_hash():
        for salt, lora in (("", None), ("salt", None), ("salt", _LORA)):
            ours = requests.block_hashes_of(_TOKENS, salt, _hash_function(), _HASH_BLOCK_SIZE, lora)
            theirs = [bytes(each) for each in _request(salt, lora).block_hashes]
            expect(ours == theirs, f"a prompt (salt: {bool(salt)}, adapter: {lora is not None}) has other hashes")


def adapter_names() -> None:
    identity, name = (find(f"vllm_kvtier.vllm_compat.adapters:{each}") for each in ("_identity", "_name"))
    other, moved = (SimpleNamespace(**vars(_LORA) | each) for each in ({"lora_name": "other"}, {"lora_path": "/other"}))
    expect(name(identity(_LORA)) == _LORA.lora_name, "what is hashed of an adapter does not begin with its name")
    with _none_hash():
        for lora in (other, moved):
            same = _request(lora=lora).block_hashes == _request(lora=_LORA).block_hashes
            expect(same == (identity(lora) == identity(_LORA)), "adapters with the same names have other hashes")


def triton_kernels() -> None:
    if importlib.util.find_spec("triton") is None:
        raise NotHere("Triton is not installed")
    kernel = find("triton.compiler:CompiledKernel")
    expect(callable(getattr(kernel, "_init_handles", None)), "CompiledKernel._init_handles is missing")
    sets("triton.compiler:CompiledKernel", ["metadata", "function"])
    # Behind a kernel's own arguments Triton passes pointers to two kinds of scratch; ``kernels.page_copy`` adds them.
    launcher = find("triton.backends.nvidia.driver:CudaLauncher.__init__")
    scratch = {name for name in inspect.unwrap(launcher).__code__.co_names if name.endswith("scratch_size")}
    expected = {"global_scratch_size", "profile_scratch_size"}
    expect(scratch == expected, f"a kernel's launch takes {sorted(scratch)} and not {sorted(expected)}")


# -- small instances ---------------------------------------------------------------------------------------------------


def _hash_function() -> Any:
    return find("vllm.utils.hashing:get_hash_fn_by_name")("sha256")


@contextmanager
def _none_hash() -> Iterator[None]:
    """With a seed of hashes if vLLM has none yet; it makes its own late in an engine's start."""
    hashes = find(_HASHES)
    if hasattr(hashes, "NONE_HASH"):
        yield
        return
    hashes.NONE_HASH = hashes.BlockHash(bytes(32))
    try:
        yield
    finally:
        del hashes.NONE_HASH


def token_scale() -> None:
    import torch

    module = find("vllm.v1.attention.backends.triton_attn")
    impl = object.__new__(module.TritonAttentionImpl)
    impl._is_per_token_head_quant = True
    shape = getattr(module.TritonAttentionBackend, "get_kv_cache_shape", None)  # 0.29 on: [B, H, N, C] everywhere
    sizes = shape(2, 16, 2, 8, "int8_per_token_head") if shape else (2, 2, 16, 2 * (8 + 4))
    layer = SimpleNamespace(impl=impl, kv_cache=torch.zeros(sizes, dtype=torch.int8))
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"layer": layer}))
    make = find("vllm_kvtier.vllm_compat.layout.token_scale:make_scale_views")
    make(["layer"], config)
    fault = find("vllm_kvtier.vllm_compat.layout.token_scale:scale_fault")(layer)
    expect(not fault, fault)
    layer.kv_cache.fill_(7)
    make(["layer"], config)
    expect(bool((layer.kv_cache == 7).all()), "a layer sets its scales twice")


def virtual_blocks() -> None:
    spec = SimpleNamespace(block_size=_HASH_BLOCK_SIZE, dcp_sharded=True)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=_HASH_BLOCK_SIZE, prefix_match_unit=None, enable_prefix_caching=True),
        parallel_config=SimpleNamespace(decode_context_parallel_size=2, prefill_context_parallel_size=3),
        kv_transfer_config=None,
    )
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    found = find(f"{_HASHES}:resolve_kv_cache_block_sizes")(groups, config)
    if found != (2 * _HASH_BLOCK_SIZE, 2 * _HASH_BLOCK_SIZE):
        raise Unmet(f"with 2 DCP and 3 PCP ranks a block of {_HASH_BLOCK_SIZE} tokens becomes one of {found}")


def _request(salt: str | None = None, lora: Any = None, params: dict[str, Any] | None = None) -> Any:
    sampling = find("vllm.sampling_params:SamplingParams")(
        max_tokens=1, extra_args={"kv_transfer_params": params} if params else None
    )
    hasher = find(f"{_HASHES}:get_request_block_hasher")(_HASH_BLOCK_SIZE, _hash_function())
    fields = dict(lora_request=lora, cache_salt=salt or None, arrival_time=0.0, block_hasher=hasher)
    with _none_hash():
        return find("vllm.v1.request:Request")("probe", list(_TOKENS), sampling, None, **fields)


def _pool() -> tuple[Any, Any, list[Any]]:
    """vLLM's pool of five blocks, ours around it, and the two blocks of a request that are in the prefix cache."""
    BlockPool = find(_POOL)

    vllm = find("vllm.v1.core.block_pool:BlockPool")(5, True, _HASH_BLOCK_SIZE)
    made = _request()
    first = vllm.get_new_blocks(2)
    vllm.cache_full_blocks(
        request=made,
        blocks=first,
        num_cached_blocks=0,
        num_full_blocks=2,
        block_size=_HASH_BLOCK_SIZE,
        kv_cache_group_id=0,
    )
    if len(first) != 2:
        raise Unmet("get_new_blocks() hands out another number of blocks")
    return vllm, BlockPool(vllm), first
