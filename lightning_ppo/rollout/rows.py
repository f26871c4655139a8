"""Prompt rows from a jsonl file, a Hugging Face data set folder, or any sequence of dicts."""

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from lightning_ppo.errors import DataError

PROMPT = "prompt"
"""The one column that every row must have."""

_AS_ROWS = {"pandas": 'to_dict("records")', "polars": "to_dicts()", "pyarrow": "to_pylist()"}
"""What makes a list of dicts of a package's tables; iterating over one gives columns."""


class PromptRows(Sequence[Mapping[str, Any]]):
    """Rows, and where each comes from.

    Args:
        rows: The rows; each has a `prompt` that is text, token ids (a list, an array or a tensor) or chat messages.
        places: What messages call each row.

    Raises:
        DataError: a row is no object, or its prompt is missing or of the wrong type; the message names the row.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], places: Sequence[str]) -> None:
        self._rows = [_checked(row, place) for row, place in zip(rows, places, strict=True)]
        self._places = places

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        """Return one row, or several."""
        return self._rows[index]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def place(self, index: int) -> str:
        """Return what messages call a row: file and line (from 1), or source and row (from 0)."""
        return self._places[index]


def load_rows(source: str | Path | Sequence[Mapping[str, Any]], field: str = "prompts") -> PromptRows:
    """Load prompt rows.

    Args:
        source: A jsonl file (one object per line; blank lines are skipped), a folder that `datasets.save_to_disk`
            wrote, or any sequence of dicts.
        field: The argument that `source` was given as, for messages.

    Returns:
        The rows, in file order. Messages count lines of a file from 1, rows of a folder or sequence from 0.

    Raises:
        DataError: nothing is there, a line is no JSON object, or a `prompt` is missing or of the wrong type.
    """
    if isinstance(source, PromptRows):
        return source
    if isinstance(source, (str, Path)):
        path = Path(source)
        if path.is_dir():
            return _numbered(_load_folder(path, field), f"{field}: {path}")
        return _load_jsonl(path, field)
    advice = _advice(source, field)
    if advice is not None:
        raise DataError(f"{field}={type(source).__name__} {advice}")
    return _numbered(list(source), field)


def _advice(source: Any, field: str) -> str | None:
    """Say why a source is no sequence of rows, and what to give instead; None for one that may be."""
    package, name = type(source).__module__.partition(".")[0], type(source).__name__
    if isinstance(source, Mapping):
        if package == "datasets" and source:
            splits = sorted(source)
            return f"holds splits ({', '.join(splits)}), not rows; give one of them, {field}=...[{splits[0]!r}]"
        return "maps columns to values; give a list of dicts, one per row"
    if package in _AS_ROWS and name in ("DataFrame", "Table"):
        return f"gives columns, not rows; give {field}=....{_AS_ROWS[package]}"
    if isinstance(source, Iterator):
        return f"can be read once only, and every fit and validate reads it; give {field}=list(...)"
    return None if isinstance(source, Iterable) else "is no sequence of rows; give a list of dicts, or a path"


def _numbered(rows: Sequence[Any], source: str) -> PromptRows:
    if not rows:
        raise DataError(f"{source} has no rows; give at least one prompt")
    return PromptRows(rows, [f"{source} row {index} (counted from 0)" for index in range(len(rows))])


def _load_jsonl(path: Path, field: str) -> PromptRows:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
        raise DataError(f"{field}: {path} {why}; give a jsonl file or a data set folder") from error
    rows: list[Any] = []
    places: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        places.append(f"{field}: {path} line {number}")
        try:
            rows.append(json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")))
        except ValueError as error:
            raise DataError(f"{places[-1]}: not JSON ({error}); every line must be one JSON object") from error
    if not rows:
        raise DataError(f"{field}: {path} has no rows; give at least one prompt")
    return PromptRows(rows, places)


def _load_folder(path: Path, field: str) -> list[Any]:
    what = f"{field}: {path}"
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(f"{what} is a folder, which needs the package `datasets`; pip install datasets") from error
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(f"{what} is no data set folder ({why}); write one with datasets.save_to_disk") from error
    if isinstance(loaded, Mapping):
        splits = ", ".join(sorted(loaded))
        raise DataError(f"{what} holds several splits ({splits}); give the folder of one, {path}/<split>")
    return list(loaded)


def _checked(row: Any, place: str) -> Mapping[str, Any]:
    """Return the row, with token ids of an array or a tensor as a list."""
    if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
        raise DataError(f'{place}: not an object with named columns; write {{"prompt": ...}}')
    if PROMPT not in row:
        have = ", ".join(sorted(row)) or "none"
        raise DataError(f"{place}: no column prompt (columns: {have}); add one")
    given = row[PROMPT]
    prompt = _plain(given)
    if not (isinstance(prompt, str) or (_is_list(prompt) and (_all_ids(prompt) or _all_messages(prompt)))):
        raise DataError(
            f"{place}: prompt has the wrong type ({type(given).__name__}); "
            "give text, a list of token ids, or a list of chat messages {role, content}"
        )
    return row if prompt is given else {**row, PROMPT: prompt}


def _plain(prompt: Any) -> Any:
    """Python's own numbers in the place of an array, of a tensor, or of a list of their numbers."""
    if hasattr(prompt, "tolist"):
        return prompt.tolist()
    if _is_list(prompt) and any(hasattr(token, "tolist") for token in prompt):
        return [_plain(token) for token in prompt]
    return prompt


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _all_ids(prompt: Sequence[Any]) -> bool:
    return all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)


def _all_messages(prompt: Sequence[Any]) -> bool:
    return all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in prompt
    )
