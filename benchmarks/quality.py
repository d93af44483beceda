"""Do our drafters accept, and do they accept more than a peer's? A real target, its own answers, the real loop.

Every arm trains a drafter for SmolLM2-135M-Instruct from one store and decodes the same prompts with the same loop:

- ``equal``       this project, the peer's number of steps, tokens, anchors and learning rate
- ``time``        this project, the peer's training seconds: more anchors, D-PACE, WSD, an average of the weights
- ``specforge``   SpecForge 0.2.0's model and objective on the very same micro-batches, with its own optimiser settings
- ``codec-NAME``  this project, one epoch, from a store with that codec; the same seed everywhere

Several calls write one file: each arm replaces its own entry. The corpus is captured through the pipeline (real Luigi,
real store); nothing here is timed but training itself.

    python benchmarks/quality.py --responses FILE --prompts DIR --root DIR --out FILE equal specforge time codec-int8
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_offline import keys
from dflash_offline.config import DEMO_MODEL, RunConfig
from dflash_offline.demo import ensure_converted
from dflash_offline.drafter import DrafterShape
from dflash_offline.evaluate.batched import BatchedDecoder
from dflash_offline.evaluate.comparison import compare
from dflash_offline.evaluate.decoder import Decoder, Response
from dflash_offline.evaluate.loading import load_decoder
from dflash_offline.evaluate.prompts import Prompt, dataset_name, encode, read_prompts
from dflash_offline.evaluate.stage import heldout_rows
from dflash_offline.evaluate.summary import summarise
from dflash_offline.export.reading import read_tensors
from dflash_offline.layout import Layout
from dflash_offline.manifest import environment, read_json, read_manifest, write_json
from dflash_offline.replay import ReplayResult, answers, replay
from dflash_offline.target import load_tokenizer

EPOCHS, ANCHORS, LR, LAYERS, BLOCK, MASK = 4, 96, 6e-4, 5, 16, 16


def run_file(folder: Path, options: argparse.Namespace, *, codec: str, train: dict[str, Any]) -> Path:
    """A run file for one arm; every arm shares the root, so corpus and captures are made once."""
    gpus = '"cpu"' if options.device == "cpu" else f"[{options.gpu}]"
    settings = {"epochs": EPOCHS, "anchors": ANCHORS, "lr": LR, "tokens_per_batch": options.tokens, "micro_batches_per_step": 1}
    settings |= {"slots_per_batch": options.slots, "log_every": 20, "evaluate_every": options.evaluate_every, "checkpoint_every": 100_000}
    settings |= {"dtype": options.dtype} | train
    text = f"""root = {json.dumps(str(options.root))}
