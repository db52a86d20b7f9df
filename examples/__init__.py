"""Programs to run and to copy from: a quick start, and the demo."""
