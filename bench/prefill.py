"""Prefill from end to end at M3's shape: one msa_attention(kl="off") call beside dense causal attention.

    python bench/prefill.py --out DIR [--lengths 8192 131072] [--dtypes bf16 fp8index] [--selections overlap]

A time holds everything that a user calls: index scores, top-k, plan, attention. Dense is FlashAttention 4 and cuDNN,
each that runs here, alternating with ours in one run; beyond 131072 keys FlashAttention's time of this run grows with
the square (`fa4-extrapolated`). Sampled rows are checked against float64 before a time counts. `chunk`: the last 16384
queries of a paged prefix of n. Writes DIR/prefill.csv and DIR/prefill_context.csv.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import openmsa
import torch
from attend_check import check_attention, selected_pairs
from common.results import Row, write_rows, write_table
from common.run import CONTEXT_FIELDS, Run, bench_products, start
from common.timing import Measured
from dense import dense_calls
from select_check import check_selection, sample_rows
from selections import GENERATORS
from stage_attend import BLOCK, CHECKED_ROWS, DIM, HEADS, INDEX_HEADS, KV_HEADS, TOPK, normal
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp8index": torch.float8_e4m3fn}  # of the index tensors
LENGTHS = [8192, 32768, 131072, 524288, 1048576]
LONGEST_DENSE = 131072
CHUNK = 16384


def index_vectors(run: Run, selection: str, n: int, dtype: str) -> list[Tensor]:
    vectors = GENERATORS[selection](n, INDEX_HEADS, DIM, seed=n)
    return [torch.from_numpy(x).to(run.device, torch.bfloat16).to(DTYPES[dtype]) for x in vectors]


class Prefill:
    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors
        self._arguments: dict[str, Any] = {"topk": TOPK, "block_size": BLOCK, "kl": "off"}
        size = openmsa.workspace_size("msa_attention", *tensors, **self._arguments)
        self._workspace = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)
        self.result: Any = None

    def __call__(self) -> None:
        self.result = None  # its memory serves the next call
        self.result = openmsa.msa_attention(*self._tensors, **self._arguments, workspace=self._workspace)


class Chunk:
    """paged_msa_attention of the last queries of a request whose pages are shuffled."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor) -> None:
        n = k.shape[0]
        order = torch.randperm(n // BLOCK, device=k.device)
        caches = []
        for tensor in (k, v, index_k):
            cache = torch.empty(n // BLOCK, BLOCK, *tensor.shape[1:], dtype=tensor.dtype, device=k.device)
            cache.view(torch.uint8)[order] = tensor.view(torch.uint8).view(cache.view(torch.uint8).shape)
            caches.append(cache)
        lengths = torch.tensor([n], dtype=torch.int32, device=k.device)
        offsets = torch.tensor([0, CHUNK], dtype=torch.int32, device=k.device)
        self._tensors = q[-CHUNK:], caches[0], caches[1], index_q[-CHUNK:], caches[2], order.int()[None], lengths
        self._arguments: dict[str, Any] = {"cu_seqlens_q": offsets, "topk": TOPK}
        size = openmsa.workspace_size("paged_msa_attention", *self._tensors, **self._arguments)
        self._workspace = torch.empty(size, dtype=torch.uint8, device=k.device)
        self.result: Any = None

    def __call__(self) -> None:
        self.result = openmsa.paged_msa_attention(*self._tensors, **self._arguments, workspace=self._workspace)


def useful_flop(queries: int, keys: int, indices: Tensor) -> float:
    scores = 2 * DIM * INDEX_HEADS * (queries * (keys - queries) + queries * (queries + 1) / 2)
    return scores + 4 * DIM * HEADS // INDEX_HEADS * selected_pairs(indices, keys, BLOCK)


class Bench:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._fa4_ms: dict[int, float] = {}

    def prefill(self, selection: str, dtype: str, n: int) -> None:
        run = self._run
        q, k, v = (normal(run, n, heads, torch.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS))
        index_q, index_k = index_vectors(run, selection, n, dtype)
        ours = Prefill(q, k, v, index_q, index_k)
        ours()
        rows = sample_rows(n, CHECKED_ROWS)
        check_selection(ours.result.indices, index_q, index_k, rows)
        check_attention(ours.result.out, ours.result.lse, q, k, v, ours.result.indices, rows)
        dense = dense_calls(q, k, v) if n <= LONGEST_DENSE else {}
        with torch.no_grad():
            own, *others = run.timer.measure(ours, *dense.values())
        check_attention(ours.result.out, ours.result.lse, q, k, v, ours.result.indices, rows)
        beside = {name: measured.ms for name, measured in zip(dense, others, strict=True)}
        if "fa4" in beside:
            self._fa4_ms[n] = beside["fa4"]
        if not dense and self._fa4_ms:
            longest = max(self._fa4_ms)
            beside["fa4-extrapolated"] = self._fa4_ms[longest] * (n / longest) ** 2
        flop = useful_flop(n, n, ours.result.indices)
        self._add("prefill", selection, dtype, n, own, beside, flop)
        if n == LONGEST_DENSE and run.device == "cuda":
            self._chunk(selection, dtype, n, (q, k, v, index_q, index_k), ours)

    def _chunk(self, selection: str, dtype: str, n: int, tensors: tuple[Tensor, ...], whole: Prefill) -> None:
        q, k, v, index_q, index_k = tensors
        paged = Chunk(*tensors)
        contiguous = Prefill(q[-CHUNK:], k, v, index_q[-CHUNK:], index_k)
        paged()
        contiguous()
        rows = sample_rows(CHUNK, CHECKED_ROWS)
        check_attention(paged.result.out, paged.result.lse, q[-CHUNK:], k, v, paged.result.indices, rows)
        own, other = self._run.timer.measure(paged, contiguous)
        flop = useful_flop(CHUNK, n, whole.result.indices[:, -CHUNK:])
        self._add("chunk", selection, dtype, n, own, {}, flop)
        self._run.note("contiguous-chunk", other.ms, "ms", selection=selection, dtype=dtype, n=n, clock=other.clock_mhz)
        self._run.note("chunk-rate-of-contiguous", other.ms / own.ms, "share", selection=selection, dtype=dtype, n=n)

    def _add(
        self, case: str, selection: str, dtype: str, n: int, own: Measured, beside: dict[str, float], flop: float
    ) -> None:
        run = self._run
        for name, ms in (beside or {"": None}).items():
            row = Row(
                case, selection, dtype, n, 1, own.ms, run.machine, name, ms, useful_tflops=flop / own.ms / 1e9,
                clock_mhz=own.clock_mhz,
            )  # fmt: skip
            run.rows.append(row)
        ratios = ", ".join(f"{ms / own.ms:.2f}x {name} ({ms:.2f} ms)" for name, ms in beside.items())
        print(
            f"{case} {selection} {dtype} {n}: {own.ms:.3f} ms, {flop / own.ms / 1e9:.0f} TFLOP/s, {own.clock_mhz} MHz; "
            f"{ratios}",
            flush=True,
        )


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the CSV files; none without it")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--selections", nargs="+", choices=GENERATORS, default=list(GENERATORS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    run = start("prefill", arguments.device)
    if run is None:
        return 1
    torch.manual_seed(0)
    bench = Bench(run)
    started = time.monotonic()
    bench_products(run, "start", {"bf16": torch.bfloat16})
    for n in arguments.lengths:
        for selection in arguments.selections:
            for dtype in arguments.dtypes:
                print(
                    f"-- {selection} {dtype}, {n} keys, {time.monotonic() - started:.0f} s after the start", flush=True
                )
                bench.prefill(selection, dtype, n)
    bench_products(run, "end", {"bf16": torch.bfloat16})
    if arguments.out is not None:
        write_rows(arguments.out / "prefill.csv", run.rows)
        write_table(arguments.out / "prefill_context.csv", CONTEXT_FIELDS, run.context)
    return 0


if __name__ == "__main__":
    sys.exit(main())
