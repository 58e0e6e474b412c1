"""Every case of the table through the Python surface, against the oracle. OPENMSA_CASES_REDUCED=1 runs the subset."""

import contextlib
import importlib.util
import itertools
import os
from typing import Any

import case_inputs
import ml_dtypes
import numpy as np
import oracle
import pytest
from case_inputs import Array, Case, load_cases
from conftest import HAVE_TORCH

openmsa = pytest.importorskip("openmsa")

CASES = [c for c in load_cases() if "reduced" in c["tags"] or os.environ.get("OPENMSA_CASES_REDUCED", "0") in ("", "0")]
# The oracle's masks make large problems slow; C++ runs them too.
TORCH_LIMIT = 40e6


def cases_of(*ops: str, limit: float = np.inf) -> list[Any]:
    return [
        pytest.param(c, op, id=f"{op}-{c['name']}")
        for c in CASES
        for op in c["ops"]
        if op in ops and c["cost"] <= limit
    ]


class Problem:
    """The arguments of a case in its strides, and the same in float64 for the oracle."""

    def __init__(self, c: Case, poisoned: bool = True):
        self.c = c
        self.sequences = case_inputs.key_rows(c)
        self.block = c["block_size"]
        self.scale = c["scale"] or c["D"] ** -0.5
        self.index_scale = c["index_scale"] or c["Di"] ** -0.5
        self.poisoned = poisoned

    def given(self, tensor: str) -> Array:
        """As the library gets it: invisible memory holds NaN and inf."""
        return case_inputs.place(self.c, tensor, case_inputs.values(self.c, tensor, poisoned=self.poisoned))

    def exact(self, tensor: str) -> Array:
        x = case_inputs.values(self.c, tensor, poisoned=False).astype(np.float64)
        if self.c["paged"] and tensor in ("k", "v"):
            x *= np.float32(self.c["paged"][f"{tensor}_scale"] or 1.0)
        return x

    def selection(self) -> Array:
        """The caller's selection, or the oracle's."""
        if self.c["selection"]:
            x = case_inputs.caller_selection(self.c)
        else:
            x = self.select()[0].astype(case_inputs.dtype_of(self.c, "indices"))
        return case_inputs.place(self.c, "indices", x)

    def select(self) -> tuple[Array, Array]:
        return oracle.select(
            self.exact("index_q"), self.exact("index_k"), self.sequences, **self.selection_arguments(),
            block_size=self.block, scale=self.index_scale,
        )  # fmt: skip

    def selection_arguments(self) -> dict[str, Any]:
        return {name: self.c[name] for name in ("topk", "init_blocks", "local_blocks")}

    def offsets(self) -> dict[str, Any]:
        names = ("cu_seqlens_q", "cu_seqlens_k", "k_starts")
        return {n: None if self.c[n] is None else np.array(self.c[n], np.int32) for n in names}

    def requests(self) -> tuple[tuple[Array, Array], dict[str, Any]]:
        p = self.c["paged"]
        shape = (len(p["block_table"]), p["max_pages"])
        table = case_inputs.make_image(np.int32, shape, (p["table_stride"], 1)).view
        for row, entries in zip(table, p["block_table"], strict=True):
            row[:] = entries
        return (table, np.array(p["seq_lens"], np.int32)), {"cu_seqlens_q": np.array(self.c["cu_seqlens_q"], np.int32)}

    def factors(self) -> dict[str, Any]:
        p = self.c["paged"]
        wrap = np.float32 if p["scale_form"] == "tensor" else float
        result = {n: None if p[n] is None else wrap(p[n]) for n in ("k_scale", "v_scale")}
        if p["scale_form"] == "tensor":
            result = {n: None if x is None else np.array(x, np.float32) for n, x in result.items()}
        return result


# ---- comparison -----------------------------------------------------------------------------------------------------

TOLERANCES = {"float32": 5e-5, "float16": 2e-3, "bfloat16": 8e-3, "float8_e4m3": 8e-3}
LSE_TOLERANCES = {"float32": 5e-5, "float16": 2e-3, "bfloat16": 2e-3, "float8_e4m3": 2e-3}
KL_TOLERANCES = {"float32": 2e-4, "float16": 5e-3, "bfloat16": 5e-3, "float8_e4m3": 5e-3}


