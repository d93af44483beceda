"""Batches out of a real store: order, shapes, contents, reading ahead."""

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_runs as runs

from dflash_offline import dataset, keys
from dflash_offline.config import RunConfig, TrainConfig
from dflash_offline.corpus import Corpus
from dflash_offline.dataset import BatchLoader, BatchShape, Job, MicroBatch, Prefetcher, TrainingOrder, stored_indices
from dflash_offline.dataset import order as dataset_order
from dflash_offline.dataset.order import share_blocks
from dflash_offline.errors import TrainError
from dflash_offline.layout import Layout
from dflash_offline.store import HiddenStateStore

BLOCK = 4


@pytest.fixture(scope="module")
def opened(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, conversations: list[dict[str, Any]]
) -> tuple[Corpus, HiddenStateStore]:
    folder = runs.make_inputs(tmp_path_factory.mktemp("inputs"), model=tiny_target, conversations=conversations)
    config = RunConfig.load(folder / "run.toml")
    layout = Layout(config.root_dir)
    return Corpus.open(layout.corpus(keys.corpus_key(config))), HiddenStateStore(layout.store(keys.capture_key(config)))


def settings(**changes: Any) -> TrainConfig:
    values = {"tokens_per_batch": 640, "slots_per_batch": 256, "micro_batches_per_step": 3, "anchors": 8, "epochs": 3}
    return TrainConfig(**(values | changes))


def make_loader(opened: tuple[Corpus, HiddenStateStore], *, taps: list[int] | None = None, **changes: Any) -> BatchLoader:
    corpus, store = opened
    return BatchLoader(
        corpus, store, stored_indices(corpus, store), settings(**changes), taps=taps or [0, 1, 2], block_size=BLOCK, pin=False
    )


# ---- order


def test_every_epoch_trains_each_row_once_and_no_held_out_one(opened: tuple[Corpus, HiddenStateStore]) -> None:
    corpus = opened[0]
    order = TrainingOrder(corpus, settings(), block_size=BLOCK)
    epochs: dict[int, list[int]] = {}
    orders: dict[int, list[tuple[int, ...]]] = {}
    for number in range(order.total_steps):
        step = order.step(number)
        assert step.number == number and 1 <= len(step.micro_batches) <= 3
        for rows in step.micro_batches:
            assert {int(corpus.buckets[row]) for row in rows} == {step.bucket}
            shape = order.shapes[step.bucket]
            assert corpus.lengths[rows].sum() <= min(640, shape.context)
            epochs.setdefault(step.epoch, []).extend(rows.tolist())
            orders.setdefault(step.epoch, []).append(tuple(rows.tolist()))
    assert sorted(epochs) == [0, 1, 2]
    assert all(sorted(rows) == np.flatnonzero(~corpus.heldout).tolist() for rows in epochs.values())
    assert orders[0] != orders[1] and set(orders[0]) != set(orders[1])  # micro-batches mix anew, not only their order
    assert order.step(order.total_steps - 1).position == 3
    again = TrainingOrder(corpus, settings(), block_size=BLOCK)
    assert [rows.tolist() for rows in again.step(7).micro_batches] == [rows.tolist() for rows in order.step(7).micro_batches]


def test_buckets_share_a_number_of_blocks_where_that_adds_little() -> None:
    assert share_blocks([1024, 1000, 992, 960, 64, 64]) == {1024: 1024, 1000: 1024, 992: 992, 960: 960, 64: 64}
    assert share_blocks([8]) == {8: 8}
    for counts in ([1000, 980, 960, 940], [200, 194, 188]):  # never by more than 3 %, however near the next one is
        shared = share_blocks(counts)
        assert all(count <= kept <= count / 0.97 and shared[kept] == kept for count, kept in shared.items())


