"""load_m3_layer: keys of published checkpoints and of transformers, and every way in which a file can be wrong."""

from __future__ import annotations

from typing import Any

import openmsa
import pytest
import torch
from m3 import make_layer
from openmsa.nn import SparseAttention
from torch import Tensor

PREFIX = "language_model.model.layers.3.self_attn."


def checkpoint_of(layer: SparseAttention) -> dict[str, Any]:
    """Named as published: the layer among its neighbours."""
    tensors: dict[str, Any] = {PREFIX + name: value.clone() for name, value in layer.state_dict().items()}
    tensors["language_model.model.layers.3.input_layernorm.weight"] = torch.ones(48)
    tensors["language_model.model.layers.30.self_attn.q_proj.weight"] = torch.zeros(1)
    tensors["lm_head.weight"] = torch.zeros(1)
    return tensors


def as_in_transformers(tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        name.replace("language_model.model.", "model.language_model.").replace(
            "self_attn.index_", "self_attn.indexer."
        ): x
        for name, x in tensors.items()
    }


def weights(layer: SparseAttention) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in layer.state_dict().items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "prefix", [PREFIX, PREFIX[:-1], "language_model.model.layers.3", "language_model.model.layers.3."]
)
def test_published_keys(prefix: str) -> None:
    source, layer = make_layer(seed=1), make_layer(seed=2)
    layer.load_m3_layer(checkpoint_of(source), prefix)
    assert_equal(weights(layer), weights(source))


@pytest.mark.parametrize("prefix", ["model.language_model.layers.3.self_attn.", "model.language_model.layers.3"])
def test_keys_of_transformers(prefix: str) -> None:
    source, layer = make_layer(seed=1), make_layer(seed=2)
    layer.load_m3_layer(as_in_transformers(checkpoint_of(source)), prefix)
    assert_equal(weights(layer), weights(source))


def test_weights_take_the_type_of_the_layer() -> None:
    source, layer = make_layer(seed=1).bfloat16(), make_layer(seed=2)
    layer.load_m3_layer(checkpoint_of(source), PREFIX)
    assert layer.q_proj.weight.dtype == torch.float32
    assert layer.q_proj.weight.requires_grad
    assert_equal(weights(layer), {name: value.float() for name, value in weights(source).items()})
    layer.bfloat16().load_m3_layer(checkpoint_of(source), PREFIX)
    assert_equal(weights(layer), weights(source))


def renamed(tensors: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {(PREFIX + new if name == PREFIX + old else name): value for name, value in tensors.items()}


def changed(name: str, value: Any) -> Any:
    return lambda tensors: {**tensors, PREFIX + name: value}


INVALID: dict[str, tuple[Any, str]] = {
    "missing": (lambda t: {k: v for k, v in t.items() if "v_proj" not in k}, "missing .*v_proj.weight'"),
    "missing index": (lambda t: {k: v for k, v in t.items() if "index_k_norm" not in k},
                      "missing .*index_k_norm.weight' or .*indexer.k_norm.weight'"),
    "misspelt": (lambda t: renamed(t, "q_norm.weight", "query_norm.weight"), "unexpected key .*query_norm.weight"),
    "bias": (changed("q_proj.bias", torch.zeros(128)), "unexpected key .*q_proj.bias"),
    "index value": (changed("index_v_proj.weight", torch.zeros(1)), "unexpected key .*index_v_proj.weight"),
    "both names": (changed("indexer.q_proj.weight", torch.zeros(32, 48)), "both .*index_q_proj.* and .*indexer.q_proj"),
    "transposed": (changed("q_proj.weight", torch.zeros(48, 128)),
                   r"q_proj.weight': got \[48, 128\], expected \[128, 48\]"),
    "other head dim": (changed("k_norm.weight", torch.zeros(17)), r"k_norm.weight': got \[17\], expected \[16\]"),
    "no tensor": (changed("o_proj.weight", [[0.0]]), "o_proj.weight': got a list"),
    "meta": (changed("o_proj.weight", torch.zeros(48, 128, device="meta")), "o_proj.weight': got a tensor on the meta"),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID)
def test_faulty_files_are_named_and_change_nothing(name: str) -> None:
    change, message = INVALID[name]
    layer = make_layer(seed=2)
    before = weights(layer)
    with pytest.raises(openmsa.InvalidArgumentError, match=f"load_m3_layer: state_dict: .*{message}"):
        layer.load_m3_layer(change(checkpoint_of(make_layer(seed=1))), PREFIX)
    assert_equal(weights(layer), before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q_proj.weight_scale_inv", torch.zeros(1)),
        ("index_k_proj.weight_scale_inv", torch.zeros(8, 2, dtype=torch.uint8)),
        ("q_proj.weight", torch.zeros(128, 48, dtype=torch.float8_e4m3fn)),
        ("q_proj.weight", torch.zeros(128, 48, dtype=torch.int8)),
    ],
)
def test_quantized_weights_are_refused_by_name(name: str, value: Tensor) -> None:
    layer = make_layer(seed=2)
    before = weights(layer)
    with pytest.raises(openmsa.UnsupportedError, match=f"load_m3_layer: state_dict: .*{name}"):
        layer.load_m3_layer({**checkpoint_of(make_layer(seed=1)), PREFIX + name: value}, PREFIX)
    assert_equal(weights(layer), before)


@pytest.mark.parametrize(
    "prefix", ["", "language_model.model.layers.4", "language_model.model.layers", "lm_head", None]
)
def test_a_wrong_prefix_is_named(prefix: Any) -> None:
    with pytest.raises(openmsa.InvalidArgumentError, match="load_m3_layer: prefix: got"):
        make_layer().load_m3_layer(checkpoint_of(make_layer()), prefix)


@pytest.mark.parametrize("state_dict", [{}, None, [("q_proj.weight", torch.zeros(1))]])
def test_what_is_no_state_dict(state_dict: Any) -> None:
    with pytest.raises(openmsa.InvalidArgumentError, match=r"load_m3_layer: (prefix|state_dict): got"):
        make_layer().load_m3_layer(state_dict, PREFIX)


def test_a_layer_without_memory() -> None:
    with pytest.raises(openmsa.InvalidArgumentError, match="meta device"):
        make_layer(device="meta").load_m3_layer(checkpoint_of(make_layer()), PREFIX)
