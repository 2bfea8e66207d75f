"""The look of report.html, in light and in dark, on a phone and on a desk."""

STYLE = """
:root { color-scheme: light dark;
  --paper: #ffffff; --panel: #f6f7f9; --ink: #16202c; --muted: #5b6876; --rule: #dde2e8;
  --train: #2563b0; --train-pale: #bcd2ec; --valid: #d9650b; --good: #187a4a; --warn: #a85b00;
  --heat: 37, 99, 176; --wrong: 217, 101, 11; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #12161c; --panel: #1a2028; --ink: #e6eaf0; --muted: #9aa6b4; --rule: #2d3641;
  --train: #6aa9f2; --train-pale: #2c4666; --valid: #f59a4b; --good: #4cc38a; --warn: #f0b35a;
  --heat: 92, 158, 235; --wrong: 245, 154, 75; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 36px 24px 72px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 48px 0 12px; padding-top: 14px; border-top: 1px solid var(--rule); }
h3 { font-size: 14px; font-weight: 600; margin: 0 0 6px; }
p { margin: 0 0 12px; max-width: 75ch; }
h3.apart { margin-top: 20px; }
.muted { color: var(--muted); } .small { font-size: 13px; }
code, .mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono",
  monospace; font-size: 13px; overflow-wrap: anywhere; }
.state { display: inline-block; padding: 1px 10px; border-radius: 999px; font-size: 12.5px;
  font-weight: 600; border: 1px solid currentColor; vertical-align: 4px; margin-left: 8px; }
.state.finished { color: var(--good); } .state.unfinished { color: var(--warn); }
.tiles { display: grid; gap: 12px; margin: 22px 0 16px;
  grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
.tile { background: var(--panel); border-radius: 10px; padding: 13px 16px; }
.tile b { display: block; font-size: 25px; font-weight: 650; line-height: 1.3;
  font-variant-numeric: tabular-nums; }
.tile span { color: var(--muted); font-size: 13px; display: block; line-height: 1.4;
  white-space: pre-line; }
.plots { display: grid; gap: 26px 32px; margin-bottom: 26px; }
.plots.wide { grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
.plots.small { grid-template-columns: repeat(auto-fit, minmax(min(100%, 290px), 1fr)); }
.plot svg { width: 100%; height: auto; display: block; }
.plots.small svg { max-width: 400px; }
.plot svg text { font-family: inherit !important; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; }
th { text-align: left; font-weight: 600; color: var(--muted); }
table.list { width: 100%; }
.list td, .list th { padding: 5px 16px 5px 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; overflow-wrap: anywhere; }
.list td:first-child { width: 30%; min-width: 9em; }
.list tr.changed td { font-weight: 600; } .list tr.changed td:last-child { color: var(--train); }
.number, .list .number { text-align: right; font-variant-numeric: tabular-nums; }
.matrix td, .matrix th { padding: 5px 7px; text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.matrix td { min-width: 44px; border: 1px solid var(--paper); }
.matrix td.zero { color: transparent; }
.matrix thead th { vertical-align: bottom; height: 1px; padding-bottom: 8px; }
.matrix thead th span { writing-mode: vertical-rl; transform: rotate(180deg); }
.matrix tbody th { position: sticky; left: 0; background: var(--paper); color: var(--ink);
  font-weight: 500; }
.gallery { display: grid; gap: 18px 14px;
  grid-template-columns: repeat(auto-fill, minmax(128px, 1fr)); }
.gallery figure { margin: 0; }
.gallery img { width: 100%; aspect-ratio: 1; object-fit: contain; border-radius: 8px;
  background: var(--panel); display: block; }
.gallery img.few { image-rendering: pixelated; }
.gallery figcaption { font-size: 12.5px; line-height: 1.4; margin-top: 6px;
  overflow-wrap: anywhere; }
.gallery .said { color: var(--valid); font-weight: 600; }
.two { display: grid; gap: 0 40px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
@media (max-width: 560px) { main { padding: 22px 14px 48px; } h1 { font-size: 23px; }
  .tiles { grid-template-columns: repeat(2, 1fr); } .tile b { font-size: 20px; }
  .gallery { grid-template-columns: repeat(auto-fill, minmax(96px, 1fr)); } }
@media print { .tile { border: 1px solid var(--rule); } figure, .plot { break-inside: avoid; } }
"""
