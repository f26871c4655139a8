"""Settings of the built-in engine: a frozen dataclass that checks itself."""

from dataclasses import dataclass
from typing import Literal

import torch

from lightning_ppo.validation import check_choices, check_count, check_number, reject


@dataclass(frozen=True)
class LocalEngineConfig:
    """The built-in engine: one process of its own on this machine.

    Args:
        slots: Responses generated at once; finished ones are replaced at once.
        num_threads: Threads of the engine's process.
        trainer_threads: Threads of the trainer's process while the engine runs; None leaves torch's setting.
        device: Where the engine computes, for example `cpu` or `cuda:0`.
        dtype: Precision of the engine's weights; `float32` keeps its log-probs equal to the trainer's.
        start_timeout_s: Deadline for the engine's process to come up.
        update_timeout_s: Deadline for new weights to be confirmed.
        backend: `auto` uses the fast decoder for Llama- and Qwen-style models and transformers' own forward for others;
            `native` and `transformers` force one of them.
    """

    slots: int = 128
    num_threads: int = 1
    trainer_threads: int | None = 1
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    start_timeout_s: float = 120.0
    update_timeout_s: float = 60.0
    backend: Literal["auto", "native", "transformers"] = "auto"

    def __post_init__(self) -> None:
        """Reject bad values with one line each."""
        check_choices(self)
        check_count("slots", self.slots)
        check_count("num_threads", self.num_threads)
        if self.trainer_threads is not None:
            check_count("trainer_threads", self.trainer_threads)
        try:
            torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise reject("device", self.device, "is no device of torch", "set cpu, cuda or cuda:0") from error
        check_number("start_timeout_s", self.start_timeout_s, 0, open_low=True)
        check_number("update_timeout_s", self.update_timeout_s, 0, open_low=True)

    def check_device(self) -> None:
        """Check that this machine has the GPU; not done at once, since settings may be written down elsewhere.

        Raises:
            ConfigError: it has not.
        """
        device = torch.device(self.device)
        if device.type != "cuda":
            return
        # no context is made on it: the memory belongs to the engine
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            others = f" or a lower number than {count}" if count else ""
            why = f"is not among the {count} GPUs that this process sees"
            raise reject("local.device", self.device, why, f"set cpu{others}")
