"""The KL of a transformers model's index branches: its value and gradients, checkpoints, accumulation, padding."""

from __future__ import annotations

import contextlib
from typing import Any

import openmsa
import pytest
import torch

pytest.importorskip("transformers.models.minimax_m3_vl", reason="needs a transformers with minimax_m3_vl")

from m3_models import SETTINGS, gradients, make_models, sparse_layers, tokens
from openmsa.integrations.transformers import collect_kl
from problems import Problem, dense_msa, relative_error
from torch import Tensor
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m3

LENGTH = 200


@pytest.fixture(scope="module", params=SETTINGS)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """(eager, eager that reads every block, openmsa)"""
    settings = SETTINGS[request.param]
    eager, model = make_models(**settings)
    return eager, make_models(**settings | {"index_topk_blocks": LENGTH})[0], model.train()


@pytest.fixture(scope="module")
def model() -> Any:
    return make_models()[1].train()


def of_indexers(found: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: gradient for name, gradient in found.items() if ".indexer." in name}


def expected_kl(eager: Any, ids: Tensor, warmup: bool) -> dict[int, Tensor]:
    """Layer by layer in dense float64, from the hidden states that the eager model's layers see."""
    inputs: dict[int, Any] = {}
    layers = sparse_layers(eager)
    hooks = [
        layer.register_forward_pre_hook(
            lambda module, _, kwargs: inputs.__setitem__(module.layer_idx, kwargs), with_kwargs=True
        )
        for layer in layers
    ]
    eager(ids)
    for hook in hooks:
        hook.remove()
    result = {}
    for layer in layers:
        hidden = inputs[layer.layer_idx]["hidden_states"].detach()
        embeddings = inputs[layer.layer_idx]["position_embeddings"]
        positions = torch.arange(ids.shape[1])[None]

        def heads(module: Any, which: str, dim: int, hidden: Tensor = hidden) -> Tensor:
            projected = getattr(module, f"{which}_proj")(hidden).unflatten(-1, (-1, dim))
            return getattr(module, f"{which}_norm")(projected).transpose(1, 2) if which != "v" else projected

        indexer = layer.indexer
        q, k = m3.apply_rotary_pos_emb(*(heads(layer, which, layer.head_dim) for which in "qk"), *embeddings)
        index_q, index_k = m3.apply_rotary_pos_emb(
            *(heads(indexer, which, indexer.head_dim) for which in "qk"),
            *(table[..., : indexer.head_dim] for table in embeddings),
        )
        indices = None if warmup else indexer(hidden, embeddings, None, positions)[0]
        packed = [x[0].transpose(0, 1).double() for x in (q, k, k, index_q, index_k)]
        problem = Problem(*packed, block_size=indexer.block_size, lengths=[(LENGTH, 0, LENGTH)])
        result[layer.layer_idx] = dense_msa(problem, tuple(packed), indices).kl
    return result


@pytest.mark.parametrize("kl", ["forward", "backward"])
@pytest.mark.parametrize("warmup", [False, True], ids=["selected", "warmup"])
def test_value_and_gradients(models: tuple[Any, Any, Any], warmup: bool, kl: str) -> None:
    sparse, dense, model = models
    eager = dense if warmup else sparse
    ids = tokens(1, LENGTH)
    for each in (eager, model):
        each.zero_grad()
    expected = expected_kl(eager, ids, warmup)
    sum(expected.values()).backward()  # type: ignore[union-attr]
    with collect_kl(model, kl=kl, warmup=warmup) as index_kl:
        model(ids)
        total = index_kl.total()
        total.backward()
    value = sum(index_kl.layers.values())
    if kl == "forward":
        assert total.item() == pytest.approx(value, rel=1e-6)
    else:
        assert total.item() == 0
    assert index_kl.layers.keys() == expected.keys()
    for layer, of_layer in index_kl.layers.items():
        assert of_layer == pytest.approx(expected[layer].item(), rel=5e-4, abs=1e-5)
    reference = gradients(eager)
    for name, gradient in gradients(model).items():
        if ".indexer." in name:
            assert gradient is not None, name
            assert relative_error(gradient, reference[name]) < 1e-3, name
        else:
            assert gradient is None, name


def test_the_loss_trains_as_without_it(model: Any) -> None:
    ids = tokens(2, LENGTH)
    model.zero_grad()
    plain = model(ids, labels=ids).loss
    plain.backward()
    expected = gradients(model)
    assert not any(gradient is not None for gradient in of_indexers(expected).values())
    model.zero_grad()
    with collect_kl(model) as index_kl:
        loss = model(ids, labels=ids).loss
        assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
        (loss + 0.0 * index_kl.total()).backward()
    for name, gradient in gradients(model).items():
        if ".indexer." in name:
            assert gradient is not None
            assert not gradient.any()
        elif expected[name] is not None:
            assert relative_error(gradient, expected[name]) < 2e-5, name


