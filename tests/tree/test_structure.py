"""Trees: one order of leaves in every container, in every mode; norms, leaves of states, and names of leaves."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import example, given, settings
from hypothesis import strategies as st

import muonfx as mfx
from muonfx import testing as kit
from muonfx import tree
from muonfx.internal.renaming import new_names
from muonfx.internal.wrappers import WRAPPERS, unwrapped
from muonfx.tree import Present
from muonfx.tree.difference import difference
from muonfx.tree.structure import _traced_flatten

pytestmark = pytest.mark.filterwarnings("ignore:partition. no parameter has the label")


class Fields(NamedTuple):
    """A NamedTuple whose fields are not in sorted order."""

    weight: Any
    bias: Any


class Registered:
    """A user's own container, registered with optree and with torch."""

    def __init__(self, second: Any, first: Any) -> None:
        self.second, self.first = second, first


def take_apart(node: Registered) -> tuple[list[Any], None, tuple[str, str]]:
    return [node.second, node.first], None, ("second", "first")


def put_together(metadata: None, children: Any) -> Registered:
    return Registered(*children)


optree.register_pytree_node(Registered, take_apart, put_together, namespace=tree.NAMESPACE)
torch_pytree.register_pytree_node(
    Registered,
    lambda node: ([node.second, node.first], None),
    lambda children, context: Registered(*children),
    flatten_with_keys_fn=lambda node: (
        [
            (torch_pytree.GetAttrKey("second"), node.second),
            (torch_pytree.GetAttrKey("first"), node.first),
        ],
        None,
    ),
)

Make = Callable[[Any, Any], Any]

CONTAINERS: dict[str, Make] = {
    "dict": lambda x, y: {"w": x, "b": y},
    "dict with int keys": lambda x, y: {10: x, 9: y},
    "dict with keys of two types": lambda x, y: {"w": x, 3: y},
    "dict with tuple keys": lambda x, y: {(1, "w"): x, (0, "b"): y},
    "dict with incomparable keys": lambda x, y: {(1, "w"): x, ("b", 0): y},
    "OrderedDict": lambda x, y: OrderedDict([("w", x), ("b", y)]),
    "defaultdict": lambda x, y: defaultdict(list, {"w": x, "b": y}),
    "list": lambda x, y: [x, y],
    "tuple": lambda x, y: (x, y),
    "NamedTuple": Fields,
    "deque": lambda x, y: deque([x, y]),
    "bounded deque": lambda x, y: deque([x, y], maxlen=3),
    "torch.return_types": lambda x, y: torch.return_types.max((x, y)),
    "registered node": Registered,
    "beside an empty dict": lambda x, y: {"w": x, "none": {}, "b": [y, OrderedDict(), ()]},
    "state_dict": lambda x, y: OrderedDict([("head.weight", x), ("blocks.0.bias", y)]),
}

LEAVES = [pytest.param(make, id=kind) for kind, make in CONTAINERS.items()]
NESTED = [
    pytest.param(lambda x, y, o=outer, i=inner: o(i(x, y), x), id=f"{kind} of {within}")
    for kind, outer in CONTAINERS.items()
    for within, inner in CONTAINERS.items()
    if kind in ("dict", "OrderedDict", "NamedTuple", "deque")
    and within in ("dict", "OrderedDict", "torch.return_types")
]


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="eager")


def numbered(make: Make) -> Any:
    return make(torch.tensor([1.0]), torch.tensor([2.0, 2.0]))


def entry_of(key: Any) -> Any:
    return getattr(key, "key", getattr(key, "idx", getattr(key, "name", None)))


@pytest.mark.parametrize("make", LEAVES + NESTED)
def test_torch_finds_each_leaf_under_the_same_path(make: Make):
    given = numbered(make)
    ours = {
        path: id(leaf) for path, leaf in zip(tree.paths(given), tree.leaves(given), strict=True)
    }
    theirs = {
        tuple(map(entry_of, path)): id(leaf)
        for path, leaf in torch_pytree.tree_flatten_with_path(given)[0]
    }
    assert ours == theirs


