"""Which two learning rates of ``mfx.Muon`` to try first, given the one rate at which AdamW trains best.

There are four settings: training from scratch and fine-tuning, each for two model sizes. The model, the text and the
batches are those of ``examples/train_gpt.py``. Fine-tuning continues from a model that AdamW trained on the same text,
and its text is English: the topics of Python's ``help``. A fifth setting only checks the rule on another kind of model:
a vision transformer, whose weights start with the usual standard deviation of 0.02. (The GPT's embedding has 1.)

The rule and how it is chosen were fixed before any run:

1. In each setting, search the best single rate of AdamW, `a`, over powers of the square root of two, with one seed.
2. Train ``mfx.Muon`` with every pair ``(m * a, k * a)``, m in `MATRIX_FACTORS` for hidden matrices and k in
   `REST_FACTORS` for all other parameters. If the best pair is at an edge, neighbors are added until it is not. On
   the larger model only pairs with a regret of at most `DISTANT` on the smaller one are tried, with their neighbors.
3. The *regret* of a pair is its loss minus that of the best pair in the same setting. The rule is the pair whose
   largest regret is least: over the two sizes from scratch, over the two sizes of fine-tuning, and over all four.
   One pair is the rule for both if in both its largest regret is at most `ONE_RULE` above that of the separate pair.
4. To try next: the pair that, together with those before it, leaves the least largest regret.
5. Pairs near the best, the rule's, AdamW's best rates and the rates of earlier pages are repeated with three seeds.

Run ``python -m benchmarks.rates``. Finished runs are kept in ``results/rates_quality.json`` and not repeated. A run
takes about ten seconds of one thread.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import muonfx as mfx
from benchmarks.digits import Digits, ViT
from benchmarks.measure import RESULTS, machine

# The examples are scripts, not a package.
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from gpt import GPT
from text import Corpus, is_validation, read_corpus

PATH = RESULTS / "rates_quality.json"
WEIGHTS = Path(__file__).parents[1] / "runs" / "rates"
"""Folder of the pretrained weights, which are trained again if they are missing, and of the lock of the results."""

SEEDS = (0, 1, 2)
DEPTH, CONTEXT, BATCH = 4, 128, 8
VIT_BATCH = 32
WIDTHS = {"GPT, 0.23 M": 64, "GPT, 0.85 M": 128}
SMALL, LARGE = WIDTHS
VIT = "ViT, 0.09 M"
SCRATCH, FINETUNE = "from scratch", "fine-tuning"
STEPS = {SCRATCH: 200, FINETUNE: 40}

PRETRAINING_STEPS = 300
PRETRAINING_SEED = 1000
PRETRAINING_RATES = (0.005, 0.06)
"""AdamW's tuned rates in examples/README.md."""

MATRIX_FACTORS = (1, 2)
REST_FACTORS = (1, 2, 4, 8)
ONE_RULE = 0.01
"""Nats. About half the difference between two seeds."""

DISTANT = 0.075
"""Nats. A pair with a larger regret on the smaller model is not tried on the larger one."""

ADAMW, TWO_RATES, MUON = "AdamW, one rate", "AdamW, two rates", "mfx.Muon"
ADAMW_START = {SCRATCH: 0.005, FINETUNE: 0.001}

EARLIER = {
    "the former pages of engines": (0.02, 3e-4),
    "the former README": (0.01, 0.01),
    "the former default": (0.002, 0.002),
}
"""Rates that the documentation gave before this study: of hidden matrices, of all other parameters."""


RULES: dict[str, tuple[float, float]] = {SCRATCH: (1, 4), FINETUNE: (4, 2)}
"""Factors of AdamW's rate, for hidden matrices and for the rest. A test derives them from the results."""

LARGEST = 0.01
"""The documentation gives no larger rate for matrices under the default scaling."""


@dataclass(frozen=True)
class Setting:
    """A task and a model size."""

    task: str
    size: str

    def __str__(self) -> str:
        return f"{self.task}, {self.size}"


SETTINGS = (
    Setting(SCRATCH, SMALL),
    Setting(FINETUNE, SMALL),
    Setting(FINETUNE, LARGE),
    Setting(SCRATCH, LARGE),
)
"""The settings that the rule is chosen from."""

CHECK = Setting(SCRATCH, VIT)


@cache
def code() -> Corpus:
    """Return the source of Python's standard library."""
    return read_corpus(None)


