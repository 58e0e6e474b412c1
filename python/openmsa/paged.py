"""The operations of serving: keys live in pages that a table assigns to requests. The page size is the block size."""

from __future__ import annotations

from typing import Any, Literal, overload

from . import _numpy, _shapes
from ._arguments import PLAN_ONLY, all_given, cache_scale, choose_operators, integers, number
from ._call import Plan, run
from ._torch import eager, plain
from ._types import ArrayT, CacheScale, MsaResult


@overload
def paged_select_blocks(
    index_q: ArrayT, index_k_cache: ArrayT, block_table: ArrayT, seq_lens: ArrayT, *, cu_seqlens_q: ArrayT,
    topk: int = 16, init_blocks: int = 0, local_blocks: int = 1, scale: float | None = None,
    return_lse: Literal[False] = False, out: ArrayT | None = None, lse_out: ArrayT | None = None,
    workspace: ArrayT | None = None,
) -> ArrayT: ...  # fmt: skip
@overload
def paged_select_blocks(
    index_q: ArrayT, index_k_cache: ArrayT, block_table: ArrayT, seq_lens: ArrayT, *, cu_seqlens_q: ArrayT,
    topk: int = 16, init_blocks: int = 0, local_blocks: int = 1, scale: float | None = None,
    return_lse: Literal[True], out: ArrayT | None = None, lse_out: ArrayT | None = None,
    workspace: ArrayT | None = None,
) -> tuple[ArrayT, ArrayT]: ...  # fmt: skip
def paged_select_blocks(
    index_q: Any,
    index_k_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    cu_seqlens_q: Any,
    topk: int = 16,
    init_blocks: int = 0,
    local_blocks: int = 1,
    scale: float | None = None,
    return_lse: bool = False,
    out: Any = None,
    lse_out: Any = None,
    workspace: Any = None,
) -> Any:
    """:func:`openmsa.select_blocks` over paged index keys.

    Key j of request b is row ``j % block_size`` of page ``block_table[b, j // block_size]``. Query rows from
    ``cu_seqlens_q[B]`` on, and requests of length 0, are padding: they see no key.

    Args:
        index_q: [Tq, Hi, Di], float32 (CPU), float16, bfloat16 or float8_e4m3fn.
        index_k_cache: [pages, block_size, Hik, Di], the same type.
        block_table: [B, max_pages] int32; entries past a request's length are never read.
        seq_lens: [B] int32, keys of each request, its new tokens included.
        cu_seqlens_q: [B+1] int32, offsets of the requests' queries.
        topk: blocks per query and index head, at least 1.
        init_blocks: how many first blocks are forced.
        local_blocks: how many last blocks are forced; with 0 the own block competes by its score.
        scale: factor of the scores, finite and above 0; ``1 / sqrt(Di)`` by default.
        return_lse: whether to return the index branch's log-sum-exp too.
        out: where to write the indices, int32 or int64.
        lse_out: where to write the log-sum-exp.
        workspace: uint8, at least :func:`openmsa.workspace_size` bytes; None lets the call allocate.

    Returns:
        ``indices`` [Hi, Tq, topk] int32: block numbers within the request; with ``return_lse`` also ``index_lse``
        [Hi, Tq] float32 (natural logarithm).

    Raises:
        InvalidArgumentError: an argument is wrong; the message names it.
        UnsupportedError: the backend cannot do this.
    """
    operators = eager
    arrays: tuple[Any, ...] = (index_q, index_k_cache, block_table, seq_lens, cu_seqlens_q)
    scale = number("paged_select_blocks", "scale", scale)
    if not plain(arrays, out, lse_out, workspace):
        topk, init_blocks, local_blocks = integers(
            "paged_select_blocks", topk=topk, init_blocks=init_blocks, local_blocks=local_blocks
        )
        operators = choose_operators(
            "paged_select_blocks",
            {
                "index_q": index_q, "index_k_cache": index_k_cache, "block_table": block_table, "seq_lens": seq_lens,
                "cu_seqlens_q": cu_seqlens_q,
            },
            {"out": out, "lse_out": lse_out, "workspace": workspace},
        )  # fmt: skip
    inputs: tuple[Any, ...] = (*arrays, topk, init_blocks, local_blocks, scale)
    if operators is not None and out is None and lse_out is None and workspace is None:
        out, lse_out = operators.paged_select_blocks(*inputs, bool(return_lse))
    elif operators is not None and all_given(workspace, out, lse_out if return_lse else out):
        operators.paged_select_blocks_out(*inputs, workspace, out, lse_out)
    else:
        lse = _shapes.per_head(index_q) if return_lse or lse_out is not None else None
        plan = Plan("paged_select_blocks", inputs, (_shapes.indices(index_q, topk), lse), (out, lse_out))
        if workspace is PLAN_ONLY:
            return plan
        out, lse_out = run(plan, workspace, operators)
    return (out, lse_out) if return_lse else out


