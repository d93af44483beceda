"""The transformers back end: the target loaded here answers, hundreds of conversations at once.

Prompts of like length enter together, the longest first, so that little of a forward is padding; a row whose answer has
ended takes the next prompt. While the queued steps run, the host writes down the answers before them and encodes the
prompts that come next (see ``decoding``).
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_offline import identity, target
from dflash_offline.config import RunConfig
from dflash_offline.corpus.schema import RowRejected
from dflash_offline.corpus.template import THINKING, ChatTemplate, load_template
from dflash_offline.errors import RegenerateError
from dflash_offline.evaluate.rows import supports
from dflash_offline.figures import counted
from dflash_offline.precision import DTYPES
from dflash_offline.progress import Progress
from dflash_offline.regenerate.decoding import TOLERANCE, Drawing, RowDecoder, check_rows
from dflash_offline.regenerate.generating import generate
from dflash_offline.regenerate.work import Answer, Conversation, Work

STEPS = {"cuda": 16, "cpu": 2}  # of one launch: a row whose answer ends waits half of it on average
ROUND = 256  # buffer lengths are multiples
GPU_SHARE = 0.8  # of the memory that is free once the target is loaded
CPU_BYTES = 2 << 30
LOGITS_BYTES = 16  # of an entry, over all copies that choosing a token makes
WAIT_S = 0.2


@dataclass
class Asked:
    """A conversation whose next turn is ready to be answered."""

    conversation: Conversation
    ids: list[int]
    most_tokens: int

    @property
    def length(self) -> int:
        """Of the buffer that prompt and answer need."""
        return len(self.ids) + self.most_tokens + 1


class Speaker:
    """Turns conversations into token ids, and answers into text.

    Args:
        context: most tokens of prompt and answer together.
    """

    def __init__(self, template: ChatTemplate, *, stop_ids: Iterable[int], max_new_tokens: int, context: int) -> None:
        self.template, self.max_new_tokens, self.context = template, max_new_tokens, context
        self.stop_ids = sorted({*stop_ids, *(template.control_ids[name] for name in template.enders if name in template.special)})
        thinking = {tag for pair in THINKING for tag in pair}
        self._control = {number for name, number in template.control_ids.items() if name in template.special and name not in thinking}
        self._num_tokens = template.tokenizer.get_vocab_size(with_added_tokens=True)

    def ask(self, conversation: Conversation) -> Asked:
        """The next turn of a conversation.

        Raises:
            RowRejected: the template refuses it, or it is too long.
        """
        messages, _, mark = self.template.mark(conversation.history(), None)
        ids = list(self.template.encode(self.template.render(messages, generation_prompt=True), mark).ids)
        room = self.context - len(ids)
        if room < 1 or not ids:
            raise RowRejected("too long for the target", f"{len(ids)} prompt tokens, of {self.context} that the target takes")
        return Asked(conversation, ids, min(self.max_new_tokens, room))

    def answer(self, tokens: list[int]) -> Answer:
        """Generated tokens -> answer. The stop token at the end is no part of the text.

        Raises:
            RowRejected: it holds control tokens, which text cannot hold.
        """
        stopped = bool(tokens) and tokens[-1] in self.stop_ids
        said = tokens[:-1] if stopped else tokens
        if any(token in self._control or token >= self._num_tokens for token in said):
            raise RowRejected("control tokens in the answer", "a turn's control token in its middle; servers can tell such parts apart")
        text = self.template.tokenizer.decode(said, skip_special_tokens=False)
        if not stopped:
            text = text.rstrip("\ufffd")  # the limit fell into a character
        return Answer(text, "stop" if stopped else "length", tokens=len(tokens))


class Local:
    """Answers with a loaded target until there is nothing left to ask.

    Args:
        model: the target with its head; every layer of it attends fully (``evaluate.rows.supports``).
        token_bytes: of keys and values of one token.
    """

    def __init__(self, model: Any, speaker: Speaker, work: Work, progress: Progress, config: RunConfig, *, token_bytes: int) -> None:
        self.model, self.speaker, self.work, self.progress, self.section = model, speaker, work, progress, config.regenerate
        self.device = next(model.parameters()).device
        self.token_bytes = token_bytes
        self.decoder: RowDecoder | None = None
        self.live: dict[int, tuple[Asked, list[int]]] = {}  # row -> what it answers, tokens so far
        self.ready: list[Asked] = []  # by length, the longest last
        self._most_rows = self.section.batch
        self._is_over = False

    def run(self) -> None:
        """Until every part is finished, by whomever."""
        ended: list[tuple[Asked, list[int]]] = []
        while True:
            launched = list(self.live)
            if launched:
                self.decoder.launch()
            self._settle(ended)
            self._refill()
            self._admit()
            ended = self._collect(launched) if launched else []
            if not launched and not self.live and not self.ready:
                if self._is_over:
                    return
                time.sleep(WAIT_S)

    def _settle(self, ended: list[tuple[Asked, list[int]]]) -> None:
        """Write down answers; ask what comes next in their conversations."""
        for asked, tokens in ended:
            conversation = asked.conversation
            try:
                self.work.put(conversation, self.speaker.answer(tokens))
                if not conversation.is_done and not conversation.part.is_lost:
                    self.ready.append(self.speaker.ask(conversation))
            except RowRejected as error:
                self.work.fail(conversation, error.reason, error.detail)
        self.work.report(text=f"{counted(len(self.live), 'conversation')} at once")

    def _refill(self) -> None:
        """Keep enough prompts ready for the rows that become free meanwhile."""
        wanted = self._most_rows if self.decoder is None else max(1, self.decoder.num_rows // 2)
        if self._is_over or len(self.ready) >= wanted:
            return
        taken = self.work.take(wanted - len(self.ready))
        if taken is None:
            self._is_over = not self.live
            taken = []
        for conversation in taken:
            try:
                self.ready.append(self.speaker.ask(conversation))
            except RowRejected as error:
                self.work.fail(conversation, error.reason, error.detail)

    def _admit(self) -> None:
        """Bring ready prompts into free rows, unless so few are free that it is not worth a forward yet."""
        if not self.ready:
            return
        self.ready.sort(key=lambda asked: len(asked.ids))
        if self.decoder is None or not any(asked.length <= self.decoder.length for asked in self.ready):
            if self.live:
                return  # the buffers must grow, which waits until they are empty
            self._build(max(asked.length for asked in self.ready))
        free = [row for row in range(self.decoder.num_rows) if row not in self.live]
        if self.live and len(free) < min(len(self.ready), max(1, self.decoder.num_rows // 16)):
            return
        fitting = [asked for asked in reversed(self.ready) if asked.length <= self.decoder.length][: len(free)]
        rows = free[: len(fitting)]
        try:
            self.decoder.admit(
                rows,
                [asked.ids for asked in fitting],
                most_tokens=[asked.most_tokens for asked in fitting],
                keys=[asked.conversation.draw_key(self.section.seed) for asked in fitting],
            )
        except torch.OutOfMemoryError:
            if self.live or self._most_rows == 1:
                raise RegenerateError("the target's keys and values do not fit the memory; set a smaller [regenerate] batch") from None
            self._most_rows = max(1, self.decoder.num_rows // 2)
            self.decoder = None
            self.progress.say(f"Memory is short: at most {self._most_rows} conversations at once")
            return
        entered = set(map(id, fitting))
        self.ready = [asked for asked in self.ready if id(asked) not in entered]
        self.live.update((row, (asked, [])) for row, asked in zip(rows, fitting, strict=True))

    def _build(self, length: int) -> None:
        """Buffers for prompts and answers of this length, with some room for longer ones."""
        self.decoder = None
        length = -(-min(length + length // 8, max(length, self.speaker.context + 1)) // ROUND) * ROUND
        row_bytes = length * self.token_bytes + self.model.get_output_embeddings().weight.shape[0] * LOGITS_BYTES
        budget = CPU_BYTES
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            budget = int(torch.cuda.mem_get_info(self.device)[0] * GPU_SHARE)
        num_rows = max(1, min(self._most_rows, budget // row_bytes))
        self.progress.say(
            f"{num_rows} conversations at once, buffers of {length} tokens, "
            f"{num_rows * length * self.token_bytes / 1e9:.2g} GB of keys and values"
        )
        self.decoder = RowDecoder(
            self.model,
            num_rows=num_rows,
            length=length,
            steps=STEPS[self.device.type],
            stop_ids=self.speaker.stop_ids,
            drawing=Drawing(self.section.temperature, self.section.top_p),
            say=self.progress.say,
        )

    def _collect(self, rows: list[int]) -> list[tuple[Asked, list[int]]]:
        """Take what the last launch gave these rows; returns the answers that ended."""
        written, active = self.decoder.collect()
        counts = (written >= 0).sum(0)
        ended = []
        for row in rows:
            asked, tokens = self.live[row]
            tokens.extend(written[: counts[row], row].tolist())
            if not active[row]:
                ended.append((asked, tokens))
                del self.live[row]
        return ended


def run_target(config: RunConfig, work: Work, progress: Progress) -> None:
    """Load the target and answer everything that is left.

    Raises:
        TargetError, CorpusError: target or chat template cannot be used.
        RegenerateError: it does not fit the memory.
    """
    first = work.take(1)
    while first == []:
        time.sleep(WAIT_S)
        first = work.take(1)
    if first is None:
        return
    work.give_back(first)
    section = config.regenerate
    folder: Path = identity.model_folder(config)
    device = torch.device("cpu")
    if (config.target.gpus if section.gpus is None else section.gpus) != "cpu":
        if not torch.cuda.is_available():
            raise RegenerateError('[regenerate]: this process sees no GPU; check nvidia-smi, or set gpus = "cpu"')
        device = torch.device("cuda", 0)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    progress.update(text="loading the target", force=True)
    began = time.monotonic()
    speaker, model = _speaker(config, folder), _load(config, folder, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    work.by |= {"device": name, "dtype": config.target.dtype}
    if supports(model):
        distance, token_bytes = _check(model, speaker, attention=config.target.attention)
        if distance <= TOLERANCE[DTYPES[config.target.dtype]]:
            progress.say(
                f"Loaded and checked in {time.monotonic() - began:.1f} s: logits are at most {distance:.2g} deviations from the model's own"
            )
            Local(model, speaker, work, progress, config, token_bytes=token_bytes).run()
            return
        progress.say(f"Rows of many conversations give other logits than the model's own ({distance:.2g} deviations off)")
    progress.say('This target answers by transformers\' own generate, which is much slower; servers are faster: backend = "server"')
    _generate_all(config, model, speaker, work)


def _load(config: RunConfig, folder: Path, device: torch.device) -> Any:
    section = config.target
    loaded = target.load_target(
        folder,
        dtype=DTYPES[section.dtype],
        device=device,
        attention=section.attention,
        layer_ids=[],
        trust_remote_code=section.trust_remote_code,
        keep_head=True,
    )
    return loaded.model


def _speaker(config: RunConfig, folder: Path) -> Speaker:
    facts = target.facts(folder, trust_remote_code=config.target.trust_remote_code)
    return Speaker(
        load_template(config),
        stop_ids=facts.eos_token_ids,
        max_new_tokens=config.regenerate.max_new_tokens,
        context=facts.max_position_embeddings,
    )


def _check(model: Any, speaker: Speaker, *, attention: str) -> tuple[float, int]:
    """How far the rows' logits are from the model's own, and the bytes of a token's keys and values."""
    texts = ("A short text.", "Another one, of which there is a little more to be read, 1 2 3.")
    return check_rows(model, [list(speaker.template.encode(text, "").ids) for text in texts], attention=attention)


