"""The proxy serves what vLLM serves to clients."""

import importlib.util
import re
from pathlib import Path

import pytest
from proxy_fakes import Cluster

from vllm_kvtier.proxy.messages.request_bodies import Route
from vllm_kvtier.proxy.routes.passthrough import find_passthrough

# What operators, trainers and cloud platforms use, and what is of the server itself.
_CONTROL = re.compile(
    "/(abort_requests|collective_rpc|debug/|fault_tolerance/|finish_|get_|health|init_|inference/v1/abort_requests"
    "|invocations|is_|kv_event_sources|load$|metrics|pause|ping|profile|release_|reset_|resume|scale_elastic|server_info"
    "|shutdown_|sleep|start_|stop_|update_|v1/(un)?load_lora_adapter|wake_up|weight_)"
)
_ROUTE = re.compile(r'router\.(?:get|post|api_route)\(\s*"([^"]+)"')


def test_proxy_has_every_route_of_vllm_for_clients():
    (vllm,) = importlib.util.find_spec("vllm").submodule_search_locations
    files = Path(vllm, "entrypoints").rglob("*.py")
    paths = {path for file in files for path in _ROUTE.findall(file.read_text("utf-8"))}
    assert {route.value for route in Route} - {"/inference/v1/generate"} < paths
    paths = {path for path in paths if not _CONTROL.match(path)} - {route.value for route in Route}
    missing = {path for path in paths if find_passthrough(path.replace("{response_id}", "resp_1"), ()) is None}
    assert not missing


@pytest.mark.parametrize("path", ["/cohere/v2/chat", "/v1/decisions", "/v1/systemone"])
async def test_request_of_a_route_that_computes_is_salted_and_goes_to_a_decode_engine(path):
    async with Cluster(pooling=1) as c:
        for client in ("ann", "bob"):
            body = {"model": "m", "kv_transfer_params": {"remote_host": "victim"}}
            reply = await c.client.post(path, json=body, headers={"Authorization": f"Bearer {client}"})
            assert reply.status_code == 200 and reply.json()["engine"] == "D0"
        one, two = (seen.body for seen in c.d[0].passed)
        assert one["cache_salt"] != two["cache_salt"] and one.keys() == {"model", "cache_salt"}
        assert (await c.client.get(path)).status_code == 405


async def test_rendering_of_a_cohere_chat_is_no_request_of_its_own():
    async with Cluster() as c:
        assert (await c.client.post("/cohere/v2/chat/render", json={"model": "m"})).status_code == 200
        (seen,) = c.d[0].passed or c.p[0].passed
        assert seen.body == {"model": "m"}
