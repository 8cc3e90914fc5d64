"""Sphinx: the pages are Markdown (myst), the reference comes from the docstrings."""

import attnzoo

project = "attnzoo"
author = "The attnzoo developers"
copyright = "2026, The attnzoo developers"
release = version = attnzoo.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "attnzoo"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
