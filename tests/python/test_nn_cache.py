"""Cached steps give what one forward pass over the whole text gives: chunks, decoding, drafts, several requests."""

from __future__ import annotations

import copy
from typing import Any

import openmsa
import pytest
import torch
from m3 import BLOCK, make_layer
from openmsa.nn import PagedCache, SparseAttention
from problems import relative_error
from torch import Tensor, nn

LENGTHS = (9 * BLOCK + 5, 3 * BLOCK, 6 * BLOCK - 1)


def texts(seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, 48, generator=generator) for length in LENGTHS]


def steps_of(lengths: tuple[int, ...]) -> list[list[int]]:
    """Prompts in chunks of any size, then decoding by 1 to 16 tokens, each request at its own pace."""
    plan = [[100, 1, 0], [70, 0, 64], [BLOCK, BLOCK, BLOCK], [1, 16, 5], [0, 0, 0], [16, 1, 1], [3, 0, 1]]
    done = [sum(step[request] for step in plan) for request in range(len(lengths))]
    assert all(have < want for have, want in zip(done, lengths, strict=True))
    while done != list(lengths):
        step = [min(want - have, 16 - 5 * r) for r, (have, want) in enumerate(zip(done, lengths, strict=True))]
        plan.append(step)
        done = [have + new for have, new in zip(done, step, strict=True)]
    return plan


def run(cache: PagedCache, layers: list[SparseAttention], inputs: list[Tensor], plan: list[list[int]]) -> Any:
    """Outputs of each request and, layer by layer, its selections."""
    outs: list[list[Tensor]] = [[] for _ in inputs]
    chosen: list[list[list[Tensor]]] = [[[] for _ in inputs] for _ in layers]
    for counts in plan:
        begins = cache.lengths
        cache.extend(counts)
        pieces = [text[begin : begin + count] for text, begin, count in zip(inputs, begins, counts, strict=True)]
        hidden = torch.cat(pieces)
        for number, layer in enumerate(layers):
            out, indices = layer(hidden, cache=cache, return_indices=True)
            hidden = hidden + out
            for request, part in enumerate(indices.split(counts, 1)):
                chosen[number][request].append(part)
        for request, part in enumerate(hidden.split(counts)):
            outs[request].append(part)
    return [torch.cat(parts) for parts in outs], [[torch.cat(parts, 1) for parts in layer] for layer in chosen]


@torch.no_grad()
def teacher_forced(layers: list[SparseAttention], inputs: list[Tensor]) -> Any:
    outs, chosen = [], [[] for _ in layers]  # type: ignore[var-annotated]
    for text in inputs:
        hidden = text
        for number, layer in enumerate(layers):
            out, indices = layer(hidden, return_indices=True)
            hidden = hidden + out
            chosen[number].append(indices)
        outs.append(hidden)
    return outs, chosen


def make_layers(**settings: Any) -> list[SparseAttention]:
    return [make_layer(seed, **settings).eval() for seed in (0, 1)]


@pytest.mark.parametrize(
    "settings", [{}, {"topk": 5, "local_blocks": 2, "init_blocks": 1, "index_key_heads": 2}], ids=["m3", "other"]
)
@torch.no_grad()
def test_cached_steps_equal_the_teacher_forced_forward(settings: dict[str, Any]) -> None:
    layers, inputs = make_layers(**settings), texts()
    cache = PagedCache(nn.ModuleList(layers), requests=3, pages=20)
    outs, chosen = run(cache, layers, inputs, steps_of(LENGTHS))
    expected, their_choice = teacher_forced(layers, inputs)
    assert cache.lengths == list(LENGTHS)
    for out, other in zip(outs, expected, strict=True):
        assert relative_error(out, other) < 5e-6
    for ours, theirs in zip(chosen, their_choice, strict=True):
        for found, indices in zip(ours, theirs, strict=True):
            assert torch.equal(found, indices)
    late = chosen[0][0][:, 5 * BLOCK :]
    assert len(late.sort(-1).values.flatten(0, 1).unique(dim=0)) > 20, "selections must differ for this test to see one"


@torch.no_grad()
def test_warmup_decodes_densely() -> None:
    layers, inputs = make_layers(warmup=True), texts()
    cache = PagedCache(layers, requests=3, pages=20)
    outs, _ = zip(*[run(cache, layers, inputs, [[n - 1 for n in LENGTHS], [1, 1, 1]])], strict=True)
    for out, text in zip(outs[0], inputs, strict=True):
        hidden = text
        for layer in layers:
            hidden = hidden + layer(hidden)
        assert relative_error(out, hidden) < 5e-6


