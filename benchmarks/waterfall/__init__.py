"""Where the time of single messages goes, hop by hop: `python -m benchmarks.waterfall`."""
