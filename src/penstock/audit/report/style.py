"""All there is of CSS: light and dark, narrow and wide, screen and paper."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root {
  color-scheme: light dark;
  --paper: #fbfbf9; --card: #ffffff; --ink: #1c2126; --soft: #5a646e; --rule: #dfe2e1; --fill: #f1f2ef;
  --settled: #2f7d5d; --parked: #7a62b8; --pending: #c3cbd1; --unproven: #d99413; --lost: #c22f2a;
  --dead: #6d4c41; --expired: #8d8a5b; --skipped: #9bb7c4; --link: #1d5fa6;
  --good: #e3f1e9; --doubt: #fbeecb; --bad: #fbdedb;
  --dots: #7d8992; --stripes: #fff3d6; --crosses: #fff;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181b; --card: #1c2226; --ink: #e7eaec; --soft: #a3adb5; --rule: #333c42; --fill: #252c31;
    --settled: #4fb389; --parked: #a994e6; --pending: #46525a; --unproven: #e3a733; --lost: #f0675f;
    --dead: #c39a8b; --expired: #b9b57e; --skipped: #6d8b99; --link: #83b8f0;
    --good: #18352a; --doubt: #3d3013; --bad: #45201e;
    --dots: #93a1aa; --stripes: #5b430e; --crosses: #45100d;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body {
  margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 62rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
h1 { font-size: 1.05rem; font-weight: 600; color: var(--soft); margin: 0 0 .75rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 0; line-height: 1.3; overflow-wrap: anywhere; }
h3 { font-size: .95rem; margin: 1.75rem 0 .4rem; }
p { margin: .4rem 0; }
a { color: var(--link); text-underline-offset: .15em; }
code { font: .85em/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
code span { white-space: nowrap; }
.soft { color: var(--soft); font-size: .88rem; }
.verdict { border-radius: .6rem; padding: 1.1rem 1.25rem; border-left: .5rem solid; display: flex; gap: 1rem; }
.verdict .sign { font-size: 2rem; line-height: 1.1; font-weight: 700; }
.verdict strong { display: block; font-size: 1.35rem; line-height: 1.3; font-weight: 650; text-wrap: balance; }
.verdict.proven, .verdict.external { background: var(--good); border-color: var(--settled); }
.verdict.unproven { background: var(--doubt); border-color: var(--unproven); }
.verdict.lost { background: var(--bad); border-color: var(--lost); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(6rem, 1fr)); gap: .6rem; margin: 1rem 0 0; }
.figures div { background: var(--card); border: 1px solid var(--rule); border-radius: .5rem; padding: .55rem .75rem; }
.figures dt { color: var(--soft); font-size: .82rem; }
.figures dd { margin: 0; font-size: 1.2rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.figures div.lost dd { color: var(--lost); }
section { background: var(--card); border: 1px solid var(--rule); border-radius: .6rem; padding: 1.1rem 1.25rem; }
section { margin-top: 1.25rem; }
section > header { display: flex; flex-wrap: wrap; gap: .4rem .8rem; align-items: center; }
.badge { border-radius: 1rem; padding: .1rem .65rem; font-size: .82rem; font-weight: 650; white-space: nowrap; }
.badge.proven { background: var(--good); } .badge.external { background: var(--fill); }
.badge.unproven { background: var(--doubt); } .badge.lost { background: var(--bad); }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: .82rem; }
th, td { padding: .35rem .7rem .35rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
tbody tr:last-child td { border-bottom: 0; }
.n { text-align: right; }
td.t { overflow-wrap: anywhere; }
.defs { position: absolute; width: 0; height: 0; }
.chart { display: block; width: 100%; background: var(--fill); border-radius: .25rem; }
.bar { height: 1.5rem; } .timeline { height: 2.1rem; background: none; }
.curve { height: 8rem; } .columns { height: 5rem; }
svg .settled, .key .acked { fill: var(--settled); } svg .acked { fill: var(--settled); }
svg .parked { fill: var(--parked); } svg .dead { fill: var(--dead); } svg .expired { fill: var(--expired); }
svg .skipped { fill: var(--skipped); }
svg .pending { fill: url(#p-pending); } svg .unproven { fill: url(#p-unproven); } svg .lost { fill: url(#p-lost); }
pattern .pending { fill: var(--pending); }
pattern .unproven { fill: var(--unproven); }
pattern .lost { fill: var(--lost); }
svg .mark-lost { fill: var(--lost); } svg .mark-unproven { fill: var(--unproven); }
.dot { fill: var(--dots); } .stripe { fill: var(--stripes); }
.cross { stroke: var(--crosses); stroke-width: .8; fill: none; }
.line { fill: none; stroke: var(--settled); stroke-width: 2; vector-effect: non-scaling-stroke; }
.line.p99 { stroke: var(--unproven); stroke-dasharray: 6 3; } .line.max { stroke: var(--lost); stroke-dasharray: 2 3; }
.area { fill: var(--settled); opacity: .16; }
.grid { stroke: var(--rule); stroke-width: 1; vector-effect: non-scaling-stroke; stroke-dasharray: 3 3; }
.axis { display: flex; justify-content: space-between; gap: .5rem; color: var(--soft); font-size: .82rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; list-style: none; font-size: .88rem; }
.legend { margin: .5rem 0 0; padding: 0; }
.legend li { display: flex; align-items: center; gap: .4rem; }
.key { width: .95rem; height: .95rem; border-radius: .2rem; flex: none; }
.key.rule { height: .6rem; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: 0 2rem; }
.two > * { min-width: 0; }
details { margin-top: 1.25rem; } summary { cursor: pointer; font-weight: 600; font-size: .95rem; }
.partition { margin-top: .8rem; }
.notes { margin: .4rem 0 0; padding-left: 1.1rem; font-size: .88rem; }
footer { color: var(--soft); font-size: .88rem; margin-top: 2rem; }
footer dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
footer dt { font-weight: 600; } footer dd { margin: 0; }
:target { outline: 2px solid var(--link); outline-offset: 2px; }
@media (max-width: 40rem) {
  body { padding: 1rem .75rem 3rem; }
  .verdict { padding: .9rem 1rem; } .verdict strong { font-size: 1.15rem; }
  section { padding: .9rem; }
  thead { position: absolute; clip-path: inset(50%); height: 1px; width: 1px; overflow: hidden; }
  tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--rule); }
  tbody tr:last-child { border-bottom: 0; }
  td, td.n { display: flex; justify-content: space-between; gap: 1rem; border: 0; text-align: right; }
  td, td.n { padding: .12rem 0; }
  td::before { content: attr(data-label); color: var(--soft); font-size: .82rem; flex: none; text-align: left; }
  footer dl { grid-template-columns: 1fr; } footer dd { margin-bottom: .4rem; }
}
@media print {
  :root { color-scheme: light; --paper: #fff; --card: #fff; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  section, .verdict, .figures div { break-inside: avoid; }
  section { border: 0; border-top: 1px solid #999; border-radius: 0; padding: .8rem 0; }
  tr, .partition, .two > div { break-inside: avoid; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  a { color: inherit; text-decoration: none; }
}
"""
