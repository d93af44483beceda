"""The rate of a large matrix product: the yardstick of the speed benchmarks.

A GPU at its power limit lowers its clock, so one number does not say it: a cool GPU multiplies faster for a moment than
it does for seconds, and a training step or a capture runs for days. Both rates are recorded, and what is measured is
compared with both.
"""

import time

import torch

BURST = 20  # products, a quarter of a tenth of a second
SUSTAINED_S = 2.0


def matrix_rates(device: torch.device | str, dtype: torch.dtype) -> dict[str, float]:
    """TFLOP/s of 8192^3 products (CPU: 256^3).

    Returns:
        ``matmul_tflops``: 20 products in a row after half a second of rest; ``matmul_sustained_tflops``: the last
        fifth of two seconds of them.
    """
    device = torch.device(device)
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)

    def seconds(count: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(count):
            torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) / count

    seconds(3)
    time.sleep(0.5)
    burst = seconds(BURST)
    count = max(1, int(SUSTAINED_S / 5 / burst)) if device.type == "cuda" else BURST
    sustained = [seconds(count) for _ in range(5)][-1]
    return {name: round(2 * size**3 / took / 1e12, 3) for name, took in (("matmul_tflops", burst), ("matmul_sustained_tflops", sustained))}
