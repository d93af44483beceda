"""The server back end: a thread for each request in flight; a conversation is held by one thread, turn by turn.

The servers render with the chat template that they were started with. Whether that is this run's is checked on the first
answers: a server that counts other prompt tokens than the target's own template gives is told of in the log.
"""

import difflib
import threading
from typing import Any

from dflash_offline.config import RunConfig
from dflash_offline.errors import DFlashError, RegenerateError
from dflash_offline.figures import counted
from dflash_offline.progress import Progress
from dflash_offline.regenerate.servers import RequestRefused, Servers, Stopped, read_key
from dflash_offline.regenerate.work import Answer, Conversation, Work

MAX_DOUBTFUL = 20  # refused requests, before anything is answered, that end the run
CHECKED_ANSWERS = 16  # whose prompt tokens are compared
MAX_THREADS = 2048
POLL_S = 0.2

_REASONS = {"stop": "stop", "eos": "stop", "length": "length", "max_tokens": "length"}


class Asker:
    """Asks servers until there is nothing left to ask."""

    def __init__(self, config: RunConfig, servers: Servers, work: Work, progress: Progress, *, model: str) -> None:
        self.config, self.section, self.servers, self.work, self.progress = config, config.regenerate, servers, work, progress
        self.model = model
        self.error: BaseException | None = None
        self._asking = 0
        self._lock = threading.Lock()
        self._checked = _PromptCheck(config, progress)

    def run(self) -> None:
        """Start the threads and wait for them.

        Raises:
            RegenerateError: nothing is ever answered, or the servers are not to be used as the run file says.
        """
        count = min(MAX_THREADS, self.section.concurrency * len(self.section.base_urls), max(1, self.work.plan.prompts))
        threads = [threading.Thread(target=self._hold, name=f"request {i}", daemon=True) for i in range(count)]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads) and self.error is None:
                self._check_doubts()
                self.servers.stopped.wait(POLL_S)
                self.work.report(text=f"{self.servers.in_flight} requests in flight")
        finally:
            self.servers.stop()
        if self.error is not None:
            raise self.error

    def _check_doubts(self) -> None:
        doubts = self.work.doubtful
        with self._lock:
            idle = not self._asking
        if len(doubts) >= MAX_DOUBTFUL or (doubts and idle and not self.work.pending):
            self.error = RegenerateError(f"the servers answer nothing: {doubts[0]} ({counted(len(doubts), 'request')}, none answered)")

    def _hold(self) -> None:
        try:
            while not self.servers.stopped.is_set():
                with self._lock:  # counted as asking before it is no longer pending
                    taken = self.work.take(1)
                    self._asking += bool(taken)
                if taken is None:
                    return
                if not taken:
                    self.servers.stopped.wait(POLL_S)
                    continue
                try:
                    self._converse(taken[0])
                finally:
                    with self._lock:
                        self._asking -= 1
        except Stopped:
            return
        except BaseException as error:  # whatever it is, the main thread raises it
            self.error = self.error or error

    def _converse(self, conversation: Conversation) -> None:
        while not conversation.is_done and not conversation.part.is_lost:
            payload = self.payload(conversation)
            try:
                answer = understood(self.servers.post("/chat/completions", payload))
            except RequestRefused as refused:
                self.work.fail(conversation, refused.reason, refused.detail, doubtful=True)
                return
            self._checked.check(payload["messages"], answer.prompt_tokens, conversation.where)
            self.work.put(conversation, answer)

    def payload(self, conversation: Conversation) -> dict[str, Any]:
        """The body of a request."""
        section = self.section
        payload: dict[str, Any] = {
            "model": self.model,
            "messages": conversation.history(),
            "max_tokens": section.max_new_tokens,
            "temperature": section.temperature,
            "top_p": section.top_p,
            "stream": False,
        }
        if section.temperature > 0:
            payload["seed"] = conversation.draw_key(section.seed) >> 32  # some servers take 32 bits only
        if self.config.corpus.chat_template_kwargs:
            payload["chat_template_kwargs"] = dict(self.config.corpus.chat_template_kwargs)
        return payload