@overload
def paged_sparse_attention(
    q: ArrayT, k_cache: ArrayT, v_cache: ArrayT, indices: ArrayT, block_table: ArrayT, seq_lens: ArrayT, *,
    cu_seqlens_q: ArrayT, scale: float | None = None, k_scale: CacheScale = None, v_scale: CacheScale = None,
    return_lse: Literal[False] = False, out: ArrayT | None = None, lse_out: ArrayT | None = None,
    workspace: ArrayT | None = None,
) -> ArrayT: ...  # fmt: skip
@overload
def paged_sparse_attention(
    q: ArrayT, k_cache: ArrayT, v_cache: ArrayT, indices: ArrayT, block_table: ArrayT, seq_lens: ArrayT, *,
    cu_seqlens_q: ArrayT, scale: float | None = None, k_scale: CacheScale = None, v_scale: CacheScale = None,
    return_lse: Literal[True], out: ArrayT | None = None, lse_out: ArrayT | None = None,
    workspace: ArrayT | None = None,
) -> tuple[ArrayT, ArrayT]: ...  # fmt: skip
def paged_sparse_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    indices: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    cu_seqlens_q: Any,
    scale: float | None = None,
    k_scale: CacheScale = None,
    v_scale: CacheScale = None,
    return_lse: bool = False,
    out: Any = None,
    lse_out: Any = None,
    workspace: Any = None,
) -> Any:
    """:func:`openmsa.sparse_attention` over paged keys and values. It has no gradient.

    Args:
        q: [Tq, Hq, D], float32 (CPU), float16 or bfloat16.
        k_cache: [pages, block_size, Hkv, D], q's type or float8_e4m3fn.
        v_cache: [pages, block_size, Hkv, Dv], k_cache's type.
        indices: [Hi, Tq, topk] int32 or int64, block numbers within the request, in any order.
        block_table: [B, max_pages] int32; entries past a request's length are never read.
        seq_lens: [B] int32, keys of each request, its new tokens included.
        cu_seqlens_q: [B+1] int32, offsets of the requests' queries.
        scale: factor of the scores, finite and above 0; ``1 / sqrt(D)`` by default.
        k_scale: K is ``k_scale`` times what k_cache stores: a number, or a 0-d float32 array on q's device. Only for
            float8_e4m3fn caches; None is 1.
        v_scale: the same for v_cache.
        return_lse: whether to return the log-sum-exp too.
        out: where to write the output.
        lse_out: where to write the log-sum-exp.
        workspace: uint8, at least :func:`openmsa.workspace_size` bytes; None lets the call allocate.

    Returns:
        ``out`` [Tq, Hq, Dv], q's type; 0 for a query that sees no key. With ``return_lse`` also ``lse`` [Hq, Tq]
        float32 (natural logarithm).

    Raises:
        InvalidArgumentError: an argument is wrong; the message names it.
        UnsupportedError: the backend cannot do this.
    """
    operators = eager
    k_factor, k_scale_array = cache_scale("paged_sparse_attention", "k_scale", k_scale)
    v_factor, v_scale_array = cache_scale("paged_sparse_attention", "v_scale", v_scale)
    arrays: tuple[Any, ...] = (q, k_cache, v_cache, indices, block_table, seq_lens, cu_seqlens_q)
    scale = number("paged_sparse_attention", "scale", scale)
    if not plain(arrays, k_scale_array, v_scale_array, out, lse_out, workspace):
        operators = choose_operators(
            "paged_sparse_attention",
            {
                "q": q, "k_cache": k_cache, "v_cache": v_cache, "indices": indices, "block_table": block_table,
                "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q,
            },
            {
                "k_scale": k_scale_array, "v_scale": v_scale_array, "out": out, "lse_out": lse_out,
                "workspace": workspace,
            },
        )  # fmt: skip
    inputs: tuple[Any, ...] = (*arrays, scale, k_factor, k_scale_array, v_factor, v_scale_array)
    if operators is not None and out is None and lse_out is None and workspace is None:
        out, lse_out = operators.paged_sparse_attention(*inputs, bool(return_lse))
    elif operators is not None and all_given(workspace, out, lse_out if return_lse else out):
        operators.paged_sparse_attention_out(*inputs, workspace, out, lse_out)
    else:
        lse = _shapes.per_head(q) if return_lse or lse_out is not None else None
        plan = Plan("paged_sparse_attention", inputs, (_shapes.attention(q, v_cache), lse), (out, lse_out))
        if workspace is PLAN_ONLY:
            return plan
        out, lse_out = run(plan, workspace, operators)
    return (out, lse_out) if return_lse else out


