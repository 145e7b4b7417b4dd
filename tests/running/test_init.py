from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nni_petridish.__main__ import COMMANDS, FIRST_STEPS, _parser, main
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.schema_command import FILE


def write_images(root: Path, parts: tuple[str, ...] = ("train", "val")) -> Path:
    for part in parts:
        for name in ("cat", "dog"):
            (root / part / name).mkdir(parents=True)
            for i in range(30):
                pixels = np.full((32, 32, 3), i, np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{i}.png")
    return root


def write_text(root: Path) -> Path:
    root.mkdir()
    for part in ("train", "valid", "test"):
        (root / f"{part}.txt").write_text("one two three four\n" * 50)
    return root


def write_npz(path: Path) -> Path:
    np.savez(path, x=np.zeros((700, 28, 28), np.uint8), y=np.arange(700) % 7)
    return path


def write_signals(path: Path) -> Path:
    np.savez(path, x=np.zeros((700, 1, 40), np.uint8), y=np.arange(700) % 7)
    return path


def write_csv(path: Path) -> Path:
    rows = [f"{i % 7},{i},{'red' if i % 3 else 'blue'},{i % 2}" for i in range(60)]
    path.write_text("\n".join(["a,b,color,class", *rows]))
    return path


@pytest.mark.parametrize("form", ["images", "text", "npz", "signals", "csv", "digits", "pydoc"])
def test_init_writes_a_valid_commented_configuration(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = {
        "images": lambda: write_images(tmp_path / "mine"),
        "text": lambda: write_text(tmp_path / "mine"),
        "npz": lambda: write_npz(tmp_path / "mine.npz"),
        "signals": lambda: write_signals(tmp_path / "mine.npz"),
        "csv": lambda: write_csv(tmp_path / "mine.csv"),
    }
    source = made[form]() if form in made else form
    assert main(["init", str(source)]) == 0
    assert "nni-petridish search petridish.yml" in capsys.readouterr().out
    config = SearchConfig.from_yaml("petridish.yml")
    assert config.settings.limits.max_models is not None
    text = Path("petridish.yml").read_text()
    assert text.count("#") > 15
    if form in made:
        assert f"root: {Path(source).name}" in text
    if form == "images":
        assert config.data["image_size"] == 32
        assert config.data["validation"] == 12
        assert config.data["workers"] == 0
    assert main(["init", str(source)]) == 2
    assert "not overwritten" in capsys.readouterr().err


def test_init_says_in_one_line_what_it_cannot_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "bare", ("",))
    write_images(tmp_path / "half", ("train",))
    (tmp_path / "one.txt").write_text("words")
    for path in sorted(write_images(tmp_path / "few").rglob("train/*/*.png"))[:-5]:
        path.unlink()
    for source, said in (
        ("table.csv", "is no data"),
        ("table.xlsx", "must be a file of comma-separated values"),
        ("nowhere", "is no data"),
        (".", "neither images nor texts"),
        ("bare", "the test set, to bare/val/CLASS"),
        ("half", "half/val must hold one folder"),
        ("few", "few must have at least 12 training images but has 5"),
        ("one.txt", "train.txt, valid.txt and test.txt"),
        ("missing.npz", "missing.npz must be an .npz file"),
        ("cifar10", "get it with"),
    ):
        assert main(["init", source]) == 2, source
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert said in error
    assert not Path("petridish.yml").exists()


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(FILE.read_text())


def test_completion_knows_commands_and_options(tmp_path: Path) -> None:
    script = subprocess.run(
        [sys.executable, "-m", "nni_petridish", "completion", "bash"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (tmp_path / "script").write_text(script)
    subprocess.run(["bash", "-n", str(tmp_path / "script")], check=True)
    assert "--resume" in script
    assert "export" in script


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nni_petridish", "init", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "look at your data and write a configuration" in done.stdout
    assert "nni-petridish init my_images" in done.stdout


def test_every_command_has_examples_that_parse() -> None:
    parser = _parser()
    (commands,) = (a for a in parser._actions if a.dest == "==SUPPRESS==")
    assert commands.choices is not None
    assert set(commands.choices) == set(COMMANDS)
    for name in commands.choices:
        for example in COMMANDS[name].examples:
            if name == "completion":
                continue
            program, *arguments = shlex.split(example.partition(" >")[0])
            assert (program, arguments[0]) == ("nni-petridish", name)
            if "--help" not in arguments:
                parser.parse_args(arguments)


def test_a_user_without_a_command_is_shown_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr().err
    assert all(f"    {name} " in said for name in COMMANDS if len(name) < 8)
    for step in FIRST_STEPS:
        assert step in said
        program, *arguments = shlex.split(step.partition("#")[0])
        assert program == "nni-petridish"
        _parser().parse_args(arguments)


@pytest.mark.parametrize(("wrong", "said"), [("serch", "is it search?"), ("zzz", "invalid choice")])
def test_a_mistyped_command_is_guessed(
    wrong: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([wrong])
    assert said in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "nni_petridish", "schema"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before Python itself has started
        assert process.stderr.read() == b""
    assert process.returncode == 141