def understood(answer: dict[str, Any]) -> Answer:
    """A chat completion -> ``Answer``.

    Raises:
        RequestRefused: it holds no text that can be used.
    """
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        content, finish = message.get("content"), choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise RequestRefused("malformed answer", "no choices[0].message") from None
    reason = _REASONS.get(finish) if isinstance(finish, str) else None
    if reason is None:
        raise RequestRefused(f"finish_reason {finish!r}"[:60], "only stop and length are of use")
    reasoning = next((message[name] for name in ("reasoning_content", "reasoning") if isinstance(message.get(name), str)), None)
    texts = [text if isinstance(text, str) else "" for text in (content, reasoning)]
    if reason == "length":
        texts = [text.rstrip("\ufffd") for text in texts]  # the limit fell into a character
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        raise RequestRefused("lone surrogate", "half a character in the answer") from None
    usage = answer.get("usage") if isinstance(answer.get("usage"), dict) else {}
    counts = [usage.get(name) if isinstance(usage.get(name), int) else None for name in ("completion_tokens", "prompt_tokens")]
    return Answer(texts[0], reason, tokens=counts[0] or 0, prompt_tokens=counts[1], reasoning=texts[1] if texts[1].strip() else None)


class _PromptCheck:
    """Compares the prompt tokens that a server counted with those of the run's own template, for the first answers."""

    def __init__(self, config: RunConfig, progress: Progress) -> None:
        self.config, self.progress = config, progress
        self._left = CHECKED_ANSWERS
        self._lock = threading.Lock()
        self._template: Any = None

    def check(self, messages: list[dict[str, str]], counted: int | None, where: str) -> None:
        if counted is None or self._left <= 0:
            return
        with self._lock:
            if self._left <= 0:
                return
            self._left -= 1
            try:
                own = self._own(messages)
            except DFlashError as error:
                self.progress.say(f"Whether the servers use this target's chat template was not checked: {error}")
                self._left = 0
                return
            if own is not None and own != counted:
                self._left = 0
                self.progress.say(
                    f"Warning: {where}: the server counted {counted} prompt tokens where the target's chat template gives {own}. It uses "
                    "another template, tokenizer or system prompt; a drafter trained on such answers accepts less"
                )

    def _own(self, messages: list[dict[str, str]]) -> int | None:
        from dflash_offline.corpus.schema import RowRejected
        from dflash_offline.corpus.template import load_template

        if self._template is None:
            self._template = load_template(self.config)
        try:
            marked, _, mark = self._template.mark(messages, None)
            return len(self._template.encode(self._template.render(marked, generation_prompt=True), mark).ids)
        except RowRejected:
            return None


def run_servers(config: RunConfig, work: Work, progress: Progress) -> None:
    """Have the servers of the run file answer everything.

    Raises:
        RegenerateError: see ``Asker.run`` and ``served_model``.
    """
    servers = Servers(config.regenerate, key=read_key(config.regenerate.api_key_env), say=progress.say)
    progress.update(text="looking for the servers", force=True)
    model, facts = served_model(config.regenerate.model, servers)
    work.by |= {"model": model, **facts}
    progress.say(f"Asking {model} at {len(config.regenerate.base_urls)} server{'s' if len(config.regenerate.base_urls) > 1 else ''}")
    Asker(config, servers, work, progress, model=model).run()


def served_model(wanted: str | None, servers: Servers) -> tuple[str, dict[str, Any]]:
    """Name of the model to ask for, and what the servers say of it (``root``, ``max_model_len``).

    Raises:
        RegenerateError: it is not served, or none is named and there is not exactly one.
    """
    listed = servers.models(required=wanted is None)
    names = list(dict.fromkeys(str(entry["id"]) for entry in listed))
    if wanted is None:
        if len(names) != 1:
            what = f"serve {len(names)} models ({', '.join(names[:8])})" if names else "do not say which model they serve"
            raise RegenerateError(f"the servers {what}; name one in [regenerate] model")
        wanted = names[0]
    elif names and wanted not in names:
        near = difflib.get_close_matches(wanted, names, n=1)
        raise RegenerateError(
            f"[regenerate] model = {wanted!r} is not served; known are {', '.join(names[:8])}"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    facts = next((entry for entry in listed if entry["id"] == wanted), {})
    return wanted, {f"served_{name}": facts[name] for name in ("root", "max_model_len") if isinstance(facts.get(name), str | int)}
