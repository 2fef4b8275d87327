"""Reads vLLM's ``Request``: its block hashes, how much of its KV is written, how it ended. On the scheduler thread."""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.request import RequestStatus

from vllm_kvtier.vllm_compat.adapters import ADAPTERS
from vllm_kvtier.vllm_compat.probe.features import granted, release
from vllm_kvtier.vllm_compat.probe.row import Feature

if TYPE_CHECKING:
    from vllm_kvtier.vllm_compat.engine_info import EngineInfo

_LORA_FINGERPRINT = "_kvtier_lora_fingerprint"
_LEFT_TO_READER = "_kvtier_left_to_reader"


def lora_fingerprint(request: Any) -> bytes | None:
    """Fingerprint of the request's LoRA adapter, b"" without one: vLLM's block hash holds its name, not its files. For
    an admitted request the one that ``keep_variant`` stored; else the current one, None if unknown."""
    lora = request.lora_request
    if lora is None:
        return b""
    kept = vars(request).get(_LORA_FINGERPRINT)
    adapter = ADAPTERS.current(lora) if kept is None else None
    return adapter.digest if adapter is not None else kept


def keep_variant(request: Any, found: bytes) -> None:
    """Store the fingerprint for the request's lifetime: its hashes, leases and checksums depend on it."""
    setattr(request, _LORA_FINGERPRINT, found)


def admitted_unanswered(request: Any) -> bool:
    """Whether vLLM admits the request where the connector has no answer yet: one that reads no prefix cache, from 0.31
    on. It skips others."""
    return bool(request.skip_reading_prefix_cache) and release() >= (0, 31, 0)


def written_tokens(request: Any) -> int:
    """Tokens whose KV is in the cache: the step after a sampled token writes its KV. A diffusion model that is only to
    read (``diffusion_read_only``, vLLM 0.31 on) emits its canvas from a step that denoises: no step writes its KV."""
    written = max(0, min(request.num_computed_tokens - request.num_output_placeholders, request.num_tokens - 1))
    extra = request.sampling_params and request.sampling_params.extra_args
    return min(written, request.num_prompt_tokens) if extra and extra.get("diffusion_read_only") else written


def scheduled_tokens(request: Any) -> int:
    """Tokens that its steps compute, those in flight included: its recurrent state is behind the last of them."""
    return int(request.num_computed_tokens)


