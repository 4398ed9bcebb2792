"""What the examples share of Hydra: starting, resuming, and complaints of one line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from torchrl.checkpoint import CheckpointError

from torchrl_safety.trainers import find_checkpoint

Train = Callable[[DictConfig, Path, Path | None], None]


def start(cfg: DictConfig, train: Train, *, kept: Sequence[str]) -> None:
    """Call `train(cfg, folder, checkpoint)` for a new run, or for the one that ``cfg.resume`` names.

    A resumed run keeps its folder and its options; only those not in `kept` may be given anew. What the options get
    wrong (ValueError, OSError) ends the program with one line.

    Args:
        cfg: the options, with an entry ``resume`` (a folder of a run, one of its checkpoints, or null).
        train: trains.
        kept: names of the options that a resumed run must keep.
    """
    try:
        train(*_resumed(cfg, kept))
    except CheckpointError as error:
        fault = f"{error}; give the options that the run has, or another checkpoint of {cfg.resume}"
    except (ValueError, OSError) as error:
        fault = str(error)
    else:
        return
    _remove_if_empty(Path(HydraConfig.get().runtime.output_dir))
    sys.exit(f"error: {fault}")


def command_line(main: Callable[[], Any]) -> None:
    """Run a `hydra.main` function; what Hydra complains of is one line too."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra hands its complaint over instead of printing several lines
    try:
        main()
    except HydraException as error:
        sys.exit("error: " + " ".join(str(error).split("Config search path")[0].split()))


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
    stored, changes = OmegaConf.load(folder / "config.yaml"), []
    for text in HydraConfig.get().overrides.task:
        option = re.split("[.=]", text)[0]
        if option in kept and cfg[option] != stored[option]:
            raise ValueError(f"{text!r} beside resume=: the run has {option}={stored[option]}; leave it out")
        if option not in (*kept, "resume"):
            changes.append(text)
    return OmegaConf.merge(stored, OmegaConf.from_dotlist(changes)), folder, saved
