"""Check the Kubernetes manifests by Kubernetes' schemas, against each other, and by the parsers of their arguments."""

import functools
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import yaml
from docs_blocks import ROOT, Command
from docs_commands import Checker, refused

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.proxy.config import ROLES
from vllm_kvtier.proxy.config_file import load_settings

FOLDER = ROOT / "examples/kubernetes"
VERSIONS = ("1.29", "1.34")  # of Kubernetes: the oldest and the newest that the manifests are checked for
WORKLOADS = ("Deployment", "DaemonSet", "StatefulSet")
SHORT = {"deploy": "Deployment", "ds": "DaemonSet", "sts": "StatefulSet", "svc": "Service", "cm": "ConfigMap"}
VERBS = {"apply", "create", "delete", "describe", "exec", "get", "logs", "port-forward", "rollout", "scale", "wait"}


def load(folder: Path = FOLDER) -> dict[str, list[dict]]:
    """Documents by file."""
    return {path.name: list(yaml.safe_load_all(path.read_text("utf-8"))) for path in sorted(folder.glob("*.yaml"))}


def schema_problems(document: dict) -> list[str]:
    if document.get("kind") == "Kustomization":  # kustomize's own, for which Kubernetes has no schema
        return []
    return list(_schema_problems(json.dumps(document)))


@functools.cache
def _schema_problems(text: str) -> tuple[str, ...]:
    document, found = json.loads(text), []
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{version}: {'.'.join(map(str, error.path))}: {error.message}")
        except kubernetes_validate.SchemaNotFoundError:
            found.append(f"{version} knows no {document.get('apiVersion')} {document.get('kind')}")
    return tuple(found)


def problems(files: dict[str, list[dict]], dockerfile: str, checker: Checker) -> list[str]:
    """All errors, as text."""
    return list(_problems(files, dockerfile, checker))


def _problems(files: dict[str, list[dict]], dockerfile: str, checker: Checker) -> Iterator[str]:
    custom = files["kustomization.yaml"][0]
    named, there = set(custom["resources"]), set(files) - {"kustomization.yaml"}
    yield from (f"kustomization.yaml does not have {name}" for name in there - named)
    yield from (f"kustomization.yaml names {name}, which is not there" for name in named - there)
    documents = [document for name, found in files.items() for document in found if document["kind"] != "Kustomization"]
    for document in documents:
        yield from (f"{_name(document)}: {problem}" for problem in schema_problems(document))
    names = {(document["kind"], document["metadata"]["name"]) for document in documents}
    names |= {("Secret", secret["name"]) for secret in custom.get("secretGenerator", ())}
    if ("Namespace", custom["namespace"]) not in names:
        yield f"the namespace {custom['namespace']} is not created"
    workloads = [document for document in documents if document["kind"] in WORKLOADS]
    for workload in workloads:
        yield from (f"{_name(workload)}: {p}" for p in _workload(workload, names, custom, dockerfile, checker))
    for document in documents:
        if document["kind"] == "Service":
            yield from (f"{_name(document)}: {problem}" for problem in _service(document, workloads))
        elif document["kind"] == "NetworkPolicy":
            yield from (f"{_name(document)}: {problem}" for problem in _policy(document, workloads))
    yield from _across(documents, workloads)


def _name(document: dict) -> str:
    return f"{document['kind']} {document['metadata']['name']}"


def _workload(workload: dict, names: set, custom: dict, dockerfile: str, checker: Checker) -> Iterator[str]:
    spec = workload["spec"]
    pod, labels = spec["template"]["spec"], spec["template"]["metadata"]["labels"]
    if not spec["selector"]["matchLabels"].items() <= labels.items():
        yield "its selector does not select its pods"
    volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
    for volume in volumes.values():
        if "secret" in volume and ("Secret", volume["secret"]["secretName"]) not in names:
            yield f"the Secret {volume['secret']['secretName']} is not created"
        if "configMap" in volume and ("ConfigMap", volume["configMap"]["name"]) not in names:
            yield f"the ConfigMap {volume['configMap']['name']} is not created"
    for container in pod["containers"]:
        mounts = {mount["name"]: mount["mountPath"] for mount in container.get("volumeMounts", ())}
        yield from (f"no volume {name}" for name in mounts.keys() - volumes.keys())
        image = container["image"].rpartition(":")[0]
        if image not in {entry["name"] for entry in custom["images"]}:
            yield f"kustomization.yaml does not name the image {image}"
        if not re.search(rf"^#.*--target (\w+) -t {re.escape(image)}:", dockerfile, re.M):
            yield f"the Dockerfile does not say how {image} is made"
        yield from _command(container, checker)
        yield from _probes(container)
        yield from _paths(container, mounts, volumes, "fsGroup" in pod.get("securityContext", {}))
        if not {"requests", "limits"} <= container.get("resources", {}).keys():
            yield "no resources"


