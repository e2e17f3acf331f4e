"""Pages like those in which VS Code and Colab show the output of a notebook's cell."""

import json

# VS Code's notebooks render HTML inside this policy (`notebook.experimental.enableCsp`), and Colab in
# a sandboxed frame of another origin. Both put the output in by a script of theirs.
VS_CODE = (
    "default-src 'none'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' "
    "'unsafe-inline'; img-src 'self' https: http: data:; font-src 'self' https:; connect-src https:; "
    "child-src https: data:;"
)
COLAB = "allow-downloads allow-forms allow-modals allow-popups allow-scripts"


def put_in_by_a_script(output: str, policy: str = "") -> str:
    """A dark page into which a script puts the output, as notebooks do."""
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">' if policy else ""
    text = json.dumps(output).replace("<", "\\u003c")
    return (
        f"<!DOCTYPE html><html><head><meta charset=utf-8>{meta}</head>"
        "<body style='background:#1e1e1e;color:#cccccc'><div id=output></div>"
        f"<script>document.getElementById('output').innerHTML = {text}</script></body></html>"
    )
