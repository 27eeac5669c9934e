"""List the commands of the package: ``python -m muonfx``."""

from __future__ import annotations

COMMANDS = {
    "python -m muonfx.checkpoint": "show, verify and clean checkpoints",
    "python -m muonfx.testing": "check a torch optimizer against the laws that training loops rely on",
}
"""The commands, and what each one does."""


def main() -> None:
    """Print a line for each command."""
    width = max(map(len, COMMANDS))
    print("commands (each has --help):\n")
    for command, description in COMMANDS.items():
        print(f"  {command.ljust(width)}  {description}")


if __name__ == "__main__":
    main()
