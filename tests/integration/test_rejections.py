"""What is refused when a run is set up: one line each, before the engine is started."""

import re

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_ppo as ppo
from lightning_ppo.checks import check_algorithm, check_context
from lightning_ppo.errors import CheckpointError, ConfigError, DataError
from lightning_ppo.rollout.tail import check_alignment, group_alignment
from lightning_ppo.testing import CHARACTERS, char_tokenizer

ONE_LINE = re.compile(r"^[\w.]+=\S[^\n]*; [^;\n]+$")


def assert_refused(run, starts_with, fit=None, error=ConfigError):
    with pytest.raises(error) as caught:
        (fit or run.fit)()
    message = str(caught.value)
    assert message.startswith(starts_with), message
    assert ONE_LINE.match(message), message
    assert run.fake.spec is None
    assert run.fake.requests == []
    return message


# ---------------------------------------------------------------- trainer


@pytest.mark.parametrize(
    ("settings", "starts_with"),
    [
        # Lightning has an error of its own for the next two; ours comes first and says what to set
        ({"accumulate_grad_batches": 4}, "trainer.accumulate_grad_batches=4 "),
        ({"gradient_clip_val": 1.0}, "trainer.gradient_clip_val=1.0 "),
        ({"max_steps": 10}, "trainer.max_steps=10 "),
        ({"fast_dev_run": True}, "trainer.fast_dev_run=True "),
        ({"fast_dev_run": 3}, "trainer.fast_dev_run=3 "),
        ({"precision": "bf16-true"}, "trainer.precision=bf16-true "),
        ({"precision": "64-true"}, "trainer.precision=64-true "),
        ({"precision": "16-true"}, "trainer.precision=16-true "),
        ({"limit_train_batches": 1}, "trainer.limit_train_batches=1 "),
        ({"limit_train_batches": 2}, "trainer.limit_train_batches=2 "),
        ({"limit_train_batches": 0.5}, "trainer.limit_train_batches=0.5 "),
        ({"overfit_batches": 1}, "trainer.overfit_batches=1 "),
        ({"val_check_interval": 1}, "trainer.val_check_interval=1 "),
        ({"val_check_interval": 2}, "trainer.val_check_interval=2 "),
        ({"val_check_interval": 0.5}, "trainer.val_check_interval=0.5 "),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, "trainer.val_check_interval=4 "),
        ({"reload_dataloaders_every_n_epochs": 1}, "trainer.reload_dataloaders_every_n_epochs=1 "),
    ],
)
@pytest.mark.filterwarnings("ignore:You have turned on `Trainer\\(val_check_interval")
def test_trainer_settings(make_run, settings, starts_with):
    assert_refused(make_run(1, **settings), starts_with)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ppo.PPOModule("nowhere", ppo={"gamma": 1}),
            "ppo={'gamma': 1} is no PPOConfig; pass ppo=PPOConfig(...)",
        ),
        (
            lambda: ppo.RolloutDataModule([], len, rollout={"seed": 1}),
            "rollout={'seed': 1} is no RolloutConfig; pass rollout=RolloutConfig(...)",
        ),
        (lambda: ppo.RolloutDataModule([], len, ray=None), "ray=None is no RayConfig; pass ray=RayConfig(...)"),
        (
            lambda: ppo.RolloutConfig(failures={"drop": "skip"}),
            "failures={'drop': 'skip'} is no FailureConfig; pass failures=FailureConfig(...)",
        ),
        (lambda: ppo.RolloutConfig(sampler=None), "sampler=None is unknown; choose one of in_order, ready_first, "),
        (lambda: ppo.RolloutConfig(num_prompts_per_step="4"), "num_prompts_per_step='4' is not a valid count; "),
    ],
)
def test_settings_of_another_type(make, message):
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value).startswith(message)
    assert ONE_LINE.match(str(caught.value))


def test_limit_train_batches_of_zero(make_run):
    """Lightning would return from `fit` without a word."""
    assert_refused(make_run(1, limit_train_batches=0), "trainer.limit_train_batches=0 ")


def test_fp16_mixed_precision(make_run):
    run = make_run(1)
    # on a CPU Lightning itself turns 16-mixed into bf16-mixed
    run.trainer.strategy.precision_plugin.precision = "16-mixed"
    message = assert_refused(run, "trainer.precision=16-mixed ")
    assert "loss scale" in message


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_supported_precisions(make_run, precision):
    run = make_run(1, precision=precision)
    run.fit()
    assert run.trainer.global_step == 1


@pytest.mark.filterwarnings("ignore:`.fit\\(ckpt_path=None\\)` was called without a model")
@pytest.mark.filterwarnings('ignore:.fit\\(ckpt_path="last"\\) is set')
def test_on_exception_checkpoint(make_run, tmp_path):
    """It saves in the middle of a step, and `fit` would then resume from there by itself."""
    run = make_run(1, callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)
    assert_refused(run, "trainer.callbacks=OnExceptionCheckpoint ")


