"""The frame of a page: one file with its style, no script, no network."""

import importlib.resources


def html_page(title: str, header: str, main: str) -> str:
    """A whole page.

    Args:
      title: text, already harmless inside HTML.
      header: HTML below the title.
      main: HTML of the page.

    Returns:
      The page as text.
    """
    style = importlib.resources.files("harnessrl_jax.monitor").joinpath("style.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{style}</style></head><body>"
        f"<header><div><h1>{title}</h1>{header}</div></header><main>{main}</main></body></html>\n"
    )
