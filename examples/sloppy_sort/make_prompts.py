"""Write the prompts of the sloppy sort task: `python examples/sloppy_sort/make_prompts.py`.

No prompt occurs twice, neither within a file nor in both. The same seed writes the same bytes.
"""

import argparse
import json
import random
from pathlib import Path

from task import Problem, sample_problem

EXAMPLES = Path(__file__).resolve().parent.parent
TRAIN_ROWS, VALIDATION_ROWS, SEED = 4096, 256, 0


def make_problems(train_rows: int, validation_rows: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Draw distinct problems, validation first: its rows do not depend on how many training rows are asked for."""
    rng = random.Random(seed)
    problems: dict[str, Problem] = {}
    while len(problems) < validation_rows + train_rows:
        problem = sample_problem(rng)
        problems.setdefault(problem.prompt, problem)
    rows = list(problems.values())
    return rows[validation_rows:], rows[:validation_rows]


def to_jsonl(problems: list[Problem]) -> str:
    """One JSON object a line, with the columns `prompt` and `answer`."""
    return "".join(json.dumps({"prompt": row.prompt, "answer": row.answer}) + "\n" for row in problems)


def main() -> None:
    """Write both files into the examples folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=EXAMPLES, help="where both files go")
    parser.add_argument("--train-rows", type=int, default=TRAIN_ROWS)
    parser.add_argument("--validation-rows", type=int, default=VALIDATION_ROWS)
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    train, validation = make_problems(args.train_rows, args.validation_rows, args.seed)
    for name, rows in (("sort.jsonl", train), ("sort_validation.jsonl", validation)):
        path = args.folder / name
        path.write_text(to_jsonl(rows), encoding="utf-8")
        print(f"{path}: {len(rows)} rows, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
