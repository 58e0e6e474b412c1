"""Index scores with the exact top-k at M3's shape: 4 index heads, one key head, Di 128, blocks of 128, topk 16, causal.

    python bench/stage_select.py --out DIR [--lengths 8192 131072] [--dtypes bf16] [--selections random] [--device cpu]

Times select_blocks on the vectors of selections.py and checks sampled rows against float64 before a time counts; beside
it, where OPENMSA_PEERS is set (peers.py), the scores and top-k of vLLM (bf16) and FlashInfer (fp8) on the same tensors.
In the same run: the bare product rates of PyTorch, what the top-k adds to the scores, and how many of the blocks that
bf16 vectors choose their fp8 casts choose too. Writes DIR/stage_select.csv and DIR/stage_select_context.csv. On the CPU
it shows that the bench itself works; the times mean nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import openmsa
import torch
from common.results import Row
from common.run import Run, bench_parser, bench_products, start
from common.timing import Measured
from peers import select_peer
from select_check import check_selection, recall, sample_rows
from selections import GENERATORS, make_overlap, random
from torch import Tensor

HEADS, DIM, BLOCK, TOPK = 4, 128, 128, 16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8index": torch.float8_e4m3fn}
LENGTHS = [8192, 32768, 131072, 524288, 1048576]
RECALL_LENGTHS = (32768, 131072)
TOPK_LENGTH = 131072


def select_flop(queries: int, keys: int) -> float:
    """Two per multiply-add of every visible (query, key) pair."""
    return 2 * DIM * HEADS * (queries * (keys - queries) + queries * (queries + 1) / 2)


class Select:
    """select_blocks into buffers of its own."""

    def __init__(self, index_q: Tensor, index_k: Tensor, topk: int = TOPK, local_blocks: int = 1) -> None:
        self._tensors = index_q, index_k
        self._arguments: dict[str, Any] = {"topk": topk, "block_size": BLOCK, "local_blocks": local_blocks}
        self.indices = torch.empty(HEADS, index_q.shape[0], topk, dtype=torch.int32, device=index_q.device)
        size = openmsa.workspace_size("select_blocks", *self._tensors, **self._arguments, out=self.indices)
        self._workspace = torch.empty(size, dtype=torch.uint8, device=index_q.device)

    def __call__(self) -> None:
        openmsa.select_blocks(*self._tensors, **self._arguments, out=self.indices, workspace=self._workspace)


def moved_bytes(index_q: Tensor, index_k: Tensor) -> int:
    """Inputs read once and indices written once."""
    return (index_q.numel() + index_k.numel()) * index_q.element_size() + 4 * TOPK * HEADS * index_q.shape[0]


def checked_peer(index_q: Tensor, index_k: Tensor, rows: Tensor) -> tuple[str, Callable[[], object]] | None:
    """The peer of this case once its selection is right; one that fails is left out, and the bench goes on."""
    try:
        peer = select_peer(index_q, index_k)
        if peer is not None:
            check_selection(peer[1](), index_q, index_k, rows, ordered=False)
    except Exception as error:
        print(f"peer of {index_q.dtype} left out: {type(error).__name__}: {error}", flush=True)
        return None
    return peer


def bench_case(run: Run, selection: str, dtype: str, index_q: Tensor, index_k: Tensor) -> Tensor:
    """Adds the case's row and returns its indices."""
    n = index_q.shape[0]
    ours = Select(index_q, index_k)
    ours()
    rows = sample_rows(n)
    checked = check_selection(ours.indices, index_q, index_k, rows)
    peer = checked_peer(index_q, index_k, rows)
    baseline, baseline_ms = "", None
    if peer is None:
        (own,) = run.timer.measure(ours)
    else:
        baseline, call = peer
        own, other = run.timer.measure(ours, call)
        baseline_ms = other.ms
    check_selection(ours.indices, index_q, index_k, rows)  # what the timed calls left
    row = Row(
        "stage-select", selection, dtype, n, 1, own.ms, run.machine, baseline, baseline_ms,
        useful_tflops=select_flop(n, n) / own.ms / 1e9, gbs=moved_bytes(index_q, index_k) / own.ms / 1e6,
        clock_mhz=own.clock_mhz,
    )  # fmt: skip
    run.rows.append(row)
    beside = f", {baseline} {baseline_ms:.3f} ms" if baseline_ms is not None else ""
    print(
        f"{selection} {dtype} {n}: {own.ms:.3f} ms{beside}, {row.useful_tflops:.1f} TFLOP/s, {own.clock_mhz} MHz, "
        f"{own.repeats} repeats; {checked.differing} of {checked.rows} checked rows differ from float64, "
        f"by {checked.worst:.1e} of |q| max |k|",
        flush=True,
    )
    return ours.indices.clone()


