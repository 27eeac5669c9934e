"""Every rate and argument on a page agrees with the library and with the measured rule, also where code cannot run.

A page may give other rates with a reason: ``lr_scaling="original"`` in the call, a comment above the block,
``<!-- not checked: the reason -->``, or a comment in it, ``# not checked: the reason``.
"""

import ast
import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest

import muonfx as mfx
from benchmarks.rates import LARGEST, RULES
from muonfx.engines import deepspeed, huggingface, torchtitan
from tests.pages import Snippet, configurations_of, of_markdown, python_of, snippets

TWO_RATES = ("learning_rate", "adamw_learning_rate")
RATE_ARGUMENTS = {
    mfx.Muon: ("lr", "adamw_lr"),
    deepspeed.Muon: ("lr", "adamw_lr"),
    torchtitan.muon: ("lr", "adamw_lr"),
    huggingface.muon: ("lr", "adamw_lr"),
    mfx.muon_with_adamw: TWO_RATES,
    mfx.muonclip: TWO_RATES,
    mfx.muon: ("learning_rate", ""),
    mfx.normuon: ("learning_rate", ""),
}
"""Functions whose updates have the size of AdamW's: their arguments for the rates of matrices and of the rest."""

OPTIONS_OF = {
    deepspeed.Muon: mfx.Muon,
    torchtitan.muon: mfx.Muon,
    huggingface.muon: mfx.Muon,
    mfx.Muon.transform_for: mfx.Muon,
    mfx.muonclip: mfx.muon_with_adamw,
}
"""Functions that pass further arguments on, and to which."""

TOLERANCE = 1.05
"""Rates on pages are rounded."""


@dataclass(frozen=True)
class Rates:
    """The two rates of one optimizer on a page; None if the page does not give the rate as a number."""

    place: str
    matrices: float | None
    rest: float | None
    scaling: str = "match_rms_adamw"

    def problems(self) -> list[str]:
        """Return what contradicts the rule."""
        if self.scaling != "match_rms_adamw":
            return []
        problems: list[str] = []
        if self.matrices is not None and self.matrices > LARGEST:
            problems.append(
                f"{self.place}: lr {self.matrices:g}, expected at most {LARGEST:g} under the default scaling"
            )
        if self.matrices is None or self.rest is None:
            return problems
        ratio = self.rest / self.matrices
        expected = {task: rest / matrices for task, (matrices, rest) in RULES.items()}
        if not any(1 / TOLERANCE < ratio / value < TOLERANCE for value in expected.values()):
            problems.append(
                f"{self.place}: rest / matrices is {self.rest:g} / {self.matrices:g}, expected {expected}"
            )
        return problems


