"""The layout of a KV cache in memory, in a form that two engines can compare. Imports neither vLLM nor torch.

A worker sends its :class:`GroupView` (addresses and strides) and :class:`CacheGeometry` (what must be equal) at
the handshake; ``worker.cache_view`` makes both from the engine's tensors.
"""

from typing import Annotated

import msgspec

from vllm_kvtier import cache_kinds
from vllm_kvtier.cache_kinds import CacheKind, describe_kind

BlockTokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]


class Field(msgspec.Struct, frozen=True):
    """Numbers of one meaning in the cells of a region: ``count`` of them for each token and head.

    ``name`` is "k" or "v" (attention), "latent" or "rope" (MLA). A codec chooses its format by it.
    """

    name: str
    count: int


class Region(msgspec.Struct, frozen=True):
    """Pages of one layer or of a part of it. All addresses and strides are in bytes.

    Block ``b``'s page starts at ``base + b * block_stride``. Its logical byte ``(o, t, i)`` is at
    ``o * outer_stride + t * token_stride + i`` from there, ``0 <= o < outer``, ``0 <= t < tokens``,
    ``0 <= i < inner``.

    ``outer`` counts the dimension outside the tokens (KV heads). ``tokens`` counts *cells*: a cell holds
    ``cell_tokens`` tokens. That is 1, unless the backend compresses tokens into states, or packs the tokens of a
    page in its own order (then the page is one opaque cell). Cell ``t`` begins with the block's token
    ``first_token + t * cell_tokens``. ``packing`` names the byte order within a cell; regions of two engines are
    interchangeable only if it is equal. Strides of dimensions of size one are 0.

    ``fields`` lists the meaning of a cell's numbers in logical order; together they fill the cell. In a cell of one
    token the fields follow one another. In a cell of several tokens each field holds [token, count] numbers, and
    ``CacheView.cpu_page_layouts`` maps them to memory. (): the meaning is unknown, and the region is stored byte for
    byte.

    ``separable``: a reader with the same ``packing`` knows which numbers of a cell belong to which token
    (``CacheView.token_layout``), also in cells of another number of tokens.

    ``shares`` and ``runs``: how tensor parallelism divides a recurrent state. Its bytes are the runs (what they mean,
    bytes), one after another; each run is ``shares`` equal pieces, and piece ``u`` of all runs is on one rank, as a KV
    head is. 0 and (): unknown.
    """

    layer: str
    base: int
    block_stride: int
    outer: int
    outer_stride: int
    first_token: int
    tokens: int
    token_stride: int
    inner: int
    cell_tokens: int = 1
    packing: str = ""
    dtype: str = ""
    fields: tuple[Field, ...] = ()
    separable: bool = False
    shares: int = 0
    runs: tuple[tuple[str, int], ...] = ()

    @property
    def block_bytes(self) -> int:
        """Logical bytes of one block in this region, padding not counted."""
        return self.outer * self.tokens * self.inner

    @property
    def block_tokens(self) -> int:
        """Tokens of a block that this region covers."""
        return self.tokens * self.cell_tokens

    @property
    def order(self) -> str:
        """Outermost dimension in memory: "outer", "token", or "any" if there is only one."""
        if self.outer == 1 or self.tokens == 1:
            return "any"
        return "outer" if self.outer_stride > self.token_stride else "token"

    @property
    def page_extent(self) -> int:
        """Bytes from the first to the last byte of one page, gaps included."""
        return (self.outer - 1) * self.outer_stride + (self.tokens - 1) * self.token_stride + self.inner


def same_words(nbytes: int, whole: int) -> bool:
    """Whether checksums count words of one size in cells of ``nbytes`` and of ``whole`` bytes."""
    return nbytes % 4 == 0 and (nbytes % 8 == 0) == (whole % 8 == 0)


class GroupView(msgspec.Struct, frozen=True):
    """One KV cache group: the layers that share a block table.

    ``kind`` and ``window``: see ``cache_kinds``. Checksums and transfers count ``regions`` in this order. Block ids of
    all groups index the same pool: hybrid groups may alias the same bytes, but a block belongs to one group at a time.
    """

    group: int
    block_tokens: BlockTokens
    kind: str
    window: int | None
    regions: tuple[Region, ...]

    @property
    def block_bytes(self) -> int:
        """Logical bytes of one block over all layers of this group on this rank."""
        return sum(r.block_bytes for r in self.regions)

    @property
    def cache_kind(self) -> CacheKind:
        """Raises ValueError for an unknown one: another process may have sent this."""
        return cache_kinds.get(self.kind, self.window)

    def describe(self) -> str:
        """Of any kind and window, as another process may have sent them."""
        return describe_kind(self.kind, self.window)


