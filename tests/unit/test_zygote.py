"""Processes forked from the zygote are as new ones are: arguments, environment, log, group, children, exit codes."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import zygote as zygote_module
from support import eventually
from zygote import Forked, Zygote, _serve

from vllm_kvtier.devtools.processes import Service, ServiceFailed, group_members, lives
from vllm_kvtier.store import linux

# What it is asked to do, it does before it would serve.
CODE = """
    import json, multiprocessing, os, sys, threading

    VALUE = "imported"

    def child(path, given):
        with open(path, "w") as file:
            environ = {name: os.environ.get(name) for name in ("LATER", "PYTEST_CURRENT_TEST")}
            json.dump([os.getpid(), os.getpgrp(), given, VALUE, environ], file)
        sys.exit(7)

    def main():
        global VALUE
        VALUE = "of the parent alone"
        os.environ["LATER"] = "set by the parent"
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        process = multiprocessing.get_context("spawn").Process(target=child, args=(sys.argv[1], ["pickled"]))
        process.start()
        process.join()
        print(json.dumps({
            "argv": sys.argv[1:], "cwd": os.getcwd(), "name": __name__, "test": os.environ["PYTEST_CURRENT_TEST"],
            "leads": os.getpid() == os.getpgrp() == os.getsid(0), "child": [process.pid, process.exitcode],
            "threads": threading.active_count(), "heavy": "email.mime.text" in sys.modules,
        }), flush=True)
        if sys.argv[2] == "hang":
            threading.Event().wait()
        sys.exit(int(sys.argv[2]))

    if __name__ == "__main__":
        main()
"""
SELF = "zygote_example"


@pytest.fixture
def make(tmp_path, monkeypatch):
    (tmp_path / f"{SELF}.py").write_text(textwrap.dedent(CODE))
    zygote = Zygote(os.environ, SELF, ("email.mime.text",))
    monkeypatch.setattr(Service, "popen", staticmethod(zygote.popen))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = []

    def make(*args: str, module: str = SELF, **options) -> Service:
        command = [sys.executable, "-m", module, str(tmp_path / "child.json"), *args]
        made.append(Service("one", command, port=1, log_path=tmp_path / f"{len(made)}.log", **options))
        return made[-1]

    yield make
    for service in made:
        service.kill()
    zygote.close()


def told(service: Service) -> dict:
    return json.loads(service.log_path.read_text())


def forked(service: Service) -> bool:
    return not isinstance(service._process, subprocess.Popen)


def test_zygote_popen_of_module_forks_like_new_process(make, tmp_path):
    service = make("3", "and", "more").start()
    assert forked(service) and service._process.wait() == 3
    with pytest.raises(ServiceFailed, match="ended with code 3"):
        service.check_ready()
    first = told(service)
    pid, exit_code = first.pop("child")
    assert first == {
        "argv": [str(tmp_path / "child.json"), "3", "and", "more"], "cwd": os.getcwd(), "name": "__main__",
        "test": os.environ["PYTEST_CURRENT_TEST"], "leads": True, "threads": 2, "heavy": True,
    }  # fmt: skip
    assert exit_code == 7
    environ = {"LATER": "set by the parent", "PYTEST_CURRENT_TEST": os.environ["PYTEST_CURRENT_TEST"]}
    child = json.loads(Path(tmp_path / "child.json").read_text())
    assert child == [pid, service.pid, ["pickled"], "imported", environ], "its globals are not those of its parent"
    eventually(lambda: not group_members(service.pid), 10, "what forks for it ends with it")


def test_zygote_kill_ends_whole_process_group(make):
    service = make("hang").start()
    eventually(lambda: service.log_path.read_text(), 20, "it runs")
    assert forked(service) and len(group_members(service.pid)) > 1
    service.kill()
    assert service._process.returncode == -signal.SIGKILL and not group_members(service.pid)


def test_zygote_kill_leader_is_reported(make):
    service = make("hang").start()
    service.kill_leader()
    assert not service.running and service._process.returncode == -signal.SIGKILL
    service.start()
    assert service.running


def test_zygote_start_script_separates_stdout_and_stderr(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nprint(sys.argv[1:], 'email.mime.text' in sys.modules, os.environ['XDG_RUNTIME_DIR'])\n"
        "print('error', file=sys.stderr)\nsys.exit(3 if __name__ == '__main__' else 0)\n"
    )
    zygote = Zygote(os.environ, SELF, ("email.mime.text",))
    files = tmp_path / "stdout", tmp_path / "stderr"
    with files[0].open("wb") as stdout, files[1].open("wb") as stderr:
        env = {**zygote.env, "XDG_RUNTIME_DIR": "/somewhere"}
        assert zygote.start_script([str(script), "one"], env, stdout, stderr).wait() == 3
        with pytest.raises(AssertionError):
            zygote.start_script([str(script)], {**env, "OMP_NUM_THREADS": "7"}, stdout, stderr)
    assert [file.read_text() for file in files] == ["['one'] True /somewhere\n", "error\n"]
    zygote.close()


COMMAND = """
import os, signal, sys
print(sys.argv[1:], "email.mime.text" in sys.modules, os.getcwd(), os.environ["OF_PAGE"], flush=True)
if sys.argv[1] == "hang":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
    print(os.getpid(), flush=True)
    signal.pause()
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def command(tmp_path):
    """Starts a command that a forked process runs, as a shell does."""
    (tmp_path / "script.py").write_text(COMMAND)
    zygote = Zygote(os.environ, imports=("email.mime.text",), shared_as=os.urandom(8).hex())
    zygote.ask(None)
    code = f"from zygote import Zygote; Zygote({{}}, shared_as={zygote.shared_as!r}).run_command('script.py')"
    env = {**os.environ, "OF_PAGE": "here", "PYTHONPATH": str(Path(zygote_module.__file__).parent)}

    def start(*words: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", code, *words], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
        )

    yield start
    zygote.close()


