"""vLLM's own flags, from the command line and the file of ``--config``. The one file that touches
vLLM's parser, which both sides fill with vLLM's flags."""

import argparse
import json
import re
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Final, NoReturn

from vllm.logger import configure_logging_from_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from common.cli.flag_settings import EMPTY, ConfigFile, Given, is_empty, unknown
from common.cli.process_settings import ProcessSettings
from common.errors import ConfigurationError
from common.observability.log_lines import LogFormat, adopt, log_setup, reserve

SECRETS = frozenset({"api_key", "hf_token"})  # flags with secret values

_PLACE: Final = re.compile(r"host|uds|ssl_certfile|\w+_addr(ess)?")
"""Arguments that open more when they are empty, of which vLLM makes None, than when they are not
given: no host is all addresses, no certificate is no TLS."""

_NO_TEXT: Final = (bool, dict, list)  # types of unquoted YAML values

_ONE_DASH: Final = re.compile(r"-[A-Za-z][^ ]*")
"""A flag that is written with one; numbers and texts with spaces are values."""


class VllmParser(FlexibleArgumentParser):
    """vLLM's parser, with faults raised as ConfigurationError and suggestions for unknown flags."""

    # Inherited. argparse has no public way to ask what a parser knows.
    _actions: list[argparse.Action]
    _option_string_actions: dict[str, argparse.Action]

    def __init__(
        self, prog: str, ours: Collection[str], refusal: Callable[[str], str | None]
    ) -> None:
        """``ours`` are flags to suggest; ``refusal`` says why vLLM's argument (name with
        underscores) is not taken, None if it is."""
        # An abbreviated flag could be confused with one of ours, or with an alias of it.
        super().__init__(prog=prog, allow_abbrev=False)
        self.ours = frozenset(ours)
        self.refusal = refusal

    def error(self, message: str) -> NoReturn:
        said, _, _ = message.partition("For further information visit ")  # Pydantic's
        raise ConfigurationError(" ".join(said.split()))

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        """See argparse; nothing may be left over."""
        for word in args or ():
            # argparse abbreviates flags with one dash, whatever allow_abbrev says.
            flag = word.partition("=")[0]
            if _ONE_DASH.fullmatch(flag) and flag not in self._option_string_actions:
                raise ConfigurationError(self.sentence(flag))
        found, left = super().parse_known_args(args, namespace)
        flags = [word.partition("=")[0] for word in left if word.startswith("--")]
        if flags:
            raise ConfigurationError(self.sentence(flags[0]))
        if left:
            raise ConfigurationError(f"unexpected argument {left[0]!r}")
        return found, left

    @property
    def actions(self) -> Sequence[argparse.Action]:
        return self._actions

    def knows(self, flag: str) -> bool:
        """Return whether this parser has the flag; a field of its value may follow a dot."""
        return flag.partition(".")[0] in self._option_string_actions

    def sentence(self, flag: str) -> str:
        """Return why a flag is not taken."""
        name = flag.removeprefix("--").partition(".")[0].replace("-", "_")
        if (reason := self._refused(name)) is not None:
            return f"{flag} means nothing here: {reason}"
        return unknown(flag, {*self.ours, *self._option_string_actions})

    def sentence_of_key(self, key: str) -> str:
        """Return why a key of a file is not taken. A key is a flag in full, never a short one."""
        if (reason := self._refused(key.partition(".")[0].replace("-", "_"))) is not None:
            return f"{key} means nothing here: {reason}"
        if short := self._option_string_actions.get(f"-{key}"):
            long = max(short.option_strings, key=len).removeprefix("--")
            return f"{key} is unknown; did you mean {long}?"
        flags = {*self.ours, *self._option_string_actions}
        return unknown(key, {flag[2:] for flag in flags if flag.startswith("--")})

    def _refused(self, name: str) -> str | None:
        return self.refusal(name) or self.refusal(name.removeprefix("no_"))

    def given(self, argv: Sequence[str]) -> dict[str, object]:
        """Return the arguments given, without defaults. Raises ConfigurationError."""
        kept = [(action, action.default) for action in self._actions]
        try:
            for action, _ in kept:
                action.default = argparse.SUPPRESS
            return vars(self.parse_args(list(argv)))
        finally:
            for action, default in kept:
                action.default = default

    def words(self, key: str, value: object) -> list[str]:
        """Convert a key of a file to words of a command line. Raises ConfigurationError."""
        flag = f"--{key}"
        action = self._option_string_actions[flag.partition(".")[0]]
        match value:
            case bool() if action.nargs == 0:
                if flag.startswith("--no-") and len(action.option_strings) > 1:
                    raise ConfigurationError(f"write {flag[5:]}: {str(not value).lower()}")
                no = f"--no-{key}"
                return [flag] if value else [no] if no in self._option_string_actions else []
            case bool():
                return [f"{flag}={_text(value)}"]
            case list() if action.nargs in ("+", "*"):
                return [flag, *map(_text, value)]
            case list() if action.type is str and isinstance(action.default, list):  # may repeat
                return [f"{flag}={_text(one)}" for one in value]
            case _ if action.nargs == 0:
                raise ConfigurationError("it is either true or false")
            case _:
                return [f"{flag}={_text(value)}"]


