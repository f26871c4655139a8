"""One PPO step: chunks in, gradients accumulated; then policy update, refit, critic epochs, release, counters."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_ppo.batch import Chunk, StepBatch
from lightning_ppo.callbacks.critic_epochs import CriticEpochs
from lightning_ppo.callbacks.critic_warmup import CriticWarmup
from lightning_ppo.callbacks.refit import WeightRefit
from lightning_ppo.errors import CheckpointError, ConfigError, StepError
from lightning_ppo.hooks import (
    BeforePolicyStep,
    ChunkEnd,
    ChunkReady,
    PolicyUpdateEnd,
    PPOStepEnd,
    RolloutBatchComplete,
    call_hooks,
)
from lightning_ppo.rollout.failures import check_length
from lightning_ppo.step_metrics import critic_metrics, policy_metrics
from lightning_ppo.strategy import StreamingPPOStrategy
from lightning_ppo.timing import PhaseTimer
from lightning_ppo.updates.advantage_stage import AdvantageStage
from lightning_ppo.updates.critic_update import CriticUpdate
from lightning_ppo.updates.minibatches import shuffled_minibatches
from lightning_ppo.updates.normalization import AdvantageNormalizer, ChunkPlan
from lightning_ppo.updates.policy_update import PolicyStats, PolicyUpdate
from lightning_ppo.updates.step_state import StepState, StepTotals

if TYPE_CHECKING:
    from lightning_ppo.module import PPOModule

log = logging.getLogger(__name__)


@dataclass
class PPOStep:
    """Runs PPO steps for a module. Every method is called on every rank."""

    module: "PPOModule"
    strategy: StreamingPPOStrategy
    stage: AdvantageStage
    normalizer: AdvantageNormalizer
    policy_update: PolicyUpdate
    critic_update: CriticUpdate
    timer: PhaseTimer
    state: StepState | None = None
    _started_s: float = 0.0
    _half_done: int | None = None
    """The PPO step that has changed a model or the policy's version while the rest of it is not done."""

    def train_chunk(self, chunk: Chunk) -> dict[str, float] | None:
        """Accumulate one chunk; on the closing chunk complete the step.

        Args:
            chunk: This rank's share.

        Returns:
            The step's metrics when it is complete, else None.

        Raises:
            StepError: the step cannot be completed, or lost too many of its prompts; nothing was updated if no update
                had begun.
        """
        rollout = self.module.rollouts.rollout
        check_length(rollout.failures, chunk.ppo_step, chunk.groups_per_step, rollout.num_prompts_per_step)
        state = self._open(chunk) if chunk.index == 0 or self.state is None else self.state
        module, trainer = self.module, self.module.trainer
        self.timer.add("wait", chunk.wait_s)
        call_hooks(trainer, ChunkReady(chunk))
        if chunk.index == 0 and self._is_colocated:
            with self.timer.phase("sleep"):
                module.rollouts.sleep()
        rows = self.stage.run(chunk)
        state.add(chunk, rows)
        is_only_chunk = chunk.is_closing and chunk.index == 0
        plan = self.normalizer.plan(rows, is_only_chunk=is_only_chunk)
        where = f"PPO step {chunk.ppo_step} chunk {chunk.index}"
        if state.policy_is_trainable and module.ppo.updates_per_step == 1:
            self.strategy.residency.acquire("policy")
            with self.timer.phase("policy"):
                self.policy_update.train_chunk(rows, plan, where)
        call_hooks(trainer, ChunkEnd(chunk, rows))
        log.info(
            "train_pump: step %d chunk %d: %d group(s), %d/%d dispatched",
            chunk.ppo_step,
            chunk.index,
            len(chunk.draws),
            chunk.groups_dispatched,
            chunk.groups_per_step,
        )
        if chunk.is_closing:
            return self._close(state, plan)
        # the next chunk needs the critic first; loading it overlaps the wait
        self.strategy.residency.acquire("critic")
        return None

    def note_update(self) -> None:
        """Remember that a model or the policy's version has changed: from here on the step must be completed."""
        self._half_done = None if self.state is None else self.state.ppo_step

    def carried_over(self, completed_steps: int) -> dict[str, Any] | None:
        """Return what another `fit` without a checkpoint goes on with: the state of the advantage normaliser.

        Raises:
            CheckpointError: a step failed after an update, so that its rollouts would train a model twice.
        """
        if self._half_done is not None:
            raise CheckpointError(
                f"PPO step {self._half_done} failed after an update: the models are those of half a step; "
                "resume with ckpt_path=... from the last checkpoint"
            )
        return self.normalizer.state_dict() if completed_steps > 0 else None

    def abort(self) -> None:
        """Leave the last boundary as the resume point; safe at any time."""
        self.state = None
        self.policy_update.abort()
        self.critic_update.abort()
        self.strategy.abort_step()

    def _open(self, chunk: Chunk) -> StepState:
        module = self.module
        self.strategy.begin_step(chunk.ppo_step)
        trainable = module.callback(CriticWarmup).policy_is_trainable(module.trainer, module, chunk.ppo_step)
        self.state = StepState(chunk.ppo_step, module.policy_version, trainable, module.ppo.critic_warmup_steps)
        self.timer.reset()
        self._started_s = time.perf_counter() - chunk.wait_s
        self.normalizer.begin()
        if trainable and module.ppo.updates_per_step == 1:
            self.policy_update.begin()
        return self.state

    def _close(self, state: StepState, plan: ChunkPlan) -> dict[str, float]:
        module, trainer, strategy = self.module, self.module.trainer, self.strategy
        log.info(
            "train_pump: step %d closing on %d chunk(s), %d group(s)",
            state.ppo_step,
            len(state.chunks),
            sum(map(len, state.chunks)),
        )
        totals = state.totals(strategy.ranks)
        if totals.tokens == 0:
            raise StepError(
                f"PPO step {state.ppo_step} has no trained token (all {int(totals.rows)} responses are masked); "
                "nothing was updated"
            )
        batch = StepBatch(
            ppo_step=state.ppo_step,
            rows=tuple(state.rows),
            num_chunks=len(state.chunks),
            num_tokens=int(totals.tokens),
            num_sequences=int(totals.sequences),
        )
        call_hooks(trainer, RolloutBatchComplete(batch))
        policy_stats: list[list[PolicyStats]] = []
        if state.policy_is_trainable:
            with self.timer.phase("policy"):
                policy_stats = self._update_policy(batch, plan)
            call_hooks(trainer, PolicyUpdateEnd(state.ppo_step, tuple(chain.from_iterable(policy_stats))))
        module.policy_version += 1
        self.note_update()
        if not self._is_colocated:
            self._refit(state)
        strategy.residency.acquire("critic")
        with self.timer.phase("critic"):
            critic_stats = module.callback(CriticEpochs).train(trainer, module, batch)
            if critic_stats:
                # a callback may have had another model there
                strategy.residency.acquire("critic")
                self.critic_update.check_scores(batch.rows, f"the epochs of PPO step {state.ppo_step}")
        rates = module.learning_rates()
        for name, stats in (("policy", policy_stats), ("critic", critic_stats)):
            if stats:
                module.step_scheduler(name)
        if self._is_colocated:
            # the device belongs to the engine now; the policy's weights are sent from the host
            strategy.vacate_device()
            with self.timer.phase("wake"):
                module.rollouts.wake()
            self._refit(state)
        metrics = totals.metrics() | policy_metrics(policy_stats, module.ppo) | critic_metrics(critic_stats) | rates
        return self._complete(state, batch, totals, metrics)

    @property
    def _is_colocated(self) -> bool:
        return self.module.rollouts.rollout.colocated

    def _refit(self, state: StepState) -> None:
        module, version = self.module, self.module.policy_version
        callback = module.callback(WeightRefit)
        with self.timer.phase("refit"):
            callback.refit(module.trainer, module, version, weights_changed=state.policy_is_trainable)
        if module.rollouts.served_version != version:
            # no rollout of the next step would ever start
            raise ConfigError(
                f"trainer.callbacks={type(callback).__name__}.refit returned without publishing policy version "
                f"{version}; call super().refit, with weights_changed=False to send the number only"
            )

    def _update_policy(self, batch: StepBatch, plan: ChunkPlan) -> list[list[PolicyStats]]:
        module, update = self.module, self.policy_update
        self.strategy.residency.acquire("policy")
        epochs: list[list[PolicyStats]] = []
        for epoch in range(module.ppo.ppo_epochs):
            epochs.append([])
            seed = ("policy", module.seed, batch.ppo_step, epoch)
            for rows in shuffled_minibatches(batch.rows, module.ppo.policy_minibatches, seed):
                if module.ppo.updates_per_step > 1:
                    update.begin()
                    update.train_chunk(rows, plan, f"policy epoch {epoch} of PPO step {batch.ppo_step}")
                stats = update.finish(self.normalizer.coefficients(plan))
                epochs[-1] += [] if stats is None else [stats]
        if not any(epochs):
            raise StepError(
                f"no policy update of PPO step {batch.ppo_step} had a trained token of importance weight above 0, and "
                "nothing was updated; widen importance_clip_min and importance_clip_max, or let rollouts be less old"
            )
        update.check_scores(batch.rows, f"the update of PPO step {batch.ppo_step}")
        return epochs

    def _complete(
        self, state: StepState, batch: StepBatch, totals: StepTotals, trained: Mapping[str, float]
    ) -> dict[str, float]:
        module, trainer = self.module, self.module.trainer
        advantages = self.normalizer.moments
        self.normalizer.commit()
        module.rollouts.release(state.ppo_step, state.chunks)
        completed = state.ppo_step + 1
        module.policy.completed_steps.fill_(completed)
        module.critic.completed_steps.fill_(completed)
        self.state = None
        self.strategy.complete_step()
        self._half_done = None
        metrics = {
            **trained,
            "advantage/mean": advantages.mean,
            "advantage/std": advantages.variance**0.5,
            "rollout/retries": float(state.failures.retries),
            "rollout/dropped_prompts": float(state.failures.dropped_prompts),
            "rollout/engine_restarts": float(state.failures.engine_restarts),
            "step/chunks": float(batch.num_chunks),
            **self._times(totals),
            "time/generation_s": state.generation_s,
        }
        call_hooks(trainer, PPOStepEnd(completed, batch, metrics))
        return metrics

    def _times(self, totals: StepTotals) -> dict[str, float]:
        step_s = time.perf_counter() - self._started_s
        phases = self.timer.reset()
        times = {f"time/{name}_s": phases.get(name, 0.0) for name in ("wait", "value", "policy", "refit", "critic")}
        times.update({f"time/{name}_s": seconds for name, seconds in phases.items()})
        times["time/overhead_s"] = step_s - sum(times.values())
        times["time/step_s"] = step_s
        times["throughput/response_tokens_per_s"] = totals.response_tokens / step_s
        return times


