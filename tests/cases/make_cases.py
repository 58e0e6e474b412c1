#!/usr/bin/env python3
"""Writes cases.json, the problems that the C++ and Python tests of every backend run. tests/cases/README.md explains
the fields. Standard library only; the same bytes on every machine."""

import json
import random
import sys
import zlib
from pathlib import Path

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
DEFAULTS = {
    "tags": [], "Hq": 4, "Hkv": 2, "Hi": 2, "Hik": 1, "D": 64, "Dv": 64, "Di": 64,
    "dtype": "bfloat16", "index_dtype": None, "indices_dtype": "int32",
    "block_size": 128, "topk": 4, "init_blocks": 0, "local_blocks": 1, "scale": None, "index_scale": None,
    "Tq": 0, "Tk": 0, "cu_seqlens_q": None, "cu_seqlens_k": None, "k_starts": None, "paged": None,
    "layout": "contiguous", "values": "normal", "amplitude": 1, "edits": [], "selection": None, "splits": 0,
    "raises": None, "skip_ops": [],
}  # fmt: skip
# Multiply-adds above which a dense operation, or the whole case, would make the table slow.
DENSE_LIMIT, CASE_LIMIT = 25e6, 1e9

cases = []


def ceil_div(a, b):
    return -(-a // b)


def packed(lengths):
    """Fields of a batch of (n_q, n_k) sequences."""
    cu_q, cu_k = [0], [0]
    for n_q, n_k in lengths:
        cu_q.append(cu_q[-1] + n_q)
        cu_k.append(cu_k[-1] + n_k)
    return {"Tq": cu_q[-1], "Tk": cu_k[-1], "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}


def one(n_q, n_k):
    """Fields of one sequence without offsets."""
    return {"Tq": n_q, "Tk": n_k}


def edit(tensor, rows, value, heads=None, dims=None):
    """Sets elements: rows is a list of [first, end) ranges, heads and dims are one range each or None for all."""
    return {"tensor": tensor, "rows": rows, "heads": heads, "dims": dims, "value": value}


def paged(requests, block_size=128, shuffle=None, shared=0, spare=2, padded_rows=0, extra_columns=3, stride_pad=0,
          layout="contiguous", cache_dtype=None, k_scale=None, v_scale=None, scale_form="value"):  # fmt: skip
    """Fields of paged requests (n_q, seq_len). The first `shared` pages of all requests are the same (their number and
    never their contents decide), table entries past a length are garbage, `spare` pages belong to nobody."""
    counts = [ceil_div(length, block_size) for _, length in requests]
    pages = spare + sum(max(c - shared, 0) for c in counts) + shared
    order = list(range(pages))
    if shuffle is not None:
        random.Random(shuffle).shuffle(order)
    common, rest = order[:shared], order[shared:]
    garbage = [-5, 2**30, INT_MIN, INT_MAX, -1, pages]
    max_pages = max(counts, default=0) + extra_columns
    table = []
    for c in counts:
        row = common[:c]
        while len(row) < c:
            row.append(rest.pop(0))
        table.append(row + [garbage[(len(table) + j) % len(garbage)] for j in range(max_pages - c)])
    cu_q = [0]
    for n_q, _ in requests:
        cu_q.append(cu_q[-1] + n_q)
    return {
        "Tq": cu_q[-1] + padded_rows, "Tk": pages * block_size, "cu_seqlens_q": cu_q, "block_size": block_size,
        "paged": {
            "pages": pages, "max_pages": max_pages, "table_stride": max_pages + stride_pad, "block_table": table,
            "seq_lens": [length for _, length in requests], "layout": layout, "cache_dtype": cache_dtype,
            "k_scale": k_scale, "v_scale": v_scale, "scale_form": scale_form,
        },
    }  # fmt: skip


def clamp(x, low, high):
    return min(max(x, low), high)


def sequences(c):
    """(first query row, n_q, key rows by position, None where invisible) of each sequence, clamped as GPUs do."""
    if c["paged"]:
        p, block = c["paged"], c["block_size"]
        cu = [clamp(x, 0, c["Tq"]) for x in c["cu_seqlens_q"]]
        result = []
        for b in range(len(p["seq_lens"])):
            length = clamp(p["seq_lens"][b], 0, p["max_pages"] * block)
            row = p["block_table"][b]
            keys = [
                row[j // block] * block + j % block if 0 <= row[j // block] < p["pages"] else None
                for j in range(length)
            ]
            result.append((cu[b], max(cu[b + 1] - cu[b], 0), keys))
        return result
    if c["cu_seqlens_q"] is None:
        return [(0, c["Tq"], list(range(c["Tk"])))]
    cu_q = [clamp(x, 0, c["Tq"]) for x in c["cu_seqlens_q"]]
    cu_k = [clamp(x, 0, c["Tk"]) for x in c["cu_seqlens_k"]]
    result = []
    for b in range(len(cu_q) - 1):
        start = cu_k[b] if c["k_starts"] is None else clamp(c["k_starts"][b], 0, c["Tk"])
        result.append((cu_q[b], max(cu_q[b + 1] - cu_q[b], 0), list(range(start, cu_k[b + 1]))))
    return result


def ranges(rows):
    """Sorted numbers as [first, end) ranges."""
    result = []
    for row in rows:
        if result and result[-1][1] == row:
            result[-1][1] += 1
        else:
            result.append([row, row + 1])
    return result


def invisible_rows(c):
    """Key rows that no query of the call sees, as ranges."""
    seen = set()
    for _, n_q, keys in sequences(c):
        if n_q > 0:
            seen.update(row for row in keys if row is not None)
    return ranges(row for row in range(c["Tk"]) if row not in seen)


def pairs(c):
    """Visible (query, key) pairs: all, and an upper bound of those within topk blocks."""
    dense = chosen = 0
    for _, n_q, keys in sequences(c):
        n_k = len(keys)
        for i in range(max(0, n_q - n_k), n_q):
            dense += n_k - n_q + i + 1
            chosen += min(n_k - n_q + i + 1, c["topk"] * c["block_size"])
    return dense, chosen


def needs(c):
    """What a backend must be able to do for the index branch and for the main branch, beyond what every backend can."""
    common = set()
    if c["block_size"] == 32:
        common.add("block32")
    if c["topk"] > 64:
        common.add("topk")
    layout = c["paged"]["layout"] if c["paged"] else c["layout"]
    common |= {
        "negative": {"negative_stride"}, "zero_stride": {"zero_stride"}, "odd_stride": {"unaligned"},
    }.get(layout, set())  # fmt: skip
    if c["Hq"] // c["Hi"] not in (1, 2, 4, 8, 16) or c["Hi"] > 16:
        common.add("heads")
    index, main = set(common), set(common)
    if c["index_dtype"] == "float32":
        index.add("fp32")
    if c["index_dtype"] == "float8_e4m3":
        index.add("fp8")
    if c["Di"] not in (64, 128):
        index.add("dim")
    if c["dtype"] == "float32":
        main.add("fp32")
    if c["paged"] and c["paged"]["cache_dtype"] == "float8_e4m3":
        main.add("fp8")
    if c["D"] not in (64, 128) or c["Dv"] not in (64, 128):
        main.add("dim")
    if c["Dv"] != c["D"]:
        main.add("dv")
    return {"index": sorted(index), "main": sorted(main)}


def operations(c):
    """The operations that a case runs; dense ones only where they are cheap."""
    dense, chosen = pairs(c)
    select = c["Hi"] * dense * c["Di"]
    attend = c["Hq"] * chosen * (c["D"] + c["Dv"])
    everything = c["Hq"] * dense * (c["D"] + c["Dv"])
    if c["paged"]:
        ops = {"paged_select": select, "paged_attend": attend, "paged_msa": 0, "append": 0}
        if c["selection"]:
            ops = {"paged_attend": attend}
    else:
        ops = {"select": select, "attend": attend, "backward": 2.5 * attend}
        if everything <= DENSE_LIMIT:
            ops["mass"] = everything
        if c["selection"]:
            del ops["select"]
        else:
            ops["msa"] = attend
            if 4 * everything <= 2 * DENSE_LIMIT:
                ops["warmup"] = 3.5 * everything
        if c["index_dtype"] == "float8_e4m3":
            ops.pop("warmup", None)
    if c["splits"]:
        ops["combine"] = 0
    for op in c["skip_ops"]:
        ops.pop(op, None)
    return list(ops), sum(ops.values())


def add(name, *fields, **more):
    c = dict(DEFAULTS)
    for part in (*fields, more):
        unknown = set(part) - set(DEFAULTS)
        assert not unknown, (name, unknown)
        c.update(part)
    c["index_dtype"] = c["index_dtype"] or c["dtype"]
    if c["paged"]:
        c["paged"] = {**c["paged"], "cache_dtype": c["paged"]["cache_dtype"] or c["dtype"]}
    for divisor, multiple in (("Hkv", "Hi"), ("Hi", "Hq"), ("Hik", "Hi")):
        assert c[multiple] % c[divisor] == 0, name
    ops, cost = operations(c)
    assert cost <= CASE_LIMIT, (name, cost)
    c["ops"] = ops
    c["needs"] = needs(c)
    c["invisible"] = invisible_rows(c)
    del c["skip_ops"]
    cases.append({"name": name, "seed": zlib.crc32(name.encode()), **c, "cost": int(cost)})


TINY = {"Hq": 2, "Hkv": 1, "Hi": 1, "D": 16, "Dv": 16, "Di": 16}
SMALL = {"Hq": 2, "Hkv": 1, "Hi": 1}
M3 = {"Hq": 64, "Hkv": 4, "Hi": 4, "D": 128, "Dv": 128, "Di": 128, "topk": 16}
NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3": "fp8"}


def lengths():
    edge = [0, 1, 127, 128, 129, 2047, 2048, 2049]
    for n in edge:
        add(
            f"length_{n}",
            SMALL,
            one(n, n),
            topk=2,
            Hq=1 if n > 2000 else 2,
            block_size=64 if n == 2047 else 128,
            values="overlap" if n > 2000 else "normal",
        )
    for n in edge:
        add(f"decode_length_{n}", one(1, n), topk=4)
        add(f"tiny_length_{n}", TINY, one(min(n, 130), n), dtype="float32", topk=5)
    add("decode_lengths_packed", packed([(1, n) for n in edge]), topk=5)
    add("prefill_lengths_packed", TINY, packed([(min(n, 150), n) for n in edge]), dtype="float16", topk=5)
    add("batch_0", packed([]), topk=4)
    add("queries_0", packed([(0, 300), (0, 0)]), topk=4, tags=["zero"])
    add("keys_0", packed([(3, 0), (130, 0)]), topk=4, tags=["zero", "blind"])
    add("one_queries_0", one(0, 70), topk=2, tags=["zero"])
    add("one_keys_0", one(9, 0), topk=2, tags=["zero", "blind"])
    add(
        "zero_mixed",
        packed([(0, 0), (5, 0), (0, 400), (7, 260), (0, 0), (1, 1), (3, 0), (2, 129)]),
        topk=2,
        tags=["zero", "blind"],
    )
    add("more_queries_than_keys", packed([(200, 70), (3, 2), (129, 128), (1, 0)]), topk=2, tags=["blind"])
    add("one_more_queries_than_keys", SMALL, one(150, 140), topk=2, block_size=64, tags=["blind"])


def prefixes():
    for n_q, n_k in [
        (5, 2500),
        (16, 2305),
        (17, 2300),
        (64, 2400),
        (100, 1000),
        (33, 3333),
        (128, 2048 + 128),
        (130, 4097),
    ]:
        add(f"prefix_{n_q}_of_{n_k}", SMALL, one(n_q, n_k), topk=6, values="overlap" if n_q > 32 else "normal")
    add(
        "chunked_prefill",
        SMALL,
        packed([(100, 100), (100, 200), (100, 300), (37, 337), (300, 637), (64, 2600)]),
        topk=4,
    )
    # Queries of one document in fragments that share its keys.
    add("k_starts_fragments", SMALL, {"Tq": 390, "Tk": 700, "cu_seqlens_q": [0, 130, 260, 390],
        "cu_seqlens_k": [0, 200, 450, 700], "k_starts": [0, 0, 0]}, topk=3, tags=["k_starts"])  # fmt: skip
    add("k_starts_documents", SMALL, {"Tq": 330, "Tk": 900, "cu_seqlens_q": [0, 100, 130, 230, 330],
        "cu_seqlens_k": [0, 250, 400, 600, 900], "k_starts": [0, 0, 400, 400]}, topk=2, tags=["k_starts"])  # fmt: skip
    add("k_starts_gap", {"Tq": 60, "Tk": 800, "cu_seqlens_q": [0, 20, 60], "cu_seqlens_k": [0, 300, 800],
        "k_starts": [37, 411]}, topk=2, tags=["k_starts", "invisible"])  # fmt: skip
    add(
        "k_starts_inside_block",
        SMALL,
        {
            "Tq": 48,
            "Tk": 2600,
            "cu_seqlens_q": [0, 16, 32, 48],
            "cu_seqlens_k": [0, 2500, 2550, 2600],
            "k_starts": [0, 65, 0],
        },
        topk=5,
        dtype="float16",
        tags=["k_starts"],
    )
    add("documents_unseen", packed([(40, 300), (0, 333), (70, 70), (0, 1), (20, 555)]), topk=2, tags=["invisible"])
    add("documents_isolated", SMALL, packed([(90, 90), (128, 128), (129, 129), (1, 1), (200, 200), (63, 63)]), topk=1)
    add(
        "documents_isolated_fp32",
        TINY,
        packed([(90, 90), (140, 140), (260, 260), (33, 33)]),
        topk=2,
        dtype="float32",
        Di=7,
    )


def heads():
    shapes = [
        (4, 4, 4, 4),
        (1, 1, 1, 1),
        (8, 4, 8, 2),
        (4, 2, 2, 1),
        (8, 2, 4, 2),
        (2, 1, 1, 1),
        (16, 2, 4, 1),
        (4, 1, 1, 1),
        (8, 1, 1, 1),
        (32, 4, 4, 1),
        (16, 1, 2, 2),
        (16, 1, 1, 1),
        (32, 2, 2, 1),
        (64, 4, 4, 1),
        (16, 16, 16, 1),
        (16, 4, 4, 1),
        (32, 8, 16, 4),
        (16, 1, 16, 1),
        (32, 2, 16, 8),
        (16, 2, 8, 8),
        (12, 3, 6, 3),
    ]
    for number, (hq, hkv, hi, hik) in enumerate(shapes):
        dtype = ["bfloat16", "float16"][number % 2]
        add(
            f"heads_{hq}_{hkv}_{hi}_{hik}",
            packed([(8, 700), (5, 150)]),
            Hq=hq,
            Hkv=hkv,
            Hi=hi,
            Hik=hik,
            dtype=dtype,
            topk=3,
        )
    for hi in range(1, 17):
        add(
            f"index_heads_{hi}",
            TINY,
            packed([(12, 500), (40, 40)]),
            dtype="float32",
            Hq=hi * (1 + hi % 2),
            Hkv=1,
            Hi=hi,
            Hik=1,
            topk=2,
        )
    add("group_3", TINY, one(20, 300), Hq=6, Hkv=1, Hi=2, topk=2, dtype="float32")
    add("index_heads_20", TINY, one(10, 300), Hq=20, Hkv=1, Hi=20, Hik=5, topk=2, dtype="float32")
    add("m3_decode", M3, packed([(1, 2600), (1, 130), (1, 4100)]), tags=["m3"])
    add("m3_verify_4", M3, packed([(4, 2700), (4, 900)]), tags=["m3"], skip_ops=["backward", "mass"])
    add("m3_prefill", M3, one(5, 2200), tags=["m3"], skip_ops=["mass"])
    add("m3_training", M3, packed([(7, 7), (60, 70)]), tags=["m3"])
    for hkv in (1, 2):
        add(f"m3_tensor_parallel_{hkv}", M3, packed([(3, 2300), (5, 200)]), Hq=16 * hkv, Hkv=hkv, Hi=hkv, tags=["m3"])


def dims():
    for d, dv, di in [(64, 64, 128), (128, 128, 64), (128, 128, 128), (64, 128, 64), (128, 64, 128)]:
        add(f"dims_{d}_{dv}_{di}", SMALL, packed([(20, 900), (70, 70)]), D=d, Dv=dv, Di=di, topk=3)
    for d, dv, di in [
        (1, 1, 1),
        (7, 7, 7),
        (96, 96, 96),
        (256, 256, 256),
        (7, 3, 5),
        (96, 33, 1),
        (1, 256, 17),
        (255, 1, 200),
    ]:
        for dtype in ("float32", "bfloat16"):
            add(
                f"dims_{d}_{dv}_{di}_{NAMES[dtype]}",
                SMALL,
                packed([(10, 600), (40, 40)]),
                D=d,
                Dv=dv,
                Di=di,
                dtype=dtype,
                topk=2,
            )


def types():
    for dtype in ("float32", "float16", "bfloat16"):
        for index_dtype in ("float32", "float16", "bfloat16", "float8_e4m3"):
            add(
                f"types_{NAMES[dtype]}_{NAMES[index_dtype]}",
                SMALL,
                packed([(30, 1000), (50, 50)]),
                dtype=dtype,
                index_dtype=index_dtype,
                topk=3,
            )
    add("fp8_long", Hq=2, Hkv=1, Hi=1, **one(40, 3000), index_dtype="float8_e4m3", topk=8, values="overlap")
    add("fp8_wide_heads", one(8, 2500), Hq=16, Hkv=1, Hi=4, index_dtype="float8_e4m3", topk=8)
    for block in (32, 64, 128):
        for dtype in ("float32", "bfloat16"):
            add(
                f"block_{block}_{NAMES[dtype]}",
                SMALL,
                packed([(33, 20 * block + 5), (70, 70), (3, block)]),
                block_size=block,
                dtype=dtype,
                topk=4,
            )


def selection_parameters():
    for topk in (1, 2, 3, 5, 8, 16, 17, 31, 33, 63, 64):
        add(f"topk_{topk}", SMALL, packed([(4, 70 * 64 - 3), (3, 100)]), block_size=64, topk=topk)
    add("topk_100", TINY, packed([(5, 110 * 32), (3, 100)]), block_size=32, topk=100, dtype="float32")
    add("topk_above_blocks", packed([(10, 500), (140, 140)]), topk=64)
    for topk, init, local in [
        (1, 1, 1),
        (2, 3, 1),
        (4, 2, 2),
        (3, 0, 5),
        (4, 4, 0),
        (8, 3, 2),
        (2, 0, 0),
        (16, 1, 1),
        (1, 0, 4),
        (5, 70, 70),
        (6, 0, 40),
        (6, 40, 0),
        (16, 15, 1),
        (1, 0, 0),
        (7, 1, 0),
    ]:
        add(
            f"forced_topk{topk}_init{init}_local{local}",
            SMALL,
            packed([(18, 64 * 24 + 5), (150, 150)]),
            block_size=64,
            topk=topk,
            init_blocks=init,
            local_blocks=local,
        )
    for name, scales in [("small", (0.001, 0.002)), ("large", (4.0, 8.0)), ("one", (1.0, 1.0)), ("odd", (0.3, 0.7))]:
        add(f"scale_{name}", SMALL, packed([(20, 900), (60, 60)]), scale=scales[0], index_scale=scales[1], topk=3)
    for dtype in ("bfloat16", "float16", "float32"):
        add(f"amplitude_{NAMES[dtype]}", SMALL, packed([(20, 900), (60, 60)]), amplitude=24, dtype=dtype, topk=3)


def ties():
    for dtype in ("float32", "bfloat16", "float16"):
        add(
            f"ties_{NAMES[dtype]}",
            SMALL,
            packed([(40, 2500), (100, 100)]),
            values="ties",
            dtype=dtype,
            topk=6,
            D=64,
            tags=["ties"],
        )
        add(
            f"equal_{NAMES[dtype]}",
            SMALL,
            packed([(10, 2600), (90, 90)]),
            values="equal",
            dtype=dtype,
            topk=5,
            tags=["ties"],
        )
    add("ties_fp8", SMALL, one(20, 3000), values="ties", index_dtype="float8_e4m3", topk=7, tags=["ties"])
    add("ties_local_0", SMALL, one(70, 2000), values="ties", topk=4, local_blocks=0, block_size=64, tags=["ties"])
    add(
        "ties_init_local",
        SMALL,
        one(20, 2000),
        values="ties",
        topk=6,
        init_blocks=2,
        local_blocks=2,
        block_size=64,
        tags=["ties"],
    )
    add("equal_local_0", SMALL, one(20, 2000), values="equal", topk=4, local_blocks=0, block_size=64, tags=["ties"])
    add("ties_topk_64", SMALL, one(4, 5000), values="ties", topk=64, block_size=64, tags=["ties"])
    # All scores are zeros of both signs.
    add("signed_zeros", SMALL, one(12, 1500), values="ties", topk=5, tags=["ties"],
        edits=[edit("index_q", [[0, 12]], 0.0), edit("index_k", [[100, 300], [700, 1200]], "-0")])  # fmt: skip


def non_finite():
    shape = one(24, 1400)
    add(
        "nan_token",
        SMALL,
        shape,
        topk=4,
        tags=["nan"],
        edits=[edit("index_k", [[5, 6], [300, 301], [700, 720]], "nan", dims=[3, 4])],
    )
    add("nan_block", SMALL, shape, topk=4, tags=["nan"], edits=[edit("index_k", [[128, 256], [512, 640]], "nan")])
    add("nan_all", SMALL, shape, topk=4, tags=["nan"], edits=[edit("index_k", [[0, 1400]], "nan")])
    add("nan_query", SMALL, shape, topk=4, tags=["nan"], edits=[edit("index_q", [[3, 4], [9, 11]], "nan", dims=[0, 1])])
    add(
        "nan_fp8",
        SMALL,
        shape,
        topk=4,
        tags=["nan"],
        index_dtype="float8_e4m3",
        edits=[edit("index_k", [[40, 41], [256, 384]], "nan", dims=[7, 8])],
    )
    add(
        "nan_own_block_local_0",
        SMALL,
        one(70, 1400),
        topk=4,
        local_blocks=0,
        tags=["nan"],
        edits=[edit("index_k", [[1280, 1400]], "nan")],
    )
    add("nan_more_than_topk", SMALL, one(8, 2000), topk=9, tags=["nan"], edits=[edit("index_k", [[128, 1500]], "nan")])
    add(
        "inf_token",
        SMALL,
        shape,
        topk=4,
        tags=["inf"],
        skip_ops=["backward", "msa", "warmup"],
        edits=[
            edit("index_k", [[200, 201], [600, 601]], "inf", dims=[2, 3]),
            edit("index_k", [[900, 901]], "-inf", dims=[5, 6]),
        ],
    )
    add(
        "minus_inf_blocks",
        SMALL,
        one(8, 1400),
        topk=9,
        values="equal",
        tags=["inf"],
        skip_ops=["backward", "msa", "warmup"],
        edits=[edit("index_k", [[128, 640]], "-inf")],
    )
    add(
        "nan_main",
        SMALL,
        one(24, 600),
        topk=2,
        tags=["nan"],
        skip_ops=["backward", "msa", "warmup"],
        edits=[
            edit("q", [[2, 3]], "nan"),
            edit("k", [[50, 51]], "nan", dims=[0, 1]),
            edit("v", [[400, 401]], "nan", dims=[1, 2]),
        ],
    )
    add("inf_value", SMALL, one(24, 600), topk=2, tags=["inf"], skip_ops=["backward", "msa", "warmup"],
        edits=[edit("v", [[400, 401]], "inf", dims=[1, 2]), edit("v", [[10, 11]], "-inf", dims=[0, 1])])  # fmt: skip
    # Queries that see nothing hold NaN everywhere.
    for dtype in ("bfloat16", "float32"):
        add(
            f"nan_blind_queries_{NAMES[dtype]}",
            SMALL,
            packed([(40, 10), (7, 0), (20, 200)]),
            dtype=dtype,
            topk=2,
            tags=["nan", "blind"],
            edits=[edit(t, [[0, 30], [40, 47]], "nan") for t in ("q", "index_q", "d_out")],
        )


def layouts():
    for layout in ("fused", "head_major", "padded_heads", "negative", "zero_stride", "odd_stride"):
        for dtype in ("bfloat16", "float32"):
            add(
                f"layout_{layout}_{NAMES[dtype]}",
                packed([(20, 900), (130, 130)]),
                layout=layout,
                dtype=dtype,
                topk=3,
                tags=["layout"],
            )
        add(
            f"layout_{layout}_fp16_int64",
            one(9, 1300),
            layout=layout,
            dtype="float16",
            indices_dtype="int64",
            Hq=8,
            Hi=2,
            topk=3,
            tags=["layout"],
        )
    add("layout_fused_fp8", one(9, 1300), layout="fused", index_dtype="float8_e4m3", topk=3, tags=["layout"])
    add("layout_head_major_m3", M3, one(7, 900), layout="head_major", topk=4, tags=["layout", "m3"])


def caller_selections():
    kinds = (
        "random",
        "none",
        "leading",
        "middle",
        "trailing",
        "reversed",
        "ascending",
        "duplicates",
        "garbage",
        "local_first",
        "first_block",
    )
    for kind in kinds:
        for dtype, indices_dtype in (("bfloat16", "int32"), ("float32", "int64")):
            layout = "head_major" if kind in ("random", "reversed") and indices_dtype == "int64" else "contiguous"
            add(
                f"selection_{kind}_{NAMES[dtype]}",
                SMALL,
                packed([(20, 2200), (140, 140), (5, 3)]),
                dtype=dtype,
                indices_dtype=indices_dtype,
                selection=kind,
                layout=layout,
                topk=6,
                tags=["selection"],
            )
    for kind in ("random", "garbage", "local_first"):
        add(
            f"selection_{kind}_heads",
            packed([(12, 700), (3, 130)]),
            Hq=16,
            Hkv=2,
            Hi=4,
            selection=kind,
            topk=16,
            block_size=64,
            tags=["selection"],
        )
        add(
            f"selection_{kind}_large_topk",
            TINY,
            one(6, 3000),
            dtype="float32",
            selection=kind,
            topk=90,
            block_size=32,
            tags=["selection"],
        )
        add(
            f"selection_{kind}_paged",
            paged([(3, 2000), (1, 140), (2, 1)], shuffle=5),
            selection=kind,
            topk=8,
            tags=["selection"],
        )
        add(
            f"selection_{kind}_paged_int64",
            paged([(3, 700), (1, 140)], 64, shuffle=5),
            selection=kind,
            indices_dtype="int64",
            topk=8,
            dtype="float16",
            tags=["selection"],
        )


def paged_cases():
    basic = [(1, 700), (1, 129), (1, 2400), (1, 128), (1, 1)]
    add("paged_decode", paged(basic, shuffle=1), topk=5)
    add("paged_decode_fp32", TINY, paged(basic, shuffle=1), dtype="float32", topk=5)
    for n_q in range(1, 17):
        add(
            f"paged_decode_{n_q}_queries",
            SMALL,
            paged([(n_q, 2300 + n_q), (n_q, n_q), (n_q, 500)], 64 if n_q % 3 == 0 else 128, shuffle=n_q),
            topk=4,
            dtype="float16" if n_q % 2 else "bfloat16",
            index_dtype="float8_e4m3" if n_q in (5, 12) else None,
        )
    add("paged_17_queries", SMALL, paged([(17, 2317), (17, 300)], shuffle=3), topk=4)
    add("paged_mixed", SMALL, paged([(1, 500), (100, 700), (16, 16), (0, 300), (33, 2600)], shuffle=4), topk=4)
    add("paged_m3", M3, paged([(1, 2600), (2, 200), (4, 2100)], shuffle=6, layout="interleaved"), tags=["m3"])
    add("paged_batch_0", paged([]), topk=2)
    add("paged_batch_0_padded", paged([], padded_rows=5), topk=2, tags=["padded"])
    add(
        "paged_padded_rows",
        paged([(2, 300), (1, 0), (1, 500), (1, 0)], shuffle=7, padded_rows=11),
        topk=3,
        tags=["padded"],
    )
    add("paged_all_padded", paged([(1, 0), (1, 0), (1, 0)], shuffle=7), topk=3, tags=["padded"])
    add(
        "paged_nan_padded_queries",
        paged([(2, 300), (3, 0), (5, 2)], shuffle=7, padded_rows=6),
        topk=3,
        tags=["padded", "nan"],
        edits=[edit(t, [[2, 8], [10, 16]], "nan") for t in ("q", "index_q")],
    )
    add(
        "paged_shared_pages",
        paged([(1, 1300), (2, 1400), (1, 1290)], shuffle=8, shared=9),
        topk=4,
        tags=["shared"],
        skip_ops=["append"],
    )
    add(
        "paged_shared_everything",
        paged([(1, 900), (1, 900)], shuffle=8, shared=8),
        topk=4,
        tags=["shared"],
        skip_ops=["append"],
    )
    add(
        "paged_prefix_hit_inside_block",
        SMALL,
        paged([(93, 93 + 200), (140, 140 + 77), (64, 64 + 2111)], shuffle=9),
        topk=4,
    )
    add("paged_table_stride", paged([(1, 500), (2, 1300)], 64, shuffle=10, stride_pad=9), topk=4)
    add("paged_table_exact", paged([(1, 512), (2, 300)], shuffle=10, extra_columns=0), topk=4)
    for layout in ("interleaved", "head_major", "page_stride", "odd_stride", "negative"):
        for dtype in ("bfloat16", "float32"):
            add(
                f"paged_layout_{layout}_{NAMES[dtype]}",
                paged([(2, 700), (1, 129)], shuffle=11, layout=layout),
                dtype=dtype,
                topk=3,
                tags=["layout"],
            )
    for form in ("none", "value", "tensor"):
        scales = {} if form == "none" else {"k_scale": 0.25, "v_scale": 3.0}
        for layout in ("contiguous", "interleaved"):
            add(
                f"paged_fp8_{form}_{layout}",
                paged(
                    [(2, 1500), (1, 129)],
                    shuffle=12,
                    layout=layout,
                    cache_dtype="float8_e4m3",
                    scale_form=form,
                    **scales,
                ),
                topk=4,
                tags=["fp8"],
            )
    add(
        "paged_fp8_all",
        M3,
        paged([(1, 900), (3, 400)], shuffle=13, cache_dtype="float8_e4m3", k_scale=0.5, v_scale=0.125),
        index_dtype="float8_e4m3",
        topk=4,
        tags=["fp8", "m3"],
    )
    add(
        "paged_fp8_fp32_queries",
        SMALL,
        paged([(4, 700)], shuffle=14, cache_dtype="float8_e4m3", k_scale=1.5),
        dtype="float32",
        topk=3,
        tags=["fp8"],
    )
    add(
        "paged_fp8_fp16",
        SMALL,
        paged([(4, 700)], 64, shuffle=14, cache_dtype="float8_e4m3", v_scale=2.0),
        dtype="float16",
        topk=3,
        tags=["fp8"],
    )
    add("paged_block_32", SMALL, paged([(4, 700), (1, 33)], 32, shuffle=15), topk=6)
    add("paged_dv", SMALL, paged([(4, 700), (1, 33)], shuffle=15), D=96, Dv=40, Di=24, dtype="float32", topk=3)
    add("paged_ties", SMALL, paged([(4, 2700), (1, 900)], shuffle=16), values="ties", topk=5, tags=["ties"])
    add("paged_forced", SMALL, paged([(4, 2000), (9, 9)], 64, shuffle=17), topk=5, init_blocks=2, local_blocks=2)
    add(
        "paged_many_requests",
        TINY,
        paged([(1, 1 + 37 * b % 400) for b in range(200)], shuffle=18),
        dtype="bfloat16",
        topk=2,
    )
    add("paged_topk_64", SMALL, paged([(2, 70 * 64)], 64, shuffle=19), topk=64)


def clamps():
    """Values that the CPU refuses by name and other devices clamp."""
    n = {"Tq": 100, "Tk": 500, "tags": ["clamp"], "topk": 2}
    add(
        "clamp_q_falls", SMALL, n, cu_seqlens_q=[0, 100, 60, 60], cu_seqlens_k=[0, 300, 400, 500], raises="cu_seqlens_q"
    )
    add("clamp_q_exceeds", SMALL, n, cu_seqlens_q=[0, 50, 999], cu_seqlens_k=[0, 300, 500], raises="cu_seqlens_q")
    add("clamp_q_short", SMALL, n, cu_seqlens_q=[0, 50, 80], cu_seqlens_k=[0, 300, 500], raises="cu_seqlens_q")
    add("clamp_q_negative", SMALL, n, cu_seqlens_q=[0, -7, 100], cu_seqlens_k=[0, 300, 500], raises="cu_seqlens_q")
    add(
        "clamp_k_falls", SMALL, n, cu_seqlens_q=[0, 30, 60, 100], cu_seqlens_k=[0, 300, 200, 500], raises="cu_seqlens_k"
    )
    add("clamp_k_exceeds", SMALL, n, cu_seqlens_q=[0, 50, 100], cu_seqlens_k=[0, 300, INT_MAX], raises="cu_seqlens_k")
    add("clamp_k_short", SMALL, n, cu_seqlens_q=[0, 50, 100], cu_seqlens_k=[0, 300, 450], raises="cu_seqlens_k")
    add("clamp_k_int_min", SMALL, n, cu_seqlens_q=[0, 50, 100], cu_seqlens_k=[0, INT_MIN, 500], raises="cu_seqlens_k")
    add(
        "clamp_k_starts_beyond",
        SMALL,
        n,
        cu_seqlens_q=[0, 50, 100],
        cu_seqlens_k=[0, 300, 500],
        k_starts=[0, 501],
        raises="k_starts",
    )
    add(
        "clamp_k_starts_falls",
        SMALL,
        n,
        cu_seqlens_q=[0, 50, 100],
        cu_seqlens_k=[0, 300, 500],
        k_starts=[301, 300],
        raises="k_starts",
    )
    add(
        "clamp_k_starts_negative",
        SMALL,
        n,
        cu_seqlens_q=[0, 50, 100],
        cu_seqlens_k=[0, 300, 500],
        k_starts=[-9, INT_MIN],
        raises="k_starts",
    )
    for name, page in (("negative", -3), ("beyond", 10**6), ("int_min", INT_MIN), ("next", None)):
        fields = paged([(3, 900), (2, 300)], shuffle=20)
        table = fields["paged"]["block_table"]
        table[0][2] = fields["paged"]["pages"] if page is None else page
        table[1][2] = table[0][2]  # the own block of the second request
        add(f"clamp_page_{name}", SMALL, fields, topk=4, tags=["clamp"], raises="block_table", skip_ops=["append"])
    for name, length in (("beyond_table", 5 * 128 + 1), ("int_max", INT_MAX), ("negative", -4), ("int_min", INT_MIN)):
        fields = paged([(3, 500), (2, 300)], shuffle=21, extra_columns=1)
        table = fields["paged"]["block_table"]
        table[0][4] = fields["paged"]["pages"] - 1
        fields["paged"]["seq_lens"][0] = length
        add(f"clamp_length_{name}", SMALL, fields, topk=4, tags=["clamp"], raises="seq_lens", skip_ops=["append"])


def large():
    fields = packed([(69000, 200)] + [(128, 128)] * 8)
    add("queries_70000", fields, Hq=1, Hkv=1, Hi=1, topk=2, tags=["large", "blind"], skip_ops=["warmup"])
    add(
        "documents_70000_queries",
        packed([(16, 16)] * 4400),
        Hq=1,
        Hkv=1,
        Hi=1,
        D=8,
        Dv=8,
        Di=8,
        dtype="float32",
        topk=2,
        tags=["large"],
    )
    add(
        "paged_requests_70000",
        paged([(1, 1)] * 3000 + [(22, 40)] * 3000, 32, shared=2, extra_columns=0),
        Hq=1,
        Hkv=1,
        Hi=1,
        D=8,
        Dv=8,
        Di=8,
        topk=1,
        dtype="float32",
        tags=["large"],
        skip_ops=["append"],
    )


def combines():
    for dtype in ("float32", "bfloat16", "float16"):
        for splits in (1, 2, 7):
            add(
                f"combine_{splits}_{NAMES[dtype]}",
                one(33, 40),
                dtype=dtype,
                splits=splits,
                Dv=64,
                skip_ops=["select", "attend", "backward", "msa", "warmup", "mass"],
            )
    add(
        "combine_dims",
        one(9, 40),
        dtype="float32",
        splits=3,
        Dv=7,
        skip_ops=["select", "attend", "backward", "msa", "warmup", "mass"],
    )
    add("combine_tokens_0", one(0, 0), splits=3, skip_ops=["select", "attend", "backward", "msa", "warmup", "mass"])


def random_cases(count):
    for number in range(count):
        g = random.Random(f"openmsa case {number}")
        plain = g.random() < 0.5  # what every backend must do
        hi = g.choice([1, 2, 4, 8])
        hkv = g.choice([h for h in (1, 2, 4, 8) if hi % h == 0])
        hik = g.choice([h for h in (1, 1, 1, 2, 4) if hi % h == 0])
        group = g.choice([1, 2, 4, 8, 16]) if hi <= 2 else g.choice([1, 2])
        d = g.choice([64, 128]) if plain else g.randint(1, 100)
        common = {
            "Hq": hi * group, "Hkv": hkv, "Hi": hi, "Hik": hik, "D": d, "Dv": d if plain else g.randint(1, 100),
            "Di": g.choice([64, 128]) if plain else g.randint(1, 100),
            "dtype": g.choice(["bfloat16", "float16"]) if plain else g.choice(["float32", "bfloat16", "float16"]),
            "index_dtype": g.choice(["bfloat16", "float16", "float8_e4m3"]) if plain else None,
            "indices_dtype": g.choice(["int32", "int64"]), "topk": g.choice([1, 2, 3, 4, 6, 9, 16, 24]),
            "init_blocks": g.choice([0, 0, 0, 1, 2]), "local_blocks": g.choice([1, 1, 1, 0, 2, 3]),
            "values": g.choice(["normal", "normal", "ties", "overlap"]),
        }  # fmt: skip
        block = g.choice([64, 128]) if plain else g.choice([32, 64, 128])
        budget = 150e6 / (common["Hq"] * (common["D"] + common["Dv"]) * 5)  # selected pairs
        shapes = []
        for _ in range(g.choice([1, 1, 2, 3, 5])):
            n_k = g.choice(
                [
                    g.randint(0, 3 * block),
                    g.randint(block, 24 * block),
                    g.choice([block, 2 * block + 1, 20 * block - 1]),
                ]
            )
            longest = int(budget / 3 / max(1, min(n_k, common["topk"] * block))) + 1
            n_q = min(g.choice([1, g.randint(0, 16), g.randint(0, 200)]), longest)
            shapes.append((n_q, n_k))
        kind = g.choice(["packed", "packed", "one", "paged", "paged"])
        selection = g.choice([None, None, None, "random", "garbage", "reversed"])
        if kind == "paged":
            fp8 = plain and g.random() < 0.3
            fields = paged(
                [(min(n_q, n_k) if g.random() < 0.8 else n_q, n_k) for n_q, n_k in shapes],
                block,
                shuffle=number,
                padded_rows=g.choice([0, 0, 3]),
                stride_pad=g.choice([0, 2]),
                layout=g.choice(["contiguous", "interleaved", "head_major"]),
                cache_dtype="float8_e4m3" if fp8 else None,
                k_scale=0.75 if fp8 else None,
            )
        else:
            fields = {**(one(*shapes[0]) if kind == "one" else packed(shapes)), "block_size": block}
            fields["layout"] = g.choice(["contiguous", "contiguous", "fused", "head_major", "padded_heads"])
        add(f"random_{number}", common, fields, selection=selection, tags=["random"])


def mark_reduced():
    """The sanitizers' subset: cheap, and each kind of edge at least once."""
    kept = {}
    for c in cases:
        kind = (c["name"].split("_")[0], c["layout"], c["dtype"], c["selection"], c["values"], tuple(c["tags"]),
                c["paged"] and (c["paged"]["layout"], c["paged"]["scale_form"]))  # fmt: skip
        if c["cost"] <= 12e6 and c["Tq"] <= 1000 and kept.get(kind, 0) < 3:
            kept[kind] = kept.get(kind, 0) + 1
            c["tags"] = [*c["tags"], "reduced"]


def build():
    cases.clear()
    for part in (
        lengths,
        prefixes,
        heads,
        dims,
        types,
        selection_parameters,
        ties,
        non_finite,
        layouts,
        caller_selections,
        paged_cases,
        clamps,
        large,
        combines,
    ):
        part()
    random_cases(60)
    mark_reduced()
    names = [c["name"] for c in cases]
    assert len(names) == len(set(names)), "names repeat"
    lines = ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases)
    return '{"cases":[\n' + lines + "\n]}\n"


if __name__ == "__main__":
    text = build()
    path = Path(__file__).with_name("cases.json")
    if "--check" in sys.argv:
        sys.exit(path.read_text() != text)
    path.write_text(text)
    reduced = [c for c in cases if "reduced" in c["tags"]]
    print(f"{len(cases)} cases, {sum(c['cost'] for c in cases) / 1e9:.1f} G multiply-adds; reduced: {len(reduced)}, "
          f"{sum(c['cost'] for c in reduced) / 1e9:.2f} G")  # fmt: skip
