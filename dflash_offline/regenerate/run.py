"""One process of a regeneration: plan, answer, finish."""

from typing import Any

from dflash_offline.config import RunConfig
from dflash_offline.errors import ConfigError
from dflash_offline.layout import Layout
from dflash_offline.leases import EXPIRES_S, Leases
from dflash_offline.progress import Progress
from dflash_offline.regenerate.parts import Folder, Plan, make_plan, who
from dflash_offline.regenerate.work import Work


def regenerate(
    config: RunConfig, key: str, progress: Progress, *, replica: int = 0, replicas: int = 1, lease_expires_s: float = EXPIRES_S
) -> None:
    """Answer what is left to answer, together with whoever else works on it; the manifest is there afterwards.

    Args:
        key: ``keys.regenerate_key`` of the run file.
        replica, replicas: number of this process among those that were started together.
        lease_expires_s: a heartbeat older than this means that a process is gone.

    Raises:
        RegenerateError: nothing can be asked, or nobody answers.
        DFlashError: prompt files, target or template cannot be used.
    """
    if not config.regenerates:
        raise ConfigError(f"{config.source.name}: [regenerate] prompts names no file, so there is nothing to regenerate")
    folder = Folder(Layout(config.root_dir).regeneration(key))
    if folder.is_complete:
        progress.say("every answer is there already")
        return
    progress.update(text="reading prompts", force=True)
    section = config.regenerate
    plan = make_plan(config, folder, replicas=replicas)
    if replica == 0:
        for line in describe(plan):
            progress.say(line)
    leases = Leases(folder.leases, what=f"replica {replica}", expires_s=lease_expires_s, heartbeat_s=min(5.0, lease_expires_s / 4))
    try:
        by = {"replica": replica, "host": leases.owner.host, "backend": section.backend}
        work = Work(folder, plan, leases, progress, by=by, replicas=replicas)
        if section.backend == "server":
            from dflash_offline.regenerate.asking import run_servers

            run_servers(config, work, progress)
        else:
            from dflash_offline.regenerate.local import run_target

            run_target(config, work, progress)
        manifest = work.finish(key, who(config))
    finally:
        leases.close()
    progress.update(done=plan.prompts, total=plan.prompts, text="every answer is there", force=True)
    if manifest is not None:
        for line in summary(manifest):
            progress.say(line)


def describe(plan: Plan) -> list[str]:
    """What a plan says at the start."""
    lines = [
        f"Read {plan.rows} rows: {plan.prompts} prompts in {len(plan.parts)} part{'s' if len(plan.parts) != 1 else ''}, "
        f"{plan.rows - plan.prompts} rejected"
    ]
    for reason, count in plan.rejected.items():
        lines.append(f"  rejected {count:>7}: {reason}")
        lines.extend(f"    {example}" for example in plan.rejected_examples.get(reason, []))
    return lines


def summary(manifest: dict[str, Any]) -> list[str]:
    """What a finished regeneration says."""
    counts = manifest["counts"]
    lines = [
        f"{counts['conversations']} conversations, {counts['answers']} answers, {counts['tokens']:,} tokens; "
        f"{counts['cut']} cut by the length limit, {counts['left_out']} left out"
    ]
    lines.extend(f"  left out {count:>7}: {reason}" for reason, count in manifest["left_out"].items())
    return lines