def assert_close(name: str, got: Array, want: Array, tolerance: float, floor: float = 0.0) -> None:
    """nan and inf in the same places, every element within 8 tolerances of the largest, relative norm of the rest.

    Differences of numbers of size `floor` that should cancel may leave `floor` times a tolerance.
    """
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape, name
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite], err_msg=name)
    off, expected = got[finite] - want[finite], want[finite]
    assert np.abs(off).max(initial=0) <= 8 * tolerance * np.abs(expected).max(initial=floor), name
    assert np.linalg.norm(off) <= tolerance * max(np.linalg.norm(expected), floor * off.size**0.5), name


def assert_kl(c: Case, got: Any, want: float) -> None:
    tolerance = max(KL_TOLERANCES[c["dtype"]], KL_TOLERANCES[c["index_dtype"]])
    if np.isfinite(want):
        assert abs(float(got) - want) <= tolerance * max(want, 0.05)
    else:
        assert np.isnan(float(got)) == np.isnan(want)


def cpu_backend() -> str:
    forced = os.environ.get("OPENMSA_BACKEND")
    return forced or next(b["name"] for b in openmsa.info()["backends"] if b["device"] == "cpu" and b["available"])


def row_fault(row: Array, scores: Array, visible: Array, own: int, c: Case, margin: float) -> str:
    """What is wrong with one row of a selection whose block scores are these; '' where nothing is."""
    blocks = np.flatnonzero(visible).tolist()
    local = [b for b in blocks if b > own - c["local_blocks"]][-c["topk"] :] if c["local_blocks"] else []
    rest = [b for b in blocks if b <= own - c["local_blocks"] or not c["local_blocks"]]
    init = [b for b in rest if b < c["init_blocks"]][: c["topk"] - len(local)]
    count = min(c["topk"], len(blocks))
    chosen, scored = row[:count].tolist(), row[: count - len(local)].tolist()
    if (row[count:] != -1).any() or len(set(chosen)) != count or not set(chosen) <= set(blocks):
        return "not the visible blocks, once each, then -1"
    if chosen[len(scored) :] != local or not set(init) <= set(scored):
        return "forced blocks are not where they belong"

    def may_precede(a: int, b: int) -> bool:
        if scores[a] == scores[b]:
            return a < b
        return bool(scores[a] > scores[b] or scores[a] >= scores[b] - margin)

    if not all(may_precede(a, b) for a, b in itertools.pairwise(scored)):
        return "not by descending score"
    competing = [b for b in scored if b not in init]
    left_out = [b for b in rest if b not in scored and b >= c["init_blocks"]]
    if not all(may_precede(a, b) for a in competing for b in left_out):
        return "a better block was left out"
    return ""


def assert_selection(p: Problem, got: Array, want: Array) -> None:
    """Rows equal the oracle's, or differ only where scores are closer than the contract's margin."""
    got = np.asarray(got)
    if np.array_equal(got, want):
        return
    q, k = p.exact("index_q"), oracle.flat(p.exact("index_k"))
    with np.errstate(invalid="ignore"):
        largest = [np.nanmax(np.where(np.isfinite(x), x**2, 0).sum(-1), initial=0) ** 0.5 for x in (q, k)]
    # Exact arithmetic leaves no room; float64 sums differ by their order alone.
    margin = 0.0 if p.c["values"] in ("ties", "equal") else 1e-13 if cpu_backend() == "reference" else 5e-6
    margin *= p.index_scale * largest[0] * largest[1]
    for part in oracle.block_scores(q, p.exact("index_k"), p.sequences, p.block, p.index_scale):
        for r, i in np.argwhere((got[:, part.queries] != want[:, part.queries]).any(-1)).tolist():
            row = got[r, part.queries.start + i]
            fault = row_fault(row, part.scores[r, i], part.visible[i], int(part.own[i]), p.c, margin)
            assert not fault, (r, part.queries.start + i, row, want[r, part.queries.start + i], fault)