def make_ppo_step(module: "PPOModule") -> PPOStep:
    """Wire models, updates and strategy together, once per fit."""
    strategy, ppo, timer = module.streaming_strategy, module.ppo, PhaseTimer()
    residency, ranks = strategy.residency, strategy.ranks
    residency.add("policy", module.policy, module.optimizer("policy"))
    residency.add("critic", module.critic, module.optimizer("critic"))
    if module.reference is not None:
        residency.add("reference", module.reference)

    def step_policy() -> None:
        call_hooks(module.trainer, BeforePolicyStep(module.optimizer("policy")))
        strategy.step_optimizer(module.optimizer("policy"))
        step.note_update()

    def step_critic() -> None:
        strategy.step_optimizer(module.optimizer("critic"))
        step.note_update()

    def shared(model: nn.Module) -> tuple[Any, ...]:
        return strategy.accumulator(model.parameters()), ppo, ranks, residency, module.manual_backward

    step = PPOStep(
        module=module,
        strategy=strategy,
        stage=AdvantageStage(module.policy, module.critic, module.reference, ppo, residency, timer),
        normalizer=AdvantageNormalizer(ppo.normalize_advantages, ppo.running_mean_decay, ranks),
        policy_update=PolicyUpdate(module.policy, *shared(module.policy), step_policy),
        critic_update=CriticUpdate(module.critic, *shared(module.critic), step_critic),
        timer=timer,
    )
    return step
