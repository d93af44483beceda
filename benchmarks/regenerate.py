"""How fast the target answers with transformers on one GPU: ``python benchmarks/regenerate.py``.

    python benchmarks/regenerate.py                      # SmolLM2-135M: the demo model if it is installed, else its shape
    python benchmarks/regenerate.py --device cpu --tiny  # the same code on a tiny model, to see that it runs

The whole of the back end is timed, from prompts to journal: template, tokenizer, prefill, steps, text, files; not the
loading and not the first recording of a step. Prompts are those of the demo corpus, numbered so that no two are alike.
Answer lengths follow the demo corpus's own (``--max-new-tokens`` at the most): an answer ends at a length drawn from
them, whatever the model says, so random weights do the same work as real ones. ``step_ms`` is a step alone, with every
row at half its length; ``baseline`` is transformers' own ``generate`` on the same prompts with a batch as large.

Writes benchmarks/results/regenerate_h200.json (no file on a CPU).
"""

import argparse
import gzip
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from dflash_offline import demo, keys
from dflash_offline.config import RunConfig
from dflash_offline.corpus.template import load_template
from dflash_offline.environment import environment
from dflash_offline.errors import TargetError
from dflash_offline.leases import Leases
from dflash_offline.progress import Progress
from dflash_offline.regenerate.decoding import RowDecoder, check_rows
from dflash_offline.regenerate.local import Asked, Local, Speaker
from dflash_offline.regenerate.parts import Folder, make_plan
from dflash_offline.regenerate.work import Answer, Conversation, Work
from dflash_offline.target import facts, load_target

REPOSITORY = Path(__file__).resolve().parent.parent
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
}
TINY = SMOLLM2 | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
ANY_TOKEN = 300
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CASES = [
    ("greedy", 256, 0.0, 1.0),
    ("greedy", 512, 0.0, 1.0),
    ("greedy", 1024, 0.0, 1.0),
    ("greedy", 2048, 0.0, 1.0),
    ("drawn, temperature 0.8", 1024, 0.8, 1.0),
    ("drawn, temperature 0.8, top_p 0.95", 1024, 0.8, 0.95),
]


