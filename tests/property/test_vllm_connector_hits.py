"""vLLM's own prefix cache beside the connector, under vLLM's own scheduler (``state_scheduler``), for models with
recurrent states: a request begins where all groups are, and one that reads no cache at its beginning. Also on releases
whose states the connector does not move: vLLM 0.25 and 0.26 do otherwise once any connector is configured."""

import pytest
from state_scheduler import BLOCK, Engine
from vllm.config import KVTransferConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash


class Reader(Engine):
    """Some requests want the logprobs of their prompts."""

    hits = unread = 0

    def add(self, request):
        request.skip_reading_prefix_cache = self.rng.random() < 0.2
        super().add(request)

    def forward(self, output):
        for new in output.scheduled_new_reqs:
            if self.scheduler.requests[new.req_id].skip_reading_prefix_cache:
                assert new.num_computed_tokens == 0, "nothing computes the logprobs of this prompt's beginning"
                self.unread += 1
            self.hits += bool(new.num_computed_tokens)
        super().forward(output)

    def check(self):
        """``test_vllm_states`` has the names of states, which nothing here is stored by."""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_vllm_begins_behind_a_state_although_a_connector_is_configured(root, asynchronous):
    init_none_hash(sha256)
    hits = unread = 0
    for seed in range(2):
        transfer = KVTransferConfig(
            kv_connector="KVTierConnector", kv_connector_module_path="vllm_kvtier.connector", kv_role="kv_both",
            kv_connector_extra_config={"store": "off"},
        )  # fmt: skip
        engine = Reader(root, seed, asynchronous, 0, BLOCK, False, False, transfer)
        try:
            for _ in range(600):
                engine.rng.choices([engine.new, engine.schedule, engine.outputs, engine.abort], [2, 10, 11, 1.5])[0]()
        finally:
            engine.scheduler.shutdown()
        hits, unread = hits + engine.hits, unread + engine.unread
    assert hits > 5 and unread > 5, (hits, unread)
