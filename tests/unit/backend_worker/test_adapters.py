"""A worker's adapters: how they are given, loaded and asked for. No engine."""

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.lora.request import LoRARequest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from backend_worker.args import parse
from backend_worker.engine.adapters import (
    MAX_FORMER,
    Adapters,
    check_files,
    read_adapter,
)
from common.errors import (
    ConfigurationError,
    OperationRefusedError,
    RequestRejectedError,
    WorkerBusyError,
)
from common.request_plane.card import MAX_ADAPTERS, Adapter
from common.request_plane.operations import LoadLoraAdapter, UnloadLoraAdapter
from common.vllm_compat.features import server_arguments

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
    parser = server_arguments().make_arg_parser(FlexibleArgumentParser())
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


class Loader:
    """Stands for the engine's loading."""

    def __init__(self) -> None:
        self.asked: list[LoRARequest] = []
        self.inplace: list[bool] = []
        self.answer: bool | Exception = True

    async def __call__(self, request: LoRARequest) -> bool:
        self.asked.append(request)
        self.inplace.append(request.load_inplace)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def asked_for(adapters: Adapters, name: str, path: str) -> LoRARequest | None:
    return adapters.named(LoRARequest(lora_name=name, lora_int_id=77, lora_path=path))


async def test_they_come_and_go_while_it_serves(tmp_path: Path) -> None:
    adapters, loader = Adapters([STORY]), Loader()
    await adapters.add(LoadLoraAdapter("poem", str(tmp_path)), loader, ["demo"])
    assert [each.name for each in adapters.known] == ["story", "poem"] and adapters.changes == 1
    own = asked_for(adapters, "poem", str(tmp_path))
    assert own is loader.asked[0] and own.lora_int_id == 2
    for refused in (LoadLoraAdapter("poem", "/p"), LoadLoraAdapter("demo", "/p")):
        with pytest.raises(OperationRefusedError):
            await adapters.add(refused, loader, ["demo"])
    await adapters.add(LoadLoraAdapter("poem", "/new", load_inplace=True), loader, ["demo"])
    assert loader.inplace == [False, True]
    again = asked_for(adapters, "poem", "/new")
    assert again is not None and again.lora_int_id == 2 and not again.load_inplace
    adapters.forget(UnloadLoraAdapter("poem"))
    assert adapters.known == (STORY,) and adapters.changes == 3
    with pytest.raises(OperationRefusedError, match="no adapter 'poem'"):
        adapters.forget(UnloadLoraAdapter("poem"))
    # What comes under its name later is another one to the engine.
    await adapters.add(LoadLoraAdapter("poem", "/later"), loader, ["demo"])
    assert loader.asked[-1].lora_int_id > 2


@pytest.mark.parametrize("answer", [False, ValueError("no such file")])
async def test_what_can_not_be_loaded_changes_nothing(answer: bool | Exception) -> None:
    adapters, loader = Adapters([STORY]), Loader()
    loader.answer = answer
    with pytest.raises((RuntimeError, ValueError)):
        await adapters.add(LoadLoraAdapter("poem", "/p"), loader, ["demo"])
    assert adapters.known == (STORY,) and not adapters.changes and not adapters.active


@pytest.mark.parametrize(
    "wanted",
    [LoadLoraAdapter("a\nb", "/p"), LoadLoraAdapter("a", "/p\x00"), LoadLoraAdapter("a", "")],
)
async def test_names_and_paths_that_are_none(wanted: LoadLoraAdapter) -> None:
    loader = Loader()
    with pytest.raises(OperationRefusedError):
        await Adapters().add(wanted, loader, [])
    assert not loader.asked


async def test_there_may_be_so_many() -> None:
    adapters, loader = Adapters(), Loader()
    for number in range(MAX_ADAPTERS):
        await adapters.add(LoadLoraAdapter(f"a{number}", "/p"), loader, [])
    with pytest.raises(OperationRefusedError, match="already"):
        await adapters.add(LoadLoraAdapter("one-more", "/p"), loader, [])


def test_those_that_were_used_last_are_active() -> None:
    adapters = Adapters([STORY, POEM, Adapter(name="ode", path="/o")])
    adapters.slots = 2
    for name, path in (("story", "/s"), ("poem", "org/poem"), ("story", "/s"), ("ode", "/o")):
        asked_for(adapters, name, path)
    assert list(adapters.active) == ["story", "ode"]
    adapters.forget(UnloadLoraAdapter("ode"))
    assert list(adapters.active) == ["story"]


async def test_requests_that_were_sent_before_an_adapter_went_are_answered() -> None:
    """As by vLLM, where a request that was taken keeps its adapter. Frontends hear a moment later
    that it goes, and this worker would have to refuse what others would take.
    """
    adapters, loader = Adapters(), Loader()
    adapters.slots = 4
    await adapters.add(LoadLoraAdapter("poem", "/old"), loader, [])
    before = asked_for(adapters, "poem", "/old")
    await adapters.add(LoadLoraAdapter("poem", "/new", load_inplace=True), loader, [])
    now = asked_for(adapters, "poem", "/new")
    assert asked_for(adapters, "poem", "/old") is now is not before, "the engine has no other"
    adapters.forget(UnloadLoraAdapter("poem"))
    assert asked_for(adapters, "poem", "/new") is now
    assert not adapters.known and not adapters.active, "and nobody is told of it"
    await adapters.add(LoadLoraAdapter("poem", "/new"), loader, [])
    assert asked_for(adapters, "poem", "/new") is loader.asked[-1] is not now


async def test_not_all_that_ever_were_are_remembered() -> None:
    adapters, loader = Adapters(), Loader()
    for number in range(MAX_FORMER + 1):
        await adapters.add(LoadLoraAdapter(f"a{number}", "/p"), loader, [])
        adapters.forget(UnloadLoraAdapter(f"a{number}"))
    with pytest.raises(RequestRejectedError):
        asked_for(adapters, "a0", "/p")
    assert asked_for(adapters, "a1", "/p")


def test_files_that_are_gone_are_missed_before_the_engine_misses_them(tmp_path: Path) -> None:
    """It would end."""
    there = LoRARequest("poem", 1, str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    check_files(there)
    check_files(LoRARequest("poem", 1, "org/poem"))
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(WorkerBusyError, match="the files of adapter poem are gone"):
        check_files(there)
