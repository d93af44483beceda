"""The machine: its GPUs, the target's folder, memory, limits of the shell that starts the run."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from dflash_offline.codecs import check_hidden_size
from dflash_offline.config import DEMO_MODEL, RunConfig
from dflash_offline.doctor.check import Check, wants_gpu
from dflash_offline.doctor.conversations import folder_to_look_into, tokenizer
from dflash_offline.errors import DFlashError, StoreError
from dflash_offline.figures import bytes_text, counted
from dflash_offline.prompts import data_sets
from dflash_offline.watch.gpus import GpuReader
from dflash_offline.watch.hosts import available_bytes

_BUSY_BYTES = 1 << 30  # a driver keeps some hundred MB of a GPU that nobody uses


def gpus(config: RunConfig) -> Iterator[Check]:
    from dflash_offline import gpus as devices

    reader = GpuReader()
    states = reader.read()
    if not states:
        yield Check(
            "GPUs", "fail" if wants_gpu(config) else "ok", reader.note, 'set gpus = "cpu", or mend the driver' if wants_gpu(config) else ""
        )
    for state in states:
        busy = state.used_bytes is not None and state.used_bytes > _BUSY_BYTES
        advice = "somebody computes on it; a run waits only for GPUs that another run of this project holds" if busy else ""
        memory = "memory not told"
        if state.total_bytes is not None and state.used_bytes is not None:
            memory = f"{state.total_bytes / 2**30:.0f} GiB, {state.used_bytes / 2**30:.1f} in use"
        used = "" if state.busy is None else f", {state.busy:.0%} busy"
        yield Check(f"GPU {state.gpu}", "warn" if busy else "ok", f"{state.name}, {memory}{used}", advice)
    regenerate = config.regenerate
    for where, wanted, count in (
        *([("[regenerate] gpus", regenerate.gpus, regenerate.replicas)] if config.regenerates and regenerate.gpus is not None else []),
        ("[target] gpus", config.target.gpus, config.target.replicas),
        ("[train] gpus", config.train.gpus, config.train.ranks),
        *((f"[[drafters]] {entry['name']}: gpus", entry["gpus"], config.train.ranks) for entry in config.drafters if "gpus" in entry),
        *([("[evaluate] gpus", config.evaluate.gpus, 1)] if config.evaluate.gpus is not None else []),
    ):
        try:
            found = devices.resolve(wanted, count, where=where)
            text = "the CPU" if found[0] is None else ", ".join(str(gpu) for gpu in found)
            yield Check(where, "ok", f"{counted(len(found), 'process', plural='processes')} on {text}")
        except DFlashError as error:
            yield Check(where, "fail", str(error), "name other GPUs in the run file")


def target(config: RunConfig) -> Iterator[Check]:
    from dflash_offline import demo, identity

    try:
        if config.target.model == DEMO_MODEL:
            yield Check("target", "ok", f"demo model, {demo.find_gguf()}")
            return
        folder = identity.target_folder(config)
        weights = sum(size for size, _ in identity.weights_identity(folder).values())
        ids = identity.capture_layer_ids(config)
        yield Check("target", "ok", f"{folder}, {bytes_text(weights)} of weights, {identity.num_target_layers(config)} layers, taps {ids}")
    except DFlashError as error:
        yield Check("target", "fail", str(error), "mend [target] in the run file")
        return
    try:
        check_hidden_size(config.store.codec, identity.text_config(identity.target_config(config)).get("hidden_size"))
    except StoreError as error:
        yield Check("codec", "fail", str(error), "mend [store] codec in the run file")


def drafters(config: RunConfig) -> Iterator[Check]:
    """What later stages would refuse: the shape of each drafter, the files of prompts."""
    yield from _settings_of_gpus(config)
    folder = folder_to_look_into(config)
    if folder is not None and tokenizer(folder).level == "ok":  # else a line of its own has said so
        from dflash_offline.drafter import planned_shape

        for each in config.each_drafter():
            name = f"drafter {each.name}".rstrip()
            try:
                shape = planned_shape(each, folder)
                start = "" if each.drafter.init_from is None else f", from {each.drafter.init_from}"
                layers = counted(shape.num_layers, "layer")
                text = f"{layers}, blocks of {shape.block_size}, reads layers {list(shape.target_layer_ids)}, "
                yield Check(name, "ok", f"{text}mask token {shape.mask_token_id}{start}")
            except DFlashError as error:
                yield Check(name, "fail", str(error), "mend its settings in the run file")
    try:
        sets = data_sets(config)
        found = f"{counted(len(sets), 'file')}, {counted(sum(map(len, sets.values())), 'prompt')}"
        yield Check("prompts", "ok", found if sets else "none: held-out conversations only")
    except DFlashError as error:
        yield Check("prompts", "fail", str(error), "mend that file, or [evaluate] prompts in the run file")


def _settings_of_gpus(config: RunConfig) -> Iterator[Check]:
    """Settings that the GPUs which train cannot run."""
    from dflash_offline.gpus import check_settings, resolve

    for each in config.each_drafter():
        try:
            devices = resolve(each.train.gpus, each.train.ranks)
        except DFlashError:
            continue  # ``gpus`` has said which are not there
        try:
            check_settings(each.train, devices, where=each.where("train"))
        except DFlashError as error:
            yield Check(f"settings {each.name}".rstrip(), "fail", str(error), "change the setting, or name other GPUs in the run file")


def limits(config: RunConfig) -> Iterator[Check]:
    """What the shell allows (``ulimit -a``): a limit that is met in the middle of a run ends it."""
    for name, number, enough, remedy in (
        ("open files", resource.RLIMIT_NOFILE, 1024, "ulimit -n 4096"),
        ("processes", resource.RLIMIT_NPROC, 1024, "ulimit -u 4096: a container or cluster may count threads too"),
        ("file size", resource.RLIMIT_FSIZE, None, "ulimit -f unlimited: shards of the store and checkpoints are large"),
        ("address space", resource.RLIMIT_AS, None, "ulimit -v unlimited: CUDA and memory-mapped files reserve much more than they use"),
    ):
        soft, hard = resource.getrlimit(number)
        fine = soft == resource.RLIM_INFINITY or (enough is not None and soft >= enough)
        text = "unlimited" if soft == resource.RLIM_INFINITY else f"limit {soft:,}"
        if not fine and hard != resource.RLIM_INFINITY:
            text += f" (up to {hard:,})"
        yield Check(name, "ok" if fine else "warn", text, "" if fine else remedy)
    yield Check("memory", "ok", f"{available_bytes() / 1e9:.1f} GB available, {len(os.sched_getaffinity(0))} CPU cores")
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        small = size < 1 << 30 and wants_gpu(config)
        advice = "NCCL shares memory there: start the container with --shm-size=1g or more" if small else ""
        yield Check("/dev/shm", "warn" if small else "ok", f"{size / 1e9:.1f} GB", advice)
