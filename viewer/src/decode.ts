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

/** All first bytes, all second bytes, ...: back to numbers. */
function joined(planes: Uint8Array, width: number): ArrayBuffer {
  const count = planes.length / width;
  const bytes = new Uint8Array(planes.length);
  for (let plane = 0; plane < width; plane++) {
    const from = plane * count;
    for (let i = 0, to = plane; i < count; i++, to += width) bytes[to] = planes[from + i];
  }
  return bytes.buffer;
}

export const asUint32 = (planes: Uint8Array) => new Uint32Array(joined(planes, 4));
export const asFloat64 = (planes: Uint8Array) => new Float64Array(joined(planes, 8));
