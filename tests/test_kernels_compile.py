"""The Triton kernels compile for the GPUs they are made for, without one: Triton compiles ahead of time."""

from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="needs the triton package (x86-64 Linux)")

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

WIDTH, ROWS, KEYS = 128, 64, 64
SIZES = {"A": 32, "P": 4, "B": 16, "D": WIDTH, "DP": WIDTH, "M": ROWS, "K": KEYS}
HOPPER, AMPERE = 90, 80


def compiled(kernel: Any, constants: dict[str, Any], *, capability: int, bulk: bool = False) -> int:
    """Bytes of shared memory that a program of the kernel takes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    halves = {"query", "context_key", "context_value", "block_key", "block_value", "out", "gradient", "by_query", "key", "value"}
    types = {name: "*bf16" for name in halves} | {name: "*fp32" for name in ("normaliser", "delta", "by_key", "by_value")}
    types |= {name: "*i32" for name in ("start", "end", "ranges")} | {"num_rows": "i32", "num_context": "i32", "scale": "fp32"}
    if bulk:
        types |= {name: f"tensordesc<bf16[{KEYS},{WIDTH}]>" for name in ("context_key", "context_value")}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    options = {"num_warps": 4, "num_stages": 2}
    return int(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared)


@pytest.mark.parametrize(("capability", "bulk"), [(HOPPER, True), (HOPPER, False), (AMPERE, False)], ids=["hopper-tma", "hopper", "ampere"])
def test_attention_kernels(capability: int, bulk: bool) -> None:
    from dflash_offline.attention import interval_kernels as kernels

    reads = SIZES | {"OWN_KEYS": 16, "WINDOW": 0, "TMA": bulk}
    limit = 227 << 10 if capability == HOPPER else 163 << 10
    for kernel in (kernels.forward_kernel, kernels.query_gradient_kernel):
        assert 0 < compiled(kernel, reads, capability=capability, bulk=bulk) < limit


def test_context_gradient_kernel() -> None:
    from dflash_offline.attention import interval_kernels as kernels

    assert 0 < compiled(kernels.context_gradient_kernel, SIZES | {"WINDOW": 0, "SPLITS": 2}, capability=HOPPER) < 227 << 10
