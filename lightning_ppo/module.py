"""PPOModule: a policy, a critic, and how a chunk of rollouts trains them."""

from collections.abc import Iterator
from typing import Any, cast

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ppo.batch import Chunk, Prompt
from lightning_ppo.callbacks.defaults import default_callbacks
from lightning_ppo.callbacks.phases import PHASES, AnyCallback, phase_callback
from lightning_ppo.callbacks.progress import use_ppo_progress_bar
from lightning_ppo.callbacks.refit import WeightRefit
from lightning_ppo.checkpoint import (
    KEY,
    architectures,
    at_boundary,
    check_can_go_on,
    check_fits_together,
    check_is_ours,
    check_same_models,
)
from lightning_ppo.checks import check_context, check_run
from lightning_ppo.config import PPOConfig
from lightning_ppo.errors import ConfigError
from lightning_ppo.models.critic import CriticModel
from lightning_ppo.models.load import check_vocabulary, load_critic, load_policy, load_tokenizer
from lightning_ppo.models.policy import PolicyModel
from lightning_ppo.optimizers import Makers, Optimizers, default_critic_optimizer, default_policy_optimizer
from lightning_ppo.ppo_step import PPOStep, make_ppo_step
from lightning_ppo.quiet import quiet_expected_warnings
from lightning_ppo.reporting import report
from lightning_ppo.rollout.datamodule import RolloutDataModule
from lightning_ppo.rollout.report import records, summary
from lightning_ppo.strategy import StreamingPPOStrategy
from lightning_ppo.updates.critic_update import CriticUpdate
from lightning_ppo.updates.policy_update import PolicyUpdate
from lightning_ppo.validation import check_kind, reject


