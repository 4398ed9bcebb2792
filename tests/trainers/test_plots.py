"""Pictures hold what they claim to show."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from torchrl_safety.trainers import plot_cross_play, plot_curves, plot_value_distribution, plot_value_map, save_gif


def plane():
    axis = torch.linspace(-1, 1, 41)
    first, second = torch.meshgrid(axis, axis, indexing="ij")
    return (axis, axis), first, second


def test_the_level_set_is_drawn_where_the_value_crosses_the_level(tmp_path):
    axes, first, second = plane()
    figure = plot_value_map(axes, 0.5 - first.hypot(second), exact=0.25 - first.hypot(second), level=0.1)
    learned, exact = figure.axes[0].collections[1:3]
    for contour, radius in ((learned, 0.4), (exact, 0.25)):
        vertices = torch.as_tensor(contour.get_paths()[0].vertices)
        assert vertices.norm(dim=-1) == pytest.approx(torch.full((len(vertices),), radius), abs=0.01)
    figure.savefig(tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 10_000


def test_an_exact_set_given_as_a_mask_has_its_boundary_between_the_nodes():
    axes, first, second = plane()
    figure = plot_value_map(axes, 0.5 - first.hypot(second), exact=first.hypot(second) <= 0.3)
    vertices = torch.as_tensor(figure.axes[0].collections[2].get_paths()[0].vertices)
    assert vertices.norm(dim=-1) == pytest.approx(torch.full((len(vertices),), 0.3), abs=0.05)


def test_the_first_axis_runs_to_the_right():
    axes, first, _ = plane()
    figure = plot_value_map(axes, first - 0.5)
    vertices = figure.axes[0].collections[1].get_paths()[0].vertices
    assert vertices[:, 0] == pytest.approx(0.5)


def test_a_value_of_one_sign_has_no_level_set_and_still_a_picture():
    axes, first, _ = plane()
    figure = plot_value_map(axes, first.abs() + 1, exact=-first.abs() - 1, states=torch.zeros(2, 5, 2))
    assert len(figure.axes[0].collections) == 1
    assert len(figure.axes[0].lines) == 4


def test_curves_leave_out_rows_without_a_value():
    rows = [{"frames": 1, "a": 2.0, "b": None}, {"frames": 3, "a": 4.0, "b": 5.0}]
    upper, lower = plot_curves(rows, ["a", "b"]).axes
    assert upper.lines[0].get_xydata().tolist() == [[1, 2], [3, 4]]
    assert lower.lines[0].get_xydata().tolist() == [[3, 5]]


def test_a_value_that_does_not_fit_the_axes_is_refused():
    axes, first, _ = plane()
    with pytest.raises(ValueError, match=r"value has shape \[41\], the axes \[41, 41\]"):
        plot_value_map(axes, first[0])


def test_a_distribution_is_drawn_with_its_mass_and_its_mean():
    support = torch.linspace(-1, 1, 5)
    probs = torch.tensor([[0.0, 0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]])
    figure = plot_value_distribution(support, probs, labels=["left", "right"], title="start")
    for plot, row, mean in zip(figure.axes, probs, (-0.25, 1.0)):
        assert [bar.get_height() for bar in plot.patches] == row.tolist()
        assert plot.lines[0].get_xdata()[0] == mean
    assert [plot.get_title() for plot in figure.axes] == ["left: -0.25", "right: 1"]
    with pytest.raises(ValueError, match=r"probs have shape \[3\]"):
        plot_value_distribution(support, torch.ones(3))


def test_a_cross_play_writes_each_rate_in_the_field_of_its_pair():
    rates = torch.tensor([[1.0, 0.25, torch.nan], [0.5, 0.0, 0.75]])
    figure = plot_cross_play(rates, ["u1", "u2"], ["d1", "d2", "d3"])
    plot = figure.axes[0]
    written = {text.get_position(): text.get_text() for text in plot.texts}  # (column, row)
    assert written == {(0, 0): "1.00", (1, 0): "0.25", (0, 1): "0.50", (1, 1): "0.00", (2, 1): "0.75"}
    assert [tick.get_text() for tick in plot.get_xticklabels()] == ["d1", "d2", "d3"]
    assert [tick.get_text() for tick in plot.get_yticklabels()] == ["u1", "u2"]
    with pytest.raises(ValueError, match=r"rates have shape \[2, 3\], but there are 3 controllers"):
        plot_cross_play(rates, ["d1", "d2", "d3"], ["u1", "u2"])


def test_a_film_holds_its_pictures_in_their_order(tmp_path):
    frames = [np.full((4, 6, 3), shade, np.uint8) for shade in (0, 128, 255)]
    save_gif(frames, tmp_path / "film.gif", fps=10)
    with Image.open(tmp_path / "film.gif") as film:
        assert (film.n_frames, film.size, film.info["duration"]) == (3, (6, 4), 100)
        for index, frame in enumerate(frames):
            film.seek(index)
            assert np.abs(np.asarray(film.convert("RGB")).astype(int) - frame).max() <= 8
    for wrong in ([], [np.zeros((4, 4), np.uint8)], [frames[0], np.zeros((5, 5, 3), np.uint8)]):
        with pytest.raises(ValueError, match="the pictures have shapes"):
            save_gif(wrong, tmp_path / "no.gif")