[target]
model = {json.dumps(DEMO_MODEL if options.model is None else str(options.model))}
dtype = "{options.dtype}"
gpus = {gpus}
capture_layer_ids = {options.taps}
[corpus]
files = [{json.dumps(str(options.responses))}]
bucket_edges = {options.edges}
max_length = {options.edges[-1] - 1}
tokens_per_batch = 32768
heldout_fraction = 0.02
[store]
codec = "{codec}"
[drafter]
layers = {options.layers}
block_size = {BLOCK}
mask_token_id = {options.mask}
[train]
gpus = {gpus}
""" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def luigi(config: Path, task: str) -> None:
    command = [sys.executable, "-m", "luigi", "--module", "pipelines", task, "--config", str(config)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})


def train_ours(options: argparse.Namespace, name: str, *, codec: str = "lossless", **train: Any) -> tuple[RunConfig, dict[str, Any]]:
    """Run the pipeline up to ``TrainDrafter``; returns the run file and what training took."""
    path = run_file(options.root / "arms" / name, options, codec=codec, train=train)
    luigi(path, "TrainDrafter")
    config = RunConfig.load(path)
    manifest = read_manifest(Layout(config.root_dir).drafter(keys.train_key(config)), kind="drafter")
    return config, manifest


def train_specforge(options: argparse.Namespace) -> tuple[RunConfig, dict[str, torch.Tensor], dict[str, Any]]:
    """SpecForge's model and loss over the micro-batches of arm ``equal``: same rows, same order, same store.

    Its own settings: AdamW betas 0.9 / 0.999, warm-up 4 %, cosine to 0, clip 1.0, float32 master weights. Hidden states
    are read and decoded ahead by the same reader and are not part of its time.
    """
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from transformers import Qwen3Config

    from dflash_offline.dataset import Prefetcher
    from dflash_offline.optimizer import lr_at
    from dflash_offline.train.ranks import Ranks
    from dflash_offline.train.setup import prepare

    config = RunConfig.load(run_file(options.root / "arms" / "equal", options, codec="lossless", train={}))
    device = torch.device(options.device if options.device == "cpu" else f"cuda:{options.gpu}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    setup = prepare(config, "specforge", Ranks(0, 1), device)
    shape, dtype = setup.shape, setup.dtype
    qwen = Qwen3Config(
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        num_hidden_layers=shape.num_layers,
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters=dict(shape.rope_parameters),
        layer_types=["full_attention"] * shape.num_layers,
    )
    qwen.block_size, qwen.num_target_layers = shape.block_size, shape.num_target_layers
    qwen.dflash_config = {"mask_token_id": shape.mask_token_id, "target_layer_ids": list(shape.target_layer_ids)}
    backend = "flex_attention" if device.type == "cuda" else "sdpa"
    qwen._attn_implementation = backend
    torch.manual_seed(0)
    with torch.device(device):
        model = DFlashDraftModel(qwen).to(dtype)
    with torch.no_grad():  # the same initial weights as ours, name by name: they are z-lab's names in both
        own = dict(setup.drafter.named_parameters())
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(own[parameter_name])
    head = torch.nn.Linear(shape.hidden_size, shape.vocab_size, bias=False, device="meta")
    head.weight = torch.nn.Parameter(setup.head.weight, requires_grad=False)
    embedding = torch.nn.Embedding.from_pretrained(setup.embedding, freeze=True)
    online = OnlineDFlashModel(
        model,
        head,
        embedding,
        shape.mask_token_id,
        block_size=shape.block_size,
        attention_backend=backend,
        num_anchors=ANCHORS,
        loss_decay_gamma=7.0,
    )
    masters = [parameter.detach().float().clone().requires_grad_() for parameter in model.parameters()]
    optimiser = torch.optim.AdamW(masters, lr=LR, betas=(0.9, 0.999), weight_decay=0.0, fused=device.type == "cuda")
    total = setup.order.total_steps if options.max_steps is None else min(options.max_steps, setup.order.total_steps)
    jobs = []
    from dflash_offline.dataset import Job

    for number in range(total):
        step = setup.order.step(number)
        jobs += [Job(number, 0, step.epoch, rows, setup.order.shapes[step.bucket]) for rows in step.micro_batches]
    seconds, tokens, losses = 0.0, 0, []
    with Prefetcher(iter(jobs), setup.loader.load) as reader:
        for number in range(total):
            micro = reader.take()
            batch = padded(micro, setup, device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            model.zero_grad(set_to_none=True)
            loss = online(**batch)[0]
            loss.backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
            torch.nn.utils.clip_grad_norm_(masters, 1.0)
            warm = lr_at(number, total=total, peak=LR, warmup_ratio=0.04, schedule="cosine")
            # its cosine ends at 0, ours at 10 %: map (x - 0.1) / 0.9
            rate = warm if number < 0.04 * total else max(0.0, (warm - 0.1 * LR) / 0.9)
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), masters)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number >= 5 * len(setup.order.shapes):  # compilation is not its fault, nor ours
                seconds += time.perf_counter() - began
            tokens += micro.num_tokens
            losses.append(float(loss))
            if number % 100 == 0:
                print(f"specforge step {number}/{total} loss {losses[-1]:.3f} {seconds:.0f} s", flush=True)
    counted = max(1, total - 5 * len(setup.order.shapes))
    tensors = {name: parameter.detach().float().cpu() for name, parameter in zip(dict(model.named_parameters()), masters, strict=True)}
    return (
        config,
        tensors,
        {"steps": total, "tokens": tokens, "train_s": seconds * total / counted, "final_loss": float(np.mean(losses[-50:]))},
    )


def padded(micro: Any, setup: Any, device: torch.device) -> dict[str, torch.Tensor]:
    """A micro-batch as SpecForge takes it: one row a sequence, padded to the longest."""
    rows = [setup.corpus.row(int(row)) for row in micro.job.rows]
    decoded = micro.encoded.decode(device)
    longest = -(-max(len(row.input_ids) for row in rows) // 128) * 128
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest)
    hidden = torch.zeros(len(rows), longest, decoded.shape[1], dtype=setup.dtype, device=device)
    for index, (row, (start, end)) in enumerate(zip(rows, micro.spans, strict=True)):
        ids[index, : end - start] = torch.from_numpy(np.array(row.input_ids)).long()
        mask[index, : end - start] = torch.from_numpy(np.array(row.loss_mask)).float()
        hidden[index, : end - start] = decoded[start:end]
    return {"input_ids": ids.to(device), "hidden_states": hidden, "loss_mask": mask.to(device)}


def ask(decode: Any, tokenizer: Any, prompts: list[Prompt]) -> list[list[Response]]:
    """Hold all conversations at once, turn by turn; returns the responses of each prompt."""
    stops = decode.__self__.stop_ids  # decode is a bound method of Loop
    histories: list[list[dict[str, Any]]] = [[] for _ in prompts]
    given, found = [0] * len(prompts), [[] for _ in prompts]
    ends = [list(prompt.turns()) for prompt in prompts]
    for turn in range(max(len(each) for each in ends)):
        rows = [row for row, each in enumerate(ends) if turn < len(each)]
        for row in rows:
            histories[row].extend(prompts[row].messages[given[row] : ends[row][turn]])
            given[row] = ends[row][turn]
        responses = decode([encode(tokenizer, histories[row], {}, where=prompts[row].where) for row in rows])
        for row, response in zip(rows, responses, strict=True):
            found[row].append(response)
            text = tokenizer.decode([token for token in response.tokens if token not in stops], skip_special_tokens=True)
            histories[row].append({"role": "assistant", "content": text})
    return found


class Loop:
    """``BatchedDecoder.generate`` or ``generate_plain`` with the number of tokens filled in."""

    def __init__(self, batched: BatchedDecoder, *, plain: bool, max_new_tokens: int) -> None:
        self.batched, self.plain, self.max_new_tokens, self.stop_ids = batched, plain, max_new_tokens, batched.decoder.stop_ids

    def run(self, prompts: list[list[int]]) -> list[Response]:
        call = self.batched.generate_plain if self.plain else self.batched.generate
        return call(prompts, max_new_tokens=self.max_new_tokens)


def evaluate(options: argparse.Namespace, config: RunConfig, shape: DrafterShape, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Acceptance on every prompt file, then ``tau_replay`` beside the loop on held-out answers that the target writes again."""
    folder = ensure_converted() if options.model is None else Path(options.model)
    device = torch.device(options.device if options.device == "cpu" else f"cuda:{options.gpu}")
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[options.evaluate_dtype]
    decoder = load_decoder(folder, shape, tensors, device=device, dtype=dtype)
    batched, tokenizer = BatchedDecoder(decoder, options.max_prompts), load_tokenizer(folder)
    result: dict[str, Any] = {"acceptance_length": {}, "interval": {}, "prompts": {}, "identical": {}, "near_ties": {}, "different": {}}
    for path in sorted(options.prompts.glob("eval-*.jsonl")):
        prompts = read_prompts(path, most=options.max_prompts)
        loop = ask(Loop(batched, plain=False, max_new_tokens=options.new_tokens).run, tokenizer, prompts)
        # the target alone answers the first turns only: later ones would follow another history where a tie fell otherwise
        plain = Loop(batched, plain=True, max_new_tokens=options.new_tokens)
        first = [encode(tokenizer, prompt.messages[: next(prompt.turns())], {}, where=prompt.where) for prompt in prompts]
        comparisons = [compare(ours[0], own, dtype=dtype) for ours, own in zip(loop, plain.run(first), strict=True)]
        summary, name = summarise(loop, None, comparisons, block_size=BLOCK), dataset_name(path)
        result["acceptance_length"][name], result["interval"][name] = summary["acceptance_length"], summary["interval"]
        result["prompts"][name] = len(prompts)
        for outcome, key in (("identical", "identical"), ("near_tie", "near_ties"), ("different", "different")):
            result[key][name] = sum(each.outcome == outcome for each in comparisons)
        print(f"  {name}: {summary['acceptance_length']:.3f} {summary['interval']}", flush=True)
    result["mean_acceptance_length"] = float(np.mean(list(result["acceptance_length"].values())))
    result |= replayed(options, decoder, batched, config, shape)
    return result


