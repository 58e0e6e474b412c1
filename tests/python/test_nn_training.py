"""What a training loop does with the layer: KL weights, checkpoints, accumulation, warm-up, compilation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import openmsa
import pytest
import torch
from m3 import BLOCK, make_layer
from openmsa.nn import SparseAttention
from problems import relative_error
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

INDEX = ("index_q_proj", "index_k_proj", "index_q_norm", "index_k_norm")


def hidden_states(seed: int = 1) -> Tensor:
    return torch.randn(2, 5 * BLOCK + 3, 48, generator=torch.Generator().manual_seed(seed))


def gradients(layer: SparseAttention, step: Callable[[SparseAttention, Tensor], Any]) -> dict[str, Tensor]:
    """Gradients of a copy of the layer after a step on the same input; `layer.kl` is the copy's."""
    layer = copy.deepcopy(layer)
    hidden = hidden_states().requires_grad_()
    step(layer, hidden)
    found = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    assert hidden.grad is not None
    return found | {"hidden": hidden.grad, "kl": layer.kl}


def plain(layer: SparseAttention, hidden: Tensor) -> None:
    layer(hidden).sin().sum().backward()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name


def is_index(name: str) -> bool:
    return name.startswith("index_")


# ---- what trains what ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup", [False, True], ids=["selected", "warmup"])
def test_the_kl_trains_the_index_branch_and_nothing_else(warmup: bool) -> None:
    def kl_only(layer: SparseAttention, hidden: Tensor) -> None:
        out, kl = layer(hidden, return_kl=True)
        (0.0 * out.sum() + kl).backward()

    def loss_only(layer: SparseAttention, hidden: Tensor) -> None:
        out, _ = layer(hidden, return_kl=True)
        out.sin().sum().backward()

    layer = make_layer(warmup=warmup)
    from_kl, from_loss, both = gradients(layer, kl_only), gradients(layer, loss_only), gradients(layer, plain)
    for name, gradient in both.items():
        if name == "kl":
            continue
        assert gradient.any(), name
        if is_index(name):
            assert name not in from_loss
            assert torch.equal(from_kl[name], gradient), name
        else:
            assert not from_kl[name].any(), name
            assert torch.equal(from_loss[name], gradient), name


def test_the_weight_scales_the_index_gradients_only() -> None:
    layer = make_layer()
    once = gradients(layer, plain)
    layer.kl_weight = 0.25
    assert layer.kl_weight == 0.25
    for name, gradient in gradients(layer, plain).items():
        torch.testing.assert_close(gradient, once[name] * (0.25 if is_index(name) else 1.0))
    layer.kl_weight = 0
    for name, gradient in gradients(layer, plain).items():
        assert torch.equal(gradient, torch.zeros_like(gradient) if is_index(name) else once[name]), name


def test_under_a_gradient_scaler() -> None:
    layer, hidden = make_layer(), hidden_states()
    layer(hidden).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in layer.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    optimizer.zero_grad()
    layer.kl_weight = scaler.get_scale()
    scaler.scale(layer(hidden).square().mean()).backward()
    scaler.unscale_(optimizer)
    for parameter, grad in zip(layer.parameters(), expected, strict=True):
        assert relative_error(parameter.grad, grad) < 1e-5


def test_the_weight_of_a_step_is_that_of_its_forward_pass() -> None:
    def step(layer: SparseAttention, hidden: Tensor) -> None:
        out = layer(hidden)
        layer.kl_weight = 7.0
        out.sin().sum().backward()

    assert_same(gradients(make_layer(), step), gradients(make_layer(), plain))


def test_kl_is_the_operations_kl() -> None:
    layer = make_layer()
    assert torch.isnan(layer.kl)
    hidden = hidden_states()
    out, kl = layer(hidden, return_kl=True)
    assert not torch.isnan(layer.kl)
    layer(hidden).sum().backward()
    assert layer.kl.item() == pytest.approx(kl.item(), rel=2e-4)
    assert kl.item() > 0.01
    assert out.shape == hidden.shape


