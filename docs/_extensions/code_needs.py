"""Below a block of code that uses names of a block above it, a line that says which names, with a link to that block.

Pages are read from top to bottom, and their blocks run in one namespace. A reader who copies a single block sees here
what it needs. `mfx` and `torch` are known to every reader, and are not named.
"""

import ast
import builtins
import doctest
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

from sphinx.application import Sphinx

FENCE = re.compile(
    r"^(?P<indent> *)```(?:python|pycon)[^\n]*\n(?P<text>.*?)^(?P=indent)``` *$",
    re.MULTILINE | re.DOTALL,
)
EVERYWHERE = {*dir(builtins), "__name__", "mfx", "torch"}
WITHOUT_NOTES = ("api/", "decisions/", "notebooks/", "changelog", "index")
"""Pages that have no such lines. The blocks of the home page stand beside each other."""


def parsed(text: str) -> ast.Module:
    """The Python of a block; a session loses its prompts and outputs."""
    if text.lstrip().startswith(">>>"):
        text = "".join(example.source for example in doctest.DocTestParser().get_examples(text))
    return ast.parse(text)


@dataclass
class Names:
    r"""The names that a block reads before it defines them, and those that it defines.

    >>> Names.of("y = x + 1")
    Names(read={'x'}, defined={'y'})
    """

    read: set[str] = field(default_factory=set)
    defined: set[str] = field(default_factory=set)
    called_later: set[str] = field(default_factory=set, repr=False)
    """Names that the bodies of functions read, which the block may define after the function."""

    @classmethod
    def of(cls, text: str) -> "Names":
        """The names of the code of a block."""
        names = cls()
        names._visit_all(parsed(text).body)
        names.read |= names.called_later - names.defined
        return names

    def _visit_all(self, nodes: list[ast.AST] | list[ast.stmt]) -> None:
        for node in nodes:
            self._visit(node)

    def _visit(self, node: ast.AST) -> None:
        """Visit the parts of a node in the order in which Python evaluates them."""
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                self.read |= {node.id} - self.defined - EVERYWHERE
            else:
                self.defined.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self.defined |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            self._visit_definition(node)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            self.read |= self._read_by([*node.generators, *ast.iter_child_nodes(node)], set())
        elif isinstance(node, ast.comprehension):
            self._visit_all([node.iter, node.target, *node.ifs])
        elif isinstance(node, ast.ExceptHandler):
            self.defined |= {node.name} if node.name else set()
            self._visit_all(list(ast.iter_child_nodes(node)))
        elif isinstance(node, ast.For):
            self._visit_all([node.iter, node.target, *node.body, *node.orelse])
        elif isinstance(node, ast.AugAssign):
            self._visit_all(
                [
                    ast.copy_location(ast.parse(ast.unparse(node.target)), node),
                    node.value,
                    node.target,
                ]
            )
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            self._visit_all([*([node.value] if node.value else []), *targets])
        else:
            self._visit_all(list(ast.iter_child_nodes(node)))

    def _visit_definition(self, node: ast.FunctionDef | ast.Lambda | ast.ClassDef) -> None:
        """Visit a function or class: its own names are not names of the block."""
        body: list[ast.AST] = list(node.body) if isinstance(node.body, list) else [node.body]
        outer: list[ast.AST] = []
        arguments: set[str] = set()
        if isinstance(node, ast.ClassDef):
            outer += [*node.bases, *node.keywords, *node.decorator_list]
        else:
            signature = node.args
            outer += [
                *signature.defaults,
                *(default for default in signature.kw_defaults if default),
            ]
            outer += node.decorator_list if isinstance(node, ast.FunctionDef) else []
            every = [
                *signature.posonlyargs,
                *signature.args,
                *signature.kwonlyargs,
                signature.vararg,
                signature.kwarg,
            ]
            arguments = {argument.arg for argument in every if argument is not None}
            outer += [
                argument.annotation
                for argument in every
                if argument is not None and argument.annotation
            ]
        self._visit_all(outer)
        if not isinstance(node, ast.Lambda):
            self.defined.add(node.name)
        self.called_later |= self._read_by(body, arguments)

    def _read_by(self, nodes: list[ast.AST], arguments: set[str]) -> set[str]:
        """The names that the nodes of an inner scope read from outside of it."""
        names = [node for outer in nodes for node in ast.walk(outer) if isinstance(node, ast.Name)]
        stored = {name.id for name in names if not isinstance(name.ctx, ast.Load)}
        inner = Names(defined=self.defined | arguments | stored)
        inner._visit_all(nodes)
        return inner.read | (inner.called_later - inner.defined)


@dataclass(frozen=True)
class Block:
    """A block of Python on a page: its place among the blocks, and the blocks above that define what it reads."""

    number: int
    start: int
    end: int
    indent: str
    needs: dict[int, list[str]]
    """The names by the number of the block that defines them last."""
    missing: list[str]
    """Names that no block above defines."""


def blocks(page: str) -> Iterator[Block]:
    r"""The blocks of a page in Markdown, in order.

    >>> [
    ...     (block.needs, block.missing)
    ...     for block in blocks("```python\nx = 1\n```\n```python\nprint(x, y)\n```\n")
    ... ]
    [({}, []), ({0: ['x']}, ['y'])]
    """
    defined_in: dict[str, int] = {}
    for number, match in enumerate(FENCE.finditer(page)):
        indent = match["indent"]
        names = Names.of(
            "\n".join(line.removeprefix(indent) for line in match["text"].splitlines()) + "\n"
        )
        needs: dict[int, list[str]] = {}
        for name in sorted(names.read & defined_in.keys()):
            needs.setdefault(defined_in[name], []).append(name)
        missing = sorted(names.read - defined_in.keys())
        yield Block(number, match.start(), match.end(), indent, needs, missing)
        defined_in |= dict.fromkeys(names.defined, number)


def with_notes(page: str) -> str:
    """The page with an anchor at each block that others need, and a line below each block that needs others."""
    found = list(blocks(page))
    needed = {number for block in found for number in block.needs}
    parts: list[str] = []
    end = 0
    for block in found:
        parts.append(page[end : block.start])
        if block.number in needed:
            parts.append(f'{block.indent}<a id="code-{block.number}" class="code-anchor"></a>\n\n')
        parts.append(page[block.start : block.end])
        if block.needs:
            parts.append(f"\n\n{block.indent}{_note(block)}\n")
        end = block.end
    return "".join([*parts, page[end:]])


def _note(block: Block) -> str:
    """The line below a block, in HTML."""
    sources: list[str] = []
    for number, names in sorted(block.needs.items()):
        listed = ", ".join(f"<code>{escape(name)}</code>" for name in names)
        sources.append(f'{listed} from <a href="#code-{number}">above</a>')
    return f'<p class="code-needs">Uses {"; ".join(sources)}.</p>'


def _on_source(app: Sphinx, docname: str, content: list[str]) -> None:
    if not docname.startswith(WITHOUT_NOTES):
        content[0] = with_notes(content[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("source-read", _on_source)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
