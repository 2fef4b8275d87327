"""Engines start from a process that has imported vLLM already: importing takes four fifths of a small one's start.

The zygote is a process of this session, of all of xdist's workers, that imports the modules of an engine once and has
a single thread. For each engine it forks a child, which leads a session of its own and runs the server's module as
``python -m`` does. vLLM spawns its further processes; in such an engine multiprocessing's fork server makes them
instead, forked before the engine starts any thread. As with spawning, all that they are given is pickled, and their
environment is that of the process that starts them.

Only what is not yet decided when the modules are imported may differ between engines: the variables LATE. A command of
another interpreter or module, or with other variables, is started as always, in a new interpreter. So are all engines
of the examples, which their tests run as a user does. ``start_script`` forks for a script that makes an engine in its
own process, and ``run_command`` for a command of a shell.
"""

import contextlib
import ctypes
import errno
import functools
import gc
import importlib
import itertools
import json
import logging.config
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.spawn
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from vllm_kvtier.devtools.processes import LEASH
from vllm_kvtier.store import linux

MODULE = "vllm.entrypoints.openai.api_server"
# What its processes import before they read any of their flags.
IMPORTS = (
    MODULE,
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.async_llm",
    "vllm.v1.metrics.loggers",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.model_executor.models.qwen3",
    "vllm_kvtier.codecs.int8",
    "vllm_kvtier.codecs.k8v4",
    "vllm_kvtier.codecs.rot4",
    "vllm_kvtier.connector",
    "vllm_kvtier.vllm_compat.probe.rows",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
)
# What an engine's start imports beside them, where this vLLM has it.
OPTIONAL_IMPORTS = (
    "model_hosting_container_standards.sagemaker",
    "vllm.entrypoints.anthropic.api_router",
    "vllm.entrypoints.cohere.api_router",
    "vllm.entrypoints.generate.generative_scoring.api_router",
    "vllm.entrypoints.generate.structured_decisions.api_router",
    "vllm.entrypoints.openai.chat_completion.api_router",
    "vllm.entrypoints.openai.completion.api_router",
    "vllm.entrypoints.openai.models.api_router",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.scale_out.derender.api_router",
    "vllm.entrypoints.scale_out.render.api_router",
    "vllm.entrypoints.serve.instrumentator.metrics",
    "vllm.entrypoints.serve.lora.api_router",
    "vllm.entrypoints.serve.profile.api_router",
    "vllm.entrypoints.serve.tokenize.api_router",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.renderers.hf",
)
# Variables that an engine reads when it starts, not when its modules are imported. PYTHONPATH is where it finds more.
# All that tests tell their own classes there (OF_TESTS) is read so late as well.
OF_TESTS = "KVTIER_"
LATE = {
    "PYTEST_CURRENT_TEST",
    "PYTEST_XDIST_WORKER",
    "PYTHONHASHSEED",  # which vLLM's block hashes start from; the hashes of this interpreter's strings stay as they are
    "PYTHONPATH",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
    "VLLM_SERVER_DEV_MODE",
    "XDG_RUNTIME_DIR",
}
# Variables that torch, vLLM, cv2 and our client of Mooncake set when they are imported: a test's process that has
# imported them has them too.
SET_BY_IMPORTS = {
    "LD_LIBRARY_PATH",
    "MC_LOG_LEVEL",
    "MC_RPC_CONNECT_TIMEOUT_MS",
    "MC_RPC_TIMEOUT_MS",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TILELANG_CLEANUP_TEMP_FILES",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TRITON_CACHE_AUTOTUNING",
}
OF_SESSION = OF_TESTS + "ZYGOTE"  # a variable: the name of the zygote that a session's processes share
_MESSAGE_BYTES = 1 << 18


