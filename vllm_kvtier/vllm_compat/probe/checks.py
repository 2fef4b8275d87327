"""Single checks of the probe: by name, by signature, by fields, by trying. Each raises Unmet with the reason."""

import dataclasses
import dis
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any


class Unmet(Exception):
    """vLLM does not have what a row needs."""


class NotHere(Unmet):
    """The row's subject is not installed on this machine or does not work in this version, and need not."""


def find(path: str) -> Any:
    """The object at "module:Outer.name", or the module."""
    module, _, qualified = path.partition(":")
    try:
        found = importlib.import_module(module)
    except Exception as error:  # another version's module may raise anything on import
        raise Unmet(f"{module} cannot be imported ({type(error).__name__}: {error})") from error
    for name in qualified.split(".") if qualified else ():
        try:
            found = getattr(found, name)
        except (AttributeError, NameError):  # of vllm.envs' own __getattr__
            raise Unmet(f"{path.replace(':', '.')} is missing") from None
    return found


def takes(path: str, positional: int, keywords: Iterable[str]) -> None:
    """Check that a function takes this many positional arguments (``self`` counts) and these keyword arguments."""
    function = find(path)
    try:
        signature = inspect.signature(function)
        signature.bind(*[None] * positional, **dict.fromkeys(keywords))
    except (TypeError, ValueError) as error:
        raise Unmet(f"{path.partition(':')[2]}{_shown(function)} has another signature ({error})") from None


def has_fields(owner: str, names: Iterable[str]) -> None:
    """Check that a class declares these fields, properties or methods, or sets such attributes in its constructor."""
    found = find(owner)
    for name in names:
        if not (name in declared(found) or hasattr(found, name) or name in _assigned(found)):
            raise Unmet(f"{owner.partition(':')[2]}.{name} is missing")


def declared(owner: type) -> set[str]:
    if dataclasses.is_dataclass(owner):
        return {field.name for field in dataclasses.fields(owner)}
    return set(getattr(owner, "__struct_fields__", ())) | set(getattr(owner, "model_fields", ()))


def sets(owner: str, names: Iterable[str]) -> None:
    """Check that the constructor of a class or of its bases assigns these attributes."""
    found = find(owner)
    for name in names:
        if name not in _assigned(found):
            raise Unmet(f"{owner.partition(':')[2]}.__init__ sets no {name}")


def trial(attempt: Callable[[], None]) -> None:
    try:
        attempt()
    except Unmet:
        raise
    except Exception as error:
        raise Unmet(f"{type(error).__name__}: {error}") from error


def expect(condition: object, words: str) -> None:
    if not condition:
        raise Unmet(words)


def uses(function: str, name: str) -> None:
    """Check that a function's own code uses a name."""
    code = inspect.unwrap(find(function)).__code__
    expect(name in code.co_names, f"{function.partition(':')[2]} does not use {name}")


@functools.cache
def _assigned(owner: type) -> frozenset[str]:
    makers = ("__init__", "__post_init__")
    codes = (inspect.unwrap(vars(each)[name]) for each in owner.__mro__ for name in makers if name in vars(each))
    return frozenset(
        step.argval
        for each in codes
        if hasattr(each, "__code__")
        for step in dis.get_instructions(each.__code__)
        if step.opname == "STORE_ATTR"
    )


def clear() -> None:
    """Classes may have changed."""
    _assigned.cache_clear()


def _shown(function: Any) -> str:
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return "()"