@pytest.mark.parametrize("kl", ["forward", "backward"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["checkpoints", "reentrant checkpoints"])
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
@pytest.mark.parametrize("warmup", [False, True], ids=["selected", "warmup"])
def test_checkpoints(model: Any, reentrant: bool, inside: bool, warmup: bool, kl: str) -> None:
    ids = tokens(1, LENGTH)

    def step() -> tuple[dict[str, Tensor | None], dict[int, float]]:
        model.zero_grad()
        with contextlib.ExitStack() as stack:
            index_kl = stack.enter_context(collect_kl(model, kl=kl, warmup=warmup))
            loss = model(ids, labels=ids, use_cache=False).loss + 0.5 * index_kl.total()
            if inside:
                loss.backward()
                with pytest.raises(openmsa.InvalidArgumentError, match="total: there was no forward pass"):
                    index_kl.total()
        if not inside:
            loss.backward()
        return gradients(model), index_kl.layers

    expected, values = step()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    try:
        if reentrant:
            model.enable_input_require_grads()
        found, found_values = step()
    finally:
        if reentrant:
            model.disable_input_require_grads()
        model.gradient_checkpointing_disable()
    assert found_values == pytest.approx(values, rel=1e-4)
    for name, gradient in found.items():
        reference = expected[name]
        assert (gradient is None) == (reference is None), name
        if gradient is not None and reference is not None:
            assert relative_error(gradient, reference) < 2e-5, name


def test_accumulation(model: Any) -> None:
    batches = [tokens(1, LENGTH, seed=seed) for seed in (0, 1)]
    each = []
    with collect_kl(model) as index_kl:
        for ids in batches:
            model.zero_grad()
            model(ids)
            index_kl.total().backward()
            each.append((sum(index_kl.layers.values()), of_indexers(gradients(model))))
        model.zero_grad()
        for ids in batches:
            model(ids)
        total = index_kl.total()
        total.backward()
    assert total.item() == pytest.approx(sum(value for value, _ in each), rel=1e-5)
    for name, gradient in of_indexers(gradients(model)).items():
        parts = [found[name] for _, found in each]
        assert gradient is not None
        assert relative_error(gradient, sum(part for part in parts if part is not None)) < 1e-5, name


def test_padding_and_batches_weigh_every_real_token_alike(model: Any) -> None:
    lengths = (LENGTH, 77)
    ids = tokens(2, LENGTH)
    mask = (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]).long()
    with collect_kl(model) as index_kl, torch.no_grad():
        alone = []
        for row, length in enumerate(lengths):
            model(ids[row : row + 1, :length])
            alone.append(index_kl.total().item() * length)
        model(ids * mask, attention_mask=mask)
        assert index_kl.total().item() == pytest.approx(sum(alone) / sum(lengths), rel=1e-4)


def test_evaluation_has_values_and_no_graph(model: Any) -> None:
    ids = tokens(1, LENGTH)
    model.eval()
    try:
        for kl in ("forward", "backward"):
            for off in (torch.no_grad, torch.inference_mode):
                with collect_kl(model, kl=kl) as index_kl, off():
                    model(ids)
                    total = index_kl.total()
                assert total.item() > 0.01
                assert not total.requires_grad
    finally:
        model.train()


def test_cached_decode_has_a_kl(model: Any) -> None:
    """Of the new queries over all keys: the mean over the chunks is that of the whole."""
    from transformers import DynamicCache

    ids = tokens(1, LENGTH)
    cache = DynamicCache(config=model.config)
    with collect_kl(model) as index_kl, torch.no_grad():
        model(ids)
        whole = index_kl.total().item()
        parts = 0.0
        for chunk in ids.split((150, 49, 1), 1):
            model(chunk, past_key_values=cache)
            parts += index_kl.total().item() * chunk.shape[1]
    assert parts / LENGTH == pytest.approx(whole, rel=1e-4)


def test_frozen_index_branch(model: Any) -> None:
    trained = [parameter for layer in sparse_layers(model) for parameter in layer.indexer.parameters()]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        with collect_kl(model) as index_kl:
            model(tokens(1, LENGTH))
            assert not index_kl.total().requires_grad
    finally:
        for parameter in trained:
            parameter.requires_grad_()


def test_errors(model: Any) -> None:
    eager, _ = make_models()
    _, dense = make_models(layer_types=["full_attention"] * 3)
    for other, message in (
        (eager, "model: got attn_implementation='eager', expected 'openmsa'"),
        (dense, "model: got a MiniMaxM3VLForCausalLM without sparse layers"),
        (torch.nn.Linear(1, 1), "model: got a Linear without sparse layers"),
        (None, "model: got a NoneType without sparse layers"),
    ):
        with pytest.raises(openmsa.InvalidArgumentError, match=f"collect_kl: {message}"):
            collect_kl(other)
    with pytest.raises(openmsa.InvalidArgumentError, match="collect_kl: kl: got 'off'"), collect_kl(model, kl="off"):
        pass
    with collect_kl(model) as index_kl:
        with pytest.raises(openmsa.InvalidArgumentError, match="its KL is being collected already"), collect_kl(model):
            pass
        with pytest.raises(openmsa.InvalidArgumentError, match="total: there was no forward pass"):
            index_kl.total()
        model(tokens(1, 40))
        assert index_kl.total().item() > 0
