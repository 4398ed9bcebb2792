"""What the examples share around their loops: starting and resuming a run, and complaints of one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDictBase
from torchrl.checkpoint import CheckpointError

from torchrl_safety.envs.base import END_CRITERIA
from torchrl_safety.trainers import StepGamma, TrainingRun, check_options, find_checkpoint

Train = Callable[[DictConfig, Path, Path | None], None]
Show = Callable[[DictConfig, Path], None]


def start(
    cfg: DictConfig, train: Train, *, kept: Sequence[str], show: Show | None = None, open_envs: Iterable[str] = ()
) -> None:
    """Call `train(cfg, folder, checkpoint)` for a new run, or for the one that ``cfg.resume`` names.

    Where `show` is given and ``cfg.evaluate`` names the folder of a run, that is shown instead.

    A resumed run keeps its folder and its options; only those not in `kept` may be given anew. What the options get
    wrong (ValueError, OSError), or what is not installed, ends the program with one line.

    Args:
        cfg: the options, with an entry ``resume`` (a folder of a run, one of its checkpoints, or null).
        train: trains.
        kept: names of the options that a resumed run, or one that is shown, must keep.
        show: shows what a run left in its folder.
        open_envs: names of the environments that take settings beyond those of their file, as ``++env.gravity=-5``.
    """
    try:
        _refuse_additions(cfg, open_envs)
        if show is not None and cfg.evaluate is not None:
            _remove_if_empty(Path(HydraConfig.get().runtime.output_dir))
            folder = Path(str(cfg.evaluate))
            show(_with_stored(cfg, folder, kept, "evaluate"), folder)
        else:
            train(*_resumed(cfg, kept))
    except CheckpointError as error:
        fault = f"{error}; give the options that the run has, or another checkpoint of {cfg.resume}"
    except (ValueError, OSError, ImportError) as error:
        fault = " ".join(str(error).split())
    else:
        return
    _remove_if_empty(Path(HydraConfig.get().runtime.output_dir))
    sys.exit(f"error: {fault}")


def check_shared(cfg: DictConfig, *, problems: Iterable[str], envs: Iterable[str]) -> None:
    """Refuse wrong values of the options that every script has.

    Args:
        cfg: the options.
        problems: names of the problems that the script knows.
        envs: names of its environments.

    Raises:
        ValueError: for the first one that does not fit.
    """
    check_options(cfg, choices={"problem.name": problems, "env.name": envs})
    check_options(
        cfg,
        counts="seed evaluations checkpoints",
        whole="frames threads num_envs rollouts rollout_steps",
        widths="hidden",
        shares="gamma.start gamma.end gamma.ratio",
        positive="gamma.period max_grad_norm",
        device="device",
    )
    if "grid" in cfg.env:  # a native environment, with an exact set
        settings = [key for key in cfg.env if key not in ("name", "max_steps", "end_criterion", "support", "grid")]
        check_options(
            cfg,
            choices={"env.end_criterion": END_CRITERIA},
            positive=" ".join(f"env.{key}" for key in settings),
            corners="env.grid.low env.grid.high",
            nodes="env.grid.nodes",
            labels="env.grid.labels",
        )


def check_replay(cfg: DictConfig) -> None:
    """Refuse sizes of which the first batch could not be drawn.

    Raises:
        ValueError: unless ``batch_size <= warmup_frames <= buffer_size``, and the budget reaches beyond the warm-up.
    """
    if not cfg.batch_size <= cfg.warmup_frames <= min(cfg.buffer_size, cfg.frames):
        raise ValueError(
            f"batch_size={cfg.batch_size}, warmup_frames={cfg.warmup_frames}, buffer_size={cfg.buffer_size}, "
            f"frames={cfg.frames}: need batch_size <= warmup_frames <= buffer_size and frames"
        )


def make_gamma(cfg: DictConfig) -> StepGamma:
    """The schedule of gamma over the budget."""
    return StepGamma(
        cfg.frames,
        gamma_start=cfg.gamma.start,
        gamma_end=cfg.gamma.end,
        ratio=cfg.gamma.ratio,
        period=cfg.gamma.period,
    )


def make_run(
    cfg: DictConfig, folder: Path, saved: Path | None, *, state: TensorDictBase, **components: Any
) -> TrainingRun:
    """The run that keeps the options in `folder` and saves the `components`; `saved` is a checkpoint to go on from."""
    return TrainingRun(
        folder,
        saved,
        config=OmegaConf.to_yaml(cfg, resolve=True),
        budget=cfg.frames,
        checkpoints=cfg.checkpoints,
        state=state,
        device=cfg.device,
        **components,
    )


def command_line(main: Callable[[], Any]) -> None:
    """Run a `hydra.main` function; what Hydra complains of, and an interrupt that cannot wait, is one line too."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra hands its complaint over instead of printing several lines
    try:
        main()
    except HydraException as error:
        sys.exit("error: " + " ".join(str(error).split("Config search path")[0].split()))
    except KeyboardInterrupt:
        print("interrupted at once: nothing is saved but what already was", file=sys.stderr)
        sys.exit(130)


