"""Redrive: dead letters chosen by SQL or by their cause, looked at first, and then brought back.

It has two steps, and the time between them is the user's. ::

    job = preview_redrive(spark, bus, orders, "billing", where="error_type = 'TimeoutError'")
    print(job.planned, job.groups)
    job.run(rate=500)                     # or, from anywhere and at any time: redrive(bus, job.id, rate=500)

What it promises:

* **The run brings back what the preview has shown, and nothing else.** The preview marks the letters that it has
  found, each by its position, with the id of a new job. What dies later is not marked, whatever the filter says.
* **Each is brought back once, to the subscription that gave it up.** The mark is taken away in the transaction that
  brings the letter back. So a run that was stopped or killed at any moment is repeated, and brings back the rest; two
  at once share the work; and a letter that dies again is not of the job any more.
* **A letter is of the last job that has marked it.** The run of an earlier one finds fewer than it had planned, and
  says so. The same goes for letters that were removed, or brought back by hand.
* **Nobody has to wait long.** Letters are marked and brought back in portions, each a short transaction.

How many were planned is part of the job's id: every mark carries that, and there is nothing beside it that could be
lost. Bringing back needs no Spark: it is done in one database, by whoever runs it.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from penstock.bus.letters import DeadGroup, DeadLetter, a_letter
from penstock.bus.topic import Topic
from penstock.clock import SystemClock, us_to_datetime
from penstock.errors import UsageError
from penstock.offsets import Position
from penstock.rows import ParkedFilter, ParkedState
from penstock.spark.complaints import in_one_line, not_logged
from penstock.spark.connection import connect, patiently
from penstock.spark.letters import dead_letters, reached, topic_of
from penstock.spark.pipelines.rounds import Ending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from penstock.bus.bus import Bus
    from penstock.clock import Clock
    from penstock.ports import Store
    from penstock.rows import TopicInfo

ROWS_TOGETHER: Final = 1_000
"""So many are changed in one transaction, which takes about ten milliseconds."""
PLACES_AT_A_TIME: Final = 50_000
PLANNED_MAX: Final = 5_000_000
"""A job has at most so many letters: their positions are in the memory of whoever runs it."""
FINGERPRINTS_MAX: Final = 1_000
WHERE_CHARACTERS_MAX: Final = 100_000
GROUPS_MAX: Final = 100
"""So many causes are told apart in a preview; what is left is counted together."""
SAMPLES: Final = 5
MESSAGE_CHARACTERS_MAX: Final = 500
PACE_SECONDS: Final = 0.1
"""A run at a rate brings back what is due in this time together, and at least one."""
RATE_MAX: Final = 1_000_000.0

_DEAD: Final[frozenset[ParkedState]] = frozenset({"dead"})
_ID: Final = re.compile(r"redrive-\d{8}T\d{6}-(\d+)-[0-9a-f]{8}")
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{16}")

Progress: TypeAlias = "Callable[[int, int], None]"


def _in_silence(_done: int, _total: int) -> None:
    pass


class Letters(NamedTuple):
    """Dead letters of one partition of one subscription."""

    topic: TopicInfo
    subscription: str
    partition: int
    offsets: npt.NDArray[np.int64]

    def portions(self, rows: int, job: str | None = None) -> Iterator[ParkedFilter]:
        """Yield filters of so many letters each, as far as they are dead, and marked with a job if one is given."""
        for start in range(0, len(self.offsets), rows):
            yield ParkedFilter(
                log_id=self.topic.log_id,
                subscription=self.subscription,
                states=_DEAD,
                partition=self.partition,
                offsets=frozenset(self.offsets[start : start + rows].tolist()),
                job=job,
            )


class Redriven(NamedTuple):
    """What a run has done."""

    job: str
    planned: int | None
    """How many letters the preview has shown; None for a job that is no redrive's."""
    found: int
    """How many of them were still dead and marked when the run began."""
    replayed: int
    """How many were brought back by this run."""
    left: int
    """How many are still marked: another run brings them back. 0 unless the run was told to end."""
    subscriptions: Mapping[tuple[str, str], int]
    """How many were brought back of each, by topic and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Dead letters that were chosen, looked at and marked, to be brought back together."""

    id: str
    """What they are marked with: this is all that a run has to know."""
    planned: int
    """How many were found."""
    marked: int
    """How many of them were marked: the others came back, or were removed, while they were looked at."""
    taken: int
    """How many of them were marked by an earlier job, which does not have them any more."""
    subscriptions: Mapping[str, int]
    """How many were marked of each."""
    groups: tuple[DeadGroup, ...]
    """Their causes, the most frequent first; at most 100, and then one of all others, without a fingerprint."""
    samples: tuple[DeadLetter, ...]
    """The first few of them."""
    _bus: Bus | str = field(repr=False)

    def run(
        self, *, rate: float | None = None, progress: Progress = _in_silence, ending: Ending | None = None
    ) -> Redriven:
        """Bring them back; see `redrive`."""
        return redrive(self._bus, self.id, rate=rate, progress=progress, ending=ending)


