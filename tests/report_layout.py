"""How a page is laid out: its landmarks as boxes, its colours, and its picture as letters.

Boxes are compared with room for another font, pictures with room for another browser's edges.
"""

from typing import Any

Layout = dict[str, Any]

LANDMARKS = {
    "title": "h1",
    "tools": ".tools",
    "sentence": ".first .sentence",
    "bar": ".first .amount-bar",
    "legend": ".first .chips",
    "card": ".first .card",
    "tabs": "[role=tablist]",
    "controls": ".views > .controls",
    "strip": "canvas.strip",
    "bands": "canvas.bands",
    "area": "canvas.area",
    "panel": ".panel",
}
COLUMNS, ROWS = 48, 8  # of the picture as letters
_WIDE = 0.02  # of the window, by which boxes may differ from left to right
_LINES = 26  # pixels: one more line of text
_TALL = 0.12  # of a place or height
_CELLS = 0.05  # of the picture's letters

_FOUND = """([landmarks, colors, columns, rows]) => {
  const boxes = {};
  for (const [name, selector] of Object.entries(landmarks)) {
    [...document.querySelectorAll(selector)].forEach((one, i) => {
      const {x, y, width, height} = one.getBoundingClientRect();
      if (width && height) boxes[i ? `${name} ${i + 1}` : name] =
        [x + scrollX, y + scrollY, width, height].map(Math.round);
    });
  }
  const style = (selector, name) =>
    getComputedStyle(document.querySelector(selector))[name].match(/[\\d.]+/g).map(Number);
  const parts = [...document.querySelectorAll('.first .amount-bar .large .part')];
  const canvas = document.querySelector('canvas.area');
  const picture = [];
  if (canvas.offsetWidth) {
    const left = Math.round((canvas.offsetWidth < 420 ? 60 : 70) * canvas.width / canvas.offsetWidth);
    const high = canvas.height * (canvas.offsetHeight - 18) / canvas.offsetHeight;
    const step = (canvas.width - left) / columns;
    for (let row = 0; row < rows; row++) {
      let letters = '';
      for (let column = 0; column < columns; column++) {
        const x = Math.floor(left + (column + 0.5) * step), y = Math.floor((row + 0.5) * high / rows);
        const {data} = canvas.getContext('2d').getImageData(x - 2, y - 2, 5, 5);
        const counts = {};
        for (let i = 0; i < data.length; i += 4) {
          const at = colors.findIndex((c) => [0, 1, 2].every((k) => Math.abs(c[k] - data[i + k]) < 9));
          const letter = data[i + 3] > 200 && at >= 0 ? String.fromCharCode(97 + at) : '.';
          counts[letter] = (counts[letter] || 0) + 1;
        }
        letters += Object.entries(counts).sort((a, b) => b[1] - a[1])[0][0];
      }
      picture.push(letters);
    }
  }
  return {
    boxes, picture,
    colors: {
      ground: style('body', 'backgroundColor'), ink: style('body', 'color'),
      card: style('.card', 'backgroundColor'),
      bar: parts.map((one) => getComputedStyle(one).backgroundColor.match(/\\d+/g).map(Number)),
    },
  };
}"""


def found(tab: Any, colors: dict[str, str]) -> Layout:
    """The layout of the page as it is shown now."""
    palette = [[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in colors.values()]
    layout: Layout = tab.evaluate(_FOUND, [LANDMARKS, palette, COLUMNS, ROWS])
    return layout


def differences(kept: Layout, now: Layout, width: int) -> list[str]:
    """What differs by more than another font or browser explains."""
    said = [
        f"{name} is {'gone' if name in kept['boxes'] else 'new'}"
        for name in sorted(kept["boxes"].keys() ^ now["boxes"].keys())
    ]
    for name, was in kept["boxes"].items():
        box = now["boxes"].get(name, was)
        for i, what in enumerate(("left", "top", "width", "height")):
            room = _LINES + _TALL * was[i] if i % 2 else _WIDE * width
            if name in ("title", "tools") and i % 2 == 0:
                room = width  # as wide as their words
            if abs(box[i] - was[i]) > room:
                said.append(f"{name}: {what} {box[i]} and not {was[i]}")
    said += [
        f"colour of {name}: {now['colors'][name]} and not {color}"
        for name, color in kept["colors"].items()
        if now["colors"][name] != color
    ]
    before, after = "".join(kept["picture"]), "".join(now["picture"])
    other = sum(a != b for a, b in zip(before, after, strict=False))
    if len(before) != len(after) or other > _CELLS * len(before):
        said.append(f"{other} of {len(before)} parts of the picture have another colour")
    return said


# What overlaps, sticks out, or is cut without a way to read it.
FAULTS = """() => {
  const said = [], texts = [];
  const clips = (one) => getComputedStyle(one).overflowX !== 'visible';
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode()); ) {
    const one = node.parentElement, text = node.textContent.trim();
    if (!text || !one.checkVisibility({visibilityProperty: true, opacityProperty: true})) continue;
    if (one.closest('script, style, option, .hidden, .tip, .told, dialog, caption, noscript')) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    let window_ = {left: -1e9, right: 1e9, top: -1e9, bottom: 1e9}, scrolls = false;
    for (let at = one; at && at !== document.body; at = at.parentElement) {
      if (!clips(at)) continue;
      const box = at.getBoundingClientRect();
      window_ = {left: Math.max(window_.left, box.left), right: Math.min(window_.right, box.right),
                 top: Math.max(window_.top, box.top), bottom: Math.min(window_.bottom, box.bottom)};
      if (/auto|scroll/.test(getComputedStyle(at).overflowX)) scrolls = true;
      if (getComputedStyle(at).textOverflow === 'ellipsis' && at.scrollWidth > at.clientWidth + 1
          && !at.closest('[title]')) said.push(`"${text}" is cut, and nothing has it whole`);
    }
    for (const box of range.getClientRects()) {
      const seen = {left: Math.max(box.left, window_.left), right: Math.min(box.right, window_.right),
                    top: Math.max(box.top, window_.top), bottom: Math.min(box.bottom, window_.bottom)};
      if (seen.right - seen.left < 1 || seen.bottom - seen.top < 1) continue;
      if (!scrolls && (seen.right > innerWidth + 1 || seen.left < -1))
        said.push(`"${text}" sticks out`);
      texts.push({text, one, ...seen});
    }
  }
  for (let i = 0; i < texts.length; i++) for (let k = i + 1; k < texts.length; k++) {
    const a = texts[i], b = texts[k];
    if (a.one === b.one || a.one.contains(b.one) && a.text === b.text) continue;
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 2 && high > 5) said.push(`"${a.text}" is on top of "${b.text}"`);
  }
  if (document.documentElement.scrollWidth > innerWidth) said.push('the page is wider than the window');
  return [...new Set(said)];
}"""