@pytest.mark.parametrize("grad", [False, True])
def test_evaluation_neither_pays_for_the_kl_nor_writes_it(grad: bool) -> None:
    layer = make_layer().eval()
    hidden = hidden_states()
    with torch.set_grad_enabled(grad):
        out = layer(hidden)
        _, kl = layer(hidden, return_kl=True)
    assert torch.isnan(layer.kl)
    assert kl.requires_grad == grad
    if grad:
        out.sin().sum().backward()
        assert layer.q_proj.weight.grad.any()
        assert layer.index_q_proj.weight.grad is None
    assert torch.equal(layer.train()(hidden), out)
    with torch.no_grad():
        assert layer(hidden, return_kl=True)[1] == kl


def test_frozen_main_branch() -> None:
    layer = make_layer()
    expected = gradients(layer, plain)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(is_index(name))
    hidden = hidden_states()
    out, kl = layer(hidden, return_kl=True)
    assert not out.requires_grad
    kl.backward()
    assert all(torch.equal(layer.get_parameter(f"{n}.weight").grad, expected[f"{n}.weight"]) for n in INDEX)
    layer.zero_grad()
    layer(hidden).sum().backward()
    assert all(torch.equal(layer.get_parameter(f"{n}.weight").grad, expected[f"{n}.weight"]) for n in INDEX)


def test_frozen_index_branch() -> None:
    layer = make_layer()
    expected = gradients(layer, plain)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not is_index(name))
    found = gradients(layer, plain)
    assert_same(found, {name: value for name, value in expected.items() if not is_index(name)})


def test_outputs_may_be_written_in_place() -> None:
    def step(layer: SparseAttention, hidden: Tensor) -> None:
        out = layer(hidden)
        out += hidden
        out.sin().sum().backward()

    def expected(layer: SparseAttention, hidden: Tensor) -> None:
        (layer(hidden) + hidden).sin().sum().backward()

    assert_same(gradients(make_layer(), step), gradients(make_layer(), expected))


# ---- warm-up ---------------------------------------------------------------------------------------------------------


def test_warmup_is_dense_and_can_be_switched() -> None:
    layer = make_layer().eval()
    hidden = hidden_states()[0]
    sparse = layer(hidden)
    layer.warmup = True
    dense, kl, indices = layer(hidden, return_kl=True, return_indices=True)
    assert indices is None
    every = make_layer(topk=len(hidden) // BLOCK + 1).eval()
    everything, its_kl = every(hidden, return_kl=True)
    assert relative_error(dense, everything) < 1e-6
    assert kl.item() == pytest.approx(its_kl.item(), rel=1e-4)
    assert relative_error(sparse, dense) > 1e-2
    with pytest.raises(openmsa.InvalidArgumentError, match="indices: got a tensor in warm-up"):
        layer(hidden, indices=torch.zeros(4, len(hidden), 1, dtype=torch.int32))
    layer.warmup = False
    assert torch.equal(layer(hidden), sparse)


# ---- activation checkpointing and accumulation -----------------------------------------------------------------------


@pytest.mark.parametrize("warmup", [False, True], ids=["selected", "warmup"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(reentrant: bool, warmup: bool) -> None:
    def step(layer: SparseAttention, hidden: Tensor) -> None:
        checkpoint(layer, hidden, use_reentrant=reentrant).sin().sum().backward()

    layer = make_layer(warmup=warmup, kl_weight=0.3)
    found = gradients(layer, step)
    assert_same(found, gradients(layer, plain))
    assert found["kl"] > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_returned_kl_through_a_checkpoint(reentrant: bool) -> None:
    def run(layer: SparseAttention, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return layer(hidden, return_kl=True)

    def step(layer: SparseAttention, hidden: Tensor) -> None:
        out, kl = checkpoint(run, layer, hidden, use_reentrant=reentrant)
        assert kl > 0
        (out.sin().sum() + kl).backward()

    assert_same(gradients(make_layer(), step), gradients(make_layer(), plain))


@pytest.mark.parametrize("reentrant", [False, True])
def test_two_checkpointed_layers(reentrant: bool) -> None:
    layers = [make_layer(), make_layer(seed=3)]

    def step(wrap: Callable[..., Tensor]) -> list[Tensor]:
        copies = copy.deepcopy(layers)
        hidden = hidden_states().requires_grad_()
        x: Tensor = hidden
        for layer in copies:
            x = x + wrap(layer, x)
        x.sin().sum().backward()
        return [p.grad for layer in copies for p in layer.parameters()] + [layer.kl for layer in copies] + [hidden.grad]

    found = step(lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant))
    for gradient, expected in zip(found, step(lambda layer, x: layer(x)), strict=True):
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "forward passes first"])
def test_accumulated_micro_batches(at_once: bool) -> None:
    layer = make_layer(kl_weight=0.5)
    inputs = [hidden_states(seed) for seed in (1, 2, 3)]
    alone = []
    for hidden in inputs:
        single = copy.deepcopy(layer)
        single(hidden).sin().sum().backward()
        alone.append(({n: p.grad for n, p in single.named_parameters()}, single.kl))
    if at_once:
        for loss in [layer(hidden).sin().sum() for hidden in inputs]:
            loss.backward()
    else:
        for hidden in inputs:
            layer(hidden).sin().sum().backward()
    assert torch.equal(layer.kl, alone[-1][1])
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, sum(grads[name] for grads, _ in alone), rtol=1e-4, atol=1e-4)


