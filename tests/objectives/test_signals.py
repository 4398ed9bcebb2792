"""What a loss reads, under which keys, and what it says of batches and settings that cannot be right."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from tensordict.utils import unravel_key

from torchrl_safety.modules import RainbowNetwork, greedy_policy
from torchrl_safety.objectives import AvoidBackup, CategoricalDQNLoss, DiscountedReturnBackup, ReachAvoidBackup
from torchrl_safety.objectives.signals import check_finite, read_steps

BACKUPS = (AvoidBackup, ReachAvoidBackup, DiscountedReturnBackup)
NETWORK_KEYS = {"value_logits": "value_logits", "action_value": "action_value", "observation": "observation"}
FLAGS = {"terminated": "terminated", "done": "done"}

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")


def network(keys: dict = NETWORK_KEYS, **settings) -> RainbowNetwork:
    torch.manual_seed(0)
    return RainbowNetwork(
        2,
        3,
        **{"support": (-1.0, 1.0), "atoms": 11, "hidden": (8,), **settings},
        in_key=keys["observation"],
        out_keys=(keys["value_logits"], keys["action_value"]),
    )


def transitions(batch: int = 6) -> TensorDict:
    source = torch.Generator().manual_seed(0)
    after = {key: torch.rand(batch, 1, generator=source) for key in ("safety_margin", "target_margin", "reward")}
    after |= {"observation": torch.rand(batch, 2, generator=source)}
    after |= {key: torch.rand(batch, 1, generator=source) < 0.4 for key in ("terminated", "done")}
    action = torch.randint(3, (batch,), generator=source)
    weight = torch.rand(batch, generator=source)
    root = {"observation": torch.rand(batch, 2, generator=source), "action": action, "priority_weight": weight}
    return TensorDict({**root, "next": after}, [batch])


def windows(batch: int = 6, n: int = 3) -> TensorDict:
    result = transitions(batch)
    length = 1 + torch.arange(batch).reshape(-1, 1, 1) % n
    valid = torch.arange(n).unsqueeze(-1) < length
    margin = torch.rand(batch, n, 1, generator=torch.Generator().manual_seed(1))
    result["steps"] = TensorDict({"safety_margin": margin, "valid": valid}, [batch, n])
    return result


def steps_of(batch: TensorDict, bootstrap: bool = False):
    return read_steps(batch, {"safety_margin": "safety_margin"}, **FLAGS, bootstrap=bootstrap)


# --- one layout for transitions and windows ---


@pytest.mark.parametrize(("bootstrap", "flag"), [(True, "terminated"), (False, "done")])
def test_a_transition_is_a_window_of_one_step(bootstrap, flag):
    batch = transitions()
    signals, ended, valid = steps_of(batch, bootstrap)
    assert valid is None
    assert torch.equal(signals["safety_margin"], batch["next", "safety_margin"].reshape(6, 1, 1))
    assert torch.equal(ended, batch["next", flag].reshape(6, 1, 1))
    batch["steps"] = {
        "safety_margin": batch["next", "safety_margin"].unsqueeze(-2),
        "valid": torch.ones(6, 1, 1, dtype=torch.bool),
    }
    same, ended_too, valid = steps_of(batch, bootstrap)
    assert torch.equal(same["safety_margin"], signals["safety_margin"])
    assert torch.equal(ended_too, ended)
    assert valid.all()


@pytest.mark.parametrize(("bootstrap", "flag"), [(True, "terminated"), (False, "done")])
def test_only_the_last_step_of_a_window_that_exists_can_end_it(bootstrap, flag):
    batch = windows()
    _, ended, valid = steps_of(batch, bootstrap)
    assert torch.equal(valid, batch["steps", "valid"])
    for i in range(6):
        last = int(batch["steps", "valid"][i].sum()) - 1
        for t in range(3):
            assert ended[i, t].item() == (t == last and batch["next", flag][i].item())


# --- keys ---


def renamed(name: str) -> tuple[str, ...]:
    return ("agents", f"my_{name}")


@pytest.mark.parametrize("backup", BACKUPS)
@pytest.mark.parametrize("bootstrap", [True, False])
def test_every_key_can_be_renamed_and_nested(backup, bootstrap):
    plain, settings = transitions(), {"backup": backup(), "bootstrap_on_truncation": bootstrap}
    expected = CategoricalDQNLoss(network(), **settings)(plain)["loss"]
    names = list(CategoricalDQNLoss.default_keys.__dataclass_fields__)
    keys = {name: renamed(name) for name in names}
    loss = CategoricalDQNLoss(network({**keys, "observation": renamed("observation")}), **settings)
    loss.set_keys(**keys)
    batch = TensorDict({}, [6])
    for key, value in transitions().items(True, True):
        path = key if isinstance(key, tuple) else (key,)
        batch[(*path[:-1], *renamed(path[-1]))] = value
    assert torch.equal(loss(batch)["loss"], expected)
    assert torch.equal(batch[renamed("priority")], plain["td_error"])
    read = {"observation", *backup.signals, "terminated", "done"}
    wanted = {renamed("observation"), renamed("action"), *(("next", *renamed(name)) for name in read)}
    assert set(loss.in_keys) == wanted


def test_a_margin_may_stand_in_the_reward():
    batch = transitions()
    loss = CategoricalDQNLoss(network(), backup=AvoidBackup())
    expected = loss(batch.clone())["loss"]
    batch["next", "reward"] = batch["next"].pop("safety_margin")
    loss.set_keys(safety_margin="reward")
    assert torch.equal(loss(batch)["loss"], expected)
    loss.set_keys(safety_margin=None)
    with pytest.raises(KeyError, match="safety_margin"):
        loss(batch)


def test_windows_are_read_under_the_renamed_keys_too():
    batch = windows()
    loss = CategoricalDQNLoss(network(), backup=AvoidBackup())
    expected = loss(batch.clone())["loss"]
    batch["steps", "agents", "g"] = batch["steps"].pop("safety_margin")
    loss.set_keys(safety_margin=("agents", "g"))
    assert torch.equal(loss(batch)["loss"], expected)


def test_an_unknown_key_name_is_refused():
    with pytest.raises(ValueError, match="margin is not an accepted"):
        CategoricalDQNLoss(network()).set_keys(margin="g")


@pytest.mark.parametrize("backup", BACKUPS)
@pytest.mark.parametrize("nested", [False, True])
def test_keyword_arguments_do_what_a_tensordict_does(backup, nested):
    batch = transitions().exclude("priority_weight")
    loss = CategoricalDQNLoss(network(), backup=backup())
    if nested:
        loss.set_keys(action=("agents", "action"), done=("agents", "done"))
        batch["agents", "action"] = batch.pop("action")
        batch["next", "agents", "done"] = batch["next"].pop("done")
    arguments = {"_".join(key) if isinstance(key, tuple) else key: batch[key] for key in loss.in_keys}
    assert len(arguments) == 5 + len(backup.signals)
    by_name = loss(**arguments)
    by_batch = loss(batch)
    for value, key in zip(by_name, loss.out_keys, strict=True):
        assert torch.equal(value, by_batch[key])


# --- networks ---


def test_a_wrapped_network_reads_its_own_inputs_in_both_states():
    double = TensorDictModule(lambda x: 2 * x, ["half"], ["observation"])
    batch = transitions()
    expected = CategoricalDQNLoss(network(), backup=AvoidBackup())(batch.clone())["loss"]
    for wrapped in (TensorDictSequential(double, network()), TensorDictSequential(double, greedy_policy(network()))):
        halved = batch.exclude("observation", ("next", "observation"))
        halved["half"], halved["next", "half"] = batch["observation"] / 2, batch["next", "observation"] / 2
        loss = CategoricalDQNLoss(wrapped, backup=AvoidBackup())
        assert torch.equal(loss(halved)["loss"], expected)
        assert "observation" not in halved
        assert ("next", "half") in loss.in_keys


def bare(atoms: int = 5) -> TensorDictModule:
    """A network without a support buffer."""
    linear = torch.nn.Sequential(torch.nn.Linear(2, 3 * atoms), torch.nn.Unflatten(-1, (3, atoms)))
    return TensorDictSequential(
        TensorDictModule(linear, ["observation"], ["value_logits"]),
        TensorDictModule(lambda x: x.softmax(-1) @ torch.linspace(-1, 1, atoms), ["value_logits"], ["action_value"]),
    )


def test_a_network_without_a_support_needs_one_passed():
    with pytest.raises(ValueError, match=r"0 buffers named 'support'.*support=atoms"):
        CategoricalDQNLoss(bare())
    with pytest.raises(ValueError, match="2 buffers named 'support'"):
        CategoricalDQNLoss(TensorDictSequential(network(), network()))
    loss = CategoricalDQNLoss(bare(), backup=AvoidBackup(), support=torch.linspace(-1, 1, 5))
    assert torch.isfinite(loss(transitions())["loss"])
    assert loss.state_dict()["support"].tolist() == [-1, -0.5, 0, 0.5, 1]


@pytest.mark.parametrize(
    "support",
    [
        torch.zeros(1),
        torch.zeros(2, 5),
        torch.arange(5),
        torch.linspace(1, -1, 5),
        torch.zeros(5),
        torch.tensor([0.0, 1.0, 3.0]),
        torch.tensor([0.0, 1.0, torch.nan]),
    ],
    ids=str,
)
def test_a_support_that_is_not_evenly_spaced_and_increasing_is_refused(support):
    with pytest.raises(ValueError, match=r"the support .*evenly spaced"):
        CategoricalDQNLoss(bare(), support=support)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", [(-1.0, 1.0), (-170.4, 0.697), (0.0, 1e-3), (-1e4, 1e4)])
def test_rounding_of_a_support_is_no_fault(dtype, ends):
    loss = CategoricalDQNLoss(network(support=ends, atoms=51, dtype=dtype))
    assert torch.equal(loss.support, torch.linspace(*ends, 51, dtype=dtype))


def test_a_network_that_does_not_write_what_is_read_is_named():
    loss = CategoricalDQNLoss(network(), backup=AvoidBackup())
    loss.set_keys(value_logits="logits")
    with pytest.raises(KeyError, match=r"'logits' is missing.*loss.set_keys"):
        loss(transitions())


# --- what cannot be right ---


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n_step": "first"}, r"n_step is 'first'.*\['last', 'best'\]"),
        ({"priority": "td"}, r"priority is 'td'.*\['kl', 'cross_entropy'\]"),
        ({"reduction": "max"}, r"reduction is 'max'.*\['mean', 'sum', 'none'\]"),
        ({"gamma": 1.5}, "gamma is 1.5"),
        ({"gamma": float("nan")}, "gamma is nan"),
    ],
)
def test_settings_out_of_range_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        CategoricalDQNLoss(network(), **settings)


REMEDIES = {
    ("next", "safety_margin"): r"environment.*loss\.set_keys",
    ("next", "done"): "environment",
    ("next", "observation"): "input of the network",
    "observation": "input of the network",
    "action": "action index",
}


@pytest.mark.parametrize("key", REMEDIES, ids=str)
def test_a_missing_key_is_named_with_those_present_and_the_remedy(key):
    batch = transitions()
    del batch[key]
    with pytest.raises(KeyError, match=REMEDIES[key]) as caught:
        CategoricalDQNLoss(network(), backup=AvoidBackup())(batch)
    text = caught.value.args[0]
    assert f"the key {unravel_key(key)!r} is missing" in text
    for present in batch.keys(True, True):
        assert str(present) in text


@pytest.mark.parametrize(
    ("key", "n_step", "remedy"),
    [("safety_margin", "last", "NStepTransform"), ("valid", "last", "NStepTransform"), ("", "best", "NStepTransform")],
)
def test_a_window_without_a_key_asks_for_it_in_the_transform(key, n_step, remedy):
    batch = windows()
    if key:
        del batch["steps", key]
    missing = repr(("steps", key or "observation"))
    with pytest.raises(KeyError, match=remedy) as caught:
        CategoricalDQNLoss(network(), backup=AvoidBackup(), n_step=n_step)(batch)
    assert f"the key {missing} is missing" in caught.value.args[0]


@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    ("layout", "backup", "key"),
    [
        (transitions, AvoidBackup, ("next", "safety_margin")),
        (transitions, ReachAvoidBackup, ("next", "target_margin")),
        (transitions, DiscountedReturnBackup, ("next", "reward")),
        (windows, AvoidBackup, ("steps", "safety_margin")),
    ],
)
def test_a_signal_that_is_not_finite_is_named(layout, backup, key, fault):
    batch = layout()
    batch[key][2] = fault
    with pytest.raises(ValueError, match="holds NaN or inf") as caught:
        CategoricalDQNLoss(network(), backup=backup())(batch)
    assert repr(key) in str(caught.value)
    assert "td_error" not in batch


def test_inside_a_compiled_graph_the_check_is_an_assertion():
    check = torch.compile(check_finite, fullgraph=True, backend="eager")
    check("'g'", torch.zeros(3))
    with pytest.raises(RuntimeError, match="'g' holds NaN"):
        check("'g'", torch.tensor([0.0, torch.nan]))


@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize(
    ("layout", "key"),
    [
        (transitions, ("next", "safety_margin")),
        (transitions, ("next", "done")),
        (windows, ("steps", "safety_margin")),
        (windows, ("next", "done")),
    ],
)
def test_a_signal_or_flag_without_its_last_dimension_is_refused(layout, key, batch):
    data = layout(batch)
    data[key] = data[key].squeeze(-1)
    with pytest.raises(ValueError, match="unsqueeze") as caught:
        CategoricalDQNLoss(network(), backup=AvoidBackup())(data)
    assert repr(key) in str(caught.value)


def test_margins_and_flags_that_both_lack_the_dimension_are_refused():
    batch = transitions()
    for key in ("safety_margin", "done"):
        batch["next", key] = batch["next", key].squeeze(-1)
    with pytest.raises(ValueError, match="unsqueeze"):
        CategoricalDQNLoss(network(), backup=AvoidBackup())(batch)


def test_a_one_hot_action_is_refused_and_a_column_of_indices_is_not():
    batch = transitions()
    loss = CategoricalDQNLoss(network(), backup=AvoidBackup())
    expected = loss(batch.clone())["loss"]
    batch["action"] = batch["action"].unsqueeze(-1)
    assert torch.equal(loss(batch)["loss"], expected)
    batch["action"] = torch.nn.functional.one_hot(batch["action"].squeeze(-1), 3)
    with pytest.raises(ValueError, match="not one-hot"):
        loss(batch)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (torch.tensor([0.0, 0.7, 1.0, 2.0, 0.0, 1.0]), "torch.float32 do not index"),
        (torch.ones(6, dtype=torch.bool), "torch.bool do not index"),
        (torch.tensor([0, 1, 2, 3, 0, 1]), r"an action lies outside 0\.\.2"),
        (torch.tensor([0, 1, 2, -1, 0, 1]), r"an action lies outside 0\.\.2"),
    ],
)
def test_an_action_that_is_no_index_is_refused_and_never_rounded(action, words):
    with pytest.raises(ValueError, match=words):
        CategoricalDQNLoss(network(), backup=AvoidBackup())(transitions().set("action", action))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_only_the_mean_of_an_empty_batch_is_refused(reduction):
    loss = CategoricalDQNLoss(network(), backup=AvoidBackup(), reduction=reduction)
    if reduction == "mean":
        with pytest.raises(ValueError, match=r"the batch \[0\] holds no transition"):
            loss(transitions(0))
    else:
        assert loss(transitions(0))["loss"].sum() == 0


@pytest.mark.parametrize("fault", [torch.nan, torch.inf])
def test_what_stands_in_the_invalid_steps_of_a_window_is_not_read(fault):
    loss, batch = CategoricalDQNLoss(network(), backup=AvoidBackup()), windows()
    invalid = ~batch["steps", "valid"]
    assert invalid.any()
    expected = loss(batch.clone())["loss"]
    batch["steps", "safety_margin"][invalid] = fault
    torch.testing.assert_close(loss(batch)["loss"], expected, rtol=0, atol=0)


@pytest.mark.parametrize("gamma", [[0.5], None, "0.5", torch.tensor([0.5, 0.6])])
def test_a_discount_that_is_not_one_number_is_refused(gamma):
    loss = CategoricalDQNLoss(network(), backup=AvoidBackup(), gamma=0.9)
    with pytest.raises(ValueError, match=r"gamma is .*as one number"):
        loss.gamma = gamma
    loss.gamma = torch.tensor([0.5], requires_grad=True)
    assert loss.gamma == 0.5
    assert not loss.gamma.requires_grad


@pytest.mark.parametrize("gamma", [-0.1, 1.5, torch.nan])
def test_a_discount_assigned_out_of_its_range_is_refused(gamma):
    loss = CategoricalDQNLoss(network(), backup=AvoidBackup(), gamma=0.9)
    with pytest.raises(ValueError, match=r"gamma is .*; it must lie in \[0, 1\]"):
        loss.gamma = gamma
    with pytest.raises(ValueError, match=r"gamma lies outside \[0, 1\]"):
        loss.gamma = torch.tensor(gamma)
    assert loss.gamma == 0.9


@pytest.mark.parametrize("key", ["observation", ("next", "observation")])
def test_a_loss_that_is_not_finite_is_refused_before_anything_is_written(key):
    batch = transitions()
    batch["next", "done"][:] = False
    batch[key][0] = torch.nan
    with pytest.raises(ValueError, match="the loss is NaN or inf"):
        CategoricalDQNLoss(network(), backup=AvoidBackup())(batch)
    assert "td_error" not in batch


def test_a_support_of_another_length_than_the_logits_is_refused():
    loss = CategoricalDQNLoss(network(), backup=AvoidBackup(), support=torch.linspace(-1, 1, 7))
    with pytest.raises(ValueError, match=r"\[6, 11\] do not fit the support of 7 atoms"):
        loss(transitions())


@pytest.mark.parametrize("backup", [AvoidBackup, "avoid"])
def test_a_backup_that_is_no_instance_is_refused(backup):
    with pytest.raises(ValueError, match="give an instance of a Backup"):
        CategoricalDQNLoss(network(), backup=backup)
