"""Where the text of a figure lies, for tests of plots."""

import itertools

from matplotlib.text import Annotation, Text


def title(figure):
    return " ".join(figure.get_suptitle().split())


def boxes(figure):
    """Pairs of a text and its extent, without tick labels, which matplotlib keeps apart, also where out of view."""
    figure.draw_without_rendering()
    ticks = {label for axes in figure.axes for label in (*axes.get_xticklabels(), *axes.get_yticklabels())}
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [(text, Text.get_window_extent(text, figure.canvas.get_renderer())) for text in shown if text not in ticks]


def assert_text_lies_inside(figure):
    for text, box in boxes(figure):
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= figure.bbox.x1, text
        assert box.y1 <= figure.bbox.y1, text


def assert_no_two_texts_overlap(figure):
    upright = [(text, box) for text, box in boxes(figure) if not isinstance(text, Annotation)]  # names are slanted
    for (first, one), (second, other) in itertools.combinations(upright, 2):
        overlaps = one.x0 < other.x1 and other.x0 < one.x1 and one.y0 < other.y1 and other.y0 < one.y1
        assert not overlaps, (first.get_text(), second.get_text())
