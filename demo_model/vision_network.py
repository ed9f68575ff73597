"""The Qwen2.5-VL network in plain PyTorch, with the parameter names of Hugging Face checkpoints. Knows no text.

Every layer of the tower attends to the whole picture, and the pictures of a batch have one size: then a batch needs no
loop over its pictures, which takes most of the time with Hugging Face transformers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demo_model.network import MLP, Decoder, Shape, rotate

MROPE_SECTIONS = (4, 6, 6)  # frequencies of a head that turn with the frame, the row and the column


@dataclass(frozen=True)
class VisionShape:
    hidden_size: int = 128
    intermediate_size: int = 352
    depth: int = 6
    num_heads: int = 4
    patch_size: int = 14
    merge_size: int = 2
    num_frames: int = 2  # of a patch: a picture is repeated
    rope_theta: float = 1e4

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class PatchEmbedding(nn.Module):
    def __init__(self, shape: VisionShape):
        super().__init__()
        kernel = (shape.num_frames, shape.patch_size, shape.patch_size)
        self.proj = nn.Conv3d(3, shape.hidden_size, kernel, kernel, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        return F.linear(patches, self.proj.weight.sum(2).flatten(1)).float()


class VisionAttention(nn.Module):
    def __init__(self, shape: VisionShape):
        super().__init__()
        self.num_heads = shape.num_heads
        self.qkv = nn.Linear(shape.hidden_size, 3 * shape.hidden_size)
        self.proj = nn.Linear(shape.hidden_size, shape.hidden_size)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q, rotary), rotate(k, rotary), v)
        return self.proj(mixed.transpose(1, 2).reshape(rows, length, -1))


class VisionBlock(nn.Module):
    def __init__(self, shape: VisionShape):
        super().__init__()
        self.norm1 = nn.RMSNorm(shape.hidden_size, eps=1e-6)
        self.attn = VisionAttention(shape)
        self.norm2 = nn.RMSNorm(shape.hidden_size, eps=1e-6)
        self.mlp = MLP(shape, bias=True)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attn(self.norm1(x), rotary)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """Joins the neighbouring patches of a token."""

    def __init__(self, shape: VisionShape, out_size: int):
        super().__init__()
        self.merged = shape.hidden_size * shape.merge_size**2
        self.ln_q = nn.RMSNorm(shape.hidden_size, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(self.merged, self.merged), nn.GELU(), nn.Linear(self.merged, out_size))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.ln_q(x).reshape(len(x), -1, self.merged))


class Tower(nn.Module):
    def __init__(self, shape: VisionShape, out_size: int):
        super().__init__()
        self.shape = shape
        self.patch_embed = PatchEmbedding(shape)
        self.blocks = nn.ModuleList(VisionBlock(shape) for _ in range(shape.depth))
        self.merger = Merger(shape, out_size)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the embeddings [pictures, tokens, out_size] of normalized pictures [pictures, height, width, 3]."""
        size, merge = self.shape.patch_size, self.shape.merge_size
        count, rows, columns = len(pictures), pictures.shape[1] // size // merge, pictures.shape[2] // size // merge
        patches = pictures.view(count, rows, merge, size, columns, merge, size, 3).permute(0, 1, 4, 2, 5, 7, 3, 6)
        x = self.patch_embed(patches.reshape(count, -1, 3 * size * size))
        rotary = self.rotary(rows, columns, x.device)
        for block in self.blocks:
            x = block(x, rotary)
        return self.merger(x)

    def rotary(self, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [patches, head_dim]. Half of the frequencies turn with rows, half with columns."""
        merge, size = self.shape.merge_size, self.shape.head_dim // 2
        axes = [torch.arange(count, device=device) for count in (rows, columns, merge, merge)]
        row, column, inner_row, inner_column = torch.meshgrid(*axes, indexing="ij")
        frequency = self.shape.rope_theta ** (-torch.arange(0, size, 2, device=device) / size)
        places = (row * merge + inner_row, column * merge + inner_column)
        angle = torch.cat([place.flatten()[:, None] * frequency for place in places] * 2, -1)
        return angle.cos(), angle.sin()


class Qwen25VL(nn.Module):
    """The output head is the embedding table."""

    def __init__(self, shape: Shape, vision: VisionShape, image_token_id: int):
        super().__init__()
        self.shape, self.vision, self.image_token_id = shape, vision, image_token_id
        self.model = Decoder(shape)
        self.visual = Tower(vision, shape.hidden_size)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "embed_tokens" in name:
                nn.init.normal_(parameter, std=0.03)
            elif parameter.dim() > 1:
                deep = name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight"))
                nn.init.normal_(parameter, std=(0.3 if deep else 1.0) * parameter[0].numel() ** -0.5)

    def forward(self, token_ids: Tensor, pictures: Tensor) -> Tensor:
        """Return the hidden states after the last norm. The pictures are normalized, in the order of their tokens."""
        is_image, unit = token_ids == self.image_token_id, self.vision.patch_size * self.vision.merge_size
        embedded = self.visual(pictures).float()
        x = self.model.embed_tokens(token_ids).masked_scatter(is_image[..., None], embedded)
        positions = positions_of(is_image, pictures.shape[1] // unit, pictures.shape[2] // unit)
        rotary = text_rotary(self.shape, positions)
        for layer in self.model.layers:
            x = layer(x, rotary, None)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)


def positions_of(is_image: Tensor, rows: int, columns: int) -> Tensor:
    """Return the frame, row and column [3, *is_image.shape] of tokens, of which some stand for pictures of one size."""
    before = is_image.cumsum(-1) - is_image.long()  # tokens of pictures
    place = torch.where(is_image, before % (rows * columns), 0)
    index = torch.arange(is_image.shape[-1], device=is_image.device)
    done = before.div(rows * columns, rounding_mode="floor")
    first = index - place - done * (rows * columns - max(rows, columns))
    return torch.stack([first, first + place.div(columns, rounding_mode="floor"), first + place % columns])


def text_rotary(shape: Shape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [rows, 1, length, head_dim] of positions [3, rows, length]."""
    size = shape.head_dim
    frequency = shape.rope_theta ** (-torch.arange(0, size, 2, device=positions.device) / size)
    axes = torch.repeat_interleave(torch.arange(3), torch.tensor(MROPE_SECTIONS)).to(positions.device)
    angle = positions[axes].permute(1, 2, 0) * frequency
    angle = torch.cat([angle, angle], -1)[:, None]
    return angle.cos(), angle.sin()
