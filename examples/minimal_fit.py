"""The smallest run: a tiny policy learns to sort under streaming PPO with a critic, on a CPU.

Run it from the repository root: `python examples/minimal_fit.py`.
"""
# ruff: noqa: D103

import lightning as L

import lightning_ppo as ppo


def reward(prompt, response, answer):  # any callable; async callables and reward models too
    return float(response.strip() == answer)


module = ppo.PPOModule(policy="examples/tiny_policy")
data = ppo.RolloutDataModule("examples/sort.jsonl", reward=reward)
trainer = L.Trainer(strategy=ppo.StreamingPPOStrategy(), max_epochs=60)
trainer.fit(module, data)
