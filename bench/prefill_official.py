"""Prefill of the shapes that MiniMax published for its kernels, as their weighted mean: chunks of requests on prefixes.

    python bench/prefill_official.py --out DIR [--dtypes bf16 fp8index] [--selections overlap] [--peers fa4 | none]
                                     [--shapes 66] [--device cpu]

official_prefill.csv holds the 66 representative shapes of github.com/MiniMax-AI/MSA (prefill_benchmark_cases_v1.json,
MIT): sequences, their queries together, the longest sequence's keys, the blocks that the queries see together, and how
many of 14805 calls a shape stands for. Lengths of single sequences are not published: here the queries are shared out
evenly, and the sequences but the longest have the length with which the queries see that many blocks (two shapes, 12
of the calls, see more). Keys and values are packed; heads are M3's. One msa_attention(kl="off") call of each kind and
FlashAttention 4's packed causal attention alternate, after a few rows of each proved right against float64; cuDNN's
causal attention in PyTorch knows no prefixes. Writes DIR/prefill_official.csv, one row a kind with the weighted means
of the times (n and batch: of the keys of a sequence and of the sequences), and DIR/prefill_official_context.csv with
each shape's times.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openmsa
import torch
from attend_check import check_attention, selected_pairs
from common.results import Row
from common.run import Run, bench_parser, bench_products, start
from dense import Dense, checked, fa4_packed
from peers import find_peers
from prefill import DTYPES
from select_check import check_selection
from selections import GENERATORS
from stage_attend import BLOCK, DIM, HEADS, INDEX_HEADS, KV_HEADS, TOPK, normal
from torch import Tensor

SHAPES = Path(__file__).with_name("official_prefill.csv")
PEERS = ("fa4",)


@dataclass(frozen=True)
class Shape:
    queries: list[int]  # by sequence
    keys: list[int]
    weight: int

    @property
    def name(self) -> str:
        return f"{len(self.keys)}x{max(self.keys)}-q{sum(self.queries)}"


def share(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]


def make_shape(batch: int, queries: int, longest: int, visible_blocks: int, weight: int) -> Shape:
    parts = share(queries, batch)
    # A query that sees `keys` keys sees keys / block + 1/2 blocks on average; the last of q queries sees all, the
    # others half of q fewer on average.
    seen = [(longest - q / 2) / BLOCK + 0.5 for q in parts]
    over = sum(q * blocks for q, blocks in zip(parts, seen, strict=True)) - visible_blocks
    shorter = round(over * BLOCK / sum(parts[1:])) if batch > 1 else 0
    keys = [longest] + [min(max(longest - shorter, q), longest) for q in parts[1:]]
    return Shape(parts, keys, weight)


def read_shapes() -> list[Shape]:
    names = "batch", "queries", "longest", "visible_blocks", "weight"
    with SHAPES.open(newline="", encoding="utf-8") as file:
        return [make_shape(*(int(row[name]) for name in names)) for row in csv.DictReader(file)]


class Packed:
    """msa_attention of packed sequences."""

    def __init__(self, shape: Shape, *tensors: Tensor) -> None:
        self._tensors = tensors
        ends = [
            torch.tensor([0, *lengths], device=tensors[0].device).cumsum(0).to(torch.int32)
            for lengths in (shape.queries, shape.keys)
        ]
        self._arguments: dict[str, Any] = {
            "cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1], "topk": TOPK, "block_size": BLOCK, "kl": "off",
        }  # fmt: skip
        size = openmsa.workspace_size("msa_attention", *tensors, **self._arguments)
        self._workspace = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)
        self.result: Any = None

    def __call__(self) -> None:
        self.result = None  # its memory serves the next call
        self.result = openmsa.msa_attention(*self._tensors, **self._arguments, workspace=self._workspace)


class Bench:
    def __init__(self, run: Run, shapes: list[Shape], kinds: list[tuple[str, str]], peers: list[str]) -> None:
        self._run, self._kinds, self._peers = run, kinds, peers
        most_keys, most_queries = max(sum(s.keys) for s in shapes), max(sum(s.queries) for s in shapes)
        self._q = normal(run, most_queries, HEADS, torch.bfloat16)
        self._k, self._v = (normal(run, most_keys, KV_HEADS, torch.bfloat16) for _ in range(2))
        longest = max(max(s.keys) for s in shapes)
        self._vectors = {
            selection: [
                torch.from_numpy(x).to(run.device, torch.bfloat16)
                for x in GENERATORS[selection](longest, INDEX_HEADS, DIM, seed=1)
            ]
            for selection in {selection for selection, _ in kinds}
        }
        self._sums: dict[tuple[str, str], list[float]] = {}  # weighted: own ms, dense ms, FLOP
        self._weights = self._dense_weights = 0

    def _index(self, shape: Shape, selection: str, dtype: str) -> tuple[Tensor, Tensor]:
        """Every sequence has the first keys of the same vectors and its queries at their end."""
        index_q, index_k = self._vectors[selection]
        queries = torch.cat([index_q[k - q : k] for q, k in zip(shape.queries, shape.keys, strict=True)])
        keys = torch.cat([index_k[:k] for k in shape.keys])
        return queries.to(DTYPES[dtype]), keys.to(DTYPES[dtype])

    def shape(self, shape: Shape) -> None:
        q, k, v = self._q[: sum(shape.queries)], self._k[: sum(shape.keys)], self._v[: sum(shape.keys)]
        calls: list[Packed] = []
        flop = []
        for selection, dtype in self._kinds:
            index_q, index_k = self._index(shape, selection, dtype)
            ours = Packed(shape, q, k, v, index_q, index_k)
            ours()
            flop.append(self._check(shape, ours, q, k, v, index_q, index_k))
            calls.append(ours)
        dense: dict[str, Dense] = {}
        if self._peers and find_peers() and q.is_cuda:
            dense = checked(
                "fa4",
                lambda: fa4_packed(q, k, v, shape.queries, shape.keys),
                lambda out: self._check_dense(shape, out, q, k, v),
            )
        timed: list[Callable[[], object]] = [*calls, *dense.values()]
        with torch.no_grad():
            measured = self._run.timer.measure(*timed)
        dense_ms = measured[-1].ms if dense else 0.0
        self._weights += shape.weight
        self._dense_weights += shape.weight if dense else 0
        words = []
        for kind, own, useful in zip(self._kinds, measured, flop, strict=False):
            sums = self._sums.setdefault(kind, [0.0, 0.0, 0.0])
            for i, value in enumerate((own.ms, dense_ms, useful)):
                sums[i] += shape.weight * value
            self._note(shape, own.ms, *kind)
            words.append(f"{' '.join(kind)} {own.ms:.3f} ms" + (f" ({dense_ms / own.ms:.2f}x)" if dense else ""))
        if dense:
            self._note(shape, dense_ms, "", "bf16", "fa4-")
        print(f"{shape.name}, {shape.weight} calls: {', '.join(words)}; dense {dense_ms:.3f} ms", flush=True)

    def _note(self, shape: Shape, ms: float, selection: str, dtype: str, prefix: str = "") -> None:
        m = self._run.machine
        cells = [f"{prefix}shape-{shape.name}", selection, dtype, str(max(shape.keys)), f"{ms:.5g}", "ms", ""]
        self._run.context.append([*cells, m.gpu, m.driver, m.commit, m.date])

    def _check(
        self, shape: Shape, ours: Packed, q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor
    ) -> float:
        """Rows of the first and the last sequence; returns the useful FLOP of all."""
        q_end = k_end = 0
        flop = 0.0
        for number, (queries, keys) in enumerate(zip(shape.queries, shape.keys, strict=True)):
            mine, its = slice(q_end, q_end + queries), slice(k_end, k_end + keys)
            q_end, k_end = mine.stop, its.stop
            indices = ours.result.indices[:, mine]
            pairs = queries * (keys - queries) + queries * (queries + 1) / 2
            attended = selected_pairs(indices, keys, BLOCK)
            flop += 2 * DIM * INDEX_HEADS * pairs + 4 * DIM * HEADS / INDEX_HEADS * attended
            if number in (0, len(shape.keys) - 1):
                rows = torch.tensor(sorted({0, queries // 2, queries - 1}))
                check_selection(indices, index_q[mine], index_k[its], rows)
                check_attention(ours.result.out[mine], ours.result.lse[:, mine], q[mine], k[its], v[its], indices, rows)
        return flop

    def _check_dense(self, shape: Shape, out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        queries, keys = shape.queries[-1], shape.keys[-1]
        rows = torch.tensor(sorted({0, queries - 1}))
        check_attention(out[-queries:], None, q[-queries:], k[-keys:], v[-keys:], None, rows)

    def add_rows(self, shapes: list[Shape]) -> None:
        run = self._run
        keys = sum(s.weight * sum(s.keys) / len(s.keys) for s in shapes) / self._weights
        batch = sum(s.weight * len(s.keys) for s in shapes) / self._weights
        has_dense = self._dense_weights == self._weights
        for (selection, dtype), sums in self._sums.items():
            own_ms, dense_ms, flop = (value / self._weights for value in sums)
            row = Row(
                "prefill-official", selection, dtype, round(keys), round(batch), own_ms, run.machine,
                "fa4" if has_dense else "", dense_ms if has_dense else None, useful_tflops=flop / own_ms / 1e9,
            )  # fmt: skip
            run.rows.append(row)
            beside = f", {dense_ms / own_ms:.2f}x fa4 ({dense_ms:.3f} ms)" if has_dense else ""
            print(f"prefill-official {selection} {dtype}: {own_ms:.3f} ms{beside}", flush=True)


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = bench_parser(__doc__, DTYPES, peers=PEERS)
    parser.add_argument("--shapes", type=int, metavar="N", help="the first N alone, to try the bench; no rows then")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    run = start("prefill_official", arguments.device)
    if run is None:
        return 1
    torch.manual_seed(0)
    every = read_shapes()
    shapes = every[: arguments.shapes]
    bench_products(run, "start", {"bf16": torch.bfloat16})
    kinds = [(selection, dtype) for selection in arguments.selections for dtype in arguments.dtypes]
    bench = Bench(run, shapes, kinds, [name for name in arguments.peers if name != "none"])
    for shape in shapes:
        bench.shape(shape)
    run.stage("all shapes")
    if len(shapes) == len(every):
        bench.add_rows(shapes)
    bench_products(run, "end", {"bf16": torch.bfloat16})
    run.write(arguments.out, "prefill_official")
    return 0


if __name__ == "__main__":
    sys.exit(main())
