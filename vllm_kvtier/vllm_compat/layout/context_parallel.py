"""Context parallelism: which tokens of a block a rank holds.

Decode context parallelism (DCP) of size n makes *virtual* blocks of n * block_size tokens. vLLM's scheduler, its block
tables and its hashes count those. A rank holds of each the runs of ``interleave`` tokens with numbers k, k + n, k + 2n
and so on, one after another in its page: the rule of vLLM's ``v1/worker/gpu/block_table.py``. Prefill context
parallelism (PCP) alone repeats all KV on its ranks.
"""

from typing import Any, NamedTuple

import msgspec

from vllm_kvtier.errors import UnsupportedLayout
from vllm_kvtier.vllm_compat.layout.groups import cache_kind, layer_specs
from vllm_kvtier.vllm_compat.probe.features import granted, refused, value
from vllm_kvtier.vllm_compat.probe.row import Feature
from vllm_kvtier.wire.geometry import Region


class ContextShard(NamedTuple):
    """``rank`` of ``size`` DCP ranks; ``interleave``: tokens of a run. Each virtual block is ``size`` pages."""

    size: int = 1
    rank: int = 0
    interleave: int = 1


WHOLE = ContextShard()


def context_shard(parallel_config: Any) -> ContextShard:
    """Of this worker. On the model runner's thread."""
    if parallel_config.decode_context_parallel_size == 1:
        return WHOLE
    from vllm.distributed.parallel_state import get_dcp_group

    group = get_dcp_group()
    return ContextShard(group.world_size, group.rank_in_group, parallel_config.cp_kv_cache_interleave_size)


def describe_context(parallel_config: Any) -> str:
    """For the namespace; "" without context parallelism."""
    dcp, pcp = parallel_config.decode_context_parallel_size, parallel_config.prefill_context_parallel_size
    if dcp == pcp == 1:
        return ""
    return f"DCP {dcp}, PCP {pcp}, interleave {parallel_config.cp_kv_cache_interleave_size}"


def refuse_context(parallel_config: Any, groups: list[Any]) -> None:
    """Raises UnsupportedLayout if there is context parallelism, and vLLM or a group of the cache cannot."""
    if not describe_context(parallel_config):
        return
    if not granted(Feature.CONTEXT_PARALLEL):
        raise UnsupportedLayout(f"context parallelism: {refused(Feature.CONTEXT_PARALLEL)}")
    if parallel_config.decode_context_parallel_size > 1:
        for spec in (spec for group in groups for spec in layer_specs(group)):
            # Not those of states, windows and layers of drafts, whose blocks are not virtual.
            divided = cache_kind(spec).whole_prefix and spec.dcp_sharded
            if not divided or value(spec, "AttentionSpec.tokens_per_state") != 1:
                raise UnsupportedLayout(f"decode context parallelism does not work with {type(spec).__name__}")


def shard_region(region: Region, shard: ContextShard) -> Region:
    """``region`` of a rank's page, as if its tokens were a block, as the part of a virtual block that it is.

    A page of one run (interleave = block size) has consecutive tokens. Otherwise a cell is what the page has of
    ``cell_tokens`` tokens of the block, and only a rank with the same runs can read it.
    """
    size, rank, run = shard
    if size == 1:
        return region
    first = region.first_token * size + rank * run
    if run == region.block_tokens:
        return msgspec.structs.replace(region, first_token=first)
    longer, rest = divmod(run, region.cell_tokens)
    joined = max(1, longer)  # cells that become one
    if region.block_tokens % run or (rest if longer else region.cell_tokens % run):
        raise UnsupportedLayout(f"layer {region.layer}: runs of {run} tokens do not divide its pages")
    if joined > 1 and region.token_stride != region.inner:
        raise UnsupportedLayout(f"layer {region.layer}: the tokens of a run of {run} are not contiguous")
    tokens = region.tokens // joined
    return msgspec.structs.replace(
        region, first_token=first, tokens=tokens, token_stride=region.token_stride * joined if tokens > 1 else 0,
        inner=region.inner * joined, cell_tokens=max(run, region.cell_tokens) * size,
        packing=f"{region.packing or 'tokens'}, runs of {run} over {size} ranks", fields=(), separable=False,
    )  # fmt: skip