def _text(value: object) -> str:
    return json.dumps(value) if isinstance(value, _NO_TEXT) else str(value)


def _refuse_as_text(value: object, made: dict[str, object]) -> None:
    """Raise ConfigurationError if an unquoted value of a file that is no text was taken as text."""
    written = [value, *value] if isinstance(value, list) else [value]
    wrong = {_text(one) for one in written if isinstance(one, _NO_TEXT)}
    taken = [one for each in made.values() for one in (each if isinstance(each, list) else [each])]
    if any(isinstance(one, str) and one in wrong for one in taken):
        raise ConfigurationError("it takes text, so put it in quotes if that is meant")


def read_vllms(
    parser: VllmParser, rest: Sequence[str], file: ConfigFile | None
) -> tuple[Namespace, dict[str, Given]]:
    """Return vLLM's arguments with its defaults, and by name those that the user set. Keys of the
    file that are ours are skipped. ``rest``, the words unknown to our parser, beats the file.
    Raises ConfigurationError: an argument is unknown, unusable or without meaning here."""
    found = {name: Given("flag", _flag(name), value) for name, value in parser.given(rest).items()}
    words = [*rest]
    for key, value in file.values.items() if file else ():
        if file is None or f"--{key}" in parser.ours:
            continue
        said = _said(parser, file, key, value)
        if said is not None and not found.keys() & said.keys():
            words = [*parser.words(key, value), *words]
            where = f"{file.path}: {key}"
            found |= {name: Given("file", where, one) for name, one in said.items()}
    for name, one in found.items():
        if _flag(name) in parser.ours:  # our parser rejected it: it is malformed
            raise ConfigurationError(f"{one.where} must be written in full, and has no fields")
        if (reason := parser.refusal(name)) is not None:
            raise ConfigurationError(f"{one.where} means nothing here: {reason}")
        if (one.value is None or is_empty(one.value)) and _PLACE.fullmatch(name):
            more = "; 0.0.0.0 is all addresses" if name == "host" else ""
            raise ConfigurationError(f"{one.where} {EMPTY}{more}")
    return parser.parse_args(words), found


def _said(
    parser: VllmParser, file: ConfigFile, key: str, value: object
) -> dict[str, object] | None:
    """Return the arguments of a key of the file; None if it has no value."""
    if not parser.knows(f"--{key}"):  # not shown: the value may be a secret
        raise ConfigurationError(f"{file.path}: {parser.sentence_of_key(key)}")
    try:
        words = parser.words(key, "" if value is None else value)
        if value is None:
            return None
        made = parser.given(words)
        _refuse_as_text(value, made)
        return made
    except ConfigurationError as error:
        shown = "***" if key.replace("-", "_") in SECRETS else repr(value)
        raise ConfigurationError(f"{file.path}: {key}={shown} is unusable: {error}") from error


def pass_level_on(ours: Namespace, args: Namespace) -> None:
    """Copy our ``--log-level`` to vLLM's arguments, unless it is from our environment variable."""
    said = ProcessSettings.given(ours).get("log_level")
    if said is not None and said.layer != "environment":
        args.log_level = ProcessSettings.from_args(ours).log_level.upper()


def configure_vllms_logging(args: Namespace, *, engine: bool = False) -> None:
    """Configure vLLM's log lines by its arguments, or else like ours; store the result in ``args``.
    Processes of an engine have only vLLM's own formatters."""
    config = configure_logging_from_args(args)
    ours = log_setup()
    if _left_to_us(args):
        if engine and ours is not None and ours.form is LogFormat.JSON:
            args.logging_config = replace(config, formatter="json")
            configure_logging_from_args(args)
        adopt(("vllm",))
    _reserve_unless_asked(args, "vllm")


def adopt_servers_lines(args: Namespace) -> None:
    """Do the same for the HTTP server's log lines, once it is configured."""
    names = ("uvicorn", "uvicorn.access", "uvicorn.error")
    if _left_to_us(args):
        adopt(names)
    _reserve_unless_asked(args, *names)


def _reserve_unless_asked(args: Namespace, *loggers: str) -> None:
    """Keep user text out of log lines unless the operator asked to log requests or answers."""
    asked = ("enable_log_requests", "enable_log_outputs")
    if not any(getattr(args, name, False) for name in asked):
        reserve(loggers)


def _left_to_us(args: Namespace) -> bool:
    """Return whether vLLM's arguments leave the format of lines to us."""
    config = getattr(args, "logging_config", None)
    return config is None or (config.pylogging_config_file is None and config.formatter == "text")


def _flag(name: str) -> str:
    return "MODEL" if name == "model_tag" else "--" + name.replace("_", "-")
