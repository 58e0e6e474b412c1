"""bench/cpu.py: its checks see wrong results, its memory gauge sees memory, and the whole of it runs."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import openmsa
import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
pytestmark = pytest.mark.skipif(not BENCH.is_dir(), reason="the sources came without bench/")
if BENCH.is_dir():
    sys.path.append(str(BENCH))
    import cpu_check
    import cpu_machine

    import cpu

N = 400


@pytest.fixture(scope="module")
def case() -> tuple[cpu_check.Problem, openmsa.MsaResult, cpu_check.Gradients]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((N, 4, 64), (N, 2, 64), (N, 2, 64), (N, 2, 64), (N, 1, 64))
    tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    d_out = torch.randn(shapes[0], generator=generator)
    result = openmsa.msa_attention(*tensors, topk=3, kl="backward", kl_out=torch.zeros(()))
    gradients = torch.autograd.grad([result.out, result.kl], tensors, [d_out, torch.ones(())])
    problem = cpu_check.Problem(*(tensor.detach() for tensor in tensors), result.indices)
    return problem, result, cpu_check.Gradients(d_out, *gradients)


ROWS = torch.tensor([0, 127, 128, 300, N - 1])


def test_right_results_pass(case) -> None:
    problem, result, gradients = case
    assert cpu_check.check_forward(problem, result.out.detach(), result.lse, ROWS) < 1e-5
    assert cpu_check.check_backward(problem, gradients, ROWS, [1, 2]) < 1e-5


@pytest.mark.parametrize("name", ["out", "lse", "indices"])
def test_wrong_forward_results_are_seen(case, name: str) -> None:
    problem, result, _ = case
    out, lse = result.out.detach().clone(), result.lse.clone()
    if name == "out":
        out[300, 3] *= 1.01
    elif name == "lse":
        lse[2, 300] += 0.1
    else:
        indices = problem.indices.clone()
        indices[1, 300, 0] = -1
        problem = cpu_check.Problem(problem.q, problem.k, problem.v, problem.index_q, problem.index_k, indices)
    with pytest.raises(cpu_check.WrongResultError):
        cpu_check.check_forward(problem, out, lse, ROWS)


@pytest.mark.parametrize("name", ["q", "k", "v", "index_q", "index_k"])
def test_wrong_gradients_are_seen(case, name: str) -> None:
    problem, _, gradients = case
    changed = {field: getattr(gradients, field).clone() for field in ("d_out", "q", "k", "v", "index_q", "index_k")}
    row = 300 if name in ("q", "index_q") else 130
    changed[name][row] *= 1.05
    with pytest.raises(cpu_check.WrongResultError):
        cpu_check.check_backward(problem, cpu_check.Gradients(**changed), ROWS, [1])


def test_visible_pairs_are_those_of_the_rows(case) -> None:
    problem = case[0]
    expected = sum(len(problem.tokens(row, head)) for row in range(N) for head in range(2))
    assert cpu_check.visible_pairs(problem.indices, N) == expected


def test_memory_beyond_results_is_seen() -> None:
    def call() -> int:
        scratch = torch.zeros(48 * 2**20, dtype=torch.uint8)
        result = scratch[: 16 * 2**20].clone()
        call.result = result  # type: ignore[attr-defined]
        return result.numel()

    peak = cpu_machine.peak_above(call) / 2**20
    assert 47 < peak < 56


def test_calls_alternate_and_results_merge(tmp_path: Path) -> None:
    names: list[str] = []
    times = cpu.alternate({"a": lambda: names.append("a"), "b": lambda: names.append("b")}, seconds=1)
    assert set(times) == {"a", "b"}
    assert names[2:] == ["a", "b"] * 20  # after a warm-up of each
    path = tmp_path / "x.csv"
    cpu.merge_table(path, ("case", "n", "ms"), [["a", "1", "5"], ["b", "1", "6"]], 2)
    cpu.merge_table(path, ("case", "n", "ms"), [["b", "1", "7"], ["b", "2", "8"]], 2)
    with path.open(newline="") as file:
        assert list(csv.reader(file)) == [["case", "n", "ms"], ["a", "1", "5"], ["b", "1", "7"], ["b", "2", "8"]]


def test_the_bench_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--lengths",
        "512",
        "--dtypes",
        "fp32",
        "--selections",
        "overlap",
        "--seconds",
        "0.02",
        "--out",
        str(tmp_path / "cpu"),
    ]
    assert cpu.main(words) == 0
    with (tmp_path / "cpu" / "cpu.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["case"] for row in rows} == {"prefill", "train", "decode", "stage-attend"}
    assert all(float(row["openmsa_ms"]) > 0 and float(row["useful_tflops"]) > 0 for row in rows)
    assert {row["baseline"] for row in rows if row["case"] != "stage-attend"} == {"torch"}
    assert (tmp_path / "cpu_context" / "cpu.csv").exists()
    assert "of the product" in capsys.readouterr().out
