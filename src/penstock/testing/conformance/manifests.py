"""The `Manifests` port: the first manifest of a batch wins, and what may be forgotten is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from penstock.errors import SinkConflict, UsageError
from penstock.rows import MANIFESTS_KEPT, Manifest
from penstock.testing.conformance.opening import StoreOpening

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.ports import Store


def a_manifest(batch: int, body: bytes = b"body", *, sink: str = "lake", query: str = "q") -> Manifest:
    """Return a manifest that is not done."""
    return Manifest(sink=sink, query=query, batch=batch, body=body)


def done(manifest: Manifest) -> Manifest:
    """Return it as it is remembered once it is finished."""
    return msgspec.structs.replace(manifest, done=True)


def run(store: Store, batches: Iterable[int], *, sink: str = "lake", query: str = "q") -> None:
    """Prepare and finish one batch after the other."""
    for batch in batches:
        store.manifests.prepare(a_manifest(batch, sink=sink, query=query))
        store.manifests.finish(sink, query, batch)


def remembered(store: Store, manifest: Manifest) -> bool:
    """Say whether a batch below the highest of the sink's query is remembered; ask with another body."""
    try:
        first = store.manifests.prepare(msgspec.structs.replace(manifest, body=b"another attempt"))
    except SinkConflict:
        return False
    assert first == done(manifest)
    return True


