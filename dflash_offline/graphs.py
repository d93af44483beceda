"""CUDA graphs of functions that work on tensors at fixed places, and how many graphs torch.compile has made."""

from collections.abc import Callable

import torch


def record(
    function: Callable[[], None], *, say: Callable[[str], None], warm_up: Callable[[], None] | None = None
) -> torch.cuda.CUDAGraph | None:
    """Record what a function does, to be replayed without Python and without launching kernel by kernel.

    It is run twice before (``warm_up`` in its place where given), for what libraries do at their first call; recording
    itself computes nothing.

    Returns:
        None where it cannot be recorded, which is said.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            (warm_up or function)()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            function()
    except RuntimeError as error:
        torch.cuda.synchronize()
        say(f"steps are not recorded as CUDA graphs ({str(error).splitlines()[0][:120]}); they run one kernel at a time")
        return None
    return graph


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
