"""CategoricalDQNLoss against a loop over samples, atoms and steps that shares no code with it."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.objectives import HardUpdate, SoftUpdate

from torchrl_safety.modules import RainbowNetwork, reset_noise
from torchrl_safety.objectives import (
    AvoidBackup,
    CategoricalDQNLoss,
    DiscountedReturnBackup,
    LipschitzReachAvoidBackup,
    ReachAvoidBackup,
    ReachBackup,
)

SUPPORT = (-1.0, 0.8)
ATOMS = 11
GAMMA = 0.9
BACKUPS = {
    "avoid": AvoidBackup,
    "reach": ReachBackup,
    "reach-avoid": ReachAvoidBackup,
    "Lipschitz": LipschitzReachAvoidBackup,
    "return": DiscountedReturnBackup,
}
SIGNALS = ("safety_margin", "target_margin", "reward")

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")


def make(problem: str = "avoid", dtype: torch.dtype = torch.float64, device: str = "cpu", **settings):
    """A loss whose online and target networks differ in weights and noise."""
    torch.manual_seed(0)
    network = RainbowNetwork(2, 3, support=SUPPORT, atoms=ATOMS, hidden=(8,), dtype=dtype, device=device)
    loss = CategoricalDQNLoss(network, **{"backup": BACKUPS[problem](), "gamma": GAMMA, **settings})
    with torch.no_grad():
        for key, value in loss.target_value_network_params.items(True, True):
            if key != "support":
                value.add_(torch.randn_like(value))
    return loss


def transitions(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> TensorDict:
    source = torch.Generator().manual_seed(seed)

    def uniform(*size: int) -> torch.Tensor:
        return 2.4 * torch.rand(*shape, *size, generator=source, dtype=dtype) - 1.2

    terminated, truncated = (torch.rand(*shape, 1, generator=source) < 0.3 for _ in range(2))
    after = {name: uniform(1) for name in SIGNALS} | {"observation": uniform(2)}
    after |= {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
    action = torch.randint(3, shape, generator=source)
    return TensorDict({"observation": uniform(2), "action": action, "next": after}, shape)


def windows(*shape: int, n: int = 4, seed: int = 0) -> TensorDict:
    """Windows of 1..n steps; what stands in the steps that do not exist is finite rubbish."""
    batch = transitions(*shape, seed=seed)
    source = torch.Generator().manual_seed(seed + 1)
    steps = {name: 2.4 * torch.rand(*shape, n, 1, generator=source, dtype=torch.float64) - 1.2 for name in SIGNALS}
    observations = torch.randn(*shape, n, 2, generator=source, dtype=torch.float64)
    length = torch.randint(1, n + 1, (*shape, 1, 1), generator=source)
    valid = torch.arange(n).unsqueeze(-1) < length
    for name in SIGNALS:
        steps[name] = torch.where(valid, steps[name], 1e6)
    batch["next", "observation"] = observations.gather(-2, (length - 1).expand(*shape, 1, 2)).squeeze(-2)
    batch["steps"] = TensorDict({**steps, "observation": observations, "valid": valid}, [*shape, n])
    return batch


def image(problem: str, v: float, step: dict[str, float], gamma: float, ended: bool) -> float:
    """The table of the operators, one line each."""
    g, l, r = (step[name] for name in SIGNALS)  # noqa: E741
    m = min(l, g)
    running, terminal = {
        "avoid": ((1 - gamma) * g + gamma * min(g, v), g),
        "reach": ((1 - gamma) * l + gamma * max(l, v), l),
        "reach-avoid": ((1 - gamma) * m + gamma * min(g, max(l, v)), m),
        "Lipschitz": (min(g, max(l, gamma * v)), m),
        "return": (r + gamma * v, r),
    }[problem]
    return terminal if ended else running


def softmax(row: list[float]) -> list[float]:
    weights = [math.exp(x) for x in row]
    return [w / sum(weights) for w in weights]


def project(places: list[float], probs: list[float], support: list[float]) -> list[float]:
    """Each mass is shared by the triangular kernels of the nodes around its place, clamped to the support."""
    gap = support[1] - support[0]
    inside = [min(max(x, support[0]), support[-1]) for x in places]
    return [sum(p * max(0.0, 1 - abs(x - z) / gap) for x, p in zip(inside, probs)) for z in support]


def mean(probs: list[float], places: list[float]) -> float:
    return sum(p * x for p, x in zip(probs, places))


def of_one(batch: TensorDict, problem: str, online, target, support: list[float], settings: dict):
    """Target distribution, cross-entropy and share of mass off the support of one transition or window."""
    if "steps" in batch:
        length = int(batch["steps", "valid"].sum())
        steps = [{name: batch["steps", name][t].item() for name in SIGNALS} for t in range(length)]
        after = [batch["steps", "observation"][t] for t in range(length)]
    else:
        length = 1
        steps, after = [{name: batch["next", name].item() for name in SIGNALS}], [batch["next", "observation"]]
    flag = "terminated" if settings.get("bootstrap_on_truncation") else "done"
    ended = batch["next", flag].item()
    candidates = []
    for k in range(1, length + 1) if settings.get("n_step") == "best" else [length]:
        chooser = online if settings.get("double", True) else target
        values = [mean(softmax(row), support) for row in chooser(after[k - 1])]
        probs = softmax(target(after[k - 1])[values.index(max(values))])
        places = support
        for t in reversed(range(k)):
            places = [
                image(problem, v, steps[t], settings.get("gamma", GAMMA), ended and t == length - 1) for v in places
            ]
        candidates.append((mean(probs, places), places, probs))
    _, places, probs = max(candidates, key=lambda candidate: candidate[0])
    m = project(places, probs, support)
    predicted = softmax(online(batch["observation"])[batch["action"].item()])
    off = sum(p for x, p in zip(places, probs) if x < support[0] or x > support[-1])
    return m, -sum(mi * math.log(pi) for mi, pi in zip(m, predicted)), off


def reference(loss: CategoricalDQNLoss, batch: TensorDict, problem: str, **settings) -> dict[str, torch.Tensor]:
    network, support = copy.deepcopy(loss.value_network), loss.support.tolist()
    other = copy.deepcopy(network)
    loss.target_value_network_params.data.clone().to_module(other, preserve_module_state=False)

    def online(observation: torch.Tensor) -> list[list[float]]:
        return network.logits(observation).tolist()

    def target(observation: torch.Tensor) -> list[list[float]]:
        return other.logits(observation).tolist()

    rows = [of_one(row, problem, online, target, support, settings) for row in batch.reshape(-1)]
    m, ce, off = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows))
    entropy = -(m * m.clamp_min(1e-300).log()).sum(-1)
    return {"target": m, "cross_entropy": ce, "kl": ce - entropy, "clipped_mass": off.mean()}


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got.detach().double().flatten(), expected.flatten(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("problem", BACKUPS)
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("layout", ["transitions", "last", "best"])
@pytest.mark.parametrize("bootstrap", [True, False])
def test_loss_priority_and_clipped_mass_equal_the_loop(problem, double, layout, bootstrap):
    """MATH §4: loss -Σ m log softmax, priority KL(m || p), and the share of the mass that is clipped."""
    batch = transitions(24) if layout == "transitions" else windows(24)
    settings = {"double": double, "bootstrap_on_truncation": bootstrap}
    settings |= {} if layout == "transitions" else {"n_step": layout}
    loss = make(problem, **settings)
    expected = reference(loss, batch, problem, **settings)
    result = loss(batch)
    close(loss.target_distribution(batch)[0], expected["target"])
    close(result["loss"], expected["cross_entropy"].mean())
    close(result["clipped_mass"], expected["clipped_mass"])
    close(batch["td_error"], expected["kl"])
    assert batch["td_error"].shape == (24, 1)
    assert (batch["td_error"] >= 0).all()


@pytest.mark.parametrize("layout", [transitions, windows])
@pytest.mark.parametrize("shape", [(1,), (3, 4), (2, 1, 3)])
def test_any_batch_shape_is_a_batch_of_rows(layout, shape):
    loss, batch = make("reach-avoid", n_step="best"), layout(*shape)
    expected = reference(loss, batch, "reach-avoid", n_step="best")
    close(loss(batch)["loss"], expected["cross_entropy"].mean())
    close(batch["td_error"], expected["kl"])
    assert batch["td_error"].shape == (*shape, 1)


def test_float32_agrees_and_stays_float32():
    loss, batch = make(dtype=torch.float32), transitions(24, dtype=torch.float32)
    expected = reference(loss, batch, "avoid")
    result = loss(batch)
    close(result["loss"], expected["cross_entropy"].mean(), 1e-5)
    close(batch["td_error"], expected["kl"], 1e-5)
    assert {result["loss"].dtype, result["clipped_mass"].dtype, batch["td_error"].dtype} == {torch.float32}


def test_a_window_by_hand():
    """MATH §3: gamma .5, margins .6 then .2 (terminal) give F0(.2) = .5 * .6 + .5 * min(.6, .2) = .4."""
    batch = windows(1, n=2)
    batch["steps", "valid"][:] = True
    batch["steps", "safety_margin"] = torch.tensor([[[0.6], [0.2]]], dtype=torch.float64)
    batch["next", "terminated"][:] = batch["next", "done"][:] = True
    atoms = torch.linspace(-1, 1, 6, dtype=torch.float64)  # -1, -.6, -.2, .2, .6, 1
    network = RainbowNetwork(2, 3, support=(-1.0, 1.0), atoms=6, dtype=torch.float64)
    loss = CategoricalDQNLoss(network, backup=AvoidBackup(), gamma=0.5, support=atoms)
    close(loss.target_distribution(batch)[0], torch.tensor([0, 0, 0, 0.5, 0.5, 0], dtype=torch.float64))


class Table(torch.nn.Module):
    """Two actions worth vmin and vmax, in this order; the reverse where its parameter is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.swapped = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("support", torch.linspace(-1, 1, 3))

    def forward(self, observation):
        rows = torch.tensor([[9.0, 0.0, 0.0], [0.0, 0.0, 9.0]])
        logits = torch.where(self.swapped > 0, rows.flip(0), rows).expand(*observation.shape[:-1], 2, 3)
        return logits, logits.softmax(-1) @ self.support


