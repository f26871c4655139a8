"""A file of settings that cannot be used: one line that names the file, or the section in it."""

from pathlib import Path

import pytest

from lightning_ppo.errors import ConfigError
from lightning_ppo.settings_file import check_file

QUICKSTART = ("--config", "configs/quickstart.yaml")

NO_YAML = "; mend it: sections are indented by spaces alone, all keys of one equally"
FILES = [
    (b"", "is empty; write sections of settings, such as model, data and trainer"),
    (b"# nothing yet\n", "is empty; write"),
    (b"- model\n- data\n", "holds a list; write sections"),
    (b"model\n", "holds model alone; write sections"),
    (
        b"model:\n  policy: x\n ppo: {}\n",
        "is no YAML (expected <block end>, but found '<block mapping start>' in line 3, ",
    ),
    (
        b"model:\n\tpolicy: x\n",
        "is no YAML (found character '\\t' that cannot start any token in line 2, column 1)" + NO_YAML,
    ),
    (b"model: {policy: x\n", "is no YAML ("),
    (b"model: !!python/object:os.system {}\n", "is no YAML (could not determine a constructor for"),
    (b"model: \0\n", "is no YAML (unacceptable character #x0000"),
    (b"model: \xff\n", "is no text (invalid start byte); give a YAML file in UTF-8"),
    (b"{1: 2}\n", "has the key 1, which is no text; write the name of a setting"),
    (b"{trainer: {2: 3}}\n", "has the key 2 in trainer, which is no text; write the name of a setting"),
]


@pytest.mark.parametrize(("content", "message"), FILES, ids=[repr(content) for content, _ in FILES])
def test_a_file_that_is_no_settings(command, tmp_path, content, message):
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    for arguments in (["fit", *QUICKSTART, "--config", str(path)], ["fit", "--config", str(path)]):
        outcome = command(*arguments, "--trainer.default_root_dir", str(tmp_path / "runs"))
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.err.startswith(f"error: config={path} {message}")
        assert outcome.err.count("\n") == 1
        assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("value", ["[1]", "null"])
@pytest.mark.parametrize(
    "section", ["model", "trainer", "checkpoint", "data.vllm", "data.rollout", "data.rollout.failures"]
)
def test_a_section_that_is_none(command, tmp_path, section, value):
    """jsonargparse would forget `trainer` of the file before, and go on."""
    path = tmp_path / "x.yaml"
    text = value
    for name in reversed(section.split(".")):
        text = f"{{{name}: {text}}}"
    path.write_text(text)
    outcome = command("fit", *QUICKSTART, "--config", str(path), "--trainer.logger", "false")
    message = f"error: {section}={value} is no section of settings in {path}; write its settings below it, or drop it\n"
    assert (outcome.code, outcome.out, outcome.err) == (2, "", message)


def test_a_section_in_a_file_of_its_own(command, tmp_path):
    (tmp_path / "ppo.yaml").write_text("{gamma: 7}")
    (tmp_path / "x.yaml").write_text("{model: {ppo: ppo.yaml}}")
    outcome = command("fit", *QUICKSTART, "--config", str(tmp_path / "x.yaml"))
    assert (outcome.code, outcome.err.split("; ")[0]) == (2, "error: gamma=7.0 is out of range")


def test_what_is_printed_is_fine(command, tmp_path):
    printed = command("fit", *QUICKSTART, "--print_config")
    assert printed.code == 0
    (tmp_path / "x.yaml").write_text(printed.out)
    again = command("fit", "--config", str(tmp_path / "x.yaml"), "--print_config")
    assert (again.code, again.out, again.err) == (0, printed.out, "")


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^config=.*/nowhere cannot be read \(No such file or directory\); give a YAML file$"
    ):
        check_file(str(Path(tmp_path) / "nowhere"), [])