def replayed(
    options: argparse.Namespace, decoder: Decoder, batched: BatchedDecoder, config: RunConfig, shape: DrafterShape
) -> dict[str, Any]:
    """``simulated_tau`` (tau_replay) and ``real_tau`` over the same held-out answers."""
    rows = [row for row in heldout_rows(config, shape) if answers(row.loss_mask)]
    spans = [answers(row.loss_mask)[0] for row in rows]
    most = max(end - start for start, end in spans)
    loop = batched.generate([row.input_ids[:start].tolist() for row, (start, _) in zip(rows, spans, strict=True)], max_new_tokens=most)
    simulated, real, everything = [], [], []
    for row, (start, end), response in zip(rows, spans, loop, strict=True):
        only = np.zeros_like(row.loss_mask)
        only[start:end] = 1
        result = replay(decoder.drafter, decoder.embedding, decoder.head, row.read_hidden(), row.input_ids, only)
        everything.append(result)
        cut = len(response.tokens) == most or response.tokens[-1] not in decoder.stop_ids
        text = row.input_ids[start:end].tolist()
        if response.tokens == text or (cut and response.tokens[: len(text)] == text and len(response.tokens) == len(text)):
            simulated.append(result)
            real.append(response)
    pooled = ReplayResult.pooled(simulated)
    steps = sum(response.steps for response in real)
    tau = sum(response.step_tokens for response in real) / steps if steps else None
    return {
        "tau_replay_all": ReplayResult.pooled(everything).tau,
        "heldout_answers": len(rows),
        "reproduced_answers": len(real),
        "simulated_tau": pooled.tau if steps else None,
        "real_tau": tau,
        "tau_difference": abs(pooled.tau - tau) / tau if steps else None,
    }


