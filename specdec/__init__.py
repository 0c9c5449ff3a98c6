"""Helper package of the speculative-decoding study; importing it never imports torch (``specdec.engine`` does)."""

import logging
import warnings

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # that there is no home for its cache concerns no user
warnings.filterwarnings("ignore", "Glyph .* missing from font")  # of a model's name in a plot's title
