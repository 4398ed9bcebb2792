"""Laws of checkpoints: exact, safe to load, found or refused by name."""

from __future__ import annotations

import resource

import pytest
import torch

from torchrl_safety.trainers import find_checkpoint, make_checkpoint, rotation


def test_a_checkpoint_restores_parameters_and_the_global_random_stream(tmp_path):
    torch.manual_seed(3)
    net = torch.nn.Linear(3, 2)
    path = make_checkpoint(net=net).save(tmp_path / "one")
    expected = torch.rand(5)
    other = torch.nn.Linear(3, 2)
    torch.manual_seed(99)
    make_checkpoint(net=other).load(path)
    assert torch.equal(other.weight, net.weight)
    assert torch.equal(torch.rand(5), expected)


def test_every_payload_loads_with_weights_only(tmp_path):
    path = make_checkpoint(net=torch.nn.Linear(3, 2)).save(tmp_path / "one")
    payloads = list(path.rglob("*.pt"))
    assert len(payloads) == 2
    for payload in payloads:
        torch.load(payload, weights_only=True)


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path):
    saves, checkpoint = rotation(tmp_path, keep_last=2), make_checkpoint(net=torch.nn.Linear(1, 1))
    paths = [saves.save(checkpoint, step=step) for step in (10, 200, 3000)]
    assert find_checkpoint(tmp_path) == paths[-1]
    assert find_checkpoint(paths[1]) == paths[1]
    assert not paths[0].exists()


@pytest.mark.parametrize("make", [lambda p: p / "absent", lambda p: p, lambda p: (p / "file").touch() or p / "file"])
def test_a_path_that_is_no_checkpoint_is_refused_by_name(tmp_path, make):
    path = make(tmp_path)
    with pytest.raises(FileNotFoundError, match="is no checkpoint") as caught:
        find_checkpoint(path)
    assert str(path) in str(caught.value)


def test_what_a_killed_save_left_is_cleared_away_and_nothing_else(tmp_path):
    saves, checkpoint = rotation(tmp_path), make_checkpoint(net=torch.nn.Linear(1, 1))
    whole = saves.save(checkpoint, step=10)
    leftovers = [whole.with_name(f".{whole.name}.{kind}-c0ffee") for kind in ("stage", "delete")]
    for leftover in leftovers:
        checkpoint.save(leftover / "components")
    backup = whole.with_name(f".{whole.name}.backup-c0ffee")
    backup.mkdir()
    assert find_checkpoint(tmp_path) == whole
    assert all(leftover.exists() for leftover in leftovers), "looking for a checkpoint removes nothing"
    rotation(tmp_path)
    assert {*whole.parent.iterdir()} == {whole, backup}


def test_a_save_for_which_there_is_no_room_says_so_and_leaves_the_last_checkpoint(tmp_path):
    saves, checkpoint = rotation(tmp_path), make_checkpoint(net=torch.nn.Linear(100, 100))
    whole = saves.save(checkpoint, step=10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match=r"checkpoint-000000000020.* could not be written; is the disk full\?"):
            saves.save(checkpoint, step=20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [*whole.parent.iterdir()] == [whole]
    make_checkpoint(net=torch.nn.Linear(100, 100)).load(whole)