def _refuse_additions(cfg: DictConfig, open_envs: Iterable[str]) -> None:
    """Options that no script reads would be ignored in silence."""
    texts = HydraConfig.get().overrides.task
    forced = [text for text in texts if text.startswith("++")]  # which sets an option that is there, or adds it
    for text in texts:
        if text.startswith("+") and text not in forced:
            raise ValueError(f"{text!r} adds an option that the script does not have; leave it out, or the + if it has")
    if forced:
        known = compose(HydraConfig.get().job.config_name, [text for text in texts if text not in forced])
        for name in _additions(cfg, known):
            if not (name.startswith("env.") and cfg.env.get("name") in open_envs):
                raise ValueError(
                    f"{' '.join(forced)} adds {name}, an option that the script does not have; leave it out"
                )


def _additions(cfg: DictConfig, known: DictConfig, path: str = "") -> Iterator[str]:
    """The dotted names in `cfg` that are not in `known`."""
    for key in cfg:
        if key not in known:
            yield f"{path}{key}"
        elif OmegaConf.is_dict(cfg._get_node(key)) and OmegaConf.is_dict(known._get_node(key)):
            yield from _additions(cfg[key], known[key], f"{path}{key}.")


def _remove_if_empty(folder: Path) -> None:
    """Hydra makes a folder for every start; one that nothing was written to is taken away."""
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()


def _resumed(cfg: DictConfig, kept: Sequence[str]) -> tuple[DictConfig, Path, Path | None]:
    """The options, the folder and the checkpoint of this run; a resumed run keeps its own."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    if cfg.resume is None:
        return cfg, folder, None
    _remove_if_empty(folder)
    saved = find_checkpoint(str(cfg.resume)).resolve()
    folder = saved.parents[1]
    stored = _with_stored(cfg, folder, kept, "resume")
    stored.resume = None
    return stored, folder, saved


def _with_stored(cfg: DictConfig, folder: Path, kept: Sequence[str], beside: str) -> DictConfig:
    """The options of the run in `folder`, and those of this command that it need not keep."""
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{beside}={folder} holds no config.yaml, which every run leaves; give the folder of a run")
    stored = OmegaConf.load(folder / "config.yaml")
    for text in HydraConfig.get().overrides.task:
        name = text.partition("=")[0].strip("+~")
        option = name.partition(".")[0]
        if option not in stored:
            raise ValueError(f"{text!r} beside {beside}=: the run has no {option}; leave it out")
        if option not in kept:
            OmegaConf.update(stored, name, OmegaConf.select(cfg, name))
        elif cfg.get(option) != stored[option]:
            raise ValueError(f"{text!r} beside {beside}=: the run has {option}={stored[option]}; leave it out")
    return stored
