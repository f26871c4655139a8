import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ppo.errors import DataError
from lightning_ppo.rollout.rows import load_rows

ROWS = [{"prompt": "^a=", "answer": "a"}, {"prompt": "^b=", "answer": "b"}]


def write(path: Path, *lines: str) -> Path:
    path.write_bytes(b"".join(line.encode() + b"\n" for line in lines))
    return path


def one_line(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_jsonl_sequence_and_path_types_give_the_same_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", *map(json.dumps, ROWS))
    assert list(load_rows(path)) == list(load_rows(str(path))) == list(load_rows(ROWS)) == ROWS
    assert list(load_rows(load_rows(ROWS))) == ROWS


def test_blank_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", "", json.dumps(ROWS[0]), "  ", "[1]")
    with pytest.raises(DataError) as error:
        load_rows(path)
    assert "p.jsonl line 4: not an object" in one_line(error)


def test_unusual_characters_do_not_split_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", '\ufeff{"prompt": "a\u2028b\u0085"}', '{"prompt": "c"}')
    assert [row["prompt"] for row in load_rows(path)] == ["a\u2028b\u0085", "c"]


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_empty_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"p\.jsonl has no rows"):
        load_rows(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ('{"prompt": "a"} x', "not JSON"),
        ('"text"', "not an object"),
        ("null", "not an object"),
        ("[]", "not an object"),
        ('{"text": "a"}', "no column prompt (columns: text)"),
        ("{}", "no column prompt (columns: none)"),
        ('{"prompt": null}', "wrong type (NoneType)"),
        ('{"prompt": 3}', "wrong type (int)"),
        ('{"prompt": [1, "a"]}', "wrong type (list)"),
        ('{"prompt": [true]}', "wrong type (list)"),
        ('{"prompt": [1.5]}', "wrong type (list)"),
        ('{"prompt": {"role": "user", "content": "a"}}', "wrong type (dict)"),
        ('{"prompt": [{"role": "user"}]}', "wrong type (list)"),
        ('{"prompt": [{"role": "user", "content": null}]}', "wrong type (list)"),
    ],
)
def test_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "p.jsonl", json.dumps(ROWS[0]), line)
    with pytest.raises(DataError) as error:
        load_rows(path)
    assert "p.jsonl line 2: " in one_line(error)
    assert message in str(error.value)


def test_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"p\.jsonl line 2: not JSON"):
        load_rows(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.jsonl cannot be read \(No such file"):
        load_rows(tmp_path / "nothing.jsonl")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "prompts has no rows"),
        ([ROWS[0], {"answer": 1}], r"prompts row 1 \(counted from 0\): no column prompt"),
        ([ROWS[0], 5], r"prompts row 1 \(counted from 0\): not an object"),
        ([{1: "a", "prompt": "b"}], r"prompts row 0 \(counted from 0\): not an object with named columns"),
        ({"prompt": ["a"]}, "prompts=dict maps columns to values; give a list of dicts, one per row"),
        (["a", "b"], r"prompts row 0 \(counted from 0\): not an object"),
        (np.array(["a", "b"]), r"prompts row 0 \(counted from 0\): not an object"),
        (7, "prompts=int is no sequence of rows"),
    ],
)
def test_bad_sequence(rows: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"^{message}"):
        load_rows(rows)


