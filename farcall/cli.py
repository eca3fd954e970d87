"""The command ``farcall``: launch programs, run those written for PyTorch's RPC, serve models, find faults.

::

    farcall launch -n 4 train.py --epochs 3        # four processes on this machine
    farcall run train.py --epochs 3                # as `python train.py --epochs 3`, on farcall
    farcall doctor                                 # is this machine fit for farcall; can two communicate
    farcall serve digits.py:make_model             # a model for clients in any language
    farcall weights --listen HOST:PORT             # keep weights that other programs publish and read
    farcall why                                    # what a job that hangs waits for
    farcall page                                   # a job in a browser
    farcall env                                    # what a bug report needs
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import click
from click.shell_completion import get_completion_class

import farcall
import farcall_guard
from farcall.extras import install_command
from farcall.observe.commands import COMMANDS

__all__ = ["main"]

_PROGRAM = {"ignore_unknown_options": True, "allow_interspersed_args": False}

_PORT: Final = 29500


def _meeting_place(_context: click.Context, _option: click.Parameter, given: str | None) -> str | None:
    """HOST:PORT as it was given, or with the usual port if that is left out."""
    if given is None:
        return None
    place = given if ":" in given else f"{given}:{_PORT}"
    host, _, port = place.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise click.BadParameter(f"{given!r} is not HOST:PORT, such as host0:{_PORT}")
    return place


def _program(context: click.Context, _argument: click.Parameter, given: str) -> str:
    """The program to run; one that looks like an option is an option that there is not."""
    if given.startswith("-"):
        raise click.NoSuchOption(given, ctx=context)
    return given


class _Starter(click.Command):
    """A command that runs a program, and explains command lines that are in another order."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.MissingParameter as error:
            if error.param is None or (moved := _options_first(given, error.param.opts)) is None:
                raise
            text = f"options of {ctx.command_path} come before the program: {_line(ctx, moved)}"
            raise click.UsageError(text, ctx) from error
        arguments = ctx.params["arguments"]
        at = len(given) - len(arguments) - 1
        if re.fullmatch(r"python[\d.]*", os.path.basename(given[at])) and not os.path.isdir(given[at]):
            moved = [*given[:at], *(arguments or ("PROGRAM",))]
            text = f"the program is run by the Python of {ctx.command_path}: leave out {given[at]!r}, as in"
            raise click.UsageError(f"{text}: {_line(ctx, moved)}", ctx)
        return rest


def _options_first(given: Sequence[str], names: Sequence[str]) -> list[str] | None:
    """Return a command line with the option of these names at its beginning; None if it does not have it."""
    for at, each in enumerate(given):
        if each in names:
            return [*given[at : at + 2], *given[:at], *given[at + 2 :]]
        if each.startswith(tuple(f"{name}=" if name[:2] == "--" else name for name in names)):
            return [each, *given[:at], *given[at + 1 :]]
    return None


