"""Our connector beside another one that hands prefills off: vLLM's MultiConnector raises if both answer a field."""

from types import SimpleNamespace

import pytest
from source_fakes import make_matcher
from support import make_request
from test_engine_thread import BLOCK, KVTIER, OTHER, engine, kvtier  # noqa: F401
from tier_fakes import make_tier
from vllm.v1.request import RequestStatus

from vllm_kvtier.vllm_compat.hooks.other_connectors import handing_off

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
RETAINING = {
    **KVTIER, "kv_connector_extra_config": {"store": "off", "bidirectional": True, "model_fingerprint": "the model"},
}  # fmt: skip
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
EXPORTED = {"do_remote_prefill", "do_remote_decode", "remote_host", "remote_request_id", "kvtier"}


def answer(core, params):
    """The params that vLLM answers a request with which reached its length. The workers are known."""
    half = kvtier(core)._scheduler
    half._engine.look_at(core)  # as at any request
    half._endpoint.unusable = None
    request = make_request("r", list(range(3 * BLOCK)), BLOCK, params=params)
    core.scheduler.add_request(request)
    core.scheduler.schedule()
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    blocks = core.scheduler.kv_cache_manager.get_block_ids("r")
    _, found = core.scheduler.connector.request_finished_all_groups(request, blocks)
    return found


@pytest.mark.parametrize("params", [PREFILL, {"kvtier": {}}, {**PREFILL, "kvtier": {"export_as": "e"}}])
@pytest.mark.parametrize("children", [(RETAINING, NIXL), (NIXL, RETAINING)], ids=["before", "behind"])
def test_beside_nixl_connector_hand_offs_are_its_own(engine, children, params):  # noqa: F811
    core = engine(*children)
    found = answer(core, params)
    assert found["kvtier"]["prompt_tokens"] == 3 * BLOCK and "export" not in found["kvtier"]
    assert ("remote_host" in found) == ("do_remote_decode" in params), "NixlConnector's"
    exports = kvtier(core)._scheduler._exports
    assert not exports.has_handoffs() and not exports.retained_blocks()


@pytest.mark.parametrize("ours_first", [True, False])
def test_prompt_that_nixl_connector_is_to_bring_is_left_to_it(engine, ours_first):  # noqa: F811
    """vLLM asked none while our store was awaited, or took a block of ours in place of the hand-off."""
    core = engine(KVTIER, NIXL) if ours_first else engine(NIXL, KVTIER)
    half = kvtier(core)._scheduler
    half._engine.look_at(core)
    made = make_tier([(BLOCK, None)], hash_block_size=BLOCK, context={"pool": half._pool})
    matcher = make_matcher(made.load, made.tier)
    matcher.hands_off_alone = half._matcher.hands_off_alone
    half._matcher = half._outcomes._matcher = matcher
    params = {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p", "remote_request_id": "x",
        "remote_block_ids": [[1, 2, 3]], "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1,
    }  # fmt: skip
    prompt = list(range(3 * BLOCK))
    requests = [make_request(name, prompt, BLOCK, params=each) for name, each in (("r", params), ("s", {}))]
    for request in requests:
        core.scheduler.add_request(request)
    output = core.scheduler.schedule()
    assert requests[0].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    (nixl,) = [each for each in output.kv_connector_metadata.metadata if hasattr(each, "reqs_to_recv")]
    assert set(nixl.reqs_to_recv) == {"r"} and len(nixl.reqs_to_recv["r"].local_block_ids[0]) == 3
    assert len(made.client.open) == 1, "of the other prompt"


@pytest.mark.parametrize("children", [(RETAINING,), (RETAINING, OTHER)], ids=["alone", "beside"])
def test_alone_and_beside_a_connector_that_stores_hand_offs_are_ours(engine, children):  # noqa: F811
    core = engine(*children)
    assert set(answer(core, PREFILL)) >= EXPORTED and kvtier(core)._scheduler._exports.has_handoffs()


@pytest.mark.parametrize(("name", "hands_off"), [("UMBPStoreConnector", False), ("MooncakeConnector", True)])
def test_connectors_that_this_vllm_may_lack_are_known_by_name(name, hands_off):
    ours, other = object(), type(name, (), {})()
    multi = SimpleNamespace(_connectors=[ours, other])
    assert handing_off(SimpleNamespace(connector=multi), ours) == (name if hands_off else "")


def test_connectors_in_a_multi_connector_within_another_are_looked_at(engine):  # noqa: F811
    multi = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    inner = {**multi, "kv_connector_extra_config": {"connectors": [NIXL, OTHER]}}
    core = engine(KVTIER, inner)
    assert handing_off(core.scheduler, kvtier(core)).startswith("Nixl")
