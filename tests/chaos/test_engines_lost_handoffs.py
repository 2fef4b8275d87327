"""Hand-offs that cannot be read, beside a node store that has the same prompts."""

from engine_client import random_tokens
from engine_fixtures import ENGINE_FLAGS, TESTS_ON_PATH, start_missing
from faults import VARIABLE, FaultFile
from node_fixtures import OPTIONS, Node, seeded

from vllm_kvtier.devtools.engines import kvtier
from vllm_kvtier.devtools.processes import free_port


async def test_prompt_whose_pull_failed_is_loaded_from_the_nodes_store(node: Node, nodes, make_engine, log_dir):
    faults = FaultFile(log_dir / "D.faults")
    kv = kvtier({**OPTIONS, "endpoint_port": free_port(), "load_policy": "always", "store": node.store.path})
    kv |= {"kv_connector": "FaultyConnector", "kv_connector_module_path": "faulty_connector"}
    env = {"VLLM_SERVER_DEV_MODE": "1", **TESTS_ON_PATH, VARIABLE: str(log_dir / "D.faults")}
    decode = make_engine("D", kv=kv, env=env, **ENGINE_FLAGS)
    start_missing([decode])
    await nodes.uses_store(decode, 60)
    rng = seeded("lost hand-offs")
    _, reply = await nodes.hand_off(node.first, decode, prompt := random_tokens(rng, 300))
    await nodes.assert_right(reply, prompt)
    assert reply.pulled == 300, "it knows the prefill engine"
    faults.set(fail_reads=True)
    prompt = random_tokens(rng, 600)
    first = await nodes.prefill(node.first, prompt)
    await nodes.stored(node.first, prompt)
    reply = await nodes.ask(decode, prompt, 8, first.params)
    await nodes.assert_right(reply, prompt)
    assert faults.happened("fail_reads") and (reply.pulled, reply.report["pulled_from"]) == (576, "host"), reply.report
    await nodes.flushed(decode)
    counted = await nodes.counters(decode)
    assert counted["pulls failed"] == 1 and counted["prompt_tokens host"] >= 576