class Page:
    """The names that a page has defined so far: objects of muonfx, and the expressions of other variables."""

    def __init__(self, namespace: Mapping[str, object]) -> None:
        self.objects: dict[str, object] = {"mfx": mfx, "muonfx": mfx, **namespace}
        self.variables: dict[str, ast.expr] = {}
        self.in_sentence = False
        """Whether the code is within a sentence, where a variable such as ``rate`` has no value."""
        self.trainer_rate: float | None = None
        """``learning_rate`` of the last ``TrainingArguments``, which ``huggingface.muon`` reads."""

    def define(self, tree: ast.Module) -> None:
        """Add the imports of muonfx and the assigned variables of a snippet."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "muonfx":
                for name in node.names:
                    self.objects[name.asname or name.name] = imported(node.module or "", name.name)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.variables[node.targets[0].id] = node.value
                self.objects.pop(node.targets[0].id, None)

    def object_of(self, node: ast.expr) -> object:
        """Return the object of muonfx that an expression such as ``mfx.polar.explain`` names, or None."""
        if isinstance(node, ast.Name):
            return self.objects.get(node.id)
        if isinstance(node, ast.Attribute):
            return getattr(self.object_of(node.value), node.attr, None)
        return None

    def number(self, node: ast.expr | None) -> float | None:
        """Return the value of a number, a variable that holds one, or the peak of a schedule; else None."""
        if isinstance(node, ast.Name):
            return None if self.in_sentence else self.number(self.variables.get(node.id))
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) == "torch.tensor":
                return self.number(node.args[0])
            return self.peak(node)
        try:
            return float(eval(compile(ast.Expression(node), "page", "eval"), {"__builtins__": {}}))  # type: ignore[arg-type]
        except Exception:  # no constant expression
            return None

    def peak(self, call: ast.Call) -> float | None:
        """Return the largest value of a schedule."""
        function = self.object_of(call.func)
        if not getattr(function, "__name__", "").endswith(("schedule", "exponential_decay")):
            return None
        arguments = bound(function, call)
        numbers = [self.number(arguments.get(name)) for name in ("peak", "start", "end", "value")]
        return max((number for number in numbers if number is not None), default=None)


@functools.cache
def imported(module: str, name: str) -> object:
    """Return ``name`` of a module, which may be a module itself."""
    found = import_module(module)
    return getattr(found, name) if hasattr(found, name) else import_module(f"{module}.{name}")


def bound(function: Any, call: ast.Call) -> dict[str, ast.expr]:
    """Return the expression of each argument.

    Raises:
        TypeError: the function has no such argument.
    """
    keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    positional = [argument for argument in call.args if not isinstance(argument, ast.Starred)]
    signature = inspect.signature(function)
    arguments = dict(signature.bind_partial(*positional, **keywords).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            options = arguments.pop(parameter.name, {})
            require_options(function, options)
            arguments.update(options)
    return arguments


def require_options(function: Any, options: Mapping[str, ast.expr]) -> None:
    """Raise TypeError for an option that the function to which the options are passed has not."""
    if function not in OPTIONS_OF:
        return
    accepted = inspect.signature(OPTIONS_OF[function]).parameters
    for name in options:
        if name not in accepted:
            raise TypeError(f"got an unexpected keyword argument {name!r}")


def calls_in(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield all calls in an expression or module. Without keywords, ``f(x, ...)`` in a sentence is no call to check."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and "..." not in map(ast.unparse, node.args):
            yield node


def problems_of_call(page: Page, call: ast.Call, place: str) -> list[str]:
    """Return the wrong arguments and rates of one call."""
    if isinstance(call.func, ast.Name) and call.func.id in ("TrainingArguments", "SimpleNamespace"):
        by_name = {keyword.arg: keyword.value for keyword in call.keywords}
        page.trainer_rate = page.number(by_name.get("learning_rate"))
        return Rates(place, page.trainer_rate, None).problems()
    # Arguments alone, within a sentence.
    if isinstance(call.func, ast.Name) and call.func.id == "arguments":
        arguments = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        matrix_rate = page.number(arguments.get("lr"))
        rest_rate = page.number(arguments.get("adamw_lr"))
        return Rates(place, matrix_rate, rest_rate, scaling_of(arguments)).problems()
    function = page.object_of(call.func)
    if not callable(function) or (isinstance(function, type) and issubclass(function, Exception)):
        return []
    try:
        arguments = bound(function, call)
    except TypeError as error:
        # ``law(tx, params)`` may describe any function
        if page.in_sentence and "positional" in str(error):
            return []
        return [f"{place}: {ast.unparse(call.func)}: {error}"]
    except ValueError:  # a function without a signature
        return []
    if function is mfx.chain:
        return problems_of_chain(page, call, place)
    if function not in RATE_ARGUMENTS:
        return []
    matrices, rest = RATE_ARGUMENTS[function]
    rate = page.number(arguments.get(matrices))
    if function is huggingface.muon and rate is None:
        rate = page.trainer_rate
    if rest == "adamw_lr" and matrices in arguments and rate is not None and rest not in arguments:
        return [
            f"{place}: {ast.unparse(call)} has a rate for the matrices only, expected adamw_lr too"
        ]
    return Rates(place, rate, page.number(arguments.get(rest)), scaling_of(arguments)).problems()


def scaling_of(arguments: Mapping[str, ast.expr]) -> str:
    """Return ``lr_scaling``; an expression that is no string may be any scaling, so its rates are not checked."""
    scaling = arguments.get("lr_scaling", ast.Constant("match_rms_adamw"))
    return str(scaling.value) if isinstance(scaling, ast.Constant) else "unknown"


def problems_of_chain(page: Page, chain: ast.Call, place: str) -> list[str]:
    """Return the wrong rates of a chain that scales matrices as AdamW does."""
    calls = list(calls_with_variables(page, chain, depth=4))
    by_function: dict[object, list[ast.Call]] = {}
    for call in calls:
        by_function.setdefault(page.object_of(call.func), []).append(call)
    scalings = by_function.get(mfx.scale_by_shape, [])
    if not scalings or any(shape_rule(scaling) != "match_rms_adamw" for scaling in scalings):
        return []
    rates: list[float] = []
    for call in by_function.get(mfx.scale_by_learning_rate, []):
        rate = page.number(call.args[0]) if call.args else None
        if rate is not None:
            rates.append(rate)
    problems = [problem for rate in rates for problem in Rates(place, rate, None).problems()]
    if mfx.scale_by_adam in by_function and mfx.scale not in by_function and len(rates) == 1:
        problems += Rates(place, rates[0], rates[0]).problems()  # one rate for both parts
    return problems


def shape_rule(scaling: ast.Call) -> str:
    """Return the rule of ``scale_by_shape(...)``."""
    arguments = bound(mfx.scale_by_shape, scaling)
    rule = next(iter(arguments.values()), ast.Constant("match_rms_adamw"))
    return str(rule.value) if isinstance(rule, ast.Constant) else "unknown"


def calls_with_variables(page: Page, tree: ast.AST, depth: int) -> Iterator[ast.Call]:
    """Yield all calls in an expression, and those in the variables that it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node
        elif isinstance(node, ast.Name) and node.id in page.variables and depth > 0:
            yield from calls_with_variables(page, page.variables[node.id], depth - 1)


