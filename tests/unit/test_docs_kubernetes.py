"""examples/kubernetes: valid by Kubernetes' schemas, consistent, and taken by the programs that it starts."""

import copy
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
import yaml
from docs_commands import Checker, extras
from docs_kubernetes import FOLDER, arguments, load, problems

FILES = load()
DOCKERFILE = (FOLDER / "Dockerfile").read_text("utf-8")


@pytest.fixture(scope="module")
def checker(tmp_path_factory) -> Checker:
    return Checker(tmp_path_factory.mktemp("kubernetes"))


def test_kubernetes_manifests_are_valid(checker):
    assert problems(FILES, DOCKERFILE, checker) == []
    assert {"vllm", "kvtier"} <= checker.seen


def test_kubernetes_prefill_and_decode_differ_only_in_role_and_replicas():
    texts = [(FOLDER / f"{name}.yaml").read_text("utf-8").splitlines()[1:] for name in ("prefill", "decode")]
    differing = [(a, b) for a, b in zip(*texts, strict=True) if a.replace("prefill", "decode") != b]
    assert differing == [("  replicas: 1", "  replicas: 2")]


@pytest.mark.parametrize("stage", ["engine", "proxy"])
def test_dockerfile_copies_all_files_to_install(stage, root, tmp_path):
    text = re.search(rf"^FROM \S+ AS {stage}$(.*?)(?=^FROM|\Z)", DOCKERFILE, re.M | re.S)[1]
    unwanted = shutil.ignore_patterns("__pycache__")
    for line in re.findall(r"^COPY (.+)$", text, re.M):
        *names, target = line.split()
        place = tmp_path / target.strip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        for name in names:
            if (root / name).is_dir():
                shutil.copytree(root / name, place, ignore=unwanted)
            else:
                place.mkdir(exist_ok=True)
                shutil.copy(root / name, place)
    build = f"from setuptools import build_meta; print(build_meta.build_wheel({str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=tmp_path / "src", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        assert {"vllm_kvtier/connector.py", "vllm_kvtier/kernels/peer_copy.py"} <= set(wheel.namelist())
    installed = re.search(r"pip install .*['\"]/src\[(?:([\w,]+)|\$\{EXTRAS\})\]", text)[1]
    assert set((installed or re.search(r"^ARG EXTRAS=(\S+)$", text, re.M)[1]).split(",")) <= extras()


def pod(files: dict, file: str) -> dict:
    return files[file][-1]["spec"]["template"]["spec"]


def container(files: dict, file: str) -> dict:
    return pod(files, file)["containers"][0]


def replace_argument(files: dict, file: str, old: str, new: str) -> None:
    args = container(files, file)["args"]
    assert any(old in word for word in args), f"{old} is not there any more"
    container(files, file)["args"] = [word.replace(old, new) for word in args]


def option_typo(f):
    replace_argument(f, "decode.yaml", '"bidirectional"', '"bidirectionl"')


def no_engine_argument(f):
    replace_argument(f, "prefill.yaml", "--port=", "--prt=")


def json_broken(f):
    replace_argument(f, "prefill.yaml", '"}}', '"}')


def no_such_variable(f):
    replace_argument(f, "decode.yaml", "POD_IP", "POD_ADDRESS")


def store_option(f):
    replace_argument(f, "store.yaml", "--idle-seconds", "--idle-secunds")


def store_value(f):
    replace_argument(f, "store.yaml", "9400", "94000")


def another_socket(f):
    replace_argument(f, "store.yaml", "store.sock", "another.sock")


def another_host_directory(f):
    pod(f, "decode.yaml")["volumes"][0]["hostPath"]["path"] = "/run/other"


def another_user(f):
    pod(f, "decode.yaml")["securityContext"]["runAsUser"] = 1000


def key_for_all(f):
    del pod(f, "prefill.yaml")["volumes"][1]["secret"]["defaultMode"]


def key_not_mounted(f):
    container(f, "prefill.yaml")["volumeMounts"].pop(1)


def secret_unknown(f):
    pod(f, "proxy.yaml")["volumes"][1]["secret"]["secretName"] = "cluster-kay"


def secret_not_made(f):
    del f["kustomization.yaml"][0]["secretGenerator"]


def config_map_unknown(f):
    pod(f, "proxy.yaml")["volumes"][0]["configMap"]["name"] = "proxi"


def schema_field(f):
    pod(f, "store.yaml")["nodeSelectr"] = {}


