"""Results on disk become plots, figures and one page."""
