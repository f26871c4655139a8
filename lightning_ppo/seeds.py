"""Seeds that need no running generator: a stable hash of what they belong to."""

import hashlib

from lightning_ppo.validation import is_count, require


def hash_seed(*parts: object) -> int:
    """Hash names and numbers, of any size, to a seed that every generator takes.

    Args:
        parts: What the seed belongs to; their texts count.

    Returns:
        A whole number in [0, 2**63).
    """
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def check_global_seed(seed: bool | int | None) -> None:
    """Check `seed_everything`: a seed for Lightning, True for a random one, False or None for none.

    Raises:
        ConfigError: NumPy, which Lightning seeds as well, does not take it.
    """
    ok = seed is None or isinstance(seed, bool) or (is_count(seed, 0) and seed < 2**32)
    require(ok, "seed_everything", seed, "is out of range", f"set a whole number from 0 to {2**32 - 1}")
