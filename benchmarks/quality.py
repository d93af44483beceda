"""Do our drafters accept, and do they accept more than a peer's? A real target, its own answers, the real loop.

Parts, each of which replaces its own entry of the result file; several calls, also at the same time, may write one file:

=============  ==============================================================================================
``prepare``    corpus and store through the pipeline (Luigi); every other part does it when it is not there yet
``specforge``  SpecForge 0.2.0's model and loss on the micro-batches of ``equal``, with its own optimiser settings
``equal``      this project: the same steps, tokens, anchors and learning rate
``time``       this project with recipe ``RECIPES["time"]`` for the seconds that SpecForge trained; ``time-NAME`` others
``codec-NAME`` this project, the first rows, a short run from a store with that codec, the same seed everywhere;
               ``codec-lossless-fp8``: with the head's products in fp8
=============  ==============================================================================================

    python benchmarks/quality.py --responses FILE --prompts DIR --root DIR prepare equal time codec-int8

The stage's own code trains, in this process; what it writes is what ``luigi TrainDrafter`` would take as done. Stores of
the ``codec-`` parts hold the captured states, coded anew, so that they differ in nothing else.
"""

import argparse
import fcntl
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_offline import identity, keys
from dflash_offline.config import RunConfig
from dflash_offline.drafter import DrafterShape
from dflash_offline.environment import environment
from dflash_offline.export.reading import read_tensors
from dflash_offline.layout import Layout
from dflash_offline.manifest import read_json, read_manifest, write_json
from dflash_offline.progress import Progress
from dflash_offline.train.ranks import Ranks

sys.path.insert(0, str(Path(__file__).resolve().parent))
from quality_decode import Judge, ratio  # noqa: E402
from quality_recode import recode  # noqa: E402
from quality_settings import MODERN, PACE, PEER_SECONDS, RECIPES, SECONDS, locked, parse, run_file  # noqa: E402


