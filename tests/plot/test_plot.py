"""`muonfx.plot`: what is drawn equals the numbers, on the axes that are given."""

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import pytest
import torch
from matplotlib.collections import PathCollection

import muonfx as mfx

mpl.use("Agg")
from matplotlib import pyplot as plt


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    plt.close("all")


def bars(ax) -> list[tuple[int, float, float]]:
    """Row, start and width of every bar."""
    return [
        (round(patch.get_y() + patch.get_height() / 2), patch.get_x(), patch.get_width())
        for patch in ax.patches
        if hasattr(patch, "get_width")
    ]


def sums(ax, rows: int) -> list[float]:
    found = [0.0] * rows
    for row, start, width in bars(ax):
        assert start == pytest.approx(found[row])  # each begins where the one before ends
        found[row] += width
    return found


# --------------------------------------------------------------------------------------------------------------- runs


def test_a_band_is_the_mean_and_the_range_of_its_runs():
    runs = torch.tensor([[1.0, 0.5], [2.0, 0.25], [3.0, 0.75]])
    ax = mfx.plot.plot_band(runs, [10, 20], label="Muon")
    (line,) = ax.lines
    assert line.get_label() == "Muon"
    assert [list(data) for data in line.get_data()] == [[10, 20], [2.0, 0.5]]
    corners = {tuple(corner) for corner in ax.collections[0].get_paths()[0].vertices}
    assert corners == {(10, 1.0), (10, 3.0), (20, 0.25), (20, 0.75)}


# -------------------------------------------------------------------------------------------------------------- polar


@pytest.mark.parametrize("name", ["keller", "cubic"])
def test_a_polynomial_is_drawn_with_the_band_of_its_values(name: str):
    ax = mfx.plot.plot_polynomial(name)
    x, y = (torch.tensor(list(data), dtype=torch.float64) for data in ax.lines[0].get_data())
    assert (x[0].item(), x[-1].item()) == pytest.approx((1e-4, 1.0))
    torch.testing.assert_close(y, mfx.polar.scalar_polynomial(name, x))
    found = mfx.polar.band(name, 0.01)
    edges = ax.collections[0].get_paths()[0].vertices
    assert (edges[:, 1].min(), edges[:, 1].max()) == pytest.approx((found.minimum, found.maximum))
    assert edges[:, 0].min() == pytest.approx(0.01)
    assert ax.lines[0].get_label() == f"{name}: {found.minimum:.2f} to {found.maximum:.2f}"


def test_a_spectrum_is_the_singular_values():
    before = torch.randn(24, 40, generator=torch.Generator().manual_seed(1)) * 1e-3
    after = mfx.polar.orthogonalize(before)
    ax = mfx.plot.plot_spectrum(before, after.requires_grad_())
    sizes = torch.linalg.svdvals(before.double())
    assert list(ax.lines[0].get_ydata()) == pytest.approx((sizes / sizes[0]).tolist())
    assert list(ax.lines[1].get_ydata()) == pytest.approx(
        torch.linalg.svdvals(after.double()).tolist()
    )
    assert list(ax.lines[1].get_xdata()) == list(range(1, 25))
    assert [text.get_text() for text in ax.texts] == ["before, over its largest", "after"]


# ------------------------------------------------------------------------------------------------------------- states


def test_update_rms_is_what_the_monitors_measured():
    params = {"a": torch.ones(4, 2), "b": torch.ones(3), "idle": torch.ones(2)}
    grads = {
        "a": torch.full((4, 2), 3.0),
        "b": torch.tensor([0.0, 3.0, 4.0]),
        "idle": torch.zeros(2),
    }
    tx = mfx.chain(
        mfx.monitor("grads", ("rms", "norm"), by_leaf=True),
        mfx.scale(0.5),
        mfx.monitor("steps", ("rms",), by_leaf=True),
    )
    _, state = tx.update(grads, tx.init(params), params)
    ax = mfx.plot.plot_update_rms(state)
    rows = [label.get_text() for label in ax.get_yticklabels()]
    assert rows == ["a", "b", "idle"]
    for line, factor in zip(ax.lines, (1.0, 0.5), strict=True):
        drawn = {rows[int(y)]: x for x, y in zip(*line.get_data(), strict=True)}
        # Zero has no place here.
        assert drawn == pytest.approx({"a": 3.0 * factor, "b": (25 / 3) ** 0.5 * factor})
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["grads", "steps"]


