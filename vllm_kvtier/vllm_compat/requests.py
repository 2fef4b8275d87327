"""What we read from vLLM's ``Request``: its hash chain, how much of its KV is written, how it ended."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.request import RequestStatus

from vllm_kvtier.vllm_compat.adapters import ADAPTERS
from vllm_kvtier.vllm_compat.probe import Feature, granted

_VARIANT = "_kvtier_variant"


def variant(request: Any) -> bytes | None:
    """Fingerprint of the request's LoRA adapter, b"" without one: vLLM's block hash holds its name, not its files. Of a
    request that was admitted, what ``keep_variant`` was given; of another one that of now, None: not known."""
    lora = request.lora_request
    if lora is None:
        return b""
    kept = vars(request).get(_VARIANT)
    adapter = ADAPTERS.current(lora) if kept is None else None
    return adapter.digest if adapter is not None else kept


def keep_variant(request: Any, found: bytes) -> None:
    """It is the request's for life: its chain, its leases and its checksums go by it."""
    setattr(request, _VARIANT, found)


def written_tokens(request: Any) -> int:
    """Tokens whose KV is certainly in the cache: a sampled token's KV is written only by the step after it."""
    return max(0, min(request.num_computed_tokens - request.num_output_placeholders, request.num_tokens - 1))


def ended_well(request: Any) -> bool:
    """Stopped or length-capped; an aborted or failed request's blocks are not to be exported."""
    return request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def chain(request: Any, tokens: int, unit: int) -> list[bytes]:
    """Chained hashes of the full blocks among the first ``tokens`` tokens; fewer if vLLM has not hashed them yet."""
    return list(request.block_hashes[: tokens // unit])  # each is bytes


def tail_hash(request: Any, tokens: int, unit: int) -> bytes:
    """Chain hash of the partial block that ends at ``tokens`` (not a multiple of ``unit``).

    Made like vLLM's block hash but with our own digest: parent hash, token ids, extra keys (salt, LoRA,
    multimodal items, embeddings) of that range. Like no other where this vLLM does not say what these are.
    """
    if not granted(Feature.HANDOFFS):
        return os.urandom(32)
    start = tokens // unit * unit
    parent = bytes(request.block_hashes[start // unit - 1]) if start else bytes(kv_cache_utils.NONE_HASH)
    extra, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, tokens, 0)
    text = repr((list(request.all_token_ids[start:tokens]), extra))
    return hashlib.blake2b(parent + text.encode(), digest_size=32).digest()


def is_plain(request: Any) -> bool:
    """Whether nothing but tokens goes into its block hashes."""
    special = request.lora_request, request.mm_features, request.cache_salt, request.prompt_embeds
    return not any(each is not None and each != [] for each in special)


EventKeys = tuple[int | None, str | None, list[Any] | None]


def event_keys(request: Any, blocks: Iterable[tuple[int, int]]) -> Iterator[EventKeys]:
    """(adapter id, adapter name, what beside the tokens was hashed) of each block of tokens [start, end), as vLLM
    publishes them in its KV events. Blocks in rising order: the request's media are gone through once for all of them.
    """
    lora = request.lora_request
    names = (None, None) if lora is None else (lora.adapter_id, lora.lora_name)
    tagged, medium = _tagged_extra_keys(), 0  # the first that has not ended before the next block
    for start, end in blocks:
        keys, medium = kv_cache_utils.generate_block_hash_extra_keys(request, start, end, medium)
        if keys is not None and tagged:
            keys = kv_cache_utils.to_event_extra_keys([keys])[0]
        yield *names, None if keys is None else list(keys)


def chain_digest(hashes: list[bytes], tail: bytes) -> bytes:
    """Digest of a whole chain: its last hash covers all before it, so only that and the tail count."""
    return hashlib.blake2b((hashes[-1] if hashes else b"") + b"|" + tail, digest_size=16).digest()


def hash_prompt(tokens: list[int], cache_salt: str, hash_fn: Any, unit: int, lora: Any = None) -> list[bytes]:
    """The chain vLLM would give a plain text prompt (no multimodal items) with this salt. ``lora``: as a request's.

    Empty where it is not known how this vLLM hashes prompts.
    """
    return chain_of(tokens, cache_salt, hash_fn, unit, lora) if granted(Feature.PROMPTS) else []


def chain_of(tokens: list[int], cache_salt: str, hash_fn: Any, unit: int, lora: Any = None) -> list[bytes]:
    """As ``hash_prompt``, of which the probe compares this with vLLM's own."""
    salted = (("cache_salt", cache_salt),) if _tagged_extra_keys() else (cache_salt,)
    every = tuple(kv_cache_utils._gen_lora_extra_hash_keys(SimpleNamespace(lora_request=lora))) if lora else ()
    hashes: list[bytes] = []
    parent = None
    for start in range(0, len(tokens) - unit + 1, unit):
        extra = (every + salted if start == 0 and cache_salt else every) or None
        parent = kv_cache_utils.hash_block_tokens(hash_fn, parent, tokens[start : start + unit], extra)
        hashes.append(bytes(parent))
    return hashes


def _tagged_extra_keys() -> bool:
    """vLLM 0.31 tags each extra key with its kind."""
    return hasattr(kv_cache_utils, "to_event_extra_keys")
