"""What the GPU benches compute around their timed calls, and that they run without a GPU."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
pytestmark = pytest.mark.skipif(not BENCH.is_dir(), reason="the sources came without bench/")
if BENCH.is_dir():
    sys.path.append(str(BENCH))
    import attend_check
    import collect
    import prefill
    import prefill_official
    from common.results import FIELDS
    from common.stages import WHOLE, Kernel, spans


def test_spans_count_gaps_inside_a_stage_and_fills_with_what_follows() -> None:
    kernels = [
        Kernel("void openmsa::select_kernel<4>()", 0, 10),
        Kernel("Memset (Device)", 11, 12),
        Kernel("void plan_tiles(TileArguments)", 13, 20),
        Kernel("void cub::DeviceRadixSortOnesweepKernel()", 22, 30),
        Kernel("attend_kernel", 31, 60),
        Kernel("plan_tiles", 61, 70),
        Kernel("rest_kernel", 70, 90),
    ]
    times = spans(kernels[::-1])  # whatever order they are recorded in
    assert times == pytest.approx({"select": 0.010, "plan": 0.019 + 0.009, "attend": 0.029 + 0.020, WHOLE: 0.090})
    assert spans([]) == {}


def test_official_shapes_have_the_published_sums() -> None:
    shapes = prefill_official.read_shapes()
    assert len(shapes) == 66
    assert sum(shape.weight for shape in shapes) == 14805
    apart = 0
    with prefill_official.SHAPES.open(newline="") as file:
        for row, shape in zip(csv.DictReader(file), shapes, strict=True):
            assert sum(shape.queries) == int(row["queries"])
            assert len(shape.keys) == int(row["batch"])
            assert max(shape.keys) == int(row["longest"])
            assert all(0 < q <= k for q, k in zip(shape.queries, shape.keys, strict=True))
            seen = sum((k - q + i) // 128 + 1 for q, k in zip(shape.queries, shape.keys, strict=True) for i in range(q))
            apart += shape.weight if abs(seen / int(row["visible_blocks"]) - 1) > 1e-3 else 0
    assert apart == 12


def test_dense_attention_is_checked() -> None:
    q, k, v = (torch.randn(40, heads, 64) for heads in (4, 2, 2))
    rows = torch.tensor([0, 7, 39])
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)[0]
    out = out.transpose(0, 1).contiguous()
    assert attend_check.check_attention(out, None, q, k, v, None, rows) < 1e-5
    out[39, 3] = out[38, 3]
    with pytest.raises(attend_check.WrongAttentionError, match="query 39"):
        attend_check.check_attention(out, None, q, k, v, None, rows)


def test_runs_are_collected_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.timing.REPEATS", 2)
    results = tmp_path / "results"
    for lengths in (["128"], ["128", "256"]):
        words = ["--device", "cpu", "--dtypes", "bf16", "--selections", "random", "--out", str(tmp_path / "out")]
        assert prefill.main([*words, "--lengths", *lengths]) == 0
        monkeypatch.setattr(sys, "argv", ["collect.py", str(tmp_path / "out"), "--results", str(results)])
        collect.main()
    with (results / "h200" / "prefill.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == list(FIELDS)
    assert [row[:5] for row in rows] == [["prefill", "random", "bf16", n, "1"] for n in ("128", "256")]
    with (results / "h200_context" / "prefill.csv").open(newline="") as file:
        quantities = [row[0] for row in csv.reader(file)]
    assert quantities.count("product-start") == 1
