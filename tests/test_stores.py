from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from penstock import open_store
from penstock.errors import StoreUnavailable
from penstock.ports import Store
from penstock.settings import MemorySettings, Settings
from penstock.stores.memory import MemoryStore


def test_memory_opens_a_new_store_each_time() -> None:
    first, second = open_store("memory:"), open_store("memory:")
    assert isinstance(first, MemoryStore)
    assert isinstance(first, Store)
    assert first is not second


def test_the_settings_reach_the_store() -> None:
    store = open_store("memory:", settings=Settings(memory=MemorySettings(rows_max=7)))
    assert isinstance(store, MemoryStore)
    assert store._state.limits.rows_max == 7


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "needs a scheme, as in 'memory:'"),
        ("orders", "needs a scheme"),
        ("memroy:", "there is no store for 'memroy'; did you mean 'memory'"),
        ("memory:./data", "'memory:' takes nothing after it"),
        ("file:", "names no directory"),
        ("file://elsewhere/data", "names the host 'elsewhere'"),
        ("postgresql://db/events", "this version has no 'postgresql' store yet; it has 'file:', 'memory:'"),
        ("postgresql://u:secret@h/d", "no 'postgresql' store yet"),
    ],
)
def test_a_url_without_a_store_says_what_to_do(url: str, words: str) -> None:
    with pytest.raises(StoreUnavailable, match=words) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


def entry(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(*, group: str, name: str) -> list[EntryPoint]:
        found = EntryPoint(name="mine", value=value, group="penstock.stores")
        return [found] if (group, name) == (found.group, found.name) else []

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)


opened: list[str] = []


def open_mine(url: str, **options: Any) -> Store:
    opened.append(url)
    return MemoryStore(clock=options["clock"], limits=options["settings"].memory)


def test_a_store_of_another_distribution_is_found_by_its_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    entry(f"{__name__}:open_mine", monkeypatch)
    assert isinstance(open_store("mine://host"), MemoryStore)
    assert opened == ["mine://host"]


def test_a_store_whose_driver_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    entry("no_such_driver:open", monkeypatch)
    with pytest.raises(StoreUnavailable, match="cannot be imported: No module named 'no_such_driver'; install"):
        open_store("mine://host")
