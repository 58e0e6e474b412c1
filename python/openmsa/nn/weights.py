"""Weights of MiniMax-M3's sparse attention layers, with the keys of published checkpoints and of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidArgumentError, UnsupportedError

_STORED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_SUFFIXES_OF_QUANTIZED = ("scale", "scale_inv", "scales", "zero_point", "zeros", "qweight", "packed")


def load(layer: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Copies the layer's parameters out of `state_dict`; when anything is wrong it names it and copies nothing."""
    if not isinstance(state_dict, Mapping):
        raise InvalidArgumentError(
            f"load_m3_layer: state_dict: got a {type(state_dict).__name__}, expected a mapping of names to tensors"
        )
    if not isinstance(prefix, str):
        raise InvalidArgumentError(f"load_m3_layer: prefix: got a {type(prefix).__name__}, expected a string")
    parameters = dict(layer.named_parameters())
    prefix = _attention_prefix(state_dict, prefix, parameters)
    keys = _keys(state_dict, prefix, parameters)
    missing = [name for name in parameters if name not in keys]
    if missing:
        raise InvalidArgumentError(
            f"load_m3_layer: state_dict: missing {', '.join(_expected(prefix, name) for name in missing)}"
        )
    for name, parameter in parameters.items():
        _check(keys[name], state_dict[keys[name]], name, parameter)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state_dict[keys[name]])


def _canonical(name: str) -> str:
    """The checkpoint's and the layer's name of what transformers keeps in a module `indexer`."""
    return "index_" + name.removeprefix("indexer.") if name.startswith("indexer.") else name


def _expected(prefix: str, name: str) -> str:
    if name.startswith("index_"):
        return f"{prefix + name!r} or {prefix + 'indexer.' + name.removeprefix('index_')!r}"
    return repr(prefix + name)


def _attention_prefix(state_dict: Mapping[str, Any], prefix: str, parameters: Mapping[str, Any]) -> str:
    """`prefix` with its dot, extended by "self_attn." where it is that of a whole decoder layer."""
    prefix = prefix if prefix == "" or prefix.endswith(".") else prefix + "."
    keys = [key for key in state_dict if isinstance(key, str) and key.startswith(prefix)]
    for candidate in (prefix, prefix + "self_attn."):
        if any(_canonical(key.removeprefix(candidate)) in parameters for key in keys if key.startswith(candidate)):
            return candidate
    some = next(iter(state_dict), None)
    raise InvalidArgumentError(
        f"load_m3_layer: prefix: got {prefix!r}, under which there is no weight of an attention layer, expected "
        f"a prefix such as 'language_model.model.layers.3.self_attn.' (the first key is {some!r})"
    )


def _keys(state_dict: Mapping[str, Any], prefix: str, parameters: Mapping[str, Any]) -> dict[str, str]:
    """The key of each parameter that is there."""
    keys: dict[str, str] = {}
    for key in state_dict:
        if not isinstance(key, str) or not key.startswith(prefix):
            continue
        name = _canonical(key.removeprefix(prefix))
        if name not in parameters:
            if name.endswith(_SUFFIXES_OF_QUANTIZED):
                raise UnsupportedError(
                    f"load_m3_layer: state_dict: got {key!r} of quantized weights, expected weights in bfloat16, "
                    "float16 or float32 (the bfloat16 checkpoint, or dequantized ones)"
                )
            raise InvalidArgumentError(
                f"load_m3_layer: state_dict: got an unexpected key {key!r}, expected under {prefix!r} only "
                f"{', '.join(parameters)}"
            )
        if name in keys:
            raise InvalidArgumentError(
                f"load_m3_layer: state_dict: got both {keys[name]!r} and {key!r}, expected one of them"
            )
        keys[name] = key
    return keys


def _check(key: str, value: Any, name: str, parameter: Tensor) -> None:
    place = f"load_m3_layer: state_dict: {key!r}: got"
    if not isinstance(value, Tensor):
        raise InvalidArgumentError(f"{place} a {type(value).__name__}, expected a torch tensor")
    if value.shape != parameter.shape:
        raise InvalidArgumentError(f"{place} {list(value.shape)}, expected {list(parameter.shape)} for this layer")
    if value.dtype not in _STORED:
        raise UnsupportedError(f"{place} {value.dtype}, expected one of {', '.join(map(str, _STORED))}")
    if value.is_meta or parameter.is_meta:
        where = "the layer's parameter" if parameter.is_meta else "a tensor"
        raise InvalidArgumentError(
            f"{place} {where} on the meta device, expected tensors with memory (layer.to_empty(device=...) makes it)"
        )
