"""The hindsight replay buffer that draws by priority."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler

from torchrl_safety.data.buffers import HindsightReplayBuffer
from torchrl_safety.data.prioritized import PrioritizedSampler


class HindsightPrioritizedReplayBuffer(HindsightReplayBuffer):
    r"""A :class:`HindsightReplayBuffer` that draws in proportion to a power of each item's priority.

    .. math:: P(j) = \frac{(p_j + \epsilon)^\alpha}{\sum_i (p_i + \epsilon)^\alpha}, \quad
        w_j = \frac{(N P(j))^{-\beta}}{\max_i (N P(i))^{-\beta}}

    See :class:`PrioritizedSampler`, which does it. Each copy has a priority of its own. Give priorities back with
    ``buffer.update_tensordict_priority(batch)``, which reads ``"td_error"``, or with ``buffer.update_priority(index,
    priority)``. Source: Schaul et al. 2015; the surface is that of MATLAB's `rlHindsightPrioritizedReplayMemory`.

    Args:
        *settings, **more: those of :class:`HindsightReplayBuffer`.
        alpha: exponent of the priorities, >= 0; 0 draws uniformly.
        beta: exponent of the importance weights at the first draw, in [0, 1].
        beta_annealing_steps: draws over which it grows to 1.
        eps: added to every priority, so that an item with error 0 is still drawn; MATLAB has 0.

    Example:
        >>> import torch
        >>> from torchrl_safety.data import HindsightPrioritizedReplayBuffer
        >>> from torchrl_safety.envs import BitFlipEnv
        >>> env = BitFlipEnv(2, bits=3)
        >>> def success(transition):
        ...     state = transition["next"]
        ...     return (state["achieved_goal"] == state["desired_goal"]).all(-1, keepdim=True).float()
        >>> specs = env.observation_spec_unbatched, env.action_spec_unbatched
        >>> buffer = HindsightPrioritizedReplayBuffer(*specs, success, num_envs=2, beta=0.5)
        >>> index = buffer.extend(env.rollout(3, break_when_any_done=False))
        >>> batch = buffer.sample(8)
        >>> buffer.update_priority(batch["index"], torch.rand(8))
        >>> buffer.beta > 0.5, batch["priority_weight"].shape
        (True, torch.Size([8]))
    """

    def __init__(
        self,
        *settings: Any,
        alpha: float = 0.6,
        beta: float = 0.4,
        beta_annealing_steps: int | None = 1_000_000,
        eps: float = 1e-6,
        **more: Any,
    ) -> None:
        self._priorities: dict[str, Any] = {
            "alpha": alpha,
            "beta": beta,
            "beta_annealing_steps": beta_annealing_steps,
            "eps": eps,
        }
        super().__init__(*settings, **more)

    def _make_sampler(self, capacity: int) -> Sampler:
        return PrioritizedSampler(capacity, **self._priorities)

    @property
    def alpha(self) -> float:
        """Exponent of the priorities; setting it changes those of all items."""
        return self._sampler.alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._sampler.alpha = value

    @property
    def beta(self) -> float:
        """Exponent of the importance weights at the next draw."""
        return self._sampler.beta

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), **self._sampler._fixed_settings()}

    def _resized_sampler(self, kept: Tensor, capacity: int) -> Sampler:
        return self._sampler.resized(kept, capacity)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Give the items of a sample the priorities that stand in it; in sequences, each step its own.

        Raises:
            KeyError: if they do not stand there, where TorchRL's buffers would take the largest priority for all.
        """
        if data.get(self.priority_key, None) is None:
            present = sorted(map(str, data.keys()))
            raise KeyError(
                f"Priority {self.priority_key!r} is missing: the batch holds {present}. Write the errors there, or "
                "name their key: buffer.priority_key = ..."
            )
        super().update_tensordict_priority(data)
