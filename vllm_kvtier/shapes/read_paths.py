"""The paths by which one engine's ranks can read another's blocks.

* ``DIRECT``: NIXL copies the pages of one rank there into our pages, byte for byte. Both lie alike.
* ``MAPPED``: a peer copier reads the memory of the other processes, on the same node.
* ``STAGED``: NIXL reads whole blocks, as they lie there, into a ring of ours. A peer copier takes them from the ring.

The last two re-slice: they take the layers and heads that a rank of ours holds from all ranks there that have them,
and write them in our order of dimensions. Checksums are verified over the whole blocks of the ranks that are read.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.shapes.tp_mapping import map_source_ranks
from vllm_kvtier.wire.geometry import CacheGeometry, geometry_mismatch
from vllm_kvtier.wire.messages import HeadRange, RankInfo

ENCODED = "encoded "  # the packing of encoded rows begins with it


class ReadPath(enum.Enum):
    DIRECT = "direct"
    MAPPED = "mapped"
    STAGED = "staged"


@dataclass(frozen=True)
class Reach:
    """``paths``: those by which every rank of ours can read what it needs. ``reason``: why it is not DIRECT, or, if
    ``paths`` is empty, why there is none. ``by_kernels``: MAPPED is a kernel of the GPU, else copies of the processor.
    """

    paths: frozenset[ReadPath]
    reason: str = ""
    by_kernels: bool = False


def reach(ours: Sequence[RankInfo], theirs: Sequence[RankInfo]) -> Reach:
    """How the ranks ``ours`` of an engine can read another engine, whose ranks are ``theirs``."""
    if not ours or not theirs:
        return Reach(frozenset(), f"no ranks: {_shapes(ours, theirs)}")
    without_nixl = _without_nixl(ours, theirs)
    try:
        sources = _direct_sources(ours, theirs)
        reason = without_nixl
    except KVTierError as error:
        reason = str(error)
        if _is_encoded(ours, theirs):
            reason += " (with a wire_codec, engines of the same shape only can read each other)"
        if _is_opaque(ours, theirs):
            return Reach(frozenset(), reason)
        try:
            sources = _mapped_sources(ours, theirs)
        except KVTierError as cause:
            return Reach(frozenset(), str(cause))
    paths = set()
    if not reason:
        paths.add(ReadPath.DIRECT)
    if not _is_opaque(ours, theirs):
        if all(_on_one_node(info, sources[info.rank]) for info in ours):
            paths.add(ReadPath.MAPPED)
        if not without_nixl:
            paths.add(ReadPath.STAGED)
    by_kernels = ReadPath.MAPPED in paths and all(info.shared and info.shared.device for info in ours)
    return Reach(frozenset(paths), reason if paths else without_nixl or reason, by_kernels)


def direct_source(
    rank: int, geometry: CacheGeometry, heads: Sequence[HeadRange], theirs: Sequence[RankInfo]
) -> RankInfo:
    """The rank whose pages lie as those of our rank ``rank`` and hold the same layers and heads: the one with our
    number, or the next one. Raises KVTierError, with the reason, if there is none."""
    reason, count = "", len(theirs)
    for info in sorted(theirs, key=lambda info: (info.rank - rank) % count):
        mismatch = geometry_mismatch(geometry, info.geometry)
        # Without heads only the number says what a rank holds.
        same = tuple(info.heads) == tuple(heads) if info.heads and heads else info.rank == rank
        if mismatch is None and same:
            return info
        reason = reason or mismatch or f"rank {info.rank} there holds other KV heads than rank {rank} here"
    raise KVTierError(reason)


def _direct_sources(ours: Sequence[RankInfo], theirs: Sequence[RankInfo]) -> dict[int, list[RankInfo]]:
    if _is_opaque(ours, theirs) and {info.rank for info in ours} != {info.rank for info in theirs}:
        raise KVTierError(f"tensor or pipeline parallelism differs: {_shapes(ours, theirs)}")
    return {info.rank: [direct_source(info.rank, info.geometry, info.heads, theirs)] for info in ours}


def _mapped_sources(ours: Sequence[RankInfo], theirs: Sequence[RankInfo]) -> dict[int, list[RankInfo]]:
    """By our rank, the ranks that it reads a part of. Raises KVTierError if their pages cannot be re-sliced."""
    for info in theirs:
        if len(info.groups) != len(ours[0].groups):
            raise KVTierError(f"{len(ours[0].groups)} KV cache groups here, {len(info.groups)} there")
    return {
        info.rank: [part.source for part in map_source_ranks(info.groups, info.heads, info.rank, theirs)]
        for info in ours
    }


def _is_opaque(ours: Sequence[RankInfo], theirs: Sequence[RankInfo]) -> bool:
    """Whether the descriptions do not say which heads are where in a page."""
    return _is_encoded(ours, theirs) or not all(info.heads for info in (*ours, *theirs))


def _is_encoded(ours: Sequence[RankInfo], theirs: Sequence[RankInfo]) -> bool:
    """Whether a block is an opaque row with its checksum in it (``worker.nixl_pull.encoded_memory``)."""
    regions = (region for info in (*ours, *theirs) for group in info.groups for region in group.regions)
    return any(region.packing.startswith(ENCODED) for region in regions)


def _without_nixl(ours: Sequence[RankInfo], theirs: Sequence[RankInfo]) -> str:
    for infos, where in ((ours, "here"), (theirs, "there")):
        if not all(info.agent for info in infos):
            return f"NIXL does not work {where}"
    return ""


def _on_one_node(info: RankInfo, sources: Sequence[RankInfo]) -> bool:
    return info.shared is not None and all(
        source.shared is not None and source.shared.node == info.shared.node for source in sources
    )


def _shapes(ours: Sequence[RankInfo], theirs: Sequence[RankInfo]) -> str:
    return f"{len(ours)} ranks here, {len(theirs)} there"
