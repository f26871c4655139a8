"""Environment variables of this process that are changed for a while."""

import os
from collections.abc import Mapping


def set_variables(changes: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set variables; None takes one away.

    Returns:
        What they were before: given to this function again, it undoes the change.
    """
    before = {name: os.environ.get(name) for name in changes}
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return before
