"""Check the directories, files, addresses and model of a command line before vLLM is imported.

``mmrouter frontend``, ``worker`` and ``up`` share these checks. vLLM's imports take ten seconds.
"""

import argparse
import errno
import os
import re
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from itertools import combinations
from pathlib import Path
from typing import Final

from common.cli.command_line import (
    FRONTEND,
    WORKER,
    CommandLine,
    ConfigSettings,
    Names,
    read_command_line,
)
from common.cli.flag_settings import FlagSettings
from common.cli.known_flags import KnownFlags
from common.cli.process_settings import KeySettings, ProcessSettings, read_keys
from common.cli.worker_settings import WorkerSettings
from common.discovery.settings import DiscoverySettings, check_place
from common.errors import ConfigurationError, ListenError, MmRouterError
from common.request_plane.fleet_sockets import check_bind
from common.vllm_compat.preflight import CONFIGURATIONS, fault_of

_GROUPS: Final = (ConfigSettings, DiscoverySettings, ProcessSettings)

_HUB_NAME: Final = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")
_SLACK_S: Final = 5.0  # for the name server, which the client's time-out does not cover


def leave_if_wrong(prog: str, check: Callable[[], object]) -> None:
    """Print why a check failed, and exit: status 3 if the frontend can't listen, else 2."""
    try:
        check()
    except MmRouterError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        sys.exit(error.exit_status if isinstance(error, ListenError) else 2)


def check_frontend(argv: Sequence[str], *, listens: bool) -> CommandLine:
    """Check a frontend's place for cards, key files and TLS files; its address, if it ``listens``
    itself. Raises MmRouterError."""
    line = _read(argv, FRONTEND, KeySettings)
    _check_keys(line)
    _check_tls(line)
    if listens and (uds := line.of_vllm("uds")) is not None:
        if not Path(uds).parent.is_dir() or Path(uds).is_dir():
            raise ListenError(f"--uds={uds} can't be a socket: name a file in a directory")
    elif listens:
        port = line.of_vllm("port") or "8000"
        if port.isdecimal():  # the parser reports the rest
            free_port(line.of_vllm("host") or "127.0.0.1", int(port))
    return line


def check_worker(argv: Sequence[str], *, of_demo: bool = False) -> None:
    """Check a worker's place for cards, fleet key, address, and model unless it is the demo's, made
    later. Raises MmRouterError."""
    line = _read(argv, WORKER, WorkerSettings)
    worker = WorkerSettings.from_args(line.ours)
    place = worker.worker_host.strip("[]")
    free_port(place, worker.worker_port, option_prefix="--worker-")
    check_bind(worker.endpoint, ProcessSettings.from_args(line.ours).fleet_key())
    known = KnownFlags.of("worker")
    positional = known.positional(line.rest) if known else []
    model = positional[0] if positional else line.of_vllm("model")
    if model is None:
        if not of_demo and known:
            raise ConfigurationError("MODEL or --model is required")
        return
    given = {word.partition("=")[0] for word in line.rest if word.startswith("--")}
    given |= {f"--{key}" for key in (line.file.values if line.file else ())}
    names = {flag.removeprefix("--").replace("-", "_") for flag in given}
    fault = fault_of(model, names)
    if fault is None and not Path(model).exists() and names.isdisjoint(_LOADED_OTHERWISE):
        fault = fault_at_hub(model, line.of_vllm("revision"), line.of_vllm("hf-token"))
    if fault is not None:
        raise ConfigurationError(fault)


def _read(argv: Sequence[str], names: Names, of_one: type[FlagSettings]) -> CommandLine:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    try:
        line = read_command_line(parser, (*_GROUPS, of_one), names, argv)
    except argparse.ArgumentError as error:
        raise ConfigurationError(str(error)) from error
    check_place(DiscoverySettings.from_args(line.ours).open())
    ProcessSettings.from_args(line.ours).fleet_key()
    return line


def _check_keys(line: CommandLine) -> None:
    keys, process = KeySettings.from_args(line.ours), ProcessSettings.from_args(line.ours)
    files = (keys.api_key_file, keys.admin_key_file, process.fleet_key_file)
    found = [
        (file, set(read_keys(file, what)[0]))
        for file, what in zip(files, ("API", "admin", "fleet"), strict=True)
        if file is not None
    ]
    for (one, its), (other, others) in combinations(found, 2):
        if not its.isdisjoint(others):
            raise ConfigurationError(
                f"{one} and {other} hold the same key: users, admins and the fleet need keys of "
                "their own"
            )


