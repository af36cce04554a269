"""The keeper: what a store does by itself, in one thread, while somebody has it open.

Every partition that goes silent gets a marker behind its last block, so that this block has a witness. One whose end
nobody knew when its head was asked for is recovered. From time to time retention is looked at, and payloads that no
parked row refers to are swept. Nothing depends on any of it happening soon: a store that is killed at any moment is
whole.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.settings import FileSettings
    from penstock.stores.file.log import FileLog
    from penstock.stores.file.platform import Platform

logger = logging.getLogger(__name__)


class Keeper:
    """The thread; `step` is one round of it, for whoever wants to run it by hand."""

    def __init__(self, log: FileLog, settings: FileSettings, platform: Platform, sweep: Callable[[], object]) -> None:
        self._log = log
        self._sweep = sweep
        self._settings = settings
        self._platform = platform
        self._stopping = threading.Event()
        self._retained_at = platform.clock.monotonic()
        self._sweep()
        self._thread = platform.spawn("penstock-keeper", self._run)

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self._stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(max(self._settings.marker_seconds, 0.01)):
            self.step()

    def step(self) -> None:
        """Do what is due."""
        try:
            self._log.recover_unknown()
            self._log.mark_idle(self._settings.marker_seconds)
            now = self._platform.clock.monotonic()
            if now - self._retained_at >= self._settings.retain_seconds:
                self._retained_at = now
                self._log.retain()
                self._sweep()
        except (PenstockError, OSError) as error:
            logger.warning("the keeper will try again: %s", error)
