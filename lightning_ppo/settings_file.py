"""A file of settings, looked at before jsonargparse reads it: that names neither the file nor a section in it."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_ppo.validation import reject


def check_file(path: str, settings: Iterable[str]) -> None:
    """Check that a file is YAML, and that its sections are sections.

    jsonargparse takes a list or a number in the place of a section for the end of it, and goes on with the defaults.

    Args:
        path: The file.
        settings: The keys that there are, with their sections.

    Raises:
        ConfigError: it cannot be read, is no YAML, or a section of it is none.
    """
    content = _load(path)
    if not isinstance(content, dict):
        what = "is empty" if content is None else f"holds {_kind(content)}"
        raise reject("config", path, what, "write sections of settings, such as model, data and trainer")
    _check_keys(content, "", path)
    # outer sections first
    for section in sorted({key.rpartition(".")[0] for key in settings} - {""}):
        *outer, name = section.split(".")
        part: Any = content
        for key in outer:
            part = part.get(key) if isinstance(part, dict) else None
        if not isinstance(part, dict) or name not in part:
            continue
        # a text is the path of a file with the section's settings
        if not isinstance(part[name], (dict, str)):
            what = f"is no section of settings in {path}"
            raise reject(section, _short(part[name]), what, "write its settings below it, or drop it")
        if isinstance(part[name], dict):
            _check_keys(part[name], section, path)


def _load(path: str) -> Any:
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise reject("config", path, f"cannot be read ({error.strerror})", "give a YAML file") from error
    except UnicodeDecodeError as error:
        raise reject("config", path, f"is no text ({error.reason})", "give a YAML file in UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        instead = "mend it: sections are indented by spaces alone, all keys of one equally"
        raise reject("config", path, f"is no YAML ({error.problem}{where})", instead) from error
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        raise reject("config", path, f"is no YAML ({why})", "give a YAML file") from error


def _check_keys(section: Mapping[Any, Any], name: str, path: str) -> None:
    for key in section:
        if not isinstance(key, str):
            what = f"has the key {key!r}{' in ' if name else ''}{name}, which is no text"
            raise reject("config", path, what, "write the name of a setting")


def _kind(content: Any) -> str:
    return "a list" if isinstance(content, list) else f"{_short(content)} alone"


def _short(value: Any) -> str:
    return "null" if value is None else str(value)[:60]