# --- the preview ----------------------------------------------------------------------------------


def preview_redrive(
    spark: SparkSession,
    bus: Bus | str,
    topic: Topic[Any] | str,
    subscription: str | None = None,
    *,
    where: str | None = None,
    fingerprints: Iterable[str] = (),
    only_new: bool = False,
) -> Job:
    """Mark dead letters of a subscription, or of all subscriptions of a topic, with a new job; nothing comes back yet.

    * `where`: an expression of Spark SQL over the columns of `penstock.spark.dead_letters`, such as `error_type =
      'TimeoutError' and parked_at > '2026-01-01' and get_json_object(cast(data as string), '$.currency') = 'EUR'`.
    * `fingerprints`: of one of these causes.
    * `only_new`: without those that were brought back before, and died again.

    :raises UsageError: the expression is not understood, or fails for a letter.
    """
    causes = checked_filter(where, fingerprints)
    letters = dead_letters(spark, bus, topic, subscription)
    table = _selected(letters.where("replay = 0") if only_new else letters, where, causes)
    if table.num_rows > PLANNED_MAX:
        raise UsageError(f"{table.num_rows:,} dead letters match, and a job has at most {PLANNED_MAX:,}: choose fewer")
    url, settings = reached(bus)
    with connect(url, settings) as (store, _):
        info = topic_of(store, topic)
        chosen = _by_partition(info, table)
        id = new_job(table.num_rows, SystemClock())
        marked = mark(store, chosen, id)
        return Job(
            id=id,
            planned=table.num_rows,
            marked=sum(marked.values()),
            taken=_taken(table),
            subscriptions=marked,
            groups=_groups(store, info, table),
            samples=_samples(store, chosen),
            _bus=bus,
        )


def checked_filter(where: str | None, fingerprints: Iterable[str]) -> list[str]:
    """Return the fingerprints; `UsageError` if they are none, or a filter is longer than it may be."""
    found = list(dict.fromkeys(fingerprints))
    for each in found:
        if not _FINGERPRINT.fullmatch(each):
            raise UsageError(
                f"{each!r} is no fingerprint: it has 16 hexadecimal digits, as `penstock dlq groups` shows"
            )
    if len(found) > FINGERPRINTS_MAX:
        raise UsageError(f"at most {FINGERPRINTS_MAX:,} fingerprints can be chosen, not {len(found):,}")
    if where is not None and not where.strip():
        raise UsageError("the expression is empty: leave it out to mean all dead letters")
    if where is not None and len(where) > WHERE_CHARACTERS_MAX:
        raise UsageError(f"the expression has {len(where):,} characters, and may have {WHERE_CHARACTERS_MAX:,}")
    return found


def _selected(letters: DataFrame, where: str | None, fingerprints: Sequence[str]) -> pa.Table:
    """Return the positions of the letters that are meant, and what is told of them."""
    from pyspark.errors import (
        AnalysisException,
        ArithmeticException,
        ArrayIndexOutOfBoundsException,
        DateTimeException,
        IllegalArgumentException,
        NumberFormatException,
        SparkRuntimeException,
    )
    from pyspark.sql.functions import col

    of_a_letter = (
        ArithmeticException,
        ArrayIndexOutOfBoundsException,
        DateTimeException,
        IllegalArgumentException,
        NumberFormatException,
        SparkRuntimeException,
    )
    if fingerprints:
        letters = letters.where(col("fingerprint").isin(list(fingerprints)))
    with not_logged():
        try:
            chosen = letters if where is None else letters.where(where)
            # No payload comes here. Without a limit: Spark would read one stretch after the other.
            table = chosen.selectExpr(
                "subscription",
                "partition",
                "offset",
                "fingerprint",
                "error_type",
                "job",
                "unix_micros(parked_at) as parked_at",
                "unix_micros(greatest(parked_at, last_retry_at)) as failed_at",
            ).toArrow()
        except AnalysisException as error:
            raise UsageError(f"Spark does not understand this expression: {in_one_line(error)}") from None
        except of_a_letter as error:
            raise UsageError(
                f"the expression fails for a dead letter: {in_one_line(error)}. try_cast(… as …) is null instead"
            ) from None
    return table.sort_by([(name, "ascending") for name in ("subscription", "partition", "offset")])


