"""Each flag has a twin in the environment; the flag wins; nonsense is refused by name."""

import argparse

import pytest

from common.errors import ConfigurationError
from frontend.router.modes import BuiltInMode
from frontend.router.settings import RouterSettings


def parse(*argv: str, **environ: str) -> RouterSettings:
    parser = argparse.ArgumentParser()
    RouterSettings.add_arguments(parser)
    return RouterSettings.from_args(parser.parse_args(argv), environ)


def test_defaults() -> None:
    assert parse() == RouterSettings()


def test_flags_win_over_the_environment() -> None:
    settings = parse(
        "--router-mode", "round-robin", MMROUTER_ROUTER_MODE="kv", MMROUTER_ROUTER_STALL="7"
    )
    assert settings.mode == BuiltInMode.ROUND_ROBIN
    assert settings.stall_s == 7


def test_units_are_left_out_of_names() -> None:
    assert RouterSettings.flag("eject_base_s") == "--router-eject-base"
    assert RouterSettings.variable("eject_base_s") == "MMROUTER_ROUTER_EJECT_BASE"
    assert parse("--router-eject-base", "2.5").eject_base_s == 2.5
    assert parse(MMROUTER_ROUTER_EJECT_BASE="3").eject_base_s == 3.0


def test_every_field_can_be_set_from_the_environment() -> None:
    for name, field in RouterSettings.model_fields.items():
        value = {"mode": "kv"}.get(name, "1")
        settings = parse(**{RouterSettings.variable(name): value})
        assert str(getattr(settings, name)) in {value, "1.0", "True"}, field


@pytest.mark.parametrize(
    ("argv", "environ", "where"),
    [
        (["--router-busy-blocks-fraction", "-1"], {}, "--router-busy-blocks-fraction='-1'"),
        (["--router-stall", "nan"], {}, "--router-stall='nan'"),
        ([], {"MMROUTER_ROUTER_MODE": "magic"}, "MMROUTER_ROUTER_MODE='magic'"),
        ([], {"MMROUTER_ROUTER_EJECT_BASE": "long"}, "MMROUTER_ROUTER_EJECT_BASE='long'"),
    ],
)
def test_unusable_values_are_named(argv: list[str], environ: dict[str, str], where: str) -> None:
    with pytest.raises(ConfigurationError, match="is unusable") as caught:
        parse(*argv, **environ)
    assert str(caught.value).startswith(where)


def test_help_names_default_and_twin(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "(default kv; MMROUTER_ROUTER_MODE)" in text
