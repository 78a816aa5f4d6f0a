"""The server component of the Flower app."""

import time
from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from simulations.config import Settings
from simulations.datasets import LOADERS
from simulations.experiment import load_federation
from simulations.outputs import require_folder
from simulations.report import log_lines, log_report, make_report, write_report
from simulations.understood import describe_data

_HINT = 'Name another one: --run-config output-dir="FOLDER"'

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy, then report and save what came of it."""
    settings = Settings.from_run_config(context.run_config)
    require_folder("run-config", "output-dir", Path(settings.output_dir), _HINT)
    federation = load_federation(settings)
    if settings.data not in LOADERS:
        log_lines(describe_data(federation))
    strategy = federation.strategy()
    start = time.perf_counter()
    result = strategy.start(
        grid, ArrayRecord(), num_rounds=settings.num_rounds, timeout=settings.timeout
    )
    report = make_report(federation, strategy, result, seconds=time.perf_counter() - start)
    log_report(report)
    write_report(report, settings.output_dir)