def test_training_brings_the_kl_down() -> None:
    layer = make_layer()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    hidden, target = hidden_states(), hidden_states(2)
    seen = []
    for _ in range(30):
        optimizer.zero_grad()
        (layer(hidden) - target).square().mean().backward()
        optimizer.step()
        seen.append(layer.kl.item())
    assert seen[-1] < 0.5 * seen[0]


# ---- compilation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "checkpointed"), [("eager", False), ("aot_eager", False), ("aot_eager", True), ("inductor", True)]
)
def test_compiled_steps(backend: str, checkpointed: bool) -> None:
    torch._dynamo.reset()

    def step(layer: SparseAttention, hidden: Tensor) -> None:
        def forward(x: Tensor) -> Tensor:
            return checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)

        torch.compile(forward, fullgraph=True, backend=backend)(hidden).sin().sum().backward()

    layer = make_layer(kl_weight=0.3)
    found, expected = gradients(layer, step), gradients(layer, plain)
    for name, gradient in expected.items():
        assert relative_error(found[name], gradient) < (1e-5 if backend == "inductor" else 1e-7), name


def test_new_weights_lengths_and_packing_do_not_recompile() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layer = make_layer()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for weight, ends in ((1.0, (50, 130)), (0.5, (64, 170)), (0.0, (20, 77))):
        layer.kl_weight = weight
        layer.zero_grad()
        hidden = hidden_states().flatten(0, 1)[: ends[-1]]
        offsets = torch.tensor((0, *ends), dtype=torch.int32)
        compiled(hidden, cu_seqlens=offsets).sin().sum().backward()
        single = copy.deepcopy(layer)
        single.zero_grad()
        single(hidden, cu_seqlens=offsets).sin().sum().backward()
        for name, parameter in layer.named_parameters():
            assert relative_error(parameter.grad, single.get_parameter(name).grad) < 1e-6, name
        assert torch.equal(layer.kl, single.kl)
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1, "only the first step may compile"


@pytest.mark.parametrize("arguments", ["padded", "indices", "return", "evaluation"])
def test_compiled_calls(arguments: str) -> None:
    torch._dynamo.reset()
    layer = make_layer().train(arguments != "evaluation")
    hidden = hidden_states()
    settings: dict[str, Any] = {
        "padded": {"lengths": torch.tensor([100, 163])},
        "indices": {"indices": torch.zeros(4, hidden.shape[0] * hidden.shape[1], 1, dtype=torch.int32)},
        "return": {"return_kl": True, "return_indices": True},
        "evaluation": {},
    }[arguments]
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(hidden, **settings)
    torch.testing.assert_close(found, layer(hidden, **settings), rtol=0, atol=0)
