"""Reading a store from Python: misuse, empty ranges, few file descriptors, forks and interrupts meanwhile."""

import ctypes
import errno
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_store import LENGTHS, H, K, folder_in_memory, make_store, same_bits

from dflash_offline import store
from dflash_offline.errors import StoreError
from dflash_offline.store import scatter
from dflash_offline.store.threads import ReadingThreads


@pytest.fixture(scope="module")
def stores() -> Iterator[dict[str, Path]]:
    with folder_in_memory() as folder:
        for codec in ("bf16", "lossless", "int4"):
            make_store(folder / codec, codec)
        yield {codec: folder / codec for codec in ("bf16", "lossless", "int4")}


def test_a_store_and_a_sample_say_in_a_line_what_they_are(stores: dict[str, Path]) -> None:
    opened = store.HiddenStateStore(stores["int4"])
    what = f"{2 * len(LENGTHS)} samples, {2 * sum(LENGTHS)} tokens, int4, layers [1, 2, 3]"
    assert repr(opened) == f"<HiddenStateStore {stores['int4']}: {what}>"
    assert re.fullmatch(r"<sample 1, part-00000: 200 tokens, 134 trained on, layers \[1, 2, 3\]>", repr(opened[1]))


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda s: s[0:2], r"take one sample at a time, as store\[0\]"),
        (lambda s: s[0][3], r"tokens = 3: give a slice"),
        (lambda s: s[0].hidden_states(layers=1), "layers = 1: give a list of positions along the 3 captured layers"),
        (lambda s: s[0].hidden_states(layers=[3]), r"of layer ids, which are \[1, 2, 3\], store.positions\(\[...\]\) makes them"),
        (lambda s: s.positions(["last"]), r"layer last was not captured; captured are \[1, 2, 3\]"),
        (lambda s: store.HiddenStateStore(s.path, verify="x"), "verify = 'x'; known are 'deep', 'sizes', 'off'"),
    ],
)
def test_misuse_is_a_clear_error(stores: dict[str, Path], misuse: Any, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        misuse(store.HiddenStateStore(stores["bf16"]))


@pytest.mark.parametrize("codec", ["bf16", "lossless", "int4"])
def test_an_empty_range_reads_nothing_wherever_it_lies(stores: dict[str, Path], codec: str) -> None:
    opened = store.HiddenStateStore(stores[codec])
    for sample in (opened[i] for i in range(len(opened))):
        for at in {0, len(sample) // 2, len(sample)} | {edge - 64 * (edge // 64) for edge in opened.offsets.tolist()} | {59, 63, 64}:
            assert sample[at:at].shape == (0, K, H) and sample[at : at - 5 if at > 5 else 0].shape[1:] == (K, H)
    assert opened[7].hidden_states(tokens=slice(20, 5)).shape == (0, K, H)


LIMITED = textwrap.dedent("""
    import os, resource, sys
    from concurrent.futures import ThreadPoolExecutor
    from dflash_offline import store
    opened = store.HiddenStateStore(sys.argv[1], threads=4)
    held = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + int(sys.argv[2]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    batch = list(range(len(opened))) * 10
    with ThreadPoolExecutor(2) as users:
        for read in [users.submit(opened.read_encoded, batch) for _ in range(6)]:
            read.result()
    print("read")
""")


def test_a_batch_of_many_samples_needs_few_descriptors(stores: dict[str, Path]) -> None:
    """Not one for each sample and array, which a limit of 1024 would not allow."""
    command = [sys.executable, "-c", LIMITED, str(stores["int4"])]
    ran = subprocess.run([*command, "12"], capture_output=True, text=True, timeout=120)
    assert ran.stdout == "read\n", ran.stderr[-2000:]


def test_too_few_descriptors_are_named_with_what_to_do(stores: dict[str, Path]) -> None:
    opened, limits = store.HiddenStateStore(stores["bf16"], threads=1), resource.getrlimit(resource.RLIMIT_NOFILE)
    opened.read_encoded([0])
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 3, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            taken.extend(os.open("/dev/null", os.O_RDONLY) for _ in iter(int, 1))
        with pytest.raises(StoreError, match=r"Too many open files; tokens .* Raise the limit \(`ulimit -n 4096`\)"):
            opened.read_encoded([0])
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


FORKED = textwrap.dedent("""
    import os, signal, sys, threading, time
    from dflash_offline.store import checksums
    made = checksums._table_for
    began = threading.Event()
    def slowly(length):
        began.set()
        time.sleep(0.2)
        return made(length)
    checksums._table_for = slowly
    from dflash_offline import store
    opened = store.HiddenStateStore(sys.argv[1], threads=2)
    reader = threading.Thread(target=opened.read_encoded, args=([0, 1, 2],))
    reader.start()
    began.wait()
    child = os.fork()
    if not child:
        signal.alarm(20)
        opened.read_encoded([0, 1, 2])
        os._exit(7)
    reader.join()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")


def test_a_child_forked_while_checks_are_learnt_reads_on(stores: dict[str, Path]) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, str(stores["lossless"])], capture_output=True, text=True, timeout=120
    )
    assert ran.stdout == "7\n", ran.stderr[-2000:]


def test_an_interrupt_waits_for_the_reads_that_run() -> None:
    threads, running = ReadingThreads(3), []

    def read() -> int:
        running.append(1)
        try:
            time.sleep(0.4)
        finally:  # the interrupt comes out of one of them
            running.pop()
        return 1

    timer = threading.Timer(0.15, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        threads.run([read] * 30)
    assert not running
    threads.close()


def test_reads_go_on_alone_where_no_thread_is_to_be_had() -> None:
    threads = ReadingThreads(4)

    def refuse(job: Any) -> Any:
        raise RuntimeError("can't start new thread")

    threads._submit = refuse  # type: ignore[method-assign]
    assert threads.run([lambda: 2] * 5) == 10


def test_a_read_that_the_system_does_piece_by_piece(stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux takes 1024 places and 2 GiB less a page at a time; here 3 places and 1000 bytes, and every other call is interrupted."""
    calls, preadv = [], scatter._preadv

    def little(descriptor: int, places: int, count: int, offset: int) -> int:
        calls.append(count)
        if len(calls) % 2:
            ctypes.set_errno(errno.EINTR)
            return -1
        own = np.ctypeslib.as_array(ctypes.cast(places, ctypes.POINTER(ctypes.c_int64)), (count, 2)).copy()
        before = np.cumsum(own[:, 1]) - own[:, 1]
        own[:, 1] = np.clip(1000 - before, 0, own[:, 1])
        return preadv(descriptor, own.ctypes.data, count, offset)

    opened = store.HiddenStateStore(stores["bf16"], threads=1)
    expected = opened.read_encoded([3, 7]).decode()
    monkeypatch.setattr(scatter, "_preadv", little)
    monkeypatch.setattr(scatter, "MOST_PLACES", 3)
    assert same_bits(opened.read_encoded([3, 7]).decode(), expected)
    assert max(calls) == 3 and len(calls) > 50


@pytest.mark.parametrize("codec", ["bf16", "lossless", "int4"])
def test_no_tokens_are_no_numbers(stores: dict[str, Path], codec: str) -> None:
    sample = store.HiddenStateStore(stores[codec])[1]
    assert sample.hidden_states_numpy([0, 2], slice(5, 5)).shape == tuple(sample.hidden_states([0, 2], slice(5, 5)).shape) == (0, 2, H)


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/x", "memory://u:secret@b/x", "http://host/x?token=secret", "file:///tmp/x#secret"])
def test_a_url_with_a_secret_is_refused_and_written_nowhere(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(StoreError, match="credentials into the environment") as caught:
        store.HiddenStateStore(url)
    assert "secret" not in str(caught.value) and not list(tmp_path.iterdir())
