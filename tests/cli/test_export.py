"""Exported folders load with transformers alone and compute the same; what does not fit is refused in one line."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

import lightning_ppo as ppo
from lightning_ppo.errors import CheckpointError, ConfigError
from lightning_ppo.export import export_checkpoint, read_checkpoint
from lightning_ppo.testing import CHARACTERS, char_tokenizer


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    config = LlamaConfig(
        vocab_size=len(CHARACTERS),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=request.param,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(path)
    char_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def trained(folder):
    """A module whose weights are not those of its folder any more."""
    module = ppo.PPOModule(folder)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))
        for model in (module.policy, module.critic):
            model.completed_steps.fill_(7)
    return module


def save(module, path, *, folder=None, **changes):
    """Write a checkpoint; with `folder` it says the architecture and the tokenizer's folder itself."""
    ours = {"ppo_step": 7, "policy_version": 7}
    if folder is not None:
        ours |= {
            "policy_config": module.policy.model.config.to_json_string(use_diff=False),
            "critic_config": module.critic.model.config.to_json_string(use_diff=False),
            "generation_config": json.dumps({"eos_token_id": [1, 3], "max_length": 99}),
            "tokenizer": folder,
        }
    torch.save({"state_dict": module.state_dict(), "global_step": 7, "lightning_ppo": ours} | changes, path)
    return path


@pytest.mark.parametrize("says_architecture", [True, False])
def test_transformers_loads_both_and_computes_the_same(folder, trained, tmp_path, says_architecture):
    checkpoint = save(trained, tmp_path / "x.ckpt", folder=folder if says_architecture else None)
    export_checkpoint(checkpoint, tmp_path / "out", None if says_architecture else folder)
    ids = torch.arange(12).reshape(2, 6)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "out/policy")
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "out/critic")
    with torch.no_grad():
        torch.testing.assert_close(policy(ids).logits, trained.policy.model(ids).logits, rtol=0, atol=0)
        torch.testing.assert_close(critic(ids).logits, trained.critic.model(ids).logits, rtol=0, atol=0)
        torch.testing.assert_close(critic(ids).logits.shape, (2, 6, 1))
    for name in ("policy", "critic"):
        assert (tmp_path / "out" / name / "model.safetensors").is_file()
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / name)
        assert tokenizer("^ab=")["input_ids"] == char_tokenizer()("^ab=")["input_ids"]
    assert policy.generation_config.eos_token_id == ([1, 3] if says_architecture else 1)
    # the folder is an input again, head included
    again = ppo.PPOModule(str(tmp_path / "out/policy"), critic=str(tmp_path / "out/critic"))
    for name, tensor in trained.critic.model.state_dict().items():
        assert torch.equal(again.critic.model.state_dict()[name], tensor)


def test_parts_of_different_steps_are_refused(trained, tmp_path):
    trained.critic.completed_steps.fill_(6)
    with pytest.raises(CheckpointError, match=r"different PPO steps .*policy 7, critic 6"):
        read_checkpoint(save(trained, tmp_path / "x.ckpt"))


@pytest.mark.parametrize("content", ["text", "tensor", "foreign", "truncated", "code"])
def test_other_files_are_refused(trained, tmp_path, content):
    path = tmp_path / "x.ckpt"
    if content == "text":
        path.write_text("hello")
    elif content == "tensor":
        torch.save(torch.zeros(2), path)
    elif content == "foreign":
        torch.save({"state_dict": {}, "global_step": 1}, path)
    elif content == "code":
        torch.save({"state_dict": {}, "global_step": 1, "lightning_ppo": CheckpointError}, path)
    else:
        save(trained, path)
        path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match=r"is no checkpoint of lightning_ppo \(.*\); give one") as caught:
        export_checkpoint(path, tmp_path / "out", str(tmp_path))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_missing_file_and_used_folder_are_refused(folder, trained, tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        export_checkpoint(tmp_path / "x.ckpt", tmp_path / "out")
    checkpoint = save(trained, tmp_path / "x.ckpt", folder=folder)
    (tmp_path / "out").mkdir()
    export_checkpoint(checkpoint, tmp_path / "out")
    with pytest.raises(ConfigError, match="is there already"):
        export_checkpoint(checkpoint, tmp_path / "out")


def test_a_folder_that_cannot_be_made_is_refused(folder, trained, tmp_path):
    checkpoint = save(trained, tmp_path / "x.ckpt", folder=folder)
    with pytest.raises(
        ConfigError, match=r"^directory=.*/x.ckpt/deep/out cannot be made \(Not a directory\); give another"
    ):
        export_checkpoint(checkpoint, checkpoint / "deep" / "out")


def test_policy_folder_is_asked_for_when_it_is_needed(folder, trained, policy_folder, tmp_path):
    checkpoint = save(trained, tmp_path / "x.ckpt")
    with pytest.raises(ConfigError, match="policy=None has no tokenizer; give the run's policy folder with --policy"):
        export_checkpoint(checkpoint, tmp_path / "out")
    moved = save(trained, tmp_path / "y.ckpt", folder=str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="gone has no tokenizer"):
        export_checkpoint(moved, tmp_path / "out")
    with pytest.raises(ConfigError, match="does not fit the architecture") as caught:
        export_checkpoint(checkpoint, tmp_path / "out", policy_folder)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.ckpt", "y.ckpt"]
    export_checkpoint(moved, tmp_path / "out", folder)
