"""Registering openmsa with transformers and taking it back; errors name what MiniMax-M3 cannot have on it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import openmsa
import pytest
import torch

pytest.importorskip("transformers.models.minimax_m3_vl", reason="needs a transformers with minimax_m3_vl")

from m3_models import make_models, padded, sparse_layers, tokens
from openmsa.integrations import transformers as integration
from problems import relative_error
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m3


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return make_models()


def test_register_is_idempotent_and_taken_back(pair: tuple[Any, Any]) -> None:
    eager, model = pair
    ids = tokens(1, 40)
    forward = m3.MiniMaxM3VLIndexer.forward
    assert integration.register() == "openmsa"
    assert m3.MiniMaxM3VLIndexer.forward is forward
    integration.unregister()
    integration.unregister()
    assert m3.MiniMaxM3VLIndexer.forward is not forward
    assert "openmsa" not in AttentionInterface()
    assert "openmsa" not in AttentionMaskInterface()
    with pytest.raises(KeyError, match="openmsa"):
        model(ids)
    expected = eager(ids).logits
    integration.register()
    assert m3.MiniMaxM3VLIndexer.forward is forward
    assert torch.equal(eager(ids).logits, expected)
    assert relative_error(model(ids).logits, expected) < 5e-6


def test_implementation_can_be_set_on_a_model(pair: tuple[Any, Any]) -> None:
    model, _ = make_models()
    ids = tokens(1, 200)
    with torch.no_grad():
        expected = model(ids).logits
        model.set_attn_implementation("openmsa")
        assert relative_error(model(ids).logits, expected) < 5e-6
        model.set_attn_implementation("eager")
        assert torch.equal(model(ids).logits, expected)


def raises(message: str) -> Any:
    return pytest.raises((openmsa.InvalidArgumentError, openmsa.UnsupportedError),
                         match=f"^attn_implementation='openmsa': {message}")  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_attentions": True}, "output_attentions: got True, expected False"),
        ({"sliding_window": 64}, "sliding_window: got a int, expected None"),
        ({"softcap": 30.0}, "softcap: got a float, expected None"),
        ({"is_causal": False}, "mask_function: got another than causal attention within documents"),
        ({"s_aux": torch.zeros(4)}, "s_aux: got a Tensor, expected None"),
        ({"attention_mask": torch.zeros(1, 1, 200, 200)}, r"attention_mask: got \[1, 1, 200, 200\]"),
        ({"attention_mask": torch.ones(1, 199)}, r"attention_mask: got \[1, 199\], expected \[1, 200\]"),
    ],
)
def test_errors_name_the_argument(pair: tuple[Any, Any], arguments: dict[str, Any], message: str) -> None:
    _, model = pair
    with raises(message):
        model(tokens(1, 200), **{"use_cache": True, **arguments})


def test_dropout_of_sparse_layers_is_refused() -> None:
    _, model = make_models(attention_dropout=0.1)
    ids = tokens(1, 50)
    model(ids)
    with raises("attention_dropout: got 0.1 in a sparse layer, expected 0"):
        model.train()(ids)


def test_caches_without_index_keys_are_refused(pair: tuple[Any, Any]) -> None:
    _, model = pair
    ids = tokens(1, 50)
    with raises("past_key_values: layer 1 is a DynamicLayer, which holds no index keys"):
        model(ids, past_key_values=DynamicCache())
    with raises("past_key_values: got a static cache"):
        model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=64))
    with raises("attention_mask: got .*a static cache is longer than its tokens and not supported"):
        model.generate(ids, max_new_tokens=2, cache_implementation="static", do_sample=False)


@pytest.mark.parametrize(
    "indices", [[0], torch.zeros(1, 2, 8), torch.zeros(1, 2, 7, 1)], ids=["list", "rank", "length"]
)
def test_block_indices_are_checked(pair: tuple[Any, Any], indices: Any) -> None:
    layer = sparse_layers(pair[1])[0]
    query, key = torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 8, 16)
    with raises(r"block_indices: got .*, expected \[1, Hi, 8, topk\]"):
        AttentionInterface()["openmsa"](layer, query, key, key, None, block_indices=indices)


def test_attention_that_looks_ahead_is_refused(pair: tuple[Any, Any]) -> None:
    layer = sparse_layers(pair[1])[0]
    query, key = torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 8, 16)
    with raises("is_causal: got False in a sparse layer, expected True"):
        AttentionInterface()["openmsa"](
            layer, query, key, key, None, block_indices=torch.zeros(1, 2, 8, 1), is_causal=False
        )


def test_positions_of_a_batch_with_gaps_leave_padding_out(pair: tuple[Any, Any]) -> None:
    _, model = pair
    ids, mask = padded("right", (60, 40))
    cache = DynamicCache(config=model.config)
    model(ids, attention_mask=mask, past_key_values=cache)
    with raises("position_ids: got places in a batch that has padding between a row's tokens"):
        model(ids[:, :1], attention_mask=torch.nn.functional.pad(mask, (0, 1), value=1), past_key_values=cache)


def test_other_masks_are_refused(pair: tuple[Any, Any]) -> None:
    _, model = pair
    function = AttentionMaskInterface()["openmsa"]
    sizes = {"batch_size": 1, "q_length": 40, "kv_length": 40, "config": model.config}
    window = lambda b, h, q, k: (k <= q) & (k > q - 8)  # noqa: E731
    both_ways = lambda b, h, q, k: torch.ones_like(q + k, dtype=torch.bool)  # noqa: E731
    one_way_back = lambda b, h, q, k: (k <= q) & ((q < 20) | (k > 4))  # noqa: E731
    for other in (window, both_ways, one_way_back):
        with raises("mask_function: got another than causal attention within documents"):
            function(mask_function=other, **sizes)


def test_other_models_are_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )  # fmt: skip
    llama = LlamaForCausalLM._from_config(config, attn_implementation="openmsa")
    with raises("config: got model_type 'llama', expected 'minimax_m3_vl'"):
        llama(tokens(1, 8) % 9)


def test_another_indexer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from openmsa.integrations import _minimax_m3

    integration.unregister()
    monkeypatch.setattr(_minimax_m3, "transformers_indexer", lambda self, hidden_states, other: None)
    with pytest.raises(openmsa.UnsupportedError, match=r"register: transformers: its MiniMaxM3VLIndexer.forward takes"):
        integration.register()


@pytest.mark.parametrize("missing", ["transformers", "transformers.models.minimax_m3_vl"])
def test_register_says_what_it_needs(missing: str) -> None:
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from openmsa.integrations import transformers\n"
        "try: transformers.register()\n"
        "except __import__('openmsa').UnsupportedError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("register: transformers: got ")
    assert "expected 5.17 or newer with minimax_m3_vl" in result.stdout


def test_openmsa_imports_no_transformers() -> None:
    program = "import sys, openmsa, openmsa.integrations.transformers; print('transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