@pytest.mark.parametrize("make", LEAVES + NESTED)
def test_everything_that_walks_a_tree_walks_in_one_order(make: Make):
    given = numbered(make)
    found, treedef = tree.flatten(given)
    at = Present(given)
    picked = dict(zip(at.names(), at.pick(given), strict=True))
    for name, path, leaf, mine in zip(
        tree.names(given), tree.paths(given), tree.leaves(given), found, strict=True
    ):
        assert leaf is mine is picked[name]
        assert name == ".".join(map(str, path))
    assert tree.same_structure(tree.unflatten(treedef, found), given)
    assert tree.same_structure(at.fill(at.pick(given)), given)


def test_a_compiled_walk_of_every_container_is_the_eager_one():
    def walk(given: Any) -> Any:
        at = Present(given)
        found, treedef = tree.flatten(given)
        doubled = tree.unflatten(treedef, [2 * leaf for leaf in found])
        mapped = tree.map(lambda leaf, other: leaf + other, given, doubled)
        filled = at.fill([leaf + 1 for leaf in at.pick(doubled)])
        leaves = [leaf + 0 for leaf in tree.leaves(given)]
        return (tree.names(given), at.names(), tree.paths(given)), (leaves, mapped, filled, doubled)

    # Dynamo (torch 2.13) reads any deque's maxlen as None: it returns another container, of the same leaves.
    every = {kind: numbered(make) for kind, make in CONTAINERS.items() if kind != "bounded deque"}
    walks = compiled(lambda every: {kind: walk(own) for kind, own in every.items()})(every)
    for kind, own in every.items():
        (paths, trees), (expected, wanted) = walks[kind], walk(own)
        assert paths == expected, kind
        for have, want in zip(trees, wanted, strict=True):
            assert tree.same_structure(have, want), kind
            assert [x.tolist() for x in tree.leaves(have)] == [
                x.tolist() for x in tree.leaves(want)
            ], kind


def contiguous_params(example: kit.Example) -> Any:
    return tree.map(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), example.params)


TREES = kit.params_and_grads(dtypes=[torch.float32]).map(contiguous_params)


@pytest.mark.slow
@given(st.lists(TREES, min_size=5, max_size=5))
@settings(max_examples=3)
def test_a_compiled_walk_of_any_trees_is_the_eager_one(several: list[Any]):
    def walk(several: list[Any]) -> Any:
        return [(tree.names(given), tree.map(lambda leaf: leaf * 2, given)) for given in several]

    for (names, doubled), (expected, wanted) in zip(
        compiled(walk)(several), walk(several), strict=True
    ):
        assert names == expected
        kit.violation.require_same("the tree", doubled, wanted, "in eager mode")


def states(make: Make, shape: tuple[int, ...]) -> Any:
    generator = torch.Generator().manual_seed(0)
    return make(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))


@pytest.mark.parametrize("make", LEAVES)
def test_an_update_does_not_depend_on_the_container(make: Make):
    params, grads = states(make, (2, 2)), states(make, (2, 2))
    tx = mfx.chain(
        mfx.momentum(),
        mfx.clip_by_global_norm(0.5),
        mfx.scale_by_adam(),
        mfx.add_decayed_weights(0.1),
    )
    updates = tx.update(grads, tx.init(params), params)[0]

    def flat(values: Any) -> Any:
        return dict(zip(tree.names(values), tree.leaves(values), strict=True))

    expected = tx.update(flat(grads), tx.init(flat(params)), flat(params))[0]
    kit.violation.require_close("updates", flat(updates), expected, "of a flat dict", 1e-6)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_another_order_of_an_ordered_dict_is_an_error_and_never_a_swap(mode: str):
    tx = mfx.momentum()
    params = OrderedDict(w=torch.zeros(2), b=torch.zeros(2))
    grads = OrderedDict(b=torch.ones(2), w=torch.zeros(2))
    update = tx.update if mode == "eager" else torch.compile(tx.update, backend="eager")
    with pytest.raises(ValueError, match=r"(?s)structure of params.*OrderedDict"):
        update(grads, tx.init(params), params)