class Zygote:
    """``popen`` starts what ``subprocess.Popen`` would, from here where it can. The first one starts the zygote.

    env: of the processes that it can start, but for LATE.
    shared_as: a name; several processes with the same one share the zygote that the first of them starts (default: a
    new one).
    """

    def __init__(
        self, env: Mapping[str, str], module: str = MODULE, imports: Sequence[str] = IMPORTS, shared_as: str = ""
    ):
        self._module, self._imports = module, imports
        self.shared_as = shared_as or os.urandom(8).hex()
        self._name = f"\0kvtier-zygote-{self.shared_as}"
        self._env = dict(env)
        self._process: subprocess.Popen | None = None
        self._link: socket.socket | None = None
        self._lock = threading.Lock()

    def popen(self, command: Sequence[str], *, env: Mapping[str, str], stdin, stdout, stderr, start_new_session):
        same_module = list(command[:3]) == [sys.executable, "-m", self._module]
        other = sorted({name for name, _ in _fixed(env).items() ^ _fixed(self._env).items()})
        if same_module and other:
            warnings.warn(f"an engine starts slowly, in a new interpreter, for its variables {other}", stacklevel=2)
        if not same_module or other:
            return subprocess.Popen(
                command, env=env, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=start_new_session
            )
        assert (stdin, stderr, start_new_session) == (subprocess.DEVNULL, subprocess.STDOUT, True)
        request = {"argv": list(command[2:]), "env": dict(env), "cwd": os.getcwd(), "script": False}
        return Forked(self, self.ask(request, [stdout.fileno(), stdout.fileno()]))

    def start_script(self, argv: Sequence[str], env: Mapping[str, str], stdout, stderr) -> "Forked":
        """Run the script argv[0] as a new interpreter would. ``env`` may differ in LATE only."""
        assert _fixed(env) == _fixed(self._env), set(env.items()) ^ set(self._env.items())
        request = {"argv": list(argv), "env": dict(env), "cwd": os.getcwd(), "script": True}
        return Forked(self, self.ask(request, [stdout.fileno(), stderr.fileno()]))

    def run_command(self, script: str) -> NoReturn:
        """In a process that a shell started for a command: have a forked one run ``script`` with its arguments,
        environment and network, and end as that does. When this one is killed, so is that with its group."""
        request = {"argv": [script, *sys.argv[1:]], "env": dict(os.environ), "cwd": os.getcwd(), "script": True}
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        child = Forked(self, self.ask({**request, "beside": os.getpid()}, [1, 2]))
        signal.signal(signal.SIGTERM, lambda *_: os.kill(child.pid, signal.SIGTERM))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        leash = subprocess.Popen([*LEASH, str(child.pid)], stdin=subprocess.PIPE, start_new_session=True)
        code = child.wait()
        leash.kill()
        sys.exit(code if code >= 0 else 128 - code)

    @property
    def env(self) -> dict[str, str]:
        """The environment of a forked process, but for LATE."""
        return dict(self._env)

    def ask(self, request: Any, fds: Sequence[int] = ()) -> Any:
        with self._lock:
            if self._link is None:
                self._link = self._connect()
            socket.send_fds(self._link, [json.dumps(request).encode()], fds)
            answer = self._link.recv(_MESSAGE_BYTES)
        assert answer, "the zygote ended"
        return json.loads(answer)

    def close(self) -> None:
        """It ends when all have left; what it forked goes on."""
        if self._link is not None:
            self._link.close()

    def _connect(self) -> socket.socket:
        while True:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                link.connect(self._name)
                link.send(b"null")
                if link.recv(_MESSAGE_BYTES):  # else it was just ending
                    return link
            except OSError as error:
                if error.errno not in (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE):
                    raise
            link.close()
            assert self._process is None or self._process.poll() is None, "the zygote ended"
            self._start()

    def _start(self) -> None:
        """Unless another process does at this moment."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(self._name)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                return
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno()), *self._imports],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C is for pytest
            )


def _fixed(env: Mapping[str, str]) -> dict[str, str]:
    late = LATE | SET_BY_IMPORTS
    return {name: value for name, value in env.items() if name not in late and not name.startswith(OF_TESTS)}


class Forked:
    """A child of the zygote's, with what Service uses of ``subprocess.Popen``."""

    def __init__(self, zygote: Zygote, pid: int):
        self._zygote = zygote
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._zygote.ask(self.pid)
        return self.returncode

    def wait(self) -> int:
        if self.poll() is None:
            try:
                pidfd = linux.pidfd_open(self.pid)
            except ProcessLookupError:  # another thread's poll had the zygote reap it meanwhile
                return self.poll()
            try:
                select.select([pidfd], [], [])
            finally:
                os.close(pidfd)
        return self.poll()


