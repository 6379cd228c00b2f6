"""A study on one page: figures drawn as SVG, tables of their data, no script, nothing fetched."""
