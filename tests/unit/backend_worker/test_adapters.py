"""A worker's adapters: how they are given, loaded and asked for. No engine."""

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.lora.request import LoRARequest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from backend_worker.adapters import Adapters, read_adapter
from backend_worker.args import parse
from common.card import Adapter
from common.errors import ConfigurationError, RequestRejectedError

STORY, POEM = Adapter(name="story", path="/s"), Adapter(name="poem", path="org/poem")


@pytest.mark.parametrize(
    "given",
    [
        ["story=/s", "poem=org/poem"],
        ["a=b=c"],
        ['{"name": "story", "path": "/s", "base_model_name": "m"}', "x=/y"],
        ['{"name": "moe", "path": "/m", "is_3d_lora_weight": true}'],
    ],
)
def test_they_are_given_as_to_vllms_server(given: list[str]) -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    theirs = parser.parse_args(["--model=m", "--lora-modules", *given]).lora_modules
    for adapter, module in zip(map(read_adapter, given), theirs, strict=True):
        assert SimpleNamespace(**adapter.model_dump()) == SimpleNamespace(**vars(module))


@pytest.mark.parametrize("text", ["", "story", "=", "a=", "=b", "{", "[]", '{"name": "a"}', "\n=b"])
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="name=path"):
        read_adapter(text)


def test_the_command_line_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    args = parse(["--model=m", "--enable-lora", "--lora-modules", "one=here", "two=org/two"])
    paths = [adapter.path for adapter in args.adapters.known]
    assert paths == [str(tmp_path / "here"), "org/two"], "frontends hash the path too"
    assert not parse(["--model=m"]).adapters.known
    with pytest.raises(SystemExit):
        parse(["--model=m", "--lora-modules", "nothing"])
    assert "nothing is neither name=path nor JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("known", "enabled", "said"),
    [
        ([STORY], False, "needs --enable-lora"),
        ([STORY, POEM, STORY], True, "the same name"),
        ([Adapter(name="demo", path="/d")], True, "demo is the name of the model"),
    ],
)
def test_what_can_t_be_served_is_refused(known: list[Adapter], enabled: bool, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Adapters(known).check(enabled=enabled, taken=["demo"])
    Adapters().check(enabled=False, taken=["demo"])
    Adapters([STORY, POEM]).check(enabled=True, taken=["demo"])


async def test_all_are_loaded_and_a_failure_is_a_sentence() -> None:
    loaded: list[LoRARequest] = []

    async def add(request: LoRARequest) -> bool:
        if request.lora_name == "poem":
            raise ValueError("no such file")
        loaded.append(request)
        return True

    await Adapters([STORY]).load(add)
    assert [(one.lora_name, one.lora_path, one.lora_int_id) for one in loaded] == [
        ("story", "/s", 1)
    ]
    with pytest.raises(ConfigurationError, match="adapter poem can't be loaded: no such file"):
        await Adapters([STORY, POEM]).load(add)


def test_a_request_gets_the_workers_own_whatever_it_says() -> None:
    adapters = Adapters([STORY, POEM])
    own = adapters.named(LoRARequest("poem", 77, "org/poem", load_inplace=True))
    assert own is not None
    assert (own.lora_int_id, own.load_inplace) == (2, False)
    assert adapters.named(None) is None
    for name, path in (("other", "/s"), ("story", "/etc")):
        with pytest.raises(RequestRejectedError, match="no such adapter"):
            adapters.named(LoRARequest(name, 1, path))
