"""How a report looks: light and dark, on a laptop and on a phone, and on paper."""

from typing import Final

STYLE: Final = """
:root {
  --page: #f4f5f7; --card: #ffffff; --ink: #1c2128; --soft: #5b6472; --line: #dfe3e8;
  --own: #2563c9; --other: #aab4c3; --good: #17713f; --bad: #b3261e; --track: #eef0f3;
  --warn-ink: #6a4200; --warn: #fff4dd; --warn-line: #e9c46a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #101317; --card: #191d23; --ink: #e7eaee; --soft: #9aa5b4; --line: #2d343d;
    --own: #74a9ff; --other: #596574; --good: #63c88e; --bad: #ff8a80; --track: #232930;
    --warn-ink: #f5d9a0; --warn: #2d2412; --warn-line: #6d5620;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 62rem; margin: 0 auto; padding: 2.2rem 1.25rem 4rem; }
header p { margin: 0; color: var(--soft); }
h1 { font-size: 1.75rem; line-height: 1.25; margin: .2rem 0 .4rem; letter-spacing: -.01em;
  text-wrap: balance; overflow-wrap: anywhere; }
h2 { font-size: 1.12rem; margin: 0 0 .6rem; }
h3 { font-size: .95rem; margin: 1.2rem 0 .3rem; }
section, .tile {
  background: var(--card); border: 1px solid var(--line); border-radius: 12px;
}
section { padding: 1.2rem 1.35rem 1.3rem; margin-top: 1rem; }
p { margin: .4rem 0; overflow-wrap: anywhere; }
.note { color: var(--soft); font-size: .9rem; margin-top: -.25rem; max-width: 46rem; }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: .8rem; margin-top: 1.4rem; }
.tile { padding: .85rem 1rem; }
.tile b { display: block; font-size: 1.4rem; line-height: 1.3; letter-spacing: -.01em; }
.tile span { color: var(--soft); font-size: .86rem; display: block; line-height: 1.4; }
.warning {
  background: var(--warn); border: 1px solid var(--warn-line); color: var(--warn-ink);
  border-radius: 12px; padding: .8rem 1.1rem; margin-top: 1rem;
}
.good { color: var(--good); } .bad { color: var(--bad); } .soft { color: var(--soft); }
.bar { display: grid; grid-template-columns: 13rem 1fr 5.2rem; gap: .2rem .9rem;
  align-items: center; padding: .22rem 0; }
.bar > span:first-child { overflow-wrap: anywhere; line-height: 1.35; }
.bar svg { display: block; width: 100%; height: 14px; }
.bar .number { text-align: right; }
.own { fill: var(--own); } .other { fill: var(--other); } .track { fill: var(--track); }
.chart { display: block; width: 100%; max-width: 40rem; height: auto; margin: .3rem 0 0; }
.chart text { fill: var(--soft); font-size: 11px; font-family: inherit; }
.chart .axis { stroke: var(--line); stroke-width: 1; }
.chart .curve { fill: none; stroke: var(--own); stroke-width: 2; stroke-linejoin: round; }
.chart .level { stroke: var(--other); stroke-width: 1.5; stroke-dasharray: 4 3; }
.dumbbell { width: 9rem; height: 14px; display: block; min-width: 7rem; margin-top: .25rem; }
.dumbbell line { stroke: var(--other); stroke-width: 2; }
.scroll { overflow-x: auto; }
.scroll:focus-visible { outline: 2px solid var(--own); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: .82rem; }
th, td { padding: .36rem .9rem .36rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th:last-child, td:last-child { padding-right: 0; }
tbody tr:last-child td { border-bottom: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
dl { display: grid; grid-template-columns: 8.5rem 1fr; gap: .5rem 1rem; margin: .3rem 0; }
dt { font-weight: 600; } dd { margin: 0; overflow-wrap: anywhere; }
dd ul { margin: 0; padding-left: 1.1rem; } li { margin: .12rem 0; }
code, pre { font: .86em ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
pre { background: var(--track); border-radius: 8px; padding: .7rem .9rem; overflow-x: auto;
  margin: .5rem 0; }
details { margin-top: .3rem; } summary { cursor: pointer; font-weight: 600; padding: .2rem 0; }
a { color: var(--own); }
@media (max-width: 46rem) {
  main { padding: 1.3rem .85rem 3rem; }
  h1 { font-size: 1.4rem; }
  section { padding: 1rem; }
  .tiles { grid-template-columns: 1fr 1fr; gap: .6rem; }
  .tile { padding: .7rem .8rem; } .tile b { font-size: 1.2rem; }
  .bar { grid-template-columns: 1fr auto; padding: .3rem 0; }
  .bar svg { grid-column: 1 / -1; grid-row: 2; height: 10px; }
  table { font-size: .82rem; } th, td { padding-right: .4rem; }
  th { font-size: .76rem; } .chart text { font-size: 17px; }
  .dumbbell { display: none; }
  dl { grid-template-columns: 1fr; gap: .1rem; } dd { margin-bottom: .6rem; }
}
@media (max-width: 27rem) {
  table { font-size: .74rem; } th { font-size: .68rem; } th, td { padding-right: .25rem; }
}
@media print {
  body { background: none; font-size: 12px; } section, .tile { break-inside: avoid; }
}
"""
