// Columns as Python packed them: base64 of deflated numbers, by bytes.

type Bytes = Uint8Array<ArrayBuffer>;

export function fromBase64(text: string): Bytes {
  const known = Uint8Array as unknown as { fromBase64?: (text: string) => Bytes };
  if (known.fromBase64) return known.fromBase64(text);
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

export async function inflate(bytes: Bytes): Promise<Bytes> {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** All first bytes, all second bytes, ...: four of these planes, from `from` on, as numbers. */
function words(planes: Uint8Array, count: number, from: number, into: Uint32Array, step: number) {
  const [a, b, c, d] = [0, 1, 2, 3].map((plane) => (from + plane) * count);
  for (let i = 0, at = from / 4; i < count; i++, at += step) {
    into[at] = planes[a + i] | (planes[b + i] << 8) | (planes[c + i] << 16) | (planes[d + i] << 24);
  }
}

export function asUint32(planes: Uint8Array): Uint32Array {
  const found = new Uint32Array(planes.length / 4);
  words(planes, found.length, 0, found, 1);
  return found;
}

export function asFloat64(planes: Uint8Array): Float64Array {
  const halves = new Uint32Array(planes.length / 4);
  const count = planes.length / 8;
  words(planes, count, 0, halves, 2);
  words(planes, count, 4, halves, 2);
  return new Float64Array(halves.buffer);
}
