"""The bare loop's sampler: the Llama forward written out over a KV cache."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel


class Sampler:
    """Batched sampling from a Llama-style policy with a KV cache; rows that have ended leave the batch."""

    def __init__(self, policy: PreTrainedModel, context_tokens: int) -> None:
        config = policy.config
        self.policy, self.eps = policy, config.rms_norm_eps
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.outer(torch.arange(context_tokens).float(), frequencies).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)
        return x * cos + torch.cat([-second, first], -1) * sin

    def _forward(self, ids: Tensor, positions: Tensor, cache: list[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
        rows, length = ids.shape
        row = torch.arange(rows).unsqueeze(1)
        x = F.embedding(ids, self.policy.model.embed_tokens.weight)
        for layer, (keys, values), qkv_weight, gate_up_weight in zip(
            self.policy.model.layers, cache, self.qkv_weights, self.gate_up_weights, strict=True
        ):
            y = F.rms_norm(x, x.shape[-1:], layer.input_layernorm.weight, self.eps)
            q, k, v = (
                F.linear(y, qkv_weight)
                .view(rows, length, -1, self.head_dim)
                .split([self.heads, self.kv_heads, self.kv_heads], 2)
            )
            keys[row, positions] = self._rotate(k, positions)
            values[row, positions] = v
            seen = mask.shape[-1]
            attended = F.scaled_dot_product_attention(
                self._rotate(q, positions).transpose(1, 2),
                keys[:, :seen].transpose(1, 2),
                values[:, :seen].transpose(1, 2),
                attn_mask=mask,
                enable_gqa=self.heads != self.kv_heads,
            )
            x = x + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
            y = F.rms_norm(x, x.shape[-1:], layer.post_attention_layernorm.weight, self.eps)
            gate, up = F.linear(y, gate_up_weight).chunk(2, -1)
            x = x + layer.mlp.down_proj(F.silu(gate) * up)
        return F.rms_norm(x, x.shape[-1:], self.policy.model.norm.weight, self.eps)

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], max_tokens: int, eos_id: int, rng: torch.Generator) -> list[list[int]]:
        """Sample at temperature 1 until the end-of-sequence token, which is part of the response, or `max_tokens`."""
        layers = self.policy.model.layers
        self.qkv_weights = [
            torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]) for a in (x.self_attn for x in layers)
        ]
        self.gate_up_weights = [torch.cat([x.mlp.gate_proj.weight, x.mlp.up_proj.weight]) for x in layers]
        next_position = torch.tensor([len(prompt) for prompt in prompts])
        ids = nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
        rows, width = ids.shape
        places = torch.arange(width + max_tokens)
        shape = (rows, len(places), self.kv_heads, self.head_dim)
        cache = [(torch.zeros(shape), torch.zeros(shape)) for _ in layers]
        causal = places[None, :width] <= places[:width, None]
        hidden = self._forward(ids, places[:width].expand(rows, -1), cache, causal[None, None])
        hidden = hidden[torch.arange(rows), next_position - 1]
        responses: list[list[int]] = [[] for _ in prompts]
        live = torch.arange(rows)
        for _ in range(max_tokens):
            probs = self.policy.lm_head(hidden).softmax(-1)
            tokens = torch.multinomial(probs, 1, generator=rng).squeeze(1)
            for i, token in zip(live.tolist(), tokens.tolist(), strict=True):
                responses[i].append(token)
            keep = (tokens != eos_id).nonzero().squeeze(1)
            if len(keep) == 0:
                break
            if len(keep) < len(live):
                live, tokens, next_position = live[keep], tokens[keep], next_position[keep]
                cache = [(k[keep], v[keep]) for k, v in cache]
            seen = places[None, : int(next_position.max()) + 1] <= next_position[:, None]
            hidden = self._forward(tokens[:, None], next_position[:, None], cache, seen[:, None, None])[:, 0]
            next_position = next_position + 1
        return responses
