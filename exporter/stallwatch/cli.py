"""The command line.  Every flag is also an environment variable: `--web.max-requests` = STALLWATCH_WEB_MAX_REQUESTS."""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from . import __version__, log_format
from .call_filter import deny_intrusions
from .config import COLLECTORS, DEFAULT_LISTEN_ADDRESS
from .strict_yaml import InputError, is_plain, parse_duration, shown

PREFIX = "STALLWATCH_"
SHORTEST_WATCH_SECONDS = 2.0
NO_THREAD = "can't start new thread"
"""What CPython says when the kernel refuses one."""
TEST_PREFIX = "STALLWATCH_E2E_"
TRUE_WORDS, FALSE_WORDS = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
DEFAULT_URL = f"http://localhost{DEFAULT_LISTEN_ADDRESS}"


class UsageError(Exception):
    """The command line or an environment variable is wrong; the text says how."""


class Parser(argparse.ArgumentParser):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Flags are not guessed from their first letters: a typing error must not switch something else."""
        super().__init__(*arguments, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> None:  # type: ignore[override]
        """One sentence and exit code 2 (argparse prints the usage first, which hides it)."""
        raise UsageError(f"{message}; see {self.prog} --help")


class Append(argparse.Action):
    """Collects the values of a repeatable flag; the first one replaces the default."""

    def __call__(self, parser: object, namespace: argparse.Namespace, value: Any, flag: str | None = None) -> None:
        given = f"{self.dest} given"
        setattr(namespace, given, [*getattr(namespace, given, []), value])
        setattr(namespace, self.dest, getattr(namespace, given))


def environment_name(flag: str) -> str:
    return PREFIX + flag.lstrip("-").upper().replace(".", "_").replace("-", "_")


def add_flag(parser: argparse.ArgumentParser, flag: str, environ: Mapping[str, str], **options: object) -> None:
    """A flag with a value; its environment variable gives the default."""
    name = environment_name(flag)
    if name in environ:
        convert = options.get("type")
        value: object = environ[name]
        try:
            value = convert(environ[name]) if callable(convert) else value
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"{name}: {error}") from None
        choices = options.get("choices")
        if isinstance(choices, tuple) and value not in choices:
            raise UsageError(f"{name}: {shown(str(value))} is unknown; allowed are {', '.join(choices)}")
        options["default"] = [value] if options.get("action") is Append else value
    options["help"] = f"{options['help']} [${name}]"
    parser.add_argument(flag, **options)  # type: ignore[arg-type]


def add_switch(
    parser: argparse.ArgumentParser, flag: str, environ: Mapping[str, str], default: bool, text: str
) -> None:
    """`--x` and `--no-x`; the environment variable takes true or false."""
    name = environment_name(flag)
    word = environ.get(name, "").lower()
    if word and word not in TRUE_WORDS + FALSE_WORDS:
        raise UsageError(f"{name}: {shown(environ[name])} is no boolean; allowed are true and false")
    value = default if not word else word in TRUE_WORDS
    dest = flag.lstrip("-")
    parser.add_argument(flag, dest=dest, action="store_true", default=value, help=f"{text} [${name}]")
    parser.add_argument(f"--no-{dest}", dest=dest, action="store_false", default=value, help=argparse.SUPPRESS)


def _seconds(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _watch(text: str) -> float:
    seconds = _seconds(text)
    if seconds < SHORTEST_WATCH_SECONDS:
        raise argparse.ArgumentTypeError(f"{text} is too short to see anything move; allowed is at least 2s")
    return seconds


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{shown(text)} is no whole number")
    return int(text)


def _path(text: str) -> str:
    if not text.startswith("/"):
        raise argparse.ArgumentTypeError(f"{shown(text)} is no path of a URL; it begins with /")
    return text


def _flags(words: Iterable[str]) -> str:
    """The words without the values that flags among them have."""
    names = [word.partition("=")[0] if word.startswith("-") else word for word in words]
    return " ".join(name if is_plain(name.lstrip("-")) else f"({shown(name)})" for name in names)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Variables that look like ours and mean nothing: mostly a misspelled flag."""
    ours = (name for name in environ if name.startswith(PREFIX) and not name.startswith(TEST_PREFIX))
    return sorted(name for name in ours if name not in _known_variables())


