"""Checks of the machine one by one, with the files and programs they ask; and what manifests record of it."""

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import write_run_file

from dflash_offline import environment as environment_module
from dflash_offline import nvidia
from dflash_offline.config import RunConfig
from dflash_offline.doctor import conversations, examine, hosts, machine, scheduler, software, storage
from dflash_offline.drafter import check_sizes
from dflash_offline.environment import driver, environment, torch_build
from dflash_offline.errors import StoreError
from dflash_offline.estimate import estimate
from dflash_offline.watch.gpus import GpuReader

SMI = """#!/bin/sh
case "$1" in
  *driver_version,name*) echo "580.95.05, NVIDIA H200"; echo "580.95.05, NVIDIA H200" ;;
  *) echo "0, GPU-aa, NVIDIA H200, 97, 70000, 143771"; echo "1, GPU-bb, NVIDIA H200, [N/A], 4, 143771" ;;
esac
"""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig.load(write_run_file(tmp_path, model=tmp_path / "model", files=[tmp_path / "none.jsonl"]))


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name in the path, which answers for two GPUs; NVML is not asked."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr("dflash_offline.watch.gpus._start_nvml", lambda: None)
    return program


def test_everything_asked_for_is_looked_at(config: RunConfig) -> None:
    names = [check.name for check in examine(config)]
    assert len(names) == len(set(names))
    asked = {"python", "torch build", "driver", "cuda", "nccl", "triton", "C compiler", "compile cache", "open files", "processes"}
    asked |= {"memory", "disk", "file locks", "clock", "disk rate", "luigid", "target"}
    assert asked <= set(names)
    assert "GPUs" in names or "GPU 0" in names


def test_what_is_amiss_says_what_to_do(tmp_path: Path) -> None:
    gpus = {"target": {"gpus": [0]}, "train": {"gpus": [0, 1]}, "evaluate": {"gpus": [2]}}
    path = write_run_file(tmp_path, model=tmp_path / "model", files=[tmp_path / "none.jsonl"], **gpus)
    code = "import json, sys; from dflash_offline.doctor import examine; from dflash_offline.config import RunConfig\n"
    code += "print(json.dumps([[c.name, c.level, c.advice] for c in examine(RunConfig.load(sys.argv[1]))]))"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PATH": "/nonexistent"}
    found = subprocess.run([sys.executable, "-c", code, str(path)], env=environment, capture_output=True, text=True, timeout=100)
    checks = {name: (level, advice) for name, level, advice in json.loads(found.stdout)}
    assert checks["C compiler"] == ("fail", "apt-get install gcc (Triton needs one)")
    assert checks["[train] gpus"][0] == checks["[evaluate] gpus"][0] == checks["nccl"][0] == "fail"
    assert all(advice for level, advice in checks.values() if level != "ok")


def test_what_training_and_evaluation_would_refuse(tmp_path: Path, tiny_target: Path) -> None:
    path = write_run_file(tmp_path, model=tiny_target, files=[tmp_path / "none.jsonl"])
    good = {check.name: check for check in machine.drafters(RunConfig.load(path))}
    assert good["drafter"].level == good["prompts"].level == "ok" and "reads layers [0, 1, 2], mask token 500" in good["drafter"].found
    options = {"drafter": {"init_from": "nowhere/none"}, "evaluate": {"prompts": ["none.jsonl"]}}
    path = write_run_file(tmp_path, model=tiny_target, files=[tmp_path / "none.jsonl"], **options)
    bad = {check.name: check for check in machine.drafters(RunConfig.load(path))}
    assert bad["drafter"].level == bad["prompts"].level == "fail"
    assert "init_from = 'nowhere/none'" in bad["drafter"].found and "'none.jsonl' matches no file" in bad["prompts"].found
    assert bad["drafter"].advice and bad["prompts"].advice