@pytest.mark.parametrize(
    "tree_of",
    [Counter, lambda pairs: torch.nn.ParameterDict(pairs), lambda pairs: {"deep": {1, 2}}],
)
def test_what_is_no_container_is_named(tree_of: Any):
    with pytest.raises(TypeError, match="must be a tensor or None"):
        mfx.momentum().init(tree_of({"w": torch.nn.Parameter(torch.zeros(2))}))


@pytest.mark.parametrize("make", LEAVES)
def test_labels_and_masks_may_be_a_tree_like_the_parameters(make: Make):
    params = states(make, (2, 2))
    tx = mfx.chain(
        mfx.partition({"up": mfx.scale(10.0), "down": mfx.scale(0.5)}, make("up", "down")),
        mfx.masked(mfx.scale(3.0), make(False, True)),
    )
    updates = tx.update(params, tx.init(params), params)[0]
    expected = make(10.0, 1.5)
    for found, leaf, factor in zip(
        tree.leaves(updates), tree.leaves(params), tree.leaves(expected), strict=True
    ):
        torch.testing.assert_close(found, leaf * factor)


@given(kit.params_and_grads())
def test_a_norm_is_the_norm_of_one_vector(example: kit.Example):
    doubles = tree.map(lambda leaf: leaf.double(), example.params)
    flat = [
        torch.zeros(0, dtype=torch.float64),
        *(leaf.flatten() for leaf in tree.tensors(doubles)),
    ]
    torch.testing.assert_close(tree.norm(doubles), torch.cat(flat).norm())


def test_sums_of_many_small_numbers_are_right_in_every_dtype():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        ones = {"w": torch.ones(100_000, dtype=dtype)}
        assert float(tree.norm(ones)) == pytest.approx(100_000**0.5, rel=1e-12)


PARAMS = {"h.w": torch.zeros(3, 2), "count": torch.zeros(4), "s": torch.zeros(())}


def marked(tx: mfx.Transform) -> dict[str, bool]:
    """By name, which leaves of a state are taken for those of parameters."""
    found = tree.map_params(lambda leaf, param: True, tx.init(PARAMS), PARAMS)
    return {name: leaf is True for name, leaf in tree.named_leaves(found)}


def test_moments_are_like_parameters_and_counters_are_not():
    found = marked(
        mfx.chain(
            mfx.scale_by_adam(), mfx.momentum(mfx.constant_schedule(0.9)), mfx.ema_params(0.9)
        )
    )
    others = {"scale_by_adam.count", "momentum.count"}
    assert {name for name, is_like in found.items() if not is_like} == others


def test_codes_without_the_parameters_shape_are_left_out():
    found = marked(mfx.momentum(dtype=mfx.int8(block=2, min_size=0)))
    assert all(
        is_like == name.startswith("trace.codes")
        for name, is_like in found.items()
        if not name.endswith(".s")
    )


