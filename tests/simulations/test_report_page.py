"""The page of a run: complete, harmless whatever is in it, and looked at in a browser."""

import copy
import html
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fl_strategies.privacy import PrivacyLedger
from fl_strategies.privacy.events import SubsampleEvent
from simulations.__main__ import main
from simulations.config import Settings
from simulations.results.page import comparison_page, curve, page
from simulations.results.run_folder import write_json
from simulations.runtime.local import run_federation
from simulations.runtime.progress import Watch

VOID = {"meta"}
EVIL = """<script>alert("1")</script><img src=x onerror='alert(2)'>&amp;"""
LIGHT, DARK = 1, 0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Reader(HTMLParser):
    """Collects tags, attributes and text; every element must end where it should."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def federation(**changes: object) -> dict[str, Any]:
    given = {"num_parties": 3, "num_trees": 5, "num_workers": 1, "learner": "random-forest"}
    settings = Settings.of(**{**given, **changes})
    return run_federation(settings, Watch(settings.num_rounds)).report()


@pytest.fixture(scope="module")
def one_round() -> dict[str, Any]:
    return federation()


@pytest.fixture(scope="module")
def rounds() -> dict[str, Any]:
    return federation(
        strategy="fedmd", num_server_rounds=3, learner="", boosting_rounds=5, pooled=False
    )


def test_the_page_says_all_that_was_found(one_round: dict[str, Any]) -> None:
    """The verdict comes first; figures, parties, bytes, promise, time and settings follow."""
    report = {
        **one_round,
        "rejected": {"17": "Party 4: x must be records, got none."},
        "warnings": ["The federation is below the best party."],
        "model": {"learner": "extra-trees", "files": ["model/model.json"], "num-bytes": 5000},
    }

    source = page(report)
    read = Reader(source)

    verdict = report["verdict"]
    assert f"<h1>{verdict[0].upper()}{verdict[1:]}.</h1>" in source
    assert source.index("<h1>") < source.index("<h2>")
    for words in (
        "best party alone",
        "mean of parties alone",
        "majority class",
        "Parties before and after",
        "The federation is below the best party.",
        "from each party in each round",
        "15.0 kB",  # three parties, one round
        "Privacy statement",
        "Not covered",
        "release without protection",
        "Party 4: x must be records, got none.",
        "server: combining answers, final model",
        'load_model("RUN")',
        "num-server-rounds",
        report["versions"]["flwr"],
    ):
        assert words in read.text, words
    assert "Round by round" not in read.text


def test_several_rounds_are_drawn(rounds: dict[str, Any]) -> None:
    """Parties that keep their models have their own figures, and a line shows the rounds."""
    read = Reader(page(rounds))

    assert "Round by round" in read.text
    assert "its own model after the federation." in read.text
    points = dict(read.attributes)["points"].split()
    assert len(points) == 3


def test_a_better_round_is_drawn_higher() -> None:
    """Rounds go to the right and figures upwards; equal figures are drawn as well."""
    drawn = Reader(curve([(1, 0.2), (2, 0.6), (4, 0.4)], {"level": 0.5}, percent=True))
    points = [tuple(map(float, p.split(","))) for p in dict(drawn.attributes)["points"].split()]

    (x1, y1), (x2, y2), (x4, y4) = points
    assert x1 < x2 < x4
    assert y2 < y4 < y1
    assert x4 - x2 == pytest.approx(2 * (x2 - x1), abs=0.2)
    assert "NaN" not in curve([(1, 0.5), (2, 0.5)], {}, percent=False)


def hostile(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report whose every text is an attack."""
    told = copy.deepcopy(report)
    for key in ("strategy", "data", "verdict", "privacy-statement", "date", "commit"):
        told[key] = EVIL
    told["warnings"], told["rejected"] = [EVIL], {EVIL: EVIL}
    told["model"] = {"learner": EVIL, "files": [EVIL], "num-bytes": 10}
    told["versions"], told["settings"] = {EVIL: EVIL}, {EVIL: EVIL}
    told["ledger"]["audience"] = EVIL
    for number, entry in enumerate(told["ledger"]["entries"]):
        entry["event"]["reason"] = f"{EVIL}{number}"
    for party in told["parties"]:
        party["learner"] = EVIL
    return told


def assert_harmless(source: str) -> None:
    read = Reader(source)
    assert not read.tags & {"script", "img", "iframe", "link", "object", "embed", "base"}
    for name, value in read.attributes:
        assert not name.startswith("on")
        assert name not in {"src", "href", "action", "xlink:href"} or not value
    assert "<script" not in source
    assert not re.search(r"url\(|@import|https?://", source)


def test_nothing_in_a_report_becomes_markup_or_is_fetched(
    one_round: dict[str, Any], rounds: dict[str, Any]
) -> None:
    """Texts of strangers are shown as they are; no script, style, font or picture is loaded."""
    evil = hostile(one_round)
    attacked = [page(evil), comparison_page({EVIL: evil, "b": hostile(rounds)})]
    plain = [page(one_round), page(rounds), comparison_page({"a": one_round, "b": rounds})]

    for source in (*attacked, *plain):
        assert_harmless(source)
        assert "prefers-color-scheme: dark" in source
    assert all(EVIL in Reader(source).text for source in attacked)


