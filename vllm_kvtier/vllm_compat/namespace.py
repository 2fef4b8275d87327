"""The namespace of an engine: everything that its block hashes leave out but that its KV depends on."""

import hashlib
import json
import logging
import os
import sys
from typing import Any

from vllm.v1.core import kv_cache_utils

from vllm_kvtier.fingerprint import IGNORED, model_folder, sampled_bytes, weight_files
from vllm_kvtier.wire.messages import Namespace

logger = logging.getLogger("vllm.kvtier.namespace")

def settle_hash_seed(vllm_config: Any) -> None:
    """Make a random prefix-cache seed a fixed one, so that two engines agree; call before the engine core hashes.

    Before vLLM 0.29 the seed is random per process unless PYTHONHASHSEED is set. With sha256 nothing depends on
    its being secret, so we set one. xxhash is not collision resistant: there a random seed protects tenants from
    each other, so we leave it and pulls between engines are refused with the remedy.
    """
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm.startswith("sha256"):
        os.environ.setdefault("PYTHONHASHSEED", "0")


def hash_algorithm(vllm_config: Any) -> str:
    """sha256 and xxhash hash a pickle, whose bytes depend on the Python version; the cbor forms do not."""
    name = str(vllm_config.cache_config.prefix_caching_hash_algo)
    return name if name.endswith("cbor") else f"{name}/py{sys.version_info.major}.{sys.version_info.minor}"


def hash_function(vllm_config: Any) -> Any:
    from vllm.utils.hashing import get_hash_fn_by_name

    return get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)


def namespace(vllm_config: Any, hash_block_tokens: int, fingerprint: str | None) -> Namespace:
    """Read once hashing is set up (NONE_HASH is made late in the engine core's start)."""
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    cache_dtype = f"{cache.cache_dtype}/{vllm_config.model_config.dtype}".replace("torch.", "")
    if getattr(cache, "calculate_kv_scales", False):
        # An option of older vLLM: scales come from the engine's first batch; nobody else's bytes mean the same.
        cache_dtype += f"/scales of {os.urandom(8).hex()}"
    return Namespace(
        model=fingerprint or model_fingerprint(vllm_config),
        cache_dtype=cache_dtype,
        hash_algorithm=hash_algorithm(vllm_config),
        hash_seed=hashlib.blake2b(bytes(kv_cache_utils.NONE_HASH), digest_size=8).hexdigest(),
        hash_block_tokens=hash_block_tokens,
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
    )


def model_fingerprint(vllm_config: Any) -> str:
    """Digest of the model's configuration and of samples of its weight files.

    Dummy weights count by their seed. Weights that are not local files count by name and revision.
    """
    model = vllm_config.model_config
    digest = hashlib.blake2b(digest_size=16)
    config = {k: v for k, v in model.hf_config.to_dict().items() if k not in IGNORED}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(f"|{model.quantization}".encode())
    load_format = str(getattr(vllm_config.load_config, "load_format", "auto"))
    if "dummy" in load_format:
        digest.update(f"|dummy weights, seed {model.seed}".encode())
        return digest.hexdigest()
    folder = model_folder(model.model, model.revision)
    files = weight_files(folder) if folder else []
    if files:
        for file in files:
            digest.update(file.name.encode() + sampled_bytes(file))
    else:
        digest.update(f"|{model.model}@{model.revision}".encode())
        logger.info("kvtier: no local weight files for %s; engines are matched by its name and revision", model.model)
    return digest.hexdigest()
