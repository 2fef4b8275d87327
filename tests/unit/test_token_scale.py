"""Caches with scales per token and head: vLLM sets all scales to 1.0 when a layer first uses its cache."""

from types import SimpleNamespace

import pytest
import torch
from cache_shapes import allocate, bytes_of, config_of, full, group, new_config, new_layouts, spec_module
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from vllm_kvtier import connector as ours
from vllm_kvtier.errors import UnsupportedLayout
from vllm_kvtier.vllm_compat.layout import kv_layout
from vllm_kvtier.vllm_compat.layout.kv_layout import cache_view
from vllm_kvtier.vllm_compat.layout.token_scale import make_scale_views, scale_fault

NAMES = ("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head")
BLOCK, HEADS, SIZE, NUM_BLOCKS = 16, 2, 8, 4

pytestmark = new_layouts


class Cache:
    """Layers "a" and "b" of vLLM's Triton attention, with their caches [B, H, N, C]."""

    def __init__(self, name="int8_per_token_head", order="LBNHC"):
        mode = spec_module.KVQuantMode[name.upper()]
        dtype = torch.int8 if name.startswith("int8") else torch.uint8
        data = SIZE // 2 if name.startswith("int4") else SIZE
        spec = full(BLOCK, HEADS, SIZE, dtype, kv_quant_mode=mode, state_content_bytes=2 * (data + 4))
        self.config = new_config(NUM_BLOCKS, order, group("ab", spec))
        self.caches = allocate(self.config, order)
        self.vllm = config_of("TRITON_ATTN", "ab", cache_dtype=name)
        self.modules = self.vllm.compilation_config.static_forward_context
        for layer, module in self.modules.items():
            module.impl = TritonAttentionImpl(HEADS, SIZE, 1.0, HEADS, None, None, name)
            module.kv_cache = self.caches[layer]

    def view(self):
        return cache_view(self.caches, self.config, self.vllm, "cpu")


@pytest.fixture
def register(root, monkeypatch):
    """Makes the connector of a worker and registers caches with it."""
    made = []

    def call(cache):
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(root / "models" / "recall-6m"), skip_tokenizer_init=True, dtype="float32", max_model_len=1024
            ),
            cache_config=CacheConfig(block_size=BLOCK),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=1024, is_encoder_decoder=False
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVTierConnector", kv_connector_module_path="vllm_kvtier.connector", kv_role="kv_both"
            ),
        )  # fmt: skip
        config.compilation_config.static_forward_context = cache.modules
        made.append(ours.KVTierConnector(config, KVConnectorRole.WORKER, cache.config))
        made[0].register_kv_caches(cache.caches)
        return made[0]

    monkeypatch.setattr(ours, "rank_in_engine", lambda: 0)
    yield call
    for connector in made:
        connector.shutdown()


@pytest.mark.parametrize("name", NAMES)
def test_first_forward_keeps_each_scale_of_loaded_blocks(register, name):
    """In an engine that is not warmed up the first step's forward came behind loads, whose scales it set to 1.0."""
    cache = Cache(name)
    connector = register(cache)
    assert connector._worker is not None and not connector.containment.errors
    for tensor in cache.caches.values():
        tensor[2].copy_(torch.randint(1, 100, tensor[2].shape))  # a load
    before = {layer: bytes_of(tensor) for layer, tensor in cache.caches.items()}
    for module in cache.modules.values():
        module.impl._pth_key_value_caches(module.kv_cache)  # as in a forward, and where a step's KV is written
    for layer, tensor in cache.caches.items():
        assert torch.equal(bytes_of(tensor), before[layer])


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "BLHNC", "BHLNC"])
@pytest.mark.parametrize("name", NAMES)
def test_pages_are_described_when_scale_views_are_made(name, order):
    cache = Cache(name, order)
    with pytest.raises(UnsupportedLayout, match="layer a: .* not made yet"):
        cache.view()
    make_scale_views(cache.caches, cache.vllm)
    view = cache.view()
    for region in view.groups[0].regions:
        assert (region.inner, region.dtype) == (cache.caches["a"].shape[-1], f"{name}:{name}")
        assert torch.equal(view.pages(region), bytes_of(cache.caches[region.layer]))


def test_scale_views_of_another_tensor_are_refused():
    """As of a cache that vLLM made to estimate its memory."""
    cache, other = Cache(), Cache()
    make_scale_views(other.caches, other.vllm)
    cache.modules["a"].impl = other.modules["a"].impl
    make_scale_views(cache.caches, cache.vllm)
    with pytest.raises(UnsupportedLayout, match="layer a: .* not in the cells"):
        cache.view()


def test_layer_of_another_backend_without_views_is_refused():
    cache = Cache()
    for module in cache.modules.values():
        module.impl = SimpleNamespace(_is_per_token_head_quant=True)
    make_scale_views(cache.caches, cache.vllm)
    with pytest.raises(UnsupportedLayout, match="not made yet"):
        cache.view()


def test_scale_per_token_is_refused_if_probe_failed(monkeypatch):
    cache = Cache()
    make_scale_views(cache.caches, cache.vllm)
    monkeypatch.setattr(kv_layout, "granted", lambda feature: False)
    monkeypatch.setattr(kv_layout, "refused", lambda feature: f"no {feature.name}")
    with pytest.raises(UnsupportedLayout, match="layer a: .*no TOKEN_SCALE"):
        cache.view()


@pytest.mark.parametrize("order, right", [("NHD", True), ("HND", False)])
def test_scale_views_of_old_layout_fit_only_pages_with_tokens_first(order, right):
    """vLLM 0.25.1 places them as in a page of tokens before heads, whatever the page's order. Moved with parts of a
    page (a prompt's last block, some of the heads), they would be other cells' scales."""
    raw = torch.zeros(NUM_BLOCKS, 2, *((BLOCK, HEADS) if order == "NHD" else (HEADS, BLOCK)), SIZE + 4).to(torch.int8)
    words = raw.flatten().view(torch.float32)
    word = (SIZE + 4) // 4  # words of a cell
    page = BLOCK * HEADS * word
    k, v = (
        words.as_strided((NUM_BLOCKS, BLOCK, HEADS), (2 * page, HEADS * word, word), side * page + SIZE // 4)
        for side in (0, 1)
    )
    impl = SimpleNamespace(_k_scale_cache=k, _v_scale_cache=v)
    cache = raw if order == "NHD" else raw.transpose(2, 3)
    fault = scale_fault(SimpleNamespace(impl=impl, kv_cache=cache))
    assert (fault == "") is right, fault