def arguments(container: dict) -> list[str]:
    """The command line, variables put in as Kubernetes does."""
    values = {entry["name"]: entry.get("value", "10.0.0.1") for entry in container.get("env", ())}
    return [
        re.sub(r"\$\((\w+)\)", lambda match: values.get(match[1], match[0]), word)
        for word in [*container.get("command", ()), *container.get("args", ())]
    ]


def _command(container: dict, checker: Checker) -> Iterator[str]:
    words = arguments(container)
    yield from (f"{word}: no such variable" for word in words if re.search(r"\$\(\w+\)", word))
    if problem := refused(checker.check, Command(words, " ".join(words))):
        yield problem


def _probes(container: dict) -> Iterator[str]:
    ports = {port["name"] for port in container.get("ports", ())}
    routes = {"vllm": {"/health"}, "kvtier": {"/health", "/ready"}, "mooncake_master": {"/health"}}
    routes = routes[container["command"][0]]
    if "readinessProbe" not in container:
        yield "no readinessProbe"
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container.get(kind, {})
        if "httpGet" in probe:
            if probe["httpGet"]["port"] not in ports:
                yield f"{kind}: no port {probe['httpGet']['port']}"
            if probe["httpGet"]["path"] not in routes:
                yield f"{kind}: no route {probe['httpGet']['path']}"
        elif "exec" in probe:
            socket = _option(probe["exec"]["command"], "socket")
            if socket != _option(arguments(container), "socket"):
                yield f"{kind} asks at {socket}, where this store does not listen"


def _paths(container: dict, mounts: dict[str, str], volumes: dict[str, dict], grouped: bool) -> Iterator[str]:
    """Files and directories that the arguments name lie on volumes that have them."""
    words = arguments(container)
    text = " ".join(words)
    for path in re.findall(r"(?<![\w:/])/(?:etc|run|var)/[\w./-]+", text):
        on = [name for name, mount in mounts.items() if Path(path).is_relative_to(mount)]
        if not on:
            yield f"{path} is on no volume"
        elif (mode := volumes[on[0]].get("secret", {"defaultMode": 0}).get("defaultMode", 0o644)) & 0o037:
            yield f"{path}: a key that others may read is refused"
        elif bool(mode & 0o040) > grouped:
            yield f"{path}: root's group may read it"
    options = r"(?:--port=|--metrics[-_]port=|--rpc_port=|\"endpoint_port\":|tcp://\*:|--node-listen=\[?[\d.]+\]?:)"
    listens = {int(number) for number in re.findall(rf"{options}(\d+)", text)}
    ports = {port["containerPort"] for port in container.get("ports", ())}
    yield from (f"port {number} is not named in ports" for number in listens - ports)
    if container["command"] != ["kvtier", "proxy"]:  # its port is in its file
        yield from (f"nothing listens at port {number}" for number in ports - listens)


def _option(words: list[str], name: str) -> str | None:
    return next((word.partition("=")[2] for word in words if word.startswith(f"--{name}=")), None)


def _selected(labels: dict, workloads: list[dict]) -> list[dict]:
    return [w for w in workloads if labels.items() <= w["spec"]["template"]["metadata"]["labels"].items()]


def _ports(workloads: list[dict]) -> set:
    containers = [container for w in workloads for container in w["spec"]["template"]["spec"]["containers"]]
    ports = [port for container in containers for port in container.get("ports", ())]
    return {port["containerPort"] for port in ports} | {port["name"] for port in ports}


def _service(service: dict, workloads: list[dict]) -> Iterator[str]:
    selected = _selected(service["spec"]["selector"], workloads)
    if not selected:
        yield "it selects no pod"
    for port in service["spec"]["ports"]:
        if (wanted := port.get("targetPort", port["port"])) not in _ports(selected):
            yield f"its pods have no port {wanted}"


def _policy(policy: dict, workloads: list[dict]) -> Iterator[str]:
    selected = _selected(policy["spec"]["podSelector"]["matchLabels"], workloads)
    if not selected:
        yield "it selects no pod"
    for rule in policy["spec"]["ingress"]:
        yield from (f"no port {p['port']}" for p in rule.get("ports", ()) if p["port"] not in _ports(selected))
        for peer in rule.get("from", ()):
            if "podSelector" in peer and not _selected(peer["podSelector"]["matchLabels"], workloads):
                yield f"no pod has {peer['podSelector']['matchLabels']}"


