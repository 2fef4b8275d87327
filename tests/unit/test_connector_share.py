"""What a worker shares with peers, by ``wire_codec``, and what it says of that."""

from types import SimpleNamespace

import pytest
from pull_fakes import cache, cache_of_numbers

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.worker.coded_memory import CodedMemory
from vllm_kvtier.worker.memory import CacheMemory


@pytest.mark.parametrize("codec", ["raw", "int8", {"full": "fp8"}, {"sliding": "int8"}])
@pytest.mark.parametrize("make", [cache, cache_of_numbers])
def test_a_rank_names_the_codec_that_was_asked_for_whether_it_applies_or_not(make, codec):
    """The scheduler half compares it with what it read itself; an fp8 cache, say, keeps its pulls."""
    connector = KVTierConnector.__new__(KVTierConnector)
    connector._options = KVTierConfig(wire_codec=codec, host_buffer="never")
    connector._vllm_config, connector._facts = None, SimpleNamespace(record_key=lambda: None)
    memory = connector._share(make(6, 1))
    assert memory.wire_codec == codec
    applies = make is cache_of_numbers and codec in ("int8", {"full": "fp8"})
    assert type(memory) is (CodedMemory if applies else CacheMemory)
