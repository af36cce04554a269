"""Opening a store whose process was killed while it wrote, with many segments and with few."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from penstock.cli.bench.harness import Figure, Timing, Work, sample
from penstock.cli.bench.log.children import children
from penstock.cli.bench.log.events import Appender, a_store, a_topic, keyed_batch
from penstock.cli.bench.log.jobs import FillSegments
from penstock.cli.bench.log.sizes import Sizes


def figures(directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure opening: until the heads are known and the first append is durable."""
    openings = min(rounds, sizes.openings)
    # One more of each, to warm up.
    many = [directory / f"many-{number}" for number in range(openings + 1)]
    few = [directory / f"few-{number}" for number in range(openings + 1)]
    directories = dict.fromkeys(map(str, many), sizes.segments_many) | dict.fromkeys(map(str, few), sizes.segments_few)
    with children([FillSegments(directories=directories, segment_bytes=sizes.segment_bytes)]) as [child]:
        child.hear()
        child.process.kill()
        child.process.wait()
    with _Opened() as opened:
        contestants = [opened.opener(many), opened.opener(few)]
        sample(contestants, 1, before=opened.close)
        seconds = sample(contestants, openings, before=opened.close)
    yield Timing(*seconds).milliseconds("open.after_kill", goal="ratio >= 0.667")


class _Opened(ExitStack):
    """The stores that were opened and not closed, since closing is not timed."""

    def opener(self, directories: Sequence[Path]) -> Work:
        """Return what opens one directory after the other."""
        left = iter(directories)
        batch = keyed_batch(1)

        def open_next() -> None:
            store = self.enter_context(a_store(next(left)))
            topic = a_topic(store)
            store.log.heads(topic.partitions).read()
            Appender(store, batch).append(topic.partitions[0])

        return open_next
