"""The functions that the tests of internal errors name exist: a renamed one would be neither reached nor left out."""

from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest
from raising_names import KNOWN, LEFT_OUT, LOADS

import vllm_kvtier

PACKAGE = Path(vllm_kvtier.__file__).parent


@pytest.mark.parametrize("where", sorted(LEFT_OUT | KNOWN))
def test_internal_error_test_names_exist(where):
    file, _, name = where.partition(":")
    assert (PACKAGE / file).is_file()
    if name:
        attrgetter(name.partition(".<locals>")[0])(import_module(f"vllm_kvtier.{file[:-3].replace('/', '.')}"))


@pytest.mark.parametrize("path", LOADS)
def test_internal_error_test_paths_exist(path):
    file, _, name = path.partition(":")
    assert (PACKAGE / file).exists()
    if name:
        attrgetter(name)(import_module(f"vllm_kvtier.{file[:-3].replace('/', '.')}"))
