"""Command line -> one command. `python -m harnessrl_jax.launch --help` lists them."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from harnessrl_jax import __version__
from harnessrl_jax import config as configuration
from harnessrl_jax.errors import ConfigError, HarnessRLError

DESCRIPTION = """\
Trains a language model with reinforcement learning through the agent harness it is deployed in.

With no arguments: trains the bundled model on the bundled task, in minutes, on a processor.

  python -m harnessrl_jax.launch                                    the quick start
  python -m harnessrl_jax.launch my.toml --optimizer.learning_rate 1e-4
                                                                    a run of your own; any key can be overridden
  python -m harnessrl_jax.launch plan my.toml --chip v5e --chips 16 --mesh.fsdp 16
                                                                    whether it fits, before paying
  python -m harnessrl_jax.launch eval my.toml --model.path runs/my-0/model
                                                                    score a model on held-out questions
  python -m harnessrl_jax.launch serve                              an OpenAI-compatible endpoint for your own harness
  python -m harnessrl_jax.launch inspect runs/quickstart-0          what a rollout did and what of it is trained
  python -m harnessrl_jax.launch doctor runs/quickstart-0           whether the calls that were kept can be trusted
"""
COMMANDS = {
    "train": "train a model (the default)",
    "plan": "tell whether a run would fit some chips, and the least time of its step; exit status 1 if it does not",
    "eval": "score a model on the held-out questions",
    "serve": "run gateway and sampler alone, for a harness of your own",
    "inspect": "show a rollout's trees, roles, advantages and reasons",
    "doctor": "check a call store against the rules; exit status 1 if something is wrong",
    "export": "write the calls of a run as lines of JSON or as ATIF documents",
    "import": "read such files into a new call store",
    "convert": "write the model folder of a GGUF file",
}
CHIP_NAMES = ("v4", "v5e", "v5p", "v6e", "h100", "h200", "cpu")
CONFIGURED = ("train", "plan", "eval", "serve")
"""Commands that read a configuration, whose keys are then options too."""


def parser() -> argparse.ArgumentParser:
    """The command line; keys of the configuration are overrides and are parsed by `config`."""
    top = argparse.ArgumentParser(
        prog="python -m harnessrl_jax.launch",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    for name in CONFIGURED:
        command = commands.add_parser(
            name, help=COMMANDS[name], epilog="Any key of the configuration can be overridden: --section.key VALUE."
        )
        command.add_argument(
            "config",
            nargs="?",
            default="quickstart",
            help="a TOML file, or the name of a bundled one (default: quickstart)",
        )
        command.add_argument("--run-dir", type=Path, help="folder of the run (default: runs/NAME-SEED)")
        if name == "train":
            _several_processes(command)
        if name == "plan":
            command.add_argument("--chip", required=True, choices=CHIP_NAMES, help="kind of chip")
            command.add_argument("--chips", required=True, type=int, help="how many")
        if name == "serve":
            _serve_options(command)
    inspect = commands.add_parser("inspect", help=COMMANDS["inspect"])
    inspect.add_argument(
        "--rollout", action="append", default=[], help="which rollout; may be repeated (default: list)"
    )
    inspect.add_argument("--html", type=Path, help="write a page to this file instead of printing")
    doctor = commands.add_parser("doctor", help=COMMANDS["doctor"])
    doctor.add_argument("--all", action="store_true", help="print every finding, not the first few of each kind")
    export = commands.add_parser("export", help=COMMANDS["export"])
    for command in (inspect, doctor, export):
        command.add_argument("store", type=Path, help="folder of a run, or a call store")
        command.add_argument("--model", type=Path, help="folder of the tokenizer (default: the run's)")
    export.add_argument("out", type=Path, help="a new file of lines (jsonl), or a new folder of documents (atif)")
    take_in = commands.add_parser("import", help=COMMANDS["import"])
    take_in.add_argument("files", type=Path, nargs="+", help="files of lines, or ATIF documents")
    take_in.add_argument("--store", type=Path, required=True, help="the new call store")
    for command in (export, take_in):
        command.add_argument("--format", choices=("jsonl", "atif"), default="jsonl", help="default: jsonl, loss-free")
    _foreign_options(take_in)
    convert = commands.add_parser("convert", help=COMMANDS["convert"])
    convert.add_argument("source", help="a GGUF file, or package:NAME for the one in an installed Python package")
    convert.add_argument("folder", type=Path, help="the new model folder")
    convert.add_argument(
        "--chat-template", help="a Jinja file to use instead of the source's own, or builtin:NAME for that of a model"
    )
    return top


def _serve_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback)")
    command.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes any (default: 8000)")
    command.add_argument("--public-url", help="https address of the proxy in front, for a host that others reach")
    command.add_argument(
        "--grace", type=float, default=30.0, metavar="SECONDS",
        help="how long calls under way may take to finish when the process is told to stop (default: 30)",
    )  # fmt: skip


def _foreign_options(command: argparse.ArgumentParser) -> None:
    other = command.add_argument_group("ATIF documents of other programs", "What such documents do not say.")
    other.add_argument("--run-id", default="imported", help="the run the calls belong to (default: imported)")
    other.add_argument("--task-id", help="the task, which is also the group (default: one for each file)")
    other.add_argument("--agent", action="append", help="an agent to train; may be repeated (default: all)")
    other.add_argument("--logprobs", choices=("raw", "processed"), help="how they were computed (default: left out)")
    other.add_argument("--temperature", type=float, default=1.0, help="sampling temperature of --logprobs (default: 1)")
    other.add_argument("--version", type=int, default=0, help="number of the weights that sampled (default: 0)")


def _several_processes(command: argparse.ArgumentParser) -> None:
    several = command.add_argument_group(
        "several processes",
        "Start the same command once on every host; all of them see the same run folder and model folder. "
        "The first process runs gateway, sampler and rollouts.",
    )
    several.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of the first process, or `auto` on Cloud TPU slices, Slurm and Open MPI (default: one process)",
    )
    several.add_argument("--processes", type=int, metavar="N", help="how many there are; `auto` finds out")
    several.add_argument("--process", type=int, metavar="I", help="which of them this is, from 0; `auto` finds out")


def find_config(name: str) -> Path:
    """The path itself where it is one; otherwise the bundled configuration of that name. Raises ConfigError."""
    package = Path(__file__).parents[1]
    bundled = next((folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir()), None)
    path = Path(name)
    if path.suffix == ".toml" and path.exists():
        return path
    found = {file.stem: file for file in sorted(bundled.glob("*.toml"))} if bundled else {}
    if path.stem in found and path.parent in (Path(), Path("configs")):
        return found[path.stem]
    raise ConfigError(f"{name}: no such configuration file. Bundled ones: {', '.join(found)}.")


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates `--section.key VALUE` and `--key VALUE` of the configuration from the options of the command."""
    own, overrides, items = [], [], list(arguments)
    while items:
        item = items.pop(0)
        key, equals, _ = item.removeprefix("--").partition("=")
        if item.startswith("--") and ("." in key or key in configuration.Config.model_fields):
            overrides.append(item)
            if not equals and items:
                overrides.append(items.pop(0))
        else:
            own.append(item)
    return own, overrides


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0] not in COMMANDS and given[0] not in ("-h", "--help", "--version")):
        given.insert(0, "train")
    given, overrides = split_overrides(given) if given[0] in CONFIGURED else (given, [])
    options = parser().parse_args(given)
    try:
        return _run(options, overrides)
    except HarnessRLError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped. Nothing is lost: the same command continues from the last checkpoint.", file=sys.stderr)
        return 128 + signal.SIGINT


