"""Models and tokenizers from Hugging Face folders, with one-line errors."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lightning_ppo.quiet import quiet_loading
from lightning_ppo.validation import reject

_UNREADABLE = (OSError, ValueError, RuntimeError, SafetensorError)


def load_tokenizer(folder: str, field: str = "policy") -> PreTrainedTokenizerBase:
    """Load a tokenizer.

    Args:
        folder: A Hugging Face folder.
        field: Name of the setting, for the error.

    Raises:
        ConfigError: the folder is missing or has no tokenizer.
    """
    if not Path(folder).is_dir():
        raise reject(field, folder, "is not a Hugging Face folder (no such folder)", "give the path of one")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise reject(field, folder, f"has no usable tokenizer ({_line(error)})", "save one there") from error


def load_policy(folder: str, dtype: torch.dtype = torch.float32, field: str = "policy") -> PreTrainedModel:
    """Load a causal language model.

    Raises:
        ConfigError: `folder` is no path, is missing, holds no causal language model, or lacks some of its weights.
    """
    _check_folder(folder, field)
    try:
        with quiet_loading(show_bars=_takes_long(folder)):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, output_loading_info=True
            )
    except _UNREADABLE as error:
        raise reject(field, folder, f"is no causal LM ({_line(error)})", "give a Hugging Face folder") from error
    model, info = loaded
    _check_missing(info["missing_keys"], folder, field)
    return model


def load_critic(folder: str, dtype: torch.dtype = torch.float32, field: str = "critic") -> PreTrainedModel:
    """Load a backbone with a value head; a head that the folder does not have starts at zero.

    Raises:
        ConfigError: the folder is missing, its architecture has no token classification model, or weights other than
            the head's are missing.
    """
    _check_folder(folder, field)
    try:
        with quiet_loading(show_bars=_takes_long(folder)):
            model, info = AutoModelForTokenClassification.from_pretrained(
                folder, num_labels=1, dtype=dtype, local_files_only=True, output_loading_info=True
            )
    except _UNREADABLE as error:
        raise reject(field, folder, f"cannot carry a value head ({_line(error)})", "give another critic") from error
    missing = set(info["missing_keys"])
    heads = {
        f"{name}.{part}"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == 1
        for part in ("weight", "bias")
    }
    _check_missing(missing - heads, folder, field)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in missing:
                parameter.zero_()
    return model


def check_vocabulary(model: PreTrainedModel, policy: PreTrainedModel, field: str, folder: str) -> None:
    """Check that a model reads the policy's tokens.

    Raises:
        ConfigError: the vocabularies have different sizes.
    """
    ours, theirs = policy.config.vocab_size, model.config.vocab_size
    if ours != theirs:
        raise reject(field, folder, f"has {theirs} tokens, the policy {ours}", "give one of the same vocabulary")


def _takes_long(folder: str) -> bool:
    """Whether loading is worth a progress bar: more than a quarter of a gigabyte of weights."""
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) > 2**28


def _check_folder(folder: str, field: str) -> None:
    if not isinstance(folder, (str, os.PathLike)):
        raise reject(field, type(folder).__name__, "is no path", "save the model and give its folder")
    if not (Path(folder) / "config.json").is_file():
        raise reject(field, folder, "is not a Hugging Face folder (no config.json)", "give the path of one")


def _check_missing(names: Collection[str], folder: str, field: str) -> None:
    # transformers would fill them with random numbers
    if names:
        raise reject(field, folder, f"lacks {min(names)}", "give a complete Hugging Face folder")


def _line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
