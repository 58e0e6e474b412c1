"""MiniMax-M3 of transformers on openmsa equals its eager model: forward, gradients, caches, generation, padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers.models.minimax_m3_vl", reason="needs a transformers with minimax_m3_vl")

from m3_models import SETTINGS, gradients, make_config, make_models, padded, sparse_layers, tokens
from openmsa.integrations import transformers as integration
from problems import relative_error
from transformers import AttentionInterface, DynamicCache
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m3

LENGTH = 300


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


@pytest.fixture(scope="module", params=SETTINGS)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return make_models(**SETTINGS[request.param])


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return make_models()


def assert_same_gradients(model: Any, eager: Any) -> None:
    expected = gradients(eager)
    for name, gradient in gradients(model).items():
        reference = expected[name]
        assert (gradient is None) == (reference is None), name
        if gradient is not None and reference is not None:
            assert relative_error(gradient, reference) < 2e-5, name


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["", "checkpoints", "reentrant checkpoints"])
def test_forward_and_gradients(models: tuple[Any, Any], checkpointing: bool | None) -> None:
    eager, model = models
    ids = tokens(2, LENGTH)
    for each in models:
        each.zero_grad()
        each.train()
        if checkpointing is not None and each is model:
            each.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    try:
        result, expected = model(ids, labels=ids), eager(ids, labels=ids)
        assert relative_error(result.logits, expected.logits) < 5e-6
        assert result.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
        result.loss.backward()
        expected.loss.backward()
        assert_same_gradients(model, eager)
    finally:
        model.gradient_checkpointing_disable()
        eager.eval()
        model.eval()


def test_the_selection_matters(pair: tuple[Any, Any]) -> None:
    _, model = pair
    _, dense = make_models(index_topk_blocks=LENGTH)
    ids = tokens(1, LENGTH)
    with torch.no_grad():
        assert relative_error(model(ids).logits, dense(ids).logits) > 0.05


def test_right_padding(models: tuple[Any, Any]) -> None:
    eager, model = models
    ids, mask = padded("right")
    labels = ids.masked_fill(mask == 0, -100)
    for each in models:
        each.zero_grad()
    result = model(ids, attention_mask=mask, labels=labels)
    expected = eager(ids, attention_mask=mask, labels=labels)
    real = mask.bool()
    assert relative_error(result.logits[real], expected.logits[real]) < 5e-6
    assert result.logits.isfinite().all()
    result.loss.backward()
    expected.loss.backward()
    assert_same_gradients(model, eager)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_gives_what_it_gives_alone(pair: tuple[Any, Any], side: str) -> None:
    """On the left too, where transformers' own blocks shift with the padding."""
    eager, model = pair
    ids, mask = padded(side)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        for row, real in enumerate(mask.bool()):
            alone = eager(ids[row, real][None]).logits[0]
            assert relative_error(logits[row, real], alone) < 5e-6


def test_a_row_of_padding_only(pair: tuple[Any, Any]) -> None:
    _, model = pair
    ids, mask = padded("right", (LENGTH, 0))
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        assert logits.isfinite().all()
        assert relative_error(logits[:1], model(ids[:1]).logits) < 5e-6


def test_documents_of_position_ids_are_apart(pair: tuple[Any, Any]) -> None:
    eager, model = pair
    ids, lengths = tokens(1, LENGTH), (120, 33, 147)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        logits = model(ids, position_ids=positions, use_cache=False).logits
        alone = [eager(part).logits for part in ids.split(lengths, 1)]
    assert relative_error(logits, torch.cat(alone, 1)) < 5e-6


@pytest.mark.parametrize("chunks", [(200, 1, 1, 1, 1), (90, 57, 100, 1), (1, 199, 5)], ids=str)
def test_cached_decode(models: tuple[Any, Any], chunks: tuple[int, ...]) -> None:
    eager, _ = models
    ids = tokens(2, sum(chunks))
    caches = [DynamicCache(config=each.config) for each in models]
    with torch.no_grad():
        whole = eager(ids).logits
        first = 0
        for chunk in ids.split(chunks, 1):
            expected, logits = (
                each(chunk, past_key_values=cache).logits for each, cache in zip(models, caches, strict=True)
            )
            assert relative_error(logits, expected) < 5e-6
            assert relative_error(logits, whole[:, first : first + chunk.shape[1]]) < 1e-5
            first += chunk.shape[1]
    for own, other in zip(*(cache.layers for cache in caches), strict=True):
        if hasattr(own, "idx_keys"):
            assert relative_error(other.idx_keys, own.idx_keys) < 1e-5


def test_token_by_token_after_right_padding(pair: tuple[Any, Any]) -> None:
    """A padded batch that goes on: each row as the row alone, given positions that leave the padding out."""
    eager, model = pair
    lengths = (150, 97)
    ids, mask = padded("right", lengths)
    more = tokens(2, 5, seed=1)
    cache = DynamicCache(config=model.config)
    alone = [torch.cat([ids[row, :length], more[row]])[None] for row, length in enumerate(lengths)]
    with torch.no_grad():
        expected = [eager(row).logits[0, -5:] for row in alone]
        model(ids, attention_mask=mask, past_key_values=cache)
        for step in range(5):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            positions = mask.sum(1, keepdim=True) - 1
            logits = model(
                more[:, step : step + 1], attention_mask=mask, position_ids=positions, past_key_values=cache
            ).logits
            for row in range(2):
                assert relative_error(logits[row, 0], expected[row][step]) < 1e-5


