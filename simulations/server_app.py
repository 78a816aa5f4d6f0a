"""The server component of the Flower app."""

import logging

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from simulations.config import Settings
from simulations.experiment import load_federation
from simulations.progress import Watch
from simulations.report import log_report, make_report
from simulations.run_folder import RunFolder, require_writable

logger = logging.getLogger("flwr.fl_strategies")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy, then report and save what came of it."""
    settings, watch = Settings.from_run_config(context.run_config), Watch()
    with watch.phase("loading"):
        federation = load_federation(settings)
        strategy = federation.strategy()
    require_writable(settings.output_dir)
    with watch.phase("federation"):
        result = strategy.start(
            grid, ArrayRecord(), num_rounds=settings.num_rounds, timeout=settings.timeout
        )
    folder = RunFolder.new(settings.output_dir)
    saved, spent = folder.keep_model(federation, strategy), watch.seconds["federation"]
    report = make_report(federation, strategy, result, seconds=spent, watch=watch, model=saved)
    log_report(report)
    logger.info("The result is in %s", folder.write(report))
