"""Forward and backward of every loss beside the same maths written by hand, and beside TorchRL's own loss.

Run with `OMP_NUM_THREADS=1 python -m pytest benchmarks/bench_losses.py --benchmark-columns=median`: one table per loss,
in processor time of this thread, with the ratio to its fastest row in brackets. With `COMPILED=1` before it there are
rows of `torch.compile(loss, fullgraph=True)` and of the compiled hand-written form too, which take minutes to compile.
The hand-written rows use plain modules and tensors, give all that the loss gives (its terms, what it logs, the
priorities), and the loss is checked against them, numbers and gradients, before the clock starts. TorchRL's losses do
the like work for other targets.
"""

import copy
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.nn import functional as F
from torchrl.modules import (
    MLP,
    DistributionalQValueActor,
    NormalParamExtractor,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import (
    A2CLoss,
    ClipPPOLoss,
    DiscreteSACLoss,
    DistributionalDQNLoss,
    DQNLoss,
    LossModule,
    SACLoss,
    SoftUpdate,
)

from torchrl_safety.modules import RainbowNetwork
from torchrl_safety.objectives import (
    AvoidBackup,
    CategoricalDQNLoss,
    DiscreteSafetySACLoss,
    SafetyA2CLoss,
    SafetyDQNLoss,
    SafetyPPOLoss,
    SafetySACLoss,
)

OBSERVATION, ACTIONS, ATOMS, CONTROLS = 6, 3, 51, 2
OFF_POLICY, ON_POLICY = 256, 1024
GAMMA, LEAST_ALPHA, CLIP, ENTROPY_COEFF = 0.99, 1e-3, 0.2, 0.01

Network = TypeVar("Network", bound=nn.Module)


class Row(NamedTuple):
    forward: Callable[[], Mapping[str, Tensor]]
    """The terms of the loss, and all that it logs."""
    parameters: list[nn.Parameter]
    batch: TensorDict
    """Where a loss puts the priorities."""

    def train(self) -> Mapping[str, Tensor]:
        for parameter in self.parameters:
            parameter.grad = None
        terms = self.forward()
        torch.stack([value for name, value in terms.items() if name.startswith("loss")]).sum().backward()
        return terms

    def numbers(self) -> dict[str, Tensor]:
        torch.manual_seed(1)
        terms = dict(self.train().items())
        gradient = torch.cat([parameter.grad.flatten() for parameter in self.parameters if parameter.grad is not None])
        return {**self.batch.select("td_error", strict=False), **terms, "gradient": gradient.norm()}


def mlp(inputs: int, outputs: int, *head: nn.Module) -> nn.Module:
    body = MLP(in_features=inputs, out_features=outputs, num_cells=[128, 128], activation_class=nn.ReLU)
    return nn.Sequential(body, *head) if head else body


def make_batch(size: int, *, continuous: bool = False) -> TensorDict:
    ended = torch.rand(size, 1) < 0.05
    after = {"observation": torch.randn(size, OBSERVATION), "terminated": ended, "done": ended}
    after |= {"safety_margin": torch.randn(size, 1), "reward": torch.randn(size, 1)}
    action = torch.rand(size, CONTROLS) * 1.8 - 0.9 if continuous else torch.randint(ACTIONS, (size,))
    batch = {"observation": torch.randn(size, OBSERVATION), "action": action, "next": after}
    if size == ON_POLICY:
        batch |= {"advantage": torch.randn(size, 1), "value_target": torch.randn(size, 1)}
        batch["action_log_prob"] = torch.randn(size) / 10 - math.log(ACTIONS)
    return TensorDict(batch, [size])


class Rivals(NamedTuple):
    ours: LossModule
    torchrl: LossModule
    by_hand: Callable[[], dict[str, Tensor]]
    parameters: list[nn.Parameter]
    """Those of the hand-written form."""
    batch: TensorDict

    def row(self, way: str) -> Row:
        if way.startswith("by_hand"):
            call = torch.compile(self.by_hand) if way == "by_hand_compiled" else self.by_hand
            return Row(call, self.parameters, self.batch)
        loss = self.torchrl if way == "torchrl" else self.ours
        call = torch.compile(loss, fullgraph=True) if way == "compiled" else loss
        return Row(lambda: call(self.batch), list(loss.parameters()), self.batch)


def moved(loss: LossModule) -> LossModule:
    """`loss` with target networks that differ from the online ones."""
    SoftUpdate(loss, tau=0.01)
    for name, target in loss.named_buffers():
        if name.startswith("target_") and "_params." in name and "support" not in name:
            target.data += torch.randn_like(target) / 100
    return loss


def copies(network: Network, params: TensorDictBase) -> list[Network]:
    """`network` with the values of `params`, once for each of the critics stacked in it."""
    made = []
    for values in params.data.unbind(0) if params.batch_dims else [params.data]:
        values = values.clone().flatten_keys(".")
        made.append(copy.deepcopy(network))
        state = made[-1].state_dict()
        made[-1].load_state_dict({name: next(v for k, v in values.items() if k.endswith(name)) for name in state})
    return made


def weights(*modules: nn.Module) -> list[nn.Parameter]:
    return [parameter for module in modules for parameter in module.parameters()]


def avoid(batch: TensorDict, value: Tensor) -> Tensor:
    margin, ended = batch["next", "safety_margin"], batch["next", "done"]
    return torch.where(ended, margin, (1 - GAMMA) * margin + GAMMA * torch.minimum(margin, value))


# --- value losses ---


def dqn() -> Rivals:
    batch, network = make_batch(OFF_POLICY), mlp(OBSERVATION, ACTIONS)
    loss = moved(SafetyDQNLoss(TensorDictModule(network, ["observation"], ["action_value"]), gamma=GAMMA))
    actor = QValueActor(copy.deepcopy(network), in_keys=["observation"], action_space="categorical")
    theirs = moved(DQNLoss(actor, action_space="categorical", delay_value=True, double_dqn=True))
    theirs.make_value_estimator(gamma=GAMMA)
    (online,), (target,) = copies(network, loss.value_network_params), copies(network, loss.target_value_network_params)
    now, after, index = batch["observation"], batch["next", "observation"], batch["action"].unsqueeze(-1)

    def by_hand() -> dict[str, Tensor]:
        with torch.no_grad():
            wanted = avoid(batch, target(after).gather(-1, online(after).argmax(-1, keepdim=True)))
        found = online(now).gather(-1, index)
        return {"loss": F.smooth_l1_loss(found, wanted), "td_error": (found.detach() - wanted).abs()}

    return Rivals(loss, theirs, by_hand, weights(online), batch)


def project(atoms: Tensor, probs: Tensor, support: Tensor) -> Tensor:
    low, high = float(support[0]), float(support[-1])
    position = ((atoms.clamp(low, high) - low) * ((ATOMS - 1) / (high - low))).clamp_(0, ATOMS - 1)
    lower = position.floor().clamp_(max=ATOMS - 2)
    upper_mass, index = probs * (position - lower), lower.long()
    mass = torch.zeros_like(probs)
    return mass.scatter_add_(-1, index, probs - upper_mass).scatter_add_(-1, index + 1, upper_mass)


def categorical_dqn() -> Rivals:
    batch = make_batch(OFF_POLICY)
    batch["next", "safety_margin"] = batch["next", "safety_margin"].clamp(-1.5, 1.5)
    network = RainbowNetwork(OBSERVATION, ACTIONS, support=(-1.5, 1.5), atoms=ATOMS, dueling=None, noisy=False)
    support, every = torch.linspace(-1.5, 1.5, ATOMS), torch.arange(OFF_POLICY)
    loss = moved(CategoricalDQNLoss(network, backup=AvoidBackup(), gamma=GAMMA))
    layers = mlp(OBSERVATION, ATOMS * ACTIONS, nn.Unflatten(-1, (ATOMS, ACTIONS)), nn.LogSoftmax(-2))
    actor = DistributionalQValueActor(layers, support=support, in_keys=["observation"], action_space="categorical")
    theirs = moved(DistributionalDQNLoss(actor, gamma=GAMMA, delay_value=True))
    (online,), (target,) = copies(network, loss.value_network_params), copies(network, loss.target_value_network_params)
    now, after, index = batch["observation"], batch["next", "observation"], batch["action"].reshape(-1, 1, 1)

    def by_hand() -> dict[str, Tensor]:
        with torch.no_grad():
            best = (online.logits(after).softmax(-1) @ support).argmax(-1)
            probs = target.logits(after)[every, best].softmax(-1)
            atoms = avoid(batch, support.expand_as(probs))
            outside = (atoms < support[0] - 1e-5) | (atoms > support[-1] + 1e-5)
            wanted, clipped = project(atoms, probs, support), (probs * outside).sum(-1).mean()
        found = online.logits(now).gather(1, index.expand(-1, 1, ATOMS)).squeeze(1)
        cross_entropy = -(wanted * found.log_softmax(-1)).sum(-1)
        divergence = (cross_entropy.detach() - torch.special.entr(wanted).sum(-1)).clamp_min(0)
        return {"loss": cross_entropy.mean(), "clipped_mass": clipped, "td_error": divergence.unsqueeze(-1)}

    return Rivals(loss, theirs, by_hand, weights(online), batch)


# --- soft actor-critic ---


def temperature(log_alpha: nn.Parameter) -> Tensor:
    log_alpha.data.clamp_(math.log(LEAST_ALPHA))
    return log_alpha.detach().exp()


def act(policy: nn.Module, observation: Tensor) -> tuple[Tensor, Tensor]:
    """A draw of the squashed normal policy, and its log-probability."""
    loc, scale = policy(observation)
    noise = torch.randn_like(loc)
    raw = loc + scale * noise
    normal = -0.5 * noise.square() - scale.log() - 0.5 * math.log(2 * math.pi)
    return raw.tanh(), (normal - 2 * (math.log(2) - raw - F.softplus(-2 * raw))).sum(-1)


def least(critics: list[nn.Module], *state: Tensor) -> Tensor:
    return torch.minimum(critics[0](*state), critics[1](*state))


def sac() -> Rivals:
    batch = make_batch(OFF_POLICY, continuous=True)
    head, critic = mlp(OBSERVATION, 2 * CONTROLS, NormalParamExtractor()), mlp(OBSERVATION + CONTROLS, 1)

    def build(cls: type[LossModule]) -> LossModule:
        actor = ProbabilisticActor(
            TensorDictModule(copy.deepcopy(head), ["observation"], ["loc", "scale"]),
            in_keys=["loc", "scale"],
            distribution_class=TanhNormal,
        )
        values = ValueOperator(copy.deepcopy(critic), in_keys=["observation", "action"])
        return moved(cls(actor, values, num_qvalue_nets=2, min_alpha=LEAST_ALPHA, target_entropy=-CONTROLS))

    loss, theirs = build(SafetySACLoss), build(SACLoss)
    (policy,) = copies(head, loss.actor_network_params)
    critics, targets = (
        copies(critic, params) for params in (loss.qvalue_network_params, loss.target_qvalue_network_params)
    )
    log_alpha = nn.Parameter(loss.log_alpha.detach().clone())
    trained = weights(*critics)

    def by_hand() -> dict[str, Tensor]:
        now, after = batch["observation"], batch["next", "observation"]
        with torch.no_grad():
            wanted = avoid(batch, least(targets, after, act(policy, after)[0]))
        found = torch.stack([net(now, batch["action"]) for net in critics])
        wanted = wanted.expand_as(found)
        alpha = temperature(log_alpha)
        action, log_prob = act(policy, now)
        for parameter in trained:
            parameter.requires_grad_(False)
        value = least(critics, now, action).squeeze(-1)
        for parameter in trained:
            parameter.requires_grad_()
        return {
            "loss_qvalue": F.smooth_l1_loss(found, wanted, reduction="none").sum(0).mean(),
            "loss_actor": (alpha * log_prob - value).mean(),
            "loss_alpha": -(log_alpha * (log_prob.detach() - CONTROLS)).mean(),
            "alpha": alpha,
            "entropy": -log_prob.detach().mean(),
            "td_error": (found.detach() - wanted).abs().amax(0).squeeze(-1),
        }

    return Rivals(loss, theirs, by_hand, [*weights(policy), *trained, log_alpha], batch)


def discrete_sac() -> Rivals:
    batch = make_batch(OFF_POLICY)
    head, critic = mlp(OBSERVATION, ACTIONS), mlp(OBSERVATION, ACTIONS)

    def build(cls: type[LossModule]) -> LossModule:
        values = TensorDictModule(copy.deepcopy(critic), ["observation"], ["action_value"])
        settings = {"num_qvalue_nets": 2, "min_alpha": LEAST_ALPHA, "target_entropy": 0.5}
        return moved(cls(discrete_actor(head), values, action_space="categorical", num_actions=ACTIONS, **settings))

    loss, theirs = build(DiscreteSafetySACLoss), build(DiscreteSACLoss)
    (policy,) = copies(head, loss.actor_network_params)
    critics, targets = (
        copies(critic, params) for params in (loss.qvalue_network_params, loss.target_qvalue_network_params)
    )
    log_alpha = nn.Parameter(loss.log_alpha.detach().clone())

    def by_hand() -> dict[str, Tensor]:
        now, after, index = batch["observation"], batch["next", "observation"], batch["action"].unsqueeze(-1)
        with torch.no_grad():
            wanted = avoid(batch, (policy(after).softmax(-1) * least(targets, after)).sum(-1, keepdim=True))
        values = [net(now) for net in critics]
        found = torch.stack([value.gather(-1, index) for value in values])
        wanted = wanted.expand_as(found)
        alpha = temperature(log_alpha)
        log_probs = policy(now).log_softmax(-1)
        probs = log_probs.exp()
        gain = alpha * log_probs - torch.minimum(values[0].detach(), values[1].detach())
        log_prob = (probs * log_probs).detach().sum(-1)
        return {
            "loss_qvalue": F.smooth_l1_loss(found, wanted, reduction="none").sum(0).mean(),
            "loss_actor": (probs * gain).sum(-1).mean(),
            "loss_alpha": -(log_alpha * (log_prob + 0.5)).mean(),
            "alpha": alpha,
            "entropy": -log_prob.mean(),
            "td_error": (found.detach() - wanted).abs().amax(0).squeeze(-1),
        }

    return Rivals(loss, theirs, by_hand, [*weights(policy, *critics), log_alpha], batch)


# --- on-policy losses ---


def discrete_actor(head: nn.Module) -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictModule(copy.deepcopy(head), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


def on_policy(
    ours: type[LossModule], theirs: type[LossModule], objective: Callable[[TensorDict, Tensor, Tensor], dict]
) -> Rivals:
    batch, head, critic = make_batch(ON_POLICY), mlp(OBSERVATION, ACTIONS), mlp(OBSERVATION, 1)

    def build(cls: type[LossModule]) -> LossModule:
        return cls(discrete_actor(head), ValueOperator(copy.deepcopy(critic), in_keys=["observation"]))

    loss = build(ours)
    (policy,), (value,) = copies(head, loss.actor_network_params), copies(critic, loss.critic_network_params)

    def by_hand() -> dict[str, Tensor]:
        log_probs = policy(batch["observation"]).log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
        log_prob = log_probs.gather(-1, batch["action"].unsqueeze(-1))
        found = value(batch["observation"])
        return {
            **objective(batch, log_prob, found),
            "loss_critic": F.smooth_l1_loss(found, batch["value_target"]),
            "loss_entropy": -ENTROPY_COEFF * entropy,
            "entropy": entropy.detach(),
        }

    return Rivals(loss, build(theirs), by_hand, weights(policy, value), batch)


def clipped(batch: TensorDict, log_prob: Tensor, value: Tensor) -> dict[str, Tensor]:
    advantage, wanted = batch["advantage"], batch["value_target"]
    log_ratio = log_prob - batch["action_log_prob"].unsqueeze(-1)
    inside = log_ratio.clamp(math.log1p(-CLIP), math.log1p(CLIP))
    ratio = log_ratio.exp()
    gain = torch.minimum(ratio * advantage, inside.exp() * advantage)
    with torch.no_grad():
        spread = torch.var(wanted, 0, correction=0) + torch.finfo(wanted.dtype).eps
        size = (2 * log_ratio.logsumexp(0) - (2 * log_ratio).logsumexp(0)).exp()
        logged = {
            "clip_fraction": (inside != log_ratio).to(log_ratio.dtype).mean(),
            "kl_approx": -log_ratio.mean(),
            "explained_variance": 1 - torch.var(wanted - value, 0, correction=0) / spread,
            "ESS": size.squeeze(-1) / len(log_ratio),
            "max_ratio": ratio.max(),
            "mean_ratio": ratio.mean(),
        }
    return {"loss_objective": -gain.mean(), **logged}


def policy_gradient(batch: TensorDict, log_prob: Tensor, value: Tensor) -> dict[str, Tensor]:
    return {"loss_objective": -(log_prob * batch["advantage"]).mean()}


LOSSES: dict[str, Callable[[], Rivals]] = {
    "SafetyDQNLoss": dqn,
    "CategoricalDQNLoss": categorical_dqn,
    "SafetySACLoss": sac,
    "DiscreteSafetySACLoss": discrete_sac,
    "SafetyPPOLoss": lambda: on_policy(SafetyPPOLoss, ClipPPOLoss, clipped),
    "SafetyA2CLoss": lambda: on_policy(SafetyA2CLoss, A2CLoss, policy_gradient),
}


WAYS = ["by_hand", "ours", "torchrl"] + ["compiled", "by_hand_compiled"] * ("COMPILED" in os.environ)


@pytest.mark.benchmark(max_time=0.7, timer=time.thread_time)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOSSES)
def test_forward_and_backward(benchmark, name, way):
    torch.manual_seed(0)
    torch.compiler.reset()  # or the losses before this one count towards the limit of recompilations
    rivals, benchmark.group = LOSSES[name](), name
    row = rivals.row(way)
    if way == "ours":
        expected, found = rivals.row("by_hand").numbers(), row.numbers()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for _ in range(20):
        row.train()
    benchmark(row.train)
