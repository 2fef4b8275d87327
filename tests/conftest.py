"""What every level of the tests shares."""

import gc
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from vllm_kvtier import logs
from vllm_kvtier.devtools.processes import Service

pytest_plugins = ["engine_fixtures", "node_fixtures"]

ROOT = Path(__file__).parents[1]
os.environ.pop("KUBERNETES_SERVICE_HOST", None)  # a pod's disk tiers leave a fifth of a disk free, however full it is
os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # of servers: a crash in native code leaves its stacks in the log

# The machines that run these tests are small and shared: a slow example is no failure. KVTIER_EXAMPLES=2000
# searches longer than a normal run.
settings.register_profile(
    "kvtier",
    deadline=None,
    max_examples=int(os.environ.get("KVTIER_EXAMPLES", "100")),
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("kvtier")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A failure says which servers have ended by then, and their last words: a client sees a refused connection."""
    report = yield
    if report.failed:
        for service in gc.get_objects():
            if issubclass(type(service), Service) and service.ended is not None:
                title = f"{service.name} ended with code {service.ended}"
                report.sections.append((title, service.log_tail(25)))
    return report


@pytest.fixture(scope="session")
def root() -> Path:
    """The source tree."""
    return ROOT


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model that ships with the project."""
    return ROOT / "models" / "recall-6m"


@pytest.fixture
def run_dir(monkeypatch) -> Iterator[Path]:
    """XDG_RUNTIME_DIR of this test alone. Its path is short, as sockets' paths must be; ``tmp_path`` may not be."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


@pytest.fixture(params=["tcp", "unix"])
def way(request, run_dir, monkeypatch) -> str:
    """How ``endpoint_support``'s askers reach the source "source/1": over TCP, or as engines of one node do."""
    import endpoint_support

    if request.param == "unix":
        monkeypatch.setattr(endpoint_support.Asker, "near", "source/1")
    return request.param


def pytest_collectstart() -> None:
    gc.disable()  # it would look again and again at a million objects of imported modules, which all stay


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_runtest_setup() -> None:
    logs.LIMIT.clear()  # the limit of repeated messages must not carry over to the next test
    logging.getLogger("vllm").propagate = True  # to caplog; vLLM turns it off when it is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/engines/" in str(item.path) or item.path.name.startswith("test_engines_"):
            item.add_marker(pytest.mark.engine)
            if item.get_closest_marker("timeout") is None:
                # Starting engines counts as part of the first test that uses them.
                item.add_marker(pytest.mark.timeout(600))
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch  # only if a test needs a device, because it takes seconds

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