@pytest.mark.parametrize("double", [True, False])
def test_double_evaluates_the_action_that_the_online_network_prefers(double):
    """MATH §9: chosen by the online network, evaluated by the target network."""
    table = TensorDictModule(Table(), ["observation"], ["value_logits", "action_value"])
    loss = CategoricalDQNLoss(table, backup=AvoidBackup(), gamma=1.0, double=double)
    loss.target_value_network_params["module", "swapped"].fill_(1.0)
    batch = transitions(1, dtype=torch.float32)
    batch["next", "done"][:] = False
    batch["next", "safety_margin"][:] = 1.0
    worthless, _, best = loss.target_distribution(batch)[0][0].tolist()
    assert (worthless > 0.9, best > 0.9) == ((True, False) if double else (False, True))


def test_best_of_a_single_step_is_last():
    batch = windows(16, n=1)
    best, last = make("reach-avoid", n_step="best"), make("reach-avoid", n_step="last")
    assert torch.equal(best(batch.clone())["loss"], last(batch.clone())["loss"])
    plain = batch.exclude("steps")
    for name in SIGNALS:
        plain["next", name] = batch["steps", name].squeeze(-2)
    assert torch.equal(last(plain)["loss"], last(batch)["loss"])


@pytest.mark.parametrize("problem", ["avoid", "reach", "reach-avoid", "Lipschitz"])
def test_the_best_target_is_never_below_the_last(problem):
    batch = windows(32, seed=3)
    for name in SIGNALS:  # inside the support, where projecting keeps the mean
        batch["steps", name] = torch.where(batch["steps", "valid"], batch["steps", name] / 2, 1e6)
    best, last = (make(problem, n_step=n) for n in ("best", "last"))
    gain = (best.target_distribution(batch)[0] - last.target_distribution(batch)[0]) @ best.support
    assert gain.min() >= -1e-9
    assert gain.max() > 0.1


