"""TopicDirectory: which log a topic's name means now.

A name is resolved once and remembered. When the log turns out to be deleted, the caller of that moment gets
the error, because it may hold offsets that mean nothing any more; the next one finds the topic anew.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.bus.topic import Topic
from penstock.errors import TopicDeleted, TopicMismatch, UnknownTopic

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
        self._infos: dict[str, TopicInfo] = {}

    async def info(self, name: str) -> TopicInfo:
        """Return the topic as the store has it; one that is declared is created if it is missing."""
        backend = await self._opened()
        if name not in self._infos:
            self._infos[name] = await self._find(backend, name)
        return self._infos[name]

    async def create_declared(self, backend: Backend) -> None:
        """Create what was declared, when the bus opens."""
        for topic in self._declared.values():
            self._infos[topic.name] = await backend.create_topic(topic.name, topic.settings)

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
        settings = (await self.info(topic.name)).settings
        if settings.fixed != topic.settings.fixed:
            raise TopicMismatch(f"topic {topic.name!r} exists with {settings}, not with {topic.settings}")
        return topic
