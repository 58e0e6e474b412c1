"""Attention over selected blocks at M3's shape: 64 query, 4 KV and 4 index heads, D 128, blocks of 128, topk 16.

    python bench/stage_attend.py --out DIR [--lengths 8192 131072] [--dtypes bf16] [--selections random]
                                 [--peers vllm flashinfer | none] [--device cpu]

Times sparse_attention on what select_blocks makes of selections.py's vectors, after sampled rows of the same call
proved right against float64. `fp8kv` reads K and V from shuffled float8 pages. Beside it, up to 131072 keys, the
attention of vLLM (bf16) and FlashInfer (fp8kv) on the same blocks (peers.py). Writes DIR/stage_attend.csv and
DIR/stage_attend_context.csv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import openmsa
import torch
from attend_check import check_attention, selected_pairs
from common.results import Row
from common.run import Run, bench_parser, bench_products, start
from peers import NAMES, attend_peer
from select_check import sample_rows
from selections import GENERATORS
from torch import Tensor

HEADS, KV_HEADS, INDEX_HEADS, DIM, BLOCK, TOPK = 64, 4, 4, 128, 128, 16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8kv": torch.bfloat16}
LENGTHS = [8192, 32768, 131072, 524288, 1048576]
PEERS = ("vllm", "flashinfer")
CHECKED_ROWS = 24


def normal(run: Run, n: int, heads: int, dtype: torch.dtype) -> Tensor:
    """In parts, since the generator works in float32."""
    out = torch.empty(n, heads, DIM, dtype=dtype, device=run.device)
    for begin in range(0, n, 2**16):
        out[begin : begin + 2**16] = torch.randn(out[begin : begin + 2**16].shape, device=run.device)
    return out


def select(run: Run, selection: str, n: int) -> Tensor:
    index = [
        torch.from_numpy(x).to(run.device, torch.bfloat16) for x in GENERATORS[selection](n, INDEX_HEADS, DIM, seed=n)
    ]
    return openmsa.select_blocks(*index, topk=TOPK, block_size=BLOCK)


class Attend:
    """sparse_attention into buffers of its own."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> None:
        self._tensors = q, k, v, indices
        self.out = torch.empty_like(q)
        self.lse = torch.empty(q.shape[1], q.shape[0], device=q.device)
        self._arguments: dict[str, Any] = {
            "block_size": BLOCK,
            "return_lse": True,
            "out": self.out,
            "lse_out": self.lse,
        }
        size = openmsa.workspace_size("sparse_attention", *self._tensors, **self._arguments)
        self._workspace = torch.empty(size, dtype=torch.uint8, device=q.device)

    def __call__(self) -> None:
        openmsa.sparse_attention(*self._tensors, **self._arguments, workspace=self._workspace)


