"""Services as real processes: readiness, death noticed at once, and nothing left behind, whichever process dies."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from vllm_kvtier.devtools.processes import Service, ServiceFailed, free_port, group_members, start_all

# A server with a child that ignores SIGTERM, as engines have. argv: port, seconds until ready.
SERVER = """
import http.server, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(float(sys.argv[2]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def make(tmp_path):
    made = []

    def make(name="server", code=SERVER, delay=0.0, **options) -> Service:
        port = free_port()
        command = [sys.executable, "-c", code, str(port), str(delay)]
        made.append(Service(name, command, port=port, log_path=tmp_path / f"{name}.log", **options))
        return made[-1]

    yield make
    for service in made:
        service.kill()


def gone(group: int, within: float = 5.0) -> bool:
    deadline = time.monotonic() + within
    while group_members(group):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_service_ends_with_its_context(make):
    service = make()
    with service:
        assert service.running and service.ready_after < 10
        assert urllib.request.urlopen(service.base_url + "/health", timeout=5).status == 200
        assert len(group_members(service.pid)) == 2
        assert service.cpu_seconds() > 0
    assert not service.running and not group_members(service.pid)


def test_group_has_members_with_names_that_are_cut_within_a_character():
    """As vLLM's, with a VLLM_PROCESS_NAME_PREFIX: one of them anywhere on the machine was an error."""
    rename = "import ctypes; ctypes.CDLL(None).prctl(15, 'a推理服务模型'.encode()[:15] + bytes(1), 0, 0, 0)"
    code = f"{rename}; print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        process.stdout.readline()
        assert group_members(process.pid) == [process.pid]
        process.stdin.close()


def test_service_exit_during_start_raises_at_once_with_log(make):
    service = make(code="raise SystemExit('no such model')").start()
    started = time.monotonic()
    with pytest.raises(ServiceFailed, match="(?s)server ended with code 1.*no such model"):
        service.wait_ready()
    assert time.monotonic() - started < 10


def test_service_failure_shows_cause_logged_early(make):
    code = "print('(core) ERROR x.ConfigError: no such option'); print('noise\\n' * 200); raise SystemExit(1)"
    with pytest.raises(ServiceFailed, match="\nx.ConfigError: no such option\n"):
        make(code=code).start().wait_ready()


def test_service_never_ready_is_stopped_at_timeout(make):
    service = make(delay=600, ready_seconds=0.5).start()
    with pytest.raises(ServiceFailed, match="not ready within"):
        service.wait_ready()
    assert not group_members(service.pid)


def test_start_all_stops_others_if_one_fails(make):
    good, bad = make("good", delay=600), make("bad", code="raise SystemExit(3)")
    with pytest.raises(ServiceFailed, match="bad ended with code 3"):
        start_all([good, bad])
    assert not group_members(good.pid)


def test_start_all_starts_services_together(make):
    services, ticks = [make("a", delay=0.5), make("b", delay=0.5)], []
    start_all(services, ticks.append)
    assert ticks and all(service.ready_after >= 0.5 for service in services)


def test_service_restart_keeps_its_address(make):
    service = make()
    with service:
        first = service.pid
        service.kill()
        assert not service.running
        service.start().wait_ready()
        assert service.pid != first and service.running
    assert "child" in service.log_path.read_text()


def test_service_started_twice_raises(make):
    with make() as service, pytest.raises(ServiceFailed, match="running already"):
        service.start()


def test_service_that_ended_leaves_its_number_to_others(make, monkeypatch):
    """Numbers of processes are used again: a service that ended long ago is killed once more at a test's end."""
    (ended := make("ended", code="")).start()._process.wait()
    with make("other") as other:
        monkeypatch.setattr(ended._process, "pid", other.pid)
        for act in (ended.pause, ended.resume, ended.kill, ended.kill):
            act()
        assert ended.cpu_seconds() == 0
        assert len(group_members(other.pid)) == 2


def test_service_kill_leader_keeps_child_until_kill(make):
    with make() as service:
        service.kill_leader()
        assert not service.running and len(group_members(service.pid)) == 1
        service.kill()
        assert not group_members(service.pid)


def test_service_paused_does_not_answer_and_can_be_killed(make):
    with make() as service:
        service.pause()
        with pytest.raises(OSError):
            urllib.request.urlopen(service.base_url + "/health", timeout=0.3)
        service.resume()
        assert urllib.request.urlopen(service.base_url + "/health", timeout=5).status == 200
        service.pause()
    assert not group_members(service.pid)


def test_service_kill_and_terminate_are_idempotent(make):
    service = make()
    service.kill()
    service.terminate()
    with service:
        service.terminate()
        service.kill()
    service.kill()


def test_service_environment_is_merged(make):
    code = "import os, sys; sys.exit(f\"{os.environ.get('HOME')} {os.environ.get('KVTIER_X')}\")"
    service = make(code=code, env={"HOME": None, "KVTIER_X": "1"}).start()
    with pytest.raises(ServiceFailed, match="None 1"):
        service.wait_ready()


def test_service_group_ends_when_its_starter_is_killed(tmp_path):
    """The starter gets SIGKILL, so nothing in Python can clean up: the leash does."""
    starter = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from vllm_kvtier.devtools.processes import *\n"
            f"s = Service('s', [sys.executable, '-c', {SERVER!r}, str(p := free_port()), '0'],"
            f" port=p, log_path={str(tmp_path / 's.log')!r})\n"
            "s.start().wait_ready(); print(s.pid, flush=True); time.sleep(600)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    group = int(starter.stdout.readline())
    assert len(group_members(group)) == 2
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    assert gone(group)


def test_free_port_is_unique_over_processes():
    code = "import sys; from vllm_kvtier.devtools.processes import free_port; print(*[free_port() for _ in range(100)])"
    command = [sys.executable, "-c", f"{code}; sys.stdout.flush(); sys.stdin.read()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as other:
        ports = [int(port) for process in (one, other) for port in process.stdout.readline().split()]
        assert len(ports) == len(set(ports)) == 200
        for process in (one, other):
            process.stdin.close()


def test_free_port_is_outside_ephemeral_range():
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if first < 20000:
        pytest.skip("the system gives nearly every port to connections")
    assert not any(first <= free_port() <= last for _ in range(20))
