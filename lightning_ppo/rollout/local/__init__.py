"""The built-in engine, in a process of its own."""

from lightning_ppo.rollout.local.client import LocalEngine

__all__ = ["LocalEngine"]
