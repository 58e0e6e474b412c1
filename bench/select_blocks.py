"""Block selection on the GPU at M3's shape: time, useful TFLOP/s and bytes per second, as CSV.

    python bench/select_blocks.py [--csv FILE] [--lengths 8192 32768 131072] [--dtype bf16]

The baseline forms every block's maximum from a dense product with PyTorch, chunk by chunk, and takes PyTorch's top-k.
Both run alternately in one process; a row is the median of several. The selection is checked against the baseline's on
sampled rows.
"""

import argparse
import csv
import datetime
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import openmsa
import torch

INDEX_HEADS, DIM, BLOCK, TOPK = 4, 128, 128, 16
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8index"}  # as the CSV calls them
FIELDS = [
    "case", "selection", "dtype", "n", "batch", "openmsa_ms", "baseline_ms", "baseline", "ratio", "useful_tflops",
    "gbs", "clock_mhz", "gpu", "driver", "commit", "date",
]  # fmt: skip


def milliseconds(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def dense_selection(index_q: torch.Tensor, index_k: torch.Tensor, rows: range) -> torch.Tensor:
    """Blocks of these rows in no certain order, the own block among them: [Hi, rows, topk]."""
    blocks = (index_k.shape[0] + BLOCK - 1) // BLOCK
    keys = index_k[:, 0]
    out = []
    for head in range(INDEX_HEADS):
        scores = (index_q[rows.start : rows.stop, head] @ keys.T).float()
        position = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
        scores.masked_fill_(torch.arange(keys.shape[0], device=scores.device)[None] > position, -torch.inf)
        best = torch.nn.functional.pad(scores, (0, blocks * BLOCK - keys.shape[0]), value=-torch.inf)
        best = best.view(len(rows), blocks, BLOCK).amax(-1)
        best.scatter_(1, position // BLOCK, torch.inf)
        out.append(best.topk(min(TOPK, blocks), dim=1).indices)
    return torch.stack(out)


def dense_all(index_q: torch.Tensor, index_k: torch.Tensor) -> None:
    chunk = max(BLOCK, 2**29 // index_k.shape[0])
    for begin in range(0, index_q.shape[0], chunk):
        dense_selection(index_q, index_k, range(begin, min(begin + chunk, index_q.shape[0])))


def share_agreeing(indices: torch.Tensor, index_q: torch.Tensor, index_k: torch.Tensor) -> float:
    """Share of the last 256 rows' blocks that float32 products of PyTorch choose too."""
    rows = range(index_q.shape[0] - 256, index_q.shape[0])
    expected = dense_selection(index_q.float(), index_k.float(), rows)
    got = indices[:, rows.start : rows.stop]
    return (got[..., :, None] == expected[..., None, :]).any(-1).float().mean().item()


def driver_facts() -> tuple[str, str]:
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm", "--format=csv,noheader,nounits"]
    try:
        facts = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return "", ""
    driver, clock = facts.split(", ")
    return driver, clock


def bench(length: int, dtype: torch.dtype, with_baseline: bool) -> dict[str, object]:
    generator = torch.Generator("cuda").manual_seed(length)
    index_q = torch.randn(length, INDEX_HEADS, DIM, device="cuda", generator=generator).to(dtype)
    index_k = torch.randn(length, 1, DIM, device="cuda", generator=generator).to(dtype)
    indices = torch.empty(INDEX_HEADS, length, TOPK, dtype=torch.int32, device="cuda")

    def ours() -> None:
        openmsa.select_blocks(index_q, index_k, topk=TOPK, block_size=BLOCK, out=indices)

    ours()
    agreeing = share_agreeing(indices, index_q, index_k)
    if agreeing < 0.999:
        raise SystemExit(f"n {length}: only {agreeing:.4%} of the sampled blocks agree with float32 products")
    if with_baseline:
        dense_all(index_q, index_k)
    times, baseline_times = [], []
    deadline = time.monotonic() + 4
    for repeat in range(20):
        if repeat >= 3 and time.monotonic() > deadline:
            break
        times.append(milliseconds(ours))
        if with_baseline:
            baseline_times.append(milliseconds(lambda: dense_all(index_q, index_k)))
    own = statistics.median(times)
    baseline = statistics.median(baseline_times) if baseline_times else float("nan")
    driver, clock = driver_facts()
    useful = 2 * DIM * INDEX_HEADS * length * (length + 1) / 2
    moved = (index_q.numel() + index_k.numel()) * index_q.element_size() + 4 * indices.numel()
    return {
        "case": "stage-select",
        "selection": "random",
        "dtype": DTYPES[dtype],
        "n": length,
        "batch": 1,
        "openmsa_ms": f"{own:.3f}",
        "baseline_ms": f"{baseline:.3f}" if with_baseline else "",
        "baseline": "torch" if with_baseline else "",
        "ratio": f"{baseline / own:.2f}" if with_baseline else "",
        "useful_tflops": f"{useful / own / 1e9:.1f}",
        "gbs": f"{moved / own / 1e6:.1f}",
        "clock_mhz": clock,
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "commit": os.environ.get("OPENMSA_COMMIT", ""),
        "date": datetime.date.today().isoformat(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--dtype", choices=list(DTYPES.values()), default="bf16")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench: no GPU", file=sys.stderr)
        return 1
    rows = []
    writer = csv.DictWriter(sys.stdout, FIELDS, lineterminator="\n")
    writer.writeheader()
    for length in arguments.lengths:
        dtype = next(dtype for dtype, name in DTYPES.items() if name == arguments.dtype)
        rows.append(bench(length, dtype, with_baseline=dtype.itemsize == 2))  # PyTorch multiplies no plain float8
        writer.writerow(rows[-1])
        sys.stdout.flush()
    if arguments.csv:
        with open(arguments.csv, "w", newline="", encoding="utf-8") as file:
            saved = csv.DictWriter(file, FIELDS, lineterminator="\n")
            saved.writeheader()
            saved.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
