"""Pictures of learned values, of training and of a policy at work. Needs matplotlib, which only functions import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_value_map(
    axes: tuple[Tensor, Tensor],
    value: Tensor,
    *,
    exact: Tensor | None = None,
    states: Tensor | None = None,
    level: float = 0.0,
    labels: tuple[str, str] = ("x", "v"),
    title: str = "",
) -> Figure:
    """Draw a value over a plane, its level set, the exact set's boundary and a few roll-outs.

    Args:
        axes: coordinates of the grid, `[n]` and `[m]`.
        value: `[n, m]`; the learned set is where it is at least `level`.
        exact: `[n, m]`, >= 0 on the exact set, or bool, true on it; its boundary is drawn dashed.
        states: `[R, T, 2]` roll-outs; further coordinates are not drawn.
        level: value on the learned set's boundary.
        labels: names of the two axes.
        title: title of the picture.

    Returns:
        A matplotlib figure; save it with `savefig`.

    Example:
        >>> import torch
        >>> from torchrl_safety.trainers import plot_value_map
        >>> x = torch.linspace(-1, 1, 5)
        >>> plot_value_map((x, x), 0.5 - x[:, None].abs() - x.abs()).axes[0].get_xlabel()
        'x'
    """
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    shape = [len(axis) for axis in axes]
    for name, tensor in (("value", value), ("exact", exact)):
        if tensor is not None and list(tensor.shape) != shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, the axes {shape}: give `[n, m]`, first axis first"
            )
    figure = Figure(figsize=(7, 5), layout="constrained")
    plot = figure.subplots()
    first, second = (axis.detach().cpu().numpy() for axis in axes)
    values = value.detach().cpu().numpy().T
    # White at the level, and either side of it uses the whole range of its colour.
    norm = TwoSlopeNorm(level, min(values.min(), level - 1e-6), max(values.max(), level + 1e-6))
    mesh = plot.pcolormesh(first, second, values, cmap="RdBu", norm=norm, shading="nearest")
    figure.colorbar(mesh, ax=plot, label="learned value")
    legend = [_contour(plot, first, second, values, level, "black", "solid", "learned set")]
    if exact is not None:
        signed = 2.0 * exact - 1.0 if exact.dtype == torch.bool else exact
        boundary = signed.detach().cpu().numpy().T
        legend.append(_contour(plot, first, second, boundary, 0.0, "darkorange", "dashed", "exact set"))
    if states is not None:
        for path in states.detach().cpu().numpy():
            plot.plot(path[:, 0], path[:, 1], color="dimgray", linewidth=0.8)
            plot.plot(*path[0], marker="o", markersize=3, color="dimgray")
        legend.append(Line2D([], [], color="dimgray", marker="o", markersize=3, label="roll-outs from their starts"))
    plot.set(xlabel=labels[0], ylabel=labels[1], title=title)
    plot.set_xlim(first[0], first[-1])
    plot.set_ylim(second[0], second[-1])
    plot.legend(handles=legend, loc="upper right")
    return figure


def _contour(plot, first, second, values, level, color, style, label):
    from matplotlib.lines import Line2D

    if values.min() < level < values.max():
        plot.contour(first, second, values, levels=[level], colors=color, linestyles=style, linewidths=1.5)
    return Line2D([], [], color=color, linestyle=style, label=label)


def plot_curves(rows: Sequence[Mapping[str, float | None]], names: Sequence[str], *, x: str = "frames") -> Figure:
    """Draw each of `names` over `x` in a panel of its own.

    Args:
        rows: one mapping per logged moment, as in ``metrics.csv``.
        names: keys to draw; rows without one are left out of its curve.
        x: key of the horizontal axis.

    Example:
        >>> from torchrl_safety.trainers import plot_curves
        >>> len(plot_curves([{"frames": 0, "loss": 2.0}, {"frames": 1, "loss": 1.0}], ["loss"]).axes)
        1
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.8 * len(names)), layout="constrained")
    for plot, name in zip(np.atleast_1d(figure.subplots(len(names), 1, sharex=True)), names):
        present = [row for row in rows if row.get(name) is not None]
        plot.plot([row[x] for row in present], [row[name] for row in present])
        plot.set_ylabel(name)
        plot.grid(alpha=0.3)
    plot.set_xlabel(x)
    return figure


