"""vLLM's end of the weight transfer: a backend for its weight-update interface, registered as a plugin.

vLLM is imported here, in `cpu_matrices` and in `cpu_generators` only, and inside functions: importing these modules
costs nothing. What a reload leans on of vLLM's internals is in `VLLMInternals`.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.compatibility import EXPECTED, check_policy, check_scheduling, need
from lightning_ppo.refit.completeness import check_complete, check_copied, tied_names
from lightning_ppo.refit.cpu_generators import keep_generators
from lightning_ppo.refit.cpu_matrices import CPU_WEIGHTS, Matrix, keep_matrices, matrices_in_place
from lightning_ppo.refit.incoming import Incoming, Named

BACKEND = "lightning_ppo"
"""What `--weight-transfer-config '{"backend": ...}'` names."""

_FACTORY = "vllm.distributed.weight_transfer.factory", "WeightTransferEngineFactory"


def register() -> None:
    """Tell vLLM about the backend; vLLM calls this at start, in each of its processes, through the entry point."""
    try:
        factory = need(*_FACTORY)
    except EngineError as error:
        # vLLM itself goes on to say that it does not know `--weight-transfer-config`.
        logging.getLogger("vllm.lightning_ppo").error("%s", error)
        return
    if BACKEND not in factory._registry:
        factory.register_engine(BACKEND, make_backend())
    kind = os.environ.get(CPU_WEIGHTS)
    if kind is not None:
        keep_matrices(is_packed=kind == "packed")


@dataclass
class Message:
    """One message of the trainer, as vLLM hands it over: a single field with all that it says."""

    message: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class VLLMInternals:
    """The parts of vLLM 0.32 that a reload needs."""

    layerwise_info: Any
    start_reload: Any
    finish_reload: Any
    copy_counter: Any
    embedding: Any
    linear: Any
    experts: Any

    @classmethod
    def load(cls) -> "VLLMInternals":
        """Import them.

        Raises:
            EngineError: one is missing.
        """
        reload = "vllm.model_executor.model_loader.reload"
        return cls(
            layerwise_info=need(f"{reload}.layerwise", "get_layerwise_info"),
            start_reload=need(reload, "initialize_layerwise_reload"),
            finish_reload=need(reload, "finalize_layerwise_reload"),
            copy_counter=need(f"{reload}.meta", "CopyCounter"),
            embedding=need("vllm.model_executor.layers.vocab_parallel_embedding", "VocabParallelEmbedding"),
            linear=need("vllm.model_executor.layers.linear", "LinearBase"),
            experts=need("vllm.model_executor.layers.fused_moe", "RoutedExperts"),
        )


def make_backend() -> type:
    """Build the backend's class on top of vLLM's base class.

    Raises:
        EngineError: vLLM is too old.
    """
    base: Any = need("vllm.distributed.weight_transfer.base", "WeightTransferEngine")

    class LightningPPOTransfer(base):  # type: ignore[misc]
        """Loads the trainer's tensors into the model of one worker, between two forward passes."""

        init_info_cls = Message
        update_info_cls = Message

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._vllm = VLLMInternals.load()
            if self.device.type == "cpu":
                keep_generators()
            parallel = self.parallel_config
            worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
            self._incoming = Incoming(self.device, worker)
            self._loaded: set[str] = set()
            self._copied = 0
            self._fills: dict[tuple[Any, ...], int] = {}

        @cached_property
        def _tied(self) -> set[str]:
            # Found before the first reload: during one, and after one that failed, a tied head is a tensor of its own.
            return tied_names(self.model)

        @cached_property
        def _in_place(self) -> list[Matrix] | None:
            return matrices_in_place(self.model)

        def init_transfer_engine(self, init_info: Message) -> None:
            """Check that the trainer's policy is the one that is served, or join the trainer's process group."""
            if EXPECTED in init_info.message:
                model = self.vllm_config.model_config
                check_policy(init_info.message[EXPECTED], model.hf_text_config, model)
                check_scheduling(str(self.vllm_config.scheduler_config.policy))
            else:
                self._incoming.connect(init_info.message)

        def start_weight_update(self) -> None:
            """Make every layer wait for its new tensors."""
            self._loaded = set(self._tied)
            self._copied = 0
            if self._in_place is not None:
                for matrix in self._in_place:
                    matrix.forget()
                return
            for layer in self.model.modules():
                # What a failed update left behind would be taken for a part of this one.
                info = self._vllm.layerwise_info(layer)
                if info.can_load():
                    info.loaded_weights.clear()
                    info.load_numel = 0
                # Since vllm#40390 a CPU packs experts only when it makes their kernel, and would feed it plain ones.
                method: Any = getattr(layer, "quant_method", None)
                if self.device.type == "cpu" and hasattr(method, "moe_kernel"):
                    method.moe_kernel = None
            self._vllm.start_reload(self.model)

        def receive_weights(self, update_info: Message) -> None:
            """Load the tensors of one bucket."""
            named = self._incoming.receive(update_info.message)
            if self._in_place is None:
                self._load(named)
                return
            # vLLM skips a tied head, and complains if its other name came in an earlier bucket
            named = [(name, tensor) for name, tensor in named if name not in self._tied]
            tensors = tuple((name, tensor.shape) for name, tensor in named)
            if tensors in self._fills:
                self._load(named)
            else:
                # Counting is slow, and the same tensors fill the same places every time.
                with self._vllm.copy_counter() as counter:
                    self._load(named)
                self._fills[tensors] = counter.copied_numel
            self._copied += self._fills[tensors]

        def _load(self, named: Named) -> None:
            name = "none"

            def pairs() -> Iterator[tuple[str, torch.Tensor]]:
                nonlocal name
                for pair in named:
                    name = pair[0]
                    yield pair

            try:
                self._loaded |= self.model.load_weights(pairs()) or set()
            except Exception as error:
                why = " ".join(str(error).split()) or type(error).__name__
                raise EngineError(f"weights={name} cannot be loaded ({why}); serve the policy that is sent") from error

        def finish_weight_update(self) -> None:
            """Check that nothing is missing, and let the layers compute with the new tensors."""
            if self._in_place is not None:
                check_copied(self.model, self._loaded, self._copied, self._vllm.embedding)
                return
            whole = self._vllm.linear, self._vllm.experts
            check_complete(self.model, self._loaded, self._vllm.layerwise_info, whole)
            self._vllm.finish_reload(self.model, self.model_config)
            for name in self._tied:
                module = self.model.get_submodule(name.rpartition(".")[0])
                # vLLM 0.32 on a CPU: a tied head goes on with its old packed copy unless it is packed again.
                if isinstance(module, self._vllm.embedding) and module.weight.device.type == "cpu":
                    module.quant_method.process_weights_after_loading(module)

        def shutdown(self) -> None:
            """Leave the group."""
            self._incoming.close()

    return LightningPPOTransfer
