"""What the scheduler side needs to know of its engine, read once from vLLM's configuration."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.envs import environment_variables

from vllm_kvtier import fingerprint
from vllm_kvtier.cache_kinds import UNKNOWN_IN_FLIGHT, CacheGroup, InFlight
from vllm_kvtier.errors import UnsupportedLayout
from vllm_kvtier.vllm_compat import kv_events, sleep
from vllm_kvtier.vllm_compat import namespace as ns
from vllm_kvtier.vllm_compat.layout.context_parallel import refuse_context
from vllm_kvtier.vllm_compat.layout.groups import cache_group, followed, saves_states_within_steps, whole_blocks
from vllm_kvtier.vllm_compat.probe import trials
from vllm_kvtier.vllm_compat.probe.features import granted, refused, value
from vllm_kvtier.vllm_compat.probe.row import Feature
from vllm_kvtier.vllm_compat.version import check_supported, installed_version
from vllm_kvtier.wire.messages import Namespace

MAX_ENGINE_ID = 200  # characters
BlockIds = tuple[list[int], ...]  # by group


@dataclass
class EngineInfo:
    engine_id: str
    instance_id: str  # random for each start of the engine, equal in all its processes
    groups: list[CacheGroup]  # those of ``group_ids``
    full_groups: list[int]  # of these, the ones with ``whole_prefix``
    world_size: int
    tensor_parallel: int
    data_parallel_rank: int
    max_tokens: int  # longest prompt
    hash_lookahead: int  # tokens behind a block that its hash covers
    step_tokens: int  # maximum in a step
    link_bandwidth: float  # bytes/s to host memory before any was measured
    supports_partial_prefix: bool  # whether several tokens can be computed behind a prefix that is in the cache
    unsupported: str | None  # why this engine cannot pull, export, store or load
    release: str  # of vLLM
    config: Any = field(repr=False)
    peer_bandwidth: float = 200e9  # bytes/s from another device of the node before any was measured
    kv_events_enabled: bool = False
    # vLLM's ids of ``groups``, and how many groups it has: see ``layout.groups``. None: it has these only.
    group_ids: list[int] | None = None
    num_groups: int = 1
    whole_blocks: bool = False  # see ``layout.groups.whole_blocks``
    event_groups: list[tuple[int, str, int | None]] = field(default_factory=list)  # see ``kv_events.event_groups``
    supports_sync_load: bool = False  # whether a forward can wait for a load, and be rolled back if the load was wrong
    prefix_caching: bool = True  # vLLM's own; without it only hand-offs of prefills are read
    multimodal: bool = False  # vLLM also caches an encoder's outputs
    speculates: bool = False  # so that a step's sampling decides which state is behind its last token
    # Whether KV of a session that gets more input (``Request.resumable``) is of its hashes' tokens. Up to 0.31 vLLM
    # keeps the hash of the sampled token that the next input replaces. Before 0.33 it counts tokens as computed that
    # were sampled with a draft behind its stop and are replaced, too.
    keeps_sessions: bool = True
    # Tokens behind a position that KV of draft layers depends on there, and that its block's hash may not cover.
    draft_lookahead: int = 0
    in_flight: InFlight = UNKNOWN_IN_FLIGHT
    states_within_steps: bool = False  # kernels save states from within a step: see ``EngineContext``

    @property
    def reports_failed_requests(self) -> bool:
        """Whether vLLM recomputes the whole request after a failed load, not only from the first bad block on."""
        whole = all(group.kind.whole_prefix for group in self.groups)
        return self.num_groups > 1 or not self.supports_partial_prefix or not whole

    @property
    def brings_states(self) -> bool:
        """Whether a hand-off needs no more of vLLM's prefix cache than the blocks of attention before it."""
        kinds = [group.kind for group in self.groups]
        positional = [kind.whole_prefix for kind in kinds if kind.by_position]
        return self.group_ids is None and 0 < len(positional) < len(kinds) and all(positional)

    def followed(self, block_ids: BlockIds) -> BlockIds:
        """Of block ids by vLLM's groups, those of ``groups``."""
        return block_ids if self.group_ids is None else tuple(block_ids[g] for g in self.group_ids)

    def left_out(self, block_ids: BlockIds) -> Iterator[list[int]]:
        """The others."""
        if self.group_ids is not None:
            yield from (ids for g, ids in enumerate(block_ids) if g not in self.group_ids)

    def fingerprint(
        self, option: str | None, on_ready: Callable[[], object], before: Callable[[], object]
    ) -> ns.ModelFingerprint:
        """``option``: the value of the option model_fingerprint."""
        return ns.ModelFingerprint(self.config, option, on_ready, before)

    def namespace(self, hash_block_size: int, fingerprint: str) -> Namespace:
        return ns.namespace(self.config, hash_block_size, fingerprint)

    def namespace_parts(self, namespace: Namespace, fingerprint: str | None) -> list[tuple[str, str]]:
        """See ``namespace.namespace_parts``."""
        return ns.namespace_parts(self.config, namespace, fingerprint)

    def record_key(self) -> str | None:
        """The name of this model's record of `kvtier quality`; None without local files."""
        model = self.config.model_config
        return fingerprint.of_files(model.model, model.revision, self.config.load_config.download_dir)

    def hash_function(self) -> Any:
        return ns.hash_function(self.config)


