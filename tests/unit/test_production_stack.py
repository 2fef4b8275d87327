"""examples/production-stack/values.yaml, for the chart of vLLM's production stack: its engines use the store that it
adds. Rendered too, where there is helm and the chart: VLLM_STACK_CHART=folder, helm/ of that project's checkout without
its dependencies."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from docs_blocks import ROOT, Command
from docs_commands import Checker
from docs_kubernetes import arguments, schema_problems

FILE = ROOT / "examples/production-stack/values.yaml"
VALUES = yaml.safe_load(FILE.read_text("utf-8"))
(MODEL,) = VALUES["servingEngineSpec"]["modelSpec"]
(STORE,) = VALUES["extraObjects"]
SOCKET = "/run/kvtier/store.sock"


@pytest.fixture(scope="module")
def checker(tmp_path_factory) -> Checker:
    return Checker(tmp_path_factory.mktemp("stack"))


def host_path(volumes: list[dict], mounts: list[dict]) -> str:
    """Of the host's directory that has the socket."""
    (name,) = [mount["name"] for mount in mounts if Path(SOCKET).is_relative_to(mount["mountPath"])]
    return next(volume["hostPath"]["path"] for volume in volumes if volume["name"] == name)


def test_stack_engines_accept_their_arguments(checker):
    words = ["vllm", "serve", MODEL["modelURL"], *MODEL["vllmConfig"]["extraArgs"]]
    checker.check(Command(words, " ".join(words)))
    assert f'"store":"{SOCKET}"' in words[-1]


def test_stack_values_leave_the_connector_alone():
    """It would switch prefix caching off, and add a connector of LMCache's."""
    assert MODEL["vllmConfig"]["enablePrefixCaching"] is True
    assert "lmcacheConfig" not in MODEL


def test_stack_store_is_valid_and_used_by_the_engines(checker):
    assert schema_problems(STORE) == []
    pod = STORE["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = arguments(container)
    checker.check(Command(words, " ".join(words)))
    assert f"--socket={SOCKET}" in words
    assert container["readinessProbe"]["exec"]["command"][-1] == f"--socket={SOCKET}"
    assert container["image"] == f"{MODEL['repository']}:{MODEL['tag']}"
    here = host_path(MODEL["extraVolumes"], MODEL["extraVolumeMounts"])
    assert host_path(pod["volumes"], container["volumeMounts"]) == here
    assert pod["securityContext"]["runAsUser"] == VALUES["servingEngineSpec"]["securityContext"]["runAsUser"]


def test_stack_chart_renders_the_values(checker):
    helm = shutil.which("helm") or shutil.which("helm", path=str(Path(sys.prefix, "bin")))
    chart = os.environ.get("VLLM_STACK_CHART")
    if helm is None or not chart:
        pytest.skip("no helm (tools/get_helm.py), or no chart in VLLM_STACK_CHART")
    command = [helm, "template", "stack", chart, "-f", str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    documents = [document for document in yaml.safe_load_all(done.stdout) if document]
    assert STORE in documents
    (engine,) = [each for each in documents if each["metadata"]["name"] == "stack-qwen3-deployment-vllm"]
    pod = engine["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = arguments(container)
    checker.check(Command(words, " ".join(words)))
    assert words.count("--kv-transfer-config") == 1 and "--no-enable-prefix-caching" not in words
    assert host_path(pod["volumes"], container["volumeMounts"]) == "/run/kvtier"
