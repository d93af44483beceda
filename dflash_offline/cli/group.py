"""The command group: what is wrong is said in one line, and a mistyped command finds its neighbour."""

import difflib
import errno
from typing import Any

import click

from dflash_offline.errors import DFlashError

_NO_WRITING = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)


class Commands(click.Group):
    """Lists commands in the order they are used in, suggests near names, and prints a ``DFlashError`` as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            near = difflib.get_close_matches(name, self.commands, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(self.commands)}"
            raise click.UsageError(f"unknown command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DFlashError as error:
            raise OneLine(str(error)) from None
        except OSError as error:
            if error.errno not in _NO_WRITING:
                raise
            where = f"{error.filename}: " if error.filename is not None else ""
            raise OneLine(
                f"{where}{error.strerror}; make it writable for this user, or make space, and run the same command again"
            ) from None


class OneLine(click.ClickException):
    """An error as ``error: ...``; exit status 1."""

    def show(self, file: Any = None) -> None:
        click.echo(f"error: {' '.join(self.message.splitlines())}", err=True)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="dflash_offline")
def main() -> None:
    """Train DFlash drafters offline: capture hidden states of your target model once, then train from the store.

    The whole chain is one command: luigi --module pipelines DFlashAll. These commands are for before, during and after.
    """


def _add_commands() -> None:
    from dflash_offline.cli import following, inspecting, planning, results, sampling, showing, starting, tidying, training

    for command in (
        starting.init,
        planning.doctor,
        planning.plan,
        starting.smoke,
        training.train,
        following.status,
        inspecting.inspect,
        showing.show,
        inspecting.stats,
        sampling.export_sample,
        inspecting.verify,
        inspecting.diff,
        results.export,
        results.evaluate,
        results.generate,
        following.report,
        tidying.reset,
        tidying.prune,
    ):
        main.add_command(command)


_add_commands()