def test_a_sample_in_the_clear_is_the_first_thing_said(one_round: dict[str, Any]) -> None:
    """Epsilon 0 would be read as perfect privacy."""
    ledger = PrivacyLedger("example", delta=0.5)
    ledger.compose(SubsampleEvent(records=100, samples=30, replacement=False))
    told = {"ledger": ledger.state_dict(), "privacy-statement": ledger.statement()}

    words = Reader(page({**one_round, **told, "epsilon-example": 0.0})).text

    assert "30 % chance that a record is used in the clear" in re.sub(r"\s+", " ", words)
    assert "In short a record is used in the clear with chance 30 %." in words


def test_a_promise_is_told_with_its_unit(one_round: dict[str, Any]) -> None:
    """Epsilon without a delta and without whom it protects says nothing."""
    promise = {"epsilon-example": math.inf, "epsilon-party": 0.934, "delta-party": 1e-5}

    words = Reader(page({**one_round, **promise})).text

    assert "epsilon 0.934 for a party, at delta 1e-05" in words


def test_a_deployed_run_has_a_page_without_comparisons(one_round: dict[str, Any]) -> None:
    """A server knows no party's records; what it does not know is left out."""
    parties = [{"partition-id": 0, "learner": "mlp", "train": {}}]
    kept = ("strategy", "seed", "ledger", "privacy-statement", "rounds", "settings", "seconds")
    report = {**{key: one_round[key] for key in kept}, "metric": "accuracy", "accuracy": None}

    words = Reader(page({**report, "parties": parties})).text

    assert "not measured" in words
    assert "Accuracy against" not in words


def test_runs_are_compared_by_what_differs(
    one_round: dict[str, Any], rounds: dict[str, Any], tmp_path: Path
) -> None:
    """The command writes one page of several folders, or that of one again."""
    for name, report in (("a", one_round), ("b", rounds)):
        write_json(report, tmp_path / name / "result.json")

    assert main(["report", str(tmp_path / "a")]) == 0
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b" / "result.json")]) == 0

    assert (tmp_path / "a" / "report.html").read_text() == page(one_round)
    words = Reader((tmp_path / "comparison.html").read_text()).text
    assert "2 runs compared" in words
    assert "fedkd, seed 0" in words
    assert "fedmd, seed 0" in words
    differing = words.partition("Settings in which they differ")[2]
    assert "num-server-rounds" in differing
    assert "num-trees" not in differing


def test_what_is_no_run_is_one_sentence(
    one_round: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing folder, another file, a broken one, and the same run twice."""
    write_json({"outcomes": []}, tmp_path / "other.json")
    write_json({**one_round, "rounds": [7], "parties": [None]}, tmp_path / "broken.json")
    for runs, sentence in (
        ([tmp_path / "none"], "must be a result of a run"),
        ([tmp_path / "other.json"], "must be the result of a run, with strategy"),
        ([tmp_path / "broken.json"], "report: runs must be results of runs, got TypeError"),
        ([tmp_path, tmp_path], "report: runs must be different"),
    ):
        assert main(["report", *map(str, runs)]) == 1
        assert sentence in capsys.readouterr().err


def browse(source: Path, *options: str) -> str:
    """Open a page in Chromium, away from every network, and return what it says."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={source.parent / 'profile'}",
        *options,
        source.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout + done.stderr


def framed(source: str, width: int) -> str:
    """Return a page that writes into its title how wide another is on a narrow screen."""
    # A window of Chromium has at least 500 pixels; a frame may have fewer.
    measure = "document.title = this.contentDocument.documentElement.scrollWidth"
    inner = f'srcdoc="{html.escape(source)}" onload="{measure}"'
    frame = f'<iframe style="width:{width}px;height:2000px;border:0" {inner}></iframe>'
    return f"<!DOCTYPE html><title>-</title><body>{frame}</body>"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390], ids=["laptop", "phone"])
def test_a_browser_shows_the_page(
    width: int, scheme: int, one_round: dict[str, Any], rounds: dict[str, Any], tmp_path: Path
) -> None:
    """No error, nothing wider than the screen, and a picture of each page to look at."""
    sources = {
        "run": page(one_round),
        "rounds": page(rounds),
        "comparison": comparison_page({"a": one_round, "b": rounds}),
    }
    looks = [f"--window-size={width},2400", f"--blink-settings=preferredColorScheme={scheme}"]
    for name, source in sources.items():
        path = tmp_path / f"{name}.html"
        path.write_text(source)
        picture = tmp_path / f"{name}-{width}-{scheme}.png"
        said = browse(path, *looks, f"--screenshot={picture}")
        (tmp_path / "measured.html").write_text(framed(source, width))
        title = browse(tmp_path / "measured.html", *looks, "--dump-dom")

        assert "CONSOLE" not in said
        assert picture.stat().st_size > 10_000
        found = re.search(r"<title>(\d+)</title>", title)
        assert found is not None
        assert int(found[1]) <= width
