"""The server back end against a real HTTP server on this machine that fails in every way servers fail."""

import email.utils
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, Reply, error
from conftest import write_run_file

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.errors import RegenerateError
from dflash_offline.layout import Layout
from dflash_offline.manifest import read_json, read_manifest
from dflash_offline.progress import Progress
from dflash_offline.regenerate import answer_files, regenerate
from dflash_offline.regenerate.servers import _retry_after

Behaviour = Callable[[dict[str, Any], int], Reply]


class Run:
    """A run file with [regenerate] for servers, and what came out."""

    def __init__(self, folder: Path, target: Path, prompts: list[Any], urls: list[str], **section: Any) -> None:
        self.folder = folder
        path = folder / "prompts.jsonl"
        if not path.exists():
            path.write_text("".join(json.dumps(row) + "\n" for row in prompts), encoding="utf-8")
        settings = {"prompts": [str(path)], "backend": "server", "base_urls": urls, "retry_wait_s": 0.01, "retries": 3, "concurrency": 4}
        self.path = write_run_file(folder, model=target, files=[], regenerate=settings | section)
        self.config = RunConfig.load(self.path)
        self.key = keys.regenerate_key(self.config)
        self.out = Layout(self.config.root_dir).regeneration(self.key)
        self.lines: list[str] = []

    def go(self) -> list[dict[str, Any]]:
        progress = Progress(None)
        progress.say = self.lines.append
        regenerate(self.config, self.key, progress)
        return self.rows()

    def start(self, **environment: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "dflash_offline.regenerate", "--config", str(self.path), "--key", self.key]
        return subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for path in answer_files(self.config) for line in path.read_text(encoding="utf-8").splitlines()]

    @property
    def manifest(self) -> dict[str, Any]:
        return read_manifest(self.out, kind="regeneration")


@pytest.fixture
def run(tmp_path: Path, tiny_target: Path) -> Callable[..., Run]:
    """``run(prompts, urls, **settings)``; prompts are texts or rows."""

    def make(prompts: list[Any], urls: list[str], **section: Any) -> Run:
        rows = [{"id": f"p{i}", "prompt": each} if isinstance(each, str) else each for i, each in enumerate(prompts)]
        return Run(tmp_path, tiny_target, rows, urls, **section)

    return make


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_order_ids_settings_and_identity_are_kept(run: Callable[..., Run]) -> None:
    prompts = [f"Question {i}, s\u00fc\u00df \U0001f600?" for i in range(23)]
    with ChatServer(lambda request, number: Reply(f"Re: {request['messages'][-1]['content']}", delay_s=0.01)) as server:
        made = run(prompts, [server.url], part_rows=5, temperature=0.7, top_p=0.9, max_new_tokens=77, seed=5)
        rows = made.go()
        assert [row["id"] for row in rows] == [f"p{i}" for i in range(23)]
        assert [row["messages"] for row in rows] == [
            [{"role": "user", "content": text}, {"role": "assistant", "content": f"Re: {text}"}] for text in prompts
        ]
        assert {row["finish_reason"] for row in rows} == {"stop"}
        assert max(server.asked.values()) == 1 and 2 <= server.most_at_once <= 4
        sent = server.requests[0]
        assert (sent["model"], sent["temperature"], sent["top_p"], sent["max_tokens"]) == ("tiny", 0.7, 0.9, 77)
        assert len({request["seed"] for request in server.requests}) == 23
    manifest = made.manifest
    assert manifest["counts"] == {
        "rows": 23, "rejected": 0, "prompts": 23, "conversations": 23, "answers": 23, "left_out": 0, "cut": 0,
        "tokens": sum(len(f"Re: {text}".split()) for text in prompts),
    }  # fmt: skip
    assert manifest["sampling"] == {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 77, "max_turns": 8, "seed": 5}
    assert {"model", "config", "weights"} <= set(manifest["target"])
    assert all((part["model"], part["served_root"]) == ("tiny", "models/tiny") for part in manifest["by"]) and len(manifest["by"]) == 5
    assert sorted(entry.name for entry in made.out.iterdir()) == ["manifest.json", "parts", "plan.json"]
    assert made.go() == rows and made.lines[-1] == "every answer is there already"


