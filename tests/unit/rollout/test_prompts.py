import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ppo.errors import DataError
from lightning_ppo.rollout.prompts import PromptSet, tokenize_prompt
from lightning_ppo.testing import CHARACTERS, char_tokenizer


def ids(text: str) -> tuple[int, ...]:
    return tuple(CHARACTERS.index(char) for char in text)


def test_text_gets_the_default_special_tokens(tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    assert tokenize_prompt("^ab=", tokenizer) == ("^ab=", ids("^ab="))
    with_bos = char_tokenizer()
    with_bos.backend_tokenizer.post_processor = TemplateProcessing(single="^ $A", special_tokens=[("^", 2)])
    assert tokenize_prompt("ab=", with_bos) == ("ab=", ids("^ab="))


def test_token_ids_are_used_as_they_are(tokenizer: Any) -> None:
    assert tokenize_prompt([2, 6, 3], tokenizer) == ("^a=", (2, 6, 3))
    assert tokenize_prompt((2, 1, 3), tokenizer) == ("^$=", (2, 1, 3))


def test_chat_messages_use_the_template_once(chat_tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    messages = [{"role": "user", "content": "ab"}]
    assert tokenize_prompt(messages, chat_tokenizer) == ("|ab=", ids("|ab="))
    # The template writes the special tokens: the tokenizer must not add its own again.
    with_bos = char_tokenizer(chat_tokenizer.chat_template)
    with_bos.backend_tokenizer.post_processor = TemplateProcessing(single="^ $A", special_tokens=[("^", 2)])
    assert tokenize_prompt(messages, with_bos) == ("|ab=", ids("|ab="))
    assert messages == [{"role": "user", "content": "ab"}]


def test_chat_ids_equal_what_transformers_gives(chat_tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    expected = chat_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenize_prompt(messages, chat_tokenizer)[1] == tuple(expected)


# Pitfall 61: earlier answers in the prompt are prompt.
def test_earlier_answers_are_part_of_the_prompt(chat_tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    prompt = PromptSet([{"prompt": messages}], chat_tokenizer, 10)[0]
    assert prompt.token_ids == ids("|a!b|c=")


def test_chat_without_template(tokenizer: Any) -> None:
    rows = [{"prompt": "^a="}, {"prompt": [{"role": "user", "content": "a"}]}]
    with pytest.raises(DataError, match=r"row 1 \(counted from 0\): prompt is chat messages, but .* no chat template"):
        PromptSet(rows, tokenizer, 10)


def test_template_that_refuses_messages() -> None:
    strict = char_tokenizer("{{ raise_exception('only users\nmay speak') }}")
    with pytest.raises(DataError, match="refused by the chat template") as error:
        PromptSet([{"prompt": [{"role": "x", "content": "a"}]}], strict, 10)
    assert "\n" not in str(error.value)


def test_prompt_set(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "p.jsonl"
    rows = [{"prompt": "^a=", "answer": "a", "level": 1}, {"prompt": [2, 7, 3], "answer": "b"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    prompts = PromptSet(path, tokenizer, 3)
    assert len(prompts) == 2
    assert (prompts[1].row, prompts[1].text, prompts[1].token_ids) == (1, "^b=", (2, 7, 3))
    assert prompts[0].columns == {"answer": "a", "level": 1}
    assert prompts.columns == {"answer"}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("^abc=", "prompt has 5 tokens, max_prompt_tokens=4"),
        ([2, 6, 7, 8, 3], "prompt has 5 tokens, max_prompt_tokens=4"),
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ([2, 42], "prompt has token 42, the vocabulary has 42"),
        ([-1], "prompt has token -1, the vocabulary has 42"),
    ],
)
def test_bad_prompt_is_named_by_its_line(tmp_path: Path, tokenizer: Any, prompt: Any, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "^ab="}\n\n' + json.dumps({"prompt": prompt}))
    with pytest.raises(DataError) as error:
        PromptSet(path, tokenizer, 4)
    assert f"p.jsonl line 3: {message}" in str(error.value)
    assert "\n" not in str(error.value)


def test_fingerprint_depends_on_rows_and_order_only(tokenizer: Any) -> None:
    rows = [{"prompt": "^a=", "answer": "a", "n": 1}, {"prompt": "^b=", "answer": "b", "n": 2}]
    same = [{"n": 1, "answer": "a", "prompt": "^a="}, {"n": 2, "answer": "b", "prompt": "^b="}]
    fingerprint = PromptSet(rows, tokenizer, 3).fingerprint
    assert PromptSet(same, tokenizer, 5).fingerprint == fingerprint
    assert len(fingerprint) == 64
    for other in (rows[::-1], rows[:1], [{**rows[0], "answer": "c"}, rows[1]]):
        assert PromptSet(other, tokenizer, 3).fingerprint != fingerprint


def test_fingerprint_of_columns_that_json_does_not_know(tokenizer: Any) -> None:
    def fingerprint(value: Any) -> str:
        return PromptSet([{"prompt": "^a=", "value": value}], tokenizer, 3).fingerprint

    assert fingerprint(np.arange(3)) == fingerprint(np.arange(3)) != fingerprint(np.arange(4))
    assert fingerprint(b"a") == fingerprint(b"a") != fingerprint(b"b")
    assert fingerprint(object()) == fingerprint(object())
    # the order of a set of texts is another one in every process
    assert fingerprint({"a", "b", "c"}) == fingerprint({"c", "b", "a"}) != fingerprint({"a", "b"})
    assert fingerprint(frozenset({1, "a"})) == fingerprint({"a", 1}) != fingerprint({"a", 2})


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_arrays_of_token_ids_are_the_list(tokenizer: Any, kind: Any) -> None:
    given = PromptSet([{"prompt": kind([2, 6, 3])}], tokenizer, 3)
    listed = PromptSet([{"prompt": [2, 6, 3]}], tokenizer, 3)
    assert (given[0], given.fingerprint) == (listed[0], listed.fingerprint)
    assert all(type(token) is int for token in given[0].token_ids)
    with pytest.raises(DataError, match=r"row 0 \(counted from 0\): prompt is empty"):
        PromptSet([{"prompt": kind([])}], tokenizer, 3)


@pytest.mark.parametrize("value", [{1: "a", "b": "c"}, {(0, 1): "a"}, [{"deep": {(2,): 3}}]])
def test_column_that_is_no_json_is_named_with_its_row(tokenizer: Any, value: Any) -> None:
    rows = [{"prompt": "^a=", "fine": {"x": 1}, "value": 0}, {"prompt": "^b=", "fine": {"x": 2}, "value": value}]
    with pytest.raises(DataError) as error:
        PromptSet(rows, tokenizer, 3)
    message = str(error.value)
    assert message.startswith("prompts row 1 (counted from 0): column value cannot be written as JSON (")
    assert message.endswith("; use text for every key in it")
    assert "\n" not in message


def test_symbol_outside_of_the_vocabulary_names_the_row():
    """A tokenizer without an unknown token raises a bare Exception."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="?")))
    where = r"row 1 \(counted from 0\): prompt cannot be tokenised \(.*\); use the vocabulary's symbols"
    with pytest.raises(DataError, match=where):
        PromptSet([{"prompt": "a"}, {"prompt": "b"}], tokenizer, 8)
