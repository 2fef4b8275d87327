"""Maps the ranks of another engine to this rank: which ranks hold its layers and heads, and their position in its
pages.

Engines divide KV heads over tensor-parallel ranks and layers over pipeline stages, repeat heads if there are more ranks
than heads, and have page layouts of their own: a reader matches by layer names and head numbers alone. It reads whole
blocks of each rank, because a checksum covers all that the rank holds of a block.

Under decode context parallelism a rank holds some tokens of each block only (``Region.first_token``), and ranks that
hold others of them are read for others.

Block sizes may differ, if one is a multiple of the other. A block of ours then holds several of the source, or one of
the source covers several of ours. ``shift``: the first token of our block minus that of the source's block; there is a
``SourceGroup`` for each possible one. It says which tokens of a source's block go where in ours.

A source's description of its pages is checked. Before its memory is mapped, ``check_memory`` checks that all of them
are within what it shares.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire.geometry import GroupView, Region, same_words
from vllm_kvtier.wire.messages import HeadRange, RankInfo, Shared

_WORD = 4  # checksums count words of 4 or 8 bytes
_MAX_STEPS = 1 << 32  # outer indices or cells of a page, tokens of a cell: larger numbers are malformed
_MAX_RATIO = 64  # of two block sizes
_MAX_RUNS = 64  # of a state
_MAX_BLOCK_BYTES = 256 << 20  # of a block on one rank, as in the node store


@dataclass(frozen=True)
class TokenRun:
    """``tokens`` tokens, the first of them number ``first`` of the source's region and number ``target`` of ours."""

    first: int
    tokens: int
    target: int


@dataclass(frozen=True)
class SourceRegion:
    """Outer indices [first_outer, first_outer + outers) of ``source`` go to [target_outer, target_outer + outers) of
    ``target``. Cells, and the bytes within them, have the same logical order on both sides. ``target`` None: the region
    is read for the checksum only, and ``outers`` is 0. ``run``: the tokens that go there; None: all, and both regions
    have the same."""

    source: Region
    target: Region | None
    first_outer: int = 0
    outers: int = 0
    target_outer: int = 0
    run: TokenRun | None = None

    @property
    def by_cells(self) -> bool:
        """Whether whole cells go, which are alike on both sides. Otherwise cells hold tokens in an order of their own
        (``Region.separable``)."""
        return self.target is None or self.source.cell_tokens == self.target.cell_tokens

    @property
    def cell_run(self) -> tuple[int, int, int]:
        """``run`` in cells; only if ``by_cells``."""
        if self.run is None:
            return 0, self.source.tokens, 0
        size = self.source.cell_tokens
        return self.run.first // size, self.run.tokens // size, self.run.target // size


@dataclass(frozen=True)
class SourceGroup:
    """All regions of one group on one rank of the source, in its order, which is that of the checksum.

    ``identical_layout``: the same as our block's, in our order, so that both have the same checksum. ``shift``: for
    blocks of ours that begin so many tokens after the source's block (before it, if negative).
    """

    group: int
    regions: tuple[SourceRegion, ...]
    identical_layout: bool
    shift: int = 0


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


@dataclass
class _Wanted:
    """A region of ours, and its heads that no rank of the source was found for yet."""

    region: Region
    heads: set[int]


def _group_parts(
    mine: GroupView, our_heads: HeadRange, rank: int, theirs: Sequence[RankInfo]
) -> Iterator[tuple[RankInfo, SourceGroup]]:
    """``theirs``: in the order of preference."""
    if len({(r.layer, r.first_token) for r in mine.regions}) != len(mine.regions):
        raise KVTierError(f"two parts of KV cache group {mine.group} here have the same name")
    others = [(info, *_same_group(mine, info)) for info in theirs]
    if any(region.runs for region in mine.regions):
        same = [each for each in others if each[2] == our_heads and _divided_alike(mine, each[1])]
        if not same and {our_heads.of} == {range_.of for _, _, range_ in others}:
            mine, others = _by_shares(mine), [(info, _by_shares(group), range_) for info, group, range_ in others]
        others = same or others
    kind_of_split = {our_heads.of} | {range_.of for _, _, range_ in others}
    if len(kind_of_split) > 1 or our_heads.of == 0:
        others = [each for each in others if each[0].rank == rank and each[2] == our_heads]
        if not others:
            raise KVTierError(
                f"the heads of KV cache group {mine.group} are divided over ranks in a way that only engines with the "
                "same tensor parallel size can share"
            )
    sizes = {group.block_tokens for _, group, _ in others}
    if len(sizes) > 1:
        raise KVTierError(f"its ranks have blocks of {sorted(sizes)} tokens in KV cache group {mine.group}")
    for shift in _shifts(mine.block_tokens, size := sizes.pop()):
        wanted = [
            _Wanted(region, set(range(our_heads.first, our_heads.first + region.outer)))
            for region in mine.regions
            if shift + region.first_token < size and shift + region.first_token + region.block_tokens > 0
        ]
        if not wanted:  # another rank of ours, of context parallelism, has these tokens: read for the checksum only
            info, theirs_, _ = others[0]
            yield info, SourceGroup(mine.group, tuple(SourceRegion(r, None) for r in theirs_.regions), False, shift)
        by_layer: dict[str, list[_Wanted]] = {}
        for each in wanted:
            by_layer.setdefault(each.region.layer, []).append(each)
        for info, theirs_, range_ in others if wanted else ():
            regions = [
                _take_heads(region, range_, our_heads, by_layer.get(region.layer, []), shift, mine, theirs_)
                for region in theirs_.regions
            ]
            if any(region.target is not None for region in regions):
                identical = size == mine.block_tokens and _has_identical_layout(mine, regions)
                yield info, SourceGroup(mine.group, tuple(regions), identical, shift)
        _refuse_missing(mine, wanted, [group for _, group, _ in others], shift)


