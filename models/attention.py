"""Self-attention with timm's parameters, a kernel chosen by what is measured to be fastest, and queries for some tokens only.

Shapes: B batch, L tokens, Q querying tokens (the last Q of L), D width, h heads, d width of a head.
"""

import timm.layers.attention
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

# Up to this many keys, plain matmuls beat torch's fused call on a CPU in 16-bit floats; beyond, the L x L scores leave the
# cache and the fused call wins. `python benchmarks/attention.py` prints the measurement.
CPU_PLAIN_MAX_KEYS = 1024


def prefers_plain_attention(device_type: str, dtype: torch.dtype, num_keys: int) -> bool:
    """Says whether plain matmul attention is faster than torch's fused call.

    Args:
        device_type: "cpu", "cuda", ...
        dtype: of queries, keys and values.
        num_keys: L.
    """
    return device_type == "cpu" and dtype in (torch.bfloat16, torch.float16) and num_keys <= CPU_PLAIN_MAX_KEYS


def choose_attention(vit: VisionTransformer, device_type: str, dtype: torch.dtype) -> None:
    """Sets how a timm ViT attends, in place: by plain products where these are faster than torch's fused call.

    The arithmetic is the same. timm decides for all devices alike, in favour of the fused call.

    Args:
        vit: whose blocks are set.
        device_type: where it will run.
        dtype: of its matrix products.
    """
    num_tokens = vit.patch_embed.num_patches + vit.num_prefix_tokens
    for module in vit.modules():
        if isinstance(module, timm.layers.attention.Attention):
            # Through its dictionary: timm declares the attribute Final, for torch.jit.
            vars(module)["fused_attn"] = not prefers_plain_attention(device_type, dtype, num_tokens)


def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Softmax attention of (B, h, Q, d) queries on (B, h, L, d) keys and values -> (B, h, Q, d)."""
    if prefers_plain_attention(queries.device.type, queries.dtype, keys.shape[-2]):
        scores = (queries * queries.shape[-1] ** -0.5) @ keys.transpose(-2, -1)  # (B, h, Q, L)
        return scores.softmax(dim=-1).to(values.dtype) @ values
    return F.scaled_dot_product_attention(queries, keys, values)


class Attention(timm.layers.attention.Attention):
    """timm's multi-head self-attention (same parameters), with `attend` inside.

    QK-norm, gates, attention dropout and masks of timm's module are not supported: no model of this project uses them.
    """

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Lets every token attend to every token: (B, L, D) -> (B, L, D)."""
        assert attn_mask is None, "masked attention is not supported"
        assert not is_causal, "masked attention is not supported"
        queries, keys, values = self._split_heads(self.qkv(x))
        return self._merge_heads(attend(queries, keys, values))

    def forward_last(self, x: Tensor, num_queries: int) -> Tensor:
        """Lets the last Q tokens attend to all tokens: (B, L, D) -> (B, Q, D).

        Equals `forward(x)[:, -Q:]`, without computing queries and projections of the other tokens.
        """
        query_weight, key_value_weight = self.qkv.weight.split([self.attn_dim, 2 * self.attn_dim])
        query_bias, key_value_bias = self.qkv.bias.split([self.attn_dim, 2 * self.attn_dim])
        (queries,) = self._split_heads(F.linear(x[:, -num_queries:], query_weight, query_bias))
        keys, values = self._split_heads(F.linear(x, key_value_weight, key_value_bias))
        return self._merge_heads(attend(queries, keys, values))

    def _split_heads(self, projected: Tensor) -> tuple[Tensor, ...]:
        """(B, L, n * D) -> n tensors of (B, h, L, d)."""
        batch, length, _ = projected.shape
        heads = projected.reshape(batch, length, -1, self.num_heads, self.head_dim)
        return heads.permute(2, 0, 3, 1, 4).unbind(0)

    def _merge_heads(self, attended: Tensor) -> Tensor:
        """(B, h, L, d) -> (B, L, D), through the output projection."""
        return self.proj(attended.transpose(1, 2).flatten(2))