def schema_type(f):
    f["decode.yaml"][1]["spec"]["minReadySeconds"] = "soon"


def api_version(f):
    f["proxy.yaml"][-1]["apiVersion"] = "apps/v1beta1"


def selector(f):
    f["decode.yaml"][0]["spec"]["selector"] = {"app": "decod"}


def service_port(f):
    f["proxy.yaml"][1]["spec"]["ports"][0]["targetPort"] = "https"


def probe_port(f):
    container(f, "prefill.yaml")["readinessProbe"]["httpGet"]["port"] = "web"


def probe_route(f):
    container(f, "prefill.yaml")["readinessProbe"]["httpGet"]["path"] = "/ready"


def probe_socket(f):
    container(f, "store.yaml")["livenessProbe"]["exec"]["command"][-1] = "--socket=/tmp/store.sock"


def port_not_named(f):
    container(f, "store.yaml")["ports"] = []


def policy_port(f):
    f["network-policy.yaml"][0]["spec"]["ingress"][1]["ports"][0]["port"] = 8080


def policy_peer(f):
    f["network-policy.yaml"][0]["spec"]["ingress"][1]["from"][0]["podSelector"]["matchLabels"] = {"app": "router"}


def engine_not_routed(f):
    f["decode.yaml"][1]["spec"]["replicas"] = 3


def proxy_option(f):
    data = f["proxy.yaml"][0]["data"]
    data["proxy.yaml"] = data["proxy.yaml"].replace("drain_delay", "drain_dealy")


def too_little_grace(f):
    pod(f, "proxy.yaml")["terminationGracePeriodSeconds"] = 30


def requests_not_completed(f):
    pod(f, "decode.yaml")["terminationGracePeriodSeconds"] = 30


def not_in_kustomization(f):
    f["kustomization.yaml"][0]["resources"].remove("store.yaml")


def image_unknown(f):
    container(f, "proxy.yaml")["image"] = "registry.example.com/kvtier-router:latest"


def no_gpu(f):
    del container(f, "decode.yaml")["resources"]["limits"]["nvidia.com/gpu"]


MUTATIONS = {
    option_typo: "did you mean bidirectional",
    no_engine_argument: "--prt",
    json_broken: "vllm serve does not take this",
    no_such_variable: "no such variable",
    store_option: "--idle-secunds",
    store_value: "metrics_port=94000",
    another_socket: "does not use the store|asks at",
    another_host_directory: "does not have the store's directory",
    another_user: "another user than the store",
    key_for_all: "others may read",
    key_not_mounted: "cluster.key is on no volume",
    secret_unknown: "Secret cluster-kay",
    secret_not_made: "Secret cluster-key is not created",
    config_map_unknown: "ConfigMap proxi",
    schema_field: "nodeSelectr",
    schema_type: "spec.minReadySeconds",
    api_version: "knows no apps/v1beta1 Deployment",
    selector: "Service decode: it selects no pod",
    service_port: "no port https",
    probe_port: "no port web",
    probe_route: "no route /ready",
    probe_socket: "livenessProbe asks at /tmp/store.sock",
    port_not_named: "port 9400 is not named",
    policy_port: "no port 8080",
    policy_peer: "no pod has .*router",
    engine_not_routed: "decode-2",
    proxy_option: "drain_dealy",
    too_little_grace: "killed before it has drained",
    requests_not_completed: "killed before its requests",
    not_in_kustomization: "does not have store.yaml",
    image_unknown: "kvtier-router",
    no_gpu: "has no GPU",
}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_kubernetes_checker_finds_errors(mutate, checker):
    files = copy.deepcopy(FILES)
    mutate(files)
    found = problems(files, DOCKERFILE, checker)
    assert any(re.search(MUTATIONS[mutate], problem) for problem in found), found


def test_kubernetes_engine_gets_its_own_address():
    (config,) = [word for word in arguments(container(FILES, "decode.yaml")) if "kv-transfer" in word]
    assert '"endpoint_host":"10.0.0.1"' in config


def test_proxy_has_memory_for_what_it_may_hold():
    """Measured: 5 bytes for each that counts, of bodies and again of answers, which are held one after the other."""
    documents = {document["kind"]: document for document in FILES["proxy.yaml"]}
    config = yaml.safe_load(documents["ConfigMap"]["data"]["proxy.yaml"])
    (container,) = documents["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["memory"] == "2Gi"
    assert 8 * config["max_buffered_bytes"] <= 2 << 30
