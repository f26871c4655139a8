"""Prompts of the data set, tokenised and checked before anything starts."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_ppo.batch import Prompt
from lightning_ppo.errors import DataError
from lightning_ppo.rollout.rows import PROMPT, load_rows


def tokenize_prompt(value: Any, tokenizer: Any) -> tuple[str, tuple[int, ...]]:
    """Tokenise one prompt of any of the three kinds.

    Args:
        value: Text (gets the tokenizer's default special tokens); token ids (used as they are; the text is what they
            decode to, special tokens included); or chat messages (the tokenizer's chat template, with the opening
            of the answer appended; every token of the result is prompt, earlier answers too).
        tokenizer: A Hugging Face tokenizer.

    Returns:
        The text that the reward sees, and the token ids that the engine gets.

    Raises:
        DataError: a token id is outside the tokenizer's vocabulary; or chat messages, and the tokenizer has no chat
            template or its template refuses them.
    """
    if isinstance(value, str):
        try:
            return value, tuple(tokenizer(value)["input_ids"])
        except Exception as error:
            # a word-level vocabulary without an unknown token raises a bare Exception (tokenizers)
            raise DataError(
                f"prompt cannot be tokenised ({_first_line(error)}); use the vocabulary's symbols"
            ) from error
    if all(isinstance(token, int) for token in value):
        ids = list(value)
        bad = next((token for token in ids if not 0 <= token < len(tokenizer)), None)
        if bad is not None:
            raise DataError(f"prompt has token {bad}, the vocabulary has {len(tokenizer)}; use this tokenizer's ids")
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False), tuple(ids)
    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError("prompt is chat messages, but the tokenizer has no chat template; set one, or give text")
    messages = [dict(message) for message in value]
    try:
        # The template writes the special tokens itself. Tokenising here rather than inside apply_chat_template does not
        # depend on what that returns, which differs between versions of transformers.
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:
        raise DataError(
            f"prompt is refused by the chat template ({_first_line(error)}); fix the messages' roles"
        ) from error
    return text, tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


class PromptSet:
    """All prompts of a data set, each a `Prompt` with its row number.

    Args:
        rows: Whatever `load_rows` takes.
        tokenizer: The policy's Hugging Face tokenizer.
        max_prompt_tokens: The policy's context less the longest response.
        field: The argument that the rows were given as, for messages.

    Raises:
        DataError: a row is malformed, or its prompt is empty, longer than `max_prompt_tokens`, or has a token outside
            the vocabulary, or a column holds what JSON cannot; the message names the row.
    """

    def __init__(
        self,
        rows: str | Path | Sequence[Mapping[str, Any]],
        tokenizer: Any,
        max_prompt_tokens: int,
        field: str = "prompts",
    ) -> None:
        loaded = load_rows(rows, field)
        digest = hashlib.sha256()
        prompts = []
        for index, row in enumerate(loaded):
            place = loaded.place(index)
            try:
                text, ids = tokenize_prompt(row[PROMPT], tokenizer)
            except DataError as error:
                raise DataError(f"{place}: {error}") from error
            if not ids or not row[PROMPT]:
                raise DataError(f"{place}: prompt is empty; give at least one token")
            if len(ids) > max_prompt_tokens:
                raise DataError(
                    f"{place}: prompt has {len(ids)} tokens, max_prompt_tokens={max_prompt_tokens} "
                    "(the model's context less max_response_tokens); shorten or drop it"
                )
            columns = {name: value for name, value in row.items() if name != PROMPT}
            prompts.append(Prompt(row=index, text=text, token_ids=ids, columns=columns))
            digest.update(_encoded(row, place))
        self._prompts = tuple(prompts)
        self.columns: frozenset[str] = frozenset.intersection(*(frozenset(prompt.columns) for prompt in prompts))
        """Columns that every row has, without `prompt`."""
        self.longest: int = max(len(prompt.token_ids) for prompt in prompts)
        """Tokens of the longest prompt."""
        self.fingerprint: str = digest.hexdigest()
        """sha256 over all rows in order: tells whether a checkpoint belongs to these prompts."""

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        """Return the prompt of a row."""
        return self._prompts[index]


def _encoded(row: Mapping[str, Any], place: str) -> bytes:
    try:
        return _json(dict(row)).encode() + b"\n"
    except (TypeError, ValueError) as error:
        bad = next(name for name, value in row.items() if not _is_plain(value))
        raise DataError(
            f"{place}: column {bad} cannot be written as JSON ({error}); use text for every key in it"
        ) from error


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=_plain)


def _is_plain(value: Any) -> bool:
    try:
        _json(value)
    except (TypeError, ValueError):
        return False
    return True


def _plain(value: Any) -> Any:
    """Give what JSON does not know a form that is the same in every process."""
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    if isinstance(value, (set, frozenset)):
        return sorted(map(_json, value))
    return value.hex() if isinstance(value, bytes) else type(value).__qualname__