def _by_partition(topic: TopicInfo, table: pa.Table) -> list[Letters]:
    """Return letters, sorted by subscription, partition and offset, in parts."""
    if not table.num_rows:
        return []
    names = table["subscription"].combine_chunks().dictionary_encode()
    name, partition = names.indices.to_numpy(), table["partition"].to_numpy()
    edges = np.flatnonzero((np.diff(name) != 0) | (np.diff(partition) != 0)) + 1
    offsets = np.split(table["offset"].to_numpy(), edges)
    return [
        Letters(topic, names.dictionary[int(name[start])].as_py(), int(partition[start]), part)
        for start, part in zip([0, *edges.tolist()], offsets, strict=True)
    ]


def new_job(planned: int, clock: Clock) -> str:
    """Return the id of a new job of so many letters."""
    return f"redrive-{us_to_datetime(clock.time_us()):%Y%m%dT%H%M%S}-{planned}-{secrets.token_hex(4)}"


def planned_of(job: str) -> int | None:
    """Return how many letters a job had when it was made; None if its id does not say so."""
    found = _ID.fullmatch(job)
    return int(found[1]) if found else None


def mark(store: Store, chosen: Iterable[Letters], job: str) -> dict[str, int]:
    """Mark letters with a job, as far as they are still dead; return how many of each subscription."""
    marked: dict[str, int] = {}
    for letters in chosen:
        for portion in letters.portions(ROWS_TOGETHER):
            count = patiently(lambda: store.parked.stamp(portion, job))  # noqa: B023 - run here
            marked[letters.subscription] = marked.get(letters.subscription, 0) + count
    return marked


# --- what a preview shows -------------------------------------------------------------------------


def _taken(table: pa.Table) -> int:
    import pyarrow.compute as pc

    return int(pc.sum(pc.not_equal(table["job"], "")).as_py() or 0)


def _groups(store: Store, topic: TopicInfo, table: pa.Table) -> tuple[DeadGroup, ...]:
    first = ("subscription", "partition", "offset", "error_type")
    wanted = [*((name, "first") for name in first), ("offset", "count"), ("parked_at", "min"), ("failed_at", "max")]
    counted = table.group_by("fingerprint", use_threads=False).aggregate(wanted)
    counted = counted.sort_by([("offset_count", "descending"), ("parked_at_min", "ascending")])
    groups = [_group(store, topic, row) for row in counted.slice(0, GROUPS_MAX).to_pylist()]
    if counted.num_rows > GROUPS_MAX:
        others = counted.slice(GROUPS_MAX)
        groups.append(_all_others(topic, others))
    return tuple(groups)


def _group(store: Store, topic: TopicInfo, row: Mapping[str, Any]) -> DeadGroup:
    position = Position(topic.name, row["partition_first"], row["offset_first"])
    wanted = ParkedFilter(
        log_id=topic.log_id,
        subscription=row["subscription_first"],
        partition=position.partition,
        offsets=frozenset({position.offset}),
    )
    found = store.parked.page(wanted, limit=1)
    return DeadGroup(
        fingerprint=row["fingerprint"],
        error_type=row["error_type_first"],
        count=row["offset_count"],
        first=us_to_datetime(row["parked_at_min"]),
        last=us_to_datetime(row["failed_at_max"]),
        # It may have been removed since.
        message=found[0].error_message[:MESSAGE_CHARACTERS_MAX] if found else "",
        sample=position,
    )


def _all_others(topic: TopicInfo, others: pa.Table) -> DeadGroup:
    import pyarrow.compute as pc

    row = others.slice(0, 1).to_pylist()[0]
    return DeadGroup(
        fingerprint="",
        error_type=row["error_type_first"],
        count=pc.sum(others["offset_count"]).as_py(),
        first=us_to_datetime(pc.min(others["parked_at_min"]).as_py()),
        last=us_to_datetime(pc.max(others["failed_at_max"]).as_py()),
        message="",
        sample=Position(topic.name, row["partition_first"], row["offset_first"]),
    )