def paged_msa_attention(
    q: ArrayT,
    k_cache: ArrayT,
    v_cache: ArrayT,
    index_q: ArrayT,
    index_k_cache: ArrayT,
    block_table: ArrayT,
    seq_lens: ArrayT,
    *,
    cu_seqlens_q: ArrayT,
    topk: int = 16,
    init_blocks: int = 0,
    local_blocks: int = 1,
    scale: float | None = None,
    index_scale: float | None = None,
    k_scale: CacheScale = None,
    v_scale: CacheScale = None,
    out: ArrayT | None = None,
    lse_out: ArrayT | None = None,
    indices_out: ArrayT | None = None,
    workspace: ArrayT | None = None,
) -> MsaResult:
    """:func:`paged_select_blocks` and :func:`paged_sparse_attention` in one call. It has no gradient.

    Args:
        q: [Tq, Hq, D], float32 (CPU), float16 or bfloat16.
        k_cache: [pages, block_size, Hkv, D], q's type or float8_e4m3fn.
        v_cache: [pages, block_size, Hkv, Dv], k_cache's type.
        index_q: [Tq, Hi, Di], float32 (CPU), float16, bfloat16 or float8_e4m3fn.
        index_k_cache: [pages, block_size, Hik, Di], index_q's type.
        block_table: [B, max_pages] int32; entries past a request's length are never read.
        seq_lens: [B] int32, keys of each request, its new tokens included.
        cu_seqlens_q: [B+1] int32, offsets of the requests' queries.
        topk: blocks per query and index head, at least 1.
        init_blocks: how many first blocks are forced.
        local_blocks: how many last blocks are forced; with 0 the own block competes by its score.
        scale: factor of the attention scores; ``1 / sqrt(D)`` by default.
        index_scale: factor of the index scores; ``1 / sqrt(Di)`` by default.
        k_scale: K is ``k_scale`` times what a float8_e4m3fn k_cache stores: a number or a 0-d float32 array.
        v_scale: the same for v_cache.
        out: where to write the output.
        lse_out: where to write the log-sum-exp.
        indices_out: where to write the indices, int32.
        workspace: uint8, at least :func:`openmsa.workspace_size` bytes; None lets the call allocate.

    Returns:
        :class:`MsaResult` with ``kl`` and ``index_lse`` None.

    Raises:
        InvalidArgumentError: an argument is wrong; the message names it.
        UnsupportedError: the backend cannot do this.
    """
    operators = eager
    k_factor, k_scale_array = cache_scale("paged_msa_attention", "k_scale", k_scale)
    v_factor, v_scale_array = cache_scale("paged_msa_attention", "v_scale", v_scale)
    arrays: tuple[Any, ...] = (q, k_cache, v_cache, index_q, index_k_cache, block_table, seq_lens, cu_seqlens_q)
    given: tuple[Any, ...] = (out, lse_out, indices_out)
    scale = number("paged_msa_attention", "scale", scale)
    index_scale = number("paged_msa_attention", "index_scale", index_scale)
    if not plain(arrays, k_scale_array, v_scale_array, *given, workspace):
        topk, init_blocks, local_blocks = integers(
            "paged_msa_attention", topk=topk, init_blocks=init_blocks, local_blocks=local_blocks
        )
        operators = choose_operators(
            "paged_msa_attention",
            {
                "q": q, "k_cache": k_cache, "v_cache": v_cache, "index_q": index_q, "index_k_cache": index_k_cache,
                "block_table": block_table, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q,
            },
            {
                "k_scale": k_scale_array, "v_scale": v_scale_array, "out": out, "lse_out": lse_out,
                "indices_out": indices_out, "workspace": workspace,
            },
        )  # fmt: skip
    inputs: tuple[Any, ...] = (
        *arrays, topk, init_blocks, local_blocks, scale, index_scale, k_factor, k_scale_array, v_factor, v_scale_array,
    )  # fmt: skip
    results: Any
    if operators is not None and out is None and lse_out is None and indices_out is None and workspace is None:
        results = operators.paged_msa_attention(*inputs)
    elif operators is not None and all_given(workspace, *given):
        operators.paged_msa_attention_out(*inputs, workspace, *given)
        results = given
    else:
        outputs = (_shapes.attention(q, v_cache), _shapes.per_head(q), _shapes.indices(index_q, topk))
        plan = Plan("paged_msa_attention", inputs, outputs, given)
        if workspace is PLAN_ONLY:
            return plan  # type: ignore[return-value]
        results = run(plan, workspace, operators)
    result, lse, indices = results
    return MsaResult(result, None, indices, lse, None)