class PPOModule(L.LightningModule):
    """A language-model policy and a separate critic under PPO.

    Args:
        policy: Hugging Face folder of the policy (a causal language model) and its tokenizer.
        critic: Hugging Face folder of the critic's backbone, or of an exported critic; None means the policy's folder
            with a value head that starts at zero.
        reference: Hugging Face folder of the frozen policy that a KL is charged against; None means the initial policy.
            Only used with `ppo.kl_placement`.
        tokenizer: Hugging Face folder of the tokenizer; None means the policy's folder.
        ppo: How a PPO step turns rewards into updates.
        policy_optimizer: Optimizer of the policy. None means AdamW, betas (0.9, 0.99), no weight decay, with a learning
            rate of 6e-4 up to a million parameters that falls inversely with the size, down to 1e-6.
        critic_optimizer: Optimizer of the critic. None means the same with 1e-3, down to 1e-5.
        policy_scheduler: Learning-rate schedule of the policy; one tick per PPO step that updates it.
        critic_scheduler: Learning-rate schedule of the critic; one tick per PPO step that trains it.

    Raises:
        ConfigError: a folder holds no such model or tokenizer, vocabularies differ, or a reference has no KL to serve.
    """

    def __init__(
        self,
        policy: str,
        critic: str | None = None,
        reference: str | None = None,
        tokenizer: str | None = None,
        ppo: PPOConfig = PPOConfig(),  # noqa: B008 - frozen
        policy_optimizer: OptimizerCallable | None = None,
        critic_optimizer: OptimizerCallable | None = None,
        policy_scheduler: LRSchedulerCallable | None = None,
        critic_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        check_kind("ppo", ppo, PPOConfig)
        self.automatic_optimization = False
        self.ppo = ppo
        self.tokenizer = load_tokenizer(tokenizer or policy, "tokenizer" if tokenizer else "policy")
        self.policy = PolicyModel(load_policy(policy))
        self.critic = CriticModel(load_critic(critic or policy, field="critic" if critic else "policy"))
        check_vocabulary(self.critic.model, self.policy.model, "critic", critic or policy)
        # in a tuple it is no submodule: the reference is never trained and never checkpointed
        self._frozen: tuple[PolicyModel, ...] = ()
        if ppo.kl_placement != "none":
            self._frozen = (PolicyModel(load_policy(reference or policy, field="reference")),)
            self._frozen[0].requires_grad_(False)
            check_vocabulary(self._frozen[0].model, self.policy.model, "reference", reference or policy)
        elif reference is not None:
            raise reject(
                "reference", reference, "is not used with kl_placement=none", "set ppo.kl_placement or drop it"
            )
        self._optimizers = Optimizers(
            {
                "policy": Makers(policy_optimizer or default_policy_optimizer, policy_scheduler),
                "critic": Makers(critic_optimizer or default_critic_optimizer, critic_scheduler),
            }
        )
        self.policy_version = 0
        """Version of the policy that the generators serve; +1 per PPO step."""
        self._step: PPOStep | None = None
        self._running_centre: dict[str, Any] | None = None

    # ------------------------------------------------------------------ for callbacks

    @property
    def rollouts(self) -> RolloutDataModule:
        """The data module: `refit`, `release`, `sample`. Its type was checked by `check_run`."""
        return cast(RolloutDataModule, self.trainer.datamodule)  # type: ignore[attr-defined]

    @property
    def streaming_strategy(self) -> StreamingPPOStrategy:
        """The strategy. Its type was checked by `check_run`."""
        return cast(StreamingPPOStrategy, self.trainer.strategy)

    @property
    def seed(self) -> int:
        """Seed of this run's shuffles."""
        return self.rollouts.run_seed

    @property
    def policy_update(self) -> PolicyUpdate:
        """The policy's begin, train_chunk, finish, abort."""
        return self._ppo_step().policy_update

    @property
    def critic_update(self) -> CriticUpdate:
        """The critic's begin, train_chunk, finish, abort."""
        return self._ppo_step().critic_update

    @property
    def reference(self) -> PolicyModel | None:
        """The frozen reference policy, if a KL is charged."""
        return self._frozen[0] if self._frozen else None

    def callback(self, kind: type[AnyCallback]) -> AnyCallback:
        """Return the trainer's callback of this kind."""
        return phase_callback(self.trainer, kind)

    def optimizer(self, name: str) -> Optimizer:
        """Return the torch optimizer of `policy` or `critic`."""
        return self._optimizers.get(name)

    def step_scheduler(self, name: str) -> None:
        """Tick the learning-rate schedule of `policy` or `critic`, if it has one."""
        self._optimizers.step_scheduler(name)

    def learning_rates(self) -> dict[str, float]:
        """Return the current learning rates by metric name."""
        return self._optimizers.learning_rates()

    def export_policy(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's weights by their Hugging Face names."""
        for name, tensor in self.policy.model.state_dict().items():
            yield name, tensor.detach()

    # ------------------------------------------------------------------ set-up

    @override
    def configure_callbacks(self) -> list[Callback]:
        quiet_expected_warnings()
        use_ppo_progress_bar(self.trainer)
        check_run(self.trainer, self)
        return default_callbacks(self.trainer)

    @override
    def setup(self, stage: str) -> None:
        for kind in PHASES:
            self.callback(kind)
        rollouts = self.rollouts
        context = getattr(self.policy.model.config, "max_position_embeddings", None)
        check_context(context, rollouts.rollout)
        self.policy.temperature = rollouts.rollout.temperature
        if self.reference is not None:
            self.reference.temperature = rollouts.rollout.temperature
        self.streaming_strategy.add_closer(rollouts.close)
        vocabulary = self.policy.model.config.vocab_size
        rollouts.prepare(self.tokenizer, context or 2**16, vocabulary, self.ppo.critic_warmup_steps)

    @override
    def configure_optimizers(self) -> Any:
        return self._optimizers.build({"policy": self.policy, "critic": self.critic})

    @override
    def on_fit_start(self) -> None:
        if self._step is not None and self._running_centre is None:
            self._running_centre = self._step.carried_over(self.trainer.global_step)
        self._step = make_ppo_step(self)
        self._stop_after_step = False
        if self._running_centre is not None:
            self._step.normalizer.load_state_dict(self._running_centre)
            self._running_centre = None
        self._start_engine()

    @override
    def on_train_start(self) -> None:
        # an epoch of unknown length validates at its end, which the closing chunk announces
        self.trainer.val_check_batch = float("inf")
        self.rollouts.start_rollouts(self.trainer.global_step, self.policy_version)

    def _start_engine(self) -> None:
        config_json = self.policy.model.config.to_json_string(use_diff=False)
        if self.rollouts.start_engine(config_json, self.export_policy(), self.policy_version):
            self.callback(WeightRefit).verify(self, self.policy_version)

    # ------------------------------------------------------------------ training

    @override
    def training_step(self, chunk: Chunk, batch_idx: int) -> None:
        step = self._ppo_step()
        try:
            metrics = step.train_chunk(chunk)
        except BaseException:
            step.abort()
            raise
        if metrics is not None:
            report(self.trainer, metrics, chunk.ppo_step)

    @override
    def on_train_batch_end(self, outputs: Any, batch: Chunk, batch_idx: int) -> None:
        # callbacks come first, so that ModelCheckpoint has asked for its save already
        trainer = self.trainer
        self.streaming_strategy.flush_saves()
        # Timer and others ask to stop between any two batches; a PPO step that has begun is completed first
        if self.streaming_strategy.open_step is not None:
            self._stop_after_step = self._stop_after_step or trainer.should_stop
            trainer.should_stop = False
        elif self._stop_after_step:
            self._stop_after_step, trainer.should_stop = False, True

    @override
    def log(self, *args: Any, **kwargs: Any) -> None:
        """As Lightning's; a chunk has no batch size that Lightning could find, so that every call counts once."""
        super().log(*args, **{**kwargs, "batch_size": kwargs.get("batch_size") or 1})

    @override
    def on_validation_model_zero_grad(self) -> None:
        """Do nothing: no gradient is ever left in `.grad`."""

    # ------------------------------------------------------------------ validation and prediction

    on_validation_start = on_predict_start = _start_engine

    @override
    def validation_step(self, batch: list[Prompt], batch_idx: int) -> None:
        rows = self.rollouts.sample(batch, namespace="validation")
        metrics = {f"val/{name}": value for name, value in summary(rows).items()}
        self.log_dict(metrics, on_step=False, on_epoch=True, batch_size=len(rows))

    @override
    def predict_step(self, batch: list[Prompt], batch_idx: int) -> list[dict[str, Any]]:
        rows = self.rollouts.sample(batch, namespace="predict")
        return records(batch, rows)

    # ------------------------------------------------------------------ checkpoints

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        steps = int(checkpoint["global_step"])
        if steps > 0 and self.trainer.state.fn == TrainerFn.FITTING:
            at_boundary(checkpoint["loops"]["fit_loop"], steps)
        checkpoint[KEY] = {
            "ppo_step": steps,
            "policy_version": self.policy_version,
            "prompts": self.rollouts.position(steps if self.streaming_strategy.open_step is None else None),
            "optimizers": self._optimizers.kinds(),
            **architectures(self.policy.model, self.critic.model, self.tokenizer),
        }
        if self._step is not None:
            checkpoint[KEY]["running_centre"] = self._step.normalizer.state_dict()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_is_ours(checkpoint)
        check_fits_together(checkpoint["state_dict"], int(checkpoint["global_step"]))
        # `load_from_checkpoint` takes weights, and has no trainer
        if self._trainer is not None:
            if self._trainer.state.fn == TrainerFn.FITTING:
                check_can_go_on(checkpoint)
            check_same_models(checkpoint["state_dict"], self.state_dict())
            self.rollouts.load_position(checkpoint[KEY]["prompts"])
            self._optimizers.expect(checkpoint[KEY].get("optimizers", {}))
        self.policy_version = int(checkpoint[KEY]["policy_version"])
        self._running_centre = checkpoint[KEY].get("running_centre")

    # ------------------------------------------------------------------

    def _ppo_step(self) -> PPOStep:
        if self._step is None:
            raise ConfigError("PPOModule has no running fit; call Trainer.fit first")
        return self._step
