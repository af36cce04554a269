"""Planting bugs: production code is replaced while a block runs, and is as before when it ends.

A bug is planted where the code is looked up: in a class, in a module, and in every other module that has imported the
name. Nothing of this can be reached from production code, and no bug is switched on by importing anything here.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.stores.file.platform import Disk, Platform


def original(owner: Any, name: str) -> Any:
    """Return an attribute of a class or module as it is there, be it private."""
    return vars(owner)[name]


@contextmanager
def changed(owner: Any, **attributes: Any) -> Iterator[None]:
    """Let an object, a class or a module have other attributes in this block."""
    before = {name: original(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def changed_everywhere(function: Callable[..., Any], wrong: Callable[..., Any]) -> Iterator[None]:
    """Let another function stand in for one, in every module of Penstock that has it."""
    name = function.__name__
    modules = [module for key, module in sorted(sys.modules.items()) if key.startswith("penstock.")]
    with ExitStack() as stack:
        for module in modules:
            if vars(module).get(name) is function:
                stack.enter_context(changed(module, **{name: wrong}))
        yield


@contextmanager
def forgotten(hook: Callable[[], None]) -> Iterator[None]:
    """Let a function do nothing that somebody else has registered, and thus holds by itself."""

    def nothing() -> None:
        """Do nothing."""

    before = hook.__code__
    hook.__code__ = nothing.__code__
    try:
        yield
    finally:
        hook.__code__ = before


class AnotherDisk:
    """A disk of which some operations are others."""

    def __init__(self, disk: Disk, **operations: Callable[..., Any]) -> None:
        self._disk = disk
        self._operations = operations

    def __getattr__(self, name: str) -> Any:
        return self._operations.get(name) or getattr(self._disk, name)


@contextmanager
def on_another_disk(user: Any, **operations: Callable[..., Any]) -> Iterator[None]:
    """Let what uses `user.disk` have other operations in this block."""
    disk = user.disk
    user.disk = AnotherDisk(disk, **operations)
    try:
        yield
    finally:
        user.disk = disk


def with_another_disk(platform: Platform, **operations: Callable[..., Any]) -> Platform:
    """Return a platform whose disk has other operations."""
    return replace(platform, disk=AnotherDisk(platform.disk, **operations))


def nothing(*_arguments: Any) -> None:
    """Stand in for an operation that is left out."""
