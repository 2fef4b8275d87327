"""Packages in this environment: vLLM, the probe's results for it, and NIXL."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

from vllm_kvtier import __version__
from vllm_kvtier.doctor.report import Check, fail, ok, unknown, warn
from vllm_kvtier.errors import UnsupportedVLLM
from vllm_kvtier.store.launcher import package_environment, run_code, run_module
from vllm_kvtier.vllm_compat import version
from vllm_kvtier.vllm_compat.probe.row import Feature

# In a separate process: NIXL's libraries write to stderr, take seconds to load, and may crash with a bad driver.
_ASK_NIXL = """
import json
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.tiers.process.nixl_agent import load_nixl
try:
    api = load_nixl()
except KVTierError as error:
    print(json.dumps({"missing": str(error)}))
    sys.exit()
found = {"plugins": [], "made": [], "errors": {}}
for backend in sys.argv[1:]:
    try:
        agent = api.nixl_agent("doctor-" + backend, api.nixl_agent_config(backends=[backend]))
        found["plugins"] = list(agent.plugin_list)
        found["made"] += [backend] if backend in agent.backends else []
    except Exception as error:
        found["errors"][backend] = f"{type(error).__name__}: {error}"
if not found["plugins"]:
    found["plugins"] = list(api.nixl_agent("doctor", api.nixl_agent_config(backends=[])).plugin_list)
print(json.dumps(found))
"""
_NIXL_SECONDS = 60.0
_PROBE_SECONDS = 180.0  # nearly all of it is importing vLLM
_INSTALL_NIXL = "pip install nixl (on machines without a GPU nixl-cu13)"


def vllm() -> Check:
    try:
        version.check_supported()
    except UnsupportedVLLM as error:
        return fail("vLLM", str(error), "run doctor in the environment that engines run in")
    python = ".".join(map(str, sys.version_info[:3]))
    return ok("vLLM", f"{version.installed_version()}, vllm-kvtier {__version__}, Python {python}")


def probe() -> list[Check]:
    """The probe's table of the vLLM that is installed here, a check for each row."""
    command = run_module("vllm_kvtier.vllm_compat.probe.table")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_SECONDS, cwd="/", env=package_environment()
        )
        rows = json.loads(done.stdout.splitlines()[-1])["rows"]  # behind what vLLM up to 0.30 logs there
    except subprocess.TimeoutExpired:
        return [unknown("probe of vLLM", f"importing vLLM takes more than {_PROBE_SECONDS:g} s")]
    except (ValueError, IndexError):
        return [fail("probe of vLLM", f"importing it ends the process: {_end_of(done)}", "reinstall vLLM")]
    return [_row(row) for row in rows]


def _end_of(done: subprocess.CompletedProcess) -> str:
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def _row(row: dict[str, str]) -> Check:
    name, message = f"vLLM's {row['name']}", f"{row['need']} ({row['how']}; for: {row['feature']})"
    if row["state"] == "failed":
        worst = row["feature"] == Feature.ALL.value
        effect = "no engine starts with the connector" if worst else f"switched off: {row['feature']}"
        fix = f"install a vLLM that is supported ({version.SUPPORTED}), or a newer vllm-kvtier"
        return (fail if worst else warn)(name, f"{row['reason']}; {effect}", fix)
    if row["state"] == "absent":
        message += f": not in this version or on this machine, {row['reason']}"
    return ok(name, message)


def nixl(backends: Sequence[str], environment: Mapping[str, str] | None = None) -> Check:
    """Whether NIXL has ``backends``, by making an agent of each."""
    try:
        done = subprocess.run(
            [*run_code(_ASK_NIXL), *backends],
            capture_output=True,
            text=True,
            timeout=_NIXL_SECONDS,
            cwd="/",
            env={**package_environment(), **(environment or {})},
        )
        found = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        message = f"it does not start within {_NIXL_SECONDS:g} s"
        return fail("NIXL", message, "check the network devices and their drivers")
    except (IndexError, ValueError):
        return fail("NIXL", f"loading it ends the process: {_end_of(done)}", _INSTALL_NIXL)
    if "missing" in found:
        message = f"{found['missing']}: engines cannot pull, and stores cannot read from other nodes"
        return warn("NIXL", message, _INSTALL_NIXL)
    lacking = [backend for backend in backends if backend not in found["made"]]
    have = ", ".join(found["plugins"]) or "none"
    if lacking:
        reasons = "; ".join(found["errors"][backend] for backend in lacking if backend in found["errors"])
        message = f"its backend {' and '.join(lacking)} is missing; installed: {have}"
        fix = "name other backends in nixl_backends, or install a NIXL that has it"
        return fail("NIXL", message + (f" ({reasons})" if reasons else ""), fix)
    return ok("NIXL", f"{' and '.join(found['made'])} can be used; installed: {have}")
