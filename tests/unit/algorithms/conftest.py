"""One thread for every test here, and the recorded outputs of another library."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _tensors(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _tensors(value) for key, value in node.items()}
    return torch.tensor(node, dtype=torch.float64) if isinstance(node, list | float) else node


@pytest.fixture(scope="session")
def oracle() -> dict[str, Any]:
    """`oracle_vectors.json`: inputs and outputs of verl 0.9.1 (Apache-2.0) on torch 2.13.0, float64."""
    return _tensors(json.loads(Path(__file__).with_name("oracle_vectors.json").read_text()))
