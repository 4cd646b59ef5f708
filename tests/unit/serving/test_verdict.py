"""What blocks of the serving benchmark show, which rounds count, and the line at its end."""

import csv
import io
import json
from dataclasses import dataclass

import pytest

from tests.benchmarks.fleet_clients import Whole
from tests.benchmarks.serving.bound import Work, bound_seconds
from tests.benchmarks.serving.contenders import Role
from tests.benchmarks.serving.counters import Counters
from tests.benchmarks.serving.engines import Engines
from tests.benchmarks.serving.figures import Block, Limits, Setting, figures_of
from tests.benchmarks.serving.headline import headline
from tests.benchmarks.serving.report import table, write_csv
from tests.benchmarks.serving.traffic import Closed, Load, Open, load
from tests.benchmarks.serving.verdict import Verdict, judge
from tests.simgpu.gpu import GpuModel
from tests.simgpu.stats import Stats

GPU = GpuModel(step_ms=10, prefill_ms=0.1, encoder_ms=0.2, context_ms=0)
LIMITS = Limits(first_ms=1000, between_ms=100)
ENGINES = Engines(2, GPU)
SETTING = Setting(ENGINES, Closed(4), LIMITS)
WORK = Work(prompt_tokens=1000, cached_tokens=400, answer_tokens=40, pictures=2, picture_tokens=200)


def answer(first: float, *gaps: float) -> Whole:
    arrived = [first]
    for gap in gaps:
        arrived.append(arrived[-1] + gap)
    return Whole("", len(arrived), 100, 40, arrived)


def block(
    contender: str, number: int = 0, seconds: float = 10.0, late: float = 0.0, **of: float
) -> Block:
    return Block(
        contender,
        number,
        seconds,
        [answer(of.get("first", 0.5), 0.01, 0.03)] * 10,
        WORK,
        Stats(busy_seconds=5.0, late_seconds=late, encoder_items=3, cached_tokens=300, steps=20),
        {Role.FRONTEND: 0.3, Role.ENGINE: 0.6},
        Counters(of.get("predicted"), 4.0, 51_200.0),
    )


def test_figures_of_a_block() -> None:
    figures = figures_of(block("kv", predicted=200), SETTING)
    assert figures["requests_per_s"] == 1.0
    assert figures["tokens_per_s"] == 3.0
    assert figures["first_token_ms_p50"] == figures["first_token_ms_p99"] == 500.0
    assert figures["between_tokens_ms_p50"] == pytest.approx(30.0)
    assert figures["cached_realised"] == 30.0
    assert figures["cached_predicted"] == 20.0
    assert figures["cached_possible"] == 40.0
    assert figures["encoder_runs_per_picture"] == 1.5
    assert figures["processor_runs_per_picture"] == 2.0
    assert figures["moved_kb_per_request"] == 5.0
    assert figures["engines_busy"] == 0.25
    assert figures["frontend_ms_per_request"] == pytest.approx(30.0)
    assert figures["engine_us_per_token"] == pytest.approx(20_000.0)
    assert figures["api_server_us_per_token"] is None


@pytest.mark.parametrize(
    ("first", "gaps", "good"),
    [
        (0.5, (0.05, 0.14), 1.0),  # on average
        (0.5, (0.05, 0.16), 0.0),
        (1.1, (0.05,), 0.0),
        (0.5, (), 1.0),  # one token has nothing between
    ],
)
def test_goodput_is_under_both_limits(first: float, gaps: tuple[float, ...], good: float) -> None:
    one = block("kv")
    of = Block("kv", 0, 1.0, [answer(first, *gaps)], WORK, one.engines, {}, Counters())
    assert figures_of(of, SETTING)["goodput_per_s"] == good


