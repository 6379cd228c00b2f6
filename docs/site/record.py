"""Record `mesh debug demo` as an animated SVG. Run `python docs/site/record.py` in the root of the repository; it takes a minute.

Lines appear ten times as fast as the command printed them. Only repeated checkpoint lines are left out (`SHOWN`). A reader
without animation sees all lines at once.
"""

import re
import subprocess
import sys
import time
from pathlib import Path
from xml.sax.saxutils import escape

OUT = Path(__file__).parents[1] / "assets" / "demo.svg"
FASTER = 10.0
WIDTH, LINE, MARGIN = 1140, 19, 16  # pixels
CHECKPOINT = re.compile(r" checkpoint \d+ saved at step ")
SHOWN = 1  # consecutive checkpoint lines to show; an undisturbed training prints nothing else
FRAME = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" xml:space="preserve" role="img">
<title>{title}</title>
<style>
rect {{ fill: #17212b }}
text {{ fill: #dce3ea; font: 13.5px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; white-space: pre }}
.command {{ fill: #7fd1ae }}
@media (prefers-reduced-motion: no-preference) {{
text {{ animation: come 0.2s backwards }}
@keyframes come {{ from {{ opacity: 0 }} }}
}}
</style>
<rect width="100%" height="100%" rx="8"/>
{lines}
</svg>
"""


def record(command: list[str]) -> list[tuple[float, str]]:
    """Run the command and return its lines with their times in seconds. Exit if it fails."""
    begun = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [(time.monotonic() - begun, line.rstrip()) for line in process.stdout]
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return lines


def shortened(lines: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return the lines with all but the first `SHOWN` consecutive checkpoint lines replaced by a count."""
    kept: list[tuple[float, str]] = []
    row = 0
    for at, line in lines:
        if CHECKPOINT.search(line):
            row += 1
            if row > SHOWN:
                continue
        elif row > SHOWN:
            kept.append((at, f"         ... {row - SHOWN} more such lines"))
            row = 0
        else:
            row = 0
        kept.append((at, line))
    return kept


def drawn(title: str, lines: list[tuple[float, str]]) -> str:
    texts = [f'<text x="{MARGIN}" y="{MARGIN + LINE * 0.8:.0f}" class="command">$ {escape(title)}</text>']
    for row, (at, line) in enumerate(lines, 1):
        if line:
            y = MARGIN + LINE * (row + 0.8)
            texts.append(
                f'<text x="{MARGIN}" y="{y:.0f}" style="animation-delay:{at / FASTER:.2f}s">{escape(line)}</text>'
            )
    height = 2 * MARGIN + LINE * (len(lines) + 1)
    return FRAME.format(width=WIDTH, height=height, title=escape(title), lines="\n".join(texts))


if __name__ == "__main__":
    OUT.write_text(drawn("mesh debug demo", shortened(record([sys.executable, "-m", "mesh.cli", "debug", "demo"]))))