@pytest.mark.parametrize("n_step", ["last", "best"])
@pytest.mark.parametrize("layout", [transitions, windows])
def test_a_terminal_step_ignores_what_follows_even_nan(layout, n_step):
    loss, batch = make(n_step=n_step), layout(16)
    ended = batch["next", "done"].squeeze(-1)
    assert 0 < ended.sum() < 16
    expected, broken = loss.target_distribution(batch)[0], batch.clone()
    broken["next", "observation"][ended] = torch.nan
    if layout is windows:
        last = batch["steps", "valid"].sum(-2).squeeze(-1) - 1
        broken["steps", "observation"][ended, last[ended]] = torch.nan
    close(loss.target_distribution(broken)[0], expected)
    assert torch.isfinite(loss(broken)["loss"])
    broken["next", "done"][:] = broken["next", "terminated"][:] = False
    with pytest.raises(ValueError, match="the loss is NaN"):
        loss(broken)


def test_a_truncated_step_continues_only_if_asked_to():
    batch = transitions(16)
    batch["next", "terminated"][:] = False
    batch["next", "truncated"][:] = batch["next", "done"][:] = True
    margin = batch["next", "safety_margin"].clamp(*SUPPORT)
    cut = make().target_distribution(batch)[0] @ make().support
    close(cut, margin)
    going_on = make(bootstrap_on_truncation=True).target_distribution(batch)[0]
    batch["next", "done"][:] = False
    close(going_on, make().target_distribution(batch)[0])


