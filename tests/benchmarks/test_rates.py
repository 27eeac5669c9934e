"""The rule for the two first rates follows from the committed runs."""

from statistics import fmean

import pytest

from benchmarks.rates import (
    ADAMW,
    CHECK,
    EQUAL,
    MUON,
    RULES,
    SEEDS,
    SETTINGS,
    Setting,
    Study,
    chosen_rules,
    losses,
    ranked,
    rates_of,
)


@pytest.fixture(scope="module")
def study() -> Study:
    """The committed runs, whose texts need not be those of this machine."""
    return Study(check_texts=False)


def test_the_rule_is_the_pair_that_the_runs_choose(study: Study):
    assert chosen_rules(study) == RULES


@pytest.mark.parametrize("setting", [*SETTINGS, CHECK], ids=str)
def test_the_rule_ends_below_adamw_with_its_best_rate(study: Study, setting: Setting):
    rate = study.adamw_rates[str(setting)]
    adamw = losses(study, setting, ADAMW)[rate, rate]
    muon = losses(study, setting, MUON)[rates_of(RULES[setting.task], rate)]
    assert len(adamw) == len(muon) == len(SEEDS)
    assert fmean(muon.values()) < fmean(adamw.values())


def test_the_default_rate_is_the_better_multiple_for_one_rate(study: Study):
    largest = ranked(study, SETTINGS, (0,))
    assert largest[2, 2] < largest[1, 1]
    assert EQUAL == ((1, 1), (2, 2))
