"""Each alert fires alone when it should, and is silent just before: by promtool, on series of the
metrics that frontends have (Debian's package ``prometheus``)."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import yaml

from common.observability.telemetry import FIRST_TOKEN_S
from setup.metrics_page import declared
from tests.deployment import DEPLOY

RULES = DEPLOY / "monitoring" / "rules.yml"
NAMES: Final = {metric.name: metric for metric in declared()}
ADDED = {"job", "instance", "process", "le"}
MINUTES = 40

Series = dict[str, str]
"""Values, a minute apart as promtool writes them, by name and labels, without those that a scrape
adds."""


def histogram(name: str, seconds: float, edges: Sequence[float] = FIRST_TOKEN_S) -> Series:
    """Sixty requests a minute, each of which takes so long."""
    found: Series = {}
    for edge in map(str, (*edges, "+Inf")):
        grown = 60 if edge == "+Inf" or seconds <= float(edge) else 0
        found[f'{name}_bucket{{le="{edge}"}}'] = f"0+{grown}x{MINUTES}"
    return found


def workers(**states: str) -> Series:
    return {f'mmrouter_workers{{state="{state}"}}': values for state, values in states.items()}


def requests(**outcomes: int) -> Series:
    """So many a minute."""
    return {
        f'mmrouter_requests_total{{outcome="{outcome}"}}': f"0+{grown}x{MINUTES}"
        for outcome, grown in outcomes.items()
    }


def always(value: float) -> str:
    return f"{value}x{MINUTES}"


LOOP_S = (0.001, 0.01, 0.1, 0.25, 1.0)
W0 = '{worker_id="w0"}'
CACHED = f"mmrouter_realised_cached_tokens_total{W0}"
LAG = 'mmrouter_kv_event_lag_seconds{worker_id="w0",rank="0"}'
RUNS = 'mmrouter_hf_processor_runs{side="worker",worker_id="w0"}'
WELL: Final[Series] = {
    "up": always(1),
    **workers(connected=always(3), disconnected=always(0), lost=always(0), refused=always(0)),
    **workers(ejected=always(0), busy=always(1)),
    **requests(ok=1000, aborted=50, BadRequestError=100, FleetBusyError=5, WorkerDiedError=5),
    **histogram("mmrouter_time_to_first_token_seconds", 0.3),
    **histogram("mmrouter_inter_token_latency_seconds", 0.02),
    **histogram("mmrouter_event_loop_delay_seconds", 0.01, LOOP_S),
    'mmrouter_task_failures_total{task="discovery"}': always(1),
    'mmrouter_internal_errors_total{where="discovery"}': always(1),
    'mmrouter_child_restarts_total{role="media"}': always(1),
    'mmrouter_discovery_errors_total{reason="unreadable"}': always(1),
    'mmrouter_transfer_fallbacks_total{transport="shm",reason="arena_full"}': always(1),
    'mmrouter_transfer_fallbacks_total{transport="shm",reason="not_readable"}': f"0+9x{MINUTES}",
    'mmrouter_refused_connections_total{socket="request plane"}': always(1),
    'mmrouter_retries_total{reason="WorkerBusyError"}': f"0+5x{MINUTES}",
    'mmrouter_migrations_total{how="text"}': f"0+5x{MINUTES}",
    'mmrouter_index_ranks{knowledge="exact"}': always(3),
    'mmrouter_index_ranks{knowledge="degraded"}': always(0),
    'mmrouter_kv_event_losses_total{worker_id="w0",rank="0"}': always(1),
    LAG: always(0.1),
    f"mmrouter_prompt_tokens_total{W0}": f"0+100000x{MINUTES}",
    f"mmrouter_predicted_cached_tokens_total{W0}": f"0+50000x{MINUTES}",
    CACHED: f"0+49000x{MINUTES}",
    RUNS: always(3),
    'mmrouter_worker_pages_missing_total{reason="silent"}': always(1),
}
"""What a fleet has of which nobody must be woken."""


class Case(NamedTuple):
    """What makes an alert fire, and what only nearly does."""

    fires: Series
    nearly: Series


ONCE = f"0x20 1x{MINUTES}"  # within the last quarter of an hour
NEVER_AGAIN = f"0x5 1x{MINUTES}"


def once(series: str) -> Case:
    return Case({series: ONCE}, {series: NEVER_AGAIN})


CASES: Final = {
    "MmrouterFrontendDown": Case({"up": "1x20 0x20"}, {"up": "1x29 0x20"}),
    "MmrouterNoWorkers": Case(
        workers(connected=always(0), busy=always(0)), workers(connected="1x30 0x20", busy=always(0))
    ),
    "MmrouterWorkersMissing": Case(workers(lost=always(1)), workers(lost="1x20 0x20")),
    "MmrouterNoRoom": Case(requests(FleetBusyError=20), requests(FleetBusyError=10)),
    "MmrouterRequestsFail": Case(requests(WorkerDiedError=20), requests(WorkerDiedError=10)),
    "MmrouterSlowFirstToken": Case(
        histogram("mmrouter_time_to_first_token_seconds", 30.0),
        histogram("mmrouter_time_to_first_token_seconds", 4.0),
    ),
    "MmrouterEventLoopLate": Case(
        histogram("mmrouter_event_loop_delay_seconds", 0.2, LOOP_S),
        histogram("mmrouter_event_loop_delay_seconds", 0.05, LOOP_S),
    ),
    "MmrouterTasksFail": once('mmrouter_task_failures_total{task="discovery"}'),
    "MmrouterInternalErrors": once('mmrouter_internal_errors_total{where="discovery"}'),
    "MmrouterProcessesRestart": once('mmrouter_child_restarts_total{role="media"}'),
    "MmrouterDiscoveryFails": Case(
        {'mmrouter_discovery_errors_total{reason="unreadable"}': f"0+1x{MINUTES}"},
        {'mmrouter_discovery_errors_total{reason="unreadable"}': "0x28 1x20"},
    ),
    "MmrouterArenaFull": once(
        'mmrouter_transfer_fallbacks_total{transport="shm",reason="arena_full"}'
    ),
    "MmrouterStrangers": once('mmrouter_refused_connections_total{socket="request plane"}'),
    "MmrouterWorkersEjected": Case(workers(ejected=always(1)), workers(ejected="0x28 1x20")),
    "MmrouterAllWorkersBusy": Case(workers(busy=always(3)), workers(busy=always(2))),
    "MmrouterRequestsMove": Case(
        {'mmrouter_migrations_total{how="text"}': f"0+40x{MINUTES}"},
        {'mmrouter_migrations_total{how="text"}': f"0+15x{MINUTES}"},
    ),
    "MmrouterIndexNotExact": Case(
        {'mmrouter_index_ranks{knowledge="degraded"}': always(1)},
        {'mmrouter_index_ranks{knowledge="degraded"}': "1x24 0x20"},
    ),
    "MmrouterEventsLost": once('mmrouter_kv_event_losses_total{worker_id="w0",rank="0"}'),
    "MmrouterEventsLate": Case({LAG: always(3)}, {LAG: always(0.9)}),
    "MmrouterPredictionsFail": Case({CACHED: f"0+30000x{MINUTES}"}, {CACHED: f"0+40000x{MINUTES}"}),
    "MmrouterWorkersProcessMedia": Case({RUNS: f"0+1x{MINUTES}"}, {RUNS: "0x5 1x40"}),
    "MmrouterWorkerMetricsMissing": Case(
        {'mmrouter_worker_pages_missing_total{reason="silent"}': f"0+1x{MINUTES}"},
        {'mmrouter_worker_pages_missing_total{reason="silent"}': "0x5 1x40"},
    ),
}

ALSO: Final[Mapping[str, Series]] = {
    "MmrouterWorkersMissing": workers(disconnected=always(1)),
    "MmrouterNoRoom": requests(NoWorkerError=20),
    "MmrouterRequestsFail": requests(EnginesDiedError=20),
    "MmrouterRequestsMove": {'mmrouter_retries_total{reason="WorkerBusyError"}': f"0+40x{MINUTES}"},
}
"""Other causes of the same."""

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="on Debian, apt-get install prometheus"
)


def test_there_is_a_case_for_each_alert() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    assert [*CASES] == [
        rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule
    ]


def test_the_series_are_metrics_that_there_are() -> None:
    every = [WELL, *(series for case in CASES.values() for series in case), *ALSO.values()]
    for text in {text for series in every for text in series} - {"up"}:
        name, _, labels = text.partition("{")
        metric = NAMES[name.removesuffix("_bucket")]
        assert set(re.findall(r"(\w+)=", labels)) - ADDED == {*metric.labels}, text


def firing(series: Series, folder: Path, expected: str | None) -> str:
    """What promtool says against this alert alone firing, or none."""
    scraped = {'job="mmrouter"', 'instance="f:8000"'}

    def full(text: str) -> str:
        name, _, labels = text.rstrip("}").partition("{")
        return f"{name}{{{','.join(filter(None, (*sorted(scraped), labels)))}}}"

    test = {
        "interval": "1m",
        "input_series": [
            {"series": full(text), "values": values} for text, values in (WELL | series).items()
        ],
        "promql_expr_test": [
            {
                "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": "30m",
                "exp_samples": [{"labels": f'{{alertname="{expected}"}}', "value": 1}]
                if expected
                else [],
            }
        ],
    }
    file = folder / "test.yml"
    whole = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}
    file.write_text(yaml.safe_dump(whole, width=10_000))
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


@needs_promtool
def test_none_fires_where_all_is_well(tmp_path: Path) -> None:
    assert firing({}, tmp_path, None) == ""


@needs_promtool
@pytest.mark.parametrize("alert", CASES)
def test_each_fires_alone_and_not_too_early(alert: str, tmp_path: Path) -> None:
    assert firing(CASES[alert].fires, tmp_path, alert) == ""
    assert firing(CASES[alert].nearly, tmp_path, None) == ""


@needs_promtool
@pytest.mark.parametrize("alert", ALSO)
def test_other_causes_fire_it_too(alert: str, tmp_path: Path) -> None:
    assert firing(ALSO[alert], tmp_path, alert) == ""