def _line(context: click.Context, arguments: Sequence[str]) -> str:
    return f"{context.command_path} {shlex.join(arguments)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line's entry.

    Args:
        arguments: default: those of the process.

    Returns:
        The exit status.
    """
    farcall_guard.prefer()
    try:
        status = cli.main(arguments, prog_name="farcall", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    return int(status or 0)


@click.group(
    subcommand_metavar="COMMAND [ARGUMENTS]...", context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(farcall.__version__, message="farcall %(version)s")
def cli() -> None:
    """Distributed RPC and remote objects for PyTorch."""


for _command in COMMANDS:
    cli.add_command(_command)
if find_spec("farcall.page") is not None:
    cli.add_command(import_module("farcall.page.command").page)

_XLA_HELP = "Libraries find torch_xla too, as if the program imported it."


@cli.command(
    cls=_Starter, context_settings=_PROGRAM, short_help="Run a program of torch.distributed.rpc on farcall."
)
@click.option("--xla", is_flag=True, help=_XLA_HELP)
@click.option("-m", "module", is_flag=True, help="TARGET is the name of a module, not a file.")
@click.argument("target", type=click.Path(), callback=_program)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(xla: bool, module: bool, target: str, arguments: tuple[str, ...]) -> int:
    """Run a Python program in which torch.distributed.rpc means farcall.

    TARGET is a script, or a folder or zip file with a __main__.py. In a program that imports torch_xla, that
    means farcall, too.
    """
    from farcall.launch.program import run_module, run_script

    return (run_module if module else run_script)(target, arguments, xla=xla)


@cli.command(cls=_Starter, context_settings=_PROGRAM)
@click.option("-n", "--workers", type=click.IntRange(1), required=True, help="Processes on this machine.")
@click.option(
    "--nnodes", type=click.IntRange(1), help="Number of machines; each runs this command.  [1, or Slurm's]"
)
@click.option("--node-rank", type=click.IntRange(0), help="Rank of this machine; 0 is the one at --rdzv.")
@click.option(
    "--rdzv",
    metavar="HOST:PORT",
    callback=_meeting_place,
    help="Where the machines meet: an address of one of them.",
)
@click.option(
    "--job",
    metavar="NAME",
    help="Name of the job, the same on all machines; separates jobs that meet at one place.",
)
@click.option(
    "--restart",
    type=click.IntRange(0),
    default=0,
    help="Total number of restarts: of all processes when one fails; with --dynamic, of that one alone.",
)
@click.option(
    "--dynamic",
    is_flag=True,
    help="A dynamic group: WORLD_SIZE is not set, and the others keep running when one fails.",
)
@click.option(
    "--spares",
    type=click.IntRange(0),
    default=0,
    help="With --dynamic: processes that have imported everything, and replace those that fail.",
)
@click.option(
    "--replica",
    type=click.IntRange(1),
    default=1,
    help="With --dynamic: processes with consecutive ranks that are restarted together if one fails.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0.1, 1e9),
    default=900.0,
    show_default=True,
    help="Seconds to wait for the other machines.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0, 1e9),
    default=30.0,
    show_default=True,
    help="Seconds from SIGTERM to SIGKILL, for workers that are ended.",
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False),
    help="Folder for a file with the output of each rank, beside what is printed.",
)
@click.option(
    "--outlive",
    is_flag=True,
    help="Workers keep running if this launcher is killed; with --log-dir, where alone their output goes.",
)
@click.option("--page", is_flag=True, help="Serve a page that shows the job, as `farcall page` does.")
@click.option("--lend-names", is_flag=True, help="torch.distributed.rpc means farcall, as in `farcall run`.")
@click.option("--xla", is_flag=True, help=f"With --lend-names: {_XLA_HELP[0].lower()}{_XLA_HELP[1:]}")
@click.option("-m", "module", is_flag=True, help="TARGET is the name of a module, not a file.")
@click.argument("target", type=click.Path(), callback=_program)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def launch(
    workers: int,
    nnodes: int | None,
    node_rank: int | None,
    rdzv: str | None,
    job: str | None,
    restart: int,
    dynamic: bool,
    spares: int,
    replica: int,
    timeout: float,
    grace: float,
    log_dir: str | None,
    outlive: bool,
    page: bool,
    lend_names: bool,
    xla: bool,
    module: bool,
    target: str,
    arguments: tuple[str, ...],
) -> int:
    """Run a program in several processes.

    Each finds RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, where init_rpc looks by
    default. When one fails, the others are terminated; with --dynamic they keep running, and with --restart
    the failed one is restarted.

    \b
    farcall launch -n 4 train.py --epochs 3
    farcall launch -n 4 --nnodes 2 --rdzv host0:29500 train.py        # on both machines
    srun --ntasks-per-node=1 farcall launch -n 4 train.py             # under Slurm
    farcall launch -n 4 --dynamic --restart 100 train.py              # restarts workers that fail
    farcall launch -n 4 --dynamic --restart 100 --spares 1 train.py   # at once, by a process that waits
    """  # noqa: D301
    # C++ prints a stack for each failed attempt to reach a store; the launcher says itself what it waits for.
    # PyTorch reads this when it is loaded, which the next import does.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from farcall.launch.job import under_slurm

    given = {"nodes": nnodes, "node_rank": node_rank, "rdzv": rdzv, "name": job}
    if xla and not lend_names:
        raise click.UsageError("--xla needs --lend-names")
    if spares and not (dynamic and restart):
        raise click.UsageError(
            "--spares needs --dynamic and --restart: a spare takes a failed worker's place"
        )
    if replica > 1 and not dynamic:
        raise click.UsageError("--replica needs --dynamic: replicas are restarted while the others go on")
    if workers % replica:
        raise click.UsageError(
            f"--replica {replica} needs a multiple of {replica} workers on each machine, not {workers}"
        )
    if spares and outlive:
        raise click.UsageError("--spares cannot be used with --outlive: spares end with their launcher")
    chosen = {
        "restarts": restart,
        "dynamic": dynamic,
        "spares": spares,
        "replica": replica,
        "timeout": timeout,
        "grace": grace,
        "page": page,
    }
    try:
        found = under_slurm(workers, os.environ, **given, **chosen, log_dir=log_dir, outlive=outlive)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if outlive and log_dir is None:
        raise click.UsageError(
            "--outlive needs --log-dir: the output of workers without a launcher is not read"
        )
    if page and find_spec("aiohttp") is None:
        raise click.UsageError(f"--page needs aiohttp: {install_command('page')}")
    if (found.nodes > 1 or found.node_rank) and not found.rdzv:
        raise click.UsageError("several machines need --rdzv HOST:PORT, where they meet")
    if dynamic and found.rdzv and found.node_rank is None:
        raise click.UsageError("--dynamic needs --node-rank with --rdzv: ranks are counted from it")
    if not dynamic and found.node_rank is not None and found.node_rank >= found.nodes:
        raise click.UsageError(f"--node-rank is from 0 to {found.nodes - 1} here, not {found.node_rank}")
    if not module and not os.path.exists(target):
        raise click.UsageError(f"there is no file {os.path.abspath(target)}")
    from farcall.launch.launcher import launch as launch_job  # which takes a second

    return launch_job(found, target, arguments, module=module, lend_names=lend_names, xla=xla)


@cli.command(short_help="Check this machine and this installation.")
@click.option(
    "--meet",
    metavar="HOST:PORT",
    callback=_meeting_place,
    help="Also check communication with a second machine that runs the same command.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(1, 86400),
    default=60,
    show_default=True,
    help="How long to wait for it.",
)
def doctor(meet: str | None, seconds: float) -> int:
    """Check this machine and this installation, and say how to fix what is wrong.

    With --meet, run on two machines, also check that they can communicate; HOST is one of the two.
    """
    from farcall.doctor import Finding, examine

    wrong = 0

    def show(finding: Finding) -> None:
        nonlocal wrong
        click.echo(finding)
        wrong |= finding.is_wrong

    for finding in examine():
        show(finding)
    with _meanwhile("importing PyTorch and farcall"):
        from torch.accelerator import is_available

        from farcall.accelerator_trial import WHAT, accelerators, between_workers
        from farcall.meeting import meet as meet_other
        from farcall.trials import TRIALS, pytorch
    show(pytorch())
    show(accelerators())
    if is_available():
        with _meanwhile(f"trying {WHAT}"):
            found = between_workers()
        show(found)
    for trial in TRIALS:
        with _meanwhile(f"trying {trial.what}"):
            found = trial.run()
        show(found)
    if meet is not None:
        for finding in meet_other(meet, seconds):
            show(finding)
    return int(wrong)


@contextmanager
def _meanwhile(what: str) -> Iterator[None]:
    """Say on stderr what takes a while; on a terminal only until it is over."""
    fleeting = sys.stderr.isatty()
    click.echo(f"..  {what}", err=True, nl=not fleeting)
    try:
        yield
    finally:
        if fleeting:
            click.echo("\r\x1b[K", err=True, nl=False)


@cli.command(short_help="Serve a model or functions over gRPC.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8443, show_default=True, help="0: a free one.")
@click.option(
    "--token-file", type=click.Path(dir_okay=False), help="File with the token that callers need; mode 0600."
)
@click.option("--cert", type=click.Path(exists=True, dir_okay=False), help="TLS: the server's certificate.")
@click.option("--key", type=click.Path(exists=True, dir_okay=False), help="TLS: its private key.")
@click.option(
    "--ca", type=click.Path(exists=True, dir_okay=False), help="TLS: the authority for callers' certificates."
)
@click.option("--insecure", is_flag=True, help="Let anyone who can reach the port call.")
@click.option("--batch", type=click.IntRange(1), help="Batch concurrent calls, up to this many rows.")
@click.option(
    "--delay",
    type=click.FloatRange(0),
    default=2.0,
    show_default=True,
    help="ms that a batch waits for more calls.",
)
@click.option(
    "--in-flight", type=click.IntRange(1), default=16, show_default=True, help="Calls that run at a time."
)
@click.option("--queue", type=click.IntRange(0), default=256, show_default=True, help="Calls that may wait.")
@click.option("--compressed", is_flag=True, help="Accept compressed requests.")
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="Prometheus metrics.")
@click.option("--metrics-host", default="127.0.0.1", show_default=True, help="The address of that port.")
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Seconds to finish accepted calls in.",
)
@click.option("--tracebacks", is_flag=True, help="Send tracebacks to callers.")
@click.argument("target")
def serve(**options: Any) -> int:
    """Serve a model or functions to clients in any language, over gRPC.

    TARGET is FILE.py:NAME or MODULE:NAME: a model, a function that makes one, or a dict of functions by name.
    SIGTERM and Ctrl-C stop it once accepted calls are answered.

    \b
    farcall serve digits.py:make_model --batch 64
    farcall serve digits.py:make_model --host 0.0.0.0 --token-file token --cert s.pem --key s.key
    """  # noqa: D301
    try:
        from farcall.serving.command import run as run_server
    except ModuleNotFoundError as error:
        raise click.ClickException(str(error)) from error
    try:
        return run_server(**options)
    except (ValueError, OSError) as error:
        raise click.ClickException(getattr(error, "strerror", None) or str(error)) from error


@cli.command(short_help="Keep weights for programs that publish and read them.")
@click.option(
    "--listen", required=True, metavar="HOST:PORT", help="Where programs connect; port 0: a free one."
)
@click.option(
    "--keep", type=click.IntRange(1), default=2, show_default=True, help="Number of versions that stay."
)
def weights(listen: str, keep: int) -> int:
    """Keep versions of a model's weights, for programs that need not be workers of a group.

    They open it by weights.connect("HOST:PORT"), with the same FARCALL_TOKEN. SIGTERM and Ctrl-C end it.
    """
    from farcall.weights.listening import run as keep_weights

    try:
        return keep_weights(listen, keep)
    except (ValueError, OSError) as error:
        raise click.ClickException(getattr(error, "strerror", None) or str(error)) from error


@cli.command(short_help="Show versions and what this machine offers.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def env(as_json: bool) -> int:
    """Show versions and what this machine offers, for bug reports."""
    from farcall.environment import show

    show(as_json=as_json)
    return 0


@cli.command(short_help="Print what completes commands in a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print what completes this command in a shell: eval "$(farcall completion bash)"."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "farcall", "_FARCALL_COMPLETE").source())
    return 0
