"""The public surface is the contract's: names, order, kinds and defaults of every parameter."""

import inspect

import openmsa
import pytest

SEQUENCES = "cu_seqlens_q=None, cu_seqlens_k=None, k_starts=None"
SIGNATURES = {
    "select_blocks": "index_q, index_k, *, topk=16, block_size=128, init_blocks=0, local_blocks=1, scale=None, "
    f"{SEQUENCES}, return_lse=False, out=None, lse_out=None, workspace=None",
    "sparse_attention": f"q, k, v, indices, *, block_size=128, scale=None, {SEQUENCES}, return_lse=False, "
    "deterministic=False, out=None, lse_out=None, workspace=None",
    "msa_attention": "q, k, v, index_q, index_k, *, topk=16, block_size=128, init_blocks=0, local_blocks=1, "
    f"scale=None, index_scale=None, {SEQUENCES}, kl='forward', kl_out=None, warmup=False, "
    "deterministic=False, workspace=None",
    "paged_select_blocks": "index_q, index_k_cache, block_table, seq_lens, *, cu_seqlens_q, topk=16, init_blocks=0, "
    "local_blocks=1, scale=None, return_lse=False, out=None, lse_out=None, workspace=None",
    "paged_sparse_attention": "q, k_cache, v_cache, indices, block_table, seq_lens, *, cu_seqlens_q, scale=None, "
    "k_scale=None, v_scale=None, return_lse=False, out=None, lse_out=None, workspace=None",
    "paged_msa_attention": "q, k_cache, v_cache, index_q, index_k_cache, block_table, seq_lens, *, cu_seqlens_q, "
    "topk=16, init_blocks=0, local_blocks=1, scale=None, index_scale=None, k_scale=None, v_scale=None, out=None, "
    "lse_out=None, indices_out=None, workspace=None",
    "combine": "outs, lses",
    "captured_mass": f"q, k, indices, *, block_size=128, scale=None, {SEQUENCES}",
    "paged_append": "k, v, index_k, k_cache, v_cache, index_k_cache, block_table, seq_lens, *, cu_seqlens_q, "
    "k_scale=None, v_scale=None",
    "workspace_size": "operation, *args, **kwargs",
    "set_workspace_limit": "bytes",
    "check_inputs": "enabled=None",
    "info": "",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    signature = inspect.signature(getattr(openmsa, name))
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    assert str(inspect.Signature(plain)) == f"({SIGNATURES[name]})"


@pytest.mark.parametrize("name", SIGNATURES)
def test_documented(name: str) -> None:
    function = getattr(openmsa, name)
    documentation = inspect.getdoc(function)
    assert documentation is not None
    if SIGNATURES[name] and name not in ("check_inputs", "set_workspace_limit"):
        assert "Raises:" in documentation
    for parameter in inspect.signature(function).parameters:
        if name != "check_inputs":
            assert f"{parameter}:" in documentation


def test_everything_public_is_in_all() -> None:
    assert set(SIGNATURES) <= set(openmsa.__all__)
    for name in openmsa.__all__:
        assert hasattr(openmsa, name)


def test_result_fields() -> None:
    assert openmsa.MsaResult._fields == ("out", "kl", "indices", "lse", "index_lse")


def test_version_and_info() -> None:
    info = openmsa.info()
    assert info["version"] == openmsa.__version__
    assert {"name", "device", "available", "operations"} <= info["backends"][0].keys()
    assert any(backend["name"] == "reference" and backend["available"] for backend in info["backends"])
    assert info["devices"]


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (openmsa.InvalidArgumentError, ValueError),
        (openmsa.UnsupportedError, NotImplementedError),
        (openmsa.OutOfMemoryError, RuntimeError),
        (openmsa.DeviceError, RuntimeError),
        (openmsa.InternalError, RuntimeError),
    ],
)
def test_errors_are_builtin_kinds_too(error: type, builtin: type) -> None:
    assert issubclass(error, openmsa.Error)
    assert issubclass(error, builtin)


def test_checking_mode_switches() -> None:
    before = openmsa.check_inputs()
    try:
        assert openmsa.check_inputs(True) is True
        assert openmsa.check_inputs() is True
        assert openmsa.check_inputs(False) is False
    finally:
        openmsa.check_inputs(before)


@pytest.mark.parametrize("bytes_", [0, -1, 2**63, 1.5, "1", None])
def test_workspace_limit_refuses(bytes_: object) -> None:
    with pytest.raises(openmsa.InvalidArgumentError, match="bytes"):
        openmsa.set_workspace_limit(bytes_)  # type: ignore[arg-type]


def test_workspace_limit_accepts() -> None:
    openmsa.set_workspace_limit(1 << 20)
    openmsa.set_workspace_limit(1 << 30)