def problems_of_configuration(configuration: Mapping[str, Any], place: str) -> list[str]:
    """Return the wrong keys and rates of a configuration of an engine.

    LLaMA-Factory: ``{name: muonfx, lr: 0.002}``. DeepSpeed: ``{"type": "muonfx.Muon", "params": {"lr": 0.002}}``.
    """
    if configuration.get("name") == "muonfx":
        arguments = {key: value for key, value in configuration.items() if key != "name"}
    elif configuration.get("type") == "muonfx.Muon":
        arguments = configuration.get("params", {})
    else:
        return []
    accepted = inspect.signature(mfx.Muon).parameters
    problems = [
        f"{place}: {key!r} is no argument of Muon" for key in arguments if key not in accepted
    ]
    for key in ("lr", "adamw_lr"):
        if isinstance(arguments.get(key), str):
            problems.append(
                f"{place}: {key} is the text {arguments[key]!r}, expected a number, such as 8.0e-5"
            )
    numbers = {key: value for key, value in arguments.items() if isinstance(value, float | int)}
    scaling = arguments.get("lr_scaling", "match_rms_adamw")
    return problems + Rates(place, numbers.get("lr"), numbers.get("adamw_lr"), scaling).problems()


OPTION = re.compile(r"--(?:optimizer\.)?(?P<name>lr|adamw_lr)[ =](?P<number>[0-9.e-]+)")


def problems_of_snippet(page: Page, snippet: Snippet) -> list[str]:
    """Return all problems of a snippet, and add its definitions to the page."""
    problems: list[str] = []
    page.in_sentence = snippet.language == "inline"
    for tree in python_of(snippet):
        page.define(tree)
        for call in calls_in(tree):
            problems += problems_of_call(page, call, snippet.place)
        problems += problems_of_literals(page, tree, snippet.place)
        if not page.in_sentence:
            problems += one_rate_for_all_groups(tree, snippet.place)
    for configuration in configurations_of(snippet):
        problems += problems_of_configuration(configuration, snippet.place)
    if snippet.language in ("sh", "bash", "inline"):
        numbers = {match["name"]: float(match["number"]) for match in OPTION.finditer(snippet.text)}
        problems += Rates(snippet.place, numbers.get("lr"), numbers.get("adamw_lr")).problems()
    return [] if snippet.allowance else problems


def problems_of_literals(page: Page, tree: ast.AST, place: str) -> list[str]:
    """Return the problems of dicts that are configurations, of ``muon_options``, and of a scheduler's ``max_lr``."""
    problems: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            try:
                problems += problems_of_configuration(ast.literal_eval(node), place)
            except ValueError:  # it has values that are no constants
                continue
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "muon_options":
            options = ast.literal_eval(node.value)
            problems += problems_of_configuration(
                {"name": "muonfx", "lr": page.trainer_rate, **options}, place
            )
        elif isinstance(node, ast.Assign | ast.keyword) and isinstance(node.value, ast.List):
            name = node.arg if isinstance(node, ast.keyword) else ast.unparse(node.targets[0])
            if name == "max_lr" and len(node.value.elts) == 2:
                matrices, rest = node.value.elts
                problems += Rates(place, page.number(matrices), page.number(rest)).problems()
    return problems


def one_rate_for_all_groups(tree: ast.AST, place: str) -> list[str]:
    """Return a problem for each loop over groups that replaces their rates, such as ``group["lr"] = 0.02 / step``."""
    problems: list[str] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Subscript):
            continue
        is_rate = ast.unparse(node.targets[0].slice) == "'lr'"
        # Neither the group's "lr" nor its "initial_lr".
        if is_rate and "lr']" not in ast.unparse(node.value):
            problems.append(
                f"{place}: {ast.unparse(node)} erases the second rate, expected a multiple of the group's own"
            )
    return problems


def namespace_of(page: str) -> Mapping[str, object]:
    """Return the names that a docstring's examples see: those of its module."""
    if not page.startswith("muonfx/"):
        return {}
    name = page.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if name.endswith("__main__"):
        return {}
    return vars(import_module(name))


