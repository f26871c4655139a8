import ast
import sys
from pathlib import Path

import pytest

import lightning_ppo.algorithms as algorithms

FILES = sorted(Path(algorithms.__file__).parent.glob("*.py"))


def _imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: write imports in full"
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_imports_only_torch_the_standard_library_and_itself(path):
    for name in _imported(path):
        inside = name.startswith("lightning_ppo.algorithms.")
        outside = name.split(".")[0] in {"torch", *sys.stdlib_module_names}
        assert inside or outside, f"{path.name} imports {name}"


def test_every_public_name_is_exported_once_and_documented():
    assert len(algorithms.__all__) == len(set(algorithms.__all__))
    for name in set(algorithms.__all__) - {"EPSILON"}:
        assert getattr(algorithms, name).__doc__, name