@pytest.mark.parametrize("beams", [1, 2])
def test_generate(pair: tuple[Any, Any], beams: int) -> None:
    eager, model = pair
    ids = tokens(2, 200)
    result, expected = (
        each.generate(ids, max_new_tokens=12, num_beams=beams, do_sample=False) for each in (model, eager)
    )
    assert torch.equal(result, expected)


def test_generate_with_left_padding_equals_each_row_alone(pair: tuple[Any, Any]) -> None:
    eager, model = pair
    ids, mask = padded("left", (200, 131))
    result = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    for row, real in enumerate(mask.bool()):
        alone = eager.generate(ids[row, real][None], max_new_tokens=12, do_sample=False)
        assert torch.equal(result[row, -12:], alone[0, -12:])


@pytest.mark.parametrize("name", SETTINGS)
def test_block_indices_are_those_of_the_model_s_indexer(name: str) -> None:
    eager, model = make_models(**SETTINGS[name])
    attention, reference = sparse_layers(model)[0], sparse_layers(eager)[0]
    hidden = torch.randn(2, LENGTH, 48, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(LENGTH)[None].expand(2, -1)
    embeddings = model.model.rotary_emb(hidden, position_ids=positions)
    with torch.no_grad():
        branch = attention.indexer(hidden, embeddings, None, positions)
        expected = reference.indexer(hidden, embeddings, None, positions)
        assert branch.block_indices().dtype == expected.dtype
        local = reference.indexer.local_blocks  # transformers leaves the order among them open
        assert torch.equal(branch.block_indices()[..., local:], expected[..., local:])
        assert torch.equal(branch.block_indices().sort().values, expected.sort().values)
        mask = torch.ones(2, LENGTH)
        mask[1, 200:] = 0
        of_padded = branch.block_indices(mask)
        assert torch.equal(of_padded[0], branch.block_indices()[0])
        assert torch.equal(of_padded[1, :, :200], branch.block_indices()[1, :, :200])
        assert (of_padded[1, :, 200:] == -1).all()


@pytest.mark.parametrize("right_padding", [False, True])
def test_attention_function_takes_block_indices(pair: tuple[Any, Any], right_padding: bool) -> None:
    """M3's own indices, as other indexers hand them on, beside the eager function with the mask made of them."""
    _, model = pair
    attention = sparse_layers(model)[0]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, LENGTH, 16, generator=generator) for heads in (4, 2, 2))
    positions = torch.arange(LENGTH)[None].expand(2, -1)
    own = positions // 32
    earlier = (torch.rand(2, 2, LENGTH, 2, generator=generator) * own[:, None, :, None]).long()
    earlier[..., 1] = torch.where(earlier[..., 1] == earlier[..., 0], -1, earlier[..., 1])
    indices = torch.cat([own[:, None, :, None].expand(-1, 2, -1, -1), earlier], -1)
    indices[..., 1] = torch.where(indices[..., 1] == indices[..., 0], -1, indices[..., 1])
    indices[..., 2] = torch.where(indices[..., 2] == indices[..., 0], -1, indices[..., 2])
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    if right_padding:
        mask[1, 210:] = False
    dense = attention.indexer.build_block_mask(
        indices, mask[:, None, None] & torch.ones(LENGTH, LENGTH).tril().bool(), LENGTH, torch.float32, "cpu", positions
    )
    expected, _ = m3.eager_attention_forward(attention, query, key, value, dense, 0.3)
    function = AttentionInterface()["openmsa"]
    out, weights = function(
        attention, query, key, value, mask if right_padding else None, scaling=0.3, block_indices=indices
    )
    assert weights is None
    assert out.shape == (2, LENGTH, 4, 16)
    assert relative_error(out[mask], expected[mask]) < 5e-6


def test_16_bit_model_and_autocast(pair: tuple[Any, Any]) -> None:
    eager, model = pair
    ids = tokens(1, LENGTH)
    _, low = make_models()
    low.to(torch.bfloat16)
    with torch.no_grad():
        expected = eager(ids).logits
        assert relative_error(low(ids).logits, expected) < 0.15
        with torch.autocast("cpu", torch.bfloat16):
            assert relative_error(model(ids).logits, expected) < 0.15


def test_image_and_text_model() -> None:
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLConfig

    config = MiniMaxM3VLConfig(
        text_config=make_config().to_dict(), image_token_index=95, video_token_index=96, projector_hidden_size=32,
        vision_config={"hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 28, "patch_size": 4},
    )  # fmt: skip
    torch.manual_seed(0)
    eager = m3.MiniMaxM3SparseForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    model = m3.MiniMaxM3SparseForConditionalGeneration._from_config(config, attn_implementation="openmsa").eval()
    model.load_state_dict(eager.state_dict())
    grid = torch.tensor([[1, 8, 8]])
    pixels = torch.randn(64, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
    ids = tokens(1, LENGTH) % 90 + 1
    ids[:, 20:36] = 95
    with torch.no_grad():
        results = [each(ids, pixel_values=pixels, image_grid_thw=grid).logits for each in (model, eager)]
    assert relative_error(*results) < 5e-6
