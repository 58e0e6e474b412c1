"""bench/: the vectors, the rows of results, the check of selections and the whole bench, on the CPU."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
pytestmark = pytest.mark.skipif(not BENCH.is_dir(), reason="the sources came without bench/")
if BENCH.is_dir():
    sys.path.append(str(BENCH))
    import selections
    from common import results, timing

MACHINE = ("name", "driver", "commit", "2000-01-01")


def plain_overlap(n: int, heads: int, dim: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The definition, row by row."""
    index_q, index_k = selections.random(n, heads, dim, seed)
    u = np.random.default_rng(seed).standard_normal(dim).astype(np.float32)
    u /= np.linalg.norm(u)
    for i in range(1, n):
        index_q[i] = np.float32(0.99) * index_q[i - 1] + np.float32(np.sqrt(1 - 0.99 * 0.99)) * index_q[i]
    index_q += 6 * u
    if n > 5:
        index_k[5, 0] = 16 * u
    return index_q, index_k


@pytest.mark.parametrize("n", [0, 1, 5, 6, 700])
def test_overlap_is_its_definition_bit_by_bit(n: int) -> None:
    for got, expected in zip(selections.overlap(n, 3, 64, seed=n), plain_overlap(n, 3, 64, n), strict=True):
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, expected)


def test_vectors_of_a_seed_are_these() -> None:
    """Pinned, so that results of different commits are about the same vectors."""
    (q, k), (overlap_q, overlap_k) = selections.random(6, seed=1), selections.overlap(6, seed=1)
    assert (q.shape, k.shape) == ((6, 4, 128), (6, 1, 128))
    np.testing.assert_allclose([q[0, 0, 0], q[5, 3, 127], k[0, 0, 0], k[5, 0, 127]], PINNED_RANDOM, rtol=1e-6)
    np.testing.assert_allclose([overlap_q[5, 3, 127], overlap_k[5, 0, 0]], PINNED_OVERLAP, rtol=1e-6)
    np.testing.assert_array_equal(overlap_k[:5], k[:5])
    assert np.linalg.norm(overlap_k[5]) == pytest.approx(16)


PINNED_RANDOM = [1.729103565, -1.07685542, -0.88379889, 0.099198043]
PINNED_OVERLAP = [0.032492876, 0.535834729]


def make_row(**changes: Any) -> results.Row:
    values: dict[str, Any] = {"case": "stage-select", "selection": "random", "dtype": "bf16", "n": 8192, "batch": 1}
    values |= {"openmsa_ms": 2.0, "machine": results.Machine(*MACHINE)}
    return results.Row(**values | changes)


