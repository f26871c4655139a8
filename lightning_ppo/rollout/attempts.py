"""Attempts at one response, until one succeeds or somebody decides that it was the last."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def retried(
    attempt: Callable[[int], Awaitable[T]],
    delay_s: Callable[[Exception], float],
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    *,
    first: int = 0,
) -> T:
    """Make attempts, one after the other.

    Args:
        attempt: Makes the attempt of this number.
        delay_s: Says how many seconds to wait after a failure, or raises what ends it.
        sleep: Waits; what it raises ends it.
        first: Number of the first attempt.

    Returns:
        What the first attempt that succeeds returns.

    Raises:
        CancelledError: the calling task was cancelled, whatever the attempt made of that.
    """
    number = first
    while True:
        try:
            return await attempt(number)
        except Exception as error:
            failure = error
        # Not in the handler: whatever the next attempt raises would get this failure for a cause.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # The engine failed over the abort. That must not keep the task alive, nor cost an attempt.
            raise asyncio.CancelledError from failure
        number += 1
        await sleep(delay_s(failure))
