"""Greedy play on a table of values, against the minimax of each table written out."""

from __future__ import annotations

import itertools

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from torchrl_safety.modules import RainbowNetwork, greedy_game_policy


class Given(torch.nn.Module):
    """The observation is the table."""

    def forward(self, observation):
        return observation


GIVEN = TensorDictModule(Given(), ["observation"], ["action_value"])
TABLES = torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(0))


def minimax(table: list[list[float]]) -> tuple[int, int]:
    control = max(range(len(table)), key=lambda u: min(table[u]))
    return control, min(range(len(table[control])), key=lambda d: table[control][d])


@pytest.mark.parametrize("flat", [False, True])
def test_both_players_play_the_minimax_of_each_table(flat):
    observation = TABLES.flatten(-2) if flat else TABLES
    moves = greedy_game_policy(GIVEN, num_disturbances=4 if flat else None)(TensorDict({"observation": observation}))
    for place in itertools.product(range(2), range(5)):
        control, disturbance = minimax(TABLES[place].tolist())
        assert (moves["action"][place].item(), moves["disturbance"][place].item()) == (control, disturbance)
        assert moves["chosen_action_value"][place].item() == TABLES[place][control][disturbance].item()
    assert moves["action"].dtype == moves["disturbance"].dtype == torch.int64
    assert moves["action"].shape == moves["disturbance"].shape == (2, 5)


@pytest.mark.parametrize("trailing", [False, True])
def test_the_disturbance_answers_whatever_the_controller_does(trailing):
    control = torch.randint(3, (2, 5, 1) if trailing else (2, 5), generator=torch.Generator().manual_seed(1))
    policy = greedy_game_policy(GIVEN, player="disturbance", disturbance_key=("other", "push"))
    assert policy.in_keys == ["observation", "action"]
    found = policy(TensorDict({"observation": TABLES, "action": control}))["other", "push"]
    for place in itertools.product(range(2), range(5)):
        row = TABLES[place][control[place]].flatten().tolist()
        assert found[place].item() == row.index(min(row))


def test_the_controller_alone_writes_no_disturbance():
    policy = greedy_game_policy(RainbowNetwork(2, 6, support=(-1.0, 1.0)), num_disturbances=2, player="controller")
    moves = policy(TensorDict({"observation": torch.zeros(5, 2)}, [5]))
    assert moves["action"].max() < 3
    assert "disturbance" not in moves


def test_what_is_no_table_is_refused():
    with pytest.raises(ValueError, match="player is 'pilot'"):
        greedy_game_policy(GIVEN, player="pilot")
    with pytest.raises(ValueError, match="Given without out_keys"):
        greedy_game_policy(Given())
    for count in (0, 5):
        with pytest.raises(ValueError, match=f"num_disturbances is {count}.*does not divide the 4 action values"):
            greedy_game_policy(GIVEN, num_disturbances=count)(TensorDict({"observation": torch.zeros(2, 4)}))
    with pytest.raises(ValueError, match=r"the action values \[4\] are no table"):
        greedy_game_policy(GIVEN)(TensorDict({"observation": torch.zeros(4)}))