def test_rows_are_written_in_the_columns_of_all_benches(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.csv"
    rows = [
        make_row(useful_tflops=1.26, gbs=3.0, clock_mhz=1980),
        make_row(baseline="vllm", baseline_ms=5.0),
        make_row(n=32768),
    ]
    results.write_rows(path, rows)
    with path.open(encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert tuple(read[0]) == results.FIELDS
    assert len(read) == 3
    assert read[0]["openmsa_ms"] == "2.0000"
    assert (read[0]["baseline"], read[0]["baseline_ms"], read[0]["ratio"]) == ("", "", "")
    assert (read[0]["useful_tflops"], read[0]["clock_mhz"], read[0]["commit"]) == ("1.26", "1980", "commit")
    assert (read[1]["ratio"], read[1]["clock_mhz"]) == ("2.500", "")


def test_wrong_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than once"):
        results.write_rows(tmp_path / "a.csv", [make_row(), make_row(openmsa_ms=3.0)])
    for name in ("case", "selection", "dtype", "baseline"):
        with pytest.raises(ValueError, match=f"{name}: got 'other'"):
            make_row(**{name: "other"})
    with pytest.raises(ValueError, match="baseline_ms None"):
        make_row(baseline="vllm")


class FakeTimer(timing.Timer):
    """Takes the milliseconds of a call from the call itself."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.flushed: set[str] = set()

    def once(self, call: timing.Call, *, flush: bool = False) -> float:
        name, ms = call()  # type: ignore[misc]
        self.order.append(name)
        if flush:
            self.flushed.add(name)
        return float(ms)

    def clock_mhz(self) -> int | None:
        return 1000 + len(self.order)


def test_timed_calls_alternate_and_long_ones_stop_early() -> None:
    timer = FakeTimer()
    short, long = timer.measure(lambda: ("short", 0.5), lambda: ("long", 600.0))
    assert (short.repeats, short.ms) == (20, 0.5)
    assert (long.repeats, long.ms) == (3, 600.0)
    assert short.clock_mhz is not None
    assert timer.flushed == {"short"}
    assert timer.order[:10] == ["short"] * 3 + ["long"] + ["short", "long"] * 3


def selection_problem(n: int = 700, heads: int = 2) -> tuple[Any, Any, Any]:
    torch = pytest.importorskip("torch")
    import openmsa

    index = [torch.from_numpy(x).bfloat16() for x in selections.random(n, heads, 64, seed=3)]
    return openmsa.select_blocks(*index, topk=4), *index


def test_a_right_selection_passes_the_check() -> None:
    indices, index_q, index_k = selection_problem()
    import select_check

    rows = select_check.sample_rows(700)
    assert rows[0] == 0
    assert rows[-1] == 699
    checked = select_check.check_selection(indices, index_q, index_k, rows)
    assert (checked.rows, checked.differing) == (2 * len(rows), 0)
    assert checked.worst <= 5e-6
    # Another library's order: ascending, with the empty slots first.
    select_check.check_selection(indices.sort(-1).values, index_q, index_k, rows, ordered=False)
    with pytest.raises(select_check.WrongSelectionError):
        select_check.check_selection(indices.sort(-1).values, index_q, index_k, rows)
    # The last queries of the same keys.
    select_check.check_selection(indices[:, 600:], index_q[600:], index_k, rows[rows < 100])


@pytest.mark.parametrize(
    ("slot", "value", "message"),
    [
        (0, 5, "out of range"),  # the own block among the scored ones
        (0, "left out", "a better block is left out"),
        (0, "second", "a block is chosen twice"),
        (3, "left out", "own block is not last"),
        (1, -1, "out of range"),
        (2, 10**6, "out of range"),
        ("swap", None, "not in descending order"),
        ("early", 0, "after the last is not -1"),
    ],
)
def test_a_wrong_selection_fails_the_check(slot: int | str, value: int | str | None, message: str) -> None:
    indices, index_q, index_k = selection_problem()
    import torch
    from select_check import WrongSelectionError, check_selection

    row = indices[1, 690]
    missing = next(b for b in range(5) if b not in row.tolist())
    if slot == "swap":
        row[[0, 1]] = row[[1, 0]]
    elif slot == "early":
        indices[0, 5, 2] = value
    elif isinstance(slot, int):
        row[slot] = {"left out": missing, "second": int(row[1])}.get(str(value), value)
    with pytest.raises(WrongSelectionError, match=message):
        check_selection(indices, index_q, index_k, torch.tensor([5, 690]))


def test_recall_counts_scored_blocks() -> None:
    torch = pytest.importorskip("torch")
    from select_check import recall

    want = torch.tensor([[[3, 1, 9], [4, 2, 9]]])
    assert recall(want, want) == 1
    assert recall(torch.tensor([[[1, 0, 9], [2, 4, 9]]]), want) == 0.75
    assert recall(torch.tensor([[[9, 9, 3], [0, 0, 9]]]), want) == 0


def test_the_bench_runs_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    import stage_select

    monkeypatch.setattr(stage_select, "TOPK_LENGTH", 256)
    monkeypatch.setattr(stage_select, "RECALL_LENGTHS", (384,))
    monkeypatch.setattr(stage_select, "TOPK", 2)
    monkeypatch.setattr(timing, "REPEATS", 3)
    monkeypatch.setenv("OPENMSA_COMMIT", "0123abc")
    arguments = ["--device", "cpu", "--lengths", "256", "384", "--dtypes", "bf16", "fp8index", "--out", str(tmp_path)]
    assert stage_select.main(arguments) == 0
    with (tmp_path / "stage_select.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    keys = [(row["selection"], row["dtype"], row["n"]) for row in rows]
    assert sorted(keys) == sorted((s, d, n) for s in ("random", "overlap") for d in ("bf16", "fp8index")
                                  for n in ("256", "384"))  # fmt: skip
    assert {row["commit"] for row in rows} == {"0123abc"}
    with (tmp_path / "stage_select_context.csv").open(encoding="utf-8") as file:
        context = {(row["quantity"], row["dtype"], row["selection"]): row["value"] for row in csv.DictReader(file)}
    assert 0 < float(context["fp8-recall", "", "overlap"]) <= 1
    assert float(context["topk16-over-best-block-wide", "fp8index", "random"]) == pytest.approx(
        float(context["topk16-wide", "fp8index", "random"]) - float(context["best-block-wide", "fp8index", "random"]),
        abs=1e-3,
    )
    assert "share of the run's bare product rate" in capsys.readouterr().out
