"""Attention inputs of a trained model on real text, for benches that want selections as a model makes them."""

import dataclasses
import json
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from .checkpoint import write_whole
from .config import Attention
from .data import draw_batch
from .evaluate import SEED
from .model import ByteModel, Layer


@torch.no_grad()
def save_activations(model: ByteModel, text: Tensor, length: int, folder: Path) -> list[Path]:
    """One sequence of `length` held-out bytes with planted recall: a file a layer with q, k, v, index_q, index_k.

    The names are those that `openmsa attend` takes.
    """
    config = model.config
    batch = draw_batch(text, torch.Generator().manual_seed(SEED), 1, length, config.planting)
    probe: list[Tensor] = []
    model(batch.inputs.to(model.device), Attention.SPARSE, probe=probe)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, x in enumerate(probe):
        layer = model.layers[number]
        assert isinstance(layer, Layer)
        heads = layer.heads(layer.normed(x))
        tensors = {"q": heads.q, "k": heads.k, "v": heads.v, "index_q": heads.index_q, "index_k": heads.index_k}
        metadata = {"config": json.dumps(dataclasses.asdict(config))}
        path = folder / f"layer{number}.safetensors"
        content = safetensors.torch.save({name: x.cpu().contiguous() for name, x in tensors.items()}, metadata)
        write_whole(path, content)
        paths.append(path)
    return paths