def conversations() -> list[dict[str, Any]]:
    with gzip.open(REPOSITORY / "data" / "demo-conversations.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def random_model(folder: Path, sizes: dict[str, Any]) -> Path:
    """A model folder with random weights of a shape and a tokenizer trained on the demo corpus."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=sizes["vocab_size"], special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((message["content"] for row in conversations() for message in row["messages"]), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>")
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)).to(torch.bfloat16)
    with torch.no_grad():  # what no text can hold is never said
        model.lm_head.weight[: len(special)] = 0
        model.lm_head.weight[len(fast) :] = 0
    model.save_pretrained(folder)
    return folder


class TimedSpeaker(Speaker):
    """Ends each answer at a length drawn from those of real answers, and takes any token for text, as random weights say any."""

    def __init__(self, *arguments: Any, lengths: list[int], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.lengths = lengths
        self.draw = random.Random(0)
        self.unspeakable = self._control | set(range(self._num_tokens, SMOLLM2["vocab_size"]))

    def answer(self, tokens: list[int]) -> Answer:
        return super().answer([ANY_TOKEN if token in self.unspeakable else token for token in tokens])

    def ask(self, conversation: Conversation) -> Asked:
        asked = super().ask(conversation)
        return Asked(conversation, asked.ids, min(asked.most_tokens, self.draw.choice(self.lengths)))


class Bench:
    """One model, several cases."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.device = torch.device(arguments.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.rows = conversations()
        name = arguments.model
        if name is None:
            try:
                demo.find_gguf()
                name = "demo:smollm2" if not arguments.tiny else None
            except TargetError:
                name = None
        self.name = name or ("tiny, random weights" if arguments.tiny else "SmolLM2-135M shape, random weights")
        if name == "demo:smollm2":
            self.model_folder = demo.ensure_converted()
        else:
            self.model_folder = Path(name) if name else random_model(folder / "model", TINY if arguments.tiny else SMOLLM2)
        loaded = load_target(self.model_folder, dtype=self.dtype, device=self.device, attention="sdpa", layer_ids=[], keep_head=True)
        self.model, self.facts = loaded.model, facts(self.model_folder)

    def config(self, num_prompts: int, batch: int, temperature: float, top_p: float) -> RunConfig:
        folder = self.folder / f"run-{time.monotonic_ns()}"
        folder.mkdir()
        with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
            for number in range(num_prompts):
                text = self.rows[number % len(self.rows)]["messages"][0]["content"]
                file.write(json.dumps({"id": number, "prompt": f"({number}) {text}"}, ensure_ascii=False) + "\n")
        path = folder / "run.toml"
        path.write_text(
            f"[target]\nmodel = {json.dumps(str(self.model_folder))}\n[corpus]\n[regenerate]\nbatch = {batch}\n"
            f"temperature = {temperature}\n"
            f'top_p = {top_p}\nmax_new_tokens = {self.arguments.max_new_tokens}\nprompts = ["prompts.jsonl"]\n'
        )
        return RunConfig.load(path)

    def lengths(self, config: RunConfig) -> list[int]:
        tokenizer = load_template(config).tokenizer
        answers = [message["content"] for row in self.rows for message in row["messages"] if message["role"] == "assistant"]
        return [len(encoding.ids) + 1 for encoding in tokenizer.encode_batch(answers)]

    def case(self, what: str, batch: int, temperature: float, top_p: float) -> dict[str, Any]:
        """One case, after a short one that is not timed."""
        for num_prompts in (max(8, batch // 4), self.arguments.prompts_per_row * batch):
            config = self.config(num_prompts, batch, temperature, top_p)
            speaker = TimedSpeaker(
                load_template(config),
                stop_ids=[] if "random" in self.name else self.facts.eos_token_ids,
                max_new_tokens=self.arguments.max_new_tokens,
                context=self.facts.max_position_embeddings,
                lengths=self.lengths(config),
            )
            distance, token_bytes = check_rows(self.model, [[5, 6, 7, 8], [9] * 20], attention="sdpa")
            out = Folder(config.root_dir / "regenerations" / keys.regenerate_key(config))
            leases = Leases(self.prepared(config, out).leases)
            work = Work(out, out.load_plan(), leases, Progress(None), by={})
            work.progress.say = lambda text: None  # type: ignore[method-assign]
            local = Local(self.model, speaker, work, work.progress, config, token_bytes=token_bytes)
            begin = time.perf_counter()
            local.run()
            self.synchronize()
            seconds = time.perf_counter() - begin
            leases.close()
        assert local.decoder is not None
        result = {
            "case": what,
            "rows": local.decoder.num_rows,
            "buffer_tokens": local.decoder.length,
            "prompts": num_prompts,
            "tokens": work.tokens,
            "left_out": work.left_out,
            "seconds": round(seconds, 2),
            "tokens_per_s": round(work.tokens / seconds),
            "step_ms": round(self.step_ms(local.decoder), 3),
            "recorded": local.decoder._graph is not None,
            "distance": distance,
        }
        print(json.dumps(result), flush=True)
        return result

    def prepared(self, config: RunConfig, out: Folder) -> Folder:
        make_plan(config, out, replicas=1)
        return out

    def step_ms(self, decoder: RowDecoder) -> float:
        """A step with every row at half the buffer's length."""
        launches = 4
        half = decoder.length // 2
        decoder.position.fill_(half)
        decoder.last.fill_(decoder.length - 1)
        decoder.active.fill_(True)
        decoder.launch()
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(launches):
            decoder.position.fill_(half)
            decoder.active.fill_(True)
            decoder.launch()
        self.synchronize()
        return 1000 * (time.perf_counter() - begin) / (launches * decoder.steps)

    def baseline(self, batch: int) -> dict[str, Any]:
        """transformers' own ``generate``: the same prompts sorted by length, padded on the left, until the longest answer ends."""
        from transformers import GenerationConfig

        from dflash_offline.regenerate.row_attention import set_attention

        set_attention(self.model, "sdpa")
        config = self.config(batch, batch, 0.0, 1.0)
        template = load_template(config)
        rows = [[{"role": "user", "content": row["messages"][0]["content"]}] for row in self.rows]
        ids = sorted((template.encode(template.render(rows[i % len(rows)], generation_prompt=True), "").ids for i in range(batch)), key=len)
        longest = max(map(len, ids))
        tokens = torch.tensor([[0] * (longest - len(line)) + list(line) for line in ids], device=self.device)
        mask = torch.tensor([[0] * (longest - len(line)) + [1] * len(line) for line in ids], device=self.device)
        draw, lengths = random.Random(0), self.lengths(config)
        wanted = [min(self.arguments.max_new_tokens, draw.choice(lengths)) for _ in range(batch)]
        settings = GenerationConfig(max_new_tokens=max(wanted), do_sample=False, pad_token_id=0, eos_token_id=None)
        self.model.generation_config = GenerationConfig()
        begin = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(input_ids=tokens, attention_mask=mask, generation_config=settings)
        self.synchronize()
        seconds = time.perf_counter() - begin
        result = {"rows": batch, "seconds": round(seconds, 2), "tokens": sum(wanted), "tokens_per_s": round(sum(wanted) / seconds)}
        print(json.dumps({"baseline": result}), flush=True)
        return result

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", help="model folder, or demo:smollm2; its shape with random weights when it is not installed")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few prompts, to see that the code runs")
    parser.add_argument("--max-new-tokens", type=int, default=320)
    parser.add_argument("--prompts-per-row", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="*", help="only cases with so many rows")
    parser.add_argument("--no-baseline", action="store_true")
    arguments = parser.parse_args()
    cases = CASES
    if arguments.tiny:
        torch.set_num_threads(1)
        arguments.max_new_tokens = 24
        cases = [("greedy", 8, 0.0, 1.0), ("drawn, temperature 0.8, top_p 0.95", 8, 0.8, 0.95)]
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(arguments, Path(name))
        device = torch.cuda.get_device_name() if bench.device.type == "cuda" else "cpu"
        print(f"{bench.name} on {device}", flush=True)
        results: dict[str, Any] = {"model": bench.name, "device": device, "max_new_tokens": arguments.max_new_tokens, "cases": []}
        for case in cases:
            if not arguments.rows or case[1] in arguments.rows:
                results["cases"].append(bench.case(*case))
        if not arguments.no_baseline:
            results["baseline"] = bench.baseline(16 if arguments.tiny else 512)
    greedy = [case["tokens_per_s"] for case in results["cases"] if case["case"] == "greedy"]
    results["headline_tokens_per_s"] = max(greedy, default=0)
    results["environment"] = environment()
    if bench.device.type == "cuda" and not arguments.tiny:
        path = REPOSITORY / "benchmarks" / "results" / "regenerate_h200.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1), file=sys.stdout)


if __name__ == "__main__":
    main()
