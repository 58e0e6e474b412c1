"""numpy arrays in, numpy arrays out, with or without torch: read-only ones, ml_dtypes types, any strides."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import openmsa
import pytest

Array = np.ndarray[Any, Any]
BLOCK = 32


def arrays(tokens: int = 70, dtype: Any = np.float32) -> tuple[Array, ...]:
    generator = np.random.default_rng(0)
    shapes = ((4, 16), (2, 16), (2, 24), (2, 8), (1, 8))
    return tuple(generator.standard_normal((tokens, *shape)).astype(dtype) for shape in shapes)


def dense(q: Array, k: Array, v: Array, indices: Array) -> Array:
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (x.repeat(q.shape[1] // x.shape[1], 1) for x in (k, v))
    rows = np.arange(len(q))
    mask = (indices[..., None] == rows // BLOCK).any(2) & (rows[None, :] <= rows[:, None])
    scores = np.einsum("ihd,jhd->hij", q, k) * q.shape[2] ** -0.5
    scores[~mask.repeat(q.shape[1] // len(indices), 0)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_types(dtype: Any) -> None:
    q, k, v, index_q, index_k = arrays(dtype=dtype)
    result = openmsa.msa_attention(q, k, v, index_q, index_k, topk=2, block_size=BLOCK)
    assert isinstance(result.out, np.ndarray)
    assert result.out.dtype == q.dtype
    assert result.indices.dtype == np.int32
    assert result.kl.shape == ()
    error = np.linalg.norm(result.out.astype(np.float64) - dense(q, k, v, result.indices))
    tolerance = {"float32": 5e-5, "float16": 2e-3, "bfloat16": 8e-3}[q.dtype.name]
    assert error < tolerance * np.linalg.norm(dense(q, k, v, result.indices))
    indices, index_lse = openmsa.select_blocks(index_q, index_k, topk=2, block_size=BLOCK, return_lse=True)
    assert np.array_equal(indices, result.indices)
    np.testing.assert_allclose(index_lse, result.index_lse, rtol=1e-6, atol=1e-6)  # summed up by other stages
    out, lse = openmsa.sparse_attention(q, k, v, indices, block_size=BLOCK, return_lse=True)
    assert np.array_equal(out, result.out)
    assert np.array_equal(lse, result.lse)


def test_float8_index() -> None:
    *_, index_q, index_k = arrays()
    q8, k8 = index_q.astype(ml_dtypes.float8_e4m3fn), index_k.astype(ml_dtypes.float8_e4m3fn)
    rounded = openmsa.select_blocks(q8.astype(np.float32), k8.astype(np.float32), topk=2, block_size=BLOCK)
    assert np.array_equal(openmsa.select_blocks(q8, k8, topk=2, block_size=BLOCK), rounded)


def test_read_only_inputs() -> None:
    inputs = arrays()
    expected = openmsa.msa_attention(*inputs, topk=2, block_size=BLOCK)
    for array in inputs:
        array.flags.writeable = False
    result = openmsa.msa_attention(*inputs, topk=2, block_size=BLOCK)
    assert np.array_equal(result.out, expected.out)


def test_read_only_result_is_refused() -> None:
    *_, index_q, index_k = arrays()
    out = np.zeros((2, 70, 2), np.int32)
    out.flags.writeable = False
    with pytest.raises(openmsa.InvalidArgumentError, match="out: got a read-only array"):
        openmsa.select_blocks(index_q, index_k, topk=2, block_size=BLOCK, out=out)
    assert not out.any()


def _reversed(x: Array) -> Array:
    return np.ascontiguousarray(x[::-1])[::-1]


LAYOUTS = {
    "head-major": lambda x: np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2),
    "reversed rows": _reversed,
    "reversed heads": lambda x: np.ascontiguousarray(x[:, ::-1])[:, ::-1],
    "columns of a wider array": lambda x: np.concatenate((x, x), 2)[:, :, : x.shape[2]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str) -> None:
    inputs = arrays()
    expected = openmsa.msa_attention(*inputs, topk=2, block_size=BLOCK)
    views = [LAYOUTS[layout](x) for x in inputs]
    assert not all(view.flags.c_contiguous for view in views)
    result = openmsa.msa_attention(*views, topk=2, block_size=BLOCK)
    for got, wanted in zip(result, expected, strict=True):
        assert np.array_equal(got, wanted)


def test_broadcast_keys() -> None:
    *_, index_q, index_k = arrays()
    shared = np.broadcast_to(index_k, (70, 2, 8))
    expected = openmsa.select_blocks(index_q, np.ascontiguousarray(shared), topk=2, block_size=BLOCK)
    assert np.array_equal(openmsa.select_blocks(index_q, shared, topk=2, block_size=BLOCK), expected)


def test_last_axis_must_be_contiguous() -> None:
    *_, index_q, index_k = arrays()
    for wrong in (np.asfortranarray(index_q), np.repeat(index_q, 2, 2)[:, :, ::2], index_q[:, :, ::-1]):
        with pytest.raises(openmsa.InvalidArgumentError, match="index_q"):
            openmsa.select_blocks(wrong, index_k, topk=2, block_size=BLOCK)


def test_overlapping_result_is_refused() -> None:
    *_, index_q, index_k = arrays()
    out = np.lib.stride_tricks.as_strided(np.zeros(200, np.int32), (2, 70, 2), (0, 4, 4), writeable=True)
    with pytest.raises(openmsa.InvalidArgumentError, match="out"):
        openmsa.select_blocks(index_q, index_k, topk=2, block_size=BLOCK, out=out)


def test_unusable_arrays_are_named() -> None:
    *_, index_q, index_k = arrays()
    swapped = index_q.astype(index_q.dtype.newbyteorder())
    fields = np.zeros((70, 2, 8), [("a", np.float32), ("b", np.int8)])["a"]
    unaligned = np.frombuffer(bytes(4 * index_q.size + 1), np.uint8)[1:].view(np.float32).reshape(index_q.shape)
    for wrong in (swapped, fields, unaligned, index_q.astype(np.float64), index_q > 0, index_q.astype(object)):
        with pytest.raises(openmsa.InvalidArgumentError, match="select_blocks: index_q: got"):
            openmsa.select_blocks(wrong, index_k, topk=2, block_size=BLOCK)


def test_results_in_place() -> None:
    q, k, v, index_q, index_k = arrays()
    expected = openmsa.msa_attention(q, k, v, index_q, index_k, topk=2, block_size=BLOCK)
    indices = np.zeros((70, 2, 2), np.int64).transpose(1, 0, 2)
    lse = np.zeros((2, 70), np.float32)
    size = openmsa.workspace_size("select_blocks", index_q, index_k, topk=2, block_size=BLOCK)
    got = openmsa.select_blocks(
        index_q, index_k, topk=2, block_size=BLOCK, out=indices, lse_out=lse, workspace=np.zeros(size, np.uint8)
    )
    assert got is indices
    assert np.array_equal(indices, expected.indices)
    np.testing.assert_allclose(lse, expected.index_lse, rtol=1e-6, atol=1e-6)  # summed up by other stages
    out = np.zeros_like(expected.out)
    assert openmsa.sparse_attention(q, k, v, indices, block_size=BLOCK, out=out) is out
    assert np.array_equal(out, expected.out)


def test_sequences() -> None:
    q, k, v, index_q, index_k = arrays(100)
    offsets = np.array([0, 30, 30, 100], np.int32)
    packed = openmsa.msa_attention(
        q, k, v, index_q, index_k, topk=2, block_size=BLOCK, cu_seqlens_q=offsets, cu_seqlens_k=offsets
    )
    alone = openmsa.msa_attention(*(x[30:] for x in (q, k, v, index_q, index_k)), topk=2, block_size=BLOCK)
    assert np.array_equal(packed.out[30:], alone.out)
    assert np.array_equal(packed.indices[:, 30:], alone.indices)


def test_empty_arrays() -> None:
    q, k, v, index_q, index_k = (x[:0] for x in arrays())
    result = openmsa.msa_attention(q, k, v, index_q, index_k, topk=2, block_size=BLOCK)
    assert result.out.shape == (0, 4, 24)
    assert float(result.kl) == 0.0


@pytest.mark.parametrize("scale", [0.25, np.float32(0.25), np.array(0.25, np.float32)])
def test_pages_and_float8_caches(scale: Any) -> None:
    q, k, v, index_q, index_k = arrays(64)
    table, lengths, offsets = np.array([[1, 0]], np.int32), np.array([64], np.int32), np.array([0, 64], np.int32)
    k_cache, v_cache = (np.zeros((2, BLOCK, *x.shape[1:]), ml_dtypes.float8_e4m3fn) for x in (k, v))
    index_k_cache = np.zeros((2, BLOCK, 1, 8), np.float32)
    requests = {"block_table": table, "seq_lens": lengths, "cu_seqlens_q": offsets}
    openmsa.paged_append(k, v, index_k, k_cache, v_cache, index_k_cache, **requests, k_scale=scale, v_scale=scale)
    assert np.array_equal(index_k_cache[::-1].reshape(64, 1, 8), index_k)
    stored = k_cache[::-1].reshape(k.shape).astype(np.float32) * 0.25
    values = v_cache[::-1].reshape(v.shape).astype(np.float32) * 0.25
    expected = openmsa.msa_attention(q, stored, values, index_q, index_k, topk=1, block_size=BLOCK)
    result = openmsa.paged_msa_attention(
        q, k_cache, v_cache, index_q, index_k_cache, **requests, topk=1, k_scale=scale, v_scale=scale
    )
    assert np.array_equal(result.indices, expected.indices)
    np.testing.assert_allclose(result.out, expected.out, rtol=1e-5, atol=1e-6)


def test_combine_and_captured_mass() -> None:
    q, k, v, index_q, index_k = arrays()
    indices = openmsa.select_blocks(index_q, index_k, topk=2, block_size=BLOCK)
    out, lse = openmsa.sparse_attention(q, k, v, indices, block_size=BLOCK, return_lse=True)
    merged, merged_lse = openmsa.combine(np.stack((out, out)), np.stack((lse, lse)))
    np.testing.assert_allclose(merged, out, rtol=1e-6)
    np.testing.assert_allclose(merged_lse, lse + np.log(2), rtol=1e-6)
    share, best = openmsa.captured_mass(q, k, indices, block_size=BLOCK)
    assert share.shape == best.shape == (2, 70)
    assert (share <= best + 1e-6).all()


def test_kl_out_receives_the_kl() -> None:
    kl_out = np.zeros((), np.float32)
    result = openmsa.msa_attention(*arrays(), topk=2, block_size=BLOCK, kl_out=kl_out)
    assert kl_out == result.kl == openmsa.msa_attention(*arrays(), topk=2, block_size=BLOCK).kl > 0
    kl_out.fill(-1)
    assert result.kl > 0


def _read_only() -> Any:
    array = np.zeros((), np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("wrong", [_read_only(), np.zeros(1, np.float32), np.zeros(()), np.float32(0), 0.0])
def test_wrong_kl_out(wrong: Any) -> None:
    with pytest.raises(openmsa.InvalidArgumentError, match=r"^msa_attention: kl_out: got .*, expected"):
        openmsa.msa_attention(*arrays(), topk=2, block_size=BLOCK, kl_out=wrong)


@pytest.mark.parametrize("name", ["backward", "sideways", None, 1])
def test_kl_modes_that_numpy_lacks(name: Any) -> None:
    with pytest.raises(openmsa.Error, match="kl"):
        openmsa.msa_attention(*arrays(), topk=2, block_size=BLOCK, kl=name)


def test_works_without_torch() -> None:
    script = """
import sys
sys.modules["torch"] = None  # every import of it fails
import numpy as np, openmsa
x, y = np.random.default_rng(0).standard_normal((2, 70, 2, 16)).astype(np.float32)
result = openmsa.msa_attention(x, x, x, y, y, topk=2, block_size=32)
assert np.isfinite(result.out).all() and result.kl > 0
try:
    openmsa.select_blocks([1.0], x)
except openmsa.InvalidArgumentError as error:
    assert "index_q" in str(error)
else:
    raise AssertionError
assert sys.modules["torch"] is None
"""
    subprocess.run([sys.executable, "-c", script], check=True)
