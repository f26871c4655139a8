"""Run the command line in this process, and see what it prints."""

import contextlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightning_ppo.cli import main

ROOT = Path(__file__).parents[2]


@dataclass
class Outcome:
    """What a command line did."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def command() -> Callable[..., Outcome]:
    """`command("fit", "--config", ...)`, from the repository root; global state is put back."""

    def run(*argv: str) -> Outcome:
        out, err = io.StringIO(), io.StringIO()
        before, seed = os.getcwd(), os.environ.get("PL_GLOBAL_SEED")
        os.chdir(ROOT)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(argv)
        finally:
            os.chdir(before)
            os.environ.pop("PL_GLOBAL_SEED", None)
            if seed is not None:
                os.environ["PL_GLOBAL_SEED"] = seed
        return Outcome(code, out.getvalue(), err.getvalue())

    return run
