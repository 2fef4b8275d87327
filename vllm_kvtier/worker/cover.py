"""Which ranks of another engine hold what this rank needs of a block, and where in its pages that goes.

Engines divide KV heads over tensor-parallel ranks and layers over pipeline stages, repeat heads where there are more
ranks than heads, and lay pages out as they like: a reader goes by layer names and head numbers alone. Of each rank that
it reads from it reads whole blocks, because their checksum is over all that this rank holds of them.

No torch here. What a source says of its memory is checked: whoever reads by this touches nothing outside of it.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire.geometry import GroupView, Region
from vllm_kvtier.wire.messages import HeadRange, RankInfo, Shared

# What identifies a region within its group in every engine: its layer, and the part of a block that it holds.
_Name = tuple[str, int]

_WORD = 4  # checksums count words of 4 or 8 bytes
_MOST_STEPS = 1 << 32  # outer indices or cells of a page, and tokens of a cell: larger ones nobody means
_MOST_BYTES = 256 << 20  # of a block on one rank, as in the node store


@dataclass(frozen=True)
class PartRegion:
    """Outer indices [first_outer, first_outer + outers) of ``source`` go to [target_outer, target_outer + outers) of
    ``target``; cells, and the bytes within them, lie in the same logical order on both sides. ``target`` None: it is
    read for the checksum only, and ``outers`` is 0."""

    source: Region
    target: Region | None
    first_outer: int = 0
    outers: int = 0
    target_outer: int = 0


@dataclass(frozen=True)
class PartGroup:
    """All regions of one group on one rank of the source, in its order, which is that of the checksum.

    ``whole``: this is all of our block and nothing else, in our order, so that our checksum of it is the source's.
    """

    group: int
    regions: tuple[PartRegion, ...]
    whole: bool


@dataclass(frozen=True)
class Part:
    """What is read from one rank of a source; groups of which nothing is needed are not in it."""

    source: RankInfo
    groups: tuple[PartGroup, ...]


def cover(
    mine: Sequence[GroupView], heads: Sequence[HeadRange], rank: int, theirs: Sequence[RankInfo]
) -> list[Part]:
    """The parts that together hold each layer and head of our blocks exactly once, by rank.

    ``mine``, ``heads``: our groups and, for each, which heads we hold. ``theirs``: all ranks of the source. Of ranks
    that hold the same, the one with our number is read if it is among them, else another for each of us.

    Raises KVTierError in one sentence if pages mean something else there, something is missing, or a rank's
    description of its memory makes no sense.
    """
    if len(mine) != len(heads):
        raise ValueError(f"{len(mine)} groups with {len(heads)} ranges of heads")
    if not theirs or len({info.rank for info in theirs}) != len(theirs):
        raise KVTierError(f"it names {len(theirs)} ranks, each of which must be there once")
    count = len(theirs)
    ordered = sorted(theirs, key=lambda info: (info.rank - rank) % count)
    found: dict[int, list[PartGroup]] = {}
    for group, held in zip(mine, heads, strict=True):
        for info, part in _group_parts(group, held, rank, ordered):
            found.setdefault(info.rank, []).append(part)
    parts = [Part(info, tuple(found[info.rank])) for info in theirs if info.rank in found]
    for part in parts:
        check_memory(part.source)
    return sorted(parts, key=lambda part: part.source.rank)


def check_memory(info: RankInfo) -> None:
    """Raises KVTierError unless all pages of ``info`` and its table of checksums lie within what it shares."""
    if info.shared is None:
        raise KVTierError(f"rank {info.rank} does not share its memory")
    if sys.byteorder != info.geometry.byte_order:
        raise KVTierError(f"byte order {sys.byteorder} here, {info.geometry.byte_order} there")
    if info.num_blocks < 1 or not _within(info.shared, info.sums_base, 8 * info.num_blocks) or info.sums_base % 8:
        raise KVTierError(f"the checksums of rank {info.rank} are not in the memory that it shares")
    for group in info.groups:
        if group.block_bytes > _MOST_BYTES:
            raise KVTierError(f"blocks of {group.block_bytes} bytes on rank {info.rank} are too large to be read")
        for region in group.regions:
            if not _sound(region):
                raise KVTierError(f"rank {info.rank} describes pages of {region.layer} that cannot be")
            nbytes = (info.num_blocks - 1) * region.block_stride + region.page_extent
            if not _within(info.shared, region.base, nbytes):
                raise KVTierError(f"pages of {region.layer} on rank {info.rank} are not in the memory that it shares")


def _sound(region: Region) -> bool:
    """Whether a page is what a page can be: whole words, none of them twice."""
    sizes = (region.outer, region.tokens, region.inner, region.cell_tokens)
    places = (region.base, region.block_stride, region.outer_stride, region.token_stride)
    return (
        all(0 < size < _MOST_STEPS for size in sizes)
        and all(place >= 0 and place % _WORD == 0 for place in (*places, region.inner))
        and 0 <= region.first_token < _MOST_STEPS
        and region.page_extent >= region.block_bytes
    )


def _within(shared: Shared, base: int, nbytes: int) -> bool:
    return any(span.base <= base and base + nbytes <= span.base + span.nbytes for span in shared.spans)


def _group_parts(
    mine: GroupView, held: HeadRange, rank: int, theirs: Sequence[RankInfo]
) -> Iterator[tuple[RankInfo, PartGroup]]:
    """``theirs`` in the order in which we prefer them."""
    missing = {
        (r.layer, r.first_token): (r, set(range(held.first, held.first + r.outer))) for r in mine.regions
    }  # by name: our region, and the heads that nobody has yet
    if len(missing) != len(mine.regions):
        raise KVTierError(f"two parts of KV cache group {mine.group} here have the same name")
    others = [(info, *_same_group(mine, info)) for info in theirs]
    kind_of_split = {held.of} | {range_.of for _, _, range_ in others}
    if len(kind_of_split) > 1 or held.of == 0:
        others = [each for each in others if each[0].rank == rank and each[2] == held]
        if not others:
            raise KVTierError(
                f"the heads of KV cache group {mine.group} are divided over ranks in a way that only engines with the "
                "same tensor parallel size can share"
            )
    for info, theirs_, range_ in others:
        regions = [_take(region, range_, held, missing) for region in theirs_.regions]
        if any(region.target is not None for region in regions):
            yield info, PartGroup(mine.group, tuple(regions), _is_whole(mine, regions))
    _refuse_missing(mine, missing, [group for _, group, _ in others])


def _same_group(mine: GroupView, info: RankInfo) -> tuple[GroupView, HeadRange]:
    where = f"KV cache group {mine.group}"
    for number, group in enumerate(info.groups):
        if group.group != mine.group:
            continue
        if number >= len(info.heads):
            raise KVTierError(f"rank {info.rank} does not say which heads it holds of {where}")
        if group.block_tokens != mine.block_tokens:
            raise KVTierError(f"block size {mine.block_tokens} here, {group.block_tokens} there in {where}")
        if (group.kind, group.window) != (mine.kind, mine.window):
            here, there = (f"{g.kind} attention, window {g.window or 'none'}" for g in (mine, group))
            raise KVTierError(f"{here} here, {there} there in {where}")
        names = [(r.layer, r.first_token) for r in group.regions]
        if len(set(names)) != len(names):
            raise KVTierError(f"two parts of {where} on rank {info.rank} have the same name")
        return group, info.heads[number]
    raise KVTierError(f"rank {info.rank} has no {where}")


def _take(
    source: Region, theirs: HeadRange, mine: HeadRange, missing: dict[_Name, tuple[Region, set[int]]]
) -> PartRegion:
    """What one region of a source's rank gives us of the heads that are missing; they are not, after that."""
    target, lacking = missing.get((source.layer, source.first_token), (None, set()))
    if target is None:
        return PartRegion(source, None)
    _check_same(target, source)
    if theirs.of and theirs.first + source.outer > theirs.of:
        raise KVTierError(
            f"heads {theirs.first} to {theirs.first + source.outer - 1} of {theirs.of} of {source.layer} cannot be"
        )
    # Ranks hold ranges that are the same or have nothing in common. If not, what is left over is missing in the end.
    first = min((head for head in lacking if theirs.first <= head < theirs.first + source.outer), default=None)
    if first is None:
        return PartRegion(source, None)
    end = first
    while end in lacking and end < theirs.first + source.outer:
        lacking.remove(end)
        end += 1
    return PartRegion(source, target, first - theirs.first, end - first, first - mine.first)


