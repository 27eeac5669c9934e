"""The commands: ``python -m muonfx`` and ``python -m muonfx.testing``."""

import subprocess
import sys

import pytest

from muonfx import __main__ as commands
from muonfx.testing.__main__ import main


def test_every_listed_command_prints_its_help(capsys: pytest.CaptureFixture[str]):
    commands.main()
    listed = capsys.readouterr().out
    for command in commands.COMMANDS:
        assert command in listed
        words = [sys.executable, *command.split()[1:], "--help"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert f"usage: {command}" in done.stdout


def test_a_class_is_checked_with_all_parameters(capsys: pytest.CaptureFixture[str]):
    assert main(["torch.optim:RMSprop", "--laws", "frozen_parameters_stay"]) == 0
    assert capsys.readouterr().out.startswith("RMSprop: 1 of 1 laws hold")


def test_a_law_that_does_not_hold_gives_exit_code_1(capsys: pytest.CaptureFixture[str]):
    assert (
        main(
            [
                "torch.optim:Adafactor",
                "--laws",
                "autocast_changes_nothing",
                "frozen_parameters_stay",
            ]
        )
        == 1
    )
    assert "autocast_changes_nothing  does not hold" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("torch.optim", "expected module:name"),
        ("torch.optim:", "expected module:name"),
        ("torch.optim:Adamm", "no attribute 'Adamm'"),
        ("no_such:A", "no_such"),
    ],
)
def test_a_name_that_cannot_be_imported_gives_exit_code_2(
    name: str, text: str, capsys: pytest.CaptureFixture[str]
):
    assert main([name]) == 2
    assert text in capsys.readouterr().err
