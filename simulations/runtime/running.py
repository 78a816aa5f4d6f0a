"""One federation from its settings to its report, with the time of each part."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.serverapp.strategy import Result

from fl_strategies import KnowledgeStrategy
from simulations.config import Settings
from simulations.federation import Federation, load_federation
from simulations.results.files import require_folder
from simulations.results.report import Report, make_report
from simulations.runtime.client_app import app
from simulations.runtime.local import run_local
from simulations.runtime.progress import Watch


def cpu_seconds() -> float:
    """Return the processor time of this process and of its finished workers.

    On Windows, which has no `resource`, that of this process alone.
    """
    try:
        import resource
    except ImportError:
        return time.process_time()
    usages = [
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@dataclass(frozen=True)
class Finished:
    """A run whose model is there and which is not yet compared with anything."""

    federation: Federation
    strategy: KnowledgeStrategy[Any]
    result: Result
    watch: Watch
    cpu_seconds: float

    def report(self, model: Report | None = None) -> Report:
        """Compare the result as the settings say, and describe all of it."""
        return make_report(
            self.federation,
            self.strategy,
            self.result,
            seconds=self.watch.seconds["federation"],
            cpu_seconds=self.cpu_seconds,
            num_workers=self.federation.settings.workers,
            watch=self.watch,
            model=model,
        )

    def alone(self) -> "Finished":
        """Return the same without comparisons, for whom they took too long."""
        settings = self.federation.settings.but(
            solo=False, pooled=False, pate=False, public_only=False
        )
        return replace(self, federation=replace(self.federation, settings=settings))


def run_once(settings: Settings) -> Report:
    """Run a federation in this process, without a word, and return its report."""
    return run_federation(settings, Watch(settings.num_rounds)).report()


def run_federation(
    settings: Settings,
    watch: Watch,
    *,
    verbose: bool = False,
    output: bool = False,
) -> Finished:
    """Run a federation in this process; with `output`, if its result can be written."""
    if output:
        require_folder("run", "output-dir", Path(settings.output_dir))
    with watch.phase("loading"):
        federation = load_federation(settings)
        strategy = federation.strategy()
    watch.say(_opening(federation))
    if settings.num_parties == 1:
        watch.say("warning: one party has nobody to learn from; num-parties is 1")
    cpu_start = cpu_seconds()
    with watch.phase("federation"):
        result = run_local(
            strategy,
            app,
            settings.num_parties,
            num_rounds=settings.num_rounds,
            run_config=settings.to_run_config(),
            num_workers=settings.workers,
            watch=watch,
            verbose=verbose,
        )
    return Finished(federation, strategy, result, watch, cpu_seconds() - cpu_start)


def _opening(federation: Federation) -> str:
    settings, data = federation.settings, federation.dataset
    rounds = f"{settings.num_rounds} rounds" if settings.num_rounds > 1 else "one round"
    parties = "one party" if settings.num_parties == 1 else f"{settings.num_parties} parties"
    return (
        f"{settings.strategy} on {settings.data}: {parties} with "
        f"{sum(map(len, federation.rows))} records, {len(data.x_public)} public rows, {rounds}"
    )
