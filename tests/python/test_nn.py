"""openmsa.nn.SparseAttention against transformers' own MiniMax-M3 attention, its layouts, and what it refuses."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import openmsa
import pytest
import torch
from m3 import BLOCK, TOPK, make_layer, make_m3
from openmsa.nn import SparseAttention
from problems import relative_error
from torch import Tensor

PARAMETERS = {
    f"{name}.weight"
    for name in (
        "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "index_q_proj", "index_k_proj", "index_q_norm",
        "index_k_norm",
    )
}  # fmt: skip


def hidden_states(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("local_blocks", [1, 2])
@pytest.mark.parametrize("index_heads", [2, 4])
def test_equals_transformers(index_heads: int, local_blocks: int) -> None:
    m3 = make_m3(index_n_heads=index_heads, index_local_blocks=local_blocks)
    layer = make_layer(index_heads=index_heads, local_blocks=local_blocks).eval()
    layer.load_m3_layer(m3.attention.state_dict(), "")
    hidden = hidden_states(2, 9 * BLOCK + 5, 48)
    with torch.no_grad():
        expected, indices = m3(hidden)[0], m3.indices(hidden)
        out, chosen = layer(hidden, return_indices=True)
    late = chosen.unflatten(1, (2, -1)).transpose(0, 1)[:, :, TOPK * BLOCK :]
    assert torch.equal(late.sort(-1).values, indices[:, :, TOPK * BLOCK :].int().sort(-1).values)
    assert len(late.unique()) > TOPK + 1, "selections must differ for this test to see one"
    assert relative_error(out, expected) < 5e-6


def test_gradients_equal_transformers() -> None:
    """Those of the main branch from the output, those of the index branch from a KL written down here."""
    m3 = make_m3()
    layer = make_layer(kl_weight=0.7)
    layer.load_m3_layer(m3.attention.state_dict(), "")
    ours, theirs = hidden_states(1, 7 * BLOCK + 3, 48), hidden_states(1, 7 * BLOCK + 3, 48)
    ours.requires_grad_()
    theirs.requires_grad_()
    d_out = hidden_states(*ours.shape, seed=2)
    (layer(ours) * d_out).sum().backward()
    expected, kl = m3(theirs)
    ((expected * d_out).sum() + 0.7 * kl).backward()
    assert abs(layer.kl.item() - kl.item()) < 2e-4 * kl.item()
    assert relative_error(ours.grad, theirs.grad) < 1e-5
    for name, parameter in m3.attention.named_parameters():
        gradient = layer.get_parameter(name.replace("indexer.", "index_")).grad
        assert gradient is not None
        assert relative_error(gradient, parameter.grad) < 2e-5, name


def test_state_dict_has_the_parameters_and_nothing_else() -> None:
    layer = make_layer()
    assert {name for name, _ in layer.named_parameters()} == PARAMETERS
    assert set(layer.state_dict()) == PARAMETERS
    other = make_layer(seed=5)
    other.load_state_dict(layer.state_dict())
    hidden = hidden_states(100, 48)
    assert torch.equal(other(hidden), layer(hidden))


def test_defaults_are_those_of_m3() -> None:
    layer = SparseAttention(6144, 64, 4, 128, 4, 128, 64, device="meta", dtype=torch.bfloat16)
    assert (layer.topk, layer.block_size, layer.init_blocks, layer.local_blocks) == (16, 128, 0, 1)
    assert (layer.rope_theta, layer.norm_eps, layer.index_key_heads) == (5e6, 1e-6, 1)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes["q_proj.weight"] == (8192, 6144)
    assert shapes["k_proj.weight"] == shapes["v_proj.weight"] == shapes["index_q_proj.weight"] == (512, 6144)
    assert shapes["index_k_proj.weight"] == (128, 6144)
    assert shapes["o_proj.weight"] == (6144, 8192)
    assert not any(parameter.any() for parameter in SparseAttention(8, 1, 1, 8, 1, 8, 4).q_norm.parameters())


# ---- layouts ---------------------------------------------------------------------------------------------------------

LENGTHS = (150, 0, 1, 230, 97)


def gradients(layer: SparseAttention) -> dict[str, Tensor]:
    return {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


def separately(
    layer: SparseAttention, rows: list[Tensor], tokens: int
) -> tuple[list[Tensor], dict[str, Tensor], float]:
    """Outputs, gradients and KL of sequences run one by one, with the KL's mean over `tokens` tokens."""
    layer, outs, total = copy.deepcopy(layer), [], 0.0
    for row in rows:
        out, kl = layer(row, return_kl=True)
        share = len(row) / tokens
        (out.sin().sum() + share * kl).backward()
        outs.append(out)
        total += share * kl.item()
    return outs, gradients(layer), total


