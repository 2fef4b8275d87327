"""Where the time of a turn goes, in each process and thread of an engine and in each method of its connector.

Only for engines that were started with ``watched``. Methods are timed by connectors/timed_connectors.py, during the
measured turn alone. Of threads, the CPU time and how often they woke come from /proc; Python's threads have their own
names there only from Python 3.14 on, so a connector reports them.
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from vllm_kvtier.devtools.processes import group_members

CONNECTORS = Path(__file__).resolve().parent / "connectors"
STEPS = r"vllm:iteration_tokens_total_count"
LEAST = 0.001  # of a core: threads below it are left out
TICK = os.sysconf("SC_CLK_TCK")


def watched(kv: dict | None, folder: Path) -> tuple[dict | None, dict[str, str]]:
    """The engine's transfer configuration and variables so that its connector can be timed."""
    shutil.rmtree(folder, ignore_errors=True)  # processes of an earlier engine are not there any more
    folder.mkdir(parents=True)
    kv = kv and {**kv, "kv_connector_module_path": "timed_connectors"}
    return kv, {"KVTIER_TIMES": str(folder)}


def processes(leader: int, folder: Path) -> dict[int, str]:
    """The engine's, and those that it started, as a store of its own, by what they are."""
    own, marked = set(group_members(leader)), f"KVTIER_TIMES={folder}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (int(entry.name) in own or marked in _parts(entry / "environ")):
                found[int(entry.name)] = _role(int(entry.name), leader, _parts(entry / "cmdline"))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def _parts(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\0")


def _role(pid: int, leader: int, command: list[bytes]) -> str:
    if pid == leader:
        return "API server"
    if any(part.startswith(b"vllm_kvtier.store.tiers") for part in command):
        return "tier process"
    if b"vllm_kvtier.store" in command:
        return "node store"
    return "engine" if b"EngineCore" in command[0] else Path(f"/proc/{pid}/comm").read_text().strip()


def usage(pids: dict[int, str]) -> dict[tuple[int, int], tuple[str, float, int]]:
    """(process, thread) -> name, seconds of CPU, wakes (voluntary context switches)."""
    found = {}
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*"):
            try:
                name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(")")
                status = (task / "status").read_text()
                cpu = _cpu(task, fields)
            except OSError:
                continue
            wakes = int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
            found[pid, int(task.name)] = "main" if int(task.name) == pid else name, cpu, wakes
    return found


def _cpu(task: Path, fields: str) -> float:
    """Seconds: to the nanosecond if the kernel counts them, else in ticks (proc(5): fields behind the name)."""
    file = task / "schedstat"
    exact = int(file.read_text().split()[0]) / 1e9 if file.exists() else 0.0
    return exact or sum(map(int, fields.split()[11:13])) / TICK


def _signal(folder: Path) -> dict[int, dict]:
    """Begin or end timing; process -> what it wrote."""
    found = {}
    for file in [file for file in folder.iterdir() if file.name.isdigit()]:
        answer = folder / f"{file.name}.{1 + len(list(folder.glob(f'{file.name}.*.json')))}.json"
        os.kill(int(file.name), signal.SIGUSR1)
        deadline = time.monotonic() + 10
        while not answer.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {file.name} wrote no times; was its connector shut down?")
            time.sleep(0.01)  # a signal handler has no other way to answer
        found[int(file.name)] = json.loads(answer.read_text())
    return found


def shares(peer, turn: Callable[[], object]) -> tuple[list[dict], list[dict]]:
    """Run ``turn``. Rows of methods (microseconds a step) and of threads (share of a core, wakes a step)."""
    _signal(peer.times)
    pids = processes(peer.engine.pid, peer.times)
    steps, before, begin = peer.total(STEPS), usage(pids), time.monotonic()
    turn()
    seconds, after, steps = time.monotonic() - begin, usage(pids), peer.total(STEPS) - steps
    written = _signal(peer.times)
    names = {(pid, int(tid)): name for pid, said in written.items() for tid, name in said["threads"].items()}
    of = {"connector": peer.connector, "steps": int(steps), "step_ms": round(1000 * seconds / max(steps, 1), 3)}
    methods = [
        {**of, "side": side, "method": method, "thread": thread, "calls": round(calls / max(steps, 1), 2),
         "us": round(took / 1000 / max(steps, 1), 2), "longest_us": round(longest / 1000)}
        for said in written.values() for side, method, thread, calls, took, longest in said["calls"]
    ]  # fmt: skip
    if methods:
        every = {"side": "", "method": "all", "thread": "", "calls": round(sum(row["calls"] for row in methods), 2)}
        longest = max(row["longest_us"] for row in methods)
        methods += [{**of, **every, "us": round(sum(row["us"] for row in methods), 2), "longest_us": longest}]
    summed: dict[tuple[str, str], list[float]] = {}
    for key, (name, cpu, wakes) in after.items():
        _, cpu_before, wakes_before = before.get(key, ("", 0.0, 0))
        cell = summed.setdefault((pids[key[0]], name if name == "main" else names.get(key, name)), [0.0, 0.0])
        cell[0] += (cpu - cpu_before) / seconds
        cell[1] += (wakes - wakes_before) / max(steps, 1)
    threads = [
        {**of, "process": process, "thread": thread, "cpu": round(cpu, 4), "wakes": round(wakes, 2)}
        for (process, thread), (cpu, wakes) in summed.items() if cpu >= LEAST
    ]  # fmt: skip
    return sorted(methods, key=lambda row: -row["us"]), sorted(threads, key=lambda row: -row["cpu"])
