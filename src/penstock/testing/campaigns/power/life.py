"""What a process does with a store until the power fails.

Several threads publish, read, commit, trim, and delete a topic and create it anew, as chance will have it. Or one
thread does so in step: after each answer it waits for a word, so that the power can fail right after a call that was
answered, and before any later sync, which would make up for one that was forgotten.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.producers import process_producer
from penstock.rows import TopicInfo, TopicSettings
from penstock.stores.file.platform import Platform
from penstock.stores.file.store import FileStore
from penstock.testing.campaigns.processes.actor import Actor, Reporter, tell_what_is_logged
from penstock.testing.campaigns.processes.reports import Publish, lasting_id

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection

    from penstock.settings import FileSettings

TOPICS: Final = {"stays": TopicSettings(partitions=2), "goes": TopicSettings(partitions=1, compression="zstd")}
EVENTS_MAX: Final = 12


class Life:
    """What one thread does: as a publisher, as a clerk, or as both."""

    def __init__(self, store: FileStore, reporter: Reporter, source: str, first: int, seed: str) -> None:
        self._actor = Actor(store, reporter)
        self._log = store.log
        self._source = source
        self._next = first
        # One that has published before lasts; one that begins here ends with this process.
        self._is_lasting = not source.startswith("own")
        now_us = Platform().clock.time_us()
        self._producer = lasting_id(source) if self._is_lasting else process_producer(now_us)
        self._chance = random.Random(seed)

    def begin(self) -> None:
        """Create the topics that are not there."""
        there = {topic.name for topic in self._log.topics()}
        for name, settings in TOPICS.items():
            if name not in there:
                self._actor.create(name, settings)

    def publish_for_ever(self) -> None:
        """Publish, and read now and then."""
        while True:
            topic = self._some_topic()
            if topic is not None:
                self._publish(topic)
                if self._chance.random() < 0.2:
                    self._actor.look_around(self._chance.choice(topic.partitions), self._chance, EVENTS_MAX)

    def keep_for_ever(self) -> None:
        """Commit, trim, delete and create."""
        while True:
            self._keep()

    def do_all_for_ever(self) -> None:
        """Do a bit of everything."""
        while True:
            topic = self._some_topic()
            if topic is not None and self._chance.random() < 0.6:
                self._publish(topic)
            else:
                self._keep()

    def _some_topic(self) -> TopicInfo | None:
        try:
            topics = self._log.topics()
        except OSError:  # the power has failed; the next call will tell of it
            topics = []
        return self._chance.choice(topics) if topics else None

    def _publish(self, topic: TopicInfo) -> None:
        partition, count = self._chance.choice(topic.partitions), self._chance.randint(1, EVENTS_MAX)
        call = Publish(*partition, self._source, self._next, count, self._is_lasting)
        self._next += count
        self._actor.publish(call, self._producer)

    def _keep(self) -> None:
        topic = self._some_topic()
        if topic is None:
            self.begin()
            return
        if not self._actor.has_subscription(topic):  # the power failed between the two
            self._actor.subscribe(topic.log_id, topic.settings.partitions)
            return
        partition, dice = self._chance.choice(topic.partitions), self._chance.random()
        bounds = self._actor.bounds(partition)
        if bounds is None:
            return
        if dice < 0.6:
            self._actor.settle(partition, bounds.stop)
        elif dice < 0.8:
            self._actor.trim(partition, self._chance.randint(bounds.start, bounds.stop), force=dice < 0.7)
        elif topic.name == "goes":
            self._actor.delete(topic.log_id)
            self._actor.create(topic.name, topic.settings)


def live(
    connection: Connection[Any, Any],
    *,
    root: str,
    settings: FileSettings,
    seed: str,
    sources: Mapping[str, int],
    in_step: bool,
) -> None:
    """Open the store, or make it, and use it until the power fails. `sources` have got to these sequences."""
    reporter = Reporter(connection, in_step=in_step)
    tell_what_is_logged(reporter)
    store = FileStore(Path(root), settings=settings)
    lives = [Life(store, reporter, name, first, f"{seed}-{name}") for name, first in sources.items()]
    lives[0].begin()
    if in_step:
        lives[0].do_all_for_ever()
    for life in lives[1:]:
        threading.Thread(target=life.publish_for_ever, daemon=True).start()
    lives[0].keep_for_ever()
