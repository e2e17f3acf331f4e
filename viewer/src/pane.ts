// A canvas: pixels from the engine, and on top of them lines and words that follow the mouse.

export class Pane {
  readonly canvas: HTMLCanvasElement;
  readonly context: CanvasRenderingContext2D;
  private readonly kept = document.createElement("canvas");
  private seen: [number, number] = [0, 1];
  width = 0; // CSS pixels
  height = 0;
  scale = 1;

  constructor(
    readonly name: string,
    label: string,
    readonly left: number, // CSS pixels that the picture leaves for words
    private readonly foot = 0, // likewise, below it
  ) {
    this.canvas = document.createElement("canvas");
    this.canvas.className = `pane ${name}`;
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", label);
    const context = this.canvas.getContext("2d");
    if (!context) throw new Error("this browser has no canvas");
    this.context = context;
  }

  /** As large as the page lays it out; what was drawn stays until there is better. */
  measure(): void {
    const box = this.canvas.getBoundingClientRect();
    this.scale = Math.min(window.devicePixelRatio || 1, 2);
    this.width = Math.max(box.width, this.left + 20);
    this.height = Math.max(box.height, 8);
    const width = Math.round(this.width * this.scale);
    const height = Math.round(this.height * this.scale);
    if (this.canvas.width !== width || this.canvas.height !== height) {
      this.canvas.width = width;
      this.canvas.height = height;
    }
  }

  /** Pixels of the picture, without the words' margin. */
  get pictureWidth(): number {
    return Math.max(Math.round((this.width - this.left) * this.scale), 1);
  }

  get pictureHeight(): number {
    return Math.max(Math.round(this.floor * this.scale), 1);
  }

  /** The lower edge of the picture, in CSS pixels. */
  get floor(): number {
    return Math.max(this.height - this.foot, 1);
  }

  /** The picture of what is seen from one place on the axis to another. */
  put(
    pixels: Uint32Array<ArrayBuffer>,
    width: number,
    height: number,
    seen: [number, number],
  ): void {
    this.seen = seen;
    this.kept.width = width;
    this.kept.height = height;
    const bytes = new Uint8ClampedArray(pixels.buffer);
    this.kept.getContext("2d")?.putImageData(new ImageData(bytes, width, height), 0, 0);
  }

  /** Begins anew with the picture, moved to where it belongs until there is a better one. */
  begin([from, to] = this.seen): CanvasRenderingContext2D {
    const { context, canvas } = this;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    if (this.kept.width > 0 && this.kept.height > 0) {
      const left = Math.round(this.left * this.scale);
      const perX = (canvas.width - left) / (to - from);
      const begin = left + (this.seen[0] - from) * perX;
      const width = (this.seen[1] - this.seen[0]) * perX;
      context.imageSmoothingEnabled = false;
      context.drawImage(this.kept, begin, 0, width, this.pictureHeight);
      context.clearRect(0, 0, left, canvas.height);
    }
    context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    return context;
  }

  /** Where a place between 0 and 1 is. */
  xOf(share: number): number {
    return this.left + share * (this.width - this.left);
  }

  shareOf(event: { clientX: number }): number {
    const box = this.canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - this.left) / Math.max(box.width - this.left, 1);
    return Math.max(0, Math.min(1, share));
  }

  /** 0 at the lower edge, 1 at the upper one. */
  heightOf(event: { clientY: number }): number {
    const box = this.canvas.getBoundingClientRect();
    const high = Math.max(box.height - this.foot, 1);
    return Math.max(0, Math.min(1, 1 - (event.clientY - box.top) / high));
  }
}

/** A text, cut to the room there is; nothing where there is none. A path keeps its end. */
export function label(
  context: CanvasRenderingContext2D,
  text: string,
  x: number,
  y: number,
  room: number,
  keepsEnd = false,
): void {
  if (room < 14) return;
  let letters = text.length;
  const cut = () => {
    if (letters === text.length) return text;
    return keepsEnd ? `\u2026${text.slice(-letters)}` : `${text.slice(0, letters)}\u2026`;
  };
  for (let wide = context.measureText(text).width; wide > room; ) {
    letters = Math.min(letters - 1, Math.floor((room / wide) * letters));
    if (letters < 2) return;
    wide = context.measureText(cut()).width;
  }
  context.fillText(cut(), x, y);
}
