"""`openmsa attend` of the installed command gives what msa_attention gives on the tensors of the same file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import openmsa  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

COMMAND = Path(sys.prefix) / "bin" / "openmsa"

# Libraries from elsewhere come without the command.
pytestmark = pytest.mark.skipif(
    "OPENMSA_LIBRARY_DIR" in os.environ and not COMMAND.exists(), reason="the package is not installed"
)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("index", ["same", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attend_is_msa_attention(tmp_path: Path, dtype: str, index: str) -> None:
    generator = torch.Generator().manual_seed(5)

    def tensor(tokens: int, heads: int, dim: int, kind: torch.dtype) -> torch.Tensor:
        return torch.randn(tokens, heads, dim, generator=generator).to(kind)

    main = DTYPES[dtype]
    branch = main if index == "same" else torch.float8_e4m3fn
    offsets = torch.tensor([0, 100, 100, 430], dtype=torch.int32)
    tensors = {
        "q": tensor(430, 4, 32, main),
        "k": tensor(430, 1, 32, main),
        "v": tensor(430, 1, 48, main),
        "index_q": tensor(430, 2, 16, branch),
        "index_k": tensor(430, 1, 16, branch),
    }
    source, target = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    save_file({**tensors, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets.clone()}, source)
    arguments = ["--topk", "3", "--block-size", "64", "--init-blocks", "1", "--local-blocks", "1", "--scale", "0.2",
                 "--index-scale", "0.35"]  # fmt: skip
    result = subprocess.run(
        [str(COMMAND), "attend", "--input", str(source), "--output", str(target), *arguments],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    want = openmsa.msa_attention(
        *tensors.values(), topk=3, block_size=64, init_blocks=1, local_blocks=1, scale=0.2, index_scale=0.35,
        cu_seqlens_q=offsets, cu_seqlens_k=offsets, kl="off",
    )  # fmt: skip
    got = load_file(target)
    assert set(got) == {"out", "lse", "indices", "index_lse"}
    # The same kernels on the same numbers.
    torch.testing.assert_close(got["out"], want.out, rtol=0, atol=0)
    torch.testing.assert_close(got["lse"], want.lse, rtol=0, atol=0)
    torch.testing.assert_close(got["indices"], want.indices, rtol=0, atol=0)
    _, index_lse = openmsa.select_blocks(
        tensors["index_q"], tensors["index_k"], topk=3, block_size=64, init_blocks=1, local_blocks=1, scale=0.35,
        cu_seqlens_q=offsets, cu_seqlens_k=offsets, return_lse=True,
    )  # fmt: skip
    torch.testing.assert_close(got["index_lse"], index_lse, rtol=1e-5, atol=1e-5)
    with safe_open(target, "pt") as file:
        assert file.metadata()["index_scale"] == "0.35"