class Bench:
    """What the parts of one call share: options, device, the target that drafters are decoded with, the result file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began = options, time.perf_counter()
        self.device = torch.device("cpu" if options.device == "cpu" else "cuda:0")
        self._judge: Judge | None = None

    @property
    def left_s(self) -> float:
        return self.options.budget_s - (time.perf_counter() - self.began)

    def known(self) -> dict[str, Any]:
        path = self.options.out
        return json.loads(path.read_text()) if path.exists() else {"arms": {}}

    def note(self, **entries: Any) -> None:
        """Merge into the result file: ``arms`` by name, everything else as it is; the head line follows."""
        with locked(self.options.root / "result.lock"):
            result = self.known()
            result["arms"] |= entries.pop("arms", {})
            result |= entries | head_line(result["arms"])
            self.options.out.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.options.out, result)

    def prepare(self) -> RunConfig:
        """Capture the corpus into the store, once; whoever comes later waits."""
        config = run_file(self.options, "prepare", codec=self.options.codec)
        done = Layout(config.root_dir).capture(keys.capture_key(config)) / "prepared"
        with locked(self.options.root / "prepare.lock"):
            if not done.exists():
                path = self.options.root / "arms" / "prepare" / "run.toml"
                command = [sys.executable, "-m", "luigi", "--module", "pipelines", "CaptureHiddenStates", "--config", str(path)]
                subprocess.run(command, check=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}, cwd=Path(__file__).parents[1])
                done.touch()
        return config

    def judge(self, config: RunConfig, shape: DrafterShape) -> Judge:
        options = self.options
        if self._judge is None:
            dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[options.evaluate_dtype]
            shared = {"most": options.max_prompts, "new_tokens": options.new_tokens, "batch": options.batch}
            folder, layers = identity.model_folder(config), list(shape.target_layer_ids)
            self._judge = Judge(folder, layers, options.prompts, self.device, dtype, attention=config.target.attention, **shared)
        return self._judge

    def decode(self, config: RunConfig, shape: DrafterShape, tensors: dict[str, torch.Tensor], *, replay: bool = True) -> dict[str, Any]:
        judge = self.judge(config, shape)
        result = judge.accept(shape, tensors)
        return result | (judge.replayed(config, shape, tensors, new_tokens=self.options.heldout_tokens) if replay else {})

    # ---- parts

    def specforge(self) -> dict[str, Any]:
        import quality_peer

        from dflash_offline.train.setup import prepare

        self.prepare()
        config = run_file(self.options, "equal", codec=self.options.codec)
        with locked(self.options.root / "specforge.lock"):
            self.note(specforge_pace_s=None)  # what an earlier run took, perhaps on another machine, is no measure
            setup = prepare(config, "specforge", Ranks(0, 1), self.device)
            tensors, result = quality_peer.train(
                config, setup, max_steps=self.options.max_steps, on_pace=lambda seconds: self.note(specforge_pace_s=seconds)
            )
        for name, view in setup.weights.named(setup.weights.master).items():
            view.copy_(tensors[name])
        result["heldout_acc"] = self.heldout(setup)["acc"]
        return result | self.decode(config, setup.shape, tensors)

    def heldout(self, setup: Any) -> dict[str, Any]:
        """The held-out figures of the weights in ``setup``, as training gives them."""
        from dflash_offline.train.heldout import Scores
        from dflash_offline.train.loop import Trainer

        setup.weights.refresh()
        trainer, scores = Trainer(setup, Ranks(0, 1), Progress(None)), Scores()
        with torch.no_grad(), setup.loader.prefetch(trainer.heldout_jobs) as reader:
            feed = trainer.feed(reader, training=False)
            for _ in trainer.heldout_jobs:
                batch = feed.take()
                out = trainer.losses(batch)
                feed.look_ahead()
                scores.add(batch, out)
        return scores.summary(setup.corpus)

    def ours(self, config: RunConfig, *, replay: bool = True) -> dict[str, Any]:
        """Train what a run file says, with the code of the stage, and decode it."""
        from dflash_offline.train import train
        from dflash_offline.train.records import METRICS, read_metrics

        key = keys.train_key(config)
        folder = Layout(config.root_dir).drafter(key)
        if not (folder / "manifest.json").exists():
            train(config, argparse.Namespace(key=key, partial=False), Progress(None))
        manifest = read_manifest(folder, kind="drafter")
        rows = read_metrics(folder / METRICS)
        steps, tokens = zip(*((row["step"], row["tokens"]) for row in rows if "tokens" in row), strict=True)
        curve = [
            {"step": row["step"], "tokens": int(np.interp(row["step"], steps, tokens)), "elapsed_s": round(row["elapsed_s"], 1)}
            | {name: row["heldout"][name] for name in ("loss", "acc", "tau_replay", "tau_replay_interval")}
            for row in rows
            if "heldout" in row
        ]
        result = {"steps": manifest["steps"], "tokens": manifest["tokens"], "train_s": manifest["seconds"]}
        result |= {"heldout_acc": curve[-1]["acc"] if curve else None, "curve": curve}
        result |= {
            name: getattr(config.train, name)
            for name in ("epochs", "anchors", "loss", "lr", "schedule", "ema", "noise", "kl_weight", "weight_decay")
        }
        result |= {"tokens_per_batch": config.train.tokens_per_batch}
        shape = DrafterShape.from_dict(read_json(folder / "drafter" / "shape.json"))
        self.release()
        return result | self.decode(config, shape, read_tensors(folder / "drafter"), replay=replay)

    def equal(self) -> dict[str, Any]:
        self.prepare()
        return self.ours(run_file(self.options, "equal", codec=self.options.codec, **self.limit()))

    def limit(self) -> dict[str, Any]:
        return {} if self.options.max_steps is None else {"max_steps": self.options.max_steps}

    def equal_time(self, name: str) -> dict[str, Any]:
        """As long as SpecForge trained: seconds of a step are measured first, then the number of epochs is set."""
        self.prepare()
        recipe = RECIPES[name]
        step_s, steps_per_epoch = self.pace(run_file(self.options, name, codec=self.options.codec, **recipe, **self.limit()))
        theirs = self.peer_seconds()
        seconds = self.options.seconds or theirs or PEER_SECONDS
        allowed = min(seconds, self.left_s - 45)  # what is left also has to do for compiling again and for decoding
        if allowed < seconds:
            print(f"{name}: the peer trained {seconds:.0f} s, {allowed:.0f} s are left", flush=True)
        epochs = max(0.05, PACE * allowed / step_s / steps_per_epoch)
        print(f"{name}: {1e3 * step_s:.1f} ms a step, {steps_per_epoch} steps an epoch: {epochs:.2f} epochs in {allowed:.0f} s", flush=True)
        settled = {"epochs": round(epochs, 2), "evaluate_every": max(1, int(epochs * steps_per_epoch / 10))}
        config = run_file(self.options, name, codec=self.options.codec, **(recipe | settled), **self.limit())
        return {"peer_train_s": seconds, "peer_measured_here": theirs is not None} | self.ours(config)

    def peer_seconds(self) -> float | None:
        """SpecForge's training seconds; of another process that trains it at this moment, as soon as it knows its pace."""
        while True:
            known = self.known()
            found = known.get("specforge_pace_s")
            with (self.options.root / "specforge.lock").open("a") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    found = known["arms"].get("specforge", {}).get("train_s") or found
                except BlockingIOError:
                    if found is None:
                        time.sleep(0.5)
                        continue
            return found

    def pace(self, config: RunConfig) -> tuple[float, int]:
        """Seconds of a step of a run file (mean over its buckets), and its steps an epoch."""
        from dflash_offline.train import kernels
        from dflash_offline.train.loop import Trainer
        from dflash_offline.train.setup import prepare

        config = config.model_copy(update={"train": config.train.model_copy(update={"epochs": 1.0})})
        ranks, folder = Ranks(0, 1), None
        if self.device.type == "cuda":
            folder, _ = kernels.use_cache_folder(self.device)
        setup = prepare(config, "pace", ranks, self.device)
        trainer = Trainer(setup, ranks, Progress(None))
        if folder is not None:
            trainer.warm_up(folder)
        count = min(setup.order.total_steps, 4 if self.device.type == "cpu" else 80)
        first, began = count // 4, 0.0
        jobs = (job for number in range(count) for job in trainer.jobs(setup.order.step(number)))
        with setup.loader.prefetch(jobs) as reader:
            feed = trainer.feed(reader, training=True)
            for number in range(count):
                if number == first:
                    self._wait()
                    began = time.perf_counter()
                trainer.train_step(setup.order.step(number), feed)
            self._wait()
        step_s, steps = (time.perf_counter() - began) / (count - first), setup.order.total_steps
        del trainer, setup
        self.release()
        return step_s, steps

    def codec(self, name: str) -> dict[str, Any]:
        """A short run from the first rows, coded with ``name``; ``NAME-fp8`` computes the head's products in fp8 as well."""
        from dflash_offline.store import summary

        source, (codec, _, head) = self.prepare(), name.partition("-")
        short = {"epochs": self.options.codec_epochs, "rows": self.options.codec_rows, "head_precision": head or "bf16"} | MODERN
        config = run_file(self.options, f"codec-{name}", codec=codec, last_hidden=False, **short, **self.limit())
        self.corpus(config)
        if keys.capture_key(config) != keys.capture_key(source):
            with locked(self.options.root / f"codec-{codec}.lock"):  # codec-lossless-fp8 wants what codec-lossless wants
                recode(source, config, self.device)
        found = summary(Layout(config.root_dir).store(keys.capture_key(config)))
        sizes = {each: found[each] for each in ("bytes_per_token", "ratio", "tokens")}
        return {"store": sizes} | self.ours(config, replay=False)

    def corpus(self, config: RunConfig) -> None:
        with locked(self.options.root / "codec-corpus.lock"):
            folder = Layout(config.root_dir).corpus(keys.corpus_key(config))
            if not (folder / "manifest.json").exists():
                command = [sys.executable, "-m", "dflash_offline.corpus", "--config", str(config.source), "--key", keys.corpus_key(config)]
                subprocess.run(command, check=True, cwd=Path(__file__).parents[1])

    def release(self) -> None:
        """Free what the last part left, compiled graphs included: their number a function is limited."""
        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def run(self, name: str) -> bool:
        """One part, recorded whatever becomes of it; whether it succeeded."""
        began = time.perf_counter()
        part: Callable[[], Any]
        if name in RECIPES:
            part = lambda: self.equal_time(name)  # noqa: E731
        elif name.startswith("codec-"):
            part = lambda: self.codec(name.removeprefix("codec-"))  # noqa: E731
        else:
            part = {"prepare": self.prepare, "specforge": self.specforge, "equal": self.equal}[name]
        needed = SECONDS[name.split("-")[0]] * self.options.needed
        if self.left_s < needed:
            print(f"=== {name}: SKIPPED, {self.left_s:.0f} s are left, it needs about {needed:.0f} s", flush=True)
            return False
        print(f"=== {name} (about {needed:.0f} s), {self.left_s:.0f} s left", flush=True)
        try:
            result = part()
        except Exception as error:
            traceback.print_exc()
            self.note(failed=self.known().get("failed", {}) | {name: f"{type(error).__name__}: {error}"[:400]})
            print(f"=== {name}: FAILED after {time.perf_counter() - began:.0f} s", flush=True)
            return False
        finally:
            self.release()
        seconds = round(time.perf_counter() - began, 1)
        if isinstance(result, dict):
            failed = {each: reason for each, reason in self.known().get("failed", {}).items() if each != name}
            device = torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"
            self.note(arms={name: result | {"part_s": seconds}}, failed=failed, device=device, environment=environment())
            print(
                f"=== {name}: mean acceptance length {result['mean_acceptance_length']:.3f}, trained {result['train_s']:.0f} s", flush=True
            )
        print(f"=== {name}: done in {seconds} s, {self.left_s:.0f} s left", flush=True)
        return True


