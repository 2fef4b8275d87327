"""examples/helm/kvtier, rendered by helm (`python tools/get_helm.py`): by default the manifests of examples/kubernetes,
valid by Kubernetes' schemas, and taken by the programs that it starts."""

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from docs_commands import Checker
from docs_kubernetes import FOLDER, ROOT, load, problems, schema_problems

from vllm_kvtier.remote_store.options import Address

CHART = ROOT / "examples/helm/kvtier"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text("utf-8"))
PLAIN = load()
DOCKERFILE = (FOLDER / "Dockerfile").read_text("utf-8")


# Later than the chart's first release.
ADDED = [
    ("mooncake",), ("store", "shared"), ("images", "pullSecrets"), ("serviceAccountName",),
    ("engine", "runtimeClassName"), ("store", "serviceAccountName"), ("store", "env"), ("store", "envFrom"),
    ("store", "volumes"), ("store", "volumeMounts"), ("proxy", "volumes"), ("proxy", "volumeMounts"),
]  # fmt: skip


def run_helm(*words: str) -> subprocess.CompletedProcess:
    helm = shutil.which("helm") or shutil.which("helm", path=str(Path(sys.prefix, "bin")))
    if helm is None:
        pytest.skip("no helm here: python tools/get_helm.py")
    return subprocess.run([helm, *words], capture_output=True, text=True, timeout=60)


def render(*words: str) -> dict[tuple[str, str], dict]:
    done = run_helm("template", "release", str(CHART), "--namespace", "kvtier", *words)
    assert done.returncode == 0, done.stderr
    documents = [document for document in yaml.safe_load_all(done.stdout) if document]
    found = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    assert len(found) == len(documents)
    return found


def parsed(document: dict) -> dict:
    """With JSON and YAML in strings parsed, so that their form does not matter."""
    document = copy.deepcopy(document)
    if "proxy.yaml" in document.get("data", {}):
        document["data"]["proxy.yaml"] = yaml.safe_load(document["data"]["proxy.yaml"])
    template = document["spec"].get("template") if "spec" in document else None
    for container in template["spec"]["containers"] if template else ():
        args = [word.split("=", 1) for word in container["args"]]
        container["args"] = [[name, json.loads(rest[0])] if rest and rest[0].startswith("{") else [name, *rest]
                             for name, *rest in args]  # fmt: skip
    return document


def test_chart_by_default_is_the_plain_manifests():
    plain = {
        (document["kind"], document["metadata"]["name"]): parsed(document)
        for name, documents in PLAIN.items()
        if name not in ("kustomization.yaml", "namespace.yaml")
        for document in documents
    }
    assert {name: parsed(document) for name, document in render().items()} == plain