def leave_last_token(request: Any, hash_block_size: int) -> None:
    """Have a prefill end a token earlier, because a reader computes a prompt's last token behind the state before it.
    Its answer, one token, is of no use then. NixlConnector does the same (its ``_prefill_backoff``).

    Before vLLM schedules the request. Nothing changes for prompts that are not of token ids, or of a single one, and
    for requests that want more than a token or log-probabilities of the prompt."""
    tokens = request.num_prompt_tokens - 1
    plain = request.prompt_token_ids is not None and request.prompt_embeds is None and not request.resumable
    if not (plain and tokens and request.max_tokens == 1) or request.skip_reading_prefix_cache:
        return
    vars(request)[_LEFT_TO_READER] = 1
    # The list is the caller's: other requests may have the same one.
    request.prompt_token_ids = request.prompt_token_ids[:-1]
    del request._all_token_ids[-1]
    del request.block_hashes[tokens // hash_block_size :]
    request.num_prompt_tokens = tokens


def prompt_tokens(request: Any) -> int:
    """Tokens of the prompt that was sent, the one included that ``leave_last_token`` took away."""
    left: int = vars(request).get(_LEFT_TO_READER, 0)
    return left + int(request.num_prompt_tokens)


def ends_with_prompt(request: Any) -> bool:
    """Whether no token is computed behind its prompt."""
    return bool(request.max_tokens == 1)


def ended_well(request: Any) -> bool:
    """Whether its engine ended it: it stopped, repeated itself or reached its length. Aborted or failed requests are
    not exported: their answers name no export."""
    return request.status in (
        RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_REPETITION
    )  # fmt: skip


def kept_well(request: Any) -> bool:
    """Whether the KV of its ``written_tokens`` may be stored now that it has ended. vLLM also aborts a request at a
    stop string, which its frontend finds, and a session that is closed. Behind a token of the answer all loads were
    checked, unless a preemption came before: the request may have been loaded again."""
    aborted = request.status is RequestStatus.FINISHED_ABORTED
    return ended_well(request) or (aborted and request.num_output_tokens > 0 and not request.num_preemptions)


def ended_copy(request: Any, events: bool) -> Any:
    """What offloading reads of a request that has ended, without what is large: the pixels of its media, embeddings.
    No list is copied. ``events``: also what ``event_keys`` and labels need, if its prompt is not of embeddings."""
    kept = SimpleNamespace(
        lora_request=request.lora_request, cache_salt=request.cache_salt, block_hashes=request.block_hashes,
        num_prompt_tokens=request.num_prompt_tokens, num_computed_tokens=request.num_computed_tokens,
    )  # fmt: skip
    if _LORA_FINGERPRINT in vars(request):
        keep_variant(kept, vars(request)[_LORA_FINGERPRINT])
    if events:
        kept.all_token_ids, kept.prompt_embeds = request.all_token_ids, None
        kept.mm_features = [dataclasses.replace(feature, data=None) for feature in request.mm_features or ()]
    return kept


def block_hashes(request: Any, tokens: int, hash_block_size: int) -> list[bytes]:
    """Chained hashes of the full blocks among the first ``tokens`` tokens; fewer if vLLM has not hashed them yet."""
    return list(request.block_hashes[: tokens // hash_block_size])  # each is bytes


def hash_blocks(request: Any, tokens: int, hash_block_size: int, hash_fn: Any, known: list[bytes]) -> list[bytes]:
    """The request's block hashes as an engine with this ``hash_block_size`` makes them, ``known`` and those after it
    up to ``tokens`` tokens. Any thread, while the request gets no tokens."""
    hashes, medium = list(known), 0
    for start in range(len(hashes) * hash_block_size, tokens - hash_block_size + 1, hash_block_size):
        end = start + hash_block_size
        extra, medium = kv_cache_utils.generate_block_hash_extra_keys(request, start, end, medium)
        parent = hashes[-1] if hashes else None
        hashes.append(
            bytes(kv_cache_utils.hash_block_tokens(hash_fn, parent, request.all_token_ids[start:end], extra))
        )
    return hashes


def hashes_blocks_of_other_sizes() -> bool:
    """Whether ``hash_blocks`` is known to make the hashes of this vLLM."""
    return granted(Feature.HANDOFFS) and granted(Feature.PROMPTS)


def tail_hash(request: Any, tokens: int, hash_block_size: int, hashes: Sequence[bytes] | None = None) -> bytes:
    """Hash of the partial block that ends at ``tokens`` (not a multiple of ``hash_block_size``). ``hashes``: if the
    request's own are those of another block size.

    Computed like vLLM's block hash but with our own digest: parent hash, token ids, extra keys (salt, LoRA, multimodal
    items, embeddings) of that range. Random if this vLLM does not tell the extra keys.
    """
    if not granted(Feature.HANDOFFS):
        return os.urandom(32)
    start = tokens // hash_block_size * hash_block_size
    before = request.block_hashes if hashes is None else hashes
    parent = bytes(before[start // hash_block_size - 1]) if start else bytes(kv_cache_utils.NONE_HASH)
    extra, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, tokens, 0)
    text = repr((list(request.all_token_ids[start:tokens]), extra))
    return hashlib.blake2b(parent + text.encode(), digest_size=32).digest()


def is_plain(request: Any) -> bool:
    """Whether its block hashes depend on tokens only."""
    special = request.lora_request, request.mm_features, request.cache_salt, request.prompt_embeds
    return not any(each is not None and each != [] for each in special)


EventKeys = tuple[str | None, list[Any] | None]


def event_keys(request: Any, blocks: Iterable[tuple[int, int]]) -> Iterator[EventKeys]:
    """(adapter name, extra keys) of each block of tokens [start, end), as in vLLM's KV events. Blocks must
    be in rising order, so that one pass over the request's media serves all of them."""
    lora = request.lora_request
    adapter = None if lora is None else lora.lora_name
    tagged, medium = _tagged_extra_keys(), 0  # the first medium that does not end before the next block
    for start, end in blocks:
        keys, medium = kv_cache_utils.generate_block_hash_extra_keys(request, start, end, medium)
        if keys is not None and tagged:
            keys = kv_cache_utils.to_event_extra_keys([keys])[0]
        yield adapter, None if keys is None else list(keys)


def prefix_digest(hashes: list[bytes], tail: bytes) -> bytes:
    """Digest of all block hashes: the last one covers all before it, so only that and the tail are digested."""
    return hashlib.blake2b((hashes[-1] if hashes else b"") + b"|" + tail, digest_size=16).digest()


def hash_prompt(
    info: "EngineInfo", tokens: list[int], cache_salt: str, hash_block_size: int, lora: Any = None
) -> list[bytes]:
    """vLLM's block hashes of a plain text prompt (no multimodal items) with this salt. ``lora``: as a request's.

    Empty if it is unknown how this vLLM hashes prompts, or if its hashes cover tokens behind their blocks.
    """
    known = granted(Feature.PROMPTS) and not info.hash_lookahead
    return block_hashes_of(tokens, cache_salt, info.hash_function(), hash_block_size, lora) if known else []


def block_hashes_of(
    tokens: list[int], cache_salt: str, hash_fn: Any, hash_block_size: int, lora: Any = None
) -> list[bytes]:
    """As ``hash_prompt``; the probe compares it with vLLM's own hashes."""
    salted = (("cache_salt", cache_salt),) if _tagged_extra_keys() else (cache_salt,)
    every = tuple(kv_cache_utils._gen_lora_extra_hash_keys(SimpleNamespace(lora_request=lora))) if lora else ()
    hashes: list[bytes] = []
    parent = None
    for start in range(0, len(tokens) - hash_block_size + 1, hash_block_size):
        extra = (every + salted if start == 0 and cache_salt else every) or None
        parent = kv_cache_utils.hash_block_tokens(hash_fn, parent, tokens[start : start + hash_block_size], extra)
        hashes.append(bytes(parent))
    return hashes


def _tagged_extra_keys() -> bool:
    """vLLM 0.31 tags each extra key with its kind."""
    return hasattr(kv_cache_utils, "to_event_extra_keys")
