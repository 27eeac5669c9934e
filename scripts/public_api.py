"""The public names of muonfx, found by importing it. The documentation and its tests use this list.

A module is public if it is the package itself, a folder directly under it, or a file in the `__all__` of one of these.
The symbols of a module are the names in its `__all__`. A symbol in several lists is documented once, at its first path.
"""

import ast
import functools
import importlib
import inspect
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from sphinx.pycode import ModuleAnalyzer

import muonfx

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Symbol:
    """A public name: the path for users, the module that defines it, and the object."""

    path: str
    module: str
    object: Any

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def face(self) -> str:
        """Public module whose `__all__` contains it."""
        return self.path.rpartition(".")[0]

    @property
    def is_data(self) -> bool:
        """True for a value or a type alias, which is documented by the string below its assignment."""
        return self.object is Any or not (
            inspect.isclass(self.object) or inspect.isroutine(self.object)
        )

    @property
    def docstring(self) -> str:
        """Docstring, or the string below the assignment of a value; empty if there is none."""
        if self.is_data:
            lines = ModuleAnalyzer.for_module(self.module).find_attr_docs().get(("", self.name), [])
            return "\n".join(lines).strip()
        return inspect.cleandoc(self.object.__doc__ or "")

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return self.docstring.partition("\n")[0]

    @property
    def line(self) -> int:
        """First line of its definition."""
        if self.is_data:
            return next(node.lineno for node in _assignments(self.module, self.name))
        return inspect.getsourcelines(inspect.unwrap(self.object))[1]

    @property
    def assigned(self) -> str:
        """Right-hand side of the assignment of a value or an alias, in one line."""
        return ast.unparse(
            next(node.value for node in _assignments(self.module, self.name) if node.value)
        )


@functools.cache
def _syntax(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def _assignments(module: str, name: str) -> list[ast.Assign | ast.AnnAssign]:
    """Return the top-level statements of a module that assign to a name."""
    found: list[ast.Assign | ast.AnnAssign] = []
    for node in _syntax(module).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and any(
            getattr(t, "id", None) == name for t in targets
        ):
            found.append(node)
    return found


def _home(module: str, name: str) -> str:
    """Return the module that assigns a value, found by following imports."""
    for node in _syntax(module).body:
        if isinstance(node, ast.ImportFrom) and any(
            (alias.asname or alias.name) == name for alias in node.names
        ):
            assert node.module, f"{module} imports {name} relatively"
            return _home(node.module, name)
    return module


def public_modules() -> list[ModuleType]:
    """Return the package, its folders (those in its `__all__` first), and the files in their `__all__`."""
    folders = [
        info.name
        for info in pkgutil.iter_modules(muonfx.__path__)
        if info.ispkg and info.name[0] != "_"
    ]
    folders.sort(key=lambda name: name not in muonfx.__all__)
    found: list[ModuleType] = [
        muonfx,
        *(importlib.import_module(f"muonfx.{name}") for name in folders),
    ]
    for face in tuple(found):
        for name in getattr(face, "__all__", ()):
            member = getattr(face, name)
            if isinstance(member, ModuleType) and member not in found:
                found.append(member)
    return found


@functools.cache
def symbols() -> tuple[Symbol, ...]:
    """Return every public symbol once, in the order of the lists."""
    found: dict[str, Symbol] = {}
    for face in public_modules():
        for name in getattr(face, "__all__", ()):
            member = getattr(face, name)
            if name.startswith("_") or isinstance(member, ModuleType):
                continue
            symbol = Symbol(
                f"{face.__name__}.{name}", getattr(member, "__module__", face.__name__), member
            )
            if symbol.is_data:
                symbol = Symbol(symbol.path, _home(face.__name__, name), member)
            found.setdefault(f"{symbol.module}.{name}", symbol)
    return tuple(found.values())


def symbols_of(*modules: str) -> list[Symbol]:
    """Return the public symbols of modules and their submodules, in the order of the source, states last.

    Raises:
        LookupError: a module defines no public name.
    """
    found: list[Symbol] = []
    for module in modules:
        own = [s for s in symbols() if (s.module + ".").startswith(module + ".") and s not in found]
        if not own:
            raise LookupError(
                f"found no public name in {module}, expected one: add it to the `__all__` of a public module"
            )
        found += sorted(
            own, key=lambda symbol: (symbol.module, symbol.name.endswith("State"), symbol.line)
        )
    return found
