"""The tables of the rates, from ``results/rates_quality.json`` alone."""

from __future__ import annotations

from statistics import fmean

from benchmarks import report
from benchmarks.rates import (
    ADAMW,
    CHECK,
    MUON,
    RULES,
    SEEDS,
    SETTINGS,
    TWO_RATES,
    Pair,
    Setting,
    Study,
    best_rates,
    losses,
    rates_of,
    regrets,
)
from benchmarks.report import DOCS, load, machine_line, table

PAGE = DOCS / "setting-the-numbers.md"


def mean_and_range(by_seed: dict[int, float] | None) -> str:
    """Return the mean over seeds, and the least and the largest loss; nothing if a seed is missing.

    >>> mean_and_range({0: 1.0, 1: 2.0, 2: 3.0}), mean_and_range({0: 1.0})
    ('2.000 (1.000 to 3.000)', '')
    """
    if by_seed is None or len(by_seed) < len(SEEDS):
        return ""
    values = list(by_seed.values())
    return f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def pair_name(pair: Pair) -> str:
    """Return a pair of factors.

    >>> pair_name((2, 0.5))
    '2 a, 0.5 a'
    """
    return f"{pair[0]:g} a, {pair[1]:g} a"


def result_line(study: Study, setting: Setting) -> list[str]:
    """Return the losses of one setting, with three seeds."""
    adamw_rate = study.adamw_rates[str(setting)]
    muon = losses(study, setting, MUON)
    rule_losses = muon[rates_of(RULES[setting.task], adamw_rate)]
    best = best_rates(study, setting, MUON, SEEDS)
    gap = fmean(rule_losses.values()) - fmean(muon[best].values())
    two_rates = losses(study, setting, TWO_RATES)
    two_rates_losses = None
    if two_rates:
        two_rates_losses = two_rates[best_rates(study, setting, TWO_RATES, SEEDS)]
    return [
        str(setting),
        f"{adamw_rate:g}",
        mean_and_range(losses(study, setting, ADAMW)[adamw_rate, adamw_rate]),
        mean_and_range(two_rates_losses),
        mean_and_range(rule_losses),
        f"{gap:+.3f}, {best[0]:g} and {best[1]:g}",
    ]


def regret_line(study: Study, pair: Pair) -> list[str]:
    """Return the regrets of one pair, with one seed, in every setting."""
    line = [pair_name(pair)]
    for setting in (*SETTINGS, CHECK):
        regret = regrets(study, setting, (0,)).get(pair)
        line.append("" if regret is None else f"{regret:.3f}")
    return line


def rates() -> str:
    """Return the table of losses and the table of regrets."""
    results = load("rates_quality")
    if results is None:
        return ""
    study = Study(check_texts=False)
    head = [
        "",
        "a",
        "AdamW, one rate: a",
        "AdamW, two rates, searched",
        "`mfx.Muon` by the rule",
        "above the best pair, which is",
    ]
    lines = [result_line(study, setting) for setting in (*SETTINGS, CHECK)]
    pairs: dict[Pair, None] = {}
    for setting in SETTINGS:
        pairs.update(dict.fromkeys(regrets(study, setting, (0,))))
    regret_lines = [regret_line(study, pair) for pair in sorted(pairs)]
    regret_head = ["matrices, rest", *(str(setting) for setting in (*SETTINGS, CHECK))]
    about = machine_line(results, "one thread")
    return "\n\n".join(
        [
            table(head, lines),
            "Loss above the best pair, with one seed:",
            table(regret_head, regret_lines),
            f"{about}\n",
        ]
    )


SECTIONS = {"rates": rates}


if __name__ == "__main__":
    report.rewrite(PAGE, SECTIONS)
