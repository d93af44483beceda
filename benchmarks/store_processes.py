"""A store read as training on a GPU reads it: whole micro-batches, by some processes, codes through shared memory into pinned memory."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from made_corpus import write_corpus

from dflash_offline import store
from dflash_offline.config.train import TrainConfig
from dflash_offline.corpus import Corpus
from dflash_offline.dataset import BatchLoader, BatchShape, Job, processes_for

BLOCK_SIZE = 16


def write_rows(folder: Path, lengths: list[int]) -> None:
    """Rows of these lengths, the tokens those of the benchmark's stores."""
    rows = [np.arange(length, dtype=np.int32) for length in lengths]
    write_corpus(folder, rows, [np.ones(length, np.uint8) for length in lengths], key="benchmark")


class TrainingReader:
    """Call it with sample numbers; from as many threads as there are processes."""

    def __init__(self, root: Path, corpus: Path) -> None:
        self.processes = processes_for(1)
        opened = store.HiddenStateStore(root, verify="off")
        self._lengths, self._train = opened.lengths, TrainConfig()
        self._loader = BatchLoader(
            Corpus.open(corpus), opened, np.arange(len(opened)), self._train, taps=list(range(opened.num_taps)),
            block_size=BLOCK_SIZE, pin=torch.cuda.is_available(), processes=self.processes,
        )  # fmt: skip
        with ThreadPoolExecutor(self.processes) as threads:  # each takes one, which is a matter of seconds
            list(threads.map(self, [[0]] * self.processes))

    def __call__(self, numbers: list[int]) -> Any:
        shape = BatchShape(0, int(self._lengths[numbers].sum()), len(numbers) * self._train.anchors)
        return self._loader.load(Job(0, 0, 0, numbers, shape))

    def close(self) -> None:
        self._loader.close()


def readers(folders: dict[str, Path], corpus: Path) -> dict[str, Callable[[list[int]], Any]]:
    """``{way: read}`` of some stores."""
    return {f"{name} as training reads it": TrainingReader(folder, corpus) for name, folder in folders.items()}