def test_packed_sequences_are_those_apart() -> None:
    layer = make_layer()
    hidden = hidden_states(sum(LENGTHS), 48)
    outs, expected, kl = separately(layer, list(hidden.split(LENGTHS)), sum(LENGTHS))
    offsets = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    out = layer(hidden, cu_seqlens=offsets)
    out.sin().sum().backward()
    assert relative_error(out, torch.cat(outs)) < 1e-6
    assert layer.kl.item() == pytest.approx(kl, rel=1e-4)
    for name, gradient in gradients(layer).items():
        assert relative_error(gradient, expected[name]) < 1e-5, name


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_padding_at_the_right_has_no_influence(dtype: torch.dtype) -> None:
    layer = make_layer()
    hidden = hidden_states(len(LENGTHS), 240, 48)
    outs, expected, kl = separately(layer, [row[:n] for row, n in zip(hidden, LENGTHS, strict=True)], 5 * 240)
    for row, length in zip(hidden, LENGTHS, strict=True):
        row[length:] = 1e4
    out, indices = layer(hidden, lengths=torch.tensor(LENGTHS, dtype=dtype), return_indices=True)
    out.sin().sum().backward()
    for row, chosen, length, alone in zip(out, indices.unflatten(1, (5, 240)).unbind(1), LENGTHS, outs, strict=True):
        assert relative_error(row[:length], alone) < 1e-6
        assert not row[length:].any()
        assert (chosen[:, length:] == -1).all()
    assert layer.kl.item() == pytest.approx(kl, rel=1e-4)
    for name, gradient in gradients(layer).items():
        assert relative_error(gradient, expected[name]) < 1e-5, name


def test_a_batch_is_its_rows() -> None:
    layer = make_layer().eval()
    hidden = hidden_states(3, 140, 48)
    assert relative_error(layer(hidden), torch.stack([layer(row) for row in hidden])) < 1e-6
    strided = hidden.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(layer(strided), layer(hidden))


def test_positions() -> None:
    layer = make_layer().eval()
    hidden = hidden_states(2, 140, 48)
    expected = layer(hidden)
    places = torch.arange(140)
    assert torch.equal(layer(hidden, positions=places), expected)
    assert torch.equal(layer(hidden, positions=places.int().expand(2, -1)), expected)
    assert torch.equal(layer(hidden, rotary=layer.rotary(places.repeat(2))), expected)
    # Rotary embedding sees differences only.
    assert relative_error(layer(hidden, positions=places + 1000), expected) < 1e-3
    assert relative_error(layer(hidden, positions=places * 3), expected) > 1e-2


def test_without_rotary() -> None:
    layer = make_layer(rotary_dim=0).eval()
    hidden = hidden_states(100, 48)
    assert torch.equal(layer(hidden, positions=torch.arange(100) * 7), layer(hidden))


@pytest.mark.parametrize("shape", [(0, 48), (0, 7, 48), (3, 0, 48), (0, 0, 48)])
def test_nothing_in_nothing_out(shape: tuple[int, ...]) -> None:
    layer = make_layer()
    out = layer(torch.zeros(shape))
    assert out.shape == shape
    out.sum().backward()
    assert layer.kl.item() == 0
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


# ---- external indices ------------------------------------------------------------------------------------------------


def test_layers_share_a_selection() -> None:
    first, second = make_layer(), make_layer(seed=3)
    hidden = hidden_states(2, 150, 48)
    _, indices = first(hidden, return_indices=True)
    out, given = second(hidden, indices=indices, return_indices=True)
    assert given is indices
    out.sum().backward()
    assert second.q_proj.weight.grad.any()
    assert second.index_q_proj.weight.grad is None
    assert second.index_k_norm.weight.grad is None
    second.load_state_dict({k: first.state_dict()[k] if "index" in k else v for k, v in second.state_dict().items()})
    assert relative_error(second(hidden), out) < 1e-6, "the same selection by an index branch of its own"
    assert relative_error(second(hidden, indices=indices.flip(-1).long()), out) < 1e-6
    assert relative_error(second(hidden, indices=torch.zeros_like(indices)), out) > 1e-2


