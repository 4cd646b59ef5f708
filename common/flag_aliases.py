"""Flags of other routers: which are ours under another name, and which mean nothing here, and why.

Who moves from Dynamo, vllm-router or SMG may paste what stands in a launch script. An alias is
another way to write flags of ours, also in the file of ``--config``; where its scale is another
the value is converted. A flag without a counterpart is refused with the reason: if it were taken,
it would be found out too late that it does nothing. Looked up in the sources of all three in
November 2026.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from common.config_file import ConfigFile
from common.errors import ConfigurationError

Convert: TypeAlias = Callable[[str], tuple[str, ...]]


def _same(value: str) -> tuple[str, ...]:
    return (value,)


@dataclass(frozen=True)
class Alias:
    """Another name for flags of ours.

    Attributes:
        of: whose it is.
        flags: ours, or vLLM's.
        convert: makes a value for each of these; a ValueError says why not.
        note: how the value is converted, where it is.
        takes_value: False for a switch, whose value is empty.
    """

    of: str
    flags: tuple[str, ...]
    convert: Convert = _same
    note: str = ""
    takes_value: bool = True

    def values(self, name: str, value: str) -> list[tuple[str, str]]:
        """Flags of ours with their values.

        Raises:
            ConfigurationError: the value has no counterpart.
        """
        try:
            return list(zip(self.flags, self.convert(value), strict=True))
        except ValueError as error:
            raise ConfigurationError(f"{name}={value!r} is unusable: {error}") from error


@dataclass(frozen=True)
class Names:
    """What one side makes of others' flags."""

    aliases: Mapping[str, Alias]
    refused: Mapping[str, str]

    def in_arguments(self, argv: Iterable[str]) -> list[str]:
        """A command line in our own names, with dashes where somebody wrote underscores.

        Raises:
            ConfigurationError: a flag has no counterpart, or its value hasn't.
        """
        words = iter(argv)
        return [ours for word in words for ours in self._ours(word, words)]

    def _ours(self, word: str, following: Iterator[str]) -> list[str]:
        if not word.startswith("-"):
            return [word]
        name, equals, value = word.partition("=")
        if name.startswith("--") and "." not in name:
            name = "--" + name.removeprefix("--").replace("_", "-")
        if name in self.refused:
            raise ConfigurationError(f"{name} is no flag of mmrouter: {self.refused[name]}")
        alias = self.aliases.get(name)
        if alias is None:
            return [name + equals + value]
        if alias.takes_value and not equals:
            try:
                value = next(following)
            except StopIteration:
                raise ConfigurationError(f"{name} needs a value") from None
        elif equals and not alias.takes_value:
            raise ConfigurationError(f"{name} takes no value")
        return [f"{flag}={ours}" for flag, ours in alias.values(name, value)]

    def in_file(self, file: ConfigFile) -> ConfigFile:
        """A file in our own names. Errors as above, and if a key comes out twice."""
        values: dict[str, object] = {}
        for key, value in file.values.items():
            for ours, converted in self._of_key(file, key, value):
                if ours in values or (ours != key and ours in file.values):
                    raise ConfigurationError(f"{file.path}: {key} says the same as {ours}")
                values[ours] = converted
        return ConfigFile(file.path, values)

    def _of_key(self, file: ConfigFile, key: str, value: object) -> list[tuple[str, object]]:
        name = f"--{key}"
        if name in self.refused:
            raise ConfigurationError(
                f"{file.path}: {key} is no flag of mmrouter: {self.refused[name]}"
            )
        alias = self.aliases.get(name)
        if alias is None or value is None:
            return [(key, value)] if alias is None else []
        if not alias.takes_value:
            if not isinstance(value, bool):
                raise ConfigurationError(f"{file.path}: {key}={value!r} is neither true nor false")
            if not value:
                return []
        try:
            made = alias.values(key, str(value))
        except ConfigurationError as error:
            raise ConfigurationError(f"{file.path}: {error}") from error
        return [(flag.removeprefix("--"), converted) for flag, converted in made]


_DYNAMO: Final = "Dynamo"
_ROUTERS: Final = "vllm-router, SMG"


def _weights(value: str) -> tuple[str, ...]:
    weight = float(value)
    return f"{weight:g}", f"{weight / 2:g}"


def _more_than(value: str) -> tuple[str, ...]:
    return ("0",) if value == "None" else (str(int(value) + 1),)


def _mebibytes(value: str) -> tuple[str, ...]:
    return (f"{int(value) / 2**20:.17g}",)


