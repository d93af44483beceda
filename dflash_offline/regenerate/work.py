"""What one process still has to ask: parts that it holds by lease, their conversations, turn by turn.

A back end takes conversations, asks what each wants asked, and puts the answers back; everything about files, leases
and counting is here. All methods may be called from several threads.
"""

import contextlib
import hashlib
import json
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from dflash_offline.leases import Lease, Leases
from dflash_offline.progress import Progress
from dflash_offline.regenerate.parts import Folder, Journal, Plan, PlannedPart

LOOK_S = 0.5  # between looks at what other processes hold

__all__ = ["Answer", "Conversation", "Work"]


@dataclass(frozen=True)
class Answer:
    """One answer. ``finish_reason`` is "stop", or "length" when a limit cut it. ``reasoning`` came in a field of its own."""

    content: str
    finish_reason: str
    tokens: int = 0
    prompt_tokens: int | None = None
    reasoning: str | None = None


@dataclass
class Conversation:
    """A prompt being held: turns to ask, history so far."""

    part: "OpenPart"
    index: int
    turns: list[list[dict[str, str]]]
    id: Any
    source: Any
    where: str
    answers: list[Answer] = field(default_factory=list)
    failure: tuple[str, str] | None = None  # reason, detail

    @property
    def is_done(self) -> bool:
        """An answer cut by the length limit is the last one: what followed would be said to half an answer."""
        cut = bool(self.answers) and self.answers[-1].finish_reason == "length"
        return self.failure is not None or cut or len(self.answers) == len(self.turns)

    def history(self) -> list[dict[str, str]]:
        """Messages to send for the next answer."""
        messages: list[dict[str, str]] = []
        for turn, asked in enumerate(self.turns[: len(self.answers) + 1]):
            messages.extend(asked)
            if turn < len(self.answers):
                messages.append({"role": "assistant", "content": self.answers[turn].content})
        return messages

    def draw_key(self, seed: int) -> int:
        """63 bits that draw the next answer, from the run's seed and what is asked: the same however the work is shared."""
        digest = hashlib.blake2b(f"{seed} {self.index} {len(self.answers)}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def row(self) -> dict[str, Any]:
        """The finished conversation as a row of the corpus."""
        messages: list[dict[str, str]] = []
        for asked, answer in zip(self.turns, self.answers, strict=False):
            messages.extend(asked)
            reasoning = {} if answer.reasoning is None else {"reasoning_content": answer.reasoning}
            messages.append({"role": "assistant", "content": answer.content, **reasoning})
        own = {name: value for name, value in (("id", self.id), ("source", self.source)) if value is not None}
        return {**own, "messages": messages, "finish_reason": self.answers[-1].finish_reason}

    def take(self, record: dict[str, Any]) -> None:
        """Take in a line of the journal."""
        if "failed" in record:
            self.failure = (record["failed"], record["detail"])
        else:
            names = ("content", "finish_reason", "tokens", "prompt_tokens", "reasoning")
            self.answers.append(Answer(**{name: record[name] for name in names if name in record}))


class OpenPart:
    """A part that this process holds."""

    def __init__(self, folder: Folder, part: PlannedPart, lease: Lease) -> None:
        self.name, self.lease, self._folder = part.name, lease, folder
        self.began = time.monotonic()
        with folder.prompts(part.name).open(encoding="utf-8") as file:
            prompts = [json.loads(line) for line in file]
        self.conversations = {prompt["index"]: Conversation(part=self, **prompt) for prompt in prompts}
        self.journal = Journal(folder.journal(part.name))
        for record in self.journal.records:
            self.conversations[record["prompt"]].take(record)
        self.resumed_answers = len(self.journal.records)
        self.journal.records.clear()
        self.left = sum(not conversation.is_done for conversation in self.conversations.values())
        self.is_lost = False

    def commit(self, by: dict[str, Any]) -> Counter[str]:
        """Write conversations and mark; returns the counts of the mark."""
        ordered = list(self.conversations.values())
        kept = [conversation for conversation in ordered if conversation.failure is None]
        answers = [answer for conversation in kept for answer in conversation.answers]
        counts = Counter(
            conversations=len(kept),
            answers=len(answers),
            tokens=sum(answer.tokens for answer in answers),
            cut=sum(conversation.answers[-1].finish_reason == "length" for conversation in kept),
        )
        left_out = [
            {
                "prompt": conversation.where,
                "id": conversation.id,
                "turn": len(conversation.answers) + 1,
                "reason": conversation.failure[0],
                "detail": conversation.failure[1],
            }
            for conversation in ordered
            if conversation.failure is not None
        ]
        seconds = {"seconds": round(time.monotonic() - self.began, 3), "resumed_answers": self.resumed_answers}
        mark = {"counts": dict(counts), "left_out": left_out, "by": {**by, **seconds}}
        self._folder.commit(self.name, [conversation.row() for conversation in kept], mark)
        self.journal.close()
        return counts


class Work:
    """The share of one process in a regeneration.

    Args:
        by: recorded with every part: replica, device, the servers' model.
        replicas: how many processes share the work, for the estimate of the time left.
    """

    def __init__(self, folder: Folder, plan: Plan, leases: Leases, progress: Progress, *, by: dict[str, Any], replicas: int = 1) -> None:
        self.folder, self.plan, self.leases, self.progress, self.by, self.replicas = folder, plan, leases, progress, by, replicas
        self._lock = threading.RLock()
        self._open: dict[str, OpenPart] = {}
        self._pending: deque[Conversation] = deque()
        self._looked_at = float("-inf")
        self._committed: set[str] = set()
        self._began: float | None = None
        self.answers = self.tokens = self.conversations = self.left_out = 0  # of this process
        self.was_answered = False  # ever: by this process, or by one before it
        self._doubtful: list[tuple[Conversation, dict[str, Any]]] = []

    def take(self, count: int) -> list[Conversation] | None:
        """Up to ``count`` conversations that want an answer. None once every part is finished, by whomever.

        An empty list means that the rest is held by other processes, or is being answered: ask again later.
        """
        with self._lock:
            if len(self._pending) < count and time.monotonic() - self._looked_at >= LOOK_S:
                self._claim(count)
            taken = [self._pending.popleft() for _ in range(min(count, len(self._pending)))]
            if not taken and not self._open:
                if len(self._committed) == len(self.plan.parts):
                    return None
                self.report(text="waiting for parts that other processes hold")
            if taken and self._began is None:
                self._began = time.monotonic()
            return taken

    def give_back(self, conversations: list[Conversation]) -> None:
        """Put conversations that were taken and not asked back in front of the others."""
        with self._lock:
            self._pending.extendleft(reversed(conversations))

    def put(self, conversation: Conversation, answer: Answer) -> None:
        """Record an answer. An empty one leaves the conversation out."""
        if not answer.content.strip():
            detail = f"{answer.tokens} tokens of reasoning, cut by the length limit" if answer.reasoning else answer.finish_reason
            self.fail(conversation, "empty answer", detail)
            return
        optional = {"prompt_tokens": answer.prompt_tokens, "reasoning": answer.reasoning}
        record = {
            "prompt": conversation.index,
            "turn": len(conversation.answers),
            "content": answer.content,
            "finish_reason": answer.finish_reason,
            "tokens": answer.tokens,
            **{name: value for name, value in optional.items() if value is not None},
        }
        with self._lock:
            self.answers += 1
            self.tokens += answer.tokens
            self.was_answered = True
            self._record(conversation, record)
            while self._doubtful:
                self.left_out += 1
                self._record(*self._doubtful.pop())

    def fail(self, conversation: Conversation, reason: str, detail: str, *, doubtful: bool = False) -> None:
        """Leave a conversation out.

        Args:
            doubtful: it may be that nothing is ever answered, for example because a setting is wrong; then no row is to
                blame. Such failures are recorded only once something has been answered.
        """
        with self._lock:
            record = {"prompt": conversation.index, "turn": len(conversation.answers), "failed": reason, "detail": detail}
            if doubtful and not self.was_answered:
                self._doubtful.append((conversation, record))
                return
            self.left_out += 1
            self._record(conversation, record)

    @property
    def pending(self) -> int:
        """Conversations that nobody has taken yet, of the parts that are open."""
        with self._lock:
            return len(self._pending)

    @property
    def doubtful(self) -> list[str]:
        """Details of the failures that are not recorded yet."""
        with self._lock:
            return [record["detail"] for _, record in self._doubtful]

    def _record(self, conversation: Conversation, record: dict[str, Any]) -> None:
        part = conversation.part
        if part.is_lost or not part.lease.is_held:
            self._lose(part)
            return
        part.journal.append(record)
        conversation.take(record)
        if conversation.is_done:
            self.conversations += 1
            part.left -= 1
            if not part.left:
                self._commit(part)
        self.report(text=f"{len(self._open)} part{'s' if len(self._open) != 1 else ''} open")

    def _lose(self, part: OpenPart) -> None:
        if not part.is_lost:
            part.is_lost = True
            part.journal.close()
            self._open.pop(part.name, None)
            self._pending = deque(conversation for conversation in self._pending if conversation.part is not part)
            self.leases.forget(part.lease)
            self.progress.say(f"{part.name} was taken over by another process; its work is left to it")

    def _claim(self, count: int) -> None:
        """Open further parts until ``count`` conversations are pending or nothing is free."""
        self._committed = self.folder.committed()
        self.was_answered = self.was_answered or bool(self._committed)
        missing = [part for part in self.plan.parts if part.name not in self._committed and part.name not in self._open]
        held = self.leases.all([part.name for part in missing]) if missing else {}
        for part in missing:
            if len(self._pending) >= count:
                return
            if part.name in held and not held[part.name].is_free:
                continue
            lease = self.leases.claim(part.name)
            if lease is None:
                continue
            if part.name in self.folder.committed():  # finished between our look and our claim
                lease.discard()
                self._committed.add(part.name)
                continue
            if part.name in held and held[part.name].age_s < 1e9:  # not a released one, whose time stamp is 0
                self.progress.say(f"takes {part.name} over from {held[part.name].owner or 'a process that is gone'}")
            opened = OpenPart(self.folder, part, lease)
            self._open[part.name] = opened
            self.was_answered = self.was_answered or any(conversation.answers for conversation in opened.conversations.values())
            if opened.resumed_answers:
                self.progress.say(f"{part.name} goes on: {opened.resumed_answers} answers are there, {opened.left} conversations are left")
            self._pending.extend(conversation for conversation in opened.conversations.values() if not conversation.is_done)
            if not opened.left:
                self._commit(opened)
        if len(self._pending) < count:
            self._looked_at = time.monotonic()  # nothing more is free: look again a little later

    def _commit(self, part: OpenPart) -> None:
        counts = part.commit(self.by)
        self._open.pop(part.name)
        self._committed.add(part.name)
        part.lease.discard()
        self.report(text=f"{part.name} finished", force=True)
        out = len(part.conversations) - counts["conversations"]
        numbers = self.progress.state["numbers"]
        self.progress.say(
            f"{part.name} finished: {counts['conversations']} conversations, {counts['tokens']:,} tokens"
            f"{f', {out} left out' if out else ''}, {numbers.get('tokens_per_s', 0):,.0f} tokens/s; "
            f"{len(self._committed)}/{len(self.plan.parts)} parts, ETA {_minutes(numbers.get('eta_s', 0))}"
        )

    def report(self, *, text: str, force: bool = False) -> None:
        """Progress in conversations of the whole regeneration, rates of this process."""
        with self._lock:
            done = sum(part.prompts for part in self.plan.parts if part.name in self._committed)
            done += sum(len(part.conversations) - part.left for part in self._open.values())
            numbers: dict[str, float] = {"answers": self.answers, "tokens": self.tokens, "left_out": self.left_out}
            if self._began is not None and self.conversations:
                seconds = max(time.monotonic() - self._began, 1e-9)
                eta_s = (self.plan.prompts - done) * seconds / self.conversations / max(1, self.replicas)
                numbers |= {
                    "tokens_per_s": round(self.tokens / seconds, 1),
                    "answers_per_s": round(self.answers / seconds, 3),
                    "eta_s": round(eta_s, 1),
                }
            self.progress.update(done=done, total=self.plan.prompts, text=text, force=force, **numbers)

    def finish(self, key: str, content: dict[str, Any]) -> dict[str, Any] | None:
        """Write the manifest once all parts are there; None when another process did."""
        while not self.folder.is_complete:
            lease = None
            with contextlib.suppress(FileNotFoundError):  # the folder of leases goes when another process has finished
                lease = self.leases.claim("manifest")
            if lease is None:
                time.sleep(LOOK_S / 5)
                continue
            try:
                return None if self.folder.is_complete else self.folder.finish(key, self.plan, content)
            finally:
                lease.release()
        return None


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds < 90 else f"{seconds / 60:.0f}m" if seconds < 5400 else f"{seconds / 3600:.1f}h"
