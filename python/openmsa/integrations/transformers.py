"""MiniMax-M3 of transformers (``minimax_m3_vl``) on openmsa, for inference and training.

    from openmsa.integrations import transformers as openmsa_transformers

    openmsa_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="openmsa")

docs/integrations.md says what is supported, and how to train the index branch.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from ._index_kl import IndexKl

_INDEXER = ("self", "hidden_states", "position_embeddings", "past_key_values", "position_ids")


def register() -> str:
    """Makes ``attn_implementation="openmsa"`` known to transformers, for models of type ``minimax_m3_vl``.

    Registers an attention function and a mask function, and lets ``MiniMaxM3VLIndexer.forward`` take openmsa's way in
    models that use them; every other model stays as it is. Calling it again changes nothing.

    Returns:
        "openmsa", the name of the implementation.

    Raises:
        UnsupportedError: transformers is missing, or its MiniMax-M3 is not the one that openmsa knows.
    """
    m3 = _import()
    if m3.m3.MiniMaxM3VLIndexer.forward is not m3.indexer_forward:
        found = tuple(inspect.signature(m3.transformers_indexer).parameters)
        if found != _INDEXER:
            raise UnsupportedError(
                f"register: transformers: its MiniMaxM3VLIndexer.forward takes {found}, expected {_INDEXER} "
                "(as in transformers 5.17)"
            )
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(m3.NAME, m3.attention_forward)
    AttentionMaskInterface.register(m3.NAME, m3.mask)
    m3.m3.MiniMaxM3VLIndexer.forward = m3.indexer_forward
    name: str = m3.NAME
    return name


def unregister() -> None:
    """Takes back what :func:`register` did. Models that still ask for "openmsa" then fail by that name."""
    m3 = _import()
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface._global_mapping.pop(m3.NAME, None)
    AttentionMaskInterface._global_mapping.pop(m3.NAME, None)
    m3.m3.MiniMaxM3VLIndexer.forward = m3.transformers_indexer


def collect_kl(model: Any, *, kl: str = "forward", warmup: bool = False) -> AbstractContextManager[IndexKl]:
    """Collects the KL of the model's index branches, with gradients, while the context lasts.

        with collect_kl(model) as index_kl:
            for batch in batches:
                loss = model(**batch).loss
                (loss + weight * index_kl.total()).backward()
                optimizer.step()
                optimizer.zero_grad()

    Without it the index branch is not trained, and costs no graph. Right under gradient accumulation and activation
    checkpointing. ``use_reentrant=True`` keeps the attention inputs of every sparse layer until the backward pass;
    ``use_reentrant=False``, the default of transformers, does not. A model under ``torch.compile`` collects nothing.

    Args:
        model: a ``minimax_m3_vl`` model, wrapped or not, that was made with ``attn_implementation="openmsa"``.
        kl: "forward": ``total()`` holds the value. "backward": ``total()`` reads 0 and carries gradients, and the
            backward pass writes the values into ``layers`` at next to no cost.
        warmup: the sparse layers attend densely, and the KL runs over every visible key: the phase before sparse
            training.

    Returns:
        A context manager that gives an object with ``total()``, the sum over the layers, and ``layers``, the values by
        layer.

    Raises:
        InvalidArgumentError: the model has no sparse layer on openmsa, or an argument is wrong.
    """
    m3 = _import()
    from ._index_kl import collecting

    modules = model.modules() if hasattr(model, "modules") else ()
    indexers = [module for module in modules if isinstance(module, m3.m3.MiniMaxM3VLIndexer)]
    if not indexers:
        raise InvalidArgumentError(
            f"collect_kl: model: got a {type(model).__name__} without sparse layers, expected a minimax_m3_vl model "
            "whose layer_types name minimax_m3_sparse"
        )
    implementation = indexers[0].config._attn_implementation
    if implementation != m3.NAME:
        raise InvalidArgumentError(
            f"collect_kl: model: got attn_implementation={implementation!r}, expected {m3.NAME!r}"
        )
    return collecting(indexers, kl, warmup)


def _import() -> Any:
    try:
        from . import _minimax_m3
    except ImportError as error:
        try:
            from transformers import __version__ as version
        except ImportError:
            version = "none"
        raise UnsupportedError(
            f"register: transformers: got {version}, expected 5.17 or newer with minimax_m3_vl ({error})"
        ) from error
    return _minimax_m3