def test_gamma_is_a_buffer_that_a_schedule_moves():
    loss, batch = make(), transitions(16)
    for gamma in (0.5, 0.9999, 1.0, 0.0):
        loss.gamma = gamma
        assert loss.gamma.item() == gamma
        close(loss(batch)["loss"], reference(loss, batch, "avoid", gamma=gamma)["cross_entropy"].mean())


def test_identity_keeps_the_distribution_of_the_next_state():
    loss, batch = make("return", gamma=1.0), transitions(16)
    batch["next", "reward"][:] = 0.0
    batch["next", "done"][:] = False
    probs = reference(loss, batch, "return", gamma=1.0)["target"]
    target, clipped = loss.target_distribution(batch)
    close(target, probs)
    assert clipped == 0
    close(target.sum(-1), torch.ones(16, dtype=torch.float64))


def test_all_mass_off_the_support_is_reported_and_put_on_its_ends():
    """MATH §4: the clipped share is reported."""
    batch = transitions(8)
    batch["next", "done"][:] = True
    batch["next", "safety_margin"] = torch.tensor([[-5.0], [5.0], [0.8], [-1.0]] * 2, dtype=torch.float64)
    target, clipped = make().target_distribution(batch)
    assert clipped.item() == pytest.approx(0.5)
    assert target.argmax(-1).tolist() == [0, 10, 10, 0] * 2
    close(target.amax(-1), torch.ones(8, dtype=torch.float64))


@pytest.mark.parametrize("problem", BACKUPS)
@pytest.mark.parametrize("end", [0, -1])
def test_rounding_at_a_margin_that_equals_an_end_of_the_support_is_not_clipped(problem, end):
    source = torch.Generator().manual_seed(0)
    for gamma in (0.9, 0.99, 0.999, 0.9999) * 8:
        low, high = (torch.rand(2, generator=source) * torch.tensor([-2.0, 2.0])).tolist()
        network = RainbowNetwork(2, 3, support=(low, high), hidden=())
        loss = CategoricalDQNLoss(network, backup=BACKUPS[problem](), gamma=gamma)
        batch = transitions(1, dtype=torch.float32)
        batch["next", "done"][:] = False
        for name in SIGNALS:
            batch["next", name] = loss.support[end].reshape(1, 1) * (1 - gamma if name == "reward" else 1)
        assert loss.target_distribution(batch)[1] == 0


# --- priorities, weights, reductions ---


def test_the_priority_of_a_perfect_prediction_is_zero_never_negative():
    torch.manual_seed(0)
    network = RainbowNetwork(2, 3, support=SUPPORT)
    loss = CategoricalDQNLoss(network, gamma=1.0)
    batch = transitions(256, dtype=torch.float32)
    batch["observation"] = batch["next", "observation"]
    batch["action"] = network(batch.select("observation"))["action_value"].argmax(-1)
    batch["next", "reward"][:] = 0.0
    batch["next", "done"][:] = False
    loss(batch)
    assert batch["td_error"].min() >= 0
    assert batch["td_error"].max() < 1e-4


def test_cross_entropy_is_the_other_priority():
    """MATH §4: cross-entropy is selectable."""
    loss, batch = make(priority="cross_entropy"), transitions(16)
    loss(batch)
    close(batch["td_error"], reference(loss, batch, "avoid")["cross_entropy"])


@pytest.mark.parametrize("shape", [(16,), (16, 1)])
def test_weights_multiply_each_loss_and_leave_priorities_alone(shape):
    """MATH §9: mean_j w_j CE_j, not Σ w l / Σ w. MATH §5: the priority comes from the unweighted error."""
    loss, batch = make(), transitions(16)
    expected = reference(loss, batch, "avoid")
    weight = torch.linspace(0, 0.4, 16, dtype=torch.float64)
    batch["priority_weight"] = weight.reshape(shape)
    close(loss(batch)["loss"], (weight * expected["cross_entropy"]).sum() / 16)
    close(batch["td_error"], expected["kl"])