@contextlib.contextmanager
def refused(c: Case):
    """On the CPU, values out of range are an error that names the argument."""
    if c["raises"]:
        with pytest.raises(openmsa.InvalidArgumentError, match=f"{c['raises']}: got"):
            yield True
    else:
        yield False


# ---- tests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("c", "op"), cases_of("select", "paged_select"))
def test_select(c: Case, op: str) -> None:
    p = Problem(c)
    out = case_inputs.make_image(case_inputs.DTYPES[c["indices_dtype"]], *layout_of(c, "indices"))
    lse = case_inputs.make_image(np.float32, *layout_of(c, "index_lse"))
    arguments = {
        **p.selection_arguments(),
        "scale": c["index_scale"],
        "out": out.view,
        "lse_out": lse.view,
        "return_lse": True,
    }
    with refused(c):
        if op == "select":
            openmsa.select_blocks(
                p.given("index_q"), p.given("index_k"), **arguments, block_size=p.block, **p.offsets()
            )
        else:
            positional, named = p.requests()
            openmsa.paged_select_blocks(p.given("index_q"), p.given("index_k"), *positional, **named, **arguments)
    assert not out.outside_changed(0xFF)
    assert not lse.outside_changed(0xFF)
    if c["raises"]:
        assert (out.memory == 0xFF).all()
        return
    want, want_lse = p.select()
    assert_selection(p, out.view, want)
    if not np.array_equal(out.view, want):
        want_lse = oracle.index_lse(
            p.exact("index_q"), p.exact("index_k"), out.view, p.sequences, p.block, p.index_scale
        )
    assert_close("index_lse", lse.view, want_lse, LSE_TOLERANCES[c["index_dtype"]])


def layout_of(c: Case, tensor: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return case_inputs.shape_of(c, tensor), case_inputs.strides_of(c, tensor)


@pytest.mark.parametrize(("c", "op"), cases_of("attend", "paged_attend"))
def test_attend(c: Case, op: str) -> None:
    p = Problem(c)
    indices = p.selection()
    out = case_inputs.make_image(case_inputs.DTYPES[c["dtype"]], *layout_of(c, "out"))
    lse = case_inputs.make_image(np.float32, *layout_of(c, "lse"))
    arguments = {"scale": c["scale"], "out": out.view, "lse_out": lse.view, "return_lse": True}
    q, k, v = p.given("q"), p.given("k"), p.given("v")
    with refused(c):
        if op == "attend":
            openmsa.sparse_attention(q, k, v, indices, block_size=p.block, **p.offsets(), **arguments)
        else:
            positional, named = p.requests()
            openmsa.paged_sparse_attention(q, k, v, indices, *positional, **named, **p.factors(), **arguments)
    assert not out.outside_changed(0xFF)
    assert not lse.outside_changed(0xFF)
    if c["raises"]:
        assert (out.memory == 0xFF).all()
        return
    want, want_lse = oracle.attend(
        p.exact("q"), p.exact("k"), p.exact("v"), indices, c["Hi"], p.sequences, p.block, p.scale
    )
    assert_close("out", out.view, want, TOLERANCES[c["dtype"]])
    assert_close("lse", lse.view, want_lse, LSE_TOLERANCES[c["dtype"]])


@pytest.mark.parametrize(("c", "op"), cases_of("msa", "warmup", "paged_msa"))
def test_both_branches(c: Case, op: str) -> None:
    p = Problem(c)
    q, k, v, index_q, index_k = (p.given(t) for t in ("q", "k", "v", "index_q", "index_k"))
    shared = {**p.selection_arguments(), "scale": c["scale"], "index_scale": c["index_scale"]}
    with refused(c):
        if op == "paged_msa":
            positional, named = p.requests()
            result = openmsa.paged_msa_attention(
                q, k, v, index_q, index_k, *positional, **named, **p.factors(), **shared
            )
        else:
            result = openmsa.msa_attention(
                q, k, v, index_q, index_k, **shared, block_size=p.block, **p.offsets(), warmup=op == "warmup"
            )
    if c["raises"]:
        return
    if op == "warmup":
        assert result.indices is None
    else:
        assert result.indices.dtype == np.int32
        assert_selection(p, result.indices, p.select()[0])
    exact_k = p.exact("k")
    out, lse = oracle.attend(
        p.exact("q"), exact_k, p.exact("v"), result.indices, c["Hi"], p.sequences, p.block, p.scale
    )
    assert_close("out", result.out, out, TOLERANCES[c["dtype"]])
    assert_close("lse", result.lse, lse, LSE_TOLERANCES[c["dtype"]])
    if op == "paged_msa":
        assert result.kl is None
        assert result.index_lse is None
        return
    want_lse = oracle.index_lse(
        p.exact("index_q"), p.exact("index_k"), result.indices, p.sequences, p.block, p.index_scale
    )
    assert_close("index_lse", result.index_lse, want_lse, LSE_TOLERANCES[c["index_dtype"]])
    assert_kl(c, result.kl, gradients(p, result.indices, 0.0).kl)


def gradients(p: Problem, indices: Array | None, d_kl: float) -> oracle.Gradients:
    index = (p.exact("index_q"), p.exact("index_k"), p.index_scale)
    return oracle.backward(
        p.exact("q"), p.exact("k"), p.exact("v"), p.exact("d_out"), indices, p.c["Hi"], p.sequences, p.block, p.scale,
        index, d_kl,
    )  # fmt: skip


def as_torch(x: Array, gradient: bool = False) -> Any:
    import torch

    if any(s < 0 for s in x.strides):
        x = x.copy()  # torch has no negative strides
    if x.dtype == ml_dtypes.bfloat16:
        tensor = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    elif x.dtype == ml_dtypes.float8_e4m3fn:
        tensor = torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn)
    else:
        tensor = torch.from_numpy(x)
    return tensor.requires_grad_() if gradient else tensor


