"""The site and what a notebook shows, in a real browser: wide, and as narrow as a phone.

    make docs-shots

It opens each page of the site that `make docs` has made at both widths. It says which pages scroll
sideways, and which ask anything of another machine, and ends with status 1 if there are any.
Pictures of some pages are left in ``build/shots``, to be looked at. It takes Chromium, from the
packages of the distribution: ``apt-get install chromium``, or another one as ``CHROMIUM=``.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch

import zfunc as zf

ROOT = Path(__file__).resolve().parents[1]
SITE, SHOTS = ROOT / "build" / "site", ROOT / "build" / "shots"
WIDTHS = (1280, 360)
HEIGHT = 900
NOTEBOOK = "/__notebook"  # pages that are no files of the site
SHOWN = ("/", "/tour/", "/transforms/shard/", "/api/steps/", "/families/", NOTEBOOK)
# Within a frame, since a browser's window may not be as narrow as a phone.
MEASURE = """<!doctype html><body><script>
async function look(path, width) {
  const frame = document.createElement('iframe');
  frame.style = `width: ${width}px; height: 900px; border: 0`;
  document.body.append(frame);
  await new Promise(done => { frame.onload = done; frame.src = path; });
  await new Promise(done => setTimeout(done, 100));
  const whole = frame.contentDocument.documentElement;
  const asked = frame.contentWindow.performance.getEntriesByType('resource').map(x => x.name);
  const away = asked.filter(x => !x.startsWith(location.origin) && !x.startsWith('data:'));
  frame.remove();
  return {path, width, scrolls: whole.scrollWidth, away};
}
(async () => {
  const found = [];
  for (const path of PATHS) for (const width of WIDTHS) found.push(await look(path, width));
  const told = document.createElement('pre');
  told.id = 'found';
  told.textContent = JSON.stringify(found);
  document.body.append(told);
})();
</script></body>"""


class Pages(SimpleHTTPRequestHandler):
    """The site's files, and pages that put one into a frame."""

    notebook = ""

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if asked.path == "/__measure":
            made = MEASURE.replace("PATHS", json.dumps([*paths(), NOTEBOOK]))
            self._send(made.replace("WIDTHS", json.dumps(WIDTHS)))
        elif asked.path == "/__frame":
            path, width = (parse_qs(asked.query)[key][0] for key in ("path", "width"))
            style = f"width: {width}px; height: {HEIGHT}px; border: 0"
            self._send(f'<body style="margin: 0"><iframe style="{style}" src="{path}"></iframe>')
        elif asked.path == NOTEBOOK:
            self._send(self.notebook)
        else:
            super().do_GET()

    def _send(self, page: str) -> None:
        data = page.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing: what was found is said at the end."""


def paths() -> list[str]:
    """All pages of the site, as a browser asks for them."""
    found = sorted(SITE.rglob("index.html"))
    return ["/" + "".join(f"{part}/" for part in x.parent.relative_to(SITE).parts) for x in found]


def notebook() -> str:
    """What a notebook shows of a model, a step, a state, a description and a plan of memory."""
    layers = (torch.nn.TransformerEncoderLayer(32, 4, 64) for _ in range(6))
    model = zf.functionalize(torch.nn.Sequential(*layers))
    tx = zf.optim.adamw(1e-3)

    def loss(params: Any, x: Any) -> Any:
        return model.apply(params, x).square().mean()

    step = zf.shard(zf.train_step(loss, tx), stage=3)
    plain, batch = zf.TrainState.create(model.params, tx), torch.randn(4, 8, 32)
    state, foreseen = step.place(plain), zf.foresee(step, plain, batch, device="cpu")
    shown = [model, step, plain, state, step.describe(batch), foreseen]
    return '<!doctype html><meta charset="utf-8">' + "\n".join(map(_cell, shown))


def _cell(value: Any) -> str:
    """A value as Jupyter shows the last one of a cell."""
    rich = getattr(value, "_repr_html_", None)
    return f"<div>{rich()}</div>" if rich else f"<pre>{html.escape(repr(value))}</pre>"


@contextmanager
def served() -> Iterator[str]:
    """The address of the site."""
    Pages.notebook = notebook()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Pages, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def browse(browser: str, address: str, *options: str) -> str:
    """What Chromium prints of a page; nothing but this machine can be reached from it."""
    with tempfile.TemporaryDirectory() as profile:
        ran = subprocess.run(
            [
                *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *(f"--user-data-dir={profile}", "--no-first-run", "--disable-dev-shm-usage"),
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
                *("--virtual-time-budget=600000", *options, address),
            ],
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
        )
    return ran.stdout


def main() -> None:
    browser = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chrome")
    if browser is None:
        sys.exit("there is no Chromium: apt-get install chromium, or say where: CHROMIUM=/path")
    if not (SITE / "index.html").is_file():
        sys.exit(f"there is no site in {SITE}: make docs")
    SHOTS.mkdir(parents=True, exist_ok=True)
    with served() as address:
        told = re.search(
            r'<pre id="found">(.*?)</pre>',
            browse(browser, f"{address}/__measure", "--dump-dom"),
            re.DOTALL,
        )
        if told is None:
            sys.exit("the browser did not come to the end of the pages")
        found = json.loads(html.unescape(told[1]))
        for path in SHOWN:
            for width in WIDTHS:
                name = path.strip("/_").replace("/", "-") or "front"
                browse(
                    browser,
                    f"{address}/__frame?path={path}&width={width}",
                    f"--screenshot={SHOTS / f'{name}-{width}.png'}",
                    f"--window-size={max(width, 500)},{HEIGHT}",
                )
    wide = [f"{x['path']} at {x['width']} px is {x['scrolls']} px wide"
            for x in found if x["scrolls"] > x["width"]]  # fmt: skip
    away = [f"{x['path']} asks for {name}" for x in found for name in x["away"]]
    print("\n".join([*wide, *away, f"{len(found)} pages and widths, pictures in {SHOTS}"]))
    sys.exit(1 if wide or away else 0)


if __name__ == "__main__":
    main()