def problems_of_pages(all_snippets: Iterator[Snippet]) -> list[str]:
    """Return all problems of all pages."""
    pages: dict[str, Page] = {}
    problems: list[str] = []
    for snippet in all_snippets:
        if snippet.page not in pages:
            pages[snippet.page] = Page(namespace_of(snippet.page))
        problems += problems_of_snippet(pages[snippet.page], snippet)
    return problems


def test_every_rate_and_argument_on_a_page_agrees_with_the_library_and_the_rule():
    problems = problems_of_pages(snippets())
    assert not problems, "\n" + "\n".join(problems)


FENCED = "```{}\n{}\n```\n"


@pytest.mark.parametrize(
    "page",
    [
        FENCED.format("yaml", "optim_config:\n  name: muonfx\n  lr: 0.02"),
        FENCED.format("yaml", "optim_config: {name: muonfx, lr: 0.002, adamw_lr: 0.00003}"),
        FENCED.format("yaml", "optim_config: {name: muonfx, learning_rate: 0.002}"),
        FENCED.format("yaml", "optim_config: {name: muonfx, lr: 8e-5}"),  # a string in YAML 1.1
        FENCED.format("json", '{"optimizer": {"type": "muonfx.Muon", "params": {"lr": 0.02}}}'),
        FENCED.format(
            "json",
            '{"optimizer": {"type": "muonfx.Muon", "params": {"lr": 0.001, "rest_lr": 0.001}}}',
        ),
        FENCED.format("sh", "torchrun -m torchtitan.train --optimizer.lr 0.02"),
        FENCED.format(
            "python", "rate = mfx.warmup_cosine_decay_schedule(0.02, 5, 20)\ntx = mfx.muon(rate)"
        ),
        FENCED.format("python", "mfx.Muon(model, lr=1e-3, adamw_lr=1e-5)"),
        FENCED.format("python", "mfx.Muon(model, lr=1e-3, adam_lr=1e-3)"),
        FENCED.format("python", 'args = TrainingArguments("out", learning_rate=0.02)'),
        FENCED.format(
            "python",
            "from muonfx.engines import huggingface\n"
            'args = TrainingArguments("out", learning_rate=2e-3)\n'
            "huggingface.muon(args, adamw_lr=3e-5)",
        ),
        FENCED.format("python", "from muonfx.engines import torchtitan\ntorchtitan.muon(lr=0.02)"),
        FENCED.format(
            "python", 'config = {"optimizer": {"type": "muonfx.Muon", "params": {"lr": 0.02}}}'
        ),
        FENCED.format(
            "python",
            "tx = mfx.chain(mfx.orthogonalize(), mfx.scale_by_shape(), mfx.scale_by_learning_rate(1.0))",
        ),
        FENCED.format("pycon", ">>> mfx.muon_with_adamw(0.02)\nchain(...)"),
        FENCED.format(
            "diff", "- torch.optim.AdamW(model.parameters(), lr=1e-3)\n+ mfx.Muon(model, lr=0.02)"
        ),
        'A JSON file with `{"type": "muonfx.Muon", "params": {"lr": 0.02}}`.\n',
        "Pass `mfx.Muon(model, lr=0.02)`.\n",
        "Set `lr=0.02` and `adamw_lr=3e-4`.\n",
        "Groups follow, so `max_lr=[0.02, 1e-3]` sets both.\n",
        "A tensor: `mfx.Muon(model, lr=torch.tensor(0.02), adamw_lr=torch.tensor(0.08))`.\n",
        FENCED.format(
            "python", 'for group in optimizer.param_groups:\n    group["lr"] = 1e-3 / step'
        ),
    ],
)
def test_a_wrong_rate_or_name_is_read_in_every_kind_of_code(page: str):
    assert problems_of_pages(of_markdown("page.md", page))


@pytest.mark.parametrize(
    "page",
    [
        FENCED.format("python", 'mfx.Muon(model, lr=0.02, adamw_lr=3e-4, lr_scaling="original")'),
        FENCED.format("yaml", "optim_config: {name: muonfx, lr: 0.02, lr_scaling: original}"),
        "<!-- not checked: shows a rate that is too large -->\n"
        + FENCED.format("python", "mfx.muon(0.02)"),
        FENCED.format("yaml", "optim_config: {name: adamw, lr: 0.02}"),
        FENCED.format("python", "torch.optim.Muon(matrices, lr=0.02)"),
        FENCED.format(
            "python", 'for group in groups:\n    group["lr"] = 0.5 * group["initial_lr"]'
        ),
    ],
)
def test_a_rate_of_another_scaling_or_optimizer_is_no_problem(page: str):
    assert problems_of_pages(of_markdown("page.md", page)) == []
