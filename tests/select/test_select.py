"""Routing: the algebra of predicates, the laws of labels, and rules and parameters that are refused."""

import pickle
import random
from collections import OrderedDict
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from muonfx.select import (
    Labels,
    ParamInfo,
    Route,
    default_labels,
    describe,
    labels,
    module_type,
    ndim,
    path,
    where,
)

# Named tensors alone serve many laws; the test of the warning itself asks for it.
pytestmark = pytest.mark.filterwarnings("ignore:default_labels saw names:UserWarning")


def is_tall(info: ParamInfo) -> bool:
    return info.ndim == 2 and info.shape[0] > info.shape[1]


SCOPE = {"torch": torch, "is_tall": is_tall, "Labels": Labels} | {
    f.__name__: f for f in (module_type, ndim, path, where)
}

# ------------------------------------------------------------------------------------------------------- strategies

sides = st.integers(0, 5)
components = st.sampled_from(
    ["blocks", "0", "1", "attn", "gate", "gate_proj", "up", "norm", "wte", "lm_head", "weight", "bias"]
)
names = st.lists(components, min_size=1, max_size=4).map(".".join)
module_types = st.sampled_from([nn.Embedding, nn.Linear, nn.LayerNorm, nn.Conv2d, nn.Module])
shapes = st.lists(sides, max_size=4).map(tuple)


@st.composite
def param_infos(draw: st.DrawFn) -> ParamInfo:
    module = draw(st.none() | module_types)
    others = tuple(draw(st.lists(names, max_size=2)))
    return ParamInfo(
        draw(names),
        draw(shapes),
        draw(st.sampled_from([torch.float32, torch.bfloat16])),
        draw(st.booleans()),
        module,
        others,
        () if module is None else tuple(draw(module_types) for _ in others),
    )


bounds = st.tuples(sides, sides) | st.tuples(sides, st.none()) | st.tuples(st.none(), sides)


atoms = st.one_of(
    sides.map(ndim),
    bounds.map(lambda b: ndim(min=b[0], max=b[1])),
    st.lists(st.sampled_from(["*", "*.weight", "blocks.*", "*gate*", "wte", "?.gate"]), min_size=1, max_size=2).map(
        lambda patterns: path(*patterns)
    ),
    st.lists(module_types | st.sampled_from(["*Norm*", "Linear"]), min_size=1, max_size=2).map(
        lambda t: module_type(*t)
    ),
    st.sampled_from([where(is_tall), where(is_tall, "tall")]),
)
predicates = st.recursive(
    atoms,
    lambda inner: st.one_of(
        inner.map(lambda p: ~p),
        st.tuples(inner, inner).map(lambda pq: pq[0] & pq[1]),
        st.tuples(inner, inner).map(lambda pq: pq[0] | pq[1]),
    ),
    max_leaves=5,
)
named_tensors = st.dictionaries(names, shapes, max_size=6).map(lambda d: {k: torch.zeros(s) for k, s in d.items()})
rule_lists = st.lists(st.tuples(predicates, st.sampled_from(["a", "b", None])), max_size=4)
quiet = pytest.mark.filterwarnings("ignore:.*matches none of the:UserWarning")

# ------------------------------------------------------------------------------------------------ laws of predicates


@given(predicates, predicates, predicates, param_infos())
def test_predicates_are_a_boolean_algebra(p, q, r, info):
    def same(left, right):
        return left(info) is right(info)

    assert same(~~p, p)
    assert same(~(p & q), ~p | ~q)
    assert same(~(p | q), ~p & ~q)
    assert same(p & q, q & p)
    assert same(p | q, q | p)
    assert same(p & (q & r), (p & q) & r)
    assert same(p | (q | r), (p | q) | r)
    assert same(p & (q | r), (p & q) | (p & r))
    assert same(p | (q & r), (p | q) & (p | r))
    assert same(p & (p | q), p)
    assert (p | ~p)(info) is True
    assert (p & ~p)(info) is False


@given(predicates, param_infos())
def test_a_predicate_survives_repr_and_pickle(p, info):
    for again in (eval(repr(p), dict(SCOPE)), pickle.loads(pickle.dumps(p))):
        assert again == p
        assert hash(again) == hash(p)
        assert again(info) == p(info)


# ---------------------------------------------------------------------------------------------------- laws of labels


