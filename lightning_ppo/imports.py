"""What a setting names by import path: `package.module:name`, or `path/to/file.py:name`."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from lightning_ppo.validation import reject


def import_object(field: str, path: str) -> Any:
    """Import what a setting names.

    Args:
        field: The setting, for messages.
        path: `package.module:name`, or `path/to/file.py:name`.

    Raises:
        ConfigError: the path has no `:`, the module or file cannot be imported (its error is chained), or it has no
            such name.
    """
    where, colon, name = path.rpartition(":")
    if not (colon and where and name):
        raise reject(field, path, "is no import path", "write package.module:name or path/to/file.py:name")
    module = _import_file(field, path, Path(where)) if where.endswith(".py") else _import_module(field, path, where)
    found = getattr(module, name, None)
    if found is None:
        raise reject(field, path, f"does not exist: {where} has no {name}", "write a name that it has")
    return found


def _import_module(field: str, path: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        why = f"cannot be imported ({_one_line(error)})"
        raise reject(field, path, why, "check the module's name, or write path/to/file.py:name") from error


def _import_file(field: str, path: str, file: Path) -> Any:
    name = f"lightning_ppo_{field}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise reject(field, path, f"does not exist: no file {file}", "give the path of a Python file")
    module = importlib.util.module_from_spec(spec)
    # Data classes and pickling look their module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise reject(field, path, f"cannot be imported ({_one_line(error)})", "make the file importable") from error
    return module


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
