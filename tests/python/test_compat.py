"""flash-msa's functions: against dense float64 code and an independent selection, gradients, documents, errors."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import openmsa
import oracle
import pytest
import torch
from openmsa.compat import flash_msa_func, flash_msa_func_warmup, flash_msa_warmup_func
from problems import Problem, dense_msa, relative_error
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NAMES = ("q_proxy", "k_proxy", "q", "k", "v")
SHAPES = {
    "16 heads, 2 KV, 4 proxy": (2, 16, 2, 4, 1),
    "as many proxy keys as proxy heads": (1, 4, 1, 2, 2),
    "group of one": (1, 2, 1, 2, 1),
}
FUNCTIONS = {"sparse": flash_msa_func, "warmup": flash_msa_warmup_func}


def make_inputs(
    batch: int, heads: int, kv_heads: int, proxy_heads: int, proxy_keys: int, length: int = 600, dim: int = 32,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, count, length, dim, generator=generator).to(dtype).requires_grad_()
        for count in (proxy_heads, proxy_keys, heads, kv_heads, kv_heads)
    ]


def expected_results(
    inputs: list[Tensor], top_k: int, scale: float, ends: list[int], warmup: bool, d_out: Tensor, d_kl: float
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """out, kl and the gradients of <out, d_out> + d_kl * kl in dense float64, the sequences ending at `ends`."""
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    q_proxy, k_proxy, q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in leaves)
    lengths = [(end - start, start, end) for start, end in zip([0, *ends], ends, strict=False)]
    problem = Problem(q, k, v, q_proxy, k_proxy, block_size=128, lengths=lengths)
    indices = None
    if not warmup:
        chosen, _ = oracle.select(
            q_proxy.detach().numpy(), k_proxy.detach().numpy(),
            [(start, n_q, np.arange(start, end)) for n_q, start, end in lengths],
            topk=top_k // 128, block_size=128, init_blocks=0, local_blocks=1, scale=scale,
        )  # fmt: skip
        indices = torch.from_numpy(chosen)
    dense = dense_msa(problem, problem.tensors, indices, scale, scale)
    batch, _, length, _ = inputs[2].shape
    out = dense.out.reshape(batch, length, -1)
    return out, dense.kl, torch.autograd.grad((out * d_out.double()).sum() + d_kl * dense.kl, leaves)


@pytest.mark.parametrize("form", FUNCTIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_matches_dense(name: str, form: str) -> None:
    inputs = make_inputs(*SHAPES[name])
    batch = inputs[0].shape[0]
    out, kl = FUNCTIONS[form](*inputs, 256, 0.25)
    assert out.shape == (batch, 600, inputs[2].shape[1] * 32)
    assert (kl.shape, kl.dtype) == ((), torch.float32)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((out * d_out).sum() + 0.3 * kl, inputs)
    ends = [600 * (row + 1) for row in range(batch)]
    expected, expected_kl, expected_gradients = expected_results(
        inputs, 256, 0.25, ends, form == "warmup", d_out, 0.3
    )  # fmt: skip
    assert relative_error(out, expected) < 5e-5
    assert abs(kl.item() - expected_kl.item()) < 2e-4 * max(expected_kl.item(), 0.05)
    for argument, gradient, reference in zip(NAMES, gradients, expected_gradients, strict=True):
        assert relative_error(gradient, reference) < 1.25e-4, argument


@pytest.mark.parametrize("form", FUNCTIONS)
def test_16_bit_types(form: str) -> None:
    inputs = make_inputs(1, 4, 1, 2, 1, dtype=torch.bfloat16)
    out, kl = FUNCTIONS[form](*inputs, 256, 0.25)
    assert out.dtype == torch.bfloat16
    d_out = torch.zeros(out.shape)
    expected, expected_kl, _ = expected_results(inputs, 256, 0.25, [600], form == "warmup", d_out, 1.0)
    assert relative_error(out, expected) < 8e-3
    assert abs(kl.item() - expected_kl.item()) < 5e-3 * max(expected_kl.item(), 0.05)


def test_memory_of_any_layout() -> None:
    inputs = make_inputs(2, 4, 1, 2, 1)
    views = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    with torch.no_grad():
        out, kl = flash_msa_func(*inputs, 256, 0.25)
        from_views, kl_from_views = flash_msa_func(*views, 256, 0.25)
    assert torch.equal(out, from_views)
    assert torch.equal(kl, kl_from_views)


def test_more_keys_than_there_are_is_dense() -> None:
    inputs = make_inputs(1, 4, 1, 2, 1, length=200)
    out, kl = flash_msa_func(*inputs, 1024, 0.25)
    dense, dense_kl = flash_msa_warmup_func(*inputs, 128, 0.25)
    assert relative_error(out, dense) < 1e-6
    assert kl.item() == pytest.approx(dense_kl.item(), rel=1e-5)


@pytest.mark.parametrize("form", FUNCTIONS)
def test_documents_are_sequences(form: str) -> None:
    inputs = make_inputs(2, 4, 1, 2, 1)
    ends = [190, 600, 900, 1200]
    numbers = torch.cat([torch.full((190,), 7), torch.full((410,), 3), torch.full((300,), 7), torch.full((300,), -1)])
    function = FUNCTIONS[form]
    out, kl = function(*inputs, 128, 0.25, numbers.reshape(2, 600))
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((out * d_out).sum() + kl, inputs)
    expected, expected_kl, expected_gradients = expected_results(inputs, 128, 0.25, ends, form == "warmup", d_out, 1.0)
    assert relative_error(out, expected) < 5e-5
    assert abs(kl.item() - expected_kl.item()) < 2e-4
    for argument, gradient, reference in zip(NAMES, gradients, expected_gradients, strict=True):
        assert relative_error(gradient, reference) < 1.25e-4, argument
    by_offsets, kl_by_offsets = function(*inputs, 128, 0.25, cu_seqlens=torch.tensor([0, *ends], dtype=torch.int32))
    assert torch.equal(out, by_offsets)
    assert torch.equal(kl, kl_by_offsets)


@pytest.mark.parametrize("form", FUNCTIONS)
def test_kl_metric_is_written_by_backward(form: str) -> None:
    inputs = make_inputs(1, 4, 1, 2, 1)
    function = FUNCTIONS[form]
    _, kl = function(*inputs, 256, 0.25)
    expected = torch.autograd.grad(kl, inputs[:2])
    metric = torch.full((), -1.0)
    _, placeholder = function(*inputs, 256, 0.25, kl_metric=metric)
    assert placeholder.item() == 0
    gradients = torch.autograd.grad(0.5 * placeholder, inputs[:2])
    assert metric.item() == pytest.approx(kl.item(), rel=1e-4)
    for gradient, reference in zip(gradients, expected, strict=True):
        assert relative_error(gradient, 0.5 * reference) < 1e-6


def test_each_loss_trains_its_own_branch() -> None:
    inputs = make_inputs(1, 4, 1, 2, 1, length=300)
    out, kl = flash_msa_func(*inputs, 128, 0.25)
    assert torch.autograd.grad(out.sum(), inputs[:2], allow_unused=True, retain_graph=True) == (None, None)
    assert torch.autograd.grad(kl, inputs[2:], allow_unused=True, retain_graph=True) == (None, None, None)
    for gradient in torch.autograd.grad(out.sum() + 0.0 * kl, inputs[:2]):
        assert not gradient.any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(reentrant: bool) -> None:
    inputs = make_inputs(1, 4, 1, 2, 1, length=300)

    def loss(*tensors: Tensor) -> Tensor:
        out, kl = flash_msa_func(*tensors, 128, 0.25)
        return out.square().sum() + kl

    expected = torch.autograd.grad(loss(*inputs), inputs)
    checkpoint(loss, *inputs, use_reentrant=reentrant).backward()
    for tensor, gradient in zip(inputs, expected, strict=True):
        assert tensor.grad is not None
        assert relative_error(tensor.grad, gradient) < 1e-6


def test_signatures() -> None:
    for function in (flash_msa_func, flash_msa_warmup_func):
        parameters = inspect.signature(function).parameters
        assert list(parameters) == [*NAMES, "top_k", "scale", "document_list", "cu_seqlens", "kl_metric"]
    assert flash_msa_func_warmup is flash_msa_warmup_func


@pytest.mark.parametrize("form", FUNCTIONS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_proxy": None}, "q_proxy: got a NoneType, expected a torch tensor"),
        ({"q": torch.zeros(4, 200, 32)}, r"q: got rank 3, expected \[B, H, S, D\]"),
        ({"k": torch.zeros(1, 1, 199, 32)}, r"k: got \[1, 1, 199, 32\], expected B = 1 and S = 200 as of q"),
        ({"q_proxy": torch.zeros(1, 3, 200, 32)}, "q: got 4 heads, expected a multiple of q_proxy's 3"),
        ({"k_proxy": torch.zeros(1, 3, 200, 32)}, "q_proxy: got 2 heads, expected a multiple of k_proxy's 3"),
        ({"q_proxy": torch.zeros(1, 1, 200, 32), "k": torch.zeros(1, 2, 200, 32)}, "q_proxy: got 1 heads, .* k's 2"),
        ({"v": torch.zeros(1, 2, 200, 32)}, "v: got 2 heads, expected 1 as of k"),
        ({"k_proxy": torch.zeros(1, 1, 200, 16)}, "k_proxy: "),
        ({"k_proxy": torch.zeros(1, 1, 200, 32, dtype=torch.float16)}, "k_proxy: "),
        ({"top_k": 100}, "top_k: got 100, expected a positive multiple of 128 keys"),
        ({"top_k": 0}, "top_k: got 0"),
        ({"top_k": 128.0}, "top_k: got a float, expected an integer"),
        ({"scale": None}, "scale: missing"),
        ({"scale": -1.0}, "scale: "),
        ({"document_list": torch.zeros(1, 199, dtype=torch.int32)}, r"document_list: got torch.int32 \[1, 199\]"),
        ({"document_list": torch.zeros(1, 200)}, "document_list: got torch.float32"),
        ({"document_list": [0] * 200}, "document_list: got a list"),
        ({"document_list": torch.arange(200)[None] // 50 % 2}, "document_list: a row's document has other tokens"),
        ({"cu_seqlens": torch.tensor([0, 200])}, "cu_seqlens: got torch.int64"),
        ({"cu_seqlens": torch.tensor([0, 150], dtype=torch.int32)}, "cu_seqlens: "),
        ({"kl_metric": torch.zeros(1)}, "kl_metric: "),
    ],
)
def test_errors_name_the_argument(form: str, changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        **dict(zip(NAMES, make_inputs(1, 4, 1, 2, 1, length=200), strict=True)), "top_k": 128, "scale": 0.25
    }  # fmt: skip
    function = FUNCTIONS[form]
    with pytest.raises(
        (openmsa.InvalidArgumentError, openmsa.UnsupportedError), match=f"^{function.__name__}: {message}"
    ):
        function(**{**arguments, **changes})


def test_documents_end_with_their_row() -> None:
    inputs = make_inputs(2, 4, 1, 2, 1, length=200)
    with pytest.raises(openmsa.InvalidArgumentError, match="cu_seqlens: no offset 200, expected each row's"):
        flash_msa_func(*inputs, 128, 0.25, cu_seqlens=torch.tensor([0, 150, 400], dtype=torch.int32))
    with pytest.raises(openmsa.InvalidArgumentError, match="document_list: got a tensor beside cu_seqlens"):
        flash_msa_func(
            *inputs, 128, 0.25, torch.zeros(2, 200, dtype=torch.int32), cu_seqlens=torch.tensor([0, 200, 400])
        )


@pytest.mark.parametrize("form", FUNCTIONS)
def test_compiles_in_one_graph(form: str) -> None:
    inputs = make_inputs(2, 4, 1, 2, 1, length=200)
    out, kl = FUNCTIONS[form](*inputs, 128, 0.25)
    expected = torch.autograd.grad(out.sum() + kl, inputs)
    compiled = torch.compile(FUNCTIONS[form], fullgraph=True, backend="aot_eager")
    compiled_out, compiled_kl = compiled(*inputs, 128, 0.25)
    assert torch.equal(compiled_out, out)
    assert torch.equal(compiled_kl, kl)
    for gradient, reference in zip(
        torch.autograd.grad(compiled_out.sum() + compiled_kl, inputs), expected, strict=True
    ):  # fmt: skip
        assert relative_error(gradient, reference) < 1e-6