def test_the_bound_is_work_done_once_by_engines_that_share_it_equally() -> None:
    # 600 tokens and 2 pictures of 100, once; 40 tokens in steps of 2 clients each.
    assert bound_seconds(WORK, GPU, engines=2, clients=4) == pytest.approx(
        (0.06 + 0.04 + 20 * 0.01) / 2
    )
    assert bound_seconds(WORK, GPU, engines=2, clients=1) == pytest.approx((0.1 + 40 * 0.01) / 2)
    figures = figures_of(block("kv"), SETTING)
    assert figures["bound_per_s"] == pytest.approx(10 / 0.15)
    assert figures["of_bound"] == pytest.approx(0.015)
    opened = Setting(ENGINES, Open(3.0), LIMITS)
    assert figures_of(block("kv"), opened)["bound_per_s"] is None


def test_a_round_counts_if_all_its_engines_kept_time() -> None:
    blocks = [
        block("kv", 0), block("round-robin", 0, late=0.26),
        block("kv", 1), block("round-robin", 1, late=0.24),
        block("kv", 2), block("round-robin", 2),
    ]  # fmt: skip
    verdict = judge("text@4", blocks, SETTING)
    assert not verdict.refused
    assert len(verdict.rounds) == 2
    assert verdict.column("round-robin", "engines_late") == [0.048, 0.0]


def test_a_race_is_refused_whose_engines_came_late() -> None:
    blocks = [block("kv", 0), block("kv", 1, late=0.3), block("kv", 2, late=0.5)]
    verdict = judge("text@4", blocks, SETTING)
    assert not verdict.rounds
    assert verdict.refused == (
        "in 2 of 3 rounds engines came late by more than 5% of their work, 10.0% at most: "
        "the machine was too busy"
    )
    assert judge("text@4", [], SETTING).refused == "no round was finished"


def test_a_round_that_was_interrupted_does_not_count() -> None:
    blocks = [block("kv", 0), block("round-robin", 0), block("round-robin", 1)]
    assert len(judge("text@4", blocks, SETTING).rounds) == 1


def raced(load: str, seconds: float = 8.0, **of: float) -> Verdict:
    """Three rounds of ours in so many seconds, and of round-robin in ten."""
    blocks = [
        each
        for number in range(3)
        for each in (block("kv", number, seconds, **of), block("round-robin", number))
    ]
    return judge(load, blocks, SETTING)


def test_ratios_are_of_the_same_round() -> None:
    seconds = [(2.0, 1.0), (20.0, 10.0), (200.0, 100.0)]
    blocks = [
        each
        for number, (mine, theirs) in enumerate(seconds)
        for each in (block("kv", number, mine), block("round-robin", number, theirs))
    ]
    verdict = judge("text@4", blocks, SETTING)
    assert verdict.ratio("kv", "round-robin", "requests_per_s") == pytest.approx(0.5)
    assert verdict.ratio("kv", "nobody", "requests_per_s") is None


def test_the_last_line_has_what_was_measured_and_why_the_rest_was_not() -> None:
    line = headline(
        [raced("text@4", seconds=12.5), raced("pictures-2@4"), raced("pictures-4@4", first=0.25)],
        {"vllm-router": "BENCH_VLLM_ROUTER does not name its program"},
        {"kv": 0},
    )
    assert json.loads(json.dumps(line)) == line
    assert line["kv_vs_rr_throughput"] == 1.25
    assert line["kv_vs_rr_ttft_p50"] == 0.5
    assert line["worst_vs_rr_throughput"] == 0.8
    loads = line["loads"]
    assert isinstance(loads, dict)
    assert loads["kv_vs_rr_throughput"] == "pictures-4@4"
    assert loads["worst_vs_rr_throughput"] == "text@4"
    reasons = line["reasons"]
    assert isinstance(reasons, dict)
    for name in ("vs_dp_throughput", "vs_router_throughput", "frontend_us_per_token",
                 "vs_dynamo_throughput"):  # fmt: skip
        assert line[name] is None
        assert reasons[name]
    assert line["missing"] == {"vllm-router": "BENCH_VLLM_ROUTER does not name its program"}


