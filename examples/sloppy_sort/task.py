"""The "sloppy sort" task: sort distinct symbols. Its alphabet, its problems, and the demonstrator that makes mistakes.

A prompt is `^`, distinct symbols, `=`; the answer is the same symbols in the order a-z, 0-9. A response is right when
it is the answer followed by the end-of-sequence symbol `$`. Lengths have a long tail, so that some responses of a batch
take several times as long as the mean.
"""

import math
import random
from dataclasses import dataclass

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
SYMBOLS = "#$^=|!" + ALPHABET
"""Every symbol of the tokenizer; a symbol's place is its token id. `#` pads, `$` ends a response."""
PAD_ID, EOS_ID = SYMBOLS.index("#"), SYMBOLS.index("$")


@dataclass(frozen=True)
class LengthLaw:
    """How many symbols a problem has: `shortest` plus a geometric variable, or, rarely, uniform over the tail.

    Args:
        shortest: Least number of symbols.
        longest: Greatest number of symbols; at most the alphabet's 36, as symbols are distinct.
        mean: Mean of the geometric part, before the cut at `longest`.
        tail_probability: Probability that the length is uniform on [tail_shortest, longest] instead.
        tail_shortest: Where that tail starts.
    """

    shortest: int = 3
    longest: int = 36
    mean: float = 9.0
    tail_probability: float = 0.08
    tail_shortest: int = 16

    def sample(self, rng: random.Random) -> int:
        """Draw one length."""
        if rng.random() < self.tail_probability:
            return rng.randint(self.tail_shortest, self.longest)
        log_failure = math.log(1 - 1 / (self.mean - self.shortest + 1))
        while True:
            length = self.shortest + int(math.log(1 - rng.random()) / log_failure)
            if length <= self.longest:
                return length


@dataclass(frozen=True)
class Problem:
    """One row: the prompt as the policy sees it, and the right answer without its end-of-sequence symbol."""

    prompt: str
    answer: str


def sample_problem(rng: random.Random, law: LengthLaw | None = None) -> Problem:
    """Draw one problem; the same generator state gives the same problem."""
    symbols = rng.sample(ALPHABET, (law or LengthLaw()).sample(rng))
    return Problem("^" + "".join(symbols) + "=", "".join(sorted(symbols, key=ALPHABET.index)))


@dataclass(frozen=True)
class Sloppiness:
    """What the demonstrator gets wrong: it drops "blind" symbols (every fifth of the alphabet) often, others rarely.

    Args:
        drop_blind: Probability of dropping a blind symbol. Above one half, so that even greedy decoding of a policy
            that imitates the demonstrator is wrong: PPO must move the mode, not only sharpen the distribution.
        drop_any: Probability of dropping any symbol.
    """

    drop_blind: float = 0.55
    drop_any: float = 0.01


def demonstrate(problem: Problem, rng: random.Random, sloppiness: Sloppiness | None = None) -> str:
    """The sloppy demonstrator's response to a problem, with its end-of-sequence symbol."""
    habits = sloppiness or Sloppiness()
    kept = []
    for symbol in problem.answer:
        is_blind = ALPHABET.index(symbol) % 5 == 2
        if is_blind and rng.random() < habits.drop_blind:
            continue
        if rng.random() >= habits.drop_any:
            kept.append(symbol)
    return "".join(kept) + SYMBOLS[EOS_ID]