# -- in the zygote -----------------------------------------------------------------------------------------------------


def _serve(listener: socket.socket) -> dict[str, Any]:
    """Fork and reap for those that connect until all have left. Returns in a child, with what that is to run."""
    codes: dict[int, int] = {}  # of children that were reaped
    links: list[socket.socket] = []
    while True:
        ready, _, _ = select.select([listener, *links], [], [])
        for link in ready:
            if link is listener:
                links.append(listener.accept()[0])
                continue
            message, fds, _, _ = _received(link)
            request = json.loads(message or "null")
            if not message:
                link.close()
                links.remove(link)
                if not links:
                    sys.exit()
            elif request is None:
                _answer(link, True)
            elif isinstance(request, int):
                _answer(link, _exit_code(request, codes))
            elif pid := os.fork():
                codes.pop(pid, None)  # of an earlier child that had this number
                for fd in fds:
                    os.close(fd)
            else:
                os.setsid()  # before it is known by its number, which is that of its group
                for number, fd in enumerate(fds, 1):
                    os.dup2(fd, number)
                    os.close(fd)
                _answer(link, os.getpid())
                for each in (listener, *links):
                    each.close()
                return request


def _received(link: socket.socket) -> tuple[bytes, list[int], int, Any]:
    try:
        return socket.recv_fds(link, _MESSAGE_BYTES, 2)
    except ConnectionResetError:  # it was killed
        return b"", [], 0, None


def _answer(link: socket.socket, answer: Any) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was killed: the next receipt tells
        link.send(json.dumps(answer).encode())


def _exit_code(pid: int, codes: dict[int, int]) -> int | None:
    """None while it runs. Two threads of the session may ask about one child."""
    if pid not in codes:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            return None
        codes[pid] = os.waitstatus_to_exitcode(status)
    return codes[pid]


def _enter_namespaces(pid: int) -> None:
    """Those of a process in another network; it sees the devices of that in files."""
    for kind in ("net", "mnt"):
        if os.readlink(path := f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"):
            with open(path) as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                    raise OSError(ctypes.get_errno(), "setns", path)


def _run(request: dict[str, Any]) -> None:
    if "beside" in request:
        _enter_namespaces(request["beside"])
    os.chdir(request["cwd"])
    _set_environ(request["env"])
    fork_instead_of_spawning()
    more = filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:1] = [request["cwd"], *(path for path in more if path not in sys.path[1:])]
    sys.argv = request["argv"]
    if request["script"]:
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    sys.modules.pop(sys.argv[0], None)  # it is run as a script, and what it imports is there
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _set_environ(environ: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)


def fork_instead_of_spawning() -> None:
    prepare, preparation_data = multiprocessing.spawn.prepare, multiprocessing.spawn.get_preparation_data

    def prepare_with_environ(data: dict[str, Any]) -> None:
        _set_environ(data.pop("environ"))
        _start_fork_server()  # of its own, while it has one thread
        prepare(data)

    def with_environ(name: str) -> dict[str, Any]:
        return {**preparation_data(name), "environ": dict(os.environ)}

    multiprocessing.spawn.prepare = prepare_with_environ
    multiprocessing.spawn.get_preparation_data = with_environ
    multiprocessing.context.SpawnProcess._Popen = staticmethod(multiprocessing.context.ForkServerProcess._Popen)
    _start_fork_server()


