"""The limit on this process's open files: every request in flight is a connection, and every connection is one."""

import errno

from lightning_ppo.errors import EngineError

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]


class OpenFilesError(EngineError):
    """This process may open no more files; says nothing about the server that was to be asked."""

    def __init__(self, what: str) -> None:
        """Say what could not be done.

        Args:
            what: The server and the call.
        """
        limit = "unknown" if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        super().__init__(
            f"{what}: open files={limit} is the limit of this process, and reached; raise it with ulimit -n, or have"
            " fewer responses in flight"
        )


def is_out_of_files(error: BaseException) -> bool:
    """Whether this is what the system says at the limit."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def raise_limit() -> int | None:
    """Let this process open as many files as it may without more rights.

    Returns:
        The limit before, for `restore_limit`; None if nothing was changed.
    """
    if resource is None:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return None
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        # macOS reports a hard limit that it does not grant
        return None
    return soft


def restore_limit(soft: int | None) -> None:
    """Undo `raise_limit`; files that are open stay open."""
    if resource is not None and soft is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