@quiet
@given(named_tensors, rule_lists, st.sampled_from(["rest", None]))
def test_the_first_rule_that_matches_wins(params, rules, default):
    found = labels(params, rules, default)
    for name, tensor in params.items():
        info = ParamInfo(name, tuple(tensor.shape))
        wanted = next(((n, label) for n, (p, label) in enumerate(rules, 1) if p(info)), (0, default))
        assert found[name] == wanted[1]
        assert found.reason(name).startswith(f"rule {wanted[0]}: " if wanted[0] else "default")


@quiet
@given(named_tensors, rule_lists)
def test_rules_of_the_user_are_never_overwritten(params, rules):
    own = labels(params, rules, "untouched")
    found = default_labels(params, rules)
    plain = default_labels(params)
    for name in params:
        by_rule = own.reason(name) != "default"
        assert found[name] == (own[name] if by_rule else plain[name])
        assert found.reason(name) == (f"user {own.reason(name)}" if by_rule else plain.reason(name))


@given(named_tensors)
def test_every_trainable_parameter_gets_exactly_one_label(params):
    found = default_labels(params)
    assert list(found) == list(params)
    assert set(found.values()) <= {"muon", "adamw"}
    assert all(params[name].ndim >= 2 for name, label in found.items() if label == "muon")


@given(named_tensors, st.randoms(use_true_random=False))
def test_the_order_of_parameters_is_irrelevant(params, rng: random.Random):
    shuffled = list(params.items())
    rng.shuffle(shuffled)
    one, two = default_labels(params), default_labels(shuffled)
    assert one == two
    assert hash(one) == hash(two)
    assert {name: one.reason(name) for name in one} == {name: two.reason(name) for name in two}


@given(st.dictionaries(names, st.sampled_from(["a", "b", None])))
def test_labels_survive_repr_and_pickle_and_equal_their_mapping(mapping):
    value = Labels({name: Route(label, "why") for name, label in mapping.items()})
    assert value == mapping
    assert eval(repr(value), dict(SCOPE)) == value
    again = pickle.loads(pickle.dumps(value))
    assert (again, hash(again)) == (value, hash(value))
    assert all(again.reason(name) == "why" for name in mapping)
    assert value != {**mapping, "another": "a"}
    mapping["another"] = "a"  # labels do not follow the mapping that they were made from
    assert "another" not in value


@given(named_tensors)
def test_all_ways_to_give_named_tensors_agree(params):
    wanted = default_labels(params)
    for given_as in (list(params.items()), iter(params.items()), OrderedDict(params), MappingProxyType(params)):
        assert default_labels(given_as) == wanted
        assert str(describe(wanted, params)) == str(describe(wanted, list(params.items())))


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("params", "error", "complaint"),
    [
        ([("w", torch.zeros(1)), ("w", torch.zeros(1))], ValueError, "'w' is given more than once"),
        ({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)}, ValueError, "'a.b' is given more than once"),
        ([("w", 3.0)], TypeError, "'w' is a float"),
        ({"a": {"b": "text"}}, TypeError, "'a.b' is a str"),
        (object(), TypeError, "is a object"),
        (iter([torch.zeros(1)]), TypeError, "named_parameters"),
        (nn.LazyLinear(3), ValueError, "'weight' has no shape yet"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_bad_parameters_are_named(params, error, complaint):
    with pytest.raises(error, match=complaint):
        default_labels(params)


def test_a_rule_that_is_no_pair_is_named():
    for rule in (
        path("*"),
        (path("*"),),
        ("*.weight", "a"),
        (is_tall, "a"),
        (path("*"), 3),
        (path("*"), "a", "b"),
        None,
    ):
        with pytest.raises(TypeError, match="rule 2"):
            default_labels({"w": torch.zeros(1)}, [(path("*"), "a"), rule])


def test_parameters_without_a_rule_are_listed():
    params = {f"w{n}": torch.zeros(1) for n in range(30)}
    with pytest.raises(ValueError, match=r"29 of 30 parameters match no rule: 'w1', .* and 19 more; add"):
        labels(params, [(path("w0"), "a")])
    with pytest.raises(TypeError, match="default: found the label 3"):
        labels(params, [], 3)  # pyright: ignore


def test_a_rule_that_matches_nothing_is_warned_of_where_it_is_written():
    for route, kind in ((default_labels, "user rule"), (lambda p, r: labels(p, r, "x"), "rule")):
        with pytest.warns(UserWarning, match=rf"^{kind} 1: path\('typo.*'\) -> 'a' matches none of the 1") as caught:
            route({"w": torch.zeros(1)}, [(path("typo.*"), "a")])
        assert caught[0].filename == __file__
