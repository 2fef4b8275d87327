"""Typed messages between engines, and from tools to engines. Those of an engine's own two sides: ``wire.link``.

One msgpack message per ZMQ frame. ``decode_*`` raise ``msgspec.DecodeError`` for a message that is none of these
structs or exceeds their bounds; the receiver then disconnects the sender. A deadline travels as seconds from "now",
because the clocks of two processes differ.
"""

from typing import Annotated

import msgspec

from vllm_kvtier.wire.decoding import decode
from vllm_kvtier.wire.geometry import CacheGeometry, GroupView

PROTOCOL = 6
MAX_MESSAGE = 64 << 20  # bytes; the block hashes of 1M tokens in blocks of 16 take 4 MiB
MAX_BLOCK_HASHES = 1 << 17

BlockHash = Annotated[bytes, msgspec.Meta(min_length=8, max_length=64)]
BlockHashes = Annotated[list[BlockHash], msgspec.Meta(max_length=MAX_BLOCK_HASHES)]
Digest = Annotated[bytes, msgspec.Meta(max_length=64)]
Name = Annotated[str, msgspec.Meta(max_length=512)]
Instances = Annotated[str, msgspec.Meta(max_length=1 << 16)]  # of the stores of an engine over several nodes
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Age = Annotated[float, msgspec.Meta(ge=0)]  # seconds
Tokens = Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]], msgspec.Meta(max_length=1 << 21)]


class Namespace(msgspec.Struct, frozen=True):
    """The properties that make two engines' blocks interchangeable. Compared field by field, so that a refusal names
    the difference."""

    model: Name  # digest of configuration and weights
    cache_dtype: Name
    hash_algorithm: Name
    hash_seed: Name  # digest of NONE_HASH
    hash_block_size: Count
    tensor_parallel: Count
    pipeline_parallel: Count
    codecs: Name = ""  # lossy codecs that this engine's KV may have passed, as text; "": none
    adapters: Name = ""  # options for LoRA adapters that differ from vLLM's defaults and the adapters' files
    options: Name = ""  # engine options that change KV and differ from vLLM's defaults
    context_parallel: Name = ""  # its sizes, and how tokens are divided over ranks; "": none

    def mismatch(self, other: "Namespace") -> str | None:
        """One sentence naming the first difference (``self`` is here, ``other`` there), or None.

        Leaves out how heads, layers and tokens are distributed over ranks, and the block size: readers that need equal
        ones compare them.
        """
        texts = {
            "model": "the model's configuration or weights",
            "cache_dtype": "the KV cache dtype",
            "hash_algorithm": "the prefix-cache hash algorithm",
            "hash_seed": "the prefix-cache hash seed (set the same PYTHONHASHSEED on both engines)",
            "codecs": "how KV may have been encoded (codec and wire_codec)",
            "adapters": "how LoRA adapters are applied (lora_dtype, target_modules and the like)",
            "options": "an engine option that changes KV",
        }
        for field, text in texts.items():
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                return f"{text} differs: {mine or 'nothing'} here, {theirs or 'nothing'} there"
        return None

    def content(self) -> "Namespace":
        """This namespace without the distribution over ranks, so that equal content has equal keys."""
        return msgspec.structs.replace(self, tensor_parallel=0, pipeline_parallel=0, context_parallel="")


class HeadRange(msgspec.Struct, frozen=True):
    """The KV heads of a group on a rank: outer index ``o`` of its regions is head ``first + o`` of ``of``.

    MLA's latent is 0 of 1 on every rank. Of recurrent states, ``Region.shares`` are counted. ``of`` 0: unknown; then
    only ranks with an equal HeadRange match.
    """

    first: Count
    of: Count


class SharedSpan(msgspec.Struct, frozen=True):
    """An allocation that other engines of this node may map or read. ``handle``: CUDA IPC handle, b"" on a CPU."""

    base: Annotated[int, msgspec.Meta(ge=0)]
    nbytes: Annotated[int, msgspec.Meta(ge=0)]
    handle: Annotated[bytes, msgspec.Meta(max_length=256)]


class Shared(msgspec.Struct, frozen=True):
    """The process whose memory holds a rank's pages and checksum table, for readers on the same node.

    ``node``: identifies the boot and the pid namespace. ``started``: the process's start time, in clock ticks since
    boot, which reveals a reused pid. ``device``: UUID of the GPU, "" on a CPU.
    """

    node: Name
    pid: Count
    started: Count
    device: Name
    spans: Annotated[tuple[SharedSpan, ...], msgspec.Meta(max_length=1 << 12)]


class RankInfo(msgspec.Struct, frozen=True):
    """Access to a worker's pages for a peer's worker: by NIXL if ``agent`` is not "", and from another process of the
    same node if ``shared`` is set. ``heads``: by group."""

    rank: Count
    agent: Name
    agent_metadata: bytes
    memory: Name  # NIXL memory type of the pages: DRAM or VRAM
    device: Count
    num_blocks: Count
    groups: tuple[GroupView, ...]
    geometry: CacheGeometry
    checksum_table_addr: Annotated[int, msgspec.Meta(ge=0)]  # address of int64[num_blocks], in the same kind of memory
    heads: tuple[HeadRange, ...] = ()
    shared: Shared | None = None  # its spans cover the pages and the table of checksums