def test_padded_blocks_hold_every_micro_batch_and_are_shared(
    opened: tuple[Corpus, HiddenStateStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = TrainingOrder(opened[0], settings(), block_size=BLOCK).shapes
    monkeypatch.setattr(dataset_order, "MOST_ADDED", 0.9)
    shared = TrainingOrder(opened[0], settings(), block_size=BLOCK).shapes
    assert {bucket: shape.context for bucket, shape in shared.items()} == {bucket: shape.context for bucket, shape in plain.items()}
    assert len({shape.blocks for shape in plain.values()}) > 1
    assert {shape.blocks for shape in shared.values()} == {max(shape.blocks for shape in plain.values())}


@pytest.mark.parametrize(("epochs", "most", "share"), [(0.5, None, 0.5), (1.5, None, 1.5), (100, 7, None)])
def test_part_of_an_epoch_and_a_limit_of_steps(
    opened: tuple[Corpus, HiddenStateStore], epochs: float, most: int | None, share: float | None
) -> None:
    whole = TrainingOrder(opened[0], settings(epochs=1), block_size=BLOCK)
    order = TrainingOrder(opened[0], settings(epochs=epochs, max_steps=most), block_size=BLOCK)
    expected = most if share is None else share * whole.total_steps
    assert abs(order.total_steps - expected) <= (0 if most else 1)
    assert [rows.tolist() for rows in order.step(0).micro_batches] == [rows.tolist() for rows in whole.step(0).micro_batches]


def test_how_full_micro_batches_are_is_said_with_what_to_change(opened: tuple[Corpus, HiddenStateStore]) -> None:
    corpus = opened[0]
    longest = int(np.asarray(corpus.lengths).max())
    shared = {"micro_batches_per_step": 1, "anchors": 64, "slots_per_batch": 2 * 64 * BLOCK}
    tight = settings(tokens_per_batch=longest * 4 // 3, **shared)  # two of the long rows seldom fit
    order = TrainingOrder(corpus, tight, block_size=BLOCK)
    live, padded = np.zeros(2), np.zeros(2)
    for number in range(order.total_steps // 3):  # the first of three epochs
        step = order.step(number)
        for rows in step.micro_batches:
            loader = BatchLoader(corpus, opened[1], stored_indices(*opened), tight, taps=[0], block_size=BLOCK, pin=False)
            batch = loader.load(Job(number, 0, 0, rows, order.shapes[step.bucket]))
            live += batch.blocks.num_live, corpus.lengths[rows].sum()
            padded += batch.blocks.num_blocks, batch.blocks.num_context
    assert order.fill() == pytest.approx(tuple(live / padded))
    assert order.fill()[0] < 0.95 and f"tokens_per_batch = {longest * 4 // 3} could be 768" in order.fill_line()
    for tokens in (longest, 2 * longest):  # never two, and nearly always two
        other = TrainingOrder(corpus, settings(tokens_per_batch=tokens, **shared), block_size=BLOCK)
        assert "could be" not in other.fill_line()


def test_more_anchors_than_slots_still_fit(opened: tuple[Corpus, HiddenStateStore]) -> None:
    loader = make_loader(opened, anchors=512, slots_per_batch=40)
    order = TrainingOrder(opened[0], loader.train, block_size=BLOCK)
    for number in range(order.total_steps):
        step = order.step(number)
        for micro, rows in enumerate(step.micro_batches):
            batch = loader.load(Job(number, micro, step.epoch, rows, order.shapes[step.bucket]))
            assert 0 < batch.blocks.num_live <= 10


def test_nothing_to_train_on_is_said(opened: tuple[Corpus, HiddenStateStore]) -> None:
    corpus = Corpus.open(opened[0].folder)
    corpus.heldout = np.ones(len(corpus), bool)
    with pytest.raises(TrainError, match="no conversation is left to train on"):
        TrainingOrder(corpus, settings(), block_size=BLOCK)


# ---- contents


def test_a_micro_batch_holds_what_the_store_holds(opened: tuple[Corpus, HiddenStateStore]) -> None:
    corpus, store = opened
    loader = make_loader(opened, taps=[2, 0])
    rows = np.flatnonzero(~corpus.heldout)[:3]
    shape = BatchShape(0, int(corpus.lengths[rows].sum()) + 100, 40)
    batch = loader.load(Job(0, 0, 1, rows, shape))
    moved = dataset.to_device(batch, device=torch.device("cpu"), dtype=torch.float32, num_taps=2)
    assert moved.hidden_states.shape == (shape.context, 2 * 64)
    assert not moved.hidden_states[batch.num_tokens :].any()
    block = 0
    for row, (start, end) in zip(rows, batch.spans, strict=True):
        ids, mask = np.array(corpus.row(row).input_ids), np.array(corpus.row(row).loss_mask)
        sample = store[int(loader.stored[row])]
        assert end - start == len(ids) and np.array_equal(sample.input_ids, ids)
        assert torch.equal(moved.hidden_states[start:end], sample.hidden_states(layers=[2, 0]).flatten(1).float())
        while block < batch.blocks.num_live and int(batch.blocks.context_end[block]) < end:
            p = int(batch.blocks.anchor_positions[block])
            assert mask[p] and mask[p + 1] and int(batch.blocks.context_end[block]) == start + p
            assert int(batch.blocks.context_start[block]) == start and int(batch.anchor_tokens[block]) == ids[p]
            supervised = False
            for k in range(BLOCK):
                supervised = k == 1 and bool(mask[p + 1]) or k > 1 and supervised and p + k < len(ids) and bool(mask[p + k])
                assert bool(batch.supervised[block, k]) == supervised
                assert int(batch.labels[block, k]) == (ids[p + k] if supervised else 0)
            block += 1
    assert block == batch.blocks.num_live > 10
    assert not batch.supervised[block:].any()


def test_anchors_and_noise_of_a_row_do_not_depend_on_its_batch(opened: tuple[Corpus, HiddenStateStore]) -> None:
    corpus = opened[0]
    loader = make_loader(opened)
    rows = np.flatnonzero(~corpus.heldout)[:4]
    wide = BatchShape(0, int(corpus.lengths[rows].sum()), 64)

    def of_row(job: Job, row: int) -> tuple[list[int], torch.Tensor]:
        batch = loader.load(job)
        noisy = dataset.to_device(batch, device=torch.device("cpu"), dtype=torch.float32, num_taps=3, noise=0.1).hidden_states
        plain = dataset.to_device(batch, device=torch.device("cpu"), dtype=torch.float32, num_taps=3).hidden_states
        start, end = batch.spans[list(job.rows).index(row)]
        inside = (batch.blocks.context_start == start) & (torch.arange(wide.blocks) < batch.blocks.num_live)
        noise = (noisy - plain)[start:end].unflatten(-1, (3, -1))
        rms = plain[start:end].unflatten(-1, (3, -1)).square().mean(-1, keepdim=True).sqrt()
        assert (noise.abs() <= 0.1 * rms * 1.01).all() and (noise.abs() > 0.09 * rms).any() and abs(float((noise / rms).mean())) < 0.01
        return batch.blocks.anchor_positions[inside].tolist(), noisy[start:end]

    together, alone = of_row(Job(0, 0, 5, rows, wide), rows[2]), of_row(Job(9, 2, 5, [rows[2]], wide), rows[2])
    assert together[0] == alone[0] and torch.equal(together[1], alone[1])
    later = of_row(Job(9, 2, 6, [rows[2]], wide), rows[2])
    assert later[0] != alone[0] and not torch.equal(later[1], alone[1])
    assert dataset.noise_seed(0, 5, b"x") != dataset.noise_seed(1, 5, b"x") != dataset.noise_seed(1, 5, b"y")


def test_missing_rows_are_counted(opened: tuple[Corpus, HiddenStateStore]) -> None:
    corpus, store = opened
    wanted = Corpus.open(corpus.folder)
    wanted.hashes = np.array(corpus.hashes)
    wanted.hashes[[1, 4]] = 0
    with pytest.raises(TrainError, match=f"capture incomplete, {len(corpus) - 2}/{len(corpus)} rows"):
        stored_indices(wanted, store)


# ---- reading ahead


@dataclass
class Item:
    number: int
    nbytes: int = 100


def test_items_come_in_order_and_no_more_bytes_are_held_than_allowed() -> None:
    loaded: list[int] = []

    def load(number: int) -> Item:
        loaded.append(number)
        return Item(number)

    with Prefetcher(range(20), load, max_bytes=350) as reader:
        time.sleep(0.2)
        assert loaded == [0, 1, 2, 3] and reader.held_bytes == 300  # three held, one in the thread's hand
        assert [reader.take().number for _ in range(20)] == list(range(20))
        with pytest.raises(StopIteration):
            reader.take()


def test_items_loaded_several_at_once_come_in_the_order_of_their_jobs() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def load(number: int) -> Item:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.03 if number % 3 == 0 else 0.002)  # later ones are done before earlier ones
        with lock:
            running -= 1
        return Item(number)

    with Prefetcher(range(20), load, at_once=3) as reader:
        assert [reader.take().number for _ in range(20)] == list(range(20))
        with pytest.raises(StopIteration):
            reader.take()
    assert most == 3


@pytest.mark.parametrize("at_once", [1, 3])
def test_one_item_larger_than_the_bound_is_still_loaded(at_once: int) -> None:
    with Prefetcher(range(3), lambda number: Item(number, 1000), max_bytes=10, at_once=at_once) as reader:
        assert [reader.take().number for _ in range(3)] == [0, 1, 2]


def test_waiting_is_counted() -> None:
    def slowly(number: int) -> Item:
        time.sleep(0.05)
        return Item(number)

    with Prefetcher(range(3), slowly) as reader:
        for _ in range(3):
            reader.take()
        assert 0.1 < reader.waited_s < 1


@pytest.mark.parametrize("at_once", [1, 3])
def test_an_error_while_reading_reaches_the_trainer(at_once: int) -> None:
    def load(number: int) -> Item:
        if number == 2:
            raise TrainError("part-00001 is damaged")
        return Item(number)

    with Prefetcher(range(5), load, at_once=at_once) as reader:
        assert [reader.take().number for _ in range(2)] == [0, 1]
        with pytest.raises(TrainError, match="part-00001 is damaged"):
            reader.take()


@pytest.mark.parametrize("at_once", [1, 3])
def test_closing_early_ends_the_threads(at_once: int) -> None:
    before = threading.active_count()
    with Prefetcher(range(1000), Item, max_bytes=200, at_once=at_once) as reader:
        reader.take()
    assert threading.active_count() == before and reader.held_bytes == 0


def test_prefetched_micro_batches_are_those_loaded_one_by_one(opened: tuple[Corpus, HiddenStateStore]) -> None:
    loader = make_loader(opened)
    order = TrainingOrder(opened[0], loader.train, block_size=BLOCK)
    jobs = [
        Job(number, micro, order.step(number).epoch, rows, order.shapes[order.step(number).bucket])
        for number in range(6)
        for micro, rows in enumerate(order.step(number).micro_batches)
    ]
    with Prefetcher(jobs, loader.load, max_bytes=300_000) as reader:
        for job in jobs:
            ahead, now = reader.take(), loader.load(job)
            assert isinstance(ahead, MicroBatch) and ahead.job is job
            assert torch.equal(ahead.encoded.decode("cpu"), now.encoded.decode("cpu"))
            assert torch.equal(ahead.blocks.context_end, now.blocks.context_end) and torch.equal(ahead.labels, now.labels)
