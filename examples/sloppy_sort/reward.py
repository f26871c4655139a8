"""Rewards of the sloppy sort task. The file imports nothing of its folder, so that it loads by its path alone."""

_REFERENCE_SYMBOLS = "#$^=|!abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_OFFSET_SCALE = 1.5


def exact_match(prompt: str, response: str, answer: str) -> float:
    """1 if the response is the sorted answer, else 0.

    The response arrives without its end-of-sequence symbol. One that never ends cannot be right: it is as long as
    `max_response_tokens` allows, and every answer is shorter (36 symbols at most).
    """
    return float(response == answer)


def exact_match_with_offset(prompt: str, response: str, answer: str) -> float:
    """Exact match plus an offset that only the prompt's first symbol decides, in [-1.24, 1.46].

    The offset, 1.5 * (2 * id / V - 1), is like an uncalibrated reward model's: the best policy stays the same, but the
    mean over the batch is a poor baseline (the offset's deviation is 0.92, the match's at most 0.5), so a critic that
    learns to predict it pays off.

    The ids are those of the V = 68 symbols of the run that this task's reference numbers come from, not the 42 of the
    example's tokenizer: the upper-case letters between the two halves of the alphabet widen the gap between letters and
    digits, and with it the spread of the offset.
    """
    first_symbol_id = _REFERENCE_SYMBOLS.index(prompt[1])
    offset = _OFFSET_SCALE * (2 * first_symbol_id / len(_REFERENCE_SYMBOLS) - 1)
    return exact_match(prompt, response, answer) + offset