def _run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if options.command not in CONFIGURED:
        return _look(options)
    config = configuration.load(find_config(options.config), overrides)
    suffix = "" if options.command == "train" else f"-{options.command}"
    run_dir = options.run_dir or Path("runs") / f"{config.name}-{config.seed}{suffix}"
    _devices(config)
    # Imported here: JAX must not start before its devices are set, and `--help` must not wait for it.
    if options.command == "plan":
        from harnessrl_jax.launch.plan import plan

        return plan(config, options.chip, options.chips)
    if options.command == "eval":
        from harnessrl_jax.launch.evaluate import evaluate

        return evaluate(config, run_dir)
    if options.command == "serve":
        from harnessrl_jax.launch.serve import Serving, address_of, serve

        address = address_of(options.host, options.port, options.public_url)
        return serve(config, run_dir, Serving(address, options.grace))
    return _train(options, config, run_dir)


def _train(options: argparse.Namespace, config: configuration.Config, run_dir: Path) -> int:
    import jax

    from harnessrl_jax.launch.hosts import follow, join

    join(options)
    if config.algorithm.kind == "supervised":
        if jax.process_count() > 1:
            raise ConfigError(f'{options.config}: algorithm.kind = "supervised" runs in one process; start only one.')
        from harnessrl_jax.launch.supervised import warm_start

        return warm_start(config, run_dir)
    if jax.process_index() > 0:
        from harnessrl_jax.launch.run_folder import RunFolder

        return follow(config, RunFolder(run_dir))
    from harnessrl_jax.launch.train import train

    return train(config, run_dir)


def _look(options: argparse.Namespace) -> int:
    """The commands that read no configuration."""
    if options.command == "doctor":
        from harnessrl_jax.launch.doctor import doctor

        return doctor(options.store, options.model, every=options.all)
    if options.command == "export":
        from harnessrl_jax.launch.exporting import export

        return export(options.store, options.model, options.format, options.out)
    if options.command == "import":
        return _import(options)
    if options.command == "convert":
        from harnessrl_jax.launch.converting import convert

        return convert(options.source, options.folder, options.chat_template)
    from harnessrl_jax.launch.inspect import inspect

    return inspect(options.store, options.rollout, model=options.model, html=options.html)


def _import(options: argparse.Namespace) -> int:
    from harnessrl_jax.launch.importing import Foreign, take_in
    from harnessrl_jax.trajectories import LogpKind

    kind = None
    if options.logprobs is not None:
        kind = LogpKind(mode=options.logprobs, temperature=options.temperature, top_p=1.0, top_k=0)
    agents = tuple(options.agent) if options.agent else None
    foreign = Foreign(options.run_id, options.task_id, agents, kind, options.version)
    return take_in(options.files, options.format, options.store, foreign)


def _devices(config: configuration.Config) -> None:
    """Splits the processor into virtual devices where it is the only device; quietens start-up noise."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import jax

    jax.config.update("jax_num_cpu_devices", config.mesh.cpu_devices)


if __name__ == "__main__":
    sys.exit(main())