class PagedAttend:
    """paged_sparse_attention of one request on shuffled pages, float8 with scales."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> None:
        n = q.shape[0]
        pages = n // BLOCK
        order = torch.randperm(pages, device=q.device)
        self.scales = {"k_scale": 0.5, "v_scale": 0.25}
        caches = []
        for tensor, scale in ((k, 0.5), (v, 0.25)):
            in_order = (tensor.float() / scale).to(torch.float8_e4m3fn).view(pages, BLOCK, KV_HEADS, DIM)
            cache = torch.empty_like(in_order)
            cache.view(torch.uint8)[order] = in_order.view(torch.uint8)
            caches.append(cache)
        # What the pages hold, for the check.
        self.k, self.v = (
            (cache.view(torch.uint8)[order].view(cache.dtype).float() * scale).view(n, KV_HEADS, DIM)
            for cache, scale in zip(caches, (0.5, 0.25), strict=True)
        )
        table = order.int()[None]
        lengths = torch.tensor([n], dtype=torch.int32, device=q.device)
        offsets = torch.tensor([0, n], dtype=torch.int32, device=q.device)
        self.out = torch.empty_like(q)
        self.lse = torch.empty(q.shape[1], n, device=q.device)
        self._tensors = q, *caches, indices, table, lengths
        self._arguments: dict[str, Any] = {
            "cu_seqlens_q": offsets, "return_lse": True, "out": self.out, "lse_out": self.lse, **self.scales,
        }  # fmt: skip
        size = openmsa.workspace_size("paged_sparse_attention", *self._tensors, **self._arguments)
        self._workspace = torch.empty(size, dtype=torch.uint8, device=q.device)

    def __call__(self) -> None:
        openmsa.paged_sparse_attention(*self._tensors, **self._arguments, workspace=self._workspace)


def checked_peer(
    dtype: str, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, rows: Tensor
) -> dict[str, Callable[[], object]]:
    """The peer of this dtype by its name, once its rows are right; nothing where it fails."""
    try:
        peer = attend_peer(dtype, q, k, v)
        if peer is None:
            return {}
        check_attention(peer.attend(indices), None, q, peer.k, peer.v, indices, rows, block=BLOCK)
    except Exception as error:
        print(f"{NAMES[dtype]} left out: {type(error).__name__}: {error}", flush=True)
        return {}
    return {peer.name: lambda: peer.attend(indices)}


def bench_case(run: Run, selection: str, dtype: str, n: int, indices: Tensor, peers: list[str]) -> None:
    q, k, v = (normal(run, n, heads, DTYPES[dtype]) for heads in (HEADS, KV_HEADS, KV_HEADS))
    rows = sample_rows(n, CHECKED_ROWS)
    beside = checked_peer(dtype, q, k, v, indices, rows) if NAMES.get(dtype) in peers else {}
    ours: Attend | PagedAttend
    if dtype == "fp8kv":
        ours = PagedAttend(q, k, v, indices)
        k, v = ours.k, ours.v
    else:
        ours = Attend(q, k, v, indices)
    ours()
    check_attention(ours.out, ours.lse, q, k, v, indices, rows, block=BLOCK)
    ours.out.fill_(torch.nan)
    own, *others = run.timer.measure(ours, *beside.values())
    worst = check_attention(ours.out, ours.lse, q, k, v, indices, rows, block=BLOCK)  # what the timed calls left
    pairs = selected_pairs(indices, n, BLOCK)
    flop = 4 * DIM * HEADS // INDEX_HEADS * pairs
    baseline, baseline_ms = next(((name, o.ms) for name, o in zip(beside, others, strict=True)), ("", None))
    row = Row(
        "stage-attend", selection, dtype, n, 1, own.ms, run.machine, baseline, baseline_ms,
        useful_tflops=flop / own.ms / 1e9, clock_mhz=own.clock_mhz,
    )  # fmt: skip
    run.rows.append(row)
    other = "" if baseline_ms is None else f", {baseline_ms / own.ms:.2f}x {baseline} ({baseline_ms:.3f} ms)"
    print(
        f"{selection} {dtype} {n}: {own.ms:.3f} ms{other}, {row.useful_tflops:.1f} TFLOP/s, {own.clock_mhz} MHz, "
        f"{own.repeats} repeats; the worst of {len(rows)} checked queries is {worst:.1e} off",
        flush=True,
    )


def note_unions(run: Run, selection: str, n: int, indices: Tensor) -> None:
    """Distinct blocks that neighbours select: what a tile of so many tokens has to read."""
    for tokens in (4, 8, 16):
        tiles = indices[:, : n // tokens * tokens].reshape(INDEX_HEADS, -1, tokens * TOPK)
        ascending = tiles.where(tiles >= 0, 2**30).sort(-1).values
        distinct = (ascending[..., 1:] != ascending[..., :-1]) & (ascending[..., 1:] < 2**30)
        mean = float(distinct.sum(-1).float().mean()) + 1
        run.note(f"union-of-{tokens}", mean, "blocks", selection=selection, n=n)


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = bench_parser(__doc__, DTYPES, usual=["bf16", "fp8kv"], peers=PEERS)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    run = start("stage_attend", arguments.device)
    if run is None:
        return 1
    torch.manual_seed(0)
    bench_products(run, "start", {"bf16": torch.bfloat16})
    for n in arguments.lengths:
        for selection in arguments.selections:
            run.stage(f"{selection}, {n} keys")
            indices = select(run, selection, n)
            note_unions(run, selection, n, indices)
            for dtype in arguments.dtypes:
                bench_case(run, selection, dtype, n, indices, arguments.peers)
                run.write(arguments.out, "stage_attend")
    bench_products(run, "end", {"bf16": torch.bfloat16})
    run.write(arguments.out, "stage_attend")
    return 0


if __name__ == "__main__":
    sys.exit(main())
