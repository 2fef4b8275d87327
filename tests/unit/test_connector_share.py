"""What a worker shares with peers, by ``wire_codec``, and what it says of that."""

from types import SimpleNamespace

import pytest
from pull_fakes import cache, cache_of_numbers

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.worker.nixl_pull.encoded_memory import EncodedMemory
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory


@pytest.mark.parametrize("codec", ["raw", "int8", {"full": "fp8"}, {"sliding": "int8"}])
@pytest.mark.parametrize("make", [cache, cache_of_numbers])
def test_worker_reports_requested_wire_codec_even_if_not_applied(make, codec):
    """The scheduler side compares it with what it read itself; an fp8 cache, say, keeps its pulls."""
    connector = KVTierConnector.__new__(KVTierConnector)
    connector._options = KVTierConfig(wire_codec=codec, host_buffer="never")
    connector._vllm_config, connector._info = None, SimpleNamespace(record_key=lambda: None, world_size=1)
    memory = connector._share(make(6, 1))
    assert memory.wire_codec == codec
    applies = make is cache_of_numbers and codec in ("int8", {"full": "fp8"})
    assert type(memory) is (EncodedMemory if applies else CacheMemory)
