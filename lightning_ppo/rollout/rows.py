"""Prompt rows from a jsonl file, a Hugging Face data set folder, or any sequence of dicts."""

import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from lightning_ppo.errors import DataError

PROMPT = "prompt"
"""The one column that every row must have."""


class PromptRows(Sequence[Mapping[str, Any]]):
    """Rows, and where each comes from.

    Args:
        rows: The rows; each has a `prompt` that is text, token ids or chat messages.
        places: What messages call each row.

    Raises:
        DataError: a row is no object, or its prompt is missing or of the wrong type; the message names the row.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], places: Sequence[str]) -> None:
        for row, place in zip(rows, places, strict=True):
            _check_row(row, place)
        self._rows = rows
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


def load_rows(source: str | Path | Sequence[Mapping[str, Any]]) -> PromptRows:
    """Load prompt rows.

    Args:
        source: A jsonl file (one object per line; blank lines are skipped), a folder that `datasets.save_to_disk`
            wrote, or any sequence of dicts.

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
            return _numbered(_load_folder(path), str(path))
        return _load_jsonl(path)
    if not isinstance(source, Iterable) or isinstance(source, Mapping):
        raise DataError(f"prompts={type(source).__name__} is no sequence of rows; give a list of dicts, or a path")
    return _numbered(list(source), "prompts")


def _numbered(rows: Sequence[Any], source: str) -> PromptRows:
    if not rows:
        raise DataError(f"{source} has no rows; give at least one prompt")
    return PromptRows(rows, [f"{source} row {index} (counted from 0)" for index in range(len(rows))])


def _load_jsonl(path: Path) -> PromptRows:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); give a jsonl file or a data set folder") from error
    rows: list[Any] = []
    places: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        places.append(f"{path} line {number}")
        try:
            rows.append(json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")))
        except ValueError as error:
            raise DataError(f"{places[-1]}: not JSON ({error}); every line must be one JSON object") from error
    if not rows:
        raise DataError(f"{path} has no rows; give at least one prompt")
    return PromptRows(rows, places)


def _load_folder(path: Path) -> list[Any]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(f"{path} is a folder, which needs the package `datasets`; pip install datasets") from error
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(f"{path} is no data set folder ({what}); write one with datasets.save_to_disk") from error
    if isinstance(loaded, Mapping):
        splits = ", ".join(sorted(loaded))
        raise DataError(f"{path} holds several splits ({splits}); give the folder of one, {path}/<split>")
    return list(loaded)


def _check_row(row: Any, place: str) -> None:
    if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
        raise DataError(f'{place}: not an object with named columns; write {{"prompt": ...}}')
    if PROMPT not in row:
        have = ", ".join(sorted(row)) or "none"
        raise DataError(f"{place}: no column prompt (columns: {have}); add one")
    prompt = row[PROMPT]
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes))
    if not (isinstance(prompt, str) or (listed and (_all_ids(prompt) or _all_messages(prompt)))):
        raise DataError(
            f"{place}: prompt has the wrong type ({type(prompt).__name__}); "
            "give text, a list of token ids, or a list of chat messages {role, content}"
        )


def _all_ids(prompt: Sequence[Any]) -> bool:
    return all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)


def _all_messages(prompt: Sequence[Any]) -> bool:
    return all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in prompt
    )
