"""MiniMax-M3's attention layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._arguments import integers, number
from ..attention import msa_attention, sparse_attention
from ..errors import InvalidArgumentError, UnsupportedError
from . import weights
from .cache import PagedCache
from .parts import AddLoss, HeadNorm, rotary_angles, rotate
from .sequences import check_integers, positions_given, refuse, sequences_of

_NAME = "SparseAttention"
_BLOCK_SIZES = (128, 64, 32)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class SparseAttention(nn.Module):
    """Grouped-query attention over blocks that an index branch chooses, as in MiniMax-M3 (arXiv 2606.13392).

    Per token: projections without bias; Gemma's RMSNorm on each head of q, k and both index tensors, in float32; a
    rotate-half rotary embedding on the first ``rotary_dim`` channels of the same four; :func:`openmsa.msa_attention`;
    the output projection. The defaults behind ``rotary_dim`` are M3's.

    The index branch reads a detached input: the KL divergence trains ``index_q_proj``, ``index_k_proj``,
    ``index_q_norm`` and ``index_k_norm`` and nothing else, and the loss through the output trains all else. In training
    the layer adds ``kl_weight`` times its KL to whatever loss is minimised through its output, so that a training loop
    needs no change, and leaves the KL in :attr:`kl` after each backward pass. With ``return_kl`` the KL is returned
    instead, to be added to the loss by the caller.

    Attributes:
        warmup: whether to attend densely and to take the KL over every visible key; to be switched at any time.
        kl_weight: factor of the KL that a training step adds; to be set at any time, and used by the next forward pass.
        kl: 0-d float32, the KL (nats per token and index head) of the last backward pass; NaN before the first one.

    Args:
        hidden_size: channels of the input and of the output.
        num_heads: query heads Hq.
        num_kv_heads: key/value heads Hkv; divides ``index_heads``.
        head_dim: channels D of q, k and v per head.
        index_heads: index heads Hi; divides ``num_heads``.
        index_head_dim: channels Di of the index branch per head.
        rotary_dim: channels that are rotated, even and at most ``head_dim`` and ``index_head_dim``; 0 for none.
        index_key_heads: index key heads Hik; divides ``index_heads``.
        topk: blocks per query and index head.
        block_size: tokens per block, 128 or 64 (32 on the CPU).
        init_blocks: how many first blocks are always chosen.
        local_blocks: how many last blocks are always chosen, the own block among them.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean squares of the norms.
        scale: factor of the attention scores; ``1 / sqrt(head_dim)`` by default.
        index_scale: factor of the index scores; ``1 / sqrt(index_head_dim)`` by default.
        kl_weight: see above.
        warmup: see above.
        deterministic: whether the gradients are to be bitwise repeatable.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        InvalidArgumentError: a size or setting is wrong; the message names it.
    """

    _kl: Tensor
    _kl_weight: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        index_heads: int,
        index_head_dim: int,
        rotary_dim: int,
        *,
        index_key_heads: int = 1,
        topk: int = 16,
        block_size: int = 128,
        init_blocks: int = 0,
        local_blocks: int = 1,
        rope_theta: float = 5e6,
        norm_eps: float = 1e-6,
        scale: float | None = None,
        index_scale: float | None = None,
        kl_weight: float = 1.0,
        warmup: bool = False,
        deterministic: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim = integers(
            _NAME, hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
        )
        self.index_heads, self.index_head_dim, self.index_key_heads, self.rotary_dim = integers(
            _NAME, index_heads=index_heads, index_head_dim=index_head_dim, index_key_heads=index_key_heads,
            rotary_dim=rotary_dim,
        )  # fmt: skip
        self.topk, self.block_size, self.init_blocks, self.local_blocks = integers(
            _NAME, topk=topk, block_size=block_size, init_blocks=init_blocks, local_blocks=local_blocks
        )
        self._check_sizes()
        self.rope_theta = _positive("rope_theta", rope_theta)
        self.norm_eps = _positive("norm_eps", norm_eps)
        self.scale = None if scale is None else _positive("scale", scale)
        self.index_scale = None if index_scale is None else _positive("index_scale", index_scale)
        self.warmup = bool(warmup)
        self.deterministic = bool(deterministic)

        if dtype is not None and dtype not in _FLOATS:
            raise _invalid("dtype", dtype, "bfloat16, float16, float32 or None")
        options: Any = {"device": device, "dtype": dtype}

        def projection(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, **options)

        def norm(dim: int) -> HeadNorm:
            return HeadNorm(dim, self.norm_eps, **options)

        self.q_proj = projection(hidden_size, num_heads * head_dim)
        self.k_proj = projection(hidden_size, num_kv_heads * head_dim)
        self.v_proj = projection(hidden_size, num_kv_heads * head_dim)
        self.o_proj = projection(num_heads * head_dim, hidden_size)
        self.q_norm = norm(head_dim)
        self.k_norm = norm(head_dim)
        self.index_q_proj = projection(hidden_size, index_heads * index_head_dim)
        self.index_k_proj = projection(hidden_size, index_key_heads * index_head_dim)
        self.index_q_norm = norm(index_head_dim)
        self.index_k_norm = norm(index_head_dim)

        # Buffers, so that compiled steps see neither a new constant nor a new address when they change.
        self.register_buffer("_kl", torch.empty((), dtype=torch.float32, device=device), persistent=False)
        self.register_buffer("_kl_weight", torch.empty((), dtype=torch.float32, device=device), persistent=False)
        self._kl.fill_(math.nan)
        self.kl_weight = kl_weight

    def _check_sizes(self) -> None:
        at_least = dict.fromkeys(("rotary_dim", "init_blocks", "local_blocks"), 0)
        for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "index_heads", "index_head_dim",
                     "index_key_heads", "topk"):  # fmt: skip
            at_least[name] = 1
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise _invalid(name, getattr(self, name), f"at least {least}")
        for name, of in (
            ("num_kv_heads", "index_heads"),
            ("index_heads", "num_heads"),
            ("index_key_heads", "index_heads"),
        ):
            divisor, heads = getattr(self, name), getattr(self, of)
            if heads % divisor != 0:
                raise _invalid(name, divisor, f"a divisor of {of}, which is {heads}")
        if self.block_size not in _BLOCK_SIZES:
            raise _invalid("block_size", self.block_size, f"one of {', '.join(map(str, _BLOCK_SIZES))}")
        most = min(self.head_dim, self.index_head_dim)
        if self.rotary_dim % 2 != 0 or self.rotary_dim > most:
            raise _invalid("rotary_dim", self.rotary_dim,
                           f"an even number up to {most} (the smaller of head_dim and index_head_dim)")  # fmt: skip

    @property
    def kl(self) -> Tensor:
        """0-d float32: the KL of the last backward pass. The next one overwrites it."""
        return self._kl

    @property
    def kl_weight(self) -> float:
        """Factor of the KL that a training step adds to the loss."""
        return self._kl_factor

    @kl_weight.setter
    def kl_weight(self, value: float) -> None:
        weight = number(_NAME, "kl_weight", value)
        if weight is None or not 0 <= weight <= torch.finfo(torch.float32).max:
            raise _invalid("kl_weight", value, "a number from 0 up, finite in float32")
        self._kl_factor = weight
        self._kl_weight.fill_(weight)

    def _apply(self, fn: Any, recurse: bool = True) -> SparseAttention:
        """Moves and casts the module. The KL and its weight stay float32, and have values after ``to_empty`` too."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._kl = self._kl.to(torch.float32).fill_(math.nan)
        self._kl_weight = self._kl_weight.to(torch.float32).fill_(self._kl_factor)
        return self

    def extra_repr(self) -> str:
        names = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "index_heads", "index_head_dim", "rotary_dim",
                 "index_key_heads", "topk", "block_size", "init_blocks", "local_blocks")  # fmt: skip
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def load_m3_layer(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Copy the weights of one sparse attention layer of MiniMax-M3 into this layer.

        Args:
            state_dict: tensors by name, of one layer or of a whole model. The index branch may have the names of
                published checkpoints (``index_q_proj.weight``) or of transformers (``indexer.q_proj.weight``). Values
                are converted to the layer's type.
            prefix: that of the attention's names, "language_model.model.layers.3.self_attn." in the checkpoint and
                "model.language_model.layers.3.self_attn." in transformers; or that of the decoder layer around it.

        Raises:
            InvalidArgumentError: a key is missing, unexpected or there twice, or a tensor has another shape; nothing
                was copied.
            UnsupportedError: the weights are quantized.
        """
        weights.load(self, state_dict, prefix)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine for positions [T], both [T, rotary_dim / 2] float32: ``rotary`` of several layers' calls."""
        check_integers("positions", positions, "[T]", lambda shape: len(shape) == 1)
        return rotary_angles(positions, self.rotary_dim, self.rope_theta)

    def forward(
        self,
        hidden: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
        positions: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        indices: Tensor | None = None,
        cache: PagedCache | None = None,
        return_kl: bool = False,
        return_indices: bool = False,
    ) -> Any:
        """Attend causally within each sequence.

        Args:
            hidden: [T, hidden_size], the tokens of one sequence, of several packed ones (``cu_seqlens``), or of the
                requests of ``cache``; or [B, S, hidden_size].
            cu_seqlens: [B+1] int32, offsets of the sequences; with [T, hidden_size] only.
            lengths: [B] int32 or int64, how many tokens of each row are real; the rest is padding at the right, sees
                nothing and gives 0, and counts in the KL's mean. With [B, S, hidden_size] only.
            positions: [T], [S] or [B, S] int32 or int64, for the rotary embedding; each token's place in its sequence
                or request by default.
            rotary: what :meth:`rotary` gives for the positions, so that layers share the work.
            indices: [Hi, T, topk] int32 or int64 (T = B S): blocks to attend to, chosen elsewhere. The index branch
                then neither runs nor is trained. Hi may differ from the layer's.
            cache: keys of earlier tokens, extended by this call's: see :class:`PagedCache`. Without gradients only.
            return_kl: whether to return the KL, 0-d float32, exact when the call returns (about half a forward pass of
                attention more) and differentiable in the index branch. ``kl_weight`` is then not applied: the caller
                adds the KL to the loss.
            return_indices: whether to return the chosen blocks, [Hi, T, topk] int32; None in warm-up.

        Returns:
            ``out``, of hidden's shape; or a tuple of ``out``, the KL where asked for, and the indices where asked for.

        Raises:
            InvalidArgumentError: an argument is wrong; the message names it.
            UnsupportedError: the backend cannot do this, or gradients are wanted through a cache.
        """
        self._check_call(hidden, indices, cache, return_kl)
        tokens = hidden.reshape(-1, self.hidden_size)
        arguments: dict[str, Any] = {}
        if cache is None:
            places, arguments = sequences_of(hidden, cu_seqlens, lengths)
        else:
            refuse("cu_seqlens", cu_seqlens, "None with a cache (it knows the new tokens of each request)")
            refuse("lengths", lengths, "None with a cache (it knows the new tokens of each request)")
            places = cache.step_positions(hidden)
        if rotary is None:
            rotary = self.rotary(places if positions is None else positions_given(positions, hidden))
        else:
            refuse("positions", positions, "None with rotary (which has them)")
            self._check_rotary(rotary, tokens)
        q = self._heads(self.q_proj(tokens), self.head_dim, self.q_norm, rotary)
        k = self._heads(self.k_proj(tokens), self.head_dim, self.k_norm, rotary)
        v = self.v_proj(tokens).unflatten(-1, (-1, self.head_dim))
        if cache is not None:
            out, indices = self._attend_cache(cache, q, k, v, tokens, rotary, indices)
            kl = None
        elif indices is not None:
            out, kl = sparse_attention(
                q, k, v, indices, block_size=self.block_size, scale=self.scale, deterministic=self.deterministic,
                **arguments,
            ), None  # fmt: skip
        else:
            out, kl, indices = self._attend(q, k, v, tokens, rotary, return_kl, arguments)
        out = self.o_proj(out.flatten(1)).reshape(hidden.shape)
        extra = ((kl,) if return_kl else ()) + ((indices,) if return_indices else ())
        return (out, *extra) if extra else out

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, rotary: tuple[Tensor, Tensor], return_kl: bool,
        arguments: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        index_q, index_k = self._index_q(tokens, rotary), self._index_k(tokens, rotary)
        trains = self.training and torch.is_grad_enabled()
        if trains and self._kl.device != tokens.device:
            # A layer made on the meta device whose weights were assigned, or are brought when they are needed.
            self._kl = torch.full((), math.nan, device=tokens.device)
            self._kl_weight = torch.full((), self._kl_factor, device=tokens.device)
        result = msa_attention(
            q, k, v, index_q, index_k, topk=self.topk, block_size=self.block_size, init_blocks=self.init_blocks,
            local_blocks=self.local_blocks, scale=self.scale, index_scale=self.index_scale,
            kl="forward" if return_kl else "backward" if trains else "off", kl_out=self._kl if trains else None,
            warmup=self.warmup, deterministic=self.deterministic, **arguments,
        )  # fmt: skip
        out = result.out
        if trains and not return_kl and result.kl.requires_grad:
            # A copy: the weight may change before the backward pass.
            out = AddLoss.apply(out, result.kl * self._kl_weight.clone())
        return out, result.kl, result.indices

    def _attend_cache(
        self, cache: PagedCache, q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, rotary: tuple[Tensor, Tensor],
        indices: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        # Index keys are kept with external indices too, so that later calls may choose among all tokens.
        index_k = self._index_k(tokens, rotary)
        index_q = self._index_q(tokens, rotary) if indices is None else None
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, index_k, index_q)):
            raise UnsupportedError(
                f"{_NAME}: cache: got a PagedCache while gradients are recorded, expected torch.no_grad() "
                "(what is read from pages has no gradient)"
            )
        cache.append(self, k, v, index_k)
        if index_q is None:
            return cache.attend(self, q, indices), indices
        return cache.select_and_attend(self, q, index_q)

    def _index_q(self, tokens: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        return self._heads(self.index_q_proj(tokens.detach()), self.index_head_dim, self.index_q_norm, rotary)

    def _index_k(self, tokens: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        return self._heads(self.index_k_proj(tokens.detach()), self.index_head_dim, self.index_k_norm, rotary)

    @staticmethod
    def _heads(projected: Tensor, dim: int, norm: nn.Module, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """[T, heads, dim] of the projection's type; norm and rotation are float32, rounded once."""
        heads = projected.reshape(projected.shape[0], projected.shape[1] // dim, dim)
        return rotate(norm(heads), *rotary).to(projected.dtype)

    def _check_call(self, hidden: Tensor, indices: Tensor | None, cache: PagedCache | None, return_kl: bool) -> None:
        if not isinstance(hidden, Tensor):
            raise InvalidArgumentError(f"{_NAME}: hidden: got a {type(hidden).__name__}, expected a torch tensor")
        if hidden.ndim not in (2, 3) or hidden.shape[-1] != self.hidden_size or hidden.dtype not in _FLOATS:
            raise InvalidArgumentError(
                f"{_NAME}: hidden: got {hidden.dtype} {list(hidden.shape)}, expected bfloat16, float16 or float32 "
                f"[T, {self.hidden_size}] or [B, S, {self.hidden_size}]"
            )
        if cache is not None and not isinstance(cache, PagedCache):
            raise InvalidArgumentError(f"{_NAME}: cache: got a {type(cache).__name__}, expected a PagedCache")
        if return_kl and (indices is not None or cache is not None):
            other = "indices" if indices is not None else "a cache"
            raise InvalidArgumentError(
                f"{_NAME}: return_kl: got True with {other}, expected False (there is no KL then)"
            )
        if indices is not None and self.warmup:
            raise InvalidArgumentError(f"{_NAME}: indices: got a tensor in warm-up, expected None (attention is dense)")

    def _check_rotary(self, rotary: Any, tokens: Tensor) -> None:
        expected = (tokens.shape[0], self.rotary_dim // 2)
        parts = rotary if isinstance(rotary, tuple | list) else (rotary,)
        got = [tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
        if got != [expected, expected]:
            raise _invalid("rotary", got, f"cosine and sine, both {list(expected)}: layer.rotary(positions)")
        for part in parts:
            if part.device != tokens.device:
                raise _invalid("rotary", f"a tensor on {part.device}", f"one on {tokens.device}, as hidden")


def _invalid(name: str, got: Any, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{_NAME}: {name}: got {got}, expected {expected}")


def _positive(name: str, value: Any) -> float:
    factor = number(_NAME, name, value)
    if factor is None or not math.isfinite(factor) or factor <= 0:
        raise _invalid(name, value, "a finite number above 0")
    return factor
