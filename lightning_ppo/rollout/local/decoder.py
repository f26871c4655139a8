"""The fast decoder for Llama- and Qwen-style models: a static key-value cache and a batch of constant shape.

A row's results do not depend on the other rows, bit for bit: the shapes of the matrices never change with the load,
their rows come in whole blocks, attention treats each row by itself (see `attention.py`), and the activation works on a
padded width. The same holds for the prompts of a prefill (see `packing.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from lightning_ppo.rollout.local.attention import CachedAttention
from lightning_ppo.rollout.local.decoder_weights import LayerWeights, aligned_width
from lightning_ppo.rollout.local.packing import Pack, PromptPacker
from lightning_ppo.rollout.local.skeleton import Skeleton

# MKL multiplies what is left beside blocks of four rows with other code, which rounds differently (seen on AMD's EPYC:
# 1 to 3 rows, and with several threads, which share them, 5 to 7 and 9 to 11).
_BLOCK_ROWS = 4
_SHARED_BLOCK_ROWS = 16


class NativeDecoder:
    """Keys and values of `slots` sequences, and the forward that extends all of them by one token.

    Attributes:
        packer: Puts prompts together for `prefill`.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        slots: int,
        max_context_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        num_threads: int,
    ) -> None:
        config = skeleton.config
        self._skeleton = skeleton
        self._slots, self._context, self._device, self._dtype = slots, max_context_tokens, device, dtype
        block = _BLOCK_ROWS if num_threads == 1 else _SHARED_BLOCK_ROWS
        self._rows = -(-slots // block) * block
        self._hidden: int = config.hidden_size
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_dim: int = getattr(config, "head_dim", None) or self._hidden // self._heads
        self._eps: float = config.rms_norm_eps
        self._act = ACT2FN[config.hidden_act]
        inner = skeleton.shapes["model.layers.0.mlp.gate_proj.weight"][0]
        self.packer = PromptPacker(slots)
        width = aligned_width(inner, (self._rows, self.packer.least_rows), num_threads)
        self._layers = [LayerWeights(skeleton, i, width, device, dtype) for i in range(config.num_hidden_layers)]
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        self._embed = torch.empty(skeleton.vocab_size, self._hidden, **make)
        self._head = torch.empty(self._hidden, skeleton.vocab_size, **make)
        self._norm = torch.empty(self._hidden, **make)
        # Zeros, not empty: masked positions are multiplied by zero, which leaves NaN alone.
        self._cache = torch.zeros(
            len(self._layers), 2, self._rows, self._kv_heads, max_context_tokens, self._head_dim, **make
        )
        self._flat = self._cache.view(len(self._layers), 2, -1, self._head_dim)
        self._base = torch.arange(self._rows * self._kv_heads, device=device)[:, None] * max_context_tokens
        self._cos, self._sin = self._rotary()
        self._attention = CachedAttention(
            self._heads, self._kv_heads, self._head_dim, max_context_tokens, device, dtype
        )

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take new weights, by canonical name; keys and values in the cache stay as they are."""
        for layer in self._layers:
            layer.load(weights)
        self._embed.copy_(weights["model.embed_tokens.weight"])
        self._norm.copy_(weights["model.norm.weight"])
        self._head.copy_(weights[self._skeleton.aliases["lm_head.weight"]].t())

    @torch.inference_mode()
    def prefill(self, pack: Pack) -> list[Tensor]:
        """Keys and values of some prompts' tokens except the last one, which the first decode step reads.

        Args:
            pack: Prompts that `PromptPacker` put together; their results do not depend on which ones these are.

        Returns:
            For each prompt `[layers, 2, kv_heads, len(prompt) - 1, head_dim]`, a view of memory they all share.
        """
        count = len(pack.token_ids)
        layout = np.stack([pack.token_ids, pack.positions, pack.targets])
        ids, position, targets = torch.from_numpy(layout).to(self._device)
        sources = torch.from_numpy(pack.sources).to(self._device)
        hidden = F.embedding(ids, self._embed)
        cos, sin = (each.index_select(0, position)[:, None] for each in (self._cos, self._sin))
        make: dict[str, Any] = {"device": self._device, "dtype": self._dtype}
        kept = torch.empty(len(self._layers), 2, self._kv_heads, count, self._head_dim, **make)
        for index, layer in enumerate(self._layers):
            query, key, value = self._project(layer, hidden, cos, sin)
            kept[index, 0] = key.transpose(0, 1)
            kept[index, 1] = value.transpose(0, 1)
            if index + 1 < len(self._layers):
                padded = [each.index_select(0, sources) for each in (query, key, value)]
                mixed = self._attend_prompts(padded, pack.calls)
                self._finish(layer, hidden, mixed.index_select(0, targets))
        spans = zip(pack.starts, pack.prompts, strict=True)
        return [kept[:, :, :, start : start + len(prompt) - 1] for start, prompt in spans]

    @torch.inference_mode()
    def admit(self, slot: int, prefilled: Tensor) -> None:
        """Put a prefilled prompt into a slot."""
        self._cache[:, :, slot, :, : prefilled.shape[3]] = prefilled

    @torch.inference_mode()
    def step(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        """Read one token per slot and return the logits of the next.

        Args:
            tokens: `[slots]` int64; any valid id in free slots.
            positions: `[slots]` int64, where each token stands in its sequence; 0 in free slots.

        Returns:
            `[slots, V]` float32.
        """
        if self._rows > self._slots:
            tokens, positions = (np.pad(each, (0, self._rows - self._slots)) for each in (tokens, positions))
        position = torch.from_numpy(positions).to(self._device)
        per_head = position[:, None].expand(-1, self._kv_heads).reshape(-1, 1)
        where = (self._base + per_head).view(-1)
        windows = self._attention.plan(positions, per_head)
        cos, sin = (each.index_select(0, position)[:, None] for each in (self._cos, self._sin))
        hidden = F.embedding(torch.from_numpy(tokens).to(self._device), self._embed)
        for index, layer in enumerate(self._layers):
            query, key, value = self._project(layer, hidden, cos, sin)
            keys, values = self._flat[index]
            keys.index_copy_(0, where, key.reshape(-1, self._head_dim))
            values.index_copy_(0, where, value.reshape(-1, self._head_dim))
            shape = (-1, self._context, self._head_dim)
            grouped = query.reshape(-1, self._heads // self._kv_heads, self._head_dim)
            mixed = self._attention.attend(grouped, keys.view(shape), values.view(shape), windows)
            self._finish(layer, hidden, mixed.view(self._rows, -1))
        logits = torch.mm(F.rms_norm(hidden, (self._hidden,), self._norm, self._eps), self._head)
        return logits[: self._slots].float()

    def _project(self, layer: LayerWeights, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normed = F.rms_norm(hidden, (self._hidden,), layer.input_norm, self._eps)
        qkv = _linear(normed, layer.qkv, layer.qkv_bias).view(len(hidden), -1, self._head_dim)
        both = self._heads + self._kv_heads
        qk, value = qkv[:, :both], qkv[:, both:]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (self._head_dim,), None, self._eps) * layer.qk_norm
        # Rolling by half a head swaps its halves; the sign of rotate_half is in `sin`.
        turned = (qk * cos).add_(torch.roll(qk, self._head_dim // 2, -1).mul_(sin))
        return turned[:, : self._heads], turned[:, self._heads :], value

    def _attend_prompts(self, padded: Sequence[Tensor], calls: Sequence[tuple[int, int]]) -> Tensor:
        mixed: list[Tensor] = []
        start = 0
        for count, width in calls:
            size = count * width
            query, key, value = (
                part[start : start + size].view(count, width, -1, self._head_dim).transpose(1, 2) for part in padded
            )
            each = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=self._heads != self._kv_heads
            )
            mixed.append(each.transpose(1, 2).reshape(size, -1))
            start += size
        return torch.cat(mixed)

    def _finish(self, layer: LayerWeights, hidden: Tensor, mixed: Tensor) -> None:
        hidden.add_(_linear(mixed, layer.out, layer.out_bias))
        normed = F.rms_norm(hidden, (self._hidden,), layer.post_norm, self._eps)
        gate, up = _linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
        hidden.add_(_linear(self._act(gate).mul_(up), layer.down, layer.down_bias))

    def _rotary(self) -> tuple[Tensor, Tensor]:
        config, model = self._skeleton.config, self._skeleton.model
        rotary = type(model.get_submodule("model.rotary_emb"))(config)
        cos, sin = rotary(torch.empty(1, dtype=torch.float32), torch.arange(self._context)[None])
        half = self._head_dim // 2
        signed = torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)
        return cos[0].to(self._device, self._dtype), signed.to(self._device, self._dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
