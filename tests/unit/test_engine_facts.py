"""What an engine can and must not do, read from vLLM's own configurations."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cache_groups import cache_groups
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, PoolerConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.envs import environment_variables
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.scheduler.engine_identity import EngineIdentity
from vllm_kvtier.store.protocol import Present, decode_request, encode
from vllm_kvtier.vllm_compat.engine_info import _draft_lookahead, _whole_prompts, engine_info
from vllm_kvtier.vllm_compat.probe import features, trials

BLOCK = 32
SHAPE = dict(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
FULL, MLA = FullAttentionSpec(**SHAPE), MLAAttentionSpec(**SHAPE)
WIDE = FullAttentionSpec(**{**SHAPE, "head_size": 16})


def cache(*specs) -> KVCacheConfig:
    return KVCacheConfig(40, [], [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)])


@pytest.fixture
def configure(root):
    """Makes vLLM's configuration of an engine with the demo model."""

    def make(caching=True, chunked=True, pooling=None, role="kv_both", policy="fail", extra=None):
        pooler = None if pooling is None else PoolerConfig(seq_pooling_type=pooling)
        runner = {} if pooling is None else {"runner": "pooling", "convert": "embed", "pooler_config": pooler}
        model = str(root / "models" / "recall-6m")
        return VllmConfig(
            model_config=ModelConfig(
                model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=1024, **runner
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=caching),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=1024, is_encoder_decoder=False,
                enable_chunked_prefill=chunked,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVTierConnector", kv_connector_module_path="vllm_kvtier.connector", kv_role=role,
                kv_load_failure_policy=policy, kv_connector_extra_config=extra or {},
            ),
        )  # fmt: skip

    return make


@pytest.mark.parametrize(
    ("options", "works"),
    [
        ({}, True),
        ({"pooling": "LAST"}, True),
        ({"pooling": "LAST", "caching": False}, False),
        ({"pooling": "MEAN", "caching": False, "chunked": False}, False),
        ({"pooling": "CLS", "caching": False, "chunked": False}, False),
        ({"pooling": "MEAN", "caching": True}, False),  # if the user sets it
        ({"caching": False, "chunked": False}, False),  # as vLLM sets it for attention that is not causal
    ],
)
def test_engine_info_whole_prompt_pooling_is_unsupported(configure, options, works):
    unsupported = engine_info(configure(**options), cache(FULL)).unsupported
    assert (unsupported is None) == works, unsupported


def test_engine_info_with_returned_routed_experts_is_unsupported(configure):
    """vLLM's worker raises for a block whose tokens it has not computed: a hit in a store ended the engine."""
    config = configure()
    config.aux_output_config = SimpleNamespace(enabled=True)
    assert "routed experts" in engine_info(config, cache(FULL)).unsupported


def test_engine_info_with_elastic_expert_parallelism_is_unsupported(configure):
    """vLLM captures CUDA graphs when ranks come or go: a capture fails if a worker's other thread uses the device."""
    config = configure()
    config.parallel_config.enable_elastic_ep = True
    assert "elastic-ep" in engine_info(config, cache(FULL)).unsupported


def test_engine_info_with_fault_tolerance_is_unsupported(configure):
    """After a failed step vLLM goes on: what that should have written would be stored with the next one."""
    config = configure()
    config.parallel_config.enable_fault_tolerance = True
    assert "fault-tolerance" in engine_info(config, cache(FULL)).unsupported


def test_engine_info_with_a_group_in_host_memory_is_unsupported(configure):
    """A value of later releases: its workers have no such blocks on the device."""
    caches = cache(FULL)
    caches.kv_cache_groups[0].host_resident = True
    assert "HiSparse" in engine_info(configure(), caches).unsupported


@pytest.mark.parametrize(("ranks", "works"), [(1, True), (2, False)])
def test_engine_info_with_a_scheduler_for_each_rank_is_unsupported(configure, ranks, works):
    """They schedule alike only if nothing depends on when an answer arrives."""
    config = configure()
    config.parallel_config.distributed_executor_backend = "external_launcher"
    config.parallel_config.world_size = ranks
    unsupported = engine_info(config, cache(FULL)).unsupported
    assert (unsupported is None) == works, unsupported


