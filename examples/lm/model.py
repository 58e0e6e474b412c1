"""The model: a decoder over bytes whose attention is openmsa's."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Heads, attend
from .config import Attention, Config
from .functions import norm, rotate, shift, squared_relu

SHIFT = 3  # a query sees three bytes at once, so that one layer can match and copy
TAPS = SHIFT + 1  # bytes that a shifted input mixes: a key looks one further back
HEAD_TYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}  # tensor cores take no float32

Attend = Callable[[Heads], tuple[Tensor, Tensor | None]]


def matrix(rows: int, columns: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * gain * columns**-0.5)


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        c, width = config, config.width
        # Token shift: channel c of a query starts at the byte c % 3 before its own, of a key one byte earlier still.
        # One product then compares three bytes with the three before a key's byte, which is what copying needs.
        taps, channel = torch.zeros(2, TAPS, width), torch.arange(width)
        taps[0, channel % SHIFT, channel] = 1.0
        taps[1, channel % SHIFT + 1, channel] = 1.0
        self.taps = nn.Parameter(taps)
        self.attention_norm, self.mlp_norm = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.w_q, self.w_k = matrix(c.query_heads * c.head_dim, width), matrix(c.kv_heads * c.head_dim, width)
        self.w_v, self.w_o = matrix(c.kv_heads * c.head_dim, width), matrix(width, c.query_heads * c.head_dim, 0.5)
        # An aligned start: keys begin as copies of queries, so that copying forms in about 50 steps whatever the seed.
        per_group = self.w_q.data.view(c.kv_heads, -1, c.head_dim, width)
        self.w_k.data.copy_(per_group[:, 0].reshape(-1, width))
        self.q_gain, self.k_gain = (nn.Parameter(torch.full((c.head_dim,), 1.5)) for _ in range(2))
        self.w_up, self.w_down = matrix(4 * width, width), matrix(width, 4 * width, 0.3)
        self.index_q, self.index_k = matrix(c.index_heads * c.index_dim, width), matrix(c.index_dim, width)
        self.index_q_gain, self.index_k_gain = (nn.Parameter(torch.ones(c.index_dim)) for _ in range(2))
        self.kl: Tensor
        self.register_buffer("kl", torch.zeros(()), persistent=False)  # of the last training step

    def normed(self, x: Tensor) -> Tensor:
        return norm(x, self.attention_norm)

    def heads(self, h: Tensor, before: Tensor | None = None, position: int = 0) -> Heads:
        """Attention inputs of h = normed(x) [batch, length, width].

        `before` holds the last SHIFT rows of what stood before h (none: zeros), `position` how many there were.
        """
        batch, length, _ = h.shape
        padded = F.pad(h, (0, 0, SHIFT, 0)) if before is None else torch.cat((before, h), dim=1)
        for_q, for_k = shift(padded, self.taps)
        # Only the KL trains the index branch, and it trains nothing else: its input is detached.
        index_q = self._project(for_q.detach(), self.index_q, self.index_q_gain, position)
        index_k = self._project(for_k.detach(), self.index_k, self.index_k_gain, position)
        q = self._project(for_q, self.w_q, self.q_gain, position)
        k = self._project(for_k, self.w_k, self.k_gain, position)
        v = F.linear(h, self.w_v).view(batch * length, self.config.kv_heads, -1)
        dtype = HEAD_TYPE[h.device.type]
        return Heads(q.to(dtype), k.to(dtype), v.to(dtype), index_q.to(dtype), index_k.to(dtype), batch)

    def _project(self, x: Tensor, weight: Tensor, gain: Tensor, position: int) -> Tensor:
        heads = F.linear(x, weight).unflatten(-1, (-1, len(gain)))
        return rotate(norm(heads, gain), self.config.rotary_dim, position).flatten(0, 1)

    def forward(
        self, x: Tensor, attend: Attend, before: Tensor | None = None, position: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """x [batch, length, width] -> the next layer's x, and attention's KL term."""
        out, kl = attend(self.heads(self.normed(x), before, position))
        x = x + F.linear(out.to(x.dtype).reshape(*x.shape[:2], -1), self.w_o)
        return x + F.linear(squared_relu(F.linear(norm(x, self.mlp_norm), self.w_up)), self.w_down), kl


class ByteModel(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.randn(256, config.width) * 0.7)
        self.head = nn.Parameter(torch.randn(256, config.width) * 0.02)
        self.final_norm = nn.Parameter(torch.ones(config.width))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding)

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(norm(x, self.final_norm), self.head)

    def forward(
        self,
        tokens: Tensor,
        attention: Attention,
        generator: torch.Generator | None = None,
        probe: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """tokens [batch, length] -> logits [batch, length, 256], and the sum of the layers' KL terms.

        `generator` draws random blocks; `probe` gets each layer's input.
        """
        random = generator or torch.Generator().manual_seed(self.config.seed)
        x = self.embed(tokens)
        total = x.new_zeros(())
        for layer in self.layers:
            assert isinstance(layer, Layer)
            if probe is not None:
                probe.append(x.detach())
            x, kl = layer(x, lambda heads, out=layer.kl: attend(heads, attention, self.config, out, random))
            total = total if kl is None else total + kl
        return self.logits(x), total

    def kls(self) -> list[float]:
        """KL(teacher || student) of each layer in the last training step."""
        return [float(kl) for name, kl in self.named_buffers() if name.endswith(".kl")]

    def parameter_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
        """-> matrices (with weight decay), other main parameters, the index branch."""
        named = list(self.named_parameters())
        index = [p for name, p in named if ".index_" in name]
        matrices = [p for name, p in named if ".w_" in name]
        others = [p for name, p in named if ".w_" not in name and ".index_" not in name]
        return matrices, others, index

    def with_index_of(self, other: "ByteModel") -> "ByteModel":
        """A model of this one's weights but the other's index branch."""
        mixed = ByteModel(self.config).to(self.device)
        index = {name: value for name, value in other.state_dict().items() if ".index_" in name}
        mixed.load_state_dict(self.state_dict() | index)
        return mixed
