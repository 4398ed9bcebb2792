"""Laws of the league: what counts as a win, whom it keeps, whom it sends, and what a resumed run goes on with."""

from __future__ import annotations

import io
import math

import pytest
import torch
from line_game import LineGameEnv, acts, change, constant, outcome
from tensordict.nn import TensorDictModule
from torchrl.envs import InitTracker, TransformedEnv

from torchrl_safety.envs import DoubleIntegratorEnv
from torchrl_safety.modules import TwoPlayerPolicy, ZeroDisturbance
from torchrl_safety.trainers import CrossPlay, League, ScheduleHook, cross_play, make_checkpoint

CONTROLS, DISTURBANCES = (-2.0, 0.0, 2.0), (-1.0, 0.0, 1.0)
SPEC = LineGameEnv(1).full_action_spec["disturbance"]


def make_league(env=None, *, seed=0, **settings) -> League:
    env = LineGameEnv(60) if env is None else env
    options = {"max_steps": 4, "frames_per_step": 4 * 2 * env.numel(), "interval": 100, "init_key": "step_count"}
    return League(
        env,
        constant(1),
        constant(1, "disturbance"),
        generator=torch.Generator().manual_seed(seed),
        **{**options, **settings},
    )


def train(league: League, *players: tuple[int, int]) -> League:
    """Steps of the league at which the players in training take these indices."""
    for control, disturbance in players:
        change(league._training["controller"], control)
        change(league._training["disturbance"], disturbance)
        league.update(league._frames + 100)
    return league


@pytest.mark.parametrize("problem", ["avoid", "reach_avoid"])
@pytest.mark.parametrize(
    ("ends", "settings"),
    [
        ("failure or the limit of the roll-out", {}),
        ("failure or truncation", {"max_steps": 2}),
        ("nothing but the limit", {"end_criterion": "timeout"}),
        ("the target", {"end_criterion": "reach_avoid"}),
    ],
)
def test_every_way_of_ending_counts_as_a_loop_over_the_steps_has_it(problem, ends, settings):
    env = LineGameEnv(9, problem="reach_avoid" if ends == "the target" else problem, **settings)
    league = make_league(env, problem=problem, fixed={"idle": constant(1, "disturbance")}, frames_per_step=9 * 4 * 5)
    train(league, (0, 0), (1, 2), (2, 1))
    steps = min(4, settings.get("max_steps", 4))
    expected = torch.tensor(
        [
            [
                outcome(u, d, steps, stops_at_target=ends == "the target")[problem == "reach_avoid"]
                for d in (0.0, *(DISTURBANCES[i] for i in (0, 2, 1)))
            ]
            for u in CONTROLS
        ]
    ).float()
    assert torch.equal(league.matrix.rates, expected)
    assert 0 < expected.mean() < 1
    assert league.controller_scores.tolist() == pytest.approx(expected.mean(1).tolist())
    assert league.disturbance_scores.tolist() == pytest.approx((1 - expected.mean(0)).tolist())


def test_a_margin_that_is_nan_is_a_loss_and_leaves_no_nan_in_the_scores():
    class Broken(LineGameEnv):
        def safety_margin(self, state):
            return torch.full_like(state, torch.nan)

    league = train(make_league(Broken(60)), (1, 1))
    assert league.controller_scores.tolist() == [0.0]
    assert league.probabilities.tolist() == pytest.approx([1 / 3] * 3)


def test_the_weakest_of_a_full_side_is_evicted_and_the_fixed_disturbances_stay():
    league = make_league(controllers=2, disturbances=2)
    train(league, (1, 0), (0, 2))
    assert league.matrix.controllers == ("controller 100", "controller 200")
    # Control 0 fails against every disturbance: whoever comes next, it is the weakest.
    train(league, (1, 1))
    assert [acts(policy) for policy in league.controllers.values()] == [1, 1]
    # A disturbance that does nothing has won less than those that push.
    assert league.matrix.disturbances == ("zero", "random", "disturbance 100", "disturbance 200")
    assert league.matrix.played.shape == (2, 4)
    rows = {row["disturbance"]: row["rate"] for row in league.matrix.table()}
    assert rows == {"zero": 1.0, "random": rows["random"], "disturbance 100": 0.0, "disturbance 200": 0.0}


def test_members_are_snapshots_that_training_does_not_reach():
    league = train(make_league(), (0, 2))
    before = league.controllers["controller 100"]
    change(league._training["controller"], 2)
    assert acts(before) == 0
    assert not any(parameter.requires_grad for parameter in before.parameters())


def test_all_pairs_meet_and_those_that_met_least_meet_first():
    league = train(make_league(frames_per_step=4 * 60), (1, 0))
    assert league.matrix.played.tolist() == [[20, 20, 20]]
    train(league, (1, 1))
    played = league.matrix.played
    assert played.sum() == 120
    assert played.max() - played.min() <= 20
    assert played[1].sum() + played[0, 3] == 60  # every new episode went to a pair that had not met
    assert (played[1] == 12).all()


