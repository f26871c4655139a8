"""Everything that generates, on rank 0: engine, collector, Ray, remote rewards; started, driven and closed together."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_ppo.batch import Prompt, Trajectory
from lightning_ppo.rollout.claims import Claim
from lightning_ppo.rollout.collector import Collector
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.data_sets import DataSets
from lightning_ppo.rollout.engine import Engine, PolicySpec
from lightning_ppo.rollout.fingerprint import probe_request, probe_rows
from lightning_ppo.rollout.schedule_log import ScheduleLog

if TYPE_CHECKING:
    from lightning_ppo.rollout.ray.rewards import RemoteReward
    from lightning_ppo.rollout.ray.runtime import RayRuntime

Poll = Callable[[], None]


class Generators:
    """The generating side of a run. Every method blocks, with a deadline, and belongs to the trainer's thread.

    Args:
        engine: Generates; not started yet.
        collector: Runs the rollouts.
        data: What is asked of the engine; the reward is moved to `ray`'s workers if the settings say so.
        config: Settings.
        ray: Places servers and reward workers; None without.
        schedule: Writes the run's schedule.
    """

    def __init__(
        self,
        engine: Engine,
        collector: Collector,
        data: DataSets,
        config: RolloutConfig,
        ray: "RayRuntime | None",
        schedule: ScheduleLog,
    ) -> None:
        self.collector = collector
        self._engine = engine
        self._data = data
        self._config = config
        self._ray = ray
        self._schedule = schedule
        self._remote_reward: RemoteReward | None = None
        self._has_rollouts = False

    def start(self, config_json: str, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Start Ray, reward workers and the engine, and have it serve the policy.

        Args:
            config_json: The Hugging Face config of the policy.
            weights: Its weights.
            policy_version: The version they are.

        Raises:
            EngineError: one of them did not come up within its deadline.
            ConfigError: the cluster cannot hold them.
            CheckpointError: a run is to be repeated that was recorded from a later step on only; nothing was started.
            RolloutError: a run is to be repeated that had another policy here.
        """
        self._schedule.check_start(policy_version)
        self.collector.open()
        if self._ray is not None:
            self._ray.start()
            if self._config.reward_workers > 0:
                from lightning_ppo.rollout.ray.rewards import RemoteReward

                workers, timeout_s = self._config.reward_workers, self._config.reward_timeout_s
                self._remote_reward = RemoteReward(self._ray, self._data.reward.source, workers, timeout_s)
                self._data.reward.run_by(self._remote_reward)
        self._engine.start(PolicySpec(config_json, self._data.max_context_tokens))
        self._send(weights, policy_version)

    def start_rollouts(self, ppo_step: int, policy_version: int) -> None:
        """Start generating for training."""
        self._has_rollouts = True
        self.collector.start(ppo_step, policy_version)
        self._schedule.start(ppo_step)

    def next_groups(self, poll: Poll, ppo_step: int, consumed: int) -> Claim:
        """Wait for the next chunk's groups; see `Collector.next_groups`."""
        claim = self.collector.next_groups(ppo_step, consumed, poll)
        return replace(claim, failures=replace(claim.failures, engine_restarts=self._engine.restarts))

    def refit(self, poll: Poll, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Have the engine serve new weights (none: just the number); `publish` lets rollouts of that version start."""
        if not self._config.in_flight_weight_updates or self._config.replay_schedule is not None:
            self.collector.drain(poll)
        self._send(weights, policy_version)

    def publish(self, policy_version: int) -> None:
        """Let rollouts of this version start; what was asked of the engine before it has not waited behind them."""
        self.collector.publish_version(policy_version)

    def probe(self, poll: Poll, policy_version: int) -> dict[str, Trajectory]:
        """Have every replica of the engine answer the same prompt; returns the answers by the replicas' names."""
        config = self._config
        prompt, longest = self._data.train[0], config.max_response_tokens
        request = probe_request(prompt, policy_version, config.temperature, longest)
        return probe_rows(request, self.collector.jobs.probe(request, self._config.timeout_s, poll))

    def sample(self, poll: Poll, prompts: Sequence[Prompt], namespace: str, num_samples: int) -> list[Trajectory]:
        """Sample responses outside of training, with the validation sampling settings.

        Raises:
            DataError: a prompt is longer than all of the data sets.
        """
        self._data.check_fit(prompts)
        return self.collector.jobs.sample(
            prompts,
            seed_namespace=namespace,
            num_samples=num_samples,
            sampling=self._config.validation_sampling(self._data.stop_token_ids),
            timeout_s=self._config.timeout_s,
            poll=poll,
        )

    def sleep(self, poll: Poll) -> None:
        """Take the engine off the training device; nothing is generated until the next `publish`."""
        self.collector.drain(poll)
        self._engine.sleep()

    def wake(self) -> None:
        """Give the engine the device again; `refit` must follow."""
        self._engine.wake()

    def release(self, ppo_step: int, chunks: Sequence[tuple[int, ...]]) -> None:
        """Give the places of trained groups back, and write the step into the run's schedule."""
        records = self.collector.release([draw for chunk in chunks for draw in chunk])
        self._schedule.trained(ppo_step, chunks, records)

    def close(self) -> dict[str, Any] | None:
        """Stop everything; safe to call after a failure.

        Returns:
            State of the rollouts, if there were any.
        """
        state = self.collector.state_dict() if self._has_rollouts else None
        self.collector.close()
        for part in (self._engine, self._remote_reward, self._ray):
            if part is not None:
                part.close()
        return state

    def _send(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        self._engine.update_weights(self._schedule.watch(weights), policy_version)
        self._schedule.check_weights(policy_version)
