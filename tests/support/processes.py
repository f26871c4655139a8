"""What tests ask about other processes: whether they are gone, and things that hold in the end."""

import time
from collections.abc import Callable
from typing import TypeVar

import psutil

Answer = TypeVar("Answer")


def wait_for(condition: Callable[[], Answer], what: str = "it", seconds: float = 20.0) -> Answer:
    """Ask until the answer is true, and return it; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)
    return answer


def command_line(process: psutil.Process) -> str:
    """Its words, with spaces between them."""
    return " ".join(process.cmdline())


def is_gone(pid: int) -> bool:
    """Whether no process of this number runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def descendants(
    look: Callable[[psutil.Process], Answer], of: psutil.Process | None = None
) -> dict[psutil.Process, Answer]:
    """What `look` says of each process below `of` (this one); those that end while they are looked at are left out."""
    answers = {}
    for process in (of or psutil.Process()).children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                answers[process] = look(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            continue
    return answers