@torch.no_grad()
def test_float8_pages() -> None:
    """Keys, values and index keys as the pages hold them: a layer without a cache that rounds as they do agrees."""
    layers, inputs = [make_layer(0).eval()], texts()
    scales = {"k_scale": 0.25, "v_scale": torch.tensor(0.125)}
    cache = PagedCache(layers, requests=3, pages=20, dtype=torch.float8_e4m3fn, **scales)
    outs, chosen = run(cache, layers, inputs, steps_of(LENGTHS))
    expected, their_choice = teacher_forced(layers, inputs)
    for out, other, found, indices in zip(outs, expected, chosen[0], their_choice[0], strict=True):
        assert torch.equal(found, indices), "index keys are float32 here"
        assert 1e-4 < relative_error(out, other) < 5e-2
    pool, tokens = cache.pool(layers[0]), inputs[1]
    stored = pool.v[cache.block_table[1, :3].long()].float().flatten(0, 1) * 0.125
    value = layers[0].v_proj(tokens).unflatten(-1, (2, 16))
    assert torch.equal(stored, (value / 0.125).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.125)


@torch.no_grad()
def test_float8_index_keys() -> None:
    layers, inputs = [make_layer(0).eval()], texts()
    cache = PagedCache(layers, requests=3, pages=20, index_dtype=torch.float8_e4m3fn)
    outs, chosen = run(cache, layers, inputs, steps_of(LENGTHS))
    agree = total = 0
    for text, out, found in zip(inputs, outs, chosen[0], strict=True):
        indices = layers[0](text, return_indices=True)[1]
        agree += int((found == indices).all(-1).sum())
        total += found[..., 0].numel()
        assert relative_error(out, text + layers[0](text, indices=found)) < 5e-6, "attention to the blocks it chose"
    assert 0.6 * total < agree < total


@torch.no_grad()
def test_external_indices() -> None:
    layers, inputs = make_layers(), texts()
    first, second = layers
    cache = PagedCache(layers, requests=3, pages=20)
    plain = PagedCache([second], requests=3, pages=20)
    for begin, counts in ((0, [40, 40, 40]), (40, [50, 50, 50]), (90, [5, 5, 5])):
        hidden = torch.cat([text[begin : begin + counts[0]] for text in inputs])
        cache.extend(counts)
        plain.extend(counts)
        _, indices = first(hidden, cache=cache, return_indices=True)
        out = second(hidden, cache=cache, indices=indices)
        assert torch.equal(second(hidden, cache=plain, indices=indices), out)
    rows = inputs[0][:95]
    expected = second(rows, indices=first(rows, return_indices=True)[1])
    assert relative_error(out[:5], expected[90:]) < 5e-6
    # Index keys were kept meanwhile, so the layer may choose for itself from here on.
    cache.extend([1, 0, 0])
    out = second(inputs[0][95:96], cache=cache)
    assert relative_error(out, second(inputs[0][:96])[95:]) < 5e-6


@torch.no_grad()
def test_rejected_drafts_and_new_requests() -> None:
    layers, inputs = make_layers(), texts()
    cache = PagedCache(layers, requests=2, pages=12)
    run(cache, layers, inputs[:2], [[130, 90]])
    drafts = [torch.randn(8, 48), torch.randn(8, 48)]
    cache.extend([8, 8])
    hidden = torch.cat(drafts)
    for layer in layers:
        hidden = hidden + layer(hidden, cache=cache)
    cache.truncate(0, 130)
    cache.release(1)
    assert cache.lengths == [130, 0]
    assert cache.free_pages == 12 - 5
    third = inputs[2]
    outs, _ = run(cache, layers, [inputs[0], third], [[0, 100], [16, 16], [1, 1]])
    expected, _ = teacher_forced(layers, [inputs[0], third])
    assert relative_error(outs[0], expected[0][130:147]) < 5e-6
    assert relative_error(outs[1], expected[1][:117]) < 5e-6


@torch.no_grad()
def test_a_batch_of_equal_steps() -> None:
    layer = make_layer().eval()
    hidden = torch.stack([text[:96] for text in texts()])
    cache = PagedCache(layer, requests=3, pages=9)
    outs = []
    for begin, end in ((0, 90), (90, 95), (95, 96)):
        cache.extend([end - begin] * 3)
        outs.append(layer(hidden[:, begin:end], cache=cache))
    assert relative_error(torch.cat(outs, 1), layer(hidden)) < 5e-6
    assert cache.free_pages == 0


