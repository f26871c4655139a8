"""Weights of a Llama- or Qwen-style policy as the fast decoder wants them: fused, transposed, padded."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ppo.rollout.local.skeleton import Skeleton

# Elementwise kernels of torch work on two vector registers at a time (64 bfloat16 numbers) and do the rest one by one.
_VECTOR = 64
# Elements from which torch shares elementwise work among threads.
_GRAIN = 32768


def aligned_width(width: int, batches: Sequence[int], num_threads: int) -> int:
    """Smallest padded width for which every thread's share of `[rows, width]` is a whole number of vectors.

    Vector and scalar code of exp and the like differ in the last bit. Without padding, threads would split a batch in
    the middle of a vector, and the elements there would differ from those of the other rows.

    Args:
        width: Width without padding.
        batches: Every number of rows that must come out so.
        num_threads: Threads of torch.
    """
    padded = -(-width // _VECTOR) * _VECTOR
    while any((rows * padded) % (_VECTOR * min(num_threads, -(-rows * padded // _GRAIN))) for rows in batches):
        padded += _VECTOR
    return padded


class LayerWeights:
    """One decoder layer; matrices are `[in, out]`. Biases and q/k norms are None where the policy has none."""

    def __init__(self, skeleton: Skeleton, index: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
        self._prefix = f"model.layers.{index}."
        self._shapes = skeleton.shapes
        self._width = width
        self._make: dict[str, Any] = {"device": device, "dtype": dtype}
        hidden = skeleton.config.hidden_size
        self.inner = self._shapes[f"{self._prefix}mlp.gate_proj.weight"][0]
        self._qkv_rows = [self._shapes[f"{self._prefix}self_attn.{n}_proj.weight"][0] for n in "qkv"]
        self.input_norm = torch.empty(hidden, **self._make)
        self.post_norm = torch.empty(hidden, **self._make)
        self.qkv = torch.empty(hidden, sum(self._qkv_rows), **self._make)
        self.out = torch.empty(self._qkv_rows[0], hidden, **self._make)
        self.gate_up = torch.zeros(hidden, 2 * width, **self._make)
        self.down = torch.zeros(width, hidden, **self._make)
        self.qkv_bias = self._bias("self_attn.q_proj", sum(self._qkv_rows))
        self.out_bias = self._bias("self_attn.o_proj", hidden)
        self.gate_up_bias = self._bias("mlp.gate_proj", 2 * width)
        self.down_bias = self._bias("mlp.down_proj", hidden)
        self.qk_norm: Tensor | None = None
        """`[heads + kv_heads, head_dim]`: the q norm's weights once per head, then the k norm's."""

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy this layer's tensors in place."""
        get = {name.removeprefix(self._prefix): tensor for name, tensor in weights.items() if self._prefix in name}
        self.input_norm.copy_(get["input_layernorm.weight"])
        self.post_norm.copy_(get["post_attention_layernorm.weight"])
        self.out.copy_(get["self_attn.o_proj.weight"].t())
        self.down[: self.inner].copy_(get["mlp.down_proj.weight"].t())
        qkv = torch.split(self.qkv, self._qkv_rows, 1)
        gate_up = (self.gate_up[:, : self.inner], self.gate_up[:, self._width : self._width + self.inner])
        for part, name in zip((*qkv, *gate_up), _FUSED, strict=True):
            part.copy_(get[f"{name}.weight"].t())
        if self.qkv_bias is not None:
            for part, name in zip(torch.split(self.qkv_bias, self._qkv_rows), _FUSED[:3], strict=True):
                part.copy_(get[f"{name}.bias"])
        if self.out_bias is not None:
            self.out_bias.copy_(get["self_attn.o_proj.bias"])
        if self.gate_up_bias is not None:
            self.gate_up_bias[: self.inner].copy_(get["mlp.gate_proj.bias"])
            self.gate_up_bias[self._width : self._width + self.inner].copy_(get["mlp.up_proj.bias"])
        if self.down_bias is not None:
            self.down_bias.copy_(get["mlp.down_proj.bias"])
        if "self_attn.q_norm.weight" in get:
            q_norm, k_norm = get["self_attn.q_norm.weight"], get["self_attn.k_norm.weight"]
            heads, kv_heads = (rows // len(q_norm) for rows in self._qkv_rows[:2])
            rows = [q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1)]
            self.qk_norm = torch.cat(rows).to(**self._make)

    def _bias(self, of: str, size: int) -> Tensor | None:
        return torch.zeros(size, **self._make) if f"{self._prefix}{of}.bias" in self._shapes else None


_FUSED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