def _across(documents: list[dict], workloads: list[dict]) -> Iterator[str]:
    """What must agree between store, engines and proxy."""
    by_name = {_name(document): document for document in documents}
    pods = {_name(w): w["spec"]["template"]["spec"] for w in workloads}
    store = pods["DaemonSet store"]
    socket = _option(arguments(store["containers"][0]), "socket")
    for name in ("StatefulSet prefill", "StatefulSet decode"):
        pod = pods[name]
        text = " ".join(arguments(pod["containers"][0]))
        if f'"store":"{socket}"' not in text:
            yield f"{name} does not use the store at {socket}"
        if pod["securityContext"]["runAsUser"] != store["securityContext"]["runAsUser"]:
            yield f"{name} is another user than the store, which refuses it"
        to_end = _option(arguments(pod["containers"][0]), "shutdown-timeout")
        if not 0 < int(to_end or 0) < pod["terminationGracePeriodSeconds"]:
            yield f"{name} is killed before its requests have ended"
        if _host_path(pod, socket) != _host_path(store, socket):
            yield f"{name} does not have the store's directory"
        if pod["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") is None:
            yield f"{name} has no GPU"
        if f"Service {by_name[name]['spec']['serviceName']}" not in by_name:
            yield f"{name}: no Service of its serviceName"
    yield from _proxy_config(by_name, pods)


def _proxy_config(by_name: dict[str, dict], pods: dict[str, dict]) -> Iterator[str]:
    pod = pods["Deployment proxy"]
    container = pod["containers"][0]
    file = Path(_option(arguments(container), "config"))
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    if str(file.parent) != mounts.get("config") or file.name not in by_name["ConfigMap proxy"]["data"]:
        yield f"the proxy's {file} is not where its ConfigMap is"
        return
    text = by_name["ConfigMap proxy"]["data"][file.name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, file.name)
        path.write_text(text)
        try:
            settings = load_settings(str(path), {})
        except ConfigError as error:
            yield f"ConfigMap proxy: {error}"
            return
    if settings.server.host != "0.0.0.0" or settings.server.port not in _ports([by_name["Deployment proxy"]]):
        yield "the proxy does not listen where its Service connects to"
    if settings.server.drain_delay + settings.server.drain_timeout >= pod["terminationGracePeriodSeconds"]:
        yield "the proxy is killed before it has drained"
    key = settings.proxy.cluster_key_file
    if key is None or not any(Path(key).is_relative_to(mount) for mount in mounts.values()):
        yield f"the proxy's key {key} is on no volume"
    named = [address.url for role in ROLES for address in getattr(settings.proxy, role)]
    there = []
    for role in ("prefill", "decode"):
        engine, service = by_name[f"StatefulSet {role}"], by_name[f"Service {role}"]
        port = service["spec"]["ports"][0]["port"]
        there += [f"http://{role}-{n}.{role}:{port}" for n in range(engine["spec"]["replicas"])]
        if any(f"//{role}-" not in address.url for address in getattr(settings.proxy, role)):
            yield f"an engine of another role is named as {role}"
    if sorted(named) != sorted(there):
        yield f"the proxy's engines are {named}, and there are {there}"


def _host_path(pod: dict, socket: str) -> str | None:
    for mount in pod["containers"][0]["volumeMounts"]:
        if Path(socket).is_relative_to(mount["mountPath"]):
            volume = next(volume for volume in pod["volumes"] if volume["name"] == mount["name"])
            return volume.get("hostPath", {}).get("path")
    return None


def kubectl_problem(words: list[str], checker: Checker) -> str:
    """What is wrong with a ``kubectl`` command line; "" if nothing is known to be."""
    plain = words[: words.index("--")] if "--" in words else words
    space = next((b for a, b in zip(plain, plain[1:], strict=False) if a in ("-n", "--namespace")), None)
    files = load()
    there = {(d["kind"], d["metadata"]["name"]) for found in files.values() for d in found if "metadata" in d}
    if space not in (None, files["kustomization.yaml"][0]["namespace"]):
        return f"there is no namespace {space}"
    verbs = [word for word in plain if word in VERBS]
    if not verbs:
        return f"{words}: no command of kubectl that these checks know"
    for option, value in zip(plain, plain[1:], strict=False):
        if option in ("-k", "-f") and not (ROOT / value).exists():
            return f"there is no {value}"
    for word in plain:
        kind, slash, name = word.partition("/")
        kind = SHORT.get(kind, kind.capitalize())
        if slash and kind in SHORT.values() and (kind, name) not in there:
            return f"there is no {word}"
    if "--" in words and verbs[0] == "exec":
        inner = words[words.index("--") + 1 :]
        return refused(checker.check, Command(inner, " ".join(inner)))
    return ""