def _divided_alike(mine: GroupView, theirs: GroupView) -> bool:
    """Also the same layers: other stages of a pipeline may have as many."""
    return [(r.layer, r.shares, r.runs) for r in mine.regions] == [(r.layer, r.shares, r.runs) for r in theirs.regions]


def _by_shares(group: GroupView) -> GroupView:
    """The group with a region for each run of its states, whose outer dimension is their shares. Words are in the same
    order and of the same size, so that checksums are the same."""
    regions: list[Region] = []
    for r in group.regions:
        pieces = [nbytes // r.shares if r.shares > 0 else 0 for _, nbytes in r.runs]
        if (
            (r.outer, r.tokens) != (1, 1)
            or not 0 < len(pieces) <= _MAX_RUNS
            or r.inner != r.shares * sum(pieces)
            or not all(n > 0 and same_words(n, r.inner) for n in pieces)
        ):
            raise KVTierError(f"layer {r.layer}: it is unknown how ranks divide its state")
        at = r.base
        for (name, _), piece in zip(r.runs, pieces, strict=True):
            regions.append(
                msgspec.structs.replace(
                    r, layer=f"{r.layer} ({name})", base=at, outer=r.shares, outer_stride=piece if r.shares > 1 else 0,
                    inner=piece, packing="", shares=0, runs=(),
                )
            )  # fmt: skip
            at += r.shares * piece
    return msgspec.structs.replace(group, regions=tuple(regions))


def _shifts(mine: int, theirs: int) -> range:
    """All values of ``SourceGroup.shift`` for blocks of so many tokens."""
    return range(0, theirs, mine) if theirs >= mine else range(0, -mine, -theirs)


def _same_group(mine: GroupView, info: RankInfo) -> tuple[GroupView, HeadRange]:
    where = f"KV cache group {mine.group}"
    for number, group in enumerate(info.groups):
        if group.group != mine.group:
            continue
        if number >= len(info.heads):
            raise KVTierError(f"rank {info.rank} does not name the heads that it holds of {where}")
        if (group.kind, group.window) != (mine.kind, mine.window):
            raise KVTierError(f"{mine.describe()} here, {group.describe()} there in {where}")
        if group.block_tokens != mine.block_tokens:
            large, small = max(group.block_tokens, mine.block_tokens), min(group.block_tokens, mine.block_tokens)
            sizes = f"block size {mine.block_tokens} here, {group.block_tokens} there in {where}"
            if small < 1 or large % small or large > _MAX_RATIO * small:
                raise KVTierError(f"{sizes}: one must be a multiple of the other, at most {_MAX_RATIO} times as large")
            if not mine.cache_kind.by_position:
                raise KVTierError(f"{sizes}, which has no block for each part of a prompt")
        names = [(r.layer, r.first_token) for r in group.regions]
        if len(set(names)) != len(names):
            raise KVTierError(f"two parts of {where} on rank {info.rank} have the same name")
        return group, info.heads[number]
    raise KVTierError(f"rank {info.rank} has no {where}")


def _take_heads(
    source: Region,
    theirs: HeadRange,
    mine: HeadRange,
    wanted: list[_Wanted],
    shift: int,
    our_group: GroupView,
    their_group: GroupView,
) -> SourceRegion:
    """Take the missing heads that one region of a source's rank holds; they are no longer missing then. ``wanted``: of
    its layer."""
    if their_group.block_tokens == our_group.block_tokens:
        run = None
        found = next(
            (w for w in wanted if (w.region.layer, w.region.first_token) == (source.layer, source.first_token)), None
        )
        if found is not None:
            _check_same(found.region, source)
    else:
        found, run = _overlap(source, wanted, shift, their_group.block_tokens)
    if found is None:
        return SourceRegion(source, None)
    target, lacking = found.region, found.heads
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
    return SourceRegion(source, target, first - theirs.first, end - first, first - mine.first, run)


def _overlap(
    source: Region, wanted: list[_Wanted], shift: int, block_tokens: int
) -> tuple[_Wanted | None, TokenRun | None]:
    """The region of ours that has tokens of ``source``, and which. All that the source's block has for that region
    must be in this one region of it; ``block_tokens``: of the source."""
    begin, end = source.first_token, source.first_token + source.block_tokens
    found = []
    for each in wanted:
        first = shift + each.region.first_token  # of ours, counted in the source's block
        low, high = max(first, 0), min(first + each.region.block_tokens, block_tokens)
        if each.region.layer == source.layer and max(low, begin) < min(high, end):
            found.append((each, low, high, TokenRun(low - begin, high - low, low - first)))
    if not found:
        return None, None
    each, low, high, run = found[0]
    if len(found) > 1 or low < begin or high > end:
        raise KVTierError(
            f"layer {source.layer}: parts of a block there do not fit into parts of a block here (different kernel "
            "block sizes or backends)"
        )
    _check_same_tokens(each.region, source, run)
    return each, run


def _check_same(mine: Region, theirs: Region) -> None:
    """Raise KVTierError if cells of the two differ in content. Strides, the order of dimensions and the number of heads
    may differ."""
    reason = _other_contents(mine, theirs)
    if reason is None and (mine.tokens, mine.cell_tokens) != (theirs.tokens, theirs.cell_tokens):
        here, there = (f"{r.tokens} cells of {r.cell_tokens} tokens" for r in (mine, theirs))
        reason = f"{here} a part of a block here, {there} there"
    if reason is None and mine.inner != theirs.inner:
        reason = f"{mine.inner} bytes a token and head here, {theirs.inner} there"
    if reason is not None:
        raise KVTierError(f"layer {mine.layer}: {reason}")


def _check_same_tokens(mine: Region, theirs: Region, run: TokenRun) -> None:
    """The same for regions of blocks of different sizes."""
    reason = _other_contents(mine, theirs)
    alike = (mine.cell_tokens, mine.inner) == (theirs.cell_tokens, theirs.inner)
    if reason is None and not (alike and not any(n % mine.cell_tokens for n in (run.first, run.tokens, run.target))):
        if mine.inner * theirs.cell_tokens != theirs.inner * mine.cell_tokens:
            sizes = (f"{r.inner} bytes for {r.cell_tokens} tokens of a head" for r in (mine, theirs))
            reason = "{} here, {} there".format(*sizes)
        elif not (mine.separable and theirs.separable and mine.tokens == theirs.tokens == 1):
            reason = (
                f"its pages are packed as {mine.packing or 'states'}, and the order of tokens in them is unknown: set "
                "the same block size on both"
            )
    if reason is not None:
        raise KVTierError(f"layer {mine.layer}: {reason}")


def _other_contents(mine: Region, theirs: Region) -> str | None:
    if mine.dtype != theirs.dtype:
        return f"KV cache dtype {mine.dtype} here, {theirs.dtype} there"
    if mine.packing != theirs.packing:
        return f"pages packed as {mine.packing or 'tokens'} here, as {theirs.packing or 'tokens'} there"
    if mine.fields and theirs.fields and mine.fields != theirs.fields:
        return "the numbers of a token are in another order there"
    return None


def _has_identical_layout(mine: GroupView, regions: Sequence[SourceRegion]) -> bool:
    return len(regions) == len(mine.regions) and all(
        part.target is region and part.outers == part.source.outer == region.outer
        for part, region in zip(regions, mine.regions, strict=True)
    )


def _refuse_missing(mine: GroupView, wanted: Sequence[_Wanted], theirs: Sequence[GroupView], shift: int) -> None:
    for each in wanted:
        if not each.heads:
            continue
        layer, first_token = each.region.layer, each.region.first_token
        there = {r.first_token for group in theirs for r in group.regions if r.layer == layer}
        if not there:
            raise KVTierError(f"layer {layer} of KV cache group {mine.group} is on none of its ranks")
        if first_token not in there and all(group.block_tokens == mine.block_tokens for group in theirs):
            raise KVTierError(
                f"layer {layer}: no part of a block begins with token {first_token} there (a different kernel block "
                "size or backend)"
            )
        if not any(
            r.layer == layer and r.first_token < shift + first_token + each.region.block_tokens
            and r.first_token + r.block_tokens > shift + first_token for group in theirs for r in group.regions
        ):  # fmt: skip
            raise KVTierError(f"layer {layer}: its pages there do not hold all tokens of a block")
        some = ", ".join(str(head) for head in sorted(each.heads)[:4])
        raise KVTierError(f"layer {layer}: none of its ranks holds KV head {some}")
