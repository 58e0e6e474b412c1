"""Prefill from end to end at M3's shape: one msa_attention(kl="off") call beside other libraries on the same tensors.

    python bench/prefill.py --out DIR [--lengths 8192 131072] [--dtypes bf16 fp8index] [--selections overlap]
                            [--peers fa4 cudnn vllm flashinfer | none] [--real FILE] [--device cpu]

A time holds everything that a user calls: index scores, top-k, plan, attention. Dense causal attention is
FlashAttention 4 and cuDNN; vLLM (bf16) and FlashInfer (fp8index; its keys and values are float8 too) choose blocks and
attend to them up to 131072 keys. All that run here alternate with ours; beyond 131072 keys FlashAttention's time of
this run grows with the square (`fa4-extrapolated`). Sampled rows of every call are checked against float64 before its
time counts. `stage-plan` is the plan inside the prefill, by the GPU's record of its kernels. `chunk`: the last 16384
queries of a paged prefix of n. `--real`: one layer's activations as examples/train_lm.py --save-activations writes
them, at their own shape. Writes DIR/prefill.csv and DIR/prefill_context.csv.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openmsa
import torch
from attend_check import check_attention, selected_pairs
from common.results import Row
from common.run import Run, bench_parser, bench_products, start
from common.stages import WHOLE, stage_times
from common.timing import Measured
from dense import LONGEST, at_length, dense_calls
from peers import NAMES, Attend, Select, attend_peer, select_peer
from select_check import check_selection, sample_rows
from selections import GENERATORS
from stage_attend import BLOCK, CHECKED_ROWS, DIM, HEADS, INDEX_HEADS, KV_HEADS, TOPK, normal
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp8index": torch.float8_e4m3fn}  # of the index tensors
LENGTHS = [8192, 32768, 131072, 524288, 1048576]
PEERS = ("fa4", "cudnn", "vllm", "flashinfer")
CHUNK = 16384
# What a profiler leaves behind can slow launches: calls of a few milliseconds are profiled when all times are taken.
PROFILED_LAST = 32768


class Vectors:
    """Index vectors of selections.py; the last ones made are kept, since making a million takes seconds."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._key: tuple[str, int] | None = None
        self._made: list[Tensor] = []

    def get(self, selection: str, n: int, dtype: str) -> list[Tensor]:
        if self._key != (selection, n):
            vectors = GENERATORS[selection](n, INDEX_HEADS, DIM, seed=n)
            self._made = [torch.from_numpy(x).to(self._run.device, torch.bfloat16) for x in vectors]
            self._key = selection, n
        return [x.to(DTYPES[dtype]) for x in self._made]


class Prefill:
    def __init__(self, *tensors: Tensor, topk: int = TOPK, block: int = BLOCK) -> None:
        self._tensors = tensors
        self._arguments: dict[str, Any] = {"topk": topk, "block_size": block, "kl": "off"}
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


class PeerPrefill:
    """Another library's scores, top-k and attention."""

    def __init__(self, select: Select, attend: Attend) -> None:
        self._select, self._attend = select, attend
        self.indices = self.out = torch.empty(0)

    def __call__(self) -> None:
        self.indices = self._select()
        self.out = self._attend(self.indices)


def checked_peer(
    dtype: str, q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, rows: Tensor
) -> dict[str, Callable[[], object]]:
    """The peer of this dtype by its name, once its selection and attention are right; nothing where it fails."""
    try:
        select, attend = select_peer(index_q, index_k), attend_peer(dtype, q, k, v)
        if select is None or attend is None:
            return {}
        call = PeerPrefill(select[1], attend.attend)
        call()
        check_selection(call.indices, index_q, index_k, rows, ordered=False)
        check_attention(call.out, None, q, attend.k, attend.v, call.indices, rows)
    except Exception as error:
        print(f"{NAMES[dtype]} left out: {type(error).__name__}: {error}", flush=True)
        return {}
    return {attend.name: call}


def useful_flop(q: Tensor, index_q: Tensor, keys: int, indices: Tensor, block: int = BLOCK) -> float:
    queries, index_heads, index_dim = index_q.shape
    pairs = queries * (keys - queries) + queries * (queries + 1) / 2
    attended = selected_pairs(indices, keys, block)
    return 2 * index_dim * index_heads * pairs + 4 * q.shape[-1] * q.shape[1] / index_heads * attended


