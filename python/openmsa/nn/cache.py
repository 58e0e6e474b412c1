"""Keys, values and index keys of requests, in pages, for decoding with layers of openmsa.nn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .._arguments import integers
from ..errors import InvalidArgumentError, OutOfMemoryError
from ..paged import paged_append, paged_msa_attention, paged_sparse_attention

if TYPE_CHECKING:
    from .attention import SparseAttention

_NAME = "PagedCache"
_FLOAT8 = torch.float8_e4m3fn
_STORED = (torch.bfloat16, torch.float16, torch.float32, _FLOAT8)


class Pool(NamedTuple):
    """One layer's pages."""

    k: Tensor
    """[pages, block_size, Hkv, D]"""
    v: Tensor
    """[pages, block_size, Hkv, D]"""
    index_k: Tensor
    """[pages, block_size, Hik, Di]"""


class PagedCache:
    """Pages that requests of different lengths share, the same page numbers in every layer.

    A step first says how many new tokens each request brings (:meth:`extend`), then runs every layer once with
    ``cache=``, on the new tokens of all requests one after the other. A step may be a chunk of a prompt, one token, or
    several drafted ones, mixed as wanted::

        cache = PagedCache(model, requests=2, pages=512)
        cache.extend([len(first), len(second)])
        out = layer(hidden, cache=cache)              # [len(first) + len(second), hidden_size]
        cache.extend([1, 1])
        out = layer(hidden, cache=cache)              # [2, hidden_size]

    The device's tables are written in place, so that a captured graph sees the new ones; pages are counted on the host
    and nothing waits for the device.

    Attributes:
        block_table: [requests, max_pages] int32, each request's pages.
        seq_lens: [requests] int32, tokens of each request, the step's included.
        cu_seqlens_q: [requests+1] int32, offsets of the requests' new tokens.
        positions: [T] int64, place of each new token in its request.

    Args:
        layers: a :class:`SparseAttention`, several, or a module that holds them. All have one block size.
        requests: how many requests live at a time.
        pages: pages of each layer; one holds ``block_size`` tokens.
        max_tokens: the most that one request may hold; all pages by default.
        dtype: of keys and values: q's, or float8_e4m3fn; that of the layers' parameters by default.
        index_dtype: of index keys: index_q's, or float8_e4m3fn (index queries are then cast too); that of the layers'
            parameters by default.
        device: that of the layers' parameters by default.
        k_scale: K is ``k_scale`` times what a float8_e4m3fn cache stores, a number or a 0-d float32 tensor; one for
            all layers, or one per layer. None is 1.
        v_scale: the same for V.

    Raises:
        InvalidArgumentError: an argument is wrong; the message names it.
    """

    @torch.inference_mode(False)  # tensors made in inference mode could be written in no other
    def __init__(
        self,
        layers: nn.Module | Iterable[SparseAttention],
        *,
        requests: int,
        pages: int,
        max_tokens: int | None = None,
        dtype: torch.dtype | None = None,
        index_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> None:
        self._layers = _layers_of(layers)
        first = self._layers[0]
        self.block_size = first.block_size
        self.requests, self.pages = integers(_NAME, requests=requests, pages=pages)
        (self.max_tokens,) = integers(
            _NAME, max_tokens=self.pages * self.block_size if max_tokens is None else max_tokens
        )
        for name in ("requests", "pages", "max_tokens"):
            if not 0 <= getattr(self, name) < 2**31:
                raise InvalidArgumentError(f"{_NAME}: {name}: got {getattr(self, name)}, expected 0 to 2^31 - 1")
        weight = first.k_proj.weight
        self.device = weight.device if device is None else torch.device(device)
        dtype = weight.dtype if dtype is None else dtype
        index_dtype = weight.dtype if index_dtype is None else index_dtype
        for name, value in (("dtype", dtype), ("index_dtype", index_dtype)):
            if value not in _STORED:
                raise InvalidArgumentError(
                    f"{_NAME}: {name}: got {value}, expected one of {', '.join(map(str, _STORED))}"
                )
        self._scales = list(zip(self._per_layer("k_scale", k_scale, dtype), self._per_layer("v_scale", v_scale, dtype),
                                strict=True))  # fmt: skip
        self._pools = [self._new_pool(layer, dtype, index_dtype) for layer in self._layers]

        max_pages = min(-(-self.max_tokens // self.block_size), self.pages)
        self._table = torch.zeros(self.requests, max_pages, dtype=torch.int32)  # the host's copy of block_table
        self.block_table = self._table.to(self.device, copy=True)
        self.seq_lens = torch.zeros(self.requests, dtype=torch.int32, device=self.device)
        self.cu_seqlens_q = torch.zeros(self.requests + 1, dtype=torch.int32, device=self.device)
        self.positions = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._lengths = [0] * self.requests
        self._counts = [0] * self.requests
        self._free = list(range(self.pages - 1, -1, -1))

    def _new_pool(self, layer: SparseAttention, dtype: torch.dtype, index_dtype: torch.dtype) -> Pool:
        """Not zeroed: what no query sees has no influence."""

        def new(heads: int, dim: int, kind: torch.dtype) -> Tensor:
            return torch.empty(self.pages, self.block_size, heads, dim, dtype=kind, device=self.device)

        keys = layer.num_kv_heads, layer.head_dim, dtype
        return Pool(new(*keys), new(*keys), new(layer.index_key_heads, layer.index_head_dim, index_dtype))

    def _per_layer(self, name: str, scale: Any, dtype: torch.dtype) -> list[Any]:
        if scale is not None and dtype != _FLOAT8:
            raise InvalidArgumentError(f"{_NAME}: {name}: got a scale with a cache of {dtype}, expected None "
                                       f"(only {_FLOAT8} caches have scales)")  # fmt: skip
        if not isinstance(scale, list | tuple):
            return [scale] * len(self._layers)
        if len(scale) != len(self._layers):
            raise InvalidArgumentError(
                f"{_NAME}: {name}: got {len(scale)} scales, expected one for each of {len(self._layers)} layers"
            )
        return list(scale)

    # ---- requests ----------------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request, the step's included."""
        return list(self._lengths)

    @property
    def free_pages(self) -> int:
        """Pages that no request has."""
        return len(self._free)

    @torch.inference_mode(False)
    def extend(self, counts: Sequence[int]) -> None:
        """Begin a step: give each request room for its new tokens.

        Args:
            counts: how many new tokens each request brings, 0 for those that rest.

        Raises:
            InvalidArgumentError: a count is wrong, or a request would hold more than ``max_tokens``.
            OutOfMemoryError: not enough pages are free. In both cases nothing has changed.
        """
        counts = self._checked(counts)
        lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        held = [self._pages_of(length) for length in self._lengths]
        wanted = [self._pages_of(length) for length in lengths]
        missing = sum(wanted) - sum(held)
        if missing > len(self._free):
            raise OutOfMemoryError(
                f"{_NAME}.extend: pages: {missing} more are needed for {sum(counts)} tokens and {len(self._free)} of "
                f"{self.pages} are free, expected as many (release requests, or make a cache of more pages)"
            )
        for request, (begin, end) in enumerate(zip(held, wanted, strict=True)):
            if end > begin:
                new = [self._free.pop() for _ in range(begin, end)]
                self._table[request, begin:end] = torch.tensor(new, dtype=torch.int32)
        self._lengths, self._counts = lengths, counts
        if missing:
            self.block_table.copy_(self._table, non_blocking=True)
        starts = [length - count for length, count in zip(lengths, counts, strict=True)]
        parts = [torch.arange(start, length) for start, length in zip(starts, lengths, strict=True) if length > start]
        positions = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
        if positions.shape != self.positions.shape:
            self.positions = torch.empty_like(positions, device=self.device)
        self.positions.copy_(positions, non_blocking=True)
        self._write_lengths()

    @torch.inference_mode(False)
    def truncate(self, request: int, length: int) -> None:
        """Forget a request's tokens from ``length`` on, and give their pages back: rejected drafts, for example.

        Raises:
            InvalidArgumentError: there is no such request, or it holds fewer tokens.
        """
        request, length = integers(f"{_NAME}.truncate", request=request, length=length)
        if not 0 <= request < self.requests:
            raise InvalidArgumentError(f"{_NAME}.truncate: request: got {request}, expected 0 to {self.requests - 1}")
        if not 0 <= length <= self._lengths[request]:
            raise InvalidArgumentError(
                f"{_NAME}.truncate: length: got {length}, expected 0 to {self._lengths[request]} (request {request})"
            )
        kept, held = self._pages_of(length), self._pages_of(self._lengths[request])
        self._free.extend(reversed(self._table[request, kept:held].tolist()))
        self._lengths[request] = length
        self._counts = [0] * self.requests
        self.positions = self.positions[:0]
        self._write_lengths()

    def release(self, request: int) -> None:
        """Forget a request, and give its pages back. It may then hold another one."""
        self.truncate(request, 0)

    def _checked(self, counts: Sequence[int]) -> list[int]:
        try:
            values = list(counts)
        except TypeError:
            values = None
        if values is None or len(values) != self.requests:
            got = f"{len(values)} counts" if values is not None else f"a {type(counts).__name__}"
            raise InvalidArgumentError(
                f"{_NAME}.extend: counts: got {got}, expected one for each of {self.requests} requests"
            )
        values = [integers(f"{_NAME}.extend", counts=value)[0] for value in values]
        for request, (count, length) in enumerate(zip(values, self._lengths, strict=True)):
            if count < 0:
                raise InvalidArgumentError(f"{_NAME}.extend: counts: got {count}, expected at least 0")
            if length + count > self.max_tokens:
                raise InvalidArgumentError(
                    f"{_NAME}.extend: counts: got {count} for request {request}, which holds {length}, expected "
                    f"at most {self.max_tokens - length} (max_tokens is {self.max_tokens})"
                )
        return values

    def _pages_of(self, length: int) -> int:
        return -(-length // self.block_size)

    def _write_lengths(self) -> None:
        ends = [0]
        for count in self._counts:
            ends.append(ends[-1] + count)
        # Memory that is not pinned is staged before the call returns, so that it may change and nothing waits.
        self.seq_lens.copy_(torch.tensor(self._lengths, dtype=torch.int32), non_blocking=True)
        self.cu_seqlens_q.copy_(torch.tensor(ends, dtype=torch.int32), non_blocking=True)

    # ---- what a layer does with it -----------------------------------------------------------------------------------

    def pool(self, layer: SparseAttention) -> Pool:
        """The layer's pages."""
        return self._pools[self._number(layer)]

    def _number(self, layer: SparseAttention) -> int:
        for number, other in enumerate(self._layers):
            if other is layer:
                return number
        raise InvalidArgumentError(
            "SparseAttention: cache: got a PagedCache that was not made for this layer, expected one that was "
            "(PagedCache(layers, ...))"
        )

    def step_positions(self, hidden: Tensor) -> Tensor:
        """Positions [T] of the step's tokens; `hidden` must hold just these."""
        rows = [self.requests, self._counts[0]] if hidden.ndim == 3 and len(set(self._counts)) == 1 else []
        if list(hidden.shape[:-1]) not in (rows, [sum(self._counts)]):
            raise InvalidArgumentError(
                f"SparseAttention: hidden: got {list(hidden.shape)}, expected the {sum(self._counts)} tokens that the "
                f"cache was extended by, packed, or one row of as many for each of its {self.requests} requests"
            )
        if self.positions.device != hidden.device:
            raise InvalidArgumentError(
                f"SparseAttention: cache: got a PagedCache on {self.positions.device}, expected one on "
                f"{hidden.device}, as hidden"
            )
        return self.positions

    def append(self, layer: SparseAttention, k: Tensor, v: Tensor, index_k: Tensor) -> None:
        """Keeps the step's keys [T, Hkv, D], values and index keys [T, Hik, Di]."""
        pool, (k_scale, v_scale) = self.pool(layer), self._scales[self._number(layer)]
        paged_append(k, v, index_k, *pool, **self._requests(), k_scale=k_scale, v_scale=v_scale)

    def attend(self, layer: SparseAttention, q: Tensor, indices: Tensor) -> Tensor:
        """[T, Hq, D]: attention of q [T, Hq, D] to the blocks of indices [Hi, T, topk]."""
        pool, (k_scale, v_scale) = self.pool(layer), self._scales[self._number(layer)]
        out: Tensor = paged_sparse_attention(
            q, pool.k, pool.v, indices, **self._requests(), scale=layer.scale, k_scale=k_scale, v_scale=v_scale
        )
        return out

    def select_and_attend(self, layer: SparseAttention, q: Tensor, index_q: Tensor) -> tuple[Tensor, Tensor]:
        """The same with blocks that index_q [T, Hi, Di] chooses, and these."""
        pool, (k_scale, v_scale) = self.pool(layer), self._scales[self._number(layer)]
        if pool.index_k.dtype == _FLOAT8:
            most = torch.finfo(_FLOAT8).max  # the cast turns larger ones into NaN
            index_q = index_q.clamp(-most, most).to(_FLOAT8)
        # Every block of the longest request is dense attention, which a layer in warm-up is trained for.
        every = max(self._pages_of(max(self._lengths, default=0)), 1)
        result = paged_msa_attention(
            q, pool.k, pool.v, index_q, pool.index_k, **self._requests(), topk=every if layer.warmup else layer.topk,
            init_blocks=layer.init_blocks, local_blocks=layer.local_blocks, scale=layer.scale,
            index_scale=layer.index_scale, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        return result.out, result.indices

    def _requests(self) -> dict[str, Any]:
        return {"block_table": self.block_table, "seq_lens": self.seq_lens, "cu_seqlens_q": self.cu_seqlens_q}


def _layers_of(layers: Any) -> list[SparseAttention]:
    from .attention import SparseAttention

    try:
        candidates = list(layers.modules() if isinstance(layers, nn.Module) else layers)
    except TypeError:
        raise InvalidArgumentError(
            f"{_NAME}: layers: got a {type(layers).__name__}, expected SparseAttention layers or a module with some"
        ) from None
    found = [layer for layer in candidates if isinstance(layer, SparseAttention)]
    if not found or (not isinstance(layers, nn.Module) and len(found) != len(candidates)):
        raise InvalidArgumentError(
            f"{_NAME}: layers: got {len(found)} SparseAttention layers among {len(candidates)}, expected at least one, "
            "and nothing else in a list"
        )
    if len({id(layer) for layer in found}) != len(found):
        raise InvalidArgumentError(
            f"{_NAME}: layers: got a layer twice, expected each once (every use of a layer needs pages of its own)"
        )
    for layer in found:
        if layer.block_size != found[0].block_size:
            raise InvalidArgumentError(
                f"{_NAME}: layers: got block sizes {found[0].block_size} and {layer.block_size}, expected one"
            )
    return found