def trainer_with(strategy, tmp_path):
    return L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )


@pytest.mark.parametrize(("strategy", "name"), [("auto", "SingleDeviceStrategy"), ("ddp", "DDPStrategy")])
def test_another_strategy(make_run, tmp_path, strategy, name):
    run = make_run(1)
    trainer = trainer_with(strategy, tmp_path)
    message = assert_refused(run, f"strategy={name} ", lambda: trainer.fit(run.module, run.data))
    assert message.endswith("set strategy=StreamingPPOStrategy()")


def test_strategy_by_name(make_run, tmp_path):
    run = make_run(1)
    trainer = trainer_with("streaming_ppo", tmp_path)
    trainer.fit(run.module, run.data)
    assert trainer.global_step == 1


@pytest.mark.parametrize("what", ["fit", "validate", "predict"])
def test_loaders_instead_of_a_datamodule(make_run, what):
    run = make_run(1)
    assert_refused(run, "datamodule=NoneType ", lambda: getattr(run.trainer, what)(run.module, [[1], [2]]))


def test_another_datamodule(make_run):
    class Other(L.LightningDataModule):
        def train_dataloader(self):
            return [1]

    run = make_run(1)
    assert_refused(run, "datamodule=Other ", lambda: run.trainer.fit(run.module, Other()))


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_dataloader_for_training(make_run, workers):
    """Its workers would fetch chunks before the refit, and Lightning would shuffle and split it over ranks."""
    run = make_run(1)
    loaders = [DataLoader([1, 2], num_workers=workers)]
    kind = type("Mine", (type(run.data),), {"train_dataloader": lambda self: loaders[0]})
    run.data.__class__ = kind
    assert_refused(run, f"train_dataloader=DataLoader(num_workers={workers}) ")


def test_wrapped_chunk_loader_is_welcome(make_run):
    seen = []

    class Spy:
        def __init__(self, loader):
            self.loader = loader

        def __iter__(self):
            for chunk in self.loader:
                seen.append(chunk.index)
                yield chunk

    run = make_run(2)
    base = type(run.data)
    kind = type("Mine", (base,), {"train_dataloader": lambda self: Spy(base.train_dataloader(self))})
    run.data.__class__ = kind
    run.fit()
    assert seen == [0, 0]


# ---------------------------------------------------------------- settings that do not fit together


STREAMING = {"min_groups_for_streaming_train": 2}


def skip(**budgets):
    return {"failures": ppo.FailureConfig(drop="skip", **budgets)}


@pytest.mark.parametrize(
    ("settings", "rollout", "starts_with"),
    [
        ({"ppo_epochs": 2}, STREAMING, "ppo_epochs=2 "),
        ({"policy_minibatches": 2}, STREAMING, "policy_minibatches=2 "),
        ({}, {"max_lookahead_versions": 1}, "max_lookahead_versions=1 "),
        ({}, {"sampler": "windowed"}, "sampler=windowed "),
        ({"critic_warmup_steps": 3}, {"warmup_generation_lead_steps": 2}, "warmup_generation_lead_steps=2 "),
        ({}, {"warmup_generation_lead_steps": 2}, "warmup_generation_lead_steps=2 "),
        ({"old_logprobs": "rollout"}, STREAMING, "normalize_advantages=running "),
        ({"old_logprobs": "rollout", "normalize_advantages": "batch"}, STREAMING, "normalize_advantages=batch "),
        ({"policy_minibatches": 9}, {}, "policy_minibatches=9 "),
        ({"critic_minibatches": 9}, {}, "critic_minibatches=9 is more than the 8 rows per rank; set at most 8"),
        (
            {"critic_minibatches": 5},
            skip(max_dropped_prompts=2),
            "critic_minibatches=5 is more than the 4 rows per rank ",
        ),
        (
            {"policy_minibatches": 5},
            skip(max_consecutive_dropped_prompts=1),
            "policy_minibatches=5 is more than the 4 ",
        ),
        ({"policy_minibatches": 5}, skip(max_dropped_prompts=99), "policy_minibatches=5 is more than the 4 rows "),
        (
            {"policy_minibatches": 3},
            skip(max_dropped_prompts=99, min_step_fraction=0.0),
            "policy_minibatches=3 is more than the 2 rows ",
        ),
        ({}, {"max_response_tokens": 64}, "max_response_tokens=64 "),
    ],
)
def test_settings_that_do_not_fit(make_run, settings, rollout, starts_with):
    assert_refused(make_run(1, ppo_settings=settings, rollout=rollout), starts_with)


