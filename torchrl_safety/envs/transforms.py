"""Transforms of environments with two players."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.data import Bounded, Composite, TensorSpec, Unbounded
from torchrl.envs import Transform

from torchrl_safety.envs.settings import check_count
from torchrl_safety.envs.stateless import require

__all__ = ["SplitPlayers"]


class SplitPlayers(Transform):
    r"""Splits one continuous action :math:`(u, d)` `[*B, U + D]` into those of the controller and the disturbance.

    For environments, of Gymnasium say, whose single Box holds the actions of both players, the controller's first: the
    layout of `ctrl_action_dim` in safety_sb3. Policies, specs and data then have two keys, and the environment gets the
    two joined. Nothing is rescaled: each part keeps its bounds in its spec, so that a policy built from the spec of a
    Box(-2, 2) acts in [-2, 2]. For policies in [-1, 1] put TorchRL's `ActionScaling` before this transform.

    In a replay buffer it is its own inverse: rows of two actions are stored as one, and split when they are sampled.

    Args:
        ctrl_action_dim: U, how many of the entries are the controller's, at least 1.
        action_key: where the environment reads the joint action, and policies write the controller's.
        disturbance_key: where policies write the disturbance.

    Raises:
        ValueError: a size below 1; an environment whose action is not continuous or has no entries left for the
            disturbance; an action of another size.
        KeyError: a step without one of the actions.

    Example:
        >>> from tensordict import TensorDict
        >>> split = SplitPlayers(2)(TensorDict({"action": torch.tensor([1.0, 2.0, -3.0])}))
        >>> split["action"].tolist(), split["disturbance"].tolist()
        ([1.0, 2.0], [-3.0])
        >>> SplitPlayers(2).inv(split)["action"].tolist()
        [1.0, 2.0, -3.0]
    """

    def __init__(
        self, ctrl_action_dim: int, *, action_key: NestedKey = "action", disturbance_key: NestedKey = "disturbance"
    ) -> None:
        check_count("ctrl_action_dim", ctrl_action_dim, "the length of the controller's part of the action")
        # No in_keys and out_keys: those are of what environments write, in which there is no action.
        super().__init__(in_keys_inv=[action_key], out_keys_inv=[action_key, disturbance_key])
        self.ctrl_action_dim = ctrl_action_dim
        self.action_key, self.disturbance_key = action_key, disturbance_key

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Splits the joint action of data `[*B]`."""
        action = require(tensordict, self.action_key, "the joint action is split, give data that hold it")
        self._check_size(action.shape[-1], "joint action")
        control, disturbance = action.tensor_split([self.ctrl_action_dim], dim=-1)
        return tensordict.set(self.action_key, control).set(self.disturbance_key, disturbance)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        remedy = "let both players act, as TwoPlayerPolicy does"
        control, disturbance = (require(tensordict, key, remedy) for key in (self.action_key, self.disturbance_key))
        if control.shape[-1] != self.ctrl_action_dim:
            raise ValueError(
                f"{self.action_key!r} has {control.shape[-1]} entries, ctrl_action_dim={self.ctrl_action_dim}: build "
                "the controller from this environment's action spec"
            )
        joint = torch.cat((control, disturbance), dim=-1)
        return tensordict.exclude(self.disturbance_key).set(self.action_key, joint)

    def transform_action_spec(self, action_spec: TensorSpec) -> TensorSpec:
        """The composite action spec with the joint leaf in two parts, each with its own bounds."""
        assert isinstance(action_spec, Composite)
        joint = action_spec[self.action_key]
        if not isinstance(joint, Bounded | Unbounded) or not joint.dtype.is_floating_point:
            raise ValueError(
                f"the action spec at {self.action_key!r} is {type(joint).__name__} of {joint.dtype}: only a continuous "
                "action can be split, use an environment with Box actions"
            )
        self._check_size(joint.shape[-1], "action spec")
        action_spec[self.action_key] = joint[..., : self.ctrl_action_dim]
        action_spec[self.disturbance_key] = joint[..., self.ctrl_action_dim :]
        return action_spec

    def _check_size(self, size: int, what: str) -> None:
        if size <= self.ctrl_action_dim:
            raise ValueError(
                f"the {what} at {self.action_key!r} has {size} entries, of which "
                f"ctrl_action_dim={self.ctrl_action_dim} are the controller's: leave some for the disturbance"
            )