SETS = {
    "default": [],
    "shared stores": ["--set", "store.shared=true"],
    "mooncake": ["--set", "mooncake.enabled=true"],
    "mooncake, shared stores, several masters": [
        "--set", "mooncake.enabled=true,store.shared=true,mooncake.segment=0",
        "--set", "mooncake.master.etcd=e-0.e:2379;e-1.e:2379",
    ],
    "mooncake, a master elsewhere": [
        "--set", "mooncake.enabled=true,mooncake.master.external=10.0.0.9:50051",
        "--set-json", 'mooncake.args=["--mooncake-protocol=rdma","--mooncake-devices=mlx5_0"]',
    ],
    "events": ["--set", "engine.kvEvents=tcp://*:5557"],
    "options": [
        "--set-json", 'engine.connector={"codec":"fp8","bidirectional":false}',
        "--set-json", 'engine.args=["--max-model-len=32768"]',
        "--set-json", 'store.args=["--policy=lru"]', "--set", "store.disk.size=1TiB",
        "--set", "decode.replicas=5", "--set-json", 'proxy.config={"queue_limit":500,"drain_delay":0}',
        "--set", "engine.modelsClaim=models", "--set", "images.pullPolicy=Always",
        "--set", "runAsUser=1000", "--set", "engine.endpointPort=7200",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def checker(tmp_path_factory) -> Checker:
    return Checker(tmp_path_factory.mktemp("helm"))


@pytest.mark.parametrize("words", SETS.values(), ids=SETS)
def test_chart_is_valid_and_consistent(words, checker):
    """The same checks as of the plain manifests: schemas, arguments, ports, volumes, names."""
    files = {name: PLAIN[name] for name in ("kustomization.yaml", "namespace.yaml")}
    files = copy.deepcopy(files) | {"chart.yaml": list(render(*words).values())}
    files["kustomization.yaml"][0]["resources"] = ["namespace.yaml", "chart.yaml"]
    assert problems(files, DOCKERFILE, checker) == []


@pytest.mark.parametrize("added", ADDED, ids=".".join)
def test_chart_takes_the_values_of_an_older_one(tmp_path, added):
    """`helm upgrade --reuse-values` replaces the chart's own values by those of the installed chart."""
    old = copy.deepcopy(VALUES)
    within = old
    for name in added[:-1]:
        within = within[name]
    del within[added[-1]]
    shutil.copytree(CHART, chart := tmp_path / "chart")
    (chart / "values.yaml").write_text(yaml.safe_dump(old), "utf-8")
    done = run_helm("template", "release", str(chart), "--namespace", "kvtier")
    assert done.returncode == 0, done.stderr
    found = [document for document in yaml.safe_load_all(done.stdout) if document]
    assert found == list(render().values())
    if added == ("mooncake",):
        done = run_helm("template", "release", str(chart), "--set", "mooncake.enabled=true")
        assert done.returncode and "segment" in done.stderr, "not half done"


def test_chart_options_reach_their_programs():
    found = render(*SETS["options"], *SETS["events"])
    (engine,) = found["StatefulSet", "decode"]["spec"]["template"]["spec"]["containers"]
    transfer = json.loads(next(word.split("=", 1)[1] for word in engine["args"] if "kv-transfer" in word))
    options = transfer["kv_connector_extra_config"]
    assert (options["codec"], options["bidirectional"], options["endpoint_port"]) == ("fp8", False, 7200)
    assert "--max-model-len=32768" in engine["args"] and any("tcp://*:5557" in word for word in engine["args"])
    volumes = found["StatefulSet", "decode"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "models"}} in volumes
    (store,) = found["DaemonSet", "store"]["spec"]["template"]["spec"]["containers"]
    assert {"--policy=lru", "--disk-size=1TiB"} <= set(store["args"])
    proxy = yaml.safe_load(found["ConfigMap", "proxy"]["data"]["proxy.yaml"])
    assert (proxy["queue_limit"], proxy["drain_delay"], proxy["drain_timeout"]) == (500, 0, 60)
    assert found["Deployment", "proxy"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 80


def test_chart_proxy_listens_where_the_values_say():
    found = render("--set-json", 'proxy.config={"host":"::","port":1,"cluster_key_file":"/x"}')
    proxy = yaml.safe_load(found["ConfigMap", "proxy"]["data"]["proxy.yaml"])
    assert (proxy["host"], proxy["port"], proxy["cluster_key_file"]) == ("::", 8000, "/etc/kvtier/key/cluster.key")


def test_chart_puts_no_blocks_on_the_disk_of_the_nodes_unless_it_is_named():
    """With 1 TiB on the file system of images and logs, kubelet evicted the engines once that was full."""
    pod = render()["DaemonSet", "store"]["spec"]["template"]["spec"]
    assert not [word for word in pod["containers"][0]["args"] if "disk" in word]
    assert [volume["name"] for volume in pod["volumes"]] == ["run", "tmp"]
    found = render("--set", "store.disk.size=1TiB,store.disk.hostPath=/ssd/kv")
    pod = found["DaemonSet", "store"]["spec"]["template"]["spec"]
    assert {"name": "disk", "hostPath": {"path": "/ssd/kv", "type": "Directory"}} in pod["volumes"], "not made: mounted"


@pytest.mark.parametrize(("port", "last"), [(7200, 7215), (65530, 65535)])
def test_chart_proxy_reaches_the_endpoints_of_data_parallel_ranks(port, last):
    found = render("--set", f"engine.endpointPort={port}")["NetworkPolicy", "engines"]
    ports = found["spec"]["ingress"][1]["ports"]
    assert {"protocol": "TCP", "port": port, "endPort": last} in ports and schema_problems(found) == []


def test_chart_large_user_id_is_a_whole_number(tmp_path):
    """As OpenShift assigns them; helm prints a number from a file of values as 1.00068e+09."""
    (values := tmp_path / "values.yaml").write_text("runAsUser: 1000680000", "utf-8")
    words = ["template", "release", str(CHART), "-f", str(values), "--set", "mooncake.enabled=true"]
    lines = [line.strip() for line in run_helm(*words).stdout.splitlines() if "runAsUser" in line]
    assert sorted(lines) == ["runAsUser: 0", *5 * ["runAsUser: 1000680000"]]


@pytest.mark.parametrize(("disk", "folders"), [("", []), ("1TiB", ["/var/lib/kvtier"])])
def test_chart_user_owns_the_directories_of_the_host(disk, folders):
    """kubelet makes them as root's, after each reboot anew: the store could not make its socket there."""
    assert "initContainers" not in render()["DaemonSet", "store"]["spec"]["template"]["spec"]
    document = render("--set", f"runAsUser=1000,store.disk.size={disk}")["DaemonSet", "store"]
    (first,) = document["spec"]["template"]["spec"]["initContainers"]
    assert first["command"] == ["chown", "1000", "/run/kvtier", *folders] and first["securityContext"]["runAsUser"] == 0
    assert [mount["mountPath"] for mount in first["volumeMounts"]] == ["/run/kvtier", *folders]
    assert schema_problems(document) == []


def test_chart_releases_of_two_namespaces_share_nothing_on_a_node():
    """Both had /run/kvtier/store.sock: one store did not start, and its engines used that of the other."""

    def paths(namespace: str) -> list[str]:
        found = render("--set", "store.disk.size=1TiB", "--namespace", namespace)
        pods = [found[name]["spec"]["template"]["spec"] for name in (("DaemonSet", "store"), ("StatefulSet", "decode"))]
        run, other = ([v["hostPath"]["path"] for v in pod["volumes"] if v["name"] == "run"] for pod in pods)
        assert run == other
        return [*run, *(word for word in pods[0]["containers"][0]["args"] if word.startswith("--disk-path"))]

    assert paths("a") == ["/run/kvtier/a", "--disk-path=/var/lib/kvtier/a"] and not set(paths("a")) & set(paths("b"))


@pytest.mark.parametrize(("user", "mode", "group"), [(0, 0o400, None), (1000, 0o440, 1000)])
def test_chart_user_may_read_the_key(user, mode, group):
    found = render(*SETS["shared stores"], "--set", f"runAsUser={user}")
    pods = [each["spec"]["template"]["spec"] for each in found.values() if "template" in each.get("spec", {})]
    keys = [(pod, each["secret"]) for pod in pods for each in pod["volumes"] if each["name"] == "key"]
    assert len(keys) == 4
    assert all((key["defaultMode"], pod["securityContext"].get("fsGroup")) == (mode, group) for pod, key in keys)


def test_chart_with_shared_stores_finds_them_by_the_name_of_their_service():
    found = render(*SETS["shared stores"])
    service = found["Service", "store"]["spec"]
    assert service["clusterIP"] == "None" and [port["port"] for port in service["ports"]] == [7300]
    (container,) = found["DaemonSet", "store"]["spec"]["template"]["spec"]["containers"]
    options = dict(word.removeprefix("--").split("=", 1) for word in container["args"])
    assert (options["nodes"], options["node-listen"]) == ("dns:store:7300", "[$(POD_IP)]:7300")
    for ip in ("10.0.0.7", "fd00::5"):
        assert Address.parse(options["node-listen"].replace("$(POD_IP)", ip)) == Address(ip, 7300)
    peers = [rule["from"][0] for rule in found["NetworkPolicy", "store"]["spec"]["ingress"] if "ports" not in rule]
    assert peers == [{"podSelector": {"matchLabels": {"app": "store"}}}]


def store_options(found: dict) -> dict[str, str]:
    (container,) = found["DaemonSet", "store"]["spec"]["template"]["spec"]["containers"]
    pairs = (word.removeprefix("--").partition("=") for word in container["args"])
    return {name: value for name, _, value in pairs if name.startswith("mooncake")}


def master_words(found: dict) -> set[str]:
    (container,) = found["Deployment", "mooncake-master"]["spec"]["template"]["spec"]["containers"]
    return set(container["args"])


def test_chart_with_mooncake_has_a_master_that_the_stores_name():
    found = render(*SETS["mooncake"])
    options, deployment = store_options(found), found["Deployment", "mooncake-master"]["spec"]
    assert (options["mooncake-master"], options["mooncake-host"]) == ("mooncake-master:50051", "$(POD_IP)")
    assert (options["mooncake-segment"], "mooncake-trusted-network" in options) == ("4GiB", True)
    assert found["Service", "mooncake-master"]["spec"]["ports"] == [{"name": "rpc", "port": 50051}]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"}), "never two without etcd"
    assert "--rpc_address=$(POD_IP)" in master_words(found) and "--enable_ha=true" not in master_words(found)
    (rule, _) = found["NetworkPolicy", "mooncake-master"]["spec"]["ingress"]
    assert {"podSelector": {"matchLabels": {"app": "store"}}} in rule["from"]
    peers = [rule["from"][0] for rule in found["NetworkPolicy", "store"]["spec"]["ingress"] if "ports" not in rule]
    assert peers == [{"podSelector": {"matchLabels": {"app": "store"}}}], "segments are at ports that Mooncake chooses"


def test_chart_with_mooncake_on_etcd_has_several_masters_with_their_log():
    found = render(*SETS["mooncake, shared stores, several masters"])
    assert store_options(found)["mooncake-master"] == "etcd://e-0.e:2379;e-1.e:2379"
    assert found["Deployment", "mooncake-master"]["spec"]["replicas"] == 2
    assert {"--enable_ha=true", "--enable_oplog=true", "--etcd_endpoints=e-0.e:2379;e-1.e:2379"} <= master_words(found)


def test_chart_with_a_mooncake_master_elsewhere_has_none():
    found = render(*SETS["mooncake, a master elsewhere"])
    assert not [name for _, name in found if "mooncake" in name]
    options = store_options(found)
    assert (options["mooncake-master"], options["mooncake-protocol"]) == ("10.0.0.9:50051", "rdma")


def test_chart_refuses_mooncake_on_an_open_network():
    words = ["template", "release", str(CHART), "--set", "mooncake.enabled=true,networkPolicy.enabled=false"]
    done = run_helm(*words)
    assert done.returncode != 0 and "no authentication" in done.stderr
    assert run_helm(*words, "--set", "mooncake.trustedNetwork=true").returncode == 0


def pods(found: dict) -> dict[str, dict]:
    specs = {name: document.get("spec", {}) for (_, name), document in found.items()}
    return {name: spec["template"]["spec"] for name, spec in specs.items() if "template" in spec}


def test_chart_store_gets_credentials_of_an_object_store():
    account = {"name": "AZURE_STORAGE_ACCOUNT_NAME", "value": "account"}
    volume, mount = {"name": "gcs", "secret": {"secretName": "gcs"}}, {"name": "gcs", "mountPath": "/etc/gcs"}
    values = {"env": [account], "envFrom": [{"secretRef": {"name": "b"}}], "volumes": [volume], "volumeMounts": [mount]}
    words = [word for name, value in values.items() for word in ("--set-json", f"store.{name}={json.dumps(value)}")]
    for shared in ("false", "true"):
        found = render(*words, "--set", f"store.shared={shared}")
        (container,) = pods(found)["store"]["containers"]
        assert container["env"][-1] == account and (len(container["env"]) > 1) == (shared == "true")
        assert container["envFrom"] == values["envFrom"]
        assert container["volumeMounts"][-1] == mount and pods(found)["store"]["volumes"][-1] == volume
        assert [problem for document in found.values() for problem in schema_problems(document)] == []


def test_chart_pods_get_registry_service_account_and_runtime_class():
    names = {"serviceAccountName": "all", "store.serviceAccountName": "bucket", "engine.runtimeClassName": "nvidia"}
    words = [word for name, value in names.items() for word in ("--set", f"{name}={value}")]
    found = render(*words, "--set-json", 'images.pullSecrets=["registry"]', *SETS["mooncake"])
    assert {name: (pod["serviceAccountName"], pod.get("runtimeClassName")) for name, pod in pods(found).items()} == {
        "store": ("bucket", None), "prefill": ("all", "nvidia"), "decode": ("all", "nvidia"), "proxy": ("all", None),
        "mooncake-master": ("all", None),
    }  # fmt: skip
    assert all(pod["imagePullSecrets"] == [{"name": "registry"}] for pod in pods(found).values())
    assert {pod["serviceAccountName"] for pod in pods(render("--set", "serviceAccountName=all")).values()} == {"all"}
    assert [problem for document in found.values() for problem in schema_problems(document)] == []


@pytest.mark.parametrize("client_ca", [None, "/etc/kvtier/tls/ca.crt"])
def test_chart_proxy_with_a_certificate_is_probed_by_https(client_ca):
    """kubelet has no certificate: where clients need one, it only connects."""
    config = {"tls_cert_file": "/etc/kvtier/tls/tls.crt", "tls_key_file": "/etc/kvtier/tls/tls.key"}
    config |= {"tls_client_ca_file": client_ca} if client_ca else {}
    volume = {"name": "tls", "secret": {"secretName": "proxy-tls", "defaultMode": 0o400}}
    mount = {"name": "tls", "mountPath": "/etc/kvtier/tls", "readOnly": True}
    values = {"config": config, "volumes": [volume], "volumeMounts": [mount]}
    words = [word for name, value in values.items() for word in ("--set-json", f"proxy.{name}={json.dumps(value)}")]
    found = render(*words)
    (container,), volumes = pods(found)["proxy"]["containers"], pods(found)["proxy"]["volumes"]
    probes = [container[kind] for kind in ("readinessProbe", "livenessProbe")]
    wanted = [{"path": path, "port": "http", "scheme": "HTTPS"} for path in ("/ready", "/health")]
    assert [probe.get("httpGet") for probe in probes] == ([None, None] if client_ca else wanted)
    assert [probe.get("tcpSocket") for probe in probes] == ([{"port": "http"}] * 2 if client_ca else [None, None])
    assert mount in container["volumeMounts"] and volume in volumes
    assert found["Service", "proxy"]["spec"]["ports"] == [{"name": "http", "port": 443, "targetPort": "http"}]
    assert [problem for document in found.values() for problem in schema_problems(document)] == []


def test_chart_without_prefill_engines_has_decode_engines_alone():
    found = render("--set", "prefill.replicas=0")
    assert not [name for _, name in found if name == "prefill"]
    proxy = yaml.safe_load(found["ConfigMap", "proxy"]["data"]["proxy.yaml"])
    assert {engine["role"] for engine in proxy["engines"]} == {"decode"}
    assert [problem for document in found.values() for problem in schema_problems(document)] == []


def test_chart_has_the_dashboard_and_the_alerts_of_the_tree():
    found = render("--set", "dashboard.enabled=true", "--set", "alerts.enabled=true")
    dashboard, rules = found["ConfigMap", "kvtier-dashboard"], found["PrometheusRule", "kvtier"]
    grafana = ROOT / "examples/grafana"
    assert json.loads(dashboard["data"]["kvtier.json"]) == json.loads((grafana / "kvtier.json").read_text("utf-8"))
    assert rules["spec"] == yaml.safe_load((grafana / "alerts.yml").read_text("utf-8"))
    assert schema_problems(dashboard) == []


def test_helm_lint_has_no_remark():
    done = run_helm("lint", "--strict", str(CHART))
    assert done.returncode == 0 and "WARNING" not in done.stdout, done.stdout + done.stderr


WRONG = [
    ("store.sise=1GiB", "sise"),
    ("store.size=plenty", "/store/size"),
    ("decode.replicas=0", "/decode/replicas"),
    ("decode.replicas=two", "/decode/replicas"),
    ("engine.endpointPort=70000", "/engine/endpointPort"),
    ("engine.kvEvents=5557", "/engine/kvEvents"),
    ("engine.kvEventsReplay=5657", "/engine/kvEventsReplay"),
    ("images.pullPolicy=Sometimes", "pullPolicy"),
    ("proxy.config.engines=none", "/proxy/config"),
    ("model=", "/model"),
    ("mooncake.segment=much", "/mooncake/segment"),
    ("mooncake.replicas=0", "/mooncake/replicas"),
    ("mooncake.master.external=http://x:1", "/mooncake/master/external"),
    ("mooncake.master.etcd=http://x:2379", "/mooncake/master/etcd"),
    ("store.env[0].value=x", "/store/env"),
    ("proxy.volumes=tls", "/proxy/volumes"),
]


@pytest.mark.parametrize(("value", "place"), WRONG)
def test_chart_refuses_wrong_values(value, place):
    done = run_helm("template", "release", str(CHART), "--set", value)
    assert done.returncode != 0 and place in done.stderr


# -- without helm --------------------------------------------------------------------------------------------------


def test_default_values_have_a_schema_each():
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)

    def check(schema: dict, values: dict, where: str) -> None:
        if "$ref" in schema:
            schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
        if schema.get("additionalProperties") is False:
            assert values.keys() <= schema["properties"].keys(), where
            for name, value in values.items():
                if isinstance(value, dict):
                    check(schema["properties"][name], value, f"{where}.{name}")

    check(SCHEMA, VALUES, "values")


def test_files_of_the_chart_are_those_of_grafana():
    assert {path.resolve() for path in (CHART / "files").iterdir()} == {
        ROOT / "examples/grafana" / name for name in ("kvtier.json", "alerts.yml")
    }


def test_proxy_follows_the_kv_events_of_the_charts_engines():
    found = render("--set", "engine.kvEvents=tcp://*:5557", "--set-json", 'proxy.config={"routing_policy":"kv_events"}')
    engines = yaml.safe_load(found["ConfigMap", "proxy"]["data"]["proxy.yaml"])["engines"]
    names = ["prefill-0.prefill", "decode-0.decode", "decode-1.decode"]
    assert [engine["events"] for engine in engines] == [f"{name}:5557" for name in names]


@pytest.mark.parametrize("port", [5657, 6000, None])
def test_proxy_gets_earlier_kv_events_of_the_charts_engines(port):
    """A proxy that was restarted knew of no block that its engines had."""
    endpoint = f"tcp://*:{port}" if port else ""
    words = () if port == 5657 else ("--set", f"engine.kvEventsReplay={endpoint}")
    found = render("--set", "engine.kvEvents=tcp://*:5557", *words)
    engines = yaml.safe_load(found["ConfigMap", "proxy"]["data"]["proxy.yaml"])["engines"]
    names = ["prefill-0.prefill", "decode-0.decode", "decode-1.decode"]
    assert [engine.get("replay") for engine in engines] == [f"{name}:{port}" if port else None for name in names]
    container = found["StatefulSet", "decode"]["spec"]["template"]["spec"]["containers"][0]
    (events,) = (word.partition("=")[2] for word in container["args"] if word.startswith("--kv-events-config="))
    assert json.loads(events).get("replay_endpoint", "") == endpoint
    open_ports = {each["containerPort"] for each in container["ports"]}
    from_proxies = found["NetworkPolicy", "engines"]["spec"]["ingress"][1]["ports"]
    assert (port in open_ports) == (port in {each["port"] for each in from_proxies}) == bool(port)
