"""The public face of muonfx, read from the sources: what the documentation must show and its checks must find.

A module is public when it is the package itself, a folder directly under it, or a file that the `__all__` of one of
these names; its symbols are what its own `__all__` names. One that several lists name is shown once, by its first path.
"""

from dataclasses import dataclass
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parent.parent

# The rooms in reading order, with their page's title. A room that is missing here still gets a page, at the end.
TITLES = {
    "core": "Transforms and chains",
    "partition": "Partitions and masks",
    "transforms": "Transforms by family",
    "compact": "State in eight bits",
    "attention": "Attention logits",
    "recipes": "Recipes",
    "variants": "Variants of Muon",
    "optimizer": "torch.optim optimizer",
    "hyperparams": "Hyperparameters",
    "select": "Routing",
    "schedules": "Schedules",
    "tree": "Trees",
    "recorded": "Recorded values",
    "checks": "Checks",
    "elementwise": "Elementwise arithmetic",
    "polar": "Polar factor",
    "sharding": "Sharding",
    "checkpoint": "Checkpoints",
    "engines": "Engines",
    "testing": "Testing",
}


@dataclass(frozen=True)
class Symbol:
    """A public name: the path by which a user reaches it, and the object it stands for."""

    path: str
    object: griffe.Object

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def module(self) -> str:
        """The path of the module that defines it."""
        return self.object.module.path

    @property
    def room(self) -> str:
        """The file or folder directly under muonfx/ that defines it."""
        return [*self.module.split("."), "muonfx"][1]

    @property
    def summary(self) -> str:
        """The docstring's first line."""
        return self.object.docstring.value.splitlines()[0] if self.object.docstring else ""


def load() -> griffe.Module:
    """Read the package without importing it."""
    package = griffe.load("muonfx", search_paths=[str(ROOT)], docstring_parser="google", resolve_aliases=True)
    assert isinstance(package, griffe.Module)
    return package


def resolve(module: griffe.Module, name: str) -> griffe.Object:
    """What a name means in a module once it is imported.

    Where a module imports a function that is called like one of its own files (`partition` from `partition.py`), Python
    binds the function and griffe reports the file; the imports tell.
    """
    target = module.imports.get(name)
    if target is None or target == f"{module.path}.{name}":
        member = module.members[name]
        found = member.final_target if isinstance(member, griffe.Alias) else member
        assert isinstance(found, griffe.Object)
        return found
    parent, _, name = target.rpartition(".")
    home = module.package
    for part in parent.split(".")[1:]:
        home = home.modules[part]
    return resolve(home, name)


def public_modules(package: griffe.Module) -> list[griffe.Module]:
    """The package itself, its folders, and the files that their `__all__` name."""
    folders = [module for module in package.modules.values() if not module.is_alias and module.is_subpackage]
    found = [package, *(folder for folder in folders if not folder.name.startswith("_"))]
    for face in tuple(found):
        named = [resolve(face, name) for name in map(str, face.exports or [])]
        found += [member for member in named if isinstance(member, griffe.Module) and member not in found]
    return found


def symbols(package: griffe.Module) -> list[Symbol]:
    """Every public symbol once, in the order in which the lists name them."""
    found: dict[str, Symbol] = {}
    for module in public_modules(package):
        for name in map(str, module.exports or []):
            target = resolve(module, name)
            if not name.startswith("_") and not isinstance(target, griffe.Module):
                found.setdefault(target.path, Symbol(f"{module.path}.{name}", target))
    return list(found.values())


def rooms(package: griffe.Module) -> dict[str, list[Symbol]]:
    """The symbols by the room that defines them, rooms in reading order."""
    found: dict[str, list[Symbol]] = {room: [] for room in TITLES}
    for symbol in symbols(package):
        found.setdefault(symbol.room, []).append(symbol)
    return {room: members for room, members in found.items() if members}


def _directive(path: str, **options: object) -> list[str]:
    return [f"::: {path}", "    options:", *(f"      {name}: {value}" for name, value in options.items()), ""]


def _module_text(path: str) -> list[str]:
    return _directive(path, members="false", show_root_heading="false", show_root_toc_entry="false")


def pages() -> dict[str, tuple[str, str]]:
    """The pages of the API reference: file name to (title, Markdown), the index first."""
    package = load()
    index = ["# API reference", "", "Every public name, by its room. `mfx` stands for `import muonfx as mfx`.", ""]
    found = {"api/index.md": ("Overview", "")}
    for room, members in rooms(package).items():
        title = TITLES.get(room, room.capitalize())
        page = [f"# {title}", ""]
        if room != "muonfx":
            page += _module_text(f"muonfx.{room}")
        index += [f"## [{title}]({room}.md)", "", "| name | what it is |", "| --- | --- |"]
        home = f"muonfx.{room}"
        for symbol in sorted(members, key=lambda symbol: symbol.module):  # within a module, the order of `__all__`
            families = room == "transforms"
            if families and symbol.module != home:
                home = symbol.module
                family = home.rpartition(".")[2].strip("_").replace("_", " ").capitalize()
                page += [f"## {family}", "", *_module_text(home)]
            shown = symbol.path.replace("muonfx.", "mfx.", 1)
            page += _directive(
                symbol.object.path, heading=shown, toc_label=symbol.name, heading_level=3 if families else 2
            )
            index.append(f"| [`{shown}`][{symbol.object.path}] | {symbol.summary.replace('|', chr(92) + '|')} |")
        index.append("")
        found[f"api/{room}.md"] = (title, "\n".join(page))
    found["api/index.md"] = ("Overview", "\n".join(index))
    return found
