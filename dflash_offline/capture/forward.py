"""Batches of rows -> hidden states of the tapped layers.

Rows are packed, one after another (``target/packed.py``), or, where the target's attention does not allow it, padded on
the right to the longest of their batch. On a GPU the layers are compiled one by one with symbolic sizes, so that one
compilation (padded: two, where a batch holds a single row) serves every bucket; recompilations are counted. A batch that
does not fit into memory is halved, and so is the token budget of its bucket from then on.

Tensor legend: T tokens of a row, N token places of a batch, K taps, H hidden.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dflash_offline.capture.checks import check_packing, check_padding
from dflash_offline.errors import TargetError
from dflash_offline.figures import counted
from dflash_offline.graphs import compiled_graphs
from dflash_offline.target import Target
from dflash_offline.target.facts import text_part
from dflash_offline.target.merged import value_row
from dflash_offline.target.packed import prepare_cudnn

GPU_MULTIPLE = 8  # padded lengths are a multiple of this: aligned loads in attention kernels


@dataclass
class Batch:
    """Rows that went through the target together.

    Attributes:
        lengths: tokens of each row.
        starts: where each row begins along N.
        taps: K tensors ``[N, H]`` on the target's device, in its dtype; places between the rows mean nothing.
        ready: on a GPU, the event after which ``taps`` hold their values.
    """

    lengths: list[int]
    starts: list[int]
    taps: list[torch.Tensor]
    ready: torch.cuda.Event | None = None

    def row(self, b: int) -> list[torch.Tensor]:
        """Row ``b``: K tensors ``[T, H]``, views."""
        return [tap[self.starts[b] : self.starts[b] + self.lengths[b]] for tap in self.taps]

    def hidden(self, b: int) -> torch.Tensor:
        """Row ``b``: bf16 ``[T, K, H]``."""
        return torch.stack(self.row(b), dim=1).to(torch.bfloat16)

    def used_on(self, device: torch.device) -> None:
        """The current stream of ``device`` reads the taps: their memory is not to be given out again before it has."""
        if device.type == "cuda":
            for tap in self.taps:
                tap.record_stream(torch.cuda.current_stream(device))


class Forwarder:
    """Runs batches through a target.

    Args:
        packed: pack the rows of a batch; padded all the same, and said, if trying it out shows that the target cannot be packed.
        compile_layers: compile the layers one by one; has an effect on GPUs only.
        is_hybrid: the target carries a state over tokens; then padding is tried out first.
        say: takes a line that the user should see.
    """

    def __init__(
        self, target: Target, *, compile_layers: bool, is_hybrid: bool, vocab_size: int, say: Callable[[str], None], packed: bool = False
    ) -> None:
        self.target, self._say = target, say
        self.limits: dict[int, int] = {}  # bucket -> most token places of a batch, after it ran out of memory
        self.tokens = self.padded_tokens = 0
        self.is_cuda = target.device.type == "cuda"
        self.compiled = compile_layers and self.is_cuda
        reason = check_packing(target, vocab_size) if packed else None
        self.packs = packed and reason is None
        if reason:
            say(f"rows are padded, not packed: {reason}")
        self.pads = self.packs or not is_hybrid or check_padding(target, vocab_size)
        if not self.pads:
            say("padding reaches the hidden states of this target, so only rows of equal length share a batch")
        if self.is_cuda:
            prepare_process()
        if self.compiled:
            target.compile_layers(dynamic=True)

    def prepare(self, lengths: list[int]) -> None:
        """Have the faster attention kernel ready for packed rows of these lengths, on a GPU that has it; said where it has not."""
        if self.packs and self.is_cuda:
            text = text_part(self.target.model.config)
            row = value_row(self.target.layers)
            reason = prepare_cudnn(text, device=self.target.device, dtype=self.target.dtype, lengths=lengths, value_row=row)
            if reason:
                self._say(f"attention by the flash kernel, not by cuDNN: {reason}")

    @property
    def num_graphs(self) -> int:
        """Graphs compiled so far in this process."""
        return compiled_graphs() if self.compiled else 0

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
                fitting = self._within(self.limits.get(bucket), rows, part)
                if len(fitting) < len(part):
                    pending.insert(0, range(fitting.stop, part.stop))
                batch = self._try(rows[fitting.start : fitting.stop])
                if batch is None:
                    self._halve([len(row) for row in rows[fitting.start : fitting.stop]], bucket)
                    pending.insert(0, fitting)
                    continue
                yield fitting, batch

    def _groups(self, rows: list[np.ndarray]) -> list[range]:
        """Neighbours that may share a batch: all rows, or those of equal length where padding is not safe."""
        if self.pads:
            return [range(len(rows))]
        starts = [0] + [i for i in range(1, len(rows)) if len(rows[i]) != len(rows[i - 1])] + [len(rows)]
        return [range(a, b) for a, b in zip(starts, starts[1:], strict=False)]

    def _places(self, lengths: list[int]) -> int:
        """Token places of a batch of rows this long."""
        if self.packs:
            return sum(lengths)
        longest = max(lengths)
        if self.is_cuda and self.pads:
            longest = -(-longest // GPU_MULTIPLE) * GPU_MULTIPLE
        return longest * len(lengths)

    def _within(self, limit: int | None, rows: list[np.ndarray], part: range) -> range:
        """As many of the part's first rows as the limit allows, one at least."""
        if limit is None:
            return part
        stop = part.start + 1
        while stop < part.stop and self._places([len(row) for row in rows[part.start : stop + 1]]) <= limit:
            stop += 1
        return range(part.start, stop)

    def _try(self, rows: list[np.ndarray]) -> Batch | None:
        """One forward; None when the device is out of memory."""
        lengths = [len(row) for row in rows]
        places = self._places(lengths)
        try:
            if self.packs:
                starts = [0, *np.cumsum(lengths[:-1]).tolist()]
                taps = self.target.packed_taps(rows)
            else:
                longest = places // len(rows)
                starts = [b * longest for b in range(len(rows))]
                taps = self.target.taps(self._padded(rows, longest).to(self.target.device, non_blocking=True))
        except torch.OutOfMemoryError:
            return None
        except torch._dynamo.exc.TorchDynamoException as error:
            first = str(error).strip().splitlines()[0][:200]
            raise TargetError(f"the target's layers cannot be compiled ({first}); set [target] compile = false") from error
        self.tokens += sum(lengths)
        self.padded_tokens += places
        ready = None
        if self.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        return Batch(lengths, starts, [tap.flatten(0, 1) for tap in taps], ready)

    def _padded(self, rows: list[np.ndarray], longest: int) -> torch.Tensor:
        ids = torch.zeros(len(rows), longest, dtype=torch.long, pin_memory=self.is_cuda)
        for b, row in enumerate(rows):
            ids[b, : len(row)] = torch.from_numpy(np.asarray(row, dtype=np.int64))
        return ids

    def _halve(self, lengths: list[int], bucket: int) -> None:
        torch.cuda.empty_cache()
        if len(lengths) == 1:
            raise TargetError(
                f"{self.target.device}: a single row of {lengths[0]} tokens does not fit into memory; lower [corpus] max_length, "
                "capture fewer layers, or use a GPU with more memory"
            )
        self._lower(bucket, self._places(lengths), f"with {counted(len(lengths), 'row')} of up to {max(lengths)} tokens")

    def make_room(self, bucket: int, lengths: list[int]) -> bool:
        """Halve the budget of a bucket because a batch of these lengths could not be taken off the device; False if it was a single row."""
        torch.cuda.empty_cache()
        places = self._places(lengths)
        if len(lengths) > 1 and self.limits.get(bucket, places) > places // 2:  # else batches have become smaller since
            self._lower(bucket, places, "while rows were taken off the GPU")
        return len(lengths) > 1

    def _lower(self, bucket: int, places: int, when: str) -> None:
        self.limits[bucket] = places // 2
        self._say(f"out of memory {when}: bucket {bucket} goes on with at most {places // 2} tokens a batch instead of {places}")


def prepare_process() -> None:
    """Let each kind of layer have its own graph; fail loudly where one would fall back to uncompiled code; share the interpreter finely."""
    import torch.fx.experimental._config as shapes

    # each launch hands the interpreter's lock back and forth with the threads that write; waiting 5 ms for it would starve the GPU
    sys.setswitchinterval(min(sys.getswitchinterval(), 2e-4))
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 64)
    config.fail_on_recompile_limit_hit = True
    # two sizes that are equal by chance in the first batch (tokens and hidden size, say) must not be taken for one
    shapes.use_duck_shape = False