_POLICIES: Final = {
    "cache_aware": "kv",
    "round_robin": "round-robin",
    "random": "random",
    "power_of_two": "power-of-two",
}


def _mode(policy: str) -> tuple[str, ...]:
    if policy not in _POLICIES:
        raise ValueError(f"--router-mode has nothing like it, only like {', '.join(_POLICIES)}")
    return (_POLICIES[policy],)


_WEIGHTS: Final = Alias(
    _DYNAMO,
    ("--router-prefill-weight", "--router-load-weight"),
    _weights,
    "scales all tokens to prefill, of the request and waiting, against decoding; 1 is the default "
    "there and here, and the second weight gets half",
)
_DRAIN: Final = Alias("vllm serve", ("--drain-timeout",), note="seconds; vLLM's default is 0")
_BUSY_BLOCKS: Final = Alias(
    _DYNAMO,
    ("--router-busy-blocks-fraction",),
    lambda value: ("1",) if value == "None" else (value,),
    "None is 1, which is never",
)

_FRONTEND_ALIASES: Final[dict[str, Alias]] = {
    "--api-server-count": Alias("vllm serve", ("--processes",)),
    "-asc": Alias("vllm serve", ("--processes",)),
    "--shutdown-timeout": _DRAIN,
    "--http-host": Alias(_DYNAMO, ("--host",)),
    "--http-port": Alias(_DYNAMO, ("--port",)),
    "--tls-cert-path": Alias("Dynamo, SMG", ("--ssl-certfile",)),
    "--tls-key-path": Alias("Dynamo, SMG", ("--ssl-keyfile",)),
    "--kv-overlap-score-weight": _WEIGHTS,
    "--router-kv-overlap-score-weight": _WEIGHTS,
    "--router-prefill-load-scale": _WEIGHTS,
    "--router-ttl-secs": Alias(_DYNAMO, ("--router-approximate-ttl",)),
    "--router-predicted-ttl-secs": Alias(_DYNAMO, ("--router-predict-ttl",)),
    "--active-decode-blocks-threshold": _BUSY_BLOCKS,
    "--active-prefill-tokens-threshold": Alias(
        _DYNAMO,
        ("--router-busy-prefill-tokens",),
        _more_than,
        "a worker is busy above it there and from it on here, so one is added; None is 0, never",
    ),
    "--policy": Alias(
        _ROUTERS, ("--router-mode",), _mode, ", ".join(f"{a} is {b}" for a, b in _POLICIES.items())
    ),
    "--max-concurrent-requests": Alias(_ROUTERS, ("--max-inflight",)),
    "--max-payload-size": Alias(
        _ROUTERS, ("--max-body-mb",), _mebibytes, "bytes, which become MiB"
    ),
    "--request-timeout-secs": Alias(_ROUTERS, ("--request-timeout",)),
    "--shutdown-grace-period-secs": Alias("SMG", ("--drain-timeout",)),
    "--disable-retries": Alias(
        _ROUTERS, ("--migration-limit",), lambda _: ("0",), "becomes 0", takes_value=False
    ),
    "--cb-failure-threshold": Alias(_ROUTERS, ("--router-eject-failures",)),
    "--cb-timeout-duration-secs": Alias(
        _ROUTERS,
        ("--router-eject-base", "--router-eject-max"),
        lambda value: (value, value),
        "always the same time there, so both become it",
    ),
}

_BY_DISCOVERY: Final = "workers and frontends meet where --discovery says"
_KUBERNETES: Final = "say --discovery kubernetes://namespace/label=value"
_OF_WORKERS: Final = "frontends learn it from the workers, so give it to them"
_ZMQ: Final = "requests and KV events go over ZeroMQ, always"
_HTTP_ONLY: Final = "the frontend speaks HTTP only"
_ONE_KIND: Final = "every worker both prefills and decodes"
_ALWAYS: Final = "it is always so, and can't be turned off"
_NO_QUEUE: Final = "a request that finds no room is answered 429 or 503 at once, and none waits"
_OWN_COST: Final = "costs are made of other parts here: see the --router-…-weight flags"
_THRESHOLDS: Final = "cache and load are weighed in one cost here, without thresholds between them"
_LINKS: Final = "a worker's link tells whether it lives, and --router-stall whether it stalled"
_METRICS: Final = "metrics are at /metrics on --port, beginning with mmrouter_ and vllm:"
_CIRCUIT: Final = "the first output that a worker on trial gives brings it back"
_BACKOFF: Final = "a request moves at once; --retry-budget keeps retries from becoming the overload"
_ONE_MODEL: Final = (
    "a frontend serves the model that its workers have; all that they have with --models-from-cards"
)