def test_the_last_line_is_over_the_best_rival_and_rates_show_the_first_token() -> None:
    def of(load: str, first: float) -> Verdict:
        blocks = [
            block("kv", first=first),
            block("vllm-router", seconds=20.0, first=0.5),
            block("vllm-router-round-robin", seconds=12.0, first=0.4),
        ]
        return judge(load, blocks, SETTING)

    line = headline([of("pictures-4@4", 0.8), of("pictures-4@2/s", 0.2)], {}, {})
    assert line["vs_router_throughput"] == 1.2
    assert line["vs_router_ttft_p50"] == 0.5
    loads = line["loads"]
    assert isinstance(loads, dict)
    assert loads["vs_router_throughput"] == "pictures-4@4"
    assert loads["vs_router_ttft_p50"] == "pictures-4@2/s"


def test_the_reason_names_who_is_missing_and_what_was_refused() -> None:
    missing = {"dynamo": "BENCH_DYNAMO_PYTHON does not name its program"}
    reasons = headline([Verdict("text@4", (), "too busy")], missing, {})["reasons"]
    assert isinstance(reasons, dict)
    assert reasons["frontend_cpu_vs_dynamo"] == (
        "dynamo did not race: BENCH_DYNAMO_PYTHON does not name its program"
    )
    assert reasons["text_vs_router_ttft_p50"] == "text@4 was refused: too busy"
    assert reasons["api_server_us_per_token"] == ("no race of data-parallel with a load streams@…")


def test_a_refused_race_gives_no_figure() -> None:
    line = headline([Verdict("pictures-4@4", (), "too busy")], {}, {})
    assert line["kv_vs_rr_throughput"] is None
    assert line["worst_vs_rr_throughput"] is None
    assert line["refused"] == {"pictures-4@4": "too busy"}


def test_the_table_has_each_contender_or_says_why_there_is_none() -> None:
    lines = table(raced("text@4"), ["kv", "round-robin"]).splitlines()
    assert lines[0] == "text@4: medians of 3 rounds (least to most)"
    assert lines[1].split() == ["kv", "round-robin"]
    (rate,) = (line for line in lines if line.startswith("  requests/s"))
    assert rate.split()[1:] == ["1.25", "(1.25", "to", "1.25)", "1", "(1", "to", "1)"]
    assert table(Verdict("text@4", (), "too busy"), ["kv"]) == "text@4: refused: too busy"


@dataclass
class FakeRace:
    load: Load
    blocks: list[Block]

    @property
    def setting(self) -> Setting:
        return Setting(ENGINES, self.load.pace, LIMITS)


@dataclass
class FakeGroup:
    races: list[FakeRace]
    memory: dict[str, dict[Role, float]]


def test_the_csv_has_a_row_for_each_block_with_machine_and_versions() -> None:
    file = io.StringIO()
    blocks = [block("kv"), block("kv", 1, late=1.0)]
    memory = {"kv": {Role.FRONTEND: 300.0}}
    groups = [
        FakeGroup([FakeRace(load("text@4"), blocks)], memory),
        FakeGroup([FakeRace(load("text@3/s"), blocks)], memory),
    ]
    write_csv(file, groups, {"kv": {"some-router": "1.0"}})
    rows = list(csv.DictReader(io.StringIO(file.getvalue())))
    assert [(row["group"], row["load"], row["round"], row["valid"]) for row in rows] == [
        ("0", "text@4", "0", "1"),
        ("0", "text@4", "1", "0"),
        ("1", "text@3/s", "0", "1"),
        ("1", "text@3/s", "1", "0"),
    ]
    assert all(row["memory_gb"] and row["date"] for row in rows)
    assert all(row["cpu"] and row["cores"] and row["vllm"] and row["mmrouter"] for row in rows)
    assert rows[0]["requests_per_s"] == "1.0"
    assert rows[0]["worker_ms_per_request"] == "", "nobody measured it"
    assert rows[0]["of_bound"] and not rows[2]["of_bound"]
    assert {row["versions"] for row in rows} == {"some-router 1.0"}
    assert {(row["frontend_mb"], row["router_mb"]) for row in rows} == {("300.0", "")}
    assert {(row["engines"], row["speed"]) for row in rows} == {("2", "1.0")}
