"""Every plot: its title is a finding from its data, its text stays apart and inside, and small inputs do."""

import numpy as np
import pandas as pd
import pytest
from figure_texts import assert_no_two_texts_overlap, assert_text_lies_inside, title
from matplotlib.backends.backend_agg import FigureCanvasAgg

from analysis_deep import SCENARIOS, section4_regime_map
from specdec import figures
from specdec.errors import InputError

LABEL = "pair made-up: draft little, target large, float32, on a made-up processor with a rather long name"
ALPHAS = pd.Series({"code_python": 0.8, "creative_story": 0.5})
GAMMAS = (1, 2, 4, 8)
REGIME = section4_regime_map((0.2, 0.5, 0.8, 0.9), (1.0, 2.0, 4.0, 8.0), set(GAMMAS))


def curve(factor=1.0):
    ratios = np.geomspace(0.9, 12, 50)
    best = factor * (0.6 + 0.4 * np.log(ratios + 1))
    return pd.DataFrame(
        {
            "cost_ratio": ratios,
            "best": best,
            "best_lowest": best * 0.9,
            "best_highest": best * 1.1,
            "all_gammas": best * 0.8,
        }
    )


def scenarios(own=3.4, spread=0.2):
    ratios = {"this_run_published_engine": own, "this_run_fast_engine": own * 1.01} | SCENARIOS
    best = 0.6 + 0.4 * np.log(np.array([*ratios.values()]) + 1)
    return pd.DataFrame(
        {
            "scenario": list(ratios),
            "cost_ratio": list(ratios.values()),
            "mean_speedup": best,
            "low": best - spread if spread else np.nan,
            "high": best + spread if spread else np.nan,
            "mean_all_gammas": best * 0.8,
        }
    )


def make(name, alphas=ALPHAS, cost_ratios=None):
    cost_ratios = {"published": 3.4, "fast": 2.9} if cost_ratios is None else cost_ratios
    return {
        "speedup_vs_cost_ratio": lambda: figures.plot_speedup_vs_cost_ratio(scenarios(), curve(), LABEL),
        "regime_heatmap": lambda: figures.plot_regime_heatmap(REGIME, 4, {"alpha": 0.7, "c": 3.4}, LABEL),
        "analytical_curves": lambda: figures.plot_analytical_curves((1.18, 3.12, 8.0), GAMMAS, alphas, LABEL),
        "min_alpha_needed": lambda: figures.plot_min_alpha_needed(GAMMAS, alphas, cost_ratios, LABEL),
    }[name]()


PLOTS = ("speedup_vs_cost_ratio", "regime_heatmap", "analytical_curves", "min_alpha_needed")


@pytest.mark.parametrize("name", PLOTS)
def test_all_text_lies_inside_the_figure(name):
    assert_text_lies_inside(make(name))


@pytest.mark.parametrize("name", PLOTS)
def test_no_two_texts_overlap(name):
    assert_no_two_texts_overlap(make(name))


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_names_the_pair_its_axes_and_its_units(name):
    figure = make(name)
    assert any(LABEL in " ".join(text.get_text().split()) for text in figure.texts)
    assert all(axes.get_xlabel() for axes in figure.axes if axes.get_label() != "<colorbar>")
    assert figure.axes[0].get_ylabel()


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_needs_no_display_and_becomes_a_png(name, tmp_path):
    figure = make(name)
    assert isinstance(figure.canvas, FigureCanvasAgg)
    path = figures.save(figure, tmp_path / "new" / "folder", name)
    assert path.name == f"{name}.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plots_folder_that_is_a_file_is_named_in_one_line(tmp_path):
    (tmp_path / "plots").write_text("")
    with pytest.raises(InputError, match=r"plots folder .*plots can't be written"):
        figures.save(make("analytical_curves"), tmp_path / "plots", "x")


def test_the_speedup_title_says_where_each_curve_crosses_one():
    crossing = curve().cost_ratio[np.argmax(curve().all_gammas > 1)]
    figure = figures.plot_speedup_vs_cost_ratio(scenarios(), curve(), LABEL)
    assert f"c = {crossing:.1f} over all gammas" in title(figure)