@pytest.mark.parametrize(
    ("indices", "argument"),
    [
        (torch.zeros(4, 99, 2, dtype=torch.int32), "indices"),
        (torch.zeros(3, 100, 2, dtype=torch.int32), "indices"),
        (torch.zeros(4, 100, dtype=torch.int32), "indices"),
        (torch.zeros(4, 100, 2), "indices"),
        (torch.zeros(4, 100, 2, dtype=torch.int16), "indices"),
        ([[0]], "indices"),
    ],
)
def test_wrong_indices_are_named(indices: Any, argument: str) -> None:
    with pytest.raises(openmsa.InvalidArgumentError, match=f": {argument}: got"):
        make_layer()(hidden_states(100, 48), indices=indices)


# ---- types and devices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_layers(dtype: torch.dtype) -> None:
    layer = make_layer().eval()
    hidden = hidden_states(200, 48).to(dtype)
    small = copy.deepcopy(layer).to(dtype)
    expected, indices = copy.deepcopy(small).float()(hidden.float(), return_indices=True)
    out = small(hidden, indices=indices)
    assert out.dtype == dtype
    assert relative_error(out, expected) < (2e-3 if dtype == torch.float16 else 1.6e-2)


def test_autocast() -> None:
    layer = make_layer()
    hidden = hidden_states(200, 48).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(hidden)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert hidden.grad is not None
    assert layer.kl.item() > 0
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
    with torch.no_grad():
        assert relative_error(out, layer(hidden)) < 5e-2


def test_cast_and_moved_layers_keep_the_kl_in_float32() -> None:
    layer = make_layer(kl_weight=0.1).half().bfloat16()
    assert layer.kl.dtype == torch.float32
    hidden = hidden_states(100, 48).bfloat16()
    layer(hidden).sum().backward()
    assert layer.kl.item() > 0
    ratio = relative_error(layer.index_q_proj.weight.grad, torch.zeros_like(layer.index_q_proj.weight))
    assert ratio > 0


def test_a_layer_made_on_the_meta_device() -> None:
    source = make_layer(kl_weight=0.3)
    layer = make_layer(kl_weight=0.3, device="meta").to_empty(device="cpu")
    layer.load_state_dict(source.state_dict())
    hidden = hidden_states(150, 48)
    for module in (source, layer):
        module(hidden).sum().backward()
    assert layer.kl == source.kl
    for name, gradient in gradients(source).items():
        assert torch.equal(gradient, layer.get_parameter(name).grad), name


def test_weights_assigned_to_a_layer_of_the_meta_device() -> None:
    """Such a layer is never moved, so nothing has moved its KL."""
    layer = make_layer(kl_weight=0.5)
    with torch.device("meta"):
        assigned = make_layer(kl_weight=0.5)
    assigned.load_state_dict(layer.state_dict(), assign=True)
    hidden = hidden_states(100, 48)
    for model in (layer, assigned):
        model(hidden).sum().backward()
    assert assigned.kl.item() == layer.kl.item()
    assert torch.equal(assigned.index_q_proj.weight.grad, layer.index_q_proj.weight.grad)


