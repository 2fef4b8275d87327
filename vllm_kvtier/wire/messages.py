"""Typed messages between engines, and between an engine's scheduler half and its workers.

One msgpack message a ZMQ frame. ``decode_*`` raise ``msgspec.DecodeError`` on anything that is not one of
these structs within these bounds; the receiver then drops the sender. No message carries an absolute time:
clocks of two processes never agree, so every deadline travels as a number of seconds from "now".
"""

from typing import Annotated

import msgspec

from vllm_kvtier.wire.geometry import CacheGeometry, GroupView

PROTOCOL = 2
MAX_MESSAGE = 64 << 20  # bytes; a 1M-token chain of 16-token blocks is 4 MiB of hashes

BlockHash = Annotated[bytes, msgspec.Meta(min_length=8, max_length=64)]
Chain = Annotated[list[BlockHash], msgspec.Meta(max_length=1 << 17)]
Name = Annotated[str, msgspec.Meta(max_length=512)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Age = Annotated[float, msgspec.Meta(ge=0)]  # seconds


class Namespace(msgspec.Struct, frozen=True):
    """All that makes two engines' blocks interchangeable; compared field by field so that a refusal has a reason."""

    model: Name  # digest of configuration and weights
    cache_dtype: Name
    hash_algorithm: Name
    hash_seed: Name  # digest of NONE_HASH
    hash_block_tokens: Count
    tensor_parallel: Count
    pipeline_parallel: Count
    codecs: Name = ""  # that this engine's KV may have gone through, in words; "": none that loses anything
    adapters: Name = ""  # how it applies LoRA adapters, where that is not as their files and vLLM's defaults say
    options: Name = ""  # of the engine, that change KV and are not at vLLM's defaults

    def mismatch(self, other: "Namespace") -> str | None:
        """One sentence naming the first difference (``self`` is here, ``other`` there), or None.

        Not in how heads and layers are spread over ranks: who can read only from the same rank compares those.
        """
        words = {
            "model": "the model's configuration or weights",
            "cache_dtype": "the KV cache dtype",
            "hash_algorithm": "the prefix-cache hash algorithm",
            "hash_seed": "the prefix-cache hash seed (set the same PYTHONHASHSEED on both engines)",
            "hash_block_tokens": "the block size",
            "codecs": "how KV may have been encoded (codec and wire_codec)",
            "adapters": "how LoRA adapters are applied (lora_dtype, target_modules and the like)",
            "options": "an engine option that changes KV",
        }
        for field, text in words.items():
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                return f"{text} differs: {mine or 'nothing'} here, {theirs or 'nothing'} there"
        return None

    def content(self) -> "Namespace":
        """Without what only says how it is spread over ranks: blocks of one content have one key everywhere."""
        return msgspec.structs.replace(self, tensor_parallel=0, pipeline_parallel=0)


class HeadRange(msgspec.Struct, frozen=True):
    """Which KV heads of a group a rank holds: outer index ``o`` of its regions is head ``first + o`` of ``of``.

    MLA's latent is 0 of 1 on every rank. ``of`` 0: nobody knows; then only ranks that say the same fit each other.
    """

    first: Count
    of: Count


class SharedSpan(msgspec.Struct, frozen=True):
    """An allocation that others of this node may map or read. ``handle``: its CUDA IPC handle, b"" on a CPU."""

    base: Annotated[int, msgspec.Meta(ge=0)]
    nbytes: Annotated[int, msgspec.Meta(ge=0)]
    handle: Annotated[bytes, msgspec.Meta(max_length=256)]


class Shared(msgspec.Struct, frozen=True):
    """Whose memory a rank's pages and its table of checksums are in, for readers on the same node.

    ``node``: of this boot and this pid namespace; ``started``: the process's start time, in clock ticks since boot,
    by which a pid that was given to another process is found. ``device``: UUID of the GPU, "" on a CPU.
    """

    node: Name
    pid: Count
    started: Count
    device: Name
    spans: Annotated[tuple[SharedSpan, ...], msgspec.Meta(max_length=1 << 12)]


class RankInfo(msgspec.Struct, frozen=True):
    """What a peer's worker needs to read this worker's pages: by NIXL if ``agent`` is not "", and from another process
    of the same node if ``shared`` is there. ``heads``: by group."""

    rank: Count
    agent: Name
    agent_metadata: bytes
    memory: Name  # NIXL memory type of the pages: DRAM or VRAM
    device: Count
    num_blocks: Count
    groups: tuple[GroupView, ...]
    geometry: CacheGeometry
    sums_base: Annotated[int, msgspec.Meta(ge=0)]  # address of int64[num_blocks], in the same kind of memory
    heads: tuple[HeadRange, ...] = ()
    shared: Shared | None = None  # its spans cover the pages and the table of checksums


# -- engine to engine ------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a connection."""

    protocol: int
    instance: Name
    namespace: Namespace


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    protocol: int
    instance: Name
    ranks: list[RankInfo]


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Lease blocks, by export id (with the digest of the asker's own chain) or by a chain of block hashes.

    ``chain`` holds the asker's hashes at ``hash_block_tokens`` granularity from token 0; the answer covers the
    longest prefix of it that is still exported, from token ``start`` on.
    """

    ask: Count
    instance: Name  # the source instance the asker shook hands with
    start: Count  # first token wanted; what lies before it the asker has
    chain: Chain
    variant: bytes = b""  # LoRA adapter fingerprint
    export: Name = ""
    digest: bytes = b""  # chain digest of the whole export, tail included
    reply_host: Name = ""  # the asker's own endpoint, "" if it exports nothing
    reply_port: Count = 0
    lend: bool = False  # from the prefix cache as it is, exported or not
    mapped: bool = False  # the asker copies from our mapped memory: NIXL is not needed
    patience: Seconds = 86400.0  # that the asker would wait for checksums which a step has still to make


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    """``blocks[g]`` are the source's block ids of group g from token ``start`` to ``tokens``; 0 where it keeps none."""

    ask: Count
    lease: Count
    tokens: Count
    start: Count
    blocks: list[list[Count]]
    expires_in: Seconds


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """``code``: namespace | instance | unknown | stale | digest | nothing | not_ready | busy | malformed."""

    ask: Count
    code: Name
    reason: Name


class Release(msgspec.Struct, frozen=True, tag="release"):
    """End a lease. ``done``: the asker needs this export no more, so a hand-off may be freed."""

    lease: Count
    done: bool = True


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """The holder of the id gives up an export nobody will ask for (a proxy whose client left)."""

    export: Name


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Keeps the leases of this connection alive for another ``lease_seconds``."""


class Query(msgspec.Struct, frozen=True, tag="query"):
    """What does this engine hold for these prompt tokens? Answered without computing anything."""

    question: Count
    tokens: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]], msgspec.Meta(max_length=1 << 21)]
    cache_salt: Name = ""


class Holding(msgspec.Struct, frozen=True, tag="holding"):
    """Answer to Query, in tokens: the longest prefix in each place."""

    question: Count
    prompt: Count
    gpu_cache: Count
    exported: Count
    stored: Count = 0  # in the node store


class Keep(msgspec.Struct, frozen=True, tag="keep"):
    """Pin what the node store has of this prompt (or unpin it): pinned blocks are not evicted."""

    question: Count
    tokens: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]], msgspec.Meta(max_length=1 << 21)]
    cache_salt: Name = ""
    pinned: bool = True


class Warm(msgspec.Struct, frozen=True, tag="warm"):
    """This prompt will come: what the node store has of it below its memory may come up. Answer: Kept."""

    question: Count
    tokens: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]], msgspec.Meta(max_length=1 << 21)]
    cache_salt: Name = ""


class Kept(msgspec.Struct, frozen=True, tag="kept"):
    """Answer to Keep: how many blocks changed; to Warm: how many are looked for. ``reason``: why nothing could."""

    question: Count
    blocks: Count
    reason: str = ""


class Inspect(msgspec.Struct, frozen=True, tag="inspect"):
    """What does this engine hold and lend right now?"""

    question: Count


class Inspection(msgspec.Struct, frozen=True, tag="inspection"):
    """Counts; all but the first two are 0 when nothing is under way and nothing is exported."""

    question: Count
    blocks: Count  # of the GPU pool
    free_blocks: Count
    exports: Count
    leases: Count  # of others, on our blocks
    exported_blocks: Count
    held_leases: Count  # ours, on others' blocks
    requests: Count  # followed by the connector
    violations: Count  # events that the request table does not know: always 0, or a bug
    copying_blocks: Count = 0  # held while they are copied to the node store
    store: Name = ""  # instance of the node store in use, "" without one


class Explain(msgspec.Struct, frozen=True, tag="explain"):
    """What would this engine find of these prompt tokens, where, what would it do with it, and what became of the rest?
    Nothing is computed, moved or leased. Answer: Explanation."""

    question: Count
    tokens: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]], msgspec.Meta(max_length=1 << 21)]
    cache_salt: Name = ""
    adapter: Name = ""  # name of a LoRA adapter, as in requests


class Stretch(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a prompt, in a KV cache group: ``place`` and ``fate`` as in the store's Span."""

    group: Count
    start: Count
    end: Count
    place: Name
    fate: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    newest: Age = 0.0
    oldest: Age = 0.0


class Source(msgspec.Struct, frozen=True):
    """``tokens``: the longest prefix there; None: not known (it did not answer, or is not to be asked just now)."""

    name: Name  # of a tier below the store's memory, or host:port of another engine of the node
    tokens: Count | None
    state: Name = ""  # of a tier
    reason: Name = ""  # for the state


class Weighed(msgspec.Struct, frozen=True):
    """Whether this engine would load tokens [start, end) from ``source`` ("host": the node store's memory, "gpu":
    another engine of the node) rather than compute them, and why: a reason of ``scheduler.planner``, "always" where the
    engine was told to, "below threshold"."""

    source: Name
    start: Count
    end: Count
    load: bool
    reason: Name
    load_seconds: Age
    compute_seconds: Age | None = None  # None: not measured yet


class Explanation(msgspec.Struct, frozen=True, tag="explanation"):
    """Answer to Explain, in tokens. ``gpu_cache``, ``exported``, ``stored`` as in Holding. ``problem``: why the engine
    could not look, or not everywhere; "" if it could."""

    question: Count
    prompt: Count
    unit: Count = 0  # tokens a block hash covers
    gpu_cache: Count = 0
    exported: Count = 0
    stored: Count = 0
    store: Name = ""  # instance of the node store in use, "" without one
    store_seconds: Age = 0.0  # since it started
    known_seconds: Age = 0.0  # of what ended there in the last so many seconds it is remembered how
    stretches: Annotated[list[Stretch], msgspec.Meta(max_length=1 << 12)] = []
    tiers: Annotated[list[Source], msgspec.Meta(max_length=16)] = []
    engines: Annotated[list[Source], msgspec.Meta(max_length=16)] = []
    weighed: Annotated[list[Weighed], msgspec.Meta(max_length=16)] = []
    pull_threshold: Count = 0
    problem: Name = ""


class Identify(msgspec.Struct, frozen=True, tag="identify"):
    """Who is this engine, in words? Answer: Identified."""

    question: Count


class Identified(msgspec.Struct, frozen=True, tag="identified"):
    """``parts``: (what, in words) of all that its KV depends on beside the tokens: for people, and to say of two
    engines in what they differ. Engines themselves compare namespaces."""

    question: Count
    parts: Annotated[list[tuple[Name, Name]], msgspec.Meta(max_length=64)]


EngineMessage = (
    Hello | Welcome | Ask | Granted | Refused | Release | Drop | Ping
    | Query | Holding | Inspect | Inspection | Keep | Warm | Kept | Explain | Explanation | Identify | Identified
)


# -- scheduler half and its workers -------------------------------------------------------------------------


class Register(msgspec.Struct, frozen=True, tag="register"):
    """``wire_codec``: the option as this rank understood it, without "auto"."""

    info: RankInfo
    wire_codec: str | dict[str, str] = "raw"


class Described(msgspec.Struct, frozen=True, tag="described"):
    """A rank's pages, as the node store needs to know them; comes before Register, and also where NIXL is missing.

    ``shards[g]`` names the part of a group's block that this rank holds; ranks with equal bytes name the same one.
    """

    rank: Count
    groups: tuple[GroupView, ...]
    shards: tuple[Count, ...]


class PoolSetup(msgspec.Struct, frozen=True, tag="pool_setup"):
    """Where the node store is and where in a slot each rank's part lies. ``offsets[rank][g]``: bytes from the slot's
    beginning. ``writes[rank][g]``: whether this rank writes the part (one of those that hold equal bytes does).
    ``codecs``: by group, the name of the codec that keeps it."""

    path: str
    offsets: list[list[Count]]
    writes: list[list[bool]]
    codecs: list[str]


class FarSetup(msgspec.Struct, frozen=True, tag="far_setup"):
    """This engine reads from other nodes' stores itself. ``offsets`` and ``codecs`` as in PoolSetup; ``slot_pages``:
    by group; ``host``: what arrives is to pass through host memory, also where it could go straight to the GPU."""

    offsets: list[list[Count]]
    slot_pages: list[Count]
    codecs: list[str]
    host: bool


class FarLost(msgspec.Struct, frozen=True, tag="far_lost"):
    """A rank could not read from this life of another node's store."""

    rank: Count
    instance: Name
    reason: str


class PoolReady(msgspec.Struct, frozen=True, tag="pool_ready"):
    """A rank can copy to and from the first ``nbytes`` of the memory of this life of the node store; of "far": it has
    so much memory of its own for what it reads from other nodes' stores, 0: it cannot (any more)."""

    rank: Count
    instance: Name
    nbytes: Count


class StoreBlocks(msgspec.Struct, frozen=True, tag="store_blocks"):
    """Copy blocks of one group to slots, behind the forward of ``step``. Arrays are little-endian 64-bit integers."""

    order: Count
    instance: Name
    group: Count
    step: Annotated[int, msgspec.Meta(ge=-1)]
    blocks: bytes
    keys: bytes
    slots: bytes


class CancelStores(msgspec.Struct, frozen=True, tag="cancel_stores"):
    """Of each order copy only so many of its first blocks, unless more have been started."""

    orders: list[tuple[Count, Count]]


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """Orders that this rank is through with. ``cut``: those that were not copied whole, and how many of their first
    blocks were."""

    rank: Count
    done: list[Count]
    cut: list[tuple[Count, Count]]
    nbytes: Count
    seconds: Annotated[float, msgspec.Meta(ge=0)]


class Unusable(msgspec.Struct, frozen=True, tag="unusable"):
    """A worker cannot export or pull (no NIXL backend, undescribable cache); the engine serves without pulls."""

    rank: Count
    reason: str


class Asleep(msgspec.Struct, frozen=True, tag="asleep"):
    """vLLM takes this rank's KV cache away. When it is back the rank registers again."""

    rank: Count


class Summed(msgspec.Struct, frozen=True, tag="summed"):
    """All checksums of steps up to ``step`` are in this rank's table."""

    rank: Count
    step: Count


class Serve(msgspec.Struct, frozen=True, tag="serve"):
    """Peers read from this engine (or stopped): the worker must drive NIXL's progress meanwhile."""

    active: bool


LinkMessage = (
    Register | Described | Unusable | Asleep | Summed | Serve | PoolSetup | PoolReady | StoreBlocks | CancelStores
    | Stored | FarSetup | FarLost
)

_encoder = msgspec.msgpack.Encoder()
_engine_decoder = msgspec.msgpack.Decoder(EngineMessage)
_link_decoder = msgspec.msgpack.Decoder(LinkMessage)


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def decode_engine(frame: bytes) -> EngineMessage:
    if len(frame) > MAX_MESSAGE:
        raise msgspec.DecodeError(f"message of {len(frame)} bytes exceeds the limit of {MAX_MESSAGE}")
    try:
        return _engine_decoder.decode(frame)
    except msgspec.DecodeError:
        raise
    except (RecursionError, ValueError, MemoryError) as error:  # msgspec lets these through; ValueError: not UTF-8
        raise msgspec.DecodeError(f"{type(error).__name__}: {error}") from None


def decode_link(frame: bytes) -> LinkMessage:
    return _link_decoder.decode(frame)
