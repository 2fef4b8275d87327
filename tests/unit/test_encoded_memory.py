"""Pulls that carry a codec: rows of encoded blocks between two engines' caches."""

import numpy as np
import pytest
import torch
from pull_fakes import TOKENS, Pair, batch_of, cache_of_numbers, pull_of
from support import eventually

from vllm_kvtier import codecs
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.memory.memory_limits import MemoryLimits
from vllm_kvtier.vllm_compat.worker_info import ranks_on_node
from vllm_kvtier.wire.geometry import geometry_mismatch
from vllm_kvtier.worker.device.step_events import StepEvents
from vllm_kvtier.worker.nixl_pull import encoded_memory, host_mirror
from vllm_kvtier.worker.nixl_pull.encoded_memory import EncodedMemory
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory


def numbers(memory, block):
    """float32 [layers, heads, tokens, numbers] of a block."""
    return torch.stack(
        [memory.view.pages(r)[block].view(torch.bfloat16).float().cpu() for r in memory.view.groups[0].regions]
    )


def rows(memory, block):
    (region,) = memory.transfer_view.groups[0].regions
    return memory.transfer_view.pages(region)[block].flatten()


@pytest.fixture
def made():
    """Makes pairs, whose rows are given back to the driver: the next test's may lie where they lay."""
    pairs = []

    def make(**kinds) -> Pair:
        pairs.append(Pair(**kinds))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.here.close()
        pair.there.close()


def marked(device):
    return StepEvents(torch.cuda.current_device()).record() if device == "cuda" else None


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
@pytest.mark.parametrize("codec", [name for name in codecs.names() if name != "raw"])
def test_encoded_memory_pull_returns_decoded_blocks(made, codec, device):
    pair = made(codec=codec, device=device)
    made = pair.there.compute_checksums([batch_of([3, 4, 9])], marked(device))
    eventually(made.done, 10)
    untouched = numbers(pair.here, 2)
    result = pair.run(pair.order(pull_of([5, 6, 1], [3, 4, 9])))
    assert not result.failed and not result.bad_blocks and not pair.pulls.active
    assert torch.equal(numbers(pair.here, 2), untouched)
    for here, there in ((5, 3), (6, 4), (1, 9)):
        off = (numbers(pair.here, here) - numbers(pair.there, there)).abs().max()
        assert 0 < off < 0.4, "encoded: near, and not the same"
        assert torch.equal(rows(pair.here, here), rows(pair.there, there)), "can be exported as it came"
    raw = 3 * len(numbers(pair.here, 1).flatten()) * 2
    assert result.bytes < raw, "and fewer bytes crossed"


@DEVICES
def test_encoded_memory_bad_row_is_recomputed(made, device):
    pair = made(codec="int8", device=device)
    eventually(pair.there.compute_checksums([batch_of([3, 4, 9, 7])], marked(device)).done, 10)
    rows(pair.there, 4)[11] ^= 0x10
    (layout,) = pair.there.layouts
    rows(pair.there, 9)[layout.sum_offset + 3] ^= 1
    order = pull_of([5, 6, 1, 2], [3, 4, 9, 7])
    order.keys[3] ^= np.uint64(1)  # another block than was asked for
    result = pair.run(pair.order(order))
    assert result.failed and result.checksum_mismatch and result.bad_blocks == {6, 1, 2}


def test_encoded_memory_row_never_encoded_is_recomputed():
    pair = Pair(codec="int8")
    pair.there.compute_checksums([batch_of([3])], None)
    result = pair.run(pair.order(pull_of([5, 6], [3, 4])))
    assert result.failed and result.bad_blocks == {6}


