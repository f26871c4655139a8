"""The folder of one life of a server: the policy's config, and all that vLLM leaves among temporary files."""

import getpass
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

_log = logging.getLogger(__name__)

_PREFIX = "lightning_ppo-"
# The path of a socket may have 107 characters. vLLM's are called `/` and a UUID; `mkdtemp` adds 8 to the prefix.
_LONGEST_PARENT = 107 - 37 - len(f"/{_PREFIX}") - 8
_SHORT = "/tmp"


def make_server_folder() -> Path:
    """Make a new folder for one server of this machine; the server's guard removes it.

    Raises:
        OSError: there is no room, or no right to.
    """
    parent = tempfile.gettempdir()
    if len(parent) > _LONGEST_PARENT:
        _log.warning(
            "TMPDIR=%s is too long for vLLM's sockets, so that servers use %s; set one of at most %d characters",
            *(parent, _SHORT, _LONGEST_PARENT),
        )
        parent = _SHORT
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))


def temporary_variables(folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """What makes a server put its temporary files into `folder`, on top of the environment `base`.

    The cache of compiled code stays where it is without us: a server that started with an empty one would compile anew.
    """
    variables = {"TMPDIR": str(folder), "VLLM_RPC_BASE_PATH": str(folder)}
    if "TORCHINDUCTOR_CACHE_DIR" not in base:
        where = Path(base.get("TMPDIR") or tempfile.gettempdir())
        variables["TORCHINDUCTOR_CACHE_DIR"] = str(where / f"torchinductor_{_user()}")
    return variables


def _user() -> str:
    """As torch calls the user in the names of its folders."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid_{os.getuid()}"
