"""The repository keeps its own rules: formatting, types, and one-line commands in the README."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]])
def test_tool_is_clean(command):
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("kind", ["main", "test"])
def test_readme_commands_are_one_line_each(kind):
    text = (ROOT / "README.md").read_text()
    (command,) = re.findall(rf"<!-- {kind} command -->\n```bash\n(.*)\n```", text)
    assert command.startswith("python3 -m venv .venv && ")


def test_no_file_is_long():
    long = {str(p): n for p in ROOT.glob("lightning_ppo/**/*.py") if (n := len(p.read_text().splitlines())) > 300}
    assert not long