def test_a_step_takes_no_more_frames_than_its_budget_and_says_how_many():
    class Counted(LineGameEnv):
        frames = 0

        def _step_entries(self, tensordict):
            self.frames += self.numel()
            return super()._step_entries(tensordict)

    env = Counted(50)
    league = make_league(env, frames_per_step=650)  # three whole rounds of 4 x 50
    report = league.update(100)
    assert report["match_frames"] == env.frames
    assert 600 >= env.frames > 400
    assert report["match_seconds"] > 0
    assert set(report) >= {"present_controller", "present_disturbance", "best_controller", "best_disturbance"}


def test_a_step_is_due_once_in_each_interval():
    league = make_league(interval=100)
    due = [frames for frames in range(0, 401, 40) if league.step(frames) is not None]
    assert due == [120, 200, 320, 400]
    assert make_league(interval=None).interval == 10 * league.frames_per_step


@pytest.mark.parametrize("rationality", [0.0, 3.0])
def test_opponents_come_as_often_as_the_softmax_of_the_scores_says(rationality):
    league = train(make_league(rationality=rationality), (1, 0), (1, 2))
    scores = league.disturbance_scores.tolist()
    assert max(scores) - min(scores) > 0.5
    weights = [math.exp(rationality * score) for score in scores]
    expected = torch.tensor([weight / sum(weights) for weight in weights])
    n = 20_000
    drawn = league.opponent(LineGameEnv(n, max_steps=4).reset())["opponent"]
    found = torch.stack([(drawn == number).float().mean() for number in league.opponents()])
    deviation = (expected * (1 - expected) / n).sqrt()
    assert ((found - expected).abs() <= 4 * deviation).all()


def test_before_the_first_step_the_fixed_disturbances_come_equally_often():
    assert make_league().probabilities.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("tracked", [False, True])
def test_an_opponent_stays_for_an_episode_and_acts_as_the_member_that_it_is(tracked):
    env = LineGameEnv(40, max_steps=7, end_criterion="timeout")
    init_key = "step_count"
    if tracked:
        env, init_key = TransformedEnv(env, InitTracker()), "is_init"
    league = train(make_league(init_key=init_key), (1, 0), (1, 2))
    actions = {0: 1, 2 + 1: 0, 2 + 3: 2}  # zero, then disturbances 100 and 200: each side counts on
    assert [member.number for member in league._members["disturbance"]] == [0, 1, 3, 5]
    policy = TwoPlayerPolicy(constant(1), league.opponent)
    found = env.rollout(70, policy, break_when_any_done=False, auto_cast_to_device=True)
    opponent = found["opponent"]
    episodes = opponent.reshape(40, 10, 7)
    assert (episodes == episodes[..., :1]).all()
    assert len(episodes[..., 0].unique()) == 4
    assert (episodes[:, 1:, 0] != episodes[:, :-1, 0]).any(1).all()  # drawn again, for each environment on its own
    for number, action in actions.items():
        assert (found["disturbance"][opponent == number] == action).all()
    assert len(found["disturbance"][opponent == 1].unique()) == 3


def test_an_episode_ends_against_the_opponent_with_which_it_began_though_it_is_evicted():
    league = train(make_league(disturbances=1, controllers=1), (1, 0))
    env = LineGameEnv(64, max_steps=1000, end_criterion="timeout")
    state = env.reset()
    before = league.opponent(state)["opponent"].clone()
    assert (before == 3).any()
    train(league, (1, 1), (1, 0))
    assert 3 not in [member.number for member in league._members["disturbance"]]
    _, state = env.step_and_maybe_reset(state.set("action", torch.ones(64, dtype=torch.int64)))
    after = league.opponent(state)
    assert torch.equal(after["opponent"], before)
    assert (after["disturbance"][before == 3] == 0).all()
    league.opponent(env.reset())
    league.update(1000)
    assert 3 not in league.opponents()


def test_a_saved_league_goes_on_bit_for_bit_also_in_the_middle_of_an_episode():
    def go_on(league):
        env = LineGameEnv(30, max_steps=5, seed=3)
        policy = TwoPlayerPolicy(constant(1), league.opponent)
        found = env.rollout(20, policy, break_when_any_done=False)
        train(league, (0, 1), (1, 2))
        later = env.rollout(20, policy, break_when_any_done=False)
        return [*(data[key] for data in (found, later) for key in ("opponent", "disturbance")), *league.matrix[2:]]

    league = train(make_league(seed=1, controllers=2, disturbances=1), (1, 0), (2, 2))
    league.opponent(LineGameEnv(30, max_steps=5).reset())
    train(league, (1, 1), (1, 2))
    assert league._retired
    saved = io.BytesIO()
    torch.save(league.state_dict(), saved)
    saved.seek(0)
    resumed = make_league(seed=7, controllers=2, disturbances=1)
    resumed.load_state_dict(torch.load(saved, weights_only=True))
    assert resumed.matrix.controllers == league.matrix.controllers
    assert resumed.step(league._frames) is None
    for whole, found in zip(go_on(league), go_on(resumed), strict=True):
        assert torch.equal(whole, found)
    assert league.matrix.disturbances == resumed.matrix.disturbances