def plot_value_distribution(support: Tensor, probs: Tensor, *, labels: Sequence[str] = (), title: str = "") -> Figure:
    """Draw the distribution of each action's value over the atoms, its mean as a line.

    Args:
        support: atoms `[N]`, in the unit of the value.
        probs: their mass `[A, N]`, one row for each action.
        labels: names of the actions; their indices if empty.
        title: title of the picture.

    Example:
        >>> import torch
        >>> from torchrl_safety.trainers import plot_value_distribution
        >>> figure = plot_value_distribution(torch.linspace(-1, 1, 3), torch.full((2, 3), 1 / 3))
        >>> [plot.get_title() for plot in figure.axes]
        ['0: 0', '1: 0']
    """
    from matplotlib.figure import Figure

    if probs.ndim != 2 or probs.shape[-1:] != support.shape:
        raise ValueError(f"probs have shape {list(probs.shape)}; give `[A, N]` over the {len(support)} atoms")
    names = labels or [str(action) for action in range(len(probs))]
    atoms, mass = support.detach().cpu().numpy(), probs.detach().cpu().numpy()
    figure = Figure(figsize=(7, 1 + 1.4 * len(mass)), layout="constrained")
    for plot, name, row in zip(figure.subplots(len(mass), 1, sharex=True, squeeze=False)[:, 0], names, mass):
        mean = (row * atoms).sum()
        plot.bar(atoms, row, width=0.9 * (atoms[1] - atoms[0]))
        plot.axvline(mean, color="darkorange")
        plot.set_title(f"{name}: {mean:.4g}", fontsize="medium")
        plot.set_ylabel("mass")
    plot.set_xlabel("value")
    figure.suptitle(title)
    return figure


def plot_cross_play(
    rates: Tensor, controllers: Sequence[str], disturbances: Sequence[str], *, label: str = "safe rate", title: str = ""
) -> Figure:
    """Draw a score matrix: a row for each controller, a column for each disturbance, the rate in each field.

    Args:
        rates: `[C, D]` in [0, 1]; NaN, a pair that has not met, stays grey and empty.
        controllers: names of the rows.
        disturbances: names of the columns.
        label: what a rate is.
        title: title of the picture.

    Raises:
        ValueError: if the names do not fit the matrix.

    Example:
        >>> import torch
        >>> from torchrl_safety.trainers import plot_cross_play
        >>> figure = plot_cross_play(torch.tensor([[1.0, 0.25]]), ["controller"], ["zero", "best response"])
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['1.00', '0.25']
    """
    from matplotlib.figure import Figure

    if tuple(rates.shape) != (len(controllers), len(disturbances)):
        raise ValueError(
            f"rates have shape {list(rates.shape)}, but there are {len(controllers)} controllers and "
            f"{len(disturbances)} disturbances: give `[C, D]`, controllers first"
        )
    values = rates.detach().cpu().numpy()
    figure = Figure(figsize=(2.5 + 0.9 * len(disturbances), 2.0 + 0.5 * len(controllers)), layout="constrained")
    plot = figure.subplots()
    plot.set_facecolor("lightgrey")
    image = plot.imshow(values, cmap="RdBu", vmin=0.0, vmax=1.0, aspect="auto")
    figure.colorbar(image, ax=plot, label=label)
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            shade = "white" if abs(value - 0.5) > 0.35 else "black"
            plot.text(column, row, f"{value:.2f}", ha="center", va="center", color=shade)
    plot.set_yticks(range(len(controllers)), controllers)
    plot.set_xticks(range(len(disturbances)), disturbances, rotation=45, ha="right")
    plot.set(xlabel="disturbance", ylabel="controller", title=title)
    return figure


def save_gif(frames: Sequence[np.ndarray], path: str | Path, *, fps: float = 25.0) -> None:
    """Write pictures as an animated GIF; needs Pillow, which comes with matplotlib.

    Args:
        frames: RGB pictures `[H, W, 3]` of one size, uint8.
        path: the file to write.
        fps: pictures a second.

    Raises:
        ValueError: if there are no pictures, or they are no RGB pictures of one size.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from torchrl_safety.trainers import save_gif
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_gif([np.zeros((4, 4, 3), np.uint8)] * 2, f"{folder}/black.gif")
    """
    from PIL import Image

    shapes = {np.shape(frame) for frame in frames}
    if len(shapes) != 1 or len(next(iter(shapes))) != 3 or next(iter(shapes))[-1] != 3:
        raise ValueError(f"the pictures have shapes {sorted(shapes)}; give at least one, all `[H, W, 3]` of one size")
    first, *rest = (Image.fromarray(frame) for frame in frames)
    first.save(path, save_all=True, append_images=rest, duration=1000 / fps, loop=0)