def test_deepcopy_is_independent() -> None:
    layer = make_layer(kl_weight=0.5)
    other = copy.deepcopy(layer)
    other.kl_weight = 0.0
    hidden = hidden_states(100, 48)
    layer(hidden).sum().backward()
    assert torch.isnan(other.kl)
    assert layer.index_q_proj.weight.grad.any()
    other(hidden).sum().backward()
    assert not other.index_q_proj.weight.grad.any()


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("num_kv_heads", {"num_kv_heads": 3}),
        ("num_kv_heads", {"num_kv_heads": 0}),
        ("index_heads", {"index_heads": 6}),
        ("index_key_heads", {"index_key_heads": 3}),
        ("rotary_dim", {"rotary_dim": 7}),
        ("rotary_dim", {"rotary_dim": 18}),
        ("rotary_dim", {"rotary_dim": 10}),
        ("rotary_dim", {"rotary_dim": -2}),
        ("hidden_size", {"hidden_size": 0}),
        ("hidden_size", {"hidden_size": 48.0}),
        ("head_dim", {"head_dim": None}),
        ("topk", {"topk": 0}),
        ("block_size", {"block_size": 48}),
        ("init_blocks", {"init_blocks": -1}),
        ("local_blocks", {"local_blocks": "1"}),
        ("scale", {"scale": 0.0}),
        ("index_scale", {"index_scale": float("nan")}),
        ("kl_weight", {"kl_weight": -1.0}),
        ("kl_weight", {"kl_weight": None}),
        ("kl_weight", {"kl_weight": 1e300}),
        ("dtype", {"dtype": torch.int8}),
        ("dtype", {"dtype": "float32"}),
        ("rope_theta", {"rope_theta": float("inf")}),
        ("norm_eps", {"norm_eps": -1e-6}),
    ],
)
def test_wrong_settings_are_named(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(openmsa.InvalidArgumentError, match=f"SparseAttention: {name}: got .*, expected "):
        make_layer(**settings)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("hidden", {"hidden": torch.zeros(10, 47)}),
        ("hidden", {"hidden": torch.zeros(48)}),
        ("hidden", {"hidden": torch.zeros(1, 1, 10, 48)}),
        ("hidden", {"hidden": torch.zeros(10, 48, dtype=torch.int64)}),
        ("hidden", {"hidden": torch.zeros(10, 48, dtype=torch.float64)}),
        ("hidden", {"hidden": [[0.0] * 48]}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 10])}),
        ("cu_seqlens", {"cu_seqlens": [0, 10]}),
        ("cu_seqlens", {"cu_seqlens": torch.zeros(0, dtype=torch.int32)}),
        ("cu_seqlens", {"cu_seqlens": torch.zeros(2, 2, dtype=torch.int32)}),
        ("cu_seqlens_q", {"cu_seqlens": torch.tensor([0, 9], dtype=torch.int32)}),
        ("cu_seqlens_q", {"cu_seqlens": torch.tensor([0, -5, 10], dtype=torch.int32)}),
        ("cu_seqlens_q", {"cu_seqlens": torch.tensor([3, 10], dtype=torch.int32)}),
        ("cu_seqlens", {"hidden": torch.zeros(2, 5, 48), "cu_seqlens": torch.tensor([0, 10], dtype=torch.int32)}),
        ("lengths", {"lengths": torch.tensor([10])}),
        ("lengths", {"hidden": torch.zeros(2, 5, 48), "lengths": torch.tensor([5])}),
        ("lengths", {"hidden": torch.zeros(2, 5, 48), "lengths": torch.tensor([5, 6])}),
        ("lengths", {"hidden": torch.zeros(2, 5, 48), "lengths": torch.tensor([-1, 5])}),
        ("lengths", {"hidden": torch.zeros(2, 5, 48), "lengths": torch.tensor([5.0, 5.0])}),
        ("lengths", {"hidden": torch.zeros(2, 5, 48), "lengths": [5, 5]}),
        ("positions", {"positions": torch.arange(9)}),
        ("positions", {"positions": torch.arange(10.0)}),
        ("positions", {"hidden": torch.zeros(2, 5, 48), "positions": torch.arange(10)}),
        ("positions", {"positions": torch.arange(10), "rotary": (torch.zeros(10, 4), torch.zeros(10, 4))}),
        ("rotary", {"rotary": torch.zeros(10, 4)}),
        ("rotary", {"rotary": (torch.zeros(10, 4),)}),
        ("rotary", {"rotary": (torch.zeros(1, 4), torch.zeros(1, 4))}),
        ("rotary", {"rotary": (torch.zeros(10, 8), torch.zeros(10, 8))}),
        ("rotary", {"rotary": (torch.zeros(10, 4), None)}),
        ("rotary", {"rotary": (torch.zeros(10, 4), torch.zeros(10, 4, device="meta"))}),
        ("positions", {"positions": torch.arange(10, device="meta")}),
        ("cu_seqlens", {"cu_seqlens": torch.zeros(2, dtype=torch.int32, device="meta")}),
        ("return_kl", {"indices": torch.zeros(4, 10, 1, dtype=torch.int32), "return_kl": True}),
        ("cache", {"cache": {}}),
    ],
)
def test_wrong_arguments_are_named(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(openmsa.InvalidArgumentError, match=f": {name}: got .*, expected "):
        make_layer()(**{"hidden": torch.zeros(10, 48), **arguments})


@pytest.mark.parametrize("positions", [[0, 1], torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3), torch.tensor(0)])
def test_wrong_positions_of_rotary_are_named(positions: Any) -> None:
    with pytest.raises(openmsa.InvalidArgumentError, match=r": positions: got .*, expected .* \[T\]"):
        make_layer().rotary(positions)


def test_a_float64_layer_is_refused() -> None:
    with pytest.raises(openmsa.InvalidArgumentError, match="hidden: got"):
        make_layer().double()(hidden_states(10, 48).double())


def test_openmsa_does_not_import_it_and_says_what_it_needs() -> None:
    program = """
import sys
sys.modules["torch"] = None  # every import of it fails
import openmsa
assert "openmsa.nn" not in sys.modules
try:
    openmsa.nn
except ModuleNotFoundError as error:
    assert "PyTorch" in str(error), error
else:
    raise AssertionError("imported without torch")
assert not hasattr(openmsa, "no_such_part")
"""
    subprocess.run([sys.executable, "-c", program], check=True)
