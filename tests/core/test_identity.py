"""Fingerprints and public names: equal in every process, wherever code is stored and whatever is added to it."""

import copy
import os
import pickle
import pkgutil
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given

import muonfx as mfx
from muonfx import testing as kit
from muonfx.core.argument_texts import public_name
from muonfx.core.order import signs
from tests.processes import ROOT, run_python

SCALED = mfx.scale(2.0)


def momentum_like(
    *, module: str, name: str = "averaged", declared: str | None = None, newer: bool = False
) -> Any:
    """A factory as it would be, had it been written in a module of that name, with an argument more or less."""

    def older(decay: float = 0.9, nesterov: bool = True, dtype: Any = torch.float32):
        return mfx.momentum(decay, nesterov=nesterov, dtype=dtype).functions

    def later(
        decay: float = 0.9,
        nesterov: bool = True,
        dtype: Any = torch.float32,
        *,
        warm: bool = False,
        rate: float | mfx.Schedule | None = 1.0,
        inner: Any = SCALED,
    ):
        return mfx.momentum(decay, nesterov=nesterov, dtype=dtype).functions

    made = later if newer else older
    made.__module__, made.__name__, made.__qualname__ = module, name, name
    return mfx.transform(made, name=declared)


@dataclass(frozen=True)
class Options:
    """An argument with a dict, whose order ``==`` ignores."""

    factors: dict[str, Any]


class Pair(NamedTuple):
    """An argument of a type that is no plain tuple."""

    factors: dict[str, Any]
    other: int


@mfx.leafwise
def with_options(options: Any = None):
    return mfx.core.EmptyState(), lambda u, s: (u, s)


FACTORS = {"head*": 1, "*": 2}
REORDERED = {"*": 2, "head*": 1}


@pytest.mark.parametrize(
    ("options", "others"),
    [
        (FACTORS, REORDERED),
        ([(FACTORS,)], [(REORDERED,)]),
        (defaultdict(int, FACTORS), defaultdict(int, REORDERED)),
        (Options(FACTORS), Options(REORDERED)),
        (Pair(FACTORS, 0), Pair(REORDERED, 0)),
        (frozenset([1]), frozenset([1.0])),
        ({"*": 1}, {"*": 1.0}),
        ({"*": (1, 2)}, {"*": (True, 2)}),
    ],
    ids=[
        "dict",
        "nested",
        "subclass",
        "dataclass",
        "named tuple",
        "set",
        "int and float",
        "int and bool",
    ],
)
def test_transforms_are_equal_only_if_their_fingerprints_are(options: Any, others: Any):
    tx = with_options(options)
    assert tx.fingerprint != with_options(others).fingerprint
    assert tx != with_options(others)
    assert tx == with_options(copy.deepcopy(options))
    assert tx.fingerprint == with_options(copy.deepcopy(options)).fingerprint


def test_a_fingerprint_does_not_change_when_a_module_of_ours_moves():
    here, there = (
        momentum_like(module=f"muonfx.{place}")
        for place in ("transforms.momentum", "elsewhere.deep.file")
    )
    assert here().fingerprint == there().fingerprint
    assert (
        mfx.chain(here(nesterov=False)).fingerprint == mfx.chain(there(nesterov=False)).fingerprint
    )
    assert public_name(here) == "muonfx.averaged"


def test_a_fingerprint_does_not_change_when_an_argument_with_a_default_is_added():
    older, newer = (momentum_like(module="muonfx.x", newer=added) for added in (False, True))
    for given_to_both in (
        {},
        {"nesterov": False},
        {"dtype": None},
        {"decay": 0.5, "dtype": mfx.int8(4)},
    ):
        assert older(**given_to_both).fingerprint == newer(**given_to_both).fingerprint
    for used in (
        {"warm": True},
        {"rate": mfx.linear_schedule(1.0, 0.0, 3)},
        {"inner": mfx.momentum()},
        {"rate": None},
    ):
        assert newer(**used).fingerprint != older().fingerprint
    # Numbers do not count.
    assert newer(rate=0.5, inner=mfx.scale(3.0)).fingerprint == older().fingerprint
    assert newer(rate=3).fingerprint == older().fingerprint  # an int where a float is meant