def engine_info(vllm_config: Any, kv_cache_config: Any) -> EngineInfo:
    parallel, on_cpu = vllm_config.parallel_config, str(vllm_config.device_config.device_type) == "cpu"
    theirs = kv_cache_config.kv_cache_groups
    ids = followed(kv_cache_config)
    unsupported = _unsupported(vllm_config, kv_cache_config)
    groups = [] if unsupported else [cache_group(theirs[g], parallel.decode_context_parallel_size) for g in ids]
    return EngineInfo(
        engine_id=_short(vllm_config.kv_transfer_config.engine_id),
        instance_id=vllm_config.instance_id,
        groups=groups,
        full_groups=[g for g, (_, kind) in enumerate(groups) if kind.whole_prefix],
        group_ids=None if len(ids) == len(theirs) else ids,
        num_groups=len(theirs),
        whole_blocks=whole_blocks(kv_cache_config),
        world_size=parallel.tensor_parallel_size
        * parallel.pipeline_parallel_size
        * parallel.prefill_context_parallel_size,
        tensor_parallel=parallel.tensor_parallel_size,
        # vLLM sets ``data_parallel_rank`` to 0 in each rank of a dense model.
        data_parallel_rank=parallel.data_parallel_index,
        max_tokens=vllm_config.model_config.max_model_len,
        # 1 if this vLLM does not tell
        hash_lookahead=trials.hash_lookahead(vllm_config) if granted(Feature.HANDOFFS) else 1,
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        link_bandwidth=1e9 if on_cpu else 20e9,  # a core that copies and verifies, or a PCIe 4 link
        peer_bandwidth=1.5e9 if on_cpu else 200e9,
        supports_partial_prefix=_supports_partial_prefix(vllm_config),
        kv_events_enabled=(with_events := kv_events.enabled(vllm_config)),
        event_groups=kv_events.event_groups(kv_cache_config, ids) if with_events else [],
        supports_sync_load=len(ids) == len(theirs) and _supports_sync_load(vllm_config, groups),
        unsupported=unsupported,
        release=installed_version() or "",
        prefix_caching=vllm_config.cache_config.enable_prefix_caching,
        multimodal=vllm_config.model_config.is_multimodal_model,
        speculates=vllm_config.speculative_config is not None,
        keeps_sessions=granted(Feature.SESSIONS)
        and (vllm_config.speculative_config is None or check_supported() >= (0, 33, 0)),
        draft_lookahead=_draft_lookahead(vllm_config),
        in_flight=_in_flight(vllm_config),
        states_within_steps=any(saves_states_within_steps(theirs[g]) for g in ids),
        config=vllm_config,
    )


