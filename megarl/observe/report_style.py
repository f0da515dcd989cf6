"""The look of report.html: light, system fonts, two columns that become one on a narrow screen."""

STYLE = """
:root { color-scheme: light; --ink: #1c2430; --soft: #5c6878; --line: #dfe4ea; --paper: #ffffff; --ground: #f5f6f8; --accent: #0b63b5; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans",
  "Liberation Sans", "DejaVu Sans", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 36px 24px 64px; }
header { margin-bottom: 20px; }
header .run { color: var(--soft); font-size: 14px; overflow-wrap: anywhere; margin: 0 0 4px; }
h1 { font-size: 34px; line-height: 1.2; letter-spacing: -0.015em; margin: 0 0 8px; text-wrap: balance; }
h2 { font-size: 20px; letter-spacing: -0.01em; margin: 44px 0 14px; }
h3 { font-size: 15px; margin: 0; font-weight: 600; }
p { margin: 0; }
.sub { color: var(--soft); }
.good { color: #14713d; } .bad { color: #b3261e; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; margin: 20px 0 12px; }
.tile, .card { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; min-width: 0; }
.tile b { display: block; font-size: 18px; white-space: nowrap; font-weight: 600; letter-spacing: -0.01em;
  font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.two { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 12px; }
.card { display: flex; flex-direction: column; } .card > svg:last-child { margin-top: auto; }
.card > .sub { font-size: 13px; line-height: 1.4; margin: 2px 0 8px; }
.head { display: flex; justify-content: space-between; gap: 12px; align-items: baseline; }
.head b { font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap; }
.head b i { font-style: normal; font-weight: 400; color: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 13px; color: var(--soft); margin: 0 0 6px; padding: 0;
  list-style: none; }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 12px; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .grid { stroke: #e8ecf0; stroke-width: 1; } svg .axis { stroke: #aeb7c2; stroke-width: 1; }
svg polyline { fill: none; stroke-linejoin: round; stroke-linecap: round; }
svg .thick { stroke-width: 2; } svg .thin { stroke-width: 1; opacity: 0.3; } svg .band { opacity: 0.13; }
svg .hover { fill: transparent; } svg .hover:hover { fill: rgba(28, 36, 48, 0.06); }
svg.bar { height: 14px; border-radius: 4px; margin: 4px 0 10px; }
.empty { color: var(--soft); font-size: 14px; padding: 28px 0; text-align: center; background: var(--ground); border-radius: 6px; }
.note { border-left: 4px solid #c77700; background: #fff8ec; padding: 10px 14px; border-radius: 0 8px 8px 0; margin: 12px 0;
  font-size: 14px; }
dl { display: grid; grid-template-columns: minmax(110px, max-content) minmax(0, 1fr); gap: 3px 16px; margin: 8px 0 0; font-size: 14px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
table { width: 100%; border-collapse: collapse; font-size: 14px; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 13px; padding: 6px 10px 6px 0;
  border-bottom: 1px solid var(--line); }
td { padding: 8px 10px 8px 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
tr:last-child td { border-bottom: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.samples { table-layout: fixed; margin-top: 8px; }
.samples th:nth-child(1) { width: 31%; } .samples th:nth-child(3) { width: 14%; } .samples th:nth-child(4) { width: 118px; }
.samples th:nth-child(5) { width: 76px; }
.samples td:last-child, .samples th:last-child { padding-right: 0; }
.text { font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", "DejaVu Sans Mono", monospace;
  white-space: pre-wrap;
  overflow-wrap: anywhere; unicode-bidi: isolate; max-height: 220px; overflow: auto; }
.text em { color: var(--soft); font-style: normal; background: var(--ground); border-radius: 4px; padding: 0 5px; }
.pill { display: inline-block; border-radius: 99px; padding: 1px 9px; font-size: 12.5px; font-weight: 600; color: #fff; max-width: 100%; }
.card + .card { margin-top: 12px; } .two > .card + .card { margin-top: 0; }
details { margin-top: 12px; } summary { cursor: pointer; color: var(--accent); font-weight: 600; }
details pre { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; overflow: auto;
  max-height: 70vh; }
footer { color: var(--soft); font-size: 13px; margin-top: 40px; }
@media (max-width: 760px) {
  main { padding: 22px 14px 40px; } h1 { font-size: 25px; } h2 { margin-top: 32px; }
  .two { grid-template-columns: minmax(0, 1fr); } .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px; }
  .tile { padding: 10px 12px; } .tile b { font-size: 17px; } .card { padding: 12px; } svg text { font-size: 14px; }
  dl { grid-template-columns: minmax(84px, max-content) minmax(0, 1fr); gap: 3px 12px; }
  .samples, .samples tbody, .samples tr, .samples td { display: block; width: 100%; } .samples thead { display: none; }
  .samples tr { padding: 10px 0; border-bottom: 1px solid var(--line); } .samples tr:last-child { border-bottom: 0; }
  .samples td { border: 0; padding: 3px 0; text-align: left; } .samples td::before { content: attr(data-name); display: block;
    color: var(--soft); font-size: 12px; }
}
@media print { body { background: #fff; } .tile, .card { break-inside: avoid; } .text { max-height: none; } }
"""
