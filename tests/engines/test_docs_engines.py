"""The guides' commands, run on real engines: what can be copied from a page does what the page says.

Seven engine starts: one for host memory, disk and S3 together (each with a store of its own), prefill and decode
engines on one node, and in two network namespaces a prefill and a decode engine, and two engines with stores. Slow, one
more: two data-parallel ranks behind one server. docs_running says what is changed in a command before it is run.
"""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import mooncake_master
import netns
import pytest
from docs_running import SERVERS, Place, ended, steps_of, unlike
from node_fixtures import runtime_dir, store_in
from support import eventually

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here, with which the pages ask")

GUIDES = "docs/guides"
KEYS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_REGION": "us-east-1"}  # as the page on objects


@pytest.fixture(scope="module", autouse=True)
def forked_engines(zygote):
    zygote.ask(None)  # it starts in this process, not for the first of a page's commands


@pytest.fixture(scope="module")
def place(demo_model, log_dir, tmp_path_factory):
    """One engine, as the page on host memory starts it."""
    with runtime_dir() as runtime:
        place = Place(demo_model, tmp_path_factory.mktemp("docs"), runtime, log_dir, KEYS)
        place.store = store_in(runtime)
        with ended(place):
            first = steps_of(f"{GUIDES}/host-cache.md")[0]
            assert first.text.startswith("vllm serve MODEL --port 8000")
            place.start(first, "docs-engine").wait_ready()
            yield place


def test_docs_host_cache_commands_run(place):
    for step in steps_of(f"{GUIDES}/host-cache.md")[1:]:
        place.until_as_shown(step)


@pytest.mark.parametrize("page", ["disk", "objects", "mooncake"])
def test_docs_secondary_tiers_commands_run(place, page):
    """The store that the engine started is ended, and the page's takes its place; the engine goes on."""
    if page == "mooncake" and mooncake_master.why_not():
        pytest.skip(mooncake_master.why_not())

    def no_store() -> None:
        for service in [each for each in place.services[1:] if each.name not in SERVERS]:
            service.kill()
            place.services.remove(service)
        place.store.kill()

    def in_use() -> bool:
        counts = place.store.counts()
        return {"engine", "worker"} <= {client.kind for client in counts.clients} and counts.tiers[0].state == "ready"

    def start(step) -> None:
        with place.store.alone():  # or the engine starts another one
            no_store()
            place.start(step, f"docs-{page}").wait_ready()
        eventually(in_use, 60, "the engine uses the page's store, and that its tier")

    again = {}
    for step in steps_of(f"{GUIDES}/{page}.md"):
        if (server := step.text.split()[0]) in SERVERS:
            place.start(step, server).wait_ready()
        elif step.serves:
            start(step)
            # An engine that asked too early computed, and memory has it from then on: then once more from the start.
            again = {"again": partial(start, step)} if step.kind == "restart" else {}
        else:
            place.until_as_shown(step, **again)
    with place.store.alone():
        no_store()
    for service in place.services[1:]:
        service.kill()
    del place.services[1:]


def test_docs_pd_one_node_commands_run(demo_model, log_dir, tmp_path):
    with runtime_dir() as runtime, ended(Place(demo_model, tmp_path, runtime, log_dir)) as place:
        printed = place.play(f"{GUIDES}/pd-one-node.md")
        answer = json.loads(printed[0].partition("vllm:")[0])
        assert answer["usage"]["completion_tokens"] == 8
        held = json.loads(printed[1])
        assert held["prompt_tokens"] == answer["usage"]["prompt_tokens"]
        assert all(engine["gpu_cache_tokens"] >= 1000 for engine in held["engines"]), held


@pytest.mark.parametrize(("page", "forget"), [("pd-two-nodes", "true"), ("several-nodes", "false")])
def test_docs_two_nodes_commands_run(demo_model, log_dir, tmp_path, page, forget):
    if netns.why_not():
        pytest.skip(netns.why_not())
    # UCX sees that both nodes are one machine, and would copy without the network. The machine's name has no address in
    # these networks: what an engine says to itself goes over loopback.
    env = {"UCX_TLS": "tcp", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    with netns.NetnsPair() as pair, runtime_dir() as runtime:
        with ended(Place(demo_model, tmp_path, runtime, log_dir, env, pair)) as place:
            place.play(f"{GUIDES}/{page}.md", forget)  # engines that have forgotten for good share nothing any more


@pytest.mark.slow
def test_docs_data_parallel_commands_run(demo_model, log_dir, tmp_path):
    with runtime_dir() as runtime, ended(Place(demo_model, tmp_path, runtime, log_dir)) as place:
        # Ranks that have forgotten for good share nothing any more.
        place.play(f"{GUIDES}/data-parallel.md", forget="false")


def test_docs_every_guide_with_commands_is_run(root):
    """And each command is run by a test."""
    text = Path(__file__).read_text("utf-8")
    by_parameter = {"disk", "objects", "mooncake", "pd-two-nodes", "several-nodes"}
    run = set(re.findall(r"GUIDES\}/([\w-]+)\.md", text)) | by_parameter
    assert {page.stem for page in (root / GUIDES).glob("*.md") if steps_of(f"{GUIDES}/{page.name}")} == run


def test_docs_samples_are_compared_with_output():
    sample = 'a{x="0"} 1408.0\nused pages 2134\nevictions 0\n'
    assert unlike(sample, 'b\na{x="0"} 3.0\n used  pages    7 \nevictions 5') == []
    assert unlike(sample, 'a{x="1"} 3.0\nused pages 0\nevictions 0') == ['a{x="0"} 1408.0', "used pages 2134"]
