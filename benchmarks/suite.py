"""All measurements of speed in one run: ``make bench``, or ``--quick`` for a smoke test.

Every claim is a ratio against `benchmarks.plain`, measured in turns in the same run, with
the accuracy of both sides beside it and the share of what this machine could do at most.
Parts of the suite are modules of this folder with ``measure(repeats) -> dict``; a part that
does not exist is left out, and all of them in a quick run. What a part returns under
"claims" must have the keys of `benchmarks.parties`; its other numbers are shown as they are.

Writes docs/results/bench.json, the generated part of docs/performance.md and the picture
docs/bench_growth.png, or all three into a folder of your choice.
"""

import argparse
import importlib
import importlib.util
import json
import math
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import growth, parties

PARTS = ("trees", "end_to_end", "server", "wire", "startup")
REPEATS = 5
QUICK_SCALE = 0.05
ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
COLUMNS = (
    ("", "claim"),
    ("times faster (CPU)", "ratio-cpu"),
    ("by the clock", "ratio-wall"),
    ("goal", "goal"),
    ("plain, CPU s", "plain-cpu-seconds"),
    ("ours, CPU s", "ours-cpu-seconds"),
    ("share of the machine's limit", "share-of-limit"),
    ("plain, accuracy", "plain-accuracy"),
    ("ours, accuracy", "ours-accuracy"),
    ("plain, peak MB", "plain-megabytes"),
    ("ours, peak MB", "ours-megabytes"),
)
SHARES = ("share-of-limit", "plain-accuracy", "ours-accuracy")


def measure(*, quick: bool, repeats: int = REPEATS) -> dict[str, Any]:
    """Run all parts that exist and return what they found."""
    repeats = 1 if quick else repeats
    scale = QUICK_SCALE if quick else 1.0
    found: dict[str, Any] = {"quick": quick, "repeats": repeats, **_where()}
    found["parties"] = _told("parties", parties.measure, repeats, scale=scale, memory=not quick)
    steps = growth.QUICK if quick else growth.STEPS
    found["growth"] = _told("growth", growth.measure, repeats, steps)
    for name in () if quick else PARTS:
        if importlib.util.find_spec(f"benchmarks.{name}") is not None:
            part = importlib.import_module(f"benchmarks.{name}")
            found[name] = _told(name, part.measure, repeats)
    return found


def _told(name: str, work: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
    start = time.perf_counter()
    result: dict[str, Any] = work(*arguments, **options)
    print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    return result


def _where() -> dict[str, Any]:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return {
        "commit": told.stdout.strip() or None,
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "load": os.getloadavg()[1],
    }


def markdown(found: Mapping[str, Any]) -> str:
    """Return all that was measured as Markdown."""
    limits = found["parties"]["limits"]
    where = (
        f"Measured {found['date'][:10]} at commit {found['commit']}, medians of "
        f"{found['repeats']}, one thread, load average {found['load']:.0f}. "
        f"This machine's limits in the same run: {limits['gflops']:.0f} GFLOP/s in a large "
        f"float32 product, {limits['gigabytes_a_second']:.0f} GB/s in a copy."
    )
    lines = [where, "", *_claims(found["parties"]["claims"])]
    for name in PARTS:
        part = found.get(name)
        if part is not None:
            lines += ["", f"### {name.replace('_', ' ').capitalize()}", "", *_part(part)]
    lines += ["", "### Growth", "", *_growth(found["growth"])]
    return "\n".join(lines)


def _claims(claims: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = [(title, key) for title, key in COLUMNS if any(key in one for one in claims)]
    rows = [[shown(key, one.get(key)) for _, key in columns] for one in claims]
    return _table([title for title, _ in columns], rows)


def _part(part: Mapping[str, Any]) -> list[str]:
    claims = part.get("claims", [])
    rest = [[name, shown(name, value)] for name, value in _numbers(part)]
    lines = _claims(claims) if claims else []
    if claims and rest:
        lines.append("")
    return lines + (_table(["", "measured"], rest) if rest else [])


def _numbers(part: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in part.items():
        name = f"{path} {key}".strip()
        if isinstance(value, Mapping):
            yield from _numbers(value, name)
        elif key != "claims" and not isinstance(value, list):
            yield name, value


def _growth(axes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = [
        [
            name.replace("-", " "),
            ", ".join(f"{size:,}" for size in line["sizes"]),
            ", ".join(f"{seconds:.2f}" for seconds in line["cpu-seconds"]),
            shown("bend", line["bend"]),
        ]
        for name, line in axes.items()
    ]
    heads = ["what grows", "to", "CPU s of a run", "last stretch against a straight line"]
    return _table(heads, rows)


def shown(key: str, value: Any) -> str:
    """Return a value for people.

    Examples
    --------
    >>> shown("ours-accuracy", 0.9134), shown("ratio-cpu", 12.345), shown("goal", None)
    ('91.3 %', '12.3', '-')
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if key in SHARES:
        return f"{100 * value:.1f} %"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


def write(found: Mapping[str, Any], docs: Path) -> None:
    """Write the file of results, the page's generated part and the picture."""
    results = docs / "results" / "bench.json"
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    growth.draw(found["growth"], docs / "bench_growth.png")
    page = docs / "performance.md"
    text = page.read_text(encoding="utf-8") if page.exists() else f"{BEGIN}\n{END}\n"
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    made = f"{before}{BEGIN}\n\n{markdown(found)}\n\n{END}{after}"
    page.write_text(made, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seconds, for a test")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--docs", type=Path, help="folder to write to; omitted: docs")
    given = parser.parse_args(arguments)
    found = measure(quick=given.quick, repeats=given.repeats)
    print(markdown(found))
    if given.docs is not None or not given.quick:
        write(found, given.docs or ROOT / "docs")


if __name__ == "__main__":
    main()
