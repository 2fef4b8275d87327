"""What the scheduler half must know of the engine it runs in, read once from vLLM's configuration."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_kvtier import fingerprint
from vllm_kvtier.errors import UnsupportedLayout
from vllm_kvtier.vllm_compat import events, probe_trials, sleep
from vllm_kvtier.vllm_compat import namespace as ns
from vllm_kvtier.vllm_compat.layout import group_kind
from vllm_kvtier.vllm_compat.probe import Feature, granted, refused
from vllm_kvtier.vllm_compat.version import installed_version
from vllm_kvtier.wire.messages import Namespace


@dataclass
class EngineFacts:
    engine_id: str
    instance_id: str  # random for each start of the engine, equal in all its processes
    groups: list[tuple[int, int | None]]  # (block tokens, window) of each KV cache group
    full_groups: list[int]
    world_size: int
    tensor_parallel: int
    data_parallel_rank: int
    max_tokens: int  # longest prompt
    hash_lookahead: int
    step_tokens: int  # most tokens in a step
    link_bandwidth: float  # bytes/s to host memory, before any was measured
    resumes: bool  # whether several tokens can be computed on top of others that are in the cache already
    unsupported: str | None  # why this engine can neither pull, export, store nor load
    release: str  # of vLLM
    config: Any = field(repr=False)
    peer_bandwidth: float = 200e9  # bytes/s from another device of the node, before any was measured
    publishes: bool = False  # KV events
    kinds: list[tuple[str, int | None]] = field(default_factory=list)  # of groups, as vLLM's KV events name them
    waits: bool = False  # whether a step's forward can wait for a load, and be taken back if what came was wrong
    prefix_caching: bool = True  # vLLM's own; without, only a prefill that was promised to a request is read
    multimodal: bool = False  # an encoder's outputs are kept, too

    @property
    def fails_by_request(self) -> bool:
        """Whether a failed pull costs the whole request, not only the blocks from the first bad one on."""
        return len(self.groups) > 1 or not self.resumes

    def fingerprint(
        self, option: str | None, on_ready: Callable[[], object], before: Callable[[], object]
    ) -> ns.ModelFingerprint:
        """``option``: as the option model_fingerprint says."""
        return ns.ModelFingerprint(self.config, option, on_ready, before)

    def namespace(self, hash_block_tokens: int, fingerprint: str) -> Namespace:
        return ns.namespace(self.config, hash_block_tokens, fingerprint)

    def in_words(self, namespace: Namespace, fingerprint: str | None) -> list[tuple[str, str]]:
        """See ``namespace.in_words``."""
        return ns.in_words(self.config, namespace, fingerprint)

    def record_key(self) -> str | None:
        """By which `kvtier quality` keeps what it measured of this model; None without local files."""
        model = self.config.model_config
        return fingerprint.of_files(model.model, model.revision)

    def hash_function(self) -> Any:
        return ns.hash_function(self.config)


def engine_facts(vllm_config: Any, kv_cache_config: Any) -> EngineFacts:
    parallel = vllm_config.parallel_config
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    groups = [(spec.block_size, _window(spec)) for spec in specs]
    full = [g for g, (_, window) in enumerate(groups) if window is None]
    return EngineFacts(
        engine_id=vllm_config.kv_transfer_config.engine_id,
        instance_id=vllm_config.instance_id,
        groups=groups,
        full_groups=full,
        world_size=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
        tensor_parallel=parallel.tensor_parallel_size,
        data_parallel_rank=parallel.data_parallel_rank,
        max_tokens=vllm_config.model_config.max_model_len,
        hash_lookahead=_hash_lookahead(vllm_config),
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        link_bandwidth=_link_bandwidth(vllm_config),
        peer_bandwidth=1.5e9 if _on_cpu(vllm_config) else 200e9,
        resumes=_resumes(vllm_config),
        publishes=(publishes := events.enabled(vllm_config)),
        kinds=events.group_kinds(kv_cache_config) if publishes else [],
        waits=_waits(vllm_config, groups),
        unsupported=_unsupported(vllm_config, kv_cache_config),
        release=installed_version() or "",
        prefix_caching=vllm_config.cache_config.enable_prefix_caching,
        multimodal=vllm_config.model_config.is_multimodal_model,
        config=vllm_config,
    )


def _window(spec: Any) -> int | None:
    try:
        return group_kind(spec)[1]
    except UnsupportedLayout:
        return None  # ``_unsupported`` says why this engine does nothing


def _link_bandwidth(vllm_config: Any) -> float:
    """A guess: a core that copies and checks, or a PCIe 4 link."""
    return 1e9 if _on_cpu(vllm_config) else 20e9


def _on_cpu(vllm_config: Any) -> bool:
    return str(vllm_config.device_config.device_type) == "cpu"


def _hash_lookahead(vllm_config: Any) -> int:
    """Tokens behind a block that its hash covers; some, where this vLLM does not tell."""
    return probe_trials.hash_lookahead(vllm_config) if granted(Feature.HANDOFFS) else 1


def _resumes(vllm_config: Any) -> bool:
    """vLLM's MLA attends to earlier tokens in a prefill only with chunked prefill, and without it *silently* not at
    all; on CPUs without AMX it always is without. A single token is a decode step and right either way."""
    mla = vllm_config.model_config is not None and vllm_config.model_config.use_mla
    return not mla or bool(vllm_config.scheduler_config.enable_chunked_prefill)


def _waits(vllm_config: Any, groups: list[tuple[int, int | None]]) -> bool:
    """vLLM takes bad blocks back only from models with one KV cache group. Engines that keep step with others (data
    parallel ranks, stages of a pipeline) would make those wait too."""
    parallel = vllm_config.parallel_config
    together = parallel.data_parallel_size > 1 or parallel.pipeline_parallel_size > 1
    single = len(groups) == 1 and groups[0][1] is None
    return single and not together and _resumes(vllm_config) and granted(Feature.SYNC_LOADS)


def _unsupported(vllm_config: Any, kv_cache_config: Any) -> str | None:
    parallel = vllm_config.parallel_config
    for name, words in (
        ("decode_context_parallel_size", "decode context parallelism"),
        ("prefill_context_parallel_size", "prefill context parallelism"),
    ):
        if getattr(parallel, name) > 1:
            return f"{words} spreads a block over ranks: nothing is pulled, stored or loaded"
    if sleep.possible(vllm_config) and (reason := sleep.untold(vllm_config)):
        return reason
    if not kv_cache_config.kv_cache_groups:
        return "this model keeps no KV"
    for group in kv_cache_config.kv_cache_groups:
        try:
            kind, _ = group_kind(group.kv_cache_spec)
        except UnsupportedLayout as error:
            return f"{error}: nothing is pulled, stored or loaded"
        if kind == "chunked":
            return "chunked local attention is not supported: nothing is pulled, stored or loaded"
    by_request = len(kv_cache_config.kv_cache_groups) > 1 or not _resumes(vllm_config)
    if by_request and not granted(Feature.GROUPS):
        return f"a failed load could not be computed again ({refused(Feature.GROUPS)})"
    return _whole_prompts(vllm_config)


def _whole_prompts(vllm_config: Any) -> str | None:
    """Why this engine has to compute each prompt as a whole, if it has to. vLLM hashes blocks for any connector, also
    where it switched its own prefix cache off because going on from a prefix would be wrong.

    vLLM computes prompts in pieces only where all of the model's attention is causal and nothing needs the whole prompt
    at once. It is MLA's backends, not the model, that cannot on CPUs: see ``_resumes``.
    """
    model, caching = vllm_config.model_config, vllm_config.cache_config.enable_prefix_caching
    if not model.is_prefix_caching_supported:
        why = "vLLM does not support prefix caching for this model or its kind of pooling"
    elif caching:
        return None
    elif model.runner_type != "generate":
        why = "prefix caching is off"
    elif not model.use_mla and not vllm_config.scheduler_config.enable_chunked_prefill:
        why = "prefix caching and chunked prefill are off, as for attention that is not causal"
    else:
        return None
    return f"{why}: nothing is pulled, stored or loaded"
