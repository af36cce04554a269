"""TopicDirectory: which log a topic's name means now.

A name is resolved once and remembered. When the log turns out to be deleted, the caller of that moment gets
the error, because it may hold offsets that mean nothing any more; the next one finds the topic anew.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.bus.topic import Topic
from penstock.errors import TopicDeleted, UnknownTopic

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from penstock.ports import Backend
    from penstock.rows import TopicInfo

T = TypeVar("T")


class TopicDirectory:
    """The topics of one bus: those declared with it, which it creates, and those that are there anyway."""

    def __init__(self, declared: Mapping[str, Topic[Any]], opened: Callable[[], Awaitable[Backend]]) -> None:
        self._declared = declared
        self._opened = opened
        self._infos: dict[str, TopicInfo] = {}  # empty unless the bus is open, so that a hit needs no other question
        self._fitting: dict[str, tuple[Topic[Any], TopicInfo]] = {}

    async def info(self, name: str) -> TopicInfo:
        """Return the topic as the store has it; one that is declared is created if it is missing."""
        info = self._infos.get(name)
        if info is None:
            info = await self._find(await self._opened(), name)
            await self._opened()  # it may have been closed meanwhile
            self._infos[name] = info
        return info

    def known(self, name: str) -> TopicInfo | None:
        """Return the topic if it was looked up before, without a step of the event loop."""
        return self._infos.get(name)

    def fits(self, topic: Topic[Any] | str) -> bool:
        """Say whether this very topic was compared with the store's, and is to be encoded with as it is."""
        if isinstance(topic, str):
            return False
        known, fitted = self._fitting.get(topic.name, (None, None))
        return known is topic and fitted is self._infos.get(topic.name)

    def forget(self) -> None:
        """Know nothing any more: the bus is closed."""
        self._infos.clear()

    async def create_declared(self, backend: Backend) -> None:
        """Create what was declared, when the bus opens."""
        self._infos = {
            topic.name: await backend.create_topic(topic.name, topic.settings) for topic in self._declared.values()
        }

    async def _find(self, backend: Backend, name: str) -> TopicInfo:
        declared = self._declared.get(name)
        if declared is not None:
            return await backend.create_topic(name, declared.settings)
        known = {info.name: info for info in await backend.topics()}
        if name not in known:
            raise UnknownTopic(name, known)
        return known[name]

    @contextmanager
    def forgotten_if_deleted(self, name: str) -> Iterator[None]:
        """Use the topic in this block; if it turns out to be deleted, resolve the name anew at its next use."""
        try:
            yield
        except TopicDeleted:
            self._infos.pop(name, None)
            raise

    async def topic(self, topic: Topic[T] | str) -> Topic[Any]:
        """Return the topic to encode with: the declared one for a name, or one of bytes."""
        if isinstance(topic, str):
            declared = self._declared.get(topic)
            if declared is not None:
                return declared
            settings = (await self.info(topic)).settings
            return Topic(topic, bytes, partitions=settings.partitions, source=settings.source)
        info = await self.info(topic.name)
        known, fitted = self._fitting.get(topic.name, (None, None))
        if known is not topic or fitted is not info:  # compared once, and not at every publish
            if info.settings.fixed != topic.settings.fixed:
                raise info.mismatch(topic.settings)
            self._fitting[topic.name] = topic, info
        return topic