def _check_same(mine: Region, theirs: Region) -> None:
    """Raises KVTierError if cells of the two hold different things. Strides and the order of dimensions may differ,
    and the number of heads."""
    if mine.dtype != theirs.dtype:
        reason = f"KV cache dtype {mine.dtype} here, {theirs.dtype} there"
    elif mine.packing != theirs.packing:
        reason = f"pages packed as {mine.packing or 'tokens'} here, as {theirs.packing or 'tokens'} there"
    elif (mine.tokens, mine.cell_tokens) != (theirs.tokens, theirs.cell_tokens):
        here, there = (f"{r.tokens} cells of {r.cell_tokens} tokens" for r in (mine, theirs))
        reason = f"{here} a part of a block here, {there} there"
    elif mine.inner != theirs.inner:
        reason = f"{mine.inner} bytes a token and head here, {theirs.inner} there"
    elif mine.fields and theirs.fields and mine.fields != theirs.fields:
        reason = "the numbers of a token lie in another order there"
    else:
        return
    raise KVTierError(f"layer {mine.layer}: {reason}")


def _is_whole(mine: GroupView, regions: Sequence[PartRegion]) -> bool:
    return len(regions) == len(mine.regions) and all(
        part.target is region and part.outers == part.source.outer == region.outer
        for part, region in zip(regions, mine.regions, strict=True)
    )


def _refuse_missing(
    mine: GroupView, missing: dict[_Name, tuple[Region, set[int]]], theirs: Sequence[GroupView]
) -> None:
    for (layer, first_token), (_, lacking) in missing.items():
        if not lacking:
            continue
        there = {r.first_token for group in theirs for r in group.regions if r.layer == layer}
        if not there:
            raise KVTierError(f"layer {layer} of KV cache group {mine.group} is on none of its ranks")
        if first_token not in there:
            raise KVTierError(
                f"layer {layer}: no part of a block begins with token {first_token} there (a different kernel block "
                "size or backend)"
            )
        some = ", ".join(str(head) for head in sorted(lacking)[:4])
        raise KVTierError(f"layer {layer}: none of its ranks holds KV head {some}")
