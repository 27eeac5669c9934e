"""Rates of devices: what is built in, what a file says, and that nothing is read by itself."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonfx.polar import Rates, calibrate, explain, rates, use_rates
from muonfx.polar.policy import Facts, plan
from muonfx.polar.polynomials import polynomials

NUMBERS = st.floats(1.0, 1e12)


@pytest.fixture(autouse=True)
def _built_in() -> Iterator[None]:
    yield
    use_rates(None)


@given(
    st.dictionaries(
        st.tuples(st.sampled_from(["cpu", "cuda"]), st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        st.builds(
            Rates, NUMBERS | st.just(float("inf")), st.floats(0.1, 1.0), NUMBERS.map(lambda x: min(x, 1e9)), st.text()
        ),
    )
)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, given: dict[Any, Rates]):
    path = tmp_path_factory.mktemp("rates") / "rates.json"
    rates.write_rates(path, given)
    found = rates.read_rates(path)
    assert {key: one[:3] for key, one in found.items()} == {key: one[:3] for key, one in given.items()}
    assert all("read from rates.json" in one.source for one in found.values())


def test_a_file_changes_plans_of_this_process_and_none_that_are_the_same_everywhere(tmp_path: Path):
    shape, fp32 = (512, 2048), torch.float32
    before = explain(shape, dtype=fp32)
    everywhere = (*shape, fp32, torch.device("cpu"), polynomials("polar_express_5"))
    known = plan(*everywhere, dtype=fp32, facts=Facts(tiles=False, kernels=False))
    assert before.products == "blocks"
    rates.write_rates(tmp_path / "r.json", {("cpu", fp32): Rates(float("inf"), 1.0, 25, "a {test}")})
    use_rates(tmp_path / "r.json")
    assert explain(shape, dtype=fp32).products == "batched"
    assert "a {test}, read from r.json" in str(explain(shape, dtype=fp32))
    assert "a {test}" in rates.in_use()
    assert plan(*everywhere, dtype=fp32, facts=Facts(tiles=False, kernels=False)) == known
    use_rates(None)
    assert str(explain(shape, dtype=fp32)) == str(before)
    assert rates.in_use() == "built in"


GOOD = {"device": "cpu", "dtype": "float32", "halved_from": 1e8, "share": 0.8, "pass_cost": 20, "source": ""}


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ("no json", "no JSON"),
        ([], "found no 'muonfx rates 1'"),
        ({"format": "another", "rates": []}, "found no 'muonfx rates 1'"),
        ({**GOOD, "share": 1.5}, "entry 0 of rates: share: found 1.5"),
        ({**GOOD, "share": True}, "share: found True"),
        ({**GOOD, "halved_from": -1}, "halved_from: found -1"),
        ({**GOOD, "pass_cost": "20"}, "pass_cost: found '20'"),
        ({**GOOD, "dtype": "int8"}, "dtype: found 'int8'"),
        ({**GOOD, "dtype": "nn"}, "dtype: found 'nn'"),
        ({**GOOD, "device": "tpu"}, "device: found 'tpu'"),
        ({"device": "cpu"}, "expected device, dtype, halved_from"),
    ],
)
def test_a_file_that_is_none_is_refused_and_changes_nothing(tmp_path: Path, held: Any, said: str):
    good = tmp_path / "good.json"
    rates.write_rates(good, {("cpu", torch.float32): Rates(1e7, 0.5, 3, "kept")})
    use_rates(good)
    path = tmp_path / "bad.json"
    entries = held if not isinstance(held, dict) or "format" in held else {"format": rates.FORMAT, "rates": [held]}
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    with pytest.raises(ValueError, match=said):
        use_rates(path)
    with pytest.raises(FileNotFoundError):
        use_rates(tmp_path / "none.json")
    assert "kept" in rates.in_use()


def test_halving_never_pays_on_tiles_and_the_gram_form_does():
    """8 of 1024 x 1024 took 131 ms batched and 193 by blocks; 4 of 512 x 2048 26 ms in the Gram form, 29 without."""
    facts, bf16 = Facts(tiles=True, kernels=False), torch.bfloat16
    for shape, method in {
        (512, 512): "standard",
        (1024, 1024): "standard",
        (512, 2048): "gram",
        (1024, 4096): "gram",
    }.items():
        found = plan(
            *shape, torch.float32, torch.device("cpu"), polynomials("polar_express_5"), dtype=bf16, facts=facts
        )
        assert (found.products, found.small_products, found.method) == ("batched", "batched", method), shape


def test_an_unknown_device_takes_what_loses_least():
    found = plan(
        512,
        512,
        torch.float32,
        torch.device("xpu"),
        polynomials("keller"),
        dtype=torch.float16,
        facts=Facts(False, False),
    )
    assert (found.products, found.method) == ("batched", "standard")


@pytest.mark.slow
def test_the_program_measures_prints_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(calibrate, "SHAPES", [(128, 128), (256, 512)])
    path = tmp_path / "here.json"
    threads = torch.get_num_threads()
    assert calibrate.main(["--seconds", "0.1", "--threads", "1", "--out", str(path)]) == 0
    torch.set_num_threads(threads)
    said = capsys.readouterr().out
    assert "built in" in said
    assert "256 x 512" in said
    assert rates.in_use() == "built in"  # nothing is read by itself
    use_rates(path)
    assert "here.json" in explain((256, 512), dtype=torch.float32).reasons[2].text