def test_prompt_files_are_read(tmp_path: Path, tiny_target: Path) -> None:
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1 + 1?"}\n' * 3 + "{\n")

    def check(most: int) -> machine.Check:
        evaluate = {"prompts": ["sums.jsonl"], "max_prompts": most}
        path = write_run_file(tmp_path, model=tiny_target, files=[tmp_path / "sums.jsonl"], evaluate=evaluate)
        return next(each for each in machine.drafters(RunConfig.load(path)) if each.name == "prompts")

    found = check(3)
    assert (found.level, found.found) == ("ok", "1 file, 3 prompts")
    found = check(4)
    assert found.level == "fail" and "sums.jsonl, line 4: invalid JSON" in found.found and found.advice


def test_a_gpu_that_cannot_train_with_the_settings_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("dflash_offline.gpus._listed", lambda: {"0": "GPU-a", "1": "GPU-b"})
    monkeypatch.setattr("dflash_offline.gpus._capabilities", lambda: {"GPU-a": (9, 0), "GPU-b": (8, 6)})

    def failed(gpus: list[int]) -> list[machine.Check]:
        train = {"gpus": gpus, "head_precision": "fp8"}
        path = write_run_file(tmp_path, model=tmp_path / "model", files=[tmp_path / "none.jsonl"], train=train)
        return [check for check in machine.drafters(RunConfig.load(path)) if check.name == "settings"]

    (check,) = failed([0, 1])
    assert check.level == "fail" and check.advice
    assert check.found.startswith('[train] head_precision = "fp8" needs a GPU') and check.found.endswith('not 8.6); use "bf16" (GPU 1)')
    assert failed([0]) == failed([0, 7]) == [], "GPUs that are not there are told in another line"


def test_conversation_files_are_looked_for(tmp_path: Path, tiny_target: Path) -> None:
    def check(names: list[str], **sections: dict[str, object]) -> machine.Check:
        path = write_run_file(tmp_path, model=tiny_target, files=names, **sections)
        checks = conversations.conversations(RunConfig.load(path))
        (found,) = (each for each in checks if each.name in ("[corpus] files", "[regenerate] prompts"))
        return found

    (tmp_path / "there.jsonl").write_text("{}\n")
    missing = check(["there.jsonl", "gone.jsonl"])
    assert missing.level == "fail" and "'gone.jsonl' matches no file" in missing.found and missing.advice
    assert (check(["there.jsonl"]).level, check(["there.jsonl"]).found) == ("ok", "1 file")
    assert check(["-", "some-owner/some-set", "*.jsonl"]).found == "1 file, standard input, data set some-owner/some-set"
    prompts = check([], regenerate={"prompts": ["gone.jsonl"]})
    assert (prompts.name, prompts.level) == ("[regenerate] prompts", "fail") and "'gone.jsonl' matches no file" in prompts.found


@pytest.fixture
def looked_at(tmp_path: Path, tiny_target: Path) -> Callable[..., dict[str, conversations.Check]]:
    """Lines about a file of these rows; ``without`` names files that the target's folder lacks."""

    def look(rows: str, *, without: str = "", **sections: dict[str, object]) -> dict[str, conversations.Check]:
        model = Path(shutil.copytree(tiny_target, tmp_path / "target", dirs_exist_ok=True))
        for name in without.split():
            (model / name).unlink()
        (tmp_path / "rows.jsonl").write_text(rows)
        files = [] if "regenerate" in sections else [tmp_path / "rows.jsonl"]
        config = RunConfig.load(write_run_file(tmp_path, model=model, files=files, **sections))
        return {check.name: check for group in (conversations.conversations, machine.drafters) for check in group(config)}

    return look


CHAT = json.dumps({"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "It is two."}]}) + "\n"


def test_a_tokenizer_without_a_chat_template_fails(looked_at: Callable[..., dict[str, conversations.Check]], tmp_path: Path) -> None:
    found = looked_at(CHAT)
    assert (found["tokenizer"].found, found["chat template"].level) == ("500 tokens", "ok")
    assert found["chat template"].found == "the tokenizer's own, an answer ends with <|im_end|>"
    found = looked_at(CHAT, without="chat_template.jinja")
    assert found["chat template"].level == "fail" and "has no chat template; name a Jinja file" in found["chat template"].found
    assert found["chat template"].advice and "first row" not in found and found["drafter"].level == "ok"
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    found = looked_at(CHAT, corpus={"chat_template": "mine.jinja"})
    assert found["chat template"].found == "mine.jinja, an answer ends with no control token"


def test_a_folder_without_a_tokenizer_is_no_fault_of_the_drafter(looked_at: Callable[..., dict[str, conversations.Check]]) -> None:
    found = looked_at(CHAT, without="tokenizer.json")
    assert found["tokenizer"].level == "fail" and found["tokenizer"].advice
    assert found["tokenizer"].found.endswith("/target: no tokenizer.json in the folder; put the tokenizer's files beside the weights")
    assert "drafter" not in found and "chat template" not in found


@pytest.mark.parametrize(
    ("rows", "level", "said"),
    [
        (CHAT, "ok", r"/rows\.jsonl:1, \d\d tokens"),
        (f"{{}}\n\n{CHAT}", "ok", r"/rows\.jsonl:3, \d\d tokens; 1 of 2 rows looked at cannot be used"),
        ("", "fail", r"/rows\.jsonl is empty"),
        (
            '{"prompt": "a", "completion": "b"}\n' * 3,
            "fail",
            r"3 rows looked at, none can be used: 3 x no messages, the first in .*/rows\.jsonl:1 \(keys are completion, prompt\)",
        ),
        ("{}\n" * 120 + CHAT, "warn", r"100 rows looked at, none can be used: 100 x no messages, .*"),
        ("no row at all", "fail", r".*/rows\.jsonl: no known format .*"),
    ],
)
def test_the_first_row_is_looked_for(
    looked_at: Callable[..., dict[str, conversations.Check]], tmp_path: Path, rows: str, level: str, said: str
) -> None:
    check = looked_at(rows)["first row"]
    assert check.level == level and re.fullmatch(said, check.found.replace(f"{tmp_path}/", "/")), check
    assert bool(check.advice) == (level != "ok")


def test_the_first_prompt_to_be_answered_is_looked_for(looked_at: Callable[..., dict[str, conversations.Check]]) -> None:
    section = {"prompts": ["rows.jsonl"], "max_new_tokens": 7}
    check = looked_at('{"x": 1}\n{"prompt": "1 + 1?"}\n', regenerate=section)["first row"]
    assert check.level == "ok" and re.search(r"rows\.jsonl:2, \d\d tokens with the longest answers; 1 of 2 rows", check.found), check
    check = looked_at('{"x": 1}\n', regenerate=section)["first row"]
    assert check.level == "fail" and "rows.jsonl:1" in check.found and "[regenerate] prompts" in check.advice


def test_drafters_of_the_demo_model_are_looked_at_once_it_is_converted(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_offline import demo

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_run_file(tmp_path, model=tiny_target, files=[tmp_path / "none.jsonl"], drafter={"mask_token_id": 999_999})
    path.write_text(path.read_text().replace(str(tiny_target), "demo:smollm2"))
    config = RunConfig.load(path)
    assert "drafter" not in {check.name for check in machine.drafters(config)}, "nothing is converted for a look"
    demo.converted_folder().parent.mkdir(parents=True)
    demo.converted_folder().symlink_to(tiny_target)
    found = {check.name: check for check in machine.drafters(config)}
    assert found["drafter"].level == "fail" and "mask_token_id = 999999" in found["drafter"].found


def test_gpus_by_nvidia_smi(nvidia_smi: Path, config: RunConfig) -> None:
    first, second = GpuReader().read()
    assert (first.gpu, first.uuid, first.busy, first.used_bytes) == ("0", "GPU-aa", 0.97, 70000 << 20)
    assert (second.busy, second.total_bytes) == (None, 143771 << 20)
    checks = {check.name: check for check in machine.gpus(config)}
    assert checks["GPU 0"].level == "warn" and "140 GiB, 68.4 in use, 97% busy" in checks["GPU 0"].found
    assert checks["GPU 1"].level == "ok" and "busy" not in checks["GPU 1"].found
    nvidia_smi.write_text("#!/bin/sh\nexit 9\n")
    reader = GpuReader()
    assert reader.read() == [] and reader.note == "nvidia-smi could not be asked (CalledProcessError)"
    nvidia_smi.unlink()
    assert reader.read() == []


def test_one_module_starts_nvidia_smi() -> None:
    """Its options and what comes of them are in one place."""
    package = Path(environment_module.__file__).parent
    naming = [path.name for path in package.rglob("*.py") if "--query-gpu" in path.read_text(encoding="utf-8")]
    assert naming == ["nvidia.py"]


def test_notices_of_nvidia_smi_are_no_gpus(nvidia_smi: Path) -> None:
    nvidia_smi.write_text("#!/bin/sh\necho 'WARNING: infoROM is corrupted'\necho '0, GPU-aa'\n")
    assert list(nvidia.ask("index", "uuid")) == [["0", "GPU-aa"]]


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("dflash_offline.watch.gpus._start_nvml", lambda: None)
    reader = GpuReader()
    assert reader.read() == [] and "neither NVML nor nvidia-smi" in reader.note


@pytest.mark.gpu
def test_nvml_and_nvidia_smi_tell_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pynvml")
    by_nvml = GpuReader().read()
    monkeypatch.setattr("dflash_offline.watch.gpus._start_nvml", lambda: None)
    by_program = GpuReader().read()
    assert [(gpu.gpu, gpu.uuid, gpu.name) for gpu in by_nvml] == [(gpu.gpu, gpu.uuid, gpu.name) for gpu in by_program]
    for one, other in zip(by_nvml, by_program, strict=True):
        assert one.total_bytes == pytest.approx(other.total_bytes, rel=0.01)


def test_driver_from_the_kernel_and_from_nvidia_smi_where_that_is_hidden(tmp_path: Path, nvidia_smi: Path) -> None:
    kernel = tmp_path / "nvidia"
    assert driver(kernel) == {"driver": "580.95.05", "gpus": "2 x NVIDIA H200"}
    kernel.mkdir()
    (kernel / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Sun Mar 30 2025\nGCC version: gcc 12.2.0\n"
    )
    for name, model in (("0000:01:00.0", "NVIDIA H200"), ("0000:02:00.0", "NVIDIA H200"), ("0000:03:00.0", "NVIDIA L4")):
        (kernel / "gpus" / name).mkdir(parents=True)
        (kernel / "gpus" / name / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 42\n")
    driver.cache_clear()
    assert driver(kernel) == {"driver": "570.133.20", "gpus": "2 x NVIDIA H200, 1 x NVIDIA L4"}
    driver.cache_clear()


def test_the_build_of_torch_is_recorded_beside_its_version() -> None:
    import torch

    found = torch_build()
    assert found["torch"] == torch.__version__ and found["torch_git"] == torch.version.git_version
    assert found.get("cuda") == torch.version.cuda
    assert found.items() <= environment().items()


def test_limits_of_the_shell(config: RunConfig) -> None:
    assert {check.level for check in machine.limits(config)} <= {"ok", "warn"}
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, 1 << 40))\n"
    code += "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
    code += "from dflash_offline.config import RunConfig; from dflash_offline.doctor import machine\n"
    code += "print([(c.name, c.advice) for c in machine.limits(RunConfig.load(sys.argv[1])) if c.level == 'warn'])"
    found = subprocess.run([sys.executable, "-c", code, str(config.source)], capture_output=True, text=True, timeout=60)
    assert "('open files', 'ulimit -n 4096')" in found.stdout and "('file size', 'ulimit -f unlimited" in found.stdout, found.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_compile_cache_that_is_not_writable_or_empty_or_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "k.so").touch()
    assert "1 compiled files" in software._cache("compile cache", tmp_path).found
    assert "empty: the first run compiles" in software._cache("compile cache", tmp_path / "new").found
    assert software._cache("compile cache", Path("/proc/sys/absent")).level in ("warn", "fail")


@pytest.mark.parametrize(
    ("name", "rotational", "kind"),
    [("nvme0n1", "0", ", NVMe"), ("sda", "1", ", spinning disk"), ("sdb", "0", ", SSD"), ("vda", "1", ", virtual disk")],
)
def test_kind_of_a_disk_and_of_its_partition(tmp_path: Path, name: str, rotational: str, kind: str) -> None:
    number = tmp_path.stat().st_dev
    disk, links = tmp_path / "devices" / name, tmp_path / "block"
    (disk / "queue").mkdir(parents=True)
    (disk / "part1").mkdir()
    (disk / "queue" / "rotational").write_text(rotational + "\n")
    links.mkdir()
    for device in (disk, disk / "part1"):
        link = links / f"{os.major(number)}:{os.minor(number)}"
        link.unlink(missing_ok=True)
        link.symlink_to(device)
        assert storage.device_kind(tmp_path, system=links) == kind
    assert storage.device_kind(tmp_path, system=tmp_path / "absent") == ""


def test_clocks_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage.clock(tmp_path / "probe").level == "ok"
    import time

    now = time.time()
    monkeypatch.setattr(storage.time, "time", lambda: now + 90)
    found = storage.clock(tmp_path / "probe")
    assert found.level == "warn" and found.found.startswith("90.") and "NTP" in found.advice


@pytest.mark.parametrize("named", ["host", "url"])
def test_a_luigid_that_the_configuration_names_must_answer(
    named: str, tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch, reach: Callable[[RunConfig, Path], list[str]]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        lines = [f"default_scheduler_url = http://127.0.0.1:{port}/"]
        if named == "host":
            lines = ["default_scheduler_host = 127.0.0.1", f"default_scheduler_port = {port}"]
        (tmp_path / "luigi.cfg").write_text("\n".join(["[core]", *lines]))
        assert reach(config, tmp_path) == ["ok", f"answers on 127.0.0.1:{port}"]
    assert reach(config, tmp_path) == ["fail", f"none on 127.0.0.1:{port}"]


@pytest.fixture
def reach() -> Callable[[RunConfig, Path], list[str]]:
    """What the check says in a folder with a luigi.cfg; Luigi reads that once a process."""

    def check(config: RunConfig, folder: Path) -> list[str]:
        code = "import sys; from dflash_offline.config import RunConfig; from dflash_offline.doctor.scheduler import luigid\n"
        code += "(c,) = luigid(RunConfig.load(sys.argv[1])); print(c.level, c.found, sep='|')"
        found = subprocess.run([sys.executable, "-c", code, str(config.source)], cwd=folder, capture_output=True, text=True, timeout=60)
        return found.stdout.strip().split("|")

    return check


def test_without_luigid_the_local_scheduler_is_fine(config: RunConfig) -> None:
    (check,) = scheduler.luigid(config)
    assert check.level == "ok"


def test_hosts_that_the_run_file_names(config: RunConfig) -> None:
    here = socket.gethostname()

    def check(more: str) -> list[tuple[str, str]]:
        text = config.source.read_text(encoding="utf-8").replace("[train]\n", f"[train]\n{more}\n")
        path = config.source.with_name("hosts.toml")
        path.write_text(text, encoding="utf-8")
        return [(found.level, found.found) for found in hosts.hosts(RunConfig.load(path))]

    assert check("") == []
    meet = 'master_address = "127.0.0.1"'
    known = ("ok", f"{here}, named in the run file")
    assert check(f'nodes = ["{here}", "b"]\n{meet}') == [known, ("ok", "2 hosts meet at 127.0.0.1 (127.0.0.1), port 29500")]
    level, found = check(f'nodes = ["no-such-host.invalid", "{here}"]')[1]
    assert level == "fail" and found.startswith("no-such-host.invalid is not known here")
    assert check(f'nodes = ["a", "b"]\n{meet}')[0] == ("warn", f"{here}, in neither [hosts] nor [train] nodes")


def test_a_codec_that_cannot_store_this_target_is_refused_before_anything_is_done(tmp_path: Path, tiny_target: Path) -> None:
    """An odd hidden size: ``lossless`` packs channels in pairs."""
    shutil.copytree(tiny_target, tmp_path / "model")
    facts = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(facts | {"hidden_size": 65}))
    files = [tmp_path / "none.jsonl"]
    config = RunConfig.load(write_run_file(tmp_path, model=tmp_path / "model", files=files, store={"codec": "lossless"}))
    message = r"codec = .lossless. needs a hidden size that is a multiple of 2; the target.s is 65; use one of .bf16., .int8."
    for refuse in (check_sizes, estimate):
        with pytest.raises(StoreError, match=message):
            refuse(config)
    assert [check.level for check in machine.target(config)] == ["ok", "fail"]
    config = RunConfig.load(write_run_file(tmp_path, model=tmp_path / "model", files=files, store={"codec": "int8"}))
    assert [check.level for check in machine.target(config)] == ["ok"]