@cache
def prose() -> Corpus:
    """Return the topics of Python's ``help``; a tenth of them, by a hash of their names, is for validation."""
    texts = {False: bytearray(), True: bytearray()}
    names: dict[bool, list[str]] = {False: [], True: []}
    for name in sorted(topics):
        texts[is_validation(name)] += topics[name].encode()
        names[is_validation(name)].append(name)
    digest = hashlib.sha256(texts[False] + b"\0" + texts[True]).hexdigest()[:16]
    train, validation = (
        torch.frombuffer(texts[split], dtype=torch.uint8) for split in (False, True)
    )
    return Corpus(train, validation, names[False], names[True], digest)


@cache
def digits() -> Digits:
    """Return the images of the vision transformer."""
    return Digits()


def data_of(setting: Setting) -> Corpus | Digits:
    """Return the text or the images of a setting."""
    if setting.size == VIT:
        return digits()
    return code() if setting.task == SCRATCH else prose()


def new_model(size: str, seed: int) -> nn.Module:
    """Return a model with the initial weights of a seed."""
    if size == VIT:
        return ViT(width=48, depth=3, seed=seed)
    return GPT(width=WIDTHS[size], depth=DEPTH, context=CONTEXT, seed=seed)


@cache
def model_and_loss(size: str) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """Return a model and its loss. Every run of this size loads its initial weights into this model."""
    model = new_model(size, 0)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    if size == VIT:
        return model, loss
    return model, torch.compile(loss)


def initial_weights(setting: Setting, seed: int) -> dict[str, Tensor]:
    """Return the weights from which a run starts."""
    if setting.task == SCRATCH:
        return new_model(setting.size, seed).state_dict()
    path = WEIGHTS / f"width-{WIDTHS[setting.size]}.pt"
    if not path.exists():
        pretrain(setting.size, path)
    return torch.load(path, weights_only=True)


def pretrain(size: str, path: Path) -> None:
    """Train a GPT on code with AdamW and save its weights."""
    model, _ = model_and_loss(size)
    model.load_state_dict(new_model(size, PRETRAINING_SEED).state_dict())
    optimizer = make_optimizer(TWO_RATES, model, *PRETRAINING_RATES)
    fit(size, optimizer, code(), PRETRAINING_STEPS, PRETRAINING_SEED)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)


def make_optimizer(
    contender: str, model: nn.Module, matrix_rate: float, rest_rate: float
) -> torch.optim.Optimizer:
    """Return the optimizer of a contender. AdamW with one rate has twice the same rate."""
    if contender == MUON:
        # Products in fp32, so that the result does not depend on the products that a machine is fast at.
        polar = mfx.orthogonalize(dtype=torch.float32)
        return mfx.Muon(
            model, lr=matrix_rate, adamw_lr=rest_rate, weight_decay=0.1, orthogonalize=polar
        )
    labels = mfx.default_labels(model)
    matrices = [param for name, param in model.named_parameters() if labels[name] == "muon"]
    rest = [param for name, param in model.named_parameters() if labels[name] != "muon"]
    groups = [{"params": matrices, "lr": matrix_rate}, {"params": rest, "lr": rest_rate}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1)


def rate_factor(step: int, steps: int) -> float:
    """Return the factor of the schedule: linear warmup over a twentieth, constant, linear decay over the second half.

    >>> [rate_factor(step, 40) for step in (0, 1, 20, 30)]
    [0.5, 1.0, 1.0, 0.5]
    """
    warmup = (step + 1) / (steps / 20)
    decay = (steps - step) / (steps / 2)
    return min(1.0, warmup, decay)


def fit(
    size: str, optimizer: torch.optim.Optimizer, data: Corpus | Digits, steps: int, seed: int
) -> None:
    """Train the model of this size in place."""
    model, loss_of = model_and_loss(size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, steps))
    batch = VIT_BATCH if size == VIT else BATCH
    for step in range(steps):
        inputs, targets = data.batch(seed, step, batch, CONTEXT)
        loss_of(inputs, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


@torch.no_grad()
def validation_loss(model: nn.Module, data: Corpus | Digits) -> float:
    """Return the mean loss of 128 windows of the validation text, or of all validation images."""
    losses = []
    for inputs, targets in data.validation_batches(8, 16, CONTEXT):
        losses.append(F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).item())
    return fmean(losses)