def test_memory_bars_add_up_to_the_bytes():
    params = {f"w{i}": torch.zeros(64, 32 + i) for i in range(3)}
    parts = {
        "muon": mfx.chain(mfx.momentum(dtype=torch.bfloat16), mfx.orthogonalize()),
        "adamw": mfx.scale_by_adam(),
    }
    state = mfx.partition(
        parts, {name: "muon" if name == "w0" else "adamw" for name in params}
    ).init(params)
    found = mfx.summary(state)
    for what in (state, found):
        ax = mfx.plot.plot_state_memory(what)
        rows = [label.get_text() for label in ax.get_yticklabels()]
        scale = {"bytes": 1, "KiB": 1024, "MiB": 1024**2}[ax.get_xlabel().split(",")[0]]
        drawn = sums(ax, len(rows))
        assert sum(drawn) * scale == pytest.approx(found.nbytes)
        assert rows == ["adamw", "muon.momentum.trace.w0"]
        assert drawn[1] * scale == pytest.approx(64 * 32 * 2)
    assert [text.get_text().split(",")[0] for text in ax.get_legend().get_texts()] == list(
        found.by_dtype()
    )


# -------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("size", [3, 40])
def test_a_plan_is_drawn_as_its_work_by_rank(size: int):
    params = {
        "up": torch.zeros(256, 64),
        "down": torch.zeros(64, 256),
        "square": torch.zeros(64, 64),
    }
    layout = mfx.sharding.zero(params, size, partition="flat")
    plan = mfx.sharding.plan_for(
        mfx.muon(0.1, orthogonalize=mfx.orthogonalize(dtype=torch.float32)), layout
    )
    ax = mfx.plot.plot_plan(plan)
    scale = {"kFLOP": 1e3, "MFLOP": 1e6, "GFLOP": 1e9}[ax.get_xlabel().split(", ")[1].split(" ")[0]]
    assert [width * scale for width in sums(ax, size)] == pytest.approx(plan.flops)
    assert f"the most is {plan.balance:.2f} of it" in ax.get_xlabel()
    assert ax.lines[0].get_xdata()[0] * scale == pytest.approx(sum(plan.flops) / size)
    if size == 3:
        ends = [text.get_text() for text in ax.texts if text.get_text().startswith("sends")]
        assert len(ends) == 3


# ------------------------------------------------------------------------------------------------- errors and style


def plan_without_matrices() -> object:
    return mfx.sharding.plan_for(mfx.adamw(0.1), mfx.sharding.zero({"w": torch.zeros(8, 8)}, 2))


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: mfx.plot.plot_plan(plan_without_matrices()), "no matrices to compute"),
        (
            lambda: mfx.plot.plot_update_rms(mfx.momentum().init({"w": torch.ones(2)})),
            'no "rms" of a monitor',
        ),
        (lambda: mfx.plot.plot_state_memory({}), "nothing to draw"),
        (
            lambda: mfx.plot.plot_spectrum(torch.zeros(2, 3, 4)),
            r"before must be one matrix.*, found shape \(2, 3, 4\)",
        ),
        (lambda: mfx.plot.plot_band([0.5, 0.4]), r"runs must be a table .* found shape \(2,\)"),
    ],
)
def test_what_cannot_be_drawn_is_named(draw: Callable[[], object], message: str):
    with pytest.raises(ValueError, match=message):
        draw()


def test_the_backend_that_the_first_picture_loads_stays_interactive():
    """As in a notebook, where only figures of an interactive backend are shown."""
    with mfx.plot.style():
        plt.ion()
    try:
        assert plt.isinteractive()
    finally:
        plt.ioff()


def test_axes_that_are_given_are_drawn_on_and_keep_their_style():
    before = dict(mpl.rcParams)
    _, ax = plt.subplots(facecolor="white")
    assert mfx.plot.plot_spectrum(torch.eye(3), ax=ax) is ax
    assert ax.xaxis.label.get_color() == before["axes.labelcolor"]
    assert len(plt.get_fignums()) == 1
    mfx.plot.plot_spectrum(torch.eye(3))
    assert len(plt.get_fignums()) == 2
    assert dict(mpl.rcParams) == before