_REFUSALS: Final[dict[str, str]] = {
    "discovery-backend": "--discovery takes a URL: etcd://…, kubernetes://… or file:///…",
    "namespace namespace-prefix": f"{_BY_DISCOVERY}; fleets differ in the URL's path",
    "worker-urls": _BY_DISCOVERY,
    "service-discovery selector service-discovery-port service-discovery-namespace": _KUBERNETES,
    "request-plane event-plane": _ZMQ,
    "model-name": "give --served-model-name to the workers, or to the frontend",
    "model-path tokenizer-path kv-cache-block-size": _OF_WORKERS,
    "kserve-grpc-server grpc-metrics-port": _HTTP_ONLY,
    "metrics-prefix prometheus-port prometheus-host prometheus-duration-buckets": _METRICS,
    "kv-events no-kv-events router-kv-events no-router-kv-events": "the KV events of every worker "
    "that publishes them are followed; --kv-events-config turns them off at a worker",
    "router-replica-sync no-router-replica-sync": "workers tell each frontend what the others have "
    "there, always",
    "router-track-active-blocks track-active-blocks no-router-track-active-blocks "
    "no-track-active-blocks router-track-prefill-tokens no-router-track-prefill-tokens": _ALWAYS,
    "router-track-output-blocks track-output-blocks router-assume-kv-reuse assume-kv-reuse "
    "no-router-assume-kv-reuse no-assume-kv-reuse": _OWN_COST,
    "router-kv-overlap-score-credit router-kv-overlap-score-credit-decay load-aware "
    "router-decode-active-request-weight router-host-cache-hit-weight router-disk-cache-hit-weight "
    "router-prefill-load-model router-policy-config shared-cache-multiplier shared-cache-type": (
        _OWN_COST
    ),
    "router-queue-threshold router-queue-policy queue-size queue-timeout-secs": _NO_QUEUE,
    "router-min-initial-workers": "the frontend serves once there is a worker",
    "active-prefill-tokens-threshold-frac": "--router-busy-prefill-tokens counts tokens",
    "admission-control": "set --router-busy-blocks-fraction=1 and --router-busy-prefill-tokens=0 "
    "for none",
    "router-event-threads use-remote-indexer serve-indexer": "the index of KV blocks is in the "
    "frontend, in one thread",
    "enforce-disagg pd-disaggregation vllm-pd-disaggregation vllm-discovery-address prefill decode "
    "prefill-policy decode-policy prefill-selector decode-selector kv-connector": _ONE_KIND,
    "migration-max-seq-len": "a request may move however long it is",
    "dyn-chat-processor": "vLLM's own server renders and parses, always",
    "dyn-tool-call-parser": "give --tool-call-parser, with vLLM's name of the parser",
    "dyn-reasoning-parser": "give --reasoning-parser, with vLLM's name of the parser",
    "cache-threshold balance-abs-threshold balance-rel-threshold": _THRESHOLDS,
    "max-tree-size eviction-interval": "the index holds what workers say they hold, no more",
    "dp-aware intra-node-data-parallel-size": "workers say which data-parallel ranks they have",
    "retry-max-retries": "it counts tries, of whatever kind, on any worker; --migration-limit says "
    "how often a request may go to another one",
    "retry-initial-backoff-ms retry-max-backoff-ms retry-backoff-multiplier "
    "retry-jitter-factor": _BACKOFF,
    "cb-success-threshold cb-window-duration-secs": _CIRCUIT,
    "disable-circuit-breaker": "a large --router-eject-failures comes to the same",
    "health-failure-threshold health-success-threshold health-check-timeout-secs "
    "health-check-interval-secs health-check-endpoint disable-health-check": _LINKS,
    "cors-allowed-origins": "write it as for vLLM: --allowed-origins='[\"https://…\"]'",
    "rate-limit-tokens-per-second": "--max-inflight and --key-share limit what is worked on",
    "request-id-headers": "X-Request-Id is read, always",
    "log-dir": "the log goes to stderr",
    "history-backend": "no responses are stored",
    "enable-igw backend runtime": _ONE_MODEL,
}

FRONTEND: Final = Names(
    MappingProxyType(_FRONTEND_ALIASES),
    MappingProxyType(
        {f"--{name}": reason for names, reason in _REFUSALS.items() for name in names.split()}
    ),
)
"""At a frontend."""

WORKER: Final = Names(MappingProxyType({"--shutdown-timeout": _DRAIN}), MappingProxyType({}))
"""At a worker, whose flags are vLLM's own anyway."""
