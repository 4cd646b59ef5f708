"""What is said of a model's files, before anything is loaded."""

from pathlib import Path

import pytest

from common.vllm_compat.preflight import fault_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "my-model"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "qwen2_vl"}')
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "tokenizer.json").write_text("{}")
    return directory


def fault(model: Path | str, *given: str) -> str:
    found = fault_of(str(model), given)
    assert found is not None
    return found


def test_a_whole_model_has_no_fault(model: Path) -> None:
    assert fault_of(str(model)) is None


def test_a_directory_that_is_not_there(model: Path) -> None:
    assert fault(f"{model}s") == f"there is no directory {model}s; did you mean {model}?"
    assert fault("/no/such") == "there is no directory /no/such"
    assert "write $HOME" in fault("~/my-model")
    assert "is empty" in fault(" ")
    assert "name the directory" in fault(model / "config.json")


def test_a_directory_without_a_configuration(model: Path) -> None:
    (model / "config.json").unlink()
    assert "has no config.json, so it holds no model" in fault(model)
    assert fault_of(str(model), ["hf_config_path"]) is None
    (model / "params.json").write_text("{}")
    assert fault_of(str(model)) is None


def test_the_model_that_was_meant_is_named(model: Path) -> None:
    assert fault(model.parent).endswith(f"; did you mean {model}?")
    cached = model.parent / "models--org--name" / "snapshots"
    cached.mkdir(parents=True)
    moved = model.rename(cached / "abc")
    assert fault(cached.parent).endswith(f"; did you mean {moved}?")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"model_type": ', "config.json is no JSON"),
        ("[]", "names no architecture"),
        ('{"bos_token_id": 1}', "names no architecture"),
    ],
)
def test_a_broken_configuration(model: Path, content: str, sentence: str) -> None:
    (model / "config.json").write_text(content)
    assert sentence in fault(model)


def test_no_weights(model: Path) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid x\n")
    assert "run `git lfs pull`" in fault(model)
    (model / "model.safetensors").unlink()
    assert "has no weights" in fault(model)
    assert fault_of(str(model), ["load_format"]) is None


def test_no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "has no tokenizer" in fault(model)
    assert fault_of(str(model), ["tokenizer"]) is None


def test_a_name_is_left_to_the_hub() -> None:
    assert fault_of("org/gone") is None
    assert fault_of("s3://bucket/gone") is None