def test_a_league_is_a_component_of_a_checkpoint(tmp_path):
    league, other = train(make_league(), (1, 0)), make_league(seed=5)
    path = make_checkpoint(league=league).save(tmp_path / "one")
    make_checkpoint(league=other).load(path)
    assert torch.equal(other.matrix.won, league.matrix.won)
    assert ScheduleHook(other).state_dict()["frames"] == 100
    with pytest.raises(ValueError, match=r"fixed disturbances \['zero', 'random'\], this one \['idle'\]"):
        make_league(fixed={"idle": constant(1, "disturbance")}).load_state_dict(league.state_dict())


def test_a_disturbance_that_moves_second_answers_the_control():
    # What it adds is the control's own direction, so that any control but none fails sooner.
    second = TensorDictModule(lambda action: action, ["action"], ["disturbance"])
    policies = {"left": constant(0), "none": constant(1)}
    found = cross_play(LineGameEnv(8), policies, {"second": second}, episodes=4, max_steps=2)
    assert found.rates.tolist() == [[0.0], [1.0]]


def test_matches_begin_in_turn_in_the_given_starts():
    # To the right from 0 is 2, from 2 is beyond the wall; to the left from 0 is -2, from 2 is 0.
    policies = {"right": constant(2), "left": constant(0), "none": constant(1)}
    idle, starts = {"idle": constant(1, "disturbance")}, torch.tensor([[0.0], [2.0]])
    for num_envs in (3, 4, 12):
        found = cross_play(LineGameEnv(num_envs), policies, idle, episodes=4, max_steps=1, starts=starts)
        assert found.played.tolist() == [[4], [4], [4]]
        assert found.won.tolist() == [[2], [4], [4]]
    with pytest.raises(ValueError, match="starts is empty"):
        cross_play(LineGameEnv(3), policies, idle, episodes=4, max_steps=1, starts=starts[:0])


def test_continuous_players_meet_too():
    still = {"start_low": (0.0, 0.0), "start_high": (0.0, 0.0)}
    env = DoubleIntegratorEnv(32, discrete=False, max_disturbance=0.5, **still)
    coast = ZeroDisturbance(env.full_action_spec["action"], out_key="action")
    push = TensorDictModule(lambda state: torch.ones_like(state[..., :1]), ["observation"], ["disturbance"])
    league = League(env, coast, push, max_steps=50, frames_per_step=3200, init_key="step_count")
    league.update(1)
    # x = .5 t²/2 is beyond the wall after 2 s of 2.5 s.
    assert dict(zip(league.disturbances, league.disturbance_scores.tolist())) == {
        "zero": 0.0,
        "random": league.disturbance_scores[1],
        "disturbance 1": 1.0,
    }
    drawn = league.opponent(DoubleIntegratorEnv(8, discrete=False, max_disturbance=0.5, max_steps=9).reset())
    assert drawn["disturbance"].shape == (8, 1)


def test_the_rates_of_a_cross_play_have_exact_intervals():
    found = CrossPlay(("a",), ("b", "c"), torch.tensor([[99, 0]]), torch.tensor([[100, 0]]))
    (row,) = found.table()
    assert (row["rate"], row["episodes"]) == (0.99, 100)
    assert (row["low"], row["high"]) == pytest.approx((0.9455, 0.9997), abs=1e-4)
    assert found.rates[0, 1].isnan()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"controllers": 0}, "controllers is 0; it must be a whole number"),
        ({"rationality": -1.0}, "rationality is -1.0"),
        ({"frames_per_step": 239}, r"48 pairs must meet: give at least 240"),
        ({"problem": "reach"}, r"problem is 'reach'; choose one of \['avoid', 'reach_avoid'\]"),
        ({"action_key": "control"}, "not 'control': give one of two players"),
        ({"generator": 3}, "must be a torch.Generator"),
        (
            {"fixed": {"lost": TensorDictModule(lambda table: table, ["table"], ["disturbance"])}},
            r"lost reads \['table'",
        ),
        ({"fixed": {"lost": constant(1)}}, r"lost writes \['action'\], not 'disturbance'"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, message):
    options = {"max_steps": 4, "frames_per_step": 480, **settings}
    with pytest.raises(ValueError, match=message):
        League(LineGameEnv(60), constant(1), constant(1, "disturbance"), **options)


def test_a_target_that_nobody_declares_is_refused():
    with pytest.raises(ValueError, match="declares no target margin"):
        train(make_league(problem="reach_avoid"), (1, 1))


def test_an_opponent_asks_for_the_start_of_episodes_and_serves_one_batch():
    league = make_league(init_key="is_init")
    with pytest.raises(KeyError, match="InitTracker"):
        league.opponent(LineGameEnv(4).reset())
    league = make_league()
    league.opponent(LineGameEnv(4, max_steps=3).reset())
    with pytest.raises(ValueError, match=r"batch of \[4\] environments and got one of \[5\]"):
        league.opponent(LineGameEnv(5, max_steps=3).reset())
