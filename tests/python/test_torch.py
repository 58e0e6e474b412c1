"""torch tensors in, torch tensors out: results in place, views, types, pages, threads."""

from __future__ import annotations

import math
import threading
from typing import Any

import openmsa
import pytest
import torch
from problems import Problem, dense_msa, make_paged, make_problem, relative_error
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn


def exact(problem: Problem, indices: Tensor | None) -> Any:
    return dense_msa(problem, tuple(x.detach().double() for x in problem.tensors), indices)


def test_msa_is_select_then_attend() -> None:
    problem = make_problem(((60, 60), (20, 40)))
    indices, index_lse = openmsa.select_blocks(*problem.index, **problem.selection, return_lse=True)
    out, lse = openmsa.sparse_attention(*problem.attention, indices, **problem.layout, return_lse=True)
    result = openmsa.msa_attention(*problem.tensors, **problem.selection)
    for got, expected in zip((result.out, result.indices, result.lse), (out, indices, lse), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    torch.testing.assert_close(result.index_lse, index_lse, rtol=1e-6, atol=1e-6)  # summed up by other stages
    assert indices.dtype == torch.int32
    assert result.kl.shape == ()
    assert result.kl.dtype == torch.float32


def test_select_returns_one_tensor_or_two() -> None:
    problem = make_problem()
    assert isinstance(openmsa.select_blocks(*problem.index, **problem.selection), Tensor)
    indices, index_lse = openmsa.select_blocks(*problem.index, **problem.selection, return_lse=True)
    assert index_lse.shape == (2, 150)
    out = openmsa.sparse_attention(*problem.attention, indices, **problem.layout)
    assert isinstance(out, Tensor)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_results_in_place_are_returned(dtype: torch.dtype) -> None:
    problem = make_problem()
    expected = openmsa.select_blocks(*problem.index, **problem.selection, return_lse=True)
    indices = torch.full((150, 2, 2), 99, dtype=dtype).transpose(0, 1)  # token-major memory, head-major view
    lse = torch.full((2, 150), 99.0)
    size = openmsa.workspace_size("select_blocks", *problem.index, **problem.selection, return_lse=True)
    workspace = torch.empty(size, dtype=torch.uint8)
    got = openmsa.select_blocks(
        *problem.index, **problem.selection, return_lse=True, out=indices, lse_out=lse, workspace=workspace
    )
    assert got[0] is indices
    assert got[1] is lse
    assert torch.equal(indices.int(), expected[0])
    assert torch.equal(lse, expected[1])
    out = torch.full((150, 4, 30), 99.0)[:, :, 3:27]
    main_lse = torch.empty(4, 150)
    attended = openmsa.sparse_attention(*problem.attention, indices, **problem.layout, out=out, lse_out=main_lse)
    assert attended is out
    reference, reference_lse = openmsa.sparse_attention(
        *problem.attention, expected[0], **problem.layout, return_lse=True
    )
    assert torch.equal(out, reference)
    assert torch.equal(main_lse, reference_lse)


def test_lse_out_alone_is_written() -> None:
    problem = make_problem()
    lse = torch.full((2, 150), 99.0)
    indices = openmsa.select_blocks(*problem.index, **problem.selection, lse_out=lse)
    assert isinstance(indices, Tensor)
    assert not (lse == 99.0).any()


def test_paged_results_in_place_are_returned() -> None:
    problem = make_problem(((3, 40), (1, 70)))
    pages = make_paged(problem)
    arguments = (problem.q, pages.k_cache, pages.v_cache, problem.index_q, pages.index_k_cache)
    expected = openmsa.paged_msa_attention(*arguments, topk=2, **pages.requests)
    out, lse = torch.empty(4, 4, 24), torch.empty(4, 4)
    indices = torch.empty(2, 4, 2, dtype=torch.int32)
    result = openmsa.paged_msa_attention(
        *arguments, topk=2, **pages.requests, out=out, lse_out=lse, indices_out=indices
    )
    assert result.out is out
    assert result.lse is lse
    assert result.indices is indices
    assert result.kl is None
    assert result.index_lse is None
    for got, wanted in zip((out, lse, indices), (expected.out, expected.lse, expected.indices), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("seed", [0, 1])
def test_paged_equals_contiguous(seed: int) -> None:
    problem = make_problem(((3, 40), (16, 70), (1, 1), (0, 33)), seed=seed)
    pages = make_paged(problem, seed)
    expected = openmsa.msa_attention(*problem.tensors, **problem.selection)
    result = openmsa.paged_msa_attention(
        problem.q, pages.k_cache, pages.v_cache, problem.index_q, pages.index_k_cache, topk=2, **pages.requests
    )
    assert torch.equal(result.indices, expected.indices)
    torch.testing.assert_close(result.out, expected.out, rtol=1e-6, atol=1e-7)
    indices, index_lse = openmsa.paged_select_blocks(
        problem.index_q, pages.index_k_cache, topk=2, return_lse=True, **pages.requests
    )
    assert torch.equal(indices, expected.indices)
    torch.testing.assert_close(index_lse, expected.index_lse)
    out, lse = openmsa.paged_sparse_attention(
        problem.q, pages.k_cache, pages.v_cache, indices, return_lse=True, **pages.requests
    )
    assert torch.equal(out, result.out)
    assert torch.equal(lse, result.lse)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_append_then_attend_in_float8(as_tensor: bool) -> None:
    problem = make_problem(((40, 40), (70, 70)))
    pages = make_paged(problem)
    k_scale, v_scale = (torch.tensor(0.25), torch.tensor(0.5)) if as_tensor else (0.25, 0.5)
    k_cache = torch.zeros(pages.k_cache.shape, dtype=FLOAT8)
    v_cache = torch.zeros(pages.v_cache.shape, dtype=FLOAT8)
    index_k_cache = torch.zeros(pages.index_k_cache.shape)
    returned = openmsa.paged_append(
        problem.k, problem.v, problem.index_k, k_cache, v_cache, index_k_cache, **pages.requests, k_scale=k_scale,
        v_scale=v_scale,
    )  # fmt: skip
    assert returned is None
    rounded = make_problem(((40, 40), (70, 70)))
    rounded.k = (problem.k / 0.25).to(FLOAT8).float() * 0.25
    rounded.v = (problem.v / 0.5).to(FLOAT8).float() * 0.5
    expected = openmsa.msa_attention(*rounded.tensors, **rounded.selection)
    result = openmsa.paged_msa_attention(
        problem.q, k_cache, v_cache, problem.index_q, index_k_cache, topk=2, **pages.requests, k_scale=k_scale,
        v_scale=v_scale,
    )  # fmt: skip
    assert torch.equal(result.indices, expected.indices)
    assert relative_error(result.out, expected.out) < 1e-5


def test_padded_rows_see_no_key() -> None:
    problem = make_problem(((3, 40), (1, 70)))
    pages = make_paged(problem)
    q, index_q = torch.cat((problem.q, problem.q)), torch.cat((problem.index_q, problem.index_q))
    result = openmsa.paged_msa_attention(
        q, pages.k_cache, pages.v_cache, index_q, pages.index_k_cache, topk=2, **pages.requests
    )
    assert not result.out[4:].any()
    assert (result.indices[:, 4:] == -1).all()
    assert (result.lse[:, 4:] == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("index_dtype", [torch.float16, torch.bfloat16, torch.float32, FLOAT8])
def test_types(dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    problem = make_problem(((70, 90),), dtype=dtype)
    problem.index_q, problem.index_k = problem.index_q.to(index_dtype), problem.index_k.to(index_dtype)
    result = openmsa.msa_attention(*problem.tensors, **problem.selection)
    assert result.out.dtype == dtype
    dense = exact(problem, result.indices)
    tolerance = {torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}[dtype]
    assert relative_error(result.out, dense.out) < tolerance
    torch.testing.assert_close(result.index_lse.double(), dense.index_lse, rtol=5e-5, atol=1e-5)


@pytest.mark.parametrize("order", ["reversed", "repeated", "holes", "int64", "token-major"])
def test_indices_in_any_order(order: str) -> None:
    problem = make_problem(((70, 100),), topk=3)
    indices = openmsa.select_blocks(*problem.index, **problem.selection)
    expected = openmsa.sparse_attention(*problem.attention, indices, **problem.layout)
    changed = {
        "reversed": indices.flip(2),
        "repeated": torch.cat((indices, indices), 2),
        "holes": torch.cat((torch.full_like(indices, -1), indices, torch.full_like(indices, 2**31 - 1)), 2),
        "int64": indices.long(),
        "token-major": indices.transpose(0, 1).contiguous().transpose(0, 1),
    }[order]
    torch.testing.assert_close(
        openmsa.sparse_attention(*problem.attention, changed, **problem.layout), expected, rtol=1e-6, atol=1e-7
    )


def _fused(x: Tensor) -> Tensor:
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 16), math.nan)
    wide[..., 8 : 8 + x.shape[-1]] = x
    return wide[..., 8 : 8 + x.shape[-1]]


LAYOUTS = {
    "head-major": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "slice of a fused projection": _fused,
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "offset": lambda x: torch.cat((x[:1], x))[1:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views(layout: str) -> None:
    problem = make_problem(((60, 60), (20, 40)), heads=(4, 2, 2, 2))
    expected = openmsa.msa_attention(*problem.tensors, **problem.selection)
    views = [LAYOUTS[layout](x) for x in problem.tensors]
    result = openmsa.msa_attention(*views, **problem.selection)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_broadcast_keys() -> None:
    problem = make_problem(((60, 60),), heads=(4, 2, 2, 1))
    key = problem.k[:, :1].expand(-1, 2, -1)  # stride 0
    assert key.stride(1) == 0
    indices = openmsa.select_blocks(*problem.index, **problem.selection)
    first = openmsa.sparse_attention(problem.q, key, problem.v, indices, **problem.layout)
    second = openmsa.sparse_attention(problem.q, key.contiguous(), problem.v, indices, **problem.layout)
    assert torch.equal(first, second)


def test_interleaved_cache() -> None:
    problem = make_problem(((3, 40), (1, 70)), dim_v=16)
    pages = make_paged(problem)
    fused = torch.cat((pages.k_cache, pages.v_cache), -1).transpose(1, 2).contiguous().transpose(1, 2)
    indices = openmsa.paged_select_blocks(problem.index_q, pages.index_k_cache, topk=2, **pages.requests)
    expected = openmsa.paged_sparse_attention(problem.q, pages.k_cache, pages.v_cache, indices, **pages.requests)
    result = openmsa.paged_sparse_attention(problem.q, fused[..., :16], fused[..., 16:], indices, **pages.requests)
    assert torch.equal(result, expected)


def test_combine_merges_disjoint_keys() -> None:
    problem = make_problem(((20, 128),), topk=4, block_size=32)
    everything = torch.arange(4, dtype=torch.int32).expand(2, 20, 4).contiguous()
    halves = [torch.where(everything // 2 == half, everything, -1) for half in (0, 1)]
    parts = [openmsa.sparse_attention(*problem.attention, half, **problem.layout, return_lse=True) for half in halves]
    out, lse = openmsa.combine(torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts]))
    expected, expected_lse = openmsa.sparse_attention(*problem.attention, everything, **problem.layout, return_lse=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_captured_mass() -> None:
    problem = make_problem(((40, 130),), topk=2)
    indices = openmsa.select_blocks(*problem.index, **problem.selection)
    share, best = openmsa.captured_mass(problem.q, problem.k, indices, **problem.layout)
    assert share.shape == best.shape == (2, 40)
    assert ((share > 0) & (share <= best + 1e-6) & (best <= 1 + 1e-6)).all()
    dense = openmsa.msa_attention(*problem.tensors, **problem.selection, warmup=True)
    kept = openmsa.sparse_attention(*problem.attention, indices, **problem.layout, return_lse=True)[1]
    probability = (kept - dense.lse).exp().unflatten(0, (2, 2)).mean(1)
    torch.testing.assert_close(share, probability, rtol=1e-4, atol=1e-6)


def test_negated_view_is_resolved() -> None:
    problem = make_problem(((40, 40),))
    negated = torch.complex(problem.index_q, -problem.index_q).conj().imag  # a lazy negation: imag is index_q
    assert negated.is_neg()
    expected = openmsa.select_blocks(problem.index_q, problem.index_k, **problem.selection)
    with pytest.raises(openmsa.InvalidArgumentError, match="index_q"):  # and its last axis is not contiguous
        openmsa.select_blocks(torch.view_as_real(torch.complex(problem.q, problem.q))[..., 0], problem.index_k)
    lazy = torch._neg_view(-problem.index_q)
    assert torch.equal(openmsa.select_blocks(lazy, problem.index_k, **problem.selection), expected)


def test_subclasses_and_parameters() -> None:
    class Tagged(Tensor):
        pass

    problem = make_problem(((40, 40),))
    expected = openmsa.select_blocks(*problem.index, **problem.selection)
    assert torch.equal(
        openmsa.select_blocks(torch.nn.Parameter(problem.index_q), problem.index_k, **problem.selection), expected
    )
    tagged = problem.index_q.as_subclass(Tagged)
    assert torch.equal(
        openmsa.select_blocks(tagged, problem.index_k, **problem.selection).as_subclass(Tensor), expected
    )


def test_inference_mode() -> None:
    problem = make_problem(((40, 40),))
    expected = openmsa.msa_attention(*problem.tensors, **problem.selection)
    with torch.inference_mode():
        result = openmsa.msa_attention(*problem.tensors, **problem.selection)
        indices = torch.empty_like(result.indices)
        openmsa.select_blocks(*problem.index, **problem.selection, out=indices)
    assert torch.equal(result.out, expected.out)
    assert torch.equal(indices, expected.indices)


def test_calls_from_several_threads() -> None:
    problems = [make_problem(((60, 90),), seed=seed) for seed in range(4)]
    expected = [openmsa.msa_attention(*p.tensors, **p.selection).out for p in problems]
    results: list[Any] = [None] * 4

    def work(number: int) -> None:
        for _ in range(5):
            results[number] = openmsa.msa_attention(*problems[number].tensors, **problems[number].selection).out

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, wanted) for result, wanted in zip(results, expected, strict=True))


@pytest.mark.parametrize("operation", ["select_blocks", "sparse_attention", "msa_attention", "paged_msa_attention"])
def test_workspace_size(operation: str) -> None:
    problem = make_problem(((3, 40), (1, 70)))
    pages = make_paged(problem)
    indices = openmsa.select_blocks(*problem.index, **problem.selection)
    paged = (problem.q, pages.k_cache, pages.v_cache, problem.index_q, pages.index_k_cache)
    size = {
        "select_blocks": lambda: openmsa.workspace_size(operation, *problem.index, **problem.selection),
        "sparse_attention": lambda: openmsa.workspace_size(operation, *problem.attention, indices, **problem.layout),
        "msa_attention": lambda: openmsa.workspace_size(operation, *problem.tensors, **problem.selection),
        "paged_msa_attention": lambda: openmsa.workspace_size(operation, *paged, topk=2, **pages.requests),
    }[operation]()
    assert isinstance(size, int)
    assert size >= 0


def test_workspace_size_refuses() -> None:
    with pytest.raises(openmsa.InvalidArgumentError, match="operation"):
        openmsa.workspace_size("attend")
    for wrong in (None, 3, ["select_blocks"]):
        with pytest.raises(openmsa.InvalidArgumentError, match="operation: got"):
            openmsa.workspace_size(wrong)  # type: ignore[arg-type]
    problem = make_problem(((40, 40),))
    with pytest.raises(openmsa.InvalidArgumentError, match="block_size"):
        openmsa.workspace_size("select_blocks", *problem.index, block_size=33)
