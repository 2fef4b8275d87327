"""Real engines for the tests of this level: shared by a session's tests where they can be, else one by one.

A start takes about 25 s on two cores, and two started together not much more.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from vllm_kvtier.devtools.engines import Engine, kvtier, proxy
from vllm_kvtier.devtools.processes import Service, free_port, kill_all, start_all


class Pair(NamedTuple):
    """A prefill and a decode engine with the connector."""

    prefill: Engine
    decode: Engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/engines/" in str(item.path):
            item.add_marker(pytest.mark.engine)
            # Starting engines counts as part of the first test that uses them.
            item.add_marker(pytest.mark.timeout(600), append=False)


@pytest.fixture(scope="session")
def log_dir(tmp_path_factory):
    """Where this session's engines log; pytest keeps the last three sessions' directories."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture
def make_engine(model_path, log_dir, request) -> Iterator[Callable[..., Engine]]:
    """Makes engines of this test's own, not started; they are killed when the test ends, whatever it did.

    Options as Engine's; ``extra`` is short for ``kv=kvtier(extra)`` on a fixed free port.
    """
    made: list[Engine] = []

    def make(name: str = "engine", extra: dict | None = None, **options) -> Engine:
        if extra is not None:
            options["kv"] = kvtier({"endpoint_port": free_port(), **extra})
        name = f"{request.node.name}-{name}".replace("/", "_")
        made.append(Engine(options.pop("model", model_path), name=name, log_dir=log_dir, **options))
        return made[-1]

    yield make
    kill_all(made)


@pytest.fixture
def make_proxy(log_dir, request) -> Iterator[Callable[..., Service]]:
    """Makes proxies over engines, not started; they are killed when the test ends."""
    made: list[Service] = []

    def make(prefill: list[Engine], decode: list[Engine], name: str = "proxy", **options) -> Service:
        name = f"{request.node.name}-{name}".replace("/", "_")
        made.append(proxy(prefill, decode, name=name, log_dir=log_dir, **options))
        return made[-1]

    yield make
    kill_all(made)


@pytest.fixture(scope="session")
def single(model_path, log_dir) -> Iterator[Engine]:
    """A plain engine without a connector: what it answers greedily is right."""
    with Engine(model_path, name="single", log_dir=log_dir) as engine:
        yield engine


@pytest.fixture(scope="session")
def pair(model_path, log_dir) -> Iterator[Pair]:
    """P and D with bidirectional pulls and no threshold, for tests that leave them as they found them."""
    engines = []
    for name in ("P", "D"):
        extra = {"bidirectional": True, "pull_threshold": 1, "endpoint_port": free_port()}
        engines.append(Engine(model_path, name=f"pair-{name}", kv=kvtier(extra), log_dir=log_dir))
    start_all(engines)
    yield Pair(*engines)
    kill_all(engines)