def _known_variables() -> set[str]:
    """Those of the flags that have one: every flag with a dot in its name, and `--once`."""
    parser = build_parser({})
    commands = next(a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    flags = {flag for command in commands.values() for action in command._actions for flag in action.option_strings}
    return {environment_name(flag) for flag in flags if ("." in flag or flag == "--once") and "--no-" not in flag}


def build_parser(environ: Mapping[str, str]) -> Parser:
    parser = Parser("stallwatch", description="Finds silent stalls of LLM inference servers.")
    parser.add_argument("--version", action="version", version=f"stallwatch {__version__}")
    common = _common(environ, level="info", form="logfmt")
    commands = parser.add_subparsers(dest="command", metavar="SUBCOMMAND", parser_class=Parser)
    for name, (text, add, _) in COMMANDS.items():
        add(commands.add_parser(name, parents=[common], help=text, description=text), environ)
    return parser


def _common(environ: Mapping[str, str], level: str, form: str) -> Parser:
    """The flags that every command takes."""
    common = Parser(add_help=False)
    common.add_argument("--version", action="version", version=f"stallwatch {__version__}")
    text = "least severe line logged"
    add_flag(common, "--log.level", environ, choices=log_format.LEVELS, default=level, help=text)
    add_flag(common, "--log.format", environ, choices=log_format.FORMATS, default=form, help="form of our log")
    return common


def _add_looking(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    add_flag(parser, "--config.file", environ, metavar="FILE", help="configuration (YAML)")
    add_flag(parser, "--path.procfs", environ, default="/proc", metavar="DIR", help="where /proc is mounted")
    add_flag(parser, "--path.rootfs", environ, default="/", metavar="DIR", help="where the host's root is mounted")
    for collector in COLLECTORS:
        add_switch(parser, f"--collector.{collector}", environ, True, f"use the {collector} collector (--no-… not)")


def _add_serve(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    _add_looking(parser, environ)
    add_switch(parser, "--config.check", environ, False, "only say whether the configuration is right")
    add_flag(
        parser,
        "--web.listen-address",
        environ,
        action=Append,
        metavar="ADDRESS",
        help=f"HOST:PORT, [IPV6]:PORT or :PORT; may be repeated (default {DEFAULT_LISTEN_ADDRESS})",
    )
    add_flag(
        parser,
        "--web.telemetry-path",
        environ,
        type=_path,
        default="/metrics",
        metavar="PATH",
        help="path of the metrics",
    )
    add_flag(
        parser,
        "--web.max-requests",
        environ,
        type=_count,
        default=40,
        metavar="N",
        help="answers at once; 0 = no limit",
    )
    add_flag(
        parser, "--web.config.file", environ, metavar="FILE", help="TLS, users and headers (exporter-toolkit's form)"
    )
    add_switch(parser, "--web.enable-lifecycle", environ, False, "allow POST /-/reload")
    add_flag(
        parser,
        "--state.dir",
        environ,
        metavar="DIR",
        help="folder in which verdicts outlast a restart of the exporter (default: none, they do not)",
    )
    add_switch(parser, "--once", environ, False, "one complete cycle, the page to stdout, then exit")


def _add_check(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    _add_looking(parser, environ)
    parser.add_argument(
        "--for", dest="seconds", type=_watch, default=15.0, metavar="DURATION", help="how long to watch, at least 2s"
    )
    parser.add_argument("--server", metavar="NAME", help="only this server")
    parser.add_argument("--url", default=DEFAULT_URL, metavar="URL", help=f"a running serve (default {DEFAULT_URL})")
    parser.add_argument(
        "--ca-file", metavar="FILE", help="who may have signed its certificate, where --url is https://"
    )
    parser.add_argument("--password-file", metavar="FILE", help="USER:PASSWORD, where it asks for them")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="form of the output")
    parser.add_argument(
        "--stacks", action="store_true", help="and the stacks of the ranks of stalled and suspect servers"
    )


def _add_parse(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    parser.add_argument("files", nargs="+", metavar="LOGFILE", help="a log, or - for stdin; .gz is unpacked")
    parser.add_argument("--framework", default="auto", metavar="NAME", help="whose log it is, or auto")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="form of the output")


def _add_record(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    _add_looking(parser, environ)
    parser.add_argument("--out", required=True, metavar="FILE", help="a new file, .jsonl or .jsonl.gz")
    parser.add_argument(
        "--for", dest="seconds", type=_watch, default=600.0, metavar="DURATION", help="how long (default 10m)"
    )


def _add_replay(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    parser.add_argument("files", nargs="+", metavar="RECORDING", help="a recording (.jsonl or .jsonl.gz)")
    add_flag(parser, "--config.file", environ, metavar="FILE", help="configuration (YAML): its verdict times")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="form of the output")


def _add_drill(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    actions = parser.add_subparsers(dest="action", metavar="list|run", required=True, parser_class=Parser)
    common = _common({}, level=argparse.SUPPRESS, form=argparse.SUPPRESS)  # what stands before the action holds
    text = "list the conditions, one a line, the name first"
    actions.add_parser("list", parents=[common], help=text, description=text)
    text = "start a harmless stand-in server that really is in the named condition"
    run = actions.add_parser("run", parents=[common], help=text, description=text)
    run.add_argument("name", metavar="NAME", help="a condition, see drill list")
    run.add_argument("--for", dest="seconds", type=_watch, default=300.0, metavar="DURATION", help="how long (5m)")
    run.add_argument("--speed", type=_speed, default=10.0, metavar="N", help="what all times are divided by (10)")
    run.add_argument("--serve", action="store_true", help="run an exporter with these times, too")
    run.add_argument("--gpus", action="store_true", help="hold memory on stand-in GPUs (needs a C compiler)")


def _add_rules(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    parser.add_argument("files", nargs="*", metavar="FILE", help="servers.yml, gpus.yml …; none: the usual ones as one")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="another value; see --keys")
    parser.add_argument("--without", action="append", metavar="ALERT", help="leave this alert out")
    parser.add_argument("--out", metavar="DIR", help="write each file, the optional ones too, into this folder")
    parser.add_argument("--kubernetes", action="store_true", help="as a PrometheusRule")
    parser.add_argument("--keys", action="store_true", help="list the keys of --set with their values, then exit")


def _speed(text: str) -> float:
    from .drill.command import FASTEST

    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 1 <= speed <= FASTEST:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no speed; allowed is 1 to {FASTEST:g}")
    return speed


def _add_nothing(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """No flags of its own."""


def _run_serve(arguments: argparse.Namespace) -> int:
    from . import serve

    settings = _settings(arguments)
    if getattr(arguments, "config.check"):
        return serve.check_config(settings, getattr(arguments, "web.config.file") or None)
    if arguments.once:
        return serve.serve_once(settings)
    web = serve.WebSettings(
        listen_addresses=tuple(getattr(arguments, "web.listen_address") or (DEFAULT_LISTEN_ADDRESS,)),
        telemetry_path=getattr(arguments, "web.telemetry_path"),
        max_requests=getattr(arguments, "web.max_requests"),
        enable_lifecycle=getattr(arguments, "web.enable-lifecycle"),
        config_file=getattr(arguments, "web.config.file") or None,
    )
    if not deny_intrusions():
        logging.getLogger(__name__).info("the kernel takes no filter of system calls here")
    return serve.serve(settings, web, getattr(arguments, "state.dir"))


def _settings(arguments: argparse.Namespace):  # type: ignore[no-untyped-def]
    from .assembly import Settings

    return Settings(
        config_file=getattr(arguments, "config.file"),
        procfs=getattr(arguments, "path.procfs"),
        rootfs=getattr(arguments, "path.rootfs"),
        collectors=tuple(name for name in COLLECTORS if getattr(arguments, f"collector.{name}")),
    )


def _run_check(arguments: argparse.Namespace) -> int:
    from .check import Peer, check

    settings = _settings(arguments)
    peer = Peer(arguments.url, arguments.ca_file, arguments.password_file)
    return check(settings, peer, arguments.seconds, arguments.server, arguments.format, with_stacks=arguments.stacks)


def _run_parse(arguments: argparse.Namespace) -> int:
    from .frameworks import load_frameworks
    from .parse.report import parse

    as_json = arguments.format == "json"
    return parse(arguments.files, arguments.framework, load_frameworks(), as_json, sys.stdout, sys.stderr)


def _run_record(arguments: argparse.Namespace) -> int:
    from .recordings.record import record

    return record(_settings(arguments), arguments.out, arguments.seconds)


def _run_replay(arguments: argparse.Namespace) -> int:
    from .config import load_config
    from .frameworks import load_frameworks
    from .recordings.replay import replay

    file, config = getattr(arguments, "config.file"), None
    if file is not None:
        config = load_config(file, tuple(framework.name for framework in load_frameworks()))
    return replay(arguments.files, config, None, arguments.format)


def _run_drill(arguments: argparse.Namespace) -> int:
    from .drill import command
    from .drill.conditions import UnknownSettingError
    from .drill.memory_cgroup import NoCgroupError
    from .drill.nvml_standin import NoCompilerError
    from .drill.table import find_condition

    if arguments.action == "list":
        return command.list_conditions(sys.stdout)
    try:
        condition = find_condition(arguments.name)
        drill = command.Drill(condition, arguments.seconds, arguments.speed, arguments.serve, arguments.gpus)
        return command.run(drill, sys.stdout)
    except (UnknownSettingError, NoCgroupError, NoCompilerError) as error:
        raise UsageError(str(error)) from None


def _run_rules(arguments: argparse.Namespace) -> int:
    from .rules import RulesError, command

    if arguments.keys:
        return command.list_keys(sys.stdout)
    try:
        settings = command.settings_of(arguments.set or ())
        wanted = command.Wanted(
            tuple(arguments.files), settings, tuple(arguments.without or ()), arguments.out, arguments.kubernetes
        )
        return command.write_rules(wanted, sys.stdout)
    except RulesError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        if error.filename is None:
            raise
        raise UsageError(f"{error.filename} cannot be written: {error.strerror}") from None


def _run_frameworks(arguments: argparse.Namespace) -> int:
    from .frameworks import describe, load_frameworks

    for framework in load_frameworks():
        print("\n    ".join(describe(framework)))
    return 0


def _run_signals(arguments: argparse.Namespace) -> int:
    from .catalogue import all_signals

    for signal in all_signals():
        labels = ",".join(signal.labels)
        print(f"stallwatch_{signal.name}{{{labels}}} {signal.kind} {signal.scope}\n    {signal.help}")
    return 0


Adder = Callable[[argparse.ArgumentParser, Mapping[str, str]], None]
COMMANDS: Mapping[str, tuple[str, Adder, Callable[[argparse.Namespace], int]]] = {
    "serve": ("the exporter", _add_serve, _run_serve),
    "check": ("what is every server on this node doing?", _add_check, _run_check),
    "parse": ("read whole logs and say how far the start came", _add_parse, _run_parse),
    "record": ("write what the collectors read to a file", _add_record, _run_record),
    "replay": ("judge a recording as serve would have", _add_replay, _run_replay),
    "drill": ("a stand-in server in a named condition, to test paging end to end", _add_drill, _run_drill),
    "rules": ("print the alert rules, with other thresholds or without some", _add_rules, _run_rules),
    "frameworks": ("list the inference servers that are known", _add_nothing, _run_frameworks),
    "signals": ("list everything that is observed", _add_nothing, _run_signals),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: see docs/REFERENCE.md, "Command line"; 2 for bad usage, configuration or input."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may not fit the locale's encoding
    try:
        parser = build_parser(os.environ)
        arguments, unknown = parser.parse_known_args(argv)
        if unknown:
            where = " ".join(filter(None, (parser.prog, arguments.command)))
            raise UsageError(f"unrecognized arguments: {_flags(unknown)}; see {where} --help")
        if arguments.command is None:
            parser.print_help()
            return 0
        for name in unknown_variables(os.environ):
            print(f"stallwatch: the environment variable {name} means nothing here; is it misspelled?", file=sys.stderr)
        log_format.set_up(getattr(arguments, "log.level"), getattr(arguments, "log.format"))
        if argv is None:
            log_format.tell_bugs()
        status = COMMANDS[arguments.command][2](arguments)
        sys.stdout.flush()
        return status
    except (InputError, UsageError) as error:
        print(f"stallwatch: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader of our output went away
        return 0
    except RuntimeError as error:
        if str(error) != NO_THREAD:
            raise
        print("stallwatch: no thread can be started: the limit on processes is reached (ulimit -u)", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is not None or error.errno != errno.ENOSPC:
            raise
        print(f"stallwatch: cannot write: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