@pytest.mark.parametrize(
    ("settings", "rollout"),
    [
        ({"ppo_epochs": 2, "policy_minibatches": 2}, {}),
        ({"importance_correction": "truncated"}, {"max_lookahead_versions": 1, **STREAMING}),
        ({"importance_correction": "token"}, {"sampler": "windowed", **STREAMING}),
        ({}, {"sampler": "ready_first", **STREAMING}),
        ({}, {"sampler": "windowed", "max_trajectory_age_steps": 0}),
        # the ratio's denominator is the old policy itself
        ({"old_logprobs": "rollout"}, {"max_lookahead_versions": 1}),
        ({"old_logprobs": "rollout", "normalize_advantages": "chunk"}, STREAMING),
    ],
)
def test_settings_that_do_fit(settings, rollout):
    sizes = {"num_prompts_per_step": 4, "min_groups_for_streaming_train": 4}
    check_algorithm(ppo.PPOConfig(**settings), ppo.RolloutConfig(**{**sizes, **rollout}))


@pytest.mark.parametrize(
    ("prompts", "generations", "ranks", "align"), [(3, 1, 2, 2), (4, 3, 8, 8), (6, 2, 8, 4), (10, 4, 3, 3)]
)
def test_step_that_does_not_divide_over_ranks(prompts, generations, ranks, align):
    assert group_alignment(generations=generations, dp_sizes=(ranks,)) == align
    with pytest.raises(ConfigError) as caught:
        check_alignment(prompts, align)
    message = str(caught.value)
    assert message.startswith(f"num_prompts_per_step={prompts} ")
    assert message.endswith(f"; set a multiple of {align}")
    assert ONE_LINE.match(message)


def test_context_that_leaves_no_room_for_a_prompt():
    rollout = ppo.RolloutConfig(max_response_tokens=32)
    check_context(33, rollout)
    check_context(None, rollout)
    with pytest.raises(ConfigError, match="max_response_tokens=32 leaves no room"):
        check_context(32, rollout)


# ---------------------------------------------------------------- models


def other_vocabulary(folder):
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return str(folder)


def test_models_that_do_not_fit(policy_folder, tmp_path):
    other = other_vocabulary(tmp_path / "other")
    with pytest.raises(
        ConfigError, match=rf"^critic=\S+ has 50 tokens, the policy {len(CHARACTERS)}; give one of the same vocabulary$"
    ):
        ppo.PPOModule(policy_folder, critic=other)
    with pytest.raises(ConfigError, match=r"^reference=\S+ is not used with kl_placement=none; "):
        ppo.PPOModule(policy_folder, reference=policy_folder)
    for name in ("policy", "critic", "tokenizer"):
        folders = {"policy": policy_folder, name: str(tmp_path / "nowhere")}
        with pytest.raises(ConfigError, match=rf"^{name}=\S+nowhere [^\n]+; [^\n]+$"):
            ppo.PPOModule(**folders)


def test_reference_of_another_vocabulary(policy_folder, tmp_path):
    other = other_vocabulary(tmp_path / "other")
    config = ppo.PPOConfig(kl_placement="loss", kl_coef=0.1)
    with pytest.raises(ConfigError, match=rf"^reference=\S+ has 50 tokens, the policy {len(CHARACTERS)}; "):
        ppo.PPOModule(policy_folder, reference=other, ppo=config)


# ---------------------------------------------------------------- rewards, recorded chunks


def asks_for_more(prompt, response, answer):
    return 0.0


def by_position(prompt, response, /):
    return 0.0


@pytest.mark.parametrize(
    ("reward", "starts_with"),
    [
        (asks_for_more, "reward=asks_for_more asks for answer, "),
        (by_position, "reward=by_position has the positional-only parameter prompt"),
        ("no_such_module:reward", "reward=no_such_module:reward cannot be imported"),
        ("math:no_such_function", "reward=math:no_such_function does not exist"),
        ("math", "reward=math is no import path"),
        ("no/such/file.py:reward", "reward=no/such/file.py:reward does not exist"),
        (3, "reward=3 is not callable"),
    ],
)
def test_rewards(make_run, reward, starts_with):
    assert_refused(make_run(1, reward=reward), starts_with)


def test_reward_column_that_validation_lacks(make_run):
    run = make_run(
        1, reward=asks_for_more, prompts=[{"prompt": "^a=", "answer": "a"}], validation_prompts=[{"prompt": "^b="}]
    )
    assert_refused(run, "reward=asks_for_more asks for answer, ")


def test_stop_tokens_that_the_policy_lacks(make_run):
    assert_refused(make_run(1, rollout={"stop_token_ids": (1, 42)}), "stop_token_ids=(1, 42) has [42], which ")
    make_run(1, rollout={"stop_token_ids": (1, 41)}).fit()