def test_turns_are_asked_one_after_the_other_with_the_new_answers_as_history(run: Callable[..., Run]) -> None:
    conversation = {
        "id": 7,
        "source": "mine",
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "One"},
            {"from": "gpt", "value": "OLD"},
            {"from": "human", "value": "Two"},
        ],
    }
    several = {"messages": [{"role": "user", "content": text} for text in ("A", "B", "C")]}
    with ChatServer(lambda request, number: Reply(f"<{len(request['messages'])}>")) as server:
        first, second = run([conversation, several], [server.url], max_turns=2).go()
        assert all("OLD" not in json.dumps(request) for request in server.requests) and len(server.requests) == 4
    assert (first["id"], first["source"]) == (7, "mine")
    assert [(m["role"], m["content"]) for m in first["messages"]] == [
        ("system", "Be brief."), ("user", "One"), ("assistant", "<2>"), ("user", "Two"), ("assistant", "<4>"),
    ]  # fmt: skip
    assert [m["content"] for m in second["messages"]] == ["A", "<1>", "B", "<3>"] and "id" not in second


def test_an_answer_cut_by_the_limit_ends_its_conversation(run: Callable[..., Run]) -> None:
    def behave(request: dict[str, Any], number: int) -> Reply:
        return Reply("half an ans\ufffd", finish_reason="length")

    with ChatServer(behave) as server:
        made = run([{"messages": [{"role": "user", "content": "A"}, {"role": "user", "content": "B"}]}], [server.url])
        (row,) = made.go()
    assert row == {
        "messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "half an ans"}],
        "finish_reason": "length",
    }
    assert made.manifest["counts"]["cut"] == 1 and len(server.requests) == 1


def test_what_passes_is_tried_again(run: Callable[..., Run]) -> None:
    faults = [
        error(500),
        Reply(drop=True),
        Reply(body=b'{"choices": ['),
        Reply(body=b'["no object"]'),
        error(429, "slow down"),
        error(503, "busy", **{"Retry-After": "0.2"}),
        Reply(delay_s=1.0),  # beyond timeout_s
        error(429, "later", **{"Retry-After": email.utils.formatdate(time.time() + 1, usegmt=True)}),
    ]

    def behave(request: dict[str, Any], number: int) -> Reply:
        index = int(request["messages"][-1]["content"])
        return faults[index] if number == 1 and index < len(faults) else Reply(f"answer {index}")

    with ChatServer(behave) as server:
        made = run([str(i) for i in range(12)], [server.url], timeout_s=0.5)
        rows = made.go()
        assert [row["messages"][1]["content"] for row in rows] == [f"answer {i}" for i in range(12)]
        asked = {json.loads(name)[0]["content"]: count for name, count in server.asked.items()}
        assert asked == {str(i): 2 if i < len(faults) else 1 for i in range(12)}
    assert made.manifest["counts"]["left_out"] == 0


def test_retry_after_is_waited_for_by_all(run: Callable[..., Run]) -> None:
    came: list[float] = []

    def behave(request: dict[str, Any], number: int) -> Reply:
        came.append(time.monotonic())
        return error(429, "later", **{"Retry-After": "0.6"}) if len(came) == 1 else Reply()

    with ChatServer(behave) as server:
        run([str(i) for i in range(3)], [server.url], concurrency=1).go()
    assert came[1] - came[0] >= 0.6


