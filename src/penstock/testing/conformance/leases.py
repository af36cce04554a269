"""`Leases`: one owner at a time, by the monotonic clock, and epochs that never come again."""

from __future__ import annotations

import pytest

from penstock.clock import VirtualClock
from penstock.errors import LeaseLost
from penstock.ports import Store
from penstock.rows import Fence
from penstock.testing.conformance.builders import acquired
from penstock.testing.conformance.opening import StoreOpening


class LeasesConformance(StoreOpening):
    """The `Leases` port."""

    def test_a_lease_has_one_owner(self, store: Store) -> None:
        lease = acquired(store, owner="a")
        assert store.leases.acquire("lease", "b", 10) is None
        assert store.leases.holder("lease") == lease
        assert lease.fence == Fence("lease", lease.epoch)

    def test_leases_of_other_names_are_others(self, store: Store) -> None:
        acquired(store, "lease", "a")
        other = acquired(store, "another", "b")
        assert store.leases.holder("another") == other
        assert store.leases.holder("a third") is None

    def test_an_expired_lease_is_free(self, store: Store, clock: VirtualClock) -> None:
        first = acquired(store, owner="a", seconds=10)
        clock.advance(9)
        assert store.leases.acquire("lease", "b", 10) is None
        clock.advance(2)
        assert store.leases.holder("lease") is None
        second = acquired(store, owner="b", seconds=10)
        assert second.epoch > first.epoch

    def test_a_jump_of_the_wall_clock_expires_nothing_and_prolongs_nothing(
        self, store: Store, clock: VirtualClock
    ) -> None:
        lease = acquired(store, owner="a", seconds=10)
        clock.jump_wall(3600)
        assert store.leases.holder("lease") == lease
        assert store.leases.acquire("lease", "b", 10) is None
        clock.jump_wall(-7200)
        clock.advance(11)
        assert store.leases.holder("lease") is None
        acquired(store, owner="b")

    def test_its_owner_may_acquire_it_again_with_a_higher_epoch(self, store: Store, clock: VirtualClock) -> None:
        first = acquired(store, owner="a", seconds=10)
        clock.advance(5)
        second = acquired(store, owner="a", seconds=10)
        assert second.epoch > first.epoch
        assert second.expires_at > first.expires_at
        assert store.leases.holder("lease") == second
        assert store.leases.renew([first], 10) == []

    def test_renewing_prolongs_what_is_held(self, store: Store, clock: VirtualClock) -> None:
        leases = [acquired(store, name, "a", 10) for name in ("one", "two")]
        clock.advance(9)
        renewed = store.leases.renew(leases, 10)
        assert {lease.fence for lease in renewed} == {lease.fence for lease in leases}
        assert all(lease.expires_at > leases[0].expires_at for lease in renewed)
        clock.advance(9)
        assert [store.leases.acquire(name, "b", 10) for name in ("one", "two")] == [None, None]
        clock.advance(2)
        assert store.leases.holder("one") is None

    def test_renewing_returns_only_what_is_still_held(self, store: Store, clock: VirtualClock) -> None:
        expired = acquired(store, "expired", "a", 1)
        taken = acquired(store, "taken", "a", 1)
        released = acquired(store, "released", "a", 10)
        kept = acquired(store, "kept", "a", 10)
        clock.advance(2)
        acquired(store, "taken", "b", 10)
        store.leases.release(released)
        renewed = store.leases.renew([expired, taken, released, kept], 10)
        assert [lease.fence for lease in renewed] == [kept.fence]
        # What was lost stays lost: renewing must not bring it back.
        holders = [store.leases.holder(name) for name in ("expired", "taken", "released")]
        assert [lease and lease.owner for lease in holders] == [None, "b", None]

    def test_the_next_owner_sees_whether_a_lease_was_released_cleanly(self, store: Store) -> None:
        for clean in (True, False, True):
            store.leases.release(acquired(store, owner="a"), clean=clean)
            assert store.leases.holder("lease") is None
            lease = acquired(store, owner="b")
            assert lease.clean is clean
            store.leases.release(lease)

    def test_a_lease_that_was_not_released_is_not_clean(self, store: Store, clock: VirtualClock) -> None:
        assert acquired(store, owner="a", seconds=10).clean  # nobody was there before
        assert not acquired(store, owner="a", seconds=10).clean
        clock.advance(11)
        assert not acquired(store, owner="b").clean

    def test_a_clean_release_does_not_excuse_a_later_unclean_end(self, store: Store, clock: VirtualClock) -> None:
        store.leases.release(acquired(store, owner="a"))
        lease = acquired(store, owner="b", seconds=10)
        assert lease.clean
        store.leases.renew([lease], 10)
        clock.advance(11)
        assert not acquired(store, owner="c").clean

    def test_epochs_never_come_again(self, store: Store, clock: VirtualClock) -> None:
        epochs = []
        for owner in ("a", "b", "a", "c"):
            lease = acquired(store, owner=owner, seconds=10)
            epochs.append(lease.epoch)
            if owner == "a":
                store.leases.release(lease)
            else:
                clock.advance(11)
        assert epochs == sorted(set(epochs))

    def test_releasing_what_somebody_else_has_by_now_is_an_error_and_takes_nothing(
        self, store: Store, clock: VirtualClock
    ) -> None:
        old = acquired(store, owner="a", seconds=10)
        clock.advance(11)
        new = acquired(store, owner="b")
        with pytest.raises(LeaseLost):
            store.leases.release(old)
        assert store.leases.holder("lease") == new
        store.leases.release(new)
        with pytest.raises(LeaseLost):
            store.leases.release(new)
