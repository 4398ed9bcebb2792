"""Every loss finds its entries under any names, and refuses by name what is missing or has no place."""

from __future__ import annotations

import pytest
import torch
from contracts import BACKUPS, SIGNALS, Keys
from loss_cases import EVERY, close, losses, run, same
from tensordict import TensorDict
from torch import Tensor

from torchrl_safety.objectives import AvoidBackup, ReachAvoidBackup

NESTED = Keys(("agent", "state"), ("agent", "move"), ("agent", "score"), ("other", "move"), ("other", "score"))


def renamed(batch: TensorDict, names: dict) -> TensorDict:
    """`batch` with entries of the root and of the next state under other keys."""
    batch = batch.clone()
    for place in (batch, batch["next"]):
        for old, new in names.items():
            if old in place.keys():  # noqa: SIM118
                place.rename_key_(old, new)
    return batch


@EVERY
def test_nested_keys_change_nothing(case):
    flags = {name: ("agent", name) for name in (*SIGNALS, "terminated", "done")}
    loss = case.build(keys=NESTED, backup=ReachAvoidBackup())
    loss.set_keys(action=NESTED.action, **flags, **({"disturbance": NESTED.disturbance} if case.game else {}))
    names = {name if name != "log_prob" else "action_log_prob": key for name, key in NESTED._asdict().items()}
    batch = renamed(case.batch(), {**flags, **names})
    same(run(loss, batch), run(case.build(backup=ReachAvoidBackup()), case.batch()))


@EVERY
def test_every_key_of_a_loss_can_be_renamed_those_of_torchrls_loss_too(case):
    written = {"action_value", "value_logits", "state_action_value", "value"}  # by the networks
    keys = Keys("observation", "my_action", "my_sample_log_prob", "my_disturbance", "my_disturbance_log_prob")
    loss = case.build(keys=keys, backup=ReachAvoidBackup())
    plain, batch = case.build(backup=ReachAvoidBackup()), case.batch()
    batch["priority_weight"] = torch.linspace(0.1, 1, batch.numel(), dtype=torch.float64).reshape(batch.shape)
    names = {name: key for name, key in vars(plain.tensor_keys).items() if name not in written}
    loss.set_keys(**{name: f"my_{name}" for name in names})
    moved = renamed(batch, {key: f"my_{name}" for name, key in names.items()})
    if case.on_policy:
        for each, rows in ((plain, batch), (loss, moved)):
            each.value_estimator(rows, params=each.critic_network_params)
        assert torch.equal(moved["my_advantage"], batch["advantage"])
        assert torch.equal(moved["my_value_target"], batch["value_target"])
    same(run(loss, moved), run(plain, batch))
    assert not {"advantage", "value_target", "td_error"} & {*moved.keys()}
    if not case.on_policy:
        assert torch.equal(moved["my_priority"], batch["td_error"])


@EVERY
def test_a_ready_estimator_gets_the_keys_of_the_loss(case):
    loss, batch = case.build(backup=AvoidBackup(), gamma=0.5), case.batch()
    expected = run(loss, batch.clone())
    kind, network = type(loss.value_estimator), getattr(loss, "critic_network", None)
    loss.set_keys(safety_margin=("agent", "g"), done=("agent", "done"))
    for ready in (kind(backup=AvoidBackup(), gamma=0.5, value_network=network), kind):
        settings = {} if ready is not kind else {"backup": AvoidBackup(), "gamma": 0.5}
        loss.make_value_estimator(ready, **settings)
        assert loss.value_estimator.tensor_keys.safety_margin == ("agent", "g")
        same(run(loss, renamed(batch, {"safety_margin": ("agent", "g"), "done": ("agent", "done")})), expected)


@EVERY
def test_a_margin_can_stand_on_the_reward(case):
    loss, batch = case.build(backup=AvoidBackup()), case.batch()
    expected = run(loss, batch.clone())
    del batch["next", "reward"]
    batch["next"].rename_key_("safety_margin", "reward")
    loss.set_keys(safety_margin="reward")
    same(run(loss, batch), expected)
    assert ("next", "reward") in loss.in_keys
    assert ("next", "safety_margin") not in loss.in_keys


@EVERY
def test_a_batch_without_a_signal_is_refused_by_name(case):
    for backup, names in BACKUPS:
        for name in names:
            loss, batch = case.build(backup=backup), case.batch()
            del batch["next", name]
            with pytest.raises(KeyError, match=rf"\('next', '{name}'\) is missing; present: .*'action'.*set_keys"):
                loss(batch)


@EVERY
def test_keyword_tensors_equal_the_tensordict(case):
    loss, batch = case.build(backup=ReachAvoidBackup(), bootstrap_on_truncation=True), case.batch()
    expected = run(loss, batch.clone())
    assert len(loss.in_keys) == len({*loss.in_keys})
    tensors = {key if isinstance(key, str) else "_".join(key): batch[key] for key in loss.in_keys}
    assert {"observation", "action", "next_observation", "next_safety_margin", "next_target_margin"} <= {*tensors}
    assert "next_reward" not in tensors  # which this backup does not read
    torch.manual_seed(1)
    found = loss(**tensors)
    found = (found,) if isinstance(found, Tensor) else found
    assert len(found) == len(loss.out_keys)
    for key, value in zip(loss.out_keys, found):
        close(value, expected[key], 1e-12)


@EVERY
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_margin_that_is_no_number_is_refused(case, bad):
    loss, batch = case.build(backup=AvoidBackup()), case.batch()
    batch["next", "safety_margin"].view(-1)[2] = bad
    with pytest.raises(ValueError, match=r"safety_margin.*NaN or inf"):
        loss(batch)


@losses("discrete SAC")
def test_an_action_may_keep_its_trailing_dimension(case):
    loss, batch = case.build(), case.batch()
    flat = batch.clone().set("action", batch["action"].reshape(batch.shape))
    same(run(loss, flat.clone()), run(loss, flat.clone().set("action", flat["action"].unsqueeze(-1))))


@losses("DQN", "discrete SAC", "categorical DQN", "game DQN", "game categorical DQN")
def test_one_hot_actions_are_refused(case):
    loss, batch = case.build(backup=AvoidBackup()), case.batch(3)  # as many rows as actions, where shapes would fit
    batch["action"] = torch.nn.functional.one_hot(batch["action"], 3)
    with pytest.raises(ValueError, match="not one-hot"):
        loss(batch)