@pytest.mark.parametrize(("stages", "v2", "works"), [(1, "0", True), (2, "1", True), (2, "0", False)])
def test_engine_info_with_stages_of_ray_dag_is_unsupported(configure, monkeypatch, stages, v2, works):
    """vLLM reads results of the last stage, and waits for a load until as many ranks as there are have ended it."""
    name = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
    monkeypatch.setenv(name, v2)
    config = configure()
    config.parallel_config.distributed_executor_backend = "ray"
    config.parallel_config.pipeline_parallel_size = stages
    unsupported = engine_info(config, cache(FULL)).unsupported
    assert (unsupported is None) == (works or name not in environment_variables), unsupported


def test_engine_info_without_prefix_caching_keeps_handoffs_only(configure):
    facts = engine_info(configure(caching=False), cache(FULL))
    assert facts.unsupported is None and not facts.prefix_caching
    left = KVTierConfig(bidirectional=True, store_nodes="127.0.0.1:9").without_prefixes()
    assert (left.store, left.store_nodes, left.bidirectional) == ("off", "", False)
    assert engine_info(configure(), cache(FULL)).prefix_caching


def test_engine_info_of_mla_on_cpu_keeps_handoffs(configure):
    """vLLM turns both off there because its CPU backend cannot go on from a prefix; a whole prompt can be read."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=True, runner_type="generate", is_prefix_caching_supported=True),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=False),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
    )
    assert _whole_prompts(config) is None


def test_engine_info_windows_kept_as_full_attention_have_no_window(configure):
    """As without vLLM's hybrid manager: the spec names the window, and all blocks are kept."""
    unified = FullAttentionSpec(**SHAPE, sliding_window=80)
    facts = engine_info(configure(), cache(unified, SlidingWindowSpec(**SHAPE, sliding_window=80)))
    assert facts.groups == cache_groups([(BLOCK, None), (BLOCK, 80)]) and facts.full_groups == [0]
    assert not facts.unsupported


@pytest.mark.parametrize("specs", [[FULL, MLA], [FULL, WIDE]], ids=["kinds", "sizes"])
def test_engine_info_of_uniform_type_group_uses_its_layers(configure, specs):
    """Workers get these; the scheduler gets one of the layers'."""
    uniform = UniformTypeKVCacheSpecs(
        block_size=BLOCK, kv_cache_specs={f"layer {i}": spec for i, spec in enumerate(specs)}
    )
    facts = engine_info(configure(), cache(uniform))
    assert facts.groups == cache_groups([(BLOCK, None)]) and facts.full_groups == [0] and not facts.unsupported


class UnknownSpec(FullAttentionSpec):
    """Of a vLLM yet to come: its bytes may mean anything."""


@pytest.mark.parametrize("specs", [(), (UnknownSpec(**SHAPE),), (FULL, UnknownSpec(**SHAPE))])
def test_engine_info_of_unknown_cache_is_unsupported(configure, specs):
    unsupported = engine_info(configure(), cache(*specs)).unsupported
    assert ("UnknownSpec" if specs else "no KV cache") in unsupported


class RingSpec(FullAttentionSpec):
    """What a request collects: no prefix is kept of it, and no kind describes it."""

    prefix_cacheable = False


def test_engine_info_leaves_groups_without_prefixes_out(configure):
    window = SlidingWindowSpec(**SHAPE, sliding_window=80)
    facts = engine_info(configure(), cache(RingSpec(**SHAPE), FULL, window))
    assert not facts.unsupported and facts.whole_blocks, "its ring would have to go with a request"
    assert facts.groups == cache_groups([(BLOCK, None), (BLOCK, 80)])
    assert (facts.group_ids, facts.full_groups, facts.num_groups) == ([1, 2], [0], 3)
    assert facts.followed(([7], [8], [9])) == ([8], [9]) and list(facts.left_out(([7], [8], [9]))) == [[7]]
    assert engine_info(configure(), cache(RingSpec(**SHAPE), FULL)).reports_failed_requests, "vLLM counts all groups"
    assert "no prefixes" in engine_info(configure(), cache(RingSpec(**SHAPE))).unsupported


def test_engine_info_leaves_copies_that_vllm_rebuilds_out(configure):
    config = cache(FULL, FULL)
    config.kv_cache_groups[0].enable_kv_transfer = False
    facts = engine_info(configure(), config)
    assert facts.group_ids == [1] and not facts.unsupported and not facts.whole_blocks


