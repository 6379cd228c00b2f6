"""The HTML report of a study: SVG figures with their data, without scripts or external resources."""
