"""Plain Hugging Face folders of the policy and the critic from a checkpoint."""

import json
import os
import pickle
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

from lightning_ppo.checkpoint import KEY, check_fits_together, check_is_ours, not_a_file
from lightning_ppo.errors import ConfigError
from lightning_ppo.models.load import load_tokenizer
from lightning_ppo.quiet import quiet_loading
from lightning_ppo.validation import reject

_PARTS: dict[str, Any] = {"policy": AutoModelForCausalLM, "critic": AutoModelForTokenClassification}


def export_checkpoint(checkpoint: str | Path, directory: str | Path, policy: str | None = None) -> None:
    """Write `directory/policy` (causal language model and tokenizer) and `directory/critic` (value head and tokenizer).

    `AutoModelForCausalLM` and `AutoModelForTokenClassification` of transformers load them; weights are safetensors.

    Args:
        checkpoint: A checkpoint of a run.
        directory: Where to write; it must not exist, or be empty.
        policy: Hugging Face folder to take the tokenizer from, and the architecture if the checkpoint does not say it;
            None takes the folder that the run used.

    Raises:
        CheckpointError: the file is missing, no checkpoint of a run, or holds policy and critic of different steps.
        ConfigError: the directory holds something or cannot be made, or `policy` is needed or unusable.
    """
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise reject("directory", target, "is there already", "give a new or an empty one")
    content = read_checkpoint(checkpoint)
    ours = content[KEY]
    tokenizer_folder = policy if policy is not None else ours.get("tokenizer")
    if tokenizer_folder is None or not Path(tokenizer_folder).is_dir():
        raise reject("policy", tokenizer_folder, "has no tokenizer", "give the run's policy folder with --policy")
    tokenizer = load_tokenizer(str(tokenizer_folder))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise reject("directory", target, f"cannot be made ({error.strerror})", "give another one") from error
    try:
        for name, auto in _PARTS.items():
            config = _config(ours.get(f"{name}_config"), tokenizer_folder, is_critic=name == "critic")
            model = _build(auto, config, content["state_dict"], f"{name}.model.", checkpoint)
            if name == "policy" and "generation_config" in ours:
                model.generation_config = GenerationConfig.from_dict(json.loads(ours["generation_config"]))
            with quiet_loading():
                model.save_pretrained(scratch / name)
            tokenizer.save_pretrained(scratch / name)
        # mkdtemp hides the folder from other users
        scratch.chmod(0o777 & ~_umask())
        os.replace(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Load a checkpoint without running any code in it, and check that it is one of a run of this package.

    Args:
        path: The file. Tensors are mapped, not read.

    Raises:
        CheckpointError: the file is missing, no checkpoint of a run, or holds policy and critic of different steps.
    """
    if not Path(path).is_file():
        raise not_a_file(path)
    why = "something else is in it"
    content: Any = None
    if not zipfile.is_zipfile(path):
        why = "torch.save has not written it, or not to its end"
    else:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:100]
    check_is_ours(content, path, why)
    check_fits_together(content["state_dict"], int(content["global_step"]))
    return content


def _config(stored: str | None, folder: str | Path, *, is_critic: bool) -> PretrainedConfig:
    """The architecture: as the checkpoint says it, else as the policy's folder does."""
    if stored is not None:
        fields = json.loads(stored)
        return CONFIG_MAPPING[fields.pop("model_type")].from_dict(fields)
    if not (Path(folder) / "config.json").is_file():
        raise reject("policy", folder, "is not a Hugging Face folder (no config.json)", "give the run's policy folder")
    changes: dict[str, Any] = {"num_labels": 1} if is_critic else {}
    config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, **changes)
    return config


def _build(
    auto: Any, config: PretrainedConfig, state_dict: dict[str, Tensor], prefix: str, checkpoint: str | Path
) -> PreTrainedModel:
    """Build the model around the checkpoint's tensors, without memory of its own."""
    weights = {name.removeprefix(prefix): tensor for name, tensor in state_dict.items() if name.startswith(prefix)}
    dtype = next((tensor.dtype for tensor in weights.values() if tensor.is_floating_point()), torch.float32)
    with torch.device("meta"):
        model: PreTrainedModel = auto.from_config(config, dtype=dtype)
    try:
        model.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"ckpt_path={checkpoint} does not fit the architecture ({reason}); give the run's policy folder"
        ) from error
    # assigning by name has separated tensors that share their memory
    model.tie_weights()
    return model


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
