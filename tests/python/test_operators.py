"""Every registered operator passes torch's own checks of schema, fake kernel, autograd registration and tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openmsa
import pytest
import torch
from openmsa._ops import kernels
from problems import make_paged, make_problem

OPS = torch.ops.openmsa
Arguments = tuple[Any, ...]


def contiguous(trained: bool) -> Any:
    problem = make_problem(((40, 40), (30, 50)))
    return problem.trainable() if trained else problem


def sequences(problem: Any) -> Arguments:
    return problem.sequences["cu_seqlens_q"], problem.sequences["cu_seqlens_k"], None


def select() -> Arguments:
    problem = contiguous(False)
    return (*problem.index, *sequences(problem), 2, 0, 1, 32, None)


def attend(trained: bool = False) -> Arguments:
    problem = contiguous(False)
    indices = openmsa.select_blocks(*problem.index, **problem.selection)
    if trained:
        problem.trainable()
    return (*problem.attention, indices, *sequences(problem), 32, None)


def attend_backward() -> Arguments:
    q, k, v, indices, *rest = attend()
    out, lse = OPS.sparse_attention(q, k, v, indices, *rest, False, True)
    return (q, k, v, indices, out, lse, torch.randn_like(out), *rest, False)


def msa(kl: str, *, trained: bool = False, warmup: bool = False) -> Arguments:
    problem = contiguous(trained)
    kl_out = torch.zeros(()) if kl == "backward" else None
    return (*problem.tensors, *sequences(problem), 2, 0, 1, 32, None, None, warmup, kl, False, kl_out)


def msa_backward(d_out: bool = True, d_kl: bool = True) -> Arguments:
    arguments = msa("forward")
    out, lse, indices, index_lse, _ = OPS.msa_attention(*arguments)
    upstream = (torch.randn_like(out) if d_out else None, torch.tensor(0.5) if d_kl else None)
    return (*arguments[:5], out, lse, indices, index_lse, *upstream, *sequences(contiguous(False)), 32, None, None,
            False, False)  # fmt: skip


def paged() -> tuple[Any, Any]:
    problem = make_problem(((3, 40), (1, 70)))
    return problem, make_paged(problem)


def paged_select() -> Arguments:
    problem, pages = paged()
    return (problem.index_q, pages.index_k_cache, *pages.requests.values(), 2, 0, 1, None)


def paged_attend(scale: Arguments = (None, None, None, None)) -> Arguments:
    problem, pages = paged()
    indices = OPS.paged_select_blocks(*paged_select(), False)[0]
    return (problem.q, pages.k_cache, pages.v_cache, indices, *pages.requests.values(), None, *scale)


def paged_attend_float8() -> Arguments:
    q, k_cache, v_cache, *rest = paged_attend((2.0, None, None, torch.tensor(0.5)))
    return (q, k_cache.nan_to_num().to(torch.float8_e4m3fn), v_cache.nan_to_num().to(torch.float8_e4m3fn), *rest)


def paged_msa() -> Arguments:
    problem, pages = paged()
    return (problem.q, pages.k_cache, pages.v_cache, problem.index_q, pages.index_k_cache, *pages.requests.values(), 2,
            0, 1, None, None, None, None, None, None)  # fmt: skip


def append() -> Arguments:
    problem, pages = paged()
    return (problem.k[:4], problem.v[:4], problem.index_k[:4], *pages.requests.values(), None, None, None, None,
            pages.k_cache, pages.v_cache, pages.index_k_cache)  # fmt: skip


def indices_and_lse(tokens: int) -> Arguments:
    return None, torch.empty(2, tokens, 2, dtype=torch.int32), torch.empty(2, tokens)


def out_and_lse(tokens: int) -> Arguments:
    return None, torch.empty(tokens, 4, 24), torch.empty(4, tokens)


def workspace() -> torch.Tensor:
    return torch.empty(1 << 20, dtype=torch.uint8)


CALLS: dict[str, tuple[str, Callable[[], Arguments]]] = {
    "select_blocks": ("select_blocks", lambda: (*select(), True)),
    "select_blocks without lse": ("select_blocks", lambda: (*select(), False)),
    "select_blocks_out": ("select_blocks_out", lambda: (*select(), *indices_and_lse(70))),
    "sparse_attention": ("sparse_attention", lambda: (*attend(), False, True)),
    "sparse_attention trained": ("sparse_attention", lambda: (*attend(True), False, False)),
    "sparse_attention_workspace": ("sparse_attention_workspace", lambda: (*attend(True), True, True, workspace())),
    "sparse_attention_out": ("sparse_attention_out", lambda: (*attend(), *out_and_lse(70))),
    "sparse_attention_backward": ("sparse_attention_backward", attend_backward),
    "msa_attention": ("msa_attention", lambda: msa("forward")),
    "msa_attention trained": ("msa_attention", lambda: msa("forward", trained=True)),
    "msa_attention kl backward": ("msa_attention", lambda: msa("backward", trained=True)),
    "msa_attention kl off": ("msa_attention", lambda: msa("off", trained=True)),
    "msa_attention warmup": ("msa_attention", lambda: msa("forward", trained=True, warmup=True)),
    "msa_attention_workspace": ("msa_attention_workspace", lambda: (*msa("forward", trained=True), workspace())),
    "msa_attention_backward": ("msa_attention_backward", msa_backward),
    "msa_attention_backward of out": ("msa_attention_backward", lambda: msa_backward(d_kl=False)),
    "msa_attention_backward of kl": ("msa_attention_backward", lambda: msa_backward(d_out=False)),
    "msa_attention_backward_kl": ("msa_attention_backward_kl", lambda: (*msa_backward(), torch.zeros(()))),
    "paged_select_blocks": ("paged_select_blocks", lambda: (*paged_select(), True)),
    "paged_select_blocks_out": ("paged_select_blocks_out", lambda: (*paged_select(), *indices_and_lse(4))),
    "paged_sparse_attention": ("paged_sparse_attention", lambda: (*paged_attend(), True)),
    "paged_sparse_attention float8": ("paged_sparse_attention", lambda: (*paged_attend_float8(), False)),
    "paged_sparse_attention_out": ("paged_sparse_attention_out", lambda: (*paged_attend(), *out_and_lse(4))),
    "paged_msa_attention": ("paged_msa_attention", paged_msa),
    "paged_msa_attention_out": (
        "paged_msa_attention_out",
        lambda: (*paged_msa(), *out_and_lse(4), torch.empty(2, 4, 2, dtype=torch.int32)),
    ),
    "paged_append": ("paged_append", append),
    "combine": ("combine", lambda: (torch.randn(3, 5, 4, 8), torch.randn(3, 4, 5))),
    "captured_mass": ("captured_mass", lambda: (*(a for i, a in enumerate(attend()) if i != 2),)),
}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    operator, arguments = CALLS[name]
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if "float8" in name:
        checks.remove("test_schema")  # it multiplies its inputs, which torch cannot do with float8
    torch.library.opcheck(getattr(OPS, operator).default, arguments(), test_utils=checks)


def test_every_operator_is_checked() -> None:
    assert set(vars(kernels)) == {operator for operator, _ in CALLS.values()}


@pytest.mark.parametrize("name", CALLS)
def test_meta_results_have_the_shapes_of_real_ones(name: str) -> None:
    operator, arguments = CALLS[name]
    given = arguments()
    real = getattr(OPS, operator)(*given)
    moved = [x.detach().to("meta").requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in given]
    fake = getattr(OPS, operator)(*moved)
    for expected, result in zip(real or (), fake or (), strict=True):
        assert (expected.shape, expected.dtype) == (result.shape, result.dtype)