def _generate_all(config: RunConfig, model: Any, speaker: Speaker, work: Work) -> None:
    """The slow way: groups of like length by ``generate``; one conversation at a time where a state goes from token to token."""
    section = config.regenerate
    ready: list[Asked] = []
    while True:
        taken = work.take(max(1, 4 * section.batch - len(ready)))
        if taken is None and not ready:
            return
        conversations = list(taken or [])
        for conversation in conversations:
            _ask_into(ready, conversation, speaker, work)
        if not ready:
            time.sleep(WAIT_S)
            continue
        ready.sort(key=lambda asked: len(asked.ids))
        group = [ready.pop() for _ in range(min(len(ready), section.batch))]
        for asked, tokens in zip(group, generate(model, group, speaker.stop_ids, section), strict=True):
            conversation = asked.conversation
            try:
                work.put(conversation, speaker.answer(tokens))
            except RowRejected as error:
                work.fail(conversation, error.reason, error.detail)
            if not conversation.is_done and not conversation.part.is_lost:
                _ask_into(ready, conversation, speaker, work)


def _ask_into(ready: list[Asked], conversation: Conversation, speaker: Speaker, work: Work) -> None:
    try:
        ready.append(speaker.ask(conversation))
    except RowRejected as error:
        work.fail(conversation, error.reason, error.detail)