def test_messages_name_the_argument(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", "{}")
    for rows, message in (
        ([{}], "val row 0 (counted from 0): no column"),
        ([], "val has no rows"),
        (3, "val=int is no"),
        (path, f"val: {path} line 1: no column"),
        (tmp_path / "x", f"val: {tmp_path / 'x'} cannot be read"),
    ):
        with pytest.raises(DataError) as error:
            load_rows(rows, "val")
        assert one_line(error).startswith(message)


@pytest.mark.parametrize(
    "prompt",
    [
        np.array([2, 6, 3], dtype=np.int32),
        [np.int64(2), np.int64(6), np.int64(3)],
        (2, 6, 3),
        torch.tensor([2, 6, 3]),
        list(torch.tensor([2, 6, 3])),
    ],
)
def test_token_ids_of_any_kind(prompt: Any) -> None:
    row = {"prompt": prompt, "answer": "a"}
    (loaded,) = load_rows([row])
    assert (list(loaded["prompt"]), loaded["answer"]) == ([2, 6, 3], "a")
    assert all(type(token) is int for token in loaded["prompt"])
    assert row["prompt"] is prompt


def test_an_array_of_messages_is_a_chat() -> None:
    """What pandas makes of a column of lists."""
    chat = [{"role": "user", "content": "a"}]
    assert load_rows([{"prompt": np.array(chat, dtype=object)}])[0] == {"prompt": chat}


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        (np.array([[2, 6]]), "ndarray"),
        (np.array([0.5]), "ndarray"),
        (np.array([True]), "ndarray"),
        (np.array(2), "ndarray"),
        (torch.tensor([0.5]), "Tensor"),
        ([np.array([2, 6])], "list"),
    ],
)
def test_arrays_that_are_no_token_ids(prompt: Any, kind: str) -> None:
    with pytest.raises(
        DataError, match=rf"prompts row 0 \(counted from 0\): prompt has the wrong type \({kind}\); give"
    ):
        load_rows([{"prompt": prompt}])


def table(module: str, name: str) -> Any:
    """An object whose class has these names, and whose iteration gives what a pandas table's does."""
    return type(name, (), {"__module__": module, "__iter__": lambda self: iter(["prompt"])})()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            table("pandas.core.frame", "DataFrame"),
            'prompts=DataFrame gives columns, not rows; give prompts=....to_dict("records")',
        ),
        (table("polars.dataframe.frame", "DataFrame"), "prompts=....to_dicts()"),
        (table("pyarrow.lib", "Table"), "prompts=....to_pylist()"),
        (
            type("DatasetDict", (dict,), {"__module__": "datasets.dataset_dict"})(train=ROWS, test=ROWS),
            "prompts=DatasetDict holds splits (test, train), not rows; give one of them, prompts=...['test']",
        ),
        (iter(ROWS), "prompts=list_iterator can be read once only, and every fit and validate reads it; give prompts="),
        ((row for row in ROWS), "prompts=generator can be read once only"),
    ],
)
def test_sources_that_need_a_conversion(source: Any, message: str) -> None:
    with pytest.raises(DataError) as error:
        load_rows(source)
    assert message in one_line(error)


def test_anything_that_gives_rows_will_do() -> None:
    class DataSet:
        def __iter__(self) -> Any:
            return iter(ROWS)

    assert list(load_rows(DataSet())) == list(load_rows(tuple(ROWS))) == ROWS  # type: ignore[arg-type]


@pytest.fixture
def fake_datasets(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand in for the optional package; `loads` holds what each folder gives."""
    loads: dict[str, Any] = {}

    def load_from_disk(path: str) -> Any:
        if Path(path).name not in loads:
            raise FileNotFoundError(f"{path} is neither\na Dataset")
        return loads[Path(path).name]

    module = ModuleType("datasets")
    module.load_from_disk = load_from_disk  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return loads


def test_data_set_folder(tmp_path: Path, fake_datasets: dict[str, Any]) -> None:
    fake_datasets["train"] = ROWS
    fake_datasets["empty"] = []
    fake_datasets["all"] = {"train": ROWS, "test": ROWS}
    for name in ("train", "empty", "all", "other"):
        (tmp_path / name).mkdir()
    rows = load_rows(tmp_path / "train")
    assert list(rows) == ROWS
    assert rows.place(1).endswith("train row 1 (counted from 0)")
    with pytest.raises(DataError, match="empty has no rows"):
        load_rows(tmp_path / "empty")
    with pytest.raises(DataError, match=r"several splits \(test, train\); give the folder of one"):
        load_rows(tmp_path / "all")
    with pytest.raises(DataError, match="other is no data set folder") as error:
        load_rows(tmp_path / "other")
    one_line(error)


def test_folder_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="needs the package `datasets`; pip install datasets"):
        load_rows(tmp_path)
