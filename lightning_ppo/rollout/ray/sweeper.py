"""A small process that removes the folder of a local Ray when the trainer could not, because it was killed.

`python -m lightning_ppo.rollout.ray.sweeper TRAINER_PID FOLDER`

It ends with the trainer, a little later. Nothing heavy is imported: the trainer starts this file by path.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_TRAINER_CHECK_S = 0.5
_RAY_ENDS_S = 3.0
"""Ray's processes look after the trainer themselves, and write on until they miss it."""
_SLOWEST_S = 90.0
"""Some of them give their open connections a minute."""


def sweep(trainer_pid: int, folder: Path) -> None:
    """Wait until the trainer, our parent, is gone; then remove the folder, as often as it comes back."""
    while os.getppid() == trainer_pid:
        time.sleep(_TRAINER_CHECK_S)
    deadline = time.monotonic() + _SLOWEST_S
    time.sleep(_RAY_ENDS_S)
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_RAY_ENDS_S)


def main(arguments: Sequence[str]) -> None:
    """Run the sweeper.

    Args:
        arguments: TRAINER_PID and FOLDER.
    """
    # What a terminal or a job's end sends to all processes is not for this one: its time is afterwards.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    trainer_pid, folder = arguments
    sweep(int(trainer_pid), Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
