"""A continuation, byte by byte, with keys on pages as a server keeps them, compared with one pass over all of it."""

from dataclasses import dataclass

import openmsa
import torch
from torch import Tensor

from .attention import Heads
from .config import Attention, Config
from .data import FIRST_GRADED, draw_batch
from .model import HEAD_TYPE, SHIFT, ByteModel, Layer

SEED = 12  # of the prompt's window, and of the order of pages
LENGTH = 64  # bytes generated
# Of the logits, between the paged operations and one forward pass over all bytes: other shapes of the same products.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}


@dataclass(frozen=True)
class Continuation:
    prompt_length: int
    prompt_end: bytes  # the last bytes of it
    generated: bytes  # greedily
    expected: bytes  # the rest of the planted string that the prompt ends in
    distance: int  # bytes back to where that string stood first
    max_difference: float  # of the logits, from those of one forward pass over prompt and continuation
    same_bytes: bool  # whether that pass would choose the same ones
    head_type: str  # of what attention computes on

    @property
    def recalled(self) -> int:
        """First bytes of `expected` that were generated."""
        pairs = zip(self.expected, self.generated, strict=False)
        return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(self.expected), LENGTH))

    @property
    def tolerance(self) -> float:
        return TOLERANCE[getattr(torch, self.head_type)]

    @property
    def equal(self) -> bool:
        """Other bytes than the one pass are an error in float32; in bfloat16 they may be a tie within its rounding."""
        exact = self.head_type == "float32"
        return self.max_difference <= self.tolerance and (self.same_bytes or not exact)


class PagedCache:
    """One request's keys, values and index keys in every layer, on scattered pages of a pool twice as large."""

    def __init__(self, model: ByteModel, capacity: int) -> None:
        c, device = model.config, model.device
        pages = -(-capacity // c.block)
        pool = 2 * pages
        order = torch.randperm(pool, generator=torch.Generator().manual_seed(SEED))[:pages]
        self.block_table = order[None].to(device, torch.int32)
        self.length = 0
        self.before = [torch.zeros(1, SHIFT, c.width, device=device) for _ in model.layers]  # what the shift looks at
        self._config, self._pool = c, pool
        self._layers: list[tuple[Tensor, Tensor, Tensor] | None] = [None] * c.layers

    def attend(self, number: int, heads: Heads) -> Tensor:
        """Appends the new rows of a layer, and lets them attend to everything up to themselves."""
        c = self._config
        caches = self._layers[number]
        if caches is None:
            k, v, index_k = (x.new_zeros(self._pool, c.block, *x.shape[1:]) for x in (heads.k, heads.v, heads.index_k))
            caches = self._layers[number] = (k, v, index_k)
        device = heads.q.device
        seq_lens = torch.tensor([self.length + heads.length], dtype=torch.int32, device=device)
        openmsa.paged_append(
            heads.k, heads.v, heads.index_k, *caches, self.block_table, seq_lens, cu_seqlens_q=heads.offsets()
        )
        k_cache, v_cache, index_k_cache = caches
        result = openmsa.paged_msa_attention(
            heads.q,
            k_cache,
            v_cache,
            heads.index_q,
            index_k_cache,
            self.block_table,
            seq_lens,
            cu_seqlens_q=heads.offsets(),
            topk=c.topk,
        )
        out: Tensor = result.out
        return out


def extend(model: ByteModel, cache: PagedCache, tokens: Tensor) -> Tensor:
    """tokens [1, new] behind those in the cache -> logits [1, new, 256]."""
    x = model.embed(tokens)
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        before = cache.before[number]
        cache.before[number] = torch.cat((before, layer.normed(x)), dim=1)[:, -SHIFT:]
        x, _ = layer(x, lambda heads, n=number: (cache.attend(n, heads), None), before, cache.length)
    cache.length += tokens.shape[1]
    return model.logits(x)


def prompt(text: Tensor, config: Config, length: int) -> tuple[Tensor, bytes, int]:
    """Held-out bytes that end in the start of a planted repeat -> [1, bytes], the rest of the repeat, its distance."""
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(100):
        batch = draw_batch(text, generator, 1, config.context, config.planting)
        recall = batch.recall[0]
        starts = [int(at) for at in (recall == FIRST_GRADED).nonzero() if int(at) + 1 + length <= config.context]
        if starts:
            at = starts[-1]
            end = at
            while end < config.context and int(recall[end]) == FIRST_GRADED + end - at:
                end += 1
            return (
                batch.inputs[:, : at + 1],
                bytes(batch.targets[0, at:end].tolist()),
                at + 1 - int(batch.origin[0, at]),
            )
    raise RuntimeError(f"no planted repeat in the first {config.context - length} bytes of 100 windows")


@torch.no_grad()
def generate(model: ByteModel, text: Tensor) -> Continuation:
    config, device = model.config, model.device
    length = min(LENGTH, config.context // 4)
    start, expected, distance = prompt(text, config, length)
    tokens = start.to(device)
    cache = PagedCache(model, tokens.shape[1] + length)
    step = extend(model, cache, tokens)[:, -1:]
    logits = [step]
    for _ in range(length - 1):
        chosen = step.argmax(-1)
        tokens = torch.cat((tokens, chosen), dim=1)
        step = extend(model, cache, chosen)
        logits.append(step)
    paged = torch.cat(logits, dim=1)[0]
    at_once = model(tokens, Attention.SPARSE)[0][0, -length:]
    return Continuation(
        prompt_length=start.shape[1],
        prompt_end=bytes(start[0, -48:].tolist()),
        generated=bytes(paged.argmax(-1).tolist()),
        expected=expected,
        distance=distance,
        max_difference=float((paged - at_once).abs().max()),
        same_bytes=bool((paged.argmax(-1) == at_once.argmax(-1)).all()),
        head_type=str(HEAD_TYPE[device.type]).removeprefix("torch."),
    )