def import_engine(names: Sequence[str]) -> None:
    """What the processes forked from this one find."""
    gc.disable()  # next to nothing of what is imported is garbage
    for name in names:
        importlib.import_module(name)
    _import_and_describe_flags()
    _inspect_models_in_process()
    _override_kernels_once()
    _clear_loggers_once()
    _spin_briefly()
    _share_gloo_thread()
    gc.collect()
    gc.freeze()  # a child's collector does not touch, and so copy, what was made here
    gc.enable()


def _import_and_describe_flags() -> None:
    if engine := sys.modules.get("vllm.engine.arg_utils"):
        for name in OPTIONAL_IMPORTS:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        # What the parser needs to know of each class of flags is kept: a tenth of a start.
        engine.EngineArgs.add_cli_args(sys.modules["vllm.utils.argparse_utils"].FlexibleArgumentParser())


def _inspect_models_in_process() -> None:
    """For each kind of model that is not in its cache in the user's home, vLLM has a new interpreter import all of
    vLLM, so as not to initialize CUDA in the engine. Here there is no CUDA."""
    if registry := sys.modules.get("vllm.model_executor.models.registry"):
        registry._run_in_subprocess = lambda inspect: inspect()


def _override_kernels_once() -> None:
    """vLLM looks for the kernels that its CPU platform replaces in all modules: a fifth of a process's start."""
    platform = getattr(sys.modules.get("vllm.platforms"), "current_platform", None)
    if override := getattr(platform, "register_triton_kernel_overrides", None):  # older vLLM may have none
        override()
        type(platform).register_triton_kernel_overrides = staticmethod(lambda: None)


def _clear_loggers_once() -> None:
    """When vLLM configures logging, the caches of all loggers are cleared for each of them: as much again."""
    handle, manager = logging.config._handle_existing_loggers, logging.Manager

    def handle_existing(*args: Any) -> None:
        clear, manager._clear_cache = manager._clear_cache, lambda self: None
        try:
            handle(*args)
        finally:
            manager._clear_cache = clear
            logging.root.manager._clear_cache()

    logging.config._handle_existing_loggers = handle_existing


def _spin_briefly() -> None:
    """vLLM's workers spin for a second behind each message: on two cores all others wait for them."""
    broadcast = sys.modules.get("vllm.distributed.device_communicators.shm_broadcast")
    if spin := getattr(broadcast, "SpinCondition", None):  # older vLLM has none
        assert spin.__init__.__defaults__ == (1,)
        spin.__init__.__defaults__ = (0.002,)


def _share_gloo_thread() -> None:
    """Each of the thirteen process groups of a worker has a thread of its own that wakes a hundred times a second."""
    if distributed := sys.modules.get("torch.distributed.distributed_c10d"):
        gloo = distributed.ProcessGroupGloo
        create, device = gloo.__init__, functools.cache(gloo.create_default_device)

        def create_with_device(group: Any, store: Any, rank: int, size: int, timeout: Any) -> None:
            options = gloo._Options()
            options._devices, options._timeout = [device()], timeout
            create(group, store, rank, size, options)

        gloo.__init__ = create_with_device


def _start_fork_server() -> None:
    """multiprocessing's own, as a copy of this process instead of a new interpreter."""
    spawn = multiprocessing.util.spawnv_passfds

    def fork(path: bytes, args: Sequence[str], fds: Sequence[int]) -> int:
        if "forkserver" not in args[-1]:
            return spawn(path, args, fds)
        pid = os.fork()
        if pid:
            return pid
        try:
            multiprocessing.util.spawnv_passfds = spawn
            importlib.reload(multiprocessing.forkserver)  # whose lock is held here
            kept = [2, *sorted(fds), os.sysconf("SC_OPEN_MAX")]
            for below, above in itertools.pairwise(kept):
                os.closerange(below + 1, above)
            exec(args[-1], {})
        except SystemExit:
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)

    multiprocessing.util.spawnv_passfds = fork
    multiprocessing.forkserver.set_forkserver_preload([])
    multiprocessing.forkserver.ensure_running()
    multiprocessing.util.spawnv_passfds = spawn


if __name__ == "__main__":
    import_engine(sys.argv[2:])
    _run(_serve(socket.socket(fileno=int(sys.argv[1]))))
