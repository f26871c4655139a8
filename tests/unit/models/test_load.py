"""Folders: what is loaded, and the one line that says why not."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from lightning_ppo.errors import ConfigError
from lightning_ppo.models.critic import CriticModel
from lightning_ppo.models.load import load_critic, load_policy, load_tokenizer
from lightning_ppo.models.micro_batch import collate
from lightning_ppo.testing import char_tokenizer

FAMILIES = ["llama", "tied llama", "gpt2"]


@pytest.fixture(params=FAMILIES)
def policy_folder(request, kit, tmp_path):
    kit.causal_lm(request.param).save_pretrained(tmp_path)
    return tmp_path


def _edit_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    save_file(change(weights), folder / "model.safetensors", metadata={"format": "pt"})


def _rejected(load, folder, *parts):
    with pytest.raises(ConfigError) as caught:
        load(str(folder))
    message = str(caught.value)
    assert "\n" not in message
    assert "; " in message
    for part in (str(folder), *parts):
        assert part in message
    return message


def test_policy_round_trip(policy_folder):
    model = load_policy(str(policy_folder))
    wanted = AutoModelForCausalLM.from_pretrained(policy_folder)
    assert model.dtype == torch.float32
    for (name, ours), (_, theirs) in zip(model.named_parameters(), wanted.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_policy_dtype(policy_folder):
    assert load_policy(str(policy_folder), torch.bfloat16).dtype == torch.bfloat16


def test_critic_from_a_policy_folder_starts_at_zero(policy_folder, kit):
    critic = load_critic(str(policy_folder))
    values, final = CriticModel(critic)(collate(kit.ragged(3), range(3), torch.device("cpu")))
    assert not values.any()
    assert not final.any()
    # with the policy's backbone, and a head that can learn
    wanted = dict(AutoModelForCausalLM.from_pretrained(policy_folder).base_model.named_parameters())
    ours = dict(critic.base_model.named_parameters())
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    heads = [p for name, p in critic.named_parameters() if not name.startswith(critic.base_model_prefix)]
    assert heads
    assert all(p.requires_grad for p in heads)


@pytest.mark.parametrize("name", FAMILIES)
def test_critic_head_is_kept(kit, name, tmp_path):
    exported = kit.token_classifier(name)
    exported.save_pretrained(tmp_path)
    critic = load_critic(str(tmp_path))
    reloaded = AutoModelForTokenClassification.from_pretrained(tmp_path)
    for (key, ours), (_, theirs), (_, first) in zip(
        critic.named_parameters(), reloaded.named_parameters(), exported.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), key
        assert torch.equal(ours, first), key


@pytest.mark.parametrize("load", [load_policy, load_critic])
def test_an_incomplete_folder(load, kit, tmp_path):
    """A layer that is missing would be random, and training would look fine."""
    kit.causal_lm("llama").save_pretrained(tmp_path)
    _edit_weights(tmp_path, lambda w: {name: t for name, t in w.items() if "layers.1.mlp.up_proj" not in name})
    _rejected(load, tmp_path, "lacks", "layers.1.mlp.up_proj.weight")


def test_a_critic_is_no_policy(kit, tmp_path):
    """Its folder has no output layer."""
    kit.token_classifier("llama").save_pretrained(tmp_path)
    _rejected(load_policy, tmp_path, "lacks lm_head.weight")


@pytest.mark.parametrize("load", [load_policy, load_critic])
def test_weights_of_another_shape(load, kit, tmp_path):
    kit.causal_lm("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 32}))
    _rejected(load, tmp_path)


@pytest.mark.parametrize("load", [load_policy, load_critic])
def test_a_file_that_was_cut_off(load, kit, tmp_path):
    kit.causal_lm("llama").save_pretrained(tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    _rejected(load, tmp_path)


@pytest.mark.parametrize("load", [load_policy, load_critic])
def test_a_folder_without_weights(load, kit, tmp_path):
    kit.family("llama").save_pretrained(tmp_path)
    _rejected(load, tmp_path)


@pytest.mark.parametrize("load", [load_policy, load_critic])
def test_an_unknown_architecture(load, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    _rejected(load, tmp_path)


@pytest.mark.parametrize("load", [load_policy, load_critic])
def test_a_config_that_is_no_json(load, tmp_path):
    (tmp_path / "config.json").write_text("{")
    _rejected(load, tmp_path)


def test_an_architecture_that_has_no_language_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    _rejected(load_policy, tmp_path, "is no causal LM")


@pytest.mark.parametrize(
    ("load", "field"), [(load_policy, "policy"), (load_critic, "critic"), (load_tokenizer, "policy")]
)
def test_not_a_folder(load, field, tmp_path):
    message = _rejected(load, tmp_path / "nowhere", "is not a Hugging Face folder")
    assert message.startswith(f"{field}=")


def test_the_field_is_named():
    with pytest.raises(ConfigError, match=r"^reference=nowhere "):
        load_policy("nowhere", field="reference")


def test_tokenizer(kit, tmp_path):
    kit.causal_lm("llama").save_pretrained(tmp_path)
    _rejected(load_tokenizer, tmp_path, "tokenizer")
    char_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).eos_token_id == char_tokenizer().eos_token_id
    shutil.rmtree(tmp_path)
    _rejected(load_tokenizer, tmp_path / "nowhere", "no such folder")


def test_a_folder_of_a_tokenizer_alone(tmp_path):
    char_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink(missing_ok=True)
    assert load_tokenizer(str(tmp_path)).eos_token_id == char_tokenizer().eos_token_id


def test_a_model_is_no_folder(kit):
    with pytest.raises(ConfigError, match=r"^policy=LlamaForCausalLM is no path; save the model and give its folder$"):
        load_policy(kit.causal_lm("llama"))
