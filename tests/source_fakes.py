"""The contexts and sources of an engine that a test plays, with fakes for what the test does not name."""

from types import SimpleNamespace

from cache_groups import cache_groups
from support import Uncontained
from vllm.utils.hashing import get_hash_fn_by_name

from vllm_kvtier.cache_kinds import InFlight
from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.context import BlockGeometry, EngineContext, LoadContext
from vllm_kvtier.scheduler.engine_identity import EngineIdentity
from vllm_kvtier.scheduler.integrity.checksum_index import ChecksumIndex, ContentKeys
from vllm_kvtier.scheduler.integrity.load_results import LoadResults
from vllm_kvtier.scheduler.integrity.sync_load import SyncLoad
from vllm_kvtier.scheduler.matching.request_matcher import RequestMatcher
from vllm_kvtier.scheduler.planner.load_planner import LoadPlanner
from vllm_kvtier.scheduler.sources.peer_gpu import PeerGpuSource
from vllm_kvtier.scheduler.sources.prefill_handoff import PrefillHandoffSource
from vllm_kvtier.scheduler.sources.retained_blocks import RetainedBlocksSource
from vllm_kvtier.scheduler.sources.slot_layout import NamespaceIds
from vllm_kvtier.telemetry.stats import Counters

ALL_BLOCKS = 1 << 60  # of a pool that no request has blocks of


def load_context(
    groups,
    hash_block_size,
    peers=None,
    *,
    config=None,
    keys=None,
    counters=None,
    planner=None,
    sync_load=None,
    checksum_index=None,
    pool=None,
    reactor=None,
    identity=(),
    info=(),
    retained_blocks=lambda: 0,
    pinned_blocks=lambda: 0,
    draft_blocks=lambda: 0,
):
    """``identity``, ``info``: what differs from an engine of one rank at ("me", 9)."""
    groups, keys = cache_groups(groups), keys or ContentKeys(3)
    planner = planner or LoadPlanner({"host": 1e9, "peer_gpu": 1e9})
    engine = {"address": ("me", 9), "instance": "ours/1", "content_keys": lambda: keys, "bytes_for": lambda tokens: 0}
    engine["content_keys_of"] = lambda size: keys if size in (0, hash_block_size) else ContentKeys(size)
    facts = {
        "groups": groups, "full_groups": [0], "world_size": 1, "engine_id": "engine", "release": "1",
        "supports_partial_prefix": True, "unsupported": None, "hash_lookahead": 0, "step_tokens": 0,
        "whole_blocks": False, "speculates": False, "states_within_steps": False, "prefix_caching": True,
        "draft_lookahead": 0,
        "hash_function": lambda: get_hash_fn_by_name("sha256_cbor"), "in_flight": InFlight(), **dict(info),
    }  # fmt: skip
    return LoadContext(
        EngineContext(
            config or KVTierConfig(),
            SimpleNamespace(**facts),
            BlockGeometry(groups, hash_block_size, facts["whole_blocks"], facts["draft_lookahead"], facts["in_flight"]),
            pool
            or SimpleNamespace(
                free_count=lambda: 1 << 60, cached_about=lambda *_: 0, is_unused=lambda pinned: pinned == ALL_BLOCKS,
                num_blocks=1 << 60,
            ),
            counters or Counters(),
            reactor,
            SimpleNamespace(**{**engine, **dict(identity)}),
        ),
        planner,
        checksum_index or ChecksumIndex([size for size, _ in groups]),
        peers,
        sync_load or SyncLoad(0.0, 60.0, None, lambda: None, None, planner),
        NamespaceIds(),
        retained_blocks,
        pinned_blocks,
        draft_blocks,
    )


def bare_identity(instance="e/0", namespace=None, wire_codec="raw"):
    """An EngineIdentity whose weights' files are not read; its workers have not reported yet."""
    identity = EngineIdentity.__new__(EngineIdentity)
    identity._info = SimpleNamespace(engine_id=instance.partition("/")[0], unsupported=None)
    identity.instance, identity.namespace, identity.wire_codec = instance, namespace, wire_codec
    identity.codec, identity.address = "raw", ("here", 1)
    identity.described, identity.ranks, identity.wire_codecs = {}, {}, {}
    identity.resolve_namespace = lambda: None
    return identity


def all_sources(load, store=None):
    """As the scheduler side lists them."""
    peer_gpu = store.peer_gpu if store is not None else PeerGpuSource(load)
    sources = PrefillHandoffSource(load), store, peer_gpu, RetainedBlocksSource(load)
    return [source for source in sources if source is not None]


def make_matcher(load, store=None):
    return RequestMatcher(load, all_sources(load, store))


def load_results(load, matcher, contain=None, *, prompts_since=lambda moment: False, codec="raw"):
    step_timer = SimpleNamespace(prompts_since=prompts_since)
    return LoadResults(load, matcher, step_timer, contain or Uncontained(), lambda kind: codec)


def source_of(matcher, name):
    (found,) = (source for source in matcher._source_selector.sources if source.name == name)
    return found