class RegionGeometry(msgspec.Struct, frozen=True):
    """The properties of a :class:`Region` that must be equal to copy pages: all but addresses and gaps.

    Fields are left out: if dtype, packing and shape are equal, copied bytes have the same meaning.
    """

    layer: str
    outer: int
    first_token: int
    tokens: int
    cell_tokens: int
    inner: int
    order: str
    packing: str
    dtype: str


class GroupGeometry(msgspec.Struct, frozen=True):
    block_tokens: BlockTokens
    kind: str
    window: int | None
    regions: tuple[RegionGeometry, ...]


class CacheGeometry(msgspec.Struct, frozen=True):
    """Sent at the handshake; :func:`geometry_mismatch` compares two."""

    groups: tuple[GroupGeometry, ...]
    byte_order: str


_ORDER_WORDS = {"outer": "heads before tokens", "token": "tokens before heads"}


def geometry_mismatch(here: CacheGeometry, there: CacheGeometry) -> str | None:
    """One sentence naming the first difference that forbids copying pages between the two; None if there is none.

    Pages are copied byte for byte. Gaps between contiguous chunks may differ, because descriptors skip them. The order
    of heads and tokens within a page must be equal, even where the logical shapes are.
    """
    if here.byte_order != there.byte_order:
        return f"byte order {here.byte_order} here, {there.byte_order} there"
    if len(here.groups) != len(there.groups):
        return f"{len(here.groups)} KV cache groups here, {len(there.groups)} there"
    for number, (a, b) in enumerate(zip(here.groups, there.groups, strict=True)):
        where = f" in KV cache group {number}" if len(here.groups) > 1 else ""
        if a.block_tokens != b.block_tokens:
            return f"block size {a.block_tokens} here, {b.block_tokens} there{where}"
        if (a.kind, a.window) != (b.kind, b.window):
            return f"{describe_kind(a.kind, a.window)} here, {describe_kind(b.kind, b.window)} there{where}"
        layers_a, layers_b = (list(dict.fromkeys(r.layer for r in g.regions)) for g in (a, b))
        if layers_a != layers_b:
            if len(layers_a) != len(layers_b):
                return f"{len(layers_a)} layers here, {len(layers_b)} there{where}"
            layer_a, layer_b = next((x, y) for x, y in zip(layers_a, layers_b, strict=True) if x != y)
            return f"layer {layer_a} here, {layer_b} in its place there{where}"
        if len(a.regions) != len(b.regions):
            return (
                f"the pages of a layer are split into {len(a.regions)} parts over all layers here, "
                f"{len(b.regions)} there{where} (a different kernel block size or backend)"
            )
        for x, y in zip(a.regions, b.regions, strict=True):
            reason = _region_mismatch(x, y)
            if reason:
                return f"layer {x.layer}: {reason}"
    return None


def _region_mismatch(x: RegionGeometry, y: RegionGeometry) -> str | None:
    if x.dtype != y.dtype:
        return f"KV cache dtype {x.dtype} here, {y.dtype} there"
    if x.packing != y.packing:
        return f"pages packed as {x.packing or 'tokens'} here, as {y.packing or 'tokens'} there"
    if x.outer != y.outer:
        return f"{x.outer} KV heads (or parts of a page) here, {y.outer} there"
    if x.inner != y.inner:
        return f"{x.inner} bytes a token and head here, {y.inner} there"
    if (x.first_token, x.tokens, x.cell_tokens) != (y.first_token, y.tokens, y.cell_tokens):
        return (
            f"tokens {x.first_token}..{x.first_token + x.tokens * x.cell_tokens - 1} of a block in one part "
            f"here, {y.first_token}..{y.first_token + y.tokens * y.cell_tokens - 1} there"
        )
    if "any" not in (x.order, y.order) and x.order != y.order:
        return (
            f"{_ORDER_WORDS[x.order]} within a page here, {_ORDER_WORDS[y.order]} there: the shapes are "
            "equal but not the contiguous chunks; set the same KV cache layout on both (VLLM_KV_CACHE_LAYOUT)"
        )
    return None