def test_recording_without_a_run_folder(make_run):
    run = make_run(1, rollout={"record_rollouts": True}, validation_prompts=[{"prompt": "^a="}])
    run.trainer.validate(run.module, run.data, verbose=False)
    run = make_run(1, rollout={"record_rollouts": True})
    assert_refused(run, "record_rollouts=True has no folder to write to; ")


def test_missing_chunk_record(make_run, tmp_path):
    run = make_run(1, rollout={"replay_chunks": str(tmp_path / "nowhere.jsonl")})
    assert_refused(run, "replay_chunks=", error=DataError)


@pytest.mark.parametrize("name", ["missing.jsonl", "missing"])
def test_missing_prompt_file(make_run, tmp_path, name):
    run = make_run(1, prompts=str(tmp_path / name))
    with pytest.raises(DataError) as caught:
        run.fit()
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert run.fake.spec is None


# ---------------------------------------------------------------- checkpoints


def test_checkpoint_of_other_prompts(make_run, tmp_path):
    run = make_run(1)
    run.fit()
    run.trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = make_run(2, prompts=[{"prompt": "^zz="}])
    with pytest.raises(
        CheckpointError, match="the prompts differ from those of the checkpoint; resume with the same data set"
    ):
        other.fit(tmp_path / "a.ckpt")
    assert other.fake.spec is None


def test_checkpoint_of_something_else(make_run, tmp_path):
    run = make_run(1)
    run.fit()
    run.trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    saved["state_dict"] = {"layer.weight": torch.zeros(1)}
    torch.save(saved, tmp_path / "b.ckpt")
    other = make_run(2)
    with pytest.raises(CheckpointError, match=r"^ckpt_path [^\n]*; resume from an intact checkpoint$"):
        other.fit(tmp_path / "b.ckpt")
    assert other.fake.spec is None


@pytest.mark.parametrize("what", ["fit", "validate"])
@pytest.mark.parametrize("content", [{"state_dict": {}, "global_step": 1, "pytorch-lightning_version": "2.6"}, {}, [1]])
def test_checkpoint_of_another_program(make_run, tmp_path, what, content):
    torch.save(content, tmp_path / "a.ckpt")
    run = make_run(1, validation_prompts=[{"prompt": "^a="}])
    go = getattr(run.trainer, what)
    message = f"ckpt_path={tmp_path / 'a.ckpt'} is no checkpoint of lightning_ppo (something else is in it); give one "
    assert_refused(
        run,
        message,
        lambda: go(run.module, run.data, ckpt_path=tmp_path / "a.ckpt", weights_only=True),
        CheckpointError,
    )
    assert_refused(run, f"ckpt_path={tmp_path} is a folder; ", lambda: run.fit(tmp_path), CheckpointError)


def test_module_from_a_checkpoint_of_another_program(policy_folder, tmp_path):
    torch.save({"state_dict": {}, "global_step": 1, "pytorch-lightning_version": "2.6"}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"^ckpt_path is no checkpoint of lightning_ppo \("):
        ppo.PPOModule.load_from_checkpoint(tmp_path / "a.ckpt", policy=policy_folder, weights_only=True)


def test_checkpoint_of_the_models_alone(make_run, tmp_path):
    run = make_run(1)
    run.fit()
    run.trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    other = make_run(2, validation_prompts=[{"prompt": "^a="}])
    with pytest.raises(
        CheckpointError, match=r"^ckpt_path holds models only \(save_weights_only=True\); resume from a"
    ):
        other.fit(tmp_path / "a.ckpt")
    assert other.fake.spec is None
    other.trainer.validate(other.module, other.data, ckpt_path=tmp_path / "a.ckpt", weights_only=True, verbose=False)


def test_nothing_is_refused_that_is_fine(make_run, tmp_path):
    """Settings next to the refused ones that do work."""
    run = make_run(
        2,
        callbacks=[ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_on_exception=True)],
        enable_checkpointing=True,
        limit_val_batches=1,
        limit_predict_batches=1,
        check_val_every_n_epoch=2,
        min_epochs=1,
        detect_anomaly=True,
        deterministic=True,
        inference_mode=False,
        validation_prompts=[{"prompt": "^a="}],
    )
    run.fit()
    assert run.trainer.global_step == 2


def test_tokenizer_with_more_tokens_than_the_policy(make_run, tmp_path):
    from lightning_ppo.testing import char_tokenizer

    tokenizer = char_tokenizer()
    tokenizer.add_tokens(["extra"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "config.json").write_text('{"model_type": "llama"}')
    run = make_run(1, module={"tokenizer": str(tmp_path / "tokenizer")})
    with pytest.raises(ConfigError, match=r"^tokenizer=43 is more tokens than the policy's 42; use the policy's own$"):
        run.fit()
    assert run.fake.spec is None
