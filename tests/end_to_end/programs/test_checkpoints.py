"""torch.distributed.checkpoint on rank threads, on gloo, and training on one device."""

import os

import pytest
import torch

from localtensor.errors import RankRaised
from tests.end_to_end.programs.checkpoints import (
    load_tensors,
    on_one_device,
    resume,
    save_tensors,
    tensors_on_ranks,
    train,
)
from tests.end_to_end.programs.three_ways import assert_same_bits, assert_same_but_for_sums, on_gloo, on_threads

CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # float64; a gradient is a sum over ranks
WAYS = {"threads": on_threads, "gloo": on_gloo}
LAYOUTS = {  # by the number of ranks that load
    2: (((2,), "S(0)"), ((2,), "R")),
    4: (((4,), "S(1)"), ((2, 2), "S(0), S(0)"), ((2, 2), "R, S(1)")),
    8: (((4, 2), "S(1), S(0)"),),
}
OTHER = {"threads": "gloo", "gloo": "threads"}


def on_each_in_its_folder(tmp_path, program, *args, ranks):
    """Rank by rank what came back, the same on both ways, each of which has a folder of its own."""
    threads, *gloo = (way(program, str(tmp_path / name), *args, ranks=ranks) for name, way in WAYS.items())
    for other in gloo:
        assert_same_but_for_sums(threads, other)
    return threads


def kept(tmp_path):
    [folders] = {tuple(sorted(os.listdir(tmp_path / name))) for name in WAYS}
    return [int(folder) for folder in folders]


def check_training(per_rank, steps, first=1):
    alone = on_one_device(steps)
    for result in per_rank:
        torch.testing.assert_close(result["losses"], alone["losses"][first - 1 :], **CLOSE)
        torch.testing.assert_close(result["weights"], alone["weights"], **CLOSE)


@pytest.mark.parametrize(("ranks", "rows"), [(2, 5), pytest.param(8, 2, marks=pytest.mark.slow)])
def test_what_four_ranks_save_other_numbers_of_ranks_load(ranks, rows, tmp_path):
    check_training(on_each_in_its_folder(tmp_path, train, 2, ranks=4), 2)
    resumed = on_each_in_its_folder(tmp_path, resume, 4, ranks=ranks)
    check_training(resumed, 4, first=3)
    assert [result["from"] for result in resumed] == [2] * ranks
    assert resumed[0]["rows"][:2] == [rows, rows]


@pytest.mark.slow  # the test of the rank that dies resumes from step 1, that of the full disk finds its file
def test_the_first_step_is_saved_already(tmp_path):
    on_each_in_its_folder(tmp_path, train, 1, ranks=4)
    assert kept(tmp_path) == [1]
    check_training(on_each_in_its_folder(tmp_path, resume, 2, ranks=2), 2, first=2)


@pytest.mark.slow
def test_only_the_last_two_are_kept(tmp_path):
    on_each_in_its_folder(tmp_path, train, 4, 2, ranks=2)
    assert kept(tmp_path) == [3, 4]


@pytest.mark.slow
def test_a_full_disk_is_known_to_all_ranks_and_the_last_good_checkpoint_is_loaded(tmp_path):
    trained = on_each_in_its_folder(tmp_path, train, 3, 9, 3, ranks=4)
    assert [result["failures"] for result in trained] == [[[(3, "DiskFull")]]] * 4
    assert kept(tmp_path) == [1, 2, 3]
    resumed = on_each_in_its_folder(tmp_path, resume, 3, ranks=2)
    assert [result["from"] for result in resumed] == [2, 2]
    check_training(resumed, 3, first=3)


def test_a_rank_that_dies_before_it_saves_leaves_the_last_good_checkpoint(tmp_path):
    for name, way in WAYS.items():
        with pytest.raises(RankRaised, match="DiskFull: no space left"):
            way(train, str(tmp_path / name), 2, 9, 2, False, ranks=2)
    resumed = on_each_in_its_folder(tmp_path, resume, 2, ranks=2)
    assert [result["from"] for result in resumed] == [1, 1]
    check_training(resumed, 2, first=2)


def test_a_checkpoint_is_written_in_the_background(tmp_path):
    """async_save meets the other ranks on a thread of its own."""
    arguments = (2, 9, None, True, True)
    check_training(on_each_in_its_folder(tmp_path, train, *arguments, ranks=2), 2)
    for name in WAYS:
        check_training(on_threads(resume, str(tmp_path / name), 3, ranks=4), 3, first=3)


@pytest.mark.few(1)
@pytest.mark.parametrize("way", WAYS)
def test_what_one_way_saves_the_other_loads(way, tmp_path):
    [files] = {tuple(names) for names in WAYS[way](save_tensors, str(tmp_path), (2, 2), "S(0), S(1)", ranks=4)}
    assert {".metadata", "__0_0.distcp", "__3_0.distcp"} <= set(files)
    for ranks, layouts in LAYOUTS.items():
        got = WAYS[OTHER[way]](load_tensors, str(tmp_path), layouts, ranks=ranks)
        for layout, results in zip(layouts, zip(*got), strict=True):
            for mine, result in zip(tensors_on_ranks(*layout), results, strict=True):
                assert_same_bits({**mine, "plain": torch.arange(3), "note": ("step", 3)}, result)