def from_torch(x: Any) -> Array:
    import torch

    return x.detach().to(torch.float64).numpy()


@pytest.mark.skipif(not HAVE_TORCH, reason="needs torch")
@pytest.mark.parametrize(("c", "op"), cases_of("backward", "msa", "warmup", limit=TORCH_LIMIT))
def test_torch_gradients(c: Case, op: str) -> None:
    import torch

    p = Problem(c)
    trains_index = op != "backward" and c["index_dtype"] != "float8_e4m3"
    q, k, v = (as_torch(p.given(t), True) for t in ("q", "k", "v"))
    index_q, index_k = (as_torch(p.given(t), trains_index) for t in ("index_q", "index_k"))
    d_out = as_torch(p.given("d_out"))
    offsets = {n: None if x is None else as_torch(x) for n, x in p.offsets().items()}
    indices = None if op == "warmup" else p.selection()
    with refused(c) as fails:
        if op == "backward":
            out = openmsa.sparse_attention(q, k, v, as_torch(indices), block_size=p.block, scale=c["scale"], **offsets)
            out.backward(d_out)
        else:
            result = openmsa.msa_attention(
                q, k, v, index_q, index_k, **p.selection_arguments(), block_size=p.block, scale=c["scale"],
                index_scale=c["index_scale"], **offsets, warmup=op == "warmup",
            )  # fmt: skip
            indices = None if op == "warmup" else result.indices.numpy()
            roots, upstream = [result.out], [d_out]
            if trains_index:
                roots.append(result.kl)
                upstream.append(result.kl.new_full((), case_inputs.D_KL))
            torch.autograd.backward(roots, upstream)
    if fails:
        return
    want = gradients(p, indices, case_inputs.D_KL)
    tolerance = TOLERANCES[c["dtype"]]
    for name, tensor, gradient in (("d_q", q, want.q), ("d_k", k, want.k), ("d_v", v, want.v)):
        assert_gradient(name, tensor, gradient, 2 * tolerance)
    if trains_index:
        assert want.index_q is not None
        assert want.index_k is not None
        index_tolerance = 2.5 * max(tolerance, TOLERANCES[c["index_dtype"]])
        # pi - p of probabilities near 1: float32 log-sum-exps leave 1e-7 of it.
        floor = 1e-3 * case_inputs.D_KL / max(c["Hi"] * c["Tq"], 1) * p.index_scale
        assert_gradient("d_index_q", index_q, want.index_q, index_tolerance, floor)
        assert_gradient("d_index_k", index_k, want.index_k, index_tolerance, floor)


