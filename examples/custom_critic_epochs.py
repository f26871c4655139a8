"""A critic that decides by itself how long to train: hard rows twice per pass, and only while its loss falls.

Run it from the repository root: `python examples/custom_critic_epochs.py`.
"""
# ruff: noqa: D102

import lightning as L

import lightning_ppo as ppo
from lightning_ppo.hooks import CriticEpochEnd, call_hooks


class UntilTheLossStopsFalling(ppo.CriticEpochs):
    """Replaces the fixed number of passes; `begin`, `train_chunk` and `finish` are one optimizer step on some rows."""

    max_epochs, least_gain = 8, 0.02

    def minibatches(self, pl_module, batch, epoch):
        by_error = sorted(batch.rows, key=lambda row: float((row.returns - row.values).abs().mean()))
        return by_error[len(by_error) // 2 :], batch.rows

    def train(self, trainer, pl_module, batch):
        update, epochs, best = pl_module.critic_update, [], float("inf")
        while len(epochs) < self.max_epochs:
            stats = []
            for rows in self.minibatches(pl_module, batch, len(epochs)):
                update.begin()
                update.train_chunk(rows, f"critic epoch {len(epochs)} of PPO step {batch.ppo_step}")
                stats.append(update.finish())
            epochs.append(tuple(stats))
            call_hooks(trainer, CriticEpochEnd(len(epochs) - 1, epochs[-1]))
            if stats[-1].loss > (1 - self.least_gain) * best:  # summed over all ranks, so that they stop together
                break
            best = stats[-1].loss
        self.log("critic/epochs", float(len(epochs)), on_step=False, on_epoch=True, prog_bar=True, batch_size=1)
        return tuple(epochs)


if __name__ == "__main__":
    data = ppo.RolloutDataModule("examples/sort.jsonl", "examples/sloppy_sort/reward.py:exact_match")
    trainer = L.Trainer(strategy=ppo.StreamingPPOStrategy(), max_epochs=4, callbacks=[UntilTheLossStopsFalling()])
    trainer.fit(ppo.PPOModule("examples/tiny_policy"), data)
    print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items() if "critic" in name})
