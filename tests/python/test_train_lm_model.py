"""The example's model: ways of attending, its own functions, generation through pages, what it measures and saves."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import openmsa
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import train_lm_example as example
from lm import report
from lm.activations import save_activations
from lm.attention import Heads, attend, random_indices, window_indices
from lm.config import CONTROL, Attention
from lm.evaluate import IndexQuality, Masses, Quality, index_quality, quality
from lm.functions import norm, rotate, shift, squared_relu
from lm.generate import Continuation, PagedCache, extend, generate
from lm.model import ByteModel

TEXT = torch.randint(97, 123, (30000,), generator=torch.Generator().manual_seed(5)).to(torch.uint8)


@pytest.fixture(scope="module")
def model() -> ByteModel:
    return example.small_model()


def some_heads(batch: int = 2) -> Heads:
    generator = torch.Generator().manual_seed(6)
    tokens = batch * example.SMALL.context

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, 64, generator=generator)

    return Heads(draw(4), draw(2), draw(2), draw(2), draw(1), batch)


def test_shift_is_its_sum_and_has_its_gradients() -> None:
    generator = torch.Generator().manual_seed(1)
    padded = torch.randn(2, 9, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    taps = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    mixes = shift(padded, taps)
    for mix, tap in zip(mixes, taps, strict=True):
        expected = sum(tap[back] * padded[:, 3 - back : 9 - back] for back in range(4))
        torch.testing.assert_close(mix, expected)
    assert torch.autograd.gradcheck(shift, (padded, taps))


def test_norm_and_squared_relu_are_torchs_with_their_gradients() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    gain = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(norm(x, gain), F.rms_norm(x, (6,), gain, eps=1e-6))
    torch.testing.assert_close(squared_relu(x), F.relu(x).square())
    assert torch.autograd.gradcheck(norm, (x, gain))
    assert torch.autograd.gradcheck(squared_relu, (x,))


def test_rotation_goes_on_from_a_position() -> None:
    x = torch.randn(1, 10, 2, 64, generator=torch.Generator().manual_seed(2))
    whole = rotate(x, 8, 0)
    torch.testing.assert_close(rotate(x[:, 6:], 8, 6), whole[:, 6:])
    torch.testing.assert_close(whole.norm(dim=-1), x.norm(dim=-1))
    assert not torch.equal(whole[:, 1:, :, :8], x[:, 1:, :, :8])


def test_window_is_the_nearest_blocks() -> None:
    indices = window_indices(some_heads(), example.SMALL)
    for place in (0, 31, 32, 255, 256 + 255):
        own = place % 256 // 32
        assert indices[1, place].tolist() == [own, own - 1 if own else -1]


def test_random_blocks_have_the_own_one_and_no_later_one() -> None:
    indices = random_indices(some_heads(), example.SMALL, torch.Generator().manual_seed(0))
    own = (torch.arange(512) % 256 // 32)[:, None]
    assert bool((indices == own).any(dim=-1).all())
    assert bool((indices <= own).all())
    full = indices[:, 32:256]
    assert bool((full[..., 0] != full[..., 1]).all())
    assert len(full[0, 224 - 1 :].unique()) > 1


def test_dense_attention_is_that_of_the_warm_up() -> None:
    heads = some_heads()
    unused = torch.Generator()
    with torch.no_grad():
        dense, _ = attend(heads, Attention.DENSE, example.SMALL, torch.zeros(()), unused)
        warmup, _ = attend(heads, Attention.WARMUP, example.SMALL, torch.zeros(()), unused)
        sparse, _ = attend(heads, Attention.SPARSE, example.SMALL, torch.zeros(()), unused)
    torch.testing.assert_close(dense, warmup, rtol=1e-4, atol=1e-5)
    assert float((dense - sparse).abs().max()) > 0.01


def test_only_the_kl_trains_the_index_branch(model: ByteModel) -> None:
    tokens = TEXT[None, :256].long()
    logits, kl = model(tokens, Attention.SPARSE)
    logits.square().mean().backward(retain_graph=True)
    index = [parameter for name, parameter in model.named_parameters() if ".index_" in name]
    main = [parameter for name, parameter in model.named_parameters() if ".index_" not in name]
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in index)
    assert all(parameter.grad is not None for parameter in main)
    model.zero_grad()
    kl.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in index)
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in main)
    assert all(value > 0 for value in model.kls())
    model.zero_grad()


def test_generation_equals_one_pass(model: ByteModel) -> None:
    result = generate(model, TEXT)
    assert result.equal
    assert len(result.generated) == 64
    assert result.distance > example.SMALL.planting.gap


@torch.no_grad()
def test_pages_filled_in_any_pieces_equal_one_pass(model: ByteModel) -> None:
    tokens = TEXT[None, :200].long()
    expected, _ = model(tokens, Attention.SPARSE)
    cache = PagedCache(model, 200)
    parts = [extend(model, cache, part) for part in tokens.split([1, 30, 2, 100, 1, 66], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0, atol=1e-4)
    # Pages in another order are other keys.
    cache = PagedCache(model, 200)
    extend(model, cache, tokens[:, :199])
    cache.block_table = cache.block_table.flip(1)
    wrong = extend(model, cache, tokens[:, 199:])
    assert float((wrong[:, 0] - expected[:, -1]).abs().max()) > 1e-2


def test_recalled_counts_the_first_right_bytes() -> None:
    result = Continuation(10, b"", b"abcdX", b"abcdefg", 100, 0.0, True, "float32")
    assert result.recalled == 4
    assert dataclasses.replace(result, generated=b"abcdefgh").recalled == 7
    assert dataclasses.replace(result, generated=b"Xbc").recalled == 0


def test_measures(model: ByteModel) -> None:
    dense = quality(model, TEXT, Attention.DENSE, 2)
    assert dense.bits == pytest.approx(sum(dense.bits_by_position) / 8)
    assert dense.late_bits == pytest.approx(sum(dense.bits_by_position[4:]) / 4)
    same = quality(model, TEXT, Attention.DENSE, 2)
    assert same == dense
    window = quality(model, TEXT, Attention.WINDOW, 2)
    # The first queries see no more than the window anyway.
    assert window.bits_by_position[:2] == pytest.approx(dense.bits_by_position[:2], abs=1e-5)
    assert window.bits_by_position[4:] != pytest.approx(dense.bits_by_position[4:], abs=1e-5)


def test_index_measures(model: ByteModel) -> None:
    layers = index_quality(model, TEXT, 1, untrained=example.small_model(seed=3))
    assert len(layers) == example.SMALL.layers
    for trained, untrained in layers:
        for found in (trained, untrained):
            assert 0 < found.masses.captured <= found.masses.best <= 1
            assert found.kl > 0
        assert trained.masses.best == pytest.approx(untrained.masses.best)  # the same main branch
        assert trained.kl != untrained.kl
    # A student that knows nothing has the uniform student's KL.
    blind = example.small_model()
    with torch.no_grad():
        for name, parameter in blind.named_parameters():
            if "index_q_gain" in name:
                parameter.zero_()
    for found, _ in index_quality(blind, TEXT, 1, untrained=blind):
        assert found.ratio == pytest.approx(1, abs=1e-3)


def test_saved_activations_are_inputs_of_the_operations(model: ByteModel, tmp_path: Path) -> None:
    paths = save_activations(model, TEXT, 300, tmp_path / "new" / "folder")
    assert len(paths) == example.SMALL.layers
    for path in paths:
        tensors = safetensors.torch.load_file(path)
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        assert shapes == {
            "q": [300, 4, 64],
            "k": [300, 2, 64],
            "v": [300, 2, 64],
            "index_q": [300, 2, 64],
            "index_k": [300, 1, 64],
        }
        result = openmsa.msa_attention(*(tensors[name] for name in ("q", "k", "v", "index_q", "index_k")))
        assert bool(result.out.isfinite().all())


GOOD = report.Results(
    quality={
        CONTROL: Quality(1.7, 1.6, [1.7] * 8, 0.99),
        Attention.SPARSE.value: Quality(1.71, 1.62, [1.71] * 8, 0.97),
        Attention.WINDOW.value: Quality(1.8, 1.7, [1.8] * 8, 0.01),
        Attention.RANDOM.value: Quality(1.9, 1.8, [1.9] * 8, 0.1),
    },
    trained=[IndexQuality(Masses(0.8, 0.3, 0.9), 0.1, 0.6), IndexQuality(Masses(0.85, 0.3, 0.9), 0.1, 0.6)],
    untrained=[],
    continuation=Continuation(10, b"", b"a", b"a", 100, 1e-5, True, "float32"),
    rows=[],
    speeds={},
    evaluation_seconds=1.0,
    seconds=2.0,
)


def test_a_model_that_learned_passes() -> None:
    assert report.failures(GOOD, report.Bars()) == []


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (CONTROL, {"recall": 0.94}, "recall of the dense control"),
        ("sparse", {"recall": 0.95}, "sparse recall"),
        ("sparse", {"bits": 1.72}, "sparse bits per byte over"),
        ("sparse", {"bits": float("nan")}, "sparse bits per byte over"),
        ("sparse", {"late_bits": 1.64}, "late half"),
        ("window only", {"recall": 0.06}, "window-only recall"),
        ("window only", {"bits": 1.71}, "window-only bits"),
    ],
)
def test_a_missed_quality_is_named(name: str, changes: dict[str, float], said: str) -> None:
    worse = dataclasses.replace(GOOD.quality[name], **changes)  # type: ignore[arg-type]
    missed = report.failures(dataclasses.replace(GOOD, quality=GOOD.quality | {name: worse}), report.Bars())
    assert len(missed) == 1
    assert said in missed[0]


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (IndexQuality(Masses(0.6, 0.3, 0.9), 0.1, 0.6), ["layer 1: normalised captured mass"]),
        (IndexQuality(Masses(0.8, 0.3, 0.9), 0.2, 0.6), ["layer 1: KL", "all layers"]),
    ],
)
def test_a_missed_index_is_named(index: IndexQuality, said: list[str]) -> None:
    missed = report.failures(dataclasses.replace(GOOD, trained=[GOOD.trained[0], index]), report.Bars())
    assert len(missed) == len(said)
    assert all(part in line for part, line in zip(said, missed, strict=True))
    easier = dataclasses.replace(index, masses=Masses(0.61, 0.3, 0.9), kl=0.17)
    assert report.failures(dataclasses.replace(GOOD, trained=[GOOD.trained[0], easier]), report.SHORT_BARS) == []


@pytest.mark.parametrize(
    ("changes", "equal"),
    [
        ({}, True),
        ({"max_difference": 0.01}, False),
        ({"same_bytes": False}, False),
        ({"same_bytes": False, "max_difference": 0.1, "head_type": "bfloat16"}, True),
        ({"max_difference": float("nan")}, False),
    ],
)
def test_paged_generation_that_differs_is_named(changes: dict[str, Any], equal: bool) -> None:
    continuation = dataclasses.replace(GOOD.continuation, **changes)
    missed = report.failures(dataclasses.replace(GOOD, continuation=continuation), report.Bars())
    assert len(missed) == (not equal)


def test_bars_fit_the_scale() -> None:
    assert report.bars(1.0) == report.bars(2.0) == report.Bars()
    assert report.bars(0.5) == report.SHORT_BARS
    assert report.bars(0.4) is None
