"""Seeds that need no running generator: a stable hash of what they belong to."""

import hashlib


def hash_seed(*parts: object) -> int:
    """Hash names and numbers, of any size, to a seed that every generator takes.

    Args:
        parts: What the seed belongs to; their texts count.

    Returns:
        A whole number in [0, 2**63).
    """
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