def test_the_pictures_of_the_guide_are_those_that_its_script_draws(tmp_path: Path):
    script = Path(__file__).resolve().parents[2] / "scripts" / "looking_pictures.py"
    drawn = runpy.run_path(str(script))["main"](tmp_path)
    page = (script.parents[1] / "docs" / "looking.md").read_text(encoding="utf-8")

    def words(path: Path) -> list[str]:
        return [
            "".join(node.itertext())
            for node in ElementTree.parse(path).iter()
            if node.tag.endswith("}text")
        ]

    assert len(drawn) == 5
    for path in drawn:
        kept = script.parents[1] / "docs" / "assets" / path.name
        assert words(path) == words(kept), (
            f"{kept.name} is not what the library draws now: python {script}"
        )
        assert f"assets/{path.name}" in page


# ------------------------------------------------------------------------------------------------ studies and schedules


def rows_of(table: dict[str, dict[float, list[list[float]]]]) -> list[dict]:
    """Rows as of `muonfx.study`: losses by optimizer, rate and seed, reported at the steps 10, 20, ..."""
    return [
        {"optimizer": name, "rate": rate, "seed": seed, "step": 10 * (index + 1), "loss": loss}
        for name, by_rate in table.items()
        for rate, by_seed in by_rate.items()
        for seed, losses in enumerate(by_seed)
        for index, loss in enumerate(losses)
    ]


STUDY = rows_of(
    {
        "muon": {
            0.1: [[3.0, 1.0], [3.0, 2.0]],
            0.01: [[4.0, 3.0], [4.0, 3.5]],
            1.0: [[5.0, float("nan")], [5.0, 0.1]],
        },
        "adamw": {0.1: [[3.5, 2.5], [2.0, 1.8]]},
    }
)


def band_of(ax, index: int) -> tuple[float, float]:
    """The lowest and the highest value of a band."""
    ys = ax.collections[index].get_paths()[0].vertices[:, 1]
    return ys.min(), ys.max()


def test_losses_are_drawn_at_the_best_rate_of_each_optimizer():
    ax = mfx.plot.plot_losses(STUDY)
    assert [line.get_label() for line in ax.lines] == ["muon, rate 0.1", "adamw, rate 0.1"]
    assert [line.get_ydata().tolist() for line in ax.lines] == [[3.0, 1.5], [2.75, 2.15]]
    assert ax.lines[0].get_xdata().tolist() == [10, 20]
    assert band_of(ax, 0) == (1.0, 3.0)
    assert (
        len({line.get_marker() for line in ax.lines} | {line.get_color() for line in ax.lines}) == 4
    )


def test_losses_over_rates_leave_out_rates_that_diverged():
    ax = mfx.plot.plot_rates(STUDY)
    assert ax.lines[0].get_xdata().tolist() == [0.01, 0.1]  # sorted
    assert ax.lines[0].get_ydata().tolist() == [3.25, 1.5]
    assert ax.get_ylabel() == "loss after 20 steps"
    assert ax.get_ylim()[1] < 5


def test_rates_that_diverged_have_crosses_and_a_best_rate_at_the_edge_is_named():
    falling = rows_of({"sgd": {rate: [[3.0, 3 - rate]] * 2 for rate in (0.01, 0.1, 1.0)}})
    ax = mfx.plot.plot_rates([*STUDY, *falling])
    assert [line.get_label() for line in ax.lines] == ["muon", "adamw", "sgd (best at the edge)"]
    crosses = [
        drawn.get_offsets()[:, 0].tolist()
        for drawn in ax.collections
        if isinstance(drawn, PathCollection)
    ]
    assert crosses == [[1.0], [], []]  # of muon, adamw and sgd