def test_the_function_gets_the_leaf_and_the_parameter():
    tx = mfx.partition(
        {"a": mfx.momentum(), "b": mfx.scale_by_adam()}, {"h.w": "a", "count": "b", "s": None}
    )
    seen: list[tuple[object, ...]] = []

    def look(leaf: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        seen.append((tuple(leaf.shape), tuple(param.shape)))
        return leaf + 1.0

    changed = tree.map_params(look, tx.init(PARAMS), PARAMS)
    assert sorted(seen) == [((3, 2), (3, 2)), *[((4,), (4,))] * 2]
    assert bool((tree.get(changed, "mu.count") == 1.0).all())


def test_map_params_in_the_order_of_optax_is_an_error_that_shows_the_order():
    tx: Any = mfx.momentum()
    state: Any = tx.init(PARAMS)
    with pytest.raises(
        TypeError,
        match=r"found Transform as the first argument, .* map_params\(function, state, params\)",
    ):
        tree.map_params(tx, state, PARAMS)


def _raising(*leaves: object) -> None:
    raise ValueError("an error of the function")


def test_map_of_trees_that_differ_says_which_and_how():
    with pytest.raises(
        ValueError, match=r"tree\.map: tree 3 .* tree 1: .*'b'.* take its part by name"
    ):
        tree.map(
            torch.add, {"w": torch.ones(1)}, {"w": 1.0}, {"w": torch.ones(1), "b": torch.ones(1)}
        )
    with pytest.raises(ValueError, match=r"^an error of the function$"):
        tree.map(_raising, {"w": 1.0}, {"w": 1.0})


def test_a_parameter_alone_and_parameters_that_are_absent():
    one = torch.zeros(3)
    state = tree.map_params(lambda leaf, param: leaf + 1, mfx.scale_by_adam().init(one), one)
    assert (int(state.count), state.mu.tolist()) == (0, [1.0] * 3)
    some = {"w": torch.zeros(2), "gone": None}
    assert (
        tree.map_params(lambda leaf, param: leaf + 1, mfx.momentum().init(some), some).trace["gone"]
        is None
    )


COMPONENTS = st.sampled_from(["up", "module", "weight", "0", "modules", "_orig_model"])
MODELS = st.lists(
    st.lists(COMPONENTS, min_size=1, max_size=4).map(".".join), min_size=1, max_size=5, unique=True
)


@given(MODELS, st.lists(st.sampled_from(["module", *sorted(WRAPPERS)]), max_size=4))
@example(["module.a", "b"], ["module"])
@example(["module"], ["module"])
def test_no_wrapper_around_a_model_changes_its_names(names, wrappers):
    wrapped = [".".join([*wrappers, name]) for name in names]
    assert list(unwrapped(wrapped).values()) == list(unwrapped(names).values())


@given(MODELS, st.data())
def test_no_wrapper_within_a_model_changes_its_names(names, data):
    def some(name: str) -> str:
        parts = name.split(".")
        place = data.draw(st.integers(0, len(parts)))
        return ".".join(
            [*parts[:place], data.draw(st.sampled_from(sorted(WRAPPERS))), *parts[place:]]
        )

    wrapped = [some(name) for name in names]
    assert list(unwrapped(wrapped).values()) == list(unwrapped(names).values())


@given(MODELS)
def test_names_without_wrappers_stay_and_stay_apart(names):
    plain = unwrapped(names)
    assert len(set(plain.values())) == len(names)
    assert unwrapped(plain.values()) == {name: name for name in plain.values()}
    if not all(name.startswith("module.") for name in names):
        assert plain == {name: name for name in names}


@pytest.mark.parametrize("name", ["_orig_mod", "module", "module."])
def test_a_name_of_nothing_else_stays(name: str):
    assert unwrapped([name]) == {name: name}


NAMES = ["mu/a.w", "mu/a.b", "mu/b.w", "nu/a.w", "count"]


def renamed(rename, names=NAMES, **more):
    found, wrong = new_names({name: name for name in names}, rename, **more)
    return list(found.values()), wrong


@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        ({"count": "steps"}, ["mu/a.w", "mu/a.b", "mu/b.w", "nu/a.w", "steps"]),
        ({"mu": "first"}, ["first/a.w", "first/a.b", "first/b.w", "nu/a.w", "count"]),
        ({"mu/": "x/mu/"}, ["x/mu/a.w", "x/mu/a.b", "x/mu/b.w", "nu/a.w", "count"]),
        ({"*/a.*": "*/c.*"}, ["mu/c.w", "mu/c.b", "mu/b.w", "nu/c.w", "count"]),
        ({"mu/a*": "a*"}, ["a.w", "a.b", "mu/b.w", "nu/a.w", "count"]),
        ({"mu": "first", "mu/a.w": "here"}, ["here", "first/a.b", "first/b.w", "nu/a.w", "count"]),
        ({"*": "x*", "mu/*": "y/*"}, ["y/a.w", "y/a.b", "y/b.w", "xnu/a.w", "xcount"]),
        ({}, NAMES),
    ],
)
def test_entries_mean_names_levels_and_patterns_and_the_most_exact_counts(rename, expected):
    assert renamed(rename) == (expected, [])