def train(
    setting: Setting, contender: str, matrix_rate: float, rest_rate: float, seed: int
) -> float:
    """Train one model and return its validation loss."""
    torch.manual_seed(seed)
    model, _ = model_and_loss(setting.size)
    model.load_state_dict(initial_weights(setting, seed))
    optimizer = make_optimizer(contender, model, matrix_rate, rest_rate)
    data = data_of(setting)
    fit(setting.size, optimizer, data, STEPS[setting.task], seed)
    return validation_loss(model, data)


def rounded(rate: float) -> float:
    """Return a rate with three significant digits.

    >>> rounded(0.005 * 2**0.5)
    0.00707
    """
    return float(f"{rate:.3g}")


Pair = tuple[float, float]
"""Factors of AdamW's rate: for hidden matrices, for all other parameters."""


def rates_of(pair: Pair, adamw_rate: float) -> Pair:
    """Return the two rates of a pair of factors.

    >>> rates_of((2, 8), 0.00707)
    (0.0141, 0.0566)
    """
    return rounded(pair[0] * adamw_rate), rounded(pair[1] * adamw_rate)


class Study:
    """The finished runs, in memory and in a file, and the runs that are still needed.

    To read the results only, give ``check_texts=False``: the texts are then not compared with those of this machine.
    """

    def __init__(
        self, path: Path = PATH, deadline: float = float("inf"), *, check_texts: bool = True
    ) -> None:
        self.path, self.deadline = path, deadline
        self.texts: dict[str, str] = {}
        if check_texts:
            self.texts = {SCRATCH: code().digest, FINETUNE: prose().digest}
        self.rows: list[dict[str, Any]] = []
        self.adamw_rates: dict[str, float] = {}
        self.read()
        if check_texts and self.rows:
            self.require_texts()

    def require_texts(self) -> None:
        """Raise SystemExit if the results are those of other texts."""
        texts = json.loads(self.path.read_text())["texts"]
        if texts != self.texts:
            raise SystemExit(
                f"{self.path}: texts: found {texts}, expected {self.texts}: the texts are part of the Python "
                f"installation; move the file away, or use the Python that wrote it"
            )

    def read(self) -> None:
        """Read the results that the file has; another process may have added some."""
        if self.path.exists():
            results = json.loads(self.path.read_text())
            self.rows = results["rows"]
            self.adamw_rates = results["adamw_rates"]

    def add(
        self, row: dict[str, Any] | None = None, adamw_rates: dict[str, float] | None = None
    ) -> None:
        """Add a result to the file; the previous file stays intact if this fails."""
        WEIGHTS.mkdir(parents=True, exist_ok=True)
        with (WEIGHTS / "results.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may share the runs
            self.read()
            if row is not None:
                self.rows.append(row)
            self.adamw_rates.update(adamw_rates or {})
            results = {
                "machine": machine(),
                "texts": self.texts,
                "adamw_rates": self.adamw_rates,
                "rows": self.rows,
            }
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text(json.dumps(results, indent=1) + "\n")
            temporary.replace(self.path)

    def loss(
        self, setting: Setting, contender: str, matrix_rate: float, rest_rate: float, seed: int = 0
    ) -> float:
        """Return the loss of a run, which is trained if it is missing."""
        lr, rest_lr = rates_of((matrix_rate, rest_rate), 1.0)
        run = {
            "setting": str(setting),
            "contender": contender,
            "lr": lr,
            "rest_lr": rest_lr,
            "seed": seed,
        }
        for row in self.rows:
            if row.items() >= run.items():
                return float(row["loss"])
        if time.monotonic() > self.deadline:
            raise SystemExit("the time is over; the same command continues")
        loss = train(setting, contender, lr, rest_lr, seed)
        self.add(run | {"loss": loss})
        print(*run.values(), f"{loss:.4f}", flush=True)
        return loss

    def pair_loss(self, setting: Setting, pair: Pair, seed: int = 0) -> float:
        """Return the loss of ``mfx.Muon`` at multiples of AdamW's best rate."""
        rate = self.adamw_rates[str(setting)]
        return self.loss(setting, MUON, pair[0] * rate, pair[1] * rate, seed)


def search_adamw(study: Study, setting: Setting) -> None:
    """Search AdamW's best single rate over powers of two, then over those of its square root.

    On the larger model the search starts from the best rate of the smaller one, with the square root.
    """

    def loss_at(rate: float) -> float:
        return study.loss(setting, ADAMW, rate, rate)

    if setting.size == LARGE:
        best = climb(study.adamw_rates[str(Setting(setting.task, SMALL))], 2**0.5, loss_at)
    else:
        best = climb(ADAMW_START[setting.task], 2, loss_at)
        best = min((best, best * 2**0.5, best / 2**0.5), key=loss_at)
    study.add(adamw_rates={str(setting): rounded(best)})


def climb(rate: float, ratio: float, loss_at: Callable[[float], float]) -> float:
    """Multiply or divide a rate by a ratio as long as the loss falls, and return the best rate.

    >>> climb(1.0, 2.0, lambda rate: abs(rate - 5))
    4.0
    """
    for factor in (ratio, 1 / ratio):
        while loss_at(rate * factor) < loss_at(rate):
            rate = rate * factor
    return rate


def neighbors(pair: Pair) -> list[Pair]:
    """Return the pairs with one factor doubled or halved.

    >>> neighbors((2, 8))
    [(4, 8), (1.0, 8), (2, 16), (2, 4.0)]
    """
    m, k = pair
    return [(2 * m, k), (m / 2, k), (m, 2 * k), (m, k / 2)]


GRID: tuple[Pair, ...] = tuple((m, k) for m in MATRIX_FACTORS for k in REST_FACTORS)
"""The pairs that are tried first."""

EQUAL: tuple[Pair, ...] = ((1, 1), (2, 2))
"""One rate for all parameters, which is what ``adamw_lr=None`` means; the default rate follows from these."""

PAIRS: tuple[Pair, ...] = tuple((m, k) for m in (0.5, 1, 2, 4, 8) for k in (0.5, 1, 2, 4, 8, 16))
"""The pairs that a rule may have: those of the grid and their neighbors."""


def search_muon(study: Study, setting: Setting) -> None:
    """Train with the pairs of the grid, then with neighbors of the best pair until all its neighbors are known."""
    pairs = list(GRID)
    if setting.size == LARGE:
        regret = regrets(study, Setting(setting.task, SMALL), (0,))
        pairs = [pair for pair in regret if regret[pair] <= DISTANT or pair in EQUAL]
    while True:
        best = min(pairs, key=lambda pair: study.pair_loss(setting, pair))
        missing = [pair for pair in neighbors(best) if pair not in pairs]
        if not missing:
            return
        pairs += missing


def search_two_rates(study: Study, setting: Setting) -> None:
    """Search AdamW's two rates over powers of two, one after the other, starting from four times `a` for the rest."""
    rate = study.adamw_rates[str(setting)]
    best: Pair = (1, 4)

    def loss_at(pair: Pair) -> float:
        return study.loss(setting, TWO_RATES, pair[0] * rate, pair[1] * rate)

    while (better := min([best, *neighbors(best)], key=loss_at)) != best:
        best = better


def losses(study: Study, setting: Setting, contender: str) -> dict[Pair, dict[int, float]]:
    """Return the losses by pair of rates and seed."""
    by_rates: dict[Pair, dict[int, float]] = {}
    for row in study.rows:
        if (row["setting"], row["contender"]) == (str(setting), contender):
            by_rates.setdefault((row["lr"], row["rest_lr"]), {})[row["seed"]] = row["loss"]
    return by_rates


def best_rates(study: Study, setting: Setting, contender: str, seeds: Iterable[int]) -> Pair:
    """Return the rates of the least mean loss over the seeds, among those that ran with all of them."""
    means: dict[Pair, float] = {}
    for rates, by_seed in losses(study, setting, contender).items():
        if all(seed in by_seed for seed in seeds):
            means[rates] = fmean(by_seed[seed] for seed in seeds)
    return min(means, key=lambda rates: means[rates])


def regrets(study: Study, setting: Setting, seeds: tuple[int, ...]) -> dict[Pair, float]:
    """Return the regret of every pair that ran with all seeds, in one setting."""
    rate = study.adamw_rates[str(setting)]
    by_rates = losses(study, setting, MUON)
    best = by_rates[best_rates(study, setting, MUON, seeds)]
    least = fmean(best[seed] for seed in seeds)
    found: dict[Pair, float] = {}
    for m, k in PAIRS:
        by_seed = by_rates.get(rates_of((m, k), rate), {})
        if all(seed in by_seed for seed in seeds):
            found[m, k] = fmean(by_seed[seed] for seed in seeds) - least
    return found


def ranked(study: Study, settings: Iterable[Setting], seeds: tuple[int, ...]) -> dict[Pair, float]:
    """Return the largest regret of each pair over the settings, least first."""
    by_setting = [regrets(study, setting, seeds) for setting in settings]
    largest: dict[Pair, float] = {}
    for pair in PAIRS:
        if all(pair in regret for regret in by_setting):
            largest[pair] = max(regret[pair] for regret in by_setting)
    return dict(sorted(largest.items(), key=lambda item: item[1]))


def order_to_try(
    study: Study, settings: Iterable[Setting], first: Pair, count: int = 3
) -> list[tuple[Pair, float]]:
    """Return pairs to try one after the other, and the largest regret of the best of those tried, with one seed."""
    by_setting = [regrets(study, setting, (0,)) for setting in settings]
    candidates = [pair for pair in PAIRS if all(pair in regret for regret in by_setting)]

    def largest_regret(tried: list[Pair]) -> float:
        return max(min(regret[pair] for pair in tried) for regret in by_setting)

    tried = [first]
    order = [(first, largest_regret(tried))]
    while len(order) < count:
        pair = min(candidates, key=lambda pair: largest_regret([*tried, pair]))
        tried.append(pair)
        order.append((pair, largest_regret(tried)))
    return order


def chosen_rules(study: Study) -> dict[str, Pair]:
    """Return the rule from scratch and the rule of fine-tuning, which is one pair for both if it costs little."""
    groups = groups_of_settings()
    common = next(iter(ranked(study, groups["all"], (0,))))
    rules: dict[str, Pair] = {}
    costs_little = True
    for task in STEPS:
        regret_of = ranked(study, groups[task], (0,))
        rules[task] = next(iter(regret_of))
        costs_little &= regret_of[common] <= regret_of[rules[task]] + ONE_RULE
    if costs_little:
        return dict.fromkeys(STEPS, common)
    return rules


def groups_of_settings() -> dict[str, tuple[Setting, ...]]:
    """Return the settings of each rule: from scratch, fine-tuning, and all."""
    groups = {
        task: tuple(setting for setting in SETTINGS if setting.task == task) for task in STEPS
    }
    return groups | {"all": SETTINGS}


def confirm(study: Study, setting: Setting, near: int) -> None:
    """Repeat with all seeds: the rules and the `near` next pairs, the setting's best rates, and earlier rates."""
    pairs: list[Pair] = []
    for settings in groups_of_settings().values():
        pairs += list(ranked(study, settings, (0,)))[:near]
    adamw = study.adamw_rates[str(setting)]
    rates = [(ADAMW, adamw, adamw)]
    rates += [(MUON, m * adamw, k * adamw) for m, k in dict.fromkeys(pairs)]
    rates += [(MUON, *best_rates(study, setting, MUON, (0,)))]
    rates += [(MUON, *earlier) for earlier in EARLIER.values()]
    repeat(study, setting, rates)


def repeat(study: Study, setting: Setting, rates: Iterable[tuple[str, float, float]]) -> None:
    """Run each contender at its rates with all seeds."""
    for contender, matrix_rate, rest_rate in rates:
        for seed in SEEDS:
            study.loss(setting, contender, matrix_rate, rest_rate, seed)


def main(arguments: list[str] | None = None) -> None:
    """Run the missing runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after this time")
    parser.add_argument(
        "--near", type=int, default=1, help="pairs to repeat with three seeds, for each rule"
    )
    parser.add_argument(
        "--only", default="", help="a word of the settings to run; several processes may share them"
    )
    parser.add_argument(
        "--part", choices=("search", "confirm", "two-rates"), help="run only this part"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    study = Study(deadline=time.monotonic() + 60 * options.minutes)
    settings = [setting for setting in (*SETTINGS, CHECK) if options.only in str(setting)]
    for setting in settings:
        if options.part in (None, "search"):
            search_adamw(study, setting)
            search_muon(study, setting)
    for setting in settings:
        if options.part in (None, "confirm"):
            confirm(study, setting, options.near)
    for setting in settings:
        if options.part in (None, "two-rates"):
            search_two_rates(study, setting)
            repeat(study, setting, [(TWO_RATES, *best_rates(study, setting, TWO_RATES, (0,)))])
    print("finished; python -m benchmarks.rates_table writes the page")


if __name__ == "__main__":
    main()