def test_each_optimizer_has_its_own_look():
    rows = rows_of({name: {0.1: [[1.0]]} for name in "abcdefghijklmnopqrstuvwx"})
    lines = mfx.plot.plot_rates(rows).lines
    assert (
        len({(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines}) == 24
    )
    assert {line.get_linestyle() for line in lines[:6]} == {"-"}


def test_a_rate_that_is_much_too_large_does_not_hide_the_others():
    ax = mfx.plot.plot_rates([*STUDY, *rows_of({"muon": {10.0: [[5.0, 1e9], [5.0, 1e9]]}})])
    assert ax.get_ylim()[1] == 4.0  # the median of the losses at step 10


def test_runs_that_all_diverge_are_named_and_drawn_without_points():
    rows = rows_of({"muon": {0.1: [[float("nan"), float("inf")]]}})
    ax = mfx.plot.plot_rates(rows)
    assert not ax.lines
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["muon (diverged)"]
    with pytest.raises(ValueError, match="target: no optimizer reaches a loss of 1 "):
        mfx.plot.plot_steps_to(rows, 1.0)


def test_rows_of_studies_with_other_steps_are_refused_and_in_any_order_drawn():
    with pytest.raises(
        ValueError, match=r"rows: muon at rate 0\.1 has no report of seed 7 at step 20, expected"
    ):
        mfx.plot.plot_losses([*STUDY, {**STUDY[0], "seed": 7}])
    expected = [line.get_ydata().tolist() for line in mfx.plot.plot_losses(STUDY).lines]
    by_name = sorted(STUDY, key=lambda row: (row["optimizer"] != "muon", -row["step"]))
    assert [line.get_ydata().tolist() for line in mfx.plot.plot_losses(by_name).lines] == expected


def test_steps_to_a_loss_are_drawn_where_each_seed_reaches_it():
    ax = mfx.plot.plot_steps_to(STUDY, 2.0)
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["muon", "adamw (not reached)"]  # one seed of adamw does not reach it
    assert len(ax.lines[1].get_xdata()) == 0
    assert (ax.lines[0].get_xdata().tolist(), ax.lines[0].get_ydata().tolist()) == ([0.1], [20.0])
    with pytest.raises(
        ValueError, match=r"target: no optimizer reaches a loss of 0\.05 .*one seed is 0\.1"
    ):
        mfx.plot.plot_steps_to(STUDY, 0.05)


@pytest.mark.parametrize("draw", [mfx.plot.plot_losses, mfx.plot.plot_rates])
def test_the_validation_loss_is_drawn_if_there_is_one(draw: Callable):
    rows = [row | {"validation_loss": 7.0} for row in STUDY]
    assert set(draw(rows).lines[0].get_ydata()) == {7.0}
    assert 7.0 not in draw(STUDY).lines[0].get_ydata()
    with pytest.raises(ValueError, match="rows: found none"):
        draw([])


def test_a_rate_at_which_one_seed_diverged_has_a_cross_and_is_not_the_best():
    assert [row["loss"] for row in STUDY if row["rate"] == 1.0 and row["seed"] == 1][-1] == 0.1
    ax = mfx.plot.plot_rates(STUDY)
    crosses = [
        drawn.get_offsets()[:, 0].tolist()
        for drawn in ax.collections
        if isinstance(drawn, PathCollection)
    ]
    assert crosses == [[1.0], []]
    assert 1.0 not in ax.lines[0].get_xdata()
    assert mfx.plot.plot_losses(STUDY).lines[0].get_label() == "muon, rate 0.1"


@pytest.mark.parametrize(
    "draw",
    [mfx.plot.plot_losses, mfx.plot.plot_rates, lambda rows: mfx.plot.plot_steps_to(rows, 3.0)],
)
def test_a_missing_seed_is_warned_of_and_incomplete_rows_are_named(draw: Callable):
    without_a_seed = [row for row in STUDY if (row["rate"], row["seed"]) != (0.01, 1)]
    with pytest.warns(
        UserWarning, match=r"rows: muon at rate 0\.01 has no rows of seed 1, which others have"
    ):
        draw(without_a_seed)
    with_validation = [row | {"validation_loss": 7.0} for row in STUDY]
    with pytest.raises(
        ValueError,
        match="rows: found a validation_loss in 16 of 32 rows, expected it in all or none",
    ):
        draw([*STUDY, *with_validation])
    without_a_step = {key: value for key, value in STUDY[2].items() if key != "step"}
    with pytest.raises(ValueError, match="rows: row 2 has no 'step', expected the keys of a row"):
        draw([*STUDY[:2], without_a_step])


def test_rates_with_another_last_step_are_refused():
    shorter = [row for row in STUDY if row["rate"] != 0.01 or row["step"] == 10]
    with pytest.raises(ValueError, match=r"rows: muon at rate 0\.01 ends at step 10, others at 20"):
        mfx.plot.plot_rates(shorter)


def test_a_schedule_is_drawn_step_by_step():
    schedule = mfx.warmup_cosine_decay_schedule(0.1, 3, total_steps=10)
    ax = mfx.plot.plot_schedule(schedule, 10, label="warmup")
    assert ax.lines[0].get_ydata().tolist() == [
        float(schedule(torch.tensor(step))) for step in range(10)
    ]
    assert ax.get_legend() is not None
    with pytest.raises(ValueError, match="steps: found 0"):
        mfx.plot.plot_schedule(schedule, 0)
