"""Wrong arguments of any kind raise openmsa.Error with the argument's name and write nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import openmsa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import make_paged, make_problem

OPERATIONS = ("select_blocks", "sparse_attention", "msa_attention", "captured_mass", "paged_select_blocks",
              "paged_sparse_attention", "paged_msa_attention", "paged_append", "combine")  # fmt: skip


def arguments(operation: str) -> dict[str, Any]:
    """A valid call."""
    problem = make_problem(((20, 20), (10, 40)))
    pages = make_paged(problem)
    indices = torch.zeros(2, 30, 2, dtype=torch.int32)
    sequences = dict(problem.sequences)
    selection = {"topk": 2, "init_blocks": 0, "local_blocks": 1}
    index = {"index_q": problem.index_q, "index_k": problem.index_k}
    qk = {"q": problem.q, "k": problem.k}
    index_pages = {"index_q": problem.index_q, "index_k_cache": pages.index_k_cache}
    pages_kv = {"q": problem.q, "k_cache": pages.k_cache, "v_cache": pages.v_cache}
    lse_out = {"lse_out": torch.zeros(2, 30)}
    layout = {**sequences, "block_size": 32, "scale": 0.5}
    return {
        "select_blocks": {**index, **selection, **layout, "out": indices, **lse_out},
        "sparse_attention": {**qk, "v": problem.v, "indices": indices, **layout, "out": torch.zeros(30, 4, 24)},
        "msa_attention": {**qk, "v": problem.v, **index, **selection, **layout, "index_scale": 0.5},
        "captured_mass": {**qk, "indices": indices, **layout},
        "paged_select_blocks": {**index_pages, **pages.requests, **selection, "scale": 0.5, "out": indices, **lse_out},
        "paged_sparse_attention": {**pages_kv, "indices": indices, **pages.requests, "scale": 0.5},
        "paged_msa_attention": {**pages_kv, **index_pages, **pages.requests, **selection, "indices_out": indices},
        "paged_append": {
            "k": problem.k[:30], "v": problem.v[:30], "index_k": problem.index_k[:30], "k_cache": pages.k_cache,
            "v_cache": pages.v_cache, "index_k_cache": pages.index_k_cache, **pages.requests,
        },
        "combine": {"outs": torch.zeros(2, 30, 4, 8), "lses": torch.zeros(2, 4, 30)},
    }[operation]  # fmt: skip


def as_numpy(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def call(operation: str, values: dict[str, Any], *, numpy: bool = False) -> Any:
    return getattr(openmsa, operation)(**(as_numpy(values) if numpy else values))


def refused(operation: str, values: dict[str, Any], name: str, *, numpy: bool = False) -> None:
    with pytest.raises(openmsa.Error) as caught:
        call(operation, values, numpy=numpy)
    message = str(caught.value)
    assert message.startswith(f"{operation}: ")
    assert name in message
    assert "expected" in message


TENSORS = [
    (operation, name)
    for operation in OPERATIONS
    for name, value in arguments(operation).items()
    if isinstance(value, torch.Tensor)
]
OPTIONAL = {"out", "lse_out", "indices_out", "cu_seqlens_q", "cu_seqlens_k"}
BACKENDS = pytest.mark.parametrize("numpy", [False, True], ids=["torch", "numpy"])


@BACKENDS
@pytest.mark.parametrize("operation", OPERATIONS)
def test_valid_calls_pass(operation: str, numpy: bool) -> None:
    call(operation, arguments(operation), numpy=numpy)


@BACKENDS
@pytest.mark.parametrize(("operation", "name"), TENSORS)
def test_wrong_rank(operation: str, name: str, numpy: bool) -> None:
    values = arguments(operation)
    for wrong in (values[name][None], values[name][0].clone(), values[name][(None,) * 7]):
        refused(operation, {**values, name: wrong}, name, numpy=numpy)


@BACKENDS
@pytest.mark.parametrize(("operation", "name"), TENSORS)
def test_wrong_type(operation: str, name: str, numpy: bool) -> None:
    values = arguments(operation)
    for dtype in (torch.float64, torch.bool, torch.int8, torch.complex64, torch.uint8):
        refused(operation, {**values, name: values[name].to(dtype)}, name, numpy=numpy)


@pytest.mark.parametrize(("operation", "name"), TENSORS)
def test_missing_or_no_tensor(operation: str, name: str) -> None:
    values = arguments(operation)
    for wrong in ([1.0], "tensor", 3, object(), *(() if name in OPTIONAL else (None,))):
        refused(operation, {**values, name: wrong}, name)


@pytest.mark.parametrize(("operation", "name"), TENSORS)
def test_numpy_and_torch_do_not_mix(operation: str, name: str) -> None:
    values = arguments(operation)
    with pytest.raises(openmsa.InvalidArgumentError, match="cannot be mixed"):
        call(operation, {**values, name: values[name].numpy()})
    with pytest.raises(openmsa.InvalidArgumentError, match="cannot be mixed"):
        call(operation, {**as_numpy(values), name: values[name]})


@pytest.mark.parametrize(("operation", "name"), TENSORS)
def test_last_axis_not_contiguous(operation: str, name: str) -> None:
    values = arguments(operation)
    wrong = values[name].repeat_interleave(2, -1)[..., ::2]
    if wrong.shape[-1] > 1:
        refused(operation, {**values, name: wrong}, name)


@pytest.mark.parametrize(("operation", "name"), TENSORS)
def test_tensors_that_torch_cannot_hand_over(operation: str, name: str) -> None:
    values = arguments(operation)
    refused(operation, {**values, name: values[name].to("meta")}, f"{name}: got a tensor on meta")
    refused(operation, {**values, name: values[name].to_sparse()}, f"{name}: got a tensor of layout torch.sparse_coo")


def test_workspace_size_of_tensors_that_torch_cannot_hand_over() -> None:
    values = arguments("select_blocks")
    with pytest.raises(openmsa.UnsupportedError, match="select_blocks: index_k: got a tensor on meta, expected cpu"):
        openmsa.workspace_size("select_blocks", values["index_q"], values["index_k"].to("meta"))


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_other_float8_types_are_named(dtype: torch.dtype) -> None:
    values = arguments("select_blocks")
    refused("select_blocks", {**values, "index_q": values["index_q"].to(dtype)}, str(dtype).removeprefix("torch."))


@BACKENDS
@pytest.mark.parametrize("name", ["topk", "init_blocks", "local_blocks", "block_size"])
@pytest.mark.parametrize("wrong", [1.5, "2", None, [2], 2**63, -(2**70), -1, np.array(2), torch.tensor(2)])
def test_wrong_integers(name: str, wrong: Any, numpy: bool) -> None:
    for operation in ("select_blocks", "msa_attention"):
        refused(operation, {**arguments(operation), name: wrong}, name, numpy=numpy)


def test_integers_of_other_kinds() -> None:
    values = arguments("select_blocks")
    expected = call("select_blocks", values).clone()
    for kind in (np.int64, np.uint8):
        assert torch.equal(call("select_blocks", {**values, "topk": kind(2), "block_size": kind(32)}), expected)


@BACKENDS
@pytest.mark.parametrize("name", ["scale", "index_scale"])
@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan, "1", [1.0], 0, 1j])
def test_wrong_scales(name: str, wrong: Any, numpy: bool) -> None:
    refused("msa_attention", {**arguments("msa_attention"), name: wrong}, name, numpy=numpy)


@BACKENDS
@pytest.mark.parametrize("kind", [np.float32, np.float16, np.array, torch.tensor, int])
def test_scales_of_other_kinds(kind: Any, numpy: bool) -> None:
    values = arguments("msa_attention")
    expected = call("msa_attention", {**values, "scale": 2.0, "index_scale": 2.0}, numpy=numpy)
    function = openmsa.msa_attention
    given = {**(as_numpy(values) if numpy else values), "scale": kind(2), "index_scale": kind(2)}
    for result, wanted in zip(function(**given), expected, strict=True):
        assert np.array_equal(result, wanted)


@BACKENDS
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("wrong", [0.5, 1.0, "1", torch.ones(1), torch.ones((), dtype=torch.float64)])
def test_wrong_cache_scales(name: str, wrong: Any, numpy: bool) -> None:
    """A factor of caches that are not float8 is refused whatever it is."""
    for operation in ("paged_sparse_attention", "paged_append"):
        refused(operation, {**arguments(operation), name: wrong}, name, numpy=numpy)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf, torch.tensor(-1.0), torch.ones(2)])
def test_wrong_factors_of_float8_caches(wrong: Any) -> None:
    values = arguments("paged_sparse_attention")
    for name in ("k_cache", "v_cache"):
        values[name] = values[name].nan_to_num().to(torch.float8_e4m3fn)
    call("paged_sparse_attention", {**values, "k_scale": 2})
    refused("paged_sparse_attention", {**values, "k_scale": wrong}, "k_scale")


def test_heads_that_do_not_divide() -> None:
    values = arguments("msa_attention")
    for name, heads in (("q", 3), ("index_q", 3), ("k", 3), ("index_k", 3)):
        wrong = {**values, name: torch.zeros(values[name].shape[0], heads, values[name].shape[2])}
        if name == "k":
            wrong["v"] = torch.zeros(values["v"].shape[0], heads, values["v"].shape[2])
        with pytest.raises(openmsa.InvalidArgumentError, match=r"H(q|kv|i|ik)\b"):
            call("msa_attention", wrong)


@BACKENDS
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("cu_seqlens_q", [0, 40, 30]), ("cu_seqlens_q", [0, 20, 31]), ("cu_seqlens_q", [1, 20, 30]),
        ("cu_seqlens_q", [0, 30]), ("cu_seqlens_q", []), ("cu_seqlens_k", [0, -5, 60]), ("cu_seqlens_k", [0, 20, 59]),
        ("k_starts", [0]), ("k_starts", [0, 61]), ("k_starts", [-1, 20]),
    ],
)  # fmt: skip
def test_wrong_offsets(name: str, wrong: list[int], numpy: bool) -> None:
    for operation in ("select_blocks", "sparse_attention", "msa_attention", "captured_mass"):
        refused(operation, {**arguments(operation), name: torch.tensor(wrong, dtype=torch.int32)}, name, numpy=numpy)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_offsets_come_together(name: str) -> None:
    refused("select_blocks", {**arguments("select_blocks"), name: None}, name)


@BACKENDS
def test_wrong_tables(numpy: bool) -> None:
    for operation in ("paged_select_blocks", "paged_sparse_attention", "paged_msa_attention", "paged_append"):
        values = arguments(operation)
        for page in (-1, 99, 2**31 - 1):
            table = values["block_table"].clone()
            table[1, 0] = page
            refused(operation, {**values, "block_table": table}, "block_table", numpy=numpy)
        for lengths in ([20, 4000], [-1, 40], [20]):
            wrong = torch.tensor(lengths, dtype=torch.int32)
            refused(operation, {**values, "seq_lens": wrong}, "seq_lens", numpy=numpy)


@BACKENDS
def test_kl_arguments(numpy: bool) -> None:
    values = arguments("msa_attention")
    for wrong in ("exact", "", None, 3, True):
        refused("msa_attention", {**values, "kl": wrong}, "kl", numpy=numpy)
    refused("msa_attention", {**values, "kl": "backward"}, "kl", numpy=numpy)
    refused("msa_attention", {**values, "kl": "off", "kl_out": torch.zeros(())}, "kl_out", numpy=numpy)


@pytest.mark.parametrize(
    "wrong",
    [None, torch.zeros(1), torch.zeros((), dtype=torch.float64), torch.zeros((), requires_grad=True),
     torch.zeros((), device="meta"), 0.0],
)  # fmt: skip
def test_kl_out_must_be_a_plain_scalar(wrong: Any) -> None:
    for mode in ("backward",) if wrong is None else ("backward", "forward"):
        refused("msa_attention", {**arguments("msa_attention"), "kl": mode, "kl_out": wrong}, "kl_out: ")


def test_small_workspace_is_refused_or_enough() -> None:
    values = arguments("select_blocks")
    size = openmsa.workspace_size("select_blocks", **values)
    call("select_blocks", {**values, "workspace": torch.empty(size, dtype=torch.uint8)})
    refused("select_blocks", {**values, "workspace": torch.empty(size, dtype=torch.int8)}, "workspace")
    refused("select_blocks", {**values, "workspace": torch.empty(size, 1, dtype=torch.uint8)}, "workspace")


@pytest.mark.parametrize("name", ["out", "lse_out"])
def test_refused_results_are_untouched(name: str) -> None:
    values = arguments("select_blocks")
    values["out"].fill_(7)
    values["lse_out"].fill_(7.0)
    refused("select_blocks", {**values, "block_size": 48}, "block_size")
    refused("select_blocks", {**values, name: values[name][:, :-1]}, name)
    assert (values["out"] == 7).all()
    assert (values["lse_out"] == 7.0).all()


def test_unknown_arguments_are_python_errors() -> None:
    with pytest.raises(TypeError, match="blocks"):
        openmsa.select_blocks(**arguments("select_blocks"), blocks=3)


WRONG_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.just(()), st.just(object()),
    st.sampled_from([torch.zeros(0), torch.zeros(()), torch.zeros(1, 2, 3, 4, 5), np.zeros((2, 2))]),
)  # fmt: skip
AXES = st.lists(st.integers(0, 33), min_size=0, max_size=5)
TYPES = st.sampled_from(
    [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool]
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), operation=st.sampled_from(OPERATIONS), numpy=st.booleans())
def test_any_value_in_any_place(data: st.DataObject, operation: str, numpy: bool) -> None:
    """Whatever replaces arguments of a valid call, it works or raises openmsa.Error."""
    values = arguments(operation)
    for name in data.draw(st.lists(st.sampled_from(sorted(values)), min_size=1, max_size=3, unique=True)):
        if isinstance(values[name], torch.Tensor) and data.draw(st.booleans()):
            shape, dtype = data.draw(AXES), data.draw(TYPES)
            values[name] = torch.zeros(shape, dtype=torch.float32 if numpy and dtype is torch.bfloat16 else dtype)
        else:
            values[name] = data.draw(WRONG_VALUES)
    # A large topk is valid on the CPU; it must only not be larger than memory.
    if isinstance(values.get("topk"), int) and values["topk"] > 1000:
        values["topk"] = 1000
    try:
        call(operation, values, numpy=numpy)
    except openmsa.Error as error:
        message = str(error)
    else:
        return
    assert message.startswith(f"{operation}: ")