def test_rows_without_a_usable_answer_are_left_out_and_named(run: Callable[..., Run]) -> None:
    replies: dict[str, Reply] = {
        "refused": error(400, "too long for me"),
        "always 500": error(500, "broken"),
        "empty": Reply("  \n"),
        "null": Reply(None),
        "thought only": Reply("", message={"reasoning_content": "hm"}, finish_reason="length"),
        "filtered": Reply("x", finish_reason="content_filter"),
        "surrogate": Reply(body=b'{"choices": [{"message": {"content": "\\ud83d"}, "finish_reason": "stop"}]}'),
        "no choices": Reply(body=b'{"choices": []}'),
        "reasons": Reply("Yes.", message={"reasoning_content": "Let me think."}),
    }

    def behave(request: dict[str, Any], number: int) -> Reply:
        return replies.get(request["messages"][-1]["content"], Reply("good"))

    prompts = ["fine", *replies, {"messages": [{"role": "user", "content": "first"}, {"role": "user", "content": "refused"}]}, "also fine"]
    with ChatServer(behave) as server:
        made = run([*prompts, {"messages": []}, "[", {"prompt": " "}], [server.url], part_rows=4)
        rows = made.go()
        assert server.asked[json.dumps([{"role": "user", "content": "always 500"}])] == 1 + 3

    assert [row["messages"][0]["content"] for row in rows] == ["fine", "reasons", "also fine", "["]
    assert rows[1]["messages"][1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Let me think."}
    manifest = made.manifest
    assert manifest["rejected"] == {"empty conversation": 1, "empty user turn": 1}
    named = {entry["id"] or "two turns": entry for entry in manifest["left_out_rows"]}
    assert manifest["counts"]["left_out"] == len(named) == 9
    assert (named["p1"]["reason"], named["p1"]["turn"]) == ("refused by the server (400)", 1)
    assert "too long for me" in named["p1"]["detail"] and named["p1"]["prompt"].endswith("prompts.jsonl:2")
    assert named["p2"]["reason"] == "no answer in spite of retries" and "500 broken" in named["p2"]["detail"]
    assert {named[f"p{i}"]["reason"] for i in (3, 4, 5)} == {"empty answer"}
    assert [named[f"p{i}"]["reason"] for i in (6, 7, 8)] == ["finish_reason 'content_filter'", "lone surrogate", "malformed answer"]
    assert (named["two turns"]["reason"], named["two turns"]["turn"]) == ("refused by the server (400)", 2)
    assert sum(manifest["left_out"].values()) == 9


def test_one_dead_address_of_two_does_no_harm(run: Callable[..., Run]) -> None:
    dead = f"http://127.0.0.1:{free_port()}/v1"
    with ChatServer() as server:
        made = run([f"q{i}" for i in range(40)], [dead, server.url])
        assert len(made.go()) == 40
        assert max(server.asked.values()) == 1
    assert sum(line.startswith(dead) for line in made.lines) == 1 and "the others go on" in "".join(made.lines)


def test_two_servers_share_the_work(run: Callable[..., Run]) -> None:
    def slow(request: dict[str, Any], number: int) -> Reply:
        return Reply(delay_s=0.02)

    with ChatServer(slow) as one, ChatServer(slow) as two:
        assert len(run([f"q{i}" for i in range(24)], [one.url, two.url], concurrency=3).go()) == 24
        assert min(len(one.requests), len(two.requests)) >= 6 and max(one.most_at_once, two.most_at_once) <= 3


def test_a_server_that_restarts_is_waited_for(run: Callable[..., Run]) -> None:
    port = free_port()
    made = run([f"q{i}" for i in range(6)], [f"http://127.0.0.1:{port}/v1"], retries=12)
    process = made.start()
    try:
        time.sleep(1.0)
        assert process.poll() is None
        with ChatServer(port=port) as server:
            output, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
            assert len(server.requests) == 6
    finally:
        process.kill()
        process.wait()
    assert len(made.rows()) == 6


@pytest.mark.parametrize(
    ("behave", "message"),
    [
        (lambda request, number: error(401, "no key"), "401 no key; the servers want a key"),
        (lambda request, number: error(404, "no such model"), "404 no such model; check .* base_urls"),
        (lambda request, number: error(301, "moved", Location="http://other/"), "it sends elsewhere"),
        (lambda request, number: error(400, "unknown field"), "the servers answer nothing: .*400 unknown field"),
        (lambda request, number: error(500, "boom"), "no server answers: .*500 boom; start it"),
    ],
)
def test_faults_of_the_run_stop_it_in_one_line_and_blame_no_row(run: Callable[..., Run], behave: Behaviour, message: str) -> None:
    with ChatServer(behave) as server:
        made = run([f"q{i}" for i in range(30)], [server.url])
        with pytest.raises(RegenerateError, match=message) as caught:
            made.go()
        assert "\n" not in str(caught.value)
    assert not any(path.stat().st_size for path in (made.out / "journals").iterdir())
    with ChatServer() as server:  # mended: nothing was lost, every row is asked
        again = run([], [server.url])
        assert again.key == made.key and len(again.go()) == 30


def test_nobody_there_and_wrong_model_are_one_line(run: Callable[..., Run]) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    with pytest.raises(RegenerateError, match="no server answers: .*connection refused; start it"):
        run(["q"], [url], retries=1, model="tiny").go()
    message = "model = 'tinny' is not served; known are tiny; did you mean 'tiny'"
    with ChatServer() as server, pytest.raises(RegenerateError, match=message):
        run(["q"], [server.url], model="tinny").go()


def test_the_key_goes_to_the_server_and_nowhere_else(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "sk-TOPSECRET-0123456789"
    monkeypatch.setenv("MY_KEY", secret)

    def echo(request: dict[str, Any], number: int) -> Reply:
        text = request["messages"][-1]["content"]
        return error(400, "x" * 280 + f" your key Bearer {secret} is bad") if text == "bad" else Reply("ok")

    with ChatServer(echo) as server:
        made = run(["good", "bad"], [server.url], api_key_env="MY_KEY")
        process = made.start(MY_KEY=secret)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert server.authorizations == {f"Bearer {secret}"}
    written = b"".join(path.read_bytes() for path in made.folder.rglob("*") if path.is_file())
    for piece in (secret, secret[:9]):
        assert piece not in output + errors and piece.encode() not in written
    assert made.manifest["counts"]["left_out"] == 1
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(RegenerateError, match="api_key_env: the environment variable that it names is not set"):
        run([], [server.url], api_key_env="MY_KEY", seed=1).go()
    monkeypatch.setenv("MY_KEY", "two words")
    with pytest.raises(RegenerateError, match="holds characters that no key has") as caught:
        run([], [server.url], api_key_env="MY_KEY", seed=1).go()
    assert "two words" not in str(caught.value)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_killed_and_started_again_asks_only_what_was_in_flight(run: Callable[..., Run], how: signal.Signals) -> None:
    count, concurrency = 60, 3
    with ChatServer(lambda request, number: Reply("yes", delay_s=0.03)) as server:
        made = run([f"q{i}" for i in range(count)], [server.url], part_rows=25, concurrency=concurrency)
        for answers in (12, 40):
            process = made.start()
            end = time.monotonic() + 60
            while sum(server.answered.values()) < answers:
                assert process.poll() is None and time.monotonic() < end, process.communicate()
                time.sleep(0.005)
            process.send_signal(how)
            process.communicate(timeout=30)
            assert process.returncode == (-9 if how == signal.SIGKILL else 143)
        (journal, *_) = sorted((made.out / "journals").iterdir())
        with journal.open("ab") as file:  # as a crash of the machine may leave it
            file.write(b'{"prompt": 59, "turn"')
        rows = made.go()
        assert [row["id"] for row in rows] == [f"p{i}" for i in range(count)]
        assert all(len(row["messages"]) == 2 for row in rows)
        assert len(server.requests) <= count + 2 * concurrency
    assert any("goes on: " in line for line in made.lines)


def test_two_processes_share_the_parts(run: Callable[..., Run]) -> None:
    with ChatServer(lambda request, number: Reply("yes", delay_s=0.05)) as server:
        made = run([f"q{i}" for i in range(48)], [server.url], part_rows=4, concurrency=2)
        processes = [made.start() for _ in range(2)]
        for process in processes:
            output, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
        assert max(server.asked.values()) == 1
    assert len(made.rows()) == 48
    marks = [read_json(path) for path in (made.out / "parts").glob("*.json")]
    assert len(marks) == 12


def test_luigi_has_the_answers_written_before_the_corpus_is_prepared(run: Callable[..., Run]) -> None:
    with ChatServer() as server:
        made = run([f"Question {i}, is it?" for i in range(9)], [server.url])
        command = [sys.executable, "-m", "luigi", "--module", "pipelines", "PrepareCorpus", "--config", str(made.path)]
        options: dict[str, Any] = {"cwd": made.folder, "capture_output": True, "text": True, "timeout": 120}
        found = subprocess.run(command, check=False, **options)
        assert found.returncode == 0, found.stdout + found.stderr
        assert "regenerate-0: 9 conversations, 9 answers" in found.stdout and "corpus: Read 9 conversations" in found.stdout
        assert found.stdout.index("regenerate-0: started") < found.stdout.index("corpus: started")
        assert len(server.requests) == 9
        status = subprocess.run([sys.executable, "-m", "dflash_offline.cli", "status", "--json"], check=True, **options)
        stages = {stage["name"]: stage["state"] for stage in json.loads(status.stdout)["stages"]}
        assert list(stages)[:2] == ["regenerate", "corpus"] and stages["regenerate"] == stages["corpus"] == "complete"
        reset = [sys.executable, "-m", "dflash_offline.cli", "reset", "regenerate", "--yes"]
        subprocess.run(reset, check=True, **options)
        assert not made.out.exists()


def test_retry_after_is_seconds_or_a_date() -> None:
    assert _retry_after("3") == 3 and _retry_after("0.5") == 0.5 and _retry_after("-2") == 0 and _retry_after(None) is None
    assert _retry_after("soon") is None and _retry_after("nan") is None and _retry_after("1e9") == 600
    later = _retry_after(email.utils.formatdate(time.time() + 30, usegmt=True))
    assert later is not None and 28 < later <= 30


def test_a_server_with_another_template_is_told_of(run: Callable[..., Run]) -> None:
    def behave(request: dict[str, Any], number: int) -> Reply:
        body = {"choices": [{"message": {"content": "ok"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
        return Reply(body=json.dumps(body).encode())

    with ChatServer(behave) as server:
        made = run([f"q{i}" for i in range(5)], [server.url])
        made.go()
    warned = [line for line in made.lines if "the server counted 3 prompt tokens where the target's chat template gives" in line]
    assert len(warned) == 1