def assert_gradient(name: str, tensor: Any, want: Array, tolerance: float, floor: float = 0.0) -> None:
    assert tensor.grad is not None, name
    assert_close(name, from_torch(tensor.grad), want, tolerance, floor)


@pytest.mark.parametrize(("c", "op"), cases_of("mass"))
def test_captured_mass(c: Case, op: str) -> None:
    p = Problem(c)
    indices = p.selection()
    with refused(c):
        share, best = openmsa.captured_mass(
            p.given("q"), p.given("k"), indices, block_size=p.block, scale=c["scale"], **p.offsets()
        )
    if c["raises"]:
        return
    want_share, want_best = oracle.captured_mass(p.exact("q"), p.exact("k"), indices, p.sequences, p.block, p.scale)
    assert_close("share", share, want_share, LSE_TOLERANCES[c["dtype"]])
    assert_close("best", best, want_best, LSE_TOLERANCES[c["dtype"]])


@pytest.mark.parametrize(("c", "op"), cases_of("combine"))
def test_combine(c: Case, op: str) -> None:
    outs, lses = case_inputs.splits(c)
    out, lse = openmsa.combine(outs, lses)
    want, want_lse = oracle.combine(outs.astype(np.float64), lses.astype(np.float64))
    assert out.dtype == outs.dtype
    assert_close("out", out, want, TOLERANCES[c["dtype"]])
    assert_close("lse", lse, want_lse, 5e-5)


@pytest.mark.parametrize(("c", "op"), cases_of("append"))
def test_append(c: Case, op: str) -> None:
    p = Problem(c)
    positional, named = p.requests()
    caches = [p.given(t) for t in ("k", "v", "index_k")]
    new = [case_inputs.values(c, t) for t in ("new_k", "new_v", "new_index_k")]
    expected = [oracle.flat(cache).copy() for cache in caches]
    targets = oracle.append_targets(c["cu_seqlens_q"], c["paged"]["seq_lens"], c["paged"]["block_table"], p.block)
    factors = (c["paged"]["k_scale"] or 1.0, c["paged"]["v_scale"] or 1.0, 1.0)
    for cache, rows, factor in zip(expected, new, factors, strict=True):
        for source, target in targets:
            same = cache.dtype == rows.dtype
            cache[target] = rows[source] if same else oracle.store_e4m3(rows[source].astype(np.float64), factor)
    openmsa.paged_append(*new, *caches, *positional, **named, **p.factors())
    for name, cache, want in zip(("k", "v", "index_k"), caches, expected, strict=True):
        bits = np.dtype(f"u{want.dtype.itemsize}")
        np.testing.assert_array_equal(oracle.flat(cache).copy().view(bits), want.view(bits), err_msg=name)


def test_table_is_what_the_script_makes() -> None:
    specification = importlib.util.spec_from_file_location("make_cases", case_inputs.CASES / "make_cases.py")
    assert specification is not None
    assert specification.loader is not None
    make_cases = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(make_cases)
    assert make_cases.build() == (case_inputs.CASES / "cases.json").read_text(), "run tests/cases/make_cases.py"


def test_checksums_are_those_of_the_inputs() -> None:
    assert case_inputs.all_checksums() == (case_inputs.CASES / "checksums.json").read_text(), (
        "run tests/python/case_inputs.py --write"
    )


def test_invisible_rows_are_those_that_no_query_sees() -> None:
    for c in load_cases():
        seen = np.zeros(c["Tk"], bool)
        for _, n_q, rows in case_inputs.key_rows(c):
            if n_q:
                seen[rows[rows >= 0]] = True
        for first, end in c["invisible"]:
            assert not seen[first:end].any()
            seen[first:end] = True
        assert seen.all(), c["name"]
