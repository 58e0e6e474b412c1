"""GPU tensors: what the GPU's backend supports equals the CPU, the rest is refused by name."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import openmsa
import pytest
import torch
from problems import make_paged, make_problem


def gpu_backend_is_there() -> bool:
    return any(backend["device"] != "cpu" and backend["available"] for backend in openmsa.info()["backends"])


pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and gpu_backend_is_there()),
    reason="needs an SM90 GPU and a build with the sm90 backend",
)
HEADS = (64, 4, 4, 1)
SHAPE = {"heads": HEADS, "dim": 128, "dim_v": 128, "dim_index": 128, "block_size": 128, "topk": 4}


def assert_near_ties(
    index: list[torch.Tensor], selection: dict[str, Any], got: torch.Tensor, want: torch.Tensor
) -> None:
    """Slot by slot the same blocks, or blocks whose scores are within 1e-3 |q| max |k|: tensor cores add products of
    float8 with about 13 bits."""
    index_q, index_k = (x.double() for x in index)
    block, topk = selection["block_size"], selection["topk"]
    assert torch.equal(got < 0, want < 0)
    q_ends, k_ends = (
        selection[name].tolist() if name in selection else [0, len(tokens)]
        for name, tokens in (("cu_seqlens_q", index_q), ("cu_seqlens_k", index_k))
    )
    for (q_begin, q_end), (k_begin, k_end) in zip(pairwise(q_ends), pairwise(k_ends), strict=True):
        if q_begin == q_end or k_begin == k_end:
            continue
        q, k = index_q[q_begin:q_end].transpose(0, 1), index_k[k_begin:k_end, 0]
        visible = torch.arange(k_end - k_begin) <= torch.arange(q_end - q_begin)[:, None] + len(k) - q.shape[1]
        scores = (q @ k.T).masked_fill(~visible, -torch.inf)
        padded = torch.nn.functional.pad(scores, (0, -len(k) % block), value=-torch.inf)
        best = padded.unflatten(-1, (-1, block)).amax(-1)
        margin = 1e-3 * q.norm(dim=-1, keepdim=True) * k.norm(dim=-1).max()
        rows, exact = got[:, q_begin:q_end].long(), want[:, q_begin:q_end].long()
        difference = best.gather(-1, rows.clamp(min=0)) - best.gather(-1, exact.clamp(min=0))
        assert bool(((rows == exact) | (difference.abs() <= margin)).all())
        distinct = rows.where(rows >= 0, torch.arange(-topk, 0)).sort(-1).values.diff(dim=-1)
        assert bool((distinct > 0).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("lengths", [((700, 700),), ((1, 2049), (300, 300), (0, 5), (130, 1000))])
def test_select_blocks_equals_the_cpu(dtype: torch.dtype, lengths: tuple[tuple[int, int], ...]) -> None:
    problem = make_problem(lengths, **SHAPE)
    index = [x.to(dtype) for x in problem.index]
    expected = openmsa.select_blocks(*index, **problem.selection, return_lse=True)
    on_gpu = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in problem.selection.items()}
    for _ in range(3):
        indices, index_lse = openmsa.select_blocks(*(x.cuda() for x in index), **on_gpu, return_lse=True)
        assert indices.device.type == "cuda"
        if dtype == torch.float8_e4m3fn:
            assert_near_ties(index, problem.selection, indices.cpu(), expected[0])
        else:
            assert torch.equal(indices.cpu(), expected[0])
        torch.testing.assert_close(index_lse.cpu(), expected[1], rtol=2e-3, atol=2e-3)


def test_paged_select_blocks_equals_the_cpu() -> None:
    problem = make_problem(((3, 400), (1, 1290)), **SHAPE)
    pages = make_paged(problem)
    index = (problem.index_q.bfloat16(), pages.index_k_cache.bfloat16())
    expected = openmsa.paged_select_blocks(*index, **pages.requests, topk=4)
    requests = {name: x.cuda() for name, x in pages.requests.items()}
    result = openmsa.paged_select_blocks(*(x.cuda() for x in index), **requests, topk=4)
    assert torch.equal(result.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("queries", "topk"), [(1, 16), (5, 40), (300, 16)])
def test_few_queries_on_long_keys_equal_the_cpu(dtype: torch.dtype, queries: int, topk: int) -> None:
    generator = torch.Generator().manual_seed(queries)
    # Small integers: exact scores, many of them equal.
    index_q = torch.randint(-2, 3, (queries, 4, 128), generator=generator).to(dtype)
    index_k = torch.randint(-2, 3, (20011, 1, 128), generator=generator).to(dtype)
    expected = openmsa.select_blocks(index_q, index_k, topk=topk)
    result = openmsa.select_blocks(index_q.cuda(), index_k.cuda(), topk=topk)
    assert torch.equal(result.cpu(), expected)


def test_views_of_fused_rows_and_of_interleaved_caches() -> None:
    problem = make_problem(((3, 400), (1, 1290)), **SHAPE)
    pages = make_paged(problem)
    cache = pages.index_k_cache.bfloat16()
    expected = openmsa.paged_select_blocks(problem.index_q.bfloat16(), cache, **pages.requests, topk=4)
    fused = torch.full((problem.index_q.shape[0], 6, 128), torch.nan, dtype=torch.bfloat16, device="cuda")
    fused[:, 1:5] = problem.index_q
    interleaved = torch.full((*cache.shape[:3], 256), torch.nan, dtype=torch.bfloat16, device="cuda")
    interleaved[..., 128:] = cache
    # Token-major memory for the head-major result, as serving engines keep it.
    out = torch.zeros(problem.index_q.shape[0], 4, 4, dtype=torch.int32, device="cuda").transpose(0, 1)
    requests = {name: x.cuda() for name, x in pages.requests.items()}
    openmsa.paged_select_blocks(fused[:, 1:5], interleaved[..., 128:], **requests, topk=4, out=out)
    assert torch.equal(out.cpu(), expected)


def test_calls_do_not_wait_for_the_gpu() -> None:
    problem = make_problem(((700, 700),), **SHAPE)
    index = [x.bfloat16().cuda() for x in problem.index]
    out = openmsa.select_blocks(*index, **problem.selection)
    size = openmsa.workspace_size("select_blocks", *index, **problem.selection)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # cycles, 0.2 s
    slept = torch.cuda.Event()
    slept.record()
    openmsa.select_blocks(*index, **problem.selection, out=out, workspace=workspace)
    assert not slept.query()
    torch.cuda.synchronize()


def test_a_workspace_that_is_too_small_is_refused() -> None:
    problem = make_problem(((700, 700),), **SHAPE)
    index = [x.bfloat16().cuda() for x in problem.index]
    size = openmsa.workspace_size("select_blocks", *index, **problem.selection)
    if size == 0:
        pytest.skip("this kernel needs no workspace")
    workspace = torch.empty(size - 1, dtype=torch.uint8, device="cuda")
    with pytest.raises(openmsa.InvalidArgumentError, match="workspace"):
        openmsa.select_blocks(*index, **problem.selection, workspace=workspace)


def test_current_stream_and_results_in_place() -> None:
    problem = make_problem(((700, 700),), **SHAPE)
    index = [x.bfloat16().cuda() for x in problem.index]
    expected = openmsa.select_blocks(*index, **problem.selection)
    out = torch.zeros_like(expected)
    size = openmsa.workspace_size("select_blocks", *index, **problem.selection)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert openmsa.select_blocks(*index, **problem.selection, out=out, workspace=workspace) is out
    stream.synchronize()
    assert torch.equal(out, expected)


def test_graph_capture_and_replay() -> None:
    problem = make_problem(((700, 700),), **SHAPE)
    index = [x.bfloat16().cuda() for x in problem.index]
    out = torch.zeros(4, 700, 4, dtype=torch.int32, device="cuda")
    size = openmsa.workspace_size("select_blocks", *index, **problem.selection)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    arguments = {**problem.selection, "out": out, "workspace": workspace}
    openmsa.select_blocks(*index, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        openmsa.select_blocks(*index, **arguments)
    index[0].copy_(index[0].flip(0))
    out.zero_()
    graph.replay()
    assert torch.equal(out, openmsa.select_blocks(*index, **problem.selection))


def test_mixed_devices_are_refused() -> None:
    problem = make_problem(((700, 700),), **SHAPE)
    with pytest.raises(openmsa.InvalidArgumentError, match="index_k"):
        openmsa.select_blocks(problem.index_q.bfloat16().cuda(), problem.index_k.bfloat16(), block_size=128)


def test_float32_is_refused_by_name() -> None:
    problem = make_problem(((700, 700),), **SHAPE)
    with pytest.raises(openmsa.Error, match="index_q"):
        openmsa.select_blocks(*(x.cuda() for x in problem.index), **problem.selection)


def test_block_size_32_is_refused_by_name() -> None:
    problem = make_problem(((700, 700),), **SHAPE)
    with pytest.raises(openmsa.UnsupportedError, match="block_size"):
        openmsa.select_blocks(*(x.bfloat16().cuda() for x in problem.index), topk=4, block_size=32)


LENGTHS = [((700, 700),), ((1, 2049), (300, 300), (0, 5), (130, 1000)), ((2500, 2500),)]


def halves(tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    return [x.to(dtype) for x in tensors]


def on_gpu(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


def assert_attention_close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = 2e-3 if got.dtype == torch.float16 else 8e-3
    difference = (got.cpu().double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
    assert float(difference) <= tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_attention_equals_the_cpu(dtype: torch.dtype, lengths: tuple[tuple[int, int], ...]) -> None:
    problem = make_problem(lengths, **SHAPE)
    tensors = halves(problem.tensors, dtype)
    expected = openmsa.msa_attention(*tensors, **problem.selection, kl="off")
    gpu = [x.cuda() for x in tensors]
    with torch.no_grad():
        result = openmsa.msa_attention(*gpu, **on_gpu(problem.selection), kl="off")
        out, lse = openmsa.sparse_attention(*gpu[:3], result.indices, **on_gpu(problem.layout), return_lse=True)
    assert torch.equal(result.indices.cpu(), expected.indices)
    assert_attention_close(result.out, expected.out)
    torch.testing.assert_close(result.lse.cpu(), expected.lse, rtol=2e-3, atol=2e-3)
    assert torch.equal(out, result.out)
    assert torch.equal(lse, result.lse)


def test_paged_attention_and_append_equal_the_cpu() -> None:
    problem = make_problem(((3, 400), (200, 1290)), **SHAPE)
    pages = make_paged(problem)
    caches = halves((pages.k_cache, pages.v_cache, pages.index_k_cache), torch.bfloat16)
    q, index_q = halves((problem.q, problem.index_q), torch.bfloat16)
    new = [torch.randn(len(q), *x.shape[2:]).bfloat16() for x in caches]
    gpu_caches = [x.cuda() for x in caches]
    requests = on_gpu(pages.requests)
    openmsa.paged_append(*new, *caches, **pages.requests)
    openmsa.paged_append(*(x.cuda() for x in new), *gpu_caches, **requests)
    for got, want in zip(gpu_caches, caches, strict=True):
        assert torch.equal(got.cpu().view(torch.int16), want.view(torch.int16))
    expected = openmsa.paged_msa_attention(q, caches[0], caches[1], index_q, caches[2], **pages.requests, topk=4)
    result = openmsa.paged_msa_attention(
        q.cuda(), gpu_caches[0], gpu_caches[1], index_q.cuda(), gpu_caches[2], **requests, topk=4
    )
    assert torch.equal(result.indices.cpu(), expected.indices)
    assert_attention_close(result.out, expected.out)


def test_captured_mass_and_combine_equal_the_cpu() -> None:
    problem = make_problem(LENGTHS[1], **SHAPE)
    q, k, v = halves(problem.attention, torch.bfloat16)
    indices = openmsa.select_blocks(*halves(problem.index, torch.bfloat16), **problem.selection)
    gpu = [x.cuda() for x in (q, k, v)]
    layout = on_gpu(problem.layout)
    expected = openmsa.captured_mass(q, k, indices, **problem.layout)
    result = openmsa.captured_mass(*gpu[:2], indices.cuda(), **layout)
    for got, want in zip(result, expected, strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=5e-3, atol=5e-3)
    parts = [indices.where(torch.arange(4) % 2 == half, -1) for half in range(2)]
    outs, lses = zip(
        *(openmsa.sparse_attention(*gpu, part.cuda(), **layout, return_lse=True) for part in parts), strict=True
    )
    out, lse = openmsa.combine(torch.stack(outs), torch.stack(lses))
    whole, whole_lse = openmsa.sparse_attention(q, k, v, indices, **problem.layout, return_lse=True)
    assert_attention_close(out, whole)
    torch.testing.assert_close(lse.cpu(), whole_lse, rtol=2e-3, atol=2e-3)


def test_attention_in_a_graph_does_not_wait() -> None:
    problem = make_problem(((2500, 2500),), **SHAPE)
    tensors = [x.bfloat16().cuda() for x in problem.tensors]
    size = openmsa.workspace_size("msa_attention", *tensors, **problem.selection, kl="off")
    arguments = {**problem.selection, "kl": "off", "workspace": torch.empty(size, dtype=torch.uint8, device="cuda")}
    with torch.no_grad():
        openmsa.msa_attention(*tensors, **arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = openmsa.msa_attention(*tensors, **arguments)
        for x in tensors[:3]:
            x.copy_(x.flip(0))
        graph.replay()
        expected = openmsa.msa_attention(*tensors, **problem.selection, kl="off")
    assert torch.equal(result.out, expected.out)
    assert torch.equal(result.indices, expected.indices)


def test_what_the_gpu_lacks_is_refused_by_name() -> None:
    problem = make_problem(((300, 300),), **SHAPE)
    tensors = [x.bfloat16().cuda() for x in problem.tensors]
    with torch.no_grad():
        with pytest.raises(openmsa.UnsupportedError, match="kl"):
            openmsa.msa_attention(*tensors, **problem.selection)
        with pytest.raises(openmsa.UnsupportedError, match="warmup"):
            openmsa.msa_attention(*tensors, **problem.layout, warmup=True, kl="off")
