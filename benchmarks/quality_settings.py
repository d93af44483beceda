"""Settings and run files of the arms of ``quality.py``."""

import argparse
import fcntl
import gzip
import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dflash_offline.config import DEMO_MODEL, RunConfig

EPOCHS, ANCHORS, LR, LAYERS, BLOCK, MASK = 4, 96, 6e-4, 5, 16, 16
RESULT = Path(__file__).resolve().parent / "results" / "quality_h200.json"
PEER_SECONDS = 222.0  # of an earlier reading; used until the peer's pace is known here
PACE = 0.8  # of the time allowed: a step of the first 80 was seen to take 35 ms and one of thousands 42, evaluations included
SECONDS = {"prepare": 130, "specforge": 310, "equal": 260, "time": 320, "codec": 210}  # of a part on a fresh machine with an H200
# a small drafter bears a higher rate than those of the published recipes; decayed weights, as epochs are many
MODERN = {"loss": "dpace", "schedule": "wsd", "ema": 0.999, "lr": 2e-3, "weight_decay": 0.05}
RECIPES: dict[str, dict[str, Any]] = {  # ``share``: of the micro-batch of ``equal``, in context tokens
    "time": {"share": 0.5, "anchors": 128} | MODERN,  # half the conversations a step, twice the steps
    "time-kl": {"share": 0.5, "anchors": 128, "kl_weight": 0.5} | MODERN,  # towards the target's distribution; --last-hidden
    "time-slow": {"share": 0.5, "anchors": 128} | MODERN | {"lr": 1e-3},
    "time-noise": {"share": 0.5, "anchors": 128, "noise": 0.05} | MODERN,  # against learning by heart
    "time-anchors": {"share": 1.0, "anchors": 256} | MODERN,  # every usable anchor
    "time-steps": {"share": 0.25, "anchors": 128} | MODERN,
    "time-plain": {"share": 1.0, "anchors": ANCHORS},  # the peer's recipe, only longer
}


def run_file(
    options: argparse.Namespace,
    name: str,
    *,
    codec: str,
    share: float = 1.0,
    rows: int | None = None,
    last_hidden: bool = True,
    **train: Any,
) -> RunConfig:
    """A run file for one arm; every arm shares the root, so corpus and captures are made once."""
    gpus = '"cpu"' if options.device == "cpu" else str(options.gpus)
    anchors, tokens = train.get("anchors", ANCHORS), max(options.edges[-1], int(options.tokens * share))
    settings = {"epochs": EPOCHS, "anchors": ANCHORS, "lr": LR, "tokens_per_batch": tokens, "micro_batches_per_step": 1}
    settings |= {"slots_per_batch": int(options.tokens * share / options.tokens_per_row * min(anchors, options.most_anchors)) * BLOCK}
    settings |= {"log_every": 20, "evaluate_every": options.evaluate_every, "checkpoint_every": 1_000_000, "checkpoint_minutes": 1e6}
    settings |= {"heldout_rows": options.heldout_rows, "dtype": options.dtype} | train
    text = f"""root = {json.dumps(str(options.root))}
[target]
model = {json.dumps(DEMO_MODEL if options.model is None else str(options.model))}
dtype = "{options.dtype}"
gpus = {gpus}
capture_layer_ids = {options.taps}
[corpus]
files = [{json.dumps(str(first_rows(options, rows)))}]
bucket_edges = {options.edges}
max_length = {options.edges[-1] - 1}
tokens_per_batch = 32768
heldout_fraction = 0.02
[store]
codec = "{codec}"
verify = "sizes"
store_last_hidden = {json.dumps(options.last_hidden and last_hidden)}
[drafter]
layers = {options.layers}
block_size = {BLOCK}
mask_token_id = {options.mask}
[evaluate]
heldout_rows = {options.heldout_rows}
[train]
gpus = {gpus}
""" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    folder = options.root / "arms" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(text, encoding="utf-8")
    return RunConfig.load(folder / "run.toml")


def first_rows(options: argparse.Namespace, rows: int | None) -> Path:
    """The responses, or a file of the first ``rows`` of them."""
    if rows is None:
        return Path(options.responses)
    path = Path(options.root) / f"first-{rows}.jsonl"
    if not path.exists():
        opened = gzip.open if options.responses.suffix == ".gz" else open
        with opened(options.responses, "rt", encoding="utf-8") as file:
            lines = [line for line, _ in zip(file, range(rows), strict=False)]
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text("".join(lines), encoding="utf-8")
        temporary.replace(path)
    return path


@contextmanager
def locked(path: Path) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def parse(argv: list[str] | None, *, description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", help="prepare, specforge, equal, " + ", ".join(RECIPES) + ", codec-NAME")
    parser.add_argument("--responses", type=Path, required=True, help="conversations answered by the target (JSONL, gzip)")
    parser.add_argument("--prompts", type=Path, required=True, help="folder of eval-*.jsonl")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--model", type=Path, help="folder of another target than the demo model")
    parser.add_argument("--budget-s", type=float, default=1e9, help="start no part that would probably not end within this")
    parser.add_argument("--needed", type=float, default=1.0, help="factor on the seconds that a part is thought to need")
    parser.add_argument("--seconds", type=float, help="training seconds of the time parts; SpecForge's when left out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpus", type=json.loads, default=[0], help="GPUs that capture; they index CUDA_VISIBLE_DEVICES")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--evaluate-dtype", default="bfloat16")
    parser.add_argument("--max-prompts", type=int, default=80)
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--batch", type=int, default=80, help="answers decoded at once")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--mask", type=int, default=MASK)
    parser.add_argument("--taps", default="[1, 8, 14, 20, 27]")
    parser.add_argument("--tokens", type=int, default=11264, help="context tokens of a step of ``equal``, about 32 conversations")
    parser.add_argument("--tokens-per-row", type=int, default=310, help="of a conversation, to size the budget of slots")
    parser.add_argument("--most-anchors", type=int, default=200, help="usable anchors of a conversation, likewise")
    parser.add_argument("--edges", type=json.loads, default=[256, 384, 2048])
    parser.add_argument("--evaluate-every", type=int, default=200)
    parser.add_argument("--heldout-rows", type=int, default=128)
    parser.add_argument("--heldout-tokens", type=int, default=320)
    parser.add_argument("--codec", default="bf16", choices=["bf16", "lossless"], help="of the store that is captured into; both are exact")
    parser.add_argument("--codec-epochs", type=float, default=8.0)
    parser.add_argument("--codec-rows", type=int, default=3000)
    parser.add_argument("--last-hidden", action="store_true", help="store the last layer's output too; time-kl sets it by itself")
    parser.add_argument("--max-steps", type=int, help="stop every training early (to try this script)")
    options = parser.parse_args(argv)
    for name in options.parts:
        if name not in {"prepare", "specforge", "equal", *RECIPES} and not name.startswith("codec-"):
            parser.error(f"{name}: no such part")
    options.last_hidden |= any(RECIPES.get(name, {}).get("kl_weight") for name in options.parts)
    for name in ("root", "responses", "prompts", "model", "out"):
        if getattr(options, name) is not None:
            setattr(options, name, getattr(options, name).absolute())
    options.root.mkdir(parents=True, exist_ok=True)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as the training stage does; two calls side by side slowed each other to a half without it
    return options
