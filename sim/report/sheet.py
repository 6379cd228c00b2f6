"""The page's style: light and dark as the reader has it, narrow screens, paper."""

from mesh.web.palette import DARK, LEVELS, LIGHT, style

_SERIES = "".join(f".s{n}{{stroke:var(--series-{n})}}.f{n}{{fill:var(--series-{n})}}" for n in range(len(LIGHT.series)))
_HEAT = "".join(f".h{n}{{fill:var(--heat-{n})}}.t{n}{{fill:var(--heat-text-{n})}}" for n in range(LEVELS))
# How an attempt ended. What lost its work is the only one in its colour, and has an edge.
_ENDS = (
    ".e0{fill:var(--series-0)}.e1{fill:var(--series-2)}.e2{fill:var(--series-1);stroke:var(--text)}"
    ".e3{fill:var(--series-3)}.e4{fill:none;stroke:var(--series-0)}"
)

SHEET = f"""
:root{{color-scheme:light dark;{style(LIGHT)}}}
@media(prefers-color-scheme:dark){{:root{{{style(DARK)}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--ground);color:var(--text);font:16px/1.5 system-ui,sans-serif}}
main,header,footer{{max-width:60rem;margin:0 auto;padding:0 1rem}}
h1{{font-size:1.7rem;line-height:1.2;margin:1.5rem 0 .5rem}}
h2{{font-size:1.35rem;margin:2.5rem 0 .5rem;padding-top:1rem;border-top:2px solid var(--grid)}}
h3{{font-size:1.05rem;margin:0}}
h1,h2,h3,p,li{{overflow-wrap:anywhere}}
a{{color:var(--link)}}
:focus-visible{{outline:3px solid var(--link);outline-offset:2px}}
.skip{{position:absolute;left:-100rem}}
.skip:focus{{left:1rem;top:1rem;background:var(--ground);padding:.5rem}}
nav ul{{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;padding:0;list-style:none}}
figure{{margin:1.75rem 0;padding:1rem;background:var(--raised);border-radius:.5rem}}
figcaption p{{margin:.25rem 0 .75rem;color:var(--muted);font-size:.92rem}}
.scroll{{overflow-x:auto}}
svg{{display:block;width:100%;min-width:40rem;height:auto;font:12px system-ui,sans-serif}}
svg text{{fill:var(--text)}}
svg .tick{{fill:var(--muted);font-size:11.5px}}
svg .title{{fill:var(--text);font-size:12.5px}}
svg .cell{{font-size:10.5px}}
.grid{{stroke:var(--grid);fill:none}}
.axis{{stroke:var(--muted);fill:none}}
.line{{fill:none;stroke-width:2;stroke-linejoin:round}}
.mark{{stroke:var(--raised);stroke-width:1}}
.idle{{fill:var(--muted);opacity:.22}}
.band{{opacity:.22}}
.stripe{{fill:var(--ground);opacity:.6}}
.away{{fill:var(--muted);opacity:.35}}
.run{{stroke-width:1}}
{_SERIES}{_HEAT}{_ENDS}
table{{border-collapse:collapse;font-size:.85rem;margin:.5rem 0}}
caption{{text-align:left;color:var(--muted)}}
th,td{{padding:.3rem .7rem .3rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--grid)}}
thead th{{border-bottom:2px solid var(--muted)}}
td.number{{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}}
tbody th{{font-weight:400}}
.scroll>table{{min-width:40rem}}
.nowrap,td.number,tbody th{{white-space:nowrap}}
.verdict{{font-weight:600;white-space:nowrap}}
.note{{color:var(--muted);font-size:.92rem}}
details{{margin-top:.75rem}}
details .scroll{{max-height:24rem;overflow:auto}}
summary{{cursor:pointer;width:max-content}}
code{{font-size:.9em;overflow-wrap:anywhere}}
footer{{color:var(--muted);font-size:.9rem;margin-top:3rem;padding-bottom:2rem}}
@media print{{
:root{{{style(LIGHT)}color-scheme:light}}
body{{font-size:10pt}}main,header,footer{{max-width:none}}
nav,details,.skip{{display:none}}
figure{{break-inside:avoid;border:1px solid var(--grid);background:none}}
h2{{break-before:page}}h2,h3,figcaption{{break-after:avoid}}
svg,.scroll>table{{min-width:0}}.scroll{{overflow:visible}}table{{font-size:.75em}}
}}
""".strip()
