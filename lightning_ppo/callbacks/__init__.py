"""Callbacks that are in charge of the phases of a PPO step."""
