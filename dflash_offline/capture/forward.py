"""Batches of rows -> hidden states of the tapped layers.

Rows are padded on the right to the longest of their batch; the plan sorts rows by length, so little is padded. On a GPU
the layers are compiled one by one with symbolic batch and length, so that one compilation (two, where a batch holds a
single row) serves every bucket; recompilations are counted. A batch that does not fit into memory is halved, and so is
every later batch of its bucket.

Tensor legend: B rows, T tokens (padded), K taps, H hidden.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dflash_offline.capture.checks import check_padding
from dflash_offline.errors import TargetError
from dflash_offline.target import Target

GPU_MULTIPLE = 8  # lengths are padded to a multiple of this: aligned loads in attention kernels


@dataclass
class Batch:
    """Rows that went through the target together.

    Attributes:
        lengths: tokens of each row.
        taps: K tensors ``[B, T, H]`` on the target's device, in its dtype; rows at or beyond a row's length mean nothing.
        ready: on a GPU, the event after which ``taps`` hold their values.
    """

    lengths: list[int]
    taps: list[torch.Tensor]
    ready: torch.cuda.Event | None = None

    def hidden(self, b: int, start: int = 0) -> torch.Tensor:
        """Row ``b`` from token ``start`` on: bf16 ``[T, K, H]``."""
        return torch.stack([tap[b, start : self.lengths[b]] for tap in self.taps], dim=1).to(torch.bfloat16)


class Forwarder:
    """Runs batches through a target.

    Args:
        compile_layers: compile the layers one by one; has an effect on GPUs only.
        is_hybrid: the target carries a state over tokens; then padding is tried out first.
        say: takes a line that the user should see.
    """

    def __init__(self, target: Target, *, compile_layers: bool, is_hybrid: bool, vocab_size: int, say: Callable[[str], None]) -> None:
        self.target, self._say = target, say
        self.limits: dict[int, int] = {}  # bucket -> most rows of a batch, after it ran out of memory
        self.tokens = self.padded_tokens = 0
        self.is_cuda = target.device.type == "cuda"
        self.compiled = compile_layers and self.is_cuda
        self.pads = not is_hybrid or check_padding(target, vocab_size)
        if not self.pads:
            say("padding reaches the hidden states of this target, so only rows of equal length share a batch")
        if self.compiled:
            prepare_compiler()
            target.compile_layers(dynamic=True)

    @property
    def num_graphs(self) -> int:
        """Graphs compiled so far in this process."""
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"]) if self.compiled else 0

    @property
    def padding(self) -> float:
        """Share of what was computed that held no token."""
        return 1 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0

    def run(self, rows: list[np.ndarray], bucket: int) -> Iterator[tuple[range, Batch]]:
        """Run rows of one bucket, in order: pairs of (which of the rows, their batch).

        One pair, unless the target cannot pad or memory ran out.

        Raises:
            TargetError: a single row does not fit into the device's memory.
        """
        for group in self._groups(rows):
            pending = [group]
            while pending:
                part = pending.pop(0)
                limit = self.limits.get(bucket)
                if limit is not None and len(part) > limit:
                    pending[:0] = [range(part.start, part.start + limit), range(part.start + limit, part.stop)]
                    continue
                batch = self._try(rows[part.start : part.stop])
                if batch is None:
                    self._halve(len(part), bucket, max(len(row) for row in rows[part.start : part.stop]))
                    pending.insert(0, part)
                    continue
                yield part, batch

    def _groups(self, rows: list[np.ndarray]) -> list[range]:
        """Neighbours that may share a batch: all rows, or those of equal length where padding is not safe."""
        if self.pads:
            return [range(len(rows))]
        starts = [0] + [i for i in range(1, len(rows)) if len(rows[i]) != len(rows[i - 1])] + [len(rows)]
        return [range(a, b) for a, b in zip(starts, starts[1:], strict=False)]

    def _try(self, rows: list[np.ndarray]) -> Batch | None:
        """One forward; None when the device is out of memory."""
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        if self.is_cuda and self.pads:
            longest = -(-longest // GPU_MULTIPLE) * GPU_MULTIPLE
        ids = torch.zeros(len(rows), longest, dtype=torch.long, pin_memory=self.is_cuda)
        for b, row in enumerate(rows):
            ids[b, : len(row)] = torch.from_numpy(np.asarray(row, dtype=np.int64))
        try:
            taps = self.target.taps(ids.to(self.target.device, non_blocking=True))
        except torch.OutOfMemoryError:
            return None
        except torch._dynamo.exc.TorchDynamoException as error:
            first = str(error).strip().splitlines()[0][:200]
            raise TargetError(f"the target's layers cannot be compiled ({first}); set [target] compile = false") from error
        self.tokens += sum(lengths)
        self.padded_tokens += ids.numel()
        ready = None
        if self.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        return Batch(lengths, taps, ready)

    def _halve(self, num_rows: int, bucket: int, longest: int) -> None:
        torch.cuda.empty_cache()
        if num_rows == 1:
            raise TargetError(
                f"{self.target.device}: a single row of {longest} tokens does not fit into memory; lower [corpus] max_length, "
                "capture fewer layers, or use a GPU with more memory"
            )
        self.limits[bucket] = num_rows // 2
        self._say(
            f"out of memory with {num_rows} rows of {longest} tokens: bucket {bucket} goes on with at most {num_rows // 2} rows a batch"
        )


def prepare_compiler() -> None:
    """Let each kind of layer have its own graph; fail loudly where one would fall back to uncompiled code."""
    import torch.fx.experimental._config as shapes

    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 64)
    config.fail_on_recompile_limit_hit = True
    # two sizes that are equal by chance in the first batch (tokens and hidden size, say) must not be taken for one
    shapes.use_duck_shape = False