def test_levels_of_parameters_end_with_a_dot():
    assert renamed({"enc": "model.enc"}, ["enc.w", "encoder.w"], level=".") == (
        ["model.enc.w", "encoder.w"],
        [],
    )


@pytest.mark.parametrize(
    ("rename", "problem"),
    [
        ({"mi": "first"}, "'mi' matches no leaf in the checkpoint, which has"),
        ({"m": "first"}, "'m' matches no leaf"),
        ({"*/c.*": "*/d.*"}, "'*/c.*' matches no leaf"),
        ({"*/a.*": "*/d"}, "must have the same number"),
        ({"mu": "*"}, "must have the same number"),
        ({"count": "steps", "coun*": "x*"}, "'coun*' has no effect, because more exact entries"),
    ],
)
def test_an_entry_that_does_nothing_or_makes_no_sense_is_told(rename, problem):
    _, wrong = renamed(rename)
    assert len(wrong) == 1
    assert problem in wrong[0]


@pytest.mark.parametrize("rename", [{"mu": 1}, {1: "mu"}, lambda name: None])
def test_what_is_no_name_is_refused(rename):
    with pytest.raises(TypeError, match="rename"):
        renamed(rename)


@given(st.lists(st.text("ab./", min_size=1, max_size=6), min_size=1, max_size=4, unique=True))
def test_a_star_for_a_star_changes_nothing(names):
    assert renamed({"*": "*"}, names) == (names, [])
    assert renamed({"*": "x/*"}, names) == ([f"x/{name}" for name in names], [])


NAMED_PARAMS = {"blocks.0.q": torch.zeros(2, 2), "b": torch.zeros(2)}
STATE = mfx.chain(mfx.momentum(), mfx.scale_by_adam(), ("again", mfx.scale_by_adam())).init(
    NAMED_PARAMS
)

KEYS = st.sampled_from(("a", "b", "a.b", "c"))
TREES: st.SearchStrategy[Any] = st.recursive(
    st.integers() | st.none(),
    lambda below: (
        st.dictionaries(KEYS, below, max_size=3)
        | st.dictionaries(KEYS, below, max_size=3).map(OrderedDict)
        | st.lists(below, max_size=3)
        | st.builds(mfx.transforms.MomentumState, below)
    ),
    max_leaves=8,
)


@given(TREES, st.data())
def test_what_was_set_is_found_and_nothing_else_has_changed(tree: Any, data: st.DataObject):
    path = data.draw(st.sampled_from(mfx.tree.names(tree) or [""]))

    if len(mfx.tree.get_all(tree, path)) != 1 or path not in mfx.tree.get_all(tree, path):
        return  # an empty container, two keys with the same text, or the end of a longer path
    if isinstance(mfx.tree.get(tree, path), dict | list | tuple):
        return
    before = mfx.tree.leaves(tree)
    changed = mfx.tree.set(tree, path, "new")
    assert mfx.tree.get(changed, path) == "new"
    assert mfx.tree.same_structure(changed, tree)
    differing = [
        (a, b) for a, b in zip(before, mfx.tree.leaves(changed), strict=True) if a is not b
    ]
    assert [b for _, b in differing] == ["new"]
    assert mfx.tree.leaves(mfx.tree.set(changed, path, differing[0][0])) == before


def test_a_name_may_be_any_end_of_a_path():
    q = STATE["momentum"].trace["blocks.0.q"]
    assert mfx.tree.get(STATE, "momentum.trace.blocks.0.q") is q
    assert mfx.tree.get(STATE, "trace.blocks.0.q") is q
    assert mfx.tree.get(STATE, "again") is STATE["again"]
    assert mfx.tree.get(STATE, "again.mu") is STATE["again"].mu
    assert list(mfx.tree.get_all(STATE, "0.q"))[1:3] == [
        "again.nu.blocks.0.q",
        "momentum.trace.blocks.0.q",
    ]
    assert mfx.tree.get_all(STATE, "omentum") == {}


