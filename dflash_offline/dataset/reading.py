"""Micro-batches read in processes of their own.

The thread that drives a GPU needs the interpreter for every launch. Reading needs it for every chunk and its checksum,
and draws anchors besides: threads of one process wait for each other, and a small drafter's steps, tens of milliseconds
of short kernels, take nearly twice as long (43 ms against 26, SmolLM2's shape on an H200). So a rank on a GPU has its
batches made by child processes, which know nothing of the GPU; one alone would just keep up with such steps. Codes come
through memory that both have mapped; what is small comes through a socket.

A child ends with its parent, however that ends: its socket closes. Signals are the parent's to handle.
"""

import contextlib
import mmap
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_offline.attention import BlockLayout
from dflash_offline.dataset.batches import BatchLoader, Job, MicroBatch
from dflash_offline.errors import DFlashError, TrainError
from dflash_offline.store import EncodedBatch

_MOST_PROCESSES = 4
_PATIENCE_S = 5.0  # for a child that was told to end


class SharedMemory:
    """Memory of a file without a name, as large as was ever asked for; mapped anew where another process let it grow."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._mapped = descriptor, torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """uint8 ``[size]``: always the same memory."""
        if size > len(self._mapped):
            if size > os.fstat(self._descriptor).st_size:
                os.ftruncate(self._descriptor, size)
            length = os.fstat(self._descriptor).st_size
            self._mapped = torch.from_numpy(np.frombuffer(mmap.mmap(self._descriptor, length), np.uint8))
        return self._mapped[:size]


def processes_for(ranks: int) -> int:
    """Processes that read for one of the ranks on this host: a quarter of its cores, four at the most."""
    return max(1, min(_MOST_PROCESSES, len(os.sched_getaffinity(0)) // (4 * ranks)))


class ReadingProcesses:
    """Child processes that all make the same batches; each thread that wants one takes whichever is free.

    Args:
        loader: what the children make their batches with, opened anew there.
    """

    def __init__(self, loader: BatchLoader, count: int) -> None:
        self._all = [ReadingProcess(loader) for _ in range(count)]
        self._free: queue.SimpleQueue[ReadingProcess] = queue.SimpleQueue()
        for process in self._all:
            self._free.put(process)

    def __len__(self) -> int:
        return len(self._all)

    def load(self, job: Job) -> MicroBatch:
        """See ``ReadingProcess.load``."""
        process = self._free.get()
        try:
            return process.load(job)
        finally:
            self._free.put(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._all]

    def close(self) -> None:
        """End them; not while one is reading."""
        for process in self._all:
            process.close()


class ReadingProcess:
    """A child process, seen from its parent. One thread at a time may use it.

    Args:
        loader: what the child makes its batches with, opened anew there.
    """

    def __init__(self, loader: BatchLoader) -> None:
        self._loader, self._described = loader, False
        with contextlib.ExitStack() as opened:  # a limit on processes or descriptors may be met at any of these
            try:
                near, far = socket.socketpair()
                opened.callback(near.close)
                opened.callback(far.close)
                descriptor = _unnamed_file()
                opened.callback(os.close, descriptor)
                self._process = _start(far.fileno(), descriptor)
            except OSError as error:
                raise TrainError(
                    f"a process that reads batches cannot be started ({error.strerror}); raise the limits on processes and open files "
                    '(ulimit -u, ulimit -n), or set [train] reader = "threads"'
                ) from None
            opened.pop_all()
            far.close()
        self._memory, self._connection = SharedMemory(descriptor), Connection(near.detach())
        self.close = weakref.finalize(self, _end, self._process, self._connection, descriptor)

    def load(self, job: Job) -> MicroBatch:
        """``BatchLoader.load`` of this job, made by the child.

        Raises:
            TrainError: the child is gone.
            Exception: whatever it raised.
        """
        began = time.perf_counter()
        self._loader.check_content(job)  # here, for all children: each would check the whole store again
        if not self._described:  # only now: it may be larger than the socket holds, and would wait for each child to be up
            self._send(_describe(self._loader))
            self._described = True
        self._send(job)
        answer = self._receive()
        if isinstance(answer, BaseException):
            raise answer
        store, taps, tokens = self._loader.store, answer["taps"], int(answer["encoded"]["offsets"][-1])
        size = store.codec.block_bytes(len(taps), tokens)
        block = store.take_memory(size)
        block.copy_(self._memory.take(size))
        encoded = EncodedBatch(store.codec, taps, store.codec.views(block, len(taps), tokens), **answer["encoded"])
        blocks, given = BlockLayout(**_tensors(answer["blocks"])), _tensors(answer["tensors"])
        if self._loader.pin:
            blocks, given = blocks.pin(), {name: values.pin_memory() for name, values in given.items()}
        spans, seeds = answer["spans"], answer["noise_seeds"]
        return MicroBatch(job, spans, blocks, noise_seeds=seeds, encoded=encoded, read_s=time.perf_counter() - began, **given)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise self._gone() from None

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            raise self._gone() from None

    def _gone(self) -> TrainError:
        try:
            status = self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            status = None
        how = f"was killed by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"
        memory = "; memory may have run out" if status == -signal.SIGKILL else ""
        return TrainError(
            f"a process that reads batches (pid {self.pid}) {how}{memory}; run the same command again, it goes on from the "
            'last checkpoint. [train] reader = "threads" reads without such processes'
        )


def serve(connection_descriptor: int, memory_descriptor: int) -> None:
    """The child: answers jobs until its parent's end of the socket closes."""
    torch.set_num_threads(1)
    connection, memory = Connection(connection_descriptor), SharedMemory(memory_descriptor)
    loader: BatchLoader | None = None
    try:
        described = connection.recv()
        while True:
            job = connection.recv()
            try:
                loader = loader or _open(described, memory)
                answer = _answer(loader.read(job))
            except Exception as error:
                answer = _portable(error)
            connection.send(answer)
    except (EOFError, OSError):
        return


