"""The reference layout: replicas of the target on some GPUs, then drafter ranks on the others, by the ordinary command.

    python benchmarks/eight_gpus.py --model FOLDER --corpus FILE...            # GPUs 0-4 capture, 5-7 train; both cases
    python benchmarks/eight_gpus.py --cases qwen27b --capture-gpus 0 --train-gpus 1 --layers 8
    python benchmarks/eight_gpus.py --tiny --cpu                               # seconds: shows that the script works

Each case runs ``luigi --module pipelines DFlashAll`` in a fresh root with fresh kernel caches and adds itself to
benchmarks/results/eight_gpus.json: capture tokens/s of each replica and in all, training tokens/s of each rank and in
all, seconds until each process computed its first batch or step, peak memory of each GPU, shares of time spent waiting.
Other layouts and depths keep entries of their own, as ``qwen27b, 1+1``.

- ``smollm2``: SmolLM2 and a corpus, both given.
- ``qwen27b``: a dense Qwen3 of Qwen3.6-27B's size with random weights, written once, block 16, up to 512 anchors a row,
  rows of up to 8192 tokens in the bucket mix of a real training set.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from capture_work import BATCH_SHARES, EDGES, HEADS, SHAPE_27B, SHORTEST, TINY, TINY_HEADS

from dflash_offline.environment import environment
from dflash_offline.manifest import read_json
from dflash_offline.reference import toml_text
from dflash_offline.watch.metrics import read_metrics

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
FRAME_TOKENS = 40  # of the template around two messages, roughly
STEADY_S = 5.0  # least seconds that a rate of capture is taken over


class Watcher(threading.Thread):
    """Looks twice a second at what every process of the run says of itself, and at the memory of the GPUs."""

    def __init__(self, root: Path, *, gpus: bool) -> None:
        super().__init__(daemon=True)
        self.root, self.gpus = root, gpus
        self.peak_mib: dict[str, int] = {}
        self.seen: dict[str, dict[str, Any]] = {}  # process -> when it was first seen, first seen at work, and last seen to say something
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.5):
            for path in self.root.glob("logs/*/**/*.progress.json"):
                try:
                    state = read_json(path)
                except Exception:  # being replaced
                    continue
                times = self.seen.setdefault(f"{path.parent.name}/{path.name.removesuffix('.progress.json')}", {"began": time.time()})
                times["last"] = time.time() if state != times.pop("state", None) else times["last"]
                times["state"] = state
                if "at_work" not in times and (state["text"] == "training" or state["numbers"].get("tokens")):
                    times["at_work"] = time.time()
            if self.gpus:
                self._look_at_gpus()

    def _look_at_gpus(self) -> None:
        command = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
        found = subprocess.run(command, capture_output=True, text=True)
        for line in found.stdout.splitlines():
            index, _, used = line.partition(",")
            if used.strip().isdigit():
                self.peak_mib[index.strip()] = max(self.peak_mib.get(index.strip(), 0), int(used))


def write_tokenizer(folder: Path) -> None:
    """One token for each byte, and ChatML with marked answers: rows get the length that they are meant to have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*special, *letters])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def write_target(folder: Path, sizes: dict[str, int], heads: dict[str, int], *, device: str) -> float:
    """A dense Qwen3 with random weights in bf16, a file for each layer. Seconds it took; 0 when it is there."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3Config

    if (folder / "model.safetensors.index.json").is_file():
        return 0.0
    began = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    config = Qwen3Config(**sizes, **heads, max_position_embeddings=40960, tie_word_embeddings=False, eos_token_id=2, pad_token_id=0)
    config.architectures, config.dtype = ["Qwen3ForCausalLM"], "bfloat16"
    config.save_pretrained(folder)
    generator = torch.Generator(device).manual_seed(0)
    where: dict[str, str] = {}

    def save(file: str, shapes: dict[str, tuple[int, ...]]) -> None:
        tensors = {}
        for name, shape in shapes.items():
            if len(shape) == 1:
                tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
            else:
                tensors[name] = (torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) * 0.02).cpu()
            where[name] = file
        save_file(tensors, folder / file, metadata={"format": "pt"})

    hidden, inner, size = sizes["hidden_size"], sizes["intermediate_size"], heads["head_dim"]
    query, key = heads["num_attention_heads"] * size, heads["num_key_value_heads"] * size
    for i in range(sizes["num_hidden_layers"]):
        shapes = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_norm": (size,),
            "self_attn.k_norm": (size,),
        }
        shapes |= {"self_attn.q_proj": (query, hidden), "self_attn.k_proj": (key, hidden), "self_attn.v_proj": (key, hidden)}
        shapes |= {"self_attn.o_proj": (hidden, query), "mlp.down_proj": (hidden, inner)}
        shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
        save(f"layer-{i:03d}.safetensors", {f"model.layers.{i}.{name}.weight": shape for name, shape in shapes.items()})
    rows = (sizes["vocab_size"], hidden)
    save("ends.safetensors", {"model.embed_tokens.weight": rows, "model.norm.weight": (hidden,), "lm_head.weight": rows})
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    return time.perf_counter() - began


def write_corpus(path: Path, tokens: int, *, scale: float) -> int:
    """Conversations of about so many tokens in the bucket mix of a real set; tokens wanted."""
    generator, wanted = np.random.default_rng(0), 0
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="ascii") as file:
        for bucket, share in enumerate(BATCH_SHARES):
            low = int((SHORTEST if bucket == 0 else EDGES[bucket - 1]) * scale)
            high, filled = int(EDGES[bucket] * scale), 0
            while filled < share * tokens:
                length = int(generator.integers(low, high))
                text = generator.choice(letters, max(8, length - FRAME_TOKENS)).tobytes().decode("ascii")
                cut = max(2, len(text) // 8)
                roles = [("user", text[:cut]), ("assistant", text[cut:])]
                file.write(json.dumps({"messages": [{"role": role, "content": content} for role, content in roles]}) + "\n")
                filled += length
            wanted += filled
    return wanted


def write_run_file(path: Path, sections: dict[str, dict[str, Any]], root: Path) -> None:
    text = f"root = {toml_text(str(root))}\n"
    for name, values in sections.items():
        text += f"\n[{name}]\n" + "".join(f"{key} = {toml_text(value)}\n" for key, value in values.items())
    path.write_text(text, encoding="utf-8")


def run_file_sections(arguments: argparse.Namespace, *, model: Path, files: list[str], scale: float) -> dict[str, dict[str, Any]]:
    ranks = len(arguments.train_gpus)
    edges = [int(edge * scale) for edge in EDGES]
    longest = edges[-1] - 1
    capture: dict[str, Any] = {"gpus": arguments.capture_gpus, "dtype": "bfloat16"}
    train: dict[str, Any] = {"gpus": arguments.train_gpus, "dtype": "bfloat16"}
    if arguments.cpu:
        capture = {"gpus": "cpu", "replicas": len(arguments.capture_gpus), "dtype": "float32"}
        train = {"gpus": "cpu", "ranks": ranks, "dtype": "float32"}
    return {
        "target": {"model": str(model), **capture},
        "corpus": {"files": files, "bucket_edges": edges, "max_length": longest, "tokens_per_batch": max(longest, int(16384 * scale))},
        "store": {"codec": arguments.codec},
        "drafter": {"layers": 5 if not arguments.tiny else 1, "block_size": 16 if not arguments.tiny else 4}
        | ({"mask_token_id": arguments.mask_token_id} if arguments.mask_token_id is not None else {}),
        "train": train
        | {
            "epochs": 1,
            "max_steps": arguments.steps,
            "tokens_per_batch": longest * 3 // 2,
            "micro_batches_per_step": ranks * arguments.micro_batches,
            "head_precision": arguments.head_precision,
            "anchors": 512 if not arguments.tiny else 8,
            "slots_per_batch": 16384 if not arguments.tiny else 256,
            "log_every": max(1, min(10, arguments.steps // 12)),
            "evaluate_every": 1_000_000,
            "checkpoint_every": 1_000_000,
            "heldout_rows": 4,
        },
        "evaluate": {"heldout_rows": 4, "heldout_loop_rows": 0, "baseline": False},
    }


def run_case(name: str, arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    model, files, scale, written = arguments.model, arguments.corpus, 1.0, 0.0
    if name == "qwen27b":
        sizes, heads = (dict(TINY), TINY_HEADS) if arguments.tiny else (dict(SHAPE_27B), HEADS)
        if arguments.layers:
            sizes["num_hidden_layers"] = arguments.layers
        scale = 0.05 if arguments.tiny else 1.0
        model = arguments.weights or work / f"target-{sizes['num_hidden_layers']}-layers"
        written = write_target(model, sizes, heads, device="cpu" if arguments.cpu else "cuda")
        print(f"{name}: target in {model}, written in {written:.1f} s", flush=True)
        files = [str(work / f"{name}.jsonl")]
        write_corpus(Path(files[0]), arguments.tokens, scale=scale)
    folder = work / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_run_file(folder / "run.toml", run_file_sections(arguments, model=model, files=files, scale=scale), folder / "run")
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "kernels"), "TRITON_CACHE_DIR": str(folder / "kernels" / "triton")}
    command = [sys.executable, "-m", "luigi", "--module", "pipelines", "DFlashAll", "--config", str(folder / "run.toml")]
    watcher = Watcher(folder / "run", gpus=not arguments.cpu)
    watcher.start()
    began = time.perf_counter()
    with (folder / "output.txt").open("w") as output:
        running = subprocess.Popen(command, cwd=folder, env=os.environ | caches, stdout=output, stderr=subprocess.STDOUT)
        try:
            status = running.wait(arguments.limit_s)
        except subprocess.TimeoutExpired:  # figures of what was done are kept
            running.terminate()
            status = running.wait()
    seconds = time.perf_counter() - began
    watcher.ended.set()
    watcher.join()
    said = (folder / "output.txt").read_text(errors="replace").splitlines()
    if status:
        print("\n".join(said[-40:]), flush=True)
    result = {
        "status": status,
        "wall_s": round(seconds, 1),
        "weights_written_s": round(written, 1),
        "capture_gpus": "cpu" if arguments.cpu else arguments.capture_gpus,
        "train_gpus": "cpu" if arguments.cpu else arguments.train_gpus,
        "layers": arguments.layers,
        **capture_figures(folder / "run"),
        **train_figures(folder / "run", len(arguments.train_gpus)),
        "until_at_work_s": {
            process: round(times["at_work"] - times["began"], 1) for process, times in sorted(watcher.seen.items()) if "at_work" in times
        },
        "seconds_of_processes": {process: round(times["last"] - times["began"], 1) for process, times in sorted(watcher.seen.items())},
        "peak_gpu_gib": {index: round(mib / 1024, 1) for index, mib in sorted(watcher.peak_mib.items())},
        "said": [
            line for line in said if any(word in line for word in ("loaded in", "kernels (", "ready after", "warning", "out of memory"))
        ],
        "failures": sum("Traceback" in line or ": failed" in line for line in said),
    }
    if not arguments.keep:
        shutil.rmtree(folder / "run", ignore_errors=True)
    return result


def capture_figures(root: Path) -> dict[str, Any]:
    """From the manifests of the parts: tokens/s of each replica, and their sum, until all is written.

    A rate is of the parts after the first, whose seconds hold compilation and the self-check; null if they took less than
    STEADY_S together, since what was computed and waited for the writer when the first was committed is counted in them.
    ``from_start`` is of all parts.
    """
    names = sorted(root.glob("captures/*/hidden_states.zarr/part-*/manifest.json"))
    parts = [read_json(path)["extra"] for path in names]
    replicas: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        replicas.setdefault(str(part["replica"]), []).append(part)
    rates, from_start, waits, steady_s = {}, {}, {}, {}
    for name, found in sorted(replicas.items()):
        seconds = [part["seconds"] for part in found]
        tokens = [part["tokens"] for part in found]
        steady_s[name] = round(sum(seconds[1:]), 1)
        rates[name] = round(sum(tokens[1:]) / sum(seconds[1:]), 1) if steady_s[name] >= STEADY_S else None
        from_start[name] = round(sum(tokens) / max(sum(seconds), 1e-9), 1)
        waits[name] = round(sum(part["wait_s"] for part in found) / max(sum(seconds), 1e-9), 4)
    known = [rate for rate in rates.values() if rate is not None]
    return {
        "capture_tokens": int(sum(part["tokens"] for part in parts)),
        "capture_parts": len(parts),
        "capture_steady_s": steady_s,
        "capture_tokens_per_s": {
            "replicas": rates,
            "all": round(sum(known), 1) if known and len(known) == len(rates) else None,
            "from_start": from_start,
        },
        "capture_wait_share": waits,
        "capture_packed": all(part.get("packed") for part in parts) if parts else None,
        "capture_padding": round(float(np.mean([part["padding"] for part in parts])), 4) if parts else None,
    }


def train_figures(root: Path, ranks: int) -> dict[str, Any]:
    """From metrics.jsonl: over all of its steps but those of the first two rows, in which machines still warm up.

    Not a median: short rows have more blocks a token, so batches differ in tokens/s, and some buckets have few batches.
    """
    rows = []
    for path in root.glob("drafters/*/metrics.jsonl"):
        rows += [row for row in read_metrics(path) if "tokens_per_s" in row]
    if len(rows) < 4:
        return {"train_tokens_per_s": None}
    first, steady = rows[1], rows[2:]
    rate = (steady[-1]["tokens"] - first["tokens"]) / (steady[-1]["elapsed_s"] - first["elapsed_s"])
    last = steady[-1].get("ranks", {})
    return {
        "train_steps": rows[-1]["step"],
        "train_tokens_per_s": {"rank": round(rate / ranks, 1), "all": round(rate, 1)},
        "train_wait_share": round(float(np.mean([row["wait_share"] for row in steady])), 4),
        "train_ranks": last,
        "train_recompiles": rows[-1].get("recompiles"),
    }


def label(name: str, arguments: argparse.Namespace) -> str:
    """Key of a case in the result: its name, and what of it differs from the reference layout at full depth."""
    layout = f"{len(arguments.capture_gpus)}+{len(arguments.train_gpus)}"
    if set(arguments.capture_gpus) & set(arguments.train_gpus) and not arguments.cpu:
        layout += " shared"
    parts = [name] + ([layout] if layout != "5+3" else [])
    parts += [f"{arguments.layers} layers"] * bool(arguments.layers and name == "qwen27b")
    parts += [f"{arguments.micro_batches} micro-batches a rank"] * (arguments.micro_batches != 1)
    return ", ".join(parts + [f"head in {arguments.head_precision}"] * (arguments.head_precision != "bf16"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", nargs="*", choices=["smollm2", "qwen27b"], help="both by default; smollm2 only with --model and --corpus"
    )
    parser.add_argument("--capture-gpus", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--train-gpus", type=int, nargs="+", default=[5, 6, 7])
    parser.add_argument("--model", type=Path, help="folder of SmolLM2")
    parser.add_argument("--corpus", nargs="+", help="conversation files for SmolLM2")
    parser.add_argument("--mask-token-id", type=int, help="for a target without a free embedding row; 16 for SmolLM2")
    parser.add_argument("--weights", type=Path, help="folder of the 27B shape's weights, written there if it is empty")
    parser.add_argument("--layers", type=int, help="layers of the 27B shape instead of 64")
    parser.add_argument("--tokens", type=int, help="tokens of the synthetic corpus")
    parser.add_argument("--steps", type=int, help="most training steps")
    parser.add_argument("--limit-s", type=float, help="stop a run after so many seconds and keep the figures of what it did")
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--micro-batches", type=int, default=1, help="of a rank in a step")
    parser.add_argument("--head-precision", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--work", type=Path, help="folder for weights and runs; /dev/shm or the temporary folder by default")
    parser.add_argument("--keep", action="store_true", help="keep the runs")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes")
    parser.add_argument("--cpu", action="store_true", help="processes on the CPU in place of GPUs")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results") / "eight_gpus.json")
    arguments = parser.parse_args()
    if arguments.cpu and arguments.tiny and len(arguments.capture_gpus) == 5:
        arguments.capture_gpus, arguments.train_gpus = [0, 1], [2]
    arguments.cases = arguments.cases or ["qwen27b", *(["smollm2"] if arguments.model else [])]
    if "smollm2" in arguments.cases and not (arguments.model and arguments.corpus):
        parser.error("the case smollm2 needs --model and --corpus")
    arguments.tokens = arguments.tokens or (12_000 if arguments.tiny else 3_000_000)
    arguments.steps = arguments.steps or (6 if arguments.tiny else 60)
    return arguments


def main() -> None:
    arguments = parse()
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) and not arguments.tiny else None
    work = arguments.work or Path(tempfile.mkdtemp(prefix="eight-gpus-", dir=shared))
    result: dict[str, Any] = read_json(arguments.out) if arguments.out.is_file() else {"cases": {}}
    result["environment"], failed = environment(), False
    try:
        for name in arguments.cases:
            found = run_case(name, arguments, work)
            case, failed = label(name, arguments), failed or bool(found["status"])
            result["cases"][case] = found
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps({case: found}, indent=1), flush=True)
    finally:
        if arguments.work is None and not arguments.keep:
            shutil.rmtree(work, ignore_errors=True)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
