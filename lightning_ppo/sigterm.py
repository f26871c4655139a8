"""SIGTERM on several ranks: noted, so that all of them can leave together."""

import signal
import threading
from types import FrameType

from lightning.pytorch.strategies.launchers.launcher import _Launcher


class SigtermNote:
    """Replaces Lightning's handler, which broadcasts from wherever the program happens to be.

    That collective would pair with another one of the other ranks. This one leaves a note, and `Relay` makes all ranks
    leave together. Lightning puts the handler from before the run back at the end.

    Attributes:
        is_received: Whether SIGTERM came.
    """

    def __init__(self) -> None:
        """Nothing is replaced yet."""
        self.is_received = False
        self._launcher: _Launcher | None = None

    def take_over(self, launcher: _Launcher | None) -> None:
        """Install the handler, which passes the signal on to the processes that `launcher` started."""
        self._launcher = launcher
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if not self.is_received and self._launcher is not None:
            self._launcher.kill(signal.SIGTERM)
        self.is_received = True