def _answer(batch: MicroBatch) -> dict[str, Any]:
    """What ``ReadingProcess.load`` needs beside the codes, which lie in the shared memory."""
    return {
        "taps": batch.encoded.taps,
        "encoded": {name: getattr(batch.encoded, name) for name in ("offsets", "input_ids", "loss_mask", "num_bytes")},
        "blocks": _arrays(vars(batch.blocks)),
        "tensors": _arrays({name: getattr(batch, name) for name in ("anchor_tokens", "labels", "supervised")}),
        "spans": batch.spans,
        "noise_seeds": batch.noise_seeds,
    }


def _arrays(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in values.items()}


def _tensors(values: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in values.items()}


def _describe(loader: BatchLoader) -> dict[str, Any]:
    settings = {"stored": loader.stored, "train": loader.train, "taps": loader.taps, "block_size": loader.block_size}
    return {"corpus": loader.corpus.folder, "open_store": loader.store.opening(checked=True), "settings": settings}


def _open(described: dict[str, Any], memory: SharedMemory) -> BatchLoader:
    from dflash_offline.corpus import Corpus

    store = described["open_store"]()
    store.take_memory = memory.take
    return BatchLoader(Corpus.open(described["corpus"]), store, **described["settings"], pin=False)


def _start(connection_descriptor: int, memory_descriptor: int) -> subprocess.Popen[bytes]:
    """The child, which imports from where this process does and gets no signal that is its parent's to handle, not even while it starts."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from dflash_offline.dataset.reading import serve; "
        f"serve({connection_descriptor}, {memory_descriptor})"
    )
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))  # the child inherits it and keeps it
    try:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=(connection_descriptor, memory_descriptor),
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _portable(error: Exception) -> Exception:
    """The error as the parent can get it: some are made from more than their text."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        pass
    return DFlashError(str(error)) if isinstance(error, DFlashError) else RuntimeError(f"{type(error).__name__}: {error}")


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):  # memory that no mount limits: containers often have 64 MB of /dev/shm
        return os.memfd_create("dflash-batch")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _end(process: subprocess.Popen[bytes], connection: Connection, descriptor: int) -> None:
    connection.close()
    os.close(descriptor)
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