class Bench:
    def __init__(self, run: Run, peers: list[str]) -> None:
        self._run, self._peers = run, peers
        self._vectors = Vectors(run)
        self._fa4_ms: dict[int, float] = {}
        self._later: list[Callable[[], None]] = []

    def main_vectors(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (normal(self._run, n, heads, torch.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS))
        return q, k, v

    def prefill(self, selection: str, dtype: str, n: int) -> None:
        if n > LONGEST:
            self._time_dense()
        q, k, v = self.main_vectors(n)
        index_q, index_k = self._vectors.get(selection, n, dtype)
        tensors = q, k, v, index_q, index_k
        ours = Prefill(*tensors)
        calls: dict[str, Callable[[], object]] = {}
        rows = sample_rows(n, CHECKED_ROWS)
        if n <= LONGEST:
            calls |= dense_calls(q, k, v, self._peers)
            if NAMES[dtype] in self._peers:
                calls |= checked_peer(dtype, *tensors, rows)
        beside = self._measure("prefill", selection, dtype, ours, tensors, calls, rows)
        for name in ("fa4-scaled", "fa4"):
            if name in beside:
                self._fa4_ms[n] = beside[name]
        if n == LONGEST and self._run.device == "cuda":
            self._chunk(selection, dtype, n, tensors, ours)

    def real(self, path: Path) -> None:
        import safetensors

        with safetensors.safe_open(path, "pt") as file:
            config = json.loads(file.metadata()["config"])
            names = ("q", "k", "v", "index_q", "index_k")
            tensors = tuple(file.get_tensor(name).to(self._run.device, torch.bfloat16) for name in names)
        q, k, v = tensors[:3]
        ours = Prefill(*tensors, topk=config["topk"], block=config["block"])
        calls: dict[str, Callable[[], object]] = dict(dense_calls(q, k, v, self._peers))
        rows = sample_rows(q.shape[0], CHECKED_ROWS)
        self._measure("prefill", "real", "bf16", ours, tensors, calls, rows, block=config["block"])

    def _measure(
        self, case: str, selection: str, dtype: str, ours: Prefill, tensors: tuple[Tensor, ...],
        calls: dict[str, Callable[[], object]], rows: Tensor, block: int = BLOCK,
    ) -> dict[str, float]:  # fmt: skip
        """Adds the case's rows and returns the other libraries' times."""
        q, k, v, index_q, index_k = tensors
        n = k.shape[0]

        def check() -> None:
            check_selection(ours.result.indices, index_q, index_k, rows, block=block)
            check_attention(ours.result.out, ours.result.lse, q, k, v, ours.result.indices, rows, block=block)

        ours()
        check()
        with torch.no_grad():
            own, *others = self._run.timer.measure(ours, *calls.values())
        check()  # what the timed calls left
        beside = at_length({name: measured.ms for name, measured in zip(calls, others, strict=True)}, n)
        if n > LONGEST and self._fa4_ms:
            longest = max(self._fa4_ms)
            beside["fa4-extrapolated"] = self._fa4_ms[longest] * (n / longest) ** 2
        self._add(case, selection, dtype, n, own, beside, useful_flop(q, index_q, n, ours.result.indices, block))
        if self._run.device == "cuda" and n <= PROFILED_LAST:
            self._later.append(lambda: self._stages(selection, dtype, n, own, ours))
        elif self._run.device == "cuda":
            self._stages(selection, dtype, n, own, ours)
        return beside

    def finish(self) -> None:
        while self._later:
            self._later.pop(0)()

    def _stages(self, selection: str, dtype: str, n: int, own: Measured, ours: Prefill) -> None:
        run = self._run
        times = stage_times(ours)
        if "plan" not in times:
            print(f"stage-plan left out: the profiler recorded {sorted(times) or 'no kernels'}", flush=True)
            return
        run.rows.append(Row("stage-plan", selection, dtype, n, 1, times["plan"], run.machine, clock_mhz=own.clock_mhz))
        for stage in sorted(times.keys() - {WHOLE}):
            run.note(f"{stage}-in-prefill", times[stage], "ms", selection=selection, dtype=dtype, n=n)
        run.note("plan-share-of-prefill", times["plan"] / own.ms, "share", selection=selection, dtype=dtype, n=n)

    def _time_dense(self) -> None:
        """FlashAttention at the longest dense length, where no case before has timed it."""
        if self._fa4_ms or "fa4" not in self._peers:
            return
        calls = dense_calls(*self.main_vectors(LONGEST), ["fa4"])
        if "fa4" in calls:
            with torch.no_grad():
                (measured,) = self._run.timer.measure(calls["fa4"])
            self._fa4_ms[LONGEST] = measured.ms
            self._run.note("fa4", measured.ms, "ms", dtype="bf16", n=LONGEST, clock=measured.clock_mhz)

    def _chunk(self, selection: str, dtype: str, n: int, tensors: tuple[Tensor, ...], whole: Prefill) -> None:
        q, k, v, index_q, index_k = tensors
        paged = Chunk(*tensors)
        contiguous = Prefill(q[-CHUNK:], k, v, index_q[-CHUNK:], index_k)
        paged()
        contiguous()
        rows = sample_rows(CHUNK, CHECKED_ROWS)
        check_attention(paged.result.out, paged.result.lse, q[-CHUNK:], k, v, paged.result.indices, rows)
        own, other = self._run.timer.measure(paged, contiguous)
        flop = useful_flop(q, index_q[-CHUNK:], n, whole.result.indices[:, -CHUNK:])
        self._add("chunk", selection, dtype, n, own, {}, flop)
        self._run.note("contiguous-chunk", other.ms, "ms", selection=selection, dtype=dtype, n=n, clock=other.clock_mhz)
        self._run.note("chunk-rate-of-contiguous", other.ms / own.ms, "share", selection=selection, dtype=dtype, n=n)

    def _add(
        self, case: str, selection: str, dtype: str, n: int, own: Measured, beside: dict[str, float], flop: float
    ) -> None:
        run = self._run
        rows: dict[str, float | None] = {**beside} or {"": None}
        for name, ms in rows.items():
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
    parser = bench_parser(__doc__, DTYPES, peers=PEERS)
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--real", type=Path, metavar="FILE", help="one layer's saved activations")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    run = start("prefill", arguments.device)
    if run is None:
        return 1
    torch.manual_seed(0)
    bench = Bench(run, [name for name in arguments.peers if name != "none"])
    bench_products(run, "start", {"bf16": torch.bfloat16})
    for n in arguments.lengths:
        for selection in arguments.selections:
            for dtype in arguments.dtypes:
                run.stage(f"{selection} {dtype}, {n} keys")
                bench.prefill(selection, dtype, n)
                run.write(arguments.out, "prefill")
    if arguments.real is not None:
        run.stage(f"real, {arguments.real.name}")
        bench.real(arguments.real)
    bench.finish()
    bench_products(run, "end", {"bf16": torch.bfloat16})
    run.stage("done")
    run.write(arguments.out, "prefill")
    return 0


if __name__ == "__main__":
    sys.exit(main())
