"""The server component of the Flower app."""

import logging
from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from simulations.config import Settings
from simulations.data.sets import LOADERS
from simulations.federation import load_federation
from simulations.results.report import log_lines, make_report, render
from simulations.results.run_folder import RunFolder, require_folder
from simulations.runtime.progress import Watch

logger = logging.getLogger("flwr.fl_strategies")

_HINT = 'Name another one: --run-config output-dir="FOLDER"'

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy, then report and save what came of it."""
    settings, watch = Settings.from_run_config(context.run_config), Watch()
    require_folder("run-config", "output-dir", Path(settings.output_dir), _HINT)
    with watch.phase("loading"):
        federation = load_federation(settings)
        strategy = federation.strategy()
    if settings.data not in LOADERS:
        log_lines(federation.describe_data())
    with watch.phase("federation"):
        result = strategy.start(
            grid, ArrayRecord(), num_rounds=settings.num_rounds, timeout=settings.timeout
        )
    folder = RunFolder.new(settings.output_dir)
    saved, spent = folder.keep_model(federation, strategy), watch.seconds["federation"]
    folder.write_epsilon(strategy)
    report = make_report(federation, strategy, result, seconds=spent, watch=watch, model=saved)
    log_lines(render(report))
    logger.info("The result is in %s", folder.write(report))
