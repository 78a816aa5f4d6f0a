"""Results of a run: report, verdict, baselines, page and folder."""
