"""Telling: what those who have a store open say to each other. A store need not be able to."""

from __future__ import annotations

import pytest

from penstock.clock import VirtualClock
from penstock.errors import StoreClosed, UsageError
from penstock.ports import Store, Telling
from penstock.rows import TELLERS_MAX, TOLD_BYTES_MAX, Told
from penstock.testing.conformance.opening import StoreOpening


def telling_of(store: Store) -> Telling:
    """Return the store as one that can tell, or skip the test."""
    if not isinstance(store, Telling):
        pytest.skip("telling: `Telling`, which this store cannot do")
    return store


class TellingConformance(StoreOpening):
    """See `Telling`."""

    def test_what_was_told_last_is_heard_with_its_time(self, store: Store, clock: VirtualClock) -> None:
        telling = telling_of(store)
        assert telling.told() == []
        telling.tell("b", b"first")
        began = clock.time_us()
        clock.advance(3)
        telling.tell("a", b"other")
        assert telling.told() == [Told("a", began + 3_000_000, b"other"), Told("b", began, b"first")]
        telling.tell("b", b"")
        telling.tell("a", b"short")
        assert [told[::2] for told in telling.told()] == [("a", b"short")]

    def test_whoever_has_nothing_to_tell_is_not_heard(self, store: Store) -> None:
        telling = telling_of(store)
        telling.tell("a", b"")
        telling.tell("b", b"something")
        telling.tell("b", b"")
        telling.tell("b", b"")
        assert telling.told() == []

    def test_too_much_is_refused_and_changes_nothing(self, store: Store) -> None:
        telling = telling_of(store)
        telling.tell("a", b"before")
        with pytest.raises(UsageError):
            telling.tell("a", b"x" * (TOLD_BYTES_MAX + 1))
        assert [told.document for told in telling.told()] == [b"before"]
        telling.tell("a", b"x" * TOLD_BYTES_MAX)
        for number in range(1, TELLERS_MAX):
            telling.tell(f"b{number}", b"x")
        with pytest.raises(UsageError):
            telling.tell("c", b"x")
        telling.tell("c", b"")
        telling.tell("a", b"after")
        assert [told.document for told in telling.told()] == [b"after"] + [b"x"] * (TELLERS_MAX - 1)

    def test_a_closed_store_tells_nothing(self, store: Store) -> None:
        telling = telling_of(store)
        telling.tell("a", b"x")
        store.close()
        with pytest.raises(StoreClosed):
            telling.tell("a", b"y")
        with pytest.raises(StoreClosed):
            telling.told()

    def test_nothing_of_it_is_there_when_the_store_is_opened_again(self, store: Store, clock: VirtualClock) -> None:
        telling = telling_of(store)
        if not store.capabilities.durable:
            pytest.skip("opening again: capability `durable`, which this store does not declare")
        telling.tell("a", b"x")
        store.close()
        again = self.reopen(store, clock)
        assert isinstance(again, Telling)
        assert again.told() == []
        again.close()