class ManifestsConformance(StoreOpening):
    """The `Manifests` port."""

    def test_the_first_manifest_of_a_batch_wins(self, store: Store) -> None:
        first = a_manifest(0, b"first")
        assert store.manifests.prepare(first) == first
        assert store.manifests.prepare(a_manifest(0, b"second")) == first
        assert store.manifests.unfinished() == [first]
        another = a_manifest(1, b"another batch")
        assert store.manifests.prepare(another) == another
        assert store.manifests.prepare(a_manifest(0, b"third")) == first

    def test_a_finished_manifest_stays_the_first_one(self, store: Store) -> None:
        store.manifests.prepare(a_manifest(0, b"first"))
        for _ in range(2):
            store.manifests.finish("lake", "q", 0)
            assert store.manifests.unfinished() == []
        assert store.manifests.prepare(a_manifest(0, b"second")) == done(a_manifest(0, b"first"))
        assert store.manifests.unfinished() == []

    def test_a_manifest_that_was_never_prepared_cannot_be_finished(self, store: Store) -> None:
        with pytest.raises(UsageError):
            store.manifests.finish("lake", "q", 0)

    def test_unfinished_manifests_come_oldest_first(self, store: Store) -> None:
        prepared = [
            a_manifest(7),
            a_manifest(3, sink="attic", query="r"),
            a_manifest(8),
            a_manifest(2, sink="cellar"),
        ]
        for manifest in prepared:
            store.manifests.prepare(manifest)
        store.manifests.finish("lake", "q", 8)
        assert store.manifests.unfinished() == [prepared[0], prepared[1], prepared[3]]

    def test_the_last_manifest_of_a_sink_is_that_of_its_highest_batch(self, store: Store) -> None:
        assert store.manifests.last("lake") is None
        for batch in (2, 9, 10, 9):
            store.manifests.prepare(a_manifest(batch))
        store.manifests.prepare(a_manifest(99, sink="attic"))
        assert store.manifests.last("lake") == a_manifest(10)
        store.manifests.finish("lake", "q", 10)
        assert store.manifests.last("lake") == done(a_manifest(10))

    # --- what is kept ---------------------------------------------------------------------------

    def test_of_what_is_done_the_newest_by_preparation_are_remembered(self, store: Store) -> None:
        manifests = [a_manifest(batch, b"%d" % batch) for batch in range(MANIFESTS_KEPT + 3)]
        for manifest in manifests[:-1]:
            store.manifests.prepare(manifest)
        for manifest in reversed(manifests[:-1]):
            store.manifests.finish("lake", "q", manifest.batch)
        store.manifests.prepare(manifests[-1])
        assert [remembered(store, manifest) for manifest in manifests[:4]] == [False, False, True, True]
        assert all(remembered(store, manifest) for manifest in manifests[4:-1])
        assert store.manifests.last("lake") == manifests[-1]
        with pytest.raises(UsageError):
            store.manifests.finish("lake", "q", 0)
        assert store.manifests.unfinished() == [manifests[-1]]

    def test_what_is_not_done_is_remembered_however_old(self, store: Store) -> None:
        old = a_manifest(0, b"old")
        store.manifests.prepare(old)
        run(store, range(1, MANIFESTS_KEPT + 3))
        assert store.manifests.unfinished() == [old]
        assert store.manifests.prepare(a_manifest(0, b"another attempt")) == old
        store.manifests.finish("lake", "q", 0)
        store.manifests.prepare(a_manifest(MANIFESTS_KEPT + 3))
        assert not remembered(store, old)

    def test_sinks_do_not_push_out_what_is_remembered_of_others(self, store: Store) -> None:
        run(store, [0, 1], sink="attic")
        run(store, range(MANIFESTS_KEPT + 2))
        assert remembered(store, a_manifest(0, sink="attic"))
        assert not remembered(store, a_manifest(0))

    # --- what is refused ------------------------------------------------------------------------

    def test_a_batch_below_the_highest_that_is_not_remembered_is_refused(self, store: Store) -> None:
        prepared = [a_manifest(batch, query="query-1") for batch in (17, 25)]
        for manifest in prepared:
            store.manifests.prepare(manifest)
        for adopt in (False, True):
            with pytest.raises(SinkConflict, match="new checkpoint") as refused:
                store.manifests.prepare(a_manifest(18, query="query-1"), adopt=adopt)
            assert all(text in str(refused.value) for text in ("'lake'", "query-1", "batch 18", "batch 25", "adopt"))
        assert store.manifests.unfinished() == prepared
        with pytest.raises(UsageError):
            store.manifests.finish("lake", "query-1", 18)
        higher = a_manifest(30, query="query-1")
        assert store.manifests.prepare(higher) == higher

    # --- who owns it ----------------------------------------------------------------------------

    def test_a_sink_belongs_to_its_first_query_until_another_adopts_it(self, store: Store) -> None:
        old, new = a_manifest(5, b"old"), a_manifest(0, b"new", query="r")
        store.manifests.prepare(old)
        with pytest.raises(SinkConflict):
            store.manifests.prepare(new)
        assert store.manifests.last("lake") == old
        assert store.manifests.prepare(new, adopt=True) == new
        assert store.manifests.last("lake") == new
        for batch in (5, 6):
            with pytest.raises(SinkConflict):
                store.manifests.prepare(a_manifest(batch))
        assert store.manifests.prepare(a_manifest(1, query="r")) == a_manifest(1, query="r")

    def test_what_a_former_owner_left_unfinished_can_be_finished(self, store: Store) -> None:
        left = a_manifest(5, b"left")
        store.manifests.prepare(left)
        store.manifests.prepare(a_manifest(0, query="r"), adopt=True)
        run(store, range(1, MANIFESTS_KEPT + 2), query="r")
        assert store.manifests.unfinished() == [left, a_manifest(0, query="r")]
        store.manifests.finish("lake", "q", 5)
        assert store.manifests.unfinished() == [a_manifest(0, query="r")]
        with pytest.raises(SinkConflict):
            store.manifests.prepare(left)

    def test_a_query_that_adopts_its_sink_back_is_judged_by_what_is_remembered_of_it(self, store: Store) -> None:
        run(store, [3, 4])
        store.manifests.prepare(a_manifest(0, query="r"), adopt=True)
        store.manifests.finish("lake", "r", 0)
        run(store, range(1, MANIFESTS_KEPT), query="r")
        # Of both queries together one too many was done when the last one was prepared.
        with pytest.raises(SinkConflict):
            store.manifests.prepare(a_manifest(3), adopt=True)
        # That was refused, so the sink did not change hands.
        with pytest.raises(SinkConflict):
            store.manifests.prepare(a_manifest(4))
        last = a_manifest(MANIFESTS_KEPT - 1, query="r")
        assert store.manifests.last("lake") == done(last)
        assert store.manifests.prepare(last) == done(last)
        assert store.manifests.prepare(a_manifest(4, b"another attempt"), adopt=True) == done(a_manifest(4))
        assert store.manifests.last("lake") == done(a_manifest(4))
        assert store.manifests.prepare(a_manifest(5)) == a_manifest(5)

    # --- forgetting a sink ----------------------------------------------------------------------

    def test_a_sink_that_is_forgotten_is_free_for_any_query_and_batch(self, store: Store) -> None:
        run(store, [5, 6])
        run(store, [7], sink="lake2")
        store.manifests.prepare(a_manifest(0, query="r"), adopt=True)
        store.manifests.finish("lake", "r", 0)
        for _ in range(2):
            store.manifests.forget("lake")
            assert store.manifests.last("lake") is None
        with pytest.raises(UsageError):
            store.manifests.finish("lake", "q", 6)
        anew = a_manifest(5, b"anew")
        assert store.manifests.prepare(anew) == anew
        assert store.manifests.unfinished() == [anew]
        assert store.manifests.last("lake2") == done(a_manifest(7, sink="lake2"))
        with pytest.raises(SinkConflict):
            store.manifests.prepare(a_manifest(8, sink="lake2", query="r"))

    def test_a_sink_with_an_unfinished_manifest_is_not_forgotten(self, store: Store) -> None:
        run(store, [4])
        store.manifests.prepare(a_manifest(5))
        store.manifests.prepare(a_manifest(0, query="r"), adopt=True)
        store.manifests.finish("lake", "r", 0)
        with pytest.raises(UsageError, match="batch 5"):
            store.manifests.forget("lake")
        assert store.manifests.unfinished() == [a_manifest(5)]
        assert store.manifests.last("lake") == done(a_manifest(0, query="r"))
        with pytest.raises(SinkConflict):
            store.manifests.prepare(a_manifest(4))
        assert store.manifests.prepare(a_manifest(4, b"another attempt"), adopt=True) == done(a_manifest(4))
        store.manifests.finish("lake", "q", 5)
        store.manifests.forget("lake")
        assert store.manifests.last("lake") is None

    def test_a_sink_that_is_not_there_can_be_forgotten(self, store: Store) -> None:
        store.manifests.forget("lake")
        assert store.manifests.last("lake") is None