def _samples(store: Store, chosen: Sequence[Letters]) -> tuple[DeadLetter, ...]:
    found: list[DeadLetter] = []
    for letters in chosen:
        if len(found) >= SAMPLES:
            break
        [wanted] = letters._replace(offsets=letters.offsets[: SAMPLES - len(found)]).portions(SAMPLES)
        raw = Topic(letters.topic.name, bytes, partitions=letters.topic.settings.partitions)
        found += [a_letter(row, raw) for row in store.parked.page(wanted, limit=SAMPLES)]
    return tuple(found)


# --- the run --------------------------------------------------------------------------------------


def redrive(
    bus: Bus | str,
    job: str,
    *,
    rate: float | None = None,
    progress: Progress = _in_silence,
    ending: Ending | None = None,
) -> Redriven:
    """Bring back the letters of a job that are still marked. Repeated, it brings back what is left.

    * `rate`: letters a second at most; without it, as fast as it goes.
    * `progress` is called with how many are back, and of how many.
    * `ending`: a run that is asked to end does so after the portion under way.

    :raises UsageError: no letter is marked with it, and it is no redrive's.
    """
    checked_rate(rate)
    url, settings = reached(bus)
    with connect(url, settings) as (store, _):
        return bring_back(store, job, rate=rate, progress=progress, ending=ending)


def checked_rate(rate: float | None) -> None:
    """Raise `UsageError` unless a rate is one."""
    if rate is not None and not 0 < rate <= RATE_MAX:
        raise UsageError(f"the rate is {rate!r}, it must be above 0 and at most {RATE_MAX:,.0f} letters a second")


def bring_back(
    store: Store,
    job: str,
    *,
    rate: float | None = None,
    progress: Progress = _in_silence,
    ending: Ending | None = None,
    clock: Clock | None = None,
) -> Redriven:
    """Do what `redrive` says, in an open store."""
    clock, ending = clock or SystemClock(), ending or Ending()
    letters = marked_with(store, job)
    found = sum(len(part.offsets) for part in letters)
    together = ROWS_TOGETHER if rate is None else min(max(int(rate * PACE_SECONDS), 1), ROWS_TOGETHER)
    done: dict[tuple[str, str], int] = {}
    tried = 0
    every = ((part, portion) for part in letters for portion in part.portions(together, job))
    for (topic, name, *_), portion in every:
        if ending.asked:
            break
        begun = clock.monotonic()
        count = patiently(lambda: store.parked.replay(portion, clock.time_us()))  # noqa: B023 - run here
        tried += len(portion.offsets or ())
        done[topic.name, name] = done.get((topic.name, name), 0) + count
        progress(sum(done.values()), found)
        if rate is not None and tried < found:
            # From its own beginning: after a delay the rate is what it was, and nothing is made up for.
            ending.wait(max(begun + count / rate - clock.monotonic(), 0.0))
    replayed = sum(done.values())
    left = sum(len(part.offsets) for part in marked_with(store, job)) if ending.asked else 0
    return Redriven(job, planned_of(job), found, replayed, left, done)


def marked_with(store: Store, job: str) -> list[Letters]:
    """Return the dead letters that are marked with a job, of whichever subscriptions.

    `UsageError` if there are none and it is no redrive's: then it is a mistake, and else it is done.
    """
    if not job:
        raise UsageError("the job's id is empty: the preview says what it is")
    found = []
    for topic in store.log.topics():
        for subscription in store.cursors.subscriptions(topic.log_id):
            wanted = ParkedFilter(log_id=topic.log_id, subscription=subscription.name, states=_DEAD, job=job)
            found += [
                Letters(topic, subscription.name, partition, offsets)
                for partition, offsets in _places(store, wanted).items()
            ]
    if not found and planned_of(job) is None:
        raise UsageError(f"no dead letter is marked with {job!r}: the preview says what the job is called")
    return found


def _places(store: Store, wanted: ParkedFilter) -> dict[int, npt.NDArray[np.int64]]:
    """Return the offsets of rows, by partition."""
    pages: list[npt.NDArray[np.int64]] = []
    after: tuple[int, int] | None = None
    while page := store.parked.places(wanted, after=after, limit=PLACES_AT_A_TIME):
        pages.append(np.array(page, np.int64))
        after = page[-1]
        if len(page) < PLACES_AT_A_TIME:
            break
    if not pages:
        return {}
    places = np.concatenate(pages)
    return {int(partition): places[places[:, 0] == partition, 1] for partition in np.unique(places[:, 0])}
