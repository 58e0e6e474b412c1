"""All five gradients against dense float64 code, and what training does: checkpoints, accumulation, KL modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import openmsa
import pytest
import torch
from problems import TRAINED, Problem, dense_gradients, make_problem, relative_error
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

PROBLEMS: dict[str, Callable[[], Problem]] = {
    "one sequence": lambda: make_problem(((150, 150),)),
    "chunk of a prefix": lambda: make_problem(((40, 150),)),
    "more queries than keys": lambda: make_problem(((70, 40),)),
    "packed": lambda: make_problem(((33, 33), (0, 5), (70, 70), (5, 0), (20, 64))),
    "shared keys": lambda: make_problem(((30, 60), (30, 90), (30, 120)), shared_keys=True),
    "group of one": lambda: make_problem(((100, 100),), heads=(4, 2, 4, 2)),
    "group of sixteen": lambda: make_problem(((70, 70),), heads=(16, 1, 1, 1), topk=1),
}
TOLERANCE = {torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("warmup", [False, True], ids=["selected", "warmup"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_match_dense(name: str, warmup: bool) -> None:
    problem = PROBLEMS[name]().trainable()
    result = openmsa.msa_attention(*problem.tensors, **problem.selection, warmup=warmup)
    d_out = torch.randn(result.out.shape, generator=torch.Generator().manual_seed(1))
    ((result.out * d_out).sum() + 0.7 * result.kl).backward()
    dense, expected = dense_gradients(problem, result.indices, d_out, 0.7)
    assert relative_error(result.out, dense.out) < 5e-5
    assert abs(result.kl.item() - dense.kl.item()) < 2e-4 * max(dense.kl.item(), 0.05)
    torch.testing.assert_close(result.lse.double(), dense.lse, rtol=5e-5, atol=1e-6)
    torch.testing.assert_close(result.index_lse.double(), dense.index_lse, rtol=5e-5, atol=1e-6)
    for argument, tensor, gradient in zip(TRAINED, problem.tensors, expected, strict=True):
        assert tensor.grad is not None
        assert relative_error(tensor.grad, gradient) < 1.25e-4, argument


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_16_bit_types(dtype: torch.dtype) -> None:
    problem = make_problem(((100, 100),), dtype=dtype).trainable()
    result = openmsa.msa_attention(*problem.tensors, **problem.selection)
    d_out = torch.randn(result.out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    ((result.out * d_out).sum(dtype=torch.float32) + result.kl).backward()
    dense, expected = dense_gradients(problem, result.indices, d_out, 1.0)
    assert relative_error(result.out, dense.out) < TOLERANCE[dtype]
    for argument, tensor, gradient in zip(TRAINED, problem.tensors, expected, strict=True):
        factor = 2.5 if argument.startswith("index") else 2
        assert tensor.grad is not None
        assert tensor.grad.dtype == dtype
        assert relative_error(tensor.grad, gradient) < factor * TOLERANCE[dtype], argument


@pytest.mark.parametrize("deterministic", [False, True])
def test_sparse_attention_gradients(deterministic: bool) -> None:
    problem = PROBLEMS["packed"]().trainable()
    indices = openmsa.select_blocks(*problem.index, **problem.selection)
    out, lse = openmsa.sparse_attention(
        *problem.attention, indices, **problem.layout, return_lse=True, deterministic=deterministic
    )
    assert out.requires_grad
    assert not lse.requires_grad
    out.pow(2).sum().backward()
    dense, expected = dense_gradients(problem, indices, 2 * out.detach(), 0.0)
    torch.testing.assert_close(lse.double(), dense.lse, rtol=5e-5, atol=1e-6)
    for tensor, gradient in zip(problem.attention, expected, strict=False):
        assert tensor.grad is not None
        assert relative_error(tensor.grad, gradient) < 1e-4
    assert problem.index_q.grad is None


def test_gradient_of_an_expanded_output_gradient() -> None:
    problem = make_problem(((50, 50),)).trainable()
    result = openmsa.msa_attention(*problem.tensors, **problem.selection)
    result.out.sum().backward()  # its gradient has stride 0 on every axis
    _, expected = dense_gradients(problem, result.indices, torch.ones_like(result.out), 0.0)
    assert problem.v.grad is not None
    assert relative_error(problem.v.grad, expected[2]) < 1e-4


def test_gradients_reach_strided_parents() -> None:
    problem = make_problem(((60, 60),), heads=(2, 2, 2, 1), dim_v=16)
    fused = torch.stack((problem.q, problem.k, problem.v), 1).requires_grad_()
    q, k, v = fused.unbind(1)
    assert not q.is_contiguous()
    indices = openmsa.select_blocks(*problem.index, topk=2, block_size=32)
    openmsa.sparse_attention(q, k, v, indices, block_size=32).pow(2).sum().backward()
    out = openmsa.sparse_attention(*problem.attention, indices, block_size=32)
    _, expected = dense_gradients(problem, indices, 2 * out, 0.0)
    assert fused.grad is not None
    for position in range(3):
        assert relative_error(fused.grad[:, position], expected[position]) < 1e-4


def test_each_loss_trains_its_own_branch() -> None:
    problem = make_problem().trainable()
    result = openmsa.msa_attention(*problem.tensors, **problem.selection)
    main = torch.autograd.grad(result.out.sum(), problem.tensors, allow_unused=True, retain_graph=True)
    assert all(gradient is not None for gradient in main[:3])
    assert main[3] is None
    assert main[4] is None
    index = torch.autograd.grad(result.kl, problem.tensors, allow_unused=True)
    assert index[:3] == (None, None, None)
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in index[3:])


def test_coefficient_zero_gives_zero_gradients() -> None:
    problem = make_problem().trainable()
    result = openmsa.msa_attention(*problem.tensors, **problem.selection)
    (result.out.sum() + 0.0 * result.kl).backward()
    for tensor in problem.index:
        assert tensor.grad is not None
        assert not tensor.grad.any()


def test_results_without_gradient() -> None:
    problem = make_problem().trainable()
    result = openmsa.msa_attention(*problem.tensors, **problem.selection)
    assert result.out.requires_grad
    assert result.kl.requires_grad
    assert not result.lse.requires_grad
    assert not result.index_lse.requires_grad
    indices, index_lse = openmsa.select_blocks(*problem.index, **problem.selection, return_lse=True)
    assert not index_lse.requires_grad
    assert torch.equal(indices, result.indices)
    torch.testing.assert_close(index_lse, result.index_lse, rtol=1e-6, atol=1e-6)  # summed up by other stages
    assert not any(x.requires_grad for x in openmsa.captured_mass(*problem.attention[:2], indices, **problem.layout))


@pytest.mark.parametrize("frozen", ["main", "index"])
def test_only_trained_branch_requires_gradient(frozen: str) -> None:
    problem = make_problem()
    for tensor in problem.index if frozen == "main" else problem.attention:
        tensor.requires_grad_()
    result = openmsa.msa_attention(*problem.tensors, **problem.selection)
    assert result.out.requires_grad == (frozen == "index")
    assert result.kl.requires_grad == (frozen == "main")


def test_single_input_requires_gradient() -> None:
    problem = make_problem()
    problem.k.requires_grad_()
    result = openmsa.msa_attention(*problem.tensors, **problem.selection)
    result.out.sum().backward()
    assert problem.k.grad is not None
    assert problem.q.grad is None


# ---- the KL's modes ----


@pytest.mark.parametrize("warmup", [False, True])
def test_kl_backward_writes_the_kl_itself(warmup: bool) -> None:
    exact = make_problem().trainable()
    expected = openmsa.msa_attention(*exact.tensors, **exact.selection, warmup=warmup)
    (expected.out.sum() + 3.0 * expected.kl).backward()
    problem = make_problem().trainable()
    kl_out = torch.full((), -1.0)
    result = openmsa.msa_attention(*problem.tensors, **problem.selection, kl="backward", kl_out=kl_out, warmup=warmup)
    assert result.kl.item() == 0.0
    assert kl_out.item() == -1.0
    (result.out.sum() + 3.0 * result.kl).backward()
    torch.testing.assert_close(kl_out, expected.kl.detach(), rtol=2e-4, atol=0)
    for tensor, other in zip(problem.tensors, exact.tensors, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad)


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("through", ["out", "kl"])
def test_every_backward_overwrites_kl_out(through: str, mode: str) -> None:
    problem = make_problem().trainable()
    exact = openmsa.msa_attention(*(x.detach() for x in problem.tensors), **problem.selection).kl
    kl_out = torch.full((), -1.0)
    result = openmsa.msa_attention(*problem.tensors, **problem.selection, kl=mode, kl_out=kl_out)
    assert float(kl_out) == (float(exact) if mode == "forward" else -1.0)
    loss = result.out.sum() if through == "out" else result.kl
    for _ in range(2):
        kl_out.fill_(9.0)
        loss.backward(retain_graph=True)
        torch.testing.assert_close(kl_out, exact, rtol=2e-4, atol=0)
    assert (problem.index_q.grad is None) == (through == "out")
    assert float(result.kl) == (float(exact) if mode == "forward" else 0.0)


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_kl_out_without_gradients(mode: str) -> None:
    """ "forward" writes it when called; "backward" never does, for lack of a backward pass, and is no error."""
    problem = make_problem()
    exact = float(openmsa.msa_attention(*problem.tensors, **problem.selection).kl)
    expected = (exact, exact) if mode == "forward" else (0.0, -1.0)
    for context in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        kl_out = torch.full((), -1.0)
        with context():
            result = openmsa.msa_attention(*problem.tensors, **problem.selection, kl=mode, kl_out=kl_out)
        assert not result.kl.requires_grad
        assert (float(result.kl), float(kl_out)) == expected
        problem.trainable()


def test_kl_is_exact_without_gradients() -> None:
    problem = make_problem().trainable()
    with torch.no_grad():
        result = openmsa.msa_attention(*problem.tensors, **problem.selection)
    assert not result.kl.requires_grad
    assert float(result.kl) == float(openmsa.msa_attention(*problem.tensors, **problem.selection).kl)


def test_kl_off() -> None:
    problem = make_problem().trainable()
    result = openmsa.msa_attention(*problem.tensors, **problem.selection, kl="off")
    assert result.kl is None
    assert result.index_lse is None
    result.out.sum().backward()
    assert problem.q.grad is not None
    assert problem.index_q.grad is None
    warm = openmsa.msa_attention(*problem.tensors, **problem.selection, kl="off", warmup=True)
    warm.out.sum().backward()
    assert warm.indices is None


def test_warmup_ignores_the_selection() -> None:
    problem = make_problem()
    ignored = {"topk": 0, "init_blocks": -1, "local_blocks": -1}
    result = openmsa.msa_attention(*problem.tensors, **ignored, block_size=32, warmup=True)
    assert result.indices is None
    assert torch.isfinite(result.index_lse).all()


def test_kl_is_repeatable() -> None:
    problem = make_problem()
    values = {float(openmsa.msa_attention(*problem.tensors, **problem.selection).kl) for _ in range(3)}
    assert len(values) == 1


def test_kl_without_queries() -> None:
    problem = make_problem(((0, 5),)).trainable()
    result = openmsa.msa_attention(*problem.tensors, **problem.selection)
    assert float(result.kl) == 0.0
    (result.out.sum() + result.kl).backward()
    assert all(tensor.grad is not None and not tensor.grad.any() for tensor in problem.tensors)


# ---- activation checkpointing and accumulation ----


def _layer(problem: Problem, **mode: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def layer(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        result = openmsa.msa_attention(*(x * 1.0 for x in tensors), **problem.selection, **mode)
        return result.out, result.kl

    return layer


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointing(reentrant: bool, mode: str) -> None:
    plain = make_problem().trainable()
    expected = _layer(plain)(*plain.tensors)
    (expected[0].pow(2).sum() + expected[1]).backward()
    problem = make_problem().trainable()
    kl_out = torch.zeros(())
    out, kl = checkpoint(_layer(problem, kl=mode, kl_out=kl_out), *problem.tensors, use_reentrant=reentrant)
    assert float(kl_out) == (float(expected[1]) if mode == "forward" else 0.0)
    kl_out.fill_(-1.0)
    (out.pow(2).sum() + kl).backward()
    assert torch.equal(out, expected[0])
    torch.testing.assert_close(kl_out, expected[1].detach(), rtol=2e-4, atol=0)
    for tensor, other in zip(problem.tensors, plain.tensors, strict=True):
        assert torch.equal(tensor.grad, other.grad)


def test_gradients_accumulate() -> None:
    once, many = make_problem().trainable(), make_problem().trainable()
    result = openmsa.msa_attention(*once.tensors, **once.selection)
    (result.out.sum() + result.kl).backward()
    for _ in range(3):
        result = openmsa.msa_attention(*many.tensors, **many.selection)
        (result.out.sum() + result.kl).backward()
    for tensor, single in zip(many.tensors, once.tensors, strict=True):
        torch.testing.assert_close(tensor.grad, 3 * single.grad)


def test_backward_twice_through_a_kept_graph() -> None:
    problem = make_problem().trainable()
    result = openmsa.msa_attention(*problem.tensors, **problem.selection)
    loss = result.out.sum() + result.kl
    loss.backward(retain_graph=True)
    first = [tensor.grad.clone() for tensor in problem.tensors]
    loss.backward()
    for tensor, gradient in zip(problem.tensors, first, strict=True):
        torch.testing.assert_close(tensor.grad, 2 * gradient)


# ---- what has no gradient ----


def test_double_backward_is_an_error_by_name() -> None:
    problem = make_problem(((40, 40),)).trainable()
    indices = openmsa.select_blocks(*problem.index, **problem.selection)
    out = openmsa.sparse_attention(*problem.attention, indices, **problem.layout)
    (gradient,) = torch.autograd.grad(out.pow(2).sum(), problem.q, create_graph=True)
    with pytest.raises(openmsa.UnsupportedError, match="sparse_attention: double backward is not supported"):
        gradient.sum().backward()
    result = openmsa.msa_attention(*problem.tensors, **problem.selection)
    (gradient,) = torch.autograd.grad(result.out.pow(2).sum() + result.kl, problem.q, create_graph=True)
    with pytest.raises(openmsa.UnsupportedError, match="msa_attention: double backward is not supported"):
        gradient.sum().backward()


def test_forward_mode_is_an_error_by_name() -> None:
    """Not silently a tangent of nothing."""
    problem = make_problem(((40, 40),))
    indices = openmsa.select_blocks(*problem.index, **problem.selection)
    with forward_ad.dual_level():
        q = forward_ad.make_dual(problem.q, problem.q)
        with pytest.raises(openmsa.UnsupportedError, match="sparse_attention: forward-mode"):
            openmsa.sparse_attention(q, problem.k, problem.v, indices, **problem.layout)
        with pytest.raises(openmsa.UnsupportedError, match="msa_attention: forward-mode"):
            openmsa.msa_attention(q, problem.k, problem.v, *problem.index, **problem.selection)
        openmsa.sparse_attention(*problem.attention, indices, **problem.layout)
    with pytest.raises(openmsa.UnsupportedError, match="sparse_attention: forward-mode"):
        torch.func.jvp(
            lambda q: openmsa.sparse_attention(q, problem.k, problem.v, indices, **problem.layout),
            (problem.q,), (problem.q,),
        )  # fmt: skip


@pytest.mark.parametrize("name", ["index_q", "index_k"])
def test_float8_gradient_is_an_error_by_name(name: str) -> None:
    problem = make_problem(((40, 40),))
    problem.index_q = problem.index_q.to(torch.float8_e4m3fn)
    problem.index_k = problem.index_k.to(torch.float8_e4m3fn)
    getattr(problem, name).requires_grad_()
    with pytest.raises(openmsa.UnsupportedError, match=name):
        openmsa.msa_attention(*problem.tensors, **problem.selection)
    assert openmsa.msa_attention(*problem.tensors, **problem.selection, kl="off").kl is None


def test_float8_index_beside_trained_attention() -> None:
    problem = make_problem(((40, 40),))
    problem.index_q = problem.index_q.to(torch.float8_e4m3fn)
    problem.index_k = problem.index_k.to(torch.float8_e4m3fn)
    problem.q.requires_grad_()
    kl_out = torch.zeros(())
    result = openmsa.msa_attention(*problem.tensors, **problem.selection, kl="backward", kl_out=kl_out)
    assert not result.kl.requires_grad
    result.out.sum().backward()
    assert problem.q.grad is not None
    assert float(kl_out) > 0


@pytest.mark.parametrize("argument", ["out", "lse_out"])
def test_results_in_place_have_no_gradient(argument: str) -> None:
    problem = make_problem(((40, 40),)).trainable()
    indices = openmsa.select_blocks(*problem.index, **problem.selection)
    with torch.no_grad():
        out, lse = openmsa.sparse_attention(*problem.attention, indices, **problem.layout, return_lse=True)
        given = {argument: out if argument == "out" else lse}
        openmsa.sparse_attention(*problem.attention, indices, **problem.layout, **given)
    with pytest.raises(openmsa.UnsupportedError, match=argument):
        openmsa.sparse_attention(*problem.attention, indices, **problem.layout, **given)


def test_overwritten_result_is_noticed() -> None:
    problem = make_problem(((40, 40),))
    buffer = torch.zeros_like(problem.q[:, :, :1].expand(-1, -1, problem.v.shape[2])).contiguous()
    weight = torch.ones_like(buffer, requires_grad=True)
    loss = (weight * buffer).sum()  # saves the buffer for backward
    indices = openmsa.select_blocks(*problem.index, **problem.selection)
    openmsa.sparse_attention(*problem.attention, indices, **problem.layout, out=buffer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_with_a_workspace() -> None:
    plain, problem = make_problem().trainable(), make_problem().trainable()
    expected = openmsa.msa_attention(*plain.tensors, **plain.selection)
    (expected.out.sum() + expected.kl).backward()
    size = openmsa.workspace_size("msa_attention", *problem.tensors, **problem.selection)
    workspace = torch.empty(size + 256, dtype=torch.uint8)
    result = openmsa.msa_attention(*problem.tensors, **problem.selection, workspace=workspace)
    (result.out.sum() + result.kl).backward()
    for tensor, other in zip(problem.tensors, plain.tensors, strict=True):
        assert torch.equal(tensor.grad, other.grad)
    indices = result.indices
    out = openmsa.sparse_attention(*problem.attention, indices, **problem.layout, workspace=workspace)
    assert torch.autograd.grad(out.sum(), problem.q)[0].any()