# -- engine to engine ------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a connection."""

    protocol: int
    instance: Name
    namespace: Namespace


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """``hash_block_size``: tokens that a block hash covers here. 0: as many as at the requester."""

    protocol: int
    instance: Name
    ranks: list[RankInfo]
    hash_block_size: Count = 0


class LeaseRequest(msgspec.Struct, frozen=True, tag="lease_request"):
    """Lease blocks by export id (with the digest of the requester's own prefix) or by block hashes.

    ``block_hashes`` holds one hash per ``Welcome.hash_block_size`` tokens, from token 0. The lease covers their longest
    exported prefix, from token ``start`` on.
    """

    lookup_id: Count  # repeated in the answer
    instance: Name  # the instance that answered the handshake
    start: Count  # first token wanted
    block_hashes: BlockHashes
    lora_fingerprint: Digest = b""
    export: Name = ""
    digest: Digest = b""  # prefix digest of the whole export, including the partial block
    reply_host: Name = ""  # the requester's own endpoint, "" if it exports nothing
    reply_port: Count = 0
    from_prefix_cache: bool = False  # from the prefix cache, exported or not
    mapped: bool = False  # the requester copies from mapped memory and needs no NIXL
    wait_seconds: Seconds = 86400.0  # maximum wait for checksums that a step has yet to compute
    follow: bool = False  # the export's prefill may not have ended, or not have begun: wait for it
    stretches: bool = False  # with ``follow``: grant what it has computed while it goes on
    # With hashes: an export of at most so many tokens may end within a block. The requester compares ``tail``.
    partial_up_to: Count = 0


class LeaseGranted(msgspec.Struct, frozen=True, tag="lease_granted"):
    """``blocks[g]``: the source's block ids of group g for tokens [start, tokens); 0: not cached. ``final``: False for
    a stretch of a prefill that goes on; more grants follow, or a refusal. The last grant is of all that was asked for.
    """

    lookup_id: Count
    lease: Count
    tokens: Count
    start: Count
    blocks: list[list[Count]]
    expires_in: Seconds
    tail: bytes = b""  # hash of the partial block that ends at ``tokens``
    final: bool = True


STILL_STARTING = "the engine is still starting"  # the reason, until its namespace and all ranks are known


class LeaseRefused(msgspec.Struct, frozen=True, tag="lease_refused"):
    """``code``: namespace | starting | instance | malformed, or a value of ``scheduler.leases.exports.Refusal``."""

    lookup_id: Count
    code: Name
    reason: Name


class Release(msgspec.Struct, frozen=True, tag="release"):
    """End a lease. ``done``: the requester no longer needs this export, so that a hand-off may be freed."""

    lease: Count
    done: bool = True


class StopFollowing(msgspec.Struct, frozen=True, tag="stop_following"):
    """Grant nothing more for this lease request. What was granted is released by itself."""

    lookup_id: Count


class StillPrefilling(msgspec.Struct, frozen=True, tag="still_prefilling"):
    """Answer to Ping for each lease request that follows a prefill which is queued or runs."""

    lookup_id: Count


class ReleaseExport(msgspec.Struct, frozen=True, tag="release_export"):
    """Free an export that will not be pulled, for example because the proxy's client disconnected."""

    export: Name


MAX_KEPT_EXPORTS = 1024  # of one Ping


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Heartbeat: extends the leases of this connection by ``lease_seconds``. ``exports``: of prefills whose requests
    are queued here."""

    exports: Annotated[list[Name], msgspec.Meta(max_length=MAX_KEPT_EXPORTS)] = []


class PromptQuestion(msgspec.Struct, frozen=True):
    """About the tokens of a prompt. ``question``: repeated in the answer."""

    question: Count
    tokens: Tokens
    cache_salt: Name = ""


class Query(PromptQuestion, frozen=True, tag="query"):
    """Ask for the cached prefix of these prompt tokens. The engine computes nothing. Answer: PrefixLengths."""


class PrefixLengths(msgspec.Struct, frozen=True, tag="prefix_lengths"):
    """Answer to Query: the longest cached prefix in each tier, in tokens."""

    question: Count
    prompt: Count
    gpu_cache: Count
    exported: Count
    stored: Count = 0  # in the node store


class PinPrompt(PromptQuestion, frozen=True, tag="pin_prompt"):
    """Pin or unpin the blocks of this prompt in the node store; pinned blocks are not evicted. Answer: PinResult."""

    pinned: bool = True


class Warm(PromptQuestion, frozen=True, tag="warm"):
    """Promote the blocks of this prompt from the node store's secondary tiers to memory. Answer: PinResult."""