def test_a_pickle_gets_the_default_of_an_argument_that_was_added_since(
    monkeypatch: pytest.MonkeyPatch,
):
    module: Any = ModuleType("acme_transforms")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.averaged = momentum_like(module=module.__name__)
    saved = pickle.dumps(module.averaged(0.5, nesterov=False))
    module.averaged = momentum_like(module=module.__name__, newer=True)
    assert pickle.loads(saved) == module.averaged(0.5, nesterov=False)
    assert repr(pickle.loads(saved)) == "averaged(decay=0.5, nesterov=False)"


def test_a_pickle_of_several_inner_transforms_gets_the_default_of_an_argument_that_was_added_since(
    monkeypatch: pytest.MonkeyPatch,
):
    module: Any = ModuleType("acme_transforms")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def both(*members: mfx.Transform, **named: mfx.Transform):
        return mfx.chain(*members, *named.values()).functions

    def newer_both(*members: mfx.Transform, reverse: bool = False, **named: mfx.Transform):
        return both(*members, **named)

    def as_factory(function: Any) -> Any:
        function.__module__, function.__qualname__, function.__name__ = (
            module.__name__,
            "both",
            "both",
        )
        return mfx.transform(function)

    module.both = as_factory(both)
    saved = pickle.dumps(module.both(mfx.scale(0.5), last=mfx.scale(2.0)))
    module.both = as_factory(newer_both)
    assert pickle.loads(saved) == module.both(mfx.scale(0.5), last=mfx.scale(2.0))


def test_a_default_dict_of_transforms_is_left_out_of_a_fingerprint_in_any_order():
    @mfx.transform(name="acme.labeled")
    def labeled(transforms: Any = {"b": mfx.scale(2.0), "a": mfx.momentum()}):  # noqa: B006, B008
        return mfx.scale(1.0).functions

    @mfx.transform(name="acme.labeled")
    def older():
        return mfx.scale(1.0).functions

    assert labeled().fingerprint == older().fingerprint


def test_a_fingerprint_does_not_change_when_a_function_is_renamed_that_has_declared_its_name():
    one = momentum_like(module="acme.a", declared="acme.averaged")
    two = momentum_like(module="acme.b.c", name="_impl", declared="acme.averaged")
    assert one().fingerprint == two().fingerprint
    assert one().name == two().name == "averaged"
    params = {"w": torch.zeros(2)}
    assert (
        list(mfx.spec(mfx.chain(one()), params))
        == list(mfx.spec(mfx.chain(two()), params))
        == ["averaged/trace/w"]
    )
    undeclared = momentum_like(module="acme.a"), momentum_like(module="acme.b")
    # They were not declared equal.
    assert undeclared[0]().fingerprint != undeclared[1]().fingerprint
    for bad in ("", "a b", "a..b", "a/b", 3):
        with pytest.raises(ValueError, match="identifiers with dots"):
            momentum_like(module="acme.a", declared=bad)