def paged_append(
    k: ArrayT,
    v: ArrayT,
    index_k: ArrayT,
    k_cache: ArrayT,
    v_cache: ArrayT,
    index_k_cache: ArrayT,
    block_table: ArrayT,
    seq_lens: ArrayT,
    *,
    cu_seqlens_q: ArrayT,
    k_scale: CacheScale = None,
    v_scale: CacheScale = None,
) -> None:
    """Write each request's new rows into its pages, at the request's last n_q positions.

    A float8_e4m3fn cache stores K divided by ``k_scale``, rounded to nearest even and saturated.

    Args:
        k: [Tq, Hkv, D], float32 (CPU), float16 or bfloat16.
        v: [Tq, Hkv, Dv], k's type.
        index_k: [Tq, Hik, Di], float32 (CPU), float16, bfloat16 or float8_e4m3fn.
        k_cache: [pages, block_size, Hkv, D], k's type or float8_e4m3fn; written.
        v_cache: [pages, block_size, Hkv, Dv], v's type or float8_e4m3fn; written.
        index_k_cache: [pages, block_size, Hik, Di], index_k's type or float8_e4m3fn; written.
        block_table: [B, max_pages] int32.
        seq_lens: [B] int32, keys of each request, the new ones included.
        cu_seqlens_q: [B+1] int32, offsets of the requests' new rows.
        k_scale: factor of a float8_e4m3fn k_cache, a number or a 0-d float32 array; None is 1.
        v_scale: the same for v_cache.

    Raises:
        InvalidArgumentError: an argument is wrong; the message names it.
        UnsupportedError: the backend cannot do this.
    """
    k_factor, k_scale_array = cache_scale("paged_append", "k_scale", k_scale)
    v_factor, v_scale_array = cache_scale("paged_append", "v_scale", v_scale)
    operators = eager
    arrays: tuple[Any, ...] = (k, v, index_k, block_table, seq_lens, cu_seqlens_q)
    caches: tuple[Any, ...] = (k_cache, v_cache, index_k_cache)
    if not plain((*arrays, *caches), k_scale_array, v_scale_array):
        operators = choose_operators(
            "paged_append",
            {
                "k": k, "v": v, "index_k": index_k, "k_cache": k_cache, "v_cache": v_cache,
                "index_k_cache": index_k_cache, "block_table": block_table, "seq_lens": seq_lens,
                "cu_seqlens_q": cu_seqlens_q,
            },
            {"k_scale": k_scale_array, "v_scale": v_scale_array},
        )  # fmt: skip
    inputs: tuple[Any, ...] = (*arrays, k_factor, k_scale_array, v_factor, v_scale_array)
    if operators is None:
        _numpy.call("paged_append", inputs, (None, *caches))
    else:
        operators.paged_append(*inputs, *caches)
