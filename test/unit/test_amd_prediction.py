"""The prediction for AMD GPUs: its arithmetic, and how instructions are counted. Needs no compiler."""

import pytest

from bench.amd_cards import CARDS, LAUNCH, Launches
from bench.amd_counts import COUNTS, LOOPS, STRAIGHT, Count, counts_of, instructions, marked_loop, without
from bench.amd_prediction import Shape, Step, comparison
from bench.make_checkpoint import SIZES

LARGE = Shape(*SIZES["7.2b"])


def disassembly(*lines: str) -> str:
    """As llvm-objdump prints it, 4 bytes an instruction; "name >i" is a branch to instruction i."""
    text = []
    for i, line in enumerate(lines):
        name, _, target = line.partition(" >")
        label = f" <kernel+0x{int(target) * 4:x}>" if target else ""
        text.append(f"\t{name:40} // {0x1900 + 4 * i:012X}: BF800000{label}")
    return "\n".join(text)


@pytest.mark.parametrize("gpu", CARDS)
@pytest.mark.parametrize("rows", [1, 7, 8, 32, 320])
def test_no_launch_takes_less_than_its_bytes(gpu, rows):
    step, card = Step(gpu, LARGE, rows), CARDS[gpu]
    for one in [*step.launches(), *step.prefill()]:
        assert one.seconds(card) > one.number * one.moved / card.bandwidth
        assert max(one.loads(card)) <= 1


@pytest.mark.parametrize("gpu", CARDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("state_bytes", [2, 4])
def test_more_rows_never_take_less_time(gpu, size, state_bytes):
    shape = Shape(*SIZES[size])
    times = [Step(gpu, shape, rows, state_bytes).seconds() for rows in [*range(1, 34), 64, 100, 320, 960]]
    assert times == sorted(times)
    assert times[-1] > 2 * times[0]


def test_a_row_of_a_large_model_is_bound_by_memory():
    step, card = Step("gfx942", LARGE, 1), CARDS["gfx942"]
    launches = list(step.launches())
    work = sum(one.number * one.work_seconds(card) for one in launches)
    bound = [one for one in launches if one.loads(card)[0] > max(one.loads(card)[1:])]
    assert sum(one.number * one.work_seconds(card) for one in bound) > 0.8 * work
    # Every weight once, of the channel mix's values a tenth, and little else.
    layer = 8.4 * 4096**2 + 2 * 4096 * sum(LARGE.ranks)
    weights = 2 * (32 * layer + 65536 * 4096)
    assert weights < sum(one.number * one.moved for one in launches) < 1.03 * weights


def test_shuffles_of_many_rows_bind_a_stream():
    card = CARDS["gfx942"]
    few, many = (Step("gfx942", LARGE, rows).stream(4096, 4096, "stream16") for rows in (1, 320))
    assert few.loads(card)[0] > few.loads(card)[1]
    assert many.loads(card)[1] > many.loads(card)[0]
    assert many.work_seconds(card) > 10 * few.work_seconds(card)


def test_few_blocks_leave_units_idle():
    card = CARDS["gfx1100"]
    one, all_of_them = Launches("", 0, lds=1e6, blocks=1), Launches("", 0, lds=1e6)
    assert one.work_seconds(card) == pytest.approx(card.units * all_of_them.work_seconds(card))
    assert Launches("", 0, number=3).seconds(card) == 3 * LAUNCH


def test_only_known_gpus_are_compared():
    seconds = Step("gfx1100", LARGE, 8).seconds()
    text = comparison("gfx1100", LARGE, 8, 2, 2 * seconds)
    assert text == f", predicted {seconds * 1e3:.3f} ms, measured/predicted 2.00"
    assert comparison("gfx942", LARGE, 8, 2, seconds) != comparison("gfx942", LARGE, 8, 4, seconds)
    assert comparison("gfx1201", LARGE, 8, 2, 1.0) == comparison("90a", LARGE, 8, 2, 1.0) == ""


def test_both_gpus_have_every_count():
    assert COUNTS.keys() == CARDS.keys()
    for counts in COUNTS.values():
        assert counts.keys() > LOOPS.keys() | STRAIGHT.keys()
        assert counts["wkv fp16 deferred"].lds < counts["wkv fp16"].lds
        assert all(one.valu > 0 and one.lds >= 0 for one in counts.values())


def test_widths_and_rates_count():
    names = ["ds_bpermute_b32", "ds_read_b128", "ds_load_2addr_b64", "ds_read2st64_b32", "ds_write_b16"]
    assert [one.lds for one in instructions(disassembly(*names))] == [1, 4, 4, 2, 1]
    names = ["v_dot2c_f32_f16_e32", "v_exp_f32_e32", "v_mul_lo_u32", "s_add_i32", "v_mov_b32_dpp"]
    assert [one.valu for one in instructions(disassembly(*names))] == [1, 4, 4, 0, 1]


def test_the_marked_loop_is_the_shortest_that_has_all_marks():
    code = instructions(
        disassembly("v_mov_b32", "v_dot2", "v_dot2", "s_cbranch_scc1 >1", "v_add", "s_cbranch_scc1 >0")
    )
    assert [one.name for one in marked_loop(code, "v_dot2")] == ["v_dot2", "v_dot2", "s_cbranch_scc1"]
    assert len(marked_loop(code, "v_mov|v_dot2")) == 6


def test_a_pass_without_the_store_leaves_its_branch_out():
    loop = instructions(
        disassembly("v_dot2", "s_cbranch_scc1 >4", "v_add", "global_store_b128", "s_cbranch_scc1 >0")
    )
    assert [one.name for one in without(loop, "global_store")] == [
        "v_dot2",
        "s_cbranch_scc1",
        "s_cbranch_scc1",
    ]


def test_a_kernel_without_a_loop_is_counted_whole():
    listing = f"0000 <_Z18relu_square_kernelv>:\n{disassembly('v_max_f32', 'ds_read_b64', 's_endpgm')}\n\n"
    assert dict(counts_of(listing)) == {"relu square": Count(2, 1)}
