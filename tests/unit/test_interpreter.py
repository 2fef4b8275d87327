"""Python's switch interval: short while vLLM launches a step, as it was while it schedules one."""

import sys

import pytest

from vllm_kvtier.vllm_compat.hooks.interpreter import SwitchInterval


@pytest.fixture(autouse=True)
def as_python_sets_it(monkeypatch):
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    monkeypatch.setattr(SwitchInterval, "own", 0.005)
    monkeypatch.setattr(SwitchInterval, "short", 0.005)
    yield
    sys.setswitchinterval(before)


def test_switch_interval_is_only_lowered():
    for seconds, after in ((0.0, 0.005), (0.0005, 0.0005), (0.002, 0.0005), (0.0, 0.0005)):
        SwitchInterval.lower(seconds)
        assert sys.getswitchinterval() == pytest.approx(after), seconds
