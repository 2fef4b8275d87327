"""The contract of a kind of KV cache groups."""

import enum
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple


class Contents(enum.Enum):
    """What a cell of a cache holds, if the cache is not quantized: codecs encode cells of known contents only."""

    KV = "K, then V"
    LATENT = "MLA's latent, then its rotary part"
    OPAQUE = "bytes of unknown meaning"
    STATE = "a recurrent state: the whole block is one cell"

    @property
    def encodable(self) -> bool:
        """Whether codecs may encode such cells; all others are kept byte for byte."""
        return self in (Contents.KV, Contents.LATENT)


class Split(enum.Enum):
    """How tensor parallelism divides a block over ranks."""

    HEADS = "by KV heads, which are repeated if there are more ranks"
    COPIES = "not at all: every rank has all of it"
    RANKS = "each rank has a part of its own"


class InFlight(NamedTuple):
    """The most that vLLM has scheduled and not settled. What it frees behind windows it frees once that is settled."""

    tokens: int = sys.maxsize  # of all steps under way
    drafts: int = 0  # tokens that a request speculates in a step


UNKNOWN_IN_FLIGHT = InFlight()


@dataclass(frozen=True)
class CacheKind(ABC):
    """One kind, with its ``window`` in tokens if it has one (see ``window_field``). Positions and lengths are tokens
    of a request. A group's blocks are of one size; block i of a request holds tokens [i * size, (i + 1) * size)."""

    window: int | None = None
    # The most tokens at a prefix's end that its reader computes again; see ``BlockGeometry.recomputed_tokens``.
    recomputed: int = 1

    # In options, messages and digests of layouts.
    name: ClassVar[str]
    # The kind by whose rules a store looks its blocks up: one without names that only differ in what bytes mean.
    stored_as: ClassVar[str]
    # The classes of vLLM's specification. By exact name: a subclass may give the same bytes another meaning.
    specs: ClassVar[Mapping[str, Contents]]
    # The names of such layers in a model's configuration.
    layer_types: ClassVar[tuple[str, ...]] = ()
    # The field of ``window`` in the specification, which is also its name in a model's configuration; "": no window.
    window_field: ClassVar[str] = ""
    # The field of the tokens before the window that vLLM keeps too: a reader's blocks begin there.
    retained_field: ClassVar[str] = ""
    # Whether a prefix needs every block from its first token on. Such blocks are stored behind their parents only, and
    # a lookup ends at the first that is missing.
    whole_prefix: ClassVar[bool]
    # Whether a request's table says which block has which content. False: only vLLM's prefix cache does.
    by_position: ClassVar[bool] = True
    split: ClassVar[Split] = Split.HEADS
    # What such layers are called -> models that have them. For the documentation.
    models: ClassVar[Mapping[str, str]]
    # Fields of the specification that must have these values; others cannot be stored.
    required: ClassVar[Mapping[str, object]] = MappingProxyType({})

    def __post_init__(self) -> None:
        if (self.window is None) == bool(self.window_field):
            raise ValueError(f"{self.name} attention with a window of {self.window} tokens")

    @abstractmethod
    def num_skipped_tokens(self, computed: int) -> int:
        """vLLM's ``get_num_skipped_tokens``: with ``computed`` tokens computed, vLLM has freed the blocks that end at
        or before this position, and no later token reads them."""

    def held_tokens(self) -> int | None:
        """How many of the last computed tokens vLLM certainly holds the blocks of; None: all."""
        return None

    def first_needed(self, tokens: int) -> int:
        """The first position that a reader of ``tokens`` tokens needs; it may compute the last ``recomputed`` of them
        again."""
        return self.num_skipped_tokens(max(0, tokens - self.recomputed))

    @property
    def stored_window(self) -> int | None:
        """The window with which a kind that computes one token again has this ``first_needed``."""
        return self.window

    def taken_blocks(self, num_blocks: int, block_tokens: int, in_flight: InFlight) -> int:
        """The most blocks that a request takes at once for tokens of ``num_blocks`` blocks, of ``block_tokens`` each.
        No fewer than vLLM's ``max_admission_blocks_per_request`` and ``get_num_blocks_to_allocate`` ask for."""
        if self.window is None:
            return num_blocks
        # Neither the window nor the tokens in flight need begin with a block.
        return min(num_blocks, (self.window + in_flight.tokens + in_flight.drafts) // block_tokens + 2)

    def usable_tokens(self, tokens: int, prompt: int) -> int:
        """How many of ``tokens`` tokens that are at hand vLLM can take for a prompt of ``prompt`` tokens. It computes
        at least the last one."""
        return min(tokens, prompt - 1)

    def lookup_tokens(self, prompt: int) -> int:
        """How many tokens of a prompt are worth looking up."""
        return prompt

    def describe(self) -> str:
        return describe_kind(self.name, self.window)


def describe_kind(kind: str, window: int | None) -> str:
    """Of any name and window: another process may have sent them."""
    return f"{kind} attention" + ("" if window is None else f" over {window}")


class CacheGroup(NamedTuple):
    """A KV cache group: tokens of a block, and the kind."""

    block_tokens: int
    kind: CacheKind

    def num_blocks(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_tokens)

    def load_blocks(self, start: int, tokens: int) -> int:
        """Blocks that a load of ``tokens`` tokens fills from token ``start`` on, which begins a block."""
        return self.num_blocks(tokens) - max(start // self.block_tokens, self.first_needed_block(tokens))

    def num_skipped_blocks(self, computed: int) -> int:
        """Blocks that vLLM has freed; see ``CacheKind.num_skipped_tokens``."""
        return self.kind.num_skipped_tokens(computed) // self.block_tokens

    def first_needed_block(self, tokens: int) -> int:
        """See ``CacheKind.first_needed``."""
        return self.kind.first_needed(tokens) // self.block_tokens

    @property
    def stored_window(self) -> int | None:
        """The window that stores know: the kind's own if it needs the same blocks of prefixes that end with a block."""
        own, stored = self.kind.window, self.kind.stored_window
        return stored if own and stored and self.num_blocks(own) < self.num_blocks(stored) else own

    def first_own_block(self, computed: int) -> int:
        """The first block that certainly belongs to a request in a step that begins at token ``computed``: another
        request may have those that vLLM freed. Only for groups without ``whole_prefix``: of others it frees none."""
        return min(computed // self.block_tokens, self.num_skipped_blocks(computed) + 1)
