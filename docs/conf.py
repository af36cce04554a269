"""Sphinx configuration; `make docs` builds with warnings as errors."""

from importlib.metadata import version as _version

project = "Penstock"
author = "The Penstock authors"
copyright = "The Penstock authors, Apache-2.0"
release = _version("penstock")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
default_role = "code"

html_theme = "furo"
html_title = f"Penstock {release}"
html_show_copyright = False
