"""`Leases`: one owner at a time, by the monotonic clock, and epochs that never come again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.clock import VirtualClock
from penstock.errors import LeaseLost, UsageError
from penstock.ports import Store
from penstock.rows import Fence, Lease
from penstock.testing.conformance.builders import acquired
from penstock.testing.conformance.opening import StoreOpening

if TYPE_CHECKING:
    from collections.abc import Callable


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

    def test_some_are_acquired_of_those_that_nobody_holds(self, store: Store, clock: VirtualClock) -> None:
        above = acquired(store, "process/1", "p", 100)
        names = [f"slot/{number}" for number in range(6)]
        acquired(store, "slot/1", "b", 100)
        mine = acquired(store, "slot/2", "a", under=above)
        expired = acquired(store, "slot/3", "b", 5)
        clock.advance(6)
        some = store.leases.acquire_some([*names[:1], *names], "a", 3, under=above)
        assert [lease.name for lease in some] == ["slot/0", "slot/3", "slot/4"]
        assert [lease.clean for lease in some] == [True, False, True]
        assert {lease.under for lease in some} == {above.fence}
        assert some[1].epoch > expired.epoch
        assert [store.leases.holder(lease.name) for lease in some] == some
        assert store.leases.holder("slot/2") == mine
        assert [lease.name for lease in store.leases.acquire_some(names, "c", 10, under=above)] == ["slot/5"]
        assert store.leases.acquire_some(names, "c", 10, under=above) == []
        assert store.leases.acquire_some([], "c", 10, under=above) == []

    def test_some_are_not_acquired_under_a_lease_that_is_lost(self, store: Store) -> None:
        above = acquired(store, "process/1", "p")
        acquired(store, "process/1", "p")
        with pytest.raises(LeaseLost):
            store.leases.acquire_some(["slot/1"], "a", 1, under=above)
        assert store.leases.holder("slot/1") is None

    def test_some_are_not_acquired_under_one_that_is_under_another(self, store: Store) -> None:
        above = acquired(store, "process/1", "p")
        below = acquired(store, "shard", "a", under=above)
        with pytest.raises(UsageError):
            store.leases.acquire_some(["slot/1"], "a", 1, under=below)
        with pytest.raises(UsageError):
            store.leases.acquire_some(["slot/1", "process/1"], "a", 2, under=above)
        assert store.leases.held("slot/") == []

    def test_those_that_are_held_are_found_by_the_beginning_of_their_names(
        self, store: Store, clock: VirtualClock
    ) -> None:
        above = acquired(store, "process/1", "p", 10)
        held = [acquired(store, f"slot/{number}", "a", under=above) for number in (2, 0)]
        acquired(store, "slot/1", "b", 5)
        store.leases.release(acquired(store, "slot/3", "b", 5))
        acquired(store, "slots", "b", 5)
        assert [lease.name for lease in store.leases.held("slot/")] == ["slot/0", "slot/1", "slot/2"]
        clock.advance(6)
        assert store.leases.held("slot/") == sorted(held)
        assert store.leases.held("other") == []
        clock.advance(6)
        assert store.leases.held("") == []

    def test_the_revision_changes_with_acquisitions_and_releases_alone(self, store: Store, clock: VirtualClock) -> None:
        seen = [store.leases.revision()]

        def changed() -> bool:
            seen.append(store.leases.revision())
            return seen[-1] not in seen[:-1]

        above = acquired(store, "process/1", "p", 10)
        assert changed()
        lease = acquired(store, "lease", "a", under=above)
        assert changed()
        assert len(store.leases.acquire_some(["slot/1", "slot/2"], "a", 2, under=above)) == 2
        assert changed()
        store.leases.release(lease)
        assert changed()
        store.leases.renew([above], 20)
        assert store.leases.acquire("slot/1", "b", 10) is None
        assert store.leases.acquire_some(["slot/1"], "b", 1, under=above) == []
        clock.advance(30)
        assert store.leases.held("") == []
        assert not changed()

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

    def test_many_leases_are_released_in_one_step_as_far_as_they_are_held(
        self, store: Store, clock: VirtualClock
    ) -> None:
        above = acquired(store, "process", "p", 10)
        kept = acquired(store, "kept", "a", under=above)
        expired, taken = acquired(store, "expired", "a", 5), acquired(store, "taken", "a", 5)
        clock.advance(6)
        acquired(store, "taken", "b", 10)
        some = [kept, taken, expired, kept]
        before = store.leases.revision()
        assert store.leases.release_some(some, clean=True) == [kept, expired]
        assert store.leases.revision() != before
        assert [store.leases.holder(name) is None for name in ("kept", "expired", "taken")] == [True, True, False]
        assert acquired(store, "kept", "b").clean
        unchanged = store.leases.revision()
        assert store.leases.release_some([taken, expired]) == store.leases.release_some([]) == []
        assert store.leases.revision() == unchanged
        assert store.leases.release_some([acquired(store, "expired", "c")], clean=False) != []
        assert not acquired(store, "expired", "d").clean

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

    def test_no_two_acquisitions_have_the_same_epoch_whatever_their_leases(self, store: Store) -> None:
        above = acquired(store, "process/1", "p", 10)
        epochs = [above.epoch]
        for name in ("one", "two", "one", "three"):
            lease = acquired(store, name, "a", under=above)
            epochs.append(lease.epoch)
            store.leases.release(lease, clean=name != "two")
        epochs += [lease.epoch for lease in store.leases.acquire_some(["one", "two", "four"], "b", 3, under=above)]
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

    # --- leases under others -------------------------------------------------------------------

    def test_a_lease_under_another_is_held_for_as_long_as_that_one(self, store: Store, clock: VirtualClock) -> None:
        above = acquired(store, "process/1", "p", 10)
        below = [acquired(store, name, "a", 0, under=above) for name in ("one", "two")]
        assert [lease.under for lease in below] == [above.fence] * 2
        assert above.under is None
        for _ in range(5):
            clock.advance(9)
            [renewed] = store.leases.renew([above], 10)
            for lease in below:
                assert store.leases.acquire(lease.name, "b", 10) is None
                assert store.leases.holder(lease.name) == lease._replace(expires_at=renewed.expires_at)
        clock.advance(11)
        assert [store.leases.holder(lease.name) for lease in below] == [None, None]
        assert store.leases.renew(below, 10) == []
        taken = acquired(store, "one", "b")
        assert (taken.clean, taken.under, taken.epoch > below[0].epoch) == (False, None, True)
        assert store.leases.holder("one") == taken

    def test_a_lease_above_that_is_not_held_with_its_epoch_any_more_frees_those_under_it(
        self, store: Store, clock: VirtualClock
    ) -> None:
        def expire(_: Lease) -> None:
            clock.advance(11)

        def take_over(_: Lease) -> None:
            clock.advance(11)
            acquired(store, "process/1", "another", 1_000)

        def acquire_again(lease: Lease) -> None:
            acquired(store, lease.name, lease.owner, 1_000)

        ends: list[Callable[[Lease], None]] = [store.leases.release, expire, take_over, acquire_again]
        for end in ends:
            clock.advance(2_000)
            above = acquired(store, "process/1", "p", 10)
            below = acquired(store, "shard", "a", 1_000, under=above)
            end(above)
            assert store.leases.holder("shard") is None, end
            assert store.leases.renew([below], 1_000) == [], end
            with pytest.raises(LeaseLost):
                store.leases.acquire("shard", "a", 10, under=above)
            with pytest.raises(LeaseLost):
                store.leases.acquire("never acquired", "a", 10, under=above)
            assert store.leases.holder("never acquired") is None
            taken = acquired(store, "shard", "b", 10)
            assert not taken.clean, end
            assert taken.epoch > below.epoch

    def test_renewing_a_lease_under_another_changes_nothing(self, store: Store, clock: VirtualClock) -> None:
        above = acquired(store, "process/1", "p", 10)
        below = acquired(store, "shard", "a", 1_000, under=above)
        assert store.leases.renew([below], 1_000) == [below]
        clock.advance(11)
        assert store.leases.holder("shard") is None
        above = acquired(store, "process/1", "p", 10)
        assert store.leases.renew([below], 1_000) == []

    def test_a_lease_under_another_is_released_by_itself(self, store: Store) -> None:
        above = acquired(store, "process/1", "p", 10)
        for clean in (True, False):
            below = acquired(store, "shard", "a", under=above)
            assert store.leases.acquire("shard", "b", 10, under=above) is None  # under the same, and yet another owner
            store.leases.release(below, clean=clean)
            assert store.leases.holder("shard") is None
            assert acquired(store, "shard", "b", under=above).clean is clean
            store.leases.release(acquired(store, "shard", "b", under=above))
            with pytest.raises(LeaseLost):
                store.leases.release(below)
        assert store.leases.holder("process/1") == above

    def test_an_owner_may_move_its_lease_under_another_one_and_out_again(
        self, store: Store, clock: VirtualClock
    ) -> None:
        first, second = (acquired(store, f"process/{name}", "p", seconds) for name, seconds in ((1, 10), (2, 20)))
        leases = [acquired(store, "shard", "a", 5)]
        leases += [acquired(store, "shard", "a", under=above) for above in (first, second)]
        assert [lease.epoch for lease in leases] == sorted({lease.epoch for lease in leases})
        assert store.leases.renew(leases, 5) == [leases[-1]]
        clock.advance(11)  # the first is gone
        assert store.leases.holder("shard") == leases[-1]
        own = acquired(store, "shard", "a", 5)
        store.leases.release(second)
        assert store.leases.holder("shard") == own
        clock.advance(6)
        assert store.leases.holder("shard") is None

    def test_a_lease_can_be_under_those_alone_that_expire_by_themselves(self, store: Store) -> None:
        above = acquired(store, "process/1", "p", 10)
        below = acquired(store, "shard", "a", under=above)
        for name, under in (("more", below), ("process/1", above)):
            with pytest.raises(UsageError):
                store.leases.acquire(name, "p", 10, under=under)
        assert store.leases.holder("process/1") == above
        assert store.leases.holder("more") is None

    def test_names_of_owners_and_leases_may_hold_anything(self, store: Store) -> None:
        for odd in ('["a", "process/1"]', "a,b", 'a"', "a\0b", "grüße/1", "-1"):
            above = acquired(store, f"process/{odd}", odd, 10)
            below = acquired(store, f"shard/{odd}", odd, under=above)
            assert store.leases.holder(below.name) == below
            assert store.leases.acquire(below.name, f"{odd}!", 10) is None