def test_reductions_are_the_terms_their_sum_and_their_mean():
    batch = transitions(16)
    batch["priority_weight"] = torch.rand(16, dtype=torch.float64)
    terms, total, average = (make(reduction=name)(batch)["loss"] for name in ("none", "sum", "mean"))
    close(terms, batch["priority_weight"] * reference(make(), batch, "avoid")["cross_entropy"])
    close(total, terms.sum())
    close(average, terms.sum() / 16)


# --- as a TorchRL loss ---


def test_gradients_reach_the_online_network_and_leave_the_target_alone():
    loss, batch = make(), transitions(16)
    target = loss.target_value_network_params
    before = {key: value.clone() for key, value in target.items(True, True)}
    optimizer = torch.optim.SGD(loss.parameters(), 1.0)
    loss(batch)["loss"].backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in loss.parameters())
    optimizer.step()
    for key, value in target.items(True, True):
        assert torch.equal(value, before[key]), key
        assert not value.requires_grad, key
        assert value.grad is None
    assert not any(name.startswith("target") for name, _ in loss.named_parameters())
    assert {*loss.parameters()} == {*loss.value_network.parameters()}


@pytest.mark.parametrize("updater", [lambda loss: SoftUpdate(loss, tau=0.5), lambda loss: HardUpdate(loss)])
def test_a_target_updater_can_be_built_after_the_loss_has_run(updater):
    loss = make()
    reset_noise(loss)
    loss(transitions(16))
    updater(loss).step()
    loss(transitions(16))["loss"].backward()
    assert all(parameter.grad is not None for parameter in loss.parameters())
    assert not any(target.requires_grad for target in loss.target_value_network_params.values(True, True))


def test_repeated_updates_bring_the_prediction_to_a_terminal_target():
    loss, batch = make(), transitions(16)
    batch["next", "done"][:] = True
    optimizer = torch.optim.Adam(loss.parameters(), 0.03)
    divergence = []
    for _ in range(150):
        optimizer.zero_grad()
        loss(batch)["loss"].backward()
        optimizer.step()
        divergence.append(batch["td_error"].mean().item())
    assert divergence[-1] < 0.25 * divergence[0]


def test_state_dict_round_trip_with_weights_only():
    loss, batch = make(), transitions(16)
    loss.gamma = 0.77
    file = io.BytesIO()
    torch.save(loss.state_dict(), file)
    file.seek(0)
    other = make(gamma=0.1)
    reset_noise(other)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(batch.clone())["loss"], loss(batch.clone())["loss"])
    copied = copy.deepcopy(loss)
    assert torch.equal(copied(batch.clone())["loss"], loss(batch.clone())["loss"])


@pytest.mark.parametrize(("problem", "layout"), [("avoid", transitions), ("reach-avoid", windows)])
def test_compiles_without_graph_breaks_to_the_same_values(problem, layout):
    loss, batch = make(problem, n_step="best"), layout(16)
    batch["priority_weight"] = torch.rand(16, dtype=torch.float64)
    eager, compiled = batch.clone(), batch.clone()
    expected = loss(eager)["loss"]
    got = torch.compile(loss, fullgraph=True, backend="eager")(compiled)["loss"]
    assert torch.equal(got, expected)
    assert torch.equal(compiled["td_error"], eager["td_error"])
    got.backward()
    assert all(parameter.grad is not None for parameter in loss.parameters())


@pytest.mark.parametrize("problem", BACKUPS)
@pytest.mark.parametrize("layout", [transitions, windows])
def test_no_host_sync_on_an_accelerator(problem, layout):
    """Tensors of the meta device have no values: anything that asks for one raises."""
    loss = make(problem, device="meta", n_step="best").to("meta")
    batch = layout(16).to("meta")
    batch["priority_weight"] = torch.rand(16, device="meta")
    assert loss(batch)["loss"].is_meta
    with pytest.raises((RuntimeError, NotImplementedError)):
        batch["td_error"].max().item()


def test_a_loss_built_beside_another_default_device_lives_with_its_network():
    with torch.device("meta"):  # which holds no numbers
        loss = make(device="cpu")
    assert loss.gamma == GAMMA
    assert torch.isfinite(loss(transitions(4))["loss"])
