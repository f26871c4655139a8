"""A free port of this machine, kept free until the server takes it."""

import socket


class ReservedPort:
    """A port that the kernel gives to nobody who asks for any port, while a server that names it can still bind it.

    vLLM binds its port more than ten seconds after its start, long enough for somebody else to get it.

    Attributes:
        number: The port.
    """

    def __init__(self, host: str) -> None:
        """Reserve a port of the interface `host`.

        Raises:
            OSError: `host` is no address of this machine, or it has no free port.
        """
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            # With this option on both sides two sockets may be bound, as long as only one of them listens.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, 0))
        except OSError:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Let go of the port; may be called again."""
        self._socket.close()
