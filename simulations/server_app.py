"""The server component of the Flower app."""

import time

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from simulations.config import Settings
from simulations.experiment import load_federation
from simulations.report import log_report, make_report, write_report

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy, then report and save what came of it."""
    settings = Settings.from_run_config(context.run_config)
    federation = load_federation(settings)
    strategy = federation.strategy()
    start = time.perf_counter()
    result = strategy.start(
        grid, ArrayRecord(), num_rounds=settings.num_rounds, timeout=settings.timeout
    )
    report = make_report(federation, strategy, result, seconds=time.perf_counter() - start)
    log_report(report)
    write_report(report, settings.output_dir)
