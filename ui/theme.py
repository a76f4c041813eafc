"""How the page looks: system fonts, one stylesheet, nothing fetched from elsewhere."""

import gradio as gr

SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif")
MONO = ("ui-monospace", "SF Mono", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace")
THEME = gr.themes.Base(primary_hue="emerald", neutral_hue="stone", radius_size="md", font=SANS, font_mono=MONO)
# A linked sheet, as the framework would rewrite the selectors of one that it is given.
HEAD = (
    '<meta name="color-scheme" content="light dark"><link rel="stylesheet" href="/ui/style.css">'
    '<script type="module" src="/ui/keys.js"></script>'
)
