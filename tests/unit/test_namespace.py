"""What two engines must have in common to share KV, as read from vLLM's configuration."""

from types import SimpleNamespace

import pytest

from vllm_kvtier.vllm_compat import namespace as ns


def of(**cache):
    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="fp8", prefix_caching_hash_algo="sha256", **cache),
        model_config=SimpleNamespace(dtype="torch.bfloat16"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
    )
    return ns.namespace(config, 16, "model")


@pytest.fixture(autouse=True)
def seed(monkeypatch):
    monkeypatch.setattr(ns.kv_cache_utils, "NONE_HASH", b"seed", raising=False)


def test_engines_of_equal_configuration_share():
    assert of() == of() == of(calculate_kv_scales=False)


def test_scales_made_from_an_engine_s_first_batch_are_its_own():
    """The same bytes stand for other numbers in the next engine, and no checksum would tell."""
    assert of(calculate_kv_scales=True).mismatch(of(calculate_kv_scales=True))
