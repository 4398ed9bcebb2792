"""A Gymnasium environment as Gymnasium-Robotics has them, small: a mass on a table, pushed to a goal, on MuJoCo."""

from __future__ import annotations

import gymnasium
import mujoco
import numpy as np

MODEL = """
<mujoco><option timestep="0.02"/><worldbody>
  <geom type="plane" size="2 2 .1"/>
  <body name="mass" pos="0 0 .1">
    <joint name="x" type="slide" axis="1 0 0" damping="1" range="-1 1" limited="true"/>
    <joint name="y" type="slide" axis="0 1 0" damping="1" range="-1 1" limited="true"/>
    <geom type="sphere" size=".1" mass="1"/>
  </body>
</worldbody><actuator><motor joint="x" gear="5"/><motor joint="y" gear="5"/></actuator></mujoco>
"""


class PushedMass(gymnasium.Env):
    """The goal is anywhere on the table; the reward is 1 within .3 of it, which ends the episode, and else 0."""

    def __init__(self) -> None:
        self.model = mujoco.MjModel.from_xml_string(MODEL)
        self.data = mujoco.MjData(self.model)
        sizes = {"observation": 4, "achieved_goal": 2, "desired_goal": 2}
        self.observation_space = gymnasium.spaces.Dict(
            {key: gymnasium.spaces.Box(-np.inf, np.inf, (size,), np.float64) for key, size in sizes.items()}
        )
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.data.qpos[:] = self.np_random.uniform(-0.8, 0.8, 2)  # as in Gymnasium-Robotics, the warm start stays
        self.data.qvel[:] = 0
        mujoco.mj_forward(self.model, self.data)
        self.goal = self.np_random.uniform(-0.8, 0.8, 2)
        return self.observation(), {}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        self.data.ctrl[:] = action
        mujoco.mj_step(self.model, self.data, nstep=5)
        reached = bool(np.linalg.norm(self.data.qpos - self.goal) <= 0.3)
        return self.observation(), float(reached), reached, False, {}

    def observation(self) -> dict[str, np.ndarray]:
        position = self.data.qpos.copy()
        state = np.concatenate([position, self.data.qvel])
        return {"observation": state, "achieved_goal": position, "desired_goal": self.goal.copy()}


gymnasium.register("PushedMass-v0", entry_point=PushedMass, max_episode_steps=12)