@torch.no_grad()
def test_16_bit_layers_and_autocast() -> None:
    inputs = texts()[:1]
    small = [make_layer().eval().bfloat16()]
    text = inputs[0].bfloat16()
    cache = PagedCache(small, requests=1, pages=10)
    outs, chosen = run(cache, small, [text], [[200], [7], [1]])
    assert outs[0].dtype == torch.bfloat16
    assert relative_error(outs[0], text[:208] + small[0](text[:208], indices=chosen[0][0])) < 1.6e-2
    layer = make_layer().eval()
    cache = PagedCache(layer, requests=1, pages=10, dtype=torch.bfloat16, index_dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outs, chosen = run(cache, [layer], inputs, [[200], [7], [1]])
        assert relative_error(outs[0], inputs[0][:208] + layer(inputs[0][:208], indices=chosen[0][0])) < 1.6e-2


@torch.no_grad()
def test_a_step_without_tokens() -> None:
    layer = make_layer().eval()
    cache = PagedCache(layer, requests=2, pages=4)
    for _ in range(2):
        cache.extend([0, 0])
        assert layer(torch.zeros(0, 48), cache=cache).shape == (0, 48)
        assert layer(torch.zeros(2, 0, 48), cache=cache).shape == (2, 0, 48)
        run(cache, [layer], texts()[:2], [[3, 0]])
    empty = PagedCache(layer, requests=0, pages=0)
    empty.extend([])
    assert layer(torch.zeros(0, 48), cache=empty).shape == (0, 48)


def test_inference_mode_may_come_and_go() -> None:
    """A cache made and filled in inference mode is gone on with outside of it, and the other way round."""
    layer, text = make_layer().eval(), texts()[0][:90]
    outs = []
    with torch.inference_mode():
        cache = PagedCache(layer, requests=1, pages=3)
    for mode, (begin, end) in zip((True, False, True, False), ((0, 70), (70, 73), (73, 80), (80, 90)), strict=True):
        with torch.inference_mode(mode), torch.no_grad():
            cache.extend([end - begin])
            outs.append(layer(text[begin:end], cache=cache).clone())
            if end == 80:
                cache.extend([3])
                cache.truncate(0, 80)
    assert relative_error(torch.cat(outs), layer(text).detach()) < 5e-6


@torch.no_grad()
def test_compiled_step() -> None:
    torch._dynamo.reset()
    layer, text = make_layer().eval(), texts()[0]
    cache = PagedCache(layer, requests=1, pages=10)
    step = torch.compile(lambda hidden: layer(hidden, cache=cache), fullgraph=True, backend="aot_eager")
    outs = []
    for begin, end in ((0, 150), (150, 151), (151, 152)):
        cache.extend([end - begin])
        outs.append(step(text[begin:end]))
    assert relative_error(torch.cat(outs), layer(text[:152])) < 5e-6


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_pages_run_out() -> None:
    cache = PagedCache(make_layer(), requests=2, pages=4)
    cache.extend([BLOCK, 2 * BLOCK])
    tables = cache.block_table.clone(), cache.seq_lens.clone(), cache.cu_seqlens_q.clone()
    with pytest.raises(openmsa.OutOfMemoryError, match=r"pages: 2 more are needed .* 1 of 4 are free"):
        cache.extend([1, 1])
    assert cache.lengths == [BLOCK, 2 * BLOCK]
    assert cache.free_pages == 1
    for before, after in zip(tables, (cache.block_table, cache.seq_lens, cache.cu_seqlens_q), strict=True):
        assert torch.equal(before, after)
    cache.extend([BLOCK, 0])
    assert cache.free_pages == 0
    cache.release(1)
    cache.extend([BLOCK + 1, 0])
    assert sorted(cache.block_table[0].tolist()) == [0, 1, 2, 3], "every page is some request's, once"


def test_a_request_runs_full() -> None:
    cache = PagedCache(make_layer(), requests=2, pages=40, max_tokens=100)
    cache.extend([100, 10])
    with pytest.raises(
        openmsa.InvalidArgumentError, match="counts: got 91 for request 1, which holds 10, expected at most 90"
    ):
        cache.extend([0, 91])
    assert cache.block_table.shape == (2, 4)


@pytest.mark.parametrize("counts", [[1], [1, 2, 3], 3, None, [1, -1], [1, 1.5], [1, None], [2**63, 0], "11"])
def test_wrong_counts_are_named(counts: Any) -> None:
    cache = PagedCache(make_layer(), requests=2, pages=4)
    with pytest.raises(openmsa.InvalidArgumentError, match=r"PagedCache.extend: counts: got .*, expected"):
        cache.extend(counts)
    assert cache.lengths == [0, 0]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("request", (2, 0)), ("request", (-1, 0)), ("request", ("0", 0)), ("length", (0, 5)), ("length", (0, -1))],
)
def test_wrong_truncations_are_named(name: str, arguments: tuple[Any, Any]) -> None:
    cache = PagedCache(make_layer(), requests=2, pages=4)
    cache.extend([4, 4])
    with pytest.raises(openmsa.InvalidArgumentError, match=rf"PagedCache.truncate: {name}: got .*, expected"):
        cache.truncate(*arguments)
    assert cache.lengths == [4, 4]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("layers", {"layers": []}),
        ("layers", {"layers": nn.Linear(1, 1)}),
        ("layers", {"layers": None}),
        ("layers", {"layers": "block"}),
        ("layers", {"layers": [make_layer()] * 2}),
        ("dtype", {"dtype": torch.int8}),
        ("dtype", {"dtype": "float32"}),
        ("dtype", {"dtype": torch.float8_e5m2}),
        ("index_dtype", {"index_dtype": torch.float64}),
        ("requests", {"requests": -1}),
        ("requests", {"requests": 1.0}),
        ("pages", {"pages": -1}),
        ("pages", {"pages": 2**31}),
        ("max_tokens", {"max_tokens": -5}),
        ("k_scale", {"k_scale": 0.5}),
        ("v_scale", {"dtype": torch.float8_e4m3fn, "v_scale": [0.5, 0.5]}),
    ],
)
def test_wrong_caches_are_named(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(openmsa.InvalidArgumentError, match=f"PagedCache: {name}: got .*, expected"):
        PagedCache(**{"layers": make_layer(), "requests": 1, "pages": 1, **settings})
    with pytest.raises(openmsa.InvalidArgumentError, match="layers: got block sizes 32 and 64"):
        PagedCache([make_layer(), make_layer(block_size=64)], requests=1, pages=1)


@torch.no_grad()
def test_a_cache_is_of_its_layers() -> None:
    layer = make_layer().eval()
    cache = PagedCache(layer, requests=1, pages=4)
    cache.extend([10])
    hidden = torch.zeros(10, 48)
    for other in (copy.deepcopy(layer), make_layer(num_kv_heads=4), make_layer(head_dim=32), make_layer(block_size=64)):
        with pytest.raises(
            openmsa.InvalidArgumentError, match="cache: got a PagedCache that was not made for this layer"
        ):
            other(hidden, cache=cache)
    layer(hidden, cache=cache)


@torch.no_grad()
def test_wrong_cached_calls_are_named() -> None:
    layer = make_layer().eval()
    cache = PagedCache(layer, requests=2, pages=4)
    cache.extend([3, 2])
    for hidden in (torch.zeros(4, 48), torch.zeros(6, 48), torch.zeros(1, 5, 48), torch.zeros(2, 3, 48)):
        with pytest.raises(openmsa.InvalidArgumentError, match=r"hidden: got .*, expected the 5 tokens"):
            layer(hidden, cache=cache)
    offsets = torch.tensor([0, 3, 5], dtype=torch.int32)
    hidden = torch.zeros(5, 48)
    for name, value in (("cu_seqlens", offsets), ("lengths", offsets), ("return_kl", True)):
        with pytest.raises(openmsa.InvalidArgumentError, match=f"SparseAttention: {name}: got .*, expected"):
            layer(hidden, cache=cache, **{name: value})
    with pytest.raises(openmsa.InvalidArgumentError, match="indices: got"):
        layer(hidden, cache=cache, indices=torch.zeros(3, 5, 1, dtype=torch.int32))
    elsewhere = PagedCache(layer, requests=2, pages=4, device="meta")
    elsewhere.extend([3, 2])
    with pytest.raises(openmsa.InvalidArgumentError, match="cache: got a PagedCache on meta, expected one on cpu"):
        layer(hidden, cache=elsewhere)
    other = PagedCache(layer, requests=1, pages=1, dtype=torch.bfloat16)
    other.extend([5])
    with pytest.raises(openmsa.Error, match="k_cache: got"):
        layer(hidden, cache=other)


def test_gradients_do_not_pass_through_pages() -> None:
    layer = make_layer()
    cache = PagedCache(layer, requests=1, pages=4)
    cache.extend([5])
    with pytest.raises(openmsa.UnsupportedError, match=r"cache: got a PagedCache while gradients are recorded"):
        layer(torch.zeros(5, 48), cache=cache)
    with torch.inference_mode():
        layer(torch.zeros(5, 48), cache=cache)