def test_zygote_run_command_ends_as_forked_process_does(command, tmp_path):
    said, _ = (process := command("3", "words")).communicate()
    assert process.returncode == 3 and said == f"['3', 'words'] True {tmp_path} here\n"


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 4), (signal.SIGKILL, -signal.SIGKILL)])
def test_zygote_signal_to_command_ends_forked_process(command, number, code):
    process = command("hang")
    process.stdout.readline()
    child = int(process.stdout.readline())
    process.send_signal(number)
    assert process.wait() == code
    eventually(lambda: not lives(child), 10)
    process.stdout.close()


@pytest.mark.parametrize("what", ["environment", "module"])
def test_zygote_popen_with_other_module_or_environment_starts_interpreter(make, what):
    assert make("0").start()._process.wait() == 0
    options = {"environment": {"env": {"OMP_NUM_THREADS": "7"}}, "module": {"module": "platform"}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other = make("0", **options[what]).start()
    assert not forked(other)
    assert ["['OMP_NUM_THREADS']" in str(each.message) for each in caught] == [True] * (what == "environment")
    other._process.wait()
    late = make("0", env={"XDG_RUNTIME_DIR": "/somewhere", "KVTIER_OF_A_TEST": "plan"}).start()
    assert forked(late) and late._process.wait() == 0


def test_zygote_poll_by_two_threads_returns_exit_code(make):
    """The second question comes when the child has been reaped: it must not end the zygote."""
    service = make("5").start()
    process, other = service._process, Forked(service._process._zygote, service.pid)
    assert process.wait() == other.wait() == 5
    assert make("0").start()._process.wait() == 0


def test_zygote_wait_reaped_by_other_thread_returns_exit_code(make, monkeypatch):
    service = make("5").start()
    process, other = service._process, Forked(service._process._zygote, service.pid)
    opened = linux.pidfd_open

    def reaped_first(pid):
        monkeypatch.setattr(linux, "pidfd_open", opened)
        assert other.wait() == 5
        return opened(pid)

    monkeypatch.setattr(linux, "pidfd_open", reaped_first)
    assert process.wait() == 5


def test_zygote_of_one_name_is_shared_until_all_have_left(tmp_path):
    script, name = tmp_path / "script.py", os.urandom(8).hex()
    script.write_text("import os; print(os.getppid())")

    def parent(zygote: Zygote) -> int:
        with open(tmp_path / "stdout", "w+") as out:
            assert zygote.start_script([str(script)], os.environ, out, out).wait() == 0
            out.seek(0)
            return int(out.read())

    first, second, third, other = (Zygote(os.environ, imports=(), shared_as=each) for each in (name, name, name, ""))
    common = parent(first)
    assert parent(second) == common != parent(other)
    first.close()
    assert parent(second) == common
    second.close()
    eventually(lambda: not lives(common), 10)
    assert parent(third) != common
    for each in (third, other):
        each.close()


def test_zygote_reused_pid_has_exit_code_of_new_child(monkeypatch):
    """Whose exit code is not that of the child that had it before."""
    listener, link = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    listener.bind("")
    listener.listen()
    link.connect(listener.getsockname())
    monkeypatch.setattr(os, "fork", lambda: 4242)
    waits = iter([(4242, 5 << 8), (0, 0)])
    monkeypatch.setattr(os, "waitpid", lambda pid, options: next(waits))
    with link, listener, open(os.devnull) as log:
        for _ in range(2):
            socket.send_fds(link, [b"{}"], [log.fileno()])
            link.send(b"4242")
        link.shutdown(socket.SHUT_WR)
        with pytest.raises(SystemExit):
            _serve(listener)
        assert [json.loads(link.recv(100)) for _ in range(2)] == [5, None]
