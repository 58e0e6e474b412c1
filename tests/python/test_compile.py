"""torch.compile(fullgraph=True) gives the eager results and gradients."""

from __future__ import annotations

from typing import Any

import openmsa
import pytest
import torch
from problems import Problem, make_paged, make_problem
from torch.utils.checkpoint import checkpoint

BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def compiled(function: Any, backend: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def train(problem: Problem, wrap: Any, **mode: Any) -> tuple[Any, list[torch.Tensor]]:
    def step(*tensors: torch.Tensor) -> Any:
        result = openmsa.msa_attention(*tensors, **problem.selection, **mode)
        return result.out * 2.0, result.kl, result.indices, result.index_lse

    out, kl, indices, index_lse = wrap(step)(*problem.tensors)
    (out.sum() + kl).backward()
    return (out, kl, indices, index_lse), [tensor.grad for tensor in problem.tensors]


def same(result: Any, expected: Any) -> None:
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_step(backend: str) -> None:
    expected = train(make_problem(((60, 60), (20, 40))).trainable(), lambda f: f)
    result = train(make_problem(((60, 60), (20, 40))).trainable(), lambda f: compiled(f, backend))
    same(result, expected)


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_kl_out_in_a_compiled_step(backend: str, mode: str) -> None:
    expected_kl, kl_out = torch.zeros(()), torch.zeros(())
    expected = train(make_problem().trainable(), lambda f: f, kl=mode, kl_out=expected_kl)
    result = train(make_problem().trainable(), lambda f: compiled(f, backend), kl=mode, kl_out=kl_out)
    same(result, expected)
    same(kl_out, expected_kl)
    assert float(kl_out) > 0


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_kl_out_is_shared_by_compiled_steps(backend: str, mode: str) -> None:
    """Several micro-batches go forward before the first goes backward; the caller resets the value between them."""
    problem, kl_out = make_problem().trainable(), torch.zeros(())
    exact = openmsa.msa_attention(*problem.tensors, **problem.selection).kl.detach()

    def step(*tensors: torch.Tensor) -> torch.Tensor:
        result = openmsa.msa_attention(*tensors, **problem.selection, kl=mode, kl_out=kl_out)
        return result.out.sum() + result.kl

    run = compiled(step, backend)
    for loss in [run(*problem.tensors) for _ in range(2)]:
        kl_out.fill_(-1.0)
        loss.backward()
        torch.testing.assert_close(kl_out, exact, rtol=2e-4, atol=0)
    twice = [tensor.grad for tensor in problem.tensors]
    once = train(make_problem().trainable(), lambda f: f)[1]
    for gradient, single, factor in zip(twice, once, (1, 1, 1, 2, 2), strict=True):
        torch.testing.assert_close(gradient, factor * single)


def test_inductor() -> None:
    kl_out = torch.zeros(())
    expected = train(make_problem().trainable(), lambda f: f)
    result = train(make_problem().trainable(), lambda f: compiled(f, "inductor"), kl="backward", kl_out=kl_out)
    torch.testing.assert_close(result[1], expected[1])
    torch.testing.assert_close(kl_out, expected[0][1].detach(), rtol=2e-4, atol=0)


def test_warmup_and_kl_off() -> None:
    def step(problem: Problem) -> Any:
        warm = openmsa.msa_attention(*problem.tensors, **problem.selection, warmup=True)
        off = openmsa.msa_attention(*problem.tensors, **problem.selection, kl="off")
        assert warm.indices is None
        assert off.kl is None
        return warm.out + off.out, warm.kl

    problem = make_problem()
    same(compiled(lambda: step(problem))(), step(problem))


def test_selection_and_attention() -> None:
    problem = make_problem(((60, 60), (20, 40))).trainable()

    def step(index_q: torch.Tensor, q: torch.Tensor) -> Any:
        indices, index_lse = openmsa.select_blocks(index_q, problem.index_k, **problem.selection, return_lse=True)
        out, lse = openmsa.sparse_attention(
            q, problem.k, problem.v, indices, **problem.layout, return_lse=True, deterministic=True
        )
        share, best = openmsa.captured_mass(q, problem.k, indices, **problem.layout)
        merged, _ = openmsa.combine(torch.stack((out, out)), torch.stack((lse, lse)))
        return indices, index_lse, out, lse, share, best, merged

    expected, result = step(problem.index_q, problem.q), compiled(step)(problem.index_q, problem.q)
    same(result, expected)
    same(torch.autograd.grad(result[2].sum(), problem.q), torch.autograd.grad(expected[2].sum(), problem.q))


def test_results_in_place() -> None:
    problem = make_problem(((60, 60),))

    def step(indices: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor) -> Any:
        openmsa.select_blocks(*problem.index, **problem.selection, out=indices, lse_out=lse, workspace=workspace)
        openmsa.sparse_attention(*problem.attention, indices, **problem.layout, out=out)
        return out + 1.0

    def buffers() -> tuple[torch.Tensor, ...]:
        return (torch.zeros(2, 60, 2, dtype=torch.int32), torch.zeros(2, 60), torch.zeros(60, 4, 24),
                torch.zeros(1 << 16, dtype=torch.uint8))  # fmt: skip

    expected, result = buffers(), buffers()
    same(compiled(step)(*result), step(*expected))
    same(result[:3], expected[:3])
    assert result[2].any()


def test_paged_operations() -> None:
    problem = make_problem(((3, 40), (1, 70)))

    def step(pages: Any) -> Any:
        rows = problem.k[:4], problem.v[:4], problem.index_k[:4]
        openmsa.paged_append(*rows, pages.k_cache, pages.v_cache, pages.index_k_cache, **pages.requests)
        result = openmsa.paged_msa_attention(
            problem.q, pages.k_cache, pages.v_cache, problem.index_q, pages.index_k_cache, topk=2, **pages.requests
        )
        indices = openmsa.paged_select_blocks(problem.index_q, pages.index_k_cache, topk=2, **pages.requests)
        out = openmsa.paged_sparse_attention(problem.q, pages.k_cache, pages.v_cache, indices, **pages.requests)
        return result.out, result.lse, result.indices, indices, out

    first, second = make_paged(problem), make_paged(problem)
    same(compiled(step)(first), step(second))
    torch.testing.assert_close(first.k_cache, second.k_cache, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("reentrant", [False])
def test_checkpointing_in_a_compiled_step(reentrant: bool) -> None:
    def wrap(function: Any) -> Any:
        return compiled(lambda *tensors: checkpoint(function, *tensors, use_reentrant=reentrant))

    same(train(make_problem().trainable(), wrap), train(make_problem().trainable(), lambda f: f))


def test_dynamic_lengths_do_not_recompile() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return openmsa.sparse_attention(q, k, v, indices, block_size=32)

    function = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for length in (40, 50, 77):
        problem = make_problem(((length, length),))
        indices = openmsa.select_blocks(*problem.index, **problem.selection)
        same(function(*problem.attention, indices), step(*problem.attention, indices))
    assert counter.frame_count == 1


def test_error_in_a_compiled_call_names_the_argument() -> None:
    problem = make_problem(((40, 40),))
    function = compiled(lambda: openmsa.select_blocks(*problem.index, topk=2, block_size=48))
    with pytest.raises(openmsa.InvalidArgumentError, match="block_size"):
        function()
