"""Maps the ranks of another engine to this rank: which ranks hold its layers and heads, and their position in its
pages.

Engines divide KV heads over tensor-parallel ranks and layers over pipeline stages, repeat heads if there are more ranks
than heads, and have page layouts of their own: a reader matches by layer names and head numbers alone. It reads whole
blocks of each rank, because a checksum covers all that the rank holds of a block.

A source's description of its pages is checked. Before its memory is mapped, ``check_memory`` checks that all of them
are within what it shares.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire.geometry import GroupView, Region
from vllm_kvtier.wire.messages import HeadRange, RankInfo, Shared

# Identifies a region within its group in every engine: its layer, and the first token of a block that it holds.
_Name = tuple[str, int]

_WORD = 4  # checksums count words of 4 or 8 bytes
_MAX_STEPS = 1 << 32  # outer indices or cells of a page, tokens of a cell: larger numbers are malformed
_MAX_BLOCK_BYTES = 256 << 20  # of a block on one rank, as in the node store


@dataclass(frozen=True)
class SourceRegion:
    """Outer indices [first_outer, first_outer + outers) of ``source`` go to [target_outer, target_outer + outers) of
    ``target``. Cells, and the bytes within them, have the same logical order on both sides. ``target`` None: the region
    is read for the checksum only, and ``outers`` is 0."""

    source: Region
    target: Region | None
    first_outer: int = 0
    outers: int = 0
    target_outer: int = 0


@dataclass(frozen=True)
class SourceGroup:
    """All regions of one group on one rank of the source, in its order, which is that of the checksum.

    ``identical_layout``: the same as our block's, in our order, so that both have the same checksum.
    """

    group: int
    regions: tuple[SourceRegion, ...]
    identical_layout: bool


@dataclass(frozen=True)
class SourceRank:
    """The groups that are read from one rank of a source."""

    source: RankInfo
    groups: tuple[SourceGroup, ...]


def map_source_ranks(
    mine: Sequence[GroupView], heads: Sequence[HeadRange], rank: int, theirs: Sequence[RankInfo]
) -> list[SourceRank]:
    """The source's ranks that together hold each layer and head of our blocks exactly once.

    ``mine``, ``heads``: our groups and the heads that we hold of each. ``theirs``: all ranks of the source. Among ranks
    that hold the same, the one with our number is read, or the next one: each of our ranks begins at another.

    Raises KVTierError if pages have another meaning there, a layer or head is missing, or a rank's description of its
    memory is malformed.
    """
    if len(mine) != len(heads):
        raise ValueError(f"{len(mine)} groups with {len(heads)} ranges of heads")
    if not theirs or len({info.rank for info in theirs}) != len(theirs):
        raise KVTierError(f"it names {len(theirs)} ranks; each must be named once")
    count = len(theirs)
    ordered = sorted(theirs, key=lambda info: (info.rank - rank) % count)
    found: dict[int, list[SourceGroup]] = {}
    for group, our_heads in zip(mine, heads, strict=True):
        for info, taken in _group_parts(group, our_heads, rank, ordered):
            found.setdefault(info.rank, []).append(taken)
    parts = [SourceRank(info, tuple(found[info.rank])) for info in theirs if info.rank in found]
    for part in parts:
        _check_pages(part.source)
    return sorted(parts, key=lambda part: part.source.rank)


def _check_pages(info: RankInfo) -> None:
    if sys.byteorder != info.geometry.byte_order:
        raise KVTierError(f"byte order {sys.byteorder} here, {info.geometry.byte_order} there")
    for group in info.groups:
        if group.block_bytes > _MAX_BLOCK_BYTES:
            raise KVTierError(f"blocks of {group.block_bytes} bytes on rank {info.rank} are too large to be read")
        for region in group.regions:
            if not _sound(region):
                raise KVTierError(f"rank {info.rank} describes impossible pages of {region.layer}")


def check_memory(info: RankInfo) -> None:
    """Raise KVTierError unless all pages of ``info`` and its table of checksums are within the memory that it
    shares."""
    if info.shared is None:
        raise KVTierError(f"rank {info.rank} does not share its memory")
    _check_pages(info)
    if (
        info.num_blocks < 1
        or not _within(info.shared, info.checksum_table_addr, 8 * info.num_blocks)
        or info.checksum_table_addr % 8
    ):
        raise KVTierError(f"the checksums of rank {info.rank} are not in the memory that it shares")
    for group in info.groups:
        for region in group.regions:
            nbytes = (info.num_blocks - 1) * region.block_stride + region.page_extent
            if not _within(info.shared, region.base, nbytes):
                raise KVTierError(f"pages of {region.layer} on rank {info.rank} are not in the memory that it shares")


def _sound(region: Region) -> bool:
    """Whether a page consists of whole words that do not overlap."""
    sizes = (region.outer, region.tokens, region.inner, region.cell_tokens)
    places = (region.base, region.block_stride, region.outer_stride, region.token_stride)
    return (
        all(0 < size < _MAX_STEPS for size in sizes)
        and all(place >= 0 and place % _WORD == 0 for place in (*places, region.inner))
        and 0 <= region.first_token < _MAX_STEPS
        and region.page_extent >= region.block_bytes
    )


def _within(shared: Shared, base: int, nbytes: int) -> bool:
    return any(span.base <= base and base + nbytes <= span.base + span.nbytes for span in shared.spans)


def _group_parts(
    mine: GroupView, our_heads: HeadRange, rank: int, theirs: Sequence[RankInfo]
) -> Iterator[tuple[RankInfo, SourceGroup]]:
    """``theirs``: in the order of preference."""
    missing = {
        (r.layer, r.first_token): (r, set(range(our_heads.first, our_heads.first + r.outer))) for r in mine.regions
    }  # by name: our region, and its heads that no source rank was found for yet
    if len(missing) != len(mine.regions):
        raise KVTierError(f"two parts of KV cache group {mine.group} here have the same name")
    others = [(info, *_same_group(mine, info)) for info in theirs]
    kind_of_split = {our_heads.of} | {range_.of for _, _, range_ in others}
    if len(kind_of_split) > 1 or our_heads.of == 0:
        others = [each for each in others if each[0].rank == rank and each[2] == our_heads]
        if not others:
            raise KVTierError(
                f"the heads of KV cache group {mine.group} are divided over ranks in a way that only engines with the "
                "same tensor parallel size can share"
            )
    for info, theirs_, range_ in others:
        regions = [_take_heads(region, range_, our_heads, missing) for region in theirs_.regions]
        if any(region.target is not None for region in regions):
            yield info, SourceGroup(mine.group, tuple(regions), _has_identical_layout(mine, regions))
    _refuse_missing(mine, missing, [group for _, group, _ in others])


def _same_group(mine: GroupView, info: RankInfo) -> tuple[GroupView, HeadRange]:
    where = f"KV cache group {mine.group}"
    for number, group in enumerate(info.groups):
        if group.group != mine.group:
            continue
        if number >= len(info.heads):
            raise KVTierError(f"rank {info.rank} does not name the heads that it holds of {where}")
        if group.block_tokens != mine.block_tokens:
            raise KVTierError(f"block size {mine.block_tokens} here, {group.block_tokens} there in {where}")
        if (group.kind, group.window) != (mine.kind, mine.window):
            raise KVTierError(f"{mine.in_words()} here, {group.in_words()} there in {where}")
        names = [(r.layer, r.first_token) for r in group.regions]
        if len(set(names)) != len(names):
            raise KVTierError(f"two parts of {where} on rank {info.rank} have the same name")
        return group, info.heads[number]
    raise KVTierError(f"rank {info.rank} has no {where}")


def _take_heads(
    source: Region, theirs: HeadRange, mine: HeadRange, missing: dict[_Name, tuple[Region, set[int]]]
) -> SourceRegion:
    """Take the missing heads that one region of a source's rank holds; they are no longer missing then."""
    target, lacking = missing.get((source.layer, source.first_token), (None, set()))
    if target is None:
        return SourceRegion(source, None)
    _check_same(target, source)
    if theirs.of and theirs.first + source.outer > theirs.of:
        raise KVTierError(
            f"heads {theirs.first} to {theirs.first + source.outer - 1} of {theirs.of} of {source.layer} do not exist"
        )
    # Ranks hold equal or disjoint ranges. With other ranges some heads stay missing, and the source is refused.
    first = min((head for head in lacking if theirs.first <= head < theirs.first + source.outer), default=None)
    if first is None:
        return SourceRegion(source, None)
    end = first
    while end in lacking and end < theirs.first + source.outer:
        lacking.remove(end)
        end += 1
    return SourceRegion(source, target, first - theirs.first, end - first, first - mine.first)


def _check_same(mine: Region, theirs: Region) -> None:
    """Raise KVTierError if cells of the two differ in content. Strides, the order of dimensions and the number of heads
    may differ."""
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
        reason = "the numbers of a token are in another order there"
    else:
        return
    raise KVTierError(f"layer {mine.layer}: {reason}")


def _has_identical_layout(mine: GroupView, regions: Sequence[SourceRegion]) -> bool:
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
