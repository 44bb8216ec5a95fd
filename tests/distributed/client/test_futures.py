"""Tests of `RequestFuture` and `RequestStream`: ended, awaited and waited for by different threads and event loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rollout.distributed.client.futures import Readers, RequestFuture, RequestStream
from rollout.distributed.client.text_stream import GroupText
from rollout.errors import DeadlineError, RequestAbortedError, RequestFailedError
from rollout.requests.delta import SampleDelta
from rollout.requests.request import DynamicInferenceRequest
from rollout.requests.spans import VersionSpans
from rollout.sampling_params import SamplingParams
from rollout.threads.loop_thread import LoopThread
from tests.engines import PATIENCE_S, until


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread("rollout-futures")
    yield made
    made.close()


def future_on(loop: LoopThread, aborted: list[int] | None = None) -> RequestFuture:
    aborts = [] if aborted is None else aborted
    return RequestFuture(7, aborts.append, loop=loop.event_loop)


def test_an_end_by_any_thread_is_seen_at_once_and_the_first_one_counts(loop: LoopThread) -> None:
    future = future_on(loop)
    assert not future.done()
    future.end(["a"])
    future.fail(RequestFailedError("late", 7))
    future.end(["b"])
    assert future.done()
    assert future.result() == ["a"]
    assert not future.cancel()


def test_a_thread_waits_for_the_end_or_for_its_deadline(loop: LoopThread) -> None:
    future = future_on(loop)
    with pytest.raises(DeadlineError, match=r"request 7 has not ended within timeout_s=0\.001"):
        future.result(0.001)
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(future.result(PATIENCE_S)))
    waiting.start()
    future.end(["a"])
    waiting.join(PATIENCE_S)
    assert got == [["a"]]


def test_tasks_of_several_loops_wait_for_one_future(loop: LoopThread) -> None:
    future, got = future_on(loop), []

    async def wait() -> Any:
        return await future

    threads = [threading.Thread(target=lambda: got.append(asyncio.run(wait()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    own = loop.start(wait())
    until(lambda: future._told)
    future.end(["a"])
    for thread in threads:
        thread.join(PATIENCE_S)
    assert got == [["a"]] * 3
    assert own.result(PATIENCE_S) == ["a"]
    assert asyncio.run(wait()) == ["a"], "one that has ended needs no loop"


def test_on_its_own_loop_it_works_with_gather_wait_and_wait_for(loop: LoopThread) -> None:
    async def ask() -> None:
        futures = [future_on(loop) for _ in range(3)]
        ends = [threading.Thread(target=future.end, args=([number],)) for number, future in enumerate(futures)]
        together = asyncio.gather(*futures)
        for end in ends[:2]:
            end.start()
        done, pending = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        assert done
        assert futures[2] in pending
        ends[2].start()
        assert await together == [[0], [1], [2]]
        assert await asyncio.wait_for(futures[0], PATIENCE_S) == [0]

    loop.run_sync(ask(), PATIENCE_S)


def test_callbacks_run_on_its_loop_once_and_can_be_removed(loop: LoopThread) -> None:
    future = future_on(loop)
    called: list[str] = []
    last = threading.Event()

    def removed(_: object) -> None:
        called.append("removed")

    future.add_done_callback(removed)
    future.add_done_callback(lambda _: called.append(threading.current_thread().name))
    assert future.remove_done_callback(removed) == 1
    future.end([])
    future.add_done_callback(lambda _: last.set())
    assert last.wait(PATIENCE_S)
    assert called == ["rollout-futures"]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_cancelling_a_task_that_waits_aborts_the_request(loop: LoopThread, elsewhere: bool) -> None:
    aborted: list[int] = []
    future = future_on(loop, aborted)

    async def wait() -> Any:
        return await future

    async def cancelled() -> None:
        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    if elsewhere:
        asyncio.run(cancelled())
    else:
        loop.run_sync(cancelled(), PATIENCE_S)
    assert aborted == [7]
    assert future.cancelled()
    future.end(["late"])
    with pytest.raises(asyncio.CancelledError):
        future.result()


def test_result_on_its_own_loop_says_to_await_it_unless_it_has_ended(loop: LoopThread) -> None:
    future = future_on(loop)

    async def ask() -> Any:
        return future.result()

    with pytest.raises(asyncio.InvalidStateError, match="await it"):
        loop.run_sync(ask(), PATIENCE_S)
    future.end(["a"])
    assert loop.run_sync(ask(), PATIENCE_S) == ["a"]


# --- streams ----------------------------------------------------------------------------------------------------------


def delta(start: int, *tokens: int) -> SampleDelta:
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    return SampleDelta(7, 0, start, packed, bytes(len(packed)), VersionSpans([(3, len(tokens))] if tokens else []))


def test_a_stream_yields_ids_and_says_when_a_sample_starts_afresh(loop: LoopThread) -> None:
    stream = RequestStream(future_on(loop), GroupText(SamplingParams(), None), Readers(lambda flush: flush()))
    for each in (delta(0, 5, 6), delta(2), delta(0), delta(0, 8)):
        stream.take(each)
    told = [(each.token_ids, each.log_probs, each.policy_versions, each.restarted) for each in stream.take_waiting()]
    assert told == [([5, 6], [0.0, 0.0], [3, 3], False), ([], [], [], True), ([8], [0.0], [3], False)]


def test_a_reader_on_another_loop_is_woken_by_each_flush_and_gets_the_error_last(loop: LoopThread) -> None:
    readers = Readers()
    stream = RequestStream(future_on(loop), GroupText(SamplingParams(), None), readers)
    read: list[list[int]] = []
    arrived = threading.Semaphore(0)

    async def reading() -> None:
        async for each in stream:
            read.append(each.token_ids)
            arrived.release()

    task = loop.start(reading())
    for number in range(3):
        stream.take(delta(number, number))
        readers.flush()
        assert arrived.acquire(timeout=PATIENCE_S)
    stream.fail(RequestAbortedError("gone", 7))
    readers.flush()
    with pytest.raises(RequestAbortedError, match="gone"):
        task.result(PATIENCE_S)
    assert read == [[0], [1], [2]]
    with pytest.raises(RequestAbortedError):
        _ = stream.results


def test_a_whole_stream_yields_every_sample_once_all_have_ended(loop: LoopThread) -> None:
    params = SamplingParams(n=2)
    stream = RequestStream(future_on(loop), GroupText(params, None), Readers(lambda flush: flush()), whole=True)
    with pytest.raises(RuntimeError, match="read the stream to its end first"):
        _ = stream.results
    samples = [
        DynamicInferenceRequest(
            request_id=7, sample_index=index, prompt_tokens=[1], sampling_params=params, generated_tokens=[2, index],
            generated_log_probs=[-1.0, -1.0], generated_text=f"text {index}",
        )
        for index in range(2)
    ]  # fmt: skip
    stream.end(samples)

    async def read() -> list[tuple[str, list[int]]]:
        return [(each.text, each.token_ids) async for each in stream]

    assert asyncio.run(read()) == [("text 0", [2, 0]), ("text 1", [2, 1])]
    assert stream.results is samples is stream.result
