"""Inputs of the case table (tests/cases/README.md), the numpy twin of tests/cpp/case_table.cc: both give the same bits.

`python tests/python/case_inputs.py --write` renews tests/cases/checksums.json, which both languages compare with."""

import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

CASES = Path(__file__).parents[1] / "cases"
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3": ml_dtypes.float8_e4m3fn,
    "int32": np.int32,
    "int64": np.int64,
}
TENSORS = ["q", "k", "v", "index_q", "index_k", "d_out", "new_k", "new_v", "new_index_k", "indices", "outs", "lses"]
D_KL = 0.75
WINDOW = 64  # rows that an "overlap" index query averages
GOLDEN = 0x9E3779B97F4A7C15
INT_MIN, INT_MAX = -(2**31), 2**31 - 1

Case = dict[str, Any]
Array = np.ndarray[Any, Any]


@cache
def load_cases() -> list[Case]:
    cases: list[Case] = json.loads((CASES / "cases.json").read_text())["cases"]
    return cases


def mix(x: Array) -> Array:
    """The finisher of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hashes(seed: int, tensor: str, count: int) -> Array:
    """64 random bits for each element of a tensor."""
    start = mix(np.array([seed + ((TENSORS.index(tensor) + 1) << 32)], np.uint64))
    return mix(start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN))


def bell(h: Array) -> Array:
    """A sum of four 16-bit fields about 0: an integer, close to normal, standard deviation 1.155 * 2**15."""
    fields = sum(((h >> np.uint64(16 * f)) & np.uint64(0xFFFF)).astype(np.int64) for f in range(4))
    return fields - 131070


def shape_of(case: Case, tensor: str) -> tuple[int, ...]:
    c = case
    keys = (c["paged"]["pages"], c["block_size"]) if c["paged"] else (c["Tk"],)
    return {
        "q": (c["Tq"], c["Hq"], c["D"]),
        "k": (*keys, c["Hkv"], c["D"]),
        "v": (*keys, c["Hkv"], c["Dv"]),
        "index_q": (c["Tq"], c["Hi"], c["Di"]),
        "index_k": (*keys, c["Hik"], c["Di"]),
        "d_out": (c["Tq"], c["Hq"], c["Dv"]),
        "new_k": (c["Tq"], c["Hkv"], c["D"]),
        "new_v": (c["Tq"], c["Hkv"], c["Dv"]),
        "new_index_k": (c["Tq"], c["Hik"], c["Di"]),
        "indices": (c["Hi"], c["Tq"], c["topk"]),
        "out": (c["Tq"], c["Hq"], c["Dv"]),
        "lse": (c["Hq"], c["Tq"]),
        "index_lse": (c["Hi"], c["Tq"]),
        "outs": (c["splits"], c["Tq"], c["Hq"], c["Dv"]),
        "lses": (c["splits"], c["Hq"], c["Tq"]),
    }[tensor]


def dtype_of(case: Case, tensor: str) -> Any:
    if tensor in ("k", "v") and case["paged"]:
        return DTYPES[case["paged"]["cache_dtype"]]
    if tensor in ("index_q", "index_k", "new_index_k"):
        return DTYPES[case["index_dtype"]]
    if tensor == "indices":
        return DTYPES[case["indices_dtype"]]
    if tensor in ("lse", "index_lse", "lses"):
        return np.float32
    return DTYPES[case["dtype"]]


def sequence_starts(case: Case) -> list[int]:
    """Key rows at which a sequence of a contiguous case starts."""
    if case["cu_seqlens_k"] is None:
        return [0]
    starts: list[int] = case["k_starts"] or case["cu_seqlens_k"][:-1]
    return starts


def floats(case: Case, tensor: str) -> Array:
    """The tensor as float32 rows [rows, heads, dim], before edits and rounding."""
    shape = shape_of(case, tensor)
    rows = int(np.prod(shape[:-2]))
    heads, dim = shape[-2:]
    index = tensor in ("index_q", "index_k")
    if index and case["values"] == "equal":
        return np.full((rows, heads, dim), 0.5, np.float32)
    if index and case["values"] == "ties":
        h = hashes(case["seed"], tensor, rows * heads * dim)
        x = (h >> np.uint64(33)) % np.uint64(3)
        return (x.astype(np.float32) - np.float32(1)).reshape(rows, heads, dim)
    if tensor == "index_q" and case["values"] == "overlap":
        x = bell(hashes(case["seed"], tensor, (rows + WINDOW) * heads * dim)).reshape(rows + WINDOW, heads, dim)
        total = np.concatenate([np.zeros((1, heads, dim), np.int64), np.cumsum(x, axis=0)])
        result = ((total[WINDOW : WINDOW + rows] - total[:rows]) * 2.0**-18 + 0.5).astype(np.float32)
    else:
        x = bell(hashes(case["seed"], tensor, rows * heads * dim)).reshape(rows, heads, dim)
        result = (x * 2.0**-15).astype(np.float32)
        if tensor == "index_k" and case["values"] == "overlap" and not case["paged"]:
            for start in sequence_starts(case):
                if 0 <= start + 5 < rows:
                    result[start + 5] = 1.5
    if tensor in ("q", "index_q") and case["amplitude"] != 1:
        result = (result.astype(np.float64) * case["amplitude"]).astype(np.float32)
    return result


def poison_of(case: Case, tensor: str) -> float:
    return np.inf if tensor == "v" and dtype_of(case, "v") != DTYPES["float8_e4m3"] else np.nan


def values(case: Case, tensor: str, poisoned: bool = True) -> Array:
    """A floating-point input, contiguous. `poisoned` puts NaN or inf wherever no query of the call sees."""
    x = floats(case, tensor)
    for e in case["edits"]:
        if e["tensor"] == tensor:
            heads = slice(*e["heads"]) if e["heads"] else slice(None)
            dims = slice(*e["dims"]) if e["dims"] else slice(None)
            for first, end in e["rows"]:
                x[first:end, heads, dims] = float(e["value"])
    if case["layout"] == "zero_stride" and tensor in ("q", "k", "v", "index_q", "index_k"):
        x[:] = x[:, :1]
    if poisoned and tensor in ("k", "v", "index_k"):
        for first, end in case["invisible"]:
            x[first:end] = poison_of(case, tensor)
    return x.astype(dtype_of(case, tensor)).reshape(shape_of(case, tensor))


def visible_keys(case: Case) -> Array:
    """[Tq]: position after the last key that a query may see, 0 for none; pages outside the pool count."""
    counts = np.zeros(case["Tq"], np.int64)
    for first, n_q, keys in key_rows(case):
        if n_q:
            counts[first : first + n_q] = np.maximum(len(keys) - n_q + 1 + np.arange(n_q), 0)
    return counts


def key_rows(case: Case) -> list[tuple[int, int, Array]]:
    """(first query row, n_q, rows of the keys by position, -1 where invisible) of each sequence, clamped as GPUs do."""
    c = case
    result = []
    if c["paged"]:
        p, block = c["paged"], c["block_size"]
        cu = np.clip(c["cu_seqlens_q"], 0, c["Tq"])
        for b, length in enumerate(p["seq_lens"]):
            j = np.arange(min(max(length, 0), p["max_pages"] * block))
            page = np.array(p["block_table"][b], np.int64)[j // block] if len(j) else j
            rows = np.where((page >= 0) & (page < p["pages"]), page * block + j % block, -1)
            result.append((int(cu[b]), int(max(cu[b + 1] - cu[b], 0)), rows))
        return result
    if c["cu_seqlens_q"] is None:
        return [(0, c["Tq"], np.arange(c["Tk"]))]
    cu_q, cu_k = np.clip(c["cu_seqlens_q"], 0, c["Tq"]), np.clip(c["cu_seqlens_k"], 0, c["Tk"])
    starts = cu_k[:-1] if c["k_starts"] is None else np.clip(c["k_starts"], 0, c["Tk"])
    for b in range(len(cu_q) - 1):
        result.append((int(cu_q[b]), int(max(cu_q[b + 1] - cu_q[b], 0)), np.arange(starts[b], cu_k[b + 1])))
    return result


def caller_selection(case: Case) -> Array:
    """The selection that the case's caller made: [Hi, Tq, topk]."""
    hi, tq, topk = shape_of(case, "indices")
    h = hashes(case["seed"], "indices", hi * tq * topk).reshape(hi, tq, topk)
    blocks = (visible_keys(case) + case["block_size"] - 1) // case["block_size"]
    n = np.broadcast_to(blocks[None, :, None], h.shape)  # visible blocks
    t = np.broadcast_to(np.arange(topk), h.shape)

    def pick(bits: Array) -> Array:
        """A visible block, or block 0 where there is none."""
        return (bits % np.maximum(n, 1).astype(np.uint64)).astype(np.int64)

    kind = case["selection"]
    if kind == "random":
        x = (h % (n + 3).astype(np.uint64)).astype(np.int64) - 1
    elif kind == "none":
        x = np.full(h.shape, -1)
    elif kind == "leading":
        x = np.where(t < (topk + 1) // 2, -1, pick(h))
    elif kind == "middle":
        x = np.where((t >= topk // 4) & (t < 3 * topk // 4), -1, pick(h))
    elif kind == "trailing":
        x = np.where(t >= topk // 2, -1, pick(h))
    elif kind == "reversed":
        x = n - 1 - t
    elif kind == "ascending":
        x = t
    elif kind == "duplicates":
        x = pick(np.broadcast_to(h[:, :, :1], h.shape))
    elif kind == "local_first":
        x = np.where(t == 0, n - 1, pick(h))
    elif kind == "first_block":
        x = np.where(t == 0, 0, -1)
    elif kind == "garbage":
        wide = case["indices_dtype"] == "int64"
        low, high, other = (-(2**63), 2**63 - 1, 2**32) if wide else (INT_MIN, INT_MAX, -2)
        choice = (h % np.uint64(6)).astype(np.int64)
        x = np.select(
            [choice == 0, choice == 1, choice == 2, choice == 3], [low, high, other, n], pick(h >> np.uint64(8))
        )
    else:
        raise ValueError(f"unknown selection {kind}")
    return np.ascontiguousarray(x.astype(dtype_of(case, "indices")))


def splits(case: Case) -> tuple[Array, Array]:
    """Inputs of combine: some splits empty for some rows, some rows empty in all splits."""
    shape = shape_of(case, "outs")
    outs = (bell(hashes(case["seed"], "outs", int(np.prod(shape)))) * 2.0**-15).astype(np.float32).reshape(shape)
    s, hq, tq = shape_of(case, "lses")
    h = hashes(case["seed"], "lses", s * hq * tq).reshape(s, hq, tq)
    lses = (bell(h) * 2.0**-14).astype(np.float32)
    empty = (h >> np.uint64(60)) % np.uint64(4) == 0
    empty |= (np.arange(tq) % 5 == 3)[None, None, :]
    lses[empty] = -np.inf
    outs[empty.transpose(0, 2, 1)] = 0
    return outs.astype(dtype_of(case, "outs")), lses


def strides_of(case: Case, tensor: str) -> tuple[int, ...]:
    """Element strides of an input or output; a gradient has those of its tensor."""
    c = case
    shape = shape_of(c, tensor)
    dense = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    layout = c["paged"]["layout"] if c["paged"] else c["layout"]
    if layout == "contiguous":
        return dense
    if tensor in ("lse", "index_lse"):
        return (shape[1] + 4, 1)
    if tensor == "indices":
        hi, tq, topk = shape
        return (
            (topk, hi * topk, 1) if layout in ("head_major", "fused", "interleaved") else (tq * (topk + 3), topk + 3, 1)
        )
    if c["paged"]:
        if tensor not in ("k", "v", "index_k"):
            return dense
        _, block, heads, dim = shape
        width = 2 * dim if tensor == "index_k" else c["D"] + c["Dv"]
        return {
            "interleaved": (block * heads * width, heads * width, width, 1),
            "head_major": (heads * block * width, width, block * width, 1),
            "page_stride": (3 * block * heads * dim, heads * dim, dim, 1),
            "odd_stride": (block * (heads * dim + 1), heads * dim + 1, dim, 1),
            "negative": (-block * heads * dim, heads * dim, dim, 1),
        }[layout]
    if tensor not in ("q", "k", "v", "index_q", "index_k", "out", "d_out"):
        return dense
    rows, heads, dim = shape
    if layout == "fused":
        index = tensor in ("index_q", "index_k")
        width = (c["Hi"] + c["Hik"]) * c["Di"] if index else (c["Hq"] + c["Hkv"]) * c["D"] + c["Hkv"] * c["Dv"]
        return (max(width, heads * dim), dim, 1)
    return {
        "head_major": (dim, rows * dim, 1),
        "padded_heads": (heads * (dim + 16), dim + 16, 1),
        "negative": (-heads * dim, dim, 1),
        "zero_stride": dense if tensor in ("out", "d_out") else (dim, 0, 1),
        "odd_stride": (heads * dim + 1, dim, 1),
    }[layout]


@dataclass
class Image:
    """A strided view within memory that is otherwise filled with one byte."""

    memory: Array  # uint8
    view: Array

    def outside_changed(self, fill: int) -> bool:
        inside = np.zeros(self.memory.shape, bool)
        offset = self.view.__array_interface__["data"][0] - self.memory.__array_interface__["data"][0]
        mask = np.ndarray(self.view.shape, np.dtype(f"V{self.view.itemsize}"), inside.data, offset, self.view.strides)
        mask[...] = np.frombuffer(b"\x01" * self.view.itemsize, mask.dtype)[0]
        return bool((self.memory[~inside] != fill).any())


def make_image(dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], fill: int = 0xFF) -> Image:
    guard = 256
    size = np.dtype(dtype).itemsize
    reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    low = sum(min(r, 0) for r in reach) if 0 not in shape else 0
    high = sum(max(r, 0) for r in reach) + 1 if 0 not in shape else 0
    before = guard + -(low * size) // guard * guard + guard
    memory = np.full(before + high * size + guard, fill, np.uint8)
    view = np.ndarray(shape, dtype, memory.data, before, [s * size for s in strides])
    return Image(memory, view)


def place(case: Case, tensor: str, data: Array) -> Array:
    """The data in the strides that the case asks for."""
    strides = strides_of(case, tensor)
    view = make_image(data.dtype, data.shape, strides).view
    view[...] = data
    return view


def checksum(x: Array) -> str:
    """Sum of (bits of element i) * (2 i + 1), modulo 2**64."""
    bits = x.view(np.dtype(f"u{x.dtype.itemsize}")).ravel().astype(np.uint64)
    odd = np.arange(bits.size, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    return f"{int((bits * odd).sum(dtype=np.uint64)):016x}"


def checksums(case: Case) -> dict[str, str]:
    names = ["q", "k", "v", "index_q", "index_k", "d_out"] + (
        ["new_k", "new_v", "new_index_k"] if case["paged"] else []
    )
    result = {name: checksum(values(case, name)) for name in names}
    if case["selection"]:
        result["indices"] = checksum(caller_selection(case))
    if case["splits"]:
        outs, lses = splits(case)
        result["outs"], result["lses"] = checksum(outs), checksum(lses)
    return result


def all_checksums() -> str:
    lines = ",\n".join(f'"{c["name"]}":{json.dumps(checksums(c), separators=(",", ":"))}' for c in load_cases())
    return "{\n" + lines + "\n}\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: case_inputs.py --write")
    (CASES / "checksums.json").write_text(all_checksums())
