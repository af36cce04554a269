"""Calls in threads: the result comes back to the loop, whatever it is, and nobody is left waiting."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Iterator

import pytest

from penstock.bus.workers import Workers


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(3, "test")
    yield workers
    workers.stop()


async def test_a_call_is_made_in_another_thread_and_its_result_comes_back(workers: Workers) -> None:
    assert await workers.call(threading.get_ident) != threading.get_ident()
    assert await workers.call(int, "ff", base=16) == 255


async def test_what_a_call_raises_is_raised_where_it_is_awaited(workers: Workers) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        await workers.call(int, "no number")
    assert await workers.call(int, "1") == 1  # and the thread goes on


@pytest.mark.parametrize("error", [StopIteration, GeneratorExit])
async def test_what_would_mean_something_else_where_it_is_awaited_is_told_as_an_error(
    error: type[BaseException], workers: Workers
) -> None:
    def stop() -> None:
        raise error

    with pytest.raises(RuntimeError, match=f"the call raised {error.__name__}") as raised:
        await workers.call(stop)
    assert isinstance(raised.value.__cause__, error)


async def test_calls_run_at_once_up_to_the_number_of_threads(workers: Workers) -> None:
    together = threading.Barrier(3)
    await asyncio.gather(*(workers.call(together.wait, 30) for _ in range(3)))


async def test_threads_are_started_only_as_they_are_needed(workers: Workers) -> None:
    assert len({await workers.call(threading.get_ident) for _ in range(20)}) == 1


async def test_where_a_thread_cannot_be_started_that_is_told_and_a_later_call_tries_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    workers = Workers(1, "test")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="new thread"):
            workers.call(int, "1")
    assert await asyncio.wait_for(workers.call(int, "2"), 30) == 2
    workers.stop()


async def test_of_idle_threads_the_one_that_was_busy_last_is_asked(workers: Workers) -> None:
    together = threading.Barrier(3)
    await asyncio.gather(*(workers.call(together.wait, 30) for _ in range(3)))
    assert len({await workers.call(threading.get_ident) for _ in range(20)}) == 1


async def test_calls_that_no_thread_is_free_for_wait_and_are_made_even_if_it_is_to_stop() -> None:
    workers, go = Workers(2, "test"), threading.Event()
    busy = [workers.call(go.wait, 30) for _ in range(2)]
    waiting = [workers.call(threading.get_ident) for _ in range(10)]
    workers.stop()
    go.set()
    assert await asyncio.gather(*busy) == [True, True]
    assert 1 <= len(set(await asyncio.gather(*waiting))) <= 2


async def test_what_a_call_returned_is_not_kept_by_its_thread(workers: Workers) -> None:
    for _ in range(2):  # the first of a thread, and another one
        kept = weakref.ref(await workers.call(threading.Event))
        await workers.call(int, "1")
        assert kept() is None


async def test_threads_end_when_it_is_to_stop() -> None:
    workers, together = Workers(2, "test-ending"), threading.Barrier(2)
    await asyncio.gather(*(workers.call(together.wait, 30) for _ in range(2)))
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("test-ending")]
    assert len(threads) == 2
    workers.stop()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


async def test_a_cancelled_call_is_still_made_and_harms_nobody(workers: Workers) -> None:
    begun, go, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait(30)
        done.set()

    task = asyncio.ensure_future(workers.call(work))
    await workers.call(begun.wait, 30)
    task.cancel()
    go.set()
    assert await workers.call(done.wait, 30)
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_loop_that_is_closed_meanwhile_is_no_fault(workers: Workers) -> None:
    go, done = threading.Event(), threading.Event()

    def work() -> None:
        go.wait(30)
        done.set()

    async def leave() -> None:
        workers.call(work)

    asyncio.run(leave())
    go.set()
    assert done.wait(30)
    assert asyncio.run(_ask(workers)) == 1


async def _ask(workers: Workers) -> int:
    return await workers.call(int, "1")


async def test_a_call_after_the_end_is_refused_and_does_not_wait_for_ever() -> None:
    workers = Workers(1, "test")
    await workers.call(int, "1")
    workers.stop()
    with pytest.raises(RuntimeError, match="told to end"):
        workers.call(int, "2")