def test_no_two_factories_of_ours_have_one_public_name():
    for module in pkgutil.walk_packages(mfx.__path__, "muonfx."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    factories = {
        id(value): value
        for name, module in sys.modules.items()
        if name.partition(".")[0] == "muonfx"
        for value in vars(module).values()
        if hasattr(value, "definition")
        and callable(value)
        and value.__module__.startswith("muonfx")
    }
    assert len(factories) > 40
    assert [
        name for name, times in Counter(map(public_name, factories.values())).items() if times > 1
    ] == []


@given(kit.transforms(matrices=True), kit.transforms(matrices=True))
def test_equal_transforms_have_equal_fingerprints(one: mfx.Transform, other: mfx.Transform):
    again = one.replace(**one.arguments)
    assert again.fingerprint == one.fingerprint
    if one == other:
        assert one.fingerprint == other.fingerprint


PROGRAM = """
import functools, operator, torch, muonfx as mfx

@mfx.transform
def mine(function=None, *, table=(), where="cpu"):
    return mfx.identity().functions

@mfx.transform
def with_function(function):
    return mfx.identity().functions

class Plain:
    def method(self, x): ...

class Layer(torch.nn.Linear): ...

def named(params): ...

def cases():
    return [
        mine(),
        mine(lambda p: {n: [k for k in n if k > "x"] for n in p}),
        mine(lambda p: (lambda q: q + 1)(p)),
        mine(lambda p: p in {"a", "b", "c"}),
        mine(functools.partial(named, key={"a", "b"}, flag=True)),
        mine(functools.partial(lambda p, k: k, k=3)),
        mine(Plain().method), mine(Plain()), mine(Plain), mine(named),
        mine(torch.relu), mine(len), mine(torch.nn.functional.relu), mine(operator.itemgetter(1)),
        mine(table={"a", "b", "c", "d"}), mine(table=frozenset("abcdef")), mine(table=(1.5, float("nan"), -0.0)),
        mine(table=[torch.float32, torch.device("cpu"), torch.ones(3)]),
        mine(table=functools.partial(named, torch.ones(3))),
        mine(where=torch.device("cuda", 1)), mine(where=mfx.Locality.MATRIX),
        mfx.masked(mfx.scale(1.0), mfx.routing.where(lambda info: True)),
        mine(mfx.routing.module_type(Layer)),
        mfx.partition({"a": mfx.scale(1.0)}, named), with_function(named),
    ]

def show():
    print([tx.fingerprint for tx in cases()], flush=True)
"""
MAIN = """
if __name__ == "__main__":
    show()
"""
SPAWNING = """
    import multiprocessing
    child = multiprocessing.get_context("spawn").Process(target=show)
    child.start()
    child.join()
"""


@pytest.mark.slow
def test_fingerprints_are_the_same_in_every_process_and_for_a_script_and_its_import(tmp_path: Path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "train.py").write_text(PROGRAM + MAIN)
    (tmp_path / "train.py").write_text(PROGRAM + MAIN + SPAWNING)

    def run(*command: str, seed: str) -> list[str]:
        search = f"{ROOT}{os.pathsep}{tmp_path}"
        done = run_python(*command, cwd=tmp_path, PYTHONHASHSEED=seed, PYTHONPATH=search)
        return [line for line in done.stdout.splitlines() if line.startswith("[")]

    script, child = run("train.py", seed="1")  # in the child the script is called __mp_main__
    (module,) = run("-m", "package.train", seed="2")
    imported = run(
        "-c", "import train, package.train; train.show(); package.train.show()", seed="3"
    )
    assert [script, module] == imported
    assert script == child
    assert len(set(eval(script))) == len(eval(script)) > 20  # and all of them differ


def test_a_factory_in_no_module_prints_and_has_a_direction():
    names: dict[str, Any] = {"mfx": mfx}
    exec(
        "@mfx.transform\ndef same():\n    return mfx.identity().functions\ndef halve(u, p):\n    return u",
        names,
    )
    assert names["same"].__module__ is None
    assert (
        repr(mfx.chain(names["same"](), mfx.stateless(names["halve"])))
        == "chain(same(), stateless(halve))"
    )
    assert signs(names["same"]()) == {0}


def test_a_transform_that_is_created_in_a_compiled_step_is_compiled_once():
    graphs: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, _: object):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=counting)
    def step(params: dict[str, torch.Tensor]):
        return mfx.momentum(0.5).update(params, mfx.momentum().init(params), params)

    params = {"w": torch.ones(2, 2)}
    step(params)
    first = len(graphs)
    step(params)
    step(params)
    assert len(graphs) == first