def _short(engine_id: str) -> str:
    """Messages carry names that begin with it, and have at most 256 characters."""
    if len(engine_id) <= MAX_ENGINE_ID:
        return engine_id
    digest = hashlib.blake2b(engine_id.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{engine_id[: MAX_ENGINE_ID - len(digest) - 1]}.{digest}"


def _in_flight(vllm_config: Any) -> InFlight:
    """vLLM has at most a step more under way than there are pipeline stages (its ``max_concurrent_batches``)."""
    steps, speculative = vllm_config.parallel_config.pipeline_parallel_size + 1, vllm_config.speculative_config
    drafts = 0 if speculative is None else speculative.num_speculative_tokens or 0
    return InFlight(steps * vllm_config.scheduler_config.max_num_batched_tokens, drafts)


def _draft_lookahead(vllm_config: Any) -> int:
    """EAGLE, MTP and their like combine the target's state at a position with the token behind it; chained MTP modules
    with a token more each. vLLM's own prefix cache drops the last block of a hit for it."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle():
        return 0
    ahead: int | None = value(vllm_config, "VllmConfig.num_prefill_lookahead_tokens")
    if ahead is None:  # as vLLM's scheduler does
        chained = value(speculative, "SpeculativeConfig.use_multi_module_mtp")()
        ahead = speculative.num_speculative_tokens if chained else 1
    return max(0, ahead - trials.hash_lookahead(vllm_config)) if granted(Feature.HANDOFFS) else ahead


def _supports_partial_prefix(vllm_config: Any) -> bool:
    """vLLM's MLA attends to earlier tokens in a prefill only with chunked prefill; without it, *silently* not at all.
    CPUs without AMX never have it. A single token is a decode step and always right."""
    mla = vllm_config.model_config is not None and vllm_config.model_config.use_mla
    return not mla or bool(vllm_config.scheduler_config.enable_chunked_prefill)


def _supports_sync_load(vllm_config: Any, groups: list[CacheGroup]) -> bool:
    """Engines in lockstep with others (data parallel ranks, stages of a pipeline) would make those wait too. With
    drafts a request has one state more for each."""
    parallel = vllm_config.parallel_config
    together = parallel.data_parallel_size > 1 or parallel.pipeline_parallel_size > 1
    states = not all(group.kind.by_position for group in groups)
    if together or (states and vllm_config.speculative_config is not None):
        return False
    return bool(groups) and _supports_partial_prefix(vllm_config) and granted(Feature.SYNC_LOADS)


def _unsupported(vllm_config: Any, kv_cache_config: Any) -> str | None:
    if sleep.possible(vllm_config) and (reason := sleep.unsupported_reason(vllm_config)):
        return reason
    if not kv_cache_config.kv_cache_groups:
        return "this model has no KV cache"
    if (device := vllm_config.device_config.device_type) not in ("cuda", "cpu"):
        return f"KV caches of device type {device} are not supported: KV is neither pulled, stored nor loaded"
    # vLLM before 0.31 refuses this with any connector; later ones end when they lack a block's.
    if (extra := value(vllm_config, "VllmConfig.aux_output_config")) is not None and extra.enabled:
        return "routed experts are returned, which KV from elsewhere lacks: KV is neither pulled, stored nor loaded"
    # Preempted requests leave blocks in its prefix cache that were never computed.
    if vllm_config.scheduler_config.policy == "priority" and not granted(Feature.PRIORITIES):
        return f"requests have priorities ({refused(Feature.PRIORITIES)}): KV is neither pulled, stored nor loaded"
    parallel = vllm_config.parallel_config
    # When ranks come or go, vLLM captures graphs, those of a new engine after its scheduler was made.
    if parallel.enable_elastic_ep:
        return "graphs are captured while it serves (--enable-elastic-ep): KV is neither pulled, stored nor loaded"
    # What a failed step should have written is not there, and would be stored.
    if value(parallel, "ParallelConfig.enable_fault_tolerance"):
        return "steps may fail (--enable-fault-tolerance): KV is neither pulled, stored nor loaded"
    # Each would hear of only its own rank, and of answers at another time: ranks must schedule alike.
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        return "each rank has a scheduler (external_launcher): KV is neither pulled, stored nor loaded"
    # vLLM gets results of the last stage's ranks only, and waits for those of all: no load would ever end.
    ray_v2 = environment_variables.get("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", lambda: True)()  # up to 0.32
    if parallel.distributed_executor_backend == "ray" and parallel.pipeline_parallel_size > 1 and not ray_v2:
        return (
            "pipeline stages report no loads (VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0): KV is neither pulled, stored nor "
            "loaded"
        )
    ids = followed(kv_cache_config)
    if not ids:
        return "vLLM keeps no prefixes of this model's KV cache: KV is neither pulled, stored nor loaded"
    try:
        theirs = [kv_cache_config.kv_cache_groups[g] for g in ids]
        refuse_context(vllm_config.parallel_config, theirs)
        groups = [cache_group(group) for group in theirs]
    except UnsupportedLayout as error:
        return f"{error}: KV is neither pulled, stored nor loaded"
    if not all(group.kind.by_position for group in groups) and not granted(Feature.STATES):
        return f"states are not supported ({refused(Feature.STATES)}): KV is neither pulled, stored nor loaded"
    whole = all(group.kind.whole_prefix for group in groups)
    by_request = len(kv_cache_config.kv_cache_groups) > 1 or not whole or not _supports_partial_prefix(vllm_config)
    if by_request and not granted(Feature.GROUPS):
        return f"a failed load could not be recomputed ({refused(Feature.GROUPS)})"
    return _whole_prompts(vllm_config, not any(group.kind.by_position for group in groups))


def _whole_prompts(vllm_config: Any, only_states: bool = False) -> str | None:
    """Why this engine must compute each prompt as a whole; None if it need not. vLLM hashes blocks for any connector,
    even if it disabled its own prefix cache because continuing from a prefix would be wrong.

    vLLM computes prompts in chunks only if all of the model's attention is causal and nothing needs the whole prompt at
    once. On CPUs MLA's backends cannot, though the model could: see ``_supports_partial_prefix``.

    only_states: vLLM caches prefixes of models without attention if a flag asks for it.
    """
    model, caching = vllm_config.model_config, vllm_config.cache_config.enable_prefix_caching
    if not (model.is_prefix_caching_supported or (only_states and caching)):
        why = "vLLM does not support prefix caching for this model or its kind of pooling"
    elif caching:
        return None
    elif model.runner_type != "generate":
        why = "prefix caching is off"
    elif not model.use_mla and not vllm_config.scheduler_config.enable_chunked_prefill:
        why = "prefix caching and chunked prefill are off, as for attention that is not causal"
    else:
        return None
    return f"{why}: KV is neither pulled, stored nor loaded"
