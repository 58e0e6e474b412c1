"""The cpu backend beside PyTorch's scaled_dot_product_attention, on all threads that PyTorch uses.

    python bench/cpu.py [--cases prefill train decode stage-attend] [--lengths 8192] [--selections random]
                        [--dtypes bf16] [--no-baseline] [--out bench/results/cpu]

prefill        msa_attention(kl="off"), 16 query heads, one KV head, one index head, D 128, beside causal attention
train          the same forward and backward with kl="backward", beside causal attention forward and backward
stage-attend   sparse_attention on the selection of prefill's index vectors
decode         one query over 131072 keys at M3's heads (64/4/4), paged_msa_attention on shuffled pages; fp8 is e4m3
               index keys and K/V with bf16 queries. Beside attention over all keys by one call (fp32 and bf16), and, in
               the context file, by one fp32 product per KV head

The calls of a part alternate; a row is the median. Each part's results are checked against float64 on sampled rows. The
baseline is timed in fp32 and bf16 and the faster one counts. DIR/cpu.csv and DIR_context/cpu.csv get the rows; those of
earlier runs with other keys stay. The whole takes about six minutes on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openmsa
import torch
from common.results import FIELDS, Machine, Row, machine, merge_table
from cpu_check import BLOCK, Gradients, Problem, check_backward, check_forward, visible_pairs
from cpu_machine import clock_mhz, peak_above, processor_name, product_rate
from select_check import check_selection, sample_rows
from selections import GENERATORS
from torch import Tensor

HEADS, DIM, TOPK = 16, 128, 16
DECODE_HEADS, DECODE_KV_HEADS, DECODE_INDEX_HEADS, DECODE_KEYS = 64, 4, 4, 131072
LENGTHS = {"prefill": (8192, 32768), "train": (8192,), "stage-attend": (8192, 32768), "decode": (DECODE_KEYS,)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DECODE_DTYPES = ("fp32", "bf16", "fp8")
MEMORY_LENGTH = 32768
CONTEXT_FIELDS = (
    "quantity", "case", "selection", "dtype", "n", "value", "unit", "clock_mhz", "gpu", "driver", "commit", "date",
)  # fmt: skip

Call = Callable[[], Any]


def alternate(calls: dict[str, Call], seconds: float) -> dict[str, float]:
    """Median milliseconds of each. Repeats until a call took `seconds` and ran three times, or ran for 12 s in all."""
    times: dict[str, list[float]] = {name: [] for name in calls}

    def once(name: str) -> float:
        started = time.perf_counter()
        calls[name]()
        return time.perf_counter() - started

    for name in calls:
        if (first := once(name)) > 2:  # else it was the warm-up
            times[name].append(first)

    def done(taken: list[float]) -> bool:
        return len(taken) >= 20 or sum(taken) >= 12 or (len(taken) >= 3 and sum(taken) >= seconds)

    while not all(map(done, times.values())):
        for name, taken in times.items():
            if not done(taken):
                taken.append(once(name))
    return {name: statistics.median(taken) * 1e3 for name, taken in times.items()}


@dataclass
class Run:
    machine: Machine
    baseline: bool
    selections: list[str]
    dtypes: list[str]
    seconds: float
    rows: list[Row] = field(default_factory=list)
    context: list[list[str]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # TFLOP/s of the fp32 product so far

    def note(
        self, quantity: str, value: float, unit: str, *, case: str = "", selection: str = "", dtype: str = "",
        n: int = 0,
    ) -> None:  # fmt: skip
        m = self.machine
        cells = [quantity, case, selection, dtype, str(n or ""), f"{value:.5g}", unit, str(clock_mhz() or "")]
        self.context.append([*cells, m.gpu, m.driver, m.commit, m.date])
        print(" ".join(cell for cell in cells[:5] if cell) + f": {value:.5g} {unit}", flush=True)

    def measure_product(self, when: str) -> None:
        self.rates.append(product_rate(self.seconds / 3))
        self.note(f"product-{when}", 1e3 * self.rates[-1], "GFLOP/s", dtype="fp32", n=2048)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        beside = "" if row.baseline_ms is None else f", {row.baseline_ms / row.openmsa_ms:.2f}x {row.baseline}"
        speed = "" if row.useful_tflops is None else f", {1e3 * row.useful_tflops:.1f} GFLOP/s"
        share = "" if row.useful_tflops is None else f" ({row.useful_tflops / self.rates[0]:.0%} of the product)"
        print(
            f"{row.case} {row.selection} {row.dtype} {row.n}: {row.openmsa_ms:.2f} ms{speed}{share}{beside}", flush=True
        )

    def add_part(
        self, case: str, n: int, times: dict[str, float], flop: dict[str, float], moved: dict[str, float]
    ) -> None:
        """Rows of a part whose calls are named "selection dtype" and, of the baseline, "torch dtype"."""
        dense = {name.split()[1]: ms for name, ms in times.items() if name.startswith("torch ")}
        for dtype, ms in dense.items():
            self.note("torch-ms", ms, "ms", case=case, dtype=dtype, n=n)
        fastest = min(dense.values()) if dense else None
        for name, ms in times.items():
            selection, dtype = name.split()
            if selection == "torch":
                continue
            row = Row(
                case, selection, dtype, n, 1, ms, self.machine, "torch" if dense else "", fastest,
                useful_tflops=flop[name] / ms / 1e9, gbs=moved[name] / ms / 1e6, clock_mhz=clock_mhz(),
            )  # fmt: skip
            self.add(row)


def bytes_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def index_vectors(selection: str, n: int, heads: int) -> tuple[Tensor, Tensor]:
    index_q, index_k = GENERATORS[selection](n, heads, DIM, seed=n)
    return torch.from_numpy(index_q), torch.from_numpy(index_k)


def main_vectors(n: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    shapes = (n, HEADS, DIM), (n, 1, DIM), (n, 1, DIM)
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def dense_call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's attention of the last tokens of a sequence, all of them or one, in PyTorch's own layout."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    causal, shared = q.shape[2] > 1, k.shape[1] == 1
    if shared:  # a view of the one head for every query head is faster than enable_gqa's copies
        k, v = (tensor.expand(-1, q.shape[1], -1, -1) for tensor in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=not shared)


def select_flop(n: int) -> float:
    return 2 * DIM * n * (n + 1) / 2


# ---- prefill and stage-attend ----------------------------------------------------------------------------------------


def bench_prefill(run: Run, n: int) -> None:
    main = main_vectors(n)
    calls: dict[str, Call] = {}
    flop, moved = {}, {}
    for selection in run.selections:
        index = index_vectors(selection, n, 1)
        for dtype in run.dtypes:
            tensors = [tensor.to(DTYPES[dtype]) for tensor in (*main, *index)]

            def call(tensors: list[Tensor] = tensors) -> openmsa.MsaResult:
                return openmsa.msa_attention(*tensors, topk=TOPK, block_size=BLOCK, kl="off")

            if n == MEMORY_LENGTH:
                peak = peak_above(lambda call=call: bytes_of(*(x for x in call() if x is not None)))
                run.note("memory-above", peak / 2**20, "MiB", case="prefill", selection=selection, dtype=dtype, n=n)
            result = call()
            rows = sample_rows(n, 24)
            check_selection(result.indices, *tensors[3:], rows)
            check_forward(Problem(*tensors, result.indices), result.out, result.lse, rows)
            name = f"{selection} {dtype}"
            calls[name] = call
            flop[name] = select_flop(n) + 4 * DIM * HEADS * visible_pairs(result.indices, n)
            moved[name] = bytes_of(*tensors, result.out, result.lse, result.indices)
    add_dense(run, "prefill", calls, dense_forward(main), n)
    run.add_part("prefill", n, alternate(calls, run.seconds), flop, moved)


def add_dense(run: Run, case: str, calls: dict[str, Call], make: Callable[[torch.dtype, slice], Call], n: int) -> None:
    """Adds the baseline in each type. One that takes more than twice the other's time on the first quarter of the
    tokens is not run on all of them: PyTorch's bf16 backward would take minutes."""
    if not run.baseline:
        return
    whole, quarter = slice(None), slice(n // 4)
    trial = alternate({dtype: make(DTYPES[dtype], quarter) for dtype in DTYPES}, seconds=0.1)
    for dtype, ms in trial.items():
        run.note("torch-ms", ms, "ms", case=case, dtype=dtype, n=n // 4)
        if ms <= 2 * min(trial.values()):
            calls[f"torch {dtype}"] = make(DTYPES[dtype], whole)


def dense_forward(main: tuple[Tensor, ...]) -> Callable[[torch.dtype, slice], Call]:
    def make(dtype: torch.dtype, tokens: slice) -> Call:
        q, k, v = (tensor[tokens].to(dtype) for tensor in main)
        return lambda: dense_call(q, k, v)

    return make


def bench_attend(run: Run, n: int) -> None:
    main = main_vectors(n)
    calls: dict[str, Call] = {}
    flop, moved = {}, {}
    for selection in run.selections:
        index = index_vectors(selection, n, 1)
        indices = openmsa.select_blocks(*index, topk=TOPK, block_size=BLOCK)
        for dtype in run.dtypes:
            tensors = [tensor.to(DTYPES[dtype]) for tensor in main]

            def call(tensors: list[Tensor] = tensors, indices: Tensor = indices) -> tuple[Tensor, Tensor]:
                return openmsa.sparse_attention(*tensors, indices, block_size=BLOCK, return_lse=True)

            out, lse = call()
            check_forward(Problem(*tensors, *index, indices), out, lse, sample_rows(n, 24))
            name = f"{selection} {dtype}"
            calls[name] = call
            flop[name] = 4 * DIM * HEADS * visible_pairs(indices, n)
            moved[name] = bytes_of(*tensors, indices, out, lse)
    run.add_part("stage-attend", n, alternate(calls, run.seconds), flop, moved)


# ---- train -----------------------------------------------------------------------------------------------------------


def bench_train(run: Run, n: int) -> None:
    main = main_vectors(n)
    d_out = torch.randn(main[0].shape, generator=torch.Generator().manual_seed(1))
    calls: dict[str, Call] = {}
    flop, moved = {}, {}
    for selection in run.selections:
        index = index_vectors(selection, n, 1)
        for dtype in run.dtypes:
            tensors = [tensor.to(DTYPES[dtype]).requires_grad_() for tensor in (*main, *index)]
            upstream, kl_out = d_out.to(DTYPES[dtype]), torch.zeros(())

            def forward(tensors: list[Tensor] = tensors, kl_out: Tensor = kl_out) -> openmsa.MsaResult:
                return openmsa.msa_attention(*tensors, topk=TOPK, block_size=BLOCK, kl="backward", kl_out=kl_out)

            def call(
                tensors: list[Tensor] = tensors, upstream: Tensor = upstream, forward: Call = forward
            ) -> tuple[openmsa.MsaResult, tuple[Tensor, ...]]:
                result = forward()
                return result, torch.autograd.grad([result.out, result.kl], tensors, [upstream, torch.ones(())])

            result, gradients = call()
            with torch.no_grad():
                rows = sample_rows(n, 24)
                problem = Problem(*tensors, result.indices)
                check_selection(result.indices, *tensors[3:], rows)
                check_forward(problem, result.out, result.lse, rows)
                check_backward(problem, Gradients(upstream, *gradients), rows, [n // BLOCK - n // BLOCK // 8])
            name = f"{selection} {dtype}"
            calls[name] = call
            pairs = visible_pairs(result.indices, n)
            flop[name] = select_flop(n) + (4 + 10) * DIM * HEADS * pairs + 6 * DIM * pairs
            moved[name] = bytes_of(*tensors, *gradients, result.out, upstream, result.lse, result.indices)

    def make(dtype: torch.dtype, tokens: slice) -> Call:
        dense = [tensor[tokens].to(dtype).requires_grad_() for tensor in main]
        grad = d_out[tokens].to(dtype).transpose(0, 1)[None]
        return lambda: torch.autograd.grad(dense_call(*dense), dense, grad)

    add_dense(run, "train", calls, make, n)
    run.add_part("train", n, alternate(calls, run.seconds), flop, moved)


# ---- decode ----------------------------------------------------------------------------------------------------------


def grouped_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense attention of one token as one product per KV head: q [Hkv, group, D], k and v [Hkv, n, D]."""
    out = torch.empty_like(q)
    for head in range(q.shape[0]):
        scores = torch.mm(q[head], k[head].T).mul_(DIM**-0.5)
        torch.mm(torch.softmax(scores, -1), v[head], out=out[head])
    return out


def bench_decode(run: Run, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    q = torch.randn(1, DECODE_HEADS, DIM, generator=generator)
    k, v = torch.randn(2, n, DECODE_KV_HEADS, DIM, generator=generator).unbind()
    table = torch.randperm(n // BLOCK, generator=generator, dtype=torch.int32)[None]
    lengths, offsets = torch.tensor([n], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)

    def paged(tensor: Tensor) -> Tensor:
        """Its blocks on the pages of the table."""
        blocks = tensor.unflatten(0, (-1, BLOCK))
        pages = torch.empty_like(blocks)
        pages[table[0].long()] = blocks
        return pages

    calls: dict[str, Call] = {}
    flop, moved = {}, {}
    for selection in run.selections:
        index_q, index_k = index_vectors(selection, n, DECODE_INDEX_HEADS)
        index_q = index_q[-1:].contiguous()
        for dtype in DECODE_DTYPES:
            if dtype != "fp8" and dtype not in run.dtypes:
                continue
            main_type = DTYPES.get(dtype, torch.bfloat16)
            key_type = DTYPES.get(dtype, torch.float8_e4m3fn)
            queries, keys, values = q.to(main_type), k.to(key_type), v.to(key_type)
            index = index_q.to(key_type), index_k.to(key_type)
            caches = paged(keys.view(torch.uint8)).view(key_type), paged(values.view(torch.uint8)).view(key_type)
            index_cache = paged(index[1].view(torch.uint8)).view(key_type)

            def call(
                queries: Tensor = queries, caches: tuple[Tensor, Tensor] = caches, index_query: Tensor = index[0],
                index_cache: Tensor = index_cache,
            ) -> openmsa.MsaResult:  # fmt: skip
                return openmsa.paged_msa_attention(
                    queries, *caches, index_query, index_cache, table, lengths, cu_seqlens_q=offsets, topk=TOPK
                )

            result, row = call(), torch.tensor([0])
            check_selection(result.indices, *index, row)
            widened = (tensor.float() for tensor in (queries, keys, values, *index))
            check_forward(Problem(*widened, result.indices), result.out, result.lse, row)
            name = f"{selection} {dtype}"
            calls[name] = call
            pairs = visible_pairs(result.indices, n)
            flop[name] = 2 * DIM * DECODE_INDEX_HEADS * n + 4 * DIM * DECODE_HEADS // DECODE_INDEX_HEADS * pairs
            moved[name] = bytes_of(index[1]) + 2 * DIM * pairs * keys.element_size()
    add_dense(run, "decode", calls, dense_forward((q, k, v)), n)
    if run.baseline:
        grouped = q[0].unflatten(0, (DECODE_KV_HEADS, -1)), *(x.transpose(0, 1).contiguous() for x in (k, v))
        calls["grouped fp32"] = lambda: grouped_products(*grouped)
    times = alternate(calls, run.seconds)
    grouped_ms = times.pop("grouped fp32", None)
    run.add_part("decode", n, times, flop, moved)
    if grouped_ms is not None:
        run.note("grouped-products-ms", grouped_ms, "ms", case="decode", dtype="fp32", n=n)
        for name in flop:
            selection, dtype = name.split()
            ratio = grouped_ms / times[name]
            run.note("ratio-to-grouped", ratio, "x", case="decode", selection=selection, dtype=dtype, n=n)


# ---- the command -----------------------------------------------------------------------------------------------------

BENCHES = {"prefill": bench_prefill, "train": bench_train, "decode": bench_decode, "stage-attend": bench_attend}


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=BENCHES, default=list(BENCHES))
    parser.add_argument("--lengths", type=int, nargs="+", help="multiples of 128; default: each case's own")
    parser.add_argument("--selections", nargs="+", choices=GENERATORS, default=list(GENERATORS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--no-baseline", action="store_true", help="openmsa alone")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each call's repeats; three repeats at least")
    parser.add_argument("--threads", type=int, help="of PyTorch and openmsa; default: PyTorch's")
    parser.add_argument("--out", type=Path, help="folder of the CSV files; none without it")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    backend = next(b for b in openmsa.info()["backends"] if b["device"] == "cpu" and b["available"])
    facts = machine(f"{processor_name()}, {torch.get_num_threads()} threads", backend.get("target", backend["name"]))
    run = Run(facts, not arguments.no_baseline, arguments.selections, arguments.dtypes, arguments.seconds)
    started = time.monotonic()
    run.measure_product("start")
    for case in arguments.cases:
        for n in arguments.lengths or LENGTHS[case]:
            print(f"-- {case} {n}, {time.monotonic() - started:.0f} s after the start", flush=True)
            with torch.no_grad() if case != "train" else torch.enable_grad():
                BENCHES[case](run, n)
    run.measure_product("end")
    product = statistics.mean(run.rates)
    for row in run.rows:
        if row.useful_tflops is not None and row.case in ("prefill", "train", "stage-attend"):
            share = row.useful_tflops / product
            run.note(
                "share-of-product", share, "share", case=row.case, selection=row.selection, dtype=row.dtype, n=row.n
            )
    print(f"{time.monotonic() - started:.0f} s in all")
    if arguments.out is not None:
        merge_table(arguments.out / "cpu.csv", FIELDS, [row.cells() for row in run.rows], 5)
        context = arguments.out.with_name(arguments.out.name + "_context")
        merge_table(context / "cpu.csv", CONTEXT_FIELDS, run.context, 5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