def bench_vectors(run: Run, selection: str, vectors: tuple[np.ndarray, np.ndarray], dtypes: list[str]) -> None:
    index = [torch.from_numpy(x).to(run.device) for x in vectors]
    n = index[0].shape[0]
    indices = {dtype: bench_case(run, selection, dtype, *(x.to(DTYPES[dtype]) for x in index)) for dtype in dtypes}
    if n in RECALL_LENGTHS and {"bf16", "fp8index"} <= indices.keys():
        share = recall(indices["fp8index"], indices["bf16"], slice(TOPK * BLOCK, None))
        run.note("fp8-recall", share, "share", selection=selection, n=n)


def bench_topk(run: Run, dtypes: list[str]) -> None:
    """What keeping 16 blocks adds: beside the same scores with the best block alone (topk 1, no local block), and
    beside the scores' FLOP at the bare product rate. `square`: a causal sequence, 4 n rows that see n / 256 blocks on
    average. `wide`: n rows that see n / 128 blocks on average, the last n / 4 queries of 9 n / 8 keys."""
    n = TOPK_LENGTH
    tensors = [torch.from_numpy(x).to(run.device) for x in random(n + n // 8, HEADS, DIM, seed=3)]
    for dtype in dtypes:
        index_q, index_k = (x.to(DTYPES[dtype]) for x in tensors)
        for shape, queries, keys in (("square", n, n), ("wide", n // 4, n + n // 8)):
            q, k = index_q[:queries], index_k[:keys]
            full, best = Select(q, k), Select(q, k, topk=1, local_blocks=0)
            with_topk, with_best = run.timer.measure(full, best)
            check_selection(full.indices, q, k, sample_rows(queries))

            def note(what: str, ms: float, of: Measured, dtype: str = dtype, shape: str = shape) -> None:
                run.note(f"{what}-{shape}", ms, "ms", selection="random", dtype=dtype, n=n, clock=of.clock_mhz)

            note("topk16", with_topk.ms, with_topk)
            note("best-block", with_best.ms, with_best)
            note("topk16-over-best-block", with_topk.ms - with_best.ms, with_topk)
            if dtype in run.rates:
                bare = select_flop(queries, keys) / max(run.rates[dtype]) / 1e9
                note("bare-product", bare, with_topk)
                note("topk16-over-bare-product", with_topk.ms - bare, with_topk)


def print_shares(run: Run) -> None:
    print("\nshare of the run's bare product rate (mean of start and end)")
    for row in run.rows:
        if row.dtype in run.rates and row.useful_tflops is not None:
            rate = sum(run.rates[row.dtype]) / len(run.rates[row.dtype])
            beside = "" if row.baseline_ms is None else f", {row.baseline_ms / row.openmsa_ms:.2f}x {row.baseline}"
            print(
                f"{row.selection:8}{row.dtype:9}{row.n:8} {row.useful_tflops:8.1f} TFLOP/s "
                f"{row.useful_tflops / rate:6.1%}{beside}"
            )


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = bench_parser(__doc__, DTYPES)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    run = start("stage_select", arguments.device)
    if run is None:
        return 1
    run.stage("bare products")
    bench_products(run, "start", {d: DTYPES[d] for d in arguments.dtypes})
    for n in arguments.lengths:
        vectors = random(n, HEADS, DIM, seed=n)
        for selection in GENERATORS:  # overlap is made from random's vectors, in place
            if selection == "overlap":
                vectors = make_overlap(*vectors, seed=n)
            if selection in arguments.selections:
                run.stage(f"{selection}, {n} keys")
                bench_vectors(run, selection, vectors, arguments.dtypes)
    if TOPK_LENGTH in arguments.lengths:
        run.stage("what the top-k adds")
        bench_topk(run, arguments.dtypes)
    run.stage("bare products")
    bench_products(run, "end", {d: DTYPES[d] for d in arguments.dtypes})
    print_shares(run)
    run.write(arguments.out, "stage_select")
    return 0


if __name__ == "__main__":
    sys.exit(main())