def test_the_speedup_title_says_so_if_nothing_pays():
    figure = figures.plot_speedup_vs_cost_ratio(scenarios(), curve(0.3), LABEL)
    assert (
        title(figure)
        == "On average speculation pays at no c up to 12 with each prompt's best gamma, nor over all gammas"
    )


def test_the_speedup_title_says_so_if_everything_pays():
    figure = figures.plot_speedup_vs_cost_ratio(scenarios(), curve(3), LABEL)
    assert "at every c from 0.9" in title(figure)


def test_scenarios_without_spread_get_dots_and_no_bars():
    with_bars = figures.plot_speedup_vs_cost_ratio(scenarios(), curve(), LABEL)
    without = figures.plot_speedup_vs_cost_ratio(scenarios(spread=None), curve(), LABEL)
    assert len(with_bars.axes[0].lines) - len(without.axes[0].lines) == len(scenarios())


def test_the_heatmap_title_counts_its_cells():
    table = REGIME[REGIME.gamma == 4]
    best = REGIME.groupby(["alpha", "cost_ratio"]).speedup.max()
    more = int((best > 1).sum() - table.helpful.sum())
    expected = f"pays in {table.helpful.sum()} of 16 cells; with another gamma in {more} more (ringed)"
    assert more > 0
    assert expected in title(make("regime_heatmap"))


def test_the_heatmap_marks_the_pair_only_where_it_lies_on_the_map():
    def stars(position):
        axes = figures.plot_regime_heatmap(REGIME, 4, position, LABEL).axes[0]
        return [line for line in axes.lines if line.get_marker() == "*"]

    assert stars({"alpha": 0.5, "c": 4.0})[0].get_xydata().tolist() == [[2.0, 1.0]]
    assert not stars({"alpha": 0.5, "c": 20.0})
    assert not stars({"alpha": 0.5})
    assert not stars({})


def test_the_curves_title_gives_the_least_alpha_at_each_cost_ratio():
    assert "0.85 at c = 1.18, 0.32 at c = 3.12" in title(make("analytical_curves"))
    slow = figures.plot_analytical_curves((0.8,), GAMMAS, ALPHAS, LABEL)
    assert "none at c = 0.8" in title(slow)


def test_the_second_document_s_curve_is_never_below_one():
    for axes in make("analytical_curves").axes:
        rough = next(line for line in axes.lines if line.get_label().startswith("rough"))
        assert rough.get_ydata().min() >= 1


def test_the_alpha_title_gives_what_the_first_engine_needs():
    assert "At c = 3.40 speculation needs alpha 0.29 at gamma 1" in title(make("min_alpha_needed"))
    assert "0.65 on average" in title(make("min_alpha_needed"))


def test_a_draft_slower_than_its_target_gets_a_title_and_a_line_of_its_own():
    figure = make("min_alpha_needed", cost_ratios={"published": 0.6})
    assert "not even alpha 1 is enough" in title(figure)
    assert figure.axes[0].get_xlim()[0] < 0.6


@pytest.mark.parametrize("cost_ratios", [{}, {"published": 3.4}])
@pytest.mark.parametrize("name", ["analytical_curves", "min_alpha_needed"])
def test_a_pair_without_alpha_or_cost_ratio_still_gets_its_curves(name, cost_ratios, tmp_path):
    figure = make(name, alphas=pd.Series(dtype=float), cost_ratios=cost_ratios)
    assert "nan" not in title(figure)
    figures.save(figure, tmp_path, name)


def test_the_two_engines_lines_differ_by_more_than_colour():
    axes = make("min_alpha_needed").axes[0]
    dashes = [line.get_linestyle() for line in axes.lines if "engine" in line.get_label()]
    markers = [line.get_marker() for line in axes.lines if line.get_label().startswith("gamma")]
    assert len(set(dashes)) == 2
    assert len(set(markers)) == 4