class PinResult(msgspec.Struct, frozen=True, tag="pin_result"):
    """Answer to PinPrompt (number of blocks changed) and Warm (number looked up). ``reason``: why it was impossible."""

    question: Count
    blocks: Count
    reason: str = ""


class Inspect(msgspec.Struct, frozen=True, tag="inspect"):
    """Ask for counts of cached, exported and leased blocks. Answer: Inspection."""

    question: Count


class Inspection(msgspec.Struct, frozen=True, tag="inspection"):
    """Answer to Inspect. All but the pool's counts are 0 while the engine is idle and exports nothing."""

    question: Count
    blocks: Count  # of the GPU pool
    free_blocks: Count
    exports: Count
    leases: Count  # granted to peers
    exported_blocks: Count
    held_leases: Count  # on peers' blocks
    requests: Count  # tracked by the connector
    violations: Count  # events that the request lifecycle does not allow; more than 0 is a bug
    copying_blocks: Count = 0  # held during the copy to the node store
    store: Instances = ""  # instance of the node store in use, "" without one


class Explain(PromptQuestion, frozen=True, tag="explain"):
    """Ask which blocks of these prompt tokens are cached, in which tier, whether they would be loaded, and why the
    others are gone. The engine computes, moves and leases nothing. Answer: Explanation."""

    adapter: Name = ""  # name of a LoRA adapter, as in requests


class ExplainedSpan(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a prompt in a KV cache group; the other fields are as in the store's Span."""

    group: Count
    start: Count
    end: Count
    tier: Name
    removal_reason: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    newest: Age = 0.0
    oldest: Age = 0.0


class Source(msgspec.Struct, frozen=True):
    """``tokens``: the longest cached prefix; None: unknown (no answer, or unavailable now)."""

    name: Name  # of a secondary tier, or host:port of another engine of the node
    tokens: Count | None
    state: Name = ""  # of a tier
    reason: Name = ""  # for the state


class LoadEstimate(msgspec.Struct, frozen=True):
    """Whether this engine would load tokens [start, end) from ``source`` rather than compute them. ``source``: "host"
    (the node store's memory) or "peer_gpu" (another engine of the node). ``reason``: of
    ``scheduler.planner.load_planner``, "policy_always" (``load_policy``), or "below_threshold"."""

    source: Name
    start: Count
    end: Count
    load: bool
    reason: Name
    load_seconds: Age
    compute_seconds: Age | None = None  # None: not measured yet


class Explanation(msgspec.Struct, frozen=True, tag="explanation"):
    """Answer to Explain, in tokens. ``gpu_cache``, ``exported``, ``stored`` as in PrefixLengths. ``problem``: why the
    engine could not check all tiers, "" if it could. ``namespace``: its id in the store, in hexadecimal digits; of an
    engine over several nodes one for each node's store, in order."""

    question: Count
    prompt: Count
    hash_block_size: Count = 0  # tokens a block hash covers
    gpu_cache: Count = 0
    exported: Count = 0
    stored: Count = 0
    store: Instances = ""  # instance of the node store in use, "" without one
    store_seconds: Age = 0.0  # since it started
    history_seconds: Age = 0.0  # length of the store's removal history
    spans: Annotated[list[ExplainedSpan], msgspec.Meta(max_length=1 << 12)] = []
    tiers: Annotated[list[Source], msgspec.Meta(max_length=16)] = []
    peers: Annotated[list[Source], msgspec.Meta(max_length=16)] = []
    load_decisions: Annotated[list[LoadEstimate], msgspec.Meta(max_length=16)] = []
    pull_threshold: Count = 0
    problem: Name = ""
    namespace: Instances = ""


class GetIdentity(msgspec.Struct, frozen=True, tag="get_identity"):
    """Ask for the engine's identity, for people. Answer: Identity."""

    question: Count


class Identity(msgspec.Struct, frozen=True, tag="identity"):
    """``parts``: (name, text) of each property that determines the KV besides the tokens. It lets people compare two
    engines; engines themselves compare namespaces."""

    question: Count
    parts: Annotated[list[tuple[Name, Name]], msgspec.Meta(max_length=64)]


EngineMessage = (
    Hello
    | Welcome
    | LeaseRequest
    | LeaseGranted
    | LeaseRefused
    | Release
    | StopFollowing
    | StillPrefilling
    | ReleaseExport
    | Ping
    | Query
    | PrefixLengths
    | Inspect
    | Inspection
    | PinPrompt
    | Warm
    | PinResult
    | Explain
    | Explanation
    | GetIdentity
    | Identity
)

encode = msgspec.msgpack.Encoder().encode
_engine_decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)


def decode_engine(frame: bytes) -> EngineMessage:
    if len(frame) > MAX_MESSAGE:
        raise msgspec.DecodeError(f"message of {len(frame)} bytes exceeds the limit of {MAX_MESSAGE}")
    return decode(_engine_decoder, frame)
