"""The style sheet of the HTML report: phone first, light and dark, and paper."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1b1f24; --soft: #57606a; --line: #d5dae0; --raised: #f5f7f9; --mark: #ffe9a8;
  --run0: #0072b2; --run1: #d55e00; --run2: #008060; --run3: #b8508f; --run4: #3f9fd8; --run5: #c78500;
  --run6: #7a5195;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --paper: #14171b; --ink: #e4e8ec; --soft: #a3adb8; --line: #3a424b; --raised: #1d2127; --mark: #5a4708;
    --run0: #4aa8e8; --run1: #ff8a3d; --run2: #2cc79a; --run3: #e58fc4; --run4: #9fd6f7; --run5: #f0b840;
    --run6: #b79ae0;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere;
}
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-top: .5rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
a { color: var(--run0); }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; font-size: .9rem; }
nav a { padding: .25rem 0; }
.note, figcaption, .origins, .notes { color: var(--soft); font-size: .9rem; }
.note { margin: .4rem 0; }
.origins, .notes { padding-left: 1.1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; margin: .5rem 0; }
th, td { padding: .3rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th, td { overflow-wrap: break-word; }
th { font-weight: 600; min-width: 5.5rem; }
thead th { background: var(--raised); vertical-align: bottom; }
tbody th { position: sticky; left: 0; background: var(--paper); }
tbody th { max-width: 11rem; min-width: 9rem; font-weight: 500; overflow-wrap: anywhere; }
.numbers td { text-align: right; font-variant-numeric: tabular-nums; }
.words td { overflow-wrap: anywhere; }
.numbers thead th + th { text-align: right; }
.words td { max-width: 18rem; min-width: 5rem; }
@media (min-width: 50rem) { tbody th { max-width: 20rem; } }
mark { background: var(--mark); color: inherit; font-weight: 600; padding: 0 .2rem; }
.tag { border: 1px solid currentColor; border-radius: .3rem; padding: 0 .3em; font-size: .85em; }
.swatch { width: 24px; height: 8px; vertical-align: middle; }
.swatch line { stroke-width: 3; }
.key { display: flex; flex-wrap: wrap; gap: .15rem 1.1rem; list-style: none; margin: .4rem 0; padding: 0; }
.key { font-size: .85rem; }
figure { margin: .5rem 0; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: inherit !important; }
.big { max-width: 40rem; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1rem; }
.panels figure { max-width: 36rem; margin: 0; }
.cast svg { min-width: 28rem; }
.scales > input { margin: 0 .3rem 0 0; }
.scales > label { margin-right: 1rem; font-size: .9rem; }
#scale-linear:checked ~ .scale-log, #scale-log:checked ~ .scale-linear { display: none; }
.coverage p { margin: .5rem 0 .2rem; font-size: .9rem; }
.bar { display: flex; height: .9rem; background: var(--raised); max-width: 40rem; }
.dot { display: inline-block; width: .7rem; height: .7rem; margin-right: .3rem; border-radius: 50%; }
.bar span, .dot, mark, thead th, .bar { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
details { margin: 1rem 0; }
summary { cursor: pointer; font-weight: 600; }
@media print {
  @page { size: landscape; margin: 10mm; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav, .scales > input, .scales > label { display: none; }
  .wide { overflow: visible; }
  .note, figcaption, .origins, .notes { font-size: 8pt; }
  table { font-size: 7pt; }
  thead th, td { min-width: 0; padding: .15rem .25rem; }
  .words td, .words thead th { min-width: 15mm; overflow-wrap: anywhere; }
  .cast svg { min-width: 0; }
  tbody th { position: static; min-width: 32mm; padding: .15rem .25rem; }
  figure, .coverage, tr { break-inside: avoid; }
  .big { max-width: 26rem; }
  .panels { grid-template-columns: 1fr 1fr; }
  h2, h3 { break-after: avoid; }
  details::details-content { content-visibility: visible; height: auto; }
}
"""
