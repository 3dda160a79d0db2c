"""bench/state_formats.py rounds states as it says, and prints a row for each format and measure."""

import sys

import pytest
import torch
from bench_modules import modules

BENCH = modules("state_formats")
KINDS = {kind.name: kind for kind in BENCH.formats()}
ROW, COLUMN = "int8, scale a row", "int8, scale a column"


def state() -> torch.Tensor:
    """`[layers, heads, 64 (value), 64 (key)]` whose columns differ in size by up to 1000."""
    drawn = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    return drawn * torch.logspace(-3, 0, 64)


@pytest.mark.parametrize(
    ("name", "along", "steps"),
    [(ROW, -1, 0.5), (COLUMN, -2, 0.5), (f"{ROW}, stochastic", -1, 1), (f"{COLUMN}, stochastic", -2, 1)],
)
def test_int8_is_off_by_at_most_so_many_steps_of_its_row_or_column(name, along, steps):
    before = state()
    most = before.abs().amax(along, keepdim=True)
    after = KINDS[name].rounded(before)
    assert ((after - before).abs() <= most / 127 * steps * (1 + 1e-4)).all()
    assert (after.abs() <= most * (1 + 1e-6)).all()
    codes = after / most * 127
    assert torch.allclose(codes, codes.round(), atol=1e-3)


@pytest.mark.parametrize("name", KINDS)
def test_a_state_of_zeros_stays(name):
    zeros = torch.zeros(1, 1, 64, 64)
    assert torch.equal(KINDS[name].rounded(zeros), zeros)


@pytest.mark.parametrize("name", [name for name in KINDS if "stochastic" not in name])
def test_a_stored_state_is_stored_as_it_is(name):
    once = KINDS[name].rounded(state())
    assert torch.allclose(KINDS[name].rounded(once), once, rtol=1e-6, atol=0)


def test_stochastic_rounding_is_right_in_the_mean_and_nearest_is_not():
    """A decay of a thousandth, 300 times, beside a number that stays: half a step of int8 is larger."""
    start = torch.tensor([[1.0] + [0.3] * 63]).expand(64, 64).contiguous()
    kept = {}
    for name in (ROW, f"{ROW}, stochastic"):
        held = start
        for _ in range(300):
            held = KINDS[name].rounded(torch.cat([held[:, :1], held[:, 1:] * 0.999], 1))
        kept[name] = float(held[:, 1:].mean())
    assert kept[ROW] == pytest.approx(0.3, abs=0.005)
    assert kept[f"{ROW}, stochastic"] == pytest.approx(0.3 * 0.999**300, abs=0.01)


def test_a_decay_of_whole_columns_is_exact_with_a_scale_a_column():
    first = KINDS[COLUMN].rounded(state())
    decay = torch.linspace(0.545, 0.9999, 64)
    assert torch.allclose(KINDS[COLUMN].rounded(first * decay), first * decay, rtol=1e-5, atol=0)


def test_it_prints_a_row_for_each_format_and_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """None of those that are left out with --only."""
    flags = ["--layers", "1", "--width", "64", "--tokens", "200", "--part", "100"]
    monkeypatch.setattr(sys, "argv", ["state_formats.py", *flags])
    BENCH.main()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    for name in list(KINDS)[1:]:
        divergence, above, error = ([float(x) for x in row[1:]] for row in rows if row[:1] == [name])
        assert len(divergence) == len(above) == len(error) == 3  # two parts, and both together
        assert min(error) > 0 or "256" in name
    monkeypatch.setattr(sys, "argv", ["state_formats.py", *flags, "--only", "fp8"])
    BENCH.main()
    printed = capsys.readouterr().out
    assert printed.count("fp8") == 3 and "int8" not in printed