@pytest.mark.skipif(
    not hasattr(KVCacheConfig, "has_mixed_precision_kv_cache"), reason="before 0.27 vLLM clears blocks for states only"
)
@pytest.mark.parametrize("asks, mixed, whole", [(True, True, False), (False, True, True), (False, False, False)])
def test_engine_loads_whole_blocks_where_vllm_does_not_clear_the_last_one(configure, monkeypatch, asks, mixed, whole):
    """Up to 0.31 vLLM clears none of a load's blocks. Behind the load's end one of mixed precision may hold a NaN."""
    name, ask = "get_loaded_kv_cache_group_ids", lambda self, request: ()
    monkeypatch.setattr(KVConnectorBase_V1, name, ask, raising=False)
    if not asks:
        monkeypatch.delattr(KVConnectorBase_V1, name)
    other = SlidingWindowSpec(**SHAPE | ({"dtype": torch.bfloat16} if mixed else {}), sliding_window=80)
    assert engine_info(configure(), cache(FULL, other)).whole_blocks is whole


@pytest.mark.parametrize("alone", [False, True])
def test_engine_info_of_states_stores_without_pulls(configure, monkeypatch, alone):
    state = MambaSpec(block_size=BLOCK, shapes=((2, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")
    configuration = configure()
    if alone:  # vLLM caches prefixes of models without attention if a flag asks for it
        monkeypatch.setattr(ModelConfig, "is_prefix_caching_supported", False)
    facts = engine_info(configuration, cache(*([] if alone else [FULL]), state))
    assert not facts.unsupported and not facts.whole_blocks
    assert facts.full_groups == ([] if alone else [0])
    assert facts.reports_failed_requests, "no request goes on behind a state that is missing"
    if hasattr(state, "num_prefill_checkpoint_blocks"):
        within = replace(state, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=8)
        saved = [engine_info(configuration, cache(FULL, each)).states_within_steps for each in (state, within)]
        assert saved == [False, True], "a prompt's last state is saved by the step that computes it"
    none = MambaSpec(block_size=BLOCK, shapes=((2, 4),), dtypes=(torch.float32,), mamba_cache_mode="none")
    assert "mamba_cache_mode none" in engine_info(configure(), cache(FULL, none)).unsupported


@pytest.mark.skipif(not features.granted(features.Feature.SYNC_LOADS), reason="this vLLM's forward waits for no load")
def test_engine_whose_steps_wait_for_loads(configure, monkeypatch):
    """Of any number of groups. Not where drafts take a state each, and not among engines in lockstep."""
    state = MambaSpec(block_size=BLOCK, shapes=((2, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")
    window = SlidingWindowSpec(**SHAPE, sliding_window=80)
    for groups in ([FULL], [FULL, window], [FULL, state]):
        configuration = configure()
        assert engine_info(configuration, cache(*groups)).supports_sync_load
        configuration.speculative_config = SimpleNamespace(num_speculative_tokens=2, use_eagle=lambda: False)
        assert engine_info(configuration, cache(*groups)).supports_sync_load == (state not in groups)
        configuration.speculative_config, configuration.parallel_config.data_parallel_size = None, 2
        assert not engine_info(configuration, cache(*groups)).supports_sync_load
        configuration.parallel_config.data_parallel_size = 1


def test_engine_info_of_states_needs_a_release_that_stops_at_the_end_of_a_block(configure, monkeypatch):
    """vLLM 0.25.1 computes past it from within a block, and names the state of another length as that of the block."""
    state = MambaSpec(block_size=BLOCK, shapes=((2, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")
    for release, refused in (((0, 31, 0), True), ((0, 32, 0), False)):
        monkeypatch.setattr(features, "release", lambda release=release: release)
        monkeypatch.setattr(features, "_results", {})
        why = engine_info(configure(), cache(FULL, state)).unsupported
        assert ("layout of states: it needs vLLM 0.32.0 or later" in why) if refused else (why is None)
        assert not refused or not features.granted(features.Feature.LOCAL_HITS)
        assert not engine_info(configure(), cache(FULL)).unsupported


@pytest.mark.parametrize("size", [1, 4])  # of dense models, whose ranks vLLM makes independent; of experts
def test_engine_info_tells_data_parallel_ranks_apart(configure, size):
    config = configure()
    parallel = config.parallel_config
    parallel.data_parallel_size, parallel.data_parallel_index = size, 3
    parallel.data_parallel_rank = 3 if size > 1 else 0
    assert engine_info(config, cache(FULL)).data_parallel_rank == 3, "each listens on a port of its own"


@pytest.mark.parametrize(("method", "chained", "hashed", "ahead"), [
    (None, 0, 0, 0), ("ngram", 0, 0, 0), ("draft_model", 0, 0, 0), ("eagle", 1, 0, 1), ("mtp", 3, 0, 3),
    ("mtp", 3, 1, 2), ("eagle", 1, 1, 0),
])  # fmt: skip
def test_engine_info_draft_lookahead_is_what_hashes_leave_out(configure, monkeypatch, method, chained, hashed, ahead):
    config = configure()
    if method is not None:
        drafts = method in ("eagle", "mtp")
        config.speculative_config = SimpleNamespace(use_eagle=lambda: drafts, method=method, num_speculative_tokens=3)
    monkeypatch.setattr(type(config), "num_prefill_lookahead_tokens", chained, raising=False)
    monkeypatch.setattr(trials, "hash_lookahead", lambda config: hashed)
    facts = engine_info(config, cache(FULL))
    assert (facts.draft_lookahead, facts.speculates) == (ahead, method is not None)
    steps = config.scheduler_config.max_num_batched_tokens
    assert facts.in_flight.tokens >= getattr(config, "max_in_flight_tokens", steps), "vLLM's own, since 0.31"
    assert facts.in_flight.drafts == (3 if method else 0)


@pytest.mark.parametrize(("release", "method", "layers", "ahead"), [
    ((0, 30, 0), "eagle", 1, 1), ((0, 30, 0), "mtp", 1, 1), ((0, 30, 0), "mtp", 2, 3), ((0, 27, 0), "mtp", 2, 3),
    ((0, 26, 0), "mtp", 2, 1), ((0, 25, 1), "eagle", 1, 1),
])  # fmt: skip
def test_engine_info_draft_lookahead_of_chained_modules_where_only_vllm_s_scheduler_knows_it(
    configure, monkeypatch, release, method, layers, ahead
):
    """Up to vLLM 0.30, whose configuration has no such property; up to 0.26 no modules are chained."""
    config = configure()
    draft = {"use_eagle": lambda: True, "method": method, "num_speculative_tokens": 3}
    if release >= (0, 27, 0):
        draft["use_multi_module_mtp"] = lambda: min(layers, 3) > 1
    config.speculative_config = SimpleNamespace(**draft)
    monkeypatch.delattr(type(config), "num_prefill_lookahead_tokens", raising=False)
    monkeypatch.setattr(features, "release", lambda: release)
    monkeypatch.setattr(trials, "hash_lookahead", lambda config: 0)
    assert _draft_lookahead(config) == ahead


@pytest.mark.parametrize(
    "drafts, release, hashes, keeps",
    [
        (True, "0.32.0", True, False), (True, "0.33.0", True, True), (False, "0.32.0", True, True),
        (False, "0.31.0", False, False), (True, "0.34.0", False, False),
    ],
)  # fmt: skip
def test_engine_info_keeps_sessions_whose_hashes_follow_and_no_drafts_or_from_vllm_0_33(
    configure, monkeypatch, drafts, release, hashes, keeps
):
    """``hashes``: whether vLLM drops the hash of a token that the next input replaces."""
    config, row = configure(), next(row for row in features.rows() if row.feature is features.Feature.SESSIONS)
    state = features.State.OK if hashes else features.State.ABSENT
    monkeypatch.setitem(features._results, row.name, features.Result(row, state))
    if drafts:
        config.speculative_config = SimpleNamespace(use_eagle=lambda: False, method="ngram", num_speculative_tokens=3)
    monkeypatch.setattr("vllm_kvtier.vllm_compat.version.installed_version", lambda: release)
    assert engine_info(config, cache(FULL)).keeps_sessions is keeps


def test_engine_info_of_all_groups_names_no_ids(configure):
    facts, blocks = engine_info(configure(), cache(FULL, FULL)), ([1], [2])
    assert facts.group_ids is None and facts.followed(blocks) is blocks and list(facts.left_out(blocks)) == []


def test_engine_info_shortens_an_engine_id_that_no_message_could_carry(configure):
    config, others = configure(), configure()
    config.kv_transfer_config.engine_id, others.kv_transfer_config.engine_id = 600 * "e" + "1", 600 * "e" + "2"
    facts, other = engine_info(config, cache(FULL)), engine_info(others, cache(FULL))
    assert facts.engine_id != other.engine_id and facts.engine_id[:150] == 150 * "e"
    instance = EngineIdentity(KVTierConfig(), facts, 16, True, lambda: None).instance
    decode_request(encode(Present(bytes(8), "127.0.0.1", 7100, instance)))
    config.kv_transfer_config.engine_id = "prefill-0"
    assert engine_info(config, cache(FULL)).engine_id == "prefill-0"


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"store": "off", "store_disk_path": "/d", "store_write": "prompt"}, "off); without effect: store_write, "),
        ({"store": "/run/store.sock", "store_size": "1GiB", "store_write": "prompt"}, "without effect: store_size"),
        ({"store": "/run/store.sock", "store_write": "prompt"}, None),
        ({"store_size": "1GiB"}, None),
    ],
)
def test_connector_names_options_without_effect(configure, caplog, monkeypatch, extra, named):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level("WARNING", "vllm.kvtier"):
        KVTierConnector(configure(extra=extra), KVConnectorRole.SCHEDULER, cache(FULL))
    lines = [each.getMessage() for each in caplog.records if "without effect" in each.getMessage()]
    assert len(lines) == (named is not None) and all(named in line for line in lines)


@pytest.mark.parametrize(("role", "required"), [("kv_both", False), ("kv_consumer", False), ("kv_producer", True)])
def test_connector_requires_kv_delivery_on_producer_only(configure, role, required):
    connector = KVTierConnector(configure(role=role), KVConnectorRole.WORKER, cache(FULL))
    assert connector.requires_kv_delivery is required


@pytest.mark.parametrize(
    ("theirs", "ours", "said"), [("fail", "recompute", 1), ("fail", "fail", 0), ("recompute", "recompute", 0)]
)
def test_connector_setting_failure_policy_is_logged(configure, caplog, monkeypatch, theirs, ours, said):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    config = configure(policy=theirs, extra={"kv_load_failure_policy": ours})
    with caplog.at_level("INFO", "vllm.kvtier"):
        KVTierConnector(config, KVConnectorRole.SCHEDULER, cache(FULL))
    assert config.kv_transfer_config.kv_load_failure_policy == ours
    lines = [record.getMessage() for record in caplog.records if "kv_load_failure_policy" in record.getMessage()]
    assert len(lines) == said and all("kv_connector_extra_config" in line for line in lines)


def test_devices_other_than_nvidias_and_cpus_are_refused_in_words(configure):
    """Host code read their tensors, and each worker logged two tracebacks."""
    config = configure()
    assert not engine_info(config, cache(FULL)).unsupported
    config.device_config.device_type = "xpu"
    assert "device type xpu" in engine_info(config, cache(FULL)).unsupported


@pytest.mark.parametrize("sizes", [{"decode_context_parallel_size": 2}, {"prefill_context_parallel_size": 2}])
def test_engine_with_context_parallelism_has_virtual_blocks_and_takes_no_windows_or_states(configure, sizes):
    config = configure()
    for name, value in sizes.items():
        setattr(config.parallel_config, name, value)
    facts = engine_info(config, cache(MLA))
    dcp = sizes.get("decode_context_parallel_size", 1)
    assert not facts.unsupported and facts.groups[0].block_tokens == BLOCK * dcp
    assert facts.world_size == sizes.get("prefill_context_parallel_size", 1)
    whole, window = replace(FULL, dcp_sharded=False), SlidingWindowSpec(**SHAPE, sliding_window=80)
    for spec in (whole, window, replace(MLA, tokens_per_state=4)):
        unsupported = engine_info(config, cache(FULL, spec)).unsupported or ""
        assert ("decode context parallelism does not work with" in unsupported) == (dcp > 1)
        assert dcp > 1 or not unsupported


def test_context_parallelism_needs_vllm_0_32(configure, monkeypatch):
    """Before it, PCP made blocks larger too."""
    config = configure()
    config.parallel_config.decode_context_parallel_size = 2
    monkeypatch.setattr(features, "release", lambda: (0, 31, 0))
    monkeypatch.setattr(features, "_results", {})
    unsupported = engine_info(config, cache(MLA)).unsupported
    assert "virtual blocks: it needs vLLM 0.32.0 or later" in unsupported


def test_namespaces_of_other_context_parallelism_differ_and_their_contents_do_not(configure):
    init_none_hash(sha256)
    found = []
    for dcp, pcp, interleave in ((1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 1, 32), (1, 2, 1)):
        config = configure()
        parallel = config.parallel_config
        parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size = dcp, pcp
        parallel.cp_kv_cache_interleave_size = interleave
        found.append(engine_info(config, cache(MLA)).namespace(BLOCK, "model"))
    assert len(set(found)) == len(found) and len({each.content() for each in found}) == 1
    assert not any(each.mismatch(other) for each in found for other in found)
