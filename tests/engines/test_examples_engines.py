"""The examples as they stand, each in a process of its own with the model that ships with the project.

With ``-m slow``: one of them with ``--quick`` in half a minute on two idle cores, then all of them whole.
"""

import os
import subprocess
import sys

import pytest
from model_shapes import GPUS

ENDS = {
    "agent_loop": "agents found what their last turns had left",
    "dp_sharing": "with sharing every document was computed once",
    "move_conversation": "Every continuation equals A's answer",
}


def play(root, name: str, *words: str) -> str:
    """Its output, wide enough that no table is cut."""
    gpus = ["--gpus", ",".join(map(str, GPUS))] if GPUS else []
    command = [sys.executable, str(root / "examples" / f"{name}.py"), *gpus, *words]
    done = subprocess.run(
        command, env={**os.environ, "COLUMNS": "160"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=560,
    )  # fmt: skip
    assert done.returncode == 0 and ENDS[name] in done.stdout, done.stdout
    return done.stdout


@pytest.mark.slow
def test_agent_loop_example_reloads_conversations(root):
    """Two of them, without the plain engine."""
    said = play(root, "agent_loop", "--quick")
    assert "6a*" in said and "7b" in said, said


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ENDS))
def test_example_runs_to_its_end(root, name):
    play(root, name)