def test_a_type_selects_nodes():
    assert mfx.tree.get(STATE, mfx.transforms.MomentumState) is STATE["momentum"]
    assert list(mfx.tree.get_all(STATE, mfx.transforms.AdamState)) == ["again", "scale_by_adam"]
    assert mfx.tree.get(STATE["again"], mfx.transforms.AdamState) is STATE["again"]


def test_a_whole_subtree_can_be_replaced_and_the_transform_goes_on():
    tx = mfx.chain(mfx.momentum(), mfx.scale_by_adam())
    state = tx.init(NAMED_PARAMS)
    other = mfx.tree.set(
        state,
        "scale_by_adam",
        mfx.scale_by_adam().init(NAMED_PARAMS)._replace(count=torch.tensor(9)),
    )
    assert int(tx.update(NAMED_PARAMS, other)[1]["scale_by_adam"].count) == 10
    assert int(state["scale_by_adam"].count) == 0


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nu.b", r"'nu.b' matches 2 nodes: again.nu.b, scale_by_adam.nu.b; give a longer path"),
        (mfx.transforms.AdamState, "AdamState matches 2 nodes: again, scale_by_adam"),
        (
            "momentum.trce",
            "no node of the tree matches 'momentum.trce'; did you mean momentum.trace",
        ),
        (mfx.transforms.LionState, "no node of the tree matches LionState"),
    ],
)
def test_none_and_several_are_errors_that_say_where(where: Any, message: str):
    with pytest.raises(KeyError, match=message):
        mfx.tree.get(STATE, where)
    with pytest.raises(KeyError, match=message):
        mfx.tree.set(STATE, where, None)


def test_a_list_in_place_of_a_tuple_is_described_by_its_length():
    assert (
        difference({"a": [1]}, {"a": (1,)}) == "found list of length 1, expected tuple of length 1"
    )
    assert difference([], ()) == "found list of length 0, expected tuple of length 0"


def test_two_classes_of_one_name_are_named_as_such():
    # As by importlib.reload.
    before, after = (NamedTuple("State", [("trace", torch.Tensor)]) for _ in range(2))
    text = "found State of 'trace', expected State of 'trace' of another class with this name: was its module reloaded?"
    assert difference(before(torch.ones(1)), after(torch.ones(1))) == text


def test_a_structure_under_a_compiler_names_the_container_that_differs():
    _, structure = _traced_flatten({"a": 1})
    with pytest.raises(ValueError, match=r"^expected dict of \('a',\), found list$"):
        structure.flatten_up_to([1])


@dataclass
class Unregistered:
    """A container that only dataclasses know."""

    weight: Any


def test_an_unregistered_container_is_an_error_that_shows_how_to_register_it():
    node = Unregistered(torch.ones(2))
    advice = r"found Unregistered; .* optree\.register_pytree_node\(\.\.\., namespace=muonfx\.tree\.NAMESPACE\)"
    with pytest.raises(TypeError, match=advice):
        mfx.momentum().init(node)
    optree.register_pytree_node(
        Unregistered,
        lambda node: ((node.weight,), None, ("weight",)),
        lambda metadata, children: Unregistered(*children),
        namespace=mfx.tree.NAMESPACE,
    )
    try:
        assert tree.names(mfx.momentum().init(node)) == ["trace.weight"]
    finally:
        optree.unregister_pytree_node(Unregistered, namespace=mfx.tree.NAMESPACE)


def test_names_are_in_the_order_of_leaves_and_not_of_the_pytree_of_torch():
    """As the page on states says."""
    values = {"b": torch.zeros(1), "a": torch.ones(2)}
    named = dict(zip(tree.names(values), tree.leaves(values), strict=True))
    assert all(named[name] is leaf for name, leaf in values.items())
    assert [len(leaf) for leaf in torch_pytree.tree_leaves(values)] == [1, 2]
    assert [len(leaf) for leaf in tree.leaves(values)] == [2, 1]


def test_torch_loads_a_saved_state_only_without_weights_only(tmp_path: Path):
    """As the page on states says."""
    state = mfx.adamw().init({"w": torch.ones(2)})
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(UnpicklingError, match="weights_only"):
        torch.load(tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=False)
    assert tree.same_structure(loaded, state)