def heldout_accuracy(config: RunConfig) -> tuple[float | None, list[dict[str, Any]]]:
    """Last held-out accuracy, and the learning curve, from an arm's ``metrics.jsonl``."""
    path = Layout(config.root_dir).drafter(keys.train_key(config)) / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    held = [row for row in rows if row.get("heldout")]
    curve = [
        {"step": row.get("step"), "tokens": row.get("tokens"), **{n: row["heldout"].get(n) for n in ("acc", "tau", "tau_replay")}}
        for row in held
    ]
    return (held[-1]["heldout"].get("acc") if held else None), curve


def arm(name: str, options: argparse.Namespace, known: dict[str, Any]) -> dict[str, Any]:
    if name == "specforge":
        config, tensors, taken = train_specforge(options)
        shape = DrafterShape.from_dict(read_json(Layout(config.root_dir).drafter(keys.train_key(config)) / "drafter" / "shape.json"))
        return taken | evaluate(options, config, shape, tensors)
    if name == "time":
        # this arm's cost per step is known from a short run only; epochs are set from the two arms before it
        ratio = known["specforge"]["train_s"] / known["equal"]["train_s"]
        epochs = options.time_epochs or max(1.0, round(EPOCHS * ratio * options.time_share, 2))
        config, manifest = train_ours(
            options,
            name,
            anchors=options.time_anchors,
            epochs=epochs,
            loss="dpace",
            schedule="wsd",
            ema=0.999,
            lr=options.time_lr,
            slots_per_batch=options.slots * options.time_anchors // ANCHORS,
        )
    elif name == "equal":
        config, manifest = train_ours(options, name)
    else:
        config, manifest = train_ours(options, name, codec=name.removeprefix("codec-"), epochs=options.codec_epochs)
    folder = Layout(config.root_dir).drafter(keys.train_key(config))
    accuracy, curve = heldout_accuracy(config)
    taken = {"steps": manifest["steps"], "tokens": manifest["tokens"], "train_s": manifest["seconds"], "heldout_acc": accuracy}
    taken |= {"curve": curve, "epochs": config.train.epochs, "anchors": config.train.anchors, "loss": config.train.loss}
    if name.startswith("codec-"):
        from dflash_offline.store import summary as store_summary

        taken["store"] = {
            n: v
            for n, v in store_summary(Layout(config.root_dir).store(keys.capture_key(config))).items()
            if isinstance(v, int | float | str)
        }
    shape = DrafterShape.from_dict(read_json(folder / "drafter" / "shape.json"))
    return taken | evaluate(options, config, shape, read_tensors(folder / "drafter"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="+", help="equal, specforge, time, codec-bf16, codec-lossless, codec-int8, codec-int6, codec-int4")
    parser.add_argument("--responses", type=Path, required=True, help="conversations answered by the target (JSONL, gzip)")
    parser.add_argument("--prompts", type=Path, required=True, help="folder of eval-*.jsonl")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/quality_h200.json"))
    parser.add_argument("--model", type=Path, help="another target than the demo model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--evaluate-dtype", default="bfloat16")
    parser.add_argument("--max-prompts", type=int, default=80)
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--mask", type=int, default=MASK)
    parser.add_argument("--taps", default="[1, 8, 14, 20, 27]")
    parser.add_argument("--tokens", type=int, default=10240, help="context tokens of a step, about 32 conversations")
    parser.add_argument("--slots", type=int, default=49152)
    parser.add_argument("--edges", type=json.loads, default=[192, 256, 320, 384, 512, 768, 2048])
    parser.add_argument("--evaluate-every", type=int, default=100)
    parser.add_argument("--codec-epochs", type=float, default=1.0)
    parser.add_argument("--time-anchors", type=int, default=256)
    parser.add_argument(
        "--time-share", type=float, default=0.6, help="share of the plain ratio of times, for the dearer steps of more anchors"
    )
    parser.add_argument("--time-epochs", type=float)
    parser.add_argument("--time-lr", type=float, default=1e-3)
    parser.add_argument("--max-steps", type=int, help="stop the peer early (to try this script)")
    options = parser.parse_args()
    options.root, options.responses = options.root.absolute(), options.responses.absolute()
    options.model = options.model and options.model.absolute()
    result: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"arms": {}}
    for name in options.arms:
        print(f"=== arm {name}", flush=True)
        began = time.perf_counter()
        result["arms"][name] = arm(name, options, result["arms"]) | {"arm_s": time.perf_counter() - began}
        result |= head_line(result["arms"])
        result["device"] = torch.cuda.get_device_name(options.gpu) if options.device != "cpu" else "cpu"
        result["environment"] = environment()
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.out, result)


def head_line(arms: dict[str, Any]) -> dict[str, Any]:
    """The figures that are compared, at the top of the file."""
    names = ("steps", "tokens", "train_s", "heldout_acc", "acceptance_length", "interval", "prompts", "simulated_tau", "real_tau")
    line = {name: arms["equal"].get(name) for name in names} if "equal" in arms else {}
    if "specforge" in arms:
        line["specforge"] = {name: arms["specforge"].get(name) for name in names}
    if "time" in arms and "specforge" in arms:
        line["equal_time_gain"] = arms["time"]["mean_acceptance_length"] / arms["specforge"]["mean_acceptance_length"] - 1
    return line


if __name__ == "__main__":
    main()
