"""The Qwen2 network in plain PyTorch, with the parameter names of Hugging Face checkpoints. Knows no text."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 640
    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int = 2
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class RMSNorm(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden_size))
        self.eps = shape.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x.float() * scale).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * shape.head_dim, bias=True)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=True)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=True)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        rows, length, _ = x.shape
        q = rotate(self.q_proj(x).view(rows, length, self.num_heads, self.head_dim).transpose(1, 2), rotary)
        k = rotate(self.k_proj(x).view(rows, length, self.num_kv_heads, self.head_dim).transpose(1, 2), rotary)
        v = self.v_proj(x).view(rows, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        group = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


class MLP(nn.Module):
    """`shape` has the sizes of a text network or of a vision tower."""

    def __init__(self, shape, bias: bool = False):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.input_layernorm = RMSNorm(shape)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape)
        self.shape = shape

    def forward(self, token_ids: Tensor, mask: Tensor | None) -> Tensor:
        x = self.embed_tokens(token_ids)
        rotary = rotary_tables(self.shape, token_ids.shape[1], x.device)
        for layer in self.layers:
            x = layer(x, rotary, mask)
        return self.norm(x)


class Qwen2(nn.Module):
    """The output head is the embedding table: `logits` may be asked for some positions only."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))  # keeps the residual stream in bounds
                nn.init.normal_(parameter, std=0.03 / (2 * shape.num_layers) ** 0.5 if deep else 0.03)

    def forward(self, token_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Hidden states after the last norm. Without a mask, every position sees those before it."""
        return self.model(token_ids, mask)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)


def rotary_tables(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position, in float32 whatever the type of the weights."""
    frequency = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim)
    angle = torch.arange(length, device=device)[:, None] * torch.cat([frequency, frequency])
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotary
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
