"""Helper package of the speculative-decoding study; importing it never imports torch (``specdec.engine`` does)."""
