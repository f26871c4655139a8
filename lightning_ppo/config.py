"""Settings of the PPO step: a frozen dataclass that checks itself. Rollout settings are in `rollout/config.py`."""

from dataclasses import dataclass
from typing import Literal

from lightning_ppo.algorithms.importance import CorrectionKind
from lightning_ppo.algorithms.kl import KLKind
from lightning_ppo.algorithms.losses import Level
from lightning_ppo.validation import check_choices, check_count, check_number, reject, require

NormalizeAdvantages = Literal["running", "batch", "chunk", "off"]


@dataclass(frozen=True)
class PPOConfig:
    """How a PPO step turns rewards into updates of the policy and of the critic.

    Args:
        gamma: Discount per generated token.
        gae_lambda: GAE lambda for advantages and returns, unless one of the next two is set.
        gae_lambda_value: Lambda of the critic's targets (VAPO's decoupled GAE); None means `gae_lambda`.
        gae_lambda_policy: Lambda of the advantages; None means `gae_lambda`.
        length_adaptive_alpha: Above 0, the advantages' lambda of a row with l tokens is 1 - 1/max(alpha * l, 1).
        bootstrap_truncated: Whether a response that hit the token limit continues with the critic's value of the state
            after its last token instead of ending with 0.
        normalize_advantages: `running` centres on the mean of earlier steps and scales by this step's deviation about
            it (one backward, independent of the chunking); `batch` whitens over the whole step (exact under any
            chunking, at the price of a second backward when a step has several chunks); `chunk` whitens each chunk by
            itself, so that chunk boundaries change the gradient; `off` leaves advantages as they are.
        running_mean_decay: Decay of the mean that `running` centres on.
        clip_eps: PPO clip range: the ratio counts down to 1 - clip_eps.
        clip_eps_high: The ratio counts up to 1 + clip_eps_high; None means `clip_eps`.
        dual_clip: Above 1, bounds the loss of negative advantages at dual_clip * |A|; None switches it off.
        loss_level: `token` averages over all trained tokens of the step, `sequence` over the rows' token means.
        ppo_epochs: Passes of the policy over the step; above 1 needs full-batch mode.
        policy_minibatches: Shuffled policy updates per pass; above 1 needs full-batch mode.
        old_logprobs: `recompute` takes the trainer's log-probs before the update as the ratio's denominator, `rollout`
            those that the engine reported.
        importance_correction: Weights for what another policy or engine sampled, needed whenever rollouts can be older
            than the policy: `none`; `token`, w = exp(old - rollout); `truncated`, w clamped to the bounds; `sequence`,
            the geometric mean of w over the response, clamped; `icepop`, w where within the bounds, else 0;
            `sequence_mask`, w in responses whose geometric mean is within the bounds, else 0.
        importance_clip_max: Upper bound of the weights; None means 2. Not read by `none` and `token`.
        importance_clip_min: Lower bound of the weights; None means 0. `icepop` and `sequence_mask` need one above 0.
        kl_placement: Where the KL to the reference policy is charged: `none`, `reward` or `loss`.
        kl_coef: Weight of that KL.
        kl_type: KL estimator: k1 (unbiased, signed), k2 (squared) or k3 (unbiased, non-negative).
        entropy_coef: Weight of the entropy bonus; 0 switches it off.
        truncated_responses: What happens to a response that hit the token limit: `keep` trains on it as it is, `mask`
            excludes it from both losses, `penalize` subtracts `truncation_penalty` from its reward.
        truncation_penalty: What `penalize` subtracts.
        max_grad_norm: Clip the policy's global gradient norm at this; None leaves it.
        critic_warmup_steps: PPO steps in which only the critic is trained.
        critic_ppo_epochs: Passes of the critic over the step.
        critic_minibatches: Shuffled critic updates per pass.
        value_clip_eps: Clip range of the value loss around the old values; None switches it off.
        value_loss_scale: Factor on the value loss.
        max_critic_grad_norm: Clip the critic's global gradient norm at this; None leaves it.
        micro_batch_tokens: Most padded tokens in one forward.
        micro_batch_overhead_tokens: What a forward costs whatever its size, in tokens. Rows are sorted by length and
            split where padding would cost more: 0 pads least, a large number fills every forward.
    """

    gamma: float = 1.0
    gae_lambda: float = 1.0
    gae_lambda_value: float | None = None
    gae_lambda_policy: float | None = None
    length_adaptive_alpha: float = 0.0
    bootstrap_truncated: bool = False
    normalize_advantages: NormalizeAdvantages = "running"
    running_mean_decay: float = 0.9
    clip_eps: float = 0.2
    clip_eps_high: float | None = None
    dual_clip: float | None = None
    loss_level: Level = "token"
    ppo_epochs: int = 1
    policy_minibatches: int = 1
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    importance_correction: CorrectionKind = "none"
    importance_clip_max: float | None = None
    importance_clip_min: float | None = None
    kl_placement: Literal["none", "reward", "loss"] = "none"
    kl_coef: float = 0.0
    kl_type: KLKind = "k3"
    entropy_coef: float = 0.0
    truncated_responses: Literal["keep", "mask", "penalize"] = "keep"
    truncation_penalty: float = 1.0
    max_grad_norm: float | None = 1.0
    critic_warmup_steps: int = 0
    critic_ppo_epochs: int = 1
    critic_minibatches: int = 1
    value_clip_eps: float | None = None
    value_loss_scale: float = 1.0
    max_critic_grad_norm: float | None = 1.0
    micro_batch_tokens: int = 4096
    micro_batch_overhead_tokens: int = 128

    def __post_init__(self) -> None:
        """Reject bad values with one line each."""
        check_choices(self)
        for name in ("gamma", "gae_lambda"):
            check_number(name, getattr(self, name), 0, 1)
        for name in ("gae_lambda_value", "gae_lambda_policy"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0, 1)
        for name in ("length_adaptive_alpha", "kl_coef", "entropy_coef", "truncation_penalty"):
            check_number(name, getattr(self, name), 0)
        check_number("running_mean_decay", self.running_mean_decay, 0, 1)
        require(self.running_mean_decay < 1, "running_mean_decay", 1, "never forgets", "set a number below 1")
        check_number("clip_eps", self.clip_eps, 0, 1, open_low=True)
        if self.clip_eps_high is not None:
            check_number("clip_eps_high", self.clip_eps_high, 0, open_low=True)
        if self.dual_clip is not None:
            check_number("dual_clip", self.dual_clip, 1, open_low=True)
        for name in ("ppo_epochs", "policy_minibatches", "critic_ppo_epochs", "critic_minibatches"):
            check_count(name, getattr(self, name))
        check_count("micro_batch_tokens", self.micro_batch_tokens)
        check_count("micro_batch_overhead_tokens", self.micro_batch_overhead_tokens, 0)
        check_count("critic_warmup_steps", self.critic_warmup_steps, 0)
        for name in ("max_grad_norm", "max_critic_grad_norm", "value_clip_eps"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0, open_low=True)
        check_number("value_loss_scale", self.value_loss_scale, 0, open_low=True)
        self._check_pairs()

    def _check_pairs(self) -> None:
        self._check_importance()
        if self.kl_placement == "none" and self.kl_coef > 0:
            raise reject(
                "kl_coef", self.kl_coef, "has no effect with kl_placement=none", "set kl_placement=reward or loss"
            )
        if self.kl_placement != "none" and self.kl_coef == 0:
            raise reject(
                "kl_coef", 0, f"switches kl_placement={self.kl_placement} off", "set kl_coef > 0, or kl_placement=none"
            )

        if self.truncated_responses == "mask" and self.bootstrap_truncated:
            raise reject(
                "bootstrap_truncated",
                True,
                "has no effect with truncated_responses=mask",
                "set truncated_responses=keep or penalize, or bootstrap_truncated=false",
            )

        if self.truncated_responses != "penalize" and self.truncation_penalty != PPOConfig.truncation_penalty:
            raise reject(
                "truncation_penalty",
                self.truncation_penalty,
                f"has no effect with truncated_responses={self.truncated_responses}",
                "set truncated_responses=penalize, or drop it",
            )

    def _check_importance(self) -> None:
        if self.importance_clip_max is not None:
            check_number("importance_clip_max", self.importance_clip_max, 0, open_low=True)
        if self.importance_clip_min is not None:
            check_number("importance_clip_min", self.importance_clip_min, 0)
        if self.old_logprobs == "rollout" and self.importance_correction != "none":
            raise reject(
                "importance_correction",
                self.importance_correction,
                "has no effect with old_logprobs=rollout (every weight is 1)",
                "set importance_correction=none, or old_logprobs=recompute",
            )
        kind, (low, high) = self.importance_correction, self.importance_bounds
        if kind in ("none", "token"):
            for name in ("importance_clip_max", "importance_clip_min"):
                why = f"has no effect with importance_correction={kind}"
                require(getattr(self, name) is None, name, getattr(self, name), why, "drop it")
            return
        if low > high:
            why, instead = f"is above importance_clip_max={high}", "set importance_clip_min <= importance_clip_max"
            raise reject("importance_clip_min", low, why, instead)
        if kind in ("icepop", "sequence_mask"):
            example = 0.5 if kind == "icepop" else 0.999
            why = f"is no lower bound for importance_correction={kind}"
            require(low > 0, "importance_clip_min", self.importance_clip_min, why, f"set it above 0, e.g. {example}")
            why = f"would drop what the policy itself sampled (weight 1) with importance_correction={kind}"
            require(low <= 1, "importance_clip_min", low, why, "set it <= 1")
            require(high >= 1, "importance_clip_max", high, why, "set it >= 1")

    @property
    def importance_bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the importance weights, for the corrections that have bounds."""
        low, high = self.importance_clip_min, self.importance_clip_max
        return 0.0 if low is None else low, 2.0 if high is None else high

    @property
    def updates_per_step(self) -> int:
        """Policy optimizer steps per PPO step."""
        return self.ppo_epochs * self.policy_minibatches

    @property
    def ratio_is_one(self) -> bool:
        """Whether every ratio of a step is identically 1, so that the training forward is the old forward."""
        return self.updates_per_step == 1 and self.old_logprobs == "recompute"