def _check_tls(line: CommandLine) -> None:
    names = ("ssl-certfile", "ssl-keyfile", "ssl-ca-certs")
    certificate, key, authorities = (line.of_vllm(name) for name in names)
    for name, place in zip(names, (certificate, key, authorities), strict=True):
        if place and not os.access(place, os.R_OK):
            raise ConfigurationError(f"--{name}: {place} can't be read")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if certificate:
            context.load_cert_chain(certificate, key, _no_password)
    except _EncryptedError:
        pass  # the server asks for the password on its terminal
    except OSError as error:  # that of TLS is one
        raise ConfigurationError(
            f"--ssl-certfile={certificate} can't be used: {error}; it is a PEM file, and "
            "--ssl-keyfile that of its own key, unless the key is in the same file"
        ) from error
    try:
        if authorities:
            context.load_verify_locations(authorities)
    except OSError as error:
        raise ConfigurationError(f"--ssl-ca-certs={authorities} can't be used: {error}") from error


class _EncryptedError(Exception):
    """A key file needs a password."""


def _no_password() -> str:
    raise _EncryptedError


def free_port(
    host: str, wanted: int, taken: Collection[int] = (), option_prefix: str = "--"
) -> int:
    """Return the wanted port, or for 0 a free one outside ``taken``. Raises ListenError: it is in
    use, or the host is not of this machine."""
    host_option, port_option = f"{option_prefix}host", f"{option_prefix}port"
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, wanted, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            found = int(probe.getsockname()[1])
            if found not in taken:
                return found
            # This one is held meanwhile, so another is found.
            return free_port(host, wanted, (), option_prefix)
    except socket.gaierror as error:
        reason = f"{host_option}={host} is no address of this machine: {error.strerror}"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = f"port {wanted} on {host} is in use: choose another one with {port_option}"
        elif error.errno == errno.EADDRNOTAVAIL:
            reason = f"{host_option}={host} is no address of this machine: `ip address` lists them"
        else:
            reason = f"{host_option}={host} {port_option}={wanted}: {error.strerror}"
    raise ListenError(reason)


_LOADED_OTHERWISE: Final = frozenset({"download_dir", "hf_config_path", "model_weights"})
"""Engine arguments with which a model that is no directory need not come from the hub."""


def fault_at_hub(model: str, revision: str | None, token: str | None) -> str | None:
    """Return why the Hugging Face hub gives no such model, None if it does or may. Its client tries
    for a minute to reach a hub that is not there; this asks once, in bounded time."""
    if not _HUB_NAME.fullmatch(model) or os.environ.get("VLLM_USE_MODELSCOPE", "0") not in (
        "",
        "0",
        "False",
    ):
        return None
    from huggingface_hub import constants, try_to_load_from_cache

    kept = (try_to_load_from_cache(model, name, revision=revision) for name in CONFIGURATIONS)
    if any(isinstance(path, str) for path in kept):
        return None
    if constants.HF_HUB_OFFLINE:
        fault: str | None = "HF_HUB_OFFLINE is set, but the cache of the hub (HF_HOME) lacks it"
    else:
        print(f"asking the Hugging Face hub for {model}", file=sys.stderr, flush=True)
        faults: list[str | None] = []
        timeout = float(constants.HF_HUB_ETAG_TIMEOUT)
        asking = threading.Thread(
            target=lambda: faults.append(_ask_hub(model, revision, token, timeout)), daemon=True
        )
        asking.start()
        asking.join(timeout + _SLACK_S)
        fault = faults[0] if faults else _unreachable(f"no answer in {timeout + _SLACK_S:g} s")
    return fault and f"there is no directory {model} here, and {fault}"


def _ask_hub(model: str, revision: str | None, token: str | None, timeout: float) -> str | None:
    from huggingface_hub import get_hf_file_metadata, get_token, hf_hub_url
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # The base class is that of the HTTP client, which differs between releases.
    no_answer: tuple[type[BaseException], ...] = (OSError, *HfHubHTTPError.__bases__)
    try:
        url = hf_hub_url(model, "config.json", revision=revision)
        get_hf_file_metadata(url, token=token or get_token(), timeout=timeout)
    except GatedRepoError:
        return (
            "the Hugging Face hub gives it only to users who accepted its terms: accept them on "
            "the model's page there, and set HF_TOKEN"
        )
    except RepositoryNotFoundError:
        return (
            "the Hugging Face hub has no such model, or a private one: check the name, or set "
            "HF_TOKEN"
        )
    except RevisionNotFoundError:
        return f"its repository in the Hugging Face hub has no revision {revision!r}"
    except HfHubHTTPError:
        return None  # it has no config.json, or the hub is busy: vLLM asks again
    except no_answer as error:
        return _unreachable(" ".join(str(error).split()))
    return None


def _unreachable(reason: str) -> str:
    return (
        f"the Hugging Face hub can't be reached ({reason}): check the network, HTTPS_PROXY and "
        "HF_ENDPOINT, or name a directory that holds the model"
    )
