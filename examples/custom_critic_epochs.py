"""A critic that decides how long to train. From the repository root: `python examples/custom_critic_epochs.py`."""
# ruff: noqa: D102

import lightning as L

import lightning_ppo as ppo
from lightning_ppo.hooks import CriticEpochEnd, call_hooks


class UntilTheLossStopsFalling(ppo.CriticEpochs):
    """Replaces the fixed number of passes. Each pass trains on the half that the critic missed most, then on all."""

    max_epochs, least_gain = 8, 0.02

    def train(self, trainer, pl_module, batch):
        by_error = sorted(batch.rows, key=lambda row: float((row.returns - row.values).abs().mean()))
        update, epochs, best = pl_module.critic_update, [], float("inf")
        for epoch in range(self.max_epochs):
            stats = []
            for rows in (by_error[len(by_error) // 2 :], batch.rows):  # one optimizer step each
                update.begin()
                update.train_chunk(rows, f"critic epoch {epoch} of PPO step {batch.ppo_step}")
                stats.append(update.finish())
            epochs.append(tuple(stats))
            call_hooks(trainer, CriticEpochEnd(epoch, epochs[-1]))
            if stats[-1].loss > (1 - self.least_gain) * best:  # a mean over all ranks, so that they stop together
                break
            best = stats[-1].loss
        self.log("critic/epochs", float(len(epochs)), on_step=False, on_epoch=True, batch_size=1)
        return tuple(epochs)


if __name__ == "__main__":
    data = ppo.RolloutDataModule("examples/sort.jsonl", "examples/sloppy_sort/reward.py:exact_match")
    trainer = L.Trainer(strategy=ppo.StreamingPPOStrategy(), max_epochs=3, callbacks=[UntilTheLossStopsFalling()])
    trainer.fit(ppo.PPOModule("examples/tiny_policy"), data)
    print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items() if "critic" in name})