def test_encoded_memory_row_whose_encoding_failed_is_bad(monkeypatch):
    pair = Pair(codec="int8")
    pair.there.compute_checksums([batch_of([3, 4])], None)
    with monkeypatch.context() as patch:
        patch.setattr(pair.there._copier, "store", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pair.there.compute_checksums([batch_of([3])], None)
    result = pair.run(pair.order(pull_of([5, 6], [3, 4])))
    assert result.bad_blocks == {5}, "the same content, but of another time"
    pair.there.compute_checksums([batch_of([3])], None)
    assert not pair.run(pair.order(pull_of([5], [3]))).failed


def test_encoded_memory_rows_from_before_a_reset_are_bad():
    """Also for a reader whose lease was revoked meanwhile, which it does not know."""
    pair = Pair(codec="int8")
    pair.there.compute_checksums([batch_of([3, 4])], None)
    pair.there.clear_checksums()
    pair.there.compute_checksums([batch_of([3])], None)
    assert pair.run(pair.order(pull_of([5, 6], [3, 4]))).bad_blocks == {6}


def test_encoded_memory_rows_that_are_being_encoded_at_a_reset_are_bad(monkeypatch):
    """A device encodes behind the step's end. vLLM gives the blocks to other requests after the reset: encoded then,
    they would have other content under the old keys."""
    pair = Pair(codec="int8")
    copier, queued = pair.there._copier, []
    store = copier.store

    def idle():
        if queued:
            store(*queued.pop(0))
        return not queued

    monkeypatch.setattr(copier, "store", lambda *order: queued.append(order))
    monkeypatch.setattr(copier, "idle", idle)
    pair.there.compute_checksums([batch_of([3]), batch_of([4])], None)
    pair.there.clear_checksums()
    for order in queued:
        store(*order)
    assert pair.run(pair.order(pull_of([5, 6], [3, 4]))).bad_blocks == {5, 6}


def test_encoded_memory_geometry_matches_same_codec_only():
    view = cache_of_numbers(4, 1)
    kinds = {name: EncodedMemory(view, [codecs.get(name)]).geometry() for name in ("int8", "fp8")}
    kinds["raw"] = CacheMemory(view, host_buffer=False).geometry()
    for a, here in kinds.items():
        for b, there in kinds.items():
            reason = geometry_mismatch(here, there)
            assert (reason is None) == (a == b), reason
            if a != b:
                assert "encoded" in reason or "parts" in reason or "layer" in reason
    assert TOKENS == view.groups[0].block_tokens


def test_encoded_memory_failed_check_waits_for_started_copies(monkeypatch):
    pair = Pair(codec="int8")
    left = [3]

    class Slow:
        bad = np.zeros(1, dtype=bool)

        def done(self):
            left[0] -= 1
            return left[0] <= 0

    def load(group, blocks, keys, slots):
        if blocks[0] == 6:
            raise RuntimeError("no more")
        return Slow()

    monkeypatch.setattr(pair.here._copier, "load", load)
    with pytest.raises(RuntimeError, match="no more"):
        pair.here.begin_check([pull_of([5], [3]), pull_of([6], [4])])
    assert left == [0], "until then the blocks are being written"


def test_encoded_memory_too_large_raises_with_sizes(monkeypatch):
    monkeypatch.setattr(encoded_memory, "memory_limits", lambda: MemoryLimits(1 << 20, 40 << 10, "a test"))
    with pytest.raises(KVTierError, match=r"wire_codec takes 48 KiB .* KiB are free \(a test\)"):
        EncodedMemory(cache_of_numbers(12, 1), [codecs.get("int8")])


def test_memory_of_all_ranks_of_this_node_must_be_free(monkeypatch):
    for module in (encoded_memory, host_mirror):
        monkeypatch.setattr(module, "memory_limits", lambda: MemoryLimits(1 << 20, 220 << 10, "a test"))
    view = cache_of_numbers(12, 1)
    EncodedMemory(view, [codecs.get("int8")], ranks=4).close()
    CacheMemory(view, True, ranks=1)
    for make in (lambda: EncodedMemory(view, [codecs.get("int8")], ranks=5), lambda: CacheMemory(view, True, ranks=64)):
        with pytest.raises(KVTierError, match=r"on (5|64) ranks, and .* KiB are free \(a test\)"):
            make()


def test_ranks_on_node_are_at_most_its_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert [ranks_on_node(n, torch.device("cuda")) for n in (1, 4, 16)] == [1, 4, 8]
    assert ranks_on_node(4, torch.device("cpu")) == 4
