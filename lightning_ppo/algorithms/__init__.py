"""Pure functions on tensors: advantages, whitening, losses, KL, statistics. Imports nothing of the rest."""
