"""The page's style: `page.css` with the colours, light and dark as the reader has it."""

from importlib.resources import files

from mesh.web.palette import DARK, LEVELS, LIGHT, style

PRESS = "#000000"  # words on the button that takes a machine back, whose ground is the second colour of the series


def sheet() -> str:
    series = "".join(f".f{n}{{fill:var(--series-{n})}}" for n in range(len(LIGHT.series)))
    heat = "".join(f".h{n}{{background:var(--heat-{n});color:var(--heat-text-{n})}}" for n in range(LEVELS))
    light, dark = style(LIGHT), style(DARK)
    return (
        f":root{{color-scheme:light dark;--press:{PRESS};{light}}}\n"
        f"@media(prefers-color-scheme:dark){{:root{{{dark}}}}}\n{series}\n{heat}\n"
        f"{files('mesh.web').joinpath('page.css').read_text('utf-8')}"
    )