def head_line(arms: dict[str, Any]) -> dict[str, Any]:
    """The figures that are compared, at the top of the file."""
    names = ("steps", "tokens", "train_s", "heldout_acc", "acceptance_length", "interval", "prompts", "simulated_tau", "real_tau")
    equal, peer, line = arms.get("equal"), arms.get("specforge"), {}
    if equal:
        line |= {name: equal.get(name) for name in names}
    if peer:
        line["specforge"] = {name: peer.get(name) for name in names}
    if equal and peer:
        ours, theirs = equal["tokens_steps"], peer["tokens_steps"]
        found = {name: ratio(ours, theirs, [name]) for name in ours if name in theirs}
        line["equal_over_specforge"] = {name: each | {"not_below": each["interval"][1] >= 1} for name, each in found.items()}
    for name in (each for each in RECIPES if each in arms and peer):
        found = ratio(arms[name]["tokens_steps"], peer["tokens_steps"], list(peer["tokens_steps"]))
        within = arms[name]["train_s"] <= peer["train_s"]
        line.setdefault("equal_time_over_specforge", {})[name] = found | {"within_its_seconds": within}
    codecs = {name.removeprefix("codec-"): arm for name, arm in arms.items() if name.startswith("codec-")}
    if codecs:
        line["codecs"] = {
            name: {"bytes_per_token": arm["store"]["bytes_per_token"], "acceptance_length": arm["mean_acceptance_length"]}
            | {"heldout_acc": arm["heldout_acc"], "steps": arm["steps"]}
            for name, arm in codecs.items()
        }
        exact = codecs.get("lossless")
        for name in codecs if exact else ():
            line["codecs"][name]["over_lossless"] = ratio(codecs[name]["tokens_steps"], exact["tokens_steps"], list(exact["tokens_steps"]))
    return line


def main(argv: list[str] | None = None) -> int:
    sys.setswitchinterval(5e-4)  # as the training stage does: for the peer too
    bench = Bench(parse(argv, description=__doc__))
    done = [bench.run(name) for name in bench.options.parts]
    print(f"=== all in {time.perf_counter() - bench.began:.0f} s: {sum(done)} of {len(done)} parts", flush=True)
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
